//! Records as the scripts write them.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use redis::Cmd;

use crate::idempotency::record::{AttemptToken, Record, State, Timestamp, Version};
use crate::store::resealing::Values;
use crate::store::{NewRecord, OriginId, lifecycle};

/// The latest time, in the numbers that scripts calculate with.
pub(super) const LAST: u64 = 1 << 53;

/// A record with the fields that only the store uses.
#[derive(Debug)]
pub(super) struct StoredRecord {
    pub(super) record: Record,
    pub(super) unknown_ttl: Duration,
    pub(super) origin: OriginId,
}

/// The value is not a record that a script wrote.
#[derive(Debug, thiserror::Error)]
#[error("a record in the store cannot be decoded")]
pub(super) struct Unreadable;

/// Decodes a record. Without `with_answer`, the value ends after the head.
pub(super) fn read(value: Vec<u8>, with_answer: bool) -> Result<StoredRecord, Unreadable> {
    let mut rest = Bytes::from(value);
    let mut attempt = AttemptToken([0; 16]);
    rest.try_copy_to_slice(&mut attempt.0)?;
    let state = match rest.try_get_u8()? {
        0 => State::InFlight,
        1 => State::Completed,
        2 => State::Unknown,
        _ => return Err(Unreadable),
    };
    let (claimed_at, until) = (time(rest.try_get_u64()?), time(rest.try_get_u64()?));
    let (_ttl, unknown_ttl) = (rest.try_get_u64()?, Duration::from_millis(rest.try_get_u64()?));
    let origin = OriginId(rest.try_get_i64()?);
    let _is_awaited = rest.try_get_u8()?;
    let head_bytes = rest.try_get_u32()? as usize;
    if rest.len() < head_bytes {
        return Err(Unreadable);
    }
    let head = rest.split_to(head_bytes);
    let has_answer = match state {
        State::InFlight => false,
        State::Completed => true,
        // Why it is unknown, if a gate wrote that.
        State::Unknown => !rest.is_empty(),
    };
    let answer = (with_answer && has_answer).then_some(rest);
    Ok(StoredRecord { record: Record { attempt, state, claimed_at, until, head, answer }, unknown_ttl, origin })
}

/// The part of a new record before its times.
pub(super) fn before_times(attempt: AttemptToken) -> [u8; 17] {
    let mut begin = [0; 17];
    begin[..16].copy_from_slice(&attempt.0);
    begin
}

/// The part of a new record after its times.
pub(super) fn after_times(fresh: &NewRecord) -> Vec<u8> {
    let mut rest = Vec::with_capacity(29 + fresh.head.len());
    rest.put_u64(span(fresh.ttl));
    rest.put_u64(span(fresh.unknown_ttl));
    rest.put_i64(fresh.origin.0);
    rest.put_u8(0);
    rest.put_u32(u32::try_from(fresh.head.len()).unwrap_or(u32::MAX));
    rest.extend_from_slice(&fresh.head);
    rest
}

/// What `reseal` takes after the key.
pub(super) fn add_values(call: &mut Cmd, seen: Version, values: &Values) {
    let Values { head, answer } = values;
    let length = u32::try_from(head.len()).unwrap_or(u32::MAX).to_be_bytes();
    call.arg(&seen.attempt.0[..]).arg(lifecycle::state_index(seen.state)).arg(millis(seen.until));
    call.arg(&length[..]).arg(&head[..]).arg(answer.as_deref().unwrap_or_default());
}

/// A time that a script gave.
pub(super) fn time(millis: u64) -> Timestamp {
    if millis >= LAST { Timestamp(i64::MAX as u64) } else { Timestamp(millis) }
}

/// A time as a script reads it.
pub(super) fn millis(time: Timestamp) -> u64 {
    time.0.min(LAST)
}

/// A span as a script reads it.
pub(super) fn span(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(LAST).min(LAST)
}

impl From<bytes::TryGetError> for Unreadable {
    fn from(_: bytes::TryGetError) -> Self {
        Self
    }
}
