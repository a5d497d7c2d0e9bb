//! What an operator does with requests that were accepted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[test]
fn an_unknown_outcome_is_not_delivered_again() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::nothing().close(),
        _ => Reply::ok("done"),
    });
    let gate = accepting(&upstream, "").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let unknown = wait_for(&gate, &location, "unknown");
    assert_eq!(unknown["attempts"], 1, "{unknown}");
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    let id = id_of(&location);
    // It cannot be delivered again before somebody has found out what became of it.
    let retry = json!({"reason": "run it"});
    // Its record is unknown a little before its delivery is given up.
    let refused = eventually("it is given up", || {
        let refused = gate.admin("POST", &format!("/api/v1/records/{id}/retry"), Some(&retry));
        (refused.json()["code"] == "outcome-unknown").then_some(refused)
    });
    assert_eq!(code(&refused), 409, "{}", refused.show());
    // An operator finds that nothing happened. Its client does not come back: it is delivered where the operator says so.
    let url = format!("http://{}", gate.admin);
    let release = ["records", "resolve", &id, "--release", "--reason", "not in the ledger", "--admin", &url];
    let (status, out, error) = oncegate(&release);
    let retry_it = format!("{id} released: `oncegate records retry {id}` delivers its request again");
    assert!(status == 0 && out.starts_with(&retry_it), "{out}{error}");
    assert_eq!(wait_for(&gate, &location, "dead")["attempts"], 1);
    assert_eq!(code(&gate.admin("POST", &format!("/api/v1/records/{id}/retry"), Some(&retry))), 204);
    wait_for(&gate, &location, "completed");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn a_bulk_release_says_which_accepted_requests_stay_dead() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let gate = accepting(&upstream, "").start();
    for key in ["k-1", "k-2"] {
        let location = expect_accepted(&gate.post("/charges", key, "{}"));
        wait_for(&gate, &location, "unknown");
    }
    let dead =
        || gate.admin("GET", "/api/v1/deliveries?state=dead", None).json()["deliveries"].as_array().map(Vec::len);
    eventually("they are given up", || (dead() == Some(2)).then_some(()));
    let url = format!("http://{}", gate.admin);
    let release = ["records", "resolve", "--state", "unknown", "--release", "--admin", &url];
    let (_, dry, _) = oncegate(&[&release[..], &["--dry-run"]].concat());
    let (status, done, error) = oncegate(&[&release[..], &["--yes", "--reason", "not in the ledger"]].concat());
    assert_eq!(status, 0, "{error}");
    for said in [dry, done] {
        let left =
            "2 of them are of accepted requests, which stay dead until `oncegate records retry` delivers them again";
        assert!(said.contains(left), "{said}");
    }
    assert_eq!(dead(), Some(2));
}

#[test]
fn all_that_was_given_up_is_retried_at_once_but_what_may_have_run() {
    if is_refused_here() {
        return;
    }
    let is_back = Arc::new(AtomicBool::new(false));
    let back = Arc::clone(&is_back);
    let upstream = Upstream::start(move |request| match request.key().is_some_and(|key| key == "lost") {
        true => Reply::nothing().close(),
        false if back.load(Ordering::SeqCst) => Reply::ok("done"),
        false => Reply::status("503 Service Unavailable", "later"),
    });
    let gate = accepting(&upstream, "deliver = { attempts = 1 }\n").start();
    let keys: Vec<String> = (0..6).map(|number| format!("k-{number}")).collect();
    let mut locations: Vec<String> =
        keys.iter().map(|key| expect_accepted(&gate.post("/charges", key, "{}"))).collect();
    expect_accepted(&gate.post("/charges", "lost", "{}"));
    let listed = |state: &str| {
        let page = gate.admin("GET", &format!("/api/v1/deliveries?state={state}"), None).json();
        page["deliveries"].as_array().map(Vec::len)
    };
    eventually("they are given up", || (listed("dead") == Some(7)).then_some(()));
    // What is cancelled is in the audit log.
    let purged = id_of(&locations.pop().unwrap());
    assert_eq!(code(&gate.admin("DELETE", &format!("/api/v1/records/{purged}?reason=cancelled"), None)), 204);
    let entry = gate.admin("GET", &format!("/api/v1/audit?record={purged}"), None).json()["entries"][0].clone();
    assert_eq!((&entry["before"]["state"], &entry["before"]["attempts"]), (&json!("dead"), &json!(1)), "{entry}");
    assert!(entry["namespace"].is_string() && entry["action"] == "purge", "{entry}");
    is_back.store(true, Ordering::SeqCst);
    let url = format!("http://{}", gate.admin);
    let retry = |more: &[&str]| oncegate(&[&["records", "retry", "--admin", &url], more].concat());
    let (status, said, _) = retry(&["--all", "--dry-run"]);
    assert!(
        status == 0 && said.starts_with("5 accepted requests would be queued again; nothing was changed"),
        "{said}"
    );
    assert!(said.contains("1 accepted request left alone, as their outcome is unknown"), "{said}");
    let dead = gate.admin("GET", "/api/v1/deliveries?state=dead", None).json()["deliveries"].clone();
    for delivery in dead.as_array().unwrap() {
        let (_, said, _) = retry(&[delivery["id"].as_str().unwrap(), "--dry-run"]);
        let is_unknown = delivery["reason"] == "outcome-unknown";
        assert_eq!(said.starts_with("1 accepted request left alone"), is_unknown, "{delivery}: {said}");
    }
    for (wrong, why) in [
        (&["--all"][..], "--reason"),
        (&["--state", "unknown", "--reason", "x"], "what can be retried is dead"),
        (&["--reason", "x"], "required"),
    ] {
        let (status, _, error) = retry(wrong);
        assert!(status == 2 && error.contains(why), "{wrong:?}: {error}");
    }
    assert_eq!((listed("dead"), upstream.runs()), (Some(6), 7));
    let (status, said, error) = retry(&["--key", "k-0", "--reason", "the ledger is back", "--yes"]);
    assert!(status == 0 && said.starts_with("1 accepted request queued again"), "{said}{error}");
    let (status, said, error) = retry(&["--route", &route_of(&gate), "--reason", "the ledger is back", "--yes"]);
    assert!(status == 0 && said.starts_with("4 accepted requests queued again"), "{said}{error}");
    for location in &locations {
        wait_for(&gate, location, "completed");
    }
    assert_eq!((listed("dead"), upstream.runs_of("lost"), upstream.runs()), (Some(1), 1, 12));
    let (_, audit, _) = oncegate(&["audit", "--action", "bulk-retry", "--admin", &url]);
    assert!(audit.contains("4 accepted requests (route="), "{audit}");
    assert!(audit.contains("1 accepted request (key=(not kept))"), "{audit}");
}

