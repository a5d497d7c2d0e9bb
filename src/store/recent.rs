//! Completed records in memory, in front of a store.
//!
//! A completed record does not change until it is removed, or superseded past its ttl. So a retry need not ask the store
//! for what it has just read. Where other processes write to the store too, one of them may remove a record: the store
//! tells of that as soon as it can, and what was read is believed for a while only.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::task::JoinSet;
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
    /// The task that hears of removals; ends with the store.
    _hearing: JoinSet<()>,
}

struct Shelf {
    /// How long what was read is believed, where others write to the store.
    max_age: Option<Duration>,
    kept: Cache<RecordId, Kept, Weight>,
    /// Counts what may have taken a completed record away. What was read before that is not to be kept after it.
    removals: Mutex<u64>,
}

#[derive(Clone)]
struct Kept {
    record: Record,
    /// The store's time when it was read.
    now: Timestamp,
    /// When that was asked for, by this process's clock. The answer may have been long on its way: counted from when it
    /// came, a record would outlive its ttl.
    asked: Instant,
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
        Self { inner, shelf: Arc::new(Shelf::new(None)), _hearing: JoinSet::new() }
    }

    /// In front of `inner`, which others may write to. A record that one of them removes is remembered for `max_age` at
    /// most. Its task runs on the runtime that this is called on.
    #[must_use]
    pub fn of_shared(inner: Arc<dyn Store>, max_age: Duration) -> Self {
        let shelf = Arc::new(Shelf::new(Some(max_age)));
        let mut hearing = JoinSet::new();
        if let Some(removals) = inner.removals() {
            hearing.spawn(hear(removals, Arc::clone(&shelf)));
        }
        Self { inner, shelf, _hearing: hearing }
    }
}

async fn hear(mut removals: broadcast::Receiver<RecordId>, shelf: Arc<Shelf>) {
    loop {
        match removals.recv().await {
            Ok(id) => shelf.forget(id),
            // Which ones they were nobody knows.
            Err(RecvError::Lagged(_)) => shelf.forget_all(),
            Err(RecvError::Closed) => return,
        }
    }
}

impl Shelf {
    fn new(max_age: Option<Duration>) -> Self {
        let kept = Cache::with_weighter(FIRST_ENTRIES, MOST_BYTES, Weight);
        Self { max_age, kept, removals: Mutex::new(0) }
    }

    fn keep(&self, id: RecordId, record: &Record, now: Timestamp, asked: Instant, removals: u64) {
        if record.state != State::Completed || size(record) > LARGEST {
            return;
        }
        let counted = self.removals();
        // Otherwise it may be this one that was taken away meanwhile.
        if *counted == removals {
            self.kept.insert(id, Kept { record: record.clone(), now, asked });
        }
    }

    /// Before and after what may take the record away: whoever reads it in between does not keep it.
    fn forget(&self, id: RecordId) {
        let mut counted = self.removals();
        *counted += 1;
        self.kept.remove(&id);
    }

    fn forget_all(&self) {
        let mut counted = self.removals();
        *counted += 1;
        self.kept.clear();
    }

