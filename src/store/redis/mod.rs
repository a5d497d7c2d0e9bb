//! Records in Redis, for those who accept how durable it is.
//!
//! Each operation is one script: it compares and writes in one step. What is decided about a record that stands is decided
//! in [`rules`](super::rules), as for every store. A claim is as durable as the server's persistence makes it, and a
//! failover may lose the last of them: the promise of the other stores does not hold here.

mod adopt;
mod error;
mod keys;
mod link;
mod listener;
mod listing;
mod record;
mod remote;
mod scripts;
mod servers;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::{Cmd, ErrorKind as RedisKind, RedisResult, ServerErrorKind, Value};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

pub use self::error::OpenError;
use self::keys::Partition;
use self::link::Link;
use self::listener::Heard;
use self::record::{millis, span};
pub use self::remote::Shared;
use self::scripts::Scripts;
pub use self::servers::{Certificates, Servers, Topology};
use super::rules::{self, Change, Standing};
use super::waiters::Waiters;
use super::{
    Claim, End, Error, ErrorKind, Expiry, Filter, Fresh, Held, Identity, IdentityChange, Listed, Origin, Page, Settled,
    Store,
};
use crate::idempotency::record::{Attempt, RecordId, Timestamp, Version};

/// How long a command may take. Whoever asked has given up by then.
const ANSWER: Duration = Duration::from_secs(5);

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
    link: Link,
    scripts: Scripts,
    waiters: Arc<Waiters>,
    /// The task that listens; ends with the store.
    _listening: JoinSet<()>,
    is_closing: AtomicBool,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").finish_non_exhaustive()
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

    async fn on_clock(settings: &Settings, clock: &str) -> Result<Self, OpenError> {
        let link = Link::open(&settings.servers, ANSWER).await?;
        let waiters = Arc::<Waiters>::default();
        let mut listening = JoinSet::new();
        let hearing = Arc::clone(&waiters);
        listening.spawn(listener::run(link.clone(), CHANNEL.to_owned(), move |heard| hear(&hearing, heard)));
        let scripts = Scripts::new(clock);
        Ok(Self { link, scripts, waiters, _listening: listening, is_closing: AtomicBool::new(false) })
    }

    async fn call(&self, call: Cmd) -> RedisResult<Value> {
        let said = self.link.send(std::slice::from_ref(&call)).await?.pop();
        match said {
            // It did nothing.
            Some(Err(error)) if error.kind() == RedisKind::Server(ServerErrorKind::NoScript) => {
                self.link.send(&[self.scripts.in_full(&call)]).await?.pop()
            }
            said => said,
        }
        .unwrap_or_else(|| Err((RedisKind::UnexpectedReturnType, "nothing was answered").into()))
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
            return Err(Error::determinate(ErrorKind::Unavailable, "the store is closed"));
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
        let partition = Partition::of(id);
        let mut call = self.scripts.claim.call(3);
        call.arg(keys::record(id)).arg(partition.in_flight()).arg(partition.ids());
        add_fresh(&mut call, &fresh);
        match parts(self.write(call).await?)? {
            (claimed_at, None) => Ok(Claim::Inserted(claimed_at)),
            (now, Some(standing)) => {
                let kept = record::read(standing, true).map_err(confused)?;
                Ok(Claim::Exists { record: kept.record, now })
            }
        }
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        let partition = Partition::of(id);
        let mut call = self.scripts.supersede.call(4);
        call.arg(keys::record(id)).arg(partition.in_flight()).arg(partition.completed()).arg(partition.unknown());
        call.arg(&seen.attempt.0[..]).arg(rules::place(seen.state)).arg(millis(seen.until));
        add_fresh(&mut call, &fresh);
        Ok(number(&self.write(call).await?)? == 1)
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        let partition = Partition::of(id);
        let (how, lasts, answer) = told(&end);
        let mut call = self.scripts.settle.call(5);
        call.arg(keys::record(id)).arg(partition.in_flight()).arg(partition.completed());
        call.arg(partition.unknown()).arg(partition.ids());
        call.arg(&attempt.0[..]).arg(how).arg(lasts).arg(&answer[..]);
        let Value::Array(said) = self.write(call).await? else { return Err(confused(record::Unreadable)) };
        let until =
            said.first().map(number).transpose()?.map(record::time).ok_or_else(|| confused(record::Unreadable))?;
        let standing = match said.into_iter().nth(1) {
            None => return Ok(Settled::Done { until }),
            Some(Value::BulkString(standing)) => Some(record::read(standing, true).map_err(confused)?),
            Some(_) => None,
        };
        judge(standing, attempt, &end, until)
    }

    async fn renew(&self, held: Vec<Held>) -> Result<Vec<RecordId>, Error> {
        self.still_open()?;
        let renewing = held.into_iter().map(async |held| {
            let mut call = self.scripts.renew.call(2);
            call.arg(keys::record(held.id)).arg(Partition::of(held.id).in_flight());
            call.arg(&held.attempt.0[..]).arg(span(held.lease));
            let renewed = number(&self.write(call).await?)? == 1;
            Ok::<_, Error>(renewed.then_some(held.id))
        });
        let renewed = futures_util::future::try_join_all(renewing).await?;
        Ok(renewed.into_iter().flatten().collect())
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        let mut expired = 0;
        for partition in Partition::all() {
            let mut call = self.scripts.expire_leases.call(2);
            call.arg(partition.in_flight()).arg(partition.unknown());
            call.arg(partition.records()).arg(limit - expired);
            expired += usize::try_from(number(&self.write(call).await?)?).unwrap_or_default();
            if expired >= limit {
                break;
            }
        }
        Ok(expired)
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        let mut swept = 0;
        for partition in Partition::all() {
            for set in [partition.completed(), partition.unknown()] {
                let mut call = self.scripts.sweep.call(2);
                call.arg(set).arg(partition.ids()).arg(partition.records()).arg(limit - swept);
                swept += usize::try_from(number(&self.write(call).await?)?).unwrap_or_default();
                if swept >= limit {
                    return Ok(swept);
                }
            }
        }
        Ok(swept)
    }

    async fn changed(&self, id: RecordId) {
        let Some(waiter) = self.waiters.join(id) else { return std::future::pending().await };
        let ask = async {
            let mut call = self.scripts.await_end.call(1);
            call.arg(keys::record(id));
            match self.write(call).await.and_then(|said| number(&said)) {
                Ok(runs) => runs == 1,
                // Whoever waits looks again by itself.
                Err(_) => std::future::pending().await,
            }
        };
        waiter.told_after(ask).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<RecordId>> {
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
        let partition = Partition::of(id);
        let mut call = self.scripts.remove.call(5);
        call.arg(keys::record(id)).arg(partition.in_flight()).arg(partition.completed());
        call.arg(partition.unknown()).arg(partition.ids());
        Ok(number(&self.write(call).await?)? == 1)
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.still_open()?;
        let mut counts = [0; 3];
        for partition in Partition::all() {
            let sets = [partition.in_flight(), partition.completed(), partition.unknown()];
            for (count, set) in counts.iter_mut().zip(sets) {
                *count += number(&self.ask(redis::cmd("ZCARD").arg(set).to_owned()).await?)?;
            }
        }
        Ok(counts)
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

    async fn ping(&self) -> Result<(), Error> {
        // A script that writes is let through only where writes are.
        let mut call = self.scripts.renew.call(2);
        call.arg(keys::NOBODY).arg(Partition(0).in_flight()).arg("").arg(0);
        self.write(call).await.map(drop)
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
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

fn add_fresh(call: &mut Cmd, fresh: &Fresh) {
    call.arg(&fresh.attempt.0[..]).arg(span(fresh.lease)).arg(span(fresh.ttl)).arg(span(fresh.unknown_ttl));
    call.arg(&fresh.origin.0.to_be_bytes()[..]).arg(&fresh.head[..]);
}

/// How an attempt ends, in the words of the script, the span that belongs to it, and the answer.
fn told(end: &End) -> (u8, u64, Bytes) {
    match end {
        End::Complete { expiry: Expiry::FromClaim(ttl), answer } => (1, span(*ttl), answer.clone()),
        End::Complete { expiry: Expiry::FromNow(ttl), answer } => (2, span(*ttl), answer.clone()),
        End::Release => (3, 0, Bytes::new()),
        End::Hold => (4, 0, Bytes::new()),
    }
}

/// What an ending that the script left alone comes to.
fn judge(standing: Option<record::Kept>, attempt: Attempt, end: &End, now: Timestamp) -> Result<Settled, Error> {
    let seen = standing.as_ref().map(|kept| Standing {
        attempt: kept.record.attempt,
        state: kept.record.state,
        claimed_at: kept.record.claimed_at,
        until: kept.record.until,
        unknown_ttl: kept.unknown_ttl,
    });
    let record = standing.map(|kept| kept.record);
    Ok(match rules::settle(seen, attempt, end, now) {
        // The script would have done it.
        Change::Complete { .. } | Change::TurnUnknown { .. } | Change::Remove => {
            return Err(confused(record::Unreadable));
        }
        Change::Repeated { until } => Settled::Done { until },
        Change::RepeatedIfSame { until } => match (record, end) {
            (Some(record), End::Complete { answer, .. }) if record.answer.as_ref() == Some(answer) => {
                Settled::Done { until }
            }
            (record, _) => Settled::Superseded { record },
        },
        Change::Superseded => Settled::Superseded { record },
    })
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

fn number(said: &Value) -> Result<u64, Error> {
    match said {
        Value::Int(number) => u64::try_from(*number).map_err(|_| confused(record::Unreadable)),
        _ => Err(confused(record::Unreadable)),
    }
}

fn confused(unreadable: record::Unreadable) -> Error {
    Error::indeterminate(ErrorKind::Corrupt, unreadable)
}

#[cfg(test)]
mod tests;
