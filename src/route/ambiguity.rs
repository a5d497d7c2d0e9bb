//! Detects paths that an upstream may interpret in another way than the gate.
//!
//! Servers decode a path, resolve dot segments, merge slashes, cut off parameters, trim dots and white space, and
//! ignore case and a trailing slash, each in its own way and order (RFC 3986, 6.2, describes some of this). Some take
//! what follows two slashes for a host, and some do not mind the case of a method. The gate does none of that: it forwards
//! the path and the method that it matches. Where another reading selects another route, and one of the two is protected,
//! the policy is ambiguous, and the request is refused.

use std::fmt;
use std::sync::Arc;

use http::Method;

use super::pattern::{PathVariant, is_unreserved};
use super::{Route, Router};

/// A request whose path or method can be read so that it belongs to another route, and one of the two is protected.
#[derive(Clone, Debug)]
pub struct Ambiguous {
    /// The kind of ambiguity.
    pub kind: Ambiguity,
    /// The reading; nothing where there are too many.
    pub reading: Option<String>,
    /// The route of the path as it stands.
    pub route: Option<Arc<Route>>,
    /// The route of the reading.
    pub other: Option<Arc<Route>>,
}

/// The kind of ambiguity in a path or a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ambiguity {
    /// Its percent-encoding, dot segments, empty segments, a host between slashes, parameters, backslashes, ends of segments
    /// or letters beyond ASCII.
    Normalization,
    /// The case of its letters.
    Case,
    /// The slash at its end.
    TrailingSlash,
    /// The case of its method's letters, which count (RFC 9110, 9.1), though not to every server.
    Method,
    /// More readings than are checked.
    TooManyReadings,
}

impl fmt::Display for Ambiguous {
    /// For the client: without the names of routes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Ambiguity::Normalization => {
                "percent-encoding, dot segments, empty segments, a host after two slashes, parameters, backslashes, or dots \
                 and spaces at an end let it mean another path"
            }
            Ambiguity::Case => "letters in upper and lower case may or may not be the same",
            Ambiguity::TrailingSlash => "the slash at the end may or may not count",
            Ambiguity::TooManyReadings => "it has more readings than are looked at",
            Ambiguity::Method => {
                return f.write_str(
                    "the method has lowercase letters, which some servers take for capitals, and different rules hold for that \
                     method here; nothing was sent: write the method in capitals",
                );
            }
        };
        write!(
            f,
            "the path can be read in two ways ({what}), and different rules hold for them here; nothing was sent: write the \
             path plainly"
        )
    }
}

impl Router {
    /// The route of a request, as [`Router::find`] finds it, unless its path or its method can be read otherwise and that matters:
    /// another reading belongs to another route or to none, and one of the two is protected.
    ///
    /// That letters may count in whatever case, and a slash at the end not at all, holds for every path; only a route
    /// that says more of the path than the one it has makes a difference there. `/public` can be exempt under a protected
    /// `/{*rest}`, though `/public/` is not.
    ///
    /// # Errors
    /// The request must be refused.
    pub fn choose(
        &self,
        method: &Method,
        host: Option<&str>,
        path: &str,
    ) -> Result<Option<&Arc<Route>>, Box<Ambiguous>> {
        let host = self.host_that_matters(host);
        let route = self.find_at(method, host, path);
        let check = AmbiguityCheck { router: self, method, host, route };
        check.check_method(path)?;
        if !self.paths_matter || !path.starts_with('/') {
            return Ok(route);
        }
        let bytes = path.as_bytes();
        check.check_folds(bytes, route)?;
        let is_unusual = match route {
            Some(route) => route.path.has_parameter_where(path, is_unusual),
            None => has_unusual(bytes),
        };
        if is_unusual && check.candidates().any(|route| route.protects()) {
            check.check_normalizations(bytes)?;
        }
        Ok(route)
    }
}

/// A check of the other readings of a path.
struct AmbiguityCheck<'a> {
    router: &'a Router,
    method: &'a Method,
    host: Option<&'a str>,
    /// The route of the path as it stands.
    route: Option<&'a Arc<Route>>,
}

