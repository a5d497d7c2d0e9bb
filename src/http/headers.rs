//! Headers: what is removed from them and added to them in both directions, `Via` and loops, and hosts.

use std::collections::HashSet;

use http::header::{self, CONNECTION, CONTENT_LENGTH, HOST, IF_NONE_MATCH, TE, TRAILER, TRANSFER_ENCODING, VIA};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Version};

use super::forwarding::{self, ForwardedHeaders, Forwarding, PeerInfo, continue_or_start_trace};
use super::white_space::trimmed;
use crate::idempotency::record::RequestId;
use crate::idempotency::settle::CONTROL;
use crate::telemetry::spans::SpanContext;

/// The token of an attempt, for the upstream.
pub const ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");

/// The headers that a gate adds to answers, unless it is configured otherwise.
pub const ADDED: [HeaderName; 3] = [
    HeaderName::from_static("idempotency-status"),
    HeaderName::from_static("idempotent-replayed"),
    HeaderName::from_static("idempotency-expires"),
];

/// The headers with which the gate tells an upstream of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHeaders {
    /// The attempt's token; `None` where it is not sent. A client's own header of this name goes to no upstream.
    pub attempt: Option<HeaderName>,
    /// The key besides its own place, unquoted, in place of what the client sent under this name.
    pub key: Option<HeaderName>,
}

impl Default for OwnHeaders {
    fn default() -> Self {
        Self { attempt: Some(ATTEMPT), key: None }
    }
}

impl OwnHeaders {
    /// The name of an attempt's token, where it is not the usual one.
    #[must_use]
    pub fn other_attempt(&self) -> Option<&HeaderName> {
        self.attempt.as_ref().filter(|name| **name != ATTEMPT)
    }
}

/// Headers that `Connection` cannot strip, because an upstream acts upon them or the gate vouches for them. They are
/// meant for all recipients and are no connection options (RFC 9110, 7.6.1). The headers of a route's keys, scopes and
/// fingerprint are protected too.
const NEVER_STRIPPED: [&str; 16] = [
    "authorization",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "forwarded",
    "host",
    "idempotency-attempt",
    "idempotency-key",
    "traceparent",
    "tracestate",
    "trailer",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

/// Tells names that are taken for others by servers that hand headers on as variables, as CGI does (RFC 3875, 4.1.18): there
/// `X_Forwarded_For` is `X-Forwarded-For`, and two headers become one. A name that is itself configured is no alias.
fn aliases<'a>(kept: &'a [HeaderName], own: &'a OwnHeaders) -> impl Fn(&HeaderName) -> bool + 'a {
    static PLAIN: ByteSet = ByteSet::lower_case_and(b"-");
    let is_plain = |name: &HeaderName| PLAIN.span(name.as_str()) == name.as_str().len();
    let configured = || kept.iter().chain(&own.attempt).chain(&own.key);
    let are_plain = configured().all(is_plain);
    move |name| !(are_plain && is_plain(name) || kept.contains(name)) && is_taken_for(name.as_str(), configured())
}

/// Whether such a server takes a name for one of these, or for another that counts.
fn is_taken_for<'a>(name: &str, configured: impl Iterator<Item = &'a HeaderName>) -> bool {
    let others = ["transfer-encoding", "idempotency-control", "x-forwarded-port", "x-real-ip"];
    let meant = NEVER_STRIPPED.into_iter().chain(others).chain(configured.map(HeaderName::as_str));
    let folds_to = |meant: &str| {
        let mut bytes = name.bytes().zip(meant.bytes());
        name != meant
            && name.len() == meant.len()
            && bytes.all(|(own, meant)| own == meant || !own.is_ascii_alphanumeric() && !meant.is_ascii_alphanumeric())
    };
    meant.into_iter().any(folds_to)
}

/// Whether a trailer passes for a reserved field, or for the gate's own, at a server that hands them on as variables.
pub(super) fn is_reserved_alias(name: &HeaderName, own: Option<&HeaderName>) -> bool {
    is_taken_for(name.as_str(), STRIPPED_TRAILERS.iter().chain(&forwarding::NAMES).chain([&ATTEMPT]).chain(own))
}

