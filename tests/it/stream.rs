//! `body = "stream"`: an answer goes to its client while the upstream gives it, and is complete there only once it is durable.

mod h2;

use crate::support::faults::Fault;
use crate::support::wire::{Framing, Head, values};
use crate::support::{Client, Gate, Plan, Reply, Request, Response, Signal, Upstream};

const HEAD: &str = "HTTP/1.1 201 Made\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n";
/// Two pieces that arrive at once, of which the client may have the first.
const TWO: &str = "5\r\nfirst\r\n6\r\nsecond\r\n";
const LARGE: usize = 4 << 20;

fn request(key: &str) -> Request {
    Request::post("/orders").key(key).header("TE", "trailers").header("Connection", "TE").body("{}")
}

fn plan(upstream: &Upstream) -> Plan {
    plan_with(upstream, "")
}

fn plan_with(upstream: &Upstream, lines: &str) -> Plan {
    Gate::before(upstream).defaults(&format!("body = \"stream\"\n{lines}"))
}

/// An upstream that sends a part, and the rest when the signal is given.
fn halting(part: impl Into<Vec<u8>>, rest: impl Into<Vec<u8>>) -> (Upstream, Signal) {
    let (part, rest, signal) = (part.into(), rest.into(), Signal::new());
    let held = signal.clone();
    (Upstream::start(move |_| Reply::raw(part.clone()).pause_until(&held).then(rest.clone())), signal)
}

fn large() -> Vec<u8> {
    (0..LARGE).map(|at| (at / 7 % 251) as u8).collect()
}

/// The head and the first half of a large answer with a length, and the second half.
fn halves() -> (Vec<u8>, Vec<u8>) {
    let mut first = format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n").into_bytes();
    let body = large();
    first.extend(&body[..LARGE / 2]);
    (first, body[LARGE / 2..].to_vec())
}

/// A client that has the head of its answer, and what came with it.
struct Begun {
    client: Client,
    head: Head,
    read: Vec<u8>,
}

impl Begun {
    /// Sends a request, and reads up to the end of `until`.
    #[track_caller]
    fn read(gate: &Gate, key: &str, until: &[u8]) -> Self {
        let mut client = Client::connect(gate.address);
        client.send(request(key).bytes());
        let head = client.head();
        let read = client.wire.until(until).expect("the first bytes are held back");
        Self { client, head, read }
    }

    /// The rest of what comes, up to the end of the connection.
    fn rest(mut self) -> Vec<u8> {
        self.read.extend(self.client.wire.rest());
        self.read
    }
}

#[track_caller]
fn replayed(gate: &Gate, key: &str) -> Response {
    let replay = request(key).send_after_attempt(gate);
    replay.expect(replay.status, "replayed");
    assert!(replay.head.has("idempotency-expires"));
    replay
}

