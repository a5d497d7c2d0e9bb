//! The head of a request, read once.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};

use crate::http::connection_memory::ConnectionMemory;
use crate::http::fair_share::Party;
use crate::http::forwarding::{Forwarding, MalformedForwarded, PeerInfo, new_request_id, trace};
use crate::http::headers::{
    ForwardingInfo, OwnHeaders, Via, has_unambiguous_framing, is_host, is_usual_host, normal_host,
};
use crate::http::http1::Interim;
use crate::http::problem::Problem;
use crate::http::request_body::RequestBody;
use crate::http::server::Peer;
use crate::http::upgrade::{Upgrade, Upgrades};
use crate::http::upstream::Upstream;
use crate::http::usage::{Budget, Usage};
use crate::idempotency::codec::{self, AcceptedRequest};
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::media;
use crate::idempotency::record::RequestId;
use crate::idempotency::request_time::{RequestTime, RequestTimeFault};
use crate::idempotency::scope::{Caller, Scope, ScopePart};
use crate::idempotency::token::TokenClaims;
use crate::route::{Ambiguous, Route};
use crate::telemetry::notes::{Notes, Timing};
use crate::telemetry::outcome::Code;
use crate::telemetry::spans::SpanContext;

/// How a gate sees where requests come from, and where they came by.
#[derive(Debug, Default)]
pub(super) struct ForwardingContext {
    pub(super) forwarding: Forwarding,
    pub(super) upgrades: Upgrades,
    pub(super) own: OwnHeaders,
    pub(super) via: Via,
}

/// What the gate knows of a request before its body.
pub(super) struct Head {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    /// Of an absolute-form target, else of the header (RFC 9112, 3.2.2).
    host: Option<Host>,
    peer: Peer,
    /// The address of the client, which may be behind trusted proxies.
    client: IpAddr,
    context: Arc<ForwardingContext>,
    /// The upgrade that it asks for.
    pub(super) upgrade: Option<Upgrade>,
    /// Its id.
    pub(super) id: RequestId,
    /// What is learnt of it, where something tells of that.
    pub(super) notes: Option<Arc<Notes>>,
    /// Its token, once that was looked at.
    token: Token,
}

/// What is known of a request's token.
#[derive(Clone)]
enum Token {
    /// Nothing yet.
    Unread,
    /// It has none, or `explain` cannot verify it.
    Absent,
    /// It was verified.
    Verified(Arc<TokenClaims>),
}

/// A request that no upstream may see.
pub(super) struct RefusedHead {
    /// Why.
    pub(super) problem: Problem,
    /// Its head.
    pub(super) parts: Parts,
}

impl Head {
    /// Parses a request, unless no upstream may see it.
    pub(super) fn read(
        mut request: Request<RequestBody>,
        peer: Peer,
        context: &Arc<ForwardingContext>,
        told: (RequestId, Option<Arc<Notes>>),
    ) -> Result<(Self, RequestBody), Box<RefusedHead>> {
        let upgrade = Upgrade::of(&mut request, &context.upgrades);
        let (parts, body) = request.into_parts();
        // What no header of a client passes for, no trailer does either.
        let body = match context.own.other_attempt() {
            Some(name) => body.without_trailer(name.clone()),
            None => body,
        };
        let host = Self::check(&parts, peer.is_secure, context);
        match host.and_then(|host| Ok((host, Self::client(&parts, &peer, context)?))) {
            Ok(from) => Ok((Self::framed(parts, from, upgrade, peer, context, told), body)),
            Err(problem) => Err(Box::new(RefusedHead { problem, parts })),
        }
    }

    /// Of a head alone, which no connection has brought.
    ///
    /// # Errors
    /// No upstream may see this request.
    pub(super) fn of(parts: Parts, peer: Peer, context: &Arc<ForwardingContext>) -> Result<Self, Problem> {
        if !has_unambiguous_framing(&parts.headers) {
            return Err(bad("where the request ends is in doubt (RFC 9112, 6)"));
        }
        let host = Self::check(&parts, peer.is_secure, context)?;
        let client = Self::client(&parts, &peer, context)?;
        Ok(Self::framed(parts, (host, client), None, peer, context, (new_request_id(), None)))
    }

