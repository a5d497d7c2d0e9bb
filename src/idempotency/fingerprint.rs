//! Tells a retry from a key that was reused for another request.

use http::{HeaderMap, HeaderName, Method, Uri};

use super::json::{self, Fault};
use super::media::{self, Media};
use super::multipart;
pub use super::pointer::Pointer;
use super::record::{put, put_count, sha256};

/// How a body enters a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyForm {
    /// JSON canonical, forms as they are, multipart of any subtype without its boundary, else bytes.
    Auto,
    /// Byte for byte.
    Bytes,
    /// Canonical JSON; a body that is not JSON counts byte for byte.
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
    /// Only these parts of a JSON body count; all of it if empty, or if the body has none of them.
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

/// How a body counts in a fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyComparison {
    /// Not at all.
    None,
    /// By the content of its JSON.
    Json,
    /// By the parts of its JSON that are included.
    JsonParts,
    /// As multipart without its boundary.
    Multipart,
    /// Byte for byte.
    Bytes(BytewiseReason),
}

/// Why a body counts byte for byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytewiseReason {
    /// The recipe says so.
    Asked,
    /// It is coded, as `Content-Encoding` says, and what it holds is not looked into.
    Coded,
    /// Its type has no other form.
    Type,
    /// Its type is multipart, and has no boundary that can be read.
    NoBoundary,
    /// It is not of the form that it should be of.
    Malformed,
    /// It is JSON that nests too deep.
    TooDeep,
    /// It is JSON with a name that stands twice.
    Ambiguous,
}

impl Default for Recipe {
    /// Method, path, query and body, the body by its type.
    fn default() -> Self {
        Self {
            method: true,
            path: true,
            query: true,
            body: true,
            headers: Vec::new(),
            form: BodyForm::Auto,
            include: Vec::new(),
            exclude: Vec::new(),
        }
    }
}

impl Recipe {
    /// The digest of a request.
    ///
    /// A body of which only the digest is given counts byte for byte: give all of it where
    /// [`Recipe::needs_whole_body`] says so.
    #[must_use]
    pub fn digest(&self, subject: Subject<'_>) -> [u8; 32] {
        let mut out = Vec::new();
        put(&mut out, b"oncegate fingerprint 1");
        if self.method {
            put(&mut out, b"method");
            put(&mut out, subject.method.as_str().as_bytes());
        }
        if self.path {
            put(&mut out, b"path");
            put(&mut out, subject.uri.path().as_bytes());
        }
        if self.query {
            // No query and an empty one are two targets.
            put(&mut out, b"query");
            put_optional(&mut out, subject.uri.query().map(str::as_bytes));
        }
        for name in &self.headers {
            put(&mut out, b"header");
            put(&mut out, name.as_str().as_bytes());
            put_count(&mut out, subject.headers.get_all(name).iter().count());
            for line in subject.headers.get_all(name) {
                put(&mut out, line.as_bytes());
            }
        }
        if self.body {
            self.put_body(&mut out, subject.headers, subject.body);
        }
        sha256(&out)
    }

    /// Whether requests whose bodies differ can have different digests.
    #[must_use]
    pub fn tells_bodies_apart(&self) -> bool {
        let all_is_left_out = self.exclude.iter().any(|pointer| pointer.as_str().is_empty());
        self.body && self.form != BodyForm::None && !all_is_left_out
    }

    /// Whether different requests can have different digests at all.
    #[must_use]
    pub fn tells_requests_apart(&self) -> bool {
        self.method || self.path || self.query || !self.headers.is_empty() || self.tells_bodies_apart()
    }

    /// Whether the digest of a request with these headers needs its whole body, not just the body's digest.
    #[must_use]
    pub fn needs_whole_body(&self, headers: &HeaderMap) -> bool {
        self.body && matches!(self.read(headers), Reading::Json | Reading::Multipart { .. })
    }

    /// How a body counts in the digest of a request with these headers.
    #[must_use]
    pub fn counted(&self, headers: &HeaderMap, body: &[u8]) -> BodyComparison {
        if !self.body {
            return BodyComparison::None;
        }
        match self.take(headers, body) {
            Content::None => BodyComparison::None,
            Content::Json(canonical) => match self.parts(&canonical) {
                Some(_) => BodyComparison::JsonParts,
                None => BodyComparison::Json,
            },
            Content::Multipart(_) => BodyComparison::Multipart,
            Content::Bytes(why) => BodyComparison::Bytes(why),
        }
    }