/// Fields that the gate takes out of trailers.
const STRIPPED_TRAILERS: [HeaderName; 16] = [
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("idempotency-key"),
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    header::SET_COOKIE,
    header::HOST,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::EXPECT,
    header::RANGE,
    header::TE,
];

/// Whether a header is for one connection only (RFC 9110, 7.6.1; `HTTP2-Settings`: RFC 7540, 3.2.1).
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection" | "transfer-encoding" | "te" | "upgrade" | "keep-alive" | "proxy-connection" | "http2-settings"
    )
}

/// Whether a header can stand in a request that comes by no connection: it is neither for one connection, nor says where the
/// request goes or ends.
#[must_use]
pub fn is_end_to_end(name: &HeaderName) -> bool {
    let is_framing = matches!(*name, header::HOST | header::CONTENT_LENGTH | header::EXPECT | header::TRAILER);
    !is_framing && !is_hop_by_hop(name)
}

/// The headers of a message that its `Connection` lists.
struct ConnectionOptions(HashSet<HeaderName>);

impl ConnectionOptions {
    fn of(headers: &HeaderMap) -> Self {
        let mut lines = headers.get_all(CONNECTION).iter();
        let (Some(first), second) = (lines.next(), lines.next()) else { return Self(HashSet::new()) };
        // The usual value. `Keep-Alive` is hop-by-hop and never forwarded.
        if second.is_none() && first.as_bytes().eq_ignore_ascii_case(b"keep-alive") {
            return Self(HashSet::new());
        }
        // Only those that are there: a list may have many more members than a message has headers.
        let options = [first].into_iter().chain(second).chain(lines).flat_map(tokens);
        let names = options.filter_map(|option| HeaderName::from_bytes(option).ok());
        Self(names.filter(|name| headers.contains_key(name)).collect())
    }

    fn contains(&self, name: &HeaderName) -> bool {
        // Most messages have none.
        !self.0.is_empty() && self.0.contains(name)
    }
}

/// The members of a comma-separated list, trimmed.
pub(super) fn tokens(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    members(value.as_bytes())
}

/// The same for the bytes of a valid value, whose only white space is spaces and tabs.
pub fn members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Whether `If-None-Match` names this tag: the client has what it names. Tags are compared weakly (RFC 9110, 13.1.2).
#[must_use]
pub fn is_known(headers: &HeaderMap, etag: &HeaderValue) -> bool {
    let tags = headers.get_all(IF_NONE_MATCH).iter().flat_map(|line| members(line.as_bytes()));
    tags.map(|tag| tag.strip_prefix(b"W/").unwrap_or(tag)).any(|tag| tag == b"*" || tag == etag.as_bytes())
}

/// Whether a comma-separated list header has `token`, in whatever case.
#[must_use]
pub fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    headers.get_all(name).iter().flat_map(tokens).any(|member| member.eq_ignore_ascii_case(token.as_bytes()))
}

/// Whether a message of HTTP/1.1 announces a body that is not empty.
#[must_use]
pub fn announces_body(headers: &HeaderMap) -> bool {
    let is_zero = |length: &[u8]| !length.is_empty() && length.iter().all(|digit| *digit == b'0');
    headers.contains_key(TRANSFER_ENCODING)
        || headers.get_all(CONTENT_LENGTH).iter().any(|length| !is_zero(length.as_bytes()))
}

/// Whether the end of a message is unambiguous: one length, or `chunked` as the only transfer coding, but not both
/// (RFC 9112, 6.1 and 6.3). hyper would prefer one of the two, and would drop the name of another coding.
#[must_use]
pub fn has_unambiguous_framing(headers: &HeaderMap) -> bool {
    let (mut codings, mut lengths) =
        (headers.get_all(TRANSFER_ENCODING).iter(), headers.get_all(CONTENT_LENGTH).iter());
    match (codings.next(), lengths.next()) {
        (None, None) => true,
        (Some(coding), None) => {
            coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") && codings.next().is_none()
        }
        (None, Some(length)) => length.as_bytes().iter().all(u8::is_ascii_digit) && lengths.next().is_none(),
        (Some(_), Some(_)) => false,
    }
}

