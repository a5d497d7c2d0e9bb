//! Random histories: every store says what the one in memory says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::store::clock::Clock;
use crate::store::memory::Memory;
use crate::store::{Filter, Held, Identity};

/// One call, or time that passes.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Wait(u64),
    Claim(u8, u8),
    Supersede { id: u8, by: u8, is_stale: bool },
    Settle(u8, u8, End),
    Renew(Vec<(u8, u8)>),
    ExpireLeases(usize),
    Sweep(usize),
    Remove(u8),
    List(Filter, Option<u8>, usize),
    Adopt(Vec<u8>, bool),
}

/// Some steps on few ids by few attempts, so that they meet.
pub(crate) fn history() -> impl Strategy<Value = Vec<Step>> {
    let (ids, attempts) = (|| 0..4_u8, || 0..3_u8);
    let expiry = prop_oneof![
        (0..50_u64).prop_map(|millis| Expiry::FromClaim(Duration::from_millis(millis))),
        (0..50_u64).prop_map(|millis| Expiry::FromNow(Duration::from_millis(millis))),
    ];
    let end = prop_oneof![
        3 => (0..3_u8, expiry).prop_map(|(byte, expiry)| End::Complete { answer: Bytes::from(vec![byte]), expiry }),
        1 => Just(End::Release),
        1 => Just(End::Hold),
    ];
    let state = prop_oneof![Just(None), (0..3_usize).prop_map(|at| Some(State::ALL[at]))];
    let filter = (state, prop::option::of(0..3_u8), prop::option::of(0..40_u64), prop::option::of(ids()));
    let filter = filter.prop_map(|(state, route, age, prefix)| Filter {
        state,
        route: route.map(|route| route.to_string()),
        older_than: age.map(Duration::from_millis),
        prefix: prefix.map(|number| id(number).0[..8].try_into().expect("eight bytes")),
        service: None,
    });
    let step = prop_oneof![
        3 => (1..40_u64).prop_map(Step::Wait),
        6 => (ids(), attempts()).prop_map(|(id, attempt)| Step::Claim(id, attempt)),
        3 => (ids(), attempts(), any::<bool>()).prop_map(|(id, by, is_stale)| Step::Supersede { id, by, is_stale }),
        6 => (ids(), attempts(), end).prop_map(|(id, attempt, end)| Step::Settle(id, attempt, end)),
        2 => vec((ids(), attempts()), 0..5).prop_map(Step::Renew),
        2 => few_or_all().prop_map(Step::ExpireLeases),
        2 => few_or_all().prop_map(Step::Sweep),
        1 => ids().prop_map(Step::Remove),
        2 => (filter, prop::option::of(ids()), 1..4_usize).prop_map(|(filter, after, limit)| Step::List(filter, after, limit)),
        1 => (vec(0..3_u8, 0..4), any::<bool>()).prop_map(|(digests, accept)| Step::Adopt(digests, accept)),
    ];
    vec(step, 1..60)
}

/// Which records a limit leaves out is not said, so it leaves out none or all.
fn few_or_all() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 3 => Just(100)]
}

/// A clock that stands until it is stepped.
pub(crate) fn stopped_clock() -> (Clock, impl Fn(Duration) + Clone + Send + Sync + 'static) {
    let time = Arc::new(AtomicU64::new(1_700_000_000_000));
    let read = time.clone();
    let clock: Clock = Arc::new(move || Timestamp(read.load(Ordering::SeqCst)));
    (clock, move |duration: Duration| {
        time.fetch_add(u64::try_from(duration.as_millis()).expect("a short time"), Ordering::SeqCst);
    })
}

/// Plays a history on a store and on one in memory, which must say the same at each step.
pub(crate) async fn agree(history: Vec<Step>, make: impl FnOnce(Clock) -> Arc<dyn Store>) {
    let (clock, step) = stopped_clock();
    let stores: [Arc<dyn Store>; 2] = [Arc::new(Memory::with_clock(clock.clone())), make(clock)];
    let mut seen = [None; 4];
    for (at, one) in history.into_iter().enumerate() {
        if let Step::Wait(millis) = one {
            step(Duration::from_millis(millis));
            continue;
        }
        let expected = play(&*stores[0], &one, &seen).await;
        let found = play(&*stores[1], &one, &seen).await;
        assert_eq!(found, expected, "step {at}: {one:?}");
        if at % 3 == 0 {
            seen = versions(&*stores[0]).await;
        }
        assert_eq!(everything(&*stores[1]).await, everything(&*stores[0]).await, "after step {at}: {one:?}");
    }
}

type Seen = [Option<crate::idempotency::record::Version>; 4];

async fn versions(store: &dyn Store) -> Seen {
    let mut versions = [None; 4];
    for (number, version) in (0..).zip(&mut versions) {
        *version = store.get(id(number)).await.expect("get works").map(|listed| listed.record.version());
    }
    versions
}

async fn play(store: &dyn Store, step: &Step, seen: &Seen) -> String {
    let fresh = |number: u8| Fresh {
        lease: Duration::from_millis(20 + u64::from(number)),
        unknown_ttl: Duration::from_millis(30),
        origin: one_of_three(number).id(),
        ..fresh(number)
    };
    match step.clone() {
        Step::Wait(_) => String::new(),
        Step::Claim(of, by) => format!("{:?}", store.claim(id(of), fresh(by)).await),
        Step::Supersede { id: of, by, is_stale } => {
            let current = store.get(id(of)).await.expect("get works").map(|listed| listed.record.version());
            match if is_stale { seen[usize::from(of)] } else { current } {
                Some(version) => format!("{:?}", store.supersede(id(of), version, fresh(by)).await),
                None => String::new(),
            }
        }
        Step::Settle(of, by, end) => format!("{:?}", store.settle(id(of), attempt(by), end).await),
        Step::Renew(held) => {
            let lease = Duration::from_millis(25);
            let held = held.into_iter().map(|(of, by)| Held { id: id(of), attempt: attempt(by), lease });
            format!("{:?}", store.renew(held.collect()).await)
        }
        Step::ExpireLeases(limit) => format!("{:?}", store.expire_leases(limit).await),
        Step::Sweep(limit) => format!("{:?}", store.sweep(limit).await),
        Step::Remove(of) => format!("{:?}", store.remove(id(of)).await),
        Step::List(filter, after, limit) => format!("{:?}", store.list(filter, after.map(id), limit).await),
        Step::Adopt(digests, accept_change) => {
            let origins = (0..).take(digests.len()).map(one_of_three).collect::<Vec<_>>();
            let rules = origins.iter().zip(digests).map(|(Origin { service, namespace, .. }, digest)| Identity {
                service: service.clone(),
                namespace: namespace.clone(),
                digest: [digest; 32],
            });
            let rules = rules.collect();
            format!("{:?}", store.adopt(origins, rules, accept_change).await)
        }
    }
}

/// Different namespaces, not all of one service.
fn one_of_three(number: u8) -> Origin {
    let service = if number == 1 { "desk" } else { "shop" };
    Origin { service: service.into(), namespace: number.to_string().into(), ..origin(&number.to_string()) }
}

/// All that can be seen, attempts included, which `Debug` hides.
async fn everything(store: &dyn Store) -> String {
    let mut all = format!("{:?}", store.count().await);
    for number in 0..4 {
        let listed = store.get(id(number)).await.expect("get works");
        let attempt = listed.as_ref().map(|listed| listed.record.attempt.expose());
        all += &format!("{listed:?} {attempt:?}\n");
    }
    all
}
