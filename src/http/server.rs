//! Listeners, limits and drain.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::BytesMut;
use http::header::CONNECTION;
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::body::Body;
use super::door::{Carrier, Door, enter};
use super::http2;
use super::inbound::Inbound;
use super::limits::Limits;
use super::listen::{Accepted, Listen, Socket, Watched};
use super::opening::{self, Nothing, Opening, Protocol};
use super::shards::Shards;
use super::share::Share;
use super::usage::{Place, Usage};
use super::wire::{Begun, Fault, Interim, Line, Stream};
use crate::idempotency::scope::ClientCertificate;
use crate::telemetry::limits::Limit;
use crate::telemetry::seldom::Seldom;

/// So many header lines hyper reads without being told to.
const HYPERS_HEADERS: usize = 100;

/// How many bytes of a client's messages hyper reads ahead, and about as many of the answers it holds, where no head is
/// larger.
const LARGEST_BUFFER: usize = 64 << 10;

/// What a head needs beside itself, in bytes.
const SPARE: usize = 8 << 10;

/// How many connections are taken from the queue of a listener when it ends.
const BACKLOG: usize = 4096;

/// How long to wait after the listener failed, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long the first request of a connection may take to come when the process is told to end.
pub(super) const FIRST_REQUEST: Duration = Duration::from_millis(200);

/// `[server]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// How long SIGTERM waits for attempts.
    pub drain_timeout: Duration,
    /// What clients may take.
    pub limits: Limits,
    /// What is asked of connections before their first request.
    pub door: Door,
    /// The rights to each unix socket that is bound: who may connect.
    pub socket_mode: u32,
}

/// What answers, and what clients may take of it. Replaced as a whole when the configuration is loaded again: a request
/// is answered by what is current when its head has come, and a connection keeps the limits that it began with.
pub struct Serving<H> {
    /// Answers requests.
    pub handler: Arc<H>,
    /// What clients may take.
    pub limits: Limits,
    /// What is asked of connections before their first request.
    pub door: Arc<Door>,
    /// What they take, which goes on when the others are replaced.
    pub usage: Arc<Usage>,
}

/// What serves at the moment.
pub type Current<H> = Arc<ArcSwap<Serving<H>>>;

impl<H> Serving<H> {
    /// To begin with.
    #[must_use]
    pub fn current(handler: Arc<H>, limits: Limits, door: Door, usage: Arc<Usage>) -> Current<H> {
        Arc::new(ArcSwap::from_pointee(Self { handler, limits, door: Arc::new(door), usage }))
    }

    /// To go on with.
    pub fn replace(current: &Current<H>, handler: Arc<H>, limits: Limits, door: Door) {
        let usage = Arc::clone(&current.load().usage);
        usage.allow(&limits);
        current.store(Arc::new(Self { handler, limits, door: Arc::new(door), usage }));
    }
}

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request of a client at `peer`. Dropped when the client goes away.
    fn handle(self: Arc<Self>, request: Request<Inbound>, peer: Peer) -> impl Future<Output = Response<Body>> + Send;

    /// Answers what is no request; with its `head`, where that could be read.
    fn refuse(&self, fault: Fault, head: Option<&Parts>) -> Response<Body>;
}

/// A client, as its connection shows it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub ip: IpAddr,
    /// The same, for a header.
    pub address: HeaderValue,
    /// Whether what it says of where requests come from may count, if it is a trusted proxy.
    pub is_believed: bool,
    /// Whether what it says is encrypted on its way here.
    pub is_secure: bool,
    /// What it proved who it is with, if that was asked for.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// The way of interim answers to it, for the request at hand, where it understands them.
    pub interim: Option<Interim>,
    /// The memory that the bodies of its connection may fill, where many requests share the connection.
    pub share: Option<Arc<Share>>,
}

impl Peer {
    /// The client at this address.
    #[must_use]
    pub fn new(socket: SocketAddr) -> Self {
        let ip = socket.ip().to_canonical();
        // An address is nothing but visible ASCII.
        let address = HeaderValue::from_str(&ip.to_string()).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self { ip, address, is_believed: true, is_secure: false, certificate: None, interim: None, share: None }
    }
}

