//! `traceparent` and `tracestate` (W3C Trace Context).

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::idempotency::hex;

/// Names the trace of a request and the span that it comes from.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Vendor-specific trace data.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Continues a trace, or starts one if `traceparent` is missing, repeated or invalid (sections 3.2.2 and 4.3). A new
/// trace drops the `tracestate` of the old one.
pub fn continue_or_start(headers: &mut HeaderMap) {
    let mut given = headers.get_all(TRACEPARENT).iter();
    if let (Some(only), None) = (given.next(), given.next())
        && is_valid(only.as_bytes())
    {
        return;
    }
    headers.remove(TRACESTATE);
    match begun() {
        Some(value) => headers.insert(TRACEPARENT, value),
        None => headers.remove(TRACEPARENT),
    };
}

/// Version, trace, parent and flags. A version to come may have more behind them, after another dash.
fn is_valid(value: &[u8]) -> bool {
    const LENGTH: usize = 55;
    let Some((known, rest)) = value.split_at_checked(LENGTH) else { return false };
    let digits = |from: usize, to: usize| &known[from..to];
    let is_hex = |digits: &[u8]| digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let (version, trace, parent, flags) = (digits(0, 2), digits(3, 35), digits(36, 52), digits(53, 55));
    let is_zero = |digits: &[u8]| digits.iter().all(|digit| *digit == b'0');
    [2, 35, 52].iter().all(|dash| known[*dash] == b'-')
        && [version, trace, parent, flags].into_iter().all(is_hex)
        && version != b"ff"
        && (rest.is_empty() || version != b"00" && rest[0] == b'-')
        && !is_zero(trace)
        && !is_zero(parent)
}

/// A new trace (section 3.2). The sampled flag is off.
fn begun() -> Option<HeaderValue> {
    // Neither id may be all zeroes. They are to be unique, not secret.
    let (trace, span) = (fastrand::u128(1..), fastrand::u64(1..));
    let mut text = *b"00-................................-................-00";
    hex::write(&trace.to_be_bytes(), &mut text[3..35]);
    hex::write(&span.to_be_bytes(), &mut text[36..52]);
    HeaderValue::from_bytes(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn after(parents: &[&str]) -> (String, bool) {
        let mut headers: HeaderMap = [(TRACESTATE, HeaderValue::from_static("a=1"))].into_iter().collect();
        for parent in parents {
            headers.append(TRACEPARENT, HeaderValue::from_str(parent).unwrap());
        }
        continue_or_start(&mut headers);
        assert_eq!(headers.get_all(TRACEPARENT).iter().count(), 1);
        (headers[TRACEPARENT].to_str().unwrap().to_owned(), headers.contains_key(TRACESTATE))
    }

    #[test]
    fn a_valid_trace_goes_on() {
        let later = |end: &str| format!("cc{}{end}", &GIVEN[2..]);
        for given in [GIVEN.to_owned(), GIVEN.replace("-01", "-ff"), later(""), later("-what-is-to-come"), later("-")] {
            assert_eq!(after(&[&given]), (given, true));
        }
    }

    #[test]
    fn another_one_is_begun_anew_without_its_state() {
        for given in [
            "",
            "00",
            &GIVEN[..54],
            &format!("{GIVEN}-00"),
            &format!("{GIVEN}0"),
            &format!("cc{}0", &GIVEN[2..]),
            &GIVEN.replacen("00", "ff", 1),
            &GIVEN.to_uppercase(),
            &GIVEN.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GIVEN.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GIVEN.replace('-', "_"),
            &GIVEN.replace("af", "ag"),
        ] {
            let (begun, has_state) = after(&[given]);
            assert!(begun != given && !has_state && is_valid(begun.as_bytes()), "{given}");
        }
        assert!(!after(&[]).1);
        let (begun, has_state) = after(&[GIVEN, GIVEN]);
        assert!(begun != GIVEN && !has_state, "two of them");
    }
}
