//! The reader thread: long reads on a connection of their own, so that they delay no write.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::{mpsc, oneshot};

use super::error::Failure;
use super::writer::PanicAlarm;
use super::{Lock, adopt, error, row};
use crate::idempotency::record::{Record, RecordId, Timestamp};
use crate::store::clock::Clock;
use crate::store::{Error, ErrorKind, Filter, Listed, NamespaceRules, Page};

/// How many records a listing reads in one transaction. The log cannot start over while one is open.
const CHUNK: i64 = 4096;

/// How long a listing runs before it returns a partial page.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// How many listings may be queued while another one runs. More are refused.
pub(super) const MAX_QUEUED: usize = 8;

pub(super) enum ReadRequest {
    Get {
        id: RecordId,
        reply: oneshot::Sender<Result<Option<Listed>, Error>>,
    },
    List {
        search: ListRequest,
        reply: ListReply,
    },
    Identities {
        reply: oneshot::Sender<Result<Vec<NamespaceRules>, Error>>,
    },
    Close,
    #[cfg(test)]
    Panic,
}

pub(super) type ListReply = oneshot::Sender<Result<Page, Error>>;

pub(super) struct ListRequest {
    pub(super) filter: Filter,
    pub(super) after: Option<RecordId>,
    pub(super) limit: usize,
}

/// The thread's end of the queue.
pub(super) struct Reader {
    conn: Connection,
    clock: Clock,
    queue: mpsc::Receiver<ReadRequest>,
    /// Taken from the queue during a listing, to be done after it.
    backlog: VecDeque<ReadRequest>,
    is_closing: Arc<AtomicBool>,
    lock: Arc<Lock>,
    pub(super) patience: Duration,
}

/// The statements, for a test that asks the planner.
pub(super) mod sql {
    pub(in crate::store::sqlite) const GET: &str =
        "SELECT attempt, state, claimed_at, until, head, answer, service, namespace, route
         FROM record LEFT JOIN origin ON origin.id = record.origin WHERE record.id = ?1";

    /// Which index a listing walks.
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

        /// The last id of the chunk after `?1` and before `?2`, `?3` records long; `None` if fewer are left.
        pub(in crate::store::sqlite) fn end_of_chunk(self) -> String {
            let (source, condition) = (self.source(), self.condition());
            format!(
                "SELECT id FROM {source} WHERE {condition} AND id > ?1 AND id < ?2 ORDER BY id LIMIT 1 OFFSET ?3 - 1"
            )
        }

        /// The records after `?1` and up to `?2` that pass.
        pub(in crate::store::sqlite) fn page(self) -> String {
            let (source, condition) = (self.source(), self.condition());
            format!(
                "SELECT record.id, attempt, state, claimed_at, until, head, NULL, service, namespace, route
                 FROM {source} LEFT JOIN origin ON origin.id = record.origin
                 WHERE {condition} AND record.id > ?1 AND record.id <= ?2
                    AND (?3 IS NULL OR state = ?3) AND (?4 IS NULL OR service = ?4) AND (?5 IS NULL OR route = ?5)
                    AND (?6 IS NULL OR claimed_at <= ?6)
                 ORDER BY record.id LIMIT ?7"
            )
        }
    }
}

impl Reader {
    pub(super) fn new(
        conn: Connection,
        clock: Clock,
        queue: mpsc::Receiver<ReadRequest>,
        is_closing: Arc<AtomicBool>,
        lock: Arc<Lock>,
    ) -> Self {
        Self { conn, clock, queue, backlog: VecDeque::new(), is_closing, lock, patience: LIST_TIMEOUT }
    }

    /// Runs until it receives `Close`, or all senders are gone.
    pub(super) fn run(mut self) {
        let _alarm = PanicAlarm { thread: "reader", fatal: self.lock.settings.fatal.clone() };
        while let Some(read) = self.backlog.pop_front().or_else(|| self.queue.blocking_recv()) {
            match read {
                ReadRequest::Get { id, reply } => drop(reply.send(self.get(id).map_err(determinate))),
                ReadRequest::List { reply, .. } if reply.is_closed() => {}
                ReadRequest::List { search, reply } => {
                    let page = self.list(&search, &reply).map_err(determinate);
                    drop(reply.send(page));
                }
                ReadRequest::Identities { reply } => {
                    let found = adopt::on_file(&self.conn).map_err(Failure::from);
                    drop(reply.send(found.map_err(determinate)));
                }
                ReadRequest::Close => return,
                #[cfg(test)]
                ReadRequest::Panic => panic!("injected panic"),
            }
        }
    }

    /// Answers short reads that arrived during a listing.
    pub(super) fn let_through(&mut self) {
        while let Ok(read) = self.queue.try_recv() {
            match read {
                ReadRequest::Get { id, reply } => drop(reply.send(self.get(id).map_err(determinate))),
                ReadRequest::List { search, reply } => self.put_off(search, reply),
                other => self.backlog.push_back(other),
            }
        }
    }

