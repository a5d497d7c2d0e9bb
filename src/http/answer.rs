//! The answer of a protected request: buffered whole, up to the size that may be stored, streamed to its client meanwhile
//! where that is allowed, and made a response again on replays.

use std::mem;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Method, Response, StatusCode, Version};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use tokio::time::{Instant, timeout, timeout_at};

use super::body::{Body, Closed, Sender, end_to_end};
use super::headers::announce_trailers;
use super::usage::{Account, CountedBuffer, Permit, UNCOUNTED_BODY};
use crate::idempotency::codec::{Answer, Content};

/// The largest chunk that is copied for a client at a time, in bytes.
const TEE_CHUNK: usize = 64 << 10;

/// The body of a response, as far as it was buffered.
pub enum Captured {
    /// All of it.
    Whole {
        /// Its bytes.
        body: Bytes,
        /// The trailers that followed it, as they came.
        trailers: Option<HeaderMap>,
        /// A permit for the same amount of memory, for its record. Small bodies have none.
        record: Option<Permit>,
    },
    /// It is larger than the limit or than the memory budget.
    TooLarge(PartialBody),
    /// It was truncated.
    Truncated,
}

/// A body that was buffered in part.
pub struct PartialBody {
    /// The bytes that were read.
    read: [Bytes; 2],
    incoming: Incoming,
    version: Version,
}

/// Reads a body to its end, or until it exceeds `limit` bytes or the memory budget.
///
/// With a `tee`, its client gets what comes meanwhile. Data of an answer whose `status` has no content are dropped.
pub async fn capture(
    mut incoming: Incoming,
    (version, status): (Version, StatusCode),
    limit: u64,
    memory: Account<'_>,
    mut tee: Option<TeeHandle<'_>>,
) -> hyper::Result<Captured> {
    // To HEAD, a length is announced that does not come.
    let has_none = incoming.is_end_stream() || !may_have_content(status);
    let announced = if has_none { 0 } else { incoming.size_hint().lower() };
    if announced > limit {
        return Ok(Captured::TooLarge(PartialBody { read: Default::default(), incoming, version }));
    }
    // One copy goes to the client, one to the record.
    let mut buffer = CountedBuffer::for_answer(memory, UNCOUNTED_BODY, usize::try_from(announced).unwrap_or(0));
    let mut trailers = None;
    while let Some(frame) = next(&mut incoming, &buffer, &mut tee).await {
        let data = match frame?.into_data() {
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok();
                continue;
            }
        };
        if data.is_empty() || !may_have_content(status) {
            continue;
        }
        if let Some(handle) = &mut tee {
            handle.advance(buffer.len());
        }
        let is_larger = (buffer.len() + data.len()) as u64 > limit;
        let unplaced = if is_larger { Some(data) } else { buffer.push(data).err() };
        if let Some(data) = unplaced {
            let buffer = buffer.take().0;
            let sent = tee.map_or(0, |handle| handle.tee.sent);
            return Ok(Captured::TooLarge(PartialBody { read: [buffer.slice(sent..), data], incoming, version }));
        }
    }
    if is_truncated(&incoming, version) {
        return Ok(Captured::Truncated);
    }
    let (body, record) = buffer.take();
    Ok(Captured::Whole { body, trailers, record })
}

/// Whether a body that has no more frames was cut off: hyper reports an HTTP/2 stream that is reset without an error as ended.
fn is_truncated(incoming: &Incoming, version: Version) -> bool {
    version == Version::HTTP_2 && !incoming.is_end_stream()
}

/// The next frame. While it is awaited, the client gets the data that is available.
async fn next(
    incoming: &mut Incoming,
    buffer: &CountedBuffer<'_>,
    tee: &mut Option<TeeHandle<'_>>,
) -> Option<hyper::Result<Frame<Bytes>>> {
    let Some(TeeHandle { tee, .. }) = tee else { return incoming.frame().await };
    while tee.has_more() {
        tokio::select! {
            biased;
            () = tee.send_next(buffer) => {}
            frame = incoming.frame() => return frame,
        }
    }
    incoming.frame().await
}

/// How relaying a large response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relayed {
    /// Completely.
    Whole,
    /// Before the end: the upstream failed or stalled, or the deadline passed after the client had left.
    Truncated,
}

/// Time limits for relaying a large response.
#[derive(Clone, Copy, Debug)]
pub struct RelayLimits {
    /// Longest pause of the upstream.
    pub stall: Duration,
    /// Longest pause of the client, after which it counts as gone.
    pub client: Duration,
    /// Until when the upstream is read once the client is gone.
    pub deadline: Instant,
}

