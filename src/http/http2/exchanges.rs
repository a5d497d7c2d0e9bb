//! What goes on in the streams of a connection.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use hyper::rt::Executor;
use tokio::time::{Instant, Sleep, sleep_until};

use super::socket::Moved;
use crate::http::limits::Limits;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// How many requests a client may give up at once, and how many a second: each of them may have cost an upstream
/// something. Then it is told to leave; where it goes on, it is left.
const GIVEN_UP: f64 = 200.0;
const GIVEN_UP_A_SECOND: f64 = 20.0;

/// The exchanges of one connection.
pub(super) struct Exchanges {
    limits: Arc<Limits>,
    usage: Arc<Usage>,
    state: Mutex<State>,
    /// Of the connection.
    waker: AtomicWaker,
}

struct State {
    open: usize,
    has_begun: bool,
    /// Since when none is open.
    idle_since: Instant,
    /// The one whose task is about to begin.
    next: Option<Exchange>,
    /// How many more may be given up, as of then.
    patience: (f64, Instant),
    /// How often that were too many.
    too_many: u32,
    /// How often too much came that led nowhere.
    floods: u32,
}

/// Why a connection does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// It has ended.
    Ended,
    /// The process ends.
    Stopped,
    /// Nothing was asked for.
    Idle(Limit),
    /// Too many requests were given up, or too much came that led nowhere.
    Flooded,
}

impl Exchanges {
    pub(super) fn new(limits: &Arc<Limits>, usage: &Arc<Usage>) -> Arc<Self> {
        let now = Instant::now();
        let state = State {
            open: 0,
            has_begun: false,
            idle_since: now,
            next: None,
            patience: (GIVEN_UP, now),
            too_many: 0,
            floods: 0,
        };
        let (limits, usage) = (Arc::clone(limits), Arc::clone(usage));
        Arc::new(Self { limits, usage, state: Mutex::new(state), waker: AtomicWaker::new() })
    }

    /// Begins one, whose task is the next that is begun: hyper asks for an answer, and has it awaited in a task at once.
    pub(super) fn begin(self: &Arc<Self>) -> Arc<Taking> {
        let taking = Arc::<Taking>::default();
        let mut state = self.state();
        state.open += 1;
        state.has_begun = true;
        state.next = Some(Exchange { exchanges: Arc::clone(self), taking: Arc::clone(&taking) });
        taking
    }

    /// Whether any has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.state().has_begun
    }

    /// Too much comes that leads nowhere.
    pub(super) fn flooded(&self) {
        self.state().floods += 1;
        self.waker.wake();
    }

    /// Drives a connection until there is a reason why it should not go on.
    pub(super) async fn or_over<C: Future>(&self, mut connection: Pin<&mut C>) -> Over {
        let mut timer = pin!(sleep_until(Instant::now() + self.limits.header_timeout));
        poll_fn(|cx| {
            if connection.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Over::Ended);
            }
            self.waker.register(cx.waker());
            let (is_flooded, idle_since, has_begun) = {
                let state = self.state();
                (state.floods + state.too_many > 0, (state.open == 0).then_some(state.idle_since), state.has_begun)
            };
            if is_flooded {
                return Poll::Ready(Over::Flooded);
            }
            let Some(since) = idle_since else { return Poll::Pending };
            let (patience, limit) = match has_begun {
                true => (self.limits.idle_timeout, Limit::IdleTimeout),
                false => (self.limits.header_timeout, Limit::HeaderTimeout),
            };
            poll_until(timer.as_mut(), since + patience, cx).map(|()| Over::Idle(limit))
        })
        .await
    }

    /// Drives a connection whose client was told to leave, until it has: or until nothing has been on its way to the
    /// client for so long. Who asks on and on for a sign of life is left when it has had the time for its last answers, and
    /// who floods the gate even now as soon as that it should leave is on its way.
    pub(super) async fn or_left<C: Future>(&self, mut connection: Pin<&mut C>, moved: &Moved, patience: Duration) {
        let told = Instant::now();
        let most = {
            let state = self.state();
            // Who is told to leave gives up requests.
            (state.floods, state.too_many.max(1))
        };
        let mut timer = pin!(sleep_until(told + patience));
        poll_fn(|cx| {
            if connection.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            self.waker.register(cx.waker());
            let (is_flooded, idle_since) = {
                let state = self.state();
                let is_flooded = state.floods > most.0 || state.too_many > most.1;
                (is_flooded, (state.open == 0).then_some(state.idle_since))
            };
            match idle_since {
                _ if is_flooded && moved.last() > told => Poll::Ready(()),
                Some(since) => {
                    let since = since.max(told);
                    let latest = since + self.limits.body_timeout.max(patience);
                    poll_until(timer.as_mut(), (moved.last() + patience).clamp(since + patience, latest), cx)
                }
                None => Poll::Pending,
            }
        })
        .await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it can leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn poll_until(mut timer: Pin<&mut Sleep>, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
    if deadline < timer.deadline() {
        timer.as_mut().reset(deadline);
    }
    loop {
        ready!(timer.as_mut().poll(cx));
        // It was set for something that was over sooner.
        if deadline <= timer.deadline() {
            return Poll::Ready(());
        }
        timer.as_mut().reset(deadline);
    }
}

/// Begins the tasks of a connection's streams.
#[derive(Clone)]
pub(super) struct Streams(pub(super) Arc<Exchanges>);

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let exchange = self.0.state().next.take();
        tokio::spawn(async move {
            match exchange {
                Some(exchange) => exchange.or_given_up(stream).await,
                None => drop(stream.await),
            }
        });
    }
}

