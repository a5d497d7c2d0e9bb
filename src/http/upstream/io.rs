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

/// The size that a head must stay below, in bytes, its last empty line included. Interim answers count one by one.
pub(super) const MAX_HEAD: usize = 256 << 10;

/// How many bytes are read at a time.
///
/// hyper makes room for twice as much as a read has filled, up to what the head of an answer may be, and a client that
/// takes nothing of an answer keeps that room taken three times over.
const MAX_READ: u64 = 32 << 10;

/// How many bytes of a frame's head are looked at: its length, its type and its flags (RFC 9113, 4.1).
const FRAME_START: usize = 5;

/// How many bytes of a status line are kept: `HTTP/1.1 200`.
const STATUS_PREFIX: usize = 12;

/// Why the head of a response is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadFault {
    /// A line ends in LF alone (RFC 9112, 2.2).
    #[error("the answer's head has a line that ends in LF alone")]
    BareLf,
    /// It is too large.
    #[error("the answer's head is not below {} KiB", MAX_HEAD >> 10)]
    TooLarge,
    /// It has more than this many header lines.
    #[error("the answer's head has more than {0} header lines; limits.max_headers can allow more")]
    TooManyLines(usize),
    /// It is the SETTINGS frame with which a server of HTTP/2 begins (RFC 9113, 3.4).
    #[error("the upstream speaks HTTP/2: write protocol = \"h2\" for it")]
    Http2,
}

impl From<HeadFault> for io::Error {
    fn from(fault: HeadFault) -> Self {
        Self::new(io::ErrorKind::InvalidData, fault)
    }
}

/// Follows the heads of one exchange: of the interim answers, and of the answer.
#[derive(Debug)]
struct HeadChecker {
    is_over: bool,
    /// How many header lines a head may have.
    max_headers: usize,
    /// How much of the head has come, with empty lines before it.
    length: usize,
    /// How many lines of it are whole.
    lines: usize,
    /// How much of the line that is under way has come.
    line: usize,
    /// The last byte that came.
    last: u8,
    /// The first bytes of the status line.
    start: [u8; STATUS_PREFIX],
    /// How many of them have come.
    started: usize,
    /// Whether an empty line came before a status line.
    has_doubt: bool,
}

impl HeadChecker {
    /// Before the first byte of an answer.
    fn new(max_headers: usize) -> Self {
        Self {
            is_over: false,
            max_headers,
            length: 0,
            lines: 0,
            line: 0,
            last: 0,
            start: [0; STATUS_PREFIX],
            started: 0,
            has_doubt: false,
        }
    }

    /// Between exchanges: nothing is judged.
    fn none(max_headers: usize) -> Self {
        Self { is_over: true, ..Self::new(max_headers) }
    }

    /// Checks input. Bytes behind the head of the final response are not checked.
    fn follow(&mut self, mut bytes: &[u8]) -> Result<(), HeadFault> {
        while !self.is_over && !bytes.is_empty() {
            let end = memchr::memchr(b'\n', bytes);
            let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |at| at + 1));
            self.length += line.len();
            if self.length >= MAX_HEAD {
                return Err(HeadFault::TooLarge);
            }
            if self.lines == 0 {
                let count = line.len().min(STATUS_PREFIX - self.started);
                self.start[self.started..self.started + count].copy_from_slice(&line[..count]);
                self.started += count;
                if self.started >= FRAME_START && begins_http2(&self.start) {
                    return Err(HeadFault::Http2);
                }
            }
            self.line += line.len();
            let before = line.len().checked_sub(2).map_or(self.last, |at| line[at]);
            self.last = line[line.len() - 1];
            if end.is_some() {
                if before != b'\r' {
                    return Err(HeadFault::BareLf);
                }
                self.end_line()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_line(&mut self) -> Result<(), HeadFault> {
        let is_empty = self.line == 2;
        self.line = 0;
        if !is_empty {
            self.lines += 1;
            // The first is the status line.
            if self.lines > self.max_headers + 1 {
                return Err(HeadFault::TooManyLines(self.max_headers));
            }
        } else if self.lines == 0 {
            // It belongs to no answer, and may be left over from the one before. hyper passes over it.
            (self.has_doubt, self.started) = (true, 0);
        } else {
            let is_interim = self.start[9] == b'1' && &self.start[9..] != b"101";
            *self = Self { is_over: !is_interim, has_doubt: self.has_doubt, ..Self::new(self.max_headers) };
        }
        Ok(())
    }
}

/// Whether a server begins like this that speaks HTTP/2: with a SETTINGS frame of a few settings.
fn begins_http2(bytes: &[u8]) -> bool {
    const SETTINGS: u8 = 4;
    matches!(bytes, [0, 0, _, SETTINGS, 0, ..])
}

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

    const OK: &str = "HTTP/1.1 200 OK\r\nA: b\r\n\r\n";

