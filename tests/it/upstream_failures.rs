//! What breaks between the gate and the upstream: unknown is unknown, and nothing sent is nothing sent.

use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::wait::PATIENCE;
use crate::support::wire::Framing;
use crate::support::{Client, Gate, Plan, Reply, Request, Response, Signal, Upstream, eventually};

/// Holds that the first answer is this problem, that a retry is told that nobody knows, and that the upstream ran once.
#[track_caller]
fn held_as_unknown(plan: Plan, upstream: &Upstream, status: u16, code: &str) {
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect_problem(status, code);
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(gate.states("k-1"), ["unknown"]);
    // It may have the request later than the gate gives it up.
    upstream.wait_for_runs(1);
    assert_eq!(upstream.runs(), 1);
    let gate = gate.kill9().start();
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 1);
}

#[track_caller]
fn broken(reply: impl Fn() -> Reply + Send + Sync + 'static) {
    let upstream = Upstream::start(move |_| reply());
    held_as_unknown(Gate::before(&upstream), &upstream, 502, "upstream-broken");
}

#[test]
fn a_reset_before_the_answer() {
    broken(|| Reply::default().pause(Duration::from_millis(5)).reset());
}

#[test]
fn a_close_before_the_answer() {
    broken(|| Reply::default().pause(Duration::from_millis(5)).close());
}

#[test]
fn a_reset_in_the_body() {
    broken(|| {
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf").pause(Duration::from_millis(20)).reset()
    });
}

#[test]
fn a_short_content_length() {
    broken(|| Reply::ok("0123456789").truncate(1));
}

