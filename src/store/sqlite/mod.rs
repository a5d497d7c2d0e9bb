//! Records in one SQLite file beside one process.
//!
//! A writer thread executes all queued operations in one transaction, large ones after the others and large answers in pieces
//! (`pieces.rs`), and answers them when that has reached the disk, so a lone operation is not delayed and many share one sync. A reader thread executes long reads on its own
//! connection.
//!
//! - An acknowledged write is in the write-ahead log and synced. The log is copied into the database by the writer
//!   whenever it has grown to 2 to 16 MiB, so it stays about that size.
//! - A full disk refuses claims and loses nothing. A little room is held beside the database, in `<path>.reserve`, for
//!   the attempts that run at that moment; claims are taken again when it can be held again.
//! - A sync that fails ends the process, see [`Settings::fatal`]: the kernel may have dropped what was written, and
//!   only data that is read back from the disk after a restart can be trusted.
//! - Before and after each commit the writer checks that the files are still those that SQLite has open and that they hold
//!   what it wrote (`guard.rs`). If not, the process ends without acknowledging the commit; a log that was removed is
//!   copied into the database first.
//! - The writer notes in the lock file how much of the log it has acknowledged (`mark.rs`). A start that finds less of the
//!   log, or no database, refuses.
//! - Freed pages are used again; the file does not shrink by itself.

mod adopt;
mod audit;
mod damage;
mod deliveries;
mod delivery_reads;
mod error;
#[cfg(test)]
mod failpoint;
mod guard;
mod health;
mod listing;
mod lock;
mod mark;
mod pieces;
mod preview;
mod reader;
mod requests;
mod reserve;
mod row;
mod schema;
mod session;
#[cfg(test)]
mod tests;
mod wal;
mod writer;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};

pub use self::error::OpenError;
pub use self::lock::{Lock, files, filesystem_warning, is_same_file};
pub use self::preview::{Preview, preview};
use self::reader::{ListRequest, ReadRequest, Reader, ScanRequest};
use self::reserve::Reserve;
use self::session::Session;
use self::writer::{Message, Request, Writer};
use super::clock::Clock;
use super::deliveries::Delivery;
use super::resealing::{Beginnings, DeliveryValues, Values};
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Resealing, Settled, Settlement, Store,
};
use crate::idempotency::record::{AttemptToken, RecordId, Version};

/// Called with the reason when the disk can no longer be trusted.
pub type Fatal = Arc<dyn Fn(&str) + Send + Sync>;

/// The settings of a SQLite store.
#[derive(Clone)]
pub struct Settings {
    /// The file. It is created where it is missing; its directory is not.
    pub path: PathBuf,
    /// How many operations may be queued. More are refused at once.
    pub queue: usize,
    /// Called after a failed sync. By default it logs the reason and ends the process with status 1. Where it returns,
    /// the store is closed.
    pub fatal: Fatal,
    /// The time, for tests; by default the wall clock as of the start, but never behind what the file has seen, and
    /// from then on the monotonic clock.
    pub clock: Option<Clock>,
    /// How many pages of 4 KiB the database may have, for tests of a full disk.
    pub max_pages: Option<u32>,
}

/// A store in a SQLite file.
pub struct Sqlite {
    writer: mpsc::Sender<Message>,
    reader: mpsc::Sender<ReadRequest>,
    counts: session::Counts,
    is_closing: Arc<AtomicBool>,
    finished: watch::Receiver<bool>,
    turned_unknown: Vec<RecordId>,
    path: PathBuf,
}

impl Settings {
    /// The defaults for a file.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), queue: 8192, fatal: Arc::new(end_process), clock: None, max_pages: None }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("path", &self.path).finish_non_exhaustive()
    }
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").finish_non_exhaustive()
    }
}

impl Sqlite {
    /// Opens the file that `lock` holds, brings its schema up to date, and turns the in-flight records of a dead
    /// process unknown. Blocks on the disk.
    ///
    /// The lock is held until the store is closed, or dropped and done with what it had accepted.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(lock: Lock) -> Result<Self, OpenError> {
        let lock = Arc::new(lock);
        let (mut opened, reserve) = open_with_reserve(&lock)?;
        let clock = opened.clock.clone();
        let turned_unknown = std::mem::take(&mut opened.turned_unknown);
        let counts = Arc::new(Mutex::new(opened.counts));
        let path = lock.path().to_owned();
        let failed = |source| OpenError::Io { path: path.clone(), source };
        let session =
            Session::new(opened, reserve, counts.clone()).map_err(|error| OpenError::from_sql(path.clone(), error))?;
        let reading = schema::open_reader(&lock)?;

