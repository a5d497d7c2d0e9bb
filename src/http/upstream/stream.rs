//! A connection on which an answer beats a write error, and that takes no request while anything on it is unread.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use futures_util::task::AtomicWaker;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use super::Io;
use super::records::Records;

/// How many bytes are read at a time past the runtime.
const READ_NOW: usize = 512;

/// A stream whose writes seem to go on after one has failed.
///
/// An upstream may answer before it has read all of a request, and close. The write that then fails would make hyper
/// give up the answer, which may stand complete in the receive buffer. What was not written is missed by nobody: the
/// reading side says how the exchange ended, with an answer or without.
///
/// Before the first write of a request, a read asks the socket, and not only the runtime, whether anything has arrived. The
/// runtime learns of bytes when it next polls; until then a request would be written to a connection that already holds
/// unsolicited bytes, or its end. hyper reads before it takes a request from its queue, and hands the request back when that
/// read finds anything.
pub(super) struct Stream<T> {
    inner: T,
    wire: Arc<Wire>,
    /// Where the stream is encrypted: which bytes were read of a record that is not whole.
    records: Option<Records>,
}

/// A stream that can be read without the runtime's knowledge of it.
pub(super) trait ReadNow {
    /// Reads what the system has, without waiting.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize>;
}

impl ReadNow for TcpStream {
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        of_socket(self, buffer)
    }
}

impl ReadNow for UnixStream {
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        of_socket(self, buffer)
    }
}

/// A stream of a simulation has no socket: its own read is complete.
impl ReadNow for Box<dyn Io> {
    fn read_now(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

fn of_socket(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket, buffer, RecvFlags::DONTWAIT)?.0)
}

/// What is known of the bytes on a connection.
#[derive(Default)]
pub(super) struct Wire {
    /// A byte of the current request has left.
    sent: AtomicBool,
    /// How many requests have begun.
    begun: AtomicU64,
    /// The framing of an answer left doubt: the connection must not carry another request.
    doubted: AtomicBool,
    /// No byte of the current request has left, and none will: its first write failed, or the upstream spoke before it.
    refused: AtomicBool,
    /// A later write has failed: the connection must not carry another request.
    failed: AtomicBool,
    /// The connection carries no HTTP any more: an error is an error.
    plain: AtomicBool,
    /// Nothing is read or written any more.
    given_up: AtomicBool,
    /// Who waits for it.
    waiting: AtomicWaker,
    /// How many bytes have left.
    written: AtomicU64,
    /// Nothing can be written any more.
    closed: AtomicBool,
}

impl Wire {
    /// Another request begins.
    pub(super) fn begin(&self) {
        self.sent.store(false, Ordering::Release);
        self.begun.fetch_add(1, Ordering::Release);
    }

    /// How many requests have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// Whether a request has begun and no byte of it has left.
    pub(super) fn is_asked(&self) -> bool {
        !self.sent.load(Ordering::Acquire) && self.begun() > 0
    }

    /// Bytes came before any byte of the current request had left: they answer nothing, and the request is not sent any more.
    pub(super) fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
    }

    /// An answer leaves doubt about where it ends.
    pub(super) fn doubt(&self) {
        self.doubted.store(true, Ordering::Release);
    }

    /// Whether the connection must not carry another request: a write has failed, or an answer left doubt.
    pub(super) fn is_spent(&self) -> bool {
        self.has_failed() || self.doubted.load(Ordering::Acquire)
    }

    /// Whether no byte of the current request has left, and none will.
    pub(super) fn has_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Whether a write has failed after others went well.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// From here on it carries something else than HTTP.
    pub(super) fn become_plain(&self) {
        self.plain.store(true, Ordering::Release);
    }

    /// Nothing is to be read or written any more: whatever is under way breaks off.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.waiting.wake();
    }

    /// What came of it where the connection is not given up. Whoever waits (one task does all of it) is woken when it is.
    fn unless_given_up<T>(&self, cx: &Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_pending() {
            self.waiting.register(cx.waker());
        }
        if self.is_given_up() { Poll::Ready(Err(io::ErrorKind::InvalidData.into())) } else { polled }
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// How many bytes have left since it opened.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Whether it is closed for good.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn check_not_refused(&self) -> io::Result<()> {
        if self.has_refused() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    fn wrote(&self, result: io::Result<usize>, whole: usize) -> io::Result<usize> {
        match result {
            Ok(written) => {
                if written > 0 {
                    self.sent.store(true, Ordering::Release);
                    // Nobody else writes.
                    let before = self.written.load(Ordering::Relaxed);
                    self.written.store(before + written as u64, Ordering::Release);
                }
                Ok(written)
            }
            // Nothing of the request has left: what stands in the receive buffer cannot be its answer.
            Err(error) if !self.sent.load(Ordering::Acquire) => {
                self.refused.store(true, Ordering::Release);
                Err(error)
            }
            Err(error) if self.plain.load(Ordering::Acquire) => Err(error),
            Err(_) => {
                self.failed.store(true, Ordering::Release);
                Ok(whole)
            }
        }
    }
}

