//! The harness itself: what it scripts arrives as scripted.

use std::time::Duration;

use crate::support::{Client, Gate, Reply, Request, Signal, Upstream};

#[test]
fn bytes_arrive_as_scripted() {
    let raw = "HTTP/1.1 200 Fine\r\nA: 1\r\na: 2\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nSum: 3\r\n\r\n";
    let upstream = Upstream::start(move |_| Reply::raw(raw));
    let response = Request::post("/x").key("k").body("body").send(upstream.address);
    assert_eq!(response.line, "HTTP/1.1 200 Fine");
    assert_eq!(response.head.all("a"), [b"1", b"2"]);
    assert_eq!(response.body.bytes, b"abc");
    assert_eq!(response.body.trailers, [(b"Sum".to_vec(), b"3".to_vec())]);
    assert!(response.body.complete);
    assert_eq!((upstream.runs_of("k"), upstream.runs_of("other"), upstream.connections()), (1, 0, 1));
    assert_eq!(upstream.last().body.bytes, b"body");
}

#[test]
fn broken_answers_are_seen_as_broken() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::ok("abc").truncate(1),
        2 => Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").close(),
        3 => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc").reset(),
        _ => Reply::default().pause(Duration::from_millis(1)).reset(),
    });
    for _ in 0..3 {
        let response = Request::get("/").send(upstream.address);
        assert!(!response.body.complete, "{}", response.show());
    }
    let mut client = Client::connect(upstream.address);
    client.send("GET / HTTP/1.1\r\n\r\n");
    assert!(client.try_response("GET").is_none());
}

#[test]
fn a_connection_is_kept_alive_and_a_held_answer_waits() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::ok("first"),
        _ => Reply::ok("second").hold_until(&held),
    });
    let mut client = Client::connect(upstream.address);
    client.send("GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n");
    assert_eq!(client.response().text(), "first");
    upstream.wait_for_runs(2);
    signal.open();
    assert_eq!(client.response().text(), "second");
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_metric_that_does_not_exist_is_not_at_zero() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"replayed\""]), 0.0);
    assert_eq!(gate.metric("oncegate_store_duration_seconds_count", &["op=\"claim\""]), 0.0);
    let wrong: [(&str, &[&str]); 4] = [
        ("oncegate_request_total", &[]),
        ("oncegate_requests_total", &["outcomes=\"replayed\""]),
        ("oncegate_requests_total_count", &[]),
        ("requests_total", &[]),
    ];
    for (name, labels) in wrong {
        let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| gate.metric(name, labels)));
        assert!(asked.is_err(), "{name} {labels:?} is {asked:?}");
    }
}
