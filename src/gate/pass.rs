//! Requests that are not protected: forwarded as they come, streaming both ways. What they share with attempts is here too.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use super::admission::ignored::IgnoredKey;
use super::answer::{RETRY_SOON, Reply};
use super::drain::Drain;
use super::observe::ObservedExchange;
use super::request::Head;
use super::{Gate, RouteState};
use crate::http::answer::{announced_length, may_have_length};
use crate::http::body::{Body, Progress};
use crate::http::fault::fault_of;
use crate::http::headers::{announce_trailers, to_client, to_upstream};
use crate::http::max_forwards;
use crate::http::problem::Problem;
use crate::http::request_body::{BufferError, Buffered, RequestBody};
use crate::http::upgrade::Upgrade;
use crate::http::upstream::{Error, NotSent, PooledConnection, Reuse, SendContext, Upstream};
use crate::http::usage::Account;
use crate::idempotency::media;
use crate::idempotency::policy::Mode;
use crate::idempotency::record::RequestId;
use crate::idempotency::scope::Scope;
use crate::route::Route;
use crate::telemetry::outcome::{Code, Outcome};

/// A body up to this size, in bytes, is awaited before it is sent on.
const AWAITED: u64 = 64 * 1024;

/// What a request needs on its way besides itself, be it unprotected or an attempt.
pub(super) struct ForwardOptions<'a> {
    /// Headers that no `Connection` can strip.
    pub(super) kept: &'a [HeaderName],
    /// The header that the key goes in besides its own place.
    pub(super) key: Option<(HeaderName, HeaderValue)>,
    /// Headers that the answer loses.
    pub(super) dropped: &'a [HeaderName],
    /// What tells its callers apart; `None` where no route matched.
    pub(super) scope: Option<&'a Scope>,
    /// The route's page on its problems.
    pub(super) docs: Option<&'a str>,
    /// The key that the request carries for nothing.
    pub(super) ignored: Option<IgnoredKey<'a>>,
    /// Takes notes, where its route observes.
    pub(super) observed: Option<ObservedExchange>,
    /// The request.
    pub(super) request: RequestId,
    /// Says when it must end, and waits for what lasts longer than it.
    pub(super) drain: &'a Drain,
}

impl<'a> ForwardOptions<'a> {
    /// For a request of this route that is not protected: the route protects nothing, or found no key.
    pub(super) fn of(gate: &'a Gate, state: &'a RouteState, route: &'a Route, head: &Head) -> Self {
        let (ignored, kept) = match route.policy.mode {
            Mode::Pass | Mode::Observe => (None, &[][..]),
            Mode::Protect | Mode::Accept => (IgnoredKey::of(gate, state, head), &state.kept[..]),
        };
        Self {
            kept,
            key: None,
            dropped: &[],
            scope: Some(&route.policy.scope),
            docs: route.policy.docs.as_deref(),
            ignored,
            observed: None,
            request: head.id,
            drain: &gate.shared.drain,
        }
    }

    /// For a request that no route matches.
    pub(super) fn unrouted(gate: &'a Gate, head: &Head) -> Self {
        let ignored = IgnoredKey::of(gate, &gate.unrouted, head);
        Self {
            kept: &[],
            key: None,
            dropped: &[],
            scope: None,
            docs: None,
            ignored,
            observed: None,
            request: head.id,
            drain: &gate.shared.drain,
        }
    }

    /// A problem as the reply.
    pub(super) fn problem(self, problem: Problem) -> Reply {
        let reply = Reply::problem(problem, self.docs, self.request);
        self.finish(reply)
    }

    /// The reply as the client gets it.
    pub(super) fn finish(self, reply: Reply) -> Reply {
        let reply = match self.observed {
            Some(observed) => observed.follow(reply),
            None => reply,
        };
        match self.ignored {
            Some(ignored) => ignored.tell(reply),
            None => reply,
        }
    }

    /// The upstream answers.
    fn answers(&mut self, response: &Response<Incoming>) {
        if let Some(observed) = &mut self.observed {
            observed.answers(response.status(), response.headers());
        }
    }
}

