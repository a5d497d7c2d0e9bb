//! `in_flight = { wait = … }` and `Prefer: wait`: a duplicate waits for the first in the place of a 409.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use crate::support::faults::Fault;
use crate::support::{Awake, Client, Gate, Plan, Reply, Request, Response, Signal, Upstream, eventually};

const WAIT: &str = "in_flight = { wait = \"25s\" }";

/// Time for a request that was sent to be waiting. Nothing fails where that is not enough.
const SETTLED: Duration = Duration::from_millis(300);

/// An upstream that answers when the signal is given.
fn holding(reply: impl Fn() -> Reply + Send + Sync + 'static) -> (Upstream, Signal) {
    let signal = Signal::new();
    let held = signal.clone();
    (Upstream::start(move |_| reply().hold_until(&held)), signal)
}

fn waiting(upstream: &Upstream) -> Plan {
    Gate::before(upstream).defaults(WAIT)
}

fn charge() -> Request {
    Request::post("/charges").key("k-1").body("{\"amount\":1}")
}

fn send(request: &Request, to: impl Into<SocketAddr>) -> JoinHandle<Response> {
    let (request, address) = (request.clone(), to.into());
    spawn(move || request.send(address))
}

/// The first request, while the upstream runs it, and some more that wait for it.
fn first_and_waiters(
    gate: &Gate,
    upstream: &Upstream,
    count: usize,
) -> (JoinHandle<Response>, Vec<JoinHandle<Response>>) {
    let first = send(&charge(), gate);
    upstream.wait_for_runs(1);
    let waiters: Vec<_> = (0..count).map(|_| send(&charge(), gate)).collect();
    gate.wait_for_waiting(count);
    assert!(!waiters.iter().any(JoinHandle::is_finished), "answered while the first runs");
    (first, waiters)
}

fn all(waiters: Vec<JoinHandle<Response>>) -> Vec<Response> {
    waiters.into_iter().map(|waiter| waiter.join().expect("an answer")).collect()
}

#[test]
fn those_who_wait_get_the_replay() {
    let (upstream, signal) = holding(|| {
        let head =
            "HTTP/1.1 201 Made\r\nSet-Cookie: a=1\r\nEtag: \"x\"\r\nSet-Cookie: b=2\r\nTransfer-Encoding: chunked\r\n";
        Reply::raw(format!("{head}\r\n4\r\n\0\u{1}ab\r\n0\r\n\r\n"))
    });
    let gate = waiting(&upstream).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    assert_eq!(gate.metric("oncegate_attempts_in_flight", &[]), 1.0, "who waits is no attempt");
    signal.open();
    let first = first.join().unwrap();
    first.expect(201, "executed");
    for response in all(waiters) {
        response.expect(201, "replayed");
        first.expect_repeated_by(&response);
        assert_eq!(first.get("idempotency-expires"), response.get("idempotency-expires"));
    }
    first.expect_repeated_by(&charge().send(&gate));
    assert_eq!(upstream.runs(), 1);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"replayed\""]), 4.0);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"in-flight\""]), 0.0);
    assert_eq!(gate.metric("oncegate_upstream_duration_seconds_count", &[]), 1.0);
}

#[test]
fn fifty_who_wait_for_one_key_get_one_run() {
    let upstream =
        Upstream::start(|request| Reply::ok(format!("run {}", request.nth)).delay(Duration::from_millis(500)));
    let gate = waiting(&upstream).start();
    let barrier = Barrier::new(50);
    let responses: Vec<Response> = std::thread::scope(|scope| {
        let together = || {
            barrier.wait();
            charge().send(&gate)
        };
        let clients: Vec<_> = (0..50).map(|_| scope.spawn(together)).collect();
        clients.into_iter().map(|client| client.join().expect("an answer")).collect()
    });
    let (first, others): (Vec<_>, Vec<_>) = responses.iter().partition(|response| response.word() == "executed");
    assert_eq!((first.len(), others.len()), (1, 49));
    for other in others {
        other.expect(200, "replayed");
        first[0].expect_repeated_by(other);
    }
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_wait_ends_in_a_conflict_and_the_next_goes_on() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).start();
    let first = send(&charge(), &gate);
    upstream.wait_for_runs(1);
    for _ in 0..2 {
        let start = Instant::now();
        let response = charge().header("Prefer", "wait=1").send(&gate);
        response.expect_problem(409, "in-flight");
        assert!(response.retry_after() >= 1);
        assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
    }
    let last = send(&charge(), &gate);
    gate.wait_for_waiting(1);
    signal.open();
    first.join().unwrap().expect(200, "executed");
    last.join().unwrap().expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// How long a duplicate waits that has these lines of `Prefer`: at least, and less than.
