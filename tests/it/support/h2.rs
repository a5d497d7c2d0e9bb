//! An upstream that speaks HTTP/2 frame by frame, as a test scripts it.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub use super::frames::{DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS};
use super::frames::{PREFACE, frame};
use super::listening::{Listening, some_address};

/// `:status: 200`
pub const OK: &[u8] = &[0x88];

/// One connection.
pub struct Conn {
    pub stream: TcpStream,
}

impl Conn {
    pub fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        // A gate that has gone shows when something is read.
        let _ = self.stream.write_all(&frame(kind, flags, stream, payload));
    }

    /// The next frame, whatever it is.
    pub fn frame(&mut self) -> io::Result<Frame> {
        let mut header = [0; 9];
        self.stream.read_exact(&mut header)?;
        let [a, b, c, kind, flags, stream @ ..] = header;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
    }

    /// Reads until a request is whole, and says on which stream; nothing where the connection is over.
    pub fn request(&mut self) -> Option<u32> {
        self.until(Frame::ends).map(|frame| frame.stream)
    }

    /// Reads until such a frame comes. Pings and settings are answered.
    pub fn until(&mut self, wanted: impl Fn(&Frame) -> bool) -> Option<Frame> {
        loop {
            let frame = self.frame().ok()?;
            match frame.kind {
                SETTINGS if frame.flags & 1 == 0 => self.send(SETTINGS, 1, 0, &[]),
                PING if frame.flags & 1 == 0 => self.send(PING, 1, 0, &frame.payload),
                _ => {}
            }
            if wanted(&frame) {
                return Some(frame);
            }
        }
    }

    /// Answers 200 with this body.
    pub fn answer(&mut self, stream: u32, body: &[u8]) {
        self.send(HEADERS, END_HEADERS, stream, OK);
        self.send(DATA, END_STREAM, stream, body);
    }

    pub fn reset(&mut self, stream: u32, code: u32) {
        self.send(RST_STREAM, 0, stream, &code.to_be_bytes());
    }

    pub fn go_away(&mut self, last: u32, code: u32) {
        self.send(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat());
    }

    /// Says something again and again, in frames of no known kind, until the connection is over: an attempt goes to no
    /// connection that nothing was heard of for a second.
    pub fn is_heard(&self) {
        let mut stream = self.stream.try_clone().expect("a socket");
        std::thread::spawn(move || {
            while stream.write_all(&frame(0xEE, 0, 0, &[])).is_ok() {
                std::thread::sleep(Duration::from_millis(200));
            }
        });
    }

    /// Reads until the gate has closed.
    pub fn rest(&mut self) {
        while self.until(|_| false).is_some() {}
    }
}

/// A scripted upstream.
pub struct H2 {
    pub address: SocketAddr,
    listening: Listening,
}

impl H2 {
    /// Runs `script` on each connection after both sides have greeted; with these settings, six bytes each.
    pub fn start(settings: &'static [u8], script: impl Fn(Conn) + Send + Sync + 'static) -> Self {
        Self::raw(move |mut conn| {
            let mut preface = [0; PREFACE.len()];
            if conn.stream.read_exact(&mut preface).is_ok() && preface == PREFACE {
                conn.send(SETTINGS, 0, 0, settings);
                script(conn);
            }
        })
    }

    /// Runs `script` on each connection from its first byte.
    pub fn raw(script: impl Fn(Conn) + Send + Sync + 'static) -> Self {
        let listening = Listening::start(some_address(), move |stream, _| {
            stream.set_nodelay(true).expect("a socket");
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
            script(Conn { stream });
        });
        Self { address: listening.address, listening }
    }

    /// Answers every request with `body`.
    pub fn answering(body: &'static str) -> Self {
        Self::start(&[], move |mut conn| {
            while let Some(stream) = conn.request() {
                conn.answer(stream, body.as_bytes());
            }
        })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many connections it accepted.
    pub fn connections(&self) -> usize {
        self.listening.connections()
    }
}
