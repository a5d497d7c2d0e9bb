//! Records in PostgreSQL, for any number of gates at once.
//!
//! Operations of every request go through two batchers, one for claims and one for settlements, so that neither waits
//! for the other; each statement carries all queued operations. Rare operations go through a small pool.
//!
//! - Every operation is one call of a function of the schema, see `migrations/postgres`. So it also works behind
//!   poolers in transaction mode.
//! - Of several hosts, the one in use is the first on which a commit returned, and it is left when commits do not return any
//!   more; see `host_selection`. All connections are to this one.
//! - All times are the server's.
//! - A statement that came back with an error of level ERROR did nothing; after anything else that is not an answer,
//!   it may have. So may one whose wait for a synchronous standby was cancelled, which the server reports in a
//!   warning.
//! - A completed record that is visible may not be durable: its commit may be on the primary only. The store hands one out
//!   only after it has seen it durable. A record that is unknown here, or whose lease is past, may be renewed
//!   or completed elsewhere, where this server was left behind: it is handed out after a commit that returns as well. So is an
//!   accepted request that another process kept.
//! - A record that an upstream's transaction holds is skipped by every operation that could make others wait.
//! - While settlements fail, claims are refused; see `write_check`.

mod adopt;
mod audit;
mod connect;
mod deliveries;
mod description;
mod durable;
mod error;
mod host_selection;
mod hosts;
pub mod layout;
mod lineage;
mod listener;
mod listing;
pub mod moving;
mod operation;
mod pool;
mod ranges;
mod row;
mod schema;
mod session;
mod supersede;
#[cfg(test)]
mod tests;
pub mod tls;
mod write_check;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use quick_cache::sync::Cache;
use tokio::sync::{Semaphore, broadcast};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_postgres::types::{ToSql, Type};

use self::connect::Connector;
pub use self::description::{Description, Standby};
pub use self::error::OpenError;
use self::host_selection::Hosts;
pub use self::layout::Opened;
use self::operation::{ClaimOperation, ClaimReply, Claims, SettleOperation, SettleReply, SettleRequest, Settlements};
use self::pool::Pool;
pub use self::schema::{Migration, migrate, pending};
use self::session::CallError;
use self::write_check::WriteHealth;
use super::batcher::Batcher;
use super::sharded::layout::{Found, Misfit};
use super::sharded::not_all;
use super::waiters::Waiters;
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Resealing, Settled, Settlement,
    Store,
};
use crate::idempotency::record::{AttemptToken, RecordId, State, Version};

/// How long a record that another transaction holds is left alone, at first and at most.
const MIN_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_millis(500);

/// The lock keeps the record the attempt's own until the function has removed it. A record that another transaction changes is not
/// waited for.
const REMOVE: &str = "SELECT oncegate.remove_v1(id) FROM \
    (SELECT id FROM oncegate.record WHERE id = $1 AND attempt = $2 FOR UPDATE NOWAIT) AS own";

/// The function also says so of a record that is not there.
const IS_HELD: &str = "SELECT EXISTS (SELECT FROM oncegate.record WHERE id = $1) AND oncegate.is_held_v1($1)";

/// The settings of a PostgreSQL store.
#[derive(Clone)]
pub struct Settings {
    /// The servers, the credentials and the database. The primary is looked for among the hosts unless this says
    /// otherwise.
    pub servers: tokio_postgres::Config,
    /// The TLS configuration; `None` if `servers` has TLS off.
    pub tls: Option<rustls::ClientConfig>,
    /// The most connections that this process opens. At least [`Settings::FEWEST_CONNECTIONS`].
    pub connections: usize,
}

