//! Accepted requests: see [`Deliveries`]. A store whose harness says that it keeps none passes.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;

use super::{Harness, LONG, attempt, claim, complete, current, fresh, hold, id, origin, settle, short_passes};
use crate::idempotency::record::{Record, RecordId, State};
use crate::store::deliveries::{
    Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryFilter, DeliveryHold, DeliveryState, Lane,
    NewDelivery, Take, remove_completed,
};
use crate::store::{Expiry, IdPrefix, NewRecord, Origin, OriginId, Settlement};

fn new(number: u8, lane: i64) -> NewDelivery {
    NewDelivery {
        token: attempt(number),
        origin: charge().id(),
        lane: Lane(lane),
        head: Bytes::from(vec![number; 3]),
        request: Bytes::from(vec![number; 4]),
        body: Bytes::from(vec![number; 5]),
    }
}

fn charge() -> Origin {
    origin("charge")
}

fn all() -> Take {
    let (origin, limit, max_bytes) = (charge().id(), 10, usize::MAX >> 1);
    Take { origin, limit, max_bytes, hold: LONG, is_ordered: false }
}

async fn accept(queue: &dyn Deliveries, number: u8, lane: i64) {
    let accepted = queue.accept(id(number), new(number, lane)).await.expect("accept works");
    assert!(matches!(accepted, Acceptance::Accepted), "{accepted:?}");
}

async fn take(queue: &dyn Deliveries, take: Take) -> Batch {
    queue.take_due(take).await.expect("taking works")
}

fn ids(batch: &Batch) -> Vec<RecordId> {
    let mut ids: Vec<_> = batch.taken.iter().map(|taken| taken.delivery.id).collect();
    ids.sort();
    ids
}

pub(super) async fn a_request_is_kept_once(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    accept(queue, 1, 7).await;
    // The same call again, and another request.
    accept(queue, 1, 7).await;
    let other = NewDelivery { token: attempt(9), ..new(1, 7) };
    match queue.accept(id(1), other).await {
        Ok(Acceptance::Queued(found)) => {
            assert_eq!((found.token, found.lane, &found.head[..]), (attempt(1), Lane(7), &[1; 3][..]));
        }
        other => panic!("{other:?}"),
    }
    let found = queue.delivery(id(1)).await.expect("the store works").expect("it is there");
    assert!(matches!(found.state, DeliveryState::Queued { due } if due == found.accepted_at));
    assert!(queue.delivery(id(2)).await.expect("the store works").is_none());
}

/// What is carried out together does not mix.
pub(super) async fn many_are_kept_and_removed_at_once(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    claim(&harness, id(50), fresh(50)).await;
    accept(queue, 60, 0).await;
    let kept =
        futures_util::future::join_all((0..80).map(|number| queue.accept(id(number), new(number + 100, 0)))).await;
    for (number, kept) in (0..).zip(kept) {
        match (number, kept.expect("accept works")) {
            (50, Acceptance::Recorded { record, .. }) => assert_eq!(record.attempt, attempt(50)),
            (60, Acceptance::Queued(found)) => assert_eq!(found.token, attempt(60)),
            (50 | 60, other) => panic!("{number}: {other:?}"),
            (_, kept) => assert!(matches!(kept, Acceptance::Accepted), "{number}: {kept:?}"),
        }
    }
    let taken = take(queue, Take { limit: 100, ..all() }).await.taken;
    assert_eq!(taken.len(), 79);
    assert!(taken.iter().all(|taken| taken.body[0] == taken.delivery.token.0[0]));
    let mut held: Vec<_> = taken.iter().map(super::super::deliveries::TakenDelivery::held).collect();
    // One that somebody accepted anew meanwhile.
    held[7].token = attempt(255);
    let gone =
        futures_util::future::join_all(held.iter().map(|held| queue.change(*held, DeliveryChange::Finish))).await;
    for (place, gone) in gone.into_iter().enumerate() {
        assert_eq!(gone.expect("the store works"), place != 7);
    }
    let left = queue.deliveries(DeliveryFilter::default(), None, 100).await.expect("the store works").deliveries;
    assert_eq!(left.iter().map(|delivery| delivery.id).collect::<Vec<_>>(), [held[7].id]);
}

