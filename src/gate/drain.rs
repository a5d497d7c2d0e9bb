//! What a shutdown waits for, and how what runs learns that it waits no longer.

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
}

impl Default for Drain {
    fn default() -> Self {
        Self { abandon: OrderedSender::new(false), requests: watch::Sender::new(()), tunnels: watch::Sender::new(()) }
    }
}
