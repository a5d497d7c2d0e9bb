//! Whose records are wanted: `scope=header:X-Tenant=acme`.

use std::fmt;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::idempotency::codec::Head;
use crate::idempotency::credential::{Credential, Kind};
use crate::idempotency::identity::{RecordIdHasher, RulesTag, ScopeTag};
use crate::idempotency::scope::{Caller, ScopePart};
use crate::idempotency::token::TokenClaims;
use crate::store::{NamespaceRules, RecordEntry};

/// A part of a scope, and the value that it has. `Debug` does not show it.
#[derive(PartialEq)]
pub(super) struct ScopeValue {
    part: ScopePart,
    /// What a request may have that makes the value.
    made_by: Vec<MadeBy>,
}

#[derive(PartialEq)]
enum MadeBy {
    Headers(HeaderMap),
    Authority(String),
    Address(IpAddr),
    Claims(TokenClaims),
}

/// Whether a record has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Belongs {
    Yes,
    No,
    /// An older release claimed it, or it cannot be read; or other rules made it.
    Unknown,
}

/// What a scope must look like.
const FORM: &str = "must be a part of a scope and its value: header:NAME=VALUE, cookie:NAME=VALUE, basic:user=NAME, \
                    host=NAME, client-ip=ADDRESS, jwt:CLAIM=VALUE, or credential=NAME: VALUE with the header that has it";

/// Why a credential that identifies no caller is refused.
const ANONYMOUS: &str = "identifies no caller: name X-Api-Key or Authorization, with a value. All callers without these headers share one \
                         identity, so their records cannot be selected separately";

impl ScopeValue {
    /// Reads `header:X-Tenant=acme`, and `X-Tenant:acme` for the same. Otherwise says what is wrong, as the end of a sentence.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || FORM.to_owned();
        let with_part = text.split_once('=').and_then(|(part, value)| Some((ScopePart::parse(part).ok()?, value)));
        let (part, value) = match with_part {
            Some(found) => found,
            None => {
                let (name, value) = text.split_once(':').ok_or_else(wrong)?;
                (ScopePart::Header(name.trim().parse().map_err(|_| wrong())?), value)
            }
        };
        let value = value.trim();
        let header = |name: HeaderName, value: &str| -> Result<Vec<MadeBy>, String> {
            let value =
                HeaderValue::from_bytes(value.as_bytes()).map_err(|_| "is not the value of a header".to_owned())?;
            Ok(vec![MadeBy::Headers(HeaderMap::from_iter([(name, value)]))])
        };
        let made_by = match &part {
            ScopePart::Header(name) => header(name.clone(), value)?,
            ScopePart::Cookie(name) => header(COOKIE, &format!("{name}={value}"))?,
            ScopePart::BasicUser => header(AUTHORIZATION, &format!("Basic {}", STANDARD.encode(format!("{value}:"))))?,
            ScopePart::Credential => {
                let (name, value) = value.split_once(':').ok_or_else(wrong)?;
                let made_by = header(name.trim().parse().map_err(|_| wrong())?, value.trim())?;
                if is_anonymous(&made_by) {
                    return Err(ANONYMOUS.to_owned());
                }
                made_by
            }
            ScopePart::Host => vec![MadeBy::Authority(value.to_owned())],
            ScopePart::ClientIp => vec![MadeBy::Address(value.parse().map_err(|_| "is not an address".to_owned())?)],
            ScopePart::JwtClaim(name) => claims(name, value),
            ScopePart::ClientCert(_) | ScopePart::Const(_) => return Err(wrong()),
        };
        Ok(Self { part, made_by })
    }

    /// The part of a scope that it is a value of.
    pub(super) fn part(&self) -> &ScopePart {
        &self.part
    }

    /// Whether it is a value of this part, as a configuration writes it.
    pub(super) fn is_of(&self, word: &str) -> bool {
        ScopePart::parse(word.trim_end_matches('?')).is_ok_and(|part| part == self.part)
    }

    /// The tags of which the records of the value have one.
    pub(super) fn tags(&self, identifier: &RecordIdHasher) -> Vec<ScopeTag> {
        let none = HeaderMap::new();
        self.made_by.iter().map(|made_by| identifier.scope_tag(&self.part, made_by.caller(&none))).collect()
    }
}

impl MadeBy {
    /// A caller that has this and nothing else. `none` are no headers.
    fn caller<'a>(&'a self, none: &'a HeaderMap) -> Caller<'a> {
        let empty = Caller { headers: none, authority: None, client_ip: None, certificate: None, claims: None };
        match self {
            Self::Headers(headers) => Caller { headers, ..empty },
            Self::Authority(authority) => Caller { authority: Some(authority), ..empty },
            Self::Address(address) => Caller { client_ip: Some(*address), ..empty },
            Self::Claims(claims) => Caller { claims: Some(claims), ..empty },
        }
    }
}

