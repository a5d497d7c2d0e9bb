//! renew, expire_leases, sweep and remove.

use super::*;
use crate::store::LeaseRenewal;

pub(super) async fn leases_are_renewed_for_their_attempts_only(harness: Harness) {
    let held = |id, number| LeaseRenewal { id, attempt: attempt(number), lease: LONG * 5 };
    let at = claim(&harness, id(1), fresh(1)).await;
    let foreign = put(&harness, id(2), 2, State::InFlight).await;
    let unknown = put(&harness, id(3), 3, State::Unknown).await;
    let completed = put(&harness, id(4), 4, State::Completed).await;
    short_passes(&harness).await;
    let all = vec![held(id(9), 9), held(id(2), 1), held(id(3), 3), held(id(4), 4), held(id(1), 1)];
    assert_eq!(harness.store.renew(all).await.expect("renew works"), [id(1)]);
    assert_eq!(harness.store.renew(Vec::new()).await.expect("renew works"), []);
    assert!(current(&harness, id(1)).await.until > at.plus(LONG * 5), "from now");
    assert_eq!(current(&harness, id(1)).await.claimed_at, at);
    assert_eq!(current(&harness, id(2)).await, foreign);
    assert_eq!(current(&harness, id(3)).await, unknown);
    assert_eq!(current(&harness, id(4)).await, completed);
    assert!(get(&harness, id(9)).await.is_none());
}

pub(super) async fn leases_that_are_past_turn_unknown(harness: Harness) {
    let at = claim(&harness, id(1), NewRecord { lease: SHORT, ..fresh(1) }).await;
    let live = put(&harness, id(2), 2, State::InFlight).await;
    claim(&harness, id(3), NewRecord { lease: SHORT, ..fresh(3) }).await;
    let renewed = LeaseRenewal { id: id(3), attempt: attempt(3), lease: LONG };
    harness.store.renew(vec![renewed]).await.expect("renew works");
    short_passes(&harness).await;
    assert_eq!(harness.store.expire_leases(10).await.expect("expire works").len(), 1);
    assert_eq!(harness.store.expire_leases(10).await.expect("expire works").len(), 0);
    let record = current(&harness, id(1)).await;
    assert_eq!((record.state, record.attempt, record.claimed_at), (State::Unknown, attempt(1), at));
    assert!(record.until > at.plus(LONG * 2), "the unknown ttl counts from when it turned unknown");
    assert_eq!(current(&harness, id(2)).await, live);
    assert_eq!(current(&harness, id(3)).await.state, State::InFlight);
    // The attempt was only late.
    settle(&harness, id(1), attempt(1), complete("late")).await;
    assert_eq!(current(&harness, id(1)).await.answer, Some(answer("late")));
}

pub(super) async fn leases_expire_up_to_a_limit(harness: Harness) {
    for number in 1..=5 {
        claim(&harness, id(number), NewRecord { lease: SHORT / u32::from(number), ..fresh(number) }).await;
    }
    short_passes(&harness).await;
    assert_eq!(harness.store.expire_leases(0).await.expect("expire works").len(), 0);
    assert_eq!(harness.store.expire_leases(2).await.expect("expire works").len(), 2);
    assert_eq!(harness.store.count().await.expect("count works"), [3, 0, 2]);
    assert_eq!(harness.store.expire_leases(10).await.expect("expire works").len(), 3);
    assert_eq!(harness.store.expire_leases(10).await.expect("expire works").len(), 0);
}

pub(super) async fn sweep_removes_what_has_expired(harness: Harness) {
    claim(&harness, id(1), fresh(1)).await;
    let end = Settlement::Complete { answer: answer("x"), expiry: Expiry::FromNow(SHORT) };
    settle(&harness, id(1), attempt(1), end).await;
    claim(&harness, id(2), NewRecord { unknown_ttl: SHORT, ..fresh(2) }).await;
    settle(&harness, id(2), attempt(2), hold()).await;
    short_passes(&harness).await;
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 2);
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 0);
    assert_eq!(harness.store.count().await.expect("count works"), [0, 0, 0]);
    claim(&harness, id(1), fresh(3)).await;
}

pub(super) async fn sweep_never_removes_what_is_in_flight_or_lives(harness: Harness) {
    claim(&harness, id(1), NewRecord { lease: SHORT, unknown_ttl: SHORT, ..fresh(1) }).await;
    put(&harness, id(2), 2, State::Completed).await;
    put(&harness, id(3), 3, State::Unknown).await;
    short_passes(&harness).await;
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 0);
    assert_eq!(harness.store.count().await.expect("count works"), [1, 1, 1]);
}

pub(super) async fn sweep_keeps_to_its_limit(harness: Harness) {
    for number in 1..=5 {
        claim(&harness, id(number), NewRecord { unknown_ttl: SHORT, ..fresh(number) }).await;
        settle(&harness, id(number), attempt(number), hold()).await;
    }
    short_passes(&harness).await;
    assert_eq!(harness.store.sweep(0).await.expect("sweep works"), 0);
    assert_eq!(harness.store.sweep(2).await.expect("sweep works"), 2);
    assert_eq!(harness.store.count().await.expect("count works"), [0, 0, 3]);
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 3);
}

pub(super) async fn records_are_removed_whatever_their_state(harness: Harness) {
    for (number, state) in (1..).zip(State::ALL) {
        put(&harness, id(number), number, state).await;
        let remove = async |by| harness.store.remove(id(number), attempt(by)).await.expect("remove works");
        assert!(!remove(number + 10).await);
        assert!(get(&harness, id(number)).await.is_some(), "a removal by another attempt took it");
        assert!(remove(number).await);
        assert!(!remove(number).await);
        assert!(get(&harness, id(number)).await.is_none());
    }
    assert_eq!(harness.store.count().await.expect("count works"), [0, 0, 0]);
}

pub(super) async fn the_longest_durations_saturate(harness: Harness) {
    let forever = Timestamp(i64::MAX as u64);
    let endless = |number| NewRecord { lease: SHORT, unknown_ttl: Duration::MAX, ..fresh(number) };
    claim(&harness, id(1), endless(1)).await;
    claim(&harness, id(2), endless(2)).await;
    claim(&harness, id(3), NewRecord { lease: Duration::MAX, ..fresh(3) }).await;
    assert_eq!(settle(&harness, id(1), attempt(1), hold()).await, forever);
    short_passes(&harness).await;
    assert_eq!(harness.store.expire_leases(10).await.expect("expire works").len(), 1);
    for number in 1..=3 {
        assert_eq!(current(&harness, id(number)).await.until, forever);
    }
    let end = Settlement::Complete { answer: answer("x"), expiry: Expiry::FromClaim(Duration::MAX) };
    assert_eq!(settle(&harness, id(3), attempt(3), end).await, forever);
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 0);
}
