//! One forward to the upstream, and how it is settled.

mod conclude;

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Version, response};
use hyper::ext::ReasonPhrase;
use tokio::time::{Instant, timeout};

use self::conclude::conclude;
use super::answer::Reply;
use super::errand::{Client, Errand};
use super::flights::Lead;
use super::pass;
use crate::http::body::Body;
use crate::http::budget::Taken;
use crate::http::capture::{Captured, Limits, Relayed, Rest, capture};
use crate::http::flow::{Flow, Flowing};
use crate::http::headers::{ATTEMPT, to_client};
use crate::http::problem::Problem;
use crate::http::replay;
use crate::http::upstream::{Carrier, Error, Reuse, Sending, Sharing};
use crate::idempotency::codec::{Answer, Content};
use crate::idempotency::key::Key;
use crate::idempotency::policy::Delivery;
use crate::idempotency::record::{Attempt, RecordId};
use crate::idempotency::settle::{Control, Ending, Verdict, settle};
use crate::store::{End, Expiry};
use crate::telemetry::outcome::{Code, Outcome};

/// How long a client that stopped reading is waited for.
const CLIENT_STALL: Duration = Duration::from_secs(30);

/// How an exchange with the upstream ended.
enum Exchanged {
    /// With an answer, taken in whole.
    Whole(Box<Whole>),
    /// With an answer that is larger than may be kept; the rest of it is still to come.
    Large(Box<Large>),
    /// Without an answer.
    Failed(Ending, Problem),
    /// The gate shuts down and waits no longer.
    Abandoned,
}

struct Whole {
    answer: Answer,
    /// The memory of its record, where it is not small.
    record: Option<Taken>,
    control: Control,
    carrier: Carrier,
}

struct Large {
    tombstone: Answer,
    control: Control,
    rest: Rest,
    carrier: Carrier,
}

/// Whom the answer is for.
struct Recipient {
    /// The client, until it has a reply, or the head of one.
    client: Option<Client>,
    /// The rest of a reply whose head it has.
    flow: Flow,
}

/// What an attempt comes to.
struct Ended {
    end: End,
    outcome: Outcome,
    /// The answer, whole or without its body; else the problem is the reply.
    answer: Result<Answer, Problem>,
    /// The memory that the record takes until it is settled.
    record: Option<Taken>,
}

impl Ended {
    fn without_answer(end: End, problem: Problem) -> Self {
        Self { end, outcome: Outcome::Problem(problem.code), answer: Err(problem), record: None }
    }
}

/// Runs the attempt that `lead` has claimed, settles it, and replies.
pub(super) async fn run(errand: &Errand, lead: Lead, attempt: Attempt, client: Client) {
    let began = Instant::now();
    let counted = errand.lane.metrics.attempt_began();
    let mut recipient = Recipient { client: Some(client), flow: Flow::default() };
    let exchanged = exchange(errand, attempt, &mut recipient).await;
    let took = began.elapsed();
    if !matches!(exchanged, Exchanged::Failed(Ending::Unreachable, _)) {
        errand.lane.estimator.took(took);
        errand.lane.metrics.upstream_took(took);
    }
    match exchanged {
        Exchanged::Whole(whole) => {
            let Whole { answer, record, control, carrier } = *whole;
            carrier.give_back();
            let ended = Ended { record, ..answered(errand, lead.id(), answer, &control) };
            conclude(errand, lead, attempt, ended, recipient, None).await;
        }
        Exchanged::Large(large) => {
            let Large { tombstone, control, rest, carrier } = *large;
            let ended = answered(errand, lead.id(), tombstone, &control);
            let limit = errand.upstream().settings().timeout;
            let limits = Limits { stall: limit, client: CLIENT_STALL, deadline: began + limit };
            if conclude(errand, lead, attempt, ended, recipient, Some((rest, limits))).await == Relayed::Whole {
                carrier.give_back_relayed();
            }
        }
        Exchanged::Failed(ending, problem) => {
            let end = match settle(errand.policy(), ending, &Control::default()) {
                Verdict::Release => End::Release,
                // There is no answer to complete with.
                Verdict::Hold | Verdict::Complete { .. } => hold(errand, lead.id(), problem.code.as_str()),
            };
            conclude(errand, lead, attempt, Ended::without_answer(end, problem), recipient, None).await;
        }
        Exchanged::Abandoned => {
            let detail = "the gate shuts down, and the upstream has not answered yet";
            let problem = Problem::new(Code::UpstreamTimeout, detail);
            let ended = Ended::without_answer(hold(errand, lead.id(), "shutdown"), problem);
            conclude(errand, lead, attempt, ended, recipient, None).await;
        }
    }
    drop(counted);
}

