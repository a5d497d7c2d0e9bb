//! `mode = "accept"` and `Prefer: respond-async`: a request is durable before its 202, and delivered later.

mod operators;
mod status;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::operations::oncegate;
use crate::support::{Gate, Plan, Reply, Request, Response, Signal, Upstream, eventually, store};

const JSON: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"charge\":1}";
const ACCEPT: &str = "mode = \"accept\"\n";

/// Redis may lose what it has accepted: the configuration refuses it there (`tests/config-errors/accepting.toml`).
pub fn is_refused_here() -> bool {
    store::kind() == "redis"
}

fn accepting(upstream: &Upstream, more: &str) -> Plan {
    Gate::before(upstream).defaults(&format!("{ACCEPT}{more}"))
}

fn code(answer: &Response) -> u16 {
    let start = String::from_utf8_lossy(&answer.head.start).into_owned();
    start.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status")
}

#[track_caller]
fn expect_accepted(answer: &Response) -> String {
    assert!(answer.retry_after() >= 1);
    expect_accepted_before(answer)
}

/// The 202 of a request that was accepted before, and may have its end.
#[track_caller]
fn expect_accepted_before(answer: &Response) -> String {
    answer.expect(202, "accepted");
    assert!(answer.get("date").is_some(), "{}", answer.show());
    assert_eq!(answer.get("preference-applied").as_deref(), Some("respond-async"), "{}", answer.show());
    let location = answer.get("location").expect("a 202 has a location");
    assert!(location.starts_with("/.well-known/oncegate/requests/"), "{location}");
    location
}

/// The id of the request with this status.
fn id_of(location: &str) -> String {
    location.rsplit('/').next().expect("a path has a last part").to_owned()
}

/// The name of its one route.
fn route_of(gate: &Gate) -> String {
    let routes = gate.admin("GET", "/api/v1/routes", None).json();
    routes["routes"][0]["name"].as_str().expect("a route").to_owned()
}

fn status(gate: &Gate, location: &str) -> Value {
    Request::get(location).send(gate).json()
}

#[track_caller]
fn wait_for(gate: &Gate, location: &str, state: &str) -> Value {
    eventually("it is delivered", || Some(status(gate, location)).filter(|status| status["state"] == state))
}

#[test]
fn a_request_is_accepted_delivered_and_answered() {
    if is_refused_here() {
        return;
    }
    let held = Signal::new();
    let hold = held.clone();
    let upstream = Upstream::start(move |_| Reply::raw(JSON).hold_until(&hold));
    let gate = accepting(&upstream, "").start();
    let body = "{\"amount\":1}";
    let location = expect_accepted(&gate.post("/charges?x=1", "k-1", body));
    upstream.wait_for_runs(1);
    assert_eq!(wait_for(&gate, &location, "in-flight")["state"], "in-flight");
    // A retry gets the same, and so does nobody else.
    assert_eq!(expect_accepted(&gate.post("/charges?x=1", "k-1", body)), location);
    gate.post("/charges?x=1", "k-1", "{\"amount\":2}").expect_problem(422, "key-reused");
    held.open();
    let status = wait_for(&gate, &location, "completed");
    assert_eq!(status["status"], 200);
    let replay = gate.post("/charges?x=1", "k-1", body);
    replay.expect(200, "replayed");
    assert_eq!(replay.text(), "{\"charge\":1}");
    for answer in [
        Request::get(&format!("{location}?answer")).send(&gate),
        Request::get(&location).header("accept", "application/json").send(&gate),
    ] {
        answer.expect(200, "replayed");
        assert_eq!(answer.text(), "{\"charge\":1}");
    }
    let seen = upstream.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(
        (seen[0].start_line().contains(" /charges?x=1 "), seen[0].body.bytes.as_slice()),
        (true, body.as_bytes())
    );
    assert_eq!(seen[0].key().as_deref(), Some("k-1"));
    assert!(seen[0].head.get("idempotency-attempt").is_some());
}

#[test]
fn a_client_may_prefer_it() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Gate::before(&upstream).defaults("async = \"allow\"\n").start();
    let post = |key: &str| Request::post("/charges").key(key).body("{}");
    gate.post("/charges", "now", "{}").expect(200, "executed");
    let location = expect_accepted(&post("later").header("prefer", "respond-async, wait=5").send(&gate));
    wait_for(&gate, &location, "completed");
    gate.post("/charges", "later", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 2);
    // Where the route does not allow it, the preference is nothing.
    let gate = Gate::before(&upstream).start();
    post("plain").header("prefer", "respond-async").send(&gate).expect(200, "executed");
}

