//! Properties of the machine over random sequences of events, including sequences that no driver reports.

use std::collections::BTreeSet;
use std::time::Duration;

use http::StatusCode;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

use super::golden::{EVENTS, number_of};
use super::*;
use crate::idempotency::record::{AttemptToken, State};

fn limits() -> impl Strategy<Value = ProtocolLimits> {
    let times = (prop_oneof![Just(0u64), Just(20)], 1..40u64, 0..40u64, 1..40u64);
    (times, 1..4u32).prop_map(|((patience, lease, claim_by, settle_timeout), attempts)| ProtocolLimits {
        claim_by: Duration::from_secs(claim_by),
        settle_timeout: Duration::from_secs(settle_timeout),
        lease: Duration::from_secs(lease),
        patience: Duration::from_secs(patience),
        attempts,
        backoff: Duration::from_secs(1),
    })
}

fn decision() -> impl Strategy<Value = Decision> {
    prop_oneof![
        Just(Decision::Supersede),
        Just(Decision::InFlight(RunningAttempt {
            elapsed: Duration::from_secs(1),
            lease_left: Some(Duration::from_secs(2))
        })),
        Just(Decision::NotStored(StatusCode::OK)),
        Just(Decision::Unknown),
        Just(Decision::Probe),
        Just(Decision::Reused),
        Just(Decision::CallerDiffers),
        Just(Decision::Unreadable),
    ]
}

fn view() -> impl Strategy<Value = RecordView> {
    (decision(), any::<bool>(), 0..3u64).prop_map(|(decision, is_own, until)| {
        let version = Version { attempt: AttemptToken([1; 16]), state: State::Unknown, until: Timestamp(until) };
        RecordView { decision, until: None, version, is_own }
    })
}

fn followed() -> impl Strategy<Value = Followed> {
    let attempt = RunningAttempt::here(Duration::from_secs(1));
    prop_oneof![
        prop::option::of(Just(Decision::Reused)).prop_map(move |difference| Followed::Running { difference, attempt }),
        decision().prop_map(|decision| Followed::Found { decision, until: None }),
        Just(Followed::Absent),
        any::<bool>().prop_map(|is_same| Followed::Released { is_same }),
        Just(Followed::AskStore),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    use SettleResult::{CompletedOtherwise, Done, Lost};
    prop_oneof![
        4 => Just(Event::Leads),
        1 => Just(Event::Follows),
        2 => followed().prop_map(Event::Followed),
        4 => Just(Event::Permitted),
        1 => Just(Event::Retired),
        1 => Just(Event::Barred),
        3 => Just(Event::Claimed),
        1 => Just(Event::OtherId),
        1 => Just(Event::NotSuperseded),
        3 => view().prop_map(Event::Exists),
        2 => prop::option::of(view()).prop_map(Event::Looked),
        2 => any::<bool>().prop_map(|in_doubt| Event::StoreFailed { in_doubt }),
        1 => Just(Event::Failed),
        3 => Just(Event::ProbeLocked),
        1 => Just(Event::ProbeTaken),
        1 => Just(Event::ProbeFree),
        3 => prop::sample::select(vec![Finding::Done, Finding::Absent, Finding::Unclear]).prop_map(Event::Probed),
        3 => Just(Event::AttemptEnded),
        3 => Just(Event::AttemptLost),
        2 => Just(Event::Resumed),
        3 => prop::sample::select(vec![Done, CompletedOtherwise, Lost]).prop_map(Event::Settled),
        2 => Just(Event::WaitSlotAcquired),
        1 => Just(Event::WaitSlotsFull),
        1 => Just(Event::Changed),
        3 => Just(Event::Timeout),
        1 => Just(Event::ClientLeft),
        1 => Just(Event::ShuttingDown),
    ]
}

#[test]
fn every_event_is_tried() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut tried: BTreeSet<usize> = [number_of(&Event::Begin)].into();
    for _ in 0..10_000 {
        tried.insert(number_of(&event().new_tree(&mut runner).unwrap().current()));
    }
    assert_eq!(tried, (0..EVENTS).collect());
}

/// What a driver knows of a request.
#[derive(Default)]
struct Seen {
    leads: bool,
    runs: u32,
    /// Attempts whose outcome is unknown.
    lost: u32,
    replies: usize,
    waits: bool,
    /// It may not run.
    is_barred: bool,
    is_left: bool,
    /// The store has acknowledged a claim that has not ended.
    holds: bool,
    /// A claim may have been written.
    may_hold: bool,
    settled: Option<SettleResult>,
    ended: bool,
    /// It has the right to probe.
    has_lock: bool,
    /// The version of the record that it found last, and what the upstream said of it.
    found: Option<Version>,
    finding: Option<Finding>,
}

