//! Path patterns.

use std::fmt;

use self::foreign::Foreign;

mod foreign;

/// A path pattern: literal segments, `{x}` for one segment, `{*rest}` for any number of them.
///
/// Segments are the parts between slashes, compared byte for byte with the raw path, so a slash at the end counts.
/// `{x}` is one segment that is not empty. `{*rest}` is whatever follows, and matches where nothing follows too:
/// `/a/{*rest}` is the whole subtree, `/a`, `/a/` and `/a/b/c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    segments: Box<[Segment]>,
}

/// One segment of a pattern. Kinds are ordered by specificity.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(Box<str>),
    One,
    Rest,
}

/// How specific a segment is, the most specific kind first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Literal,
    One,
    Rest,
}

/// A path as a request has it, or a variant that a server may take it for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathVariant<'a> {
    /// Its bytes.
    pub(super) path: &'a [u8],
    /// Whether one more slash follows them.
    pub(super) slash: bool,
    /// Whether the case of its letters does not count.
    pub(super) any_case: bool,
}

impl<'a> PathVariant<'a> {
    /// Byte for byte.
    pub(super) fn raw(path: &'a [u8]) -> Self {
        Self { path, slash: false, any_case: false }
    }
}

/// Why a text is not a pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Syntax of another router: `*`, `:id`, `<id>`, a regular expression.
    #[error("{0}")]
    Foreign(Foreign),
    /// No leading slash.
    #[error("a path starts with a slash")]
    NoSlash,
    /// A `?` or a `#`.
    #[error("a path has no query and no fragment: `{0}` cannot stand in it")]
    NotPath(char),
    /// A character that no raw path has.
    #[error("`{0}` cannot stand in the path of a request as it is")]
    NotEncoded(char),
    /// A `%` without two hexadecimal digits.
    #[error("`%` must be followed by two hexadecimal digits")]
    BadPercent,
    /// A percent-encoding that is usually written otherwise.
    #[error("`{found}` is usually written `{normal}`, and paths are compared byte for byte")]
    NotNormal {
        /// The encoding in the pattern.
        found: String,
        /// The normal form (RFC 3986, section 6.2.2).
        normal: String,
    },
    /// `.` or `..`
    #[error("`{0}` is resolved by clients before they send a path")]
    Dots(String),
    /// `a{x}` and the like.
    #[error("a parameter must be a whole segment, and `{0}` is not")]
    PartialParameter(String),
    /// `{}`, `{*}`
    #[error("a parameter needs a name: `{0}`")]
    NoName(String),
    /// `{a b}`
    #[error("`{0}` is not a name for a parameter")]
    BadName(String),
    /// Two parameters of one name.
    #[error("two parameters are named `{0}`")]
    SameName(String),
    /// `{*rest}` before the end, or twice.
    #[error("`{0}` takes the remainder of the path, so nothing may follow it")]
    RestNotLast(String),
}

