//! A primary with a synchronous standby, and failovers to the standby under load, judged by what happened to every key.
//!
//! One kind of failover is in every run; `tests/run --long` has the others.

use std::time::{Duration, Instant};

use crate::servers::{Database, Postgres};
use crate::storm::Storm;
use crate::support::store::migrated_on;
use crate::support::{Gate, Plan, Reply, Upstream, eventually};

/// For how long clients ask, and how long they did when the failover begins.
const TIME: Duration = Duration::from_secs(8);
const BEFORE: Duration = Duration::from_millis(1_500);

/// A database on a primary and on its synchronous standby.
struct Replicated {
    first: Postgres,
    second: Postgres,
    database: Database,
}

impl Replicated {
    fn start() -> Option<Self> {
        let (first, second) = Postgres::pair()?;
        let database = migrated_on(&first);
        Some(Self { first, second, database })
    }

    /// Both hosts, the first primary first.
    fn url(&self) -> String {
        let (first, second) = (self.first.address(), self.second.address());
        format!("postgres://postgres@{first},{second}/{}", self.database.name)
    }

    /// The second host alone: what was acknowledged can be seen there before and after it is promoted.
    fn second_url(&self) -> String {
        self.second.url(&self.database.name)
    }

    /// Has clients ask for new keys through two gates, with one failover in the middle, and holds that no key ran twice and
    /// that no answer was lost.
    fn expect_a_right_failover(&self, fail_over: impl Fn(&Self)) {
        // Only the server dies, and an attempt is lost only where a failover takes longer than its lease: a gate moves to the
        // new primary within about three seconds, and says nothing of leases that are past on the old one.
        let storm = Storm::before(&self.second_url()).with_lease(10);
        let gates = storm.start(2, |plan| plan.store_url(&self.url()));
        let mut has_failed_over = false;
        storm.rage(TIME, || {
            if has_failed_over {
                std::thread::sleep(Duration::from_millis(50));
            } else {
                std::thread::sleep(BEFORE);
                fail_over(self);
                has_failed_over = true;
            }
        });
        for gate in &gates {
            eventually("it is ready", || is_ready(gate).then_some(()));
        }
        storm.judge().expect_right();
    }

    /// Holds that a gate that starts now finds the host that commits, though the other one stands first in its URL.
    fn expect_a_good_start(&self) {
        let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
        let began = Instant::now();
        let gate = self.plan(&upstream, &self.url()).start();
        eventually("it is ready", || is_ready(&gate).then_some(()));
        eprintln!("ready after {:?}", began.elapsed());
        gate.post("/charges", "after", "{}").expect(200, "executed");
    }

    fn plan(&self, upstream: &Upstream, url: &str) -> Plan {
        Gate::before(upstream).store_url(url)
    }
}

fn is_ready(gate: &Gate) -> bool {
    gate.admin("GET", "/readyz", None).status == 200
}

/// It lets everybody in, and nothing that is committed on it returns.
#[test]
fn an_old_primary_that_lingers() {
    let Some(servers) = Replicated::start() else { return };
    servers.expect_a_right_failover(|servers| servers.second.promote());
    servers.expect_a_good_start();
}

/// In the middle of commits. It comes back as if nothing had been.
#[test]
#[ignore = "takes long: `tests/run --long` runs it"]
fn a_primary_that_is_killed_and_comes_back() {
    let Some(servers) = Replicated::start() else { return };
    servers.expect_a_right_failover(|servers| {
        servers.first.kill9();
        servers.second.promote();
        servers.first.start_again();
    });
    servers.expect_a_good_start();
}

/// After it has sent everything to the standby. It comes back, and some gates know of no other.
#[test]
#[ignore = "takes long: `tests/run --long` runs it"]
fn a_primary_that_is_stopped_and_comes_back_alone() {
    let Some(servers) = Replicated::start() else { return };
    servers.expect_a_right_failover(|servers| {
        servers.first.stop_fast();
        servers.second.promote();
        servers.first.start_again();
    });
    servers.expect_a_good_start();
    // A gate that finds it alone is not ready, and forwards nothing.
    let upstream = Upstream::start(|_| Reply::ok("run"));
    let process = servers.plan(&upstream, &servers.first.url(&servers.database.name)).spawn();
    let admin = process.address("admin listening").expect("it listens while it waits for its store");
    let asked = crate::support::Request::new("GET", "/readyz").header("Host", "127.0.0.1");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(8) {
        assert_eq!(asked.clone().send(admin).status, 503);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(upstream.runs(), 0);
}