#[track_caller]
fn waits(gate: &Gate, lines: &[&str], at_least: u64, less_than: u64) {
    let prefer = |request: Request, line: &&str| request.header("Prefer", line);
    let (start, awake) = (Instant::now(), Awake::start());
    let response = lines.iter().fold(charge(), prefer).send(gate);
    let (took, took_awake) = (start.elapsed(), awake.elapsed());
    response.expect_problem(409, "in-flight");
    assert!(took >= Duration::from_millis(at_least), "{lines:?}: {took:?}");
    assert!(took_awake < Duration::from_millis(less_than), "{lines:?}: {took:?}, awake {took_awake:?}");
}

#[test]
fn a_client_can_wait_for_less_and_not_for_more() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = Gate::before(&upstream).defaults("in_flight = { wait = \"6s\" }").start();
    let first = send(&charge(), &gate);
    upstream.wait_for_runs(1);
    std::thread::scope(|scope| {
        let cases: [(&[&str], u64, u64); 10] = [
            (&["wait=0"], 0, 5_900),
            (&["wait=1"], 990, 5_900),
            (&["WAIT=\"1\""], 990, 5_900),
            (&["respond-async, wait = 1; x=y", "wait=9"], 990, 5_900),
            (&["respond-async", "wait=1"], 990, 5_900),
            (&["wait=100"], 5_990, 30_000),
            (&["wait=99999999999999999999"], 5_990, 30_000),
            (&["wait=soon"], 5_990, 30_000),
            (&["wait=-1"], 5_990, 30_000),
            (&[], 5_990, 30_000),
        ];
        for (lines, at_least, less_than) in cases {
            let gate = &gate;
            scope.spawn(move || waits(gate, lines, at_least, less_than));
        }
    });
    signal.open();
    first.join().unwrap().expect(200, "executed");
    assert_eq!(upstream.last().head.all("prefer").len(), 0);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn where_nobody_waits_a_preference_changes_nothing() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let first = send(&charge().header("Prefer", "wait=20"), &gate);
    upstream.wait_for_runs(1);
    waits(&gate, &["wait=20"], 0, 5_000);
    signal.open();
    first.join().unwrap().expect(200, "executed");
    // It is the client's, and goes on to the upstream.
    assert_eq!(upstream.last().head.all("prefer"), [b"wait=20"]);
}

#[test]
fn a_release_is_the_answer_of_all_who_wait_for_it() {
    let (upstream, signal) =
        holding(|| Reply::raw("HTTP/1.1 500 Oops\r\nX-A: 1\r\nContent-Length: 4\r\nX-A: 2\r\n\r\nno\0\n"));
    let gate = waiting(&upstream).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 10);
    signal.open();
    let first = first.join().unwrap();
    first.expect(500, "released");
    for response in all(waiters) {
        response.expect(500, "released");
        first.expect_repeated_by(&response);
    }
    assert_eq!(upstream.runs(), 1, "who waited began an attempt");
    assert_eq!(gate.states("k-1"), [""; 0]);
    charge().send(&gate).expect(500, "released");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn a_release_that_is_too_large_to_hand_on_lets_those_who_wait_try_again() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| {
        let reply = Reply::raw("HTTP/1.1 500 Oops\r\nContent-Length: 100000\r\n\r\n").hold_until(&held);
        reply.then("x".repeat(100_000))
    });
    let plan = Gate::before(&upstream).defaults(&format!("{WAIT}\nmax_response_body = \"1KiB\""));
    let gate = plan.start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    signal.open();
    first.join().unwrap().expect(500, "released");
    for response in all(waiters) {
        response.expect_problem(409, "in-flight");
        assert_eq!(response.retry_after(), 1);
    }
    assert_eq!(upstream.runs(), 1, "who waited began an attempt");
}

