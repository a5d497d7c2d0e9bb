//! The way from a client's socket to the h2 crate and back.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::exchanges::Exchanges;
use super::floods::Floods;
use super::frames::{Frames, Part};
use super::targets::Targets;
use crate::http::limits::Limits;
use crate::http::socket::read_on;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// A client's socket.
pub(super) struct Socket<S> {
    /// Nothing once it is given back.
    socket: Option<S>,
    /// How long the client may take nothing of what is to be written.
    patience: Duration,
    usage: Arc<Usage>,
    stuck: Option<Pin<Box<Sleep>>>,
    moved: Moved,
    frames: Frames,
    targets: Targets,
    floods: Floods,
    /// Too much has come that leads nowhere: the client has something to read before more of it is.
    is_flooded: bool,
    /// Who waits for that to read on.
    reader: Option<Waker>,
    exchanges: Arc<Exchanges>,
    is_shut: bool,
    end: End<S>,
}

impl<S> Socket<S> {
    pub(super) fn new(socket: S, limits: &Limits, usage: Arc<Usage>, exchanges: Arc<Exchanges>, end: End<S>) -> Self {
        let (patience, moved) = (limits.body_timeout, Moved(Arc::new(Mutex::new(Instant::now()))));
        Self {
            socket: Some(socket),
            patience,
            usage,
            stuck: None,
            moved,
            frames: Frames::new(),
            targets: Targets::new(),
            floods: Floods::new(),
            is_flooded: false,
            reader: None,
            exchanges,
            is_shut: false,
            end,
        }
    }

    /// When something was last written.
    pub(super) fn moved(&self) -> Moved {
        self.moved.clone()
    }

    fn socket(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.socket.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Whoever takes nothing for as long as a body may pause is not there. Nothing more is read from it by then either:
    /// what it asks for is answered first.
    fn poll_taken(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            self.stuck = None;
            self.moved.now();
            self.floods.wrote(*written.as_ref().unwrap_or(&0));
            self.is_flooded = false;
            self.reader.take().into_iter().for_each(Waker::wake);
            return Poll::Ready(written);
        }
        let patience = self.patience;
        ready!(self.stuck.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(cx));
        self.usage.exceeded(Limit::BodyTimeout);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// When something was last written to a client.
#[derive(Clone)]
pub(super) struct Moved(Arc<Mutex<Instant>>);

impl Moved {
    pub(super) fn last(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// Where a socket goes once all is written.
pub(super) struct End<S>(Arc<Mutex<Option<S>>>);

impl<S> End<S> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    /// Another hold on the same.
    pub(super) fn share(&self) -> Self {
        Self(Arc::clone(&self.0))
    }

    /// Reads on what the client still sends, for so long at most.
    pub(super) async fn linger(self, patience: Duration)
    where
        S: AsyncRead + Unpin,
    {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let _ = timeout(patience, read_on(&mut socket, patience)).await;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Socket<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_flooded {
            // The client is told to leave now, or it is left. Whoever sends faster than is read has all of the reader's time.
            self.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(self.socket()?.poll_read(cx, buf))?;
        let Self { frames, targets, floods, .. } = &mut *self;
        frames.read(&mut buf.filled_mut()[before..], |part| match part {
            Part::Header(header) => {
                floods.begins(header);
                targets.begins(header);
            }
            Part::Payload(bytes) => targets.payload(bytes),
        });
        if self.floods.is_spent() {
            self.is_flooded = true;
            self.exchanges.flooded();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.socket()?.poll_write(cx, buf);
        self.poll_taken(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.socket()?.poll_write_vectored(cx, bufs);
        self.poll_taken(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = self.socket()?.poll_flush(cx);
        if flushed.is_ready() {
            self.stuck = None;
            return flushed;
        }
        self.poll_taken(cx, Poll::Pending).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.socket()?.poll_shutdown(cx))?;
        self.is_shut = true;
        Poll::Ready(Ok(()))
    }
}

impl<S> Drop for Socket<S> {
    fn drop(&mut self) {
        // One that failed is of no use.
        if self.is_shut {
            *self.end.0.lock().unwrap_or_else(PoisonError::into_inner) = self.socket.take();
        }
    }
}
