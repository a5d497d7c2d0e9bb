//! Checks the head of a request.

use http::{HeaderMap, Uri};

use crate::http::fault::Fault;
use crate::http::forwarding::is_token;
use crate::http::headers::members;
use crate::http::limits::{Limits, MAX_TRAILERS, size_of_fields};
use crate::http::white_space::is_padded;

/// The longest target. `http::Uri` takes no longer one.
const LONGEST_TARGET: usize = 65_534;

/// How the end of a body is found (RFC 9112, 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// By its length; 0 is none.
    Length(u64),
    /// By its last chunk.
    Chunked,
}

/// The properties of a head that decide how to read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) framing: Framing,
    /// Whether another protocol may follow.
    pub(super) upgrades: bool,
}

/// The framing fields of a head, as far as it was read.
#[derive(Default)]
struct BodyFields {
    length: Option<u64>,
    is_chunked: bool,
}

/// The upgrade fields of a head, as far as it was read.
#[derive(Default)]
struct UpgradeFields {
    is_wanted: bool,
    is_h2c: bool,
    is_listed: bool,
}

/// Checks a head, from its request line to the empty line.
pub(super) fn judge(head: &[u8], limits: &Limits) -> Result<Head, Fault> {
    let is_clear = is_clear(head);
    let mut lines = lines(head);
    let is_http_1_0 = request_line(lines.next().unwrap_or_default())?;
    let (mut body, mut upgrade, mut count) = (BodyFields::default(), UpgradeFields::default(), 0);
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = field(line, is_clear)?;
        count += 1;
        if count > limits.max_headers {
            return Err(Fault::TooManyHeaders);
        }
        match name.len() {
            6 if name.eq_ignore_ascii_case(b"expect") => Fault::of_expectation(value, is_http_1_0)?,
            7 if name.eq_ignore_ascii_case(b"upgrade") => {
                upgrade.is_wanted = true;
                upgrade.is_h2c |= has_token(value, b"h2c");
            }
            10 if name.eq_ignore_ascii_case(b"connection") => upgrade.is_listed |= has_token(value, b"upgrade"),
            14 if name.eq_ignore_ascii_case(b"content-length") => body.add_length(value)?,
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => body.add_coding(value, is_http_1_0)?,
            _ => {}
        }
    }
    let upgrades = upgrade.is_wanted && upgrade.is_listed && !upgrade.is_h2c && !is_http_1_0;
    Ok(Head { framing: body.framing()?, upgrades })
}

/// Checks the trailers of a body, from after its last chunk to the empty line.
pub(super) fn judge_trailers(trailers: &[u8], limits: &Limits) -> Result<(), Fault> {
    for (place, line) in lines(trailers).take_while(|line| !line.is_empty()).enumerate() {
        let (name, _) = field(line, false)?;
        if place >= limits.max_headers {
            return Err(Fault::TooManyHeaders);
        }
        if REFUSED_TRAILERS.iter().any(|forbidden| name.eq_ignore_ascii_case(forbidden.as_bytes())) {
            return Err(FORBIDDEN_TRAILER);
        }
    }
    Ok(())
}

/// Checks HTTP/2 trailers.
pub(in crate::http) fn judge_trailer_fields(trailers: &HeaderMap, limits: &Limits) -> Result<(), Fault> {
    if trailers.len() > limits.max_headers {
        return Err(Fault::TooManyHeaders);
    }
    if size_of_fields(trailers) >= limits.max_header_size.min(MAX_TRAILERS) {
        return Err(Fault::HeadTooLarge);
    }
    if REFUSED_TRAILERS.iter().any(|forbidden| trailers.contains_key(*forbidden)) {
        return Err(FORBIDDEN_TRAILER);
    }
    if trailers.values().any(is_padded) {
        return Err(Fault::Malformed("a trailer has white space around its value (RFC 9113, 8.2.1)"));
    }
    Ok(())
}

/// Fields that a recipient could mistake for header fields. The gate refuses a request that has one as a trailer.
const REFUSED_TRAILERS: [&str; 3] = ["content-length", "transfer-encoding", "host"];
const FORBIDDEN_TRAILER: Fault = Fault::Malformed("a trailer says what only a header may (RFC 9110, 6.5.1)");

/// Lines without their ends. The caller has checked that each ends in CR LF.
fn lines(mut head: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (line, rest) = head.split_at_checked(memchr::memchr(b'\n', head)? + 1)?;
        head = rest;
        Some(line.strip_suffix(b"\r\n").unwrap_or(line))
    })
}

