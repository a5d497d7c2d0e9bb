//! The one body type that the gate sends, to clients and to upstreams.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::time::Instant;

use super::budget::Taken;
use super::buffer::SpooledReader;
use super::headers::without_ours;
use super::inbound::{self, Inbound};
use super::upstream::Carrier;
use super::wire::{Exchange, Fault};
use crate::telemetry::metrics::RequestTimer;

/// How many bytes of a body that is whole are handed on at a time: hyper takes what it is given at once, and a body has
/// ended only when the other side has read nearly all of it.
const PIECE: usize = 64 << 10;

/// A body to send.
#[derive(Default)]
pub struct Body {
    kind: Kind,
    /// The request that it answers goes on for as long as it is there.
    _request: Option<Ongoing>,
    /// The exchange that ends with it.
    _exchange: Option<Exchange>,
}

/// A request that is being dealt with.
struct Ongoing {
    _taken: Option<Arc<Taken>>,
    _timer: RequestTimer,
}

#[derive(Default)]
enum Kind {
    #[default]
    Empty,
    Full(Bytes),
    /// Chunked: data if any, then trailers.
    Trailed(Option<Bytes>, Option<HeaderMap>),
    /// Announces a length and sends nothing: for the `Content-Length` of a 304.
    Announced(u64),
    Incoming(Box<Relay<Incoming>>),
    Inbound(Box<Relay<Inbound>>),
    Channel(Box<Channel>),
    Spooled(Box<SpooledReader>),
}

/// Why a body broke off while it was sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side's message broke off.
    #[error("the message broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// The client's message is not waited for any longer, or says what it may not.
    #[error("the request is refused: {0}")]
    Refused(#[source] Fault),
    /// The rest cannot be had any more.
    #[error("the sender gave up")]
    Abandoned,
    /// The temporary file failed.
    #[error("reading back the request body failed: {0}")]
    Spool(#[from] io::Error),
}

impl From<inbound::Error> for Error {
    fn from(error: inbound::Error) -> Self {
        match error {
            inbound::Error::Broken(error) => Self::Broken(error),
            inbound::Error::Refused(fault) => Self::Refused(fault),
        }
    }
}

impl Body {
    /// No body.
    #[must_use]
    pub fn empty() -> Self {
        Kind::Empty.into()
    }

    /// These bytes, with their length known.
    #[must_use]
    pub fn full(bytes: Bytes) -> Self {
        if bytes.is_empty() { Self::empty() } else { Kind::Full(bytes).into() }
    }

    /// These bytes and then trailers, in chunks.
    #[must_use]
    pub fn with_trailers(bytes: Bytes, trailers: HeaderMap) -> Self {
        Kind::Trailed(Some(bytes).filter(|bytes| !bytes.is_empty()), Some(trailers)).into()
    }

    /// Nothing, while announcing `length`: what a 304 says of the answer that it stands for (RFC 9110, 8.6).
    #[must_use]
    pub fn announced(length: u64) -> Self {
        Kind::Announced(length).into()
    }

    /// Whether it sends nothing, and announces a length.
    pub(super) fn is_announced(&self) -> bool {
        matches!(self.kind, Kind::Announced(_))
    }

    /// How many bytes of it are in memory already, and wait to be sent.
    pub(super) fn held(&self) -> usize {
        match &self.kind {
            Kind::Full(bytes) | Kind::Trailed(Some(bytes), _) => bytes.len(),
            _ => 0,
        }
    }

    /// What arrives from an upstream, as it arrives. When it has ended well, its connection is given back.
    #[must_use]
    pub fn from_upstream(incoming: Incoming, carrier: Carrier) -> Self {
        // A body that has ended is not polled any more.
        if incoming.is_end_stream() {
            carrier.give_back();
            return Self::empty();
        }
        Kind::Incoming(Box::new(Relay { incoming, end: End::GiveBack(Some(carrier)) })).into()
    }

    /// What arrives from a client, as it arrives. `progress` is told of every frame, and of the end.
    #[must_use]
    pub fn from_client(incoming: Inbound, progress: Arc<Progress>) -> Self {
        if incoming.is_end_stream() {
            return Self::empty();
        }
        Kind::Inbound(Box::new(Relay { incoming, end: End::Tell(progress) })).into()
    }

    /// A body that is fed through the sender. It ends well only by [`Sender::finish`].
    #[must_use]
    pub fn channel() -> (Sender, Self) {
        // One piece waits while another is written: a slow reader is to hold no more.
        let (tx, rx) = mpsc::channel(1);
        (Sender(tx), Kind::Channel(Box::new(Channel { rx, ended: false })).into())
    }

    /// The same, without saying how long it is: in chunks.
    #[must_use]
    pub fn without_length(self) -> Self {
        match self.kind {
            Kind::Full(bytes) => Self { kind: Kind::Trailed(Some(bytes), None), ..self },
            kind => Self { kind, ..self },
        }
    }

    /// The same, as the answer to a request, which ends when this is gone: all of it was given to the connection, or the
    /// client has left.
    #[must_use]
    pub fn of_request(self, taken: Option<Arc<Taken>>, timer: RequestTimer) -> Self {
        Self { _request: Some(Ongoing { _taken: taken, _timer: timer }), ..self }
    }

    /// The same, in whose exchange the client waits for it.
    #[must_use]
    pub fn of_exchange(self, exchange: Exchange) -> Self {
        Self { _exchange: Some(exchange), ..self }
    }

    /// What was spooled to a temporary file.
    #[must_use]
    pub(super) fn spooled(reader: SpooledReader) -> Self {
        Kind::Spooled(Box::new(reader)).into()
    }
}

impl From<Kind> for Body {
    fn from(kind: Kind) -> Self {
        Self { kind, _request: None, _exchange: None }
    }
}

/// Feeds a channel body. Dropped before [`Sender::finish`], it breaks the message off.
pub struct Sender(mpsc::Sender<Item>);

enum Item {
    Frame(Frame<Bytes>),
    Finished,
}

/// The receiver of a channel body is gone.
#[derive(Clone, Copy, Debug)]
pub struct Gone;

impl Sender {
    /// Sends a frame; waits while the receiver is behind.
    pub async fn send(&self, frame: Frame<Bytes>) -> Result<(), Gone> {
        self.0.send(Item::Frame(frame)).await.map_err(|_| Gone)
    }

    /// Ends the body well, when the receiver has taken what was sent.
    pub fn finish(self) {
        match self.0.try_send(Item::Finished) {
            // A receiver that is gone does not need the end.
            Ok(()) | Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(end)) => {
                // It waits as long as the receiver's connection lasts, and for nothing else.
                tokio::spawn(async move { self.0.send(end).await });
            }
        }
    }
}

