//! The state of an upstream on an HTTP/2 connection, which hyper does not expose.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The state of an upstream on one connection.
pub(super) struct RemoteState {
    opened: Instant,
    /// When input last arrived, in milliseconds since the connection opened.
    last: AtomicU64,
    /// Its SETTINGS_MAX_CONCURRENT_STREAMS.
    pub(super) max_streams: AtomicUsize,
    pub(super) has_settings: AtomicBool,
    /// It accepts no more requests.
    pub(super) is_going_away: AtomicBool,
    settings_arrived: Notify,
}

impl Default for RemoteState {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            last: AtomicU64::new(0),
            // Unlimited by default (RFC 9113, 6.5.2).
            max_streams: AtomicUsize::new(usize::MAX),
            has_settings: AtomicBool::new(false),
            is_going_away: AtomicBool::new(false),
            settings_arrived: Notify::new(),
        }
    }
}

impl RemoteState {
    /// Waits for its first SETTINGS (RFC 9113, 3.4).
    pub(super) async fn wait_for_settings(&self) {
        let settings_arrived = self.settings_arrived.notified();
        if !self.has_settings.load(Ordering::Acquire) {
            settings_arrived.await;
        }
    }

    pub(super) fn stream_limit(&self) -> usize {
        self.max_streams.load(Ordering::Relaxed)
    }

    pub(super) fn is_going_away(&self) -> bool {
        self.is_going_away.load(Ordering::Relaxed)
    }

    /// The time since input last arrived.
    pub(super) fn idle_time(&self) -> Duration {
        self.opened.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }

    pub(super) fn record_activity(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    pub(super) fn receive_settings(&self) {
        self.has_settings.store(true, Ordering::Release);
        self.settings_arrived.notify_waiters();
    }
}
