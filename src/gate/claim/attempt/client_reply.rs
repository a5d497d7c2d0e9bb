//! What the client of an attempt gets, once the store has answered or has not.

use http::header::TRAILER;
use http::{HeaderName, HeaderValue, Version};

use super::{Following, Settle};
use crate::gate::answer::{Client, Reply};
use crate::gate::claim::protected::{ProtectedRequest, has_length};
use crate::http::answer::{Relayed, ResponseTee, Withheld};
use crate::http::body::{Body, Sender};
use crate::http::problem::Problem;
use crate::idempotency::codec::Answer;
use crate::idempotency::policy::ResponseMode;
use crate::idempotency::record::{AttemptToken, Record, Timestamp};
use crate::idempotency::recovery::Recovery;
use crate::idempotency::settle::{Control, Ending, Verdict};
use crate::store::Settled;
use crate::telemetry::outcome::{Code, Outcome};

/// Why an answer broke off whose client has its head.
pub(super) enum Cut {
    /// The upstream broke it off, or it took too long.
    Broken,
    /// The gate shuts down and waits no longer.
    Shutdown,
}

/// Gives the client the end of an answer that it has in part, if that is what retries will get; else the answer breaks off,
/// and a retry tells. Returns the way to the client where there is more to come.
pub(super) fn end_of_tee(
    request: &ProtectedRequest,
    attempt: AttemptToken,
    settled: Option<&Settled>,
    answer: Result<Answer, Problem>,
    tee: ResponseTee,
) -> Option<Sender> {
    let stands = match (settled, &answer) {
        (Some(Settled::Done { .. }), Ok(_)) => true,
        (Some(Settled::NotCurrent { record }), Ok(answer)) => {
            let recorded = record.as_ref().and_then(|record| recorded_answer(record, attempt));
            recorded.is_some_and(|(_, recorded)| is_same(&recorded, answer))
        }
        (_, Err(_)) | (None, _) => false,
    };
    if !stands {
        let (id, route, key) = (request.head.id, &*request.state.name, request.key_shortened());
        tracing::warn!(request = %id, record = %request.id, route, key, "an answer broke off on its way to the client: it is not in its record");
        return None;
    }
    match answer.ok().and_then(|answer| answer.content) {
        Some(content) => {
            tee.finish(&content.body, (!content.trailers.is_empty()).then(|| content.trailers.into_iter().collect()));
            None
        }
        None => tee.into_sender(),
    }
}

/// Whether two answers tell a client the same.
fn is_same(one: &Answer, other: &Answer) -> bool {
    let body = |answer: &Answer| answer.content.as_ref().map(|content| content.body.clone());
    one.status == other.status && body(one) == body(other)
}

/// Relays the rest of a large answer.
pub(super) async fn relay(request: &ProtectedRequest, following: Following, sender: Option<Sender>) {
    let Following { rest, limits, connection, counted: _counted } = following;
    match request.gate.shared.drain.unless_over(rest.relay(sender, limits)).await {
        Some(Relayed::Whole) => connection.return_after_relay(),
        Some(Relayed::Truncated) | None => warn_of_cut(request),
    }
}

/// Gives the client an answer that releases its key and is too large to keep, but for its end: that is withheld until the key is
/// free. An error says why it broke off: then the attempt failed, whatever the head of the answer says. A delivery or a message has
/// no use for the answer, and gets its reply when the attempt has ended.
pub(super) async fn relay_released(
    request: &ProtectedRequest,
    following: Following,
    head: &Answer,
    client: &mut Option<Client>,
) -> Result<Withheld, Cut> {
    let client = if request.is_unattended { None } else { client.take() };
    let sender = client.map(|client| {
        let (sender, body) = Body::channel();
        client.reply(request.reply_with(Outcome::Released, Ok(head.clone()), Some(body)));
        sender
    });
    let Following { rest, limits, connection, counted: _counted } = following;
    let cut = match request.gate.shared.drain.unless_over(rest.relay_but_end(sender, limits)).await {
        Some(Some(end)) => {
            connection.return_after_relay();
            return Ok(end);
        }
        Some(None) => Cut::Broken,
        None => Cut::Shutdown,
    };
    warn_of_cut(request);
    Err(cut)
}

fn warn_of_cut(request: &ProtectedRequest) {
    let (id, route, upstream) = (request.head.id, &*request.state.name, &*request.upstream().settings().name);
    tracing::warn!(request = %id, record = %request.id, route, upstream, "a large answer was cut off in the middle");
}

/// What a client must not do while the outcome of its request is unknown.
const MAY_HAVE_RUN: &str = "; it may have taken effect: do not send it with a new key";

/// Adds to a failed attempt's problem what its outcome means: that it is unknown, or what a retry gets where the route's `outcomes`
/// differ from the defaults that its code implies. They release the key of an unknown outcome, or hold the key of a request that the
/// gate did not send.
pub(super) fn by_policy(mut problem: Problem, is_released: bool, recovery: &Recovery) -> Problem {
    let held = match recovery {
        Recovery::Hold | Recovery::Resend(_) => Some("a retry does not run"),
        Recovery::Probe(_) => Some("a retry asks the upstream first"),
        // It runs, as after any failure to send.
        Recovery::Retry => None,
    };
    match (is_released, problem.code.retryable()) {
        // The upstream cannot take it as it is.
        (true, false) if problem.code == Code::BadRequest => {}
        (true, false) => problem.detail.push_str("; this route releases the key: a retry runs the request again"),
        (false, true) => {
            if let Some(retry) = held {
                problem.detail =
                    format!("nothing was sent to the upstream; this route holds the outcome as unknown: {retry}");
            }
        }
        (false, false) if matches!(problem.code, Code::UpstreamBroken | Code::UpstreamTimeout) => {
            problem.detail.push_str(MAY_HAVE_RUN);
        }
        (true, true) | (false, false) => {}
    }
    problem
}

