//! The writer thread: executes all queued requests in one transaction, and answers them once it is durable. Those that write much
//! come after the others, as many as fit into the transaction. One that does not fit has a transaction to itself, after which the others
//! catch up.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use super::error::{self, Failure};
use super::session::Session;
use super::{Fatal, Lock, too_many_queued};
use crate::store::batcher::finish_on_caller_runtimes;
use crate::store::{Error, ErrorKind};

/// How many requests one transaction takes.
const MAX_BATCH: usize = 1024;

/// The most bytes that a request writes to go before those that write more.
const SMALL: usize = 16 << 10;

/// Up to how many bytes a transaction takes large requests besides. One that is larger has a transaction of its own.
const MAX_BATCH_BYTES: usize = 256 << 10;

/// If small requests came while a large one ran, the next large one waits while they catch up: for the time that the last one took,
/// divided by this.
const REST: u32 = 2;

/// How often to look whether the files are still there.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A request to the writer. It runs again from the start if its transaction was rolled back.
pub(super) trait Request: Send + 'static {
    /// The reply to the caller.
    type Reply: Send + 'static;

    /// Whether it is dropped if its caller has gone before it began.
    const ABANDONED_WITH_CALLER: bool = false;

    /// How many bytes it writes, where they may be many.
    fn size(&self) -> usize {
        0
    }

    /// Does it.
    fn run(&self, session: &mut Session) -> Result<Self::Reply, Failure>;
}

pub(super) enum Message {
    Job(Box<dyn Job>),
    Close,
}

/// A request of any type with its caller.
pub(super) trait Job: Send {
    fn is_abandoned(&self) -> bool;
    fn size(&self) -> usize;
    fn run(&mut self, session: &mut Session) -> Result<(), rusqlite::Error>;
    /// Gives the caller what `run` found, now that it is committed.
    fn finish(self: Box<Self>);
    fn fail(self: Box<Self>, error: Error);
    /// The runtime of its caller, if known.
    fn runtime(&self) -> Option<&Handle>;
}

/// The receiver of a reply.
pub(super) type Reply<T> = oneshot::Receiver<Result<T, Error>>;

/// A job for the queue, and where its answer comes out.
pub(super) fn job<R: Request>(request: R) -> (Message, Reply<R::Reply>) {
    let (reply, receiver) = oneshot::channel();
    let runtime = Handle::try_current().ok();
    (Message::Job(Box::new(Pending { request, found: None, reply, runtime })), receiver)
}

struct Pending<R: Request> {
    request: R,
    found: Option<Result<R::Reply, Error>>,
    reply: oneshot::Sender<Result<R::Reply, Error>>,
    runtime: Option<Handle>,
}

impl<R: Request> Job for Pending<R> {
    fn is_abandoned(&self) -> bool {
        R::ABANDONED_WITH_CALLER && self.reply.is_closed()
    }

    fn size(&self) -> usize {
        self.request.size()
    }

    fn run(&mut self, session: &mut Session) -> Result<(), rusqlite::Error> {
        self.found = Some(match self.request.run(session) {
            Ok(reply) => Ok(reply),
            Err(Failure::Request(error)) => Err(error),
            Err(Failure::Sqlite(error)) => return Err(error),
        });
        Ok(())
    }

    fn finish(self: Box<Self>) {
        let found =
            self.found.unwrap_or_else(|| Err(Error::indeterminate(ErrorKind::Other, "the request did not run")));
        // The caller may have gone.
        let _ = self.reply.send(found);
    }

    fn fail(self: Box<Self>, error: Error) {
        let _ = self.reply.send(Err(error));
    }

    fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }
}

/// The error of a batch.
enum BatchError {
    /// There was no transaction.
    NotBegun(rusqlite::Error),
    /// Nothing of it happened.
    Undone(rusqlite::Error),
    /// Some of it may have happened.
    Doubtful(rusqlite::Error),
    /// A disk that does not keep what it is given, or a connection that cannot go back. Nothing is safe any more.
    Fatal(String),
}

/// The fatal handler was called.
struct Terminated;

/// The thread's end of the queue.
pub(super) struct Writer {
    pub(super) session: Session,
    pub(super) queue: mpsc::Receiver<Message>,
    pub(super) fatal: Fatal,
    /// Ends when the reader's queue closes, which is before this one's.
    pub(super) reader: JoinHandle<()>,
    pub(super) lock: Arc<Lock>,
    pub(super) finished: watch::Sender<bool>,
}

