//! Completed records in memory and in a cache that gates share, in front of a store.
//!
//! A completed record does not change until it is removed, or superseded past its ttl. So a retry need not ask the store
//! for what it or another gate has just read. Where other processes write to the store too, one of them may remove a
//! record: the store and the cache tell of that as soon as they can, and what was read is believed for a while only.
//!
//! Nothing that is found here gives the right to execute: whoever finds nothing asks the store. What stands in the shared
//! cache is authenticated with a secret that only its gates have, and dated by the store's clock: what is stale, changed or
//! foreign is nothing. Beside completed records it holds hints that a key is in flight. A hint is believed for a moment
//! only, and only by a request like the one that made it: by a different one the store is asked, for the attempt may just
//! have ended. Whoever asks again for a claim that may have happened is never answered here: it may be its own that stands.

mod beside;
mod floor;
mod hearing;
mod remote;
mod seal;
mod shelf;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::beside::{Beside, Claimed};
use self::floor::Floors;
use self::hearing::Hears;
pub use self::remote::{Failure, Operation, Remote};
use self::remote::{Found, Way};
use self::seal::Seal;
use self::shelf::{Known, Shelf};
use super::{
    Claim, End, Error, ErrorKind, Filter, Fresh, Held, Identity, IdentityChange, Listed, NamespaceRules, Origin, Page,
    Removal, Settled, Store,
};
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};

/// How long a hint that a key is in flight is believed.
const HINT: Duration = Duration::from_secs(1);

/// How long the store's time is known without asking: the clocks of two machines drift apart.
const CLOCK: Duration = Duration::from_secs(600);

/// So many attempts of this process are known by what they claimed. Answers of others are kept once somebody reads them.
const RUNNING: usize = 65_536;

/// What this process keeps in its own memory.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The most records.
    pub most_entries: usize,
    /// The most bytes of records, about.
    pub most_bytes: u64,
    /// How long what was read is believed, where others write to the store; nothing where nobody does.
    pub max_age: Option<Duration>,
}

/// A cache that gates share.
pub struct Shared {
    /// It.
    pub remote: Arc<dyn Remote>,
    /// Under which its values are authenticated: what the gates have in common, of which it is enough that nobody who writes
    /// to the cache knows all.
    pub secrets: [Arc<[u8]>; 2],
    /// The store's time, and when it was asked for that.
    pub time: (Timestamp, Instant),
}

/// What came of asking for a completed record: the label `result` of `oncegate_cache_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// This process had it in memory.
    Memory,
    /// The shared cache had it.
    Hit,
    /// The shared cache had a hint that it is in flight.
    InFlight,
    /// Nobody had it.
    Miss,
    /// What the shared cache had was too old, or may have been removed meanwhile.
    Stale,
    /// What the shared cache had was not written by a gate of this store, for this record.
    Invalid,
    /// The shared cache was not asked, because it hardly ever has the answer.
    NotAsked,
    /// The shared cache was not asked, because it does not answer.
    Away,
    /// The shared cache did not answer in time.
    Late,
    /// The shared cache failed.
    Failed,
}

/// A store whose completed records are remembered.
pub struct Cached {
    inner: Arc<dyn Store>,
    shelf: Arc<Shelf>,
    shared: Option<Arc<Beside>>,
    tell: Box<dyn Fn(Answered) + Send + Sync>,
    /// The tasks that hear of removals; they end with the store.
    _hearing: JoinSet<()>,
}

impl Answered {
    /// All there are.
    pub const ALL: [Self; 10] = [
        Self::Memory,
        Self::Hit,
        Self::InFlight,
        Self::Miss,
        Self::Stale,
        Self::Invalid,
        Self::NotAsked,
        Self::Away,
        Self::Late,
        Self::Failed,
    ];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Hit => "hit",
            Self::InFlight => "in-flight",
            Self::Miss => "miss",
            Self::Stale => "stale",
            Self::Invalid => "invalid",
            Self::NotAsked => "not-asked",
            Self::Away => "away",
            Self::Late => "late",
            Self::Failed => "failed",
        }
    }
}