/// Whether a head has no control characters but tabs and line ends: then its values need no separate check. Each LF
/// must follow a CR.
fn is_clear(head: &[u8]) -> bool {
    // Sums of bytes, which the compiler vectorises.
    let (mut controls, mut ends) = (0, 0);
    for chunk in head.chunks(128) {
        let is_control = |byte: u8| byte < b' ' && byte != b'\t' || byte == 0x7F;
        controls += usize::from(chunk.iter().map(|byte| u8::from(is_control(*byte))).sum::<u8>());
        ends += usize::from(chunk.iter().map(|byte| u8::from(*byte == b'\n')).sum::<u8>());
    }
    controls == 2 * ends
}

/// Checks the request line (RFC 9112, 3). Returns whether the version is HTTP/1.0.
fn request_line<'a>(line: &'a [u8]) -> Result<bool, Fault> {
    let word = |text: &'a [u8]| {
        let (word, rest) = text.split_at(memchr::memchr(b' ', text)?);
        Some((word, &rest[1..]))
    };
    let words = word(line).and_then(|(method, rest)| word(rest).map(|(target, version)| (method, target, version)));
    let Some((method, target, version)) = words else {
        return Err(Fault::Malformed("the request line is not a method, a target and a version (RFC 9112, 3)"));
    };
    if method.is_empty() || !method.iter().all(|byte| is(*byte, TOKEN)) {
        return Err(Fault::Malformed("the request's method is no token (RFC 9110, 9.1)"));
    }
    if method == b"CONNECT" {
        return Err(Fault::Malformed("CONNECT is not served here"));
    }
    let is_http_1_0 = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        _ => return Err(Fault::Malformed("the request's version is neither HTTP/1.1 nor HTTP/1.0 (RFC 9112, 2.3)")),
    };
    check_target(target)?;
    Ok(is_http_1_0)
}

/// Checks the target of a request (RFC 9112, 3.2).
pub(in crate::http) fn check_target(target: &[u8]) -> Result<(), Fault> {
    const WRONG: Fault = Fault::Malformed("the request's target is no path and no URL (RFC 9112, 3.2)");
    if target.len() > LONGEST_TARGET {
        return Err(Fault::HeadTooLarge);
    }
    if target.first() != Some(&b'/') {
        // Rare: a URL, or an asterisk.
        let is_clear = target.iter().all(|byte| is(*byte, VISIBLE) && *byte != b'#');
        return if is_clear && Uri::try_from(target).is_ok() { Ok(()) } else { Err(WRONG) };
    }
    let path = target.iter().position(|byte| !is(*byte, PATH)).unwrap_or(target.len());
    let rest = &target[path..];
    match rest.first() {
        None => Ok(()),
        Some(b'?') if rest.iter().all(|byte| is(*byte, QUERY)) => Ok(()),
        Some(_) => Err(WRONG),
    }
}

/// The name and the value of a header line (RFC 9112, 5), which is of a head that [`is_clear`].
fn field(line: &[u8], is_clear: bool) -> Result<(&[u8], &[u8]), Fault> {
    let end = line.iter().position(|byte| !is(*byte, TOKEN)).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    match rest.split_first() {
        Some((b':', value)) if !name.is_empty() => {
            if !is_clear && !value.iter().all(|byte| is(*byte, VALUE)) {
                return Err(Fault::CONTROL_CHARACTER);
            }
            // `http::HeaderName` takes no longer one.
            if name.len() > usize::from(u16::MAX) / 2 {
                return Err(Fault::HeadTooLarge);
            }
            // Spaces and tabs: no other white space is left by now.
            Ok((name, value.trim_ascii()))
        }
        Some((b' ' | b'\t', _)) if name.is_empty() => {
            Err(Fault::Malformed("a header is folded over several lines (RFC 9112, 5.2)"))
        }
        Some((b' ' | b'\t', _)) => {
            Err(Fault::Malformed("a header has white space between its name and the colon (RFC 9112, 5.1)"))
        }
        _ => Err(Fault::Malformed("a header has no name, or one that is no token (RFC 9110, 5.1)")),
    }
}

fn has_token(value: &[u8], token: &[u8]) -> bool {
    members(value).any(|member| member.eq_ignore_ascii_case(token))
}

impl BodyFields {
    /// A recipient may fold equal lengths into one (RFC 9110, 8.6). No well-behaved client sends them.
    fn add_length(&mut self, value: &[u8]) -> Result<(), Fault> {
        let is_number = !value.is_empty() && value.len() <= 18 && value.iter().all(u8::is_ascii_digit);
        let length = std::str::from_utf8(value).ok().filter(|_| is_number).and_then(|value| value.parse().ok());
        let Some(length) = length else {
            return Err(Fault::Malformed("Content-Length is not one number (RFC 9110, 8.6)"));
        };
        if self.length.replace(length).is_some() {
            return Err(Fault::Malformed("the request has more than one Content-Length (RFC 9112, 6.3)"));
        }
        Ok(())
    }

