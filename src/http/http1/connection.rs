//! What both sides of hyper share of a connection: the state of its exchanges, and the interim responses (RFC 9110, 15.2)
//! that hyper does not carry.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, timeout_at};

use crate::http::fault::Fault;
use crate::http::headers::{ADDED, to_client, without_names};
use crate::http::socket::drain_input;

/// How long input is drained after the last response, and the longest pause in it.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(2);

/// The length of the queue of interim responses. Further ones are dropped, which is always allowed.
const MAX_QUEUED: usize = 16;

/// State that the I/O and the service of one connection share.
#[derive(Debug)]
pub(in crate::http) struct ConnectionState<S> {
    /// The number of the refused request, counted from 1, and what is known of it.
    refused: OnceLock<(u64, RefusedRequest)>,
    /// How many exchanges have started.
    exchanges: AtomicU64,
    /// How many requests have arrived completely.
    whole: AtomicU64,
    /// Whether it carries something else than HTTP by now.
    is_upgraded: AtomicBool,
    /// Whether the close of the connection is the end of an answer.
    ends_by_close: AtomicBool,
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
            ends_by_close: AtomicBool::new(false),
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
            Some((refused, request)) if *refused == number => Err(request.clone()),
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

    /// From now on, the close of the connection is the end of an answer.
    pub(in crate::http) fn ends_by_close(&self) {
        self.ends_by_close.store(true, Ordering::Release);
    }

