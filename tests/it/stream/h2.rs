//! The same to clients of HTTP/2, from upstreams of both protocols.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::Request;

use super::{HEAD, TWO, halting};
use crate::support::faults::Fault;
use crate::support::frames::{
    DATA, END_HEADERS, END_STREAM, Ended, Frames, HEADERS, RST_STREAM, WINDOW_UPDATE, block, request,
};
use crate::support::h2::OK;
use crate::support::http2::{Answer, Http2, post};
use crate::support::{Gate, H2, Plan, Signal};

/// An upstream that gives two pieces, and a last one with a trailer when it may go on. Ends when dropped.
struct Halting {
    url: String,
    terms: &'static str,
    runs: Box<dyn Fn() -> usize>,
    go_on: Signal,
    _held: Box<dyn Any>,
}

impl Halting {
    fn http1() -> Self {
        let head = HEAD.replace("201 Made", "200 OK").replace("X-A: 1", "Trailer: X-Sum");
        let (upstream, go_on) = halting(format!("{head}{TWO}"), "4\r\nlast\r\n0\r\nX-Sum: 7\r\n\r\n");
        let upstream = Arc::new(upstream);
        let seen = Arc::clone(&upstream);
        Self { url: upstream.url(), terms: "", runs: Box::new(move || seen.runs()), go_on, _held: Box::new(upstream) }
    }

    fn http2() -> Self {
        let (go_on, runs) = (Signal::new(), Arc::new(AtomicUsize::new(0)));
        let (held, counted) = (go_on.clone(), Arc::clone(&runs));
        let upstream = H2::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                counted.fetch_add(1, Ordering::SeqCst);
                conn.send(HEADERS, END_HEADERS, stream, OK);
                conn.send(DATA, 0, stream, b"first");
                conn.send(DATA, 0, stream, b"second");
                held.wait();
                conn.send(DATA, 0, stream, b"last");
                conn.send(HEADERS, END_HEADERS | END_STREAM, stream, &block(&[("x-sum", b"7")]));
            }
        });
        let runs = Box::new(move || runs.load(Ordering::SeqCst));
        Self { url: upstream.url(), terms: "protocol = \"h2\"", runs, go_on, _held: Box::new(upstream) }
    }

    fn plan(&self, lines: &str) -> Plan {
        Gate::before_url(&self.url).upstream(self.terms).defaults(&format!("body = \"stream\"\n{lines}"))
    }
}

fn both() -> [Halting; 2] {
    [Halting::http1(), Halting::http2()]
}

fn keyed(key: &str) -> Request<Bytes> {
    post("/orders").header("idempotency-key", key).body(Bytes::from("{}")).unwrap()
}

/// Sends the same by frames, on the first stream.
fn sent(gate: &Gate, key: &str, settings: &[(u16, u32)]) -> Frames {
    let mut client = Frames::connect(gate.address, settings);
    let head = request("POST", "/orders", &[("idempotency-key", key.as_bytes())]);
    client.send(HEADERS, END_HEADERS, 1, &head).send(DATA, END_STREAM, 1, b"{}");
    client
}

#[track_caller]
fn replayed(gate: &Gate, key: &str) -> Answer {
    // A record is completed a moment before the gate knows.
    let over = || Some(Http2::connect(gate).send(keyed(key))).filter(|replay| replay.status != 409);
    let replay = crate::support::eventually("its end", over);
    replay.expect(200, "replayed");
    replay
}

#[track_caller]
fn is_whole(answer: Answer) {
    assert_eq!(answer.body, "firstsecondlast");
    assert_eq!(answer.trailers.expect("trailers")["x-sum"], "7");
}

/// Holds that a retry gets all of it, and that it ran once.
#[track_caller]
fn is_kept(gate: &Gate, key: &str, upstream: &Halting) {
    gate.wait_for_state(key, "completed");
    is_whole(replayed(gate, key));
    assert_eq!((upstream.runs)(), 1);
}

#[test]
fn the_client_has_an_answer_while_the_upstream_gives_it_and_a_retry_has_it_again() {
    for upstream in both() {
        let gate = upstream.plan("").start();
        let mut client = Http2::connect(&gate);
        let mut first = client.begin(keyed("k-1"));
        first.until(b"first".len()).expect(200, "executed");
        // Nothing is kept yet.
        assert_eq!((&first.answer.body[..], first.answer.get("idempotency-expires")), (&b"first"[..], ""));
        client.send(keyed("k-1")).expect(409, "in-flight");
        upstream.go_on.open();
        let first = first.whole().expect("it ends well");
        is_whole(first);
        is_kept(&gate, "k-1", &upstream);
        assert_ne!(replayed(&gate, "k-1").get("idempotency-expires"), "");
        let gate = gate.kill9().start();
        is_kept(&gate, "k-1", &upstream);
    }
}

