//! What stands between an upstream's socket and hyper. On [`UpstreamIo`] a response takes precedence over a write error, and no
//! request is accepted while input is unread. [`HeadFilter`] checks the heads of HTTP/1.1 responses.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use futures_util::task::AtomicWaker;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, Take};
use tokio::net::{TcpStream, UnixStream};

use super::Io;
use super::pool::Turn;
use super::response_head::{HeadChecker, HeadFault, begins_http2};
use super::tls_records::TlsRecords;

/// How many bytes are read at a time without the runtime.
const DIRECT_READ: usize = 512;

/// A stream whose writes appear to succeed after one has failed.
///
/// An upstream may answer before it has read all of a request, and close. The failed write would make hyper discard
/// the response, which may be complete in the receive buffer. Pretending success is safe: the reading side determines
/// how the exchange ended, with a response or without.
///
/// Before the first write of a request, a read asks the socket, and not only the runtime, whether anything has arrived. The
/// runtime learns of bytes when it next polls; until then a request would be written to a connection that already holds
/// unsolicited bytes, or its end. hyper reads before it takes a request from its queue, and hands the request back when that
/// read finds anything.
pub(super) struct UpstreamIo<T> {
    inner: T,
    socket: Arc<SocketState>,
    /// On TLS streams: tracks incomplete records.
    tls_records: Option<TlsRecords>,
}

/// A stream that can be read without the runtime.
pub(super) trait DirectRead {
    /// Reads the data that the system has, without waiting.
    fn direct_read(&self, buffer: &mut [u8]) -> io::Result<usize>;
}

impl DirectRead for TcpStream {
    fn direct_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        of_socket(self, buffer)
    }
}

impl DirectRead for UnixStream {
    fn direct_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        of_socket(self, buffer)
    }
}

/// A stream of a simulation has no socket: its own read is complete.
impl DirectRead for Box<dyn Io> {
    fn direct_read(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

fn of_socket(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket, buffer, RecvFlags::DONTWAIT)?.0)
}

/// The state of a connection's socket.
#[derive(Default)]
pub(super) struct SocketState {
    /// A byte of the current request was sent.
    sent: AtomicBool,
    /// How many requests have started.
    requests: AtomicU64,
    /// The end of a response was ambiguous: the connection must not carry another request.
    ambiguous: AtomicBool,
    /// No byte of the current request was sent, and none will be: its first write failed, or input arrived before it.
    refused: AtomicBool,
    /// A later write has failed: the connection must not carry another request.
    failed: AtomicBool,
    /// The connection was upgraded: write errors are reported.
    plain: AtomicBool,
    /// The connection was aborted.
    aborted: AtomicBool,
    /// The task to wake on abort.
    aborter: AtomicWaker,
    /// How many bytes were written.
    written: AtomicU64,
    /// The stream is closed.
    closed: AtomicBool,
    /// The right to it, where it was upgraded.
    turn: OnceLock<Turn>,
}

impl SocketState {
    /// A new request starts.
    pub(super) fn start_request(&self) {
        self.sent.store(false, Ordering::Release);
        self.requests.fetch_add(1, Ordering::Release);
    }

