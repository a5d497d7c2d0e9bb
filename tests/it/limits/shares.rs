//! A client that takes all that it can of each limit, and another that is not refused for it.

use super::noise;
use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually};

const LOUD: &str = "192.0.2.1";
const QUIET: &str = "198.51.100.1";

/// The clients are where a trusted proxy says.
fn behind_a_proxy(upstream: &Upstream, limits: &str) -> Plan {
    Gate::before(upstream).server("trusted_proxies = [\"127.0.0.1\"]").top(&format!("[limits]\n{limits}"))
}

fn from(address: &str, key: &str) -> Request {
    Request::post("/x").header("X-Forwarded-For", address).key(key).body("{}")
}

/// One of the loud client's requests: each has another credential.
fn loud(nth: usize) -> Request {
    from(LOUD, &format!("loud-{nth}")).header("Authorization", format!("Bearer invented-{nth}"))
}

fn exceeded(gate: &Gate, limit: &str) -> f64 {
    gate.metric("oncegate_limit_exceeded_total", &[&format!("limit=\"{limit}\"")])
}

fn begin(gate: &Gate, request: &Request) -> Client {
    let mut client = Client::connect(gate.address);
    client.send(request.bytes());
    client
}

fn all_run(clients: Vec<Client>) {
    for mut client in clients {
        client.response().expect(200, "executed");
    }
}

/// Answers the quiet client at once, and others at the signal.
fn held_for_the_loud(signal: &Signal) -> Upstream {
    let held = signal.clone();
    Upstream::start(move |request| match request.key() {
        Some(key) if key.starts_with("loud") => Reply::ok("loud").hold_until(&held),
        _ => Reply::ok("quiet"),
    })
}

#[test]
fn requests_in_flight() {
    let signal = Signal::new();
    let upstream = held_for_the_loud(&signal);
    let gate = behind_a_proxy(&upstream, "max_requests = 16").start();
    let held: Vec<Client> = (0..14).map(|nth| begin(&gate, &loud(nth))).collect();
    upstream.wait_for_runs(14);
    loud(14).send(&gate).expect_problem(503, "overloaded");
    assert_eq!((exceeded(&gate, "max_requests"), exceeded(&gate, "fair_share")), (1.0, 1.0));
    eventually("a warning", || gate.log().contains("one client holds its share").then_some(()));
    for nth in 0..20 {
        from(QUIET, &format!("quiet-{nth}")).send(&gate).expect(200, "executed");
        Request::get("/").header("X-Forwarded-For", QUIET).send(&gate);
    }
    assert_eq!(exceeded(&gate, "max_requests"), 1.0);
    signal.open();
    all_run(held);
    loud(14).send(&gate).expect(200, "executed");
    eventually("nothing to do", || (gate.metric("oncegate_requests_in_flight", &[]) == 0.0).then_some(()));
}

#[test]
fn requests_that_wait() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let plan = behind_a_proxy(&upstream, "max_waiting = 16").defaults("in_flight = { wait = \"25s\" }");
    let gate = plan.start();
    let mut clients = vec![begin(&gate, &from(LOUD, "loud")), begin(&gate, &from(QUIET, "quiet"))];
    upstream.wait_for_runs(2);
    for nth in 1..=14 {
        clients.push(begin(&gate, &from(LOUD, "loud")));
        gate.wait_for_waiting(nth);
    }
    from(LOUD, "loud").send(&gate).expect_problem(409, "in-flight");
    clients.push(begin(&gate, &from(QUIET, "quiet")));
    gate.wait_for_waiting(15);
    assert_eq!((exceeded(&gate, "max_waiting"), exceeded(&gate, "fair_share")), (1.0, 1.0));
    signal.open();
    for client in &mut clients {
        assert_eq!(client.response().status, 200);
    }
    eventually("nobody who waits", || (gate.metric("oncegate_requests_waiting", &[]) == 0.0).then_some(()));
}

#[test]
fn connections_to_the_upstream() {
    let signal = Signal::new();
    let upstream = held_for_the_loud(&signal);
    let plan = behind_a_proxy(&upstream, "").upstream("max_connections = 16, connect_timeout = \"10s\"");
    let gate = plan.start();
    let held: Vec<Client> = (0..14).map(|nth| begin(&gate, &loud(nth))).collect();
    upstream.wait_for_runs(14);
    // More wait than there would be connections.
    let waiting: Vec<Client> = (14..34).map(|nth| begin(&gate, &loud(nth))).collect();
    eventually("requests that wait", || (gate.metric("oncegate_requests_in_flight", &[]) == 34.0).then_some(()));
    for nth in 0..20 {
        from(QUIET, &format!("quiet-{nth}")).send(&gate).expect(200, "executed");
        assert_eq!(Request::get("/").header("X-Forwarded-For", QUIET).send(&gate).status, 200);
    }
    // None of its own turns ends: what waits is refused in time. What had no turn by then gets one.
    eventually("refusals", || (exceeded(&gate, "fair_share") > 0.0).then_some(()));
    signal.open();
    let answers: Vec<_> = waiting.into_iter().map(|mut client| client.response()).collect();
    let refused = answers.iter().filter(|answer| answer.status == 503).count() as f64;
    assert!(answers.iter().all(|answer| [200, 503].contains(&answer.status)));
    assert_eq!((exceeded(&gate, "upstream_max_connections"), exceeded(&gate, "fair_share")), (refused, refused));
    all_run(held);
    loud(34).send(&gate).expect(200, "executed");
}

