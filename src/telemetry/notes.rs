//! What is learnt of one request on its way, for the line and the span that tell of it when its answer is over.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::spans::SpanContext;
use super::wall_clock;
use crate::idempotency::record::{RecordId, Timestamp};

/// Notes on one request. They are taken only where something tells of them.
#[derive(Debug, Default)]
pub struct Notes {
    span: Option<SpanContext>,
    noted: Mutex<Noted>,
}

/// What was noted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// The address of the client, where that is not the peer's.
    pub client: Option<IpAddr>,
    /// The name of its route, once that is known.
    pub route: Option<Arc<str>>,
    /// The key, shortened.
    pub key: Option<String>,
    /// The id of its record.
    pub record: Option<RecordId>,
    /// When its last attempt began.
    pub attempt: Option<Timestamp>,
    /// How many attempts it made.
    pub attempts: u32,
    /// The name of the upstream that it was sent to.
    pub upstream: Option<String>,
    /// How long that took to answer.
    pub upstream_time: Option<Duration>,
    /// Whether its route protects it, or refuses it.
    pub is_protected: bool,
    /// The span of the request whose record it met.
    pub first: Option<SpanContext>,
    /// How long the store took for what the request waited for.
    pub store_time: Option<Duration>,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug)]
enum Dependency {
    Upstream,
    Store,
}

/// Measures how long a request waits, until it is dropped.
#[must_use = "it measures until it is dropped"]
pub struct Timing {
    notes: Arc<Notes>,
    of: Dependency,
    began: Instant,
}

impl Notes {
    /// On a request with this span.
    #[must_use]
    pub fn new(span: Option<SpanContext>) -> Self {
        Self { span, noted: Mutex::default() }
    }

    /// Its span, if it is protected: what it sends to an upstream comes from there.
    #[must_use]
    pub fn span(&self) -> Option<SpanContext> {
        self.span.filter(|_| self.noted().is_protected)
    }

    /// Notes something.
    pub fn note(&self, note: impl FnOnce(&mut Noted)) {
        note(&mut self.noted());
    }

    /// What was noted so far.
    #[must_use]
    pub fn get(&self) -> Noted {
        self.noted().clone()
    }

    /// The request is sent to this upstream, and waits for it.
    pub fn asks_upstream(self: &Arc<Self>, name: &str) -> Timing {
        self.note(|noted| noted.upstream = Some(name.to_owned()));
        Timing { notes: Arc::clone(self), of: Dependency::Upstream, began: Instant::now() }
    }

    /// The request waits for the store.
    pub fn asks_store(self: &Arc<Self>) -> Timing {
        Timing { notes: Arc::clone(self), of: Dependency::Store, began: Instant::now() }
    }

    /// An attempt begins now.
    pub fn begins_attempt(&self) {
        self.note(|noted| {
            noted.attempt = Some(wall_clock());
            noted.attempts += 1;
        });
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        self.notes.note(|noted| {
            let time = match self.of {
                Dependency::Upstream => &mut noted.upstream_time,
                Dependency::Store => &mut noted.store_time,
            };
            *time = Some(time.unwrap_or_default() + took);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_a_request_waits_for_adds_up() {
        let notes = Arc::new(Notes::default());
        for name in ["one", "other"] {
            let timing = notes.asks_upstream(name);
            tokio::time::advance(Duration::from_millis(5)).await;
            drop(timing);
        }
        let noted = notes.get();
        assert_eq!(noted.upstream.as_deref(), Some("other"));
        assert_eq!((noted.upstream_time, noted.store_time), (Some(Duration::from_millis(10)), None));
    }
}
