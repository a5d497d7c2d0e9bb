//! A cache that fails, or has nothing.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use tokio::time::sleep;

use super::shared::{TwoGates, two};
use super::*;

fn id(number: u32) -> RecordId {
    let mut id = [1; 32];
    id[..4].copy_from_slice(&number.to_be_bytes());
    RecordId(id)
}

/// The other gate claims new keys, and says how long each took.
async fn claims(two: &TwoGates, numbers: std::ops::Range<u32>) -> Vec<Duration> {
    let mut took = Vec::new();
    for number in numbers {
        let began = Instant::now();
        assert!(matches!(two.other.claim(id(number), fresh(1)).await, Ok(Claim::Inserted(_))));
        took.push(began.elapsed());
    }
    took
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_hangs_times_out_a_few_times_and_recovers() {
    let two = two().completed().await;
    two.remotes.is_hung.store(true, Ordering::SeqCst);
    let took = claims(&two, 0..50).await;
    assert!(took.iter().all(|took| *took < Duration::from_millis(5)), "{took:?}");
    assert!(took[10..].iter().all(Duration::is_zero), "{took:?}");
    assert_eq!(two.last(), CacheResult::Away);
    // It is looked after, but seldom.
    let before = two.remotes.batches.load(Ordering::SeqCst);
    sleep(Duration::from_secs(60)).await;
    let looks = two.remotes.batches.load(Ordering::SeqCst) - before;
    assert!((30..120).contains(&looks), "{looks}");
    two.remotes.is_hung.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    claims(&two, 100..101).await;
    assert_eq!(two.last(), CacheResult::Miss);
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_fails_is_not_asked() {
    let two = two().completed().await;
    two.remotes.fails.store(true, Ordering::SeqCst);
    claims(&two, 0..10).await;
    assert_eq!(two.last(), CacheResult::Away);
    two.remotes.fails.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(two.other.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
    assert_eq!(two.last(), CacheResult::Hit);
}

#[tokio::test(start_paused = true)]
async fn removals_while_it_is_down_are_invalidated_when_it_is_back() {
    let two = two().completed().await;
    two.remotes.fails.store(true, Ordering::SeqCst);
    claims(&two, 0..10).await;
    assert!(two.one.remove(ID, FIRST).await.unwrap());
    assert!(two.other.remove(id(1), FIRST).await.unwrap());
    sleep(Duration::from_secs(3)).await;
    assert!(two.remotes.values.lock().unwrap().contains_key(&ID));
    two.remotes.fails.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    assert!(!two.remotes.values.lock().unwrap().contains_key(&ID));
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Inserted(_))));
}

#[tokio::test(start_paused = true)]
async fn new_keys_do_not_ask_a_cache_with_a_low_hit_rate() {
    let two = two();
    claims(&two, 0..1000).await;
    two.until_written().await;
    let before = two.remotes.questions.load(Ordering::SeqCst);
    claims(&two, 1000..2000).await;
    two.until_written().await;
    let asked = two.remotes.questions.load(Ordering::SeqCst) - before;
    assert!((50..80).contains(&asked), "{asked}");
    assert_eq!(two.last(), CacheResult::NotAsked);
}

#[tokio::test(start_paused = true)]
async fn a_cache_with_a_high_hit_rate_is_asked_first_again() {
    let two = two();
    claims(&two, 0..1000).await;
    for number in 2000..2350 {
        two.one.claim(id(number), fresh(1)).await.unwrap();
        two.one.settle(id(number), FIRST, complete("answer")).await.unwrap();
    }
    two.until_written().await;
    for number in 2000..2350 {
        assert!(matches!(two.other.claim(id(number), fresh(2)).await, Ok(Claim::Exists { .. })));
        two.until_written().await;
    }
    assert_eq!(two.last(), CacheResult::Hit);
    let reported = two.reported.lock().unwrap();
    let hits = reported.iter().filter(|answered| **answered == CacheResult::Hit).count();
    assert!(hits > 150, "{hits} of 350");
}

#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded() {
    let two = two();
    let client = &two.one.shared.as_ref().unwrap().client;
    let value = Bytes::from(vec![0; 100 << 10]);
    // Nothing else runs meanwhile.
    (0..2000).for_each(|number| client.put(id(number), value.clone(), TTL));
    let (operations, bytes) = client.waiting();
    assert!((16 << 20..17 << 20).contains(&bytes), "{operations} operations of {bytes} bytes");
    (0..20_000).for_each(|number| client.put(id(number), Bytes::new(), TTL));
    (0..20_000).for_each(|number| client.invalidate(id(number)));
    assert_eq!(client.waiting(), (8192, 0));
    two.until_written().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(client.waiting(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_slow_cache_does_not_delay_every_request() {
    let two = two().completed().await;
    two.remotes.takes.store(10, Ordering::SeqCst);
    let took = claims(&two, 0..1000).await;
    assert!(took.iter().all(|took| *took < Duration::from_millis(5)), "{took:?}");
    assert!(took[300..].iter().all(Duration::is_zero), "{took:?}");
    two.remotes.takes.store(0, Ordering::SeqCst);
    two.until_written().await;
    assert!(matches!(two.one.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_flapping_cache_is_logged_seldom() {
    let two = two().completed().await;
    let (mut batches, mut logged) = (Vec::new(), BTreeSet::new());
    for _ in 0..100 {
        two.remotes.fails.store(true, Ordering::SeqCst);
        drop(two.one.shared.as_ref().unwrap().client.get(ID).await);
        logged.extend(two.one.shared.as_ref().unwrap().client.reported_at());
        two.remotes.fails.store(false, Ordering::SeqCst);
        let began = Instant::now();
        while two.one.shared.as_ref().unwrap().client.get(ID).await == remote::Lookup::Away {
            sleep(Duration::from_millis(1)).await;
        }
        batches.push(began.elapsed());
    }
    assert!(batches[0] < Duration::from_millis(100) && batches[99] > Duration::from_millis(900), "{batches:?}");
    let minutes = batches.iter().sum::<Duration>().as_secs() as usize / 60;
    assert!((1..=minutes + 1).contains(&logged.len()), "{logged:?} in {minutes} minutes");
    // An outage that lasts is in the log, however soon it came after another.
    two.remotes.fails.store(true, Ordering::SeqCst);
    drop(two.one.shared.as_ref().unwrap().client.get(ID).await);
    sleep(Duration::from_secs(61)).await;
    assert!(logged.insert(two.one.shared.as_ref().unwrap().client.reported_at().unwrap()));
}

#[tokio::test(start_paused = true)]
async fn removals_before_close_are_invalidated_by_then() {
    let two = two().completed().await;
    assert!(two.one.remove(ID, FIRST).await.unwrap());
    two.one.close().await;
    assert!(two.remotes.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_value_is_not_trusted_between_two_removals() {
    let two = two().completed().await;
    let client = &two.one.shared.as_ref().unwrap().client;
    client.invalidate(ID);
    // More than one batch carries.
    (0..600).for_each(|number| client.put(id(number), Bytes::new(), TTL));
    client.put(ID, Bytes::from_static(b"value"), TTL);
    client.invalidate(ID);
    let seen = Arc::clone(&two.remotes);
    seen.takes.store(1, Ordering::SeqCst);
    while client.waiting().0 > 0 {
        assert_eq!(client.get(ID).await, remote::Lookup::Nothing);
        sleep(Duration::from_micros(500)).await;
    }
}
