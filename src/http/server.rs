//! Listeners, limits and drain.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream as StdStream};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::body::Body;
use super::held::Held;
use super::limits::Limits;
use super::listen::Listen;
use super::shards::Shards;
use super::socket::watch_over;
use super::usage::{Place, Usage};
use super::wire::{Fault, Interim, Line, Stream};
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
const FIRST_REQUEST: Duration = Duration::from_millis(200);

/// `[server]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// How long SIGTERM waits for attempts.
    pub drain_timeout: Duration,
    /// What clients may take.
    pub limits: Limits,
}

/// What answers, and what clients may take of it. Replaced as a whole when the configuration is loaded again: a request
/// is answered by what is current when its head has come, and a connection keeps the limits that it began with.
pub struct Serving<H> {
    /// Answers requests.
    pub handler: Arc<H>,
    /// What clients may take.
    pub limits: Limits,
    /// What they take, which goes on when the others are replaced.
    pub usage: Arc<Usage>,
}

/// What serves at the moment.
pub type Current<H> = Arc<ArcSwap<Serving<H>>>;

impl<H> Serving<H> {
    /// To begin with.
    #[must_use]
    pub fn current(handler: Arc<H>, limits: Limits, usage: Arc<Usage>) -> Current<H> {
        Arc::new(ArcSwap::from_pointee(Self { handler, limits, usage }))
    }

    /// To go on with.
    pub fn replace(current: &Current<H>, handler: Arc<H>, limits: Limits) {
        let usage = Arc::clone(&current.load().usage);
        usage.allow(&limits);
        current.store(Arc::new(Self { handler, limits, usage }));
    }
}

/// Answers requests.
pub trait Handler: Send + Sync + 'static {
    /// Answers one request of a client at `peer`. Dropped when the client goes away.
    fn handle(self: Arc<Self>, request: Request<Incoming>, peer: Peer) -> impl Future<Output = Response<Body>> + Send;

    /// Answers what is no request.
    fn refuse(&self, fault: Fault) -> Response<Body>;
}

/// A client, as its connection shows it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address.
    pub ip: IpAddr,
    /// The same, for a header.
    pub address: HeaderValue,
    /// The way of interim answers to it, for the request at hand, where it understands them.
    pub interim: Option<Interim>,
}

impl Peer {
    /// The client at this address.
    #[must_use]
    pub fn new(socket: SocketAddr) -> Self {
        let ip = socket.ip().to_canonical();
        // An address is nothing but visible ASCII.
        let address = HeaderValue::from_str(&ip.to_string()).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self { ip, address, interim: None }
    }
}

/// Serves a listener until `stop` turns true; then takes no more connections, lets each finish the exchange that it is
/// in, and returns when all have ended.
pub async fn serve<H: Handler>(
    listener: TcpListener,
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
                Ok((stream, peer)) => {
                    let usage = Arc::clone(&current.load().usage);
                    match usage.connection(peer.ip()) {
                        Ok(place) => match watch_over(&stream).and_then(|()| stream.into_std()) {
                            Ok(stream) => {
                                let connection = adopted(stream, place, peer, Arc::clone(&current), stop.clone());
                                shards.spawn(&mut connections, connection);
                            }
                            Err(error) => tracing::debug!(%error, "a connection was lost at once"),
                        },
                        Err(why) => {
                            if let Some(telling) = usage.refusals.tell(stream, why) {
                                connections.spawn(telling);
                            }
                        }
                    }
                }
                Err(error) => pause_after(&error, &failures).await,
            },
        }
    }
    // Whoever has connected by now is served: the system would reset them.
    if let Ok(listener) = listener.into_std() {
        for _ in 0..BACKLOG {
            let Ok((stream, peer)) = listener.accept() else { break };
            let place = current.load().usage.connection(peer.ip());
            if let Ok(place) = place
                && stream.set_nonblocking(true).and_then(|()| watch_over(&stream)).is_ok()
            {
                shards.spawn(&mut connections, adopted(stream, place, peer, Arc::clone(&current), stop.clone()));
            }
        }
    }
    while connections.join_next().await.is_some() {}
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
    stream: StdStream,
    place: Place,
    peer: SocketAddr,
    current: Current<H>,
    stop: watch::Receiver<bool>,
) {
    match TcpStream::from_std(stream) {
        Ok(stream) => connection(Held::new(stream, place), peer, current, stop).await,
        Err(error) => tracing::warn!(%error, "a connection could not be served"),
    }
}

/// Serves one connection of a client at `peer`, until it ends or, between two exchanges, `stop` turns true.
pub async fn connection<S, H>(stream: S, peer: SocketAddr, current: Current<H>, mut stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let peer = Peer::new(peer);
    let (limits, usage) = {
        let current = current.load();
        (current.limits.clone(), Arc::clone(&current.usage))
    };
    // A head that is under way is waited for by the stream; a silent connection by hyper.
    let largest_buffer = LARGEST_BUFFER.max(limits.max_header_size + SPARE);
    let (silence, most_headers) = (limits.idle_timeout.max(limits.header_timeout), limits.max_headers);
    let line = Line::new();
    let stream = Stream::new(stream, limits, Arc::clone(&usage), Arc::clone(&line));
    let answering = Arc::clone(&line);
    let service = service_fn(move |request: Request<Incoming>| {
        let (handler, line, mut peer) = (Arc::clone(&current.load().handler), Arc::clone(&answering), peer.clone());
        let (number, begun) = line.begin();
        async move {
            let mut response = match begun {
                Ok(interim) => {
                    peer.interim = Some(interim).filter(|_| request.version() == Version::HTTP_11);
                    handler.handle(request, peer).await
                }
                Err(fault) => handler.refuse(fault),
            };
            if !line.answer(number, response.status() == StatusCode::SWITCHING_PROTOCOLS) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = http1::Builder::new();
    if most_headers > HYPERS_HEADERS {
        builder.max_headers(most_headers);
    }
    {
        let connection = builder
            .timer(TokioTimer::new())
            .header_read_timeout(silence)
            // An answer is the upstream's: a date that it does not have is not made up.
            .auto_date_header(false)
            .max_buf_size(largest_buffer)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = stopped(&mut stop) => {
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
            if error.is_timeout() {
                usage.exceeded(Limit::IdleTimeout);
            }
            tracing::debug!(%error, "a client connection ended badly");
        }
    }
    let is_stopping = *stop.borrow();
    line.linger(is_stopping).await;
}

#[cfg(test)]
mod tests;
