//! One gate before another: what the second says of its key, the first must not keep as the answer.

use serde_json::json;

use crate::support::store::migrated;
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream};

fn post(gate: &Gate, key: &str) -> Response {
    Request::post("/charges").key(key).body("{}").send(gate)
}

/// A gate before another, each with a store of its own.
fn before(inner: &Gate) -> Gate {
    Gate::before_url(&format!("http://{}", inner.address)).defaults("outcomes = { \"5xx\" = \"hold\" }\n").start()
}

#[test]
fn a_retry_is_answered_by_the_attempt_that_the_other_gate_runs() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("charged").hold_until(&held));
    let inner = Gate::before(&upstream).start();
    let outer = before(&inner);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| post(&inner, "k-1"));
        upstream.wait_for_runs(1);
        let early = post(&outer, "k-1");
        assert_eq!((early.status, early.word().as_str()), (409, "released"), "{}", early.show());
        assert_eq!((&early.json()["code"], &early.json()["retryable"]), (&"in-flight".into(), &true.into()));
        assert!(early.retry_after() >= 1 && !early.head.has("idempotency-control"));
        // A client that no gate has sent gets none of what gates say to each other.
        assert!(!post(&inner, "k-1").head.has("idempotency-control"));
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    post(&outer, "k-1").expect(200, "executed");
    post(&outer, "k-1").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn what_the_other_gate_did_not_send_leaves_the_key_free() {
    let nowhere = Upstream::free_address();
    let inner = Gate::before_url(&format!("http://{nowhere}")).start();
    let outer = before(&inner);
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
    let outer = before(&inner);
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

/// What an operator says at the one is asked for by the other.
#[test]
fn an_outcome_that_is_unknown_at_the_other_gate_is_asked_for_there() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::nothing().close(),
        _ => Reply::ok("x"),
    });
    let inner = Gate::before(&upstream).start();
    post(&inner, "k-1").expect_problem(502, "upstream-broken");
    let outer = before(&inner);
    for _ in 0..2 {
        let unknown = post(&outer, "k-1");
        assert_eq!((unknown.status, unknown.word().as_str()), (409, "released"), "{}", unknown.show());
        assert_eq!(unknown.json()["code"], "outcome-unknown");
    }
    let id = inner.records("key=k-1")[0]["id"].as_str().expect("an id").to_owned();
    let release = json!({ "action": "release", "reason": "not in the ledger" });
    assert_eq!(inner.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(&release)).status, 204);
    post(&outer, "k-1").expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
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
