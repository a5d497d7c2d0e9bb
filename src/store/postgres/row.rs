//! Values to columns and back.

use std::time::Duration;

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp};
use crate::store::{Origin, lifecycle};

/// A row holds what no gate writes.
#[derive(Debug, thiserror::Error)]
#[error("column {column} of a row cannot be decoded")]
pub(super) struct Unreadable {
    column: usize,
}

pub(super) fn millis(time: Timestamp) -> i64 {
    i64::try_from(time.0).unwrap_or(i64::MAX)
}

pub(super) fn span(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

pub(super) fn state(state: State) -> i16 {
    lifecycle::state_index(state) as i16
}

/// Room for a reply to each of a batch.
pub(super) fn empty_replies<O, R>(batch: &[O]) -> Vec<Option<R>> {
    let mut replies = Vec::new();
    replies.resize_with(batch.len(), || None);
    replies
}

pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, column: usize) -> Result<T, Unreadable> {
    row.try_get(column).map_err(|_| Unreadable { column })
}

pub(super) fn is_null(row: &Row, column: usize) -> Result<bool, Unreadable> {
    Ok(get::<Option<&[u8]>>(row, column)?.is_none())
}

pub(super) fn id(row: &Row, column: usize) -> Result<RecordId, Unreadable> {
    get::<&[u8]>(row, column)?.try_into().map(RecordId).map_err(|_| Unreadable { column })
}

pub(super) fn attempt(row: &Row, column: usize) -> Result<AttemptToken, Unreadable> {
    get::<&[u8]>(row, column)?.try_into().map(AttemptToken).map_err(|_| Unreadable { column })
}

pub(super) fn digest(row: &Row, column: usize) -> Result<[u8; 32], Unreadable> {
    get::<&[u8]>(row, column)?.try_into().map_err(|_| Unreadable { column })
}

pub(super) fn time(row: &Row, column: usize) -> Result<Timestamp, Unreadable> {
    u64::try_from(get::<i64>(row, column)?).map(Timestamp).map_err(|_| Unreadable { column })
}

pub(super) fn number(row: &Row, column: usize) -> Result<u64, Unreadable> {
    u64::try_from(get::<i64>(row, column)?).map_err(|_| Unreadable { column })
}

/// The record whose columns start at `first`: attempt, state, claimed_at, until, head, answer.
pub(super) fn record(row: &Row, first: usize) -> Result<Record, Unreadable> {
    Ok(Record {
        attempt: attempt(row, first)?,
        state: read_state(row, first + 1)?,
        claimed_at: time(row, first + 2)?,
        until: time(row, first + 3)?,
        head: Bytes::copy_from_slice(get(row, first + 4)?),
        answer: get::<Option<&[u8]>>(row, first + 5)?.map(Bytes::copy_from_slice),
    })
}

/// The origin whose columns start at `first`, if there is one: service, namespace, route.
pub(super) fn origin(row: &Row, first: usize) -> Result<Option<Origin>, Unreadable> {
    let Some(service) = get::<Option<&str>>(row, first)? else { return Ok(None) };
    Ok(Some(Origin {
        service: service.into(),
        namespace: get::<&str>(row, first + 1)?.into(),
        route: get::<&str>(row, first + 2)?.into(),
    }))
}

pub(super) fn read_state(row: &Row, column: usize) -> Result<State, Unreadable> {
    let place = usize::try_from(get::<i16>(row, column)?).ok();
    place.and_then(|place| State::ALL.get(place)).copied().ok_or(Unreadable { column })
}