/// Removes trailers that the gate reserves: the fields between gate and upstream, forwarding fields, and fields that
/// must be known before the body (RFC 9110, 6.5.1). An upstream that merges trailers into headers would otherwise see
/// a key, or a caller, that the gate did not check.
#[must_use]
pub fn without_forbidden_fields(mut trailers: HeaderMap) -> HeaderMap {
    trailers.remove(ATTEMPT);
    trailers.remove(CONTROL);
    for name in forwarding::NAMES.iter().chain(&STRIPPED_TRAILERS) {
        trailers.remove(name);
    }
    without(trimmed(trailers), is_hop_by_hop)
}

/// Removes the trailers of a request that would pass for headers that its key, its caller or its content are known by: `kept`, and
/// other spellings of them. Only headers were read.
#[must_use]
pub fn without_aliases(trailers: HeaderMap, kept: &[HeaderName], own: &OwnHeaders) -> HeaderMap {
    let is_alias = aliases(kept, own);
    without(trailers, |name| kept.contains(name) || is_alias(name))
}

/// Removes headers or trailers by their names.
#[must_use]
pub fn without_names(headers: HeaderMap, names: &[HeaderName]) -> HeaderMap {
    without(headers, |name| names.contains(name))
}

/// Announces in `Trailer` those of `trailers` that it does not name: hyper sends only announced trailers (RFC 9110, 6.6.2).
pub fn announce_trailers(headers: &mut HeaderMap, trailers: &HeaderMap) {
    let announced = headers.get_all(TRAILER).iter().flat_map(tokens);
    let announced: HashSet<_> = announced.filter_map(|name| HeaderName::from_bytes(name).ok()).collect();
    let names: Vec<_> = trailers.keys().filter(|name| !announced.contains(*name)).map(HeaderName::as_str).collect();
    if !names.is_empty()
        && let Ok(value) = HeaderValue::from_str(&names.join(", "))
    {
        headers.append(TRAILER, value);
    }
}

/// The data that the gate adds to forwarded requests.
#[derive(Clone, Copy, Debug)]
pub struct ForwardingInfo<'a> {
    /// The peer that sent it.
    pub peer: PeerInfo<'a>,
    /// Which forwarding headers are trusted and written.
    pub forwarding: &'a Forwarding,
    /// The headers of attempts.
    pub own: &'a OwnHeaders,
    /// The gate's entry in `Via`.
    pub via: &'a HeaderValue,
    /// The request.
    pub request: RequestId,
    /// Its span, if it has one.
    pub span: Option<SpanContext>,
}

