//! The ways by which clients come: encrypted, by unix sockets, and through proxies that say for whom.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt as _;

use crate::support::http2::Http2;
use crate::support::https::{Certificates, Https, http2, http2_behind};
use crate::support::wait::PATIENCE;
use crate::support::{Client, Gate, Reply, Signal, Upstream, eventually};

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: gate.test\r\n\r\n")
}

fn pay(key: &str) -> String {
    format!("POST /pay HTTP/1.1\r\nHost: gate.test\r\nIdempotency-Key: {key}\r\nContent-Length: 2\r\n\r\n10")
}

/// Not every client looks whether an encrypted connection was ended or cut off.
#[test]
fn an_answer_to_http_1_0_that_breaks_off_ends_with_a_reset_under_tls_too() {
    let Some(certificates) = Certificates::new() else { return };
    for is_cut in [false, true] {
        let end = if is_cut { "" } else { "0\r\n\r\n" };
        let answer = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nmade\r\n{end}");
        let upstream = Upstream::start(move |_| Reply::raw(answer.clone()).close());
        let gate = Gate::before(&upstream).server(&certificates.server("")).start();
        let mut client = Https::connect(gate.address, &certificates.client(&[], None));
        let request = "GET / HTTP/1.0\r\nHost: gate.test\r\n\r\n";
        assert!(client.exchange(request, "made").unwrap().starts_with("HTTP/1.0 200 OK\r\n"));
        let ended = client.0.read_to_end(&mut Vec::new());
        match is_cut {
            false => assert!(ended.is_ok(), "{ended:?}"),
            true => assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
}

#[test]
fn both_protocols_are_encrypted() {
    let Some(certificates) = Certificates::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let gate = Gate::before(&upstream).server(&certificates.server("")).start();
    for protocols in [&["http/1.1"][..], &[]] {
        let mut client = Https::connect(gate.address, &certificates.client(protocols, None));
        for _ in 0..2 {
            assert!(client.exchange(&get("/"), "made").unwrap().starts_with("HTTP/1.1 200 OK\r\n"));
        }
        let seen = upstream.last().head;
        assert_eq!(seen.get("x-forwarded-proto").as_deref(), Some("https"));
    }
    let mut client = http2(gate.address, &certificates.client(&["h2", "http/1.1"], None));
    client.post("/pay", "k", "10").expect(200, "executed");
    // The default port of https is no other host.
    let other = http::Request::post("https://gate.test:443/pay").header("idempotency-key", "k").body("10").unwrap();
    client.send(other).expect(200, "replayed");
    let mut client = Https::connect(gate.address, &certificates.client(&[], None));
    assert!(client.exchange(&pay("k"), "made").unwrap().contains("idempotency-status: replayed"));
    assert_eq!(upstream.runs_of("k"), 1);
}

#[test]
fn who_does_not_encrypt_or_says_nothing_is_sent_away() {
    let Some(certificates) = Certificates::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).server(&certificates.server(""));
    let gate = plan.top("[limits]\nheader_timeout = \"2s\"\nmax_connections_per_address = 3").start();
    let mut client = Client::connect(gate.address);
    client.send(get("/"));
    let answer = client.response();
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("TLS"), "{}", answer.show());
    // Silence, half a handshake, and a handshake with nothing behind it.
    for hello in [&b""[..], &[22, 3, 1, 2, 0, 1, 0, 1]] {
        let mut client = Client::connect(gate.address);
        let began = Instant::now();
        drop(client.wire.send(hello));
        client.wire.rest();
        assert!(began.elapsed() < Duration::from_secs(10));
    }
    let mut client = Https::connect(gate.address, &certificates.client(&[], None));
    while client.0.conn.is_handshaking() {
        client.0.conn.complete_io(&mut client.0.sock).unwrap();
    }
    let mut rest = Vec::new();
    drop(client.0.read_to_end(&mut rest));
    assert!(gate.metric("oncegate_limit_exceeded_total", &["limit=\"header_timeout\""]) >= 3.0);
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn new_certificates_are_taken_up_and_broken_ones_are_not() {
    let Some(certificates) = Certificates::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).server(&certificates.server("")).start();
    let config = certificates.client(&["http/1.1"], None);
    let mut kept = Https::connect(gate.address, &config);
    kept.exchange(&get("/"), "x").unwrap();
    let served = || {
        let mut client = Https::connect(gate.address, &certificates.client(&["http/1.1"], None));
        client.exchange(&get("/"), "x").unwrap();
        client.0.conn.peer_certificates().unwrap()[0].to_vec()
    };
    let first = served();
    std::fs::write(certificates.path("gate.pem"), "nothing").unwrap();
    eventually("a word of what is wrong", || gate.log().contains("new certificates cannot be used").then_some(()));
    assert_eq!(served(), first);
    // Right after each other, or the new key would be seen with what is no certificate.
    certificates.sign("new", "subjectAltName=DNS:gate.test");
    for kind in ["key", "pem"] {
        let (new, old) = (format!("new.{kind}"), format!("gate.{kind}"));
        std::fs::rename(certificates.path(&new), certificates.path(&old)).unwrap();
    }
    eventually("the new certificate", || (served() != first).then_some(()));
    assert_eq!(gate.log().matches("new certificates cannot be used").count(), 1);
    let second = served();
    certificates.sign("gate", "subjectAltName=DNS:gate.test");
    gate.sighup();
    eventually("the certificate of the reload", || (served() != second).then_some(()));
    kept.exchange(&get("/"), "x").unwrap();
}

