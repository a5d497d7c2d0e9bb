//! What hashes and stored forms are made of: length-prefixed parts, so that no part can run into the next, and hexadecimal
//! digits in lower case.
//!
//! Integers are big-endian and of fixed width. A part is its length in four bytes, then its bytes.

use std::fmt;

use sha2::{Digest, Sha256};

const DIGITS: &[u8; 16] = b"0123456789abcdef";

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

/// Shows bytes as hexadecimal digits.
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 64];
        self.0.chunks(digits.len() / 2).try_for_each(|chunk| {
            let digits = &mut digits[..2 * chunk.len()];
            write_hex(chunk, digits);
            f.write_str(str::from_utf8(digits).map_err(|_| fmt::Error)?)
        })
    }
}

/// Writes two hexadecimal digits for each byte, for as many as `out` has room for.
pub fn write_hex(bytes: &[u8], out: &mut [u8]) {
    for (byte, [high, low]) in bytes.iter().zip(out.as_chunks_mut().0) {
        *high = DIGITS[usize::from(byte >> 4)];
        *low = DIGITS[usize::from(byte & 15)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_two_digits() {
        let bytes: Vec<u8> = (0..=255).collect();
        let expected: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(Hex(&bytes).to_string(), expected);
        assert_eq!(Hex(&[]).to_string(), "");
    }
}
