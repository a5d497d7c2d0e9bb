//! The idempotency key: where it comes from and what it may look like.

use std::fmt;

use http::{HeaderMap, HeaderName, Uri};

use super::hex::Hex;
pub use super::key_source::KeySource;
use super::key_source::Reading;

/// A valid idempotency key: 1 to `max_length` visible ASCII characters, case-sensitive.
///
/// `Debug` shows it shortened, and nothing else shows it at all but [`Key::as_str`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Box<str>);

/// `key = { from, required, max_length }`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// Places in order; the first that yields a value wins.
    pub from: Vec<KeySource>,
    /// Whether a request without a key is refused.
    pub required: bool,
    /// Longest key, in characters. The hashes that stand for an event or a fingerprint have 64, whatever it says.
    pub max_length: usize,
}

/// What looking for a key found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// This key.
    Key(Key),
    /// The key is the request's own fingerprint: compute it, then use [`Key::from_fingerprint`].
    Fingerprint,
    /// No place yields a value.
    Absent,
    /// The next place is in the body, which was not given: ask again with it.
    NeedsBody,
}

impl Found {
    /// The key that was found, or else the request's own fingerprint as its key.
    #[must_use]
    pub fn into_key(self, fingerprint: &[u8; 32]) -> Key {
        match self {
            Self::Key(key) => key,
            Self::Fingerprint | Self::Absent | Self::NeedsBody => Key::from_fingerprint(fingerprint),
        }
    }
}

/// A malformed key. The message describes the problem without the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

impl Default for KeyRule {
    /// The header `Idempotency-Key`, optional, of at most 255 characters.
    fn default() -> Self {
        let header = KeySource::Header(HeaderName::from_static("idempotency-key"));
        Self { from: vec![header], required: false, max_length: 255 }
    }
}

impl KeyRule {
    /// Looks for a key. Without `body`, stops at the first place that is in it. `body` is the whole body.
    ///
    /// # Errors
    /// The first place that has something has no well-formed key. Later places do not count then.
    pub fn find(&self, uri: &Uri, headers: &HeaderMap, body: Option<&[u8]>) -> Result<Found, Invalid> {
        for source in &self.from {
            match source.read(uri, headers, body, self.max_length)? {
                Reading::Absent => {}
                Reading::Found(found) => return Ok(found),
            }
        }
        Ok(Found::Absent)
    }
}

impl Key {
    /// The key of a request whose fingerprint is its key: 64 hexadecimal digits.
    #[must_use]
    pub fn from_fingerprint(digest: &[u8; 32]) -> Self {
        Self(Hex(digest).to_string().into())
    }

    /// Reads a bare or quoted key, as an operator types it.
    ///
    /// # Errors
    /// The text is neither, or not 1 to `max_length` visible ASCII characters.
    pub fn parse(text: &str, max_length: usize) -> Result<Self, Invalid> {
        Self::from_field(text.as_bytes(), max_length)
    }

    /// The key itself. Never log it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key with all but its beginning left out, for people: at most 8 characters, and at most a quarter of it.
    #[must_use]
    pub fn shortened(&self) -> String {
        format!("{}…", &self.0[..(self.0.len() / 4).min(8)])
    }

    /// Reads the value of a header field: a bare key, or a quoted one (RFC 9651, section 3.3.3).
    pub(super) fn from_field(field: &[u8], max_length: usize) -> Result<Self, Invalid> {
        let field = field.trim_ascii();
        if field.first() == Some(&b'"') {
            return Self::from_value(&unquote(field)?, max_length);
        }
        if field.iter().any(|byte| matches!(byte, b'"' | b'\\' | b',' | b';')) {
            return Err(Invalid("an unquoted key has no `\"`, `\\`, `,` or `;`".to_owned()));
        }
        Self::from_value(field, max_length)
    }