/// Forwards a request as it comes.
///
/// A small body is awaited first: a slow client is not to keep a connection to the upstream from others.
pub(super) async fn forward(
    gate: &Gate,
    upstream: &Upstream,
    mut head: Head,
    mut body: RequestBody,
    mut options: ForwardOptions<'_>,
) -> Reply {
    if let Some(status) = max_forwards::count(&head.method, &mut head.headers) {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = status;
        return options.finish(Reply::new(Outcome::Passed, answer));
    }
    let has_length = head.headers.contains_key(TRANSFER_ENCODING) || head.headers.contains_key(CONTENT_LENGTH);
    // HTTP/1.1 has trailers behind chunks only, which have no length.
    let has_trailers = head.version == Version::HTTP_2 && head.headers.contains_key(TRAILER) && !body.is_end_stream();
    // Over HTTP/2 the end of a request without a body may come behind its head. An upstream that expects no body of these
    // methods could take one without chunks for another request.
    if !has_length
        && !body.is_end_stream()
        && matches!(head.method, Method::GET | Method::HEAD)
        && options.drain.unless_over(body.begin()).await.is_none()
    {
        return options.problem(unreachable());
    }
    let (body, progress) = match body.size_hint().exact() {
        Some(1..=AWAITED) if head.upgrade.is_none() => {
            let usage = &gate.shared.usage;
            let party = || head.party(options.scope);
            let account = Account::new(head.memory(usage), Some(&party));
            match options.drain.unless_over(Buffered::read(body, AWAITED, account, usage)).await {
                None => return options.problem(unreachable()),
                Some(Ok(body)) => {
                    if let (Some(observed), Some(bytes)) = (&options.observed, body.in_memory()) {
                        observed.add_body(bytes);
                    }
                    (body.body(), None)
                }
                Some(Err(error)) => return options.problem(body_problem(gate, error)),
            }
        }
        _ if body.is_end_stream() => {
            if let Some(observed) = &options.observed {
                observed.add_body(&Bytes::new());
            }
            (Body::empty(), None)
        }
        _ => {
            let progress = Arc::new(Progress::default());
            let body = body.relay(Arc::clone(&progress));
            let body = match &options.observed {
                Some(observed) => observed.relay(body),
                None => body,
            };
            (body, Some(progress))
        }
    };
    // Its headers go on before it is sent. Who it counts for matters where connections are scarce.
    let known = upstream.is_scarce().then(|| head.party(options.scope));
    // HTTP/2 has bodies without a length, and hyper sends none with GET and HEAD unless the head says that there is one.
    let is_chunked = head.headers.contains_key(TRANSFER_ENCODING) || progress.is_some() && !has_length || has_trailers;
    // Met where the body has come; an older client does not know what it says (RFC 9110, 10.1.1).
    if progress.is_none() || head.version < Version::HTTP_11 {
        head.headers.remove(EXPECT);
    }
    let mut headers = to_upstream(std::mem::take(&mut head.headers), options.kept, head.forwarding_info());
    if is_chunked {
        headers.remove(CONTENT_LENGTH);
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let upgrade = head.upgrade.take().filter(|_| upstream.takes_upgrades());
    if let Some(upgrade) = &upgrade {
        upgrade.ask(&mut headers);
    }
    let request = request(upstream, &head, headers, body);
    let reuse = if upgrade.is_some() { Reuse::Never } else { Reuse::Unprotected };
    let party = || known.unwrap_or_else(|| head.party(None));
    let sending = SendContext::of(head.interim()).for_party(&party);
    let timing = head.asks(upstream);
    let exchanged = exchange(upstream, request, reuse, sending, (progress.as_deref(), options.drain)).await;
    drop(timing);
    if let Ok((response, _)) = &exchanged {
        options.answers(response);
    }
    match exchanged {
        Ok((response, connection)) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
            match upgrade.filter(|upgrade| upgrade.is_granted(response.headers())) {
                Some(upgrade) => {
                    let switched = switch(response, connection, upgrade, &options);
                    options.finish(Reply::new(Outcome::Passed, switched))
                }
                None => options.problem(unasked_switch()),
            }
        }
        Ok((response, connection)) => {
            let answer = answer(response, connection, options.dropped);
            options.finish(Reply::new(Outcome::Passed, answer))
        }
        Err(problem) => options.problem(problem),
    }
}

/// Forwards a request whose body was held already, without protection.
pub(super) async fn forward_buffered(
    upstream: &Upstream,
    head: &Head,
    body: &Buffered,
    options: ForwardOptions<'_>,
    outcome: Outcome,
) -> Reply {
    let request = buffered_request(upstream, head, body, &options);
    let party = || head.party(options.scope);
    let sending = SendContext::of(head.interim()).for_party(&party);
    let timing = head.asks(upstream);
    let exchanged = exchange(upstream, request, Reuse::Unprotected, sending, (None, options.drain)).await;
    drop(timing);
    match exchanged {
        Ok((response, _)) if response.status() == StatusCode::SWITCHING_PROTOCOLS => options.problem(unasked_switch()),
        Ok((response, connection)) => {
            let answer = answer(response, connection, options.dropped);
            options.finish(Reply::new(outcome, answer))
        }
        Err(problem) => options.problem(problem),
    }
}

