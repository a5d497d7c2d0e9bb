//! A kept answer as a response: the one way in which a protected answer reaches a client, the first time and every
//! time after.

use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use hyper::ext::ReasonPhrase;

use super::body::Body;
use crate::idempotency::codec::{Answer, Content};

/// The response of an answer to a request with this method. A tombstone gives an empty body.
#[must_use]
pub fn response(answer: &Answer, method: &Method) -> Response<Body> {
    let mut headers = HeaderMap::with_capacity(answer.headers.len() + 4);
    for (name, value) in &answer.headers {
        headers.append(name, value.clone());
    }
    let body = match &answer.content {
        Some(content) => body(answer.status, content, method, &mut headers),
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

fn body(status: StatusCode, content: &Content, method: &Method, headers: &mut HeaderMap) -> Body {
    if status == StatusCode::NOT_MODIFIED {
        // Its length is that of the answer it stands for, and nothing follows.
        let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        return announced.map_or_else(Body::empty, Body::announced);
    }
    if *method == Method::HEAD || content.trailers.is_empty() {
        return Body::full(content.body.clone());
    }
    let mut trailers = HeaderMap::with_capacity(content.trailers.len());
    for (name, value) in &content.trailers {
        trailers.append(name, value.clone());
    }
    // Trailers are only sent when they were announced (RFC 9110, 6.6.2), and only in chunks.
    headers.remove(CONTENT_LENGTH);
    if !headers.contains_key(TRAILER) {
        let names: Vec<_> = trailers.keys().map(http::HeaderName::as_str).collect();
        if let Ok(value) = HeaderValue::from_str(&names.join(", ")) {
            headers.insert(TRAILER, value);
        }
    }
    Body::with_trailers(content.body.clone(), trailers)
}
