//! Connections to an upstream, and the outcome of a failed send.
//!
//! A request is sent at most once. Where a failure provably happened before the first byte, the error says so
//! ([`Error::NotSent`]); everything else is [`Error::Unknown`].

mod connection;
mod endpoint;
mod error;
mod frame_filter;
mod http2;
mod http2_pool;
mod io;
mod pool;
mod remote_state;
mod response_head;
mod send_context;
mod settings;
mod stream_slots;
#[cfg(test)]
mod tests;
mod tls;
mod tls_records;
mod turn_queue;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Request, Response, Version};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};

pub use self::connection::PooledConnection;
use self::connection::{Http1Connection, Owner, Purpose, SendError, Transport, has_unambiguous_end};
use self::endpoint::{Connected, ConnectedIo, Endpoint, Endpoints};
pub use self::error::{Error, NotSent};
use self::error::{broke_off, not_sent};
use self::http2::{Http2Connection, ReservedStream};
use self::http2_pool::Http2Pool;
use self::io::{SocketState, UpstreamIo};
use self::pool::{Checkout, IdleConnection, PoolLimit, PoolPermit, Sweepers, Turn};
pub use self::response_head::HeadFault;
pub use self::send_context::SendContext;
pub use self::settings::{Protocol, Settings, Sharing, Tls, UpstreamAddress, can_be_named};
use self::tls::TlsConnectors;
use self::turn_queue::TurnQueue;
use super::body::Body;
use super::headers::has_unambiguous_framing;
use super::shards;
use super::socket::GuardedIo;
use super::usage::Usage;
use crate::telemetry::log_throttle::LogThrottle;

/// How long a connection may have been idle to carry an unprotected request.
const UNPROTECTED_IDLE: Duration = Duration::from_secs(30);

/// How long a connection may have been idle to carry a protected attempt: an upstream that closes idle connections
/// would do so at the moment of sending, and the outcome would be unknown.
const PROTECTED_IDLE: Duration = Duration::from_secs(1);

/// How often an unprotected request is retried that the upstream refused unprocessed.
const MAX_RETRIES: u32 = 3;

/// Which idle connections may carry a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Connections that were idle for less than a second.
    Protected,
    /// Any that look open.
    Unprotected,
    /// None: an upgrade takes the connection over, which HTTP/1.1 alone has.
    Never,
}

impl Reuse {
    fn longest_idle(self) -> Duration {
        match self {
            Self::Protected => PROTECTED_IDLE,
            Self::Unprotected => UNPROTECTED_IDLE,
            Self::Never => Duration::ZERO,
        }
    }
}

/// A bidirectional byte stream.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// Opens streams to an upstream by other means than TCP: for simulations, and for HTTP/1.1.
#[async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Opens one. An error means that nothing was sent.
    async fn dial(&self) -> std::io::Result<Box<dyn Io>>;
}

/// An upstream and its idle connections.
#[derive(Clone)]
pub struct Upstream(Arc<Inner>);

struct Inner {
    settings: Settings,
    dial: Option<Arc<dyn Dial>>,
    endpoints: Endpoints,
    usage: Arc<Usage>,
    /// Limits the lines on requests that could not be sent.
    unreachable_log: LogThrottle,
    /// Limits the lines on exchanges that broke off before their clients had a part of the answer.
    broken_log: LogThrottle,
    /// Limits the lines on answers that it broke off.
    broken_answers: LogThrottle,
    /// The limit on its connections, idle ones included.
    pool_limit: Arc<PoolLimit>,
    /// How many requests it has, and those that wait for their turn.
    turns: Arc<TurnQueue>,
    /// Idle connections by shard: a connection lives on the thread that opened it.
    idle: Box<[Mutex<Vec<IdleConnection>>]>,
    sweepers: Sweepers,
    /// Its HTTP/2 connections.
    http2_pool: Option<Http2Pool>,
}

