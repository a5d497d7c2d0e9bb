//! Interim answers: what an upstream says before it answers (RFC 9110, 15.2).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Whether any waits.
    is_any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The exchange that they are of.
    exchange: u64,
    /// Its answer has begun: no more of them are taken.
    is_answered: bool,
    answers: VecDeque<Bytes>,
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
        if state.exchange != self.exchange || state.is_answered || state.answers.len() >= WAITING {
            return;
        }
        state.answers.push_back(written(status, headers));
        self.waiting.is_any.store(true, Ordering::Relaxed);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

impl Waiting {
    /// From here on there may be some for this exchange.
    pub(super) fn begin(&self, exchange: u64) {
        let mut state = self.lock();
        (state.exchange, state.is_answered) = (exchange, false);
        state.answers.clear();
        self.is_any.store(false, Ordering::Relaxed);
    }

    /// The answer of the exchange is known: what waits goes before it, and no more is taken.
    pub(super) fn end(&self) {
        self.lock().is_answered = true;
    }

    /// The exchange under way, when nothing of the one before is left to be written. `waker` is woken when there is
    /// something to write.
    pub(super) fn wait(&self, waker: &Waker) -> u64 {
        let mut state = self.lock();
        if !state.is_answered && !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        // What would come after the answer has begun would be part of it.
        if state.is_answered { 0 } else { state.exchange }
    }

    /// What is to be written before anything else of this exchange.
    pub(super) fn take(&self, exchange: u64) -> Option<Bytes> {
        if !self.is_any.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.lock();
        let next = if state.exchange == exchange { state.answers.pop_front() } else { None };
        self.is_any.store(!state.answers.is_empty(), Ordering::Relaxed);
        next
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
