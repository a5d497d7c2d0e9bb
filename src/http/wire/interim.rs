//! Interim answers: what an upstream says before it answers (RFC 9110, 15.2).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, StatusCode};

use crate::http::headers::to_client;

/// How many may wait to be written. More are left out, as any may be.
const WAITING: usize = 16;

/// Passes on interim answers to one exchange of a connection, until that is answered.
#[derive(Clone, Debug)]
pub struct Interim {
    exchange: u64,
    waiting: Arc<Waiting>,
}

/// What waits to be written between two flushes.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// The exchange that is not answered yet; 0 where there is none.
    open: AtomicU64,
    /// Whether any waits.
    is_any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Each with the exchange that it is of.
    answers: VecDeque<(u64, Bytes)>,
    /// Of the connection.
    waker: Option<Waker>,
}

impl Interim {
    pub(super) fn new(exchange: u64, waiting: Arc<Waiting>) -> Self {
        Self { exchange, waiting }
    }

    /// Passes one on, if its exchange is not answered yet.
    pub fn send(&self, status: StatusCode, headers: &HeaderMap) {
        // 100 is the gate's to say, and 101 is no interim answer to whoever did not ask.
        if !status.is_informational() || status == StatusCode::CONTINUE || status == StatusCode::SWITCHING_PROTOCOLS {
            return;
        }
        let mut state = self.waiting.lock();
        if self.waiting.open.load(Ordering::Acquire) != self.exchange {
            return;
        }
        // Those of exchanges before are late for good.
        state.answers.retain(|(exchange, _)| *exchange == self.exchange);
        if state.answers.len() >= WAITING {
            return;
        }
        state.answers.push_back((self.exchange, written(status, headers)));
        self.waiting.is_any.store(true, Ordering::Relaxed);
        if let Some(waker) = &state.waker {
            waker.wake_by_ref();
        }
    }
}

impl Waiting {
    /// From here on there may be some for this exchange.
    pub(super) fn begin(&self, exchange: u64) {
        self.open.store(exchange, Ordering::Release);
    }

    /// The answer of the exchange is known: what waits goes before it, and no more is taken.
    pub(super) fn end(&self) {
        self.open.store(0, Ordering::Release);
    }

    /// From here on this is who is woken when there is something to write.
    pub(super) fn wake(&self, waker: &Waker) {
        self.lock().waker = Some(waker.clone());
    }

    /// The exchange under way, when nothing of the one before is left to be written. What would come after its answer has
    /// begun would be part of that: then it is 0.
    pub(super) fn open(&self) -> u64 {
        self.open.load(Ordering::Acquire)
    }

    /// What is to be written before anything else of this exchange.
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
        let waiting = Arc::<Waiting>::default();
        let (first, second) = (Interim::new(1, Arc::clone(&waiting)), Interim::new(2, Arc::clone(&waiting)));
        let hints = HeaderMap::from_iter([
            (http::header::LINK, HeaderValue::from_static("</a>")),
            (http::header::CONNECTION, HeaderValue::from_static("close")),
        ]);
        waiting.begin(2);
        first.send(StatusCode::EARLY_HINTS, &hints);
        assert_eq!(waiting.take(2), None, "that exchange is over");
        second.send(StatusCode::CONTINUE, &hints);
        second.send(StatusCode::OK, &hints);
        assert_eq!(waiting.take(2), None);
        second.send(StatusCode::EARLY_HINTS, &hints);
        assert_eq!(waiting.take(1), None, "something of another exchange is under way");
        assert_eq!(waiting.take(2).unwrap(), "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n");
        second.send(StatusCode::EARLY_HINTS, &hints);
        waiting.end();
        second.send(StatusCode::EARLY_HINTS, &hints);
        assert!(waiting.take(2).is_some() && waiting.take(2).is_none(), "those from before the answer");
        second.send(StatusCode::EARLY_HINTS, &hints);
        waiting.begin(3);
        assert_eq!(waiting.take(3), None);
    }
}
