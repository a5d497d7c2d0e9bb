//! Connections to an upstream, and what is known when sending over one fails.
//!
//! A request is sent at most once. Where a failure provably happened before the first byte, the error says so
//! ([`Error::NotSent`]); everything else is [`Error::Unknown`].

mod connection;
mod error;
mod frames;
mod head;
mod heard;
mod lines;
mod load;
mod origin;
mod owner;
mod records;
mod secure;
mod settings;
mod shared;
mod slots;
mod stream;
mod sweep;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Request, Response, Version};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};

pub use self::connection::Carrier;
use self::connection::{Connection, Line, MAX_HEADERS, Refused, ends_beyond_doubt};
use self::error::broke_off;
pub use self::error::{Error, NotSent};
pub use self::head::HeadFault;
use self::lines::Lines;
use self::origin::{Opened, Origin, Origins, Ready};
use self::owner::{Owner, Purpose};
use self::secure::Secure;
pub use self::settings::{Place, Protocol, Settings, Sharing, Tls, can_be_named};
use self::shared::Shared;
use self::slots::{Grant, Slot, Slots};
use self::stream::{Stream, Wire};
use self::sweep::Swept;
use super::body::Body;
use super::headers::framing_is_plain;
use super::held::Held;
use super::shards;
use super::usage::Usage;
use super::wire::Interim;
use crate::telemetry::limits::Limit;

/// Idle connections kept for each upstream, in equal parts on the threads that serve.
const MAX_IDLE: usize = 1024;

/// How long a connection may have been idle to carry an unprotected request.
const UNPROTECTED_IDLE: Duration = Duration::from_secs(30);

/// How long a connection may have been idle to carry a protected attempt: an upstream that closes idle connections
/// would do so at the moment of sending, and the outcome would be unknown.
const PROTECTED_IDLE: Duration = Duration::from_secs(1);

/// How often an unprotected request is sent again that the upstream says it did nothing about.
const MOST_REFUSALS: u32 = 3;

/// How long nobody is told again that an upstream cannot be reached.
const TOLD_AGAIN: Duration = Duration::from_secs(1);

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

/// How far sending a request has come, where interim answers go, and the scope of its record.
#[derive(Default)]
pub struct Sending {
    has_begun: AtomicBool,
    interim: Option<Interim>,
    scope: Option<[u8; 32]>,
}

impl Sending {
    /// Of a request whose client hears interim answers, where it understands them.
    #[must_use]
    pub fn of(interim: Option<Interim>) -> Self {
        Self { interim, ..Self::default() }
    }

    /// Of a request whose record has the scope with this digest, which tells callers apart where each has its own connections.
    #[must_use]
    pub fn in_scope(self, digest: [u8; 32]) -> Self {
        Self { scope: Some(digest), ..self }
    }

