//! What the upstream gets: the client's request, and the headers that say how it came.

use std::time::Duration;

use crate::support::{Client, Gate, Reply, Request, Upstream, wire};

fn upstream() -> Upstream {
    Upstream::start(|_| Reply::ok("x"))
}

/// The names of the headers of a request, in order and in lower case.
fn names(request: &crate::support::upstream::Request) -> Vec<String> {
    request.head.fields.iter().map(|(name, _)| String::from_utf8_lossy(name).to_ascii_lowercase()).collect()
}

#[test]
fn the_request_arrives_as_it_was_sent() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let target = "/a%2Fb//c/../d;p=1?q=%20&q=2&&x=a+b%zz";
    let body: Vec<u8> = (0..=255).collect();
    let request = Request::new("PATCH", target)
        .header("Host", "Shop.Example:8443")
        .header("X-A", "1")
        .header("Cookie", "a=1")
        .header("X-B", b"caf\xe9")
        .header("X-A", "2")
        .header("Cookie", "b=2")
        .header("Accept-Encoding", "gzip;q=0.5, br")
        .header("User-Agent", "odd/1.0 (x; y)")
        .header("Authorization", "Bearer abc")
        .header("Content-Type", "application/octet-stream")
        .key("\"quoted,key\"")
        .body(body.clone());
    request.send(&gate).expect(200, "executed");
    let seen = upstream.last();
    assert_eq!(seen.start_line(), format!("PATCH {target} HTTP/1.1"));
    assert_eq!(seen.head.all("host"), [b"Shop.Example:8443"]);
    assert_eq!(seen.head.all("x-a"), [b"1", b"2"]);
    assert_eq!(seen.head.all("x-b"), [b"caf\xe9"]);
    assert_eq!(seen.head.all("idempotency-key"), [b"\"quoted,key\""], "the key as it was sent");
    assert_eq!(seen.head.get("user-agent").as_deref(), Some("odd/1.0 (x; y)"));
    assert_eq!(seen.head.get("accept-encoding").as_deref(), Some("gzip;q=0.5, br"));
    assert_eq!(seen.head.get("authorization").as_deref(), Some("Bearer abc"));
    assert_eq!(seen.head.all("content-length"), [b"256"]);
    assert_eq!(seen.body.bytes, body);
    let cookies: Vec<&[u8]> = seen.head.all("cookie");
    assert!(cookies == [&b"a=1"[..], b"b=2"] || cookies == [b"a=1; b=2"], "{cookies:?}");
}

#[test]
fn how_it_came_is_said() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    Request::post("/x").header("Host", "shop.example").key("k").body("{}").send(&gate).expect(200, "executed");
    let seen = upstream.last().head;
    assert_eq!(seen.all("x-forwarded-for"), [b"127.0.0.1"]);
    assert_eq!(seen.all("x-forwarded-proto"), [b"http"]);
    assert_eq!(seen.all("x-forwarded-host"), [b"shop.example"]);
    let via = seen.get("via").expect("a Via");
    assert!(via.starts_with("1.1 "), "{via}");
    let trace = seen.get("traceparent").expect("a traceparent");
    let parts: Vec<&str> = trace.split('-').collect();
    assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [2, 32, 16, 2], "{trace}");
    assert!(parts.iter().all(|part| part.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))), "{trace}");
    assert_ne!(parts[1], "0".repeat(32));
    assert_ne!(parts[2], "0".repeat(16));
}

#[test]
fn a_trace_is_continued() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let id = "4bf92f3577b34da6a3ce929d0e0e4736";
    let request = Request::post("/x").header("traceparent", format!("00-{id}-00f067aa0ba902b7-01"));
    request.header("tracestate", "a=1").key("k").body("{}").send(&gate).expect(200, "executed");
    let seen = upstream.last().head;
    assert_eq!(seen.all("traceparent").len(), 1);
    assert_eq!(seen.get("traceparent").unwrap().split('-').nth(1), Some(id));
    assert_eq!(seen.get("tracestate").as_deref(), Some("a=1"));
}