/// It is kept for longer than its head says, and so seems to have been given up later than now.
#[test]
fn what_was_given_up_under_a_longer_unknown_ttl_is_retried() {
    if is_refused_here() {
        return;
    }
    let signal = Signal::new();
    let held = signal.clone();
    // The first attempt is the former gate's, and the last one the next gate's.
    let upstream = Upstream::start(move |_| Reply::status("503 Service Unavailable", "later").hold_until(&held));
    let deliver = "deliver = { attempts = 2, backoff = \"20ms\" }\n";
    let plan = accepting(&upstream, &format!("{deliver}unknown_ttl = \"7d\"\n"));
    let gate = plan.start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    upstream.wait_for_runs(1);
    plan.defaults(&format!("{ACCEPT}{deliver}unknown_ttl = \"30d\"\n")).config();
    gate.sighup();
    eventually("the reload", || gate.log().contains("configuration reloaded").then_some(()));
    signal.open();
    wait_for(&gate, &location, "dead");
    let url = format!("http://{}", gate.admin);
    let (_, said, _) = oncegate(&["records", "retry", "--all", "--dry-run", "--admin", &url]);
    assert!(said.starts_with("1 accepted request would be queued again"), "{said}");
}

#[test]
fn an_unknown_outcome_that_an_operator_completes_is_over() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let gate = accepting(&upstream, "").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    wait_for(&gate, &location, "unknown");
    let id = id_of(&location);
    let listed = || gate.admin("GET", "/api/v1/deliveries", None).json()["deliveries"].as_array().map(Vec::len);
    assert_eq!(listed(), Some(1));
    let complete = json!({"action": "complete", "status": 201, "reason": "it is in the ledger"});
    assert_eq!(code(&gate.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(&complete))), 204);
    assert_eq!((status(&gate, &location)["state"].as_str(), listed()), (Some("completed"), Some(0)));
    gate.post("/charges", "k-1", "{}").expect(201, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_route_that_accepts_nothing_cannot_be_held_back() {
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = Gate::before(&upstream).start();
    let body = json!({"route": route_of(&gate), "reason": "maintenance"});
    let refused = gate.admin("POST", "/api/v1/deliveries/pause", Some(&body));
    assert_eq!(code(&refused), 409, "{}", refused.show());
    assert!(refused.text().contains("accepts no requests"), "{}", refused.show());
}

/// Where another attempt would be made, none is any more.
#[test]
fn what_was_given_up_is_not_said_to_be_under_way() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let gate = accepting(&upstream, "recovery = \"retry\"\ndeliver = { attempts = 1 }\n").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let unknown = wait_for(&gate, &location, "unknown");
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 1);
    let listed = gate.admin("GET", "/api/v1/deliveries", None).json();
    assert_eq!((&unknown["attempts"], &listed["deliveries"][0]["attempts"]), (&json!(1), &json!(1)), "{listed}");
}