impl Writer {
    /// Runs until it receives `Close`, or all senders are gone.
    pub(super) fn run(mut self) {
        let alarm = PanicAlarm { thread: "writer", fatal: self.fatal.clone() };
        let is_orderly = self.work().is_ok();
        self.refuse_the_rest();
        drop(alarm);
        let Self { mut session, reader, lock, finished, .. } = self;
        // The last connection to close leaves the file without a log beside it.
        let _ = reader.join();
        if is_orderly {
            session.finish();
        }
        drop(session);
        drop(lock);
        finished.send_replace(true);
    }

    fn work(&mut self) -> Result<(), Terminated> {
        let mut messages = Vec::with_capacity(MAX_BATCH);
        let mut large = VecDeque::new();
        let mut is_closing = false;
        let (mut checked, mut rest_until) = (Instant::now(), Instant::now());
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        while !is_closing || !large.is_empty() {
            let until = (!large.is_empty()).then_some(rest_until);
            is_closing = is_closing || !receive(&mut self.queue, &mut messages, until, &waker);
            let has_work = !messages.is_empty() || !large.is_empty();
            if has_work && checked.elapsed() >= CHECK_INTERVAL {
                self.check_files()?;
                checked = Instant::now();
            }
            let mut batch = Vec::with_capacity(messages.len());
            for message in messages.drain(..) {
                match message {
                    Message::Job(job) if job.is_abandoned() => {}
                    Message::Job(job) if job.size() > SMALL && large.len() >= self.queue.max_capacity() => {
                        job.fail(too_many_queued());
                    }
                    Message::Job(job) if job.size() > SMALL => large.push_back(job),
                    Message::Job(job) => batch.push(job),
                    Message::Close => {
                        is_closing = true;
                        self.refuse_the_rest();
                    }
                }
            }
            large.retain(|job| !job.is_abandoned());
            let have_joined = join(&mut batch, &mut large);
            self.execute(batch)?;
            if !have_joined && (is_closing || rest_until <= Instant::now()) {
                let began = Instant::now();
                self.execute(large.pop_front().into_iter().collect())?;
                if !self.queue.is_empty() {
                    rest_until = Instant::now() + began.elapsed() / REST;
                }
            }
        }
        Ok(())
    }

    /// Accepts no more requests, and refuses those that are queued.
    fn refuse_the_rest(&mut self) {
        self.queue.close();
        while let Some(message) = self.queue.blocking_recv() {
            if let Message::Job(job) = message {
                job.fail(Error::closed());
            }
        }
    }

    /// A store whose files were taken away or damaged must not go on: the next process would start with others.
    fn check_files(&mut self) -> Result<(), Terminated> {
        self.session.check_files().map_err(|damage| {
            (self.fatal)(&self.session.give_up(&damage));
            Terminated
        })
    }

    fn execute(&mut self, mut batch: Vec<Box<dyn Job>>) -> Result<(), Terminated> {
        if batch.is_empty() {
            return Ok(());
        }
        match self.transact(&mut batch) {
            Ok(()) => {
                finish_on_caller_runtimes(batch, |job| job.runtime(), Job::finish);
                let checkpointed = self.session.checkpoint_if_due();
                self.handle_checkpoint(checkpointed)
            }
            // There is room now that was held for this.
            Err(BatchError::Undone(error)) if self.session.make_room(&error) => {
                let checkpointed = self.session.checkpoint();
                self.handle_checkpoint(checkpointed)?;
                self.one_by_one(batch)
            }
            // One of them causes the error: runs each alone to find it.
            Err(BatchError::Undone(_)) if batch.len() > 1 => self.one_by_one(batch),
            Err(BatchError::NotBegun(error) | BatchError::Undone(error)) => {
                fail_all(batch, &error, Error::determinate);
                Ok(())
            }
            Err(BatchError::Doubtful(error)) => {
                let has_room = self.session.make_room(&error);
                fail_all(batch, &error, Error::indeterminate);
                // For those who ask again.
                let checkpointed = if has_room { self.session.checkpoint() } else { Ok(()) };
                self.handle_checkpoint(checkpointed)
            }
            Err(BatchError::Fatal(reason)) => {
                // First, so that no caller acts on an answer of a process that ends.
                (self.fatal)(&reason);
                for job in batch {
                    job.fail(Error::indeterminate(ErrorKind::Unavailable, reason.clone()));
                }
                Err(Terminated)
            }
        }
    }

