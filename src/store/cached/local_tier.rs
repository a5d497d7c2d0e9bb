//! The cache in this process's memory.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::Settings;
use crate::idempotency::record::{Record, RecordId, State, Timestamp};

/// The approximate overhead of an entry.
const ENTRY_BYTES: u64 = 256;

/// Larger records are not cached: 256 KiB.
pub(super) const LARGEST: u64 = 256 << 10;

/// How many entries room is made for at first.
const FIRST_ENTRIES: usize = 1024;

/// A completed record, and as of when.
#[derive(Clone)]
pub(super) struct CacheEntry {
    pub(super) record: Record,
    /// The store's time when it was read.
    pub(super) read_at: Timestamp,
    /// When that was, by this process's clock, or earlier. The answer may have been long on its way: counted from when it
    /// came, a record would outlive its ttl.
    pub(super) asked: Instant,
}

pub(super) struct LocalTier {
    /// How long what was read is believed, where others write to the store.
    max_age: Option<Duration>,
    entries: Cache<RecordId, CacheEntry, Weight>,
    /// Counts the operations that may have removed a completed record. A read before a removal is not cached after
    /// it.
    removals: Mutex<u64>,
}

/// By what entries are bounded: their bytes, and so much at least that there are no more entries than there may be.
#[derive(Clone)]
struct Weight {
    least: u64,
}

impl Weighter<RecordId, CacheEntry> for Weight {
    fn weight(&self, _: &RecordId, entry: &CacheEntry) -> u64 {
        size(&entry.record).max(self.least)
    }
}

/// How many bytes a record takes.
pub(super) fn size(record: &Record) -> u64 {
    ENTRY_BYTES + record.head.len() as u64 + record.answer.as_ref().map_or(0, |answer| answer.len() as u64)
}

impl CacheEntry {
    /// The store's time at this moment, or a little later.
    fn now(&self) -> Timestamp {
        self.read_at.plus(self.asked.elapsed())
    }
}

impl LocalTier {
    pub(super) fn new(settings: &Settings) -> Self {
        let least = settings.most_bytes / (settings.most_entries.max(1) as u64);
        let first = FIRST_ENTRIES.min(settings.most_entries);
        let entries = Cache::with_weighter(first, settings.most_bytes, Weight { least });
        Self { max_age: settings.max_age, entries, removals: Mutex::new(0) }
    }

    /// A record that has not expired, and the store's time.
    pub(super) fn find(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let entry = self.entries.get(&id)?;
        let (now, age) = (entry.now(), entry.asked.elapsed());
        if entry.record.until <= now || self.max_age.is_some_and(|max_age| age >= max_age) {
            self.entries.remove(&id);
            return None;
        }
        Some((entry.record, now))
    }

    /// Caches a record that was read when the count of removals was `removals`.
    pub(super) fn keep(&self, id: RecordId, entry: CacheEntry, removals: u64) {
        let is_forgetful = self.max_age.is_some_and(|max_age| max_age.is_zero());
        if entry.record.state == State::Completed && size(&entry.record) <= LARGEST && !is_forgetful {
            self.unless_removed(removals, || self.entries.insert(id, entry));
        }
    }

    /// Calls `keep` unless there was a removal since the count was `removals`, which may have been of this record.
    /// Returns whether it was called.
    pub(super) fn unless_removed(&self, removals: u64, keep: impl FnOnce()) -> bool {
        let counted = self.removals();
        let is_none = *counted == removals;
        if is_none {
            keep();
        }
        is_none
    }

    /// Called before and after an operation that may remove the record, so that a read in between is not kept.
    pub(super) fn forget(&self, id: RecordId) {
        let mut counted = self.removals();
        *counted += 1;
        self.entries.remove(&id);
    }

    pub(super) fn forget_all(&self) {
        let mut counted = self.removals();
        *counted += 1;
        self.entries.clear();
    }

    /// How many removals there have been.
    pub(super) fn counted(&self) -> u64 {
        *self.removals()
    }

    /// How many entries there are, and what they weigh.
    #[cfg(test)]
    pub(super) fn load(&self) -> (usize, u64) {
        (self.entries.len(), self.entries.weight())
    }

    fn removals(&self) -> MutexGuard<'_, u64> {
        // A number is never half changed.
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