pub(super) async fn a_record_comes_first(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    claim(&harness, id(1), fresh(1)).await;
    for state in [State::InFlight, State::Completed] {
        match queue.accept(id(1), new(2, 0)).await {
            Ok(Acceptance::Recorded { record, .. }) => assert_eq!(record.state, state),
            other => panic!("{other:?}"),
        }
        assert!(queue.delivery(id(1)).await.expect("the store works").is_none());
        if state == State::InFlight {
            settle(&harness, id(1), attempt(1), complete("done")).await;
        }
    }
    // Of a delivery whose attempt is under way, the record.
    accept(queue, 3, 0).await;
    claim(&harness, id(3), fresh(3)).await;
    settle(&harness, id(3), attempt(3), hold()).await;
    match queue.accept(id(3), new(4, 0)).await {
        Ok(Acceptance::Recorded { record, .. }) => assert_eq!(record.state, State::Unknown),
        other => panic!("{other:?}"),
    }
    assert_eq!(queue.delivery(id(3)).await.expect("the store works").map(|found| found.token), Some(attempt(3)));
}

pub(super) async fn what_is_taken_is_held(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    accept(queue, 2, 0).await;
    assert_eq!(ids(&take(queue, all()).await), [id(2)]);
    assert!(take(queue, all()).await.taken.is_empty());
    accept(queue, 1, 0).await;
    let short = Take { hold: super::SHORT, ..all() };
    let first = take(queue, short).await.taken.remove(0);
    assert_eq!((&first.request[..], &first.body[..]), (&[1; 4][..], &[1; 5][..]));
    // By the clock of the store, whatever the time is here.
    assert_eq!(first.delivery.due_in(), super::SHORT);
    let wait = || async { queue.delivery(id(1)).await.expect("the store works").expect("it is there").due_in() };
    assert!(wait().await <= super::SHORT);
    short_passes(&harness).await;
    assert_eq!(wait().await, Duration::ZERO);
    let second = take(queue, all()).await.taken.remove(0);
    // The first holder comes too late, but to say that it is over.
    let postpone = DeliveryChange::Postpone { delay: Duration::ZERO, is_attempt: true, note: None };
    assert!(!queue.change(first.held(), postpone.clone()).await.expect("the store works"));
    assert!(queue.change(second.held(), postpone).await.expect("the store works"));
    let third = take(queue, all()).await.taken.remove(0);
    assert_eq!(third.delivery.attempts, 1);
    assert!(queue.change(first.held(), DeliveryChange::Finish).await.expect("the store works"));
    assert!(!queue.change(third.held(), DeliveryChange::Finish).await.expect("the store works"));
    assert!(queue.delivery(id(1)).await.expect("the store works").is_none());
}

pub(super) async fn a_lane_is_taken_in_order(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for (number, lane) in [(5, 1), (3, 1), (4, 2), (1, 1)] {
        accept(queue, number, lane).await;
    }
    let ordered = Take { is_ordered: true, ..all() };
    let batch = take(queue, ordered).await;
    assert_eq!(ids(&batch), [id(4), id(5)]);
    assert!(take(queue, ordered).await.taken.is_empty(), "both lanes wait");
    let of =
        |number: u8| batch.taken.iter().find(|taken| taken.delivery.id == id(number)).expect("the store works").held();
    assert!(queue.change(of(5), DeliveryChange::Finish).await.expect("the store works"));
    let next = take(queue, ordered).await;
    assert_eq!(ids(&next), [id(3)]);
    // One that is given up holds up nothing.
    let park = DeliveryChange::Park { ttl: LONG, is_attempt: true, note: Bytes::from_static(b"503") };
    assert!(queue.change(next.taken[0].held(), park).await.expect("the store works"));
    assert_eq!(ids(&take(queue, ordered).await), [id(1)]);
}

pub(super) async fn each_lane_has_its_turn(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 0..20 {
        accept(queue, number, 1).await;
    }
    for number in 100..104 {
        accept(queue, number, i64::from(number)).await;
    }
    for is_ordered in [false, true] {
        let mut seen = HashSet::new();
        for _ in 0..4 {
            let batch = take(queue, Take { limit: 4, is_ordered, hold: Duration::from_millis(1), ..all() }).await;
            assert!(batch.is_more && batch.taken.len() <= 4);
            seen.extend(ids(&batch));
            short_passes(&harness).await;
        }
        assert!((100..104).all(|number| seen.contains(&id(number))), "{is_ordered}: {seen:?}");
    }
}

