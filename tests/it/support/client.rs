//! A client that sends exact bytes and shows exact bytes.

use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use super::gate::Gate;
use super::wait::{PATIENCE, eventually};
use super::wire::{Body, Fields, Framing, Head, Wire};

/// A connection to the gate.
pub struct Client {
    pub wire: Wire,
}

/// A response as it arrived.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    /// The status line as it arrived.
    pub line: String,
    pub head: Head,
    pub body: Body,
}

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("the gate listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
        stream.set_write_timeout(Some(PATIENCE)).expect("not zero");
        Self { wire: Wire::new(stream) }
    }

    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        self.wire.send(bytes.as_ref()).expect("the gate reads");
        self
    }

    /// The next response, interim ones skipped.
    #[track_caller]
    pub fn response(&mut self) -> Response {
        self.try_response("GET").expect("the gate answers")
    }

    /// The next response to a request of this method, or nothing where the connection ends before its head does.
    pub fn try_response(&mut self, method: &str) -> Option<Response> {
        loop {
            let head = match self.wire.head() {
                Ok(head) => head?,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer in {PATIENCE:?}"),
                Err(_) => return None,
            };
            let line = String::from_utf8_lossy(&head.start).into_owned();
            let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
            let status: u16 = status.unwrap_or_else(|| panic!("not a status line: {line:?}"));
            if status < 200 && status != 101 {
                continue;
            }
            let framing = if method == "HEAD" || matches!(status, 101 | 204 | 304) {
                Framing::None
            } else {
                head.framing(Framing::UntilClose)
            };
            let body = self.wire.body(framing);
            return Some(Response { status, line, head, body });
        }
    }

    /// The next head, interim or not.
    #[track_caller]
    pub fn head(&mut self) -> Head {
        self.wire.head().expect("the gate answers").expect("the gate answers")
    }
}

impl Response {
    pub fn get(&self, name: &str) -> Option<String> {
        self.head.get(name)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body.bytes).into_owned()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body.bytes).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The word in `Idempotency-Status`; empty if absent.
    pub fn word(&self) -> String {
        self.get("idempotency-status").unwrap_or_default()
    }

    /// Whole seconds in `Retry-After`.
    #[track_caller]
    pub fn retry_after(&self) -> u64 {
        let value = self.get("retry-after").expect("a Retry-After");
        let seconds = value.parse().unwrap_or_else(|_| panic!("not whole seconds: {value:?}"));
        assert!(seconds >= 1, "Retry-After: {seconds}");
        seconds
    }

    /// Holds that this is the upstream's answer under this word.
    #[track_caller]
    pub fn expect(&self, status: u16, word: &str) -> &Self {
        assert_eq!((self.status, self.word().as_str()), (status, word), "{}", self.show());
        assert_eq!(
            self.get("idempotent-replayed").as_deref(),
            (word == "replayed").then_some("true"),
            "{}",
            self.show()
        );
        assert!(self.body.complete, "the body broke off: {}", self.show());
        self
    }

    /// Holds that this is the problem of this code, in full (RFC 9457), for a request with a key.
    #[track_caller]
    pub fn expect_problem(&self, status: u16, code: &str) -> &Self {
        self.expect(status, code);
        self.expect_bare_problem(status, code)
    }

    /// As [`Response::expect_problem`], where the request had no key or no protected route.
    #[track_caller]
    pub fn expect_bare_problem(&self, status: u16, code: &str) -> &Self {
        let show = self.show();
        assert_eq!(self.status, status, "{show}");
        assert_eq!(self.get("content-type").as_deref(), Some("application/problem+json"), "{show}");
        assert_eq!(self.get("content-language").as_deref(), Some("en"), "{show}");
        let problem = self.json();
        let retryable = [
            "in-flight",
            "upstream-unreachable",
            "still-running",
            "store-unavailable",
            "overloaded",
            "quota-exceeded",
            "request-timeout",
        ]
        .contains(&code);
        assert_eq!(problem["code"], code, "{show}");
        assert_eq!(problem["status"], status, "{show}");
        assert_eq!(problem["retryable"], retryable, "{show}");
        assert!(problem["title"].as_str().is_some_and(|title| !title.is_empty()), "{show}");
        assert!(problem["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{show}");
        assert!(problem["type"].is_string(), "{show}");
        // Only behind this one is there a completed record.
        assert_eq!(self.head.has("idempotency-expires"), code == "response-not-stored", "{show}");
        if ["in-flight", "still-running", "store-unavailable", "overloaded", "quota-exceeded"].contains(&code) {
            self.retry_after();
        }
        self
    }

    /// Every header but the gate's three and the hop-by-hop ones, in order: what a replay must repeat.
    pub fn end_to_end(&self) -> Fields {
        const OTHERS: [&str; 6] = [
            "idempotency-status",
            "idempotent-replayed",
            "idempotency-expires",
            "connection",
            "keep-alive",
            "transfer-encoding",
        ];
        let kept = |name: &[u8]| !OTHERS.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes()));
        self.head.fields.iter().filter(|(name, _)| kept(name)).cloned().collect()
    }

    /// The names of those headers, in lower case.
    pub fn names(&self) -> Vec<String> {
        self.end_to_end().iter().map(|(name, _)| String::from_utf8_lossy(name).to_ascii_lowercase()).collect()
    }

    /// Holds that `replay` is this answer again.
    #[track_caller]
    pub fn expect_repeated_by(&self, replay: &Self) {
        assert_eq!(self.line, replay.line);
        assert_eq!(show_fields(&self.end_to_end()), show_fields(&replay.end_to_end()));
        assert_eq!(self.end_to_end(), replay.end_to_end());
        assert!(self.body.bytes == replay.body.bytes, "the bodies differ");
        assert_eq!(self.body.trailers, replay.body.trailers);
        assert!(self.body.complete && replay.body.complete);
    }

    /// The response for a failure message, its body cut.
    pub fn show(&self) -> String {
        let text = self.text();
        let shown: String = text.chars().take(500).collect();
        format!("{}{shown}", String::from_utf8_lossy(&self.head.raw))
    }
}