#[test]
fn those_who_wait_hear_that_nothing_was_sent() {
    // It takes connections into its queue and no further, so that connecting is what takes the time.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let _queued = std::net::TcpStream::connect(address).unwrap();
    let gate =
        Gate::before_url(&format!("http://{address}")).upstream("connect_timeout = \"10s\"").defaults(WAIT).start();
    let first = send(&charge(), &gate);
    gate.wait_for_state("k-1", "in-flight");
    let waiters: Vec<_> = (0..3).map(|_| send(&charge(), &gate)).collect();
    gate.wait_for_waiting(3);
    let first = first.join().unwrap();
    first.expect_problem(502, "upstream-unreachable");
    for response in all(waiters) {
        response.expect_problem(502, "upstream-unreachable");
        assert_eq!(response.retry_after(), first.retry_after());
        let problem = |response: &Response| {
            let mut problem = response.json();
            // Each is a request of its own.
            assert!(problem.as_object_mut().unwrap().remove("instance").is_some());
            problem
        };
        assert_eq!(problem(&response), problem(&first));
    }
    assert_eq!(gate.states("k-1"), [""; 0]);
    let claims = gate.metric("oncegate_store_duration_seconds_count", &["op=\"claim\""]);
    assert_eq!(claims, 1.0, "who waited began an attempt");
}

#[test]
fn those_who_wait_hear_that_nobody_knows() {
    let (upstream, signal) = holding(|| Reply::default().pause(Duration::from_millis(1)).reset());
    let gate = waiting(&upstream).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    signal.open();
    first.join().unwrap().expect_problem(502, "upstream-broken");
    for response in all(waiters) {
        response.expect_problem(409, "outcome-unknown");
    }
    assert_eq!(upstream.runs(), 1);
}

/// The policy lets a retry run, and a retry is what comes after: not who waited.
#[test]
fn who_waits_takes_over_nothing() {
    let (upstream, signal) = holding(|| Reply::default().pause(Duration::from_millis(1)).reset());
    let gate = Gate::before(&upstream).defaults(&format!("{WAIT}\nrecovery = \"retry\"")).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 5);
    signal.open();
    first.join().unwrap().expect_problem(502, "upstream-broken");
    for response in all(waiters) {
        response.expect_problem(409, "in-flight");
        assert_eq!(response.retry_after(), 1);
    }
    assert_eq!((upstream.runs(), gate.states("k-1")), (1, vec!["unknown".to_owned()]));
    charge().send(&gate).expect_problem(502, "upstream-broken");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn an_answer_that_is_not_kept_is_told_at_once() {
    let rest = Signal::new();
    let (signal, held) = (Signal::new(), rest.clone());
    let begin = signal.clone();
    let upstream = Upstream::start(move |_| {
        let reply = Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n").hold_until(&begin);
        reply.then("x".repeat(100_000)).pause_until(&held).then("y".repeat(100_000))
    });
    let plan = Gate::before(&upstream).defaults(&format!("{WAIT}\nmax_response_body = \"1KiB\""));
    let gate = plan.start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 2);
    signal.open();
    for response in all(waiters) {
        response.expect_problem(409, "response-not-stored");
        assert_eq!(response.json()["original_status"], 200);
    }
    assert!(!first.is_finished(), "the answer still streams");
    rest.open();
    assert_eq!(first.join().unwrap().expect(200, "executed").body.bytes.len(), 200_000);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn another_request_under_the_key_waits_for_nothing() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).start();
    let first = send(&charge(), &gate);
    upstream.wait_for_runs(1);
    gate.post("/charges", "k-1", "{\"amount\":2}").expect_problem(422, "key-reused");
    assert!(!first.is_finished());
    // The same in another form is the same.
    let other_form = send(&Request::post("/charges").key("\"k-1\"").body("{\"amount\":1}"), &gate);
    sleep(SETTLED);
    signal.open();
    first.join().unwrap().expect(200, "executed");
    other_form.join().unwrap().expect(200, "replayed");
}

