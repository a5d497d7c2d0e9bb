//! Records in Redis, for those who accept how durable it is.
//!
//! Operations are scripts: they compare and write in one step. What attempts do goes through a lane, where one call carries
//! all that waits. What is decided about a record that stands is decided
//! in `rules`, as for every store. A claim is as durable as the server's persistence makes it, and a
//! failover may lose the last of them: the promise of the other stores does not hold here.

mod adopt;
mod caller;
mod description;
mod error;
mod keys;
mod lane;
mod lanes;
mod link;
mod listener;
mod listing;
mod operation;
mod queue;
mod record;
mod remote;
mod rights;
mod scripts;
mod servers;
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

use self::caller::Caller;
pub use self::description::{Description, Primary};
pub use self::error::OpenError;
use self::keys::Partition;
use self::lanes::Lanes;
use self::link::Link;
use self::listener::Heard;
use self::operation::{Operation, Said, number};
use self::queue::closed;
pub use self::remote::Shared;
use self::scripts::Scripts;
pub use self::servers::{Certificates, Servers, Topology};
use self::upkeep::Due;
use super::waiters::Waiters;
use super::{
    Claim, End, Error, ErrorKind, Filter, Fresh, Held, Identity, IdentityChange, Listed, NamespaceRules, Origin, Page,
    Removal, Settled, Store,
};
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};

/// How long a command may take. Whoever asked has given up by then.
const ANSWER: Duration = Duration::from_secs(5);

/// How long a node has to renew leases: less than whoever renews waits for all nodes.
const RENEWED: Duration = Duration::from_secs(3);

/// How many leases one call renews.
const RENEWALS: usize = 256;

/// Where the ids of unknown records begin in the set of a partition: 2^51.
const UNKNOWN_FROM: &str = "2251799813685248";
const UNKNOWN_BEFORE: &str = "(2251799813685248";

/// Where the scripts tell of ends and removals.
const CHANNEL: &str = "oncegate";

/// What a Redis store is opened with.
#[derive(Clone)]
pub struct Settings {
    /// Where the servers are, and as whom to connect.
    pub servers: Servers,
}

