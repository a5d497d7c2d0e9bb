//! What became of accepted requests.

use std::collections::BTreeMap;

use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::Recovery;
use oncegate::store::unreliable::Operation;

use super::endings::millis;
use super::facts::{Acceptance, Facts, Polled};
use super::{Invariant, Violation};
use crate::history::{Event, Label, Standing, Token, Waiting};
use crate::setup::ACCEPT;

type Fault = (Invariant, String);

/// A change of one delivery.
struct Change {
    index: usize,
    at: u64,
    label: Label,
    op: Operation,
}

/// How the record of an attempt stopped being its own.
struct Left {
    index: usize,
    op: Operation,
    from: State,
    /// Whether nothing took its place.
    is_gone: bool,
}

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    if facts.queue.is_empty() && facts.written_for(ACCEPT).next().is_none() {
        return;
    }
    for (index, entry) in facts.history.iter().enumerate() {
        let Event::Queued { op, label, before, after, .. } = &entry.event else { continue };
        let change = Change { index, at: entry.at, label: *label, op: *op };
        let judged = match (before, after) {
            (None, Some(after)) => accepted(facts, &change, after),
            (Some(before), None) => gone(facts, &change, before),
            (Some(before), Some(after)) if before.token == after.token => went_on(facts, &change, before, after),
            (Some(before), Some(after)) => {
                Err((Invariant::AcceptedOnce, format!("{before:?} gives way to another: {after:?}")))
            }
            (None, None) => Ok(()),
        };
        if let Err((invariant, why)) = judged {
            found.push(facts.violation(invariant, index, *label, why));
        }
    }
    ran(facts, found);
    in_order(facts, found);
    swept(facts, found);
    for (poll, polled) in &facts.polls {
        if let Err((invariant, why)) = told(facts, polled) {
            let why = format!("poll {}: {why}", poll.0);
            found.push(facts.violation(
                invariant,
                polled.answered.map_or(polled.index, |(index, _)| index),
                polled.label,
                why,
            ));
        }
    }
    ended(facts, found);
}

fn accepted(facts: &Facts<'_>, change: &Change, after: &Waiting) -> Result<(), Fault> {
    if change.op != Operation::Accept || after.is_dead || after.attempts > 0 {
        return Err((Invariant::AcceptedOnce, format!("{after:?} stands by {:?}, and was not accepted", change.op)));
    }
    let is_live = |standing: &&Standing| standing.state == State::InFlight || !standing.is_past(change.at);
    match facts.standing(change.label, change.index).filter(is_live) {
        Some(record) => Err((Invariant::AcceptedOnce, format!("{after:?} is accepted beside {record:?}"))),
        None => Ok(()),
    }
}

fn gone(facts: &Facts<'_>, change: &Change, before: &Waiting) -> Result<(), Fault> {
    let what = || Err((Invariant::DeliveryStays, format!("{before:?} is gone by {:?}", change.op)));
    match change.op {
        // An operator may.
        Operation::Discard => Ok(()),
        Operation::SweepDeliveries if before.is_dead && before.until <= change.at => Ok(()),
        Operation::ChangeDelivery if records_since(facts, change, before).any(is_completed) => Ok(()),
        _ => what(),
    }
}

fn went_on(facts: &Facts<'_>, change: &Change, before: &Waiting, after: &Waiting) -> Result<(), Fault> {
    let what = || format!("{before:?} becomes {after:?} by {:?}", change.op);
    match change.op {
        Operation::TakeDue => {
            if before.is_dead || after.is_dead || before.until > change.at || after.until <= change.at {
                return Err((Invariant::TakenIsHeld, what()));
            }
            if facts.is_paused(change.index) {
                return Err((Invariant::PauseHolds, what()));
            }
            Ok(())
        }
        Operation::ChangeDelivery if before.is_dead => Err((Invariant::DeliveryStays, what())),
        Operation::ChangeDelivery if after.is_dead => given_up(facts, change, before, after),
        Operation::ChangeDelivery if (0..=1).contains(&(after.attempts - before.attempts)) => Ok(()),
        Operation::Requeue if before.is_dead && !after.is_dead => Ok(()),
        _ => Err((Invariant::DeliveryStays, what())),
    }
}

