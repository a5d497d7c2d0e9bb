//! Random histories: at each step, every store must reply as a plain map does.
//!
//! The map is written from the documentation of [`Store`], not from the rules that stores share. A history that fails
//! is shrunk to a short one.

mod reference;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};

use self::reference::{Reference, Reply};
use super::*;
use crate::idempotency::record::Version;
use crate::store::clock::Clock;
use crate::store::{Filter, IdPrefix, LeaseRenewal, NamespaceRuleSet, Since};

/// How many ids and attempts histories know: few, so that they meet.
const IDS: u8 = 4;
const ATTEMPTS: u8 = 3;

/// One call, calls at once, time that passes, or a new start.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Wait(u64),
    /// Remembers the current versions, for calls that act on stale ones.
    Look,
    Call(Call),
    /// Calls at once. Each has an id of its own: what they do does not depend on their order.
    Together(Vec<Call>),
    /// The store is closed and opened again, where it can be.
    Reopen,
}

#[derive(Clone, Debug)]
pub(crate) enum Call {
    Claim(u8, ClaimSpec),
    Supersede {
        id: u8,
        by: ClaimSpec,
        is_stale: bool,
    },
    /// By this attempt, or by the one that the record belongs to.
    Settle(u8, Option<u8>, Settlement),
    Renew(Vec<(u8, u8)>, u64),
    ExpireLeases(usize),
    Sweep(usize),
    Remove(u8, Option<u8>),
    List(Filter, usize),
    Scan(Filter, Option<u8>, usize),
    Adopt(Vec<u8>, bool),
}

/// A claim: by which attempt, and how long its lease and its time as an unknown record are, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimSpec {
    by: u8,
    lease: u64,
    unknown_ttl: u64,
}

/// Opens a store again.
pub(crate) type Reopen = Box<dyn Fn() -> BoxFuture<'static, Arc<dyn Store>>>;

/// A store under test.
pub(crate) struct Subject {
    pub(crate) harness: Harness,
    /// Opens it again after it was closed; without it, it forgets everything then.
    pub(crate) reopen: Option<Reopen>,
}

/// Plays `cases` histories, each on a fresh store whose clock stands until it is stepped.
///
/// # Panics
/// If a store replies differently; prints the shortest history found.
pub(crate) fn check<M, F>(cases: u32, make: M)
where
    M: Fn() -> F,
    F: Future<Output = Subject>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Short histories are worth a wait.
    let config =
        ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 20_000, ..ProptestConfig::default() };
    let played = TestRunner::new(config).run(&history(), |history| {
        runtime.block_on(async {
            let mut subject = make().await;
            let played = play(&mut subject, history).await;
            subject.harness.store.close().await;
            played
        })
    });
    if let Err(error) = played {
        panic!("{error}");
    }
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

fn history() -> impl Strategy<Value = Vec<Step>> {
    let (ids, attempts) = (|| 0..IDS, || 0..ATTEMPTS);
    let state = prop_oneof![Just(None), (0..3_usize).prop_map(|at| Some(State::ALL[at]))];
    let service = prop::option::of(prop::sample::select(&["shop", "desk"][..]));
    let age = || prop::option::of((0..40_u64).prop_map(Duration::from_millis));
    let prefix = prop::option::of((ids(), prop::sample::select(&[0, 1, 2, 3, 16, 64][..])));
    let filter = (state, prop::option::of(0..3_u8), age(), age(), prefix, service);
    let filter = filter.prop_map(|(state, route, older_than, since, prefix, service)| Filter {
        state,
        route: route.map(|route| route.to_string()),
        older_than,
        since: since.map(Since::Ago),
        prefix: prefix.map(|(of, digits)| IdPrefix::parse(&id(of).to_string()[..digits]).expect("digits")),
        service: service.map(Arc::from),
    });
    let limit = || prop_oneof![0..3_usize, Just(100)];
    let step = prop_oneof![
        4 => (1..40_u64).prop_map(Step::Wait),
        16 => ids().prop_flat_map(on_one).prop_map(Step::Call),
        2 => Just(()).prop_flat_map(|()| (0..IDS).map(on_one).collect::<Vec<_>>())
            .prop_shuffle().prop_map(Step::Together),
        2 => vec((ids(), attempts()), 0..5).prop_flat_map(|held| (Just(held), 0..50_u64))
            .prop_map(|(held, lease)| Step::Call(Call::Renew(held, lease))),
        2 => limit().prop_map(|limit| Step::Call(Call::ExpireLeases(limit))),
        2 => limit().prop_map(|limit| Step::Call(Call::Sweep(limit))),
        2 => (filter.clone(), prop::option::of(ids()), 1..4_usize)
            .prop_map(|(filter, after, limit)| Step::Call(Call::Scan(filter, after, limit))),
        2 => (filter, 1..4_usize).prop_map(|(filter, limit)| Step::Call(Call::List(filter, limit))),
        1 => (vec(0..3_u8, 0..4), any::<bool>())
            .prop_map(|(digests, accept)| Step::Call(Call::Adopt(digests, accept))),
        3 => Just(Step::Look),
        1 => Just(Step::Reopen),
    ];
    vec(step, 1..60)
}

