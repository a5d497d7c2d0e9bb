//! `[auth]`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Uri};
use toml_edit::{Item, Table as TomlTable, value};

use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::headers::TOKEN;
use super::kinds::{Kind, file, nested, one_or_several, raw, set, text, text_as, time_of};
use super::node::{Node, Table, Wrong};
use super::upstreams::encryption::{self, Tls};
use super::upstreams::location::is_ipv6;
use super::{routes, secrets};
use crate::gate::admission::jwt::{Algorithm, JwksUrl, KeySet, KeySource, Settings, Unusable, is_for_secrets};
use crate::http::limits::Limits;
use crate::http::upstream::{self, Protocol, Sharing, UpstreamAddress};
use crate::route::Router;

keys! {
    /// How callers prove who they are, where a scope asks for it.
    pub(super) struct Auth "[auth]" {
        /// Verifies signed tokens (JWT), for a scope with `jwt:CLAIM`. With a token that cannot be verified, a request gets
        /// 401 `credentials-unverifiable`. The keys come from one of `secret_file`, `pem_file`, `jwks_file` and `jwks_url`.
        jwt: Jwt = Jwt::default() => nested();
    }
}

keys! {
    /// Verifies signed tokens (JWT).
    pub(super) struct Jwt "[auth.jwt]" {
        /// A file with the secret that tokens are signed with: at least 32 bytes for HS256, 48 for HS384, 64 for HS512.
        secret_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-jwt-secret\"");
        /// A file in PEM with the public key of the issuer, or a certificate with it; up to 8 while keys change. RSA keys have
        /// at least 2048 bits.
        pem_file: Option<PathBuf> = None => file().optional(), Example("\"/etc/oncegate/issuer.pem\"");
        /// A file with a JSON Web Key Set (RFC 7517).
        jwks_file: Option<PathBuf> = None => file().optional(), Example("\"/etc/oncegate/jwks.json\"");
        /// Where a JSON Web Key Set is: an https URL; http to this machine alone. It is fetched at the start, when it is no
        /// longer fresh (Cache-Control; after 5 minutes where that says nothing) and when none of its keys has signed a token,
        /// at most once in 30 seconds. If that fails, the keys from before stay in force. Redirects are not followed, and
        /// the answer has at most 1 MiB.
        jwks_url: Option<Location> = None
            => text_as(URL, location, Location::shown).optional(),
            Example("\"https://id.example.com/.well-known/jwks.json\"");
        /// How the server of `jwks_url` is authenticated, as in `tls` of an upstream.
        tls: Tls = Tls::default() => nested(), Example(r#"{ ca = "/etc/oncegate/ca.pem" }"#);
        /// What a token's `iss` must be. If omitted, any.
        issuer: Option<String> = None => raw(r"\S").optional(), Example("\"https://id.example.com/\"");
        /// What a token's `aud` must be or have among others: one, or one of a list. If omitted, any, so that tokens for other
        /// services count too.
        audience: Vec<String> = Vec::new()
            => one_or_several("write the name of this service, such as \"payments\"", || raw(r"\S")),
            Example("\"payments\"");
        /// By how much the clock of the issuer may differ, where `exp` and `nbf` are compared: at most "10m". If omitted,
        /// "30s". A token without `exp` is refused.
        leeway: Option<Duration> = None => time_of(Duration::ZERO..=MOST_LEEWAY).optional(), Example("\"30s\"");
        /// The algorithms that count, of those that fit the keys: HS256, HS384, HS512, RS256, RS384, RS512, PS256, PS384, PS512,
        /// ES256, ES384, EdDSA. If omitted, all that fit; for a JSON Web Key with `alg`, that one.
        algorithms: Option<Vec<Algorithm>> = None => algorithms().optional(), Example("[\"ES256\"]");
        /// The header that the token comes in. If omitted, Authorization, after `Bearer`. In any other, `Bearer` may be left
        /// out.
        header: Option<HeaderName> = None
            => text(format!("^{TOKEN}$"), header).optional(), Example("\"Cf-Access-Jwt-Assertion\"");
    }
}

/// The largest difference of clocks.
const MOST_LEEWAY: Duration = Duration::from_secs(10 * 60);

/// The difference where none is configured.
const LEEWAY: Duration = Duration::from_secs(30);

/// How long a fetch of keys may take, and a part of it.
const FETCH: Duration = Duration::from_secs(5);

const URL: &str = r"^https?://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/[^\s#]*)?$";

/// Where issuers describe themselves (OpenID Connect Discovery 1.0, section 4; RFC 8414, section 3).
const DESCRIPTIONS: [&str; 2] = ["/.well-known/openid-configuration", "/.well-known/oauth-authorization-server"];

