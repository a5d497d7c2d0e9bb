//! `recovery = { probe = ... }`: the upstream is asked what became of an unknown outcome.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::reload::reload;
use crate::support::store::migrated;
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream, eventually};

pub const NOW: &str = "recovery = { probe = \"/by-key/{key}?record={id}\", after = \"0s\" }\n";

/// An upstream that says nothing to the first POST of each key, and to questions what `books` says.
pub fn forgetful(books: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Upstream {
    let (seen, asked) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
    Upstream::start(move |request| {
        if request.start_line().starts_with("GET ") {
            return books(asked.fetch_add(1, Ordering::SeqCst) + 1);
        }
        let key = request.key();
        let mut seen = seen.lock().expect("no panic");
        if seen.contains(&key) {
            return Reply::ok("the second run");
        }
        seen.push(key);
        Reply::nothing().close()
    })
}

pub fn count(upstream: &Upstream, method: &str) -> usize {
    upstream.seen().iter().filter(|request| request.start_line().starts_with(method)).count()
}

fn gate_before(upstream: &Upstream, recovery: &str) -> Gate {
    Gate::before(upstream).defaults(recovery).start()
}

/// The first request of a key, whose outcome is unknown.
pub fn lost(gate: &Gate, key: &str) -> Response {
    let reply = gate.post("/charges", key, "{}");
    reply.expect_problem(502, "upstream-broken");
    reply
}

#[test]
fn what_the_upstream_has_is_the_answer_from_then_on() {
    let upstream = forgetful(|_| {
        Reply::raw(
            "HTTP/1.1 201 Created\r\nX-Charge: ch_1\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 4\r\n\r\nch_1",
        )
    });
    let gate = gate_before(&upstream, NOW);
    lost(&gate, "k_1/%");
    let retry = || gate.post("/charges", "k_1/%", "{}");
    let recovered = retry();
    recovered.expect(201, "recovered");
    assert_eq!((recovered.text().as_str(), recovered.get("x-charge").as_deref()), ("ch_1", Some("ch_1")));
    assert!(recovered.get("idempotency-expires").is_some());
    assert_eq!(recovered.get("idempotent-replayed"), None);
    let replayed = retry();
    replayed.expect(201, "replayed");
    recovered.expect_repeated_by(&replayed);
    assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, 1));
    // The right to ask may still stand beside it.
    let record = &gate.records("state=completed")[0];
    let id = record["id"].as_str().expect("an id");
    let question = upstream.last();
    assert_eq!(question.start_line(), format!("GET /by-key/k_1%2F%25?record={id} HTTP/1.1"));
}

/// Many servers decode `%2F` before they look for the resource, and know nothing of that path.
#[test]
fn what_is_not_found_of_a_key_with_a_slash_does_not_run_again() {
    let upstream = forgetful(|_| Reply::status("404 Not Found", ""));
    let gate = gate_before(&upstream, NOW);
    for (key, runs) in [("2026/11/7", 1), ("2026-11-7", 2)] {
        lost(&gate, key);
        let retry = gate.post("/charges", key, "{}");
        assert_eq!(retry.word(), if runs == 1 { "outcome-unknown" } else { "executed" }, "{}", retry.show());
        assert_eq!(upstream.runs_of(key), runs, "{key}");
    }
    assert_eq!(count(&upstream, "GET"), 2);
}

#[test]
fn a_question_has_the_headers_of_the_retry_but_those_of_its_body_its_key_and_its_conditions() {
    let upstream = forgetful(|_| Reply::ok("x"));
    let gate = gate_before(&upstream, NOW);
    let send = |authorization: &str| {
        Request::post("/charges")
            .key("k-1")
            .header("Authorization", authorization)
            .header("X-Tenant", "t-1")
            .header("Content-Type", "application/json")
            .header("If-Match", "\"1\"")
            .header("Idempotency-Attempt", "forged")
            .body("{}")
            .send(&gate)
    };
    send("Basic YTpi").expect_problem(502, "upstream-broken");
    // Another password is another proof: nobody is asked on its behalf.
    send("Basic YTpj").expect_problem(422, "caller-differs");
    assert_eq!(count(&upstream, "GET"), 0);
    send("Basic YTpi").expect(200, "recovered");
    let head = upstream.last().head;
    assert_eq!(head.get("authorization").as_deref(), Some("Basic YTpi"));
    assert_eq!(head.get("x-tenant").as_deref(), Some("t-1"));
    assert!(head.get("via").is_some() && head.get("x-forwarded-for").is_some());
    for absent in ["content-type", "content-length", "if-match", "idempotency-key", "idempotency-attempt"] {
        assert_eq!(head.get(absent), None, "{absent}");
    }
}

