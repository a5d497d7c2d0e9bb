//! The requests of the writer, one for each operation of the store.
//!
//! Each request looks before it writes, and writes with one statement or in a savepoint: one that fails leaves nothing
//! behind.

use bytes::Bytes;
use rusqlite::{OptionalExtension, ToSql, params};

use super::error::Failure;
use super::session::Session;
use super::writer::Request;
use super::{pieces, row, schema};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};
use crate::store::lifecycle::{self, CurrentRecord, Transition};
use crate::store::resealing::Values;
use crate::store::{Claim, Error, ErrorKind, LeaseRenewal, NewRecord, Settled, Settlement};

pub(super) struct ClaimRequest {
    pub(super) id: RecordId,
    pub(super) fresh: NewRecord,
}

pub(super) struct SupersedeRequest {
    pub(super) id: RecordId,
    pub(super) seen: Version,
    pub(super) fresh: NewRecord,
}

pub(super) struct SettleRequest {
    pub(super) id: RecordId,
    pub(super) attempt: AttemptToken,
    pub(super) end: Settlement,
    /// What its answer was written with before, where that is so: see [`pieces`].
    pub(super) turn: Option<i64>,
}

pub(super) struct RenewRequest(pub(super) Vec<LeaseRenewal>);

pub(super) struct ExpireLeasesRequest {
    pub(super) limit: usize,
}

pub(super) struct SweepRequest {
    pub(super) limit: usize,
}

pub(super) struct RemoveRequest {
    pub(super) id: RecordId,
    pub(super) attempt: AttemptToken,
}

pub(super) struct ResealRequest {
    pub(super) id: RecordId,
    pub(super) seen: Version,
    pub(super) values: Values,
}

pub(super) struct PingRequest;

/// The statements that run for every protected request, and by index only: a test asks the planner.
pub(super) mod sql {
    pub(in crate::store::sqlite) const CLAIM: &str =
        "INSERT INTO record (id, attempt, state, claimed_at, until, unknown_ttl, origin, head)
         VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING";
    pub(in crate::store::sqlite) const CURRENT: &str =
        "SELECT seq, attempt, state, claimed_at, until, unknown_ttl FROM record WHERE id = ?1";
    pub(in crate::store::sqlite) const RECORD: &str =
        "SELECT attempt, state, claimed_at, until, head, answer FROM record WHERE id = ?1";
    /// The record gets the last row: listings find the newest claims there.
    pub(in crate::store::sqlite) const SUPERSEDE: &str =
        "UPDATE record SET seq = (SELECT max(seq) + 1 FROM record), attempt = ?2, state = 0, claimed_at = ?3, until = ?4, unknown_ttl = ?5, origin = ?6,
                head = ?7, answer = NULL
         WHERE seq = ?1";
    pub(in crate::store::sqlite) const COMPLETE: &str =
        "UPDATE record SET state = 1, until = ?2, answer = ?3 WHERE seq = ?1";
    pub(in crate::store::sqlite) const HOLD: &str =
        "UPDATE record SET state = 2, until = ?2, answer = ?3 WHERE seq = ?1";
    pub(in crate::store::sqlite) const REMOVE: &str = "DELETE FROM record WHERE seq = ?1";
    pub(in crate::store::sqlite) const RESEAL: &str = "UPDATE record SET head = ?2, answer = ?3 WHERE seq = ?1";
    pub(in crate::store::sqlite) const RENEW: &str =
        "UPDATE record SET until = ?3 WHERE id = ?1 AND attempt = ?2 AND state = 0";
    /// The condition of [`super::schema::turn_unknown_sql`].
    pub(in crate::store::sqlite) const LEASE_IS_PAST: &str = "seq IN (SELECT seq FROM record INDEXED BY record_lease
         WHERE state = 0 AND until <= ?1 ORDER BY until LIMIT ?2)";
    pub(in crate::store::sqlite) const SWEEP: &str =
        "DELETE FROM record WHERE seq IN (SELECT seq FROM record INDEXED BY record_expiry
         WHERE state <> 0 AND until <= ?1 AND NOT EXISTS (SELECT 1 FROM delivery d WHERE d.id = record.id)
         ORDER BY until LIMIT ?2) RETURNING state, attempt";
}

impl Request for ClaimRequest {
    type Reply = Claim;
    // An orphaned claim would only block its key until its lease expires.
    const ABANDONED_WITH_CALLER: bool = true;

