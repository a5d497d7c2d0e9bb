//! Servers, wires and transactions that misbehave.

use std::time::Instant;

use bytes::Bytes;
use rustix::process::Signal;
use tokio::time::timeout;

use super::servers::{Cut, Proxy, process};
use super::*;
use crate::idempotency::record::State;
use crate::store::audit::EntryFilter;
use crate::store::deliveries::DeliveryFilter;
use crate::store::{Expiry, OriginId, Removal};

pub(super) const HOUR: Duration = Duration::from_secs(3600);

pub(super) fn id(number: u8) -> RecordId {
    RecordId([number; 32])
}

pub(super) fn attempt(number: u8) -> AttemptToken {
    AttemptToken([number; 16])
}

pub(super) fn fresh(number: u8) -> NewRecord {
    let (attempt, head) = (attempt(number), Bytes::from_static(b"head"));
    NewRecord { attempt, origin: OriginId(1), lease: HOUR, ttl: HOUR, unknown_ttl: HOUR, head }
}

pub(super) fn complete() -> Settlement {
    Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromClaim(HOUR) }
}

/// A server of the test's own, with the schema.
pub(super) fn own_server(with: &[(&str, &str)]) -> Option<(servers::Postgres, Database)> {
    let server = servers::Postgres::with(with)?;
    let database = server.database();
    database.run(&schema::all());
    database.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (1000, 1)");
    Some((server, database))
}

/// Time for connections that were lost to be opened again.
const ALL_BACK: Duration = Duration::from_millis(1500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_acknowledgement_is_resolved_by_retrying() {
    let Some(database) = database() else { return };
    let proxy = Proxy::before(database.address());
    let store = open(&proxy.url(&database.url)).await;
    for (number, cut) in (1..).zip([Cut::Answer, Cut::Ready, Cut::Within]) {
        // All connections are up again, so only the store's caller meets the cut.
        sleep(ALL_BACK).await;
        proxy.cut_next(cut);
        let lost = store.claim(id(number), fresh(number)).await;
        assert!(matches!(lost, Err(Error::Indeterminate(_))), "{cut:?}: {lost:?}");
        let again = until_up(|| store.claim(id(number), fresh(number))).await;
        assert!(matches!(again, Claim::Inserted(_)), "{cut:?}: {again:?}");
        sleep(ALL_BACK).await;
        proxy.cut_next(cut);
        let lost = store.settle(id(number), attempt(number), complete()).await;
        assert!(matches!(lost, Err(Error::Indeterminate(_))), "{cut:?}: {lost:?}");
        let again = until_up(|| store.settle(id(number), attempt(number), complete())).await;
        assert!(matches!(again, Settled::Done { .. }), "{cut:?}: {again:?}");
    }
    assert_eq!(store.count().await.unwrap(), [0, 3, 0]);
}

/// Asks until the store is back, which it is to be soon.
pub(super) async fn until_up<T, F: Future<Output = Result<T, Error>>>(ask: impl Fn() -> F) -> T {
    let began = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(20), "still {error}"),
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// It keeps no connection until the lock is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_is_not_waited_for_any_more_is_cancelled() {
    let Some(database) = database() else { return };
    let store = open(&database.url).await;
    let locker = database.session();
    locker.run("BEGIN; LOCK TABLE oncegate.audit IN ACCESS EXCLUSIVE MODE");
    let swept = store.pool.write("SELECT oncegate.sweep_entries_v1(1)", &[]).await;
    assert!(matches!(&swept, Err(Error::Indeterminate(_))), "{swept:?}");
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%sweep_entries_v1%'";
    let began = Instant::now();
    while database.value(waiting) != "0" {
        assert!(began.elapsed() < Duration::from_secs(20), "it still waits for the lock");
        sleep(Duration::from_millis(50)).await;
    }
}

