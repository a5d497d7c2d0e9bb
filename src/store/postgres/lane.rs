//! A queue, and a few connections that empty it.
//!
//! A connection that is free takes all that waits: while one statement is under way, callers gather for the next. A second
//! connection joins in only where many wait already, or the first takes long: two that run beside each other would carry
//! half as much each. A lone caller waits for nobody.
//!
//! While no connection works, callers are refused at once; connections are tried again until one does.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connect::{ANSWER, Call, Connector, Failed, Session};
use super::error::{self, OpenError};
use crate::idempotency::record::RecordId;
use crate::store::callers::finish_where_they_wait;
use crate::store::{Error, ErrorKind};

/// How many operations may wait. More are refused at once.
const WAITING: usize = 8192;

/// How many operations one statement carries.
const BATCH: usize = 256;

/// So many that wait are worth another connection, while a statement is under way.
const WORTH_ANOTHER: usize = 64;

/// For a statement that takes longer than this nobody waits.
const PROMPT: Duration = Duration::from_millis(10);

/// How many bytes one statement carries, give or take one operation.
const BATCH_BYTES: usize = 16 << 20;

/// How often a batch that met another transaction is asked again at once.
const AGAIN: usize = 3;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a lane carries.
pub(super) trait Operation: Send + Sync + Sized + 'static {
    /// What the caller gets.
    type Reply: Send + 'static;

    /// The statements that carry them.
    const CALLS: &'static [Call];

    /// The record that it is about.
    fn id(&self) -> RecordId;

    /// How many bytes it writes, where they may be many.
    fn size(&self) -> usize;

    /// Whether it is left undone where its caller has gone before it was sent.
    fn is_abandoned_with_caller(&self) -> bool;

    /// Whether a statement of its own carries it.
    fn goes_alone(&self) -> bool;

    /// Carries out a batch, which is in the order of ids, each once. Nothing in the place of a reply means to ask again.
    fn carry_out(
        session: &Session,
        batch: &[&Self],
    ) -> impl Future<Output = Result<Vec<Option<Self::Reply>>, Failed>> + Send;
}

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

struct Queue<O: Operation> {
    waiting: VecDeque<Pending<O>>,
    /// How many connections work.
    working: usize,
    /// How many statements are under way that may soon have been answered.
    prompt: usize,
    /// Why the last try to connect failed, if it did.
    failure: Option<(ErrorKind, String)>,
    is_closing: bool,
}

struct Pending<O: Operation> {
    operation: O,
    reply: oneshot::Sender<Result<O::Reply, Error>>,
    runtime: Option<Handle>,
    since: Instant,
}

/// An operation that has its answer.
type Answered<O> = (Pending<O>, Result<<O as Operation>::Reply, Error>);

impl<O: Operation> Lane<O> {
    /// A lane of `connections`, which are made now. The first is `first`.
    pub(super) fn open(connector: Connector, first: Session, connections: usize) -> Self {
        let queue = Queue { waiting: VecDeque::new(), working: 0, prompt: 0, failure: None, is_closing: false };
        let shared =
            Arc::new(Shared { connector, queue: Mutex::new(queue), filled: Notify::new(), closing: Notify::new() });
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

impl<O: Operation> Queue<O> {
    fn refusal(&self) -> Option<Error> {
        if self.is_closing {
            return Some(closed());
        }
        let (kind, told) = self.failure.as_ref().filter(|_| self.working == 0)?;
        Some(Error::determinate(*kind, told.clone()))
    }
}

impl<O: Operation> Shared<O> {
    fn lock(&self) -> MutexGuard<'_, Queue<O>> {
        // Nothing that is done under it can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, pending: Pending<O>) -> Result<(), Error> {
        {
            let mut queue = self.lock();
            if let Some(refusal) = queue.refusal() {
                return Err(refusal);
            }
            if queue.waiting.len() >= WAITING {
                return Err(Error::determinate(ErrorKind::Unavailable, "too many operations wait for the database"));
            }
            queue.waiting.push_back(pending);
            if !queue.is_due() {
                return Ok(());
            }
        }
        self.filled.notify_last();
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
        let mut queue = self.lock();
        again.into_iter().rev().for_each(|pending| queue.waiting.push_front(pending));
        drop(queue);
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
            tracing::info!(was = told, "the database answers again");
        }
    }

    /// A connection works no longer.
    fn ended(&self) {
        let refusal = {
            let mut queue = self.lock();
            queue.working -= 1;
            queue.refusal()
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
                tracing::warn!(error = told, working = queue.working, "no connection to the database; trying again");
            }
            queue.failure = Some((ErrorKind::Unavailable, told));
            queue.refusal()
        };
        if let Some(refusal) = refusal {
            self.refuse_all(&refusal);
        }
    }

    fn is_closing(&self) -> bool {
        self.lock().is_closing
    }
}

impl<O: Operation> Queue<O> {
    /// Whether a connection is to take up what waits.
    fn is_due(&self) -> bool {
        let enough = if self.prompt == 0 || self.is_closing { 1 } else { WORTH_ANOTHER };
        self.waiting.len() >= enough
    }

    fn batch(&mut self) -> Vec<Pending<O>> {
        let mut batch: Vec<Pending<O>> = Vec::with_capacity(self.waiting.len().min(BATCH));
        let mut bytes = 0;
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(pending) = self.waiting.pop_front() else { break };
            if pending.operation.is_abandoned_with_caller() && pending.reply.is_closed() {
                continue;
            }
            let is_alone = pending.operation.goes_alone();
            if is_alone && !batch.is_empty() {
                self.waiting.push_front(pending);
                break;
            }
            bytes += pending.operation.size();
            batch.push(pending);
            if is_alone {
                break;
            }
        }
        batch.sort_by_key(|pending| pending.operation.id());
        let mut single: Vec<Pending<O>> = Vec::with_capacity(batch.len());
        for pending in batch {
            match single.last() {
                Some(last) if last.operation.id() == pending.operation.id() => self.waiting.push_front(pending),
                _ => single.push(pending),
            }
        }
        single
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

fn closed() -> Error {
    Error::determinate(ErrorKind::Unavailable, "the store is closed")
}
