//! `recovery = { resend = ... }`: a request whose outcome is unknown is sent again, to an upstream that honours its key.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use crate::support::store::migrated;
use crate::support::{Gate, Plan, Reply, Upstream, eventually};

const SOON: &str = "recovery = { resend = { attempts = 3, backoff = \"50ms\" } }\n";

/// An upstream that breaks off so many attempts of each key.
fn breaking(times: usize) -> Upstream {
    let seen: Mutex<Vec<Option<String>>> = Mutex::default();
    Upstream::start(move |request| {
        let mut seen = seen.lock().expect("no panic");
        seen.push(request.key());
        let nth = seen.iter().filter(|key| **key == request.key()).count();
        if nth <= times { Reply::nothing().close() } else { Reply::ok(format!("attempt {nth}")) }
    })
}

fn before(upstream: &Upstream) -> Plan {
    Gate::before(upstream).defaults(SOON)
}

#[test]
fn a_request_is_sent_again_until_its_outcome_is_known() {
    let upstream = breaking(2);
    let gate = before(&upstream).start();
    let answer = gate.post("/charges", "k-1", "{\"amount\":1}");
    answer.expect(200, "executed");
    assert_eq!(answer.text(), "attempt 3");
    gate.post("/charges", "k-1", "{\"amount\":1}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 3);
    let seen = upstream.seen();
    // The same request, and another attempt each time.
    assert!(
        seen.iter().all(|request| request.key().as_deref() == Some("k-1") && request.body.bytes == b"{\"amount\":1}")
    );
    let tokens: HashSet<_> = seen.iter().filter_map(|request| request.head.get("idempotency-attempt")).collect();
    assert_eq!(tokens.len(), 3);
}

#[test]
fn after_the_last_attempt_the_outcome_is_unknown() {
    let upstream = breaking(usize::MAX);
    let gate = before(&upstream).start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-broken");
    assert_eq!(upstream.runs(), 3);
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!((upstream.runs(), gate.states("k-1")), (3, vec!["unknown".to_owned()]));
}

/// Only what is unknown is sent again.
#[test]
fn what_is_released_or_kept_is_not_sent_again() {
    for (status, word) in [("503 Service Unavailable", "released"), ("402 Payment Required", "executed")] {
        let upstream = Upstream::start(move |_| Reply::status(status, "no"));
        let gate = before(&upstream).start();
        gate.post("/charges", "k-1", "{}").expect(status[..3].parse().expect("a status"), word);
        assert_eq!(upstream.runs(), 1);
    }
    // A gateway behind cannot tell either.
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::status("502 Bad Gateway", ""),
        _ => Reply::ok("done"),
    });
    let gate = before(&upstream).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
}

/// What a later attempt did not do, an earlier one may have done.
#[test]
fn a_later_attempt_releases_nothing() {
    for second in ["503 Service Unavailable", "429 Too Many Requests", "409 Conflict"] {
        let upstream = Upstream::start(move |request| match request.nth {
            1 => Reply::nothing().close(),
            2 => Reply::status(second, "no"),
            _ => Reply::ok("done"),
        });
        let gate = before(&upstream).start();
        gate.post("/charges", "k-1", "{}").expect(200, "executed");
        assert_eq!(upstream.runs(), 3, "{second}");
        // The last attempt gets no other.
        let two = "recovery = { resend = { attempts = 2, backoff = \"50ms\" } }\n";
        let upstream = Upstream::start(move |request| match request.nth {
            1 => Reply::nothing().close(),
            _ => Reply::status(second, "no"),
        });
        let gate = Gate::before(&upstream).defaults(two).start();
        gate.post("/charges", "k-1", "{}").expect(second[..3].parse().expect("a status"), "outcome-unknown");
        gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
        assert_eq!((upstream.runs(), gate.states("k-1")), (2, vec!["unknown".to_owned()]), "{second}");
    }
    // By name, a 409 is kept; and the upstream may release.
    let upstream = Upstream::start(|request| match (request.key().as_deref(), request.nth % 2) {
        (_, 1) => Reply::nothing().close(),
        (Some("released"), _) => {
            Reply::raw("HTTP/1.1 503 No\r\nIdempotency-Control: release\r\nContent-Length: 0\r\n\r\n")
        }
        _ => Reply::status("409 Conflict", "taken"),
    });
    let gate = Gate::before(&upstream).defaults(&format!("{SOON}outcomes = {{ 409 = \"store\" }}\n")).start();
    gate.post("/charges", "kept", "{}").expect(409, "executed");
    gate.post("/charges", "released", "{}").expect(503, "released");
}