/// The answer with which the attempt was completed in the store.
fn recorded_answer(record: &Record, attempt: AttemptToken) -> Option<(Timestamp, Answer)> {
    if !record.is_completed_by(attempt) {
        return None;
    }
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    answer.content.is_some().then_some((record.until, answer))
}

/// The reply when the store has answered.
pub(super) fn recorded(
    request: &ProtectedRequest,
    attempt: AttemptToken,
    settled: &Settled,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    match settled {
        Settled::Done { until } => {
            let reply = request.reply_with(outcome, answer, body);
            if outcome == Outcome::Executed { reply.with_expiry(&request.gate.settings.headers, *until) } else { reply }
        }
        Settled::NotCurrent { record } => {
            if let Some((until, recorded)) = record.as_ref().and_then(|record| recorded_answer(record, attempt)) {
                // The upstream or an operator has completed it in the meantime: that answer counts.
                tracing::info!(
                    request = %request.head.id,
                    record = %request.id,
                    route = &*request.state.name,
                    key = request.key_shortened(),
                    "the attempt was completed in the store while it ran, as by its upstream: that is its outcome"
                );
                return request
                    .reply_with(Outcome::Executed, Ok(recorded), None)
                    .with_expiry(&request.gate.settings.headers, until);
            }
            tracing::warn!(
                request = %request.head.id,
                record = %request.id,
                route = &*request.state.name,
                key = request.key_shortened(),
                "the record of an attempt was removed or taken over while it ran: its answer is not kept"
            );
            unrecorded(request, outcome, answer, body)
        }
    }
}

/// The reply when the store has not answered in time: an upstream's answer is marked for what it is.
pub(super) fn unrecorded(
    request: &ProtectedRequest,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    let outcome = match &answer {
        Ok(answer) => {
            let (route, key, status) = (&*request.state.name, request.key_shortened(), answer.status.as_u16());
            let (id, record) = (request.head.id, request.id);
            if request.is_unattended {
                tracing::warn!(request = %id, %record, route, key, status, "the answer of a request that no client waits for is not recorded yet");
            } else {
                tracing::warn!(request = %id, %record, route, key, status, "an answer went to its client unrecorded");
            }
            Outcome::Unrecorded
        }
        Err(_) => outcome,
    };
    request.reply_with(outcome, answer, body)
}

/// Whether the client may have an answer while it comes. A delivery or a message has no client: it gets its reply when the attempt has
/// ended, and is over with it. By its head it must be one that is kept: what is released or held
/// says so in its head, and a call says how it ended only in its trailers. A client must see where it breaks off, which
/// HTTP/1.0 shows by its length alone.
pub(super) fn may_stream(request: &ProtectedRequest, answer: &Answer, control: &Control, settle: Settle) -> bool {
    let policy = request.policy();
    let is_kept =
        || matches!(settle(policy, Ending::Answered(answer.status.as_u16()), control, None), Verdict::Complete { .. });
    let shows_its_end = || request.head.version > Version::HTTP_10 || has_length(answer);
    let is_awaited = !request.is_unattended && !request.head.is_call();
    policy.body == ResponseMode::Stream && is_awaited && is_kept() && shows_its_end()
}

/// Whether trailers can follow an answer whose head is with its client: HTTP/1.1 takes none behind a length, and none that
/// were not announced. A replay has those that the client got.
pub(super) fn trailers_may_follow(request: &ProtectedRequest, answer: &Answer) -> bool {
    let announces = |(name, _): &(HeaderName, HeaderValue)| *name == TRAILER;
    request.head.version >= Version::HTTP_2 || answer.headers.iter().any(announces) && !has_length(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::recovery::{Probe, ProbePath};

    #[test]
    fn a_problem_says_what_its_route_makes_of_a_retry() {
        use Code::{BadRequest, UpstreamBroken, UpstreamUnreachable};
        let path = ProbePath::parse("/{key}").unwrap();
        let probe = Recovery::Probe(Probe { path, after: None, every: None, headers: Vec::new() });
        let cases = [
            (UpstreamUnreachable, true, Recovery::Hold, ""),
            (UpstreamUnreachable, false, Recovery::Hold, "a retry does not run"),
            (UpstreamUnreachable, false, probe, "a retry asks the upstream first"),
            // It runs, as after any failure to send.
            (UpstreamUnreachable, false, Recovery::Retry, ""),
            (UpstreamBroken, true, Recovery::Hold, "a retry runs the request again"),
            (UpstreamBroken, false, Recovery::Hold, MAY_HAVE_RUN),
            (BadRequest, true, Recovery::Hold, ""),
        ];
        for (code, is_released, recovery, told) in cases {
            let Problem { detail, .. } = by_policy(Problem::new(code, ""), is_released, &recovery);
            assert!(detail.ends_with(told) && detail.is_empty() == told.is_empty(), "{code:?}: {detail}");
        }
    }
}
