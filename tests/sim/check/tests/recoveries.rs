//! Histories of unknown outcomes that gates find out by themselves.

use oncegate::store::unreliable::Operation;

use super::tale::{A, AFTER, LEASE, NEXT, PROBED, RESENT, Tale, given};
use super::{Invariant, right, wrong_on};
use crate::history::{Answer, Event, Request};

/// An attempt is lost, and its record turns unknown.
fn lost(tale: &mut Tale) -> &mut Tale {
    tale.sent(0).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None);
    tale.add(Event::Lost { request: Request(0) })
}

/// The attempt is lost on the way, as its gate sees.
fn broken(tale: &mut Tale) -> &mut Tale {
    tale.sent(0).claimed(A).wrote(A, 0).add(Event::Broke { token: Some(A) }).unknown(Operation::Settle, Some(A))
}

/// A request runs in the place of the lost one.
fn runs(tale: &mut Tale) {
    tale.claimed(NEXT).wrote(NEXT, 1).ran(NEXT, 1, 1).completed(NEXT, 1).got(1, 1, "executed");
}

#[test]
fn true_stories_of_probes_pass() {
    right(PROBED, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(1, 404);
        runs(tale);
    });
    right(PROBED, |tale| {
        lost(tale).pass(AFTER).asks(1, None).books_say(1, 410).changed(Operation::Settle, Some(A), None);
    });
    right(PROBED, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(1, 200).pass(5).completed_by_books(A, 1);
        tale.got_of_books(1, 1, "recovered").sent(2).got_of_books(2, 1, "replayed");
    });
}

#[test]
fn runs_without_a_404_in_time_are_seen() {
    wrong_on(PROBED, Invariant::TakeoverByRule, |tale| {
        lost(tale).pass(AFTER - 1).sent(1).asks(1, Some(1)).pass(1).books_say(1, 404);
        runs(tale);
    });
    wrong_on(PROBED, Invariant::TakeoverByRule, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(1, 500);
        runs(tale);
    });
    wrong_on(PROBED, Invariant::TakeoverByRule, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(2, 404);
        runs(tale);
    });
    // What another has asked.
    wrong_on(PROBED, Invariant::TakeoverByRule, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(7)).books_say(1, 404);
        runs(tale);
    });
    wrong_on(PROBED, Invariant::ReleaseByRule, |tale| {
        lost(tale).pass(AFTER - 1).asks(1, None).books_say(1, 404).changed(Operation::Settle, Some(A), None);
    });
}

#[test]
fn runs_of_what_the_upstream_did_not_know_are_seen() {
    wrong_on(PROBED, Invariant::AbsentNeverRuns, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(1, 404);
        runs(tale);
        tale.ran(A, 0, 2);
    });
    wrong_on(PROBED, Invariant::AbsentNeverRuns, |tale| {
        lost(tale).pass(AFTER).asks(1, None).books_say(1, 404).changed(Operation::Settle, Some(A), None);
        tale.ran(A, 0, 2);
    });
}

#[test]
fn questions_at_once_are_seen() {
    wrong_on(PROBED, Invariant::OneQuestionAtATime, |tale| {
        lost(tale).pass(AFTER).asks(1, None).asks(2, None).books_say(1, 500).books_say(2, 500);
    });
    right(PROBED, |tale| {
        lost(tale).pass(AFTER).asks(1, None).books_say(1, 500).asks(2, None).books_say(2, 500);
    });
}

#[test]
fn answers_that_the_books_did_not_give_are_seen() {
    wrong_on(PROBED, Invariant::SettledAsEnded, |tale| {
        lost(tale).pass(AFTER).asks(1, None).books_say(1, 404).completed_by_books(A, 1);
    });
    wrong_on(PROBED, Invariant::DurableBeforeAnswer, |tale| {
        lost(tale).pass(AFTER).sent(1).asks(1, Some(1)).books_say(1, 200).got_of_books(1, 1, "recovered");
        tale.completed_by_books(A, 1);
    });
    wrong_on(PROBED, Invariant::AnswerIsOwn, |tale| {
        lost(tale).pass(AFTER).sent(1).sent(2).asks(1, Some(1)).books_say(1, 200).completed_by_books(A, 1);
        tale.got_of_books(2, 1, "recovered").add(Event::Left { request: Request(1) });
    });
}

#[test]
fn true_stories_of_resends_pass() {
    right(RESENT, |tale| {
        broken(tale).claimed(NEXT).wrote(NEXT, 0).ran(NEXT, 0, 1).completed(NEXT, 1).got(0, 1, "executed");
    });
    // The upstream completes the record, and its answer is lost.
    right(RESENT, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0);
        let (token, label) = (Some(A), tale.label);
        tale.add(Event::Executed { serial: 1, token, request: Request(0), label, variant: 0 });
        tale.add(Event::Kept { serial: 1, token: A, answer: given(1) }).completed(A, 1);
        tale.add(Event::Broke { token }).got(0, 1, "executed");
    });
}

#[test]
fn resends_out_of_turn_are_seen() {
    wrong_on(RESENT, Invariant::TakeoverByRule, |tale| {
        tale.once().claimed(NEXT);
    });
    wrong_on(RESENT, Invariant::OneRunPerClaim, |tale| {
        tale.sent(0).claimed(A).wrote(A, 0).add(Event::Broke { token: Some(A) });
        tale.changed(Operation::Remove, None, None).claimed(NEXT).wrote(NEXT, 0).ran(NEXT, 0, 1);
        tale.completed(NEXT, 1).got(0, 1, "executed");
    });
    // Another request takes the place of a lost one.
    wrong_on(RESENT, Invariant::TakeoverByRule, |tale| {
        broken(tale).add(Event::Left { request: Request(0) }).sent(1);
        runs(tale);
    });
    // What the first attempt did, the second does not know.
    wrong_on(RESENT, Invariant::ReleaseByRule, |tale| {
        broken(tale).claimed(NEXT).wrote(NEXT, 0);
        let (token, label) = (Some(NEXT), tale.label);
        tale.add(Event::Executed { serial: 1, token, request: Request(0), label, variant: 0 });
        tale.add(Event::Replying { serial: 1, token, answer: Answer { status: 503, ..given(1) } });
        tale.add(Event::Replied { serial: 1, token }).changed(Operation::Settle, token, None);
        tale.add(Event::Left { request: Request(0) });
    });
}
