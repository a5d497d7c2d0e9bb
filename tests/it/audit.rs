//! The audit log: what operators did, read back from the store.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::{Gate, Plan, Reply, Request, Response, Upstream, eventually};

const SECRETS: [&str; 6] =
    ["secret-key", "secret-body", "secret-answer", "secret-token", "secret-auth", "secret-tenant"];

fn entries(gate: &Gate, query: &str) -> Vec<Value> {
    let page = ask(gate, "GET", &format!("/api/v1/audit?{query}"), None);
    assert_eq!(page.status, 200, "{}", page.show());
    page.json()["entries"].as_array().expect("a list").clone()
}

/// Asks with the token of the plan that [`with_a_token`] makes.
fn ask(gate: &Gate, method: &str, target: &str, body: Option<&Value>) -> Response {
    let request =
        Request::new(method, target).header("Host", "127.0.0.1").header("Authorization", "Bearer secret-token");
    let request = match body {
        Some(body) => request.header("Content-Type", "application/json").body(body.to_string()),
        None => request,
    };
    request.send(gate.admin)
}

fn with_a_token(plan: &Plan) -> Plan {
    std::fs::write(plan.path("ops"), "secret-token\n").unwrap();
    let token = format!("tokens = [{{ name = \"ops\", role = \"operator\", file = {:?} }}]", plan.path("ops"));
    plan.clone().admin(&token)
}

/// An upstream that breaks the first connections, and then answers.
fn breaking(count: usize) -> Upstream {
    Upstream::start(move |request| match request.nth {
        nth if nth <= count => Reply::default().pause(Duration::from_millis(1)).reset(),
        nth => Reply::ok(format!("secret-answer {nth}")),
    })
}

fn post(gate: &Gate, key: &str) -> Response {
    let request = Request::post("/charges").key(key).header("Authorization", "Bearer secret-auth");
    request.header("X-Tenant", "secret-tenant").body("secret-body").send(gate)
}

fn id_of(gate: &Gate, key: &str) -> String {
    let found = ask(gate, "GET", &format!("/api/v1/records?key={key}"), None).json();
    found["records"][0]["id"].as_str().expect("an id").to_owned()
}

