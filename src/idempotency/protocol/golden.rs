//! The transitions as a table that anybody can read: `protocol.golden.md`, written from what [`Protocol`] does.
//!
//! A test compares. To accept a change: `ONCEGATE_BLESS=1 cargo test golden`, then read the difference.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use http::StatusCode;

use super::super::golden::compare;
use super::*;
use crate::idempotency::record::{AttemptToken, State};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/idempotency/protocol.golden.md");

const SECOND: Duration = Duration::from_secs(1);
const LEASE_LEFT: Duration = Duration::from_secs(25);

const WAITS: ProtocolLimits = ProtocolLimits {
    claim_by: Duration::from_secs(5),
    settle_timeout: Duration::from_secs(5),
    lease: Duration::from_secs(30),
    patience: Duration::from_secs(20),
    attempts: 1,
    backoff: SECOND,
};
const DOES_NOT_WAIT: ProtocolLimits = ProtocolLimits { patience: Duration::ZERO, ..WAITS };
const SENDS_AGAIN: ProtocolLimits = ProtocolLimits { attempts: 3, ..WAITS };

/// A situation: its title, and the events that lead there, each with the request's age.
type Situation = (&'static str, ProtocolLimits, fn() -> Vec<(Duration, Event)>);

const START: Duration = Duration::ZERO;

const SITUATIONS: &[Situation] = &[
    ("The request is whole", WAITS, Vec::new),
    ("It asks who leads for the key in its process", WAITS, || vec![(START, Event::Begin)]),
    ("It follows the leader, and may wait", WAITS, following),
    ("It follows the leader, and must not wait", DOES_NOT_WAIT, following),
    ("It leads, and asks whether it may run under a configuration that is in force", WAITS, || leading(&[])),
    ("It may not run, and reads what the store has", WAITS, || leading(&[Event::Barred])),
    ("It has asked the store for the claim, and may wait", WAITS, || leading(&[Event::Permitted])),
    ("It has asked the store for the claim, and must not wait", DOES_NOT_WAIT, || leading(&[Event::Permitted])),
    ("A claim failed, and may have been written", WAITS, || {
        leading(&[Event::Permitted, Event::StoreFailed { in_doubt: true }])
    }),
    ("The client has been answered, and the claim may still be written", WAITS, || {
        let mut events = leading(&[Event::Permitted]);
        events.push((WAITS.settle_timeout, Event::Timeout));
        events
    }),
    ("It has asked the store to take over a record", WAITS, taking_over),
    ("The client has been answered, and the takeover may still be written", WAITS, || {
        let mut events = taking_over();
        events.push((WAITS.settle_timeout, Event::Timeout));
        events
    }),
    ("It releases its own claim, which turned unknown before it was acknowledged", WAITS, || {
        leading(&[Event::Permitted, Event::Exists(RecordView { is_own: true, ..view(Decision::Unknown) })])
    }),
    ("It releases a claim that it does not use", WAITS, || {
        let mut events = leading(&[Event::Permitted]);
        events.push((Duration::from_secs(21), Event::Claimed));
        events
    }),
    ("It asks for the right to probe an unknown outcome", WAITS, || probing(&[])),
    ("It may not run, and asks the upstream what became of the attempt", WAITS, || {
        leading(&[Event::Barred, Event::Looked(Some(view(Decision::Probe))), Event::ProbeLocked])
    }),
    ("It asks the upstream what became of the attempt", WAITS, || probing(&[Event::ProbeLocked])),
    ("It completes the record with what the upstream said", WAITS, || {
        probing(&[Event::ProbeLocked, Event::Probed(Finding::Done)])
    }),
    ("Its attempt runs", WAITS, || leading(&[Event::Permitted, Event::Claimed])),
    ("Its attempt runs, and the request may be sent again", SENDS_AGAIN, || {
        leading(&[Event::Permitted, Event::Claimed])
    }),
    ("It pauses before the request is sent again", SENDS_AGAIN, || resending(&[])),
    ("It ends the attempt as unknown, to send the request again", SENDS_AGAIN, || resending(&[Event::Resumed])),
    ("It has asked the store for the claim of the next attempt", SENDS_AGAIN, || {
        resending(&[Event::Resumed, Event::Settled(SettleResult::Done)])
    }),
    (
        "Its client has `outcome-unknown`, and the store has not said whether the next attempt is claimed",
        SENDS_AGAIN,
        || {
            let mut events = resending(&[Event::Resumed, Event::Settled(SettleResult::Done)]);
            events.push((SENDS_AGAIN.settle_timeout, Event::Timeout));
            events
        },
    ),
    ("It settles its attempt", WAITS, || leading(&[Event::Permitted, Event::Claimed, Event::AttemptEnded])),
    ("A settlement failed", WAITS, || {
        leading(&[Event::Permitted, Event::Claimed, Event::AttemptEnded, Event::StoreFailed { in_doubt: true }])
    }),
    ("The client has its answer, marked `unrecorded`, and the attempt is being settled", WAITS, || {
        let mut events = leading(&[Event::Permitted, Event::Claimed, Event::AttemptEnded]);
        events.push((WAITS.settle_timeout, Event::Timeout));
        events
    }),
    ("It asks for a place among those that wait", WAITS, || waiting(false, &[])),
    ("It waits for an attempt in its process", WAITS, || waiting(true, &[Event::WaitSlotAcquired])),
    ("It waits for an attempt elsewhere", WAITS, || waiting(false, &[Event::WaitSlotAcquired])),
    ("The attempt that it waits for may have ended, and it asks who leads", WAITS, || {
        waiting(false, &[Event::WaitSlotAcquired, Event::Changed])
    }),
    ("It leads, and reads the record that it waits for", WAITS, || {
        waiting(false, &[Event::WaitSlotAcquired, Event::Changed, Event::Leads])
    }),
    ("It leads, a probe is due, and it finds out whether another asks the upstream", WAITS, || checking(&[])),
    ("None asks, and it reads the record again", WAITS, || checking(&[Event::ProbeFree])),
    ("None asks any more, and it reads the record again", WAITS, || {
        checking(&[
            Event::ProbeTaken,
            Event::Changed,
            Event::Leads,
            Event::Looked(Some(view(Decision::Probe))),
            Event::ProbeFree,
        ])
    }),
];

/// A request that waits has found that a probe is due.
fn checking(events: &[Event]) -> Vec<(Duration, Event)> {
    let due = [Event::WaitSlotAcquired, Event::Changed, Event::Leads, Event::Looked(Some(view(Decision::Probe)))];
    waiting(false, &[&due, events].concat())
}

fn at_once(events: &[Event]) -> Vec<(Duration, Event)> {
    events.iter().map(|event| (START, event.clone())).collect()
}

fn following() -> Vec<(Duration, Event)> {
    at_once(&[Event::Begin, Event::Follows])
}

fn leading(events: &[Event]) -> Vec<(Duration, Event)> {
    at_once(&[&[Event::Begin, Event::Leads], events].concat())
}

fn taking_over() -> Vec<(Duration, Event)> {
    leading(&[Event::Permitted, Event::Exists(view(Decision::Supersede)), Event::Permitted])
}

fn resending(events: &[Event]) -> Vec<(Duration, Event)> {
    leading(&[&[Event::Permitted, Event::Claimed, Event::AttemptLost], events].concat())
}

fn probing(events: &[Event]) -> Vec<(Duration, Event)> {
    leading(&[&[Event::Permitted, Event::Exists(view(Decision::Probe))], events].concat())
}

fn waiting(here: bool, events: &[Event]) -> Vec<(Duration, Event)> {
    let elapsed = SECOND;
    let met = match here {
        true => Followed::Running { difference: None, attempt: RunningAttempt::here(elapsed) },
        false => Followed::Found {
            decision: Decision::InFlight(RunningAttempt { elapsed, lease_left: Some(LEASE_LEFT) }),
            until: None,
        },
    };
    at_once(&[&[Event::Begin, Event::Follows, Event::Followed(met)], events].concat())
}

fn view(decision: Decision) -> RecordView {
    let version = Version { attempt: AttemptToken([1; 16]), state: State::Unknown, until: Timestamp(0) };
    RecordView { decision, until: None, version, is_own: false }
}

/// Every event, in words.
fn events() -> Vec<(&'static str, Event)> {
    let in_flight = || Decision::InFlight(RunningAttempt { elapsed: SECOND, lease_left: Some(LEASE_LEFT) });
    let found = |decision| Event::Followed(Followed::Found { decision, until: None });
    let exists = |decision| Event::Exists(view(decision));
    let looked = |decision| Event::Looked(Some(view(decision)));
    let completed = || Decision::NotStored(StatusCode::CREATED);
    let running = |difference| Event::Followed(Followed::Running { difference, attempt: RunningAttempt::here(SECOND) });
    vec![
        ("the request begins", Event::Begin),
        ("it is the leader", Event::Leads),
        ("another is the leader", Event::Follows),
        ("the leader runs the same request", running(None)),
        ("the leader runs another request", running(Some(Decision::Reused))),
        ("the leader found an attempt in flight", found(in_flight())),
        ("the leader found an answer", found(completed())),
        ("the leader found an unknown outcome", found(Decision::Unknown)),
        ("the leader found an unknown outcome that is being probed", found(Decision::Probe)),
        ("the leader found a record of another request", found(Decision::Reused)),
        ("the leader found a record of another caller", found(Decision::CallerDiffers)),
        ("the leader found a record that cannot be read", found(Decision::Unreadable)),
        ("the leader found a record that does not count", found(Decision::Supersede)),
        ("the leader found no record", Event::Followed(Followed::Absent)),
        (
            "the leader's attempt released the key, and was of the same request",
            Event::Followed(Followed::Released { is_same: true }),
        ),
        (
            "the leader's attempt released the key, and was of another request",
            Event::Followed(Followed::Released { is_same: false }),
        ),
        ("the leader is gone", Event::Followed(Followed::AskStore)),
        ("it may run, under a configuration that is in force", Event::Permitted),
        ("the configuration has changed", Event::Retired),
        ("the request may not run", Event::Barred),
        ("the store acknowledges the claim", Event::Claimed),
        (
            "the store acknowledges the claim, and has a record of the key under another id, or does not say",
            Event::OtherId,
        ),
        ("the record had changed meanwhile", Event::NotSuperseded),
        ("the store has an attempt in flight", exists(in_flight())),
        ("the store has an answer", exists(completed())),
        ("the store has an unknown outcome", exists(Decision::Unknown)),
        ("the store has an unknown outcome that may be probed", exists(Decision::Probe)),
        ("the store has a record of another request", exists(Decision::Reused)),
        ("the store has a record of another caller", exists(Decision::CallerDiffers)),
        ("the store has a record that cannot be read", exists(Decision::Unreadable)),
        ("the store has a record that does not count", exists(Decision::Supersede)),
        (
            "the store has this very claim, unknown by now",
            Event::Exists(RecordView { is_own: true, ..view(Decision::Unknown) }),
        ),
        ("the record is in flight", looked(in_flight())),
        ("the record has an answer", looked(completed())),
        ("the record is an unknown outcome that may be probed", looked(Decision::Probe)),
        ("the record does not count", looked(Decision::Supersede)),
        ("the record is an unknown outcome", looked(Decision::Unknown)),
        ("the record is of another request", looked(Decision::Reused)),
        ("the record is of another caller", looked(Decision::CallerDiffers)),
        ("the record cannot be read", looked(Decision::Unreadable)),
        (
            "the record is this request's own claim, unknown by now",
            Event::Looked(Some(RecordView { is_own: true, ..view(Decision::Unknown) })),
        ),
        ("there is no record", Event::Looked(None)),
        ("the store fails, and nothing happened", Event::StoreFailed { in_doubt: false }),
        ("the store fails, and it may have happened", Event::StoreFailed { in_doubt: true }),
        ("the gate cannot go on with the request", Event::Failed),
        ("it alone may probe", Event::ProbeLocked),
        ("another request probes", Event::ProbeTaken),
        ("no request probes", Event::ProbeFree),
        ("the upstream says that it took effect", Event::Probed(Finding::Done)),
        ("the upstream knows nothing of it", Event::Probed(Finding::Absent)),
        ("the upstream does not say", Event::Probed(Finding::Unclear)),
        ("the attempt ends", Event::AttemptEnded),
        ("the attempt ends, and its outcome is unknown", Event::AttemptLost),
        ("the pause is over", Event::Resumed),
        ("the settlement is durable", Event::Settled(SettleResult::Done)),
        ("the upstream completed the record itself", Event::Settled(SettleResult::CompletedOtherwise)),
        ("the record was purged or taken over", Event::Settled(SettleResult::Lost)),
        ("there is a place", Event::WaitSlotAcquired),
        ("there is no place", Event::WaitSlotsFull),
        ("the attempt may have ended", Event::Changed),
        ("the client leaves", Event::ClientLeft),
        ("the process shuts down", Event::ShuttingDown),
    ]
}

fn table() -> String {
    let mut out = String::from(
        "# What a protected request does about its key\n\n\
         This file is written by a test from what the program does. Each heading is a situation of one request; each line \
         says what can happen then, and what oncegate does in this order. What is not listed changes nothing. Times count \
         from when the request was whole, with `settle_timeout` 5 s, `lease` 30 s, and where a request may wait, for 20 s.\n",
    );
    for (title, limits, events_before) in SITUATIONS {
        let mut before = Protocol::new(*limits);
        let mut now = Duration::ZERO;
        for (at, event) in events_before() {
            now = at;
            before.handle(now, event);
        }
        let _ = write!(out, "\n## {title}\n\n| what happens | what oncegate does | next |\n|---|---|---|\n");
        let due = before.timeout().map(|at| (at, Event::Timeout));
        let all = events().into_iter().map(|(words, event)| (words.to_owned(), now + SECOND, event));
        let timeout = due.map(|(at, event)| (format!("{} have passed", seconds(at)), at, event));
        // Events with the same effect share a line.
        let mut lines: Vec<(Vec<String>, String)> = Vec::new();
        for (words, at, event) in all.chain(timeout) {
            let mut protocol = before.clone();
            let actions = protocol.handle(at, event);
            if actions.is_empty() && protocol == before {
                continue;
            }
            let does: Vec<String> = actions.iter().map(describe).collect();
            let does = if does.is_empty() { "-".to_owned() } else { does.join("; ") };
            let effect = format!("{does} | {}", what_is_next(&protocol));
            match lines.iter_mut().find(|(_, other)| *other == effect) {
                Some((events, _)) => events.push(words),
                None => lines.push((vec![words], effect)),
            }
        }
        for (events, effect) in lines {
            let _ = writeln!(out, "| {} | {effect} |", events.join("; "));
        }
    }
    out
}

fn what_is_next(protocol: &Protocol) -> String {
    match protocol.timeout() {
        _ if protocol.is_done() => "done".to_owned(),
        Some(at) => format!("goes on; acts by itself at {}", seconds(at)),
        None => "goes on".to_owned(),
    }
}

fn seconds(at: Duration) -> String {
    format!("{} s", at.as_secs_f64())
}

fn describe(action: &Action) -> String {
    match action {
        Action::Join => "asks who leads for the key in its process",
        Action::Follow => "waits until the leader knows what the store has",
        Action::FollowToEnd => "waits until the leader's attempt has ended",
        Action::AskPermission => "asks whether it may run under a configuration that is in force",
        Action::Claim => "asks the store for a new record",
        Action::Supersede(_) => "asks the store to take over the record",
        Action::Look => "reads the record",
        Action::ShareRunning { .. } => "tells its followers that the attempt runs",
        Action::ShareFound => "tells its followers what the store has, and stops leading",
        Action::ShareEnd => "gives its followers a released answer, and stops leading",
        Action::Leave => "stops leading",
        Action::Run => "**forwards the request**",
        Action::Settle => "settles the attempt",
        Action::Withdraw => "releases the claim",
        Action::Pause(pause) => return format!("pauses for {}", seconds(*pause)),
        Action::Hold => "ends the attempt as unknown, with another to follow",
        Action::Reclaim => "asks the store for a new claim in the place of the unknown one",
        Action::LockProbe => "asks the store for the right to probe",
        Action::CheckProbe => "asks the store whether another request probes",
        Action::ShareProbing => "tells its followers that the upstream is asked",
        Action::Probe => "asks the upstream what became of the attempt",
        Action::Recover => "completes the record as its own attempt",
        Action::AcquireWaitSlot => "asks for a place among those that wait",
        Action::Watch => "waits for a sign",
        Action::Reply(reply) => return format!("replies {}", reply_in_words(reply)),
    }
    .to_owned()
}

fn reply_in_words(reply: &Reply) -> String {
    match reply {
        Reply::Decided { decision: Decision::InFlight(RunningAttempt { elapsed, lease_left }), .. } => {
            let left = lease_left.map(|left| format!(", {} of the lease left", seconds(left))).unwrap_or_default();
            format!("409 `in-flight` ({} so far{left})", seconds(*elapsed))
        }
        Reply::Decided { decision: Decision::Reused, .. } => "422 `key-reused`".to_owned(),
        Reply::Decided { decision: Decision::CallerDiffers, .. } => "422 `caller-differs`".to_owned(),
        Reply::Decided { decision: Decision::Unreadable, .. } => "503 `store-unavailable`".to_owned(),
        Reply::Decided { decision: Decision::Unknown, .. } => "409 `outcome-unknown`".to_owned(),
        Reply::Recovered => "with what the upstream said, `recovered`".to_owned(),
        Reply::Decided { .. } => "what the record says".to_owned(),
        Reply::Released => "with the released answer".to_owned(),
        Reply::NothingLeft => "409 `in-flight`, to be sent again at once".to_owned(),
        Reply::OtherId => "409 `in-flight`, to be sent again at once; 503 where the store does not say".to_owned(),
        Reply::Retired => "503 `overloaded`: the configuration changed".to_owned(),
        Reply::ClaimFailed | Reply::ClaimUnanswered | Reply::LeaderUnanswered => {
            "503 `store-unavailable`, or forwards it unprotected where the route says so".to_owned()
        }
        Reply::Barred => "why it may not run".to_owned(),
        Reply::ClaimTooLate | Reply::LookFailed => "503 `store-unavailable`".to_owned(),
        Reply::Failed => "503 `overloaded`".to_owned(),
        Reply::Attempted(Some(SettleResult::Done)) => "with the attempt's outcome".to_owned(),
        Reply::Attempted(Some(SettleResult::CompletedOtherwise)) => "with the recorded answer".to_owned(),
        Reply::Attempted(Some(SettleResult::Lost) | None) => "with the upstream's answer, `unrecorded`".to_owned(),
    }
}

/// The number of an event among all that there are. With a new one this does not compile: then it goes to [`events`], and to those
/// of `properties.rs`.
pub(super) fn number_of(event: &Event) -> usize {
    match event {
        Event::Begin => 0,
        Event::Leads => 1,
        Event::Follows => 2,
        Event::Followed(_) => 3,
        Event::Permitted => 4,
        Event::Retired => 5,
        Event::Barred => 6,
        Event::Claimed => 7,
        Event::OtherId => 8,
        Event::NotSuperseded => 9,
        Event::Exists(_) => 10,
        Event::Looked(_) => 11,
        Event::StoreFailed { .. } => 12,
        Event::Failed => 13,
        Event::ProbeLocked => 14,
        Event::ProbeTaken => 15,
        Event::ProbeFree => 16,
        Event::Probed(_) => 17,
        Event::AttemptEnded => 18,
        Event::AttemptLost => 19,
        Event::Resumed => 20,
        Event::Settled(_) => 21,
        Event::WaitSlotAcquired => 22,
        Event::WaitSlotsFull => 23,
        Event::Changed => 24,
        Event::Timeout => 25,
        Event::ClientLeft => 26,
        Event::ShuttingDown => 27,
    }
}

/// How many events there are.
pub(super) const EVENTS: usize = 28;

/// What the store can have, one by one. With a new decision this does not compile: then it goes to [`events`].
fn number_of_decision(decision: &Decision) -> usize {
    match decision {
        Decision::Supersede => 0,
        Decision::Reused => 1,
        Decision::CallerDiffers => 2,
        Decision::InFlight(_) => 3,
        // An answer, whether its body was kept or not.
        Decision::Replay(_) | Decision::NotStored(_) => 4,
        Decision::Unknown => 5,
        Decision::Probe => 6,
        Decision::Unreadable => 7,
    }
}

const DECISIONS: usize = 8;

#[test]
fn no_event_is_left_out() {
    let events = events();
    // The one that each situation has at its own time.
    let listed = events.iter().map(|(_, event)| number_of(event)).chain([number_of(&Event::Timeout)]);
    assert_eq!(listed.collect::<BTreeSet<_>>(), (0..EVENTS).collect());
    let met = |of: fn(&Event) -> Option<&Decision>| {
        let decisions = events.iter().filter_map(|(_, event)| of(event)).map(number_of_decision);
        decisions.collect::<BTreeSet<_>>()
    };
    let exists = met(|event| match event {
        Event::Exists(view) => Some(&view.decision),
        _ => None,
    });
    let looked = met(|event| match event {
        Event::Looked(view) => view.as_ref().map(|view| &view.decision),
        _ => None,
    });
    let found = met(|event| match event {
        Event::Followed(Followed::Found { decision, .. }) => Some(decision),
        _ => None,
    });
    for decisions in [exists, looked, found] {
        assert_eq!(decisions, (0..DECISIONS).collect());
    }
}

#[test]
fn the_transitions_are_as_agreed() {
    compare(FILE, &table());
}
