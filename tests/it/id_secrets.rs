//! One id secret takes the place of another: no request runs twice meanwhile, and none is forgotten by a start.

use std::fs;

use crate::identity::checked;
use crate::support::store::kind;
use crate::support::{Gate, Plan, Reply, Request, Response, Upstream, eventually};

/// The same plan, with these secrets: the first makes new ids.
fn with(plan: &Plan, secrets: &[&str]) -> Plan {
    let file = |name: &str| {
        let path = plan.path(&format!("secret-{name}"));
        fs::write(&path, format!("the id secret {name}, of more than thirty-two bytes")).expect("a writable directory");
        format!("{path:?}")
    };
    let first = secrets.first().filter(|name| **name != "none");
    let first = first.map(|name| format!("id_secret_file = {}\n", file(name))).unwrap_or_default();
    let others = secrets.iter().skip(1).map(|name| if *name == "none" { "\"none\"".to_owned() } else { file(name) });
    plan.clone().store(&format!("{first}other_id_secret_files = [{}]", others.collect::<Vec<_>>().join(", ")))
}

fn send(gate: &Gate, key: &str, body: &str) -> Response {
    Request::post("/charges").key(key).body(body).send(gate)
}

#[track_caller]
fn refusal(plan: &Plan) -> String {
    let mut process = plan.clone().env("ONCEGATE_LOG__FORMAT", "text").spawn();
    assert_eq!(process.wait().code(), Some(1), "{}", process.log());
    process.log()
}

/// Starts the gate with another first secret. Where other gates may run, they must have heard of it.
fn swapped(plan: &Plan, from: &str, to: &str) -> Gate {
    let (announced, swapped) = (with(plan, &[from, to]), with(plan, &[to, from]));
    if kind() != "sqlite" {
        let log = refusal(&swapped);
        assert!(log.contains("the secret in store.id_secret_file is new to this store"), "{log}");
        assert!(checked(&swapped, 78).contains("other_id_secret_files"));
        announced.start().stop();
    }
    swapped.start()
}

#[test]
fn a_secret_takes_the_place_of_another() {
    for (from, to) in [("a", "b"), ("none", "b"), ("a", "none")] {
        let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
        let plan = Gate::before(&upstream);
        let gate = with(&plan, &[from]).start();
        send(&gate, "k-1", "{}").expect(200, "executed");
        gate.stop();
        // A start that gives up the former secret says what that forgets, and how to keep it.
        let log = refusal(&with(&plan, &[to]));
        assert!(log.contains("1 key") && log.contains("other_id_secret_files"), "{log}");

        let gate = swapped(&plan, from, to);
        let replay = send(&gate, "k-1", "{}");
        replay.expect(200, "replayed");
        assert_eq!(replay.text(), "run 1");
        send(&gate, "k-1", "{\"other\":1}").expect_problem(422, "key-reused");
        send(&gate, "k-2", "{}").expect(200, "executed");
        send(&gate, "k-2", "{}").expect(200, "replayed");
        // What a record keeps of its request is keyed and bound to the record.
        let kept = |key: &str| gate.records(&format!("key={key}"))[0]["fingerprint"].clone();
        assert_ne!(kept("k-1"), kept("k-2"));
        // Operators find both by their keys.
        assert_eq!([gate.states("k-1"), gate.states("k-2")], [["completed"], ["completed"]]);
        assert!(gate.records("").iter().all(|record| record["orphaned"] != true));
        gate.stop();

        // The former secret cannot go while a record needs it.
        let without = with(&plan, &[to]);
        let log = refusal(&without);
        assert!(log.contains("Leave the former secret in `[store] other_id_secret_files`"), "{log}");
        assert!(log.contains("would forget 1 live key"), "{log}");
        let gate = with(&plan, &[to, from]).start();
        let former = gate.records("key=k-1")[0]["id"].as_str().expect("an id").to_owned();
        assert_eq!(gate.admin("DELETE", &format!("/api/v1/records/{former}"), None).status, 204);
        gate.stop();
        let gate = without.start();
        send(&gate, "k-2", "{}").expect(200, "replayed");
        assert_eq!(upstream.runs(), 2, "{from} to {to}");
    }
}

