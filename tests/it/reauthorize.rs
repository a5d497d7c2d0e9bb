//! `reauthorize`: the upstream says before each replay whether the caller may still have it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::scope;
use std::time::Duration;

use crate::support::gate::Plan;
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream, eventually};

/// An upstream whose `/whoami` says what `whoami` does of the how-manieth question it is, and how often that was asked.
fn upstream(whoami: impl Fn(usize) -> Reply + Send + Sync + 'static) -> (Upstream, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let upstream = Upstream::start(move |request| {
        if request.start_line().starts_with("GET ") {
            assert_eq!(request.start_line(), "GET /whoami?all=1 HTTP/1.1");
            return whoami(count.fetch_add(1, Ordering::SeqCst) + 1);
        }
        Reply::ok("the account of ann")
    });
    (upstream, asked)
}

fn asking(upstream: &Upstream, more: &str) -> Plan {
    Gate::before(upstream).defaults(&format!("reauthorize = \"/whoami?all=1\"\nscope = [\"const:all\"]\n{more}"))
}

/// With a header that tells it from the tries before, so that it asks a question of its own.
fn charge(key: &str, nth: usize) -> Request {
    Request::post("/charges").key(key).header("Authorization", "Bearer ann").header("X-Try", nth.to_string()).body("{}")
}

fn expect_nothing_of_the_answer(response: &Response) {
    let show = response.show();
    assert!(!show.contains("account") && !show.contains("idempotent-replayed"), "{show}");
}

/// A replay from memory is asked about like one from the store.
#[test]
fn a_client_waits_for_the_question_no_longer_than_for_an_answer() {
    let asks = Signal::new();
    let hold = asks.clone();
    let (upstream, _) = upstream(move |_| Reply::status("204 No Content", "").hold_until(&hold));
    let mut gate = asking(&upstream, "").upstream("client_timeout = \"3s\"").start();
    charge("k-1", 0).send(&gate).expect(200, "executed");
    for nth in 1..3 {
        charge("k-1", nth).send(&gate).expect_problem(504, "still-running");
        gate = gate.kill9().start();
    }
    asks.open();
    charge("k-1", 3).send(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs_of("k-1"), 1);
}

#[test]
fn a_caller_that_lost_its_right_gets_no_replay() {
    let (upstream, asked) = upstream(|nth| match nth {
        1 => Reply::raw("HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Length: 5\r\n\r\nlogin"),
        2 => Reply::status("403 Forbidden", "gone"),
        3 => Reply::status("404 Not Found", "nobody"),
        4 => Reply::status("500 Oops", "oops"),
        5 => Reply::status("302 Found", ""),
        6 => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::status("204 No Content", ""),
    });
    let mut gate = asking(&upstream, "").start();
    // From the memory of the gate, and from the store.
    for is_restarted in [false, true] {
        asked.store(0, Ordering::SeqCst);
        if is_restarted {
            gate = gate.kill9().start();
        } else {
            charge("k-1", 0).send(&gate).expect(200, "executed");
            assert_eq!(asked.load(Ordering::SeqCst), 0, "never before a first run");
        }
        let runs = |upstream: &Upstream| upstream.runs_of("k-1");
        for (nth, status, body) in [(1, 401, "login"), (2, 403, "gone"), (3, 404, "nobody")] {
            let refused = charge("k-1", nth).send(&gate);
            refused.expect(status, "refused");
            assert_eq!(refused.text(), body);
            assert_eq!(refused.get("www-authenticate").as_deref(), (nth == 1).then_some("Bearer"));
            expect_nothing_of_the_answer(&refused);
        }
        for nth in 4..7 {
            let unclear = charge("k-1", nth).send(&gate);
            unclear.expect_problem(502, "upstream-unreachable");
            assert_eq!((unclear.json()["retryable"].as_bool(), unclear.retry_after() >= 1), (Some(true), true));
            expect_nothing_of_the_answer(&unclear);
        }
        charge("k-1", 7).send(&gate).expect(200, "replayed");
        assert_eq!((asked.load(Ordering::SeqCst), runs(&upstream)), (7, 1));
    }
    // Another request under the key is told that before anything is asked.
    charge("k-1", 8).body("{\"other\":1}").send(&gate).expect_problem(422, "key-reused");
    assert_eq!(asked.load(Ordering::SeqCst), 7);
}

