//! The operations of attempts on their records, and the statements that carry them: one a batch.
//!
//! Claims and settlements have batchers of their own, with their own connections, so that neither waits for the other.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::connect::Connector;
use super::deliveries::{self, IdHolder};
use super::error::{self, OpenError};
use super::session::{CallError, Query, Session};
use super::supersede::{SUPERSEDE, supersede};
use super::{row, write_check};
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp, Version};
use crate::store::batcher::{Backend, Failure, Operation, Replies};
use crate::store::deliveries::NewDelivery;
use crate::store::lifecycle::{self, CurrentRecord, Transition};
use crate::store::{CLAIM_EXPIRY, Claim, Error, ErrorKind, Expiry, LeaseRenewal, NewRecord, Settled, Settlement};

/// How many bytes one statement carries, give or take one operation.
const MAX_BATCH_BYTES: usize = 2 << 20;

/// Carries out claims.
pub(super) struct Claims(pub(super) Connector);

/// Carries out settlements and renewals, and keeps and removes accepted requests, which are as large as answers.
pub(super) struct Settlements(pub(super) Connector);

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
        // A pooler is not asked: see `CheckedOut`.
        if session.is_direct {
            session.give_up();
        }
    }

    async fn execute(&self, session: &Session, batch: &[&ClaimOperation]) -> Result<Replies<ClaimOperation>, Failure> {
        execute_claims(session, batch).await.map_err(|error| error.into_failure(batch.len()))
    }
}

impl Settlements {
    pub(super) const QUERIES: &[Query] = &[SETTLE, RENEW, deliveries::ACCEPT, deliveries::FINISH];
}

impl Backend for Settlements {
    type Operation = SettleOperation;
    type Connection = Session;
    const WHAT: &'static str = "answers and renewals";
    const MAX_BATCH_BYTES: usize = MAX_BATCH_BYTES;

    async fn connect(&self) -> Result<Session, Error> {
        self.0.connect(Self::QUERIES).await.map_err(OpenError::into_error)
    }

    async fn ended(session: &Session) {
        session.ended().await;
    }

    fn give_up(session: Session) {
        // A pooler is not asked: see `CheckedOut`.
        if session.is_direct {
            session.give_up();
        }
    }

    async fn execute(
        &self,
        session: &Session,
        batch: &[&SettleOperation],
    ) -> Result<Replies<SettleOperation>, Failure> {
        execute_settlements(session, batch).await.map_err(|error| error.into_failure(batch.len()))
    }
}

