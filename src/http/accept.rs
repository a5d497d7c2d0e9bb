//! Accepts connections: PROXY protocol, TLS handshake and version of HTTP before the first request.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;

use bytes::BytesMut;
use ipnet::IpNet;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::problem::Problem;
use super::proxy_protocol;
use super::rewind::Rewind;
use super::server::{
    Current, FIRST_REQUEST_GRACE, Handler, NewConnection, Peer, ServerState, serve_connection, until_stopped,
};
use super::socket::{ClientStream, GuardedIo, drain_input};
use super::usage::{ConnectionPermit, Usage};
use crate::idempotency::scope::ClientCertificate;
use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Code;

/// The first byte of a TLS connection: the content type of a handshake record (RFC 8446, 5.1).
const TLS_HANDSHAKE: u8 = 22;

/// How long a plaintext client on a TLS port may take to read the error.
const PLAINTEXT_ERROR_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// The HTTP/2 connection preface (RFC 9113, 3.4). No HTTP/1.1 request starts with it.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Capacity of the first read, in bytes.
const READ_SIZE: usize = 4 << 10;

/// The requirements of listeners on a connection before its first request.
#[derive(Clone, Debug, Default)]
pub struct AcceptSettings {
    /// `[server] tls`: connections of TCP are encrypted.
    pub tls: Option<ServerTls>,
    /// `[server] proxy_protocol`: connections are accepted from these networks only, and start with the address of the
    /// client.
    pub proxies: Option<Vec<IpNet>>,
}

/// The TLS configuration of listeners.
#[derive(Clone)]
pub struct ServerTls {
    /// The files that it was read from.
    pub files: TlsFiles,
    /// The configuration that the files yield.
    pub config: Arc<ServerConfig>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

/// The files of `[server] tls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `cert`
    pub cert: PathBuf,
    /// `key`
    pub key: PathBuf,
    /// `client_ca`
    pub client_ca: Option<PathBuf>,
    /// `client_crl`
    pub client_crl: Option<PathBuf>,
}

impl AcceptSettings {
    /// Whether connections from this address come from a proxy that speaks the PROXY protocol.
    pub(super) fn is_proxy(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.proxies.as_ref().is_some_and(|proxies| proxies.iter().any(|network| network.contains(&ip)))
    }
}

/// The kind of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketKind {
    Tcp,
    Unix,
}

/// Accepts a connection from this address and serves it.
pub(super) async fn accept<S, H>(
    stream: S,
    (kind, from): (SocketKind, SocketAddr),
    permit: ConnectionPermit,
    current: Current<H>,
    stop: watch::Receiver<bool>,
) where
    S: ClientStream,
    H: Handler,
{
    let serving = current.load_full();
    let is_encrypted = serving.accept.tls.is_some() && kind == SocketKind::Tcp;
    if serving.accept.proxies.is_none() && !is_encrypted {
        let connection = NewConnection { read: BytesMut::new(), since: Instant::now(), version: None };
        drop(serving);
        return serve_connection(GuardedIo::new(stream, permit), connection, Peer::new(from), current, stop).await;
    }
    // Boxed, so that plain connections do not carry its size.
    Box::pin(accept_with_handshake((stream, permit), from, is_encrypted, serving, current, stop)).await;
}

/// The same with a PROXY header or a TLS handshake before the first request.
async fn accept_with_handshake<S, H>(
    (mut stream, mut permit): (S, ConnectionPermit),
    from: SocketAddr,
    is_encrypted: bool,
    serving: Arc<ServerState<H>>,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) where
    S: ClientStream,
    H: Handler,
{
    let (since, mut read) = (Instant::now(), BytesMut::new());
    let (limits, usage, settings) = (&serving.limits, &serving.usage, &serving.accept);
    let deadline = since + limits.header_timeout;
    let mut from = ClientAddress { address: from, may_be_trusted: true };
    if settings.proxies.is_some() {
        if !settings.is_proxy(from.address.ip()) {
            return tracing::debug!(peer = %from.address, "a connection was closed: the peer is not a trusted proxy");
        }
        let reading = read_proxy_header(&mut stream, &mut read, from.address, deadline);
        match within_deadline(pin!(reading), usage, &mut stop).await {
            Some(Ok(client)) => from = client,
            Some(Err(why)) => return tracing::debug!(peer = %from.address, "a connection was closed: {why}"),
            None => return,
        }
        match usage.identify(permit, from.address.ip()) {
            Ok(known) => permit = known,
            Err(_) => return,
        }
    }
    let stream = GuardedIo::new(stream, permit);
    match &settings.tls {
        Some(secure) if is_encrypted => {
            let handshaking = handshake(Rewind::new(stream, read), Arc::clone(&secure.config), deadline);
            let (stream, peer, version) = match within_deadline(pin!(handshaking), usage, &mut stop).await {
                Some(Ok(stream)) => match tls_peer(stream, from) {
                    Some(known) => known,
                    None => return tracing::debug!(peer = %from.address, "a client's certificate cannot be read"),
                },
                Some(Err(why)) => return tracing::debug!(peer = %from.address, %why, "a handshake failed"),
                None => return,
            };
            let connection = NewConnection { read: BytesMut::new(), since, version: Some(version) };
            drop(serving);
            serve_connection(stream, connection, peer, current, stop).await;
        }
        _ => {
            let connection = NewConnection { read, since, version: None };
            drop(serving);
            serve_connection(stream, connection, from.peer(), current, stop).await;
        }
    }
}