#[test]
fn the_client_has_an_answer_while_the_upstream_gives_it_and_a_retry_has_it_again() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "4\r\nlast\r\n0\r\n\r\n");
    let gate = plan(&upstream).start();
    let mut first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    assert_eq!(first.head.start, b"HTTP/1.1 201 Made");
    assert_eq!(first.head.get("idempotency-status").as_deref(), Some("executed"));
    // Nothing is kept yet.
    assert!(!first.head.has("idempotency-expires"));
    request("k-1").send(&gate).expect_problem(409, "in-flight");
    signal.open();
    let body = first.client.wire.body(Framing::Chunked);
    assert!(body.complete && body.bytes == b"secondlast", "{body:?}");
    let replay = replayed(&gate, "k-1");
    assert_eq!((replay.line.as_str(), replay.text().as_str()), ("HTTP/1.1 201 Made", "firstsecondlast"));
    let head = Response { status: 201, line: replay.line.clone(), head: first.head.clone(), body: replay.body.clone() };
    head.expect_repeated_by(&replay);
    let gate = gate.kill9().start();
    head.expect_repeated_by(&replayed(&gate, "k-1"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_with_a_length() {
    let (first, second) = halves();
    let (upstream, signal) = halting(first, second);
    let gate = plan(&upstream).start();
    let mut begun = Begun::read(&gate, "k-1", &large()[..100_000]);
    assert_eq!(begun.head.get("content-length"), Some(LARGE.to_string()));
    signal.open();
    let body = begun.client.wire.body(Framing::Sized(LARGE - 100_000));
    assert!(body.complete && body.bytes == large()[100_000..]);
    assert!(replayed(&gate, "k-1").body.bytes == large());
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn trailers_come_with_the_end() {
    let head = HEAD.replace("X-A: 1", "Trailer: X-Sum");
    let (upstream, signal) = halting(format!("{head}{TWO}"), "0\r\nX-Sum: 12\r\n\r\n");
    let gate = plan(&upstream).start();
    let mut first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    signal.open();
    let body = first.client.wire.body(Framing::Chunked);
    assert_eq!((&body.bytes[..], values(&body.trailers, "x-sum")), (&b"second"[..], vec![&b"12"[..]]));
    let replay = replayed(&gate, "k-1");
    assert_eq!((replay.text().as_str(), replay.body.trailers), ("firstsecond", body.trailers));
}

#[test]
fn trailers_that_nothing_announced_are_neither_given_nor_kept() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "0\r\nX-Sum: 12\r\n\r\n");
    let gate = plan(&upstream).start();
    let mut first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    signal.open();
    let body = first.client.wire.body(Framing::Chunked);
    assert!(body.complete && body.trailers.is_empty());
    let replay = replayed(&gate, "k-1");
    assert!(replay.body.trailers.is_empty() && !replay.head.has("trailer"), "{}", replay.show());
}

#[test]
fn an_answer_of_one_piece_is_given_when_it_is_durable() {
    let upstream = Upstream::start(|_| Reply::raw(format!("{HEAD}5\r\nwhole\r\n0\r\n\r\n")));
    let gate = plan(&upstream).with_faults().store("settle_timeout = \"2s\"").start();
    let first = request("k-1").send(&gate);
    first.expect(201, "executed");
    assert!(first.head.has("idempotency-expires"));
    first.expect_repeated_by(&replayed(&gate, "k-1"));
    let upstream_empty = Upstream::start(|_| Reply::raw(format!("{HEAD}0\r\n\r\n")));
    let gate = plan(&upstream_empty).start();
    let first = request("k-1").send(&gate);
    first.expect(201, "executed");
    first.expect_repeated_by(&replayed(&gate, "k-1"));
}

#[test]
fn a_store_that_is_away_at_the_end_breaks_the_answer_off() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "0\r\n\r\n");
    let gate = plan(&upstream).with_faults().store("settle_timeout = \"2s\"").start();
    let first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    gate.fault(Fault::Block);
    signal.open();
    let rest = first.rest();
    assert_eq!(rest, b"5\r\nfirst\r\n", "the last bytes were given before they were durable");
    gate.heal();
    gate.wait_for_state("k-1", "completed");
    assert_eq!(replayed(&gate, "k-1").text(), "firstsecond");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_upstream_that_breaks_off_in_the_middle() {
    let (first, _) = halves();
    let upstream = Upstream::start(move |_| Reply::raw(first.clone()).close());
    let gate = plan(&upstream).start();
    let response = request("k-1").send(&gate);
    assert_eq!((response.status, response.word().as_str()), (200, "executed"));
    assert!(!response.body.complete && response.body.bytes == large()[..response.body.bytes.len()]);
    request("k-1").send(&gate).expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_kill_in_the_middle_leaves_the_outcome_unknown() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "0\r\n\r\n");
    let gate = plan_with(&upstream, "lease = \"1s\"").start();
    let first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    let gate = gate.kill9().start();
    assert_eq!(first.rest(), b"5\r\nfirst\r\n");
    // Where several gates may share a store, it goes by the lease.
    crate::support::eventually("that the lease is past", || {
        (request("k-1").send(&gate).word() == "outcome-unknown").then_some(())
    });
    signal.open();
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody() {
    let (mut first, second) = halves();
    first.extend(second);
    let upstream = Upstream::start(move |_| Reply::raw(first.clone()));
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(request("k-1").bytes());
    gate.wait_for_state("k-1", "completed");
    assert!(replayed(&gate, "k-1").body.bytes == large());
    let late = client.response();
    assert!(late.body.complete && late.body.bytes == large());
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_client_that_leaves_in_the_middle_changes_nothing() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "4\r\nlast\r\n0\r\n\r\n");
    let gate = plan(&upstream).start();
    drop(Begun::read(&gate, "k-1", b"5\r\nfirst\r\n"));
    signal.open();
    gate.wait_for_state("k-1", "completed");
    assert_eq!(replayed(&gate, "k-1").text(), "firstsecondlast");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_that_is_too_large_goes_to_its_client_and_leaves_a_tombstone() {
    const COUNT: usize = 8;
    let (mut first, second) = halves();
    first.extend(second);
    // Its length is not known beforehand: it is found too large in the middle.
    let body: Vec<u8> = large().repeat(COUNT);
    let raw = [HEAD.as_bytes(), format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n\r\n"].concat();
    let upstream = Upstream::start(move |_| Reply::raw(raw.clone()));
    let gate = plan_with(&upstream, "max_response_body = \"1MiB\"").start();
    let response = request("k-1").send(&gate);
    response.expect(201, "executed");
    assert!(response.body.bytes == body);
    request("k-1").send(&gate).expect_problem(409, "response-not-stored");
    assert_eq!(upstream.runs(), 1);
    let peak = gate.peak_memory();
    assert!(peak < 80 << 20, "{} MiB for a stream", peak >> 20);
}

#[test]
fn what_is_not_kept_is_not_streamed() {
    let (upstream, signal) = halting(format!("{}{TWO}", HEAD.replace("201 Made", "503 No")), "0\r\n\r\n");
    signal.open();
    let gate = plan(&upstream).start();
    request("k-1").send(&gate).expect(503, "released");
    request("k-1").send(&gate).expect(503, "released");
    let (upstream, signal) = halting(format!("{}{TWO}", HEAD.replace("201 Made", "504 No")), "0\r\n\r\n");
    signal.open();
    let gate = plan(&upstream).start();
    request("k-1").send(&gate).expect(504, "outcome-unknown");
}

#[test]
fn a_client_that_cannot_see_where_an_answer_breaks_off_gets_it_whole() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "0\r\n\r\n");
    let gate = plan(&upstream).with_faults().store("settle_timeout = \"2s\"").start();
    let mut client = Client::connect(gate.address);
    client.send("POST /orders HTTP/1.0\r\nHost: a\r\nIdempotency-Key: k-1\r\nContent-Length: 2\r\n\r\n{}");
    upstream.wait_for_runs(1);
    gate.fault(Fault::Block);
    signal.open();
    let response = client.response();
    response.expect(201, "unrecorded");
    assert_eq!(response.text(), "firstsecond");
    gate.heal();
}