/// The operator heard that it failed. Behind a pooler, too, where cancellations may get lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_a_lock_held_up_does_not_happen_when_the_lock_is_gone() {
    let Some(database) = database() else { return };
    for (number, url) in (1..).zip([Some(database.url.clone()), database.pooled_url()]) {
        let Some(url) = url else { continue };
        let store = open(&url).await;
        store.claim(id(number), fresh(number)).await.unwrap();
        store.settle(id(number), attempt(number), complete()).await.unwrap();
        let locker = database.session();
        locker.run("BEGIN; LOCK TABLE oncegate.record IN EXCLUSIVE MODE");
        let removed = store.remove(id(number), attempt(number)).await;
        assert!(removed.is_err(), "{removed:?}");
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%remove_v1%'";
        assert_eq!(database.value(waiting), "0", "it is over when its caller hears so");
        locker.run("COMMIT");
        assert!(store.get(id(number)).await.unwrap().is_some(), "it was removed after all");
        assert!(store.remove(id(number), attempt(number)).await.unwrap());
    }
}

/// Nothing else ends them behind a pooler, and each would keep its place among the connections that the server allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_ends_what_upkeep_and_operators_ask_for_while_a_table_is_locked() {
    let Some(database) = database() else { return };
    for url in [Some(database.url.clone()), database.pooled_url()] {
        let Some(url) = url else { continue };
        let store = open(&url).await;
        let locker = database.session();
        locker.run("BEGIN; LOCK TABLE oncegate.record, oncegate.delivery, oncegate.audit IN ACCESS EXCLUSIVE MODE");
        // Two at a time: the pooler has three connections.
        let (listed, deliveries) = tokio::join!(
            store.list(Filter::default(), None, 10),
            Deliveries::deliveries(&store, DeliveryFilter::default(), None, 10),
        );
        let (entries, swept) = tokio::join!(store.entries(EntryFilter::default(), None, 10), store.sweep_entries(1));
        let failed = [listed.err(), deliveries.err(), entries.err(), swept.err()];
        for error in failed {
            assert!(matches!(&error, Some(Error::Determinate(cause)) if cause.kind == ErrorKind::Locked), "{error:?}");
        }
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'";
        assert_eq!(database.value(waiting), "0", "they are over when their callers hear so");
        locker.run("COMMIT");
    }
}

