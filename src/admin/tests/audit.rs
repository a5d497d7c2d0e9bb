//! What operators do is in the audit log, and nothing is done without.

use super::*;
use crate::admin::testing::{AUDIT_TTL, Reply, start_with, with_store};
use crate::admin::{ReloadReport, ReloadRequest, Role};
use crate::store::sealed::{Keyring, Resealer, SealingKey};

const OPS: &str = "0123456789abcdef0123456789abcdef";
const BOARD: &str = "fedcba9876543210fedcba9876543210";

async fn ask(admin: &Admin, request: &str, token: &str, body: &str) -> Reply {
    let headers =
        format!("Host: oncegate.internal\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}\r\n");
    admin.send(request, &headers, body).await
}

/// A listener with an operator, `ops`, and a viewer, `board`, before a store that can fail.
async fn start_unreliable() -> (Admin, Arc<Unreliable>) {
    let tokens = [("ops", Role::Operator, OPS), ("board", Role::Viewer, BOARD)];
    let admin = start_with(&tokens).await;
    let store = Arc::new(Unreliable::new(admin.store.clone()));
    admin.state.set_store(store.clone());
    // Its own store is not taken any more, and gets its origins.
    (with_store(admin).await, store)
}

async fn entries(admin: &Admin, query: &str) -> Vec<Value> {
    let reply = ask(admin, &format!("GET /api/v1/audit{query}"), OPS, "").await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["entries"].as_array().unwrap().clone()
}

fn words(entries: &[Value], member: &str) -> Vec<String> {
    entries.iter().map(|entry| entry[member].as_str().unwrap_or_default().to_owned()).collect()
}

/// Answers reloads with these reports, one after another.
fn reloads(admin: &Admin, reports: Vec<ReloadReport>) {
    let (sender, mut reloads) = tokio::sync::mpsc::channel::<ReloadRequest>(1);
    admin.state.set_reloads(sender);
    tokio::spawn(async move {
        for report in reports {
            reloads.recv().await.unwrap().send(report).unwrap();
        }
    });
}

#[tokio::test]
async fn each_deed_has_an_entry_that_says_what_who_when_and_why() {
    let (admin, _) = start_unreliable().await;
    let (released, attempt) = admin.unknown("charge", KEY).await;
    let release = json!({"action": "release", "reason": "not in \"the books\"\n"}).to_string();
    assert_eq!(ask(&admin, &format!("POST /api/v1/records/{released}/resolve"), OPS, &release).await.status, 204);
    let removed = admin.completed("refund", KEY).await;
    for (query, status) in [("?answer=true&key=true", 200), ("?key=true", 200), ("?answer=false", 200)] {
        assert_eq!(ask(&admin, &format!("GET /api/v1/records/{removed}{query}"), OPS, "").await.status, status);
    }
    admin.pass(Duration::from_millis(1500));
    let remove = format!("DELETE /api/v1/records/{removed}?reason=twice");
    assert_eq!(ask(&admin, &remove, OPS, "").await.status, 204);
    let refused = ReloadReport::Refused { detail: "secret-in-a-file".into(), problems: Vec::new() };
    reloads(
        &admin,
        vec![ReloadReport::Reloaded { routes: 1, needs_restart: Vec::new(), warnings: Vec::new() }, refused],
    );
    assert_eq!(ask(&admin, "POST /api/v1/reload", OPS, "{}").await.status, 200);
    assert_eq!(ask(&admin, "POST /api/v1/reload", OPS, "{}").await.status, 422);

    let found = entries(&admin, "").await;
    let expected = ["reload", "reload", "purge", "read-key", "read-key", "read-answer", "resolve"];
    assert_eq!(words(&found, "action"), expected);
    assert_eq!(words(&found, "outcome"), ["unchanged", "done", "done", "done", "done", "done", "done"]);
    assert!(found.iter().all(|entry| entry["by"] == "ops"));
    assert!(words(&found, "client").iter().all(|client| client.starts_with("127.0.0.1:")), "{found:?}");
    let mut resolve = found[6].clone();
    resolve.as_object_mut().unwrap().remove("client");
    assert_eq!(
        resolve,
        json!({
            "id": "1", "at": "2026-01-01T00:00:00.000Z", "expires_at": "2026-01-08T00:00:00.000Z",
            "action": "resolve", "by": "ops", "record": released.to_string(), "reason": "not in \"the books\"\n",
            "outcome": "done", "resolution": "release", "namespace": "charge", "route": "charge",
            "before": {
                "state": "unknown", "claimed_at": "2026-01-01T00:00:00.000Z", "request": "00000000000000ab",
            },
        })
    );
    assert_eq!((&found[2]["at"], &found[2]["reason"]), (&json!("2026-01-01T00:00:01.500Z"), &json!("twice")));
    assert_eq!((&found[2]["before"]["state"], &found[2]["route"]), (&json!("completed"), &json!("refund")));
    let all = json!(found).to_string();
    let hex: String = attempt.0.iter().map(|byte| format!("{byte:02x}")).collect();
    for secret in [KEY, "8e03978e…9324", OPS, BOARD, "paid", "cGFpZA==", "secret-in-a-file", &hex] {
        assert!(!all.contains(secret), "{secret}: {all}");
    }
    assert_eq!(AUDIT_TTL, Duration::from_secs(7 * 86400));
}

