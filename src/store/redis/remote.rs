//! The cache that gates share, in Redis.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::error::{code, told};
use super::link::Link;
use super::listener::{self, Heard};
use super::{OpenError, Servers};
use crate::idempotency::record::RecordId;
use crate::store::cached::{Failure, Operation, Remote};
use crate::store::removals::{Removal, Removals};

/// How long a command may take before its connection is given up. Whoever asked has given up long before.
const ANSWER: Duration = Duration::from_secs(1);

/// A cache in Redis, for the gates of one store.
pub struct Shared {
    link: Link,
    /// What the key of each value begins with; the id of its record follows.
    prefix: Vec<u8>,
    channel: String,
    removals: Arc<Removals>,
    refuses_values: Refusal,
    refuses_to_forget: Refusal,
    /// The task that listens; ends with this.
    _listening: JoinSet<()>,
}

/// What was refused last, and why.
#[derive(Default)]
struct Refusal(Mutex<Option<String>>);

impl Refusal {
    /// Whether what is said now is another thing than before.
    fn told(&self, now: Option<String>) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *last != now;
        *last = now;
        is_new
    }
}

impl Shared {
    /// For the store with this id. It connects in a task of its own, for as long as it takes, on the runtime that this is
    /// called on.
    ///
    /// # Errors
    /// Where the certificates make no sense.
    pub fn begin(servers: &Servers, store: [u8; 16]) -> Result<Self, OpenError> {
        let link = Link::lazy(servers, ANSWER)?;
        // So many that share a Redis do not get in each other's way.
        let name: String = store[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let (channel, prefix) = (format!("oncegate-cache:{name}"), format!("oncegate-cache:{name}:").into_bytes());
        let removals = Arc::<Removals>::default();
        let tell = Arc::clone(&removals);
        let mut listening = JoinSet::new();
        listening.spawn(listener::run(link.clone(), channel.clone(), move |heard| match heard {
            Heard::Begin => tell.tell(Removal::Begin),
            Heard::Message(id) => {
                id.try_into().into_iter().for_each(|id| tell.tell(Removal::Of(RecordId(id))));
            }
            Heard::Lost => tell.tell(Removal::End),
        }));
        Ok(Self {
            link,
            prefix,
            channel,
            removals,
            refuses_values: Refusal::default(),
            refuses_to_forget: Refusal::default(),
            _listening: listening,
        })
    }

    fn add(&self, commands: &mut Vec<Cmd>, operation: &Operation) {
        let on = |name: &str, id: &RecordId| {
            let mut command = redis::cmd(name);
            command.arg([&self.prefix, &id.0[..]].concat());
            command
        };
        match operation {
            Operation::Get(id) => commands.push(on("GET", id)),
            Operation::Put(id, value, life) => {
                let mut command = on("SET", id);
                command.arg(&value[..]).arg("PX").arg((life.as_millis() as u64).max(1));
                commands.push(command);
            }
            Operation::Drop(id) => commands.push(on("UNLINK", id)),
            Operation::Forget(id) => {
                commands.push(on("UNLINK", id));
                let mut tell = redis::cmd("PUBLISH");
                tell.arg(&self.channel).arg(&id.0[..]);
                commands.push(tell);
            }
        }
    }

    /// Says when values begin to be refused, and when that is over.
    fn took(&self, said: &RedisResult<Value>) {
        match said {
            Ok(_) => {
                if self.refuses_values.told(None) {
                    tracing::info!("the cache takes values again");
                }
            }
            Err(error) if self.refuses_values.told(Some(told(error))) => {
                let hint = match code(error) {
                    Some("OOM") => {
                        ": give it room, and let it make room by itself (maxmemory-policy allkeys-lru); until then \
                         gates remember less"
                    }
                    _ => "",
                };
                tracing::warn!(error = told(error), "the cache takes no values{hint}");
            }
            Err(_) => {}
        }
    }

    /// Whether what is to be forgotten is. What stands is as old as it may be anyhow, and other gates look again: only
    /// where the server is none that takes writes is it as if it were not there.
    fn forgot(&self, said: [RedisResult<Value>; 2]) -> Result<(), Failure> {
        let error = said.into_iter().find_map(Result::err);
        let failure = error.as_ref().map(told);
        if self.refuses_to_forget.told(failure.clone())
            && let Some(error) = &failure
        {
            tracing::warn!(error, "the cache does not forget, or does not tell others to");
        }
        match error {
            Some(error) if code(&error) == Some("READONLY") || code(&error).is_none() => Err(Failure(told(&error))),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Remote for Shared {
    async fn carry_out(&self, batch: &[Operation]) -> Result<Vec<Option<Bytes>>, Failure> {
        let mut commands = Vec::with_capacity(batch.len());
        batch.iter().for_each(|operation| self.add(&mut commands, operation));
        let said = self.link.send(&commands).await.map_err(|error| Failure(told(&error)))?;
        // In a cluster some nodes may answer.
        let unanswered = |said: &RedisResult<Value>| said.as_ref().is_err_and(|error| code(error).is_none());
        if let Some(Err(error)) = said.first()
            && said.iter().all(unanswered)
        {
            return Err(Failure(told(error)));
        }
        let (mut said, mut found) = (said.into_iter(), Vec::new());
        let mut next = || said.next().unwrap_or(Ok(Value::Nil));
        for operation in batch {
            match operation {
                Operation::Get(_) => found.push(value(next())),
                Operation::Put(..) => self.took(&next()),
                Operation::Drop(_) => drop(next()),
                Operation::Forget(_) => self.forgot([next(), next()])?,
            }
        }
        Ok(found)
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        self.removals.subscribe()
    }
}

/// What stands under a key, as far as it is told.
fn value(said: RedisResult<Value>) -> Option<Bytes> {
    match said {
        Ok(Value::BulkString(value)) => Some(value.into()),
        // Somebody else's: no value at all.
        Err(error) if code(&error) == Some("WRONGTYPE") => Some(Bytes::new()),
        Ok(_) | Err(_) => None,
    }
}
