//! I/O that returns bytes that were read before.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};

use super::socket::ClientStream;

/// A stream, and bytes that were read from it before and are read again first.
pub(super) struct Rewind<S> {
    stream: S,
    read: BytesMut,
}

impl<S: AsyncRead + Unpin> Rewind<S> {
    pub(super) fn new(stream: S, read: BytesMut) -> Self {
        Self { stream, read }
    }

    /// The first byte, without consuming it; `None` where the stream ends.
    pub(super) async fn peek_first(&mut self) -> io::Result<Option<u8>> {
        if self.read.is_empty() {
            self.read.reserve(1 << 10);
            self.stream.read_buf(&mut self.read).await?;
        }
        Ok(self.read.first().copied())
    }
}

impl<S: ClientStream> ClientStream for Rewind<S> {
    fn reset_on_close(&self, resets: bool) {
        self.stream.reset_on_close(resets);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.read.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let some = this.read.len().min(buf.remaining());
        buf.put_slice(&this.read[..some]);
        this.read.advance(some);
        if this.read.is_empty() {
            this.read = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
