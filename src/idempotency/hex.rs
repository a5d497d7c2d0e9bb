//! Bytes as hexadecimal digits, in lower case.

use std::fmt;

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// Shows bytes as digits.
pub(super) struct Hex<'a>(pub(super) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 64];
        self.0.chunks(digits.len() / 2).try_for_each(|chunk| {
            let digits = &mut digits[..2 * chunk.len()];
            write(chunk, digits);
            f.write_str(str::from_utf8(digits).map_err(|_| fmt::Error)?)
        })
    }
}

/// Writes two digits for each byte, for as many as `out` has room for.
pub fn write(bytes: &[u8], out: &mut [u8]) {
    for (byte, pair) in bytes.iter().zip(out.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
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