#[test]
fn a_release_is_delivered_again_and_given_up_in_the_end() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| match (request.key().as_deref(), request.nth) {
        (Some("late"), 3..) => Reply::ok("done"),
        _ => Reply::status("503 Service Unavailable", "no"),
    });
    let gate = accepting(&upstream, "deliver = { attempts = 4, backoff = \"10ms\", max_backoff = \"20ms\" }\n").start();
    let late = expect_accepted(&gate.post("/charges", "late", "{}"));
    wait_for(&gate, &late, "completed");
    assert_eq!(upstream.runs(), 3);
    let never = expect_accepted(&gate.post("/charges", "never", "{}"));
    let dead = wait_for(&gate, &never, "dead");
    assert_eq!(dead["attempts"], 4, "{dead}");
    assert!(dead["reason"].as_str().is_some_and(|reason| reason.contains("503")), "{dead}");
    assert_eq!(upstream.runs_of("never"), 4);
    let retry = gate.post("/charges", "never", "{}");
    assert_eq!((expect_accepted_before(&retry), &retry.json()["state"]), (never.clone(), &json!("dead")));
    assert_eq!(retry.get("retry-after"), None, "nothing is to be waited for: {}", retry.show());
    // An operator queues it again.
    let id = never.rsplit('/').next().expect("a path has a last part");
    let listed = gate.admin("GET", "/api/v1/deliveries?state=dead", None).json();
    assert_eq!((&listed["deliveries"][0]["id"], &listed["deliveries"][0]["state"]), (&json!(id), &json!("dead")));
    let retry = format!("/api/v1/records/{id}/retry");
    assert_eq!(code(&gate.admin("POST", &retry, Some(&json!({"reason": "it is back"})))), 204);
    eventually("it is delivered", || (upstream.runs_of("never") == 8).then_some(()));
    wait_for(&gate, &never, "dead");
    let audit = gate.admin("GET", "/api/v1/audit?action=retry", None).json();
    assert_eq!(audit["entries"][0]["reason"], "it is back", "{audit}");
    let before = &audit["entries"][0]["before"];
    assert_eq!((&before["state"], &before["attempts"]), (&json!("dead"), &json!(4)), "{audit}");
    // What waits or is gone cannot be retried.
    assert_eq!(code(&gate.admin("DELETE", &format!("/api/v1/records/{id}?reason=x"), None)), 204);
    assert_eq!(code(&gate.admin("POST", &retry, Some(&json!({"reason": "again"})))), 404);
    assert_eq!(code(&Request::get(&never).send(&gate)), 404);
}

#[test]
fn a_scope_is_delivered_in_order_and_one_at_a_time() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(20)));
    let more = "deliver = { order = \"scope\" }\nscope = [\"header:X-Tenant\"]\n";
    let gate = accepting(&upstream, more).start();
    let mut last = HashSet::new();
    for nth in 0..10 {
        for tenant in ["a", "b"] {
            let request = Request::post("/charges").key(&format!("{tenant}-{nth:02}")).header("x-tenant", tenant);
            last.insert(expect_accepted(&request.body("{}").send(&gate)));
        }
    }
    eventually("it is delivered", || (upstream.runs() == 20).then_some(()));
    let keys: Vec<String> = upstream.seen().iter().filter_map(|request| request.key()).collect();
    for tenant in ["a", "b"] {
        let own: Vec<_> = keys.iter().filter(|key| key.starts_with(tenant)).cloned().collect();
        let mut sorted = own.clone();
        sorted.sort();
        assert_eq!(own, sorted);
    }
    assert_eq!(last.len(), 20);
}

#[test]
fn a_rate_is_kept() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = accepting(&upstream, "deliver = { rate = \"10/s\" }\n").start();
    let began = Instant::now();
    for nth in 0..6 {
        expect_accepted(&gate.post("/charges", &format!("k-{nth}"), "{}"));
    }
    eventually("it is delivered", || (upstream.runs() == 6).then_some(()));
    // Between six there are five pauses.
    assert!(began.elapsed() >= Duration::from_millis(480), "{:?}", began.elapsed());
}

#[test]
fn nothing_is_accepted_that_is_too_large_or_has_no_key() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = accepting(&upstream, "max_request_body = \"1KiB\"\n").start();
    gate.post("/charges", "k-1", &"x".repeat(2000)).expect_problem(413, "request-too-large");
    Request::post("/charges").body("{}").send(&gate).expect_bare_problem(400, "key-missing");
    assert_eq!(gate.admin("GET", "/api/v1/deliveries", None).json()["deliveries"], json!([]));
    assert_eq!(upstream.runs(), 0);
}

