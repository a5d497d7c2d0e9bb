//! One connection to an upstream.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::ext::on_informational;
use hyper_util::rt::TokioIo;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::head::{LARGEST_HEAD, StrictHeads};
use super::origin::Origin;
use super::owner::Owner;
use super::shared::Ticket;
use super::stream::Wire;
use super::{Io, NotSent, Upstream};
use crate::http::body::{self, Body};
use crate::http::wire::Interim;

/// Most interim answers before an answer.
pub(super) const MOST_INTERIM: usize = 100;

/// Most header lines of an answer.
pub(super) const MAX_HEADERS: usize = 256;

/// How many bytes of an answer are read ahead. A head that hyper would find too large for that is refused before.
const LARGEST_BUFFER: usize = LARGEST_HEAD;

/// An open connection. Dropped, it closes at once, whatever it is in the middle of.
pub(super) struct Connection {
    /// Nothing once it has ended.
    sender: Option<SendRequest<Body>>,
    pub(super) wire: Arc<Wire>,
    pub(super) origin: Option<Arc<Origin>>,
    pub(super) owner: Owner,
    task: Task,
}

/// The task that moves the bytes. Dropped, it ends at once.
struct Task(Option<JoinHandle<()>>);

impl Connection {
    /// Speaks HTTP/1.1 over `stream`, whose bytes `wire` knows of.
    pub(super) async fn over<T: Io>(
        stream: T,
        wire: Arc<Wire>,
        origin: Option<Arc<Origin>>,
        owner: Owner,
    ) -> Result<Self, NotSent> {
        let mut builder = http1::Builder::new();
        let (sender, connection) = builder
            .max_headers(MAX_HEADERS)
            .max_buf_size(LARGEST_BUFFER)
            .handshake(TokioIo::new(StrictHeads::new(stream, Arc::clone(&wire))))
            .await
            .map_err(NotSent::Closed)?;
        let task = tokio::spawn(async {
            // How it ended shows at the sender.
            let _ = connection.with_upgrades().await;
        });
        Ok(Self { sender: Some(sender), wire, origin, owner, task: Task(Some(task)) })
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(
        &mut self,
        mut request: Request<Body>,
        interim: Option<Interim>,
    ) -> Result<Response<Incoming>, Refused> {
        self.wire.begin();
        self.pass_on(interim, &mut request);
        let Some(sender) = &mut self.sender else { return Err(Refused::Unsent(Box::new(request), NotSent::Ended)) };
        let mut sending = pin!(sender.try_send_request(request));
        let answered = tokio::select! {
            biased;
            answered = sending.as_mut() => answered,
            () = self.task.ended() => {
                // A request that enters the queue while its reader closes it can be left lying there, and nobody would
                // ever answer it. It comes back when the last way into the queue is gone.
                self.sender = None;
                sending.await
            }
        };
        answered.map_err(|mut refused| match refused.take_message() {
            Some(whole) => Refused::Unsent(Box::new(whole), NotSent::Closed(refused.into_error())),
            // No byte of it has left, and none can any more.
            None if self.wire.has_refused() => Refused::FirstWrite(refused.into_error()),
            None => Refused::BrokenOff(refused.into_error()),
        })
    }

    /// Has interim answers passed on; so many that no end is in sight break the exchange off.
    fn pass_on(&self, interim: Option<Interim>, request: &mut Request<Body>) {
        let (wire, count) = (Arc::clone(&self.wire), AtomicUsize::new(0));
        on_informational(request, move |said| {
            if count.fetch_add(1, Ordering::Relaxed) == MOST_INTERIM {
                wire.give_up();
            }
            if says_it_has_a_body(said.headers()) {
                wire.doubt();
            }
            if let Some(interim) = &interim {
                interim.send(said.status(), said.headers());
            }
        });
    }

    /// Whether it can carry another request right away.
    pub(super) fn is_idle(&self) -> bool {
        self.is_ready() && !self.wire.is_spent()
    }

    fn is_ready(&self) -> bool {
        self.sender.as_ref().is_some_and(SendRequest::is_ready)
    }

    fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(SendRequest::is_closed)
    }

    /// Waits until it can carry another request. False if it never will.
    async fn ready(&mut self) -> bool {
        match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        }
    }
}

/// Whether what an answer says of its body leaves no doubt about where it ends. One that may have none (RFC 9112, 6.3; a 205
/// by RFC 9110, 15.3.6) leaves doubt where it says that it has one, though a length is legal in answers to HEAD and in 304:
/// some upstreams send what they announce, and those bytes would be the next request's answer.
pub(super) fn ends_beyond_doubt(method: &Method, status: StatusCode, headers: &HeaderMap) -> bool {
    const WITHOUT_BODY: [StatusCode; 3] = [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT, StatusCode::NOT_MODIFIED];
    let may_have_none = method == Method::HEAD || WITHOUT_BODY.contains(&status);
    !(may_have_none && says_it_has_a_body(headers))
}

fn says_it_has_a_body(headers: &HeaderMap) -> bool {
    let is_zero = |length: &[u8]| !length.is_empty() && length.iter().all(|digit| *digit == b'0');
    headers.contains_key(TRANSFER_ENCODING)
        || headers.get_all(CONTENT_LENGTH).iter().any(|length| !is_zero(length.as_bytes()))
}

