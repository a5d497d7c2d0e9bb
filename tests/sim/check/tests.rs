//! The checker itself: histories told by hand, each wrong in one way.

mod deliveries;
mod recoveries;
mod tale;

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate::idempotency::policy::InFlight;
use oncegate::idempotency::record::State;
use oncegate::store::unreliable::Operation;

use self::tale::{A, B, HOLD, LEASE, MAX_AGE, ONE, RETRY, TTL, Tale, UNKNOWN_TTL, encoded, given, setup, told};
use super::{Invariant, check};
use crate::history::{Answer, Connection, Event, Label, LifeNumber, Request};

/// Tells a story that is wrong in one way.
fn wrong(invariant: Invariant, tell: impl FnOnce(&mut Tale)) {
    wrong_on(HOLD, invariant, tell);
}

fn wrong_on(label: Label, invariant: Invariant, tell: impl FnOnce(&mut Tale)) {
    let mut tale = Tale::of(label);
    tell(&mut tale);
    assert_eq!(tale.broken(), BTreeSet::from([invariant]));
}

fn right(label: Label, tell: impl FnOnce(&mut Tale)) {
    let mut tale = Tale::of(label);
    tell(&mut tale);
    assert_eq!(tale.broken(), BTreeSet::new());
}

#[test]
fn true_stories_pass() {
    right(HOLD, |tale| {
        tale.once().pass(10).sent(1).pass(1).got(1, 1, "replayed");
        tale.sent_variant(2, 1).pass(1).problem(2, 422, "key-reused", false);
        tale.pass(TTL).changed(Operation::Sweep, None, None);
        tale.sent(3).claimed(B).wrote(B, 3).ran(B, 3, 2).completed(B, 2).got(3, 2, "executed");
    });
    right(HOLD, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None);
        tale.sent(1).problem(1, 409, "outcome-unknown", false);
        tale.ran(A, 0, 1).completed(A, 1).got(0, 1, "executed").sent(2).got(2, 1, "replayed");
    });
    right(RETRY, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).sent(1).claimed(B).wrote(B, 1);
        tale.ran(B, 1, 1).completed(B, 1).got(1, 1, "executed").ran(A, 0, 2).got(0, 2, "unrecorded");
    });
    right(HOLD, |tale| {
        tale.sent(0).claimed(A).changed(Operation::Settle, Some(A), None);
        tale.problem(0, 502, "upstream-unreachable", true);
    });
}

#[test]
fn two_runs_of_a_claim_are_seen() {
    wrong(Invariant::OneRunPerClaim, |tale| {
        tale.once().ran(A, 0, 2);
    });
    wrong(Invariant::OneRunPerClaim, |tale| {
        tale.once().wrote(A, 0);
    });
}

#[test]
fn runs_without_a_claim_are_seen() {
    wrong(Invariant::ClaimBeforeRun, |tale| {
        tale.sent(0).wrote(A, 0).claimed(A).ran(A, 0, 1).completed(A, 1).got(0, 1, "executed");
    });
    wrong(Invariant::ClaimBeforeRun, |tale| {
        tale.sent(0).claimed(A).changed(Operation::Settle, Some(A), None).wrote(A, 0);
        tale.problem(0, 502, "upstream-broken", false);
    });
    wrong(Invariant::ClaimBeforeRun, |tale| {
        let request = Request(0);
        tale.sent(0).add(Event::Wrote { life: ONE, connection: Connection(0), token: None, request });
        tale.problem(0, 502, "upstream-broken", false);
    });
}

#[test]
fn a_lie_about_what_was_sent_is_seen() {
    wrong(Invariant::NothingSent, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).problem(0, 503, "store-unavailable", true);
    });
}

#[test]
fn takeovers_out_of_turn_are_seen() {
    let rest = |tale: &mut Tale| {
        tale.wrote(B, 1).ran(B, 1, 2).completed(B, 2).got(1, 2, "executed").add(Event::Lost { request: Request(0) });
    };
    wrong_on(RETRY, Invariant::TakeoverByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE - 1).sent(1).claimed(B);
        rest(tale);
    });
    wrong(Invariant::TakeoverByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None).sent(1).claimed(B);
        rest(tale);
    });
    wrong(Invariant::TakeoverByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).completed(A, 1).pass(TTL - 1).sent(1).claimed(B);
        rest(tale);
    });
}

#[test]
fn records_in_flight_that_go_by_themselves_are_seen() {
    let begin = |tale: &mut Tale| {
        tale.sent(0).claimed(A).wrote(A, 0).add(Event::Lost { request: Request(0) });
    };
    wrong(Invariant::InFlightStays, |tale| {
        begin(tale);
        tale.pass(LEASE).changed(Operation::Sweep, None, None);
    });
    wrong(Invariant::InFlightStays, |tale| {
        begin(tale);
        tale.pass(LEASE - 1).unknown(Operation::ExpireLeases, None);
    });
    wrong(Invariant::InFlightStays, |tale| {
        begin(tale);
        tale.pass(LEASE).stands(Operation::ExpireLeases, None, |standing| {
            (standing.token, standing.state) = (B, State::Unknown);
        });
    });
}

