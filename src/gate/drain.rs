//! What a shutdown waits for, and how what runs learns that it waits no longer.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

use super::claim::single_flight::OrderedSender;

/// All that a drain goes by.
pub(super) struct Drain {
    /// Turned true when attempts, and requests that are only forwarded, must end.
    pub(super) abandon: OrderedSender<bool>,
    /// Each protected request holds a receiver until it has ended.
    pub(super) requests: watch::Sender<()>,
    /// Each connection that has switched to another protocol holds a receiver until it has ended.
    pub(super) tunnels: watch::Sender<()>,
    /// How many requests have no answer yet.
    unanswered: AtomicUsize,
}

/// A request that has no answer yet.
pub(super) struct Unanswered<'a>(&'a AtomicUsize);

impl Drain {
    /// A request arrives.
    pub(super) fn arrived(&self) -> Unanswered<'_> {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        Unanswered(&self.unanswered)
    }

    /// Whether a client waits for an answer.
    pub(super) fn owes_answers(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) > 0
    }

    /// What reading the body of a request comes to; nothing where the drain is over first.
    pub(super) async fn unless_over<T>(&self, reading: impl Future<Output = T>) -> Option<T> {
        // Most bodies are there at once: then this is not polled.
        let over = async {
            let mut abandon = self.abandon.subscribe();
            abandon.wait_for(|abandon| *abandon).await.is_ok()
        };
        tokio::select! {
            biased;
            read = reading => Some(read),
            _ = over => None,
        }
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            abandon: OrderedSender::new(false),
            requests: watch::Sender::new(()),
            tunnels: watch::Sender::new(()),
            unanswered: AtomicUsize::new(0),
        }
    }
}
