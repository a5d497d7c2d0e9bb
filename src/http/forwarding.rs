//! Forwarding headers, `X-Forwarded-*` and `Forwarded` (RFC 7239), and the trace of a request, `traceparent` and
//! `tracestate` (W3C Trace Context).
//!
//! Any client can write the forwarding headers. The gate trusts them only on connections from trusted proxies, and only the
//! entries that trusted proxies wrote. The upstream gets only headers that the gate vouches for.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

use http::header::FORWARDED;
use http::{HeaderMap, HeaderName, HeaderValue};
use ipnet::IpNet;

use crate::idempotency::record::{RequestId, write_hex};
use crate::telemetry::spans::{Parent, SpanContext};

/// `X-Forwarded-For`
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// `X-Forwarded-Proto`
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// `X-Forwarded-Host`
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// All forwarding headers: none is forwarded unchanged.
pub const NAMES: [HeaderName; 4] = [X_FORWARDED_FOR, X_FORWARDED_PROTO, X_FORWARDED_HOST, FORWARDED];

/// Names the trace of a request and the span that it comes from.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Vendor-specific trace data.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Which forwarding headers are trusted and written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forwarding {
    /// `[server] trusted_proxies`
    pub trusted: Vec<IpNet>,
    /// `[server] forwarded`
    pub style: Style,
    /// Whether `[server] proxy_protocol` is set: proxies name the client.
    pub is_proxied: bool,
}

/// Which forwarding headers are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// `X-Forwarded-For`, `-Proto` and `-Host`.
    #[default]
    XForwarded,
    /// `Forwarded` (RFC 7239).
    Rfc7239,
    /// All of them. If they disagree about the client, none is trusted.
    Both,
}

impl Forwarding {
    /// The rule for client addresses in one line; empty if no proxy is trusted.
    #[must_use]
    pub fn rule(&self) -> String {
        let is_proxied = if self.is_proxied { " by the PROXY protocol" } else { "" };
        if self.trusted.is_empty() {
            return is_proxied.to_owned();
        }
        let mut networks: Vec<String> = self.trusted.iter().map(ToString::to_string).collect();
        networks.sort();
        networks.dedup();
        format!("{:?} {}{is_proxied}", self.style, networks.join(" "))
    }
}

impl Style {
    fn has_x_forwarded(self) -> bool {
        matches!(self, Self::XForwarded | Self::Both)
    }

    fn has_rfc_7239(self) -> bool {
        matches!(self, Self::Rfc7239 | Self::Both)
    }
}

/// The peer of a request, for the forwarding headers.
#[derive(Clone, Copy, Debug)]
pub struct PeerInfo<'a> {
    /// Its address.
    pub ip: IpAddr,
    /// Whether its forwarding headers may be trusted.
    pub may_be_trusted: bool,
    /// Its address as a header value.
    pub header_value: &'a HeaderValue,
    /// Whether the connection is encrypted.
    pub is_secure: bool,
    /// The host that the request names, as it was written.
    pub host: Option<&'a HeaderValue>,
}

impl PeerInfo<'_> {
    /// The scheme of the request.
    fn proto(self) -> &'static str {
        if self.is_secure { "https" } else { "http" }
    }
}

/// A `Forwarded` line that violates RFC 7239, section 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedForwarded;

