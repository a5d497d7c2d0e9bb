//! Histories of accepted requests.

use oncegate::store::unreliable::Operation;

use super::tale::{A, ACCEPTED, LEASE, NEXT, ONE, TTL, Tale, given};
use super::{Invariant, right, wrong_on};
use crate::history::{Answer, Event, Label, Poll, Request, Token, Waiting};

/// For how long nobody else takes what was taken.
const HOLD: u64 = 10_000;

/// Names the delivery of a request.
fn token(request: u32) -> Token {
    Token((9 << 32) + u64::from(request))
}

fn wrong(invariant: Invariant, tell: impl FnOnce(&mut Tale)) {
    wrong_on(ACCEPTED, invariant, tell);
}

fn kept(tale: &mut Tale, request: u32) -> &mut Tale {
    let waiting = Waiting {
        token: token(request),
        request: Request(request),
        sequence: u64::from(request),
        variant: Some(0),
        since: tale.now,
        is_dead: false,
        until: tale.now,
        attempts: 0,
    };
    tale.queued(Operation::Accept, Some(waiting))
}

fn told(tale: &mut Tale, request: u32) -> &mut Tale {
    let headers = [("idempotency-status", "accepted"), ("location", "/its-status"), ("retry-after", "1")];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    tale.answered(request, Answer { status: 202, reason: String::new(), headers, body: b"{}".to_vec() })
}

fn accepted(tale: &mut Tale, request: u32) -> &mut Tale {
    told(kept(tale.sent(request), request), request)
}

fn waits(tale: &mut Tale, op: Operation, change: impl FnOnce(&mut Waiting)) -> &mut Tale {
    let mut after = tale.waiting.clone().unwrap();
    change(&mut after);
    tale.queued(op, Some(after))
}

fn taken(tale: &mut Tale) -> &mut Tale {
    let until = tale.now + HOLD;
    waits(tale, Operation::TakeDue, |waiting| waiting.until = until)
}

fn given_up(tale: &mut Tale, attempts: u32) -> &mut Tale {
    let until = tale.now + 1_000;
    waits(tale, Operation::ChangeDelivery, |waiting| {
        (waiting.is_dead, waiting.until, waiting.attempts) = (true, until, attempts);
    })
}

fn put_off(tale: &mut Tale, attempts: u32, delay: u64) -> &mut Tale {
    let until = tale.now + delay;
    waits(tale, Operation::ChangeDelivery, |waiting| (waiting.until, waiting.attempts) = (until, attempts))
}

fn done(tale: &mut Tale) -> &mut Tale {
    tale.queued(Operation::ChangeDelivery, None)
}

/// An attempt of the first request, whose upstream refuses it.
fn refused(tale: &mut Tale, attempt: Token, serial: u32) -> &mut Tale {
    let (token, label, request) = (Some(attempt), tale.label, Request(0));
    tale.claimed(attempt).wrote(attempt, 0);
    tale.add(Event::Executed { serial, token, request, label, variant: 0 });
    let answer = Answer { status: 500, ..given(serial) };
    tale.add(Event::Replying { serial, token, answer }).add(Event::Replied { serial, token });
    tale.changed(Operation::Settle, Some(attempt), None)
}

fn polled(tale: &mut Tale, poll: u32, word: &str) {
    let (poll, label) = (Poll(poll), tale.label);
    tale.add(Event::Polls { poll, life: ONE, label }).add(Event::Polled { poll, word: word.to_owned() });
}

/// The first request, taken and run.
fn ran(tale: &mut Tale) -> &mut Tale {
    taken(accepted(tale, 0).pass(5)).claimed(A).wrote(A, 0).ran(A, 0, 1).completed(A, 1)
}

/// Another key of the tenant, and back.
fn beside(tale: &mut Tale, tell: impl FnOnce(&mut Tale)) {
    let other = Label { key: 1, ..ACCEPTED };
    let own = (std::mem::replace(&mut tale.label, other), tale.standing.take(), tale.waiting.take());
    tell(tale);
    (tale.label, tale.standing, tale.waiting) = own;
}

/// The second request, which leaves its gate.
fn another_runs(tale: &mut Tale) {
    taken(accepted(tale, 1)).claimed(NEXT).wrote(NEXT, 1);
}