#[test]
fn certificates_that_are_swapped_under_load_cost_nobody_anything() {
    let Some(certificates) = Certificates::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).server(&certificates.server("")).start();
    let (is_over, address) = (AtomicBool::new(false), gate.address);
    let mut seen = BTreeSet::new();
    let asked: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|client| {
                let (certificates, is_over) = (&certificates, &is_over);
                scope.spawn(move || {
                    let (config, h2) = (certificates.client(&["http/1.1"], None), certificates.client(&["h2"], None));
                    let (mut kept, mut kept_h2) = (Https::connect(address, &config), http2(address, &h2));
                    let mut count = 0;
                    let began = Instant::now();
                    while !is_over.load(Ordering::SeqCst) && began.elapsed() < PATIENCE * 2 {
                        let mut new = Https::connect(address, &config);
                        for client_of in [&mut kept, &mut new] {
                            let answer =
                                client_of.exchange(&pay(&format!("k-{client}-{count}")), "x").expect("an answer");
                            assert!(answer.contains("idempotency-status: executed"), "{answer}");
                            count += 1;
                        }
                        for client_of in [&mut kept_h2, &mut http2(address, &h2)] {
                            client_of.post("/pay", &format!("k-{client}-{count}"), "10").expect(200, "executed");
                            count += 1;
                        }
                    }
                    count
                })
            })
            .collect();
        let mut served = || {
            let mut client = Https::connect(address, &certificates.client(&["http/1.1"], None));
            client.exchange(&get("/"), "x").unwrap();
            seen.insert(client.0.conn.peer_certificates().unwrap()[0].to_vec())
        };
        served();
        for _ in 0..3 {
            certificates.sign("gate", "subjectAltName=DNS:gate.test");
            eventually("the new certificate", || served().then_some(()));
        }
        is_over.store(true, Ordering::SeqCst);
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert_eq!(seen.len(), 4);
    eprintln!("{asked} requests on connections that were kept and that were new");
    assert!(asked > 100 && upstream.runs() >= asked, "{asked}");
}

#[test]
fn callers_are_told_apart_by_their_certificates() {
    let Some(certificates) = Certificates::new() else { return };
    for (name, san) in [("ann", "DNS:shared"), ("bob", "DNS:shared"), ("eve", "DNS:eve")] {
        certificates.sign(name, &format!("subjectAltName={san}"));
    }
    let upstream = Upstream::start(|_| Reply::ok("made"));
    for (part, runs) in [("subject", 3), ("san", 2)] {
        let scope = format!("scope = [\"client-cert:{part}\"]");
        let gate = Gate::before(&upstream).server(&certificates.server_of_clients()).defaults(&scope).start();
        let before = upstream.runs();
        for name in ["ann", "bob", "eve", "ann"] {
            let mut client = Https::connect(gate.address, &certificates.client(&[], Some(name)));
            client.exchange(&pay("k"), "made").unwrap();
            http2(gate.address, &certificates.client(&["h2"], Some(name)))
                .post("/pay", "k", "10")
                .expect(200, "replayed");
        }
        assert_eq!(upstream.runs() - before, runs, "{part}");
        // Whoever has none, or one of nobody's, is no client.
        let mut nobody = Https::connect(gate.address, &certificates.client(&[], None));
        assert!(nobody.exchange(&pay("k"), "made").is_err());
        crate::servers::certificates::authority(certificates.directory(), "mallory");
        let mut other = Https::connect(gate.address, &certificates.client(&[], Some("mallory")));
        assert!(other.exchange(&pay("k"), "made").is_err());
    }
}