impl Forwarding {
    /// Whether this address is a trusted proxy's.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// The client that a request comes from: the nearest address that is not trusted. Where a header names none, or goes
    /// on with what is no address (`unknown`, an obfuscated identifier), it is the last one that is known.
    ///
    /// # Errors
    /// A `Forwarded` line is malformed: what a client wrote and what a proxy appended to it cannot be told apart.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, MalformedForwarded> {
        if self.trusted.is_empty() || !self.trusts(peer) {
            return Ok(peer);
        }
        let client_of = |is_read: bool, name: HeaderName, read: fn(&str) -> Option<Vec<Cow<'_, str>>>| {
            let is_there = is_read && headers.contains_key(&name);
            is_there.then(|| self.nearest(peer, headers, &name, read)).transpose()
        };
        let x_forwarded = client_of(self.style.has_x_forwarded(), X_FORWARDED_FOR, addresses)?;
        let rfc_7239 = client_of(self.style.has_rfc_7239(), FORWARDED, forwarded_for)?;
        Ok(match (x_forwarded, rfc_7239) {
            (Some(one), Some(other)) if one != other => peer,
            (Some(client), _) | (None, Some(client)) => client,
            (None, None) => peer,
        })
    }

    /// From the right, that is from the proxy before us to the client.
    fn nearest(
        &self,
        peer: IpAddr,
        headers: &HeaderMap,
        name: &HeaderName,
        read: fn(&str) -> Option<Vec<Cow<'_, str>>>,
    ) -> Result<IpAddr, MalformedForwarded> {
        let mut last = peer;
        let lines: Vec<_> = headers.get_all(name).iter().collect();
        for line in lines.into_iter().rev() {
            let line = String::from_utf8_lossy(line.as_bytes());
            let entries = read(&line).ok_or(MalformedForwarded)?;
            for entry in entries.iter().rev() {
                let Some(address) = address(entry) else { return Ok(last) };
                last = address;
                if !self.trusts(address) {
                    return Ok(address);
                }
            }
        }
        Ok(last)
    }

    /// Writes the forwarding headers to `out`: the trusted entries of `was`, then this hop. `out` has none of
    /// [`NAMES`] before.
    pub fn write(&self, was: &ForwardedHeaders, peer_info: PeerInfo<'_>, out: &mut HeaderMap) {
        if self.style.has_x_forwarded() {
            let before = was.lines.iter().filter(|(name, _)| *name == X_FORWARDED_FOR).map(|(_, value)| value);
            out.insert(X_FORWARDED_FOR, joined(before, peer_info.header_value));
            let proto = HeaderValue::from_static(peer_info.proto());
            for (name, own) in [(X_FORWARDED_PROTO, Some(&proto)), (X_FORWARDED_HOST, peer_info.host)] {
                let mut is_present = false;
                for (_, value) in was.lines.iter().filter(|(field, _)| *field == name) {
                    out.append(name.clone(), value.clone());
                    is_present = true;
                }
                if let (false, Some(own)) = (is_present, own) {
                    out.insert(name, own.clone());
                }
            }
        }
        if self.style.has_rfc_7239()
            && let Some(own) = element(peer_info)
        {
            let before = was.lines.iter().filter(|(name, _)| *name == FORWARDED).map(|(_, value)| value);
            out.insert(FORWARDED, joined(before, &own));
        }
    }

    /// The forwarding headers of a request if its peer is trusted; else none.
    #[must_use]
    pub fn trusted_headers(&self, peer: IpAddr, headers: &HeaderMap) -> ForwardedHeaders {
        if self.trusted.is_empty() || !self.trusts(peer) {
            return ForwardedHeaders::default();
        }
        let lines = |name: HeaderName| {
            let values: Vec<_> = headers.get_all(&name).iter().cloned().collect();
            values.into_iter().map(move |value| (name.clone(), value))
        };
        ForwardedHeaders { lines: NAMES.into_iter().flat_map(lines).collect() }
    }
}

/// Forwarding headers from a trusted proxy.
#[derive(Clone, Debug, Default)]
pub struct ForwardedHeaders {
    lines: Vec<(HeaderName, HeaderValue)>,
}

/// The members of lists, then one more.
fn joined<'a>(before: impl Iterator<Item = &'a HeaderValue>, own: &HeaderValue) -> HeaderValue {
    let mut text: Vec<u8> = Vec::new();
    for line in before.filter(|line| !line.as_bytes().trim_ascii().is_empty()) {
        text.extend_from_slice(line.as_bytes());
        text.extend_from_slice(b", ");
    }
    if text.is_empty() {
        return own.clone();
    }
    text.extend_from_slice(own.as_bytes());
    HeaderValue::from_bytes(&text).unwrap_or_else(|_| own.clone())
}