impl Pattern {
    /// Reads a pattern such as `/v1/charges/{id}/capture` or `/{*rest}`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if let Some(foreign) = foreign::find(text) {
            return Err(Invalid::Foreign(foreign));
        }
        Self::read(text)
    }

    /// Reads a pattern that has no syntax of another router.
    fn read(text: &str) -> Result<Self, Invalid> {
        if let Some(found) = text.chars().find(|found| matches!(found, '?' | '#')) {
            return Err(Invalid::NotPath(found));
        }
        let path = text.strip_prefix('/').ok_or(Invalid::NoSlash)?;
        let mut names = Vec::new();
        let mut segments = Vec::new();
        let mut pieces = path.split('/').peekable();
        while let Some(piece) = pieces.next() {
            let segment = Segment::parse(piece, &mut names)?;
            if segment == Segment::Rest && pieces.peek().is_some() {
                return Err(Invalid::RestNotLast(piece.to_owned()));
            }
            segments.push(segment);
        }
        Ok(Self { text: text.into(), segments: segments.into() })
    }

    /// Whether the raw path of a request matches.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        self.matches_variant(PathVariant::raw(path.as_bytes()))
    }

    /// Whether a variant of a path matches.
    pub(super) fn matches_variant(&self, variant: PathVariant<'_>) -> bool {
        let Some((b'/', path)) = variant.path.split_first() else { return false };
        let slash = variant.slash.then_some(&b""[..]);
        let mut pieces = path.split(|byte| *byte == b'/').chain(slash);
        for segment in &self.segments {
            let fits = match (segment, pieces.next()) {
                (Segment::Rest, _) => return true,
                (_, None) => false,
                (Segment::Literal(literal), Some(piece)) if variant.any_case => {
                    literal.as_bytes().eq_ignore_ascii_case(piece)
                }
                (Segment::Literal(literal), Some(piece)) => literal.as_bytes() == piece,
                (Segment::One, Some(piece)) => !piece.is_empty(),
            };
            if !fits {
                return false;
            }
        }
        pieces.next().is_none()
    }

    /// Whether a parameter matches a segment of the path for which `is_unusual` is true. Literals do not count: they
    /// were written on purpose. `is_unusual` gets a segment and whether it is the last. The path must match.
    pub(super) fn has_parameter_where(&self, path: &str, is_unusual: impl Fn(&[u8], bool) -> bool) -> bool {
        let mut own = self.segments.iter();
        let mut pieces = path.as_bytes().split(|byte| *byte == b'/').skip(1).peekable();
        while let Some(piece) = pieces.next() {
            let is_literal = matches!(own.next(), Some(Segment::Literal(_)));
            if !is_literal && is_unusual(piece, pieces.peek().is_none()) {
                return true;
            }
        }
        false
    }

    /// The path without its last segment, where that is a parameter and stands below a literal: of `/v1/orders/{id}` it
    /// is `/v1/orders`.
    #[must_use]
    pub fn collection(&self) -> Option<&str> {
        match &*self.segments {
            [.., Segment::Literal(name), Segment::One] if !name.is_empty() => {
                self.text.rsplit_once('/').map(|(collection, _)| collection)
            }
            _ => None,
        }
    }

    /// Whether it takes whatever follows its segments.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.segments.last() == Some(&Segment::Rest)
    }

    /// Whether some path matches both.
    pub(super) fn intersects(&self, other: &Self) -> bool {
        let (mut own, mut others) = (self.segments.iter(), other.segments.iter());
        loop {
            match (own.next(), others.next()) {
                (None, None) | (Some(Segment::Rest), _) | (_, Some(Segment::Rest)) => return true,
                (None, Some(_)) | (Some(_), None) => return false,
                (Some(Segment::Literal(own)), Some(Segment::Literal(other))) if own != other => return false,
                // A parameter is never empty.
                (Some(Segment::Literal(literal)), Some(Segment::One))
                | (Some(Segment::One), Some(Segment::Literal(literal)))
                    if literal.is_empty() =>
                {
                    return false;
                }
                _ => {}
            }
        }
    }

    /// Whether it matches every path.
    pub(super) fn is_everything(&self) -> bool {
        self.segments.first() == Some(&Segment::Rest)
    }

    /// Whether a literal of it has a capital letter.
    pub(super) fn has_capitals(&self) -> bool {
        let capital = |literal: &str| literal.bytes().any(|byte| byte.is_ascii_uppercase());
        self.segments.iter().any(|segment| matches!(segment, Segment::Literal(literal) if capital(literal)))
    }

    /// Whether it is more specific than `other` for variants of one path: at the first segment where their kinds
    /// differ, its kind is the more specific one. The end of a pattern counts as a literal.
    pub(super) fn is_more_specific(&self, other: &Self) -> bool {
        let mut places = self.specificity_with_end().zip(other.specificity_with_end());
        places.find(|(own, other)| own != other).is_some_and(|(own, other)| own < other)
    }

    /// How specific each segment is, and the end.
    fn specificity_with_end(&self) -> impl Iterator<Item = Kind> {
        self.specificity().chain((!self.is_open()).then_some(Kind::Literal))
    }

    /// How specific each segment is. Where two patterns match one path, the lesser is the more specific: `/a` is less than
    /// `/a/{*rest}`, of which it is the beginning.
    pub(super) fn specificity(&self) -> impl Iterator<Item = Kind> {
        self.segments.iter().map(Segment::kind)
    }

    /// Whether both match the same paths: they differ in nothing but the names of their parameters.
    pub(super) fn same_requests(&self, other: &Self) -> bool {
        self.segments == other.segments
    }
}

impl Invalid {
    /// Paths to write in the place of this one, each for a route of its own; empty where none says the same.
    #[must_use]
    pub fn instead(&self) -> &[String] {
        match self {
            Self::Foreign(foreign) => &foreign.instead,
            _ => &[],
        }
    }

    /// What the paths begin with that this one was meant for, where those to write instead take fewer.
    #[must_use]
    pub fn beginning(&self) -> Option<&str> {
        match self {
            Self::Foreign(foreign) => foreign.beginning.as_deref(),
            _ => None,
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Segment {
    fn parse<'a>(piece: &'a str, names: &mut Vec<&'a str>) -> Result<Self, Invalid> {
        if !piece.contains(['{', '}']) {
            check_literal(piece)?;
            return Ok(Self::Literal(piece.into()));
        }
        let inner = piece
            .strip_prefix('{')
            .and_then(|piece| piece.strip_suffix('}'))
            .filter(|inner| !inner.contains(['{', '}']))
            .ok_or_else(|| Invalid::PartialParameter(piece.to_owned()))?;
        let (segment, name) = match inner.strip_prefix('*') {
            Some(name) => (Self::Rest, name),
            None => (Self::One, inner),
        };
        if name.is_empty() {
            return Err(Invalid::NoName(piece.to_owned()));
        }
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-') {
            return Err(Invalid::BadName(name.to_owned()));
        }
        if names.contains(&name) {
            return Err(Invalid::SameName(name.to_owned()));
        }
        names.push(name);
        Ok(segment)
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Literal(_) => Kind::Literal,
            Self::One => Kind::One,
            Self::Rest => Kind::Rest,
        }
    }
}

