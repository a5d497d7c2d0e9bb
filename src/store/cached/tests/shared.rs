//! With a cache that gates share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::time::{advance, sleep};

use super::memory::until_forgotten;
use super::*;

const SECRETS: [&str; 2] = ["secret", "of the store"];

/// A cache in memory that does as it is told.
#[derive(Default)]
pub(super) struct Shelves {
    pub(super) values: Mutex<HashMap<RecordId, Bytes>>,
    /// It does not answer.
    pub(super) is_hung: AtomicBool,
    /// It says that it fails.
    pub(super) fails: AtomicBool,
    /// How many milliseconds it takes for each batch.
    pub(super) takes: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) questions: AtomicU64,
    told: Mutex<Vec<broadcast::Sender<Removal>>>,
}

#[async_trait]
impl Remote for Shelves {
    async fn carry_out(&self, batch: &[Operation]) -> Result<Vec<Option<Bytes>>, Failure> {
        self.batches.fetch_add(1, Ordering::SeqCst);
        if self.is_hung.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let takes = self.takes.load(Ordering::SeqCst);
        if takes > 0 {
            sleep(Duration::from_millis(takes)).await;
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err(Failure("as it was told".to_owned()));
        }
        let mut found = Vec::new();
        let mut values = self.values.lock().unwrap();
        for operation in batch {
            match operation {
                Operation::Get(id) => {
                    self.questions.fetch_add(1, Ordering::SeqCst);
                    found.push(values.get(id).cloned());
                }
                // What is kept for too long is not to be believed.
                Operation::Put(id, value, _) => drop(values.insert(*id, value.clone())),
                Operation::Drop(id) => drop(values.remove(id)),
                Operation::Forget(id) => {
                    values.remove(id);
                    self.told.lock().unwrap().iter().for_each(|told| drop(told.send(Removal::Of(*id))));
                }
            }
        }
        Ok(found)
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        let (tell, told) = broadcast::channel(16);
        self.told.lock().unwrap().push(tell);
        told
    }
}

/// A gate's store over `inner`, with `shelves` before it.
pub(super) fn gate(
    inner: &Arc<dyn Store>,
    shelves: &Arc<Shelves>,
    time: Timestamp,
) -> (Cached, Arc<Mutex<Vec<Answered>>>) {
    let settings = Settings { max_age: Some(TTL / 2), ..SETTINGS };
    let shared = Shared {
        remote: Arc::clone(shelves) as _,
        secrets: SECRETS.map(|secret| secret.as_bytes().into()),
        time: (time, Instant::now()),
    };
    let told = Arc::<Mutex<Vec<Answered>>>::default();
    let tell = Arc::clone(&told);
    let cached =
        Cached::new(Arc::clone(inner), &settings, Some(shared), move |answered| tell.lock().unwrap().push(answered));
    (cached, told)
}

/// Two gates over one store and one cache, and the store with what can go wrong with it.
pub(super) struct Two {
    pub(super) inner: Arc<Unreliable>,
    pub(super) shelves: Arc<Shelves>,
    pub(super) one: Cached,
    pub(super) other: Cached,
    /// What the other's questions came to.
    pub(super) told: Arc<Mutex<Vec<Answered>>>,
}

pub(super) fn two() -> Two {
    let time = Timestamp(1_700_000_000_000);
    let inner = Arc::new(Unreliable::new(Arc::new(clocked())));
    let (store, shelves): (Arc<dyn Store>, _) = (Arc::clone(&inner) as _, Arc::<Shelves>::default());
    let (one, _) = gate(&store, &shelves, time);
    let (other, told) = gate(&store, &shelves, time);
    Two { inner, shelves, one, other, told }
}

impl Two {
    /// One gate claims and completes a record, and the cache has it.
    pub(super) async fn completed(self) -> Self {
        self.one.claim(ID, fresh(1)).await.unwrap();
        self.one.settle(ID, Attempt([1; 16]), complete("answer")).await.unwrap();
        self.until_written().await;
        assert!(self.shelves.values.lock().unwrap().contains_key(&ID));
        self
    }

    /// What is to be written has been.
    pub(super) async fn until_written(&self) {
        sleep(Duration::from_millis(12)).await;
    }

    /// What the other gate is told, and how often it asked the store for it.
    async fn asked(&self, id: RecordId, fresh: Fresh) -> (Claim, u64) {
        let before = self.inner.calls();
        let claim = self.other.claim(id, fresh).await.unwrap();
        (claim, self.inner.calls() - before)
    }