/// Without chunks or a length, the end of the connection is the end of the answer (RFC 9112, 6.3): a break has to look otherwise.
#[test]
fn an_http_1_0_client_can_tell_a_break_from_an_end() {
    for is_cut in [false, true] {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let answer = format!("{head}7d0\r\n{}\r\n{}", "z".repeat(2000), if is_cut { "" } else { "0\r\n\r\n" });
        let upstream = Upstream::start(move |_| Reply::raw(answer.clone()).close());
        let gate = plan_with(&upstream, "max_response_body = \"1kB\"").start();
        for key in ["Idempotency-Key: k-1\r\n", ""] {
            let mut stream = std::net::TcpStream::connect(gate.address).expect("the gate listens");
            let request = format!("POST /orders HTTP/1.0\r\nHost: a\r\n{key}Content-Length: 2\r\n\r\n{{}}");
            std::io::Write::write_all(&mut stream, request.as_bytes()).expect("the gate reads");
            let mut read = Vec::new();
            let ended = std::io::Read::read_to_end(&mut stream, &mut read);
            let text = String::from_utf8_lossy(&read);
            match is_cut {
                false => assert!(ended.is_ok() && text.ends_with("zzz"), "{key}: {ended:?} {text}"),
                true => assert!(ended.is_err(), "{key}: {text}"),
            }
        }
    }
}

#[test]
fn those_who_wait_have_the_whole_answer() {
    let (upstream, signal) = halting(format!("{HEAD}{TWO}"), "0\r\n\r\n");
    let gate = plan_with(&upstream, "in_flight = { wait = \"20s\" }").start();
    let first = Begun::read(&gate, "k-1", b"5\r\nfirst\r\n");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| request("k-1").send(&gate));
        gate.wait_for_waiting(1);
        signal.open();
        let waited = waits.join().expect("an answer");
        waited.expect(201, "replayed");
        assert_eq!(waited.text(), "firstsecond");
    });
    drop(first);
    assert_eq!(upstream.runs(), 1);
}
