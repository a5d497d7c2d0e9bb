//! HTTP/2 by prior knowledge.

mod leaving;
mod pressure;
mod targets;
mod trailers;

use std::time::{Duration, Instant};

use http::Request;
use http_body_util::{BodyExt as _, StreamBody};

use crate::support::frames::{
    DATA, END_HEADERS, END_STREAM, Ending, Frames, GOAWAY, HEADERS, PREFACE, RST_STREAM, block, frame, request,
};
use crate::support::http2::{Http2, post};
use crate::support::{Client, Gate, Reply, Signal, Upstream};

const WHOLE: u8 = END_HEADERS | END_STREAM;

#[test]
fn requests_are_protected_as_by_http_1() {
    let upstream = Upstream::start(|request| match request.head.get("x-slow") {
        Some(_) => Reply::ok("slow").delay(Duration::from_millis(500)),
        None => Reply::status("201 Created\r\nSet-Cookie: a\r\nSet-Cookie: b", "made"),
    });
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    let first = client.post("/pay", "k", "10");
    first.expect(201, "executed");
    let replay = client.post("/pay", "k", "10");
    replay.expect(201, "replayed");
    assert_eq!((&first.body, replay.get("idempotent-replayed")), (&replay.body, "true"));
    assert_eq!(replay.headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["a", "b"]);
    client.post("/pay", "k", "11").expect(422, "key-reused");
    // A retry by another protocol is a retry.
    gate.post("/pay", "k", "10").expect(201, "replayed");
    assert_eq!(upstream.runs(), 1);
    let head = upstream.last().head;
    assert_eq!(head.get("host").as_deref(), Some("gate.test"));
    assert_eq!(head.get("x-forwarded-proto").as_deref(), Some("http"));
    assert!(head.get("via").is_some_and(|via| via.starts_with("2.0 oncegate-")), "{:?}", head.get("via"));
}

#[test]
fn a_request_that_is_reset_before_its_end_is_none() {
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let gate = Gate::before(&upstream).start();
    // Without an error, for a fault, given up.
    for code in [0_u32, 2, 8] {
        for path in ["/pay", "/upload"] {
            let mut client = Frames::connect(gate.address, &[]);
            let key: &[(&str, &[u8])] = if path == "/pay" { &[("idempotency-key", b"k")] } else { &[] };
            let method = if path == "/pay" { "POST" } else { "PUT" };
            let head = request(method, path, &[&[("content-length", &b"100"[..])], key].concat());
            // In one piece.
            let all = [
                frame(HEADERS, END_HEADERS, 1, &head),
                frame(DATA, 0, 1, b"{\"amount\": 10"),
                frame(RST_STREAM, 0, 1, &code.to_be_bytes()),
                frame(HEADERS, END_HEADERS | END_STREAM, 3, &request("GET", "/after", &[])),
            ];
            client.write(&all.concat()).unwrap();
            assert_eq!(client.ending(3), Ending::Status(200));
        }
    }
    assert!(upstream.seen().iter().all(|seen| seen.start_line().starts_with("GET /after ")));
    assert_eq!(gate.states("k"), [] as [&str; 0], "it has not claimed its key");
    gate.post("/pay", "k", "{\"amount\": 100}").expect(200, "executed");
}

#[test]
fn cookies_and_heads_arrive_as_http_1_has_them() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    let crumbs = Request::get("http://gate.test/a?b").header("cookie", "a=1").header("cookie", "b=2");
    client.send(crumbs.header("te", "trailers").body("").unwrap()).expect(200, "");
    let seen = upstream.last();
    assert_eq!(seen.start_line(), "GET /a?b HTTP/1.1");
    assert_eq!(seen.head.get("cookie").as_deref(), Some("a=1; b=2"));
    let head = client.send(Request::head("http://gate.test/").body("").unwrap());
    assert_eq!((head.status, head.get("content-length"), head.body.len()), (200, "1", 0));
}

