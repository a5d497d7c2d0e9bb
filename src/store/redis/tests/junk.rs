//! What somebody else wrote under the keys of records.

use futures_util::future::join_all;

use super::*;

/// Values that are no records.
fn junk() -> Vec<Vec<u8>> {
    let record = [&attempt(1).0[..], &[0; 41], &[0, 0, 0, 0, 4], b"head"].concat();
    assert_eq!(record.len(), 66);
    let mut wrong_state = record.clone();
    wrong_state[16] = 3;
    let mut long_head = record.clone();
    long_head[58..62].copy_from_slice(&u32::MAX.to_be_bytes());
    let cut = [0, 1, 16, 17, 40, 61, 62, 65].map(|length| record[..length].to_vec());
    cut.into_iter().chain([wrong_state, long_head]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_record_is_never_run_over_and_bothers_nobody_else() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let mut session = server.session();
    let junk = junk();
    // An empty string is nothing to Redis as well.
    for (number, value) in (1..).zip(&junk[1..]) {
        session.ask(&[&b"SET"[..], &keys::record(id(number)), value]).unwrap();
    }
    session.ask(&[&b"HSET"[..], &keys::record(id(90)), b"a", b"b"]).unwrap();
    let is_junk = |number: u16| number == 90 || usize::from(number) < junk.len();
    let is_corrupt = |error: &Error| error.cause().kind == ErrorKind::Corrupt;

    let claims = join_all((1..=100).map(async |number| (number, store.claim(id(number), fresh(number)).await))).await;
    for (number, claimed) in claims {
        match claimed {
            Ok(Claim::Inserted(_)) => assert!(!is_junk(number), "{number}"),
            Err(error) => assert!(is_junk(number) && is_corrupt(&error), "{number}: {error:?}"),
            other => panic!("{number}: {other:?}"),
        }
    }
    let held = (1..=100).map(|number| Held { id: id(number), attempt: attempt(1), lease: Duration::from_secs(60) });
    assert_eq!(store.renew(held.collect()).await.unwrap(), Vec::<RecordId>::new());
    let settles = (1..=100).map(async |number| (number, store.settle(id(number), attempt(number), complete()).await));
    for (number, settled) in join_all(settles).await {
        match settled {
            Ok(Settled::Done { .. }) => assert!(!is_junk(number), "{number}"),
            Err(error) => assert!(is_junk(number) && is_corrupt(&error), "{number}: {error:?}"),
            other => panic!("{number}: {other:?}"),
        }
    }
    for (number, value) in (1..).zip(&junk[1..]) {
        let stands = session.ask(&[&b"GET"[..], &keys::record(id(number))]).unwrap();
        assert_eq!(stands.bytes(), *value, "it stands as it was");
        assert!(store.get(id(number)).await.is_err_and(|error| is_corrupt(&error)));
        assert!(store.remove(id(number)).await.unwrap(), "an operator can remove it");
        assert!(matches!(store.claim(id(number), fresh(number)).await, Ok(Claim::Inserted(_))));
    }
    assert!(store.list(Filter::default(), None, 1000).await.unwrap().records.len() >= 99);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_that_is_none_keeps_claims_from_being_half_written() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let set = Partition::of(id(1)).times();
    server.ask(&[&b"SET"[..], &set, b"junk"]);
    let refused = store.claim(id(1), fresh(1)).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Corrupt), "{refused:?}");
    assert_eq!(server.ask(&[&b"EXISTS"[..], &keys::record(id(1))]).number(), 0);
    server.ask(&[&b"DEL"[..], &set]);
    assert!(matches!(store.claim(id(1), fresh(1)).await, Ok(Claim::Inserted(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_stands_in_the_wrong_place_is_put_in_its_own() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    let set = Partition::of(id(1)).times();
    let place = |score: &str| server.ask(&[&b"ZADD"[..], &set, score.as_bytes(), &id(1).0]);
    place("1");
    store.sweep(100).await.unwrap();
    assert!(store.get(id(1)).await.unwrap().is_some(), "it is in flight");
    place("-2251799813685247");
    store.expire_leases(100).await.unwrap();
    assert_eq!(store.count().await.unwrap(), [1, 0, 0], "its lease is not past");
    assert!(matches!(store.settle(id(1), attempt(1), complete()).await, Ok(Settled::Done { .. })));
}