/// Whether these headers give the identity that all callers without `X-Api-Key` and `Authorization` share.
fn is_anonymous(made_by: &[MadeBy]) -> bool {
    let none = HeaderMap::new();
    made_by.iter().any(|made_by| Credential::of(made_by.caller(&none)).kind.identity() == Kind::Anonymous.identity())
}

impl fmt::Debug for ScopeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScopeValue({})", self.part)
    }
}

/// A claim that is this text, and the number or truth value that is written so.
fn claims(name: &str, value: &str) -> Vec<MadeBy> {
    let payloads = [Some(serde_json::Value::from(value)), serde_json::from_str(value).ok()];
    let claims =
        |value: serde_json::Value| TokenClaims::parse(serde_json::json!({ name: value }).to_string().as_bytes());
    payloads.into_iter().flatten().filter_map(|value| claims(value).ok()).map(MadeBy::Claims).collect()
}

/// Whether a record has one of these tags. `on_file` are the rules that the store has of all namespaces.
pub(super) fn belongs(listed: &RecordEntry, wanted: &[ScopeTag], on_file: &[NamespaceRules]) -> Belongs {
    let details = Head::decode(&listed.record.head).ok().map(|head| head.details()).unwrap_or_default();
    match details.scope {
        Some(tags) if tags.iter().any(|tag| wanted.contains(tag)) => Belongs::Yes,
        Some(_) if !is_of_other_rules(listed, details.rules, on_file) => Belongs::No,
        Some(_) | None => Belongs::Unknown,
    }
}

/// Whether other rules made it than those by which requests look for records: perhaps with another id secret, and then its tags
/// are others for the same caller.
fn is_of_other_rules(listed: &RecordEntry, head: Option<RulesTag>, on_file: &[NamespaceRules]) -> bool {
    let Some(origin) = &listed.origin else { return false };
    let rules = on_file.iter().find(|rules| rules.service == origin.service && rules.namespace == origin.namespace);
    let made_by = rules.and_then(|rules| Some((rules, rules.made_by(listed.record.claimed_at, head)?)));
    made_by.is_some_and(|(rules, made_by)| rules.in_force().iter().all(|digest| RulesTag::of(digest) != made_by))
}

/// Leaves those that have one of these tags, and returns of how many that is not known.
pub(super) fn sift<T>(
    found: &mut Vec<T>,
    wanted: &[ScopeTag],
    on_file: &[NamespaceRules],
    listed: impl Fn(&T) -> &RecordEntry,
) -> u64 {
    let mut unknown = 0;
    found.retain(|one| match belongs(listed(one), wanted, on_file) {
        Belongs::Yes => true,
        Belongs::No => false,
        Belongs::Unknown => {
            unknown += 1;
            false
        }
    });
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_a_part_and_its_value() {
        let tag = |text: &str| ScopeValue::parse(text).unwrap().tags(&RecordIdHasher::new("s".into(), None));
        assert_eq!(tag("header:X-Tenant=acme"), tag("X-Tenant: acme"));
        assert_eq!(tag("header:x-tenant=acme"), tag("X-TENANT:acme"));
        let others = [
            "header:X-Tenant=acme",
            "header:X-Tenant=acme=2",
            "header:X-Tenant=",
            "cookie:session=acme",
            "basic:user=acme",
            "host=acme",
            "client-ip=10.0.0.1",
            "client-ip=10.0.0.2",
            "jwt:sub=acme",
            "credential=X-Api-Key: acme",
            "credential=Authorization: Basic YWNtZTp4",
        ];
        for (place, one) in others.iter().enumerate() {
            for other in &others[..place] {
                assert_ne!(tag(one), tag(other), "{one} and {other}");
            }
        }
        assert_eq!(tag("host=Shop.Example"), tag("host=shop.example"));
        assert_eq!(tag("client-ip=::ffff:10.0.0.1"), tag("client-ip=10.0.0.1"));
        assert_eq!((tag("jwt:sub=acme").len(), tag("jwt:tenant=12").len()), (1, 2), "text, or a number");
        // Whatever the password is.
        assert_eq!(tag("credential=Authorization: Basic YWNtZTp4"), tag("credential=Authorization: Basic YWNtZTp5"));
        // All callers without these headers share one identity: a filter meant for one of them must not select all.
        let anonymous =
            ["Cookie: a=b", "Nonsense: x", "authorisation: Basic YWNtZTp4", "X-Api-Key:", "Authorization: Bearer"];
        for credential in anonymous {
            assert_eq!(
                ScopeValue::parse(&format!("credential={credential}")),
                Err(ANONYMOUS.to_owned()),
                "{credential}"
            );
        }
        for wrong in ["", "acme", "client-ip=acme", "const:a=b", "client-cert:san=x", "credential=acme", "a b:c"] {
            assert!(ScopeValue::parse(wrong).is_err(), "{wrong}");
        }
    }
}