#[test]
fn each_attempt_has_a_token_of_its_own_and_a_clients_own_is_dropped() {
    let upstream = upstream();
    let routes = "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/protected/{*rest}\"\n\
                  [[routes]]\nname = \"pass\"\nmethods = [\"POST\"]\npath = \"/passed/{*rest}\"\nmode = \"pass\"\n";
    let gate = Gate::before(&upstream).routes(routes).start();
    let forged = |target: &str| Request::post(target).header("Idempotency-Attempt", "forged").body("{}");
    forged("/protected/a").key("k-1").send(&gate).expect(200, "executed");
    let first = upstream.last().head;
    forged("/protected/a").key("k-2").send(&gate).expect(200, "executed");
    let second = upstream.last().head;
    for head in [&first, &second] {
        assert_eq!(head.all("idempotency-attempt").len(), 1);
        let token = head.get("idempotency-attempt").unwrap();
        assert!(token.len() == 32 && token.chars().all(|c| c.is_ascii_hexdigit()), "{token}");
    }
    assert_ne!(first.get("idempotency-attempt"), second.get("idempotency-attempt"));
    // Not protected: without a key, by mode, and where no route matches.
    for request in [forged("/protected/a"), forged("/passed/a").key("k-3"), forged("/elsewhere").key("k-4")] {
        assert_eq!(request.send(&gate).status, 200);
        assert!(!upstream.last().head.has("idempotency-attempt"), "{}", upstream.last().start_line());
    }
    let token = first.get("idempotency-attempt").unwrap();
    assert!(!gate.log().contains(&token), "the token shows in the log");
    assert!(!gate.admin("GET", "/api/v1/records", None).text().contains(&token), "the token shows in the API");
}

#[test]
fn hop_by_hop_headers_stay_on_their_hop() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    for key in [true, false] {
        let request = Request::post("/x")
            .header("Connection", "keep-alive, X-Hop, x-other")
            .header("X-Hop", "1")
            .header("X-Other", "1")
            .header("Keep-Alive", "timeout=5")
            .header("TE", "gzip")
            .header("Proxy-Connection", "keep-alive")
            .header("Proxy-Authorization", "Basic eDp5")
            .header("HTTP2-Settings", "AAMAAABkAAQAAP__")
            .header("X-End", "1")
            .body("{}");
        let request = if key { request.key("k") } else { request };
        assert_eq!(request.send(&gate).status, 200);
        let names = names(&upstream.last());
        for hop in ["x-hop", "x-other", "keep-alive", "proxy-connection", "http2-settings"] {
            assert!(!names.contains(&hop.to_owned()), "{hop} went on: {names:?}");
        }
        assert!(!upstream.last().head.get("te").is_some_and(|te| te.contains("gzip")));
        assert!(names.contains(&"x-end".to_owned()));
    }
}

/// Nothing that a client lists in `Connection` can make its request another one.
#[test]
fn connection_cannot_strip_what_matters() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let listed =
        "Idempotency-Key, Authorization, X-Api-Key, Host, Content-Length, Transfer-Encoding, Idempotency-Attempt";
    let mut client = Client::connect(gate.address);
    let request = |key: &str| {
        format!(
            "POST /x HTTP/1.1\r\nHost: shop.example\r\nConnection: {listed}\r\nIdempotency-Key: {key}\r\n\
             Authorization: Bearer a\r\nX-Api-Key: b\r\nContent-Length: 2\r\n\r\n{{}}"
        )
    };
    client.send(request("k-1"));
    client.response().expect(200, "executed");
    let seen = upstream.last();
    for (name, value) in [
        ("host", "shop.example"),
        ("idempotency-key", "k-1"),
        ("authorization", "Bearer a"),
        ("x-api-key", "b"),
        ("content-length", "2"),
    ] {
        assert_eq!(seen.head.get(name).as_deref(), Some(value), "{name}");
    }
    assert_eq!(seen.body.bytes, b"{}");
    // The same request without the list has the same record.
    let plain = request("k-1").replace(&format!("Connection: {listed}\r\n"), "");
    let mut client = Client::connect(gate.address);
    client.send(plain);
    client.response().expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn chunked_bodies_arrive_whole() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(
        "POST /x HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n",
    );
    std::thread::sleep(Duration::from_millis(20));
    client.send("2\r\nde\r\n0\r\n\r\n");
    client.response().expect(200, "executed");
    let seen = upstream.last();
    assert_eq!(seen.body.bytes, b"abcde");
    assert!(seen.body.complete);
    // The same body with a length is the same request.
    Request::post("/x").header("Host", "a").key("k").body("abcde").send(&gate).expect(200, "replayed");
}

