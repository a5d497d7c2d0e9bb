//! The policy page: what clients may expect of each protected route, made from the configuration.
//!
//! It tells what a client needs to retry safely, and nothing of what stands behind the gate: no upstream, no secret, no text
//! of `const:` in a scope.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};

use self::document::Document;
use crate::gate::answer::takes_get_only;
use crate::http::body::Body;
use crate::http::headers::{is_known, members};
use crate::http::problem::set_date;
use crate::http::upstream::Upstream;
use crate::route::Router;

mod document;
mod html;

/// How long a cache may keep the page without asking again: a reload can change it.
const CACHED: HeaderValue = HeaderValue::from_static("public, max-age=60");

/// The page in both of its forms.
pub(in crate::gate) struct PolicyPage {
    path: Arc<str>,
    json: Form,
    html: Form,
}

/// One form of the page.
struct Form {
    body: Bytes,
    media_type: HeaderValue,
    etag: HeaderValue,
    /// What a browser may do with it.
    security: HeaderValue,
}

impl PolicyPage {
    /// The page at `path` of a gate with these routes. `upstreams` are in the order that routes refer to.
    pub(in crate::gate) fn new(path: Arc<str>, router: &Router, upstreams: &[Upstream]) -> Self {
        let document = Document::of(router, upstreams);
        let json = serde_json::to_vec_pretty(&document).unwrap_or_default();
        Self {
            path,
            json: Form::new(json, "application/json", "default-src 'none'; frame-ancestors 'none'"),
            html: Form::new(html::page(&document).into(), "text/html; charset=utf-8", &html::security()),
        }
    }

    /// Whether a request asks for the page.
    pub(in crate::gate) fn is_asked_for(&self, uri: &Uri) -> bool {
        is_at(&self.path, uri)
    }

    /// The answer to a request that asks for the page.
    pub(in crate::gate) fn answer<B>(&self, request: &Request<B>) -> Response<Body> {
        let headers = request.headers();
        if *request.method() != Method::GET && *request.method() != Method::HEAD {
            return takes_get_only();
        }
        let mut response = if prefers_html(headers) { self.html.answer(headers) } else { self.json.answer(headers) };
        set_date(response.headers_mut());
        response
    }
}

/// Whether a request asks for the page at this path. The query does not count.
pub(super) fn is_at(path: &str, uri: &Uri) -> bool {
    uri.path() == path
}

impl Form {
    fn new(body: Vec<u8>, media_type: &'static str, security: &str) -> Self {
        let etag = format!("\"{:016x}\"", digest(&body));
        Self {
            body: body.into(),
            media_type: HeaderValue::from_static(media_type),
            // Hexadecimal digits and base64 are sound values.
            etag: HeaderValue::try_from(etag).unwrap_or(HeaderValue::from_static("\"\"")),
            security: HeaderValue::try_from(security).unwrap_or(HeaderValue::from_static("default-src 'none'")),
        }
    }

    fn answer(&self, asked: &HeaderMap) -> Response<Body> {
        let is_known = is_known(asked, &self.etag);
        let mut response = Response::new(if is_known { Body::empty() } else { Body::full(self.body.clone()) });
        let headers = response.headers_mut();
        headers.insert(ETAG, self.etag.clone());
        headers.insert(CACHE_CONTROL, CACHED);
        headers.insert(VARY, HeaderValue::from_name(ACCEPT));
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            return response;
        }
        headers.insert(CONTENT_TYPE, self.media_type.clone());
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
        headers.insert(CONTENT_SECURITY_POLICY, self.security.clone());
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }
}

/// The first 64 bits of a digest.
fn digest(bytes: &[u8]) -> u64 {
    use sha2::{Digest as _, Sha256};
    Sha256::digest(bytes).iter().take(8).fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
}

/// Whether the client is a browser: it likes HTML better than JSON (RFC 9110, 12.5.1).
fn prefers_html(headers: &HeaderMap) -> bool {
    weight(headers, "text/html") > weight(headers, "application/json")
}

