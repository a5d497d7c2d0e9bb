//! The operator's side: health, metrics, and a way out of an unknown outcome.

use std::process::Command;
use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};

use crate::servers::certificates::{authority, signed};
use crate::support::https::{Certificates, Https};
use crate::support::{Awake, Client, Gate, Reply, Request, Signal, Upstream, eventually};

/// A gate with one unknown record for the key `k-1`, whose next run would answer.
fn with_an_unknown_record() -> (Upstream, Gate, String) {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-broken");
    let id = id_of(&gate, "k-1");
    (upstream, gate, id)
}

fn id_of(gate: &Gate, key: &str) -> String {
    let records = gate.records(&format!("key={key}"));
    assert_eq!(records.len(), 1, "{records:?}");
    records[0]["id"].as_str().expect("an id").to_owned()
}

#[track_caller]
fn resolve(gate: &Gate, id: &str, body: &Value) -> u16 {
    gate.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(body)).status
}

#[test]
fn an_unknown_record_released() {
    let (upstream, gate, id) = with_an_unknown_record();
    let status = resolve(&gate, &id, &json!({ "action": "release", "reason": "not in the ledger" }));
    assert!((200..300).contains(&status), "{status}");
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn an_unknown_record_completed() {
    let (upstream, gate, id) = with_an_unknown_record();
    let body = b"caf\xe9";
    let status = resolve(
        &gate,
        &id,
        &json!({
            "action": "complete",
            "status": 201,
            "headers": [["X-A", "1"], ["Set-Cookie", "a=1"], ["X-B", "2"], ["Set-Cookie", "b=2"]],
            "body_base64": base64::engine::general_purpose::STANDARD.encode(body),
            "reason": "found in the ledger",
        }),
    );
    assert!((200..300).contains(&status), "{status}");
    for _ in 0..2 {
        let replay = gate.post("/charges", "k-1", "{}");
        replay.expect(201, "replayed");
        assert_eq!(replay.body.bytes, body);
        assert_eq!(replay.head.all("set-cookie"), [b"a=1", b"b=2"]);
        assert!(replay.head.has("idempotency-expires"));
    }
    assert_eq!(upstream.runs(), 1);
    assert_eq!(resolve(&gate, &id, &json!({ "action": "release" })), 409, "only unknown ones");
    let gate = gate.kill9().start();
    gate.post("/charges", "k-1", "{}").expect(201, "replayed");
}

#[test]
fn only_unknown_records_are_resolved() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key().as_deref() {
        Some("done") => Reply::ok("x"),
        _ => Reply::ok("x").hold_until(&held),
    });
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "done", "{}").expect(200, "executed");
    std::thread::scope(|scope| {
        let running = scope.spawn(|| gate.post("/charges", "running", "{}"));
        upstream.wait_for_runs(2);
        for key in ["done", "running"] {
            let id = id_of(&gate, key);
            assert_eq!(resolve(&gate, &id, &json!({ "action": "release" })), 409, "{key}");
        }
        signal.open();
        running.join().expect("an answer").expect(200, "executed");
    });
    assert_eq!(resolve(&gate, &"0".repeat(64), &json!({ "action": "release" })), 404);
    assert_eq!(resolve(&gate, "nonsense", &json!({ "action": "release" })), 400);
}

#[test]
fn a_record_purged() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let path = format!("/api/v1/records/{}", id_of(&gate, "k-1"));
    assert_eq!(gate.admin("GET", &path, None).json()["state"], "completed");
    let purged = gate.admin("DELETE", &path, None);
    assert!((200..300).contains(&purged.status), "{}", purged.show());
    assert_eq!(gate.admin("GET", &path, None).status, 404);
    assert_eq!(gate.admin("DELETE", &path, None).status, 404);
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
}

