//! Who a key belongs to.

use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName};
use x509_cert::Certificate;
use x509_cert::der::oid::AssociatedOid as _;
use x509_cert::der::{Decode as _, Encode as _};
use x509_cert::ext::pkix::SubjectAltName;

use super::credential::Credential;
use super::key::title_case;
use super::record::{put, put_count};
use super::token::{ClaimValue, TokenClaims};

/// A scope: its parts in order, and which of them a request may lack.
///
/// Only the parts make a record's id: the same part with and without a `?` gives the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    parts: Vec<ScopePart>,
    /// For each part, whether a request may lack it.
    optional: Vec<bool>,
}

/// A part as the configuration writes it: with a `?` at its end where a request may lack it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeWord {
    /// The part.
    pub part: ScopePart,
    /// Whether a request may lack it: its absence is then a value of its own.
    pub is_optional: bool,
}

/// One part of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopePart {
    /// `credential`: who the request's credential names, see [`super::credential`].
    Credential,
    /// `header:NAME`: every line of it.
    Header(HeaderName),
    /// `cookie:NAME`: every cookie of that name.
    Cookie(String),
    /// `basic:user`: the user of HTTP Basic credentials (RFC 7617).
    BasicUser,
    /// `host`: the request's authority, in lower case.
    Host,
    /// `client-ip`
    ClientIp,
    /// `client-cert:subject` or `client-cert:san`
    ClientCert(CertPart),
    /// `jwt:CLAIM`: a claim of a token that was verified.
    JwtClaim(String),
    /// `const:TEXT`
    Const(String),
}

/// What of a client's certificate says who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertPart {
    /// The name of its subject (RFC 5280, 4.1.2.6).
    Subject,
    /// Its alternative names (RFC 5280, 4.2.1.6).
    San,
}

/// What a client proved who it is with: what an authority signed, byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The subject's name, in DER.
    subject: Vec<u8>,
    /// All alternative names in their order, in DER; nothing where there are none.
    san: Option<Vec<u8>>,
}

impl ClientCertificate {
    /// Of a certificate in DER; nothing where it is none.
    #[must_use]
    pub fn of(der: &[u8]) -> Option<Self> {
        let certificate = Certificate::from_der(der).ok()?.tbs_certificate;
        let subject = certificate.subject.to_der().ok()?;
        let extensions = certificate.extensions.unwrap_or_default();
        let san = extensions.into_iter().find(|extension| extension.extn_id == SubjectAltName::OID);
        Some(Self { subject, san: san.map(|extension| extension.extn_value.into_bytes()) })
    }

    /// Of its [`parts`](Self::parts).
    pub(super) fn of_parts(subject: &[u8], san: Option<&[u8]>) -> Self {
        Self { subject: subject.to_vec(), san: san.map(<[u8]>::to_vec) }
    }

    /// The subject's name and the alternative names, in DER.
    pub(super) fn parts(&self) -> [Option<&[u8]>; 2] {
        [Some(&self.subject), self.san.as_deref()]
    }

    /// With this subject, which need not be DER, and no alternative names.
    #[cfg(test)]
    pub(super) fn named(subject: &[u8]) -> Self {
        Self::of_parts(subject, None)
    }

    /// What it is known by, in DER: the subject's name; where that has no parts (RFC 5280, 4.1.2.6), the alternative names too.
    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> {
        let alternatives = self.san.as_deref().filter(|_| self.subject[..] == EMPTY_NAME);
        [&self.subject[..]].into_iter().chain(alternatives)
    }
}

/// A name without parts, in DER.
const EMPTY_NAME: [u8; 2] = [0x30, 0];

/// What a scope may be made of.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The request's headers, as received.
    pub headers: &'a HeaderMap,
    /// The request's authority: of an absolute-form target, else of `Host`.
    pub authority: Option<&'a str>,
    /// The address of the client.
    pub client_ip: Option<IpAddr>,
    /// What it proved who it is with.
    pub certificate: Option<&'a ClientCertificate>,
    /// The claims of its token, once that was verified.
    pub claims: Option<&'a TokenClaims>,
}

impl Scope {
    /// The parts that a request must have and this one lacks.
    pub fn missing(&self, caller: Caller<'_>) -> impl Iterator<Item = &ScopePart> {
        let required = self.parts.iter().zip(&self.optional).filter(|(_, is_optional)| !**is_optional);
        required.map(|(part, _)| part).filter(move |part| !part.is_in(caller))
    }

