use proptest::prelude::*;

use super::super::frame_parser::{FrameParser, FramePart, PREFACE};
use super::*;
use crate::http::frame::HEADER;

const END_HEADERS: u8 = 4;

/// The stream whose blocks are trailers.
const TRAILERS: u8 = 3;

/// What of ASCII shows, and what has codes between, in the order of Huffman's code.
const ORDER: &str = "012aceiost %-./3456789=A_bdfghlmnpru:BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz&*,;XZ!\"()?'+|#>\0$@[]~^}<`{";

/// In Huffman's code.
fn coded(text: &str) -> Vec<u8> {
    let mut bits = String::new();
    for character in text.chars() {
        let mut nth = ORDER.find(character).unwrap() as u64;
        let mut first = 0;
        for (place, (length, count)) in HUFFMAN_LENGTHS.into_iter().enumerate() {
            if nth < count {
                bits += &format!("{:0width$b}", first + nth, width = length as usize);
                break;
            }
            (nth, first) = (nth - count, (first + count) << (HUFFMAN_LENGTHS[place + 1].0 - length));
        }
    }
    while !bits.len().is_multiple_of(8) {
        bits.push('1');
    }
    (0..bits.len()).step_by(8).map(|at| u8::from_str_radix(&bits[at..at + 8], 2).unwrap()).collect()
}