/// Where a take gives one delivery, or few, because that is all that was asked for or all that has room.
pub(super) async fn each_lane_has_its_turn_where_few_are_taken(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    let others = 30..35;
    for (limit, max_bytes) in [(1, usize::MAX >> 1), (4, 1), (4, 10), (64, 1), (64, 10)] {
        for number in 0..20 {
            accept(queue, number, 1).await;
        }
        for number in others.clone() {
            accept(queue, number, i64::from(number)).await;
        }
        let mut taken = Vec::new();
        // Every second is of a lane, and there are six.
        while taken.len() < 12 {
            let batch = take(queue, Take { limit, max_bytes, ..all() }).await;
            assert!((1..=2).contains(&batch.taken.len()) && batch.is_more, "{limit}, {max_bytes}: {batch:?}");
            taken.extend(ids(&batch));
        }
        let is_other = |id: &&RecordId| others.clone().any(|number| **id == super::id(number));
        assert_eq!(taken.iter().filter(is_other).count(), 5, "{limit}, {max_bytes}: {taken:?}");
        // The other half goes by age.
        assert!((0..4).all(|number| taken.contains(&id(number))), "{limit}, {max_bytes}: {taken:?}");
        for number in (0..20).chain(others.clone()) {
            assert!(queue.discard(id(number), attempt(number)).await.expect("the store works"));
        }
    }
    for (number, lane) in [(0, 1), (1, 1), (2, 1), (3, 1), (30, 2), (31, 3)] {
        accept(queue, number, lane).await;
    }
    let mut seen = HashSet::new();
    for _ in 0..6 {
        let ordered = Take { limit: 1, is_ordered: true, hold: Duration::from_millis(1), ..all() };
        seen.extend(ids(&take(queue, ordered).await));
        short_passes(&harness).await;
    }
    assert_eq!(seen, HashSet::from([id(0), id(30), id(31)]));
}

/// Its place in the order of acceptance is before all of the others, and it is due after them.
pub(super) async fn what_is_queued_again_has_its_turn_beside_a_long_lane(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    let again = 1..4;
    for number in again.clone() {
        accept(queue, number, 1).await;
    }
    for taken in take(queue, all()).await.taken {
        let park = DeliveryChange::Park { ttl: LONG, is_attempt: true, note: Bytes::new() };
        assert!(queue.change(taken.held(), park).await.expect("the store works"));
    }
    for number in 10..120 {
        accept(queue, number, 2).await;
    }
    short_passes(&harness).await;
    let limited = Take { limit: 8, ..all() };
    assert_eq!(take(queue, limited).await.taken.len(), 8);
    for number in again.clone() {
        assert!(queue.requeue(id(number)).await.expect("the store works"));
    }
    short_passes(&harness).await;
    let mut seen = HashSet::new();
    // Where there are three databases, each has its turn three times.
    for _ in 0..9 {
        seen.extend(ids(&take(queue, limited).await));
    }
    assert!(again.into_iter().all(|number| seen.contains(&id(number))), "{seen:?}");
}

pub(super) async fn one_lane_fills_a_batch(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 0..30 {
        accept(queue, number, 7).await;
    }
    let batch = take(queue, Take { limit: 10, ..all() }).await;
    assert!(batch.taken.len() == 10 && batch.is_more, "{batch:?}");
    let ordered = take(queue, Take { limit: 10, is_ordered: true, ..all() }).await;
    assert_eq!(ordered.taken.len(), 0, "the first of the lane is taken");
}

pub(super) async fn a_batch_has_its_limits(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 1..=6 {
        accept(queue, number, i64::from(number)).await;
    }
    let other = NewDelivery { origin: OriginId(77), ..new(9, 0) };
    assert!(matches!(queue.accept(id(9), other).await, Ok(Acceptance::Accepted)));
    let few = take(queue, Take { max_bytes: 1, ..all() }).await;
    assert!(few.taken.len() == 1 && few.is_more, "{few:?}");
    let two = take(queue, Take { limit: 2, ..all() }).await;
    assert!(two.taken.len() == 2 && two.is_more, "{two:?}");
    let rest = take(queue, all()).await;
    assert!(rest.taken.len() == 3 && !rest.is_more, "{rest:?}");
}

pub(super) async fn a_route_is_paused(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    accept(queue, 1, 0).await;
    assert!(queue.pause(charge().id(), true).await.expect("the store works"));
    assert!(!queue.pause(charge().id(), true).await.expect("the store works"));
    assert_eq!(queue.paused().await.expect("the store works"), [charge().id()]);
    assert!(take(queue, all()).await.taken.is_empty());
    assert!(queue.pause(charge().id(), false).await.expect("the store works"));
    assert!(!queue.pause(charge().id(), false).await.expect("the store works"));
    assert_eq!(take(queue, all()).await.taken.len(), 1);
}

