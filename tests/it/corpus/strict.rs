//! A reader of HTTP/1.1 messages that takes nothing on trust: whatever RFC 9112 leaves room for is an error here. What
//! the gate sends, to either side, must pass it.

use crate::support::wire::{Fields, find, values};

/// A whole message.
#[derive(Clone, Debug, Default)]
pub struct Message {
    /// Every byte of it.
    pub raw: Vec<u8>,
    /// Its first line.
    pub start: String,
    pub fields: Fields,
    pub body: Vec<u8>,
    pub trailers: Fields,
}

/// What the bytes so far are.
pub enum Read {
    /// The beginning of a message.
    More,
    /// A message, at their beginning.
    Whole(Box<Message>),
    /// No message, and the reason.
    Bad(String),
}

/// What an answer's framing depends on besides its head.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// It answers a HEAD.
    pub to_head: bool,
    /// The connection has ended behind these bytes.
    pub ended: bool,
}

/// Why an answer is bad whose connection ends before it does.
pub const BROKEN: &str = "it breaks off";

enum Framing {
    Sized(usize),
    Chunked,
    UntilEnd { ended: bool },
}

/// Reads a request.
pub fn request(bytes: &[u8]) -> Read {
    read(bytes, |message| {
        request_line(&message.start)?;
        if values(&message.fields, "host").len() != 1 {
            return Err("not one Host".into());
        }
        Ok(framing(&message.fields)?.unwrap_or(Framing::Sized(0)))
    })
}

/// Reads an answer, an interim one too.
pub fn answer(bytes: &[u8], exchange: Exchange) -> Read {
    let read = read(bytes, |message| {
        let status = status(&message.start).ok_or_else(|| format!("no status line: {:?}", message.start))?;
        let framing = framing(&message.fields)?;
        if exchange.to_head || status < 200 || matches!(status, 204 | 304) {
            return Ok(Framing::Sized(0));
        }
        Ok(framing.unwrap_or(Framing::UntilEnd { ended: exchange.ended }))
    });
    match read {
        Read::More if exchange.ended => Read::Bad(BROKEN.into()),
        read => read,
    }
}

/// The code of a status line.
pub fn status(line: &str) -> Option<u16> {
    let code = line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 "))?;
    let (code, _reason) = code.split_once(' ')?;
    let digits = code.len() == 3 && code.bytes().all(|byte| byte.is_ascii_digit());
    code.parse().ok().filter(|code| digits && (100..600).contains(code))
}

fn read(bytes: &[u8], check: impl Fn(&Message) -> Result<Framing, String>) -> Read {
    let Some(end) = find(bytes, b"\r\n\r\n") else { return Read::More };
    let mut rest = end + 4;
    let mut message = Message::default();
    let whole = head(&bytes[..end], &mut message).and_then(|()| check(&message)).and_then(|framing| match framing {
        Framing::Sized(size) if bytes.len() < rest + size => Ok(false),
        Framing::Sized(size) => {
            message.body = bytes[rest..rest + size].to_vec();
            rest += size;
            Ok(true)
        }
        Framing::Chunked => chunks(bytes, &mut rest, &mut message),
        Framing::UntilEnd { ended } => {
            message.body = bytes[rest..].to_vec();
            rest = bytes.len();
            Ok(ended)
        }
    });
    match whole {
        Ok(false) => Read::More,
        Ok(true) => {
            message.raw = bytes[..rest].to_vec();
            Read::Whole(Box::new(message))
        }
        Err(why) => Read::Bad(why),
    }
}

fn head(bytes: &[u8], message: &mut Message) -> Result<(), String> {
    let mut lines = lines(bytes)?.into_iter();
    let start = lines.next().unwrap_or_default();
    message.start = String::from_utf8(start.to_vec()).map_err(|_| "a first line that is no text".to_owned())?;
    message.fields = lines.map(field).collect::<Result<_, _>>()?;
    Ok(())
}

/// The lines, which end in CR LF and in nothing else.
fn lines(bytes: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut lines = Vec::new();
    let mut rest = bytes;
    while let Some(at) = find(rest, b"\r\n") {
        lines.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    lines.push(rest);
    match lines.iter().find(|line| line.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0))) {
        Some(line) => Err(format!("a bare CR, a bare LF or a NUL: {}", line.escape_ascii())),
        None => Ok(lines),
    }
}

