//! A client for the cache that gates share, which limits the load on it.
//!
//! It is never waited for longer than [`GET_TIMEOUT`]. After a failure it is not asked until a background task finds
//! that it answers again. While its hit rate is low, only a sample of lookups is sent.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{Notify, broadcast, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::idempotency::record::RecordId;
use crate::store::batcher::finish_on_caller_runtimes;
use crate::store::{Removal, SharedQuotas};

/// How long a request waits for the cache.
const GET_TIMEOUT: Duration = Duration::from_millis(3);

/// How long a batch may take. After a timeout or an error, the cache counts as down.
const BATCH_TIMEOUT: Duration = Duration::from_millis(25);

/// The delay between two probes of a cache that is down, at first and at most.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// The shortest time between two outages that the log has.
const REMINDER: Duration = Duration::from_secs(60);

/// How long a write waits for more writes, if nothing is urgent: a round trip costs as much as many writes. A retry
/// that meets another gate before that asks the store.
const LINGER: Duration = Duration::from_millis(10);

/// How much may be queued. Further gets and writes are dropped.
const MAX_QUEUED: usize = 8192;
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// How many operations one batch carries, and how many bytes, give or take one.
const MAX_BATCH: usize = 512;
const MAX_BATCH_BYTES: usize = 256 << 10;

/// The most bytes of writes in a batch with lookups.
const MAX_BATCH_BYTES_WITH_GETS: usize = 64 << 10;

/// The hit rate, of [`FULL_RATE`], from which on every lookup is sent.
const MIN_HIT_RATE: u32 = FULL_RATE / 8;
const FULL_RATE: u32 = 1 << 20;

/// The approximate number of lookups that the hit rate averages.
const HIT_WINDOW: u32 = 64;

/// One of this many lookups is sent while the hit rate is low.
const SAMPLE_EVERY: u32 = 16;

/// A cache that gates share. It may lose, keep, change or invent values.
#[async_trait]
pub trait RemoteCache: Send + Sync + 'static {
    /// Executes a batch in order. Returns the value of each [`CacheOperation::Get`].
    async fn execute(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError>;

    /// The invalidations by all gates from now on: most of them, soon after they happen; and the starts of the feed.
    fn removals(&self) -> broadcast::Receiver<Removal>;

    /// What counts quotas for these gates together.
    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        None
    }
}

/// An operation of a [`RemoteCache`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheOperation {
    /// The value of a record.
    Get(RecordId),
    /// Keep a value, for so long at most.
    Put(RecordId, Bytes, Duration),
    /// Forget a value.
    Delete(RecordId),
    /// Forget a value, and tell the other gates to.
    Invalidate(RecordId),
}

/// The cache could not be asked, or did not answer. The detail holds no value.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RemoteError(pub String);

/// The result of a get.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Value(Bytes),
    Nothing,
    /// It was not asked, because its hit rate is low.
    NotAsked,
    /// It was not asked, because it does not answer.
    Away,
    /// It did not answer in time.
    Late,
    /// It failed.
    Failed,
}

/// A client of the cache.
pub(super) struct RemoteClient {
    shared: Arc<Shared>,
    /// The worker task; ends with this.
    _worker: JoinSet<()>,
}

struct Shared {
    remote: Arc<dyn RemoteCache>,
    queue: Mutex<Queue>,
    /// Something is to be done.
    not_empty: Notify,
    /// Something is to be done at once.
    urgent: Notify,
    /// The share of hits, of [`FULL_RATE`].
    hits: AtomicU32,
    gets: AtomicU32,
}

#[derive(Default)]
struct Queue {
    gets: VecDeque<PendingGet>,
    writes: VecDeque<CacheOperation>,
    bytes: usize,
    /// The pending deletions by record. Until they are done, values of these records are not trusted.
    deleting: HashMap<RecordId, u32>,
    is_down: bool,
    /// Whether the log has that, and when it last had.
    is_reported: bool,
    reported_at: Option<Instant>,
    /// A caller waits for an answer or an invalidation.
    is_urgent: bool,
}

