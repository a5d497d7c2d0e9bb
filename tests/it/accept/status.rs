//! The status of an accepted request, for the caller who sent it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::reload::reload;

const SHOP: &str = "https://shop.example";
const CORS: &str = "cors = { origins = [\"https://shop.example\"] }\n";

#[test]
fn the_status_is_its_callers_alone() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = accepting(&upstream, "").start();
    let as_ada = |request: Request| request.header("authorization", "Basic YWRhOjE=");
    let location = expect_accepted(&as_ada(Request::post("/charges").key("k-1").body("{}")).send(&gate));
    eventually("it is delivered", || {
        (as_ada(Request::get(&location)).send(&gate).json()["state"] == "completed").then_some(())
    });
    Request::get(&location).send(&gate).expect_bare_problem(404, "no-route");
    Request::get(&location).header("authorization", "Basic Ym9iOjE=").send(&gate).expect_bare_problem(404, "no-route");
    // The same user with another password.
    let other = Request::get(&location).header("authorization", "Basic YWRhOjI=").send(&gate);
    other.expect_bare_problem(422, "caller-differs");
    let absent = format!("/.well-known/oncegate/requests/{}", "0".repeat(64));
    Request::get(&absent).send(&gate).expect_bare_problem(404, "no-route");
    Request::get("/.well-known/oncegate/requests/x").send(&gate).expect_bare_problem(404, "no-route");
    let refused = Request::post(&location).body("").send(&gate);
    assert!(code(&refused) == 405 && refused.get("date").is_some(), "{}", refused.show());
}

/// Neither the 202 of a retry nor the status asks its client to come back before anything can have changed.
#[test]
fn a_client_is_to_wait_for_the_next_attempt() {
    if is_refused_here() {
        return;
    }
    let upstream =
        Upstream::start(|_| Reply::raw("HTTP/1.1 503 Later\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n"));
    let gate = accepting(&upstream, "docs = \"https://docs.example/x\"\n").start();
    let post = |user: &str| Request::post("/charges").key("k-1").header("authorization", user).body("{}").send(&gate);
    let ada = "Basic YWRhOjE=";
    let location = expect_accepted(&post(ada));
    let look = |user: &str| Request::get(&location).header("authorization", user).send(&gate);
    eventually("an attempt has failed", || (look(ada).json()["attempts"] == 1).then_some(()));
    assert!(look(ada).retry_after() > 3000 && post(ada).retry_after() > 3000);
    // The same user with another password.
    let differs = look("Basic YWRhOjI=");
    assert_eq!(differs.get("link").as_deref(), Some("<https://docs.example/x>; rel=\"describedby\""));
    assert_eq!(differs.json()["code"], "caller-differs");
}

/// A retry hears the same as who looks at the status.
#[test]
fn a_retry_of_a_request_whose_delivery_will_ask_the_upstream_is_still_queued() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let recovery = "recovery = { probe = \"/by-key/{key}\", after = \"1h\" }\n";
    let gate = accepting(&upstream, recovery).start();
    let post = || gate.post("/charges", "k-1", "{}");
    let location = expect_accepted(&post());
    upstream.wait_for_runs(1);
    eventually("it is unknown", || (gate.states("k-1") == ["unknown"]).then_some(()));
    wait_for(&gate, &location, "queued");
    assert_eq!(expect_accepted(&post()), location);
    assert_eq!(upstream.runs(), 1);
}

/// The status gives what a retry gets: what an older policy kept is not replayed.
#[test]
fn the_answer_at_the_status_lacks_the_headers_that_no_retry_gets() {
    if is_refused_here() {
        return;
    }
    let head = "HTTP/1.1 201 Created\r\nSet-Cookie: a=1\r\nX-Kept: k\r\nContent-Length: 4\r\n\r\ndone";
    let upstream = Upstream::start(move |_| Reply::raw(head));
    let gate = accepting(&upstream, "").start();
    let location = expect_accepted(&gate.post("/login", "k-1", "{}"));
    wait_for(&gate, &location, "completed");
    let exclude = "response_headers = { exclude = [\"Set-Cookie\"] }\n";
    let gate = gate.stop().defaults(&format!("{ACCEPT}{exclude}")).start();
    let asked = Request::get(&format!("{location}?answer"));
    for answer in [gate.post("/login", "k-1", "{}"), asked.send(&gate)] {
        answer.expect(201, "replayed");
        assert!(!answer.head.has("set-cookie"), "{}", answer.show());
        assert_eq!((answer.get("x-kept").as_deref(), answer.text().as_str()), (Some("k"), "done"));
    }
    assert_eq!(upstream.runs(), 1);
}

/// The values of a header, in one line.
fn all(answer: &Response, name: &str) -> String {
    let lines = answer.head.all(name);
    lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect::<Vec<_>>().join(", ")
}