impl<'a> AmbiguityCheck<'a> {
    /// Routes that match the request on some path, the most specific first.
    fn candidates(&self) -> impl Iterator<Item = &'a Arc<Route>> {
        let Self { method, host, .. } = *self;
        self.router.ranked().filter(move |route| route.serves(method, host))
    }

    /// Checks the method in capitals, which is not the same method to the gate.
    fn check_method(&self, path: &str) -> Result<(), Box<Ambiguous>> {
        if !self.method.as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Ok(());
        }
        let Ok(capitals) = Method::from_bytes(self.method.as_str().to_ascii_uppercase().as_bytes()) else {
            return Ok(());
        };
        let other = self.router.choose(&capitals, self.host, path)?;
        self.check(Ambiguity::Method, PathVariant::raw(path.as_bytes()), other)
            .map_err(|ambiguous| Box::new(Ambiguous { reading: Some(capitals.to_string()), ..*ambiguous }))
    }

    /// Checks each normalization of the path, with its folds.
    fn check_normalizations(&self, path: &[u8]) -> Result<(), Box<Ambiguous>> {
        let Some(readings) = normalizations(path) else {
            return Err(Box::new(Ambiguous {
                kind: Ambiguity::TooManyReadings,
                reading: None,
                route: self.route.cloned(),
                other: None,
            }));
        };
        for reading in readings {
            let variant = PathVariant::raw(&reading);
            let found = self.candidates().find(|route| route.path.matches_variant(variant));
            self.check(Ambiguity::Normalization, variant, found)?;
            self.check_folds(&reading, found)?;
        }
        Ok(())
    }

    /// Checks a reading, of which `found` is the route, with the trailing slash toggled and with any case.
    fn check_folds(&self, reading: &[u8], found: Option<&Arc<Route>>) -> Result<(), Box<Ambiguous>> {
        let as_is = PathVariant::raw(reading);
        let slash = match reading.strip_suffix(b"/") {
            Some(b"") => None,
            Some(path) => Some(PathVariant { path, ..as_is }),
            None => Some(PathVariant { slash: true, ..as_is }),
        };
        let case_counts = self.router.has_capitals || reading.iter().any(u8::is_ascii_uppercase);
        let any_case = |variant| PathVariant { any_case: true, ..variant };
        let folds = [
            (Ambiguity::TrailingSlash, slash),
            (Ambiguity::Case, Some(any_case(as_is)).filter(|_| case_counts)),
            (Ambiguity::Case, slash.map(any_case).filter(|_| case_counts)),
        ];
        for (kind, fold) in folds {
            let Some(fold) = fold else { continue };
            // A more specific path ranks before it. A route with a host may rank after it, if the paths differ only in
            // a trailing slash.
            let is_before = |route: &&Arc<Route>| found.is_none_or(|found| !Arc::ptr_eq(found, route));
            let before = self.router.ranked().take_while(|route| self.router.hosts_matter || is_before(route));
            let mut others =
                before.filter(|route| route.path.matches_variant(fold) && route.serves(self.method, self.host));
            let Some(first) = others.next() else { continue };
            // In any case, several may have the same precedence.
            let ties = others.filter(|other| !first.is_more_specific(other));
            for other in std::iter::once(first).chain(ties) {
                if found.is_none_or(|found| other.is_more_specific(found)) {
                    self.check(kind, fold, Some(other))?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a reading that belongs to another route, where that matters.
    fn check(
        &self,
        kind: Ambiguity,
        reading: PathVariant<'_>,
        other: Option<&Arc<Route>>,
    ) -> Result<(), Box<Ambiguous>> {
        let is_same = match (self.route, other) {
            (Some(route), Some(other)) => Arc::ptr_eq(route, other),
            (None, None) => true,
            _ => false,
        };
        if is_same || !self.route.into_iter().chain(other).any(|route| route.protects()) {
            return Ok(());
        }
        let slash = if reading.slash { "/" } else { "" };
        let text = format!("{}{slash}", String::from_utf8_lossy(reading.path));
        let reading = Some(if reading.any_case { text.to_ascii_lowercase() } else { text });
        Err(Box::new(Ambiguous { kind, reading, route: self.route.cloned(), other: other.cloned() }))
    }
}

impl Route {
    /// Whether it says more of a request than `other` does, of its path or else of its host.
    fn is_more_specific(&self, other: &Self) -> bool {
        self.path.is_more_specific(&other.path)
            || !other.path.is_more_specific(&self.path) && self.host.is_some() && other.host.is_none()
    }
}

/// Whether a segment has more than one reading.
fn is_unusual(segment: &[u8], is_last: bool) -> bool {
    segment.is_empty() && !is_last
        || segment.last() == Some(&b'.')
        || has_stream(segment)
        || segment.iter().any(|byte| matches!(byte, b'%' | b';' | b'\\' | b'?' | b'#' | ..=b' ' | 0x7F..))
}

fn has_unusual(path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        if is_unusual(segment, segments.peek().is_none()) {
            return true;
        }
    }
    false
}

/// The maximum number of readings of one path.
const MAX_READINGS: usize = 64;

/// The most bytes that these have in all: a long path has fewer.
const MAX_BYTES: usize = 64 * 1024;

/// How often a path is decoded.
const MAX_DECODINGS: u8 = 3;

/// A normalization step of some server, and whether it decodes.
type Step = (fn(&[u8]) -> Vec<u8>, bool);

const STEPS: [Step; 16] = [
    (|path| decode(path, is_unreserved_byte), true),
    (|path| decode(path, |byte| byte != b'/'), true),
    (|path| decode(path, |_| true), true),
    (decode_code_points, true),
    (|path| path.iter().map(|byte| if *byte == b'\\' { b'/' } else { *byte }).collect(), false),
    (|path| each_segment(path, without_parameters), false),
    (without_tail, false),
    (|path| each_segment(path, without_space), false),
    (|path| each_segment(path, without_dots), false),
    (|path| each_segment(path, without_stream), false),
    (merged, false),
    (without_authority, false),
    (|path| without_authority(with_two_slashes(path)), false),
    (resolved, false),
    (shortest, false),
    (in_ascii, false),
];

/// Every other path that servers may take this one for: what any steps in any order make of it. Nothing where there are
/// too many.
fn normalizations(path: &[u8]) -> Option<Vec<Vec<u8>>> {
    // The first is the path itself.
    let mut found = vec![(path.to_vec(), 0)];
    let (mut next, mut bytes) = (0, 0);
    while next < found.len() {
        for (step, decodes) in STEPS {
            let (from, decodings) = &found[next];
            let decodings = decodings + u8::from(decodes);
            let to = step(from);
            if found.iter().any(|(known, _)| *known == to) {
                continue;
            }
            bytes += to.len();
            if found.len() > MAX_READINGS || bytes > MAX_BYTES || decodings > MAX_DECODINGS {
                return None;
            }
            found.push((to, decodings));
        }
        next += 1;
    }
    Some(found.into_iter().skip(1).map(|(path, _)| path).collect())
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

/// Without white space and control characters at the end, which many servers trim.
fn without_space(segment: &[u8]) -> &[u8] {
    trimmed(segment, |byte| byte <= b' ')
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

fn has_stream(segment: &[u8]) -> bool {
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

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
