//! A stream that is read a little at a time.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How many bytes are read at a time.
///
/// hyper makes room for twice as much as a read has filled, up to what the head of an answer may be, and a client that
/// takes nothing of an answer keeps that room taken three times over.
const PORTION: usize = 32 << 10;

/// A stream that is read a little at a time.
pub(super) struct Portions<T>(pub(super) T);

impl<T: AsyncRead + Unpin> AsyncRead for Portions<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buf.remaining() <= PORTION {
            return Pin::new(&mut self.0).poll_read(cx, buf);
        }
        let mut portion = ReadBuf::new(buf.initialize_unfilled_to(PORTION));
        ready!(Pin::new(&mut self.0).poll_read(cx, &mut portion))?;
        let read = portion.filled().len();
        buf.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Portions<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn no_read_takes_more_than_a_portion() {
        let sent = vec![b'x'; 5 * PORTION / 2];
        let mut stream = Portions(&sent[..]);
        let mut room = Vec::with_capacity(8 * PORTION);
        let mut reads = Vec::new();
        while let read @ 1.. = stream.read_buf(&mut room).await.unwrap() {
            reads.push(read);
        }
        assert_eq!((reads, room), (vec![PORTION, PORTION, PORTION / 2], sent));
    }
}