#[test]
fn expect_continue_is_answered_by_the_gate() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    client
        .send("POST /x HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n");
    let head = client.head();
    assert!(head.start.starts_with(b"HTTP/1.1 100"), "{:?}", String::from_utf8_lossy(&head.raw));
    client.send("body");
    client.response().expect(200, "executed");
    assert_eq!(upstream.last().body.bytes, b"body");
}

#[test]
fn http_1_0_clients() {
    let upstream =
        Upstream::start(|_| Reply::raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"));
    let gate = Gate::before(&upstream).start();
    for word in ["executed", "replayed"] {
        let mut client = Client::connect(gate.address);
        client.send("POST /x HTTP/1.0\r\nHost: a\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}");
        let response = client.response();
        response.expect(200, word);
        assert!(!response.head.has("transfer-encoding"), "{}", response.show());
        assert_eq!(response.text(), "abc");
    }
    assert_eq!(upstream.runs(), 1);
    assert!(upstream.last().start_line().ends_with("HTTP/1.1"));
}

#[test]
fn absolute_form_targets() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(
        "POST http://shop.example/x?y=1 HTTP/1.1\r\nHost: other.example\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n",
    );
    let response = client.response();
    // RFC 9112 section 3.2.2: the target's authority replaces Host. Refusing the contradiction is fine too.
    if response.status != 400 {
        response.expect(200, "executed");
        let seen = upstream.last();
        let host = seen.head.get("host");
        let absolute = seen.start_line().contains("http://shop.example/x?y=1");
        assert!(absolute || seen.start_line() == "POST /x?y=1 HTTP/1.1", "{}", seen.start_line());
        assert_eq!(host.as_deref(), Some("shop.example"));
    }
}

#[test]
fn header_counts_and_sizes_of_a_real_client() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let mut request = Request::post("/x").key("k").body("{}");
    for nth in 0..80 {
        request = request.header(&format!("X-H-{nth}"), "v".repeat(200));
    }
    request.send(&gate).expect(200, "executed");
    assert_eq!(names(&upstream.last()).iter().filter(|name| name.starts_with("x-h-")).count(), 80);
    assert!(wire::find(&upstream.last().head.raw, b"\r\n\r\n").is_some());
}

#[test]
fn trailers_arrive_without_what_no_client_may_say() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    for key in ["", "Idempotency-Key: k\r\n"] {
        let mut client = Client::connect(gate.address);
        client.send(format!(
            "POST /x HTTP/1.1\r\nHost: a\r\n{key}Trailer: X-Sum, Idempotency-Attempt\r\nTransfer-Encoding: chunked\r\n\r\n\
             1\r\na\r\n0\r\nX-Sum: 9\r\nIdempotency-Attempt: forged\r\n\r\n"
        ));
        assert_eq!(client.response().status, 200);
        let trailers = upstream.last().body.trailers;
        assert_eq!(trailers.len(), 1, "{trailers:?}");
        assert_eq!(trailers[0].1, b"9");
    }
}
