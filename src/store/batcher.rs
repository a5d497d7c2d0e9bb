//! Batches the operations of a store: a queue, and a few workers that empty it.
//!
//! An idle worker takes all queued operations but large ones: while one batch is in flight, operations queue for the next, which
//! carries them all. A second worker joins in only if many are queued already, or the first is slow: two in parallel would carry
//! half as much each. A lone caller is served at once. A large operation has a batch of its own.
//!
//! Each worker has a connection. While none works, callers are refused at once; connections are tried again until one
//! does. A [`Backend`] says how a batch is carried out on a connection, and what its errors mean.

mod queue;
#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use self::queue::{Answer, Pending, Queue, answer, fail};
pub(super) use self::queue::{Operation, finish_on_caller_runtimes};
use super::{Error, ErrorKind};

/// After this time, a second worker no longer waits for a batch in flight.
const SLOW_AFTER: Duration = Duration::from_millis(10);

/// How long an operation may be queued. Its caller has timed out by then.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a batch that conflicts is retried at once.
const MAX_RETRIES: usize = 3;

/// The delay between two tries to connect, at first and at most.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// How batches are carried out.
pub(super) trait Backend: Send + Sync + 'static {
    /// What callers submit.
    type Operation: Operation;

    /// What carries one batch at a time.
    type Connection: Send + Sync + 'static;

    /// The operations' name in the log.
    const WHAT: &'static str;

    /// How many bytes one batch carries, give or take one operation. One that is larger has a batch of its own.
    const MAX_BATCH_BYTES: usize;

    /// Makes a connection, and checks that it works.
    fn connect(&self) -> impl Future<Output = Result<Self::Connection, Error>> + Send;

    /// Returns when an idle connection has ended.
    fn ended(connection: &Self::Connection) -> impl Future<Output = ()> + Send;

    /// Closes a connection that has ended or failed.
    fn give_up(connection: Self::Connection);

    /// Executes a batch, which is in the order of ids, each once.
    fn execute(
        &self,
        connection: &Self::Connection,
        batch: &[&Self::Operation],
    ) -> impl Future<Output = Result<Replies<Self::Operation>, Failure>> + Send;
}

/// The reply to each operation of a batch; `None` to queue it again.
pub(super) type Replies<O> = Vec<Option<Answer<O>>>;

/// What the failure of a batch means.
pub(super) enum Failure {
    /// Nothing was done, since something else in the store was in the way: the batch is retried at once.
    Conflict(Error),
    /// Nothing was done, and a single operation may be the cause: the batch is split to find it.
    OfOne(Error),
    /// The failure is that of each operation.
    OfAll(Error),
    /// The same, and the connection is lost.
    Lost(Error),
    /// The same, since there was no answer in time. Unless other connections work, callers are refused until one does:
    /// finding out that a new connection hangs too would take as long again.
    Hung(Error),
}

/// A queue of operations, and the workers that execute them.
pub(super) struct Batcher<B: Backend> {
    shared: Arc<Shared<B>>,
    workers: Mutex<JoinSet<()>>,
}

struct Shared<B: Backend> {
    backend: B,
    queue: Mutex<Queue<B::Operation>>,
    /// A batch is due, or the batcher closes. Only workers whose connections work wait for it, and the one that worked
    /// last is notified: the caches of its server process are warm.
    filled: Notify,
    /// The batcher closes.
    closing: Notify,
}

impl<B: Backend> Batcher<B> {
    /// A batcher with so many connections, which are made now. The first is `first`, if there is one. Its tasks run on
    /// the runtime that this is called on.
    pub(super) fn open(backend: B, mut first: Option<B::Connection>, connections: usize) -> Self {
        let queue = Queue::new(B::MAX_BATCH_BYTES, usize::from(first.is_some()));
        let (filled, closing) = (Notify::new(), Notify::new());
        let shared = Arc::new(Shared { backend, queue: Mutex::new(queue), filled, closing });
        let mut workers = JoinSet::new();
        for _ in 0..connections {
            workers.spawn(supervise_worker(Arc::clone(&shared), first.take()));
        }
        Self { shared, workers: Mutex::new(workers) }
    }

