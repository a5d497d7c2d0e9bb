//! Clients of HTTP/2 that ask for much and take nothing: what they hold is bounded, and goes back to the system.

use std::time::{Duration, Instant};

use crate::support::frames::{END_HEADERS, END_STREAM, Ended, Ending, Frames, HEADERS, WINDOW_UPDATE, request};
use crate::support::http2::{Http2, post};
use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

const WHOLE: u8 = END_HEADERS | END_STREAM;
const INITIAL_WINDOW_SIZE: u16 = 4;

fn asked(client: &mut Frames, stream: u32, key: &str) {
    client.send(HEADERS, WHOLE, stream, &request("POST", "/x", &[("idempotency-key", key.as_bytes())]));
}

/// What the process has resident, in bytes.
fn resident(gate: &Gate) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gate.pid())).expect("a running process");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}

/// What is counted of bodies.
fn held(gate: &Gate) -> f64 {
    gate.metric("oncegate_buffered_bytes", &["where=\"memory\""])
}

#[test]
fn a_connection_that_takes_nothing_gets_no_more() {
    const SIZE: usize = 1_500_000;
    let upstream = Upstream::start(|_| Reply::ok(vec![b'x'; SIZE]));
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"20MiB\"").start();
    let mut client = Frames::connect(gate.address, &[(INITIAL_WINDOW_SIZE, 0)]);
    for (stream, key) in [(1, "k-1"), (3, "k-2")] {
        asked(&mut client, stream, key);
        assert_eq!(client.ending(stream), Ending::Status(200));
    }
    asked(&mut client, 5, "k-3");
    // 503, which no table has.
    assert_eq!(client.ending(5), Ending::Status(0));
    assert_eq!((upstream.runs(), gate.states("k-3").len()), (2, 0));
    // Others are served, on connections of their own.
    Request::post("/x").key("k-4").body("{}").send(&gate).expect(200, "executed");
    // Once it takes what is there, it gets more.
    client.send(WINDOW_UPDATE, 0, 0, &(1_u32 << 30).to_be_bytes());
    for stream in [1, 3] {
        client.send(WINDOW_UPDATE, 0, stream, &(1_u32 << 30).to_be_bytes());
        let (body, ended) = client.body(stream);
        assert_eq!((body.len(), ended), (SIZE, Ended::Whole));
    }
    asked(&mut client, 7, "k-3");
    assert_eq!(client.ending(7), Ending::Status(200));
    assert_eq!(gate.states("k-3"), ["completed"]);
}

#[test]
fn a_request_that_is_refused_for_unread_answers_is_told_all_that_its_route_says() {
    let upstream = Upstream::start(|_| Reply::ok(vec![b'x'; 1_500_000]));
    let defaults = "docs = \"https://docs.example/retries\"\ncors.origins = [\"https://shop.example\"]";
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"20MiB\"").defaults(defaults).start();
    let mut client = Http2::with_window(&gate, 1000);
    let request = |key: &str| {
        let request = post("/x").header("idempotency-key", key).header("origin", "https://shop.example");
        request.body("{}").unwrap()
    };
    let unread = ["k-1", "k-2"].map(|key| client.begin(request(key)));
    let refused = client.send(request("k-3"));
    refused.expect(503, "overloaded");
    assert_eq!(refused.get("link"), "<https://docs.example/retries>; rel=\"describedby\"");
    assert_eq!((refused.get("access-control-allow-origin"), refused.get("retry-after")), ("https://shop.example", "1"));
    assert_eq!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"max_buffered_memory\""]), 1.0);
    let refused = client.send(post("/x").body("{}").unwrap());
    refused.expect(503, "");
    drop(unread);
    assert_eq!(upstream.runs(), 2);
}

/// All of its requests come before the first answer does.
#[test]
fn the_first_burst_of_a_connection_leaves_memory_to_others() {
    const SIZE: usize = 1_500_000;
    const STREAMS: u32 = 12;
    let signal = Signal::new();
    let held_back = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok(vec![b'x'; SIZE]).hold_until(&held_back));
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"16MiB\"").start();
    let mut client = Frames::connect(gate.address, &[(INITIAL_WINDOW_SIZE, 0)]);
    for nth in 0..STREAMS {
        asked(&mut client, 2 * nth + 1, &format!("k-{nth}"));
    }
    upstream.wait_for_runs(STREAMS as usize);
    signal.open();
    eventually("an answer to each", || {
        (gate.metric("oncegate_requests_total", &["outcome=\"executed\""]) == f64::from(STREAMS)).then_some(())
    });
    // A quarter, and the first 64 KiB of each answer.
    let most = f64::from(4 << 20) + f64::from(STREAMS * (64 << 10));
    assert!(held(&gate) <= most, "{} bytes are held for one connection", held(&gate));
    let other = Request::post("/x").key("other").body("{}");
    other.send(&gate).expect(200, "executed");
    other.send(&gate).expect(200, "replayed");
}

/// Ten connections with a hundred streams each took a gigabyte once, and most of it stayed.
#[test]
fn what_is_asked_for_and_not_taken_takes_little_and_goes_back() {
    const CONNECTIONS: u32 = 3;
    const STREAMS: u32 = 80;
    const MEMORY: u32 = 32 << 20;
    let rounds = [Signal::new(), Signal::new()];
    let answered = rounds.clone();
    let upstream = Upstream::start(move |request| {
        let round = usize::from(request.key().expect("a key").starts_with("k-1-"));
        Reply::ok(vec![b'x'; 2_000_000]).hold_until(&answered[round])
    });
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"32MiB\"").start();
    let before = resident(&gate);
    for (round, answers) in (0..).zip(&rounds) {
        let clients: Vec<Frames> = (0..CONNECTIONS)
            .map(|nth| {
                let mut client = Frames::connect(gate.address, &[(INITIAL_WINDOW_SIZE, 0)]);
                for stream in 0..STREAMS {
                    asked(&mut client, 2 * stream + 1, &format!("k-{round}-{nth}-{stream}"));
                }
                client
            })
            .collect();
        upstream.wait_for_runs(((round + 1) * CONNECTIONS * STREAMS) as usize);
        answers.open();
        eventually("each connection's share", || (held(&gate) >= f64::from(MEMORY) * 3.0 / 8.0).then_some(()));
        drop(clients);
        eventually("nothing that is held", || {
            let answering = gate.metric("oncegate_requests_in_flight", &[]);
            (held(&gate) == 0.0 && answering == 0.0).then_some(())
        });
    }
    let (grown, mib) = ((gate.peak_memory() - before) >> 20, |bytes: u64| bytes >> 20);
    eprintln!("{} MiB before, {grown} MiB more at most", mib(before));
    assert!(grown < 150, "{grown} MiB more for {} answers that nobody took", CONNECTIONS * STREAMS);
    // Idle connections to the upstream have some for 30 s.
    let ended = Instant::now();
    while resident(&gate) > before + (40 << 20) {
        assert!(ended.elapsed() < Duration::from_secs(90), "{} MiB stay", mib(resident(&gate)));
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("{} MiB afterwards", mib(resident(&gate)));
}
