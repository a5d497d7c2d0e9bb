//! The address settings of Redis.

use std::fmt;

/// The servers and the credentials.
#[derive(Clone)]
pub struct Servers {
    /// Their topology.
    pub topology: Topology,
    /// Host and port of each that is named: at least one.
    pub hosts: Vec<(String, u16)>,
    /// The user; the default one where it is not set.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// The number of the database; 0 in a cluster.
    pub database: i64,
    /// The certificates, if connections are encrypted.
    pub tls: Option<Certificates>,
}

/// The topology of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server: the first of the hosts that can be reached and takes writes.
    Standalone,
    /// The hosts are Sentinels, who know which server is the primary.
    Sentinel {
        /// The name that they know it by.
        primary: String,
        /// Whether the Sentinels want the same user and password as the servers. Otherwise they want none.
        is_guarded: bool,
    },
    /// The hosts are nodes of a Redis Cluster, and know the others.
    Cluster,
}

/// The certificates of encrypted connections, in PEM.
#[derive(Clone, Default)]
pub struct Certificates {
    /// The trusted roots; the system's if not set.
    pub roots: Option<Vec<u8>>,
    /// The gate's own certificates and their key, if the servers require client certificates.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Servers");
        shown.field("topology", &self.topology).field("hosts", &self.hosts).field("user", &self.user);
        shown.field("database", &self.database).field("tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates")
    }
}