#[tokio::test]
async fn a_change_of_many_has_one_entry_and_a_line_for_each() {
    let (lines, _logging) = logged();
    let (admin, _) = start_unreliable().await;
    for nth in 0..5 {
        admin.unknown("charge", &format!("key-{nth}")).await;
    }
    let change = async |path: &str, body: Value| {
        let reply = ask(&admin, &format!("POST /api/v1/records/{path}"), OPS, &body.to_string()).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
    };
    let filter = json!({"state": "unknown", "key": "key-0", "scope": "host=shop.example", "older_than": "1s"});
    change("purge", json!({"filter": filter, "dry_run": true})).await;
    assert_eq!(entries(&admin, "").await, Vec::<Value>::new(), "a dry run does nothing");
    change("purge", json!({"filter": filter, "reason": "erased"})).await;
    let routes = json!({"route": "é".repeat(5000)});
    change("resolve", json!({"filter": routes, "reason": "none", "action": "release"})).await;
    change("resolve", json!({"all": true, "reason": "all of them", "action": "release"})).await;
    let found = entries(&admin, "").await;
    assert_eq!(words(&found, "action"), ["bulk-resolve", "bulk-resolve", "bulk-purge"]);
    assert_eq!(words(&found, "outcome"), ["done", "unchanged", "unchanged"]);
    let all = &found[0];
    assert_eq!(
        (&all["filter"], &all["resolution"], &all["reason"]),
        (&json!({"all": true}), &json!("release"), &json!("all of them"),)
    );
    assert_eq!((&all["matched"], &all["done"], &all["failed"]), (&json!(5), &json!(5), &json!(0)));
    assert!(all["as_of"].is_string() && all["ids"].is_null() && all["record"].is_null(), "{all}");
    assert_eq!(found[1]["filter"]["route"].as_str().unwrap().chars().count(), 257);
    let hidden = json!({"state": "unknown", "key": "(not kept)", "scope": "(not kept)", "older_than": "1s"});
    assert_eq!(found[2]["filter"], hidden);
    assert_eq!(audit(&lines.text()).len(), 5, "a line for each");
}

#[tokio::test]
async fn nothing_is_done_without_an_entry() {
    let (admin, store) = start_unreliable().await;
    let (unknown, _) = admin.unknown("charge", KEY).await;
    let completed = admin.completed("refund", KEY).await;
    reloads(&admin, Vec::new());
    let release = json!({"action": "release", "reason": "none"}).to_string();
    let purge = json!({"filter": {"state": "unknown"}, "reason": "none"}).to_string();
    let resolve = json!({"all": true, "reason": "none", "action": "release"}).to_string();
    for fault in [Fault::Refuse, Fault::Full, Fault::LoseCall, Fault::LoseAnswer] {
        for (request, body) in [
            (format!("POST /api/v1/records/{unknown}/resolve"), &*release),
            (format!("DELETE /api/v1/records/{completed}"), ""),
            ("POST /api/v1/records/purge".to_owned(), &purge),
            ("POST /api/v1/records/resolve".to_owned(), &resolve),
            ("POST /api/v1/reload".to_owned(), "{}"),
            (format!("GET /api/v1/records/{completed}?answer=true"), ""),
            (format!("GET /api/v1/records/{completed}?key=true"), ""),
        ] {
            store.script_for(Operation::Append, [fault]);
            let reply = ask(&admin, &request, OPS, body).await;
            reply.is_problem(503, "store-unavailable").says("did not take the audit entry; nothing was done");
        }
    }
    assert_eq!(admin.store.count().await.unwrap(), [0, 1, 1]);
    assert!(words(&entries(&admin, "?action=purge").await, "outcome").iter().all(|outcome| outcome == "begun"));
}

