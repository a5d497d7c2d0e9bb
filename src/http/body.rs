//! The one body type that the gate sends, to clients and to upstreams.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, Sleep, sleep};

use super::fault::Fault;
use super::headers::{without_forbidden_fields, without_names};
use super::http1::ExchangeGuard;
use super::usage::Permit;
use crate::telemetry::metrics::RequestTimer;
use crate::telemetry::report::Report;

/// How many bytes of a complete body are handed to hyper at a time. hyper accepts a frame of any size at once; with
/// small frames, the body ends only when the peer has read nearly all of it.
const CHUNK: usize = 64 << 10;

/// How long the body of an answer waits before it breaks off. hyper drops what it has not written yet when a body fails: without the head of its
/// answer, a client takes the request for one that never arrived, and may send it again by itself.
const BREAK_DELAY: Duration = Duration::from_millis(10);

/// A body to send.
#[derive(Default)]
pub struct Body {
    kind: Kind,
    /// The request that this body answers stays in flight while this exists.
    request: Option<RequestGuard>,
    /// The exchange ends with the body.
    _exchange: Option<ExchangeGuard>,
    /// It breaks off when this is over.
    breaking: Option<Box<(Pin<Box<Sleep>>, Error)>>,
    /// Names that no trailer may have: the gate says itself what they say.
    reserved: Option<Arc<[HeaderName]>>,
}

/// Keeps a request in flight.
struct RequestGuard {
    _permit: Option<Arc<Permit>>,
    _timer: Option<RequestTimer>,
    /// Notified when the body is over.
    report: Option<Report>,
}

#[derive(Default)]
enum Kind {
    #[default]
    Empty,
    Full(Bytes),
    /// Chunked: data if any, then trailers.
    Trailed(Option<Bytes>, Option<HeaderMap>),
    /// Announces a length without sending data: for the `Content-Length` of a 304.
    Announced(u64),
    Relayed(Box<dyn Relayed>),
    Channel(Box<Channel>),
}

