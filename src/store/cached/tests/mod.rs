//! Against a store in memory.

mod breaking;
mod memory;
mod shared;

use bytes::Bytes;

use super::*;
use crate::idempotency::codec;
use crate::idempotency::fingerprint::{Fingerprint, Recipe};
use crate::idempotency::key::Key;
use crate::store::OriginId;
use crate::store::contract::{self, Harness, model};
use crate::store::memory::Memory;
use crate::store::unreliable::{Fault, Operation as Call, Unreliable};

const ID: RecordId = RecordId([7; 32]);
const FIRST: AttemptToken = AttemptToken([1; 16]);
const TTL: Duration = Duration::from_secs(10);
const SETTINGS: Settings = Settings { most_entries: 1000, most_bytes: 1 << 20, max_age: None };

fn fresh(attempt: u8) -> NewRecord {
    let (attempt, origin) = (AttemptToken([attempt; 16]), OriginId(1));
    NewRecord { attempt, origin, lease: TTL, ttl: TTL, unknown_ttl: TTL, head: head(attempt) }
}

/// The head of the same request each time; the details differ, as they do between a request and its retry.
fn head(attempt: AttemptToken) -> Bytes {
    let details = codec::Details { caller: Some([attempt.0[0]; 8]), ..codec::Details::default() };
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [7; 32] };
    let key = Key::parse("k", 255).expect("a key");
    codec::Head::new(fingerprint, http::Method::POST, "/", &key).with_details(&details).encode()
}

fn complete(answer: &'static str) -> Settlement {
    Settlement::Complete { answer: Bytes::from_static(answer.as_bytes()), expiry: crate::store::Expiry::FromClaim(TTL) }
}

/// A store in memory, whose time is tokio's.
fn clocked() -> Memory {
    let began = Instant::now();
    Memory::with_clock(Arc::new(move || Timestamp(1_700_000_000_000).plus(began.elapsed())))
}
