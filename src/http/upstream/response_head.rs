//! Follows the heads of HTTP/1.1 responses, byte by byte.

use std::io;

/// The size that a head must stay below, in bytes, its last empty line included. Interim answers count one by one.
pub(super) const MAX_HEAD: usize = 256 << 10;

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
pub(super) struct HeadChecker {
    pub(super) is_over: bool,
    /// How many header lines a head may have.
    pub(super) max_headers: usize,
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
    pub(super) has_doubt: bool,
}

impl HeadChecker {
    /// Before the first byte of an answer.
    pub(super) fn new(max_headers: usize) -> Self {
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
    pub(super) fn none(max_headers: usize) -> Self {
        Self { is_over: true, ..Self::new(max_headers) }
    }

    /// Checks input. Bytes behind the head of the final response are not checked.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) -> Result<(), HeadFault> {
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
pub(super) fn begins_http2(bytes: &[u8]) -> bool {
    const SETTINGS: u8 = 4;
    matches!(bytes, [0, 0, _, SETTINGS, 0, ..])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_HEADERS: usize = 100;

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
