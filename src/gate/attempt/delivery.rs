//! What the client of an attempt gets, once the store has answered or has not.

use super::super::answer::Reply;
use super::super::protected::ProtectedRequest;
use super::Following;
use crate::http::answer::{Relayed, ResponseTee};
use crate::http::body::{Body, Sender};
use crate::http::problem::Problem;
use crate::idempotency::codec::Answer;
use crate::idempotency::record::{Attempt, Record, Timestamp};
use crate::store::Settled;
use crate::telemetry::outcome::Outcome;

/// Gives the client the end of an answer that it has in part, if that is what retries will get; else the answer breaks off,
/// and a retry tells. Returns the way to the client where there is more to come.
pub(super) fn end_of_tee(
    request: &ProtectedRequest,
    attempt: Attempt,
    settled: Option<&Settled>,
    answer: Result<Answer, Problem>,
    tee: ResponseTee,
) -> Option<Sender> {
    let stands = match (settled, &answer) {
        (Some(Settled::Done { .. }), Ok(_)) => true,
        (Some(Settled::Superseded { record }), Ok(answer)) => {
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

pub(super) async fn relay(request: &ProtectedRequest, following: Following, sender: Option<Sender>) {
    let Following { rest, limits, connection, counted: _counted } = following;
    let mut abandon = request.gate.shared.abandon.subscribe();
    let relayed = tokio::select! {
        biased;
        _ = abandon.wait_for(|abandon| *abandon) => Relayed::Truncated,
        relayed = rest.relay(sender, limits) => relayed,
    };
    match relayed {
        Relayed::Whole => connection.return_after_relay(),
        Relayed::Truncated => tracing::warn!(route = &*request.state.name, "a large answer was cut off in the middle"),
    }
}

/// The answer with which the attempt was completed in the store.
pub(super) fn recorded_answer(record: &Record, attempt: Attempt) -> Option<(Timestamp, Answer)> {
    if !record.is_completed_by(attempt) {
        return None;
    }
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    answer.content.is_some().then_some((record.until, answer))
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
            tracing::warn!(request = %request.head.id, record = %request.id, route, key, status, "an answer went to its client unrecorded");
            Outcome::Unrecorded
        }
        Err(_) => outcome,
    };
    request.reply_with(outcome, answer, body)
}