#[test]
fn trailers_pass() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n1\r\nx\r\n0\r\nX-Sum: 7\r\n\r\n",
        )
    });
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    for word in ["executed", "replayed"] {
        let answer = client.post("/pay", "k", "");
        assert_eq!(answer.expect(200, word).trailers.as_ref().unwrap()["x-sum"], "7");
    }
    let answer = client.send(Request::get("http://gate.test/").body("").unwrap());
    assert_eq!(answer.trailers.unwrap()["x-sum"], "7");
}

/// A client may reset a stream that ends before its length.
#[test]
fn an_answer_without_content_has_no_length() {
    let upstream = Upstream::start(|_| Reply::raw("HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"));
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    let passed = client.send(Request::get("http://gate.test/pay").body("").unwrap());
    for (answer, word) in
        [(passed, ""), (client.post("/pay", "k", "10"), "executed"), (client.post("/pay", "k", "10"), "replayed")]
    {
        answer.expect(204, word);
        assert_eq!(answer.get("content-length"), "");
    }
}

#[test]
fn large_bodies_pass_both_ways() {
    let body = "0123456789abcdef".repeat(1 << 17);
    let answer = body.clone();
    let upstream = Upstream::start(move |_| Reply::ok(&answer));
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    for path in ["/protected", "/passed"] {
        let request = if path == "/passed" { post(path) } else { post(path).header("idempotency-key", "k") };
        let answer = client.send(request.body(body.clone()).unwrap());
        assert_eq!((answer.status, answer.body == body), (200, true));
        assert!(upstream.last().body.bytes == body.as_bytes());
    }
}

/// What would be another request, or none, by HTTP/1.1.
#[test]
fn what_is_no_sound_request_is_refused() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).server("").top("[limits]\nmax_headers = 20").start();
    let refused = Ending::Status(400);
    let malformed = Ending::Reset(1);
    let cases: &[(&str, Ending, Vec<u8>)] = &[
        ("white space before a value", refused, request("GET", "/", &[("a", b" b")])),
        ("white space behind a value", refused, request("GET", "/", &[("a", b"b\t")])),
        ("two lengths", refused, request("GET", "/", &[("content-length", b"0"), ("content-length", b"0")])),
        ("two hosts", refused, request("GET", "/", &[("host", b"gate.test"), ("host", b"gate.test")])),
        ("another host", refused, request("GET", "/", &[("host", b"other.test")])),
        ("a byte that is none of a path", refused, request("GET", "/\u{e9}", &[])),
        ("no host", refused, block(&[(":method", b"GET"), (":scheme", b"http"), (":path", b"/")])),
        ("CONNECT", refused, block(&[(":method", b"CONNECT"), (":authority", b"a:443")])),
        ("another scheme", refused, {
            block(&[(":method", b"GET"), (":scheme", b"ftp"), (":authority", b"gate.test"), (":path", b"/")])
        }),
        ("a user", refused, {
            block(&[(":method", b"GET"), (":scheme", b"http"), (":authority", b"u@gate.test"), (":path", b"/")])
        }),
        ("Connection", malformed, request("GET", "/", &[("connection", b"close")])),
        ("Transfer-Encoding", malformed, request("GET", "/", &[("transfer-encoding", b"chunked")])),
        ("Upgrade", malformed, request("GET", "/", &[("upgrade", b"websocket")])),
        ("Keep-Alive", malformed, request("GET", "/", &[("keep-alive", b"1")])),
        ("Proxy-Connection", malformed, request("GET", "/", &[("proxy-connection", b"close")])),
        ("TE", malformed, request("GET", "/", &[("te", b"gzip")])),
        ("a name in capitals", malformed, request("GET", "/", &[("A", b"b")])),
        ("a late pseudo-header", malformed, request("GET", "/", &[("a", b"b"), (":path", b"/x")])),
        ("a pseudo-header twice", malformed, request("GET", "/", &[(":path", b"/x")])),
        ("no path", malformed, request("GET", "", &[])),
        ("a line feed in a value", malformed, request("GET", "/", &[("a", b"b\nc: d")])),
        ("a nul in a value", malformed, request("GET", "/", &[("a", b"b\0")])),
        ("a space in the path", malformed, request("GET", "/a b", &[])),
        ("no scheme", malformed, block(&[(":method", b"GET"), (":authority", b"a"), (":path", b"/")])),
        ("a length that is not kept", malformed, request("POST", "/", &[("content-length", b"5")])),
    ];
    let mut go_on = 0;
    for (what, expected, head) in cases {
        let mut client = Frames::connect(gate.address, &[]);
        client.send(HEADERS, WHOLE, 1, head);
        let ending = client.ending(1);
        if (*expected, ending) == (malformed, Ending::GoAway(1)) {
            // More than is needed, and as good.
            continue;
        }
        assert_eq!(ending, *expected, "{what}");
        go_on += 1;
        // The connection goes on.
        client.send(HEADERS, WHOLE, 3, &request("GET", "/after", &[]));
        assert_eq!(client.ending(3), Ending::Status(200), "{what}");
    }
    assert_eq!(upstream.runs(), go_on, "only what came after");
    let mut client = Http2::connect(&gate);
    let many = (0..21).fold(post("/"), |post, nth| post.header(format!("x-{nth}"), "1"));
    assert_eq!(client.send(many.body("").unwrap()).status, 431);
    assert_eq!(client.send(post("/").header("expect", "more").body("").unwrap()).status, 417);
    // It carried a key, and hears what became of it.
    let keyed = client.send(post("/").header("expect", "more").header("idempotency-key", "k").body("").unwrap());
    assert_eq!((keyed.status, keyed.get("idempotency-status")), (417, "expectation-failed"));
    let large = post("/").header("x", "y".repeat(70_000)).body("").unwrap();
    assert!(client.try_send(large.map(|body| http_body_util::Full::from(body).boxed())).is_ok_and(|a| a.status == 431));
}

