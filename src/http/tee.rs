//! Streams a response to its client while it is being buffered.

use std::mem;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;

use super::body::{Body, Closed, Sender};
use super::counted_buffer::CountedBuffer;

/// The largest chunk that is copied for a client at a time, in bytes.
const CHUNK: usize = 64 << 10;

/// How much of a response its client has received, while more is still to come.
///
/// The client never gets the frame that arrived last, which may be the end. It gets copies of the buffered data at its
/// own pace, so a slow reader takes no additional memory and delays no other client.
#[derive(Default)]
pub struct ResponseTee {
    sender: Option<Sender>,
    has_begun: bool,
    /// How many bytes the client was sent.
    pub(super) sent: usize,
    /// How many bytes may be sent to it.
    available: usize,
}

/// A tee that may start.
pub struct TeeHandle<'a> {
    /// Its state outlives the buffering.
    pub tee: &'a mut ResponseTee,
    /// Gives the client the head of the answer, with this body.
    pub begin: &'a mut (dyn FnMut(Body) + Send),
}

impl TeeHandle<'_> {
    /// Another frame arrived behind this many bytes, which may now be sent to the client.
    pub(super) fn advance(&mut self, buffered: usize) {
        let tee = &mut *self.tee;
        tee.available = buffered;
        if buffered > 0 && !tee.has_begun {
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
    pub(super) fn has_more(&self) -> bool {
        self.sender.is_some() && self.sent < self.available
    }

    /// Sends the client a chunk when it has room for one. Cancelled while it waits, it has sent nothing.
    pub(super) async fn send_next(&mut self, buffer: &CountedBuffer<'_>) {
        let Some(sender) = &self.sender else { return };
        let end = self.available.min(self.sent + CHUNK);
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
    pub fn into_sender(mut self) -> Option<Sender> {
        mem::take(&mut self.sender)
    }
}
