//! Listeners, limits and drain.

use std::net::SocketAddr;
use std::time::Duration;

/// `[server]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: Vec<SocketAddr>,
    /// How long SIGTERM waits for attempts.
    pub drain_timeout: Duration,
}