    /// The verdict on these bytes, which must be the same when they are split in two at any position, or into single bytes.
    #[track_caller]
    fn judge(bytes: &[u8]) -> Result<(bool, bool), HeadFault> {
        let whole = in_pieces(&[bytes]);
        for cut in 0..=bytes.len() {
            let (first, second) = bytes.split_at(cut);
            assert_eq!(in_pieces(&[first, second]), whole, "cut at {cut}");
        }
        assert_eq!(in_pieces(&bytes.chunks(1).collect::<Vec<_>>()), whole);
        whole
    }

    fn in_pieces(pieces: &[&[u8]]) -> Result<(bool, bool), HeadFault> {
        let mut checker = HeadChecker::new(MAX_HEADERS);
        for piece in pieces {
            checker.follow(piece)?;
        }
        Ok((checker.is_over, checker.has_doubt))
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

    #[test]
    fn a_head_ends_with_its_empty_line_and_what_follows_is_not_looked_at() {
        assert_eq!(judge(OK.as_bytes()), Ok((true, false)));
        assert_eq!(judge(&OK.as_bytes()[..OK.len() - 1]), Ok((false, false)));
        assert_eq!(judge(format!("{OK}a\nb\n\n").as_bytes()), Ok((true, false)));
        assert_eq!(judge(b"HTTP/1.1 101 Switching Protocols\r\n\r\n\n\n"), Ok((true, false)));
    }

    /// Without `protocol = "h2"` before a gRPC server.
    #[test]
    fn the_beginning_of_http_2_is_told_from_a_head() {
        for settings in [&b""[..], b"\0\x03\0\0\0\x64\0\x04\0\x10\0\0"] {
            let frame = [&[0, 0, settings.len() as u8, 4, 0, 0, 0, 0, 0][..], settings].concat();
            assert_eq!(judge(&frame), Err(HeadFault::Http2));
        }
        assert_eq!(judge(b"\0\0\0\x05\0\0\0\0\0"), Ok((false, false)));
    }

    #[test]
    fn a_line_that_ends_in_lf_alone_is_refused_wherever_it_stands() {
        for head in [
            "HTTP/1.1 200 OK\nA: b\r\n\r\n",
            "HTTP/1.1 200 OK\r\nA: b\n\r\n",
            "HTTP/1.1 200 OK\r\nA: b\nC: d\r\n\r\n",
            "HTTP/1.1 200 OK\r\nA: b\r\n\n",
            "HTTP/1.1 200 OK\n\n",
            "\nHTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\nA: b\r\n\r\n",
        ] {
            assert_eq!(judge(head.as_bytes()), Err(HeadFault::BareLf), "{head:?}");
        }
    }

    #[test]
    fn interim_answers_have_heads_of_their_own() {
        let interim = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
        assert_eq!(judge(interim.as_bytes()), Ok((false, false)));
        assert_eq!(judge(format!("{interim}{interim}{OK}\n").as_bytes()), Ok((true, false)));
    }

    #[test]
    fn an_empty_line_before_a_response_is_ambiguous() {
        assert_eq!(judge(format!("\r\n\r\n{OK}").as_bytes()), Ok((true, true)));
    }

    #[test]
    fn each_head_has_so_many_lines_at_most() {
        let head = |status: &str, lines| format!("HTTP/1.1 {status}\r\n{}\r\n", "A: b\r\n".repeat(lines));
        let [interim, whole, larger] =
            [head("103 x", MAX_HEADERS), head("200 OK", MAX_HEADERS), head("200 OK", MAX_HEADERS + 1)];
        assert_eq!(judge(format!("{interim}{whole}").as_bytes()), Ok((true, false)));
        for head in [larger.clone(), head("103 x", MAX_HEADERS + 1), format!("{interim}{larger}")] {
            assert_eq!(judge(head.as_bytes()), Err(HeadFault::TooManyLines(MAX_HEADERS)));
        }
    }

    #[test]
    fn a_head_stays_below_its_limit_whatever_pieces_it_comes_in() {
        let head = |length: usize| {
            let frame = "HTTP/1.1 200 OK\r\nA: \r\n\r\n".len();
            format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "x".repeat(length - frame)).into_bytes()
        };
        let interim = b"HTTP/1.1 103 Early Hints\r\n\r\n".repeat(MAX_HEAD / 20);
        for size in [1, 1000, 65536, MAX_HEAD, 1 << 20] {
            let judge = |bytes: &[u8]| in_pieces(&bytes.chunks(size).collect::<Vec<_>>());
            assert_eq!(judge(&head(MAX_HEAD - 1)), Ok((true, false)), "{size}");
            assert_eq!(judge(&head(MAX_HEAD)), Err(HeadFault::TooLarge), "{size}");
            assert_eq!(judge(&head(300 << 10)), Err(HeadFault::TooLarge), "{size}");
            assert_eq!(judge(&b"\r\n".repeat(MAX_HEAD)), Err(HeadFault::TooLarge), "{size}");
            assert_eq!(judge(&[&interim[..], &head(1000)].concat()), Ok((true, false)), "{size}");
        }
    }
}