    fn run(&self, session: &mut Session) -> Result<Claim, Failure> {
        let Self { id, fresh } = self;
        let now = session.now();
        if let Err(refusal) = session.room_for_claims() {
            return session.answer_from_record(*id, fresh, now)?.ok_or(refusal);
        }
        let inserted = session.conn.prepare_cached(sql::CLAIM)?.execute(params![
            id.0,
            fresh.attempt.0,
            row::time(now),
            row::time(now.plus(fresh.lease)),
            row::span(fresh.unknown_ttl),
            fresh.origin.0,
            &fresh.head[..],
        ])?;
        if inserted == 1 {
            session.claimed(None);
            let current = CurrentRecord {
                attempt: fresh.attempt,
                state: State::InFlight,
                claimed_at: now,
                until: now.plus(fresh.lease),
                unknown_ttl: fresh.unknown_ttl,
            };
            session.remember(*id, current);
            return Ok(Claim::Inserted(now));
        }
        let lost = || Error::determinate(ErrorKind::Corrupt, "a record is in an index but not in the table");
        session.answer_from_record(*id, fresh, now)?.ok_or_else(|| Failure::Request(lost()))
    }
}

impl Request for SupersedeRequest {
    type Reply = bool;
    const ABANDONED_WITH_CALLER: bool = true;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let Self { id, seen, fresh } = self;
        let Some((seq, current)) = session.current(*id)? else {
            return Ok(false);
        };
        if current.attempt == fresh.attempt && current.state == State::InFlight {
            return Ok(true);
        }
        if current.version() != *seen {
            return Ok(false);
        }
        session.room_for_claims()?;
        let now = session.now();
        session.conn.prepare_cached(sql::SUPERSEDE)?.execute(params![
            seq,
            fresh.attempt.0,
            row::time(now),
            row::time(now.plus(fresh.lease)),
            row::span(fresh.unknown_ttl),
            fresh.origin.0,
            &fresh.head[..],
        ])?;
        pieces::remove(&session.conn, current.attempt)?;
        session.forget(id);
        session.claimed(Some(current.state));
        Ok(true)
    }
}

impl Request for SettleRequest {
    type Reply = Settled;

    fn size(&self) -> usize {
        if self.turn.is_some() { 0 } else { self.end.answer().map_or(0, Bytes::len) }
    }

    fn run(&self, session: &mut Session) -> Result<Settled, Failure> {
        let now = session.now();
        let found = match session.take_remembered(&self.id) {
            Some(found) => Some(found),
            None => session.current(self.id)?,
        };
        let from = found.map(|(_, current)| current.state);
        let seq = found.map(|(seq, _)| seq);
        let done = |until| Ok(Settled::Done { until });
        match lifecycle::settle(found.map(|(_, current)| current), self.attempt, &self.end, now) {
            Transition::Complete { until } => {
                let answer = self.end.answer().map_or(&[][..], |answer| &answer[..]);
                let length;
                let answer: &dyn ToSql = match self.turn {
                    Some(turn) => {
                        length = pieces::expect_all(&session.conn, self.attempt, turn, answer.len())?;
                        &length
                    }
                    None => &answer,
                };
                session.conn.prepare_cached(sql::COMPLETE)?.execute(params![seq, row::time(until), answer])?;
                session.moved(from, Some(State::Completed), 1);
                done(until)
            }
            Transition::TurnUnknown { until } => {
                let values = params![seq, row::time(until), self.end.answer().map(|cause| &cause[..])];
                session.conn.prepare_cached(sql::HOLD)?.execute(values)?;
                session.moved(from, Some(State::Unknown), 1);
                done(until)
            }
            Transition::Remove => {
                session.conn.prepare_cached(sql::REMOVE)?.execute(params![seq])?;
                pieces::remove(&session.conn, self.attempt)?;
                session.moved(from, None, 1);
                done(now)
            }
            Transition::Repeated { until } => done(until),
            Transition::RepeatedIfSame { until } => match session.record(self.id)? {
                Some(record) if record.answer.as_ref() == self.end.answer() => done(until),
                record => Ok(Settled::NotCurrent { record }),
            },
            Transition::NotCurrent => Ok(Settled::NotCurrent { record: session.record(self.id)? }),
        }
    }
}

impl Request for RenewRequest {
    type Reply = Vec<RecordId>;

    fn run(&self, session: &mut Session) -> Result<Vec<RecordId>, Failure> {
        let now = session.now();
        self.0.iter().for_each(|held| session.forget(&held.id));
        let mut renew = session.conn.prepare_cached(sql::RENEW)?;
        let mut renewed = Vec::with_capacity(self.0.len());
        for held in &self.0 {
            if renew.execute(params![held.id.0, held.attempt.0, row::time(now.plus(held.lease))])? > 0 {
                renewed.push(held.id);
            }
        }
        Ok(renewed)
    }
}

impl Request for ExpireLeasesRequest {
    type Reply = Vec<RecordId>;

