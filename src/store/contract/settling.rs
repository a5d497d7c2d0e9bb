//! settle.

use super::*;

pub(super) async fn an_attempt_completes(harness: Harness) {
    let at = claim(&harness, id(1), fresh(1)).await;
    let until = settle(&harness, id(1), attempt(1), complete("created")).await;
    let record = current(&harness, id(1)).await;
    let expected = Record {
        attempt: attempt(1),
        state: State::Completed,
        claimed_at: at,
        until,
        head: Bytes::from_static(&[1, 1, 1]),
        answer: Some(answer("created")),
    };
    assert_eq!(record, expected);
}

pub(super) async fn an_expiry_counts_from_the_claim_or_from_now(harness: Harness) {
    let first = claim(&harness, id(1), fresh(1)).await;
    let second = claim(&harness, id(2), fresh(2)).await;
    short_passes(&harness).await;
    let expiring = |expiry| Settlement::Complete { answer: answer("x"), expiry };
    let from_claim = settle(&harness, id(1), attempt(1), expiring(Expiry::FromClaim(LONG))).await;
    let from_now = settle(&harness, id(2), attempt(2), expiring(Expiry::FromNow(LONG))).await;
    assert_eq!(from_claim, first.plus(LONG));
    assert!(from_now > second.plus(LONG));
    assert_eq!(current(&harness, id(1)).await.until, from_claim);
    assert_eq!(current(&harness, id(2)).await.until, from_now);
}

pub(super) async fn an_answer_is_never_dead_on_arrival(harness: Harness) {
    let expiring = |ttl| Settlement::Complete { answer: answer("late"), expiry: Expiry::FromClaim(ttl) };
    for (number, ttl) in [(1, SHORT), (2, SHORT * 2)] {
        let at = claim(&harness, id(number), fresh(number)).await;
        short_passes(&harness).await;
        let until = settle(&harness, id(number), attempt(number), expiring(ttl)).await;
        assert!(until >= at.plus(SHORT * 2 + ttl), "counted from now");
        assert_eq!(settle(&harness, id(number), attempt(number), expiring(ttl)).await, until, "as it stands");
        assert_eq!(current(&harness, id(number)).await.until, until);
    }
}

pub(super) async fn an_attempt_releases(harness: Harness) {
    claim(&harness, id(1), fresh(1)).await;
    settle(&harness, id(1), attempt(1), Settlement::Release).await;
    assert!(get(&harness, id(1)).await.is_none());
    claim(&harness, id(1), fresh(2)).await;
    // Out of the unknown as well.
    settle(&harness, id(1), attempt(2), hold()).await;
    settle(&harness, id(1), attempt(2), Settlement::Release).await;
    claim(&harness, id(1), fresh(3)).await;
}

pub(super) async fn an_attempt_holds(harness: Harness) {
    let at = claim(&harness, id(1), fresh(1)).await;
    short_passes(&harness).await;
    let until = settle(&harness, id(1), attempt(1), hold()).await;
    assert!(until > at.plus(LONG * 2), "the unknown ttl counts from now");
    let record = current(&harness, id(1)).await;
    assert_eq!((record.state, record.attempt, record.until), (State::Unknown, attempt(1), until));
    assert_eq!((record.claimed_at, record.answer), (at, Some(answer("cause"))));
}

pub(super) async fn an_attempt_completes_late(harness: Harness) {
    put(&harness, id(1), 1, State::Unknown).await;
    let until = settle(&harness, id(1), attempt(1), complete("late")).await;
    let record = current(&harness, id(1)).await;
    assert_eq!((record.state, record.until, record.answer), (State::Completed, until, Some(answer("late"))));
}

