//! A request that is malformed, aborted or too large never claims its key, and never reaches the upstream.

use std::time::Duration;

use crate::support::{Client, Gate, Plan, Reply, Request, Response, Upstream, eventually};

/// A gate whose routes take 1 KiB, and its upstream.
fn small() -> (Upstream, Gate) {
    let upstream = Upstream::start(|request| Reply::ok(request.body.bytes.clone()));
    let gate = Gate::before(&upstream).defaults("max_request_body = \"1KiB\"").start();
    (upstream, gate)
}

/// Sends these bytes, which must be refused, and holds that the key `k-1` is free at once.
#[track_caller]
fn refused(raw: impl AsRef<[u8]>, status: u16, code: &str) {
    let (upstream, gate) = small();
    let mut client = Client::connect(gate.address);
    client.send(raw);
    let response = client.response();
    response.expect_bare_problem(status, code);
    free_at_once(&upstream, &gate);
}

#[track_caller]
fn free_at_once(upstream: &Upstream, gate: &Gate) {
    assert_eq!(upstream.runs(), 0);
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!(upstream.runs(), 1);
}

const CHUNKED: &str = "POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Whatever is wrong with a request, an answer to one with a key has a status.
#[test]
fn a_malformed_request_with_a_key_has_a_status() {
    let (upstream, gate) = small();
    let post = |more: &str| format!("POST /charges HTTP/1.1\r\nHost: a\r\n{more}\r\n\r\n");
    let keyed = |more: &str| post(&format!("Idempotency-Key: k-1\r\n{more}"));
    for (raw, status, code) in [
        (keyed("Expect: more\r\nContent-Length: 0"), 417, "expectation-failed"),
        (keyed("Content-Length: 1\r\nTransfer-Encoding: chunked"), 400, "bad-request"),
        (post("Idempotency-Key: a\u{1}b\r\nContent-Length: 0"), 400, "key-invalid"),
        (keyed("Content-Length: 0").replace("/charges", "/<"), 400, "bad-request"),
        (format!("{CHUNKED}zz\r\n"), 400, "bad-request"),
        (format!("{CHUNKED}0\r\nHost: b\r\n\r\n"), 400, "bad-request"),
    ] {
        let response = Client::connect(gate.address).send(&raw).response();
        response.expect_problem(status, code);
        let response = Client::connect(gate.address).send(raw.replace("Idempotency-Key", "X-Key")).response();
        assert!(response.status == status && !response.head.has("idempotency-status"), "{raw}: {}", response.show());
    }
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn a_chunk_size_that_is_no_number() {
    refused(format!("{CHUNKED}zz\r\nabc\r\n0\r\n\r\n"), 400, "bad-request");
}

#[test]
fn a_chunk_that_is_longer_than_it_says() {
    refused(format!("{CHUNKED}2\r\nabcdef\r\n0\r\n\r\n"), 400, "bad-request");
}

/// hyper reads no longer ones, and would let the connection go on without what came behind them.
#[test]
fn trailers_that_are_too_long() {
    let (upstream, gate) = small();
    let behind = "GET /charges HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut client = Client::connect(gate.address);
    client.send(format!("{CHUNKED}0\r\nX-Sum: {}\r\n\r\n{behind}", "x".repeat(20 << 10)));
    let response = client.response();
    response.expect_problem(431, "headers-too-large");
    assert_eq!(response.head.get("connection").as_deref(), Some("close"), "{}", response.show());
    free_at_once(&upstream, &gate);
}

#[test]
fn chunks_that_are_too_large() {
    let chunk = format!("200\r\n{}\r\n", "x".repeat(0x200));
    refused(format!("{CHUNKED}{}0\r\n\r\n", chunk.repeat(3)), 413, "request-too-large");
}

#[test]
fn a_length_that_is_too_large() {
    let head = "POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\nContent-Length: 1025\r\n\r\n";
    refused(format!("{head}{}", "x".repeat(1025)), 413, "request-too-large");
    // Without waiting for the body.
    refused(head, 413, "request-too-large");
}

#[test]
fn the_largest_body_that_is_allowed() {
    let (_upstream, gate) = small();
    gate.post("/charges", "k-1", &"x".repeat(1024)).expect(200, "executed");
    let mut client = Client::connect(gate.address);
    let chunk = format!("400\r\n{}\r\n0\r\n\r\n", "x".repeat(0x400));
    client.send(CHUNKED.replace("k-1", "k-2") + &chunk);
    client.response().expect(200, "executed");
}

#[test]
fn a_body_that_is_aborted() {
    let (upstream, gate) = small();
    for body in ["Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"] {
        for reset in [false, true] {
            let mut client = Client::connect(gate.address);
            client.send(format!("POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\n{body}"));
            std::thread::sleep(Duration::from_millis(20));
            if reset {
                socket2::SockRef::from(&client.wire.stream).set_linger(Some(Duration::ZERO)).unwrap();
            }
        }
    }
    // Something else goes through while these bodies are still open.
    let mut open = Client::connect(gate.address);
    open.send("POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\nContent-Length: 100\r\n\r\nhalf");
    free_at_once(&upstream, &gate);
    assert_eq!(gate.records("").len(), 1);
}

#[test]
fn an_aborted_body_with_half_a_close_is_answered() {
    let (upstream, gate) = small();
    let mut client = Client::connect(gate.address);
    client.send("POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\nContent-Length: 100\r\n\r\nhalf");
    client.wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
    if let Some(response) = client.try_response("POST") {
        assert_eq!(response.status, 400, "{}", response.show());
    }
    free_at_once(&upstream, &gate);
}

#[test]
fn too_large_is_said_before_the_body_is_asked_for() {
    let (upstream, gate) = small();
    let mut client = Client::connect(gate.address);
    client.send(
        "POST /charges HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k-1\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n",
    );
    let head = client.head();
    assert!(head.start.starts_with(b"HTTP/1.1 413"), "{:?}", String::from_utf8_lossy(&head.raw));
    free_at_once(&upstream, &gate);
}

/// Requests on which two parsers could disagree about where they end, or whom they are for.
#[test]
fn ambiguous_requests_are_refused_and_never_forwarded() {
    let (upstream, gate) = small();
    let k = "Idempotency-Key: k-1\r\n";
    let cases = [
        ("no Host", format!("POST /charges HTTP/1.1\r\n{k}Content-Length: 2\r\n\r\n{{}}")),
        ("two Hosts", format!("POST /charges HTTP/1.1\r\nHost: a\r\nHost: b\r\n{k}Content-Length: 2\r\n\r\n{{}}")),
        ("two lengths", format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc")),
        ("a length with a sign", format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Content-Length: +2\r\n\r\nab")),
        (
            "two codings in two lines",
            format!(
                "POST /c HTTP/1.1\r\nHost: a\r\n{k}Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
        ),
        (
            "chunks twice",
            format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
        ),
        (
            "a coding under the chunks",
            format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        ),
        (
            "chunks not last",
            format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
        ),
        ("a space before the colon", format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}Content-Length : 2\r\n\r\nab")),
        (
            "a folded header",
            format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}X-A: 1\r\n folded\r\nContent-Length: 2\r\n\r\nab"),
        ),
        ("a NUL in a value", format!("POST /c HTTP/1.1\r\nHost: a\r\n{k}X-A: a\0b\r\nContent-Length: 2\r\n\r\nab")),
        (
            "chunks in HTTP/1.0",
            format!("POST /c HTTP/1.0\r\nHost: a\r\n{k}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ),
        ("a target without a slash", format!("POST charges HTTP/1.1\r\nHost: a\r\n{k}Content-Length: 2\r\n\r\nab")),
        ("an asterisk to POST to", format!("POST * HTTP/1.1\r\nHost: a\r\n{k}Content-Length: 2\r\n\r\nab")),
        ("a Host that is none", format!("POST /c HTTP/1.1\r\nHost: a b/c@d\r\n{k}Content-Length: 2\r\n\r\nab")),
        ("CONNECT", format!("CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n{k}\r\n")),
        ("no HTTP at all", "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".to_owned()),
    ];
    for (what, raw) in cases {
        let mut client = Client::connect(gate.address);
        client.send(raw);
        // Closing without a word is a refusal too.
        if let Some(response) = client.try_response("POST") {
            assert!((400..600).contains(&response.status), "{what}: {}", response.show());
            assert_ne!(response.status, 502, "{what}: {}", response.show());
        }
        assert_eq!(upstream.runs(), 0, "{what} was forwarded");
    }
    free_at_once(&upstream, &gate);
}

/// RFC 9112 section 6.1: the chunks count, the length does not go on, and the connection is not trusted any more.
#[test]
fn a_length_and_chunks() {
    let (upstream, gate) = small();
    let mut client = Client::connect(gate.address);
    client.send(CHUNKED.replace("Transfer", "Content-Length: 2\r\nTransfer") + "3\r\nabc\r\n0\r\n\r\n");
    let response = client.response();
    if response.status != 400 {
        response.expect(200, "executed");
        let seen = upstream.last();
        assert_eq!(seen.body.bytes, b"abc");
        assert_eq!(seen.head.all("content-length").len() + seen.head.all("transfer-encoding").len(), 1);
        assert!(client.wire.is_closed_within(Duration::from_secs(5)));
    }
}

#[test]
fn a_refusal_does_not_read_the_body_as_the_next_request() {
    let (upstream, gate) = small();
    let mut client = Client::connect(gate.address);
    let inner = "POST /smuggled HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n";
    client.send(Request::post("/charges").key("a b").body(inner).bytes());
    client.response().expect_problem(400, "key-invalid");
    client.wire.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(!matches!(client.wire.head(), Ok(Some(_))), "the body was answered as a request");
    assert_eq!(upstream.runs(), 0);
}

/// What the key header may look like; everything else is 400 before anything else looks at it.
#[test]
fn keys_that_are_not_well_formed() {
    let (upstream, gate) = small();
    let long = "x".repeat(256);
    let quoted_long = format!("\"{long}\"");
    let cases: [&[u8]; 18] = [
        b"",
        b"\"\"",
        b"a b",
        b"\"a b\"",
        b"a,b",
        b"\"a\", \"b\"",
        b"a;b",
        b"\"a\";q=1",
        b"\"a",
        b"a\"",
        b"a\"b",
        b"a\\b",
        b"\"a\\b\"",
        b"caf\xe9",
        b"\"caf\xe9\"",
        b"a\tb",
        long.as_bytes(),
        quoted_long.as_bytes(),
    ];
    for value in cases {
        let response = Request::post("/charges").header("Idempotency-Key", value).body("{}").send(&gate);
        let shown = value.escape_ascii().to_string();
        assert_eq!(response.status, 400, "{shown}: {}", response.show());
        response.expect_problem(400, "key-invalid");
        assert!(value.len() < 4 || !response.text().contains(&shown), "the problem shows the key");
    }
    // No HTTP at all, and so perhaps refused before anybody asks whether it is a key.
    for value in [&b"a\x7f"[..], b"\"a\x7fb\"", b"a\x01"] {
        let response = Request::post("/charges").header("Idempotency-Key", value).body("{}").send(&gate);
        assert_eq!(response.status, 400, "{}", response.show());
    }
    let two = Request::post("/charges").key("a").key("a").body("{}").send(&gate);
    two.expect_problem(400, "key-invalid");
    assert_eq!(upstream.runs(), 0);
    assert!(gate.records("").is_empty());
}

#[test]
fn keys_that_are_well_formed() {
    let (upstream, gate) = small();
    let longest = "x".repeat(255);
    let quoted = format!("\"{longest}y\"").replace("xy", "y");
    let cases = ["a", "0", "!#$%&'()*+-./:<=>?@[]^_`{|}~", "\"a,b;c\"", "\"\\\"\\\\\"", "A", &longest, &quoted];
    for (nth, key) in cases.into_iter().enumerate() {
        let response = gate.post("/charges", key, "{}");
        response.expect(200, "executed");
        assert_eq!(upstream.runs(), nth + 1, "{key}");
        assert_eq!(upstream.last().key().as_deref(), Some(key), "the key as it was sent");
    }
    // The same text, bare and quoted, is one key; another case is another key ("a" and "A" above).
    gate.post("/charges", "\"a\"", "{}").expect(200, "replayed");
    gate.post("/charges", "  a  ", "{}").expect(200, "replayed");
}

fn requiring(upstream: &Upstream) -> Plan {
    Gate::before(upstream).defaults("key = { required = true, max_length = 10 }")
}

#[test]
fn a_key_that_is_required() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = requiring(&upstream).start();
    let response: Response = Request::post("/charges").body("{}").send(&gate);
    response.expect_bare_problem(400, "key-missing");
    assert!(!response.head.has("idempotency-status"), "it carried no key: {}", response.show());
    gate.post("/charges", "12345678901", "{}").expect_problem(400, "key-invalid");
    assert_eq!(upstream.runs(), 0);
    gate.post("/charges", "1234567890", "{}").expect(200, "executed");
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"key-missing\""]), 1.0);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"key-invalid\""]), 1.0);
}

#[test]
fn slow_and_silent_clients_hold_nothing_up() {
    let (upstream, gate) = small();
    let _silent: Vec<Client> = (0..20).map(|_| Client::connect(gate.address)).collect();
    let mut slow = Client::connect(gate.address);
    for byte in Request::post("/charges").key("slow").body("{}").bytes() {
        slow.send([byte]);
    }
    slow.response().expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    eventually("both runs", || (upstream.runs() == 2).then_some(()));
}
