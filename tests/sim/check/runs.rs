//! What left the gates, and ran.

use super::facts::{Facts, Sent};
use super::{Invariant, Violation};
use crate::history::{Answer, Event, Label, Request, Token};
use crate::setup::ACCEPT;
use oncegate::idempotency::policy::StoreFailure;
use oncegate::idempotency::recovery::Recovery;

/// The words of answers that say that nothing was sent, whoever made them.
const NOTHING_SENT: [&str; 8] = [
    "replayed",
    "in-flight",
    "response-not-stored",
    "key-reused",
    "store-unavailable",
    "upstream-unreachable",
    "overloaded",
    "bad-request",
];

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    once(facts, found);
    claimed(facts, found);
    for (request, (index, answer)) in &facts.ended {
        if let (Some(answer), Some(sent)) = (answer, facts.sent.get(request)) {
            nothing_sent(facts, *request, sent, *index, answer, found);
        }
    }
}

fn once(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    let mut again = |index: usize, label, what: String| {
        found.push(facts.violation(Invariant::OneRunPerClaim, index, label, what));
    };
    for (token, writes) in facts.writes.iter().filter(|(_, writes)| writes.len() > 1) {
        again(writes[1], label_of(facts, *token), format!("{token} is sent to the upstream again"));
    }
    for (request, writes) in facts.written.iter().filter(|(_, writes)| writes.len() > 1) {
        let label = facts.sent.get(request).map(|sent| sent.label);
        if is_accepted(label) {
            continue;
        }
        let attempts = match label.map(|label| &facts.setup.policy(label).recovery) {
            Some(Recovery::Resend(resend)) => resend.attempts as usize,
            _ => 1,
        };
        let tokens: Vec<Token> = facts.attempts_of(*request).collect();
        // Some attempts between two may not have left the gate. Each took the place of an unknown one.
        let before = |token: Token| std::iter::successors(facts.resent(token), |token| facts.resent(*token));
        let by_rule = |nth: usize| {
            tokens.len() == writes.len()
                && before(tokens[nth]).count() < attempts
                && before(tokens[nth]).any(|token| token == tokens[nth - 1])
        };
        if let Some(wrong) = (1..writes.len()).find(|nth| !by_rule(*nth)) {
            again(writes[wrong], label, format!("request {} is sent to the upstream again", request.0));
        }
    }
    let mut ran: Vec<_> = facts.runs.values().collect();
    ran.sort_by_key(|run| run.index);
    for (place, run) in ran.iter().enumerate() {
        if !is_accepted(Some(run.label))
            && let Some(first) = ran[..place].iter().find(|first| first.request == run.request)
        {
            let at = facts.at(first.index);
            again(run.index, Some(run.label), format!("request {} ran already at {at} ms", run.request.0));
        }
        if let Some(token) = run.token
            && ran[..place].iter().any(|first| first.token == Some(token))
        {
            again(run.index, Some(run.label), format!("{token} runs again"));
        }
    }
}

/// What is accepted is delivered again after a release: see [`super::deliveries`].
fn is_accepted(label: Option<Label>) -> bool {
    label.is_some_and(|label| label.route == ACCEPT)
}

fn claimed(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    for (index, entry) in facts.history.iter().enumerate() {
        let Event::Wrote { token, request, .. } = &entry.event else { continue };
        let Some(sent) = facts.sent.get(request) else { continue };
        if let Err(why) = claim_of(facts, *token, sent, index) {
            found.push(facts.violation(Invariant::ClaimBeforeRun, index, sent.label, why));
        }
    }
    for run in facts.runs.values() {
        let Some(sent) = facts.sent.get(&run.request) else { continue };
        if (run.label, run.variant) != (sent.label, sent.variant) {
            let why = format!("what runs is {} of {}, and not what was sent", run.variant, run.label);
            found.push(facts.violation(Invariant::AnswerIsOwn, run.index, sent.label, why));
        }
        if let Some(token) = run.token
            && !facts.written_before(token, run.index)
        {
            let why = format!("{token} runs, and no gate sent it");
            found.push(facts.violation(Invariant::ClaimBeforeRun, run.index, run.label, why));
        }
    }
}

/// Whether what leaves at `index` has a claim that is durable, and not released since.
fn claim_of(facts: &Facts<'_>, token: Option<Token>, sent: &Sent, index: usize) -> Result<(), String> {
    let Some(token) = token else {
        return match facts.setup.policy(sent.label).store_failure {
            StoreFailure::Forward => Ok(()),
            StoreFailure::Reject => Err("it leaves without an attempt, and the route does not fail open".to_owned()),
        };
    };
    let claims = facts.claims.get(&token).map_or(&[][..], Vec::as_slice);
    let Some((claimed, label)) = claims.iter().rfind(|(claimed, _)| *claimed < index) else {
        return Err(format!("{token} leaves, and is not claimed"));
    };
    if *label != sent.label {
        return Err(format!("{token} leaves for {}, and was claimed for {label}", sent.label));
    }
    let gone = facts.history[*claimed..index].iter().any(|entry| match &entry.event {
        Event::Changed { label, before: Some(before), after: None, by: Some(by), .. } => {
            *label == sent.label && before.token == token && *by == token
        }
        _ => false,
    });
    if gone { Err(format!("{token} leaves, and its claim was released")) } else { Ok(()) }
}

fn nothing_sent(
    facts: &Facts<'_>,
    request: Request,
    sent: &Sent,
    index: usize,
    answer: &Answer,
    found: &mut Vec<Violation>,
) {
    let word = answer.word();
    // The upstream's own answer may leave an unknown outcome behind; a problem tells of somebody else's attempt.
    // A request that could not be accepted may be kept all the same, and is delivered then.
    let may_be_kept = is_accepted(Some(sent.label)) && word == "store-unavailable";
    let says_nothing = NOTHING_SENT.contains(&word) || word == "outcome-unknown" && answer.is_problem();
    if let (true, Some(writes)) = (says_nothing && !may_be_kept, facts.written.get(&request)) {
        let why = format!("request {} gets {word}, and was sent at {} ms", request.0, facts.at(writes[0]));
        found.push(facts.violation(Invariant::NothingSent, index, sent.label, why));
    }
}

fn label_of(facts: &Facts<'_>, token: Token) -> Option<Label> {
    facts.claims.get(&token).map(|claims| claims[0].1)
}
