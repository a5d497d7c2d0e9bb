//! JSON (RFC 8259) as fingerprints and keys need it: a canonical form that keeps number literals as written, and the
//! value at a pointer. A text is read strictly, from left to right, once. No tree is built: a body costs about its own size
//! in memory, whatever it holds.

use super::pointer::Pointer;

/// Why a text was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is not JSON.
    Syntax,
    /// It nests too deep.
    TooDeep,
    /// An object has a name twice, so readers may differ on what it says.
    Ambiguous,
}

/// The canonical form: members sorted by name, no white space, strings with as few escapes as possible, number
/// literals as written. It is JSON itself. Equal values, and no others, have equal forms.
///
/// Members at `exclude` are left out; an array's element at `exclude` leaves `null` in its place, so that the other
/// elements keep theirs.
pub(super) fn canonical(text: &[u8], exclude: &[Pointer]) -> Result<Vec<u8>, Fault> {
    let exclude: Vec<Vec<Vec<u8>>> = exclude.iter().map(steps).collect();
    let exclude: Vec<&[Vec<u8>]> = exclude.iter().map(Vec::as_slice).collect();
    let mut out = Vec::with_capacity(text.len());
    let mut scanner = Scanner::new(text)?;
    scanner.space();
    if exclude.iter().any(|steps| steps.is_empty()) {
        scanner.skip()?;
        out.extend_from_slice(b"null");
    } else {
        scanner.canonical(&mut out, &exclude)?;
    }
    scanner.finish()?;
    Ok(out)
}

/// The text of the value at `pointer`, or nothing if there is none. Names are compared by value.
pub(super) fn locate<'a>(text: &'a [u8], pointer: &Pointer) -> Result<Option<&'a [u8]>, Fault> {
    let mut scanner = Scanner::new(text)?;
    scanner.space();
    let found = scanner.locate(&steps(pointer))?;
    scanner.finish()?;
    Ok(found)
}

/// The value of a string's text, or nothing for another value's. In UTF-8, where a lone surrogate, which escapes can
/// express, takes the three bytes that it would take were it a character.
pub(super) fn string(text: &[u8]) -> Option<Vec<u8>> {
    let mut value = Vec::new();
    let mut scanner = Scanner::new(text).ok()?;
    scanner
        .string(&mut |piece| match piece {
            Piece::Plain(run) => value.extend_from_slice(run),
            Piece::Escaped(unit) => push_unit(&mut value, unit),
        })
        .ok()?;
    scanner.finish().ok()?;
    Some(value)
}

/// The text without the byte order mark that RFC 8259 forbids, some programs send and many skip.
pub(super) fn without_mark(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// The steps of a pointer, in the form in which names are compared.
fn steps(pointer: &Pointer) -> Vec<Vec<u8>> {
    let canonical = |step: String| {
        let mut out = Vec::new();
        for char in step.chars() {
            push_canonical(&mut out, Piece::Escaped(char.into()));
        }
        out
    };
    pointer.steps().map(canonical).collect()
}

/// Appends a piece of a string in canonical form.
fn push_canonical(out: &mut Vec<u8>, piece: Piece<'_>) {
    let unit = match piece {
        Piece::Plain(run) => return out.extend_from_slice(run),
        Piece::Escaped(unit) => unit,
    };
    match unit {
        0x22 => out.extend_from_slice(b"\\\""),
        0x5c => out.extend_from_slice(b"\\\\"),
        0x08 => out.extend_from_slice(b"\\b"),
        0x09 => out.extend_from_slice(b"\\t"),
        0x0a => out.extend_from_slice(b"\\n"),
        0x0c => out.extend_from_slice(b"\\f"),
        0x0d => out.extend_from_slice(b"\\r"),
        0..0x20 | 0xd800..0xe000 => out.extend_from_slice(format!("\\u{unit:04x}").as_bytes()),
        _ => push_unit(out, unit),
    }
}

/// Appends a character in UTF-8, or a lone surrogate as if it were one.
fn push_unit(out: &mut Vec<u8>, unit: u32) {
    match char::from_u32(unit) {
        Some(char) => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        None => out.extend([0xe0 | (unit >> 12) as u8, 0x80 | (unit >> 6 & 0x3f) as u8, 0x80 | (unit & 0x3f) as u8]),
    }
}

/// A member of an object whose canonical form is being written: positions in the output.
struct Member {
    /// Its opening quote.
    start: usize,
    /// Its name's closing quote.
    name_end: usize,
    /// Behind its comma.
    end: usize,
    /// Whether it counts.
    kept: bool,
}

impl<'a> Scanner<'a> {
    /// Writes the canonical form of the value here. `exclude` is what is left of the pointers that lead through it.
    fn canonical(&mut self, out: &mut Vec<u8>, exclude: &[&[Vec<u8>]]) -> Result<(), Fault> {
        match self.peek() {
            Some(b'{') => self.canonical_object(out, exclude),
            Some(b'[') => self.canonical_array(out, exclude),
            Some(b'"') => self.canonical_string(out),
            _ => {
                out.extend_from_slice(self.scalar()?);
                Ok(())
            }
        }
    }

    fn canonical_object(&mut self, out: &mut Vec<u8>, exclude: &[&[Vec<u8>]]) -> Result<(), Fault> {
        let mut members: Vec<Member> = Vec::new();
        out.push(b'{');
        let first = out.len();
        self.sequence(b'{', b'}', |scanner, _| {
            let start = out.len();
            scanner.canonical_string(out)?;
            let name_end = out.len() - 1;
            scanner.colon()?;
            out.push(b':');
            let (excluded, through) = follow(exclude, &out[start + 1..name_end]);
            if excluded {
                scanner.skip()?;
            } else {
                scanner.canonical(out, &through)?;
            }
            out.push(b',');
            members.push(Member { start, name_end, end: out.len(), kept: !excluded });
            Ok(())
        })?;

        let name = |member: &Member| &out[member.start + 1..member.name_end];
        let as_written = members.is_sorted_by_key(name) && members.iter().all(|member| member.kept);
        members.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        if members.windows(2).any(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(Fault::Ambiguous);
        }
        if !as_written {
            let mut sorted = Vec::with_capacity(out.len() - first);
            for member in members.iter().filter(|member| member.kept) {
                sorted.extend_from_slice(&out[member.start..member.end]);
            }
            out.truncate(first);
            out.extend_from_slice(&sorted);
        }
        close(out, first, b'}');
        Ok(())
    }

    fn canonical_array(&mut self, out: &mut Vec<u8>, exclude: &[&[Vec<u8>]]) -> Result<(), Fault> {
        out.push(b'[');
        let first = out.len();
        self.sequence(b'[', b']', |scanner, index| {
            let (excluded, through) =
                if exclude.is_empty() { (false, Vec::new()) } else { follow(exclude, index.to_string().as_bytes()) };
            if excluded {
                scanner.skip()?;
                out.extend_from_slice(b"null");
            } else {
                scanner.canonical(out, &through)?;
            }
            out.push(b',');
            Ok(())
        })?;
        close(out, first, b']');
        Ok(())
    }

    fn canonical_string(&mut self, out: &mut Vec<u8>) -> Result<(), Fault> {
        out.push(b'"');
        self.string(&mut |piece| push_canonical(out, piece))?;
        out.push(b'"');
        Ok(())
    }

    /// Passes the value here, and returns the part of it that `steps` lead to.
    fn locate(&mut self, steps: &[Vec<u8>]) -> Result<Option<&'a [u8]>, Fault> {
        let Some((step, rest)) = steps.split_first() else {
            return self.skip().map(Some);
        };
        let mut found = None;
        let mut met = false;
        match self.peek() {
            Some(b'{') => self.sequence(b'{', b'}', |scanner, _| {
                let mut name = Vec::new();
                scanner.string(&mut |piece| push_canonical(&mut name, piece))?;
                scanner.colon()?;
                if name != *step {
                    return scanner.skip().map(drop);
                }
                if std::mem::replace(&mut met, true) {
                    return Err(Fault::Ambiguous);
                }
                found = scanner.locate(rest)?;
                Ok(())
            })?,
            Some(b'[') => self.sequence(b'[', b']', |scanner, index| {
                if index.to_string().as_bytes() != step {
                    return scanner.skip().map(drop);
                }
                found = scanner.locate(rest)?;
                Ok(())
            })?,
            _ => self.skip().map(drop)?,
        }
        Ok(found)
    }
}

