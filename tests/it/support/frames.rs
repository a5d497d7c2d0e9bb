//! A client of HTTP/2 that sends exact frames (RFC 9113, 4) and shows those that come.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use super::wait::PATIENCE;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection whose every frame the test decides.
pub struct Frames {
    pub stream: TcpStream,
}

/// A frame that came.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Whether its stream ends with it.
    pub fn ends(&self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & END_STREAM != 0
    }

    /// The reason of a reset.
    pub fn reason(&self) -> u32 {
        word(&self.payload)
    }
}

impl Frames {
    /// Connects and says the preface, with these settings.
    #[track_caller]
    pub fn connect(address: SocketAddr, settings: &[(u16, u32)]) -> Self {
        let mut frames = Self::silent(address);
        let payload: Vec<u8> =
            settings.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
        frames.write(&[PREFACE, &frame(SETTINGS, 0, 0, &payload)].concat()).unwrap();
        frames
    }

    /// Connects, and says nothing.
    #[track_caller]
    pub fn silent(address: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("the gate listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream }
    }

    /// Sends bytes as they are.
    pub fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a frame.
    #[track_caller]
    pub fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> &mut Self {
        self.write(&frame(kind, flags, stream, payload)).expect("the gate reads");
        self
    }

    /// The next frame; nothing where the connection ends.
    #[track_caller]
    pub fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        if let Err(error) = self.stream.read_exact(&mut head) {
            assert!(error.kind() != std::io::ErrorKind::WouldBlock, "no frame within {PATIENCE:?}");
            return None;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload).ok()?;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// The next frame of this kind.
    #[track_caller]
    pub fn next_of(&mut self, kind: u8) -> Option<Frame> {
        std::iter::from_fn(|| self.next()).find(|frame| frame.kind == kind)
    }

    /// The next frame of a stream, whichever it is.
    #[track_caller]
    pub fn next_of_any_stream(&mut self) -> Option<Frame> {
        std::iter::from_fn(|| self.next()).find(|frame| frame.stream != 0)
    }

    /// The rest of a body: what comes of it, and how it ends.
    #[track_caller]
    pub fn body(&mut self, stream: u32) -> (Vec<u8>, Ended) {
        let mut body = Vec::new();
        loop {
            match self.next() {
                None => return (body, Ended::Closed),
                Some(frame) if frame.stream != stream => {}
                Some(frame) if frame.kind == RST_STREAM => return (body, Ended::Reset(frame.reason())),
                Some(frame) => {
                    if frame.kind == DATA {
                        body.extend_from_slice(&frame.payload);
                    }
                    if frame.ends() {
                        return (body, Ended::Whole);
                    }
                }
            }
        }
    }

    /// Waits until the gate has read what was sent.
    #[track_caller]
    pub fn is_read(&mut self) -> &mut Self {
        self.send(PING, 0, 0, b"read all");
        let answer = std::iter::from_fn(|| self.next()).find(|frame| frame.kind == PING && frame.flags & ACK != 0);
        assert_eq!(answer.expect("an answer to the ping").payload, b"read all");
        self
    }

    /// How a stream goes on: the next frame of it, or the end of the connection.
    #[track_caller]
    pub fn ending(&mut self, stream: u32) -> Ending {
        loop {
            match self.next() {
                None => return Ending::Closed,
                Some(Frame { kind: GOAWAY, payload, .. }) => return Ending::GoAway(word(&payload[4..])),
                Some(frame) if frame.stream != stream => {}
                Some(frame) if frame.kind == RST_STREAM => return Ending::Reset(frame.reason()),
                Some(Frame { kind: HEADERS, payload, .. }) => return Ending::Status(status(&payload)),
                Some(_) => {}
            }
        }
    }
}

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// As it should.
    Whole,
    /// Its stream is reset, for this reason.
    Reset(u32),
    /// The connection ends.
    Closed,
}

/// How a stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is answered.
    Status(u16),
    /// It is reset, for this reason.
    Reset(u32),
    /// The connection is, for this reason.
    GoAway(u32),
    /// The connection ends without a word.
    Closed,
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The status that a block of headers begins with: one of the static table, or else 0 (RFC 7541, appendix A).
fn status(block: &[u8]) -> u16 {
    // An update of the table's size may come first.
    let block = &block[block.iter().take_while(|byte| **byte & 0xE0 == 0x20).count()..];
    let known = [200, 204, 206, 304, 400, 404, 500];
    block.first().and_then(|first| known.get(usize::from(first.wrapping_sub(0x88)))).copied().unwrap_or(0)
}

/// A frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A block of headers, each written out: no table, no code (RFC 7541, 6.2.2).
pub fn block(lines: &[(&str, &[u8])]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in lines {
        block.push(0);
        for text in [name.as_bytes(), value] {
            length(text.len(), &mut block);
            block.extend_from_slice(text);
        }
    }
    block
}

/// The length of a string, without Huffman's code (RFC 7541, 5.1).
fn length(length: usize, block: &mut Vec<u8>) {
    if length < 127 {
        block.push(u8::try_from(length).unwrap());
        return;
    }
    block.push(127);
    let mut rest = length - 127;
    while rest >= 128 {
        block.push(u8::try_from(rest % 128).unwrap() | 128);
        rest /= 128;
    }
    block.push(u8::try_from(rest).unwrap());
}

/// The pseudo-headers of a request, and these lines.
pub fn request(method: &str, path: &str, lines: &[(&str, &[u8])]) -> Vec<u8> {
    let head = [
        (":method", method.as_bytes()),
        (":scheme", &b"http"[..]),
        (":authority", &b"gate.test"[..]),
        (":path", path.as_bytes()),
    ];
    block(&[&head, lines].concat())
}
