//! Sockets: those that listeners have, accepted connections, their options, and draining of input before a close.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener as StdTcpListener, TcpStream as StdTcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream as StdUnixStream};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

/// The idle time before the first TCP keepalive probe, and the interval between probes.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);

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

/// A client's connection.
pub trait ClientStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Whether closing it is to be a reset, which a client tells from an end. Where that cannot be, it stays an end.
    fn reset_on_close(&self, _resets: bool) {}
}

impl ClientStream for TcpStream {
    fn reset_on_close(&self, resets: bool) {
        // It fails where the connection has failed already.
        let _ = SockRef::from(self).set_linger(resets.then_some(Duration::ZERO));
    }
}

impl ClientStream for UnixStream {}

#[cfg(test)]
impl ClientStream for tokio::io::DuplexStream {}

impl<S: ClientStream, T: Send + Unpin + 'static> ClientStream for GuardedIo<S, T> {
    fn reset_on_close(&self, resets: bool) {
        self.stream.reset_on_close(resets);
    }
}

/// The peer address of Unix socket connections: this machine.
fn unix_peer_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A stream, and a guard that is dropped when it closes. That includes upgraded connections, which outlive the task
/// that served them.
pub(super) struct GuardedIo<S, T> {
    stream: S,
    _guard: T,
}

impl<S, T> GuardedIo<S, T> {
    pub(super) fn new(stream: S, guard: T) -> Self {
        Self { stream, _guard: guard }
    }
}

impl<S: AsyncRead + Unpin, T: Unpin> AsyncRead for GuardedIo<S, T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin, T: Unpin> AsyncWrite for GuardedIo<S, T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Disables Nagle's algorithm and enables keepalive, which detects vanished peers.
pub(super) fn configure_tcp(stream: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN))
}

/// Reads on what a client still sends, until it closes, fails, or pauses for so long: closed with bytes unread, the
/// connection would be reset, and the last answer lost on its way (RFC 9112, 9.6).
pub(super) async fn drain_input(socket: &mut (impl AsyncRead + Unpin), pause: Duration) {
    // On the heap, so that the future of each connection stays small.
    let mut unread = vec![0; 8 << 10];
    while let Ok(Ok(1..)) = timeout(pause, socket.read(&mut unread)).await {}
}
