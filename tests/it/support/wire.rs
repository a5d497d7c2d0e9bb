//! HTTP/1.1 as bytes: exact heads, bodies by their framing, and whether they ended as they should.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Header fields in the order received, values without the white space around them.
pub type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// The head of a message.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// Every byte, up to and including the empty line.
    pub raw: Vec<u8>,
    /// The first line.
    pub start: Vec<u8>,
    pub fields: Fields,
}

/// The body of a message.
#[derive(Clone, Debug, Default)]
pub struct Body {
    pub bytes: Vec<u8>,
    pub trailers: Fields,
    /// Whether it ended as its framing says.
    pub complete: bool,
}

/// How a body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    None,
    Sized(usize),
    Chunked,
    UntilClose,
}

/// A connection with what was read and not yet used.
pub struct Wire {
    pub stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a connected socket");
        Self { stream, buffer: Vec::new() }
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Reads once more. Zero is the end.
    fn fill(&mut self) -> io::Result<usize> {
        let mut chunk = [0; 16 * 1024];
        loop {
            match self.stream.read(&mut chunk) {
                // A process that was stopped and goes on finds a read with a timeout interrupted.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let n = read?;
                    self.buffer.extend_from_slice(&chunk[..n]);
                    return Ok(n);
                }
            }
        }
    }

    /// The next head, or nothing where the connection ends before it does.
    pub fn head(&mut self) -> io::Result<Option<Head>> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let raw: Vec<u8> = self.buffer.drain(..end + 4).collect();
                return Ok(Some(Head::parse(raw)));
            }
            if self.fill()? == 0 {
                return Ok(None);
            }
        }
    }

    /// The next bytes, whatever they are; empty at the end.
    pub fn some(&mut self) -> io::Result<Vec<u8>> {
        if self.buffer.is_empty() {
            self.fill()?;
        }
        Ok(std::mem::take(&mut self.buffer))
    }

    /// Everything up to the end or a reset.
    pub fn rest(&mut self) -> Vec<u8> {
        while matches!(self.fill(), Ok(n) if n > 0) {}
        std::mem::take(&mut self.buffer)
    }

    /// Waits until the bytes that have arrived contain `what`, and takes them up to its end.
    pub fn until(&mut self, what: &[u8]) -> io::Result<Vec<u8>> {
        loop {
            if let Some(at) = find(&self.buffer, what) {
                return Ok(self.buffer.drain(..at + what.len()).collect());
            }
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    pub fn body(&mut self, framing: Framing) -> Body {
        let mut body = Body::default();
        let ended = match framing {
            Framing::None => Ok(()),
            Framing::Sized(size) => self.sized(size, &mut body.bytes),
            Framing::Chunked => self.chunked(&mut body),
            Framing::UntilClose => loop {
                match self.some() {
                    Ok(bytes) if bytes.is_empty() => break Ok(()),
                    Ok(bytes) => body.bytes.extend(bytes),
                    Err(error) => break Err(error),
                }
            },
        };
        body.complete = match ended {
            Ok(()) => true,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                panic!("a body stalled after {} bytes", body.bytes.len())
            }
            Err(_) => false,
        };
        body
    }

    fn sized(&mut self, size: usize, into: &mut Vec<u8>) -> io::Result<()> {
        let end = into.len() + size;
        loop {
            let take = self.buffer.len().min(end - into.len());
            into.extend(self.buffer.drain(..take));
            if into.len() == end {
                return Ok(());
            }
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn chunked(&mut self, body: &mut Body) -> io::Result<()> {
        loop {
            let line = self.until(b"\r\n")?;
            let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
            let size = usize::from_str_radix(String::from_utf8_lossy(digits).trim(), 16)
                .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
            if size == 0 {
                break;
            }
            self.sized(size, &mut body.bytes)?;
            self.until(b"\r\n")?;
        }
        loop {
            let line = self.until(b"\r\n")?;
            match field(&line[..line.len() - 2]) {
                Some(field) => body.trailers.push(field),
                None => return Ok(()),
            }
        }
    }

    /// Whether the other side closes (or resets) within `time`, sending nothing more.
    pub fn is_closed_within(&mut self, time: Duration) -> bool {
        self.stream.set_read_timeout(Some(time)).expect("not zero");
        let closed = match self.fill() {
            Ok(n) => n == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        };
        self.stream.set_read_timeout(Some(super::wait::PATIENCE)).expect("not zero");
        closed
    }
}

impl Head {
    pub fn parse(raw: Vec<u8>) -> Self {
        let mut lines = raw.strip_suffix(b"\r\n\r\n").unwrap_or(&raw).split(|byte| *byte == b'\n');
        let start = lines.next().map(|line| line.strip_suffix(b"\r").unwrap_or(line)).unwrap_or_default().to_vec();
        let fields = lines.filter_map(|line| field(line.strip_suffix(b"\r").unwrap_or(line))).collect();
        Self { raw, start, fields }
    }

    /// Every value of a field, in order.
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        values(&self.fields, name)
    }

    /// The first value of a field.
    pub fn get(&self, name: &str) -> Option<String> {
        self.all(name).first().map(|value| String::from_utf8_lossy(value).into_owned())
    }

    pub fn has(&self, name: &str) -> bool {
        !self.all(name).is_empty()
    }

    /// How the body of a message with this head is delimited where its kind does not say otherwise.
    pub fn framing(&self, otherwise: Framing) -> Framing {
        if self.get("transfer-encoding").is_some_and(|value| value.to_ascii_lowercase().contains("chunked")) {
            Framing::Chunked
        } else if let Some(length) = self.get("content-length") {
            Framing::Sized(length.parse().expect("a length"))
        } else {
            otherwise
        }
    }
}

/// Every value of a field, in order.
pub fn values<'a>(fields: &'a Fields, name: &str) -> Vec<&'a [u8]> {
    fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| &value[..]).collect()
}

fn field(line: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    Some((line[..colon].to_vec(), line[colon + 1..].trim_ascii().to_vec()))
}

pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