/// A store in a PostgreSQL database.
pub struct Postgres {
    claims: Arc<Batcher<Claims>>,
    settlements: Arc<Batcher<Settlements>>,
    pool: Pool,
    write_health: Arc<WriteHealth>,
    waiters: Arc<Waiters>,
    /// Serialises registrations for notifications.
    registering: Semaphore,
    /// The tasks that listen, choose the host and find out what works; they end with the store.
    _tasks: JoinSet<()>,
    /// Up to where this process has swept in this round: what was removed stays in the index for a while, and would
    /// be scanned again by each batch.
    swept_to: AtomicI64,
    takes: deliveries::Takes,
    /// Attempts whose completion this process has seen durable: it settled them itself, or flushed the log after it read
    /// them. A commit whose wait for a synchronous standby was cancelled is visible on the primary and may be nowhere else:
    /// a record that is merely visible may be gone after a failover.
    durable: Cache<AttemptToken, ()>,
    /// The same of accepted requests, by their tokens.
    kept: Cache<AttemptToken, ()>,
    hosts: Arc<Hosts>,
    is_closing: AtomicBool,
    description: Description,
    opened: Opened,
    /// Whether it was the whole store when it was opened.
    is_alone: bool,
}

impl Settings {
    /// How few connections a gate works with: for claims, for settlements, for notifications, and for all else.
    pub const FEWEST_CONNECTIONS: usize = 4;

    /// How many connections a gate opens by default.
    pub const USUAL_CONNECTIONS: usize = 8;
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("connections", &self.connections).finish_non_exhaustive()
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("description", &self.description).finish_non_exhaustive()
    }
}

/// Describes the server and its durability risks.
///
/// # Errors
/// See [`OpenError`].
pub async fn describe(settings: &Settings) -> Result<Description, OpenError> {
    let session = Connector::new(settings).connect_unchecked().await?;
    Description::of(&session, settings).await
}

impl Postgres {
    /// Connects to the database, whose schema must be there. Its tasks run on the runtime that this is called on.
    ///
    /// # Errors
    /// See [`OpenError`]; [`OpenError::is_passing`] says whether it may help to try again.
    pub async fn open(settings: &Settings) -> Result<Self, OpenError> {
        let store = Self::open_member(settings, &|found| layout::check_alone(settings, found)).await?;
        Ok(Self { is_alone: true, ..store })
    }

    /// The same for one of several databases. `check` judges what it says of itself.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn open_member(
        settings: &Settings,
        check: &(dyn Fn(&Found) -> Result<(), Misfit> + Sync),
    ) -> Result<Self, OpenError> {
        let connector = Connector::for_records(settings);
        let unchecked = connector.connect_unchecked().await?;
        let database = layout::find_by(unchecked.client()).await?;
        let description = Description::of(&unchecked, settings).await?;
        check(&database.found)?;
        let opened = database.opened;
        drop(unchecked);
        let claiming = connector.connect(Claims::QUERIES).await?;
        write_check::check_writes(&claiming).await.map_err(CallError::into_open_error)?;
        let settling = connector.connect(Settlements::QUERIES).await?;

        // A quarter for claims, a quarter for settlements, one to listen, and the rest.
        let quarter = (settings.connections / 4).max(1);
        let rest = settings.connections.saturating_sub(2 * quarter + 1).max(1);
        let waiters = Arc::<Waiters>::default();
        let claims = Arc::new(Batcher::open(Claims(connector.clone()), Some(claiming), quarter));
        let settlements = Arc::new(Batcher::open(Settlements(connector.clone()), Some(settling), quarter));
        let write_health = Arc::new(WriteHealth::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(listener::run(connector.clone(), Arc::clone(&waiters)));
        tasks.spawn(connector.clone().run_host_selection());
        let proving = (Arc::clone(&write_health), Arc::clone(&claims), Arc::clone(&settlements));
        tasks.spawn(async move { proving.0.run(&proving.1, &proving.2).await });
        let hosts = Arc::clone(connector.hosts());
        Ok(Self {
            claims,
            settlements,
            pool: Pool::new(connector, rest, description.is_direct)?,
            write_health,
            waiters,
            registering: Semaphore::new(1),
            _tasks: tasks,
            swept_to: AtomicI64::new(0),
            takes: deliveries::Takes::default(),
            durable: Cache::new(durable::REMEMBERED),
            kept: Cache::new(durable::REMEMBERED_DELIVERIES),
            hosts,
            is_closing: AtomicBool::new(false),
            description,
            opened,
            is_alone: false,
        })
    }

    /// What was read of all records. An error where it was the whole store, and is one of several databases by now.
    async fn of_all<T>(&self, read: T) -> Result<T, Error> {
        let is_all = !self.is_alone || layout::is_alone(&self.pool).await?;
        if is_all { Ok(read) } else { Err(not_all()) }
    }

    /// The server, as of the start.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The identity of this store, and its time when it was opened.
    #[must_use]
    pub fn opened(&self) -> Opened {
        self.opened
    }

    /// The error for claims while settlements fail.
    fn settle_refusal(&self) -> Option<Error> {
        self.write_health.refusal().or_else(|| self.settlements.refusal())
    }

    /// Submits an operation that makes a claim.
    async fn submit_claim(&self, operation: ClaimOperation) -> Result<ClaimReply, Error> {
        match self.settle_refusal() {
            Some(refusal) => Err(refusal),
            None => self.claims.submit(operation).await,
        }
    }

    fn ensure_open(&self) -> Result<(), Error> {
        if self.is_closing.load(Ordering::Relaxed) { Err(Error::closed()) } else { Ok(()) }
    }
}

