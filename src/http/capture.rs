//! Buffers an upstream's whole response, up to the size that may be stored.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Version};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout, timeout_at};

use super::body::{Sender, end_to_end};
use super::budget::{Budget, Permit};
use super::counted_buffer::CountedBuffer;
use super::headers::without_forbidden_fields;
use super::tee::TeeHandle;
use super::usage::UNCOUNTED_BODY;

/// The body of a response, as far as it was buffered.
pub enum Captured {
    /// All of it.
    Whole {
        /// Its bytes.
        body: Bytes,
        /// The trailers that followed it.
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
}

/// Reads a body to its end, or until it exceeds `limit` bytes or the memory budget.
///
/// With a `tee`, its client gets what comes meanwhile.
pub async fn capture(
    mut incoming: Incoming,
    version: Version,
    limit: u64,
    memory: &Arc<Budget>,
    mut tee: Option<TeeHandle<'_>>,
) -> hyper::Result<Captured> {
    // To HEAD, a length is announced that does not come.
    let announced = if incoming.is_end_stream() { 0 } else { incoming.size_hint().lower() };
    if announced > limit {
        return Ok(Captured::TooLarge(PartialBody { read: Default::default(), incoming }));
    }
    // One copy goes to the client, one to the record.
    let buffer = CountedBuffer::new(memory).with_copies(2).with_floor(UNCOUNTED_BODY);
    let mut buffer = buffer.with_expected_len(usize::try_from(announced).unwrap_or(0));
    let mut trailers = None;
    while let Some(frame) = next(&mut incoming, &buffer, &mut tee).await {
        let data = match frame?.into_data() {
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok().map(without_forbidden_fields);
                continue;
            }
        };
        if data.is_empty() {
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
            return Ok(Captured::TooLarge(PartialBody { read: [buffer.slice(sent..), data], incoming }));
        }
    }
    // hyper reports an HTTP/2 stream that is reset without an error as ended.
    if version == Version::HTTP_2 && !incoming.is_end_stream() {
        return Ok(Captured::Truncated);
    }
    let (body, record) = buffer.take();
    Ok(Captured::Whole { body, trailers, record })
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
pub struct Limits {
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
    pub async fn relay(mut self, mut client: Option<Sender>, limits: Limits) -> Relayed {
        for read in std::mem::take(&mut self.read).into_iter().filter(|read| !read.is_empty()) {
            deliver(&mut client, Frame::data(read), limits.client).await;
        }
        loop {
            let stalled = Instant::now() + limits.stall;
            let until = if client.is_some() { stalled } else { stalled.min(limits.deadline) };
            match timeout_at(until, self.incoming.frame()).await {
                Ok(Some(Ok(frame))) => deliver(&mut client, end_to_end(frame), limits.client).await,
                Ok(None) => break,
                Ok(Some(Err(_))) | Err(_) => return Relayed::Truncated,
            }
        }
        if let Some(client) = client {
            client.finish();
        }
        Relayed::Whole
    }
}

async fn deliver(client: &mut Option<Sender>, frame: Frame<Bytes>, patience: Duration) {
    if let Some(sender) = client
        && !matches!(timeout(patience, sender.send(frame)).await, Ok(Ok(())))
    {
        *client = None;
    }
}
