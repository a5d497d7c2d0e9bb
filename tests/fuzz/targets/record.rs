//! Stored forms from a store that may hold anything: they are read or they are not, at no more cost than their size.

#![no_main]

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode, Version};
use libfuzzer_sys::fuzz_target;
use oncegate::http::answer;
use oncegate::idempotency::codec::{Answer, Content, Head};

fuzz_target!(|input: &[u8]| {
    let answer = from_text(input);
    assert_eq!(Answer::decode(&answer.encode()), Ok(answer), "what was written is read");
    read(input);
});

/// Reads the input as a stored form.
fn read(stored: &[u8]) {
    let stored = Bytes::copy_from_slice(stored);
    if let Ok(answer) = Answer::decode(&stored) {
        let again = answer.encode();
        assert_eq!(again.len(), stored.len(), "nothing is left out or made up");
        assert_eq!(Answer::decode(&again).as_ref(), Ok(&answer));
        for method in [Method::POST, Method::HEAD] {
            for version in [Version::HTTP_11, Version::HTTP_2] {
                drop(answer::response(&answer, &method, version));
            }
        }
        for cut in 0..stored.len().min(64) {
            // A body may end anywhere, what stands before it may not.
            if let Ok(shorter) = Answer::decode(&stored.slice(..stored.len() - cut)) {
                assert_eq!((&shorter.headers, shorter.status), (&answer.headers, answer.status));
            }
        }
    }
    if let Ok(head) = Head::decode(&stored) {
        let again = head.encode();
        assert_eq!(again.len(), stored.len(), "nothing is left out or made up");
        assert_eq!(Head::decode(&again), Ok(head));
        for end in 0..stored.len() {
            assert!(Head::decode(&stored.slice(..end)).is_err(), "cut off, it is no head");
        }
    }
}

/// An answer from lines of text, which is easier to come by than lengths that fit: two bytes for the status and what
/// else there is, lines of headers, and after an empty line the body.
fn from_text(text: &[u8]) -> Answer {
    let (start, rest) = text.split_at(text.len().min(2));
    let [status, which] = [0, 1].map(|at| start.get(at).copied().unwrap_or_default());
    let mut lines = rest.split(|byte| *byte == b'\n');
    let headers = lines.by_ref().take_while(|line| !line.is_empty()).filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        Some((name, HeaderValue::from_bytes(&line[colon + 1..]).ok()?))
    });
    let mut headers: Vec<_> = headers.collect();
    let trailers = if which & 1 == 0 { Vec::new() } else { headers.split_off(headers.len() / 2) };
    let body = lines.flatten().copied().collect::<Bytes>();
    Answer {
        status: StatusCode::from_u16(200 + u16::from(status)).expect("a status"),
        reason: (which & 2 != 0).then(|| body.clone()),
        headers,
        content: (which & 4 == 0).then_some(Content { body, trailers }),
    }
}
