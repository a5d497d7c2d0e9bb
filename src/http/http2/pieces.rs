//! The body of an answer, in pieces.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::exchanges::Taking;
use crate::http::body::{Body, Error};
use crate::http::share::Waiting;

/// How many bytes of an answer are handed on at a time: the h2 crate keeps what it was given until the client takes it,
/// though that be a byte at a time.
const PIECE: usize = 16 << 10;

/// The body of an answer, in pieces, of which the next is given out only when the client takes the one before.
pub(super) struct Pieces {
    body: Body,
    rest: Bytes,
    /// Whether what came last came in several pieces.
    is_cut: bool,
    taking: Arc<Taking>,
    /// What of it is here already.
    waiting: Waiting,
}

impl Pieces {
    pub(super) fn new(body: Body, taking: Arc<Taking>, mut waiting: Waiting) -> Self {
        taking.answered(body.is_end_stream());
        waiting.set(body.held());
        Self { body, rest: Bytes::new(), is_cut: false, taking, waiting }
    }

    fn piece(&mut self) -> Frame<Bytes> {
        let is_large = self.rest.len() > PIECE;
        let piece = self.rest.split_to(self.rest.len().min(PIECE));
        self.is_cut |= is_large;
        // The last one of several may wait for its client when all else of the answer is gone: it holds on to nothing.
        let is_last = self.is_cut && self.is_end_stream();
        let piece = if is_last { Bytes::copy_from_slice(&piece) } else { piece };
        self.taking.gave(self.is_end_stream());
        self.waiting.set(self.rest.len() + self.body.held());
        Frame::data(piece)
    }
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        this.taking.asked();
        if !this.rest.is_empty() {
            return Poll::Ready(Some(Ok(this.piece())));
        }
        Poll::Ready(match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    (this.rest, this.is_cut) = (data, false);
                    Some(Ok(this.piece()))
                }
                Err(trailers) => {
                    this.taking.gave(true);
                    Some(Ok(trailers))
                }
            },
            Some(Err(error)) => Some(Err(error)),
            None => {
                this.taking.gave(true);
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        // A length that is announced alone is in the headers: an empty piece behind them would belie it.
        self.rest.is_empty() && (self.body.is_end_stream() || self.body.is_announced())
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.body.size_hint() } else { SizeHint::new() }
    }
}
