//! Foreign values under the keys of records.

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
async fn a_foreign_value_is_never_overwritten_and_does_not_affect_other_records() {
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
    let held =
        (1..=100).map(|number| LeaseRenewal { id: id(number), attempt: attempt(1), lease: Duration::from_secs(60) });
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
        assert!(!store.remove(id(number), attempt(number)).await.unwrap());
        session.ask(&[&b"DEL"[..], &keys::record(id(number))]).unwrap();
        assert!(matches!(store.claim(id(number), fresh(number)).await, Ok(Claim::Inserted(_))));
    }
    assert!(store.list(Filter::default(), None, 1000).await.unwrap().records.len() >= 99);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_value_in_place_of_the_set_prevents_partial_claims() {
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
async fn a_record_missing_from_the_set_is_kept_and_reindexed() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    for number in [1, 2] {
        assert!(matches!(store.claim(id(number), fresh(number)).await, Ok(Claim::Inserted(_))));
    }
    assert!(matches!(store.settle(id(1), attempt(1), complete()).await, Ok(Settled::Done { .. })));
    let place = |number: u16| {
        let set = Partition::of(id(number)).times();
        server.ask(&[&b"ZSCORE"[..], &set, &id(number).0])
    };
    let places = [place(1), place(2)];
    for number in [1, 2] {
        server.ask(&[&b"DEL"[..], &Partition::of(id(number)).times()]);
        let claimed = store.claim(id(number), fresh(number + 10)).await.unwrap();
        assert!(matches!(claimed, Claim::Exists { .. }), "{number}: {claimed:?}");
    }
    assert_eq!([place(1), place(2)], places);
    server.ask(&[&b"DEL"[..], &keys::record(id(2))]);
    assert!(
        matches!(store.claim(id(2), fresh(12)).await, Ok(Claim::Inserted(_))),
        "an entry in the set alone does not block a claim"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_with_a_wrong_score_is_corrected() {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upkeep_removes_nothing_but_records_of_its_own() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let mut later = [&attempt(1).0[..], &[0; 41], &[0, 0, 0, 0, 4], b"head"].concat();
    later[16] = 3;
    let mut session = server.session();
    session.ask(&[&b"SET"[..], &keys::record(id(1)), &later]).unwrap();
    session.ask(&[&b"SET"[..], &keys::record(id(2)), b"junk"]).unwrap();
    session.ask(&[&b"HSET"[..], &keys::record(id(3)), b"a", b"b"]).unwrap();
    let stands = |number: u16| server.ask(&[&b"EXISTS"[..], &keys::record(id(number))]).number() == 1;
    let is_placed = |number: u16| {
        let set = Partition::of(id(number)).times();
        server.ask(&[&b"ZRANK"[..], &set, &id(number).0]) != servers::Reply::Nothing
    };
    // As one in flight, a completed one, and an unknown one.
    for score in ["-2251799813685247", "1", "2251799813685249"] {
        for number in 1..=4 {
            let set = Partition::of(id(number)).times();
            session.ask(&[&b"ZADD"[..], &set, score.as_bytes(), &id(number).0]).unwrap();
        }
        assert_eq!(store.expire_leases(100).await.unwrap(), [], "there is no record to turn unknown");
        let looked_at = store.sweep(100).await.unwrap();
        assert_eq!(looked_at, if score.starts_with('-') { 0 } else { 4 });
        assert!((1..=3).all(stands), "{score}");
        assert_eq!([1, 2, 3, 4].map(is_placed), [true, false, false, false], "{score}");
        assert_eq!(store.expire_leases(100).await.unwrap(), []);
        assert_eq!(store.sweep(100).await.unwrap(), 0, "others have their turn");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_fails_keeps_no_other_from_upkeep() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let past = |number| NewRecord { lease: Duration::ZERO, ..fresh(number) };
    let [bad, good] = [RecordId([0; 32]), RecordId([255; 32])];
    store.claim(good, past(1)).await.unwrap();
    let set = Partition::of(bad).times();
    server.ask(&[&b"SET"[..], &set, b"junk"]);
    let expired = store.expire_leases(10).await.map(|ids| ids.len());
    for upkeep in [expired, store.sweep(10).await] {
        assert!(upkeep.as_ref().is_err_and(|error| error.cause().kind == ErrorKind::Corrupt), "{upkeep:?}");
    }
    assert_eq!(store.get(good).await.unwrap().unwrap().record.state, State::Unknown);
    server.ask(&[&b"DEL"[..], &set]);
    store.claim(bad, past(2)).await.unwrap();
    server.run("CONFIG RESETSTAT").unwrap();
    assert_eq!(store.expire_leases(10).await.unwrap(), [bad]);
    let calls = server.calls()["evalsha"];
    assert_eq!(calls, 65, "one for what is due in each partition, and one where something is");
}
