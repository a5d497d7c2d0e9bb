//! Turns a stored answer into a response. Every protected answer reaches its client this way, the first time and on
//! replays.

use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Method, Response, StatusCode, Version};
use hyper::ext::ReasonPhrase;

use super::body::Body;
use super::headers::announce_trailers;
use crate::idempotency::codec::{Answer, Content};

/// The response of an answer to a request with this method, over this version. A tombstone gives an empty body.
#[must_use]
pub fn response(answer: &Answer, method: &Method, version: Version) -> Response<Body> {
    let has_trailers = has_trailers(answer, method);
    // HTTP/1 sends trailers only in chunks, which have no length, and only where they are announced. Taking the length out
    // afterwards would change the order.
    let is_chunked = has_trailers && version < Version::HTTP_2;
    let mut headers = HeaderMap::with_capacity(answer.headers.len() + 4);
    for (name, value) in answer.headers.iter().filter(|(name, _)| !(is_chunked && *name == CONTENT_LENGTH)) {
        headers.append(name, value.clone());
    }
    let body = match &answer.content {
        Some(content) if has_trailers => with_trailers(content, is_chunked.then_some(&mut headers)),
        Some(content) => match announced_length(answer.status, &headers) {
            Some(length) => Body::announced(length),
            None => Body::full(content.body.clone()),
        },
        None => Body::empty(),
    };
    let mut response = Response::new(body);
    *response.status_mut() = answer.status;
    *response.headers_mut() = headers;
    if let Some(reason) = answer.reason.as_ref().and_then(|bytes| ReasonPhrase::try_from(bytes.clone()).ok()) {
        response.extensions_mut().insert(reason);
    }
    response
}

/// The length that a 304 announces: that of the answer that it stands for, and nothing follows (RFC 9110, 8.6).
#[must_use]
pub fn announced_length(status: StatusCode, headers: &HeaderMap) -> Option<u64> {
    let length = headers.get(CONTENT_LENGTH).filter(|_| status == StatusCode::NOT_MODIFIED)?;
    length.to_str().ok()?.parse().ok()
}

fn has_trailers(answer: &Answer, method: &Method) -> bool {
    // A 304 has no body that they could follow.
    let has_body = *method != Method::HEAD && answer.status != StatusCode::NOT_MODIFIED;
    has_body && answer.content.as_ref().is_some_and(|content| !content.trailers.is_empty())
}

/// The body with its trailers, which are announced in the headers given.
fn with_trailers(content: &Content, headers: Option<&mut HeaderMap>) -> Body {
    let mut trailers = HeaderMap::with_capacity(content.trailers.len());
    for (name, value) in &content.trailers {
        trailers.append(name, value.clone());
    }
    if let Some(headers) = headers {
        announce_trailers(headers, &trailers);
    }
    Body::with_trailers(content.body.clone(), trailers)
}
