//! Where a listener has its socket from.

use std::net::{SocketAddr, TcpListener as StdTcpListener, TcpStream as StdTcpStream};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::PathBuf;
use std::{fmt, io};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::socket::configure_tcp;

/// Where a listener has its socket from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// It is bound to this address.
    Address(SocketAddr),
    /// It is bound to this path of the file system: `unix:PATH`.
    Unix(PathBuf),
    /// The process inherits it, as from systemd: the one of this name, or those that no listener names.
    Inherited(Option<String>),
}

impl Listen {
    /// Whether one takes the other's socket. Port 0 is any free port.
    #[must_use]
    pub fn collides_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Address(one), Self::Address(other)) => {
                let same_family = one.is_ipv4() == other.is_ipv4();
                let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
                let same_ip = one.ip() == other.ip() || (same_family && is_any);
                one.port() != 0 && one.port() == other.port() && same_ip
            }
            (Self::Unix(one), Self::Unix(other)) => one == other,
            (Self::Inherited(one), Self::Inherited(other)) => one == other,
            _ => false,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Inherited(None) => f.write_str("systemd"),
            Self::Inherited(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// A TCP socket.
    Tcp(TcpListener),
    /// A Unix domain socket.
    Unix(UnixListener),
}

/// The same outside the runtime, to accept the rest of its backlog.
pub(super) enum BacklogListener {
    Tcp(StdTcpListener),
    Unix(StdUnixListener),
}

/// An accepted connection.
pub(super) enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// An accepted connection with its socket options set, to be moved to a thread.
pub(super) enum ConfiguredStream {
    Tcp(StdTcpStream),
    Unix(StdUnixStream),
}

impl Listener {
    /// Where it listens, for messages.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(|address| address.to_string()),
            Self::Unix(listener) => listener.local_addr().map(|address| {
                address.as_pathname().map_or_else(|| "unix:".to_owned(), |path| format!("unix:{}", path.display()))
            }),
        }
        .unwrap_or_default()
    }

    /// Its address, where it has one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    /// The next connection, and its peer address.
    pub(super) async fn accept(&self) -> io::Result<(Accepted, SocketAddr)> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, peer)| (Accepted::Tcp(stream), peer)),
            Self::Unix(listener) => {
                listener.accept().await.map(|(stream, _)| (Accepted::Unix(stream), unix_peer_address()))
            }
        }
    }

    /// Detaches it from the runtime.
    pub(super) fn into_backlog(self) -> io::Result<BacklogListener> {
        match self {
            Self::Tcp(listener) => listener.into_std().map(BacklogListener::Tcp),
            Self::Unix(listener) => listener.into_std().map(BacklogListener::Unix),
        }
    }
}

impl BacklogListener {
    /// The next connection in the backlog, if any.
    pub(super) fn accept(&self) -> io::Result<(ConfiguredStream, SocketAddr)> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, peer)| (ConfiguredStream::Tcp(stream), peer)),
            Self::Unix(listener) => {
                listener.accept().map(|(stream, _)| (ConfiguredStream::Unix(stream), unix_peer_address()))
            }
        }
    }
}

impl Accepted {
    /// Sets the socket options and detaches the connection from this thread's runtime.
    pub(super) fn configure(self) -> io::Result<ConfiguredStream> {
        match self {
            Self::Tcp(stream) => stream.into_std().map(ConfiguredStream::Tcp),
            Self::Unix(stream) => stream.into_std().map(ConfiguredStream::Unix),
        }
        .and_then(ConfiguredStream::configure)
    }
}

impl ConfiguredStream {
    /// Sets the socket options.
    pub(super) fn configure(self) -> io::Result<Self> {
        match &self {
            Self::Tcp(stream) => stream.set_nonblocking(true).and_then(|()| configure_tcp(stream))?,
            Self::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(self)
    }
}

impl From<SocketAddr> for Listen {
    fn from(address: SocketAddr) -> Self {
        Self::Address(address)
    }
}

/// The peer address of Unix socket connections: this machine.
fn unix_peer_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}
