//! The cache that gates share, in Redis.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::{Cmd, RedisResult, Value};
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::error::{code, message};
use super::listener::{self, ListenerEvent};
use super::manager::ConnectionManager;
use super::quotas::RedisQuotas;
use super::{OpenError, Servers};
use crate::idempotency::record::{Hex, RecordId};
use crate::store::SharedQuotas;
use crate::store::cached::{CacheOperation, RemoteCache, RemoteError};
use crate::store::removals::{Removal, Removals};

/// The longest value, in bytes: twice what a record has that is cached.
const LONGEST: u64 = 512 << 10;

/// How long a command may take before its connection is closed. Callers time out long before.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

/// A cache in Redis, for the gates of one store.
pub struct RedisCache {
    manager: ConnectionManager,
    /// The prefix of the key of each value; the id of its record follows.
    prefix: Vec<u8>,
    channel: String,
    removals: Arc<Removals>,
    put_error: LastError,
    invalidate_error: LastError,
    quotas: Arc<RedisQuotas>,
    /// The task that listens; ends with this.
    _listening: JoinSet<()>,
}

/// The last error, so that a repeated one is logged once.
#[derive(Default)]
struct LastError(Mutex<Option<String>>);

impl LastError {
    /// Sets the error. Returns whether it differs from the last one.
    fn replace(&self, now: Option<String>) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *last != now;
        *last = now;
        is_new
    }
}

impl RedisCache {
    /// For the store with this id. It connects in a task of its own, for as long as it takes, on the runtime that this is
    /// called on.
    ///
    /// # Errors
    /// Where the certificates make no sense.
    pub fn connect_lazily(servers: &Servers, store: [u8; 16]) -> Result<Self, OpenError> {
        let manager = ConnectionManager::lazy(servers, COMMAND_TIMEOUT)?;
        // So many that share a Redis do not get in each other's way.
        let channel = format!("oncegate-cache:{}", Hex(&store[..8]));
        let prefix = format!("{channel}:").into_bytes();
        let removals = Arc::<Removals>::default();
        let tell = Arc::clone(&removals);
        let mut listening = JoinSet::new();
        listening.spawn(listener::run(manager.clone(), channel.clone(), move |event| match event {
            ListenerEvent::Subscribed => tell.publish(Removal::Subscribed),
            ListenerEvent::Message(id) => {
                id.try_into().into_iter().for_each(|id| tell.publish(Removal::Of(RecordId(id))));
            }
            ListenerEvent::Lost => tell.publish(Removal::Lost),
        }));
        let quotas = Arc::new(RedisQuotas::new(manager.clone(), &[&prefix[..], b"quota:"].concat()));
        Ok(Self {
            quotas,
            manager,
            prefix,
            channel,
            removals,
            put_error: LastError::default(),
            invalidate_error: LastError::default(),
            _listening: listening,
        })
    }

    fn add(&self, commands: &mut Vec<Cmd>, operation: &CacheOperation) {
        let on = |name: &str, id: &RecordId| {
            let mut command = redis::cmd(name);
            command.arg([&self.prefix, &id.0[..]].concat());
            command
        };
        match operation {
            CacheOperation::Get(id) => {
                // Whatever stands there, no more of it is read than a value has.
                let mut command = on("GETRANGE", id);
                command.arg(0).arg(LONGEST - 1);
                commands.push(command);
            }
            CacheOperation::Put(id, value, life) => {
                let mut command = on("SET", id);
                command.arg(&value[..]).arg("PX").arg((life.as_millis() as u64).max(1));
                commands.push(command);
            }
            CacheOperation::Delete(id) => commands.push(on("UNLINK", id)),
            CacheOperation::Invalidate(id) => {
                commands.push(on("UNLINK", id));
                let mut tell = redis::cmd("PUBLISH");
                tell.arg(&self.channel).arg(&id.0[..]);
                commands.push(tell);
            }
        }
    }

    /// Logs the first value that Redis refuses, and when it accepts values again.
    fn log_put(&self, response: &RedisResult<Value>) {
        match response {
            Ok(_) => {
                if self.put_error.replace(None) {
                    tracing::info!("the cache accepts values again");
                }
            }
            Err(error) if self.put_error.replace(Some(message(error))) => {
                let hint = match code(error) {
                    Some("OOM") => {
                        ": give it room, and let it make room by itself (maxmemory-policy allkeys-lru); until then \
                         gates remember less"
                    }
                    _ => "",
                };
                tracing::warn!(error = message(error), "the cache refuses values{hint}");
            }
            Err(_) => {}
        }
    }

    /// Checks that a value was invalidated. A value that remains expires by itself, and other gates ask the store:
    /// only a server that takes no writes counts as down.
    fn check_invalidated(&self, response: [RedisResult<Value>; 2]) -> Result<(), RemoteError> {
        let error = response.into_iter().find_map(Result::err);
        let failure = error.as_ref().map(message);
        if self.invalidate_error.replace(failure.clone())
            && let Some(error) = &failure
        {
            tracing::warn!(error, "a cached value could not be invalidated in the cache or in other gates");
        }
        match error {
            Some(error) if code(&error) == Some("READONLY") || code(&error).is_none() => {
                Err(RemoteError(message(&error)))
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl RemoteCache for RedisCache {
    async fn execute(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
        let mut commands = Vec::with_capacity(batch.len());
        batch.iter().for_each(|operation| self.add(&mut commands, operation));
        let response = self.manager.send(&commands).await.map_err(|error| RemoteError(message(&error)))?;
        // In a cluster some nodes may answer.
        let unanswered = |response: &RedisResult<Value>| response.as_ref().is_err_and(|error| code(error).is_none());
        if let Some(Err(error)) = response.first()
            && response.iter().all(unanswered)
        {
            return Err(RemoteError(message(error)));
        }
        let (mut response, mut found) = (response.into_iter(), Vec::new());
        let mut next = || response.next().unwrap_or(Ok(Value::Nil));
        for operation in batch {
            match operation {
                CacheOperation::Get(_) => found.push(value(next())),
                CacheOperation::Put(..) => self.log_put(&next()),
                CacheOperation::Delete(_) => drop(next()),
                CacheOperation::Invalidate(_) => self.check_invalidated([next(), next()])?,
            }
        }
        Ok(found)
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        self.removals.subscribe()
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        Some(Arc::<RedisQuotas>::clone(&self.quotas))
    }
}

/// The value of a key, if the server returned one; nothing of a key that is not there is empty.
fn value(response: RedisResult<Value>) -> Option<Bytes> {
    match response {
        Ok(Value::BulkString(value)) if value.is_empty() => None,
        Ok(Value::BulkString(value)) => Some(value.into()),
        // Written by another program: not a value.
        Err(error) if code(&error) == Some("WRONGTYPE") => Some(Bytes::new()),
        Ok(_) | Err(_) => None,
    }
}
