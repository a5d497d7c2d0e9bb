//! Traffic that is not protected is not changed.

use std::io::{ErrorKind, Write as _};
use std::time::Duration;

use crate::support::wire::Framing;
use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually};

const PASS: &str = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n\
                    [[routes]]\nname = \"passed\"\nmethods = [\"POST\"]\npath = \"/passed\"\nmode = \"pass\"\n";

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).routes(PASS)
}

/// Requests that are not protected: no key, no route, another method, a route that passes. And whether each carries a key
/// that is ignored.
fn unprotected() -> Vec<(&'static str, Request, bool)> {
    vec![
        ("no key", Request::post("/orders").body("{}"), false),
        ("no key and no route", Request::post("/elsewhere").body("{}"), false),
        ("no route", Request::post("/elsewhere").key("k").body("{}"), true),
        ("a method that no route has", Request::new("PUT", "/orders").key("k").body("{}"), true),
        ("GET", Request::get("/orders").key("k"), true),
        ("a route that passes", Request::post("/passed").key("k").body("{}"), false),
    ]
}

#[test]
fn answers_are_not_changed() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 201 Made\r\nDate: Tue, 15 Nov 1994 08:12:31 GMT\r\nSet-Cookie: a=1\r\nX-A: 1\r\nSet-Cookie: b=2\r\n\
             Idempotency-Control-Not: 1\r\nContent-Length: 2\r\n\r\nok",
        )
    });
    let gate = plan(&upstream).start();
    for (what, request, is_ignored) in unprotected() {
        for run in 1..=2 {
            let before = upstream.runs();
            let response = request.send(&gate);
            assert_eq!(upstream.runs(), before + 1, "{what}, run {run}: not forwarded");
            assert_eq!((response.line.as_str(), response.text().as_str()), ("HTTP/1.1 201 Made", "ok"), "{what}");
            // The lines of one name stand together; order between names has no meaning (RFC 9110 section 5.3).
            let sent = ["date", "set-cookie", "set-cookie", "x-a", "idempotency-control-not", "content-length"];
            assert_eq!(response.names(), sent, "{what}: headers that were added, dropped or moved");
            assert_eq!(response.word(), if is_ignored { "ignored" } else { "" }, "{what}");
            assert_eq!(response.head.all("set-cookie"), [b"a=1", b"b=2"]);
            assert_eq!(response.get("date").as_deref(), Some("Tue, 15 Nov 1994 08:12:31 GMT"));
        }
    }
    assert!(gate.records("").is_empty());
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"passed\""]), 6.0);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"ignored\"", "route=\"-\""]), 6.0);
}

#[test]
fn requests_gain_only_the_forwarding_headers() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    for (what, request, _) in unprotected() {
        request.header("X-A", "1").header("Content-Type", "text/plain").send(&gate);
        let mut added: Vec<String> = upstream
            .last()
            .head
            .fields
            .iter()
            .map(|(name, _)| String::from_utf8_lossy(name).to_ascii_lowercase())
            .collect();
        let own = ["host", "x-a", "content-type", "content-length", "idempotency-key", "connection"];
        added.retain(|name| !own.contains(&name.as_str()));
        added.sort();
        assert_eq!(added, ["traceparent", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"], "{what}");
    }
}

#[test]
fn answers_arrive_while_the_upstream_still_sends() {
    // One for each request.
    let signals: Vec<_> = unprotected().iter().map(|_| Signal::new()).collect();
    let held = signals.clone();
    let upstream = Upstream::start(move |request| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n",
        )
        .pause_until(&held[request.nth - 1])
        .then("4\r\nlast\r\n0\r\n\r\n")
    });
    let gate = plan(&upstream).start();
    for ((what, request, _), signal) in unprotected().into_iter().zip(signals) {
        let mut client = Client::connect(gate.address);
        client.send(request.bytes());
        let head = client.head();
        assert!(head.start.starts_with(b"HTTP/1.1 200"), "{what}");
        client.wire.until(b"first").unwrap_or_else(|error| panic!("{what}: the first bytes are held back: {error}"));
        signal.open();
        client.wire.until(b"last").unwrap();
    }
}

