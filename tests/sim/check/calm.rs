//! Whether everybody is answered in the end.

use std::collections::BTreeMap;

use oncegate::store::unreliable::Operation;

use super::endings::millis;
use super::facts::Facts;
use super::{Invariant, Violation};
use crate::history::{Event, Label, LifeNumber, Waiting};
use crate::world::{SOON, is_final};

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    for (request, sent) in &facts.sent {
        let (index, what) = match facts.ended.get(request) {
            None => (sent.index, "is never answered"),
            Some((index, _)) => match &facts.history[*index].event {
                Event::Hung { .. } => (*index, "hangs"),
                // A large answer that breaks off upstream breaks off here.
                Event::Lost { .. } if !facts.has_ended(sent.life, *index) && !facts.written.contains_key(request) => {
                    (*index, "gets nothing from a gate that lives, and was not sent")
                }
                _ => continue,
            },
        };
        let why = format!("request {} {what}", request.0);
        found.push(facts.violation(Invariant::NothingHangs, index, sent.label, why));
    }
    if let Some(calm) = facts.calm {
        answered(facts, calm, found);
        settled(facts, found);
    }
}

/// Runs last until every attempt is over, and nobody dies any more.
fn settled(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    let end = facts.history.len();
    for (token, claims) in facts.claims.iter().filter(|(token, _)| !facts.has_ended(token.life(), end)) {
        let Some((claimed, label)) = claims.last().copied() else { continue };
        let settles = facts.history[claimed..].iter().any(|entry| match &entry.event {
            Event::Told { op: Operation::Settle, token: own, .. } => *own == Some(*token),
            // What another has taken over, or the sweeper removed, is not its own to settle.
            Event::Changed { before: Some(before), after, .. } => {
                before.token == *token && after.as_ref().is_none_or(|after| after.token != *token)
            }
            _ => false,
        });
        if !settles {
            let why = format!("{token} is never settled, and its gate lives");
            found.push(facts.violation(Invariant::EveryAttemptSettles, claimed, label, why));
        }
    }
}

fn answered(facts: &Facts<'_>, calm: usize, found: &mut Vec<Violation>) {
    let soon = facts.at(calm) + millis(SOON);
    let mut asked: BTreeMap<(LifeNumber, Label), (usize, bool)> = BTreeMap::new();
    for (request, sent) in facts.sent.iter().filter(|(_, sent)| sent.is_probe) {
        let settled = match facts.ended.get(request) {
            Some((index, Some(answer))) => is_final(answer, facts.setup.policy(sent.label)) && facts.at(*index) <= soon,
            _ => false,
        };
        let known = asked.entry((sent.life, sent.label)).or_insert((sent.index, false));
        *known = (sent.index, known.1 || settled);
    }
    // An answer that has expired by the time of the next question makes another delivery of the same request.
    let is_delivered = |label: Label| {
        facts.acceptances.values().filter(|own| own.label == label).any(|own| {
            let is_done = |(index, op, standing): &(usize, Operation, Option<&Waiting>)| {
                *index > calm && *op == Operation::ChangeDelivery && standing.is_none()
            };
            own.changes.iter().any(is_done)
        })
    };
    for ((LifeNumber(life), label), (index, settled)) in asked {
        if settled || is_delivered(label) {
            continue;
        }
        let why = format!("gate {life} does not answer for good within {SOON:?} of the last fault");
        found.push(facts.violation(Invariant::EveryKeyAnswers, index, label, why));
    }
}
