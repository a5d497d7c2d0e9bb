//! Claims, supersedes, and flushes of records that were read.

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::connect::Connector;
use super::error::OpenError;
use super::session::{CallError, MAX_BATCH_BYTES, Query, Session};
use super::{row, write_check};
use crate::idempotency::record::{RecordId, Version};
use crate::store::batcher::{Backend, Failure, Operation, Replies};
use crate::store::{Claim, Error, Fresh};

/// Carries out claims.
pub(super) struct Claims(pub(super) Connector);

/// An operation of the claims batcher.
pub(super) enum ClaimOperation {
    Claim {
        id: RecordId,
        fresh: Fresh,
    },
    Supersede {
        id: RecordId,
        seen: Version,
        fresh: Fresh,
    },
    /// A flush of all that is visible, because the record of this id was read.
    Flush {
        id: RecordId,
    },
    /// A check of whether claims and settlements work; see [`write_check`].
    CheckWrites,
}

/// The reply to a [`ClaimOperation`].
pub(super) enum ClaimReply {
    Claim {
        claim: Claim,
        /// Whether the statement committed a write, so that all that it saw is durable.
        is_flushed: bool,
        /// The host that replied.
        host: usize,
    },
    Superseded(bool),
    Flushed {
        /// The host on which all reads are durable now.
        host: usize,
    },
    WritesChecked,
}

pub(super) const CLAIM: Query = Query {
    sql: "SELECT id, now, attempt, state, claimed_at, until, head, answer \
          FROM oncegate.claim_v1($1, $2, $3, $4, $5, $6, $7)",
    types: &[
        Type::BYTEA_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::BYTEA_ARRAY,
    ],
};

pub(super) const SUPERSEDE: Query = Query {
    sql: "SELECT oncegate.supersede_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
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
    ],
};

/// Commits a write after all that is visible. A synchronous standby confirms in the order of the log, so a commit that it
/// confirms makes every earlier one durable too, also one whose own wait was cancelled.
pub(super) const FLUSH: Query = Query { sql: "SELECT oncegate.durably_v1(), oncegate.flush_v1()", types: &[] };

impl Operation for ClaimOperation {
    type Reply = ClaimReply;

    fn id(&self) -> Option<RecordId> {
        match self {
            Self::Claim { id, .. } | Self::Supersede { id, .. } | Self::Flush { id } => Some(*id),
            Self::CheckWrites => None,
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Claim { fresh, .. } | Self::Supersede { fresh, .. } => fresh.head.len(),
            Self::Flush { .. } | Self::CheckWrites => 0,
        }
    }

    // An orphaned claim would only block its key until its lease expires.
    fn is_abandoned_with_caller(&self) -> bool {
        true
    }

    fn is_exclusive(&self) -> bool {
        matches!(self, Self::Supersede { .. } | Self::CheckWrites)
    }
}

impl Claims {
    pub(super) const QUERIES: &[Query] = &[CLAIM, SUPERSEDE, FLUSH];
}

impl Backend for Claims {
    type Operation = ClaimOperation;
    type Connection = Session;
    const WHAT: &'static str = "claims";
    const MAX_BATCH_BYTES: usize = MAX_BATCH_BYTES;

    async fn connect(&self) -> Result<Session, Error> {
        self.0.connect(Self::QUERIES).await.map_err(OpenError::into_error)
    }

    async fn ended(session: &Session) {
        session.ended().await;
    }

    fn give_up(session: Session) {
        session.give_up();
    }

    async fn execute(&self, session: &Session, batch: &[&ClaimOperation]) -> Result<Replies<ClaimOperation>, Failure> {
        execute(session, batch).await.map_err(|error| error.into_failure(batch.len()))
    }
}

impl ClaimOperation {
    fn as_claim(&self) -> Option<(RecordId, &Fresh)> {
        match self {
            Self::Claim { id, fresh } => Some((*id, fresh)),
            // Two are exclusive, and a flush claims nothing.
            Self::Supersede { .. } | Self::CheckWrites | Self::Flush { .. } => None,
        }
    }
}

/// Executes a batch, which is in the order of ids, each once.
async fn execute(session: &Session, batch: &[&ClaimOperation]) -> Result<Replies<ClaimOperation>, CallError> {
    if let [ClaimOperation::Supersede { id, seen, fresh }] = batch {
        return Ok(vec![Some(Ok(ClaimReply::Superseded(supersede(session, *id, *seen, fresh).await?)))]);
    }
    if let [ClaimOperation::CheckWrites] = batch {
        return write_check::check_writes(session).await.map(|()| vec![Some(Ok(ClaimReply::WritesChecked))]);
    }
    let claims: Vec<_> = batch.iter().filter_map(|operation| operation.as_claim()).collect();
    let found = if claims.is_empty() { Vec::new() } else { claim(session, &claims).await? };
    let is_flushed = found.iter().any(|claim| matches!(claim, Some(Claim::Inserted(_))));
    if claims.len() < batch.len() && !is_flushed {
        session.write(&FLUSH, &[], 0).await?;
    }
    let mut found = found.into_iter();
    let replies = batch.iter().map(|operation| match operation {
        ClaimOperation::Flush { .. } => Some(Ok(ClaimReply::Flushed { host: session.host })),
        ClaimOperation::Claim { .. } | ClaimOperation::Supersede { .. } | ClaimOperation::CheckWrites => {
            found.next().flatten().map(|claim| Ok(ClaimReply::Claim { claim, is_flushed, host: session.host }))
        }
    });
    Ok(replies.collect())
}

/// Claims ids, which are in order and single.
async fn claim(session: &Session, claims: &[(RecordId, &Fresh)]) -> Result<Vec<Option<Claim>>, CallError> {
    let ids: Vec<&[u8]> = claims.iter().map(|(id, _)| &id.0[..]).collect();
    let attempts: Vec<&[u8]> = claims.iter().map(|(_, fresh)| &fresh.attempt.0[..]).collect();
    let leases: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.lease)).collect();
    let ttls: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.ttl)).collect();
    let unknown_ttls: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.unknown_ttl)).collect();
    let origins: Vec<i64> = claims.iter().map(|(_, fresh)| fresh.origin.0).collect();
    let heads: Vec<&[u8]> = claims.iter().map(|(_, fresh)| &fresh.head[..]).collect();
    let values: [&(dyn ToSql + Sync); 7] = [&ids, &attempts, &leases, &ttls, &unknown_ttls, &origins, &heads];
    let rows = session.write(&CLAIM, &values, 0).await?;
    let mut replies = row::empty_replies(claims);
    for found in &rows {
        let (id, claim) = claimed(found).map_err(CallError::Unreadable)?;
        if let Ok(place) = claims.binary_search_by(|(known, _)| known.cmp(&id)) {
            replies[place].get_or_insert(claim);
        }
    }
    Ok(replies)
}

fn claimed(found: &Row) -> Result<(RecordId, Claim), row::Unreadable> {
    let (id, now) = (row::id(found, 0)?, row::time(found, 1)?);
    if row::is_null(found, 2)? {
        return Ok((id, Claim::Inserted(now)));
    }
    Ok((id, Claim::Exists { record: row::record(found, 2)?, now }))
}

async fn supersede(session: &Session, id: RecordId, seen: Version, fresh: &Fresh) -> Result<bool, CallError> {
    let values: [&(dyn ToSql + Sync); 10] = [
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
    ];
    let rows = session.write(&SUPERSEDE, &values, 0).await?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}
