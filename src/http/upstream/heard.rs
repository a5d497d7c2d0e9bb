//! What an upstream has said on an HTTP/2 connection, for those that hyper does not tell.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// What an upstream has said on a connection.
pub(super) struct Heard {
    opened: Instant,
    /// When it last said anything, in milliseconds since it was opened.
    last: AtomicU64,
    /// How many requests it takes at a time.
    pub(super) most: AtomicUsize,
    pub(super) has_greeted: AtomicBool,
    /// It takes no more requests.
    pub(super) says_goodbye: AtomicBool,
    greeted: Notify,
}

impl Default for Heard {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            last: AtomicU64::new(0),
            // Where it says nothing, as many as one likes (RFC 9113, 6.5.2).
            most: AtomicUsize::new(usize::MAX),
            has_greeted: AtomicBool::new(false),
            says_goodbye: AtomicBool::new(false),
            greeted: Notify::new(),
        }
    }
}

impl Heard {
    /// Waits until it has said that it speaks HTTP/2 (RFC 9113, 3.4).
    pub(super) async fn greeting(&self) {
        let greeted = self.greeted.notified();
        if !self.has_greeted.load(Ordering::Acquire) {
            greeted.await;
        }
    }

    pub(super) fn most_streams(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    pub(super) fn says_goodbye(&self) -> bool {
        self.says_goodbye.load(Ordering::Relaxed)
    }

    /// For how long it has said nothing.
    pub(super) fn silence(&self) -> Duration {
        self.opened.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }

    pub(super) fn hear(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    pub(super) fn greets(&self) {
        self.has_greeted.store(true, Ordering::Release);
        self.greeted.notify_waiters();
    }
}
