//! State of a connection that both sides of hyper share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::io::AsyncRead;
use tokio::time::{Instant, timeout_at};

use super::interim::{Interim, InterimQueue};
use crate::http::exchange::ExchangeGuard;
use crate::http::fault::Fault;
use crate::http::socket::drain_input;

/// How long input is drained after the last response, and the longest pause in it.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(2);

/// State that the I/O and the service of one connection share.
#[derive(Debug)]
pub(in crate::http) struct ConnectionState<S> {
    /// The number of the refused request, counted from 1, and the reason.
    refused: OnceLock<(u64, Fault)>,
    /// How many exchanges have started.
    exchanges: AtomicU64,
    /// How many requests have arrived completely.
    whole: AtomicU64,
    /// Whether it carries something else than HTTP by now.
    is_upgraded: AtomicBool,
    /// Whether there is an exchange that has not ended.
    is_busy: Arc<AtomicBool>,
    interim: Arc<InterimQueue>,
    /// The socket, once all is written.
    ended: Mutex<Option<S>>,
}

impl<S> ConnectionState<S> {
    pub(in crate::http) fn new() -> Arc<Self> {
        Arc::new(Self {
            refused: OnceLock::new(),
            exchanges: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            is_upgraded: AtomicBool::new(false),
            is_busy: Arc::default(),
            interim: Arc::default(),
            ended: Mutex::new(None),
        })
    }

    /// Begins the next exchange.
    pub(in crate::http) fn start_exchange(&self) -> StartedExchange {
        let number = self.exchanges.fetch_add(1, Ordering::Relaxed) + 1;
        let exchange = ExchangeGuard::new(&self.is_busy);
        let request = match self.refused.get() {
            Some((refused, fault)) if *refused == number => Err(*fault),
            _ => {
                self.interim.begin(number);
                Ok(Interim::new(number, Arc::clone(&self.interim)))
            }
        };
        StartedExchange { number, request, exchange }
    }

    /// Whether any exchange has started.
    pub(in crate::http) fn has_begun(&self) -> bool {
        self.exchanges.load(Ordering::Relaxed) > 0
    }

    /// Whether no exchange is under way.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Acquire)
    }

    /// Whether it carries something else than HTTP by now.
    pub(super) fn is_upgraded(&self) -> bool {
        self.is_upgraded.load(Ordering::Acquire)
    }

    /// The queue of interim responses.
    pub(super) fn interim(&self) -> &InterimQueue {
        &self.interim
    }

    /// Sets how many requests have arrived completely.
    pub(super) fn received(&self, whole: u64) {
        self.whole.store(whole, Ordering::Relaxed);
    }

    /// Refuses this request. No input is read after it.
    pub(super) fn refuse(&self, number: u64, fault: Fault) {
        // Only the first refusal counts.
        let _ = self.refused.set((number, fault));
    }

    /// Stores the socket after all output is written.
    pub(super) fn end(&self, socket: Option<S>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = socket;
    }

    /// The response of an exchange starts. Returns whether the connection can continue after it: not if a part of the
    /// request has yet to arrive.
    pub(in crate::http) fn answer(&self, number: u64, switches: bool) -> bool {
        self.interim.end();
        if switches {
            self.is_upgraded.store(true, Ordering::Release);
        }
        switches || self.whole.load(Ordering::Relaxed) >= number
    }
}

impl<S: AsyncRead + Unpin> ConnectionState<S> {
    /// Drains the client's input for a while after the last response.
    ///
    /// If `is_stopping`, the limit is one pause, so that shutdown is not delayed.
    pub(in crate::http) async fn linger(&self, is_stopping: bool) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let deadline = Instant::now() + if is_stopping { LINGER_PAUSE } else { LINGER };
        let _ = timeout_at(deadline, drain_input(&mut socket, LINGER_PAUSE)).await;
    }
}

/// An exchange that has started.
pub(in crate::http) struct StartedExchange {
    /// Its number, counted from 1.
    pub(in crate::http) number: u64,
    /// The sender of interim responses, or why the request is refused.
    pub(in crate::http) request: Result<Interim, Fault>,
    /// To be dropped with the response body.
    pub(in crate::http) exchange: ExchangeGuard,
}
