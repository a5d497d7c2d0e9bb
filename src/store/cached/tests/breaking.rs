//! A cache that fails, or has nothing.

use std::sync::atomic::Ordering;

use tokio::time::sleep;

use super::shared::{Two, two};
use super::*;

fn id(number: u32) -> RecordId {
    let mut id = [1; 32];
    id[..4].copy_from_slice(&number.to_be_bytes());
    RecordId(id)
}

/// The other gate claims new keys, and says how long each took.
async fn claims(two: &Two, numbers: std::ops::Range<u32>) -> Vec<Duration> {
    let mut took = Vec::new();
    for number in numbers {
        let began = Instant::now();
        assert!(matches!(two.other.claim(id(number), fresh(1)).await, Ok(Claim::Inserted(_))));
        took.push(began.elapsed());
    }
    took
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_hangs_is_waited_for_a_few_times_and_comes_back_by_itself() {
    let two = two().completed().await;
    two.shelves.is_hung.store(true, Ordering::SeqCst);
    let took = claims(&two, 0..50).await;
    assert!(took.iter().all(|took| *took < Duration::from_millis(5)), "{took:?}");
    assert!(took[10..].iter().all(Duration::is_zero), "{took:?}");
    assert_eq!(two.last(), Answered::Away);
    // It is looked after, but seldom.
    let before = two.shelves.batches.load(Ordering::SeqCst);
    sleep(Duration::from_secs(60)).await;
    let looks = two.shelves.batches.load(Ordering::SeqCst) - before;
    assert!((30..120).contains(&looks), "{looks}");
    two.shelves.is_hung.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    claims(&two, 100..101).await;
    assert_eq!(two.last(), Answered::Miss);
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_fails_is_left_alone_as_well() {
    let two = two().completed().await;
    two.shelves.fails.store(true, Ordering::SeqCst);
    claims(&two, 0..10).await;
    assert_eq!(two.last(), Answered::Away);
    two.shelves.fails.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(two.other.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
    assert_eq!(two.last(), Answered::Hit);
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_while_it_is_away_is_forgotten_when_it_is_back() {
    let two = two().completed().await;
    two.shelves.fails.store(true, Ordering::SeqCst);
    claims(&two, 0..10).await;
    assert!(two.one.remove(ID).await.unwrap());
    assert!(two.other.remove(id(1)).await.unwrap());
    sleep(Duration::from_secs(3)).await;
    assert!(two.shelves.values.lock().unwrap().contains_key(&ID));
    two.shelves.fails.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    assert!(!two.shelves.values.lock().unwrap().contains_key(&ID));
    assert!(matches!(two.one.claim(ID, fresh(3)).await, Ok(Claim::Inserted(_))));
}

#[tokio::test(start_paused = true)]
async fn new_keys_do_not_ask_a_cache_that_never_has_them() {
    let two = two();
    claims(&two, 0..1000).await;
    two.until_written().await;
    let before = two.shelves.questions.load(Ordering::SeqCst);
    claims(&two, 1000..2000).await;
    two.until_written().await;
    let asked = two.shelves.questions.load(Ordering::SeqCst) - before;
    assert!((50..80).contains(&asked), "{asked}");
    assert_eq!(two.last(), Answered::NotAsked);
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_has_what_is_asked_for_is_asked_first_again() {
    let two = two();
    claims(&two, 0..1000).await;
    for number in 2000..2350 {
        two.one.claim(id(number), fresh(1)).await.unwrap();
        two.one.settle(id(number), Attempt([1; 16]), complete("answer")).await.unwrap();
    }
    two.until_written().await;
    for number in 2000..2350 {
        assert!(matches!(two.other.claim(id(number), fresh(2)).await, Ok(Claim::Exists { .. })));
        two.until_written().await;
    }
    assert_eq!(two.last(), Answered::Hit);
    let told = two.told.lock().unwrap();
    let hits = told.iter().filter(|answered| **answered == Answered::Hit).count();
    assert!(hits > 150, "{hits} of 350");
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_bounded() {
    let two = two();
    let way = &two.one.shared.as_ref().unwrap().way;
    let value = Bytes::from(vec![0; 100 << 10]);
    // Nothing else runs meanwhile.
    (0..2000).for_each(|number| way.put(id(number), value.clone(), TTL));
    let (operations, bytes) = way.waiting();
    assert!((16 << 20..17 << 20).contains(&bytes), "{operations} operations of {bytes} bytes");
    (0..20_000).for_each(|number| way.put(id(number), Bytes::new(), TTL));
    (0..20_000).for_each(|number| way.forget(id(number)));
    assert_eq!(way.waiting(), (8192, 0));
    two.until_written().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(way.waiting(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_is_slow_is_not_waited_for_again_and_again() {
    let two = two().completed().await;
    two.shelves.takes.store(10, Ordering::SeqCst);
    let took = claims(&two, 0..1000).await;
    assert!(took.iter().all(|took| *took < Duration::from_millis(5)), "{took:?}");
    assert!(took[300..].iter().all(Duration::is_zero), "{took:?}");
    two.shelves.takes.store(0, Ordering::SeqCst);
    two.until_written().await;
    assert!(matches!(two.one.claim(ID, fresh(2)).await, Ok(Claim::Exists { .. })));
}

#[tokio::test(start_paused = true)]
async fn one_that_goes_and_comes_is_told_of_seldom() {
    let two = two().completed().await;
    let mut batches = Vec::new();
    for _ in 0..100 {
        two.shelves.fails.store(true, Ordering::SeqCst);
        drop(two.one.shared.as_ref().unwrap().way.get(ID).await);
        two.shelves.fails.store(false, Ordering::SeqCst);
        let began = Instant::now();
        while two.one.shared.as_ref().unwrap().way.get(ID).await == remote::Found::Away {
            sleep(Duration::from_millis(1)).await;
        }
        batches.push(began.elapsed());
    }
    assert!(batches[0] < Duration::from_millis(100) && batches[99] > Duration::from_millis(900), "{batches:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_before_the_end_is_forgotten_by_then() {
    let two = two().completed().await;
    assert!(two.one.remove(ID).await.unwrap());
    two.one.close().await;
    assert!(two.shelves.values.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_twice_is_not_believed_between() {
    let two = two().completed().await;
    let way = &two.one.shared.as_ref().unwrap().way;
    way.forget(ID);
    // More than one batch carries.
    (0..600).for_each(|number| way.put(id(number), Bytes::new(), TTL));
    way.put(ID, Bytes::from_static(b"value"), TTL);
    way.forget(ID);
    let seen = Arc::clone(&two.shelves);
    seen.takes.store(1, Ordering::SeqCst);
    while way.waiting().0 > 0 {
        assert_eq!(way.get(ID).await, remote::Found::Nothing);
        sleep(Duration::from_micros(500)).await;
    }
}
