//! How much memory one connection of HTTP/2 may fill with bodies, so that its requests leave room for those of others.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::budget::Budget;
use super::limits::Limits;
use super::usage::{HELD_ANYWAY, Usage};

/// A connection may fill this part of `max_buffered_memory`.
const SHARE: u64 = 4;

/// Further requests are refused while answers that the client has yet to read fill this part of it.
const UNREAD: u64 = 8;

/// The memory that the bodies of one connection may fill.
pub struct Share {
    memory: Arc<Budget>,
    /// How many bytes of answers wait for the client.
    unread: AtomicU64,
    most_unread: u64,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share").field("unread", &self.unread).finish_non_exhaustive()
    }
}

impl Share {
    pub(super) fn new(limits: &Limits, usage: &Usage) -> Arc<Self> {
        let most = limits.max_buffered_memory;
        Arc::new(Self {
            memory: usage.memory.share(most / SHARE),
            unread: AtomicU64::new(0),
            most_unread: most / UNREAD,
        })
    }

    /// What the bodies of its requests, and of their answers, are counted in.
    #[must_use]
    pub fn memory(&self) -> &Arc<Budget> {
        &self.memory
    }

    /// Whether the client has to read some of its answers before it may ask for more.
    #[must_use]
    pub fn is_unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed) > self.most_unread
    }
}

/// An answer that waits for the client of a connection.
pub(super) struct Waiting {
    share: Arc<Share>,
    bytes: u64,
}

impl Waiting {
    pub(super) fn new(share: Arc<Share>) -> Self {
        Self { share, bytes: 0 }
    }

    /// So many bytes of it wait now. A small answer is not counted: there are at most as many as streams.
    pub(super) fn set(&mut self, bytes: usize) {
        let bytes = if bytes > HELD_ANYWAY { bytes as u64 } else { 0 };
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes > before {
            self.share.unread.fetch_add(bytes - before, Ordering::Relaxed);
        } else if bytes < before {
            self.share.unread.fetch_sub(before - bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Waiting {
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
        let share = Share::new(&limits, &Usage::new(&limits, &Metrics::new()));
        let (mut first, mut second) = (Waiting::new(Arc::clone(&share)), Waiting::new(Arc::clone(&share)));
        first.set(1_000_000);
        second.set(HELD_ANYWAY);
        assert!(!share.is_unread());
        second.set(100_000);
        assert!(share.is_unread());
        first.set(900_000);
        assert!(!share.is_unread());
        first.set(1_000_000);
        drop(first);
        second.set(0);
        assert_eq!(share.unread.load(Ordering::Relaxed), 0);
    }
}