#[test]
fn each_deed_is_read_back_and_no_secret_with_it() {
    let upstream = breaking(3);
    // Records of a route that asks by itself keep their keys.
    let asks = "recovery = { probe = \"/by-key/{key}\", after = \"1h\", every = \"1h\" }";
    let plan = with_a_token(&Gate::before(&upstream)).defaults(&format!("scope = [\"header:X-Tenant\"]\n{asks}"));
    let key = plan.path("key");
    std::fs::write(&key, STANDARD.encode([7; 32])).unwrap();
    let plan = plan.store(&format!("encryption_keys = [{{ id = \"a\", file = {key:?} }}]"));
    let gate = plan.start();
    for key in ["secret-key-1", "secret-key-2", "secret-key-3"] {
        post(&gate, key).expect_problem(502, "upstream-broken");
    }
    for key in ["secret-key-4", "secret-key-5"] {
        post(&gate, key).expect(200, "executed");
    }
    let change = |method: &str, target: &str, body: Value, status: u16| {
        let answer = ask(&gate, method, target, Some(&body));
        assert_eq!(answer.status, status, "{target}: {}", answer.show());
    };
    let record = |key: &str| format!("/api/v1/records/{}", id_of(&gate, key));
    let release = json!({ "action": "release", "reason": "not booked" });
    change("POST", &format!("{}/resolve", record("secret-key-1")), release, 204);
    let body_base64 = STANDARD.encode("secret-answer");
    let headers = json!([["X-A", "secret-answer"]]);
    let complete = json!({ "action": "complete", "status": 201, "headers": headers, "body_base64": body_base64 });
    change("POST", &format!("{}/resolve", record("secret-key-2")), complete, 204);
    let read = ask(&gate, "GET", &format!("{}?answer=true&key=true", record("secret-key-4")), None);
    assert_eq!(read.status, 200, "{}", read.show());
    let removed = id_of(&gate, "secret-key-4");
    assert_eq!(ask(&gate, "DELETE", &format!("/api/v1/records/{removed}?reason=twice"), None).status, 204);
    let by_scope = json!({ "key": "secret-key-5", "scope": "header:X-Tenant=secret-tenant" });
    change("POST", "/api/v1/records/purge", json!({ "filter": by_scope, "reason": "erased" }), 200);
    let all = json!({ "all": true, "action": "release", "reason": "the night of the outage" });
    change("POST", "/api/v1/records/resolve", all, 200);
    change("POST", "/api/v1/records/reseal", json!({}), 200);
    change("POST", "/api/v1/reload", json!({}), 200);
    gate.sighup();
    eventually("the reload by a signal is in it", || (entries(&gate, "action=reload").len() == 2).then_some(()));
    eventually("and over", || (entries(&gate, "action=reload")[0]["outcome"] == "done").then_some(()));

    let found = entries(&gate, "since=1h");
    let word =
        |member: &str| -> Vec<&str> { found.iter().map(|entry| entry[member].as_str().unwrap_or_default()).collect() };
    let expected = [
        ["reload", "done", "-", ""],
        ["reload", "done", "ops", ""],
        ["reseal", "unchanged", "ops", ""],
        ["bulk-resolve", "done", "ops", "the night of the outage"],
        ["bulk-purge", "done", "ops", "erased"],
        ["purge", "done", "ops", "twice"],
        ["read-key", "done", "ops", ""],
        ["read-answer", "done", "ops", ""],
        ["resolve", "done", "ops", ""],
        ["resolve", "done", "ops", "not booked"],
    ];
    for (place, member) in ["action", "outcome", "by", "reason"].into_iter().enumerate() {
        assert_eq!(word(member), expected.map(|entry| entry[place]), "{found:?}");
    }
    assert_eq!(found[4]["filter"], json!({ "key": "(not kept)", "scope": "(not kept)" }));
    assert_eq!((&found[4]["done"], &found[3]["done"]), (&json!(1), &json!(1)));
    assert_eq!((&found[5]["record"], &found[5]["before"]["state"]), (&json!(removed), &json!("completed")));
    let text = json!(found).to_string();
    for secret in SECRETS {
        assert!(!text.contains(secret), "{secret}: {text}");
        let is_leak = |line: &&str| line.contains("oncegate::audit") && line.contains(secret);
        assert_eq!(gate.log().lines().find(is_leak), None, "{secret}");
    }

    // It is in the store.
    let gate = gate.kill9().start();
    assert_eq!(entries(&gate, "since=1h"), found);
    assert_eq!(entries(&gate, &format!("record={removed}")).len(), 3);
}

#[test]
fn entries_expire_as_admin_audit_ttl_says() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = with_a_token(&Gate::before(&upstream));
    let token = format!("tokens = [{{ name = \"ops\", role = \"operator\", file = {:?} }}]", plan.path("ops"));
    let purged = |gate: &Gate, key: &str| {
        post(gate, key).expect(200, "executed");
        let target = format!("/api/v1/records/{}?reason={key}", id_of(gate, key));
        assert_eq!(ask(gate, "DELETE", &target, None).status, 204);
    };
    let reasons = |gate: &Gate| -> Vec<String> {
        entries(gate, "action=purge").iter().map(|entry| entry["reason"].as_str().unwrap_or_default().into()).collect()
    };
    // Unless it says something else, they are kept for long.
    let gate = plan.start();
    purged(&gate, "kept");
    gate.stop();
    let gate = plan.clone().admin(&format!("{token}\naudit_ttl = \"5s\"")).start();
    purged(&gate, "soon-gone");
    assert_eq!(reasons(&gate), ["soon-gone", "kept"]);
    eventually("the entry expires", || (reasons(&gate) == ["kept"]).then_some(()));
}