#[test]
fn what_the_upstream_never_saw_runs_again() {
    for status in ["404 Not Found", "410 Gone"] {
        let upstream = forgetful(move |_| Reply::status(status, "no such charge"));
        let gate = gate_before(&upstream, NOW);
        lost(&gate, "k-1");
        let run = gate.post("/charges", "k-1", "{}");
        run.expect(200, "executed");
        assert_eq!(run.text(), "the second run");
        gate.post("/charges", "k-1", "{}").expect(200, "replayed");
        assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (2, 1));
        // Each attempt has a token of its own.
        let tokens: Vec<_> =
            upstream.seen().iter().filter_map(|request| request.head.get("idempotency-attempt")).collect();
        assert!(tokens.len() == 2 && tokens[0] != tokens[1]);
    }
}

/// An upstream whose path for questions knows nothing, or nothing of some requests, as where it is wrong: `finds` says of
/// which it knows.
fn without_books(finds: impl Fn(&str) -> bool + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |request| match request.start_line() {
        line if line.starts_with("GET ") && finds(&line) => Reply::ok("it has it"),
        line if line.starts_with("GET ") => Reply::status("404 Not Found", "no such path"),
        _ if request.key().is_some_and(|key| key.starts_with("lost")) => Reply::nothing().close(),
        _ => Reply::ok("paid"),
    })
}

fn checks(gate: &Gate, finding: &str) -> f64 {
    gate.metric("oncegate_probe_checks_total", &[&format!("finding=\"{finding}\""), "route=\"all\""])
}

#[test]
fn a_path_that_does_not_find_what_succeeded_lets_nothing_run_again() {
    let upstream = without_books(|_| false);
    let plan = Gate::before(&upstream).defaults(NOW);
    let gate = plan.start();
    assert_eq!([0.0; 3], ["done", "absent", "unclear"].map(|finding| checks(&gate, finding)));
    let paid = Request::post("/charges").key("k").header("Authorization", "Bearer b").header("X-Own", "x").body("{}");
    paid.send(&gate).expect(200, "executed");
    eventually("a check", || (checks(&gate, "absent") > 0.0).then_some(()));
    let question = upstream.seen().into_iter().find(|request| request.start_line().starts_with("GET ")).unwrap();
    assert!(question.start_line().starts_with("GET /by-key/k?record="), "{}", question.start_line());
    for (name, value) in [("authorization", Some("Bearer b")), ("x-own", Some("x")), ("idempotency-key", None)] {
        assert_eq!(question.head.get(name).as_deref(), value, "{name}");
    }
    assert!(gate.log().contains("the probe does not find a request that has succeeded"), "{}", gate.log());
    // By the letter of its answer, the upstream never saw this.
    lost(&gate, "lost");
    gate.post("/charges", "lost", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs_of("lost"), 1);
    // A reload with the same probe of the same upstream forgets nothing, and one with another does.
    let contradicted = || gate.metric("oncegate_probe_contradicted", &["route=\"all\""]);
    assert!(reload(&gate, &plan));
    assert_eq!(contradicted(), 1.0);
    gate.post("/charges", "lost", "{}").expect_problem(409, "outcome-unknown");
    // Nor does one that is refused.
    let refused =
        plan.clone().upstream("timeout = \"20s\"").defaults(&format!("{NOW}scope = [\"header:X-Tenant?\"]\n"));
    assert!(!reload(&gate, &refused));
    assert_eq!(contradicted(), 1.0);
    assert!(reload(&gate, &plan.clone().upstream("timeout = \"20s\"")));
    assert_eq!(contradicted(), 0.0);
    gate.post("/charges", "lost", "{}").expect_problem(502, "upstream-broken");
    assert_eq!(upstream.runs_of("lost"), 2);
}

