//! Limits on clients.

use std::time::Duration;

use http::HeaderMap;

use super::fault::Fault;

/// How many header lines of a message hyper takes by default. It needs no allocation for them, as it does for any other number.
pub(super) const HYPER_MAX_HEADERS: usize = 100;

/// The size that trailers of a request stay below, in bytes. Over HTTP/1.1, hyper has the same limit.
pub(super) const MAX_TRAILERS: usize = 16 << 10;

/// How many bytes a line counts for beside its name and value (RFC 9113, 6.5.2).
pub(super) const LINE_OVERHEAD: usize = 32;

/// The size of header lines, as HTTP/2 counts it.
pub(super) fn size_of_fields(fields: &HeaderMap) -> usize {
    fields.iter().map(|(name, value)| name.as_str().len() + value.len() + LINE_OVERHEAD).sum()
}

/// Limits on the time, size and number of requests and connections.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How long the head of a request may take, from its first byte; and how long a new connection may stay silent.
    pub header_timeout: Duration,
    /// How long a kept connection may stay silent between two exchanges.
    pub idle_timeout: Duration,
    /// The longest pause in a request's body.
    pub body_timeout: Duration,
    /// How many bytes of a body come in a second at least, on average, once `body_timeout` has passed.
    pub min_body_rate: u64,
    /// How many bytes a request's head has at most, with the line that it begins with.
    pub max_header_size: usize,
    /// How many header lines it has at most.
    pub max_headers: usize,
    /// How many connections there are at most, on all listeners.
    pub max_connections: u64,
    /// How many of them are of one address at most; of IPv6, of one /64.
    pub max_connections_per_address: u64,
    /// How many requests are dealt with at a time, on all routes.
    pub max_requests: u64,
    /// How many of them wait for another's attempt.
    pub max_waiting: u64,
    /// How many requests that were only observed are looked at at a time.
    pub max_observing: u64,
    /// How many bytes of bodies are held in memory, of requests and of answers.
    pub max_buffered_memory: u64,
    /// How many bytes of requests' bodies are held in temporary files.
    pub max_buffered_disk: u64,
    /// Whether one address or caller leaves some of the shared limits to others.
    pub fair_share: bool,
}

impl Limits {
    /// How many header lines an answer of an upstream has at most. A low limit on requests makes no answer unreadable.
    #[must_use]
    pub fn max_answer_headers(&self) -> usize {
        self.max_headers.max(HYPER_MAX_HEADERS)
    }

    /// How long to wait for more of a body of which `bytes` have arrived after waiting for `waited`, and the fault
    /// when that is over.
    pub(super) fn body_wait(&self, waited: Duration, bytes: u64) -> (Duration, Fault) {
        let earned = Duration::from_secs(bytes / self.min_body_rate.max(1));
        let left = (self.body_timeout + earned).saturating_sub(waited);
        let fault = if left < self.body_timeout { Fault::BodyTooSlow } else { Fault::BodyPaused };
        (left.min(self.body_timeout), fault)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(30),
            min_body_rate: 256,
            max_header_size: 64 << 10,
            max_headers: HYPER_MAX_HEADERS,
            max_connections: 12_000,
            max_connections_per_address: 12_000,
            max_requests: 10_000,
            max_waiting: 1_000,
            max_observing: 1_000,
            max_buffered_memory: 256 << 20,
            max_buffered_disk: 4 << 30,
            fair_share: true,
        }
    }
}
