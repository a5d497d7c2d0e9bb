//! Servers that wait for a standby that is not there: what they commit may stand nowhere else.

use std::time::Instant;

use bytes::Bytes;
use tokio::time::timeout;

use super::faults::{HOUR, attempt, complete, fresh, id, own_server, until_up};
use super::*;
use crate::store::deliveries::{Acceptance, Lane, NewDelivery};
use crate::store::{Expiry, OriginId};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_standby_that_is_broken_off_is_not_the_end() {
    let Some((server, database)) = own_server(&[]) else { return };
    // Whatever `client_min_messages` is by default.
    database.run(&format!("ALTER DATABASE \"{}\" SET client_min_messages = error", database.name));
    let store = open(&database.url).await;
    let session = server.session();
    session.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    session.run("SELECT pg_reload_conf()");
    let claiming = async {
        // Until every process of the server has heard of it, claims go through.
        let mut n = 1;
        let broken_off = loop {
            sleep(Duration::from_millis(20)).await;
            match store.claim(id(n), fresh(n)).await {
                Ok(_) => n += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(broken_off, Error::Indeterminate(_)), "{broken_off:?}");
        n
    };
    let breaking_off = async {
        // Again and again: connections that are made at this moment wait as well.
        loop {
            session.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let n = tokio::select! {
        n = claiming => n,
        () = breaking_off => 0,
    };
    assert_eq!(database.value("SELECT count(*) FROM oncegate.record"), n.to_string(), "here it stands");

    // Asked again it waits as well: what stands here only is not durable.
    let again = timeout(Duration::from_millis(500), store.claim(id(n), fresh(n))).await;
    assert!(again.is_err(), "{again:?}");
    session.run("ALTER SYSTEM RESET synchronous_standby_names");
    session.run("SELECT pg_reload_conf()");
    let again = until_up(|| store.claim(id(n), fresh(n))).await;
    assert!(matches!(again, Claim::Inserted(_)), "{again:?}");
    store.close().await;
}

/// A completion whose wait for the standby was cancelled stands on the primary only: a replay of it after a failover
/// would find its key unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_may_be_on_no_standby_is_not_handed_out() {
    let Some((server, database)) = own_server(&[]) else { return };
    let (one, other) = (open(&database.url).await, open(&database.url).await);
    for number in [1, 2, 3] {
        one.claim(id(number), fresh(number)).await.unwrap();
    }
    let large = Settlement::Complete { answer: vec![b'x'; 300 << 10].into(), expiry: Expiry::FromClaim(HOUR) };
    one.settle(id(2), attempt(2), large).await.unwrap();
    let session = server.session();
    session.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    session.run("SELECT pg_reload_conf()");
    let states = "SELECT count(*) FROM oncegate.record WHERE state = 1";
    let settling = async {
        // Until every process of the server has heard of it, commits go through.
        for number in 100.. {
            if one.claim(id(number), fresh(number)).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(20)).await;
        }
        for number in [1, 3] {
            let settled = one.settle(id(number), attempt(number), complete()).await;
            assert!(matches!(settled, Err(Error::Indeterminate(_))), "{number}: {settled:?}");
        }
    };
    let cancelling = async {
        loop {
            session.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
            sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = settling => {}
        () = cancelling => {}
    }
    assert_eq!(database.value(states), "3", "here they stand");

    let within = Duration::from_millis(500);
    for store in [&one, &other] {
        let claimed = timeout(within, store.claim(id(1), fresh(9))).await;
        assert!(matches!(claimed, Err(_) | Ok(Err(_))), "{claimed:?}");
        let read = timeout(within, store.get(id(3))).await;
        assert!(matches!(read, Err(_) | Ok(Err(_))), "{read:?}");
    }
    let claimed = timeout(within, other.claim(id(2), fresh(9))).await;
    assert!(matches!(claimed, Err(_) | Ok(Err(_))), "the other process has not seen it durable: {claimed:?}");
    session.run("ALTER SYSTEM RESET synchronous_standby_names");
    session.run("SELECT pg_reload_conf()");
    for store in [&one, &other] {
        for number in [1, 2, 3] {
            let found = until_up(|| store.claim(id(number), fresh(9))).await;
            let Claim::Exists { record, .. } = found else { panic!("{number}: {found:?}") };
            assert!(record.answer.is_some(), "{number}");
        }
    }

    // From here on each has seen all of them durable, and asks for no standby to replay them.
    session.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    session.run("SELECT pg_reload_conf()");
    for store in [&one, &other] {
        for number in [1, 2, 3] {
            let found =
                timeout(Duration::from_secs(4), store.claim(id(number), fresh(9))).await.expect("no wait").unwrap();
            assert!(matches!(found, Claim::Exists { .. }), "{number}: {found:?}");
        }
    }
    session.run("ALTER SYSTEM RESET synchronous_standby_names");
    session.run("SELECT pg_reload_conf()");
    one.close().await;
    other.close().await;
}

/// Who finds a request that was accepted tells its client that it is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_may_be_on_no_standby_is_not_kept() {
    let Some((server, database)) = own_server(&[]) else { return };
    let (one, other) = (open(&database.url).await, open(&database.url).await);
    let accept = |number| {
        let (token, lane, nothing) = (attempt(number), Lane(0), Bytes::new);
        let new =
            NewDelivery { token, origin: OriginId(1), lane, head: nothing(), request: nothing(), body: nothing() };
        one.accept(id(number), new)
    };
    assert!(matches!(accept(1).await.unwrap(), Acceptance::Accepted));
    let session = server.session();
    let wait_for_nobody = || {
        session.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
        session.run("SELECT pg_reload_conf()");
    };
    let wait_no_more = || {
        session.run("ALTER SYSTEM RESET synchronous_standby_names");
        session.run("SELECT pg_reload_conf()");
    };
    wait_for_nobody();
    let accepting = async {
        // Until every process of the server has heard of it, commits go through.
        for number in 2.. {
            sleep(Duration::from_millis(20)).await;
            if accept(number).await.is_err() {
                return number;
            }
        }
        0
    };
    let cancelling = async {
        loop {
            session.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let last = tokio::select! {
        last = accepting => last,
        () = cancelling => 0,
    };
    assert_eq!(database.value("SELECT count(*) FROM oncegate.delivery"), last.to_string(), "here it stands");

    let within = Duration::from_millis(500);
    for store in [&one, &other] {
        let read = timeout(within, store.delivery(id(last))).await;
        assert!(matches!(read, Err(_) | Ok(Err(_))), "{read:?}");
    }
    let read = timeout(within, other.delivery(id(1))).await;
    assert!(matches!(read, Err(_) | Ok(Err(_))), "the other process has not seen it durable: {read:?}");
    let read = timeout(Duration::from_secs(4), one.delivery(id(1))).await.expect("no wait").unwrap();
    assert!(read.is_some(), "it was kept here");
    wait_no_more();
    for store in [&one, &other] {
        for number in [1, last] {
            assert!(until_up(|| store.delivery(id(number))).await.is_some());
        }
    }

    // From here on each has seen them durable.
    wait_for_nobody();
    for (store, number) in [(&one, 1), (&one, last), (&other, 1), (&other, last)] {
        let read = timeout(Duration::from_secs(4), store.delivery(id(number))).await.expect("no wait").unwrap();
        assert!(read.is_some());
    }
    wait_no_more();
    one.close().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_is_missing_does_not_use_up_the_connections_of_the_server() {
    let Some((server, database)) = own_server(&[]) else { return };
    let store = Arc::new(open(&database.url).await);
    let session = server.session();
    session.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    session.run("SELECT pg_reload_conf()");
    let began = Instant::now();
    let mut most = 0;
    while began.elapsed() < Duration::from_secs(14) {
        let asking = Arc::clone(&store);
        tokio::spawn(async move { asking.claim(id(1), fresh(1)).await });
        let sessions =
            "SELECT count(*) FROM pg_stat_activity WHERE usename IS NOT NULL AND backend_type = 'client backend'";
        most = most.max(session.value(sessions).parse::<usize>().unwrap());
        sleep(Duration::from_millis(200)).await;
    }
    // Its own, this test's, and those that are being cancelled.
    assert!(most <= Settings::USUAL_CONNECTIONS + 5, "{most} sessions");
    session.run("ALTER SYSTEM RESET synchronous_standby_names");
    session.run("SELECT pg_reload_conf()");
    until_up(|| store.claim(id(1), fresh(1))).await;
    store.close().await;
}