    /// The host of a request that an upstream may see.
    fn check(parts: &Parts, is_secure: bool, context: &ForwardingContext) -> Result<Option<Host>, Problem> {
        if let Some(found) = context.via.find_loop(&parts.headers) {
            return Err(Problem::new(Code::LoopDetected, found.to_string()));
        }
        check_target(parts)?;
        host(parts, is_secure)
    }

    /// The address of its client.
    fn client(parts: &Parts, peer: &Peer, context: &ForwardingContext) -> Result<IpAddr, Problem> {
        if !peer.may_be_trusted {
            return Ok(peer.ip);
        }
        let client = context.forwarding.client(peer.ip, &parts.headers);
        client.map_err(|MalformedForwarded| bad("the header Forwarded is malformed (RFC 7239, 4)"))
    }

    /// Of a head whose framing is beyond doubt, as [`crate::http::http1`] sees to.
    fn framed(
        parts: Parts,
        (host, client): (Option<Host>, IpAddr),
        upgrade: Option<Upgrade>,
        peer: Peer,
        context: &Arc<ForwardingContext>,
        (id, notes): (RequestId, Option<Arc<Notes>>),
    ) -> Self {
        if let Some(notes) = &notes {
            notes.note(|noted| noted.client = Some(client));
        }
        Self {
            method: parts.method,
            uri: parts.uri,
            version: parts.version,
            headers: parts.headers,
            host,
            client,
            peer,
            context: Arc::clone(context),
            upgrade,
            id,
            notes,
            token: Token::Unread,
        }
    }

    /// Of a request that was accepted before.
    ///
    /// # Errors
    /// The gate would not take it any more: its target or host is none.
    pub(super) fn accepted(kept: AcceptedRequest, context: &Arc<ForwardingContext>) -> Result<Self, Problem> {
        let AcceptedRequest { method, target, version, is_secure, may_be_trusted, peer, request, headers, .. } = kept;
        let peer = Peer { may_be_trusted, is_secure, certificate: kept.certificate, ..Peer::new((peer, 0).into()) };
        let (mut parts, ()) = Request::new(()).into_parts();
        (parts.method, parts.uri, parts.version, parts.headers) = (method, target, version, headers);
        let host = Self::check(&parts, is_secure, context)?;
        // An earlier version may have kept a request with a header that is refused today.
        let client = Self::client(&parts, &peer, context).unwrap_or(peer.ip);
        Ok(Self::framed(parts, (host, client), None, peer, context, (request, None)))
    }

    /// The same head, of a request that asks for no upgrade.
    pub(super) fn without_upgrade(&self) -> Self {
        Self {
            method: self.method.clone(),
            uri: self.uri.clone(),
            version: self.version,
            headers: self.headers.clone(),
            host: self.host.clone(),
            peer: self.peer.clone(),
            client: self.client,
            context: Arc::clone(&self.context),
            upgrade: None,
            id: self.id,
            notes: self.notes.clone(),
            token: self.token.clone(),
        }
    }

    /// The same head, which names no host: it gets that of its upstream when it is sent.
    pub(super) fn without_host(mut self) -> Self {
        self.headers.remove(HOST);
        Self { host: None, ..self }
    }

    /// Where it came from.
    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// What its body and its answer are counted in while they are in memory.
    pub(super) fn memory<'a>(&'a self, usage: &'a Usage) -> &'a Arc<Budget> {
        self.peer.connection_memory.as_deref().map_or(&usage.memory, ConnectionMemory::memory)
    }

    /// Who it counts for where a limit is scarce: its client's address, and what else the scope of its route tells callers
    /// apart by.
    pub(super) fn party(&self, scope: Option<&Scope>) -> Party {
        match scope.and_then(|scope| scope.distinction(self.caller())) {
            Some(caller) => Party::caller_at(self.client, &caller),
            None => Party::at(self.client),
        }
    }

    /// Sends interim answers to the client; `None` where it does not understand them.
    pub(super) fn interim(&self) -> Option<Interim> {
        self.peer.interim.clone()
    }