    /// Whether a connection that breaks has to be reset, since its close would pass for the end of an answer.
    pub(super) fn resets_if_broken(&self) -> bool {
        self.ends_by_close.load(Ordering::Acquire)
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
    pub(super) fn refuse(&self, number: u64, request: RefusedRequest) {
        // Only the first refusal counts.
        let _ = self.refused.set((number, request));
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

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionState<S> {
    /// Ends the output, and drains the client's input for a while after the last response.
    ///
    /// If `is_stopping`, the limit is one pause, so that shutdown is not delayed.
    pub(in crate::http) async fn linger(&self, is_stopping: bool) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let deadline = Instant::now() + if is_stopping { LINGER_PAUSE } else { LINGER };
        let drained = async {
            // Where hyper has shut it down, this does nothing.
            let _ = socket.shutdown().await;
            drain_input(&mut socket, LINGER_PAUSE).await;
        };
        let _ = timeout_at(deadline, drained).await;
    }
}

/// A request that is refused.
#[derive(Clone, Debug)]
pub(in crate::http) struct RefusedRequest {
    /// Why.
    pub(in crate::http) fault: Fault,
    /// What came of its head: whole lines, which may be malformed.
    pub(in crate::http) head: Bytes,
}

/// An exchange that has started.
pub(in crate::http) struct StartedExchange {
    /// Its number, counted from 1.
    pub(in crate::http) number: u64,
    /// The sender of interim responses, or why the request is refused.
    pub(in crate::http) request: Result<Interim, RefusedRequest>,
    /// To be dropped with the response body.
    pub(in crate::http) exchange: ExchangeGuard,
}

/// An exchange that has not ended. When it is dropped, its connection may wait for the next request.
#[derive(Debug)]
pub struct ExchangeGuard(Arc<AtomicBool>);

impl ExchangeGuard {
    /// Marks a connection as busy.
    pub(super) fn new(is_busy: &Arc<AtomicBool>) -> Self {
        is_busy.store(true, Ordering::Release);
        Self(Arc::clone(is_busy))
    }
}

impl Drop for ExchangeGuard {
    fn drop(&mut self) {
        // hyper starts the next exchange only after this one has ended.
        self.0.store(false, Ordering::Release);
    }
}

/// Sends interim responses to one exchange of a connection, until its final response.
#[derive(Clone, Debug)]
pub struct Interim {
    exchange: u64,
    queue: Arc<InterimQueue>,
}

/// Interim responses to be written between two flushes.
#[derive(Debug, Default)]
pub(super) struct InterimQueue {
    /// The unanswered exchange; 0 for none.
    open: AtomicU64,
    /// Whether the queue is not empty.
    is_any: AtomicBool,
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    /// Each with the number of its exchange.
    answers: VecDeque<(u64, Bytes)>,
    /// Of the connection.
    waker: Option<Waker>,
}

impl Interim {
    pub(super) fn new(exchange: u64, queue: Arc<InterimQueue>) -> Self {
        Self { exchange, queue }
    }

    /// Queues an interim response, unless its exchange has its final response.
    pub fn send(&self, status: StatusCode, headers: &HeaderMap) {
        // The gate sends 100 itself, and 101 is no interim response for a client that requested no upgrade.
        if !status.is_informational() || status == StatusCode::CONTINUE || status == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let mut state = self.queue.lock();
        if self.queue.open.load(Ordering::Acquire) != self.exchange {
            return;
        }
        // Those of earlier exchanges are too late.
        state.answers.retain(|(exchange, _)| *exchange == self.exchange);
        if state.answers.len() >= MAX_QUEUED {
            return;
        }
        state.answers.push_back((self.exchange, written(status, headers)));
        self.queue.is_any.store(true, Ordering::Relaxed);
        if let Some(waker) = &state.waker {
            waker.wake_by_ref();
        }
    }
}

impl InterimQueue {
    /// Accepts interim responses for this exchange.
    pub(super) fn begin(&self, exchange: u64) {
        self.open.store(exchange, Ordering::Release);
    }

    /// The final response is known: queued ones precede it, and no more are accepted.
    pub(super) fn end(&self) {
        self.open.store(0, Ordering::Release);
    }

    /// Sets the waker for new entries.
    pub(super) fn set_waker(&self, waker: &Waker) {
        self.lock().waker = Some(waker.clone());
    }

    /// The unanswered exchange; 0 after its final response has started, of which an interim response would become a
    /// part.
    pub(super) fn open_exchange(&self) -> u64 {
        self.open.load(Ordering::Acquire)
    }

    /// The next interim response to write for this exchange.
    pub(super) fn take(&self, exchange: u64) -> Option<Bytes> {
        if !self.is_any.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.lock();
        while state.answers.front().is_some_and(|(of, _)| *of < exchange) {
            state.answers.pop_front();
        }
        let is_next = state.answers.front().is_some_and(|(of, _)| *of == exchange);
        let next = if is_next { state.answers.pop_front() } else { None };
        self.is_any.store(!state.answers.is_empty(), Ordering::Relaxed);
        next.map(|(_, answer)| answer)
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Nothing that is done under it can leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn written(status: StatusCode, headers: &HeaderMap) -> Bytes {
    let mut out = BytesMut::new();
    out.put_slice(b"HTTP/1.1 ");
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.put_slice(b"\r\n");
    // An interim response has no body and no trailers (RFC 9110, 8.6 and 15.2). The gate does not know yet how the key ends, so its own
    // headers go too.
    let headers = without_names(to_client(headers.clone(), &[CONTENT_LENGTH, TRAILER]), &ADDED);
    for (name, value) in &headers {
        out.put_slice(name.as_str().as_bytes());
        out.put_slice(b": ");
        out.put_slice(value.as_bytes());
        out.put_slice(b"\r\n");
    }
    out.put_slice(b"\r\n");
    out.freeze()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn only_the_exchange_under_way_has_interim_answers() {
        let queue = Arc::<InterimQueue>::default();
        let (first, second) = (Interim::new(1, Arc::clone(&queue)), Interim::new(2, Arc::clone(&queue)));
        let hints = HeaderMap::from_iter([
            (http::header::LINK, HeaderValue::from_static("</a>")),
            (http::header::CONNECTION, HeaderValue::from_static("close")),
            // The gate has not replayed anything yet.
            (ADDED[1].clone(), HeaderValue::from_static("true")),
        ]);
        queue.begin(2);
        first.send(StatusCode::EARLY_HINTS, &hints);
        assert_eq!(queue.take(2), None, "that exchange is over");
        second.send(StatusCode::CONTINUE, &hints);
        second.send(StatusCode::OK, &hints);
        assert_eq!(queue.take(2), None);
        second.send(StatusCode::EARLY_HINTS, &hints);
        assert_eq!(queue.take(1), None, "something of another exchange is under way");
        assert_eq!(queue.take(2).unwrap(), "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n");
        second.send(StatusCode::EARLY_HINTS, &hints);
        queue.end();
        second.send(StatusCode::EARLY_HINTS, &hints);
        assert!(queue.take(2).is_some() && queue.take(2).is_none(), "those from before the answer");
        second.send(StatusCode::EARLY_HINTS, &hints);
        queue.begin(3);
        assert_eq!(queue.take(3), None);
    }
}
