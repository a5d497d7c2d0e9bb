//! Interim responses (RFC 9110, 15.2).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, StatusCode};

use crate::http::headers::to_client;

/// The length of the queue. Further interim responses are dropped, which is always allowed.
const MAX_QUEUED: usize = 16;

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
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
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
    pub(super) fn wake(&self, waker: &Waker) {
        self.lock().waker = Some(waker.clone());
    }

    /// The unanswered exchange; 0 after its final response has started, of which an interim response would become a
    /// part.
    pub(super) fn open(&self) -> u64 {
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

    fn lock(&self) -> MutexGuard<'_, State> {
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
    // It has no body to be framed, or trailers (RFC 9110, 8.6 and 15.2).
    for (name, value) in &to_client(headers.clone(), &[CONTENT_LENGTH, TRAILER]) {
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
