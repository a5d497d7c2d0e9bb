//! `outcomes_body`: what an answer's own JSON says of how the attempt ended.

use std::fmt;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::OutcomeAction;
use crate::idempotency::json::{self, Fault};
use crate::idempotency::media::{self, Media};
use crate::idempotency::pointer::Pointer;

/// The largest body that is judged, in bytes.
pub const LARGEST_JUDGED: usize = 1 << 20;

/// `outcomes_body`: rules in order, of which the first that matches decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodyOutcomes(pub Vec<BodyRule>);

/// One rule: an answer with this value at this place ends its attempt so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyRule {
    /// Where the value stands.
    pub pointer: Pointer,
    /// What it has to be.
    pub equals: Scalar,
    /// What the end of the attempt does then.
    pub then: OutcomeAction,
}

/// A value of JSON that holds no others, and is not null.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// A string, compared character by character.
    Text(String),
    /// A number, compared by its exact value.
    Number(Number),
    /// True or false.
    Flag(bool),
}

/// A number by its exact value: `1`, `1.0` and `10e-1` are equal, and none of them is lost to rounding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number {
    negative: bool,
    /// The digits without zeros at either end; none for zero.
    digits: String,
    /// The power of ten of the last digit.
    exponent: i64,
}

/// The rules cannot read a body.
struct Unread;

impl BodyOutcomes {
    /// Whether an answer with these headers may be judged by its body: one that says that it is JSON, and is not coded.
    #[must_use]
    pub fn concern(&self, headers: &[(HeaderName, HeaderValue)]) -> bool {
        self.is_readable(headers) == Some(true)
    }

    /// Whether the rules can read the JSON of an answer with these headers; nothing where it is not JSON, or there are no rules.
    fn is_readable(&self, headers: &[(HeaderName, HeaderValue)]) -> Option<bool> {
        if self.0.is_empty() {
            return None;
        }
        let told = headers.iter().filter(|(name, _)| *name == CONTENT_TYPE || *name == CONTENT_ENCODING);
        let told: HeaderMap = told.cloned().collect();
        Media::read(&told).filter(Media::is_json).map(|_| !media::is_coded(&told))
    }

    /// What the rules make of an answer that ends its attempt `otherwise` without them; nothing where they say nothing of it.
    ///
    /// Its body is nothing where the gate does not have all of it. JSON that is not there, is coded, is too deep, is larger than
    /// [`LARGEST_JUDGED`], or breaks off cannot be read. Where a rule could keep its key, it does not become free.
    #[must_use]
    pub fn judge(
        &self,
        headers: &[(HeaderName, HeaderValue)],
        body: Option<&[u8]>,
        otherwise: OutcomeAction,
    ) -> Option<OutcomeAction> {
        let is_readable = self.is_readable(headers)?;
        let body = body.filter(|body| is_readable && body.len() <= LARGEST_JUDGED);
        body.map_or(Err(Unread), |body| self.first_match(body)).unwrap_or_else(|Unread| {
            let could_keep = self.0.iter().any(|rule| rule.then != OutcomeAction::Release);
            (could_keep && otherwise == OutcomeAction::Release).then_some(OutcomeAction::Hold)
        })
    }

    /// What the first rule that matches says. An empty body says nothing. A rule does not match where a name on its way stands
    /// twice; one that could keep the key may yet be meant then, and no later rule frees it.
    fn first_match(&self, body: &[u8]) -> Result<Option<OutcomeAction>, Unread> {
        let body = json::without_mark(body);
        if body.trim_ascii().is_empty() {
            return Ok(None);
        }
        let mut may_keep = false;
        for rule in &self.0 {
            match json::locate(body, &rule.pointer) {
                Ok(Some(value)) if rule.equals.is(value) => {
                    let then =
                        if may_keep && rule.then == OutcomeAction::Release { OutcomeAction::Hold } else { rule.then };
                    return Ok(Some(then));
                }
                Ok(_) => {}
                Err(Fault::Ambiguous) => may_keep |= rule.then != OutcomeAction::Release,
                // For one rule as for the next.
                Err(Fault::Syntax | Fault::TooDeep) => return Err(Unread),
            }
        }
        if may_keep { Err(Unread) } else { Ok(None) }
    }
}

