//! Serves connections of HTTP/2 (RFC 9113).
//!
//! The frames are the h2 crate's, which refuses what the standard refuses. `strict` judges what a request of HTTP/2 may
//! say and one of HTTP/1.1 may not, for the upstream may speak that. `exchanges` knows what goes on in the streams of a
//! connection, and gives up those whose client takes nothing. `socket` lies between the crate and the client. `frames` takes
//! apart what comes there: `floods` counts what leads nowhere, and `targets` has those refused that the crates would change.

mod exchanges;
mod floods;
mod frames;
mod pieces;
mod socket;
mod strict;
mod targets;

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

use self::exchanges::{Exchanges, Over};
use self::pieces::Pieces;
use self::socket::{End, Socket};
use super::body::Body;
use super::inbound::Inbound;
use super::limits::Limits;
use super::rewound::Rewound;
use super::server::{Current, FIRST_REQUEST, Handler, Peer, until_stopped};
use super::share::{Share, Waiting};
use super::usage::Usage;

/// How many requests of a connection are dealt with at a time.
const STREAMS: u32 = 100;

/// How many bytes of a body a client may send ahead, in a stream and in all streams of a connection.
///
/// By the second h2 bounds what small pieces that wait cost beside their bytes, at half as many, and ends the connection
/// beyond: it leaves room for a stream that is full of messages of 5 bytes each, the least of gRPC.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// How many bytes of an answer wait to be written, in a stream.
const SEND_BUFFER: usize = 16 << 10;

/// How many streams a client may reset before anybody has looked at them, and how many the gate resets for what is wrong
/// with them. Then the connection ends.
const RESETS_UNSEEN: usize = 20;
const RESETS_FOR_FAULTS: usize = 100;

/// How often a client is asked whether it is still there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);

/// How long a client that was told to leave may take, once nothing more is on its way to it.
const LEAVING: Duration = Duration::from_secs(2);

/// Serves one connection of a client, which has sent the preface and perhaps more (`read`), until it ends, is idle for too
/// long, or `stop` turns true and its exchanges have ended.
pub(super) async fn serve<S, H>(
    socket: S,
    read: BytesMut,
    peer: Peer,
    current: Current<H>,
    (limits, usage): (Limits, Arc<Usage>),
    mut stop: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    H: Handler,
{
    let limits = Arc::new(limits);
    let exchanges = Exchanges::new(&limits, &usage);
    let share = Share::new(&limits, &usage);
    let peer = Peer { share: Some(Arc::clone(&share)), ..peer };
    let end = End::new();
    let socket = Rewound::new(socket, read);
    let socket = Socket::new(socket, &limits, Arc::clone(&usage), Arc::clone(&exchanges), end.share());
    let moved = socket.moved();
    {
        let (own_limits, own_usage, beginning) = (Arc::clone(&limits), Arc::clone(&usage), Arc::clone(&exchanges));
        let service = service_fn(move |request: Request<Incoming>| {
            let handler = Arc::clone(&current.load().handler);
            let (taking, peer) = (beginning.begin(), peer.clone());
            let (limits, usage) = (Arc::clone(&own_limits), Arc::clone(&own_usage));
            let waiting = Waiting::new(Arc::clone(&share));
            // In a box: it is large, and moved from hand to hand until it is a task of its own.
            Box::pin(async move {
                let is_head = request.method() == Method::HEAD;
                let response = answer(handler, request, peer, (limits, usage)).await;
                let response = if is_head { without_body(response) } else { response };
                Ok::<_, Infallible>(response.map(|body| Pieces::new(body, taking, waiting)))
            })
        });
        let connection = builder(&limits, Arc::clone(&exchanges)).serve_connection(TokioIo::new(socket), service);
        let mut connection = pin!(connection);
        let over = {
            let mut going = pin!(exchanges.or_over(connection.as_mut()));
            match until_stopped(going.as_mut(), &mut stop).await {
                Some(over) => over,
                // Who has just connected is on the way with a request.
                None if !exchanges.has_begun() => timeout(FIRST_REQUEST, going).await.unwrap_or(Over::Stopped),
                None => Over::Stopped,
            }
        };
        match over {
            Over::Ended | Over::Stopped => {}
            Over::Idle(limit) => usage.exceeded(limit),
            Over::Flooded => tracing::debug!("a client sent so much that led nowhere that its connection ends"),
        }
        if over != Over::Ended {
            // It is told to leave, and all that has begun goes on to its end.
            connection.as_mut().graceful_shutdown();
            exchanges.or_left(connection, &moved, LEAVING).await;
        }
    }
    end.linger(LEAVING).await;
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
            let body = Inbound::of_stream(body, limits, usage);
            handler.handle(Request::from_parts(parts, body), peer).await
        }
        Err(fault) => {
            fault.limit().into_iter().for_each(|limit| usage.exceeded(limit));
            handler.refuse(fault, Some(&parts))
        }
    }
}

/// The answer to HEAD, of which hyper would send the body.
fn without_body(response: Response<Body>) -> Response<Body> {
    use http_body::Body as _;
    response.map(|body| body.size_hint().exact().map_or_else(Body::empty, Body::announced))
}

fn builder(limits: &Limits, exchanges: Arc<Exchanges>) -> http2::Builder<exchanges::Streams> {
    let mut builder = http2::Builder::new(exchanges::Streams(exchanges));
    builder
        .timer(TokioTimer::new())
        // An answer is the upstream's: a date that it does not have is not made up.
        .auto_date_header(false)
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(RESETS_UNSEEN)
        .max_local_error_reset_streams(RESETS_FOR_FAULTS)
        .max_header_list_size(u32::try_from(limits.max_header_size).unwrap_or(u32::MAX))
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG.max(limits.body_timeout));
    builder
}