    /// What the gate adds to it for the upstream.
    pub(super) fn forwarding_info(&self) -> ForwardingInfo<'_> {
        ForwardingInfo {
            peer: PeerInfo {
                ip: self.peer.ip,
                may_be_trusted: self.peer.may_be_trusted,
                header_value: &self.peer.header_value,
                is_secure: self.peer.is_secure,
                host: self.host.as_ref().map(|host| &host.written),
            },
            forwarding: &self.context.forwarding,
            own: &self.context.own,
            via: self.context.via.line(self.version),
            request: self.id,
            span: self.exported_span(),
        }
    }

    /// The host that it names, so that two spellings of one host are one.
    pub(super) fn authority(&self) -> Option<&str> {
        self.host.as_ref().and_then(Host::authority)
    }

    pub(super) fn caller(&self) -> Caller<'_> {
        Caller {
            headers: &self.headers,
            authority: self.authority(),
            client_ip: Some(self.client),
            certificate: self.peer.certificate.as_deref(),
            claims: self.claims(),
        }
    }

    /// Notes the claims of its token, which was verified; nothing where it has none.
    pub(super) fn set_jwt_claims(&mut self, claims: Option<Arc<TokenClaims>>) {
        self.token = claims.map_or(Token::Absent, Token::Verified);
    }

    /// Whether its token was looked at.
    pub(super) fn is_token_known(&self) -> bool {
        !matches!(self.token, Token::Unread)
    }

    fn claims(&self) -> Option<&TokenClaims> {
        match &self.token {
            Token::Verified(claims) => Some(claims),
            Token::Unread | Token::Absent => None,
        }
    }

    /// Measures how long it waits for this upstream, where something tells of that.
    pub(super) fn asks(&self, upstream: &Upstream) -> Option<Timing> {
        self.notes.as_ref().map(|notes| notes.asks_upstream(&upstream.settings().name))
    }

    /// Notes whether its route protects it, or refuses it.
    pub(super) fn note_protected(&self, is_protected: bool) {
        if let Some(notes) = &self.notes {
            notes.note(|noted| noted.is_protected = is_protected);
        }
    }

    /// Notes that another request came first: the one that made this record.
    pub(super) fn comes_after(&self, record: &codec::Head) {
        if self.notes.is_some() {
            let details = record.details();
            self.comes_after_request(details.request.map(|first| span_of(first, details.trace)));
        }
    }

    /// Notes that the request with this span came first.
    pub(super) fn comes_after_request(&self, first: Option<SpanContext>) {
        let Some(notes) = self.notes.as_ref().filter(|notes| notes.span().is_some()) else { return };
        if let Some(first) = first.filter(|first| first.span != self.id.0.get()) {
            notes.note(|noted| noted.first = Some(first));
        }
    }

    /// Its span, where that is exported.
    pub(super) fn exported_span(&self) -> Option<SpanContext> {
        self.notes.as_ref().and_then(|notes| notes.span())
    }

    /// The span that it has if spans are exported.
    pub(super) fn span(&self) -> SpanContext {
        span_of(self.id, trace(&self.headers))
    }

    /// Whether it is a gRPC call.
    pub(super) fn is_call(&self) -> bool {
        media::is_grpc_call(&self.method, &self.headers)
    }

    /// The target as the upstream gets it: path and query, byte for byte.
    pub(super) fn target(&self) -> Uri {
        target_of(&self.uri)
    }
}

fn target_of(uri: &Uri) -> Uri {
    match (uri.authority(), uri.path_and_query()) {
        (Some(_), Some(target)) if !target.as_str().starts_with('?') => Uri::from(target.clone()),
        // The path of `http://host?query` is empty, which is `/` in any other form (RFC 9112, 3.2.1).
        (Some(_), Some(target)) => target.to_string().parse().unwrap_or_else(|_| uri.clone()),
        _ => uri.clone(),
    }
}

/// The span of a request, whose client may have sent a trace.
fn span_of(request: RequestId, trace: Option<u128>) -> SpanContext {
    SpanContext { trace: trace.unwrap_or_else(|| request.trace()), span: request.0.get() }
}

/// A target is a path, a whole URL, or `*` with OPTIONS (RFC 9112, 3.2). Anything else could mean a protected path to the
/// upstream and none to the router.
fn check_target(parts: &Parts) -> Result<(), Problem> {
    if parts.method == Method::CONNECT {
        return Err(bad("CONNECT is not served here"));
    }
    let (uri, path) = (&parts.uri, parts.uri.path());
    let asterisk = path == "*" && parts.method == Method::OPTIONS;
    // An upstream of HTTP is asked for nothing else.
    let scheme_is_sound = matches!(uri.scheme_str(), None | Some("http" | "https"));
    if path.starts_with('/') && uri.scheme().is_some() == uri.authority().is_some() && scheme_is_sound || asterisk {
        return Ok(());
    }
    Err(bad("the request's target is neither a path nor a URL (RFC 9112, 3.2)"))
}

