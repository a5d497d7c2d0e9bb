//! The stored form of what was claimed and what was answered.
//!
//! Both begin with the format's version (1; 2 for a head with a proof, 3 for one with details) and an envelope (0: plain; 1:
//! encrypted, in version 1 whatever it holds, and decrypted before it comes here).
//! What begins otherwise is [`Unreadable`], and so is what breaks off, holds an impossible value or goes on too long.
//! Integers are big-endian; a *part* is its length in four bytes, then its bytes; a *list* is its length in four
//! bytes, then its items.
//!
//! An **answer** is laid out so that SQL can write one (`int4send`, `int2send` and `||` suffice):
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 1 | envelope: 0 |
//! | 2 | status |
//! | 1 | 0: standard reason phrase; 1: a reason phrase follows, as a part |
//! | list | headers in the order sent, at most 4096, each a part for its name and a part for its raw value |
//! | 1 | 0: a tombstone, and nothing follows; 1: trailers and body follow |
//! | list | trailers, like headers |
//! | rest | the body |
//!
//! A **head**:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1; 2 where there is a proof; 4 and 5 likewise where the fingerprint is keyed |
//! | 1 | envelope: 0 |
//! | 1 | the recipe's version: 1 |
//! | 1 | what counts: method 1, path 2, query 4, body 8, added up |
//! | 1 | the body's form: auto 0, bytes 1, json 2, none 3 |
//! | list | names of the headers that count, each a part |
//! | list | included pointers, each a part |
//! | list | excluded pointers, each a part |
//! | 32 | the fingerprint's digest |
//! | 32 | where there is a proof: its digest |
//! | part | method |
//! | part | path, in UTF-8 |
//! | part | shortened key, in UTF-8 |
//!
//! A head **with details**, as gates write it:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 3 |
//! | 1 | envelope: 0 |
//! | part | the details, see [`Details`] |
//! | rest | the head without them |

mod accepted;
mod details;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::credential::Proof;
use super::fingerprint::{BodyForm, Fingerprint, Pointer, Recipe};
use super::key::Key;
use super::record::{put, put_count};

pub use accepted::AcceptedRequest;
pub use details::Details;

/// The version of the stored forms.
pub(super) const VERSION: u8 = 1;
/// The version of a head with a proof and without details. Gates of older versions read it.
const WITH_PROOF: u8 = 2;
/// The version of a head with details.
const WITH_DETAILS: u8 = 3;
/// What a keyed fingerprint adds to the version of a head without details.
const KEYED: u8 = 3;
/// The envelope of values that are stored verbatim.
pub(super) const PLAIN: u8 = 0;

/// How a value begins that is encrypted.
pub const SEALED: [u8; 2] = [VERSION, 1];
/// How the head of a record begins that is encrypted, and beside which no plain answer is read.
pub const SEALED_STRICTLY: [u8; 2] = [VERSION, 2];
/// The version of recipes.
const RECIPE_VERSION: u8 = 1;
/// The most headers, and the most trailers, of an answer: more cannot be replayed.
const MAX_FIELDS: usize = 4096;
/// The longest path that a head keeps, in bytes.
const MAX_PATH: usize = 256;

/// Whether a value is encrypted.
#[must_use]
pub fn is_sealed(value: &[u8]) -> bool {
    value.starts_with(&SEALED) || value.starts_with(&SEALED_STRICTLY)
}

/// What a claim writes about its request; fixed for the record's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The fingerprint recipe of the request, and its digest.
    pub fingerprint: Fingerprint,
    /// Whether that digest is keyed with a secret: see [`RecordIdHasher::keyed_digest`](super::identity::RecordIdHasher::keyed_digest).
    pub is_keyed: bool,
    /// What its caller proved its identity with, where the scope asks for a proof.
    pub proof: Option<Proof>,
    /// The request's method.
    pub method: Method,
    /// The request's path without its query, at most 256 bytes of it; for operators.
    pub path: String,
    /// The key, shortened; for operators.
    pub key: String,
    /// The encoded details, for operators; nothing where an older release claimed the record.
    details: Bytes,
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

