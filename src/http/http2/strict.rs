//! Checks HTTP/2 requests.
//!
//! A request may be forwarded as HTTP/1.1 and must be the same request there, so the rules for HTTP/1.1 heads apply
//! (RFC 9113, 8.2 and 10.3). h2 has already refused upper-case names, connection headers, `te` other than `trailers`,
//! control characters, and missing, repeated or misplaced pseudo-headers.

use http::header::{CONTENT_LENGTH, COOKIE, EXPECT};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method};

use crate::http::fault::Fault;
use crate::http::http1::check_target;
use crate::http::limits::{LINE_OVERHEAD, Limits, size_of_fields};
use crate::http::white_space::is_padded;

/// Checks a head, and joins its cookies.
pub(super) fn judge(parts: &mut Parts, limits: &Limits) -> Result<(), Fault> {
    // h2 refuses heads above its own limit, which is 48 KiB or more.
    if size(parts) >= limits.max_header_size {
        return Err(Fault::HeadTooLarge);
    }
    if parts.method == Method::CONNECT {
        return Err(Fault::Malformed("CONNECT is not served here"));
    }
    let target = parts.uri.path_and_query().map(|target| target.as_str()).unwrap_or_default();
    check_target(target.as_bytes())?;
    join_cookies(&mut parts.headers);
    if parts.headers.len() > limits.max_headers {
        return Err(Fault::TooManyHeaders);
    }
    for (name, value) in &parts.headers {
        if is_padded(value) {
            return Err(Fault::Malformed("a header has white space around its value (RFC 9113, 8.2.1)"));
        }
        if *name == EXPECT {
            Fault::of_expectation(value.as_bytes(), false)?;
        }
    }
    check_length(&parts.headers)
}

/// The size of a head, with its pseudo-headers, as h2 counts it.
fn size(Parts { method, uri, headers, .. }: &Parts) -> usize {
    let pseudo = [
        Some((":method", method.as_str())),
        uri.scheme_str().map(|scheme| (":scheme", scheme)),
        uri.authority().map(|authority| (":authority", authority.as_str())),
        uri.path_and_query().map(|path| (":path", path.as_str())),
    ];
    let pseudo = pseudo.into_iter().flatten().map(|(name, value)| name.len() + value.len() + LINE_OVERHEAD);
    pseudo.sum::<usize>() + size_of_fields(headers)
}

fn check_length(headers: &HeaderMap) -> Result<(), Fault> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let Some(length) = lengths.next() else { return Ok(()) };
    if lengths.next().is_some() {
        return Err(Fault::Malformed("the request has more than one Content-Length (RFC 9112, 6.3)"));
    }
    if length.is_empty() || length.len() > 18 || !length.as_bytes().iter().all(u8::is_ascii_digit) {
        return Err(Fault::Malformed("Content-Length is not one number (RFC 9110, 8.6)"));
    }
    Ok(())
}

/// A client may split cookies into several headers for better compression. HTTP/1.1 needs a single one (RFC 9113,
/// 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let mut crumbs = headers.get_all(COOKIE).iter();
    if crumbs.nth(1).is_none() {
        return;
    }
    let crumbs = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes);
    let crumbs: Vec<_> = crumbs.filter(|crumb| !crumb.is_empty()).collect();
    // Valid values joined by valid text are a valid value.
    if let Ok(cookies) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        headers.insert(COOKIE, cookies);
    }
}

#[cfg(test)]
mod tests {
    use http::uri::PathAndQuery;
    use http::{HeaderName, Request};

    use super::*;

    fn judged(method: &str, target: &str, lines: &[(&'static str, &'static str)]) -> Result<HeaderMap, Fault> {
        let mut parts = Request::builder().method(method).uri(target).body(()).unwrap().into_parts().0;
        for (name, value) in lines {
            parts.headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        judge(&mut parts, &Limits { max_headers: 4, ..Limits::default() }).map(|()| parts.headers)
    }

    #[test]
    fn ambiguous_requests_are_refused() {
        let of = |lines: &[(&'static str, &'static str)]| judged("POST", "http://a/x?y", lines);
        assert!(of(&[("content-length", "5"), ("expect", "100-Continue"), ("empty", "")]).is_ok());
        for lines in [
            &[("a", " b")][..],
            &[("a", "b\t")],
            &[("a", " ")],
            &[("content-length", "5"), ("content-length", "5")],
            &[("content-length", "5, 5")],
            &[("content-length", "+5")],
            &[("content-length", "")],
            &[("content-length", "9999999999999999999")],
        ] {
            assert!(matches!(of(lines), Err(Fault::Malformed(_))), "{lines:?}");
        }
        assert_eq!(of(&[("expect", "more")]), Err(Fault::Expectation));
        assert_eq!(of(&[("a", ""); 5]), Err(Fault::TooManyHeaders));
        assert!(judged("CONNECT", "a:443", &[]).is_err());
        assert!(judged("OPTIONS", "*", &[]).is_ok());
        assert!(judged("GET", "http://a/\u{e9}", &[]).is_err());
        let mut without_path = Request::new(()).into_parts().0;
        without_path.uri = PathAndQuery::from_static("?x").into();
        assert!(judge(&mut without_path, &Limits::default()).is_err());
    }

    #[test]
    fn a_head_counts_with_its_pseudo_headers_and_32_bytes_for_each_line() {
        let mut parts = Request::post("http://a/x?y").header("ab", "cde").body(()).unwrap().into_parts().0;
        let size = (7 + 4) + (7 + 4) + (10 + 1) + (5 + 4) + (2 + 3) + 5 * 32;
        let mut judged = |max_header_size| judge(&mut parts, &Limits { max_header_size, ..Limits::default() });
        assert_eq!((judged(size), judged(size + 1)), (Err(Fault::HeadTooLarge), Ok(())));
    }

    #[test]
    fn crumbs_are_one_cookie_header_in_their_order() {
        let lines = [("cookie", "a=b"), ("x", "y"), ("cookie", "c=d; e=f"), ("cookie", "g=h")];
        let headers = judged("GET", "http://a/", &lines).unwrap();
        assert_eq!(headers.get_all(COOKIE).iter().collect::<Vec<_>>(), ["a=b; c=d; e=f; g=h"]);
        assert_eq!(headers.get_all("x").iter().count(), 1);
        // Joined, an empty one would leave white space at the end.
        let empty = judged("GET", "http://a/", &[("cookie", ""), ("cookie", "a=b"), ("cookie", "")]).unwrap();
        assert_eq!(empty.get_all(COOKIE).iter().collect::<Vec<_>>(), ["a=b"]);
        // However many there are, they count as one of four.
        let many: Vec<_> =
            std::iter::repeat_n(("cookie", "a=b"), 50).chain([("x", "1"), ("y", "1"), ("z", "1")]).collect();
        assert!(judged("GET", "http://a/", &many).is_ok());
    }
}
