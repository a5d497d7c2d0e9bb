//! A store that is full, slow, broken or away: before the attempt nothing runs, after it nothing is lost.

mod files;

use std::time::{Duration, Instant};

use crate::support::faults::Fault;
use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually};

/// An upstream that answers when the signal is given.
fn holding() -> (Upstream, Signal) {
    let signal = Signal::new();
    let held = signal.clone();
    (Upstream::start(move |request| Reply::ok(format!("run {}", request.nth)).hold_until(&held)), signal)
}

#[test]
fn a_full_disk_answers_before_anything_is_forwarded_and_recovers_by_itself() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let mut gate = Gate::before(&upstream).with_faults().start();
    let before = gate.post("/charges", "before", "{}");
    before.expect(200, "executed");
    gate.fault(Fault::Full);
    for nth in 0..5 {
        gate.post("/charges", &format!("full-{nth}"), "{}").expect_problem(503, "store-unavailable");
    }
    assert_eq!(upstream.runs(), 1, "forwarded without a durable claim");
    gate.heal();
    for nth in 0..5 {
        eventually("the store is back", || {
            (gate.post("/charges", &format!("full-{nth}"), "{}").status == 200).then_some(())
        });
        assert_eq!(upstream.runs_of(&format!("full-{nth}")), 1);
    }
    before.expect_repeated_by(&gate.post("/charges", "before", "{}"));
    assert!(gate.is_running(), "it recovers without a restart");
    assert!(gate.metric("oncegate_store_errors_total", &["kind=\"full\""]) >= 1.0);
    let gate = gate.kill9().start();
    before.expect_repeated_by(&gate.post("/charges", "before", "{}"));
    gate.post("/charges", "full-0", "{}").expect(200, "replayed");
}

/// The same with a file system that is really full. Needs the right to mount one.
#[test]
fn a_real_full_disk() {
    let upstream = Upstream::start(|request| Reply::ok(request.body.bytes.clone()));
    let plan = Gate::before(&upstream);
    let mount = plan.path("disk");
    std::fs::create_dir(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "oncegate-test"])
        .arg(&mount)
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        return crate::servers::skipped("right to mount a file system");
    }
    let _unmount = Unmount(mount.clone());
    let plan =
        plan.store_url(&format!("sqlite:{}", mount.join("gate.db").display())).store("settle_timeout = \"300ms\"");
    let gate = plan.start();
    let body = "x".repeat(100_000);
    let mut kept = Vec::new();
    let refused = (0..60).find(|nth| {
        let key = format!("key-{nth}");
        let response = gate.post("/charges", &key, &body);
        match response.word().as_str() {
            "executed" => kept.push((key, response)),
            "unrecorded" => {}
            _ => {
                response.expect_problem(503, "store-unavailable");
                assert_eq!(upstream.runs_of(&key), 0);
                return true;
            }
        }
        false
    });
    let refused = format!("key-{}", refused.expect("2 MiB fill up"));
    for (key, first) in &kept {
        first.expect_repeated_by(&gate.post("/charges", key, &body));
    }
    // Room again, by remounting it larger.
    let grown = std::process::Command::new("mount").args(["-o", "remount,size=32m"]).arg(&mount).status().unwrap();
    assert!(grown.success());
    eventually("the store is back", || (gate.post("/charges", &refused, &body).status == 200).then_some(()));
    assert_eq!(upstream.runs_of(&refused), 1);
    drop(gate);
}

/// Unmounts when the gate, which was started later, is gone.
struct Unmount(std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        drop(std::process::Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[test]
fn a_gate_that_ends_while_its_store_is_away_says_what_it_could_not_record() {
    let (upstream, signal) = holding();
    let mut gate =
        Gate::before(&upstream).with_faults().store("settle_timeout = \"1s\"").server("drain_timeout = \"1s\"").start();
    let first = std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        gate.fault(Fault::Block);
        signal.open();
        first.join().expect("an answer")
    });
    first.expect(200, "unrecorded");
    gate.sigterm();
    assert!(gate.wait().success(), "{}", gate.log());
    let log = gate.log();
    assert!(log.contains("some requests have not ended") && !log.contains("are recorded as unknown"), "{log}");
}