/// This hop as a `Forwarded` element (RFC 7239, section 4).
fn element(peer_info: PeerInfo<'_>) -> Option<HeaderValue> {
    let node = match peer_info.ip {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("\"[{address}]\""),
    };
    let host = peer_info.host.and_then(|host| host.to_str().ok()).filter(|host| !host.contains(['"', '\\']));
    let host = host.map_or_else(String::new, |host| format!(";host=\"{host}\""));
    HeaderValue::from_str(&format!("for={node}{host};proto={}", peer_info.proto())).ok()
}

/// The entries of `X-Forwarded-For`.
fn addresses(line: &str) -> Option<Vec<Cow<'_, str>>> {
    Some(line.split(',').map(|entry| Cow::Borrowed(entry.trim())).collect())
}

/// An address, with or without a port and brackets.
fn address(entry: &str) -> Option<IpAddr> {
    let bracketed = entry.strip_prefix('[').and_then(|entry| entry.strip_suffix(']'));
    let address = match bracketed {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().ok()?.into(),
        None => entry.parse::<IpAddr>().or_else(|_| entry.parse::<SocketAddr>().map(|socket| socket.ip())).ok()?,
    };
    Some(address.to_canonical())
}

/// The `for` of each element of a `Forwarded` line; empty where an element has none. `None` where the line violates
/// RFC 7239, section 4: an unclosed quote from a client must not swallow an element that a proxy appended.
fn forwarded_for(line: &str) -> Option<Vec<Cow<'_, str>>> {
    let mut found = Vec::new();
    let mut rest = line.trim_matches([' ', '\t']);
    loop {
        let (mut node, mut is_present) = (Cow::Borrowed(""), false);
        // Empty list members and pairs count for nothing, as RFC 9110, section 5.6.1, has it.
        loop {
            let end = rest.bytes().position(|next| !is_token(next)).unwrap_or(rest.len());
            let name = &rest[..end];
            if !name.is_empty() {
                let (value, after) = value(rest[end..].strip_prefix('=')?)?;
                is_present = true;
                if name.eq_ignore_ascii_case("for") {
                    if !node.is_empty() {
                        return None;
                    }
                    node = value;
                }
                rest = after;
            }
            rest = rest.trim_start_matches([' ', '\t']);
            match rest.strip_prefix(';') {
                Some(after) => rest = after.trim_start_matches([' ', '\t']),
                None => break,
            }
        }
        if is_present {
            found.push(node);
        }
        if rest.is_empty() {
            return Some(found);
        }
        rest = rest.strip_prefix(',')?.trim_start_matches([' ', '\t']);
    }
}

/// A token or a quoted string (RFC 9110, 5.6.2 and 5.6.4), and what follows it. Addresses that should be quoted and are
/// not are taken too.
fn value(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.bytes().position(|next| !is_token(next) && !b"[]:".contains(&next)).unwrap_or(text.len());
        return (end > 0).then(|| (Cow::Borrowed(&text[..end]), &text[end..]));
    };
    let mut value = String::new();
    loop {
        let next = rest.chars().next()?;
        rest = &rest[next.len_utf8()..];
        match next {
            '"' => return Some((Cow::Owned(value), rest)),
            '\\' => {
                let escaped = rest.chars().next()?;
                rest = &rest[escaped.len_utf8()..];
                value.push(escaped);
            }
            _ => value.push(next),
        }
    }
}

/// Whether a byte may stand in a token (RFC 9110, 5.6.2).
pub(super) const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~')
}

/// Continues the trace of a request, or starts one if `traceparent` is missing, repeated or invalid (sections 3.2.2 and 4.3).
/// A new trace drops the `tracestate` of the old one. If the request has a span here, that is the parent of what follows.
pub fn continue_or_start_trace(headers: &mut HeaderMap, request: RequestId, span: Option<SpanContext>) {
    let is_continued = trace(headers).is_some();
    if !is_continued {
        headers.remove(TRACESTATE);
    }
    let new = match span {
        Some(span) => traceparent(span, *b"01"),
        None if is_continued => return,
        None => traceparent(SpanContext { trace: request.trace(), span: request.0.get() }, *b"00"),
    };
    match new {
        Some(value) => headers.insert(TRACEPARENT, value),
        None => headers.remove(TRACEPARENT),
    };
}

