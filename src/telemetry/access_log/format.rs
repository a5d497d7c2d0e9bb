//! The formats of lines.
//!
//! Clients choose much of what stands in a line. Whatever they send, it stays one line, and one field of it: control
//! characters, quotes and backslashes are escaped. Queries are left out, since keys and credentials may stand in them.

use std::io::Write as _;
use std::time::Duration;

use http::{HeaderValue, Uri, Version};

use crate::telemetry::report::Facts;
use crate::telemetry::{http_date, rfc3339};

/// How lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One JSON object a line.
    Json,
    /// The combined log format of Apache and nginx.
    Combined,
}

/// The names of the formats.
pub const FORMATS: [(&str, Format); 2] = [("json", Format::Json), ("combined", Format::Combined)];

/// The most bytes that a value of a client takes in a line, by what it is. Together a line stays below what a pipe takes at
/// once.
const MAX_PATH: usize = 1024;
const MAX_HOST: usize = 255;
const MAX_METHOD: usize = 64;
const MAX_AGENT: usize = 512;
const MAX_REFERER: usize = 512;

/// What follows a value that was cut.
const CUT: &[u8] = b"...";

/// The status of a request whose client left before it had one, in a format that must have one. It is nginx's.
const CLIENT_LEFT: u16 = 499;

/// Appends a line.
pub(super) fn write(out: &mut Vec<u8>, format: Format, facts: &Facts) {
    match format {
        Format::Json => json(out, facts),
        Format::Combined => combined(out, facts),
    }
    out.push(b'\n');
}

fn json(out: &mut Vec<u8>, facts: &Facts) {
    let Facts { seen, noted, .. } = facts;
    let mut line = Object { out, is_empty: true };
    line.plain("time", &rfc3339(facts.time()));
    line.plain("request", &facts.request.to_string());
    line.plain("client", &facts.client().to_string());
    line.text("method", seen.method.as_ref().map(|method| method.as_str().as_bytes()), MAX_METHOD);
    line.text("path", seen.target.as_ref().map(path), MAX_PATH);
    line.text("host", seen.host.as_ref().map(|host| without_user(host.as_bytes())), MAX_HOST);
    line.text("protocol", seen.version.map(|version| protocol(version).as_bytes()), MAX_METHOD);
    line.number("status", facts.status.map(|status| status.as_u16().into()));
    line.number("bytes", Some(facts.bytes));
    line.number("micros", Some(micros(facts.took)));
    line.text("route", facts.route.as_ref().map(|route| route.as_bytes()), MAX_PATH);
    line.text("outcome", facts.outcome.map(|outcome| outcome.as_str().as_bytes()), MAX_METHOD);
    line.text("key", noted.key.as_ref().map(String::as_bytes), MAX_HOST);
    if let Some(record) = noted.record {
        line.plain("record", &record.to_string());
    }
    if let Some(attempt) = noted.attempt {
        line.plain("attempt", &rfc3339(attempt));
        line.number("attempts", Some(noted.attempts.into()));
    }
    line.text("upstream", noted.upstream.as_ref().map(String::as_bytes), MAX_PATH);
    line.number("upstream_micros", noted.upstream_time.map(micros));
    line.number("store_micros", noted.store_time.map(micros));
    line.text("user_agent", seen.user_agent.as_ref().map(HeaderValue::as_bytes), MAX_AGENT);
    line.text("referer", seen.referer.as_ref().map(|value| without_query(value.as_bytes())).as_deref(), MAX_REFERER);
    line.out.push(b'}');
}

fn combined(out: &mut Vec<u8>, facts: &Facts) {
    let Facts { seen, .. } = facts;
    let client = facts.client();
    let status = facts.status.map_or(CLIENT_LEFT, |status| status.as_u16());
    // Writing to a vector cannot fail.
    let _ = write!(out, "{client} - - [{}] \"", date(facts));
    match (&seen.method, &seen.target) {
        (Some(method), Some(target)) => {
            escaped(out, method.as_str().as_bytes(), MAX_METHOD, byte);
            out.push(b' ');
            escaped(out, path(target), MAX_PATH, byte);
            out.push(b' ');
            out.extend_from_slice(seen.version.map_or("-", protocol).as_bytes());
        }
        _ => out.push(b'-'),
    }
    let _ = write!(out, "\" {status} ");
    match facts.bytes {
        0 => out.push(b'-'),
        bytes => drop(write!(out, "{bytes}")),
    }
    let referer = seen.referer.as_ref().map(|value| without_query(value.as_bytes()));
    let agent = seen.user_agent.as_ref().map(HeaderValue::as_bytes);
    for (value, most) in [(referer.as_deref(), MAX_REFERER), (agent, MAX_AGENT)] {
        out.extend_from_slice(b" \"");
        escaped(out, value.unwrap_or(b"-"), most, byte);
        out.push(b'"');
    }
}

