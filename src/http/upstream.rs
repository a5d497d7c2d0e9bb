//! Connections to an upstream.

use std::sync::Arc;
use std::time::Duration;

/// One of `[upstreams]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name.
    pub name: Arc<str>,
    /// Host to connect to: a name or an address.
    pub host: String,
    /// Port to connect to.
    pub port: u16,
    /// Longest time for a whole attempt.
    pub timeout: Duration,
    /// Longest time for a connection to open.
    pub connect_timeout: Duration,
    /// How long a client waits before it gets `still-running`.
    pub client_timeout: Duration,
}
