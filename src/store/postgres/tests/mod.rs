//! Against a real server.

mod deliveries;
mod faults;
mod hosts;
mod plans;
mod rights;
mod spread;
mod standbys;

use std::sync::Arc;
use std::thread;

use proptest::test_runner::Config;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, timeout};

use super::*;
use crate::store::contract::{self, Harness, model};
use crate::store::servers::{self, Database};

/// An empty database with the schema; `None` if PostgreSQL is not installed.
pub(super) fn database() -> Option<Database> {
    let schema = Sha256::digest(schema::all().as_bytes());
    let name = format!("records_{:02x}{:02x}{:02x}{:02x}", schema[0], schema[1], schema[2], schema[3]);
    servers::prepared_database(&name, |url| {
        let settings = settings(url);
        // The test's own runtime waits for this thread.
        let migrated = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(migrate(&settings))
        });
        migrated.join().unwrap().unwrap();
    })
}

pub(super) fn settings(url: &str) -> Settings {
    Settings { servers: url.parse().unwrap(), tls: None, connections: Settings::USUAL_CONNECTIONS }
}

/// Opens a store as `serve` does: where the server is too busy to answer in time, it tries again.
pub(super) async fn open(url: &str) -> Postgres {
    let start = Instant::now();
    loop {
        match Postgres::open(&settings(url)).await {
            Err(OpenError::Unreachable(_)) if start.elapsed() < BUSY_FOR => {}
            opened => return opened.unwrap(),
        }
    }
}

/// How long the server that all tests share may be too busy.
const BUSY_FOR: Duration = Duration::from_secs(60);