/// The keys that say where keys come from.
const SOURCES: [&str; 4] = ["secret_file", "pem_file", "jwks_file", "jwks_url"];

/// A URL of keys.
#[derive(Clone)]
pub(super) struct Location {
    text: String,
    place: UpstreamAddress,
    is_encrypted: bool,
    authority: HeaderValue,
    target: Uri,
}

impl Location {
    /// The URL as it is printed: without its query, which may hold a password.
    fn shown(&self) -> String {
        match self.text.split_once('?') {
            Some((place, _)) => format!("{place}?***"),
            None => self.text.clone(),
        }
    }
}

/// Reads `[auth.jwt]`; nothing where there is none, in which case no scope may have a claim.
pub(super) fn read(root: &Table<'_>, router: &Router) -> Option<Settings> {
    let auth = root.table("auth", Auth::SECTION);
    if auth.get("jwt").is_none() {
        refuse_claims(root);
        return None;
    }
    let mut jwt = Auth::read(&auth, Auth::default()).jwt;
    let table = auth.table("jwt", Jwt::SECTION);
    if !router.routes().iter().any(|route| route.policy.verifies_tokens()) {
        let message =
            "no protected route has a claim in its scope, so no token is verified: write scope = [\"jwt:sub\"]";
        auth.advise("jwt", message.to_owned());
    }
    let (leeway, header) = (*jwt.leeway.get_or_insert(LEEWAY), jwt.header.get_or_insert(AUTHORIZATION).clone());
    let printed = TomlTable::from_iter([("jwt", value(jwt.print_inline()))]);
    root.print("auth", Item::Table(printed));
    if jwt.audience.is_empty() && table.get("audience").is_none() && jwt.secret_file.is_none() {
        let message = "without an audience, a token that was made for another service counts here too";
        auth.advise("jwt", message.to_owned());
    }
    if jwt.issuer.is_none() && table.get("issuer").is_none() && jwt.secret_file.is_none() {
        let message =
            "without an issuer, users of two issuers with one name are one caller, where both sign with these keys";
        auth.advise("jwt", message.to_owned());
    }
    let named: Vec<&str> = SOURCES.into_iter().filter(|key| table.get(key).is_some()).collect();
    let hint = "name exactly one of secret_file, pem_file, jwks_file and jwks_url";
    match named[..] {
        [_] => {}
        [] => auth.report("jwt", Wrong::new("nothing says what keys tokens are verified with").hint(hint)),
        [first, second, ..] => {
            table.report(second, Wrong::new(format!("keys come from `{first}` already")).hint(hint));
        }
    }
    if table.get("tls").is_some() && !jwt.jwks_url.as_ref().is_some_and(|url| url.is_encrypted) {
        let useless = Wrong::new("`tls` has no effect: no keys are fetched from an https URL");
        table.report("tls", useless.hint("name the URL with jwks_url, or remove it"));
    }
    let (issuer, audience) = (jwt.issuer.take(), std::mem::take(&mut jwt.audience));
    Some(Settings { keys: keys(&table, jwt)?, issuer, audience, leeway, header })
}

/// Claims in scopes, where nothing verifies tokens.
fn refuse_claims(root: &Table<'_>) {
    routes::refuse_scope_parts(root, "jwt:", || {
        Wrong::new("nothing verifies tokens here, and a claim that is not verified is anybody's")
            .hint("say what keys they are verified with: [auth.jwt] jwks_url = \"https://...\"")
    });
}

fn keys(table: &Table<'_>, jwt: Jwt) -> Option<KeySource> {
    let algorithms = jwt.algorithms.unwrap_or_default();
    let usable = |keys: Result<KeySet, Unusable>, path: &Path| {
        keys.map_err(|Unusable { message, hint }| Wrong::new(format!("{}: {message}", path.display())).hint(hint))
    };
    let secret = |path: &Path| usable(KeySet::of_secret(&secrets::read(path)?), path);
    let pem = |path: &Path| usable(KeySet::of_pem(&secrets::read_most(path, LARGEST)?), path);
    let jwks = |path: &Path| usable(KeySet::of_jwks(&secrets::read_most(path, LARGEST)?, true), path);
    let read = None
        .or_else(|| table.read_file("secret_file", jwt.secret_file.as_deref(), secret))
        .or_else(|| table.read_file("pem_file", jwt.pem_file.as_deref(), pem))
        .or_else(|| table.read_file("jwks_file", jwt.jwks_file.as_deref(), jwks));
    if let Some(keys) = read {
        let limited = keys.limited_to(&algorithms).map_err(|Unusable { message, hint }| Wrong::new(message).hint(hint));
        let keys = limited.map_err(|wrong| table.report("algorithms", wrong)).ok()?;
        return Some(KeySource::Files(Arc::new(keys)));
    }
    let url = jwt.jwks_url?;
    if algorithms.iter().copied().any(is_for_secrets) {
        let wrong = Wrong::new("HS256, HS384 and HS512 are for a secret, and no secret is at a URL");
        table.report("algorithms", wrong.hint("remove them, or name the secret with secret_file"));
    }
    let tls = if url.is_encrypted {
        Some(encryption::read(table, "jwks_url", jwt.tls, std::slice::from_ref(&url.place))?)
    } else {
        None
    };
    let host = upstream::Settings {
        name: "auth.jwt".into(),
        places: vec![url.place],
        tls,
        protocol: Protocol::Auto,
        timeout: FETCH,
        connect_timeout: FETCH,
        max_connections: 4,
        max_headers: Limits::default().max_answer_headers(),
        reuse: Sharing::Always,
        client_timeout: FETCH,
    };
    Some(KeySource::Url(Arc::new(JwksUrl { host, authority: url.authority, target: url.target, algorithms })))
}