/// Why sending a body failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side's message broke off, or is malformed.
    #[error("the message broke off or is malformed: {0}")]
    Broken(#[from] hyper::Error),
    /// The client's message timed out or is malformed.
    #[error("the request is refused: {0}")]
    Refused(#[source] Fault),
    /// The rest of the body is not available any more.
    #[error("the sender gave up")]
    Abandoned,
    /// The temporary file failed.
    #[error("reading back the request body failed: {0}")]
    Spool(#[from] io::Error),
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

    /// No data, with `length` announced: a 304 carries the length of the response that it stands for (RFC 9110, 8.6).
    #[must_use]
    pub fn announced(length: u64) -> Self {
        Kind::Announced(length).into()
    }

    /// Whether it announces a length without sending data.
    #[must_use]
    pub fn is_announced(&self) -> bool {
        matches!(self.kind, Kind::Announced(_))
    }

    /// How many bytes are in memory and wait to be sent.
    pub(super) fn buffered_len(&self) -> usize {
        match &self.kind {
            Kind::Full(bytes) | Kind::Trailed(Some(bytes), _) => bytes.len(),
            _ => 0,
        }
    }

    /// Passes on the frames of another body as they arrive, and reports them to `observer`.
    #[must_use]
    pub fn relay<B, O>(source: B, observer: O) -> Self
    where
        B: HttpBody<Data = Bytes, Error: Into<Error>> + Send + Unpin + 'static,
        O: Observer,
    {
        Kind::Relayed(Box::new(Relay { source, observer })).into()
    }

    /// A body that is fed through the sender. It ends well only by [`Sender::finish`].
    #[must_use]
    pub fn channel() -> (Sender, Self) {
        // One frame waits while another is written: a slow reader must not buffer more.
        let (tx, rx) = mpsc::channel(1);
        (Sender(tx), Kind::Channel(Box::new(Channel { rx, ended: false })).into())
    }

    /// The same body without a known length: it is sent in chunks.
    #[must_use]
    pub fn without_length(self) -> Self {
        match self.kind {
            Kind::Full(bytes) => Self { kind: Kind::Trailed(Some(bytes), None), ..self },
            kind => Self { kind, ..self },
        }
    }

    /// The same body as the answer to a request, which stays in flight until the body is dropped: the connection has
    /// taken all of it, or the client has left.
    #[must_use]
    pub fn with_request_guard(
        self,
        permit: Option<Arc<Permit>>,
        timer: Option<RequestTimer>,
        report: Option<Report>,
    ) -> Self {
        Self { request: Some(RequestGuard { _permit: permit, _timer: timer, report }), ..self }
    }

    /// Drops trailers of these names, where trailers are still to come from elsewhere.
    pub fn drop_trailers(&mut self, reserved: &Arc<[HeaderName]>) {
        if matches!(self.kind, Kind::Relayed(_) | Kind::Channel(_)) {
            self.reserved = Some(Arc::clone(reserved));
        }
    }

    /// The same body, which ends the client's exchange when it is dropped.
    #[must_use]
    pub fn with_exchange_guard(self, exchange: ExchangeGuard) -> Self {
        Self { _exchange: Some(exchange), ..self }
    }
}

impl From<Kind> for Body {
    fn from(kind: Kind) -> Self {
        Self { kind, ..Self::default() }
    }
}

/// Feeds a channel body. Dropping it before [`Sender::finish`] aborts the message.
pub struct Sender(mpsc::Sender<Item>);

enum Item {
    Frame(Frame<Bytes>),
    Finished,
}

/// The receiver of a channel body is gone.
#[derive(Clone, Copy, Debug)]
pub struct Closed;

impl Sender {
    /// Sends a frame; waits while the receiver is behind.
    pub async fn send(&self, frame: Frame<Bytes>) -> Result<(), Closed> {
        self.0.send(Item::Frame(frame)).await.map_err(|_| Closed)
    }

    /// Ends the body well, when the receiver has taken what was sent.
    pub fn finish(self) {
        match self.0.try_send(Item::Finished) {
            // A dropped receiver does not need the end.
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
    pub(super) async fn reserve(&self) -> Result<SendPermit<'_>, Closed> {
        self.0.reserve().await.map(SendPermit).map_err(|_| Closed)
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

/// The right to send one frame without waiting.
pub(super) struct SendPermit<'a>(mpsc::Permit<'a, Item>);

impl SendPermit<'_> {
    pub(super) fn send(self, data: Bytes) {
        self.0.send(Item::Frame(Frame::data(data)));
    }
}

struct Channel {
    rx: mpsc::Receiver<Item>,
    ended: bool,
}

/// How far a body has been transferred.
pub struct Progress(Mutex<(Instant, bool)>);

impl Default for Progress {
    fn default() -> Self {
        Self(Mutex::new((Instant::now(), false)))
    }
}

impl Progress {
    /// When the last frame arrived.
    #[must_use]
    pub fn last(&self) -> Instant {
        self.get().0
    }

    /// Whether the next frame was requested and has not arrived.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
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

impl Observer for Arc<Progress> {
    fn pending(&mut self) {
        self.wait();
    }

    fn received(&mut self, _is_end: bool) {
        self.moved();
    }
}

/// Learns how a relayed body proceeds.
pub trait Observer: Send + 'static {
    /// The next frame was requested and has not arrived.
    fn pending(&mut self) {}

    /// This frame arrived.
    fn frame(&mut self, _frame: &Frame<Bytes>) {}

    /// A frame arrived, or the body ended well.
    fn received(&mut self, is_end: bool);

    /// The body broke off.
    fn broke(&mut self) {}
}

impl Observer for () {
    fn received(&mut self, _is_end: bool) {}
}

struct Relay<B, O> {
    source: B,
    observer: O,
}

/// A relay whose source and observer are erased, so that a body knows neither.
trait Relayed: Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>>;

    fn is_end_stream(&self) -> bool;

    fn size_hint(&self) -> SizeHint;
}

impl<B, O> Relayed for Relay<B, O>
where
    B: HttpBody<Data = Bytes, Error: Into<Error>> + Send + Unpin,
    O: Observer,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.source).poll_frame(cx) else {
            self.observer.pending();
            return Poll::Pending;
        };
        if let Some(Err(_)) = frame {
            self.observer.broke();
        } else {
            if let Some(Ok(frame)) = &frame {
                self.observer.frame(frame);
            }
            let is_end = frame.is_none() || self.source.is_end_stream();
            self.observer.received(is_end);
        }
        Poll::Ready(frame.map(|frame| frame.map(end_to_end).map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.source.size_hint()
    }
}

impl Kind {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self {
            Self::Empty | Self::Announced(_) => Poll::Ready(None),
            Self::Full(bytes) => {
                if bytes.len() > CHUNK {
                    return Poll::Ready(Some(Ok(Frame::data(bytes.split_to(CHUNK)))));
                }
                let bytes = std::mem::take(bytes);
                *self = Self::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Self::Trailed(Some(data), _) if data.len() > CHUNK => {
                Poll::Ready(Some(Ok(Frame::data(data.split_to(CHUNK)))))
            }
            Self::Trailed(data, trailers) => Poll::Ready(match (data.take(), trailers) {
                (Some(data), _) => Some(Ok(Frame::data(data))),
                (None, trailers) => trailers.take().map(|trailers| Ok(Frame::trailers(trailers))),
            }),
            Self::Relayed(relay) => relay.poll(cx),
            Self::Channel(channel) => {
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
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if let Some(breaking) = &mut self.breaking {
            ready!(breaking.0.as_mut().poll(cx));
            return Poll::Ready(self.breaking.take().map(|breaking| Err(breaking.1)));
        }
        let polled = match (self.kind.poll(cx), &self.reserved) {
            (Poll::Ready(Some(Err(error))), _) if self.request.is_some() => {
                self.breaking = Some(Box::new((Box::pin(sleep(BREAK_DELAY)), error)));
                return self.poll_frame(cx);
            }
            (Poll::Ready(Some(Ok(frame))), Some(reserved)) => {
                Poll::Ready(Some(Ok(with_trailers(frame, |trailers| without_names(trailers, reserved)))))
            }
            (polled, _) => polled,
        };
        if let Some(RequestGuard { report: Some(report), .. }) = &mut self.request
            && let Poll::Ready(Some(Ok(frame))) = &polled
        {
            report.sent(frame.data_ref().map_or(0, Bytes::len));
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Empty => true,
            Kind::Trailed(data, trailers) => data.is_none() && trailers.is_none(),
            Kind::Relayed(relay) => relay.is_end_stream(),
            Kind::Full(_) | Kind::Announced(_) | Kind::Channel(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Empty => SizeHint::with_exact(0),
            Kind::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Announced(length) => SizeHint::with_exact(*length),
            Kind::Relayed(relay) => relay.size_hint(),
            Kind::Trailed(..) | Kind::Channel(_) => SizeHint::new(),
        }
    }
}

/// Removes trailers that the gate does not let pass as headers either.
pub(super) fn end_to_end(frame: Frame<Bytes>) -> Frame<Bytes> {
    with_trailers(frame, without_forbidden_fields)
}

/// The frame, with its trailers changed if it has some.
fn with_trailers(frame: Frame<Bytes>, change: impl FnOnce(HeaderMap) -> HeaderMap) -> Frame<Bytes> {
    // A frame is large, and most are data: they are not moved for nothing.
    if frame.is_data() {
        return frame;
    }
    match frame.into_trailers() {
        Ok(trailers) => Frame::trailers(change(trailers)),
        Err(data) => data,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use http::HeaderValue;
    use http_body_util::BodyExt;

    use super::*;
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::outcome::Outcome;

    #[tokio::test]
    async fn a_channel_that_is_not_finished_breaks_off() {
        let (tx, body) = Body::channel();
        tx.send(Frame::data(Bytes::from_static(b"half"))).await.unwrap();
        drop(tx);
        assert!(matches!(body.collect().await, Err(Error::Abandoned)));
    }

    /// hyper drops what it has not written when a body fails: a client that sees no head may send the request again by itself.
    #[tokio::test(start_paused = true)]
    async fn what_came_before_the_break_has_time_to_be_written() {
        let (tx, body) = Body::channel();
        let mut body = body.with_request_guard(None, None, None);
        drop(tx);
        let began = Instant::now();
        assert!(body.frame().now_or_never().is_none(), "it breaks off before its head can be written");
        assert!(matches!(body.frame().await, Some(Err(Error::Abandoned))));
        assert_eq!(began.elapsed(), BREAK_DELAY);
    }

    #[tokio::test]
    async fn trailers_do_not_say_what_the_gate_says_itself() {
        let names = ["idempotency-status", "x-end"].map(HeaderName::from_static);
        let trailers: HeaderMap = names.iter().map(|name| (name.clone(), HeaderValue::from_static("x"))).collect();
        let (tx, mut body) = Body::channel();
        body.drop_trailers(&names[..1].into());
        tx.finish_with(vec![Frame::data(Bytes::from_static(b"all")), Frame::trailers(trailers)]);
        let left = body.collect().await.unwrap().trailers().cloned().unwrap();
        assert_eq!(left.keys().collect::<Vec<_>>(), ["x-end"]);
    }

    #[tokio::test]
    async fn a_channel_that_is_finished_ends_well() {
        let (tx, body) = Body::channel();
        tx.send(Frame::data(Bytes::from_static(b"all"))).await.unwrap();
        tx.finish();
        assert_eq!(body.collect().await.unwrap().to_bytes(), "all");
    }

    #[tokio::test]
    async fn a_large_body_is_sent_in_chunks() {
        let whole: Bytes = (0..=255).cycle().take(2 * CHUNK + 1).collect();
        let mut body = Body::full(whole.clone());
        let (mut taken, mut lengths) = (Vec::new(), Vec::new());
        while let Some(frame) = body.frame().await {
            let data = frame.unwrap().into_data().unwrap();
            taken.extend_from_slice(&data);
            lengths.push(data.len());
            assert_eq!(body.size_hint().exact(), Some((whole.len() - taken.len()) as u64));
        }
        assert_eq!((taken == whole, lengths, body.is_end_stream()), (true, vec![CHUNK, CHUNK, 1], true));
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
        let answer = |body: Body| {
            body.with_request_guard(
                None,
                Some(route.answered(Outcome::Executed, http::StatusCode::OK, Instant::now())),
                None,
            )
        };

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
