//! Durable conditional storage of records.
//!
//! A store knows bytes, tokens and time. It does not know what a lease or a fingerprint means, and it decides
//! nothing: it returns the current record, and writes on condition.
//!
//! Every backend runs the one suite in [`contract`].

mod adoption;
pub mod audit;
mod batcher;
pub mod cached;
pub mod clock;
pub mod contract;
mod counting;
pub mod deliveries;
mod lifecycle;
mod listing;
pub mod memory;
pub mod metered;
mod origin;
mod outage;
pub mod postgres;
mod quota;
pub mod redis;
mod removals;
pub mod resealing;
pub mod sealed;
mod server_clock;
#[cfg(test)]
#[path = "../../tests/servers/mod.rs"]
pub(crate) mod servers;
pub mod sharded;
pub mod sqlite;
pub mod unreliable;
mod waiters;

pub use adoption::{NamespaceRules, RulesPeriod, is_orphaned};
pub use audit::AuditLog;
pub use counting::{Counting, PAUSE_FOR_EACH};
pub use deliveries::Deliveries;
pub use listing::{Chunk, Cursor, Filter, IdPrefix, Page, Since};
pub use origin::{Origin, OriginId};
pub use quota::SharedQuotas;
pub use removals::Removal;
pub use resealing::Resealing;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp, Version};

/// How long after it was sent PostgreSQL and Redis still carry out a claim, by the server's clock as the gate last read it.
pub const CLAIM_EXPIRY: Duration = Duration::from_secs(5);

/// A store of records. All times are the store's own.
///
/// An operation that was cancelled (its future dropped) may still happen, as after [`Error::Indeterminate`].
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The word for this kind of store in metrics: `memory`, `sqlite`, `postgres` or `redis`.
    fn kind(&self) -> &'static str;

    /// A completed record that has not expired, and the store's time, if both are known without asking the store.
    fn recall(&self, _id: RecordId) -> Option<(Record, Timestamp)> {
        None
    }

    /// Writes a fresh in-flight record unless there is a record, in one round trip. Durable when it returns.
    ///
    /// Retrying with the same attempt after an indeterminate error is safe: if the current record is in flight under
    /// `fresh.attempt`, the answer is `Inserted`.
    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error>;

    /// Replaces the record by a fresh in-flight one if its version is still `seen`. Durable when it returns.
    ///
    /// True as well where the record is already in flight under `fresh.attempt`.
    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error>;

    /// Ends an attempt: the record must still be `attempt`'s, in flight or unknown. Durable when it returns.
    ///
    /// Safe to repeat: returns [`Settled::Done`] also if the same end with the same bytes was written before, or if a release
    /// finds no record.
    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error>;

    /// Extends the lease of each in-flight record that is still its attempt's to `now + lease`, and returns the ids of
    /// these, in no order. Skips the others, and may skip one that something else in the store holds at the moment.
    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error>;

    /// Turns up to `limit` in-flight records whose lease is past into unknown ones that keep their attempt and
    /// expire after their unknown ttl. Returns their ids.
    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error>;

    /// Removes up to `limit` completed and unknown records that have expired, and returns how many. It keeps a record whose id
    /// has a delivery, so that the outcome stays until the delivery is gone.
    async fn sweep(&self, limit: usize) -> Result<usize, Error>;

    /// Returns when the attempt of an id may have ended, in any process; never returns if the store has no
    /// notifications. Callers must also poll from time to time.
    async fn changed(&self, _id: RecordId) {
        std::future::pending().await
    }

    /// The removals of records from now on, in any process: most of them, soon after they happen; and the starts and
    /// ends of the feed. `None` if the store has no notifications.
    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        None
    }

    /// What counts quotas for all gates of the store together, where there is a Redis for it.
    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        None
    }

    /// The store beneath a cache, for records that are never replayed.
    fn beneath(&self) -> Option<Arc<dyn Store>> {
        None
    }

    /// Reads and replaces the stored form of its records, so that they can be encrypted anew. Only a store that lies beneath the
    /// encryption has it.
    fn resealing(&self) -> Option<&dyn Resealing> {
        None
    }

    /// Where it keeps what operators do; `None` if it keeps nothing of that.
    fn audit(&self) -> Option<&dyn AuditLog> {
        None
    }

    /// Where it keeps requests that are delivered later; `None` if it keeps none.
    fn deliveries(&self) -> Option<&dyn Deliveries> {
        None
    }

    /// The record of an id.
    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error>;

    /// Whether a transaction holds the record of an id that is not the store's own: one of an upstream that has called `complete()` or
    /// `assert_current()` on PostgreSQL. [`Store::settle`] waits until it has ended.
    async fn is_held(&self, _id: RecordId) -> Result<bool, Error> {
        Ok(false)
    }

    /// Records that pass `filter`, newest first: by when they were claimed, and those of the same millisecond by their ids,
    /// the greatest first. At most `limit` (at least 1) after `after`, without their answers. A page may hold fewer, or
    /// none, and not be the last. A store may look at every record for each page, and refuses where that takes too long.
    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error>;

    /// Records that pass `filter`, in the order of their ids, starting after `after`: at most `limit` (at least 1),
    /// without their answers. All of them are found in one pass over the records, which [`Store::list`] may need for each
    /// page. A chunk may hold fewer, or none, and not be the last: where few records pass, a store looks for them only for
    /// so long at once.
    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error>;

    /// Removes the record of an attempt, whatever its state. Returns whether it was there. The record of another attempt stays,
    /// however late the store carries this out. A cache before the store forgets the record, and so do those of other gates, once they
    /// hear of it.
    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error>;

    /// How many records stand in each state, in the order of [`crate::idempotency::record::State::ALL`].
    async fn count(&self) -> Result<[u64; 3], Error>;

    /// The changes that [`Store::adopt`] would refuse, and whose records are forgotten if they are accepted. Changes
    /// nothing, and delays no other call.
    ///
    /// An identity on file that is not among `rules` is one whose rules changed, or whose namespace or service is gone
    /// or has another name. Each that has live records (not expired) is returned, in the order of service and namespace.
    ///
    /// A store that is one gate's alone compares all rules on file. One that services share compares the rules on
    /// file of the services in `origins` and `rules`, and leaves all others alone.
    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error>;

    /// Replaces the rules on file by `rules` with their descriptions, and adds `origins` to the known ones. If there are
    /// [`Store::changes`], returns them; without `accept_change` it then writes nothing.
    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error>;

    /// The rules that are on file and those that were, of every service, in the order of service and namespace: to tell
    /// which records are orphaned, see [`is_orphaned`].
    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error>;

    /// Whether requests can be served, for readiness. Fails while claims would fail: where the last writes failed, it tries
    /// one, and so finds out by itself when they work again. A store whose users can be denied one and not the other tries
    /// a settle too.
    async fn ping(&self) -> Result<(), Error>;

    /// Whether this store is the one that keeps the record of this id. One of several databases may have given the id to
    /// another: a record that it does not have may then be there.
    async fn owns(&self, _id: RecordId) -> Result<bool, Error> {
        Ok(true)
    }

    /// The databases that did not answer the last [`Store::ping`], where a store has several and others did.
    fn away(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// The databases that do not answer now, where a store has several. What changes many records asks this first: it would
    /// change those of the others.
    async fn silent(&self) -> Vec<Arc<str>> {
        Vec::new()
    }

    /// Finishes what was accepted, and closes. Later calls fail.
    async fn close(&self);
}

