//! The stored form of what was claimed and what was answered.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::fingerprint::Fingerprint;

/// What a claim writes about its request; fixed for the record's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// How the request was told apart, and what that gave.
    pub fingerprint: Fingerprint,
    /// The request's method.
    pub method: Method,
    /// The request's path without its query, at most 256 bytes of it; for operators.
    pub path: String,
    /// The key, shortened; for operators.
    pub key: String,
}

/// The answer of a completed record, as its client got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its reason phrase where that is not the standard one. Raw bytes.
    pub reason: Option<Bytes>,
    /// Every end-to-end header in the order sent, repeats included.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body and trailers, or nothing for a tombstone.
    pub content: Option<Content>,
}

/// The kept body of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// The body's bytes, never decoded.
    pub body: Bytes,
    /// The trailers in the order sent.
    pub trailers: Vec<(HeaderName, HeaderValue)>,
}

/// The bytes are not of a format that this version reads: never run such a record again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the record is in a format that this version cannot read")]
pub struct Unreadable;

impl Head {
    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        todo!()
    }

    /// Reads the stored form.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let _ = bytes;
        todo!()
    }
}

impl Answer {
    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        todo!()
    }

    /// Reads the stored form. The body shares memory with `bytes`.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let _ = bytes;
        todo!()
    }
}
