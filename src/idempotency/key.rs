//! The idempotency key: where it comes from and what it may look like.

use http::{HeaderMap, HeaderName, Uri};

use super::fingerprint::Pointer;

/// A valid idempotency key: 1 to `max_length` visible ASCII characters, case-sensitive.
///
/// `Debug` shows it shortened, and nothing else shows it at all but [`Key::as_str`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Box<str>);

/// One place that a key may come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// `header:NAME`
    Header(HeaderName),
    /// `query:NAME`
    Query(String),
    /// `json:/pointer` (RFC 6901) into a JSON body: a string or an integer.
    Json(Pointer),
    /// `cloudevent`: source and id, from `ce-source` and `ce-id` or from a structured JSON event.
    CloudEvent,
    /// `fingerprint`: the request's own fingerprint.
    Fingerprint,
}

/// `key = { from, required, max_length }`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// Places in order; the first that yields a value wins.
    pub from: Vec<KeySource>,
    /// Whether a request without a key is refused.
    pub required: bool,
    /// Longest key, in characters.
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

/// A key that is present and not well-formed. Says what is wrong without showing the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

impl KeyRule {
    /// Looks for a key. Without `body`, stops at the first place that is in it. `body` is the whole body.
    pub fn find(&self, uri: &Uri, headers: &HeaderMap, body: Option<&[u8]>) -> Result<Found, Invalid> {
        let _ = (uri, headers, body);
        todo!()
    }
}

impl Key {
    /// The key of a request whose fingerprint is its key: 64 hexadecimal digits.
    #[must_use]
    pub fn from_fingerprint(digest: &[u8; 32]) -> Self {
        let _ = digest;
        todo!()
    }

    /// Reads a bare or quoted key, as an operator types it.
    pub fn parse(text: &str, max_length: usize) -> Result<Self, Invalid> {
        let _ = (text, max_length);
        todo!()
    }

    /// The key itself. Never log it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key with all but its beginning left out, for people.
    #[must_use]
    pub fn shortened(&self) -> String {
        todo!()
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({})", self.shortened())
    }
}