/// Why a connection did not answer.
pub(super) enum Refused {
    /// The request was not sent: here it is.
    Unsent(Box<Request<Body>>, NotSent),
    /// Its first write failed, or bytes came before it: nothing of it was sent.
    FirstWrite(hyper::Error),
    /// The upstream says that it did nothing about it.
    Unprocessed(hyper::Error),
    /// It cannot be sent on such a connection.
    Unfit(NotSent),
    /// The client's own body broke off.
    ClientBody(body::Error),
    /// The exchange broke off.
    BrokenOff(hyper::Error),
}

impl Task {
    /// Waits until it has ended.
    async fn ended(&mut self) {
        if let Some(task) = &mut self.0 {
            // However it ended.
            let _ = task.await;
            self.0 = None;
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// What carries an exchange.
pub(super) enum Line {
    /// A connection of its own.
    Single(Connection),
    /// Room on one that others share.
    Shared(Ticket),
}

impl Line {
    /// A request once more, where it may come to nothing on such a connection, and there is no body that would be gone.
    pub(super) fn copy_of(&self, request: &Request<Body>) -> Option<Request<Body>> {
        if matches!(self, Self::Single(_)) || !request.body().is_end_stream() {
            return None;
        }
        let mut copy = Request::new(Body::empty());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        Some(copy)
    }

    pub(super) fn origin(&self) -> Option<&Origin> {
        match self {
            Self::Single(connection) => connection.origin.as_deref(),
            Self::Shared(ticket) => ticket.origin(),
        }
    }
}

/// A connection that carries an exchange. Give it back when the answer has ended; dropped, it closes.
pub struct Carrier {
    pub(super) line: Line,
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
    pub fn detach(self) {
        if let Line::Single(mut connection) = self.line {
            connection.wire.become_plain();
            connection.task.0 = None;
        }
    }

    fn give_back_since(self, idle_since: Instant) {
        // Room on a shared connection is free as soon as it is dropped.
        let Self { line: Line::Single(mut connection), upstream, reusable, .. } = self else { return };
        let put_idle = move |upstream: &Upstream, connection: Connection| {
            if reusable && connection.is_idle() {
                upstream.put_idle(connection, idle_since);
            }
        };
        if connection.is_ready() || connection.is_closed() {
            return put_idle(&upstream, connection);
        }
        // Its task has yet to see the end of the exchange; or the upstream has answered early and still reads the
        // request, all of which it is to get.
        tokio::spawn(async move {
            let patience = upstream.settings().timeout;
            if let Ok(true) = timeout(patience, connection.ready()).await {
                put_idle(&upstream, connection);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::super::stream::Stream;
    use super::*;

    /// An upstream that has stopped reading keeps the first write of a request waiting. What it says then is no answer.
    #[tokio::test]
    async fn bytes_that_come_before_a_request_has_left_do_not_answer_it() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let (ours, mut upstream) = tokio::io::duplex(64);
        let mut ours: Box<dyn Io> = Box::new(ours);
        let wire = Arc::new(Wire::default());
        ours.write_all(&[b'x'; 64]).await.unwrap();
        let stream = Stream::new(ours, Arc::clone(&wire));
        let mut connection = Connection::over(stream, wire, None, Owner::AnyCaller).await.unwrap();
        let request = Request::get("/").header("host", "a").body(Body::empty()).unwrap();
        let (answered, ()) = tokio::join!(connection.send(request, None), async {
            // hyper takes the request, and finds no room to write it.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL").await.unwrap();
        });
        assert!(matches!(answered, Err(Refused::FirstWrite(_))));
        drop(connection);
        let mut sent = Vec::new();
        upstream.read_to_end(&mut sent).await.unwrap();
        assert_eq!(sent, [b'x'; 64], "no byte of it has left");
    }

    #[test]
    fn an_answer_that_may_have_no_body_and_says_it_has_one_leaves_doubt() {
        let length = |value| HeaderMap::from_iter([(CONTENT_LENGTH, HeaderValue::from_static(value))]);
        let chunks = HeaderMap::from_iter([(TRANSFER_ENCODING, HeaderValue::from_static("chunked"))]);
        let leaves = |method: &Method, status: u16, headers: &HeaderMap| {
            !ends_beyond_doubt(method, StatusCode::from_u16(status).unwrap(), headers)
        };
        for (method, status) in [(Method::POST, 204), (Method::GET, 205), (Method::GET, 304), (Method::HEAD, 200)] {
            for headers in [length("39"), length("039"), length(""), chunks.clone()] {
                assert!(leaves(&method, status, &headers), "{method} {status} {headers:?}");
            }
            for headers in [HeaderMap::new(), length("0"), length("00")] {
                assert!(!leaves(&method, status, &headers), "{method} {status} {headers:?}");
            }
        }
        for headers in [HeaderMap::new(), length("39"), chunks] {
            assert!(!leaves(&Method::GET, 200, &headers) && !leaves(&Method::POST, 404, &headers));
        }
    }
}
