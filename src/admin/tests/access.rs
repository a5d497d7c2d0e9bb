//! Who may do what, and what the headers for browsers say.

use http::Method;

use super::*;
use crate::admin::endpoints::{ENDPOINTS, Endpoint};
use crate::admin::testing::{AUDIT_TTL, Reply, start_with, token, with_store};
use crate::admin::{Role, Settings};

const OPS: &str = "0123456789abcdef0123456789abcdef";
pub(super) const BOARD: &str = "fedcba9876543210fedcba9876543210";

/// A listener with an operator, `ops`, and a viewer, `board`.
pub(super) async fn start_with_roles() -> Admin {
    with_store(start_with(&[("ops", Role::Operator, OPS), ("board", Role::Viewer, BOARD)]).await).await
}

pub(super) async fn ask(admin: &Admin, request: &str, token: &str, body: &str) -> Reply {
    let headers =
        format!("Host: oncegate.internal\r\nContent-Type: application/json\r\nAuthorization: Bearer {token}\r\n");
    admin.send(request, &headers, body).await
}

/// Every endpoint for every method that any of them takes, and for everybody there is.
#[tokio::test]
async fn each_role_may_do_what_the_table_says() {
    let admin = start_with_roles().await;
    let (id, _) = admin.unknown("charge", KEY).await;
    let mut allowed = 0;
    for endpoint in ENDPOINTS {
        // Nothing is resolved or removed: each of these is refused for what it asks, if not for who asks.
        let path = endpoint.path.replace(
            "{id}",
            if endpoint.rights.iter().any(|(method, _)| method == Method::POST) {
                "short"
            } else {
                "0000000000000000000000000000000000000000000000000000000000000000"
            },
        );
        for method in [Method::GET, Method::HEAD, Method::POST, Method::DELETE, Method::PUT, Method::OPTIONS] {
            let request = format!("{method} {path}");
            let right = endpoint.right(&method);
            let needed = right.and_then(|(_, role)| *role);
            let nobody = admin.send(&request, "Host: 127.0.0.1\r\nContent-Type: application/json\r\n", "").await.status;
            let (viewer, operator) = (ask(&admin, &request, BOARD, "").await, ask(&admin, &request, OPS, "").await);
            let statuses = (nobody, viewer.status, operator.status);
            if right.is_none() {
                let nobody = if endpoint.is_anybodys() { 405 } else { 401 };
                assert_eq!(statuses, (nobody, 405, 405), "{request}");
                continue;
            }
            let passes = |status: u16| ![401, 403, 405, 429].contains(&status);
            assert_eq!(passes(nobody), needed.is_none(), "{request}: {nobody}");
            assert_eq!(passes(viewer.status), needed.is_none_or(|role| role == Role::Viewer), "{request}");
            assert!(passes(operator.status), "{request}: {}", operator.status);
            if needed == Some(Role::Operator) {
                viewer
                    .is_problem(403, "forbidden")
                    .says("needs the role `operator`; the token `board` has the role `viewer`");
                let problem = viewer.json();
                assert_eq!((&problem["role"], &problem["required_role"]), (&json!("viewer"), &json!("operator")));
            }
            allowed += 1;
        }
    }
    assert_eq!(allowed, 56);
    assert!(admin.store.get(id).await.unwrap().is_some());
}

/// What the table of the documentation says, the table of the code does.
#[test]
fn the_roles_are_in_the_docs() {
    let page = include_str!("../../../docs/reference/admin-api.md");
    for Endpoint { path, rights, .. } in ENDPOINTS {
        for (method, role) in rights.iter().filter(|(method, _)| method != Method::HEAD) {
            let row = format!("| `{path}` | {method} | {} | ", role.map_or("none", Role::as_str));
            assert!(page.contains(&row), "{row} is missing");
        }
    }
}

