//! Attempts that end.

use bytes::Bytes;
use tokio_postgres::types::{ToSql, Type};

use super::connect::{Call, Failed, Session};
use super::error;
use super::queue::Operation;
use super::row;
use crate::idempotency::record::{Attempt, Record, RecordId, Timestamp};
use crate::store::rules::{self, Change, Standing};
use crate::store::{End, Expiry, Held, Settled};

/// An attempt that ends.
pub(super) struct Ending {
    pub(super) id: RecordId,
    pub(super) attempt: Attempt,
    pub(super) end: End,
    /// Another transaction was met that holds this record: nobody else is to wait for it.
    pub(super) is_careful: bool,
}

/// What it says.
pub(super) enum Said {
    Settled(Settled),
    /// Another transaction holds the record.
    Held,
    /// The leases of these were extended.
    Renewed(Vec<RecordId>),
}

pub(super) const SETTLE: Call = Call {
    sql: "SELECT id, now, done_until, is_held, attempt, state, claimed_at, until, head, answer, unknown_ttl \
          FROM oncegate.settle_v1($1, $2, $3, $4, $5, $6)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT2_ARRAY, Type::INT8_ARRAY, Type::BYTEA_ARRAY, Type::BOOL],
};

pub(super) const RENEW: Call = Call {
    sql: "SELECT oncegate.renew_v1($1, $2, $3)",
    types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY],
};

/// What the lane of endings carries: it is what attempts that run depend on.
pub(super) enum Work {
    End(Ending),
    /// All that is due of this process, in one statement.
    Renew(Vec<Held>),
}

impl Operation for Work {
    type Reply = Said;
    const WHAT: &'static str = "answers and renewals";
    const CALLS: &'static [Call] = &[SETTLE, RENEW];

    fn id(&self) -> RecordId {
        match self {
            Self::End(ending) => ending.id,
            // It goes alone.
            Self::Renew(_) => RecordId([0; 32]),
        }
    }

    fn size(&self) -> usize {
        match self {
            Self::End(ending) => ending.answer().map_or(0, Bytes::len),
            Self::Renew(_) => 0,
        }
    }

    fn is_abandoned_with_caller(&self) -> bool {
        matches!(self, Self::Renew(_))
    }

    fn goes_alone(&self) -> bool {
        match self {
            Self::End(ending) => ending.is_careful,
            Self::Renew(_) => true,
        }
    }

    async fn carry_out(session: &Session, batch: &[&Self]) -> Result<Vec<Option<Said>>, Failed> {
        if let [Self::Renew(held)] = batch {
            return Ok(vec![Some(Said::Renewed(renew(session, held).await?))]);
        }
        let endings: Vec<&Ending> = batch.iter().filter_map(|work| work.as_ending()).collect();
        let is_careful = endings.iter().any(|ending| ending.is_careful);
        match settle(session, &endings, is_careful).await {
            // Somebody holds one of them for longer than the others may wait.
            Err(Failed::Sql(error)) if error::is_held(&error) => settle(session, &endings, true).await,
            other => other,
        }
    }
}

impl Work {
    fn as_ending(&self) -> Option<&Ending> {
        match self {
            Self::End(ending) => Some(ending),
            Self::Renew(_) => None,
        }
    }
}

async fn renew(session: &Session, held: &[Held]) -> Result<Vec<RecordId>, Failed> {
    let ids: Vec<&[u8]> = held.iter().map(|held| &held.id.0[..]).collect();
    let attempts: Vec<&[u8]> = held.iter().map(|held| &held.attempt.0[..]).collect();
    let leases: Vec<i64> = held.iter().map(|held| row::span(held.lease)).collect();
    let rows = session.write(&RENEW, &[&ids, &attempts, &leases], 0).await?;
    rows.iter().map(|found| row::id(found, 0).map_err(Failed::Unreadable)).collect()
}

impl Ending {
    fn answer(&self) -> Option<&Bytes> {
        match &self.end {
            End::Complete { answer, .. } => Some(answer),
            End::Release | End::Hold => None,
        }
    }

    /// How it ends, in the words of `settle_v1`, and the span that belongs to it.
    fn how(&self) -> (i16, i64) {
        match &self.end {
            End::Complete { expiry: Expiry::FromClaim(ttl), .. } => (1, row::span(*ttl)),
            End::Complete { expiry: Expiry::FromNow(ttl), .. } => (2, row::span(*ttl)),
            End::Release => (3, 0),
            End::Hold => (4, 0),
        }
    }

    /// What it comes to where the statement left it alone: nothing where what stands has changed meanwhile.
    fn judge(&self, standing: Option<(Record, Standing)>, now: Timestamp) -> Option<Settled> {
        let change = rules::settle(standing.as_ref().map(|(_, standing)| *standing), self.attempt, &self.end, now);
        let record = standing.map(|(record, _)| record);
        match change {
            Change::Complete { .. } | Change::TurnUnknown { .. } | Change::Remove => None,
            Change::Repeated { until } => Some(Settled::Done { until }),
            Change::RepeatedIfSame { until } => match record {
                Some(record) if record.answer.as_ref() == self.answer() => Some(Settled::Done { until }),
                record => Some(Settled::Superseded { record }),
            },
            Change::Superseded => Some(Settled::Superseded { record }),
        }
    }
}

async fn settle(session: &Session, batch: &[&Ending], is_careful: bool) -> Result<Vec<Option<Said>>, Failed> {
    let ids: Vec<&[u8]> = batch.iter().map(|ending| &ending.id.0[..]).collect();
    let attempts: Vec<&[u8]> = batch.iter().map(|ending| &ending.attempt.0[..]).collect();
    let (hows, spans): (Vec<i16>, Vec<i64>) = batch.iter().map(|ending| ending.how()).unzip();
    let answers: Vec<Option<&[u8]>> = batch.iter().map(|ending| ending.answer().map(|answer| &answer[..])).collect();
    let values: [&(dyn ToSql + Sync); 6] = [&ids, &attempts, &hows, &spans, &answers, &is_careful];
    let bytes = batch.iter().filter_map(|ending| ending.answer()).map(Bytes::len).sum();
    let rows = session.write(&SETTLE, &values, bytes).await?;
    let mut said = row::nothing_for(batch);
    for found in &rows {
        let id = row::id(found, 0).map_err(Failed::Unreadable)?;
        let Ok(place) = batch.binary_search_by(|ending| ending.id.cmp(&id)) else { continue };
        // What was done comes first, and then once more as what stands.
        if said[place].is_none() {
            said[place] = read(batch[place], found).map_err(Failed::Unreadable)?;
        }
    }
    Ok(said)
}

fn read(ending: &Ending, found: &tokio_postgres::Row) -> Result<Option<Said>, row::Unreadable> {
    let now = row::time(found, 1)?;
    if let Some(until) = row::get::<Option<i64>>(found, 2)? {
        let until = Timestamp(u64::try_from(until).unwrap_or_default());
        return Ok(Some(Said::Settled(Settled::Done { until })));
    }
    if row::get::<bool>(found, 3)? {
        return Ok(Some(Said::Held));
    }
    let standing = if row::is_null(found, 4)? {
        None
    } else {
        let record = row::record(found, 4)?;
        let unknown_ttl = std::time::Duration::from_millis(row::number(found, 10)?);
        let Record { attempt, state, claimed_at, until, .. } = record;
        Some((record, Standing { attempt, state, claimed_at, until, unknown_ttl }))
    };
    Ok(ending.judge(standing, now).map(Said::Settled))
}
