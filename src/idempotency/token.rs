//! A signed token (JWT, RFC 7519) as a scope needs it: where a request carries it, and its claims. Whoever calls this has
//! verified the token; nothing here does.

use std::collections::HashMap;
use std::fmt;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};
use serde_json::value::RawValue;

use super::json::canonical;
use super::scope::credentials;

/// What a request carries of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PresentedToken<'a> {
    /// None, or credentials of another scheme.
    Nothing,
    /// One, not verified.
    Token(&'a [u8]),
    /// Several lines, of which readers may take different ones.
    Several,
}

impl<'a> PresentedToken<'a> {
    /// What the header of this name has. In `Authorization` a token follows `Bearer` (RFC 6750, 2.1); in any other header the
    /// word may be left out.
    #[must_use]
    pub fn of(headers: &'a HeaderMap, name: &HeaderName) -> Self {
        let token = |line: &'a [u8]| match credentials(line, b"bearer") {
            None if name != AUTHORIZATION => line.trim_ascii(),
            found => found.unwrap_or_default(),
        };
        let mut lines = headers.get_all(name).iter().map(|line| token(line.as_bytes()));
        let (first, mut others) = (lines.next().unwrap_or_default(), lines.peekable());
        let is_alone = others.peek().is_none();
        match first {
            b"" if others.all(<[u8]>::is_empty) => Self::Nothing,
            token if is_alone => Self::Token(token),
            _ => Self::Several,
        }
    }
}

/// The claims of a token that was verified, by name. `Debug` does not show them.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenClaims(Vec<(Box<str>, ClaimValue)>);

/// The value of a claim.
#[derive(Clone, PartialEq, Eq)]
pub enum ClaimValue {
    /// Text, a number as it is written, or a truth value: a mark for which of them it is, then its text.
    Scalar(Box<[u8]>),
    /// An object or an array.
    Nested,
}

/// A payload that two readers could read differently, or that is no object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidPayload;

impl TokenClaims {
    /// Of a token's payload. A claim that is null counts as absent.
    ///
    /// # Errors
    /// The payload is not a JSON object, or one of its objects has a name twice.
    pub fn parse(payload: &[u8]) -> Result<Self, InvalidPayload> {
        // It refuses a name that stands twice, at any depth; the parser below would take the last one.
        canonical(payload, &[]).map_err(|_| InvalidPayload)?;
        let members: HashMap<String, &RawValue> = serde_json::from_slice(payload).map_err(|_| InvalidPayload)?;
        let scalar = |mark: u8, text: &[u8]| ClaimValue::Scalar([&[mark], text].concat().into());
        let mut claims = Vec::with_capacity(members.len());
        for (name, value) in members {
            let written = value.get();
            let value = match written.as_bytes().first() {
                Some(b'n') => continue,
                Some(b't' | b'f') => scalar(b'b', written.as_bytes()),
                Some(b'"') => {
                    let text: String = serde_json::from_str(written).map_err(|_| InvalidPayload)?;
                    scalar(b's', text.as_bytes())
                }
                Some(b'{' | b'[') => ClaimValue::Nested,
                // A number counts as it is written.
                _ => scalar(b'n', written.as_bytes()),
            };
            claims.push((name.into(), value));
        }
        Ok(Self(claims))
    }

    /// The value of a claim.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ClaimValue> {
        self.0.iter().find(|(known, _)| **known == *name).map(|(_, value)| value)
    }

    /// The value of a claim that is a number from zero on, rounded down to whole seconds.
    #[must_use]
    pub fn seconds(&self, name: &str) -> Option<u64> {
        self.number(name).filter(|number| *number >= 0.0).map(|number| number as u64)
    }

    /// The value of a claim that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<f64> {
        let Some(ClaimValue::Scalar(marked)) = self.get(name) else { return None };
        let [b'n', literal @ ..] = &**marked else { return None };
        let number: f64 = std::str::from_utf8(literal).ok()?.parse().ok()?;
        number.is_finite().then_some(number)
    }

    /// About how much memory it takes, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        let value = |value: &ClaimValue| match value {
            ClaimValue::Scalar(marked) => marked.len(),
            ClaimValue::Nested => 0,
        };
        self.0.iter().map(|(name, member)| size_of::<(Box<str>, ClaimValue)>() + name.len() + value(member)).sum()
    }
}

