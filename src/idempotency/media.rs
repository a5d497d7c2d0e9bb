//! What the head of a request says of its body. A gRPC call says so by the type of its body.

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method};

/// The type of a body, where one line of `Content-Type` tells it.
pub(super) struct Media<'a> {
    /// `type/subtype`, in lower case.
    pub(super) essence: String,
    parameters: &'a [u8],
}

impl<'a> Media<'a> {
    /// Reads `Content-Type`. Nothing where it is absent, repeated or not text.
    pub(super) fn read(headers: &'a HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(CONTENT_TYPE).iter();
        let line = lines.next()?.as_bytes();
        if lines.next().is_some() {
            return None;
        }
        let end = line.iter().position(|&byte| byte == b';').unwrap_or(line.len());
        let essence = std::str::from_utf8(&line[..end]).ok()?.trim().to_ascii_lowercase();
        Some(Self { essence, parameters: &line[end..] })
    }

    /// Whether it is JSON: `application/json`, or a type with the suffix `+json` (RFC 6839).
    pub(super) fn is_json(&self) -> bool {
        self.essence == "application/json" || self.essence.ends_with("+json")
    }

    /// The value of a parameter (RFC 9110, section 5.6.6), unquoted. Nothing where it is absent or repeated, or where
    /// any parameter is malformed.
    pub(super) fn parameter(&self, name: &str) -> Option<Vec<u8>> {
        let mut found = None;
        let mut rest = self.parameters.trim_ascii();
        while let Some(after) = rest.strip_prefix(b";") {
            rest = after.trim_ascii_start();
            if rest.is_empty() || rest.starts_with(b";") {
                continue;
            }
            let equals = rest.iter().position(|&byte| byte == b'=')?;
            let (this, value) = (&rest[..equals], &rest[equals + 1..]);
            let (value, after) = if value.starts_with(b"\"") { quoted(value)? } else { token(value)? };
            if this.eq_ignore_ascii_case(name.as_bytes()) && found.replace(value).is_some() {
                return None;
            }
            rest = after.trim_ascii_start();
        }
        if rest.is_empty() { found } else { None }
    }
}

/// Whether the body is coded (gzip and the like), so that its bytes are not what its type says.
pub(super) fn is_coded(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().any(|line| {
        line.as_bytes().split(|&byte| byte == b',').any(|coding| {
            let coding = coding.trim_ascii();
            !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity")
        })
    })
}

/// Whether a request is a gRPC call: a POST whose type is `application/grpc`, bare or with a suffix such as `+proto`.
///
/// `application/grpc-web` is another protocol, whose trailers stand in the body.
#[must_use]
pub fn is_grpc_call(method: &Method, headers: &HeaderMap) -> bool {
    // First what tells most requests apart.
    *method == Method::POST && headers.get(CONTENT_TYPE).is_some_and(is_grpc)
}

/// Whether a `Content-Type` is that of gRPC calls and their answers.
#[must_use]
pub fn is_grpc(value: &HeaderValue) -> bool {
    const TYPE: &[u8] = b"application/grpc";
    let media = value.as_bytes();
    media.len() >= TYPE.len()
        && media[..TYPE.len()].eq_ignore_ascii_case(TYPE)
        && matches!(media.get(TYPE.len()), None | Some(b'+' | b';' | b' ' | b'\t'))
}

/// Splits a token off the front.
fn token(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let end = text.iter().position(|byte| matches!(byte, b';' | b' ' | b'\t' | b'"')).unwrap_or(text.len());
    if end == 0 { None } else { Some((text[..end].to_vec(), &text[end..])) }
}

/// Splits a quoted string (RFC 9110, section 5.6.4) off the front.
pub(super) fn quoted(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut value = Vec::new();
    let mut bytes = text.iter().enumerate().skip(1);
    while let Some((at, &byte)) = bytes.next() {
        match byte {
            b'"' => return Some((value, &text[at + 1..])),
            b'\\' => value.push(*bytes.next()?.1),
            _ => value.push(byte),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(content_type: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content_type))])
    }

    #[test]
    fn types_are_compared_in_lower_case() {
        for (text, json) in [
            ("application/json", true),
            ("Application/JSON ; charset=utf-8", true),
            ("application/vnd.api+json", true),
            ("application/jsonp", false),
            ("text/plain", false),
            ("", false),
        ] {
            assert_eq!(Media::read(&headers(text)).unwrap().is_json(), json, "{text}");
        }
        let mut twice = headers("application/json");
        twice.append(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        assert!(Media::read(&twice).is_none());
    }

    #[test]
    fn parameters_are_unquoted() {
        for (text, boundary) in [
            ("multipart/form-data; boundary=a-b", Some("a-b")),
            ("multipart/form-data;charset=x ; Boundary=\"a \\\"b;\" ; x=y", Some("a \"b;")),
            ("multipart/form-data; ; boundary=a;", Some("a")),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data; boundary", None),
            ("multipart/form-data; boundary=\"a", None),
            ("multipart/form-data; boundary=a b", None),
            ("multipart/form-data; boundary=a; boundary=a", None),
        ] {
            let found = Media::read(&headers(text)).unwrap().parameter("boundary");
            assert_eq!(found.as_deref(), boundary.map(str::as_bytes), "{text}");
        }
    }

    #[test]
    fn identity_is_not_a_coding() {
        for (text, coded) in [("gzip", true), ("identity", false), ("", false), ("identity, br", true)] {
            let headers = HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(text))]);
            assert_eq!(is_coded(&headers), coded, "{text}");
        }
        assert!(!is_coded(&HeaderMap::new()));
    }

    #[test]
    fn calls_are_told_by_their_type() {
        let is_call = |method: Method, media: &'static str| is_grpc_call(&method, &headers(media));
        for media in [
            "application/grpc",
            "application/grpc+proto",
            "Application/GRPC+json",
            "application/grpc; x=y",
            "application/grpc ;x=y",
        ] {
            assert!(is_call(Method::POST, media), "{media}");
            assert!(!is_call(Method::PUT, media), "{media}");
        }
        for media in ["application/grpc-web", "application/grpc-web+proto", "application/grpcx", "application/json", ""]
        {
            assert!(!is_call(Method::POST, media), "{media}");
        }
        assert!(!is_grpc_call(&Method::POST, &HeaderMap::new()));
    }
}
