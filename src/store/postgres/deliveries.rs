//! Requests that are delivered later.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::operation::{SettleOperation, SettleReply};
use super::pool::Pool;
use super::row::{self, Unreadable};
use super::session::{CallError, Parameter, Query, Session};
use super::{Postgres, count_of, unexpected_reply};
use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};
use crate::store::deliveries::{
    Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold, DeliveryPage,
    DeliveryState, Lane, NewDelivery, Sequence, Take, TakenDelivery, passed_over,
};
use crate::store::resealing::DeliveryValues;
use crate::store::{Error, ErrorKind, Origin, OriginId, RecordEntry, Store as _};

pub(super) const ACCEPT: Query = Query {
    sql: "SELECT id, found FROM oncegate.accept_v1($1, $2, $3, $4, $5, $6, $7)",
    types: &[
        Type::BYTEA_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::BYTEA_ARRAY,
        Type::BYTEA_ARRAY,
        Type::BYTEA_ARRAY,
    ],
};

pub(super) const FINISH: Query =
    Query { sql: "SELECT oncegate.finish_deliveries_v1($1, $2)", types: &[Type::BYTEA_ARRAY, Type::BYTEA_ARRAY] };

const TAKE: &str = "SELECT t.id, t.token, t.sequence, t.lane, t.accepted_at, t.queued_at, t.due, NULL::bigint, t.attempts, \
     t.head, t.note, o.service, o.namespace, o.route, t.now, t.request, t.body, t.is_more, t.last_lane, t.next_due, \
     t.is_lane_next \
     FROM oncegate.take_due_v3($1, $2, $3, $4, $5, $6, $7, $8, $9) t LEFT JOIN oncegate.origin o ON o.id = $1";

const CHANGE: &str = "SELECT oncegate.change_delivery_v2($1, $2, $3, $4, $5, $6, $7)";

/// How often a take starts from the beginning: so it finds rows that became visible late, and those that were due before a clock
/// was set back.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How long after it was accepted, in milliseconds, a request is expected to be visible.
const VISIBLE: i64 = 1_000;

/// Up to where this process has taken the deliveries of each route. Removed rows stay in the indexes for a while, and each take
/// would scan them again.
#[derive(Default)]
pub(super) struct Takes(Mutex<HashMap<OriginId, Position>>);

/// From where to take; `None` is the beginning.
#[derive(Clone, Copy, Default)]
struct Position {
    /// The lane that had the last turn.
    lane: Option<i64>,
    /// Whether a lane goes before the oldest.
    is_lane_first: Option<bool>,
    /// Nothing that was free was due before, in milliseconds.
    due: Option<i64>,
    /// The least place in the order of acceptance among the oldest that were due.
    sequence: Option<i64>,
    /// When there was a look from the beginning.
    since: Option<Instant>,
}

impl Takes {
    fn from(&self, origin: OriginId) -> Position {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&origin).copied().unwrap_or_default();
        if known.since.is_some_and(|since| since.elapsed() < LOOK_AGAIN) {
            return known;
        }
        Position { due: None, sequence: None, since: Some(Instant::now()), ..known }
    }

    fn reached(&self, origin: OriginId, from: Position, found: Position) {
        let due = found.due.map(|due| due.saturating_sub(VISIBLE)).or(from.due);
        let (lane, sequence) = (found.lane.or(from.lane), found.sequence.or(from.sequence));
        let is_lane_first = found.is_lane_first.or(from.is_lane_first);
        let position = Position { lane, is_lane_first, due, sequence, since: from.since };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(origin, position);
    }
}

/// A query for deliveries, then the time, and perhaps more columns of them; `rest` says which.
fn select(more: &str, rest: &str) -> String {
    format!(
        "SELECT d.id, d.token, d.sequence, d.lane, d.accepted_at, d.queued_at, \
         greatest(d.due, d.held_until), d.dead_until, d.attempts, d.head, d.note, o.service, o.namespace, o.route, oncegate.now_v1(){more} \
         FROM oncegate.delivery d LEFT JOIN oncegate.origin o ON o.id = d.origin {rest}"
    )
}

