//! Which requests share a connection, and which have one of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{all_are_paid, before};
use crate::support::frames::WINDOW_UPDATE;
use crate::support::h2::{Conn, DATA, END_HEADERS, END_STREAM, HEADERS, OK};
use crate::support::http2::{Http2, post};
use crate::support::{Client, Gate, H2, Request, Signal, eventually};

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
    for _ in 1..=8 {
        assert_eq!(Request::post("/charges").body("{}").send(&gate).text(), "paid");
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(early);
}

#[test]
fn a_protected_attempt_goes_to_a_connection_that_was_heard_of_just_now() {
    in_time(|| {
        let upstream = H2::answering("paid");
        let gate = before(&upstream).start();
        let mut client = Client::connect(gate.address);
        let mut post = |key: &str| {
            client.send(format!(
                "POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: {key}\r\nContent-Length: 2\r\n\r\n{{}}"
            ));
            assert_eq!(client.response().text(), "paid");
        };
        let began = Instant::now();
        post("a");
        post("b");
        let (took, connections) = (began.elapsed(), upstream.connections());
        // That it was silent for longer than a second is what is tested.
        std::thread::sleep(Duration::from_millis(1100));
        post("c");
        assert_eq!(upstream.connections(), connections + 1);
        (took, connections == 1)
    });
}

/// Holds what is true of requests that come in the second in which an attempt takes a connection that others had; tries
/// again where the machine took longer.
#[track_caller]
fn in_time(mut trying: impl FnMut() -> (Duration, bool)) {
    for _ in 0..20 {
        let (took, holds) = trying();
        if took < Duration::from_millis(900) {
            assert!(holds, "connections that an attempt may take are taken");
            return;
        }
    }
    panic!("it takes nearly a second each time");
}

/// One that gives a request its answer as soon as it has its head, and lets its body lie; and how many connections had
/// a request.
fn early(settings: &'static [u8]) -> (H2, Arc<AtomicUsize>) {
    let used = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&used);
    let upstream = H2::start(settings, move |mut conn| {
        let mut requests = 0;
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            requests += 1;
            counted.fetch_add(usize::from(requests == 1), Ordering::SeqCst);
            conn.answer(head.stream, b"paid");
        }
    });
    (upstream, used)
}

/// How long a gate with one connection waits for the rest of a request.
const REST: Duration = Duration::from_secs(3);

/// A gate that has one connection, and waits for it not as long as for the rest of a request.
fn with_one_connection(upstream: &H2) -> Gate {
    let settings = "protocol = \"h2\", max_connections = 1, timeout = \"3s\", connect_timeout = \"2s\"";
    before(upstream).upstream(settings).start()
}

/// An upstream may do so (RFC 9113, 8.1), and where it sends no reset nothing tells that it never goes on.
#[test]
fn an_upstream_that_never_reads_the_rest_of_requests_does_not_run_out_of_connections() {
    // More than the upstream lets come: h2 has all of the one, and the gate the rest of the other.
    for size in [100 << 10, 1 << 20] {
        let (upstream, used) = early(&[0, 3, 0, 0, 0, 1]);
        let gate = with_one_connection(&upstream);
        for key in ["a", "b", "c"] {
            let request = Request::post("/charges").body(vec![b'x'; size]).key(key);
            eventually("an answer", || {
                let answer = request.clone().send(&gate);
                // Nothing goes to where it would wait for what is not read.
                let words = ["executed", "overloaded", "upstream-unreachable"];
                assert!(words.contains(&&*answer.word()), "{}", answer.show());
                (answer.word() == "executed").then_some(())
            });
        }
        assert_eq!(used.load(Ordering::SeqCst), 3);
    }
}

