//! Which requests share a connection, and which have one of their own.

use std::time::{Duration, Instant};

use super::{all_are_paid, before};
use crate::support::h2::HEADERS;
use crate::support::{Client, Gate, H2, Request, eventually};

#[test]
fn requests_share_a_connection_as_far_as_the_upstream_takes_them() {
    // Two at a time: answered when both are there, and before the third is.
    let upstream = H2::start(&[0, 3, 0, 0, 0, 2], |mut conn| {
        while let (Some(one), Some(other)) = (conn.request(), conn.request()) {
            conn.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            assert!(conn.until(|frame| frame.kind == HEADERS).is_none(), "a third at the same time");
            conn.stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            conn.answer(one, b"paid");
            conn.answer(other, b"paid");
        }
    });
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, connect_timeout = \"20s\"").start();
    all_are_paid(&gate, 4);
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_request_that_is_answered_before_its_end_takes_its_room_until_then() {
    let upstream = H2::start(&[0, 3, 0, 0, 0, 1], |mut conn| {
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            conn.answer(head.stream, b"paid");
        }
    });
    let gate = before(&upstream).start();
    let mut early = Client::connect(gate.address);
    early.send("POST /charges HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n");
    assert_eq!(early.response().text(), "paid");
    // Its upload goes on, and the upstream takes one at a time: whoever came behind it would wait for its client.
    let began = Instant::now();
    for nth in 1..=8 {
        assert_eq!(gate.post("/charges", &format!("k{nth}"), "{}").text(), "paid");
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(early);
}

#[test]
fn a_protected_attempt_goes_to_a_connection_that_was_heard_of_just_now() {
    let upstream = H2::answering("paid");
    let gate = before(&upstream).start();
    let address = gate.address;
    let mut client = Client::connect(address);
    let mut post = |key: &str| {
        client.send(format!(
            "POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: {key}\r\nContent-Length: 2\r\n\r\n{{}}"
        ));
        assert_eq!(client.response().text(), "paid");
    };
    post("a");
    post("b");
    assert_eq!(upstream.connections(), 1);
    // That it was silent for longer than a second is what is tested.
    std::thread::sleep(Duration::from_millis(1100));
    post("c");
    assert_eq!(upstream.connections(), 2);
}

/// One that gives a request its answer as soon as it has its head, and reads no more of it.
fn early(settings: &'static [u8], answer: impl Fn(usize) + Send + Sync + 'static) -> H2 {
    H2::start(settings, move |mut conn| {
        let mut count = 0;
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            count += 1;
            answer(count);
            conn.answer(head.stream, b"paid");
        }
    })
}

fn upload(gate: &Gate, key: &str) -> bool {
    Request::post("/charges").body(vec![b'x'; 1 << 20]).key(key).send(gate).word() == "executed"
}

/// It may (RFC 9113, 8.1), and where it sends no reset nothing tells that it never goes on.
#[test]
fn an_upstream_that_never_reads_the_rest_of_requests_does_not_run_out_of_connections() {
    let upstream = early(&[0, 3, 0, 0, 0, 1], |_| {});
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, timeout = \"1s\"").start();
    for key in ["a", "b", "c"] {
        // Those that wait for too long were not sent.
        eventually("an answer", || upload(&gate, key).then_some(()));
    }
    assert_eq!(upstream.connections(), 3);
}

#[test]
fn a_connection_with_a_request_that_is_stuck_is_left_when_the_others_have_ended() {
    const LAST: usize = 5;
    // Each takes less than an attempt may, and the last one ends when the first one's rest has been waited for.
    let upstream = early(&[], |nth| std::thread::sleep(Duration::from_secs(if nth == LAST { 2 } else { 0 })));
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, timeout = \"3s\"").start();
    assert!(upload(&gate, "stuck"));
    for nth in 2..LAST {
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(gate.post("/charges", &format!("k{nth}"), "").text(), "paid");
    }
    assert_eq!(gate.post("/charges", "last", "").text(), "paid");
    eventually("another connection", || (gate.post("/charges", "next", "").text() == "paid").then_some(()));
    assert_eq!(upstream.connections(), 2);
}

#[test]
fn protected_attempts_share_connections_among_themselves() {
    for (most, connections) in [(4000, 2), (1, 1)] {
        let upstream = H2::answering("paid");
        let gate = before(&upstream).upstream(&format!("protocol = \"h2\", max_connections = {most}")).start();
        let mut client = Client::connect(gate.address);
        let mut post = |line: &str| {
            client.send(format!("POST /charges HTTP/1.1\r\nHost: a\r\n{line}Content-Length: 2\r\n\r\n{{}}"));
            assert_eq!(client.response().text(), "paid");
        };
        for nth in 0..3 {
            post(&format!("Idempotency-Key: k{nth}\r\n"));
            post("");
        }
        assert_eq!(upstream.connections(), connections, "where there may be {most}");
    }
}
