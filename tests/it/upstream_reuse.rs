//! Which requests share a connection to an upstream: bytes that an upstream sends behind an answer answer no other request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Client, Gate, H2, Reply, Request, Response, Upstream};

const EVIL: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL";

/// A request of one of two tenants.
fn request(tenant: &str, method: &str, key: &str) -> Request {
    let request = Request::new(method, "/charges").header("X-Api-Key", tenant);
    if key.is_empty() { request } else { request.key(key).header("Content-Length", "0") }
}

/// Thirty times, one tenant gets an answer that begins so, and the upstream sends the rest when another request has come on
/// the same connection: the moment at which it does the most harm. Without the rest that request is lost.
fn never_another_tenants(method: &'static str, head: &'static str, rest: &'static str) {
    let evil = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&evil);
    let upstream = Upstream::scripted(move |conn| {
        let Some(first) = conn.next() else { return };
        if first.head.get("x-api-key").as_deref() == Some("b") {
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nfor b"));
            return;
        }
        drop(conn.wire.send(head.as_bytes()));
        if conn.next().is_some() {
            counted.fetch_add(1, Ordering::SeqCst);
            drop(conn.wire.send(rest.as_bytes()));
        }
    });
    let gate = Gate::before(&upstream).start();
    // One connection of a client stays on one thread, and so do those to the upstream.
    let mut client = Client::connect(gate.address);
    for nth in 0..30 {
        let key = |name: &str| if method == "POST" { format!("{name}-{nth}") } else { String::new() };
        client.send(request("a", method, &key("a")).bytes());
        let first = client.try_response(method).expect("an answer");
        assert!(first.status < 400, "{}", first.show());
        let other = request("b", "POST", &format!("b-{nth}"));
        let answer = client.send(other.bytes()).response();
        answer.expect(200, "executed");
        assert_eq!(answer.text(), "for b", "try {nth}: {}", answer.show());
        let replay = client.send(other.bytes()).response();
        assert_eq!((replay.text(), &*replay.word()), ("for b".to_owned(), "replayed"));
    }
    assert_eq!(evil.load(Ordering::SeqCst), 0);
}

#[test]
fn a_body_behind_204_answers_no_other_request() {
    never_another_tenants("POST", "HTTP/1.1 204 No Content\r\nContent-Length: 39\r\n\r\n", EVIL);
}

#[test]
fn a_body_behind_304_answers_no_other_request() {
    never_another_tenants("GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 39\r\n\r\n", EVIL);
}

#[test]
fn a_body_behind_205_answers_no_other_request() {
    never_another_tenants("POST", "HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\nok", EVIL);
}

#[test]
fn a_body_behind_an_answer_to_head_answers_no_other_request() {
    never_another_tenants("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 39\r\n\r\n", EVIL);
}

#[test]
fn a_last_chunk_that_comes_late_answers_no_other_request() {
    let head = "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n";
    never_another_tenants("POST", head, "0\r\n\r\n");
}

#[test]
fn an_interim_answer_with_a_length_ends_the_reuse_of_its_connection() {
    let head = "HTTP/1.1 103 Early Hints\r\nContent-Length: 39\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let upstream = Upstream::start(move |_| Reply::raw(head));
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    for nth in 0..3 {
        client.send(format!("POST /charges HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\nIdempotency-Key: {nth}\r\nContent-Length: 0\r\n\r\n"));
        assert_eq!(client.response().text(), "ok");
    }
    assert_eq!(upstream.connections(), 3);
}

/// A close that the gate has not heard of yet costs no attempt.
#[test]
fn a_connection_that_the_upstream_has_closed_carries_no_attempt() {
    let (closed, counted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let closing = Arc::clone(&closed);
    let requests = Arc::clone(&counted);
    let upstream = Upstream::scripted(move |conn| {
        if conn.next().is_some() {
            requests.fetch_add(1, Ordering::SeqCst);
            drop(conn.wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"));
            conn.wire.stream.shutdown(std::net::Shutdown::Both).unwrap();
            closing.fetch_add(1, Ordering::SeqCst);
        }
    });
    let gate = Gate::before(&upstream).start();
    let mut client = Client::connect(gate.address);
    for nth in 1..=30 {
        let answer = client.send(request("a", "POST", &format!("k-{nth}")).bytes()).response();
        answer.expect(200, "executed");
        while closed.load(Ordering::SeqCst) < nth {
            std::thread::yield_now();
        }
    }
    assert_eq!(counted.load(Ordering::SeqCst), 30);
}

/// On which connection of the upstream each of these requests went. Without a key it is not protected.
fn connections(gate: &Gate, requests: &[(&str, &str)]) -> Vec<String> {
    let mut client = Client::connect(gate.address);
    let mut send = |nth: usize, caller: &str, key: &str| -> Response {
        let mut request = Request::post("/charges").header("Content-Length", "0");
        if !caller.is_empty() {
            request = request.header("Authorization", format!("Bearer {caller}"));
        }
        if !key.is_empty() {
            request = request.key(&format!("{key}-{nth}"));
        }
        client.send(request.bytes()).response()
    };
    requests.iter().enumerate().map(|(nth, (caller, key))| send(nth, caller, key).text()).collect()
}

const REQUESTS: [(&str, &str); 8] =
    [("a", "k"), ("a", "k"), ("b", "k"), ("a", "k"), ("a", ""), ("a", ""), ("", ""), ("", "")];

/// Which connections may carry these.
fn expected(reuse: &str) -> [&'static str; 8] {
    match reuse {
        // A caller's attempts and its unprotected requests use different connections.
        "caller" => ["1", "1", "2", "1", "3", "3", "4", "5"],
        _ => ["1", "2", "3", "4", "5", "6", "7", "8"],
    }
}

#[test]
fn a_connection_is_one_callers_or_one_requests() {
    for reuse in ["caller", "never"] {
        let upstream = Upstream::start(|request| Reply::ok(request.connection.to_string()));
        let gate = Gate::before(&upstream).upstream(&format!("reuse = \"{reuse}\"")).start();
        assert_eq!(connections(&gate, &REQUESTS), expected(reuse), "{reuse}");
    }
}

#[test]
fn a_connection_is_one_callers_or_one_requests_over_http_2_too() {
    for reuse in ["caller", "never"] {
        let opened = Arc::new(AtomicUsize::new(0));
        let upstream = H2::start(&[], move |mut conn| {
            let nth = (opened.fetch_add(1, Ordering::SeqCst) + 1).to_string();
            while let Some(stream) = conn.request() {
                conn.answer(stream, nth.as_bytes());
            }
        });
        let terms = format!("protocol = \"h2\", reuse = \"{reuse}\"");
        let gate = Gate::before_url(&upstream.url()).upstream(&terms).start();
        assert_eq!(connections(&gate, &REQUESTS), expected(reuse), "{reuse}");
    }
}

/// Where there are as many as there may be, one that is idle closes for a caller that may not use it.
#[test]
fn a_callers_connection_makes_room_for_anothers() {
    let terms = "reuse = \"caller\", max_connections = 1, connect_timeout = \"20s\"";
    let upstream = Upstream::start(|request| Reply::ok(request.connection.to_string()));
    let gate = Gate::before(&upstream).upstream(terms).start();
    assert_eq!(connections(&gate, &REQUESTS[..4]), ["1", "1", "2", "3"]);
    let upstream = H2::answering("ok");
    let gate = Gate::before_url(&upstream.url()).upstream(&format!("protocol = \"h2\", {terms}")).start();
    assert_eq!(connections(&gate, &REQUESTS[..4]), ["ok"; 4]);
    assert_eq!(upstream.connections(), 3);
}
