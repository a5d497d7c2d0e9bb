//! What a connection holds for a client that does not take it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::http::limits::Limits;
use crate::http::usage::HELD_ANYWAY;

/// Which part of `max_buffered_memory` one connection may fill with answers that its client has yet to take.
const SHARE: u64 = 4;

/// The answers that wait for the client of a connection.
pub(super) struct Unread {
    bytes: AtomicU64,
    most: u64,
}

impl Unread {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self { bytes: AtomicU64::new(0), most: limits.max_buffered_memory / SHARE })
    }

    /// Whether the client has to take some of them before it may ask for more.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.most
    }
}

/// One of them.
pub(super) struct Waiting {
    unread: Arc<Unread>,
    bytes: u64,
}

impl Waiting {
    pub(super) fn new(unread: Arc<Unread>) -> Self {
        Self { unread, bytes: 0 }
    }

    /// So many bytes of it wait now. What is small is not counted: there are as many as streams at most.
    pub(super) fn set(&mut self, bytes: usize) {
        let bytes = if bytes > HELD_ANYWAY { bytes as u64 } else { 0 };
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes > before {
            self.unread.bytes.fetch_add(bytes - before, Ordering::Relaxed);
        } else if bytes < before {
            self.unread.bytes.fetch_sub(before - bytes, Ordering::Relaxed);
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

    #[test]
    fn what_is_taken_or_given_up_waits_no_more() {
        let unread = Unread::new(&Limits { max_buffered_memory: 4_000_000, ..Limits::default() });
        let (mut first, mut second) = (Waiting::new(Arc::clone(&unread)), Waiting::new(Arc::clone(&unread)));
        first.set(1_000_000);
        second.set(HELD_ANYWAY);
        assert!(!unread.is_full());
        second.set(100_000);
        assert!(unread.is_full());
        first.set(900_000);
        assert!(!unread.is_full());
        first.set(1_000_000);
        drop(first);
        second.set(0);
        assert_eq!(unread.bytes.load(Ordering::Relaxed), 0);
    }
}