/// A new in-flight record.
#[derive(Clone, Debug)]
pub struct NewRecord {
    /// Its attempt.
    pub attempt: AttemptToken,
    /// Where it comes from.
    pub origin: OriginId,
    /// How long its lease is.
    pub lease: Duration,
    /// How long it answers retries, counted from its claim, if its upstream completes it in the store itself.
    pub ttl: Duration,
    /// How long it is kept, counted from when it turns unknown, if it does.
    pub unknown_ttl: Duration,
    /// The encoded head of the record.
    pub head: Bytes,
}

/// The result of a claim.
#[derive(Clone, Debug)]
pub enum Claim {
    /// There was no record: the fresh one is inserted, claimed at this time.
    Inserted(Timestamp),
    /// There is a record.
    Exists {
        /// The current record.
        record: Record,
        /// The store's time.
        now: Timestamp,
    },
}

/// What an attempt writes at its end.
#[derive(Clone, Debug)]
pub enum Settlement {
    /// The record completes.
    Complete {
        /// The encoded answer.
        answer: Bytes,
        /// When the record expires.
        expiry: Expiry,
    },
    /// The record is removed.
    Release,
    /// The record turns unknown, and expires after its unknown ttl.
    Hold {
        /// The encoded cause, which the record keeps in the place of an answer.
        cause: Bytes,
    },
}

impl Settlement {
    /// What the record keeps: the answer, or why there is none.
    fn answer(&self) -> Option<&Bytes> {
        match self {
            Self::Complete { answer, .. } | Self::Hold { cause: answer } => Some(answer),
            Self::Release => None,
        }
    }
}

/// When a completed record expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// This long after its claim. If that time is past already, this long after now: a record that expires as it is written
    /// would let its retry run again.
    FromClaim(Duration),
    /// This long after now.
    FromNow(Duration),
}

