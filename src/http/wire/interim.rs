//! Interim answers: what an upstream says before it answers (RFC 9110, 15.2).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use bytes::{BufMut as _, Bytes, BytesMut};
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
pub(super) struct Waiting(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The exchange that is not answered yet; 0 where there is none.
    exchange: u64,
    answers: Vec<Bytes>,
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
        if state.exchange != self.exchange || state.answers.len() >= WAITING {
            return;
        }
        state.answers.push(written(status, headers));
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

impl Waiting {
    /// From here on there may be some for this exchange.
    pub(super) fn begin(&self, exchange: u64) {
        self.lock().exchange = exchange;
    }

    /// The exchange is answered: what still waits is left out.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        (state.exchange, state.answers) = (0, Vec::new());
    }

    /// What is to be written now. `waker` is woken when there is more.
    pub(super) fn take(&self, waker: &Waker) -> Option<Bytes> {
        let mut state = self.lock();
        if state.exchange == 0 {
            return None;
        }
        if state.answers.is_empty() {
            if !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
                state.waker = Some(waker.clone());
            }
            return None;
        }
        Some(state.answers.remove(0))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it can leave it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn written(status: StatusCode, headers: &HeaderMap) -> Bytes {
    let mut out = BytesMut::new();
    out.put_slice(b"HTTP/1.1 ");
    out.put_slice(status.as_str().as_bytes());
    out.put_u8(b' ');
    out.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    out.put_slice(b"\r\n");
    for (name, value) in &to_client(headers.clone(), &[]) {
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
        assert_eq!(waiting.take(Waker::noop()), None, "that exchange is over");
        second.send(StatusCode::CONTINUE, &hints);
        second.send(StatusCode::OK, &hints);
        assert_eq!(waiting.take(Waker::noop()), None);
        second.send(StatusCode::EARLY_HINTS, &hints);
        let written = waiting.take(Waker::noop()).unwrap();
        assert_eq!(written, "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n");
        second.send(StatusCode::EARLY_HINTS, &hints);
        waiting.end();
        assert_eq!(waiting.take(Waker::noop()), None, "it is answered");
    }
}