/// `100 Continue` does not come by HTTP/2: a client sends its body when it has waited.
#[test]
fn an_expectation_is_the_gates_to_meet() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    for key in [&[][..], &[("idempotency-key", &b"k"[..])]] {
        let mut client = Frames::connect(gate.address, &[]);
        let (runs, expects) = (upstream.runs(), [("expect", &b"100-continue"[..]), ("content-length", b"2")]);
        client.send(HEADERS, END_HEADERS, 1, &request("POST", "/x", &[&expects[..], key].concat())).is_read();
        assert_eq!(upstream.runs(), runs, "nothing of it has gone on");
        client.send(DATA, END_STREAM, 1, b"10");
        assert_eq!(client.ending(1), Ending::Status(200));
        assert_eq!(upstream.last().body.bytes, b"10");
        // Whoever is refused beforehand needs no body, and is told that nothing is wrong with the rest.
        let invalid = [&expects[..], &[("idempotency-key", b"a b")]].concat();
        client.send(HEADERS, END_HEADERS, 3, &request("POST", "/x", &invalid));
        assert_eq!(client.ending(3), Ending::Status(400));
        let reset = client.next_of(RST_STREAM).expect("a word that it is over");
        assert_eq!((reset.stream, reset.reason()), (3, 0));
    }
    assert_eq!(upstream.runs(), 2);
}

