//! The memory that the bodies of one HTTP/2 connection may fill, so that its requests leave room for other clients.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::limits::Limits;
use super::usage::{Budget, UNCOUNTED_BODY, Usage};

/// The divisor of `max_buffered_memory` that gives the budget of one connection.
const SHARE: u64 = 4;

/// The divisor that gives the most unread response bytes before further requests are refused.
const UNREAD: u64 = 8;

/// The memory that the bodies of one connection may fill.
pub struct ConnectionMemory {
    memory: Arc<Budget>,
    /// How many response bytes the client has yet to read.
    unread: AtomicU64,
    max_unread: u64,
}

impl fmt::Debug for ConnectionMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionMemory").field("unread", &self.unread).finish_non_exhaustive()
    }
}

impl ConnectionMemory {
    pub(super) fn new(limits: &Limits, usage: &Usage) -> Arc<Self> {
        let most = limits.max_buffered_memory;
        Arc::new(Self {
            memory: usage.memory.child(most / SHARE),
            unread: AtomicU64::new(0),
            max_unread: most / UNREAD,
        })
    }

    /// The budget for the bodies of its requests and responses.
    #[must_use]
    pub fn memory(&self) -> &Arc<Budget> {
        &self.memory
    }

    /// Whether the client must read some responses before it may send further requests.
    #[must_use]
    pub fn is_backlogged(&self) -> bool {
        self.unread.load(Ordering::Relaxed) > self.max_unread
    }
}

/// The bytes of one response that the client has yet to read.
pub(super) struct UnreadResponse {
    memory: Arc<ConnectionMemory>,
    bytes: u64,
}

impl UnreadResponse {
    pub(super) fn new(memory: Arc<ConnectionMemory>) -> Self {
        Self { memory, bytes: 0 }
    }

    /// Updates the number of bytes. Small responses are not counted: the number of streams bounds them.
    pub(super) fn set(&mut self, bytes: usize) {
        let bytes = if bytes > UNCOUNTED_BODY { bytes as u64 } else { 0 };
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes > before {
            self.memory.unread.fetch_add(bytes - before, Ordering::Relaxed);
        } else if bytes < before {
            self.memory.unread.fetch_sub(before - bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for UnreadResponse {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn an_answer_that_was_read_or_given_up_waits_no_more() {
        let limits = Limits { max_buffered_memory: 8_000_000, ..Limits::default() };
        let memory = ConnectionMemory::new(&limits, &Usage::new(&limits, &Metrics::new()));
        let (mut first, mut second) =
            (UnreadResponse::new(Arc::clone(&memory)), UnreadResponse::new(Arc::clone(&memory)));
        first.set(1_000_000);
        second.set(UNCOUNTED_BODY);
        assert!(!memory.is_backlogged());
        second.set(100_000);
        assert!(memory.is_backlogged());
        first.set(900_000);
        assert!(!memory.is_backlogged());
        first.set(1_000_000);
        drop(first);
        second.set(0);
        assert_eq!(memory.unread.load(Ordering::Relaxed), 0);
    }
}
