//! An answer on its way to its client while it is taken in.

use std::mem;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;

use super::body::{Body, Gone, Sender};
use super::gathered::Gathered;

/// The most that is copied for a client at a time, in bytes.
const PORTION: usize = 64 << 10;

/// How far an answer has come on the way to its client, while there is more of it to come.
///
/// The client never has the last piece that came: that may be the end. It gets copies of what is gathered anyway, at its
/// own pace, so that one who reads slowly takes no more memory and holds up nobody.
#[derive(Default)]
pub struct Flow {
    sender: Option<Sender>,
    has_begun: bool,
    /// So many bytes the client was given.
    pub(super) sent: usize,
    /// So many bytes it may have.
    free: usize,
}

/// A flow that may begin.
pub struct Flowing<'a> {
    /// It is left behind wherever taking the answer in ends.
    pub flow: &'a mut Flow,
    /// Gives the client the head of the answer, with this body.
    pub begin: &'a mut (dyn FnMut(Body) + Send),
}

impl Flowing<'_> {
    /// Another piece has come behind so many bytes, which the client may have now.
    pub(super) fn comes_behind(&mut self, gathered: usize) {
        let flow = &mut *self.flow;
        flow.free = gathered;
        if gathered > 0 && !flow.has_begun {
            let (sender, body) = Body::channel();
            flow.sender = Some(sender);
            flow.has_begun = true;
            (self.begin)(body);
        }
    }
}

impl Flow {
    /// Whether the client has the head of the answer.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether there is something that the client may have and has not.
    pub(super) fn has_more(&self) -> bool {
        self.sender.is_some() && self.sent < self.free
    }

    /// Gives the client a portion when it has room for it. Given up while it waits, it has given nothing.
    pub(super) async fn pass(&mut self, gathered: &Gathered<'_>) {
        let Some(sender) = &self.sender else { return };
        let end = self.free.min(self.sent + PORTION);
        let given = sender.room().await.map(|room| room.send(gathered.copy(self.sent..end)));
        match given {
            Ok(()) => self.sent = end,
            // The client is gone, and the answer is taken in all the same.
            Err(Gone) => self.sender = None,
        }
    }

    /// Gives the client the rest of `body`, and `trailers`: all of it may be had now.
    pub fn finish(self, body: &Bytes, trailers: Option<HeaderMap>) {
        let Some(sender) = self.sender else { return };
        let rest = Some(body.slice(self.sent..)).filter(|rest| !rest.is_empty()).map(Frame::data);
        sender.finish_with(rest.into_iter().chain(trailers.map(Frame::trailers)).collect());
    }

    /// The way to the client for what is still to come, if it is there.
    #[must_use]
    pub fn into_sender(mut self) -> Option<Sender> {
        mem::take(&mut self.sender)
    }
}
