//! What the client of an attempt gets, once its record is settled or the store has not answered in time.

use std::sync::Arc;

use super::super::answer::Reply;
use super::super::protected::ProtectedRequest;
use super::super::single_flight::Released;
use super::{Attempted, Following, ForClient, Recipient, reply};
use crate::http::answer::{Relayed, ResponseTee};
use crate::http::body::{Body, Sender};
use crate::http::problem::Problem;
use crate::idempotency::codec::Answer;
use crate::idempotency::record::{Attempt, Record, Timestamp};
use crate::store::Settled;
use crate::telemetry::outcome::Outcome;

/// Gives the client the answer of an attempt, or the end of it, by what the store says of its settlement; nothing where it
/// has not answered in time. What follows the head of a large answer goes on in a task of its own.
pub(in super::super) fn conclude(
    request: &Arc<ProtectedRequest>,
    attempted: &mut Attempted,
    settled: Option<&Settled>,
) {
    let attempt = attempted.attempt;
    let Some(ForClient { outcome, answer, recipient: Recipient { client, tee }, rest }) = attempted.delivery.take()
    else {
        return;
    };
    let sender = match client {
        Some(client) => {
            let (sender, body) = rest.is_some().then(Body::channel).unzip();
            client.reply(match settled {
                Some(settled) => recorded(request, attempt, settled, outcome, answer, body),
                None => unrecorded(request, outcome, answer, body),
            });
            sender
        }
        None => end_of_tee(request, attempt, settled, answer, tee),
    };
    if let Some(following) = rest {
        let request = Arc::clone(request);
        tokio::spawn(async move { relay(&request, following, sender).await });
    }
}

/// Gives a retry that followed a released attempt its answer.
pub(in super::super) fn released(request: &ProtectedRequest, released: &Released) -> Reply {
    reply(request, Outcome::Released, released.answer.clone(), None)
}

/// Gives the client the end of an answer that it has in part, if that is what retries will get; else the answer breaks off,
/// and a retry tells. Returns the way to the client where there is more to come.
fn end_of_tee(
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
        let (route, key) = (&*request.state.name, request.key_shortened());
        tracing::warn!(route, key, "an answer broke off on its way to the client: it is not in its record");
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

async fn relay(request: &ProtectedRequest, following: Following, sender: Option<Sender>) {
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

/// The reply when the store has answered.
fn recorded(
    request: &ProtectedRequest,
    attempt: Attempt,
    settled: &Settled,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    match settled {
        Settled::Done { until } => {
            let reply = reply(request, outcome, answer, body);
            if outcome == Outcome::Executed { reply.with_expiry(&request.gate.settings.headers, *until) } else { reply }
        }
        Settled::Superseded { record } => {
            if let Some((until, recorded)) = record.as_ref().and_then(|record| recorded_answer(record, attempt)) {
                // The upstream or an operator has completed it in the meantime: that answer counts.
                tracing::info!(
                    route = &*request.state.name,
                    key = request.key_shortened(),
                    "the attempt was completed in the store while it ran, as by its upstream: that is its outcome"
                );
                return reply(request, Outcome::Executed, Ok(recorded), None)
                    .with_expiry(&request.gate.settings.headers, until);
            }
            tracing::warn!(
                route = &*request.state.name,
                key = request.key_shortened(),
                "the record of an attempt was removed or taken over while it ran: its answer is not kept"
            );
            unrecorded(request, outcome, answer, body)
        }
    }
}

/// The answer with which the attempt was completed in the store.
fn recorded_answer(record: &Record, attempt: Attempt) -> Option<(Timestamp, Answer)> {
    if !record.is_completed_by(attempt) {
        return None;
    }
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    answer.content.is_some().then_some((record.until, answer))
}

/// The reply when the store has not answered in time: an upstream's answer is marked for what it is.
fn unrecorded(
    request: &ProtectedRequest,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    let outcome = match &answer {
        Ok(answer) => {
            let (route, key, status) = (&*request.state.name, request.key_shortened(), answer.status.as_u16());
            tracing::warn!(record = %request.id, route, key, status, "an answer went to its client unrecorded");
            Outcome::Unrecorded
        }
        Err(_) => outcome,
    };
    reply(request, outcome, answer, body)
}
