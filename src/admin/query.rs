//! The query parameters of the records list.

use super::answer::{Kind, Problem};
use super::wanted::{NUL, Wanted};
use crate::idempotency::key::percent_decode;
use crate::store::Cursor;

/// How many entries a list has where it is not asked for fewer or more.
pub(super) const DEFAULT_LIMIT: usize = 100;
/// How many it has at most.
pub(super) const MAX_LIMIT: usize = 1000;

/// The parameters in whose values a space is usual.
const MAY_HOLD_SPACE: [&str; 2] = ["scope", "reason"];

/// What records are wanted, `limit=` and `cursor=`, each at most once.
#[derive(Debug, PartialEq)]
pub(super) struct Query {
    pub(super) wanted: Wanted,
    pub(super) limit: usize,
    /// Where the page before ended.
    pub(super) after: Option<Cursor>,
}

impl Query {
    /// Reads the query of a target. An unknown, empty, repeated or invalid parameter is an error: a filter that is
    /// ignored would show an operator's script more records than it asked for.
    pub(super) fn parse(query: Option<&str>) -> Result<Self, Problem> {
        let mut parsed = Self { wanted: Wanted::default(), limit: DEFAULT_LIMIT, after: None };
        for (name, value) in pairs(query)? {
            match name {
                "limit" => parsed.limit = limit(&value)?,
                "cursor" => {
                    let after = Cursor::parse(&value);
                    parsed.after = Some(after.ok_or_else(|| bad(name, "must be the `next` of the page before"))?);
                }
                name if Wanted::NAMES.contains(&name) => {
                    parsed.wanted.set(name, value).map_err(|what| bad(name, &what))?;
                }
                _ => return Err(unknown(&[&Wanted::NAMES[..], &["limit", "cursor"]].concat())),
            }
        }
        Ok(parsed)
    }
}

/// Reads how much a list may have.
pub(super) fn limit(value: &str) -> Result<usize, Problem> {
    let limit = value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    limit.ok_or_else(|| bad("limit", &format!("must be a number from 1 to {MAX_LIMIT}")))
}

/// Reads the query of a change that may give its reason.
pub(super) fn reason(query: Option<&str>) -> Result<Option<String>, Problem> {
    let mut reason = None;
    for (name, value) in pairs(query)? {
        match name {
            "reason" => reason = Some(value),
            _ => return Err(unknown(&["reason"])),
        }
    }
    Ok(reason)
}

/// The parameters of a query, each at most once.
pub(super) fn pairs(query: Option<&str>) -> Result<Vec<(&str, String)>, Problem> {
    let mut pairs: Vec<(&str, String)> = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        // Encoders of forms write a space as `+`: taken for a plus, it would find nothing.
        if MAY_HOLD_SPACE.contains(&name) && value.contains('+') {
            return Err(bad(name, "holds a `+`: write %20 for a space, and %2B for a plus"));
        }
        let value = decode(value).ok_or_else(|| bad(name, "is not percent-encoded UTF-8"))?;
        if value.contains('\0') {
            return Err(bad(name, NUL));
        }
        if pairs.iter().any(|(other, _)| *other == name) {
            return Err(bad(name, "stands there twice"));
        }
        pairs.push((name, value));
    }
    Ok(pairs)
}

/// The name is the client's own, and may be a mistyped secret: it is not repeated.
pub(super) fn unknown(known: &[&str]) -> Problem {
    Kind::BadRequest.because(format!("a query parameter is unknown; known are: {}", known.join(", ")))
}

/// What is wrong with a parameter.
pub(super) fn bad(name: &str, what: &str) -> Problem {
    Kind::BadRequest.because(format!("query parameter `{name}` {what}"))
}

/// Decodes percent-encoding. A `+` is itself: no key holds a space, and many hold a `+`.
fn decode(text: &str) -> Option<String> {
    String::from_utf8(percent_decode(text.as_bytes())?).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::idempotency::record::{RecordId, State, Timestamp};
    use crate::store::{IdPrefix, Since};

    #[test]
    fn nothing_is_all_with_the_default_limit() {
        for query in [None, Some(""), Some("&")] {
            let query = Query::parse(query).unwrap();
            assert_eq!((query.limit, query.after), (100, None));
            assert!(query.wanted.is_everything());
        }
    }

    #[test]
    fn everything_at_once() {
        let cursor = Cursor { claimed_at: Timestamp(7), id: RecordId([10; 32]), position: 3 };
        let query = format!("state=in-flight&route=a%20b+c&older_than=1h&since=2d&id=0aB&limit=7&cursor={cursor}");
        let Query { wanted, limit, after } = Query::parse(Some(&query)).unwrap();
        assert_eq!(wanted.state, Some(State::InFlight));
        assert_eq!(wanted.route.as_deref(), Some("a b+c"));
        assert_eq!(wanted.older_than, Some(Duration::from_secs(3600)));
        assert_eq!(wanted.since, Some(Since::Ago(Duration::from_secs(2 * 86400))));
        assert_eq!(wanted.id, IdPrefix::parse("0ab"));
        assert_eq!((limit, after), (7, Some(cursor)));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        let old_cursor = format!("cursor={}", "0a".repeat(32));
        for (query, said) in [
            ("state=lost", "`state` must be one of: in-flight, completed, unknown"),
            ("limit=0", "`limit` must be a number from 1 to 1000"),
            ("limit=1001", "`limit` must be"),
            ("limit=ten", "`limit` must be"),
            ("older_than=3", "`older_than` must be a duration"),
            ("since=3", "`since` must be a duration such as 1h, or a time"),
            ("id=xyz", "`id` must be an id, or the first of its 64"),
            ("cursor=3", "`cursor` must be the `next`"),
            (&old_cursor, "`cursor` must be the `next`"),
            ("route=", "`route` is empty"),
            ("route", "`route` is empty"),
            ("route=%zz", "`route` is not percent-encoded"),
            ("route=%ff", "`route` is not percent-encoded"),
            ("route=%e", "`route` is not percent-encoded"),
            ("route=a%00b", "`route` holds a NUL character"),
            ("key=%01", "`key` is no key: "),
            ("route=a&route=b", "`route` stands there twice"),
            ("older-than=1h", "known are: state, route, key, id, older_than, since, scope, limit, cursor"),
        ] {
            let problem = format!("{:?}", Query::parse(Some(query)).unwrap_err());
            assert!(problem.contains(said), "{query}: {problem}");
        }
    }

    #[test]
    fn a_change_may_give_its_reason() {
        assert_eq!(reason(None).unwrap(), None);
        assert_eq!(reason(Some("reason=twice%20paid")).unwrap().as_deref(), Some("twice paid"));
        for query in ["reason=a&reason=b", "why=a", "reason=%", "reason=twice+paid"] {
            assert!(reason(Some(query)).is_err(), "{query}");
        }
    }
}