#[test]
fn an_operator_holds_a_route_back() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = accepting(&upstream, "").start();
    let ask = |verb: &str| {
        let body = json!({"route": route_of(&gate), "reason": "maintenance"});
        code(&gate.admin("POST", &format!("/api/v1/deliveries/{verb}"), Some(&body)))
    };
    assert_eq!(ask("pause"), 204);
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!((upstream.runs(), &status(&gate, &location)["state"]), (0, &json!("queued")));
    assert_eq!(gate.admin("GET", "/api/v1/deliveries", None).json()["paused"], json!([route_of(&gate)]));
    // There is no record of it yet: the answer names the command that shows the request.
    let id = id_of(&location);
    let shown = gate.admin("GET", &format!("/api/v1/records/{id}"), None);
    assert!(code(&shown) == 404 && shown.text().contains("deliveries list"), "{}", shown.show());
    // It holds after a new start.
    let gate = gate.stop().start();
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(upstream.runs(), 0);
    let body = json!({"route": route_of(&gate), "reason": "done"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&body))), 204);
    wait_for(&gate, &location, "completed");
    let wrong = json!({"route": "nowhere", "reason": "x"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&wrong))), 404);
}

#[test]
fn what_an_operator_releases_while_its_route_is_held_back_is_delivered_afterwards() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::ok("late").delay(Duration::from_secs(3)),
        _ => Reply::ok("done"),
    });
    let gate = accepting(&upstream, "lease = \"1s\"\n").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    upstream.wait_for_runs(1);
    let hold = json!({"route": route_of(&gate), "reason": "maintenance"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&hold))), 204);
    let gate = gate.kill9().start();
    let id = id_of(&location);
    let url = format!("http://{}", gate.admin);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let release = ["records", "resolve", &id, "--release", "--reason", "not in the ledger", "--admin", &url];
        let (status, out, error) = oncegate(&release);
        if status == 0 {
            assert_eq!(out, format!("{id} released: its request is queued, and a gate delivers it\n"));
            break;
        }
        // The lease of the gate that was killed goes on for a moment.
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&hold))), 204);
    wait_for(&gate, &location, "completed");
    assert_eq!(upstream.runs(), 2);
}

/// What one tenant sent, and what is still to be delivered of it.
#[test]
fn a_purge_by_scope_reaches_what_is_queued_and_what_is_dead() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| match request.head.get("x-tenant").as_deref() {
        Some("acme") if request.head.get("x-dead").is_some() => {
            Reply::raw("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
        }
        _ => Reply::ok("done"),
    });
    let scope = "scope = [\"header:X-Tenant\"]\ndeliver = { attempts = 1 }\n";
    let gate = accepting(&upstream, scope).start();
    let send = |tenant: &str, key: &str| Request::post("/charges").key(key).header("x-tenant", tenant).body("{}");
    let status_for =
        |tenant: &str, location: &str| Request::get(location).header("x-tenant", tenant).send(&gate).json();
    let dead = expect_accepted(&send("acme", "k-1").header("x-dead", "1").send(&gate));
    let is_dead = || Some(()).filter(|()| status_for("acme", &dead)["state"] == "dead");
    eventually("it is given up", is_dead);
    let pause = json!({"route": route_of(&gate), "reason": "look"});
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/pause", Some(&pause))), 204);
    for (tenant, key) in [("acme", "k-2"), ("acme", "k-3"), ("globex", "k-2")] {
        expect_accepted(&send(tenant, key).send(&gate));
    }
    let purge = |more: Value| {
        let mut body = json!({"filter": {"scope": "header:X-Tenant=acme"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        gate.admin("POST", "/api/v1/records/purge", Some(&body)).json()
    };
    let counts =
        |report: &Value| ["matched", "accepted", "done", "failed"].map(|name| report[name].as_u64().unwrap_or(0));
    assert_eq!(counts(&purge(json!({"dry_run": true}))), [3, 3, 0, 0]);
    let listed = || gate.admin("GET", "/api/v1/deliveries", None).json()["deliveries"].as_array().unwrap().len();
    assert_eq!(listed(), 4);
    assert_eq!(counts(&purge(json!({"reason": "erased"}))), [3, 3, 3, 0]);
    assert_eq!(listed(), 1);
    // By state, records alone are meant.
    let of_state = json!({"filter": {"state": "completed"}, "reason": "a test"});
    assert_eq!(counts(&gate.admin("POST", "/api/v1/records/purge", Some(&of_state)).json()), [0; 4]);
    assert_eq!(code(&gate.admin("POST", "/api/v1/deliveries/resume", Some(&pause))), 204);
    upstream.wait_for_runs(2);
    let of_all = json!({"all": true, "reason": "a test"});
    eventually("the other is delivered and removed", || {
        let done = gate.admin("POST", "/api/v1/records/purge", Some(&of_all)).json();
        (counts(&done) == [1, 0, 1, 0]).then_some(())
    });
    assert_eq!((upstream.runs(), listed()), (2, 0));
}
