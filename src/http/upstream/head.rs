//! Checks the heads of HTTP/1.1 responses beneath hyper.
//!
//! hyper takes a line that ends in LF alone, and compares what it holds of a head with its limit only when a read has left
//! the head incomplete: whether it refuses a head would depend on how the bytes arrive. Here every byte of a head is judged
//! before hyper gets it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, Take};

use super::io::SocketState;

/// The size that a head must stay below, in bytes, its last empty line included. Interim answers count one by one.
pub(super) const MAX_HEAD: usize = 256 << 10;

/// How many bytes are read at a time.
///
/// hyper makes room for twice as much as a read has filled, up to what the head of an answer may be, and a client that
/// takes nothing of an answer keeps that room taken three times over.
const MAX_READ: u64 = 32 << 10;

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
    fn new() -> Self {
        Self {
            is_over: false,
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
    fn none() -> Self {
        Self { is_over: true, ..Self::new() }
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
            }
            self.line += line.len();
            let before = line.len().checked_sub(2).map_or(self.last, |at| line[at]);
            self.last = line[line.len() - 1];
            if end.is_some() {
                if before != b'\r' {
                    return Err(HeadFault::BareLf);
                }
                self.end_line();
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_line(&mut self) {
        let is_empty = self.line == 2;
        self.line = 0;
        if !is_empty {
            self.lines += 1;
        } else if self.lines == 0 {
            // It belongs to no answer, and may be left over from the one before. hyper passes over it.
            (self.has_doubt, self.started) = (true, 0);
        } else {
            let is_interim = self.start[9] == b'1' && &self.start[9..] != b"101";
            *self = Self { is_over: !is_interim, has_doubt: self.has_doubt, ..Self::new() };
        }
    }
}

/// A stream on which the heads of answers are judged, and that is read a little at a time.
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
    pub(super) fn new(inner: T, socket: Arc<SocketState>) -> Self {
        Self { inner: inner.take(MAX_READ), socket, exchange: 0, checker: HeadChecker::none() }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for HeadFilter<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        self.inner.set_limit(MAX_READ);
        ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        if buf.filled().len() > before && self.socket.is_asked() {
            self.socket.refuse();
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let begun = self.socket.requests();
        if self.exchange != begun {
            (self.exchange, self.checker) = (begun, HeadChecker::new());
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
        let mut checker = HeadChecker::new();
        for piece in pieces {
            checker.follow(piece)?;
        }
        Ok((checker.is_over, checker.has_doubt))
    }

    #[tokio::test]
    async fn no_read_takes_more_than_a_portion() {
        let portion = usize::try_from(MAX_READ).unwrap();
        let sent = vec![b'x'; 5 * portion / 2];
        let mut stream = HeadFilter::new(&sent[..], Arc::default());
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
