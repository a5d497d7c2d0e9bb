//! `[headers]`

use std::sync::Arc;

use figment::value::Value;
use http::HeaderName;
use serde_json::json;

use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::kinds::{Kind, text_as};
use super::node::{Node, Table, Wrong};
use crate::gate::HeaderNames;
use crate::http::headers::{ATTEMPT, OwnHeaders};
use crate::idempotency::key::{KeySource, title_case};
use crate::idempotency::scope::ScopePart;
use crate::route::{Route, Router};

/// Headers of a request that mean something else already, to the gate or to whoever reads the request.
const TAKEN_OF_REQUESTS: &str = "accept accept-encoding accept-language access-control-request-headers access-control-request-method \
    authorization cache-control connection content-encoding content-language content-length content-type cookie date expect \
    forwarded grpc-encoding grpc-timeout host http2-settings idempotency-control idempotency-key if-match if-modified-since if-none-match if-range \
    if-unmodified-since keep-alive max-forwards origin prefer proxy-authorization proxy-connection range referer te traceparent \
    tracestate trailer transfer-encoding upgrade user-agent via x-api-key x-forwarded-for x-forwarded-host x-forwarded-proto";

/// Headers that mean something else already: they frame a message, are dropped on the way, say something of the answer to clients,
/// browsers and caches, or are set by the gate for other reasons.
const TAKEN: &str = "accept-ranges access-control-allow-credentials access-control-allow-headers access-control-allow-methods \
    access-control-allow-origin access-control-expose-headers access-control-max-age age allow alt-svc cache-control connection \
    content-disposition content-encoding content-language content-length content-location content-range content-security-policy \
    content-type date etag expires grpc-encoding grpc-message grpc-retry-pushback-ms grpc-status grpc-status-details-bin host \
    idempotency-attempt idempotency-control idempotency-key keep-alive last-modified link \
    location preference-applied proxy-authenticate proxy-connection ratelimit ratelimit-policy retry-after server set-cookie \
    strict-transport-security te trailer transfer-encoding upgrade vary via www-authenticate";

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

keys! {
    /// The headers that oncegate adds to its answers and to what it sends to upstreams; false without quotes leaves one out.
    pub(super) struct Headers "[headers]" {
        /// What became of the request: executed, replayed, released, accepted, recovered, refused, unrecorded, unprotected, ignored
        /// (it carried a key, and no route protects it), or the code of a problem.
        status: Option<HeaderName> = Some(HeaderName::from_static("idempotency-status")) => name_or_false();
        /// "true" on replays, and only there.
        replayed: Option<HeaderName> = Some(HeaderName::from_static("idempotent-replayed")) => name_or_false();
        /// Until when a completed record answers retries.
        expires: Option<HeaderName> = Some(HeaderName::from_static("idempotency-expires")) => name_or_false();
        /// The secret token of an attempt, towards the upstream of a protected request. A client's own header of this name is
        /// dropped on every route, and so is its Idempotency-Attempt. With false, no token is sent.
        attempt: Option<HeaderName> = OwnHeaders::default().attempt => name_or_false_but(TAKEN_OF_REQUESTS);
        /// Another header for the key of a protected request, towards an upstream that reads it there. It has the key as its
        /// record does, without quotes, and takes the place of what the client sent under this name. The key's own header goes
        /// to the upstream as well.
        forward_key_as: Option<HeaderName> = None => forwarded_key().optional(), Example("\"X-Request-Id\"");
    }
}

/// Whether the upstream sees keys under a name of its own.
pub(super) fn forwards_key(root: &Table<'_>) -> bool {
    root.get("headers").is_some() && root.table("headers", Headers::SECTION).get("forward_key_as").is_some()
}

/// Reads `[headers]`.
pub(super) fn read(root: &Table<'_>) -> (HeaderNames, OwnHeaders) {
    let table = root.table("headers", Headers::SECTION);
    let headers = Headers::read(&table, Headers::default());
    root.print("headers", headers.print_table());
    let Headers { status, replayed, expires, attempt, forward_key_as } = headers;
    let named = [
        ("status", &status),
        ("replayed", &replayed),
        ("expires", &expires),
        ("attempt", &attempt),
        ("forward_key_as", &forward_key_as),
    ];
    for (place, (key, name)) in named.iter().enumerate() {
        if name.is_some() && named[..place].iter().any(|(_, other)| other == name) {
            let wrong = Wrong::new("another of these headers has this name");
            let hint = match *key {
                "forward_key_as" => "give each a name of its own, or leave it out",
                _ => "give each a name of its own, or false to leave it out",
            };
            table.report(key, wrong.hint(hint));
        }
    }
    (HeaderNames { status, replayed, expires }, OwnHeaders { attempt, key: forward_key_as })
}