    /// How many requests have started.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Acquire)
    }

    /// Whether a request has started and no byte of it was sent.
    pub(super) fn is_asked(&self) -> bool {
        !self.sent.load(Ordering::Acquire) && self.requests() > 0
    }

    /// Input arrived before any byte of the current request was sent: it answers nothing, and the request is not sent.
    pub(super) fn refuse(&self) {
        self.refused.store(true, Ordering::Release);
    }

    /// The end of a response is ambiguous.
    pub(super) fn mark_ambiguous(&self) {
        self.ambiguous.store(true, Ordering::Release);
    }

    /// Whether the connection must not carry another request: a write failed, or the end of a response was ambiguous.
    pub(super) fn is_spent(&self) -> bool {
        self.has_failed() || self.ambiguous.load(Ordering::Acquire)
    }

    /// Whether no byte of the current request was sent, and none will be.
    pub(super) fn has_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire)
    }

    /// Whether a write has failed after others went well.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The connection switches to another protocol, and keeps its turn until it closes.
    pub(super) fn become_plain(&self, turn: Option<Turn>) {
        if let Some(turn) = turn {
            // It switches once.
            drop(self.turn.set(turn));
        }
        self.plain.store(true, Ordering::Release);
    }

    /// Aborts the connection and the exchanges on it.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.aborter.wake();
    }

    /// Returns `polled` unless the connection is aborted. A pending task is woken on abort; one task does all I/O.
    fn unless_aborted<T>(&self, cx: &Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_pending() {
            self.aborter.register(cx.waker());
        }
        if self.is_aborted() { Poll::Ready(Err(io::ErrorKind::InvalidData.into())) } else { polled }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// How many bytes were written since it opened.
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
                    // This task is the only writer.
                    let before = self.written.load(Ordering::Relaxed);
                    self.written.store(before + written as u64, Ordering::Release);
                }
                Ok(written)
            }
            // Nothing of the request was sent: the data in the receive buffer cannot be its response.
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

impl<T> UpstreamIo<T> {
    pub(super) fn new(inner: T, socket: Arc<SocketState>) -> Self {
        Self { inner, socket, tls_records: None }
    }

    /// A stream that TLS is spoken over.
    pub(super) fn encrypted(inner: T, socket: Arc<SocketState>) -> Self {
        Self { inner, socket, tls_records: Some(TlsRecords::default()) }
    }
}

