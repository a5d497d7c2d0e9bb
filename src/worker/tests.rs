use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::*;
use crate::idempotency::record::{AttemptToken, RecordId, State, Version};
use crate::store::deliveries::{Deliveries, DeliveryChange, Lane, NewDelivery, Take};
use crate::store::memory::Memory;
use crate::store::{
    Cause, Chunk, Claim, Cursor, Error, ErrorKind, Expiry, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet,
    NamespaceRules, NewRecord, Origin, OriginId, Page, RecordEntry, Settled, Settlement,
};

/// What the next calls return: `Ok` for nothing left to do, `Err` for a failure, a number for that many records.
#[derive(Default)]
struct Fake {
    began: Mutex<Option<Instant>>,
    expire: Mutex<VecDeque<Result<usize, ErrorKind>>>,
    sweep: Mutex<VecDeque<Result<usize, ErrorKind>>>,
    sweeps_at: Mutex<Vec<Duration>>,
    sweep_takes: Duration,
    counts_at: Mutex<Vec<Duration>>,
    count_takes: Duration,
    counts_fail: bool,
    limits: Mutex<Vec<usize>>,
    expires: AtomicUsize,
    panics: AtomicUsize,
}

fn next(script: &Mutex<VecDeque<Result<usize, ErrorKind>>>) -> Result<usize, Error> {
    script
        .lock()
        .unwrap()
        .pop_front()
        .unwrap_or(Ok(0))
        .map_err(|kind| Error::Determinate(Cause { kind, source: "scripted".into() }))
}

#[async_trait]
impl Store for Fake {
    fn kind(&self) -> &'static str {
        "fake"
    }
    async fn expire_leases(&self, _: usize) -> Result<Vec<RecordId>, Error> {
        self.expires.fetch_add(1, Ordering::SeqCst);
        assert!(self.panics.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_err());
        next(&self.expire).map(|count| vec![RecordId([7; 32]); count])
    }
    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.limits.lock().unwrap().push(limit);
        let began = *self.began.lock().unwrap().get_or_insert_with(Instant::now);
        self.sweeps_at.lock().unwrap().push(began.elapsed());
        sleep(self.sweep_takes).await;
        next(&self.sweep)
    }
    async fn count(&self) -> Result<[u64; 3], Error> {
        let began = *self.began.lock().unwrap().get_or_insert_with(Instant::now);
        self.counts_at.lock().unwrap().push(began.elapsed());
        sleep(self.count_takes).await;
        if self.counts_fail {
            return Err(Error::Determinate(Cause { kind: ErrorKind::Unavailable, source: "scripted".into() }));
        }
        Ok([7, 8, 9])
    }
    async fn claim(&self, _: RecordId, _: NewRecord) -> Result<Claim, Error> {
        unreachable!()
    }
    async fn supersede(&self, _: RecordId, _: Version, _: NewRecord) -> Result<bool, Error> {
        unreachable!()
    }
    async fn settle(&self, _: RecordId, _: AttemptToken, _: Settlement) -> Result<Settled, Error> {
        unreachable!()
    }
    async fn renew(&self, _: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        unreachable!()
    }
    async fn get(&self, _: RecordId) -> Result<Option<RecordEntry>, Error> {
        Ok(None)
    }
    async fn list(&self, _: Filter, _: Option<Cursor>, _: usize) -> Result<Page, Error> {
        unreachable!()
    }
    async fn scan(&self, _: Filter, _: Option<RecordId>, _: usize) -> Result<Chunk, Error> {
        unreachable!()
    }
    async fn remove(&self, _: RecordId, _: AttemptToken) -> Result<bool, Error> {
        unreachable!()
    }
    async fn changes(&self, _: Vec<Origin>, _: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        unreachable!()
    }
    async fn adopt(&self, _: Vec<Origin>, _: Vec<NamespaceRuleSet>, _: bool) -> Result<Vec<IdentityChange>, Error> {
        unreachable!()
    }
    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        unreachable!()
    }
    async fn ping(&self) -> Result<(), Error> {
        unreachable!()
    }
    async fn close(&self) {}
}

