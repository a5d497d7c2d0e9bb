//! The value of a key header: it is a key or it is not, in whatever way one reads RFC 9651, and says so without a panic.

#![no_main]

#[path = "../../../src/idempotency/key/reference.rs"]
mod reference;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use libfuzzer_sys::fuzz_target;
use oncegate::idempotency::key::{Found, KeyRule};

fuzz_target!(|field: &[u8]| {
    // What no header can hold is refused before.
    let Ok(value) = HeaderValue::from_bytes(field) else { return };
    let found = find(value);
    assert_eq!(found, reference::key(field, 255), "{:?}", String::from_utf8_lossy(field));
    if let Some(key) = found {
        let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
        assert_eq!(find(HeaderValue::from_str(&quoted).expect("visible")), Some(key), "quoted, it is the same key");
    }
});

fn find(value: HeaderValue) -> Option<String> {
    let headers = HeaderMap::from_iter([(HeaderName::from_static("idempotency-key"), value)]);
    match KeyRule::default().find(&Uri::from_static("/"), &headers, None) {
        Ok(Found::Key(key)) => Some(key.as_str().to_owned()),
        Ok(other) => panic!("{other:?}"),
        Err(_) => None,
    }
}
