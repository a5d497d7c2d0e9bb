//! Requests and answers keep their meaning on HTTP/2, and each upstream gets the protocol that it speaks.

use std::time::Duration;

use super::{PROTOCOL, all_are_paid};
use crate::support::h2::{DATA, END_HEADERS, END_STREAM, HEADERS, SETTINGS};
use crate::support::http2::{self, Http2};
use crate::support::https::Certificates;
use crate::support::{Client, Gate, H2, Reply, Request, Service, Signal, Terms, Tls, Upstream, eventually};

#[test]
fn a_request_is_the_same_without_what_belongs_to_its_connection() {
    let service = Service::start(|_| (200, vec![], "paid", vec![]));
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    let mut client = Client::connect(gate.address);
    for key in ["", "Idempotency-Key: k\r\n"] {
        client.send(format!(
            "POST /a%20b?c=d HTTP/1.1\r\nHost: shop.example:81\r\n{key}Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\n\
             Keep-Alive: 5\r\nX-A: 1\r\nX-A: 2\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n\
             3\r\nall\r\n0\r\nX-Sum: 6\r\n\r\n"
        ));
        assert_eq!(client.response().text(), "paid");
    }
    let asked = service.asked();
    assert_eq!(asked.len(), 2);
    for asked in asked {
        assert_eq!((&*asked.method, &*asked.target), ("POST", "http://shop.example:81/a%20b?c=d"));
        assert_eq!(asked.body, "all");
        assert_eq!(asked.trailers.unwrap()["x-sum"], "6");
        assert_eq!(asked.headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2"]);
        for name in ["host", "connection", "x-mine", "keep-alive", "transfer-encoding"] {
            assert!(!asked.headers.contains_key(name), "{name}");
        }
        assert!(asked.headers.get("te").is_none_or(|te| te == "trailers"));
    }
}

#[test]
fn answers_without_a_body_and_with_trailers_are_kept_as_they_are() {
    let service = Service::start(|asked| match asked.target.rsplit('/').next() {
        Some("none") => (204, vec![("x-a", "1")], "", vec![]),
        Some("same") => (304, vec![("etag", "\"v\"")], "", vec![]),
        Some("head") => (200, vec![("content-length", "4")], "", vec![]),
        _ => (
            200,
            vec![("trailer", "x-sum"), ("set-cookie", "a=1"), ("set-cookie", "b=2")],
            "paid",
            vec![("x-sum", "6")],
        ),
    });
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    for (path, status) in [("/none", 204), ("/same", 304), ("/trailed", 200)] {
        let post = || Request::post(path).key(path).header("TE", "trailers").body("{}").send(&gate);
        let first = post();
        first.expect(status, "executed");
        first.expect_repeated_by(&post());
        let passed = Request::get(path).header("TE", "trailers").send(&gate);
        assert_eq!((passed.status, passed.text()), (status, first.text()), "{}", passed.show());
        if status == 200 {
            assert_eq!(first.body.trailers.len(), 1, "{}", first.show());
            assert_eq!(passed.body.trailers.len(), 1, "{}", passed.show());
            assert_eq!(passed.head.all("set-cookie"), [b"a=1", b"b=2"]);
        }
    }
    let head = Request::new("HEAD", "/head").send(&gate);
    assert_eq!((head.status, head.get("content-length").as_deref()), (200, Some("4")), "{}", head.show());
}

/// Over HTTP/1.1 such an answer ends at its head. A client that got data on HTTP/2 would reset the stream, at each replay again.
#[test]
fn data_of_an_answer_that_has_no_content_are_dropped() {
    for (status, head, body) in [(204, 0x89, "buffer"), (304, 0x8b, "stream")] {
        let upstream = H2::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                // A 304 may have a length, which is that of the answer that it stands for: literal, with the indexed name 28.
                let length: &[u8] = if status == 304 { b"\x0f\x0d\x014" } else { b"" };
                conn.send(HEADERS, END_HEADERS, stream, &[&[head], length].concat());
                conn.send(DATA, 0, stream, b"da");
                conn.send(DATA, END_STREAM, stream, b"ta");
            }
        });
        let gate = super::before(&upstream).defaults(&format!("body = \"{body}\"\n")).start();
        let mut client = Http2::connect(&gate);
        let passed = client.send(http2::post("http://gate.test/pay").body("10").unwrap());
        for (answer, word) in
            [(passed, ""), (client.post("/pay", "k", "10"), "executed"), (client.post("/pay", "k", "10"), "replayed")]
        {
            answer.expect(status, word);
            let length = if status == 304 { "4" } else { "" };
            assert_eq!((answer.get("content-length"), &*answer.body), (length, b"".as_slice()), "{status} {word}");
        }
        let replayed = gate.post("/pay", "k", "10");
        assert_eq!((replayed.status, replayed.text()), (status, String::new()), "{}", replayed.show());
    }
}