    fn transact(&mut self, batch: &mut [Box<dyn Job>]) -> Result<(), BatchError> {
        let session = &mut self.session;
        session.begin().map_err(|error| assess(session, error, BatchError::NotBegun))?;
        for job in batch {
            job.run(session).map_err(|error| assess(session, error, BatchError::Undone))?;
        }
        session.stamp().map_err(|error| assess(session, error, BatchError::Undone))?;
        session.check_before_commit().map_err(|damage| BatchError::Fatal(session.give_up(&damage)))?;
        session.commit().map_err(|error| {
            let left_nothing = error::commit_left_nothing(&error);
            assess(session, error, if left_nothing { BatchError::Undone } else { BatchError::Doubtful })
        })?;
        session.check_after_commit().map_err(|damage| BatchError::Fatal(session.give_up(&damage)))
    }

    fn one_by_one(&mut self, batch: Vec<Box<dyn Job>>) -> Result<(), Terminated> {
        batch.into_iter().try_for_each(|job| self.execute(vec![job]))
    }

    /// A checkpoint may fail, but not at a sync.
    fn handle_checkpoint(&mut self, checkpointed: rusqlite::Result<()>) -> Result<(), Terminated> {
        let Err(error) = checkpointed else {
            return Ok(());
        };
        if error::is_failed_sync(&error) {
            (self.fatal)(&sync_failed(&error));
            return Err(Terminated);
        }
        self.session.note(&error);
        if self.session.make_room(&error) {
            let again = self.session.checkpoint();
            return self.handle_checkpoint(again);
        }
        tracing::warn!(%error, "cannot copy the write-ahead log (WAL) into the database; it grows until that works");
        Ok(())
    }
}

/// Takes what is queued. If that is nothing, waits for a request: until the given time, or without a limit. Returns false once the queue
/// is closed and empty.
fn receive(
    queue: &mut mpsc::Receiver<Message>,
    messages: &mut Vec<Message>,
    until: Option<Instant>,
    waker: &Waker,
) -> bool {
    let Some(until) = until else {
        return queue.blocking_recv_many(messages, MAX_BATCH) > 0;
    };
    loop {
        match queue.poll_recv_many(&mut Context::from_waker(waker), messages, MAX_BATCH) {
            Poll::Ready(count) => return count > 0,
            Poll::Pending => match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::park_timeout(left),
                _ => return true,
            },
        }
    }
}

/// Wakes the writer.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Adds the large requests that fit, in the order of their arrival. False where the first does not.
fn join(batch: &mut Vec<Box<dyn Job>>, large: &mut VecDeque<Box<dyn Job>>) -> bool {
    let mut bytes: usize = batch.iter().map(|job| job.size()).sum();
    let mut fits = |size| {
        bytes += size;
        bytes <= MAX_BATCH_BYTES
    };
    let count = large.iter().take_while(|job| fits(job.size())).count();
    batch.extend(large.drain(..count));
    count > 0
}

/// Takes a failed transaction back, and says what that means for its requests.
fn assess(session: &mut Session, error: rusqlite::Error, meaning: fn(rusqlite::Error) -> BatchError) -> BatchError {
    if error::is_failed_sync(&error) {
        return BatchError::Fatal(sync_failed(&error));
    }
    session.note(&error);
    match session.rollback() {
        Ok(()) => meaning(error),
        Err(second) => {
            BatchError::Fatal(format!("a failed transaction cannot be rolled back: {error}; then: {second}"))
        }
    }
}

fn sync_failed(error: &rusqlite::Error) -> String {
    format!("the store's disk failed to make a write durable ({error}): no write on it is durable any more")
}

fn fail_all(
    batch: Vec<Box<dyn Job>>,
    error: &rusqlite::Error,
    effect: fn(ErrorKind, Box<dyn std::error::Error + Send + Sync>) -> Error,
) {
    for job in batch {
        job.fail(effect(error::kind(error), error.to_string().into()));
    }
}

/// Reports a panic of a thread: without it, calls would fail while the process looks alive.
pub(super) struct PanicAlarm {
    pub(super) thread: &'static str,
    pub(super) fatal: Fatal,
}

impl Drop for PanicAlarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.fatal)(&format!("the store's {} panicked", self.thread));
        }
    }
}
