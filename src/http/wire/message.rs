//! The messages of a connection, one after the other.

use super::chunks::Chunks;
use super::fault::Fault;
use super::head::{self, Framing};
use crate::http::limits::Limits;

/// Follows a client's messages: which bytes belong to one, and whether they are one beyond doubt.
#[derive(Debug)]
pub struct Message {
    limits: Limits,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// In a head that begins there, of which the line that is under way begins there, and of which so much was looked at.
    Head {
        begin: usize,
        line: usize,
        seen: usize,
    },
    Length(u64),
    Chunks(Box<Chunks>),
    /// Another protocol may follow: nothing more is judged.
    Elsewhere,
}

const FIRST: Place = Place::Head { begin: 0, line: 0, seen: 0 };

impl Message {
    /// Before the first.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, place: FIRST }
    }

    /// What clients may take.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How many of these bytes may go on: none beyond the end of the message, and no head before it is whole. What may
    /// not yet go on is given again, with more behind it.
    ///
    /// # Errors
    /// They are no message. Nothing that follows is.
    pub fn follow(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let mut passed = 0;
        if let Place::Head { .. } = self.place {
            passed = self.follow_head(bytes)?;
            if passed == 0 {
                return Ok(0);
            }
        }
        let rest = &bytes[passed..];
        match &mut self.place {
            Place::Head { .. } | Place::Elsewhere => {}
            Place::Length(left) => {
                let some = rest.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                passed += some;
                *left -= some as u64;
                if *left == 0 {
                    self.place = FIRST;
                }
            }
            Place::Chunks(chunks) => {
                let taken = chunks.take(rest, &self.limits);
                if passed > 0 && taken.is_err() || matches!(taken, Ok((_, true))) {
                    // Where its head has not gone on either, none of it has.
                    self.place = FIRST;
                }
                passed += taken?.0;
            }
        }
        Ok(passed)
    }

    /// Whether all of a message has passed, and nothing of the next.
    #[must_use]
    pub fn is_between(&self) -> bool {
        matches!(self.place, Place::Head { .. })
    }

    /// Whether a body is under way.
    pub(super) fn is_in_body(&self) -> bool {
        matches!(self.place, Place::Length(_) | Place::Chunks(_))
    }

    /// Whether another protocol may follow.
    pub(super) fn is_elsewhere(&self) -> bool {
        matches!(self.place, Place::Elsewhere)
    }

    /// The length of the head that these bytes begin with, once it is whole.
    fn follow_head(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let Place::Head { mut begin, mut line, mut seen } = self.place else { return Ok(0) };
        // One that speaks something else may never send a line.
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
                // Left over from the one before (RFC 9112, 2.2).
                begin = end;
            } else if is_empty {
                let head = head::judge(&bytes[begin..end], &self.limits)?;
                self.place = match head.framing {
                    _ if head.upgrades && head.framing == Framing::Length(0) => Place::Elsewhere,
                    Framing::Length(0) => FIRST,
                    Framing::Length(length) => Place::Length(length),
                    Framing::Chunked => Place::Chunks(Box::new(Chunks::new())),
                };
                return Ok(end);
            }
        }
        if bytes.len() >= self.limits.max_header_size {
            return Err(Fault::HeadTooLarge);
        }
        self.place = Place::Head { begin, line, seen: bytes.len() };
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
        let mut message = Message::new(Limits { max_header_size: 300, ..Limits::default() });
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
        let mut message = Message::new(Limits::default());
        assert!(message.follow(b"GET / HTTP/1.1\n").is_err());
        assert!(Message::new(Limits::default()).follow(b"\x16\x03\x01").is_err());
        assert!(Message::new(Limits::default()).follow(b"\n").is_err());
        assert!(Message::new(Limits::default()).follow(b"\r\r\n\r\n").is_err());
    }

    #[test]
    fn a_head_is_no_larger_than_it_may_be() {
        let limits = Limits { max_header_size: 64, ..Limits::default() };
        let head = |pad| format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(pad)).into_bytes();
        let fitting = 64 - head(0).len();
        assert_eq!(Message::new(limits.clone()).follow(&head(fitting)), Ok(64));
        assert_eq!(Message::new(limits.clone()).follow(&head(fitting + 1)), Err(Fault::HeadTooLarge));
        assert_eq!(Message::new(limits.clone()).follow(&[b'x'; 64]), Err(Fault::HeadTooLarge));
        assert_eq!(Message::new(limits).follow(&b"\r\n".repeat(40)), Err(Fault::HeadTooLarge));
    }

    #[test]
    fn empty_lines_before_a_request_are_looked_at_once() {
        // Looked at again for each that follows, they would take minutes of a core.
        let stream = [&b"\r\n".repeat(500_000)[..], MESSAGES[0].as_bytes()].concat();
        let mut message = Message::new(Limits { max_header_size: 2 << 20, ..Limits::default() });
        assert_eq!(message.follow(&stream), Ok(stream.len()));
    }

    #[test]
    fn what_follows_an_upgrade_is_not_judged() {
        let mut message = Message::new(Limits::default());
        let head = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
        assert_eq!(message.follow(&[&head[..], b"\x81\x00"].concat()), Ok(head.len()));
        assert!(message.is_elsewhere());
        assert_eq!(message.follow(b"\x81\x00"), Ok(0));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            order in prop::collection::vec(0..MESSAGES.len(), 1..6),
            pieces in prop::collection::vec(1usize..90, 1..8),
        ) {
            let expected: Vec<Vec<u8>> = order.iter().map(|place| MESSAGES[*place].as_bytes().to_vec()).collect();
            prop_assert_eq!(read(&expected.concat(), &pieces), (expected, None));
        }

        #[test]
        fn nor_do_they_where_something_is_wrong(
            place in 0..MESSAGES.len(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            pieces in prop::collection::vec(1usize..40, 1..8),
        ) {
            let mut stream = MESSAGES[place].as_bytes().to_vec();
            let at = at.index(stream.len());
            stream[at] = byte;
            stream.extend_from_slice(MESSAGES[0].as_bytes());
            let (whole, split) = (read(&stream, &[stream.len()]), read(&stream, &pieces));
            prop_assert_eq!(&whole.0, &split.0);
            prop_assert_eq!(whole.1.is_some(), split.1.is_some());
        }
    }
}
