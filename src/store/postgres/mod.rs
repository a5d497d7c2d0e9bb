//! Records in PostgreSQL, for any number of gates at once.
//!
//! What runs for every request goes through two lanes, one for claims and one for endings, so that neither waits for
//! the other; each statement carries all that waits. What is rare goes through a small pool.
//!
//! - Everything is one call of a function of the schema, see `migrations/postgres`. It holds behind poolers that hand out
//!   another server connection for each transaction too.
//! - Of several hosts, the one in use is the first on which a commit returned, and it is left when commits do not return any
//!   more; see `choosing`. All connections are to this one.
//! - All times are the server's.
//! - A statement that came back with an error of level ERROR did nothing; after anything else that is not an answer, it
//!   may have. So may one whose wait for a synchronous standby was broken off, of which the server tells in a warning.
//! - A completed record that is visible may not be durable: its commit may be on the primary only. The store hands one out
//!   only after it has seen it durable, see `durable`. A record that is unknown here, or whose lease is past, may be renewed
//!   or completed elsewhere, where this server was left behind: it is handed out after a commit that returns as well.
//! - A record that an upstream's transaction holds is left alone by all that could make others wait.
//! - Where endings fail, nothing is claimed until one works; see `proof`.

mod adopt;
mod asking;
mod choosing;
mod connect;
mod description;
mod driver;
mod durable;
mod ending;
mod error;
mod hosts;
mod lane;
mod lineage;
mod listener;
mod listing;
mod pool;
mod proof;
mod queue;
mod row;
mod schema;
#[cfg(test)]
mod tests;
pub mod tls;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Semaphore, broadcast};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_postgres::types::{ToSql, Type};

use self::asking::Asking;
use self::choosing::Hosts;
use self::connect::{Connector, Failed};
pub use self::description::{Description, Standby};
use self::durable::Durable;
use self::ending::{Ending, Work};
pub use self::error::OpenError;
use self::lane::Lane;
use self::pool::Pool;
use self::proof::Proofs;
use self::queue::{Operation, closed};
pub use self::schema::{Migration, migrate, pending};
use super::waiters::Waiters;
use super::{
    Claim, End, Error, ErrorKind, Filter, Fresh, Held, Identity, IdentityChange, Listed, NamespaceRules, Origin, Page,
    Removal, Settled, Store,
};
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};

/// How long a record that another transaction holds is left alone, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Which database, and how much of it to use.
#[derive(Clone)]
pub struct Settings {
    /// Where the servers are, as whom to connect and to which database. The primary is looked for among the hosts unless
    /// this says otherwise.
    pub servers: tokio_postgres::Config,
    /// With what to encrypt connections; nothing where `servers` has TLS off.
    pub tls: Option<rustls::ClientConfig>,
    /// The most connections that this process opens. At least [`Settings::FEWEST_CONNECTIONS`].
    pub connections: usize,
}

/// What tells a store from all others, and its time when it was opened.
#[derive(Clone, Copy)]
pub struct Opened {
    /// Its id.
    pub id: [u8; 16],
    /// What its gates have in common, and nobody else knows.
    pub secret: [u8; 32],
    /// Its time.
    pub time: Timestamp,
    /// When it was asked for its time.
    pub asked: Instant,
}

/// A store in a PostgreSQL database.
pub struct Postgres {
    claims: Arc<Lane<Asking>>,
    endings: Arc<Lane<Work>>,
    pool: Pool,
    proofs: Arc<Proofs>,
    waiters: Arc<Waiters>,
    /// Whose turn it is to ask to be told.
    asking: Semaphore,
    /// The tasks that listen, choose the host and find out what works; they end with the store.
    _tasks: JoinSet<()>,
    /// Up to where this process has swept in this round: what was removed stays in the index for a while, and would be
    /// walked past again by each batch.
    swept_to: AtomicI64,
    /// What need not be flushed before it is handed out.
    durable: Durable,
    hosts: Arc<Hosts>,
    is_closing: AtomicBool,
    description: Description,
    opened: Opened,
}

impl Settings {
    /// How few connections a gate works with: for claims, for endings, to be told of endings, and for all else.
    pub const FEWEST_CONNECTIONS: usize = 4;

    /// How many connections a gate opens unless it is told.
    pub const USUAL_CONNECTIONS: usize = 8;
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("connections", &self.connections).finish_non_exhaustive()
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("time", &self.time).finish_non_exhaustive()
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("description", &self.description).finish_non_exhaustive()
    }
}

/// What answers at the other end, and what it risks.
///
/// # Errors
/// See [`OpenError`].
pub async fn describe(settings: &Settings) -> Result<Description, OpenError> {
    let session = Connector::new(settings).connect_unproven().await?;
    Description::of(&session, settings).await
}

