//! A replay has the lines of the first answer.

use http::header::CONTENT_LENGTH;
use http::{Method, Response, StatusCode};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::http::answer;

type Line = (String, Vec<u8>);

const BODY: &[u8] = b"body";

/// Headers of one connection, and headers between the gate and the upstream alone.
const NEVER: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
    "idempotency-control",
];

/// A header's raw value: visible, spaces within, and `obs-text` (RFC 9110, 5.5).
fn value() -> impl Strategy<Value = Vec<u8>> {
    vec(prop_oneof![0x21..0x7fu8, 0x80..=0xffu8, Just(b' '), Just(b'\t')], 0..12)
}

/// Lines as they arrive: names repeat, and some are for one connection, or listed by `Connection`.
fn lines_received() -> impl Strategy<Value = Vec<Line>> {
    let name = prop_oneof![
        3 => "[a-e]".prop_map(|name| format!("x-{name}")),
        1 => prop::sample::select(&["set-cookie", "etag", "date", "idempotency-status"][..]).prop_map(str::to_owned),
        1 => prop::sample::select(&NEVER[..]).prop_map(str::to_owned),
    ];
    let length = prop_oneof![9 => Just(BODY.len().to_string().into_bytes()), 1 => value()];
    let line = prop_oneof![
        9 => (name, value()),
        1 => length.prop_map(|length| ("content-length".to_owned(), length)),
        1 => "(x-[a-e], ){0,2}(close|X-A|content-length|set-cookie)"
            .prop_map(|list| ("connection".to_owned(), list.into_bytes())),
    ];
    vec(line, 0..20)
}

/// What a client gets of the lines: those of one name stand together, where the first of them stood.
fn expected(received: &[Line], added: &str) -> Vec<Line> {
    let connection = received.iter().filter(|(name, _)| name == "connection");
    let listed: Vec<String> = connection
        .flat_map(|(_, value)| value.split(|byte| *byte == b','))
        .map(|token| String::from_utf8_lossy(token.trim_ascii()).to_lowercase())
        .collect();
    let is_chunked = received.iter().any(|(name, _)| name == "transfer-encoding");
    let passes = |name: &str| match name {
        "content-length" => !is_chunked,
        _ => !NEVER.contains(&name) && name != added && !listed.iter().any(|token| token == name),
    };
    let passed: Vec<&Line> = received.iter().filter(|(name, _)| passes(name)).collect();
    let mut names: Vec<&str> = Vec::new();
    passed.iter().for_each(|(name, _)| {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    });
    names
        .iter()
        .flat_map(|name| passed.iter().filter(move |line| line.0 == *name).map(|line| (*line).clone()))
        .collect()
}

fn written(headers: &HeaderMap) -> Vec<Line> {
    headers.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}

/// Digits alone, which may begin with zeros (RFC 9110, 8.6).
fn is_length_of(value: &HeaderValue, body: &[u8]) -> bool {
    let digits = value.as_bytes();
    !digits.is_empty()
        && digits.iter().all(u8::is_ascii_digit)
        && String::from_utf8_lossy(digits).trim_start_matches('0') == body.len().to_string()
}

proptest! {
    #[test]
    fn a_replay_has_the_lines_of_the_first_answer(
        received in lines_received(),
        status in 200..600u16,
        trailers in vec(("[a-c]".prop_map(|name| format!("x-t-{name}")), value()), 0..3),
        is_head: bool,
    ) {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in &received {
            let name = name.parse::<HeaderName>().unwrap();
            response.headers_mut().append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let added = HeaderName::from_static("idempotency-status");
        let head = head_of_answer(response.into_parts().0, &[added]).unwrap();
        let trailers = trailers
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_bytes(value).unwrap()))
            .collect::<Vec<(HeaderName, _)>>();
        let content = Content { body: Bytes::from_static(BODY), trailers: trailers.clone() };
        let first = Answer { content: Some(content), ..head };

        let is_other = |(name, length): &(HeaderName, _)| *name == CONTENT_LENGTH && !is_length_of(length, BODY);
        let has_other_length = first.headers.iter().any(is_other);
        let Ok(kept) = Answer::decode(&first.encode()) else {
            prop_assert!(has_other_length);
            return Ok(());
        };
        // No upstream's answer has one: where it ends would be in doubt.
        prop_assert!(!has_other_length);
        prop_assert_eq!(&kept, &first);
        let method = if is_head { Method::HEAD } else { Method::POST };
        let (replayed, _) = answer::response(&kept, &method, http::Version::HTTP_11).into_parts();
        prop_assert_eq!(replayed.status.as_u16(), status);

        let mut expected = expected(&received, "idempotency-status");
        if status == 204 {
            // It has no length (RFC 9110, 8.6).
            expected.retain(|(name, _)| name != "content-length");
        }
        if !trailers.is_empty() && !is_head && status != 304 {
            // Trailers come in chunks, and are announced.
            expected.retain(|(name, _)| name != "content-length");
            let announced = trailers.iter().fold(HeaderMap::new(), |mut map, (name, value)| {
                map.append(name, value.clone());
                map
            });
            let names: Vec<_> = announced.keys().map(HeaderName::as_str).collect();
            expected.push(("trailer".to_owned(), names.join(", ").into_bytes()));
        }
        prop_assert_eq!(written(&replayed.headers), expected);
    }
}