/// Serves a listener until `stop` turns true; then takes no more connections, lets each finish the exchange that it is
/// in, and returns when all have ended.
pub async fn serve<H: Handler>(
    listener: Socket,
    shards: Arc<Shards>,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let failures = Seldom::default();
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            // Reaps what has ended, so that the set does not grow.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((client, peer)) => {
                    match place(&current, peer.ip()) {
                        Ok(place) => match client.watched() {
                            Ok(client) => {
                                let connection = adopted((client, peer), place, Arc::clone(&current), stop.clone());
                                shards.spawn(&mut connections, connection);
                            }
                            Err(error) => tracing::debug!(%error, "a connection was lost at once"),
                        },
                        Err(why) => refuse(client, why, &current, &mut connections),
                    }
                }
                Err(error) => pause_after(&error, &failures).await,
            },
        }
    }
    // Whoever has connected by now is served: the system would reset them.
    if let Ok(listener) = listener.into_last() {
        for _ in 0..BACKLOG {
            let Ok((client, peer)) = listener.accept() else { break };
            let place = place(&current, peer.ip());
            if let (Ok(place), Ok(client)) = (place, client.watched()) {
                shards.spawn(&mut connections, adopted((client, peer), place, Arc::clone(&current), stop.clone()));
            }
        }
    }
    while connections.join_next().await.is_some() {}
}

/// A place for who has connected from this address.
fn place<H>(current: &Current<H>, ip: IpAddr) -> Result<Place, Limit> {
    let serving = current.load();
    if serving.door.is_proxy(ip) { serving.usage.proxied() } else { serving.usage.connection(ip) }
}

/// Tells a client that there is no place for it, if it understands what it is told.
fn refuse<H>(client: Accepted, why: Limit, current: &Current<H>, connections: &mut JoinSet<()>) {
    let serving = current.load();
    let refusals = &serving.usage.refusals;
    match client {
        // Who is to encrypt would take it for nonsense.
        Accepted::Tcp(stream) if serving.door.tls.is_none() => {
            refusals.tell(stream, why).map(|telling| connections.spawn(telling));
        }
        Accepted::Tcp(_) => {}
        Accepted::Unix(stream) => {
            refusals.tell(stream, why).map(|telling| connections.spawn(telling));
        }
    }
}