#[test]
fn unknown_records_that_go_too_early_are_seen() {
    wrong(Invariant::UnknownStays, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None);
        tale.pass(UNKNOWN_TTL - 1).changed(Operation::Sweep, None, None).add(Event::Lost { request: Request(0) });
    });
}

#[test]
fn completed_records_that_change_are_seen() {
    wrong(Invariant::CompletedStays, |tale| {
        tale.once().pass(TTL - 10).changed(Operation::Sweep, None, None);
    });
    wrong(Invariant::CompletedStays, |tale| {
        tale.once().unknown(Operation::ExpireLeases, None);
    });
    wrong(Invariant::CompletedStays, |tale| {
        tale.once().completed(A, 2);
    });
}

#[test]
fn writes_of_another_attempt_are_seen() {
    wrong(Invariant::FencedByAttempt, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).completed(B, 1).got(0, 1, "executed");
    });
    wrong(Invariant::FencedByAttempt, |tale| {
        let until = LEASE + 1;
        tale.sent(0).claimed(A).pass(1).stands(Operation::Renew, Some(B), |standing| standing.until = until);
        tale.add(Event::Lost { request: Request(0) }).wrote(A, 0);
    });
}

#[test]
fn releases_without_a_rule_are_seen() {
    wrong(Invariant::ReleaseByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).add(Event::Broke { token: Some(A) });
        tale.changed(Operation::Settle, Some(A), None).problem(0, 502, "upstream-broken", false);
    });
    wrong(Invariant::ReleaseByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).changed(Operation::Settle, Some(A), None);
        tale.got(0, 1, "released");
    });
}

#[test]
fn endings_that_did_not_happen_are_seen() {
    wrong(Invariant::SettledAsEnded, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).unknown(Operation::Settle, Some(A));
        tale.problem(0, 504, "upstream-timeout", false);
    });
    wrong(Invariant::SettledAsEnded, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).completed(A, 2).got(0, 1, "executed");
    });
}

#[test]
fn wrong_times_are_seen() {
    wrong(Invariant::TimesByRule, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(5).ran(A, 0, 1);
        tale.stands(Operation::Settle, Some(A), |standing| {
            (standing.state, standing.until, standing.answer) = (State::Completed, 5 + TTL, Some(encoded(1)));
        });
        tale.got(0, 1, "executed");
    });
    wrong(Invariant::TimesByRule, |tale| {
        tale.sent(0).claimed(A).pass(7).stands(Operation::Renew, Some(A), |standing| standing.until += 1);
        tale.wrote(A, 0).add(Event::Lost { request: Request(0) });
    });
}

#[test]
fn answers_of_others_are_seen() {
    wrong(Invariant::AnswerIsOwn, |tale| {
        tale.once().sent(1).got(1, 1, "executed");
    });
    wrong(Invariant::AnswerIsOwn, |tale| {
        tale.once();
        tale.label.tenant = 1;
        tale.sent(1).got(1, 1, "replayed");
    });
    wrong(Invariant::AnswerIsOwn, |tale| {
        tale.once().sent(1);
        let mut answer = told(1, "replayed", 1 + TTL);
        answer.body.push(b'!');
        tale.entries.retain(|entry| !matches!(&entry.event, Event::Answered { .. }));
        tale.add(Event::Left { request: Request(0) }).answered(1, answer);
    });
}

#[test]
fn replays_that_differ_are_seen() {
    wrong(Invariant::ReplayIdentical, |tale| {
        tale.once().sent(1);
        let mut answer = told(1, "replayed", 1 + TTL);
        answer.headers.push(("content-length".to_owned(), "6".to_owned()));
        tale.answered(1, answer);
    });
}

#[test]
fn replays_out_of_time_are_seen() {
    wrong(Invariant::ReplayInTime, |tale| {
        // Longer than a gate waits for its store, for it may have read what another had asked for.
        tale.once().pass(TTL + 1_000).sent(1).got(1, 1, "replayed");
    });
    wrong(Invariant::ReplayInTime, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).sent(1);
        tale.answered(1, told(1, "replayed", TTL)).completed(A, 1).got(0, 1, "executed");
    });
}

#[test]
fn replays_of_what_was_purged_long_ago_are_seen() {
    let purged_before = |tale: &mut Tale, millis| {
        let until = tale.once().standing.clone().unwrap().until;
        tale.changed(Operation::Remove, None, None).pass(millis).sent(1).answered(1, told(1, "replayed", until));
    };
    // As long before as gates wait for their store and believe what they have read.
    right(HOLD, |tale| purged_before(tale, 1_000 + MAX_AGE - 1));
    wrong(Invariant::ReplayInTime, |tale| purged_before(tale, 1_000 + MAX_AGE));
    right(HOLD, |tale| {
        tale.once().changed(Operation::Remove, None, None);
        tale.sent(1).claimed(B).wrote(B, 1).ran(B, 1, 2).completed(B, 2).got(1, 2, "executed");
    });
}