/// Sends the request once and takes in the answer.
async fn exchange(errand: &Errand, attempt: Attempt, recipient: &mut Recipient) -> Exchanged {
    let limit = errand.upstream().settings().timeout;
    let mut abandon = errand.gate.work.abandon.subscribe();
    if abandon.get() {
        return Exchanged::Failed(Ending::Unreachable, pass::unreachable());
    }
    let mut sending = Sending::of(errand.head.interim());
    if errand.upstream().settings().reuse == Sharing::Caller {
        sending = sending.in_scope(scope_digest(errand));
    }
    let exchanged = tokio::select! {
        biased;
        ended = timeout(limit, send(errand, attempt, &sending, recipient)) => {
            ended.unwrap_or_else(|_| Exchanged::Failed(Ending::Timeout, pass::timed_out(limit)))
        }
        _ = abandon.wait_for(|abandon| *abandon) => Exchanged::Abandoned,
    };
    match exchanged {
        // Both gave up on it: it tells no more what it did not tell before.
        Exchanged::Failed(Ending::Timeout, _) | Exchanged::Abandoned if !sending.has_begun() => {
            Exchanged::Failed(Ending::Unreachable, pass::unreachable())
        }
        ended => ended,
    }
}

/// A digest of the record's namespace and scope, and of the caller's proof: what a record with a fixed key would have.
fn scope_digest(errand: &Errand) -> [u8; 32] {
    let key = Key::from_fingerprint(&[0; 32]);
    let (namespace, scope) = (&errand.route.namespace, &errand.policy().scope);
    let (id, proof) = errand.gate.identifier.identify(namespace, scope, errand.head.caller(), &key);
    // The proof is bound to the id.
    proof.map_or(id.0, |proof| proof.0)
}

async fn send(errand: &Errand, attempt: Attempt, sending: &Sending, recipient: &mut Recipient) -> Exchanged {
    let upstream = errand.upstream();
    let (response, carrier) = match upstream.send(request(errand, attempt), Reuse::Protected, sending).await {
        Ok(answered) => answered,
        Err(error) => {
            let ending = match &error {
                Error::NotSent(_) => Ending::Unreachable,
                // The body was whole before the key was claimed: reading it back failed in the middle.
                Error::ClientBody(_) | Error::Unknown(_) | Error::Framing | Error::Head(_) | Error::TooManyHeaders => {
                    Ending::Broken
                }
            };
            let mut problem = pass::problem(upstream, &error);
            if ending == Ending::Broken {
                problem.code = Code::UpstreamBroken;
            }
            return Exchanged::Failed(ending, problem);
        }
    };
    let (parts, body) = response.into_parts();
    let version = parts.version;
    let control = Control::read(&parts.headers);
    if control.invalid > 0 {
        errand.lane.metrics.control_invalid(control.invalid);
        tracing::debug!(route = &*errand.lane.name, "Idempotency-Control has directives that are invalid: ignored");
    }
    let answer = head_of_answer(parts, &errand.gate.added);
    if answer.status.is_informational() {
        let detail = "the upstream switched protocols without being asked";
        return Exchanged::Failed(Ending::Broken, Problem::new(Code::UpstreamBroken, detail));
    }
    let Recipient { client, flow } = recipient;
    let mut begin = |body| {
        if let Some(client) = client.take() {
            client.reply(reply(errand, Outcome::Executed, Ok(answer.clone()), Some(body)));
        }
    };
    let flowing = may_stream(errand, &answer, &control).then_some(Flowing { flow, begin: &mut begin });
    let memory = errand.head.memory(&errand.gate.work.usage);
    let captured = capture(body, version, errand.policy().max_response_body, memory, flowing).await;
    match captured {
        Ok(Captured::Whole { body, trailers, record }) => {
            let trailers = trailers.filter(|_| recipient.client.is_some() || trailers_may_follow(errand, &answer));
            let content = Content { body, trailers: trailers.iter().flat_map(lines).collect() };
            let answer = Answer { content: Some(content), ..answer };
            Exchanged::Whole(Box::new(Whole { answer, record, control, carrier }))
        }
        Ok(Captured::Cut) => Exchanged::Failed(Ending::Broken, pass::problem(upstream, &Error::Framing)),
        Ok(Captured::TooLarge(rest)) => Exchanged::Large(Box::new(Large { tombstone: answer, control, rest, carrier })),
        Err(error) => Exchanged::Failed(Ending::Broken, pass::problem(upstream, &Error::Unknown(error))),
    }
}

