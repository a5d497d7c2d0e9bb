//! The `Prefer` header (RFC 7240).

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::idempotency::delivery::Async;
use crate::idempotency::media;
use crate::idempotency::policy::{Mode, Policy};

/// Its name.
pub const PREFER: HeaderName = HeaderName::from_static("prefer");

/// The maximum, in seconds, to which longer times are clamped: 2^31, as for cache ages (RFC 9111, 1.2.2).
const LONGEST: u64 = 1 << 31;

/// How long a client is ready to wait for its answer: `wait` (RFC 7240, 4.3), in whole seconds.
///
/// The first `wait` counts, in whatever line it stands (section 2). Where its value is none, there is no preference.
#[must_use]
pub fn wait(headers: &HeaderMap) -> Option<Duration> {
    let first = headers.get_all(PREFER).iter().find_map(|line| {
        members(line.as_bytes()).find_map(|member| {
            let (name, value) = preference(member);
            name.eq_ignore_ascii_case(b"wait").then_some(value)
        })
    });
    seconds(&unquoted(first?)?)
}

/// Whether a client would rather have its request accepted than wait for its answer: `respond-async` (RFC 7240, 4.1).
#[must_use]
pub fn respond_async(headers: &HeaderMap) -> bool {
    headers
        .get_all(PREFER)
        .iter()
        .any(|line| members(line.as_bytes()).any(|member| preference(member).0.eq_ignore_ascii_case(b"respond-async")))
}

/// Whether a request with these headers is kept and delivered later, by the policy of its route. A gRPC call cannot be answered later: there
/// the preference is ignored (RFC 7240, section 2).
#[must_use]
pub fn is_to_be_accepted(policy: &Policy, method: &Method, headers: &HeaderMap) -> bool {
    policy.mode == Mode::Accept
        || policy.r#async == Async::Allow && respond_async(headers) && !media::is_grpc_call(method, headers)
}

/// Takes `respond-async` out of `Prefer`: it has been applied, and must not be applied again.
pub fn remove_respond_async(headers: &mut HeaderMap) {
    if !respond_async(headers) {
        return;
    }
    let is_other = |member: &&[u8]| !preference(member).0.eq_ignore_ascii_case(b"respond-async");
    let lines: Vec<Vec<u8>> = headers
        .get_all(PREFER)
        .iter()
        .map(|line| members(line.as_bytes()).filter(is_other).collect::<Vec<_>>().join(&b","[..]).trim_ascii().to_vec())
        .collect();
    headers.remove(PREFER);
    for line in lines.iter().filter(|line| !line.is_empty()) {
        // Members of a sound value make one.
        headers.extend(HeaderValue::from_bytes(line).ok().map(|line| (PREFER, line)));
    }
}

/// The members of a list; a comma in a quoted string parts none.
fn members(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    line.split(move |byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            _ => {}
        }
        *byte == b',' && !quoted
    })
}

/// The name and the value of a preference, without its parameters. A value that is absent is empty, which is the same
/// (RFC 7240, 2).
fn preference(member: &[u8]) -> (&[u8], &[u8]) {
    // `wait` has no quoted string before its first semicolon, unless the string is its whole value.
    let end = member.iter().position(|byte| *byte == b';').unwrap_or(member.len());
    let own = &member[..end];
    match own.iter().position(|byte| *byte == b'=') {
        Some(at) => (own[..at].trim_ascii(), own[at + 1..].trim_ascii()),
        None => (own.trim_ascii(), b""),
    }
}

/// The text of a token or of a quoted string (RFC 9110, 5.6.4).
fn unquoted(value: &[u8]) -> Option<Vec<u8>> {
    let Some(rest) = value.strip_prefix(b"\"") else { return Some(value.to_vec()) };
    let inner = rest.strip_suffix(b"\"")?;
    let mut text = Vec::with_capacity(inner.len());
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => text.push(*bytes.next()?),
            b'"' => return None,
            _ => text.push(*byte),
        }
    }
    Some(text)
}