#[tokio::test]
async fn an_outcome_that_is_not_known_is_not_given() {
    let (admin, store) = start_unreliable().await;
    // It is done, and its outcome is lost.
    let removed = admin.completed("refund", KEY).await;
    store.script_for(Operation::Amend, [Fault::Refuse]);
    assert_eq!(ask(&admin, &format!("DELETE /api/v1/records/{removed}"), OPS, "").await.status, 204);
    // It may be done.
    let (unknown, _) = admin.unknown("charge", KEY).await;
    let resolve = format!("POST /api/v1/records/{unknown}/resolve");
    let release = json!({"action": "release"}).to_string();
    store.script_for(Operation::Settle, [Fault::LoseAnswer]);
    ask(&admin, &resolve, OPS, &release).await.is_problem(503, "store-unavailable");
    // Another was faster.
    let (unknown, attempt) = admin.unknown("charge", "another").await;
    store.script_for(Operation::Append, [Fault::DelayAnswer(Duration::from_millis(300))]);
    let (resolve, release) = (format!("POST /api/v1/records/{unknown}/resolve"), &*release);
    let resolving = ask(&admin, &resolve, OPS, release);
    let racing = async {
        while admin.store.audit().unwrap().entries(Default::default(), None, 9).await.unwrap().entries.len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        admin.end(unknown, attempt, Settlement::Release).await;
        admin.completed("charge", "another").await;
    };
    let (reply, ()) = tokio::join!(resolving, racing);
    reply.is_problem(409, "not-unknown");
    // Many, of which some are done.
    for nth in 0..3 {
        admin.unknown("charge", &format!("key-{nth}")).await;
    }
    store.script_for(Operation::Settle, [Fault::Refuse, Fault::None, Fault::None]);
    let purge = json!({"filter": {"state": "unknown"}, "reason": "none"}).to_string();
    assert_eq!(ask(&admin, "POST /api/v1/records/purge", OPS, &purge).await.status, 200);
    let found = entries(&admin, "").await;
    assert_eq!(words(&found, "outcome"), ["partial", "unchanged", "begun", "begun"]);
    assert_eq!((&found[0]["matched"], &found[0]["done"], &found[0]["failed"]), (&json!(3), &json!(2), &json!(1)));
}

#[tokio::test]
async fn what_is_refused_for_itself_leaves_no_entry() {
    let (admin, _) = start_unreliable().await;
    let completed = admin.completed("refund", KEY).await;
    let release = json!({"action": "release"}).to_string();
    let of = |id: RecordId| format!("POST /api/v1/records/{id}/resolve");
    ask(&admin, &of(completed), OPS, &release).await.is_problem(409, "not-unknown");
    ask(&admin, &of(RecordId([1; 32])), OPS, &release).await.is_problem(404, "not-found");
    ask(&admin, &of(completed), BOARD, &release).await.is_problem(403, "forbidden");
    let purge = json!({"filter": {}, "reason": "none"}).to_string();
    ask(&admin, "POST /api/v1/records/purge", OPS, &purge).await.is_problem(400, "bad-request");
    ask(&admin, "POST /api/v1/records/reseal", OPS, "{}").await.is_problem(409, "not-configured");
    ask(&admin, "POST /api/v1/reload", OPS, "{}").await.is_problem(503, "not-ready");
    assert_eq!(entries(&admin, "").await, Vec::<Value>::new());
}