impl Seen {
    fn event(&mut self, event: &Event, protocol: &Protocol) {
        match event {
            Event::Claimed | Event::OtherId => (self.holds, self.may_hold) = (true, true),
            Event::AttemptLost => (self.ended, self.lost) = (true, self.lost + 1),
            Event::StoreFailed { in_doubt: true } if !self.waits => self.may_hold = true,
            Event::Settled(settlement) => (self.settled, self.holds, self.may_hold) = (Some(*settlement), false, false),
            Event::ClientLeft => self.is_left |= protocol.is_waiting(),
            Event::AttemptEnded => self.ended = true,
            Event::Barred => self.is_barred = true,
            Event::ProbeLocked => self.has_lock = true,
            Event::Exists(view) | Event::Looked(Some(view)) => (self.found, self.finding) = (Some(view.version), None),
            Event::Probed(finding) => self.finding = Some(*finding),
            _ => {}
        }
    }

    fn action(&mut self, action: &Action, event: &Event, limits: ProtocolLimits) -> Result<(), TestCaseError> {
        match action {
            Action::Run => {
                self.runs += 1;
                prop_assert_eq!(self.runs, 1 + self.lost, "an attempt runs once");
                prop_assert!(self.runs <= limits.attempts);
                self.ended = false;
                prop_assert_eq!(event, &Event::Claimed, "under an acknowledged claim");
                prop_assert!(self.leads && !self.waits && !self.is_barred && self.replies == 0);
            }
            Action::Claim | Action::Supersede(_) => {
                prop_assert!(self.leads && !self.waits && !self.is_barred && self.runs == 0);
            }
            Action::Look => prop_assert!(self.waits || self.is_barred && self.leads),
            Action::Withdraw => prop_assert_eq!(self.runs, 0, "what ran is settled, not withdrawn"),
            Action::Settle | Action::Hold => {
                prop_assert!(self.ended && self.runs > 0);
                self.settled = None;
            }
            Action::Pause(_) => prop_assert_eq!(event, &Event::AttemptLost),
            Action::Reclaim => {
                prop_assert!(self.leads && self.ended && self.replies == 0);
                prop_assert_eq!(self.settled, Some(SettleResult::Done), "the store has it as unknown");
            }
            Action::LockProbe => prop_assert!(self.leads && !self.waits && self.runs == 0),
            Action::CheckProbe => prop_assert!(self.leads && self.waits),
            Action::ShareProbing => prop_assert!(self.leads),
            Action::Probe => prop_assert!(self.has_lock && self.leads && self.replies == 0),
            Action::Recover => prop_assert_eq!(self.finding, Some(Finding::Done), "the upstream has said so"),
            Action::AcquireWaitSlot => self.waits = true,
            Action::ShareRunning { .. } => prop_assert!(self.leads),
            Action::ShareFound | Action::ShareEnd | Action::Leave => {
                prop_assert!(self.leads, "it leads");
                self.leads = false;
            }
            Action::Reply(reply) => {
                self.replies += 1;
                prop_assert_eq!(self.replies, 1, "one reply");
                if *reply == Reply::Recovered {
                    prop_assert_eq!(self.settled, Some(SettleResult::Done), "the record has it");
                    prop_assert_eq!(self.finding, Some(Finding::Done));
                }
                if let Reply::Attempted(settlement) = reply {
                    prop_assert_eq!(*settlement, self.settled, "what the store has said");
                }
            }
            Action::Join | Action::Follow | Action::FollowToEnd | Action::AskPermission | Action::Watch => {}
        }
        Ok(())
    }
}

