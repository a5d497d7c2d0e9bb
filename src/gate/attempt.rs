//! One forward to the upstream, and how it is settled.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, response};
use hyper::ext::ReasonPhrase;
use tokio::time::{Instant, timeout};

use super::answer::Reply;
use super::errand::{Client, Errand};
use super::flights::{Lead, Released};
use super::{pass, settling};
use crate::http::body::{Body, Sender};
use crate::http::budget::Taken;
use crate::http::capture::{Captured, Limits, Relayed, Rest, capture};
use crate::http::headers::{ATTEMPT, to_client};
use crate::http::problem::Problem;
use crate::http::replay;
use crate::http::upstream::{Carrier, Error, Reuse, Sending};
use crate::idempotency::codec::{Answer, Content};
use crate::idempotency::record::{Attempt, RecordId, State, Timestamp};
use crate::idempotency::settle::{Control, Ending, Verdict, settle};
use crate::store::{End, Expiry, Settled};
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
    /// The memory of its record.
    record: Taken,
    control: Control,
    carrier: Carrier,
}

struct Large {
    tombstone: Answer,
    control: Control,
    rest: Rest,
    carrier: Carrier,
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
    let exchanged = exchange(errand, attempt).await;
    let took = began.elapsed();
    if !matches!(exchanged, Exchanged::Failed(Ending::Unreachable, _)) {
        errand.lane.estimator.took(took);
        errand.lane.metrics.upstream_took(took);
    }
    match exchanged {
        Exchanged::Whole(whole) => {
            let Whole { answer, record, control, carrier } = *whole;
            carrier.give_back();
            let ended = Ended { record: Some(record), ..answered(errand, lead.id(), answer, &control) };
            conclude(errand, lead, attempt, ended, client, None).await;
        }
        Exchanged::Large(large) => {
            let Large { tombstone, control, rest, carrier } = *large;
            let ended = answered(errand, lead.id(), tombstone, &control);
            let limit = errand.upstream().settings().timeout;
            let limits = Limits { stall: limit, client: CLIENT_STALL, deadline: began + limit };
            if conclude(errand, lead, attempt, ended, client, Some((rest, limits))).await == Relayed::Whole {
                carrier.give_back_relayed();
            }
        }
        Exchanged::Failed(ending, problem) => {
            let end = match settle(errand.policy(), ending, &Control::default()) {
                Verdict::Release => End::Release,
                // There is no answer to complete with.
                Verdict::Hold | Verdict::Complete { .. } => hold(errand, lead.id(), problem.code.as_str()),
            };
            conclude(errand, lead, attempt, Ended::without_answer(end, problem), client, None).await;
        }
        Exchanged::Abandoned => {
            let detail = "the gate shuts down, and the upstream has not answered yet";
            let problem = Problem::new(Code::UpstreamTimeout, detail);
            let ended = Ended::without_answer(hold(errand, lead.id(), "shutdown"), problem);
            conclude(errand, lead, attempt, ended, client, None).await;
        }
    }
    drop(counted);
}

