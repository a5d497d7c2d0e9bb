//! More bytes of bodies than the gate may hold.

use super::noise;
use crate::support::{Client, Gate, Reply, Request, Signal, Upstream, eventually};

fn held(gate: &Gate, place: &str) -> f64 {
    gate.metric("oncegate_buffered_bytes", &[&format!("where=\"{place}\"")])
}

fn exceeded(gate: &Gate, limit: &str) -> f64 {
    gate.metric("oncegate_limit_exceeded_total", &[&format!("limit=\"{limit}\"")])
}

#[track_caller]
fn nothing_is_held(gate: &Gate) {
    eventually("nothing that is held", || (held(gate, "memory") == 0.0 && held(gate, "disk") == 0.0).then_some(()));
}

#[test]
fn bodies_that_find_no_room_in_memory_go_to_the_disk() {
    const SIZE: usize = 200 << 10;
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"1MiB\"").start();
    let body = noise(SIZE);
    // All of each but the last byte.
    let begun = (0..12).map(|nth| {
        let request = Request::post("/x").key(&format!("k-{nth}")).body(body.clone()).bytes();
        let mut client = Client::connect(gate.address);
        client.send(&request[..request.len() - 1]);
        client
    });
    let begun: Vec<Client> = begun.collect();
    let whole = (12 * (SIZE - 1)) as f64;
    eventually("bodies that are held", || (held(&gate, "memory") + held(&gate, "disk") >= whole).then_some(()));
    assert!(held(&gate, "memory") <= (1 << 20) as f64, "{}", held(&gate, "memory"));
    assert!(exceeded(&gate, "max_buffered_memory") > 0.0);
    for mut client in begun {
        client.send(&body[SIZE - 1..]);
        client.response().expect(200, "executed");
    }
    assert!(upstream.seen().iter().all(|request| request.body.bytes == body));
    nothing_is_held(&gate);
}

#[test]
fn a_body_that_finds_no_room_at_all_is_not_sent() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_disk = \"1MiB\"").start();
    let request = Request::post("/x").key("k").body(noise(2 << 20));
    let mut client = Client::connect(gate.address);
    // The gate may stop reading before everything is sent.
    drop(client.wire.send(&request.bytes()));
    client.response().expect_problem(503, "overloaded");
    assert_eq!((upstream.runs(), gate.states("k").len()), (0, 0));
    assert_eq!(exceeded(&gate, "max_buffered_disk"), 1.0);
    nothing_is_held(&gate);
    // One that fits does not suffer from it. One client leaves an eighth to others.
    Request::post("/x").key("k").body(noise(7 << 17)).send(&gate).expect(200, "executed");
    nothing_is_held(&gate);
}

#[test]
fn a_disk_that_takes_nothing_is_an_overload() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).env("TMPDIR", "/nowhere").start();
    let large = Request::post("/x").key("k").body(noise(1 << 20));
    large.send(&gate).expect_problem(503, "overloaded");
    assert_eq!((upstream.runs(), gate.states("k").len()), (0, 0));
    Request::post("/x").key("k").body("small").send(&gate).expect(200, "executed");
}

/// Forty answers of 15 MB took 831 MB once. These are smaller, for a busy machine to write them in time.
#[test]
fn answers_take_no_more_memory_than_there_is_for_them() {
    const SIZE: usize = 6_000_000;
    let upstream = Upstream::start(|_| Reply::ok(vec![b'x'; SIZE]));
    let gate = Gate::before(&upstream)
        .top("[limits]\nmax_buffered_memory = \"60MiB\"")
        .store("settle_timeout = \"60s\"")
        .start();
    let request = |nth| Request::post("/x").key(&format!("k-{nth}")).body("{}");
    std::thread::scope(|scope| {
        for nth in 0..40 {
            let (gate, request) = (&gate, &request);
            scope.spawn(move || {
                let answer = request(nth).send(gate);
                answer.expect(200, "executed");
                assert_eq!(answer.body.bytes.len(), SIZE);
            });
        }
    });
    let peak = gate.peak_memory();
    assert!(peak < 250 << 20, "{} MiB", peak >> 20);
    assert_eq!(upstream.runs(), 40);
    nothing_is_held(&gate);
    let mut kept = 0;
    for nth in 0..40 {
        let retry = request(nth).send(&gate);
        match retry.status {
            200 => kept += 1,
            _ => drop(retry.expect_problem(409, "response-not-stored")),
        }
    }
    assert!((4..40).contains(&kept), "{kept} were kept");
    assert!(exceeded(&gate, "max_buffered_memory") > 0.0);
    assert_eq!(upstream.runs(), 40);
    eprintln!("peak {} MiB, {kept} kept", peak >> 20);
}

/// Answers of 64 KiB and less are kept whatever else is held.
#[test]
fn small_answers_are_kept_though_there_be_no_room() {
    const SMALL: usize = 60 << 10;
    let signal = Signal::new();
    let held_back = signal.clone();
    let upstream = Upstream::start(move |_| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SMALL}\r\n\r\n");
        let bytes = noise(SMALL);
        Reply::raw(head).then(&bytes[..SMALL - 1]).pause_until(&held_back).then(&bytes[SMALL - 1..])
    });
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"1MiB\"").start();
    let request = |nth| Request::post("/x").key(&format!("k-{nth}")).body("{}");
    std::thread::scope(|scope| {
        let send = |nth| {
            let (gate, request) = (&gate, &request);
            scope.spawn(move || request(nth).send(gate))
        };
        let answers: Vec<_> = (0..20).map(send).collect();
        eventually("more than there is room for", || (held(&gate, "memory") > (2 << 20) as f64).then_some(()));
        signal.open();
        for answer in answers {
            answer.join().unwrap().expect(200, "executed");
        }
    });
    for nth in 0..20 {
        let replay = request(nth).send(&gate);
        replay.expect(200, "replayed");
        assert!(replay.body.bytes == noise(SMALL));
    }
    nothing_is_held(&gate);
}

/// Who asks for large replays and does not read them holds what is there for all, and no more.
#[test]
fn replays_that_nobody_reads_are_bounded() {
    const SIZE: usize = 14 << 20;
    let upstream = Upstream::start(|_| Reply::ok(vec![b'x'; SIZE]));
    let plan = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"32MiB\"");
    // A busy machine takes long to write as much.
    let gate = plan.store("settle_timeout = \"60s\"").start();
    let request = Request::post("/x").key("k").body("{}");
    request.send(&gate).expect(200, "executed");
    let unread = (0..2).map(|_| {
        let mut client = Client::connect(gate.address);
        client.send(request.bytes());
        assert!(client.head().has("idempotent-replayed"));
        client
    });
    let unread: Vec<Client> = unread.collect();
    request.send(&gate).expect_problem(503, "overloaded");
    drop(unread);
    nothing_is_held(&gate);
    request.send(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}
