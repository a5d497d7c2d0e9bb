//! Every protocol of clients before every protocol of upstreams: what becomes of a request does not depend on either.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;

use crate::support::http2::Http2;
use crate::support::https::{self, Certificates};
use crate::support::wire::values;
use crate::support::{Client, Gate, Plan, Reply, Request, Service, Signal, Terms, Tls, Upstream, eventually};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaks {
    Http1,
    H2c,
    H2OverTls,
}

const ALL: [Speaks; 3] = [Speaks::Http1, Speaks::H2c, Speaks::H2OverTls];

/// What every answer has.
const HEADERS: [(&str, &str); 5] = [
    ("content-type", "application/x-bill"),
    ("set-cookie", "a=1"),
    ("set-cookie", "b=2"),
    ("location", "/bills/1"),
    ("x-odd", "? \u{7e}"),
];
const TRAILERS: [(&str, &str); 2] = [("x-sum", "7"), ("x-more", "a, b")];

/// The headers that the gate, or a protocol, adds of itself.
const OTHERS: [&str; 8] = [
    "idempotency-status",
    "idempotent-replayed",
    "idempotency-expires",
    "connection",
    "transfer-encoding",
    "trailer",
    "date",
    "content-length",
];

type Lines = Vec<(String, String)>;
type Said = (u16, Vec<(&'static str, &'static str)>, Vec<u8>, Vec<(&'static str, &'static str)>);

/// A call's message, and every byte that there is in it.
fn message() -> Vec<u8> {
    [&[0, 0, 0, 1, 0][..], &(0..=255).collect::<Vec<u8>>()].concat()
}

/// What an upstream says, whatever it speaks.
fn said(path: &str, body: &[u8], sum: Option<&str>, go_on: &Signal) -> Said {
    match path {
        "/lost" => return (504, vec![], b"lost".to_vec(), vec![]),
        "/empty" => return (204, vec![("x-odd", "empty")], vec![], vec![]),
        "/same" => return (304, vec![("etag", "\"v\"")], vec![], vec![]),
        "/echo" => {
            let told =
                [("content-type", "application/octet-stream"), ("x-told", if sum == Some("7") { "7" } else { "" })];
            return (200, told.to_vec(), body.to_vec(), vec![]);
        }
        "/pay.Payments/Charge" => {
            let announced = vec![("content-type", "application/grpc"), ("trailer", "grpc-status, grpc-message")];
            return (200, announced, body.to_vec(), vec![("grpc-status", "0"), ("grpc-message", "well")]);
        }
        "/slow" => go_on.wait(),
        _ => {}
    }
    // HTTP/1.1 has to be told beforehand, where an answer is passed on as it comes.
    let headers = [&HEADERS[..], &[("trailer", "x-sum, x-more")]].concat();
    (201, headers, b"billed".to_vec(), TRAILERS.to_vec())
}

/// The same as bytes of HTTP/1.1.
fn raw((status, headers, body, trailers): Said) -> Vec<u8> {
    let lines = |lines: &[(&str, &str)]| lines.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let (head, end): (String, String) = (lines(&headers), lines(&trailers));
    let (framing, size) = match trailers.is_empty() {
        _ if status == 204 || status == 304 => return format!("HTTP/1.1 {status} X\r\n{head}\r\n").into(),
        true => (format!("Content-Length: {}\r\n\r\n", body.len()), String::new()),
        false => ("Transfer-Encoding: chunked\r\n\r\n".to_owned(), format!("{:x}\r\n", body.len())),
    };
    let end = if trailers.is_empty() { String::new() } else { format!("\r\n0\r\n{end}\r\n") };
    let head = format!("HTTP/1.1 {status} X\r\n{head}{framing}{size}");
    [head.as_bytes(), &body, end.as_bytes()].concat()
}

/// An answer, however it came.
#[derive(Debug, PartialEq, Eq)]
struct Got {
    status: u16,
    word: String,
    headers: Lines,
    body: Vec<u8>,
    trailers: Lines,
}

/// An upstream of some protocol.
struct Behind {
    url: String,
    terms: String,
    runs: Box<dyn Fn() -> usize>,
    _held: Box<dyn std::any::Any>,
}

