//! Servers that go, hang, forget and refuse.

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout};

use super::*;
use crate::store::batcher::Backend as _;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_killed_is_found_again_by_itself() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    server.kill9();
    let failed = store.claim(id(2), fresh(2)).await.unwrap_err();
    assert_eq!(failed.cause().kind, ErrorKind::Unavailable, "{failed:?}");
    let refused = store.claim(id(3), fresh(3)).await;
    // Refused at once, without waiting for the server.
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable), "{refused:?}");
    assert!(store.ping().await.is_err());

    server.begin();
    eventually("it is found again", async || store.ping().await).await;
    let settled = store.settle(id(1), attempt(1), complete()).await.unwrap();
    assert!(matches!(settled, Settled::Done { .. }), "it was kept: {settled:?}");
    assert!(matches!(store.claim(id(2), fresh(2)).await, Ok(Claim::Inserted(_))));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_given_up_once_and_found_again() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    server.hang();
    let began = Instant::now();
    let asked = join_all((2..300).map(|number| store.claim(id(number), fresh(number)))).await;
    assert!(began.elapsed() < 2 * COMMAND_TIMEOUT, "{:?}", began.elapsed());
    assert!(asked.iter().all(Result::is_err));
    assert!(asked.iter().any(|asked| matches!(asked, Err(Error::Indeterminate(_)))), "some were sent");
    let refused = store.settle(id(1), attempt(1), complete()).await;
    assert!(
        matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable),
        "it was found out before: {refused:?}"
    );

    server.go_on();
    eventually("it is found again", async || store.ping().await).await;
    for number in 2..300 {
        let claimed = store.claim(id(number), fresh(number)).await;
        assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{claimed:?}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_noticed_while_nothing_is_asked_of_it() {
    let Some(server) = servers::Redis::start() else { return };
    let manager = ConnectionManager::open(&settings(&server).servers, Duration::from_millis(500)).await.unwrap();
    let mut losses = manager.losses();
    server.hang();
    timeout(Duration::from_secs(5), losses.changed()).await.expect("it is noticed").unwrap();
    // Not for having waited.
    let refused = manager.send(&[redis::cmd("PING")]).await.unwrap_err();
    assert_eq!(refused.kind(), redis::ErrorKind::ClusterConnectionNotFound, "{refused}");
    server.go_on();
    eventually("it is found again", async || manager.send(&[redis::cmd("PING")]).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_that_is_lazy_waits_for_its_server() {
    let Some(server) = servers::Redis::start() else { return };
    server.kill9();
    let manager = ConnectionManager::lazy(&settings(&server).servers, Duration::from_secs(1)).unwrap();
    assert!(manager.send(&[redis::cmd("PING")]).await.is_err());
    assert!(manager.subscribe("somewhere").await.is_err());
    server.begin();
    eventually("it is found", async || manager.send(&[redis::cmd("PING")]).await).await;
    let batch = [redis::cmd("SET").arg("a").arg(1).to_owned(), redis::cmd("HGET").arg("a").arg("b").to_owned()];
    let response = manager.send(&batch).await.unwrap();
    assert!(response[0].is_ok() && response[1].is_err(), "each has its own answer: {response:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_a_server_forgot_are_sent_again() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Arc::new(Redis::open(&settings(&server)).await.unwrap());
    let attempts = (0..8).map(|worker| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for number in (worker * 100)..(worker * 100 + 100) {
                assert!(matches!(store.claim(id(number), fresh(number)).await, Ok(Claim::Inserted(_))));
                let settled = store.settle(id(number), attempt(number), complete()).await;
                assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
            }
        })
    });
    let attempts: Vec<_> = attempts.collect();
    while attempts.iter().any(|attempt| !attempt.is_finished()) {
        assert_eq!(server.run("SCRIPT FLUSH").as_deref(), Some("+OK\r\n"));
        tokio::task::yield_now().await;
    }
    for attempt in attempts {
        attempt.await.unwrap();
    }
    assert_eq!(store.count().await.unwrap(), [0, 800, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_room_refuses_and_says_so() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    server.run("CONFIG SET maxmemory 1").unwrap();
    let refused = store.claim(id(2), fresh(2)).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
    let refused = store.settle(id(1), attempt(1), complete()).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
    let lease = Duration::from_secs(60);
    let held = [1, 9].map(|number| LeaseRenewal { id: id(number), attempt: attempt(number), lease });
    let refused = store.renew(held.into()).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
    assert!(store.ping().await.is_err());
    server.run("CONFIG SET maxmemory 0").unwrap();
    store.ping().await.unwrap();
    assert_eq!(store.renew(held.into()).await.unwrap(), [id(1)]);
    assert!(matches!(store.settle(id(1), attempt(1), complete()).await, Ok(Settled::Done { .. })));
    assert!(matches!(store.claim(id(2), fresh(2)).await, Ok(Claim::Inserted(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_tells_what_stands() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    store.settle(id(1), attempt(1), complete()).await.unwrap();
    store.claim(id(2), fresh(2)).await.unwrap();
    let stands = async |why: &str| {
        let (replay, repeated, again, new) = tokio::join!(
            store.claim(id(1), fresh(7)),
            store.claim(id(2), fresh(2)),
            store.settle(id(1), attempt(1), complete()),
            store.claim(id(3), fresh(3)),
        );
        assert!(
            matches!(&replay, Ok(Claim::Exists { record, .. }) if record.answer.as_deref() == Some(b"answer")),
            "{why}: {replay:?}"
        );
        assert!(matches!(repeated, Ok(Claim::Inserted(_))), "{why}: {repeated:?}");
        assert!(matches!(again, Ok(Settled::Done { .. })), "{why}: {again:?}");
        assert!(matches!(new, Err(Error::Determinate(_))), "{why}: {new:?}");
    };
    server.run("CONFIG SET maxmemory 1").unwrap();
    stands("no room").await;
    server.run("CONFIG SET maxmemory 0").unwrap();
    server.run("CONFIG SET min-replicas-to-write 1").unwrap();
    stands("no replicas").await;
    server.run("CONFIG SET min-replicas-to-write 0").unwrap();
    // Where a directory is in its way, a snapshot fails.
    std::fs::create_dir(server.directory().join("dump.rdb")).unwrap();
    server.ask(&["CONFIG", "SET", "save", "3600 1000000"]);
    server.run("BGSAVE").unwrap();
    eventually("the snapshot fails", async || {
        let status = server.info("persistence", "rdb_last_bgsave_status");
        if status.as_deref() == Some("err") { Ok(()) } else { Err(status) }
    })
    .await;
    stands("no snapshots").await;
}

/// The network delivers a claim after the store has given the claim up. No gate knows its attempt any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_comes_late_leaves_no_record() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let here = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    // As where its clock was set forward meanwhile.
    store.client.clock(None).read(Instant::now(), here - 60_000);
    let claim = Operation::Claim { id: id(1), fresh: fresh(1) };
    let Ok(late) = store.client.execute(&(), &[&claim]).await else { panic!("the server answers") };
    assert!(matches!(late[..], [None]), "it is to be asked again");
    assert!(store.get(id(1)).await.unwrap().is_none());
    // By the time that this told.
    let Ok(again) = store.client.execute(&(), &[&claim]).await else { panic!("the server answers") };
    assert!(matches!(again[..], [Some(Ok(Reply::Claim(Claim::Inserted(_))))]));

    let stood = store.get(id(1)).await.unwrap().expect("it stands").record;
    let supersede = Operation::Supersede { id: id(1), seen: stood.version(), fresh: fresh(3) };
    store.client.clock(None).read(Instant::now(), here - 60_000);
    let Ok(late) = store.client.execute(&(), &[&supersede]).await else { panic!("the server answers") };
    assert!(matches!(late[..], [None]), "it is to be asked again");
    assert_eq!(store.get(id(1)).await.unwrap().expect("it stands").record, stood);
    let Ok(again) = store.client.execute(&(), &[&supersede]).await else { panic!("the server answers") };
    assert!(matches!(again[..], [Some(Ok(Reply::Superseded(true)))]));

    store.client.clock(None).read(Instant::now(), here + 3_600_000);
    assert!(matches!(store.claim(id(2), fresh(2)).await, Ok(Claim::Inserted(_))), "a clock ahead refuses nothing");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_answer_is_fetched_by_itself() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let expiry = Expiry::FromClaim(Duration::from_secs(3600));
    let end = |byte: u8, length: usize| Settlement::Complete { answer: vec![byte; length].into(), expiry };
    for (number, length) in [(1, 1 << 20), (2, 100_000)] {
        store.claim(id(number), fresh(number)).await.unwrap();
        store.settle(id(number), attempt(number), end(b'a', length)).await.unwrap();
    }
    let operations = [
        Operation::Claim { id: id(1), fresh: fresh(8) },
        Operation::Claim { id: id(2), fresh: fresh(9) },
        Operation::Settle { id: id(1), attempt: attempt(1), end: end(b'b', 1 << 20) },
    ];
    let Ok(replies) = store.client.execute(&(), &operations.iter().collect::<Vec<_>>()).await else {
        panic!("the server answers")
    };
    let length = |record: &Record| record.answer.as_ref().map(Bytes::len);
    let [
        Some(Ok(Reply::Claim(Claim::Exists { record: large, .. }))),
        Some(Ok(Reply::Claim(Claim::Exists { record: small, .. }))),
        Some(Ok(Reply::Settled(Settled::NotCurrent { record: Some(other) }))),
    ] = &replies[..]
    else {
        panic!("they stand")
    };
    assert_eq!([length(large), length(small), length(other)], [None, Some(100_000), None]);

    let Ok(Claim::Exists { record, .. }) = store.claim(id(1), fresh(8)).await else { panic!("it stands") };
    assert_eq!(length(&record), Some(1 << 20));
    let again = store.settle(id(1), attempt(1), end(b'a', 1 << 20)).await;
    assert!(matches!(again, Ok(Settled::Done { .. })), "{again:?}");
    match store.settle(id(1), attempt(1), end(b'b', 1 << 20)).await {
        Ok(Settled::NotCurrent { record: Some(record) }) => assert_eq!(length(&record), Some(1 << 20)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_become_a_replica_is_left_until_it_is_a_primary_again() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    server.run("REPLICAOF 127.0.0.1 1").unwrap();
    let refused = store.claim(id(1), fresh(1)).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable), "{refused:?}");
    let refused = Redis::open(&settings(&server)).await.unwrap_err();
    assert!(matches!(&refused, OpenError::Unreachable(message) if message.contains("replica")), "{refused}");
    server.run("REPLICAOF NO ONE").unwrap();
    eventually("it is used again", async || store.claim(id(1), fresh(1)).await).await;
}

// On one thread: nothing is answered before all have asked.
#[tokio::test]
async fn accepted_operations_finish_before_it_closes() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Arc::new(Redis::open(&settings(&server)).await.unwrap());
    for number in 0..300 {
        store.claim(id(number), fresh(number)).await.unwrap();
    }
    let mut settling: Vec<_> = (0..300).map(|number| store.settle(id(number), attempt(number), complete())).collect();
    for settling in &mut settling {
        assert!(futures_util::future::poll_immediate(settling).await.is_none());
    }
    store.close().await;
    for settled in join_all(settling).await {
        assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
    }
    assert!(matches!(store.claim(id(1), fresh(1)).await, Err(Error::Determinate(_))));
}

// On one thread: all of them wait before the first is asked for.
#[tokio::test]
async fn concurrent_callers_share_script_calls() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    // Once, so that the scripts are known.
    store.claim(id(999), fresh(999)).await.unwrap();
    server.run("CONFIG RESETSTAT").unwrap();
    let claimed = join_all((0..256).map(|number| store.claim(id(number), fresh(number)))).await;
    assert!(claimed.iter().all(|claimed| matches!(claimed, Ok(Claim::Inserted(_)))));
    let calls = server.calls()["evalsha"];
    assert!(calls <= 8, "{calls} calls");
}