#[test]
fn an_encrypted_upstream_chooses_what_is_spoken() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("server", "subjectAltName=IP:127.0.0.1");
    let at = certificates.directory();
    let (http1, h2) = (Upstream::start(|_| Reply::ok("one")), Service::start(|_| (200, vec![], "two", vec![])));
    for (behind, offered, protocol, expected) in [
        (h2.address, &["h2", "http/1.1"][..], "auto", "two"),
        (h2.address, &["h2"], "auto", "two"),
        (h2.address, &["h2", "http/1.1"], "h2", "two"),
        (http1.address, &["http/1.1"], "auto", "one"),
        (http1.address, &[], "auto", "one"),
        (http1.address, &["h2", "http/1.1"], "http1", "one"),
        (http1.address, &["http/1.1"], "h2", "upstream-unreachable"),
        (http1.address, &[], "h2", "upstream-unreachable"),
        (h2.address, &["h2"], "http1", "upstream-unreachable"),
    ] {
        let tls = Tls::before(behind, Terms { protocols: offered, ..Terms::of(at, "server") });
        let settings = format!("protocol = \"{protocol}\", tls = {{ ca = {:?} }}", at.join("ca.pem"));
        let gate = Gate::before_url(&tls.url()).upstream(&settings).start();
        let mut client = Client::connect(gate.address);
        // Without a key: an attempt goes to no connection that nothing was heard of for a second.
        for _ in 0..3 {
            let answer = client.send(Request::post("/charges").body("{}").bytes()).response();
            let told =
                if answer.status == 200 { answer.text() } else { answer.json()["code"].as_str().unwrap().into() };
            assert_eq!(told, expected, "{offered:?} {protocol}: {}", answer.show());
        }
        assert!(tls.agreed() == 1 || expected == "upstream-unreachable", "connections are kept");
    }
    assert!(h2.asked().iter().all(|asked| asked.target.starts_with("https://")));
}

#[test]
fn an_upgrade_goes_by_a_protocol_that_has_it() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("server", "subjectAltName=IP:127.0.0.1");
    let at = certificates.directory();
    let ask = b"GET /chat HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    let switched = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nhello";
    let upstream = Upstream::start(move |_| Reply::raw(switched));
    let tls = Tls::before(upstream.address, Terms { protocols: &["h2", "http/1.1"], ..Terms::of(at, "server") });
    let settings = format!("tls = {{ ca = {:?} }}", at.join("ca.pem"));
    let gate = Gate::before_url(&tls.url()).upstream(&settings).start();
    let mut client = Client::connect(gate.address);
    assert!(client.send(ask).head().start.starts_with(b"HTTP/1.1 101"));
    assert_eq!(client.wire.until(b"hello").unwrap(), b"hello");
    // And where there is none, the request is an ordinary one.
    let service = Service::start(|_| (426, vec![], "no", vec![]));
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    assert_eq!(Client::connect(gate.address).send(ask).response().status, 426);
    assert!(!service.asked()[0].headers.contains_key("upgrade"));
}

#[test]
fn a_body_of_the_client_that_is_malformed_is_the_clients() {
    let upstream = H2::start(&[], |mut conn| conn.rest());
    let gate = Gate::before_url(&upstream.url()).upstream(PROTOCOL).start();
    let mut client = Client::connect(gate.address);
    client.send("PUT /file HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nall\r\n");
    eventually("the request", || (upstream.connections() == 1).then_some(()));
    client.send("nonsense\r\n");
    client.response().expect_bare_problem(400, "bad-request");
}

#[test]
fn who_finds_no_room_waits_for_it_and_is_told_where_there_is_none() {
    let (arrived, go_on) = (Signal::new(), Signal::new());
    let (seen, held) = (arrived.clone(), go_on.clone());
    // One at a time.
    let upstream = H2::start(&[0, 3, 0, 0, 0, 1], move |mut conn| {
        while let Some(stream) = conn.request() {
            seen.open();
            held.wait();
            conn.answer(stream, b"paid");
        }
    });
    let settings = format!("{PROTOCOL}, max_connections = 1, connect_timeout = \"3s\"");
    let gate = Gate::before_url(&upstream.url()).upstream(&settings).start();
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").body("{}").send(address));
    arrived.wait();
    gate.post("/charges", "second", "{}").expect_problem(503, "overloaded");
    assert!(gate.states("second").is_empty());
    let waiting = std::thread::spawn(move || Request::post("/charges").body("{}").send(address));
    std::thread::sleep(Duration::from_millis(50));
    go_on.open();
    assert_eq!(first.join().unwrap().text(), "paid");
    assert_eq!(waiting.join().unwrap().text(), "paid");
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn all_who_wait_share_the_only_connection_once_it_is_open() {
    // It takes a while to greet, so that many wait for it, on whichever thread they came.
    let upstream = H2::raw(|mut conn| {
        std::thread::sleep(Duration::from_millis(200));
        conn.send(SETTINGS, 0, 0, &[]);
        let mut preface = [0; 24];
        std::io::Read::read_exact(&mut conn.stream, &mut preface).unwrap();
        while let Some(stream) = conn.request() {
            conn.answer(stream, b"paid");
        }
    });
    let settings = format!("{PROTOCOL}, max_connections = 1, connect_timeout = \"5s\"");
    let gate = Gate::before_url(&upstream.url()).upstream(&settings).start();
    all_are_paid(&gate, 32);
    assert_eq!(upstream.connections(), 1);
}