/// A record that an operator removed while its attempt ran: the attempt must not bring it back or answer for another.
#[test]
fn a_record_purged_while_its_attempt_runs() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::ok("run 1").hold_until(&held),
        _ => Reply::ok("run 2"),
    });
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{}"));
        upstream.wait_for_runs(1);
        assert_eq!(gate.admin("DELETE", &format!("/api/v1/records/{}", id_of(&gate, "k-1")), None).status, 204);
        // Another gate on this store could claim it now. This one knows that the attempt still runs.
        gate.post("/charges", "k-1", "{}").expect_problem(409, "in-flight");
        signal.open();
        let first = first.join().expect("an answer");
        assert_eq!((first.status, first.text().as_str()), (200, "run 1"), "{}", first.show());
        assert_ne!(first.word(), "executed", "its answer is not recorded");
        assert!(!first.head.has("idempotency-expires"));
    });
    assert!(gate.records("").is_empty(), "the attempt brought its record back");
    let second = gate.post("/charges", "k-1", "{}");
    second.expect(200, "executed");
    assert_eq!(second.text(), "run 2");
    second.expect_repeated_by(&gate.post("/charges", "k-1", "{}"));
}

#[test]
fn records_are_listed_in_pages_and_by_what_is_asked_for() {
    let upstream = Upstream::start(|request| match request.key().as_deref() {
        Some("broken") => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::ok("secret-body").pause(Duration::ZERO),
    });
    let gate = Gate::before(&upstream).start();
    for nth in 0..7 {
        let key = format!("a-rather-long-key-{nth}");
        let request =
            Request::post("/charges/7?token=secret-query").key(&key).header("Authorization", "Bearer secret-auth");
        request.body("secret-request").send(&gate).expect(200, "executed");
    }
    gate.post("/charges", "broken", "{}");
    assert_eq!(gate.records("").len(), 8);
    assert_eq!(gate.records("state=unknown").len(), 1);
    assert_eq!(gate.records("state=completed").len(), 7);
    assert_eq!(gate.records("state=in-flight").len(), 0);
    assert_eq!(gate.records("route=all").len(), 8);
    assert_eq!(gate.records("route=other").len(), 0);
    assert_eq!(gate.records("older_than=1h").len(), 0);
    assert_eq!(gate.records("key=a-rather-long-key-3&state=completed").len(), 1);
    assert_eq!(gate.records("since=1h").len(), 8);
    assert_eq!(gate.records("since=2999-01-01T00:00:00Z").len(), 0);
    let newest = &gate.records("limit=1")[0];
    assert_eq!(newest["state"], "unknown", "the newest is the first");
    let id = newest["id"].as_str().expect("an id");
    for digits in [15, 16, 33, 64] {
        assert_eq!(gate.records(&format!("id={}", &id[..digits])).len(), 1);
    }
    let mut ids = Vec::new();
    let mut query = "limit=3".to_owned();
    loop {
        let page = gate.admin("GET", &format!("/api/v1/records?{query}"), None).json();
        let records = page["records"].as_array().expect("a list");
        assert!(records.len() <= 3);
        ids.extend(records.iter().map(|record| record["id"].as_str().expect("an id").to_owned()));
        match page["next"].as_str() {
            Some(next) => query = format!("limit=3&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(ids.len(), 8);
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 8, "a record twice");
    let all = gate.admin("GET", "/api/v1/records", None).text() + &gate.log();
    for secret in ["secret-", "a-rather-long-key-"] {
        assert!(!all.contains(secret), "{secret} shows");
    }
    for wrong in ["state=odd", "limit=0", "limit=x", "older_than=x", "since=x", "id=x", "cursor=x"] {
        assert_eq!(gate.admin("GET", &format!("/api/v1/records?{wrong}"), None).status, 400, "{wrong}");
    }
}

/// Purged records are gone from what each gate remembers too.
#[test]
fn records_purged_by_a_filter_run_again() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Gate::before(&upstream).start();
    for key in ["k-1", "k-2", "k-3"] {
        gate.post("/charges", key, "{}").expect(200, "executed");
        gate.post("/charges", key, "{}").expect(200, "replayed");
    }
    let purge = |body: Value| gate.admin("POST", "/api/v1/records/purge", Some(&body));
    assert_eq!(purge(json!({ "reason": "a test" })).status, 400, "a purge of everything says so");
    assert_eq!(purge(json!({ "filter": { "key": "k-1" } })).status, 400, "a purge says why");
    let done = purge(json!({ "filter": { "key": "k-1" }, "reason": "a test" }));
    assert_eq!((done.status, &done.json()["done"]), (200, &json!(1)), "{}", done.show());
    let done = purge(json!({ "filter": { "state": "completed" }, "reason": "a test" }));
    assert_eq!((done.status, &done.json()["done"]), (200, &json!(2)), "{}", done.show());
    for key in ["k-1", "k-2", "k-3"] {
        gate.post("/charges", key, "{}").expect(200, "executed");
    }
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn the_token_is_demanded() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    std::fs::write(plan.path("token"), "open-sesame\n").unwrap();
    let gate = plan.clone().admin(&format!("token_file = \"{}\"", plan.path("token").display())).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let get = |token: Option<&str>, path: &str| {
        let request = Request::get(path).header("Host", "127.0.0.1");
        let request = match token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        };
        request.send(gate.admin).status
    };
    for path in ["/api/v1/records", "/api/v1/records/x", "/metrics"] {
        assert_eq!(get(None, path), 401, "{path}");
        assert_eq!(get(Some("open-sesam"), path), 401, "{path}");
        assert_eq!(get(Some(""), path), 401, "{path}");
    }
    assert_eq!(get(Some("open-sesame"), "/api/v1/records"), 200);
    assert_eq!(get(None, "/livez"), 200, "probes have no token");
    eventually("probes have no token", || (get(None, "/readyz") == 200).then_some(()));
    assert!(!gate.log().contains("open-sesame"));
}

