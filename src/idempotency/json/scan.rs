//! Reads JSON strictly, from left to right, once.

use super::Fault;

/// How deep arrays and objects may nest. Deeper ones could exhaust the stack; sorting, too, costs more with depth.
const MAX_DEPTH: usize = 64;

/// A piece of a string.
pub(super) enum Piece<'a> {
    /// Characters as written.
    Plain(&'a [u8]),
    /// What an escape, or a pair of them, stands for: a character or a lone surrogate.
    Escaped(u32),
}

/// Reads a text. Each step stands at what it passes, and leaves the scanner behind it.
pub(super) struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a [u8]) -> Result<Self, Fault> {
        std::str::from_utf8(text).map_err(|_| Fault::Syntax)?;
        Ok(Self { text, at: 0, depth: 0 })
    }

    /// Passes a value, and returns its text.
    pub(super) fn skip(&mut self) -> Result<&'a [u8], Fault> {
        let start = self.at;
        match self.peek() {
            Some(b'{') => self.sequence(b'{', b'}', |scanner, _| {
                scanner.string(&mut |_| ())?;
                scanner.colon()?;
                scanner.skip().map(drop)
            })?,
            Some(b'[') => self.sequence(b'[', b']', |scanner, _| scanner.skip().map(drop))?,
            Some(b'"') => self.string(&mut |_| ())?,
            _ => self.scalar().map(drop)?,
        }
        Ok(&self.text[start..self.at])
    }

    /// Passes an array or an object; `each` passes an element or a member, given its index.
    pub(super) fn sequence(
        &mut self,
        open: u8,
        close: u8,
        mut each: impl FnMut(&mut Self, usize) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.byte(open)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault::TooDeep);
        }
        self.space();
        if self.peek() != Some(close) {
            for index in 0.. {
                self.space();
                each(self, index)?;
                self.space();
                if self.peek() == Some(close) {
                    break;
                }
                self.byte(b',')?;
            }
        }
        self.depth -= 1;
        self.byte(close)
    }

    /// Passes the colon between a name and its value, and the white space around it.
    pub(super) fn colon(&mut self) -> Result<(), Fault> {
        self.space();
        self.byte(b':')?;
        self.space();
        Ok(())
    }

    /// Passes a string, piece by piece.
    pub(super) fn string(&mut self, emit: &mut dyn FnMut(Piece<'_>)) -> Result<(), Fault> {
        self.byte(b'"')?;
        loop {
            let rest = &self.text[self.at..];
            let run = rest.iter().position(|&byte| matches!(byte, b'"' | b'\\' | 0..0x20)).ok_or(Fault::Syntax)?;
            emit(Piece::Plain(&rest[..run]));
            self.at += run;
            if self.peek() == Some(b'"') {
                self.at += 1;
                return Ok(());
            }
            self.byte(b'\\')?;
            emit(Piece::Escaped(self.escape()?));
        }
    }

    /// Passes an escape behind its backslash; two where they are a surrogate pair.
    fn escape(&mut self) -> Result<u32, Fault> {
        let kind = self.peek().ok_or(Fault::Syntax)?;
        self.at += 1;
        Ok(match kind {
            b'"' | b'\\' | b'/' => kind.into(),
            b'b' => 0x08,
            b't' => 0x09,
            b'n' => 0x0a,
            b'f' => 0x0c,
            b'r' => 0x0d,
            b'u' => {
                let unit = self.hex()?;
                if !(0xd800..0xdc00).contains(&unit) || !self.text[self.at..].starts_with(b"\\u") {
                    return Ok(unit);
                }
                let after_first = self.at;
                self.at += 2;
                let low = self.hex()?;
                if (0xdc00..0xe000).contains(&low) {
                    0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    self.at = after_first;
                    unit
                }
            }
            _ => return Err(Fault::Syntax),
        })
    }

    fn hex(&mut self) -> Result<u32, Fault> {
        let digits = self.text.get(self.at..self.at + 4).ok_or(Fault::Syntax)?;
        self.at += 4;
        digits.iter().try_fold(0, |value, &digit| Ok(value << 4 | char::from(digit).to_digit(16).ok_or(Fault::Syntax)?))
    }

    /// Passes a number or a literal name.
    pub(super) fn scalar(&mut self) -> Result<&'a [u8], Fault> {
        let rest = &self.text[self.at..];
        let word = [&b"true"[..], b"false", b"null"].into_iter().find(|word| rest.starts_with(word));
        let length = word.map(<[u8]>::len).or_else(|| number(rest)).ok_or(Fault::Syntax)?;
        self.at += length;
        Ok(&rest[..length])
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    pub(super) fn byte(&mut self, byte: u8) -> Result<(), Fault> {
        if self.peek() != Some(byte) {
            return Err(Fault::Syntax);
        }
        self.at += 1;
        Ok(())
    }

    pub(super) fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    pub(super) fn finish(mut self) -> Result<(), Fault> {
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(Fault::Syntax) }
    }
}

/// The length of the number that `text` starts with.
fn number(text: &[u8]) -> Option<usize> {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut at = usize::from(text.first() == Some(&b'-'));
    at += match digits(at) {
        0 => return None,
        _ if text[at] == b'0' => 1,
        count => count,
    };
    if text.get(at) == Some(&b'.') {
        let count = digits(at + 1);
        if count == 0 {
            return None;
        }
        at += 1 + count;
    }
    if let Some(b'e' | b'E') = text.get(at) {
        let sign = usize::from(matches!(text.get(at + 1), Some(b'+' | b'-')));
        let count = digits(at + 1 + sign);
        if count == 0 {
            return None;
        }
        at += 1 + sign + count;
    }
    Some(at)
}