fn show_fields(fields: &Fields) -> Vec<String> {
    fields.iter().map(|(n, v)| format!("{}: {}", n.escape_ascii(), v.escape_ascii())).collect()
}

/// A request to be sent on a connection of its own.
#[derive(Clone)]
pub struct Request {
    method: String,
    target: String,
    headers: Vec<u8>,
    body: Option<Vec<u8>>,
}

impl Request {
    pub fn new(method: &str, target: &str) -> Self {
        Self { method: method.into(), target: target.into(), headers: Vec::new(), body: None }
    }

    pub fn post(target: &str) -> Self {
        Self::new("POST", target)
    }

    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.extend_from_slice(name.as_bytes());
        self.headers.extend_from_slice(b": ");
        self.headers.extend_from_slice(value.as_ref());
        self.headers.extend_from_slice(b"\r\n");
        self
    }

    pub fn key(self, key: &str) -> Self {
        self.header("Idempotency-Key", key)
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// The bytes of the request. Where it names no host it is for one that stays the same when a gate is started again
    /// on another port: the host is part of the scope.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        if !self.headers.to_ascii_lowercase().windows(5).any(|window| window == b"host:") {
            bytes.extend_from_slice(b"Host: gate.test\r\n");
        }
        bytes.extend_from_slice(&self.headers);
        if let Some(body) = &self.body {
            bytes.extend(format!("Content-Length: {}\r\n", body.len()).into_bytes());
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend(self.body.iter().flatten());
        bytes
    }

    /// Sends it to the gate and reads the answer.
    #[track_caller]
    pub fn send(&self, to: impl Into<SocketAddr>) -> Response {
        let address = to.into();
        let mut client = Client::connect(address);
        client.send(self.bytes());
        client.try_response(&self.method).unwrap_or_else(|| panic!("no answer to {} {}", self.method, self.target))
    }

    /// As [`Request::send`], once the attempt is over: the store knows of its end a moment before the gate does.
    #[track_caller]
    pub fn send_after_attempt(&self, gate: &Gate) -> Response {
        eventually("its end", || Some(self.send(gate)).filter(|response| response.word() != "in-flight"))
    }

    /// As [`Request::send`], for a gate that may die meanwhile: nothing where there is no whole answer.
    pub fn try_send(&self, address: SocketAddr) -> Option<Response> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let mut client = Client { wire: Wire::new(stream) };
        client.wire.send(&self.bytes()).ok()?;
        client.try_response(&self.method).filter(|response| response.body.complete)
    }
}