/// An operation of the claims batcher.
pub(super) enum ClaimOperation {
    Claim {
        id: RecordId,
        fresh: NewRecord,
    },
    Supersede {
        id: RecordId,
        seen: Version,
        fresh: NewRecord,
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

/// The function is not called when the statement arrives after its time: the condition holds for all rows or none, and is
/// checked first (a one-time filter of its plan).
const CLAIM: Query = Query {
    sql: "SELECT id, now, attempt, state, claimed_at, until, head, answer, \
              (date_part('epoch', statement_timestamp()) * 1000)::bigint \
          FROM oncegate.claim_v1($1, $2, $3, $4, $5, $6, $7) \
          WHERE $8 >= (date_part('epoch', statement_timestamp()) * 1000)::bigint",
    types: &[
        Type::BYTEA_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8,
    ],
};

/// Commits a write after all that is visible. A synchronous standby confirms in the order of the log, so a commit that it
/// confirms makes every earlier one durable too, also one whose own wait was cancelled.
const FLUSH: Query = Query { sql: "SELECT oncegate.durably_v1(), oncegate.flush_v1()", types: &[] };

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

impl ClaimOperation {
    fn as_claim(&self) -> Option<(RecordId, &NewRecord)> {
        match self {
            Self::Claim { id, fresh } => Some((*id, fresh)),
            // Two are exclusive, and a flush claims nothing.
            Self::Supersede { .. } | Self::CheckWrites | Self::Flush { .. } => None,
        }
    }
}

async fn execute_claims(session: &Session, batch: &[&ClaimOperation]) -> Result<Replies<ClaimOperation>, CallError> {
    if let [ClaimOperation::Supersede { id, seen, fresh }] = batch {
        let superseded = supersede(session, *id, *seen, fresh).await?;
        return Ok(vec![superseded.map(|is_done| Ok(ClaimReply::Superseded(is_done)))]);
    }
    if let [ClaimOperation::CheckWrites] = batch {
        return write_check::check_writes(session).await.map(|()| vec![Some(Ok(ClaimReply::WritesChecked))]);
    }
    let claims: Vec<_> = batch.iter().filter_map(|operation| operation.as_claim()).collect();
    let found = if claims.is_empty() { Vec::new() } else { claim(session, &claims).await? };
    let is_flushed = found.iter().any(|claim| matches!(claim, Some(Ok(Claim::Inserted(_)))));
    if claims.len() < batch.len() && !is_flushed {
        session.write(&FLUSH, &[], 0).await?;
    }
    let mut found = found.into_iter();
    let replies = batch.iter().map(|operation| match operation {
        ClaimOperation::Flush { .. } => Some(Ok(ClaimReply::Flushed { host: session.host })),
        ClaimOperation::Claim { .. } | ClaimOperation::Supersede { .. } | ClaimOperation::CheckWrites => {
            // One that cannot be read has not been claimed, and says nothing of the others.
            let claim = |claim| ClaimReply::Claim { claim, is_flushed, host: session.host };
            let unreadable = |error| Error::determinate(ErrorKind::Corrupt, error);
            found.next().flatten().map(|found| found.map(claim).map_err(unreadable))
        }
    });
    Ok(replies.collect())
}

/// Claims ids, which are in order and single.
async fn claim(
    session: &Session,
    claims: &[(RecordId, &NewRecord)],
) -> Result<Vec<Option<Result<Claim, row::Unreadable>>>, CallError> {
    let ids: Vec<&[u8]> = claims.iter().map(|(id, _)| &id.0[..]).collect();
    let attempts: Vec<&[u8]> = claims.iter().map(|(_, fresh)| &fresh.attempt.0[..]).collect();
    let leases: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.lease)).collect();
    let ttls: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.ttl)).collect();
    let unknown_ttls: Vec<i64> = claims.iter().map(|(_, fresh)| row::span(fresh.unknown_ttl)).collect();
    let origins: Vec<i64> = claims.iter().map(|(_, fresh)| fresh.origin.0).collect();
    let heads: Vec<&[u8]> = claims.iter().map(|(_, fresh)| &fresh.head[..]).collect();
    let latest = session.clock.after(CLAIM_EXPIRY);
    let values: [&(dyn ToSql + Sync); 8] = [&ids, &attempts, &leases, &ttls, &unknown_ttls, &origins, &heads, &latest];
    let asked = Instant::now();
    let rows = session.write(&CLAIM, &values, 0).await?;
    let mut replies = row::empty_replies(claims);
    match rows.first() {
        Some(found) => session.clock.read(asked, row::get(found, 8).map_err(CallError::Unreadable)?),
        // They came too late, by a clock that was set perhaps. They are claimed again, by the time that this tells.
        None => session.commit().await?,
    }
    for found in &rows {
        let id = row::id(found, 0).map_err(CallError::Unreadable)?;
        if let Ok(place) = claims.binary_search_by(|(known, _)| known.cmp(&id)) {
            replies[place].get_or_insert_with(|| claimed(found));
        }
    }
    Ok(replies)
}

fn claimed(found: &Row) -> Result<Claim, row::Unreadable> {
    let now = row::time(found, 1)?;
    if row::is_null(found, 2)? {
        return Ok(Claim::Inserted(now));
    }
    Ok(Claim::Exists { record: row::record(found, 2)?, now })
}

/// The end of an attempt.
pub(super) struct SettleRequest {
    pub(super) id: RecordId,
    pub(super) attempt: AttemptToken,
    pub(super) end: Settlement,
    /// Another transaction holds this record: no other settlement should wait for it.
    pub(super) skips_locked: bool,
}

/// The reply to a [`SettleOperation`].
pub(super) enum SettleReply {
    Settled(Settled),
    /// Another transaction holds the record.
    Locked,
    /// The leases of these were extended.
    Renewed(Vec<RecordId>),
    /// What stands instead of a request that was to be kept, if anything does.
    Accepted(Option<IdHolder>),
    /// Whether there was a delivery to remove.
    Finished(bool),
}

