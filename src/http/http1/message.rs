//! Delimits the messages on a connection.

use super::chunked::ChunkedDecoder;
use super::head::{self, Framing};
use crate::http::fault::Fault;
use crate::http::limits::Limits;

/// Tracks which bytes belong to a client's message, and checks that the message is unambiguous.
#[derive(Debug)]
pub struct MessageParser {
    limits: Limits,
    state: State,
}

#[derive(Debug)]
enum State {
    /// In a head. Offsets of its start, of the current line, and of the first byte that was not scanned.
    Head {
        begin: usize,
        line: usize,
        seen: usize,
    },
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
    /// Another protocol may follow: the rest is not checked.
    Upgraded,
}

const FIRST: State = State::Head { begin: 0, line: 0, seen: 0 };

impl MessageParser {
    /// A parser before the first message of a connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, state: FIRST }
    }

    /// The limits on clients.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns how many of these bytes may be passed on: none beyond the end of the message, and no part of an
    /// incomplete head. The caller passes the rest again, with more input behind it.
    ///
    /// # Errors
    /// The bytes are not a message. The connection cannot be read any further.
    pub fn follow(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let mut passed = 0;
        if let State::Head { .. } = self.state {
            passed = self.follow_head(bytes)?;
            if passed == 0 {
                return Ok(0);
            }
        }
        let rest = &bytes[passed..];
        match &mut self.state {
            State::Head { .. } | State::Upgraded => {}
            State::Length(left) => {
                let some = rest.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                passed += some;
                *left -= some as u64;
                if *left == 0 {
                    self.state = FIRST;
                }
            }
            State::Chunked(decoder) => {
                let taken = decoder.decode(rest, &self.limits);
                if passed > 0 && taken.is_err() || matches!(taken, Ok((_, true))) {
                    // If its head was not passed on either, the message as a whole is refused.
                    self.state = FIRST;
                }
                passed += taken?.0;
            }
        }
        Ok(passed)
    }

    /// Whether the last message has passed completely, and no part of the next one.
    #[must_use]
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Head { .. })
    }

    /// Whether a body is under way.
    pub(super) fn is_in_body(&self) -> bool {
        matches!(self.state, State::Length(_) | State::Chunked(_))
    }

    /// Whether another protocol may follow.
    pub(super) fn is_upgraded(&self) -> bool {
        matches!(self.state, State::Upgraded)
    }

    /// The length of the head at the start of these bytes, once it is complete.
    fn follow_head(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let State::Head { mut begin, mut line, mut seen } = self.state else { return Ok(0) };
        // A client of another protocol may never send a line end.
        if bytes.first().is_some_and(|first| !head::may_begin(*first)) {
            return Err(Fault::Malformed("this is no HTTP request (RFC 9112, 3)"));
        }
        while let Some(found) = memchr::memchr(b'\n', &bytes[seen..]) {
            let end = seen + found + 1;
            if !bytes[line..end].ends_with(b"\r\n") {
                return Err(Fault::Malformed("a line ends in LF alone (RFC 9112, 2.2)"));
            }
            if end > self.limits.max_header_size {
                return Err(Fault::HeadTooLarge);
            }
            let (is_empty, is_first) = (end - line == 2, line == begin);
            (line, seen) = (end, end);
            if is_empty && is_first {
                // An empty line after the previous message (RFC 9112, 2.2).
                begin = end;
            } else if is_empty {
                let head = head::judge(&bytes[begin..end], &self.limits)?;
                self.state = match head.framing {
                    _ if head.upgrades && head.framing == Framing::Length(0) => State::Upgraded,
                    Framing::Length(0) => FIRST,
                    Framing::Length(length) => State::Length(length),
                    Framing::Chunked => State::Chunked(Box::new(ChunkedDecoder::new())),
                };
                return Ok(end);
            }
        }
        if bytes.len() >= self.limits.max_header_size {
            return Err(Fault::HeadTooLarge);
        }
        self.state = State::Head { begin, line, seen: bytes.len() };
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MESSAGES: [&str; 6] = [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.0\r\n\r\n",
        "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n\r\nabc",
        "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nA: b\r\n\r\n",
        "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ];

    /// Reads a stream that comes in pieces; gives the messages in it, and what is wrong with what follows.
    fn read(stream: &[u8], pieces: &[usize]) -> (Vec<Vec<u8>>, Option<Fault>) {
        let mut message = MessageParser::new(Limits { max_header_size: 300, ..Limits::default() });
        let (mut messages, mut current, mut held) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rest, mut pieces) = (stream, pieces.iter().cycle());
        while !rest.is_empty() {
            let (piece, others) = rest.split_at((*pieces.next().unwrap()).min(rest.len()));
            held.extend_from_slice(piece);
            rest = others;
            while !held.is_empty() {
                match message.follow(&held) {
                    Ok(0) => break,
                    Ok(passed) => current.extend(held.drain(..passed)),
                    Err(fault) => return (messages, Some(fault)),
                }
                if message.is_between() {
                    messages.push(std::mem::take(&mut current));
                }
            }
        }
        (messages, None)
    }

    #[test]
    fn a_line_that_ends_in_lf_alone_is_refused_at_once() {
        let mut message = MessageParser::new(Limits::default());
        assert!(message.follow(b"GET / HTTP/1.1\n").is_err());
        assert!(MessageParser::new(Limits::default()).follow(b"\x16\x03\x01").is_err());
        assert!(MessageParser::new(Limits::default()).follow(b"\n").is_err());
        assert!(MessageParser::new(Limits::default()).follow(b"\r\r\n\r\n").is_err());
    }

    #[test]
    fn a_head_is_no_larger_than_it_may_be() {
        let limits = Limits { max_header_size: 64, ..Limits::default() };
        let head = |pad| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(pad)).into_bytes();
        let fitting = 64 - head(0).len();
        assert_eq!(MessageParser::new(limits.clone()).follow(&head(fitting)), Ok(64));
        assert_eq!(MessageParser::new(limits.clone()).follow(&head(fitting + 1)), Err(Fault::HeadTooLarge));
        assert_eq!(MessageParser::new(limits.clone()).follow(&[b'x'; 64]), Err(Fault::HeadTooLarge));
        assert_eq!(MessageParser::new(limits).follow(&b"\r\n".repeat(40)), Err(Fault::HeadTooLarge));
    }

    #[test]
    fn empty_lines_before_a_request_are_looked_at_once() {
        // Looked at again for each that follows, they would take minutes of a core.
        let stream = [&b"\r\n".repeat(500_000)[..], MESSAGES[0].as_bytes()].concat();
        let mut message = MessageParser::new(Limits { max_header_size: 2 << 20, ..Limits::default() });
        assert_eq!(message.follow(&stream), Ok(stream.len()));
    }

    #[test]
    fn input_after_an_upgrade_is_not_checked() {
        let mut message = MessageParser::new(Limits::default());
        let head = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
        assert_eq!(message.follow(&[&head[..], b"\x81\x00"].concat()), Ok(head.len()));
        assert!(message.is_upgraded());
        assert_eq!(message.follow(b"\x81\x00"), Ok(0));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            order in prop::collection::vec(0..MESSAGES.len(), 1..6),
            pieces in prop::collection::vec(1usize..90, 1..8),
        ) {
            let expected: Vec<Vec<u8>> = order.iter().map(|state| MESSAGES[*state].as_bytes().to_vec()).collect();
            prop_assert_eq!(read(&expected.concat(), &pieces), (expected, None));
        }

        #[test]
        fn chunking_makes_no_difference_to_faults(
            state in 0..MESSAGES.len(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            pieces in prop::collection::vec(1usize..40, 1..8),
        ) {
            let mut stream = MESSAGES[state].as_bytes().to_vec();
            let at = at.index(stream.len());
            stream[at] = byte;
            stream.extend_from_slice(MESSAGES[0].as_bytes());
            let (whole, split) = (read(&stream, &[stream.len()]), read(&stream, &pieces));
            prop_assert_eq!(&whole.0, &split.0);
            prop_assert_eq!(whole.1.is_some(), split.1.is_some());
        }
    }
}