#[test]
fn a_connection_with_a_request_that_is_not_read_is_left_when_the_others_have_ended() {
    let (ends, used) = (Signal::new(), Arc::new(AtomicUsize::new(0)));
    let (ending, counted) = (ends.clone(), Arc::clone(&used));
    let upstream = H2::start(&[], move |mut conn| {
        let mut requests = 0;
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            requests += 1;
            let is_long = requests == 1 && counted.fetch_add(1, Ordering::SeqCst) == 0;
            if !is_long {
                conn.answer(head.stream, b"paid");
                continue;
            }
            conn.send(HEADERS, END_HEADERS, head.stream, OK);
            let (ending, mut conn) = (ending.clone(), Conn { stream: conn.stream.try_clone().unwrap() });
            std::thread::spawn(move || {
                ending.wait();
                conn.send(DATA, END_STREAM, head.stream, b"long");
            });
        }
    });
    let gate = with_one_connection(&upstream);
    let mut long = Client::connect(gate.address);
    long.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    long.wire.until(b"\r\n\r\n").unwrap();
    let upload = Request::post("/charges").body(vec![b'x'; 100 << 10]);
    assert_eq!(upload.send(&gate).text(), "paid");
    // The rest of it may still be on its way to where it waits.
    eventually("nobody goes there", || (Request::get("/").send(&gate).status == 503).then_some(()));
    // That it is longer than the rest of a request may take is what is tested.
    std::thread::sleep(REST + Duration::from_secs(1));
    assert_eq!((Request::get("/").send(&gate).status, used.load(Ordering::SeqCst)), (503, 1));
    ends.open();
    long.wire.until(b"long").unwrap();
    eventually("another connection", || (Request::get("/").send(&gate).text() == "paid").then_some(()));
    assert_eq!(used.load(Ordering::SeqCst), 2);
}

#[test]
fn a_connection_where_a_request_was_not_read_for_a_while_is_used_again() {
    let (goes_on, opened) = (Signal::new(), AtomicUsize::new(0));
    let reads = goes_on.clone();
    let upstream = H2::start(&[0, 3, 0, 0, 0, 2], move |mut conn| {
        let is_first = opened.fetch_add(1, Ordering::SeqCst) == 0;
        let mut count = 0;
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            count += 1;
            if !is_first || count == 1 {
                // These go on for ever.
                conn.send(HEADERS, END_HEADERS, head.stream, OK);
                conn.send(DATA, 0, head.stream, b"l");
                continue;
            }
            conn.answer(head.stream, b"paid");
            if count == 2 {
                reads.wait();
                for stream in [0, head.stream] {
                    conn.send(WINDOW_UPDATE, 0, stream, &(1u32 << 20).to_be_bytes());
                }
            }
        }
    });
    let settings = "protocol = \"h2\", max_connections = 2, connect_timeout = \"3s\"";
    let gate = before(&upstream).upstream(settings).start();
    // All of it comes to one of the gate's threads.
    let mut client = Http2::connect(&gate);
    let get = || http::Request::get("http://gate.test/").body("").unwrap();
    let begin = |client: &mut Http2| {
        let mut long = client.begin(get());
        long.until(1);
        long
    };
    let long = begin(&mut client);
    client.send(post("/charges").body(vec![b'x'; 100 << 10]).unwrap()).expect(200, "");
    let others = [(); 2].map(|()| begin(&mut client));
    assert_eq!(upstream.connections(), 2);
    client.send(get()).expect(503, "");
    goes_on.open();
    eventually("room on the first", || (client.send(get()).status == 200).then_some(()));
    drop((long, others));
}

/// A client that goes on slowly after its answer keeps its room for no longer than the rest of its request may take, and
/// breaks nothing off.
#[test]
fn a_client_that_does_not_send_the_rest_of_a_request_is_not_waited_for() {
    let (upstream, used) = early(&[0, 3, 0, 0, 0, 1]);
    let gate = with_one_connection(&upstream);
    let mut slow = Client::connect(gate.address);
    slow.send("POST /charges HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n");
    assert_eq!(slow.response().text(), "paid");
    let request = Request::post("/charges").body("{}");
    eventually("the connection", || (request.clone().send(&gate).text() == "paid").then_some(()));
    assert_eq!(used.load(Ordering::SeqCst), 1);
}

#[test]
fn protected_attempts_share_connections_among_themselves() {
    for (most, connections) in [(4000, 2), (1, 1)] {
        in_time(|| {
            let upstream = H2::answering("paid");
            let gate = before(&upstream).upstream(&format!("protocol = \"h2\", max_connections = {most}")).start();
            let mut client = Client::connect(gate.address);
            let mut post = |line: &str| {
                client.send(format!("POST /charges HTTP/1.1\r\nHost: a\r\n{line}Content-Length: 2\r\n\r\n{{}}"));
                assert_eq!(client.response().text(), "paid");
            };
            let began = Instant::now();
            for nth in 0..3 {
                post(&format!("Idempotency-Key: k{nth}\r\n"));
                post("");
            }
            (began.elapsed(), upstream.connections() == connections)
        });
    }
}