/// A request whose body was held already, as it goes to the upstream.
pub(super) fn buffered_request(
    upstream: &Upstream,
    head: &Head,
    body: &Buffered,
    options: &ForwardOptions<'_>,
) -> Request<Body> {
    let mut headers = to_upstream(head.headers.clone(), options.kept, head.forwarding_info());
    // The gate has met it, for it has the body.
    headers.remove(EXPECT);
    if let Some((name, key)) = &options.key {
        headers.insert(name, key.clone());
    }
    if let Some(trailers) = body.trailers() {
        headers.remove(CONTENT_LENGTH);
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        announce_trailers(&mut headers, trailers);
    } else {
        headers.remove(TRAILER);
        if !body.is_empty() || head.headers.contains_key(TRANSFER_ENCODING) {
            // Its length is known by now, however it came.
            headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
    }
    request(upstream, head, headers, body.body())
}

fn request(upstream: &Upstream, head: &Head, mut headers: HeaderMap, body: Body) -> Request<Body> {
    if !headers.contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(&upstream.authority())
    {
        headers.insert(HOST, host);
    }
    let mut request = Request::new(body);
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.target();
    *request.headers_mut() = headers;
    request
}

/// Sends a request and waits for the head of its answer: for the upstream's timeout after the request has last moved, if
/// its body is under way, else after this, and until the drain is over. The body of the answer may stream for as long as it likes.
async fn exchange(
    upstream: &Upstream,
    request: Request<Body>,
    reuse: Reuse,
    sending: SendContext<'_>,
    (progress, drain): (Option<&Progress>, &Drain),
) -> Result<(Response<Incoming>, PooledConnection), Problem> {
    let limit = upstream.settings().timeout;
    if drain.is_over() {
        return Err(unreachable());
    }
    let mut over = std::pin::pin!(drain.over());
    let here = Progress::default();
    let progress = progress.unwrap_or(&here);
    let is_call = media::is_grpc_call(request.method(), request.headers());
    let mut answering = std::pin::pin!(upstream.send(request, reuse, &sending));
    loop {
        let deadline = progress.last() + limit;
        let answered = tokio::select! {
            biased;
            answered = timeout_at(deadline, answering.as_mut()) => answered,
            () = over.as_mut() => {
                return Err(if sending.has_begun() { abandoned() } else { unreachable() });
            }
        };
        match answered {
            Ok(ended) => return ended.map_err(|error| problem(upstream, &error)),
            Err(_) if progress.last() + limit > Instant::now() => {}
            // A call may wait for its upstream before it says more, and what it has said may have had an effect.
            Err(_) if progress.is_waiting() && !(is_call && sending.has_begun()) => {
                return Err(Problem::new(Code::RequestTimeout, "the request's body did not arrive in time"));
            }
            Err(_) if !sending.has_begun() => return Err(unreachable()),
            Err(_) => return Err(timed_out(limit)),
        }
    }
}

fn answer(response: Response<Incoming>, connection: PooledConnection, dropped: &[HeaderName]) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    let mut headers = to_client(std::mem::take(&mut parts.headers), dropped);
    if !may_have_length(parts.status) {
        headers.remove(CONTENT_LENGTH);
    }
    let announced = announced_length(parts.status, &headers);
    let body = connection.relay(parts.status, body);
    let mut out = Response::new(announced.map_or(body, Body::announced));
    *out.status_mut() = parts.status;
    *out.headers_mut() = headers;
    // The reason phrase, where it is not the standard one.
    *out.extensions_mut() = parts.extensions;
    out
}

fn switch(
    mut response: Response<Incoming>,
    connection: PooledConnection,
    upgrade: Upgrade,
    options: &ForwardOptions<'_>,
) -> Response<Body> {
    let protocol = response.headers().get(UPGRADE).cloned();
    let mut headers = to_client(std::mem::take(response.headers_mut()), options.dropped);
    if let Some(protocol) = protocol {
        headers.insert(UPGRADE, protocol);
    }
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    connection.detach();
    upgrade.join(&mut response, options.drain.tunnels.subscribe());
    let mut out = Response::new(Body::empty());
    *out.status_mut() = response.status();
    *out.headers_mut() = headers;
    out
}