/// Delta-seconds: digits and nothing else (RFC 9111, 1.2.2).
fn seconds(text: &[u8]) -> Option<Duration> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = text.iter().map(|digit| u64::from(digit - b'0'));
    let seconds = digits.fold(0_u64, |sum, digit| sum.saturating_mul(10).saturating_add(digit));
    Some(Duration::from_secs(seconds.min(LONGEST)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    /// Seconds, of these lines.
    #[track_caller]
    fn check(lines: &[&str], expected: Option<u64>) {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(PREFER, HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        assert_eq!(wait(&headers).map(|wait| wait.as_secs()), expected, "{lines:?}");
    }

    #[test]
    fn a_wait_is_found_wherever_it_stands() {
        check(&[], None);
        check(&[""], None);
        check(&["wait=5"], Some(5));
        check(&["wait=0"], Some(0));
        check(&["WAIT = 5"], Some(5));
        check(&["respond-async, wait=10"], Some(10));
        check(&["respond-async,wait=10;strict;why=\"a, b\", foo"], Some(10));
        check(&["return=minimal", "wait=7"], Some(7));
        check(&["foo; wait=3, wait=4"], Some(4));
        check(&["foo=\"wait=1, wait=2\", wait=3"], Some(3));
        check(&["foo=\"\\\", wait=2\", wait=3"], Some(3));
        check(&["foo=\";\", wait=3"], Some(3));
        check(&[", ,\twait=6\t,"], Some(6));
    }

    #[test]
    fn the_first_counts() {
        check(&["wait=1, wait=2"], Some(1));
        check(&["wait=1", "wait=2"], Some(1));
        check(&["handling=strict", "Wait=9, wait=2"], Some(9));
        check(&["wait=soon, wait=2"], None);
        check(&["wait", "wait=2"], None);
    }

    #[test]
    fn a_value_may_be_quoted() {
        check(&["wait=\"12\""], Some(12));
        check(&["wait=\"1\\2\" ; x"], Some(12));
        check(&["wait=\"\""], None);
        check(&["wait=\"1"], None);
        check(&["wait=1\""], None);
        check(&["wait=\"1\"2\""], None);
        check(&["wait=\"1\\\""], None);
    }

    #[test]
    fn a_wait_that_is_not_a_number_is_ignored() {
        for value in ["", "-1", "+1", "1.5", "1s", "0x1", "1 2", "one", "\u{661}"] {
            check(&[&format!("wait={value}")], None);
        }
        check(&["wait"], None);
        check(&["waiting=5"], None);
        check(&["wait=99999999999999999999999"], Some(LONGEST));
        check(&["wait=0000000000000000000000005"], Some(5));
    }

    #[test]
    fn an_asynchronous_answer_may_be_preferred() {
        for (line, expected) in [
            ("respond-async", true),
            ("wait=10, Respond-Async", true),
            ("respond-async; x=1", true),
            ("foo=\"respond-async\"", false),
            ("respond-asynchronously", false),
            ("wait=10", false),
        ] {
            let headers = [(PREFER, HeaderValue::from_static(line))].into_iter().collect();
            assert_eq!(respond_async(&headers), expected, "{line}");
        }
    }

    #[test]
    fn other_headers_are_no_preference() {
        let headers: HeaderMap =
            [(HeaderName::from_static("preference-applied"), HeaderValue::from_static("wait=5"))].into_iter().collect();
        assert_eq!(wait(&headers), None);
    }

    #[test]
    fn what_was_applied_is_taken_out_and_the_rest_stays() {
        for (lines, left) in [
            (&["respond-async"][..], &[][..]),
            (&["wait=5, Respond-Async", "handling=lenient"], &["wait=5", "handling=lenient"]),
            (&["a=\"respond-async, b\", respond-async;x=1 , c"], &["a=\"respond-async, b\", c"]),
            (&["wait=5 , c"], &["wait=5 , c"]),
        ] {
            let mut headers: HeaderMap = lines.iter().map(|line| (PREFER, line.parse().unwrap())).collect();
            remove_respond_async(&mut headers);
            let found: Vec<&str> = headers.get_all(PREFER).iter().map(|line| line.to_str().unwrap()).collect();
            assert_eq!(found, left, "{lines:?}");
        }
    }
}
