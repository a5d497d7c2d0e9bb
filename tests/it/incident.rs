//! What an operator finds out about one request: from the problem that its client reports to the log and to the record.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

/// The only record of a key, as `records show` gives it.
fn record(gate: &Gate, key: &str) -> Value {
    let found = gate.records(&format!("key={key}"));
    let [found] = &found[..] else { panic!("{found:?}") };
    let id = found["id"].as_str().expect("an id");
    gate.admin("GET", &format!("/api/v1/records/{id}"), None).json()
}

/// An upstream that restarts under load is no line for each request.
#[test]
fn exchanges_that_break_off_are_logged_once_in_a_while_and_counted() {
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let gate = Gate::before(&upstream).start();
    let post = || {
        assert_eq!(Request::post("/charges").body("{}").send(&gate).status, 502);
    };
    let lines = || -> Vec<Value> {
        let log = gate.log();
        let lines = log.lines().filter(|line| line.contains("\"the upstream broke off\""));
        lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    (0..30).for_each(|_| post());
    eventually("a line that counts the others", || {
        post();
        lines().iter().any(|line| line["others"].as_u64() > Some(20)).then_some(())
    });
    assert!(lines().len() < 10, "{:?}", lines());
}

#[test]
fn a_problem_leads_to_the_log_and_to_the_record() {
    let upstream = Upstream::start(|_| Reply::nothing());
    let gate = Gate::before(&upstream).upstream("timeout = \"2s\"").start();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let request = Request::post("/charges").key("order-2026-0001").header("Authorization", "Basic c2hvcDpzM2NyZXQ=");
    let traced = request.clone().header("traceparent", format!("00-{trace}-b7ad6b7169203331-01"));
    let first = traced.body("{}").send(&gate);
    first.expect_problem(504, "upstream-timeout");
    let problem = first.json();
    let instance = problem["instance"].as_str().expect("an instance");
    let id = instance.strip_prefix("urn:oncegate:request:").expect("the id of a request");

    let unknown = eventually("the log names the request", || {
        let log = gate.log();
        log.lines().find(|line| line.contains(id)).map(str::to_owned)
    });
    assert!(unknown.contains("the outcome of an attempt is unknown") && unknown.contains("ord…0001"), "{unknown}");

    let shown = record(&gate, "order-2026-0001");
    assert_eq!(shown["request"], id);
    assert_eq!((&shown["trace_id"], &shown["upstream"]), (&json!(trace), &json!("app")));
    assert_eq!((&shown["state"], &shown["unknown_because"]), (&json!("unknown"), &json!("timeout")));
    assert_eq!(
        (&shown["method"], &shown["path"], &shown["key"]),
        (&json!("POST"), &json!("/charges"), &json!("ord…0001"))
    );
    assert!(shown["unknown_since"].as_str() > shown["claimed_at"].as_str(), "{shown}");
    assert_eq!(shown["caller"].as_str().map(str::len), Some(16), "{shown}");
    assert!(!shown.to_string().contains("s3cret") && !shown.to_string().contains("c2hvcDpzM2NyZXQ"), "{shown}");

    // Another request of the same caller has the same digest, and an id of its own; another caller has another digest.
    let retry = request.clone().body("{}").send(&gate);
    retry.expect_problem(409, "outcome-unknown");
    assert_eq!((&retry.json()["record"], &problem["record"]), (&shown["id"], &shown["id"]));
    assert_ne!(retry.json()["instance"], instance);
    let of = |request: Request, key: &str| {
        request.key(key).body("{}").send(&gate).expect_problem(504, "upstream-timeout");
        record(&gate, key)["caller"].clone()
    };
    let basic = |user: &str| Request::post("/charges").header("Authorization", user);
    assert_eq!(of(basic("Basic c2hvcDpzM2NyZXQ="), "k-2"), shown["caller"]);
    assert_ne!(of(basic("Basic b3RoZXI6czNjcmV0"), "k-3"), shown["caller"]);
}

#[test]
fn a_record_says_why_it_is_unknown() {
    let upstream = Upstream::start(|request| match request.head.start.split(|byte| *byte == b' ').nth(1) {
        Some(b"/charges?how=502") => Reply::status("502 Bad Gateway", "from behind"),
        Some(b"/charges?how=broken") => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").close(),
        _ => Reply::nothing(),
    });
    let gate = Gate::before(&upstream)
        .upstream("timeout = \"20s\"")
        .defaults("lease = \"5s\"")
        .server("drain_timeout = \"200ms\"")
        .start();
    for how in ["502", "broken"] {
        gate.post(&format!("/charges?how={how}"), how, "{}");
        assert_eq!(record(&gate, how)["unknown_because"], how);
    }
    // One is running when the gate is stopped, and one when it is killed.
    let address = gate.address;
    let running = std::thread::spawn(move || Request::post("/charges").key("stopped").body("{}").try_send(address));
    upstream.wait_for_runs(3);
    let gate = gate.stop().start();
    drop(running.join());
    assert_eq!(record(&gate, "stopped")["unknown_because"], "shutdown");

    let address = gate.address;
    let running = std::thread::spawn(move || Request::post("/charges").key("killed").body("{}").try_send(address));
    upstream.wait_for_runs(4);
    let gate = gate.kill9().start();
    drop(running.join());
    gate.wait_for_state("killed", "unknown");
    let killed = record(&gate, "killed");
    assert_eq!(killed["unknown_because"], "lease-expired");
    assert!(gate.metric("oncegate_leases_expired_total", &[]) >= 1.0);
    assert!(killed["unknown_since"].is_string(), "{killed}");
    // What made it unknown goes when it is known.
    let id = killed["id"].as_str().expect("an id");
    let release =
        json!({"action": "complete", "status": 201, "reason": "it stands in the books", "body_base64": "cGFpZA=="});
    assert_eq!(gate.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(&release)).status, 204);
    let resolved = record(&gate, "killed");
    assert_eq!((resolved.get("unknown_because"), &resolved["status"]), (None, &json!(201)));
}

#[test]
fn the_answer_of_a_record_is_shown_where_it_is_asked_for() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nX-Id: 7\r\nContent-Length: 13\r\n\r\n{\"paid\":true}",
        )
    });
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "k-1", "{}").expect(201, "executed");
    let shown = record(&gate, "k-1");
    let stored = (&shown["status"], &shown["content_type"], &shown["body_bytes"]);
    assert_eq!(stored, (&json!(201), &json!("application/json"), &json!(13)));
    let id = shown["id"].as_str().expect("an id");
    let show = |more: &[&str]| {
        let admin = gate.admin.to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output = command.args(["records", "show", id, "--admin", &admin]).args(more).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert!(!show(&[]).contains("paid"));
    assert!(!gate.log().contains("read the answer of a record"));
    let whole = show(&["--answer"]);
    assert!(whole.contains("\nx-id: 7\n") && whole.ends_with("\n\n{\"paid\":true}\n"), "{whole}");
    let is_logged = || gate.log().contains("an operator read the answer of a record").then_some(());
    eventually("that it was read is logged", is_logged);
}

#[test]
fn a_retry_does_not_change_since_when_it_is_unknown() {
    let never = Signal::new();
    let held = never.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let plan = Gate::before(&upstream).upstream("timeout = \"1s\"");
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect_problem(504, "upstream-timeout");
    let at_first = record(&gate, "k-1");
    std::thread::sleep(Duration::from_millis(20));
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(record(&gate, "k-1")["unknown_since"], at_first["unknown_since"], "a retry changes nothing");
    never.open();
}