/// A literal must be what a client sends: `pchar` (RFC 3986, section 3.3) in its normal form.
fn check_literal(piece: &str) -> Result<(), Invalid> {
    if matches!(piece, "." | "..") {
        return Err(Invalid::Dots(piece.to_owned()));
    }
    let mut rest = piece.chars();
    while let Some(next) = rest.next() {
        match next {
            '%' => {
                let digits = rest.as_str().get(..2).ok_or(Invalid::BadPercent)?;
                check_encoding(digits)?;
                rest = rest.as_str()[2..].chars();
            }
            _ if is_unreserved(next) || "!$&'()*+,;=:@".contains(next) => {}
            _ => return Err(Invalid::NotEncoded(next)),
        }
    }
    Ok(())
}

fn check_encoding(digits: &str) -> Result<(), Invalid> {
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(Invalid::BadPercent);
    }
    let byte = u8::from_str_radix(digits, 16).map_err(|_| Invalid::BadPercent)?;
    let normal = match char::from(byte) {
        plain if is_unreserved(plain) => plain.to_string(),
        _ => format!("%{}", digits.to_ascii_uppercase()),
    };
    let found = format!("%{digits}");
    if found == normal { Ok(()) } else { Err(Invalid::NotNormal { found, normal }) }
}

pub(super) fn is_unreserved(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '-' | '.' | '_' | '~')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_segments() {
        let cases = [
            ("/", "/", true),
            ("/", "/a", false),
            ("/a", "/a", true),
            ("/a", "/a/", false),
            ("/a/", "/a/", true),
            ("/a/", "/a", false),
            ("/a/{x}", "/a/b", true),
            ("/a/{x}", "/a/", false),
            ("/a/{x}", "/a/b/", false),
            ("/a/{x}/c", "/a/b/c", true),
            ("/{*rest}", "/", true),
            ("/{*rest}", "/a/b//c", true),
            ("/a/{*rest}", "/a/", true),
            ("/a/{*rest}", "/a/b/c", true),
            ("/a/{*rest}", "/a", true),
            ("/a/{*rest}", "/ab", false),
            ("/a/{*rest}", "/", false),
            ("/a/{x}/{*rest}", "/a/b", true),
            ("/a/{x}/{*rest}", "/a/", false),
            ("/a/{x}/{*rest}", "/a", false),
            ("/a//{*rest}", "/a/", true),
            ("/a//{*rest}", "/a", false),
            ("/a%2Fb", "/a%2Fb", true),
            ("/a%2Fb", "/a%2fb", false),
            ("/{*rest}", "*", false),
            ("/{*rest}", "", false),
        ];
        for (pattern, path, expected) in cases {
            assert_eq!(Pattern::parse(pattern).unwrap().matches(path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn a_bad_pattern_says_why() {
        let cases = [
            ("", Invalid::NoSlash),
            ("v1/charges", Invalid::NoSlash),
            ("/v1?x=1", Invalid::NotPath('?')),
            ("/v1#top", Invalid::NotPath('#')),
            ("/caf\u{e9}", Invalid::NotEncoded('\u{e9}')),
            ("/a b", Invalid::NotEncoded(' ')),
            ("/a%2", Invalid::BadPercent),
            ("/a%zz", Invalid::BadPercent),
            ("/a%2\u{e9}", Invalid::BadPercent),
            ("/%41", Invalid::NotNormal { found: "%41".into(), normal: "A".into() }),
            ("/%2f", Invalid::NotNormal { found: "%2f".into(), normal: "%2F".into() }),
            ("/a/../b", Invalid::Dots("..".into())),
            ("/a{x}", Invalid::PartialParameter("a{x}".into())),
            ("/{x}{y}", Invalid::PartialParameter("{x}{y}".into())),
            ("/{x", Invalid::PartialParameter("{x".into())),
            ("/{}", Invalid::NoName("{}".into())),
            ("/{*}", Invalid::NoName("{*}".into())),
            ("/{a b}", Invalid::BadName("a b".into())),
            ("/{x}/{x}", Invalid::SameName("x".into())),
            ("/{*rest}/a", Invalid::RestNotLast("{*rest}".into())),
            ("/{*a}/{*b}", Invalid::RestNotLast("{*a}".into())),
        ];
        for (pattern, expected) in cases {
            assert_eq!(Pattern::parse(pattern), Err(expected), "{pattern}");
        }
    }

    #[test]
    fn a_collection_is_what_items_stand_below() {
        for (pattern, expected) in [
            ("/v1/orders/{id}", Some("/v1/orders")),
            ("/v1/{tenant}/orders/{id}", Some("/v1/{tenant}/orders")),
            ("/v1/orders/{*rest}", None),
            ("/v1/orders/{id}/lines", None),
            ("/{tenant}/{id}", None),
            ("/{id}", None),
            ("//{id}", None),
        ] {
            assert_eq!(Pattern::parse(pattern).unwrap().collection(), expected, "{pattern}");
        }
    }

    #[test]
    fn a_pattern_shows_as_it_was_written() {
        let text = "/v1/charges/{id}/{*rest}";
        assert_eq!(Pattern::parse(text).unwrap().to_string(), text);
    }
}
