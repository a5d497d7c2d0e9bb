//! Tracks the boundaries of TLS records (RFC 8446, 5.1).

/// The length of a record's header: its type, its version, and the length of what follows.
const HEADER: usize = 5;

/// Tracks records as their bytes arrive.
#[derive(Debug, Default)]
pub(super) struct TlsRecords {
    header: [u8; HEADER],
    /// How much of the header has come.
    have: usize,
    /// How much of the record is still to come behind its header.
    left: usize,
}

impl TlsRecords {
    /// Processes input.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.have < HEADER {
                let count = bytes.len().min(HEADER - self.have);
                self.header[self.have..self.have + count].copy_from_slice(&bytes[..count]);
                self.have += count;
                bytes = &bytes[count..];
                if self.have == HEADER {
                    self.left = usize::from(u16::from_be_bytes([self.header[3], self.header[4]]));
                }
            } else {
                let count = bytes.len().min(self.left);
                self.left -= count;
                bytes = &bytes[count..];
            }
            if self.have == HEADER && self.left == 0 {
                self.have = 0;
            }
        }
    }

    /// Whether no record is incomplete.
    pub(super) fn is_between(&self) -> bool {
        self.have == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_whole_at_its_last_byte_whatever_pieces_it_comes_in() {
        let stream = [&[22, 3, 3, 0, 3][..], b"abc", &[20, 3, 3, 0, 0], &[23, 3, 3, 1, 2], &[7; 258]].concat();
        let ends = [0, 8, 13, 13 + 5 + 258];
        for size in 1..=stream.len() {
            let (mut records, mut came) = (TlsRecords::default(), 0);
            for piece in stream.chunks(size) {
                records.follow(piece);
                came += piece.len();
                assert_eq!(records.is_between(), ends.contains(&came), "{came} in pieces of {size}");
            }
        }
    }
}
