//! The head of a request, read once.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::HOST;
use http::{HeaderMap, Method, Request, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;

use crate::http::headers::{Forwarded, asks_upgrade, framing_is_plain};
use crate::http::problem::Problem;
use crate::idempotency::key::KeyRule;
use crate::idempotency::scope::Caller;
use crate::telemetry::outcome::Code;

/// What the gate knows of a request before its body.
pub(super) struct Head {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    /// Of an absolute-form target, else of `Host` (RFC 9112, 3.2.2).
    pub(super) authority: Option<Arc<str>>,
    pub(super) client_ip: IpAddr,
    /// The client's side of the upgrade that it asks for.
    pub(super) upgrade: Option<OnUpgrade>,
}

impl Head {
    /// Takes a request apart, unless it is one that nobody should see.
    pub(super) fn read(mut request: Request<Incoming>, peer: SocketAddr) -> Result<(Self, Incoming), Problem> {
        let upgrade = asks_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (parts, body) = request.into_parts();
        let authority = authority(&parts)?;
        if !framing_is_plain(&parts.headers) {
            return Err(bad("the only transfer coding understood here is chunked"));
        }
        let head = Self {
            method: parts.method,
            uri: parts.uri,
            version: parts.version,
            headers: parts.headers,
            authority,
            client_ip: peer.ip().to_canonical(),
            upgrade,
        };
        Ok((head, body))
    }

    pub(super) fn forwarded(&self) -> Forwarded<'_> {
        Forwarded { client: Some(self.client_ip), authority: self.authority.as_deref(), version: self.version }
    }

    pub(super) fn caller(&self) -> Caller<'_> {
        Caller { headers: &self.headers, authority: self.authority.as_deref(), client_ip: Some(self.client_ip) }
    }

    /// Another head for the same request, which has no upgrade.
    pub(super) fn detached(&self) -> Self {
        Self {
            method: self.method.clone(),
            uri: self.uri.clone(),
            version: self.version,
            headers: self.headers.clone(),
            authority: self.authority.clone(),
            client_ip: self.client_ip,
            upgrade: None,
        }
    }

    /// The target as the upstream gets it: path and query, byte for byte.
    pub(super) fn target(&self) -> Uri {
        match (self.uri.authority(), self.uri.path_and_query()) {
            (Some(_), Some(target)) => Uri::from(target.clone()),
            _ => self.uri.clone(),
        }
    }
}

fn authority(parts: &http::request::Parts) -> Result<Option<Arc<str>>, Problem> {
    if parts.method == Method::CONNECT {
        return Err(bad("CONNECT is not served here"));
    }
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Err(bad("the request has more than one Host header (RFC 9112, 3.2)"));
    }
    if host.is_none() && parts.version == Version::HTTP_11 {
        return Err(bad("the request has no Host header (RFC 9112, 3.2)"));
    }
    match (parts.uri.authority(), host) {
        (Some(authority), _) => Ok(Some(authority.as_str().into())),
        (None, Some(host)) => Ok(Some(host.to_str().map_err(|_| bad("the Host header is not ASCII"))?.into())),
        (None, None) => Ok(None),
    }
}

fn bad(detail: &str) -> Problem {
    Problem::new(Code::BadRequest, detail)
}

/// The route requires a key, and none came.
pub(super) fn key_missing(rule: &KeyRule) -> Problem {
    let places: Vec<_> = rule.from.iter().map(ToString::to_string).collect();
    let places = places.join(" or ");
    Problem::new(Code::KeyMissing, format!("send a key of your own choice, unique to this request, in {places}"))
}
