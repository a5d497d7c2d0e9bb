//! Which headers pass, and which the gate adds on the way to the upstream.

use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA};
use http::{HeaderMap, HeaderName, HeaderValue, Version};

use crate::idempotency::hex;

/// The token of an attempt, for the upstream.
pub const ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");
/// What an upstream says of its answer.
pub const CONTROL: HeaderName = HeaderName::from_static("idempotency-control");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Whether a header is for one connection only (RFC 9110, 7.6.1; `HTTP2-Settings`: RFC 7540, 3.2.1).
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection" | "transfer-encoding" | "te" | "upgrade" | "keep-alive" | "proxy-connection" | "http2-settings"
    )
}

/// The names that `Connection` lists.
fn connection_names(headers: &HeaderMap) -> Vec<HeaderName> {
    headers.get_all(CONNECTION).iter().flat_map(tokens).filter_map(|name| HeaderName::from_bytes(name).ok()).collect()
}

/// The members of a comma-separated list, trimmed.
fn tokens(value: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Whether a comma-separated list header has `token`, in whatever case.
#[must_use]
pub fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    headers.get_all(name).iter().flat_map(tokens).any(|member| member.eq_ignore_ascii_case(token.as_bytes()))
}

/// Whether a message says beyond doubt where it ends: by one length, or by `chunked` and no other transfer coding, not by
/// both (RFC 9112, 6.1 and 6.3). hyper would take one for the other, and would leave a coding without its label.
#[must_use]
pub fn framing_is_plain(headers: &HeaderMap) -> bool {
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

/// Whether a request asks for an upgrade that may be passed on (RFC 9110, 7.8).
///
/// One to `h2c` is not: behind it, requests would pass the gate unseen. It is ignored, as any server may.
#[must_use]
pub fn asks_upgrade(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_11
        && headers.contains_key(UPGRADE)
        && has_token(headers, &CONNECTION, "upgrade")
        && !has_token(headers, &UPGRADE, "h2c")
}

/// Trailers without the names that only the gate and the upstream say to each other.
#[must_use]
pub fn without_ours(mut trailers: HeaderMap) -> HeaderMap {
    trailers.remove(ATTEMPT);
    trailers.remove(CONTROL);
    trailers
}

/// Announces `trailers` where nothing does: hyper sends only what was announced (RFC 9110, 6.6.2).
pub fn announce_trailers(headers: &mut HeaderMap, trailers: &HeaderMap) {
    if !headers.contains_key(TRAILER) {
        let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
        if let Ok(value) = HeaderValue::from_str(&names.join(", ")) {
            headers.insert(TRAILER, value);
        }
    }
}

/// What the gate knows of a request besides its headers.
#[derive(Clone, Copy, Debug)]
pub struct Forwarded<'a> {
    /// The client's address.
    pub client: Option<&'a HeaderValue>,
    /// The host that the request names, as it was written.
    pub host: Option<&'a HeaderValue>,
    /// The version that it came in.
    pub version: Version,
}