/// Returns when `stop` is true, or can never turn true any more.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which ends things as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn pause_after(error: &io::Error, failures: &Seldom) {
    // A client that went away before it was accepted is no reason to pause.
    if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        if let Some(others) = failures.due() {
            tracing::warn!(%error, others, "accepting a connection failed");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Serves a connection on the thread that this runs on.
async fn adopted<H: Handler>(
    (client, peer): (Watched, SocketAddr),
    place: Place,
    current: Current<H>,
    stop: watch::Receiver<bool>,
) {
    let lost = match client {
        Watched::Tcp(stream) => match TcpStream::from_std(stream) {
            Ok(stream) => return enter(stream, (Carrier::Tcp, peer), place, current, stop).await,
            Err(error) => error,
        },
        Watched::Unix(stream) => match UnixStream::from_std(stream) {
            Ok(stream) => return enter(stream, (Carrier::Unix, peer), place, current, stop).await,
            Err(error) => error,
        },
    };
    tracing::warn!(error = %lost, "a connection could not be served");
}

/// Serves one connection of a client at `peer`, until it ends or, between two exchanges, `stop` turns true.
pub async fn connection<S, H>(stream: S, peer: SocketAddr, current: Current<H>, stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let beginning = Beginning { read: BytesMut::new(), since: Instant::now(), protocol: None };
    begin(stream, beginning, Peer::new(peer), current, stop).await;
}

/// What is known of a connection before its first request.
pub(super) struct Beginning {
    /// What was read of it.
    pub(super) read: BytesMut,
    /// Since when it is there.
    pub(super) since: Instant,
    /// What both sides have agreed on, if they have.
    pub(super) protocol: Option<Protocol>,
}

/// Serves a connection from its first request on.
pub(super) async fn begin<S, H>(
    mut stream: S,
    Beginning { read, since, protocol }: Beginning,
    peer: Peer,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let (limits, usage) = {
        let current = current.load();
        (current.limits.clone(), Arc::clone(&current.usage))
    };
    if protocol == Some(Protocol::Http1) {
        return http1(stream, (read, since), peer, current, (limits, usage), stop).await;
    }
    let opening = {
        let mut opening = pin!(opening::open(&mut stream, read, since + limits.header_timeout));
        match until_stopped(opening.as_mut(), &mut stop).await {
            Some(opening) => opening,
            // Who has just connected is on the way with a request.
            None => timeout(FIRST_REQUEST, opening).await.unwrap_or(Err(Nothing::Left)),
        }
    };
    match opening {
        Ok(Opening { protocol: Protocol::Http2, read }) => {
            // In a box: connections of HTTP/1.1 are not to have the room for it.
            Box::pin(http2::serve(stream, read, peer, current, (limits, usage), stop)).await;
        }
        // It agreed on HTTP/2, and speaks something else.
        Ok(_) if protocol.is_some() => {}
        Ok(Opening { protocol: Protocol::Http1, read }) => {
            http1(stream, (read, since), peer, current, (limits, usage), stop).await;
        }
        Err(Nothing::Silent) => usage.exceeded(Limit::HeaderTimeout),
        Err(Nothing::Left) => {}
    }
}

/// Serves a connection of HTTP/1.1, of which this was read since then.
async fn http1<S, H>(
    stream: S,
    (read, since): (BytesMut, Instant),
    peer: Peer,
    current: Current<H>,
    (limits, usage): (Limits, Arc<Usage>),
    mut stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let (largest_buffer, most_headers) = (LARGEST_BUFFER.max(limits.max_header_size + SPARE), limits.max_headers);
    let line = Line::new();
    let stream = Stream::new(stream, (read, since), limits, usage, Arc::clone(&line));
    let answering = Arc::clone(&line);
    let service = service_fn(move |request: Request<Incoming>| {
        let (handler, line, mut peer) = (Arc::clone(&current.load().handler), Arc::clone(&answering), peer.clone());
        let Begun { number, request: begun, exchange } = line.begin();
        async move {
            let mut response = match begun {
                Ok(interim) => {
                    peer.interim = Some(interim).filter(|_| request.version() == Version::HTTP_11);
                    handler.handle(request.map(Inbound::from), peer).await
                }
                Err(fault) => handler.refuse(fault, None),
            };
            if !line.answer(number, response.status() == StatusCode::SWITCHING_PROTOCOLS) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| body.of_exchange(exchange)))
        }
    });
    let mut builder = http1::Builder::new();
    if most_headers > HYPERS_HEADERS {
        builder.max_headers(most_headers);
    }
    {
        let connection = builder
            // The stream waits for a client no longer than it may.
            .header_read_timeout(None)
            // An answer is the upstream's: a date that it does not have is not made up.
            .auto_date_header(false)
            .max_buf_size(largest_buffer)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = pin!(connection);
        let ended = match until_stopped(connection.as_mut(), &mut stop).await {
            Some(ended) => ended,
            None => {
                // Who has just connected is on the way with a request, and hyper would close on him.
                let first = if line.has_begun() { Duration::ZERO } else { FIRST_REQUEST };
                match timeout(first, connection.as_mut()).await {
                    Ok(ended) => ended,
                    Err(_) => {
                        connection.as_mut().graceful_shutdown();
                        connection.await
                    }
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a client connection ended badly");
        }
    }
    let is_stopping = *stop.borrow();
    line.linger(is_stopping).await;
}

/// What `connection` comes to, if it does before `stop` turns true.
pub(super) async fn until_stopped<F: Future>(
    mut connection: Pin<&mut F>,
    stop: &mut watch::Receiver<bool>,
) -> Option<F::Output> {
    let news = stop.clone();
    let mut stopped = pin!(stopped(stop));
    let mut waker: Option<Waker> = None;
    poll_fn(|cx| {
        if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
            return Poll::Ready(Some(ended));
        }
        // Each poll of what waits takes a lock that all connections share: once is enough while there is no news.
        if waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) && matches!(news.has_changed(), Ok(false)) {
            return Poll::Pending;
        }
        waker = Some(cx.waker().clone());
        stopped.as_mut().poll(cx).map(|()| None)
    })
    .await
}

#[cfg(test)]
mod tests;