/// While gates make new ids with different secrets, a key that is in flight with one is not run by the other.
#[test]
fn gates_with_different_first_secrets_run_a_key_once() {
    if kind() == "sqlite" {
        return;
    }
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream);
    let gates = [with(&plan, &["a", "b"]).start(), with(&plan, &["b", "a"]).start()];
    for round in 0..50 {
        let key = format!("k-{round}");
        let said: Vec<Response> = std::thread::scope(|scope| {
            let tries = gates.iter().cycle().take(6).map(|gate| scope.spawn(|| send(gate, &key, "{}")));
            tries.collect::<Vec<_>>().into_iter().map(|tried| tried.join().expect("an answer")).collect()
        });
        assert!(upstream.runs_of(&key) <= 1, "{key}: {said:?}");
        let answers = gates.each_ref().map(|gate| {
            let answer = Request::post("/charges").key(&key).body("{}").send_after_attempt(gate);
            assert_eq!(answer.status, 200, "{}", answer.show());
            answer.text()
        });
        assert_eq!(answers[0], answers[1], "{key}");
        assert_eq!(upstream.runs_of(&key), 1, "{key}");
    }
}

/// What was accepted under an id of the former secret is delivered, and its retries find it.
#[test]
fn what_was_accepted_with_the_former_secret_is_delivered_once() {
    if kind() == "redis" {
        return;
    }
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).defaults("mode = \"accept\"\n");
    let gate = with(&plan, &["a"]).start();
    let route = gate.admin("GET", "/api/v1/routes", None).json()["routes"][0]["name"].clone();
    let pause = serde_json::json!({ "route": route, "reason": "look" });
    assert_eq!(gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause)).status, 204);
    let location = |answer: &Response| {
        answer.expect(202, "accepted");
        answer.get("location").expect("a location")
    };
    let accepted = location(&send(&gate, "k-1", "{}"));
    gate.stop();

    let gate = swapped(&plan, "a", "b");
    assert_eq!(location(&send(&gate, "k-1", "{}")), accepted);
    send(&gate, "k-1", "{\"other\":1}").expect_problem(422, "key-reused");
    assert_ne!(location(&send(&gate, "k-2", "{}")), accepted);
    assert_eq!(gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause)).status, 204);
    for key in ["k-1", "k-2"] {
        let replay =
            eventually("it is delivered", || Some(send(&gate, key, "{}")).filter(|answer| answer.status == 200));
        replay.expect(200, "replayed");
        assert_eq!(upstream.runs_of(key), 1);
    }
}

/// While gates make new ids with different secrets, a key that the one has accepted is not delivered by the other as well.
#[test]
fn gates_with_different_first_secrets_deliver_a_key_once() {
    if matches!(kind().as_str(), "sqlite" | "redis") {
        return;
    }
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).defaults("mode = \"accept\"\n");
    let gates = [with(&plan, &["a", "b"]).start(), with(&plan, &["b", "a"]).start()];
    for round in 0..50 {
        let key = format!("k-{round}");
        let said: Vec<Response> = std::thread::scope(|scope| {
            let tries = gates.iter().cycle().take(6).map(|gate| scope.spawn(|| send(gate, &key, "{}")));
            tries.collect::<Vec<_>>().into_iter().map(|tried| tried.join().expect("an answer")).collect()
        });
        let answers = gates.each_ref().map(|gate| {
            let answer =
                eventually("it is delivered", || Some(send(gate, &key, "{}")).filter(|answer| answer.status == 200));
            answer.text()
        });
        assert_eq!(answers[0], answers[1], "{key}: {said:?}");
        assert_eq!(upstream.runs_of(&key), 1, "{key}: {said:?}");
    }
    let queued = || gates[0].admin("GET", "/api/v1/deliveries", None).json()["deliveries"].as_array().map(Vec::len);
    eventually("no delivery is left", || (queued() == Some(0)).then_some(()));
    assert_eq!(upstream.runs(), 50);
}
