//! A body in chunks, byte by byte (RFC 9112, 7.1).

use super::fault::Fault;
use super::head::{is_text, judge_trailers};
use crate::http::limits::Limits;

/// How many bytes of extensions a body has at most. Nobody uses them but for making others read.
const EXTENSIONS: usize = 4 << 10;

/// How many digits a chunk's size has at most.
const DIGITS: u8 = 15;

/// How far a body in chunks has come.
#[derive(Debug)]
pub(super) struct Chunks {
    place: Place,
    extensions: usize,
    /// What follows the last chunk, as far as it has come.
    trailers: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Size {
        size: u64,
        digits: u8,
    },
    /// White space that nothing but an extension may follow.
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

const SIZE: Place = Place::Size { size: 0, digits: 0 };
const WRONG: Fault = Fault::Malformed("a chunk's size is not a number in a line of its own (RFC 9112, 7.1)");

impl Chunks {
    pub(super) fn new() -> Self {
        Self { place: SIZE, extensions: 0, trailers: Vec::new() }
    }

    /// Takes bytes, up to the end of the body. Says how many, and whether that is the end.
    pub(super) fn take(&mut self, bytes: &[u8], limits: &Limits) -> Result<(usize, bool), Fault> {
        let mut taken = 0;
        while taken < bytes.len() {
            if let Place::Data(left) = &mut self.place {
                let some = (bytes.len() - taken).min(usize::try_from(*left).unwrap_or(usize::MAX));
                taken += some;
                *left -= some as u64;
                if *left == 0 {
                    self.place = Place::DataEnd;
                }
                continue;
            }
            let byte = bytes[taken];
            taken += 1;
            if self.step(byte, limits)? {
                return Ok((taken, true));
            }
        }
        Ok((taken, false))
    }

    /// Takes a byte that is no data. True at the end of the body.
    fn step(&mut self, byte: u8, limits: &Limits) -> Result<bool, Fault> {
        self.place = match (self.place, byte) {
            (Place::Size { size, digits }, _) if byte.is_ascii_hexdigit() && digits < DIGITS => {
                // A digit is below 16.
                let digit = u64::from(char::from(byte).to_digit(16).unwrap_or_default());
                Place::Size { size: size << 4 | digit, digits: digits + 1 }
            }
            (Place::Size { size, digits: 1.. } | Place::Extension { size }, b'\r') => Place::SizeEnd { size },
            (Place::Size { size, digits: 1.. } | Place::Space { size }, b';') => Place::Extension { size },
            (Place::Size { size, digits: 1.. } | Place::Space { size }, b' ' | b'\t') => {
                self.extends()?;
                Place::Space { size }
            }
            (Place::Extension { size }, _) if is_text(byte) => {
                self.extends()?;
                Place::Extension { size }
            }
            (Place::SizeEnd { size: 0 }, b'\n') => Place::Trailers { line: 0 },
            (Place::SizeEnd { size }, b'\n') => Place::Data(size),
            (Place::DataEnd, b'\r') => Place::DataEndLine,
            (Place::DataEndLine, b'\n') => SIZE,
            (Place::Trailers { line }, _) => return self.trail(byte, line, limits),
            (Place::DataEnd | Place::DataEndLine, _) => {
                return Err(Fault::Malformed("a chunk is longer than its size (RFC 9112, 7.1)"));
            }
            _ => return Err(WRONG),
        };
        Ok(false)
    }

    fn extends(&mut self) -> Result<(), Fault> {
        self.extensions += 1;
        if self.extensions > EXTENSIONS {
            return Err(Fault::Malformed("the extensions of the chunks are too long"));
        }
        Ok(())
    }

    /// Takes a byte after the last chunk. `line` is where its line begins.
    fn trail(&mut self, byte: u8, line: usize, limits: &Limits) -> Result<bool, Fault> {
        if self.trailers.len() >= limits.max_header_size {
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
                self.place = Place::Trailers { line: end };
                Ok(false)
            }
            _ => Err(Fault::Malformed("a line ends in LF alone (RFC 9112, 2.2)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of a body, in one piece and byte by byte: how long it is, nothing where it has no end, or a fault.
    fn taken(body: &[u8]) -> Result<Option<usize>, Fault> {
        let limits = Limits::default();
        let at_once = Chunks::new().take(body, &limits).map(|(taken, ended)| ended.then_some(taken));
        let mut chunks = Chunks::new();
        let mut one_by_one = Ok(None);
        for (place, byte) in body.iter().enumerate() {
            match chunks.take(&[*byte], &limits) {
                Ok((_, false)) => {}
                Ok((_, true)) => {
                    one_by_one = Ok(Some(place + 1));
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
            assert_eq!(taken(more.as_bytes()), Ok(Some(body.len())), "{body:?}");
            for length in 0..body.len() {
                assert_eq!(taken(&body.as_bytes()[..length]), Ok(None), "{body:?} {length}");
            }
        }
    }

    #[test]
    fn what_is_no_chunk_is_refused() {
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
            assert!(taken(body.as_bytes()).is_err(), "{body:?}");
        }
    }

    #[test]
    fn extensions_and_trailers_are_bounded() {
        let extended = format!("3;{}\r\n", "a".repeat(EXTENSIONS + 1));
        assert!(taken(extended.as_bytes()).is_err());
        let many = "1;aaaaaaaaa\r\na\r\n".repeat(EXTENSIONS / 9 + 1);
        assert!(taken(many.as_bytes()).is_err());
        let trailed = format!("0\r\nA: {}\r\n\r\n", "b".repeat(64 << 10));
        assert_eq!(taken(trailed.as_bytes()), Err(Fault::HeadTooLarge));
    }
}
