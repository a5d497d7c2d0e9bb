//! get, list and count.

use super::*;
use crate::store::{Cursor, Filter, IdPrefix, Since};

/// What passes, in the order of ids: it is the same for a scan and for a listing, in parts of any size.
async fn list(harness: &Harness, filter: Filter) -> Vec<RecordId> {
    let scanned = scan(harness, filter.clone(), None, 1000).await;
    assert_eq!(scan(harness, filter.clone(), None, 2).await, scanned, "{filter:?}");
    let listed = pages(harness, filter.clone(), None, 1000).await;
    assert_eq!(places(&pages(harness, filter.clone(), None, 2).await), places(&listed), "{filter:?}");
    let mut ids: Vec<_> = listed.into_iter().map(|listed| listed.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, scanned, "{filter:?}");
    scanned
}

/// All that a listing finds, page by page: newest first.
async fn pages(harness: &Harness, filter: Filter, mut after: Option<Cursor>, limit: usize) -> Vec<RecordEntry> {
    let mut found = Vec::new();
    loop {
        let page = harness.store.list(filter.clone(), after, limit).await.expect("list works");
        assert!(page.records.len() <= limit);
        found.extend(page.records);
        assert!(places(&found).is_sorted_by(|earlier, later| earlier > later), "{:?}", places(&found));
        let Some(next) = page.next else { return found };
        // It survives a trip as text.
        after = Cursor::parse(&next.to_string());
        assert_eq!(after, Some(next));
    }
}

fn places(found: &[RecordEntry]) -> Vec<(Timestamp, RecordId)> {
    found.iter().map(|listed| (listed.record.claimed_at, listed.id)).collect()
}

/// All that a scan finds, chunk by chunk.
async fn scan(harness: &Harness, filter: Filter, mut after: Option<RecordId>, limit: usize) -> Vec<RecordId> {
    let mut found = Vec::new();
    loop {
        let chunk = harness.store.scan(filter.clone(), after, limit).await.expect("scan works");
        assert!(chunk.records.len() <= limit);
        assert!(chunk.records.iter().all(|listed| Some(listed.id) > after), "after the last chunk");
        assert!(
            chunk.next.is_none_or(|next| chunk.records.iter().all(|listed| listed.id <= next)),
            "before the next one"
        );
        assert!(chunk.records.iter().all(|listed| listed.record.answer.is_none()), "without their answers");
        found.extend(chunk.records.into_iter().map(|listed| listed.id));
        let Some(next) = chunk.next else { return found };
        after = Some(next);
    }
}

pub(super) async fn a_record_is_found_by_its_id(harness: Harness) {
    let known = origin("create-charge");
    let changes = harness.store.adopt(vec![known.clone()], Vec::new(), false).await.expect("adopt works");
    assert_eq!(changes, Vec::new());
    claim(&harness, id(1), NewRecord { origin: known.id(), ..fresh(1) }).await;
    settle(&harness, id(1), attempt(1), complete("x")).await;
    claim(&harness, id(2), NewRecord { origin: origin("never adopted").id(), ..fresh(2) }).await;
    let found = get(&harness, id(1)).await.expect("it stands");
    assert_eq!((found.id, found.origin), (id(1), Some(known)));
    assert_eq!(found.record, current(&harness, id(1)).await);
    assert!(found.now >= found.record.claimed_at && found.now < found.record.until);
    assert_eq!(get(&harness, id(2)).await.expect("it stands").origin, None);
    assert!(get(&harness, id(3)).await.is_none());
}

pub(super) async fn records_are_listed_newest_first(harness: Harness) {
    let ids = |found: &[RecordEntry]| found.iter().map(|listed| listed.id).collect::<Vec<_>>();
    let states = [State::Completed, State::Unknown, State::InFlight, State::Completed, State::Unknown];
    for (number, state) in [5, 1, 4, 2, 3].into_iter().zip(states) {
        put(&harness, id(number), number, state).await;
        short_passes(&harness).await;
    }
    for limit in 1..=6 {
        let found = pages(&harness, Filter::default(), None, limit).await;
        assert!(found.iter().all(|listed| listed.record.answer.is_none()), "without their answers");
        assert!(found.iter().all(|listed| listed.record.head.len() == 3));
        assert_eq!(ids(&found), [3, 2, 4, 1, 5].map(id));
    }
    let next = async |after, limit| {
        let page = harness.store.list(Filter::default(), after, limit).await.expect("list works");
        (ids(&page.records), page.next)
    };
    let (_, fourth) = next(None, 4).await;
    assert_eq!(next(fourth, 5).await, (vec![id(5)], None));
    assert_eq!(next(None, 5).await.1, None, "a last page that is full has no empty one after it");
    // How a record ends does not move it; a new claim does, and a page goes on where the one before ended.
    let (_, second) = next(None, 2).await;
    settle(&harness, id(4), attempt(4), hold()).await;
    let seen = get(&harness, id(5)).await.expect("it stands").record.version();
    assert!(harness.store.supersede(id(5), seen, fresh(6)).await.expect("supersede works"));
    assert_eq!(next(second, 5).await, (vec![id(4), id(1)], None));
    assert_eq!(ids(&pages(&harness, Filter::default(), None, 2).await), [5, 3, 2, 4, 1].map(id));
    // Nor does it matter that the record is gone after which a page starts.
    assert!(harness.store.remove(id(2), attempt(2)).await.expect("remove works"));
    assert_eq!(next(second, 5).await, (vec![id(4), id(1)], None));
    assert_eq!(next(second, 1).await.0, [id(4)]);
}

