//! Lists and scans records, on the reader thread.

use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};

use super::error::Failure;
use super::reader::{CHUNK, ListRequest, Reader, ScanRequest};
use super::row;
use crate::idempotency::record::{RecordId, State, Timestamp};
use crate::store::listing::Newest;
use crate::store::resealing::{BEGINNING, Beginning, Beginnings, Values};
use crate::store::{Chunk, Cursor, Error, ErrorKind, Filter, Page, RecordEntry, Since};

/// The statements, for a test that asks the planner.
pub(super) mod sql {
    use crate::store::resealing::BEGINNING;

    /// Whether a record passes, but for its id. What is cheap to see comes first. The origins are found once.
    const PASSES: &str = "(?4 IS NULL OR state = ?4)
        AND (?7 IS NULL OR claimed_at <= ?7) AND (?8 IS NULL OR claimed_at >= ?8)
        AND (?5 IS NULL AND ?6 IS NULL OR record.origin IN (
            SELECT o.id FROM origin o WHERE (?5 IS NULL OR o.service = ?5) AND (?6 IS NULL OR o.route = ?6)
        ))";

    /// Which index a scan walks.
    #[derive(Clone, Copy)]
    pub(in crate::store::sqlite) enum Scan {
        All,
        Unknown,
        InFlight,
    }

    impl Scan {
        fn source(self) -> &'static str {
            match self {
                Self::All => "record INDEXED BY record_id",
                Self::Unknown => "record INDEXED BY record_unknown",
                Self::InFlight => "record INDEXED BY record_lease",
            }
        }

        fn condition(self) -> &'static str {
            match self {
                Self::All => "TRUE",
                Self::Unknown => "state = 2",
                Self::InFlight => "state = 0",
            }
        }

        /// The last id of the chunk from `?1` to `?2`, `?3` records long; `None` if fewer are left.
        pub(in crate::store::sqlite) fn end_of_chunk(self) -> String {
            let (source, condition) = (self.source(), self.condition());
            format!(
                "SELECT id FROM {source} WHERE {condition} AND id >= ?1 AND id <= ?2 ORDER BY id LIMIT 1 OFFSET ?3 - 1"
            )
        }

        /// The first `?3` records from `?1` to `?2` that pass.
        pub(in crate::store::sqlite) fn chunk(self) -> String {
            let (source, condition) = (self.source(), self.condition());
            format!(
                "SELECT seq, record.id, attempt, state, claimed_at, until, head, service, namespace, route
                 FROM {source} LEFT JOIN origin ON origin.id = record.origin
                 WHERE {condition} AND record.id >= ?1 AND record.id <= ?2 AND {PASSES}
                 ORDER BY record.id LIMIT ?3"
            )
        }
    }

    /// Three columns that say how an answer begins, up to so many bytes: for one that may not stand in the page of its row, the table and
    /// the row where it begins; for another one, its beginning.
    pub(in crate::store::sqlite) fn beginning(length: usize) -> String {
        format!(
            "CASE WHEN typeof(answer) = 'integer' THEN 'piece' WHEN length(answer) > 2048 THEN 'record' END,
             CASE WHEN typeof(answer) = 'integer'
                 THEN (SELECT p.seq FROM piece p WHERE p.attempt = record.attempt AND p.place = 0) ELSE record.seq END,
             CASE WHEN typeof(answer) <> 'integer' AND length(answer) <= 2048
                 THEN coalesce(substr(answer, 1, {length}), x'') END"
        )
    }

    /// How the values of the first `?2` records from `?1` begin.
    pub(in crate::store::sqlite) fn beginnings() -> String {
        format!(
            "SELECT id, state, substr(head, 1, {BEGINNING}), {}
             FROM record INDEXED BY record_id WHERE id >= ?1 ORDER BY id LIMIT ?2",
            beginning(BEGINNING)
        )
    }

    /// The last row up to `?1`, and when it was claimed.
    pub(in crate::store::sqlite) const LAST_ROW: &str =
        "SELECT seq, claimed_at FROM record WHERE seq <= ?1 ORDER BY seq DESC LIMIT 1";

    /// The last `?3` records from row `?1` to row `?2` that pass, the last one first.
    pub(in crate::store::sqlite) fn last_rows() -> String {
        format!(
            "SELECT seq, record.id, attempt, state, claimed_at, until, head, service, namespace, route
             FROM record LEFT JOIN origin ON origin.id = record.origin
             WHERE seq >= ?1 AND seq <= ?2 AND {PASSES}
             ORDER BY seq DESC LIMIT ?3"
        )
    }
}

