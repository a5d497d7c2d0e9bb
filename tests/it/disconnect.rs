//! A client that goes away changes nothing.

use std::time::Duration;

use crate::support::{Client, Gate, Reply, Request, Signal, Upstream, eventually};

#[test]
fn the_answer_is_kept_for_a_client_that_left_while_the_upstream_ran() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("201 Created", "order 7").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let request = Request::post("/orders").key("k-1").body("{}");
    let mut client = Client::connect(gate.address);
    client.send(request.bytes());
    upstream.wait_for_runs(1);
    drop(client);
    request.send(&gate).expect_problem(409, "in-flight");
    let left = || gate.metric("oncegate_clients_gone_total", &["route=\"all\""]);
    eventually("the gate notices", || (left() == 1.0).then_some(()));
    signal.open();
    gate.wait_for_state("k-1", "completed");
    let retry = request.send_after_attempt(&gate);
    retry.expect(201, "replayed");
    assert_eq!(retry.text(), "order 7");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_client_that_resets_its_connection_is_no_different() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let request = Request::post("/orders").key("k-1").body("{}");
    let mut client = Client::connect(gate.address);
    client.send(request.bytes());
    upstream.wait_for_runs(1);
    socket2::SockRef::from(&client.wire.stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    signal.open();
    gate.wait_for_state("k-1", "completed");
    request.send_after_attempt(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// A client that has nothing yet, where answers are given whole, and one that has a part, where they are streamed.
#[test]
fn a_client_that_leaves_in_the_middle_of_the_answer() {
    leaves_in_the_middle("buffer", |_| {});
    leaves_in_the_middle("stream", |client| {
        let head = client.head();
        assert!(head.start.starts_with(b"HTTP/1.1 200"));
        assert!(!client.wire.some().expect("a part").is_empty());
    });
}

fn leaves_in_the_middle(mode: &str, read: impl Fn(&mut Client)) {
    let signal = Signal::new();
    let held = signal.clone();
    let body = "y".repeat(300_000);
    let answer = body.clone();
    let upstream = Upstream::start(move |_| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", answer.len());
        Reply::raw(head).then(&answer.as_bytes()[..100_000]).pause_until(&held).then(&answer.as_bytes()[100_000..])
    });
    let gate = Gate::before(&upstream).defaults(&format!("body = \"{mode}\"")).start();
    let request = Request::post("/orders").key("k-1").body("{}");
    let mut client = Client::connect(gate.address);
    client.send(request.bytes());
    upstream.wait_for_runs(1);
    read(&mut client);
    drop(client);
    assert_eq!(gate.states("k-1"), ["in-flight"], "{mode}");
    signal.open();
    gate.wait_for_state("k-1", "completed");
    let retry = request.send_after_attempt(&gate);
    retry.expect(200, "replayed");
    assert!(retry.text() == body);
    assert_eq!(upstream.runs(), 1);
}

/// Clients that have sent their request and leave at any moment: from before it is at the upstream, over the parts of the
/// answer, which they do not read, to its end.
#[test]
fn clients_that_leave_at_any_moment_cost_at_most_one_run() {
    const PAUSE: Duration = Duration::from_millis(20);
    let upstream = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx").delay(PAUSE).pause(PAUSE).then("y")
    });
    let gate = Gate::before(&upstream).defaults("body = \"stream\"").start();
    for (nth, wait) in (0..30).map(|nth| (nth, Duration::from_millis(nth * 2))) {
        let key = format!("key-{nth}");
        let request = Request::post("/orders").key(&key).body("{}");
        let mut client = Client::connect(gate.address);
        client.send(request.bytes());
        std::thread::sleep(wait);
        drop(client);
        let retry = request.send_after_attempt(&gate);
        assert!(["executed", "replayed"].contains(&retry.word().as_str()), "{}", retry.show());
        assert_eq!((upstream.runs_of(&key), &*retry.text()), (1, "xy"), "left after {wait:?}");
    }
}

#[test]
fn a_client_that_only_closes_its_sending_side_loses_no_answer() {
    let upstream = Upstream::start(|_| Reply::ok("x").delay(Duration::from_millis(100)));
    let gate = Gate::before(&upstream).start();
    let request = Request::post("/orders").key("k-1").body("{}");
    let mut client = Client::connect(gate.address);
    client.send(request.bytes());
    // Before that, there is no attempt to keep: the request may count as withdrawn.
    upstream.wait_for_runs(1);
    client.wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
    // Such a client counts as gone, since one that is gone looks the same; but the attempt is kept.
    if let Some(response) = client.try_response("POST") {
        response.expect(200, "executed");
    }
    gate.wait_for_state("k-1", "completed");
    request.send_after_attempt(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}
