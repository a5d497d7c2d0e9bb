//! Starting, stopping, and what a start refuses.

use std::time::{Duration, Instant};

use crate::support::{Awake, Client, Gate, Reply, Request, Signal, Upstream, eventually};

#[test]
fn sigterm_finishes_attempts_and_takes_no_new_ones() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("201 Created", "late").hold_until(&held));
    let mut gate = Gate::before(&upstream).start();
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    upstream.wait_for_runs(1);
    gate.sigterm();
    eventually("unready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    assert_eq!(gate.admin("GET", "/livez", None).status, 200);
    eventually("no new connections", || {
        std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err().then_some(())
    });
    assert!(gate.is_running(), "it left its attempt alone");
    signal.open();
    first.join().unwrap().expect(201, "executed");
    let status = gate.wait();
    assert!(status.success(), "{status}");
    let gate = gate.plan.clone().start();
    gate.post("/charges", "k-1", "{}").expect(201, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn sigterm_with_nothing_to_do_ends_at_once() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    // Connections that are idle, to the gate and behind it, hold nothing up.
    let mut idle = Client::connect(gate.address);
    idle.send(Request::post("/charges").key("k-1").body("{}").bytes());
    idle.response().expect(200, "executed");
    let _silent = Client::connect(gate.address);
    let start = Awake::start();
    gate.stop();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Connections are not what the gate waits for then.
#[test]
fn a_second_sigterm_gives_up_an_attempt_that_no_client_waits_for() {
    let never = Signal::new();
    let held = never.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let mut gate = Gate::before(&upstream).server("drain_timeout = \"1h\"").start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/charges").key("k-1").body("{}").bytes());
    upstream.wait_for_runs(1);
    drop(client);
    eventually("the client is gone", || {
        (gate.metric("oncegate_clients_gone_total", &["route=\"all\""]) == 1.0).then_some(())
    });
    gate.sigterm();
    eventually("the drain", || gate.log().contains("draining: no new connections").then_some(()));
    // Sooner, it would be the same instruction.
    std::thread::sleep(Duration::from_millis(100));
    assert!(gate.is_running(), "it left its attempt alone");
    gate.sigterm();
    let start = Awake::start();
    assert!(gate.wait().success());
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert!(gate.log().contains("stop signal during the drain"), "{}", gate.log());
    never.open();
    let gate = gate.plan.clone().start();
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
}

#[test]
fn what_cannot_finish_is_settled_as_unknown() {
    let never = Signal::new();
    let held = never.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).server("drain_timeout = \"500ms\"").start();
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").try_send(address));
    upstream.wait_for_runs(1);
    let start = Awake::start();
    let plan = gate.stop();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    if let Some(response) = first.join().unwrap() {
        assert!(response.status >= 500 || response.status == 409, "{}", response.show());
    }
    let gate = plan.start();
    assert_eq!(gate.states("k-1"), ["unknown"]);
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    never.open();
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn other_identity_rules_are_refused_while_records_live() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let changed = plan.clone().defaults("scope = [\"header:X-Tenant?\"]");
    let mut refused = changed.spawn();
    let status = refused.wait();
    assert!(!status.success(), "{status}");
    let log = refused.log();
    assert!(log.contains("--accept-identity-change") && log.contains("namespace `all`: scope: was "), "{log}");
    // Refusing changed nothing.
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    gate.stop();
    let gate = changed.clone().arg("--accept-identity-change").start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    // Accepted once, it is the rule.
    let gate = changed.start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn another_service_name_is_refused_while_records_live() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let renamed = plan.clone().store("service = \"billing\"");
    let mut refused = renamed.spawn();
    let status = refused.wait();
    assert!(!status.success(), "{status}");
    let log = refused.log();
    assert!(log.contains("the service `default` is gone: this configuration has `billing`"), "{log}");
    assert!(log.contains("1 live key: 1 of route `all`"), "{log}");
    renamed.clone().arg("--accept-identity-change").start().stop();
    renamed.start().stop();
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn other_identity_rules_are_fine_where_no_record_lives() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    plan.start().stop();
    plan.clone().defaults("scope = [\"header:X-Tenant?\"]").start().stop();
    // What does not make identities may change at any time.
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let gate = plan.clone().defaults("ttl = \"7d\"\nlease = \"10s\"\nunknown_ttl = \"60d\"").start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

#[test]
fn a_second_process_on_one_store_serves_nothing_until_the_first_has_gone() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let first = Gate::before(&upstream).start();
    first.post("/charges", "k-1", "{}").expect(200, "executed");
    let mut second = first.plan.spawn();
    // It waits: alive, and not ready.
    let admin = second.address("admin listening").expect("it waits");
    eventually("unready", || (Request::get("/readyz").send(admin).status == 503).then_some(()));
    assert_eq!(Request::get("/livez").send(admin).status, 200);
    assert!(second.is_running());
    assert!(!second.log().contains("\"listening\""), "it serves a store that is another's");
    first.post("/charges", "k-1", "{}").expect(200, "replayed");
    first.kill9();
    let address = second.address("listening").expect("it takes over");
    Request::post("/charges").key("k-1").body("{}").send(address).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_store_in_memory_is_a_gate_too() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).store_url("memory:").start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    let gate = gate.stop().start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
}

#[test]
fn a_file_that_is_no_store_is_left_alone() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let content = "This is somebody's diary.\n".repeat(100);
    std::fs::write(plan.path("gate.db"), &content).unwrap();
    let mut process = plan.spawn();
    assert!(!process.wait().success(), "{}", process.log());
    assert_eq!(std::fs::read_to_string(plan.path("gate.db")).unwrap(), content);
}

