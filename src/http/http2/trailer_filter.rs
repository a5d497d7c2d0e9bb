//! Refuses trailers of which the h2 crate might drop a part.
//!
//! h2 reads a header block up to a limit on its size (RFC 9113, 6.5.2), and drops the fields behind it. It answers a head that
//! was cut so with 431, but passes on trailers that were: the request would go on with some of them. So trailers have a lower
//! limit, [`MAX_TRAILERS`], for which what h2 keeps of them is always too much once it drops anything:
//!
//! - Trailers that are longer than a frame, and so go on in another, are refused here: h2 resets the stream.
//! - A field in a frame of so many bytes has at most 8/5 as many, because Huffman's shortest code has 5 bits. With a name
//!   from the dynamic table, it has at most the 4,096 bytes of that table more.
//! - h2 keeps all before the field with which the size comes to its limit. That limit is [`MIN_HEADER_LIST`] or more: without
//!   one such field, it is still above [`MAX_TRAILERS`].
//! - Pseudo-headers count for h2 and are not passed on. `path_filter` lets none through in trailers.

use super::frame_parser::FrameHeader;
use crate::http::frame::{END_HEADERS, END_STREAM, HEADERS};
use crate::http::limits::MAX_TRAILERS;

/// The maximum size of a frame's payload, in bytes: the default of HTTP/2.
pub(super) const MAX_FRAME: u32 = 16 << 10;

/// The least size at which h2 may cut a header block, in bytes.
pub(super) const MIN_HEADER_LIST: usize = 48 << 10;

/// The most bytes of a field in one frame.
const MAX_FIELD: usize = MAX_FRAME as usize * 8 / 5 + 4096 + 32;

const _: () = assert!(MIN_HEADER_LIST - MAX_FIELD > MAX_TRAILERS);

/// Follows which streams have a head.
pub(super) struct TrailerFilter {
    /// The highest stream that has one.
    newest: u32,
}

impl TrailerFilter {
    pub(super) fn new() -> Self {
        Self { newest: 0 }
    }

    /// A frame begins. `read` is the end of its header, as much as came with the last read. Returns whether it has trailers.
    pub(super) fn on_frame(&mut self, frame: FrameHeader, read: &mut [u8]) -> bool {
        if frame.kind != HEADERS {
            return false;
        }
        let is_trailers = frame.stream <= self.newest;
        self.newest = self.newest.max(frame.stream);
        if is_trailers && frame.flags & END_HEADERS == 0 {
            match read {
                // h2 resets a stream for trailers that do not end it.
                [.., flags, _, _, _, _] => *flags &= !END_STREAM,
                // h2 has the flags already. It ends a connection where a block goes on in another stream.
                [.., last] => *last ^= 1,
                [] => {}
            }
        }
        is_trailers
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame_parser::{FrameParser, FramePart, PREFACE};
    use super::*;
    use crate::http::frame::{CONTINUATION, DATA};

    fn frame(kind: u8, flags: u8, stream: u8) -> [u8; 10] {
        [0, 0, 1, kind, flags, 0, 0, 0, stream, b'x']
    }

    /// What becomes of these frames, in pieces of this size, and which of them are trailers.
    fn filtered(frames: &[[u8; 10]], size: usize) -> (Vec<[u8; 10]>, Vec<bool>) {
        let (mut parser, mut filter, mut seen) = (FrameParser::new(), TrailerFilter::new(), Vec::new());
        parser.read(&mut [0; PREFACE], |_| ());
        let mut bytes = frames.concat();
        for piece in bytes.chunks_mut(size) {
            parser.read(piece, |part| {
                if let FramePart::Header(header, read) = part {
                    seen.push(filter.on_frame(header, read));
                }
            });
        }
        (bytes.as_chunks().0.to_vec(), seen)
    }

    #[test]
    fn trailers_that_go_on_in_another_frame_do_not_reach_h2_as_trailers() {
        let whole = [
            frame(HEADERS, 0, 3),
            frame(CONTINUATION, END_HEADERS, 3),
            frame(HEADERS, END_HEADERS, 5),
            frame(DATA, 0, 3),
            frame(HEADERS, END_HEADERS | END_STREAM, 3),
        ];
        let long = [frame(HEADERS, END_STREAM, 5), frame(CONTINUATION, END_HEADERS, 5)];
        let sent = [&whole[..], &long].concat();
        let trailers = [false, false, false, false, true, true, false];
        for size in 1..=sent.concat().len() {
            let (came, seen) = filtered(&sent, size);
            assert_eq!((&came[..5], &seen[..]), (&whole[..], &trailers[..]), "{size}");
            let without_end = [frame(HEADERS, 0, 5), long[1]];
            let of_another_stream = [frame(HEADERS, END_STREAM, 4), long[1]];
            // The header is at 50: its flags are in one piece with its end, or not.
            let is_split = 54 / size != 58 / size;
            assert_eq!(came[5..], if is_split { of_another_stream } else { without_end }, "{size}");
        }
    }
}
