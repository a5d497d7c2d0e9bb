//! Connections to an upstream, and what is known when sending over one fails.
//!
//! A request is sent at most once. Where a failure provably happened before the first byte, the error says so
//! ([`Error::NotSent`]); everything else is [`Error::Unknown`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::body::Body;
use super::headers::framing_is_plain;

/// Idle connections kept for each upstream.
const MAX_IDLE: usize = 1024;

/// How long a connection may have been idle to carry an unprotected request.
const UNPROTECTED_IDLE: Duration = Duration::from_secs(30);

/// How long a connection may have been idle to carry a protected attempt: an upstream that closes idle connections
/// would do so at the moment of sending, and the outcome would be unknown.
const PROTECTED_IDLE: Duration = Duration::from_secs(1);

/// How long a connection may take to become idle after its answer has ended.
const SETTLE_DOWN: Duration = Duration::from_secs(1);

/// One of `[upstreams]`
#[derive(Clone, Debug)]
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
    /// The answer has a transfer coding that the gate does not understand (RFC 9112, 6.1).
    #[error("the answer has a transfer coding other than chunked")]
    Coding,
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
    /// The connection closed before the request was written to it.
    #[error("the connection closed first: {0}")]
    HandedBack(#[source] hyper::Error),
}

/// An upstream and its idle connections.
#[derive(Clone)]
pub struct Upstream(Arc<Inner>);

struct Inner {
    settings: Settings,
    idle: Mutex<Vec<Idle>>,
}

struct Idle {
    sender: SendRequest<Body>,
    since: Instant,
}

/// A connection that carries an exchange. Give it back when the answer has ended; dropped, it closes.
pub struct PooledConnection {
    sender: SendRequest<Body>,
    upstream: Upstream,
}

impl Upstream {
    /// An upstream without connections yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self(Arc::new(Inner { settings, idle: Mutex::default() }))
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

    /// Sends a request, once, and returns the head of its answer.
    ///
    /// A connection that turns out closed before the request was written to it is passed over for another: the
    /// request was handed back whole, and nothing was sent.
    pub async fn send(
        &self,
        mut request: Request<Body>,
        reuse: Reuse,
    ) -> Result<(Response<Incoming>, PooledConnection), Error> {
        loop {
            let (mut sender, reused) = match self.take_idle(reuse) {
                Some(sender) => (sender, true),
                None => (self.connect().await.map_err(Error::NotSent)?, false),
            };
            match sender.try_send_request(request).await {
                Ok(response) if !framing_is_plain(response.headers()) => return Err(Error::Coding),
                Ok(response) => return Ok((response, PooledConnection { sender, upstream: self.clone() })),
                Err(mut refused) => match refused.take_message() {
                    Some(whole) if reused => request = whole,
                    Some(_) => return Err(Error::NotSent(NotSent::HandedBack(refused.into_error()))),
                    None => {
                        let error = refused.into_error();
                        // hyper calls an error of the body that it was given a user's.
                        return Err(if error.is_user() { Error::ClientBody(error) } else { Error::Unknown(error) });
                    }
                },
            }
        }
    }

    fn take_idle(&self, reuse: Reuse) -> Option<SendRequest<Body>> {
        let longest = match reuse {
            Reuse::Protected => PROTECTED_IDLE,
            Reuse::Unprotected => UNPROTECTED_IDLE,
            Reuse::Never => return None,
        };
        let mut idle = self.0.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // The last one given back was idle for the shortest time: where that is too long, all are.
        while let Some(last) = idle.last() {
            if last.since.elapsed() >= longest {
                return None;
            }
            if let Some(Idle { sender, .. }) = idle.pop()
                && sender.is_ready()
            {
                return Some(sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: SendRequest<Body>) {
        let mut idle = self.0.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if idle.first().is_some_and(|oldest| now - oldest.since >= UNPROTECTED_IDLE) {
            idle.retain(|entry| now - entry.since < UNPROTECTED_IDLE);
        }
        if idle.len() < MAX_IDLE {
            idle.push(Idle { sender, since: now });
        }
    }

    async fn connect(&self) -> Result<SendRequest<Body>, NotSent> {
        let Settings { host, port, connect_timeout, .. } = &self.0.settings;
        let connecting = async {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(NotSent::Connect)?;
            stream.set_nodelay(true).map_err(NotSent::Connect)?;
            let (sender, connection) =
                http1::Builder::new().handshake(TokioIo::new(stream)).await.map_err(NotSent::HandedBack)?;
            // Its end shows at the sender; there is nobody else to tell.
            tokio::spawn(connection.with_upgrades());
            Ok(sender)
        };
        timeout(*connect_timeout, connecting).await.unwrap_or(Err(NotSent::ConnectTimeout(*connect_timeout)))
    }
}

impl PooledConnection {
    /// The answer has ended: the connection may carry another request.
    pub fn give_back(mut self) {
        if self.sender.is_closed() {
            return;
        }
        if self.sender.is_ready() {
            self.upstream.put_idle(self.sender);
            return;
        }
        // Its task has yet to see the end of the exchange, or is still sending a body that the upstream did not wait
        // for.
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(SETTLE_DOWN, self.sender.ready()).await {
                self.upstream.put_idle(self.sender);
            }
        });
    }
}
