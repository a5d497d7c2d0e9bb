//! Quotas that gates share, in Redis.

use std::time::Duration;

use redis::{Cmd, RedisResult, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::error::message;
use super::manager::ConnectionManager;
use crate::idempotency::quota::{QuotaId, Rate};
use crate::store::SharedQuotas;

/// How many changes are queued. Further ones are dropped, as if Redis did not answer.
const MAX_QUEUED: usize = 4096;

/// How many changes one round trip carries.
const MAX_BATCH: usize = 256;

const SCRIPT: &str = include_str!("scripts/quota.lua");

/// Quotas in Redis. While one round trip is under way, changes queue; the next one carries them all.
pub(super) struct RedisQuotas {
    queue: mpsc::Sender<QuotaOperation>,
    /// The task that sends; ends with this.
    _worker: JoinSet<()>,
}

struct QuotaOperation {
    id: QuotaId,
    rate: Rate,
    /// Who waits for the answer; `None` where a key is given back.
    taker: Option<oneshot::Sender<Result<(), Duration>>>,
}

impl RedisQuotas {
    /// In keys that begin with `prefix`. Its task runs on the runtime that this is called on.
    pub(super) fn new(manager: ConnectionManager, prefix: &[u8]) -> Self {
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        let mut worker = JoinSet::new();
        worker.spawn(run(manager, prefix.to_vec(), queued));
        Self { queue, _worker: worker }
    }
}

impl SharedQuotas for RedisQuotas {
    fn take(&self, id: QuotaId, rate: Rate) -> Option<oneshot::Receiver<Result<(), Duration>>> {
        let (taker, answer) = oneshot::channel();
        self.queue.try_send(QuotaOperation { id, rate, taker: Some(taker) }).ok()?;
        Some(answer)
    }

    fn give_back(&self, id: QuotaId, rate: Rate) {
        let _ = self.queue.try_send(QuotaOperation { id, rate, taker: None });
    }
}

async fn run(manager: ConnectionManager, prefix: Vec<u8>, mut queued: mpsc::Receiver<QuotaOperation>) {
    let mut batch = Vec::with_capacity(MAX_BATCH);
    // A failure that repeats is logged once.
    let mut last = None;
    while queued.recv_many(&mut batch, MAX_BATCH).await > 0 {
        // Who does not wait any more counts without it.
        batch.retain(|change| change.taker.as_ref().is_none_or(|taker| !taker.is_closed()));
        let commands: Vec<Cmd> = batch.iter().map(|change| change.command(&prefix)).collect();
        match manager.send(&commands).await {
            Ok(answers) => {
                let mut late = Vec::new();
                for (change, answer) in batch.drain(..).zip(answers) {
                    let failure = match change.tell(answer) {
                        Ok(unused) => {
                            late.extend(unused);
                            None
                        }
                        Err(failure) => Some(failure),
                    };
                    if let Some(error) = failure.as_ref().filter(|_| failure != last) {
                        tracing::warn!(error, "Redis does not count quotas: each gate counts by itself meanwhile");
                    }
                    last = failure;
                }
                // With the next changes.
                batch = late;
            }
            // The outage itself is logged by what else asks.
            Err(_) => batch.clear(),
        }
    }
}

impl QuotaOperation {
    fn command(&self, prefix: &[u8]) -> Cmd {
        let verb = if self.taker.is_some() { "take" } else { "give back" };
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg([prefix, &self.id.0].concat());
        command.arg(self.rate.share).arg(self.rate.window).arg(verb);
        command
    }

    /// Tells the taker. A share that was granted to one who waits no longer is to be given back.
    fn tell(self, answer: RedisResult<Value>) -> Result<Option<Self>, String> {
        let granted = match answer {
            Ok(Value::Int(0)) => Ok(()),
            Ok(Value::Int(wait)) => Err(Duration::from_micros(wait.unsigned_abs())),
            Ok(_) => return Err("an unexpected answer".to_owned()),
            Err(error) => return Err(message(&error)),
        };
        let Self { id, rate, taker } = self;
        let is_unused = taker.is_some_and(|taker| taker.send(granted) == Err(Ok(())));
        Ok(is_unused.then_some(Self { id, rate, taker: None }))
    }
}