/// Gates that are killed at any moment lose nothing that was accepted and run nothing twice.
#[test]
fn a_gate_that_is_killed_loses_nothing_and_runs_nothing_twice() {
    if is_refused_here() {
        return;
    }
    // Slow enough that requests wait when the gate is killed.
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(20)));
    let mut plan = accepting(&upstream, "lease = \"1s\"\ndeliver = { concurrency = 2 }\n");
    let (mut accepted, mut queued, mut completed) = (Vec::new(), 0, 0);
    for round in 0..6 {
        let gate = plan.start();
        for nth in 0..20 {
            let key = format!("{round}-{nth}");
            accepted.push((key.clone(), expect_accepted(&gate.post("/charges", &key, "{}"))));
        }
        std::thread::sleep(Duration::from_millis(7 * round));
        plan = gate.kill9();
        queued += accepted.len() - upstream.runs();
    }
    assert!(queued > 0, "nothing was left to be lost");
    let gate = plan.start();
    let deadline = Instant::now() + Duration::from_secs(60);
    for (key, location) in &accepted {
        loop {
            let state = status(&gate, location)["state"].clone();
            if state == "completed" || state == "unknown" {
                assert!(upstream.runs_of(key) <= 1, "{key} ran twice");
                assert!(state == "unknown" || upstream.runs_of(key) == 1, "{key} is completed and did not run");
                completed += usize::from(state == "completed");
                break;
            }
            assert!(Instant::now() < deadline, "{key} is {state}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // No more than two were under way at each kill.
    assert!(completed >= accepted.len() - 2 * 6, "{completed} of {} are completed", accepted.len());
}

/// What is in flight at the end of a drain goes on after the next start.
#[test]
fn a_drain_leaves_what_is_queued_to_the_next_start() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(100)));
    let gate = accepting(&upstream, "deliver = { concurrency = 1 }\n").start();
    let locations: Vec<_> =
        (0..8).map(|nth| expect_accepted(&gate.post("/charges", &format!("k-{nth}"), "{}"))).collect();
    upstream.wait_for_runs(1);
    let gate = gate.stop().start();
    for location in &locations {
        wait_for(&gate, location, "completed");
    }
    assert_eq!(upstream.runs(), 8);
}

#[test]
fn what_is_queued_is_encrypted_and_its_key_may_be_replaced() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let plan = accepting(&upstream, "");
    let key = |id: u8| {
        let path = plan.path(&format!("key-{id}"));
        std::fs::write(&path, [id; 32]).unwrap();
        format!("{{ id = \"key-{id}\", file = \"{}\" }}", path.display())
    };
    let with = |keys: &[String]| plan.clone().store(&format!("encryption_keys = [{}]\n", keys.join(", ")));
    let counted = |gate: &Gate, id: u8| gate.metric("oncegate_records_by_key", &[&format!("key=\"key-{id}\"")]);
    let gate = with(&[key(1)]).start();
    let pause = json!({"route": route_of(&gate), "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    let request = Request::post("/charges").key("k-1").header("x-secret-name", "Ada").body("{\"card\":\"4242424242\"}");
    let location = expect_accepted(&request.send(&gate));
    gate.stop();
    if store::kind() == "sqlite" {
        let store = std::fs::read(plan.path("gate.db")).unwrap();
        for secret in ["4242424242", "x-secret-name"] {
            assert!(!store.windows(secret.len()).any(|part| part == secret.as_bytes()), "{secret}");
        }
    }
    let gate = with(&[key(2), key(1)]).start();
    eventually("it is counted", || (counted(&gate, 1) > 0.0).then_some(()));
    let done = gate.admin("POST", "/api/v1/records/reseal", Some(&json!({}))).json();
    assert_eq!((&done["resealed"], &done["unopened"], &done["after"]), (&json!(1), &json!(0), &Value::Null), "{done}");
    eventually("it has the new key", || (counted(&gate, 1) < 1.0 && counted(&gate, 2) > 0.0).then_some(()));
    gate.stop();
    let gate = with(&[key(2)]).start();
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause))), 204);
    wait_for(&gate, &location, "completed");
    assert_eq!(upstream.seen()[0].body.bytes, b"{\"card\":\"4242424242\"}");
    assert_eq!(upstream.seen()[0].head.get("x-secret-name").as_deref(), Some("Ada"));
}

/// Its client is not there to see that: the delivery has its end when the attempt has.
#[test]
fn an_answer_that_breaks_off_after_some_pieces_is_no_end_of_a_delivery() {
    if is_refused_here() {
        return;
    }
    let moment = Duration::from_millis(100);
    let upstream = Upstream::start(move |_| {
        let head = Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n");
        head.pause(moment).then("4\r\nmore\r\n").pause(moment).then("4\r\nmore\r\n").pause(moment).close()
    });
    let gate = accepting(&upstream, "body = \"stream\"\n").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let dead = || gate.admin("GET", "/api/v1/deliveries?state=dead", None).json()["deliveries"].clone();
    let dead = eventually("it is given up", || Some(dead()).filter(|dead| dead[0]["id"] == id_of(&location)));
    assert_eq!(dead[0]["reason"], "outcome-unknown", "{dead}");
    assert_eq!(status(&gate, &location)["state"], "unknown");
}

