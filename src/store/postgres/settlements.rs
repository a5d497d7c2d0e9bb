//! Settlements and renewals.

use bytes::Bytes;
use tokio_postgres::types::{ToSql, Type};

use super::connect::Connector;
use super::error::{self, OpenError};
use super::row;
use super::session::{CallError, MAX_BATCH_BYTES, Query, Session};
use crate::idempotency::record::{Attempt, Record, RecordId, Timestamp};
use crate::store::batcher::{Backend, Failure, Operation, Replies};
use crate::store::rules::{self, RecordView, Transition};
use crate::store::{End, Error, Expiry, LeaseRenewal, Settled};

/// Carries out settlements and renewals.
pub(super) struct Settlements(pub(super) Connector);

/// The end of an attempt.
pub(super) struct Settlement {
    pub(super) id: RecordId,
    pub(super) attempt: Attempt,
    pub(super) end: End,
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
}

pub(super) const SETTLE: Query = Query {
    sql: "SELECT id, now, done_until, is_held, attempt, state, claimed_at, until, head, answer, unknown_ttl \
          FROM oncegate.settle_v1($1, $2, $3, $4, $5, $6)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT2_ARRAY, Type::INT8_ARRAY, Type::BYTEA_ARRAY, Type::BOOL],
};

pub(super) const RENEW: Query = Query {
    sql: "SELECT oncegate.renew_v1($1, $2, $3)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY],
};

/// An operation of the settlements batcher: running attempts depend on these.
pub(super) enum SettleOperation {
    Settle(Settlement),
    /// All that is due of this process, in one statement.
    Renew(Vec<LeaseRenewal>),
}

impl Operation for SettleOperation {
    type Reply = SettleReply;

    fn id(&self) -> Option<RecordId> {
        self.as_settlement().map(|settlement| settlement.id)
    }

    fn size(&self) -> usize {
        match self {
            Self::Settle(settlement) => settlement.answer().map_or(0, Bytes::len),
            Self::Renew(_) => 0,
        }
    }

    fn is_abandoned_with_caller(&self) -> bool {
        matches!(self, Self::Renew(_))
    }

    fn is_exclusive(&self) -> bool {
        match self {
            Self::Settle(settlement) => settlement.skips_locked,
            Self::Renew(_) => true,
        }
    }
}

impl Settlements {
    pub(super) const QUERIES: &[Query] = &[SETTLE, RENEW];
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
        session.give_up();
    }

    async fn execute(
        &self,
        session: &Session,
        batch: &[&SettleOperation],
    ) -> Result<Replies<SettleOperation>, Failure> {
        execute(session, batch).await.map_err(|error| error.into_failure(batch.len()))
    }
}

impl SettleOperation {
    fn as_settlement(&self) -> Option<&Settlement> {
        match self {
            Self::Settle(settlement) => Some(settlement),
            Self::Renew(_) => None,
        }
    }
}

/// Executes a batch, which is in the order of ids, each once.
async fn execute(session: &Session, batch: &[&SettleOperation]) -> Result<Replies<SettleOperation>, CallError> {
    if let [SettleOperation::Renew(held)] = batch {
        return Ok(vec![Some(Ok(SettleReply::Renewed(renew(session, held).await?)))]);
    }
    let settlements: Vec<&Settlement> = batch.iter().filter_map(|operation| operation.as_settlement()).collect();
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

impl Settlement {
    fn answer(&self) -> Option<&Bytes> {
        match &self.end {
            End::Complete { answer, .. } => Some(answer),
            End::Release | End::Hold => None,
        }
    }

    /// The end, as `settle_v1` encodes it, and its duration.
    fn encoded_end(&self) -> (i16, i64) {
        match &self.end {
            End::Complete { expiry: Expiry::FromClaim(ttl), .. } => (1, row::span(*ttl)),
            End::Complete { expiry: Expiry::FromNow(ttl), .. } => (2, row::span(*ttl)),
            End::Release => (3, 0),
            End::Hold => (4, 0),
        }
    }

    /// The outcome if the statement did not apply it; `None` if the record has changed meanwhile.
    fn outcome(&self, current: Option<(Record, RecordView)>, now: Timestamp) -> Option<Settled> {
        let transition = rules::settle(current.as_ref().map(|(_, current)| *current), self.attempt, &self.end, now);
        let record = current.map(|(record, _)| record);
        match transition {
            Transition::Complete { .. } | Transition::TurnUnknown { .. } | Transition::Remove => None,
            Transition::Repeated { until } => Some(Settled::Done { until }),
            Transition::RepeatedIfSame { until } => match record {
                Some(record) if record.answer.as_ref() == self.answer() => Some(Settled::Done { until }),
                record => Some(Settled::Superseded { record }),
            },
            Transition::Superseded => Some(Settled::Superseded { record }),
        }
    }
}

async fn settle(
    session: &Session,
    batch: &[&Settlement],
    skips_locked: bool,
) -> Result<Replies<SettleOperation>, CallError> {
    let ids: Vec<&[u8]> = batch.iter().map(|settlement| &settlement.id.0[..]).collect();
    let attempts: Vec<&[u8]> = batch.iter().map(|settlement| &settlement.attempt.0[..]).collect();
    let (ends, spans): (Vec<i16>, Vec<i64>) = batch.iter().map(|settlement| settlement.encoded_end()).unzip();
    let answers: Vec<Option<&[u8]>> =
        batch.iter().map(|settlement| settlement.answer().map(|answer| &answer[..])).collect();
    let values: [&(dyn ToSql + Sync); 6] = [&ids, &attempts, &ends, &spans, &answers, &skips_locked];
    let bytes = batch.iter().filter_map(|settlement| settlement.answer()).map(Bytes::len).sum();
    let rows = session.write(&SETTLE, &values, bytes).await?;
    let mut replies = row::empty_replies(batch);
    for found in &rows {
        let id = row::id(found, 0).map_err(CallError::Unreadable)?;
        let Ok(place) = batch.binary_search_by(|settlement| settlement.id.cmp(&id)) else { continue };
        // An applied settlement comes first, and then again as the current record.
        if replies[place].is_none() {
            replies[place] = read(batch[place], found).map_err(CallError::Unreadable)?.map(Ok);
        }
    }
    Ok(replies)
}

fn read(settlement: &Settlement, found: &tokio_postgres::Row) -> Result<Option<SettleReply>, row::Unreadable> {
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
        let unknown_ttl = std::time::Duration::from_millis(row::number(found, 10)?);
        let Record { attempt, state, claimed_at, until, .. } = record;
        Some((record, RecordView { attempt, state, claimed_at, until, unknown_ttl }))
    };
    Ok(settlement.outcome(current, now).map(SettleReply::Settled))
}
