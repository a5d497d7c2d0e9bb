//! A decoder of the chunked transfer coding (RFC 9112, 7.1).

use super::head::{is_text, judge_trailers};
use crate::http::fault::Fault;
use crate::http::limits::Limits;

/// The most bytes of chunk extensions in a body. Extensions have no use but to make a recipient read.
const MAX_EXTENSIONS: usize = 4 << 10;

/// The most digits of a chunk size.
const MAX_SIZE_DIGITS: u8 = 15;

/// The most bytes of a trailer section. hyper, which decodes the body behind this, takes no longer ones.
const MAX_TRAILERS: usize = (16 << 10) - 1;

/// The state of decoding one body.
#[derive(Debug)]
pub(super) struct ChunkedDecoder {
    state: State,
    extensions: usize,
    /// The trailer section, as far as it has arrived.
    trailers: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size {
        size: u64,
        digits: u8,
    },
    /// White space, which only an extension may follow.
    Space {
        size: u64,
    },
    Extension {
        size: u64,
    },
    SizeEnd {
        size: u64,
    },
    Data(u64),
    DataEnd,
    DataEndLine,
    Trailers {
        line: usize,
    },
}

const START: State = State::Size { size: 0, digits: 0 };
const BAD_SIZE: Fault = Fault::Malformed("a chunk's size is not a number in a line of its own (RFC 9112, 7.1)");

impl ChunkedDecoder {
    pub(super) fn new() -> Self {
        Self { state: START, extensions: 0, trailers: Vec::new() }
    }

    /// Consumes bytes up to the end of the body. Returns how many, and whether the body has ended.
    pub(super) fn decode(&mut self, bytes: &[u8], limits: &Limits) -> Result<(usize, bool), Fault> {
        let mut decoded = 0;
        while decoded < bytes.len() {
            if let State::Data(left) = &mut self.state {
                let some = (bytes.len() - decoded).min(usize::try_from(*left).unwrap_or(usize::MAX));
                decoded += some;
                *left -= some as u64;
                if *left == 0 {
                    self.state = State::DataEnd;
                }
                continue;
            }
            let byte = bytes[decoded];
            decoded += 1;
            if self.step(byte, limits)? {
                return Ok((decoded, true));
            }
        }
        Ok((decoded, false))
    }