struct Running {
    store: Arc<Fake>,
    metrics: Metrics,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

fn start(store: Fake) -> Running {
    let (store, metrics) = (Arc::new(store), Metrics::new());
    let (stop, shutdown) = watch::channel(false);
    let settings = Settings { batch: 10, large_batch: 30, largest_batch: 100, ..Settings::default() };
    let task = spawn(store.clone(), None, metrics.clone(), settings, shutdown);
    Running { store, metrics, stop, task }
}

impl Running {
    fn expires(&self) -> usize {
        self.store.expires.load(Ordering::SeqCst)
    }

    fn shows(&self, line: &str) {
        let text = self.metrics.encode();
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_reaper_goes_on_while_batches_are_full() {
    let running = start(Fake { expire: Mutex::new([Ok(10), Ok(10), Ok(3)].into()), ..Fake::default() });
    sleep(Duration::from_millis(500)).await;
    assert_eq!(running.expires(), 3, "the first tick comes at once and takes all there is");
    sleep(Duration::from_secs(2)).await;
    assert_eq!(running.expires(), 5, "then one look a second");
    running.shows("oncegate_leases_expired_total 23");
}

#[tokio::test(start_paused = true)]
async fn the_sweeper_pauses_between_batches_and_counts() {
    let running = start(Fake { sweep: Mutex::new([Ok(10), Ok(20), Ok(30), Ok(1)].into()), ..Fake::default() });
    sleep(Duration::from_millis(500)).await;
    assert_eq!(*running.store.sweeps_at.lock().unwrap(), [0, 2, 4, 6].map(Duration::from_millis));
    assert_eq!(*running.store.limits.lock().unwrap(), [10, 20, 30, 30], "twice as many each time");
    running.shows("oncegate_records_swept_total 61");
    running.shows("oncegate_records{state=\"completed\"} 8");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(running.store.limits.lock().unwrap()[4..], [10], "and from the start again a second later");
    assert_eq!(running.store.counts_at.lock().unwrap().len(), 1, "which is too soon for a count");
}

#[tokio::test(start_paused = true)]
async fn a_sweep_leaves_two_thirds_of_the_store_to_requests() {
    let sweep = Mutex::new([Ok(10), Ok(20), Ok(1)].into());
    let running = start(Fake { sweep, sweep_takes: Duration::from_millis(10), ..Fake::default() });
    sleep(Duration::from_millis(900)).await;
    assert_eq!(*running.store.sweeps_at.lock().unwrap(), [0, 30, 60].map(Duration::from_millis));
}

#[tokio::test(start_paused = true)]
async fn a_sweep_that_falls_behind_does_more_at_a_time() {
    let sweep = Mutex::new([Ok(10), Ok(20), Ok(30), Ok(30), Ok(60), Ok(100), Ok(1)].into());
    let running = start(Fake { sweep, sweep_takes: Duration::from_secs(1), ..Fake::default() });
    sleep(Duration::from_secs(60)).await;
    // Each takes three seconds with its pause, and a sweep falls behind after ten.
    assert_eq!(running.store.limits.lock().unwrap()[..7], [10, 20, 30, 30, 60, 100, 100]);
}

#[tokio::test(start_paused = true)]
async fn a_count_of_a_large_store_takes_a_fiftieth_of_the_time() {
    let running = start(Fake { count_takes: Duration::from_secs(1), ..Fake::default() });
    sleep(Duration::from_secs(100)).await;
    assert_eq!(*running.store.counts_at.lock().unwrap(), [0, 51].map(Duration::from_secs), "at the next look");
    let running = start(Fake { count_takes: Duration::from_secs(1), counts_fail: true, ..Fake::default() });
    sleep(Duration::from_secs(25)).await;
    assert!(running.store.counts_at.lock().unwrap().len() > 1, "a failure is no count");
    let running = start(Fake { count_takes: Duration::from_millis(100), ..Fake::default() });
    sleep(Duration::from_secs(25)).await;
    assert_eq!(*running.store.counts_at.lock().unwrap(), [0, 10, 20].map(Duration::from_secs));
}

/// An operator would look for what is dead, and the metric would tell of it.
#[tokio::test(start_paused = true)]
async fn a_request_that_ran_after_all_is_not_dead_for_long() {
    let (store, id, token) = (Arc::new(Memory::new()), RecordId([1; 32]), AttemptToken([2; 16]));
    let (origin, head, minute) = (OriginId(1), Bytes::from_static(b"head"), Duration::from_secs(60));
    let (request, body, lane) = (Bytes::new(), Bytes::new(), Lane(0));
    store.accept(id, NewDelivery { token, origin, lane, head: head.clone(), request, body }).await.unwrap();
    let attempt = AttemptToken([3; 16]);
    let new = NewRecord { attempt, origin, lease: minute, ttl: minute, unknown_ttl: minute, head };
    store.claim(id, new).await.unwrap();
    store.settle(id, attempt, Settlement::Hold { cause: Bytes::new() }).await.unwrap();
    let take = Take { origin, limit: 1, max_bytes: 1, hold: minute, is_ordered: false };
    let taken = store.take_due(take).await.unwrap().taken.remove(0);
    let park = DeliveryChange::Park { ttl: minute, is_attempt: false, note: Bytes::new() };
    assert!(store.change(taken.held(), park).await.unwrap());
    let (_stop, shutdown) = watch::channel(false);
    let _worker = spawn(store.clone(), None, Metrics::new(), Settings::default(), shutdown);
    sleep(Duration::from_secs(25)).await;
    assert!(store.delivery(id).await.unwrap().is_some(), "whether it ran is unknown");
    let end = Settlement::Complete { answer: Bytes::new(), expiry: Expiry::FromNow(minute) };
    store.settle(id, attempt, end).await.unwrap();
    sleep(Duration::from_secs(15)).await;
    assert!(store.delivery(id).await.unwrap().is_none());
}

/// No operator can resolve it, and alerts would fire.
#[tokio::test(start_paused = true)]
async fn a_shadow_whose_gate_went_away_is_completed_and_no_attempt_was_lost() {
    let (store, minute) = (Arc::new(Memory::new()), Duration::from_secs(60));
    let origin = Origin { service: "shop".into(), namespace: "pay".into(), route: "pay".into() };
    let origins = [origin.clone().shadow(), origin];
    store.adopt(origins.to_vec(), Vec::new(), false).await.unwrap();
    for (number, origin) in (1..).zip(&origins) {
        let (attempt, head) = (AttemptToken([number; 16]), Bytes::from_static(b"head"));
        let new =
            NewRecord { attempt, origin: origin.id(), lease: Duration::ZERO, ttl: minute, unknown_ttl: minute, head };
        store.claim(RecordId([number; 32]), new).await.unwrap();
    }
    let (metrics, (_stop, shutdown)) = (Metrics::new(), watch::channel(false));
    let _worker = spawn(store.clone(), None, metrics.clone(), Settings::default(), shutdown);
    sleep(Duration::from_millis(100)).await;
    let state = async |number| store.get(RecordId([number; 32])).await.unwrap().unwrap().record.state;
    assert_eq!((state(1).await, state(2).await), (State::Completed, State::Unknown));
    assert!(metrics.encode().contains("oncegate_leases_expired_total 1\n"));
    let shadow = store.get(RecordId([1; 32])).await.unwrap().unwrap();
    assert!(shadow.record.until <= shadow.now.plus(minute), "it ends as it would have");
}

#[tokio::test(start_paused = true)]
async fn a_failure_ends_the_round_not_the_worker() {
    let expire = [Ok(10), Err(ErrorKind::Unavailable), Err(ErrorKind::Unavailable), Ok(2)];
    let running = start(Fake { expire: Mutex::new(expire.into()), ..Fake::default() });
    sleep(Duration::from_millis(2500)).await;
    assert_eq!(running.expires(), 4);
    running.shows("oncegate_leases_expired_total 12");
}

#[tokio::test(start_paused = true)]
async fn a_panic_ends_neither_worker() {
    let running = start(Fake { panics: AtomicUsize::new(1), ..Fake::default() });
    sleep(Duration::from_millis(2500)).await;
    assert_eq!(running.expires(), 3, "once before the panic, at once after the restart, and a second later");
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_both_at_once() {
    let running = start(Fake::default());
    sleep(Duration::from_millis(100)).await;
    running.stop.send(true).unwrap();
    let before = Instant::now();
    running.task.await.unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_goes_is_a_shutdown() {
    let running = start(Fake::default());
    drop(running.stop);
    running.task.await.unwrap();
}
