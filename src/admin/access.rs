//! Who may use the admin listener: holders of its tokens, and no web page.
//!
//! A page in an operator's browser can reach a listener on that machine: by a form or a script (cross-site request
//! forgery), or by a name of its own that it points at the loopback address (DNS rebinding).

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use http::{HeaderMap, HeaderName};
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::answer::{Kind, Problem};
use super::throttle::Throttle;
use super::tokens::{Role, Tokens};
use crate::http::headers::is_host;
use crate::telemetry::admin_refusal::AdminRefusal;

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Principal {
    pub(super) client: SocketAddr,
    pub(super) role: Role,
    /// Of the token that was shown; nothing where none is demanded.
    token: Option<Arc<str>>,
}

/// Why a request is refused, for the metric and for the client.
#[derive(Debug)]
pub(super) struct Refused(pub(super) AdminRefusal, pub(super) Problem);

impl Principal {
    /// Who asks for what needs no token.
    pub(super) fn anybody(client: SocketAddr) -> Self {
        Self { client, role: Role::Viewer, token: None }
    }

    /// The name for the log of changes.
    pub(super) fn name(&self) -> &str {
        self.token.as_deref().unwrap_or("-")
    }

    /// Whether a token was shown.
    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Refuses those who have too small a role for `what`.
    pub(super) fn must_be(&self, role: Role, what: &str) -> Result<(), Refused> {
        if self.role >= role {
            return Ok(());
        }
        let (own, needed) = (self.role.as_str(), role.as_str());
        let detail = format!("{what} needs the role `{needed}`; the token `{}` has the role `{own}`", self.name());
        let members = [("role", own), ("required_role", needed)].map(|(name, role)| (name.to_owned(), role.into()));
        let problem = Kind::Forbidden.because(detail).with(Map::<String, Value>::from_iter(members));
        Err(Refused(AdminRefusal::Role, problem))
    }
}

/// Says who asks. Refuses what a web page may have sent, and, where there are tokens, what carries none of them. Where
/// `takes_body`, an endpoint takes the request by POST, and the type of its body counts.
pub(super) fn check(
    tokens: &Tokens,
    throttle: &Throttle,
    client: SocketAddr,
    takes_body: bool,
    headers: &HeaderMap,
) -> Result<Principal, Refused> {
    let from_a_page = |kind: Kind, why: &str| Err(Refused(AdminRefusal::WebPage, kind.because(why)));
    let host = only(headers, &HOST);
    if headers.contains_key(ORIGIN) {
        let origin = only(headers, &ORIGIN).and_then(|origin| origin.split_once("://")).map(|(_, authority)| authority);
        if origin.is_none_or(|origin| !host.is_some_and(|host| host.eq_ignore_ascii_case(origin))) {
            return from_a_page(Kind::Forbidden, "the request comes from a web page of another origin");
        }
    }
    let asker = if tokens.are_demanded() {
        holder(tokens, throttle, client, headers)?
    } else if host.is_some_and(is_address) {
        Principal { client, role: Role::Operator, token: None }
    } else {
        // A token cannot be guessed by a page; without one, only the name that the page was loaded from gives it away.
        let why = "without a token, `Host` must be an IP address or `localhost`; to use names, set `admin.tokens`";
        return from_a_page(Kind::Forbidden, why);
    };
    // Types that a page can send without asking first are refused.
    if takes_body && !only(headers, &CONTENT_TYPE).is_some_and(is_json) {
        return from_a_page(Kind::UnsupportedMediaType, "send `Content-Type: application/json`");
    }
    Ok(asker)
}