struct PendingGet {
    id: RecordId,
    /// `None` for a sampled lookup, which only measures the hit rate.
    reply: Option<oneshot::Sender<Option<Option<Bytes>>>>,
    runtime: Option<Handle>,
    asked: Instant,
}

impl RemoteClient {
    /// A client of `remote`. Its task runs on the runtime that this is called on.
    pub(super) fn new(remote: Arc<dyn RemoteCache>) -> Self {
        let shared = Arc::new(Shared {
            remote,
            queue: Mutex::default(),
            not_empty: Notify::new(),
            urgent: Notify::new(),
            // A process that has just started has everything still to ask for.
            hits: AtomicU32::new(FULL_RATE),
            gets: AtomicU32::new(0),
        });
        let mut worker = JoinSet::new();
        worker.spawn(run(Arc::clone(&shared)));
        Self { shared, _worker: worker }
    }

    /// Looks up the value of a record.
    pub(super) async fn get(&self, id: RecordId) -> Lookup {
        let is_asked_first = self.shared.hits.load(Ordering::Relaxed) >= MIN_HIT_RATE;
        if !is_asked_first && !self.shared.gets.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE_EVERY) {
            return Lookup::NotAsked;
        }
        let (reply, answer) = oneshot::channel();
        let reply = is_asked_first.then_some(reply);
        {
            let mut queue = self.shared.lock();
            if queue.is_down || queue.gets.len() >= MAX_QUEUED {
                return Lookup::Away;
            }
            if queue.deleting.contains_key(&id) {
                return Lookup::Nothing;
            }
            queue.is_urgent |= is_asked_first;
            queue.gets.push_back(PendingGet { id, reply, runtime: Handle::try_current().ok(), asked: Instant::now() });
        }
        if !is_asked_first {
            self.shared.not_empty.notify_one();
            return Lookup::NotAsked;
        }
        self.shared.urgent.notify_one();
        match timeout(GET_TIMEOUT, answer).await {
            Ok(Ok(Some(Some(value)))) => Lookup::Value(value),
            Ok(Ok(Some(None))) => Lookup::Nothing,
            Ok(Ok(None) | Err(_)) => Lookup::Failed,
            Err(_) => Lookup::Late,
        }
    }

    /// Queues a write, unless too many are queued.
    pub(super) fn put(&self, id: RecordId, value: Bytes, life: Duration) {
        {
            let mut queue = self.shared.lock();
            if queue.is_down || queue.writes.len() >= MAX_QUEUED || queue.bytes >= MAX_QUEUED_BYTES {
                return;
            }
            queue.push(CacheOperation::Put(id, value, life));
        }
        self.shared.not_empty.notify_one();
    }

    /// Deletes a value that is no longer true, without notifying the other gates.
    pub(super) fn delete(&self, id: RecordId) {
        self.push_delete(id, CacheOperation::Delete(id));
        self.shared.not_empty.notify_one();
    }

    /// Invalidates a value in all gates. If the cache is down, this happens as soon as it is back.
    pub(super) fn invalidate(&self, id: RecordId) {
        self.push_delete(id, CacheOperation::Invalidate(id));
        self.shared.urgent.notify_one();
    }

    /// Returns when all pending deletions are done, or take too long.
    pub(super) async fn flush_invalidations(&self) {
        let flush_invalidations = async {
            while !self.shared.lock().deleting.is_empty() {
                sleep(LINGER).await;
            }
        };
        let _ = timeout(4 * BATCH_TIMEOUT, flush_invalidations).await;
    }

    /// How many operations wait to be written, and their bytes.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> (usize, usize) {
        let queue = self.shared.lock();
        (queue.writes.len(), queue.bytes)
    }

    /// When the log last had that it is down.
    #[cfg(test)]
    pub(super) fn reported_at(&self) -> Option<Instant> {
        self.shared.lock().reported_at
    }

    fn push_delete(&self, id: RecordId, operation: CacheOperation) {
        let mut queue = self.shared.lock();
        // The oldest are dropped first: their values have nearly expired.
        if queue.writes.len() >= MAX_QUEUED
            && let Some(oldest) = queue.writes.pop_front()
        {
            queue.bytes -= size(&oldest);
            queue.deleted(&oldest);
        }
        *queue.deleting.entry(id).or_default() += 1;
        queue.is_urgent |= is_invalidation(&operation);
        queue.push(operation);
    }
}

