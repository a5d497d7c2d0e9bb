//! What operators did, beside the records: see [`AuditLog`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Error, ErrorKind, Since, Store};
use crate::idempotency::record::{RecordId, Timestamp};

/// A log in a store, of which the newest entries are read. All times are the store's own.
#[async_trait]
pub trait AuditLog: Send + Sync {
    /// Appends an entry. Durable when it returns. A call that is repeated after an indeterminate error may append another.
    async fn append(&self, entry: NewEntry) -> Result<Position, Error>;

    /// Puts another detail in the place of that of an entry. Durable when it returns. False if there is no such entry.
    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error>;

    /// Entries that pass `filter`, newest first: at most `limit` (at least 1) of those before `before`.
    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error>;

    /// Removes up to `limit` entries that have expired. Returns how many.
    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error>;
}

/// An entry's place in the log, which names it: a later entry has a greater one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(pub u64);

/// An entry that is to be appended. What it says besides, the store keeps and does not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEntry {
    /// How long it is kept, from now.
    pub ttl: Duration,
    /// `[store] service` of the gate that writes it.
    pub service: Arc<str>,
    /// The word for what is done.
    pub action: Arc<str>,
    /// Who does it.
    pub by: Arc<str>,
    /// The one record that it is done to.
    pub record: Option<RecordId>,
    /// What else there is to say of it.
    pub detail: Bytes,
    /// Why it is done. Encrypted where a store encrypts.
    pub reason: Option<Bytes>,
}

/// An entry as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place.
    pub position: Position,
    /// When it was appended.
    pub at: Timestamp,
    /// When it expires.
    pub until: Timestamp,
    /// See [`NewEntry::service`].
    pub service: Arc<str>,
    /// See [`NewEntry::action`].
    pub action: Arc<str>,
    /// See [`NewEntry::by`].
    pub by: Arc<str>,
    /// See [`NewEntry::record`].
    pub record: Option<RecordId>,
    /// The last detail that was given.
    pub detail: Bytes,
    /// See [`NewEntry::reason`].
    pub reason: Option<Bytes>,
}

/// Which entries to list. Everything that is set must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// Of this service.
    pub service: Option<Arc<str>>,
    /// Of this action.
    pub action: Option<Arc<str>>,
    /// By this one.
    pub by: Option<Arc<str>>,
    /// About this record.
    pub record: Option<RecordId>,
    /// Appended no earlier than this.
    pub since: Option<Since>,
}

/// A part of a list of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryPage {
    /// The entries, newest first.
    pub entries: Vec<Entry>,
    /// Before which place the next page goes on; `None` if no entry is left.
    pub next: Option<Position>,
}

impl NewEntry {
    /// What is kept of it, at a place that the store gives it now.
    pub(super) fn at(self, position: Position, now: Timestamp) -> Entry {
        let Self { ttl, service, action, by, record, detail, reason } = self;
        Entry { position, at: now, until: now.plus(ttl), service, action, by, record, detail, reason }
    }
}

impl EntryFilter {
    /// Whether an entry passes, by the store's time `now`.
    pub(super) fn passes(&self, entry: &Entry, now: Timestamp) -> bool {
        let Self { service, action, by, record, since } = self;
        service.as_ref().is_none_or(|service| entry.service == *service)
            && action.as_ref().is_none_or(|action| entry.action == *action)
            && by.as_ref().is_none_or(|by| entry.by == *by)
            && record.is_none_or(|record| entry.record == Some(record))
            && since.is_none_or(|since| since.includes(entry.at, now))
    }
}

impl EntryPage {
    /// Of up to `limit` entries, and one more if there is one.
    pub(super) fn of(mut entries: Vec<Entry>, limit: usize) -> Self {
        let is_more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| is_more).map(|last| last.position);
        Self { entries, next }
    }
}

/// Where a store keeps entries.
///
/// # Errors
/// Where it keeps none.
pub fn of(store: &dyn Store) -> Result<&dyn AuditLog, Error> {
    store.audit().ok_or_else(|| Error::determinate(ErrorKind::Other, "this store keeps no audit entries"))
}