/// What waits for its client's own turns gets them.
#[test]
fn one_client_alone_waits_for_its_turn() {
    let signal = Signal::new();
    let upstream = held_for_the_loud(&signal);
    let gate = behind_a_proxy(&upstream, "").upstream("max_connections = 16, connect_timeout = \"20s\"").start();
    let clients: Vec<Client> = (0..60).map(|nth| begin(&gate, &loud(nth))).collect();
    upstream.wait_for_runs(14);
    eventually("requests that wait", || (gate.metric("oncegate_requests_in_flight", &[]) == 60.0).then_some(()));
    // Two threads may take the last turn of a share at once. Something is left for others all the same.
    assert!((14..16).contains(&upstream.runs()), "{}", upstream.runs());
    signal.open();
    all_run(clients);
    assert_eq!(exceeded(&gate, "upstream_max_connections"), 0.0);
}

/// The answer of the quiet client is kept although others wait to be whole.
#[test]
fn memory_of_answers() {
    const SIZE: usize = 300_000;
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
        let bytes = noise(SIZE);
        match request.key() {
            Some(key) if key.starts_with("loud") => {
                Reply::raw(head).then(&bytes[..SIZE - 1]).pause_until(&held).then(&bytes[SIZE - 1..])
            }
            _ => Reply::raw(head).then(&bytes[..]),
        }
    });
    let gate = behind_a_proxy(&upstream, "max_buffered_memory = \"8MiB\"").start();
    let clients: Vec<Client> = (0..40).map(|nth| begin(&gate, &loud(nth))).collect();
    let refused = || exceeded(&gate, "fair_share");
    eventually("answers without room", || (refused() >= 20.0).then_some(()));
    let quiet = from(QUIET, "quiet").send(&gate);
    quiet.expect(200, "executed");
    from(QUIET, "quiet").send(&gate).expect_repeated_by(&quiet);
    signal.open();
    all_run(clients);
}

#[test]
fn disk_of_request_bodies() {
    const SIZE: usize = 1 << 20;
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = behind_a_proxy(&upstream, "max_buffered_disk = \"8MiB\"").start();
    let body = noise(SIZE);
    // All of each but the last byte.
    let begun: Vec<Client> = (0..20)
        .map(|nth| {
            let request = loud(nth).body(body.clone()).bytes();
            let mut client = Client::connect(gate.address);
            // The gate may stop reading before everything is sent.
            drop(client.wire.send(&request[..request.len() - 1]));
            client
        })
        .collect();
    eventually("bodies without room", || (exceeded(&gate, "fair_share") >= 6.0).then_some(()));
    from(QUIET, "quiet").body(noise(SIZE / 2)).send(&gate).expect(200, "executed");
    // Some may still come meanwhile, between the one look and the other.
    eventually("each refusal counts under both limits", || {
        (exceeded(&gate, "max_buffered_disk") == exceeded(&gate, "fair_share")).then_some(())
    });
    drop(begun);
}

#[test]
fn connections() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = "trusted_proxies = [\"127.0.0.1\"]\nproxy_protocol = true";
    let gate = Gate::before(&upstream).server(lines).top("[limits]\nmax_connections = 16").start();
    let connect = |address: &str| {
        let mut client = Client::connect(gate.address);
        client.send(format!("PROXY TCP4 {address} 192.0.2.254 40000 80\r\n").as_bytes());
        client.send(Request::get("/").bytes());
        client
    };
    let mut held: Vec<Client> = (0..14).map(|_| connect(LOUD)).collect();
    held.iter_mut().for_each(|client| assert_eq!(client.response().status, 200));
    assert!(connect(LOUD).wire.is_closed_within(std::time::Duration::from_secs(20)));
    assert_eq!((exceeded(&gate, "max_connections"), exceeded(&gate, "fair_share")), (1.0, 1.0));
    assert_eq!(connect(QUIET).response().status, 200);
    drop(held);
    eventually("no connections", || (gate.metric("oncegate_connections", &[]) == 0.0).then_some(()));
    assert_eq!(connect(LOUD).response().status, 200);
}
