//! A client that goes away changes nothing of what is protected, and holds on to nothing else.

use std::net::Shutdown;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::support::frames::{DATA, END_HEADERS, END_STREAM, Ended, Ending, Frames, HEADERS, RST_STREAM, request};
use crate::support::h2::{self, OK};
use crate::support::wait::PATIENCE;
use crate::support::wire::Framing;
use crate::support::{Gate, H2, Reply, Request, Signal, Upstream, eventually};

const WHOLE: u8 = END_HEADERS | END_STREAM;
const CANCEL: u32 = 8;

/// How a client goes away.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// It resets its stream, for this reason.
    Resets(u32),
    /// It closes its connection.
    Closes,
    /// It resets its connection.
    Breaks,
}

const WAYS: [Leaves; 4] = [Leaves::Resets(CANCEL), Leaves::Resets(0), Leaves::Closes, Leaves::Breaks];

/// Goes away. What is left of the connection is to be held until the test is over.
fn leave(mut client: Frames, way: Leaves) -> Option<Frames> {
    match way {
        Leaves::Resets(code) => {
            client.send(RST_STREAM, 0, 1, &code.to_be_bytes()).is_read();
            return Some(client);
        }
        Leaves::Closes => client.stream.shutdown(Shutdown::Both).unwrap(),
        Leaves::Breaks => socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap(),
    }
    None
}

fn keyed(gate: &Gate, key: &str, stream: u32, client: Option<Frames>) -> Frames {
    let mut client = client.unwrap_or_else(|| Frames::connect(gate.address, &[]));
    let head = request("POST", "/orders", &[("idempotency-key", key.as_bytes())]);
    client.send(HEADERS, END_HEADERS, stream, &head).send(DATA, END_STREAM, stream, b"{}");
    client
}

#[test]
fn the_answer_is_kept_for_a_client_that_left_while_the_upstream_ran() {
    for way in WAYS {
        let signal = Signal::new();
        let held = signal.clone();
        let upstream = Upstream::start(move |_| Reply::status("201 Created", "order 7").hold_until(&held));
        let gate = Gate::before(&upstream).start();
        let client = keyed(&gate, "k", 1, None);
        upstream.wait_for_runs(1);
        let _rest = leave(client, way);
        let retry = Request::post("/orders").key("k").body("{}");
        retry.send(&gate).expect_problem(409, "in-flight");
        signal.open();
        gate.wait_for_state("k", "completed");
        let retry = retry.send_after_attempt(&gate);
        retry.expect(201, "replayed");
        assert_eq!((retry.text().as_str(), upstream.runs()), ("order 7", 1), "{way:?}");
    }
}

#[test]
fn an_attempt_at_an_upstream_of_http_2_is_not_reset_with_its_client() {
    for way in WAYS {
        let (signal, (sender, came)) = (Signal::new(), channel());
        let held = signal.clone();
        let upstream = H2::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                // Nobody may be left to hear of it.
                let _ = sender.send(stream);
                held.wait();
                conn.answer(stream, b"order 7");
            }
        });
        let plan = Gate::before_url(&upstream.url()).upstream("protocol = \"h2\"");
        // A record is completed a moment before the gate knows.
        let gate = plan.defaults("in_flight = { wait = \"20s\" }").start();
        let client = keyed(&gate, "k", 1, None);
        came.recv_timeout(PATIENCE).expect("a request");
        let _rest = leave(client, way);
        signal.open();
        gate.wait_for_state("k", "completed");
        let mut retry = keyed(&gate, "k", 1, None);
        assert_eq!(retry.body(1), (b"order 7".to_vec(), Ended::Whole), "{way:?}");
        assert!(came.try_recv().is_err(), "{way:?}: it ran again");
    }
}

#[test]
fn one_who_waits_and_leaves_gives_up_its_place() {
    for way in WAYS {
        let signal = Signal::new();
        let held = signal.clone();
        let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
        let plan = Gate::before(&upstream).defaults("in_flight = { wait = \"60s\" }");
        let gate = plan.top("[limits]\nmax_waiting = 1").start();
        let mut first = keyed(&gate, "k", 1, None);
        upstream.wait_for_runs(1);
        let waits = || {
            let client = keyed(&gate, "k", 1, None);
            gate.wait_for_waiting(1);
            client
        };
        let waiting = waits();
        Request::post("/orders").key("k").body("{}").send(&gate).expect_problem(409, "in-flight");
        let _rest = leave(waiting, way);
        eventually("a place that is free", || {
            let free = ["oncegate_requests_waiting", "oncegate_requests_in_flight"].map(|name| gate.metric(name, &[]));
            (free == [0.0, 1.0]).then_some(())
        });
        // Another may have it.
        let mut second = waits();
        signal.open();
        for client in [&mut first, &mut second] {
            assert_eq!(client.ending(1), Ending::Status(200), "{way:?}");
        }
        assert_eq!(upstream.runs(), 1);
    }
}

