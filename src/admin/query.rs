//! The query parameters of the records list.

use std::time::Duration;

use super::answer::{Kind, Problem};
use crate::idempotency::key::Key;
use crate::idempotency::record::{RecordId, State};

const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

/// Longest key that can be looked up, in characters: longer than any route lets in by default.
const MAX_KEY: usize = 4096;

/// `?state=&route=&key=&older_than=&limit=&cursor=`, each at most once.
#[derive(Debug, PartialEq)]
pub(super) struct Query {
    pub(super) state: Option<State>,
    pub(super) route: Option<String>,
    pub(super) key: Option<Key>,
    pub(super) older_than: Option<Duration>,
    pub(super) limit: usize,
    /// The last record of the page before.
    pub(super) after: Option<RecordId>,
}

impl Query {
    /// Reads the query of a target. An unknown, empty, repeated or invalid parameter is an error: a filter that is
    /// ignored would show an operator's script more records than it asked for.
    pub(super) fn parse(query: Option<&str>) -> Result<Self, Problem> {
        let mut parsed =
            Self { state: None, route: None, key: None, older_than: None, limit: DEFAULT_LIMIT, after: None };
        let mut seen = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decode(value).ok_or_else(|| bad(name, "is not percent-encoded UTF-8"))?;
            parsed.set(name, value)?;
            if seen.contains(&name) {
                return Err(bad(name, "stands there twice"));
            }
            seen.push(name);
        }
        Ok(parsed)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), Problem> {
        const KNOWN: [&str; 6] = ["state", "route", "key", "older_than", "limit", "cursor"];
        if !KNOWN.contains(&name) {
            // The name is the client's own, and may be a mistyped secret: it is not repeated.
            return Err(
                Kind::BadRequest.because(format!("a query parameter is unknown; known are: {}", KNOWN.join(", ")))
            );
        }
        if value.is_empty() {
            return Err(bad(name, "is empty; leave it out to not filter by it"));
        }
        match name {
            "state" => self.state = Some(parse_state(&value)?),
            "route" => self.route = Some(value),
            "key" => self.key = Some(Key::parse(&value, MAX_KEY).map_err(|invalid| bad(name, &invalid.to_string()))?),
            "older_than" => {
                let duration = humantime::parse_duration(&value);
                self.older_than = Some(duration.map_err(|_| bad(name, "must be a duration such as 90s, 1h or 7d"))?);
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
                self.limit = limit.ok_or_else(|| bad(name, &format!("must be a number from 1 to {MAX_LIMIT}")))?;
            }
            _ => {
                let after = RecordId::parse(&value);
                self.after = Some(after.ok_or_else(|| bad(name, "must be the `next` of the page before"))?);
            }
        }
        Ok(())
    }
}

fn parse_state(value: &str) -> Result<State, Problem> {
    State::parse(value)
        .ok_or_else(|| bad("state", &format!("must be one of: {}", State::ALL.map(State::as_str).join(", "))))
}

fn bad(name: &str, what: &str) -> Problem {
    Kind::BadRequest.because(format!("query parameter `{name}` {what}"))
}

/// Decodes percent-encoding (RFC 3986 section 2.1). A `+` is itself: no key holds a space, and many hold a `+`.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' {
            let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
            u8::try_from(digit()? * 16 + digit()?).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_all_with_the_default_limit() {
        for query in [None, Some(""), Some("&")] {
            let query = Query::parse(query).unwrap();
            assert_eq!(query.limit, 100);
            assert_eq!((query.state, query.route, query.older_than, query.after), (None, None, None, None));
        }
    }

    #[test]
    fn everything_at_once() {
        let id = "0a".repeat(32);
        let query =
            Query::parse(Some(&format!("state=in-flight&route=a%20b+c&older_than=1h&limit=7&cursor={id}"))).unwrap();
        assert_eq!(query.state, Some(State::InFlight));
        assert_eq!(query.route.as_deref(), Some("a b+c"));
        assert_eq!(query.older_than, Some(Duration::from_secs(3600)));
        assert_eq!(query.limit, 7);
        assert_eq!(query.after, Some(RecordId([10; 32])));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (query, said) in [
            ("state=lost", "`state` must be one of: in-flight, completed, unknown"),
            ("limit=0", "`limit` must be a number from 1 to 1000"),
            ("limit=1001", "`limit` must be"),
            ("limit=ten", "`limit` must be"),
            ("older_than=3", "`older_than` must be a duration"),
            ("cursor=3", "`cursor` must be the `next`"),
            ("route=", "`route` is empty"),
            ("route", "`route` is empty"),
            ("route=%zz", "`route` is not percent-encoded"),
            ("route=%ff", "`route` is not percent-encoded"),
            ("route=%e", "`route` is not percent-encoded"),
            ("route=a&route=b", "`route` stands there twice"),
            ("older-than=1h", "known are: state, route, key, older_than, limit, cursor"),
        ] {
            let problem = format!("{:?}", Query::parse(Some(query)).unwrap_err());
            assert!(problem.contains(said), "{query}: {problem}");
        }
    }
}
