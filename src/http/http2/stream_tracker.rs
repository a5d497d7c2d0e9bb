//! Tracks the streams of a connection.

use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use h2::Reason;
use hyper::rt::Executor;
use tokio::time::{Instant, Sleep, sleep_until};

use super::client_io::LastWrite;
use crate::http::http1::poll_until;
use crate::http::limits::Limits;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// How many requests a client may cancel at once, and per second: each may have caused work at an upstream. Above that
/// the client gets a GOAWAY; if it continues, the connection is closed.
const RESET_BURST: f64 = 200.0;
const RESETS_PER_SECOND: f64 = 20.0;

/// The streams of one connection.
pub(super) struct StreamTracker {
    limits: Arc<Limits>,
    usage: Arc<Usage>,
    state: Mutex<State>,
    /// Of the connection.
    waker: AtomicWaker,
}

struct State {
    open: usize,
    has_begun: bool,
    /// When the last open stream ended.
    idle_since: Instant,
    /// The stream whose task is spawned next.
    next: Option<StreamGuard>,
    /// How many more streams may be cancelled, as of the instant.
    reset_credit: (f64, Instant),
    /// How often the limit on cancelled streams was exceeded.
    reset_floods: u32,
    /// How often the frame rate limit was exceeded.
    floods: u32,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// It has ended.
    Ended,
    /// Its client broke the protocol, and the h2 crate ended it with this reason.
    Broken(Reason),
    /// The process stops.
    Stopped,
    /// No request arrived in time.
    Idle(Limit),
    /// The client cancelled too many requests, or sent too many useless frames.
    Flooded,
}

/// Why the h2 crate ended a connection by itself. `ENHANCE_YOUR_CALM` means that its client sent too much of what costs and leads
/// nowhere: requests that it cancels, streams with errors, empty pieces of bodies, heads that do not end.
fn own_reason(error: &hyper::Error) -> Option<Reason> {
    let inner = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    inner.filter(|error| error.is_library()).and_then(h2::Error::reason)
}

impl StreamTracker {
    pub(super) fn new(limits: &Arc<Limits>, usage: &Arc<Usage>) -> Arc<Self> {
        let now = Instant::now();
        let state = State {
            open: 0,
            has_begun: false,
            idle_since: now,
            next: None,
            reset_credit: (RESET_BURST, now),
            reset_floods: 0,
            floods: 0,
        };
        let (limits, usage) = (Arc::clone(limits), Arc::clone(usage));
        Arc::new(Self { limits, usage, state: Mutex::new(state), waker: AtomicWaker::new() })
    }

    /// Registers a stream. Its task is the next one spawned: hyper calls the service and spawns the stream at once.
    pub(super) fn start_stream(self: &Arc<Self>) -> Arc<SendProgress> {
        let progress = Arc::<SendProgress>::default();
        let mut state = self.state();
        state.open += 1;
        state.has_begun = true;
        state.next = Some(StreamGuard { tracker: Arc::clone(self), progress: Arc::clone(&progress) });
        progress
    }

    /// Whether any stream has started.
    pub(super) fn has_begun(&self) -> bool {
        self.state().has_begun
    }

    /// Reports that the frame rate limit was exceeded.
    pub(super) fn report_flood(&self) {
        self.state().floods += 1;
        self.waker.wake();
    }

    /// The connection is closed for what its client costs.
    fn count_flood(&self) {
        self.usage.exceeded(Limit::Http2Flood);
        tracing::debug!("closing a connection: too many useless frames, or answers that did not end whole");
    }

