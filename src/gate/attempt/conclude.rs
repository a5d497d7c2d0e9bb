//! The end of an attempt: its record settled, and its client told.

use std::pin::pin;

use tokio::time::timeout;

use super::super::answer::Reply;
use super::super::errand::Errand;
use super::super::flights::{Lead, Released};
use super::super::settling;
use super::{Ended, Recipient, reply};
use crate::http::body::{Body, Sender};
use crate::http::capture::{Limits, Relayed, Rest};
use crate::http::flow::Flow;
use crate::http::problem::Problem;
use crate::idempotency::codec::Answer;
use crate::idempotency::record::{Attempt, Record, State, Timestamp};
use crate::store::{End, Settled};
use crate::telemetry::outcome::Outcome;

/// Settles and replies. `rest` is what follows the head of a large answer; it is read to its end whatever becomes of
/// the client. Returns how that ended.
pub(super) async fn conclude(
    errand: &Errand,
    lead: Lead,
    attempt: Attempt,
    ended: Ended,
    recipient: Recipient,
    rest: Option<(Rest, Limits)>,
) -> Relayed {
    let Ended { end, outcome, answer, record } = ended;
    let released = match end {
        // What streams is not kept for those who wait.
        End::Release if rest.is_none() => {
            let (fingerprint, answer) = (errand.fingerprint.clone(), answer.clone());
            Some(Released { fingerprint, proof: errand.proof, answer })
        }
        End::Release | End::Complete { .. } | End::Hold => None,
    };
    let mut settling = pin!(settling::settle(&*errand.gate.work.store, lead.id(), attempt, end));
    let settled = timeout(errand.gate.settings.settle_timeout, settling.as_mut()).await;
    let late = match settled {
        Ok(settled) => {
            drop(record);
            // Before the client hears of it: it may be back at once.
            let_go(lead, &settled, released);
            Ok(settled)
        }
        Err(_) => Err(async {
            let_go(lead, &settling.await, released);
            drop(record);
        }),
    };
    let settled = late.as_ref().ok();
    let Recipient { client, flow } = recipient;
    let sender = match client {
        Some(client) => {
            let (sender, body) = rest.is_some().then(Body::channel).unzip();
            client.reply(match settled {
                Some(settled) => recorded(errand, attempt, settled, outcome, answer, body),
                None => unrecorded(errand, outcome, answer, body),
            });
            sender
        }
        None => end_of_flow(errand, attempt, settled, answer, flow),
    };
    match late {
        Ok(_) => relay(errand, rest, sender).await,
        Err(settling) => tokio::join!(relay(errand, rest, sender), settling).0,
    }
}

/// Gives the client the end of an answer that it has in part, if that is what retries will get; else the answer breaks off,
/// and a retry tells. Returns the way to the client where there is more to come.
fn end_of_flow(
    errand: &Errand,
    attempt: Attempt,
    settled: Option<&Settled>,
    answer: Result<Answer, Problem>,
    flow: Flow,
) -> Option<Sender> {
    let stands = match (settled, &answer) {
        (Some(Settled::Done { .. }), Ok(_)) => true,
        (Some(Settled::Superseded { record }), Ok(answer)) => {
            let recorded = own(record.as_ref(), attempt).and_then(recorded_answer);
            recorded.is_some_and(|(_, recorded)| is_same(&recorded, answer))
        }
        (_, Err(_)) | (None, _) => false,
    };
    if !stands {
        let (route, key) = (&*errand.lane.name, errand.key_shortened());
        tracing::warn!(route, key, "an answer broke off on its way to the client: it is not in its record");
        return None;
    }
    match answer.ok().and_then(|answer| answer.content) {
        Some(content) => {
            flow.finish(&content.body, (!content.trailers.is_empty()).then(|| content.trailers.into_iter().collect()));
            None
        }
        None => flow.into_sender(),
    }
}

/// Whether two answers tell a client the same.
fn is_same(one: &Answer, other: &Answer) -> bool {
    let body = |answer: &Answer| answer.content.as_ref().map(|content| content.body.clone());
    one.status == other.status && body(one) == body(other)
}

/// Lets those who wait for the attempt go on: with the answer of a release, or to ask the store.
fn let_go(lead: Lead, settled: &Settled, released: Option<Released>) {
    match (settled, released) {
        (Settled::Done { .. }, Some(released)) => lead.released(released),
        (Settled::Done { .. } | Settled::Superseded { .. }, _) => drop(lead),
    }
}

async fn relay(errand: &Errand, rest: Option<(Rest, Limits)>, sender: Option<Sender>) -> Relayed {
    let Some((rest, limits)) = rest else { return Relayed::Whole };
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
    settled: &Settled,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
    body: Option<Body>,
) -> Reply {
    match settled {
        Settled::Done { until } => {
            let reply = reply(errand, outcome, answer, body);
            if outcome == Outcome::Executed { reply.with_expiry(&errand.gate.settings.headers, *until) } else { reply }
        }
        Settled::Superseded { record } => {
            if let Some((until, recorded)) = own(record.as_ref(), attempt).and_then(recorded_answer) {
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

/// The record, where it is this attempt's and completed.
fn own(record: Option<&Record>, attempt: Attempt) -> Option<&Record> {
    record.filter(|record| record.attempt == attempt && record.state == State::Completed)
}

fn recorded_answer(record: &Record) -> Option<(Timestamp, Answer)> {
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    answer.content.is_some().then_some((record.until, answer))
}

/// The reply when the store has not answered in time: an upstream's answer is marked for what it is.
fn unrecorded(errand: &Errand, outcome: Outcome, answer: Result<Answer, Problem>, body: Option<Body>) -> Reply {
    let outcome = if answer.is_ok() { Outcome::Unrecorded } else { outcome };
    reply(errand, outcome, answer, body)
}
