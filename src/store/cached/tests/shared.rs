//! With a cache that gates share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::time::{advance, sleep};

use super::memory::until_forgotten;
use super::*;

const SECRETS: [&str; 2] = ["secret", "of the store"];

/// A remote cache in memory with injected faults.
#[derive(Default)]
pub(super) struct FakeRemote {
    pub(super) values: Mutex<HashMap<RecordId, Bytes>>,
    /// It does not answer.
    pub(super) is_hung: AtomicBool,
    /// It says that it fails.
    pub(super) fails: AtomicBool,
    /// How many milliseconds it takes for each batch.
    pub(super) takes: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) questions: AtomicU64,
    subscribers: Mutex<Vec<broadcast::Sender<Removal>>>,
}

#[async_trait]
impl RemoteCache for FakeRemote {
    async fn execute(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
        self.batches.fetch_add(1, Ordering::SeqCst);
        if self.is_hung.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let takes = self.takes.load(Ordering::SeqCst);
        if takes > 0 {
            sleep(Duration::from_millis(takes)).await;
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err(RemoteError("injected failure".to_owned()));
        }
        let mut found = Vec::new();
        let mut values = self.values.lock().unwrap();
        for operation in batch {
            match operation {
                CacheOperation::Get(id) => {
                    self.questions.fetch_add(1, Ordering::SeqCst);
                    found.push(values.get(id).cloned());
                }
                // Keeps values for too long on purpose: they must not be trusted.
                CacheOperation::Put(id, value, _) => drop(values.insert(*id, value.clone())),
                CacheOperation::Delete(id) => drop(values.remove(id)),
                CacheOperation::Invalidate(id) => {
                    values.remove(id);
                    self.subscribers
                        .lock()
                        .unwrap()
                        .iter()
                        .for_each(|subscriber| drop(subscriber.send(Removal::Of(*id))));
                }
            }
        }
        Ok(found)
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        let (sender, receiver) = broadcast::channel(16);
        self.subscribers.lock().unwrap().push(sender);
        receiver
    }
}

/// A gate's store over `inner`, with `remotes` before it.
pub(super) fn gate(
    inner: &Arc<dyn Store>,
    remotes: &Arc<FakeRemote>,
    time: Timestamp,
) -> (Cached, Arc<Mutex<Vec<CacheResult>>>) {
    let settings = Settings { max_age: Some(TTL / 2), ..SETTINGS };
    let shared = SharedSettings {
        remote: Arc::clone(remotes) as _,
        secrets: SECRETS.map(|secret| secret.as_bytes().into()),
        other_secrets: Vec::new(),
        time: (time, Instant::now()),
    };
    let reported = Arc::<Mutex<Vec<CacheResult>>>::default();
    let tell = Arc::clone(&reported);
    let cached =
        Cached::new(Arc::clone(inner), &settings, Some(shared), move |answered| tell.lock().unwrap().push(answered));
    (cached, reported)
}

/// Two gates over one store and one cache, and the store with what can go wrong with it.
pub(super) struct TwoGates {
    pub(super) inner: Arc<Unreliable>,
    pub(super) remotes: Arc<FakeRemote>,
    pub(super) one: Cached,
    pub(super) other: Cached,
    /// What the other's questions came to.
    pub(super) reported: Arc<Mutex<Vec<CacheResult>>>,
}

pub(super) fn two() -> TwoGates {
    let time = Timestamp(1_700_000_000_000);
    let inner = Arc::new(Unreliable::new(Arc::new(clocked())));
    let (store, remotes): (Arc<dyn Store>, _) = (Arc::clone(&inner) as _, Arc::<FakeRemote>::default());
    let (one, _) = gate(&store, &remotes, time);
    let (other, reported) = gate(&store, &remotes, time);
    TwoGates { inner, remotes, one, other, reported }
}

impl TwoGates {
    /// One gate claims and completes a record, and the cache has it.
    pub(super) async fn completed(self) -> Self {
        self.one.claim(ID, fresh(1)).await.unwrap();
        self.one.settle(ID, FIRST, complete("answer")).await.unwrap();
        self.until_written().await;
        assert!(self.remotes.values.lock().unwrap().contains_key(&ID));
        self
    }

    /// What is to be written has been.
    pub(super) async fn until_written(&self) {
        sleep(Duration::from_millis(12)).await;
    }

    /// The claim of the other gate, and how often it asked the store.
    async fn asked(&self, id: RecordId, fresh: NewRecord) -> (Claim, u64) {
        let before = self.inner.calls();
        let claim = self.other.claim(id, fresh).await.unwrap();
        (claim, self.inner.calls() - before)
    }