#[tokio::test]
async fn a_viewer_sees_neither_keys_nor_answers() {
    let admin = start_with_roles().await;
    let id = admin.completed("refund", KEY).await;
    let view = async |target: &str| ask(&admin, &format!("GET {target}"), BOARD, "").await;
    let whole = async |target: &str| ask(&admin, &format!("GET {target}"), OPS, "").await;
    for target in ["/api/v1/records".to_owned(), format!("/api/v1/records/{id}")] {
        let reply = view(&target).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert!(!reply.body.contains("8e03978e") && !reply.body.contains("9324"), "{}", reply.body);
        assert!(whole(&target).await.body.contains("8e03978e…9324"));
    }
    let record = view(&format!("/api/v1/records/{id}")).await.json();
    assert_eq!((&record["key"], &record["status"], &record["body_bytes"]), (&Value::Null, &json!(201), &json!(4)));
    for query in ["answer=true", "key=true", "answer=true&key=true"] {
        let target = format!("/api/v1/records/{id}?{query}");
        view(&target).await.is_problem(403, "forbidden").says("an answer or a whole key needs the role `operator`");
        assert_eq!(whole(&target).await.status, 200);
    }
    for query in ["answer=true&answer=true", "key=false&key=true", "answer=yes", "answer", "route=a"] {
        whole(&format!("/api/v1/records/{id}?{query}")).await.is_problem(400, "bad-request");
    }
    // Whether there is a record tells whether a guess of a key is right.
    view(&format!("/api/v1/records?key={KEY}")).await.is_problem(403, "forbidden").says("a filter by key");
    assert_eq!(whole(&format!("/api/v1/records?key={KEY}")).await.json()["records"][0]["id"], id.to_string());
    for change in ["purge", "resolve"] {
        let body = json!({"filter": {"key": KEY}, "dry_run": true, "action": "release"}).to_string();
        ask(&admin, &format!("POST /api/v1/records/{change}"), BOARD, &body).await.is_problem(403, "forbidden");
    }
    assert!(!view("/metrics").await.body.contains("8e03978e"));
}

#[tokio::test]
async fn a_viewer_sees_no_keys_of_accepted_requests() {
    let admin = start_with_roles().await;
    admin.accept("charge", KEY).await;
    for (token, is_shown) in [(BOARD, false), (OPS, true)] {
        let listed = ask(&admin, "GET /api/v1/deliveries", token, "").await;
        let delivery = &listed.json()["deliveries"][0];
        assert_eq!((&delivery["state"], delivery["key"].is_string()), (&json!("queued"), is_shown), "{}", listed.body);
    }
}

#[tokio::test]
async fn wrong_tokens_are_counted_and_throttled() {
    let admin = start_with(&[("ops", Role::Operator, OPS), ("old", Role::Operator, "short")]).await;
    for nth in 0..10 {
        ask(&admin, "GET /metrics", &format!("guess-{nth}"), "").await.is_problem(401, "unauthorized");
    }
    for guess in ["guess-11", "short"] {
        let reply = ask(&admin, "GET /metrics", guess, "").await;
        reply.is_problem(429, "throttled").says("too many wrong tokens came from this address");
        assert!(reply.head.contains("retry-after: "), "{}", reply.head);
        assert_eq!(reply.json()["retryable"], true);
    }
    assert_eq!(admin.get("/livez").await.status, 200, "probes show no token");
    admin.get("/metrics").await.is_problem(401, "unauthorized");
    let metrics = ask(&admin, "GET /metrics", OPS, "").await;
    assert_eq!(metrics.status, 200, "a token that cannot be guessed is never locked out");
    for (reason, count) in [("wrong-token", 10), ("throttled", 2), ("no-token", 1), ("role", 0), ("web-page", 0)] {
        let line = format!("oncegate_admin_refused_total{{reason=\"{reason}\"}} {count}\n");
        assert!(metrics.body.contains(&line), "{line}");
    }
}

