//! Tells a retry from a key that was reused for another request.

use http::{HeaderMap, HeaderName, Method, Uri};

/// A JSON pointer (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pointer(String);

/// How a body enters a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyForm {
    /// JSON canonical, forms as they are, multipart without its boundary, else bytes.
    Auto,
    /// Byte for byte.
    Bytes,
    /// Canonical JSON; what is not JSON counts byte for byte.
    Json,
    /// Not at all.
    None,
}

/// How fingerprints are made. It is kept with each, so that a record is compared the way it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Whether the method counts.
    pub method: bool,
    /// Whether the path counts, as received.
    pub path: bool,
    /// Whether the query counts, as received.
    pub query: bool,
    /// Whether the body counts, in the form `form`.
    pub body: bool,
    /// Headers that count: every line of each.
    pub headers: Vec<HeaderName>,
    /// How the body counts.
    pub form: BodyForm,
    /// Only these parts of a JSON body count; all of it if empty.
    pub include: Vec<Pointer>,
    /// These parts of a JSON body do not count.
    pub exclude: Vec<Pointer>,
}

/// A recipe and what it gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// How it was made.
    pub recipe: Recipe,
    /// SHA-256.
    pub digest: [u8; 32],
}

/// The request that a fingerprint is made of.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Its method.
    pub method: &'a Method,
    /// Its target.
    pub uri: &'a Uri,
    /// Its headers, as received.
    pub headers: &'a HeaderMap,
    /// Its body.
    pub body: Body<'a>,
}

/// A request's body, or its digest where it is too large to hold and its form is bytes.
#[derive(Clone, Copy)]
pub enum Body<'a> {
    /// All of it.
    Whole(&'a [u8]),
    /// The SHA-256 of its bytes.
    Digest([u8; 32]),
}

impl Recipe {
    /// The digest of a request.
    #[must_use]
    pub fn digest(&self, subject: Subject<'_>) -> [u8; 32] {
        let _ = subject;
        todo!()
    }

    /// Whether the digest of a request with these headers needs its whole body, not just the body's digest.
    #[must_use]
    pub fn needs_whole_body(&self, headers: &HeaderMap) -> bool {
        let _ = headers;
        todo!()
    }
}