    /// Drives a connection until there is a reason to close it.
    pub(super) async fn run_until_close<C>(&self, mut connection: Pin<&mut C>) -> CloseReason
    where
        C: Future<Output = Result<(), hyper::Error>>,
    {
        let mut timer = pin!(sleep_until(Instant::now() + self.limits.header_timeout));
        poll_fn(|cx| {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(match ended.err().as_ref().and_then(own_reason) {
                    Some(Reason::ENHANCE_YOUR_CALM) => {
                        self.count_flood();
                        CloseReason::Ended
                    }
                    Some(reason) => CloseReason::Broken(reason),
                    None => CloseReason::Ended,
                });
            }
            self.waker.register(cx.waker());
            let (is_flooded, idle_since, has_begun) = {
                let state = self.state();
                (state.floods + state.reset_floods > 0, (state.open == 0).then_some(state.idle_since), state.has_begun)
            };
            if is_flooded {
                self.count_flood();
                return Poll::Ready(CloseReason::Flooded);
            }
            let Some(since) = idle_since else { return Poll::Pending };
            let (patience, limit) = match has_begun {
                true => (self.limits.idle_timeout, Limit::IdleTimeout),
                false => (self.limits.header_timeout, Limit::HeaderTimeout),
            };
            poll_until(timer.as_mut(), since + patience, cx).map(|()| CloseReason::Idle(limit))
        })
        .await
    }

    /// Drives a connection after GOAWAY until the client closes it, or until no output was written for `patience`. A
    /// client that keeps sending pings is disconnected after it had time to read its last responses. A client that
    /// still floods the gate is disconnected as soon as the GOAWAY is written.
    pub(super) async fn drain<C: Future>(
        &self,
        mut connection: Pin<&mut C>,
        last_write: &LastWrite,
        patience: Duration,
    ) {
        let since_shutdown = Instant::now();
        let most = {
            let state = self.state();
            // A client may cancel its requests on GOAWAY.
            (state.floods, state.reset_floods.max(1))
        };
        let mut timer = pin!(sleep_until(since_shutdown + patience));
        poll_fn(|cx| {
            if connection.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            self.waker.register(cx.waker());
            let (is_flooded, idle_since) = {
                let state = self.state();
                let is_flooded = state.floods > most.0 || state.reset_floods > most.1;
                (is_flooded, (state.open == 0).then_some(state.idle_since))
            };
            match idle_since {
                _ if is_flooded && last_write.last() > since_shutdown => Poll::Ready(()),
                Some(since) => {
                    let since = since.max(since_shutdown);
                    let latest = since + self.limits.body_timeout.max(patience);
                    poll_until(timer.as_mut(), (last_write.last() + patience).clamp(since + patience, latest), cx)
                }
                None => Poll::Pending,
            }
        })
        .await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No operation under this lock can leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Spawns the tasks of a connection's streams.
#[derive(Clone)]
pub(super) struct StreamExecutor(pub(super) Arc<StreamTracker>);

impl<F> Executor<F> for StreamExecutor
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let guard = self.0.state().next.take();
        tokio::spawn(async move {
            match guard {
                Some(guard) => guard.run_with_write_timeout(stream).await,
                None => drop(stream.await),
            }
        });
    }
}

/// Keeps a stream open until it is dropped.
struct StreamGuard {
    tracker: Arc<StreamTracker>,
    progress: Arc<SendProgress>,
}

impl StreamGuard {
    /// Drives a stream to its end, unless its client accepts no data for too long: then it is dropped, which resets
    /// it.
    async fn run_with_write_timeout<F: Future>(self, stream: F) {
        let (mut stream, mut timer) = (pin!(stream), None::<Pin<Box<Sleep>>>);
        let (patience, mut pending_since) = (self.tracker.limits.body_timeout, 0);
        let is_timed_out = poll_fn(|cx| {
            if stream.as_mut().poll(cx).is_ready() {
                return Poll::Ready(false);
            }
            let Some(chunk) = self.progress.pending_chunk() else { return Poll::Pending };
            let deadline = Instant::now() + patience;
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            if chunk != std::mem::replace(&mut pending_since, chunk) {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(cx).map(|()| true)
        });
        if is_timed_out.await {
            self.tracker.usage.exceeded(Limit::BodyTimeout);
        }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let now = Instant::now();
        {
            let mut state = self.tracker.state();
            state.open -= 1;
            state.idle_since = now;
            if !self.progress.is_whole.load(Ordering::Relaxed) {
                let (left, at) = state.reset_credit;
                let left = (left + now.duration_since(at).as_secs_f64() * RESETS_PER_SECOND).min(RESET_BURST) - 1.0;
                let is_flood = left < 0.0;
                state.reset_credit = (if is_flood { RESET_BURST } else { left }, now);
                state.reset_floods += u32::from(is_flood);
            }
        }
        self.tracker.waker.wake();
    }
}

/// How much of a response its client has accepted.
#[derive(Default)]
pub(super) struct SendProgress {
    /// How many chunks were handed to h2.
    chunks: AtomicU64,
    /// Whether the client has yet to accept the last of them.
    waits: AtomicBool,
    /// Whether the response is complete.
    is_whole: AtomicBool,
}

impl SendProgress {
    /// The response has started; `is_whole` if it has no body.
    pub(super) fn answered(&self, is_whole: bool) {
        self.is_whole.store(is_whole, Ordering::Relaxed);
    }

    /// The next chunk is requested: the client has accepted the previous one.
    pub(super) fn polled(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }

    /// A chunk is handed to h2, perhaps the last.
    pub(super) fn sent(&self, is_last: bool) {
        self.chunks.fetch_add(1, Ordering::Relaxed);
        self.waits.store(true, Ordering::Relaxed);
        if is_last {
            self.is_whole.store(true, Ordering::Relaxed);
        }
    }

    /// The number of the chunk that the client has yet to accept.
    fn pending_chunk(&self) -> Option<u64> {
        self.waits.load(Ordering::Relaxed).then(|| self.chunks.load(Ordering::Relaxed))
    }
}
