//! What became of the records.

use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::Recovery;
use oncegate::idempotency::settle::Verdict;
use oncegate::store::unreliable::Operation;

use super::endings::{Possible, control, millis, possible};
use super::facts::Facts;
use super::questions::{Evidence, absent, recovered};
use super::{Invariant, Violation};
use crate::history::{Event, Label, LifeNumber, Standing, Token};

/// A change of one record.
struct Change {
    index: usize,
    at: u64,
    life: LifeNumber,
    label: Label,
    op: Operation,
    by: Option<Token>,
}

type Fault = (Invariant, String);

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    for (index, entry) in facts.history.iter().enumerate() {
        let Event::Changed { op, by, life, label, before, after } = &entry.event else { continue };
        let change = Change { index, at: entry.at, life: *life, label: *label, op: *op, by: *by };
        let judged = match (before, after) {
            (None, Some(after)) => claimed(facts, &change, after),
            (Some(before), None) => gone(facts, &change, before),
            (Some(before), Some(after)) if before.token == after.token => went_on(facts, &change, before, after),
            (Some(before), Some(after)) => {
                taken_over(facts, &change, before, after).and_then(|()| claimed(facts, &change, after))
            }
            (None, None) => Ok(()),
        };
        if let Err((invariant, why)) = judged {
            found.push(facts.violation(invariant, index, *label, why));
        }
    }
}

fn claimed(facts: &Facts<'_>, change: &Change, after: &Standing) -> Result<(), Fault> {
    if after.state != State::InFlight {
        return Err((Invariant::FencedByAttempt, format!("{after:?} stands, and was never claimed")));
    }
    if change.by != Some(after.token) {
        return Err((Invariant::FencedByAttempt, format!("{after:?} was claimed for another attempt")));
    }
    let lease = millis(facts.setup.policy(change.label).lease);
    if (after.claimed, after.until) != (change.at, change.at + lease) {
        return Err((Invariant::TimesByRule, format!("{after:?} has not a lease of {lease} ms from now on")));
    }
    Ok(())
}

fn taken_over(facts: &Facts<'_>, change: &Change, before: &Standing, after: &Standing) -> Result<(), Fault> {
    let past = before.is_past(change.at);
    let may_run_again = || match &facts.setup.policy(change.label).recovery {
        Recovery::Hold => false,
        Recovery::Retry => true,
        Recovery::Probe(_) => {
            let request = facts.requests.get(&after.token).copied();
            absent(facts, &change.evidence(after.token.life()), before, |of| {
                of.is_some() && (request.is_none() || of == request)
            })
        }
        // The same request of the same gate.
        Recovery::Resend(_) => {
            let (first, next) = (facts.requests.get(&before.token), facts.requests.get(&after.token));
            before.state == State::Unknown
                && before.token.life() == after.token.life()
                && (first.is_none() || next.is_none() || first == next)
        }
    };
    let allowed = match before.state {
        State::Completed => past,
        State::Unknown => past || may_run_again(),
        State::InFlight => past && may_run_again(),
    };
    if change.op == Operation::ExpireLeases {
        return Err((Invariant::InFlightStays, format!("the reaper makes {before:?} another attempt's: {after:?}")));
    }
    if !allowed {
        return Err((Invariant::TakeoverByRule, format!("{before:?} gives way to {after:?}")));
    }
    let expired = past && before.state != State::InFlight;
    match facts.setup.policy(change.label).recovery {
        Recovery::Probe(_) if !expired => never_runs(facts, before),
        _ => Ok(()),
    }
}

/// The upstream knew nothing of an attempt when it could not be under way any more.
fn never_runs(facts: &Facts<'_>, before: &Standing) -> Result<(), Fault> {
    match facts.runs.values().find(|run| run.token == Some(before.token)) {
        Some(run) => {
            let why = format!("{before:?} was unknown to the upstream, which runs it at {} ms", facts.at(run.index));
            Err((Invariant::AbsentNeverRuns, why))
        }
        None => Ok(()),
    }
}

impl Change {
    /// What a gate may have gone by that changed the record.
    fn evidence(&self, life: LifeNumber) -> Evidence {
        Evidence { index: self.index, life, label: self.label }
    }
}