impl Postgres {
    /// Connects to the database, whose schema must be there. Its tasks run on the runtime that this is called on.
    ///
    /// # Errors
    /// See [`OpenError`]; only after [`OpenError::Unreachable`] it may help to try again.
    pub async fn open(settings: &Settings) -> Result<Self, OpenError> {
        let connector = Connector::for_records(settings);
        let unproven = connector.connect_unproven().await?;
        schema::check(unproven.client()).await?;
        let description = Description::of(&unproven, settings).await?;
        let opened = schema::store(unproven.client()).await?;
        drop(unproven);
        let claiming = connector.connect(Asking::CALLS).await?;
        proof::prove(&claiming).await.map_err(Failed::into_open_error)?;
        let ending = connector.connect(Work::CALLS).await?;

        // A quarter for claims, a quarter for endings, one to listen, and the rest.
        let quarter = (settings.connections / 4).max(1);
        let rest = settings.connections.saturating_sub(2 * quarter + 1).max(1);
        let waiters = Arc::<Waiters>::default();
        let claims = Arc::new(Lane::open(connector.clone(), claiming, quarter));
        let endings = Arc::new(Lane::open(connector.clone(), ending, quarter));
        let proofs = Arc::new(Proofs::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(listener::run(connector.clone(), Arc::clone(&waiters)));
        tasks.spawn(connector.clone().keep_choosing());
        let proving = (Arc::clone(&proofs), Arc::clone(&claims), Arc::clone(&endings));
        tasks.spawn(async move { proving.0.keep_proving(&proving.1, &proving.2).await });
        let hosts = Arc::clone(connector.hosts());
        Ok(Self {
            claims,
            endings,
            pool: Pool::new(connector, rest)?,
            proofs,
            waiters,
            asking: Semaphore::new(1),
            _tasks: tasks,
            swept_to: AtomicI64::new(0),
            durable: Durable::default(),
            hosts,
            is_closing: AtomicBool::new(false),
            description,
            opened,
        })
    }

    /// What answers at the other end, as of the start.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// What tells this store from all others, and its time when it was opened.
    #[must_use]
    pub fn opened(&self) -> Opened {
        self.opened
    }

    /// Why nothing is to be claimed, though claims may work: it could not be settled.
    fn cannot_settle(&self) -> Option<Error> {
        self.proofs.refusal().or_else(|| self.endings.refusal())
    }

    /// Has something carried out that makes a claim.
    async fn ask(&self, asking: Asking) -> Result<asking::Said, Error> {
        match self.cannot_settle() {
            Some(refusal) => Err(refusal),
            None => self.claims.ask(asking).await,
        }
    }

    fn still_open(&self) -> Result<(), Error> {
        if self.is_closing.load(Ordering::Relaxed) { Err(closed()) } else { Ok(()) }
    }

    /// Returns once a record that was read on a host can be relied on, and says whether the host was left meanwhile, so that
    /// it is to be read again. One flush serves all that wait for one.
    ///
    /// A flush on an old primary, whose standby was promoted away, does not return.
    async fn make_sure(
        &self,
        id: RecordId,
        record: &Record,
        now: Timestamp,
        host: Option<usize>,
    ) -> Result<bool, Error> {
        let is_sure = match record.state {
            State::Completed => self.durable.knows(record.attempt),
            State::InFlight => record.until > now,
            State::Unknown => false,
        };
        if !is_sure {
            let asking::Said::Flushed { host: flushed } = self.claims.ask(Asking::Flush { id }).await? else {
                return Err(confused());
            };
            if host != Some(flushed) {
                return Ok(true);
            }
        }
        self.remember(record);
        Ok(false)
    }

    /// Notes that a record was seen durable.
    fn remember(&self, record: &Record) {
        if record.state == State::Completed {
            self.durable.remember(record.attempt);
        }
    }
}

#[async_trait]
impl Store for Postgres {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        loop {
            let asking::Said::Claim { claim, is_flushed, host } =
                self.ask(Asking::Claim { id, fresh: fresh.clone() }).await?
            else {
                return Err(confused());
            };
            let Claim::Exists { record, now } = claim else {
                self.proofs.claimed();
                return Ok(claim);
            };
            if is_flushed {
                self.remember(&record);
            } else if self.make_sure(id, &record, now, Some(host)).await? {
                continue;
            }
            if record.state == State::Completed && record.answer.is_none() {
                // The answer is large, and was left out.
                match self.get(id).await? {
                    Some(Listed { record, now, .. }) => return Ok(Claim::Exists { record, now }),
                    None => continue,
                }
            }
            return Ok(Claim::Exists { record, now });
        }
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        match self.ask(Asking::Supersede { id, seen, fresh }).await? {
            asking::Said::Superseded(superseded) => Ok(superseded),
            asking::Said::Claim { .. } | asking::Said::Flushed { .. } | asking::Said::Proven => Err(confused()),
        }
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        let (mut pause, mut is_careful) = (FIRST_PAUSE, false);
        loop {
            let ended = self.endings.ask(Work::End(Ending { id, attempt, end: end.clone(), is_careful })).await;
            match ended.inspect_err(|_| self.proofs.doubt())? {
                ending::Said::Settled(settled) => {
                    if let Settled::Done { .. } = settled {
                        self.proofs.settled();
                    }
                    // What the statement wrote or saw is durable: see `settle_v1`.
                    match &settled {
                        Settled::Done { .. } if matches!(end, End::Complete { .. }) => self.durable.remember(attempt),
                        Settled::Superseded { record: Some(record) } if record.state == State::Completed => {
                            self.durable.remember(record.attempt);
                        }
                        Settled::Done { .. } | Settled::Superseded { .. } => {}
                    }
                    return Ok(settled);
                }
                ending::Said::Renewed(_) => return Err(confused()),
                ending::Said::Held => {
                    is_careful = true;
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn renew(&self, held: Vec<Held>) -> Result<Vec<RecordId>, Error> {
        if held.is_empty() {
            return self.still_open().map(|()| Vec::new());
        }
        match self.endings.ask(Work::Renew(held)).await? {
            ending::Said::Renewed(renewed) => Ok(renewed),
            ending::Said::Settled(_) | ending::Said::Held => Err(confused()),
        }
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.still_open()?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self.pool.write("SELECT oncegate.expire_leases_v1($1)", &[(&limit, Type::INT8)]).await?;
        count_of(&rows, 0)
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.still_open()?;
        let begin = self.swept_to.load(Ordering::Relaxed);
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&begin, Type::INT8), (&most, Type::INT8)];
        let rows = self.pool.write("SELECT swept, reached FROM oncegate.sweep_v1($1, $2)", &values).await?;
        let swept = count_of(&rows, 0)?;
        // A round that has come to its end begins at the beginning the next time: what was held then is due still.
        let reached = if swept < limit { 0 } else { rows[0].get::<_, Option<i64>>(1).unwrap_or_default() };
        self.swept_to.store(reached, Ordering::Relaxed);
        Ok(swept)
    }

    async fn changed(&self, id: RecordId) {
        let Some(waiter) = self.waiters.join(id) else { return std::future::pending().await };
        let ask = async {
            // One at a time: however many wait, others find a connection.
            let Ok(_turn) = self.asking.acquire().await else { return std::future::pending().await };
            match self.pool.write("SELECT oncegate.await_v1($1)", &[(&&id.0[..], Type::BYTEA)]).await {
                Ok(rows) => rows.first().is_some_and(|row| row.get(0)),
                // Whoever waits looks again by itself.
                Err(_) => std::future::pending().await,
            }
        };
        waiter.told_after(ask).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        Some(self.waiters.removals())
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        self.still_open()?;
        loop {
            let host = self.hosts.chosen();
            let listed = listing::get(&self.pool, id).await?;
            match &listed {
                Some(Listed { record, now, .. }) if self.make_sure(id, record, *now, host).await? => {}
                _ => return Ok(listed),
            }
        }
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        self.still_open()?;
        listing::list(&self.pool, &filter, after, limit).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        self.still_open()?;
        let rows = self.pool.write("SELECT oncegate.remove_v1($1)", &[(&&id.0[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.still_open()?;
        let rows = self.pool.write("SELECT in_flight, completed, unknown FROM oncegate.count_v1()", &[]).await?;
        let count = |column| count_of(&rows, column).map(|count| count as u64);
        Ok([count(0)?, count(1)?, count(2)?])
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<Identity>) -> Result<Vec<IdentityChange>, Error> {
        self.still_open()?;
        adopt::changes(&self.pool, &origins, &rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.still_open()?;
        adopt::adopt(&self.pool, &origins, &rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.still_open()?;
        adopt::identities(&self.pool).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.still_open()?;
        if let Some(refusal) = self.cannot_settle().or_else(|| self.claims.refusal()) {
            return Err(refusal);
        }
        if self.proofs.are_recent() {
            return Ok(());
        }
        let proven = proof::prove_all(&self.claims, &self.endings).await;
        match &proven {
            Ok(()) => self.proofs.works(),
            // Claims are refused too where it turns out that nothing can be settled.
            Err(_) => self.proofs.doubt(),
        }
        proven
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        tokio::join!(self.claims.close(), self.endings.close());
        self.pool.close();
    }
}

fn count_of(rows: &[tokio_postgres::Row], column: usize) -> Result<usize, Error> {
    let counted = rows.first().map(|found| row::number(found, column)).transpose();
    let counted = counted.map_err(|unreadable| Error::indeterminate(ErrorKind::Corrupt, unreadable))?;
    Ok(counted.and_then(|counted| usize::try_from(counted).ok()).unwrap_or_default())
}

fn confused() -> Error {
    Error::indeterminate(ErrorKind::Other, "the answer belongs to another question")
}