/// A call on one id.
fn on_one(id: u8) -> impl Strategy<Value = Call> {
    let novel = || {
        (0..ATTEMPTS, 0..40_u64, 0..60_u64).prop_map(|(by, lease, unknown_ttl)| ClaimSpec { by, lease, unknown_ttl })
    };
    let expiry = prop_oneof![
        (0..50_u64).prop_map(|millis| Expiry::FromClaim(Duration::from_millis(millis))),
        (0..50_u64).prop_map(|millis| Expiry::FromNow(Duration::from_millis(millis))),
    ];
    let end = prop_oneof![
        3 => (0..3_usize, expiry).prop_map(|(length, expiry)| Settlement::Complete {
            answer: Bytes::from(vec![7; length]),
            expiry,
        }),
        1 => Just(Settlement::Release),
        2 => Just(hold()),
    ];
    prop_oneof![
        6 => novel().prop_map(move |novel| Call::Claim(id, novel)),
        3 => (novel(), any::<bool>()).prop_map(move |(by, is_stale)| Call::Supersede { id, by, is_stale }),
        6 => (prop::option::of(0..ATTEMPTS), end).prop_map(move |(by, end)| Call::Settle(id, by, end)),
        1 => prop::option::weighted(0.2, 0..ATTEMPTS).prop_map(move |by| Call::Remove(id, by)),
    ]
}

/// Plays a history on a store and on the map.
async fn play(subject: &mut Subject, history: Vec<Step>) -> Result<(), TestCaseError> {
    let mut reference = Reference::new(now(&subject.harness).await, subject.harness.is_shared);
    // The versions that a caller may have seen earlier.
    let mut stale = [None; IDS as usize];
    for (at, step) in history.into_iter().enumerate() {
        let context = || format!("step {at}: {step:?}");
        match &step {
            Step::Wait(millis) => {
                let time = Duration::from_millis(*millis);
                subject.harness.advance(time).await;
                reference.now = reference.now.plus(time);
            }
            Step::Look => stale = reference.versions(),
            Step::Call(call) => {
                let seen = reference.versions();
                let found = ask(&*subject.harness.store, call, &seen, &stale).await;
                prop_assert_eq!(found, reference.apply(call, &seen, &stale), "{}", context());
                reference.learn(call, &*subject.harness.store).await?;
            }
            Step::Together(calls) => {
                let seen = reference.versions();
                let store = &*subject.harness.store;
                let found = join_all(calls.iter().map(|call| ask(store, call, &seen, &stale))).await;
                for (call, found) in calls.iter().zip(found) {
                    prop_assert_eq!(found, reference.apply(call, &seen, &stale), "{:?} in {}", call, context());
                }
            }
            Step::Reopen => {
                if let Some(reopen) = &subject.reopen {
                    subject.harness.store.close().await;
                    subject.harness.store = reopen().await;
                    reference.reopen();
                }
            }
        }
        reference.compare(&*subject.harness.store, &context()).await?;
    }
    Ok(())
}

/// The versions of the ids at some time.
type Versions = [Option<Version>; IDS as usize];

