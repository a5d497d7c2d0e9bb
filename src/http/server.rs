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
use http::header::{CONNECTION, CONTENT_LENGTH};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::body::{Body as _, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::accept::{AcceptSettings, DetectError, Detected, HttpVersion, SocketKind, accept, detect};
use super::answer::may_have_content;
use super::body::Body;
use super::connection_memory::ConnectionMemory;
use super::fault::Fault;
use super::http1::{ClientIo, ConnectionState, Interim, RefusedRequest, StartedExchange};
use super::http2;
use super::limits::{HYPER_MAX_HEADERS, Limits};
use super::request_body::RequestBody;
use super::shards::Shards;
use super::socket::{Accepted, ClientStream, ConfiguredStream, Listen, Listener};
use super::usage::{ConnectionPermit, Usage};
use crate::idempotency::scope::ClientCertificate;
use crate::telemetry::limits::Limit;
use crate::telemetry::log_throttle::LogThrottle;

/// The size of hyper's read buffer in bytes, and about that of its write buffer, unless heads may be larger.
const MIN_READ_BUFFER: usize = 64 << 10;

/// Room in the buffer beside a head, in bytes.
const HEAD_OVERHEAD: usize = 8 << 10;

/// How many connections are taken from the queue of a listener when it ends.
const BACKLOG: usize = 4096;

/// How long to wait after the listener failed, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long the first request of a connection may take to arrive during shutdown.
pub(super) const FIRST_REQUEST_GRACE: Duration = Duration::from_millis(200);

/// `[server]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// How long requests are still accepted after SIGTERM, by a process that is not ready any more.
    pub shutdown_delay: Duration,
    /// How long SIGTERM waits for attempts.
    pub drain_timeout: Duration,
    /// The limits on clients.
    pub limits: Limits,
    /// The requirements on connections before their first request.
    pub accept: AcceptSettings,
    /// The file mode of each bound Unix socket.
    pub socket_mode: u32,
}

/// The handler and its limits. A reload replaces them as a whole: a request is answered by the handler that is current
/// when its head has arrived, and a connection keeps the limits that it started with.
pub struct ServerState<H> {
    /// Answers requests.
    pub handler: Arc<H>,
    /// The limits on clients.
    pub limits: Limits,
    /// The requirements on connections before their first request.
    pub accept: Arc<AcceptSettings>,
    /// Their current usage, which a reload keeps.
    pub usage: Arc<Usage>,
}

/// The current state.
pub type Current<H> = Arc<ArcSwap<ServerState<H>>>;

impl<H> ServerState<H> {
    /// The initial state.
    #[must_use]
    pub fn current(handler: Arc<H>, limits: Limits, accept: AcceptSettings, usage: Arc<Usage>) -> Current<H> {
        Arc::new(ArcSwap::from_pointee(Self { handler, limits, accept: Arc::new(accept), usage }))
    }

    /// Replaces the state.
    pub fn replace(current: &Current<H>, handler: Arc<H>, limits: Limits, accept: AcceptSettings) {
        let usage = Arc::clone(&current.load().usage);
        usage.set_limits(&limits);
        current.store(Arc::new(Self { handler, limits, accept: Arc::new(accept), usage }));
    }
}

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request of a client at `peer`. Dropped when the client goes away.
    fn handle(
        self: Arc<Self>,
        request: Request<RequestBody>,
        peer: Peer,
    ) -> impl Future<Output = Response<Body>> + Send;

    /// Answers a malformed request of a client at `peer`.
    fn refuse(&self, fault: Fault, known: MalformedHead<'_>, peer: &Peer) -> Response<Body>;
}

/// What is known of a malformed request.
#[derive(Clone, Copy, Debug)]
pub enum MalformedHead<'a> {
    /// The lines of its head that came, each of which may be malformed.
    Raw(&'a [u8]),
    /// Its head.
    Head(&'a Parts),
}

/// The peer of a client connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub ip: IpAddr,
    /// Its address as a header value.
    pub header_value: HeaderValue,
    /// Whether its forwarding headers may be trusted, if it is a trusted proxy.
    pub may_be_trusted: bool,
    /// Whether its connection is encrypted.
    pub is_secure: bool,
    /// Its certificate, if one was requested and presented.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// Sends interim responses for the current request, if the client understands them.
    pub interim: Option<Interim>,
    /// The memory that the bodies of its connection may fill, where many requests share the connection.
    pub connection_memory: Option<Arc<ConnectionMemory>>,
}

impl Peer {
    /// The client at this address.
    #[must_use]
    pub fn new(socket: SocketAddr) -> Self {
        let ip = socket.ip().to_canonical();
        // An address is nothing but visible ASCII.
        let header_value =
            HeaderValue::from_str(&ip.to_string()).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self {
            ip,
            header_value,
            may_be_trusted: true,
            is_secure: false,
            certificate: None,
            interim: None,
            connection_memory: None,
        }
    }
}

