//! More connections and more requests than the gate may have: it says so, and goes on when there is room.

use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::support::{Client, Gate, Reply, Request, Signal, Upstream, eventually};

/// Connections that are open and have had an answer.
fn connected(gate: &Gate, count: usize) -> Vec<Client> {
    let connect = |_| {
        let mut client = Client::connect(gate.address);
        client.send(Request::get("/").bytes());
        assert_eq!(client.response().status, 200);
        client
    };
    (0..count).map(connect).collect()
}

fn exceeded(gate: &Gate, limit: &str) -> f64 {
    gate.metric("oncegate_limit_exceeded_total", &[&format!("limit=\"{limit}\"")])
}

#[test]
fn a_connection_too_many_is_told_so_and_finds_a_place_when_one_is_free() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    let other = if has_ipv6 { "[::1]" } else { "127.77.0.1" };
    let two = &format!("listen = [\"127.0.0.1:0\", \"{other}:0\"]");
    let gate = Gate::before(&upstream).server(two).top("[limits]\nmax_connections = 3").start();
    let mut clients = connected(&gate, 3);
    assert_eq!(gate.metric("oncegate_connections", &[]), 3.0);
    let mut late = Client::connect(gate.address);
    late.send(Request::post("/x").key("k").body("{}").bytes());
    let refused = late.response();
    refused.expect_bare_problem(503, "overloaded");
    assert_eq!(refused.get("connection").as_deref(), Some("close"));
    assert!(late.wire.is_closed_within(Duration::from_secs(5)));
    assert_eq!(exceeded(&gate, "max_connections"), 1.0);
    // Those who have a place are served on.
    clients[1].send(Request::get("/").bytes());
    assert_eq!(clients[1].response().status, 200);
    drop(clients.pop());
    eventually("a place", || (gate.metric("oncegate_connections", &[]) == 2.0).then_some(()));
    Request::post("/x").key("k").body("{}").send(&gate).expect(200, "executed");
}

#[test]
fn a_reload_changes_the_limits_and_counts_on() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.clone().top("[limits]\nmax_connections = 3").start();
    let mut clients = connected(&gate, 2);
    let reloaded = |most: usize, status: u16| {
        plan.clone().top(&format!("[limits]\nmax_connections = {most}")).config();
        gate.sighup();
        let what = format!("{status} with {most} connections");
        eventually(&what, || (Request::get("/").send(&gate).status == status).then_some(()));
    };
    reloaded(2, 503);
    reloaded(4, 200);
    // Fewer than there are: they stay, and no other comes.
    reloaded(1, 503);
    for client in &mut clients {
        client.send(Request::get("/").bytes());
        assert_eq!(client.response().status, 200);
    }
    drop(clients);
    eventually("a place", || (gate.metric("oncegate_connections", &[]) == 0.0).then_some(()));
    assert_eq!(Request::get("/").send(&gate).status, 200);
}

/// Who is refused and stays takes neither a place nor, for long, a turn to be told.
#[test]
fn a_crowd_at_the_door_takes_nothing() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).top("[limits]\nmax_connections = 1").start();
    let inside = connected(&gate, 1);
    let crowd: Vec<Client> = (0..200).map(|_| Client::connect(gate.address)).collect();
    eventually("a crowd that was turned away", || (exceeded(&gate, "max_connections") >= 200.0).then_some(()));
    let files = || std::fs::read_dir(format!("/proc/{}/fd", gate.pid())).unwrap().count();
    eventually("files that are closed", || (files() < 64).then_some(()));
    assert_eq!(gate.metric("oncegate_connections", &[]), 1.0);
    drop(inside);
    eventually("a place", || (gate.metric("oncegate_connections", &[]) == 0.0).then_some(()));
    assert_eq!(Request::get("/").send(&gate).status, 200);
    drop(crowd);
}

#[test]
fn an_address_has_its_part_of_the_connections() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).top("[limits]\nmax_connections_per_address = 2").start();
    let clients = connected(&gate, 2);
    let refused = Request::get("/").send(&gate);
    refused.expect_bare_problem(429, "quota-exceeded");
    assert_eq!(refused.retry_after(), 1);
    assert_eq!(exceeded(&gate, "max_connections_per_address"), 1.0);
    drop(clients);
    eventually("a place", || (gate.metric("oncegate_connections", &[]) == 0.0).then_some(()));
    assert_eq!(Request::get("/").send(&gate).status, 200);
}

