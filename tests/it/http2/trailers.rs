//! The trailers of a request go on whole, or the request does not run.

use crate::support::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, Ended, Ending, Frames, HEADERS, block, frame, request,
};
use http_body_util::BodyExt as _;

use crate::support::http2::{Http2, post};
use crate::support::service::{Asked, Service};
use crate::support::{Client, Gate, Reply, Upstream, eventually};

const PROTOCOL_ERROR: u32 = 1;

/// `x` with 4,000 bytes, into the dynamic table; and that line from there.
fn known() -> Vec<u8> {
    [&[0x40, 1, b'x', 127, 0xa1, 0x1e][..], &[b'y'; 4000]].concat()
}

const AGAIN: u8 = 0xBE;

/// Begins a request with a key and a body.
fn begin(client: &mut Frames, stream: u32) {
    client.send(HEADERS, END_HEADERS, stream, &request("POST", "/pay", &[("idempotency-key", b"k")]));
    client.send(DATA, 0, stream, b"abc");
}

/// The h2 crate stops at the limit on a header list, and passes on what it has of trailers.
#[test]
fn trailers_that_are_too_large_are_refused_whole() {
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let gate = Gate::before(&upstream).start();
    let mut client = Frames::connect(gate.address, &[]);
    // As large as the limit, beyond that of h2, and far beyond.
    for (nth, (count, last)) in (0..).zip([(3, 4100), (17, 10), (60, 10)]) {
        let stream = 2 * nth + 1;
        begin(&mut client, stream);
        let lines = [known(), vec![AGAIN; count], block(&[("x-last", &vec![b'z'; last])])].concat();
        client.send(HEADERS, END_HEADERS | END_STREAM, stream, &lines);
        assert_eq!(client.ending(stream), Ending::Status(0), "{count}");
        let (problem, ended) = client.body(stream);
        let problem = String::from_utf8_lossy(&problem);
        assert!(problem.contains("urn:oncegate:problem:headers-too-large") && ended == Ended::Whole, "{problem}");
    }
    assert_eq!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"max_header_size\""]), 3.0);
    // More than a frame.
    for (stream, size) in [(7, 16_300), (9, 50_000), (11, 90_000)] {
        begin(&mut client, stream);
        let lines = block(&[("x-first", b"1"), ("x-large", &vec![b'y'; size]), ("x-last", b"2")]);
        let mut parts = lines.chunks(16_000).enumerate().peekable();
        let mut frames = Vec::new();
        while let Some((nth, part)) = parts.next() {
            let end = if parts.peek().is_none() { END_HEADERS } else { 0 };
            let (kind, flags) = if nth == 0 { (HEADERS, END_STREAM) } else { (CONTINUATION, 0) };
            frames.extend(frame(kind, flags | end, stream, part));
        }
        client.write(&frames).unwrap();
        assert_eq!(client.ending(stream), Ending::Reset(PROTOCOL_ERROR), "{size}");
    }
    assert_eq!(upstream.runs(), 0);
    // The connection goes on, and the key is free.
    begin(&mut client, 13);
    client.send(HEADERS, END_HEADERS | END_STREAM, 13, &block(&[("x-small", &[b'y'; 16_000])]));
    assert_eq!(client.ending(13), Ending::Status(200));
    assert_eq!(upstream.last().body.trailers, [(b"x-small".to_vec(), vec![b'y'; 16_000])]);
}

#[test]
fn trailers_with_a_pseudo_header_end_the_connection() {
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let gate = Gate::before(&upstream).start();
    let lines: [&[(&str, &[u8])]; 6] = [
        &[(":path", b"/b"), ("x-t", b"1")],
        &[(":method", b"GET")],
        &[(":status", b"200")],
        &[(":authority", b"other.test")],
        &[(":scheme", b"https")],
        &[(":unknown", b"1")],
    ];
    let from_tables: [&[u8]; 2] = [b"\x84", b"\x02\x03PUT"];
    for trailers in lines.map(block).iter().map(Vec::as_slice).chain(from_tables) {
        let mut client = Frames::connect(gate.address, &[]);
        begin(&mut client, 1);
        client.send(HEADERS, END_HEADERS | END_STREAM, 1, trailers);
        assert_eq!(client.ending(1), Ending::GoAway(PROTOCOL_ERROR), "{trailers:?}");
    }
    assert_eq!(upstream.runs(), 0);
    // Once a minute.
    let said = "ended a connection over HTTP/2 with all its requests: its client broke the protocol\",\"client\":\"127.0.0.1\",\"error\":\"PROTOCOL_ERROR";
    eventually("it is said", || gate.log().contains(said).then_some(()));
    assert_eq!(gate.log().matches(said).count(), 1, "{}", gate.log());
}

/// What h2 refuses by itself gets no problem, and does not count.
#[test]
fn a_head_above_a_low_limit_gets_a_problem() {
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let gate = Gate::before(&upstream).top("[limits]\nmax_header_size = 2048").start();
    let mut client = Http2::connect(&gate);
    let of = |size: usize| post("/pay").header("idempotency-key", "k").header("x", "y".repeat(size)).body("").unwrap();
    let refused = client.send(of(2000));
    assert_eq!((refused.status, refused.get("idempotency-status")), (431, "headers-too-large"));
    assert_eq!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"max_header_size\""]), 1.0);
    client.send(of(1700)).expect(200, "executed");
}

/// h2 sends no message with a trailer that is for one connection, and does not end its stream either: the client would wait for the
/// timeout.
#[test]
fn a_trailer_for_one_connection_does_not_reach_http_2() {
    let service = Service::start(|_: &Asked| (200, vec![], "x", vec![]));
    let gate = Gate::before_url(&service.url()).upstream("protocol = \"h2\"").start();
    for key in ["", "Idempotency-Key: k\r\n"] {
        let mut client = Client::connect(gate.address);
        client.send(format!(
            "POST /x HTTP/1.1\r\nHost: a\r\n{key}Trailer: Keep-Alive, X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n\
             1\r\na\r\n0\r\nKeep-Alive: v\r\nUpgrade: x\r\nX-Sum: 9\r\n\r\n"
        ));
        assert_eq!(client.response().status, 200, "{key:?}");
    }
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum, Keep-Alive\r\n\r\n1\r\nx\r\n0\r\nKeep-Alive: v\r\n\
             X-Sum: 7\r\n\r\n",
        )
    });
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    for word in ["executed", "replayed"] {
        let answer = client.post("/pay", "k", "");
        assert_eq!(answer.expect(200, word).trailers.as_ref().unwrap()["x-sum"], "7");
    }
}

/// Over HTTP/1.1 trailers come behind chunks, which have no length.
#[test]
fn announced_trailers_of_a_request_with_a_length_reach_http_1() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let mut client = Http2::connect(&gate);
    for length in [3, 100_000] {
        let data = bytes::Bytes::from(vec![b'a'; length]);
        let trailers =
            http::HeaderMap::from_iter([(http::HeaderName::from_static("x-sum"), http::HeaderValue::from_static("9"))]);
        let frames = [Ok(http_body::Frame::data(data)), Ok(http_body::Frame::trailers(trailers))];
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(frames)).boxed();
        let request =
            http::Request::post("http://gate.test/x").header("content-length", length).header("trailer", "x-sum");
        assert_eq!(client.try_send(request.body(body).unwrap()).unwrap().status, 200);
        let seen = upstream.last();
        assert_eq!((seen.body.bytes.len(), seen.head.get("content-length")), (length, None));
        assert_eq!(seen.body.trailers, [(b"x-sum".to_vec(), b"9".to_vec())]);
    }
}