#[test]
fn the_end_comes_with_the_record_and_not_before() {
    for upstream in both() {
        let gate = upstream.plan("").with_faults().store("settle_timeout = \"60s\"").start();
        let mut client = sent(&gate, "k-1", &[]);
        assert_eq!(client.next_of(DATA).unwrap().payload, b"first");
        gate.fault(Fault::Block);
        upstream.go_on.open();
        assert_eq!(client.next_of(DATA).unwrap().payload, b"second");
        // What is asked behind is answered before: a key that is none.
        let invalid = request("POST", "/orders", &[("idempotency-key", b"a b")]);
        let next = client.send(HEADERS, END_HEADERS | END_STREAM, 3, &invalid).next_of_any_stream().unwrap();
        assert_eq!(next.stream, 3, "the end was given before it was durable: {next:?}");
        gate.heal();
        assert_eq!(client.body(1), (b"last".to_vec(), Ended::Whole));
        is_kept(&gate, "k-1", &upstream);
    }
}

#[test]
fn a_store_that_is_away_at_the_end_resets_the_stream() {
    for upstream in both() {
        let gate = upstream.plan("").with_faults().store("settle_timeout = \"2s\"").start();
        let mut client = sent(&gate, "k-1", &[]);
        assert_eq!(client.next_of(DATA).unwrap().payload, b"first");
        gate.fault(Fault::Block);
        upstream.go_on.open();
        let (rest, ended) = client.body(1);
        assert_eq!(rest, b"second", "the last bytes were given before they were durable");
        assert!(matches!(ended, Ended::Reset(1..)), "{ended:?}");
        gate.heal();
        is_kept(&gate, "k-1", &upstream);
        // The connection goes on.
        let head = request("POST", "/orders", &[("idempotency-key", b"k-1")]);
        client.send(HEADERS, END_HEADERS, 3, &head).send(DATA, END_STREAM, 3, b"{}");
        assert_eq!(client.body(3), (b"firstsecondlast".to_vec(), Ended::Whole));
    }
}

#[test]
fn an_upstream_that_breaks_off_in_the_middle_resets_the_stream() {
    // Without an error, for a fault, given up.
    for code in [0_u32, 2, 8] {
        let upstream = H2::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                conn.send(HEADERS, END_HEADERS, stream, OK);
                conn.send(DATA, 0, stream, b"first");
                conn.send(DATA, 0, stream, b"second");
                conn.reset(stream, code);
            }
        });
        let plan = Gate::before_url(&upstream.url()).upstream("protocol = \"h2\"").defaults("body = \"stream\"");
        let gate = plan.start();
        let mut client = sent(&gate, "k-1", &[]);
        let (came, ended) = client.body(1);
        assert!(b"firstsecond".starts_with(&came), "{code}");
        assert!(matches!(ended, Ended::Reset(1..)), "{code}: {ended:?}");
        Http2::connect(&gate).send(keyed("k-1")).expect(409, "outcome-unknown");
    }
}

#[test]
fn a_client_that_resets_its_stream_in_the_middle_changes_nothing() {
    // Without an error, and given up.
    for code in [0_u32, 8] {
        for upstream in both() {
            let gate = upstream.plan("").start();
            let mut client = sent(&gate, "k-1", &[]);
            assert_eq!(client.next_of(DATA).unwrap().payload, b"first");
            client.send(RST_STREAM, 0, 1, &code.to_be_bytes()).is_read();
            assert_eq!(gate.states("k-1"), ["in-flight"]);
            upstream.go_on.open();
            is_kept(&gate, "k-1", &upstream);
        }
    }
}

#[test]
fn a_client_that_takes_nothing_holds_up_nobody() {
    for upstream in both() {
        let gate = upstream.plan("").start();
        let mut client = sent(&gate, "k-1", &[(4, 0)]);
        assert!(!client.next_of(HEADERS).expect("a head").ends());
        upstream.go_on.open();
        is_kept(&gate, "k-1", &upstream);
        client.send(WINDOW_UPDATE, 0, 1, &1000_u32.to_be_bytes());
        assert_eq!(client.body(1), (b"firstsecondlast".to_vec(), Ended::Whole));
    }
}