/// Whether two encoded heads differ at most in their details, so that every decision by the one is the decision by the other.
#[must_use]
pub fn is_same_request(one: &Bytes, other: &Bytes) -> bool {
    let decisive = |head| {
        let mut reader = Reader::new(head);
        match reader.array() {
            Ok([WITH_DETAILS, PLAIN]) => reader.part().map(|_| reader.rest()),
            _ => Ok(head.clone()),
        }
    };
    decisive(one).is_ok_and(|one| decisive(other) == Ok(one))
}

impl Head {
    /// The head of a request: cuts its path and shortens its key.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, method: Method, path: &str, key: &Key) -> Self {
        let end = (0..=path.len().min(MAX_PATH)).rev().find(|&end| path.is_char_boundary(end)).unwrap_or(0);
        Self {
            fingerprint,
            is_keyed: false,
            proof: None,
            method,
            path: path[..end].to_owned(),
            key: key.shortened(),
            details: Bytes::new(),
        }
    }

    /// Whether the request's path may have been longer than the stored part.
    #[must_use]
    pub fn is_path_cut(&self) -> bool {
        // A character is not cut in two.
        self.path.len() > MAX_PATH - 4
    }

    /// The stored part of the path for people: where more may have followed, an ellipsis says so.
    #[must_use]
    pub fn shown_path(&self) -> String {
        let rest = if self.is_path_cut() { "…" } else { "" };
        format!("{}{rest}", self.path)
    }

    /// The same with a proof, or without one.
    #[must_use]
    pub fn with_proof(self, proof: Option<Proof>) -> Self {
        Self { proof, ..self }
    }

    /// The same with this digest of the fingerprint, which is keyed; where there is one.
    #[must_use]
    pub fn with_keyed_digest(mut self, digest: Option<[u8; 32]>) -> Self {
        if let Some(digest) = digest {
            (self.fingerprint.digest, self.is_keyed) = (digest, true);
        }
        self
    }

    /// The same with details.
    #[must_use]
    pub fn with_details(self, details: &Details) -> Self {
        Self { details: details.encode(), ..self }
    }

    /// What else is known of the request.
    #[must_use]
    pub fn details(&self) -> Details {
        Details::decode(&self.details)
    }

    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(256);
        if !self.details.is_empty() {
            out.extend_from_slice(&[WITH_DETAILS, PLAIN]);
            put(&mut out, &self.details);
        }
        let version = if self.proof.is_some() { WITH_PROOF } else { VERSION };
        out.extend_from_slice(&[if self.is_keyed { version + KEYED } else { version }, PLAIN]);
        put_recipe(&mut out, &self.fingerprint.recipe);
        out.extend_from_slice(&self.fingerprint.digest);
        if let Some(Proof(digest)) = &self.proof {
            out.extend_from_slice(digest);
        }
        put(&mut out, self.method.as_str().as_bytes());
        put(&mut out, self.path.as_bytes());
        put(&mut out, self.key.as_bytes());
        out.into()
    }

    /// Reads the stored form.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let mut reader = Reader::new(bytes);
        let (mut form, mut details) = (reader.array()?, Bytes::new());
        if form == [WITH_DETAILS, PLAIN] {
            details = reader.part()?;
            form = reader.array()?;
        }
        const KEYED_WITH_PROOF: u8 = WITH_PROOF + KEYED;
        const KEYED_ALONE: u8 = VERSION + KEYED;
        let (is_keyed, has_proof) = match form {
            [VERSION, PLAIN] => (false, false),
            [WITH_PROOF, PLAIN] => (false, true),
            [KEYED_ALONE, PLAIN] => (true, false),
            [KEYED_WITH_PROOF, PLAIN] => (true, true),
            _ => return Err(Unreadable),
        };
        let recipe = recipe(&mut reader)?;
        let digest = reader.array()?;
        let proof = if has_proof { Some(Proof(reader.array()?)) } else { None };
        let method = Method::from_bytes(&reader.part()?).map_err(|_| Unreadable)?;
        let path = reader.text()?;
        let key = reader.text()?;
        reader.finish()?;
        Ok(Self { fingerprint: Fingerprint { recipe, digest }, is_keyed, proof, method, path, key, details })
    }
}

