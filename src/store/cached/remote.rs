//! The cache that gates share, and how much is asked of it.
//!
//! It is never waited for longer than [`PATIENCE`]. Where it fails to answer, it is left alone until it answers again,
//! which a task of its own finds out. Where it hardly ever has what it is asked for, it is asked now and then only.

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
use crate::store::Removal;
use crate::store::callers::finish_where_they_wait;

/// How long a request waits for the cache.
const PATIENCE: Duration = Duration::from_millis(3);

/// How long a batch may take. After that, or once one fails, the cache is left alone.
const BATCH_PATIENCE: Duration = Duration::from_millis(25);

/// Between two looks whether it answers again, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long what is to be written waits for more, where nothing is urgent: a round trip costs as much as many writes. A
/// retry that meets another gate before that asks the store.
const GATHERING: Duration = Duration::from_millis(10);

/// How much may wait. What comes then is not asked, or not written.
const WAITING: usize = 8192;
const WAITING_BYTES: usize = 16 << 20;

/// How many operations one batch carries, and how many bytes, give or take one.
const BATCH: usize = 512;
const BATCH_BYTES: usize = 256 << 10;

/// How many bytes of writes go with questions.
const BATCH_BYTES_ASKED: usize = 64 << 10;

/// How often it must have what it is asked for, of [`ALWAYS`], to be asked first each time.
const OFTEN: u32 = ALWAYS / 8;
const ALWAYS: u32 = 1 << 20;

/// Of how many questions the share of hits is made, about.
const MEMORY: u32 = 64;

/// One of so many questions is asked where it hardly ever has the answer.
const NOW_AND_THEN: u32 = 16;

/// A cache that gates share. It may lose, keep, change or invent what it likes.
#[async_trait]
pub trait Remote: Send + Sync + 'static {
    /// Carries out a batch in order, and gives for each [`Operation::Get`] what stands there.
    async fn carry_out(&self, batch: &[Operation]) -> Result<Vec<Option<Bytes>>, Failure>;

    /// What gates have had forgotten, from now on: most of it, and soon; and since when that is told.
    fn removals(&self) -> broadcast::Receiver<Removal>;
}

/// What a [`Remote`] is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The value of a record.
    Get(RecordId),
    /// Keep a value, for so long at most.
    Put(RecordId, Bytes, Duration),
    /// Forget a value.
    Drop(RecordId),
    /// Forget a value, and tell the other gates to.
    Forget(RecordId),
}

/// The cache could not be asked, or did not answer. The detail holds no value.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Failure(pub String);

/// What asking came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Value(Bytes),
    Nothing,
    /// It was not asked, because it hardly ever has the answer.
    NotAsked,
    /// It was not asked, because it does not answer.
    Away,
    /// It did not answer in time.
    Late,
    /// It failed.
    Failed,
}

/// The way to the cache.
pub(super) struct Way {
    shared: Arc<Shared>,
    /// The task that asks; ends with this.
    _asking: JoinSet<()>,
}

struct Shared {
    remote: Arc<dyn Remote>,
    queue: Mutex<Queue>,
    /// Something is to be done.
    filled: Notify,
    /// Something is to be done at once.
    urged: Notify,
    /// The share of hits, of [`ALWAYS`].
    hits: AtomicU32,
    questions: AtomicU32,
}

#[derive(Default)]
struct Queue {
    questions: VecDeque<Question>,
    writes: VecDeque<Operation>,
    bytes: usize,
    /// What is being forgotten, and how often. Until it is, what stands there is not believed.
    forgetting: HashMap<RecordId, u32>,
    is_away: bool,
    /// Somebody waits for an answer, or for something to be forgotten.
    is_urgent: bool,
}

struct Question {
    id: RecordId,
    /// Nothing where it is only asked to know whether it would have had the answer.
    reply: Option<oneshot::Sender<Option<Option<Bytes>>>>,
    runtime: Option<Handle>,
    asked: Instant,
}

impl Way {
    /// The way to `remote`. Its task runs on the runtime that this is called on.
    pub(super) fn to(remote: Arc<dyn Remote>) -> Self {
        let shared = Arc::new(Shared {
            remote,
            queue: Mutex::default(),
            filled: Notify::new(),
            urged: Notify::new(),
            // A process that has just started has everything still to ask for.
            hits: AtomicU32::new(ALWAYS),
            questions: AtomicU32::new(0),
        });
        let mut asking = JoinSet::new();
        asking.spawn(run(Arc::clone(&shared)));
        Self { shared, _asking: asking }
    }

