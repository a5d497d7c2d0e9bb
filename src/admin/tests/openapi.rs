//! What the API answers is what its document says.

use serde_json::{Value, json};

use crate::admin::testing::{Admin, KEY, Reply, start};

/// The schema of an answer, with all that it refers to.
fn schema_of(document: &Value, path: &str, method: &str, reply: &Reply) -> Value {
    let responses = &document["paths"][path][method]["responses"];
    let response = responses.get(reply.status.to_string()).unwrap_or(&responses["default"]);
    let line = reply.head.lines().find_map(|line| line.strip_prefix("content-type: ")).expect("a type");
    let media = line.split(';').next().unwrap();
    let schema = &response["content"][media]["schema"];
    assert!(schema.is_object(), "{method} {path} {}: no schema of {media}", reply.status);
    json!({ "allOf": [schema], "components": document["components"] })
}

async fn document(admin: &Admin) -> Value {
    let reply = admin.get("/api/v1/openapi.json").await;
    assert_eq!(reply.status, 200);
    reply.json()
}

#[tokio::test]
async fn answers_are_as_the_document_says() {
    let admin = start(None).await;
    let document = document(&admin).await;
    let check = |path: &str, method: &str, status: u16, reply: &Reply| {
        assert_eq!(reply.status, status, "{method} {path}: {}", reply.body);
        let schema = schema_of(&document, path, method, reply);
        let validator = jsonschema::draft202012::new(&schema).unwrap();
        let wrong: Vec<String> = validator.iter_errors(&reply.json()).map(|error| error.to_string()).collect();
        assert!(wrong.is_empty(), "{method} {path}: {wrong:?} in {}", reply.body);
    };
    let (unknown, _) = admin.unknown("charge", "u-1").await;
    let completed = admin.completed("refund", KEY).await;
    admin.claim("charge", "legacy").await;
    admin.accept("charge", "queued").await;
    let mut read = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let is_json = item["get"]["responses"]["200"]["content"]["application/json"].is_object();
        if is_json && !path.contains('{') {
            check(path, "get", 200, &admin.get(path).await);
            read.push(path.as_str());
        }
    }
    assert!(read.contains(&"/livez") && read.contains(&"/api/v1/deliveries"), "{read:?}");
    for id in [unknown, completed] {
        let shown = admin.get(&format!("/api/v1/records/{id}")).await;
        check("/api/v1/records/{id}", "get", 200, &shown);
    }
    let host = format!("Host: {}\r\nX-Requested-With: test\r\n", admin.address);
    let revealed = admin.send(&format!("GET /api/v1/records/{completed}?answer=true&key=true"), &host, "").await;
    check("/api/v1/records/{id}", "get", 200, &revealed);
    let none = "0".repeat(64);
    check("/api/v1/records/{id}", "get", 404, &admin.get(&format!("/api/v1/records/{none}")).await);
    check("/api/v1/records", "get", 400, &admin.get("/api/v1/records?state=lost").await);
    for dry_run in [true, false] {
        let filter =
            json!({ "filter": { "state": "unknown" }, "dry_run": dry_run, "reason": "r", "action": "release" });
        check("/api/v1/records/resolve", "post", 200, &admin.bulk("resolve", filter).await);
        let filter = json!({ "filter": { "route": "refund" }, "dry_run": dry_run, "reason": "r" });
        check("/api/v1/records/purge", "post", 200, &admin.bulk("purge", filter).await);
    }
    check(
        "/api/v1/records/{id}/resolve",
        "post",
        404,
        &admin.resolve(unknown, json!({ "action": "release", "reason": "r" })).await,
    );
    check("/api/v1/records/reseal", "post", 409, &admin.bulk("reseal", json!({})).await);
    check(
        "/api/v1/reload",
        "post",
        503,
        &admin.send("POST /api/v1/reload", &format!("{host}Content-Type: application/json\r\n"), "{}").await,
    );
    let audit = admin.get("/api/v1/audit").await;
    assert!(audit.json()["entries"].as_array().unwrap().len() > 2, "{}", audit.body);
    check("/api/v1/audit", "get", 200, &audit);
}

/// What a client may send by the document is taken, and nothing else.
#[tokio::test]
async fn parameters_and_bodies_are_as_the_document_says() {
    let admin = start(None).await;
    let document = document(&admin).await;
    for path in ["/api/v1/records", "/api/v1/audit"] {
        for parameter in document["paths"][path]["get"]["parameters"].as_array().unwrap() {
            let (name, schema) = (parameter["name"].as_str().unwrap(), &parameter["schema"]);
            let values: Vec<String> = match (schema["enum"].as_array(), name) {
                (Some(words), _) => words.iter().map(|word| word.as_str().unwrap().to_owned()).collect(),
                (None, "limit") => vec!["1".into(), schema["maximum"].to_string()],
                (None, "older_than" | "since") => vec!["1h".into()],
                (None, "record") => vec!["0".repeat(64)],
                (None, "scope") => vec!["header:X-Tenant=acme".into()],
                (None, "cursor") => continue,
                (None, _) => vec!["abc".into()],
            };
            for value in values {
                let reply = admin.get(&format!("{path}?{name}={value}")).await;
                assert_eq!(reply.status, 200, "{name}={value}: {}", reply.body);
            }
            admin.get(&format!("{path}?{name}=")).await.is_problem(400, "bad-request");
        }
        admin.get(&format!("{path}?other=1")).await.is_problem(400, "bad-request");
    }
    let body_of = |path: &str| {
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        jsonschema::draft202012::new(schema).unwrap()
    };
    let purge = body_of("/api/v1/records/purge");
    for (body, is_taken) in [
        (json!({ "filter": { "state": "unknown", "older_than": "1h" }, "dry_run": true }), true),
        (json!({ "all": true, "dry_run": true }), true),
        (json!({ "filter": { "state": null }, "dry_run": true }), false),
        (json!({ "filter": { "colour": "red" }, "dry_run": true }), false),
        (json!({ "filter": {}, "dry_run": "true" }), false),
    ] {
        let reply = admin.bulk("purge", body.clone()).await;
        assert_eq!(purge.is_valid(&body), is_taken, "{body}");
        assert_eq!(reply.status == 200, is_taken, "{body}: {}", reply.body);
    }
}

#[tokio::test]
async fn what_the_document_does_not_say_is_refused() {
    let admin = start(None).await;
    let host = format!("Host: {}\r\n", admin.address);
    // Whatever it carries.
    let reply = admin.send("POST /api/v1/routes", &host, "").await;
    assert!(reply.is_problem(405, "method-not-allowed").head.contains("allow: get, head"), "{}", reply.head);
    for query in ["store=required", "store=", "store=optional&store=optional"] {
        admin.get(&format!("/readyz?{query}")).await.is_problem(400, "bad-request").says("`store`");
    }
    let json = format!("{host}Content-Type: application/json\r\n");
    for body in ["[]", "null", "{\"force\":true}"] {
        admin.send("POST /api/v1/reload", &json, body).await.is_problem(400, "bad-request").says("`{}`");
        admin.send("POST /api/v1/records/reseal", &json, body).await.is_problem(400, "bad-request").says("`{}`");
    }
    for body in ["", "{}"] {
        admin.send("POST /api/v1/reload", &json, body).await.is_problem(503, "not-ready");
    }
}