/// The headers of a request as they go to the upstream: the end-to-end ones in their order, then the gate's.
///
/// `kept` are names that no `Connection` can strip. The attempt's token and the framing are the caller's to add.
#[must_use]
pub fn to_upstream(headers: HeaderMap, kept: &[HeaderName], forwarded: Forwarded<'_>) -> HeaderMap {
    let listed = connection_names(&headers);
    let strippable = |name: &HeaderName| {
        listed.contains(name) && *name != HOST && *name != CONTENT_LENGTH && *name != TRAILER && !kept.contains(name)
    };
    // Only this much of TE means anything beyond this connection.
    let takes_trailers = has_token(&headers, &TE, "trailers");
    let mut out = without(headers, |name| {
        is_hop_by_hop(name)
            || matches!(
                name.as_str(),
                "idempotency-attempt" | "x-forwarded-for" | "x-forwarded-proto" | "x-forwarded-host"
            )
            || strippable(name)
    });
    if let Some(host) = forwarded.host {
        out.insert(HOST, host.clone());
        out.insert(X_FORWARDED_HOST, host.clone());
    }
    if let Some(client) = forwarded.client {
        out.insert(X_FORWARDED_FOR, client.clone());
    }
    out.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
    let via = if forwarded.version == Version::HTTP_10 { "1.0 oncegate" } else { "1.1 oncegate" };
    out.append(VIA, HeaderValue::from_static(via));
    if !out.contains_key(TRACEPARENT)
        && let Some(value) = new_traceparent()
    {
        out.insert(TRACEPARENT, value);
    }
    if takes_trailers {
        // It is announced as what it is.
        out.insert(TE, HeaderValue::from_static("trailers"));
        out.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    out
}

/// The headers of an answer that go on to the client, in their order: the end-to-end ones without `dropped`.
#[must_use]
pub fn to_client(headers: HeaderMap, dropped: &[HeaderName]) -> HeaderMap {
    let listed = connection_names(&headers);
    // Beside chunks a length means nothing, and must not be passed on (RFC 9112, 6.3).
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    without(headers, |name| {
        let strippable = if *name == CONTENT_LENGTH { chunked } else { listed.contains(name) };
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
    for (name, value) in &headers {
        if !is_dropped(name) {
            out.append(name, value.clone());
        }
    }
    out
}

/// A trace that begins here (W3C Trace Context, 3.2): sampling is left to others.
fn new_traceparent() -> Option<HeaderValue> {
    // Neither id may be all zeroes. They are to be unique, not secret.
    let (trace, span) = (fastrand::u128(1..), fastrand::u64(1..));
    let mut text = *b"00-................................-................-00";
    hex::write(&trace.to_be_bytes(), &mut text[3..35]);
    hex::write(&span.to_be_bytes(), &mut text[36..52]);
    HeaderValue::from_bytes(&text).ok()
}

#[cfg(test)]
mod tests {
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

    const NOBODY: Forwarded<'static> = Forwarded { client: None, host: None, version: Version::HTTP_11 };

    #[test]
    fn connection_strips_what_it_lists_but_not_what_counts() {
        let headers = map(&[
            ("host", "a"),
            ("connection", "x-private, host, idempotency-key, Content-Length, authorization"),
            ("x-private", "1"),
            ("idempotency-key", "k"),
            ("authorization", "t"),
            ("content-length", "3"),
        ]);
        let kept = [HeaderName::from_static("idempotency-key"), http::header::AUTHORIZATION];
        let out = to_upstream(headers, &kept, NOBODY);
        assert!(!out.contains_key("x-private"));
        assert!(!out.contains_key("connection"));
        for name in ["host", "idempotency-key", "authorization", "content-length"] {
            assert!(out.contains_key(name), "{name}");
        }
    }

    #[test]
    fn a_clients_own_attempt_and_forwarding_headers_are_dropped() {
        let headers = map(&[("idempotency-attempt", "forged"), ("x-forwarded-for", "1.2.3.4")]);
        let client = HeaderValue::from_static("127.0.0.9");
        let out = to_upstream(headers, &[], Forwarded { client: Some(&client), ..NOBODY });
        assert!(!out.contains_key(ATTEMPT));
        assert_eq!(out[X_FORWARDED_FOR], "127.0.0.9");
    }

    #[test]
    fn a_trace_is_passed_on_or_begun() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(to_upstream(map(&[("traceparent", given)]), &[], NOBODY)[TRACEPARENT], given);
        let begun = to_upstream(map(&[]), &[], NOBODY)[TRACEPARENT].clone();
        assert_eq!(begun.len(), 55);
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

    #[test]
    fn only_harmless_upgrades_are_passed_on() {
        let websocket = map(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert!(asks_upgrade(Version::HTTP_11, &websocket));
        assert!(!asks_upgrade(Version::HTTP_10, &websocket));
        let h2c = map(&[("connection", "upgrade, http2-settings"), ("upgrade", "h2c")]);
        assert!(!asks_upgrade(Version::HTTP_11, &h2c));
    }

    #[test]
    fn te_keeps_only_trailers() {
        let out = to_upstream(map(&[("te", "gzip, trailers;q=1, Trailers")]), &[], NOBODY);
        assert_eq!(out[TE], "trailers");
        assert_eq!(out[CONNECTION], "te");
        assert!(!to_upstream(map(&[("te", "gzip")]), &[], NOBODY).contains_key(TE));
    }
}
