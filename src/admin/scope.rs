//! Whose records are wanted: `scope=header:X-Tenant=acme`.

use std::fmt;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

use crate::http::headers::normal_host;
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

/// The value of a header neither begins nor ends with these (RFC 9110, 5.5). Nothing else is cut off: two callers may differ in a
/// space.
const WHITESPACE: [char; 2] = [' ', '\t'];

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
                (ScopePart::Header(name.trim().parse().map_err(|_| wrong())?), value.trim_matches(WHITESPACE))
            }
        };
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
                let made_by = header(name.trim().parse().map_err(|_| wrong())?, value.trim_matches(WHITESPACE))?;
                if is_anonymous(&made_by) {
                    return Err(ANONYMOUS.to_owned());
                }
                made_by
            }
            ScopePart::Host => vec![MadeBy::Authority(normal_host(value, "").unwrap_or_else(|| value.to_owned()))],
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

/// A claim that is this text, and the number or truth value that is written so. `null`, an array and an object are no values: with
/// one of them, a claim is absent, or its request is refused.
fn claims(name: &str, value: &str) -> Vec<MadeBy> {
    let text = |text: &str| Value::from(text).to_string();
    let literal = serde_json::from_str(value).is_ok_and(|value: Value| value.is_number() || value.is_boolean());
    let written = Some(value).filter(|value| literal && *value == value.trim());
    let values = [Some(text(value)), written.map(ToOwned::to_owned)];
    let claims = |value: String| TokenClaims::parse(format!("{{{}:{value}}}", text(name)).as_bytes()).ok();
    values.into_iter().flatten().filter_map(claims).map(MadeBy::Claims).collect()
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
    use serde_json::json;

    use super::*;

    /// A value that no caller has is no other caller's, and not that of all who have none.
    #[test]
    fn the_value_of_a_scope_is_taken_as_it_is_written() {
        let identifier = RecordIdHasher::new("s".into(), None);
        let wanted = |text: &str| ScopeValue::parse(text).unwrap().tags(&identifier);
        let none = HeaderMap::new();
        let of_token = |payload: &str| {
            let claims = TokenClaims::parse(payload.as_bytes()).unwrap();
            let part = ScopePart::JwtClaim("sub".to_owned());
            identifier.scope_tag(&part, MadeBy::Claims(claims).caller(&none))
        };
        let absent = of_token("{}");
        for value in ["null", "[]", "{}", "[1]", "{\"a\":1}", "", " ", "1,\"x\":2", "nul", "true ", " 1", "1 "] {
            let tags = wanted(&format!("jwt:sub={value}"));
            assert_eq!(tags.len(), 1, "{value}: text alone");
            assert_eq!(tags[0], of_token(&json!({ "sub": value }).to_string()), "{value}");
            assert_ne!(tags[0], absent, "{value}");
        }
        for number in ["12", "-1", "1e2", "1E400", "0.10", "true"] {
            let payload = format!("{{\"sub\":{number}}}");
            assert!(wanted(&format!("jwt:sub={number}")).contains(&of_token(&payload)), "{number}");
        }
        assert_ne!(wanted("jwt:sub=\"ann\""), wanted("jwt:sub=ann"));
        for (one, other) in [
            ("jwt:sub= ann", "jwt:sub=ann"),
            ("basic:user= ann", "basic:user=ann"),
            ("basic:user=ann\u{a0}", "basic:user=ann"),
            ("header:X-Tenant=acme\u{a0}", "header:X-Tenant=acme"),
            ("X-Tenant: acme\u{a0}", "X-Tenant: acme"),
            ("credential=X-Api-Key: k\u{a0}", "credential=X-Api-Key: k"),
        ] {
            assert_ne!(wanted(one), wanted(other), "{one:?} and {other:?}");
        }
    }

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
        assert_eq!(tag("host=Shop.Example.:080"), tag("host=shop.example:80"));
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