    /// Executes an operation, batched with the others in the queue.
    pub(super) async fn submit(&self, operation: B::Operation) -> Answer<B::Operation> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending { operation, reply, runtime: Handle::try_current().ok(), since: Instant::now() };
        self.shared.push(pending)?;
        // Dropped unanswered only where a worker panicked.
        answer.await.unwrap_or_else(|_| {
            Err(Error::indeterminate(ErrorKind::Other, "the store's worker failed during this operation"))
        })
    }

    /// Why operations are refused at this moment, if they are.
    pub(super) fn refusal(&self) -> Option<Error> {
        self.shared.lock().refusal()
    }

    /// Executes the queued operations, accepts no more, and ends.
    pub(super) async fn close(&self) {
        self.shared.lock().is_closing = true;
        self.shared.filled.notify_waiters();
        self.shared.closing.notify_waiters();
        let mut workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        while workers.join_next().await.is_some() {}
        self.shared.refuse_all(&Error::closed());
    }
}

/// Runs a worker, and restarts it after a panic.
async fn supervise_worker<B: Backend>(shared: Arc<Shared<B>>, mut first: Option<B::Connection>) {
    loop {
        // The set ends the worker with this task.
        let mut worker = JoinSet::new();
        worker.spawn(run_worker(Arc::clone(&shared), first.take()));
        match worker.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!("a worker of the store panicked; it starts again"),
            _ => return,
        }
    }
}

/// Executes batches, on this connection while it works and then on new ones.
async fn run_worker<B: Backend>(shared: Arc<Shared<B>>, mut first: Option<B::Connection>) {
    loop {
        let connection = match first.take() {
            Some(connection) => connection,
            None => match shared.connect().await {
                Some(connection) => connection,
                None => return,
            },
        };
        let connected = Connected(&shared);
        if !shared.run_on(&connection).await {
            return;
        }
        drop(connected);
        B::give_up(connection);
    }
}