impl Answer {
    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.content.as_ref().map_or(0, |content| content.body.len()) + 1024);
        out.extend_from_slice(&[VERSION, PLAIN]);
        out.extend_from_slice(&self.status.as_u16().to_be_bytes());
        out.push(u8::from(self.reason.is_some()));
        if let Some(reason) = &self.reason {
            put(&mut out, reason);
        }
        put_fields(&mut out, &self.headers);
        out.push(u8::from(self.content.is_some()));
        if let Some(content) = &self.content {
            put_fields(&mut out, &content.trailers);
            out.extend_from_slice(&content.body);
        }
        out.into()
    }

    /// Reads the stored form. The body shares memory with `bytes`.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let mut reader = open(bytes)?;
        let status = StatusCode::from_u16(u16::from_be_bytes(reader.array()?)).map_err(|_| Unreadable)?;
        let reason = if reader.flag()? { Some(reader.part()?) } else { None };
        let headers = fields(&mut reader)?;
        let content = if reader.flag()? {
            let trailers = fields(&mut reader)?;
            Some(Content { trailers, body: reader.rest() })
        } else {
            None
        };
        reader.finish()?;
        let answer = Self { status, reason, headers, content };
        if answer.has_its_length() { Ok(answer) } else { Err(Unreadable) }
    }

    /// Whether a body is as long as `Content-Length` says: on the wire, the rest of it would be taken for the next answer. The length
    /// of an answer to HEAD, and of a 304, is that of a body which does not follow.
    fn has_its_length(&self) -> bool {
        let Some(content) = self.content.as_ref().filter(|content| !content.body.is_empty()) else { return true };
        let mut lengths = self.headers.iter().filter(|(name, _)| *name == CONTENT_LENGTH);
        let is_length =
            |length: &str| length.bytes().all(|byte| byte.is_ascii_digit()) && length.parse() == Ok(content.body.len());
        lengths.all(|(_, length)| length.to_str().is_ok_and(is_length))
    }
}

/// Appends a recipe. Equal recipes, and no others, give equal bytes.
pub(super) fn put_recipe(out: &mut Vec<u8>, recipe: &Recipe) {
    let counts = [recipe.method, recipe.path, recipe.query, recipe.body];
    let counts = counts.into_iter().enumerate().fold(0, |all, (bit, counts)| all | u8::from(counts) << bit);
    let form = match recipe.form {
        BodyForm::Auto => 0,
        BodyForm::Bytes => 1,
        BodyForm::Json => 2,
        BodyForm::None => 3,
    };
    out.extend_from_slice(&[RECIPE_VERSION, counts, form]);
    put_count(out, recipe.headers.len());
    recipe.headers.iter().for_each(|name| put(out, name.as_str().as_bytes()));
    for pointers in [&recipe.include, &recipe.exclude] {
        put_count(out, pointers.len());
        pointers.iter().for_each(|pointer| put(out, pointer.as_str().as_bytes()));
    }
}

