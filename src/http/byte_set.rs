//! Sets of bytes.

/// A set of bytes, as a lookup table.
pub struct ByteSet([bool; 256]);

impl ByteSet {
    /// Lower-case ASCII letters, digits, and `others`.
    #[must_use]
    pub const fn lower_case_and(others: &[u8]) -> Self {
        let mut set = [false; 256];
        let mut byte = 0;
        while byte < set.len() {
            let char = byte as u8;
            set[byte] = char.is_ascii_lowercase() || char.is_ascii_digit();
            byte += 1;
        }
        let mut place = 0;
        while place < others.len() {
            set[others[place] as usize] = true;
            place += 1;
        }
        Self(set)
    }

    /// Whether this one is in it.
    #[must_use]
    pub fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte)]
    }

    /// The number of bytes before the first that is not in the set.
    #[must_use]
    pub fn span(&self, text: &str) -> usize {
        text.bytes().position(|byte| !self.has(byte)).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_contains_its_bytes() {
        const SET: ByteSet = ByteSet::lower_case_and(b"-.");
        for byte in 0..=u8::MAX {
            assert_eq!(SET.has(byte), matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'), "{byte}");
        }
        assert_eq!((SET.span("a-9.A"), SET.span("abc"), SET.span("")), (4, 3, 0));
    }
}