impl Cached {
    /// In front of `inner`, with a cache that is shared where there is one; `tell` hears what comes of each question. Where
    /// [`Settings::max_age`] is not set, nobody else may write to `inner`, whose time then runs as the monotonic clock does.
    /// Its tasks run on the runtime that this is called on.
    #[must_use]
    pub fn new(
        inner: Arc<dyn Store>,
        settings: &Settings,
        shared: Option<Shared>,
        tell: impl Fn(Answered) + Send + Sync + 'static,
    ) -> Self {
        let shelf = Arc::new(Shelf::new(settings));
        let told_by_store = inner.removals().filter(|_| settings.max_age.is_some());
        let told_by_cache = shared.as_ref().map(|shared| shared.remote.removals());
        let mut hearing = JoinSet::new();
        let beside = |shared: Shared| Beside {
            way: Way::to(shared.remote),
            seal: Seal::new(&shared.secrets),
            max_age: settings.max_age.unwrap_or(Duration::MAX),
            time: Mutex::new(shared.time),
            running: Mutex::default(),
            uncertain: Mutex::default(),
            floors: Mutex::new(Floors::new(settings.max_age.unwrap_or(Duration::MAX), shared.time.0)),
        };
        let shared = shared.map(beside).map(Arc::new);
        let hears = Hears::new(&shelf, shared.as_ref());
        told_by_store.into_iter().for_each(|told| drop(hearing.spawn(hears.clone().of_store(told))));
        told_by_cache.into_iter().for_each(|told| drop(hearing.spawn(hears.clone().of_cache(told))));
        Self { inner, shelf, shared, tell: Box::new(tell), _hearing: hearing }
    }

    /// What the shared cache knows of a record that a request like `fresh` asks for.
    async fn ask(&self, id: RecordId, fresh: &Fresh, removals: u64) -> Option<Claim> {
        let Some(beside) = &self.shared else {
            (self.tell)(Answered::Miss);
            return None;
        };
        let (answered, claim) = match beside.way.get(id).await {
            Found::Value(value) => beside.believe(id, &value, fresh),
            Found::Nothing => (Answered::Miss, None),
            Found::NotAsked => (Answered::NotAsked, None),
            Found::Away => (Answered::Away, None),
            Found::Late => (Answered::Late, None),
            Found::Failed => (Answered::Failed, None),
        };
        // It may be this one that was taken away meanwhile.
        let claim = claim.filter(|_| self.shelf.counted() == removals);
        let is_left = claim.is_none() && matches!(answered, Answered::Hit | Answered::InFlight);
        (self.tell)(if is_left { Answered::Stale } else { answered });
        let (known, now) = claim?;
        let record = known.record.clone();
        if answered == Answered::Hit {
            self.shelf.keep(id, known, removals);
        }
        Some(Claim::Exists { record, now })
    }

    fn is_uncertain(&self, attempt: Attempt) -> bool {
        self.shared.as_ref().is_some_and(|beside| beside.uncertain().contains(&attempt))
    }

    /// Notes whether it is known now what an attempt has claimed, or is not known after an error.
    fn note(&self, attempt: Attempt, is_certain: bool, error: Option<&Error>) {
        let Some(beside) = &self.shared else { return };
        if is_certain {
            beside.uncertain().remove(&attempt);
        } else if let Some(Error::Indeterminate(_)) = error {
            beside.uncertain().insert(attempt);
        }
    }

    /// Keeps what the store had, here and for the other gates.
    fn keep(&self, id: RecordId, record: &Record, now: Timestamp, asked: Instant, removals: u64) {
        self.shelf.keep(id, Known { record: record.clone(), read_at: now, asked }, removals);
        self.put(id, record, now, now, removals);
    }

    /// Has a record kept for the other gates, as of `read_at`, and says whether it may be.
    fn put(&self, id: RecordId, record: &Record, read_at: Timestamp, now: Timestamp, removals: u64) -> bool {
        let Some(beside) = &self.shared else { return false };
        let Some((value, life)) = beside.value(id, record, read_at, now) else { return false };
        self.shelf.unless_removed(removals, || beside.way.put(id, value, life))
    }

