//! `mode = "observe"`: nothing changes for clients and upstreams, and the report says what protection would have done.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually};

const ROUTES: &str = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\nmode = \"observe\"\n\
                      [[routes]]\nname = \"keyed\"\nmethods = [\"POST\"]\npath = \"/keyed\"\nmode = \"observe\"\n\
                      key = { from = [\"json:/id\"], required = true }\nmax_request_body = \"100KiB\"\n";

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).routes(ROUTES)
}

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// The report on a route, once so many of its requests were looked at.
#[track_caller]
fn report(gate: &Gate, route: &str, requests: u64) -> Value {
    eventually(&format!("{requests} requests of {route} in the report"), || {
        let report = gate.admin("GET", "/api/v1/observed", None).json();
        let routes = report["routes"].as_array().expect("a list").clone();
        let of_route = routes.into_iter().find(|one| one["route"] == route).expect("the route");
        (of_route["requests"] == requests).then_some(of_route)
    })
}

#[track_caller]
fn expect(report: &Value, duplicates: u64, again: u64, would: &Value) {
    let found = (&report["duplicates"], &report["keys_run_again"], &report["would"], &report["dropped"]);
    assert_eq!(found, (&duplicates.into(), &again.into(), would, &serde_json::json!({})), "{report:#}");
}

#[test]
fn nothing_is_changed_and_nothing_is_answered() {
    let upstream = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 201 Made\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\nX-A: 1\r\nContent-Length: 2\r\n\r\nok")
    });
    let gate = plan(&upstream).start();
    for run in 1..=3 {
        let response = gate.post("/orders", "k", "{}");
        assert_eq!(upstream.runs(), run, "not forwarded");
        assert_eq!((response.line.as_str(), response.text().as_str()), ("HTTP/1.1 201 Made", "ok"));
        assert_eq!(response.names(), ["date", "x-a", "content-length"], "headers that were added, dropped or moved");
    }
    let forwarded = upstream.last().head;
    assert!(forwarded.fields.iter().all(|(name, _)| !name.eq_ignore_ascii_case(b"idempotency-attempt")));
    let report = report(&gate, "orders", 3);
    expect(&report, 2, 1, &serde_json::json!({ "executed": 1, "replayed": 2 }));
    // What has not happened yet is counted, too: an alert sees the first.
    let text = gate.admin("GET", "/metrics", None).text();
    for series in [
        "oncegate_observed_total{route=\"keyed\",would=\"key-missing\"} 0",
        "oncegate_observed_dropped_total{reason=\"store\",route=\"keyed\"} 0",
    ] {
        assert!(text.contains(series), "{series} is missing");
    }
    assert_eq!(report["keys_answered_differently"], 0, "its answers were the same");
    assert!(gate.records("").is_empty(), "shadow records are not listed");
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"observed\"", "route=\"orders\""]), 3.0);
    assert_eq!(gate.metric("oncegate_observed_total", &["route=\"orders\"", "would=\"replayed\""]), 2.0);
}