#[test]
fn requests_arrive_while_the_client_still_sends() {
    let arrived = Signal::new();
    let arriving = arrived.clone();
    let upstream = Upstream::scripted(move |conn| {
        if conn.next_head().is_some() && conn.wire.until(b"first").is_ok() {
            arriving.open();
            let body = conn.wire.until(b"last");
            assert!(body.is_ok());
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"));
        }
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send("POST /orders HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n");
    arrived.wait();
    client.send("4\r\nlast\r\n0\r\n\r\n");
    assert_eq!(client.response().text(), "good");
}

#[test]
fn bodies_larger_than_any_limit_pass() {
    let body = "0123456789abcdef".repeat(1 << 21);
    let answer = body.clone();
    let upstream = Upstream::start(move |request| match request.body.complete {
        true => Reply::ok(&answer),
        false => Reply::default().close(),
    });
    let gate = plan(&upstream).start();
    let response = Request::post("/orders").body(body.clone()).send(&gate);
    assert_eq!(response.status, 200);
    assert!(response.body.bytes == body.as_bytes());
    assert!(upstream.last().body.bytes == body.as_bytes());
    let peak = gate.peak_memory();
    assert!(peak < 80 << 20, "{} MiB for a stream", peak >> 20);
}

#[test]
fn a_stream_that_breaks_off_breaks_off_at_the_client() {
    for (what, raw) in [
        ("chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"),
        ("sized", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfirst"),
    ] {
        let upstream = Upstream::start(move |_| Reply::raw(raw).pause(Duration::from_millis(50)).close());
        let gate = plan(&upstream).start();
        let mut client = Client::connect(gate.address);
        client.send(Request::get("/x").bytes());
        let response = client.try_response("GET").expect("a head");
        assert!(!response.body.complete, "{what}: passed off as complete");
        eventually("a line in the log", || gate.log().contains("the upstream broke off an answer").then_some(()));
    }
}

#[test]
fn trailers_pass() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Sum: 9\r\n\r\n",
        )
    });
    let gate = plan(&upstream).start();
    let response = Request::get("/x").header("TE", "trailers").header("Connection", "TE").send(&gate);
    assert_eq!(response.body.trailers.len(), 1, "{}", response.show());
    assert_eq!(response.body.trailers[0].1, b"9");
}

#[test]
fn head_has_a_length_and_no_body() {
    let upstream = Upstream::start(|_| Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nETag: \"a\"\r\n\r\n"));
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    for _ in 0..2 {
        client.send(Request::new("HEAD", "/x").bytes());
        let response = client.try_response("HEAD").expect("an answer");
        assert_eq!((response.status, response.get("content-length").as_deref()), (200, Some("1234")));
    }
    assert!(upstream.last().start_line().starts_with("HEAD /x"));
}

#[test]
fn options_of_everything_and_odd_methods() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let response = Request::new("OPTIONS", "*").send(&gate);
    if response.status == 200 {
        assert_eq!(upstream.last().start_line(), "OPTIONS * HTTP/1.1");
    } else {
        assert!((400..=501).contains(&response.status), "{}", response.show());
    }
    for method in ["PROPFIND", "DELETE", "get", "X-ODD"] {
        assert_eq!(Request::new(method, "/x").send(&gate).status, 200, "{method}");
        assert_eq!(upstream.last().start_line(), format!("{method} /x HTTP/1.1"));
    }
}

#[test]
fn expect_continue_passes() {
    let upstream = Upstream::start(|request| Reply::ok(request.body.bytes.clone()));
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send("POST /orders HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n");
    let head = client.head();
    assert!(head.start.starts_with(b"HTTP/1.1 100"), "{:?}", String::from_utf8_lossy(&head.raw));
    client.send("body");
    assert_eq!(client.response().text(), "body");
}