/// Which pointers lead on through the member or element `name`, and whether one ends at it.
fn follow<'p>(pointers: &[&'p [Vec<u8>]], name: &[u8]) -> (bool, Vec<&'p [Vec<u8>]>) {
    let through: Vec<_> = pointers
        .iter()
        .filter_map(|steps| steps.split_first())
        .filter(|(step, _)| step.as_slice() == name)
        .map(|(_, rest)| rest)
        .collect();
    (through.iter().any(|rest| rest.is_empty()), through)
}

/// Closes an array or an object whose first element stands at `first` and whose elements each end in a comma.
fn close(out: &mut Vec<u8>, first: usize, with: u8) {
    if out.len() > first {
        out.pop();
    }
    out.push(with);
}

/// How deep arrays and objects may nest. Deeper ones could exhaust the stack; sorting, too, costs more with depth.
const MAX_DEPTH: usize = 64;

/// A piece of a string.
enum Piece<'a> {
    /// Characters as written.
    Plain(&'a [u8]),
    /// What an escape, or a pair of them, stands for: a character or a lone surrogate.
    Escaped(u32),
}

/// Reads a text. Each step stands at what it passes, and leaves the scanner behind it.
struct Scanner<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Scanner<'a> {
    fn new(text: &'a [u8]) -> Result<Self, Fault> {
        std::str::from_utf8(text).map_err(|_| Fault::Syntax)?;
        Ok(Self { text, at: 0, depth: 0 })
    }

    /// Passes a value, and returns its text.
    fn skip(&mut self) -> Result<&'a [u8], Fault> {
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
    fn sequence(
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
    fn colon(&mut self) -> Result<(), Fault> {
        self.space();
        self.byte(b':')?;
        self.space();
        Ok(())
    }

    /// Passes a string, piece by piece.
    fn string(&mut self, emit: &mut dyn FnMut(Piece<'_>)) -> Result<(), Fault> {
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
    fn scalar(&mut self) -> Result<&'a [u8], Fault> {
        let rest = &self.text[self.at..];
        let word = [&b"true"[..], b"false", b"null"].into_iter().find(|word| rest.starts_with(word));
        let length = word.map(<[u8]>::len).or_else(|| number(rest)).ok_or(Fault::Syntax)?;
        self.at += length;
        Ok(&rest[..length])
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn byte(&mut self, byte: u8) -> Result<(), Fault> {
        if self.peek() != Some(byte) {
            return Err(Fault::Syntax);
        }
        self.at += 1;
        Ok(())
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn finish(mut self) -> Result<(), Fault> {
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

#[cfg(test)]
mod tests;
