//! Accepted requests, where gates of the former version share them.

use bytes::Bytes;

use super::*;
use crate::idempotency::record::Timestamp;
use crate::store::OriginId;
use crate::store::deliveries::{Deliveries, DeliveryChange, DeliveryHold, Lane, NewDelivery, Take, TakenDelivery};

const ORIGIN: OriginId = OriginId(5);

async fn accept(store: &Postgres, number: u8) {
    let (head, request, body) = (Bytes::new(), Bytes::new(), Bytes::new());
    let new = NewDelivery { token: AttemptToken([number; 16]), origin: ORIGIN, lane: Lane(7), head, request, body };
    store.accept(RecordId([number; 32]), new).await.unwrap();
}

async fn take(store: &Postgres, limit: usize) -> Vec<TakenDelivery> {
    let hold = Duration::from_secs(60);
    let take = Take { origin: ORIGIN, limit, max_bytes: 1 << 20, hold, is_ordered: false };
    let mut taken = store.take_due(take).await.unwrap().taken;
    taken.sort_by_key(|taken| taken.delivery.id);
    taken
}

fn numbers(taken: &[TakenDelivery]) -> Vec<u8> {
    taken.iter().map(|taken| taken.delivery.id.0[0]).collect()
}

/// The change of the former version: due again at once.
fn put_back(database: &Database, number: u8, until: &str) -> bool {
    let byte = format!("{number:02x}");
    let (id, token) = (byte.repeat(32), byte.repeat(16));
    let change = format!("oncegate.change_delivery_v1('\\x{id}', '\\x{token}', {until}, 1::smallint, 0, true, NULL)");
    database.value(&format!("SELECT {change}::text")) == "true"
}

#[tokio::test]
async fn gates_of_two_versions_take_from_one_queue() {
    let Some(database) = database() else { return };
    let store = open(&database.url).await;
    for number in 1..=3 {
        accept(&store, number).await;
    }
    let former = "SELECT due::text FROM oncegate.take_due_v1(5, 1, 1000000, 60000, false, NULL) WHERE id IS NOT NULL";
    let until = database.value(former);
    let taken = take(&store, 10).await;
    assert_eq!(numbers(&taken), [2, 3], "the first is the former version's");
    assert_eq!(database.value(&format!("SELECT count(*)::text FROM ({former}) AS taken")), "0");

    assert!(!put_back(&database, 1, "1"), "another has it");
    assert!(put_back(&database, 1, &until));
    assert_eq!(numbers(&take(&store, 10).await), [1]);

    let (held, soon) =
        (taken[0].held(), DeliveryChange::Postpone { delay: Duration::ZERO, is_attempt: true, note: None });
    let wrong = DeliveryHold { until: Timestamp(1), ..held };
    assert!(!store.change(wrong, soon.clone()).await.unwrap() && store.change(held, soon.clone()).await.unwrap());
    assert_eq!(numbers(&take(&store, 10).await), [2]);
}

/// A gate of the former version keeps what it had taken when the schema changed.
#[tokio::test]
async fn what_was_held_before_the_schema_changed_is_held_still() {
    let Some(database) = database() else { return };
    let store = open(&database.url).await;
    accept(&store, 1).await;
    // As the former take held it.
    database.run("UPDATE oncegate.delivery SET due = oncegate.now_v1() + 60000");
    let until = database.value("SELECT due::text FROM oncegate.delivery");
    assert!(take(&store, 10).await.is_empty());
    assert!(put_back(&database, 1, &until));
    assert_eq!(numbers(&take(&store, 10).await), [1]);
}

#[tokio::test]
async fn a_damaged_row_holds_up_no_other_request() {
    let Some(database) = database() else { return };
    let store = Arc::new(open(&database.url).await);
    for number in 1..=3 {
        accept(&store, number).await;
    }
    database.run("UPDATE oncegate.delivery SET token = '\\x01' WHERE id = decode(repeat('02', 32), 'hex')");
    assert_eq!(numbers(&take(&store, 10).await), [1, 3]);

    let fresh = |number| NewRecord {
        attempt: AttemptToken([number; 16]),
        origin: ORIGIN,
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(60),
        unknown_ttl: Duration::from_secs(60),
        head: Bytes::new(),
    };
    let claim = async |number| store.claim(RecordId([number; 32]), fresh(number)).await;
    assert!(matches!(claim(20).await, Ok(Claim::Inserted(_))));
    database.run("UPDATE oncegate.record SET attempt = '\\x01' WHERE id = decode(repeat('14', 32), 'hex')");
    // They may go in one batch.
    let damaged = async { store.claim(RecordId([20; 32]), fresh(9)).await };
    let (damaged, one, other) = tokio::join!(damaged, claim(21), claim(22));
    let error = damaged.unwrap_err();
    assert!(matches!(error, Error::Determinate(_)) && error.cause().kind == ErrorKind::Corrupt, "{error}");
    assert!(matches!((one, other), (Ok(Claim::Inserted(_)), Ok(Claim::Inserted(_)))));
}