#[derive(Clone, Copy, Debug)]
enum Name {
    /// By the static table.
    Known(u8),
    /// By the dynamic table: one of the newest, or else as written.
    Added(usize),
    Written(&'static str),
}

/// A header line, and how it is written.
#[derive(Clone, Debug)]
struct Field {
    name: Name,
    value: String,
    /// The first bits: added to the table, not added, never to be.
    form: u8,
    is_name_coded: bool,
    is_value_coded: bool,
}

fn number(first: u8, bits: u32, value: usize, block: &mut Vec<u8>) {
    let most = (1 << bits) - 1;
    if value < most {
        return block.push(first | u8::try_from(value).unwrap());
    }
    block.push(first | u8::try_from(most).unwrap());
    let mut rest = value - most;
    while rest >= 128 {
        block.push(u8::try_from(rest % 128).unwrap() | 128);
        rest /= 128;
    }
    block.push(u8::try_from(rest).unwrap());
}

fn string(text: &str, is_coded: bool, block: &mut Vec<u8>) {
    let bytes = if is_coded { coded(text) } else { text.as_bytes().to_vec() };
    number(if is_coded { 0x80 } else { 0 }, 7, bytes.len(), block);
    block.extend(bytes);
}

/// The block of these lines; `names` are those of the dynamic table, the newest last. With `expected`, it is what is to
/// become of it.
fn block(lines: &[Field], names: &mut Vec<String>, expected: bool) -> Vec<u8> {
    let mut block = vec![0x3F, 0xE1, 0x1F];
    for Field { name, value, form, is_name_coded, is_value_coded } in lines {
        let bits = if *form == 0x40 { 6 } else { 4 };
        let name = match *name {
            Name::Known(index) => {
                number(*form, bits, index.into(), &mut block);
                if matches!(index, 4 | 5) { ":path" } else { "other" }
            }
            Name::Added(nth) if nth < names.len().min(64) => {
                number(*form, bits, 62 + nth, &mut block);
                &*names[names.len() - 1 - nth].clone()
            }
            Name::Added(_) => {
                number(*form, bits, 4, &mut block);
                ":path"
            }
            Name::Written(name) => {
                block.push(*form);
                string(name, *is_name_coded, &mut block);
                name
            }
        };
        let is_path = name == ":path";
        string(&if is_path && expected { value.replace('#', ">") } else { value.clone() }, *is_value_coded, &mut block);
        if *form == 0x40 {
            names.push(name.to_owned());
        }
        block.push(0x82);
    }
    block
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

/// The block in frames, cut after so many bytes.
fn frames(block: &[u8], cut: usize, flags: u8) -> Vec<u8> {
    let (first, rest) = block.split_at(cut.min(block.len()));
    let padded = flags & PADDED != 0;
    let lead = [&[3][..usize::from(padded)], if flags & PRIORITY != 0 { b"\0\0\0\x07#" } else { b"" }].concat();
    let padding = if padded { "###" } else { "" };
    let payload = [&lead, first, padding.as_bytes()].concat();
    let end = if rest.is_empty() { END_HEADERS } else { 0 };
    let head = frame(HEADERS, flags | end, &payload);
    let data = frame(0, 0, b"\x04\x04/a#b#");
    if rest.is_empty() { [head, data].concat() } else { [head, frame(CONTINUATION, END_HEADERS, rest), data].concat() }
}

fn changed(targets: &mut PathFilter, walk: &mut FrameParser, bytes: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for piece in bytes.chunks_mut(size) {
        walk.read(piece, |part| match part {
            FramePart::Header(header, _) => targets.on_frame(header, header.stream == u32::from(TRAILERS)),
            FramePart::Payload(bytes) => targets.on_payload(bytes),
        });
    }
    bytes
}

fn line() -> impl Strategy<Value = Field> {
    let name = prop_oneof![
        (1..62u8).prop_map(Name::Known),
        Just(Name::Known(4)),
        (0..70usize).prop_map(Name::Added),
        (0..4usize).prop_map(Name::Added),
        prop::sample::select(vec![":path", ":pat", ":paths", "path", "x-note", ""]).prop_map(Name::Written),
    ];
    let value = prop_oneof!["[#>?/0a-c]{0,12}", "[ -Z~a-z]{0,40}", "/[#a-z]{120,300}"];
    let form = prop::sample::select(vec![0x40, 0, 0x10]);
    (name, value, form, any::<bool>(), any::<bool>()).prop_map(|(name, value, form, is_name_coded, is_value_coded)| {
        Field { name, value, form, is_name_coded, is_value_coded }
    })
}

proptest! {
    #[test]
    fn only_a_hash_in_a_path_changes(
        blocks in prop::collection::vec((prop::collection::vec(line(), 0..12), 0..300usize, 0..4u8), 1..4),
        size in prop_oneof![Just(1usize), 2..40usize, Just(usize::MAX)],
    ) {
        let (mut targets, mut walk) = (PathFilter::new(), FrameParser::new());
        changed(&mut targets, &mut walk, &[b'#'; PREFACE], size.min(PREFACE));
        let (mut names, mut names_expected) = (Vec::new(), Vec::new());
        for (lines, cut, flags) in blocks {
            let flags = ((flags & 1) * PADDED) | ((flags >> 1) * PRIORITY);
            let sent = frames(&block(&lines, &mut names, false), cut, flags);
            let expected = frames(&block(&lines, &mut names_expected, true), cut, flags);
            prop_assert_eq!(changed(&mut targets, &mut walk, &sent, size.min(sent.len())), expected);
        }
    }
}

/// The examples of RFC 7541, appendix C.
#[test]
fn the_codes_are_those_of_the_standard() {
    assert_eq!(coded("www.example.com"), b"\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff");
    assert_eq!(coded("Mon, 21 Oct 2013 20:13:21 GMT")[..8], *b"\xd0\x7a\xbe\x94\x10\x54\xd4\x44");
    assert_eq!(coded(":path"), PATH_CODED);
    assert_eq!(HUFFMAN_LIMITS[HUFFMAN_LENGTHS.len() - 1], 1 << 32);
}

/// h2 reads nothing of it, and so adds nothing to its table.
#[test]
fn the_block_of_a_stream_that_depends_on_itself_counts_for_nothing() {
    let (mut targets, mut walk) = (PathFilter::new(), FrameParser::new());
    changed(&mut targets, &mut walk, &[0; PREFACE], PREFACE);
    let of = |name, value: &str| Field {
        name,
        value: value.into(),
        form: 0x40,
        is_name_coded: false,
        is_value_coded: false,
    };
    let mut names = Vec::new();
    let first = frames(&block(&[of(Name::Known(4), "/")], &mut names, false), 300, 0);
    assert_eq!(changed(&mut targets, &mut walk, &first, 300), first);
    let other = block(&[of(Name::Written("x"), "y")], &mut Vec::new(), false);
    let itself = frame(HEADERS, END_HEADERS | PRIORITY, &[&[0x80, 0, 0, 1, 0][..], &other].concat());
    assert_eq!(changed(&mut targets, &mut walk, &itself, 300), itself);
    let last = [of(Name::Added(0), "/a#b")];
    let sent = frames(&block(&last, &mut names.clone(), false), 300, 0);
    assert_eq!(changed(&mut targets, &mut walk, &sent, 300), frames(&block(&last, &mut names, true), 300, 0));
}

/// For h2, no line ends from there on, and so it ends the connection.
#[test]
fn trailers_have_no_pseudo_headers() {
    let of = |stream: u8, block: &[u8]| {
        let mut frame = frame(HEADERS, END_HEADERS, block);
        frame[8] = stream;
        frame
    };
    let changed = |trailers: &[u8], size: usize| {
        let (mut targets, mut walk) = (PathFilter::new(), FrameParser::new());
        changed(&mut targets, &mut walk, &[0; PREFACE], PREFACE);
        // Into the dynamic table, where the last is the first.
        let head = of(1, b"\x82\x44\x02/a\x40\x08:unknown\x01b\x40\x85\xb8\x84\x8d\x36\xa3\0\x40\x01x\x01:");
        assert_eq!(changed(&mut targets, &mut walk, &head, size), head);
        let sent = [of(TRAILERS, trailers), frame(0, 0, b"\x84")].concat();
        let came = changed(&mut targets, &mut walk, &sent, size);
        (came[HEADER..HEADER + trailers.len()].to_vec(), [&came[..HEADER], &came[HEADER + trailers.len()..]].concat())
    };
    let sound: [&[u8]; 9] = [
        b"",
        b"\x24",
        b"\x8f\x90",
        b"\x00\x03a:b\x01:",
        b"\x00\x82\x1f\xb8\x82\xb9\x58",
        b"\xbe",
        b"\x7e\x01:",
        b"\x0f\x2f\x01:",
        b"\x10\x01y\x03:a#",
    ];
    // What comes before the first byte that changes, and from there.
    let malformed: [(&[u8], &[u8]); 12] = [
        (b"", b"\x84"),
        (b"\xbe", b"\x81\xbe"),
        (b"", b"\x8e"),
        (b"\x00\x01x\x01y", b"\x04\x02/b"),
        (b"", b"\x48\x03200\xbe"),
        (b"", b"\x11\0"),
        (b"\x00\x05", b":path\x02/b"),
        (b"\x40\x02", b":x\x01y"),
        (b"\x10\x84", b"\xb9\x58\xd3\x3f\x01/"),
        (b"", b"\xbf\xbe"),
        (b"\x7f", b"\0\x01b"),
        (b"\x0f", b"\x32\x01/\xbe"),
    ];
    for size in [1, 2, 3, 7, 100] {
        for block in sound {
            assert_eq!(changed(block, size).0, block, "{size}");
        }
        for (before, from) in malformed {
            let block = [before, from].concat();
            let (came, around) = changed(&block, size);
            let expected = [before, &vec![0xFF; from.len()]].concat();
            assert_eq!(came, expected, "{block:x?} {size}");
            assert_eq!(around, [&of(TRAILERS, &block)[..HEADER], &frame(0, 0, b"\x84")].concat(), "{block:x?} {size}");
        }
    }
}