/// An entry is durable before its change is.
#[test]
fn nothing_that_was_acknowledged_before_a_crash_lacks_an_entry() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = with_a_token(&Gate::before(&upstream));
    let gate = plan.start();
    let ids: Vec<String> = (0..60)
        .map(|nth| {
            let key = format!("k-{nth}");
            gate.post("/charges", &key, "{}").expect(200, "executed");
            id_of(&gate, &key)
        })
        .collect();
    let acknowledged = Arc::new(Mutex::new(Vec::new()));
    let (removing, address) = (Arc::clone(&acknowledged), gate.admin);
    let all = ids.clone();
    let remover = std::thread::spawn(move || {
        for id in all {
            let target = format!("/api/v1/records/{id}");
            let delete = Request::new("DELETE", &target).header("Host", "127.0.0.1");
            // The gate is killed while it works.
            let sent = std::panic::catch_unwind(|| delete.header("Authorization", "Bearer secret-token").send(address));
            match sent {
                Ok(answer) if answer.status == 204 => removing.lock().unwrap().push(id),
                _ => return,
            }
        }
    });
    eventually("some are removed", || (acknowledged.lock().unwrap().len() >= 15).then_some(()));
    let gate = gate.kill9().start();
    remover.join().expect("it ends");
    let acknowledged: BTreeSet<String> = acknowledged.lock().unwrap().iter().cloned().collect();
    let found = entries(&gate, "action=purge&limit=1000");
    let entered: BTreeSet<String> =
        found.iter().map(|entry| entry["record"].as_str().expect("an id").to_owned()).collect();
    let gone = |id: &&String| ask(&gate, "GET", &format!("/api/v1/records/{id}"), None).status == 404;
    let gone: BTreeSet<String> = ids.iter().filter(gone).cloned().collect();
    assert!(acknowledged.is_subset(&gone) && gone.is_subset(&entered), "{acknowledged:?} {gone:?} {entered:?}");
    // What came of the last is not known, perhaps.
    let begun = found.iter().filter(|entry| entry["outcome"] == "begun").count();
    assert!(begun <= 1 && entered.len() <= acknowledged.len() + 1, "{found:?}");
}

#[test]
fn an_accepted_identity_change_is_in_it() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = with_a_token(&Gate::before(&upstream));
    let gate = plan.clone().defaults("scope = [\"host\"]").start();
    for key in ["k-1", "k-2"] {
        gate.post("/charges", key, "{}").expect(200, "executed");
    }
    gate.stop();
    let changed = plan.defaults("scope = [\"header:Authorization\"]").arg("--accept-identity-change");
    let gate = changed.start();
    let found = entries(&gate, "");
    assert_eq!(found.len(), 1, "{found:?}");
    let entry = &found[0];
    assert_eq!((&entry["action"], &entry["outcome"]), (&json!("accept-identity-change"), &json!("done")));
    assert_eq!((&entry["keys"], &entry["namespaces"], &entry["by"]), (&json!(2), &json!(["all"]), &json!("-")));
    // Nothing is left to forget.
    let gate = gate.kill9().start();
    assert_eq!(entries(&gate, "").len(), 1);
}

#[test]
fn the_commands_show_it() {
    let upstream = breaking(1);
    let gate = with_a_token(&Gate::before(&upstream)).start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-broken");
    let id = id_of(&gate, "k-1");
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output =
            command.args(args).arg("--config").arg(gate.plan.config()).arg("--admin").arg(gate.admin.to_string());
        let output = output.output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let complete = ["records", "resolve", &id, "--complete", "--status", "201", "--body", "paid", "--reason", "found"];
    run(&complete);
    let listed = run(&["audit", "--since", "1h"]);
    let line = listed.lines().nth(1).expect("an entry");
    assert!(line.contains("  ops  resolve  done") && line.ends_with("found"), "{listed}");
    let shown = run(&["records", "show", &id, "--answer"]);
    let (record, rest) = shown.split_once("\n\nAT ").expect("a history");
    let (history, answer) = rest.split_once("\n\n").expect("an answer");
    assert!(record.contains("completed") && answer.contains("paid"), "{shown}");
    assert!(history.contains("read-answer") && history.contains("complete"), "{shown}");
}