    /// An attempt of this process has ended, and the store has its end.
    fn ended(&self, id: RecordId, attempt: Attempt, end: &End, until: Timestamp, removals: u64) {
        let Some(beside) = &self.shared else { return };
        let claimed = beside.take(id, attempt);
        if matches!(end, End::Complete { .. }) {
            match &claimed {
                Some(claimed) => beside.believe_only(id, attempt, claimed.at),
                // Its own values may be refused as well, and are read again.
                None => beside.believe_later(id),
            }
        }
        let is_put = match (end, claimed) {
            (End::Complete { answer, .. }, Some(Claimed { at, asked, head, .. })) => {
                let answer = Some(answer.clone());
                let record = Record { attempt, state: State::Completed, claimed_at: at, until, head, answer };
                // The store did not tell its time: it was as late as the claim at least.
                self.put(id, &record, at, at.plus(asked.elapsed()), removals)
            }
            _ => false,
        };
        if !is_put {
            // Whoever reads a completed one will keep it; until then, nobody is to hear that it is in flight.
            beside.way.drop(id);
        }
    }
}

#[async_trait]
impl Store for Cached {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let found = self.shelf.find(id);
        if found.is_some() {
            (self.tell)(Answered::Memory);
        }
        found
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        let removals = self.shelf.counted();
        let is_first = !self.is_uncertain(fresh.attempt);
        if is_first && let Some(found) = self.ask(id, &fresh, removals).await {
            return Ok(found);
        }
        let asked = Instant::now();
        let claimed = self.inner.claim(id, fresh.clone()).await;
        self.note(fresh.attempt, claimed.is_ok(), claimed.as_ref().err());
        let claimed = claimed?;
        match &claimed {
            Claim::Exists { record, now } => {
                if let Some(beside) = &self.shared {
                    beside.told(*now, asked);
                }
                self.keep(id, record, *now, asked, removals);
            }
            Claim::Inserted(at) => {
                if let Some(beside) = &self.shared {
                    // One that is asked for again was made before.
                    if is_first {
                        beside.told(*at, asked);
                    }
                    beside.claimed(id, fresh, *at, asked);
                }
            }
        }
        Ok(claimed)
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        let attempt = fresh.attempt;
        let superseded = self.inner.supersede(id, seen, fresh).await;
        // Where something else stands, that may be of this attempt as well.
        self.note(attempt, matches!(superseded, Ok(true)), superseded.as_ref().err());
        if !matches!(superseded, Ok(false)) {
            self.shelf.forget(id);
            if let Some(beside) = &self.shared {
                beside.way.drop(id);
            }
        }
        superseded
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        let removals = self.shelf.counted();
        let settled = self.inner.settle(id, attempt, end.clone()).await?;
        self.note(attempt, true, None);
        match &settled {
            Settled::Done { until } => self.ended(id, attempt, &end, *until, removals),
            Settled::Superseded { .. } => {
                if let Some(beside) = &self.shared {
                    drop(beside.take(id, attempt));
                }
            }
        }
        Ok(settled)
    }

    async fn renew(&self, held: Vec<Held>) -> Result<Vec<RecordId>, Error> {
        self.inner.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.inner.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        // Only what has expired, which is not recalled any more.
        self.inner.sweep(limit).await
    }

    async fn changed(&self, id: RecordId) {
        self.inner.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.inner.removals()
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        self.inner.get(id).await
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        self.inner.list(filter, after, limit).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        let (inner, shelf, shared) = (Arc::clone(&self.inner), Arc::clone(&self.shelf), self.shared.clone());
        shelf.forget(id);
        // To its end, even where whoever asked for it goes: it would happen all the same.
        let removing = tokio::spawn(async move {
            let removed = inner.remove(id).await;
            shelf.forget(id);
            if let Some(beside) = shared {
                beside.believe_later(id);
                beside.way.forget(id);
            }
            removed
        });
        removing.await.unwrap_or_else(|error| Err(Error::indeterminate(ErrorKind::Other, error)))
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.inner.count().await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<Identity>) -> Result<Vec<IdentityChange>, Error> {
        self.inner.changes(origins, rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.inner.adopt(origins, rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.inner.identities().await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.inner.ping().await
    }

    async fn close(&self) {
        if let Some(beside) = &self.shared {
            beside.way.forgets().await;
        }
        self.inner.close().await;
    }
}
