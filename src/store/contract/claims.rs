//! claim and supersede.

use super::*;
use crate::idempotency::record::Version;

pub(super) async fn a_free_id_is_claimed(harness: Harness) {
    let at = claim(&harness, id(1), fresh(7)).await;
    let record = current(&harness, id(1)).await;
    let expected = Record {
        attempt: attempt(7),
        state: State::InFlight,
        claimed_at: at,
        until: at.plus(LONG),
        head: Bytes::from_static(&[7, 7, 7]),
        answer: None,
    };
    assert_eq!(record, expected);
}

pub(super) async fn a_claim_that_stands_is_shown(harness: Harness) {
    for (number, state) in (1..).zip(State::ALL) {
        let record = put(&harness, id(number), number, state).await;
        assert_eq!((record.state, record.attempt), (state, attempt(number)));
        let kept = match state {
            State::InFlight => None,
            State::Completed => Some(answer("done")),
            State::Unknown => Some(answer("cause")),
        };
        assert_eq!(record.answer, kept);
        let Ok(Claim::Exists { record: again, now }) = harness.store.claim(id(number), fresh(9)).await else {
            panic!("{state:?} was claimed over");
        };
        assert_eq!(again, record, "asking changes nothing");
        assert!(now >= record.claimed_at && now < record.until);
    }
}

pub(super) async fn the_same_attempt_claims_again(harness: Harness) {
    let at = claim(&harness, id(1), fresh(7)).await;
    short_passes(&harness).await;
    assert_eq!(claim(&harness, id(1), fresh(7)).await, at, "the time of the current claim is returned");
    assert_eq!(current(&harness, id(1)).await.until, at.plus(LONG));
    assert_eq!(harness.store.count().await.expect("count works"), [1, 0, 0]);
}

pub(super) async fn an_attempt_that_lost_its_claim_does_not_get_it_back_by_asking(harness: Harness) {
    for (number, state) in [(1, State::Completed), (2, State::Unknown)] {
        let record = put(&harness, id(number), number, state).await;
        match harness.store.claim(id(number), fresh(number)).await {
            Ok(Claim::Exists { record: found, .. }) => assert_eq!(found, record),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) async fn an_expired_record_still_stands(harness: Harness) {
    claim(&harness, id(1), NewRecord { lease: SHORT, ..fresh(1) }).await;
    claim(&harness, id(2), fresh(2)).await;
    let end = Settlement::Complete { answer: answer("x"), expiry: Expiry::FromNow(SHORT) };
    settle(&harness, id(2), attempt(2), end).await;
    claim(&harness, id(3), NewRecord { unknown_ttl: SHORT, ..fresh(3) }).await;
    settle(&harness, id(3), attempt(3), hold()).await;
    short_passes(&harness).await;
    for (number, state) in [(1, State::InFlight), (2, State::Completed), (3, State::Unknown)] {
        match harness.store.claim(id(number), fresh(9)).await {
            Ok(Claim::Exists { record, now }) => {
                assert_eq!(record.state, state, "expired records are returned too");
                assert!(record.until <= now);
            }
            other => panic!("{other:?}"),
        }
    }
}

pub(super) async fn supersede_replaces_what_was_seen(harness: Harness) {
    for (number, state) in (1..).zip(State::ALL) {
        let record = put(&harness, id(number), number, state).await;
        short_passes(&harness).await;
        let next = NewRecord { lease: LONG * 3, ..fresh(8) };
        assert!(harness.store.supersede(id(number), record.version(), next).await.expect("supersede works"));
        let new = current(&harness, id(number)).await;
        assert_eq!((new.attempt, new.state, new.answer), (attempt(8), State::InFlight, None));
        assert!(new.claimed_at > record.claimed_at, "it is claimed now");
        assert_eq!(new.until, new.claimed_at.plus(LONG * 3));
        assert_eq!(new.head, Bytes::from_static(&[8, 8, 8]));
    }
    assert_eq!(harness.store.count().await.expect("count works"), [3, 0, 0]);
    // The fresh unknown ttl holds, not the old one.
    let record = current(&harness, id(1)).await;
    let next = NewRecord { unknown_ttl: LONG * 9, ..fresh(10) };
    assert!(harness.store.supersede(id(1), record.version(), next).await.expect("supersede works"));
    let until = settle(&harness, id(1), attempt(10), hold()).await;
    assert!(until >= current(&harness, id(1)).await.claimed_at.plus(LONG * 9));
}

pub(super) async fn supersede_needs_the_version_that_was_seen(harness: Harness) {
    let record = put(&harness, id(1), 1, State::Unknown).await;
    let seen = record.version();
    let others = [
        Version { attempt: attempt(2), ..seen },
        Version { state: State::InFlight, ..seen },
        Version { state: State::Completed, ..seen },
        Version { until: seen.until.plus(Duration::from_millis(1)), ..seen },
    ];
    for other in others {
        assert!(!harness.store.supersede(id(1), other, fresh(8)).await.expect("supersede works"), "{other:?}");
    }
    assert_eq!(current(&harness, id(1)).await, record);
    // The attempt completes in between: the version is another one.
    settle(&harness, id(1), attempt(1), complete("late")).await;
    assert!(!harness.store.supersede(id(1), seen, fresh(8)).await.expect("supersede works"));
    assert_eq!(current(&harness, id(1)).await.state, State::Completed);
}

pub(super) async fn supersede_repeats_for_the_same_attempt(harness: Harness) {
    let seen = put(&harness, id(1), 1, State::Completed).await.version();
    assert!(harness.store.supersede(id(1), seen, fresh(8)).await.expect("supersede works"));
    let record = current(&harness, id(1)).await;
    short_passes(&harness).await;
    assert!(harness.store.supersede(id(1), seen, fresh(8)).await.expect("supersede works"));
    assert_eq!(current(&harness, id(1)).await, record);
    assert!(!harness.store.supersede(id(1), seen, fresh(9)).await.expect("supersede works"));
    settle(&harness, id(1), attempt(8), hold()).await;
    assert!(!harness.store.supersede(id(1), seen, fresh(8)).await.expect("supersede works"), "not in flight any more");
}

pub(super) async fn supersede_claims_nothing_where_nothing_stands(harness: Harness) {
    let seen = put(&harness, id(1), 1, State::Unknown).await.version();
    assert!(harness.store.remove(id(1), attempt(1)).await.expect("remove works"));
    assert!(!harness.store.supersede(id(1), seen, fresh(8)).await.expect("supersede works"));
    assert!(get(&harness, id(1)).await.is_none());
}
