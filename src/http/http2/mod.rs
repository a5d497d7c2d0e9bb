//! Serves connections of HTTP/2 (RFC 9113).
//!
//! The h2 crate parses frames and enforces the standard. `strict` refuses what HTTP/2 allows in a request and HTTP/1.1 does
//! not, because the upstream may speak HTTP/1.1. `stream_tracker` tracks the streams of a connection, and resets those whose
//! client accepts no data. `client_io` sits between h2 and the client's socket. There, `frame_parser` parses the input:
//! `frame_rate` limits useless frames, `path_filter` refuses targets that the crates would change, and `trailer_filter`
//! trailers of which they would drop a part.

mod chunked_body;
mod client_io;
mod frame_parser;
mod frame_rate;
mod path_filter;
mod stream_tracker;
mod strict;
mod trailer_filter;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::timeout;

use self::chunked_body::ChunkedBody;
use self::client_io::{ClientIo, ClosedSocket};
use self::stream_tracker::{CloseReason, StreamTracker};
use self::trailer_filter::{MAX_FRAME, MIN_HEADER_LIST};
use super::body::Body;
use super::connection_memory::{ConnectionMemory, UnreadResponse};
use super::limits::Limits;
use super::request_body::RequestBody;
use super::rewind::Rewind;
use super::server::{Current, FIRST_REQUEST_GRACE, Handler, MalformedHead, Peer, until_stopped};
use super::usage::Usage;

/// The maximum number of concurrent streams of a connection.
const MAX_STREAMS: u32 = 100;

/// The flow control windows of a stream and of a connection, in bytes.
///
/// h2 derives from the second its limit on the overhead of small buffered frames, half of it, and closes the
/// connection above the limit. This leaves room for a stream full of 5-byte messages, the smallest of gRPC.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// The send buffer of a stream, in bytes.
const SEND_BUFFER: usize = 16 << 10;

/// How many streams a client may reset before they are accepted, and how many the gate may reset for errors, before
/// the connection ends.
const MAX_PENDING_RESETS: usize = 200;
const MAX_ERROR_RESETS: usize = 100;

/// The interval of keepalive pings, and the timeout for the reply.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a connection may stay open after GOAWAY without output.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves a connection until it ends, is idle for too long, or `stop` turns true and its streams have ended. `read`
/// holds the preface and any further input.
pub(super) async fn serve<S, H>(
    io: S,
    read: BytesMut,
    peer: Peer,
    current: Current<H>,
    (limits, usage): (Limits, Arc<Usage>),
    mut stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let (limits, peer_ip) = (Arc::new(limits), peer.ip);
    let streams = StreamTracker::new(&limits, &usage);
    let memory = ConnectionMemory::new(&limits, &usage);
    let peer = Peer { connection_memory: Some(Arc::clone(&memory)), ..peer };
    let end = ClosedSocket::new();
    let io = Rewind::new(io, read);
    let io = ClientIo::new(io, &limits, Arc::clone(&usage), Arc::clone(&streams), end.share());
    let last_write = io.last_write();
    {
        let (own_limits, own_usage, starting) = (Arc::clone(&limits), Arc::clone(&usage), Arc::clone(&streams));
        let service = service_fn(move |request: Request<Incoming>| {
            let handler = Arc::clone(&current.load().handler);
            let (progress, peer) = (starting.start_stream(), peer.clone());
            let (limits, usage) = (Arc::clone(&own_limits), Arc::clone(&own_usage));
            let unread = UnreadResponse::new(Arc::clone(&memory));
            // Boxed, because it is large and moved several times before it is spawned.
            Box::pin(async move {
                let is_head = request.method() == Method::HEAD;
                let response = answer(handler, request, peer, (limits, usage)).await;
                let response = if is_head { without_body(response) } else { response };
                Ok::<_, Infallible>(response.map(|body| ChunkedBody::new(body, progress, unread)))
            })
        });
        let connection = builder(&limits, Arc::clone(&streams)).serve_connection(TokioIo::new(io), service);
        let mut connection = pin!(connection);
        let reason = {
            let mut going = pin!(streams.run_until_close(connection.as_mut()));
            match until_stopped(going.as_mut(), &mut stop).await {
                Some(reason) => reason,
                // A client that has just connected is about to send a request.
                None if !streams.has_begun() => {
                    timeout(FIRST_REQUEST_GRACE, going).await.unwrap_or(CloseReason::Stopped)
                }
                None => CloseReason::Stopped,
            }
        };
        match reason {
            CloseReason::Ended | CloseReason::Stopped | CloseReason::Flooded => {}
            CloseReason::Broken(reason) => usage.broken_http2(peer_ip, reason),
            CloseReason::Idle(limit) => usage.exceeded(limit),
        }
        if !matches!(reason, CloseReason::Ended | CloseReason::Broken(_)) {
            // The client gets a GOAWAY. Open streams continue to their end.
            connection.as_mut().graceful_shutdown();
            streams.drain(connection, &last_write, DRAIN_TIMEOUT).await;
        }
    }
    end.linger(DRAIN_TIMEOUT).await;
}

async fn answer<H: Handler>(
    handler: Arc<H>,
    request: Request<Incoming>,
    peer: Peer,
    (limits, usage): (Arc<Limits>, Arc<Usage>),
) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    match strict::judge(&mut parts, &limits) {
        Ok(()) => {
            let body = RequestBody::of_stream(body, limits, usage);
            handler.handle(Request::from_parts(parts, body), peer).await
        }
        Err(fault) => {
            fault.limit().into_iter().for_each(|limit| usage.exceeded(limit));
            handler.refuse(fault, MalformedHead::Head(&parts), &peer)
        }
    }
}

/// Removes the body of a response to HEAD, which hyper would send.
fn without_body(response: Response<Body>) -> Response<Body> {
    use http_body::Body as _;
    response.map(|body| body.size_hint().exact().map_or_else(Body::empty, Body::announced))
}

fn builder(limits: &Limits, streams: Arc<StreamTracker>) -> http2::Builder<stream_tracker::StreamExecutor> {
    let mut builder = http2::Builder::new(stream_tracker::StreamExecutor(streams));
    builder
        .timer(TokioTimer::new())
        // An answer is the upstream's: a date that it does not have is not made up.
        .auto_date_header(false)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_ERROR_RESETS)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(u32::try_from(limits.max_header_size.max(MIN_HEADER_LIST)).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT.max(limits.body_timeout));
    builder
}
