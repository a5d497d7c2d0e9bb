//! A TCP server that does exactly what a test scripts, byte for byte, and remembers what it saw.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::listening::{Listening, some_address};
use super::wait::{Signal, eventually};
use super::wire::{Body, Framing, Head, Wire};

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Request {
    pub head: Head,
    pub body: Body,
    /// Which connection of this upstream it came on, from 1.
    pub connection: usize,
    /// Which request of this upstream it is, from 1.
    pub nth: usize,
}

impl Request {
    pub fn start_line(&self) -> String {
        String::from_utf8_lossy(&self.head.start).into_owned()
    }

    pub fn key(&self) -> Option<String> {
        self.head.get("idempotency-key")
    }
}

/// What the upstream does about one request.
#[derive(Clone, Default)]
pub struct Reply(Vec<Step>);

#[derive(Clone)]
enum Step {
    Send(Vec<u8>),
    Delay(Duration),
    Hold(Signal),
    Close,
    Reset,
}

impl Reply {
    /// Exactly these bytes.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Self::default().then(bytes)
    }

    /// An answer with a `Content-Length` and no other header.
    pub fn status(status: &str, body: impl AsRef<[u8]>) -> Self {
        let body = body.as_ref();
        let mut bytes = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
        bytes.extend_from_slice(body);
        Self::raw(bytes)
    }

    pub fn ok(body: impl AsRef<[u8]>) -> Self {
        Self::status("200 OK", body)
    }

    /// An answer that says that its connection closes, and closes it: it carries one request. One that closes without a word
    /// is used again where the close is on its way, and that request is lost.
    pub fn last(body: &str) -> Self {
        Self::raw(format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
            .close()
    }

    /// Says nothing at all from here on.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// Then sends these bytes.
    pub fn then(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.0.push(Step::Send(bytes.into()));
        self
    }

    /// Waits before going on.
    pub fn pause(mut self, time: Duration) -> Self {
        self.0.push(Step::Delay(time));
        self
    }

    /// Waits before everything.
    pub fn delay(mut self, time: Duration) -> Self {
        self.0.insert(0, Step::Delay(time));
        self
    }

    /// Waits for the signal before everything.
    pub fn hold_until(mut self, signal: &Signal) -> Self {
        self.0.insert(0, Step::Hold(signal.clone()));
        self
    }

    /// Waits for the signal before going on.
    pub fn pause_until(mut self, signal: &Signal) -> Self {
        self.0.push(Step::Hold(signal.clone()));
        self
    }

    /// Closes the connection in the end.
    pub fn close(mut self) -> Self {
        self.0.push(Step::Close);
        self
    }

    /// Resets the connection in the end (RST, not FIN).
    pub fn reset(mut self) -> Self {
        self.0.push(Step::Reset);
        self
    }

    /// Leaves out the last `n` bytes of what was said so far, and closes.
    pub fn truncate(mut self, n: usize) -> Self {
        if let Some(Step::Send(bytes)) = self.0.last_mut() {
            bytes.truncate(bytes.len().saturating_sub(n));
        }
        self.close()
    }
}

/// One connection, for tests that script it whole.
pub struct Conn {
    pub wire: Wire,
    id: usize,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Conn {
    /// The next request's head; its body is still on the wire.
    pub fn next_head(&mut self) -> Option<Request> {
        let head = self.wire.head().ok()??;
        let mut seen = self.seen.lock().unwrap();
        let request = Request { head, body: Body::default(), connection: self.id, nth: seen.len() + 1 };
        seen.push(request.clone());
        Some(request)
    }

    /// The next request. One whose body breaks off is kept, with what came of it.
    pub fn next(&mut self) -> Option<Request> {
        let mut request = self.next_head()?;
        if request.head.get("expect").is_some() {
            self.wire.send(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
        }
        request.body = self.wire.body(request.head.framing(Framing::None));
        self.seen.lock().unwrap()[request.nth - 1].body = request.body.clone();
        Some(request)
    }

    /// Performs a reply. False where the connection is over.
    fn perform(&mut self, reply: Reply) -> bool {
        if reply.0.is_empty() {
            self.wire.rest();
            return false;
        }
        for step in reply.0 {
            match step {
                Step::Send(bytes) => {
                    if self.wire.send(&bytes).is_err() {
                        return false;
                    }
                }
                Step::Delay(time) => std::thread::sleep(time),
                Step::Hold(signal) => signal.wait(),
                Step::Close => return false,
                Step::Reset => {
                    self.reset_on_close();
                    return false;
                }
            }
        }
        true
    }

    /// Makes the close to come a reset.
    pub fn reset_on_close(&self) {
        socket2::SockRef::from(&self.wire.stream).set_linger(Some(Duration::ZERO)).expect("a socket");
    }
}

/// A scripted upstream.
pub struct Upstream {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    listening: Listening,
}

impl Upstream {
    /// Answers each request, over connections that are kept alive.
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at(some_address(), handler)
    }

    /// As [`Upstream::start`], at an address of [`Upstream::free_address`].
    pub fn start_at(address: SocketAddr, handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::scripted_at(address, move |conn| {
            while let Some(request) = conn.next() {
                if !conn.perform(handler(&request)) {
                    break;
                }
            }
        })
    }

    /// Hands each connection to the script.
    pub fn scripted(script: impl Fn(&mut Conn) + Send + Sync + 'static) -> Self {
        Self::scripted_at(some_address(), script)
    }

    fn scripted_at(address: SocketAddr, script: impl Fn(&mut Conn) + Send + Sync + 'static) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let seeing = Arc::clone(&seen);
        let listening = Listening::start(address, move |stream, id| {
            script(&mut Conn { wire: Wire::new(stream), id, seen: Arc::clone(&seeing) });
        });
        Self { address: listening.address, seen, listening }
    }

    /// An address where nothing listens and that nothing else of these tests takes.
    pub fn free_address() -> SocketAddr {
        let probe = TcpListener::bind(some_address()).expect("a loopback address");
        probe.local_addr().expect("a bound socket")
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every request so far, in the order of their heads.
    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    pub fn last(&self) -> Request {
        self.seen().pop().expect("the upstream saw no request")
    }

    /// How many requests it saw.
    pub fn runs(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// How many requests with this key it saw.
    pub fn runs_of(&self, key: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|request| request.key().as_deref() == Some(key)).count()
    }

    /// How many connections it accepted.
    pub fn connections(&self) -> usize {
        self.listening.connections()
    }

    /// Waits until it has seen this many requests.
    #[track_caller]
    pub fn wait_for_runs(&self, runs: usize) {
        eventually(&format!("{runs} requests at the upstream"), || (self.runs() >= runs).then_some(()));
    }
}
