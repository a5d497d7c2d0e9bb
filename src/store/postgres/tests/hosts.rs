//! Several hosts, of which the one in use fails.

use tokio::time::timeout;

use super::faults::{attempt, complete, fresh, id, own_server, until_up};
use super::servers::{Postgres as Server, Proxy};
use super::*;
use crate::net::Names;
use crate::net::testing::SilentAddress;

/// Two servers that know nothing of each other, with a database of the same name that holds the same store, and the URL that
/// names both.
struct Two {
    first: Server,
    second: Server,
    name: String,
}

impl Two {
    fn start() -> Option<Self> {
        let (first, database) = own_server(&[])?;
        let second = Server::start()?;
        let name = database.name.clone();
        second.session().run(&format!("CREATE DATABASE \"{name}\""));
        let two = Self { first, second, name };
        // It goes with its server.
        std::mem::forget(database);
        let other = servers::Session::open(&two.second.url(&two.name));
        other.run(&schema::all());
        other.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (1000, 1)");
        let id = two.first().value("SELECT encode(id, 'hex') FROM oncegate.store");
        other.run(&format!("UPDATE oncegate.store SET id = decode('{id}', 'hex')"));
        Some(two)
    }

    fn url(&self) -> String {
        self.url_by(self.first.address())
    }

    /// With another address of the first.
    fn url_by(&self, first: std::net::SocketAddr) -> String {
        let second = self.second.address();
        format!("postgres://postgres@{first},{second}/{}?connect_timeout=1&target_session_attrs=read-write", self.name)
    }

    fn first(&self) -> servers::Session {
        servers::Session::open(&self.first.url(&self.name))
    }

    fn second(&self) -> servers::Session {
        servers::Session::open(&self.second.url(&self.name))
    }

    /// A store on the first server. Where the machine is busy, the second may answer so much earlier that it is chosen: it takes
    /// no writes meanwhile.
    async fn open_on_first(&self, url: &str) -> Postgres {
        self.make_second_read_only(true);
        let store = open(url).await;
        self.make_second_read_only(false);
        store
    }

    /// The second takes no writes, as a standby.
    fn make_second_read_only(&self, is_read_only: bool) {
        let session = self.second.session();
        session.run(&format!("ALTER DATABASE \"{}\" SET default_transaction_read_only = {is_read_only}", self.name));
    }
}

const RECORDS: &str = "SELECT count(*) FROM oncegate.record";