fn recipe(reader: &mut Reader<'_>) -> Result<Recipe, Unreadable> {
    if reader.byte()? != RECIPE_VERSION {
        return Err(Unreadable);
    }
    let counts = reader.byte()?;
    if counts > 0b1111 {
        return Err(Unreadable);
    }
    let form = match reader.byte()? {
        0 => BodyForm::Auto,
        1 => BodyForm::Bytes,
        2 => BodyForm::Json,
        3 => BodyForm::None,
        _ => return Err(Unreadable),
    };
    let headers = list(reader, |reader| HeaderName::from_bytes(&reader.part()?).map_err(|_| Unreadable))?;
    let pointer = |reader: &mut Reader<'_>| Pointer::parse(&reader.text()?).map_err(|_| Unreadable);
    let include = list(reader, pointer)?;
    let exclude = list(reader, pointer)?;
    let counts = |bit: u8| counts & bit != 0;
    Ok(Recipe {
        method: counts(1),
        path: counts(2),
        query: counts(4),
        body: counts(8),
        headers,
        form,
        include,
        exclude,
    })
}

fn put_fields(out: &mut Vec<u8>, fields: &[(HeaderName, HeaderValue)]) {
    put_count(out, fields.len());
    for (name, value) in fields {
        put(out, name.as_str().as_bytes());
        put(out, value.as_bytes());
    }
}

fn fields(reader: &mut Reader<'_>) -> Result<Vec<(HeaderName, HeaderValue)>, Unreadable> {
    let fields = list(reader, |reader| {
        let name = HeaderName::from_bytes(&reader.part()?).map_err(|_| Unreadable)?;
        let value = HeaderValue::from_maybe_shared(reader.part()?).map_err(|_| Unreadable)?;
        Ok((name, value))
    })?;
    if fields.len() <= MAX_FIELDS { Ok(fields) } else { Err(Unreadable) }
}

/// Reads a list. Memory grows with the bytes read, not with the claimed length.
fn list<T>(
    reader: &mut Reader<'_>,
    mut item: impl FnMut(&mut Reader<'_>) -> Result<T, Unreadable>,
) -> Result<Vec<T>, Unreadable> {
    let count = reader.count()?;
    let mut items = Vec::new();
    for _ in 0..count {
        items.push(item(reader)?);
    }
    Ok(items)
}

/// Begins to read, past version and envelope.
fn open(bytes: &Bytes) -> Result<Reader<'_>, Unreadable> {
    let mut reader = Reader::new(bytes);
    if reader.array()? == [VERSION, PLAIN] { Ok(reader) } else { Err(Unreadable) }
}

/// Reads a stored form from its beginning. Allocates only for bytes that are present, whatever a length claims.
pub(super) struct Reader<'a> {
    source: &'a Bytes,
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(source: &'a Bytes) -> Self {
        Self { source, at: 0 }
    }

    /// The next `length` bytes, shared with the source.
    pub(super) fn take(&mut self, length: usize) -> Result<Bytes, Unreadable> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.source.len()).ok_or(Unreadable)?;
        let taken = self.source.slice(self.at..end);
        self.at = end;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, Unreadable> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// A byte that is 0 or 1.
    pub(super) fn flag(&mut self) -> Result<bool, Unreadable> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Unreadable),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Unreadable> {
        self.take(N)?.as_ref().try_into().map_err(|_| Unreadable)
    }

    pub(super) fn count(&mut self) -> Result<usize, Unreadable> {
        usize::try_from(u32::from_be_bytes(self.array()?)).map_err(|_| Unreadable)
    }

    pub(super) fn part(&mut self) -> Result<Bytes, Unreadable> {
        let length = self.count()?;
        self.take(length)
    }

    pub(super) fn text(&mut self) -> Result<String, Unreadable> {
        String::from_utf8(self.part()?.into()).map_err(|_| Unreadable)
    }

    /// Whether nothing is left.
    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.source.len()
    }

    /// Everything that is left, shared with the source.
    pub(super) fn rest(&mut self) -> Bytes {
        let rest = self.source.slice(self.at..);
        self.at = self.source.len();
        rest
    }

    /// Ends the reading: nothing may be left.
    pub(super) fn finish(self) -> Result<(), Unreadable> {
        if self.is_at_end() { Ok(()) } else { Err(Unreadable) }
    }
}

#[cfg(test)]
mod tests;
