//! The I/O between a client's socket and h2.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::frame_parser::{FrameParser, FramePart};
use super::frame_rate::FrameRateLimiter;
use super::path_filter::PathFilter;
use super::stream_tracker::StreamTracker;
use super::trailer_filter::TrailerFilter;
use crate::http::limits::Limits;
use crate::http::socket::drain_input;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// A client's socket.
pub(super) struct ClientIo<S> {
    /// `None` after it was handed over for draining.
    socket: Option<S>,
    /// How long the client may accept no output.
    timeout_after: Duration,
    usage: Arc<Usage>,
    write_timer: Option<Pin<Box<Sleep>>>,
    last_write: LastWrite,
    parser: FrameParser,
    trailers: TrailerFilter,
    filter: PathFilter,
    limiter: FrameRateLimiter,
    /// The frame rate limit was exceeded: no input is read until output was written.
    is_flooded: bool,
    /// Woken when reading may continue.
    reader: Option<Waker>,
    tracker: Arc<StreamTracker>,
    is_shut: bool,
    end: ClosedSocket<S>,
}

impl<S> ClientIo<S> {
    pub(super) fn new(
        socket: S,
        limits: &Limits,
        usage: Arc<Usage>,
        tracker: Arc<StreamTracker>,
        end: ClosedSocket<S>,
    ) -> Self {
        let (timeout_after, last_write) = (limits.body_timeout, LastWrite(Arc::new(Mutex::new(Instant::now()))));
        Self {
            socket: Some(socket),
            timeout_after,
            usage,
            write_timer: None,
            last_write,
            parser: FrameParser::new(),
            trailers: TrailerFilter::new(),
            filter: PathFilter::new(),
            limiter: FrameRateLimiter::new(),
            is_flooded: false,
            reader: None,
            tracker,
            is_shut: false,
            end,
        }
    }

    /// The time of the last write.
    pub(super) fn last_write(&self) -> LastWrite {
        self.last_write.clone()
    }

    fn socket(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.socket.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Fails a write when the client has accepted no output for `body_timeout`.
    fn poll_write_timeout(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            self.write_timer = None;
            self.last_write.now();
            self.limiter.on_write(*written.as_ref().unwrap_or(&0));
            self.is_flooded = false;
            self.reader.take().into_iter().for_each(Waker::wake);
            return Poll::Ready(written);
        }
        let timeout_after = self.timeout_after;
        ready!(self.write_timer.get_or_insert_with(|| Box::pin(sleep(timeout_after))).as_mut().poll(cx));
        self.usage.exceeded(Limit::BodyTimeout);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// The time of the last write to a client.
#[derive(Clone)]
pub(super) struct LastWrite(Arc<Mutex<Instant>>);

impl LastWrite {
    pub(super) fn last(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// Holds a socket after all output is written.
pub(super) struct ClosedSocket<S>(Arc<Mutex<Option<S>>>);

impl<S> ClosedSocket<S> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    /// Another reference to the same.
    pub(super) fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    /// Drains the client's input for this long at most.
    pub(super) async fn linger(self, timeout_after: Duration)
    where
        S: AsyncRead + Unpin,
    {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let _ = timeout(timeout_after, drain_input(&mut socket, timeout_after)).await;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientIo<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_flooded {
            // The GOAWAY has to be written first: a client that sends fast enough would occupy the task with reading.
            self.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(self.socket()?.poll_read(cx, buf))?;
        let Self { parser, trailers, filter, limiter, .. } = &mut *self;
        parser.read(&mut buf.filled_mut()[before..], |part| match part {
            FramePart::Header(header, read) => {
                limiter.on_frame(header);
                let is_trailers = trailers.on_frame(header, read);
                filter.on_frame(header, is_trailers);
            }
            FramePart::Payload(bytes) => filter.on_payload(bytes),
        });
        if self.limiter.is_exceeded() {
            self.is_flooded = true;
            self.tracker.report_flood();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.socket()?.poll_write(cx, buf);
        self.poll_write_timeout(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.socket()?.poll_write_vectored(cx, bufs);
        self.poll_write_timeout(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.socket()?.poll_flush(cx);
        if flushed.is_ready() {
            self.write_timer = None;
            return flushed;
        }
        self.poll_write_timeout(cx, Poll::Pending).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.socket()?.poll_shutdown(cx))?;
        self.is_shut = true;
        Poll::Ready(Ok(()))
    }
}

impl<S> Drop for ClientIo<S> {
    fn drop(&mut self) {
        // A failed socket is not drained.
        if self.is_shut {
            *self.end.0.lock().unwrap_or_else(PoisonError::into_inner) = self.socket.take();
        }
    }
}
