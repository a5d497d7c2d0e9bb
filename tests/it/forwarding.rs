//! What the upstream gets: the client's request, and the headers that say how it came.

mod http_1_0;

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
    let listed = "Idempotency-Key, Authorization, X-Api-Key, Cookie, Host, Content-Length, Transfer-Encoding, Idempotency-Attempt";
    let mut client = Client::connect(gate.address);
    let request = |key: &str| {
        format!(
            "POST /x HTTP/1.1\r\nHost: shop.example\r\nConnection: {listed}\r\nIdempotency-Key: {key}\r\n\
             Authorization: Bearer a\r\nX-Api-Key: b\r\nCookie: c=d\r\nContent-Length: 2\r\n\r\n{{}}"
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
        ("cookie", "c=d"),
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
    // It is met: an upstream that would refuse it would have its refusal replayed to clients that do not expect anything.
    assert!(!upstream.last().head.has("expect"));
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
             1\r\na\r\n0\r\nX-Sum: 9\r\nIdempotency-Attempt: forged\r\nIdempotency_Attempt: forged\r\n\
             X_Forwarded_For: 192.0.2.1\r\nX.Api.Key: forged\r\n\r\n"
        ));
        assert_eq!(client.response().status, 200);
        let trailers = upstream.last().body.trailers;
        assert_eq!(trailers.len(), 1, "{trailers:?}");
        assert_eq!(trailers[0].1, b"9");
    }
}

/// A request as a load balancer passes it on.
fn passed_on(path: &str) -> Request {
    Request::post(path)
        .header("Host", "internal")
        .header("X-Forwarded-For", "6.6.6.6")
        .header("X-Forwarded-For", "203.0.113.9, 10.1.1.1")
        .header("X-Forwarded-Proto", "https")
        .header("X-Forwarded-Host", "shop.example")
        .header("Forwarded", "for=203.0.113.9;proto=https;host=shop.example, for=10.1.1.1")
        .body("{}")
}

const TRUSTED: &str = "trusted_proxies = [\"127.0.0.1\", \"10.0.0.0/8\"]\n";

#[test]
fn a_trusted_proxy_is_believed_and_added_to() {
    let upstream = upstream();
    let x_forwarded =
        [("x-forwarded-for", "6.6.6.6, 203.0.113.9, 10.1.1.1, 127.0.0.1"), ("x-forwarded-proto", "https")];
    let host = [("x-forwarded-host", "shop.example")];
    let forwarded =
        "for=203.0.113.9;proto=https;host=shop.example, for=10.1.1.1, for=127.0.0.1;host=\"internal\";proto=http";
    let rfc_7239 = [("forwarded", forwarded)];
    let x_forwarded = [&x_forwarded[..], &host].concat();
    for (style, expected) in [
        ("x-forwarded", x_forwarded.clone()),
        ("rfc7239", rfc_7239.to_vec()),
        ("both", [&x_forwarded[..], &rfc_7239].concat()),
    ] {
        let gate = Gate::before(&upstream).server(&format!("{TRUSTED}forwarded = \"{style}\"")).start();
        for request in [passed_on("/x").key(style), Request::get("/x"), passed_on("/y")] {
            let is_passed_on = request.bytes().starts_with(b"POST");
            assert_eq!(request.send(&gate).status, 200);
            let seen = upstream.last().head;
            assert_eq!(seen.all("host").len(), 1);
            if !is_passed_on {
                // What the proxy does not say, the gate does.
                let own = if style == "rfc7239" { "for=127.0.0.1;host=\"gate.test\";proto=http" } else { "127.0.0.1" };
                assert_eq!(seen.get(expected[0].0).as_deref(), Some(own), "{style}");
                continue;
            }
            for name in ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded"] {
                let values: Vec<&[u8]> =
                    expected.iter().filter(|(known, _)| *known == name).map(|(_, value)| value.as_bytes()).collect();
                assert_eq!(seen.all(name), values, "{style}: {name}");
            }
        }
    }
}

