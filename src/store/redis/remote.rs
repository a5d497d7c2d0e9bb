//! The cache that gates share, in Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::error::told;
use super::link::Link;
use super::listener::{self, Heard};
use super::{OpenError, Servers};
use crate::idempotency::record::RecordId;
use crate::store::cached::{Failure, Operation, Remote};
use crate::store::removals::Removals;

/// How long a command may take before its connection is given up. Whoever asked has given up long before.
const ANSWER: Duration = Duration::from_secs(1);

/// A cache in Redis, for the gates of one store.
pub struct Shared {
    link: Link,
    /// What the key of each value begins with; the id of its record follows.
    prefix: Vec<u8>,
    channel: String,
    removals: Arc<Removals>,
    /// The last values were refused.
    is_full: AtomicBool,
    /// The task that listens; ends with this.
    _listening: JoinSet<()>,
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
        listening.spawn(listener::run(link.clone(), channel.clone(), move |heard| {
            if let Heard::Message(id) = heard
                && let Ok(id) = id.try_into()
            {
                tell.tell(RecordId(id));
            }
        }));
        Ok(Self { link, prefix, channel, removals, is_full: AtomicBool::new(false), _listening: listening })
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
            Ok(_) if self.is_full.swap(false, Ordering::Relaxed) => tracing::info!("the cache takes values again"),
            Ok(_) => {}
            Err(error) if !self.is_full.swap(true, Ordering::Relaxed) => {
                tracing::warn!(
                    error = told(error),
                    "the cache takes no values: give it room, and let it make room by itself (maxmemory-policy \
                     allkeys-lru)"
                );
            }
            Err(_) => {}
        }
    }
}

#[async_trait]
impl Remote for Shared {
    async fn carry_out(&self, batch: &[Operation]) -> Result<Vec<Option<Bytes>>, Failure> {
        let mut commands = Vec::with_capacity(batch.len());
        batch.iter().for_each(|operation| self.add(&mut commands, operation));
        let said = self.link.send(&commands).await.map_err(|error| Failure(told(&error)))?;
        let (mut said, mut found) = (said.into_iter(), Vec::new());
        let mut next = || said.next().unwrap_or(Ok(Value::Nil));
        for operation in batch {
            match operation {
                Operation::Get(_) => found.push(value(next())?),
                Operation::Put(..) => self.took(&next()),
                Operation::Drop(_) => drop(next()),
                Operation::Forget(_) => {
                    for said in [next(), next()] {
                        said.map_err(|error| Failure(told(&error)))?;
                    }
                }
            }
        }
        Ok(found)
    }

    fn removals(&self) -> broadcast::Receiver<RecordId> {
        self.removals.subscribe()
    }
}

/// What stands under a key.
fn value(said: RedisResult<Value>) -> Result<Option<Bytes>, Failure> {
    match said {
        Ok(Value::BulkString(value)) => Ok(Some(value.into())),
        Ok(_) => Ok(None),
        // Somebody else's: no value at all.
        Err(error) if error.code() == Some("WRONGTYPE") => Ok(Some(Bytes::new())),
        Err(error) => Err(Failure(told(&error))),
    }
}
