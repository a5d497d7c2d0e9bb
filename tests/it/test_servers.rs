//! The servers that tests run on: they start, stop and fail as told.

use std::io::BufRead;
use std::time::{Duration, Instant};

use crate::servers::{Cut, Database, Direction, PgBouncer, Postgres, Proxy, Session, database, prepared_database};
use crate::support::brokers::RabbitMqServer;
use crate::support::eventually;

const COUNT: &str = "SELECT count(*) FROM kept";

#[test]
fn a_database_is_a_tests_own() {
    let (Some(one), Some(two)) = (database(), database()) else { return };
    one.run("CREATE TABLE kept (id int)");
    assert_eq!(one.value(COUNT), "0");
    assert!(two.session().try_run(COUNT).is_err());
    let (name, other) = (one.name.clone(), two.session());
    drop(one);
    assert!(other.run(&format!("SELECT FROM pg_database WHERE datname = '{name}'")).is_empty());
}

#[test]
fn a_prepared_database_is_a_copy() {
    let name = format!("prepared_{:016x}", fastrand::u64(..));
    let prepare = |url: &str| drop(Session::open(url).run("CREATE TABLE kept (id int); INSERT INTO kept VALUES (1)"));
    let Some(one) = prepared_database(&name, prepare) else { return };
    one.run("INSERT INTO kept VALUES (2)");
    let two = prepared_database(&name, |_| panic!("once is enough")).expect("as before");
    assert_eq!((one.value(COUNT), two.value(COUNT)), ("2".into(), "1".into()));
    two.run(&format!("DROP DATABASE {name}"));
}

#[test]
fn a_server_keeps_what_was_committed_through_every_end() {
    let Some(postgres) = Postgres::start() else { return };
    let database = postgres.database();
    database.run("CREATE TABLE kept (id int)");
    for (nth, end) in [Postgres::stop_immediate, Postgres::kill9, Postgres::stop_fast].into_iter().enumerate() {
        let held = database.session();
        held.run("BEGIN");
        database.run("INSERT INTO kept VALUES (1)");
        end(&postgres);
        // What served it may outlive the server by a moment.
        let deadline = Instant::now() + Duration::from_secs(10);
        while held.try_run("SELECT 1").is_ok() {
            assert!(Instant::now() < deadline, "it is still served");
        }
        assert!(Session::try_open(&database.url).is_err());
        postgres.start_again();
        assert_eq!(database.value(COUNT), (nth + 1).to_string());
    }
    let held = database.session();
    postgres.hang();
    let asked = held.start("SELECT 1");
    assert!(asked.within(Duration::from_millis(300)).is_none(), "it hangs");
    postgres.go_on();
    assert!(asked.wait().is_ok());
}

#[test]
fn a_pooler_shares_its_connections_and_refuses_what_it_does_not_know() {
    let Some(database) = database() else { return };
    let Some(url) = database.pooled_url() else { return };
    let clients: Vec<Session> = (0..20).map(|_| Session::open(&url)).collect();
    let served: std::collections::BTreeSet<String> =
        clients.iter().map(|client| client.value("SELECT pg_backend_pid()")).collect();
    assert!(served.len() <= 3, "{served:?}");
    let refused = Session::try_open(&format!("{url}?options=-c%20a.b%3Dc")).map(|session| session.pid);
    assert!(refused.as_ref().is_err_and(|error| error.contains("unsupported startup parameter")), "{refused:?}");
    // A pooler of a test's own can be killed.
    let Some(postgres) = Postgres::start() else { return };
    let own = postgres.database();
    let Some(pooler) = PgBouncer::with(postgres.address(), &[("default_pool_size", "1")]) else { return };
    let url = pooler.url(&own.url);
    let session = Session::open(&url);
    pooler.kill9();
    assert!(session.try_run("SELECT 1").is_err() && Session::try_open(&url).is_err());
    pooler.start_again();
    assert_eq!(Session::open(&url).value("SELECT 1"), "1");
}

/// A server's database with a table, and a wire to it.
fn wired() -> Option<(Database, Proxy, String)> {
    let database = database()?;
    database.run("CREATE TABLE kept (id int)");
    let proxy = Proxy::before(database.address());
    let url = proxy.url(&database.url);
    Some((database, proxy, url))
}