impl Queue {
    fn push(&mut self, operation: CacheOperation) {
        self.bytes += size(&operation);
        self.writes.push_back(operation);
    }

    /// Notes that a deletion is no longer pending.
    fn deleted(&mut self, operation: &CacheOperation) {
        let (CacheOperation::Delete(id) | CacheOperation::Invalidate(id)) = operation else { return };
        if let Some(times) = self.deleting.get_mut(id) {
            *times -= 1;
            if *times == 0 {
                self.deleting.remove(id);
            }
        }
    }

    /// Takes the next batch: lookups first, since callers wait for them.
    fn take(&mut self) -> (Vec<PendingGet>, Vec<CacheOperation>) {
        let gets: Vec<_> = self.gets.drain(..self.gets.len().min(MAX_BATCH)).collect();
        let most = if gets.is_empty() { MAX_BATCH_BYTES } else { MAX_BATCH_BYTES_WITH_GETS };
        let (mut writes, mut bytes) = (Vec::new(), 0);
        while gets.len() + writes.len() < MAX_BATCH && bytes < most {
            let Some(write) = self.writes.pop_front() else { break };
            bytes += size(&write);
            writes.push(write);
        }
        self.bytes -= bytes;
        self.is_urgent &= !(self.gets.is_empty() && self.writes.is_empty());
        (gets, writes)
    }
}

fn size(operation: &CacheOperation) -> usize {
    match operation {
        CacheOperation::Put(_, value, _) => value.len(),
        CacheOperation::Get(_) | CacheOperation::Delete(_) | CacheOperation::Invalidate(_) => 0,
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No operation under the lock can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cache failed to answer: marks it as down.
    fn failed(&self, why: &str) {
        let mut queue = self.lock();
        queue.is_down = true;
        let (invalidations, lost) = std::mem::take(&mut queue.writes).into_iter().partition(is_invalidation);
        // Invalidations stay queued.
        (queue.writes, queue.bytes) = (invalidations, 0);
        let lost: VecDeque<CacheOperation> = lost;
        lost.iter().for_each(|write| queue.deleted(write));
        drop(queue);
        self.report(why);
    }

    /// Logs that the cache is down, unless that stands in the log already, or an outage did a moment ago: one that is slow now and then
    /// would fill the log.
    fn report(&self, why: &str) {
        let mut queue = self.lock();
        if !queue.is_reported && queue.reported_at.is_none_or(|last| last.elapsed() >= REMINDER) {
            (queue.is_reported, queue.reported_at) = (true, Some(Instant::now()));
            drop(queue);
            tracing::warn!(error = why, "the cache does not answer: the store is asked instead, until it does");
        }
    }

    fn answered(&self) {
        let mut queue = self.lock();
        queue.is_down = false;
        if std::mem::take(&mut queue.is_reported) {
            drop(queue);
            tracing::info!("the cache answers again");
        }
    }

    /// Counts a lookup as a hit or a miss.
    fn count(&self, is_hit: bool) {
        let add = if is_hit { FULL_RATE / HIT_WINDOW } else { 0 };
        let _ =
            self.hits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |hits| Some(hits - hits / HIT_WINDOW + add));
    }
}

