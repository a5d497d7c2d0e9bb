//! Settings of an upstream.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;

/// One of `[upstreams]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Its name.
    pub name: Arc<str>,
    /// Its addresses, at least one. Several are used in turn.
    pub places: Vec<UpstreamAddress>,
    /// How connections to it are encrypted, where they are.
    pub tls: Option<Tls>,
    /// The protocol.
    pub protocol: Protocol,
    /// Longest time for a whole attempt.
    pub timeout: Duration,
    /// Longest time for a connection to open: until a request can be written to it.
    pub connect_timeout: Duration,
    /// The maximum number of connections.
    pub max_connections: u64,
    /// The maximum number of header lines of an answer.
    pub max_headers: usize,
    /// Which requests may share a connection.
    pub reuse: Sharing,
    /// How long a client waits before it gets `still-running`.
    pub client_timeout: Duration,
}

impl Settings {
    /// The host and port of the first place, for a request that names no host.
    #[must_use]
    pub fn authority(&self) -> String {
        match self.places.first() {
            Some(UpstreamAddress::Tcp { host, port }) => authority(host, *port),
            Some(UpstreamAddress::Unix(_)) | None => "localhost".to_owned(),
        }
    }
}

/// Where connections go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpstreamAddress {
    /// A host, which is a name or an address, and a port.
    Tcp {
        /// The host to connect to, which its certificate must name.
        host: String,
        /// Its port.
        port: u16,
    },
    /// A socket of the file system.
    Unix(PathBuf),
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } => f.write_str(&authority(host, *port)),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The protocol of connections to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Negotiated by ALPN on TLS connections, else HTTP/1.1.
    Auto,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2; without TLS, with prior knowledge (RFC 9113, 3.3).
    H2,
}

/// Which requests may share a connection to an upstream, one after the other or at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Requests of all callers.
    Always,
    /// Requests of one caller.
    Caller,
    /// None: each has a connection of its own.
    Never,
}

/// How connections to an upstream are encrypted.
#[derive(Clone)]
pub struct Tls {
    /// The trusted CAs, and the client certificate.
    pub client: Arc<ClientConfig>,
    /// The name that its certificate must have, if it is not the host.
    pub name: Option<String>,
    /// The files that were named: CA, certificate, key and lists of revoked certificates.
    pub files: [Option<String>; 4],
    /// A digest of what `client` was made of: with the same, it is the same.
    pub made_of: [u8; 32],
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.files == other.files && self.made_of == other.made_of
    }
}

impl Eq for Tls {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).field("files", &self.files).finish_non_exhaustive()
    }
}

/// Whether `name` can stand in a certificate: a name, or an address.
#[must_use]
pub fn can_be_named(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok() || rustls::pki_types::DnsName::try_from(name).is_ok()
}