        let (writer, writes) = mpsc::channel(lock.settings.queue);
        let (reader, reads) = mpsc::channel(lock.settings.queue);
        let (finished, watching) = watch::channel(false);
        let is_closing = Arc::new(AtomicBool::new(false));
        let reading = Reader::new(reading, clock, reads, is_closing.clone(), lock.clone());
        let reading = spawn("sqlite-reader", move || reading.run()).map_err(failed)?;
        let fatal = lock.settings.fatal.clone();
        let writing = Writer { session, queue: writes, fatal, reader: reading, lock: lock.clone(), finished };
        spawn("sqlite-writer", move || writing.run()).map_err(failed)?;
        Ok(Self { writer, reader, counts, is_closing, finished: watching, turned_unknown, path })
    }

    /// The in-flight records of a dead process, which were turned unknown.
    #[must_use]
    pub fn turned_unknown(&self) -> &[RecordId] {
        &self.turned_unknown
    }

    async fn ask<R: Request>(&self, request: R) -> Result<R::Reply, Error> {
        self.ensure_open()?;
        let (message, reply) = writer::job(request);
        self.writer.try_send(message).map_err(refused)?;
        // Dropped unanswered only where the writer died.
        reply.await.unwrap_or_else(|_| Err(Error::indeterminate(ErrorKind::Unavailable, "the writer thread has ended")))
    }

    async fn read<T>(&self, read: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> ReadRequest) -> Result<T, Error> {
        self.ensure_open()?;
        let (reply, found) = oneshot::channel();
        self.reader.try_send(read(reply)).map_err(refused)?;
        found.await.unwrap_or_else(|_| Err(Error::closed()))
    }

    fn ensure_open(&self) -> Result<(), Error> {
        if self.is_closing.load(Ordering::Relaxed) || self.writer.is_closed() { Err(Error::closed()) } else { Ok(()) }
    }
}

#[async_trait]
impl Store for Sqlite {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        self.ask(requests::ClaimRequest { id, fresh }).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.ask(requests::SupersedeRequest { id, seen, fresh }).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.settle_in_pieces(id, attempt, end).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.ask(requests::RenewRequest(held)).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.ask(requests::ExpireLeasesRequest { limit }).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.ask(requests::SweepRequest { limit }).await
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        Some(self)
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        Some(self)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        Some(self)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.read(|reply| ReadRequest::Get { id, reply }).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.read(|reply| ReadRequest::List { search: ListRequest { filter, after, limit }, reply }).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.read(|reply| ReadRequest::Scan { search: ScanRequest { filter, after, limit }, reply }).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.ask(requests::RemoveRequest { id, attempt }).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.ensure_open()?;
        Ok(*self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn changes(&self, _: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.ask(adopt::ChangesRequest { rules }).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.ask(adopt::AdoptRequest { origins, rules, accept_change }).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.read(|reply| ReadRequest::Identities { reply }).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.ask(requests::PingRequest).await
    }

    async fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        // Fails only where the thread has ended already.
        let _ = self.reader.send(ReadRequest::Close).await;
        let _ = self.writer.send(Message::Close).await;
        let _ = self.finished.clone().wait_for(|finished| *finished).await;
    }
}

/// Opens the file, by the room that was held for it where the disk is full.
fn open_with_reserve(lock: &Arc<Lock>) -> Result<(schema::Opened, Reserve), OpenError> {
    match schema::open(lock) {
        Ok(opened) => Ok((opened, Reserve::hold(lock.path()))),
        Err(full @ OpenError::Full { .. }) => match Reserve::take_over_spent(lock.path()) {
            Some(spent) => Ok((schema::open(lock)?, spent)),
            None => Err(full),
        },
        Err(other) => Err(other),
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(work)
}

fn refused<T>(error: mpsc::error::TrySendError<T>) -> Error {
    match error {
        mpsc::error::TrySendError::Full(_) => too_many_queued(),
        mpsc::error::TrySendError::Closed(_) => Error::closed(),
    }
}

fn too_many_queued() -> Error {
    Error::determinate(ErrorKind::Unavailable, "too many operations are queued")
}

/// A failed sync ends the process: the next start reads back the real content of the disk.
fn end_process(reason: &str) {
    tracing::error!(
        reason,
        "the process ends; start it again: the start checks the files, and its error says which is missing"
    );
    std::process::exit(1);
}

#[async_trait]
impl Resealing for Sqlite {
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
        self.read(|reply| ReadRequest::Beginnings { after, limit, reply }).await
    }

    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error> {
        self.ask(requests::ResealRequest { id, seen, values }).await
    }

    async fn delivery_values(&self, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
        self.look(move |reader| reader.delivery_values(id)).await
    }

    async fn reseal_delivery(
        &self,
        id: RecordId,
        token: AttemptToken,
        seen: Option<Bytes>,
        values: DeliveryValues,
    ) -> Result<bool, Error> {
        self.ask(deliveries::ResealDeliveryRequest { id, token, seen, values }).await
    }
}
