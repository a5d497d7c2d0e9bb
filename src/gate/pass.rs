//! Requests that are not protected: forwarded as they come, streaming both ways.

use std::time::Duration;

use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::timeout;

use super::answer::Reply;
use super::request::Head;
use crate::http::body::Body;
use crate::http::buffer::Buffered;
use crate::http::headers::{to_client, to_upstream};
use crate::http::problem::Problem;
use crate::http::upgrade;
use crate::http::upstream::{Error, Reuse, Upstream};
use crate::telemetry::outcome::{Code, Outcome};

/// How long to wait before an upstream that cannot be reached is tried again.
pub(super) const UNREACHABLE_RETRY: Duration = Duration::from_secs(1);

/// Forwards a request, and its answer without the headers in `dropped`.
pub(super) async fn forward(upstream: &Upstream, head: Head, body: Incoming, dropped: &[HeaderName]) -> Reply {
    let body = if http_body::Body::is_end_stream(&body) { Body::empty() } else { Body::relay(body, None) };
    exchange(upstream, head, body, dropped, Outcome::Passed).await
}

/// Forwards a request whose body was held already.
pub(super) async fn forward_buffered(
    upstream: &Upstream,
    head: Head,
    body: &Buffered,
    dropped: &[HeaderName],
    outcome: Outcome,
) -> Reply {
    exchange(upstream, head, body.body(), dropped, outcome).await
}

async fn exchange(upstream: &Upstream, mut head: Head, body: Body, dropped: &[HeaderName], outcome: Outcome) -> Reply {
    let client_upgrade = head.upgrade.take();
    let request = request(upstream, &head, body, client_upgrade.is_some());
    let reuse = if client_upgrade.is_some() { Reuse::Never } else { Reuse::Unprotected };
    let limit = upstream.settings().timeout;
    // Only the head of the answer is waited for with a limit: its body may stream for as long as it likes.
    let (mut response, connection) = match timeout(limit, upstream.send(request, reuse)).await {
        Ok(Ok(answered)) => answered,
        Ok(Err(error)) => return Reply::problem(problem(upstream, &error), None),
        Err(_) => return Reply::problem(timed_out(limit), None),
    };
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let mut headers = to_client(response.headers(), dropped);
    if switched {
        let Some(client) = client_upgrade else {
            let detail = "the upstream switched protocols without being asked";
            return Reply::problem(Problem::new(Code::UpstreamBroken, detail), None);
        };
        if let Some(protocol) = response.headers().get(UPGRADE) {
            headers.insert(UPGRADE, protocol.clone());
        }
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        upgrade::join(client, &mut response);
    }
    let (parts, body) = response.into_parts();
    let body = if switched { Body::empty() } else { Body::relay(body, Some(connection)) };
    let mut out = Response::new(body);
    *out.status_mut() = parts.status;
    *out.headers_mut() = headers;
    // The reason phrase, where it is not the standard one.
    *out.extensions_mut() = parts.extensions;
    Reply::new(outcome, out)
}

fn request(upstream: &Upstream, head: &Head, body: Body, upgrade: bool) -> Request<Body> {
    let mut headers = to_upstream(&head.headers, &[], head.forwarded());
    if !headers.contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(&upstream.authority())
    {
        headers.insert(HOST, host);
    }
    if head.headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if upgrade && let Some(protocol) = head.headers.get(UPGRADE) {
        headers.insert(UPGRADE, protocol.clone());
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    let mut request = Request::new(body);
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.target();
    *request.headers_mut() = headers;
    request
}

/// What failed, for a client.
pub(super) fn problem(upstream: &Upstream, error: &Error) -> Problem {
    let name = &*upstream.settings().name;
    match error {
        Error::NotSent(cause) => {
            tracing::warn!(upstream = name, %cause, "the upstream cannot be reached");
            Problem::new(Code::UpstreamUnreachable, "nothing was sent to the upstream; the request may be sent again")
                .retry_after(UNREACHABLE_RETRY)
        }
        Error::ClientBody(_) => Problem::new(Code::BadRequest, "the request's body is malformed or incomplete"),
        Error::Unknown(_) | Error::Coding => {
            tracing::warn!(upstream = name, cause = %error, "the upstream broke off");
            Problem::new(Code::UpstreamBroken, "the upstream broke off before its answer was complete")
        }
    }
}

/// The upstream took too long.
pub(super) fn timed_out(limit: Duration) -> Problem {
    Problem::new(
        Code::UpstreamTimeout,
        format!("the upstream did not answer within {}", humantime::format_duration(limit)),
    )
}

/// Nothing is configured for this request.
pub(super) fn no_route(head: &Head) -> Problem {
    let detail = format!("no route matches {} here, and there is no default upstream", head.method);
    Problem::new(Code::NoRoute, detail)
}
