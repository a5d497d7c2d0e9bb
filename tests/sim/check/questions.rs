//! What gates asked the upstream, and what they may make of what it said.

use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::{Finding, Recovery};

use super::endings::millis;
use super::facts::{Asked, Facts};
use super::{Invariant, Violation};
use crate::history::{Answer, Label, LifeNumber, Request, Standing};

/// Who changes a record by what the upstream said, and where.
pub struct Evidence {
    pub index: usize,
    pub life: LifeNumber,
    pub label: Label,
}

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    let mut asked: Vec<_> = facts.questions.iter().collect();
    asked.sort_by_key(|(_, asked)| asked.index);
    for (place, (question, own)) in asked.iter().enumerate() {
        let is_open = |other: &Asked<'_>| other.label == own.label && other.over.is_none_or(|over| over > own.index);
        if let Some((other, _)) = asked[..place].iter().find(|(_, other)| is_open(other)) {
            let why = format!("question {} is asked while question {} is open", question.0, other.0);
            found.push(facts.violation(Invariant::OneQuestionAtATime, own.index, own.label, why));
        }
    }
}

/// Whether the upstream said that it knows nothing of an attempt, after it had been unknown for as long as the policy says,
/// and of the record that `before` is to the last. `on_behalf` says of whom the question may have been.
pub fn absent(
    facts: &Facts<'_>,
    evidence: &Evidence,
    before: &Standing,
    on_behalf: impl Fn(Option<Request>) -> bool,
) -> bool {
    let Some(due) = due(facts, evidence.label, before) else { return false };
    answered(facts, evidence, Finding::Absent).any(|(asked, _)| {
        let stood = facts.standing(evidence.label, asked.index);
        facts.at(asked.index) >= due && stood == Some(before) && on_behalf(asked.request)
    })
}

/// Whether the upstream may be asked about a key between a time and a place. A gate then takes it that another asks, where a
/// request has met one that found the record, whatever that made of it.
pub fn may_be_asked(facts: &Facts<'_>, label: Label, variant: usize, from: u64, to: usize) -> bool {
    let now = facts.at(to);
    let is_due = |standing: &Standing| {
        standing.variant == Some(variant) && due(facts, label, standing).is_some_and(|due| due <= now)
    };
    facts.standings(label, facts.place(from), to).into_iter().flatten().any(is_due)
}

/// From when on the upstream may be asked about a record.
fn due(facts: &Facts<'_>, label: Label, standing: &Standing) -> Option<u64> {
    let policy = facts.setup.policy(label);
    let Recovery::Probe(probe) = &policy.recovery else { return None };
    let since = match standing.state {
        State::InFlight => standing.until,
        State::Unknown => standing.until - millis(policy.unknown_ttl),
        State::Completed => return None,
    };
    Some(since + millis(probe.after?))
}

/// When a record expires that was completed with what the upstream said of its attempt; nothing where it said something else.
pub fn recovered(facts: &Facts<'_>, evidence: &Evidence, after: &Standing) -> Option<u64> {
    let (policy, decoded) = (facts.setup.policy(evidence.label), after.decoded()?);
    let own = facts.questions.get(&after.question()?)?;
    let (asked, answer) = answered(facts, evidence, Finding::Done).find(|(asked, _)| asked.index == own.index)?;
    let large = answer.body.len() as u64 > policy.max_response_body;
    let kept = decoded.content.as_ref().map(|content| &content.body[..]);
    let is_as_said = decoded.status.as_u16() == answer.status && kept == (!large).then_some(&answer.body[..]);
    let stood = facts.standing(evidence.label, asked.index)?;
    let is_about_it = stood.token == after.token && stood.state != State::Completed;
    (is_as_said && is_about_it).then(|| facts.at(evidence.index) + millis(policy.ttl))
}

/// The questions of a gate with whole answers that say this.
fn answered<'f, 'a>(
    facts: &'f Facts<'a>,
    evidence: &Evidence,
    finding: Finding,
) -> impl Iterator<Item = (&'f Asked<'a>, &'a Answer)> {
    let &Evidence { index, life, label } = evidence;
    let own = facts.questions.values().filter(move |asked| asked.label == label && asked.life == life);
    own.filter_map(move |asked| {
        let (said, answer) = asked.said?;
        let status = http::StatusCode::from_u16(answer.status).ok()?;
        (said < index && Finding::of(status) == finding).then_some((asked, answer))
    })
}
