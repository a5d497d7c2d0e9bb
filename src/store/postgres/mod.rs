//! Records in PostgreSQL, for any number of gates at once.

mod error;
mod schema;
pub mod tls;

use std::fmt;

pub use self::error::OpenError;
pub use self::schema::{Migration, migrate, pending};

/// Which database, and how much of it to use.
#[derive(Clone)]
pub struct Settings {
    /// Where the servers are, as whom to connect and to which database. The primary is looked for among the hosts unless
    /// this says otherwise.
    pub servers: tokio_postgres::Config,
    /// With what to encrypt connections; nothing where `servers` has TLS off.
    pub tls: Option<rustls::ClientConfig>,
    /// The most connections that this process opens. At least [`Settings::FEWEST_CONNECTIONS`].
    pub connections: usize,
}

impl Settings {
    /// How few connections a gate works with: for claims, for endings, to be told of endings, and for all else.
    pub const FEWEST_CONNECTIONS: usize = 4;

    /// How many connections a gate opens unless it is told.
    pub const USUAL_CONNECTIONS: usize = 8;
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("connections", &self.connections).finish_non_exhaustive()
    }
}
