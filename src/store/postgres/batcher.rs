//! Batches operations: a queue, and a few connections that empty it.
//!
//! An idle connection takes all queued operations: while one statement is in flight, operations queue for the next. A
//! second connection joins in only if many are queued already, or the first is slow: two in parallel would carry half
//! as much each. A lone caller is served at once.
//!
//! While no connection works, callers are refused at once; connections are tried again until one does.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connect::{CallError, Connector, STATEMENT_TIMEOUT, Session};
use super::error::{self, OpenError};
use super::queue::{Operation, Pending, Queue, closed};
use crate::store::wakeups::finish_on_caller_runtimes;
use crate::store::{Error, ErrorKind};

/// After this time, a second connection no longer waits for a statement in flight.
const SLOW_AFTER: Duration = Duration::from_millis(10);

/// How often a batch that conflicts with another transaction is retried at once.
const MAX_RETRIES: usize = 3;

const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// A queue of operations, and the connections that execute them.
pub(super) struct Batcher<O: Operation> {
    shared: Arc<Shared<O>>,
    workers: Mutex<JoinSet<()>>,
}

struct Shared<O: Operation> {
    connector: Connector,
    queue: Mutex<Queue<O>>,
    /// A batch is due, or the batcher closes. Only connections that work wait for it, and the one that worked last is
    /// notified: the caches of its server process are warm.
    filled: Notify,
    /// The batcher closes.
    closing: Notify,
}

/// An operation with its result.
type Answered<O> = (Pending<O>, Result<<O as Operation>::Reply, Error>);

impl<O: Operation> Batcher<O> {
    /// A batcher of `connections`, which are made now. The first is `first`.
    pub(super) fn open(connector: Connector, first: Session, connections: usize) -> Self {
        let queue = Mutex::new(Queue::new());
        let shared = Arc::new(Shared { connector, queue, filled: Notify::new(), closing: Notify::new() });
        let mut workers = JoinSet::new();
        let mut first = Some(first);
        for _ in 0..connections {
            let session = first.take();
            if session.is_some() {
                shared.lock().connected += 1;
            }
            workers.spawn(supervise_worker(Arc::clone(&shared), session));
        }
        Self { shared, workers: Mutex::new(workers) }
    }

    /// Executes an operation, batched with the others in the queue.
    pub(super) async fn submit(&self, operation: O) -> Result<O::Reply, Error> {
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
        self.shared.refuse_all(&closed());
    }
}

impl<O: Operation> Shared<O> {
    fn lock(&self) -> MutexGuard<'_, Queue<O>> {
        // No operation under the lock can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, pending: Pending<O>) -> Result<(), Error> {
        let mut queue = self.lock();
        queue.push(pending)?;
        let is_due = queue.is_due();
        drop(queue);
        if is_due {
            self.filled.notify_last();
        }
        Ok(())
    }

    /// The next batch, in the order of ids and each id once; `None` if the batcher closes and nothing is left.
    async fn take(&self) -> Option<Vec<Pending<O>>> {
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

    /// Awaits a statement. Once it is slow, other connections no longer wait for it. Its connection takes the next
    /// batch, unless it ends.
    async fn await_statement<T>(&self, statement: impl Future<Output = T>) -> T {
        let mut statement = pin!(statement);
        let in_flight = InFlight(self);
        if let Ok(answered) = timeout(SLOW_AFTER, statement.as_mut()).await {
            return answered;
        }
        drop(in_flight);
        self.filled.notify_last();
        statement.await
    }

    /// Puts back operations to retry, ahead of all others.
    fn put_back(&self, again: Vec<Pending<O>>) {
        if again.is_empty() {
            return;
        }
        self.lock().put_back(again);
        self.filled.notify_last();
    }

    /// Refuses all queued operations.
    fn refuse_all(&self, refusal: &Error) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        let cause = refusal.cause();
        let refused = |pending| (pending, Err(Error::determinate(cause.kind, cause.source.to_string())));
        answer(waiting.into_iter().map(refused).collect());
    }

    /// A connection is up.
    fn connection_up(&self) {
        let mut queue = self.lock();
        queue.connected += 1;
        if let Some((_, message)) = queue.failure.take() {
            tracing::info!(was = message, what = O::WHAT, "the database answers again");
        }
    }

    /// A connection is down.
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

    /// The server did not answer on a connection. Unless others work, callers are refused until one does: finding out
    /// that a new connection hangs too would take as long again.
    fn connection_hung(&self, error: &Error) {
        let cause = error.cause();
        self.lock().failure = Some((cause.kind, cause.source.to_string()));
    }

    /// A connection could not be made. While others work, operations go on.
    fn connect_failed(&self, error: &OpenError) {
        let refusal = {
            let mut queue = self.lock();
            let message = error.to_string();
            let is_change = queue.failure.as_ref().is_none_or(|(_, before)| *before != message);
            if is_change {
                let what = O::WHAT;
                if queue.connected > 0 {
                    tracing::warn!(
                        error = message,
                        what,
                        connected = queue.connected,
                        "a connection fails; trying again"
                    );
                } else {
                    tracing::warn!(
                        error = message,
                        what,
                        "no connection to the database: operations are refused until one works again"
                    );
                }
            }
            queue.failure = Some((ErrorKind::Unavailable, message));
            queue.outage()
        };
        if let Some(refusal) = refusal {
            self.refuse_all(&refusal);
        }
    }

    fn is_closing(&self) -> bool {
        self.lock().is_closing
    }
}

/// Counts a statement in flight that is not slow yet.
struct InFlight<'a, O: Operation>(&'a Shared<O>);

