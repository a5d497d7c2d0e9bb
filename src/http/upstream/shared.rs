//! HTTP/2 connections to an upstream, each of which carries many requests at a time.

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

use super::connection::Refused;
use super::frames::Frames;
use super::heard::Heard;
use super::load::{Load, Piece, Room};
use super::origin::Origin;
use super::owner::{Owner, Purpose};
use super::stream::Wire;
use super::{Io, NotSent, Reuse, Settings};
use crate::http::body::{self, Body};

/// Most requests on a connection at a time, however many the upstream takes.
const MOST_STREAMS: usize = 100;

/// How much of an answer is read ahead, in bytes.
const WINDOW: u32 = 128 << 10;

/// The same of all answers on a connection: more than there can be, so that those that nobody reads hold up no others.
///
/// By this h2 bounds what small pieces that wait cost beside their bytes, at half as many, and ends the connection beyond,
/// with all that is under way on it: clients that do not take what an upstream streams in messages of a few bytes each must
/// be many for that.
const CONNECTION_WINDOW: u32 = 256 << 20;

/// Most bytes of an answer's header lines.
const LARGEST_HEAD: u32 = 256 << 10;

/// An open connection. It closes when it has no requests and nobody can give it any.
pub(super) struct Shared {
    /// Nothing once it takes no more.
    sender: Mutex<Option<SendRequest<Watched>>>,
    /// Nobody reads from the sender any more once the other side is gone.
    ended: watch::Receiver<()>,
    wire: Arc<Wire>,
    heard: Arc<Heard>,
    load: Arc<Load>,
    /// What it was opened for.
    carries: Purpose,
    /// How long the rest of a request may take once its answer has ended.
    patience: Duration,
    origin: Option<Arc<Origin>>,
    scheme: Scheme,
    /// The host and port of the upstream, for a request that names no host.
    own: Option<Authority>,
}

/// Room for one request on a connection.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    room: Arc<Room>,
}

impl Shared {
    /// Agrees with the upstream on HTTP/2 over `stream`. An error means that nothing of a request was sent.
    pub(super) async fn over<T: Io>(
        stream: T,
        wire: Arc<Wire>,
        origin: Option<Arc<Origin>>,
        (carries, freed): (Purpose, Arc<Notify>),
        settings: &Settings,
    ) -> Result<Arc<Self>, NotSent> {
        let heard = Arc::new(Heard::default());
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(LARGEST_HEAD)
            .max_send_buf_size(WINDOW as usize)
            .handshake(TokioIo::new(Frames::new(stream, Arc::clone(&heard))))
            .await
            .map_err(NotSent::Closed)?;
        let (ending, ended) = watch::channel(());
        let mut has_ended = ended.clone();
        tokio::spawn(async move {
            // How it ended shows at each of the requests.
            let _ = connection.await;
            drop(ending);
        });
        // A request that is written before could be refused for its number, or read by something that is no HTTP/2; and
        // over TLS 1.3 this is the first that is heard of a client certificate that was refused.
        tokio::select! {
            biased;
            () = heard.greeting() => {}
            _ = has_ended.changed() => return Err(NotSent::NoH2),
        }
        let load = Arc::new(Load::of(Arc::clone(&wire), freed));
        let scheme = if settings.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
        let (sender, own) = (Mutex::new(Some(sender)), Authority::try_from(settings.authority()).ok());
        let patience = settings.timeout;
        Ok(Arc::new(Self { sender, ended, wire, heard, load, carries, patience, origin, scheme, own }))
    }

    /// Room for a request, where there is any.
    pub(super) fn join(self: &Arc<Self>, reuse: Reuse) -> Option<Ticket> {
        if !self.is_alive() || self.heard.silence() >= reuse.longest_idle() {
            return None;
        }
        self.join_new()
    }

    /// The same on a connection that has just opened.
    pub(super) fn join_new(self: &Arc<Self>) -> Option<Ticket> {
        let room = self.load.take(self.heard.most_streams().min(MOST_STREAMS))?;
        Some(Ticket { shared: Arc::clone(self), room: Arc::new(room) })
    }

    /// Whether it was opened for requests of this kind.
    pub(super) fn is_for(&self, reuse: Reuse) -> bool {
        self.carries.reuse == reuse
    }

    /// Whose requests it carries.
    pub(super) fn owner(&self) -> Owner {
        self.carries.owner
    }

