//! The stored form of what an accepted request sends to the upstream later, but for its body.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 1 | envelope: 0 |
//! | part | method |
//! | part | target, as in the request line |
//! | 1 | HTTP version: 10, 11, 20 |
//! | 1 | 1: the client's connection was encrypted |
//! | 1 | 1: its forwarding headers may be trusted, if it is a trusted proxy |
//! | part | its address, as text |
//! | 8 | the id of the request |
//! | part | the key |
//! | list | headers in the order sent, each a part for its name and a part for its value |
//! | part, part | the subject of its client's certificate, and the alternative names if there are any; nothing where no part of the scope is one of these |

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, Uri, Version};

use super::{PLAIN, Unreadable, VERSION, fields, open, put_fields};
use crate::idempotency::key::Key;
use crate::idempotency::record::{RequestId, put};
use crate::idempotency::scope::ClientCertificate;

/// A request that is delivered later, without its body.
#[derive(Clone, PartialEq, Eq)]
pub struct AcceptedRequest {
    /// Its method.
    pub method: Method,
    /// Its target.
    pub target: Uri,
    /// The version of HTTP that it came by.
    pub version: Version,
    /// Whether its client's connection was encrypted.
    pub is_secure: bool,
    /// Whether the client's forwarding headers may be trusted, if it is a trusted proxy.
    pub may_be_trusted: bool,
    /// The address of the client's connection.
    pub peer: IpAddr,
    /// Its id.
    pub request: RequestId,
    /// Its key.
    pub key: Key,
    /// Its headers.
    pub headers: HeaderMap,
    /// What its client's certificate says, where the scope of its route has a part of that.
    pub certificate: Option<Arc<ClientCertificate>>,
}

impl fmt::Debug for AcceptedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AcceptedRequest({})", self.request)
    }
}

impl AcceptedRequest {
    /// The stored form.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(512);
        out.extend_from_slice(&[VERSION, PLAIN]);
        put(&mut out, self.method.as_str().as_bytes());
        put(&mut out, self.target.to_string().as_bytes());
        let version = match self.version {
            Version::HTTP_10 => 10,
            Version::HTTP_2 => 20,
            _ => 11,
        };
        out.extend_from_slice(&[version, u8::from(self.is_secure), u8::from(self.may_be_trusted)]);
        put(&mut out, self.peer.to_string().as_bytes());
        out.extend_from_slice(&self.request.0.get().to_be_bytes());
        put(&mut out, self.key.as_str().as_bytes());
        let headers: Vec<_> = self.headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        put_fields(&mut out, &headers);
        if let Some(certificate) = &self.certificate {
            certificate.parts().into_iter().flatten().for_each(|part| put(&mut out, part));
        }
        out.into()
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// Where it is of another version, or damaged.
    pub fn decode(bytes: &Bytes) -> Result<Self, Unreadable> {
        let mut reader = open(bytes)?;
        let method = Method::from_bytes(&reader.part()?).map_err(|_| Unreadable)?;
        let target = Uri::from_maybe_shared(reader.part()?).map_err(|_| Unreadable)?;
        let version = match reader.byte()? {
            10 => Version::HTTP_10,
            11 => Version::HTTP_11,
            20 => Version::HTTP_2,
            _ => return Err(Unreadable),
        };
        let (is_secure, may_be_trusted) = (reader.flag()?, reader.flag()?);
        let peer = reader.text()?.parse().map_err(|_| Unreadable)?;
        let request = NonZeroU64::new(u64::from_be_bytes(reader.array()?)).map(RequestId).ok_or(Unreadable)?;
        let key = reader.part()?;
        let key = Key::from_value(&key, key.len()).map_err(|_| Unreadable)?;
        let headers = fields(&mut reader)?.into_iter().collect();
        let mut certificate = None;
        if !reader.is_at_end() {
            let subject = reader.part()?;
            let san = if reader.is_at_end() { None } else { Some(reader.part()?) };
            certificate = Some(Arc::new(ClientCertificate::of_parts(&subject, san.as_deref())));
        }
        reader.finish()?;
        Ok(Self { method, target, version, is_secure, may_be_trusted, peer, request, key, headers, certificate })
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn request(target: &str, headers: &[(&'static str, Vec<u8>)]) -> AcceptedRequest {
        let line = |(name, value): &(&'static str, Vec<u8>)| {
            (http::HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap())
        };
        AcceptedRequest {
            method: Method::POST,
            target: target.parse().unwrap(),
            version: Version::HTTP_11,
            is_secure: true,
            may_be_trusted: false,
            peer: "192.0.2.7".parse().unwrap(),
            request: RequestId(NonZeroU64::new(7).unwrap()),
            key: Key::parse("k-1", 255).unwrap(),
            headers: headers.iter().map(line).collect(),
            certificate: None,
        }
    }

    #[test]
    fn a_request_survives() {
        for target in ["/v1/charges?x=%20&y", "http://shop.example/v1", "*"] {
            let lines = [("host", b"shop".to_vec()), ("x-raw", b"caf\xe9".to_vec()), ("host", b"b".to_vec())];
            let (subject, san) = (b"subject", &b"names"[..]);
            for certificate in [None, Some((subject, None)), Some((subject, Some(san)))] {
                let certificate = certificate.map(|(subject, san)| Arc::new(ClientCertificate::of_parts(subject, san)));
                let kept = AcceptedRequest { certificate, ..request(target, &lines) };
                assert_eq!(AcceptedRequest::decode(&kept.encode()), Ok(kept));
            }
        }
    }

    #[test]
    fn nothing_of_it_is_shown() {
        let shown = format!("{:?}", request("/v1?secret=1", &[("authorization", b"Bearer 1".to_vec())]));
        assert!(!shown.contains("secret") && !shown.contains("Bearer"), "{shown}");
    }

    proptest! {
        #[test]
        fn what_breaks_off_is_unreadable(cut in 0_usize..100) {
            let whole = request("/v1", &[("host", b"shop".to_vec())]).encode();
            prop_assume!(cut < whole.len());
            prop_assert_eq!(AcceptedRequest::decode(&whole.slice(..cut)), Err(Unreadable));
        }
    }
}
