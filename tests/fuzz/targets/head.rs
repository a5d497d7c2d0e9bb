//! What a client sends: what is let through is requests that another parser, and a plain reading of RFC 9112, see in the
//! same way and end in the same place; and it makes no difference in which pieces it comes.
//!
//! The first byte says how long the pieces are; the others are what comes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oncegate::http::http1::MessageParser;
use oncegate::http::limits::Limits;

fuzz_target!(|input: &[u8]| {
    let Some((&length, stream)) = input.split_first() else { return };
    let (whole, is_wrong) = read(stream, stream.len().max(1));
    let (pieces, is_wrong_in_pieces) = read(stream, usize::from(length).max(1));
    assert_eq!((&whole, is_wrong), (&pieces, is_wrong_in_pieces));
    whole.iter().for_each(|request| check(request));
});

/// The requests that are let through whole, and whether something else follows them.
fn read(stream: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
    let limits = Limits { max_header_size: 1024, max_headers: 16, ..Limits::default() };
    let (mut message, mut requests) = (MessageParser::new(limits), Vec::new());
    let (mut request, mut held) = (Vec::new(), Vec::new());
    for piece in stream.chunks(piece) {
        held.extend_from_slice(piece);
        loop {
            match message.follow(&held) {
                Ok(0) => break,
                Ok(passed) => request.extend(held.drain(..passed)),
                Err(_) => return (requests, true),
            }
            if message.is_between() {
                requests.push(std::mem::take(&mut request));
            }
        }
    }
    (requests, false)
}

/// Reads one request again.
fn check(request: &[u8]) {
    let mut headers = [httparse::EMPTY_HEADER; 16];
    let mut parsed = httparse::Request::new(&mut headers);
    let Ok(httparse::Status::Complete(end)) = parsed.parse(request) else { panic!("another parser sees no request") };
    let (head, body) = request.split_at(end);
    assert!(http::Method::from_bytes(parsed.method.unwrap().as_bytes()).is_ok());
    assert!(http::Uri::try_from(parsed.path.unwrap()).is_ok());
    // Each line that is not empty is the first or a header.
    let lines = head.split(|byte| *byte == b'\n').filter(|line| !line.is_empty() && *line != b"\r").count();
    assert_eq!(lines, 1 + parsed.headers.len());
    let named = |name: &str| {
        let values = parsed.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        values.map(|header| header.value.to_vec()).collect::<Vec<_>>()
    };
    for header in parsed.headers.iter() {
        assert!(http::HeaderName::from_bytes(header.name.as_bytes()).is_ok());
        assert!(http::HeaderValue::from_bytes(header.value).is_ok());
    }
    match (&named("content-length")[..], &named("transfer-encoding")[..]) {
        ([], []) => assert!(body.is_empty()),
        ([length], []) => assert_eq!(std::str::from_utf8(length).unwrap().parse(), Ok(body.len())),
        ([], [coding]) => {
            assert!(coding.eq_ignore_ascii_case(b"chunked") && parsed.version == Some(1));
            assert_eq!(chunks(body), Some(body.len()), "the last chunk is not the end");
        }
        _ => panic!("its end is in doubt"),
    }
}

/// Where a body in chunks ends.
fn chunks(body: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let line = line(body, at)?;
        let size = line.split(|byte| *byte == b';').next()?;
        let size = std::str::from_utf8(size).ok()?.trim_end_matches([' ', '\t']);
        let size = usize::from_str_radix(size, 16).ok().filter(|_| !size.starts_with('+'))?;
        at += line.len() + 2;
        if size == 0 {
            break;
        }
        at += size;
        (body.get(at..at + 2)? == b"\r\n").then_some(())?;
        at += 2;
    }
    loop {
        let trailer = line(body, at)?;
        at += trailer.len() + 2;
        if trailer.is_empty() {
            return Some(at);
        }
    }
}

fn line(bytes: &[u8], from: usize) -> Option<&[u8]> {
    let rest = bytes.get(from..)?;
    let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
    Some(&rest[..end])
}