#[test]
fn a_viewer_looks_and_an_operator_acts() {
    let upstream = Upstream::start(|_| Reply::ok("secret-answer"));
    let plan = Gate::before(&upstream);
    std::fs::write(plan.path("ops"), "open-sesame\n").unwrap();
    std::fs::write(plan.path("board"), "look-only\n").unwrap();
    let token =
        |name: &str, role: &str| format!("{{ name = \"{name}\", role = \"{role}\", file = {:?} }}", plan.path(name));
    let tokens = |board: &str| format!("tokens = [{}, {}]", token("ops", "operator"), token("board", board));
    let gate = plan.clone().admin(&tokens("viewer")).start();
    gate.post("/charges", "a-rather-long-key", "{}").expect(200, "executed");
    let ask = |method: &str, path: &str, token: &str| {
        let request = Request::new(method, path).header("Host", "127.0.0.1");
        request.header("Authorization", format!("Bearer {token}")).send(gate.admin)
    };
    let listed = ask("GET", "/api/v1/records", "look-only");
    assert_eq!((listed.status, &listed.json()["records"][0]["key"]), (200, &Value::Null), "{}", listed.show());
    let path = format!("/api/v1/records/{}", listed.json()["records"][0]["id"].as_str().expect("an id"));
    assert_eq!(ask("GET", &path, "look-only").status, 200);
    for (method, target) in [("GET", format!("{path}?answer=true")), ("DELETE", path.clone())] {
        let refused = ask(method, &target, "look-only");
        assert_eq!(refused.status, 403, "{}", refused.show());
        assert_eq!(refused.json()["required_role"], "operator");
    }
    assert!(ask("GET", &path, "open-sesame").json()["key"].as_str().is_some_and(|key| key.contains('…')));
    // A reload gives the token another role.
    let text = std::fs::read_to_string(plan.path("oncegate.toml")).unwrap();
    assert!(text.contains(&tokens("viewer")));
    std::fs::write(plan.path("oncegate.toml"), text.replace(&tokens("viewer"), &tokens("operator"))).unwrap();
    gate.sighup();
    eventually("the role is in force", || (ask("DELETE", &path, "look-only").status == 204).then_some(()));
    let is_change = |line: &&str| line.contains("oncegate::audit") && line.contains("\"board\"");
    eventually("the change is in the log", || gate.log().lines().find(is_change).map(drop));
    assert!(!gate.log().contains("look-only"), "{}", gate.log());
    for nth in 0..20 {
        ask("GET", "/metrics", &format!("guess-{nth}"));
    }
    let throttled = ask("GET", "/metrics", "open-sesame");
    assert_eq!(throttled.status, 429, "{}", throttled.show());
    assert!(throttled.head.has("retry-after"));
    assert_eq!(Request::get("/livez").send(gate.admin).status, 200);
}

