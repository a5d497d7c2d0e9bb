//! `Max-Forwards`: how many intermediaries may still forward a request (RFC 9110, 7.6.2).

use http::header::MAX_FORWARDS;
use http::{HeaderMap, HeaderValue, Method, StatusCode};

/// Counts this intermediary in. Returns the status of the answer where the request may not be forwarded, and this is its last
/// recipient. A value that is no number counts as none.
pub fn count(method: &Method, headers: &mut HeaderMap) -> Option<StatusCode> {
    if !matches!(*method, Method::OPTIONS | Method::TRACE) {
        return None;
    }
    let text = headers.get(MAX_FORWARDS)?.to_str().ok()?;
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // A number beyond these is none that anybody reaches.
    let left: u64 = text.parse().unwrap_or(u64::MAX);
    match left.checked_sub(1) {
        Some(left) => {
            headers.insert(MAX_FORWARDS, HeaderValue::from(left));
            None
        }
        None if *method == Method::OPTIONS => Some(StatusCode::NO_CONTENT),
        // To send a request back would show what proxies have added to it.
        None => Some(StatusCode::NOT_IMPLEMENTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_recipient_answers_and_others_count_themselves() {
        for (method, value, answer, left) in [
            (Method::OPTIONS, "0", Some(StatusCode::NO_CONTENT), "0"),
            (Method::OPTIONS, "000", Some(StatusCode::NO_CONTENT), "000"),
            (Method::TRACE, "0", Some(StatusCode::NOT_IMPLEMENTED), "0"),
            (Method::OPTIONS, "1", None, "0"),
            (Method::TRACE, "10", None, "9"),
            (Method::OPTIONS, "99999999999999999999", None, "18446744073709551614"),
            (Method::OPTIONS, "-1", None, "-1"),
            (Method::OPTIONS, "+1", None, "+1"),
            (Method::OPTIONS, "", None, ""),
            (Method::GET, "0", None, "0"),
        ] {
            let mut headers = HeaderMap::from_iter([(MAX_FORWARDS, HeaderValue::from_static(value))]);
            assert_eq!(count(&method, &mut headers), answer, "{method} {value}");
            assert_eq!(headers[MAX_FORWARDS], left, "{method} {value}");
        }
        assert_eq!(count(&Method::OPTIONS, &mut HeaderMap::new()), None);
    }
}