/// Runs a step of the handshake until it ends, times out or the process stops. A step returns `None` when it times
/// out.
async fn within_deadline<T>(
    mut step: Pin<&mut impl Future<Output = Option<T>>>,
    usage: &Arc<Usage>,
    stop: &mut watch::Receiver<bool>,
) -> Option<T> {
    let done = match until_stopped(step.as_mut(), stop).await {
        Some(done) => done,
        // A client that has just connected is about to send a request.
        None => return timeout(FIRST_REQUEST_GRACE, step).await.ok().flatten(),
    };
    if done.is_none() {
        usage.exceeded(Limit::HeaderTimeout);
    }
    done
}

/// The address of a client.
#[derive(Clone, Copy, Debug)]
struct ClientAddress {
    address: SocketAddr,
    /// Whether its forwarding headers may be trusted, if its address is a trusted proxy's.
    may_be_trusted: bool,
}

impl ClientAddress {
    fn peer(self) -> Peer {
        Peer { may_be_trusted: self.may_be_trusted, ..Peer::new(self.address) }
    }
}

/// Reads the client's address from the PROXY header. If the proxy does not know the address, its own address is used,
/// and forwarding headers are not trusted.
async fn read_proxy_header<S: AsyncRead + Unpin>(
    stream: &mut S,
    read: &mut BytesMut,
    proxy: SocketAddr,
    deadline: Instant,
) -> Option<Result<ClientAddress, &'static str>> {
    loop {
        match proxy_protocol::take(read) {
            Ok(Some(header)) => {
                let (address, may_be_trusted) = match header.client {
                    proxy_protocol::Client::At(address) => (address, true),
                    proxy_protocol::Client::Unknown => (proxy, false),
                    proxy_protocol::Client::Proxy => (proxy, true),
                };
                return Some(Ok(ClientAddress { address, may_be_trusted }));
            }
            Ok(None) => {}
            Err(why) => return Some(Err(why)),
        }
        match timeout_at(deadline, stream.read_buf(read)).await {
            Ok(Ok(1..)) => {}
            Ok(_) => return Some(Err("it ended before the PROXY header")),
            Err(_) => return None,
        }
    }
}

/// Runs the TLS handshake; `None` where the client takes too long.
async fn handshake<S>(
    mut stream: Rewind<S>,
    config: Arc<ServerConfig>,
    deadline: Instant,
) -> Option<std::io::Result<TlsStream<Rewind<S>>>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match timeout_at(deadline, stream.peek_first()).await {
        Ok(Ok(Some(TLS_HANDSHAKE))) => {}
        Ok(Ok(Some(_))) => {
            let _ = timeout(PLAINTEXT_ERROR_TIMEOUT, reply_without_tls(&mut stream)).await;
            return Some(Err(std::io::Error::other("the client does not encrypt")));
        }
        Ok(Ok(None)) => return Some(Err(std::io::ErrorKind::UnexpectedEof.into())),
        Ok(Err(error)) => return Some(Err(error)),
        Err(_) => return None,
    }
    timeout_at(deadline, TlsAcceptor::from(config).accept(stream)).await.ok()
}

/// Encrypts a connection that another module accepted. A client that does not encrypt gets an answer that says so, and is closed.
///
/// # Errors
/// The handshake failed, or took longer than `patience`.
pub async fn encrypt<S>(
    stream: S,
    config: Arc<ServerConfig>,
    patience: std::time::Duration,
) -> std::io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handshaking = handshake(Rewind::new(stream, BytesMut::new()), config, Instant::now() + patience);
    handshaking.await.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Answers a plaintext client on a TLS port.
