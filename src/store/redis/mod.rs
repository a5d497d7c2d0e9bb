//! Records in Redis, for those who accept how durable it is.
//!
//! Operations are scripts: they compare and write in one step. Operations of attempts go through a batcher, where one
//! script call carries all that are queued. Conditional writes follow `rules`, as in every store. A claim is as
//! durable as the server's persistence makes it, and a failover may lose the last of them: the promise of the other
//! stores does not hold here.

mod adopt;
mod audit;
mod description;
mod error;
mod keys;
mod listener;
mod listing;
mod manager;
mod node_batchers;
mod operation;
mod quotas;
mod record;
mod rights;
mod script_client;
mod scripts;
mod servers;
mod shared_cache;
mod upkeep;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::broadcast;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use self::description::{Description, Primary};
pub use self::error::OpenError;
use self::keys::Partition;
use self::listener::ListenerEvent;
use self::manager::ConnectionManager;
use self::node_batchers::NodeBatchers;
use self::operation::{Operation, Reply, number};
use self::quotas::RedisQuotas;
use self::script_client::ScriptClient;
use self::scripts::Scripts;
pub use self::servers::{Certificates, Servers, Topology};
pub use self::shared_cache::RedisCache;
use super::resealing::{Beginnings, Values};
use super::waiters::Waiters;
use super::{
    AuditLog, Chunk, Claim, Cursor, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet,
    NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Resealing, Settled, Settlement, SharedQuotas, Store,
};
use crate::idempotency::lease::renewal_interval;
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};

/// How long a command may take. Its caller has timed out by then.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a node has to renew leases: less than the caller of `renew` waits for all nodes.
const RENEW_TIMEOUT: Duration = Duration::from_secs(3);

/// How many leases one call renews.
const MAX_RENEWALS: usize = 256;

/// Where the ids of unknown records begin in the set of a partition: 2^51.
const UNKNOWN_FROM: &str = "2251799813685248";
const UNKNOWN_BEFORE: &str = "(2251799813685248";

/// Where the scripts tell of ends and removals.
const CHANNEL: &str = "oncegate";

/// The settings of a Redis store.
#[derive(Clone)]
pub struct Settings {
    /// The servers and the credentials.
    pub servers: Servers,
}