    /// What the cache has of a record.
    pub(super) async fn get(&self, id: RecordId) -> Found {
        let is_asked_first = self.shared.hits.load(Ordering::Relaxed) >= OFTEN;
        if !is_asked_first && !self.shared.questions.fetch_add(1, Ordering::Relaxed).is_multiple_of(NOW_AND_THEN) {
            return Found::NotAsked;
        }
        let (reply, answer) = oneshot::channel();
        let reply = is_asked_first.then_some(reply);
        {
            let mut queue = self.shared.lock();
            if queue.is_away || queue.questions.len() >= WAITING {
                return Found::Away;
            }
            if queue.forgetting.contains_key(&id) {
                return Found::Nothing;
            }
            queue.is_urgent |= is_asked_first;
            queue.questions.push_back(Question {
                id,
                reply,
                runtime: Handle::try_current().ok(),
                asked: Instant::now(),
            });
        }
        if !is_asked_first {
            self.shared.filled.notify_one();
            return Found::NotAsked;
        }
        self.shared.urged.notify_one();
        match timeout(PATIENCE, answer).await {
            Ok(Ok(Some(Some(value)))) => Found::Value(value),
            Ok(Ok(Some(None))) => Found::Nothing,
            Ok(Ok(None) | Err(_)) => Found::Failed,
            Err(_) => Found::Late,
        }
    }

    /// Has a value kept, unless too much waits to be.
    pub(super) fn put(&self, id: RecordId, value: Bytes, life: Duration) {
        {
            let mut queue = self.shared.lock();
            if queue.is_away || queue.writes.len() >= WAITING || queue.bytes >= WAITING_BYTES {
                return;
            }
            queue.push(Operation::Put(id, value, life));
        }
        self.shared.filled.notify_one();
    }

    /// Has a value forgotten: here only, by a hint that is no longer true.
    pub(super) fn drop(&self, id: RecordId) {
        self.forget_by(id, Operation::Drop(id));
        self.shared.filled.notify_one();
    }

    /// Has a value forgotten, by all gates, also where the cache is away: then as soon as it is back.
    pub(super) fn forget(&self, id: RecordId) {
        self.forget_by(id, Operation::Forget(id));
        self.shared.urged.notify_one();
    }

    /// Returns when all that is to be forgotten is, or when the cache takes too long for it.
    pub(super) async fn forgets(&self) {
        let forgets = async {
            while !self.shared.lock().forgetting.is_empty() {
                sleep(GATHERING).await;
            }
        };
        let _ = timeout(4 * BATCH_PATIENCE, forgets).await;
    }

    /// How many operations wait to be written, and their bytes.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> (usize, usize) {
        let queue = self.shared.lock();
        (queue.writes.len(), queue.bytes)
    }

    fn forget_by(&self, id: RecordId, operation: Operation) {
        let mut queue = self.shared.lock();
        // The oldest go first: by then they are hardly believed any more.
        if queue.writes.len() >= WAITING
            && let Some(oldest) = queue.writes.pop_front()
        {
            queue.bytes -= size(&oldest);
            queue.forgotten(&oldest);
        }
        *queue.forgetting.entry(id).or_default() += 1;
        queue.is_urgent |= is_to_forget(&operation);
        queue.push(operation);
    }
}

impl Queue {
    fn push(&mut self, operation: Operation) {
        self.bytes += size(&operation);
        self.writes.push_back(operation);
    }

    /// Nobody is about to forget it any more.
    fn forgotten(&mut self, operation: &Operation) {
        let (Operation::Drop(id) | Operation::Forget(id)) = operation else { return };
        if let Some(times) = self.forgetting.get_mut(id) {
            *times -= 1;
            if *times == 0 {
                self.forgetting.remove(id);
            }
        }
    }

    /// All that waits, as far as one batch carries it: questions first, whose askers wait.
    fn take(&mut self) -> (Vec<Question>, Vec<Operation>) {
        let questions: Vec<_> = self.questions.drain(..self.questions.len().min(BATCH)).collect();
        let most = if questions.is_empty() { BATCH_BYTES } else { BATCH_BYTES_ASKED };
        let (mut writes, mut bytes) = (Vec::new(), 0);
        while questions.len() + writes.len() < BATCH && bytes < most {
            let Some(write) = self.writes.pop_front() else { break };
            bytes += size(&write);
            writes.push(write);
        }
        self.bytes -= bytes;
        self.is_urgent &= !(self.questions.is_empty() && self.writes.is_empty());
        (questions, writes)
    }
}