/// By its record, which says for how long it is kept, and by the store, which does so.
#[test]
fn an_outcome_is_unknown_since_it_is_whatever_the_configuration_says_by_then() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let plan = accepting(&upstream, "");
    let with = |ttl: &str| plan.clone().defaults(&format!("{ACCEPT}unknown_ttl = \"{ttl}\"\n"));
    let gate = with("30d").start();
    let pause = json!({"route": route_of(&gate), "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    gate.stop();
    let gate = with("7d").start();
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause))), 204);
    wait_for(&gate, &location, "unknown");
    let record = gate.admin("GET", &format!("/api/v1/records/{}", id_of(&location)), None).json();
    // RFC 3339 sorts as it is.
    assert!(record["unknown_since"].as_str() >= record["claimed_at"].as_str(), "{record}");
}

/// As those of records: a retry of what is forgotten would be accepted again, and its route may be gone.
#[test]
fn what_is_queued_keeps_its_rules_and_its_route() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = accepting(&upstream, "").start();
    let pause = json!({"route": route_of(&gate), "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let plan = gate.stop();
    let other_scope = plan.clone().defaults(&format!("{ACCEPT}scope = [\"header:X-Tenant?\"]\n"));
    let other_path =
        "[[routes]]\nname = \"refund\"\nnamespace = \"default\"\nmethods = [\"POST\"]\npath = \"/refunds\"\n";
    for changed in [other_scope, plan.clone().routes(other_path)] {
        let mut process = changed.spawn();
        let status = process.wait();
        assert!(!status.success() && process.log().contains("would forget 1 live key"), "{}", process.log());
    }
    let gate = plan.start();
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause))), 204);
    wait_for(&gate, &location, "completed");
    assert_eq!(upstream.runs(), 1);
}

/// A client that waits for an attempt of its own delivers nothing for another.
#[test]
fn nothing_is_accepted_while_another_client_waits_for_the_attempt() {
    if is_refused_here() {
        return;
    }
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("503 No", "").hold_until(&held));
    let gate = Gate::before(&upstream).defaults("async = \"allow\"").start();
    let post = || Request::post("/charges").key("k-1").body("{}");
    let (address, first) = (gate.address, post());
    let waiting = std::thread::spawn(move || first.send(address));
    upstream.wait_for_runs(1);
    let second = post().header("Prefer", "respond-async").send(&gate);
    second.expect_problem(409, "in-flight");
    signal.open();
    waiting.join().unwrap().expect(503, "released");
    // The attempt is over: now it is accepted.
    expect_accepted(&post().header("Prefer", "respond-async").send(&gate));
}

#[test]
fn a_request_that_came_in_time_is_delivered_however_late() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::raw(JSON));
    let time = "request_time = { from = \"header:x-time\", max_age = \"8s\", skew = \"1s\" }";
    let gate = accepting(&upstream, time).start();
    let pause = json!({"route": route_of(&gate), "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let post = || Request::post("/charges").key("k-1").header("X-Time", now.to_string()).body("{}");
    let location = expect_accepted(&post().send(&gate));
    let too_late = std::time::UNIX_EPOCH + Duration::from_secs(now + 9);
    std::thread::sleep(too_late.duration_since(std::time::SystemTime::now()).unwrap_or_default());
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause))), 204);
    wait_for(&gate, &location, "completed");
    Request::post("/charges")
        .key("k-2")
        .header("X-Time", now.to_string())
        .body("{}")
        .send(&gate)
        .expect_problem(400, "request-expired");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn what_no_route_delivers_any_more_is_named() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::raw(JSON));
    let routes = |name: &str, namespace: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\nnamespace = \"{namespace}\"\npath = \"/charges\"\nmethods = [\"POST\"]\nmode = \"accept\"\n"
        )
    };
    let gate = Gate::before(&upstream).routes(&routes("old", "n")).arg("--accept-identity-change").start();
    let pause = json!({"route": "old", "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let mut gate = gate;
    // Identities are made with the namespace: what has another is not found under this route's name either.
    for (name, namespace) in [("new", "n"), ("old", "other")] {
        gate = gate.stop().routes(&routes(name, namespace)).start();
        let is_it = |line: &str| {
            line.contains("has no route of that name and namespace")
                && line.contains("\"route\":\"old\"")
                && line.contains("\"namespace\":\"n\"")
        };
        eventually("a warning", || gate.log().lines().any(is_it).then_some(()));
    }
}
