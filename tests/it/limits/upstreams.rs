//! More requests at a time than there may be connections to the upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

fn exceeded(gate: &Gate) -> f64 {
    gate.metric("oncegate_limit_exceeded_total", &["limit=\"upstream_max_connections\""])
}

#[test]
fn a_request_without_a_connection_is_not_sent_and_its_key_is_free() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).upstream("max_connections = 2, connect_timeout = \"1500ms\"").start();
    let request = |nth: usize| Request::post("/x").key(&format!("k-{nth}")).body("{}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| request(1).send(&gate));
        let second = scope.spawn(|| Request::get("/").send(&gate));
        upstream.wait_for_runs(2);
        let refused = request(3).send(&gate);
        refused.expect_problem(503, "overloaded");
        assert_eq!(refused.retry_after(), 1);
        Request::get("/").send(&gate).expect_bare_problem(503, "overloaded");
        assert!(gate.states("k-3").is_empty());
        assert_eq!((exceeded(&gate), upstream.runs()), (2.0, 2));
        signal.open();
        first.join().unwrap().expect(200, "executed");
        assert_eq!(second.join().unwrap().status, 200);
    });
    request(3).send(&gate).expect(200, "executed");
}

/// Those who wait get the connection of the one before them, on whatever thread it was opened.
#[test]
fn a_connection_goes_from_one_to_the_next() {
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (at_a_time, highest) = (Arc::clone(&now), Arc::clone(&most));
    let upstream = Upstream::start(move |_| {
        highest.fetch_max(at_a_time.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(5));
        at_a_time.fetch_sub(1, Ordering::SeqCst);
        Reply::ok("x")
    });
    let gate = Gate::before(&upstream).upstream("max_connections = 2, connect_timeout = \"20s\"").start();
    std::thread::scope(|scope| {
        for nth in 0..40 {
            let gate = &gate;
            scope.spawn(move || match nth % 2 {
                0 => drop(Request::post("/x").key(&format!("k-{nth}")).body("{}").send(gate).expect(200, "executed")),
                _ => assert_eq!(Request::get("/").send(gate).status, 200),
            });
        }
    });
    assert_eq!((upstream.runs(), exceeded(&gate)), (40, 0.0));
    assert!(most.load(Ordering::SeqCst) <= 2, "{} at a time", most.load(Ordering::SeqCst));
    assert!(upstream.connections() <= 6, "{} connections were opened", upstream.connections());
}

/// A protected attempt does not use a connection that was idle for a second, and must not wait for it either.
#[test]
fn an_idle_connection_makes_room_for_one_that_can_be_used() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).upstream("max_connections = 1, connect_timeout = \"20s\"").start();
    for nth in 0..4 {
        assert_eq!(Request::get("/").send(&gate).status, 200);
        std::thread::sleep(Duration::from_millis(1100));
        let began = std::time::Instant::now();
        // Each client connection is on a thread of its own choice.
        Request::post("/x").key(&format!("k-{nth}")).body("{}").send(&gate).expect(200, "executed");
        assert!(began.elapsed() < Duration::from_secs(15), "it waited");
    }
    assert_eq!(exceeded(&gate), 0.0);
}

/// A connection that has become something else is still one.
#[test]
fn an_upgraded_connection_keeps_its_slot() {
    let upstream = Upstream::scripted(|connection| {
        connection.next_head();
        connection.wire.send(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").unwrap();
        connection.wire.rest();
    });
    let gate = Gate::before(&upstream).upstream("max_connections = 1, connect_timeout = \"1500ms\"").start();
    let mut upgraded = crate::support::Client::connect(gate.address);
    let request = || Request::get("/").header("Connection", "upgrade").header("Upgrade", "websocket");
    upgraded.send(request().bytes());
    assert_eq!(upgraded.response().status, 101);
    request().send(&gate).expect_bare_problem(503, "overloaded");
    drop(upgraded);
    eventually("a connection", || (request().send(&gate).status == 101).then_some(()));
}