const SETTLE: Query = Query {
    sql: "SELECT id, now, done_until, is_held, attempt, state, claimed_at, until, head, answer, unknown_ttl \
          FROM oncegate.settle_v1($1, $2, $3, $4, $5, $6)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT2_ARRAY, Type::INT8_ARRAY, Type::BYTEA_ARRAY, Type::BOOL],
};

const RENEW: Query = Query {
    sql: "SELECT oncegate.renew_v1($1, $2, $3)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY],
};

/// An operation of the settlements batcher: running attempts depend on these.
pub(super) enum SettleOperation {
    Settle(SettleRequest),
    /// All that is due of this process, in one statement.
    Renew(Vec<LeaseRenewal>),
    /// See [`crate::store::deliveries::Deliveries::accept`].
    Accept {
        id: RecordId,
        new: NewDelivery,
    },
    /// See [`crate::store::deliveries::DeliveryChange::Finish`].
    Finish {
        id: RecordId,
        token: AttemptToken,
    },
}

impl Operation for SettleOperation {
    type Reply = SettleReply;

    fn id(&self) -> Option<RecordId> {
        match self {
            Self::Settle(SettleRequest { id, .. }) | Self::Accept { id, .. } | Self::Finish { id, .. } => Some(*id),
            Self::Renew(_) => None,
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::Settle(settlement) => settlement.end.answer().map_or(0, Bytes::len),
            Self::Accept { new, .. } => new.size(),
            Self::Renew(_) | Self::Finish { .. } => 0,
        }
    }

    fn is_abandoned_with_caller(&self) -> bool {
        matches!(self, Self::Renew(_) | Self::Accept { .. })
    }

    fn is_exclusive(&self) -> bool {
        match self {
            Self::Settle(settlement) => settlement.skips_locked,
            Self::Renew(_) => true,
            Self::Accept { .. } | Self::Finish { .. } => false,
        }
    }

    fn statement(&self) -> u8 {
        match self {
            Self::Settle(_) | Self::Renew(_) => 0,
            Self::Accept { .. } => 1,
            Self::Finish { .. } => 2,
        }
    }
}

async fn execute_settlements(
    session: &Session,
    batch: &[&SettleOperation],
) -> Result<Replies<SettleOperation>, CallError> {
    if let [SettleOperation::Renew(held)] = batch {
        return Ok(vec![Some(Ok(SettleReply::Renewed(renew(session, held).await?)))]);
    }
    let (mut settlements, mut accepted, mut finished) = (Vec::new(), Vec::new(), Vec::new());
    for operation in batch {
        match operation {
            SettleOperation::Settle(settlement) => settlements.push(settlement),
            SettleOperation::Accept { id, new } => accepted.push((*id, new)),
            SettleOperation::Finish { id, token } => finished.push((*id, *token)),
            // It is exclusive.
            SettleOperation::Renew(_) => {}
        }
    }
    // They are of one kind.
    if !accepted.is_empty() {
        let replies = deliveries::accept(session, &accepted).await?.into_iter();
        return Ok(replies.map(|reply| reply.map(|found| Ok(SettleReply::Accepted(found)))).collect());
    }
    if !finished.is_empty() {
        let replies = deliveries::finish(session, &finished).await?.into_iter();
        return Ok(replies.map(|was_there| Some(Ok(SettleReply::Finished(was_there)))).collect());
    }
    let skips_locked = settlements.iter().any(|settlement| settlement.skips_locked);
    match settle(session, &settlements, skips_locked).await {
        // Another transaction holds one of them for longer than the others may wait.
        Err(CallError::Sql(error)) if error::is_lock_timeout(&error) => settle(session, &settlements, true).await,
        other => other,
    }
}

