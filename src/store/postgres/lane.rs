//! A queue, and a few connections that empty it.
//!
//! A connection that is free takes all that waits: while one statement is under way, callers gather for the next. A second
//! connection joins in only where many wait already, or the first takes long: two that run beside each other would carry
//! half as much each. A lone caller waits for nobody.
//!
//! While no connection works, callers are refused at once; connections are tried again until one does.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connect::{ANSWER, Connector, Failed, Session};
use super::error::{self, OpenError};
use super::queue::{Operation, Pending, Queue, closed};
use crate::store::callers::finish_where_they_wait;
use crate::store::{Error, ErrorKind};

/// For a statement that takes longer than this nobody waits.
const PROMPT: Duration = Duration::from_millis(10);

/// How often a batch that met another transaction is asked again at once.
const AGAIN: usize = 3;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A queue of operations with the connections that carry them out.
pub(super) struct Lane<O: Operation> {
    shared: Arc<Shared<O>>,
    workers: Mutex<JoinSet<()>>,
}

struct Shared<O: Operation> {
    connector: Connector,
    queue: Mutex<Queue<O>>,
    /// Something is to be taken up, or the lane closes. Only connections that work wait for it, and the one that worked
    /// last is told: its server process has all at hand.
    filled: Notify,
    /// The lane closes.
    closing: Notify,
}

/// An operation that has its answer.
type Answered<O> = (Pending<O>, Result<<O as Operation>::Reply, Error>);

impl<O: Operation> Lane<O> {
    /// A lane of `connections`, which are made now. The first is `first`.
    pub(super) fn open(connector: Connector, first: Session, connections: usize) -> Self {
        let queue = Mutex::new(Queue::new());
        let shared = Arc::new(Shared { connector, queue, filled: Notify::new(), closing: Notify::new() });
        let mut workers = JoinSet::new();
        let mut first = Some(first);
        for _ in 0..connections {
            let session = first.take();
            if session.is_some() {
                shared.lock().working += 1;
            }
            workers.spawn(keep_working(Arc::clone(&shared), session));
        }
        Self { shared, workers: Mutex::new(workers) }
    }

    /// Has an operation carried out with all others that wait.
    pub(super) async fn ask(&self, operation: O) -> Result<O::Reply, Error> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending { operation, reply, runtime: Handle::try_current().ok(), since: Instant::now() };
        self.shared.push(pending)?;
        // Dropped unanswered only where a worker panicked.
        answer.await.unwrap_or_else(|_| Err(Error::indeterminate(ErrorKind::Other, "the store failed at this")))
    }

    /// Why operations are refused at this moment, if they are.
    pub(super) fn refusal(&self) -> Option<Error> {
        self.shared.lock().refusal()
    }

    /// Carries out what waits, takes nothing more, and ends.
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
        // Nothing that is done under it can leave the queue half changed.
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

    /// All that waits, as far as one statement carries it, in the order of ids and each id once; nothing where the lane
    /// closes and nothing is left.
    async fn take(&self) -> Option<Vec<Pending<O>>> {
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

    /// Has a statement answered, while which others wait for it for no longer than it is prompt. The connection that it
    /// was sent on is the next to take up what waits, unless it ends.
    async fn promptly<T>(&self, statement: impl Future<Output = T>) -> T {
        let mut statement = pin!(statement);
        let prompt = Prompt(self);
        if let Ok(answered) = timeout(PROMPT, statement.as_mut()).await {
            return answered;
        }
        drop(prompt);
        self.filled.notify_last();
        statement.await
    }

    /// Puts back what is to be asked again, before all others.
    fn put_back(&self, again: Vec<Pending<O>>) {
        if again.is_empty() {
            return;
        }
        self.lock().put_back(again);
        self.filled.notify_last();
    }

    /// Refuses all that waits.
    fn refuse_all(&self, refusal: &Error) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        let cause = refusal.cause();
        let refused = |pending| (pending, Err(Error::determinate(cause.kind, cause.source.to_string())));
        answer(waiting.into_iter().map(refused).collect());
    }

    /// A connection came to work.
    fn began(&self) {
        let mut queue = self.lock();
        queue.working += 1;
        if let Some((_, told)) = queue.failure.take() {
            tracing::info!(was = told, what = O::WHAT, "the database answers again");
        }
    }

    /// A connection works no longer.
    fn ended(&self) {
        let refusal = {
            let mut queue = self.lock();
            queue.working -= 1;
            queue.loss()
        };
        match refusal {
            Some(refusal) => self.refuse_all(&refusal),
            // It took up nothing any more.
            None => self.filled.notify_last(),
        }
    }

    /// The server did not answer on a connection. Unless others work, nobody is to wait for it until one does: to find
    /// out that it does not greet either would take as long again.
    fn hung(&self, error: &Error) {
        let cause = error.cause();
        self.lock().failure = Some((cause.kind, cause.source.to_string()));
    }

    /// No connection could be made. While others work that is their loss only.
    fn failed(&self, error: &OpenError) {
        let refusal = {
            let mut queue = self.lock();
            let told = error.to_string();
            let is_news = queue.failure.as_ref().is_none_or(|(_, before)| *before != told);
            if is_news {
                let what = O::WHAT;
                if queue.working > 0 {
                    tracing::warn!(error = told, what, working = queue.working, "a connection fails; trying again");
                } else {
                    tracing::warn!(error = told, what, "no connection to the database: refused until one works again");
                }
            }
            queue.failure = Some((ErrorKind::Unavailable, told));
            queue.loss()
        };
        if let Some(refusal) = refusal {
            self.refuse_all(&refusal);
        }
    }

    fn is_closing(&self) -> bool {
        self.lock().is_closing
    }
}