/// As a change of many does: the operator sends it again.
#[tokio::test]
async fn records_that_could_not_be_encrypted_anew_leave_a_part_undone() {
    let (admin, store) = start_unreliable().await;
    let keys = Arc::new(Keyring::new(vec![SealingKey::new("key".into(), &[1; 32])]));
    admin.state.set_resealer(Arc::new(Resealer::new(store.clone(), keys, "shop".into())));
    admin.completed("refund", KEY).await;
    store.script_for(Operation::Get, [Fault::Refuse]);
    for (resealed, failed) in [(0, 1), (1, 0), (0, 0)] {
        let report = ask(&admin, "POST /api/v1/records/reseal", OPS, "").await.json();
        assert_eq!((&report["resealed"], &report["failed"]), (&json!(resealed), &json!(failed)), "{report}");
    }
    assert_eq!(words(&entries(&admin, "?action=reseal").await, "outcome"), ["unchanged", "done", "partial"]);
}

#[tokio::test]
async fn entries_are_listed_in_pages_and_by_what_they_say() {
    let (admin, _) = start_unreliable().await;
    let mut ids = Vec::new();
    for nth in 0..5 {
        let id = admin.completed("refund", &format!("key-{nth}")).await;
        assert_eq!(ask(&admin, &format!("DELETE /api/v1/records/{id}"), OPS, "").await.status, 204);
        admin.pass(Duration::from_secs(60));
        ids.insert(0, id.to_string());
    }
    let mut found = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = ask(&admin, &format!("GET /api/v1/audit?limit=2{cursor}"), OPS, "").await.json();
        found.extend(words(page["entries"].as_array().unwrap(), "record"));
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(found, ids);
    let record = format!("?record={}", ids[3]);
    for (query, count) in [
        ("?since=3m", 3),
        ("?since=2026-01-01T00:04:00Z", 1),
        ("?action=purge&by=ops", 5),
        ("?by=board", 0),
        (&record, 1),
    ] {
        assert_eq!(entries(&admin, query).await.len(), count, "{query}");
    }
    ask(&admin, "GET /api/v1/audit?actions=purge", OPS, "").await.is_problem(400, "bad-request");
}

#[tokio::test]
async fn a_viewer_sees_no_reasons_and_nobody_another_service() {
    let (admin, store) = start_unreliable().await;
    let id = admin.completed("refund", KEY).await;
    let reason = format!("?reason={KEY}");
    assert_eq!(ask(&admin, &format!("DELETE /api/v1/records/{id}{reason}"), OPS, "").await.status, 204);
    let viewed = ask(&admin, "GET /api/v1/audit", BOARD, "").await;
    assert_eq!((viewed.status, viewed.body.contains(KEY)), (200, false), "{}", viewed.body);
    assert_eq!(
        (&viewed.json()["entries"][0]["reason"], &viewed.json()["entries"][0]["by"]),
        (&Value::Null, &json!("ops"))
    );
    assert_eq!(entries(&admin, "").await[0]["reason"], KEY);

    let other = crate::admin::AuditWriter { service: "billing".into(), ttl: AUDIT_TTL };
    drop(other.reloading_by_signal(&*store).await.unwrap());
    assert_eq!(entries(&admin, "").await.len(), 1);
}

#[tokio::test]
async fn what_nobody_asked_for_through_the_listener_has_entries_too() {
    let (admin, store) = start_unreliable().await;
    let writer = admin.state.audit_writer();
    let forgotten = [("charge".into(), 3), ("refund".into(), 4)];
    let begun = writer.accepting_identity_change(&*store, &forgotten).await.unwrap();
    begun.end(crate::admin::Outcome::Done).await;
    drop(writer.reloading_by_signal(&*store).await.unwrap());
    let found = entries(&admin, "").await;
    assert_eq!(words(&found, "action"), ["reload", "accept-identity-change"]);
    assert_eq!(words(&found, "outcome"), ["begun", "done"]);
    assert_eq!((&found[1]["by"], &found[1]["client"]), (&json!("-"), &Value::Null));
    assert_eq!((&found[1]["keys"], &found[1]["namespaces"]), (&json!(7), &json!(["charge", "refund"])));
}