/// The record of one attempt changes.
fn went_on(facts: &Facts<'_>, change: &Change, before: &Standing, after: &Standing) -> Result<(), Fault> {
    use State::{Completed, InFlight, Unknown};
    let what = || format!("{before:?} becomes {after:?} by {:?} of {:?}", change.op, change.by);
    if (before.claimed, before.variant) != (after.claimed, after.variant) && before.state != Completed {
        return Err((Invariant::FencedByAttempt, what()));
    }
    let own = change.by == Some(before.token);
    match (before.state, after.state, change.op) {
        (Completed, ..) => Err((Invariant::CompletedStays, what())),
        (InFlight, InFlight, Operation::Renew) if own => {
            let until = change.at + millis(facts.setup.policy(change.label).lease);
            if after.until == until { Ok(()) } else { Err((Invariant::TimesByRule, what())) }
        }
        (InFlight, Unknown, Operation::ExpireLeases) if !before.is_past(change.at) => {
            Err((Invariant::InFlightStays, what()))
        }
        (InFlight, Unknown, Operation::ExpireLeases) => turned_unknown(facts, change, after),
        (InFlight, Unknown, Operation::Settle) if own => {
            held(facts, change, before).and_then(|()| turned_unknown(facts, change, after))
        }
        (InFlight | Unknown, Completed, Operation::Settle) if own => completed(facts, change, after),
        (InFlight | Unknown, _, Operation::Settle | Operation::Renew) => Err((Invariant::FencedByAttempt, what())),
        (InFlight, ..) => Err((Invariant::InFlightStays, what())),
        (Unknown, ..) => Err((Invariant::UnknownStays, what())),
    }
}

fn turned_unknown(facts: &Facts<'_>, change: &Change, after: &Standing) -> Result<(), Fault> {
    let until = change.at + millis(facts.setup.policy(change.label).unknown_ttl);
    if after.until == until {
        return Ok(());
    }
    Err((Invariant::TimesByRule, format!("{after:?} does not expire at {until}")))
}

fn held(facts: &Facts<'_>, change: &Change, before: &Standing) -> Result<(), Fault> {
    let ways = possible(facts, before.token, change.label, change.index);
    if ways.iter().any(|way| way.verdict == Verdict::Hold) {
        return Ok(());
    }
    Err((Invariant::SettledAsEnded, format!("{before:?} is held, where {}", all(&ways))))
}

fn completed(facts: &Facts<'_>, change: &Change, after: &Standing) -> Result<(), Fault> {
    let ways = possible(facts, after.token, change.label, change.index);
    let Some(decoded) = after.decoded() else {
        return Err((Invariant::SettledAsEnded, format!("{after:?} has no answer that can be read")));
    };
    // What the books said says so.
    for way in ways.iter().filter(|_| after.question().is_none()) {
        let (Verdict::Complete { ttl, keep_body }, Some(answer)) = (way.verdict, way.answer) else { continue };
        let large = answer.body.len() as u64 > facts.setup.policy(change.label).max_response_body;
        let kept = decoded.content.as_ref().map(|content| &content.body[..]);
        let expected = (keep_body && !large).then_some(&answer.body[..]);
        if decoded.status.as_u16() != answer.status || kept != expected {
            continue;
        }
        let from_claim = after.claimed + millis(ttl);
        let until = if from_claim <= change.at { change.at + millis(ttl) } else { from_claim };
        if after.until != until {
            return Err((Invariant::TimesByRule, format!("{after:?} does not expire at {until}")));
        }
        debug_assert_eq!(control(answer).ttl.unwrap_or(facts.setup.policy(change.label).ttl), ttl);
        return Ok(());
    }
    match recovered(facts, &change.evidence(change.life), after) {
        Some(until) if after.until == until => Ok(()),
        Some(until) => Err((Invariant::TimesByRule, format!("{after:?} does not expire at {until}"))),
        None => Err((Invariant::SettledAsEnded, format!("{after:?} completed, where {}", all(&ways)))),
    }
}

fn gone(facts: &Facts<'_>, change: &Change, before: &Standing) -> Result<(), Fault> {
    let what = || format!("{before:?} is gone by {:?} of {:?}", change.op, change.by);
    match (before.state, change.op) {
        (State::Completed | State::Unknown, Operation::Sweep) if before.is_past(change.at) => Ok(()),
        // An operator may.
        (_, Operation::Remove) => Ok(()),
        (State::Completed, _) => Err((Invariant::CompletedStays, what())),
        (State::InFlight | State::Unknown, Operation::Settle) if change.by == Some(before.token) => {
            let ways = possible(facts, before.token, change.label, change.index);
            if ways.iter().any(|way| way.verdict == Verdict::Release) {
                return Ok(());
            }
            // The gate itself has asked, and there is nothing to run.
            if absent(facts, &change.evidence(change.life), before, |of| of.is_none()) {
                return never_runs(facts, before);
            }
            Err((Invariant::ReleaseByRule, format!("{before:?} is released, where {}", all(&ways))))
        }
        (State::InFlight | State::Unknown, Operation::Settle) => Err((Invariant::FencedByAttempt, what())),
        (State::InFlight, _) => Err((Invariant::InFlightStays, what())),
        (State::Unknown, _) => Err((Invariant::UnknownStays, what())),
    }
}

fn all(ways: &[Possible<'_>]) -> String {
    if ways.is_empty() {
        return "nothing had ended".to_owned();
    }
    let words: Vec<_> = ways.iter().map(|way| format!("{} and the rule is {:?}", way.what, way.verdict)).collect();
    words.join(", or ")
}