/// An exchange that goes on for as long as this is there.
struct Exchange {
    exchanges: Arc<Exchanges>,
    taking: Arc<Taking>,
}

impl Exchange {
    /// Drives a stream to its end, unless its client takes nothing of the answer for too long: dropped, it is reset.
    async fn or_given_up<F: Future>(self, stream: F) {
        let (mut stream, mut timer) = (pin!(stream), None::<Pin<Box<Sleep>>>);
        let (patience, mut waits_since) = (self.exchanges.limits.body_timeout, 0);
        let is_stuck = poll_fn(|cx| {
            if stream.as_mut().poll(cx).is_ready() {
                return Poll::Ready(false);
            }
            let Some(piece) = self.taking.waits_for() else { return Poll::Pending };
            let deadline = Instant::now() + patience;
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            if piece != std::mem::replace(&mut waits_since, piece) {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(cx).map(|()| true)
        });
        if is_stuck.await {
            self.exchanges.usage.exceeded(Limit::BodyTimeout);
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let now = Instant::now();
        {
            let mut state = self.exchanges.state();
            state.open -= 1;
            state.idle_since = now;
            if !self.taking.is_whole.load(Ordering::Relaxed) {
                let (left, at) = state.patience;
                let left = (left + now.duration_since(at).as_secs_f64() * GIVEN_UP_A_SECOND).min(GIVEN_UP) - 1.0;
                let is_flood = left < 0.0;
                state.patience = (if is_flood { GIVEN_UP } else { left }, now);
                state.too_many += u32::from(is_flood);
            }
        }
        self.exchanges.waker.wake();
    }
}

/// How far a client has taken an answer.
#[derive(Default)]
pub(super) struct Taking {
    /// How many pieces were given out.
    pieces: AtomicU64,
    /// Whether the last of them is still to be taken.
    waits: AtomicBool,
    /// Whether there are no more.
    is_whole: AtomicBool,
}

impl Taking {
    /// The answer has come; with a body or without.
    pub(super) fn answered(&self, is_whole: bool) {
        self.is_whole.store(is_whole, Ordering::Relaxed);
    }

    /// The next piece is asked for: the one before is taken.
    pub(super) fn asked(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }

    /// A piece is given out, perhaps the last.
    pub(super) fn gave(&self, is_last: bool) {
        self.pieces.fetch_add(1, Ordering::Relaxed);
        self.waits.store(true, Ordering::Relaxed);
        if is_last {
            self.is_whole.store(true, Ordering::Relaxed);
        }
    }

    /// The number of the piece that the client has yet to take.
    fn waits_for(&self) -> Option<u64> {
        self.waits.load(Ordering::Relaxed).then(|| self.pieces.load(Ordering::Relaxed))
    }
}
