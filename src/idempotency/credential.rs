//! Tells callers apart without knowing the API.
//!
//! The headers that usually carry credentials give an identity, which is part of a record's id, and mostly a proof.
//! The record keeps the proof as a digest, and a request whose proof differs gets 422 `caller-differs`. The first row
//! that applies decides:
//!
//! | the request carries | identity | proof |
//! |---|---|---|
//! | `X-Api-Key` | its lines | the lines of `Authorization`, also where there are none |
//! | `Authorization: Basic` | the user | the user and the password |
//! | `Authorization: Bearer` with a token in the form of a JWT | its issuer and its subject | the token |
//! | any other `Authorization`, or several lines of it | the lines | - |
//! | none of these | - | the cookies and the subject of a client certificate that the gate verified, also their absence |
//!
//! The last row is one identity: a client that gains or loses a cookie between two tries is refused, and does not run twice.
//!
//! Nothing here is verified: that is the upstream's task. An identity that is forged, and one that is shared by many,
//! costs no more than a refusal, since the proof has to be the same too.
//!
//! A header whose lines are all empty, or hold `Basic` or `Bearer` alone, does not count: clients write such lines when
//! they have no token, and their cookies tell them apart. Whether there is a proof follows from the row, and the row is
//! part of the identity. So two requests with the same identity both have a proof, or neither has.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE};

use super::json;
use super::pointer::Pointer;
use super::record::{put, put_count};
use super::scope::{Caller, basic_user, credentials};

/// The headers that credentials are read from.
pub const HEADERS: [HeaderName; 3] = [X_API_KEY, AUTHORIZATION, COOKIE];

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The longest token that is read as a JWT, in bytes. A longer one is any other `Authorization`.
const LONGEST_TOKEN: usize = 16 * 1024;

/// Which row of the table applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `X-Api-Key`
    ApiKey,
    /// `Authorization: Basic`
    Basic,
    /// `Authorization: Bearer`, with a JWT
    Jwt,
    /// Any other `Authorization`.
    Other,
    /// `Cookie`
    Cookie,
    /// A certificate of the client, and no header.
    Certificate,
    /// Nothing.
    Anonymous,
}

/// The credential of a request. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Which row of the table applies.
    pub kind: Kind,
    /// The identity: values with their count and their lengths.
    identity: Vec<u8>,
    /// What it proves that with, in the same form. Its presence follows from `kind`.
    pub(super) proof: Option<Vec<u8>>,
}

/// The digest of a proof: SHA-256, or HMAC-SHA-256 where ids are made with a secret. It is bound to one record's id.
/// `Debug` does not show it.
#[derive(Clone, Copy)]
pub struct Proof(pub [u8; 32]);

impl Kind {
    /// Every kind, the first that applies first.
    pub const ALL: [Self; 7] =
        [Self::ApiKey, Self::Basic, Self::Jwt, Self::Other, Self::Cookie, Self::Certificate, Self::Anonymous];

    /// The word for it in an identity. A caller that neither names an API key nor an `Authorization` is one identity,
    /// whatever else it shows.
    #[must_use]
    pub fn identity(self) -> &'static str {
        match self {
            Self::Cookie | Self::Certificate => Self::Anonymous.as_str(),
            kind => kind.as_str(),
        }
    }

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ApiKey => "api-key",
            Self::Basic => "basic",
            Self::Jwt => "jwt",
            Self::Other => "authorization",
            Self::Cookie => "cookie",
            Self::Certificate => "certificate",
            Self::Anonymous => "anonymous",
        }
    }
}

impl Credential {
    /// The credential of a caller.
    #[must_use]
    pub fn of(caller: Caller<'_>) -> Self {
        let lines = |name| caller.headers.get_all(name).iter().map(|line| line.as_bytes()).collect::<Vec<_>>();
        let keys = lines(X_API_KEY);
        let authorization = Some(lines(AUTHORIZATION)).filter(|lines| lines.iter().any(|line| says_something(line)));
        if keys.iter().any(|line| says_something(line)) {
            // An application's key may be shared by its users, which `Authorization` then distinguishes. Cookies do not count:
            // a load balancer's change with each answer.
            return Self::new(Kind::ApiKey, &keys, Some(&authorization.unwrap_or_default()));
        }
        if let Some(lines) = authorization {
            return Self::of_authorization(&lines);
        }
        let cookies = cookies(caller);
        let mut proof: Vec<&[u8]> = Vec::new();
        if let Some(cookies) = &cookies {
            proof.extend([&b"cookie"[..], cookies]);
        }
        if let Some(certificate) = caller.certificate {
            proof.push(b"certificate");
            proof.extend(certificate.names());
        }
        let kind = match (&cookies, caller.certificate) {
            (Some(_), _) => Kind::Cookie,
            (None, Some(_)) => Kind::Certificate,
            (None, None) => Kind::Anonymous,
        };
        Self::new(kind, &[], Some(&proof))
    }