pub(super) async fn the_same_ending_repeats(harness: Harness) {
    claim(&harness, id(1), fresh(1)).await;
    claim(&harness, id(2), fresh(2)).await;
    claim(&harness, id(3), fresh(3)).await;
    let completed = settle(&harness, id(1), attempt(1), complete("once")).await;
    let held = settle(&harness, id(2), attempt(2), hold()).await;
    settle(&harness, id(3), attempt(3), Settlement::Release).await;
    short_passes(&harness).await;
    assert_eq!(settle(&harness, id(1), attempt(1), complete("once")).await, completed, "as it stands");
    assert_eq!(settle(&harness, id(2), attempt(2), hold()).await, held, "as it stands");
    let another = Settlement::Hold { cause: answer("another cause") };
    assert_eq!(settle(&harness, id(2), attempt(2), another).await, held, "the first cause stays");
    let found = harness.store.get(id(2)).await.expect("get works").expect("it stands");
    assert_eq!(found.record.answer, Some(answer("cause")));
    settle(&harness, id(3), attempt(3), Settlement::Release).await;
    assert_eq!(harness.store.count().await.expect("count works"), [0, 1, 1]);
}

pub(super) async fn another_attempt_ends_nothing(harness: Harness) {
    for (number, state) in (1..).zip(State::ALL) {
        let record = put(&harness, id(number), number, state).await;
        for end in [complete("done"), Settlement::Release, hold()] {
            let stands = settle_in_vain(&harness, id(number), attempt(9), end).await;
            assert_eq!(stands.as_ref(), Some(&record));
        }
        assert_eq!(current(&harness, id(number)).await, record);
    }
}

pub(super) async fn a_completed_record_never_regresses(harness: Harness) {
    let record = put(&harness, id(1), 1, State::Completed).await;
    for end in [complete("another"), complete(""), Settlement::Release, hold()] {
        let stands = settle_in_vain(&harness, id(1), attempt(1), end).await;
        assert_eq!(stands.as_ref(), Some(&record));
    }
    assert_eq!(current(&harness, id(1)).await, record);
}

pub(super) async fn nothing_stands(harness: Harness) {
    assert_eq!(settle_in_vain(&harness, id(1), attempt(1), complete("x")).await, None);
    assert_eq!(settle_in_vain(&harness, id(1), attempt(1), hold()).await, None);
    settle(&harness, id(1), attempt(1), Settlement::Release).await;
    assert!(get(&harness, id(1)).await.is_none());
}

pub(super) async fn a_superseded_attempt_ends_nothing(harness: Harness) {
    let seen = put(&harness, id(1), 1, State::Unknown).await.version();
    assert!(harness.store.supersede(id(1), seen, fresh(2)).await.expect("supersede works"));
    for end in [complete("late"), Settlement::Release, hold()] {
        let stands = settle_in_vain(&harness, id(1), attempt(1), end).await.expect("a record stands");
        assert_eq!((stands.attempt, stands.state), (attempt(2), State::InFlight));
    }
    settle(&harness, id(1), attempt(2), complete("new")).await;
    assert_eq!(current(&harness, id(1)).await.answer, Some(answer("new")));
}

pub(super) async fn large_answers_come_back(harness: Harness) {
    let large = Bytes::from((0..5_000_000_u32).map(|at| (at % 251) as u8).collect::<Vec<_>>());
    claim(&harness, id(1), fresh(1)).await;
    let end = Settlement::Complete { answer: large.clone(), expiry: Expiry::FromNow(LONG) };
    settle(&harness, id(1), attempt(1), end.clone()).await;
    settle(&harness, id(1), attempt(1), end).await;
    assert!(current(&harness, id(1)).await.answer.is_some_and(|found| found == large));
    let listed = get(&harness, id(1)).await.expect("it stands");
    assert!(listed.record.answer.is_some_and(|found| found == large));
    assert!(harness.store.remove(id(1), attempt(1)).await.expect("remove works"));
}

pub(super) async fn empty_answers_are_answers(harness: Harness) {
    claim(&harness, id(1), NewRecord { head: Bytes::new(), ..fresh(1) }).await;
    settle(&harness, id(1), attempt(1), complete("")).await;
    settle(&harness, id(1), attempt(1), complete("")).await;
    let record = current(&harness, id(1)).await;
    assert_eq!((record.head, record.answer), (Bytes::new(), Some(Bytes::new())));
}
