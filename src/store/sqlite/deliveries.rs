//! Requests that are delivered later.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{OptionalExtension, Row, params};

use super::error::Failure;
use super::reader::{ReadRequest, Reader};
use super::session::Session;
use super::writer::Request;
use super::{Sqlite, row};
use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};
use crate::store::deliveries::{
    Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold, DeliveryPage,
    DeliveryState, Lane, LaneTurn, NewDelivery, Pick, Sequence, Take, TakenDelivery, passed_over,
};
use crate::store::resealing::DeliveryValues;
use crate::store::{Error, OriginId, lifecycle};

/// How many lanes are looked at in one go, and how many deliveries of an unordered one.
const MAX_STEPS: usize = 64;
const OF_A_LANE: i64 = 16;

struct AcceptRequest {
    id: RecordId,
    new: NewDelivery,
}

struct TakeRequest(Take);

struct ChangeRequest {
    taken: DeliveryHold,
    change: DeliveryChange,
}

struct RequeueRequest(RecordId);

struct PauseRequest {
    origin: OriginId,
    is_paused: bool,
}

pub(super) struct ResealDeliveryRequest {
    pub(super) id: RecordId,
    pub(super) token: AttemptToken,
    pub(super) seen: Option<Bytes>,
    pub(super) values: DeliveryValues,
}

struct SweepDeliveriesRequest {
    limit: usize,
}

/// The columns of a delivery, of which the origin's are the last three.
const COLUMNS: &str = "d.id, d.token, d.sequence, d.lane, d.accepted_at, d.queued_at, d.due, d.dead_until, d.attempts, \
                       d.head, d.note, o.service, o.namespace, o.route";

/// A query for deliveries that [`delivery`] reads, and perhaps more columns of them; `rest` says which.
pub(super) fn select(more: &str, rest: &str) -> String {
    format!("SELECT {COLUMNS}{more} FROM delivery d LEFT JOIN origin o ON o.id = d.origin {rest}")
}

#[async_trait]
impl Deliveries for Sqlite {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.ask(AcceptRequest { id, new }).await
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.look(move |reader| reader.delivery(id)).await
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        // Nothing is written where nothing is due, and no caller waits for a sync.
        let Some(next) = self.look(move |reader| reader.next_due(take.origin)).await? else {
            return Ok(Batch::default());
        };
        if let Some(wait) = next {
            return Ok(Batch { next_due_in: Some(wait), ..Batch::default() });
        }
        self.ask(TakeRequest(take)).await
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        self.ask(ChangeRequest { taken, change }).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.ask(RequeueRequest(id)).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.look(move |reader| reader.deliveries(&filter, after, limit)).await
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.look(Reader::count_deliveries).await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        self.ask(PauseRequest { origin, is_paused }).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.look(Reader::paused).await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        if self.look(Reader::nothing_to_sweep).await? {
            return Ok(0);
        }
        self.ask(SweepDeliveriesRequest { limit }).await
    }
}

impl Sqlite {
    pub(super) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Reader) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Error> {
        self.read(|reply| ReadRequest::of(look, reply)).await
    }
}

impl Request for AcceptRequest {
    type Reply = Acceptance;
    const ABANDONED_WITH_CALLER: bool = true;

    fn size(&self) -> usize {
        self.new.size()
    }

    fn run(&self, session: &mut Session) -> Result<Acceptance, Failure> {
        let (id, now) = (self.id, session.now());
        if let Some(record) = session.record(id)?.filter(|record| lifecycle::is_live(record.state, record.until, now)) {
            return Ok(Acceptance::Recorded { record, now });
        }
        let queued = select("", "WHERE d.id = ?1");
        let queued =
            session.conn.prepare_cached(&queued)?.query_row([id.0], |found| delivery(found, now)).optional()?;
        match queued {
            Some(queued) if queued.token == self.new.token => return Ok(Acceptance::Accepted),
            Some(queued) => return Ok(Acceptance::Queued(queued)),
            None => {}
        }
        session.room_for_claims()?;
        let NewDelivery { token, origin, lane, head, request, body } = &self.new;
        session
            .conn
            .prepare_cached(
                "INSERT INTO delivery (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?5, ?6, ?7, ?8)",
            )?
            .execute(params![id.0, token.0, origin.0, lane.0, row::time(now), &head[..], &request[..], &body[..]])?;
        session.took_room();
        Ok(Acceptance::Accepted)
    }
}

