//! Upgrades: once both sides have switched protocols, bytes pass both ways until either closes.
//!
//! The gate does not inspect the bytes after an upgrade, so only configured protocols are allowed. An upgrade to any
//! other protocol is ignored, as RFC 9110, 7.8, permits: the request is forwarded without it.

use http::header::{CONNECTION, UPGRADE};
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::forwarding::is_token;
use super::headers::{has_token, tokens};

/// The protocols that clients may switch to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgrades(Vec<Protocol>);

/// A protocol as `Upgrade` names it: a name, or a name and a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol(Box<str>);

impl Default for Upgrades {
    /// WebSocket (RFC 6455), in any version.
    fn default() -> Self {
        Self(vec![Protocol("websocket".into())])
    }
}

impl Upgrades {
    /// Allows these protocols only.
    #[must_use]
    pub fn new(protocols: Vec<Protocol>) -> Self {
        Self(protocols)
    }

    /// The protocols.
    #[must_use]
    pub fn protocols(&self) -> &[Protocol] {
        &self.0
    }

    /// The protocols that a request asks to switch to, without those that it may not; nothing where none is left.
    #[must_use]
    pub fn asked(&self, version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
        let asks =
            version == Version::HTTP_11 && headers.contains_key(UPGRADE) && has_token(headers, &CONNECTION, "upgrade");
        // A client that offers `h2c` continues with HTTP, whatever else it offers. The strict reader assumes the same.
        if !asks || has_token(headers, &UPGRADE, "h2c") {
            return None;
        }
        let asked = headers.get_all(UPGRADE).iter().flat_map(tokens);
        let allowed: Vec<_> = asked.filter(|asked| self.0.iter().any(|allowed| allowed.is_named_by(asked))).collect();
        // Members of sound values make one.
        HeaderValue::from_bytes(&allowed.join(&b", "[..])).ok().filter(|protocols| !protocols.is_empty())
    }
}

impl Protocol {
    /// Reads the configuration's word for a protocol.
    ///
    /// # Errors
    /// Says what is wrong, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(2, '/');
        if !parts.all(|part| !part.is_empty() && part.bytes().all(is_token)) {
            return Err(format!("`{text}` is not the name of a protocol, such as \"websocket\""));
        }
        let name = text.split('/').next().unwrap_or_default();
        if ["h2c", "h2", "h3", "http", "tls"].iter().any(|carrier| carrier.eq_ignore_ascii_case(name)) {
            return Err(format!("`{text}` carries requests, which would pass the gate unseen behind the upgrade"));
        }
        Ok(Self(text.into()))
    }

    /// Whether a member of `Upgrade` names it. Names have no case there, and a version counts where both have one.
    fn is_named_by(&self, member: &[u8]) -> bool {
        let name = member.split(|byte| *byte == b'/').next().unwrap_or_default();
        let own = self.0.as_bytes();
        own.eq_ignore_ascii_case(member) || own.eq_ignore_ascii_case(name)
    }
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// An upgrade that a client asks for, to protocols that it may switch to.
pub struct Upgrade {
    client: OnUpgrade,
    protocols: HeaderValue,
}

impl Upgrade {
    /// The upgrade that a request asks for.
    #[must_use]
    pub fn of<B>(request: &mut Request<B>, allowed: &Upgrades) -> Option<Self> {
        let protocols = allowed.asked(request.version(), request.headers())?;
        Some(Self { client: hyper::upgrade::on(request), protocols })
    }

    /// Asks an upstream for it.
    pub fn ask(&self, headers: &mut HeaderMap) {
        headers.insert(UPGRADE, self.protocols.clone());
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }

    /// Whether an upstream that switches protocols switches to those that it was asked for (RFC 9110, 7.8 and 15.2.2).
    #[must_use]
    pub fn is_granted(&self, headers: &HeaderMap) -> bool {
        let mut granted = headers.get_all(UPGRADE).iter().flat_map(tokens).peekable();
        let was_asked = |protocol: &[u8]| tokens(&self.protocols).any(|asked| asked.eq_ignore_ascii_case(protocol));
        granted.peek().is_some() && granted.all(was_asked)
    }