impl Sender {
    /// Waits until the receiver has room for a frame.
    pub(super) async fn room(&self) -> Result<Room<'_>, Gone> {
        self.0.reserve().await.map(Room).map_err(|_| Gone)
    }

    /// Ends the body well behind these frames, as the receiver takes them.
    pub fn finish_with(self, frames: Vec<Frame<Bytes>>) {
        // It waits as long as the receiver's connection lasts, and for nothing else.
        tokio::spawn(async move {
            for frame in frames {
                if self.send(frame).await.is_err() {
                    return;
                }
            }
            self.finish();
        });
    }
}

/// Room for a frame.
pub(super) struct Room<'a>(mpsc::Permit<'a, Item>);

impl Room<'_> {
    pub(super) fn send(self, data: Bytes) {
        self.0.send(Item::Frame(Frame::data(data)));
    }
}

struct Channel {
    rx: mpsc::Receiver<Item>,
    ended: bool,
}

/// How far a body has come.
pub struct Progress(Mutex<(Instant, bool)>);

impl Default for Progress {
    fn default() -> Self {
        Self(Mutex::new((Instant::now(), false)))
    }
}

impl Progress {
    /// When it last moved.
    #[must_use]
    pub fn last(&self) -> Instant {
        self.get().0
    }

    /// Whether more of it was asked for and has not come.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.get().1
    }

    fn get(&self) -> (Instant, bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn moved(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Instant::now(), false);
    }

    fn wait(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
    }
}

struct Relay<B> {
    incoming: B,
    end: End,
}

/// What moving a body on means to somebody.
enum End {
    GiveBack(Option<Carrier>),
    Tell(Arc<Progress>),
}