    /// Whether the request was handed to a connection: from then on a byte of it may have left.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// The request is handed to a connection, or else was handed back: nothing of it was sent, or processed.
    fn set_begun(&self, has_begun: bool) {
        self.has_begun.store(has_begun, Ordering::Release);
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
    origins: Origins,
    usage: Arc<Usage>,
    /// When somebody was last told that it cannot be reached.
    told: Mutex<Option<Instant>>,
    /// All of its connections count, idle or not.
    slots: Arc<Slots>,
    /// For each of the threads that serve: a connection lives on the thread that opened it.
    idle: Box<[Mutex<Vec<Idle>>]>,
    swept: Swept,
    /// Those that carry many requests at a time.
    lines: Option<Lines>,
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
        let lines = Lines::of(&settings);
        let secure = settings.tls.as_ref().map(|tls| Secure::new(tls, settings.protocol));
        let origins = Origins::new(settings.places.clone(), secure);
        Self(Arc::new(Inner {
            settings,
            dial,
            origins,
            usage,
            told: Mutex::default(),
            slots,
            idle,
            swept: Swept::new(),
            lines,
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

    /// Where it is, for people.
    #[must_use]
    pub fn places(&self) -> String {
        self.0.settings.places.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Whether to tell now that it cannot be reached: once a second at most.
    pub(crate) fn is_to_be_told(&self) -> bool {
        let mut told = self.0.told.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = told.is_none_or(|told| told.elapsed() >= TOLD_AGAIN);
        if is_due {
            *told = Some(Instant::now());
        }
        is_due
    }

    /// Whether an upgrade can be asked of it: HTTP/2 has none.
    #[must_use]
    pub fn takes_upgrades(&self) -> bool {
        self.0.settings.protocol != Protocol::H2
    }

    /// Sends a request, once, and returns the head of its answer. `sending` tells somebody who stops waiting whether
    /// anything had left.
    ///
    /// A connection that turns out closed before the request was written to it is passed over for another: the
    /// request was handed back whole, and nothing was sent. An unprotected request without a body goes to another, too, where
    /// the upstream says that it did nothing about it: it says so of what crosses with its goodbye.
    pub async fn send(
        &self,
        mut request: Request<Body>,
        reuse: Reuse,
        sending: &Sending,
    ) -> Result<(Response<Incoming>, Carrier), Error> {
        let mut tries = 0;
        let method = request.method().clone();
        let owner = Owner::of(self.0.settings.reuse, sending.scope.as_ref(), request.headers());
        let purpose = Purpose { reuse, owner };
        loop {
            let (mut line, reused) = match self.take_open(purpose) {
                Some(line) => (line, true),
                // In a box: most requests have no need of its size.
                None => Box::pin(self.connect(purpose)).await.map_err(Error::NotSent)?,
            };
            sending.set_begun(true);
            let copy = if reuse == Reuse::Unprotected { line.copy_of(&request) } else { None };
            let answered = match &mut line {
                Line::Single(connection) => connection.send(request, sending.interim.clone()).await,
                Line::Shared(ticket) => ticket.send(request).await,
            };
            match answered {
                Ok(response) => return self.answered(&method, response, line),
                Err(Refused::Unsent(whole, _)) if reused => request = *whole,
                Err(Refused::Unsent(_, why) | Refused::Unfit(why)) => return Err(Error::NotSent(why)),
                Err(Refused::FirstWrite(error)) => return Err(Error::NotSent(NotSent::Closed(error))),
                Err(Refused::Unprocessed(error)) => match copy.filter(|_| tries < MOST_REFUSALS) {
                    Some(copy) => (request, tries) = (copy, tries + 1),
                    None => return Err(Error::NotSent(NotSent::Refused(error))),
                },
                Err(Refused::ClientBody(error)) => return Err(Error::ClientBody(error.into())),
                Err(Refused::BrokenOff(error)) => {
                    let error = broke_off(error);
                    if let (Error::Unknown(_), Some(origin)) = (&error, line.origin()) {
                        origin.broke_off();
                    }
                    return Err(error);
                }
            }
            sending.set_begun(false);
        }
    }

    /// A connection that is open and has room.
    fn take_open(&self, purpose: Purpose) -> Option<Line> {
        if let Some(lines) = &self.0.lines
            && let Some(ticket) = lines.join(purpose)
        {
            return Some(Line::Shared(ticket));
        }
        self.take_idle(shards::index(), purpose).map(Line::Single)
    }

    /// A connection that is new, or one that became free while it waited for its turn: then it is reused.
    async fn connect(&self, purpose: Purpose) -> Result<(Line, bool), NotSent> {
        let Inner { settings, slots, lines, .. } = &*self.0;
        let Some(lines) = lines.as_ref().filter(|lines| lines.are_likely() && purpose.reuse != Reuse::Never) else {
            let slot = match slots.take() {
                Some(slot) => slot,
                None => match self.turn(purpose).await? {
                    Grant::Slot(slot) => slot,
                    Grant::Connection(connection) => return Ok((Line::Single(*connection), true)),
                },
            };
            return Ok((self.open(slot, purpose).await?, false));
        };
        let mut turn = None;
        // Only a connection that all callers share is worth waiting for while another request opens it.
        if purpose.owner == Owner::AnyCaller {
            // No longer than opening one may take.
            let limit = settings.connect_timeout;
            let waited = timeout(limit, lines.turn(purpose.reuse)).await.map_err(|_| NotSent::ConnectTimeout(limit))?;
            if let Some(line) = self.take_open(purpose) {
                return Ok((line, true));
            }
            // The connection before may have shown that each carries one request at a time.
            turn = Some(waited).filter(|_| lines.are_likely());
        }
        let slot = match slots.take() {
            Some(slot) => slot,
            None => {
                turn = None;
                match self.turn_or_room(lines, purpose).await? {
                    Ok(Grant::Slot(slot)) => slot,
                    Ok(Grant::Connection(connection)) => return Ok((Line::Single(*connection), true)),
                    Err(ticket) => return Ok((Line::Shared(ticket), true)),
                }
            }
        };
        let opened = self.open(slot, purpose).await;
        drop(turn);
        Ok((opened?, false))
    }

    /// Opens a connection, which keeps its slot for as long as it is open, in whatever hands. An error means that nothing was
    /// sent.
    async fn open(&self, slot: Slot, purpose: Purpose) -> Result<Line, NotSent> {
        let Inner { settings, dial, origins, .. } = &*self.0;
        let limit = settings.connect_timeout;
        let opening = async {
            if let Some(dial) = dial {
                let wire = Arc::new(Wire::default());
                let stream = Stream::new(dial.dial().await.map_err(NotSent::Connect)?, Arc::clone(&wire));
                return Connection::over(Held::new(stream, slot), wire, None, purpose.owner).await.map(Line::Single);
            }
            let Opened { stream, wire, origin, chose_h2 } = origins.open(purpose.reuse != Reuse::Never).await?;
            match stream {
                Ready::Tcp(stream) => self.begin(Held::new(stream, slot), wire, origin, chose_h2, purpose).await,
                Ready::Other(stream) => self.begin(Held::new(stream, slot), wire, origin, chose_h2, purpose).await,
            }
        };
        timeout(limit, opening).await.unwrap_or(Err(NotSent::ConnectTimeout(limit)))
    }

    async fn begin<T: Io>(
        &self,
        stream: T,
        wire: Arc<Wire>,
        origin: Option<Arc<Origin>>,
        chose_h2: bool,
        purpose: Purpose,
    ) -> Result<Line, NotSent> {
        let Inner { settings, lines, .. } = &*self.0;
        let is_h2 = chose_h2 || settings.protocol == Protocol::H2;
        let Some(lines) = lines.as_ref().filter(|_| purpose.reuse != Reuse::Never) else {
            return Connection::over(stream, wire, origin, purpose.owner).await.map(Line::Single);
        };
        lines.learn(is_h2);
        if !is_h2 {
            return Connection::over(stream, wire, origin, purpose.owner).await.map(Line::Single);
        }
        let carries = (purpose, Arc::clone(&lines.freed));
        let trial = origin.as_deref().map(Origin::trial);
        let shared = Shared::over(stream, wire, origin.clone(), carries, settings).await;
        let shared = match trial {
            Some(trial) => trial.ended(shared)?,
            None => shared?,
        };
        // One that takes no request at all is as good as none.
        lines.take_in(shared).map(Line::Shared).ok_or(NotSent::Ended)
    }

    /// Waits until a connection may be opened, or there is room on one.
    async fn turn_or_room(&self, lines: &Lines, purpose: Purpose) -> Result<Result<Grant, shared::Ticket>, NotSent> {
        let mut turn = std::pin::pin!(self.turn(purpose));
        loop {
            // Before it is looked: what becomes free meanwhile is heard of too.
            let freed = lines.freed.notified();
            lines.give_up_one(purpose);
            if let Some(ticket) = lines.join_any(purpose) {
                return Ok(Err(ticket));
            }
            tokio::select! {
                biased;
                granted = turn.as_mut() => return granted.map(Ok),
                () = freed => {}
            }
        }
    }

    /// Waits until one of the connections is free, or may be opened.
    async fn turn(&self, purpose: Purpose) -> Result<Grant, NotSent> {
        let Inner { settings, usage, slots, .. } = &*self.0;
        let all = (0..self.0.idle.len()).map(|place| (shards::index() + place) % self.0.idle.len());
        if let Some(connection) = all.clone().find_map(|shard| self.take_idle(shard, purpose)) {
            return Ok(Grant::Connection(Box::new(connection)));
        }
        let granted = slots.queue(purpose);
        // One that is idle and cannot be used stands in the way of one that can. Only now that somebody waits, so that its
        // place goes to them in their order.
        let unusable = all.into_iter().find_map(|shard| {
            let mut idle = self.idle(shard);
            (!idle.is_empty()).then(|| idle.remove(0))
        });
        drop(unusable);
        match timeout(settings.connect_timeout, granted).await {
            Ok(Ok(grant)) => Ok(grant),
            Ok(Err(_)) | Err(_) => {
                usage.exceeded(Limit::UpstreamMaxConnections);
                Err(NotSent::NoneFree(settings.connect_timeout))
            }
        }
    }

    fn answered(
        &self,
        method: &Method,
        response: Response<Incoming>,
        line: Line,
    ) -> Result<(Response<Incoming>, Carrier), Error> {
        let headers = response.headers();
        if !framing_is_plain(headers) {
            return Err(Error::Framing);
        }
        if headers.len() > MAX_HEADERS {
            return Err(Error::TooManyHeaders);
        }
        if let Some(origin) = line.origin() {
            origin.answered();
        }
        // hyper goes on in the version of the last answer, and 1.0 has no chunks to send a body in.
        let reusable = response.version() == Version::HTTP_11 && ends_beyond_doubt(method, response.status(), headers);
        let carrier = Carrier { line, upstream: self.clone(), reusable, answered: Instant::now() };
        Ok((response, carrier))
    }

    fn take_idle(&self, shard: usize, purpose: Purpose) -> Option<Connection> {
        let mut idle = self.idle(shard);
        // The last one has been idle for the shortest time: where that is too long, it is for all.
        let mut left = idle.len();
        while let Some(place) = left.checked_sub(1) {
            let entry = &idle[place];
            if entry.since.elapsed() >= purpose.reuse.longest_idle() {
                return None;
            }
            if purpose.may_use(entry.connection.owner) {
                let Idle { connection, .. } = idle.remove(place);
                if connection.is_idle() {
                    return Some(connection);
                }
            }
            left = place;
        }
        None
    }

    fn idle(&self, shard: usize) -> MutexGuard<'_, Vec<Idle>> {
        self.0.idle[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_idle(&self, connection: Connection, since: Instant) {
        if connection.owner == Owner::OneRequest {
            return;
        }
        let Some(connection) = self.0.slots.offer(connection, since) else { return };
        self.keep_swept();
        {
            let mut idle = self.idle(shards::index());
            if idle.first().is_some_and(|oldest| oldest.since.elapsed() >= UNPROTECTED_IDLE) {
                idle.retain(|entry| entry.since.elapsed() < UNPROTECTED_IDLE);
            }
            if idle.len() >= MAX_IDLE.div_ceil(shards::count()) {
                // The oldest, which may be of a caller that does not come back.
                idle.remove(0);
            }
            // In the order of their age, the youngest last.
            let place = idle.partition_point(|entry| entry.since <= since);
            idle.insert(place, Idle { connection, since });
        }
        // Who began to wait after it was offered has not found it idle either.
        if self.0.slots.is_awaited() {
            let last = self.idle(shards::index()).pop();
            if let Some(Idle { connection, since }) = last {
                self.0.slots.offer(connection, since);
            }
        }
    }
}