/// Says what became of an exchange.
fn soon<T>(told: &Receiver<T>) -> T {
    told.recv_timeout(PATIENCE).expect("the upstream is told")
}

/// What a client asks for that leaves: in full, or the beginning of a large body.
fn begun(gate: &Gate, method: &str) -> Frames {
    let mut client = Frames::connect(gate.address, &[]);
    match method {
        "GET" => client.send(HEADERS, WHOLE, 1, &request("GET", "/long", &[])),
        _ => {
            let head = request("PUT", "/large", &[("content-length", b"1000000")]);
            client.send(HEADERS, END_HEADERS, 1, &head).send(DATA, 0, 1, b"some")
        }
    };
    client
}

#[test]
fn an_upstream_of_http_1_is_left_with_the_client_of_what_is_not_protected() {
    for way in WAYS {
        // Before the head of the answer, in the middle of its body, and in the middle of the request's.
        for (method, answer) in [("GET", ""), ("GET", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsome"), ("PUT", "")]
        {
            let ((told_begun, has_begun), (told_end, end)) = (channel(), channel());
            let upstream = Upstream::scripted(move |conn| {
                let Some(request) = conn.next_head() else { return };
                drop(conn.wire.send(answer.as_bytes()));
                let _ = told_begun.send(());
                let body = conn.wire.body(request.head.framing(Framing::None));
                conn.wire.rest();
                let _ = told_end.send(body.complete);
            });
            let gate = Gate::before(&upstream).start();
            let mut client = begun(&gate, method);
            soon(&has_begun);
            if !answer.is_empty() {
                assert_eq!(client.next_of(DATA).unwrap().payload, b"some");
            }
            let _rest = leave(client, way);
            assert_eq!(soon(&end), method == "GET", "{way:?}: a request that is not whole is none");
            eventually("nothing that is under way", || {
                (gate.metric("oncegate_requests_in_flight", &[]) == 0.0).then_some(())
            });
        }
    }
}

#[test]
fn an_upstream_of_http_2_is_told_with_a_reset_and_its_connection_goes_on() {
    for way in WAYS {
        for (method, answers) in [("GET", false), ("GET", true), ("PUT", false)] {
            let ((told_begun, has_begun), (told_end, end)) = (channel(), channel());
            let upstream = H2::start(&[], move |mut conn| {
                let Some(begun) = conn.until(|frame| frame.kind == h2::HEADERS) else { return };
                if answers {
                    conn.send(HEADERS, END_HEADERS, begun.stream, OK);
                    conn.send(DATA, 0, begun.stream, b"some");
                }
                let _ = told_begun.send(());
                let is_over = |frame: &h2::Frame| {
                    frame.stream == begun.stream && (frame.kind == RST_STREAM || frame.kind == DATA && frame.ends())
                };
                let Some(over) = conn.until(is_over) else { return };
                let _ = told_end.send((over.kind == RST_STREAM).then(|| over.reason()));
                while let Some(stream) = conn.request() {
                    conn.answer(stream, b"x");
                }
            });
            let gate = Gate::before_url(&upstream.url()).upstream("protocol = \"h2\"").start();
            let mut client = begun(&gate, method);
            soon(&has_begun);
            if answers {
                assert_eq!(client.next_of(DATA).unwrap().payload, b"some");
            }
            let rest = leave(client, way);
            let reason = soon(&end);
            assert!(reason.is_some_and(|reason| reason != 0), "{way:?}, {method}: {reason:?}");
            if let Some(mut client) = rest {
                client.send(HEADERS, WHOLE, 3, &request("GET", "/", &[]));
                assert_eq!(client.body(3), (b"x".to_vec(), Ended::Whole));
                assert_eq!(upstream.connections(), 1, "{way:?}, {method}");
            }
        }
    }
}