/// The store goes away while the upstream runs: the client gets the upstream's answer, and it is kept later.
fn away_after_the_attempt(fault: Fault) {
    let (upstream, signal) = holding();
    let gate = Gate::before(&upstream).with_faults().store("settle_timeout = \"2s\"").start();
    let first = std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        gate.fault(fault);
        signal.open();
        first.join().expect("an answer")
    });
    first.expect(200, "unrecorded");
    assert_eq!(first.text(), "run 1");
    assert!(!first.head.has("idempotency-expires"), "{}", first.show());
    // Whatever a retry is told meanwhile, it does not run.
    let early = gate.post("/charges", "k-1", "{}");
    assert!([409, 503, 200].contains(&early.status), "{}", early.show());
    assert_eq!(upstream.runs(), 1);
    gate.heal();
    let replay = eventually("the settled answer", || {
        let retry = gate.post("/charges", "k-1", "{}");
        (retry.word() == "replayed").then_some(retry)
    });
    first.expect_repeated_by(&replay);
    let gate = gate.kill9().start();
    first.expect_repeated_by(&gate.post("/charges", "k-1", "{}"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn full_after_the_attempt() {
    away_after_the_attempt(Fault::Full);
}

#[test]
fn broken_after_the_attempt() {
    away_after_the_attempt(Fault::Io);
}

#[test]
fn hanging_after_the_attempt() {
    away_after_the_attempt(Fault::Block);
}

#[test]
fn a_store_that_comes_back_in_time_makes_no_difference() {
    let (upstream, signal) = holding();
    let gate = Gate::before(&upstream).with_faults().store("settle_timeout = \"20s\"").start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        gate.fault(Fault::Full);
        signal.open();
        eventually("a failed settle", || {
            (gate.metric("oncegate_store_errors_total", &["kind=\"full\""]) >= 1.0).then_some(())
        });
        assert!(!first.is_finished(), "answered before it was durable");
        gate.heal();
        first.join().expect("an answer").expect(200, "executed");
    });
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

#[test]
fn a_store_that_hangs_before_the_attempt_forwards_nothing() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).with_faults().start();
    gate.post("/charges", "warm", "{}").expect(200, "executed");
    gate.fault(Fault::Block);
    let start = Instant::now();
    gate.post("/charges", "k-1", "{}").expect_problem(503, "store-unavailable");
    assert!(start.elapsed() < Duration::from_secs(15), "a client waited {:?}", start.elapsed());
    assert_eq!(upstream.runs(), 1);
    gate.heal();
    // The claim that nobody waited for may have been written: then it is given back, since nothing was sent under it.
    let retry = eventually("an end of it", || {
        let retry = gate.post("/charges", "k-1", "{}");
        (!["store-unavailable", "in-flight"].contains(&retry.word().as_str())).then_some(retry)
    });
    retry.expect(200, "executed");
    assert_eq!(upstream.runs_of("k-1"), 1);
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
}

#[test]
fn a_claim_that_took_most_of_its_lease_is_given_back() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    // Failing open is for a store that is away, and this one has answered.
    let plan = Gate::before(&upstream).defaults("lease = \"3s\"\nstore_failure = \"forward\"");
    let gate = plan.with_faults().store("settle_timeout = \"20s\"").start();
    gate.post("/charges", "warm", "{}").expect(200, "executed");
    gate.fault(Fault::Block);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        std::thread::sleep(Duration::from_millis(3_500));
        gate.heal();
        slow.join().unwrap().expect_problem(503, "store-unavailable");
    });
    assert_eq!(upstream.runs_of("k-1"), 0);
    eventually("the key is free", || (gate.post("/charges", "k-1", "{}").word() == "executed").then_some(()));
}

/// Who is not ready gets no requests: it must find out without them.
#[test]
fn a_process_that_cannot_claim_is_not_ready_until_it_can() {
    for fault in [Fault::Full, Fault::Io] {
        let upstream = Upstream::start(|_| Reply::ok("x"));
        let gate = Gate::before(&upstream).with_faults().start();
        let is = |status: u16| (gate.admin("GET", "/readyz", None).status == status).then_some(());
        eventually("ready", || is(200));
        gate.fault(fault);
        gate.post("/charges", "k-1", "{}").expect_problem(503, "store-unavailable");
        eventually("unready", || is(503));
        std::thread::sleep(Duration::from_millis(1_500));
        assert_eq!(gate.admin("GET", "/readyz", None).status, 503, "while claims fail");
        gate.heal();
        eventually("ready again", || is(200));
        gate.post("/charges", "k-2", "{}").expect(200, "executed");
    }
}

#[test]
fn replays_and_unprotected_traffic_go_on_while_the_disk_is_full() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).with_faults().start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.fault(Fault::Full);
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(Request::get("/x").send(&gate).status, 200);
    gate.heal();
}

/// `store_failure = "forward"`: open, counted and marked.
#[test]
fn failing_open_is_marked() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).defaults("store_failure = \"forward\"").with_faults().start();
    gate.fault(Fault::Full);
    for run in 1..=2 {
        let response = gate.post("/charges", "k-1", "{}");
        response.expect(200, "unprotected");
        assert!(!response.head.has("idempotency-expires"));
        assert_eq!(upstream.runs(), run);
        assert!(!upstream.last().head.has("idempotency-attempt"), "there is no attempt to name");
    }
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"unprotected\""]), 2.0);
    gate.heal();
    eventually("protection again", || (gate.post("/charges", "k-2", "{}").word() == "executed").then_some(()));
    gate.post("/charges", "k-2", "{}").expect(200, "replayed");
}