#[async_trait]
impl Store for Postgres {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        loop {
            let ClaimReply::Claim { claim, is_flushed, host } =
                self.submit_claim(ClaimOperation::Claim { id, fresh: fresh.clone() }).await?
            else {
                return Err(unexpected_reply());
            };
            let Claim::Exists { record, now } = claim else {
                self.write_health.record_claim();
                return Ok(claim);
            };
            if is_flushed {
                self.remember(&record);
            } else if self.ensure_durable(id, &record, now, Some(host)).await? {
                continue;
            }
            if record.state == State::Completed && record.answer.is_none() {
                // The answer is large, and was left out.
                match self.get(id).await? {
                    Some(RecordEntry { record, now, .. }) => return Ok(Claim::Exists { record, now }),
                    None => continue,
                }
            }
            return Ok(Claim::Exists { record, now });
        }
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        match self.submit_claim(ClaimOperation::Supersede { id, seen, fresh }).await? {
            ClaimReply::Superseded(superseded) => Ok(superseded),
            ClaimReply::Claim { .. } | ClaimReply::Flushed { .. } | ClaimReply::WritesChecked => {
                Err(unexpected_reply())
            }
        }
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let (mut pause, mut skips_locked) = (MIN_BACKOFF, false);
        loop {
            let ended = self
                .settlements
                .submit(SettleOperation::Settle(SettleRequest { id, attempt, end: end.clone(), skips_locked }))
                .await;
            match ended.inspect_err(|_| self.write_health.suspect())? {
                SettleReply::Settled(settled) => {
                    if let Settled::Done { .. } = settled {
                        self.write_health.record_settle();
                    }
                    // All that the statement wrote or read is durable: see `settle_v1`.
                    match &settled {
                        Settled::Done { .. } if matches!(end, Settlement::Complete { .. }) => {
                            self.durable.insert(attempt, ())
                        }
                        Settled::NotCurrent { record: Some(record) } if record.state == State::Completed => {
                            self.durable.insert(record.attempt, ());
                        }
                        Settled::Done { .. } | Settled::NotCurrent { .. } => {}
                    }
                    return Ok(settled);
                }
                SettleReply::Renewed(_) | SettleReply::Accepted(_) | SettleReply::Finished(_) => {
                    return Err(unexpected_reply());
                }
                SettleReply::Locked => {
                    skips_locked = true;
                    sleep(pause).await;
                    pause = (pause * 2).min(MAX_BACKOFF);
                }
            }
        }
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        if held.is_empty() {
            return self.ensure_open().map(|()| Vec::new());
        }
        match self.settlements.submit(SettleOperation::Renew(held)).await? {
            SettleReply::Renewed(renewed) => Ok(renewed),
            _ => Err(unexpected_reply()),
        }
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.ensure_open()?;
        let limit = row::count(limit);
        let rows = self.pool.write("SELECT oncegate.expire_leases_v2($1)", &[(&limit, Type::INT8)]).await?;
        rows.iter().map(|row| row::id(row, 0).map_err(|_| unexpected_reply())).collect()
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.ensure_open()?;
        let begin = self.swept_to.load(Ordering::Relaxed);
        let most = row::count(limit);
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&begin, Type::INT8), (&most, Type::INT8)];
        let rows = self.pool.write("SELECT swept, reached FROM oncegate.sweep_v1($1, $2)", &values).await?;
        let swept = count_of(&rows, 0)?;
        // A finished round starts over next time: records that were locked are still due.
        let reached = if swept < limit { 0 } else { rows[0].get::<_, Option<i64>>(1).unwrap_or_default() };
        self.swept_to.store(reached, Ordering::Relaxed);
        Ok(swept)
    }

    async fn changed(&self, id: RecordId) {
        let Some(waiter) = self.waiters.join(id) else { return std::future::pending().await };
        let ask = async {
            // One at a time, so that many waiters do not occupy the whole pool.
            let Ok(_turn) = self.registering.acquire().await else { return std::future::pending().await };
            match self.pool.write("SELECT oncegate.await_v1($1)", &[(&&id.0[..], Type::BYTEA)]).await {
                Ok(rows) => rows.first().is_some_and(|row| row.get(0)),
                // Waiters poll on their own.
                Err(_) => std::future::pending().await,
            }
        };
        waiter.notified_after(ask).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        Some(self.waiters.removals())
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        Some(self)
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        Some(self)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        Some(self)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.ensure_open()?;
        loop {
            let host = self.hosts.chosen();
            let listed = listing::get(&self.pool, id).await?;
            match &listed {
                Some(RecordEntry { record, now, .. }) if self.ensure_durable(id, record, *now, host).await? => {}
                _ => return Ok(listed),
            }
        }
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        self.ensure_open()?;
        let rows = self.pool.query_unless_locked(IS_HELD, &[(&&id.0[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.ensure_open()?;
        self.of_all(listing::list(&self.pool, &filter, after, limit).await?).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.ensure_open()?;
        self.of_all(listing::scan(&self.pool, &filter, after, limit).await?).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.ensure_open()?;
        let rows =
            self.pool.write_unless_locked(REMOVE, &[(&&id.0[..], Type::BYTEA), (&&attempt.0[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.ensure_open()?;
        let rows = self.pool.write("SELECT in_flight, completed, unknown FROM oncegate.count_v1()", &[]).await?;
        let count = |column| count_of(&rows, column).map(|count| count as u64);
        self.of_all([count(0)?, count(1)?, count(2)?]).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.ensure_open()?;
        self.of_all(adopt::changes(&self.pool, &origins, &rules).await?).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.ensure_open()?;
        adopt::adopt(&self.pool, &origins, &rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.ensure_open()?;
        adopt::identities(&self.pool).await
    }

    async fn owns(&self, id: RecordId) -> Result<bool, Error> {
        self.ensure_open()?;
        let rows = self.pool.query("SELECT oncegate.owns_v1($1)", &[(&&id.0[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn ping(&self) -> Result<(), Error> {
        self.ensure_open()?;
        if let Some(refusal) = self.settle_refusal().or_else(|| self.claims.refusal()) {
            return Err(refusal);
        }
        if self.write_health.is_recent_success() {
            return Ok(());
        }
        let proven = write_check::check_all(&self.claims, &self.settlements).await;
        match &proven {
            Ok(()) => self.write_health.record_success(),
            // Claims are also refused if nothing can be settled.
            Err(_) => self.write_health.suspect(),
        }
        proven
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        tokio::join!(self.claims.close(), self.settlements.close());
        self.pool.close();
    }
}

fn count_of(rows: &[tokio_postgres::Row], column: usize) -> Result<usize, Error> {
    let counted = rows.first().map(|found| row::number(found, column)).transpose();
    let counted = counted.map_err(|unreadable| Error::indeterminate(ErrorKind::Corrupt, unreadable))?;
    Ok(counted.and_then(|counted| usize::try_from(counted).ok()).unwrap_or_default())
}

fn unexpected_reply() -> Error {
    Error::indeterminate(ErrorKind::Other, "the reply does not belong to the request")
}
