//! What requests of routes that only observe would have got, counted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus::{IntCounter, IntCounterVec};
use serde::{Serialize, Serializer};

use super::outcome::Outcome;
use super::{rfc3339, wall_clock};
use crate::idempotency::record::Timestamp;

/// How many keys that ran more than once a route shows.
const EXAMPLES: usize = 10;

/// The counts of one route, since its gate began to count.
pub struct Observed {
    route: Box<str>,
    since: Timestamp,
    would: IntCounterVec,
    dropped: IntCounter,
    counts: Mutex<Counts>,
}

struct Counts {
    would: [u64; Outcome::ALL.len()],
    dropped: u64,
    duplicates: u64,
    run_again: u64,
    differed: u64,
    examples: VecDeque<Example>,
}

impl Counts {
    const NONE: Self = Self {
        would: [0; Outcome::ALL.len()],
        dropped: 0,
        duplicates: 0,
        run_again: 0,
        differed: 0,
        examples: VecDeque::new(),
    };
}

/// A key that ran more than once.
#[derive(Clone, Debug, Serialize)]
pub struct Example {
    /// The key, shortened.
    pub key: String,
    /// The method of its requests.
    pub method: String,
    /// Their path, without the query.
    pub path: String,
    /// When the first of them came; RFC 3339.
    #[serde(serialize_with = "as_rfc3339")]
    pub first_at: Timestamp,
    /// When the one came that ran again.
    #[serde(serialize_with = "as_rfc3339")]
    pub again_at: Timestamp,
    /// What that would have got.
    pub would: &'static str,
    /// Whether its answer was another than the first.
    pub answer_differs: bool,
}

/// The report on one route.
#[derive(Clone, Debug, Serialize)]
pub struct ObservedReport {
    /// Its name.
    pub route: String,
    /// When the gate began to count; RFC 3339.
    pub since: String,
    /// Requests.
    pub requests: u64,
    /// How many of them were a retry of one whose record would have stood.
    pub duplicates: u64,
    /// How many keys the upstream ran more than once.
    pub keys_run_again: u64,
    /// How many of these had another answer the second time.
    pub keys_answered_differently: u64,
    /// What the requests would have got, by the word for it.
    pub would: serde_json::Map<String, serde_json::Value>,
    /// Requests of which nobody knows what they would have got: too many came at once, or the store was away.
    pub dropped: u64,
    /// The newest keys that ran more than once.
    pub examples: Vec<Example>,
}

impl Observed {
    pub(super) fn new(route: &str, would: IntCounterVec, dropped: IntCounter) -> Arc<Self> {
        Arc::new(Self { route: route.into(), since: wall_clock(), would, dropped, counts: Mutex::new(Counts::NONE) })
    }

    /// A request would have got this.
    pub fn would(&self, outcome: Outcome, is_duplicate: bool) {
        self.would.with_label_values(&[&*self.route, outcome.as_str()]).inc();
        let mut counts = self.counts();
        counts.would[outcome.index()] += 1;
        counts.duplicates += u64::from(is_duplicate);
    }

    /// A key ran more than once.
    pub fn ran_again(&self, example: Example) {
        let mut counts = self.counts();
        counts.run_again += 1;
        counts.differed += u64::from(example.answer_differs);
        counts.examples.truncate(EXAMPLES - 1);
        counts.examples.push_front(example);
    }

    /// It is not known what a request would have got.
    pub fn dropped(&self) {
        self.dropped.inc();
        self.counts().dropped += 1;
    }

    pub(super) fn report(&self) -> ObservedReport {
        let counts = self.counts();
        let would = Outcome::ALL.into_iter().zip(counts.would).filter(|(_, count)| *count > 0);
        ObservedReport {
            route: self.route.to_string(),
            since: rfc3339(self.since),
            requests: counts.would.iter().sum::<u64>() + counts.dropped,
            duplicates: counts.duplicates,
            keys_run_again: counts.run_again,
            keys_answered_differently: counts.differed,
            would: would.map(|(outcome, count)| (outcome.as_str().to_owned(), count.into())).collect(),
            dropped: counts.dropped,
            examples: counts.examples.iter().cloned().collect(),
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // No operation under this lock can leave the counts inconsistent.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn as_rfc3339<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&rfc3339(*time))
}