impl Upstream {
    /// An upstream without connections yet.
    #[must_use]
    pub fn new(settings: Settings, usage: Arc<Usage>) -> Self {
        Self::with(settings, usage, None)
    }

    /// An upstream whose connections are opened by `dial`; the host and port of `settings` only name it.
    #[must_use]
    pub fn through(settings: Settings, usage: Arc<Usage>, dial: Arc<dyn Dial>) -> Self {
        Self::with(settings, usage, Some(dial))
    }

    fn with(settings: Settings, usage: Arc<Usage>, dial: Option<Arc<dyn Dial>>) -> Self {
        let pool_limit = PoolLimit::new(settings.max_connections);
        let turns = TurnQueue::new(usage.of_upstream(settings.max_connections));
        let idle = (0..shards::count()).map(|_| Mutex::default()).collect();
        let http2_pool = Http2Pool::of(&settings);
        let secure = settings.tls.as_ref().map(|tls| TlsConnectors::new(tls, settings.protocol));
        let endpoints = Endpoints::new(settings.places.clone(), secure);
        Self(Arc::new(Inner {
            settings,
            dial,
            endpoints,
            usage,
            unreachable_log: LogThrottle::default(),
            broken_log: LogThrottle::default(),
            broken_answers: LogThrottle::default(),
            pool_limit,
            turns,
            idle,
            sweepers: Sweepers::new(),
            http2_pool,
        }))
    }

    /// How it was set up.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// Its host and port, for a request that names no host.
    #[must_use]
    pub fn authority(&self) -> String {
        self.0.settings.authority()
    }

