//! gRPC calls on protected routes: run once, judged by their own status, told in their own words.
//!
//! What gRPC says in headers and trailers is the same over every version of HTTP: these tests say it over HTTP/1.1, byte
//! for byte.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::accept::is_refused_here;
use crate::support::wire::values;
use crate::support::{Gate, Plan, Reply, Request, Response, Signal, Upstream, eventually};

/// A message as it is framed: not compressed, and its length.
const MESSAGE: &[u8] = b"\0\0\0\0\x05\x0a\x03abc";

fn call(key: &str) -> Request {
    let request = Request::post("/pay.Payments/Charge").key(key).header("Content-Type", "application/grpc+proto");
    request.header("TE", "trailers").header("Connection", "TE").body(MESSAGE)
}

/// A message, then these trailers.
fn answer(trailers: &str) -> Reply {
    let mut raw = b"HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nX-Meta-Bin: AAEC\r\n\
                    Trailer: grpc-status, grpc-message, grpc-status-details-bin\r\nTransfer-Encoding: chunked\r\n\r\na\r\n"
        .to_vec();
    raw.extend(MESSAGE);
    raw.extend(format!("\r\n0\r\n{trailers}\r\n").as_bytes());
    Reply::raw(raw)
}

/// Trailers alone: an answer without a message.
fn trailers_only(lines: &str) -> Reply {
    Reply::raw(format!("HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\n{lines}Content-Length: 0\r\n\r\n"))
}

fn serving(reply: impl Fn() -> Reply + Send + Sync + 'static) -> (Upstream, Plan) {
    let upstream = Upstream::start(move |_| reply());
    let plan = Gate::before(&upstream);
    (upstream, plan)
}

/// Holds that this is a problem in the words of gRPC.
#[track_caller]
fn expect_told(response: &Response, status: &str, code: &str, pushback: Option<&str>) {
    response.expect(200, code);
    assert_eq!(response.get("content-type").as_deref(), Some("application/grpc"), "{}", response.show());
    assert_eq!(response.get("grpc-status").as_deref(), Some(status), "{}", response.show());
    assert!(response.get("grpc-message").unwrap().starts_with(&format!("{code}: ")), "{}", response.show());
    match pushback {
        Some(pushback) => assert_eq!(response.get("grpc-retry-pushback-ms").as_deref(), Some(pushback)),
        None => assert!(response.get("grpc-retry-pushback-ms").unwrap().parse::<u64>().unwrap() > 0),
    }
    assert!(response.body.bytes.is_empty() && !response.head.has("content-language"), "{}", response.show());
}

#[test]
fn a_probe_completes_no_call_with_what_is_no_answer_to_one() {
    let upstream = Upstream::start(|request| match request.start_line().starts_with("GET ") {
        true if request.start_line().contains("json") => {
            Reply::raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        }
        true if request.start_line().contains("none") => trailers_only("grpc-status: 12\r\n"),
        true => answer("grpc-status: 0\r\n"),
        false => Reply::nothing().close(),
    });
    let gate = Gate::before(&upstream).defaults("recovery = { probe = \"/by-key/{key}\", after = \"0s\" }\n").start();
    for key in ["json", "none", "call"] {
        expect_told(&call(key).send(&gate), "2", "upstream-broken", Some("-1"));
    }
    call("json").send(&gate).expect(200, "outcome-unknown");
    call("none").send(&gate).expect(200, "outcome-unknown");
    call("call").send(&gate).expect(200, "recovered");
    assert_eq!(upstream.runs_of("json"), 1);

    // Nor does a question without a client.
    let every = "recovery = { probe = \"/by-key/{key}\", after = \"0s\", every = \"1s\" }\n";
    let gate = Gate::before(&upstream).defaults(every).start();
    for key in ["json-2", "call-2"] {
        call(key).send(&gate);
    }
    gate.wait_for_state("call-2", "completed");
    // While the question is under way, an attempt has the key.
    eventually("the question", || {
        upstream.seen().iter().any(|request| request.start_line().starts_with("GET /by-key/json-2 ")).then_some(())
    });
    gate.wait_for_state("json-2", "unknown");
    assert_eq!((upstream.runs_of("json-2"), upstream.runs_of("call-2")), (1, 1));
}

