//! Bodies of every size, and how much memory they may take.

mod crowds;
mod files;
mod memory;
mod shares;
mod unread;
mod upstreams;

use crate::support::{Client, Gate, Reply, Request, Upstream, eventually};

/// Bytes that no compression or repetition could fake.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// Around 256 KiB, where a body goes to a temporary file, and at the limit.
#[test]
fn request_bodies_of_every_size() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let sizes = [0, 1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 1 << 20, 16 << 20];
    for (nth, size) in sizes.into_iter().enumerate() {
        let key = format!("key-{nth}");
        let request = Request::post("/x").key(&key).body(noise(size));
        request.send(&gate).expect(200, "executed");
        assert!(upstream.last().body.bytes == noise(size), "{size} bytes arrived changed");
        request.send(&gate).expect(200, "replayed");
        if size > 0 {
            let mut other = noise(size);
            *other.last_mut().unwrap() ^= 1;
            Request::post("/x").key(&key).body(other).send(&gate).expect_problem(422, "key-reused");
        }
    }
    assert_eq!(upstream.runs(), sizes.len());
    let over = Request::post("/x").key("over").body(noise((16 << 20) + 1));
    let mut client = Client::connect(gate.address);
    // The gate may stop reading before everything is sent.
    drop(client.wire.send(&over.bytes()));
    if let Some(response) = client.try_response("POST") {
        response.expect_problem(413, "request-too-large");
    }
    assert_eq!(upstream.runs(), sizes.len());
}

#[test]
fn large_chunked_request_bodies() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let body = noise(3 << 20);
    let mut client = Client::connect(gate.address);
    client.send("POST /x HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n");
    for chunk in body.chunks(99_991) {
        client.send(format!("{:x}\r\n", chunk.len())).send(chunk).send("\r\n");
    }
    client.send("0\r\n\r\n");
    client.response().expect(200, "executed");
    assert!(upstream.last().body.bytes == body);
}

#[test]
fn answers_of_every_size() {
    let upstream = Upstream::start(|request| {
        let size: usize = request.key().unwrap().parse().unwrap();
        Reply::ok(noise(size))
    });
    let gate = Gate::before(&upstream).start();
    let sizes = [0, 1, 65_536, (256 << 10) + 1, 1 << 20, 16 << 20];
    for size in sizes {
        let request = Request::post("/x").key(&size.to_string()).body("{}");
        let first = request.send(&gate);
        first.expect(200, "executed");
        assert!(first.body.bytes == noise(size));
        let replay = request.send(&gate);
        replay.expect(200, "replayed");
        first.expect_repeated_by(&replay);
    }
    let over = Request::post("/x").key(&((16 << 20) + 1).to_string()).body("{}");
    let first = over.send(&gate);
    assert_eq!(first.status, 200);
    assert!(first.body.complete && first.body.bytes.len() == (16 << 20) + 1);
    over.send(&gate).expect_problem(409, "response-not-stored");
    assert_eq!(upstream.runs(), sizes.len() + 1);
}

/// Sixteen uploads of 16 MiB at once are files, not memory.
#[test]
fn large_uploads_do_not_fill_the_memory() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let body = noise(16 << 20);
    std::thread::scope(|scope| {
        for nth in 0..16 {
            let (gate, body) = (&gate, &body);
            scope.spawn(move || {
                let request = Request::post("/x").key(&format!("k-{nth}")).body(body.clone());
                request.header("Content-Type", "application/octet-stream").send(gate).expect(200, "executed");
            });
        }
    });
    assert_eq!(upstream.runs(), 16);
    let peak = gate.peak_memory();
    assert!(peak < 120 << 20, "{} MiB for 256 MiB of uploads", peak >> 20);
    // A body goes with its request, a moment after the answer.
    let is_spooled = |fd: std::fs::DirEntry| {
        let path = std::fs::read_link(fd.path()).unwrap_or_default();
        path.to_string_lossy().contains("(deleted)") && !path.to_string_lossy().contains("gate.db")
    };
    eventually("temporary files that are closed", || {
        let files = std::fs::read_dir(format!("/proc/{}/fd", gate.pid())).unwrap().flatten();
        (files.map(is_spooled).all(|is_spooled| !is_spooled)).then_some(())
    });
}