/// A client by a unix socket: one exchange.
fn by_unix(path: &std::path::Path, request: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(request.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
    let mut came = String::new();
    stream.read_to_string(&mut came).unwrap();
    came
}

#[test]
fn unix_sockets_are_made_taken_over_and_removed() {
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let plan = Gate::before(&upstream);
    let path = plan.path("gate.sock");
    let lines = format!("listen = [\"127.0.0.1:0\", \"unix:{}\"]\nsocket_mode = \"0600\"\n", path.display());
    let gate = plan.clone().server(&lines).start();
    eventually("the socket", || path.exists().then_some(()));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let place = format!("\"unix:{}\"", path.display());
    eventually("the place in the log", || gate.log().contains(&place).then_some(()));
    assert!(by_unix(&path, &pay("k")).contains("idempotency-status: executed"));
    assert!(by_unix(&path, &pay("k")).contains("idempotency-status: replayed"));
    assert_eq!(upstream.last().head.get("x-forwarded-for").as_deref(), Some("127.0.0.1"));
    gate.post("/pay", "k", "10").expect(200, "replayed");
    let stream = path.clone();
    let mut client = Http2::over(async move { tokio::net::UnixStream::connect(stream).await.unwrap() });
    client.post("/pay", "k", "10").expect(200, "replayed");
    // Somebody answers there: it is not taken over.
    let other = Gate::before(&upstream).server(&lines);
    let mut refused = other.spawn();
    assert!(!refused.wait().success());
    assert!(refused.log().contains("another process does"), "{}", refused.log());
    assert!(path.exists());
    // Nobody does any more.
    drop(client);
    let plan = gate.kill9();
    assert!(path.exists());
    let gate = plan.start();
    eventually("the new socket", || UnixStream::connect(&path).is_ok().then_some(()));
    assert!(by_unix(&path, &pay("k")).contains("idempotency-status: replayed"));
    gate.stop();
    assert!(!path.exists(), "it is removed at the end");
}

/// Sends a PROXY header and a request; gives the answer, if there is one.
fn proxied(gate: &Gate, header: &[u8], request: &str) -> Option<u16> {
    let mut client = Client::connect(gate.address);
    // Who is not trusted is closed on.
    drop(client.wire.send(&[header, request.as_bytes()].concat()));
    client.try_response("GET").map(|response| response.status)
}

const V1: &[u8] = b"PROXY TCP4 198.51.100.7 127.0.0.1 4711 80\r\n";
const V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c\xc6\x33\x64\x07\x05\x06\x07\x08\x12\x67\x00\x50";

#[test]
fn proxies_say_for_whom_they_connect() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = "proxy_protocol = true\ntrusted_proxies = [\"127.0.0.1\"]\n";
    let top = "[limits]\nheader_timeout = \"2s\"\nmax_connections_per_address = 2";
    let gate = Gate::before(&upstream).server(lines).top(top).start();
    let seen = || upstream.last().head.get("x-forwarded-for");
    for (header, client) in [
        (V1, "198.51.100.7"),
        (b"PROXY TCP6 2001:db8::7 ::1 4711 80\r\n", "2001:db8::7"),
        (b"PROXY UNKNOWN\r\n", "127.0.0.1"),
        (V2, "198.51.100.7"),
        (b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00", "127.0.0.1"),
    ] {
        assert_eq!(proxied(&gate, header, &get("/")), Some(200), "{header:?}");
        assert_eq!(seen().as_deref(), Some(client));
    }
    // A client's own word counts for nothing.
    let forged = get("/").replace("\r\n\r\n", "\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n");
    assert_eq!(proxied(&gate, V2, &forged), Some(200));
    assert_eq!(seen().as_deref(), Some("198.51.100.7"));
    let runs = upstream.runs();
    for none in [&b""[..], b"PROXY TCP4 1.2.3.4\r\n", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x01x"] {
        assert_eq!(proxied(&gate, none, &get("/")), None, "{none:?}");
    }
    // Half a header and then nothing.
    let began = Instant::now();
    let mut slow = TcpStream::connect(gate.address).unwrap();
    slow.write_all(&V2[..9]).unwrap();
    assert_eq!(slow.read(&mut [0; 9]).unwrap_or(0), 0);
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(upstream.runs(), runs);
    // A place is the client's, not the proxy's.
    let header = |last: u8| format!("PROXY TCP4 192.0.2.{last} 127.0.0.1 1 80\r\n{}", get("/"));
    let connect = |last: u8| {
        let mut client = Client::connect(gate.address);
        client.send(header(last));
        client
    };
    let mut places: Vec<Client> = (1..=4).map(connect).collect();
    places.iter_mut().for_each(|client| assert_eq!(client.response().status, 200));
    let mut second = connect(1);
    assert_eq!(second.response().status, 200);
    assert!(connect(1).try_response("GET").is_none());
}

#[test]
fn http_2_begins_behind_what_a_proxy_says() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = "proxy_protocol = true\ntrusted_proxies = [\"127.0.0.1\"]\n";
    let gate = Gate::before(&upstream).server(lines).start();
    for (header, client) in [(V1, "198.51.100.7"), (V2, "198.51.100.7"), (b"PROXY UNKNOWN\r\n", "127.0.0.1")] {
        let address = gate.address;
        let mut h2 = Http2::over(async move {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            stream.write_all(header).await.unwrap();
            stream
        });
        for _ in 0..2 {
            h2.send(http::Request::get("http://gate.test/h2").body("").unwrap()).expect(200, "");
            assert_eq!(upstream.last().head.get("x-forwarded-for").as_deref(), Some(client));
        }
    }
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn nobody_else_may_connect_where_proxies_do() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = "proxy_protocol = true\ntrusted_proxies = [\"192.0.2.0/24\"]\n";
    let gate = Gate::before(&upstream).server(lines).start();
    assert_eq!(proxied(&gate, V2, &get("/")), None);
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn what_is_proxied_may_be_encrypted() {
    let Some(certificates) = Certificates::new() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = certificates.server("") + "proxy_protocol = true\ntrusted_proxies = [\"127.0.0.1\"]\n";
    let gate = Gate::before(&upstream).server(&lines).start();
    for header in [V2, V1] {
        let mut stream = TcpStream::connect(gate.address).unwrap();
        stream.write_all(header).unwrap();
        let mut client = Https::over(stream, &certificates.client(&[], None));
        client.exchange(&get("/"), "x").unwrap();
        let mut h2 = http2_behind(gate.address, header, &certificates.client(&["h2"], None));
        h2.send(http::Request::get("https://gate.test/h2").body("").unwrap()).expect(200, "");
        for seen in upstream.seen() {
            assert_eq!(seen.head.get("x-forwarded-for").as_deref(), Some("198.51.100.7"));
            assert_eq!(seen.head.get("x-forwarded-proto").as_deref(), Some("https"));
        }
    }
    assert_eq!(upstream.runs(), 4);
}

#[test]
fn what_is_under_way_is_answered_when_all_ends() {
    let Some(certificates) = Certificates::new() else { return };
    let go = Signal::new();
    let held = go.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let gate = Gate::before(&upstream).server(&certificates.server("")).start();
    let (address, config) = (gate.address, certificates.client(&["http/1.1"], None));
    let client = std::thread::spawn(move || {
        let mut client = Https::connect(address, &config);
        let answer = client.exchange(&pay("k"), "late");
        drop(client.0.sock.shutdown(Shutdown::Both));
        answer
    });
    upstream.wait_for_runs(1);
    gate.sigterm();
    go.open();
    assert!(client.join().unwrap().unwrap().contains("idempotency-status: executed"));
    gate.stop();
}
