//! Refuses a `:path` with a `#`, and trailers with a pseudo-header.
//!
//! A target has no fragment (RFC 9113, 8.3.1). The `http` crate cuts one off when the h2 crate makes a URI of the `:path`,
//! and leaves no trace of it: the request would go on with another target than its client sent. So the header blocks of a
//! client are followed before h2 reads them, and a `#` in a `:path` becomes a `>`, for which h2 resets the stream.
//! Huffman's code has 12 bits for either, which differ in the last one.
//!
//! Trailers have no pseudo-headers (RFC 9113, 8.1). The h2 crate drops those that it knows, and ends the connection for any
//! other. To have it do so for all, each byte from there on becomes one that is no end of a number: no line ends any more.
//!
//! Of the dynamic table (RFC 7541, 2.3.2), only which entries are pseudo-headers, and `:path`, has to be known. A whole
//! line that is taken from there lost its `#` when it was added. What h2 evicts needs no count: those are the oldest
//! entries, which moves no other, and h2 ends a connection that refers to what is gone.

use super::frame_parser::{FrameHeader, stream_id};
use crate::http::frame::{CONTINUATION, HEADERS, PADDED, PRIORITY, PUSH_PROMISE};

/// The name, as it is and in Huffman's code: h2 takes no other padding than the right one.
const PATH: &[u8] = b":path";
const PATH_CODED: &[u8] = b"\xb9\x58\xd3\x3f";

/// The index of the first entry of the dynamic table.
const DYNAMIC: u64 = 62;

/// The index of the last pseudo-header of the static table, which begins with them.
const LAST_PSEUDO: u64 = 14;

/// A byte with which no number ends, and with which no line begins that has no number.
const ENDLESS: u8 = 0xFF;

/// The most bytes before a header block in its frame: padding length and priority.
const MAX_PREFIX: usize = 6;

/// Scans the header blocks of a connection.
pub(super) struct PathFilter {
    /// The bytes before the block in the current frame.
    prefix: [u8; MAX_PREFIX],
    have: usize,
    needed: usize,
    /// The length of the block with its padding; 0 where the frame has no block.
    length: usize,
    frame: FrameHeader,
    /// How many bytes of the block have yet to arrive.
    left: usize,
    block: HeaderBlock,
}

impl PathFilter {
    pub(super) fn new() -> Self {
        Self {
            prefix: [0; MAX_PREFIX],
            have: 0,
            needed: 0,
            length: 0,
            frame: FrameHeader { kind: 0, flags: 0, length: 0, stream: 0 },
            left: 0,
            block: HeaderBlock::new(),
        }
    }

    /// A frame begins, perhaps of trailers.
    pub(super) fn on_frame(&mut self, frame: FrameHeader, is_trailers: bool) {
        let padding = usize::from(frame.flags & PADDED != 0);
        (self.frame, self.have, self.left) = (frame, 0, 0);
        self.needed = match frame.kind {
            HEADERS => padding + if frame.flags & PRIORITY != 0 { 5 } else { 0 },
            // h2 reads it before it refuses it.
            PUSH_PROMISE => padding + 4,
            CONTINUATION => 0,
            _ => return self.length = 0,
        };
        self.length = (frame.length as usize).saturating_sub(self.needed);
        if frame.kind != CONTINUATION {
            self.block.begin(is_trailers);
        }
        if self.needed == 0 {
            self.left = self.length;
        }
    }

    /// Processes payload bytes.
    pub(super) fn on_payload(&mut self, bytes: &mut [u8]) {
        if self.length == 0 {
            return;
        }
        let (prefix, bytes) = bytes.split_at_mut(bytes.len().min(self.needed - self.have));
        if !prefix.is_empty() {
            self.prefix[self.have..self.have + prefix.len()].copy_from_slice(prefix);
            self.have += prefix.len();
            if self.have == self.needed {
                self.left = self.block_length();
            }
        }
        let block = bytes.len().min(self.left);
        self.left -= block;
        self.block.read(&mut bytes[..block]);
    }

    /// The length of the block, once its prefix has arrived.
    fn block_length(&self) -> usize {
        let is_padded = self.frame.flags & PADDED != 0;
        let padding = if is_padded { usize::from(self.prefix[0]) } else { 0 };
        let priority = &self.prefix[usize::from(is_padded)..];
        // h2 skips the block of a stream that depends on itself.
        if let (HEADERS, true, [a, b, c, d, ..]) = (self.frame.kind, self.frame.flags & PRIORITY != 0, priority)
            && stream_id([*a, *b, *c, *d]) == self.frame.stream
        {
            return 0;
        }
        self.length.saturating_sub(padding)
    }
}