    /// The first part whose value cannot count: a claim that is an object or an array, of which two may be the same and be
    /// written differently.
    #[must_use]
    pub fn unfit(&self, caller: Caller<'_>) -> Option<&ScopePart> {
        self.parts.iter().find(|part| match part {
            ScopePart::JwtClaim(name) => {
                caller.claims.is_some_and(|claims| claims.get(name) == Some(&ClaimValue::Nested))
            }
            _ => false,
        })
    }

    /// What tells a caller from others at its address, as far as the scope says; `None` where it says nothing, or the caller
    /// has none of it.
    #[must_use]
    pub fn distinction(&self, caller: Caller<'_>) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        for part in &self.parts {
            match part {
                ScopePart::Host | ScopePart::ClientIp | ScopePart::Const(_) => {}
                ScopePart::Credential => Credential::of(caller).encode_distinction(&mut out),
                ScopePart::Header(_)
                | ScopePart::Cookie(_)
                | ScopePart::BasicUser
                | ScopePart::ClientCert(_)
                | ScopePart::JwtClaim(_) => {
                    if part.count(caller) > 0 {
                        // Only a credential has a proof.
                        let _ = part.encode(caller, &mut out);
                    }
                }
            }
        }
        (!out.is_empty()).then_some(out)
    }

    /// Whether it has a claim of a token, which is to be verified before the scope means anything.
    #[must_use]
    pub fn has_jwt_claims(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, ScopePart::JwtClaim(_)))
    }

    /// Whether it has a part of a client's certificate.
    #[must_use]
    pub fn has_certificate(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, ScopePart::ClientCert(_)))
    }

    /// The parts as the configuration writes them.
    pub fn words(&self) -> impl Iterator<Item = ScopeWord> {
        let parts = self.parts.iter().cloned().zip(&self.optional);
        parts.map(|(part, &is_optional)| ScopeWord { part, is_optional })
    }
}

impl Deref for Scope {
    type Target = [ScopePart];

    fn deref(&self) -> &[ScopePart] {
        &self.parts
    }
}

impl FromIterator<ScopeWord> for Scope {
    fn from_iter<T: IntoIterator<Item = ScopeWord>>(words: T) -> Self {
        let (parts, optional) = words.into_iter().map(|word| (word.part, word.is_optional)).unzip();
        Self { parts, optional }
    }
}

impl From<Vec<ScopePart>> for Scope {
    /// Every part must be there.
    fn from(parts: Vec<ScopePart>) -> Self {
        Self { optional: vec![false; parts.len()], parts }
    }
}

impl ScopeWord {
    /// Reads the configuration's word for a part, with or without a `?`.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (word, is_optional) = match text.strip_suffix('?') {
            // A constant is any text.
            Some(word) if !text.starts_with("const:") => (word, true),
            _ => (text, false),
        };
        let part = ScopePart::parse(word)?;
        if is_optional && part.is_always_there() {
            return Err(format!("`{text}`: the `?` has no effect, every request has a value here: use `{word}`"));
        }
        Ok(Self { part, is_optional })
    }
}

impl fmt::Display for ScopeWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.part, if self.is_optional { "?" } else { "" })
    }
}

