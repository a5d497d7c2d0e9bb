//! Stored forms from a store that may hold anything: they are read or they are not, at no more cost than their size.

#![no_main]

use bytes::Bytes;
use http::Method;
use libfuzzer_sys::fuzz_target;
use oncegate::http::replay;
use oncegate::idempotency::codec::{Answer, Head};

fuzz_target!(|stored: &[u8]| {
    let stored = Bytes::copy_from_slice(stored);
    if let Ok(answer) = Answer::decode(&stored) {
        let again = answer.encode();
        assert_eq!(again.len(), stored.len(), "nothing is left out or made up");
        assert_eq!(Answer::decode(&again).as_ref(), Ok(&answer));
        for method in [Method::POST, Method::HEAD] {
            drop(replay::response(&answer, &method));
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
});