impl Request for TakeRequest {
    type Reply = Batch;

    fn run(&self, session: &mut Session) -> Result<Batch, Failure> {
        let (now, take) = (session.now(), &self.0);
        let is_paused =
            session.conn.prepare_cached("SELECT 1 FROM paused WHERE origin = ?1")?.exists([take.origin.0])?;
        if is_paused {
            return Ok(Batch::default());
        }
        let Chosen { picks, turn, is_crowded, is_more, last_lane } = Chosen::of(session, take, now)?;
        let (mut batch, mut bytes) = (Batch { is_more, ..Batch::default() }, 0);
        let sql = select(", d.request, d.body", "WHERE d.sequence = ?1");
        let until = now.plus(take.hold);
        for Pick { what: sequence, .. } in &picks {
            if bytes >= take.max_bytes {
                batch.is_more = true;
                break;
            }
            let mut whole = session.conn.prepare_cached(&sql)?;
            let mut id = None;
            let taken = whole.query_row([sequence], |found| {
                id = found.get(0).ok().map(RecordId);
                let mut delivery = delivery(found, now)?;
                delivery.state = DeliveryState::Queued { due: until };
                let bytes = |column| row::read_bytes(found, column).map(Option::unwrap_or_default);
                Ok(TakenDelivery { delivery, request: bytes(14)?, body: bytes(15)? })
            });
            let mut hold = session.conn.prepare_cached("UPDATE delivery SET due = ?2 WHERE sequence = ?1")?;
            hold.execute(params![sequence, row::time(until)])?;
            match taken {
                Ok(taken) => {
                    bytes += taken.request.len() + taken.body.len();
                    batch.taken.push(taken);
                }
                // A value that cannot be read; not a failure of SQLite.
                Err(error) if !matches!(error, rusqlite::Error::SqliteFailure(..)) => passed_over(id, &error),
                Err(error) => return Err(error.into()),
            }
        }
        if is_crowded {
            session.turns.insert(take.origin, turn.after(&picks, batch.taken.len(), last_lane));
        }
        Ok(batch)
    }
}

/// What may be taken of all that is due.
struct Chosen {
    /// In the order in which they are taken, by their places.
    picks: Vec<Pick<i64>>,
    turn: LaneTurn,
    /// Not all that is due can be taken.
    is_crowded: bool,
    /// There may be more than these.
    is_more: bool,
    /// The last lane that had its turn, where they have turns.
    last_lane: Option<Lane>,
}

impl Chosen {
    fn of(session: &Session, take: &Take, now: Timestamp) -> Result<Self, Failure> {
        let turn = session.turns.get(&take.origin).copied().unwrap_or_default();
        let most = take.limit.max(1);
        let candidates = if take.is_ordered { most.saturating_mul(4) } else { most };
        let mut oldest = session.conn.prepare_cached(
            "SELECT sequence, lane, length(request) + length(body) FROM delivery
             WHERE origin = ?1 AND dead_until IS NULL AND due <= ?2 ORDER BY due, sequence LIMIT ?3",
        )?;
        let oldest: Vec<(i64, i64, i64)> = oldest
            .query_map(params![take.origin.0, row::time(now), row::count(candidates)], |found| {
                Ok((found.get(0)?, found.get(1)?, found.get(2)?))
            })?
            .collect::<rusqlite::Result<_>>()?;
        let mut is_more = oldest.len() >= candidates;
        let (mut may_go, mut bytes) = (Vec::with_capacity(oldest.len()), 0);
        for (sequence, lane, size) in oldest {
            if take.is_ordered && of_lane(session, take.origin, lane)?.next_in_order(now) != Some(sequence) {
                continue;
            }
            if may_go.len() == most {
                is_more = true;
                break;
            }
            may_go.push(sequence);
            bytes += size;
        }
        let is_crowded = is_more || bytes > row::count(take.max_bytes);
        if !is_crowded {
            let picks = turn.alternate(may_go, Vec::new());
            return Ok(Self { picks, turn, is_crowded, is_more, last_lane: None });
        }
        let by_age = &may_go[..turn.share_of_age(may_go.len())];
        let (by_lane, last_lane) = go_round(session, take, now, by_age, turn.lane)?;
        // Where there are few lanes, more of the oldest.
        may_go.retain(|sequence| !by_lane.iter().any(|(_, of_lane)| of_lane == sequence));
        may_go.truncate(most - by_lane.len());
        Ok(Self { picks: turn.alternate(may_go, by_lane), turn, is_crowded, is_more, last_lane: Some(last_lane) })
    }
}