const COUNT: &str = "SELECT o.service, o.namespace, o.route, c.queued, c.oldest, c.dead, oncegate.now_v1() FROM ( \
         SELECT d.origin, count(*) FILTER (WHERE d.dead_until IS NULL) AS queued, \
             min(d.accepted_at) FILTER (WHERE d.dead_until IS NULL) AS oldest, \
             count(*) FILTER (WHERE d.dead_until IS NOT NULL) AS dead \
         FROM oncegate.delivery d GROUP BY d.origin \
     ) c LEFT JOIN oncegate.origin o ON o.id = c.origin";

#[async_trait]
impl Deliveries for Postgres {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        loop {
            let operation = SettleOperation::Accept { id, new: new.clone() };
            let SettleReply::Accepted(standing) = self.settlements.submit(operation).await? else {
                return Err(unexpected_reply());
            };
            // What stood may be gone again: then the request is to be kept after all.
            match standing {
                None => {
                    self.kept.insert(new.token, ());
                    return Ok(Acceptance::Accepted);
                }
                Some(IdHolder::Delivery) => {
                    if let Some(delivery) = self.delivery(id).await? {
                        return Ok(Acceptance::Queued(delivery));
                    }
                }
                Some(IdHolder::Record) => {
                    if let Some(RecordEntry { record, now, .. }) = self.get(id).await?.filter(RecordEntry::is_live) {
                        return Ok(Acceptance::Recorded { record, now });
                    }
                }
            }
        }
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.ensure_open()?;
        let sql = select("", "WHERE d.id = $1");
        loop {
            let host = self.hosts.chosen();
            let rows = self.pool.query(&sql, &[(&&id.0[..], Type::BYTEA)]).await?;
            let found = rows.first().map(delivery).transpose().map_err(unreadable)?;
            match &found {
                Some(Delivery { token, .. }) if self.ensure_kept(id, *token, host).await? => {}
                _ => return Ok(found),
            }
        }
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        self.ensure_open()?;
        let from = self.takes.from(take.origin);
        let values: [Parameter<'_>; 9] = [
            (&take.origin.0, Type::INT8),
            (&row::count(take.limit), Type::INT8),
            (&row::count(take.max_bytes), Type::INT8),
            (&row::span(take.hold), Type::INT8),
            (&take.is_ordered, Type::BOOL),
            (&from.lane, Type::INT8),
            (&from.is_lane_first.unwrap_or_default(), Type::BOOL),
            (&from.due, Type::INT8),
            (&from.sequence, Type::INT8),
        ];
        let rows = self.pool.write(TAKE, &values).await?;
        let (batch, reached) = batch(&rows).map_err(unreadable)?;
        self.takes.reached(take.origin, from, reached);
        Ok(batch)
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        let (kind, span, is_attempt, note): (i16, Duration, bool, Option<&Bytes>) = match &change {
            DeliveryChange::Finish => {
                let operation = SettleOperation::Finish { id: taken.id, token: taken.token };
                return match self.settlements.submit(operation).await? {
                    SettleReply::Finished(was_there) => Ok(was_there),
                    _ => Err(unexpected_reply()),
                };
            }
            DeliveryChange::Postpone { delay, is_attempt, note } => (1, *delay, *is_attempt, note.as_ref()),
            DeliveryChange::Park { ttl, is_attempt, note } => (2, *ttl, *is_attempt, Some(note)),
        };
        self.write_one(
            CHANGE,
            &[
                (&&taken.id.0[..], Type::BYTEA),
                (&&taken.token.0[..], Type::BYTEA),
                (&row::millis(taken.until), Type::INT8),
                (&kind, Type::INT2),
                (&row::span(span), Type::INT8),
                (&is_attempt, Type::BOOL),
                (&note.map(|note| &note[..]), Type::BYTEA),
            ],
        )
        .await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.ensure_open()?;
        let requeue = "SELECT oncegate.requeue_delivery_v1($1)";
        let rows = self.pool.write_unless_locked(requeue, &[(&&id.0[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.ensure_open()?;
        let sql = select(
            "",
            "WHERE d.sequence > $1 AND ($2::text IS NULL OR o.service = $2) \
             AND ($3::text IS NULL OR o.route = $3) AND ($4::bool IS NULL OR (d.dead_until IS NOT NULL) = $4) \
             AND d.id BETWEEN $6 AND $7 \
             ORDER BY d.sequence LIMIT $5",
        );
        let DeliveryFilter { service, route, is_dead, .. } = &filter;
        let ids = filter.ids();
        let (from, upto) = (&ids.start().0[..], &ids.end().0[..]);
        let after = after.map_or(0, |Sequence(after)| i64::try_from(after).unwrap_or(i64::MAX));
        // One extra shows whether there are more.
        let wanted = row::count(limit.saturating_add(1));
        let values: [Parameter<'_>; 7] = [
            (&after, Type::INT8),
            (&service.as_deref(), Type::TEXT),
            (&route.as_deref(), Type::TEXT),
            (is_dead, Type::BOOL),
            (&wanted, Type::INT8),
            (&from, Type::BYTEA),
            (&upto, Type::BYTEA),
        ];
        let rows = self.pool.query_unless_locked(&sql, &values).await?;
        let found = rows.iter().map(delivery).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        Ok(DeliveryPage::of(found, limit))
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.ensure_open()?;
        let rows = self.pool.query_unless_locked(COUNT, &[]).await?;
        let count = |found: &Row| {
            let now = row::time(found, 6)?;
            let oldest = row::get::<Option<i64>>(found, 4)?.map(|at| now.since(Timestamp(at.unsigned_abs())));
            let (queued, dead) = (row::number(found, 3)?, row::number(found, 5)?);
            Ok(DeliveryCount { origin: row::origin(found, 0)?, queued, oldest, dead })
        };
        rows.iter().map(count).collect::<Result<_, _>>().map_err(unreadable)
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        let values: [Parameter<'_>; 2] = [(&origin.0, Type::INT8), (&is_paused, Type::BOOL)];
        self.write_one("SELECT oncegate.pause_v1($1, $2)", &values).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.ensure_open()?;
        let rows = self.pool.query_unless_locked("SELECT p.origin FROM oncegate.paused p", &[]).await?;
        let origins = rows.iter().map(|found| row::get::<i64>(found, 0).map(OriginId));
        origins.collect::<Result<_, _>>().map_err(unreadable)
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        self.ensure_open()?;
        let most = row::count(limit);
        let rows = self.pool.write("SELECT oncegate.sweep_deliveries_v1($1)", &[(&most, Type::INT8)]).await?;
        count_of(&rows, 0)
    }
}

impl Postgres {
    /// Whether a statement changed something.
    pub(super) async fn write_one(&self, sql: &str, values: &[Parameter<'_>]) -> Result<bool, Error> {
        self.ensure_open()?;
        let rows = self.pool.write(sql, values).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }
}

/// What keeps a request from being accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdHolder {
    /// Another delivery of its id.
    Delivery,
    /// A record of its id.
    Record,
}

/// Keeps requests, whose ids are in order and single. Nothing is replied for one whose row is missing.
pub(super) async fn accept(
    session: &Session,
    new: &[(RecordId, &NewDelivery)],
) -> Result<Vec<Option<Option<IdHolder>>>, CallError> {
    let ids: Vec<&[u8]> = new.iter().map(|(id, _)| &id.0[..]).collect();
    let tokens: Vec<&[u8]> = new.iter().map(|(_, new)| &new.token.0[..]).collect();
    let origins: Vec<i64> = new.iter().map(|(_, new)| new.origin.0).collect();
    let lanes: Vec<i64> = new.iter().map(|(_, new)| new.lane.0).collect();
    let heads: Vec<&[u8]> = new.iter().map(|(_, new)| &new.head[..]).collect();
    let requests: Vec<&[u8]> = new.iter().map(|(_, new)| &new.request[..]).collect();
    let bodies: Vec<&[u8]> = new.iter().map(|(_, new)| &new.body[..]).collect();
    let bytes = new.iter().map(|(_, new)| new.size()).sum();
    let values: [&(dyn ToSql + Sync); 7] = [&ids, &tokens, &origins, &lanes, &heads, &requests, &bodies];
    let rows = session.write(&ACCEPT, &values, bytes).await?;
    let mut replies = vec![None; new.len()];
    for found in &rows {
        let id = row::id(found, 0).map_err(CallError::Unreadable)?;
        let standing = match row::get::<i16>(found, 1).map_err(CallError::Unreadable)? {
            0 => None,
            1 => Some(IdHolder::Delivery),
            _ => Some(IdHolder::Record),
        };
        if let Ok(place) = new.binary_search_by(|(known, _)| known.cmp(&id)) {
            replies[place] = Some(standing);
        }
    }
    Ok(replies)
}

/// Removes deliveries, whose ids are in order and single. Returns which were there.
pub(super) async fn finish(session: &Session, ended: &[(RecordId, AttemptToken)]) -> Result<Vec<bool>, CallError> {
    let ids: Vec<&[u8]> = ended.iter().map(|(id, _)| &id.0[..]).collect();
    let tokens: Vec<&[u8]> = ended.iter().map(|(_, token)| &token.0[..]).collect();
    let rows = session.write(&FINISH, &[&ids, &tokens], 0).await?;
    let mut were_there = vec![false; ended.len()];
    for found in &rows {
        let id = row::id(found, 0).map_err(CallError::Unreadable)?;
        if let Ok(place) = ended.binary_search_by(|(known, _)| known.cmp(&id)) {
            were_there[place] = true;
        }
    }
    Ok(were_there)
}

/// A delivery with all its values.
pub(super) async fn values(pool: &Pool, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
    let sql = select(", d.request, d.body", "WHERE d.id = $1");
    let rows = pool.query_unless_locked(&sql, &[(&&id.0[..], Type::BYTEA)]).await?;
    let read = |found: &Row| {
        let delivery = delivery(found)?;
        let bytes = |column| row::get::<&[u8]>(found, column).map(Bytes::copy_from_slice);
        let (head, note) = (delivery.head.clone(), delivery.note.clone());
        let values = DeliveryValues { head, request: bytes(15)?, body: bytes(16)?, note };
        Ok((delivery, values))
    };
    rows.first().map(read).transpose().map_err(unreadable)
}

fn unreadable(unreadable: Unreadable) -> Error {
    Error::indeterminate(ErrorKind::Corrupt, unreadable)
}

/// The delivery of a row.
fn delivery(found: &Row) -> Result<Delivery, Unreadable> {
    let due = row::time(found, 6)?;
    let dead = row::get::<Option<i64>>(found, 7)?;
    let bytes = |column| row::get::<Option<&[u8]>>(found, column).map(|bytes| bytes.map(Bytes::copy_from_slice));
    let origin: Option<Origin> = row::origin(found, 11)?;
    Ok(Delivery {
        id: row::id(found, 0)?,
        token: row::attempt(found, 1)?,
        sequence: Sequence(row::number(found, 2)?),
        origin,
        lane: Lane(row::get(found, 3)?),
        accepted_at: row::time(found, 4)?,
        queued_at: row::time(found, 5)?,
        state: match dead {
            Some(_) => DeliveryState::Dead { until: row::time(found, 7)? },
            None => DeliveryState::Queued { due },
        },
        attempts: u32::try_from(row::get::<i32>(found, 8)?).unwrap_or_default(),
        head: bytes(9)?.unwrap_or_default(),
        note: bytes(10)?,
        now: row::time(found, 14)?,
    })
}

/// The deliveries that a take gives, and where the next take starts. Its last row has no id, and says the rest.
fn taken(found: &Row) -> Result<TakenDelivery, Unreadable> {
    let bytes = |column| row::get::<&[u8]>(found, column).map(Bytes::copy_from_slice);
    Ok(TakenDelivery { delivery: delivery(found)?, request: bytes(15)?, body: bytes(16)? })
}

fn batch(rows: &[Row]) -> Result<(Batch, Position), Unreadable> {
    let (mut batch, mut reached) = (Batch::default(), Position::default());
    for found in rows {
        if !row::is_null(found, 0)? {
            match taken(found) {
                Ok(taken) => batch.taken.push(taken),
                Err(error) => passed_over(row::id(found, 0).ok(), &error),
            }
            continue;
        }
        let now = row::time(found, 14)?;
        batch.is_more = row::get(found, 17)?;
        reached = Position {
            lane: row::get(found, 18)?,
            is_lane_first: row::get(found, 20)?,
            due: row::get(found, 6)?,
            sequence: row::get(found, 2)?,
            since: None,
        };
        let next = row::get::<Option<i64>>(found, 19)?.map(|due| Timestamp(due.unsigned_abs()));
        batch.next_due_in = next.map(|due| due.since(now));
    }
    Ok((batch, reached))
}