async fn keeps_the_contract(url: impl Fn(&Database) -> Option<String>) {
    let Some(database) = database() else { return };
    let Some(url) = url(&database) else { return };
    database.run(STOP_CLOCK);
    contract::run(async || harness(&database, &url).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    keeps_the_contract(|database| Some(database.url.clone())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract_through_a_pooler() {
    keeps_the_contract(Database::pooled_url).await;
}

#[tokio::test]
async fn a_pooler_is_detected() {
    let Some(database) = database() else { return };
    let direct = open(&database.url).await;
    let Description { is_direct, version, database: name, .. } = direct.description();
    assert!(*is_direct && version.starts_with(|first: char| first.is_ascii_digit()), "{version}");
    assert_eq!(*name, database.name);
    let Some(pooled) = database.pooled_url() else { return };
    assert!(!open(&pooled).await.description().is_direct);
}

/// `serve` then says that it waits, and tries again. A session that waits as long as the lock is held says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_opening_does_not_wait_as_long_as_another_session_has_a_table_locked() {
    let Some(database) = database() else { return };
    let settings = settings(&database.url);
    for table in ["record", "store", "migration"] {
        let locker = database.session();
        locker.run(&format!("BEGIN; LOCK TABLE oncegate.{table} IN ACCESS EXCLUSIVE MODE"));
        let opened = timeout(Duration::from_secs(60), Postgres::open(&settings)).await.expect("it ends");
        let refused = opened.expect_err("it is locked");
        assert!(matches!(refused, OpenError::Locked), "{table}: {refused}");
        locker.run("COMMIT");
    }
    open(&database.url).await;
}

#[tokio::test]
async fn the_risks_of_a_server_are_read_as_far_as_the_user_may() {
    let Some((primary, standby)) = servers::Postgres::pair() else { return };
    primary.session().run("CREATE ROLE plain LOGIN");
    let as_user = |user: &str| settings(&format!("postgres://{user}@{}/postgres", primary.address()));
    let described = describe(&as_user("postgres")).await.unwrap();
    assert_eq!(described.standbys, Some(vec![Standby::Synchronous]));
    assert_eq!((&*described.synchronous_standby_names, &*described.synchronous_commit), ("second", "remote_apply"));
    assert!(!described.has_fsync && described.has_full_page_writes && described.hosts == 1);
    let [risk] = &described.risks()[..] else { panic!("{described:?}") };
    assert!(risk.starts_with("fsync is off"), "{risk}");
    let described = describe(&as_user("plain")).await.unwrap();
    assert_eq!(described.standbys, Some(vec![Standby::Hidden]));
    primary.session().run("REVOKE SELECT ON pg_stat_replication FROM PUBLIC");
    assert_eq!(describe(&as_user("plain")).await.unwrap().standbys, None);

    standby.promote();
    let alone = settings(&standby.url("postgres"));
    let described = describe(&alone).await.unwrap();
    assert_eq!((described.standbys.as_deref(), &*described.synchronous_standby_names), (Some(&[][..]), ""));
    // `migrate` also skips a host that accepts logins and commits nothing.
    let (first, second) = (primary.address(), standby.address());
    let both = settings(&format!("postgres://postgres@{first},{second}/postgres?connect_timeout=1"));
    assert!(!migrate(&both).await.unwrap().is_empty());
    assert_eq!(pending(&alone).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract_whatever_the_default_isolation() {
    keeps_the_contract(|database| {
        serializable_by_default(database);
        Some(database.url.clone())
    })
    .await;
}

#[tokio::test]
async fn a_snapshot_isolation_default_is_refused_through_a_pooler() {
    let Some(database) = database() else { return };
    let Some(pooled) = database.pooled_url() else { return };
    serializable_by_default(&database);
    let refused = Postgres::open(&settings(&pooled)).await.unwrap_err();
    assert!(matches!(refused, OpenError::Isolation(_)) && refused.to_string().contains("serializable"), "{refused}");
}

/// Sets the level at which the transactions of new sessions begin.
fn serializable_by_default(database: &Database) {
    database.run(&format!("ALTER DATABASE \"{}\" SET default_transaction_isolation = serializable", database.name));
}

/// Transactions of each connection: those that claim and those of the pool.
#[tokio::test]
async fn sessions_ask_for_their_isolation() {
    let Some(database) = database() else { return };
    serializable_by_default(&database);
    let connector = Connector::for_records(&settings(&database.url));
    let session = connector.connect(&[]).await.unwrap();
    let isolation = "SELECT current_setting('transaction_isolation')";
    let of_session: String = session.client().query_typed_one(isolation, &[]).await.unwrap().get(0);
    let pool = Pool::new(connector, 1, true).unwrap();
    let of_pool: String = pool.query(isolation, &[]).await.unwrap()[0].get(0);
    assert_eq!((&*of_session, &*of_pool), ("read committed", "read committed"));
}

#[tokio::test]
async fn missing_privileges_are_named() {
    let Some(database) = database() else { return };
    let role = format!("{}_reader", database.name);
    database.run(&format!("CREATE ROLE {role} LOGIN"));
    let (_, rest) = database.url.split_once('@').unwrap();
    let url = format!("postgres://{role}@{rest}");
    // A role without any is refused once, and not once for each table.
    let refused = Postgres::open(&settings(&url)).await.unwrap_err().to_string();
    for right in ["audit: DELETE, ", ", migration: SELECT, ", ", record: UPDATE, ", ", store: SELECT)"] {
        assert!(refused.contains(right), "{right}: {refused}");
    }
    database.run(&format!(
        "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA oncegate TO {role};
         GRANT DELETE ON oncegate.identity, oncegate.origin, oncegate.audit, oncegate.delivery, oncegate.paused TO {role};
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"
    ));
    let refused = Postgres::open(&settings(&url)).await.unwrap_err();
    assert!(matches!(refused, OpenError::Denied(_)) && refused.to_string().contains("(record: DELETE)"), "{refused}");
    database.run(&format!("GRANT DELETE ON oncegate.record TO {role}"));
    Postgres::open(&settings(&url)).await.unwrap().close().await;
    database.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// A fresh store, whose clock stands until it is stepped.
async fn harness(database: &Database, url: &str) -> Harness {
    let session = Arc::new(database.session());
    session.run(EMPTY);
    let advance = move |time: Duration| -> futures_util::future::BoxFuture<'static, ()> {
        session.run(&format!("UPDATE clock SET at = at + {}", time.as_millis()));
        Box::pin(std::future::ready(()))
    };
    Harness::stepped_slowly(open(url).await, advance).shared()
}

/// What a fresh store has.
const EMPTY: &str = "
    TRUNCATE oncegate.record, oncegate.origin, oncegate.identity, oncegate.rules_period, oncegate.audit, oncegate.delivery,
        oncegate.paused;
    UPDATE clock SET at = 1700000000000";

/// Makes a database's time stand until it is stepped.
const STOP_CLOCK: &str = "
    CREATE TABLE clock (at bigint NOT NULL);
    INSERT INTO clock VALUES (1700000000000);
    CREATE OR REPLACE FUNCTION oncegate.now_v1() RETURNS bigint LANGUAGE sql VOLATILE
    AS 'SELECT at FROM public.clock';";

fn plays_like_a_map(url: impl Fn(&Database) -> Option<String>) {
    let Some(database) = database() else { return };
    let Some(url) = url(&database) else { return };
    database.run(STOP_CLOCK);
    // A quarter of what the store in memory plays: each step waits for a server.
    model::check(Config::default().cases / 4, async || {
        let again = url.clone();
        let reopen: model::Reopen = Box::new(move || {
            let url = again.clone();
            Box::pin(async move { Arc::new(open(&url).await) as Arc<dyn Store> })
        });
        model::Subject { harness: harness(&database, &url).await, reopen: Some(reopen) }
    });
}

#[test]
fn it_behaves_like_a_plain_map() {
    plays_like_a_map(|database| Some(database.url.clone()));
}

#[test]
fn it_behaves_like_a_plain_map_through_a_pooler() {
    plays_like_a_map(Database::pooled_url);
}

#[tokio::test]
async fn migrating_twice_changes_nothing() {
    let Some(database) = servers::database() else { return };
    let settings = settings(&database.url);
    assert!(matches!(Postgres::open(&settings).await, Err(OpenError::NoSchema)));
    let all = pending(&settings).await.unwrap();
    let (one, other) = tokio::join!(migrate(&settings), migrate(&settings));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_eq!([one, other].concat(), all, "one of them applied all, once");
    assert_eq!(pending(&settings).await.unwrap(), []);
    assert_eq!(migrate(&settings).await.unwrap(), []);
    Postgres::open(&settings).await.unwrap().close().await;
}

#[tokio::test]
async fn a_schema_of_another_version_is_refused() {
    let Some(database) = database() else { return };
    let settings = settings(&database.url);
    database.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (1000, 1)");
    Postgres::open(&settings).await.unwrap();
    database.run("UPDATE oncegate.migration SET compatible_with = 999 WHERE version = 1000");
    let newer = Postgres::open(&settings).await.unwrap_err();
    assert!(matches!(newer, OpenError::Newer { found: 1000, compatible_with: 999, .. }), "{newer}");
    database.run("DELETE FROM oncegate.migration");
    let older = Postgres::open(&settings).await.unwrap_err();
    assert!(matches!(older, OpenError::Older { found: 0, .. }), "{older}");
}