/// The headers of a request as they go to the upstream: the end-to-end ones in their order, then the gate's.
///
/// `kept` are further names that `Connection` cannot strip. The attempt's token and the framing are the caller's to
/// add.
#[must_use]
pub fn to_upstream(headers: HeaderMap, kept: &[HeaderName], info: ForwardingInfo<'_>) -> HeaderMap {
    let options = ConnectionOptions::of(&headers);
    let strippable =
        |name: &HeaderName| options.contains(name) && !NEVER_STRIPPED.contains(&name.as_str()) && !kept.contains(name);
    let forwarded = match info.peer.may_be_trusted {
        true => info.forwarding.trusted_headers(info.peer.ip, &headers),
        false => ForwardedHeaders::default(),
    };
    // Only `trailers` has a meaning beyond this connection.
    let takes_trailers = has_token(&headers, &TE, "trailers");
    let other_attempt = info.own.other_attempt();
    let is_alias = aliases(kept, info.own);
    let mut out = without(headers, |name| {
        is_hop_by_hop(name)
            // A text comparison, because this runs for every header of every request.
            || matches!(
                name.as_str(),
                "idempotency-attempt" | "forwarded" | "x-forwarded-for" | "x-forwarded-host" | "x-forwarded-proto"
            )
            || strippable(name)
            || other_attempt == Some(name)
            || is_alias(name)
    });
    if let Some(host) = info.peer.host {
        out.insert(HOST, host.clone());
    }
    info.forwarding.write(&forwarded, info.peer, &mut out);
    out.append(VIA, info.via.clone());
    continue_or_start_trace(&mut out, info.request, info.span);
    if takes_trailers {
        // `TE` must be listed in `Connection` (RFC 9110, 10.1.4).
        out.insert(TE, HeaderValue::from_static("trailers"));
        out.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    out
}

/// The headers of an answer that go on to the client, in their order: the end-to-end ones without `dropped`.
#[must_use]
pub fn to_client(headers: HeaderMap, dropped: &[HeaderName]) -> HeaderMap {
    let options = ConnectionOptions::of(&headers);
    // Beside chunks a length means nothing, and must not be passed on (RFC 9112, 6.3).
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    without(headers, |name| {
        let strippable = if *name == CONTENT_LENGTH { chunked } else { options.contains(name) };
        is_hop_by_hop(name) || *name == CONTROL || dropped.contains(name) || strippable
    })
}

/// A map without the headers that are to go, in the order of the others.
fn without(mut headers: HeaderMap, is_dropped: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    let Some(first) = headers.keys().position(&is_dropped) else { return headers };
    if headers.keys().skip(first).all(&is_dropped) {
        // Taking the last one out leaves the others where they are.
        while headers.keys_len() > first
            && let Some(last) = headers.keys().last().cloned()
        {
            headers.remove(last);
        }
        return headers;
    }
    // Taking out any other would move the last one into its place.
    let mut out = HeaderMap::with_capacity(headers.len() + 6);
    let mut kept = None;
    for (name, value) in headers {
        // A name comes with the first of its values only.
        if let Some(name) = name {
            kept = Some(name).filter(|name| !is_dropped(name));
        }
        if let Some(name) = &kept {
            out.append(name, value);
        }
    }
    out
}

/// The prefix of every gate's pseudonym.
const GATE: &[u8] = b"oncegate";

/// The maximum number of gates on the path of a request.
const MOST_GATES: usize = 10;

/// Why a request goes round in circles, or probably does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Loop {
    /// It passed this gate before.
    #[error("the request came by here before: the gate is its own upstream, or that of another (see Via)")]
    CameBack,
    /// It passed more gates than a request may pass.
    #[error("the request has passed more than ten gates, and goes no further (see Via)")]
    TooManyGates,
}

/// The unique pseudonym of this process in `Via` (RFC 9110, 7.6.3), by which it recognises its own requests.
#[derive(Clone, Debug)]
pub struct Via {
    /// For HTTP/1.1, HTTP/1.0 and HTTP/2.
    lines: [HeaderValue; 3],
}

impl Via {
    /// A new one.
    #[must_use]
    pub fn new() -> Self {
        let name = format!("oncegate-{:016x}", fastrand::u64(..));
        let line = |version: &str| {
            let line = HeaderValue::from_str(&format!("{version} {name}"));
            // It is nothing but visible ASCII.
            line.unwrap_or_else(|_| HeaderValue::from_static("1.1 oncegate"))
        };
        Self { lines: ["1.1", "1.0", "2.0"].map(line) }
    }

    /// The entry for a request of this version.
    #[must_use]
    pub fn line(&self, version: Version) -> &HeaderValue {
        match version {
            Version::HTTP_2 => &self.lines[2],
            Version::HTTP_10 => &self.lines[1],
            _ => &self.lines[0],
        }
    }

