//! How clients come in: what listeners ask of a connection before its first request.

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

use super::held::Held;
use super::opening::Protocol;
use super::problem::Problem;
use super::proxy_protocol;
use super::rewound::Rewound;
use super::server::{Beginning, Current, FIRST_REQUEST, Handler, Peer, Serving, begin, until_stopped};
use super::socket::read_on;
use super::usage::{Place, Usage};
use crate::idempotency::scope::ClientCertificate;
use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Code;

/// The first byte of every connection that is to be encrypted: a handshake (RFC 8446, 5.1).
const HANDSHAKE: u8 = 22;

/// How long a client may take to hear that it came by the wrong way.
const LAST_WORDS: std::time::Duration = std::time::Duration::from_secs(2);

/// What listeners ask of a connection before its first request.
#[derive(Clone, Debug, Default)]
pub struct Door {
    /// `[server] tls`: connections of TCP are encrypted.
    pub tls: Option<Secure>,
    /// `[server] proxy_protocol`: whose connections alone are taken. They begin with the address of the client.
    pub proxies: Option<Vec<IpNet>>,
}

/// What a gate proves on encrypted connections, and asks of clients.
#[derive(Clone)]
pub struct Secure {
    /// Where it is from.
    pub files: Files,
    /// What the files held.
    pub config: Arc<ServerConfig>,
}

impl fmt::Debug for Secure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

/// The files of `[server] tls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// `cert`
    pub cert: PathBuf,
    /// `key`
    pub key: PathBuf,
    /// `client_ca`
    pub client_ca: Option<PathBuf>,
    /// `client_crl`
    pub client_crl: Option<PathBuf>,
}

impl Door {
    /// Whether who connects from this address is a proxy, which says for whom.
    pub(super) fn is_proxy(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.proxies.as_ref().is_some_and(|proxies| proxies.iter().any(|network| network.contains(&ip)))
    }
}

/// What carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    Tcp,
    Unix,
}

/// Lets a client in that connected from this address, and serves it.
pub(super) async fn enter<S, H>(
    stream: S,
    (carrier, from): (Carrier, SocketAddr),
    place: Place,
    current: Current<H>,
    stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let serving = current.load_full();
    let is_encrypted = serving.door.tls.is_some() && carrier == Carrier::Tcp;
    if serving.door.proxies.is_none() && !is_encrypted {
        let beginning = Beginning { read: BytesMut::new(), since: Instant::now(), protocol: None };
        drop(serving);
        return begin(Held::new(stream, place), beginning, Peer::new(from), current, stop).await;
    }
    // In a box: plain connections are not to have the room for it.
    Box::pin(led_in((stream, place), from, is_encrypted, serving, current, stop)).await;
}

/// The same where a client has something to say or to prove before its first request.
async fn led_in<S, H>(
    (mut stream, mut place): (S, Place),
    from: SocketAddr,
    is_encrypted: bool,
    serving: Arc<Serving<H>>,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let (since, mut read) = (Instant::now(), BytesMut::new());
    let (limits, usage, door) = (&serving.limits, &serving.usage, &serving.door);
    let deadline = since + limits.header_timeout;
    let mut from = Client { address: from, is_believed: true };
    if door.proxies.is_some() {
        if !door.is_proxy(from.address.ip()) {
            return tracing::debug!(peer = %from.address, "a connection was closed: it is none of a trusted proxy");
        }
        let reading = introduced(&mut stream, &mut read, from.address, deadline);
        match in_time(pin!(reading), usage, &mut stop).await {
            Some(Ok(client)) => from = client,
            Some(Err(why)) => return tracing::debug!(peer = %from.address, "a connection was closed: {why}"),
            None => return,
        }
        match usage.known(place, from.address.ip()) {
            Ok(known) => place = known,
            Err(_) => return,
        }
    }
    let stream = Held::new(stream, place);
    match &door.tls {
        Some(secure) if is_encrypted => {
            let shaking = handshake(Rewound::new(stream, read), Arc::clone(&secure.config), deadline);
            let (stream, peer, protocol) = match in_time(pin!(shaking), usage, &mut stop).await {
                Some(Ok(stream)) => match encrypted(stream, from) {
                    Some(known) => known,
                    None => return tracing::debug!(peer = %from.address, "a client's certificate cannot be read"),
                },
                Some(Err(why)) => return tracing::debug!(peer = %from.address, %why, "a handshake failed"),
                None => return,
            };
            let beginning = Beginning { read: BytesMut::new(), since, protocol: Some(protocol) };
            drop(serving);
            begin(stream, beginning, peer, current, stop).await;
        }
        _ => {
            let beginning = Beginning { read, since, protocol: None };
            drop(serving);
            begin(stream, beginning, from.peer(), current, stop).await;
        }
    }
}