/// The id of the trace that a client sent, if there is one, and it is valid.
#[must_use]
pub fn trace(headers: &HeaderMap) -> Option<u128> {
    parent(headers).map(|parent| parent.context.trace)
}

/// The span that a request comes from, if its client says so, and that is valid.
#[must_use]
pub fn parent(headers: &HeaderMap) -> Option<Parent> {
    let mut given = headers.get_all(TRACEPARENT).iter();
    let (Some(only), None) = (given.next(), given.next()) else { return None };
    parent_of(only.as_bytes())
}

/// A new id for a request.
#[must_use]
pub fn new_request_id() -> RequestId {
    RequestId(NonZeroU64::new(fastrand::u64(1..)).unwrap_or(NonZeroU64::MIN))
}

/// The trace of a `traceparent`: version, trace, parent and flags. A version to come may have more behind them, after another
/// dash.
fn parent_of(value: &[u8]) -> Option<Parent> {
    const LENGTH: usize = 55;
    let (known, rest) = value.split_at_checked(LENGTH)?;
    let digits = |from: usize, to: usize| &known[from..to];
    let is_hex = |digits: &[u8]| digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let (version, trace, parent, flags) = (digits(0, 2), digits(3, 35), digits(36, 52), digits(53, 55));
    let is_zero = |digits: &[u8]| digits.iter().all(|digit| *digit == b'0');
    let is_valid = [2, 35, 52].iter().all(|dash| known[*dash] == b'-')
        && [version, trace, parent, flags].into_iter().all(is_hex)
        && version != b"ff"
        && (rest.is_empty() || version != b"00" && rest[0] == b'-')
        && !is_zero(trace)
        && !is_zero(parent);
    let text = |digits| str::from_utf8(digits).ok().filter(|_| is_valid);
    let context = SpanContext {
        trace: u128::from_str_radix(text(trace)?, 16).ok()?,
        span: u64::from_str_radix(text(parent)?, 16).ok()?,
    };
    Some(Parent { context, is_sampled: u8::from_str_radix(text(flags)?, 16).ok()? & 1 == 1 })
}