/// The gate asks by itself with headers of its own, to which an upstream may show less than to its client.
#[test]
fn headers_that_do_not_find_what_succeeded_release_nothing() {
    let upstream = Upstream::start(move |request| match request.start_line() {
        line if line.starts_with("GET ") && !request.head.has("authorization") => Reply::status("404 Not Found", ""),
        line if line.starts_with("GET ") => Reply::ok("it has it"),
        _ if request.key().is_some_and(|key| key.starts_with("lost")) => Reply::nothing().close(),
        _ => Reply::ok("paid"),
    });
    let recovery = "recovery = { probe = \"/by-key/{key}\", after = \"0s\", every = \"1s\" }\n";
    let gate = gate_before(&upstream, recovery);
    let post =
        |key: &str| Request::post("/charges").key(key).header("Authorization", "Bearer b").body("{}").send(&gate);
    post("k").expect(200, "executed");
    eventually("a check of both", || (checks(&gate, "absent") + checks(&gate, "done") > 1.0).then_some(()));
    assert!(gate.log().contains("with recovery.headers, the probe does not find"), "{}", gate.log());
    assert_eq!(gate.metric("oncegate_probe_contradicted", &["route=\"all\""]), 1.0);
    post("lost").expect_problem(502, "upstream-broken");
    let asked = || count(&upstream, "GET /by-key/lost");
    eventually("two rounds", || (asked() > 1).then_some(()));
    // While the upstream is asked, a record of the question stands beside it.
    eventually("it stays", || (gate.states("lost") == ["unknown"]).then_some(()));
    // A retry is shown it.
    post("lost").expect(200, "recovered");
    assert_eq!(upstream.runs_of("lost"), 1);
}

#[test]
fn a_path_that_finds_what_succeeded_is_believed() {
    let upstream = without_books(|line| line.contains("/k?"));
    let gate = gate_before(&upstream, NOW);
    lost(&gate, "lost");
    gate.post("/charges", "k", "{}").expect(200, "executed");
    eventually("a check", || (checks(&gate, "done") > 0.0).then_some(()));
    gate.post("/charges", "lost", "{}").expect_problem(502, "upstream-broken");
    assert_eq!(upstream.runs_of("lost"), 2);
}

/// A request that is too old to run still gets what the upstream has. Where that knows nothing, it is refused.
#[test]
fn a_retry_that_may_not_run_gets_what_the_upstream_has() {
    let upstream = forgetful(|nth| match nth {
        1 => Reply::status("404 Not Found", "no such charge"),
        _ => Reply::ok("from the books"),
    });
    let rule = "request_time = { from = \"header:X-Request-Timestamp\", max_age = \"1h\" }\n";
    let gate = gate_before(&upstream, &[NOW, rule].concat());
    let charge = |time: SystemTime| {
        let time = humantime::format_rfc3339(time).to_string();
        Request::post("/charges").key("k-1").header("X-Request-Timestamp", time).body("{}").send(&gate)
    };
    let long_ago = SystemTime::now() - Duration::from_secs(2 * 60 * 60);
    charge(SystemTime::now()).expect_problem(502, "upstream-broken");
    charge(long_ago).expect_problem(400, "request-expired");
    // The right to ask is given back after an answer.
    eventually("it is recovered", || {
        let reply = charge(long_ago);
        assert!(["in-flight", "recovered"].contains(&reply.word().as_str()), "{}", reply.show());
        (reply.word() == "recovered").then_some(())
    });
    charge(long_ago).expect(200, "replayed");
    assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, 2));
}

#[test]
fn the_upstream_says_what_is_kept_of_what_it_has() {
    let upstream = forgetful(|_| {
        let control = "Idempotency-Control: no-store, ttl=60\r\n";
        Reply::raw(format!("HTTP/1.1 201 Created\r\n{control}Content-Length: 4\r\n\r\nch_1"))
    });
    let gate = gate_before(&upstream, NOW);
    lost(&gate, "k-1");
    let recovered = gate.post("/charges", "k-1", "{}");
    recovered.expect(201, "recovered");
    assert_eq!((recovered.text().as_str(), recovered.get("idempotency-control")), ("ch_1", None));
    let retry = gate.post("/charges", "k-1", "{}");
    retry.expect_problem(409, "response-not-stored");
    let expires = |reply: &Response| httpdate::parse_http_date(&reply.get("idempotency-expires").expect("an expiry"));
    let left = expires(&recovered).expect("a date").duration_since(SystemTime::now()).expect("later");
    assert!(left <= Duration::from_secs(60), "{left:?}");
}

/// The answer to a retry once nobody else asks any more: the right to ask is given back after an answer.
fn asked_again(gate: &Gate) -> Response {
    eventually("nobody else asks", || {
        Some(gate.post("/charges", "k-1", "{}")).filter(|response| response.word() != "in-flight")
    })
}