/// Whether the client may have an answer while it comes. By its head it must be one that is kept: what is released or held
/// says so in its head, and a call says how it ended only in its trailers. A client must see where it breaks off, which
/// HTTP/1.0 shows by its length alone.
fn may_stream(errand: &Errand, answer: &Answer, control: &Control) -> bool {
    let policy = errand.policy();
    let is_kept =
        || matches!(settle(policy, Ending::Answered(answer.status.as_u16()), control), Verdict::Complete { .. });
    let shows_its_end = || errand.head.version > Version::HTTP_10 || has_length(answer);
    policy.body == Delivery::Stream && !errand.head.is_call() && is_kept() && shows_its_end()
}

/// Whether trailers can follow an answer whose head is with its client: HTTP/1.1 takes none behind a length, and none that
/// were not announced. A replay has those that the client got.
fn trailers_may_follow(errand: &Errand, answer: &Answer) -> bool {
    let announces = |(name, _): &(HeaderName, HeaderValue)| *name == TRAILER;
    errand.head.version >= Version::HTTP_2 || answer.headers.iter().any(announces) && !has_length(answer)
}

fn has_length(answer: &Answer) -> bool {
    answer.headers.iter().any(|(name, _)| *name == CONTENT_LENGTH)
}

fn request(errand: &Errand, attempt: Attempt) -> Request<Body> {
    let mut request = pass::buffered_request(errand.upstream(), &errand.head, &errand.body, &errand.lane.kept);
    if let Ok(mut token) = HeaderValue::from_str(&attempt.expose()) {
        token.set_sensitive(true);
        request.headers_mut().insert(ATTEMPT, token);
    }
    request
}

/// The answer as its client gets it, without its body and without what the gate `added` says itself.
fn head_of_answer(parts: response::Parts, added: &[HeaderName]) -> Answer {
    let reason = parts.extensions.get::<ReasonPhrase>().map(|reason| Bytes::copy_from_slice(reason.as_bytes()));
    let headers = to_client(parts.headers, added);
    Answer { status: parts.status, reason, headers: lines(&headers).collect(), content: None }
}

fn lines(headers: &HeaderMap) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    headers.iter().map(|(name, value)| (name.clone(), value.clone()))
}

/// What a complete answer means, or the head of one that is too large.
fn ending(errand: &Errand, answer: &Answer) -> Ending {
    let status = answer.status.as_u16();
    match &answer.content {
        Some(content) if errand.head.is_call() => Ending::of_call(status, &answer.headers, &content.trailers),
        // A call's own status is yet to come; but messages follow only what went well.
        Some(_) | None => Ending::Answered(status),
    }
}

/// What a complete answer comes to.
fn answered(errand: &Errand, id: RecordId, answer: Answer, control: &Control) -> Ended {
    let ending = ending(errand, &answer);
    let (end, outcome) = match settle(errand.policy(), ending, control) {
        Verdict::Complete { ttl, keep_body } => {
            let kept = if keep_body { answer.encode() } else { Answer { content: None, ..answer.clone() }.encode() };
            (End::Complete { answer: kept, expiry: Expiry::FromClaim(ttl) }, Outcome::Executed)
        }
        Verdict::Release => (End::Release, Outcome::Released),
        Verdict::Hold => {
            let why = if let Ending::Called(status) = ending { status.name() } else { answer.status.as_str() };
            (hold(errand, id, why), Outcome::Problem(Code::OutcomeUnknown))
        }
    };
    Ended { end, outcome, answer: Ok(answer), record: None }
}

fn hold(errand: &Errand, id: RecordId, why: &str) -> End {
    let (route, key, upstream) = (&*errand.lane.name, errand.key_shortened(), &*errand.upstream().settings().name);
    tracing::warn!(record = %id, route, upstream, key, why, "the outcome of an attempt is unknown");
    End::Hold
}

/// The reply with an answer of the upstream, or else with a problem.
pub(super) fn reply(errand: &Errand, outcome: Outcome, answer: Result<Answer, Problem>, body: Option<Body>) -> Reply {
    match answer {
        Ok(answer) => {
            let mut response: Response<Body> = replay::response(&answer, &errand.head.method, errand.head.version);
            match body {
                Some(body) => *response.body_mut() = body,
                // As it came to one who got it in pieces.
                None if errand.policy().body == Delivery::Stream && !has_length(&answer) => {
                    response = response.map(Body::without_length);
                }
                None => {}
            }
            errand.gate.keyed(Reply::new(outcome, response))
        }
        Err(problem) => errand.problem(problem),
    }
}

#[cfg(test)]
mod properties;
