//! Where a listener has its socket from.

use std::net::{SocketAddr, TcpListener as StdTcpListener, TcpStream as StdTcpStream};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::PathBuf;
use std::{fmt, io};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::door::of_unix;
use super::socket::watch_over;

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

/// A socket that listens.
#[derive(Debug)]
pub enum Socket {
    /// For those who come over a network.
    Tcp(TcpListener),
    /// For those on this machine.
    Unix(UnixListener),
}

/// The same, to empty its queue.
pub(super) enum Last {
    Tcp(StdTcpListener),
    Unix(StdUnixListener),
}

/// A connection that was accepted.
pub(super) enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// The same, watched over, and yet to be given to a thread.
pub(super) enum Watched {
    Tcp(StdTcpStream),
    Unix(StdUnixStream),
}

impl Socket {
    /// Where it listens, for people.
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

    /// The next connection, and where it is from.
    pub(super) async fn accept(&self) -> io::Result<(Accepted, SocketAddr)> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, peer)| (Accepted::Tcp(stream), peer)),
            Self::Unix(listener) => listener.accept().await.map(|(stream, _)| (Accepted::Unix(stream), of_unix())),
        }
    }

    /// The same without a runtime that waits for more.
    pub(super) fn into_last(self) -> io::Result<Last> {
        match self {
            Self::Tcp(listener) => listener.into_std().map(Last::Tcp),
            Self::Unix(listener) => listener.into_std().map(Last::Unix),
        }
    }
}

impl Last {
    /// The next connection, if there is one.
    pub(super) fn accept(&self) -> io::Result<(Watched, SocketAddr)> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, peer)| (Watched::Tcp(stream), peer)),
            Self::Unix(listener) => listener.accept().map(|(stream, _)| (Watched::Unix(stream), of_unix())),
        }
    }
}

impl Accepted {
    /// To be given to another thread.
    pub(super) fn watched(self) -> io::Result<Watched> {
        match self {
            Self::Tcp(stream) => stream.into_std().map(Watched::Tcp),
            Self::Unix(stream) => stream.into_std().map(Watched::Unix),
        }
        .and_then(Watched::watched)
    }
}

impl Watched {
    /// The same, once the system watches over it.
    pub(super) fn watched(self) -> io::Result<Self> {
        match &self {
            Self::Tcp(stream) => stream.set_nonblocking(true).and_then(|()| watch_over(stream))?,
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