fn host(parts: &Parts, is_secure: bool) -> Result<Option<Host>, Problem> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Err(bad("the request has more than one Host header (RFC 9112, 3.2)"));
    }
    let is_named = host.is_some() || parts.version == Version::HTTP_2 && parts.uri.authority().is_some();
    if !is_named && parts.version >= Version::HTTP_11 {
        return Err(bad("the request has no Host header (RFC 9112, 3.2), and no authority (RFC 9113, 8.3.1)"));
    }
    let host = match host {
        Some(host) => {
            Some(Host::of(host.clone(), is_secure).ok_or_else(|| bad("the Host header is no host (RFC 9110, 7.2)"))?)
        }
        None => None,
    };
    let Some(authority) = parts.uri.authority() else { return Ok(host) };
    // It counts before the Host header (RFC 9112, 3.2.2). User information in it is deceptive (RFC 9110, 4.2.4).
    match HeaderValue::from_str(authority.as_str()).ok().and_then(|host| Host::of(host, is_secure)) {
        // HTTP/2 clients send one of them (RFC 9113, 8.3.1).
        Some(asked)
            if parts.version == Version::HTTP_2
                && host.as_ref().is_some_and(|host| host.authority() != asked.authority()) =>
        {
            Err(bad("the request's authority and its Host header differ (RFC 9113, 8.3.1)"))
        }
        Some(host) if !host.written.is_empty() => Ok(Some(host)),
        _ => Err(bad("the URL that is asked for has no host, or a user (RFC 9110, 4.2.4)")),
    }
}

/// The host that a request names.
#[derive(Clone)]
struct Host {
    /// As written.
    written: HeaderValue,
    /// The same, so that two spellings of one host are one, where that differs: see [`normal_host`].
    normal: Option<String>,
}

impl Host {
    /// Nothing where it is none.
    fn of(written: HeaderValue, is_secure: bool) -> Option<Self> {
        let text = written.to_str().ok()?;
        if is_usual_host(text) && !(is_secure && text.ends_with(":443")) {
            return Some(Self { written, normal: None });
        }
        let normal = normal_host(text, if is_secure { ":443" } else { ":80" });
        is_host(text).then_some(Self { written, normal })
    }

    fn authority(&self) -> Option<&str> {
        self.normal.as_deref().or_else(|| self.written.to_str().ok())
    }
}

fn bad(detail: &str) -> Problem {
    Problem::new(Code::BadRequest, detail)
}

/// The path can be read otherwise, and what protects the request depends on the reading.
pub(super) fn ambiguous(ambiguous: &Ambiguous) -> Problem {
    let name =
        |route: &Option<Arc<Route>>| route.as_ref().map_or_else(|| "-".to_owned(), |route| route.name.to_string());
    let (route, other) = (name(&ambiguous.route), name(&ambiguous.other));
    tracing::debug!(route, other, "a path that can be read in two ways was refused");
    bad(&ambiguous.to_string())
}

/// The request carries a key, and asks to switch protocols.
pub(super) fn upgrade_with_key() -> Problem {
    bad("an upgrade cannot be retried, so it cannot carry a key here")
}

pub(super) fn upgrade_with_body() -> Problem {
    bad(
        "the key may be in the body, which the gate does not read from an upgrade; send it without a body, or without `Upgrade`",
    )
}

/// The request lacks a part of its scope.
pub(super) fn scope_missing(part: &ScopePart) -> Problem {
    let detail = format!("{} is required; nothing was sent", part.in_http());
    Problem::new(Code::ScopeMissing, detail)
}

fn millis(count: u128) -> Duration {
    Duration::from_millis(u64::try_from(count).unwrap_or(u64::MAX))
}

