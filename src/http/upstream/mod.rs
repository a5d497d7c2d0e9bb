//! Connections to an upstream, and what is known when sending over one fails.
//!
//! A request is sent at most once. Where a failure provably happened before the first byte, the error says so
//! ([`Error::NotSent`]); everything else is [`Error::Unknown`].

mod connection;
mod slots;
mod stream;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use http::{Request, Response, Version};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

pub use self::connection::Carrier;
use self::connection::{Connection, Refused};
use self::slots::{Grant, Slots};
use super::body::{self, Body};
use super::headers::framing_is_plain;
use super::shards;
use super::usage::Usage;
use crate::telemetry::limits::Limit;

/// Idle connections kept for each upstream, in equal parts on the threads that serve.
const MAX_IDLE: usize = 1024;

/// How long a connection may have been idle to carry an unprotected request.
const UNPROTECTED_IDLE: Duration = Duration::from_secs(30);

/// How long a connection may have been idle to carry a protected attempt: an upstream that closes idle connections
/// would do so at the moment of sending, and the outcome would be unknown.
const PROTECTED_IDLE: Duration = Duration::from_secs(1);

/// One of `[upstreams]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Its name.
    pub name: Arc<str>,
    /// Host to connect to: a name or an address.
    pub host: String,
    /// Port to connect to.
    pub port: u16,
    /// Longest time for a whole attempt.
    pub timeout: Duration,
    /// Longest time for a connection to open.
    pub connect_timeout: Duration,
    /// How many connections there may be to it.
    pub max_connections: u64,
    /// How long a client waits before it gets `still-running`.
    pub client_timeout: Duration,
}

/// Which idle connections may carry a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Those that were idle for less than a second.
    Protected,
    /// Any that look open.
    Unprotected,
    /// None: an upgrade takes the connection over.
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

