//! A replay is the first answer again, byte for byte.

use std::time::{Duration, SystemTime};

use crate::support::{Client, Gate, Reply, Request, Response, Upstream};

/// Sends one request twice to a gate before this upstream answer. Holds that the second is the first again and that
/// the upstream ran once.
#[track_caller]
fn twice(raw: impl Into<Vec<u8>>) -> Response {
    let raw = raw.into();
    let (upstream, gate) = serving(move || Reply::raw(raw.clone()));
    let request = Request::post("/orders").key("k-1").header("TE", "trailers").header("Connection", "TE").body("{}");
    let first = request.send(&gate);
    let second = request.send(&gate);
    first.expect(first.status, "executed");
    second.expect(first.status, "replayed");
    first.expect_repeated_by(&second);
    assert_eq!(first.get("idempotency-expires"), second.get("idempotency-expires"));
    assert_eq!(upstream.runs(), 1);
    first
}

fn serving(reply: impl Fn() -> Reply + Send + Sync + 'static) -> (Upstream, Gate) {
    let upstream = Upstream::start(move |_| reply());
    let gate = Gate::before(&upstream).start();
    (upstream, gate)
}

#[test]
fn order_repeats_and_raw_values_of_headers() {
    let first = twice(
        b"HTTP/1.1 201 Created\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\nServer: legacy/0.1\r\nSet-Cookie: a=1; Path=/\r\n\
          X-Z: z\r\nSet-Cookie: b=2; HttpOnly\r\nETag: W/\"a,b\"\r\nLocation: /orders/7?x=%20y\r\nX-Raw: caf\xe9 \xff\x80\r\n\
          X-A:   spaced\tout  \r\nX-Empty:\r\nX-Z: again\r\nContent-Type: text/plain; charset=iso-8859-1\r\n\
          Content-Length: 4\r\n\r\ncaf\xe9",
    );
    // The lines of one name stand together; between different names order has no meaning (RFC 9110 section 5.3).
    let sent = [
        "date",
        "server",
        "set-cookie",
        "set-cookie",
        "x-z",
        "x-z",
        "etag",
        "location",
        "x-raw",
        "x-a",
        "x-empty",
        "content-type",
        "content-length",
    ];
    assert_eq!(first.names(), sent, "headers, and their order");
    assert_eq!(first.head.all("x-z"), [&b"z"[..], b"again"]);
    assert_eq!(first.head.all("date"), [b"Tue, 15 Nov 1994 08:12:31 GMT"]);
    assert_eq!(first.head.all("set-cookie"), [&b"a=1; Path=/"[..], b"b=2; HttpOnly"]);
    assert_eq!(first.head.all("x-raw"), [b"caf\xe9 \xff\x80"]);
    assert_eq!(first.head.all("x-a"), [b"spaced\tout"]);
    assert_eq!(first.head.all("x-empty"), [b""]);
    assert_eq!(first.body.bytes, b"caf\xe9");
}

