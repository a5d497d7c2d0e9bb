use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use super::*;
use crate::store::OriginId;
use crate::store::contract::{self, Harness, model};
use crate::store::memory::Memory;

const ID: RecordId = RecordId([1; 32]);
const MINUTE: Duration = Duration::from_secs(60);

fn store() -> Unreliable {
    Unreliable::new(Arc::new(Memory::new()))
}

fn fresh() -> NewRecord {
    let head = Bytes::new();
    NewRecord {
        attempt: AttemptToken([1; 16]),
        origin: OriginId(1),
        lease: MINUTE,
        ttl: MINUTE,
        unknown_ttl: MINUTE,
        head,
    }
}

async fn stands(store: &Unreliable) -> bool {
    store.inner.get(ID).await.unwrap().is_some()
}

/// Whether a call gives no answer within a minute of paused time.
async fn pends<T>(call: impl Future<Output = T>) -> bool {
    tokio::time::timeout(MINUTE, call).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract_without_faults() {
    contract::run(async || {
        let (clock, step) = model::stopped_clock();
        Harness::stepped(Unreliable::new(Arc::new(Memory::with_clock(clock))), step)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn each_fault_is_what_it_says() {
    for (fault, is_done) in [
        (Fault::Refuse, false),
        (Fault::Full, false),
        (Fault::LoseCall, false),
        (Fault::LoseAnswer, true),
        (Fault::Delay(MINUTE / 2), true),
        (Fault::DelayAnswer(MINUTE / 2), true),
        (Fault::Hang, false),
        (Fault::HangAfter, true),
    ] {
        let store = store();
        store.script_for(Operation::Claim, [fault]);
        store.ping().await.unwrap();
        let claim = tokio::time::timeout(MINUTE, store.claim(ID, fresh())).await;
        match (fault, claim) {
            (Fault::Refuse, Ok(Err(Error::Determinate(cause)))) => assert_eq!(cause.kind, ErrorKind::Unavailable),
            (Fault::Full, Ok(Err(Error::Determinate(cause)))) => assert_eq!(cause.kind, ErrorKind::Full),
            (Fault::LoseCall | Fault::LoseAnswer, Ok(Err(Error::Indeterminate(_))))
            | (Fault::Delay(_) | Fault::DelayAnswer(_), Ok(Ok(Claim::Inserted(_))))
            | (Fault::Hang | Fault::HangAfter, Err(_)) => {}
            (_, other) => panic!("{fault:?}: {other:?}"),
        }
        assert_eq!(stands(&store).await, is_done, "{fault:?}");
        // Once is once.
        assert!(matches!(store.claim(ID, fresh()).await.unwrap(), Claim::Inserted(_)));
    }
}

#[tokio::test]
async fn a_store_that_is_away_comes_back() {
    let store = store();
    store.set_away(true);
    assert!(matches!(store.claim(ID, fresh()).await, Err(Error::Determinate(_))));
    assert!(store.ping().await.is_err());
    store.set_away(false);
    store.ping().await.unwrap();
    assert!(!stands(&store).await);
}

#[tokio::test(start_paused = true)]
async fn it_stops_at_a_call_and_for_good() {
    for side in [Side::Before, Side::After] {
        let store = store();
        store.ping().await.unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let listener = stopped.clone();
        store.stop_at(2, side, move || listener.store(true, Ordering::SeqCst));
        store.ping().await.unwrap();
        assert!(!store.is_stopped() && !stopped.load(Ordering::SeqCst));
        assert!(pends(store.claim(ID, fresh())).await);
        assert!(store.is_stopped() && stopped.load(Ordering::SeqCst));
        assert_eq!(stands(&store).await, side == Side::After);
        assert!(pends(store.ping()).await);
        assert_eq!(store.calls(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn chance_follows_its_seed() {
    let rates = Rates { refuse: 100, lose_answer: 100, lose_call: 100, delay: 100, longest: MINUTE };
    let play = async |seed| {
        let store = store();
        store.seed(seed, Some(rates));
        let mut outcomes = Vec::new();
        for _ in 0..1000 {
            let started = tokio::time::Instant::now();
            let outcome = store.ping().await.map_err(|error| error.to_string());
            outcomes.push((outcome, started.elapsed()));
        }
        store.seed(0, None);
        store.ping().await.unwrap();
        outcomes
    };
    let outcomes = play(1).await;
    assert_eq!(outcomes, play(1).await);
    assert_ne!(outcomes, play(2).await);
    let failed = outcomes.iter().filter(|(outcome, _)| outcome.is_err()).count();
    let delayed = outcomes.iter().filter(|(_, took)| *took > Duration::ZERO).count();
    assert!((200..400).contains(&failed) && (50..200).contains(&delayed), "{failed} {delayed}");
}