impl PartialBody {
    /// Relays all of the body to `client`. After the client has left, reads on and discards the data, so that the
    /// upstream can finish.
    pub async fn relay(mut self, mut client: Option<Sender>, limits: RelayLimits) -> Relayed {
        for read in self.read() {
            deliver(&mut client, read, limits.client).await;
        }
        loop {
            match self.next(client.is_some(), &limits).await {
                Next::Frame(frame) => deliver(&mut client, frame, limits.client).await,
                Next::End => break,
                Next::Cut => return Relayed::Truncated,
            }
        }
        if let Some(client) = client {
            client.finish();
        }
        Relayed::Whole
    }

    /// The same but for the last frame, which may be the end of the answer; nothing where it is truncated.
    pub async fn relay_but_end(mut self, mut client: Option<Sender>, limits: RelayLimits) -> Option<Withheld> {
        let mut last = None;
        for read in self.read() {
            if let Some(frame) = last.replace(read) {
                deliver(&mut client, frame, limits.client).await;
            }
        }
        loop {
            match self.next(client.is_some(), &limits).await {
                Next::Frame(next) => {
                    if let Some(frame) = last.replace(next) {
                        deliver(&mut client, frame, limits.client).await;
                    }
                }
                Next::End => return Some(Withheld { client, last, patience: limits.client }),
                Next::Cut => return None,
            }
        }
    }

    /// What was read before.
    fn read(&mut self) -> impl Iterator<Item = Frame<Bytes>> + use<> {
        mem::take(&mut self.read).into_iter().filter(|read| !read.is_empty()).map(Frame::data)
    }

    async fn next(&mut self, has_client: bool, limits: &RelayLimits) -> Next {
        let stalled = Instant::now() + limits.stall;
        let until = if has_client { stalled } else { stalled.min(limits.deadline) };
        match timeout_at(until, self.incoming.frame()).await {
            Ok(Some(Ok(frame))) => Next::Frame(end_to_end(frame)),
            Ok(None) if is_truncated(&self.incoming, self.version) => Next::Cut,
            Ok(None) => Next::End,
            Ok(Some(Err(_))) | Err(_) => Next::Cut,
        }
    }
}

/// What comes next of a body.
enum Next {
    Frame(Frame<Bytes>),
    End,
    Cut,
}

/// The last frame of a body, which its client waits for. Where this is dropped, the body breaks off.
pub struct Withheld {
    client: Option<Sender>,
    last: Option<Frame<Bytes>>,
    patience: Duration,
}

impl Withheld {
    /// Gives it to the client.
    pub async fn finish(mut self) {
        if let Some(last) = self.last {
            deliver(&mut self.client, last, self.patience).await;
        }
        if let Some(client) = self.client {
            client.finish();
        }
    }
}

async fn deliver(client: &mut Option<Sender>, frame: Frame<Bytes>, patience: Duration) {
    if let Some(sender) = client
        && !matches!(timeout(patience, sender.send(frame)).await, Ok(Ok(())))
    {
        *client = None;
    }
}

/// How much of a response its client has received, while more is still to come.
///
/// The client never gets the frame that arrived last, which may be the end. It gets copies of the buffered data at its
/// own pace, so a slow reader takes no additional memory and delays no other client.
#[derive(Default)]
pub struct ResponseTee {
    sender: Option<Sender>,
    has_begun: bool,
    /// How many bytes the client was sent.
    sent: usize,
    /// How many bytes may be sent to it.
    available: usize,
}

/// A tee that may start.
pub struct TeeHandle<'a> {
    /// Its state outlives the buffering.
    pub tee: &'a mut ResponseTee,
    /// It starts only once more than this many bytes are there.
    pub held_back: usize,
    /// Gives the client the head of the answer, with this body.
    pub begin: &'a mut (dyn FnMut(Body) + Send),
}

impl TeeHandle<'_> {
    /// Another frame arrived behind this many bytes, which may now be sent to the client.
    fn advance(&mut self, buffered: usize) {
        let tee = &mut *self.tee;
        if buffered <= self.held_back && !tee.has_begun {
            return;
        }
        tee.available = buffered;
        if !tee.has_begun {
            let (sender, body) = Body::channel();
            tee.sender = Some(sender);
            tee.has_begun = true;
            (self.begin)(body);
        }
    }
}