#[test]
fn the_report_says_what_would_have_been() {
    let upstream = Upstream::start(|request| match request.body.bytes.as_slice() {
        b"500" => Reply::status("500 Oh", "no"),
        b"502" => Reply::status("502 Oh", "no"),
        b"broken" => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nnot all of it").close(),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let gate = plan(&upstream).start();
    let send = |key: &str, body: &str| Request::post("/orders").key(key).body(body).try_send(gate.address);
    let mut sent = 0;
    for (key, body) in [
        // Three runs of one key, and another request under it.
        ("thrice", "a"),
        ("thrice", "a"),
        ("thrice", "a"),
        ("thrice", "another"),
        // A release leaves nothing behind.
        ("released", "500"),
        ("released", "500"),
        // What is held is unknown to its retry.
        ("held", "502"),
        ("held", "502"),
        ("broken", "broken"),
        ("not a, key", "x"),
    ] {
        send(key, body);
        sent += 1;
        report(&gate, "orders", sent);
    }
    Request::post("/orders").body("no key").send(&gate);
    Request::post("/orders").key("caller").header("Authorization", "Basic YTpi").body("x").send(&gate);
    report(&gate, "orders", sent + 2);
    Request::post("/orders").key("caller").header("Authorization", "Basic YTpj").body("x").send(&gate);
    let report = report(&gate, "orders", sent + 3);
    let would = serde_json::json!({
        "executed": 2, "replayed": 2, "released": 2, "passed": 1, "key-reused": 1, "outcome-unknown": 2,
        "upstream-broken": 1, "key-invalid": 1, "caller-differs": 1,
    });
    expect(&report, 3, 1, &would);
    assert_eq!(report["keys_answered_differently"], 1);
    let example = &report["examples"][0];
    assert_eq!(
        (&example["path"], &example["method"], &example["would"], &example["answer_differs"]),
        (&"/orders".into(), &"POST".into(), &"replayed".into(), &true.into()),
        "{report:#}"
    );
}

/// Also what concerns other routes, were they to protect.
#[test]
fn what_protection_would_refuse_or_not_notice_is_counted() {
    let route = |name: &str, path: &str, more: &str| {
        format!("[[routes]]\nname = \"{name}\"\nmethods = [\"POST\"]\npath = \"{path}\"\nmode = \"observe\"\n{more}\n")
    };
    let routes =
        route("projects", "/projects/{id}", "") + &route("named", "/named", "key = { from = [\"header:X-Key\"] }");
    let upstream = numbered();
    let gate = Gate::before(&upstream).routes(&routes).start();
    for path in ["/projects/group%2Fname", "/projects/a", "/named"] {
        let answer = gate.post(path, "k", "{}");
        assert_eq!((answer.status, answer.head.has("idempotency-status")), (200, false), "{}", answer.show());
    }
    expect(&report(&gate, "projects", 2), 0, 0, &serde_json::json!({ "executed": 1, "bad-request": 1 }));
    expect(&report(&gate, "named", 1), 0, 0, &serde_json::json!({ "ignored": 1 }));
}

#[test]
fn of_two_at_once_one_would_have_been_told_to_wait() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::ok("slow").hold_until(&held),
        _ => Reply::ok("fast"),
    });
    let gate = plan(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/orders", "k", "{}"));
        upstream.wait_for_runs(1);
        assert_eq!(gate.post("/orders", "k", "{}").text(), "fast");
        // The second is looked at before the first is over.
        report(&gate, "orders", 1);
        signal.open();
        assert_eq!(first.join().unwrap().text(), "slow");
    });
    let report = report(&gate, "orders", 2);
    expect(&report, 1, 1, &serde_json::json!({ "executed": 1, "in-flight": 1 }));
}

#[test]
fn a_client_that_left_counts_as_a_run() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::ok("late").hold_until(&held),
        _ => Reply::ok("again"),
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/orders").key("k").body("{}").bytes());
    upstream.wait_for_runs(1);
    drop(client);
    report(&gate, "orders", 1);
    signal.open();
    assert_eq!(gate.post("/orders", "k", "{}").text(), "again");
    expect(&report(&gate, "orders", 2), 1, 1, &serde_json::json!({ "executed": 1, "replayed": 1 }));
}

#[test]
fn bodies_go_by_whatever_their_size() {
    let upstream = Upstream::start(|request| match request.body.complete {
        true => Reply::ok(&request.body.bytes),
        false => Reply::default().close(),
    });
    let gate = plan(&upstream).start();
    let padded = |id: &str, length: usize| format!("{{\"id\":\"{id}\",\"pad\":\"{}\"}}", "x".repeat(length));
    let send = |body: &str| {
        let response = Request::post("/keyed").body(body).send(&gate);
        assert!(response.body.bytes == body.as_bytes());
    };
    // In one piece, in several pieces, and larger than the route takes.
    let bodies = [padded("small", 10), padded("large", 80 << 10), padded("huge", 8 << 20)];
    bodies.iter().for_each(|body| send(body));
    report(&gate, "keyed", 3);
    bodies.iter().for_each(|body| send(body));
    let mut client = Client::connect(gate.address);
    client.send("POST /keyed HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"id\":\"c\r\n");
    client.send("2\r\n\"}\r\n0\r\n\r\n");
    assert_eq!(client.response().text(), "{\"id\":\"c\"}");
    Request::post("/keyed").body("{}").send(&gate);
    let report = report(&gate, "keyed", 8);
    let would = serde_json::json!({ "executed": 3, "replayed": 2, "request-too-large": 2, "key-missing": 1 });
    expect(&report, 2, 2, &would);
}