#[test]
fn a_call_runs_once_and_its_retry_has_its_trailers() {
    let (upstream, plan) =
        serving(|| answer("grpc-status: 0\r\ngrpc-message: all%20well\r\ngrpc-status-details-bin: CAAS\r\n"));
    let gate = plan.start();
    let first = call("k-1").header("grpc-timeout", "5S").header("x-own-bin", "AAEC").send(&gate);
    first.expect(200, "executed");
    assert_eq!(first.body.bytes, MESSAGE);
    let seen = upstream.last();
    assert_eq!(seen.head.get("grpc-timeout").as_deref(), Some("5S"));
    assert_eq!(seen.head.get("x-own-bin").as_deref(), Some("AAEC"));
    assert_eq!(seen.head.get("te").as_deref(), Some("trailers"));
    assert_eq!(seen.body.bytes, MESSAGE);
    // A retry has less time left, and says how often it was tried.
    let retry = call("k-1").header("grpc-timeout", "4S").header("grpc-previous-rpc-attempts", "1").send(&gate);
    retry.expect(200, "replayed");
    first.expect_repeated_by(&retry);
    for (name, value) in [("grpc-status", "0"), ("grpc-message", "all%20well"), ("grpc-status-details-bin", "CAAS")] {
        assert_eq!(values(&retry.body.trailers, name), [value.as_bytes()], "{name}");
    }
    let gate = gate.kill9().start();
    first.expect_repeated_by(&call("k-1").send(&gate));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_of_trailers_alone_is_repeated() {
    let (upstream, plan) = serving(|| trailers_only("grpc-status: 9\r\ngrpc-message: no funds\r\n"));
    let gate = plan.start();
    let first = call("k-1").send(&gate);
    first.expect(200, "executed");
    assert_eq!(first.get("grpc-status").as_deref(), Some("9"));
    let retry = call("k-1").send(&gate);
    retry.expect(200, "replayed");
    first.expect_repeated_by(&retry);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_call_is_judged_by_its_own_status() {
    for (reply, word, then) in [
        (answer("grpc-status: 14\r\n"), "outcome-unknown", Some("outcome-unknown")),
        (trailers_only("grpc-status: 8\r\n"), "outcome-unknown", Some("outcome-unknown")),
        (answer("grpc-status: 16\r\n"), "released", None),
        (trailers_only("grpc-status: 16\r\n"), "released", None),
        (answer("grpc-status: 13\r\n"), "outcome-unknown", Some("outcome-unknown")),
        (trailers_only("grpc-status: 4\r\n"), "outcome-unknown", Some("outcome-unknown")),
        (trailers_only("grpc-status: 6\r\n"), "executed", Some("replayed")),
        // A server that has begun its answer can say it only behind that.
        (answer("grpc-status: 13\r\nidempotency-control: release\r\n"), "released", None),
        (trailers_only("grpc-status: 13\r\nidempotency-control: release\r\n"), "released", None),
        // No status at all: it broke off.
        (answer(""), "outcome-unknown", Some("outcome-unknown")),
        // Of somebody on the way.
        (Reply::status("503 No", "x"), "released", None),
        (Reply::status("504 No", "x"), "outcome-unknown", Some("outcome-unknown")),
    ] {
        let (upstream, plan) = serving(move || reply.clone());
        let gate = plan.start();
        let first = call("k-1").send(&gate);
        assert_eq!(first.word(), word, "{}", first.show());
        assert!(values(&first.body.trailers, "idempotency-control").is_empty(), "it is for the gate");
        let retry = call("k-1").send(&gate);
        assert_eq!(retry.word(), then.unwrap_or(word), "{}", retry.show());
        assert_eq!(upstream.runs(), if then.is_none() { 2 } else { 1 }, "{}", first.show());
    }
}

#[test]
fn entries_for_calls_count_before_the_defaults() {
    let (upstream, plan) = serving(|| trailers_only("grpc-status: 14\r\n"));
    let gate = plan
        .defaults("outcomes = { \"grpc:UNAVAILABLE\" = \"release\", \"grpc:13\" = \"store\", \"2xx\" = \"hold\" }")
        .start();
    call("k-1").send(&gate).expect(200, "released");
    call("k-1").send(&gate).expect(200, "released");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn problems_are_told_in_trailers_alone() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| answer("grpc-status: 0\r\n").hold_until(&held));
    let gate = Gate::before(&upstream).defaults("key = { required = true }\nmax_request_body = \"1KiB\"").start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| call("k-1").send(&gate));
        upstream.wait_for_runs(1);
        let second = call("k-1").send(&gate);
        expect_told(&second, "14", "in-flight", None);
        second.retry_after();
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    expect_told(&call("k-1").body("another").send(&gate), "9", "key-reused", Some("-1"));
    expect_told(&call("k-2").body(vec![0; 2048]).send(&gate), "8", "request-too-large", Some("-1"));
    expect_told(&call("a b").send(&gate), "3", "key-invalid", Some("-1"));
    let keyless = Request::post("/x").header("Content-Type", "application/grpc").body(MESSAGE).send(&gate);
    assert_eq!(keyless.get("grpc-status").as_deref(), Some("3"), "{}", keyless.show());
    assert!(!keyless.head.has("idempotency-status"));
    // It is another protocol, which has its trailers in the body.
    let web = Request::post("/x").header("Content-Type", "application/grpc-web").body(MESSAGE).send(&gate);
    web.expect_bare_problem(400, "key-missing");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_upstream_that_is_away_is_told_with_a_time_to_come_back() {
    let address = Upstream::free_address();
    let gate = Gate::before_url(&format!("http://{address}")).start();
    expect_told(&call("k-1").send(&gate), "14", "upstream-unreachable", Some("1000"));
    let passed = Request::post("/x").header("Content-Type", "application/grpc").body(MESSAGE).send(&gate);
    assert_eq!((passed.status, passed.get("grpc-status").as_deref()), (200, Some("14")), "{}", passed.show());
}

/// gRPC knows no 202: a client would take it for a failure of which it does not know whether it ran.
#[test]
fn a_call_that_is_accepted_is_to_be_tried_again_until_it_has_its_answer() {
    if is_refused_here() {
        return;
    }
    let signal = Signal::new();
    let opens = signal.clone();
    let (upstream, plan) = serving(move || answer("grpc-status: 0\r\n").hold_until(&opens));
    let gate = plan.defaults("mode = \"accept\"\n").start();
    for _ in 0..2 {
        let told = call("kept").header("grpc-timeout", "1S").send(&gate);
        expect_told(&told, "14", "accepted", None);
        assert!(told.get("location").unwrap().starts_with("/.well-known/oncegate/requests/"), "{}", told.show());
    }
    signal.open();
    gate.wait_for_state("kept", "completed");
    assert!(!upstream.last().head.has("grpc-timeout"), "the time of the client, who has its answer");
    let replayed = call("kept").send(&gate);
    replayed.expect(200, "replayed");
    assert_eq!(values(&replayed.body.trailers, "grpc-status"), [b"0"]);
    assert_eq!(upstream.runs_of("kept"), 1);
}

#[test]
fn an_accepted_call_that_was_given_up_is_not_to_be_tried_again() {
    if is_refused_here() {
        return;
    }
    let upstream = Upstream::start(|_| Reply::status("503 Service Unavailable", ""));
    let gate = Gate::before(&upstream).defaults("mode = \"accept\"\ndeliver.attempts = 1\n").start();
    expect_told(&call("lost").send(&gate), "14", "accepted", None);
    eventually("it is given up", || {
        let answer = call("lost").send(&gate);
        (answer.get("grpc-status").as_deref() == Some("2")).then(|| expect_told(&answer, "2", "accepted", Some("-1")))
    });
}

/// Nor does a client wait for an answer elsewhere that prefers it.
#[test]
fn a_call_that_prefers_to_be_accepted_is_answered() {
    if is_refused_here() {
        return;
    }
    let (upstream, plan) = serving(|| answer("grpc-status: 0\r\n"));
    let gate = plan.defaults("async = \"allow\"\n").start();
    call("k").header("Prefer", "respond-async").send(&gate).expect(200, "executed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_call_is_completed_with_what_its_client_can_read() {
    let (_upstream, plan) = serving(|| Reply::nothing().close());
    let gate = plan.start();
    let resolve = |key: &str, headers: Value, body: &[u8]| {
        call(key).send(&gate);
        let id = gate.records(&format!("key={key}"))[0]["id"].as_str().unwrap().to_owned();
        let answer =
            json!({"action": "complete", "status": 200, "headers": headers, "body_base64": STANDARD.encode(body)});
        gate.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(&answer))
    };
    for headers in
        [json!([]), json!([["grpc-status", "x"]]), json!([["grpc-status", "0"], ["content-type", "text/plain"]])]
    {
        let refused = resolve("k", headers, MESSAGE);
        assert!(refused.status == 400 && refused.text().contains("gRPC call"), "{}", refused.show());
    }
    assert_eq!(resolve("k", json!([["grpc-status", "0"], ["x-a", "b"]]), MESSAGE).status, 204);
    let replayed = call("k").send(&gate);
    replayed.expect(200, "replayed");
    assert_eq!(
        (replayed.get("content-type").as_deref(), replayed.get("x-a").as_deref()),
        (Some("application/grpc"), Some("b"))
    );
    assert_eq!((&*replayed.body.bytes, replayed.get("grpc-status")), (MESSAGE, None));
    assert_eq!(values(&replayed.body.trailers, "grpc-status"), [b"0"]);
    assert_eq!(resolve("trailers", json!([["grpc-status", "9"]]), b"").status, 204);
    // A filter finds others too, which are left alone.
    for key in ["one", "two"] {
        call(key).send(&gate);
    }
    assert_eq!(resolve("one", json!([["grpc-status", "0"]]), b"no message").status, 400);
    Request::post("/pay.Payments/Charge").key("json").body("{}").send(&gate);
    let many = json!({"filter": {"state": "unknown"}, "reason": "x", "action": "complete", "status": 200});
    let report = gate.admin("POST", "/api/v1/records/resolve", Some(&many)).json();
    assert_eq!((&report["done"], &report["unreadable"]), (&json!(1), &json!(2)), "{report}");
    assert!(gate.records("state=unknown").iter().all(|record| record["grpc"] == true));
    assert_eq!(call("trailers").send(&gate).get("grpc-status").as_deref(), Some("9"));
}

#[test]
fn an_answer_that_is_not_kept_is_told_as_one_that_ran() {
    let (upstream, plan) = serving(|| answer("grpc-status: 0\r\n"));
    let gate = plan.defaults("max_response_body = \"4B\"").start();
    let first = call("k-1").send(&gate);
    first.expect(200, "executed");
    assert_eq!(values(&first.body.trailers, "grpc-status"), [b"0"]);
    expect_told(&call("k-1").send(&gate), "6", "response-not-stored", Some("-1"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_body_of_json_in_frames_is_compared_byte_for_byte() {
    let (upstream, plan) = serving(|| trailers_only("grpc-status: 0\r\n"));
    let gate = plan.start();
    let json = |body: &[u8]| {
        Request::post("/c").key("k-1").header("Content-Type", "application/grpc+json").body(body).send(&gate)
    };
    json(b"\0\0\0\0\x02{}").expect(200, "executed");
    json(b"\0\0\0\0\x02{}").expect(200, "replayed");
    expect_told(&json(b"\0\0\0\0\x03{ }"), "9", "key-reused", Some("-1"));
    assert_eq!(upstream.runs(), 1);
}