/// A span as the parent of what follows (section 3.2), with these flags.
fn traceparent(context: SpanContext, flags: [u8; 2]) -> Option<HeaderValue> {
    let mut text = *b"00-................................-................-..";
    write_hex(&context.trace.to_be_bytes(), &mut text[3..35]);
    write_hex(&context.span.to_be_bytes(), &mut text[36..52]);
    text[53..].copy_from_slice(&flags);
    HeaderValue::from_bytes(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarding(style: Style) -> Forwarding {
        let trusted = ["10.0.0.0/8", "fd00::/8", "127.0.0.1/32"];
        Forwarding { trusted: trusted.map(|network| network.parse().unwrap()).to_vec(), style, is_proxied: false }
    }

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        map
    }

    #[track_caller]
    fn client(style: Style, peer: &str, lines: &[(&'static str, &'static str)], expected: &str) {
        let found = forwarding(style).client(peer.parse().unwrap(), &map(lines));
        let found = found.map_or_else(|MalformedForwarded| "malformed".to_owned(), |client| client.to_string());
        assert_eq!(found, expected, "{peer} {lines:?}");
    }

    #[test]
    fn the_client_is_the_nearest_address_that_is_not_trusted() {
        let x = |line| [("x-forwarded-for", line)];
        for (peer, line, expected) in [
            ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
            ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
            ("10.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),
            ("10.0.0.1", "1.1.1.1, 198.51.100.7, 10.2.3.4", "198.51.100.7"),
            ("10.0.0.1", "10.9.9.9, 10.2.3.4", "10.9.9.9"),
            ("127.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
            ("fd00::1", "2001:db8::7", "2001:db8::7"),
            ("fd00::1", "[2001:db8::7]", "2001:db8::7"),
            ("fd00::1", "[2001:db8::7]:443, fd12::1", "2001:db8::7"),
            ("10.0.0.1", "::ffff:198.51.100.7", "198.51.100.7"),
            ("10.0.0.1", "198.51.100.7, ::ffff:10.1.1.1", "198.51.100.7"),
            // Entries to the left of an invalid address are ignored.
            ("10.0.0.1", "198.51.100.7, unknown", "10.0.0.1"),
            ("10.0.0.1", "198.51.100.7, unknown, 10.2.3.4", "10.2.3.4"),
            ("10.0.0.1", "198.51.100.7, _hidden", "10.0.0.1"),
            ("10.0.0.1", "198.51.100.7,", "10.0.0.1"),
            ("10.0.0.1", "", "10.0.0.1"),
            ("10.0.0.1", "198.51.100.07", "10.0.0.1"),
            ("10.0.0.1", "198.51.100.7 x", "10.0.0.1"),
            ("10.0.0.1", "\u{e9}, 198.51.100.7", "198.51.100.7"),
            ("10.0.0.1", "1.1.1.1, \u{e9}", "10.0.0.1"),
            ("10.0.0.1", "[198.51.100.7]", "10.0.0.1"),
        ] {
            client(Style::XForwarded, peer, &x(line), expected);
        }
        let lines = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "198.51.100.7, 10.1.1.1")];
        client(Style::XForwarded, "10.0.0.1", &lines, "198.51.100.7");
        client(Style::XForwarded, "10.0.0.1", &[("forwarded", "for=198.51.100.7")], "10.0.0.1");
        client(Style::XForwarded, "10.0.0.1", &[], "10.0.0.1");
    }

    #[test]
    fn forwarded_elements_are_read_by_the_book() {
        for (line, expected) in [
            ("for=198.51.100.7", "198.51.100.7"),
            ("For=\"198.51.100.7:80\";proto=http;by=203.0.113.43", "198.51.100.7"),
            ("for=1.1.1.1, for=198.51.100.7;host=\"a, b;c\", proto=https;FOR=10.1.1.1", "198.51.100.7"),
            ("for=\"[2001:db8::7]:4711\"", "2001:db8::7"),
            ("for=[2001:db8::7]", "2001:db8::7"),
            ("for=\"\\1\\9\\8.51.100.7\"", "198.51.100.7"),
            ("for=1.1.1.1,, for=198.51.100.7 ;; proto=http", "198.51.100.7"),
            ("for=1.1.1.1, for=unknown", "10.0.0.1"),
            ("for=1.1.1.1, for=\"_gazonk\"", "10.0.0.1"),
            ("for=1.1.1.1, proto=http", "10.0.0.1"),
            // A client's open quotation mark and what a proxy appends.
            ("for=\"x, for=198.51.100.7", "malformed"),
            ("for=1.1.1.1;x=\", for=198.51.100.7;host=\"h\"", "malformed"),
            ("for=1.1.1.1;x=\", for=\"[2001:db8::7]\"", "malformed"),
            ("for=1.1.1.1;for=2.2.2.2", "malformed"),
            ("for =1.1.1.1", "malformed"),
            ("for=", "malformed"),
            ("198.51.100.7", "malformed"),
            ("", "10.0.0.1"),
        ] {
            client(Style::Rfc7239, "10.0.0.1", &[("forwarded", line)], expected);
            client(Style::Both, "10.0.0.1", &[("forwarded", line)], expected);
        }
        client(Style::Rfc7239, "10.0.0.1", &[("x-forwarded-for", "198.51.100.7")], "10.0.0.1");
        // What a client has sent to a proxy that adds a line of its own is not looked at.
        let apart = [("forwarded", "for=\"x"), ("forwarded", "for=198.51.100.7")];
        client(Style::Rfc7239, "10.0.0.1", &apart, "198.51.100.7");
        client(Style::Rfc7239, "192.0.2.1", &apart, "192.0.2.1");
    }

    #[test]
    fn where_two_headers_disagree_none_is_believed() {
        let agreed = [("x-forwarded-for", "198.51.100.7"), ("forwarded", "for=198.51.100.7")];
        client(Style::Both, "10.0.0.1", &agreed, "198.51.100.7");
        let forged = [("x-forwarded-for", "198.51.100.7"), ("forwarded", "for=1.1.1.1")];
        client(Style::Both, "10.0.0.1", &forged, "10.0.0.1");
    }

    fn written(style: Style, peer: &str, lines: &[(&'static str, &'static str)]) -> Vec<String> {
        let (forwarding, headers) = (forwarding(style), map(lines));
        let peer = peer.parse().unwrap();
        let (address, host) = (HeaderValue::from_str(&format!("{peer}")).unwrap(), HeaderValue::from_static("a:8"));
        let mut out = HeaderMap::new();
        let peer_info =
            PeerInfo { ip: peer, may_be_trusted: true, header_value: &address, is_secure: false, host: Some(&host) };
        forwarding.write(&forwarding.trusted_headers(peer, &headers), peer_info, &mut out);
        out.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
    }

    #[test]
    fn a_trusted_proxy_is_added_to_and_others_are_replaced() {
        let lines = [
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-for", "2.2.2.2"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "shop.example"),
            ("forwarded", "for=3.3.3.3"),
        ];
        let own = ["x-forwarded-for: 192.0.2.1", "x-forwarded-proto: http", "x-forwarded-host: a:8"];
        assert_eq!(written(Style::XForwarded, "192.0.2.1", &lines), own);
        assert_eq!(
            written(Style::XForwarded, "10.0.0.1", &lines),
            [
                "x-forwarded-for: 1.1.1.1, 2.2.2.2, 10.0.0.1",
                "x-forwarded-proto: https",
                "x-forwarded-host: shop.example"
            ]
        );
        assert_eq!(written(Style::Rfc7239, "192.0.2.1", &lines), ["forwarded: for=192.0.2.1;host=\"a:8\";proto=http"]);
        assert_eq!(
            written(Style::Rfc7239, "fd00::1", &lines),
            ["forwarded: for=3.3.3.3, for=\"[fd00::1]\";host=\"a:8\";proto=http"]
        );
        assert_eq!(written(Style::Both, "10.0.0.1", &[]).len(), 4);
        assert_eq!(written(Style::XForwarded, "10.0.0.1", &[("x-forwarded-for", "")])[0], "x-forwarded-for: 10.0.0.1");
    }

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn after(parents: &[&str]) -> (String, bool) {
        let mut headers: HeaderMap = [(TRACESTATE, HeaderValue::from_static("a=1"))].into_iter().collect();
        for parent in parents {
            headers.append(TRACEPARENT, HeaderValue::from_str(parent).unwrap());
        }
        continue_or_start_trace(&mut headers, new_request_id(), None);
        assert_eq!(headers.get_all(TRACEPARENT).iter().count(), 1);
        (headers[TRACEPARENT].to_str().unwrap().to_owned(), headers.contains_key(TRACESTATE))
    }

    #[test]
    fn a_valid_trace_goes_on() {
        let later = |end: &str| format!("cc{}{end}", &GIVEN[2..]);
        for given in [GIVEN.to_owned(), GIVEN.replace("-01", "-ff"), later(""), later("-what-is-to-come"), later("-")] {
            assert_eq!(after(&[&given]), (given, true));
        }
    }

    #[test]
    fn another_one_is_begun_anew_without_its_state() {
        for given in [
            "",
            "00",
            &GIVEN[..54],
            &format!("{GIVEN}-00"),
            &format!("{GIVEN}0"),
            &format!("cc{}0", &GIVEN[2..]),
            &GIVEN.replacen("00", "ff", 1),
            &GIVEN.to_uppercase(),
            &GIVEN.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GIVEN.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GIVEN.replace('-', "_"),
            &GIVEN.replace("af", "ag"),
        ] {
            let (begun, has_state) = after(&[given]);
            assert!(begun != given && !has_state && parent_of(begun.as_bytes()).is_some(), "{given}");
        }
        assert!(!after(&[]).1);
        let (begun, has_state) = after(&[GIVEN, GIVEN]);
        assert!(begun != GIVEN && !has_state, "two of them");
    }
}