pub(super) async fn what_is_dead_waits_for_an_operator(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 1..=3 {
        accept(queue, number, 0).await;
    }
    for taken in take(queue, all()).await.taken {
        let ttl = if taken.delivery.id == id(3) { super::SHORT } else { LONG };
        let park = DeliveryChange::Park { ttl, is_attempt: true, note: Bytes::from_static(b"503") };
        assert!(queue.change(taken.held(), park).await.expect("the store works"));
    }
    let dead = queue.delivery(id(1)).await.expect("the store works").expect("it is there");
    assert!(dead.is_dead() && dead.attempts == 1 && dead.note.as_deref() == Some(b"503"), "{dead:?}");
    short_passes(&harness).await;
    assert!(take(queue, all()).await.taken.is_empty());
    assert_eq!(queue.sweep_deliveries(10).await.expect("the store works"), 1);
    assert!(queue.delivery(id(3)).await.expect("the store works").is_none());
    assert!(queue.requeue(id(1)).await.expect("the store works"));
    assert!(!queue.requeue(id(1)).await.expect("the store works"));
    let again = take(queue, all()).await.taken.remove(0);
    assert_eq!((again.delivery.id, again.delivery.attempts, &again.delivery.note), (id(1), 0, &None));
    assert!(!queue.discard(id(2), attempt(1)).await.expect("the store works"), "it was accepted by another request");
    assert!(queue.discard(id(2), attempt(2)).await.expect("the store works"));
    assert!(!queue.discard(id(2), attempt(2)).await.expect("the store works"));
}

/// The upstream may say so long after the gates gave up.
pub(super) async fn what_is_dead_ends_with_its_record(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 1..=5 {
        accept(queue, number, 0).await;
        let head = if number == 3 { fresh(9).head } else { fresh(number).head };
        if number <= 4 {
            claim(&harness, id(number), NewRecord { head, ..fresh(number) }).await;
        }
        let end = match number {
            1 | 3 => {
                Some(Settlement::Complete { answer: super::answer("done"), expiry: Expiry::FromNow(super::SHORT) })
            }
            2 => Some(hold()),
            _ => None,
        };
        if let Some(end) = end {
            settle(&harness, id(number), attempt(number), end).await;
        }
    }
    for taken in take(queue, all()).await.taken {
        let park = DeliveryChange::Park { ttl: LONG, is_attempt: false, note: Bytes::new() };
        assert!(queue.change(taken.held(), park).await.expect("the store works"));
    }
    // What a record says that has expired counts.
    short_passes(&harness).await;
    let remove = |after| {
        let open = |delivery: &Delivery, record: Record| Some((delivery.head.clone(), record.head));
        remove_completed(&*harness.store, DeliveryFilter::default(), (after, 3), open)
    };
    let next = remove(None).await.expect("the store works");
    assert!(next.is_some(), "there are five");
    assert_eq!(remove(next).await.expect("the store works"), None);
    let left = queue.deliveries(DeliveryFilter::default(), None, 9).await.expect("the store works").deliveries;
    let left: Vec<RecordId> = left.iter().map(|delivery| delivery.id).collect();
    assert_eq!(left, [id(2), id(3), id(4), id(5)], "unknown; of another request; in flight; without a record");
}

/// A gate that died after the attempt and before it removed the delivery leaves both. Whoever takes the delivery, however late,
/// must find that the request has run.
pub(super) async fn a_record_stays_while_its_delivery_stands(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 1..=4 {
        if number <= 3 {
            accept(queue, number, 0).await;
        }
        claim(&harness, id(number), NewRecord { unknown_ttl: super::SHORT, ..fresh(number) }).await;
        let end = match number {
            3 => hold(),
            _ => Settlement::Complete { answer: super::answer("done"), expiry: Expiry::FromNow(super::SHORT) },
        };
        settle(&harness, id(number), attempt(number), end).await;
    }
    short_passes(&harness).await;
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 1, "only what has no delivery");
    let taken = take(queue, all()).await.taken;
    assert_eq!(taken.len(), 3);
    for (number, state) in [(1, State::Completed), (2, State::Completed), (3, State::Unknown)] {
        assert_eq!(current(&harness, id(number)).await.state, state);
    }
    for taken in &taken[..2] {
        assert!(queue.change(taken.held(), DeliveryChange::Finish).await.expect("the store works"));
    }
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 2);
    assert!(queue.discard(taken[2].delivery.id, taken[2].delivery.token).await.expect("the store works"));
    assert_eq!(harness.store.sweep(10).await.expect("sweep works"), 1);
}