/// Serves a listener until `stop` turns true; then takes no more connections, lets each finish the exchange that it is
/// in, and returns when all have ended.
pub async fn serve<H: Handler>(
    listener: Listener,
    shards: Arc<Shards>,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let failures = LogThrottle::default();
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            // Reaps what has ended, so that the set does not grow.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((client, peer)) => {
                    match acquire_permit(&current, peer.ip()) {
                        Ok(permit) => match client.configure() {
                            Ok(client) => {
                                let connection = serve_on_shard((client, peer), permit, Arc::clone(&current), stop.clone());
                                shards.spawn(&mut connections, connection);
                            }
                            Err(error) => tracing::debug!(%error, "an accepted connection failed"),
                        },
                        Err(why) => refuse(client, why, &current, &mut connections),
                    }
                }
                Err(error) => pause_after(&error, &failures).await,
            },
        }
    }
    // Connections that are already in the backlog are served: closing the listener would reset them.
    if let Ok(listener) = listener.into_backlog() {
        for _ in 0..BACKLOG {
            let Ok((client, peer)) = listener.accept() else { break };
            let permit = acquire_permit(&current, peer.ip());
            if let (Ok(permit), Ok(client)) = (permit, client.configure()) {
                shards.spawn(
                    &mut connections,
                    serve_on_shard((client, peer), permit, Arc::clone(&current), stop.clone()),
                );
            }
        }
    }
    while connections.join_next().await.is_some() {}
}

/// A permit for a connection from this address.
fn acquire_permit<H>(current: &Current<H>, ip: IpAddr) -> Result<ConnectionPermit, Limit> {
    let serving = current.load();
    if serving.accept.is_proxy(ip) { serving.usage.proxied_connection() } else { serving.usage.connection(ip) }
}

/// Answers a client that exceeds a connection limit, unless it expects TLS.
fn refuse<H>(client: Accepted, why: Limit, current: &Current<H>, connections: &mut JoinSet<()>) {
    let serving = current.load();
    let refusals = &serving.usage.refusals;
    match client {
        // A TLS client could not read the answer.
        Accepted::Tcp(stream) if serving.accept.tls.is_none() => {
            refusals.respond(stream, why).map(|responding| connections.spawn(responding));
        }
        Accepted::Tcp(_) => {}
        Accepted::Unix(stream) => {
            refusals.respond(stream, why).map(|responding| connections.spawn(responding));
        }
    }
}