impl<O: Operation> Drop for InFlight<'_, O> {
    fn drop(&mut self) {
        self.0.lock().in_flight -= 1;
    }
}

/// Runs a worker, and restarts it after a panic.
async fn supervise_worker<O: Operation>(shared: Arc<Shared<O>>, mut first: Option<Session>) {
    loop {
        // The set ends the worker with this task.
        let mut worker = JoinSet::new();
        worker.spawn(run_worker(Arc::clone(&shared), first.take()));
        match worker.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!("a connection's worker panicked; it starts again"),
            _ => return,
        }
    }
}

/// Counts a working connection.
struct ConnectedGuard<O: Operation>(Arc<Shared<O>>);

impl<O: Operation> Drop for ConnectedGuard<O> {
    fn drop(&mut self) {
        self.0.connection_down();
    }
}

/// Executes batches, on this connection while it works and then on new ones.
async fn run_worker<O: Operation>(shared: Arc<Shared<O>>, first: Option<Session>) {
    let mut session = first;
    loop {
        let working = match session.take() {
            Some(working) => working,
            None => match connect(&shared).await {
                Some(connected) => connected,
                None => return,
            },
        };
        let counted = ConnectedGuard(Arc::clone(&shared));
        loop {
            let batch = tokio::select! {
                biased;
                () = working.ended() => break,
                batch = shared.take() => batch,
            };
            let Some(batch) = batch else { return };
            if !shared.await_statement(execute(&shared, &working, batch)).await {
                break;
            }
        }
        drop(counted);
        working.give_up();
    }
}

/// A working connection; `None` once the batcher closes.
async fn connect<O: Operation>(shared: &Shared<O>) -> Option<Session> {
    let mut pause = MIN_BACKOFF;
    while !shared.is_closing() {
        match shared.connector.connect(O::QUERIES).await {
            Ok(session) => {
                shared.connection_up();
                return Some(session);
            }
            Err(error) => shared.connect_failed(&error),
        }
        let _ = timeout(pause, shared.closing.notified()).await;
        pause = (pause * 2).min(MAX_BACKOFF);
    }
    None
}

/// Executes a batch. Returns whether the connection is still usable.
async fn execute<O: Operation>(shared: &Shared<O>, session: &Session, batch: Vec<Pending<O>>) -> bool {
    let (batch, stale): (Vec<_>, Vec<_>) =
        batch.into_iter().partition(|pending| pending.since.elapsed() < STATEMENT_TIMEOUT);
    answer(stale.into_iter().map(|pending| (pending, Err(too_slow()))).collect());
    // The parts that remain, the first one last.
    let mut parts = vec![batch];
    let mut tries = 0;
    while let Some(part) = parts.pop().filter(|part: &Vec<Pending<O>>| !part.is_empty()) {
        let operations: Vec<&O> = part.iter().map(|pending| &pending.operation).collect();
        match O::execute(session, &operations).await {
            Ok(replies) => {
                let (mut answered, mut again) = (Vec::with_capacity(part.len()), Vec::new());
                for (pending, reply) in part.into_iter().zip(replies) {
                    match reply {
                        Some(reply) => answered.push((pending, Ok(reply))),
                        None => again.push(pending),
                    }
                }
                answer(answered);
                shared.put_back(again);
            }
            Err(CallError::Sql(error))
                if error::is_transient(&error)
                    && tries < MAX_RETRIES
                    && !(error::is_lock_timeout(&error) && part.len() > 1) =>
            {
                tries += 1;
                parts.push(part);
            }
            // One of them causes the error: splits the batch to find it.
            Err(CallError::Sql(error)) if part.len() > 1 && error::had_no_effect(&error) && !is_for_all(&error) => {
                let mut part = part;
                let rest = part.split_off(part.len() / 2);
                parts.extend([rest, part]);
            }
            Err(failed) => {
                let (is_fatal, is_late) = (failed.is_fatal(), matches!(failed, CallError::Late));
                let error = failed.into_error();
                if is_late {
                    shared.connection_hung(&error);
                }
                let mut failed: Vec<Answered<O>> =
                    part.into_iter().map(|pending| (pending, Err(copy(&error)))).collect();
                if is_fatal {
                    // Not sent, and not to be sent on this connection.
                    failed.extend(parts.into_iter().flatten().map(|pending| {
                        (
                            pending,
                            Err(Error::determinate(ErrorKind::Unavailable, "the connection to the database was lost")),
                        )
                    }));
                    answer(failed);
                    return false;
                }
                answer(failed);
            }
        }
    }
    true
}

/// Whether an error comes from the server's state and would affect every operation of a batch, unlike a lock that one
/// of them waits for.
fn is_for_all(error: &tokio_postgres::Error) -> bool {
    error::kind(error) != ErrorKind::Other && !error::is_lock_timeout(error)
}

fn copy(error: &Error) -> Error {
    let (kind, message) = (error.cause().kind, error.cause().source.to_string());
    match error {
        Error::Determinate(_) => Error::determinate(kind, message),
        Error::Indeterminate(_) => Error::indeterminate(kind, message),
    }
}

fn answer<O: Operation>(answered: Vec<Answered<O>>) {
    finish_on_caller_runtimes(
        answered,
        |(pending, _)| pending.runtime.as_ref(),
        |(pending, reply)| {
            // The caller may have gone.
            let _ = pending.reply.send(reply);
        },
    );
}

fn too_slow() -> Error {
    Error::determinate(ErrorKind::Timeout, "timed out in the queue: the database is too slow")
}