impl Scalar {
    /// Whether a text of JSON has this value.
    fn is(&self, text: &[u8]) -> bool {
        match self {
            Self::Text(wanted) => json::string(text).is_some_and(|value| value == wanted.as_bytes()),
            Self::Number(wanted) => {
                std::str::from_utf8(text).ok().and_then(Number::parse).is_some_and(|number| number == *wanted)
            }
            Self::Flag(true) => text == b"true",
            Self::Flag(false) => text == b"false",
        }
    }
}

impl Number {
    /// Reads a number as JSON has it. Nothing where it is none, or its exponent is beyond all measure.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = format!("{whole}{fraction}");
        if whole.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let significant = digits.trim_matches('0');
        if significant.is_empty() {
            return Some(Self { negative: false, digits: String::new(), exponent: 0 });
        }
        let trailing = digits.len() - digits.trim_end_matches('0').len();
        let shift = i64::try_from(trailing).ok()?.checked_sub(i64::try_from(fraction.len()).ok()?)?;
        let exponent = exponent.parse::<i64>().ok()?.checked_add(shift)?;
        Some(Self { negative, digits: significant.to_owned(), exponent })
    }

    /// It as a whole number, where it is one and is not too large.
    #[must_use]
    pub fn to_i64(&self) -> Option<i64> {
        let zeros = usize::try_from(self.exponent).ok().filter(|zeros| *zeros < 20)?;
        let sign = if self.negative { "-" } else { "" };
        format!("{sign}0{}{}", self.digits, "0".repeat(zeros)).parse().ok()
    }
}

