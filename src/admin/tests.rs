//! The admin listener over a socket.

mod access;
mod audit;
mod bulk;
mod openapi;
mod purge;
mod sealed;
mod stats;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Phase;
use super::testing::{Admin, KEY, LEASE, START, origin, start, start_without_store};
use crate::idempotency::codec::Answer;
use crate::idempotency::record::{AttemptToken, RecordId, State, Timestamp};
use crate::idempotency::unknown::UnknownCause;
use crate::store::memory::Memory;
use crate::store::unreliable::{Fault, Operation, Unreliable};
use crate::store::{Error, ErrorKind, NewRecord, Origin, Settlement, Store};
use crate::telemetry::logged::logged;

#[tokio::test]
async fn readiness_says_why_not() {
    let admin = start_without_store(None).await;
    assert_eq!(admin.get("/livez").await.status, 200);
    for (phase, reason) in [
        (Phase::Starting, "starting"),
        (Phase::WaitingForStoreLock, "waiting-for-store-lock"),
        (Phase::WaitingForStore, "waiting-for-store"),
        (Phase::Ready, "store-unavailable"),
    ] {
        admin.readiness.set(phase);
        let reply = admin.get("/readyz").await;
        assert_eq!((reply.status, &reply.json()["reason"]), (503, &json!(reason)));
    }
    admin.get("/api/v1/records").await.is_problem(503, "store-unavailable").says("not open yet: the gate starts");
    admin.readiness.set(Phase::WaitingForStoreLock);
    admin
        .get("/api/v1/records")
        .await
        .is_problem(503, "store-unavailable")
        .says("not open yet: another process holds it");
    admin.readiness.set(Phase::Ready);
    admin.state.set_store(admin.store.clone());
    let reply = admin.get("/readyz").await;
    assert_eq!((reply.status, &*reply.body), (200, r#"{"status":"ready"}"#));
    assert!(admin.get("/metrics").await.body.contains("oncegate_ready 1"));
    admin.readiness.set(Phase::Draining);
    assert_eq!(admin.get("/readyz").await.json()["reason"], "draining");
    assert!(admin.get("/metrics").await.body.contains("oncegate_ready 0"));
}

#[test]
fn a_list_that_fails_names_the_databases_that_are_away() {
    let failed = super::answer::Kind::StoreUnavailable.because("failed").of_reading(&["b:5432/gate".into()]);
    let said = "cannot be read: a database of the store does not answer: b:5432/gate; see the log of `oncegate serve`";
    assert_eq!(failed.detail, said);
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_not_ready() {
    let admin = start(None).await;
    admin.store.close().await;
    let reply = admin.get("/readyz").await;
    assert_eq!((reply.status, &reply.json()["reason"]), (503, &json!("store-unavailable")));
    let (lines, _guard) = logged();
    let id = "0".repeat(64);
    for (path, record) in [("/api/v1/records", ""), (&*format!("/api/v1/records/{id}"), &*format!(" record={id}"))] {
        let reply = admin.get(&format!("{path}?key=s3cret")).await;
        let reply = if record.is_empty() { reply } else { admin.get(path).await };
        reply.is_problem(503, "store-unavailable").says("cannot be read: the store is away");
        let log = lines.text();
        assert!(log.contains(&format!("method=GET path=\"{path}\"{record} error=")), "{log}");
    }
    assert!(!lines.text().contains("s3cret"));
}

#[tokio::test]
async fn a_record_shows_what_operators_need_and_no_secret() {
    let admin = start(None).await;
    let (id, attempt) = admin.claim("charge", KEY).await;
    admin.pass(Duration::from_millis(2500));
    let reply = admin.get(&format!("/api/v1/records/{id}")).await;
    assert_eq!(
        reply.json(),
        json!({
            "id": id.to_string(), "etag": reply.json()["etag"], "state": "in-flight", "service": "shop", "namespace": "charge", "route": "charge",
            "upstream": "app", "key": "8e03978e…9324", "keeps_key": false, "method": "POST", "path": "/v1/charges",
            "request": "00000000000000ab", "trace_id": "000000000000000000000000000000cd", "caller": "0909090909090909",
            "fingerprint": "0707070707070707", "claimed_at": "2026-01-01T00:00:00.000Z",
            "age_seconds": 2, "lease_until": "2026-01-01T00:00:30.000Z",
        })
    );
    assert!(!reply.body.contains(&attempt.expose()));
    assert!(!reply.body.contains(KEY));
    assert!(reply.head.contains("cache-control: no-store"));

    let id = admin.completed("refund", KEY).await;
    let record = admin.get(&format!("/api/v1/records/{id}")).await.json();
    assert_eq!(
        (&record["state"], &record["status"], &record["body_bytes"], &record["expires_at"]),
        (&json!("completed"), &json!(201), &json!(4), &json!("2026-01-01T01:00:02.500Z"))
    );
    assert_eq!(record.get("lease_until"), None);
    assert_eq!((record.get("answer"), record.get("unknown_since")), (None, None));
    let path = format!("/api/v1/records/{id}?answer=true");
    admin.get(&path).await.is_problem(403, "forbidden").says("X-Requested-With");
    let headers = format!("Host: {}\r\nX-Requested-With: test\r\n", admin.address);
    let record = admin.send(&format!("GET {path}"), &headers, "").await.json();
    assert_eq!(record["answer"]["body_base64"], "cGFpZA==");
    assert!(!record.to_string().contains(KEY));
    let path = format!("/api/v1/records/{id}?key=true");
    admin.get(&path).await.is_problem(403, "forbidden").says("X-Requested-With");
    let record = admin.send(&format!("GET {path}"), &headers, "").await.json();
    assert_eq!((record["key"].as_str(), record.get("answer"), &record["keeps_key"]), (Some(KEY), None, &json!(true)));
    let (other, _) = admin.claim("charge", "not-kept").await;
    let record = admin.send(&format!("GET /api/v1/records/{other}?answer=true&key=true"), &headers, "").await.json();
    assert_eq!((&record["key"], &record["keeps_key"]), (&json!("no…pt"), &json!(false)));
    admin.get(&format!("/api/v1/records/{id}?body=true")).await.is_problem(400, "bad-request").says("`answer`");

    let (id, _) = admin.unknown("charge", "another").await;
    let record = admin.get(&format!("/api/v1/records/{id}")).await.json();
    assert_eq!(
        (&record["unknown_since"], &record["unknown_because"], record.get("status")),
        (&json!("2026-01-01T00:00:02.500Z"), &json!("shutdown"), None)
    );
    let listed = admin.get("/api/v1/records?state=unknown").await.json();
    let listed = &listed["records"][0];
    assert_eq!((&listed["unknown_since"], listed.get("unknown_because")), (&json!("2026-01-01T00:00:02.500Z"), None));
}

#[tokio::test]
async fn lists_are_filtered() {
    let admin = start(None).await;
    let (held, _) = admin.unknown("charge", KEY).await;
    let kept = admin.completed("refund", KEY).await;
    admin.pass(Duration::from_secs(7200));
    let (running, _) = admin.claim("charge", "another-key").await;
    // The newest first, and those of one time with the greatest id first.
    let sorted = |mut ids: Vec<RecordId>| {
        ids.sort_by_key(|id| std::cmp::Reverse((*id == running, *id)));
        ids.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(admin.ids("").await, sorted(vec![held, kept, running]));
    assert_eq!(admin.ids("").await[0], running.to_string());
    assert_eq!(admin.ids("?since=1h").await, sorted(vec![running]));
    assert_eq!(admin.ids("?since=2026-01-01T02:00:00Z").await, sorted(vec![running]));
    assert_eq!(admin.ids("?since=2026-01-01T00:00:00Z&older_than=1h").await, sorted(vec![held, kept]));
    for digits in [17, 18, 64] {
        assert_eq!(admin.ids(&format!("?id={}", &held.to_string()[..digits])).await, sorted(vec![held]));
        let both = format!("?key={KEY}&id={}", &held.to_string()[..digits]);
        assert_eq!(admin.ids(&both).await, sorted(vec![held]));
    }
    assert_eq!(admin.ids(&format!("?key={KEY}&id={}", &held.to_string()[..5])).await, sorted(vec![held, kept]));
    assert!(admin.ids(&format!("?key=another&id={held}")).await.is_empty(), "no id starts with both");
    assert_eq!(admin.ids("?state=unknown").await, sorted(vec![held]));
    assert_eq!(admin.ids("?route=charge").await, sorted(vec![held, running]));
    assert_eq!(admin.ids(&format!("?key={KEY}")).await, sorted(vec![held, kept]));
    assert_eq!(admin.ids(&format!("?key=%22{KEY}%22&state=completed")).await, sorted(vec![kept]));
    assert_eq!(admin.ids("?older_than=1h").await, sorted(vec![held, kept]));
    assert!(admin.ids("?key=8e03978e").await.is_empty());
    admin.get("/api/v1/records?stat=unknown").await.is_problem(400, "bad-request").says("known are: state");
    admin.get(&format!("/api/v1/records/{held}?x=1")).await.is_problem(400, "bad-request");
}

#[tokio::test]
async fn pages_give_each_record_once() {
    let admin = start(None).await;
    for n in 0..25 {
        admin.unknown("charge", &format!("key-{n}")).await;
    }
    let (mut seen, mut cursor, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = admin.get(&format!("/api/v1/records?limit=5{cursor}")).await.json();
        let records = page["records"].as_array().unwrap();
        assert_eq!(records.len(), 5);
        seen.extend(records.iter().map(|record| record["id"].as_str().unwrap().to_owned()));
        pages += 1;
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(pages, 5, "a last page that is full has no empty one after it");
    assert!(seen.is_sorted_by(|earlier, later| earlier > later), "claimed at one time");
    assert_eq!(seen.len(), 25);
}

/// Begins to ask for `target` and gives the connection.
async fn ask(admin: &super::testing::Admin, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(admin.address).await.unwrap();
    let text = format!("{request} HTTP/1.1\r\nHost: {}\r\n\r\n", admin.address);
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_leaves_calls_its_list_off() {
    let admin = start_without_store(None).await;
    let store = Arc::new(Unreliable::new(admin.store.clone()));
    store.script_for(Operation::List, [Fault::Hang, Fault::Hang]);
    admin.state.set_store(store);
    let clients = [ask(&admin, "GET /api/v1/records").await, ask(&admin, "GET /api/v1/records").await];
    eventually(|| admin.state.listings.available_permits() == 0).await;
    let reply = admin.get("/api/v1/records").await;
    reply.is_problem(503, "overloaded");
    assert!(reply.head.contains("retry-after: 1"), "{}", reply.head);
    drop(clients);
    eventually(|| admin.state.listings.available_permits() == 2).await;
    assert_eq!(admin.get("/api/v1/records").await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_does_not_call_its_change_off() {
    let admin = start_without_store(None).await;
    let store = Arc::new(Unreliable::new(admin.store.clone()));
    store.script_for(Operation::Get, [Fault::Delay(Duration::from_millis(200))]);
    admin.state.set_store(store.clone());
    admin.store.adopt(vec![origin("charge")], Vec::new(), false).await.unwrap();
    let (id, _) = admin.unknown("charge", KEY).await;
    let client = ask(&admin, &format!("DELETE /api/v1/records/{id}")).await;
    eventually(|| store.calls() > 0).await;
    drop(client);
    for _ in 0..500 {
        if admin.store.get(id).await.unwrap().is_none() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the record is still there");
}

async fn eventually(done: impl Fn() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.expect("it happens in time");
}

#[tokio::test]
async fn an_unknown_record_is_released() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", KEY).await;
    let reply = admin.resolve(id, json!({"action": "release", "reason": "not in the ledger"})).await;
    assert_eq!((reply.status, &*reply.body), (204, ""));
    assert!(admin.store.get(id).await.unwrap().is_none());
    admin.get(&format!("/api/v1/records/{id}")).await.is_problem(404, "not-found");
    admin.resolve(id, json!({"action": "release"})).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn an_unknown_record_is_completed_with_the_operators_answer() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", KEY).await;
    admin.pass(Duration::from_secs(7200));
    let body = json!({
        "action": "complete", "status": 201, "headers": [["Content-Type", "text/plain"], ["Set-Cookie", "a=1"], ["Set-Cookie", "b=2"]],
        "body_base64": "cGFpZA==", "reason": "found in the ledger",
    });
    assert_eq!(admin.resolve(id, body.clone()).await.status, 204);
    let record = admin.store.get(id).await.unwrap().unwrap().record;
    assert_eq!(record.state, State::Completed);
    assert_eq!(record.until, Timestamp(START + 3 * 3_600_000), "the route's ttl counts from now");
    let answer = Answer::decode(&record.answer.unwrap()).unwrap();
    assert_eq!(answer.status, 201);
    assert_eq!(answer.content.unwrap().body, "paid");
    let headers: Vec<_> = answer.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    assert_eq!(headers, [("content-type", &b"text/plain"[..]), ("set-cookie", b"a=1"), ("set-cookie", b"b=2")]);
    admin.resolve(id, body).await.is_problem(409, "not-unknown").says("completed");
}

#[tokio::test]
async fn only_unknown_records_are_resolved() {
    let admin = start(None).await;
    let release = json!({"action": "release"});
    let (id, _) = admin.claim("charge", KEY).await;
    admin.resolve(id, release.clone()).await.is_problem(409, "not-unknown").says("still runs");
    admin.pass(LEASE + Duration::from_secs(1));
    admin.resolve(id, release.clone()).await.is_problem(409, "not-unknown").says("lease is past");
    admin.store.expire_leases(10).await.unwrap();
    assert_eq!(admin.resolve(id, release).await.status, 204);
    admin.resolve(id, json!({"action": "retry"})).await.is_problem(400, "bad-request").says("`action`");
}

#[tokio::test]
async fn a_list_that_takes_too_long_says_how_to_narrow_it() {
    let admin = start_without_store(None).await;
    let store = Arc::new(Unreliable::new(admin.store.clone()));
    store.script_for(Operation::List, [Fault::LoseCall]);
    admin.state.set_store(store);
    admin.get("/api/v1/records").await.is_problem(503, "store-unavailable").says("narrow it by state");
}

#[test]
fn a_store_whose_table_is_locked_is_not_said_to_have_failed() {
    let locked = Error::determinate(ErrorKind::Locked, "canceling statement due to lock timeout");
    let said = format!("{:?}", super::records::unavailable(locked));
    assert!(said.contains("a table of the store locked") && said.contains("nothing was done"), "{said}");
}

#[tokio::test]
async fn the_records_of_another_service_are_not_there() {
    let admin = start(None).await;
    let other = Origin { service: "billing".into(), namespace: "charge".into(), route: "charge".into() };
    admin.store.adopt(vec![other.clone()], Vec::new(), false).await.unwrap();
    let id = RecordId([3; 32]);
    let fresh = NewRecord {
        attempt: AttemptToken([1; 16]),
        origin: other.id(),
        lease: LEASE,
        ttl: LEASE,
        unknown_ttl: LEASE,
        head: Bytes::from_static(b"?"),
    };
    admin.store.claim(id, fresh).await.unwrap();
    assert!(admin.ids("").await.is_empty());
    admin.get(&format!("/api/v1/records/{id}")).await.is_problem(404, "not-found");
    admin.delete(id).await.is_problem(404, "not-found");
    assert!(admin.store.get(id).await.unwrap().is_some());
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_shown_and_said_to_be_so() {
    let admin = start(None).await;
    let fresh = NewRecord {
        attempt: AttemptToken([1; 16]),
        origin: origin("charge").id(),
        lease: LEASE,
        ttl: LEASE,
        unknown_ttl: LEASE,
        head: Bytes::from_static(b"\xff from the future"),
    };
    admin.store.claim(RecordId([3; 32]), fresh).await.unwrap();
    let record = admin.get(&format!("/api/v1/records/{}", RecordId([3; 32]))).await.json();
    assert_eq!(
        (&record["unreadable"], &record["key"], &record["route"]),
        (&json!(true), &Value::Null, &json!("charge"))
    );
}

#[tokio::test]
async fn a_token_guards_all_but_the_probes_and_the_page() {
    let admin = start(Some("s3cret")).await;
    for target in ["/livez", "/readyz", "/", "/page/main.js"] {
        assert_eq!(admin.get(target).await.status, 200, "{target}");
    }
    for target in ["/metrics", "/api/v1/records", "/api/v1/routes", "/api/v1/stats", "/nothing"] {
        let reply = admin.get(target).await;
        reply.is_problem(401, "unauthorized");
        assert!(reply.head.contains("www-authenticate: bearer"), "{}", reply.head);
    }
    let headers = "Host: oncegate.internal:9090\r\nAuthorization: Bearer s3cret\r\n";
    assert_eq!(admin.send("GET /api/v1/records", headers, "").await.status, 200);
    assert_eq!(admin.send("GET /metrics", headers, "").await.status, 200);
}

#[tokio::test]
async fn a_web_page_gets_nowhere() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", KEY).await;
    let release = r#"{"action":"release"}"#;
    let resolve = format!("POST /api/v1/records/{id}/resolve");
    let here = format!("Host: {}\r\n", admin.address);
    // A form.
    let reply = admin.send(&resolve, &format!("{here}Content-Type: text/plain\r\n"), release).await;
    reply.is_problem(415, "unsupported-media-type");
    // A script on another origin.
    let headers = format!("{here}Content-Type: application/json\r\nOrigin: https://evil.example\r\n");
    admin.send(&resolve, &headers, release).await.is_problem(403, "forbidden");
    let delete = format!("DELETE /api/v1/records/{id}");
    admin.send(&delete, &format!("{here}Origin: null\r\n"), "").await.is_problem(403, "forbidden");
    // A name that was pointed here.
    let headers = "Host: evil.example\r\nOrigin: http://evil.example\r\nContent-Type: application/json\r\n";
    admin.send(&resolve, headers, release).await.is_problem(403, "forbidden");
    admin.send("GET /metrics", "Host: evil.example\r\n", "").await.is_problem(403, "forbidden");
    // A reason where none is read.
    admin.send(&delete, &here, "{\"reason\":\"sent twice\"}").await.is_problem(400, "bad-request");
    // What a browser asks before it sends a request that no form could.
    admin.send(&format!("OPTIONS /api/v1/records/{id}"), &here, "").await.is_problem(405, "method-not-allowed");
    assert!(admin.store.get(id).await.unwrap().is_some());
}

#[tokio::test]
async fn paths_and_methods() {
    let admin = start(None).await;
    let host = format!("Host: {}\r\n", admin.address);
    for target in
        ["//", "/page", "/api", "/api/v1/records/", "/livez/", "/api/v1/records/a/b", "/api/v1/records/a/resolve/"]
    {
        admin.get(target).await.is_problem(404, "not-found");
    }
    let reply = admin.send("DELETE /api/v1/records", &host, "").await;
    reply.is_problem(405, "method-not-allowed");
    assert!(reply.head.contains("allow: get, head"), "{}", reply.head);
    let reply = admin.get(&format!("/api/v1/records/{}/resolve", RecordId([0; 32]))).await;
    assert!(reply.is_problem(405, "method-not-allowed").head.contains("allow: post"), "{}", reply.head);
    for many in ["purge", "resolve"] {
        let reply = admin.get(&format!("/api/v1/records/{many}")).await;
        assert!(reply.is_problem(405, "method-not-allowed").head.contains("allow: post"), "{}", reply.head);
    }
    admin.get("/api/v1/records/123").await.is_problem(400, "bad-request").says("64 hexadecimal");
    let reply = admin.send("HEAD /livez", &host, "").await;
    assert_eq!((reply.status, &*reply.body), (200, ""));
    let routes = admin.get("/api/v1/routes").await.json();
    assert_eq!((&routes["routes"][0]["name"], &routes["routes"][0]["ttl_seconds"]), (&json!("charge"), &json!(3600)));
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", KEY).await;
    let mut stream = TcpStream::connect(admin.address).await.unwrap();
    let head = format!(
        "POST /api/v1/records/{id}/resolve HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
         Content-Length: 99999999\r\n\r\n",
        admin.address
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 413");
}

#[tokio::test]
async fn shutdown_ends_idle_connections_and_the_listener() {
    let admin = start(None).await;
    let mut idle = TcpStream::connect(admin.address).await.unwrap();
    idle.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut first = [0; 12];
    idle.read_exact(&mut first).await.unwrap();
    admin.stop.send(true).unwrap();
    tokio::time::timeout(Duration::from_secs(20), admin.task).await.expect("idle connections do not hold it").unwrap();
    assert!(TcpStream::connect(admin.address).await.is_err());
}

fn audit(logged: &str) -> Vec<&str> {
    logged.lines().filter(|line| line.contains("oncegate::audit")).collect()
}

#[tokio::test]
async fn each_change_leaves_one_line_that_nobody_can_forge() {
    let (lines, _logging) = logged();
    let admin = start(None).await;
    let (released, attempt) = admin.unknown("charge", KEY).await;
    admin.resolve(released, json!({"action": "release", "reason": "no charge\n2026 INFO forged"})).await;
    let removed = admin.completed("refund", KEY).await;
    admin.delete(removed).await;
    let (other, _) = admin.claim("refund", KEY).await;
    let path = format!("DELETE /api/v1/records/{other}?reason=sent%20twice%0A2026%20INFO%20forged");
    assert_eq!(admin.send(&path, &format!("Host: {}\r\n", admin.address), "").await.status, 204);
    let (purged, _) = admin.unknown("charge", KEY).await;
    let reply = admin.bulk("purge", json!({"filter": {"state": "unknown"}, "reason": "a test"})).await;
    assert_eq!(reply.json()["done"], 1);
    let logged = lines.text();
    let audit = audit(&logged);
    assert_eq!(audit.len(), 4, "{logged}");
    assert!(audit[2].contains(&other.to_string()), "{logged}");
    assert!(audit[2].contains(r#"reason="sent twice\n2026 INFO forged""#), "{logged}");
    assert!(audit[3].contains(&purged.to_string()) && audit[3].contains(r#"reason="a test""#), "{logged}");
    assert!(audit[0].contains(&released.to_string()) && audit[0].contains("action=\"release\""), "{logged}");
    assert!(audit[0].contains(r#"reason="no charge\n2026 INFO forged""#), "{logged}");
    assert!(audit[1].contains(&removed.to_string()) && audit[1].contains("state=\"completed\""), "{logged}");
    assert!(
        audit
            .iter()
            .all(|line| line.contains("8e03978e…") && line.contains("client=127.0.0.1:") && line.contains("by=\"-\"")),
        "{logged}"
    );
    assert!(!logged.contains(KEY) && !logged.contains(&attempt.expose()), "{logged}");
}
