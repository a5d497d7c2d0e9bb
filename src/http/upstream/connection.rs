//! One connection to an upstream.

use std::io;
use std::sync::Arc;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::stream::{Stream, Wire};
use super::{Dial, Io, NotSent, Settings, Upstream};
use crate::http::body::Body;

/// Most header lines of an answer.
const MAX_HEADERS: usize = 256;

/// An open connection. Dropped, it closes at once, whatever it is in the middle of.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Body>,
    pub(super) wire: Arc<Wire>,
    task: Option<AbortHandle>,
}

impl Connection {
    /// Connects. An error means that nothing was sent.
    pub(super) async fn open(settings: &Settings, dial: Option<&dyn Dial>) -> Result<Self, NotSent> {
        let limit = settings.connect_timeout;
        let connecting = async {
            match dial {
                Some(dial) => Self::over(dial.dial().await.map_err(NotSent::Connect)?).await,
                None => Self::over(connect(settings).await.map_err(NotSent::Connect)?).await,
            }
        };
        timeout(limit, connecting).await.unwrap_or(Err(NotSent::ConnectTimeout(limit)))
    }

    async fn over<T: Io>(stream: T) -> Result<Self, NotSent> {
        let wire = Arc::new(Wire::default());
        let stream = TokioIo::new(Stream::new(stream, Arc::clone(&wire)));
        let mut builder = http1::Builder::new();
        let (sender, connection) = builder.max_headers(MAX_HEADERS).handshake(stream).await.map_err(NotSent::Closed)?;
        // Its end shows at the sender; there is nobody else to tell.
        let task = tokio::spawn(connection.with_upgrades()).abort_handle();
        Ok(Self { sender, wire, task: Some(task) })
    }

    /// Whether it can carry another request right away.
    pub(super) fn is_idle(&self) -> bool {
        self.sender.is_ready() && !self.wire.has_failed()
    }
}

async fn connect(settings: &Settings) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((settings.host.as_str(), settings.port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// A connection that carries an exchange. Give it back when the answer has ended; dropped, it closes.
pub struct Carrier {
    pub(super) connection: Connection,
    pub(super) upstream: Upstream,
    /// Whether it may carry another request after this one.
    pub(super) reusable: bool,
    /// When the head of the answer came.
    pub(super) answered: Instant,
}

impl Carrier {
    /// The answer has ended, and was read as it came: the connection may carry another request.
    pub fn give_back(self) {
        self.give_back_since(Instant::now());
    }

    /// The answer has ended, and was read as fast as its reader could: the upstream may have been done with it since
    /// its head came, and the connection is idle for that long.
    pub fn give_back_relayed(self) {
        let answered = self.answered;
        self.give_back_since(answered);
    }

    /// The connection has another use now.
    pub fn detach(mut self) {
        self.connection.wire.become_plain();
        self.connection.task = None;
    }

    fn give_back_since(mut self, idle_since: Instant) {
        let done = self.connection.sender.is_ready() || self.connection.sender.is_closed();
        if done {
            return self.put_idle(idle_since);
        }
        // Its task has yet to see the end of the exchange; or the upstream has answered early and still reads the
        // request, all of which it is to get.
        let patience = self.upstream.settings().timeout;
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(patience, self.connection.sender.ready()).await {
                self.put_idle(idle_since);
            }
        });
    }

    fn put_idle(self, idle_since: Instant) {
        if self.reusable && self.connection.is_idle() {
            self.upstream.put_idle(self.connection, idle_since);
        }
    }
}