fn oncegate(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().expect("an exit status"), text(output.stdout), text(output.stderr))
}

#[test]
fn a_client_without_a_certificate_gets_nowhere() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("ann", "extendedKeyUsage=clientAuth");
    authority(certificates.directory(), "another");
    signed(certificates.directory(), "bob", "another", "extendedKeyUsage=clientAuth");
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).admin(&certificates.server_of_clients()).start();
    let livez = |client: Option<&str>| {
        let mut client = Https::connect(gate.admin, &certificates.client(&["h2", "http/1.1"], client));
        let answer = client.exchange("GET /livez HTTP/1.1\r\nHost: gate.test\r\n\r\n", "\"live\"}")?;
        let protocol = client.0.conn.alpn_protocol().map(<[u8]>::to_vec);
        std::io::Result::Ok((answer, protocol))
    };
    let (answer, protocol) = livez(Some("ann")).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(protocol.as_deref(), Some(&b"http/1.1"[..]));
    for client in [None, Some("bob")] {
        let refused = livez(client).expect_err("refused").to_string();
        assert!(refused.contains("alert"), "at the handshake: {refused}");
    }
    let plain = Request::get("/livez").send(gate.admin);
    assert!(plain.status == 400 && plain.text().contains("https"), "{}", plain.show());
    // Commands that know the configuration trust the certificate that it names.
    let path = |name: &str| certificates.path(name).to_str().expect("UTF-8").to_owned();
    let (config, admin) = (gate.plan.config().to_str().expect("UTF-8").to_owned(), gate.admin.to_string());
    let (cert, key, ca) = (path("ann.pem"), path("ann.key"), path("ca.pem"));
    let shown = ["--admin", &admin, "--admin-cert", &cert, "--admin-key", &key];
    let run = |command: &[&str], more: &[&str]| oncegate(&[command, more].concat());
    let known = [&["--config", &*config][..], &shown].concat();
    assert_eq!(run(&["health"], &known), (0, "ready\n".to_owned(), String::new()));
    let (status, out, error) = run(&["records", "list"], &known);
    assert_eq!((status, &*out), (0, "no records\n"), "{error}");
    assert_eq!(run(&["reload"], &known).0, 0);
    let (status, _, error) = run(&["health"], &["--config", &config, "--admin", &admin]);
    assert!(status == 1 && error.contains("CertificateRequired") && error.contains("--admin-cert"), "{status} {error}");
    // Others go by its name, which an address is not.
    let (status, _, error) = run(&["health"], &[&shown[..], &["--admin-ca", &ca]].concat());
    assert!(status == 1 && error.contains("TLS handshake") && error.contains("--admin-ca"), "{status} {error}");
    let (status, _, error) = run(&["health"], &["--admin", &admin]);
    assert!(status == 1 && error.contains("this port speaks TLS"), "{status} {error}");
    let (status, _, error) = run(&["health"], &["--config", &config, "--admin", &admin, "--admin-cert", &cert]);
    assert!(status == 2 && error.contains("go together") && error.contains("--admin-key"), "{status} {error}");
}

#[test]
fn the_admin_listener_takes_up_a_renewed_certificate() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("renewed", "subjectAltName=DNS:gate.test");
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).admin(&certificates.server("")).start();
    let shown = || {
        let mut client = Https::connect(gate.admin, &certificates.client(&[], None));
        client.exchange("GET /livez HTTP/1.1\r\nHost: gate.test\r\n\r\n", "\"live\"}").expect("an answer");
        client.0.conn.peer_certificates().expect("a certificate")[0].to_vec()
    };
    let before = shown();
    for end in ["key", "pem"] {
        std::fs::copy(certificates.path(&format!("renewed.{end}")), certificates.path(&format!("gate.{end}"))).unwrap();
    }
    eventually("the new certificate", || (shown() != before).then_some(()));
    // A gate that goes on is healthy, whatever has become of its files.
    std::fs::write(certificates.path("gate.pem"), "not yet written").unwrap();
    let (config, admin) = (gate.plan.config().to_str().expect("UTF-8").to_owned(), gate.admin.to_string());
    assert_eq!(oncegate(&["health", "--config", &config, "--admin", &admin]), (0, "ready\n".to_owned(), String::new()));
}