/// Runs the worker.
async fn run(shared: Arc<Shared>) {
    let (mut pause, mut back) = (MIN_BACKOFF, Instant::now());
    loop {
        tokio::select! {
            biased;
            () = shared.urgent.notified() => {}
            () = shared.not_empty.notified() => {}
        }
        loop {
            let is_down = shared.lock().is_down;
            if is_down {
                // A flapping cache is probed no more often than one that stays down.
                if back.elapsed() > MAX_BACKOFF {
                    pause = MIN_BACKOFF;
                }
                pause = wait_until_up(&shared, pause).await;
                back = Instant::now();
            }
            let is_urgent = shared.lock().is_urgent;
            if !is_urgent {
                // More may come with it.
                let _ = timeout(LINGER, shared.urgent.notified()).await;
            }
            let (gets, writes) = shared.lock().take();
            if gets.is_empty() && writes.is_empty() {
                break;
            }
            execute(&shared, gets, writes).await;
        }
    }
}

async fn execute(shared: &Shared, gets: Vec<PendingGet>, writes: Vec<CacheOperation>) {
    let mut batch: Vec<CacheOperation> = gets.iter().map(|get| CacheOperation::Get(get.id)).collect();
    batch.extend(writes);
    let began = Instant::now();
    let found: Vec<Option<Option<Bytes>>> = match execute_within(shared, &batch).await {
        Ok(found) => {
            let mut queue = shared.lock();
            batch.iter().for_each(|write| queue.deleted(write));
            drop(queue);
            found.into_iter().map(Some).collect()
        }
        Err(failure) => {
            shared.failed(&failure.0);
            put_back(shared, batch);
            Vec::new()
        }
    };
    let mut found = found.into_iter();
    let mut answered = Vec::new();
    for PendingGet { reply, runtime, asked, .. } in gets {
        let found = found.next().flatten();
        // A late answer counts as a miss, also for a sampled get without a caller.
        let since = if reply.is_some() { asked } else { began };
        shared.count(matches!(found, Some(Some(_))) && since.elapsed() < GET_TIMEOUT);
        answered.extend(reply.map(|reply| (reply, runtime, found)));
    }
    finish_on_caller_runtimes(
        answered,
        |(_, runtime, _)| runtime.as_ref(),
        |(reply, _, found)| {
            // The caller may have gone.
            let _ = reply.send(found);
        },
    );
}

/// Executes a batch within the time that it may take.
async fn execute_within(shared: &Shared, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
    let executed = timeout(BATCH_TIMEOUT, shared.remote.execute(batch)).await;
    executed.unwrap_or_else(|_| Err(RemoteError("it does not answer in time".to_owned())))
}

/// Requeues invalidations, and drops the other operations.
fn put_back(shared: &Shared, batch: Vec<CacheOperation>) {
    let mut queue = shared.lock();
    for operation in batch.into_iter().rev() {
        if is_invalidation(&operation) && queue.writes.len() < MAX_QUEUED {
            queue.writes.push_front(operation);
        } else {
            queue.deleted(&operation);
        }
    }
}

/// Whether all gates are to forget it.
fn is_invalidation(operation: &CacheOperation) -> bool {
    matches!(operation, CacheOperation::Invalidate(_))
}

/// Returns when the cache answers again, with the delay to begin with if it goes down again.
async fn wait_until_up(shared: &Shared, first: Duration) -> Duration {
    let mut pause = first;
    loop {
        // Fails the gets that were queued before it was down.
        let asked = std::mem::take(&mut shared.lock().gets);
        drop(asked);
        sleep(pause).await;
        match execute_within(shared, &[CacheOperation::Get(RecordId([0; 32]))]).await {
            Ok(_) => {
                shared.answered();
                return (pause * 2).min(MAX_BACKOFF);
            }
            Err(failure) => shared.report(&failure.0),
        }
        pause = (pause * 2).min(MAX_BACKOFF);
    }
}