/// The weight of a media type, in thousandths: that of the most specific range that it is in.
fn weight(headers: &HeaderMap, media_type: &str) -> u16 {
    let whole = media_type.split_once('/').map(|(first, _)| format!("{first}/*")).unwrap_or_default();
    let mut best = (0, 0);
    for member in headers.get_all(ACCEPT).iter().flat_map(|line| members(line.as_bytes())) {
        let Ok(member) = std::str::from_utf8(member) else { continue };
        let mut parts = member.split(';').map(str::trim);
        let range = parts.next().unwrap_or_default().to_ascii_lowercase();
        let precision = match &*range {
            range if range == media_type => 3,
            range if range == whole => 2,
            "*/*" => 1,
            _ => continue,
        };
        let quality = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let quality = quality.map_or(1.0, |quality| quality.parse::<f32>().unwrap_or(0.0).clamp(0.0, 1.0));
        if precision > best.0 {
            best = (precision, (quality * 1000.0) as u16);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use http::header::IF_NONE_MATCH;

    use super::*;
    use crate::gate::tests::route;
    use crate::idempotency::policy::Mode;

    fn asked(accept: &str) -> bool {
        let mut headers = HeaderMap::new();
        if !accept.is_empty() {
            headers.insert(ACCEPT, HeaderValue::from_str(accept).unwrap());
        }
        prefers_html(&headers)
    }

    #[test]
    fn browsers_get_html_and_everybody_else_json() {
        for accept in [
            "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            "text/html",
            "TEXT/HTML;q=0.5, application/json;q=0.4",
            "text/*, application/json;q=0.9",
        ] {
            assert!(asked(accept), "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "application/json",
            "application/json, text/html",
            "text/html;q=0, */*",
            "text/html;q=x",
            "image/png",
            ";;,,=",
        ] {
            assert!(!asked(accept), "{accept}");
        }
    }

    /// The page of this route alone.
    fn page(route: crate::route::Route) -> PolicyPage {
        PolicyPage::new("/policy".into(), &Router::new(vec![route]).unwrap(), &[])
    }

    #[test]
    fn the_json_is_as_its_schema_says() {
        let schema = std::fs::read_to_string("docs/reference/policy-page.schema.json").unwrap();
        let validator = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
        let mut waiting = route("waiting", Mode::Protect, "header:X-Tenant");
        waiting.policy.in_flight = crate::idempotency::policy::InFlight::Wait(std::time::Duration::from_millis(1500));
        waiting.policy.key.required = true;
        waiting.policy.quota = Some(crate::idempotency::quota::Quota {
            new_keys: 10,
            per: std::time::Duration::from_secs(60),
            by: crate::idempotency::quota::QuotaBy::ClientIp,
        });
        waiting.policy.docs = Some("https://docs.example/".to_owned());
        for one in [waiting, route("plain", Mode::Protect, "credential"), route("none", Mode::Pass, "host")] {
            let json = serde_json::from_slice(&page(one).json.body).unwrap();
            let errors: Vec<_> = validator.iter_errors(&json).map(|error| error.to_string()).collect();
            assert!(errors.is_empty(), "{errors:#?}\n{json:#}");
        }
    }

    #[test]
    fn neither_form_tells_what_is_nobodys_business() {
        let page = page(route("inner-name", Mode::Protect, "const:hush"));
        for form in [&page.json, &page.html] {
            let text = std::str::from_utf8(&form.body).unwrap();
            assert!(!text.contains("hush"), "{text}");
            assert!(text.contains("const"), "{text}");
        }
    }

    #[test]
    fn what_the_configuration_says_is_text_in_the_html() {
        let mut odd = route("odd", Mode::Protect, "header:X-A&B");
        odd.policy.docs = Some("https://docs.example/?a=1&b='2'".to_owned());
        let page = page(odd);
        let html = std::str::from_utf8(&page.html.body).unwrap();
        assert!(html.contains("header:X-A&amp;B") || html.contains("header:x-a&amp;b"), "{html}");
        assert!(html.contains("?a=1&amp;b=&#39;2&#39;"), "{html}");
        assert!(!html.contains("<script"), "{html}");
    }

    #[test]
    fn a_known_page_is_not_sent_again() {
        let page = page(route("a", Mode::Protect, "host"));
        let ask = |tag: &HeaderValue| {
            let request = Request::get("/policy").header(IF_NONE_MATCH, tag).body(()).unwrap();
            page.answer(&request).status()
        };
        assert_eq!(ask(&page.json.etag), StatusCode::NOT_MODIFIED);
        assert_eq!(ask(&page.html.etag), StatusCode::OK, "the other form is another page");
        let weak = format!("\"other\", W/{}", page.json.etag.to_str().unwrap());
        assert_eq!(ask(&HeaderValue::try_from(weak).unwrap()), StatusCode::NOT_MODIFIED);
    }
}
