//! Completed records in memory, in front of a store that is this process's alone.
//!
//! A completed record does not change until it is removed, or superseded past its ttl, and here nobody else does
//! either. So a retry need not ask the store for what it has just read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::{
    Claim, End, Error, ErrorKind, Filter, Fresh, Held, Identity, IdentityChange, Listed, Origin, Page, Settled, Store,
};
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};

/// The most bytes of records that are kept: 32 MiB.
const MOST_BYTES: u64 = 32 << 20;

/// What an entry takes besides its bytes, about.
const ENTRY_BYTES: u64 = 256;

/// Records larger than this are not kept: 256 KiB.
const LARGEST: u64 = 256 << 10;

/// How many entries room is made for at first.
const FIRST_ENTRIES: usize = 1024;

/// A store that remembers the completed records that were last read.
pub struct Recent {
    inner: Arc<dyn Store>,
    shelf: Arc<Shelf>,
}

struct Shelf {
    kept: Cache<RecordId, Kept, Weight>,
    /// Counts what may have taken a completed record away. What was read before that is not to be kept after it.
    removals: AtomicU64,
}

#[derive(Clone)]
struct Kept {
    record: Record,
    /// The store's time when it was read.
    now: Timestamp,
    /// The same moment by this process's clock.
    at: Instant,
}

#[derive(Clone)]
struct Weight;

impl Weighter<RecordId, Kept> for Weight {
    fn weight(&self, _: &RecordId, kept: &Kept) -> u64 {
        size(&kept.record)
    }
}

fn size(record: &Record) -> u64 {
    ENTRY_BYTES + record.head.len() as u64 + record.answer.as_ref().map_or(0, |answer| answer.len() as u64)
}

impl Recent {
    /// In front of `inner`, which nobody else may write to, and whose time runs as the monotonic clock does.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        let kept = Cache::with_weighter(FIRST_ENTRIES, MOST_BYTES, Weight);
        Self { inner, shelf: Arc::new(Shelf { kept, removals: AtomicU64::new(0) }) }
    }
}

impl Shelf {
    fn keep(&self, id: RecordId, record: &Record, now: Timestamp, removals: u64) {
        if record.state != State::Completed || size(record) > LARGEST {
            return;
        }
        self.kept.insert(id, Kept { record: record.clone(), now, at: Instant::now() });
        if self.removals.load(Ordering::SeqCst) != removals {
            // It may be this one that was taken away meanwhile, and before it was kept.
            self.kept.remove(&id);
        }
    }

    /// Before and after what may take the record away: whoever reads it in between does not keep it.
    fn forget(&self, id: RecordId) {
        self.removals.fetch_add(1, Ordering::SeqCst);
        self.kept.remove(&id);
    }
}

#[async_trait]
impl Store for Recent {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let Kept { record, now, at } = self.shelf.kept.get(&id)?;
        let now = now.plus(at.elapsed());
        if record.until <= now {
            self.shelf.kept.remove(&id);
            return None;
        }
        Some((record, now))
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        let removals = self.shelf.removals.load(Ordering::SeqCst);
        let claimed = self.inner.claim(id, fresh).await;
        if let Ok(Claim::Exists { record, now }) = &claimed {
            self.shelf.keep(id, record, *now, removals);
        }
        claimed
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        // What it takes the place of has expired, and is not recalled any more.
        self.inner.supersede(id, seen, fresh).await
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        self.inner.settle(id, attempt, end).await
    }

    async fn renew(&self, held: Vec<Held>) -> Result<(), Error> {
        self.inner.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.inner.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        // Only what has expired, which is not recalled any more.
        self.inner.sweep(limit).await
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        self.inner.get(id).await
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        self.inner.list(filter, after, limit).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        let (inner, shelf) = (Arc::clone(&self.inner), Arc::clone(&self.shelf));
        shelf.forget(id);
        // To its end, even where whoever asked for it goes: it would happen all the same.
        let removing = tokio::spawn(async move {
            let removed = inner.remove(id).await;
            shelf.forget(id);
            removed
        });
        removing.await.unwrap_or_else(|error| Err(Error::indeterminate(ErrorKind::Other, error)))
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.inner.count().await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.inner.adopt(origins, rules, accept_change).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.inner.ping().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
