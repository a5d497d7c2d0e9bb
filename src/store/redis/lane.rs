//! A queue, and the round trips that empty it.
//!
//! While one round trip is under way callers gather for the next, which carries them all. A second joins in only where many
//! wait already, or the first takes long. A lone caller waits for nobody.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::caller::Caller;
use super::operation::{self, Operation, Said};
use super::queue::{Pending, Queue};
use crate::store::callers::finish_where_they_wait;
use crate::store::{Error, ErrorKind};

/// For a round trip that takes longer than this nobody waits.
const PROMPT: Duration = Duration::from_millis(10);

/// How many round trips are under way at most.
const WORKERS: usize = 2;

/// A queue of operations with what carries them out.
pub(super) struct Lane {
    shared: Arc<Shared>,
    workers: Mutex<JoinSet<()>>,
}

struct Shared {
    caller: Arc<Caller>,
    queue: Mutex<Queue>,
    /// Something is to be taken up, or the lane closes.
    filled: Notify,
}

impl Lane {
    /// A lane whose tasks run on the runtime that this is called on.
    pub(super) fn open(caller: Arc<Caller>) -> Self {
        let shared = Arc::new(Shared { caller, queue: Mutex::default(), filled: Notify::new() });
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            workers.spawn(keep_working(Arc::clone(&shared)));
        }
        Self { shared, workers: Mutex::new(workers) }
    }

    /// Has an operation carried out with all others that wait.
    pub(super) async fn ask(&self, operation: Operation) -> Result<Said, Error> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending { operation, reply, runtime: Handle::try_current().ok(), since: Instant::now() };
        self.shared.push(pending)?;
        // Dropped unanswered only where a worker panicked.
        answer.await.unwrap_or_else(|_| Err(Error::indeterminate(ErrorKind::Other, "the store failed at this")))
    }

    /// Carries out what waits, takes nothing more, and ends.
    pub(super) async fn close(&self) {
        self.shared.lock().is_closing = true;
        self.shared.filled.notify_waiters();
        let mut workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        while workers.join_next().await.is_some() {}
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing that is done under it can leave the queue half changed.
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

    /// What one batch carries of all that waits; nothing where the lane closes and nothing is left.
    async fn take(&self) -> Option<Vec<Pending>> {
        loop {
            let filled = self.filled.notified();
            tokio::pin!(filled);
            // From here on it is woken, also by what comes before it waits.
            filled.as_mut().enable();
            {
                let mut queue = self.lock();
                if queue.is_due() {
                    let batch = queue.batch();
                    if !batch.is_empty() {
                        queue.prompt += 1;
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

    /// Has a batch carried out, while which others wait for it for no longer than it is prompt.
    async fn promptly(&self, carrying: impl Future<Output = ()>) {
        let mut carrying = pin!(carrying);
        let prompt = Prompt(self);
        if timeout(PROMPT, carrying.as_mut()).await.is_ok() {
            return;
        }
        drop(prompt);
        self.filled.notify_last();
        carrying.await;
    }
}

/// A round trip that may soon have been answered, as the queue counts it.
struct Prompt<'a>(&'a Shared);

impl Drop for Prompt<'_> {
    fn drop(&mut self) {
        self.0.lock().prompt -= 1;
    }
}

/// Works, and again where that panicked.
async fn keep_working(shared: Arc<Shared>) {
    loop {
        // The set ends the worker with this task.
        let mut worker = JoinSet::new();
        let working = Arc::clone(&shared);
        worker.spawn(async move {
            while let Some(batch) = working.take().await {
                working.promptly(carry_out(&working.caller, batch)).await;
            }
        });
        match worker.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!("a worker of the store panicked; it starts again"),
            _ => return,
        }
    }
}

async fn carry_out(caller: &Caller, batch: Vec<Pending>) {
    let (batch, stale): (Vec<_>, Vec<_>) =
        batch.into_iter().partition(|pending| pending.since.elapsed() < super::ANSWER);
    let too_slow = || Err(Error::determinate(ErrorKind::Timeout, "Redis was too slow to be asked"));
    answer(stale.into_iter().map(|pending| (pending, too_slow())).collect());
    if batch.is_empty() {
        return;
    }
    let operations: Vec<&Operation> = batch.iter().map(|pending| &pending.operation).collect();
    let said = operation::carry_out(caller, &operations).await;
    answer(batch.into_iter().zip(said).collect());
}

fn answer(answered: Vec<(Pending, Result<Said, Error>)>) {
    finish_where_they_wait(
        answered,
        |(pending, _)| pending.runtime.as_ref(),
        |(pending, reply)| {
            // The caller may have gone.
            let _ = pending.reply.send(reply);
        },
    );
}