#[test]
fn a_purge_while_the_attempt_runs() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 2);
    let id = gate.records("key=k-1")[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(gate.admin("DELETE", &format!("/api/v1/records/{id}"), None).status, 204);
    signal.open();
    first.join().unwrap().expect(200, "unrecorded");
    for response in all(waiters) {
        response.expect_problem(409, "in-flight");
        assert_eq!(response.retry_after(), 1);
    }
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_client_that_stopped_waiting_leaves_nothing_behind() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).start();
    let first = send(&charge(), &gate);
    upstream.wait_for_runs(1);
    // What they hold shows as files: their bodies are too large for memory. The first is one of them.
    let body = format!("{{\"amount\":1,\"note\":\"{}\"}}", "x".repeat(400_000));
    let large = Request::post("/charges").key("k-2").body(body);
    let large_first = send(&large, &gate);
    upstream.wait_for_runs(2);
    let open = || std::fs::read_dir(format!("/proc/{}/fd", gate.pid())).unwrap().count();
    let before = open();
    let clients: Vec<Client> = (0..8)
        .map(|_| {
            let mut client = Client::connect(gate.address);
            client.send(large.bytes());
            client
        })
        .collect();
    // A connection and a body each.
    eventually("eight bodies", || (open() >= before + 16).then_some(()));
    sleep(SETTLED);
    drop(clients);
    let left = Instant::now();
    // Connections to the store may have come meanwhile, fewer than there were clients.
    eventually("an end of them", || (open() < before + 8).then_some(()));
    assert!(left.elapsed() < Duration::from_secs(15), "they ended when their wait did: {:?}", left.elapsed());
    assert!(!first.is_finished() && !large_first.is_finished());
    signal.open();
    first.join().unwrap().expect(200, "executed");
    large_first.join().unwrap().expect(200, "executed");
    large.send(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn sigterm_lets_them_wait_for_the_attempt() {
    let (upstream, signal) = holding(|| Reply::ok("late"));
    let mut gate = waiting(&upstream).start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    gate.sigterm();
    eventually("unready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    sleep(SETTLED);
    assert!(gate.is_running() && !waiters.iter().any(JoinHandle::is_finished));
    signal.open();
    first.join().unwrap().expect(200, "executed");
    for response in all(waiters) {
        response.expect(200, "replayed");
    }
    let status = gate.wait();
    assert!(status.success(), "{status}");
}

#[test]
fn those_who_wait_for_what_cannot_finish_are_told_so() {
    let (upstream, never) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).server("drain_timeout = \"500ms\"").start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    let start = Awake::start();
    gate.stop();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    first.join().unwrap().expect_problem(504, "upstream-timeout");
    for response in all(waiters) {
        response.expect_problem(409, "outcome-unknown");
    }
    never.open();
}

#[test]
fn a_client_timeout_ends_a_wait_as_it_ends_everything() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).upstream("client_timeout = \"1s\"").start();
    let first = send(&charge(), &gate);
    upstream.wait_for_runs(1);
    let start = Awake::start();
    charge().send(&gate).expect_problem(504, "still-running");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    charge().header("Prefer", "wait=0").send(&gate).expect_problem(409, "in-flight");
    first.join().unwrap().expect_problem(504, "still-running");
    signal.open();
    // It may be settled later than a client waits.
    eventually("the answer", || {
        let answer = charge().send(&gate);
        let is_told = answer.status != 504;
        is_told.then(|| answer.expect(200, "replayed").status)
    });
    assert_eq!(upstream.runs(), 1);
}

/// The first has its answer, which is not recorded yet: those who wait get it when it is.
#[test]
fn a_store_that_is_away_holds_them_up() {
    let (upstream, signal) = holding(|| Reply::ok("x"));
    let gate = waiting(&upstream).with_faults().store("settle_timeout = \"3s\"").start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    let impatient = send(&charge().header("Prefer", "wait=2"), &gate);
    // Either it waits by then, or it has its answer.
    eventually("it has come", || {
        let waits = gate.metric("oncegate_requests_waiting", &[]) == 4.0;
        (waits || impatient.is_finished()).then_some(())
    });
    gate.fault(Fault::Full);
    signal.open();
    let first = first.join().unwrap();
    first.expect(200, "unrecorded");
    impatient.join().unwrap().expect_problem(409, "in-flight");
    assert!(!waiters.iter().any(JoinHandle::is_finished), "answered with what may be lost");
    gate.heal();
    for response in all(waiters) {
        response.expect(200, "replayed");
        first.expect_repeated_by(&response);
    }
    assert_eq!(upstream.runs(), 1);
}

/// The same for a release: it is told when the key is free.
#[test]
fn a_store_that_is_away_holds_a_release_up() {
    let (upstream, signal) = holding(|| Reply::status("500 Oops", "x"));
    let gate = waiting(&upstream).with_faults().store("settle_timeout = \"3s\"").start();
    let (first, waiters) = first_and_waiters(&gate, &upstream, 3);
    gate.fault(Fault::Full);
    signal.open();
    let first = first.join().unwrap();
    first.expect(500, "unrecorded");
    sleep(SETTLED);
    assert!(!waiters.iter().any(JoinHandle::is_finished), "the key is not free yet");
    gate.heal();
    for response in all(waiters) {
        response.expect(500, "released");
        first.expect_repeated_by(&response);
    }
    assert_eq!(upstream.runs(), 1);
}