    /// Whether another request can come to it, now or later.
    pub(super) fn is_alive(&self) -> bool {
        !self.heard.says_goodbye()
            && !self.wire.has_failed()
            && self.sender().as_ref().is_some_and(|sender| !sender.is_closed())
    }

    /// Whether it carries nothing, and has carried nothing for long.
    pub(super) fn is_unused(&self, reuse: Reuse) -> bool {
        self.is_empty() && self.heard.silence() >= reuse.longest_idle()
    }

    /// Whether it carries nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.load.is_empty()
    }

    /// A request's target with its scheme and authority (RFC 9113, 8.3.1).
    fn target(&self, request: &Request<Body>) -> Option<Uri> {
        let path = request.uri().path_and_query().cloned();
        let authority = match request.headers().get(HOST) {
            Some(host) if !host.is_empty() => Authority::try_from(host.as_bytes()).ok()?,
            // It names none (RFC 9112, 3.2), and HTTP/2 has no words for that.
            _ => self.own.clone()?,
        };
        Uri::builder()
            .scheme(self.scheme.clone())
            .authority(authority)
            .path_and_query(path.unwrap_or_else(|| PathAndQuery::from_static("/")))
            .build()
            .ok()
    }

    fn sender(&self) -> MutexGuard<'_, Option<SendRequest<Watched>>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // An upstream that has answered early may still read the request, all of which it is to get.
        if Arc::strong_count(&self.room) > 1 {
            self.room.outlives_answer(self.shared.patience);
        }
    }
}

impl Ticket {
    pub(super) fn origin(&self) -> Option<&Origin> {
        self.shared.origin.as_deref()
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, Refused> {
        let shared = &*self.shared;
        let target = match shared.target(&request) {
            Some(target) => target,
            None => return Err(Refused::Unfit(NotSent::Host)),
        };
        let own_target = request.uri().clone();
        let mut request = request.map(|body| Watched { body, room: Arc::clone(&self.room) });
        let host = request.headers().get(HOST).cloned();
        *request.uri_mut() = target;
        for name in [HOST, CONNECTION, TRANSFER_ENCODING, UPGRADE] {
            request.headers_mut().remove(name);
        }
        let back = |request: Request<Watched>| {
            let mut request = request.map(|watched| watched.body);
            *request.uri_mut() = own_target;
            if let Some(host) = host {
                request.headers_mut().insert(HOST, host);
            }
            Box::new(request)
        };
        let written = shared.wire.written();
        let sender = shared.sender().clone();
        let Some(mut sender) = sender else { return Err(Refused::Unsent(back(request), NotSent::Ended)) };
        let mut sending = pin!(sender.try_send_request(request));
        let mut ended = shared.ended.clone();
        let answered = tokio::select! {
            biased;
            answered = sending.as_mut() => answered,
            _ = ended.changed() => {
                // As on connections that carry one request at a time: what lies in a queue that nobody reads comes back
                // when the last way into it is gone.
                drop(sender);
                *shared.sender() = None;
                sending.await
            }
        };
        answered.map_err(|mut refused| {
            if let Some(whole) = refused.take_message() {
                return Refused::Unsent(back(whole), NotSent::Closed(refused.into_error()));
            }
            if let Some(error) = self.room.broken().take() {
                return Refused::ClientBody(error);
            }
            // Nothing can be written any more, and nothing was since.
            if shared.wire.is_closed() && shared.wire.written() == written {
                return Refused::FirstWrite(refused.into_error());
            }
            let error = refused.into_error();
            if is_unprocessed(&error) { Refused::Unprocessed(error) } else { Refused::BrokenOff(error) }
        })
    }
}

/// Whether the upstream has said that it did nothing about the request (RFC 9113, 8.7).
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

/// A request's body that tells how it broke off.
struct Watched {
    body: Body,
    room: Arc<Room>,
}

impl http_body::Body for Watched {
    type Data = Piece;
    type Error = body::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Piece>, body::Error>>> {
        if self.room.is_overdue(cx) {
            return Poll::Ready(Some(Err(body::Error::Abandoned)));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Err(error @ (body::Error::Broken(_) | body::Error::Refused(_)))) => {
                *self.room.broken() = Some(error);
                Some(Err(body::Error::Abandoned))
            }
            frame => frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| self.room.piece(bytes)))),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
