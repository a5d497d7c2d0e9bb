//! The authenticated encoding of cached values: the shared cache is not trusted.
//!
//! A value is authenticated with HMAC-SHA256 (RFC 2104), under a key that is derived for this one use from the id
//! secret and a secret of the store, where each is set. The id of the record goes into it and is not written: a value
//! under another key is invalid.
//!
//! ```text
//! version 1 | tag 32 | state 1 | read at 8 | claimed at 8 | until 8 | attempt 16 | length of the head 4 | head | answer
//! ```

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp};

/// The one that this program writes, and reads.
const VERSION: u8 = 1;

const TAG: usize = 32;

/// Where a value's tag ends, and what it vouches for begins.
const BODY: usize = 1 + TAG;

/// Seals and opens the values of one store.
#[derive(Clone)]
pub(super) struct CacheAuthenticator {
    keyed: Hmac<Sha256>,
}

/// It is not a value that a gate with this secret wrote for this record of this store.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidValue;

impl fmt::Debug for CacheAuthenticator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CacheAuthenticator")
    }
}

impl CacheAuthenticator {
    /// Under all of these secrets together.
    pub(super) fn new(secrets: &[impl AsRef<[u8]>]) -> Self {
        let derive = |key: Vec<u8>, secret: &_| {
            let mut derived = hmac(AsRef::<[u8]>::as_ref(secret));
            derived.update(&key);
            derived.finalize().into_bytes().to_vec()
        };
        Self { keyed: hmac(&secrets.iter().fold(b"oncegate cache 1".to_vec(), derive)) }
    }

    /// The value of a record as of `read_at`: completed, or in flight.
    pub(super) fn close(&self, id: RecordId, record: &Record, read_at: Timestamp) -> Bytes {
        let answer = record.answer.as_deref().unwrap_or_default();
        let mut value = BytesMut::with_capacity(BODY + 45 + record.head.len() + answer.len());
        value.put_u8(VERSION);
        value.put_bytes(0, TAG);
        value.put_u8(u8::from(record.state == State::Completed));
        value.put_u64(read_at.0);
        value.put_u64(record.claimed_at.0);
        value.put_u64(record.until.0);
        value.put_slice(&record.attempt.0);
        value.put_u32(record.head.len() as u32);
        value.put_slice(&record.head);
        value.put_slice(answer);
        let tag = self.tag(id, &value[BODY..]).finalize().into_bytes();
        value[1..BODY].copy_from_slice(&tag);
        value.freeze()
    }

    /// The record of a value, and as of when.
    pub(super) fn open(&self, id: RecordId, value: &Bytes) -> Result<(Record, Timestamp), InvalidValue> {
        if value.len() < BODY || value[0] != VERSION {
            return Err(InvalidValue);
        }
        // In constant time.
        self.tag(id, &value[BODY..]).verify_slice(&value[1..BODY]).map_err(|_| InvalidValue)?;
        read(value.slice(BODY..)).map_err(|_| InvalidValue)
    }

    fn tag(&self, id: RecordId, body: &[u8]) -> Hmac<Sha256> {
        let mut tag = self.keyed.clone();
        tag.update(&id.0);
        tag.update(body);
        tag
    }
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    // Keys of every length are taken.
    Hmac::new_from_slice(key).unwrap_or_else(|_| unreachable!("HMAC takes keys of every length"))
}

fn read(mut body: Bytes) -> Result<(Record, Timestamp), bytes::TryGetError> {
    let state = if body.try_get_u8()? == 1 { State::Completed } else { State::InFlight };
    let read_at = Timestamp(body.try_get_u64()?);
    let (claimed_at, until) = (Timestamp(body.try_get_u64()?), Timestamp(body.try_get_u64()?));
    let mut attempt = AttemptToken([0; 16]);
    body.try_copy_to_slice(&mut attempt.0)?;
    let length = body.try_get_u32()? as usize;
    if length > body.len() {
        return Err(bytes::TryGetError { requested: length, available: body.len() });
    }
    let head = body.split_to(length);
    let answer = (state == State::Completed).then_some(body);
    Ok((Record { attempt, state, claimed_at, until, head, answer }, read_at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: RecordId = RecordId([7; 32]);

    fn record(state: State, head: Vec<u8>, answer: Vec<u8>) -> Record {
        Record {
            attempt: AttemptToken([3; 16]),
            state,
            claimed_at: Timestamp(10),
            until: Timestamp(20),
            head: head.into(),
            answer: (state == State::Completed).then(|| answer.into()),
        }
    }

    fn value() -> Bytes {
        CacheAuthenticator::new(&["secret", "store"]).close(
            ID,
            &record(State::Completed, vec![1; 9], vec![2; 30]),
            Timestamp(15),
        )
    }

    proptest! {
        #[test]
        fn a_sealed_value_opens(head: Vec<u8>, answer: Vec<u8>, is_completed: bool, at: u64) {
            let seal = CacheAuthenticator::new(&["secret", "store"]);
            let state = if is_completed { State::Completed } else { State::InFlight };
            let record = record(state, head, answer);
            let value = seal.close(ID, &record, Timestamp(at));
            prop_assert_eq!(seal.open(ID, &value), Ok((record, Timestamp(at))));
        }

        #[test]
        fn a_changed_value_is_invalid(place in 0..value().len(), change in 1u8..) {
            let mut changed = value().to_vec();
            changed[place] ^= change;
            prop_assert_eq!(CacheAuthenticator::new(&["secret", "store"]).open(ID, &changed.into()), Err(InvalidValue));
        }

        #[test]
        fn a_truncated_or_extended_value_is_invalid(length in 0..value().len(), more in 1usize..20) {
            let seal = CacheAuthenticator::new(&["secret", "store"]);
            prop_assert_eq!(seal.open(ID, &value().slice(..length)), Err(InvalidValue));
            let longer = [&value()[..], &vec![0; more]].concat();
            prop_assert_eq!(seal.open(ID, &longer.into()), Err(InvalidValue));
        }

        #[test]
        fn random_bytes_are_invalid(junk: Vec<u8>) {
            prop_assert_eq!(CacheAuthenticator::new(&["secret", "store"]).open(ID, &junk.into()), Err(InvalidValue));
        }
    }

    #[test]
    fn a_value_of_another_record_or_store_is_invalid() {
        let value = value();
        assert!(CacheAuthenticator::new(&["secret", "store"]).open(ID, &value).is_ok());
        assert_eq!(CacheAuthenticator::new(&["secret", "store"]).open(RecordId([8; 32]), &value), Err(InvalidValue));
        assert_eq!(CacheAuthenticator::new(&["secret", "another"]).open(ID, &value), Err(InvalidValue));
        assert_eq!(CacheAuthenticator::new(&["another", "store"]).open(ID, &value), Err(InvalidValue));
    }
}
