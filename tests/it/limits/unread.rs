//! Clients of HTTP/2 that ask for much and take nothing: what they hold is bounded, and goes back to the system.

use std::time::{Duration, Instant};

use crate::support::frames::{END_HEADERS, END_STREAM, Ended, Ending, Frames, HEADERS, WINDOW_UPDATE, request};
use crate::support::{Gate, Reply, Request, Upstream, eventually};

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
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"8MiB\"").start();
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

/// Ten connections with a hundred streams each took a gigabyte once, and most of it stayed.
#[test]
fn what_is_asked_for_and_not_taken_takes_little_and_goes_back() {
    const CONNECTIONS: u32 = 3;
    const STREAMS: u32 = 80;
    const MEMORY: u32 = 32 << 20;
    let upstream = Upstream::start(|_| Reply::ok(vec![b'x'; 2_000_000]));
    let gate = Gate::before(&upstream).top("[limits]\nmax_buffered_memory = \"32MiB\"").start();
    let before = resident(&gate);
    for round in 0..2 {
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
        eventually("all the memory that there is for bodies", || (held(&gate) >= f64::from(MEMORY)).then_some(()));
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
