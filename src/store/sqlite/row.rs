//! Values to columns and back.

use std::time::Duration;

use bytes::Bytes;
use rusqlite::types::Type;
use rusqlite::{Error as SqlError, Row};

use crate::idempotency::record::{AttemptToken, Record, State, Timestamp};
use crate::store::Origin;

pub(super) fn time(time: Timestamp) -> i64 {
    i64::try_from(time.0).unwrap_or(i64::MAX)
}

pub(super) fn span(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

pub(super) fn state(state: State) -> i64 {
    crate::store::lifecycle::state_index(state) as i64
}

pub(super) fn read_time(row: &Row<'_>, column: usize) -> rusqlite::Result<Timestamp> {
    row.get::<_, i64>(column).and_then(|millis| match u64::try_from(millis) {
        Ok(millis) => Ok(Timestamp(millis)),
        Err(_) => Err(SqlError::IntegralValueOutOfRange(column, millis)),
    })
}

pub(super) fn read_span(row: &Row<'_>, column: usize) -> rusqlite::Result<Duration> {
    read_time(row, column).map(|millis| Duration::from_millis(millis.0))
}

pub(super) fn read_state(row: &Row<'_>, column: usize) -> rusqlite::Result<State> {
    let number = row.get::<_, i64>(column)?;
    let state = usize::try_from(number).ok().and_then(|place| State::ALL.get(place));
    state.copied().ok_or(SqlError::IntegralValueOutOfRange(column, number))
}

pub(super) fn read_attempt(row: &Row<'_>, column: usize) -> rusqlite::Result<AttemptToken> {
    row.get(column).map(AttemptToken)
}

/// The record whose columns start at `first`, without its answer: attempt, state, claimed_at, until, head.
pub(super) fn record(row: &Row<'_>, first: usize) -> rusqlite::Result<Record> {
    Ok(Record {
        attempt: read_attempt(row, first)?,
        state: read_state(row, first + 1)?,
        claimed_at: read_time(row, first + 2)?,
        until: read_time(row, first + 3)?,
        head: read_bytes(row, first + 4)?.unwrap_or_default(),
        answer: None,
    })
}

/// The origin whose columns start at `first`, if there is one: service, namespace, route.
pub(super) fn origin(row: &Row<'_>, first: usize) -> rusqlite::Result<Option<Origin>> {
    let Some(service) = row.get::<_, Option<String>>(first)? else {
        return Ok(None);
    };
    Ok(Some(Origin {
        service: service.into(),
        namespace: row.get::<_, String>(first + 1)?.into(),
        route: row.get::<_, String>(first + 2)?.into(),
    }))
}

pub(super) fn read_bytes(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Bytes>> {
    Ok(blob(row, column)?.map(Bytes::copy_from_slice))
}

/// The same, where they are in the row.
pub(super) fn blob<'a>(row: &'a Row<'_>, column: usize) -> rusqlite::Result<Option<&'a [u8]>> {
    let bytes = row.get_ref(column)?.as_blob_or_null();
    bytes.map_err(|error| SqlError::FromSqlConversionFailure(column, Type::Blob, Box::new(error)))
}
