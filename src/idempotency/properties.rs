//! What holds of every decision, whatever the record, the policy and the time.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use proptest::prelude::*;

use super::codec::{Answer, Content, Head};
use super::credential::Proof;
use super::decide::{Decision, decide_read};
use super::fingerprint::{Fingerprint, Recipe};
use super::grpc::Status;
use super::key::Key;
use super::policy::Policy;
use super::record::{AttemptToken, Record, State, Timestamp};
use super::recovery::{Probe, ProbePath, Recovery};
use super::settle::{Control, Ending, OutcomeAction, Outcomes, Verdict, settle, settle_again};

fn policy() -> impl Strategy<Value = Policy> {
    let action = || prop::sample::select(&[OutcomeAction::Store, OutcomeAction::Release, OutcomeAction::Hold][..]);
    let transport = || prop::option::of(prop::sample::select(&[OutcomeAction::Release, OutcomeAction::Hold][..]));
    let outcomes = (
        prop::collection::btree_map(200..600u16, action(), 0..20),
        prop::collection::btree_map(2..6u16, action(), 0..4),
        prop::collection::btree_map(prop::sample::select(&Status::ALL[..]), action(), 0..4),
        transport(),
        transport(),
        transport(),
    )
        .prop_map(|(status, class, grpc, unreachable, timeout, broken)| Outcomes {
            status,
            class,
            grpc,
            unreachable,
            timeout,
            broken,
        });
    let probe = prop::option::of((0..30u64).prop_map(Duration::from_millis)).prop_map(|after| {
        let path = ProbePath::parse("/by-key/{key}").unwrap();
        Recovery::Probe(Probe { path, after, every: None, headers: Vec::new() })
    });
    let recovery = prop_oneof![Just(Recovery::Hold), Just(Recovery::Retry), probe];
    (outcomes, recovery, 1..1000u64).prop_map(|(outcomes, recovery, ttl)| Policy {
        outcomes,
        recovery,
        ttl: Duration::from_secs(ttl),
        ..Policy::default()
    })
}

/// A record, and whether its head and its answer can be read.
fn record() -> impl Strategy<Value = Record> {
    let content = prop::option::of(Just(Content { body: Bytes::from_static(b"x"), trailers: Vec::new() }));
    let answer = prop_oneof![
        4 => (200..600u16, content).prop_map(|(status, content)| {
            let status = StatusCode::from_u16(status).unwrap();
            Some(Answer { status, reason: None, headers: Vec::new(), content }.encode())
        }),
        1 => Just(Some(Bytes::from_static(b"\x02"))),
        1 => Just(None),
    ];
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [3; 32] };
    let head = Head::new(fingerprint, Method::POST, "/", &Key::parse("k", 255).unwrap());
    let head = prop_oneof![
        4 => proof().prop_map(move |proof| head.clone().with_proof(proof).encode()),
        1 => Just(Bytes::from_static(b"\x02")),
    ];
    (prop::sample::select(&State::ALL[..]), 0..50u64, 0..50u64, head, answer).prop_map(
        |(state, claimed_at, until, head, answer)| Record {
            attempt: AttemptToken([1; 16]),
            state,
            claimed_at: Timestamp(claimed_at),
            until: Timestamp(until),
            head,
            answer: answer.filter(|_| state == State::Completed),
        },
    )
}

/// One of two proofs, or none.
fn proof() -> impl Strategy<Value = Option<Proof>> {
    prop::option::of((1..3u8).prop_map(|which| Proof([which; 32])))
}

/// Whether a record is of a caller with this proof.
fn is_of(record: &Record, proof: Option<Proof>) -> bool {
    Head::decode(&record.head).is_ok_and(|head| head.proof == proof)
}

