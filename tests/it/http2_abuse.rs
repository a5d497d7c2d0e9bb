//! What a client of HTTP/2 can do to a gate by frames alone: it stays within bounds, and others are served meanwhile.

use std::io::Read as _;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Ending, Frames, GOAWAY, HEADERS, PING, PRIORITY, RST_STREAM,
    SETTINGS, WINDOW_UPDATE, block, frame, request,
};
use crate::support::{Client, Gate, Reply, Request, Upstream};

/// How long the abuse goes on, unless the gate ends it first.
const WHILE: Duration = Duration::from_secs(10);

/// How much more memory it may take, in bytes. Bodies in memory are bounded elsewhere.
const MEMORY: u64 = 64 << 20;

/// How long another client may have to wait, nearly always: the machine is busy with the abuse itself, and other tests.
const LATENCY: Duration = Duration::from_secs(2);

/// How long it may have to at worst. Now and then a machine stands still.
const STALL: Duration = Duration::from_secs(4);

/// How a connection ended that did nothing but send.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It was told to leave, for this reason.
    GoAway(u32),
    /// It was closed.
    Closed,
    /// It went on to the end.
    Endured,
}

/// Nobody is idle there for as long as anything goes on.
fn gate(upstream: &Upstream) -> Gate {
    gate_with(upstream, "60s")
}

fn gate_with(upstream: &Upstream, idle: &str) -> Gate {
    let limits = format!("body_timeout = \"1s\"\nidle_timeout = \"{idle}\"\nheader_timeout = \"{idle}\"");
    Gate::before(upstream).top(&format!("[limits]\n{limits}")).start()
}

fn quick() -> Upstream {
    Upstream::start(|_| Reply::ok("x"))
}

/// It is told to leave, and is left when it goes on.
const LEAVES: End = End::GoAway(0);

/// It is too much (ENHANCE_YOUR_CALM; RFC 9113, 7).
const TOO_MUCH: End = End::GoAway(11);

/// Sends what `next` makes, again and again. Asserts that another client is served meanwhile, and that memory is bounded.
#[track_caller]
fn abused(gate: &Gate, what: &str, begin: &[u8], mut next: impl FnMut(u32) -> Vec<u8> + Send) -> End {
    let (before, quiet) = (gate.peak_memory(), others(gate.address, &AtomicBool::new(true)));
    let mut attacker = Frames::connect(gate.address, &[]);
    let mut listening = attacker.stream.try_clone().unwrap();
    let is_over = AtomicBool::new(false);
    let began = Instant::now();
    let (rounds, (came, lasted), waited) = std::thread::scope(|scope| {
        let came = scope.spawn(move || {
            let mut came = Vec::new();
            // Whatever way it ends. What is sent may be read on for a while after that.
            drop(listening.read_to_end(&mut came));
            (came, began.elapsed())
        });
        let sending = scope.spawn(|| {
            let mut rounds = 0;
            drop(attacker.write(begin));
            while began.elapsed() < WHILE && attacker.write(&next(rounds)).is_ok() {
                rounds += 1;
            }
            is_over.store(true, Ordering::Release);
            // Where it still goes on.
            drop(attacker.stream.shutdown(Shutdown::Write));
            rounds
        });
        let waited = others(gate.address, &is_over);
        (sending.join().unwrap(), came.join().unwrap(), waited)
    });
    let grown = gate.peak_memory().saturating_sub(before);
    let end = match reason(&came) {
        _ if lasted >= WHILE => End::Endured,
        Some(reason) => End::GoAway(reason),
        None => End::Closed,
    };
    eprintln!(
        "{what}: {rounds} rounds, {end:?} after {lasted:?}, {} KiB more, others waited {waited:?}, before {quiet:?}",
        grown >> 10
    );
    waited.is_fair(what, quiet);
    assert!(grown < MEMORY, "{what}: {grown} bytes more");
    end
}

/// How long the answers to another client took.
#[derive(Clone, Copy, Debug)]
struct Waited {
    median: Duration,
    /// All but one of fifty, and one at least, took less.
    most: Duration,
    longest: Duration,
}

impl Waited {
    /// Holds that they took about as long as when it is quiet.
    #[track_caller]
    fn is_fair(self, what: &str, quiet: Self) {
        let usual = (quiet.median * 20).max(Duration::from_millis(300));
        assert!(self.most < LATENCY && self.longest < STALL, "{what}: another client waited {self:?}");
        assert!(self.median < usual, "{what}: another client waited {self:?}, and {quiet:?} before");
    }
}

/// Asks again and again until it is over.
#[track_caller]
fn others(address: SocketAddr, is_over: &AtomicBool) -> Waited {
    let mut waited = Vec::new();
    while !is_over.load(Ordering::Acquire) || waited.len() < 20 {
        let began = Instant::now();
        assert_eq!(Request::get("/other").send(address).status, 200);
        waited.push(began.elapsed());
    }
    waited.sort();
    let last = waited.len() - 1;
    Waited { median: waited[last / 2], most: waited[last - (last / 50).max(1)], longest: waited[last] }
}