#[test]
fn scripts_of_a_named_origin_may_read_the_202_and_the_status() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::raw(JSON));
    let gate = accepting(&upstream, CORS).start();
    let of = |request: Request, origin: &str| request.header("origin", origin).send(&gate);
    let accepted = of(Request::post("/charges").key("k-1").body("{}"), SHOP);
    let location = expect_accepted(&accepted);
    assert_eq!(all(&accepted, "access-control-allow-origin"), SHOP);
    let exposed = all(&accepted, "access-control-expose-headers");
    assert!(exposed.contains("retry-after") && exposed.contains("location"), "{exposed}");
    wait_for(&gate, &location, "completed");
    let status = of(Request::get(&location), SHOP);
    assert_eq!((code(&status), all(&status, "access-control-allow-origin")), (200, SHOP.to_owned()));
    assert_eq!(all(&status, "vary").to_ascii_lowercase(), "accept, origin");
    let absent = format!("/.well-known/oncegate/requests/{}", "0".repeat(64));
    let absent = of(Request::get(&absent), SHOP);
    absent.expect_bare_problem(404, "no-route");
    assert_eq!(all(&absent, "access-control-allow-origin"), SHOP);
    // What the upstream answered is shared as the upstream says.
    let answer = of(Request::get(&format!("{location}?answer")), SHOP);
    answer.expect(200, "replayed");
    assert_eq!(all(&answer, "access-control-allow-origin"), "");
    // The question of a browser before a request with credentials.
    let asks = |origin: &str, method: &str| {
        let question = Request::new("OPTIONS", &location).header("access-control-request-method", method);
        of(question.header("access-control-request-headers", "authorization"), origin)
    };
    let allowed = asks(SHOP, "GET");
    assert_eq!((code(&allowed), all(&allowed, "access-control-allow-origin")), (204, SHOP.to_owned()));
    assert_eq!(all(&allowed, "access-control-allow-headers"), "authorization");
    for (origin, method) in [("https://evil.example", "GET"), (SHOP, "POST")] {
        let refused = asks(origin, method);
        assert_eq!((code(&refused), all(&refused, "access-control-allow-origin")), (405, String::new()), "{origin}");
    }
    let other = of(Request::get(&location), "https://evil.example");
    assert_eq!((code(&other), all(&other, "access-control-allow-origin")), (200, String::new()));
}

#[test]
fn a_type_of_weight_0_is_not_asked_for() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::raw(JSON));
    let gate = accepting(&upstream, "").start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    wait_for(&gate, &location, "completed");
    for (accept, is_answer) in [
        ("application/json", true),
        ("text/plain, application/json;q=0.5", true),
        ("application/json;q=0", false),
        ("application/json; charset=utf-8; Q=0.000", false),
        ("*/*", false),
    ] {
        let got = Request::get(&location).header("accept", accept).send(&gate).json();
        assert_eq!(got.get("charge").is_some(), is_answer, "{accept}: {got}");
    }
}

#[test]
fn a_status_outlives_the_mode_of_its_route() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| {
        let is_for_gate = !request.start_line().contains("/.well-known/");
        if is_for_gate { Reply::raw(JSON) } else { Reply::ok("the upstream's own") }
    });
    let plan = accepting(&upstream, CORS);
    let gate = plan.start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    wait_for(&gate, &location, "completed");
    assert!(reload(&gate, &plan.defaults(&format!("mode = \"protect\"\n{CORS}"))));
    assert_eq!(status(&gate, &location)["state"], "completed");
    Request::get(&format!("{location}?answer")).send(&gate).expect(200, "replayed");
    let asked =
        Request::new("OPTIONS", &location).header("access-control-request-method", "GET").header("origin", SHOP);
    assert_eq!(code(&asked.send(&gate)), 204);
    // What was never accepted is the upstream's, whose own statuses may be at such a path: it may be another gate.
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    let plain = gate
        .records("state=completed")
        .iter()
        .filter_map(|record| record["id"].as_str().map(str::to_owned))
        .find(|id| !location.ends_with(id.as_str()))
        .expect("a second record");
    for id in [plain, "0".repeat(64)] {
        let passed = Request::get(&format!("/.well-known/oncegate/requests/{id}")).send(&gate);
        assert_eq!(passed.text(), "the upstream's own", "{id}");
    }
}

#[test]
fn the_time_before_an_upstream_may_be_asked_uses_up_no_attempts() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|request| match request.start_line().starts_with("GET ") {
        true => Reply::raw(JSON),
        false => Reply::nothing().close(),
    });
    let more = "recovery = { probe = \"/by-key/{key}\", after = \"2s\" }\n\
                deliver = { attempts = 3, backoff = \"10ms\", max_backoff = \"20ms\" }\n";
    let gate = accepting(&upstream, more).start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    assert_eq!(wait_for(&gate, &location, "completed")["status"], 200);
    assert_eq!(upstream.runs_of("k-1"), 1);
}

#[test]
fn what_is_found_out_after_it_was_given_up_is_dead_no_more() {
    if is_refused_here() {
        return;
    }
    let is_known = Arc::new(AtomicBool::new(false));
    let books = Arc::clone(&is_known);
    let upstream = Upstream::start(move |request| match request.start_line().starts_with("GET ") {
        true if books.load(Ordering::SeqCst) => Reply::raw(JSON),
        true => Reply::status("500 Internal Server Error", "no"),
        false => Reply::nothing().close(),
    });
    let more = "recovery = { probe = \"/by-key/{key}\", after = \"0s\", every = \"1s\" }\ndeliver = { attempts = 1 }\n";
    let gate = accepting(&upstream, more).start();
    let location = expect_accepted(&gate.post("/charges", "k-1", "{}"));
    let dead =
        || gate.admin("GET", "/api/v1/deliveries?state=dead", None).json()["deliveries"].as_array().map(Vec::len);
    eventually("it is given up", || (dead() == Some(1)).then_some(()));
    is_known.store(true, Ordering::SeqCst);
    assert_eq!(wait_for(&gate, &location, "completed")["status"], 200);
    eventually("it is dead no more", || (dead() == Some(0)).then_some(()));
    assert_eq!(upstream.runs_of("k-1"), 1);
}

#[test]
fn the_path_of_a_status_is_explained() {
    if is_refused_here() {
        return;
    }
    let plan = accepting(&Upstream::start(|_| Reply::ok("x")), "");
    let config = plan.config().to_string_lossy().into_owned();
    let target = "http://gate.example/.well-known/oncegate/requests/0";
    let (_, said, _) = oncegate(&["explain", "--config", &config, target]);
    assert!(said.contains("the status of an accepted request"), "{said}");
}