impl<B: HttpBody<Data = Bytes, Error: Into<Error>> + Unpin> Relay<B> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) else {
            self.wait();
            return Poll::Pending;
        };
        if !matches!(frame, Some(Err(_))) {
            let ended = frame.is_none() || self.incoming.is_end_stream();
            self.moved(ended);
        }
        Poll::Ready(frame.map(|frame| frame.map(end_to_end).map_err(Into::into)))
    }

    fn wait(&self) {
        if let End::Tell(progress) = &self.end {
            progress.wait();
        }
    }

    fn moved(&mut self, ended: bool) {
        match &mut self.end {
            End::GiveBack(carrier) if ended => {
                if let Some(carrier) = carrier.take() {
                    carrier.give_back_relayed();
                }
            }
            End::GiveBack(_) => {}
            End::Tell(progress) => progress.moved(),
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.kind {
            Kind::Empty | Kind::Announced(_) => Poll::Ready(None),
            Kind::Full(bytes) => {
                if bytes.len() > PIECE {
                    return Poll::Ready(Some(Ok(Frame::data(bytes.split_to(PIECE)))));
                }
                let bytes = std::mem::take(bytes);
                self.kind = Kind::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Kind::Trailed(Some(data), _) if data.len() > PIECE => {
                Poll::Ready(Some(Ok(Frame::data(data.split_to(PIECE)))))
            }
            Kind::Trailed(data, trailers) => Poll::Ready(match (data.take(), trailers) {
                (Some(data), _) => Some(Ok(Frame::data(data))),
                (None, trailers) => trailers.take().map(|trailers| Ok(Frame::trailers(trailers))),
            }),
            Kind::Incoming(relay) => relay.poll(cx),
            Kind::Inbound(relay) => relay.poll(cx),
            Kind::Channel(channel) => {
                if channel.ended {
                    return Poll::Ready(None);
                }
                match ready!(channel.rx.poll_recv(cx)) {
                    Some(Item::Frame(frame)) => Poll::Ready(Some(Ok(frame))),
                    Some(Item::Finished) => {
                        channel.ended = true;
                        Poll::Ready(None)
                    }
                    None => Poll::Ready(Some(Err(Error::Abandoned))),
                }
            }
            Kind::Spooled(reader) => {
                let chunk = ready!(reader.poll_next(cx))?;
                Poll::Ready(chunk.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Empty => true,
            Kind::Trailed(data, trailers) => data.is_none() && trailers.is_none(),
            Kind::Incoming(relay) => relay.incoming.is_end_stream(),
            Kind::Inbound(relay) => relay.incoming.is_end_stream(),
            Kind::Spooled(reader) => reader.remaining() == 0,
            Kind::Full(_) | Kind::Announced(_) | Kind::Channel(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Empty => SizeHint::with_exact(0),
            Kind::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Announced(length) => SizeHint::with_exact(*length),
            Kind::Incoming(relay) => relay.incoming.size_hint(),
            Kind::Inbound(relay) => relay.incoming.size_hint(),
            Kind::Spooled(reader) => SizeHint::with_exact(reader.remaining()),
            Kind::Trailed(..) | Kind::Channel(_) => SizeHint::new(),
        }
    }
}

/// Trailers lose what no header may smuggle past the gate either.
pub(super) fn end_to_end(frame: Frame<Bytes>) -> Frame<Bytes> {
    match frame.into_trailers() {
        Ok(trailers) => Frame::trailers(without_ours(trailers)),
        Err(data) => data,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::outcome::Outcome;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn a_channel_that_is_not_finished_breaks_off() {
        let (tx, body) = Body::channel();
        tx.send(Frame::data(Bytes::from_static(b"half"))).await.unwrap();
        drop(tx);
        assert!(matches!(body.collect().await, Err(Error::Abandoned)));
    }

    #[tokio::test]
    async fn a_channel_that_is_finished_ends_well() {
        let (tx, body) = Body::channel();
        tx.send(Frame::data(Bytes::from_static(b"all"))).await.unwrap();
        tx.finish();
        assert_eq!(body.collect().await.unwrap().to_bytes(), "all");
    }

    #[tokio::test]
    async fn a_large_body_is_handed_on_in_pieces() {
        let whole: Bytes = (0..=255).cycle().take(2 * PIECE + 1).collect();
        let mut body = Body::full(whole.clone());
        let (mut taken, mut lengths) = (Vec::new(), Vec::new());
        while let Some(frame) = body.frame().await {
            let data = frame.unwrap().into_data().unwrap();
            taken.extend_from_slice(&data);
            lengths.push(data.len());
            assert_eq!(body.size_hint().exact(), Some((whole.len() - taken.len()) as u64));
        }
        assert_eq!((taken == whole, lengths, body.is_end_stream()), (true, vec![PIECE, PIECE, 1], true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_lasts_until_the_last_byte_of_its_answer() {
        let metrics = Metrics::new();
        let route = metrics.route("a");
        let took = |metrics: &Metrics| {
            let text = metrics.encode();
            let of = |end: &str| {
                let name = format!("oncegate_request_duration_seconds_{end}{{outcome=\"executed\",route=\"a\"}} ");
                text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap_or_default()
            };
            (of("count"), of("sum"))
        };
        let answer = |body: Body| body.of_request(None, route.answered(Outcome::Executed, Instant::now()));

        let (tx, body) = Body::channel();
        let mut body = answer(body);
        let counted = "oncegate_requests_total{outcome=\"executed\",route=\"a\"} 1\n";
        assert!(metrics.encode().contains(counted), "a request counts when its answer begins");
        for _ in 0..2 {
            tokio::time::advance(Duration::from_secs(1)).await;
            tx.send(Frame::data(Bytes::from_static(b"x"))).await.unwrap();
            body.frame().await.unwrap().unwrap();
        }
        assert_eq!(took(&metrics), (0.0, 0.0));
        tokio::time::advance(Duration::from_secs(1)).await;
        tx.finish();
        assert!(body.frame().await.is_none());
        drop(body);
        assert_eq!(took(&metrics), (1.0, 3.0));

        // A client that leaves ends it too.
        let (_tx, body) = Body::channel();
        let body = answer(body);
        tokio::time::advance(Duration::from_secs(4)).await;
        drop(body);
        assert_eq!(took(&metrics), (2.0, 7.0));
    }

    #[tokio::test]
    async fn trailers_follow_the_data() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", http::HeaderValue::from_static("1"));
        let collected = Body::with_trailers(Bytes::from_static(b"x"), trailers).collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["x-sum"], "1");
        assert_eq!(collected.to_bytes(), "x");
    }
}