/// The reason of the last GOAWAY among these frames.
fn reason(mut came: &[u8]) -> Option<u32> {
    let mut reason = None;
    while let Some((head, rest)) = came.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((payload, rest)) = rest.split_at_checked(length) else { break };
        if head[3] == GOAWAY {
            reason = payload.get(4..8).map(|bytes| u32::from_be_bytes(bytes.try_into().unwrap()));
        }
        came = rest;
    }
    reason
}

const WHOLE: u8 = END_HEADERS | END_STREAM;

/// So many frames at a time.
const BATCH: u32 = 200;

fn batch(round: u32, one: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    (0..BATCH).flat_map(|nth| one(2 * (round * BATCH + nth) + 1)).collect()
}

/// How many connections the gate counted as such.
fn floods(gate: &Gate) -> f64 {
    gate.metric("oncegate_limit_exceeded_total", &["limit=\"http2_flood\""])
}

#[test]
fn rapid_resets_end_the_connection() {
    let upstream = quick();
    let gate = gate(&upstream);
    let head = request("GET", "/reset", &[]);
    let end = abused(&gate, "rapid reset", &[], |round| {
        batch(round, |stream| {
            [frame(HEADERS, WHOLE, stream, &head), frame(RST_STREAM, 0, stream, &8u32.to_be_bytes())].concat()
        })
    });
    assert_eq!(end, TOO_MUCH);
    assert_eq!(floods(&gate), 1.0);
    // Clients could fill the log with the lines of the library.
    assert!(!gate.log().contains("h2::"), "{}", gate.log());
}

/// Each request is looked at before it is given up: what the h2 crate counts it does not count as a flood.
#[test]
fn requests_that_are_given_up_one_after_the_other_end_the_connection() {
    let upstream = Upstream::start(|request| match request.start_line().contains("/slow") {
        true => Reply::ok("x").delay(Duration::from_millis(200)),
        false => Reply::ok("x"),
    });
    let gate = gate(&upstream);
    let head = request("GET", "/slow", &[]);
    let end = abused(&gate, "slow reset", &[], |round| {
        std::thread::sleep(Duration::from_millis(1));
        let stream = 2 * round + 1;
        let previous = if round == 0 { Vec::new() } else { frame(RST_STREAM, 0, stream - 2, &8u32.to_be_bytes()) };
        [previous, frame(HEADERS, WHOLE, stream, &head)].concat()
    });
    assert!([LEAVES, TOO_MUCH].contains(&end), "{end:?}");
}

#[test]
fn pings_and_settings_are_answered_within_bounds() {
    let upstream = quick();
    let gate = gate(&upstream);
    for (what, one) in [
        ("ping flood", frame(PING, 0, 0, &[7; 8])),
        ("ping answers that nobody asked for", frame(PING, ACK, 0, &[7; 8])),
        ("settings flood", frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9])),
        ("empty settings flood", frame(SETTINGS, 0, 0, &[])),
        ("priority flood", frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 1])),
        ("frames of no known kind", frame(0xEE, 0, 0, &[0; 100])),
    ] {
        let counted = floods(&gate);
        let end = abused(&gate, what, &[], |round| batch(round, |_| one.clone()));
        assert_eq!(end, LEAVES, "{what}");
        assert_eq!(floods(&gate), counted + 1.0, "{what}");
    }
}