    fn add_coding(&mut self, value: &[u8], is_http_1_0: bool) -> Result<(), Fault> {
        if is_http_1_0 {
            return Err(Fault::Malformed("HTTP/1.0 has no transfer codings (RFC 9112, 6.1)"));
        }
        if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
            return Err(Fault::Malformed("the only transfer coding understood here is chunked, once (RFC 9112, 6.1)"));
        }
        self.is_chunked = true;
        Ok(())
    }

    fn framing(&self) -> Result<Framing, Fault> {
        match (self.length, self.is_chunked) {
            (Some(_), true) => {
                Err(Fault::Malformed("the request has a Content-Length and a Transfer-Encoding (RFC 9112, 6.1)"))
            }
            (None, true) => Ok(Framing::Chunked),
            (length, false) => Ok(Framing::Length(length.unwrap_or(0))),
        }
    }
}

const TOKEN: u8 = 1;
const VALUE: u8 = 2;
const VISIBLE: u8 = 4;
/// The bytes that `http::Uri` accepts in a path, and in a query.
const PATH: u8 = 8;
const QUERY: u8 = 16;

/// Whether a byte is of this class.
pub(super) fn is(byte: u8, class: u8) -> bool {
    CLASSES[usize::from(byte)] & class != 0
}

/// Whether a head can begin with this byte.
pub(super) fn may_begin(byte: u8) -> bool {
    is(byte, TOKEN) || byte == b'\r'
}

/// Whether it can stand in a chunk's extension.
pub(super) fn is_text(byte: u8) -> bool {
    is(byte, VALUE)
}

static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let char = byte as u8;
        let mut class = 0;
        if is_token(char) {
            class |= TOKEN;
        }
        if char == b'\t' || char == b' ' || char.is_ascii_graphic() || !char.is_ascii() {
            class |= VALUE;
        }
        if char.is_ascii_graphic() {
            class |= VISIBLE;
            if !is_one_of(char, b"#<>?`") {
                class |= PATH;
            }
            if !is_one_of(char, b"#<>\"") {
                class |= QUERY;
            }
        }
        classes[byte] = class;
        byte += 1;
    }
    classes
};