/// More than may be connected: silent ones, those that stop in the middle of a head, and those that read no answers.
#[test]
fn health_is_answered_whatever_others_do() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    std::fs::write(plan.path("token"), "open-sesame\n").unwrap();
    let gate = plan.clone().admin(&format!("token_file = \"{}\"", plan.path("token").display())).start();
    let listing = Request::get("/api/v1/records").header("Host", "a").header("Authorization", "Bearer open-sesame");
    let mut operator = Client::connect(gate.admin);
    operator.send(listing.bytes());
    assert_eq!(operator.response().status, 200);
    let connect = |says: &[u8]| {
        let mut client = Client::connect(gate.admin);
        // It may be closed by then.
        drop(client.wire.send(says));
        client
    };
    let livez = Request::get("/livez").bytes();
    let mut crowd: Vec<Client> = Vec::new();
    for says in [&b""[..], b"GET /livez HTTP/1.1\r\nHost: ", &livez.repeat(200), b""] {
        crowd.extend((0..150).map(|_| connect(says)));
        let began = Awake::start();
        assert_eq!(Request::get("/livez").send(gate.admin).status, 200);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        // Readiness asks the store, which a busy machine may keep waiting.
        eventually("ready", || (Request::get("/readyz").send(gate.admin).status == 200).then_some(()));
    }
    // Who showed the token stays.
    operator.send(listing.bytes());
    assert_eq!(operator.response().status, 200);
    drop(crowd);
}

#[test]
fn a_page_of_another_site_is_refused() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    for host in ["evil.example", "127.0.0.1:80@evil.example", "[::1].evil.example"] {
        let forged = Request::get("/api/v1/records").header("Host", host).send(gate.admin);
        assert_eq!(forged.status, 403, "{host}: {}", forged.show());
    }
    let forged = Request::get("/api/v1/records")
        .header("Host", "127.0.0.1")
        .header("Origin", "http://evil.example")
        .send(gate.admin);
    assert_eq!(forged.status, 403, "{}", forged.show());
}

#[test]
fn health_and_metrics() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    assert_eq!(gate.admin("GET", "/livez", None).status, 200);
    eventually("ready", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
    assert_eq!(gate.admin("GET", "/nothing", None).status, 404);
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    gate.post("/charges", "k-1", "{\"a\":1}").expect_problem(422, "key-reused");
    Request::get("/x").send(&gate);
    let text = gate.admin("GET", "/metrics", None).text();
    for name in [
        "oncegate_requests_total",
        "oncegate_request_duration_seconds",
        "oncegate_upstream_duration_seconds",
        "oncegate_store_duration_seconds",
        "oncegate_attempts_in_flight",
        "oncegate_records",
        "oncegate_leases_expired_total",
        "oncegate_records_swept_total",
        "oncegate_build_info",
    ] {
        assert!(text.contains(&format!("# TYPE {name} ")), "{name} is missing:\n{text}");
    }
    for outcome in ["executed", "replayed", "key-reused"] {
        let label = format!("outcome=\"{outcome}\"");
        assert_eq!(gate.metric("oncegate_requests_total", &["route=\"all\"", &label]), 1.0, "{outcome}");
        assert_eq!(gate.metric("oncegate_request_duration_seconds_count", &["route=\"all\"", &label]), 1.0);
    }
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"passed\""]), 1.0);
    assert_eq!(gate.metric("oncegate_attempts_in_flight", &[]), 0.0);
    eventually("the count of records", || {
        (gate.metric("oncegate_records", &["state=\"completed\""]) == 1.0).then_some(())
    });
    assert!(!text.contains("k-1"), "a key shows in the metrics");
}

#[test]
fn expired_records_are_swept() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).defaults("ttl = \"1s\"").start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    eventually("the sweep", || gate.records("").is_empty().then_some(()));
    eventually("the count", || (gate.metric("oncegate_records_swept_total", &[]) >= 1.0).then_some(()));
    assert_eq!(upstream.runs(), 1);
}