    /// Why a request goes no further, if it passed this gate before, or too many gates.
    #[must_use]
    pub fn find_loop(&self, headers: &HeaderMap) -> Option<Loop> {
        let own = received_by(self.lines[0].as_bytes());
        let mut gates = 0;
        for by in headers.get_all(VIA).iter().flat_map(tokens).map(received_by) {
            gates += usize::from(by.starts_with(GATE));
            if by == own {
                return Some(Loop::CameBack);
            }
            if gates > MOST_GATES {
                return Some(Loop::TooManyGates);
            }
        }
        None
    }
}

impl Default for Via {
    fn default() -> Self {
        Self::new()
    }
}

/// The `received-by` part of a list member.
fn received_by(member: &[u8]) -> &[u8] {
    let mut words = member.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    words.nth(1).unwrap_or_default()
}

/// Whether a host is written as nearly all are: a name or an IPv4 address in lower case, with a port that is not the
/// default one or with none. It is sound, and normal.
#[must_use]
pub fn is_usual_host(host: &str) -> bool {
    static OF_NAMES: ByteSet = ByteSet::lower_case_and(b"-.");
    let (name, port) = host.split_at(OF_NAMES.span(host));
    let port_is_usual = |port: &str| {
        let is_short = (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
        is_short && !port.starts_with('0') && port != "80" && port.parse::<u16>().is_ok()
    };
    !name.is_empty() && !name.ends_with('.') && (port.is_empty() || port.strip_prefix(':').is_some_and(port_is_usual))
}

/// Whether this is a host with an optional port (`uri-host [ ":" port ]`, RFC 9110, 7.2), without a user. It may be empty, where the target has no authority.
#[must_use]
pub fn is_host(host: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_sound = |authority: Authority| {
        let name = authority.host();
        // Nothing but a port stands behind an address in brackets.
        let rest = &authority.as_str()[name.len()..];
        !name.is_empty()
            && (rest.is_empty() || rest.strip_prefix(':').is_some_and(|port| port.is_empty() || is_port(port)))
    };
    host.is_empty() || !host.contains('@') && host.parse::<Authority>().is_ok_and(is_sound)
}

/// A host in lower case, without the default port and the final dot of a name (RFC 9110, 4.2.3); nothing where it is
/// written so already.
#[must_use]
pub fn normal_host(host: &str, default_port: &str) -> Option<String> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    };
    let mut normal = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    // A port is a number (RFC 3986, 3.2.3).
    let number = port.trim_start_matches('0');
    if !port.is_empty() && default_port.strip_prefix(':') != Some(number) {
        normal.push(':');
        normal.push_str(if number.is_empty() { "0" } else { number });
    }
    Some(normal).filter(|normal| normal != host)
}

/// A set of bytes, as a lookup table.
struct ByteSet([bool; 256]);

impl ByteSet {
    /// Lower-case ASCII letters, digits, and `others`.
    const fn lower_case_and(others: &[u8]) -> Self {
        let mut set = [false; 256];
        let mut byte = 0;
        while byte < set.len() {
            let char = byte as u8;
            set[byte] = char.is_ascii_lowercase() || char.is_ascii_digit();
            byte += 1;
        }
        let mut place = 0;
        while place < others.len() {
            set[others[place] as usize] = true;
            place += 1;
        }
        Self(set)
    }

    /// Whether this one is in it.
    fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte)]
    }

    /// The number of bytes before the first that is not in the set.
    fn span(&self, text: &str) -> usize {
        text.bytes().position(|byte| !self.has(byte)).unwrap_or(text.len())
    }
}