impl Behind {
    fn start(speaks: Speaks, certificates: &Certificates, go_on: &Signal) -> Self {
        let go_on = go_on.clone();
        if speaks == Speaks::Http1 {
            let upstream = Arc::new(Upstream::start(move |request| {
                let (line, sum) = (request.start_line(), values(&request.body.trailers, "x-sum"));
                let sum = sum.first().map(|sum| std::str::from_utf8(sum).unwrap());
                Reply::raw(raw(said(line.split(' ').nth(1).unwrap(), &request.body.bytes, sum, &go_on)))
            }));
            let seen = Arc::clone(&upstream);
            let runs = Box::new(move || seen.runs());
            return Self { url: upstream.url(), terms: String::new(), runs, _held: Box::new(upstream) };
        }
        let service = Arc::new(Service::start(move |asked| {
            let path = asked.target.split("gate.test").nth(1).unwrap();
            let sum = asked.trailers.as_ref().and_then(|trailers| trailers.get("x-sum")?.to_str().ok());
            said(path, &asked.body, sum, &go_on)
        }));
        let seen = Arc::clone(&service);
        let runs = Box::new(move || seen.asked().len());
        if speaks == Speaks::H2c {
            return Self { url: service.url(), terms: "protocol = \"h2\"".to_owned(), runs, _held: Box::new(service) };
        }
        let protocols: &[&str] = &["h2"];
        let terms = Terms { protocols, ..Terms::of(certificates.directory(), "gate") };
        let tls = Tls::before(service.address, terms);
        let ca = certificates.path("ca.pem");
        let terms = format!("tls = {{ ca = {ca:?}, name = \"gate.test\" }}");
        Self { url: tls.url(), terms, runs, _held: Box::new((tls, service)) }
    }

    fn plan(&self) -> Plan {
        Gate::before_url(&self.url).upstream(&self.terms)
    }
}

/// What is asked.
#[derive(Clone, Copy)]
struct Ask<'a> {
    method: &'a str,
    path: &'a str,
    lines: &'a [(&'a str, &'a str)],
    key: &'a str,
    body: &'a [u8],
    /// Behind the body comes `X-Sum: 7`.
    is_trailed: bool,
}

impl<'a> Ask<'a> {
    fn post(path: &'a str, key: &'a str, body: &'a [u8]) -> Self {
        Self { method: "POST", path, lines: &[], key, body, is_trailed: false }
    }

    /// By a client of some protocol, on a connection of its own.
    fn by(self, speaks: Speaks, address: SocketAddr, certificates: &Certificates) -> Got {
        let mut h2 = match speaks {
            Speaks::Http1 => return self.by_http1(address),
            Speaks::H2c => Http2::connect(address),
            Speaks::H2OverTls => https::http2(address, &certificates.client(&["h2"], None)),
        };
        let request = http::Request::builder().method(self.method).uri(format!("http://gate.test{}", self.path));
        let request =
            self.lines.iter().fold(request.header("te", "trailers"), |request, (n, v)| request.header(*n, *v));
        let request = if self.key.is_empty() { request } else { request.header("idempotency-key", self.key) };
        let request = if self.is_trailed { request.header("trailer", "x-sum") } else { request };
        let whole = Bytes::copy_from_slice(self.body);
        let body = match self.is_trailed {
            true => {
                let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "7".parse().unwrap())]);
                BodyExt::boxed(StreamBody::new(stream::iter([Frame::data(whole), Frame::trailers(trailers)].map(Ok))))
            }
            false => BodyExt::boxed(Full::new(whole)),
        };
        let answer = h2.try_send(request.body(body).unwrap()).unwrap();
        Got {
            status: answer.status,
            word: answer.get("idempotency-status").to_owned(),
            headers: end_to_end(lines(&answer.headers)),
            body: answer.body.to_vec(),
            trailers: lines(&answer.trailers.unwrap_or_default()),
        }
    }

    fn by_http1(self, address: SocketAddr) -> Got {
        let request = Request::new(self.method, self.path).header("TE", "trailers").header("Connection", "te");
        let request = self.lines.iter().fold(request, |request, (name, value)| request.header(name, value));
        let request = if self.key.is_empty() { request } else { request.key(self.key) };
        let bytes = match (self.is_trailed, self.method) {
            (true, _) => {
                let head = request.header("Trailer", "X-Sum").header("Transfer-Encoding", "chunked").bytes();
                let size = format!("{:x}\r\n", self.body.len());
                [&head, size.as_bytes(), self.body, b"\r\n0\r\nX-Sum: 7\r\n\r\n"].concat()
            }
            (false, "GET") => request.bytes(),
            (false, _) => request.body(self.body).bytes(),
        };
        let answer = Client::connect(address).send(bytes).response();
        assert!(answer.body.complete);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let lines = |fields: &[(Vec<u8>, Vec<u8>)]| {
            fields.iter().map(|(name, value)| (text(name).to_ascii_lowercase(), text(value))).collect::<Lines>()
        };
        Got {
            status: answer.status,
            word: answer.get("idempotency-status").unwrap_or_default(),
            headers: end_to_end(lines(&answer.head.fields)),
            trailers: lines(&answer.body.trailers),
            body: answer.body.bytes,
        }
    }
}

fn lines(headers: &HeaderMap) -> Lines {
    headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
}

fn end_to_end(lines: Lines) -> Lines {
    lines.into_iter().filter(|(name, _)| !OTHERS.contains(&name.as_str())).collect()
}

fn owned(lines: &[(&str, &str)]) -> Lines {
    // White space around a value is no part of it (RFC 9110, 5.5).
    lines.iter().map(|(name, value)| ((*name).to_owned(), value.trim().to_owned())).collect()
}

