//! HTTP/2 connections to an upstream, which carry many requests concurrently.

use std::error::Error as StdError;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::Reason;
use http::header::{CONNECTION, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{Notify, watch};

use super::connection::{Owner, Purpose, SendError};
use super::endpoint::Endpoint;
use super::frame_filter::FrameFilter;
use super::io::SocketState;
use super::remote_state::RemoteState;
use super::stream_slots::{BodyChunk, StreamPermit, StreamSlots};
use super::{Io, NotSent, Reuse, Settings};
use crate::http::body::{self, Body};
use crate::http::white_space::trimmed;

/// The maximum number of concurrent streams on a connection, even if the upstream allows more.
pub(super) const MAX_STREAMS: usize = 100;

/// The flow control window of a response, in bytes.
const WINDOW: u32 = 128 << 10;

/// The flow control window of a connection: larger than all streams together, so that unread responses do not block
/// others.
///
/// h2 derives from it its limit on the overhead of small buffered frames, half of it, and closes the connection with
/// all its streams above the limit. Only many clients that do not read responses of a few bytes per frame can exceed
/// it.
const CONNECTION_WINDOW: u32 = 256 << 20;

/// The maximum size of a response's headers in bytes.
const MAX_HEAD: u32 = 256 << 10;

/// An open HTTP/2 connection. It closes when its last stream and its last reference are dropped.
pub(super) struct Http2Connection {
    /// `None` once it accepts no more requests.
    sender: Mutex<Option<SendRequest<TrackedBody>>>,
    /// Disconnected when the connection task has ended.
    ended: watch::Receiver<()>,
    socket: Arc<SocketState>,
    remote: Arc<RemoteState>,
    slots: Arc<StreamSlots>,
    /// The purpose that it was opened for.
    purpose: Purpose,
    /// How long the rest of a request may take after its response has ended.
    upload_timeout: Duration,
    endpoint: Option<Arc<Endpoint>>,
    scheme: Scheme,
    /// The host and port of the upstream, for a request that names no host.
    own: Option<Authority>,
}

/// A reserved stream on a connection.
pub(super) struct ReservedStream {
    connection: Arc<Http2Connection>,
    permit: Arc<StreamPermit>,
}

impl Http2Connection {
    /// Performs the HTTP/2 handshake over `stream`. An error means that nothing of a request was sent.
    pub(super) async fn handshake<T: Io>(
        stream: T,
        socket: Arc<SocketState>,
        endpoint: Option<Arc<Endpoint>>,
        (purpose, freed): (Purpose, Arc<Notify>),
        settings: &Settings,
    ) -> Result<Arc<Self>, NotSent> {
        let remote = Arc::new(RemoteState::default());
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_HEAD)
            .max_send_buf_size(WINDOW as usize)
            .handshake(TokioIo::new(FrameFilter::new(stream, Arc::clone(&remote))))
            .await
            .map_err(NotSent::Closed)?;
        let (ending, ended) = watch::channel(());
        let mut has_ended = ended.clone();
        tokio::spawn(async move {
            // Its streams report errors.
            let _ = connection.await;
            drop(ending);
        });
        // A request sent before the SETTINGS could exceed the stream limit, or reach a server without HTTP/2. Over TLS
        // 1.3 this is also the first sign of a refused client certificate.
        tokio::select! {
            biased;
            () = remote.wait_for_settings() => {}
            _ = has_ended.changed() => return Err(NotSent::NoH2),
        }
        let slots = Arc::new(StreamSlots::of(Arc::clone(&socket), freed));
        let scheme = if settings.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
        let (sender, own) = (Mutex::new(Some(sender)), Authority::try_from(settings.authority()).ok());
        let upload_timeout = settings.timeout;
        Ok(Arc::new(Self { sender, ended, socket, remote, slots, purpose, upload_timeout, endpoint, scheme, own }))
    }

    /// Reserves a stream, if one is free.
    pub(super) fn reserve(self: &Arc<Self>, reuse: Reuse) -> Option<ReservedStream> {
        if !self.is_alive() || self.remote.idle_time() >= reuse.longest_idle() {
            return None;
        }
        self.reserve_new()
    }

    /// Reserves a stream on a connection that has just opened.
    pub(super) fn reserve_new(self: &Arc<Self>) -> Option<ReservedStream> {
        let permit = self.slots.acquire(self.stream_limit())?;
        Some(ReservedStream { connection: Arc::clone(self), permit: Arc::new(permit) })
    }

    /// How many streams it may have at a time.
    pub(super) fn stream_limit(&self) -> usize {
        self.remote.stream_limit().min(MAX_STREAMS)
    }

    /// Whether it was opened for requests of this kind.
    pub(super) fn is_for(&self, reuse: Reuse) -> bool {
        self.purpose.reuse == reuse
    }

    /// Whose requests it carries.
    pub(super) fn owner(&self) -> Owner {
        self.purpose.owner
    }

    /// Whether it may accept requests, now or later.
    pub(super) fn is_alive(&self) -> bool {
        !self.remote.is_going_away()
            && !self.socket.has_failed()
            && self.sender().as_ref().is_some_and(|sender| !sender.is_closed())
    }

    /// Whether it has no streams and has been idle for long.
    pub(super) fn is_unused(&self, reuse: Reuse) -> bool {
        self.is_empty() && self.remote.idle_time() >= reuse.longest_idle()
    }

    /// Whether it has no streams.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// A request's target with its scheme and authority (RFC 9113, 8.3.1).
    fn target(&self, request: &Request<Body>) -> Option<Uri> {
        let path = request.uri().path_and_query().cloned();
        let authority = match request.headers().get(HOST) {
            Some(host) if !host.is_empty() => Authority::try_from(host.as_bytes()).ok()?,
            // An empty `Host` (RFC 9112, 3.2) has no equivalent in HTTP/2.
            _ => self.own.clone()?,
        };
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(authority)
            .path_and_query(path.unwrap_or_else(|| PathAndQuery::from_static("/")))
            .build()
            .ok()
    }

    fn sender(&self) -> MutexGuard<'_, Option<SendRequest<TrackedBody>>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ReservedStream {
    fn drop(&mut self) {
        // An upstream that has answered early may still read the rest of the request.
        if Arc::strong_count(&self.permit) > 1 {
            self.permit.outlive_response(self.connection.upload_timeout);
        }
    }
}