/// Sends the request once and takes in the answer.
async fn exchange(errand: &Errand, attempt: Attempt) -> Exchanged {
    let limit = errand.upstream().settings().timeout;
    let mut abandon = errand.gate.work.abandon.subscribe();
    if abandon.get() {
        return Exchanged::Failed(Ending::Unreachable, pass::unreachable());
    }
    let sending = Sending::default();
    let exchanged = tokio::select! {
        biased;
        ended = timeout(limit, send(errand, attempt, &sending)) => {
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

async fn send(errand: &Errand, attempt: Attempt, sending: &Sending) -> Exchanged {
    let upstream = errand.upstream();
    let (response, carrier) = match upstream.send(request(errand, attempt), Reuse::Protected, sending).await {
        Ok(answered) => answered,
        Err(error) => {
            let ending = match &error {
                Error::NotSent(_) => Ending::Unreachable,
                // The body was whole before the key was claimed: reading it back failed in the middle.
                Error::ClientBody(_) | Error::Unknown(_) | Error::Framing => Ending::Broken,
            };
            let mut problem = pass::problem(upstream, &error);
            if ending == Ending::Broken {
                problem.code = Code::UpstreamBroken;
            }
            return Exchanged::Failed(ending, problem);
        }
    };
    let (parts, body) = response.into_parts();
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
    match capture(body, errand.policy().max_response_body, &errand.gate.work.usage).await {
        Ok(Captured::Whole { body, trailers, record }) => {
            let content = Content { body, trailers: trailers.iter().flat_map(lines).collect() };
            let answer = Answer { content: Some(content), ..answer };
            Exchanged::Whole(Box::new(Whole { answer, record, control, carrier }))
        }
        Ok(Captured::TooLarge(rest)) => Exchanged::Large(Box::new(Large { tombstone: answer, control, rest, carrier })),
        Err(error) => Exchanged::Failed(Ending::Broken, pass::problem(upstream, &Error::Unknown(error))),
    }
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

/// What a complete answer comes to.
fn answered(errand: &Errand, id: RecordId, answer: Answer, control: &Control) -> Ended {
    let status = answer.status.as_u16();
    let (end, outcome) = match settle(errand.policy(), Ending::Answered(status), control) {
        Verdict::Complete { ttl, keep_body } => {
            let kept = if keep_body { answer.encode() } else { Answer { content: None, ..answer.clone() }.encode() };
            (End::Complete { answer: kept, expiry: Expiry::FromClaim(ttl) }, Outcome::Executed)
        }
        Verdict::Release => (End::Release, Outcome::Released),
        Verdict::Hold => (hold(errand, id, answer.status.as_str()), Outcome::Problem(Code::OutcomeUnknown)),
    };
    Ended { end, outcome, answer: Ok(answer), record: None }
}

fn hold(errand: &Errand, id: RecordId, why: &str) -> End {
    let (route, key, upstream) = (&*errand.lane.name, errand.key_shortened(), &*errand.upstream().settings().name);
    tracing::warn!(record = %id, route, upstream, key, why, "the outcome of an attempt is unknown");
    End::Hold
}

/// Settles and replies. `rest` is what follows the head of a large answer; it is read to its end whatever becomes of
/// the client. Returns how that ended.
async fn conclude(
    errand: &Errand,
    lead: Lead,
    attempt: Attempt,
    ended: Ended,
    client: Client,
    rest: Option<(Rest, Limits)>,
) -> Relayed {
    let Ended { end, outcome, answer, record } = ended;
    let (sender, body) = match rest.is_some().then(Body::channel) {
        Some((sender, body)) => (Some(sender), Some(body)),
        None => (None, None),
    };
    let released = match end {
        // What streams is not kept for those who wait.
        End::Release if rest.is_none() => {
            Some(Released { fingerprint: errand.fingerprint.clone(), answer: answer.clone() })
        }
        End::Release | End::Complete { .. } | End::Hold => None,
    };
    let mut settling = pin!(settling::settle(&*errand.gate.work.store, lead.id(), attempt, end));
    match timeout(errand.gate.settings.settle_timeout, settling.as_mut()).await {
        Ok(settled) => {
            drop(record);
            // Before the client hears of it: it may be back at once.
            let_go(lead, &settled, released);
            client.reply(recorded(errand, attempt, settled, outcome, answer, body));
            relay(errand, rest, sender).await
        }
        Err(_) => {
            client.reply(unrecorded(errand, outcome, answer, body));
            let settling = async {
                let_go(lead, &settling.await, released);
                drop(record);
            };
            let (relayed, ()) = tokio::join!(relay(errand, rest, sender), settling);
            relayed
        }
    }
}

/// Lets those who wait for the attempt go on: with the answer of a release, or to ask the store.
fn let_go(lead: Lead, settled: &Settled, released: Option<Released>) {
    match (settled, released) {
        (Settled::Done { .. }, Some(released)) => lead.released(released),
        (Settled::Done { .. } | Settled::Superseded { .. }, _) => drop(lead),
    }
}

async fn relay(errand: &Errand, rest: Option<(Rest, Limits)>, sender: Option<Sender>) -> Relayed {
    let (Some((rest, limits)), Some(sender)) = (rest, sender) else { return Relayed::Whole };
    let mut abandon = errand.gate.work.abandon.subscribe();
    let relayed = tokio::select! {
        biased;
        _ = abandon.wait_for(|abandon| *abandon) => Relayed::Cut,
        relayed = rest.relay(sender, limits) => relayed,
    };
    if relayed == Relayed::Cut {
        tracing::warn!(route = &*errand.lane.name, "a large answer was cut off in the middle");
    }
    relayed
}

/// The reply when the store has answered.
fn recorded(
    errand: &Errand,
    attempt: Attempt,
    settled: Settled,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    match settled {
        Settled::Done { until } => {
            let reply = reply(errand, outcome, answer, body);
            if outcome == Outcome::Executed { reply.with_expiry(&errand.gate.settings.headers, until) } else { reply }
        }
        Settled::Superseded { record } => {
            let recorded = record.filter(|record| record.attempt == attempt && record.state == State::Completed);
            if let Some((until, recorded)) = recorded.and_then(recorded_answer) {
                // Somebody who knew better has completed it meanwhile: that is the answer now.
                tracing::info!(
                    route = &*errand.lane.name,
                    key = errand.key_shortened(),
                    "the attempt was completed in the store while it ran, as by its upstream: that is its outcome"
                );
                return reply(errand, Outcome::Executed, Ok(recorded), None)
                    .with_expiry(&errand.gate.settings.headers, until);
            }
            tracing::warn!(
                route = &*errand.lane.name,
                key = errand.key_shortened(),
                "the record of an attempt was removed or taken over while it ran: its answer is not kept"
            );
            unrecorded(errand, outcome, answer, body)
        }
    }
}

fn recorded_answer(record: crate::idempotency::record::Record) -> Option<(Timestamp, Answer)> {
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    answer.content.is_some().then_some((record.until, answer))
}

/// The reply when the store has not answered in time: an upstream's answer is marked for what it is.
fn unrecorded(errand: &Errand, outcome: Outcome, answer: Result<Answer, Problem>, body: Option<Body>) -> Reply {
    let outcome = if answer.is_ok() { Outcome::Unrecorded } else { outcome };
    reply(errand, outcome, answer, body)
}

/// The reply with an answer of the upstream, or else with a problem.
pub(super) fn reply(errand: &Errand, outcome: Outcome, answer: Result<Answer, Problem>, body: Option<Body>) -> Reply {
    match answer {
        Ok(answer) => {
            let mut response: Response<Body> = replay::response(&answer, &errand.head.method);
            if let Some(body) = body {
                *response.body_mut() = body;
            }
            errand.gate.keyed(Reply::new(outcome, response))
        }
        Err(problem) => errand.problem(problem),
    }
}

#[cfg(test)]
mod properties;