/// How long those wait for [`Store::settle`] who end the attempt of another: longer than a large answer takes. Only a transaction that
/// holds the record takes longer.
pub const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The result of a settlement.
#[derive(Clone, Debug)]
pub enum Settled {
    /// It is written.
    Done {
        /// When the record expires; the store's time for a release.
        until: Timestamp,
    },
    /// The record is no longer this attempt's to end: superseded, removed, or already ended otherwise.
    NotCurrent {
        /// The current record.
        record: Option<Record>,
    },
}

/// A lease to renew.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRenewal {
    /// The record.
    pub id: RecordId,
    /// Its attempt.
    pub attempt: AttemptToken,
    /// How long it is extended, from now.
    pub lease: Duration,
}

/// A record with where it comes from.
#[derive(Clone, Debug)]
pub struct RecordEntry {
    /// Its id.
    pub id: RecordId,
    /// Where it comes from; `None` if the store no longer knows its origin.
    pub origin: Option<Origin>,
    /// The record.
    pub record: Record,
    /// The store's time.
    pub now: Timestamp,
}

/// The rules that a namespace's identities are made by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceRuleSet {
    /// The service.
    pub service: Arc<str>,
    /// The namespace.
    pub namespace: Arc<str>,
    /// Their digest, which alone tells whether rules are the same. See [`crate::idempotency::identity`].
    pub digest: [u8; 32],
    /// The digests of the rules by which records may have been made besides: those with another id secret.
    pub others: Vec<[u8; 32]>,
    /// Their description, which the store keeps and does not read. See [`crate::idempotency::description`].
    pub description: Option<Arc<str>>,
}

/// A namespace with live records that were made by rules which are not given any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityChange {
    /// Its service.
    pub service: Arc<str>,
    /// The namespace.
    pub namespace: Arc<str>,
    /// The digest of the rules on file.
    pub digest: [u8; 32],
    /// Their description; `None` if an older version of oncegate adopted them without one.
    pub description: Option<Arc<str>>,
    /// The live keys of each route that has any, in the order of the routes' names.
    pub live: Vec<LiveKeys>,
}

/// The live records of a route, and the requests that it accepted and that have no record yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveKeys {
    /// The route that claimed them.
    pub route: Arc<str>,
    /// How many they are.
    pub keys: u64,
    /// How many of them are in flight or still to be delivered.
    pub in_flight: u64,
    /// When the last of the others expires.
    pub until: Option<Timestamp>,
}

impl IdentityChange {
    /// How many keys live.
    #[must_use]
    pub fn keys(&self) -> u64 {
        self.live.iter().map(|live| live.keys).sum()
    }
}

/// A store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It did not happen, and will not.
    #[error("the store failed: {0}")]
    Determinate(#[source] Cause),
    /// It may have happened, or may yet.
    #[error("the store failed, and the operation may have happened: {0}")]
    Indeterminate(#[source] Cause),
}

/// Why a store operation failed.
#[derive(Debug, thiserror::Error)]
#[error("{kind}: {source}", kind = self.kind.as_str())]
pub struct Cause {
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The detail; never a secret, a body or a key.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The kind of a failure: the `kind` label of `oncegate_store_errors_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// It is closed or cannot be reached.
    Unavailable,
    /// It has no room.
    Full,
    /// It did not answer in time.
    Timeout,
    /// Another session has the record or a table of its database locked.
    Locked,
    /// Its data cannot be decoded.
    Corrupt,
    /// The record is another database's.
    Moved,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Unavailable, Self::Full, Self::Timeout, Self::Locked, Self::Corrupt, Self::Moved, Self::Other];

    /// Whether it is worth while to try again soon: the store is away, or busy with something else.
    #[must_use]
    pub fn is_passing(self) -> bool {
        matches!(self, Self::Unavailable | Self::Timeout | Self::Locked)
    }

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Full => "full",
            Self::Timeout => "timeout",
            Self::Locked => "locked",
            Self::Corrupt => "corrupt",
            Self::Moved => "moved",
            Self::Other => "other",
        }
    }
}

impl Error {
    /// It did not happen, and will not.
    #[must_use]
    pub fn determinate(kind: ErrorKind, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Determinate(Cause { kind, source: source.into() })
    }

    /// It may have happened, or may yet.
    #[must_use]
    pub fn indeterminate(kind: ErrorKind, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Indeterminate(Cause { kind, source: source.into() })
    }

    /// The store is closed.
    fn closed() -> Self {
        Self::determinate(ErrorKind::Unavailable, "the store is closed")
    }

    /// Why.
    #[must_use]
    pub fn cause(&self) -> &Cause {
        match self {
            Self::Determinate(cause) | Self::Indeterminate(cause) => cause,
        }
    }
}

impl RecordEntry {
    /// Whether it counts as live where identities change: in flight, or not yet expired.
    #[must_use]
    pub fn is_live(&self) -> bool {
        lifecycle::is_live(self.record.state, self.record.until, self.now)
    }
}