#[test]
fn answers_arrive_while_the_upstream_still_sends() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| {
        Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            .pause_until(&held)
            .then("4\r\nlast\r\n0\r\n\r\n")
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/orders").key("k").body("{}").bytes());
    client.head();
    client.wire.until(b"first").expect("the first bytes, while the rest is still to come");
    signal.open();
    client.wire.until(b"last").unwrap();
    report(&gate, "orders", 1);
}

#[test]
fn shadow_records_outlive_the_gate_and_answer_nobody() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    gate.post("/orders", "k", "{}");
    report(&gate, "orders", 1);
    let gate = gate.kill9().start();
    assert_eq!(gate.post("/orders", "k", "{}").text(), "run 2");
    let known = report(&gate, "orders", 1);
    assert_eq!(known["duplicates"], 1, "{known:#}");
    let protect = gate.stop().routes("[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n");
    let gate = protect.start();
    assert_eq!(gate.post("/orders", "k", "{}").expect(200, "executed").text(), "run 3");
    gate.post("/orders", "k", "{}").expect(200, "replayed");
    assert!(gate.admin("GET", "/api/v1/observed", None).json()["routes"].as_array().unwrap().is_empty());
}

#[test]
fn more_than_may_be_looked_at_are_counted_as_dropped() {
    let upstream = numbered();
    let gate = plan(&upstream).top("[limits]\nmax_observing = 0").start();
    assert_eq!(gate.post("/orders", "k", "{}").text(), "run 1");
    let report = report(&gate, "orders", 1);
    let limit = serde_json::json!({ "limit": 1 });
    assert_eq!((&report["dropped"], &report["would"]), (&limit, &serde_json::json!({})));
    assert_eq!(gate.metric("oncegate_observed_dropped_total", &["route=\"orders\""]), 1.0);
    assert_eq!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"max_observing\""]), 1.0);
}

#[test]
fn the_command_shows_the_report() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    gate.post("/orders", "k", "{}");
    report(&gate, "orders", 1);
    gate.post("/orders", "k", "{}");
    report(&gate, "orders", 2);
    let shown = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(["observed", "--admin", &gate.admin.to_string()])
        .output()
        .expect("the command");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success(), "{text}{}", String::from_utf8_lossy(&shown.stderr));
    for line in [
        "  requests        2",
        "  duplicates      1, which oncegate would have answered itself",
        "  ran again       1 key, 1 of them with another answer",
        "  would have got  executed 1",
        "                  replayed 1",
    ] {
        assert!(text.lines().any(|shown| shown == line), "no line {line:?} in\n{text}");
    }
    assert!(text.contains("keyed, observed since "), "{text}");
}

#[test]
fn an_origin_that_is_configured_changes_nothing_either() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 404 Not Found\r\nAccess-Control-Allow-Origin: https://shop.example\r\nContent-Length: 0\r\n\r\n",
        )
    });
    let cors = "[[routes]]\nname = \"orders\"\npath = \"/orders\"\nmode = \"observe\"\n\
                cors = { origins = [\"https://shop.example\"], preflight = true }\n";
    let gate = Gate::before(&upstream).routes(cors).start();
    let asked = |method: &str| {
        let request = Request::new(method, "/orders").key("k").header("Origin", "https://shop.example");
        request.header("Access-Control-Request-Method", "POST").send(&gate)
    };
    for method in ["POST", "OPTIONS"] {
        let response = asked(method);
        assert_eq!(
            (response.status, response.names()),
            (404, vec!["access-control-allow-origin".to_owned(), "content-length".to_owned(),]),
            "{method}"
        );
    }
}