#[test]
fn true_stories_of_deliveries_pass() {
    right(ACCEPTED, |tale| {
        polled(accepted(tale, 0), 0, "queued");
        taken(tale.pass(5)).claimed(A).wrote(A, 0);
        polled(tale, 1, "in-flight");
        done(tale.ran(A, 0, 1).completed(A, 1)).add(Event::Calm);
        polled(tale.sent(1).got(1, 1, "replayed"), 2, "completed");
    });
    right(ACCEPTED, |tale| {
        put_off(refused(taken(accepted(tale, 0)), A, 1), 1, 100);
        done(taken(tale.pass(100)).claimed(NEXT).wrote(NEXT, 0).ran(NEXT, 0, 2).completed(NEXT, 2)).add(Event::Calm);
    });
    right(ACCEPTED, |tale| {
        taken(accepted(tale, 0)).claimed(A).wrote(A, 0).pass(LEASE).unknown(Operation::ExpireLeases, None);
        polled(given_up(tale, 0), 0, "unknown");
        polled(tale, 1, "dead");
        // Its scope goes on.
        beside(tale, another_runs);
        tale.pass(1_000).queued(Operation::SweepDeliveries, None);
    });
    // Its end was lost.
    right(ACCEPTED, |tale| {
        ran(tale).pass(TTL);
        done(taken(tale));
    });
    right(ACCEPTED, |tale| {
        accepted(tale, 0).queued(Operation::Discard, None);
        polled(tale, 0, "no-route");
    });
}

#[test]
fn acceptance_out_of_turn_is_seen() {
    wrong(Invariant::AcceptedOnce, |tale| {
        accepted(tale, 0);
        accepted(tale, 1);
    });
    wrong(Invariant::AcceptedOnce, |tale| {
        done(ran(tale));
        accepted(tale, 1);
    });
    wrong(Invariant::DurableBeforeAnswer, |tale| {
        kept(told(tale.sent(0), 0).pass(1), 0);
    });
}

#[test]
fn deliveries_that_are_lost_are_seen() {
    wrong(Invariant::DeliveryStays, |tale| {
        done(taken(accepted(tale, 0)));
    });
    wrong(Invariant::DeliveryStays, |tale| {
        done(refused(taken(accepted(tale, 0)), A, 1));
    });
    wrong(Invariant::DeliveryStays, |tale| {
        accepted(tale, 0).queued(Operation::SweepDeliveries, None);
    });
    wrong(Invariant::StatusFits, |tale| polled(accepted(tale, 0), 0, "no-route"));
    wrong(Invariant::StatusFits, |tale| polled(accepted(tale, 0), 0, "completed"));
    wrong(Invariant::EveryDeliveryEnds, |tale| {
        accepted(tale, 0).add(Event::Calm);
    });
}

#[test]
fn deliveries_that_are_taken_out_of_turn_are_seen() {
    wrong(Invariant::TakenIsHeld, |tale| {
        taken(taken(accepted(tale, 0)).pass(HOLD - 1));
    });
    wrong(Invariant::TakenIsHeld, |tale| {
        accepted(tale, 0).pass(5);
        let now = tale.now;
        waits(tale, Operation::TakeDue, |waiting| waiting.until = now);
    });
    wrong(Invariant::PauseHolds, |tale| {
        taken(accepted(tale, 0).add(Event::Paused { life: ONE, is_paused: true }));
    });
    wrong(Invariant::InOrder, |tale| {
        accepted(tale, 0);
        beside(tale, another_runs);
    });
}

#[test]
fn deliveries_that_are_given_up_too_soon_are_seen() {
    // An attempt was released, and another is to come.
    wrong(Invariant::GivenUpByRule, |tale| {
        given_up(refused(taken(accepted(tale, 0)), A, 1), 1);
    });
    wrong(Invariant::GivenUpByRule, |tale| {
        given_up(taken(accepted(tale, 0)), 0);
    });
    right(ACCEPTED, |tale| {
        put_off(refused(taken(accepted(tale, 0)), A, 1), 1, 100);
        given_up(refused(taken(tale.pass(100)), NEXT, 2), 2);
    });
}

#[test]
fn deliveries_that_run_again_are_seen() {
    wrong(Invariant::OneRunPerClaim, |tale| {
        ran(tale).pass(TTL);
        done(taken(tale).claimed(NEXT).wrote(NEXT, 0).ran(NEXT, 0, 2).completed(NEXT, 2));
    });
    wrong(Invariant::RecordOutlivesDelivery, |tale| {
        ran(tale).pass(TTL).changed(Operation::Sweep, None, None);
    });
    wrong(Invariant::AcceptedBeforeRun, |tale| {
        told(tale.sent(0).claimed(A).wrote(A, 0), 0);
    });
}