/// A store in Redis.
pub struct Redis {
    client: Arc<ScriptClient>,
    batchers: NodeBatchers,
    waiters: Arc<Waiters>,
    quotas: Arc<RedisQuotas>,
    /// The task that listens; ends with the store.
    _listening: JoinSet<()>,
    is_closing: AtomicBool,
    description: Description,
    /// Identifies this process as the holder of the adoption lock.
    token: tokio::sync::Mutex<[u8; 16]>,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Redis {
    /// Connects. Its tasks run on the runtime that this is called on.
    ///
    /// # Errors
    /// See [`OpenError`]; only after [`OpenError::Unreachable`] it may help to try again.
    pub async fn open(settings: &Settings) -> Result<Self, OpenError> {
        Self::with_clock(settings, scripts::CLOCK).await
    }

    /// As [`Redis::open`], but only to look: it leaves nothing behind where no gate has been.
    ///
    /// # Errors
    /// As [`Redis::open`].
    pub async fn look(settings: &Settings) -> Result<Self, OpenError> {
        let manager = ConnectionManager::look(&settings.servers, COMMAND_TIMEOUT).await?;
        Self::over(manager, settings, scripts::CLOCK).await
    }

    /// The server, as of the start.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Connects, with the time that `clock`, lines of Lua, gives to `now`. For tests.
    ///
    /// # Errors
    /// As [`Redis::open`].
    #[doc(hidden)]
    pub async fn with_clock(settings: &Settings, clock: &str) -> Result<Self, OpenError> {
        let manager = ConnectionManager::open(&settings.servers, COMMAND_TIMEOUT).await?;
        Self::over(manager, settings, clock).await
    }

    async fn over(manager: ConnectionManager, settings: &Settings, clock: &str) -> Result<Self, OpenError> {
        let description = Description::of(&settings.servers, &manager).await?;
        let is_partitioned = settings.servers.topology == Topology::Cluster;
        let client = Arc::new(ScriptClient::new(manager.clone(), Scripts::new(clock), is_partitioned));
        rights::check(&client, settings.servers.user.as_deref()).await?;
        let mut token = [0; 16];
        getrandom::fill(&mut token)
            .map_err(|_| OpenError::Failed("the system's random number generator failed".to_owned()))?;
        let waiters = Arc::<Waiters>::default();
        let mut listening = JoinSet::new();
        let listener_waiters = Arc::clone(&waiters);
        listening.spawn(listener::run(manager, CHANNEL.to_owned(), move |event| on_event(&listener_waiters, event)));
        let quotas = Arc::new(RedisQuotas::new(client.manager.clone(), keys::QUOTAS));
        let batchers = NodeBatchers::open(Arc::clone(&client));
        let (is_closing, token) = (AtomicBool::new(false), tokio::sync::Mutex::new(token));
        Ok(Self { client, batchers, waiters, quotas, _listening: listening, is_closing, description, token })
    }

    async fn call(&self, call: Cmd) -> RedisResult<Value> {
        self.client.call(call).await
    }

    async fn write(&self, call: Cmd) -> Result<Value, Error> {
        self.ensure_open()?;
        self.call(call).await.map_err(|error| error::of_write(&error))
    }

    async fn ask(&self, call: Cmd) -> Result<Value, Error> {
        self.ensure_open()?;
        self.call(call).await.map_err(|error| error::of_read(&error))
    }

    fn ensure_open(&self) -> Result<(), Error> {
        if self.is_closing.load(Ordering::Relaxed) {
            return Err(Error::closed());
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Redis {
    fn kind(&self) -> &'static str {
        "redis"
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        loop {
            let Reply::Claim(claim) = self.batchers.submit(Operation::Claim { id, fresh: fresh.clone() }).await? else {
                return Err(unexpected_reply(record::Unreadable));
            };
            match &claim {
                Claim::Exists { record, .. } if lacks_answer(record) => {
                    if let Some(RecordEntry { record, now, .. }) = self.get(id).await? {
                        return Ok(Claim::Exists { record, now });
                    }
                }
                Claim::Exists { .. } | Claim::Inserted(_) => return Ok(claim),
            }
        }
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        match self.batchers.submit(Operation::Supersede { id, seen, fresh }).await? {
            Reply::Superseded(superseded) => Ok(superseded),
            _ => Err(unexpected_reply(record::Unreadable)),
        }
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let Reply::Settled(settled) = self.batchers.submit(Operation::Settle { id, attempt, end }).await? else {
            return Err(unexpected_reply(record::Unreadable));
        };
        match &settled {
            Settled::NotCurrent { record: Some(record) } if lacks_answer(record) => {
                let record = self.get(id).await?.map(|listed| listed.record);
                Ok(Settled::NotCurrent { record })
            }
            Settled::NotCurrent { .. } | Settled::Done { .. } => Ok(settled),
        }
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        Some(Arc::<RedisQuotas>::clone(&self.quotas))
    }

    async fn renew(&self, mut held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.ensure_open()?;
        held.sort_by_key(|held| held.id);
        let is_partitioned = self.client.is_partitioned;
        let belong = |one: &LeaseRenewal, other: &LeaseRenewal| {
            !is_partitioned || Partition::of(one.id) == Partition::of(other.id)
        };
        let parts = held.chunk_by(belong).flat_map(|part| part.chunks(MAX_RENEWALS));
        // Gives up before the shortest of these leases is due again.
        let patience = held
            .iter()
            .map(|held| renewal_interval(held.lease))
            .fold(RENEW_TIMEOUT, Duration::min)
            .max(RENEW_TIMEOUT / 10);
        let renewing = parts.map(async |part| {
            let asked = timeout(patience, self.batchers.submit(Operation::Renew(part.to_vec()))).await;
            match asked.unwrap_or_else(|_| Err(timed_out()))? {
                Reply::Renewed(renewed) => Ok(renewed),
                _ => Err(unexpected_reply(record::Unreadable)),
            }
        });
        // A failure of one node does not discard the renewals of the others.
        let (mut renewed, mut failure, mut is_any) = (Vec::new(), None, false);
        for part in futures_util::future::join_all(renewing).await {
            match part {
                Ok(part) => (is_any, _) = (true, renewed.extend(part)),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        match failure {
            Some(error) if !is_any => Err(error),
            Some(error) => {
                tracing::debug!(%error, "some leases were not renewed; trying again");
                Ok(renewed)
            }
            None => Ok(renewed),
        }
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.ensure_open()?;
        upkeep::expire_leases(&self.client, limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.ensure_open()?;
        upkeep::sweep(&self.client, limit).await
    }

    async fn changed(&self, id: RecordId) {
        let Some(waiter) = self.waiters.join(id) else { return std::future::pending().await };
        let ask = async {
            match self.batchers.submit(Operation::Await(id)).await {
                Ok(Reply::Awaited(runs)) => runs,
                // Waiters poll on their own.
                _ => std::future::pending().await,
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

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.ensure_open()?;
        listing::get(self, id).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.ensure_open()?;
        listing::list(self, &filter, after, limit).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.ensure_open()?;
        listing::scan(self, &filter, after, limit).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let mut call = self.client.scripts.remove.call(2);
        call.arg(&keys::record(id)[..]).arg(&Partition::of(id).times()[..]).arg(&attempt.0[..]);
        Ok(number(&self.write(call).await?)? == 1)
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.ensure_open()?;
        let regions = [("-inf", "(0"), ("0", UNKNOWN_BEFORE), (UNKNOWN_FROM, "+inf")];
        let of_partition = |partition: Partition| {
            regions.map(|(from, to)| redis::cmd("ZCOUNT").arg(&partition.times()[..]).arg(from).arg(to).to_owned())
        };
        let questions: Vec<Cmd> = Partition::all().flat_map(of_partition).collect();
        let answers = self.client.send(&questions).await.map_err(|error| error::of_read(&error))?;
        let mut counts = [0; 3];
        for (place, answer) in answers.into_iter().enumerate() {
            counts[place % 3] += number(&answer.map_err(|error| error::of_read(&error))?)?;
        }
        Ok(counts)
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.ensure_open()?;
        adopt::changes(self, &origins, &rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.ensure_open()?;
        adopt::adopt(self, &origins, &rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.ensure_open()?;
        adopt::on_file(self, None).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.ensure_open()?;
        // In a cluster at each node that has records.
        let count = if self.client.is_partitioned { usize::MAX } else { 1 };
        let proofs = Partition::all().take(count).map(|partition| {
            let mut call = self.client.scripts.prove.call(1);
            call.arg(partition.absent_key());
            call
        });
        let answers = self.client.send(&proofs.collect::<Vec<_>>()).await.map_err(|error| error::of_read(&error))?;
        answers.into_iter().try_for_each(|answer| answer.map(drop).map_err(|error| error::of_read(&error)))
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.batchers.close().await;
    }
}

fn on_event(waiters: &Waiters, event: ListenerEvent<'_>) {
    match event {
        ListenerEvent::Subscribed => waiters.connected(),
        ListenerEvent::Lost => waiters.disconnected(),
        ListenerEvent::Message(message) => {
            // A letter for what happened, and the id.
            let Some((what, id)) = message.split_first() else { return };
            let Ok(id) = <[u8; 32]>::try_from(id).map(RecordId) else { return };
            match what {
                b'e' => waiters.notify(id),
                b'r' => waiters.removed(id),
                _ => {}
            }
        }
    }
}

/// Whether its answer is large, and was left out.
fn lacks_answer(record: &Record) -> bool {
    record.state == State::Completed && record.answer.is_none()
}

/// A time, and the current record.
fn parts(response: Value) -> Result<(Timestamp, Option<Vec<u8>>), Error> {
    let Value::Array(response) = response else { return Err(unexpected_reply(record::Unreadable)) };
    let mut response = response.into_iter();
    let at = response.next().as_ref().map(number).transpose()?.map(record::time);
    let current = match response.next() {
        Some(Value::BulkString(current)) => Some(current),
        _ => None,
    };
    at.map(|at| (at, current)).ok_or_else(|| unexpected_reply(record::Unreadable))
}

fn timed_out() -> Error {
    Error::indeterminate(ErrorKind::Timeout, "Redis did not answer in time")
}

fn unexpected_reply(unreadable: record::Unreadable) -> Error {
    Error::indeterminate(ErrorKind::Corrupt, unreadable)
}

#[cfg(test)]
mod tests;

#[async_trait]
impl Resealing for Redis {
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
        self.ensure_open()?;
        listing::beginnings(self, after, limit).await
    }

    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error> {
        let mut call = self.client.scripts.reseal.call(1);
        call.arg(&keys::record(id)[..]);
        record::add_values(&mut call, seen, &values);
        Ok(number(&self.write(call).await?)? == 1)
    }
}