    fn removals(&self) -> MutexGuard<'_, u64> {
        // A number is never half changed.
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for Recent {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let Kept { record, now, asked } = self.shelf.kept.get(&id)?;
        let age = asked.elapsed();
        let now = now.plus(age);
        if record.until <= now || self.shelf.max_age.is_some_and(|max_age| age >= max_age) {
            self.shelf.kept.remove(&id);
            return None;
        }
        Some((record, now))
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        let removals = *self.shelf.removals();
        let asked = Instant::now();
        let claimed = self.inner.claim(id, fresh).await;
        if let Ok(Claim::Exists { record, now }) = &claimed {
            self.shelf.keep(id, record, *now, asked, removals);
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

    async fn renew(&self, held: Vec<Held>) -> Result<Vec<RecordId>, Error> {
        self.inner.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.inner.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        // Only what has expired, which is not recalled any more.
        self.inner.sweep(limit).await
    }

    async fn changed(&self, id: RecordId) {
        self.inner.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<RecordId>> {
        self.inner.removals()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::store::contract::{self, Harness, model};
    use crate::store::memory::Memory;
    use crate::store::unreliable::{Fault, Operation, Unreliable};
    use crate::store::{Expiry, OriginId};

    const ID: RecordId = RecordId([7; 32]);
    const TTL: Duration = Duration::from_secs(10);

    fn fresh(attempt: u8) -> Fresh {
        let (attempt, origin) = (Attempt([attempt; 16]), OriginId(1));
        Fresh { attempt, origin, lease: TTL, ttl: TTL, unknown_ttl: TTL, head: Bytes::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_whose_answer_was_late_does_not_outlive_its_ttl() {
        let began = Instant::now();
        let memory = Memory::with_clock(Arc::new(move || Timestamp(0).plus(began.elapsed())));
        let inner = Arc::new(Unreliable::new(Arc::new(memory)));
        let recent = Recent::new(Arc::clone(&inner) as _);
        recent.claim(ID, fresh(1)).await.unwrap();
        let end = End::Complete { answer: Bytes::new(), expiry: Expiry::FromClaim(TTL) };
        recent.settle(ID, Attempt([1; 16]), end).await.unwrap();

        inner.script_for(Operation::Claim, [Fault::DelayAnswer(TTL / 2)]);
        assert!(matches!(recent.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
        assert!(recent.recall(ID).is_some());
        tokio::time::sleep(TTL / 2).await;
        assert!(recent.recall(ID).is_none());
    }

    /// With a completed record that was read once.
    async fn warm() -> Recent {
        let store = Recent::new(Arc::new(Memory::new()));
        store.claim(ID, fresh(1)).await.unwrap();
        let end = End::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromClaim(TTL) };
        store.settle(ID, Attempt([1; 16]), end).await.unwrap();
        assert!(store.recall(ID).is_none(), "nobody has read it yet");
        let Claim::Exists { .. } = store.claim(ID, fresh(2)).await.unwrap() else { panic!("claimed twice") };
        store
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_keeps_the_contract() {
        contract::run(async || {
            let (clock, step) = model::stopped_clock();
            Harness::stepped(Recent::new(Arc::new(Memory::with_clock(clock))), step)
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_read_is_recalled_until_it_expires() {
        let store = warm().await;
        let (record, now) = store.recall(ID).unwrap();
        assert_eq!(record.answer.as_deref(), Some(&b"answer"[..]));
        tokio::time::advance(TTL - Duration::from_secs(1)).await;
        let (_, later) = store.recall(ID).unwrap();
        assert!(later >= now.plus(TTL - Duration::from_secs(1)), "its time goes on");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(store.recall(ID).is_none());
    }

    #[tokio::test]
    async fn what_is_removed_is_forgotten() {
        let store = warm().await;
        assert!(store.remove(ID).await.unwrap());
        assert!(store.recall(ID).is_none());
    }

    #[tokio::test]
    async fn what_was_read_before_a_removal_is_not_kept_after_it() {
        let store = warm().await;
        let (record, now) = store.recall(ID).unwrap();
        let removals = *store.shelf.removals();
        store.remove(ID).await.unwrap();
        store.shelf.keep(ID, &record, now, Instant::now(), removals);
        assert!(store.recall(ID).is_none());
    }

    /// In front of a store that others write to, with a completed record that was read once.
    async fn warm_and_shared() -> (Recent, Arc<Memory>) {
        let shared = Arc::new(Memory::new());
        let store = Recent::of_shared(Arc::clone(&shared) as _, TTL / 2);
        store.claim(ID, fresh(1)).await.unwrap();
        let end = End::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromClaim(TTL) };
        store.settle(ID, Attempt([1; 16]), end).await.unwrap();
        store.claim(ID, fresh(2)).await.unwrap();
        assert!(store.recall(ID).is_some());
        (store, shared)
    }

    async fn until_forgotten(store: &Recent) {
        let forgotten = async {
            while store.recall(ID).is_some() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(TTL / 4, forgotten).await.expect("it was told");
    }

    #[tokio::test(start_paused = true)]
    async fn of_what_others_write_to_is_believed_for_a_while() {
        let (store, _shared) = warm_and_shared().await;
        tokio::time::advance(TTL / 2 - Duration::from_millis(1)).await;
        assert!(store.recall(ID).is_some());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(store.recall(ID).is_none());
        assert!(matches!(store.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
        assert!(store.recall(ID).is_some(), "it was read again");
    }

    async fn others_remove(shared: &Memory, id: RecordId) {
        shared.claim(id, fresh(3)).await.unwrap();
        assert!(shared.remove(id).await.unwrap());
    }

    #[tokio::test]
    async fn what_others_remove_is_forgotten_when_that_is_told() {
        let (store, shared) = warm_and_shared().await;
        others_remove(&shared, RecordId([8; 32])).await;
        tokio::task::yield_now().await;
        assert!(store.recall(ID).is_some(), "another record");
        others_remove(&shared, ID).await;
        until_forgotten(&store).await;
    }

    #[tokio::test]
    async fn where_it_is_not_known_what_was_removed_all_is_forgotten() {
        let (store, shared) = warm_and_shared().await;
        // More than wait to be heard of.
        for _ in 0..5000 {
            others_remove(&shared, RecordId([8; 32])).await;
        }
        until_forgotten(&store).await;
    }

    #[tokio::test]
    async fn what_is_in_flight_or_large_is_not_kept() {
        let store = Recent::new(Arc::new(Memory::new()));
        store.claim(ID, fresh(1)).await.unwrap();
        store.claim(ID, fresh(2)).await.unwrap();
        assert!(store.recall(ID).is_none());
        let answer = Bytes::from(vec![0; 300 << 10]);
        store.settle(ID, Attempt([1; 16]), End::Complete { answer, expiry: Expiry::FromClaim(TTL) }).await.unwrap();
        store.claim(ID, fresh(2)).await.unwrap();
        assert!(store.recall(ID).is_none());
    }
}