pub(super) fn unasked_switch() -> Problem {
    Problem::new(Code::UpstreamBroken, "the upstream switched protocols without being asked")
}

/// What failed, for a client.
pub(super) fn problem(upstream: &Upstream, error: &Error) -> Problem {
    let name = &*upstream.settings().name;
    match error {
        Error::NotSent(NotSent::NoneFree(_)) => {
            let detail = "no connection to the upstream became free; nothing was sent";
            Problem::new(Code::Overloaded, detail).retry_after(RETRY_SOON)
        }
        // Sent again, it would be none either.
        Error::NotSent(NotSent::Host) => Problem::new(Code::BadRequest, NotSent::Host.to_string()),
        Error::NotSent(cause) => {
            if let Some(others) = upstream.unreachable_log().due() {
                let address = upstream.places();
                tracing::warn!(upstream = name, address, %cause, others, "the upstream cannot be reached");
            }
            unreachable()
        }
        Error::ClientBody(error) => client_body_problem(&**error),
        Error::Unknown(_) | Error::Framing | Error::Head(_) => {
            if let Some(others) = upstream.broken_log().due() {
                match error.is_malformed_body() {
                    true => {
                        tracing::warn!(upstream = name, cause = %error, others, "the upstream's answer is malformed")
                    }
                    false => tracing::warn!(upstream = name, cause = %error, others, "the upstream broke off"),
                }
            }
            Problem::new(Code::UpstreamBroken, upstream_fault(error))
        }
    }
}

/// Why there is no answer, though bytes may have been sent.
fn upstream_fault(error: &Error) -> &'static str {
    match error {
        Error::Unknown(error) if error.is_parse() => "the upstream's answer is not valid HTTP",
        error if error.is_malformed_body() => {
            "the upstream's answer is not valid HTTP: its chunks or its trailers are malformed"
        }
        Error::Framing => "the upstream's answer is not valid HTTP: its end is ambiguous",
        Error::Head(_) => "the head of the upstream's answer is too large, or not valid HTTP",
        _ => "the upstream broke off before its answer was complete",
    }
}

/// Why a body could not be held.
pub(super) fn body_problem(gate: &Gate, error: BufferError) -> Problem {
    match error {
        BufferError::TooLarge { limit } => too_large(limit),
        BufferError::Malformed(error) => client_body_problem(&error),
        BufferError::NoRoom => no_room_for_request(),
        BufferError::Spool(error) => spool_problem(gate, &error),
    }
}

/// The body is larger than so many bytes.
pub(super) fn too_large(limit: u64) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("the body is larger than the {limit} bytes allowed here"))
}

/// The temporary file failed.
pub(super) fn spool_problem(gate: &Gate, error: &io::Error) -> Problem {
    if let Some(others) = gate.shared.unspooled.due() {
        tracing::error!(%error, others, "the temporary file of a request body failed");
    }
    no_room_for_request()
}

pub(super) fn no_room_for_request() -> Problem {
    Problem::new(Code::Overloaded, "there is no room for the request's body; nothing was sent").retry_after(RETRY_SOON)
}

/// The client's body is none, or did not come to its end.
fn client_body_problem(error: &(dyn std::error::Error + 'static)) -> Problem {
    match fault_of(error) {
        Some(fault) => Problem::new(fault.code(), fault.to_string()),
        None => Problem::new(Code::BadRequest, "the request's body is malformed or incomplete"),
    }
}

/// Nothing was sent.
pub(super) fn unreachable() -> Problem {
    Problem::new(Code::UpstreamUnreachable, "nothing was sent to the upstream; the request may be sent again")
        .retry_after(RETRY_SOON)
}

/// The upstream took too long.
pub(super) fn timed_out(limit: Duration) -> Problem {
    let limit = humantime::format_duration(limit);
    Problem::new(Code::UpstreamTimeout, format!("the upstream did not answer within {limit}"))
}

/// The gate waits no longer.
pub(super) fn abandoned() -> Problem {
    Problem::new(Code::UpstreamTimeout, "the gate shuts down, and the upstream has not answered yet")
}

/// Nothing is configured for this request.
pub(super) fn no_route(head: &Head) -> Problem {
    let detail = format!("no route matches {} here, and there is no default upstream", head.method);
    Problem::new(Code::NoRoute, detail)
}
