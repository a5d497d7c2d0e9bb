//! What servers make of a path before they look for its handler.

use crate::route::pattern::is_unreserved;

/// The maximum number of readings of one path.
const MAX_READINGS: usize = 64;

/// The most bytes that these have in all: a long path has fewer.
const MAX_BYTES: usize = 64 * 1024;

/// How often a path is decoded.
const MAX_DECODINGS: u8 = 3;

/// A normalization step of some server: what of a path it reads otherwise, and whether it decodes.
struct Step {
    feature: &'static str,
    decodes: bool,
    apply: fn(&[u8]) -> Vec<u8>,
}

impl Step {
    const fn new(feature: &'static str, apply: fn(&[u8]) -> Vec<u8>) -> Self {
        Self { feature, decodes: false, apply }
    }

    const fn decoding(apply: fn(&[u8]) -> Vec<u8>) -> Self {
        Self { feature: "percent-encoding", decodes: true, apply }
    }
}

const STEPS: [Step; 16] = [
    Step::decoding(|path| decode(path, is_unreserved_byte)),
    Step::decoding(|path| decode(path, |byte| byte != b'/')),
    Step::decoding(|path| decode(path, |_| true)),
    Step::decoding(decode_code_points),
    Step::new("a backslash", |path| path.iter().map(|byte| if *byte == b'\\' { b'/' } else { *byte }).collect()),
    Step::new("a parameter after `;`", |path| each_segment(path, without_parameters)),
    Step::new("a byte that ends the path", without_tail),
    Step::new("white space at an end", |path| each_segment(path, without_space)),
    Step::new("dots or spaces at an end", |path| each_segment(path, without_dots)),
    Step::new("the name of a stream", |path| each_segment(path, without_stream)),
    Step::new("an empty segment", merged),
    Step::new("a host after two slashes", without_authority),
    Step::new("a host after two slashes", |path| without_authority(with_two_slashes(path))),
    Step::new("a dot segment", resolved),
    Step::new("overlong UTF-8", shortest),
    Step::new("letters beyond ASCII", in_ascii),
];

/// The readings of a path; the first is the path itself.
pub(super) struct Readings(Vec<NormalizedPath>);

/// A path that steps made of another.
struct NormalizedPath {
    path: Vec<u8>,
    decodings: u8,
    /// The place of the reading that it was made of, and what the step read otherwise.
    by: Option<(usize, &'static str)>,
}

impl Readings {
    /// Each other path, with its place.
    pub(super) fn paths(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.0.iter().enumerate().skip(1).map(|(place, reading)| (place, &*reading.path))
    }

    /// What of the path leads to the reading at this place, each once.
    pub(super) fn features(&self, place: usize) -> Vec<&'static str> {
        let mut features = Vec::new();
        let mut by = self.0[place].by;
        while let Some((from, feature)) = by {
            if !features.contains(&feature) {
                features.insert(0, feature);
            }
            by = self.0[from].by;
        }
        features
    }
}

/// Every other path that servers may take this one for: what any steps in any order make of it. Nothing where there are
/// too many.
pub(super) fn normalizations(path: &[u8]) -> Option<Readings> {
    let mut found = vec![NormalizedPath { path: path.to_vec(), decodings: 0, by: None }];
    let (mut next, mut bytes) = (0, 0);
    while next < found.len() {
        for Step { feature, decodes, apply } in STEPS {
            let from = &found[next];
            let decodings = from.decodings + u8::from(decodes);
            let to = apply(&from.path);
            if found.iter().any(|known| known.path == to) {
                continue;
            }
            bytes += to.len();
            if found.len() > MAX_READINGS || bytes > MAX_BYTES || decodings > MAX_DECODINGS {
                return None;
            }
            found.push(NormalizedPath { path: to, decodings, by: Some((next, feature)) });
        }
        next += 1;
    }
    Some(Readings(found))
}

