//! Batches operations: a queue, and the workers that empty it.
//!
//! While one round trip is in flight, operations queue for the next, which carries them all. A second starts only if
//! many are queued already, or the first is slow. A lone caller is served at once.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::operation::{self, Operation, Reply};
use super::queue::{Pending, Queue};
use super::script_client::ScriptClient;
use crate::store::wakeups::finish_on_caller_runtimes;
use crate::store::{Error, ErrorKind};

/// After this time, a second worker no longer waits for a round trip in flight.
const SLOW_AFTER: Duration = Duration::from_millis(10);

/// How many round trips are under way at most.
const WORKERS: usize = 2;

/// A queue of operations, and the workers that execute them.
pub(super) struct Batcher {
    shared: Arc<Shared>,
    workers: Mutex<JoinSet<()>>,
}

struct Shared {
    client: Arc<ScriptClient>,
    queue: Mutex<Queue>,
    /// A batch is due, or the batcher closes.
    filled: Notify,
}

impl Batcher {
    /// A batcher whose tasks run on the runtime that this is called on.
    pub(super) fn open(client: Arc<ScriptClient>) -> Self {
        let shared = Arc::new(Shared { client, queue: Mutex::default(), filled: Notify::new() });
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            workers.spawn(supervise_worker(Arc::clone(&shared)));
        }
        Self { shared, workers: Mutex::new(workers) }
    }

    /// Executes an operation, batched with the others in the queue.
    pub(super) async fn submit(&self, operation: Operation) -> Result<Reply, Error> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending { operation, reply, runtime: Handle::try_current().ok(), since: Instant::now() };
        self.shared.push(pending)?;
        // Dropped unanswered only where a worker panicked.
        answer.await.unwrap_or_else(|_| {
            Err(Error::indeterminate(ErrorKind::Other, "the store's worker failed during this operation"))
        })
    }

    /// Executes the queued operations, accepts no more, and ends.
    pub(super) async fn close(&self) {
        self.shared.lock().is_closing = true;
        self.shared.filled.notify_waiters();
        let mut workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        while workers.join_next().await.is_some() {}
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No operation under the lock can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, pending: Pending) -> Result<(), Error> {
        let mut queue = self.lock();
        queue.push(pending)?;
        let is_due = queue.is_due();
        drop(queue);
        if is_due {
            self.filled.notify_last();
        }
        Ok(())
    }

    /// The next batch; `None` once the batcher closes and the queue is empty.
    async fn take(&self) -> Option<Vec<Pending>> {
        loop {
            let filled = self.filled.notified();
            tokio::pin!(filled);
            // From here on it is woken, also by a notification before it is awaited.
            filled.as_mut().enable();
            {
                let mut queue = self.lock();
                if queue.is_due() {
                    let batch = queue.batch();
                    if !batch.is_empty() {
                        queue.in_flight += 1;
                        if queue.is_due() {
                            self.filled.notify_last();
                        }
                        return Some(batch);
                    }
                }
                if queue.is_closing {
                    return None;
                }
            }
            filled.await;
        }
    }

    /// Awaits a batch. Once it is slow, the other worker no longer waits for it.
    async fn await_batch(&self, carrying: impl Future<Output = ()>) {
        let mut carrying = pin!(carrying);
        let in_flight = InFlight(self);
        if timeout(SLOW_AFTER, carrying.as_mut()).await.is_ok() {
            return;
        }
        drop(in_flight);
        self.filled.notify_last();
        carrying.await;
    }
}

/// Counts a round trip in flight that is not slow yet.
struct InFlight<'a>(&'a Shared);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
    }
}

/// Runs a worker, and restarts it after a panic.
async fn supervise_worker(shared: Arc<Shared>) {
    loop {
        // The set ends the worker with this task.
        let mut worker = JoinSet::new();
        let working = Arc::clone(&shared);
        worker.spawn(async move {
            while let Some(batch) = working.take().await {
                working.await_batch(execute(&working.client, batch)).await;
            }
        });
        match worker.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!("a worker of the store panicked; it starts again"),
            _ => return,
        }
    }
}

async fn execute(client: &ScriptClient, batch: Vec<Pending>) {
    let (batch, stale): (Vec<_>, Vec<_>) =
        batch.into_iter().partition(|pending| pending.since.elapsed() < super::COMMAND_TIMEOUT);
    let too_slow = || Err(Error::determinate(ErrorKind::Timeout, "timed out in the queue: Redis is too slow"));
    answer(stale.into_iter().map(|pending| (pending, too_slow())).collect());
    if batch.is_empty() {
        return;
    }
    let operations: Vec<&Operation> = batch.iter().map(|pending| &pending.operation).collect();
    let response = operation::execute(client, &operations).await;
    answer(batch.into_iter().zip(response).collect());
}

fn answer(answered: Vec<(Pending, Result<Reply, Error>)>) {
    finish_on_caller_runtimes(
        answered,
        |(pending, _)| pending.runtime.as_ref(),
        |(pending, reply)| {
            // The caller may have gone.
            let _ = pending.reply.send(reply);
        },
    );
}
