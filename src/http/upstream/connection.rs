//! One connection to an upstream.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{AUTHORIZATION, COOKIE, HeaderName};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::ext::on_informational;
use hyper_util::rt::TokioIo;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::endpoint::Endpoint;
use super::http2::ReservedStream;
use super::io::{HeadFilter, SocketState};
use super::pool::Turn;
use super::response_head::MAX_HEAD;
use super::{Io, NotSent, Reuse, Sharing, Upstream};
use crate::http::answer::may_have_content;
use crate::http::body::{self, Body, Observer};
use crate::http::headers::announces_body;
use crate::http::http1::Interim;
use crate::http::limits::HYPER_MAX_HEADERS;

/// The maximum number of interim responses to a request.
pub(super) const MAX_INTERIM: usize = 100;

/// An open HTTP/1.1 connection. Dropping it closes it at once, even during an exchange.
pub(super) struct Http1Connection {
    /// `None` once it has ended.
    sender: Option<SendRequest<Body>>,
    pub(super) socket: Arc<SocketState>,
    pub(super) endpoint: Option<Arc<Endpoint>>,
    pub(super) owner: Owner,
    task: Task,
}

/// The task that drives the connection. Dropping it aborts the task.
struct Task(Option<JoinHandle<()>>);

impl Http1Connection {
    /// Performs the HTTP/1.1 handshake over `stream`, whose state is `socket`.
    pub(super) async fn handshake<T: Io>(
        stream: T,
        socket: Arc<SocketState>,
        endpoint: Option<Arc<Endpoint>>,
        owner: Owner,
        max_headers: usize,
    ) -> Result<Self, NotSent> {
        let mut builder = http1::Builder::new();
        if max_headers > HYPER_MAX_HEADERS {
            builder.max_headers(max_headers);
        }
        let (sender, connection) = builder
            // `HeadFilter` refuses larger heads before hyper does.
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(HeadFilter::new(stream, Arc::clone(&socket), max_headers)))
            .await
            .map_err(NotSent::Closed)?;
        let task = tokio::spawn(async {
            // The sender reports errors.
            let _ = connection.with_upgrades().await;
        });
        Ok(Self { sender: Some(sender), socket, endpoint, owner, task: Task(Some(task)) })
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(
        &mut self,
        mut request: Request<Body>,
        interim: Option<Interim>,
    ) -> Result<Response<Incoming>, SendError> {
        self.socket.start_request();
        self.pass_on(interim, &mut request);
        let Some(sender) = &mut self.sender else { return Err(SendError::Unsent(Box::new(request), NotSent::Ended)) };
        let mut sending = pin!(sender.try_send_request(request));
        let answered = tokio::select! {
            biased;
            answered = sending.as_mut() => answered,
            () = self.task.ended() => {
                // A request that enters hyper's queue while the queue closes can stay in it unanswered. Dropping the
                // last sender returns the request.
                self.sender = None;
                sending.await
            }
        };
        answered.map_err(|mut refused| match refused.take_message() {
            Some(whole) => SendError::Unsent(Box::new(whole), NotSent::Closed(refused.into_error())),
            // No byte of it was sent, and none can be sent any more.
            None if self.socket.has_refused() => SendError::FirstWrite(refused.into_error()),
            None => SendError::BrokenOff(refused.into_error()),
        })
    }

    /// Relays interim responses, and aborts the exchange after [`MAX_INTERIM`] of them.
    fn pass_on(&self, interim: Option<Interim>, request: &mut Request<Body>) {
        let (socket, count) = (Arc::clone(&self.socket), AtomicUsize::new(0));
        on_informational(request, move |said| {
            if count.fetch_add(1, Ordering::Relaxed) == MAX_INTERIM {
                socket.abort();
            }
            if announces_body(said.headers()) {
                socket.mark_ambiguous();
            }
            if let Some(interim) = &interim {
                interim.send(said.status(), said.headers());
            }
        });
    }

    /// Whether it can carry another request now.
    pub(super) fn is_idle(&self) -> bool {
        self.is_ready() && !self.socket.is_spent()
    }

    fn is_ready(&self) -> bool {
        self.sender.as_ref().is_some_and(SendRequest::is_ready)
    }

    fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(SendRequest::is_closed)
    }

    /// Waits until it can carry another request. Returns false if it never will.
    async fn ready(&mut self) -> bool {
        match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        }
    }
}

/// Whether the end of a response is unambiguous. A response without a body by definition (RFC 9112, 6.3; a 205 by RFC
/// 9110, 15.3.6) is ambiguous if it announces one. A length is legal in responses to HEAD and in 304, but some
/// upstreams send the announced bytes, which would become the next request's response.
pub(super) fn has_unambiguous_end(method: &Method, status: StatusCode, headers: &HeaderMap) -> bool {
    const WITHOUT_BODY: [StatusCode; 3] = [StatusCode::NO_CONTENT, StatusCode::RESET_CONTENT, StatusCode::NOT_MODIFIED];
    let may_have_none = method == Method::HEAD || WITHOUT_BODY.contains(&status);
    !(may_have_none && announces_body(headers))
}

/// Why a request got no response.
pub(super) enum SendError {
    /// The request was not sent and is returned.
    Unsent(Box<Request<Body>>, NotSent),
    /// Its first write failed, or bytes came before it: nothing of it was sent.
    FirstWrite(hyper::Error),
    /// The upstream refused it unprocessed.
    Unprocessed(hyper::Error),
    /// It cannot be represented in HTTP/2.
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

/// The connection or stream that carries an exchange.
pub(super) enum Transport {
    /// An HTTP/1.1 connection of its own.
    Http1(Http1Connection),
    /// A stream on an HTTP/2 connection.
    Http2(ReservedStream),
}

impl Transport {
    /// A copy of a request without a body, for a retry. HTTP/1.1 needs none: it has no way to refuse a request
    /// unprocessed.
    pub(super) fn copy_of(&self, request: &Request<Body>) -> Option<Request<Body>> {
        if matches!(self, Self::Http1(_)) || !request.body().is_end_stream() {
            return None;
        }
        let mut copy = Request::new(Body::empty());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        Some(copy)
    }

    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        match self {
            Self::Http1(connection) => connection.endpoint.as_deref(),
            Self::Http2(stream) => stream.endpoint(),
        }
    }
}

/// A pooled connection that carries an exchange. Return it to the pool when the response has ended; dropping it closes
/// it.
pub struct PooledConnection {
    pub(super) transport: Transport,
    pub(super) upstream: Upstream,
    /// Whether it may carry another request after this one.
    pub(super) reusable: bool,
    /// When the head of the answer came.
    pub(super) answered: Instant,
    /// The right to it, which ends after it is idle.
    pub(super) turn: Option<Turn>,
}

impl PooledConnection {
    /// Returns the connection after a response that was read as it arrived.
    pub fn return_to_pool(self) {
        self.return_idle_since(Instant::now());
    }

    /// Returns the connection after a response that was read at the client's pace: the upstream may have finished when
    /// the head arrived, so the connection counts as idle since then.
    pub fn return_after_relay(self) {
        let answered = self.answered;
        self.return_idle_since(answered);
    }

    /// Sends the answer on as it arrives; where its `status` has no content, without data. When it has ended well, the connection returns to
    /// the pool.
    #[must_use]
    pub fn relay(self, status: StatusCode, incoming: Incoming) -> Body {
        // A body that has ended is not polled again.
        if incoming.is_end_stream() {
            self.return_to_pool();
            return Body::empty();
        }
        match may_have_content(status) {
            true => Body::relay(incoming, ReturnAtEnd(Some(self))),
            false => Body::relay(WithoutData(incoming), ReturnAtEnd(Some(self))),
        }
    }

    /// Detaches the connection for another protocol.
    pub fn detach(self) {
        if let Transport::Http1(mut connection) = self.transport {
            connection.socket.become_plain(self.turn);
            connection.task.0 = None;
        }
    }

