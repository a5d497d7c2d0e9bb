//! The story of one request: route, key, fingerprint, claim, decide, act.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;

/// What the gate is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `[store] service`
    pub service: Arc<str>,
    /// `[store] id_secret_file`'s content.
    pub id_secret: Option<Secret>,
    /// How long a client waits for a store that went away after the attempt.
    pub settle_timeout: Duration,
    /// The names of the headers that the gate adds.
    pub headers: HeaderNames,
    /// Index of the upstream for what matches no route.
    pub default_upstream: Option<usize>,
}

/// A secret that `Debug` does not show.
#[derive(Clone)]
pub struct Secret(pub Arc<[u8]>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The names of the headers that the gate adds; what is `None` is not added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// `Idempotency-Status`
    pub status: Option<HeaderName>,
    /// `Idempotent-Replayed`
    pub replayed: Option<HeaderName>,
    /// `Idempotency-Expires`
    pub expires: Option<HeaderName>,
}