/// The lines of some headers, in their order.
pub fn lines(headers: &HeaderMap) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    headers.iter().map(|(name, value)| (name.clone(), value.clone()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).fold(
            HeaderMap::new(),
            |mut map, (name, value)| {
                map.append(name, value);
                map
            },
        )
    }

    /// The headers as they go to the upstream, from a client at 127.0.0.9.
    fn onward(headers: HeaderMap, kept: &[HeaderName]) -> HeaderMap {
        onward_with(headers, kept, &OwnHeaders::default())
    }

    fn onward_with(headers: HeaderMap, kept: &[HeaderName], own: &OwnHeaders) -> HeaderMap {
        let (address, via) = (HeaderValue::from_static("127.0.0.9"), HeaderValue::from_static("1.1 gate"));
        let peer = PeerInfo {
            ip: std::net::Ipv4Addr::new(127, 0, 0, 9).into(),
            may_be_trusted: true,
            header_value: &address,
            is_secure: false,
            host: None,
        };
        to_upstream(
            headers,
            kept,
            ForwardingInfo {
                peer,
                forwarding: &Forwarding::default(),
                own,
                via: &via,
                request: forwarding::new_request_id(),
                span: None,
            },
        )
    }

    #[test]
    fn connection_strips_what_it_lists_but_not_what_counts() {
        let kept = ["x-tenant"].map(HeaderName::from_static);
        let mut headers = map(&[("connection", "x-private, X-Tenant"), ("x-private", "1"), ("x-tenant", "t")]);
        for name in NEVER_STRIPPED {
            headers.append(CONNECTION, HeaderValue::from_static(name));
            headers.append(name, HeaderValue::from_static("given"));
        }
        let out = onward(headers, &kept);
        assert!(!out.contains_key("x-private") && !out.contains_key("connection"));
        for name in NEVER_STRIPPED.into_iter().chain(["x-tenant"]) {
            let is_dropped = matches!(name, "forwarded" | "idempotency-attempt" | "tracestate" | "x-forwarded-host");
            assert_eq!(out.contains_key(name), !is_dropped, "{name}");
        }
        assert_eq!(out.get_all(VIA).iter().collect::<Vec<_>>(), ["given", "1.1 gate"]);
        assert_eq!(out["x-forwarded-for"], "127.0.0.9");
        assert_eq!(out["x-forwarded-proto"], "http");
    }

    /// A list that is as long as a head may be must not be searched for each of its headers.
    #[test]
    fn connection_options_are_those_headers_that_are_there() {
        let long = format!("{}close, x-a, X-A,x-missing, x-a{}", ",".repeat(30_000), ", x-b".repeat(10_000));
        let mut headers = map(&[("x-a", "1"), ("x-c", "1")]);
        headers.append(CONNECTION, HeaderValue::from_str(&long).unwrap());
        headers.append(CONNECTION, HeaderValue::from_static("x-c"));
        let ConnectionOptions(options) = ConnectionOptions::of(&headers);
        assert_eq!(options, ["x-a", "x-c"].map(HeaderName::from_static).into());
    }

    #[test]
    fn a_clients_own_attempt_and_forwarding_headers_are_dropped() {
        let forged = [("idempotency-attempt", "forged"), ("x-forwarded-for", "1.2.3.4"), ("forwarded", "for=1.2.3.4")];
        let out = onward(map(&forged), &[]);
        assert!(!out.contains_key(ATTEMPT) && !out.contains_key("forwarded"));
        assert_eq!(out["x-forwarded-for"], "127.0.0.9");
    }

    #[test]
    fn an_attempts_other_name_is_dropped_too() {
        let named = |name: Option<&'static str>| OwnHeaders { attempt: name.map(HeaderName::from_static), key: None };
        let lines = [("idempotency-attempt", "1"), ("x-run", "2"), ("x_run", "3"), ("x-runs", "4")];
        for (own, left) in [(named(Some("x-run")), &["x-runs"][..]), (named(None), &["x-run", "x_run", "x-runs"])] {
            let out = onward_with(map(&lines), &[], &own);
            let names: Vec<_> =
                out.keys().map(HeaderName::as_str).filter(|name| name.starts_with(['i', 'x'])).collect();
            let names: Vec<_> = names.into_iter().filter(|name| !name.starts_with("x-forwarded")).collect();
            assert_eq!(names, left);
        }
    }

    #[test]
    fn a_trace_is_passed_on_or_begun() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(onward(map(&[("traceparent", given)]), &[])["traceparent"], given);
        assert_eq!(onward(map(&[]), &[])["traceparent"].len(), 55);
    }

    #[test]
    fn cgi_aliases_of_headers_are_dropped() {
        let kept = ["x-tenant"].map(HeaderName::from_static);
        let lines = [
            "x_forwarded_for",
            "x-forwarded_for",
            "x.forwarded.host",
            "idempotency_key",
            "idempotency_attempt",
            "content_length",
            "transfer_encoding",
            "x_tenant",
            "x_real_ip",
        ];
        let harmless = ["x_request_id", "x_tenants", "x-tenant", "_", "x_forwarded_fox"];
        let all: Vec<_> = lines.into_iter().chain(harmless).map(|name| (name, "1")).collect();
        let out = onward(map(&all), &kept);
        for name in lines {
            assert!(!out.contains_key(name), "{name}");
        }
        for name in harmless {
            assert!(out.contains_key(name), "{name}");
        }
    }

    /// A route may read keys and scopes from headers whose names have underscores.
    #[test]
    fn a_configured_name_is_kept_and_what_is_taken_for_it_is_not() {
        let kept = ["idempotency_key", "my_tenant"].map(HeaderName::from_static);
        let lines =
            ["idempotency_key", "idempotency-key", "my_tenant", "my-tenant", "my.tenant", "x-request-id", "my-tenants"];
        let out = onward(map(&lines.map(|name| (name, "1"))), &kept);
        let gone: Vec<_> = lines.into_iter().filter(|name| !out.contains_key(*name)).collect();
        assert_eq!(gone, ["idempotency-key", "my-tenant", "my.tenant"]);
    }

    #[test]
    fn what_is_taken_for_the_gates_own_headers_is_dropped() {
        let name = |name: &'static str| Some(HeaderName::from_static(name));
        let own = OwnHeaders { attempt: name("x_attempt"), key: name("x-request-id") };
        let is_alias = aliases(&[], &own);
        for alias in ["x-attempt", "x.attempt", "x_request_id"] {
            assert!(is_alias(&HeaderName::from_static(alias)), "{alias}");
        }
        for other in ["x-attempts", "x-request-idx", "x_requests_id"] {
            assert!(!is_alias(&HeaderName::from_static(other)), "{other}");
        }
    }

    #[test]
    fn answers_keep_order_and_repeats() {
        let headers = map(&[
            ("set-cookie", "a"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("etag", "e"),
            ("set-cookie", "b"),
            ("idempotency-control", "no-store"),
            ("date", "d"),
        ]);
        let out = to_client(headers, &[]);
        let lines: Vec<_> = out.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(lines, [("set-cookie", "a"), ("set-cookie", "b"), ("etag", "e"), ("date", "d")]);
    }

    #[test]
    fn headers_that_go_last_leave_the_others_in_order() {
        let lines = [("server", "s"), ("set-cookie", "a"), ("date", "d"), ("connection", "close"), ("te", "x")];
        for dropped in 0..=lines.len() {
            let (kept, last) = (map(&lines[..3]), map(&lines[..dropped]));
            let out = without(map(&lines), |name| last.contains_key(name) || !kept.contains_key(name));
            let expected: Vec<_> = lines[..3].iter().skip(dropped).map(|(name, _)| *name).collect();
            assert_eq!(out.keys().collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_length_beside_chunks_is_dropped() {
        let headers = map(&[("content-length", "3"), ("transfer-encoding", "chunked"), ("etag", "e")]);
        let out = to_client(headers, &[]);
        assert!(!out.contains_key(CONTENT_LENGTH));
        assert!(out.contains_key("etag"));
    }

    /// h2 does not send a message that has one, and does not end its stream either.
    #[test]
    fn no_trailer_is_for_one_connection() {
        for name in
            ["connection", "transfer-encoding", "te", "upgrade", "keep-alive", "proxy-connection", "http2-settings"]
        {
            let trailers = without_forbidden_fields(map(&[("x-sum", " 9 "), (name, "v"), ("x-more", "1")]));
            assert_eq!(trailers, map(&[("x-sum", "9"), ("x-more", "1")]), "{name}");
        }
    }

    #[test]
    fn te_keeps_only_trailers() {
        let out = onward(map(&[("te", "gzip, trailers;q=1, Trailers")]), &[]);
        assert_eq!(out[TE], "trailers");
        assert_eq!(out[CONNECTION], "te");
        assert!(!onward(map(&[("te", "gzip")]), &[]).contains_key(TE));
    }

    fn headers(lines: &[&str]) -> HeaderMap {
        lines.iter().map(|line| (VIA, HeaderValue::from_str(line).unwrap())).collect::<Vec<_>>().into_iter().fold(
            HeaderMap::new(),
            |mut headers, (name, line)| {
                headers.append(name, line);
                headers
            },
        )
    }

    #[test]
    fn a_gate_knows_itself_and_no_other() {
        let (via, other) = (Via::new(), Via::new());
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
            let own = via.line(version).to_str().unwrap();
            assert_eq!(via.find_loop(&headers(&[own])), Some(Loop::CameBack));
            let among_others = headers(&["1.1 a", &format!("1.0 b (x), {own}  (comment) ,1.1 c")]);
            assert_eq!(via.find_loop(&among_others), Some(Loop::CameBack), "{own}");
            assert_eq!(other.find_loop(&headers(&[own])), None);
            assert_eq!(via.find_loop(&headers(&[&format!("{own}0"), "1.1 oncegate", "", ","])), None);
        }
    }

    #[test]
    fn too_many_gates_are_a_loop() {
        let line = |gates: usize| (0..gates).map(|gate| format!("1.1 oncegate-{gate}")).collect::<Vec<_>>().join(", ");
        assert_eq!(Via::new().find_loop(&headers(&[&line(MOST_GATES)])), None);
        let eleven = headers(&[&line(4), &line(MOST_GATES - 3)]);
        assert_eq!(Via::new().find_loop(&eleven), Some(Loop::TooManyGates));
    }

    #[test]
    fn hosts_are_recognised() {
        for host in ["", "a", "a.example:8080", "127.0.0.1:1", "[::1]", "[::1]:80", "a:"] {
            assert!(is_host(host), "{host}");
        }
        for host in [
            "a b",
            "a/c",
            "u@h",
            "h:99999",
            "[::1",
            "[::1:80",
            ":80",
            "h:x",
            "h:+80",
            "[::1].evil",
            "[::1]a:80",
            "a[::1]",
        ] {
            assert!(!is_host(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn usual_hosts_are_sound_and_normal(host in "[a-c.:\\[\\]@A%-]{0,4}(:[0-9]{0,6})?|[a-z0-9.-]{1,9}(:(80|8080|65535|65536|0?80))?") {
            if is_usual_host(&host) {
                prop_assert!(is_host(&host));
                prop_assert_eq!(normal_host(&host, ":80"), None);
            }
        }
    }

    #[test]
    fn spellings_of_one_host_are_one() {
        for host in [
            "api.example",
            "API.example",
            "api.example:80",
            "api.example.",
            "api.example.:80",
            "api.example:",
            "api.example:080",
        ] {
            assert_eq!(normal_host(host, ":80").as_deref().unwrap_or(host), "api.example", "{host}");
        }
        for (written, expected) in [
            ("api.example", None),
            ("api.example.:8080", Some("api.example:8080")),
            ("api.example:08080", Some("api.example:8080")),
            ("api.example:00", Some("api.example:0")),
            ("[::1]", None),
            ("[::1]:80", Some("[::1]")),
            ("[::1]:8080", None),
            ("", None),
        ] {
            assert_eq!(normal_host(written, ":80").as_deref(), expected, "{written}");
        }
    }

    #[test]
    fn a_set_contains_its_bytes() {
        const SET: ByteSet = ByteSet::lower_case_and(b"-.");
        for byte in 0..=u8::MAX {
            assert_eq!(SET.has(byte), matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'), "{byte}");
        }
        assert_eq!((SET.span("a-9.A"), SET.span("abc"), SET.span("")), (4, 3, 0));
    }
}