    /// Its addresses, for messages.
    #[must_use]
    pub fn places(&self) -> String {
        self.0.settings.places.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Limits the lines on requests that could not be sent.
    pub(crate) fn unreachable_log(&self) -> &LogThrottle {
        &self.0.unreachable_log
    }

    /// Limits the lines on exchanges that broke off before their clients had a part of the answer.
    pub(crate) fn broken_log(&self) -> &LogThrottle {
        &self.0.broken_log
    }

    /// Whether an upgrade can be asked of it: HTTP/2 has none.
    #[must_use]
    pub fn takes_upgrades(&self) -> bool {
        self.0.settings.protocol != Protocol::H2
    }

    /// Sends a request once and returns the head of its response. A caller that cancels the future learns from
    /// `context` whether a byte may have been sent.
    ///
    /// If a connection turns out to be closed before the request was written, another one is used: hyper returned the
    /// request, and nothing was sent. An unprotected request without a body is also retried where the upstream refused
    /// it unprocessed, as it does for requests that cross with its GOAWAY.
    pub async fn send(
        &self,
        mut request: Request<Body>,
        reuse: Reuse,
        context: &SendContext<'_>,
    ) -> Result<(Response<Incoming>, PooledConnection), Error> {
        let mut tries = 0;
        let method = request.method().clone();
        let sharing = if context.is_alone { Sharing::Never } else { self.0.settings.reuse };
        let owner = Owner::of(sharing, context.scope.as_ref(), request.headers());
        let purpose = Purpose { reuse, owner };
        let turn = match context.party {
            Some(party) => self.take_turn(party).await.map_err(Error::NotSent)?,
            None => None,
        };
        loop {
            let (mut transport, reused) = match self.take_open(purpose) {
                Some(transport) => (transport, true),
                // Boxed, because most requests do not need it.
                None => Box::pin(self.connect(purpose)).await.map_err(Error::NotSent)?,
            };
            context.set_begun(true);
            let copy = if reuse == Reuse::Unprotected { transport.copy_of(&request) } else { None };
            let answered = match &mut transport {
                Transport::Http1(connection) => connection.send(request, context.interim.clone()).await,
                // Boxed, because it is larger than the other, and its size would be that of both.
                Transport::Http2(stream) => Box::pin(stream.send(request)).await,
            };
            match answered {
                Ok(response) => return self.answered(&method, response, transport, turn),
                Err(SendError::Unsent(whole, _)) if reused => request = *whole,
                Err(SendError::Unsent(_, why) | SendError::Unfit(why)) => return Err(Error::NotSent(why)),
                Err(SendError::FirstWrite(error)) => return Err(Error::NotSent(not_sent(error))),
                Err(SendError::Unprocessed(error)) => match copy.filter(|_| tries < MAX_RETRIES) {
                    Some(copy) => (request, tries) = (copy, tries + 1),
                    None => return Err(Error::NotSent(NotSent::Refused(error))),
                },
                Err(SendError::ClientBody(error)) => return Err(Error::ClientBody(error.into())),
                Err(SendError::BrokenOff(error)) => {
                    let error = broke_off(error);
                    if let (Error::Unknown(_), Some(endpoint)) = (&error, transport.endpoint()) {
                        endpoint.broke_off();
                    }
                    return Err(error);
                }
            }
            context.set_begun(false);
        }
    }

    /// An open connection with capacity.
    fn take_open(&self, purpose: Purpose) -> Option<Transport> {
        if let Some(http2_pool) = &self.0.http2_pool
            && let Some(stream) = http2_pool.reserve(purpose)
        {
            return Some(Transport::Http2(stream));
        }
        self.take_idle(shards::index(), purpose).map(Transport::Http1)
    }

    /// A new connection, or one that became free while this waited; the flag says whether it is reused.
    async fn connect(&self, purpose: Purpose) -> Result<(Transport, bool), NotSent> {
        let Inner { settings, pool_limit, http2_pool, .. } = &*self.0;
        let Some(http2_pool) =
            http2_pool.as_ref().filter(|http2_pool| http2_pool.is_http2_likely() && purpose.reuse != Reuse::Never)
        else {
            let permit = match pool_limit.try_acquire() {
                Some(permit) => permit,
                None => {
                    // A connection that this request has no use for may hold the last one.
                    if let Some(http2_pool) = http2_pool {
                        http2_pool.evict_unused(purpose);
                    }
                    match self.wait_for_permit(purpose).await? {
                        Checkout::Permit(permit) => permit,
                        Checkout::Connection(connection) => return Ok((Transport::Http1(*connection), true)),
                    }
                }
            };
            return Ok((self.open(permit, purpose).await?, false));
        };
        let mut need = None;
        // Only a connection for all callers is worth waiting for while another request opens it.
        if purpose.owner == Owner::AnyCaller {
            let take = || self.take_open(purpose);
            match http2_pool.wait_for_opening(purpose.reuse, settings.connect_timeout, take).await? {
                Ok(transport) => return Ok((transport, true)),
                Err(begun) => need = begun,
            }
        }
        let permit = match pool_limit.try_acquire() {
            Some(permit) => permit,
            None => {
                // What frees one is not an opening.
                drop(need.take());
                match self.wait_for_permit_or_stream(http2_pool, purpose).await? {
                    Ok(Checkout::Permit(permit)) => permit,
                    Ok(Checkout::Connection(connection)) => return Ok((Transport::Http1(*connection), true)),
                    Err(stream) => return Ok((Transport::Http2(stream), true)),
                }
            }
        };
        let opened = self.open(permit, purpose).await;
        drop(need);
        Ok((opened?, false))
    }

    /// Opens a connection, which owns its permit until it closes. An error means that nothing was sent.
    async fn open(&self, permit: PoolPermit, purpose: Purpose) -> Result<Transport, NotSent> {
        let Inner { settings, dial, endpoints, .. } = &*self.0;
        let limit = settings.connect_timeout;
        let opening = async {
            if let Some(dial) = dial {
                let socket = Arc::new(SocketState::default());
                let stream = UpstreamIo::new(dial.dial().await.map_err(NotSent::Connect)?, Arc::clone(&socket));
                return self.begin(GuardedIo::new(stream, permit), socket, None, false, purpose).await;
            }
            let Connected { stream, socket, endpoint, chose_h2 } =
                endpoints.open(purpose.reuse != Reuse::Never).await?;
            match stream {
                ConnectedIo::Tcp(stream) => {
                    self.begin(GuardedIo::new(stream, permit), socket, endpoint, chose_h2, purpose).await
                }
                ConnectedIo::Other(stream) => {
                    self.begin(GuardedIo::new(stream, permit), socket, endpoint, chose_h2, purpose).await
                }
            }
        };
        timeout(limit, opening).await.unwrap_or(Err(NotSent::ConnectTimeout(limit)))
    }

    async fn begin<T: Io>(
        &self,
        stream: T,
        socket: Arc<SocketState>,
        endpoint: Option<Arc<Endpoint>>,
        chose_h2: bool,
        purpose: Purpose,
    ) -> Result<Transport, NotSent> {
        let Inner { settings, http2_pool, .. } = &*self.0;
        let is_h2 = chose_h2 || settings.protocol == Protocol::H2;
        let http2_pool = http2_pool.as_ref().filter(|_| purpose.reuse != Reuse::Never);
        let http2_pool = http2_pool.inspect(|http2_pool| http2_pool.observe_protocol(is_h2));
        let Some(http2_pool) = http2_pool.filter(|_| is_h2) else {
            return Http1Connection::handshake(stream, socket, endpoint, purpose.owner, settings.max_headers)
                .await
                .map(Transport::Http1);
        };
        let purpose_and_freed = (purpose, Arc::clone(&http2_pool.freed));
        let probe = endpoint.as_deref().map(Endpoint::probe);
        let connection =
            Http2Connection::handshake(stream, socket, endpoint.clone(), purpose_and_freed, settings).await;
        let connection = match probe {
            Some(probe) => probe.finish(connection)?,
            None => connection?,
        };
        // A connection that accepts no stream at all is unusable.
        let stream = http2_pool.insert(connection);
        self.ensure_sweeper();
        stream.map(Transport::Http2).ok_or(NotSent::Ended)
    }

    /// Waits until a connection may be opened, or a stream on one is free.
    async fn wait_for_permit_or_stream(
        &self,
        http2_pool: &Http2Pool,
        purpose: Purpose,
    ) -> Result<Result<Checkout, ReservedStream>, NotSent> {
        let mut turn = std::pin::pin!(self.wait_for_permit(purpose));
        loop {
            // Registered before the check, so that no notification is missed.
            let freed = http2_pool.freed.notified();
            http2_pool.evict_unused(purpose);
            if let Some(stream) = http2_pool.reserve_any(purpose) {
                return Ok(Err(stream));
            }
            tokio::select! {
                biased;
                granted = turn.as_mut() => return granted.map(Ok),
                () = freed => {}
            }
        }
    }

    fn answered(
        &self,
        method: &Method,
        response: Response<Incoming>,
        transport: Transport,
        turn: Option<Turn>,
    ) -> Result<(Response<Incoming>, PooledConnection), Error> {
        let headers = response.headers();
        if !has_unambiguous_framing(headers) {
            return Err(Error::Framing);
        }
        let max_headers = self.0.settings.max_headers;
        if headers.len() > max_headers {
            return Err(Error::Head(HeadFault::TooManyLines(max_headers)));
        }
        if let Some(endpoint) = transport.endpoint() {
            endpoint.answered();
        }
        // hyper continues in the version of the last response, and HTTP/1.0 has no chunked coding for request bodies.
        let reusable =
            response.version() == Version::HTTP_11 && has_unambiguous_end(method, response.status(), headers);
        let pooled = PooledConnection { transport, upstream: self.clone(), reusable, answered: Instant::now(), turn };
        Ok((response, pooled))
    }
}