    fn return_idle_since(self, idle_since: Instant) {
        // A stream on an HTTP/2 connection is freed on drop.
        let Self { transport: Transport::Http1(mut connection), upstream, reusable, turn, .. } = self else { return };
        let put_idle = move |upstream: &Upstream, connection: Http1Connection| {
            match reusable && connection.is_idle() {
                true => upstream.put_idle(connection, idle_since),
                false => drop(connection),
            }
            drop(turn);
        };
        if connection.is_ready() || connection.is_closed() {
            return put_idle(&upstream, connection);
        }
        // Its task has yet to see the end of the exchange, or the upstream has answered early and still reads the
        // request.
        tokio::spawn(async move {
            let patience = upstream.settings().timeout;
            if let Ok(true) = timeout(patience, connection.ready()).await {
                put_idle(&upstream, connection);
            }
        });
    }
}

/// The trailers of a body.
struct WithoutData(Incoming);

impl HttpBody for WithoutData {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            match ready!(Pin::new(&mut self.0).poll_frame(context)) {
                Some(Ok(frame)) if frame.is_data() => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

/// Returns a connection to its pool at the end of the body that it carries.
struct ReturnAtEnd(Option<PooledConnection>);

impl Observer for ReturnAtEnd {
    fn received(&mut self, is_end: bool) {
        if is_end && let Some(connection) = self.0.take() {
            connection.return_after_relay();
        }
    }

    /// Its client sees that, and nothing else tells the operator: the head was that of an answer.
    fn broke(&mut self) {
        let Some(connection) = self.0.take() else { return };
        if let Some(others) = connection.upstream.0.broken_answers.due() {
            let upstream = &*connection.upstream.settings().name;
            tracing::warn!(upstream, others, "the upstream broke off an answer of which the client has a part");
        }
    }
}

/// The headers that identify a caller, whatever its route.
static CREDENTIALS: [HeaderName; 3] = [AUTHORIZATION, COOKIE, HeaderName::from_static("x-api-key")];

/// Whose requests a connection carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Any caller's.
    AnyCaller,
    /// One caller's: a digest of its scope and credentials.
    Caller([u8; 32]),
    /// One request's, which it was opened for.
    OneRequest,
}

impl Owner {
    /// The owner of the connection that a request needs. `scope` is a digest of its record's scope. A request without a record
    /// and without credentials identifies no caller.
    pub(super) fn of(sharing: Sharing, scope: Option<&[u8; 32]>, headers: &HeaderMap) -> Self {
        match sharing {
            Sharing::Always => Self::AnyCaller,
            Sharing::Never => Self::OneRequest,
            Sharing::Caller => {
                let credentials =
                    || CREDENTIALS.iter().flat_map(|name| headers.get_all(name).iter().map(move |v| (name, v)));
                if scope.is_none() && credentials().next().is_none() {
                    return Self::OneRequest;
                }
                let mut digest = Sha256::new();
                digest.update([u8::from(scope.is_some())]);
                digest.update(scope.unwrap_or(&[0; 32]));
                for (name, value) in credentials() {
                    for part in [name.as_str().as_bytes(), value.as_bytes()] {
                        digest.update((part.len() as u64).to_be_bytes());
                        digest.update(part);
                    }
                }
                Self::Caller(digest.finalize().into())
            }
        }
    }
}

/// The requirements of a request on its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Purpose {
    pub(super) reuse: Reuse,
    pub(super) owner: Owner,
}

impl Purpose {
    /// Whether a connection of this owner may carry the request.
    pub(super) fn may_use(&self, owner: Owner) -> bool {
        self.owner == owner && owner != Owner::OneRequest
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};

    use super::super::error::not_sent;
    use super::super::io::UpstreamIo;
    use super::super::response_head::HeadFault;
    use super::*;