/// What comes of a step, unless it takes too long or the process ends first. Each step says so itself by `None`.
async fn in_time<T>(
    mut step: Pin<&mut impl Future<Output = Option<T>>>,
    usage: &Arc<Usage>,
    stop: &mut watch::Receiver<bool>,
) -> Option<T> {
    let done = match until_stopped(step.as_mut(), stop).await {
        Some(done) => done,
        // Who has just connected is on the way with a request.
        None => return timeout(FIRST_REQUEST, step).await.ok().flatten(),
    };
    if done.is_none() {
        usage.exceeded(Limit::HeaderTimeout);
    }
    done
}

/// A client, as far as its connection tells.
#[derive(Clone, Copy, Debug)]
struct Client {
    address: SocketAddr,
    /// Whether what it says of where requests come from may count, if its address is a trusted proxy's.
    is_believed: bool,
}

impl Client {
    fn peer(self) -> Peer {
        Peer { is_believed: self.is_believed, ..Peer::new(self.address) }
    }
}

/// The client, as the proxy says that has connected. Where it does not know the address, its own stands for it; but what
/// the client says is nobody's word.
async fn introduced<S: AsyncRead + Unpin>(
    stream: &mut S,
    read: &mut BytesMut,
    proxy: SocketAddr,
    deadline: Instant,
) -> Option<Result<Client, &'static str>> {
    loop {
        match proxy_protocol::take(read) {
            Ok(Some(header)) => {
                let (address, is_believed) = match header.client {
                    proxy_protocol::Client::At(address) => (address, true),
                    proxy_protocol::Client::Unknown => (proxy, false),
                    proxy_protocol::Client::Proxy => (proxy, true),
                };
                return Some(Ok(Client { address, is_believed }));
            }
            Ok(None) => {}
            Err(why) => return Some(Err(why)),
        }
        match timeout_at(deadline, stream.read_buf(read)).await {
            Ok(Ok(1..)) => {}
            Ok(_) => return Some(Err("it ended before the client's address came")),
            Err(_) => return None,
        }
    }
}

/// Encrypts a connection; nothing where the client takes too long.
async fn handshake<S>(
    mut stream: Rewound<S>,
    config: Arc<ServerConfig>,
    deadline: Instant,
) -> Option<std::io::Result<TlsStream<Rewound<S>>>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match timeout_at(deadline, stream.first()).await {
        Ok(Ok(Some(HANDSHAKE))) => {}
        Ok(Ok(Some(_))) => {
            let _ = timeout(LAST_WORDS, tell(&mut stream)).await;
            return Some(Err(std::io::Error::other("the client does not encrypt")));
        }
        Ok(Ok(None)) => return Some(Err(std::io::ErrorKind::UnexpectedEof.into())),
        Ok(Err(error)) => return Some(Err(error)),
        Err(_) => return None,
    }
    timeout_at(deadline, TlsAcceptor::from(config).accept(stream)).await.ok()
}

/// Tells a client that it came by the wrong way.
async fn tell<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> std::io::Result<()> {
    let words = Problem::new(Code::BadRequest, "this port speaks TLS: send the request by https").into_last_words();
    stream.write_all(&words).await?;
    stream.shutdown().await?;
    read_on(stream, LAST_WORDS).await;
    Ok(())
}

/// What is known of a client once its connection is encrypted; nothing where it has a certificate that says nothing: it
/// would pass for a client without one.
fn encrypted<S>(stream: TlsStream<S>, from: Client) -> Option<(TlsStream<S>, Peer, Protocol)> {
    let session = stream.get_ref().1;
    let protocol = if session.alpn_protocol() == Some(b"h2") { Protocol::Http2 } else { Protocol::Http1 };
    let certificate = match session.peer_certificates().and_then(<[_]>::first) {
        Some(shown) => Some(Arc::new(ClientCertificate::of(shown)?)),
        None => None,
    };
    let peer = Peer { is_secure: true, certificate, ..from.peer() };
    Some((stream, peer, protocol))
}

/// For those that connect by a unix socket: this machine.
pub(super) fn of_unix() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}