#[test]
fn what_becomes_of_a_request_does_not_depend_on_the_protocols() {
    let Some(certificates) = Certificates::new() else { return };
    let names = "subjectAltName=DNS:gate.test,IP:127.0.0.1";
    certificates.sign("gate", names);
    for upstream in ALL {
        for client in ALL {
            let go_on = Signal::new();
            let behind = Behind::start(upstream, &certificates, &go_on);
            let tls = if client == Speaks::H2OverTls { certificates.server("") } else { String::new() };
            let gate = behind.plan().server(&tls).start();
            let (name, by) =
                (format!("{client:?} before {upstream:?}"), |ask: Ask<'_>| ask.by(client, gate.address, &certificates));
            outcomes(&name, &behind, &go_on, by);
            messages(&name, &behind, by);
        }
    }
}

fn outcomes(name: &str, behind: &Behind, go_on: &Signal, by: impl Fn(Ask<'_>) -> Got + Sync) {
    let ask = |path: &str, key: &str, body: &str| by(Ask::post(path, key, body.as_bytes()));
    let billed = |word: &str| Got {
        status: 201,
        word: word.to_owned(),
        headers: owned(&HEADERS),
        body: b"billed".to_vec(),
        trailers: owned(&TRAILERS),
    };
    let problem = |got: Got, status: u16, code: &str| {
        assert_eq!((got.status, &*got.word), (status, code), "{name}: {got:?}");
        let problem: serde_json::Value = serde_json::from_slice(&got.body).unwrap();
        assert_eq!((&problem["code"], &problem["status"]), (&code.into(), &status.into()), "{name}");
    };
    assert_eq!(ask("/bills", "k-1", "one"), billed("executed"), "{name}: the first");
    assert_eq!(ask("/bills", "k-1", "one"), billed("replayed"), "{name}: its replay");
    problem(ask("/bills", "k-1", "other"), 422, "key-reused");
    assert_eq!((behind.runs)(), 1, "{name}");
    let lost = ask("/lost", "k-2", "two");
    assert_eq!((lost.status, &*lost.word, &*lost.body), (504, "outcome-unknown", &b"lost"[..]), "{name}: {lost:?}");
    problem(ask("/lost", "k-2", "two"), 409, "outcome-unknown");
    assert_eq!(ask("/bills", "", "three"), billed(""), "{name}: passes through");
    assert_eq!((behind.runs)(), 3, "{name}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| ask("/slow", "k-3", "four"));
        eventually("the first runs", || ((behind.runs)() == 4).then_some(()));
        problem(ask("/slow", "k-3", "four"), 409, "in-flight");
        go_on.open();
        assert_eq!(first.join().unwrap().word, "executed", "{name}");
    });
    assert_eq!((behind.runs)(), 4, "{name}");
}

/// Each comes to the upstream, and back, as it is.
fn messages(name: &str, behind: &Behind, by: impl Fn(Ask<'_>) -> Got) {
    let (every, large) = (message(), (0..=255).cycle().take(1 << 20).collect::<Vec<u8>>());
    let call = Ask { lines: &[("content-type", "application/grpc")], ..Ask::post("/pay.Payments/Charge", "", &every) };
    let well = [("grpc-status", "0"), ("grpc-message", "well")];
    let octets = |told| owned(&[("content-type", "application/octet-stream"), ("x-told", told)]);
    let before = (behind.runs)();
    let mut runs = 0;
    for (ask, status, headers, trailers) in [
        (Ask::post("/empty", "", b"{}"), 204, owned(&[("x-odd", "empty")]), owned(&[])),
        (Ask::post("/echo", "", b""), 200, octets(""), owned(&[])),
        (Ask::post("/echo", "", &every), 200, octets(""), owned(&[])),
        (Ask { is_trailed: true, ..Ask::post("/echo", "", &every) }, 200, octets("7"), owned(&[])),
        (Ask::post("/echo", "", &large), 200, octets(""), owned(&[])),
        (call, 200, owned(&[("content-type", "application/grpc")]), owned(&well)),
    ] {
        let key = format!("m-{runs}");
        for (word, key) in [("", ""), ("executed", &*key), ("replayed", &*key)] {
            let got = by(Ask { key, ..ask });
            let told = format!("{name}: {} of {} bytes, {word}", ask.path, ask.body.len());
            assert_eq!(
                (got.status, &*got.word, &got.headers, &got.trailers),
                (status, word, &headers, &trailers),
                "{told}"
            );
            let expected = if status == 204 { b"" } else { ask.body };
            assert!(got.body == expected, "{told}: {} bytes", got.body.len());
            runs += usize::from(word != "replayed");
        }
    }
    let condition = [("if-none-match", "\"v\"")];
    let same = by(Ask { method: "GET", lines: &condition, ..Ask::post("/same", "", b"") });
    assert_eq!((same.status, same.headers, &*same.body), (304, owned(&[("etag", "\"v\"")]), &b""[..]), "{name}");
    assert_eq!((behind.runs)(), before + runs + 1, "{name}");
}