    fn of_authorization(lines: &[&[u8]]) -> Self {
        let [line] = lines else { return Self::new(Kind::Other, lines, None) };
        if let Some(credentials) = credentials(line, b"basic") {
            return Self::new(Kind::Basic, &[&basic_user(credentials)], Some(&[credentials]));
        }
        let token = credentials(line, b"bearer");
        match token.and_then(|token| Some((token, Claims::of(token)?))) {
            Some((token, Claims { subject, issuer: Some(issuer) })) => {
                Self::new(Kind::Jwt, &[&subject, &issuer], Some(&[token]))
            }
            Some((token, Claims { subject, issuer: None })) => Self::new(Kind::Jwt, &[&subject], Some(&[token])),
            None => Self::new(Kind::Other, lines, None),
        }
    }

    fn new(kind: Kind, identity: &[&[u8]], proof: Option<&[&[u8]]>) -> Self {
        Self { kind, identity: framed(identity), proof: proof.map(framed) }
    }

    /// Appends the identity: the word of its kind, then its values.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.kind.identity().as_bytes());
        out.extend_from_slice(&self.identity);
    }

    /// Appends what tells a caller from others, whose identities may be the same; nothing where it shows no credential.
    pub(super) fn encode_distinction(&self, out: &mut Vec<u8>) {
        match self.kind {
            Kind::Anonymous => {}
            // All of these are one identity.
            Kind::Cookie | Kind::Certificate => out.extend(self.proof.iter().flatten()),
            Kind::ApiKey | Kind::Basic | Kind::Jwt | Kind::Other => self.encode(out),
        }
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credential").field(&self.kind).finish()
    }
}

impl PartialEq for Proof {
    /// Takes the same time for all that differ, so that a client learns nothing about one by guessing.
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
    }
}

impl Eq for Proof {}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof")
    }
}

/// Values with their count and their lengths.
fn framed(values: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + values.iter().map(|value| 4 + value.len()).sum::<usize>());
    put_count(&mut out, values.len());
    values.iter().for_each(|value| put(&mut out, value));
    out
}

/// Whether a line of a header holds more than the name of a scheme.
fn says_something(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    ![&b""[..], b"basic", b"bearer"].iter().any(|nothing| line.eq_ignore_ascii_case(nothing))
}

/// The cookies of all lines, joined as HTTP/2 joins those that it has split (RFC 9113, section 8.2.3); nothing where there
/// are none.
fn cookies(caller: Caller<'_>) -> Option<Vec<u8>> {
    let lines: Vec<&[u8]> = caller.headers.get_all(COOKIE).iter().map(|line| line.as_bytes()).collect();
    let joined = lines.join(&b"; "[..]);
    let says_something = joined.iter().any(|byte| !matches!(byte, b';' | b' ' | b'\t'));
    says_something.then_some(joined)
}

/// The subject of a JWT (RFC 7519, 4.1).
struct Claims {
    subject: Vec<u8>,
    issuer: Option<Vec<u8>>,
}

impl Claims {
    /// Of a token in the form of a JWT: three parts in base64url (the signature may be empty), of which the second is a
    /// JSON object with a `sub`. It and `iss`, if there is one, are neither an object nor an array. Nothing is verified.
    fn of(token: &[u8]) -> Option<Self> {
        if token.len() > LONGEST_TOKEN {
            return None;
        }
        let mut parts = token.split(|&byte| byte == b'.');
        let [header, payload, signature] = [parts.next()?, parts.next()?, parts.next()?];
        if parts.next().is_some() || header.is_empty() || ![header, signature].into_iter().all(is_base64url) {
            return None;
        }
        let payload = URL_SAFE_NO_PAD.decode(payload).ok()?;
        let subject = claim(&payload, "/sub")??;
        Some(Self { subject, issuer: claim(&payload, "/iss")? })
    }
}

/// A claim that is text, a number or a truth value as it is written, or absent; nothing where it is an object or an array, stands
/// twice, or the payload cannot be read. RFC 7519, 4.1, has text, but issuers write the numbers of their users.
fn claim(payload: &[u8], pointer: &str) -> Option<Option<Vec<u8>>> {
    let Some(written) = json::locate(payload, &Pointer::parse(pointer).ok()?).ok()? else { return Some(None) };
    match written.first()? {
        b'"' => json::string(written).map(Some),
        b'n' => Some(None),
        b'{' | b'[' => None,
        _ => Some(Some(written.to_vec())),
    }
}

fn is_base64url(part: &[u8]) -> bool {
    part.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod properties;
