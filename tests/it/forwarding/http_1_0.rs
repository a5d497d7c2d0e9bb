//! Clients that speak HTTP/1.0.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::support::{Client, Gate, Reply, Upstream};

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

/// A close that ends an answer is announced (RFC 9112, 9.6), and no other request is waited for.
#[test]
fn an_http_1_0_client_is_promised_another_answer_only_where_this_one_has_a_length() {
    let upstream = Upstream::start(move |request| {
        let chunks = |trailer: &str, last: &str| {
            Reply::raw(format!(
                "HTTP/1.1 200 OK\r\n{trailer}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n{last}\r\n"
            ))
        };
        match request.start_line() {
            line if line.contains("/sized") => Reply::ok("abc"),
            line if line.contains("/none") => Reply::raw("HTTP/1.1 204 No Content\r\n\r\n"),
            line if line.contains("/closed") => Reply::raw("HTTP/1.1 200 OK\r\n\r\nabc").close(),
            line if line.contains("/trailed") => chunks("Trailer: X-T\r\n", "X-T: 1\r\n"),
            _ => chunks("", ""),
        }
    });
    let requests = |key: &str| {
        let key = if key.is_empty() { String::new() } else { format!("Idempotency-Key: {key}\r\n") };
        ["/chunked", "/trailed", "/closed", "/sized", "/none"].map(|path| ("POST", path, key.replace("{}", &path[1..])))
    };
    for policy in ["", "body = \"stream\"\n"] {
        let gate = Gate::before(&upstream).defaults(policy).start();
        // First answers, replays, a problem of the gate's, and what only passes through.
        let refused = [("POST", "/other", "Idempotency-Key: k-sized\r\n".to_owned())];
        let heads = ["/chunked", "/sized"].map(|path| ("HEAD", path, String::new()));
        let all = [&requests("k-{}")[..], &requests("k-{}"), &refused, &requests(""), &heads].concat();
        for (nth, (method, path, key)) in all.into_iter().enumerate() {
            let asked = format!(
                "{method} {path} HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n{key}Content-Length: 0\r\n\r\n"
            );
            let mut stream = TcpStream::connect(gate.address).expect("the gate listens");
            stream
                .write_all(format!("{asked}GET /last HTTP/1.0\r\nHost: a\r\n\r\n").as_bytes())
                .expect("the gate reads");
            let mut read = Vec::new();
            stream.read_to_end(&mut read).expect("an end");
            let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
            let head = text.split("\r\n\r\n").next().unwrap_or_default();
            let is_kept = text.matches("http/1.0 ").count() == 2;
            let says: Vec<_> = head.lines().filter(|line| line.starts_with("connection:")).collect();
            let case = format!("{policy}{nth} {path}: {text}");
            assert_eq!(says, [if is_kept { "connection: keep-alive" } else { "connection: close" }], "{case}");
            let has_end = method == "HEAD" || head.contains(" 204 ") || head.contains("\ncontent-length:");
            assert_eq!(is_kept, has_end, "{case}");
        }
    }
}