/// How long after its time is over a request may still be tried.
const GRACE: u64 = 10_000;

/// A request is given up after so many attempts or so long a time, or where its outcome is unknown.
fn given_up(facts: &Facts<'_>, change: &Change, before: &Waiting, after: &Waiting) -> Result<(), Fault> {
    let deliver = &facts.setup.policy(change.label).deliver;
    let by_rule = if after.attempts > before.attempts {
        // The next attempt would be later than that.
        let next = change.at + millis(deliver.max_backoff) + RETRY_AFTER;
        after.attempts >= deliver.attempts || next >= before.since + millis(deliver.give_up_after)
    } else {
        let is_unknown = |record: &Standing| match record.state {
            State::Unknown => true,
            State::InFlight => record.is_past(change.at),
            State::Completed => false,
        };
        // Or its time was over before it was tried: of no attempt of its own, a record stands.
        let accepted = facts.acceptances.get(&before.request).map_or(0, |acceptance| acceptance.index);
        let is_former = |record: &Standing| record.state != State::InFlight && record.is_past(facts.at(accepted));
        let is_late = change.at > before.since + millis(deliver.give_up_after) + GRACE;
        is_late && facts.standing(change.label, change.index).is_none_or(is_former)
            || records_since(facts, change, before).any(is_unknown)
    };
    if by_rule { Ok(()) } else { Err((Invariant::GivenUpByRule, format!("{before:?} is given up: {after:?}"))) }
}

/// The longest time after which a gate asks to be tried again.
const RETRY_AFTER: u64 = 3_000;

/// What stood for a delivery's key since it was accepted, but for what had expired then.
fn records_since<'f>(
    facts: &'f Facts<'_>,
    change: &Change,
    of: &Waiting,
) -> impl Iterator<Item = &'f Standing> + use<'f> {
    let accepted = facts.acceptances.get(&of.request).map_or(0, |acceptance| acceptance.index);
    let at = facts.at(accepted);
    let stood = facts.standings(change.label, accepted, change.index);
    stood.into_iter().flatten().filter(move |record| record.state == State::InFlight || !record.is_past(at))
}

fn is_completed(record: &Standing) -> bool {
    record.state == State::Completed
}

/// What was accepted runs after that, and again only where the attempt before was released, or by the policy.
fn ran(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    let mut left: BTreeMap<Token, Vec<Left>> = BTreeMap::new();
    for (index, entry) in facts.history.iter().enumerate() {
        if let Event::Changed { op, label, before: Some(before), after, .. } = &entry.event
            && label.route == ACCEPT
            && after.as_ref().is_none_or(|after| after.token != before.token)
        {
            let end = Left { index, op: *op, from: before.state, is_gone: after.is_none() };
            left.entry(before.token).or_default().push(end);
        }
    }
    for (request, label, writes) in facts.written_for(ACCEPT) {
        let Some(acceptance) = facts.acceptances.get(&request).filter(|accepted| accepted.index < writes[0]) else {
            let why = format!("request {} leaves, and was not accepted", request.0);
            found.push(facts.violation(Invariant::AcceptedBeforeRun, writes[0], label, why));
            continue;
        };
        let tokens: Vec<Token> = facts.attempts_of(request).collect();
        for (pair, write) in tokens.windows(2).zip(&writes[1..]) {
            let mut claims = facts.claims.get(&pair[1]).into_iter().flatten().map(|(claimed, _)| *claimed);
            let claimed = claims.rfind(|claimed| claimed < write).unwrap_or(*write);
            let ends = left.get(&pair[0]).into_iter().flatten().filter(|end| end.index <= claimed);
            if pair[0] != pair[1] && !ends.into_iter().any(|end| may_run_again(facts, acceptance, end, claimed)) {
                let (request, first) = (request.0, pair[0]);
                let why = format!("request {request} is sent again as {}, and {first} was not released", pair[1]);
                found.push(facts.violation(Invariant::OneRunPerClaim, *write, label, why));
            }
        }
    }
}