    /// Consumes a byte that is not data. Returns true at the end of the body.
    fn step(&mut self, byte: u8, limits: &Limits) -> Result<bool, Fault> {
        self.state = match (self.state, byte) {
            (State::Size { size, digits }, _) if byte.is_ascii_hexdigit() && digits < MAX_SIZE_DIGITS => {
                // A digit is below 16.
                let digit = u64::from(char::from(byte).to_digit(16).unwrap_or_default());
                State::Size { size: size << 4 | digit, digits: digits + 1 }
            }
            (State::Size { size, digits: 1.. } | State::Extension { size }, b'\r') => State::SizeEnd { size },
            (State::Size { size, digits: 1.. } | State::Space { size }, b';') => State::Extension { size },
            (State::Size { size, digits: 1.. } | State::Space { size }, b' ' | b'\t') => {
                self.count_extension()?;
                State::Space { size }
            }
            (State::Extension { size }, _) if is_text(byte) => {
                self.count_extension()?;
                State::Extension { size }
            }
            (State::SizeEnd { size: 0 }, b'\n') => State::Trailers { line: 0 },
            (State::SizeEnd { size }, b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataEndLine,
            (State::DataEndLine, b'\n') => START,
            (State::Trailers { line }, _) => return self.trailer_byte(byte, line, limits),
            (State::DataEnd | State::DataEndLine, _) => {
                return Err(Fault::Malformed("a chunk is longer than its size (RFC 9112, 7.1)"));
            }
            _ => return Err(BAD_SIZE),
        };
        Ok(false)
    }

    fn count_extension(&mut self) -> Result<(), Fault> {
        self.extensions += 1;
        if self.extensions > MAX_EXTENSIONS {
            return Err(Fault::Malformed("the extensions of the chunks are too long"));
        }
        Ok(())
    }

    /// Consumes a byte of the trailer section. `line` is where its line starts.
    fn trailer_byte(&mut self, byte: u8, line: usize, limits: &Limits) -> Result<bool, Fault> {
        if self.trailers.len() >= limits.max_header_size.min(MAX_TRAILERS) {
            return Err(Fault::HeadTooLarge);
        }
        self.trailers.push(byte);
        if byte != b'\n' {
            return Ok(false);
        }
        let end = self.trailers.len();
        match &self.trailers[line..] {
            b"\r\n" => {
                judge_trailers(&self.trailers, limits)?;
                Ok(true)
            }
            whole if whole.ends_with(b"\r\n") => {
                self.state = State::Trailers { line: end };
                Ok(false)
            }
            _ => Err(Fault::Malformed("a line ends in LF alone (RFC 9112, 2.2)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a body at once and byte by byte. Returns its length, `None` if it has no end, or a fault.
    fn decoded(body: &[u8]) -> Result<Option<usize>, Fault> {
        let limits = Limits::default();
        let at_once = ChunkedDecoder::new().decode(body, &limits).map(|(decoded, ended)| ended.then_some(decoded));
        let mut decoder = ChunkedDecoder::new();
        let mut one_by_one = Ok(None);
        for (state, byte) in body.iter().enumerate() {
            match decoder.decode(&[*byte], &limits) {
                Ok((_, false)) => {}
                Ok((_, true)) => {
                    one_by_one = Ok(Some(state + 1));
                    break;
                }
                Err(fault) => {
                    one_by_one = Err(fault);
                    break;
                }
            }
        }
        assert_eq!(at_once, one_by_one);
        at_once
    }

    #[test]
    fn a_body_ends_where_it_says() {
        for body in [
            "0\r\n\r\n",
            "3\r\nabc\r\n0\r\n\r\n",
            "003\r\nabc\r\nA\r\n0123456789\r\n000\r\n\r\n",
            "3;a=b;c=\"d e\"\r\nabc\r\n0;x\r\n\r\n",
            "3 ;a\r\nabc\r\n0\r\n\r\n",
            "0\r\nSum: 5\r\nB:\r\n\r\n",
        ] {
            let more = format!("{body}GET / HTTP/1.1");
            assert_eq!(decoded(more.as_bytes()), Ok(Some(body.len())), "{body:?}");
            for length in 0..body.len() {
                assert_eq!(decoded(&body.as_bytes()[..length]), Ok(None), "{body:?} {length}");
            }
        }
    }

    #[test]
    fn malformed_chunks_are_refused() {
        for body in [
            "\r\n",
            "x\r\n",
            "3\nabc\r\n0\r\n\r\n",
            "3\r\nabc\n0\r\n\r\n",
            "3\r\nabcd\r\n0\r\n\r\n",
            "3\rabc",
            "3 \r\nabc",
            " 3\r\nabc",
            "0x3\r\nabc",
            "+3\r\nabc",
            "-1\r\n",
            ";a\r\n",
            "3;a\nb\r\nabc",
            "3;a\rb\r\nabc",
            "3;\0\r\nabc",
            "ffffffffffffffff\r\n",
            "10000000000000003\r\nabc",
            "0\r\n\n",
            "0\r\nA: b\n\r\n",
            "0\r\nA : b\r\n\r\n",
            "0\r\nContent-Length: 1\r\n\r\n",
            "0\r\n\rx",
        ] {
            // A bare CR in the trailers is seen at the end of its line.
            let body = if body == "0\r\n\rx" { "0\r\n\rx\r\n\r\n" } else { body };
            assert!(decoded(body.as_bytes()).is_err(), "{body:?}");
        }
    }

    #[test]
    fn extensions_and_trailers_are_bounded() {
        let extended = format!("3;{}\r\n", "a".repeat(MAX_EXTENSIONS + 1));
        assert!(decoded(extended.as_bytes()).is_err());
        let many = "1;aaaaaaaaa\r\na\r\n".repeat(MAX_EXTENSIONS / 9 + 1);
        assert!(decoded(many.as_bytes()).is_err());
        let trailed = |size: usize| decoded(format!("0\r\nA: {}\r\n\r\n", "b".repeat(size - 7)).as_bytes());
        assert_eq!(trailed(MAX_TRAILERS), Ok(Some(MAX_TRAILERS + 3)));
        assert_eq!(trailed(MAX_TRAILERS + 1), Err(Fault::HeadTooLarge));
    }
}