#[test]
fn order_of_repeats_survives_a_restart() {
    let (upstream, gate) = serving(|| {
        Reply::raw("HTTP/1.1 200 OK\r\nA: 1\r\nB: 2\r\nA: 3\r\nC: 4\r\nB: 5\r\nContent-Length: 2\r\n\r\nok")
    });
    let first = gate.post("/orders", "k-1", "{}");
    first.expect(200, "executed");
    let gate = gate.stop().start();
    let second = gate.post("/orders", "k-1", "{}");
    second.expect(200, "replayed");
    first.expect_repeated_by(&second);
    let gate = gate.kill9().start();
    first.expect_repeated_by(&gate.post("/orders", "k-1", "{}"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_without_a_date_keeps_the_one_that_its_client_got() {
    let (upstream, gate) = serving(|| Reply::ok("x"));
    let first = gate.post("/orders", "k-1", "{}");
    // A date made up for each response would differ by the next second.
    std::thread::sleep(Duration::from_millis(1_100));
    first.expect_repeated_by(&gate.post("/orders", "k-1", "{}"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn binary_bodies() {
    let body: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let mut raw =
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n", body.len())
            .into_bytes();
    raw.extend(&body);
    assert_eq!(twice(raw).body.bytes, body);
}

#[test]
fn gzip_is_not_decoded() {
    // The gzip form of an empty file; it need not be valid for a gate that does not look.
    let body = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    let mut raw =
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nVary: Accept-Encoding\r\nContent-Length: 20\r\n\r\n".to_vec();
    raw.extend(body);
    let first = twice(raw);
    assert_eq!(first.body.bytes, body);
    assert_eq!(first.get("content-encoding").as_deref(), Some("gzip"));
}

#[test]
fn no_content() {
    let first = twice("HTTP/1.1 204 No Content\r\nX-Id: 7\r\n\r\n");
    assert_eq!((first.status, first.body.bytes.len()), (204, 0));
    assert!(!first.head.has("content-length"), "RFC 9110 section 8.6: {}", first.show());
}

#[test]
fn not_modified() {
    let first = twice("HTTP/1.1 304 Not Modified\r\nETag: \"v1\"\r\n\r\n");
    assert_eq!((first.status, first.body.bytes.len()), (304, 0));
    assert_eq!(first.get("etag").as_deref(), Some("\"v1\""));
}

#[test]
fn not_modified_with_the_length_of_what_it_stands_for() {
    let first = twice("HTTP/1.1 304 Not Modified\r\nETag: \"v1\"\r\nContent-Length: 1234\r\n\r\n");
    assert_eq!((first.status, first.body.bytes.len()), (304, 0));
}

#[test]
fn empty_bodies() {
    let first = twice("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(first.get("content-length").as_deref(), Some("0"));
    assert!(first.body.bytes.is_empty());
    assert!(twice("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").body.bytes.is_empty());
}

#[test]
fn chunked_answers() {
    let first = twice("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n");
    assert_eq!(first.body.bytes, b"abcdefg");
}

#[test]
fn trailers_of_a_chunked_answer() {
    let first = twice(
        "HTTP/1.1 200 OK\r\nTrailer: X-Sum, X-Note\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 12\r\n\
         X-Note: a\r\nX-Note: b\r\n\r\n",
    );
    assert_eq!(first.body.bytes, b"abc");
    let trailers: Vec<(String, &[u8])> = first
        .body
        .trailers
        .iter()
        .map(|(name, value)| (String::from_utf8_lossy(name).to_ascii_lowercase(), &value[..]))
        .collect();
    assert_eq!(trailers, [("x-sum".into(), &b"12"[..]), ("x-note".into(), b"a"), ("x-note".into(), b"b")]);
}

#[test]
fn trailers_that_the_upstream_did_not_announce_are_announced() {
    let first = twice(
        "HTTP/1.1 200 OK\r\nTrailer: X-A\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-A: 2\r\nX-B: 5\r\n\
         Idempotent-Replayed: true\r\n\r\n",
    );
    let names = |name: &[u8]| String::from_utf8_lossy(name).to_ascii_lowercase();
    let trailers: Vec<String> = first.body.trailers.iter().map(|(name, _)| names(name)).collect();
    assert_eq!(trailers, ["x-a", "x-b"], "{}", first.show());
}

#[test]
fn answers_that_end_with_the_connection() {
    let (upstream, gate) = serving(|| Reply::raw("HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nuntil the end").close());
    let first = gate.post("/orders", "k-1", "{}");
    first.expect(200, "executed");
    assert_eq!(first.text(), "until the end");
    first.expect_repeated_by(&gate.post("/orders", "k-1", "{}"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_reason_of_its_own() {
    let first = twice("HTTP/1.1 200 Fine By Me\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(first.line, "HTTP/1.1 200 Fine By Me");
}

#[test]
fn a_status_nobody_knows() {
    assert_eq!(twice("HTTP/1.1 299 Odd\r\nContent-Length: 0\r\n\r\n").status, 299);
}

#[test]
fn client_errors_and_redirects_are_answers() {
    for status in
        ["303 See Other", "400 Bad Request", "402 Payment Required", "404 Not Found", "409 Conflict", "422 No"]
    {
        let first = twice(format!("HTTP/1.1 {status}\r\nContent-Length: 4\r\nContent-Type: text/plain\r\n\r\nnope"));
        assert_eq!(first.text(), "nope");
    }
}

#[test]
fn hop_by_hop_headers_are_neither_given_nor_kept() {
    let first = twice(
        "HTTP/1.1 200 OK\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Stays: 1\r\n\
         Proxy-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok",
    );
    assert!(!first.head.has("x-hop"), "{}", first.show());
    assert!(first.head.has("x-stays"));
    assert!(!first.get("keep-alive").is_some_and(|value| value.contains("timeout=5")));
}

#[test]
fn the_upstreams_own_idempotency_headers_do_not_pass_for_the_gates() {
    let (upstream, gate) = serving(|| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nIdempotent-Replayed: true\r\nIdempotency-Status: replayed\r\n\
             Idempotency-Expires: Tue, 15 Nov 1994 08:12:31 GMT\r\nContent-Length: 0\r\n\r\n",
        )
    });
    let first = gate.post("/orders", "k-1", "{}");
    first.expect(200, "executed");
    assert_eq!(first.head.all("idempotency-status"), [b"executed"]);
    assert_eq!(first.head.all("idempotency-expires").len(), 1);
    let second = gate.post("/orders", "k-1", "{}");
    second.expect(200, "replayed");
    assert_eq!(second.head.all("idempotent-replayed"), [b"true"]);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_says_until_when_it_is_kept() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).defaults("ttl = \"2h\"").start();
    let expires = gate.post("/orders", "k-1", "{}").get("idempotency-expires").expect("an expiry");
    let left = httpdate::parse_http_date(&expires).expect("an HTTP-date").duration_since(SystemTime::now());
    let left = left.expect("in the future").as_secs();
    assert!((7_100..=7_201).contains(&left), "{left} s");
}

#[test]
fn interim_answers_are_no_answers() {
    let (upstream, gate) = serving(|| {
        Reply::raw(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 201 Created\r\n\
             Content-Length: 1\r\n\r\nx",
        )
    });
    let first = gate.post("/orders", "k-1", "{}");
    first.expect(201, "executed");
    assert!(!first.head.has("link"));
    first.expect_repeated_by(&gate.post("/orders", "k-1", "{}"));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn replays_on_one_connection_one_after_the_other() {
    let upstream = Upstream::start(|request| Reply::ok(format!("{} {}", request.start_line(), request.nth)));
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    for round in 0..3 {
        for path in ["/a", "/b"] {
            // The body of a request that is replayed must not be left on the wire, where it would be the next request.
            let body = "POST /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
            client.send(Request::post(path).key(path).body(body).bytes());
            let response = client.response();
            response.expect(200, if round == 0 { "executed" } else { "replayed" });
            assert!(response.text().starts_with(&format!("POST {path} ")), "{}", response.show());
        }
    }
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let upstream = Upstream::start(|request| {
        let reply = Reply::ok(request.start_line());
        if request.nth == 1 { reply.delay(Duration::from_millis(200)) } else { reply }
    });
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    let mut bytes = Vec::new();
    for (path, key) in [("/a", "1"), ("/b", "2"), ("/a", "1"), ("/c", "3")] {
        bytes.extend(Request::post(path).key(key).body("x").bytes());
    }
    client.send(bytes);
    for (path, word) in [("/a", "executed"), ("/b", "executed"), ("/a", "replayed"), ("/c", "executed")] {
        let response = client.response();
        response.expect(200, word);
        assert_eq!(response.text(), format!("POST {path} HTTP/1.1"));
    }
    assert_eq!(upstream.runs(), 3);
}
