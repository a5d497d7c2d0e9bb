//! What this process keeps in its own memory.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::Settings;
use crate::idempotency::record::{Record, RecordId, State, Timestamp};

/// What an entry takes besides its bytes, about.
const ENTRY_BYTES: u64 = 256;

/// Records larger than this are not kept: 256 KiB.
pub(super) const LARGEST: u64 = 256 << 10;

/// How many entries room is made for at first.
const FIRST_ENTRIES: usize = 1024;

/// A completed record, and as of when.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) record: Record,
    /// The store's time when the store was asked for it.
    pub(super) read_at: Timestamp,
    /// When that was, by this process's clock, or earlier. The answer may have been long on its way: counted from when it
    /// came, a record would outlive its ttl.
    pub(super) asked: Instant,
}

pub(super) struct Shelf {
    /// How long what was read is believed, where others write to the store.
    max_age: Option<Duration>,
    kept: Cache<RecordId, Known, Weight>,
    /// Counts what may have taken a completed record away. What was read before that is not to be kept after it.
    removals: Mutex<u64>,
}

/// By what entries are bounded: their bytes, and so much at least that there are no more entries than there may be.
#[derive(Clone)]
struct Weight {
    least: u64,
}

impl Weighter<RecordId, Known> for Weight {
    fn weight(&self, _: &RecordId, known: &Known) -> u64 {
        size(&known.record).max(self.least)
    }
}

/// How many bytes a record takes.
pub(super) fn size(record: &Record) -> u64 {
    ENTRY_BYTES + record.head.len() as u64 + record.answer.as_ref().map_or(0, |answer| answer.len() as u64)
}

impl Known {
    /// The store's time at this moment, or a little later.
    fn now(&self) -> Timestamp {
        self.read_at.plus(self.asked.elapsed())
    }
}

impl Shelf {
    pub(super) fn new(settings: &Settings) -> Self {
        let least = settings.most_bytes / (settings.most_entries.max(1) as u64);
        let first = FIRST_ENTRIES.min(settings.most_entries);
        let kept = Cache::with_weighter(first, settings.most_bytes, Weight { least });
        Self { max_age: settings.max_age, kept, removals: Mutex::new(0) }
    }

    /// A record that has not expired, and the store's time.
    pub(super) fn find(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let known = self.kept.get(&id)?;
        let (now, age) = (known.now(), known.asked.elapsed());
        if known.record.until <= now || self.max_age.is_some_and(|max_age| age >= max_age) {
            self.kept.remove(&id);
            return None;
        }
        Some((known.record, now))
    }

    /// Keeps a record that was read when there were so many removals.
    pub(super) fn keep(&self, id: RecordId, known: Known, removals: u64) {
        let is_forgetful = self.max_age.is_some_and(|max_age| max_age.is_zero());
        if known.record.state == State::Completed && size(&known.record) <= LARGEST && !is_forgetful {
            self.unless_removed(removals, || self.kept.insert(id, known));
        }
    }

    /// Does something with what was read when there were so many removals, unless there was another since: it may be this
    /// very record that was taken away. Says whether it was done.
    pub(super) fn unless_removed(&self, removals: u64, keep: impl FnOnce()) -> bool {
        let counted = self.removals();
        let is_none = *counted == removals;
        if is_none {
            keep();
        }
        is_none
    }

    /// Before and after what may take the record away: whoever reads it in between does not keep it.
    pub(super) fn forget(&self, id: RecordId) {
        let mut counted = self.removals();
        *counted += 1;
        self.kept.remove(&id);
    }

    pub(super) fn forget_all(&self) {
        let mut counted = self.removals();
        *counted += 1;
        self.kept.clear();
    }

    /// How many removals there have been.
    pub(super) fn counted(&self) -> u64 {
        *self.removals()
    }

    /// How many entries there are, and what they weigh.
    #[cfg(test)]
    pub(super) fn load(&self) -> (usize, u64) {
        (self.kept.len(), self.kept.weight())
    }

    fn removals(&self) -> MutexGuard<'_, u64> {
        // A number is never half changed.
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
