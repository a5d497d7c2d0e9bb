//! What is known of a connection on both sides of hyper.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::time::{Instant, timeout_at};

use super::fault::Fault;
use super::interim::{Interim, Waiting};
use crate::http::socket::read_on;

/// How long what a client still sends is read on after the last answer, and how long it may pause.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(2);

/// What the stream, and whoever answers, know of one connection.
#[derive(Debug)]
pub(in crate::http) struct Line<S> {
    /// The number of the request that is refused, counted from 1, and why.
    refused: OnceLock<(u64, Fault)>,
    /// How many exchanges have begun.
    exchanges: AtomicU64,
    /// How many requests have come whole.
    whole: AtomicU64,
    /// Whether it carries something else than HTTP by now.
    is_switched: AtomicBool,
    /// Whether there is an exchange that has not ended.
    is_busy: Arc<AtomicBool>,
    interim: Arc<Waiting>,
    /// The socket, once all is written.
    ended: Mutex<Option<S>>,
}

impl<S> Line<S> {
    pub(in crate::http) fn new() -> Arc<Self> {
        Arc::new(Self {
            refused: OnceLock::new(),
            exchanges: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            is_switched: AtomicBool::new(false),
            is_busy: Arc::default(),
            interim: Arc::default(),
            ended: Mutex::new(None),
        })
    }

    /// Begins the next exchange.
    pub(in crate::http) fn begin(&self) -> Begun {
        let number = self.exchanges.fetch_add(1, Ordering::Relaxed) + 1;
        self.is_busy.store(true, Ordering::Release);
        let request = match self.refused.get() {
            Some((refused, fault)) if *refused == number => Err(*fault),
            _ => {
                self.interim.begin(number);
                Ok(Interim::new(number, Arc::clone(&self.interim)))
            }
        };
        Begun { number, request, exchange: Exchange(Arc::clone(&self.is_busy)) }
    }

    /// Whether any exchange has begun.
    pub(in crate::http) fn has_begun(&self) -> bool {
        self.exchanges.load(Ordering::Relaxed) > 0
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Acquire)
    }

    /// Whether it carries something else than HTTP by now.
    pub(super) fn is_switched(&self) -> bool {
        self.is_switched.load(Ordering::Acquire)
    }

    /// The interim answers that wait.
    pub(super) fn interim(&self) -> &Waiting {
        &self.interim
    }

    /// So many requests have come whole.
    pub(super) fn came(&self, whole: u64) {
        self.whole.store(whole, Ordering::Relaxed);
    }

    /// Nothing is read any more, from this request on.
    pub(super) fn refuse(&self, number: u64, fault: Fault) {
        // So this is the only one.
        let _ = self.refused.set((number, fault));
    }

    /// All is written.
    pub(super) fn end(&self, socket: Option<S>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = socket;
    }

    /// The answer of an exchange begins. Says whether the connection can go on after it: not where some of the request
    /// is still to come, or where it was to become something else.
    pub(in crate::http) fn answer(&self, number: u64, switches: bool) -> bool {
        self.interim.end();
        if switches {
            self.is_switched.store(true, Ordering::Release);
        }
        switches || self.whole.load(Ordering::Relaxed) >= number
    }
}

impl<S: AsyncRead + Unpin> Line<S> {
    /// Reads on what a client still sends after the last answer, for a while.
    ///
    /// The process ends no later for it: where `is_stopping`, one pause is all.
    pub(in crate::http) async fn linger(&self, is_stopping: bool) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let deadline = Instant::now() + if is_stopping { LINGER_PAUSE } else { LINGER };
        let _ = timeout_at(deadline, read_on(&mut socket, LINGER_PAUSE)).await;
    }
}

/// An exchange that has begun.
pub(in crate::http) struct Begun {
    /// Which one it is, counted from 1.
    pub(in crate::http) number: u64,
    /// The way of interim answers, or why there is no request.
    pub(in crate::http) request: Result<Interim, Fault>,
    /// For its answer to hold on to.
    pub(in crate::http) exchange: Exchange,
}

/// An exchange that goes on for as long as this is there: then the connection waits for the next.
#[derive(Debug)]
pub struct Exchange(Arc<AtomicBool>);

impl Drop for Exchange {
    fn drop(&mut self) {
        // hyper begins no other before.
        self.0.store(false, Ordering::Release);
    }
}