    /// An upstream that has stopped reading keeps the first write of a request waiting. What it says then is no answer.
    /// The upstream says this before a byte of a request has left: what becomes of the request, and what has left in the end.
    async fn told_before_a_request_has_left(said: &[u8]) -> (Option<SendError>, Vec<u8>) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let (ours, mut upstream) = tokio::io::duplex(64);
        let mut ours: Box<dyn Io> = Box::new(ours);
        let socket = Arc::new(SocketState::default());
        ours.write_all(&FULL).await.unwrap();
        let stream = UpstreamIo::new(ours, Arc::clone(&socket));
        let mut connection =
            Http1Connection::handshake(stream, socket, None, Owner::AnyCaller, HYPER_MAX_HEADERS).await.unwrap();
        let request = Request::get("/").header("host", "a").body(Body::empty()).unwrap();
        let (answered, ()) = tokio::join!(connection.send(request, None), async {
            // hyper takes the request, and finds no room to write it.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            upstream.write_all(said).await.unwrap();
        });
        drop(connection);
        let mut sent = Vec::new();
        upstream.read_to_end(&mut sent).await.unwrap();
        (answered.err(), sent)
    }

    /// What takes all the room of the stream.
    const FULL: [u8; 64] = [b'x'; 64];

    #[tokio::test]
    async fn bytes_that_come_before_a_request_has_left_do_not_answer_it() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL";
        let (error, sent) = told_before_a_request_has_left(answer).await;
        assert!(matches!(error, Some(SendError::FirstWrite(_))));
        assert_eq!(sent, FULL, "no byte of it has left");
    }

    /// As a server of HTTP/2 does, which begins by itself (RFC 9113, 3.4).
    #[tokio::test]
    async fn a_server_of_http_2_is_named_before_a_request_has_left() {
        let (error, sent) = told_before_a_request_has_left(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        let Some(SendError::FirstWrite(error)) = error else { panic!("it is not sent") };
        assert!(matches!(not_sent(error), NotSent::Unasked(HeadFault::Http2)));
        assert_eq!(sent, FULL);
    }

    #[test]
    fn a_bodyless_response_that_announces_a_body_is_ambiguous() {
        let length = |value| HeaderMap::from_iter([(CONTENT_LENGTH, HeaderValue::from_static(value))]);
        let chunks = HeaderMap::from_iter([(TRANSFER_ENCODING, HeaderValue::from_static("chunked"))]);
        let leaves = |method: &Method, status: u16, headers: &HeaderMap| {
            !has_unambiguous_end(method, StatusCode::from_u16(status).unwrap(), headers)
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

    const SCOPES: [Option<&[u8; 32]>; 3] = [None, Some(&[0; 32]), Some(&[1; 32])];

    fn headers(lines: &[(&str, &'static str)]) -> HeaderMap {
        let line = |(name, value): &(&str, &'static str)| (name.parse().unwrap(), HeaderValue::from_static(value));
        lines.iter().map(line).collect::<Vec<(HeaderName, HeaderValue)>>().into_iter().fold(
            HeaderMap::new(),
            |mut headers, (name, value)| {
                headers.append(name, value);
                headers
            },
        )
    }

    #[test]
    fn callers_differ_by_scope_and_by_every_line_of_their_credentials() {
        let all = [
            headers(&[("authorization", "Bearer a")]),
            headers(&[("authorization", "Bearer b")]),
            headers(&[("x-api-key", "Bearer a")]),
            headers(&[("cookie", "a=1")]),
            headers(&[("cookie", "a=1; b=2")]),
            headers(&[("cookie", "a=1"), ("cookie", "b=2")]),
            headers(&[("authorization", "Bearer a"), ("cookie", "a=1")]),
        ];
        let mut owners = Vec::new();
        for scope in SCOPES {
            for headers in &all {
                let owner = Owner::of(Sharing::Caller, scope, headers);
                assert!(owner == Owner::of(Sharing::Caller, scope, headers) && !owners.contains(&owner));
                owners.push(owner);
            }
        }
        assert!(owners.iter().all(|owner| matches!(owner, Owner::Caller(_))));
    }

    #[test]
    fn a_request_that_identifies_no_caller_shares_no_connection() {
        let none = headers(&[("x-tenant", "a")]);
        let owner = Owner::of(Sharing::Caller, None, &none);
        assert!(owner == Owner::OneRequest);
        assert!(!Purpose { reuse: Reuse::Unprotected, owner }.may_use(owner));
        assert!(
            matches!(Owner::of(Sharing::Caller, SCOPES[1], &none), Owner::Caller(_)),
            "its scope identifies a caller"
        );
        for scope in SCOPES {
            assert!(Owner::of(Sharing::Always, scope, &none) == Owner::AnyCaller);
            assert!(Owner::of(Sharing::Never, scope, &none) == Owner::OneRequest);
        }
    }
}