impl fmt::Display for Number {
    /// As JSON has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.negative { "-" } else { "" };
        match (self.digits.is_empty(), self.exponent) {
            (true, _) => f.write_str("0"),
            (false, 0) => write!(f, "{sign}{}", self.digits),
            (false, exponent) => write!(f, "{sign}{}e{exponent}", self.digits),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(pointer: &str, equals: Scalar, then: OutcomeAction) -> BodyRule {
        BodyRule { pointer: Pointer::parse(pointer).unwrap(), equals, then }
    }

    fn number(text: &str) -> Scalar {
        Scalar::Number(Number::parse(text).unwrap())
    }

    fn text(text: &str) -> Scalar {
        Scalar::Text(text.to_owned())
    }

    fn headers(lines: &[(&'static str, &'static str)]) -> Vec<(HeaderName, HeaderValue)> {
        let line = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        lines.iter().map(line).collect()
    }

    const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

    fn judge(rules: &[BodyRule], body: &str) -> Option<OutcomeAction> {
        BodyOutcomes(rules.to_vec()).judge(&headers(JSON), Some(body.as_bytes()), OutcomeAction::Store)
    }

    #[test]
    fn a_body_that_cannot_be_read_frees_no_key() {
        let rules = BodyOutcomes(vec![rule("/charged", Scalar::Flag(true), OutcomeAction::Store)]);
        let gzip = headers(&[("content-type", "application/json"), ("content-encoding", "gzip")]);
        let (json, text) = (headers(JSON), headers(&[("content-type", "text/plain")]));
        let large = vec![b' '; LARGEST_JUDGED + 1];
        let deep = format!("{}{}", "[".repeat(70), "]".repeat(70));
        let releasing = BodyOutcomes(vec![rule("/later", Scalar::Flag(true), OutcomeAction::Release)]);
        for (headers, body, is_held) in [
            (&json, None, true),
            (&json, Some(&large[..]), true),
            (&json, Some(&large[1..]), false),
            (&json, Some(deep.as_bytes()), true),
            (&gzip, Some(b"{}"), true),
            (&gzip, None, true),
            // Cut off, not JSON, and a value that stands twice; nothing at all says nothing.
            (&json, Some(b"{\"charged\":true"), true),
            (&json, Some(b"<html>"), true),
            (&json, Some(b"{\"charged\":true,\"charged\":false}"), true),
            (&json, Some(b" \r\n"), false),
            (&json, Some(b""), false),
            (&text, Some(&large), false),
            (&text, None, false),
        ] {
            assert_eq!(rules.judge(headers, body, OutcomeAction::Release), is_held.then_some(OutcomeAction::Hold));
            for otherwise in [OutcomeAction::Store, OutcomeAction::Hold] {
                assert_eq!(rules.judge(headers, body, otherwise), None);
            }
            for none_keeps in [&releasing, &BodyOutcomes::default()] {
                assert_eq!(none_keeps.judge(headers, body, OutcomeAction::Release), None);
            }
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = [
            rule("/error/retryable", Scalar::Flag(true), OutcomeAction::Release),
            rule("/error/code", text("busy"), OutcomeAction::Hold),
            rule("/status", number("1"), OutcomeAction::Store),
        ];
        for (body, action) in [
            ("{\"error\":{\"retryable\":true,\"code\":\"busy\"},\"status\":1}", Some(OutcomeAction::Release)),
            ("{\"error\":{\"retryable\":false,\"code\":\"b\\u0075sy\"},\"status\":1}", Some(OutcomeAction::Hold)),
            ("{\"status\":1.0}", Some(OutcomeAction::Store)),
            ("\u{feff}{\"status\":10e-1}", Some(OutcomeAction::Store)),
            ("{\"status\":\"1\"}", None),
            ("{\"error\":{\"retryable\":\"true\"}}", None),
            ("{\"error\":{\"retryable\":null}}", None),
            ("{\"error\":{\"retryable\":[true]}}", None),
            ("{\"error\":{\"retryable\":{\"\":true}}}", None),
            ("{}", None),
            ("", None),
        ] {
            assert_eq!(judge(&rules, body), action, "{body}");
        }
        assert_eq!(judge(&[], "{\"status\":1}"), None);
    }

    #[test]
    fn what_two_readers_could_read_differently_matches_nothing() {
        let rules = [
            rule("/a/b", Scalar::Flag(true), OutcomeAction::Release),
            rule("/c", Scalar::Flag(true), OutcomeAction::Store),
            rule("/d", Scalar::Flag(true), OutcomeAction::Release),
        ];
        for (body, action) in [
            // A name twice on the way: the next rule is looked at.
            ("{\"a\":{\"b\":true,\"b\":true},\"c\":true}", Some(OutcomeAction::Store)),
            ("{\"a\":{\"b\":true},\"\\u0061\":{},\"c\":true}", Some(OutcomeAction::Store)),
            // One that may keep the key is not passed over by one that frees it.
            ("{\"a\":{\"b\":true},\"c\":true,\"c\":1}", Some(OutcomeAction::Release)),
            ("{\"c\":true,\"c\":1,\"d\":true}", Some(OutcomeAction::Hold)),
            // Elsewhere it does not matter.
            ("{\"a\":{\"b\":true,\"x\":1,\"x\":2}}", Some(OutcomeAction::Release)),
            // Not JSON.
            ("{\"c\":true", None),
            ("{\"c\":true}}", None),
            ("{\"c\":true,}", None),
            ("{\"c\":true} x", None),
        ] {
            assert_eq!(judge(&rules, body), action, "{body}");
        }
        let deep = format!("{{\"a\":{{\"b\":true}},\"x\":{}{}}}", "[".repeat(70), "]".repeat(70));
        assert_eq!(judge(&rules, &deep), None);
    }

    #[test]
    fn only_json_that_is_not_coded_is_judged() {
        let rules = BodyOutcomes(vec![rule("/a", Scalar::Flag(true), OutcomeAction::Release)]);
        for (lines, is_judged) in [
            (&[("content-type", "application/json; charset=utf-8")][..], true),
            (&[("content-type", "application/problem+json")], true),
            (&[("content-type", "application/json"), ("content-encoding", "identity")], true),
            (&[("content-type", "application/json"), ("content-encoding", "gzip")], false),
            (&[("content-type", "application/json"), ("content-type", "application/json")], false),
            (&[("content-type", "text/json")], false),
            (&[("content-type", "application/x-ndjson")], false),
            (&[], false),
        ] {
            let headers = headers(lines);
            assert_eq!(rules.concern(&headers), is_judged, "{lines:?}");
            assert_eq!(
                rules.judge(&headers, Some(b"{\"a\":true}"), OutcomeAction::Store).is_some(),
                is_judged,
                "{lines:?}"
            );
        }
        assert!(!BodyOutcomes::default().concern(&headers(JSON)));
    }

    #[test]
    fn a_body_that_is_too_large_is_not_judged() {
        let rules = [rule("/a", Scalar::Flag(true), OutcomeAction::Release)];
        let body = |length: usize| format!("{{\"a\":true{}}}", " ".repeat(length - "{\"a\":true}".len()));
        assert_eq!(judge(&rules, &body(LARGEST_JUDGED)), Some(OutcomeAction::Release));
        assert_eq!(judge(&rules, &body(LARGEST_JUDGED + 1)), None);
    }

    #[test]
    fn numbers_are_compared_by_their_exact_value() {
        let equal = |one: &str, other: &str| Number::parse(one) == Number::parse(other);
        for (one, other) in [
            ("1", "1.0"),
            ("1", "100e-2"),
            ("1", "0.01E+2"),
            ("0", "-0.000e7"),
            ("0.1", "1e-1"),
            ("-12.50", "-125e-1"),
            ("9007199254740993", "9007199254740993.0"),
            ("1e400", "10e399"),
        ] {
            assert!(equal(one, other), "{one} {other}");
        }
        for (one, other) in [
            ("1", "-1"),
            ("1", "10"),
            ("9007199254740993", "9007199254740992"),
            ("0.1", "0.1000000000000000055511151231257827"),
            ("1e400", "1e401"),
        ] {
            assert!(!equal(one, other), "{one} {other}");
        }
        for text in ["", "-", "true", "\"1\"", "1e99999999999999999999", "1e9223372036854775807000", ".5", "0x1", "1,0"]
        {
            assert_eq!(Number::parse(text), None, "{text}");
        }
        assert!(Number::parse("0e99999999999999999999").is_some_and(|zero| zero == Number::parse("0").unwrap()));
    }

    proptest! {
        #[test]
        fn a_number_is_what_it_is_written_as(value: i32, power in 0_usize..9, zeros in 0_usize..5) {
            let plain = Number::parse(&value.to_string()).unwrap();
            let shifted = format!("{value}{}e-{power}", "0".repeat(power));
            prop_assert_eq!(&Number::parse(&shifted).unwrap(), &plain);
            let long = format!("{value}.{}", "0".repeat(zeros));
            if zeros > 0 {
                prop_assert_eq!(&Number::parse(&long).unwrap(), &plain);
            }
            prop_assert_eq!(&Number::parse(&plain.to_string()).unwrap(), &plain);
            prop_assert_eq!(plain.to_i64(), Some(value.into()));
        }

        /// Whatever an upstream sends is judged, or matches nothing.
        #[test]
        fn any_body_is_judged_without_a_panic(body in proptest::collection::vec(any::<u8>(), 0..64), json in "[-{}\\[\\]\":,a0-9.eE+ ]{0,40}") {
            let rules = BodyOutcomes(vec![rule("/a", number("1"), OutcomeAction::Release), rule("", text("a"), OutcomeAction::Hold)]);
            for body in [&body, json.as_bytes()] {
                let _ = rules.judge(&headers(JSON), Some(body), OutcomeAction::Release);
            }
        }
    }
}
