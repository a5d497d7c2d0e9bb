//! Who may use the admin listener: holders of its token, and no web page.
//!
//! A page in an operator's browser can reach a listener on that machine: by a form or a script (cross-site request
//! forgery), or by a name of its own that it points at the loopback address (DNS rebinding).

use std::net::{Ipv4Addr, Ipv6Addr};

use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use http::{HeaderMap, HeaderName, Method};
use sha2::{Digest, Sha256};

use super::Token;
use super::answer::{Kind, Problem};
use crate::http::headers::is_host;

/// The digest of a token: compared instead of it, so that neither length nor content shows in the time taken.
pub(super) struct TokenDigest([u8; 32]);

impl TokenDigest {
    pub(super) fn of(token: &Token) -> Self {
        Self(Sha256::digest(token.0.trim()).into())
    }

    /// Whether these headers show the token.
    pub(super) fn is_shown_in(&self, headers: &HeaderMap) -> bool {
        only(headers, &AUTHORIZATION).and_then(bearer).is_some_and(|presented| self.is_of(presented))
    }

    fn is_of(&self, presented: &str) -> bool {
        let digest: [u8; 32] = Sha256::digest(presented).into();
        let difference = self.0.iter().zip(digest).fold(0, |difference, (a, b)| difference | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

/// Refuses what a web page may have sent, and, where a token is set, what does not carry it.
pub(super) fn check(token: Option<&TokenDigest>, method: &Method, headers: &HeaderMap) -> Result<(), Problem> {
    let host = only(headers, &HOST);
    if headers.contains_key(ORIGIN) {
        let origin = only(headers, &ORIGIN).and_then(|origin| origin.split_once("://")).map(|(_, authority)| authority);
        if origin.is_none_or(|origin| !host.is_some_and(|host| host.eq_ignore_ascii_case(origin))) {
            return Err(Kind::Forbidden.because("the request comes from a web page of another origin"));
        }
    }
    match token {
        Some(token) => match only(headers, &AUTHORIZATION).and_then(bearer) {
            Some(presented) if token.is_of(presented) => {}
            Some(_) => return Err(Kind::Unauthorized.because("the token is not the one of `admin.token_file`")),
            None => return Err(Kind::Unauthorized.because("send `Authorization: Bearer TOKEN`")),
        },
        // A token cannot be guessed by a page; without one, only the name that the page was loaded from gives it away.
        None if !host.is_some_and(is_address) => {
            return Err(Kind::Forbidden.because(
                "without a token, `Host` must be an IP address or `localhost`; to use names, set `admin.token_file`",
            ));
        }
        None => {}
    }
    // Types that a page can send without asking first are refused.
    if method == Method::POST && !only(headers, &CONTENT_TYPE).is_some_and(is_json) {
        return Err(Kind::UnsupportedMediaType.because("send `Content-Type: application/json`"));
    }
    Ok(())
}

/// The value of a header that stands there exactly once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { value.to_str().ok() }
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn is_json(content_type: &str) -> bool {
    content_type.split(';').next().is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/json"))
}

/// Whether `Host` is an address or `localhost`, with or without a port: not a name that others may point anywhere.
fn is_address(host: &str) -> bool {
    if !is_host(host) {
        return false;
    }
    if let Some((address, _port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let name = host.split_once(':').map_or(host, |(name, _port)| name);
    name.eq_ignore_ascii_case("localhost") || name.parse::<Ipv4Addr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;

    fn status(token: Option<&str>, method: &Method, headers: &[(&str, &str)]) -> StatusCode {
        let token = token.map(|token| TokenDigest::of(&Token(token.into())));
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        match check(token.as_ref(), method, &map) {
            Ok(()) => StatusCode::OK,
            Err(problem) => super::super::answer::Answer::from(problem).status(),
        }
    }

    #[test]
    fn hosts() {
        for host in ["127.0.0.1:9090", "localhost", "LOCALHOST:1", "[::1]:9090", "[::1]", "10.1.2.3"] {
            assert_eq!(status(None, &Method::GET, &[("host", host)]), StatusCode::OK, "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example:9090", "localhost.evil.example", "[::1].evil", "", "[a]"] {
            assert_eq!(status(None, &Method::GET, &[("host", host)]), StatusCode::FORBIDDEN, "{host}");
        }
        // What a lax reader takes for an address, and another for the name behind it.
        for host in [
            "127.0.0.1:80@evil.example",
            "127.0.0.1@evil.example",
            "localhost:9090@evil.example:80",
            "[::1]:80@evil.example",
            "[::1]@evil.example",
            "@127.0.0.1",
            "user@127.0.0.1:9090",
            "127.0.0.1:evil.example",
            "127.0.0.1:80:evil.example",
            "127.0.0.1:80/evil.example",
            "127.0.0.1/evil.example",
            "127.0.0.1#.evil.example",
            "127.0.0.1?.evil.example",
            "127.0.0.1\\.evil.example",
            "127.0.0.1, evil.example",
            "127.0.0.1 evil.example",
            "127.0.0.1%00.evil.example",
            "127.0.0.1:99999",
            "127.0.0.1:+80",
            "127.0.0.1.",
            "0x7f.1",
            "127.1",
            "2130706433",
            "[::1",
            "[::1]]",
            "[::1%25lo]",
            "::1",
            ":9090",
        ] {
            assert_eq!(status(None, &Method::GET, &[("host", host)]), StatusCode::FORBIDDEN, "{host}");
        }
        for host in ["127.0.0.1:", "127.0.0.1:0", "[::ffff:127.0.0.1]:9090"] {
            assert_eq!(status(None, &Method::GET, &[("host", host)]), StatusCode::OK, "{host}");
        }
        assert_eq!(status(None, &Method::GET, &[]), StatusCode::FORBIDDEN);
        assert_eq!(status(None, &Method::GET, &[("host", "localhost"), ("host", "::1")]), StatusCode::FORBIDDEN);
        let named = [("host", "oncegate.internal"), ("authorization", "bearer s3cret")];
        assert_eq!(status(Some("s3cret"), &Method::GET, &named), StatusCode::OK);
    }

    #[test]
    fn origins() {
        let from = |origin| [("host", "127.0.0.1:9090"), ("origin", origin)];
        assert_eq!(status(None, &Method::GET, &from("http://127.0.0.1:9090")), StatusCode::OK);
        for origin in ["http://127.0.0.1:3000", "http://evil.example", "null", "127.0.0.1:9090", ""] {
            assert_eq!(status(None, &Method::GET, &from(origin)), StatusCode::FORBIDDEN, "{origin}");
        }
    }

    #[test]
    fn tokens() {
        let with = |value| [("host", "localhost"), ("authorization", value)];
        assert_eq!(status(Some("s3cret\n"), &Method::GET, &with("Bearer s3cret")), StatusCode::OK);
        for value in ["Bearer s3cre", "Bearer s3crets", "Bearer ", "Basic s3cret", "s3cret", ""] {
            assert_eq!(status(Some("s3cret"), &Method::GET, &with(value)), StatusCode::UNAUTHORIZED, "{value}");
        }
        assert_eq!(status(Some("s3cret"), &Method::GET, &[("host", "localhost")]), StatusCode::UNAUTHORIZED);
        assert_eq!(status(Some(""), &Method::GET, &with("Bearer ")), StatusCode::UNAUTHORIZED);
    }

    #[test]
    fn a_form_cannot_post() {
        let typed = |content_type| [("host", "localhost"), ("content-type", content_type)];
        assert_eq!(status(None, &Method::POST, &typed("application/json; charset=utf-8")), StatusCode::OK);
        for content_type in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""] {
            let got = status(None, &Method::POST, &typed(content_type));
            assert_eq!(got, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{content_type}");
        }
        assert_eq!(status(None, &Method::POST, &[("host", "localhost")]), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
}