    pub(super) fn last(&self) -> Answered {
        *self.told.lock().unwrap().last().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut HashMap<RecordId, Bytes>)) {
        change(&mut self.shelves.values.lock().unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn it_keeps_the_contract() {
    contract::run(async || {
        let inner: Arc<dyn Store> = Arc::new(clocked());
        let (cached, _) = gate(&inner, &Arc::default(), Timestamp(1_700_000_000_000));
        Harness::stepped_slowly(cached, |time| Box::pin(advance(time)))
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn another_gate_has_the_answer_without_asking_the_store() {
    let two = two().completed().await;
    let (Claim::Exists { record, now }, 0) = two.asked(ID, fresh(2)).await else { panic!("it asked") };
    assert_eq!((record.attempt, record.answer.as_deref()), (Attempt([1; 16]), Some(&b"answer"[..])));
    assert_eq!(two.last(), Answered::Hit);
    let stands = two.inner.get(ID).await.unwrap().unwrap();
    assert_eq!(record, stands.record);
    assert!(now >= stands.now);
    assert!(two.other.recall(ID).is_some(), "from now on it is in memory");
}

#[tokio::test(start_paused = true)]
async fn what_a_store_had_is_kept_for_the_other_gates() {
    let two = two().completed().await;
    two.change(HashMap::clear);
    let (Claim::Exists { .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("nobody else had it") };
    assert_eq!(two.last(), Answered::Miss);
    two.until_written().await;
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Exists { .. })));
    assert_eq!(two.inner.calls(), 3, "claimed, settled, and asked for once");
}

#[tokio::test(start_paused = true)]
async fn nothing_but_what_a_gate_wrote_for_this_record_is_believed() {
    let another = RecordId([8; 32]);
    let foreign = Seal::new(&["secret", "of another store"]);
    let two = two().completed().await;
    let value = two.shelves.values.lock().unwrap()[&ID].clone();
    let (record, read_at) = Seal::new(&SECRETS).open(ID, &value).unwrap();
    for wrong in [
        Bytes::new(),
        Bytes::from_static(b"junk"),
        value.slice(..value.len() - 1),
        [&value[..], b"x"].concat().into(),
        foreign.close(ID, &record, read_at),
        Seal::new(&["another secret", "of the store"]).close(ID, &record, read_at),
        Seal::new(&SECRETS).close(another, &record, read_at),
    ] {
        two.change(|values| drop(values.insert(ID, wrong)));
        two.other.shelf.forget_all();
        let (Claim::Exists { record: found, .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("it was believed") };
        assert_eq!(found, record);
        assert_eq!(two.last(), Answered::Invalid);
    }
    // A record that nobody has claimed is claimed, whatever stands in the cache for it.
    two.change(|values| drop(values.insert(another, value)));
    assert!(matches!(two.asked(another, fresh(2)).await, (Claim::Inserted(_), 1)));
}

#[tokio::test(start_paused = true)]
async fn what_is_too_old_is_not_believed() {
    let two = two().completed().await;
    advance(TTL / 2 - Duration::from_millis(20)).await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
    advance(Duration::from_millis(20)).await;
    assert!(two.other.recall(ID).is_none(), "as old in memory as where it came from");
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), Answered::Stale);
    // It was read again, and lives until its ttl is over.
    advance(TTL / 2 - Duration::from_millis(100)).await;
    let (Claim::Exists { record, now }, _) = two.asked(ID, fresh(2)).await else { panic!("it stands") };
    assert!(now < record.until);
    advance(Duration::from_millis(100)).await;
    assert!(two.other.recall(ID).is_none());
    let (Claim::Exists { record, now }, 1) = two.asked(ID, fresh(2)).await else { panic!("nobody swept it") };
    assert!(record.until <= now);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_asked_for_again_does_not_turn_back_the_time() {
    let two = two().completed().await;
    let value = two.shelves.values.lock().unwrap()[&ID].clone();
    let another = RecordId([8; 32]);
    let patient = Fresh { lease: 2 * TTL, ..fresh(3) };
    two.inner.script_for(Call::Claim, [Fault::LoseAnswer]);
    two.other.claim(another, patient.clone()).await.unwrap_err();
    advance(TTL).await;
    assert!(matches!(two.other.claim(another, patient).await, Ok(Claim::Inserted(_))), "as it was");
    two.change(|values| drop(values.insert(ID, value)));
    let (Claim::Exists { record, now }, 1) = two.asked(ID, fresh(2)).await else { panic!("it was believed") };
    assert!(record.until <= now);
    assert_eq!(two.last(), Answered::Stale);
}

#[tokio::test(start_paused = true)]
async fn where_the_stores_time_is_not_known_nothing_is_believed() {
    let two = two().completed().await;
    let value = two.shelves.values.lock().unwrap()[&ID].clone();
    advance(CLOCK).await;
    two.change(|values| drop(values.insert(ID, value)));
    two.asked(ID, fresh(2)).await;
    assert_eq!(two.last(), Answered::Stale);
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_is_forgotten_by_all() {
    let two = two().completed().await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
    let value = two.shelves.values.lock().unwrap()[&ID].clone();
    assert!(two.one.remove(ID).await.unwrap());
    assert!(two.one.recall(ID).is_none());
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Inserted(_))), "at once, where it was removed");
    two.until_written().await;
    assert!(two.other.recall(ID).is_none());
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    // A cache that brings it back is not believed by a gate that heard of the purge.
    two.change(|values| drop(values.insert(ID, value)));
    let (Claim::Exists { record, .. }, 1) = two.asked(ID, fresh(2)).await else { panic!("it is claimed") };
    assert_eq!((record.attempt, two.last()), (Attempt([3; 16]), Answered::Stale));
}

/// A value of before a purge is authentic, and somebody may put it back into the cache.
#[tokio::test(start_paused = true)]
async fn an_old_value_is_not_believed_by_the_gate_that_purged_nor_by_the_one_that_ran_since() {
    let two = two().completed().await;
    let old = two.shelves.values.lock().unwrap()[&ID].clone();
    // The other gate does not hear of the purge.
    two.shelves.told.lock().unwrap().clear();
    advance(Duration::from_millis(5)).await;
    assert!(two.one.remove(ID).await.unwrap());
    two.until_written().await;
    let put_back = || two.change(|values| drop(values.insert(ID, old.clone())));
    put_back();
    let first = two.one.claim(ID, fresh(2)).await.unwrap();
    assert!(matches!(first, Claim::Inserted(_)), "the gate that purged: {first:?}");
    two.one.settle(ID, Attempt([2; 16]), End::Release).await.unwrap();
    two.until_written().await;

    two.change(HashMap::clear);
    two.other.claim(ID, fresh(3)).await.unwrap();
    two.other.settle(ID, Attempt([3; 16]), complete("newer")).await.unwrap();
    two.until_written().await;
    two.other.shelf.forget_all();
    let (Claim::Exists { record, .. }, 0) = two.asked(ID, fresh(4)).await else { panic!("its own value is believed") };
    assert_eq!(record.attempt, Attempt([3; 16]));
    for gate in [&two.one, &two.other] {
        put_back();
        gate.shelf.forget_all();
        let Claim::Exists { record, .. } = gate.claim(ID, fresh(4)).await.unwrap() else { panic!("it stands") };
        assert_eq!(record.attempt, Attempt([3; 16]));
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_about_to_be_kept_as_another_gate_removes_it_is_not() {
    let two = two().completed().await;
    two.change(HashMap::clear);
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    // It is to be written soon.
    assert!(two.one.remove(ID).await.unwrap());
    two.until_written().await;
    two.until_written().await;
    assert!(two.shelves.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn answers_are_kept_however_long_only_new_keys_come() {
    let two = two();
    advance(2 * CLOCK).await;
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.one.settle(ID, Attempt([1; 16]), complete("answer")).await.unwrap();
    two.until_written().await;
    assert!(two.shelves.values.lock().unwrap().contains_key(&ID));
    let (_, first) = two.asked(ID, fresh(2)).await;
    assert_eq!((two.last(), first), (Answered::Stale, 1), "it does not know the time");
    two.other.shelf.forget_all();
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_hint_is_believed_for_a_moment_by_the_same_request() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    two.until_written().await;
    let (Claim::Exists { record, .. }, 0) = two.asked(ID, fresh(3)).await else { panic!("it asked") };
    assert_eq!((record.state, record.attempt), (State::InFlight, Attempt([1; 16])));
    assert_eq!(two.last(), Answered::InFlight);
    assert!(two.other.recall(ID).is_none(), "it is no answer");
    let different = Fresh { head: Bytes::from_static(b"different"), ..fresh(4) };
    assert!(matches!(two.asked(ID, different).await, (Claim::Exists { .. }, 1)));
    advance(HINT).await;
    assert!(matches!(two.asked(ID, fresh(3)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), Answered::Stale);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_may_have_happened_is_asked_again_of_the_store() {
    let two = two();
    two.inner.script_for(Call::Claim, [Fault::LoseAnswer]);
    assert!(two.other.claim(ID, fresh(1)).await.is_err());
    // Another gate finds it, and says to all that the key is in flight.
    assert!(matches!(two.one.claim(ID, fresh(2)).await.unwrap(), Claim::Exists { .. }));
    two.until_written().await;
    assert!(two.shelves.values.lock().unwrap().contains_key(&ID));
    assert!(matches!(two.asked(ID, fresh(1)).await, (Claim::Inserted(_), 1)));
    assert!(matches!(two.asked(ID, fresh(3)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_hint_goes_with_the_attempt() {
    let two = two();
    for end in [End::Release, complete("answer")] {
        two.one.claim(ID, fresh(1)).await.unwrap();
        two.asked(ID, fresh(2)).await;
        two.until_written().await;
        assert!(two.shelves.values.lock().unwrap().contains_key(&ID));
        two.one.settle(ID, Attempt([1; 16]), end).await.unwrap();
        two.until_written().await;
        if let Some(value) = two.shelves.values.lock().unwrap().get(&ID) {
            let (record, _) = Seal::new(&SECRETS).open(ID, value).unwrap();
            assert_eq!(record.state, State::Completed);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_hint_does_not_outlive_its_lease() {
    let two = two();
    let short = Fresh { lease: HINT / 2, ..fresh(1) };
    two.one.claim(ID, short).await.unwrap();
    two.asked(ID, fresh(2)).await;
    two.until_written().await;
    advance(HINT / 2).await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 1)));
    assert_eq!(two.last(), Answered::Stale);
}

#[tokio::test(start_paused = true)]
async fn unknown_and_large_records_are_not_kept() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.one.settle(ID, Attempt([1; 16]), End::Hold).await.unwrap();
    two.asked(ID, fresh(2)).await;
    let large = RecordId([8; 32]);
    two.one.claim(large, fresh(1)).await.unwrap();
    let answer = Bytes::from(vec![0; 300 << 10]);
    let end = End::Complete { answer, expiry: crate::store::Expiry::FromClaim(TTL) };
    two.one.settle(large, Attempt([1; 16]), end).await.unwrap();
    two.asked(large, fresh(2)).await;
    two.until_written().await;
    assert!(two.shelves.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_lost_on_its_way_is_kept_once_it_is_known() {
    let two = two();
    two.one.claim(ID, fresh(1)).await.unwrap();
    two.inner.script_for(Call::Settle, [Fault::LoseAnswer]);
    two.one.settle(ID, Attempt([1; 16]), complete("answer")).await.unwrap_err();
    two.until_written().await;
    assert!(two.shelves.values.lock().unwrap().is_empty(), "nobody knows");
    two.one.settle(ID, Attempt([1; 16]), complete("answer")).await.unwrap();
    two.until_written().await;
    assert!(matches!(two.asked(ID, fresh(2)).await, (Claim::Exists { .. }, 0)));
}

#[tokio::test(start_paused = true)]
async fn what_may_have_been_removed_while_the_cache_was_away_is_forgotten_unless_the_store_told() {
    let (memory, shelves) = (Arc::new(clocked()), Arc::<Shelves>::default());
    let inner: Arc<dyn Store> = Arc::clone(&memory) as _;
    let (store, _) = gate(&inner, &shelves, Timestamp(1_700_000_000_000));
    store.claim(ID, fresh(1)).await.unwrap();
    store.settle(ID, Attempt([1; 16]), complete("answer")).await.unwrap();
    let read = async || {
        store.claim(ID, fresh(2)).await.unwrap();
        assert!(store.recall(ID).is_some());
    };
    let cache_tells = |removal| shelves.told.lock().unwrap().iter().for_each(|told| drop(told.send(removal)));

    read().await;
    cache_tells(Removal::Begin);
    until_forgotten(&store).await;
    read().await;
    memory.tell(Removal::Begin);
    until_forgotten(&store).await;
    read().await;
    cache_tells(Removal::End);
    cache_tells(Removal::Begin);
    sleep(Duration::from_millis(1)).await;
    assert!(store.recall(ID).is_some(), "the store has told of all");
    memory.tell(Removal::End);
    sleep(Duration::from_millis(1)).await;
    cache_tells(Removal::End);
    cache_tells(Removal::Begin);
    until_forgotten(&store).await;
}