impl ScopePart {
    /// Reads the configuration's word for a part, without a `?`.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("header", name)) => match HeaderName::from_bytes(name.as_bytes()) {
                Ok(name) => Ok(Self::Header(name)),
                Err(_) => Err(format!("`{name}` is not a header name")),
            },
            // A cookie's name is a token (RFC 6265, section 4.1.1), as a header's is.
            Some(("cookie", name)) => match HeaderName::from_bytes(name.as_bytes()) {
                Ok(_) => Ok(Self::Cookie(name.to_owned())),
                Err(_) => Err(format!("`{name}` is not a cookie name")),
            },
            Some(("basic", "user")) => Ok(Self::BasicUser),
            Some(("const", constant)) => Ok(Self::Const(constant.to_owned())),
            Some(("client-cert", "subject")) => Ok(Self::ClientCert(CertPart::Subject)),
            Some(("client-cert", "san")) => Ok(Self::ClientCert(CertPart::San)),
            Some(("client-cert", part)) => {
                Err(format!("`{part}` is not a part of a certificate: use `subject` or `san`"))
            }
            Some(("jwt", claim)) if is_claim(claim) => Ok(Self::JwtClaim(claim.to_owned())),
            Some(("jwt", claim)) => Err(format!("`{claim}` is not the name of a claim: use one such as `jwt:sub`")),
            None if text == "credential" => Ok(Self::Credential),
            None if text == "host" => Ok(Self::Host),
            None if text == "client-ip" => Ok(Self::ClientIp),
            _ if ["jwt", "claim", "token"].iter().any(|word| text.starts_with(word)) => Err(format!(
                "`{text}` is not a part of a scope: use `jwt:CLAIM`, such as `jwt:sub`, for a claim of a verified token"
            )),
            _ => Err(format!(
                "`{text}` is not a part of a scope: use `credential`, `header:NAME`, `cookie:NAME`, `basic:user`, \
                 `host`, `client-ip`, `client-cert:subject`, `client-cert:san`, `jwt:CLAIM` or `const:TEXT`"
            )),
        }
    }

    /// Appends the part and its value of a caller: the configuration's word, then how many values there are (none is
    /// absent), then each with its length. So an absent part, an empty one, two lines and the same lines joined are
    /// four different things, and no value can pass for another part's.
    ///
    /// Returns what the caller proves the value with, where the part asks for a proof.
    pub fn encode(&self, caller: Caller<'_>, out: &mut Vec<u8>) -> Option<Vec<u8>> {
        put(out, self.to_string().as_bytes());
        if *self == Self::Credential {
            let credential = Credential::of(caller);
            credential.encode(out);
            return credential.proof;
        }
        let values = self.values(caller);
        put_count(out, values.len());
        values.iter().for_each(|value| put(out, value));
        None
    }

    /// How many values a caller has for it: none is absent.
    #[must_use]
    pub fn count(&self, caller: Caller<'_>) -> usize {
        self.values(caller).len()
    }

    /// Whether every request has a value for it. (A request without a host, which HTTP/1.0 allows, has that as its value.)
    #[must_use]
    pub fn is_always_there(&self) -> bool {
        match self {
            Self::Credential | Self::Host | Self::ClientIp | Self::Const(_) => true,
            Self::Header(_) | Self::Cookie(_) | Self::BasicUser | Self::ClientCert(_) | Self::JwtClaim(_) => false,
        }
    }

    /// Whether a caller has it, as a scope that requires it asks.
    fn is_in(&self, caller: Caller<'_>) -> bool {
        let values = self.values(caller);
        match self {
            // Credentials in which no user can be read have a value of their own, and no user.
            Self::BasicUser => values.iter().any(|user| user.starts_with(&[READABLE])),
            _ => self.is_always_there() || !values.is_empty(),
        }
    }

    fn values(&self, caller: Caller<'_>) -> Vec<Vec<u8>> {
        match self {
            // Encoded as identity and proof elsewhere.
            Self::Credential => Vec::new(),
            Self::Header(name) => caller.headers.get_all(name).iter().map(|line| line.as_bytes().to_vec()).collect(),
            Self::Cookie(name) => cookies(caller.headers, name),
            Self::BasicUser => users(caller.headers),
            Self::Host => {
                caller.authority.map(|authority| authority.to_ascii_lowercase().into_bytes()).into_iter().collect()
            }
            Self::ClientIp => caller.client_ip.map(|ip| ip.to_canonical().to_string().into()).into_iter().collect(),
            Self::ClientCert(CertPart::Subject) => {
                // A name without parts, as certificates have that are known by their alternative names (RFC 5280, 4.1.2.6), is none.
                let named = caller.certificate.map(|it| it.subject.clone()).filter(|name| name[..] != EMPTY_NAME);
                named.into_iter().collect()
            }
            Self::ClientCert(CertPart::San) => caller.certificate.and_then(|it| it.san.clone()).into_iter().collect(),
            Self::JwtClaim(name) => match caller.claims.and_then(|claims| claims.get(name)) {
                Some(ClaimValue::Scalar(marked)) => vec![marked.to_vec()],
                // A request with a nested one is refused: see `Scope::unfit`.
                Some(ClaimValue::Nested) | None => Vec::new(),
            },
            Self::Const(text) => vec![text.clone().into_bytes()],
        }
    }
}

