//! `response_headers = { exclude = [...] }`: headers that go to the client whose request ran, and to no retry.

use std::thread::spawn;

use crate::support::{Gate, Reply, Request, Response, Signal, Upstream};

const EXCLUDE: &str = "response_headers = { exclude = [\"Set-Cookie\", \"X-Secret\"] }";

/// An answer with two cookies, a secret and something to keep.
fn login(status: &str) -> Reply {
    let head = "Set-Cookie: a=1\r\nETag: \"x\"\r\nSet-Cookie: b=2\r\nx-secret: s\r\nX-Kept: k\r\nContent-Length: 2";
    Reply::raw(format!("HTTP/1.1 {status}\r\n{head}\r\n\r\nok"))
}

fn cookies(response: &Response) -> Vec<String> {
    let is_cookie = |(name, _): &&(Vec<u8>, Vec<u8>)| name.eq_ignore_ascii_case(b"set-cookie");
    let values = response.head.fields.iter().filter(is_cookie);
    values.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
}

#[track_caller]
fn has_all(response: &Response) {
    assert_eq!(cookies(response), ["a=1", "b=2"], "{}", response.show());
    assert_eq!(response.get("x-secret").as_deref(), Some("s"), "{}", response.show());
}

#[track_caller]
fn has_none(response: &Response) {
    assert!(cookies(response).is_empty() && !response.head.has("x-secret"), "{}", response.show());
    let kept = [response.get("etag"), response.get("x-kept")];
    assert_eq!(kept.each_ref().map(|value| value.as_deref()), [Some("\"x\""), Some("k")], "{}", response.show());
    assert_eq!(response.text(), "ok");
}

#[test]
fn a_retry_gets_the_answer_without_them() {
    let upstream = Upstream::start(|_| login("200 OK"));
    let gate = Gate::before(&upstream).defaults(EXCLUDE).start();
    let first = gate.post("/login", "k", "{}");
    has_all(first.expect(200, "executed"));
    for _ in 0..2 {
        has_none(gate.post("/login", "k", "{}").expect(200, "replayed"));
    }
    assert_eq!(upstream.runs(), 1);
}

/// A gate whose policy excludes nothing finds nothing more in the record.
#[test]
fn the_record_does_not_have_them() {
    let upstream = Upstream::start(|_| login("200 OK"));
    let gate = Gate::before(&upstream).defaults(EXCLUDE).start();
    has_all(gate.post("/login", "k", "{}").expect(200, "executed"));
    let gate = gate.stop().defaults("").start();
    has_none(gate.post("/login", "k", "{}").expect(200, "replayed"));
    // And the other way round: what an older policy kept is not replayed.
    has_all(gate.post("/login", "k-2", "{}").expect(200, "executed"));
    has_all(gate.post("/login", "k-2", "{}").expect(200, "replayed"));
    let gate = gate.stop().defaults(EXCLUDE).start();
    has_none(gate.post("/login", "k-2", "{}").expect(200, "replayed"));
    assert_eq!(upstream.runs(), 2);
}

/// One answer, two clients: only one of them is the one whose request ran.
#[test]
fn who_waited_for_a_released_answer_gets_it_without_them() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| login("503 Later").hold_until(&held));
    let gate = Gate::before(&upstream).defaults(&format!("{EXCLUDE}\nin_flight = {{ wait = \"25s\" }}")).start();
    let request = Request::post("/login").key("k").body("{}");
    let send = || {
        let (request, address) = (request.clone(), gate.address);
        spawn(move || request.send(address))
    };
    let first = send();
    upstream.wait_for_runs(1);
    let waiter = send();
    gate.wait_for_waiting(1);
    signal.open();
    has_all(first.join().expect("an answer").expect(503, "released"));
    has_none(waiter.join().expect("an answer").expect(503, "released"));
    assert_eq!(upstream.runs(), 1);
}

/// The first client of an answer that streams, or is too large to keep, gets them too.
#[test]
fn answers_that_go_out_in_pieces() {
    for (more, retry) in [("body = \"stream\"", "replayed"), ("max_response_body = 8", "response-not-stored")] {
        let upstream = Upstream::start(|_| {
            let head = "HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nContent-Length: 400000\r\n\r\n";
            Reply::raw(head).then("a".repeat(200_000)).then("b".repeat(200_000))
        });
        let gate = Gate::before(&upstream).defaults(&format!("{EXCLUDE}\n{more}")).start();
        let first = gate.post("/login", "k", "{}");
        assert_eq!((first.word().as_str(), first.body.bytes.len()), ("executed", 400_000), "{}", more);
        assert_eq!(cookies(&first), ["a=1"]);
        let again = gate.post("/login", "k", "{}");
        assert_eq!((again.word().as_str(), cookies(&again).len()), (retry, 0), "{more}");
        assert_eq!(upstream.runs(), 1);
    }
}