#[tokio::test]
async fn a_change_names_who_made_it() {
    let (lines, _logging) = logged();
    let admin = start_with_roles().await;
    let (released, _) = admin.unknown("charge", KEY).await;
    let release = json!({"action": "release", "reason": "none"}).to_string();
    let resolve = format!("POST /api/v1/records/{released}/resolve");
    ask(&admin, &resolve, BOARD, &release).await.is_problem(403, "forbidden");
    assert_eq!(ask(&admin, &resolve, OPS, &release).await.status, 204);
    let removed = admin.completed("refund", KEY).await;
    let read = format!("GET /api/v1/records/{removed}?answer=true");
    assert_eq!(ask(&admin, &read, OPS, "").await.status, 200);
    assert_eq!(ask(&admin, &format!("DELETE /api/v1/records/{removed}"), OPS, "").await.status, 204);
    admin.unknown("charge", KEY).await;
    let purge = json!({"filter": {"state": "unknown"}, "reason": "none"}).to_string();
    assert_eq!(ask(&admin, "POST /api/v1/records/purge", OPS, &purge).await.status, 200);
    let (sender, mut reloads) = tokio::sync::mpsc::channel::<crate::admin::ReloadRequest>(1);
    admin.state.set_reloads(sender);
    let reloading = tokio::spawn(async move {
        let report =
            crate::admin::ReloadReport::Reloaded { routes: 1, needs_restart: Vec::new(), warnings: Vec::new() };
        reloads.recv().await.unwrap().send(report).unwrap();
    });
    assert_eq!(ask(&admin, "POST /api/v1/reload", OPS, "{}").await.status, 200);
    reloading.await.unwrap();
    let logged = lines.text();
    let audit = audit(&logged);
    assert_eq!(audit.len(), 5, "{logged}");
    assert!(audit.iter().all(|line| line.contains("by=\"ops\"") && line.contains("client=127.0.0.1:")), "{logged}");
    assert!(audit[4].contains("outcome=\"reloaded\""), "{logged}");
    assert!(!logged.contains(OPS) && !logged.contains(BOARD), "{logged}");
}

#[tokio::test]
async fn a_reload_takes_other_tokens_and_roles() {
    let admin = start_with_roles().await;
    assert_eq!(ask(&admin, "GET /metrics", OPS, "").await.status, 200);
    let tokens = [("ops", Role::Viewer, BOARD)].iter().map(token).collect();
    admin.state.reload(&Settings { listen: admin.address.into(), tokens, tls: None, audit_ttl: AUDIT_TTL }, Vec::new());
    ask(&admin, "GET /metrics", OPS, "").await.is_problem(401, "unauthorized");
    let reply = ask(&admin, "POST /api/v1/reload", BOARD, "{}").await;
    reply.is_problem(403, "forbidden").says("the token `ops` has the role `viewer`");
}

/// A browser that is led here guesses no type, shows nothing in a frame, and gives nothing to another site.
#[tokio::test]
async fn every_answer_tells_browsers_what_they_must_not_do() {
    let admin = start_with(&[("ops", Role::Operator, "short")]).await;
    let mut statuses = std::collections::BTreeSet::new();
    let mut check = |reply: Reply| {
        for line in [
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "content-security-policy: default-src 'none'; frame-ancestors 'none'",
            "cross-origin-resource-policy: same-origin",
            "cache-control: no-store",
        ] {
            assert_eq!(reply.head.matches(line).count(), 1, "{line}: {}", reply.head);
        }
        assert!(!reply.head.contains("access-control-allow"), "{}", reply.head);
        statuses.insert(reply.status);
    };
    check(ask(&admin, "GET /api/v1/records", "short", "").await);
    let admin = with_store(admin).await;
    let id = admin.completed("refund", KEY).await;
    let record = format!("/api/v1/records/{id}");
    for request in [
        "GET /livez",
        "HEAD /livez",
        "GET /readyz",
        "POST /livez",
        "GET /metrics",
        "GET /api/v1/routes",
        "GET /nothing",
        "OPTIONS /api/v1/records",
        "GET /api/v1/records?x=1",
        &format!("GET {record}"),
        &format!("POST {record}/resolve"),
        "POST /api/v1/records/purge",
        "POST /api/v1/reload",
        &format!("DELETE {record}"),
        &format!("GET {record}"),
    ] {
        check(ask(&admin, request, "short", "").await);
    }
    let resolve = json!({"action": "release"}).to_string();
    let kept = admin.completed("refund", KEY).await;
    check(ask(&admin, &format!("POST /api/v1/records/{kept}/resolve"), "short", &resolve).await);
    let length =
        "Host: a\r\nAuthorization: Bearer short\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n";
    check(admin.send("POST /api/v1/records/purge", length, "").await);
    check(admin.send("POST /api/v1/reload", "Host: a\r\nAuthorization: Bearer short\r\n", "{}").await);
    check(admin.send("GET /metrics", "Host: a\r\nOrigin: http://b\r\n", "").await);
    for _ in 0..11 {
        check(ask(&admin, "GET /metrics", "wrong", "").await);
    }
    assert_eq!(statuses.into_iter().collect::<Vec<_>>(), [200, 204, 400, 401, 403, 404, 405, 409, 413, 415, 429, 503]);
}