#[test]
fn anything_else_tells_nothing() {
    let large = "x".repeat(10 << 20);
    let upstream = forgetful(move |nth| match nth {
        1 => Reply::status("500 Internal Server Error", "books are closed"),
        2 => Reply::raw("HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"),
        3 => Reply::ok(&large),
        4 => Reply::status("401 Unauthorized", ""),
        5 => Reply::nothing().close(),
        6 => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").close(),
        // It hangs.
        7 => Reply::nothing().pause(Duration::from_secs(60)),
        _ => Reply::ok("at last"),
    });
    let gate = Gate::before(&upstream).defaults(NOW).upstream("timeout = \"4s\"").start();
    lost(&gate, "k-1");
    for asked in 1..=7 {
        asked_again(&gate).expect_problem(409, "outcome-unknown");
        assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, asked));
    }
    asked_again(&gate).expect(200, "recovered");
    assert_eq!(count(&upstream, "POST"), 1);
}

#[test]
fn nothing_is_asked_too_early_or_about_another_request() {
    let upstream = forgetful(|_| Reply::ok("x"));
    let gate = gate_before(&upstream, "recovery = { probe = \"/by-key/{key}\", after = \"6s\" }\n");
    lost(&gate, "k-1");
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    gate.post("/charges", "k-1", "{\"other\":1}").expect_problem(422, "key-reused");
    assert_eq!(count(&upstream, "GET"), 0);
    eventually("it is time", || (gate.post("/charges", "k-1", "{}").word() == "recovered").then_some(()));
    gate.post("/charges", "k-1", "{\"other\":1}").expect_problem(422, "key-reused");
    // By default it is the upstream's timeout.
    let gate = Gate::before(&upstream).defaults("recovery = { probe = \"/by-key/{key}\" }\n").start();
    lost(&gate, "k-2");
    gate.post("/charges", "k-2", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(count(&upstream, "GET"), 1);
}

#[test]
fn one_request_asks_at_a_time_in_one_gate() {
    asks_once(|upstream| {
        let plan = Gate::before(upstream).defaults(NOW);
        vec![plan.start()]
    });
}

#[test]
fn one_request_asks_at_a_time_in_three_gates() {
    let Some(database) = migrated() else { return };
    asks_once(|upstream| {
        [(); 3].map(|()| Gate::before(upstream).store_url(&database.url).defaults(NOW).start()).into()
    });
}

fn asks_once(gates: impl Fn(&Upstream) -> Vec<Gate>) {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = forgetful(move |_| Reply::ok("x").hold_until(&held));
    let gates = gates(&upstream);
    lost(&gates[0], "k-1");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gates[0].post("/charges", "k-1", "{}"));
        eventually("the upstream is asked", || (count(&upstream, "GET") == 1).then_some(()));
        for gate in gates.iter().chain(&gates) {
            let other = gate.post("/charges", "k-1", "{}");
            other.expect_problem(409, "in-flight");
            assert!(other.retry_after() >= 1);
        }
        assert_eq!(count(&upstream, "GET"), 1);
        signal.open();
        first.join().expect("an answer").expect(200, "recovered");
    });
    for gate in &gates {
        gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    }
    assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, 1));
    // What gave the right to ask is gone again.
    eventually("one record", || (gates[0].records("").len() == 1).then_some(()));
}

/// The gate is killed while it asks: another asks again, and nothing runs.
#[test]
fn a_gate_that_is_killed_while_it_asks_leaves_the_outcome_unknown() {
    let upstream = forgetful(|nth| match nth {
        1 => Reply::nothing().pause(Duration::from_secs(60)),
        _ => Reply::ok("x"),
    });
    let gate = Gate::before(&upstream).defaults(NOW).upstream("timeout = \"2s\"").start();
    lost(&gate, "k-1");
    let address = gate.address;
    let gate = std::thread::scope(|scope| {
        scope.spawn(move || Request::post("/charges").key("k-1").body("{}").try_send(address));
        eventually("the upstream is asked", || (count(&upstream, "GET") == 1).then_some(()));
        gate.kill9().start()
    });
    eventually("another asks", || {
        let reply = gate.post("/charges", "k-1", "{}");
        assert!(["in-flight", "outcome-unknown", "recovered"].contains(&reply.word().as_str()), "{}", reply.show());
        (reply.word() == "recovered").then_some(())
    });
    assert_eq!(count(&upstream, "POST"), 1);
}

