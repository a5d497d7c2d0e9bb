//! `template:` in `key.from`: a key that is joined of several parts of a request.

use crate::support::{Gate, Reply, Request, Response, Upstream};

const SAGA: &str = "key = { from = [\"template:{header:X-Saga-Id}:{header:X-Step}\", \"header:Idempotency-Key\"] }";

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

fn step(saga: &str, step: &str) -> Request {
    Request::post("/charges").header("X-Saga-Id", saga).header("X-Step", step).body("{}")
}

#[track_caller]
fn expect_run(response: &Response, word: &str, run: usize) {
    assert_eq!(response.expect(200, word).text(), format!("run {run}"), "another request's answer");
}

#[test]
fn a_malformed_part_is_refused() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults(SAGA).start();
    for (saga, of) in [("a,b", "the header X-Saga-Id"), ("", "the header X-Saga-Id"), ("\"a", "the header X-Saga-Id")] {
        let refused = step(saga, "1").send(&gate);
        refused.expect_problem(400, "key-invalid");
        assert!(refused.json()["detail"].as_str().unwrap().starts_with(of), "{}", refused.show());
    }
    // Each part is short enough, and the whole is not.
    step(&"a".repeat(200), &"b".repeat(54)).send(&gate).expect(200, "executed");
    step(&"a".repeat(200), &"b".repeat(55)).send(&gate).expect_problem(400, "key-invalid");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn without_a_part_the_next_source_counts() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults(SAGA).start();
    let alone = Request::post("/charges").header("X-Saga-Id", "s-1").body("{}");
    assert_eq!(alone.send(&gate).word(), "", "a request without a key is not protected");
    expect_run(&alone.clone().key("k").send(&gate), "executed", 2);
    expect_run(&alone.key("k").send(&gate), "replayed", 2);
    // With both parts, the header after it is not looked at.
    expect_run(&step("s-1", "1").key("k").send(&gate), "executed", 3);
    expect_run(&step("s-1", "1").key("other").send(&gate), "replayed", 3);
}

/// Two tuples that look alike once they are joined are two keys.
#[test]
fn each_tuple_has_a_key_of_its_own() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults(SAGA).start();
    let tuples = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("a", "b%3Ac"), ("a", "b")];
    for (place, (saga, of)) in tuples.iter().enumerate() {
        expect_run(&step(saga, of).send(&gate), "executed", place + 1);
    }
    let gate = gate.kill9().start();
    for (place, (saga, of)) in tuples.iter().enumerate() {
        expect_run(&step(saga, of).send(&gate), "replayed", place + 1);
    }
    // Quoted or bare, it is one value.
    expect_run(&step("\"a\"", "\"b\"").send(&gate), "replayed", 5);
    assert_eq!(gate.records("").len(), 5);
}

#[test]
fn parts_from_all_over_a_request() {
    let upstream = numbered();
    let from = "key = { from = [\"template:order/{json:/order/id}/{query:step}\"], required = true }";
    let gate = Gate::before(&upstream).defaults(from).start();
    let post = |target: &str, body: &str| {
        Request::post(target).header("Content-Type", "application/json").body(body).send(&gate)
    };
    expect_run(&post("/c?step=pay", "{\"order\":{\"id\":7}}"), "executed", 1);
    expect_run(&post("/c?step=ship", "{\"order\":{\"id\":7}}"), "executed", 2);
    expect_run(&post("/c?step=pay", "{\"order\": {\"id\": 7}}"), "replayed", 1);
    post("/c", "{\"order\":{\"id\":7}}").expect_bare_problem(400, "key-missing");
    post("/c?step=pay", "{}").expect_bare_problem(400, "key-missing");
    assert_eq!(upstream.runs(), 2);
}
