//! What the gate does now.

use tokio::time::Instant;

use super::*;
use crate::admin::tests::access::{BOARD, ask, start_with_roles};
use crate::http::limits::Limits;
use crate::http::usage::Usage;
use crate::telemetry::consumers::MessageOutcome;
use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Outcome;

async fn stats(admin: &Admin) -> Value {
    let reply = admin.get("/api/v1/stats").await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

fn answered(admin: &Admin, route: &str, outcome: Outcome, times: usize) {
    let route = admin.state.metrics.route(route);
    (0..times).for_each(|_| drop(route.answered(outcome, http::StatusCode::OK, Instant::now())));
}

#[tokio::test]
async fn it_says_what_is_and_what_was_lately() {
    let admin = start_without_store(None).await;
    let waiting = stats(&admin).await;
    assert_eq!((&waiting["ready"], &waiting["reason"]), (&json!(false), &json!("starting")));
    assert_eq!((&waiting["store"]["kind"], &waiting["oldest_unknown"]), (&Value::Null, &Value::Null));
    assert_eq!((&waiting["records"], &waiting["deliveries"]), (&Value::Null, &Value::Null), "nothing was counted");
    let admin = crate::admin::testing::with_store(admin).await;
    let usage = Usage::new(&Limits { max_requests: 7, ..Limits::default() }, &admin.state.metrics);
    admin.state.set_usage(usage.clone());
    let _permit = usage.requests.acquire(2).unwrap();
    usage.exceeded(Limit::MaxWaiting);
    let (id, _) = admin.unknown("charge", KEY).await;
    admin.state.metrics.records_counted([0, 5, 1]);
    answered(&admin, "charge", Outcome::Executed, 30);
    answered(&admin, "-", Outcome::Passed, 1);
    let _attempt = admin.state.metrics.route("gone").attempt_began();
    let consumer = admin.state.metrics.consumer("orders");
    consumer.connected(true);
    consumer.in_hand(3);
    consumer.ended(MessageOutcome::Done);
    admin.pass(Duration::from_secs(90));
    let stats = stats(&admin).await;
    assert_eq!((&stats["ready"], &stats["reason"]), (&json!(true), &Value::Null));
    assert_eq!(stats["you"], json!({"name": "-", "role": "operator"}));
    assert_eq!(stats["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(stats["records"], json!({"in-flight": 0, "completed": 5, "unknown": 1}));
    assert_eq!(stats["oldest_unknown"]["id"], id.to_string());
    assert_eq!(stats["oldest_unknown"]["age_seconds"], 90);
    assert_eq!((&stats["requests_in_flight"], &stats["attempts_in_flight"]), (&json!(2), &json!(1)));
    assert_eq!(stats["outcomes"]["executed"]["total"], 30);
    assert_eq!(stats["latency"]["count"], 31);
    let routes: Vec<&str> = stats["routes"].as_array().unwrap().iter().map(|r| r["route"].as_str().unwrap()).collect();
    assert_eq!(routes, ["charge", "-", "gone"]);
    assert_eq!(stats["routes"][0]["outcomes"]["executed"]["total"], 30);
    assert!(stats["routes"][0]["latency"]["p99_seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(stats["routes"][0]["upstream_latency"], Value::Null);
    let messages = json!({"done": 1, "dead": 0, "returned": 0});
    let consumer = json!({"consumer": "orders", "connected": true, "messages_in_hand": 3, "messages": messages});
    assert_eq!(stats["consumers"], json!([consumer]));
    assert_eq!(stats["store"], json!({"kind": "memory", "away": [], "errors": []}));
    let limit = |name: &str| stats["limits"].as_array().unwrap().iter().find(|limit| limit["limit"] == name).cloned();
    assert_eq!(limit("max_requests").unwrap(), json!({"limit": "max_requests", "used": 2, "max": 7, "reached": 0}));
    assert_eq!(limit("max_waiting").unwrap()["reached"], 1);
    assert_eq!(limit("max_headers").unwrap(), json!({"limit": "max_headers", "reached": 0}));
    assert_eq!(stats["last_reload"]["successful"], true);
}

/// Rates need no second question.
#[tokio::test]
async fn rates_are_of_the_last_seconds() {
    let admin = start(None).await;
    stats(&admin).await;
    answered(&admin, "charge", Outcome::Replayed, 50);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let stats = stats(&admin).await;
    let window = stats["rate_window_seconds"].as_f64().unwrap();
    assert!((1.0..10.0).contains(&window), "{window}");
    for replayed in [&stats["outcomes"]["replayed"], &stats["routes"][0]["outcomes"]["replayed"]] {
        assert_eq!(replayed["total"], 50);
        let rate = replayed["per_second"].as_f64().unwrap();
        assert!((rate * window - 50.0).abs() < 4.0, "{rate} in {window} s");
    }
}

#[tokio::test]
async fn a_viewer_sees_it_without_keys() {
    let admin = start_with_roles().await;
    admin.unknown("charge", KEY).await;
    admin.get("/api/v1/stats").await.is_problem(401, "unauthorized");
    let reply = ask(&admin, "GET /api/v1/stats", BOARD, "").await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["oldest_unknown"]["route"], "charge");
    assert_eq!(reply.json()["you"], json!({"name": "board", "role": "viewer"}));
    assert!(!reply.body.contains("8e03978e"), "{}", reply.body);
}
