//! Entries of the audit log.

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::{Row, params};

use super::error::Failure;
use super::reader::{ReadRequest, Reader};
use super::session::Session;
use super::writer::Request;
use super::{Sqlite, row};
use crate::idempotency::record::RecordId;
use crate::store::audit::{AuditLog, Entry, EntryFilter, EntryPage, NewEntry, Position};
use crate::store::{Error, Since};

pub(super) struct AppendRequest(NewEntry);

pub(super) struct AmendRequest {
    position: Position,
    detail: Bytes,
}

pub(super) struct SweepEntriesRequest {
    limit: usize,
}

pub(super) struct EntriesRequest {
    filter: EntryFilter,
    before: Option<Position>,
    limit: usize,
}

#[async_trait]
impl AuditLog for Sqlite {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        self.ask(AppendRequest(entry)).await
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        self.ask(AmendRequest { position, detail }).await
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        self.read(|reply| ReadRequest::Entries { search: EntriesRequest { filter, before, limit }, reply }).await
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        self.ask(SweepEntriesRequest { limit }).await
    }
}

impl Request for AppendRequest {
    type Reply = Position;
    const ABANDONED_WITH_CALLER: bool = true;

    fn size(&self) -> usize {
        self.0.detail.len()
    }

    fn run(&self, session: &mut Session) -> Result<Position, Failure> {
        let now = session.now();
        let NewEntry { ttl, service, action, by, record, detail, reason } = &self.0;
        let mut append = session.conn.prepare_cached(
            "INSERT INTO audit (at, until, service, action, by, record, detail, reason)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        let place = append.insert(params![
            row::time(now),
            row::time(now.plus(*ttl)),
            &**service,
            &**action,
            &**by,
            record.map(|record| record.0),
            &detail[..],
            reason.as_deref(),
        ])?;
        Ok(Position(place.unsigned_abs()))
    }
}

impl Request for AmendRequest {
    type Reply = bool;

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let mut amend = session.conn.prepare_cached("UPDATE audit SET detail = ?2 WHERE position = ?1")?;
        Ok(amend.execute(params![place(self.position), &self.detail[..]])? == 1)
    }
}

impl Request for SweepEntriesRequest {
    type Reply = usize;

    fn run(&self, session: &mut Session) -> Result<usize, Failure> {
        let mut sweep = session.conn.prepare_cached(
            "DELETE FROM audit WHERE position IN (SELECT position FROM audit WHERE until <= ?1 ORDER BY until LIMIT ?2)",
        )?;
        Ok(sweep.execute(params![row::time(session.now()), row::count(self.limit)])?)
    }
}

impl Reader {
    /// The newest entries that pass.
    pub(super) fn entries(&self, search: &EntriesRequest) -> Result<EntryPage, Failure> {
        let EntriesRequest { filter: EntryFilter { service, action, by, record, since }, before, limit } = search;
        let earliest = since.map(|since| match since {
            Since::Ago(age) => row::time(self.now()).saturating_sub(row::span(age)),
            Since::At(time) => row::time(time),
        });
        let mut newest = self.conn.prepare_cached(
            "SELECT position, at, until, service, action, by, record, detail, reason FROM audit
             WHERE (?1 IS NULL OR position < ?1) AND (?2 IS NULL OR service = ?2) AND (?3 IS NULL OR action = ?3)
                AND (?4 IS NULL OR by = ?4) AND (?5 IS NULL OR record = ?5) AND (?6 IS NULL OR at >= ?6)
             ORDER BY position DESC LIMIT ?7",
        )?;
        // One extra entry shows whether there are more.
        let wanted = row::count(limit.saturating_add(1));
        let values = params![
            before.map(place),
            service.as_deref(),
            action.as_deref(),
            by.as_deref(),
            record.map(|record| record.0),
            earliest,
            wanted,
        ];
        let found = newest.query_map(values, entry)?.collect::<rusqlite::Result<_>>()?;
        Ok(EntryPage::of(found, *limit))
    }
}

fn place(position: Position) -> i64 {
    i64::try_from(position.0).unwrap_or(i64::MAX)
}

fn entry(found: &Row<'_>) -> rusqlite::Result<Entry> {
    let text = |column| found.get::<_, String>(column).map(Into::into);
    Ok(Entry {
        position: Position(row::read_time(found, 0)?.0),
        at: row::read_time(found, 1)?,
        until: row::read_time(found, 2)?,
        service: text(3)?,
        action: text(4)?,
        by: text(5)?,
        record: found.get::<_, Option<[u8; 32]>>(6)?.map(RecordId),
        detail: row::read_bytes(found, 7)?.unwrap_or_default(),
        reason: row::read_bytes(found, 8)?,
    })
}