/// Longer than any clock is off.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The request may not run, by the time that it says.
pub(super) fn untimely(rule: &RequestTime, untimely: RequestTimeFault) -> Problem {
    let RequestTime { from, max_age, skew } = rule;
    // More than a few digits would not help a person, but for those that show that it is too much.
    let shown = |time: Duration, most: Duration| {
        let [minutes, seconds] = [60_000, 1000].map(|unit| time.as_millis() / unit * unit).map(millis);
        let coarse = if time.as_secs() < 60 * 60 { seconds } else { minutes };
        let shown = [coarse, seconds].into_iter().find(|shown| *shown > most);
        let shown = humantime::format_duration(shown.unwrap_or_else(|| millis(time.as_millis())));
        // That is no time of a request, but a unit that was taken for another.
        if time > YEAR && most < YEAR { "more than a year".to_owned() } else { shown.to_string() }
    };
    let what = match untimely {
        RequestTimeFault::Missing => format!("the request has no `{from}`, which says when it was made"),
        RequestTimeFault::Unreadable => {
            format!("`{from}` is not one time: send RFC 3339, an HTTP date, or seconds or milliseconds since 1970")
        }
        RequestTimeFault::Old { age } => format!(
            "by `{from}` the request is {} old, and may run until it is {}",
            shown(age, *max_age),
            humantime::format_duration(*max_age)
        ),
        RequestTimeFault::Ahead { by } => format!(
            "`{from}` is {} ahead of the gate's clock, and clocks may differ by {}",
            shown(by, *skew),
            humantime::format_duration(*skew)
        ),
    };
    Problem::new(Code::RequestExpired, format!("{what}; nothing was sent"))
}

/// A claim that is part of the scope is an object or an array.
pub(super) fn claim_unfit(part: &ScopePart) -> Problem {
    let claim = match part {
        ScopePart::JwtClaim(name) => &**name,
        _ => "",
    };
    let detail =
        format!("the claim `{claim}` of the token is neither text nor a number nor a truth value; nothing was sent");
    Problem::new(Code::CredentialsUnverifiable, detail)
}

/// The route requires a key, and none came.
pub(super) fn key_missing(rule: &KeyRule) -> Problem {
    let places: Vec<_> = rule.from.iter().map(KeySource::in_http).collect();
    Problem::new(Code::KeyMissing, format!("send {}, with a value unique to this request", places.join(", or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients do not read configurations.
    #[test]
    fn problems_name_keys_and_scopes_in_words_of_http() {
        let missing = |places: &[&str]| {
            let from = places.iter().map(|place| KeySource::parse(place).unwrap()).collect();
            key_missing(&KeyRule { from, ..KeyRule::default() }).detail
        };
        for (places, what) in [
            (&["header:idempotency-key"][..], "the header Idempotency-Key"),
            (&["query:id", "json:/order/id"], "the query parameter `id`, or the member `/order/id` of the JSON body"),
            (&["cloudevent"], "the source and the id of a CloudEvent"),
            (&["template:{header:x-saga-id}:{query:step}"], "the header X-Saga-Id and the query parameter `step`"),
        ] {
            assert_eq!(missing(places), format!("send {what}, with a value unique to this request"));
        }
        for (part, what) in [
            ("header:x-tenant", "the header X-Tenant"),
            ("cookie:session", "the cookie `session`"),
            ("basic:user", "the user of HTTP Basic credentials"),
            ("client-cert:subject", "a client certificate"),
            ("client-cert:san", "a client certificate with a subject alternative name"),
            ("jwt:sub", "a bearer token with the claim `sub`"),
        ] {
            let part = ScopePart::parse(part).unwrap();
            assert_eq!(scope_missing(&part).detail, format!("{what} is required; nothing was sent"));
        }
        let unfit = claim_unfit(&ScopePart::parse("jwt:roles").unwrap()).detail;
        assert!(unfit.starts_with("the claim `roles` of the token is neither text"), "{unfit}");
    }

    /// `:path` of HTTP/2 has no other form (RFC 9113, 8.3.1).
    #[test]
    fn an_empty_path_is_a_slash() {
        for (uri, target) in
            [("http://a?x=1", "/?x=1"), ("http://a", "/"), ("http://a/?x", "/?x"), ("/x?y", "/x?y"), ("*", "*")]
        {
            assert_eq!(target_of(&uri.parse().unwrap()), target, "{uri}");
        }
    }

    #[test]
    fn odd_targets_are_refused() {
        let check = |method: &str, target: &str| {
            let request = Request::builder().method(method).uri(target).body(()).unwrap();
            check_target(&request.into_parts().0).is_ok()
        };
        assert!(check("POST", "/"));
        assert!(check("POST", "http://a/x"));
        assert!(!check("POST", "ftp://a/x"));
        assert!(check("OPTIONS", "*"));
        assert!(!check("POST", "*"));
        assert!(!check("POST", "x"));
        assert!(!check("CONNECT", "a:443"));
    }
}