/// Returns when `stop` is true, or can never turn true any more.
pub async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which ends things as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn pause_after(error: &io::Error, failures: &LogThrottle) {
    // A client that went away before it was accepted is no reason to pause.
    if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        if let Some(others) = failures.due() {
            tracing::warn!(%error, others, "accepting a connection failed");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Serves a connection on the thread that this runs on.
async fn serve_on_shard<H: Handler>(
    (client, peer): (ConfiguredStream, SocketAddr),
    permit: ConnectionPermit,
    current: Current<H>,
    stop: watch::Receiver<bool>,
) {
    let lost = match client {
        ConfiguredStream::Tcp(stream) => match TcpStream::from_std(stream) {
            Ok(stream) => return accept(stream, (SocketKind::Tcp, peer), permit, current, stop).await,
            Err(error) => error,
        },
        ConfiguredStream::Unix(stream) => match UnixStream::from_std(stream) {
            Ok(stream) => return accept(stream, (SocketKind::Unix, peer), permit, current, stop).await,
            Err(error) => error,
        },
    };
    tracing::warn!(error = %lost, "a connection could not be served");
}

/// Serves one connection of a client at `peer`, until it ends or, between two exchanges, `stop` turns true.
pub async fn connection<S, H>(stream: S, peer: SocketAddr, current: Current<H>, stop: watch::Receiver<bool>)
where
    S: ClientStream,
    H: Handler,
{
    let new = NewConnection { read: BytesMut::new(), since: Instant::now(), version: None };
    serve_connection(stream, new, Peer::new(peer), current, stop).await;
}

/// A connection before its first request.
pub(super) struct NewConnection {
    /// The bytes that were read from it.
    pub(super) read: BytesMut,
    /// When it was accepted.
    pub(super) since: Instant,
    /// The version that both sides have negotiated, if any.
    pub(super) version: Option<HttpVersion>,
}

/// Serves a connection from its first request on.
pub(super) async fn serve_connection<S, H>(
    mut stream: S,
    NewConnection { read, since, version }: NewConnection,
    peer: Peer,
    current: Current<H>,
    mut stop: watch::Receiver<bool>,
) where
    S: ClientStream,
    H: Handler,
{
    let (limits, usage) = {
        let current = current.load();
        (current.limits.clone(), Arc::clone(&current.usage))
    };
    if version == Some(HttpVersion::Http1) {
        return http1(stream, (read, since), peer, current, (limits, usage), stop).await;
    }
    let detected = {
        let mut detected = pin!(detect(&mut stream, read, since + limits.header_timeout));
        match until_stopped(detected.as_mut(), &mut stop).await {
            Some(detected) => detected,
            // A client that has just connected is about to send a request.
            None => timeout(FIRST_REQUEST_GRACE, detected).await.unwrap_or(Err(DetectError::Closed)),
        }
    };
    match detected {
        Ok(Detected { version: HttpVersion::Http2, read }) => {
            // Boxed, so that HTTP/1.1 connections do not carry its size.
            Box::pin(http2::serve(stream, read, peer, current, (limits, usage), stop)).await;
        }
        // The client negotiated HTTP/2 and sends something else.
        Ok(_) if version.is_some() => {}
        Ok(Detected { version: HttpVersion::Http1, read }) => {
            http1(stream, (read, since), peer, current, (limits, usage), stop).await;
        }
        Err(DetectError::TimedOut) => usage.exceeded(Limit::HeaderTimeout),
        Err(DetectError::Closed) => {}
    }
}

/// Serves an HTTP/1.1 connection. `read` was read from it since `since`.
async fn http1<S, H>(
    stream: S,
    (read, since): (BytesMut, Instant),
    peer: Peer,
    current: Current<H>,
    (limits, usage): (Limits, Arc<Usage>),
    mut stop: watch::Receiver<bool>,
) where
    S: ClientStream,
    H: Handler,
{
    let (largest_buffer, most_headers) =
        (MIN_READ_BUFFER.max(limits.max_header_size + HEAD_OVERHEAD), limits.max_headers);
    let state = ConnectionState::new();
    let stream = ClientIo::new(stream, (read, since), limits, usage, Arc::clone(&state));
    let answering = Arc::clone(&state);
    let service = service_fn(move |request: Request<Incoming>| {
        let (handler, state, mut peer) = (Arc::clone(&current.load().handler), Arc::clone(&answering), peer.clone());
        let StartedExchange { number, request: started, exchange } = state.start_exchange();
        async move {
            let (version, is_head) = (request.version(), request.method() == Method::HEAD);
            let mut response = match started {
                Ok(interim) => {
                    peer.interim = Some(interim).filter(|_| version == Version::HTTP_11);
                    handler.handle(request.map(RequestBody::from), peer).await
                }
                Err(RefusedRequest { fault, head }) => handler.refuse(fault, MalformedHead::Raw(&head), &peer),
            };
            // hyper would write one of its own.
            if response.status().canonical_reason().is_none() && response.extensions().get::<ReasonPhrase>().is_none() {
                response.extensions_mut().insert(ReasonPhrase::from_static(b""));
            }
            // The close of the connection is the end of the answer (RFC 9112, 6.3).
            let ends_by_close = version == Version::HTTP_10 && !is_head && has_open_end(&response);
            if ends_by_close {
                state.ends_by_close();
            }
            if !state.answer(number, response.status() == StatusCode::SWITCHING_PROTOCOLS) || ends_by_close {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                // To an answer of HTTP/1.1, hyper adds `keep-alive` for a client of HTTP/1.0 that asked for it.
                *response.version_mut() = version;
            }
            Ok::<_, Infallible>(response.map(|body| body.with_exchange_guard(exchange)))
        }
    });
    let mut builder = http1::Builder::new();
    if most_headers > HYPER_MAX_HEADERS {
        builder.max_headers(most_headers);
    }
    {
        let connection = builder
            // `ClientIo` holds the read timeouts.
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
                // A client that has just connected is about to send a request; hyper would close the connection.
                let first = if state.has_begun() { Duration::ZERO } else { FIRST_REQUEST_GRACE };
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
            tracing::debug!(%error, "a client connection failed");
        }
    }
    let is_stopping = *stop.borrow();
    state.linger(is_stopping).await;
}

/// Whether an answer has a body of which its head says no length, so that HTTP/1.0 has no other end for it than a close.
fn has_open_end(response: &Response<Body>) -> bool {
    may_have_content(response.status())
        && response.body().size_hint().exact().is_none()
        && !response.headers().contains_key(CONTENT_LENGTH)
}

/// The output of `connection`, unless `stop` turns true before.
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
        // Each poll of the stop signal takes a lock that all connections share: once is enough while the signal is
        // unchanged.
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
