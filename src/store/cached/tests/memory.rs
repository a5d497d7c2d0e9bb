//! The memory of one process.

use super::*;

fn alone(inner: Arc<dyn Store>) -> Cached {
    Cached::new(inner, &SETTINGS, None, |_| {})
}

#[tokio::test(start_paused = true)]
async fn a_record_whose_answer_was_late_does_not_outlive_its_ttl() {
    let began = Instant::now();
    let memory = Memory::with_clock(Arc::new(move || Timestamp(0).plus(began.elapsed())));
    let inner = Arc::new(Unreliable::new(Arc::new(memory)));
    let recent = alone(Arc::clone(&inner) as _);
    recent.claim(ID, fresh(1)).await.unwrap();
    let end = Settlement::Complete { answer: Bytes::new(), expiry: crate::store::Expiry::FromClaim(TTL) };
    recent.settle(ID, FIRST, end).await.unwrap();

    inner.script_for(Call::Claim, [Fault::DelayAnswer(TTL / 2)]);
    assert!(matches!(recent.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
    assert!(recent.recall(ID).is_some());
    tokio::time::sleep(TTL / 2).await;
    assert!(recent.recall(ID).is_none());
}

/// With a completed record that was read once.
async fn warm() -> Cached {
    let store = alone(Arc::new(Memory::new()));
    store.claim(ID, fresh(1)).await.unwrap();
    let end =
        Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry: crate::store::Expiry::FromClaim(TTL) };
    store.settle(ID, FIRST, end).await.unwrap();
    assert!(store.recall(ID).is_none(), "it has not been read yet");
    let Claim::Exists { .. } = store.claim(ID, fresh(2)).await.unwrap() else { panic!("claimed twice") };
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    contract::run(async || {
        let (clock, step) = model::stopped_clock();
        Harness::stepped(alone(Arc::new(Memory::with_clock(clock))), step).above_seal()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_record_is_recalled_until_it_expires() {
    let store = warm().await;
    let (record, now) = store.recall(ID).unwrap();
    assert_eq!(record.answer.as_deref(), Some(&b"answer"[..]));
    tokio::time::advance(TTL - Duration::from_secs(1)).await;
    let (_, later) = store.recall(ID).unwrap();
    assert!(later >= now.plus(TTL - Duration::from_secs(1)), "its time goes on");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(store.recall(ID).is_none());
}

/// A reload may bring its key.
#[tokio::test]
async fn a_record_that_was_not_decrypted_is_not_recalled() {
    let store = alone(Arc::new(Memory::new()));
    store.claim(ID, fresh(1)).await.unwrap();
    let end = Settlement::Complete {
        answer: Bytes::from_static(b"\x01\x01 is sealed"),
        expiry: crate::store::Expiry::FromClaim(TTL),
    };
    store.settle(ID, FIRST, end).await.unwrap();
    let Claim::Exists { .. } = store.claim(ID, fresh(2)).await.unwrap() else { panic!("claimed twice") };
    assert!(store.recall(ID).is_none());
}

#[tokio::test]
async fn a_removed_record_is_not_recalled() {
    let store = warm().await;
    assert!(store.remove(ID, FIRST).await.unwrap());
    assert!(store.recall(ID).is_none());
}

#[tokio::test]
async fn a_read_before_a_removal_is_not_cached_after_it() {
    let store = warm().await;
    let (record, read_at) = store.recall(ID).unwrap();
    let removals = store.local.counted();
    store.remove(ID, FIRST).await.unwrap();
    store.local.keep(ID, CacheEntry { record, read_at, asked: Instant::now() }, removals);
    assert!(store.recall(ID).is_none());
}

/// In front of a store that others write to, with a completed record that was read once.
async fn warm_and_shared() -> (Cached, Arc<Memory>) {
    let shared = Arc::new(Memory::new());
    let store = Cached::new(Arc::clone(&shared) as _, &Settings { max_age: Some(TTL / 2), ..SETTINGS }, None, |_| {});
    store.claim(ID, fresh(1)).await.unwrap();
    let end =
        Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry: crate::store::Expiry::FromClaim(TTL) };
    store.settle(ID, FIRST, end).await.unwrap();
    store.claim(ID, fresh(2)).await.unwrap();
    assert!(store.recall(ID).is_some());
    (store, shared)
}

pub(super) async fn until_forgotten(store: &Cached) {
    let forgotten = async {
        while store.recall(ID).is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TTL / 4, forgotten).await.expect("it was published");
}

#[tokio::test(start_paused = true)]
async fn records_of_a_shared_store_are_trusted_for_a_limited_time() {
    let (store, _shared) = warm_and_shared().await;
    tokio::time::advance(TTL / 2 - Duration::from_millis(1)).await;
    assert!(store.recall(ID).is_some());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(store.recall(ID).is_none());
    assert!(matches!(store.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
    assert!(store.recall(ID).is_some(), "it was read again");
}

async fn others_remove(shared: &Memory, id: RecordId) {
    shared.claim(id, fresh(1)).await.unwrap();
    assert!(shared.remove(id, FIRST).await.unwrap());
}

#[tokio::test]
async fn a_published_removal_invalidates() {
    let (store, shared) = warm_and_shared().await;
    others_remove(&shared, RecordId([8; 32])).await;
    tokio::task::yield_now().await;
    assert!(store.recall(ID).is_some(), "another record");
    others_remove(&shared, ID).await;
    until_forgotten(&store).await;
}

#[tokio::test]
async fn a_restarted_removal_feed_invalidates_everything() {
    let (store, shared) = warm_and_shared().await;
    shared.publish(Removal::Lost);
    tokio::task::yield_now().await;
    assert!(store.recall(ID).is_some(), "it is believed for a while");
    shared.publish(Removal::Subscribed);
    until_forgotten(&store).await;
}

#[tokio::test]
async fn missed_removals_invalidate_everything() {
    let (store, shared) = warm_and_shared().await;
    // More than wait to be heard of.
    for _ in 0..5000 {
        others_remove(&shared, RecordId([8; 32])).await;
    }
    until_forgotten(&store).await;
}

#[tokio::test]
async fn in_flight_and_large_records_are_not_cached() {
    let store = alone(Arc::new(Memory::new()));
    store.claim(ID, fresh(1)).await.unwrap();
    store.claim(ID, fresh(2)).await.unwrap();
    assert!(store.recall(ID).is_none());
    let answer = Bytes::from(vec![0; 300 << 10]);
    store
        .settle(ID, FIRST, Settlement::Complete { answer, expiry: crate::store::Expiry::FromClaim(TTL) })
        .await
        .unwrap();
    store.claim(ID, fresh(2)).await.unwrap();
    assert!(store.recall(ID).is_none());
}

#[tokio::test]
async fn a_million_distinct_replays_stay_within_bounds() {
    let settings = Settings { most_entries: 500, most_bytes: 1 << 20, max_age: None };
    for (replays, size, most) in [(1_000_000_u64, 10, 500), (100_000, 20_000, 52)] {
        let local = LocalTier::new(&settings);
        let answer = Some(Bytes::from(vec![0; size]));
        for number in 0..replays {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&number.to_be_bytes());
            let (claimed_at, until) = (Timestamp(0), Timestamp(1 << 40));
            let (attempt, head, answer) = (FIRST, Bytes::new(), answer.clone());
            let record = Record { attempt, state: State::Completed, claimed_at, until, head, answer };
            local.keep(RecordId(id), CacheEntry { record, read_at: Timestamp(0), asked: Instant::now() }, 0);
            if number % 1000 == 0 {
                let (entries, bytes) = local.load();
                assert!(entries <= most && bytes <= 1 << 20, "{entries} of {bytes} bytes");
            }
        }
        assert!(local.load().0 > most / 2, "it keeps what it has room for");
    }
}
