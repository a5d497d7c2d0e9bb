//! A second implementation of what paths can mean, for tests and fuzzing.

use std::sync::LazyLock;

/// A path that some server makes of another.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) path: String,
    decodings: usize,
}

/// How many steps there are. The first few take off an encoding.
pub(super) const STEPS: usize = 15;

const DECODINGS: usize = 4;

/// White space and control characters.
static SPACES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let spaces = ('\0'..='\u{3000}').filter(|char| char.is_whitespace() || char.is_control());
    let in_utf8 = spaces.chain(['\u{feff}']).map(|char| in_bytes(char.to_string().as_bytes()));
    in_utf8.chain((0x80..=0xA0).map(|byte| in_bytes(&[byte]))).collect()
});

impl Reading {
    pub(super) fn of(path: &str) -> Self {
        Self { path: in_bytes(path.as_bytes()), decodings: 0 }
    }

    /// After one more step. What is decoded again and again is read no further.
    pub(super) fn then(self, step: usize) -> Self {
        let path = done(step, &self.path);
        if step >= DECODINGS || path == self.path {
            return Self { path, ..self };
        }
        if self.decodings == 3 { self } else { Self { path, decodings: self.decodings + 1 } }
    }
}

/// The same path in small letters, and with a slash more or less.
pub(super) fn folds(path: &str) -> [String; 3] {
    let slash = path.strip_suffix('/').map_or_else(|| format!("{path}/"), str::to_owned);
    [path.to_ascii_lowercase(), slash.to_ascii_lowercase(), slash]
}

/// What a route says of each place of a path and of the host: more is stronger.
pub(super) fn precedence(pattern: &str, has_host: bool) -> (Vec<u8>, bool) {
    let kinds = pattern[1..].split('/').map(|segment| match segment {
        _ if segment.starts_with("{*") => 0,
        _ if segment.starts_with('{') => 1,
        _ => 2,
    });
    (kinds.chain((!pattern.contains("{*")).then_some(2)).collect(), has_host)
}

/// Whether the one says more than the other of what both speak of.
pub(super) fn is_more_specific((own, host): &(Vec<u8>, bool), (others, other_host): &(Vec<u8>, bool)) -> bool {
    let length = own.len().min(others.len());
    own[..length].cmp(&others[..length]).then(host.cmp(other_host)).is_gt()
}

/// A path in which each byte that is not ASCII is a character of its own.
fn done(step: usize, path: &str) -> String {
    let decoded = |wanted: fn(char) -> bool| {
        let mut pieces = path.split('%');
        let first = pieces.next().unwrap().to_owned();
        pieces.fold(first, |path, piece| {
            let byte = piece.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).map(char::from);
            match byte.filter(|byte| wanted(*byte)) {
                Some(byte) => format!("{path}{byte}{}", &piece[2..]),
                None => format!("{path}%{piece}"),
            }
        })
    };
    match step {
        0 => decoded(|byte| byte.is_ascii_alphanumeric() || "-._~".contains(byte)),
        1 => decoded(|byte| byte != '/'),
        2 => decoded(|_| true),
        3 => {
            let (mut rest, mut out) = (path, String::new());
            while let Some(at) = rest.to_ascii_lowercase().find("%u") {
                let (before, code) = rest.split_at(at);
                let digits = code.get(2..6).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
                let char = digits.and_then(|digits| char::from_u32(u32::from_str_radix(digits, 16).unwrap()));
                let taken = if char.is_some() { 6 } else { 2 };
                out += before;
                out += &char.map_or_else(|| code[..2].to_owned(), |char| in_bytes(char.to_string().as_bytes()));
                rest = &code[taken..];
            }
            out + rest
        }
        4 => path.replace('\\', "/"),
        5 => each_piece(path, |piece| piece.split(';').next().unwrap()),
        6 => path.split(['\0', '?', '#']).next().unwrap().to_owned(),
        7 => std::iter::repeat_n((), 9).fold(path.to_owned(), |path, ()| path.replace("//", "/")),
        8 => each_piece(path, |piece| {
            let mut piece = piece;
            while let Some(rest) = SPACES.iter().find_map(|space| piece.strip_suffix(&**space)) {
                piece = rest;
            }
            while let Some(rest) = SPACES.iter().find_map(|space| piece.strip_prefix(&**space)) {
                piece = rest;
            }
            piece
        }),
        9 => each_piece(path, |piece| match piece.trim_end_matches(' ') {
            dots @ ("." | "..") => dots,
            _ => piece.trim_end_matches([' ', '.']),
        }),
        10 => each_piece(path, |piece| {
            let capitals = piece.to_ascii_uppercase();
            let is_stream = capitals.ends_with(":$DATA") || capitals.ends_with(":$INDEX_ALLOCATION");
            if is_stream { piece.split(':').next().unwrap() } else { piece }
        }),
        13 => {
            let rest = path.trim_start_matches(['/', '\\']);
            if path.len() < rest.len() + 2 { path.to_owned() } else { done(12, &format!("//{rest}")) }
        }
        12 => {
            let is_slash = |char: char| char == '/' || char == '\\';
            let mut chars = path.chars();
            let is_reference = chars.next().is_some_and(is_slash) && chars.next().is_some_and(is_slash);
            let end = path.char_indices().skip(2).find(|(_, char)| is_slash(*char)).map_or(path.len(), |(at, _)| at);
            match is_reference {
                true if end == path.len() => "/".to_owned(),
                // A server for which a backslash ends the host takes it for the slash at the start.
                true => format!("/{}", &path[end + 1..]),
                false => path.to_owned(),
            }
        }
        11 => (0..0x80).fold(path.to_owned(), |path, byte: u8| {
            let (high, low) = (byte >> 6, 0x80 | byte & 0x3F);
            let forms: [&[u8]; 5] = [
                &[0xFC, 0x80, 0x80, 0x80, 0x80 | high, low],
                &[0xF8, 0x80, 0x80, 0x80 | high, low],
                &[0xF0, 0x80, 0x80 | high, low],
                &[0xE0, 0x80 | high, low],
                &[0xC0 | high, low],
            ];
            let char = char::from(byte).to_string();
            forms.iter().fold(path, |path, form| path.replace(&in_bytes(form), &char))
        }),
        _ => {
            let (mut rest, mut out) = (path.to_owned(), String::new());
            while !rest.is_empty() {
                if rest.starts_with("/./") || rest == "/." {
                    rest = format!("/{}", rest.get(3..).unwrap_or_default());
                } else if rest.starts_with("/../") || rest == "/.." {
                    rest = format!("/{}", rest.get(4..).unwrap_or_default());
                    out.truncate(out.rfind('/').unwrap_or(0));
                } else {
                    let end = rest[1..].find('/').map_or(rest.len(), |at| at + 1);
                    out.extend(rest.drain(..end));
                }
            }
            out
        }
    }
}

fn in_bytes(bytes: &[u8]) -> String {
    bytes.iter().copied().map(char::from).collect()
}

fn each_piece(path: &str, change: impl Fn(&str) -> &str) -> String {
    path.split('/').map(change).collect::<Vec<_>>().join("/")
}