/// Decodes the percent-encoded bytes that are `wanted`, and leaves everything else as it is.
fn decode(path: &[u8], wanted: fn(u8) -> bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.first_chunk().filter(|_| *first == b'%');
        let byte = digits.and_then(|[high, low]| Some(hex(*high)? << 4 | hex(*low)?));
        match byte.filter(|byte| wanted(*byte)) {
            Some(byte) => {
                out.push(byte);
                rest = &after[2..];
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

fn is_unreserved_byte(byte: u8) -> bool {
    is_unreserved(char::from(byte))
}

/// Takes off the encoding of code points as `%u0061`, which IIS decodes.
fn decode_code_points(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(first) = rest.first() {
        let digits = match rest {
            [b'%', b'u' | b'U', after @ ..] => after.first_chunk::<4>(),
            _ => None,
        };
        let code = digits
            .and_then(|digits| digits.iter().try_fold(0, |code, digit| Some(code << 4 | u32::from(hex(*digit)?))));
        match code.and_then(char::from_u32) {
            Some(char) => {
                out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
                rest = &rest[6..];
            }
            None => {
                out.push(*first);
                rest = &rest[1..];
            }
        }
    }
    out
}

/// With each segment changed.
fn each_segment(path: &[u8], change: fn(&[u8]) -> &[u8]) -> Vec<u8> {
    path.split(|byte| *byte == b'/').map(change).collect::<Vec<_>>().join(&b'/')
}

/// Without what stands between two slashes at the start and the next one: to who resolves the target as a reference, it is an
/// authority (RFC 3986, 4.2), as to `new URL(target, base)` in JavaScript.
fn without_authority(path: &[u8]) -> Vec<u8> {
    let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
    match path {
        [first, second, rest @ ..] if is_slash(first) && is_slash(second) => match rest.iter().position(is_slash) {
            Some(end) => rest[end..].to_vec(),
            None => b"/".to_vec(),
        },
        _ => path.to_vec(),
    }
}

/// With two slashes at the start where there are more: parsers of the WHATWG pass over all of them.
fn with_two_slashes(path: &[u8]) -> &[u8] {
    let slashes = path.iter().take_while(|byte| matches!(byte, b'/' | b'\\')).count();
    &path[slashes.saturating_sub(2)..]
}

/// Without what follows a `;`.
fn without_parameters(segment: &[u8]) -> &[u8] {
    segment.split(|byte| *byte == b';').next().unwrap_or_default()
}

/// Without white space and control characters at the ends, which many servers trim: Unicode's too, in UTF-8 and in Latin-1, since
/// many languages trim those. JavaScript takes the byte order mark for white space.
fn without_space(mut segment: &[u8]) -> &[u8] {
    let is_space = |end: &[u8]| match (end, str::from_utf8(end)) {
        ([0x80..=0xA0], _) | (_, Ok("\u{feff}")) => true,
        (_, text) => {
            let mut chars = text.unwrap_or_default().chars();
            chars.next().is_some_and(|first| first.is_whitespace() || first.is_control()) && chars.next().is_none()
        }
    };
    // None of them takes more than three bytes. The last of them alone may be one in Latin-1.
    while let Some(before) = (1..=3).rev().find_map(|length| {
        let (before, end) = segment.split_at(segment.len().checked_sub(length)?);
        is_space(end).then_some(before)
    }) {
        segment = before;
    }
    while let Some(after) = (1..=3).rev().find_map(|length| {
        let (begin, after) = segment.split_at_checked(length)?;
        is_space(begin).then_some(after)
    }) {
        segment = after;
    }
    segment
}

/// Without dots and spaces at the end, which Windows drops from the names of files. Dot segments stay.
fn without_dots(segment: &[u8]) -> &[u8] {
    let segment = trimmed(segment, |byte| byte == b' ');
    if matches!(segment, b"." | b"..") { segment } else { trimmed(segment, |byte| matches!(byte, b'.' | b' ')) }
}

fn trimmed(segment: &[u8], end: fn(u8) -> bool) -> &[u8] {
    let length = segment.iter().rposition(|byte| !end(*byte)).map_or(0, |last| last + 1);
    &segment[..length]
}

/// The types of the streams that hold a file and a directory on NTFS: `name::$DATA` is `name`.
const STREAMS: [&[u8]; 2] = [b":$DATA", b":$INDEX_ALLOCATION"];

pub(super) fn has_stream(segment: &[u8]) -> bool {
    let ends = |end: &[u8]| segment.len().checked_sub(end.len()).map(|at| &segment[at..]);
    STREAMS.iter().any(|stream| ends(stream).is_some_and(|end| end.eq_ignore_ascii_case(stream)))
}

/// Removes the name of an NTFS stream.
fn without_stream(segment: &[u8]) -> &[u8] {
    let name = segment.split(|byte| *byte == b':').next().unwrap_or_default();
    if has_stream(segment) { name } else { segment }
}

/// Without what follows a byte that ends a path: that of a string in C, and those that begin a query and a fragment.
/// They come out of percent-encoding.
fn without_tail(path: &[u8]) -> Vec<u8> {
    path.split(|byte| matches!(byte, 0 | b'?' | b'#')).next().unwrap_or_default().to_vec()
}

/// With one slash in the place of several.
fn merged(path: &[u8]) -> Vec<u8> {
    let mut out = path.to_vec();
    out.dedup_by(|next, before| *next == b'/' && *before == b'/');
    out
}

/// Without dot segments (RFC 3986, section 5.2.4).
fn resolved(path: &[u8]) -> Vec<u8> {
    let mut out: Vec<&[u8]> = Vec::new();
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let is_dots = matches!(segment, b"." | b"..");
        if segment == b".." {
            out.pop();
        }
        if !is_dots {
            out.push(segment);
        } else if segments.peek().is_none() {
            out.push(b"");
        }
    }
    [&b"/"[..], &out.join(&b'/')].concat()
}

/// With each ASCII character in one byte where it was written in more: overlong UTF-8, which decoders must refuse and
/// some take (RFC 3629, section 10).
fn shortest(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(first) = rest.first() {
        let (byte, length) = overlong(rest).unwrap_or((*first, 1));
        out.push(byte);
        rest = &rest[length..];
    }
    out
}

/// The ASCII character that begins a text in two to six bytes (RFC 2279, section 2), and how many they are.
fn overlong(text: &[u8]) -> Option<(u8, usize)> {
    let length = match text.first()? {
        0xC0 | 0xC1 => 2,
        0xE0 => 3,
        0xF0 => 4,
        0xF8 => 5,
        0xFC => 6,
        _ => return None,
    };
    let (zeros, end) = text.get(..length)?.split_at(length - 2);
    // The first byte has no bit of it, unless there are two.
    let has_zeros = zeros.iter().skip(1).all(|byte| *byte == 0x80);
    match *end {
        [high @ (0x80 | 0x81 | 0xC0 | 0xC1), low @ 0x80..=0xBF] if has_zeros && (length == 2) == (high >= 0xC0) => {
            Some(((high & 1) << 6 | low & 0x3F, length))
        }
        _ => None,
    }
}

/// With ASCII in the place of what some comparisons take for it: full-width forms, and letters whose other case is in
/// ASCII.
fn in_ascii(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(first) = rest.first() {
        let (byte, length) = match *rest {
            [0xC4, 0xB0 | 0xB1, ..] => (b'i', 2),
            [0xC5, 0xBF, ..] => (b's', 2),
            [0xE2, 0x84, 0xAA, ..] => (b'k', 3),
            [0xEF, 0xBC, next @ 0x81..=0xBF, ..] => (next - 0x60, 3),
            [0xEF, 0xBD, next @ 0x80..=0x9E, ..] => (next - 0x20, 3),
            _ => (*first, 1),
        };
        out.push(byte);
        rest = &rest[length..];
    }
    out
}
