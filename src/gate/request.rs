//! The head of a request, read once.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Method, Request, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;

use crate::http::forwarding::{Forwarding, Hop};
use crate::http::headers::{Way, asks_upgrade, framing_is_plain};
use crate::http::problem::Problem;
use crate::http::server::Peer;
use crate::http::via::Via;
use crate::http::wire::Interim;
use crate::idempotency::key::KeyRule;
use crate::idempotency::scope::Caller;
use crate::route::{Ambiguous, Route};
use crate::telemetry::outcome::Code;

/// How a gate sees where requests come from, and where they came by.
#[derive(Debug, Default)]
pub(super) struct Road {
    pub(super) forwarding: Forwarding,
    pub(super) via: Via,
}

/// What the gate knows of a request before its body.
pub(super) struct Head {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    /// The host that it names, as written: of an absolute-form target, else of `Host` (RFC 9112, 3.2.2).
    host: Option<HeaderValue>,
    /// The same, so that two spellings of one host are one, where that differs: see [`normal`].
    normal_host: Option<String>,
    peer: Peer,
    /// The address of the client, which may be behind trusted proxies.
    client: IpAddr,
    road: Arc<Road>,
    /// The client's side of the upgrade that it asks for.
    pub(super) upgrade: Option<OnUpgrade>,
}

impl Head {
    /// Takes a request apart, unless it is one that nobody should see.
    pub(super) fn read(
        mut request: Request<Incoming>,
        peer: Peer,
        road: &Arc<Road>,
    ) -> Result<(Self, Incoming), Problem> {
        let upgrade = asks_upgrade(request.version(), request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (parts, body) = request.into_parts();
        Ok((Self::of(parts, upgrade, peer, road)?, body))
    }

    /// Of a head alone.
    ///
    /// # Errors
    /// Nobody should see a request like this.
    pub(super) fn of(parts: Parts, upgrade: Option<OnUpgrade>, peer: Peer, road: &Arc<Road>) -> Result<Self, Problem> {
        if road.via.is_loop(&parts.headers) {
            let detail = "the request came by here before: the gate is its own upstream, or that of another (see Via)";
            return Err(Problem::new(Code::LoopDetected, detail));
        }
        check_target(&parts)?;
        let host = host(&parts)?;
        if !framing_is_plain(&parts.headers) {
            return Err(bad("where the request ends is in doubt (RFC 9112, 6)"));
        }
        let client = road.forwarding.client(peer.ip, &parts.headers);
        Ok(Self {
            method: parts.method,
            uri: parts.uri,
            version: parts.version,
            headers: parts.headers,
            normal_host: host.as_ref().and_then(text).and_then(normal),
            host,
            client,
            peer,
            road: Arc::clone(road),
            upgrade,
        })
    }

    /// The way of interim answers to the client, where it understands them.
    pub(super) fn interim(&self) -> Option<&Interim> {
        self.peer.interim.as_ref()
    }

    /// The way that it came, for the upstream.
    pub(super) fn way(&self) -> Way<'_> {
        Way {
            hop: Hop { peer: self.peer.ip, address: &self.peer.address, host: self.host.as_ref() },
            forwarding: &self.road.forwarding,
            via: self.road.via.line(self.version),
        }
    }

    /// The host that it names, so that two spellings of one host are one.
    pub(super) fn authority(&self) -> Option<&str> {
        self.normal_host.as_deref().or_else(|| self.host.as_ref().and_then(text))
    }

    pub(super) fn caller(&self) -> Caller<'_> {
        Caller { headers: &self.headers, authority: self.authority(), client_ip: Some(self.client) }
    }

    /// The target as the upstream gets it: path and query, byte for byte.
    pub(super) fn target(&self) -> Uri {
        match (self.uri.authority(), self.uri.path_and_query()) {
            (Some(_), Some(target)) => Uri::from(target.clone()),
            _ => self.uri.clone(),
        }
    }
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

fn host(parts: &Parts) -> Result<Option<HeaderValue>, Problem> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Err(bad("the request has more than one Host header (RFC 9112, 3.2)"));
    }
    if host.is_none() && parts.version == Version::HTTP_11 {
        return Err(bad("the request has no Host header (RFC 9112, 3.2)"));
    }
    if let Some(host) = host {
        let is_sound = text(host).ok_or_else(|| bad("the Host header is not ASCII")).map(is_host)?;
        if !is_sound {
            return Err(bad("the Host header is no host (RFC 9110, 7.2)"));
        }
    }
    let Some(authority) = parts.uri.authority() else { return Ok(host.cloned()) };
    // It counts before the Host header (RFC 9112, 3.2.2). A user in it is somebody's deception (RFC 9110, 4.2.4).
    match HeaderValue::from_str(authority.as_str()) {
        Ok(host) if !authority.as_str().is_empty() && is_host(authority.as_str()) => Ok(Some(host)),
        _ => Err(bad("the URL that is asked for has no host, or a user (RFC 9110, 4.2.4)")),
    }
}

fn text(value: &HeaderValue) -> Option<&str> {
    value.to_str().ok()
}

/// Whether this is a host with an optional port. It may be empty, where the target has no authority.
fn is_host(host: &str) -> bool {
    let port_is_sound = |authority: &Authority| match authority.as_str().rsplit_once(':') {
        Some((_, port)) if !port.contains(']') => {
            port.is_empty() || port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok()
        }
        _ => true,
    };
    let sound = |authority: Authority| !authority.host().is_empty() && port_is_sound(&authority);
    host.is_empty() || !host.contains('@') && host.parse::<Authority>().is_ok_and(sound)
}

/// A host in lower case, without the default port and the final dot of a name (RFC 9110, 4.2.3); nothing where it is
/// written so already.
fn normal(host: &str) -> Option<String> {
    let written = host;
    let host = host.strip_suffix(":80").or_else(|| host.strip_suffix(':')).unwrap_or(host);
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, Some(port)),
        _ => (host, None),
    };
    let mut normal = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if let Some(port) = port {
        normal.push(':');
        normal.push_str(port);
    }
    Some(normal).filter(|normal| normal != written)
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

/// The route requires a key, and none came.
pub(super) fn key_missing(rule: &KeyRule) -> Problem {
    let places: Vec<_> = rule.from.iter().map(ToString::to_string).collect();
    let places = places.join(" or ");
    Problem::new(Code::KeyMissing, format!("send a key of your own choice, unique to this request, in {places}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_from_what_is_none() {
        for host in ["", "a", "a.example:8080", "127.0.0.1:1", "[::1]", "[::1]:80", "a:"] {
            assert!(is_host(host), "{host}");
        }
        for host in ["a b", "a/c", "u@h", "h:99999", "[::1", "[::1:80", ":80", "h:x", "h:+80"] {
            assert!(!is_host(host), "{host}");
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

    #[test]
    fn spellings_of_one_host_are_one() {
        for host in ["api.example", "API.example", "api.example:80", "api.example.", "api.example.:80", "api.example:"]
        {
            assert_eq!(normal(host).as_deref().unwrap_or(host), "api.example", "{host}");
        }
        for (written, expected) in [
            ("api.example", None),
            ("api.example.:8080", Some("api.example:8080")),
            ("[::1]", None),
            ("[::1]:80", Some("[::1]")),
            ("[::1]:8080", None),
            ("", None),
        ] {
            assert_eq!(normal(written).as_deref(), expected, "{written}");
        }
    }
}