    pub(super) fn last(&self) -> CacheResult {
        *self.reported.lock().unwrap().last().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut HashMap<RecordId, Bytes>)) {
        change(&mut self.remotes.values.lock().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn it_keeps_the_contract() {
    contract::run(async || {
        let inner: Arc<dyn Store> = Arc::new(clocked());
        let (cached, _) = gate(&inner, &Arc::default(), Timestamp(1_700_000_000_000));
        Harness::stepped_slowly(cached, |time| Box::pin(advance(time))).above_seal()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn another_gate_has_the_answer_without_asking_the_store() {
    let two = two().completed().await;
    let (Claim::Exists { record, now }, 0) = two.asked(ID, fresh(2)).await else { panic!("it asked") };
    assert_eq!((record.attempt, record.answer.as_deref()), (FIRST, Some(&b"answer"[..])));
    assert_eq!(two.last(), CacheResult::Hit);
    let stands = two.inner.get(ID).await.unwrap().unwrap();
    assert_eq!(record, stands.record);
    assert!(now >= stands.now);
    assert!(two.other.recall(ID).is_some(), "from now on it is in memory");
}

#[tokio::test(start_paused = true)]
async fn a_record_from_the_store_is_cached_for_the_other_gates() {
    let two = two().completed().await;
    two.change(HashMap::clear);
    let (Claim::Exists { .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("no other gate had it") };
    assert_eq!(two.last(), CacheResult::Miss);
    two.until_written().await;
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Exists { .. })));
    assert_eq!(two.inner.calls(), 3, "claimed, settled, and asked for once");
}

#[tokio::test(start_paused = true)]
async fn only_values_that_a_gate_wrote_for_this_record_are_trusted() {
    let another = RecordId([8; 32]);
    let foreign = CacheAuthenticator::new(&["secret", "of another store"]);
    let two = two().completed().await;
    let value = two.remotes.values.lock().unwrap()[&ID].clone();
    let (record, read_at) = CacheAuthenticator::new(&SECRETS).open(ID, &value).unwrap();
    for wrong in [
        Bytes::new(),
        Bytes::from_static(b"junk"),
        value.slice(..value.len() - 1),
        [&value[..], b"x"].concat().into(),
        foreign.close(ID, &record, read_at),
        CacheAuthenticator::new(&["another secret", "of the store"]).close(ID, &record, read_at),
        CacheAuthenticator::new(&SECRETS).close(another, &record, read_at),
    ] {
        two.change(|values| drop(values.insert(ID, wrong)));
        two.other.local.forget_all();
        let (Claim::Exists { record: found, .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("it was believed") };
        assert_eq!(found, record);
        assert_eq!(two.last(), CacheResult::Invalid);
    }
    // An unclaimed record is claimed, whatever the cache holds for it.
    two.change(|values| drop(values.insert(another, value)));
    assert!(matches!(two.asked(another, fresh(2)).await, (Claim::Inserted(_), 1)));
}

#[tokio::test(start_paused = true)]
async fn values_beyond_the_maximum_age_are_not_trusted() {
    let two = two().completed().await;
    advance(TTL / 2 - Duration::from_millis(20)).await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
    advance(Duration::from_millis(20)).await;
    assert!(two.other.recall(ID).is_none(), "as old in memory as where it came from");
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), CacheResult::Stale);
    // It was read again, and lives until its ttl is over.
    advance(TTL / 2 - Duration::from_millis(100)).await;
    let (Claim::Exists { record, now }, _) = two.asked(ID, fresh(2)).await else { panic!("it stands") };
    assert!(now < record.until);
    advance(Duration::from_millis(100)).await;
    assert!(two.other.recall(ID).is_none());
    let (Claim::Exists { record, now }, 1) = two.asked(ID, fresh(2)).await else { panic!("it was not swept") };
    assert!(record.until <= now);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_asked_for_again_does_not_turn_back_the_time() {
    let two = two().completed().await;
    let value = two.remotes.values.lock().unwrap()[&ID].clone();
    let another = RecordId([8; 32]);
    let patient = NewRecord { lease: 2 * TTL, ..fresh(3) };
    two.inner.script_for(Call::Claim, [Fault::LoseAnswer]);
    two.other.claim(another, patient.clone()).await.unwrap_err();
    advance(TTL).await;
    assert!(matches!(two.other.claim(another, patient).await, Ok(Claim::Inserted(_))), "as it was");
    two.change(|values| drop(values.insert(ID, value)));
    let (Claim::Exists { record, now }, 1) = two.asked(ID, fresh(2)).await else { panic!("it was believed") };
    assert!(record.until <= now);
    assert_eq!(two.last(), CacheResult::Stale);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_trusted_without_the_stores_time() {
    let two = two().completed().await;
    let value = two.remotes.values.lock().unwrap()[&ID].clone();
    advance(MAX_TIME_AGE).await;
    two.change(|values| drop(values.insert(ID, value)));
    two.asked(ID, fresh(2)).await;
    assert_eq!(two.last(), CacheResult::Stale);
}

#[tokio::test(start_paused = true)]
async fn a_removal_invalidates_in_all_gates() {
    let two = two().completed().await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
    let value = two.remotes.values.lock().unwrap()[&ID].clone();
    assert!(two.one.remove(ID, FIRST).await.unwrap());
    assert!(two.one.recall(ID).is_none());
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Inserted(_))), "at once, where it was removed");
    two.until_written().await;
    assert!(two.other.recall(ID).is_none());
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    // A cache that brings it back is not believed by a gate that heard of the purge.
    two.change(|values| drop(values.insert(ID, value)));
    let (Claim::Exists { record, .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("it is claimed") };
    assert_eq!((record.attempt, two.last()), (AttemptToken([3; 16]), CacheResult::Stale));
}

/// A value from before a purge is authentic, and an attacker may put it back into the cache.
#[tokio::test(start_paused = true)]
async fn an_old_value_is_not_trusted_after_a_purge_or_a_new_attempt() {
    let two = two().completed().await;
    let old = two.remotes.values.lock().unwrap()[&ID].clone();
    // The other gate does not hear of the purge.
    two.remotes.subscribers.lock().unwrap().clear();
    advance(Duration::from_millis(5)).await;
    assert!(two.one.remove(ID, FIRST).await.unwrap());
    two.until_written().await;
    let put_back = || two.change(|values| drop(values.insert(ID, old.clone())));
    put_back();
    let first = two.one.claim(ID, fresh(2)).await.unwrap();
    assert!(matches!(first, Claim::Inserted(_)), "the gate that purged: {first:?}");
    two.one.settle(ID, AttemptToken([2; 16]), Settlement::Release).await.unwrap();
    two.until_written().await;

    two.change(HashMap::clear);
    two.other.claim(ID, fresh(3)).await.unwrap();
    two.other.settle(ID, AttemptToken([3; 16]), complete("newer")).await.unwrap();
    two.until_written().await;
    two.other.local.forget_all();
    let (Claim::Exists { record, .. }, 0) = two.asked(ID, fresh(4)).await else { panic!("its own value is believed") };
    assert_eq!(record.attempt, AttemptToken([3; 16]));
    for gate in [&two.one, &two.other] {
        put_back();
        gate.local.forget_all();
        let Claim::Exists { record, .. } = gate.claim(ID, fresh(4)).await.unwrap() else { panic!("it stands") };
        assert_eq!(record.attempt, AttemptToken([3; 16]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_removed_while_being_cached_is_not_cached() {
    let two = two().completed().await;
    two.change(HashMap::clear);
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    // It is to be written soon.
    assert!(two.one.remove(ID, FIRST).await.unwrap());
    two.until_written().await;
    two.until_written().await;
    assert!(two.remotes.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn answers_are_cached_however_long_only_new_keys_come() {
    let two = two();
    advance(2 * MAX_TIME_AGE).await;
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.one.settle(ID, FIRST, complete("answer")).await.unwrap();
    two.until_written().await;
    assert!(two.remotes.values.lock().unwrap().contains_key(&ID));
    let (_, first) = two.asked(ID, fresh(2)).await;
    assert_eq!((two.last(), first), (CacheResult::Stale, 1), "it does not know the time");
    two.other.local.forget_all();
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_hint_is_trusted_briefly_by_the_same_request() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    two.until_written().await;
    let (Claim::Exists { record, .. }, 0) = two.asked(ID, fresh(3)).await else { panic!("it asked") };
    assert_eq!((record.state, record.attempt), (State::InFlight, FIRST));
    assert_eq!(two.last(), CacheResult::InFlight);
    assert!(two.other.recall(ID).is_none(), "it is no answer");
    let different = NewRecord { head: Bytes::from_static(b"different"), ..fresh(4) };
    assert!(matches!(two.asked(ID, different).await, (Claim::Exists { .. }, 1)));
    advance(HINT_TTL).await;
    assert!(matches!(two.asked(ID, fresh(3)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), CacheResult::Stale);
}

#[tokio::test(start_paused = true)]
async fn a_retry_of_an_uncertain_claim_asks_the_store() {
    let two = two();
    two.inner.script_for(Call::Claim, [Fault::LoseAnswer]);
    assert!(two.other.claim(ID, fresh(1)).await.is_err());
    // Another gate finds it, and says to all that the key is in flight.
    assert!(matches!(two.one.claim(ID, fresh(2)).await.unwrap(), Claim::Exists { .. }));
    two.until_written().await;
    assert!(two.remotes.values.lock().unwrap().contains_key(&ID));
    assert!(matches!(two.asked(ID, fresh(1)).await, (Claim::Inserted(_), 1)));
    assert!(matches!(two.asked(ID, fresh(3)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_hint_goes_with_the_attempt() {
    let two = two();
    for end in [Settlement::Release, complete("answer")] {
        two.one.claim(ID, fresh(1)).await.unwrap();
        two.asked(ID, fresh(2)).await;
        two.until_written().await;
        assert!(two.remotes.values.lock().unwrap().contains_key(&ID));
        two.one.settle(ID, FIRST, end).await.unwrap();
        two.until_written().await;
        if let Some(value) = two.remotes.values.lock().unwrap().get(&ID) {
            let (record, _) = CacheAuthenticator::new(&SECRETS).open(ID, value).unwrap();
            assert_eq!(record.state, State::Completed);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_hint_does_not_outlive_its_lease() {
    let two = two();
    let short = NewRecord { lease: HINT_TTL / 2, ..fresh(1) };
    two.one.claim(ID, short).await.unwrap();
    two.asked(ID, fresh(2)).await;
    two.until_written().await;
    advance(HINT_TTL / 2).await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), CacheResult::Stale);
}

#[tokio::test(start_paused = true)]
async fn unknown_and_large_records_are_not_kept() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.one.settle(ID, FIRST, Settlement::Hold { cause: Bytes::from_static(b"cause") }).await.unwrap();
    two.asked(ID, fresh(2)).await;
    let large = RecordId([8; 32]);
    two.one.claim(large, fresh(1)).await.unwrap();
    let answer = Bytes::from(vec![0; 300 << 10]);
    let end = Settlement::Complete { answer, expiry: crate::store::Expiry::FromClaim(TTL) };
    two.one.settle(large, FIRST, end).await.unwrap();
    two.asked(large, fresh(2)).await;
    two.until_written().await;
    assert!(two.remotes.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_answer_with_a_lost_acknowledgement_is_cached_once_known() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.inner.script_for(Call::Settle, [Fault::LoseAnswer]);
    two.one.settle(ID, FIRST, complete("answer")).await.unwrap_err();
    two.until_written().await;
    assert!(two.remotes.values.lock().unwrap().is_empty(), "the outcome is unknown");
    two.one.settle(ID, FIRST, complete("answer")).await.unwrap();
    two.until_written().await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_restarted_cache_feed_invalidates_unless_the_store_published() {
    let (memory, remotes) = (Arc::new(clocked()), Arc::<FakeRemote>::default());
    let inner: Arc<dyn Store> = Arc::clone(&memory) as _;
    let (store, _) = gate(&inner, &remotes, Timestamp(1_700_000_000_000));
    store.claim(ID, fresh(1)).await.unwrap();
    store.settle(ID, FIRST, complete("answer")).await.unwrap();
    let read = async || {
        store.claim(ID, fresh(2)).await.unwrap();
        assert!(store.recall(ID).is_some());
    };
    let cache_publishes =
        |removal| remotes.subscribers.lock().unwrap().iter().for_each(|subscriber| drop(subscriber.send(removal)));

    read().await;
    cache_publishes(Removal::Subscribed);
    until_forgotten(&store).await;
    read().await;
    memory.publish(Removal::Subscribed);
    until_forgotten(&store).await;
    read().await;
    cache_publishes(Removal::Lost);
    cache_publishes(Removal::Subscribed);
    sleep(Duration::from_millis(1)).await;
    assert!(store.recall(ID).is_some(), "the store has published all removals");
    memory.publish(Removal::Lost);
    sleep(Duration::from_millis(1)).await;
    cache_publishes(Removal::Lost);
    cache_publishes(Removal::Subscribed);
    until_forgotten(&store).await;
}