#[test]
fn a_missing_last_chunk() {
    broken(|| Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n").close());
}

#[test]
fn trailers_that_do_not_end() {
    broken(|| Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: 1\r\n").close());
}

#[test]
fn a_head_that_breaks_off() {
    broken(|| Reply::raw("HTTP/1.1 200 OK\r\nContent-Le").close());
}

#[test]
fn an_answer_that_is_not_http() {
    broken(|| Reply::raw("SSH-2.0-OpenSSH_9.2\r\n\r\n").close());
}

#[test]
fn a_chunk_size_that_is_no_number() {
    broken(|| Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n").close());
}

#[test]
fn two_lengths_that_differ() {
    broken(|| Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc").close());
}

#[test]
fn silence_until_the_timeout() {
    let upstream = Upstream::start(|_| Reply::nothing());
    let plan = Gate::before(&upstream).upstream("timeout = \"2s\"");
    held_as_unknown(plan, &upstream, 504, "upstream-timeout");
}

#[test]
fn an_answer_that_stalls_until_the_timeout() {
    let never = Signal::new();
    let held = never.clone();
    let upstream =
        Upstream::start(move |_| Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").pause_until(&held));
    let plan = Gate::before(&upstream).upstream("timeout = \"2s\"");
    held_as_unknown(plan, &upstream, 504, "upstream-timeout");
    never.open();
}

#[test]
fn gateway_errors_behind_the_gate_are_unknown() {
    for status in ["502 Bad Gateway", "504 Gateway Timeout"] {
        let upstream = Upstream::start(move |_| Reply::status(status, "from behind"));
        let gate = Gate::before(&upstream).start();
        let first = gate.post("/charges", "k-1", "{}");
        assert_eq!((first.status.to_string().as_str(), first.text().as_str()), (&status[..3], "from behind"));
        assert_eq!(first.word(), "outcome-unknown", "{}", first.show());
        assert!(!first.head.has("idempotency-expires"));
        gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
        assert_eq!(upstream.runs(), 1);
    }
}

#[test]
fn answers_that_release_their_key() {
    for status in ["401 U", "407 P", "408 T", "425 E", "429 M", "500 I", "501 N", "503 S"] {
        let upstream = Upstream::start(move |request| match request.nth {
            1 => Reply::status(status, "not now"),
            _ => Reply::ok("done"),
        });
        let gate = Gate::before(&upstream).start();
        let first = gate.post("/charges", "k-1", "{}");
        first.expect(status[..3].parse().unwrap(), "released");
        assert_eq!(first.text(), "not now");
        assert!(!first.head.has("idempotency-expires"));
        gate.post("/charges", "k-1", "{}").expect(200, "executed");
        gate.post("/charges", "k-1", "{}").expect(200, "replayed");
        assert_eq!(upstream.runs(), 2);
    }
}

#[test]
fn a_refused_connection_releases_and_the_retry_runs() {
    let address = Upstream::free_address();
    let gate = Gate::before_url(&format!("http://{address}")).start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-unreachable");
    assert!(gate.states("k-1").is_empty());
    let upstream = Upstream::start_at(address, |_| Reply::ok("x"));
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_name_that_does_not_resolve_releases() {
    let gate = Gate::before_url("http://no-such-host.invalid:80").start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-unreachable");
    assert!(gate.states("k-1").is_empty());
}

#[test]
fn a_connection_that_does_not_open_releases() {
    let (address, _full) = never_accepts();
    let gate = Gate::before_url(&format!("http://{address}")).upstream("connect_timeout = \"300ms\"").start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-unreachable");
    assert!(gate.states("k-1").is_empty());
}

/// A listener whose queue is full, so that a connection to it neither opens nor fails.
fn never_accepts() -> (SocketAddr, Vec<socket2::Socket>) {
    use socket2::{Domain, Socket, Type};
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut sockets = vec![listener];
    for _ in 0..4 {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        drop(socket.connect(&address));
        sockets.push(socket);
    }
    (address.as_socket().unwrap(), sockets)
}

#[test]
fn a_pooled_connection_that_closes_at_the_moment_of_sending_never_runs_twice() {
    // The second request on a connection is read, counted as a run, and dropped without an answer.
    let upstream = Upstream::scripted(|conn| {
        if conn.next().is_some() && conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1").is_ok() {
            conn.next();
        }
    });
    let gate = Gate::before(&upstream).start();
    // Each of the gate's threads has connections of its own: one connection of a client is at one of them.
    let mut client = Client::connect(gate.address);
    let mut broken = 0;
    for nth in 0..10 {
        let key = format!("key-{nth}");
        client.send(Request::post("/charges").key(&key).body("{}").bytes());
        let response = client.response();
        match response.status {
            200 => _ = response.expect(200, "executed"),
            _ => {
                response.expect_problem(502, "upstream-broken");
                gate.post("/charges", &key, "{}").expect_problem(409, "outcome-unknown");
                broken += 1;
            }
        }
        assert_eq!(upstream.runs_of(&key), 1);
    }
    assert!(broken > 0, "no connection was used twice");
}

#[test]
fn pooled_connections_that_close_while_idle_never_run_anything_twice() {
    // Closes at some moment after the answer, so that closing and sending race.
    let upstream = Upstream::scripted(|conn| {
        if let Some(request) = conn.next() {
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"));
            let wait = u64::try_from(request.nth % 40).expect("small") * 50;
            std::thread::sleep(Duration::from_micros(wait));
            if request.nth % 2 == 0 {
                conn.reset_on_close();
            }
        }
    });
    let gate = Gate::before(&upstream).start();
    for nth in 0..300 {
        let key = format!("key-{nth}");
        let response = gate.post("/charges", &key, "{}");
        match response.word().as_str() {
            "executed" => assert_eq!(upstream.runs_of(&key), 1),
            "upstream-unreachable" => {
                assert_eq!(upstream.runs_of(&key), 0, "said that nothing was sent");
                let retry = gate.post("/charges", &key, "{}");
                assert!(["executed", "upstream-unreachable", "upstream-broken"].contains(&retry.word().as_str()));
            }
            "upstream-broken" => {
                gate.post("/charges", &key, "{}").expect_problem(409, "outcome-unknown");
            }
            _ => panic!("{}", response.show()),
        }
        assert!(upstream.runs_of(&key) <= 1, "two runs of {key}");
    }
}

#[test]
fn a_connection_is_used_again_at_once_and_not_after_a_second() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    // Each of the gate's threads has connections of its own: one connection of a client is at one of them.
    let mut client = Client::connect(gate.address);
    let mut post = |key: &str| {
        client.send(Request::post("/charges").key(key).body("{}").bytes());
        client.response().expect(200, "executed");
    };
    // It is back in the pool shortly after the answer.
    let reused = (0..20).any(|nth| {
        let before = upstream.connections();
        post(&format!("warm-{nth}"));
        upstream.connections() == before
    });
    assert!(reused, "no connection was used twice");
    let before = upstream.connections();
    std::thread::sleep(Duration::from_millis(1_100));
    post("late");
    assert_eq!(upstream.connections(), before + 1, "a connection that was idle for over a second was used");
}

#[test]
fn a_complete_answer_beats_a_write_error() {
    // Answers before the body is there, and resets what is still being written.
    let upstream = Upstream::scripted(|conn| {
        if conn.next_head().is_some() {
            drop(conn.wire.send(b"HTTP/1.1 422 No\r\nContent-Length: 7\r\nConnection: close\r\n\r\ntoo big"));
            std::thread::sleep(Duration::from_millis(300));
            conn.reset_on_close();
        }
    });
    let gate = Gate::before(&upstream).start();
    let request = Request::post("/charges").key("k-1").body(vec![b'x'; 12 << 20]);
    let first = request.send(&gate);
    first.expect(422, "executed");
    assert_eq!(first.text(), "too big");
    request.send(&gate).expect(422, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_client_that_waited_long_enough_is_told_and_gets_the_answer_later() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("201 Created", "late").hold_until(&held));
    let gate = Gate::before(&upstream).upstream("client_timeout = \"2s\"").start();
    gate.post("/charges", "k-1", "{}").expect_problem(504, "still-running");
    gate.post("/charges", "k-1", "{}").expect_problem(409, "in-flight");
    signal.open();
    let retry: Response = eventually("the replay", || {
        let retry = gate.post("/charges", "k-1", "{}");
        (retry.status == 201).then_some(retry)
    });
    retry.expect(201, "replayed");
    assert_eq!((retry.text().as_str(), upstream.runs()), ("late", 1));
}

#[test]
fn unprotected_requests_get_problems_without_the_three_headers() {
    let gate = Gate::before_url(&format!("http://{}", Upstream::free_address())).start();
    let response = Request::get("/x").send(&gate);
    response.expect_bare_problem(502, "upstream-unreachable");
    assert!(!response.head.has("idempotency-status"), "{}", response.show());
}

/// What an upstream sends beyond its answer must not become another caller's answer. (Nobody can tell bytes that come
/// after the next request was sent from its answer; those that were there before can be told.)
#[test]
fn bytes_after_an_answer_answer_nobody() {
    const POISON: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison";
    for apart in [false, true] {
        let sent = Arc::new(AtomicUsize::new(0));
        let sending = Arc::clone(&sent);
        let upstream = Upstream::scripted(move |conn| {
            while let Some(request) = conn.next() {
                let own = format!("for {}", request.key().unwrap_or_default());
                let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{own}", own.len()).into_bytes();
                if !apart {
                    answer.extend(POISON);
                }
                drop(conn.wire.send(&answer));
                if apart {
                    drop(conn.wire.send(POISON));
                }
                sending.fetch_add(1, Ordering::SeqCst);
            }
        });
        let gate = Gate::before(&upstream).start();
        for nth in 0..50 {
            let key = format!("key-{nth}");
            let requests =
                [Request::post("/charges").key(&key).body("{}"), Request::get("/x").header("Idempotency-Key", &key)];
            for request in requests {
                let response = request.send(&gate);
                assert_eq!(response.text(), format!("for {key}"), "another's answer: {}", response.show());
                // At once when they are there: a longer wait would be kinder to the gate than an upstream is.
                let start = Instant::now();
                while sent.load(Ordering::SeqCst) < upstream.runs() {
                    assert!(start.elapsed() < PATIENCE, "the upstream does not go on");
                    std::thread::yield_now();
                }
            }
        }
    }
}

#[test]
fn upstreams_of_http_1_0() {
    let upstream = Upstream::start(|_| Reply::raw("HTTP/1.0 200 OK\r\nX-A: 1\r\n\r\nold").close());
    let gate = Gate::before(&upstream).start();
    let first = gate.post("/charges", "k-1", "{}");
    first.expect(200, "executed");
    assert_eq!(first.text(), "old");
    first.expect_repeated_by(&gate.post("/charges", "k-1", "{}"));
    assert_eq!(Request::get("/x").send(&gate).text(), "old");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn half_an_answer_that_only_its_connection_delimits_is_no_answer() {
    // The reset's error goes to the write that is under way; the end that is read then must not pass for a close.
    let upstream = Upstream::scripted(|conn| {
        if let Some(request) = conn.next_head() {
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\n\r\nhalf an ans"));
            // Somewhere in the middle, while the gate writes.
            let mut some = vec![0; 1 << 18];
            for _ in 0..=request.nth % 8 {
                drop(conn.wire.stream.read(&mut some));
            }
            conn.reset_on_close();
        }
    });
    let gate = Gate::before(&upstream).start();
    for key in 0..24 {
        let request = Request::post("/charges").key(&format!("k-{key}")).body(vec![b'x'; 4 << 20]);
        request.send(&gate).expect_problem(502, "upstream-broken");
        request.send(&gate).expect_problem(409, "outcome-unknown");
    }
    assert_eq!(upstream.runs(), 24);
}

#[test]
fn an_upstream_that_answers_early_still_gets_all_of_the_request() {
    let whole = Arc::new(AtomicUsize::new(0));
    let upstream = Upstream::scripted({
        let whole = Arc::clone(&whole);
        move |conn| {
            if let Some(request) = conn.next_head() {
                drop(conn.wire.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok"));
                std::thread::sleep(Duration::from_millis(1500));
                let body = conn.wire.body(request.head.framing(Framing::None));
                whole.fetch_add(usize::from(body.complete), Ordering::SeqCst);
            }
        }
    });
    let gate = Gate::before(&upstream).start();
    Request::post("/charges").key("k-1").body(vec![b'x'; 12 << 20]).send(&gate).expect(202, "executed");
    eventually("the whole request", || (whole.load(Ordering::SeqCst) == 1).then_some(()));
}

#[test]
fn an_attempt_that_times_out_while_it_connects_is_released() {
    let (address, _full) = never_accepts();
    let plan = Gate::before_url(&format!("http://{address}"));
    let gate = plan.upstream("timeout = \"300ms\", connect_timeout = \"5s\"").start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-unreachable");
    assert!(gate.states("k-1").is_empty());
}

/// What a route's `outcomes` make of an attempt without an answer is what its problem says.
#[test]
fn a_problem_says_what_the_outcomes_of_its_route_mean_for_a_retry() {
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let detail = |gate: &Gate, code: &str| {
        let problem = gate.post("/charges", "k-1", "{}");
        problem.expect_problem(502, code);
        problem.json()["detail"].as_str().expect("a detail").to_owned()
    };
    let released = Gate::before(&upstream).defaults("outcomes = { broken = \"release\" }\n").start();
    for _ in 0..2 {
        let detail = detail(&released, "upstream-broken");
        assert!(detail.ends_with("releases the key: a retry runs the request again"), "{detail}");
    }
    let usual = Gate::before(&upstream).start();
    let said = detail(&usual, "upstream-broken");
    assert!(said.ends_with("; it may have taken effect: do not send it with a new key"), "{said}");
    let away = Gate::before_url(&format!("http://{}", Upstream::free_address()));
    let held = away.defaults("outcomes = { unreachable = \"hold\" }\n").start();
    let detail = detail(&held, "upstream-unreachable");
    assert!(detail.ends_with("holds the outcome as unknown: a retry does not run"), "{detail}");
    held.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
}

/// An upstream whose answer is refused did not break off.
#[test]
fn a_problem_tells_an_answer_that_is_refused_from_one_that_broke_off() {
    let cases = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "the upstream broke off before its answer was complete"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
            "the upstream's answer is not valid HTTP",
        ),
        (
            "HTTP/1.1 200 OK\nContent-Length: 2\r\n\r\nok",
            "the head of the upstream's answer is too large, or not valid HTTP",
        ),
        ("SSH-2.0-OpenSSH_9.2\r\n\r\n", "the upstream's answer is not valid HTTP"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n0\r\n\r\n",
            "the upstream's answer is not valid HTTP: its chunks or its trailers are malformed",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nbad trailer\r\n\r\n",
            "the upstream's answer is not valid HTTP: its chunks or its trailers are malformed",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
            "the upstream broke off before its answer was complete",
        ),
    ];
    for (answer, expected) in cases {
        let upstream = Upstream::start(move |_| Reply::raw(answer).close());
        let gate = Gate::before(&upstream).start();
        let problem = gate.post("/charges", "k-1", "{}");
        problem.expect_problem(502, "upstream-broken");
        let detail = problem.json()["detail"].as_str().expect("a detail").to_owned();
        assert!(
            detail.starts_with(expected) && detail.ends_with("do not send it with a new key"),
            "{answer}: {detail}"
        );
    }
}

/// The client is at fault, as where its body pauses for `body_timeout`.
#[test]
fn a_body_that_stops_before_the_upstreams_timeout_is_the_clients_fault() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::scripted(move |conn| {
        drop(conn.next_head());
        held.wait();
    });
    let gate = Gate::before(&upstream).upstream("timeout = \"2s\"").start();
    let mut client = Client::connect(gate.address);
    client.send("POST /charges HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n");
    client.response().expect_bare_problem(408, "request-timeout");
    // A call may say no more before its upstream has answered: a library must not send it again by itself.
    let mut client = Client::connect(gate.address);
    client.send(
        "POST /pay.Payments/Charge HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc\r\nTE: trailers\r\n\
         Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
    );
    let response = client.response();
    assert_eq!(response.get("grpc-status").as_deref(), Some("4"), "{}", response.show());
    assert_eq!(response.get("grpc-retry-pushback-ms").as_deref(), Some("-1"), "{}", response.show());
    signal.open();
}