impl ResponseTee {
    /// Whether the client has the head of the answer.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether data is available that the client was not sent.
    fn has_more(&self) -> bool {
        self.sender.is_some() && self.sent < self.available
    }

    /// Sends the client a chunk when it has room for one. Cancelled while it waits, it has sent nothing.
    async fn send_next(&mut self, buffer: &CountedBuffer<'_>) {
        let Some(sender) = &self.sender else { return };
        let end = self.available.min(self.sent + TEE_CHUNK);
        let sent_chunk = sender.reserve().await.map(|permit| permit.send(buffer.copy(self.sent..end)));
        match sent_chunk {
            Ok(()) => self.sent = end,
            // The client is gone. Buffering continues.
            Err(Closed) => self.sender = None,
        }
    }

    /// Sends the client the rest of `body`, and `trailers`.
    pub fn finish(self, body: &Bytes, trailers: Option<HeaderMap>) {
        let Some(sender) = self.sender else { return };
        let rest = Some(body.slice(self.sent..)).filter(|rest| !rest.is_empty()).map(Frame::data);
        sender.finish_with(rest.into_iter().chain(trailers.map(Frame::trailers)).collect());
    }

    /// The sender to the client for the rest of the response, if the tee has started.
    #[must_use]
    pub fn into_sender(self) -> Option<Sender> {
        self.sender
    }
}

/// The response of an answer to a request with this method, over this version. A tombstone gives an empty body. Every
/// protected answer reaches its client this way, the first time and on replays.
#[must_use]
pub fn response(answer: &Answer, method: &Method, version: Version) -> Response<Body> {
    let has_trailers = has_trailers(answer, method);
    // HTTP/1 sends trailers only in chunks, which have no length, and only where they are announced. Taking the length out
    // afterwards would change the order.
    let is_chunked = has_trailers && version < Version::HTTP_2;
    let mut headers = HeaderMap::with_capacity(answer.headers.len() + 4);
    let has_length = !is_chunked && may_have_length(answer.status);
    headers.extend(answer.headers.iter().filter(|(name, _)| has_length || *name != CONTENT_LENGTH).cloned());
    let body = match &answer.content {
        Some(content) if has_trailers => with_trailers(content, is_chunked.then_some(&mut headers)),
        Some(content) => match announced_length(answer.status, &headers) {
            Some(length) => Body::announced(length),
            None => Body::full(content.body.clone()),
        },
        None => Body::empty(),
    };
    let mut response = Response::new(body);
    *response.status_mut() = answer.status;
    *response.headers_mut() = headers;
    if let Some(reason) = answer.reason.as_ref().and_then(|bytes| ReasonPhrase::try_from(bytes.clone()).ok()) {
        response.extensions_mut().insert(reason);
    }
    response
}

/// Whether an answer with this status may have content (RFC 9110, 6.4.1). HTTP/1.1 ends it at its head; over HTTP/2 some upstreams send
/// data all the same, at which a client resets the stream.
#[must_use]
pub fn may_have_content(status: StatusCode) -> bool {
    !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

/// Whether an answer with this status may have a `Content-Length` (RFC 9110, 8.6). An HTTP/2 client resets a stream that
/// ends before its length.
#[must_use]
pub fn may_have_length(status: StatusCode) -> bool {
    !status.is_informational() && status != StatusCode::NO_CONTENT
}

/// The length that a 304 announces: that of the answer that it stands for, and nothing follows (RFC 9110, 8.6).
#[must_use]
pub fn announced_length(status: StatusCode, headers: &HeaderMap) -> Option<u64> {
    let length = headers.get(CONTENT_LENGTH).filter(|_| status == StatusCode::NOT_MODIFIED)?;
    length.to_str().ok()?.parse().ok()
}

fn has_trailers(answer: &Answer, method: &Method) -> bool {
    // A 304 has no body that they could follow.
    let has_body = *method != Method::HEAD && answer.status != StatusCode::NOT_MODIFIED;
    has_body && answer.content.as_ref().is_some_and(|content| !content.trailers.is_empty())
}

/// The body with its trailers, which are announced in the headers given.
fn with_trailers(content: &Content, headers: Option<&mut HeaderMap>) -> Body {
    let trailers: HeaderMap = content.trailers.iter().cloned().collect();
    if let Some(headers) = headers {
        announce_trailers(headers, &trailers);
    }
    Body::with_trailers(content.body.clone(), trailers)
}