/// An upgraded connection outlives what served it, and keeps its place.
#[test]
fn an_upgraded_connection_keeps_its_place() {
    let upstream = Upstream::scripted(|connection| {
        connection.next_head();
        connection.wire.send(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").unwrap();
        connection.wire.rest();
    });
    let gate = Gate::before(&upstream).top("[limits]\nmax_connections = 1").start();
    let mut upgraded = Client::connect(gate.address);
    let request = Request::get("/").header("Connection", "upgrade").header("Upgrade", "websocket");
    upgraded.send(request.bytes());
    assert_eq!(upgraded.response().status, 101);
    Request::get("/").send(&gate).expect_bare_problem(503, "overloaded");
    drop(upgraded);
    eventually("a place", || (gate.metric("oncegate_connections", &[]) == 0.0).then_some(()));
}

#[test]
fn no_files_left_is_no_reason_to_spin_or_to_end() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    assert_eq!(Request::get("/").send(&gate).status, 200);
    let pid = Pid::from_raw(i32::try_from(gate.pid()).unwrap());
    let few = std::fs::read_dir(format!("/proc/{}/fd", gate.pid())).unwrap().count() as u64 + 8;
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(few), maximum: Some(few) }).unwrap();
    let crowd: Vec<Client> = (0..40).map(|_| Client::connect(gate.address)).collect();
    eventually("a gate that is short of files", || gate.log().contains("accepting a connection failed").then_some(()));
    let before = processor_time(&gate);
    std::thread::sleep(Duration::from_secs(1));
    let busy = processor_time(&gate) - before;
    assert!(busy < 50, "{busy} hundredths of a second of processor time in a second of waiting");
    drop(crowd);
    eventually("an answer", || (Request::get("/").try_send(gate.address)?.status == 200).then_some(()));
}

/// In hundredths of a second.
fn processor_time(gate: &Gate) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", gate.pid())).unwrap();
    let fields = stat.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2);
    fields.map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn a_request_too_many_is_not_sent() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).top("[limits]\nmax_requests = 2").start();
    let first = Request::post("/x").key("k-1").body("{}");
    std::thread::scope(|scope| {
        let protected = scope.spawn(|| first.send(&gate));
        let plain = scope.spawn(|| Request::get("/").send(&gate));
        upstream.wait_for_runs(2);
        assert_eq!(gate.metric("oncegate_requests_in_flight", &[]), 2.0);
        // With a key, without one, and where nobody protects anything.
        Request::post("/x").key("k-2").body("{}").send(&gate).expect_problem(503, "overloaded");
        first.send(&gate).expect_problem(503, "overloaded");
        Request::post("/x").body("{}").send(&gate).expect_bare_problem(503, "overloaded");
        Request::get("/").send(&gate).expect_bare_problem(503, "overloaded");
        assert_eq!(exceeded(&gate, "max_requests"), 4.0);
        assert_eq!(upstream.runs(), 2);
        assert!(gate.states("k-2").is_empty());
        signal.open();
        protected.join().unwrap().expect(200, "executed");
        assert_eq!(plain.join().unwrap().status, 200);
    });
    eventually("nothing to do", || (gate.metric("oncegate_requests_in_flight", &[]) == 0.0).then_some(()));
    Request::post("/x").key("k-2").body("{}").send(&gate).expect(200, "executed");
}

/// An attempt whose client has gone is work like any other.
#[test]
fn a_request_goes_on_after_its_client_and_an_answer_until_it_is_read() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key() {
        Some(_) => Reply::ok("x").hold_until(&held),
        None => Reply::ok(vec![b'x'; 32 << 20]),
    });
    let gate = Gate::before(&upstream).top("[limits]\nmax_requests = 1").start();
    let mut gone = Client::connect(gate.address);
    gone.send(Request::post("/x").key("k").body("{}").bytes());
    upstream.wait_for_runs(1);
    drop(gone);
    Request::get("/").send(&gate).expect_bare_problem(503, "overloaded");
    signal.open();
    eventually("nothing to do", || (gate.metric("oncegate_requests_in_flight", &[]) == 0.0).then_some(()));
    let mut slow = Client::connect(gate.address);
    slow.send(Request::get("/").bytes());
    assert!(slow.head().has("content-length"));
    Request::get("/").send(&gate).expect_bare_problem(503, "overloaded");
    drop(slow);
    eventually("nothing to do", || (gate.metric("oncegate_requests_in_flight", &[]) == 0.0).then_some(()));
}

#[test]
fn those_who_wait_are_few_enough() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let plan = Gate::before(&upstream).defaults("in_flight = { wait = \"25s\" }");
    let gate = plan.top("[limits]\nmax_waiting = 1").start();
    let request = Request::post("/x").key("k").body("{}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| request.send(&gate));
        upstream.wait_for_runs(1);
        let second = scope.spawn(|| request.send(&gate));
        gate.wait_for_waiting(1);
        request.send(&gate).expect_problem(409, "in-flight");
        assert_eq!(exceeded(&gate, "max_waiting"), 1.0);
        signal.open();
        first.join().unwrap().expect(200, "executed");
        second.join().unwrap().expect(200, "replayed");
    });
    eventually("nobody who waits", || (gate.metric("oncegate_requests_waiting", &[]) == 0.0).then_some(()));
}