#[test]
fn records_whose_clients_never_come_back_are_found_out_too() {
    let upstream = Upstream::start(move |request| match request.start_line() {
        line if line.starts_with("GET ") && request.head.get("authorization").as_deref() != Some("Bearer books") => {
            Reply::status("401 Unauthorized", "")
        }
        line if line.starts_with("GET ") && request.head.get("host").as_deref() != Some("books.example") => {
            Reply::status("421 Misdirected Request", "")
        }
        line if line.starts_with("GET /by-key/absent") => Reply::status("404 Not Found", ""),
        line if line.starts_with("GET /by-key/closed") => Reply::status("500 Internal Server Error", ""),
        line if line.starts_with("GET ") => Reply::ok("from the books"),
        _ => Reply::nothing().close(),
    });
    let plan = Gate::before(&upstream);
    std::fs::write(plan.path("books"), "Bearer books\n").expect("a file");
    let recovery = format!(
        "recovery = {{ probe = \"/by-key/{{key}}\", after = \"0s\", every = \"1s\", headers = {{ Host = \"books.example\", Authorization = \"file:{}\" }} }}\n",
        plan.path("books").display()
    );
    let gate = plan.defaults(&recovery).start();
    for key in ["done", "absent", "closed"] {
        lost(&gate, key);
    }
    let states = |key: &str| gate.states(key);
    eventually("two are found out", || (states("done") == ["completed"] && states("absent").is_empty()).then_some(()));
    eventually("one stays, and no record of a question beside it", || (states("closed") == ["unknown"]).then_some(()));
    let replay = gate.post("/charges", "done", "{}");
    replay.expect(200, "replayed");
    assert_eq!(replay.text(), "from the books");
    assert_eq!(upstream.runs_of("done"), 1);
    // No log has a key or a credential, and the admin API shows the key shortened.
    let log = gate.log();
    assert!(!log.contains("Bearer books") && log.contains("asked the upstream about an unknown outcome"), "{log}");
    let shown = Value::from(gate.records("state=unknown")).to_string();
    assert!(!shown.contains("\"closed\""), "{shown}");
}

#[test]
fn a_route_whose_upstream_is_slow_holds_up_no_other_and_a_reload_ends_its_round() {
    let asked = |upstream: &Upstream, path: &str| {
        upstream.seen().iter().filter(|request| request.start_line().starts_with(&format!("GET {path}"))).count()
    };
    let upstream = Upstream::start(move |request| match request.start_line() {
        line if line.starts_with("GET /old/") => {
            Reply::status("500 Internal Server Error", "").pause(Duration::from_secs(1))
        }
        line if line.starts_with("GET ") => Reply::status("404 Not Found", ""),
        _ => Reply::nothing().close(),
    });
    let route = |name: &str, path: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\npath = \"/{name}/{{*rest}}\"\n\
             recovery = {{ probe = \"/{path}/{{key}}\", after = \"0s\", every = \"1s\" }}\n"
        )
    };
    let plan = Gate::before(&upstream);
    let gate = plan.clone().routes(&(route("slow", "old") + &route("quick", "by-key"))).start();
    for nth in 0..8 {
        gate.post("/slow/charges", &format!("slow-{nth}"), "{}").expect(502, "upstream-broken");
    }
    eventually("a round has begun", || (asked(&upstream, "/old/") > 0).then_some(()));
    gate.post("/quick/charges", "quick", "{}").expect(502, "upstream-broken");
    eventually("the other route has its own", || gate.states("quick").is_empty().then_some(()));
    // While the upstream is asked, a record of the question stands beside it.
    let stands = gate.records("key=slow-0").iter().any(|record| record["method"] == "POST");
    assert!(stands, "its round goes on");
    assert!(reload(&gate, &plan.routes(&(route("slow", "by-key") + &route("quick", "by-key")))));
    let before = asked(&upstream, "/old/");
    eventually("the new path counts", || gate.states("slow-0").is_empty().then_some(()));
    assert!(asked(&upstream, "/old/") <= before + 1, "one question may have been under way");
}

#[test]
fn another_upstream_than_that_of_the_attempt_is_not_asked() {
    let upstream = forgetful(|_| Reply::status("404 Not Found", ""));
    let other = forgetful(|_| Reply::status("404 Not Found", ""));
    let plan = Gate::before(&upstream);
    let to = |name: &str| {
        plan.clone().routes(&format!(
            "[upstreams.other]\nurl = \"{}\"\n[[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"{name}\"\n\
             recovery = {{ probe = \"/by-key/{{key}}\", after = \"0s\" }}\n",
            other.url()
        ))
    };
    let gate = to("app").start();
    lost(&gate, "k-1");
    assert!(reload(&gate, &to("other")));
    let retry = || gate.post("/charges", "k-1", "{}");
    retry().expect_problem(409, "outcome-unknown");
    assert_eq!((other.seen().len(), count(&upstream, "POST")), (0, 1));
    assert!(reload(&gate, &to("app")));
    retry().expect(200, "executed");
    assert_eq!((other.seen().len(), count(&upstream, "GET")), (0, 1));
}
