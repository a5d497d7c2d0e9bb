//! Parses the frame headers in a client's input.

use crate::http::frame::{HEADER, length};

/// The length of the client's connection preface (RFC 9113, 3.4).
pub(super) const PREFACE: usize = 24;

/// The position of the input within its frames.
pub(super) struct FrameParser {
    header: [u8; HEADER],
    have: usize,
    /// How much of the frame's payload has yet to arrive.
    left: usize,
}

/// A frame header.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameHeader {
    pub(super) kind: u8,
    pub(super) flags: u8,
    /// Of the payload.
    pub(super) length: u32,
    pub(super) stream: u32,
}

/// A part of the input.
pub(super) enum FramePart<'a> {
    /// A frame begins. The bytes are the end of its header, as much as came with the last read. They may be changed.
    Header(FrameHeader, &'a mut [u8]),
    /// Bytes of the payload of the frame that began last, or of the preface. They may be changed.
    Payload(&'a mut [u8]),
}

impl FrameParser {
    pub(super) fn new() -> Self {
        Self { header: [0; HEADER], have: HEADER, left: PREFACE }
    }

    /// Splits input into frame headers and payload.
    pub(super) fn read(&mut self, mut bytes: &mut [u8], mut see: impl FnMut(FramePart<'_>)) {
        loop {
            let (payload, rest) = bytes.split_at_mut(bytes.len().min(self.left));
            if !payload.is_empty() {
                self.left -= payload.len();
                see(FramePart::Payload(payload));
            }
            if rest.is_empty() {
                return;
            }
            if self.have == HEADER {
                self.have = 0;
            }
            let (more, rest) = rest.split_at_mut(rest.len().min(HEADER - self.have));
            self.header[self.have..self.have + more.len()].copy_from_slice(&*more);
            self.have += more.len();
            bytes = rest;
            if self.have == HEADER {
                let [_, _, _, kind, flags, stream @ ..] = self.header;
                let header = FrameHeader { kind, flags, length: length(self.header), stream: stream_id(stream) };
                self.left = header.length as usize;
                see(FramePart::Header(header, more));
            }
        }
    }
}

/// The first bit is reserved (RFC 9113, 4.1).
pub(super) fn stream_id(bytes: [u8; 4]) -> u32 {
    u32::from_be_bytes(bytes) & (u32::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_no_difference() {
        let frame =
            |kind, length: u8| [&[0, 0, length, kind, 5, 0x80, 0, 0, 1][..], &vec![kind; length.into()]].concat();
        let stream = [vec![0; PREFACE], frame(1, 20), frame(2, 0), frame(3, 3)].concat();
        for size in 1..=stream.len() {
            let (mut frames, mut headers, mut payload) = (FrameParser::new(), Vec::new(), Vec::new());
            for piece in stream.clone().chunks_mut(size) {
                frames.read(piece, |part| match part {
                    FramePart::Header(FrameHeader { kind, flags: 5, length, stream: 1 }, _) => {
                        headers.push((kind, length))
                    }
                    FramePart::Header(other, _) => panic!("{other:?}"),
                    FramePart::Payload(bytes) => payload.extend_from_slice(bytes),
                });
            }
            assert_eq!(headers, [(1, 20), (2, 0), (3, 3)], "{size}");
            assert_eq!(payload, [vec![0; PREFACE], vec![1; 20], vec![3; 3]].concat(), "{size}");
        }
    }
}