impl<T: DirectRead> UpstreamIo<T> {
    /// Reads data that the runtime has not noticed yet.
    fn direct_read(&self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut some = [0; DIRECT_READ];
        let room = buf.remaining().min(DIRECT_READ);
        if room == 0 {
            return Poll::Pending;
        }
        match self.inner.direct_read(&mut some[..room]) {
            Ok(count) => {
                buf.put_slice(&some[..count]);
                Poll::Ready(Ok(()))
            }
            // On a new connection it may be a session ticket, which ends the handshake.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match &self.tls_records {
                Some(tls_records) if !tls_records.is_between() && self.socket.requests() > 1 => {
                    Poll::Ready(Err(io::ErrorKind::InvalidData.into()))
                }
                Some(_) | None => Poll::Pending,
            },
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<T> Drop for UpstreamIo<T> {
    fn drop(&mut self) {
        self.socket.closed.store(true, Ordering::Release);
    }
}

impl<T: AsyncRead + DirectRead + Unpin> AsyncRead for UpstreamIo<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let mut read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if read.is_pending() && self.socket.is_asked() {
            read = self.direct_read(buf);
        }
        ready!(self.socket.unless_aborted(cx, read))?;
        if let Some(tls_records) = &mut self.tls_records {
            tls_records.follow(&buf.filled()[before..]);
        }
        // The failed write may have taken the reset's error with it. An end that follows is not the end of an answer that
        // only the end of its connection delimits.
        if buf.filled().len() == before && buf.remaining() > 0 && self.socket.has_failed() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for UpstreamIo<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.socket.check_not_refused()?;
        let written = Pin::new(&mut self.inner).poll_write(cx, buf).map(|result| self.socket.wrote(result, buf.len()));
        self.socket.unless_aborted(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.socket.check_not_refused()?;
        let whole = || bufs.iter().map(|buf| buf.len()).sum();
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        let written = written.map(|result| self.socket.wrote(result, whole()));
        self.socket.unless_aborted(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.socket.unless_aborted(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.socket.unless_aborted(cx, shut)
    }
}

/// How many bytes are read at a time.
///
/// hyper makes room for twice as much as a read has filled, up to what the head of an answer may be, and a client that
/// takes nothing of an answer keeps that room taken three times over.
const MAX_READ: u64 = 32 << 10;

/// A stream on which the heads of answers are judged, and that is read a little at a time.
///
/// hyper takes a line that ends in LF alone, and compares what it holds of a head with its limit only when a read has left
/// the head incomplete: whether it refuses a head would depend on how the bytes arrive. Here every byte of a head is judged
/// before hyper gets it.
///
/// Bytes that come before any byte of a request has left are not its answer: they end the connection.
pub(super) struct HeadFilter<T> {
    /// Its limit is that of a single read.
    inner: Take<T>,
    socket: Arc<SocketState>,
    /// The exchange being checked, as counted by `socket`.
    exchange: u64,
    checker: HeadChecker,
}

impl<T: AsyncRead> HeadFilter<T> {
    pub(super) fn new(inner: T, socket: Arc<SocketState>, max_headers: usize) -> Self {
        Self { inner: inner.take(MAX_READ), socket, exchange: 0, checker: HeadChecker::none(max_headers) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for HeadFilter<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        self.inner.set_limit(MAX_READ);
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if buf.filled().len() > before && self.socket.is_asked() {
            self.socket.refuse();
            let is_http2 = begins_http2(&buf.filled()[before..]);
            let error = if is_http2 { HeadFault::Http2.into() } else { io::ErrorKind::InvalidData.into() };
            return Poll::Ready(Err(error));
        }
        let begun = self.socket.requests();
        if self.exchange != begun {
            (self.exchange, self.checker) = (begun, HeadChecker::new(self.checker.max_headers));
        }
        if !self.checker.is_over {
            self.checker.follow(&buf.filled()[before..])?;
            if self.checker.has_doubt {
                self.socket.mark_ambiguous();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for HeadFilter<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.inner.get_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(self.inner.get_mut()).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.get_ref().is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_HEADERS: usize = 100;

    fn failure() -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    #[test]
    fn only_the_rest_of_a_request_is_pretended() {
        let socket = SocketState::default();
        socket.start_request();
        assert_eq!(socket.wrote(Ok(2), 5).unwrap(), 2);
        assert_eq!(socket.wrote(failure(), 3).unwrap(), 3);
        assert!(socket.has_failed() && !socket.has_refused());
    }

    #[test]
    fn a_request_whose_first_write_fails_was_not_sent() {
        let socket = SocketState::default();
        assert_eq!(socket.wrote(Ok(5), 5).unwrap(), 5);
        socket.start_request();
        assert!(socket.wrote(failure(), 5).is_err());
        assert!(socket.has_refused() && !socket.has_failed());
    }

    #[test]
    fn nothing_is_pretended_after_an_upgrade() {
        let socket = SocketState::default();
        assert_eq!(socket.wrote(Ok(5), 5).unwrap(), 5);
        socket.become_plain(None);
        assert!(socket.wrote(failure(), 3).is_err());
    }

    #[tokio::test]
    async fn part_of_a_record_before_a_request_ends_the_connection_unless_it_is_new() {
        use std::io::Write as _;

        use tokio::io::AsyncReadExt as _;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let socket = Arc::new(SocketState::default());
        let mut stream = UpstreamIo::encrypted(tcp, Arc::clone(&socket));
        socket.start_request();
        peer.write_all(&[23, 3, 3, 0, 2, 7]).unwrap();
        let mut bytes = [0; 64];
        assert_eq!(stream.read(&mut bytes).await.unwrap(), 6);
        let waits = std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut stream).poll_read(cx, &mut ReadBuf::new(&mut bytes)).is_pending())
        });
        assert!(waits.await, "it is the end of the handshake");
        socket.start_request();
        assert_eq!(stream.read(&mut bytes).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        peer.write_all(&[7]).unwrap();
        assert_eq!(stream.read(&mut bytes).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn no_read_takes_more_than_a_portion() {
        let portion = usize::try_from(MAX_READ).unwrap();
        let sent = vec![b'x'; 5 * portion / 2];
        let mut stream = HeadFilter::new(&sent[..], Arc::default(), MAX_HEADERS);
        let mut room = Vec::with_capacity(8 * portion);
        let mut reads = Vec::new();
        while let read @ 1.. = stream.read_buf(&mut room).await.unwrap() {
            reads.push(read);
        }
        assert_eq!((reads, room), (vec![portion, portion, portion / 2], sent));
    }
}