/// A new connection of the pool is recognised by the table `store`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_cannot_be_recognised_keeps_no_place_on_the_server() {
    let Some(database) = database() else { return };
    for url in [Some(database.url.clone()), database.pooled_url()] {
        let Some(url) = url else { continue };
        let store = open(&url).await;
        let locker = database.session();
        locker.run("BEGIN; LOCK TABLE oncegate.store IN ACCESS EXCLUSIVE MODE");
        // One that was there before does not have to be recognised.
        let mut before = Vec::new();
        let refused = loop {
            match store.pool.check_out().await {
                Ok(connection) => before.push(connection),
                Err(error) => break error,
            }
        };
        assert!(refused.to_string().contains("another session has a table"), "{refused}");
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let began = Instant::now();
        while database.value(waiting) != "0" {
            assert!(began.elapsed() < Duration::from_secs(3), "it still waits for the lock");
            sleep(Duration::from_millis(50)).await;
        }
        locker.run("COMMIT");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_away_is_refused_at_once_and_comes_back() {
    let Some((server, database)) = own_server(&[]) else { return };
    let store = open(&database.url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    server.stop_immediate();
    let began = Instant::now();
    while store.ping().await.is_ok() || !matches!(store.claim(id(2), fresh(2)).await, Err(Error::Determinate(_))) {
        assert!(began.elapsed() < Duration::from_secs(20), "it is not noticed");
        sleep(Duration::from_millis(20)).await;
    }
    let asked = Instant::now();
    for number in 0..100 {
        let refused = store.claim(id(number), fresh(number)).await;
        assert!(matches!(refused, Err(Error::Determinate(_))), "{refused:?}");
    }
    assert!(
        asked.elapsed() < Duration::from_secs(4),
        "refused at once while the database is down: {:?}",
        asked.elapsed()
    );
    server.start_again();
    until_up(|| store.ping()).await;
    until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(matches!(until_up(|| store.claim(id(1), fresh(1))).await, Claim::Inserted(_)), "it was durable");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_another_is_about_to_make_fails_alone() {
    let Some(database) = database() else { return };
    let store = open(&database.url).await;
    let other = database.session();
    other.run("BEGIN");
    let values = format!("{0}, {0}, 0, 1, 1, 1, 1, 1, '\\x00'", "decode(repeat('05', 32), 'hex')");
    let columns = "id, attempt, state, claimed_at, lease_until, ttl, unknown_ttl, origin, head";
    other.run(&format!("INSERT INTO oncegate.record ({columns}) VALUES ({values})"));
    let claims = (1..=20).map(|number| store.claim(id(number), fresh(number)));
    for (number, claimed) in (1..).zip(futures_util::future::join_all(claims).await) {
        match number {
            5 => assert!(matches!(claimed, Err(Error::Determinate(_))), "{claimed:?}"),
            _ => assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{number}: {claimed:?}"),
        }
    }
    // Nor does anybody wait for the statement that waits.
    let store = Arc::new(store);
    let began = Instant::now();
    let waiting = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.claim(id(5), fresh(5)).await }
    });
    sleep(Duration::from_millis(20)).await;
    assert!(matches!(store.claim(id(21), fresh(21)).await, Ok(Claim::Inserted(_))));
    // It gives up by itself in the end.
    if waiting.is_finished() {
        assert!(began.elapsed() > Duration::from_millis(500), "it waits for a while");
        let refused = waiting.await.unwrap();
        assert!(matches!(refused, Err(Error::Determinate(_))), "{refused:?}");
        other.run("ROLLBACK");
    } else {
        other.run("ROLLBACK");
        waiting.abort();
    }
    assert!(matches!(store.claim(id(5), fresh(5)).await, Ok(Claim::Inserted(_))));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_cannot_be_prepared() {
    let Some((_server, database)) = own_server(&[("max_prepared_transactions", "2")]) else { return };
    let store = open(&database.url).await;
    for (number, waits) in [(1, false), (2, true)] {
        store.claim(id(number), fresh(number)).await.unwrap();
        if waits {
            let await_it = format!("SELECT oncegate.await_v1(decode('{}', 'hex'))", id(number));
            assert_eq!(database.value(&await_it), "t");
        }
        let upstream = database.session();
        upstream.run("BEGIN");
        upstream.run(&format!("SELECT oncegate.complete('{}', 201, NULL, NULL)", attempt(number).expose()));
        let refused = upstream.try_run("PREPARE TRANSACTION 'p'").unwrap_err();
        assert!(refused.contains("cannot PREPARE"), "{refused}");
        let record = store.get(id(number)).await.unwrap().unwrap().record;
        assert_eq!(record.state, State::InFlight, "nothing was completed");
    }
    store.close().await;
}

/// A role that may open so many connections; the URL by which it comes in.
fn limited_role(database: &Database, connections: usize) -> String {
    let role = format!("limited_{}", database.name);
    database.run(&format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT {connections}"));
    database.run(&format!("GRANT USAGE ON SCHEMA oncegate TO {role}"));
    database.run(&format!("GRANT ALL ON ALL TABLES IN SCHEMA oncegate TO {role}"));
    database.run(&format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"));
    let (_, rest) = database.url.split_once('@').expect("a user");
    format!("postgres://{role}@{rest}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_connections_do_not_delay_callers() {
    let Some((_server, database)) = own_server(&[]) else { return };
    let store = open(&limited_role(&database, 3)).await;
    for number in 1..=200 {
        let claimed = timeout(Duration::from_secs(4), store.claim(id(number), fresh(number))).await;
        assert!(matches!(claimed, Ok(Ok(Claim::Inserted(_)))), "{number}: {claimed:?}");
        sleep(Duration::from_millis(5)).await;
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_hangs_is_given_up_and_comes_back() {
    let Some(database) = database() else { return };
    let proxy = Proxy::before(database.address());
    let store = open(&proxy.url(&database.url)).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    proxy.stall_all();
    let hung = timeout(Duration::from_secs(15), store.claim(id(2), fresh(2))).await.expect("it is given up");
    assert!(matches!(hung, Err(Error::Indeterminate(_))), "{hung:?}");
    proxy.cut_all();
    proxy.pass();
    until_up(|| store.claim(id(2), fresh(2))).await;
    store.close().await;
}

/// Sends a signal to the server processes that serve clients now.
fn to_processes(database: &Database) -> impl Fn(Signal) + use<> {
    let processes = database.value(
        "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity
         WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
    );
    move |signal| processes.split(' ').for_each(|process| process::send(process.parse().expect("a process"), signal))
}

/// A server process reads a claim after the store has given the claim up. No gate knows its attempt any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_comes_late_leaves_no_record() {
    let Some((_server, database)) = own_server(&[]) else { return };
    let store = open(&database.url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    sleep(ALL_BACK).await;
    let signal = to_processes(&database);
    signal(Signal::STOP);
    let hung = timeout(Duration::from_secs(15), store.claim(id(2), fresh(2))).await.expect("it is given up");
    assert!(matches!(hung, Err(Error::Indeterminate(_))), "{hung:?}");
    let again = until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(matches!(again, Claim::Inserted(_)), "{again:?}");
    until_up(|| store.settle(id(2), attempt(2), Settlement::Release)).await;
    assert!(store.get(id(2)).await.unwrap().is_none());

    // The bound may be later than the gate's patience by as long as its last reading took.
    sleep(Duration::from_secs(1)).await;
    signal(Signal::CONT);
    until_up(|| store.claim(id(3), fresh(3))).await;
    sleep(ALL_BACK).await;
    let late = store.get(id(2)).await.unwrap().map(|found| found.record);
    assert_eq!(late, None, "the late claim made a record");
    store.close().await;
}

/// The same where the claim takes the place of a record: nothing was sent for it, and retries go by what stood.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_in_the_place_of_a_record_that_comes_late_leaves_the_record() {
    let Some((_server, database)) = own_server(&[]) else { return };
    let store = open(&database.url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    store.settle(id(1), attempt(1), Settlement::Hold { cause: Bytes::new() }).await.unwrap();
    let stood = store.get(id(1)).await.unwrap().expect("it stands").record;
    sleep(ALL_BACK).await;
    let signal = to_processes(&database);
    signal(Signal::STOP);
    let superseded = timeout(Duration::from_secs(15), store.supersede(id(1), stood.version(), fresh(2))).await;
    assert!(matches!(superseded, Ok(Err(Error::Indeterminate(_)))), "{superseded:?}");
    // As above.
    sleep(Duration::from_secs(1)).await;
    signal(Signal::CONT);
    until_up(|| store.claim(id(3), fresh(3))).await;
    sleep(ALL_BACK).await;
    let stands = store.get(id(1)).await.unwrap().map(|found| found.record);
    assert_eq!(stands.as_ref(), Some(&stood), "the late claim took the place of the record");
    assert!(store.supersede(id(1), stood.version(), fresh(4)).await.unwrap());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_first_host_is_skipped() {
    let Some(database) = database() else { return };
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hosts = format!("{},{}", silent.local_addr().unwrap(), database.address());
    let store = open(&database.url.replace(&database.address().to_string(), &hosts)).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    assert!(store.get(id(1)).await.unwrap().is_some());
    assert_eq!(store.renew(vec![LeaseRenewal { id: id(1), attempt: attempt(1), lease: HOUR }]).await.unwrap(), [id(1)]);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_record_does_not_delay_other_settlements() {
    let Some(database) = database() else { return };
    let store = Arc::new(open(&database.url).await);
    for number in 1..=20 {
        let lease = if number == 1 { Duration::from_millis(1) } else { HOUR };
        store.claim(id(number), NewRecord { lease, ..fresh(number) }).await.unwrap();
    }
    let upstream = database.session();
    upstream.run("BEGIN");
    upstream.run(&format!("SELECT oncegate.assert_current('{}')", attempt(1).expose()));

    // Its lease is past, and its attempt is at work.
    sleep(Duration::from_millis(5)).await;
    assert_eq!(store.expire_leases(10).await.unwrap().len(), 0);
    let Claim::Exists { record, now } = store.claim(id(1), fresh(99)).await.unwrap() else { panic!("it stands") };
    assert!(record.state == State::InFlight && record.until > now, "it is at work: {record:?} at {now:?}");
    let seen = store.get(id(1)).await.unwrap().unwrap();
    assert!(seen.record.until > seen.now);
    let superseded = store.supersede(id(1), record.version(), fresh(99)).await;
    assert!(matches!(superseded, Ok(false) | Err(Error::Determinate(_))), "{superseded:?}");
    let held: Vec<_> = (1..=20).map(|n| LeaseRenewal { id: id(n), attempt: attempt(n), lease: HOUR * 2 }).collect();
    let began = Instant::now();
    let mut renewed = store.renew(held).await.unwrap();
    renewed.sort_unstable();
    assert_eq!(renewed, (2..=20).map(id).collect::<Vec<_>>(), "all but the one that is held");
    assert!(began.elapsed() < Duration::from_secs(4), "renewing took {:?}", began.elapsed());
    let renewed = store.get(id(2)).await.unwrap().unwrap();
    assert!(renewed.record.until > renewed.now.plus(HOUR + HOUR / 2));

    let first = Arc::clone(&store);
    let settlement = tokio::spawn(async move { first.settle(id(1), attempt(1), complete()).await });
    let began = Instant::now();
    let others = (2..=20).map(|number| store.settle(id(number), attempt(number), complete()));
    for settled in futures_util::future::join_all(others).await {
        assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
    }
    let claims = (100..=120).map(|number| store.claim(id(number), fresh(number)));
    for claimed in futures_util::future::join_all(claims).await {
        assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{claimed:?}");
    }
    assert!(began.elapsed() < Duration::from_secs(4), "others waited {:?}", began.elapsed());
    assert!(!settlement.is_finished());
    upstream.run("COMMIT");
    let settled = timeout(Duration::from_secs(5), settlement).await.expect("it is asked again").unwrap();
    assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_and_settlements_are_durable_whatever_the_role_sets() {
    // Hardly anything but these commits writes its log: no other tests, and little in the background.
    let quiet = [("wal_writer_delay", "10s"), ("autovacuum", "off"), ("checkpoint_timeout", "1h")];
    let Some((_server, database)) = own_server(&quiet) else { return };
    database.run(&format!("ALTER DATABASE \"{}\" SET synchronous_commit = off", database.name));
    let store = open(&database.url).await;
    let session = database.session();
    for number in 1..=50 {
        store.claim(id(number), fresh(number)).await.unwrap();
        let end = if number % 2 == 0 { complete() } else { Settlement::Release };
        store.settle(id(number), attempt(number), end).await.unwrap();
        let left = session.value("SELECT pg_current_wal_insert_lsn() - pg_current_wal_flush_lsn()");
        assert!(left.parse::<u64>().unwrap() < 8192, "{left} bytes are not on the disk");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_notified_at_once() {
    let Some(database) = database() else { return };
    let (store, other) = (open(&database.url).await, Arc::new(open(&database.url).await));
    for store in [&store, &*other] {
        let listens = async {
            while store.waiters.join(id(1)).is_none() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), listens).await.expect("it listens");
    }
    store.changed(id(1)).await;
    let ends: [Settlement; 3] =
        [complete(), Settlement::Release, Settlement::Hold { cause: Bytes::from_static(b"cause") }];
    for (number, end) in (1..).zip(ends) {
        store.claim(id(number), fresh(number)).await.unwrap();
        let waiting = Arc::clone(&other);
        let waiting = tokio::spawn(async move { waiting.changed(id(number)).await });
        sleep(Duration::from_millis(100)).await;
        assert!(!waiting.is_finished());
        store.settle(id(number), attempt(number), end).await.unwrap();
        timeout(Duration::from_secs(10), waiting).await.expect("it is notified").unwrap();
    }
    store.claim(id(9), NewRecord { lease: Duration::from_millis(1), ..fresh(9) }).await.unwrap();
    let waiting = Arc::clone(&other);
    let waiting = tokio::spawn(async move { waiting.changed(id(9)).await });
    sleep(Duration::from_millis(100)).await;
    assert_eq!(store.expire_leases(10).await.unwrap().len(), 1);
    timeout(Duration::from_secs(10), waiting).await.expect("it is notified").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removals_are_published_to_other_processes() {
    let Some(database) = database() else { return };
    let (one, other) = (open(&database.url).await, open(&database.url).await);
    let mut removals = other.removals().unwrap();
    one.claim(id(1), fresh(1)).await.unwrap();
    assert!(!one.remove(id(1), attempt(2)).await.unwrap());
    let received = async {
        loop {
            // It may not have begun to listen.
            match timeout(Duration::from_millis(200), removals.recv()).await {
                Ok(Ok(Removal::Subscribed | Removal::Lost)) => continue,
                Ok(removed) => return removed,
                Err(_) => {}
            }
            one.claim(id(1), fresh(1)).await.unwrap();
            assert!(one.remove(id(1), attempt(1)).await.unwrap());
        }
    };
    assert_eq!(timeout(Duration::from_secs(10), received).await.expect("it is notified"), Ok(Removal::Of(id(1))));
    one.close().await;
    other.close().await;
}