#[test]
fn a_store_that_is_taken_away_ends_the_process() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let mut gate = plan.start();
    gate.post("/orders", "k-1", "{}").expect(200, "executed");
    std::fs::remove_file(plan.path("gate.db")).unwrap();
    assert!(!gate.wait().success(), "{}", gate.log());
    assert!(gate.log().contains("removed or replaced"), "{}", gate.log());
}

#[test]
fn a_wrong_configuration_ends_with_78_and_every_problem() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let mut process = Gate::before(&upstream).defaults("ttl = \"0s\"\nlease = \"1ms\"\nodd = 1").spawn();
    assert_eq!(process.wait().code(), Some(78));
    let log = process.log();
    for word in ["ttl", "lease", "odd", "oncegate.toml"] {
        assert!(log.contains(word), "{word} is missing: {log}");
    }
}

#[test]
fn an_address_that_is_taken_is_said() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let mut process = Gate::before(&upstream).server(&format!("listen = \"{address}\"")).spawn();
    let status = process.wait();
    assert_eq!(status.code(), Some(1), "{}", process.log());
    assert!(process.log().contains(&address.to_string()), "{}", process.log());
}

#[test]
fn connections_are_closed_in_an_orderly_way_while_draining() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/charges").key("k-1").body("{}").bytes());
    upstream.wait_for_runs(1);
    gate.sigterm();
    eventually("unready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    signal.open();
    let response = client.response();
    response.expect(200, "executed");
    assert!(client.wire.is_closed_within(Duration::from_secs(10)));
}

/// As those of attempts: a client that gets no answer may send the request again by itself.
#[test]
fn a_forward_without_an_answer_at_the_end_of_a_drain_has_a_problem() {
    let never = Signal::new();
    let held = never.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).server("drain_timeout = \"300ms\"").start();
    let address = gate.address;
    let client = std::thread::spawn(move || Request::post("/elsewhere").body("{}").send(address));
    upstream.wait_for_runs(1);
    gate.stop();
    let answer = client.join().unwrap();
    assert_eq!((answer.status, &answer.json()["code"]), (504, &"upstream-timeout".into()), "{}", answer.show());
    never.open();
}

#[test]
fn a_drain_waits_for_upgraded_connections_as_long_as_it_may() {
    let upstream = Upstream::scripted(|conn| {
        let Some(_) = conn.next_head() else { return };
        let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello ";
        drop(conn.wire.send(answer));
        while conn.wire.some().is_ok_and(|bytes| !bytes.is_empty() && conn.wire.send(b"WORD").is_ok()) {}
    });
    for (patience, lasts) in [("30s", true), ("300ms", false)] {
        let mut gate = Gate::before(&upstream).server(&format!("drain_timeout = \"{patience}\"")).start();
        let mut client = Client::connect(gate.address);
        client.send("GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
        assert!(client.head().start.starts_with(b"HTTP/1.1 101"));
        assert_eq!(client.wire.until(b"hello ").unwrap(), b"hello ");
        let began = Instant::now();
        gate.sigterm();
        eventually("the drain", || gate.log().contains("draining: no new connections").then_some(()));
        if lasts {
            client.send("word");
            assert_eq!(client.wire.until(b"WORD").unwrap(), b"WORD");
            drop(client);
        }
        assert!(gate.wait().success(), "{}", gate.log());
        assert!(lasts || began.elapsed() >= Duration::from_millis(300), "it was cut off at once");
    }
}

/// What has begun to be answered, and what never ends, does not hold up the end.
#[test]
fn a_drain_that_is_over_waits_for_no_stream() {
    let never = Signal::new();
    let held = never.clone();
    let upstream = Upstream::start(move |_| {
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf").pause_until(&held).then("whole")
    });
    let gate = Gate::before(&upstream).server("drain_timeout = \"200ms\"").start();
    // One that owes an answer, whose client has yet to send half of its request.
    let mut slow = Client::connect(gate.address);
    slow.send(Request::post("/charges").key("k-1").header("Content-Length", "10").bytes()).send("half");
    let mut client = Client::connect(gate.address);
    client.send(Request::get("/stream").bytes());
    assert_eq!(client.wire.until(b"half").map(|bytes| bytes.ends_with(b"half")).ok(), Some(true));
    let began = Awake::start();
    gate.stop();
    assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
    never.open();
}

/// Nothing of it was sent: it may be sent again.
#[test]
fn a_request_whose_body_is_on_its_way_when_the_drain_is_over_gets_an_answer() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    for key in [None, Some("k-1")] {
        let gate = Gate::before(&upstream).server("drain_timeout = \"200ms\"").start();
        let mut client = Client::connect(gate.address);
        let request = Request::post("/charges").header("Content-Length", "10");
        let request = key.into_iter().fold(request, Request::key);
        client.send(request.bytes()).send("half");
        let stopping = std::thread::spawn(move || gate.stop());
        let answer = client.response();
        assert_eq!((answer.status, &answer.json()["code"]), (502, &"upstream-unreachable".into()), "{}", answer.show());
        stopping.join().unwrap();
    }
    assert_eq!(upstream.runs(), 0);
}

/// A core file would have what the process replays from its memory.
#[test]
fn a_process_writes_no_core_file() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", gate.pid())).expect("a running process");
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).expect("a limit");
    assert_eq!(core.split_whitespace().next(), Some("0"), "{limits}");
}