/// A run without a record helps no client that has left, or that its timeout has answered.
#[test]
fn failing_open_runs_nothing_for_a_client_that_is_gone() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).defaults("store_failure = \"forward\"").upstream("client_timeout = \"3s\"");
    // A claim is waited for longer than a client is.
    let gate = plan.with_faults().store("settle_timeout = \"6s\"").start();
    gate.post("/charges", "warm", "{}").expect(200, "executed");
    gate.fault(Fault::Block);
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/charges").key("left").body("{}").bytes());
    std::thread::sleep(Duration::from_millis(200));
    drop(client);
    gate.post("/charges", "answered", "{}").expect_problem(504, "still-running");
    std::thread::sleep(Duration::from_secs(4));
    gate.heal();
    let free = |key: &str| {
        let retry = gate.post("/charges", key, "{}");
        (retry.word() == "executed").then_some(())
    };
    for key in ["left", "answered"] {
        eventually("the key is free", || free(key));
        assert_eq!(upstream.runs_of(key), 1, "{key}");
    }
}

/// What a failed sync lost cannot be known: going on would be a lie.
#[test]
fn a_failed_sync_ends_the_process() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let mut gate = Gate::before(&upstream).with_faults().start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.fault(Fault::Sync);
    let address = gate.address;
    let lost = Request::post("/charges").key("k-2").body("{}").try_send(address);
    if let Some(response) = &lost {
        response.expect_problem(503, "store-unavailable");
    }
    assert_eq!(upstream.runs_of("k-2"), 0, "forwarded without a durable claim");
    let status = gate.wait();
    assert!(!status.success(), "{status}");
    gate.heal();
    let gate = gate.plan.clone().start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    let retry = gate.post("/charges", "k-2", "{}");
    assert!(["executed", "outcome-unknown"].contains(&retry.word().as_str()), "{}", retry.show());
}

#[test]
fn a_claim_is_on_disk_before_anything_is_forwarded() {
    let (upstream, signal) = holding();
    let gate = Gate::before(&upstream).with_faults().start();
    // Whatever the start wrote is behind us.
    let (before, _) = gate.unsynced();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        let (writes, unsynced) = gate.unsynced();
        assert!(writes > before, "nothing was written");
        assert_eq!(unsynced, 0, "the upstream runs, and its claim is not synced");
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
        let (settled, unsynced) = gate.unsynced();
        assert!(settled > writes, "nothing was written");
        assert_eq!(unsynced, 0, "the client has its answer, and it is not synced");
    });
}

fn short_lease(upstream: &Upstream) -> Plan {
    Gate::before(upstream).defaults("lease = \"2s\"").with_faults()
}

#[test]
fn an_upstream_that_outlives_its_lease_runs_once() {
    let (upstream, signal) = holding();
    let gate = short_lease(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(6_500) {
            gate.post("/charges", "k-1", "{}").expect_problem(409, "in-flight");
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(gate.states("k-1"), ["in-flight"]);
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// The store is away for longer than the lease while the attempt runs: the late answer still completes the record.
fn away_for_longer_than_the_lease(fault: Fault, answered_while_away: bool) {
    let (upstream, signal) = holding();
    let settle_timeout = if answered_while_away { "1500ms" } else { "20s" };
    let gate = short_lease(&upstream).store(&format!("settle_timeout = \"{settle_timeout}\"")).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        gate.fault(fault);
        std::thread::sleep(Duration::from_millis(3_500));
        if answered_while_away {
            signal.open();
            first.join().expect("an answer").expect(200, "unrecorded");
            gate.heal();
        } else {
            gate.heal();
            // The reaper may turn it unknown, or the renewal may be in time; it must not run again.
            for _ in 0..5 {
                let retry = gate.post("/charges", "k-1", "{}");
                assert!(
                    ["in-flight", "outcome-unknown", "store-unavailable"].contains(&retry.word().as_str()),
                    "{}",
                    retry.show()
                );
                std::thread::sleep(Duration::from_millis(100));
            }
            signal.open();
            first.join().expect("an answer").expect(200, "executed");
        }
        let replay = eventually("the late answer", || {
            let retry = gate.post("/charges", "k-1", "{}");
            (retry.word() == "replayed").then_some(retry)
        });
        assert_eq!(replay.text(), "run 1");
    });
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn full_for_longer_than_the_lease() {
    away_for_longer_than_the_lease(Fault::Full, false);
}

#[test]
fn hanging_for_longer_than_the_lease() {
    away_for_longer_than_the_lease(Fault::Block, false);
}

#[test]
fn answered_while_away_for_longer_than_the_lease() {
    away_for_longer_than_the_lease(Fault::Full, true);
}

#[test]
fn answered_while_hanging_for_longer_than_the_lease() {
    away_for_longer_than_the_lease(Fault::Block, true);
}