impl Reader {
    /// The newest records.
    ///
    /// Rows are in the order of their claims, so that they are walked from the last one back. The few that have an index of
    /// their own or are named by their ids are all looked at.
    pub(super) fn list(&mut self, search: &ListRequest, is_called_off: &dyn Fn() -> bool) -> Result<Page, Failure> {
        let is_small = matches!(search.filter.state, Some(State::Unknown | State::InFlight));
        if !is_small && search.filter.prefix.is_none() {
            return self.list_backwards(search, is_called_off);
        }
        let mut newest = Newest::new(search.after, search.limit);
        let mut after = None;
        loop {
            let scan = ScanRequest { filter: search.filter.clone(), after, limit: CHUNK as usize - 1 };
            let chunk = self.scan(&scan, is_called_off)?;
            for listed in chunk.records {
                if newest.wants(listed.record.claimed_at, listed.id) {
                    newest.keep(listed.record.claimed_at, 0, listed);
                }
            }
            after = chunk.next;
            if after.is_none() {
                return Ok(newest.into_page());
            }
        }
    }

    /// The newest records by the order of rows. One whose row stands too far back, since an older version wrote it there
    /// when it was claimed anew, has the place of its neighbours, so that pages give each record once.
    fn list_backwards(&mut self, search: &ListRequest, is_called_off: &dyn Fn() -> bool) -> Result<Page, Failure> {
        let started = Instant::now();
        let mut newest = Newest::new(search.after, search.limit);
        // The place of the last row that passed, and the first row of those that were claimed at its time. A cursor of a list
        // with another filter has no row.
        let row_of = search.after.filter(|after| after.position > 0);
        let mut reached = row_of.map_or(LAST_TIME, |after| after.claimed_at);
        let mut position = row_of.map_or(i64::MAX, |after| after.position);
        let mut upto = position;
        while let Some((last, claimed_at)) = self.last_row(upto)? {
            self.go_on(is_called_off)?;
            // All that was claimed at the time that was reached is there: another page can start at this row.
            if claimed_at < reached && started.elapsed() >= self.patience && last < position {
                let (_, id) = newest.last().unwrap_or((reached, LAST_ID));
                let mut page = newest.into_page();
                page.next = Some(page.next.unwrap_or(Cursor { claimed_at: reached, id, position: last }));
                return Ok(page);
            }
            let from = last.saturating_sub(CHUNK - 1);
            let is_complete = self.each(&sql::last_rows(), &from, &last, CHUNK, &search.filter, |seq, listed| {
                if listed.record.claimed_at < reached {
                    (reached, position) = (listed.record.claimed_at, seq);
                }
                if newest.is_complete_at(reached) {
                    return false;
                }
                if newest.wants(reached, listed.id) {
                    newest.keep(reached, position, listed);
                }
                true
            })?;
            if is_complete {
                break;
            }
            upto = from - 1;
        }
        Ok(newest.into_page())
    }

    /// Records in the order of their ids.
    pub(super) fn scan(&mut self, search: &ScanRequest, is_called_off: &dyn Fn() -> bool) -> Result<Chunk, Failure> {
        let scan = match search.filter.state {
            Some(State::Unknown) => sql::Scan::Unknown,
            Some(State::InFlight) => sql::Scan::InFlight,
            Some(State::Completed) | None => sql::Scan::All,
        };
        let started = Instant::now();
        let (first, last) = search.filter.ids().into_inner();
        let mut from = search.after.map_or_else(|| first.0.to_vec(), |after| behind(after).max(first.0.to_vec()));
        // One extra record shows whether there are more.
        let wanted = search.limit.saturating_add(1);
        let mut found = Vec::new();
        loop {
            self.go_on(is_called_off)?;
            // In-flight records are few, and not in the order of ids: all are read at once.
            let end = match scan {
                sql::Scan::InFlight => None,
                sql::Scan::All | sql::Scan::Unknown => {
                    let mut find = self.conn.prepare_cached(&scan.end_of_chunk())?;
                    find.query_row(params![from, last.0, CHUNK], |row| row.get(0).map(RecordId)).optional()?
                }
            };
            let upto = end.unwrap_or(last);
            let missing = row::count(wanted - found.len());
            self.each(&scan.chunk(), &from, &upto.0, missing, &search.filter, |_, listed| {
                found.push(listed);
                true
            })?;
            match end {
                Some(end) if found.len() < wanted && started.elapsed() < self.patience => from = behind(end),
                Some(end) if found.len() < wanted => return Ok(Chunk { records: found, next: Some(end) }),
                _ => return Ok(Chunk::of(found, search.limit)),
            }
        }
    }