    /// Passes bytes between the two sides when both have switched. `guard` is dropped when that is over.
    pub fn join(self, response: &mut Response<Incoming>, guard: impl Send + 'static) {
        let (client, upstream) = (self.client, hyper::upgrade::on(response));
        tokio::spawn(async move {
            let sides = async { Ok::<_, hyper::Error>((client.await?, upstream.await?)) };
            match sides.await {
                Ok((client, upstream)) => {
                    let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
                    // Either side may end it in whatever way; the other side then sees the end.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
                }
                Err(error) => tracing::debug!(%error, "an upgrade failed"),
            }
            drop(guard);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    fn upgrades(protocols: &[&str]) -> Upgrades {
        Upgrades::new(protocols.iter().map(|text| Protocol::parse(text).unwrap()).collect())
    }

    /// The protocols requested by these lines of `Upgrade`, or an empty string.
    fn asked(allowed: &Upgrades, lines: &[&'static str]) -> String {
        let mut headers = headers(&[("connection", "keep-alive, Upgrade")]);
        for line in lines {
            headers.append(UPGRADE, HeaderValue::from_static(line));
        }
        let asked = allowed.asked(Version::HTTP_11, &headers);
        asked.map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    }

    #[test]
    fn only_what_is_allowed_is_asked_for() {
        let default = Upgrades::default();
        for (lines, expected) in [
            (&["websocket"][..], "websocket"),
            (&["WebSocket"], "WebSocket"),
            (&["websocket/13"], "websocket/13"),
            (&["h2c"], ""),
            (&["echo"], ""),
            (&["websockets"], ""),
            (&["TLS/1.2, HTTP/1.1"], ""),
            (&[""], ""),
            (&["websocket, h2c"], ""),
            (&["foo , websocket,,echo", "websocket/8"], "websocket, websocket/8"),
        ] {
            assert_eq!(asked(&default, lines), expected, "{lines:?}");
        }
        assert_eq!(asked(&upgrades(&[]), &["websocket"]), "");
        let named = upgrades(&["echo", "Sync/2"]);
        assert_eq!(asked(&named, &["websocket, echo/1, sync/1, sync/2, sync"]), "echo/1, sync/2");
    }

    #[test]
    fn an_upgrade_is_asked_for_by_both_headers_and_in_http_1_1() {
        let upgrades = Upgrades::default();
        let whole = headers(&[("connection", "upgrade"), ("upgrade", "websocket")]);
        assert!(upgrades.asked(Version::HTTP_11, &whole).is_some());
        assert!(upgrades.asked(Version::HTTP_10, &whole).is_none());
        assert!(upgrades.asked(Version::HTTP_2, &whole).is_none());
        assert!(upgrades.asked(Version::HTTP_11, &headers(&[("upgrade", "websocket")])).is_none());
        assert!(upgrades.asked(Version::HTTP_11, &headers(&[("connection", "upgrade")])).is_none());
    }

    #[test]
    fn an_upstream_switches_to_nothing_else() {
        let mut request = Request::new(());
        *request.headers_mut() = headers(&[("connection", "upgrade"), ("upgrade", "websocket, echo, foo")]);
        let upgrade = Upgrade::of(&mut request, &upgrades(&["websocket", "echo"])).unwrap();
        for granted in ["websocket", "WebSocket", "echo, websocket"] {
            assert!(upgrade.is_granted(&headers(&[("upgrade", granted)])), "{granted}");
        }
        for other in ["foo", "h2c", "websocket, foo", "websocket/13", ""] {
            assert!(!upgrade.is_granted(&headers(&[("upgrade", other)])), "{other}");
        }
        assert!(!upgrade.is_granted(&HeaderMap::new()));
    }

    #[test]
    fn protocols_that_carry_requests_are_not_allowed() {
        for text in ["websocket", "WebSocket/13", "x-sync", "irc/6.9"] {
            assert_eq!(Protocol::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "/", "a/", "/1", "a b", "a,b", "h2c", "H2C", "HTTP/2.0", "TLS/1.2", "h2"] {
            assert!(Protocol::parse(text).is_err(), "{text}");
        }
    }
}
