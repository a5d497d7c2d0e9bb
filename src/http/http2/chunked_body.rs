//! Response bodies in small chunks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::stream_tracker::SendProgress;
use crate::http::body::{Body, Error};
use crate::http::connection_memory::UnreadResponse;

/// How many bytes of a response are handed to h2 at a time: h2 keeps a frame until the client has accepted all of it,
/// even if byte by byte.
const CHUNK: usize = 16 << 10;

/// A response body in chunks. The next chunk is produced only when the client has accepted the previous one.
pub(super) struct ChunkedBody {
    body: Body,
    rest: Bytes,
    /// Whether the last frame of `body` was split.
    is_split: bool,
    progress: Arc<SendProgress>,
    /// Counts the bytes that are in memory.
    unread: UnreadResponse,
}

impl ChunkedBody {
    pub(super) fn new(body: Body, progress: Arc<SendProgress>, mut unread: UnreadResponse) -> Self {
        progress.answered(body.is_end_stream());
        unread.set(body.buffered_len());
        Self { body, rest: Bytes::new(), is_split: false, progress, unread }
    }

    fn chunk(&mut self) -> Frame<Bytes> {
        let is_large = self.rest.len() > CHUNK;
        let chunk = self.rest.split_to(self.rest.len().min(CHUNK));
        self.is_split |= is_large;
        // The last chunk may wait for its client long after the rest was freed: as a copy it does not keep the whole
        // frame.
        let is_last = self.is_split && self.is_end_stream();
        let chunk = if is_last { Bytes::copy_from_slice(&chunk) } else { chunk };
        self.progress.sent(self.is_end_stream());
        self.unread.set(self.rest.len() + self.body.buffered_len());
        Frame::data(chunk)
    }
}

impl HttpBody for ChunkedBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        this.progress.polled();
        if !this.rest.is_empty() {
            return Poll::Ready(Some(Ok(this.chunk())));
        }
        Poll::Ready(match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => {
                    (this.rest, this.is_split) = (data, false);
                    Some(Ok(this.chunk()))
                }
                Err(trailers) => {
                    this.progress.sent(true);
                    Some(Ok(trailers))
                }
            },
            Some(Err(error)) => Some(Err(error)),
            None => {
                this.progress.sent(true);
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        // An announced length is in the headers: an empty DATA frame behind them would contradict it.
        self.rest.is_empty() && (self.body.is_end_stream() || self.body.is_announced())
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.body.size_hint() } else { SizeHint::new() }
    }
}
