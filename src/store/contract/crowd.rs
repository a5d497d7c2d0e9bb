//! Many callers at once, and none.

use futures_util::future::join_all;

use super::*;
use crate::store::{Error, ErrorKind};

pub(super) async fn one_of_many_claims_of_one_id_wins(harness: Harness) {
    let claims = (0..100).map(|number| {
        let store = harness.store.clone();
        tokio::spawn(async move { store.claim(id(1), fresh(number)).await.expect("claim works") })
    });
    let claims = join_all(claims).await.into_iter().map(|claim| claim.expect("no panic")).collect::<Vec<_>>();
    let winner = current(&harness, id(1)).await.attempt;
    let mut inserted = 0;
    for (number, claim) in (0..).zip(claims) {
        match claim {
            Claim::Inserted(_) => {
                inserted += 1;
                assert_eq!(winner, attempt(number));
            }
            Claim::Exists { record, .. } => assert_eq!(record.attempt, winner),
        }
    }
    assert_eq!(inserted, 1);
}

pub(super) async fn one_of_many_supersedes_wins(harness: Harness) {
    let seen = put(&harness, id(1), 200, State::Unknown).await.version();
    let supersedes = (0..100).map(|number| {
        let store = harness.store.clone();
        tokio::spawn(async move { store.supersede(id(1), seen, fresh(number)).await.expect("supersede works") })
    });
    let won = join_all(supersedes).await.into_iter().map(|won| won.expect("no panic")).collect::<Vec<_>>();
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    let winner = won.iter().position(|won| *won).expect("one won");
    assert_eq!(current(&harness, id(1)).await.attempt, attempt(winner as u8));
}

pub(super) async fn every_caller_is_answered(harness: Harness) {
    let attempts = (0..=199).map(|number| {
        let store = harness.store.clone();
        tokio::spawn(async move {
            let claim = store.claim(id(number), fresh(number)).await.expect("claim works");
            assert!(matches!(claim, Claim::Inserted(_)));
            let end = match number % 3 {
                0 => complete("done"),
                1 => Settlement::Release,
                _ => hold(),
            };
            let settled = store.settle(id(number), attempt(number), end).await.expect("settle works");
            assert!(matches!(settled, Settled::Done { .. }));
        })
    });
    join_all(attempts).await.into_iter().for_each(|attempt| attempt.expect("no panic"));
    assert_eq!(harness.store.count().await.expect("count works"), [0, 67, 66]);
    assert_eq!(harness.store.list(Default::default(), None, 1000).await.expect("list works").records.len(), 133);
}

pub(super) async fn a_store_that_closes_finishes_what_it_accepted(harness: Harness) {
    let store = harness.store;
    store.ping().await.expect("ping works");
    let claims = (0..50).map(|number| {
        let store = store.clone();
        tokio::spawn(async move { store.claim(id(number), fresh(number)).await })
    });
    let claims = claims.collect::<Vec<_>>();
    let closing = tokio::time::timeout(Duration::from_secs(30), store.close()).await;
    assert!(closing.is_ok(), "it closes");
    for claim in join_all(claims).await {
        match claim.expect("no panic") {
            Ok(Claim::Inserted(_)) => {}
            Err(Error::Determinate(cause)) => assert_eq!(cause.kind, ErrorKind::Unavailable),
            other => panic!("{other:?}"),
        }
    }
    store.close().await;
    let unavailable = |error: Error| match error {
        Error::Determinate(cause) => assert_eq!(cause.kind, ErrorKind::Unavailable),
        Error::Indeterminate(_) => panic!("nothing happened"),
    };
    unavailable(store.ping().await.expect_err("it is closed"));
    unavailable(store.count().await.expect_err("it is closed"));
    unavailable(store.get(id(1)).await.expect_err("it is closed"));
    unavailable(store.list(Default::default(), None, 1).await.expect_err("it is closed"));
    unavailable(store.claim(id(1), fresh(1)).await.expect_err("it is closed"));
    unavailable(store.settle(id(1), attempt(1), hold()).await.expect_err("it is closed"));
    unavailable(store.sweep(1).await.expect_err("it is closed"));
}