/// The largest file of keys, in bytes.
const LARGEST: u64 = 1 << 20;

/// `algorithms`
fn algorithms() -> Kind<Vec<Algorithm>> {
    const NAMES: &str = "HS256|HS384|HS512|RS256|RS384|RS512|PS256|PS384|PS512|ES256|ES384|EdDSA";
    let parse = |node: &Node<'_>| {
        let text = node.filled()?;
        if text.eq_ignore_ascii_case("none") {
            let wrong = Wrong::new("`none` is no signature: anybody could make such a token");
            return Err(wrong.hint("remove it; name the algorithms that the issuer signs with, such as \"ES256\""));
        }
        text.parse().map_err(|_| {
            let wrong = Wrong::new(format!("`{text}` is not an algorithm that can be used here"));
            match NAMES.split('|').find(|name| name.eq_ignore_ascii_case(text)) {
                Some(name) => wrong.hint(format!("did you mean \"{name}\"?")),
                None => wrong.hint("write one such as \"RS256\", \"ES256\" or \"EdDSA\""),
            }
        })
    };
    set(
        "name the algorithms, or remove it",
        text_as(format!("^({NAMES})$"), parse, |algorithm: &Algorithm| format!("{algorithm:?}")),
    )
}

fn header(node: &Node<'_>) -> Result<HeaderName, Wrong> {
    let text = node.filled()?;
    HeaderName::from_bytes(text.as_bytes())
        .map_err(|_| Wrong::new(format!("`{text}` is not a header name")).hint("write one such as \"Authorization\""))
}

/// Reads a URL of keys. What is wrong is said without showing it: it may hold a password.
fn location(node: &Node<'_>) -> Result<Location, Wrong> {
    const FORM: &str = "write \"https://HOST/PATH\"";
    let text = node.filled()?;
    let wrong = || Wrong::new("this is not an https URL").hint(FORM);
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(wrong()) };
    if authority.as_str().contains('@') || text.contains('#') {
        return Err(Wrong::new("the URL has a user, a password or a fragment").hint(FORM));
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    if authority.host().starts_with('[') && !is_ipv6(&host) {
        return Err(Wrong::new("what stands in brackets is not an IPv6 address").hint(FORM));
    }
    let is_encrypted = match scheme {
        "https" => true,
        "http" if is_here(&host) => false,
        "http" => {
            let wrong = Wrong::new("over http, anyone on the network path could replace the keys");
            return Err(wrong.hint("write https://; http is for keys from this machine alone"));
        }
        _ => return Err(wrong()),
    };
    let port = match authority.as_str().strip_prefix(authority.host()) {
        Some("") => Some(if is_encrypted { 443 } else { 80 }),
        _ => authority.port_u16(),
    };
    let Some(port) = port.filter(|port| *port > 0 && !host.is_empty()) else {
        return Err(Wrong::new("the URL needs a host and a port from 1 to 65535").hint(FORM));
    };
    if DESCRIPTIONS.iter().any(|name| uri.path().ends_with(name)) {
        let wrong = Wrong::new("this is the description of an issuer, which names the URL of its keys");
        return Err(wrong.hint("write the URL that stands there as `jwks_uri`"));
    }
    let target = uri.path_and_query().cloned().map_or_else(|| Uri::from_static("/"), Uri::from);
    let authority = HeaderValue::from_str(authority.as_str()).map_err(|_| wrong())?;
    Ok(Location { text: text.to_owned(), place: UpstreamAddress::Tcp { host, port }, is_encrypted, authority, target })
}

/// Whether a host is this machine.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
