//! The reader thread: long reads on a connection of their own, so that they delay no write.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension};
use tokio::sync::{mpsc, oneshot};

use super::audit::EntriesRequest;
use super::error::Failure;
use super::writer::PanicAlarm;
use super::{Lock, adopt, error, pieces, row};
use crate::idempotency::record::{Record, RecordId, Timestamp};
use crate::store::audit::EntryPage;
use crate::store::clock::Clock;
use crate::store::resealing::Beginnings;
use crate::store::{Chunk, Cursor, Error, ErrorKind, Filter, NamespaceRules, Page, RecordEntry};

/// How many records a listing or a scan reads in one transaction. The log cannot start over while one is open.
pub(super) const CHUNK: i64 = 4096;

/// How long a listing or a scan runs before it returns a part.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many listings and scans may be queued while another one runs. More are refused.
pub(super) const MAX_QUEUED: usize = 8;

pub(super) enum ReadRequest {
    Get {
        id: RecordId,
        reply: oneshot::Sender<Result<Option<RecordEntry>, Error>>,
    },
    List {
        search: ListRequest,
        reply: ListReply,
    },
    Scan {
        search: ScanRequest,
        reply: ScanReply,
    },
    Beginnings {
        after: Option<RecordId>,
        limit: usize,
        reply: oneshot::Sender<Result<Beginnings, Error>>,
    },
    Identities {
        reply: oneshot::Sender<Result<Vec<NamespaceRules>, Error>>,
    },
    Entries {
        search: EntriesRequest,
        reply: oneshot::Sender<Result<EntryPage, Error>>,
    },
    /// A short read of another kind.
    Look(Look),
    Close,
    #[cfg(test)]
    Panic,
}

/// A short read, which answers its caller itself.
pub(super) type Look = Box<dyn FnOnce(&Reader) + Send>;

impl ReadRequest {
    /// A short read.
    pub(super) fn of<T: Send + 'static>(
        look: impl FnOnce(&Reader) -> Result<T, Failure> + Send + 'static,
        reply: oneshot::Sender<Result<T, Error>>,
    ) -> Self {
        Self::Look(Box::new(move |reader| drop(reply.send(look(reader).map_err(determinate)))))
    }
}

pub(super) type ListReply = oneshot::Sender<Result<Page, Error>>;

pub(super) struct ListRequest {
    pub(super) filter: Filter,
    pub(super) after: Option<Cursor>,
    pub(super) limit: usize,
}

pub(super) type ScanReply = oneshot::Sender<Result<Chunk, Error>>;

pub(super) struct ScanRequest {
    pub(super) filter: Filter,
    pub(super) after: Option<RecordId>,
    pub(super) limit: usize,
}

/// The thread's end of the queue.
pub(super) struct Reader {
    pub(super) conn: Connection,
    clock: Clock,
    queue: mpsc::Receiver<ReadRequest>,
    /// Taken from the queue during a listing, to be done after it.
    backlog: VecDeque<ReadRequest>,
    pub(super) is_closing: Arc<AtomicBool>,
    lock: Arc<Lock>,
    pub(super) patience: Duration,
}

pub(super) const GET: &str = "SELECT attempt, state, claimed_at, until, head, answer, service, namespace, route
     FROM record LEFT JOIN origin ON origin.id = record.origin WHERE record.id = ?1";

impl Reader {
    pub(super) fn new(
        conn: Connection,
        clock: Clock,
        queue: mpsc::Receiver<ReadRequest>,
        is_closing: Arc<AtomicBool>,
        lock: Arc<Lock>,
    ) -> Self {
        Self { conn, clock, queue, backlog: VecDeque::new(), is_closing, lock, patience: PATIENCE }
    }

    /// Runs until it receives `Close`, or all senders are gone.
    pub(super) fn run(mut self) {
        let _alarm = PanicAlarm { thread: "reader", fatal: self.lock.settings.fatal.clone() };
        while let Some(read) = self.backlog.pop_front().or_else(|| self.queue.blocking_recv()) {
            match read {
                ReadRequest::Get { id, reply } => drop(reply.send(self.get(id).map_err(determinate))),
                ReadRequest::List { reply, .. } if reply.is_closed() => {}
                ReadRequest::List { search, reply } => {
                    let page = self.list(&search, &|| reply.is_closed()).map_err(determinate);
                    drop(reply.send(page));
                }
                ReadRequest::Scan { reply, .. } if reply.is_closed() => {}
                ReadRequest::Scan { search, reply } => {
                    let chunk = self.scan(&search, &|| reply.is_closed()).map_err(determinate);
                    drop(reply.send(chunk));
                }
                ReadRequest::Beginnings { after, limit, reply } => {
                    drop(reply.send(self.beginnings(after, limit).map_err(determinate)));
                }
                ReadRequest::Identities { reply } => {
                    let found = adopt::on_file(&self.conn).map_err(Failure::from);
                    drop(reply.send(found.map_err(determinate)));
                }
                ReadRequest::Entries { search, reply } => {
                    drop(reply.send(self.entries(&search).map_err(determinate)));
                }
                ReadRequest::Look(look) => look(&self),
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
                ReadRequest::Look(look) => look(self),
                read @ (ReadRequest::List { .. } | ReadRequest::Scan { .. }) => self.put_off(read),
                other => self.backlog.push_back(other),
            }
        }
    }

    /// Keeps a listing or a scan for later, unless too many wait. Those whose callers have gone do not wait any more.
    fn put_off(&mut self, read: ReadRequest) {
        self.backlog.retain(|read| match read {
            ReadRequest::List { reply, .. } => !reply.is_closed(),
            ReadRequest::Scan { reply, .. } => !reply.is_closed(),
            _ => true,
        });
        if self.backlog.len() < MAX_QUEUED {
            self.backlog.push_back(read);
            return;
        }
        let refused = Error::determinate(ErrorKind::Unavailable, "too many listings are queued");
        match read {
            ReadRequest::List { reply, .. } => drop(reply.send(Err(refused))),
            ReadRequest::Scan { reply, .. } => drop(reply.send(Err(refused))),
            _ => {}
        }
    }

    fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Failure> {
        let mut get = self.conn.prepare_cached(GET)?;
        let found = get.query_row([id.0], |found| self.listed(id, pieces::record(&self.conn, found, 0)?, found, 6));
        Ok(found.optional()?)
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    pub(super) fn listed(
        &self,
        id: RecordId,
        record: Record,
        row: &rusqlite::Row<'_>,
        origin: usize,
    ) -> rusqlite::Result<RecordEntry> {
        let now = self.now();
        Ok(RecordEntry { id, origin: row::origin(row, origin)?, record, now })
    }
}

/// A read that failed did nothing.
fn determinate(failure: Failure) -> Error {
    match failure {
        Failure::Request(error) => error,
        Failure::Sqlite(error) => Error::determinate(error::kind(&error), error),
    }
}
