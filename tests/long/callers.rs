//! Callers that claim and complete new keys, and what they got.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate::idempotency::record::{AttemptToken, RecordId};
use oncegate::store::{Claim, Expiry, NewRecord, OriginId, Settled, Settlement, Store};

/// How many ask at once.
pub(crate) const CALLERS: usize = 64;

/// How many records a large store has. A tenth of them has expired.
pub(crate) fn rows() -> u64 {
    std::env::var("LONG_ROWS").map_or(10_000_000, |text| text.parse().expect("LONG_ROWS is a number"))
}

/// What they write.
#[derive(Clone)]
pub(crate) struct Sizes {
    pub(crate) head: usize,
    pub(crate) answer: usize,
    pub(crate) ttl: Duration,
}

/// What callers got.
pub(crate) struct Rate {
    pub(crate) per_second: f64,
    pub(crate) median: Duration,
    /// The 99th of a hundred.
    pub(crate) slow: Duration,
    pub(crate) slowest: Duration,
}

/// New keys, each claimed and completed, from many callers at once: for so long, and on while `more` says so.
pub(crate) async fn new_keys(
    store: &Arc<dyn Store>,
    sizes: &Sizes,
    measured: Duration,
    more: impl Fn() -> bool + Clone + Send + 'static,
) -> Rate {
    let began = Instant::now();
    let callers = (0..CALLERS).map(|_| {
        let (store, sizes, more) = (store.clone(), sizes.clone(), more.clone());
        tokio::spawn(async move {
            let mut took = Vec::new();
            while began.elapsed() < measured || more() {
                let start = Instant::now();
                new_key(&*store, &sizes).await;
                took.push(start.elapsed());
            }
            took
        })
    });
    let mut took = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        took.extend(caller.await.unwrap());
    }
    let per_second = took.len() as f64 / began.elapsed().as_secs_f64();
    took.sort_unstable();
    Rate { per_second, median: took[took.len() / 2], slow: took[took.len() * 99 / 100], slowest: took[took.len() - 1] }
}

async fn new_key(store: &dyn Store, sizes: &Sizes) {
    let (id, attempt) = claim(store, sizes).await;
    let answer = Bytes::from(vec![0x5a; sizes.answer]);
    let end = Settlement::Complete { answer, expiry: Expiry::FromClaim(sizes.ttl) };
    assert!(matches!(store.settle(id, attempt, end).await.unwrap(), Settled::Done { .. }));
}

/// Claims a new key.
pub(crate) async fn claim(store: &dyn Store, sizes: &Sizes) -> (RecordId, AttemptToken) {
    let (mut id, mut attempt) = ([0; 32], [0; 16]);
    getrandom::fill(&mut id).unwrap();
    getrandom::fill(&mut attempt).unwrap();
    let (id, attempt) = (RecordId(id), AttemptToken(attempt));
    let fresh = NewRecord {
        attempt,
        origin: OriginId(1),
        lease: Duration::from_secs(30),
        ttl: sizes.ttl,
        unknown_ttl: Duration::from_secs(3600),
        head: Bytes::from(vec![0x5a; sizes.head]),
    };
    assert!(matches!(store.claim(id, fresh).await.unwrap(), Claim::Inserted(_)));
    (id, attempt)
}

pub(crate) fn report(what: &str, rate: &Rate) {
    let Rate { per_second, median, slow, slowest } = rate;
    println!("long: {what}: {per_second:.0}/s; p50 {median:.1?}, p99 {slow:.1?}, slowest {slowest:.1?}");
}