impl<B: Backend> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B::Operation>> {
        // No operation under the lock can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, pending: Pending<B::Operation>) -> Result<(), Error> {
        let mut queue = self.lock();
        queue.push(pending)?;
        let is_due = queue.is_due();
        drop(queue);
        if is_due {
            self.filled.notify_last();
        }
        Ok(())
    }

    /// A working connection; `None` once the batcher closes.
    async fn connect(&self) -> Option<B::Connection> {
        let (mut pause, mut is_reported) = (MIN_BACKOFF, false);
        while !self.lock().is_closing {
            match self.backend.connect().await {
                Ok(connection) => {
                    self.connection_up();
                    if is_reported {
                        tracing::info!(what = B::WHAT, "a connection to the store works again");
                    }
                    return Some(connection);
                }
                Err(error) => {
                    let (message, what) = (error.cause().source.to_string(), B::WHAT);
                    let connected = self.connect_failed(error);
                    // Where no connection works, claims fail: that is reported as an outage.
                    if connected > 0 && pause == MAX_BACKOFF && !is_reported {
                        is_reported = true;
                        tracing::warn!(
                            error = message,
                            what,
                            connected,
                            "a connection to the store fails; trying again"
                        );
                    } else {
                        tracing::debug!(error = message, what, connected, "a connection to the store failed");
                    }
                }
            }
            let _ = timeout(pause, self.closing.notified()).await;
            pause = (pause * 2).min(MAX_BACKOFF);
        }
        None
    }

    /// Executes batches on a connection until it fails. False if the batcher closes and nothing is left.
    async fn run_on(&self, connection: &B::Connection) -> bool {
        let mut ended = pin!(B::ended(connection));
        loop {
            let batch = tokio::select! {
                biased;
                () = ended.as_mut() => return true,
                batch = self.take() => batch,
            };
            let Some((batch, in_flight)) = batch else { return false };
            if !self.await_batch(self.execute(connection, batch), in_flight).await {
                return true;
            }
        }
    }

    /// The next batch; `None` if the batcher closes and nothing is left.
    async fn take(&self) -> Option<(Vec<Pending<B::Operation>>, InFlight<'_, B>)> {
        loop {
            let mut filled = pin!(self.filled.notified());
            // From here on it is woken, also by a notification before it is awaited.
            filled.as_mut().enable();
            {
                let mut queue = self.lock();
                if queue.is_due() {
                    let batch = queue.batch();
                    if let Some(first) = batch.first() {
                        let is_large = queue.is_large(first);
                        *queue.count(is_large) += 1;
                        if queue.is_due() {
                            self.filled.notify_last();
                        }
                        return Some((batch, InFlight { shared: self, is_large }));
                    }
                }
                if queue.is_closing {
                    return None;
                }
            }
            filled.await;
        }
    }

    /// Awaits a batch. Once it is slow, other workers no longer wait for it, and for a large one they never do. Its own takes the
    /// next batch, unless its connection fails.
    async fn await_batch<T>(&self, carrying: impl Future<Output = T>, in_flight: InFlight<'_, B>) -> T {
        if in_flight.is_large {
            return carrying.await;
        }
        let mut carrying = pin!(carrying);
        if let Ok(carried) = timeout(SLOW_AFTER, carrying.as_mut()).await {
            return carried;
        }
        drop(in_flight);
        self.filled.notify_last();
        carrying.await
    }

    /// Executes a batch. Returns whether the connection still works.
    async fn execute(&self, connection: &B::Connection, mut batch: Vec<Pending<B::Operation>>) -> bool {
        let now = Instant::now();
        let stale: Vec<_> = batch.extract_if(.., |pending| now - pending.since >= QUEUE_TIMEOUT).collect();
        fail(stale, &Error::determinate(ErrorKind::Timeout, "timed out in the queue: the store is too slow"));
        // The parts that remain, the first one last.
        let mut parts = vec![batch];
        let mut retries = MAX_RETRIES;
        while let Some(mut part) = parts.pop().filter(|part| !part.is_empty()) {
            let operations: Vec<&B::Operation> = part.iter().map(|pending| &pending.operation).collect();
            let failure = match self.backend.execute(connection, &operations).await {
                Ok(replies) => {
                    self.reply(part, replies);
                    continue;
                }
                Err(failure) => failure,
            };
            match failure {
                Failure::Conflict(_) if retries > 0 => {
                    retries -= 1;
                    parts.push(part);
                }
                Failure::OfOne(_) if part.len() > 1 => {
                    let rest = part.split_off(part.len() / 2);
                    parts.extend([rest, part]);
                }
                Failure::Conflict(error) | Failure::OfOne(error) | Failure::OfAll(error) => fail(part, &error),
                Failure::Lost(ref error) | Failure::Hung(ref error) => {
                    if matches!(failure, Failure::Hung(_)) {
                        let cause = error.cause();
                        self.lock().failure = Some(Error::determinate(cause.kind, cause.source.to_string()));
                    }
                    fail(part, error);
                    // Not sent, and not to be sent on this connection.
                    let unsent = Error::determinate(ErrorKind::Unavailable, "the connection to the store was lost");
                    fail(parts.into_iter().flatten(), &unsent);
                    return false;
                }
            }
        }
        true
    }

    /// Answers operations, and puts those without a reply back, ahead of all others.
    fn reply(&self, batch: Vec<Pending<B::Operation>>, replies: Replies<B::Operation>) {
        let (mut answered, mut again) = (Vec::with_capacity(batch.len()), Vec::new());
        for (pending, reply) in batch.into_iter().zip(replies) {
            match reply {
                Some(reply) => answered.push((pending, reply)),
                None => again.push(pending),
            }
        }
        answer(answered);
        if !again.is_empty() {
            self.lock().put_back(again);
            self.filled.notify_last();
        }
    }

    /// Refuses all queued operations.
    fn refuse_all(&self, refusal: &Error) {
        let waiting = self.lock().take_all();
        fail(waiting, refusal);
    }

    fn connection_up(&self) {
        let mut queue = self.lock();
        queue.connected += 1;
        queue.failure = None;
    }

    fn connection_down(&self) {
        let refusal = {
            let mut queue = self.lock();
            queue.connected -= 1;
            queue.outage()
        };
        match refusal {
            Some(refusal) => self.refuse_all(&refusal),
            // It had taken no batch.
            None => self.filled.notify_last(),
        }
    }

    /// A connection could not be made. Returns how many others work: with any, operations go on.
    fn connect_failed(&self, error: Error) -> usize {
        let (connected, refusal) = {
            let mut queue = self.lock();
            queue.failure = Some(error);
            (queue.connected, queue.outage())
        };
        if let Some(refusal) = refusal {
            self.refuse_all(&refusal);
        }
        connected
    }
}

/// Counts a working connection.
struct Connected<'a, B: Backend>(&'a Shared<B>);

impl<B: Backend> Drop for Connected<'_, B> {
    fn drop(&mut self) {
        self.0.connection_down();
    }
}

/// Counts a batch in flight that is large, or not slow yet.
struct InFlight<'a, B: Backend> {
    shared: &'a Shared<B>,
    is_large: bool,
}

impl<B: Backend> Drop for InFlight<'_, B> {
    fn drop(&mut self) {
        // Another large one may wait for this: the worker that ends takes it next, or the loss of its connection wakes another.
        *self.shared.lock().count(self.is_large) -= 1;
    }
}
