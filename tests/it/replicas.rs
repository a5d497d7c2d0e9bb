//! Three replicas on one database, killed and started again under load: one run for each claim, one answer for each key.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::clocks::OFF;
use crate::servers::{Database, Redis};
use crate::storm::Storm;
use crate::support::store::migrated;
use crate::support::{Gate, Plan, Reply, Upstream, eventually};

/// For how long replicas are killed.
const TIME: Duration = Duration::from_secs(12);

#[test]
fn replicas_that_are_killed_under_load() {
    let Some(database) = migrated() else { return };
    killed_under_load(&database, &database.url, |plan| plan);
}

/// Each makes new ids with another secret than the one before it, as while one secret takes the place of another.
#[test]
fn replicas_with_different_secrets_that_are_killed_under_load() {
    let Some(database) = migrated() else { return };
    let turn = AtomicUsize::new(0);
    killed_in(Storm::before(&database.url).with_several_ids(), &database.url, |plan| {
        let files = ["a", "b"].map(|name| {
            let path = plan.path(name);
            std::fs::write(&path, name.repeat(32)).expect("a writable directory");
            path
        });
        let [first, other] = if turn.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) { [0, 1] } else { [1, 0] };
        plan.store(&format!("id_secret_file = {:?}\nother_id_secret_files = [{:?}]", files[first], files[other]))
    });
}

/// One has the right time, one is a day ahead, and one a day behind.
#[test]
fn replicas_that_deliver_what_they_accepted_are_killed_under_load() {
    let Some(database) = migrated() else { return };
    let turn = AtomicUsize::new(0);
    let off = |plan: Plan| plan.clock_off_by([0, OFF, -OFF][turn.fetch_add(1, Ordering::Relaxed) % 3]);
    killed_in(Storm::before(&database.url).accepting(), &database.url, off);
}

#[test]
fn replicas_that_are_killed_under_load_behind_a_pooler() {
    let Some(database) = migrated() else { return };
    let Some(url) = database.pooled_url() else { return };
    killed_under_load(&database, &url, |plan| plan);
}

#[test]
fn a_purge_on_one_replica_is_soon_known_to_all() {
    let Some(database) = migrated() else { return };
    purged_everywhere(&database.url, Duration::from_secs(600), || {});
}

#[test]
fn a_purge_is_known_within_cache_max_age_where_nobody_is_told() {
    let Some(database) = migrated() else { return };
    let Some(url) = database.pooled_url() else { return };
    purged_everywhere(&url, Duration::from_secs(5), || {});
}

/// What nobody heard of is known once somebody listens again.
#[test]
fn a_purge_while_nobody_listens_is_soon_known_to_all() {
    let Some(database) = migrated() else { return };
    let listening = "FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN oncegate'";
    purged_everywhere(&database.url, Duration::from_secs(600), || {
        let count = format!("SELECT count(*) {listening}");
        eventually("they listen", || (database.value(&count) == "3").then_some(()));
        // Returns when they are gone. They come again after a second.
        database.run(&format!("SELECT pg_terminate_backend(pid, 5000) {listening}"));
    });
}

#[test]
fn gates_with_other_rules_of_keys_never_run_each_others() {
    let Some(database) = migrated() else { return };
    replaced_rules(&database.url);
}

#[test]
fn gates_with_other_rules_of_keys_never_run_each_others_on_redis() {
    let Some(redis) = Redis::with(&[("appendonly", "yes")]) else { return };
    replaced_rules(&redis.url());
}

fn replaced_rules(url: &str) {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).store_url(url);
    let one = plan.start();
    // Nothing is recorded yet.
    let other = plan.clone().defaults("scope = [\"const:x\"]").start();
    one.post("/charges", "k-1", "{}").expect_problem(503, "store-unavailable");
    other.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!((upstream.runs(), one.metric("oncegate_replaced_rules", &[])), (1, 1.0));
    let log = one.log();
    assert!(log.contains("another gate of this store has other rules for this namespace"), "{log}");
    // The records of the other are in its way.
    let mut refused = one.stop().spawn();
    assert!(!refused.wait().success());
    assert!(refused.log().contains("namespace `all`: scope: was [\\\"const:x\\\"]"), "{}", refused.log());
    // Where that is accepted, the other claims nothing any more.
    let one = plan.clone().arg("--accept-identity-change").start();
    one.post("/charges", "k-2", "{}").expect(200, "executed");
    other.post("/charges", "k-2", "{}").expect_problem(503, "store-unavailable");
    let mut refused = other.stop().spawn();
    assert!(!refused.wait().success());
    assert_eq!(upstream.runs(), 2);
}

/// Between an answer and its purge stands `trouble`. No gate gives what was purged to a request that begins later than
/// `max_age` after that.
fn purged_everywhere(url: &str, max_age: Duration, trouble: impl FnOnce()) {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let lines = format!("cache_max_age = \"{}s\"", max_age.as_secs());
    let gates = [(); 3].map(|()| Gate::before(&upstream).store_url(url).store(&lines).start());
    gates[0].post("/charges", "k-1", "{}").expect(200, "executed");
    // From the second time on out of memory.
    let replays = || gates.each_ref().map(|gate| gate.post("/charges", "k-1", "{}"));
    [replays(), replays()].iter().flatten().for_each(|replay| assert_eq!(replay.text(), "run 1"));
    let looked = || gates[1].metric("oncegate_store_duration_seconds_count", &["op=\"claim\""]);
    // Who begins to listen has forgotten all, and one that is slow begins late.
    eventually("the store is not asked", || {
        let before = looked();
        replays();
        (looked() == before).then_some(())
    });

    trouble();
    let records = gates[0].records("key=k-1");
    let id = records[0]["id"].as_str().expect("an id");
    assert!((200..300).contains(&gates[0].admin("DELETE", &format!("/api/v1/records/{id}"), None).status));
    let purged = Instant::now();
    eventually("all gates know of the purge", || {
        let age = purged.elapsed();
        let is_known = replays().iter().all(|replay| replay.text() == "run 2");
        assert!(is_known || age <= max_age, "what was purged is replayed after {age:?}");
        is_known.then_some(())
    });
    assert_eq!(upstream.runs(), 2);
}

fn killed_under_load(database: &Database, url: &str, plan: impl Fn(Plan) -> Plan) {
    killed_in(Storm::before(&database.url), url, plan);
}

fn killed_in(storm: Storm, url: &str, plan: impl Fn(Plan) -> Plan) {
    let mut gates: Vec<Option<Gate>> = storm.start(3, |gate| plan(gate.store_url(url))).into_iter().map(Some).collect();
    let places = Arc::clone(&storm.gates);
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kills = 0;
    storm.rage(TIME, || {
        std::thread::sleep(Duration::from_millis(random.u64(20..400)));
        let victim = random.usize(..gates.len());
        // It dies while clients are told of it, and before.
        let killed = gates[victim].take().expect("a gate").kill9();
        places.lock().unwrap()[victim] = None;
        kills += 1;
        std::thread::sleep(Duration::from_millis(random.u64(0..300)));
        let gate = plan(killed).start();
        places.lock().unwrap()[victim] = Some(gate.address);
        gates[victim] = Some(gate);
    });
    let seen = storm.judge();
    eprintln!("{kills} kills");
    seen.expect_right();
    assert!(kills >= 3, "{kills} kills");
}