/// A header that the gate writes must not be one that routes read something else from.
pub(super) fn check(root: &Table<'_>, own: &OwnHeaders, router: &Router, token: Option<&HeaderName>) {
    let table = root.table("headers", Headers::SECTION);
    let routes = || router.routes().iter().filter(|route| route.policy.mode.protects());
    let reads = |what: &str, route: &str| Wrong::new(format!("route `{route}` reads {what} from this header"));
    let report = |key: &str, wrong: Wrong| table.report(key, wrong.hint("choose another name"));
    for (key, name) in [("attempt", &own.attempt), ("forward_key_as", &own.key)] {
        let Some(name) = name else { continue };
        let is_key =
            |route: &&Arc<Route>| route.policy.key.from.iter().flat_map(KeySource::headers).any(|other| other == name);
        // Its value is the key, and goes on there.
        let is_whole_key = |route: &&Arc<Route>| route.policy.key.from.contains(&KeySource::Header(name.clone()));
        let is_scope = |route: &&Arc<Route>| route.policy.scope.contains(&ScopePart::Header(name.clone()));
        let is_compared = |route: &&Arc<Route>| route.policy.fingerprint.headers.contains(name);
        let is_time = |route: &&Arc<Route>| route.policy.request_time.as_ref().is_some_and(|time| time.from == *name);
        let has_token = |route: &&Arc<Route>| token == Some(name) && route.policy.verifies_tokens();
        if let Some(route) = routes().find(is_key).filter(|_| key == "forward_key_as" && *name == IDEMPOTENCY_KEY) {
            let message = format!(
                "route `{}` reads its key from this header, and the upstream gets it there already",
                route.name
            );
            table.report(key, Wrong::new(message).hint("choose another name, or remove it"));
        } else if let Some(route) = routes().filter(is_key).find(|route| key == "attempt" || !is_whole_key(route)) {
            report(key, reads("its key", &route.name));
        } else if let Some(route) = routes().find(is_scope) {
            report(key, reads("a part of its scope", &route.name));
        } else if let Some(route) = routes().find(is_compared) {
            report(key, reads("a part of its fingerprint", &route.name));
        } else if let Some(route) = routes().find(is_time) {
            report(key, reads("the time of its requests", &route.name));
        } else if let Some(route) = routes().find(has_token) {
            report(key, reads("its tokens", &route.name));
        }
    }
}

/// The pattern of a token (RFC 9110, section 5.6.2).
pub(super) const TOKEN: &str = "[!#$%&'*+.^_`|~0-9A-Za-z-]+";

/// The name of a header, or false. Names are kept in lower case, and printed as people write them.
fn name_or_false() -> Kind<Option<HeaderName>> {
    name_or_false_but(TAKEN)
}

/// The same for a header that is none of those that are taken.
fn name_or_false_but(taken: &'static str) -> Kind<Option<HeaderName>> {
    let shape = || json!({ "type": ["string", "boolean"], "pattern": format!("^{TOKEN}$"), "not": { "enum": [true, "true", "false"] } });
    Kind::new(
        shape,
        move |node| name(node, taken),
        |name| name.as_ref().map_or(false.into(), |name| title_case(name).into()),
    )
}

/// The name of the header for a key.
fn forwarded_key() -> Kind<HeaderName> {
    let parse = |node: &Node<'_>| {
        let hint = "write a header name, or remove it";
        // The upstream may read keys where no route does: see `check`.
        let name = match node.text() {
            Ok(text) if text.eq_ignore_ascii_case("idempotency-key") => IDEMPOTENCY_KEY,
            _ => named(node, TAKEN_OF_REQUESTS, hint)?,
        };
        if name == ATTEMPT {
            return Err(Wrong::new(format!("`{}` has another meaning", node.text()?)).hint("choose another name"));
        }
        Ok(name)
    };
    text_as(format!("^{TOKEN}$"), parse, title_case)
}

fn name(node: &Node<'_>, taken: &str) -> Result<Option<HeaderName>, Wrong> {
    let hint = "write a header name, or false without quotes to leave the header out";
    // An environment variable that says false means the same.
    if let Value::Bool(_, on) = node.value {
        return if *on { Err(Wrong::new("true is not a header name").hint(hint)) } else { Ok(None) };
    }
    if let Ok(text @ ("true" | "false")) = node.text() {
        return Err(Wrong::new(format!("`{text}` in quotes would be the name of the header")).hint(hint));
    }
    named(node, taken, hint).map(Some)
}

fn named(node: &Node<'_>, taken: &str, hint: &str) -> Result<HeaderName, Wrong> {
    let text = node.filled()?;
    match HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) if taken.split(' ').any(|taken| taken == name.as_str()) => {
            Err(Wrong::new(format!("`{text}` has another meaning")).hint("choose another name"))
        }
        Ok(name) => Ok(name),
        Err(_) => Err(Wrong::new(format!("`{text}` is not a header name")).hint(hint)),
    }
}