impl<T> Stream<T> {
    pub(super) fn new(inner: T, wire: Arc<Wire>) -> Self {
        Self { inner, wire, records: None }
    }

    /// A stream that TLS is spoken over.
    pub(super) fn encrypted(inner: T, wire: Arc<Wire>) -> Self {
        Self { inner, wire, records: Some(Records::default()) }
    }
}

impl<T: ReadNow> Stream<T> {
    /// Reads what the runtime does not know of yet.
    fn read_now(&self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut some = [0; READ_NOW];
        let room = buf.remaining().min(READ_NOW);
        if room == 0 {
            return Poll::Pending;
        }
        match self.inner.read_now(&mut some[..room]) {
            Ok(count) => {
                buf.put_slice(&some[..count]);
                Poll::Ready(Ok(()))
            }
            // On a new connection it may be a session ticket, which ends the handshake.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match &self.records {
                Some(records) if !records.is_between() && self.wire.begun() > 1 => {
                    Poll::Ready(Err(io::ErrorKind::InvalidData.into()))
                }
                Some(_) | None => Poll::Pending,
            },
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<T> Drop for Stream<T> {
    fn drop(&mut self) {
        self.wire.closed.store(true, Ordering::Release);
    }
}

impl<T: AsyncRead + ReadNow + Unpin> AsyncRead for Stream<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let mut read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if read.is_pending() && self.wire.is_asked() {
            read = self.read_now(buf);
        }
        ready!(self.wire.unless_given_up(cx, read))?;
        if let Some(records) = &mut self.records {
            records.follow(&buf.filled()[before..]);
        }
        // The failed write may have taken the reset's error with it. An end that follows is not the end of an answer that
        // only the end of its connection delimits.
        if buf.filled().len() == before && buf.remaining() > 0 && self.wire.has_failed() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Stream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.wire.check_not_refused()?;
        let written = Pin::new(&mut self.inner).poll_write(cx, buf).map(|result| self.wire.wrote(result, buf.len()));
        self.wire.unless_given_up(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wire.check_not_refused()?;
        let whole = || bufs.iter().map(|buf| buf.len()).sum();
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        let written = written.map(|result| self.wire.wrote(result, whole()));
        self.wire.unless_given_up(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.wire.unless_given_up(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.wire.unless_given_up(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    #[test]
    fn only_the_rest_of_a_request_is_pretended() {
        let wire = Wire::default();
        wire.begin();
        assert_eq!(wire.wrote(Ok(2), 5).unwrap(), 2);
        assert_eq!(wire.wrote(failure(), 3).unwrap(), 3);
        assert!(wire.has_failed() && !wire.has_refused());
    }

    #[test]
    fn a_request_whose_first_write_fails_was_not_sent() {
        let wire = Wire::default();
        assert_eq!(wire.wrote(Ok(5), 5).unwrap(), 5);
        wire.begin();
        assert!(wire.wrote(failure(), 5).is_err());
        assert!(wire.has_refused() && !wire.has_failed());
    }

    #[test]
    fn nothing_is_pretended_after_an_upgrade() {
        let wire = Wire::default();
        assert_eq!(wire.wrote(Ok(5), 5).unwrap(), 5);
        wire.become_plain();
        assert!(wire.wrote(failure(), 3).is_err());
    }

    #[tokio::test]
    async fn part_of_a_record_before_a_request_ends_the_connection_unless_it_is_new() {
        use std::io::Write as _;

        use tokio::io::AsyncReadExt as _;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let wire = Arc::new(Wire::default());
        let mut stream = Stream::encrypted(socket, Arc::clone(&wire));
        wire.begin();
        peer.write_all(&[23, 3, 3, 0, 2, 7]).unwrap();
        let mut bytes = [0; 64];
        assert_eq!(stream.read(&mut bytes).await.unwrap(), 6);
        let waits = std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut stream).poll_read(cx, &mut ReadBuf::new(&mut bytes)).is_pending())
        });
        assert!(waits.await, "it is the end of the handshake");
        wire.begin();
        assert_eq!(stream.read(&mut bytes).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        peer.write_all(&[7]).unwrap();
        assert_eq!(stream.read(&mut bytes).await.unwrap(), 1);
    }
}