async fn ask(store: &dyn Store, call: &Call, seen: &Versions, stale: &Versions) -> Reply {
    match call.clone() {
        Call::Claim(of, by) => match store.claim(id(of), by.fresh()).await.expect("claim works") {
            Claim::Inserted(at) => Reply::Inserted(at),
            Claim::Exists { record, now } => Reply::Exists(record, now),
        },
        Call::Supersede { id: of, by, is_stale } => match version_of(of, is_stale, seen, stale) {
            Some(version) => Reply::Yes(store.supersede(id(of), version, by.fresh()).await.expect("supersede works")),
            None => Reply::Nothing,
        },
        Call::Settle(of, by, end) => {
            match store.settle(id(of), attempt_of(of, by, seen), end).await.expect("settle works") {
                Settled::Done { until } => Reply::Done(until),
                Settled::NotCurrent { record } => Reply::Fenced(record),
            }
        }
        Call::Renew(held, lease) => {
            let lease = Duration::from_millis(lease);
            let held = held.into_iter().map(|(of, by)| LeaseRenewal { id: id(of), attempt: attempt(by), lease });
            store.renew(held.collect()).await.expect("renew works");
            Reply::Nothing
        }
        Call::ExpireLeases(limit) => Reply::Count(store.expire_leases(limit).await.expect("expire_leases works").len()),
        Call::Sweep(limit) => Reply::Count(store.sweep(limit).await.expect("sweep works")),
        Call::Remove(of, by) => Reply::Yes(store.remove(id(of), attempt_of(of, by, seen)).await.expect("remove works")),
        Call::List(filter, limit) => Reply::RecordEntry(pages(store, &filter, limit).await),
        Call::Scan(filter, after, limit) => Reply::RecordEntry(chunks(store, &filter, after.map(id), limit).await),
        Call::Adopt(digests, accept_change) => {
            let (origins, rules) = rules(&digests);
            Reply::Changes(store.adopt(origins, rules, accept_change).await.expect("adopt works"))
        }
    }
}

/// Every record that passes, from pages of at most `limit`.
async fn pages(store: &dyn Store, filter: &Filter, limit: usize) -> Vec<(RecordId, Option<Origin>, Record)> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = store.list(filter.clone(), after, limit).await.expect("list works");
        assert!(page.records.len() <= limit, "a page holds more than {limit}");
        found.extend(page.records.into_iter().map(|listed| (listed.id, listed.origin, listed.record)));
        let Some(next) = page.next else { return found };
        assert!(after != Some(next), "the pages do not go on");
        after = Some(next);
    }
}

/// Every record that passes, from chunks of at most `limit`.
async fn chunks(
    store: &dyn Store,
    filter: &Filter,
    mut after: Option<RecordId>,
    limit: usize,
) -> Vec<(RecordId, Option<Origin>, Record)> {
    let mut found = Vec::new();
    loop {
        let chunk = store.scan(filter.clone(), after, limit).await.expect("scan works");
        assert!(chunk.records.len() <= limit, "a chunk holds more than {limit}");
        found.extend(chunk.records.into_iter().map(|listed| (listed.id, listed.origin, listed.record)));
        let Some(next) = chunk.next else { return found };
        assert!(after.is_none_or(|after| after < next), "the chunks do not go on");
        after = Some(next);
    }
}

/// The store's time.
async fn now(harness: &Harness) -> Timestamp {
    let at = claim(harness, id(0xff), fresh(0xff)).await;
    assert!(harness.store.remove(id(0xff), attempt(0xff)).await.expect("remove works"));
    at
}

fn version_of(id: u8, is_stale: bool, seen: &Versions, stale: &Versions) -> Option<Version> {
    if is_stale { stale[usize::from(id)] } else { seen[usize::from(id)] }
}

fn attempt_of(id: u8, by: Option<u8>, seen: &Versions) -> AttemptToken {
    let own = || seen[usize::from(id)].map_or(attempt(0), |version| version.attempt);
    by.map_or_else(own, attempt)
}

impl ClaimSpec {
    fn fresh(self) -> NewRecord {
        NewRecord {
            lease: Duration::from_millis(self.lease),
            ttl: Duration::from_millis(self.unknown_ttl),
            unknown_ttl: Duration::from_millis(self.unknown_ttl),
            origin: origin_of(self.by).id(),
            ..fresh(self.by)
        }
    }
}

/// Where the claims of an attempt come from: different namespaces, not all of one service.
fn origin_of(attempt: u8) -> Origin {
    let service = if attempt == 1 { "desk" } else { "shop" };
    Origin { service: service.into(), namespace: attempt.to_string().into(), ..origin(&attempt.to_string()) }
}

/// The first origins, and a rule for each with this digest.
fn rules(digests: &[u8]) -> (Vec<Origin>, Vec<NamespaceRuleSet>) {
    let origins: Vec<_> = (0..).take(digests.len()).map(origin_of).collect();
    let rules = origins.iter().zip(digests).map(|(Origin { service, namespace, .. }, digest)| NamespaceRuleSet {
        service: service.clone(),
        namespace: namespace.clone(),
        digest: [*digest; 32],
        others: Vec::new(),
        description: Some(format!("rules {digest}").into()),
    });
    let rules = rules.collect();
    (origins, rules)
}