/// Half a preface is not waited for for ever, nor is silence.
#[test]
fn nobody_who_says_half_a_word_is_waited_for() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).top("[limits]\nheader_timeout = \"1s\"").start();
    for length in [0, 1, 3, 17, 23] {
        let began = Instant::now();
        let mut client = Client::connect(gate.address);
        client.send(&PREFACE[..length]);
        let answer = client.try_response("GET").map(|response| response.status);
        assert!(began.elapsed() < Duration::from_secs(10));
        // What would be a head of HTTP/1.1 by then is none.
        let expected = (length > 0).then_some(if length < 18 { 408 } else { 400 });
        assert_eq!(answer, expected, "{length} bytes");
    }
    // All of it, and nothing else; and a head that does not end.
    for more in [&b""[..], &[0, 0, 9, HEADERS, 0, 0, 0, 0, 1]] {
        let mut client = Frames::silent(gate.address);
        client.write(&[PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], more].concat()).unwrap();
        assert!(client.next_of(GOAWAY).is_some(), "it is told to leave");
        assert!(client.next_of(DATA).is_none(), "the connection ends");
    }
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn an_idle_connection_is_told_to_leave() {
    let upstream = Upstream::start(|_| Reply::ok("x").delay(Duration::from_millis(3000)));
    let gate = Gate::before(&upstream).top("[limits]\nidle_timeout = \"1500ms\"").start();
    let mut client = Frames::connect(gate.address, &[]);
    client.send(HEADERS, WHOLE, 1, &request("GET", "/", &[]));
    assert_eq!(client.ending(1), Ending::Status(200), "who waits for an answer is not idle");
    let goaway = client.next_of(GOAWAY).expect("a word of farewell");
    assert_eq!(goaway.payload[4..8], [0; 4], "nothing is wrong");
    assert!(client.next_of(DATA).is_none(), "the connection ends");
    assert!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"idle_timeout\""]) >= 1.0);
}

/// It cannot know, when it sends, that it was told to leave.
#[test]
fn what_crosses_with_the_farewell_is_answered() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    // Idle for longer than a client may take to go.
    let limits = "[limits]\nidle_timeout = \"2500ms\"\nbody_timeout = \"1s\"";
    let gate = Gate::before(&upstream).top(limits).start();
    for _ in 0..5 {
        let mut client = Frames::connect(gate.address, &[]);
        client.send(HEADERS, WHOLE, 1, &request("GET", "/", &[]));
        assert_eq!(client.ending(1), Ending::Status(200));
        client.next_of(GOAWAY).expect("a word of farewell");
        let told = Instant::now();
        client.send(HEADERS, WHOLE, 3, &request("GET", "/", &[]));
        let ending = client.ending(3);
        // Two seconds is what it has.
        if told.elapsed() < Duration::from_millis(1500) {
            assert_eq!(ending, Ending::Status(200));
            return;
        }
    }
    panic!("the machine is too slow for this");
}

#[test]
fn a_body_that_pauses_or_dribbles_is_given_up() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let limits = "[limits]\nbody_timeout = \"400ms\"\nmin_body_rate = 1000";
    let gate = Gate::before(&upstream).top(limits).start();
    for key in [&[][..], &[("idempotency-key", &b"k"[..])]] {
        let mut client = Frames::connect(gate.address, &[]);
        client.send(HEADERS, END_HEADERS, 1, &request("POST", "/x", key));
        client.send(DATA, 0, 1, b"some");
        // 408 is none of the static table.
        assert_eq!(client.ending(1), Ending::Status(0));
    }
    let mut client = Frames::connect(gate.address, &[]);
    client.send(HEADERS, END_HEADERS, 1, &request("POST", "/x", &[("idempotency-key", b"k")]));
    let mut dribbling = Frames { stream: client.stream.try_clone().unwrap() };
    let (began, done) = (Instant::now(), Signal::new());
    let is_done = done.clone();
    let dribble = std::thread::spawn(move || {
        for _ in 0..200 {
            if dribbling.write(&crate::support::frames::frame(DATA, 0, 1, b"x")).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        is_done.open();
    });
    assert_eq!(client.ending(1), Ending::Status(0));
    assert!(began.elapsed() < Duration::from_secs(8));
    drop(client.stream.shutdown(std::net::Shutdown::Both));
    done.wait();
    dribble.join().unwrap();
    assert_eq!(upstream.runs_of("k"), 0, "a request that is not whole claims nothing");
}

/// Whoever opens no window for an answer does not keep the upstream's connection.
#[test]
fn an_answer_that_nobody_takes_is_given_up() {
    let upstream = Upstream::start(|_| Reply::ok("x".repeat(1 << 20)));
    let gate = Gate::before(&upstream).top("[limits]\nbody_timeout = \"400ms\"").start();
    let mut client = Frames::connect(gate.address, &[(4, 0)]);
    client.send(HEADERS, WHOLE, 1, &request("GET", "/", &[]));
    client.send(HEADERS, WHOLE, 3, &request("POST", "/", &[("idempotency-key", b"k")]));
    for _ in 0..2 {
        let reset = client.next_of(RST_STREAM).expect("the stream is given up");
        assert!([1, 3].contains(&reset.stream));
    }
    assert!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"body_timeout\""]) >= 2.0);
}