const fn is_one_of(byte: u8, set: &[u8]) -> bool {
    let mut place = 0;
    while place < set.len() {
        if set[place] == byte {
            return true;
        }
        place += 1;
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn judged(head: &str) -> Result<Head, Fault> {
        judge(format!("{head}\r\n\r\n").as_bytes(), &Limits::default())
    }

    fn of(lines: &str) -> Result<Head, Fault> {
        judged(&format!("POST /x HTTP/1.1\r\nHost: a\r\n{lines}"))
    }

    #[test]
    fn trailers_of_http_2_have_less_than_16_kib_and_than_a_head() {
        let judged = |length: usize, max_header_size| {
            let trailers = HeaderMap::from_iter([(http::header::ETAG, "y".repeat(length).parse().unwrap())]);
            judge_trailer_fields(&trailers, &Limits { max_header_size, ..Limits::default() })
        };
        let beside = "etag".len() + 32;
        for (limit, most) in [(1 << 20, 16 << 10), (16 << 10, 16 << 10), (2000, 2000)] {
            assert_eq!(judged(most - beside, limit), Err(Fault::HeadTooLarge), "{limit}");
            assert_eq!(judged(most - beside - 1, limit), Ok(()), "{limit}");
        }
    }

    #[test]
    fn framing_is_beyond_doubt_or_refused() {
        assert_eq!(of("Content-Length: 5\t").unwrap().framing, Framing::Length(5));
        assert_eq!(of("content-LENGTH:007").unwrap().framing, Framing::Length(7));
        assert_eq!(of("Transfer-Encoding: Chunked").unwrap().framing, Framing::Chunked);
        for lines in [
            "Content-Length: 5\r\nContent-Length: 5",
            "Content-Length: 5, 5",
            "Content-Length: +5",
            "Content-Length: -5",
            "Content-Length: 0x5",
            "Content-Length: 5 5",
            "Content-Length:",
            "Content-Length: 99999999999999999999",
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: chunked, identity",
            "Transfer-Encoding: identity",
            "Transfer-Encoding: xchunked",
            "Transfer-Encoding: \"chunked\"",
            "Transfer-Encoding:",
            "Transfer-Encoding: chunked;q=1",
        ] {
            assert!(matches!(of(lines), Err(Fault::Malformed(_))), "{lines}");
        }
        assert!(judged("POST /x HTTP/1.0\r\nTransfer-Encoding: chunked").is_err());
    }

    #[test]
    fn lines_are_headers_or_refused() {
        assert!(of("X: \u{e9}\tb\r\nEmpty:\r\n!#$%&'*+-.^_`|~9: x").is_ok());
        for lines in [
            " folded: x",
            "A: b\r\n folded",
            "A: b\r\n\tfolded",
            "A : b",
            "A\t: b",
            ": b",
            "A",
            "A\0: b",
            "A: b\0",
            "A: b\rc",
            "A\u{e9}: b",
            "A: \u{7f}",
            "A(b): c",
        ] {
            assert!(matches!(of(lines), Err(Fault::Malformed(_))), "{lines:?}");
        }
    }

    proptest! {
        #[test]
        fn clear_heads_have_clear_values(values in prop::collection::vec("[ -~\t\r\n\u{0}\u{7f}\u{e9}]{0,40}", 1..9)) {
            let head = values.iter().map(|value| format!("A: {value}\r\n")).collect::<String>();
            let is_whole = head.match_indices('\n').all(|(end, _)| head[..end].ends_with('\r'));
            let values_are_clear = lines(head.as_bytes()).all(|line| line.iter().all(|byte| is(*byte, VALUE)));
            if is_whole {
                prop_assert_eq!(is_clear(head.as_bytes()), values_are_clear);
            }
        }
    }

    #[test]
    fn request_lines_are_three_words_or_refused() {
        for line in [
            "GET / HTTP/1.0",
            "get /a?b#c HTTP/1.1".replace("#c", "").as_str(),
            "OPTIONS * HTTP/1.1",
            "GET http://a/ HTTP/1.1",
            "M-SEARCH /\"{}|^ HTTP/1.1",
            "GET /?a=`{}| HTTP/1.1",
        ] {
            assert!(judged(line).is_ok(), "{line}");
        }
        for line in [
            "",
            "GET",
            "GET /",
            "GET  / HTTP/1.1",
            "GET /  HTTP/1.1",
            "GET / HTTP/1.1 ",
            " GET / HTTP/1.1",
            "GET\t/ HTTP/1.1",
            "GET / HTTP/1.2",
            "GET / HTTP/2.0",
            "GET / http/1.1",
            "GET / HTTP/01.1",
            "GET /# HTTP/1.1",
            "GET /a?b#c HTTP/1.1",
            "GET /< HTTP/1.1",
            "GET /?> HTTP/1.1",
            "GET /\u{e9} HTTP/1.1",
            "GET /\0 HTTP/1.1",
            "CONNECT a:443 HTTP/1.1",
            "G(T / HTTP/1.1",
            "GET http:// HTTP/1.1",
        ] {
            assert!(judged(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn accepted_targets_are_valid_uris() {
        for byte in 0..=u8::MAX {
            for prefix in ["/", "/?"] {
                let target = [prefix.as_bytes(), &[byte]].concat();
                if check_target(&target).is_ok() {
                    assert!(Uri::try_from(&target[..]).is_ok(), "{:?}", String::from_utf8_lossy(&target));
                }
            }
        }
    }

    #[test]
    fn only_one_expectation_is_understood() {
        assert!(of("Expect: 100-Continue").is_ok());
        assert_eq!(of("Expect: 200-ok"), Err(Fault::Expectation));
        assert_eq!(of("Expect: 100-continue, x"), Err(Fault::Expectation));
        assert!(judged("POST / HTTP/1.0\r\nExpect: x").is_ok());
    }

    #[test]
    fn an_upgrade_is_seen() {
        assert!(of("Connection: keep-alive, Upgrade\r\nUpgrade: websocket").unwrap().upgrades);
        assert!(!of("Connection: Upgrade\r\nUpgrade: h2c").unwrap().upgrades);
        assert!(!of("Upgrade: websocket").unwrap().upgrades);
    }

    #[test]
    fn there_are_so_many_lines_at_most() {
        let lines = |count| vec!["A: b"; count].join("\r\n");
        let judged = |count| judged(&format!("GET / HTTP/1.1\r\n{}", lines(count)));
        assert!(judged(100).is_ok());
        assert_eq!(judged(101), Err(Fault::TooManyHeaders));
    }

    #[test]
    fn trailers_frame_nothing() {
        let limits = Limits::default();
        assert!(judge_trailers(b"A: b\r\nSum: 5\r\n\r\n", &limits).is_ok());
        assert!(judge_trailers(b"\r\n", &limits).is_ok());
        for wrong in [&b"Content-Length: 5\r\n\r\n"[..], b"host: a\r\n\r\n", b"A : b\r\n\r\n", b" x\r\n\r\n"] {
            assert!(judge_trailers(wrong, &limits).is_err());
        }
        let of = |value| HeaderMap::from_iter([(http::header::VIA, http::HeaderValue::from_static(value))]);
        assert!(judge_trailer_fields(&of("a b"), &limits).is_ok());
        for padded in [" a", "a\t", " "] {
            assert!(matches!(judge_trailer_fields(&of(padded), &limits), Err(Fault::Malformed(_))), "{padded:?}");
        }
    }
}