fn size(operation: &Operation) -> usize {
    match operation {
        Operation::Put(_, value, _) => value.len(),
        Operation::Get(_) | Operation::Drop(_) | Operation::Forget(_) => 0,
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing that is done under it can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It failed to answer: nobody waits for it any more.
    fn failed(&self, why: &str) {
        let mut queue = self.lock();
        queue.is_away = true;
        let (to_forget, lost) = std::mem::take(&mut queue.writes).into_iter().partition(is_to_forget);
        // What is to be forgotten by all still is.
        (queue.writes, queue.bytes) = (to_forget, 0);
        let lost: VecDeque<Operation> = lost;
        lost.iter().for_each(|write| queue.forgotten(write));
        drop(queue);
        tracing::warn!(error = why, "the cache does not answer: the store is asked instead, until it does");
    }

    fn answered(&self) {
        self.lock().is_away = false;
        tracing::info!("the cache answers again");
    }

    /// Whether one more question had an answer.
    fn count(&self, is_hit: bool) {
        let add = if is_hit { ALWAYS / MEMORY } else { 0 };
        let _ = self.hits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |hits| Some(hits - hits / MEMORY + add));
    }
}

/// Asks and writes, for as long as this is wanted.
async fn run(shared: Arc<Shared>) {
    let (mut pause, mut back) = (FIRST_PAUSE, Instant::now());
    loop {
        tokio::select! {
            biased;
            () = shared.urged.notified() => {}
            () = shared.filled.notified() => {}
        }
        loop {
            let is_away = shared.lock().is_away;
            if is_away {
                // One that goes again and again is looked at no oftener than one that stays away.
                if back.elapsed() > LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
                pause = until_back(&shared, pause).await;
                back = Instant::now();
            }
            let is_urgent = shared.lock().is_urgent;
            if !is_urgent {
                // More may come with it.
                let _ = timeout(GATHERING, shared.urged.notified()).await;
            }
            let (questions, writes) = shared.lock().take();
            if questions.is_empty() && writes.is_empty() {
                break;
            }
            carry_out(&shared, questions, writes).await;
        }
    }
}

async fn carry_out(shared: &Shared, questions: Vec<Question>, writes: Vec<Operation>) {
    let mut batch: Vec<Operation> = questions.iter().map(|question| Operation::Get(question.id)).collect();
    batch.extend(writes);
    let began = Instant::now();
    let carried = timeout(BATCH_PATIENCE, shared.remote.carry_out(&batch)).await;
    let carried = carried.unwrap_or_else(|_| Err(Failure("it does not answer in time".to_owned())));
    let found: Vec<Option<Option<Bytes>>> = match carried {
        Ok(found) => {
            let mut queue = shared.lock();
            batch.iter().for_each(|write| queue.forgotten(write));
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
    for Question { reply, runtime, asked, .. } in questions {
        let found = found.next().flatten();
        // An answer that comes too late is none; and would be, where nobody waits.
        let since = if reply.is_some() { asked } else { began };
        shared.count(matches!(found, Some(Some(_))) && since.elapsed() < PATIENCE);
        answered.extend(reply.map(|reply| (reply, runtime, found)));
    }
    finish_where_they_wait(
        answered,
        |(_, runtime, _)| runtime.as_ref(),
        |(reply, _, found)| {
            // Nobody may wait any more.
            let _ = reply.send(found);
        },
    );
}

/// What is to be forgotten everywhere is not given up.
fn put_back(shared: &Shared, batch: Vec<Operation>) {
    let mut queue = shared.lock();
    for operation in batch.into_iter().rev() {
        if is_to_forget(&operation) && queue.writes.len() < WAITING {
            queue.writes.push_front(operation);
        } else {
            queue.forgotten(&operation);
        }
    }
}

/// Whether all gates are to forget it.
fn is_to_forget(operation: &Operation) -> bool {
    matches!(operation, Operation::Forget(_))
}

/// Returns when the cache answers again, and how long to wait before the next look if it goes again.
async fn until_back(shared: &Shared, first: Duration) -> Duration {
    let mut pause = first;
    loop {
        // Whoever asked before it was known.
        let asked = std::mem::take(&mut shared.lock().questions);
        drop(asked);
        sleep(pause).await;
        let probe = [Operation::Get(RecordId([0; 32]))];
        if matches!(timeout(BATCH_PATIENCE, shared.remote.carry_out(&probe)).await, Ok(Ok(_))) {
            shared.answered();
            return (pause * 2).min(LONGEST_PAUSE);
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