#[test]
fn hints_that_last_are_seen() {
    let ended_before = |tale: &mut Tale, millis| {
        tale.sent(0).claimed(A).changed(Operation::Settle, Some(A), None).problem(0, 502, "upstream-unreachable", true);
        tale.pass(millis);
        let (label, life) = (tale.label, LifeNumber(9));
        tale.add(Event::Sent { request: Request(1), life, label, variant: 0, is_probe: false });
        tale.problem(1, 409, "in-flight", true);
    };
    right(HOLD, |tale| ended_before(tale, 2_000));
    wrong(Invariant::AnswerFitsRecord, |tale| ended_before(tale, 2_001));
}

#[test]
fn answers_to_another_request_are_seen() {
    wrong(Invariant::MismatchRefused, |tale| {
        tale.once().pass(2_000).sent_variant(1, 1).got(1, 1, "replayed");
    });
    wrong(Invariant::MismatchRefused, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None);
        tale.pass(2_000).sent_variant(1, 1).problem(1, 504, "upstream-timeout", false);
        tale.add(Event::Left { request: Request(0) });
    });
}

#[test]
fn answers_before_their_record_are_seen() {
    wrong(Invariant::DurableBeforeAnswer, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).got(0, 1, "executed").completed(A, 1);
    });
}

#[test]
fn words_that_do_not_fit_are_seen() {
    wrong(Invariant::AnswerFitsRecord, |tale| {
        tale.sent(0).problem(0, 409, "in-flight", true);
    });
    wrong(Invariant::AnswerFitsRecord, |tale| {
        tale.once().sent(1).problem(1, 409, "in-flight", false);
    });
    wrong(Invariant::AnswerFitsRecord, |tale| {
        tale.once().sent(1).problem(1, 422, "key-reused", false);
    });
    wrong(Invariant::AnswerFitsRecord, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).got(0, 1, "unrecorded").completed(A, 1);
    });
    wrong(Invariant::AnswerFitsRecord, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).ran(A, 0, 1).completed(A, 1);
        // It expires at another second.
        tale.answered(0, told(1, "executed", 5_000));
    });
}

#[test]
fn those_who_wait_for_ever_are_seen() {
    wrong(Invariant::NothingHangs, |tale| {
        tale.sent(0);
    });
    wrong(Invariant::NothingHangs, |tale| {
        tale.sent(0).pass(60_000).add(Event::Hung { request: Request(0) });
    });
    wrong(Invariant::NothingHangs, |tale| {
        tale.sent(0).add(Event::Lost { request: Request(0) });
    });
}

#[test]
fn attempts_that_are_left_behind_are_seen() {
    wrong(Invariant::EveryAttemptSettles, |tale| {
        tale.sent(0).claimed(A).pass(LEASE).unknown(Operation::ExpireLeases, None);
        tale.problem(0, 503, "store-unavailable", true).add(Event::Calm);
    });
    right(HOLD, |tale| {
        tale.sent(0).claimed(A).pass(LEASE).unknown(Operation::ExpireLeases, None);
        tale.add(Event::Died { life: ONE }).add(Event::Lost { request: Request(0) }).add(Event::Calm);
    });
}

#[test]
fn keys_that_never_answer_are_seen() {
    let probe = |tale: &mut Tale, request| {
        let label = tale.label;
        tale.add(Event::Sent { request: Request(request), life: ONE, label, variant: 0, is_probe: true });
    };
    wrong(Invariant::EveryKeyAnswers, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).pass(2 * LEASE).unknown(Operation::Settle, Some(A));
        tale.add(Event::Left { request: Request(0) }).add(Event::Calm);
        probe(tale, 1);
        tale.problem(1, 409, "in-flight", true);
    });
    right(HOLD, |tale| {
        tale.once().add(Event::Calm);
        probe(tale, 1);
        tale.got(1, 1, "replayed");
    });
}

#[test]
fn a_release_is_told_only_to_those_who_waited() {
    let released = |tale: &mut Tale| {
        tale.sent(0).sent(1).claimed(A).wrote(A, 0);
        let (token, label, request) = (Some(A), tale.label, Request(0));
        tale.add(Event::Executed { serial: 1, token, request, label, variant: 0 });
        let refused = Answer { status: 500, ..given(1) };
        tale.add(Event::Replying { serial: 1, token, answer: refused }).add(Event::Replied { serial: 1, token });
        tale.changed(Operation::Settle, Some(A), None);
        for request in 0..2 {
            let answer = Answer { status: 500, ..told(1, "released", 0) };
            tale.answered(request, answer);
        }
    };
    wrong(Invariant::AnswerFitsRecord, released);
    let (mut tale, mut setup) = (Tale::of(HOLD), setup());
    released(&mut tale);
    setup.policies[0].in_flight = InFlight::Wait(Duration::from_secs(1));
    assert!(check(&setup, &tale.entries).is_empty());
}
