//! A question to the upstream of a route, on behalf of a request: one GET, whose answer is small.

pub(super) mod probe;
pub(super) mod reauthorize;
pub(super) mod reconcile;

use http::header::{EXPECT, HOST, RANGE, TRAILER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::Gate;
use super::claim::attempt::{head_of_answer, whole_answer};
use super::claim::protected::ProtectedRequest;
use super::pass;
use crate::http::answer::{Captured, capture};
use crate::http::body::Body;
use crate::http::headers::to_upstream;
use crate::http::problem::Problem;
use crate::http::upstream::{Error, Reuse, SendContext, Sharing, Upstream};
use crate::http::usage::Account;
use crate::idempotency::codec::Answer;
use crate::idempotency::credential;
use crate::idempotency::key::KeySource;
use crate::idempotency::recovery::Probe;
use crate::idempotency::scope::ScopePart;
use crate::idempotency::settle::Control;
use crate::telemetry::outcome::Code;

/// The largest answer to a question, in bytes; one that is larger is none.
const MAX_ANSWER: u64 = 1 << 20;

/// Headers by which some frameworks take a request for one of another method, and one that asks for another kind of answer: a
/// question is a GET, and reads.
const OF_METHOD: [&str; 4] = ["x-http-method-override", "x-http-method", "x-method-override", "prefer"];

/// The answer to a question.
pub(super) struct Inquired {
    /// As a client would get it, and whole.
    pub(super) answer: Answer,
    /// What the upstream says of a record with this answer.
    pub(super) control: Control,
}

/// What is asked, and of whom.
pub(super) struct Question<'a> {
    gate: &'a Gate,
    upstream: &'a Upstream,
    target: Uri,
    headers: HeaderMap,
    sending: SendContext<'static>,
}

impl<'a> Question<'a> {
    /// With the end-to-end headers of a request, less those of its body, its key and its preconditions, which mean the
    /// resource that it is sent to (RFC 9110, sections 13.1 and 14.2).
    pub(super) fn of(request: &'a ProtectedRequest, target: Uri) -> Self {
        let upstream = request.upstream();
        let keys: Vec<_> = request.policy().key.from.iter().flat_map(KeySource::headers).collect();
        let scope = &request.policy().scope;
        let is_of_caller = |name: &HeaderName| {
            let is_named = |part: &ScopePart| matches!(part, ScopePart::Header(own) if own == name);
            credential::HEADERS.contains(name) || scope.iter().any(is_named)
        };
        let is_of_request = |name: &HeaderName| {
            let text = name.as_str();
            text.starts_with("content-")
                || text.starts_with("if-")
                || [EXPECT, RANGE, TRAILER].contains(name)
                || OF_METHOD.contains(&text)
                || text == "digest"
                || text == "repr-digest"
                || keys.contains(&name) && !is_of_caller(name)
        };
        let mut headers = HeaderMap::with_capacity(request.head.headers.len());
        let of_caller = request.head.headers.iter().filter(|(name, _)| !is_of_request(name));
        headers.extend(of_caller.map(|(name, value)| (name.clone(), value.clone())));
        let headers = to_upstream(headers, &request.state.kept, request.head.forwarding_info());
        let mut sending = SendContext::default();
        if upstream.settings().reuse == Sharing::Caller {
            sending = sending.in_scope(request.scope_digest());
        }
        Self { gate: &request.gate, upstream, target, headers, sending }
    }

    /// With these headers, and counted for no client. Its connection is its own: those of requests belong to their threads.
    pub(super) fn of_gate(gate: &'a Gate, upstream: &'a Upstream, target: Uri, headers: HeaderMap) -> Self {
        Self { gate, upstream, target, headers, sending: SendContext::default().alone() }
    }

    /// With the headers that the configuration has for the gate's own questions, as no client waits for the answer.
    pub(super) fn of_worker(gate: &'a Gate, upstream: &'a Upstream, target: Uri, probe: &Probe) -> Self {
        let mut headers = HeaderMap::new();
        headers.extend(probe.headers.iter().map(|header| (header.name.clone(), header.value.clone())));
        Self::of_gate(gate, upstream, target, headers)
    }

    /// A digest of what is asked, of whom, and with which headers. Those that are another's at each try do not count: they
    /// say nothing of who asks.
    pub(super) fn digest(&self) -> [u8; 32] {
        const OF_A_TRY: [&str; 5] = ["traceparent", "tracestate", "x-request-id", "request-id", "date"];
        let mut digest = Sha256::new();
        let mut put = |part: &[u8]| {
            digest.update(part.len().to_be_bytes());
            digest.update(part);
        };
        put(self.upstream.settings().name.as_bytes());
        put(self.target.to_string().as_bytes());
        for (name, value) in self.headers.iter().filter(|(name, _)| !OF_A_TRY.contains(&name.as_str())) {
            put(name.as_str().as_bytes());
            put(value.as_bytes());
        }
        digest.finalize().into()
    }

    /// Asks once, for the upstream's timeout at most.
    pub(super) async fn ask(self) -> Result<Inquired, Problem> {
        let limit = self.upstream.settings().timeout;
        timeout(limit, self.exchange()).await.unwrap_or_else(|_| Err(pass::timed_out(limit)))
    }

    async fn exchange(mut self) -> Result<Inquired, Problem> {
        let upstream = self.upstream;
        if !self.headers.contains_key(HOST)
            && let Ok(host) = HeaderValue::from_str(&upstream.authority())
        {
            self.headers.insert(HOST, host);
        }
        let mut question = Request::new(Body::empty());
        *question.method_mut() = Method::GET;
        *question.uri_mut() = self.target;
        *question.headers_mut() = self.headers;
        let failed = |error: &Error| pass::problem(upstream, error);
        let sent = upstream.send(question, Reuse::Unprotected, &self.sending).await;
        let (response, connection) = sent.map_err(|error| failed(&error))?;
        let (parts, body) = response.into_parts();
        let version = parts.version;
        let control = Control::read(&parts.headers);
        let answer = head_of_answer(parts, &self.gate.added)?;
        let kind = (version, answer.status);
        match capture(body, kind, MAX_ANSWER, Account::new(&self.gate.shared.usage.memory, None), None).await {
            Ok(Captured::Whole { body, trailers, .. }) => {
                connection.return_to_pool();
                Ok(Inquired { answer: whole_answer(answer, body, trailers), control })
            }
            Ok(Captured::TooLarge(_)) => {
                let detail = "the upstream's answer to a question of the gate is too large";
                Err(Problem::new(Code::UpstreamBroken, detail))
            }
            Ok(Captured::Truncated) => Err(failed(&Error::Framing)),
            Err(error) => Err(failed(&Error::Unknown(error))),
        }
    }
}
