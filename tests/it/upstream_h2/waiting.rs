//! Answers that come bit by bit, or late, and requests that have no body or no path of their own.

use std::io::Read as _;

use super::{PROTOCOL, before};
use crate::support::frames::{self, Frames, request};
use crate::support::h2::{DATA, END_HEADERS, END_STREAM, HEADERS, OK};
use crate::support::http2::Http2;
use crate::support::{Client, Gate, H2, Reply, Request, Service, Signal, Upstream};

const EVENTS: [&[u8]; 3] = [b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"];

/// An upstream of events, each of which comes when the one before has arrived; a gate before it; and what says so.
fn events(speaks_h2: bool) -> (Gate, Vec<Signal>, Box<dyn std::any::Any>) {
    let arrived: Vec<Signal> = EVENTS.iter().map(|_| Signal::new()).collect();
    let seen = arrived.clone();
    if speaks_h2 {
        let upstream = H2::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                conn.send(HEADERS, END_HEADERS, stream, OK);
                for (event, arrived) in EVENTS.iter().zip(&seen) {
                    conn.send(DATA, 0, stream, event);
                    arrived.wait();
                }
                conn.send(DATA, END_STREAM, stream, b"");
            }
        });
        return (before(&upstream).start(), arrived, Box::new(upstream));
    }
    let upstream = Upstream::start(move |_| {
        let head =
            Reply::raw("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
        let chunk = |event: &[u8]| [format!("{:x}\r\n", event.len()).as_bytes(), event, b"\r\n"].concat();
        let events = EVENTS.iter().zip(&seen);
        let reply = events.fold(head, |reply, (event, arrived)| reply.then(chunk(event)).pause_until(arrived));
        reply.then("0\r\n\r\n")
    });
    (Gate::before(&upstream).start(), arrived, Box::new(upstream))
}

#[test]
fn events_come_as_they_happen() {
    for speaks_h2 in [true, false] {
        let (gate, arrived, _upstream) = events(speaks_h2);
        let mut client = Client::connect(gate.address);
        client.send(Request::get("/events").header("Accept", "text/event-stream").bytes());
        assert!(client.head().start.starts_with(b"HTTP/1.1 200"));
        for (event, arrived) in EVENTS.iter().zip(&arrived) {
            client.wire.until(event).unwrap();
            arrived.open();
        }
        client.wire.until(b"0\r\n\r\n").unwrap();
        // And by HTTP/2.
        let (gate, arrived, _upstream) = events(speaks_h2);
        let mut client = Frames::connect(gate.address, &[]);
        client.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("GET", "/events", &[]));
        for (event, arrived) in EVENTS.iter().zip(&arrived) {
            assert_eq!(client.next_of(frames::DATA).unwrap().payload, *event);
            arrived.open();
        }
        assert!(client.next_of(frames::DATA).unwrap().payload.is_empty(), "the end");
    }
}

#[test]
fn an_answer_that_comes_late_holds_up_no_other() {
    let go_on = Signal::new();
    let (held, arrived) = (go_on.clone(), Signal::new());
    let seen = arrived.clone();
    let upstream = H2::start(&[], move |mut conn| {
        let Some(polled) = conn.request() else { return };
        seen.open();
        for _ in 0..3 {
            let Some(stream) = conn.request() else { return };
            conn.answer(stream, b"quick");
        }
        held.wait();
        conn.answer(polled, b"late");
        conn.rest();
    });
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, connect_timeout = \"20s\"").start();
    let address = gate.address;
    let polling = std::thread::spawn(move || {
        let poll = http::Request::get("http://gate.test/poll").body("").unwrap();
        Http2::connect(address).send(poll).body
    });
    arrived.wait();
    for _ in 0..3 {
        assert_eq!(Request::get("/quick").send(&gate).text(), "quick");
    }
    go_on.open();
    assert_eq!(polling.join().unwrap(), "late");
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_head_alone_says_how_long_its_body_would_be() {
    let service = Service::start(|asked| {
        assert_eq!(asked.method, "HEAD");
        (200, vec![("content-length", "4"), ("etag", "\"v\"")], "", vec![])
    });
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    let mut client = Http2::connect(&gate);
    for _ in 0..2 {
        let answer = client.send(http::Request::head("http://gate.test/bill").body("").unwrap());
        assert_eq!((answer.status, answer.get("content-length"), answer.get("etag")), (200, "4", "\"v\""));
        assert!(answer.body.is_empty());
    }
}

#[test]
fn a_server_is_asked_about_itself() {
    let service = Service::start(|_| (204, vec![("allow", "GET, POST")], "", vec![]));
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    let answer = Request::new("OPTIONS", "*").send(&gate);
    assert_eq!((answer.status, answer.get("allow").as_deref()), (204, Some("GET, POST")), "{}", answer.show());
    let mut client = Frames::connect(gate.address, &[]);
    client.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("OPTIONS", "*", &[]));
    assert_eq!(client.ending(1), frames::Ending::Status(204));
    let asked = service.asked();
    assert_eq!(asked.len(), 2);
    for asked in asked {
        assert_eq!((&*asked.method, asked.target.trim_start_matches("http://gate.test")), ("OPTIONS", "*"));
    }
}

#[test]
fn a_request_that_names_no_host_is_for_the_upstreams_own() {
    let service = Service::start(|_| (200, vec![], "paid", vec![]));
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    for key in ["", "Idempotency-Key: k\r\n"] {
        // Where a target has no authority, Host is empty (RFC 9112, 3.2); HTTP/1.0 has none.
        for head in ["POST /x HTTP/1.1\r\nHost:\r\n", "POST /x HTTP/1.0\r\n"] {
            let mut client = Client::connect(gate.address);
            client.send(format!("{head}{key}Connection: close\r\nContent-Length: 2\r\n\r\n{{}}"));
            let answer = client.response();
            assert_eq!((answer.status, answer.text()), (200, "paid".to_owned()), "{}", answer.show());
            assert_eq!(client.wire.stream.read(&mut [0]).unwrap(), 0);
        }
    }
    let asked = service.asked();
    assert_eq!(asked.len(), 4, "an empty Host is another scope than none");
    assert!(asked.iter().all(|asked| asked.target == format!("http://{}/x", service.address)), "{asked:?}");
}