#[test]
fn the_question_has_the_retrys_own_headers() {
    let (upstream, _) = upstream(|_| Reply::status("204 No Content", ""));
    let gate = asking(&upstream, "").start();
    let json = |nth: usize| charge("k-1", nth).header("Content-Type", "application/json");
    json(0).send(&gate).expect(200, "executed");
    let retry = json(1).header("Cookie", "a=1");
    retry
        .header("If-Match", "x")
        .header("Connection", "x-hop")
        .header("X-Hop", "1")
        .send(&gate)
        .expect(200, "replayed");
    let question = upstream.last();
    assert_eq!(question.head.get("authorization").as_deref(), Some("Bearer ann"));
    assert_eq!(question.head.get("cookie").as_deref(), Some("a=1"));
    for absent in ["idempotency-key", "content-type", "content-length", "if-match", "x-hop", "idempotency-attempt"] {
        assert_eq!(question.head.get(absent), None, "{absent}");
    }
}

#[test]
fn equal_retries_share_a_question() {
    let signal = Signal::new();
    let held = signal.clone();
    let (upstream, asked) = upstream(move |_| Reply::status("204 No Content", "").hold_until(&held));
    let gate = asking(&upstream, "").start();
    charge("k-1", 0).send(&gate).expect(200, "executed");
    scope(|scope| {
        let retries: Vec<_> = (0..8).map(|_| scope.spawn(|| charge("k-1", 1).send(&gate))).collect();
        while asked.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Another caller asks for itself.
        let other = scope.spawn(|| charge("k-1", 1).header("Cookie", "session=bob").send(&gate));
        while asked.load(Ordering::SeqCst) < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // One that comes later than a second after the answer would ask again.
        eventually("all are there", || (gate.metric("oncegate_requests_in_flight", &[]) == 9.0).then_some(()));
        signal.open();
        for retry in retries.into_iter().chain([other]) {
            retry.join().unwrap().expect(200, "replayed");
        }
    });
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    std::thread::sleep(Duration::from_millis(1100));
    charge("k-1", 1).send(&gate).expect(200, "replayed");
    assert_eq!(asked.load(Ordering::SeqCst), 3, "what was said is good for a second");
}

#[test]
fn those_that_waited_are_asked_about_too() {
    for (status, word) in [("200 OK", "executed"), ("503 Busy", "released")] {
        let (asked, signal) = (Arc::new(AtomicUsize::new(0)), Signal::new());
        let (count, held) = (Arc::clone(&asked), signal.clone());
        let upstream = Upstream::start(move |request| {
            if request.start_line().starts_with("GET ") {
                count.fetch_add(1, Ordering::SeqCst);
                return Reply::status("403 Forbidden", "no");
            }
            Reply::status(status, "the account of ann").hold_until(&held)
        });
        let gate = asking(&upstream, "in_flight = { wait = \"60s\" }").start();
        scope(|scope| {
            let first = scope.spawn(|| charge("k-1", 0).send(&gate));
            upstream.wait_for_runs(1);
            let second = scope.spawn(|| charge("k-1", 1).send(&gate));
            gate.wait_for_waiting(1);
            signal.open();
            assert_eq!(first.join().unwrap().word(), word);
            let refused = second.join().unwrap();
            refused.expect(403, "refused");
            expect_nothing_of_the_answer(&refused);
        });
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn an_answer_that_was_not_kept_is_asked_about_too() {
    let (upstream, asked) = upstream(|nth| Reply::status(if nth == 1 { "403 Forbidden" } else { "200 OK" }, ""));
    let gate = asking(&upstream, "max_response_body = 1").start();
    charge("k-1", 0).send(&gate).expect(200, "executed");
    charge("k-1", 1).send(&gate).expect(403, "refused");
    charge("k-1", 2).send(&gate).expect_problem(409, "response-not-stored");
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[test]
fn an_upstream_that_is_away_or_silent() {
    let (upstream, asked) = upstream(|_| Reply::nothing());
    let plan = asking(&upstream, "").upstream("timeout = \"3s\"");
    let gate = plan.start();
    charge("k-1", 0).send(&gate).expect(200, "executed");
    charge("k-1", 1).send(&gate).expect_problem(502, "upstream-unreachable");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    drop(upstream);
    charge("k-1", 2).send(&gate).expect_problem(502, "upstream-unreachable");
    assert_eq!(gate.states("k-1"), ["completed"]);
}