/// Sending failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Provably nothing was sent.
    #[error("nothing was sent: {0}")]
    NotSent(#[source] NotSent),
    /// The client's own body broke off, so the request was never whole.
    #[error("the client's body broke off: {0}")]
    ClientBody(#[source] hyper::Error),
    /// Bytes may have been sent.
    #[error("the exchange broke off: {0}")]
    Unknown(#[source] hyper::Error),
    /// The answer leaves in doubt where it ends, or has a transfer coding that the gate does not understand (RFC 9112, 6).
    #[error("the answer leaves in doubt where it ends, or has a transfer coding other than chunked")]
    Framing,
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum NotSent {
    /// Its name did not resolve, or no address took the connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    /// No connection opened in time.
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    /// There are as many connections as there may be, and none became free in time.
    #[error("no connection became free within {0:?}")]
    NoneFree(Duration),
    /// The connection closed before the request was written to it.
    #[error("the connection closed first: {0}")]
    Closed(#[source] hyper::Error),
    /// The connection had closed before.
    #[error("the connection had closed")]
    Ended,
}

/// How far sending a request has come.
#[derive(Default)]
pub struct Sending(AtomicBool);

impl Sending {
    /// Whether the request was handed to a connection: from then on a byte of it may have left.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A stream of bytes both ways.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> Io for T {}

/// Opens streams to an upstream by other means than TCP: for simulations.
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
    usage: Arc<Usage>,
    /// All of its connections count, idle or not.
    slots: Arc<Slots>,
    /// For each of the threads that serve: a connection lives on the thread that opened it.
    idle: Box<[Mutex<Vec<Idle>>]>,
}

struct Idle {
    connection: Connection,
    since: Instant,
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
        let slots = Slots::new(settings.max_connections);
        let idle = (0..shards::count()).map(|_| Mutex::default()).collect();
        Self(Arc::new(Inner { settings, dial, usage, slots, idle }))
    }

    /// How it was set up.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// Its host and port, for a request that names no host.
    #[must_use]
    pub fn authority(&self) -> String {
        let Settings { host, port, .. } = &self.0.settings;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Sends a request, once, and returns the head of its answer. `sending` tells somebody who stops waiting whether
    /// anything had left.
    ///
    /// A connection that turns out closed before the request was written to it is passed over for another: the
    /// request was handed back whole, and nothing was sent.
    pub async fn send(
        &self,
        mut request: Request<Body>,
        reuse: Reuse,
        sending: &Sending,
    ) -> Result<(Response<Incoming>, Carrier), Error> {
        loop {
            let (mut connection, reused) = match self.take_idle(shards::index(), reuse) {
                Some(connection) => (connection, true),
                None => self.connect(reuse).await.map_err(Error::NotSent)?,
            };
            sending.begin();
            match connection.send(request).await {
                Ok(response) => return self.answered(response, connection),
                Err(Refused::Unsent(whole, _)) if reused => request = *whole,
                Err(Refused::Unsent(_, why)) => return Err(Error::NotSent(why)),
                Err(Refused::FirstWrite(error)) => return Err(Error::NotSent(NotSent::Closed(error))),
                Err(Refused::BrokenOff(error)) => return Err(broke_off(error)),
            }
        }
    }

    /// A connection that is new, or one that became free while it waited for its turn: then it is reused.
    async fn connect(&self, reuse: Reuse) -> Result<(Connection, bool), NotSent> {
        let Inner { settings, dial, slots, .. } = &*self.0;
        let slot = match slots.take() {
            Some(slot) => slot,
            None => match self.turn(reuse).await? {
                Grant::Slot(slot) => slot,
                Grant::Connection(connection) => return Ok((*connection, true)),
            },
        };
        Ok((Connection::open(settings, dial.as_deref(), slot).await?, false))
    }

    /// Waits until one of the connections is free, or may be opened.
    async fn turn(&self, reuse: Reuse) -> Result<Grant, NotSent> {
        let Inner { settings, usage, slots, .. } = &*self.0;
        let all = (0..self.0.idle.len()).map(|place| (shards::index() + place) % self.0.idle.len());
        if let Some(connection) = all.clone().find_map(|shard| self.take_idle(shard, reuse)) {
            return Ok(Grant::Connection(Box::new(connection)));
        }
        let granted = slots.queue(reuse);
        // One that is idle and cannot be used stands in the way of one that can. Only now that somebody waits, so that its
        // place goes to them in their order.
        let unusable = all.into_iter().find_map(|shard| {
            let mut idle = self.idle(shard);
            (!idle.is_empty()).then(|| idle.remove(0))
        });
        drop(unusable);
        match tokio::time::timeout(settings.connect_timeout, granted).await {
            Ok(Ok(grant)) => Ok(grant),
            Ok(Err(_)) | Err(_) => {
                usage.exceeded(Limit::UpstreamMaxConnections);
                Err(NotSent::NoneFree(settings.connect_timeout))
            }
        }
    }

    fn answered(
        &self,
        response: Response<Incoming>,
        connection: Connection,
    ) -> Result<(Response<Incoming>, Carrier), Error> {
        let headers = response.headers();
        if !framing_is_plain(headers) {
            return Err(Error::Framing);
        }
        // hyper goes on in the version of the last answer, and 1.0 has no chunks to send a body in.
        let reusable = response.version() == Version::HTTP_11;
        let carrier = Carrier { connection, upstream: self.clone(), reusable, answered: Instant::now() };
        Ok((response, carrier))
    }

    fn take_idle(&self, shard: usize, reuse: Reuse) -> Option<Connection> {
        let mut idle = self.idle(shard);
        // The last one has been idle for the shortest time: where that is too long, it is for all.
        while let Some(last) = idle.last() {
            if last.since.elapsed() >= reuse.longest_idle() {
                return None;
            }
            if let Some(Idle { connection, .. }) = idle.pop()
                && connection.is_idle()
            {
                return Some(connection);
            }
        }
        None
    }

    fn idle(&self, shard: usize) -> MutexGuard<'_, Vec<Idle>> {
        self.0.idle[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_idle(&self, connection: Connection, since: Instant) {
        let Some(connection) = self.0.slots.offer(Box::new(connection), since) else { return };
        {
            let mut idle = self.idle(shards::index());
            if idle.first().is_some_and(|oldest| oldest.since.elapsed() >= UNPROTECTED_IDLE) {
                idle.retain(|entry| entry.since.elapsed() < UNPROTECTED_IDLE);
            }
            if idle.len() < MAX_IDLE.div_ceil(shards::count()) {
                // In the order of their age, the youngest last.
                let place = idle.partition_point(|entry| entry.since <= since);
                idle.insert(place, Idle { connection: *connection, since });
            }
        }
        // Who began to wait after it was offered has not found it idle either.
        if self.0.slots.is_awaited() {
            let last = self.idle(shards::index()).pop();
            if let Some(Idle { connection, since }) = last {
                self.0.slots.offer(Box::new(connection), since);
            }
        }
    }
}

/// hyper does not tell who is to blame; an error of the client's own body is somewhere among the causes.
fn broke_off(error: hyper::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(inner) = cause {
        if matches!(inner.downcast_ref(), Some(body::Error::Broken(_))) {
            return Error::ClientBody(error);
        }
        cause = inner.source();
    }
    Error::Unknown(error)
}