/// From now on no commit on a server returns, or all do again.
fn hang_commits(server: &Server, hangs: bool) {
    let session = server.session();
    let names = if hangs { "nobody" } else { "" };
    session.run(&format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"));
    session.run("SELECT pg_reload_conf()");
    // Each of its processes hears of it by itself; a new one has.
    while session.value("SHOW synchronous_standby_names") != names {
        std::thread::sleep(Duration::from_millis(5));
    }
    if hangs {
        // Commits begin to wait once the checkpointer has heard of it.
        let (waiting, commit) = (
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'",
            "SELECT pg_logical_emit_message(true, 'test', '')",
        );
        let committing = server.session();
        let mut running = committing.start(commit);
        while session.value(waiting) != "t" {
            if running.within(Duration::from_millis(5)).is_some() {
                running = committing.start(commit);
            }
        }
        // The one that waited may have been another session, and this one may only begin to.
        let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        session.run(cancel);
        while running.within(Duration::from_millis(5)).is_none() {
            session.run(cancel);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_whose_commits_hang_is_left_for_the_next_by_every_connection() {
    let Some(two) = Two::start() else { return };
    let store = two.open_on_first(&two.url()).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    assert!(store.get(id(1)).await.unwrap().is_some());
    assert_eq!(two.first().value(RECORDS), "1", "the first host is the first choice");

    hang_commits(&two.first, true);
    let claimed = until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(matches!(claimed, Claim::Inserted(_)), "{claimed:?}");
    assert_eq!(two.second().value(RECORDS), "1");
    until_up(|| store.settle(id(2), attempt(2), complete())).await;
    // The pool's connections too.
    assert!(until_up(|| store.get(id(2))).await.is_some());
    assert!(store.get(id(1)).await.unwrap().is_none());
    store.ping().await.unwrap();
    // Its sessions there end, also those that wait for a commit.
    let first = two.first();
    let left = "SELECT count(*) FROM pg_stat_activity WHERE application_name <> '' OR wait_event = 'SyncRep' \
                OR query LIKE '%\\_v1%' AND pid <> pg_backend_pid()";
    let began = Instant::now();
    while first.value(left) != "0" {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "sessions stay: {:?}",
            first.run(&left.replace("count(*)", "query"))
        );
        sleep(Duration::from_millis(20)).await;
    }

    // One that begins now finds the same host.
    let began = Instant::now();
    let other = open(&two.url()).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    other.claim(id(3), fresh(3)).await.unwrap();
    assert_eq!(two.second().value(RECORDS), "2");

    // The former is not gone back to while this one works.
    hang_commits(&two.first, false);
    sleep(Duration::from_secs(2)).await;
    store.claim(id(4), fresh(4)).await.unwrap();
    assert_eq!(two.second().value(RECORDS), "3");
    store.close().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_whose_disk_is_full_is_left_once_another_takes_writes() {
    let Some(two) = Two::start() else { return };
    two.make_second_read_only(true);
    let store = open(&two.url()).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    two.first().run(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN RAISE EXCEPTION USING ERRCODE = 'disk_full', MESSAGE = 'no space left on device'; END $$;
         CREATE TRIGGER full_disk BEFORE INSERT ON oncegate.record EXECUTE FUNCTION full_disk()",
    );
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        let refused = store.claim(id(2), fresh(2)).await;
        assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(store.get(id(1)).await.unwrap().is_some(), "there is no better host");
    two.make_second_read_only(false);
    until_up(|| store.claim(id(2), fresh(2))).await;
    assert_eq!(two.second().value(RECORDS), "1");

    // One that begins now passes the first by: small commits still return there.
    let other = open(&two.url()).await;
    other.claim(id(3), fresh(3)).await.unwrap();
    assert_eq!(two.second().value(RECORDS), "2");
    store.close().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_holds_another_store_is_never_used() {
    let Some(two) = Two::start() else { return };
    two.second().run("UPDATE oncegate.store SET id = decode(repeat('07', 16), 'hex')");
    // As a standby is: it cannot be looked at, and is not needed.
    two.make_second_read_only(true);
    let store = open(&two.url()).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    two.make_second_read_only(false);
    hang_commits(&two.first, true);
    let hung = store.claim(id(2), fresh(2)).await;
    assert!(hung.is_err(), "{hung:?}");
    // Each trial of the second host finds the other store. It is given the time of several.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        let refused = timeout(Duration::from_secs(1), store.claim(id(2), fresh(2))).await;
        assert!(!matches!(refused, Ok(Ok(_))), "{refused:?}");
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(two.second().value(RECORDS), "0");
    hang_commits(&two.first, false);
    until_up(|| store.claim(id(2), fresh(2))).await;
    assert_eq!((&*two.first().value(RECORDS), &*two.second().value(RECORDS)), ("2", "0"));

    // A start that finds both refuses: either may have the keys that ran.
    let url = two.url().replace("connect_timeout=1", "connect_timeout=20");
    let refused = Postgres::open(&settings(&url)).await.unwrap_err();
    let message = refused.to_string();
    let both = [two.first.address(), two.second.address()].map(|address| address.to_string());
    assert!(
        matches!(refused, OpenError::OtherStore { .. }) && both.iter().all(|host| message.contains(host)),
        "{message}"
    );
    store.close().await;
}

/// As behind an address that another server takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_whose_store_becomes_another_is_used_no_longer() {
    let Some((server, database)) = own_server(&[]) else { return };
    let store = open(&database.url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    let before = database.value("SELECT encode(id, 'hex') FROM oncegate.store");
    database.run("UPDATE oncegate.store SET id = decode(repeat('07', 16), 'hex')");
    server.stop_fast();
    server.start_again();
    let began = Instant::now();
    let message = loop {
        let refused = store.claim(id(2), fresh(2)).await.unwrap_err().to_string();
        if refused.contains("holds another store") {
            break refused;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{refused}");
        sleep(Duration::from_millis(20)).await;
    };
    assert!(message.contains(&database.address().to_string()), "{message}");
    // The pool's connections too: they remove no record there, and read none.
    for refused in [store.remove(id(1), attempt(1)).await.map(drop), store.get(id(1)).await.map(drop)] {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("holds another store"), "{message}");
    }
    assert_eq!(database.value(RECORDS), "1");
    database.run(&format!("UPDATE oncegate.store SET id = decode('{before}', 'hex')"));
    until_up(|| store.claim(id(2), fresh(2))).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_primary_that_commits_again_is_not_used_after_a_failover() {
    let Some((first, second)) = Server::pair() else { return };
    let database = first.database();
    database.run(&schema::all());
    database.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (1000, 1)");
    let name = database.name.clone();
    // It goes with its server.
    std::mem::forget(database);
    let url = format!("postgres://postgres@{},{}/{name}?connect_timeout=1", first.address(), second.address());
    let store = open(&url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    first.kill9();
    second.promote();
    until_up(|| store.claim(id(2), fresh(2))).await;
    first.start_again();
    // It waits for no standby any more, so it commits.
    first.session().run("ALTER SYSTEM SET synchronous_standby_names = ''");
    first.session().run("SELECT pg_reload_conf()");
    first.session().run("SELECT pg_logical_emit_message(true, 'test', '')");
    let on = |server: &Server| servers::Session::open(&server.url(&name)).value(RECORDS);
    assert_eq!((&*on(&first), &*on(&second)), ("1", "2"));

    // One that begins now finds both, the old one first. On a busy machine the new one may take long to answer.
    let other = open(&url.replace("connect_timeout=1", "connect_timeout=20")).await;
    other.claim(id(3), fresh(3)).await.unwrap();
    assert_eq!((&*on(&first), &*on(&second)), ("1", "3"));

    second.stop_immediate();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        for store in [&store, &other] {
            let refused = timeout(Duration::from_secs(1), store.claim(id(4), fresh(4))).await;
            assert!(!matches!(refused, Ok(Ok(_))), "{refused:?}");
        }
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(on(&first), "1");
    second.start_again();
    for (number, store) in (4..).zip([&store, &other]) {
        until_up(|| store.claim(id(number), fresh(number))).await;
    }
    assert_eq!((&*on(&first), &*on(&second)), ("1", "5"));
    store.close().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_whose_wait_for_a_standby_is_broken_off_is_in_doubt() {
    let Some((server, database)) = own_server(&[]) else { return };
    let store = open(&database.url).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    hang_commits(&server, true);
    let session = server.session();
    let breaking_off = async {
        loop {
            session.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let removed = tokio::select! {
        removed = store.remove(id(1), attempt(1)) => removed,
        () = breaking_off => return,
    };
    assert!(matches!(removed, Err(Error::Indeterminate(_))), "{removed:?}");
    assert_eq!(database.value(RECORDS), "0", "here it is gone");
    hang_commits(&server, false);
    assert!(!until_up(|| store.remove(id(1), attempt(1))).await);
    store.close().await;
}

/// What is unknown on a server that was left behind may be completed elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_and_expired_records_are_read_only_from_a_host_that_commits() {
    let Some(two) = Two::start() else { return };
    two.make_second_read_only(true);
    let store = open(&two.url()).await;
    for number in [1, 2] {
        store.claim(id(number), NewRecord { lease: Duration::from_secs(2), ..fresh(number) }).await.unwrap();
    }
    let settled =
        store.settle(id(1), attempt(1), Settlement::Hold { cause: bytes::Bytes::from_static(b"cause") }).await.unwrap();
    assert!(matches!(settled, Settled::Done { .. }), "{settled:?}");
    sleep(Duration::from_millis(2_100)).await;
    let stands = store.claim(id(1), fresh(9)).await.unwrap();
    assert!(matches!(&stands, Claim::Exists { record, .. } if record.state == State::Unknown), "{stands:?}");
    hang_commits(&two.first, true);
    for number in [1, 2] {
        let said = timeout(Duration::from_millis(700), store.claim(id(number), fresh(9))).await;
        assert!(!matches!(said, Ok(Ok(_))), "{said:?}");
        let read = timeout(Duration::from_millis(700), store.get(id(number))).await;
        assert!(!matches!(read, Ok(Ok(_))), "{read:?}");
    }
    hang_commits(&two.first, false);
    for number in [1, 2] {
        let said = until_up(|| store.claim(id(number), fresh(9))).await;
        assert!(matches!(said, Claim::Exists { .. }), "{said:?}");
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_come_from_a_host_without_a_pooler() {
    let Some(two) = Two::start() else { return };
    let Some(pooler) = servers::PgBouncer::before(two.first.address()) else { return };
    let url = two.url_by(pooler.address()).replace("&target_session_attrs=read-write", "");
    let store = two.open_on_first(&url).await;
    assert!(!store.description().is_direct);
    store.claim(id(1), fresh(1)).await.unwrap();
    assert_eq!(two.first().value(RECORDS), "1");
    assert!(store.waiters.join(id(1)).is_none());
    pooler.kill9();
    until_up(|| store.claim(id(2), fresh(2))).await;
    assert_eq!(two.second().value(RECORDS), "1");
    let listens = async {
        while store.waiters.join(id(2)).is_none() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), listens).await.expect("it listens");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_host_is_left_for_the_next() {
    let Some(two) = Two::start() else { return };
    let proxy = Proxy::before(two.first.address());
    let store = two.open_on_first(&two.url_by(proxy.address())).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    proxy.stall_all();
    let began = Instant::now();
    until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(two.second().value(RECORDS), "1");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_no_host_commits_the_first_that_does_again_is_used() {
    let Some(two) = Two::start() else { return };
    two.make_second_read_only(true);
    let store = open(&two.url()).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    hang_commits(&two.first, true);
    let hung = store.claim(id(2), fresh(2)).await;
    assert!(matches!(hung, Err(Error::Indeterminate(_))), "{hung:?}");
    let unusable = Postgres::open(&settings(&two.url())).await.unwrap_err();
    let message = unusable.to_string();
    let both = [two.first.address(), two.second.address()].map(|address| address.to_string());
    assert!(
        matches!(unusable, OpenError::Unreachable(_)) && both.iter().all(|host| message.contains(host)),
        "{message}"
    );
    hang_commits(&two.first, false);
    let claimed = until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(matches!(claimed, Claim::Inserted(_)), "{claimed:?}");
    assert_eq!(two.first().value(RECORDS), "2");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_addresses_of_a_name_keep_from_no_other() {
    let Some(server) = Server::start() else { return };
    let std::net::IpAddr::V4(ip) = server.address().ip() else { panic!("it is on loopback") };
    let [a, b, c, _] = ip.octets();
    let port = server.address().port();
    let silent = [251, 252, 253].map(|last| SilentAddress::at(([a, b, c, last], port).into()));
    let all = silent.iter().map(SilentAddress::address).chain([server.address()]).collect::<Vec<_>>();
    let settings = settings(&format!("postgres://postgres@records.test:{port}/postgres"));
    let names = Names::new(move |_| Ok(all.clone()), 1, Duration::ZERO);
    let mut connector = Connector::new(&settings);
    connector.names = names;
    connector.connect_unchecked().await.expect("the last address works");
}