async fn renew(session: &Session, held: &[LeaseRenewal]) -> Result<Vec<RecordId>, CallError> {
    let ids: Vec<&[u8]> = held.iter().map(|held| &held.id.0[..]).collect();
    let attempts: Vec<&[u8]> = held.iter().map(|held| &held.attempt.0[..]).collect();
    let leases: Vec<i64> = held.iter().map(|held| row::span(held.lease)).collect();
    let rows = session.write(&RENEW, &[&ids, &attempts, &leases], 0).await?;
    rows.iter().map(|found| row::id(found, 0).map_err(CallError::Unreadable)).collect()
}

impl SettleRequest {
    /// The end, as `settle_v1` encodes it, and its duration.
    fn encoded_end(&self) -> (i16, i64) {
        match &self.end {
            Settlement::Complete { expiry: Expiry::FromClaim(ttl), .. } => (1, row::span(*ttl)),
            Settlement::Complete { expiry: Expiry::FromNow(ttl), .. } => (2, row::span(*ttl)),
            Settlement::Release => (3, 0),
            Settlement::Hold { .. } => (4, 0),
        }
    }

    /// The outcome if the statement did not apply it; `None` if the record has changed meanwhile.
    fn outcome(&self, current: Option<(Record, CurrentRecord)>, now: Timestamp) -> Option<Settled> {
        let transition = lifecycle::settle(current.as_ref().map(|(_, current)| *current), self.attempt, &self.end, now);
        let record = current.map(|(record, _)| record);
        match transition {
            Transition::Complete { .. } | Transition::TurnUnknown { .. } | Transition::Remove => None,
            Transition::Repeated { until } => Some(Settled::Done { until }),
            Transition::RepeatedIfSame { until } => match record {
                Some(record) if record.answer.as_ref() == self.end.answer() => Some(Settled::Done { until }),
                record => Some(Settled::NotCurrent { record }),
            },
            Transition::NotCurrent => Some(Settled::NotCurrent { record }),
        }
    }
}

async fn settle(
    session: &Session,
    batch: &[&SettleRequest],
    skips_locked: bool,
) -> Result<Replies<SettleOperation>, CallError> {
    let ids: Vec<&[u8]> = batch.iter().map(|settlement| &settlement.id.0[..]).collect();
    let attempts: Vec<&[u8]> = batch.iter().map(|settlement| &settlement.attempt.0[..]).collect();
    let (ends, spans): (Vec<i16>, Vec<i64>) = batch.iter().map(|settlement| settlement.encoded_end()).unzip();
    let answers: Vec<Option<&[u8]>> =
        batch.iter().map(|settlement| settlement.end.answer().map(|answer| &answer[..])).collect();
    let values: [&(dyn ToSql + Sync); 6] = [&ids, &attempts, &ends, &spans, &answers, &skips_locked];
    let bytes = batch.iter().filter_map(|settlement| settlement.end.answer()).map(Bytes::len).sum();
    let rows = session.write(&SETTLE, &values, bytes).await?;
    let mut replies = row::empty_replies(batch);
    for found in &rows {
        let id = row::id(found, 0).map_err(CallError::Unreadable)?;
        let Ok(place) = batch.binary_search_by(|settlement| settlement.id.cmp(&id)) else { continue };
        // An applied settlement comes first, and then again as the current record.
        if replies[place].is_none() {
            replies[place] = settled(batch[place], found).map_err(CallError::Unreadable)?.map(Ok);
        }
    }
    Ok(replies)
}

fn settled(settlement: &SettleRequest, found: &Row) -> Result<Option<SettleReply>, row::Unreadable> {
    let now = row::time(found, 1)?;
    if let Some(until) = row::get::<Option<i64>>(found, 2)? {
        let until = Timestamp(u64::try_from(until).unwrap_or_default());
        return Ok(Some(SettleReply::Settled(Settled::Done { until })));
    }
    if row::get::<bool>(found, 3)? {
        return Ok(Some(SettleReply::Locked));
    }
    let current = if row::is_null(found, 4)? {
        None
    } else {
        let record = row::record(found, 4)?;
        let unknown_ttl = Duration::from_millis(row::number(found, 10)?);
        let Record { attempt, state, claimed_at, until, .. } = record;
        Some((record, CurrentRecord { attempt, state, claimed_at, until, unknown_ttl }))
    };
    Ok(settlement.outcome(current, now).map(SettleReply::Settled))
}