#[test]
fn others_are_not_believed() {
    let upstream = upstream();
    for trusted in ["", "trusted_proxies = [\"10.0.0.0/8\", \"::1\"]"] {
        let gate = Gate::before(&upstream).server(trusted).start();
        assert_eq!(passed_on("/x").send(&gate).status, 200);
        let seen = upstream.last().head;
        assert_eq!(seen.all("x-forwarded-for"), [b"127.0.0.1"]);
        assert_eq!(seen.all("x-forwarded-proto"), [b"http"]);
        assert_eq!(seen.all("x-forwarded-host"), [b"internal"]);
        assert!(!seen.has("forwarded"));
    }
}

/// Keys belong to the client behind the proxies, which cannot say that it is another.
#[test]
fn the_clients_address_is_the_nearest_that_is_not_trusted() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).server(TRUSTED).defaults("scope = [\"client-ip\"]").start();
    let send = |from: &str| Request::post("/x").header("X-Forwarded-For", from).key("k").body("{}").send(&gate).word();
    assert_eq!(send("203.0.113.9"), "executed");
    assert_eq!(send("203.0.113.9:4711, 10.9.9.9"), "replayed");
    assert_eq!(send("6.6.6.6, 203.0.113.9"), "replayed", "what the client wrote itself does not count");
    assert_eq!(send("203.0.113.10"), "executed");
    assert_eq!(send("[2001:db8::1]:80"), "executed");
    assert_eq!(send("2001:db8::1"), "replayed");
    // Where it cannot be known, it is the proxy that says so.
    assert_eq!(send("203.0.113.9, unknown"), "executed");
    assert_eq!(send("127.0.0.1"), "replayed");
    assert_eq!(upstream.runs(), 4);
    let untrusting = Gate::before(&upstream).defaults("scope = [\"client-ip\"]").start();
    for (from, word) in [("203.0.113.9", "executed"), ("203.0.113.10", "replayed")] {
        let request = Request::post("/x").header("X-Forwarded-For", from).key("k").body("{}");
        assert_eq!(request.send(&untrusting).word(), word);
    }
}

/// RFC 9110 section 7.6.3: the gate finds itself in `Via`, before it does anything else.
#[test]
fn a_gate_that_is_its_own_upstream_answers_at_once() {
    let address = Upstream::free_address();
    let gate =
        Gate::before_url(&format!("http://{address}")).server(&format!("listen = \"{address}\"\n{TRUSTED}")).start();
    let began = std::time::Instant::now();
    let keyed = Request::post("/x").key("k").body("{}").send(&gate);
    assert_eq!((keyed.status, keyed.word().as_str()), (508, "released"), "{}", keyed.show());
    assert_eq!(keyed.json()["code"], "loop-detected");
    assert!(keyed.text().contains("came by here before"), "{}", keyed.show());
    assert_eq!(keyed.json()["retryable"], false);
    let plain = Request::get("/x").send(&gate);
    assert_eq!((plain.status, plain.json()["code"].as_str()), (508, Some("loop-detected")));
    for answer in [keyed, plain] {
        assert!(!answer.head.has("idempotency-control"), "it is between gates: {}", answer.show());
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(gate.records("").is_empty(), "its key is free");
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"loop-detected\""]), 2.0);
}

#[test]
fn two_gates_in_a_circle_end_it() {
    let (one, other) = (Upstream::free_address(), Upstream::free_address());
    let gate = |at: std::net::SocketAddr, upstream: std::net::SocketAddr| {
        Gate::before_url(&format!("http://{upstream}")).server(&format!("listen = \"{at}\"")).start()
    };
    let (first, second) = (gate(one, other), gate(other, one));
    let answer = Request::post("/x").key("k").body("{}").send(&first);
    assert_eq!((answer.status, answer.word().as_str()), (508, "released"), "{}", answer.show());
    assert_eq!(first.records("").len() + second.records("").len(), 0);
}