/// A client that sees no byte of an answer takes its request for one that never arrived, and may send it again by itself.
#[test]
fn the_head_of_an_answer_that_breaks_off_arrives() {
    for rest in ["", "half"] {
        let head = format!("HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 50\r\n\r\n{rest}");
        let upstream = Upstream::start(move |_| Reply::raw(head.clone()).close());
        let gate = plan(&upstream).start();
        for turn in 0..20 {
            let mut client = Client::connect(gate.address);
            client.send(Request::post("/passed").body("x").bytes());
            assert_eq!(client.head().get("x-a").as_deref(), Some("1"), "{turn}: {rest:?}");
        }
    }
}

#[test]
fn many_listeners() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let other = Upstream::free_address();
    let gate = plan(&upstream).server(&format!("listen = [\"127.0.0.1:0\", \"{other}\"]")).start();
    Request::post("/orders").key("k").body("{}").send(&gate).expect(200, "executed");
    let second = crate::support::eventually("the second listener", || {
        Request::post("/orders").key("k").body("{}").try_send(other)
    });
    second.expect(200, "replayed");
}

fn upgrading() -> Upstream {
    Upstream::scripted(|conn| {
        let Some(request) = conn.next_head() else { return };
        if request.head.get("upgrade").is_none() {
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
            return;
        }
        let answer =
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-A: 1\r\n\r\nhello ";
        drop(conn.wire.send(answer));
        while let Ok(bytes) = conn.wire.some() {
            if bytes.is_empty() || conn.wire.send(&bytes.to_ascii_uppercase()).is_err() {
                break;
            }
        }
    })
}