    /// Reads a value that stands for nothing but itself.
    pub(super) fn from_value(value: &[u8], max_length: usize) -> Result<Self, Invalid> {
        if value.is_empty() {
            return Err(Invalid("the key is empty".to_owned()));
        }
        let visible = std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
        let Some(text) = visible else {
            return Err(Invalid("a key has visible ASCII characters only, and no spaces".to_owned()));
        };
        if text.len() > max_length {
            return Err(Invalid(format!("the key is longer than {max_length} characters")));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.shortened())
    }
}

/// The value of a quoted string. Nothing may stand behind it.
fn unquote(field: &[u8]) -> Result<Vec<u8>, Invalid> {
    let invalid = |what: &str| Err(Invalid(what.to_owned()));
    let mut value = Vec::with_capacity(field.len());
    let mut bytes = field.iter().copied().skip(1);
    loop {
        match bytes.next() {
            None => return invalid("the quoted key does not end"),
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(byte @ (b'"' | b'\\')) => value.push(byte),
                _ => return invalid("in a quoted key, `\\` stands only before `\"` or `\\`"),
            },
            Some(byte) => value.push(byte),
        }
    }
    match bytes.next() {
        None => Ok(value),
        Some(_) => invalid("the key has parameters, or there is more than one"),
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests {
    use super::*;

    fn field(text: &[u8]) -> Option<String> {
        Key::from_field(text, 20).ok().map(|key| key.as_str().to_owned())
    }

    #[test]
    fn the_grammar_of_a_header() {
        for (text, key) in [
            ("abc", Some("abc")),
            ("\"abc\"", Some("abc")),
            ("  \"abc\"\t", Some("abc")),
            ("ABC", Some("ABC")),
            ("a=b:c/d'!~", Some("a=b:c/d'!~")),
            ("\"a,b;c\"", Some("a,b;c")),
            ("\"a\\\"b\\\\c\"", Some("a\"b\\c")),
            ("01234567890123456789", Some("01234567890123456789")),
            ("\"01234567890123456789\"", Some("01234567890123456789")),
            // Too long.
            ("012345678901234567890", None),
            ("\"012345678901234567890\"", None),
            // Empty.
            ("", None),
            ("  ", None),
            ("\"\"", None),
            // Lists and parameters.
            ("a,b", None),
            ("a, b", None),
            ("\"a\", \"b\"", None),
            ("a;b=c", None),
            ("\"a\";b=c", None),
            ("\"a\" x", None),
            ("\"a\"\"b\"", None),
            // Quotes and escapes out of place.
            ("\"a", None),
            ("a\"", None),
            ("a\"b", None),
            ("a\\b", None),
            ("\"a\\", None),
            ("\"a\\x\"", None),
            ("\"a\\\"", None),
            // Spaces, control characters, other scripts.
            ("a b", None),
            ("\"a b\"", None),
            ("\" a\"", None),
            ("a\tb", None),
            ("a\u{7f}", None),
            ("é", None),
            ("\"é\"", None),
        ] {
            assert_eq!(field(text.as_bytes()).as_deref(), key, "{text:?}");
        }
        assert_eq!(field(b"a\xff"), None);
    }

    #[test]
    fn an_invalid_key_does_not_show_in_its_error() {
        for text in ["secret key", "secret,key", "\"secret", "\"secret\\key\"", "secretsecretsecretsecret"] {
            let error = Key::parse(text, 20).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn people_see_a_quarter_at_most() {
        for (key, shortened) in [("abc", "…"), ("abcd", "a…"), ("abcdefghi", "ab…"), (&"x".repeat(255), "xxxxxxxx…")]
        {
            let key = Key::parse(key, 255).unwrap();
            assert_eq!(key.shortened(), shortened);
            assert_eq!(format!("{key:?}"), format!("Key({shortened})"));
        }
    }

    #[test]
    fn a_fingerprint_is_a_key() {
        assert_eq!(Key::from_fingerprint(&[0x0a; 32]).as_str(), "0a".repeat(32));
    }
}