/// The first few deliveries of a lane: their places, and when they are due.
struct FirstOfLane(Vec<(i64, i64)>);

fn of_lane(session: &Session, origin: OriginId, lane: i64) -> Result<FirstOfLane, Failure> {
    let mut first = session.conn.prepare_cached(
        "SELECT sequence, due FROM delivery WHERE origin = ?1 AND lane = ?2 AND dead_until IS NULL
         ORDER BY sequence LIMIT ?3",
    )?;
    let found = first.query_map(params![origin.0, lane, OF_A_LANE], |found| Ok((found.get(0)?, found.get(1)?)))?;
    Ok(FirstOfLane(found.collect::<rusqlite::Result<_>>()?))
}

impl FirstOfLane {
    fn due(&self, now: Timestamp) -> impl Iterator<Item = i64> {
        let now = row::time(now);
        self.0.iter().filter(move |(_, due)| *due <= now).map(|(sequence, _)| *sequence)
    }

    /// The one that may go where the lane is in order: none while another is held or pauses. One that was dead may have come back
    /// before it.
    fn next_in_order(&self, now: Timestamp) -> Option<i64> {
        let is_free = self.due(now).count() == self.0.len();
        self.0.first().filter(|_| is_free).map(|(sequence, _)| *sequence)
    }
}

/// One of each lane, from the one after `lane` on, but none of those that go by age. Then the last lane that was looked at.
fn go_round(
    session: &Session,
    take: &Take,
    now: Timestamp,
    by_age: &[i64],
    lane: Option<Lane>,
) -> Result<(Vec<(Lane, i64)>, Lane), Failure> {
    let mut next_lane = session.conn.prepare_cached(
        "SELECT lane FROM delivery WHERE origin = ?1 AND dead_until IS NULL AND lane > ?2 ORDER BY lane LIMIT 1",
    )?;
    let most = take.limit.max(1) - by_age.len();
    let mut by_lane: Vec<(Lane, i64)> = Vec::new();
    let mut lane = lane.map_or(i64::MIN, |Lane(lane)| lane);
    let mut has_wrapped = lane == i64::MIN;
    for _ in 0..MAX_STEPS {
        if by_lane.len() >= most {
            break;
        }
        match next_lane.query_row(params![take.origin.0, lane], |found| found.get(0)).optional()? {
            Some(next) => lane = next,
            None if has_wrapped => break,
            None => {
                (has_wrapped, lane) = (true, i64::MIN);
                continue;
            }
        }
        let found = of_lane(session, take.origin, lane)?;
        let is_chosen = |sequence| by_age.contains(&sequence) || by_lane.iter().any(|(_, chosen)| *chosen == sequence);
        let next = match take.is_ordered {
            true => found.next_in_order(now).filter(|sequence| !is_chosen(*sequence)),
            false => found.due(now).find(|sequence| !is_chosen(*sequence)),
        };
        by_lane.extend(next.map(|sequence| (Lane(lane), sequence)));
    }
    Ok((by_lane, Lane(lane)))
}