#[test]
fn upgrades_pass_both_ways() {
    let upstream = upgrading();
    let gate = plan(&upstream).start();
    for (method, path) in [("GET", "/socket"), ("POST", "/orders")] {
        let mut client = Client::connect(gate.address);
        client
            .send(format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"));
        let head = client.head();
        assert!(head.start.starts_with(b"HTTP/1.1 101"), "{:?}", String::from_utf8_lossy(&head.raw));
        assert_eq!(head.get("upgrade").as_deref(), Some("websocket"));
        assert_eq!(upstream.last().head.get("upgrade").as_deref(), Some("websocket"));
        assert_eq!(client.wire.until(b"hello ").unwrap(), b"hello ");
        for word in ["one", "two"] {
            client.send(word);
            let expected = word.to_ascii_uppercase();
            assert_eq!(client.wire.until(expected.as_bytes()).unwrap(), expected.as_bytes());
        }
    }
}

#[test]
fn other_protocols_pass_by_name_only() {
    let upgrade = |gate: &Gate, protocol: &str| {
        let mut client = Client::connect(gate.address);
        let ask = format!("GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n");
        client.send(ask);
        let head = client.head();
        String::from_utf8_lossy(&head.start).split(' ').nth(1).map(str::to_owned).expect("a status")
    };
    let upstream = upgrading();
    let gate = plan(&upstream).start();
    assert_eq!(upgrade(&gate, "echo"), "200", "it is ignored");
    assert_eq!(upgrade(&gate, "websocket"), "101");
    drop(gate);
    let gate = plan(&upstream).server("upgrades = []").start();
    assert_eq!(upgrade(&gate, "websocket"), "200");
    drop(gate);
    // The upstream switches to WebSocket, whatever it is asked for.
    let gate = plan(&upstream).server("upgrades = [\"echo\", \"websocket\"]").start();
    assert_eq!(upgrade(&gate, "echo"), "502");
    assert_eq!(upgrade(&gate, "echo, foo, websocket"), "101");
    assert_eq!(upstream.last().head.get("upgrade").as_deref(), Some("echo, websocket"));
}

#[test]
fn what_follows_an_upgrade_request_too_early_is_no_request() {
    // The upstream refuses to upgrade; bytes that the client sent ahead must not become a request of its own that
    // goes past the gate.
    let upstream = Upstream::scripted(|conn| {
        while conn.next().is_some() {
            if conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno").is_err() {
                break;
            }
        }
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(
        "GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\
         POST /orders HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n{}",
    );
    assert_eq!(client.response().status, 200);
    let second = client.try_response("POST");
    if let Some(second) = &second {
        second.expect(200, "executed");
    }
    // Whether there is an answer or not.
    let seen = upstream.seen();
    assert!(seen[0].start_line().starts_with("GET /socket "), "{}", seen[0].start_line());
    assert_eq!(seen.len(), 1 + usize::from(second.is_some()));
    for request in &seen[1..] {
        assert!(request.head.has("idempotency-attempt"), "it went past the gate");
    }
}

#[test]
fn an_upgrade_with_a_key_is_refused() {
    let upstream = upgrading();
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(
        "POST /orders HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nIdempotency-Key: k\r\n\
         Content-Length: 0\r\n\r\n",
    );
    client.response().expect_problem(400, "bad-request");
    assert_eq!(upstream.runs(), 0);
    assert!(gate.records("").is_empty());
}

#[test]
fn an_upgrade_whose_key_may_be_in_its_body_is_refused() {
    let upstream = upgrading();
    let gate = plan(&upstream).defaults("key = { from = [\"json:/id\", \"header:Idempotency-Key\"] }\n").start();
    let asks = |more: &str, body: &str| {
        let mut client = Client::connect(gate.address);
        client.send(format!(
            "POST /orders HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{more}\r\n{body}"
        ));
        client.response()
    };
    asks("Content-Length: 10\r\n", "{\"id\":\"b\"}").expect_bare_problem(400, "bad-request");
    asks("Transfer-Encoding: chunked\r\n", "a\r\n{\"id\":\"b\"}\r\n0\r\n\r\n").expect_bare_problem(400, "bad-request");
    asks("Content-Length: 0\r\nIdempotency-Key: k\r\n", "").expect_problem(400, "bad-request");
    assert_eq!(upstream.runs(), 0);
    assert_eq!(asks("", "").status, 101, "it has no body, and so no key");
}

#[test]
fn what_matches_no_route_goes_to_the_only_upstream() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let response = Request::post("/elsewhere").key("not valid, at all").body("{}").send(&gate);
    assert_eq!((response.status, response.word().as_str()), (200, "ignored"));
    assert_eq!(upstream.last().head.get("idempotency-key").as_deref(), Some("not valid, at all"));
}

#[test]
fn without_a_default_upstream_there_is_no_route() {
    let first = Upstream::start(|_| Reply::ok("first"));
    let second = Upstream::start(|_| Reply::ok("second"));
    let routes = format!(
        "[[routes]]\nname = \"a\"\nmethods = [\"POST\"]\npath = \"/a\"\nupstream = \"app\"\n\
         [[routes]]\nname = \"b\"\nmethods = [\"POST\"]\npath = \"/b\"\nupstream = \"other\"\n\
         [upstreams.other]\nurl = \"{}\"\n",
        second.url()
    );
    let gate = Gate::before(&first).routes(&routes).start();
    assert_eq!(gate.post("/a", "k", "{}").text(), "first");
    assert_eq!(gate.post("/b", "k", "{}").text(), "second");
    let response = Request::post("/c").key("k").body("{}").send(&gate);
    response.expect_bare_problem(404, "no-route");
    assert_eq!(response.word(), "ignored", "{}", response.show());
    let unkeyed = Request::post("/c").body("{}").send(&gate);
    assert!(!unkeyed.expect_bare_problem(404, "no-route").head.has("idempotency-status"), "{}", unkeyed.show());
    assert_eq!((first.runs(), second.runs()), (1, 1));
    drop(gate);
    let gate = Gate::before(&first).routes(&routes).top("default_upstream = \"other\"").start();
    assert_eq!(Request::get("/c").send(&gate).text(), "second");
}

#[test]
fn a_slow_reader_is_not_buffered_for() {
    // 64 MiB that nobody reads: the upstream must be slowed down, not the memory filled up.
    let upstream = Upstream::scripted(|conn| {
        if conn.next_head().is_some() {
            drop(conn.wire.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 64 << 20).as_bytes()));
            let chunk = vec![b'x'; 1 << 20];
            for _ in 0..64 {
                if conn.wire.send(&chunk).is_err() {
                    break;
                }
            }
        }
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::get("/big").bytes());
    client.head();
    std::thread::sleep(Duration::from_millis(700));
    let peak = gate.peak_memory();
    assert!(peak < 60 << 20, "{} MiB", peak >> 20);
    let body = client.wire.body(Framing::Sized(64 << 20));
    assert!(body.complete);
}