/// A header block (RFC 7541, 6), and the tracked part of the dynamic table.
struct HeaderBlock {
    state: State,
    /// Whether it has trailers.
    is_trailers: bool,
    /// Whether the line at hand is a `:path`.
    is_path: bool,
    /// Whether it is a pseudo-header.
    is_pseudo: bool,
    /// Whether it enters the dynamic table.
    is_added: bool,
    /// Which entries of the dynamic table are named `:path`; the lowest bit is the newest. There are 128 at most: each
    /// counts for 32 bytes at least, of 4,096.
    paths: u128,
    /// And which of them are pseudo-headers.
    pseudo: u128,
}

#[derive(Clone, Copy)]
enum State {
    /// A line begins.
    Field,
    /// The length of a string begins.
    Length(StringKind),
    /// A number goes on.
    Integer { of: IntegerKind, value: u64, shift: u32 },
    /// In a name: `left` bytes have yet to arrive; `matched` is how much of `:path` the earlier bytes match, if they
    /// do.
    Name { left: u64, is_coded: bool, matched: Option<usize> },
    /// In a value: `left` bytes have yet to arrive.
    Value { left: u64, code: Option<HuffmanDecoder> },
    /// The connection is about to end.
    Refused,
}

#[derive(Clone, Copy)]
enum StringKind {
    Name,
    Value,
}

/// The meaning of an integer.
#[derive(Clone, Copy)]
enum IntegerKind {
    /// The index of a whole line.
    Whole,
    /// The size of the table.
    Size,
    /// The index of a name.
    Name,
    /// The length of a string, in Huffman's code or as it is.
    Length { of: StringKind, is_coded: bool },
}

impl HeaderBlock {
    fn new() -> Self {
        let state = State::Field;
        Self { state, is_trailers: false, is_path: false, is_pseudo: false, is_added: false, paths: 0, pseudo: 0 }
    }

    fn begin(&mut self, is_trailers: bool) {
        self.is_trailers = is_trailers;
        if !matches!(self.state, State::Refused) {
            self.state = State::Field;
        }
    }

    fn read(&mut self, bytes: &mut [u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &mut bytes[at..];
            at += match &mut self.state {
                State::Refused => {
                    rest.fill(ENDLESS);
                    rest.len()
                }
                State::Name { left, is_coded, matched } => {
                    let (some, expected) = (part(rest, left), if *is_coded { PATH_CODED } else { PATH });
                    if *matched == Some(0) {
                        self.is_pseudo = begins_pseudo(some, *is_coded);
                    }
                    *matched = matched.filter(|at| expected[*at..].starts_with(some)).map(|at| at + some.len());
                    let is_path = *matched == Some(expected.len());
                    if self.is_trailers && self.is_pseudo {
                        self.state = State::Refused;
                        continue;
                    }
                    if *left == 0 {
                        (self.is_path, self.state) = (is_path, State::Length(StringKind::Value));
                    }
                    some.len()
                }
                State::Value { left, code } => {
                    let some = part(rest, left);
                    match code {
                        _ if !self.is_path => {}
                        Some(code) => code.replace_hash(some),
                        None => some.iter_mut().filter(|byte| **byte == b'#').for_each(|byte| *byte = b'>'),
                    }
                    let (taken, is_whole) = (some.len(), *left == 0);
                    if is_whole {
                        self.end_field();
                    }
                    taken
                }
                _ => {
                    let byte = rest[0];
                    self.byte(byte);
                    if matches!(self.state, State::Refused) {
                        continue;
                    }
                    1
                }
            };
        }
    }

    /// Processes a byte outside of strings.
    fn byte(&mut self, byte: u8) {
        match self.state {
            State::Field => {
                self.is_added = byte & 0xC0 == 0x40;
                match byte {
                    0x80.. => self.number(IntegerKind::Whole, byte, 7),
                    0x40.. => self.number(IntegerKind::Name, byte, 6),
                    0x20.. => self.number(IntegerKind::Size, byte, 5),
                    _ => self.number(IntegerKind::Name, byte, 4),
                }
            }
            State::Length(of) => self.number(IntegerKind::Length { of, is_coded: byte & 0x80 != 0 }, byte, 7),
            State::Integer { of, value, shift } => {
                let value = value.saturating_add(u64::from(byte & 0x7F) << shift);
                match byte {
                    // h2 ends a connection with a longer one.
                    0x80.. => self.state = State::Integer { of, value, shift: (shift + 7).min(56) },
                    _ => self.known(of, value),
                }
            }
            State::Name { .. } | State::Value { .. } | State::Refused => {}
        }
    }

    /// A number begins, in so many bits (RFC 7541, 5.1).
    fn number(&mut self, of: IntegerKind, byte: u8, bits: u32) {
        let most = (1 << bits) - 1;
        match byte & most {
            value if value == most => self.state = State::Integer { of, value: value.into(), shift: 0 },
            value => self.known(of, value.into()),
        }
    }