#[test]
fn too_many_gates_are_a_loop_and_others_on_the_way_are_not() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let gates = |count: usize| (0..count).map(|nth| format!("1.1 oncegate-{nth}")).collect::<Vec<_>>().join(", ");
    let send = |via: &str| Request::post("/x").header("Via", via).body("{}").send(&gate);
    let answer = send(&gates(11));
    assert_eq!(answer.status, 508, "{}", answer.show());
    let problem = answer.json();
    assert_eq!(problem["code"], "loop-detected");
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains("more than ten gates")), "{problem}");
    assert_eq!(answer.get("idempotency-control").as_deref(), Some("release"));
    assert_eq!(upstream.runs(), 0);
    let proxies = ["1.1 proxy"; 30].join(", ");
    for via in [gates(10), proxies] {
        assert_eq!(send(&via).status, 200);
        let seen = upstream.last().head;
        let lines = seen.all("via");
        let all: Vec<String> = lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect();
        let (last, before) = all.split_last().expect("a Via");
        assert_eq!(before, [via], "what was there stays");
        assert!(last.starts_with("1.1 oncegate-") && last.len() > 20, "{last}");
    }
}

/// W3C Trace Context, section 4.3: what is not valid is begun anew, and its state goes with it.
#[test]
fn a_trace_that_is_not_valid_is_begun_anew() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let id = "4bf92f3577b34da6a3ce929d0e0e4736";
    for (given, goes_on) in [
        (format!("00-{id}-00f067aa0ba902b7-01"), true),
        (format!("42-{id}-00f067aa0ba902b7-01-more"), true),
        (format!("00-{id}-00f067aa0ba902b7-01-more"), false),
        (format!("ff-{id}-00f067aa0ba902b7-01"), false),
        (format!("00-{}-00f067aa0ba902b7-01", id.to_uppercase()), false),
        (format!("00-{id}-0000000000000000-01"), false),
        ("x".to_owned(), false),
    ] {
        let request = Request::post("/x").header("traceparent", &given).header("tracestate", "a=1").body("{}");
        assert_eq!(request.send(&gate).status, 200);
        let seen = upstream.last().head;
        assert_eq!(seen.all("traceparent").len(), 1);
        assert_eq!(seen.get("traceparent").unwrap() == given, goes_on, "{given}");
        assert_eq!(seen.has("tracestate"), goes_on, "{given}");
    }
}

/// CGI and its kin (RFC 3875, section 4.1.18) know `X_Forwarded_For` and `X-Forwarded-For` by one name.
#[test]
fn no_header_passes_for_another_by_an_underscore() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).defaults("scope = [\"header:X-Tenant\"]").start();
    for key in [true, false] {
        let request = Request::post("/x")
            .header("Host", "gate.test")
            .header("X_Forwarded_For", "6.6.6.6")
            .header("x-forwarded_proto", "https")
            .header("Idempotency_Key", "other")
            .header("Idempotency_Attempt", "forged")
            .header("Content_Length", "0")
            .header("Transfer_Encoding", "chunked")
            .header("X.Forwarded.Host", "evil.example")
            .header("X_Request_Id", "7")
            .header("X-Tenant", "a")
            .header("X_Tenant", "b")
            .body("{}");
        let request = if key { request.key("k") } else { request };
        assert_eq!(request.send(&gate).status, 200);
        let names = names(&upstream.last());
        let odd: Vec<_> = names.iter().filter(|name| name.contains(['_', '.'])).collect();
        assert_eq!(odd, ["x_request_id"], "the others would be taken for what they are not");
    }
}

/// RFC 9110 section 7.6.1: what is meant for every recipient is no connection option.
#[test]
fn connection_cannot_strip_what_the_gate_says_either() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).defaults("scope = [\"header:X-Tenant\"]").start();
    let names =
        "X-Forwarded-For, X-Forwarded-Proto, X-Forwarded-Host, Via, traceparent, Content-Type, Cookie, X-Tenant";
    for key in [true, false] {
        let request = Request::post("/x")
            .header("Connection", names)
            .header("Via", "1.1 before")
            .header("Cookie", "a=1")
            .header("X-Tenant", "a")
            .header("Content-Type", "text/plain")
            .body("{}");
        let request = if key { request.key("k") } else { request };
        assert_eq!(request.send(&gate).status, 200);
        let seen = upstream.last().head;
        for name in names.split(", ") {
            assert!(seen.has(name), "{name}");
        }
        assert_eq!(seen.all("via").len(), 2);
    }
}
