//! Health, metrics and the records API, on a listener of their own.

use std::net::SocketAddr;

/// `[admin]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The bearer token that the records API demands, where one is set.
    pub token: Option<Token>,
}

/// A secret that `Debug` does not show.
#[derive(Clone)]
pub struct Token(pub String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(secret)")
    }
}