/// Its lane has another one under way by then, which was accepted later.
pub(super) async fn what_comes_back_before_one_that_is_under_way_waits_for_it(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    for number in 1..=3 {
        accept(queue, number, 7).await;
    }
    for number in 20..32 {
        accept(queue, number, i64::from(number)).await;
    }
    let park = DeliveryChange::Park { ttl: LONG, is_attempt: true, note: Bytes::new() };
    // All that is due fits, or it does not.
    for limit in [100, 4] {
        let ordered = Take { is_ordered: true, limit, ..all() };
        let taken = take(queue, Take { limit: 100, ..ordered }).await.taken;
        let first = taken.iter().find(|taken| taken.delivery.id == id(1)).expect("it is the first of its lane");
        assert!(queue.change(first.held(), park.clone()).await.expect("the store works"));
        let second = take(queue, Take { limit: 100, ..ordered }).await.taken.remove(0);
        assert_eq!(second.delivery.id, id(2));
        assert!(queue.requeue(id(1)).await.expect("the store works"));
        for taken in taken.iter().filter(|taken| taken.delivery.id != id(1)) {
            let back = DeliveryChange::Postpone { delay: Duration::ZERO, is_attempt: false, note: None };
            assert!(queue.change(taken.held(), back).await.expect("the store works"));
        }
        let mut seen = Vec::new();
        for _ in 0..12 {
            seen.extend(ids(&take(queue, ordered).await));
        }
        assert!(seen.len() == 12 && !seen.contains(&id(1)), "{limit}: {seen:?}");
        let back = DeliveryChange::Postpone { delay: Duration::ZERO, is_attempt: false, note: None };
        assert!(queue.change(second.held(), back.clone()).await.expect("the store works"));
        let next = take(queue, ordered).await.taken;
        assert_eq!(next.iter().map(|taken| taken.delivery.id).collect::<Vec<_>>(), [id(1)], "{limit}");
        assert!(queue.change(next[0].held(), back.clone()).await.expect("the store works"));
        for seen in seen {
            let found = queue.delivery(seen).await.expect("the store works").expect("it is there");
            let DeliveryState::Queued { due: until } = found.state else { panic!("{found:?}") };
            let held = DeliveryHold { id: seen, token: found.token, until };
            assert!(queue.change(held, back.clone()).await.expect("the store works"));
        }
    }
}

pub(super) async fn deliveries_are_listed_and_counted(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    harness.store.adopt(vec![charge()], Vec::new(), false).await.expect("the store works");
    for number in [3, 1, 2] {
        accept(queue, number, 0).await;
    }
    let taken = take(queue, Take { limit: 1, ..all() }).await.taken.remove(0);
    let park = DeliveryChange::Park { ttl: LONG, is_attempt: false, note: Bytes::new() };
    assert!(queue.change(taken.held(), park).await.expect("the store works"));
    let list = |is_dead, after, limit| {
        let (service, route) = (Some("shop".into()), Some("charge".into()));
        let filter = DeliveryFilter { service, route, is_dead, prefix: None };
        async move { queue.deliveries(filter, after, limit).await.expect("the store works") }
    };
    let page = list(None, None, 2).await;
    let found = |page: &crate::store::deliveries::DeliveryPage| -> Vec<RecordId> {
        page.deliveries.iter().map(|delivery| delivery.id).collect()
    };
    assert_eq!(found(&page), [id(3), id(1)]);
    assert_eq!(found(&list(None, page.next, 2).await), [id(2)]);
    assert_eq!(list(Some(true), None, 9).await.deliveries.len(), 1);
    assert_eq!(list(Some(false), None, 9).await.deliveries.len(), 2);
    let other = DeliveryFilter { service: Some("another".into()), ..DeliveryFilter::default() };
    assert!(queue.deliveries(other, None, 9).await.expect("the store works").deliveries.is_empty());
    for (prefix, expected) in [("02", vec![id(2)]), ("0", vec![id(3), id(1), id(2)]), ("04", vec![]), ("ff", vec![])] {
        let filter = DeliveryFilter { prefix: IdPrefix::parse(prefix), ..DeliveryFilter::default() };
        assert_eq!(found(&queue.deliveries(filter, None, 9).await.expect("the store works")), expected, "{prefix}");
    }
    let counts = queue.count_deliveries().await.expect("the store works");
    assert_eq!(counts.len(), 1);
    assert_eq!((counts[0].queued, counts[0].dead, counts[0].origin.as_ref()), (2, 1, Some(&charge())));
    assert!(counts[0].oldest.is_some());
}
