//! Who a key belongs to.

use std::fmt;
use std::net::IpAddr;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName};

use x509_cert::Certificate;
use x509_cert::der::oid::AssociatedOid as _;
use x509_cert::der::{Decode as _, Encode as _};
use x509_cert::ext::pkix::SubjectAltName;

use super::frame::{put, put_count};

/// One part of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopePart {
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
}

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
}

impl ScopePart {
    /// Reads the configuration's word for a part.
    ///
    /// # Errors
    /// Says what is wrong, for whoever wrote the configuration.
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
            Some(("jwt", _)) => Err(format!("`{text}` is not accepted by this version")),
            None if text == "host" => Ok(Self::Host),
            None if text == "client-ip" => Ok(Self::ClientIp),
            _ => Err(format!(
                "`{text}` is not a part of a scope: use `header:NAME`, `cookie:NAME`, `basic:user`, `host`, \
                 `client-ip`, `client-cert:subject`, `client-cert:san` or `const:TEXT`"
            )),
        }
    }

    /// Appends the part and its value of a caller: the configuration's word, then how many values there are (none is
    /// absent), then each with its length. So an absent part, an empty one, two lines and the same lines joined are
    /// four different things, and no value can pass for another part's.
    pub fn encode(&self, caller: Caller<'_>, out: &mut Vec<u8>) {
        put(out, self.to_string().as_bytes());
        let values = self.values(caller);
        put_count(out, values.len());
        values.iter().for_each(|value| put(out, value));
    }

    /// How many values a caller has for it: none is absent.
    #[must_use]
    pub fn count(&self, caller: Caller<'_>) -> usize {
        self.values(caller).len()
    }

    fn values(&self, caller: Caller<'_>) -> Vec<Vec<u8>> {
        match self {
            Self::Header(name) => caller.headers.get_all(name).iter().map(|line| line.as_bytes().to_vec()).collect(),
            Self::Cookie(name) => cookies(caller.headers, name),
            Self::BasicUser => users(caller.headers),
            Self::Host => {
                caller.authority.map(|authority| authority.to_ascii_lowercase().into_bytes()).into_iter().collect()
            }
            Self::ClientIp => caller.client_ip.map(|ip| ip.to_canonical().to_string().into()).into_iter().collect(),
            Self::ClientCert(CertPart::Subject) => {
                caller.certificate.map(|it| it.subject.clone()).into_iter().collect()
            }
            Self::ClientCert(CertPart::San) => caller.certificate.and_then(|it| it.san.clone()).into_iter().collect(),
            Self::Const(text) => vec![text.clone().into_bytes()],
        }
    }
}

impl fmt::Display for ScopePart {
    /// The configuration's word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::BasicUser => f.write_str("basic:user"),
            Self::Host => f.write_str("host"),
            Self::ClientIp => f.write_str("client-ip"),
            Self::ClientCert(CertPart::Subject) => f.write_str("client-cert:subject"),
            Self::ClientCert(CertPart::San) => f.write_str("client-cert:san"),
            Self::Const(text) => write!(f, "const:{text}"),
        }
    }
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
///
/// Basic credentials that cannot be read stand for themselves, marked: the service behind may read them by laxer
/// rules, and two of its users must not become one.
fn users(headers: &HeaderMap) -> Vec<Vec<u8>> {
    let lines = headers.get_all(AUTHORIZATION).iter().map(|line| line.as_bytes());
    lines
        .filter_map(|line| {
            let scheme = line.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case(b"basic"))?;
            let credentials = &line[scheme.len()..];
            if !matches!(credentials.first(), None | Some(b' ' | b'\t')) {
                return None;
            }
            let credentials = credentials.trim_ascii();
            let (mark, user) = match user(credentials) {
                Some(user) => (b'u', user),
                None => (b'?', credentials.to_vec()),
            };
            Some([&[mark], user.as_slice()].concat())
        })
        .collect()
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
        encoded_for(word, Caller { headers: &headers, authority: None, client_ip: None, certificate: None })
    }

    fn encoded_for(word: &str, caller: Caller<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        ScopePart::parse(word).unwrap().encode(caller, &mut out);
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
        for word in ["header:x-api-key", "cookie:Session", "basic:user", "host", "client-ip", "const:a:b", "const:"] {
            assert_eq!(ScopePart::parse(word).unwrap().to_string(), word);
        }
        for word in ["", "header:", "header:a b", "cookie:", "cookie:a=b", "basic:password", "jwt:sub", "hosts"] {
            assert!(ScopePart::parse(word).is_err(), "{word}");
        }
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
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None };
        let host = |authority| encoded_for("host", Caller { authority: Some(authority), ..caller });
        assert_eq!(host("Example.COM:80"), host("example.com:80"));
        assert_distinct(&[encoded_for("host", caller), host(""), host("example.com"), host("example.com:80")]);

        let ip = |ip: &str| encoded_for("client-ip", Caller { client_ip: Some(ip.parse().unwrap()), ..caller });
        assert_eq!(ip("::ffff:10.0.0.1"), ip("10.0.0.1"));
        assert_distinct(&[encoded_for("client-ip", caller), ip("10.0.0.1"), ip("10.0.0.2"), ip("::1")]);
    }
}