    fn run(&self, session: &mut Session) -> Result<Vec<RecordId>, Failure> {
        let values = params![row::time(session.now()), row::count(self.limit)];
        let statement = schema::turn_unknown_sql(sql::LEASE_IS_PAST);
        let (turned, ids) = schema::turn_unknown(&mut *session.conn.prepare_cached(&statement)?, values)?;
        session.moved(Some(State::InFlight), Some(State::Unknown), turned);
        if turned > 0 {
            session.forget_all();
        }
        Ok(ids)
    }
}

impl Request for SweepRequest {
    type Reply = usize;

    fn run(&self, session: &mut Session) -> Result<usize, Failure> {
        let now = row::time(session.now());
        let (mut states, mut attempts) = (Vec::new(), Vec::new());
        {
            let mut sweep = session.conn.prepare_cached(sql::SWEEP)?;
            let mut rows = sweep.query(params![now, row::count(self.limit)])?;
            while let Some(swept) = rows.next()? {
                // What cannot be read is gone now; only the count of it is not known.
                states.extend(row::read_state(swept, 0));
                attempts.extend(row::read_attempt(swept, 1));
            }
        }
        states.iter().for_each(|state| session.moved(Some(*state), None, 1));
        for attempt in attempts {
            pieces::remove(&session.conn, attempt)?;
        }
        Ok(states.len())
    }
}

impl Request for RemoveRequest {
    type Reply = bool;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        // A record that cannot be read can be removed: the state is only looked at for the count.
        let mut find = session.conn.prepare_cached("SELECT seq, state FROM record WHERE id = ?1 AND attempt = ?2")?;
        let found = find.query_row([&self.id.0[..], &self.attempt.0[..]], |row| {
            Ok((row.get::<_, i64>(0)?, row::read_state(row, 1).ok()))
        });
        let found = found.optional()?;
        drop(find);
        let Some((seq, state)) = found else {
            return Ok(false);
        };
        session.forget(&self.id);
        session.conn.prepare_cached(sql::REMOVE)?.execute(params![seq])?;
        pieces::remove(&session.conn, self.attempt)?;
        session.moved(state, None, 1);
        Ok(true)
    }
}

impl Request for ResealRequest {
    type Reply = bool;
    const ABANDONED_WITH_CALLER: bool = true;

    fn size(&self) -> usize {
        self.values.answer.as_ref().map_or(0, Bytes::len)
    }

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let Some((seq, current)) = session.current(self.id)? else { return Ok(false) };
        if current.state == State::InFlight || current.version() != self.seen {
            return Ok(false);
        }
        let Values { head, answer } = &self.values;
        let values = params![seq, &head[..], answer.as_deref()];
        session.conn.prepare_cached(sql::RESEAL)?.execute(values)?;
        // It is whole again. Those of an attempt that is not completed may be being written.
        if current.state == State::Completed {
            pieces::remove(&session.conn, current.attempt)?;
        }
        Ok(true)
    }
}

impl Request for PingRequest {
    type Reply = ();
    const ABANDONED_WITH_CALLER: bool = true;

    fn run(&self, session: &mut Session) -> Result<(), Failure> {
        session.conn.prepare_cached("SELECT seq FROM record LIMIT 1")?.query_row([], |_| Ok(())).optional()?;
        session.try_to_write()
    }
}

impl Session {
    /// The result of a claim that may not or need not insert: nothing, itself, or the current record.
    fn answer_from_record(&self, id: RecordId, fresh: &NewRecord, now: Timestamp) -> Result<Option<Claim>, Failure> {
        Ok(self.record(id)?.map(|record| {
            if record.state == State::InFlight && record.attempt == fresh.attempt {
                Claim::Inserted(record.claimed_at)
            } else {
                Claim::Exists { record, now }
            }
        }))
    }

    pub(super) fn record(&self, id: RecordId) -> Result<Option<Record>, Failure> {
        let mut get = self.conn.prepare_cached(sql::RECORD)?;
        Ok(get.query_row([id.0], |found| pieces::record(&self.conn, found, 0)).optional()?)
    }

    /// The view of the current record, which is not about to change.
    pub(super) fn view(&self, id: RecordId) -> Result<Option<CurrentRecord>, Failure> {
        let found = self.remembered(&id).map_or_else(|| self.current(id), |found| Ok(Some(found)))?;
        Ok(found.map(|(_, current)| current))
    }

    /// The row id and the view of the current record, without its bytes.
    fn current(&self, id: RecordId) -> Result<Option<(i64, CurrentRecord)>, Failure> {
        let mut get = self.conn.prepare_cached(sql::CURRENT)?;
        let found = get.query_row([id.0], |found| {
            let current = CurrentRecord {
                attempt: row::read_attempt(found, 1)?,
                state: row::read_state(found, 2)?,
                claimed_at: row::read_time(found, 3)?,
                until: row::read_time(found, 4)?,
                unknown_ttl: row::read_span(found, 5)?,
            };
            Ok((found.get(0)?, current))
        });
        Ok(found.optional()?)
    }
}
