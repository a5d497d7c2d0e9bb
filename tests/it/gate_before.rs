//! One gate before another: what the second says of its key, the first must not keep as the answer.

use std::time::Duration;

use crate::support::store::migrated;
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream};

fn post(gate: &Gate, key: &str) -> Response {
    Request::post("/charges").key(key).body("{}").send(gate)
}

/// A gate before another, each with a store of its own.
fn before(inner: &Gate, defaults: &str) -> Gate {
    Gate::before_url(&format!("http://{}", inner.address)).defaults(defaults).start()
}

const HOLDS: &str = "outcomes = { \"5xx\" = \"hold\" }\n";

/// The request of another client runs at the second gate. How it ends is unknown to the first one, and not the answer for good.
#[test]
fn an_attempt_in_flight_at_the_other_gate_is_not_the_answer() {
    for (recovery, then) in [("\"hold\"", None), ("\"retry\"", Some("executed"))] {
        let signal = Signal::new();
        let held = signal.clone();
        let upstream = Upstream::start(move |_| Reply::ok("charged").hold_until(&held));
        let inner = Gate::before(&upstream).start();
        let outer = before(&inner, &format!("recovery = {recovery}\n"));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| post(&inner, "k-1"));
            upstream.wait_for_runs(1);
            let early = post(&outer, "k-1");
            assert_eq!((early.status, early.word().as_str()), (409, "outcome-unknown"), "{}", early.show());
            signal.open();
            first.join().expect("an answer").expect(200, "executed");
        });
        let retry = post(&outer, "k-1");
        match then {
            Some(word) => drop(retry.expect(200, word)),
            None => drop(retry.expect_problem(409, "outcome-unknown")),
        }
        assert_eq!(upstream.runs(), 1);
    }
}

/// A gate is an upstream that honours the key: it says that the first request is not over, and then gives its answer.
#[test]
fn a_request_is_sent_again_to_the_other_gate_until_it_has_the_answer() {
    let upstream = Upstream::start(|_| Reply::ok("charged").pause(Duration::from_secs(2)));
    let inner = Gate::before(&upstream).start();
    let url = format!("http://{}", inner.address);
    let resend = "recovery = { resend = { attempts = 8, backoff = \"300ms\" } }\n";
    let outer = Gate::before_url(&url).upstream("timeout = \"500ms\"").defaults(resend).start();
    post(&outer, "k-1").expect(200, "executed");
    post(&outer, "k-1").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn what_the_other_gate_did_not_send_leaves_the_key_free() {
    let nowhere = Upstream::free_address();
    let inner = Gate::before_url(&format!("http://{nowhere}")).start();
    let outer = before(&inner, HOLDS);
    let away = post(&outer, "k-1");
    assert_eq!((away.status, away.word().as_str()), (502, "released"), "{}", away.show());
    assert_eq!(away.json()["code"], "upstream-unreachable");
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key().as_deref() {
        Some("busy") => Reply::ok("x").hold_until(&held),
        _ => Reply::ok("x"),
    });
    let inner = Gate::before(&upstream).top("[limits]\nmax_requests = 1").start();
    let outer = before(&inner, HOLDS);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| post(&inner, "busy"));
        upstream.wait_for_runs(1);
        let refused = post(&outer, "k-1");
        assert_eq!((refused.status, refused.word().as_str()), (503, "released"), "{}", refused.show());
        signal.open();
        busy.join().expect("an answer").expect(200, "executed");
    });
    post(&outer, "k-1").expect(200, "executed");
}

/// A gateway and a sidecar on one database, with the same `store.service`: neither may wait for the other.
#[test]
fn two_gates_with_one_store_say_so() {
    let Some(database) = migrated() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let inner = Gate::before(&upstream).store_url(&database.url).start();
    let outer = Gate::before_url(&format!("http://{}", inner.address)).store_url(&database.url);
    let same = outer.start();
    let answer = post(&same, "k-1");
    assert_eq!((answer.status, answer.word().as_str()), (508, "released"), "{}", answer.show());
    assert_eq!(answer.json()["code"], "loop-detected");
    assert!(inner.log().contains("own `store.service`"), "{}", inner.log());
    assert!(same.records("").is_empty() && upstream.runs() == 0);
    drop(same);
    let other = outer.store("service = \"gateway\"").start();
    post(&other, "k-1").expect(200, "executed");
    post(&other, "k-1").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}