/// Who shows one of the tokens.
fn holder(tokens: &Tokens, throttle: &Throttle, client: SocketAddr, headers: &HeaderMap) -> Result<Principal, Refused> {
    let Some(presented) = only(headers, &AUTHORIZATION).and_then(bearer) else {
        let problem = Kind::Unauthorized.because("send `Authorization: Bearer TOKEN`");
        return Err(Refused(AdminRefusal::NoToken, problem));
    };
    let (now, known) = (Instant::now(), tokens.find(presented));
    let wait = throttle.wait(client.ip(), now);
    if let Some(known) = known.filter(|known| wait.is_none() || !known.is_guessable) {
        return Ok(Principal { client, role: known.role, token: Some(Arc::clone(&known.name)) });
    }
    if let Some(wait) = wait {
        let seconds = wait.as_millis().div_ceil(1000);
        let detail = format!("too many wrong tokens came from this address; send the next one in {seconds} s");
        let kind = Kind::Throttled(u64::try_from(seconds).unwrap_or(u64::MAX));
        return Err(Refused(AdminRefusal::Throttled, kind.because(detail)));
    }
    if throttle.count(client.ip(), now) {
        tracing::warn!(%client, "an address sent too many wrong tokens to the admin listener: it is throttled");
    }
    let problem = Kind::Unauthorized.because("the token is none of `admin.tokens` and `admin.token_file`");
    Err(Refused(AdminRefusal::WrongToken, problem))
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
    use http::StatusCode;

    use super::super::answer::Answer;
    use super::super::tokens::{Secret, Token};
    use http::Method;

    use super::*;

    fn client(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 5000)
    }

    fn tokens(secrets: &[&str]) -> Tokens {
        let token =
            |secret: &&str| Token { name: "ops".into(), role: Role::Operator, secret: Secret((*secret).to_owned()) };
        Tokens::of(&secrets.iter().map(token).collect::<Vec<_>>())
    }

    fn headers(headers: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        map
    }

    fn status(token: Option<&str>, method: &Method, sent: &[(&str, &str)]) -> StatusCode {
        let tokens = tokens(token.as_slice());
        match check(&tokens, &Throttle::default(), client("192.0.2.1"), method == Method::POST, &headers(sent)) {
            Ok(_) => StatusCode::OK,
            Err(Refused(_, problem)) => Answer::from(problem).status(),
        }
    }

    /// What each request with such a token from one address comes to.
    fn presented(tokens: &Tokens, throttle: &Throttle, ip: &str, token: &str) -> Result<(), AdminRefusal> {
        let sent = headers(&[("host", "localhost"), ("authorization", &format!("Bearer {token}"))]);
        check(tokens, throttle, client(ip), false, &sent).map(|_| ()).map_err(|Refused(reason, _)| reason)
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_guesses_learns_nothing_and_locks_nobody_out() {
        let long = "0123456789abcdef0123456789abcdef";
        let (tokens, throttle) = (tokens(&["short", long]), Throttle::default());
        let ask = |ip: &str, token: &str| presented(&tokens, &throttle, ip, token);
        for nth in 0..10 {
            assert_eq!(ask("192.0.2.1", &format!("guess-{nth}")), Err(AdminRefusal::WrongToken));
        }
        assert_eq!(ask("192.0.2.1", "guess-11"), Err(AdminRefusal::Throttled));
        assert_eq!(ask("192.0.2.1", "short"), Err(AdminRefusal::Throttled), "a right guess looks like a wrong one");
        assert_eq!(ask("192.0.2.1", long), Ok(()), "what nobody can guess is no guess");
        assert_eq!(ask("192.0.2.2", "short"), Ok(()), "another address");
        tokio::time::advance(std::time::Duration::from_secs(6)).await;
        assert_eq!(ask("192.0.2.1", "short"), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_throttled_hears_for_how_long() {
        let (tokens, throttle) = (tokens(&["short"]), Throttle::default());
        for _ in 0..10 {
            assert_eq!(presented(&tokens, &throttle, "192.0.2.1", "wrong"), Err(AdminRefusal::WrongToken));
        }
        tokio::time::advance(std::time::Duration::from_millis(2500)).await;
        let sent = headers(&[("host", "localhost"), ("authorization", "Bearer wrong")]);
        let Refused(_, problem) = check(&tokens, &throttle, client("192.0.2.1"), false, &sent).unwrap_err();
        let answer = Answer::from(problem);
        assert_eq!(
            (answer.status(), &answer.headers()["retry-after"]),
            (StatusCode::TOO_MANY_REQUESTS, &"4".parse().unwrap())
        );
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
    fn a_token_is_shown_once_and_as_it_is() {
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