#[test]
fn an_upstream_that_refuses_a_retry_has_not_run_it() {
    let upstream = Upstream::start(|request| match (request.start_line().as_str(), request.nth) {
        (line, 1) if line.contains("/orders") => Reply::status("201 Created", "{}"),
        _ => Reply::status("409 Conflict", "it exists"),
    });
    let gate = plan(&upstream).start();
    for sent in 1..=3 {
        gate.post("/orders", "k", "{}");
        report(&gate, "orders", sent);
    }
    expect(&report(&gate, "orders", 3), 2, 0, &serde_json::json!({ "executed": 1, "replayed": 2 }));
}

#[test]
fn answers_without_a_body_are_told_apart_by_where_they_lead() {
    let upstream = Upstream::start(|request| {
        Reply::raw(format!("HTTP/1.1 201 Created\r\nLocation: /orders/{}\r\nContent-Length: 0\r\n\r\n", request.nth))
    });
    let gate = plan(&upstream).start();
    for sent in 1..=2 {
        gate.post("/orders", "k", "{}");
        report(&gate, "orders", sent);
    }
    assert_eq!(report(&gate, "orders", 2)["keys_answered_differently"], 1);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_the_answer_got_no_other_answer() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| {
        let reply = Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfirst");
        if request.nth == 1 { reply.pause_until(&held).then("last") } else { reply.then("last") }
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/orders").key("k").body("{}").bytes());
    client.wire.until(b"first").unwrap();
    drop(client);
    report(&gate, "orders", 1);
    signal.open();
    assert_eq!(gate.post("/orders", "k", "{}").text(), "firstlast");
    let report = report(&gate, "orders", 2);
    expect(&report, 1, 1, &serde_json::json!({ "executed": 1, "replayed": 1 }));
    assert_eq!(report["keys_answered_differently"], 0);
}

#[test]
fn a_body_with_trailers_is_compared() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    for sent in 1..=2 {
        let mut client = Client::connect(gate.address);
        client.send(
            "POST /orders HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nTrailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n\
             2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n",
        );
        assert_eq!(client.response().status, 200);
        report(&gate, "orders", sent);
    }
    expect(&report(&gate, "orders", 2), 1, 1, &serde_json::json!({ "executed": 1, "replayed": 1 }));
}

#[test]
fn a_reload_ends_the_report_on_a_route() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    gate.post("/orders", "k", "{}");
    report(&gate, "orders", 1);
    drop(gate.plan.clone().routes(&ROUTES.replacen("mode = \"observe\"", "mode = \"protect\"", 1)).config());
    gate.sighup();
    eventually("the reload", || (gate.post("/orders", "new", "{}").word() != "").then_some(()));
    let routes = gate.admin("GET", "/api/v1/observed", None).json()["routes"].clone();
    assert_eq!(routes.as_array().map(Vec::len), Some(1), "{routes:#}");
    assert_eq!(routes[0]["route"], "keyed");
}

/// It has nothing to do with which store is away.
mod faults {
    use super::*;
    use crate::support::faults::Fault;

    #[test]
    fn a_store_that_is_away_costs_counts_and_nothing_else() {
        let upstream = numbered();
        let gate = plan(&upstream).with_faults().start();
        gate.fault(Fault::Full);
        let began = std::time::Instant::now();
        for run in 1..=20 {
            assert_eq!(gate.post("/orders", &format!("k{run}"), "{}").text(), format!("run {run}"));
        }
        assert!(began.elapsed() < Duration::from_secs(20), "requests waited for the store");
        assert_eq!(report(&gate, "orders", 20)["dropped"], serde_json::json!({ "store": 20 }));
        gate.heal();
        eventually("the store is back", || {
            gate.post("/orders", "after", "{}");
            let report = gate.admin("GET", "/api/v1/observed", None).json();
            let routes = report["routes"].as_array().unwrap().clone();
            let would = &routes.iter().find(|one| one["route"] == "orders").unwrap()["would"];
            (would["executed"] == 1).then_some(())
        });
    }
}