#[test]
fn what_is_under_way_at_the_end_is_answered() {
    let go = Signal::new();
    let held = go.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let address = gate.address;
    let client = std::thread::spawn(move || {
        let mut client = Http2::connect(address);
        let answer = client.post("/pay", "k", "10");
        (answer.status, answer.get("idempotency-status").to_owned(), answer.body)
    });
    upstream.wait_for_runs(1);
    gate.sigterm();
    go.open();
    let (status, word, body) = client.join().unwrap();
    assert_eq!((status, &*word, &body[..]), (200, "executed", &b"late"[..]));
    gate.stop();
}

/// Bodies of unknown length are sent in chunks to an upstream of HTTP/1.1, with each method.
#[test]
fn bodies_without_a_length_are_chunked() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let routes = ["protect", "observe", "pass"].map(|mode| {
        format!(
            "[[routes]]\nname = \"{mode}\"\nmethods = [\"GET\", \"HEAD\", \"POST\"]\npath = \"/{mode}\"\nmode = \"{mode}\"\n"
        )
    });
    let gate = Gate::before(&upstream).routes(&routes.concat()).start();
    let mut client = Http2::connect(&gate);
    for method in ["POST", "GET", "HEAD", "DELETE"] {
        for path in ["unrouted", "protect", "observe", "pass"] {
            let pieces = ["a", "b", "c"].map(|piece| Ok(http_body::Frame::data(bytes::Bytes::from(piece))));
            let body = StreamBody::new(futures_util::stream::iter(pieces)).boxed();
            let request = Request::builder().method(method).uri(format!("http://gate.test/{path}"));
            let answer = client.try_send(request.body(body).unwrap()).unwrap();
            assert_eq!(answer.status, 200, "{method} {path}");
            let (seen, chunked) = (upstream.last(), Some("chunked".to_owned()));
            let arrived = (&seen.body.bytes[..], seen.head.get("transfer-encoding"));
            assert_eq!(arrived, (&b"abc"[..], chunked), "{method} {path}");
        }
    }
    // Some clients end a request without a body by a frame of its own. An upstream may take chunks of a GET for another request.
    for method in ["GET", "HEAD"] {
        let body =
            StreamBody::new(futures_util::stream::iter([Ok(http_body::Frame::data(bytes::Bytes::new()))])).boxed();
        let request = Request::builder().method(method).uri("http://gate.test/unrouted");
        assert_eq!(client.try_send(request.body(body).unwrap()).unwrap().status, 200, "{method}");
        assert_eq!(upstream.last().head.get("transfer-encoding"), None, "{method}");
    }
}

/// Some clients take a reset behind an answer for a failure of the answer.
#[test]
fn a_request_that_is_refused_before_its_body_came_is_not_reset() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let mut client = Frames::connect(gate.address, &[]);
    client.send(HEADERS, END_HEADERS, 1, &request("POST", "/pay", &[("idempotency-key", b"a b")]));
    assert_eq!(client.ending(1), Ending::Status(400));
    client.body(1);
    client.send(DATA, END_STREAM, 1, b"{}").send(HEADERS, WHOLE, 3, &request("GET", "/after", &[]));
    let next = client.next_of_any_stream().expect("an answer");
    assert_eq!((next.stream, next.kind), (3, HEADERS), "{next:?}");
    // One that goes on is.
    client.send(HEADERS, END_HEADERS, 5, &request("POST", "/pay", &[("idempotency-key", b"a b")]));
    assert_eq!(client.ending(5), Ending::Status(400));
    client.body(5);
    assert_eq!(client.ending(5), Ending::Reset(0));
    assert_eq!(upstream.runs(), 1);
}