impl ReservedStream {
    pub(super) fn endpoint(&self) -> Option<&Endpoint> {
        self.connection.endpoint.as_deref()
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, SendError> {
        let connection = &*self.connection;
        let target = match connection.target(&request) {
            Some(target) => target,
            None => return Err(SendError::Unfit(NotSent::Host)),
        };
        let own_target = request.uri().clone();
        let mut request = request.map(|body| TrackedBody { body, permit: Arc::clone(&self.permit) });
        let host = request.headers().get(HOST).cloned();
        *request.uri_mut() = target;
        for name in [HOST, CONNECTION, TRANSFER_ENCODING, UPGRADE] {
            request.headers_mut().remove(name);
        }
        let back = |request: Request<TrackedBody>| {
            let mut request = request.map(|tracked| tracked.body);
            *request.uri_mut() = own_target;
            if let Some(host) = host {
                request.headers_mut().insert(HOST, host);
            }
            Box::new(request)
        };
        let written = connection.socket.written();
        let sender = connection.sender().clone();
        let Some(mut sender) = sender else { return Err(SendError::Unsent(back(request), NotSent::Ended)) };
        let mut sending = pin!(sender.try_send_request(request));
        let mut ended = connection.ended.clone();
        let answered = tokio::select! {
            biased;
            answered = sending.as_mut() => answered,
            _ = ended.changed() => {
                // As on HTTP/1.1 connections, dropping the last sender returns a request from hyper's closed queue.
                drop(sender);
                *connection.sender() = None;
                sending.await
            }
        };
        let trim = |mut response: Response<Incoming>| {
            *response.headers_mut() = trimmed(std::mem::take(response.headers_mut()));
            response
        };
        answered.map(trim).map_err(|mut refused| {
            if let Some(whole) = refused.take_message() {
                return SendError::Unsent(back(whole), NotSent::Closed(refused.into_error()));
            }
            if let Some(error) = self.permit.body_error().take() {
                return SendError::ClientBody(error);
            }
            // The stream is closed, and nothing was written since.
            if connection.socket.is_closed() && connection.socket.written() == written {
                return SendError::FirstWrite(refused.into_error());
            }
            let error = refused.into_error();
            if is_unprocessed(&error) { SendError::Unprocessed(error) } else { SendError::BrokenOff(error) }
        })
    }
}

/// Whether the upstream refused the request unprocessed (RFC 9113, 8.7).
///
/// Of a GOAWAY, h2 tells those streams alone whose number is above the last that the upstream names, and requests that
/// came after it: the others end as their connection does, without its words. (hyper could hear of it between h2's taking
/// a request and its own next look, but for that both would have to run at the same time; they are tasks of one thread.)
fn is_unprocessed(error: &hyper::Error) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = error.source();
    while let Some(inner) = cause {
        if let Some(error) = inner.downcast_ref::<h2::Error>() {
            let is_refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
            return error.is_remote() && (is_refused || error.is_go_away());
        }
        cause = inner.source();
    }
    false
}

/// A request body that records its error.
struct TrackedBody {
    body: Body,
    permit: Arc<StreamPermit>,
}

impl http_body::Body for TrackedBody {
    type Data = BodyChunk;
    type Error = body::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<BodyChunk>, body::Error>>> {
        if self.permit.is_overdue(cx) {
            return Poll::Ready(Some(Err(body::Error::Abandoned)));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Err(error @ (body::Error::Broken(_) | body::Error::Refused(_)))) => {
                *self.permit.body_error() = Some(error);
                Some(Err(body::Error::Abandoned))
            }
            frame => frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| self.permit.chunk(bytes)))),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
