//! What replaces keys beneath a seal.

use super::*;
use crate::store::deliveries::{Delivery, Lane, NewDelivery};
use crate::store::resealing::{Beginning, Beginnings, DeliveryValues, Resealing, Values};

/// None of what lies above a seal.
fn resealing(harness: &Harness) -> Option<&dyn Resealing> {
    let resealing = harness.store.resealing();
    assert_eq!(resealing.is_none(), harness.is_above_seal);
    resealing
}

/// Values that differ from what stands, of these lengths.
fn values(head: usize, answer: Option<usize>) -> Values {
    let of = |byte: u8, length| Bytes::from(vec![byte; length]);
    Values { head: of(b'h', head), answer: answer.map(|length| of(b'a', length)) }
}

pub(super) async fn values_are_replaced_where_the_version_is_the_same(harness: Harness) {
    let Some(resealing) = resealing(&harness) else { return };
    for (number, state) in [(1, State::Completed), (2, State::Unknown)] {
        let stood = put(&harness, id(number), number, state).await;
        for (head, answer) in [(1, 1), (300, 70_000), (17, 400_000), (40, 12)] {
            // Causes are short.
            let answer = if state == State::Unknown { answer.min(200) } else { answer };
            let values = values(head, Some(answer));
            assert!(resealing.reseal(id(number), stood.version(), values.clone()).await.expect("reseal works"));
            let Values { head, answer } = values;
            assert_eq!(current(&harness, id(number)).await, Record { head, answer, ..stood.clone() });
        }
    }
    assert_eq!(harness.store.count().await.expect("count works"), [0, 1, 1]);
    // A record whose lease ran out has no cause.
    claim(&harness, id(3), NewRecord { lease: SHORT, ..fresh(3) }).await;
    short_passes(&harness).await;
    harness.store.expire_leases(1).await.expect("expire works");
    let stood = current(&harness, id(3)).await;
    assert!(resealing.reseal(id(3), stood.version(), values(5, None)).await.expect("reseal works"));
    assert_eq!(current(&harness, id(3)).await, Record { head: values(5, None).head, ..stood });
    settle(&harness, id(3), attempt(3), complete("late")).await;
    assert_eq!(current(&harness, id(3)).await.answer, Some(answer("late")));
}

pub(super) async fn no_other_record_is_replaced(harness: Harness) {
    let Some(resealing) = resealing(&harness) else { return };
    let stood = put(&harness, id(1), 1, State::Completed).await;
    let in_flight = put(&harness, id(2), 2, State::InFlight).await;
    let version = stood.version();
    let others = [
        (id(1), Version { attempt: attempt(9), ..version }),
        (id(1), Version { state: State::Unknown, ..version }),
        (id(1), Version { until: version.until.plus(SHORT), ..version }),
        (id(2), in_flight.version()),
        (id(3), version),
    ];
    for (wanted, seen) in others {
        let is_done = resealing.reseal(wanted, seen, values(3, Some(3))).await.expect("reseal works");
        assert!(!is_done, "{wanted:?} {seen:?}");
    }
    assert_eq!((current(&harness, id(1)).await, current(&harness, id(2)).await), (stood, in_flight));
    assert!(get(&harness, id(3)).await.is_none());
}

pub(super) async fn beginnings_come_in_the_order_of_ids(harness: Harness) {
    let Some(resealing) = resealing(&harness) else { return };
    assert_eq!(resealing.beginnings(None, 5).await.expect("it works"), Beginnings::default());
    let mut expected = Vec::new();
    let lengths = [None, Some(0), Some(3), Some(10), Some(2_048), Some(2_049), Some(5_000), Some(300_000)];
    for (number, length) in (1..).zip(lengths) {
        let state = if length.is_some() { State::Completed } else { State::InFlight };
        let stood = put(&harness, id(number), number, state).await;
        let values = match length {
            Some(length) => {
                let head = if number % 2 == 0 { 4 } else { 900 };
                let values = values(head, Some(length));
                assert!(resealing.reseal(id(number), stood.version(), values.clone()).await.expect("reseal works"));
                values
            }
            None => Values { head: stood.head, answer: None },
        };
        expected.push(Beginning { id: id(number), state, values: values.beginning() });
    }
    expected.sort_by_key(|beginning| beginning.id);
    for limit in [1, 3, 8, 100] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let chunk = resealing.beginnings(after, limit).await.expect("it works");
            assert!(chunk.records.len() <= limit);
            found.extend(chunk.records);
            after = chunk.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, expected, "{limit} at once");
    }
}

pub(super) async fn values_of_deliveries_are_replaced_where_the_note_is_the_same(harness: Harness) {
    let (Some(resealing), Some(queue)) = (resealing(&harness), harness.queue()) else { return };
    let bytes = |text: &'static str| Bytes::from_static(text.as_bytes());
    let (token, origin) = (attempt(1), origin("r").id());
    let (head, request, body) = (bytes("head"), bytes("request"), bytes("body"));
    queue.accept(id(1), NewDelivery { token, origin, lane: Lane(0), head, request, body }).await.expect("accept works");
    let find = || async {
        let (found, values) = resealing.delivery_values(id(1)).await.expect("it works").expect("it is there");
        (Delivery { now: found.accepted_at, ..found }, values)
    };
    let (stood, values) = find().await;
    assert_eq!((&values.request[..], &values.body[..]), (&b"request"[..], &b"body"[..]));
    let new = |note: Option<&'static str>| DeliveryValues {
        head: bytes("other head"),
        request: bytes("other request"),
        body: bytes("other body"),
        note: note.map(bytes),
    };
    let refused = [(id(2), token, None), (id(1), attempt(2), None), (id(1), token, Some(bytes("seen")))];
    for (id, token, seen) in refused {
        assert!(!resealing.reseal_delivery(id, token, seen, new(None)).await.expect("it works"));
    }
    assert_eq!(find().await, (stood.clone(), values));
    assert!(resealing.reseal_delivery(id(1), token, None, new(Some("note"))).await.expect("it works"));
    assert!(resealing.reseal_delivery(id(1), token, Some(bytes("note")), new(Some("more"))).await.expect("it works"));
    assert_eq!(
        find().await,
        (Delivery { head: bytes("other head"), note: Some(bytes("more")), ..stood }, new(Some("more")))
    );
    assert!(resealing.delivery_values(id(2)).await.expect("it works").is_none());
}