fn control() -> impl Strategy<Value = Control> {
    (any::<bool>(), any::<bool>(), prop::option::of(1..100u64)).prop_map(|(release, no_store, ttl)| Control {
        release,
        no_store,
        ttl: ttl.map(Duration::from_secs),
        invalid: 0,
        of_gate: None,
    })
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        6 => (200..600u16).prop_map(Ending::Answered),
        3 => prop::sample::select(&Status::ALL[..]).prop_map(Ending::Called),
        1 => Just(Ending::Unreachable),
        1 => Just(Ending::Timeout),
        1 => Just(Ending::Broken),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases * 4))]

    #[test]
    fn a_key_is_claimed_again_only_by_expiry_or_by_policy(
        policy in policy(), record in record(), now in 0..50u64, proof in proof(), same: bool,
    ) {
        let now = Timestamp(now);
        let decision = decide_read(now, &policy, &record, proof.as_ref(), same);
        let is_retry = same && is_of(&record, proof);
        let past = record.until <= now;
        let is_readable = Head::decode(&record.head).is_ok();
        if decision == Decision::Supersede {
            let expired = past && record.state != State::InFlight;
            let lost = record.state == State::Unknown || (record.state == State::InFlight && past);
            prop_assert!(expired || (lost && policy.recovery == Recovery::Retry && is_retry && is_readable));
        }
        if decision == Decision::Probe {
            let Recovery::Probe(Probe { after, .. }) = &policy.recovery else { panic!("nothing says so") };
            // These heads do not say how long an unknown outcome is kept.
            let since = match record.state {
                State::InFlight => record.until,
                _ => record.until.minus(policy.unknown_ttl),
            };
            prop_assert!(record.state != State::Completed && is_retry);
            prop_assert!(now >= since.plus(after.expect("nothing is asked at an unknown time")));
        }
        if record.state == State::InFlight && !past {
            let waits = matches!(
                decision,
                Decision::InFlight(_) | Decision::Reused | Decision::CallerDiffers | Decision::Unreadable
            );
            prop_assert!(waits);
        }
    }

    #[test]
    fn only_a_live_completed_record_of_the_same_request_is_replayed(
        policy in policy(), record in record(), now in 0..50u64, proof in proof(), same: bool,
    ) {
        let now = Timestamp(now);
        let decision = decide_read(now, &policy, &record, proof.as_ref(), same);
        let is_retry = same && is_of(&record, proof);
        let may_tell = record.state == State::Completed && record.until > now && is_retry;
        match &decision {
            Decision::Replay(answer) => {
                prop_assert!(may_tell && answer.content.is_some());
                prop_assert_eq!(Some(&answer.encode()), record.answer.as_ref());
            }
            Decision::NotStored(_) => prop_assert!(may_tell),
            Decision::InFlight(_) | Decision::Unknown | Decision::Probe => prop_assert!(is_retry && record.state != State::Completed),
            Decision::Reused => prop_assert!(!same),
            Decision::CallerDiffers => prop_assert!(same && !is_retry),
            Decision::Unreadable => {
                let whole = record.answer.as_ref().is_some_and(|answer| Answer::decode(answer).is_ok());
                prop_assert!(Head::decode(&record.head).is_err() || (record.state == State::Completed && !whole));
            }
            Decision::Supersede => {}
        }
        // Nothing but the record, the time and the policy counts.
        prop_assert_eq!(decide_read(now, &policy, &record, proof.as_ref(), same), decision);
    }

    #[test]
    fn what_was_decided_stays_until_the_time_is_up(
        policy in policy(), record in record(), one in 0..50u64, other in 0..50u64, proof in proof(), same: bool,
    ) {
        let [one, other] = [one, other].map(Timestamp);
        // Until an upstream may be asked, `recovery` holds.
        let kind = |now| match decide_read(now, &policy, &record, proof.as_ref(), same) {
            Decision::Probe => std::mem::discriminant(&Decision::Unknown),
            decision => std::mem::discriminant(&decision),
        };
        if (record.until <= one) == (record.until <= other) {
            prop_assert_eq!(kind(one), kind(other));
        }
    }

    #[test]
    fn a_key_is_released_only_by_policy_by_control_or_where_nothing_was_sent(
        policy in policy(), ending in ending(), control in control(),
    ) {
        let verdict = settle(&policy, ending, &control, None);
        let answered = matches!(ending, Ending::Answered(_) | Ending::Called(_));
        let by_policy = policy.outcomes.action(ending);
        match verdict {
            Verdict::Release => prop_assert!((answered && control.release) || by_policy == OutcomeAction::Release),
            Verdict::Complete { ttl, keep_body } => {
                prop_assert!(answered && !control.release);
                prop_assert_eq!(ttl, control.ttl.unwrap_or(policy.ttl));
                prop_assert_eq!(keep_body, !control.no_store);
            }
            Verdict::Hold => prop_assert!(by_policy == OutcomeAction::Hold && !(answered && (control.release || control.no_store))),
        }
        if !answered {
            prop_assert_eq!(verdict, settle(&policy, ending, &Control::default(), None), "no control header was present");
        }
        if policy.outcomes == Outcomes::default() && !answered {
            let nothing_was_sent = ending == Ending::Unreachable;
            prop_assert_eq!(verdict == Verdict::Release, nothing_was_sent);
        }
    }

    #[test]
    fn a_later_attempt_releases_only_what_the_upstream_asks_for(
        policy in policy(), ending in ending(), control in control(),
    ) {
        let answered = matches!(ending, Ending::Answered(_) | Ending::Called(_));
        let (first, later) = (settle(&policy, ending, &control, None), settle_again(&policy, ending, &control, None));
        prop_assert_eq!(later == Verdict::Release, control.release && answered);
        // By these an upstream says that the earlier one is in progress.
        let conflicts = [Ending::Answered(409), Ending::Called(Status::Aborted), Ending::Called(Status::AlreadyExists)];
        if policy.outcomes == Outcomes::default() && conflicts.contains(&ending) && !control.release && !control.no_store {
            prop_assert_eq!(later, Verdict::Hold);
        }
        // What it keeps, a first attempt keeps too.
        prop_assert!(later == first || later == Verdict::Hold);
    }

    #[test]
    fn the_most_specific_entry_decides(policy in policy(), status in 200..600u16) {
        let outcomes = &policy.outcomes;
        let action = outcomes.action(Ending::Answered(status));
        let usual = Outcomes::default().action(Ending::Answered(status));
        let has_own_default = [401, 407, 408, 425, 429, 502, 504].contains(&status);
        match (outcomes.status.get(&status), outcomes.class.get(&(status / 100))) {
            (Some(exact), _) => prop_assert_eq!(action, *exact),
            (None, Some(class)) if !has_own_default => prop_assert_eq!(action, *class),
            (None, _) => prop_assert_eq!(action, usual),
        }
    }
}