impl fmt::Debug for TokenClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenClaims").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn carried(name: &'static str, lines: &[&'static str]) -> Option<Option<String>> {
        let name = HeaderName::from_static(name);
        let headers = lines.iter().map(|line| (name.clone(), HeaderValue::from_static(line))).collect();
        match PresentedToken::of(&headers, &name) {
            PresentedToken::Nothing => None,
            PresentedToken::Token(token) => Some(Some(String::from_utf8(token.to_vec()).unwrap())),
            PresentedToken::Several => Some(None),
        }
    }

    #[test]
    fn a_token_stands_alone() {
        let token = |text: &str| Some(Some(text.to_owned()));
        for none in [&[][..], &[""], &["Bearer"], &["Bearer "], &["Basic YTpi"], &["a.b.c"], &["Basic YTpi", ""]] {
            assert_eq!(carried("authorization", none), None, "{none:?}");
        }
        assert_eq!(carried("authorization", &["bearer  a.b.c "]), token("a.b.c"));
        assert_eq!(carried("x-token", &["a.b.c"]), token("a.b.c"));
        assert_eq!(carried("x-token", &["Bearer a.b.c"]), token("a.b.c"));
        for several in
            [["Bearer a", "Bearer a"], ["Bearer a", "Basic YTpi"], ["Basic YTpi", "Bearer a"], ["", "Bearer a"]]
        {
            assert_eq!(carried("authorization", &several), Some(None), "{several:?}");
        }
    }

    /// Whoever sends it has not been verified yet.
    #[test]
    fn many_members_cost_no_more_than_their_length() {
        let members: Vec<_> = (0..200_000).map(|number| format!("\"m{number}\":1")).collect();
        // With a look at all of it for each member, this would take days.
        assert!(TokenClaims::parse(format!("{{{}}}", members.join(",")).as_bytes()).is_ok());
    }

    fn scalar(payload: &str, name: &str) -> Option<String> {
        match TokenClaims::parse(payload.as_bytes()).unwrap().get(name)? {
            ClaimValue::Scalar(marked) => Some(String::from_utf8(marked.to_vec()).unwrap()),
            ClaimValue::Nested => Some("nested".to_owned()),
        }
    }

    #[test]
    fn values_count_as_they_are_written() {
        for (written, value) in [
            ("\"7\"", "s7"),
            ("\"a\\u0062\"", "sab"),
            ("7", "n7"),
            ("7.0", "n7.0"),
            ("7e2", "n7e2"),
            ("7E+2", "n7E+2"),
            ("-0", "n-0"),
            ("12345678901234567890123", "n12345678901234567890123"),
            ("true", "btrue"),
            ("false", "bfalse"),
            ("{}", "nested"),
            ("[\"a\"]", "nested"),
        ] {
            assert_eq!(scalar(&format!("{{\"a\":1,\"sub\":{written}}}"), "sub").as_deref(), Some(value), "{written}");
        }
        assert_eq!(scalar("{\"https://a.example/~t\":7}", "https://a.example/~t").as_deref(), Some("n7"));
        assert_eq!(scalar("{\"sub\":null}", "sub"), None);
        assert_eq!(scalar("{}", "sub"), None);
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for payload in [
            "",
            "null",
            "[]",
            "{\"sub\":\"a\"",
            "{\"sub\":\"a\"} x",
            "{\"sub\":\"a\",\"sub\":\"b\"}",
            "{\"sub\":\"a\",\"s\\u0075b\":\"b\"}",
            "{\"sub\":\"a\",\"x\":{\"y\":1,\"y\":1}}",
            "{\"sub\":\"\\ud800\"}",
        ] {
            assert!(TokenClaims::parse(payload.as_bytes()).is_err(), "{payload}");
        }
    }

    #[test]
    fn seconds_are_numbers() {
        let seconds =
            |written: &str| TokenClaims::parse(format!("{{\"exp\":{written}}}").as_bytes()).unwrap().seconds("exp");
        assert_eq!((seconds("12"), seconds("12.9"), seconds("1e3")), (Some(12), Some(12), Some(1000)));
        let number =
            |written: &str| TokenClaims::parse(format!("{{\"nbf\":{written}}}").as_bytes()).unwrap().number("nbf");
        assert_eq!((number("-1.5"), number("12"), number("1e400")), (Some(-1.5), Some(12.0), None));
        for wrong in ["\"12\"", "-1", "null", "[1]", "1e400"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }
}
