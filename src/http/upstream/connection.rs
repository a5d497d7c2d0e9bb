//! One connection to an upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::stream::Stream;
use super::{NotSent, Settings, Upstream};
use crate::http::body::Body;

/// How long a connection may take to become idle after its answer has ended.
const SETTLE_DOWN: Duration = Duration::from_secs(1);

/// Most header lines of an answer.
const MAX_HEADERS: usize = 256;

/// An open connection. Dropped, it closes at once, whatever it is in the middle of.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Body>,
    /// A write on it has failed.
    failed: Arc<AtomicBool>,
    task: Option<AbortHandle>,
}

impl Connection {
    /// Connects. An error means that nothing was sent.
    pub(super) async fn open(settings: &Settings) -> Result<Self, NotSent> {
        let Settings { host, port, connect_timeout, .. } = settings;
        let connecting = async {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(NotSent::Connect)?;
            stream.set_nodelay(true).map_err(NotSent::Connect)?;
            let failed = Arc::new(AtomicBool::new(false));
            let stream = TokioIo::new(Stream::new(stream, Arc::clone(&failed)));
            let mut builder = http1::Builder::new();
            let (sender, connection) =
                builder.max_headers(MAX_HEADERS).handshake(stream).await.map_err(NotSent::HandedBack)?;
            // Its end shows at the sender; there is nobody else to tell.
            let task = tokio::spawn(connection.with_upgrades()).abort_handle();
            Ok(Self { sender, failed, task: Some(task) })
        };
        timeout(*connect_timeout, connecting).await.unwrap_or(Err(NotSent::ConnectTimeout(*connect_timeout)))
    }

    /// Whether it can carry another request right away.
    pub(super) fn is_idle(&self) -> bool {
        self.sender.is_ready() && !self.failed.load(Ordering::Acquire)
    }

    fn is_done_for(&self) -> bool {
        self.sender.is_closed() || self.failed.load(Ordering::Acquire)
    }
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
        self.connection.task = None;
    }

    fn give_back_since(mut self, idle_since: Instant) {
        if !self.reusable || self.connection.is_done_for() {
            return;
        }
        if self.connection.is_idle() {
            self.upstream.put_idle(self.connection, idle_since);
            return;
        }
        // Its task has yet to see the end of the exchange, or is still sending a body that the upstream did not wait
        // for.
        tokio::spawn(async move {
            let settled_down = timeout(SETTLE_DOWN, self.connection.sender.ready()).await;
            if matches!(settled_down, Ok(Ok(()))) && self.connection.is_idle() {
                self.upstream.put_idle(self.connection, idle_since);
            }
        });
    }
}