    /// How the values of records begin. Of a long answer, no more than its beginning is read.
    pub(super) fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Failure> {
        let mut find = self.conn.prepare_cached(&sql::beginnings())?;
        let from = after.map_or_else(Vec::new, behind);
        let mut rows = find.query(params![from, row::count(limit)])?;
        let mut records = Vec::new();
        while let Some(found) = rows.next()? {
            let bytes = |column| found.get::<_, Option<Vec<u8>>>(column).map(|value| value.map(Bytes::from));
            let answer = beginning_of_answer(&self.conn, found, 3)?;
            let values = Values { head: bytes(2)?.unwrap_or_default(), answer };
            records.push(Beginning { id: RecordId(found.get(0)?), state: row::read_state(found, 1)?, values });
        }
        Ok(Beginnings::of(records, limit))
    }

    /// Lets short reads through, unless this one was called off.
    fn go_on(&mut self, is_called_off: &dyn Fn() -> bool) -> Result<(), Failure> {
        if is_called_off() || self.is_closing.load(Ordering::Relaxed) {
            return Err(called_off());
        }
        self.let_through();
        Ok(())
    }

    fn last_row(&self, upto: i64) -> Result<Option<(i64, Timestamp)>, Failure> {
        let mut find = self.conn.prepare_cached(sql::LAST_ROW)?;
        Ok(find.query_row([upto], |found| Ok((found.get(0)?, row::read_time(found, 1)?))).optional()?)
    }

    /// Looks at the rows of a statement until `look` returns false. Returns whether it did.
    fn each(
        &self,
        sql: &str,
        from: &dyn ToSql,
        upto: &dyn ToSql,
        limit: i64,
        filter: &Filter,
        mut look: impl FnMut(i64, RecordEntry) -> bool,
    ) -> Result<bool, Failure> {
        let now = self.now();
        let claimed_before = filter.older_than.map(|age| row::time(now).saturating_sub(row::span(age)));
        let claimed_since = filter.since.map(|since| match since {
            Since::Ago(age) => row::time(now).saturating_sub(row::span(age)),
            Since::At(time) => row::time(time),
        });
        let mut find = self.conn.prepare_cached(sql)?;
        let mut rows = find.query(params![
            from,
            upto,
            limit,
            filter.state.map(row::state),
            filter.service.as_deref(),
            filter.route,
            claimed_before,
            claimed_since,
        ])?;
        while let Some(found) = rows.next()? {
            if !look(found.get(0)?, self.row(found)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn row(&self, found: &Row<'_>) -> rusqlite::Result<RecordEntry> {
        self.listed(RecordId(found.get(1)?), row::record(found, 2)?, found, 7)
    }
}

/// After every record.
const LAST_TIME: Timestamp = Timestamp(i64::MAX as u64);
const LAST_ID: RecordId = RecordId([0xff; 32]);

/// The first string of bytes after an id: longer than every id, it is before the next one.
fn behind(id: RecordId) -> Vec<u8> {
    [&id.0[..], &[0]].concat()
}

fn called_off() -> Failure {
    Failure::Request(Error::determinate(ErrorKind::Unavailable, "the listing was cancelled"))
}

/// How an answer begins, by the columns of [`sql::beginning`]. Of a long one, no more is read.
pub(super) fn beginning_of_answer(
    conn: &Connection,
    found: &Row<'_>,
    column: usize,
) -> rusqlite::Result<Option<Bytes>> {
    let Some(table) = found.get::<_, Option<String>>(column)? else {
        return Ok(found.get::<_, Option<Vec<u8>>>(column + 2)?.map(Bytes::from));
    };
    let answer = conn.blob_open("main", table.as_str(), "answer", found.get(column + 1)?, true)?;
    let mut beginning = [0; BEGINNING];
    answer.read_at_exact(&mut beginning, 0)?;
    Ok(Some(Bytes::copy_from_slice(&beginning)))
}