#[test]
fn an_upstream_that_reads_slowly_is_not_buffered_for() {
    const SIZE: usize = 64 << 20;
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::scripted(move |conn| {
        let Some(request) = conn.next_head() else { return };
        held.wait();
        let body = conn.wire.body(request.head.framing(Framing::None));
        let size = body.bytes.len().to_string();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{size}", size.len());
        drop(conn.wire.send(answer.as_bytes()));
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(format!("POST /passed HTTP/1.1\r\nHost: a\r\nContent-Length: {SIZE}\r\n\r\n"));
    let mut stream = client.wire.stream.try_clone().unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let piece = vec![b'x'; 64 << 10];
    let mut sent = 0;
    // Until nobody takes more.
    while sent < SIZE {
        match stream.write(&piece[..piece.len().min(SIZE - sent)]) {
            Ok(taken) => sent += taken,
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
                break;
            }
        }
    }
    assert!(sent < SIZE, "all of it was taken from the client, and the upstream has read nothing");
    let peak = gate.peak_memory();
    assert!(peak < 60 << 20, "{} MiB", peak >> 20);
    signal.open();
    stream.set_write_timeout(None).unwrap();
    for rest in vec![b'x'; SIZE - sent].chunks(piece.len()) {
        stream.write_all(rest).unwrap();
    }
    assert_eq!(client.response().text(), SIZE.to_string());
}

#[test]
fn events_arrive_one_by_one_as_the_upstream_sends_them() {
    const EVENTS: usize = 20;
    let seen: Vec<Signal> = (0..EVENTS).map(|_| Signal::new()).collect();
    let awaited = seen.clone();
    let upstream = Upstream::start(move |_| {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\r\n";
        let send = |reply: Reply, (nth, seen)| reply.then(format!("id: {nth}\ndata: x\n\n")).pause_until(seen);
        awaited.iter().enumerate().fold(Reply::raw(head), send).close()
    });
    let gate = plan(&upstream).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::get("/events").header("Accept", "text/event-stream").header("Last-Event-ID", "7").bytes());
    assert_eq!(client.head().get("content-type").as_deref(), Some("text/event-stream"));
    for (nth, seen) in seen.iter().enumerate() {
        // The next one is not sent before this one has arrived.
        client.wire.until(format!("id: {nth}\ndata: x\n\n").as_bytes()).expect("an event is held back");
        seen.open();
    }
    assert_eq!(upstream.last().head.get("last-event-id").as_deref(), Some("7"));
}

#[test]
fn a_long_poll_outlives_every_limit_of_a_client_that_says_nothing() {
    let upstream = Upstream::start(|_| Reply::ok("news").delay(Duration::from_millis(4_500)));
    let limits = "[limits]\nheader_timeout = \"2s\"\nidle_timeout = \"2s\"\nbody_timeout = \"2s\"\n";
    let gate = plan(&upstream).routes(&format!("{PASS}{limits}")).start();
    let mut client = Client::connect(gate.address);
    for _ in 0..2 {
        client.send(Request::get("/poll").bytes());
        assert_eq!(client.response().text(), "news");
    }
}
