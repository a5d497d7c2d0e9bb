//! Length-prefixed parts, so that no part can run into the next: what hashes and stored forms are made of.
//!
//! Integers are big-endian and of fixed width. A part is its length in four bytes, then its bytes.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::codec::Unreadable;

/// Appends a count or a length.
pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    let count = u32::try_from(count).expect("a part of a request or an answer's head is shorter than 4 GiB");
    out.extend_from_slice(&count.to_be_bytes());
}

/// Appends a part.
pub(super) fn put(out: &mut Vec<u8>, part: &[u8]) {
    put_count(out, part.len());
    out.extend_from_slice(part);
}

/// The SHA-256 of some bytes.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Reads a stored form from its beginning. Allocates only for bytes that are present, whatever a length claims.
pub(super) struct Reader<'a> {
    source: &'a Bytes,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(source: &'a Bytes) -> Self {
        Self { source, at: 0 }
    }

    /// The next `length` bytes, shared with the source.
    pub(super) fn take(&mut self, length: usize) -> Result<Bytes, Unreadable> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.source.len()).ok_or(Unreadable)?;
        let taken = self.source.slice(self.at..end);
        self.at = end;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Unreadable> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// A byte that is 0 or 1.
    pub(super) fn flag(&mut self) -> Result<bool, Unreadable> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Unreadable),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Unreadable> {
        self.take(N)?.as_ref().try_into().map_err(|_| Unreadable)
    }

    pub(super) fn count(&mut self) -> Result<usize, Unreadable> {
        usize::try_from(u32::from_be_bytes(self.array()?)).map_err(|_| Unreadable)
    }

    pub(super) fn part(&mut self) -> Result<Bytes, Unreadable> {
        let length = self.count()?;
        self.take(length)
    }

    pub(super) fn text(&mut self) -> Result<String, Unreadable> {
        String::from_utf8(self.part()?.into()).map_err(|_| Unreadable)
    }

    /// Everything that is left, shared with the source.
    pub(super) fn rest(&mut self) -> Bytes {
        let rest = self.source.slice(self.at..);
        self.at = self.source.len();
        rest
    }

    /// Ends the reading: nothing may be left.
    pub(super) fn finish(self) -> Result<(), Unreadable> {
        if self.at == self.source.len() { Ok(()) } else { Err(Unreadable) }
    }
}