impl ScopePart {
    /// Names it in words of HTTP, for people who send requests.
    #[must_use]
    pub fn in_http(&self) -> String {
        match self {
            Self::Credential => "a credential".to_owned(),
            Self::Header(name) => format!("the header {}", title_case(name)),
            Self::Cookie(name) => format!("the cookie `{name}`"),
            Self::BasicUser => "the user of HTTP Basic credentials".to_owned(),
            Self::Host => "the header Host".to_owned(),
            Self::ClientIp => "the address of the client".to_owned(),
            Self::ClientCert(CertPart::Subject) => "a client certificate".to_owned(),
            Self::ClientCert(CertPart::San) => "a client certificate with a subject alternative name".to_owned(),
            Self::JwtClaim(name) => format!("a bearer token with the claim `{name}`"),
            Self::Const(text) => format!("the constant `{text}`"),
        }
    }
}

impl fmt::Display for ScopePart {
    /// The configuration's word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Credential => f.write_str("credential"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::BasicUser => f.write_str("basic:user"),
            Self::Host => f.write_str("host"),
            Self::ClientIp => f.write_str("client-ip"),
            Self::ClientCert(CertPart::Subject) => f.write_str("client-cert:subject"),
            Self::ClientCert(CertPart::San) => f.write_str("client-cert:san"),
            Self::JwtClaim(name) => write!(f, "jwt:{name}"),
            Self::Const(text) => write!(f, "const:{text}"),
        }
    }
}

/// Whether a claim can be named so. A `?` at the end means that a request may lack it.
fn is_claim(name: &str) -> bool {
    !name.is_empty() && !name.contains('?') && !name.contains(|char: char| char.is_whitespace() || char.is_control())
}

/// The values of every cookie of that name, in order (RFC 6265, section 5.4), as they are written.
fn cookies(headers: &HeaderMap, name: &str) -> Vec<Vec<u8>> {
    let pairs = headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|&byte| byte == b';'));
    pairs
        .filter_map(|pair| {
            let equals = pair.iter().position(|&byte| byte == b'=')?;
            let (this, value) = (&pair[..equals], &pair[equals + 1..]);
            (this.trim_ascii() == name.as_bytes()).then(|| value.trim_ascii().to_vec())
        })
        .collect()
}

/// The users of every line of Basic credentials (RFC 7617). A line of another scheme has none.
fn users(headers: &HeaderMap) -> Vec<Vec<u8>> {
    let lines = headers.get_all(AUTHORIZATION).iter().map(|line| line.as_bytes());
    lines.filter_map(|line| credentials(line, b"basic")).map(basic_user).collect()
}

/// What stands behind the scheme in a line of `Authorization`; nothing if the scheme is another.
pub(super) fn credentials<'a>(line: &'a [u8], scheme: &[u8]) -> Option<&'a [u8]> {
    let (this, rest) = line.split_at_checked(scheme.len())?;
    let is_word = matches!(rest.first(), None | Some(b' ' | b'\t'));
    (is_word && this.eq_ignore_ascii_case(scheme)).then(|| rest.trim_ascii())
}

/// How the user of Basic credentials begins that can be read.
const READABLE: u8 = b'u';

/// The user of Basic credentials, marked.
///
/// Credentials that cannot be read stand for themselves: the service behind may read them by laxer rules, and two of
/// its users must not become one. A scope that requires a user refuses them.
pub(super) fn basic_user(credentials: &[u8]) -> Vec<u8> {
    let (mark, user) = match user(credentials) {
        Some(user) => (READABLE, user),
        None => (b'?', credentials.to_vec()),
    };
    [&[mark], user.as_slice()].concat()
}