/// Who asks on and on for a sign of life, and gives none, is left when it has been idle.
#[test]
fn pings_do_not_keep_a_connection_that_was_told_to_end() {
    let upstream = quick();
    let gate = gate_with(&upstream, "1s");
    let mut client = Frames::connect(gate.address, &[]);
    let (began, mut listening) = (Instant::now(), Frames { stream: client.stream.try_clone().unwrap() });
    let leaving = std::thread::spawn(move || {
        let goodbye = listening.next_of(GOAWAY).map(|frame| frame.payload[4..8].to_vec());
        while listening.next().is_some() {}
        (goodbye, began.elapsed())
    });
    while began.elapsed() < Duration::from_secs(10) && client.write(&frame(PING, 0, 0, &[7; 8])).is_ok() {
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(client.stream.shutdown(Shutdown::Both));
    let (goodbye, lasted) = leaving.join().unwrap();
    assert_eq!(goodbye, Some(vec![0; 4]));
    assert!(lasted < Duration::from_secs(10), "{lasted:?}");
}

/// They are not even read.
#[test]
fn answers_to_pings_do_not_pile_up() {
    let upstream = quick();
    let gate = gate(&upstream);
    let before = gate.peak_memory();
    let mut attacker = Frames::connect(gate.address, &[]);
    attacker.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let pings = batch(0, |_| frame(PING, 0, 0, &[7; 8]));
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(15) {
        match attacker.write(&pings) {
            Ok(()) => sent += pings.len(),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    eprintln!("pings that nobody reads the answers of: {sent} bytes taken, given up after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(15), "it is given up");
    assert!(gate.peak_memory() - before < MEMORY);
}

/// Makes a frame for this stream.
type Make<'a> = &'a (dyn Fn(u32) -> Vec<u8> + Sync);

#[test]
fn empty_frames_are_no_way_to_keep_a_stream() {
    let upstream = quick();
    let gate = gate(&upstream);
    let open = frame(HEADERS, END_HEADERS, 1, &request("POST", "/x", &[("idempotency-key", b"k")]));
    let padded = frame(DATA, 8, 1, &[[255].as_slice(), &[0; 255]].concat());
    let window = frame(WINDOW_UPDATE, 0, 0, &1u32.to_be_bytes());
    let all: [(_, _, &[u8], Make<'_>); 5] = [
        ("empty DATA flood", TOO_MUCH, &open, &|_| frame(DATA, 0, 1, &[])),
        // A body like any other, as far as it is read in time.
        ("tiny DATA flood", TOO_MUCH, &open, &|_| frame(DATA, 0, 1, b"x")),
        ("padding alone", TOO_MUCH, &open, &|_| padded.clone()),
        ("empty HEADERS flood", TOO_MUCH, &[], &|stream| frame(HEADERS, WHOLE, stream, &[])),
        ("window updates", LEAVES, &[], &|_| window.clone()),
    ];
    let ends = all.map(|(what, end, begin, one)| (what, abused(&gate, what, begin, |round| batch(round, one)), end));
    for (what, ended, end) in ends {
        let is_body = what.starts_with("tiny");
        assert!(ended == end || is_body && [TOO_MUCH, End::Endured].contains(&ended), "{what}: {ended:?}");
    }
    assert_eq!(upstream.runs_of("k"), 0);
}

#[test]
fn heads_that_do_not_end_end_the_connection() {
    let upstream = quick();
    let gate = gate(&upstream);
    let begin = frame(HEADERS, 0, 1, &request("GET", "/", &[]));
    for (what, part) in [
        ("empty CONTINUATION flood", Vec::new()),
        ("CONTINUATION flood", block(&[("x-header", &[b'y'; 100])])),
        ("large CONTINUATION flood", block(&[("x-header", &[b'y'; 16_000])])),
    ] {
        let end = abused(&gate, what, &begin, |round| batch(round, |_| frame(CONTINUATION, 0, 1, &part)));
        assert_eq!(end, TOO_MUCH, "{what}");
    }
    assert!(upstream.seen().iter().all(|request| request.start_line().contains("/other")));
}

/// One byte of a head can stand for thousands (RFC 7541, 7.3): each stream may say it again.
#[test]
fn heads_that_unfold_are_refused() {
    let upstream = quick();
    let gate = gate(&upstream);
    // Into the table, and from there.
    let known = [&[0x40][..], &[1, b'x', 127, 0xa1, 0x1e], &[b'y'; 4000]].concat();
    let bomb = [request("GET", "/bomb", &[]), known, vec![0xBE; 8000]].concat();
    let again = [request("GET", "/bomb", &[]), vec![0xBE; 8000]].concat();
    let first = frame(HEADERS, WHOLE, 1, &bomb);
    let end = abused(&gate, "header bomb", &first, |round| {
        (0..20).flat_map(|nth| frame(HEADERS, WHOLE, 2 * (round * 20 + nth) + 3, &again)).collect()
    });
    assert_eq!(end, TOO_MUCH);
    assert!(upstream.seen().iter().all(|request| !request.start_line().contains("/bomb")));
    let mut client = Frames::connect(gate.address, &[]);
    client.write(&first).unwrap();
    assert!(matches!(client.ending(1), Ending::Status(0) | Ending::Reset(_) | Ending::GoAway(_)));
}

/// All streams that there may be ask for a large answer, of which nobody takes a byte.
#[test]
fn answers_that_nobody_takes_do_not_pile_up() {
    let upstream = Upstream::start(|request| match request.start_line().contains("/large") {
        true => Reply::ok("x".repeat(512 << 10)),
        false => Reply::ok("x"),
    });
    let gate = gate(&upstream);
    let (before, quiet) = (gate.peak_memory(), others(gate.address, &AtomicBool::new(true)));
    let mut attackers: Vec<Frames> = (0..2)
        .map(|_| {
            let mut attacker = Frames::connect(gate.address, &[(4, 0)]);
            let head = request("GET", "/large", &[]);
            for nth in 0..100 {
                attacker.send(HEADERS, WHOLE, 2 * nth + 1, &head);
            }
            attacker
        })
        .collect();
    let waited = others(gate.address, &AtomicBool::new(true));
    for attacker in &mut attackers {
        for _ in 0..100 {
            attacker.next_of(RST_STREAM).expect("each stream is given up");
        }
    }
    let grown = gate.peak_memory() - before;
    eprintln!("zero windows: {} KiB more, another client waited {waited:?}", grown >> 10);
    assert!(grown < 2 * MEMORY, "{grown} bytes more");
    waited.is_fair("zero windows", quiet);
    let mut client = Client::connect(gate.address);
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.response().status, 200);
}