    /// Keeps a listing for later, unless too many wait. Those whose callers have gone do not wait any more.
    fn put_off(&mut self, search: ListRequest, reply: ListReply) {
        self.backlog.retain(|read| !matches!(read, ReadRequest::List { reply, .. } if reply.is_closed()));
        if self.backlog.len() < MAX_QUEUED {
            self.backlog.push_back(ReadRequest::List { search, reply });
        } else {
            drop(reply.send(Err(Error::determinate(ErrorKind::Unavailable, "too many listings are queued"))));
        }
    }

    fn get(&self, id: RecordId) -> Result<Option<Listed>, Failure> {
        let mut get = self.conn.prepare_cached(sql::GET)?;
        let found = get.query_row([id.0], |found| self.listed(id, row::record(found, 0)?, found, 6));
        Ok(found.optional()?)
    }

    pub(super) fn list(&mut self, search: &ListRequest, caller: &ListReply) -> Result<Page, Failure> {
        use crate::idempotency::record::State;
        let walk = match search.filter.state {
            Some(State::Unknown) => sql::Scan::Unknown,
            Some(State::InFlight) => sql::Scan::InFlight,
            Some(State::Completed) | None => sql::Scan::All,
        };
        let started = Instant::now();
        let (mut after, before) = bounds(search);
        // One extra record shows whether there are more.
        let wanted = search.limit.saturating_add(1);
        let mut found = Vec::new();
        loop {
            if caller.is_closed() || self.is_closing.load(Ordering::Relaxed) {
                return Err(called_off());
            }
            // In-flight records are few, and not in the order of ids: all are read at once.
            let end = match walk {
                sql::Scan::InFlight => None,
                sql::Scan::All | sql::Scan::Unknown => self.end_of_chunk(walk, &after, &before)?,
            };
            let upto = end.as_ref().map_or(&before[..], |end| &end.0[..]);
            found.extend(self.list_between(walk, &search.filter, &after, upto, wanted - found.len())?);
            self.let_through();
            match end {
                Some(end) if found.len() < wanted && started.elapsed() < self.patience => after = end.0.to_vec(),
                Some(end) if found.len() < wanted => return Ok(Page { records: found, next: Some(end) }),
                _ => return Ok(Page::of(found, search.limit)),
            }
        }
    }

    fn end_of_chunk(&self, walk: sql::Scan, after: &[u8], before: &[u8]) -> Result<Option<RecordId>, Failure> {
        let mut find = self.conn.prepare_cached(&walk.end_of_chunk())?;
        Ok(find.query_row(params![after, before, CHUNK], |row| row.get(0).map(RecordId)).optional()?)
    }

    fn list_between(
        &self,
        walk: sql::Scan,
        filter: &Filter,
        after: &[u8],
        end: &[u8],
        missing: usize,
    ) -> Result<Vec<Listed>, Failure> {
        let claimed_before = filter.older_than.map(|age| row::time((self.clock)()).saturating_sub(row::span(age)));
        let missing = i64::try_from(missing).unwrap_or(i64::MAX);
        let mut find = self.conn.prepare_cached(&walk.page())?;
        let mut rows = find.query(params![
            after,
            end,
            filter.state.map(row::state),
            filter.service.as_deref(),
            filter.route,
            claimed_before,
            missing,
        ])?;
        let mut listed = Vec::new();
        while let Some(found) = rows.next()? {
            listed.push(self.listed(RecordId(found.get(0)?), row::record(found, 1)?, found, 7)?);
        }
        Ok(listed)
    }

    fn listed(&self, id: RecordId, record: Record, row: &rusqlite::Row<'_>, origin: usize) -> rusqlite::Result<Listed> {
        let now: Timestamp = (self.clock)();
        Ok(Listed { id, origin: row::origin(row, origin)?, record, now })
    }
}

/// The ids between which a page lies, both excluded. Shorter and longer strings of bytes than an id sort before and
/// after the ids that they start.
fn bounds(search: &ListRequest) -> (Vec<u8>, Vec<u8>) {
    let prefix = search.filter.prefix.map(Vec::from).unwrap_or_default();
    let mut before = prefix.clone();
    before.resize(33, 0xff);
    let after = search.after.map(|id| id.0.to_vec()).unwrap_or_default();
    (after.max(prefix), before)
}

fn called_off() -> Failure {
    Failure::Request(Error::determinate(ErrorKind::Unavailable, "the listing was cancelled"))
}

/// A read that failed did nothing.
fn determinate(failure: Failure) -> Error {
    match failure {
        Failure::Request(error) => error,
        Failure::Sqlite(error) => Error::determinate(error::kind(&error), error),
    }
}