/// A store in Redis.
pub struct Redis {
    caller: Arc<Caller>,
    lanes: Lanes,
    waiters: Arc<Waiters>,
    /// The task that listens; ends with the store.
    _listening: JoinSet<()>,
    is_closing: AtomicBool,
    description: Description,
    /// What the lock of whoever adopts is known by as this process's.
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
        Self::on_clock(settings, scripts::CLOCK).await
    }

    /// What answers at the other end, as of the start.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Connects, with the time that `clock`, lines of Lua, gives to `now`. For tests.
    ///
    /// # Errors
    /// As [`Redis::open`].
    #[doc(hidden)]
    pub async fn on_clock(settings: &Settings, clock: &str) -> Result<Self, OpenError> {
        let link = Link::open(&settings.servers, ANSWER).await?;
        let description = Description::of(&settings.servers, &link).await?;
        let is_partitioned = settings.servers.topology == Topology::Cluster;
        let caller = Arc::new(Caller { link: link.clone(), scripts: Scripts::new(clock), is_partitioned });
        rights::check(&caller, settings.servers.user.as_deref()).await?;
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|_| OpenError::Failed("no randomness to be had".to_owned()))?;
        let waiters = Arc::<Waiters>::default();
        let mut listening = JoinSet::new();
        let hearing = Arc::clone(&waiters);
        listening.spawn(listener::run(link, CHANNEL.to_owned(), move |heard| hear(&hearing, heard)));
        let lanes = Lanes::open(Arc::clone(&caller));
        let (is_closing, token) = (AtomicBool::new(false), tokio::sync::Mutex::new(token));
        Ok(Self { caller, lanes, waiters, _listening: listening, is_closing, description, token })
    }

    async fn call(&self, call: Cmd) -> RedisResult<Value> {
        self.caller.call(call).await
    }

    async fn write(&self, call: Cmd) -> Result<Value, Error> {
        self.still_open()?;
        self.call(call).await.map_err(|error| error::of_write(&error))
    }

    async fn ask(&self, call: Cmd) -> Result<Value, Error> {
        self.still_open()?;
        self.call(call).await.map_err(|error| error::of_question(&error))
    }

    fn still_open(&self) -> Result<(), Error> {
        if self.is_closing.load(Ordering::Relaxed) {
            return Err(closed());
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Redis {
    fn kind(&self) -> &'static str {
        "redis"
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        loop {
            let Said::Claim(claim) = self.lanes.ask(Operation::Claim { id, fresh: fresh.clone() }).await? else {
                return Err(confused(record::Unreadable));
            };
            match &claim {
                Claim::Exists { record, .. } if lacks_answer(record) => {
                    if let Some(Listed { record, now, .. }) = self.get(id).await? {
                        return Ok(Claim::Exists { record, now });
                    }
                }
                Claim::Exists { .. } | Claim::Inserted(_) => return Ok(claim),
            }
        }
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        match self.lanes.ask(Operation::Supersede { id, seen, fresh }).await? {
            Said::Superseded(superseded) => Ok(superseded),
            _ => Err(confused(record::Unreadable)),
        }
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        let Said::Settled(settled) = self.lanes.ask(Operation::Settle { id, attempt, end }).await? else {
            return Err(confused(record::Unreadable));
        };
        match &settled {
            Settled::Superseded { record: Some(record) } if lacks_answer(record) => {
                let record = self.get(id).await?.map(|listed| listed.record);
                Ok(Settled::Superseded { record })
            }
            Settled::Superseded { .. } | Settled::Done { .. } => Ok(settled),
        }
    }

    async fn renew(&self, mut held: Vec<Held>) -> Result<Vec<RecordId>, Error> {
        self.still_open()?;
        held.sort_by_key(|held| held.id);
        let is_partitioned = self.caller.is_partitioned;
        let belong = |one: &Held, other: &Held| !is_partitioned || Partition::of(one.id) == Partition::of(other.id);
        let parts = held.chunk_by(belong).flat_map(|part| part.chunks(RENEWALS));
        // Before others are due again.
        let patience = held.iter().map(|held| held.lease / 3).fold(RENEWED, Duration::min).max(RENEWED / 10);
        let renewing = parts.map(async |part| {
            let asked = timeout(patience, self.lanes.ask(Operation::Renew(part.to_vec()))).await;
            match asked.unwrap_or_else(|_| Err(late()))? {
                Said::Renewed(renewed) => Ok(renewed),
                _ => Err(confused(record::Unreadable)),
            }
        });
        // What one node does not renew is no reason to forget what others did.
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
                tracing::warn!(%error, "some leases were not renewed; trying again");
                Ok(renewed)
            }
            None => Ok(renewed),
        }
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.still_open()?;
        upkeep::of(&self.caller, Due::Leases, limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.still_open()?;
        upkeep::of(&self.caller, Due::Expired, limit).await
    }

    async fn changed(&self, id: RecordId) {
        let Some(waiter) = self.waiters.join(id) else { return std::future::pending().await };
        let ask = async {
            match self.lanes.ask(Operation::Await(id)).await {
                Ok(Said::Awaited(runs)) => runs,
                // Whoever waits looks again by itself.
                _ => std::future::pending().await,
            }
        };
        waiter.told_after(ask).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        Some(self.waiters.removals())
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        self.still_open()?;
        listing::get(self, id).await
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        self.still_open()?;
        listing::list(self, &filter, after, limit).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        let mut call = self.caller.scripts.remove.call(2);
        call.arg(&keys::record(id)[..]).arg(&Partition::of(id).times()[..]);
        Ok(number(&self.write(call).await?)? == 1)
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.still_open()?;
        let regions = [("-inf", "(0"), ("0", UNKNOWN_BEFORE), (UNKNOWN_FROM, "+inf")];
        let of_partition = |partition: Partition| {
            regions.map(|(from, to)| redis::cmd("ZCOUNT").arg(&partition.times()[..]).arg(from).arg(to).to_owned())
        };
        let questions: Vec<Cmd> = Partition::all().flat_map(of_partition).collect();
        let answers = self.caller.send(&questions).await.map_err(|error| error::of_question(&error))?;
        let mut counts = [0; 3];
        for (place, answer) in answers.into_iter().enumerate() {
            counts[place % 3] += number(&answer.map_err(|error| error::of_question(&error))?)?;
        }
        Ok(counts)
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<Identity>) -> Result<Vec<IdentityChange>, Error> {
        self.still_open()?;
        adopt::changes(self, &origins, &rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.still_open()?;
        adopt::adopt(self, &origins, &rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.still_open()?;
        adopt::on_file(self, None).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.still_open()?;
        // In a cluster at each node that has records.
        let count = if self.caller.is_partitioned { usize::MAX } else { 1 };
        let proofs = Partition::all().take(count).map(|partition| {
            let mut call = self.caller.scripts.prove.call(1);
            call.arg(partition.nobody());
            call
        });
        let answers =
            self.caller.send(&proofs.collect::<Vec<_>>()).await.map_err(|error| error::of_question(&error))?;
        answers.into_iter().try_for_each(|answer| answer.map(drop).map_err(|error| error::of_question(&error)))
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.lanes.close().await;
    }
}

fn hear(waiters: &Waiters, heard: Heard<'_>) {
    match heard {
        Heard::Begin => waiters.begin(),
        Heard::Lost => waiters.tell_all(),
        Heard::Message(message) => {
            // A letter for what happened, and the id.
            let Some((what, id)) = message.split_first() else { return };
            let Ok(id) = <[u8; 32]>::try_from(id).map(RecordId) else { return };
            match what {
                b'e' => waiters.tell(id),
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

/// A time, and what stands.
fn parts(said: Value) -> Result<(Timestamp, Option<Vec<u8>>), Error> {
    let Value::Array(said) = said else { return Err(confused(record::Unreadable)) };
    let mut said = said.into_iter();
    let at = said.next().as_ref().map(number).transpose()?.map(record::time);
    let standing = match said.next() {
        Some(Value::BulkString(standing)) => Some(standing),
        _ => None,
    };
    at.map(|at| (at, standing)).ok_or_else(|| confused(record::Unreadable))
}

fn late() -> Error {
    Error::indeterminate(ErrorKind::Timeout, "Redis did not answer in time")
}

fn confused(unreadable: record::Unreadable) -> Error {
    Error::indeterminate(ErrorKind::Corrupt, unreadable)
}

#[cfg(test)]
mod tests;