fn may_run_again(facts: &Facts<'_>, acceptance: &Acceptance<'_>, end: &Left, claimed: usize) -> bool {
    let retries = matches!(facts.setup.policy(acceptance.label).recovery, Recovery::Retry);
    let is_requeued = || {
        let mut changes = acceptance.changes.iter();
        changes.any(|(index, op, _)| *op == Operation::Requeue && *index < claimed)
    };
    match (end.op, end.from) {
        (Operation::Settle, _) => end.is_gone,
        (Operation::Remove, _) => true,
        (Operation::Supersede | Operation::Sweep, State::Unknown) => retries || is_requeued(),
        (Operation::Supersede, State::InFlight) => retries,
        _ => false,
    }
}

/// What a tenant's requests wait for that were accepted before them: unless these were given up.
fn in_order(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    if !facts.setup.is_ordered() {
        return;
    }
    for (request, label, writes) in facts.written_for(ACCEPT) {
        let Some(own) = facts.acceptances.get(&request) else { continue };
        for write in writes {
            let waits = |other: &&Acceptance<'_>| {
                other.label.tenant == label.tenant
                    && other.first.sequence < own.first.sequence
                    && other.standing(*write).is_some_and(|standing| !standing.is_dead)
                    && !other.was_given_up(*write)
            };
            if let Some(other) = facts.acceptances.values().find(waits) {
                let (request, other) = (request.0, other.first.request.0);
                let why = format!("request {request} is sent, and {other} was accepted before it and waits");
                found.push(facts.violation(Invariant::InOrder, *write, label, why));
            }
        }
    }
}

/// A delivery whose end was lost finds what became of its attempt.
fn swept(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    for (index, entry) in facts.history.iter().enumerate() {
        let Event::Changed { op: Operation::Sweep, label, before: Some(before), after: None, .. } = &entry.event else {
            continue;
        };
        if let Some(waiting) = facts.waiting(*label, index) {
            let why = format!("{before:?} is swept, and {waiting:?} stands");
            found.push(facts.violation(Invariant::RecordOutlivesDelivery, index, *label, why));
        }
    }
}

/// What a client was told of a request must be so, or have been when it asked.
fn told(facts: &Facts<'_>, polled: &Polled<'_>) -> Result<(), Fault> {
    let Some((index, word)) = polled.answered else { return Ok(()) };
    let (label, from) = (polled.label, polled.index);
    let waited = facts.all_waiting(label, from, index);
    let stood = facts.standings(label, from, index);
    let waits = |fits: &dyn Fn(&Waiting) -> bool| waited.iter().flatten().any(|waiting| fits(waiting));
    let stands = |fits: &dyn Fn(&Standing) -> bool| stood.iter().flatten().any(|standing| fits(standing));
    let is_so = match word {
        "queued" => waits(&|waiting| !waiting.is_dead),
        "in-flight" => stands(&|standing| standing.state == State::InFlight),
        "completed" => stands(&is_completed),
        "unknown" => stands(&|standing| match standing.state {
            State::Unknown => true,
            State::InFlight => standing.is_past(facts.at(index)),
            State::Completed => false,
        }),
        "dead" => waits(&|waiting| waiting.is_dead),
        "no-route" => waited.iter().any(Option::is_none),
        "store-unavailable" => true,
        _ => false,
    };
    if is_so { Ok(()) } else { Err((Invariant::StatusFits, format!("{word}, where {waited:?} and {stood:?} stood"))) }
}

/// Runs last until every delivery is over.
fn ended(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    if facts.calm.is_none() {
        return;
    }
    for (label, changes) in &facts.queue {
        if let Some((index, Some(waiting))) = changes.last()
            && !waiting.is_dead
        {
            let why = format!("{waiting:?} never ends");
            found.push(facts.violation(Invariant::EveryDeliveryEnds, *index, *label, why));
        }
    }
}