/// The upstream is gone after the first attempt, which it may have carried out.
#[test]
fn an_upstream_that_is_gone_leaves_the_outcome_unknown() {
    let upstream = breaking(1);
    let gate =
        Gate::before(&upstream).defaults("recovery = { resend = { attempts = 2, backoff = \"500ms\" } }\n").start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        drop(upstream);
        first.join().expect("an answer").expect_problem(502, "upstream-broken");
    });
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
}

/// Before an attempt is resent, its retries are retries of an attempt that runs.
#[test]
fn retries_meet_an_attempt_in_flight() {
    let upstream = breaking(1);
    let slow = "recovery = { resend = { attempts = 2, backoff = \"6s\" } }\n";
    let gate = Gate::before(&upstream).defaults(slow).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        gate.post("/charges", "k-1", "{}").expect_problem(409, "in-flight");
        gate.post("/charges", "k-1", "{\"other\":1}").expect_problem(422, "key-reused");
        first.join().expect("an answer").expect(200, "executed");
    });
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 2);
}

/// Between two attempts, the record says for a moment that the last one is unknown.
#[test]
fn retries_at_another_gate_meet_an_attempt_in_flight() {
    const ATTEMPTS: usize = 6;
    let Some(database) = migrated() else { return };
    let upstream = breaking(ATTEMPTS - 1);
    let often = format!("recovery = {{ resend = {{ attempts = {ATTEMPTS}, backoff = \"5ms\" }} }}\n");
    let plan = Gate::before(&upstream).store_url(&database.url).defaults(&often);
    let gates = [plan.start(), plan.start()];
    for round in 0..10 {
        let key = format!("k-{round}");
        std::thread::scope(|scope| {
            let first = scope.spawn(|| gates[0].post("/charges", &key, "{}"));
            upstream.wait_for_runs(round * ATTEMPTS + 1);
            loop {
                let retry = gates[1].post("/charges", &key, "{}");
                if retry.status == 200 {
                    break;
                }
                retry.expect_problem(409, "in-flight");
            }
            first.join().expect("an answer").expect(200, "executed");
        });
    }
    assert_eq!(upstream.runs(), 10 * ATTEMPTS);
}

/// A client waits for `client_timeout`, as for any attempt, and the request goes on.
#[test]
fn a_client_that_waits_no_longer_gets_the_answer_later() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::nothing().pause(Duration::from_secs(30)),
        _ => Reply::ok("done"),
    });
    let gate = before(&upstream).upstream("timeout = \"1s\"").start();
    gate.post("/charges", "k-1", "{}").expect_problem(504, "still-running");
    eventually("it is done", || (gate.post("/charges", "k-1", "{}").word() == "replayed").then_some(()));
    assert_eq!(upstream.runs(), 2);
}

/// A gate that is killed between two attempts sends nothing when it is back.
#[test]
fn a_gate_that_is_killed_leaves_the_outcome_unknown() {
    let upstream = breaking(1);
    let slow = "lease = \"1s\"\nrecovery = { resend = { attempts = 2, backoff = \"30s\" } }\n";
    let plan = Gate::before(&upstream).defaults(slow);
    let gate = plan.start();
    let address = gate.address;
    std::thread::scope(|scope| {
        scope.spawn(move || crate::support::Request::post("/charges").key("k-1").body("{}").try_send(address));
        upstream.wait_for_runs(1);
        let gate = gate.kill9().start();
        eventually("its lease has passed", || {
            (gate.post("/charges", "k-1", "{}").word() == "outcome-unknown").then_some(())
        });
    });
    assert_eq!(upstream.runs(), 1);
}

/// A drain does not wait for a pause.
#[test]
fn a_gate_that_stops_ends_a_pause() {
    let upstream = breaking(1);
    let slow = "recovery = { resend = { attempts = 2, backoff = \"60s\" } }\n";
    let gate = Gate::before(&upstream).defaults(slow).server("drain_timeout = \"1s\"\n").start();
    let address = gate.address;
    let gate = std::thread::scope(|scope| {
        let first = scope.spawn(move || crate::support::Request::post("/charges").key("k-1").body("{}").send(address));
        upstream.wait_for_runs(1);
        let plan = gate.stop();
        first.join().expect("an answer").expect_problem(502, "upstream-broken");
        plan.start()
    });
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 1);
}