/// A statement that may soon have been answered, as the queue counts it.
struct Prompt<'a, O: Operation>(&'a Shared<O>);

impl<O: Operation> Drop for Prompt<'_, O> {
    fn drop(&mut self) {
        self.0.lock().prompt -= 1;
    }
}

/// Works, and again where that panicked.
async fn keep_working<O: Operation>(shared: Arc<Shared<O>>, mut first: Option<Session>) {
    loop {
        // The set ends the worker with this task.
        let mut worker = JoinSet::new();
        worker.spawn(work(Arc::clone(&shared), first.take()));
        match worker.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!("a connection's worker panicked; it starts again"),
            _ => return,
        }
    }
}

/// A connection that works, as the queue counts it.
struct Working<O: Operation>(Arc<Shared<O>>);

impl<O: Operation> Drop for Working<O> {
    fn drop(&mut self) {
        self.0.ended();
    }
}

/// Carries out batches, on this connection while it works and then on others.
async fn work<O: Operation>(shared: Arc<Shared<O>>, first: Option<Session>) {
    let mut session = first;
    loop {
        let working = match session.take() {
            Some(working) => working,
            None => match connect(&shared).await {
                Some(connected) => connected,
                None => return,
            },
        };
        let counted = Working(Arc::clone(&shared));
        loop {
            let batch = tokio::select! {
                biased;
                () = working.ended() => break,
                batch = shared.take() => batch,
            };
            let Some(batch) = batch else { return };
            if !shared.promptly(carry_out(&shared, &working, batch)).await {
                break;
            }
        }
        drop(counted);
        working.give_up();
    }
}

/// A connection that works; nothing where the lane closes.
async fn connect<O: Operation>(shared: &Shared<O>) -> Option<Session> {
    let mut pause = FIRST_PAUSE;
    while !shared.is_closing() {
        match shared.connector.connect(O::CALLS).await {
            Ok(session) => {
                shared.began();
                return Some(session);
            }
            Err(error) => shared.failed(&error),
        }
        let _ = timeout(pause, shared.closing.notified()).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    None
}

/// Carries out a batch, and says whether the connection goes on working.
async fn carry_out<O: Operation>(shared: &Shared<O>, session: &Session, batch: Vec<Pending<O>>) -> bool {
    let (batch, stale): (Vec<_>, Vec<_>) = batch.into_iter().partition(|pending| pending.since.elapsed() < ANSWER);
    answer(stale.into_iter().map(|pending| (pending, Err(too_slow()))).collect());
    // What is still to be done, the first part last.
    let mut parts = vec![batch];
    let mut tries = 0;
    while let Some(part) = parts.pop().filter(|part: &Vec<Pending<O>>| !part.is_empty()) {
        let operations: Vec<&O> = part.iter().map(|pending| &pending.operation).collect();
        match O::carry_out(session, &operations).await {
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
            Err(Failed::Sql(error))
                if error::is_passing(&error) && tries < AGAIN && !(error::is_held(&error) && part.len() > 1) =>
            {
                tries += 1;
                parts.push(part);
            }
            // One of them is to blame, and finds out by itself.
            Err(Failed::Sql(error)) if part.len() > 1 && error::did_nothing(&error) && !is_for_all(&error) => {
                let mut part = part;
                let rest = part.split_off(part.len() / 2);
                parts.extend([rest, part]);
            }
            Err(failed) => {
                let (is_last, is_late) = (failed.is_last(), matches!(failed, Failed::Late));
                let error = failed.into_error();
                if is_late {
                    shared.hung(&error);
                }
                let mut failed: Vec<Answered<O>> =
                    part.into_iter().map(|pending| (pending, Err(copy(&error)))).collect();
                if is_last {
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

/// Whether an error is the server's state, which each of a batch would meet; not so a lock that one of them waits for.
fn is_for_all(error: &tokio_postgres::Error) -> bool {
    error::kind(error) != ErrorKind::Other && !error::is_held(error)
}

fn copy(error: &Error) -> Error {
    let (kind, told) = (error.cause().kind, error.cause().source.to_string());
    match error {
        Error::Determinate(_) => Error::determinate(kind, told),
        Error::Indeterminate(_) => Error::indeterminate(kind, told),
    }
}

fn answer<O: Operation>(answered: Vec<Answered<O>>) {
    finish_where_they_wait(
        answered,
        |(pending, _)| pending.runtime.as_ref(),
        |(pending, reply)| {
            // The caller may have gone.
            let _ = pending.reply.send(reply);
        },
    );
}

fn too_slow() -> Error {
    Error::determinate(ErrorKind::Timeout, "the database was too slow to be asked")
}