pub(super) async fn records_of_one_time_are_listed_in_the_order_of_their_ids(harness: Harness) {
    for numbers in [[9, 1, 7], [4, 8, 2], [3, 6, 5]] {
        for number in numbers {
            put(&harness, id(number), number, State::InFlight).await;
        }
        short_passes(&harness).await;
    }
    let mut expected = Vec::new();
    for number in 1..=9 {
        let found = get(&harness, id(number)).await.expect("it stands");
        expected.push((found.record.claimed_at, found.id));
    }
    expected.sort_unstable_by(|earlier, later| later.cmp(earlier));
    for limit in 1..=10 {
        assert_eq!(places(&pages(&harness, Filter::default(), None, limit).await), expected);
    }
}

pub(super) async fn records_are_scanned_in_the_order_of_their_ids(harness: Harness) {
    for number in [5, 1, 4, 2, 3] {
        put(&harness, id(number), number, State::Completed).await;
    }
    for limit in 1..=6 {
        assert_eq!(scan(&harness, Filter::default(), None, limit).await, [1, 2, 3, 4, 5].map(id));
    }
    let next = async |after, limit| {
        let chunk = harness.store.scan(Filter::default(), after, limit).await.expect("scan works");
        (chunk.records.len(), chunk.next)
    };
    assert_eq!(next(None, 4).await, (4, Some(id(4))));
    assert_eq!(next(None, 5).await, (5, None), "a last chunk that is full has no empty one after it");
    assert_eq!(next(Some(id(4)), 5).await, (1, None));
    assert_eq!(next(Some(id(5)), 5).await, (0, None));
    // After an id that is not there.
    let mut between = id(2);
    between.0[31] = 0xff;
    assert_eq!(scan(&harness, Filter::default(), Some(between), 10).await, [3, 4, 5].map(id));
}

pub(super) async fn filters_hold_together(harness: Harness) {
    let origins = ["create", "capture"].map(origin);
    let elsewhere = Origin { service: "desk".into(), ..origin("create") };
    let all = vec![origins[0].clone(), origins[1].clone(), elsewhere.clone()];
    harness.store.adopt(all.clone(), Vec::new(), false).await.expect("adopt works");
    let mut number = 0;
    for origin in &all {
        for state in State::ALL {
            number += 1;
            claim(&harness, id(number), NewRecord { origin: origin.id(), ..fresh(number) }).await;
            match state {
                State::InFlight => {}
                State::Completed => drop(settle(&harness, id(number), attempt(number), complete("x")).await),
                State::Unknown => drop(settle(&harness, id(number), attempt(number), hold()).await),
            }
        }
    }
    claim(&harness, id(10), fresh(10)).await;
    let shop = || Filter { service: Some("shop".into()), ..Filter::default() };
    assert_eq!(list(&harness, Filter::default()).await, (1..=10).map(id).collect::<Vec<_>>());
    assert_eq!(list(&harness, shop()).await, (1..=6).map(id).collect::<Vec<_>>());
    let route = |route: &str, filter| Filter { route: Some(route.to_owned()), ..filter };
    assert_eq!(list(&harness, route("create", Filter::default())).await, [1, 2, 3, 7, 8, 9].map(id));
    assert_eq!(list(&harness, route("create", shop())).await, [1, 2, 3].map(id));
    assert_eq!(list(&harness, route("nowhere", shop())).await, []);
    for (at, state) in (1..).zip(State::ALL) {
        let with_state = |filter| Filter { state: Some(state), ..filter };
        assert_eq!(list(&harness, with_state(route("capture", shop()))).await, [id(at + 3)], "{state:?}");
        assert_eq!(scan(&harness, with_state(shop()), Some(id(at)), 1).await, [id(at + 3)]);
        let listed = pages(&harness, with_state(route("capture", shop())), None, 1).await;
        assert_eq!((listed[0].record.state, listed[0].origin.as_ref()), (state, Some(&origins[1])));
    }
}