fn field(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let bad = || format!("not a field: {}", line.escape_ascii());
    let colon = line.iter().position(|byte| *byte == b':').ok_or_else(bad)?;
    let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
    let sound = is_token(name) && value.iter().all(|byte| matches!(byte, b'\t' | b' '..=b'~' | 0x80..));
    if sound { Ok((name.to_vec(), value.to_vec())) } else { Err(bad()) }
}

fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

fn request_line(line: &str) -> Result<(), String> {
    let bad = |why: &str| Err(format!("{why}: {line:?}"));
    let [method, target, version] = line.split(' ').collect::<Vec<_>>()[..] else { return bad("not three parts") };
    if !is_token(method.as_bytes()) || version != "HTTP/1.1" {
        return bad("no method or not HTTP/1.1");
    }
    let is_path = target.starts_with('/') && target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if is_path || method == "OPTIONS" && target == "*" { Ok(()) } else { bad("no target") }
}

fn framing(fields: &Fields) -> Result<Option<Framing>, String> {
    match (&values(fields, "transfer-encoding")[..], &values(fields, "content-length")[..]) {
        ([], []) => Ok(None),
        ([b"chunked"], []) => Ok(Some(Framing::Chunked)),
        ([], [length]) if length.iter().all(u8::is_ascii_digit) => {
            let length = String::from_utf8_lossy(length).parse().map_err(|_| "no length".to_owned())?;
            Ok(Some(Framing::Sized(length)))
        }
        (codings, lengths) => Err(format!("framed as {codings:?} and {lengths:?}")),
    }
}

/// Reads chunks from `at` on. False where there are more to come.
fn chunks(bytes: &[u8], at: &mut usize, message: &mut Message) -> Result<bool, String> {
    loop {
        let Some(end) = find(&bytes[*at..], b"\r\n") else { return Ok(false) };
        let line = &bytes[*at..*at + end];
        let digits = (1..=8).contains(&line.len()) && line.iter().all(u8::is_ascii_hexdigit);
        let size = usize::from_str_radix(&String::from_utf8_lossy(line), 16).ok().filter(|_| digits);
        let size = size.ok_or_else(|| format!("not a chunk's size: {}", line.escape_ascii()))?;
        *at += end + 2;
        if size == 0 {
            break;
        }
        if bytes.len() < *at + size + 2 {
            return Ok(false);
        }
        message.body.extend_from_slice(&bytes[*at..*at + size]);
        if &bytes[*at + size..*at + size + 2] != b"\r\n" {
            return Err("a chunk without its end".into());
        }
        *at += size + 2;
    }
    loop {
        let Some(end) = find(&bytes[*at..], b"\r\n") else { return Ok(false) };
        let line = &bytes[*at..*at + end];
        *at += end + 2;
        if line.is_empty() {
            return Ok(true);
        }
        lines(line)?;
        message.trailers.push(field(line)?);
    }
}

#[test]
fn only_what_can_be_read_in_one_way_is_read() {
    let whole = |bytes: &[u8]| matches!(request(bytes), Read::Whole(message) if message.raw == bytes);
    let bad = |bytes: &[u8]| matches!(request(bytes), Read::Bad(_));
    let more = |bytes: &[u8]| matches!(request(bytes), Read::More);
    assert!(whole(b"GET /x?y HTTP/1.1\r\nHost: a\r\nX-A:\r\n\r\n"));
    assert!(whole(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok"));
    assert!(whole(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-A: 1\r\n\r\n"));
    assert!(more(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nok"));
    assert!(more(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"));
    assert!(bad(b"GET / HTTP/1.1\r\n\r\n"));
    assert!(bad(b"GET / HTTP/1.1\r\nHost: a\nX-A: 1\r\n\r\n"));
    assert!(bad(b"GET / HTTP/1.1\r\nHost: a\r\nX-A : 1\r\n\r\n"));
    assert!(bad(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"));
    assert!(bad(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;a\r\n"));
    assert!(bad(b"GET a HTTP/1.1\r\nHost: a\r\n\r\n"));
}