proptest! {
    // It is quick: 100,000 in the long run.
    #![proptest_config(ProptestConfig { cases: 10 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_breaks_a_rule(limits in limits(), events in vec((event(), 0..8000u64), 1..40)) {
        let mut protocol = Protocol::new(limits);
        let mut seen = Seen::default();
        let mut now = Duration::ZERO;
        let first = (Event::Begin, 0);
        for (event, millis) in [first].into_iter().chain(events) {
            now += Duration::from_millis(millis);
            if event == Event::Timeout {
                let Some(at) = protocol.timeout() else { continue };
                now = at.max(now);
            }
            let before = protocol.clone();
            let actions = protocol.handle(now, event.clone());
            if actions.is_empty() && protocol == before {
                // Nothing waits for it.
                continue;
            }
            seen.event(&event, &before);
            if event == Event::Leads {
                seen.leads = true;
            }
            for action in &actions {
                seen.action(action, &event, limits)?;
            }
            if protocol.is_done() {
                prop_assert!(!seen.leads, "it lets others lead");
                prop_assert!(!seen.holds, "a claim that the store has acknowledged is ended");
                prop_assert!(seen.replies == 1 || seen.is_left, "its client has a reply");
            }
        }
    }

    /// Whatever happened before, a store that answers from now on brings the request to its end.
    #[test]
    fn every_request_ends(limits in limits(), events in vec((event(), 0..8000u64), 0..30)) {
        let mut protocol = Protocol::new(limits);
        let mut now = Duration::ZERO;
        let mut pending = protocol.handle(now, Event::Begin);
        let mut scripted = events.into_iter();
        for _ in 0..500 {
            if protocol.is_done() {
                return Ok(());
            }
            // The action that is under way, if there is one.
            let event = match scripted.next() {
                Some((event, millis)) => {
                    now += Duration::from_millis(millis);
                    event
                }
                None => match pending.last() {
                    Some(Action::Join) => Event::Leads,
                    Some(Action::AskPermission) => Event::Permitted,
                    Some(Action::Claim | Action::Supersede(_)) => Event::Claimed,
                    Some(Action::Look) => Event::Looked(None),
                    Some(Action::Run) => Event::AttemptEnded,
                    Some(Action::Settle | Action::Hold | Action::Withdraw) => Event::Settled(SettleResult::Done),
                    Some(Action::AcquireWaitSlot) => Event::WaitSlotAcquired,
                    Some(Action::Pause(_)) => Event::Resumed,
                    Some(Action::Reclaim) => Event::Claimed,
                    Some(Action::LockProbe) => Event::ProbeLocked,
                    Some(Action::CheckProbe) => Event::ProbeFree,
                    Some(Action::Probe) => Event::Probed(Finding::Done),
                    Some(Action::Recover) => Event::Settled(SettleResult::Done),
                    Some(Action::Follow | Action::FollowToEnd) => Event::Followed(Followed::AskStore),
                    _ => {
                        now = protocol.timeout().expect("else it waits for nothing").max(now);
                        Event::Timeout
                    }
                },
            };
            let before = protocol.clone();
            let actions = protocol.handle(now, event);
            let operations = actions.into_iter().filter(|action| !matches!(action, Action::Reply(_)));
            let operations: Vec<_> = operations.collect();
            if !operations.is_empty() || protocol != before {
                // A reply in the middle leaves the operation under way.
                if !operations.is_empty() || protocol.is_waiting() != before.is_waiting() {
                    pending = operations;
                }
            }
        }
        prop_assert!(false, "it has not ended: {protocol:?}");
    }
}

/// The answer to a takeover was lost, and no client waits for it any more: the claim may stand, and be unknown by now.
#[test]
fn a_takeover_that_is_given_up_is_released_though_it_turned_unknown() {
    let second = Duration::from_secs(1);
    let (patience, backoff) = (Duration::ZERO, Duration::ZERO);
    let limits =
        ProtocolLimits { claim_by: second, settle_timeout: second, lease: second * 30, patience, attempts: 1, backoff };
    let mut protocol = Protocol::new(limits);
    let version = Version { attempt: AttemptToken([1; 16]), state: State::Unknown, until: Timestamp(0) };
    let stands = RecordView { decision: Decision::Supersede, until: None, version, is_own: false };
    for event in [Event::Begin, Event::Leads, Event::Permitted, Event::Exists(stands), Event::Permitted] {
        protocol.handle(Duration::ZERO, event);
    }
    assert_eq!(protocol.handle(Duration::ZERO, Event::StoreFailed { in_doubt: true }), []);
    let retry = protocol.timeout().unwrap();
    assert_eq!(protocol.handle(retry, Event::Timeout), [Action::Supersede(version)]);
    assert_eq!(protocol.handle(second, Event::Timeout), [Action::Reply(Reply::ClaimUnanswered)]);
    assert_eq!(protocol.handle(second, Event::NotSuperseded), [Action::Withdraw]);
    assert_eq!(protocol.handle(second, Event::Settled(SettleResult::Done)), [Action::Leave]);
    assert!(protocol.is_done());
}