#[test]
fn a_wire_loses_the_acknowledgement_of_what_was_committed() {
    let Some((database, proxy, url)) = wired() else { return };
    for (nth, cut) in [Cut::Answer, Cut::Ready, Cut::Within].into_iter().enumerate() {
        let session = Session::open(&url);
        session.run("SELECT 1");
        proxy.cut_next(cut);
        assert!(session.try_run("INSERT INTO kept VALUES (1)").is_err(), "{cut:?}");
        assert_eq!(database.value(COUNT), (nth + 1).to_string(), "{cut:?}");
        assert_eq!(proxy.cuts(), nth + 1);
    }
    let session = Session::open(&url);
    proxy.cut_next(Cut::Question);
    assert!(session.try_run("INSERT INTO kept VALUES (1)").is_err());
    assert_eq!(database.value(COUNT), "3", "the server did not hear of it");
    assert_eq!(Session::open(&url).value(COUNT), "3", "nothing more is cut");
}

#[test]
fn a_wire_is_cut_anywhere() {
    let Some((_database, proxy, url)) = wired() else { return };
    // From the first byte of the greeting to beyond its end.
    for bytes in 0..400 {
        proxy.cut_after(bytes);
        let ended = Session::try_open(&url).and_then(|session| session.try_run("SELECT repeat('x', 400)"));
        assert!(ended.is_err(), "{bytes}");
    }
    assert_eq!(proxy.cuts(), 400);
    proxy.pass();
    let session = Session::open(&url);
    proxy.cut_at_random(7, 0.2);
    let mut lost = 0;
    for _ in 0..200 {
        let ended = Session::try_open(&url).and_then(|session| session.try_run("SELECT 1"));
        lost += usize::from(ended.is_err());
    }
    assert!((20..180).contains(&lost), "{lost}");
    proxy.pass();
    session.run("SELECT 1");
    proxy.cut_all();
    assert!(session.try_run("SELECT 1").is_err());
}

#[test]
fn a_wire_stalls_delays_and_refuses() {
    let Some((database, proxy, url)) = wired() else { return };
    let session = Session::open(&url);
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.stall(direction);
        let asked = session.start("INSERT INTO kept VALUES (1)");
        assert!(asked.within(Duration::from_millis(200)).is_none());
        match direction {
            Direction::ToServer => assert_eq!(database.value(COUNT), "0"),
            Direction::ToClient => eventually("it arrives", || (database.value(COUNT) == "2").then_some(())),
        }
        proxy.pass();
        asked.rows();
    }
    proxy.stall_all();
    let asked = session.start("SELECT 1");
    proxy.cut_all();
    assert!(asked.wait().is_err());
    proxy.pass();
    let session = Session::open(&url);
    proxy.delay(Duration::from_millis(100));
    let start = Instant::now();
    session.run("SELECT 1");
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    proxy.refuse();
    assert!(Session::try_open(&url).is_err_and(|error| error.contains("refused")));
    session.run("SELECT 1");
    proxy.pass();
    Session::open(&url);
}

/// Not a test: starts the servers of a whole run (see `tests/run`), says where they are, and ends them when its input
/// does.
#[test]
#[ignore = "tests/run starts it beside the tests"]
#[allow(clippy::print_stdout, reason = "this is what it says")]
fn servers_for_a_run() {
    let Some(postgres) = Postgres::with(&[("max_connections", "400")]) else { return };
    println!("ONCEGATE_TEST_POSTGRES={}", postgres.url("postgres"));
    // Whoever needs it waits until it serves.
    let broker = RabbitMqServer::begin();
    println!("ONCEGATE_TEST_RABBITMQ={}", broker.port);
    let pooler = PgBouncer::before(postgres.address());
    if let Some(pooler) = &pooler {
        println!("ONCEGATE_TEST_PGBOUNCER={}", pooler.url(&postgres.url("postgres")));
    }
    println!("ready");
    let mut line = String::new();
    while std::io::stdin().lock().read_line(&mut line).is_ok_and(|read| read > 0) {}
}
