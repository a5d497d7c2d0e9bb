//! Takes in an upstream's answer whole, as far as it may be kept.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Version};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout, timeout_at};

use super::body::{Sender, end_to_end};
use super::budget::{Budget, Taken};
use super::flow::Flowing;
use super::gathered::Gathered;
use super::headers::without_ours;
use super::usage::HELD_ANYWAY;

/// An answer's body as far as it was taken in.
pub enum Captured {
    /// All of it.
    Whole {
        /// Its bytes.
        body: Bytes,
        /// The trailers that followed it.
        trailers: Option<HeaderMap>,
        /// As much memory again, for its record, where it is not small.
        record: Option<Taken>,
    },
    /// It is larger than may be kept, or than there is room for.
    TooLarge(Rest),
    /// It ended before its end.
    Cut,
}

/// A body that was taken in in part.
pub struct Rest {
    /// What was read of it.
    read: [Bytes; 2],
    incoming: Incoming,
}

/// Reads a body to its end, or until it is larger than `limit` bytes or than there is room for.
///
/// With a `flow`, its client gets what comes meanwhile.
pub async fn capture(
    mut incoming: Incoming,
    version: Version,
    limit: u64,
    memory: &Arc<Budget>,
    mut flow: Option<Flowing<'_>>,
) -> hyper::Result<Captured> {
    // To HEAD, a length is announced that does not come.
    let announced = if incoming.is_end_stream() { 0 } else { incoming.size_hint().lower() };
    if announced > limit {
        return Ok(Captured::TooLarge(Rest { read: Default::default(), incoming }));
    }
    // Once as the answer that the client gets, and once in the record.
    let gathered = Gathered::new(memory).copied(2).at_least(HELD_ANYWAY);
    let mut gathered = gathered.expecting(usize::try_from(announced).unwrap_or(0));
    let mut trailers = None;
    while let Some(frame) = next(&mut incoming, &gathered, &mut flow).await {
        let data = match frame?.into_data() {
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok().map(without_ours);
                continue;
            }
        };
        if data.is_empty() {
            continue;
        }
        if let Some(flowing) = &mut flow {
            flowing.comes_behind(gathered.len());
        }
        let is_larger = (gathered.len() + data.len()) as u64 > limit;
        let homeless = if is_larger { Some(data) } else { gathered.push(data).err() };
        if let Some(data) = homeless {
            let gathered = gathered.take().0;
            let sent = flow.map_or(0, |flowing| flowing.flow.sent);
            return Ok(Captured::TooLarge(Rest { read: [gathered.slice(sent..), data], incoming }));
        }
    }
    // hyper takes a stream of HTTP/2 that is reset without an error for one that has ended.
    if version == Version::HTTP_2 && !incoming.is_end_stream() {
        return Ok(Captured::Cut);
    }
    let (body, record) = gathered.take();
    Ok(Captured::Whole { body, trailers, record })
}

/// The next frame. While it is awaited, the client gets what it may have.
async fn next(
    incoming: &mut Incoming,
    gathered: &Gathered<'_>,
    flow: &mut Option<Flowing<'_>>,
) -> Option<hyper::Result<Frame<Bytes>>> {
    let Some(Flowing { flow, .. }) = flow else { return incoming.frame().await };
    while flow.has_more() {
        tokio::select! {
            biased;
            () = flow.pass(gathered) => {}
            frame = incoming.frame() => return frame,
        }
    }
    incoming.frame().await
}

/// How moving a large answer on ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relayed {
    /// At its end.
    Whole,
    /// In the middle: the upstream broke off or stalled, or the time was up with nobody left to read.
    Cut,
}

/// How long a large answer may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest pause of the upstream.
    pub stall: Duration,
    /// Longest pause of the client, after which it counts as gone.
    pub client: Duration,
    /// Until when the upstream is read once the client is gone.
    pub deadline: Instant,
}

impl Rest {
    /// Sends all of the body on: to `client` while that is there, then nowhere, so that the upstream is not cut off for
    /// want of a reader.
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
                Ok(Some(Err(_))) | Err(_) => return Relayed::Cut,
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