/// A JSON object that is written.
struct Object<'a> {
    out: &'a mut Vec<u8>,
    is_empty: bool,
}

impl Object<'_> {
    /// A member whose value needs no escaping.
    fn plain(&mut self, name: &str, value: &str) {
        self.name(name);
        let _ = write!(self.out, "\"{value}\"");
    }

    fn number(&mut self, name: &str, value: Option<u64>) {
        let Some(value) = value else { return };
        self.name(name);
        let _ = write!(self.out, "{value}");
    }

    /// What is not UTF-8 is replaced.
    fn text(&mut self, name: &str, value: Option<&[u8]>, most: usize) {
        let Some(value) = value else { return };
        self.name(name);
        self.out.push(b'"');
        let text = String::from_utf8_lossy(value);
        escaped_text(self.out, &text, most);
        self.out.push(b'"');
    }

    fn name(&mut self, name: &str) {
        let before = if std::mem::take(&mut self.is_empty) { '{' } else { ',' };
        let _ = write!(self.out, "{before}\"{name}\":");
    }
}

/// Text in JSON (RFC 8259, 7).
fn escaped_text(out: &mut Vec<u8>, text: &str, most: usize) {
    let begin = out.len();
    for char in text.chars() {
        if out.len() - begin + char.len_utf8().max(6) > most {
            return out.extend_from_slice(CUT);
        }
        match char {
            '"' | '\\' => out.extend_from_slice(&[b'\\', char as u8]),
            // Some readers take the first two for line ends. The others change the order in which a terminal shows a line.
            char if char.is_control() || matches!(char, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                drop(write!(out, "\\u{:04x}", u32::from(char)))
            }
            char => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// Bytes, each of which `write` escapes as it must.
fn escaped(out: &mut Vec<u8>, bytes: &[u8], most: usize, write: fn(&mut Vec<u8>, u8)) {
    let begin = out.len();
    for byte in bytes {
        if out.len() - begin + 4 > most {
            return out.extend_from_slice(CUT);
        }
        write(out, *byte);
    }
}

/// A byte between quotes, as Apache writes it.
fn byte(out: &mut Vec<u8>, byte: u8) {
    match byte {
        b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
        b' '..=b'~' => out.push(byte),
        _ => drop(write!(out, "\\x{byte:02x}")),
    }
}

/// The path, as the other logs have it: without the query.
fn path(target: &Uri) -> &[u8] {
    target.path().as_bytes()
}

/// A URL without its query, its fragment and its user.
fn without_query(url: &[u8]) -> Vec<u8> {
    let end = url.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(url.len());
    let url = &url[..end];
    // Browsers read one slash, and what is turned the other way, as two.
    let is_slash = |byte: &u8| matches!(byte, b'/' | b'\\');
    let scheme = url.iter().position(|byte| is_slash(byte) || *byte == b':').filter(|at| url[*at] == b':');
    let after = scheme.map_or(0, |colon| colon + 1);
    let slashes = url[after..].iter().take_while(|byte| is_slash(byte)).count();
    let authority = match (scheme, slashes) {
        // `user:password@host` has no scheme.
        (Some(_), 0) if !matches!(&url[..after], b"http:" | b"https:") => 0,
        // A path.
        (None, 1) => return url.to_vec(),
        _ => after + slashes,
    };
    let path = url[authority..].iter().position(is_slash).map_or(url.len(), |slash| authority + slash);
    [&url[..authority], without_user(&url[authority..path]), &url[path..]].concat()
}

/// What follows a user and a password, which nobody needs.
fn without_user(authority: &[u8]) -> &[u8] {
    memchr::memrchr(b'@', authority).map_or(authority, |at| &authority[at + 1..])
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_09 => "HTTP/0.9",
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_11 => "HTTP/1.1",
        Version::HTTP_2 => "HTTP/2.0",
        _ => "HTTP/3.0",
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// `23/Nov/2026:22:50:41 +0000`
fn date(facts: &Facts) -> String {
    // `Mon, 23 Nov 2026 22:50:41 GMT`
    let date = http_date(facts.time());
    let words: Vec<&str> = date.split(' ').collect();
    match words[..] {
        [_, day, month, year, time, _] => format!("{day}/{month}/{year}:{time} +0000"),
        _ => date,
    }
}

#[cfg(test)]
mod tests;