impl Request for ChangeRequest {
    type Reply = bool;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let (now, DeliveryHold { id, token, until }) = (session.now(), self.taken);
        let conn = &session.conn;
        let changed = match &self.change {
            DeliveryChange::Finish => conn
                .prepare_cached("DELETE FROM delivery WHERE id = ?1 AND token = ?2")?
                .execute(params![id.0, token.0])?,
            DeliveryChange::Postpone { delay, is_attempt, note } => conn
                .prepare_cached(
                    "UPDATE delivery SET due = ?4, attempts = attempts + ?5, note = coalesce(?6, note)
                     WHERE id = ?1 AND token = ?2 AND due = ?3 AND dead_until IS NULL",
                )?
                .execute(params![
                    id.0,
                    token.0,
                    row::time(until),
                    row::time(now.plus(*delay)),
                    i64::from(*is_attempt),
                    note.as_deref()
                ])?,
            DeliveryChange::Park { ttl, is_attempt, note } => conn
                .prepare_cached(
                    "UPDATE delivery SET dead_until = ?4, attempts = attempts + ?5, note = ?6
                     WHERE id = ?1 AND token = ?2 AND due = ?3 AND dead_until IS NULL",
                )?
                .execute(params![
                    id.0,
                    token.0,
                    row::time(until),
                    row::time(now.plus(*ttl)),
                    i64::from(*is_attempt),
                    &note[..]
                ])?,
        };
        Ok(changed == 1)
    }
}

impl Request for RequeueRequest {
    type Reply = bool;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let mut requeue = session.conn.prepare_cached(
            "UPDATE delivery SET queued_at = ?2, due = ?2, dead_until = NULL, attempts = 0, note = NULL
             WHERE id = ?1 AND dead_until IS NOT NULL",
        )?;
        Ok(requeue.execute(params![self.0.0, row::time(session.now())])? == 1)
    }
}

impl Request for PauseRequest {
    type Reply = bool;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let sql = match self.is_paused {
            true => "INSERT INTO paused (origin) VALUES (?1) ON CONFLICT DO NOTHING",
            false => "DELETE FROM paused WHERE origin = ?1",
        };
        Ok(session.conn.prepare_cached(sql)?.execute([self.origin.0])? == 1)
    }
}

impl Request for ResealDeliveryRequest {
    type Reply = bool;

    fn size(&self) -> usize {
        self.values.request.len() + self.values.body.len()
    }

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let DeliveryValues { head, request, body, note } = &self.values;
        let mut reseal = session.conn.prepare_cached(
            "UPDATE delivery SET head = ?4, request = ?5, body = ?6, note = ?7
             WHERE id = ?1 AND token = ?2 AND note IS ?3",
        )?;
        let (seen, note) = (self.seen.as_deref(), note.as_deref());
        let values = params![self.id.0, self.token.0, seen, &head[..], &request[..], &body[..], note];
        Ok(reseal.execute(values)? == 1)
    }
}

impl Request for SweepDeliveriesRequest {
    type Reply = usize;

    fn run(&self, session: &mut Session) -> Result<usize, Failure> {
        let mut sweep = session.conn.prepare_cached(
            "DELETE FROM delivery WHERE sequence IN
                (SELECT sequence FROM delivery WHERE dead_until <= ?1 ORDER BY dead_until LIMIT ?2)",
        )?;
        Ok(sweep.execute(params![row::time(session.now()), row::count(self.limit)])?)
    }
}

/// The delivery of a row of [`select`], read at `now`.
pub(super) fn delivery(found: &Row<'_>, now: Timestamp) -> rusqlite::Result<Delivery> {
    let due = row::read_time(found, 6)?;
    let dead = found.get::<_, Option<i64>>(7)?.map(|_| row::read_time(found, 7)).transpose()?;
    Ok(Delivery {
        id: RecordId(found.get(0)?),
        token: row::read_attempt(found, 1)?,
        sequence: Sequence(row::read_time(found, 2)?.0),
        origin: row::origin(found, 11)?,
        lane: Lane(found.get(3)?),
        accepted_at: row::read_time(found, 4)?,
        queued_at: row::read_time(found, 5)?,
        state: dead.map_or(DeliveryState::Queued { due }, |until| DeliveryState::Dead { until }),
        attempts: found.get(8)?,
        head: row::read_bytes(found, 9)?.unwrap_or_default(),
        note: row::read_bytes(found, 10)?,
        now,
    })
}