    /// Appends the body, after the word for how it was read: the same bytes read in two ways are not equal.
    fn put_body(&self, out: &mut Vec<u8>, headers: &HeaderMap, body: Body<'_>) {
        let digest = match body {
            Body::Whole(bytes) => match self.take(headers, bytes) {
                Content::None => return,
                Content::Json(canonical) => return self.put_json(out, &canonical),
                Content::Multipart(pieces) => {
                    put(out, b"multipart");
                    put_count(out, pieces.len());
                    return pieces.into_iter().for_each(|piece| put(out, &sha256(piece)));
                }
                Content::Bytes(_) => sha256(bytes),
            },
            Body::Digest(_) if matches!(self.read(headers), Reading::None) => return,
            Body::Digest(digest) => digest,
        };
        put(out, b"bytes");
        put(out, &digest);
    }

    /// Reads a body as its headers say; a body of another form counts byte for byte.
    fn take<'b>(&self, headers: &HeaderMap, body: &'b [u8]) -> Content<'b> {
        match self.read(headers) {
            Reading::None => Content::None,
            Reading::Bytes(why) => Content::Bytes(why),
            Reading::Json => match json::canonical(body, &self.exclude) {
                Ok(canonical) => Content::Json(canonical),
                Err(Fault::Syntax) => Content::Bytes(BytewiseReason::Malformed),
                Err(Fault::TooDeep) => Content::Bytes(BytewiseReason::TooDeep),
                Err(Fault::Ambiguous) => Content::Bytes(BytewiseReason::Ambiguous),
            },
            Reading::Multipart { boundary } => match multipart::split(body, &boundary) {
                Some(pieces) => Content::Multipart(pieces),
                None => Content::Bytes(BytewiseReason::Malformed),
            },
        }
    }

    fn put_json(&self, out: &mut Vec<u8>, canonical: &[u8]) {
        let Some(parts) = self.parts(canonical) else {
            put(out, b"json");
            return put(out, &sha256(canonical));
        };
        put(out, b"json parts");
        for part in parts {
            put_optional(out, part.as_ref().map(<[u8; 32]>::as_slice));
        }
    }

    /// The digests of the included parts of canonical JSON. Nothing where it has none of them: bodies that have nothing
    /// of what counts would all be one, and two payments could share an answer.
    fn parts(&self, canonical: &[u8]) -> Option<Vec<Option<[u8; 32]>>> {
        // The canonical form has no name twice and nests no deeper than what was read, so that this finds what there is.
        let part = |pointer| json::locate(canonical, pointer).ok().flatten().map(sha256);
        let parts: Vec<_> = self.include.iter().map(part).collect();
        parts.iter().any(Option::is_some).then_some(parts)
    }

    /// How a body under these headers is read, if it turns out to be what they say.
    fn read(&self, headers: &HeaderMap) -> Reading {
        match self.form {
            BodyForm::None => Reading::None,
            BodyForm::Bytes => Reading::Bytes(BytewiseReason::Asked),
            _ if media::is_coded(headers) => Reading::Bytes(BytewiseReason::Coded),
            BodyForm::Json => Reading::Json,
            BodyForm::Auto => match Media::read(headers) {
                Some(media) if media.is_json() => Reading::Json,
                Some(media) if media.essence.starts_with("multipart/") => match media.parameter("boundary") {
                    Some(boundary) => Reading::Multipart { boundary },
                    None => Reading::Bytes(BytewiseReason::NoBoundary),
                },
                _ => Reading::Bytes(BytewiseReason::Type),
            },
        }
    }
}

/// Whether a JSON body has something at a pointer.
#[must_use]
pub fn stands_at(pointer: &Pointer, body: &[u8]) -> bool {
    json::locate(body, pointer).is_ok_and(|found| found.is_some())
}

impl BodyForm {
    /// Every form.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Bytes, Self::Json, Self::None];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bytes => "bytes",
            Self::Json => "json",
            Self::None => "none",
        }
    }

    /// Reads what [`BodyForm::as_str`] writes.
    ///
    /// # Errors
    /// Lists the valid words, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|form| form.as_str() == text)
            .ok_or_else(|| format!("`{text}` is not a body form: use `auto`, `bytes`, `json` or `none`"))
    }
}

/// The parsed form of a body.
enum Content<'b> {
    None,
    /// In canonical form.
    Json(Vec<u8>),
    /// Its parts.
    Multipart(Vec<&'b [u8]>),
    Bytes(BytewiseReason),
}

/// How one body is read.
enum Reading {
    None,
    Bytes(BytewiseReason),
    Json,
    Multipart { boundary: Vec<u8> },
}

/// Appends a part that may be absent, which is not the same as empty.
fn put_optional(out: &mut Vec<u8>, part: Option<&[u8]>) {
    out.push(u8::from(part.is_some()));
    if let Some(part) = part {
        put(out, part);
    }
}

#[cfg(test)]
mod tests;
