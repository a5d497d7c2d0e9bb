//! Several hosts, of which the one in use fails.

use super::faults::{attempt, complete, fresh, id, own_server, until_up};
use super::servers::{Postgres as Server, Proxy};
use super::*;

/// Two servers that know nothing of each other, with a database of the same name, and the URL that names both.
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
        session.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
        drop(running.wait());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_whose_commits_hang_is_left_for_the_next_by_every_connection() {
    let Some(two) = Two::start() else { return };
    let store = open(&two.url()).await;
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
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_says_nothing_any_more_is_left_for_the_next() {
    let Some(two) = Two::start() else { return };
    let proxy = Proxy::before(two.first.address());
    let store = open(&two.url_by(proxy.address())).await;
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
    let told = unusable.to_string();
    let both = [two.first.address(), two.second.address()].map(|address| address.to_string());
    assert!(matches!(unusable, OpenError::Unreachable(_)) && both.iter().all(|host| told.contains(host)), "{told}");
    hang_commits(&two.first, false);
    let claimed = until_up(|| store.claim(id(2), fresh(2))).await;
    assert!(matches!(claimed, Claim::Inserted(_)), "{claimed:?}");
    assert_eq!(two.first().value(RECORDS), "2");
    store.close().await;
}