    fn known(&mut self, of: IntegerKind, value: u64) {
        self.state = match of {
            IntegerKind::Whole | IntegerKind::Name if self.is_trailers && self.names_pseudo(value) => State::Refused,
            IntegerKind::Whole | IntegerKind::Size => State::Field,
            IntegerKind::Name if value == 0 => State::Length(StringKind::Name),
            IntegerKind::Name => {
                (self.is_path, self.is_pseudo) = (self.names_path(value), self.names_pseudo(value));
                State::Length(StringKind::Value)
            }
            // An empty name is none that h2 takes.
            IntegerKind::Length { of: StringKind::Name, is_coded } => {
                State::Name { left: value, is_coded, matched: Some(0) }
            }
            IntegerKind::Length { of: StringKind::Value, .. } if value == 0 => return self.end_field(),
            IntegerKind::Length { of: StringKind::Value, is_coded } => {
                State::Value { left: value, code: is_coded.then(HuffmanDecoder::default) }
            }
        };
    }

    fn end_field(&mut self) {
        if self.is_added {
            self.paths = (self.paths << 1) | u128::from(self.is_path);
            self.pseudo = (self.pseudo << 1) | u128::from(self.is_pseudo);
        }
        self.state = State::Field;
    }

    fn names_path(&self, index: u64) -> bool {
        matches!(index, 4 | 5) || is_marked(self.paths, index)
    }

    fn names_pseudo(&self, index: u64) -> bool {
        (1..=LAST_PSEUDO).contains(&index) || is_marked(self.pseudo, index)
    }
}

/// Whether an index is that of an entry of the dynamic table that is one of these.
fn is_marked(entries: u128, index: u64) -> bool {
    let at = index.checked_sub(DYNAMIC).and_then(|at| u32::try_from(at).ok());
    at.is_some_and(|at| entries.checked_shr(at).unwrap_or(0) & 1 == 1)
}

/// Whether a name begins with a colon, which has 7 bits in Huffman's code.
fn begins_pseudo(name: &[u8], is_coded: bool) -> bool {
    name.first().is_some_and(|first| if is_coded { first & 0xFE == 0xB8 } else { *first == b':' })
}

/// The next bytes of a string of which so many are left.
fn part<'a>(bytes: &'a mut [u8], left: &mut u64) -> &'a mut [u8] {
    let some = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
    *left -= some as u64;
    &mut bytes[..some]
}

/// How many of Huffman's codes have so many bits (RFC 7541, appendix B). They are canonical: the shorter ones come first,
/// and of equal length each is the one before plus one.
const HUFFMAN_LENGTHS: [(u32, u64); 21] = [
    (5, 10),
    (6, 26),
    (7, 32),
    (8, 6),
    (10, 5),
    (11, 3),
    (12, 2),
    (13, 6),
    (14, 2),
    (15, 3),
    (19, 3),
    (20, 8),
    (21, 13),
    (22, 26),
    (23, 29),
    (24, 12),
    (25, 4),
    (26, 15),
    (27, 19),
    (28, 29),
    (30, 4),
];

/// For each length, the first 32 bits that begin with no code as short.
const HUFFMAN_LIMITS: [u64; HUFFMAN_LENGTHS.len()] = {
    let (mut limits, mut limit, mut at) = ([0; HUFFMAN_LENGTHS.len()], 0, 0);
    while at < HUFFMAN_LENGTHS.len() {
        limit += HUFFMAN_LENGTHS[at].1 << (32 - HUFFMAN_LENGTHS[at].0);
        limits[at] = limit;
        at += 1;
    }
    limits
};

/// Decodes a Huffman-coded string.
#[derive(Clone, Copy, Default)]
struct HuffmanDecoder {
    /// The last input bytes. Their lowest `have` bits are not decoded yet.
    bits: u64,
    have: u32,
}

impl HuffmanDecoder {
    /// Makes each `#` a `>`.
    fn replace_hash(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.bits = (self.bits << 8) | u64::from(*byte);
            self.have += 8;
            while let Some(length) = self.next() {
                self.have -= length;
                if length == 12 && (self.bits >> self.have) & 0xFFF == 0xFFA {
                    // A code is seen as soon as it is whole: its last bit is in this byte.
                    *byte |= 1 << self.have;
                }
            }
        }
    }

    /// The length of the next code, if all of it is there. What is not there yet counts as zeros, with which it seems
    /// longer than what is there.
    fn next(&self) -> Option<u32> {
        let ahead = self.bits.checked_shl(64 - self.have)? >> 32;
        let at = HUFFMAN_LIMITS.iter().position(|limit| ahead < *limit)?;
        Some(HUFFMAN_LENGTHS[at].0).filter(|length| *length <= self.have)
    }
}

#[cfg(test)]
mod tests;