async fn reply_without_tls<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> std::io::Result<()> {
    let words = Problem::new(Code::BadRequest, "this port speaks TLS: send the request by https").into_http1_bytes();
    stream.write_all(&words).await?;
    stream.shutdown().await?;
    drain_input(stream, PLAINTEXT_ERROR_TIMEOUT).await;
    Ok(())
}

/// One that closes without a close_notify has not ended (RFC 8446, 6.1), which not every client looks at.
impl<S: ClientStream> ClientStream for TlsStream<S> {
    fn reset_on_close(&self, resets: bool) {
        self.get_ref().0.reset_on_close(resets);
    }
}

/// The peer after a TLS handshake. `None` if its certificate cannot be read: otherwise it would pass for a client
/// without one.
fn tls_peer<S>(stream: TlsStream<S>, from: ClientAddress) -> Option<(TlsStream<S>, Peer, HttpVersion)> {
    let session = stream.get_ref().1;
    let version = if session.alpn_protocol() == Some(b"h2") { HttpVersion::Http2 } else { HttpVersion::Http1 };
    let certificate = match session.peer_certificates().and_then(<[_]>::first) {
        Some(shown) => Some(Arc::new(ClientCertificate::of(shown)?)),
        None => None,
    };
    let peer = Peer { is_secure: true, certificate, ..from.peer() };
    Some((stream, peer, version))
}

/// The version of HTTP on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpVersion {
    /// HTTP/1.1 or 1.0, or an unknown protocol, which the HTTP/1.1 reader refuses.
    Http1,
    /// HTTP/2.
    Http2,
}

/// A detected version.
pub(super) struct Detected {
    pub(super) version: HttpVersion,
    /// The bytes that were read for the detection.
    pub(super) read: BytesMut,
}

/// Why no version was detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DetectError {
    /// The client closed the connection without sending a byte.
    Closed,
    /// The client sent nothing before the deadline.
    TimedOut,
}

/// Detects the version by the first bytes. A client that stops in the middle of a preface until `deadline` is passed
/// to the HTTP/1.1 reader, which answers it.
///
/// `read` holds bytes that were read before.
pub(super) async fn detect<S>(socket: &mut S, mut read: BytesMut, deadline: Instant) -> Result<Detected, DetectError>
where
    S: AsyncRead + Unpin,
{
    let version = loop {
        if read.starts_with(PREFACE) {
            break HttpVersion::Http2;
        }
        if !PREFACE.starts_with(&read) {
            break HttpVersion::Http1;
        }
        read.reserve(READ_SIZE);
        match timeout_at(deadline, socket.read_buf(&mut read)).await {
            Ok(Ok(1..)) => {}
            Ok(_) if read.is_empty() => return Err(DetectError::Closed),
            Err(_) if read.is_empty() => return Err(DetectError::TimedOut),
            Ok(_) | Err(_) => break HttpVersion::Http1,
        }
    };
    Ok(Detected { version, read })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncWriteExt as _, duplex};

    use super::*;

    async fn detect_in(bytes: &[u8], closes: bool) -> Result<(HttpVersion, Vec<u8>), DetectError> {
        let (mut client, mut socket) = duplex(64);
        client.write_all(bytes).await.unwrap();
        if closes {
            client.shutdown().await.unwrap();
        }
        let detected = detect(&mut socket, BytesMut::new(), Instant::now() + Duration::from_secs(5)).await?;
        Ok((detected.version, detected.read.to_vec()))
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_whole_preface_is_http_2() {
        for length in 1..=PREFACE.len() {
            let (begin, is_whole) = (&PREFACE[..length], length == PREFACE.len());
            let expected = if is_whole { HttpVersion::Http2 } else { HttpVersion::Http1 };
            assert_eq!(detect_in(begin, false).await, Ok((expected, begin.to_vec())), "{length}");
            assert_eq!(detect_in(begin, true).await, Ok((expected, begin.to_vec())), "{length}");
        }
        for other in ["P", "PUT / HTTP/1.1\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\n", "PRI * HTTP/1.1\r\n", "\x16\x03\x01"]
        {
            assert_eq!(detect_in(other.as_bytes(), false).await, Ok((HttpVersion::Http1, other.as_bytes().to_vec())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_times_out() {
        assert_eq!(detect_in(b"", false).await, Err(DetectError::TimedOut));
        assert_eq!(detect_in(b"", true).await, Err(DetectError::Closed));
    }
}