/// The user of Basic credentials, with or without padding: what stands before the first colon.
fn user(credentials: &[u8]) -> Option<Vec<u8>> {
    const LAX: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let mut user = GeneralPurpose::new(&alphabet::STANDARD, LAX).decode(credentials).ok()?;
    let colon = user.iter().position(|&byte| byte == b':')?;
    user.truncate(colon);
    Some(user)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn encoded(word: &str, lines: &[(&'static str, &'static str)]) -> Vec<u8> {
        let headers = lines
            .iter()
            .map(|&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        encoded_for(
            word,
            Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None },
        )
    }

    fn encoded_for(word: &str, caller: Caller<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        assert_eq!(
            ScopePart::parse(word).unwrap().encode(caller, &mut out),
            None,
            "only `credential` asks for a proof"
        );
        out
    }

    /// Asserts that no two are equal.
    fn assert_distinct(encodings: &[Vec<u8>]) {
        for (at, one) in encodings.iter().enumerate() {
            assert!(!encodings[at + 1..].contains(one), "number {at} stands again");
        }
    }

    #[test]
    fn words_survive() {
        let always_there = ["credential", "host", "client-ip", "const:a:b", "const:", "const:a?", "const:?"];
        for word in always_there {
            assert_eq!(ScopeWord::parse(word).unwrap().to_string(), word);
        }
        for word in [
            "header:x-api-key",
            "cookie:Session",
            "basic:user",
            "client-cert:subject",
            "client-cert:san",
            "jwt:sub",
            "jwt:https://a.example/t",
        ] {
            let required = ScopeWord::parse(word).unwrap();
            let optional = ScopeWord::parse(&format!("{word}?")).unwrap();
            assert_eq!([required.to_string(), optional.to_string()], [word.to_owned(), format!("{word}?")]);
            assert_eq!((required.part, !required.is_optional), (optional.part, optional.is_optional));
        }
        for word in ["", "?", "header:", "header:a b", "header:?", "header:a??", "cookie:", "cookie:a=b", "cookie:?"] {
            assert!(ScopeWord::parse(word).is_err(), "{word}");
        }
        for word in [
            "basic:password",
            "basic:?",
            "client-cert:?",
            "jwt:",
            "jwt:?",
            "jwt:a b",
            "jwt:sub??",
            "hosts",
            "Credential",
        ] {
            assert!(ScopeWord::parse(word).is_err(), "{word}");
        }
        for word in ["credential?", "host?", "client-ip?"] {
            let error = ScopeWord::parse(word).unwrap_err();
            assert!(error.ends_with(&format!(": use `{}`", word.trim_end_matches('?'))), "{error}");
        }
    }

    /// What tells the caller from others at its address.
    fn distinction(scope: &[&str], lines: &[(&'static str, &'static str)]) -> Option<Vec<u8>> {
        let headers: HeaderMap = lines
            .iter()
            .map(|&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let caller = Caller {
            headers: &headers,
            authority: Some("shop.example"),
            client_ip: Some([192, 0, 2, 1].into()),
            certificate: None,
            claims: None,
        };
        let scope: Scope = scope.iter().map(|word| ScopeWord::parse(word).unwrap()).collect();
        scope.distinction(caller)
    }

    #[test]
    fn a_caller_is_told_from_others_at_its_address_by_what_it_shows() {
        assert_eq!(distinction(&["host", "client-ip", "const:a"], &[("authorization", "Bearer a")]), None);
        assert_eq!(distinction(&["host", "credential", "header:a?", "cookie:s?", "basic:user?"], &[]), None);
        let by_default = |lines: &[_]| distinction(&["host", "credential"], lines);
        assert_distinct(
            &[
                by_default(&[("authorization", "Bearer a")]),
                by_default(&[("authorization", "Bearer b")]),
                by_default(&[("x-api-key", "a")]),
                // One identity, and two callers.
                by_default(&[("cookie", "s=1")]),
                by_default(&[("cookie", "s=2")]),
                distinction(&["header:a"], &[("a", "1")]),
                distinction(&["header:a"], &[("a", "2")]),
            ]
            .map(Option::unwrap),
        );
        let password = |credentials| by_default(&[("authorization", credentials)]);
        assert_eq!(password("Basic YW5uOm9uZQ=="), password("Basic YW5uOnR3bw=="), "ann's, with any password");
    }

    /// The parts of a scope that a request with these lines lacks.
    fn missing(scope: &[&str], lines: &[(&'static str, &'static str)]) -> Vec<String> {
        let headers: HeaderMap = lines
            .iter()
            .map(|&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
        let scope: Scope = scope.iter().map(|word| ScopeWord::parse(word).unwrap()).collect();
        scope.missing(caller).map(ToString::to_string).collect()
    }

    #[test]
    fn only_what_must_be_there_is_missing() {
        let all = ["credential", "host", "client-ip", "const:", "header:a", "cookie:s", "basic:user"];
        assert_eq!(missing(&all, &[]), ["header:a", "cookie:s", "basic:user"]);
        let there = |credentials| [("a", ""), ("cookie", "s="), ("authorization", credentials)];
        assert_eq!(missing(&all, &there("Basic OnR3bw==")), [""; 0], "an empty value is present");
        for no_user in ["Basic", "Basic !!!", "Basic YW5u"] {
            assert_eq!(missing(&all, &there(no_user)), ["basic:user"], "{no_user}");
        }
        assert_eq!(missing(&all, &[("a", "1"), ("cookie", "S=1"), ("authorization", "Bearer")]).len(), 2);
        assert_eq!(missing(&["client-cert:subject", "client-cert:san?"], &[]), ["client-cert:subject"]);
        assert_eq!(missing(&["header:a?", "cookie:s?", "basic:user?"], &[]), [""; 0]);
    }

    #[test]
    fn a_certificate_without_a_name_has_no_subject() {
        let scope: Scope = [ScopeWord::parse("client-cert:subject").unwrap()].into_iter().collect();
        let missing = |subject: &[u8]| {
            let (headers, certificate) = (HeaderMap::new(), ClientCertificate::named(subject));
            let certificate = Some(&certificate);
            let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate, claims: None };
            scope.missing(caller).count()
        };
        assert_eq!((missing(&EMPTY_NAME), missing(b"0\x0c1\x0a")), (1, 0));
    }

    #[test]
    fn absent_empty_repeated_and_joined_are_different() {
        assert_distinct(&[
            encoded("header:a", &[]),
            encoded("header:a", &[("a", "")]),
            encoded("header:a", &[("a", "x")]),
            encoded("header:a", &[("a", "X")]),
            encoded("header:a", &[("a", "x"), ("a", "y")]),
            encoded("header:a", &[("a", "y"), ("a", "x")]),
            encoded("header:a", &[("a", "xy")]),
            encoded("header:a", &[("a", "x,y")]),
            encoded("header:a", &[("a", "x, y")]),
            encoded("header:a", &[("a", ""), ("a", "")]),
            encoded("header:b", &[("b", "x")]),
            encoded("cookie:a", &[]),
            encoded("const:x", &[]),
            encoded("host", &[]),
        ]);
    }

    #[test]
    fn cookies_are_told_by_name() {
        let session = encoded("cookie:s", &[("cookie", "s=1")]);
        assert_eq!(encoded("cookie:s", &[("cookie", "a=b; s=1 ;ss=2")]), session);
        assert_eq!(encoded("cookie:s", &[("cookie", "a=b"), ("cookie", "s=1")]), session);
        assert_distinct(&[
            session,
            encoded("cookie:s", &[("cookie", "a=b; S=1; s")]),
            encoded("cookie:s", &[("cookie", "s=")]),
            encoded("cookie:s", &[("cookie", "s=1; s=2")]),
            encoded("cookie:s", &[("cookie", "s=\"1\"")]),
        ]);
    }

    #[test]
    fn a_basic_user_is_one_whatever_the_password() {
        let user = |credentials| encoded("basic:user", &[("authorization", credentials)]);
        let ann = user("Basic YW5uOm9uZQ=="); // ann:one
        assert_eq!(user("basic  YW5uOnR3bw=="), ann); // ann:two
        assert_eq!(user("BASIC YW5uOm9uZQ"), ann); // unpadded
        assert_eq!(user("Basic YW5uOmE6Yg=="), ann); // ann:a:b
        assert_eq!(user("Bearer YW5uOm9uZQ=="), encoded("basic:user", &[]));
        assert_distinct(&[
            ann,
            encoded("basic:user", &[]),
            user("Basic OnR3bw=="), // no name
            user("Basic YW5u"),     // no colon
            user("Basic Ym9i"),     // another without colon
            user("Basic !"),
            user("Basic"),
            user("Basic YW5uZTpvbmU="), // anne:one
            encoded("basic:user", &[("authorization", "Basic YW5uOm9uZQ=="), ("authorization", "Basic YW5uOm9uZQ==")]),
        ]);
    }

    #[test]
    fn hosts_have_no_case_and_addresses_one_form() {
        let headers = HeaderMap::new();
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
        let host = |authority| encoded_for("host", Caller { authority: Some(authority), ..caller });
        assert_eq!(host("Example.COM:80"), host("example.com:80"));
        assert_distinct(&[encoded_for("host", caller), host(""), host("example.com"), host("example.com:80")]);

        let ip = |ip: &str| encoded_for("client-ip", Caller { client_ip: Some(ip.parse().unwrap()), ..caller });
        assert_eq!(ip("::ffff:10.0.0.1"), ip("10.0.0.1"));
        assert_distinct(&[encoded_for("client-ip", caller), ip("10.0.0.1"), ip("10.0.0.2"), ip("::1")]);
    }
}
