//! A connection on which an answer beats a write error.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A stream whose writes seem to go on after one has failed.
///
/// An upstream may answer before it has read all of a request, and close. The write that then fails would make hyper
/// give up the answer, which may stand complete in the receive buffer. What was not written is missed by nobody: the
/// reading side says how the exchange ended, with an answer or without.
pub(super) struct Stream {
    inner: TcpStream,
    failed: Arc<AtomicBool>,
}

impl Stream {
    /// `failed` turns true when a write has failed: the connection must not carry another request.
    pub(super) fn new(inner: TcpStream, failed: Arc<AtomicBool>) -> Self {
        Self { inner, failed }
    }

    fn pretend<T>(&self, result: io::Result<T>, success: T) -> io::Result<T> {
        result.or_else(|_| {
            self.failed.store(true, Ordering::Release);
            Ok(success)
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.inner).poll_write(cx, buf));
        Poll::Ready(self.pretend(result, buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, bufs));
        Poll::Ready(self.pretend(result, bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = ready!(Pin::new(&mut self.inner).poll_flush(cx));
        Poll::Ready(self.pretend(result, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
