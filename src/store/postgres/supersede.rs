//! Claims that take the place of a record.

use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};

use super::row;
use super::session::{CallError, Query, Session};
use crate::idempotency::record::{RecordId, Version};
use crate::store::{CLAIM_EXPIRY, NewRecord};

/// Like a claim, it does nothing when it arrives after its time.
pub(super) const SUPERSEDE: Query = Query {
    sql: "SELECT oncegate.supersede_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10), \
              (date_part('epoch', statement_timestamp()) * 1000)::bigint \
          WHERE $11 >= (date_part('epoch', statement_timestamp()) * 1000)::bigint",
    types: &[
        Type::BYTEA,
        Type::BYTEA,
        Type::INT2,
        Type::INT8,
        Type::BYTEA,
        Type::INT8,
        Type::INT8,
        Type::INT8,
        Type::INT8,
        Type::BYTEA,
        Type::INT8,
    ],
};

/// Whether the claim took the place of the record that the gate saw; `None` where the statement came too late, and the gate asks
/// again.
pub(super) async fn supersede(
    session: &Session,
    id: RecordId,
    seen: Version,
    fresh: &NewRecord,
) -> Result<Option<bool>, CallError> {
    let values: [&(dyn ToSql + Sync); 11] = [
        &&id.0[..],
        &&seen.attempt.0[..],
        &row::state(seen.state),
        &row::millis(seen.until),
        &&fresh.attempt.0[..],
        &row::span(fresh.lease),
        &row::span(fresh.ttl),
        &row::span(fresh.unknown_ttl),
        &fresh.origin.0,
        &&fresh.head[..],
        &session.clock.after(CLAIM_EXPIRY),
    ];
    let asked = Instant::now();
    let rows = session.write(&SUPERSEDE, &values, 0).await?;
    let Some(found) = rows.first() else { return session.commit().await.map(|()| None) };
    session.clock.read(asked, row::get(found, 1).map_err(CallError::Unreadable)?);
    row::get(found, 0).map(Some).map_err(CallError::Unreadable)
}