pub(super) async fn records_are_found_by_the_start_of_their_id(harness: Harness) {
    let tail = |start: [u8; 8], end: u8| {
        let mut bytes = [end; 32];
        bytes[..8].copy_from_slice(&start);
        RecordId(bytes)
    };
    let starts = [[0; 8], [0, 0, 0, 0, 0, 0, 0, 1], [0x7f; 8], [0xff; 8]];
    for (number, start) in (1..).zip(starts) {
        put(&harness, tail(start, 0), number, State::Unknown).await;
        put(&harness, tail(start, 0xff), number, State::InFlight).await;
    }
    for start in starts {
        let prefixed = Filter { prefix: Some(IdPrefix::of_bytes(start)), ..Filter::default() };
        assert_eq!(list(&harness, prefixed.clone()).await, [tail(start, 0), tail(start, 0xff)]);
        let unknown = Filter { state: Some(State::Unknown), ..prefixed.clone() };
        assert_eq!(list(&harness, unknown).await, [tail(start, 0)]);
        let in_flight = Filter { state: Some(State::InFlight), ..prefixed.clone() };
        assert_eq!(list(&harness, in_flight).await, [tail(start, 0xff)]);
        assert_eq!(scan(&harness, prefixed, Some(tail(start, 0)), 10).await, [tail(start, 0xff)]);
    }
    let none = Filter { prefix: Some(IdPrefix::of_bytes([1; 8])), ..Filter::default() };
    assert_eq!(list(&harness, none).await, []);
    // By any number of digits.
    let ids: Vec<_> = starts.iter().flat_map(|start| [tail(*start, 0), tail(*start, 0xff)]).collect();
    for id in &ids {
        for digits in [0, 1, 2, 3, 15, 16, 17, 18, 63, 64] {
            let prefix = &id.to_string()[..digits];
            let filter = Filter { prefix: IdPrefix::parse(prefix), ..Filter::default() };
            assert!(filter.prefix.is_some());
            let mut expected = ids.clone();
            expected.retain(|id| id.to_string().starts_with(prefix));
            expected.sort_unstable();
            assert_eq!(list(&harness, filter.clone()).await, expected, "{prefix}");
            let unknown = Filter { state: Some(State::Unknown), ..filter };
            expected.retain(|id| id.0[31] == 0);
            assert_eq!(list(&harness, unknown).await, expected, "{prefix}");
        }
    }
}

pub(super) async fn records_are_found_by_their_age(harness: Harness) {
    let older_than = |age| Filter { older_than: Some(age), ..Filter::default() };
    put(&harness, id(1), 1, State::Unknown).await;
    put(&harness, id(2), 2, State::InFlight).await;
    assert_eq!(list(&harness, older_than(LONG)).await, []);
    assert_eq!(list(&harness, older_than(Duration::MAX)).await, []);
    short_passes(&harness).await;
    assert_eq!(list(&harness, older_than(SHORT)).await, [id(1), id(2)]);
    put(&harness, id(3), 3, State::Completed).await;
    assert_eq!(list(&harness, older_than(Duration::ZERO)).await, [id(1), id(2), id(3)]);
    let since = |since| Filter { since: Some(since), ..Filter::default() };
    for all in [LONG, Duration::MAX] {
        assert_eq!(list(&harness, since(Since::Ago(all))).await, [id(1), id(2), id(3)]);
    }
    let third = get(&harness, id(3)).await.expect("it stands").record.claimed_at;
    assert_eq!(list(&harness, since(Since::At(third))).await, [id(3)]);
    assert_eq!(list(&harness, since(Since::At(Timestamp(third.0 + 1)))).await, []);
    assert_eq!(list(&harness, since(Since::At(Timestamp(0)))).await, [id(1), id(2), id(3)]);
    short_passes(&harness).await;
    assert_eq!(list(&harness, since(Since::Ago(SHORT))).await, []);
    assert_eq!(list(&harness, Filter { since: Some(Since::At(third)), ..older_than(LONG) }).await, []);
    assert_eq!(list(&harness, Filter { since: Some(Since::At(third)), ..older_than(SHORT) }).await, [id(3)]);
}

pub(super) async fn records_are_counted_by_state(harness: Harness) {
    let counts = async || harness.store.count().await.expect("count works");
    assert_eq!(counts().await, [0, 0, 0]);
    let seen = put(&harness, id(1), 1, State::Completed).await.version();
    put(&harness, id(2), 2, State::Completed).await;
    put(&harness, id(3), 3, State::Unknown).await;
    put(&harness, id(4), 4, State::InFlight).await;
    assert_eq!(counts().await, [1, 2, 1]);
    assert!(harness.store.supersede(id(1), seen, fresh(5)).await.expect("supersede works"));
    assert_eq!(counts().await, [2, 1, 1]);
    settle(&harness, id(3), attempt(3), complete("late")).await;
    assert_eq!(counts().await, [2, 2, 0]);
    settle(&harness, id(1), attempt(5), Settlement::Release).await;
    assert_eq!(counts().await, [1, 2, 0]);
}
