//! What requests of routes that only observe would have got, counted.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use prometheus::{IntCounter, IntCounterVec};
use schemars::JsonSchema;
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
    /// Looked up with the first of each.
    would: [OnceLock<IntCounter>; Outcome::ALL.len()],
    dropped: [OnceLock<IntCounter>; Dropped::ALL.len()],
    families: (IntCounterVec, IntCounterVec),
    counts: Mutex<Counts>,
}

/// Why it is not known what a request would have got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// `[limits] max_observing` was reached.
    Limit,
    /// The request's body is too large to be compared, found no memory, or had not come whole when the upstream answered.
    Body,
    /// The store failed or did not answer in time.
    Store,
}

impl Dropped {
    const ALL: [Self; 3] = [Self::Limit, Self::Body, Self::Store];

    /// The word for it: the label `reason` of `oncegate_observed_dropped_total`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Body => "body",
            Self::Store => "store",
        }
    }
}

struct Counts {
    would: [u64; Outcome::ALL.len()],
    dropped: [u64; Dropped::ALL.len()],
    duplicates: u64,
    run_again: u64,
    differed: u64,
    examples: VecDeque<Example>,
}

impl Counts {
    const NONE: Self = Self {
        would: [0; Outcome::ALL.len()],
        dropped: [0; Dropped::ALL.len()],
        duplicates: 0,
        run_again: 0,
        differed: 0,
        examples: VecDeque::new(),
    };
}

/// A key that ran more than once.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "ObservedExample")]
pub struct Example {
    /// The key, shortened; nothing for a viewer.
    pub key: Option<String>,
    /// The method of its requests.
    pub method: String,
    /// Their path, without the query.
    pub path: String,
    /// When the first of them came; RFC 3339.
    #[serde(serialize_with = "as_rfc3339")]
    #[schemars(with = "String")]
    pub first_at: Timestamp,
    /// When the one came that ran again.
    #[serde(serialize_with = "as_rfc3339")]
    #[schemars(with = "String")]
    pub again_at: Timestamp,
    /// What that would have got.
    #[serde(rename = "would")]
    pub outcome: &'static str,
    /// Whether its answer was another than the first.
    pub answer_differs: bool,
}

/// How many, by a word.
type Words = BTreeMap<&'static str, u64>;

/// The report on one route.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "ObservedRoute")]
pub struct ObservedReport {
    /// Its name.
    pub route: String,
    /// When the gate began to count; RFC 3339.
    #[serde(serialize_with = "as_rfc3339")]
    #[schemars(with = "String")]
    pub since: Timestamp,
    /// Requests.
    pub requests: u64,
    /// How many of them were a retry of one whose record would have stood.
    pub duplicates: u64,
    /// How many keys the upstream ran more than once.
    pub keys_run_again: u64,
    /// How many of these had another answer the second time.
    pub keys_answered_differently: u64,
    /// What the requests would have got, by the word for it.
    pub would: Words,
    /// Requests of which it is not known what they would have got, by why.
    pub dropped: Words,
    /// The newest keys that ran more than once.
    pub examples: Vec<Example>,
}

impl Observed {
    pub(super) fn new(route: &str, would: IntCounterVec, dropped: IntCounterVec) -> Arc<Self> {
        Arc::new(Self {
            route: route.into(),
            since: wall_clock(),
            would: std::array::from_fn(|_| OnceLock::new()),
            dropped: std::array::from_fn(|_| OnceLock::new()),
            families: (would, dropped),
            counts: Mutex::new(Counts::NONE),
        })
    }

    /// Shows counters of these outcomes, and of all reasons not to know one, at 0 before there are any.
    pub fn expect(&self, outcomes: impl IntoIterator<Item = Outcome>) {
        for outcome in outcomes {
            self.families.0.with_label_values(&[&*self.route, outcome.as_str()]);
        }
        for why in Dropped::ALL {
            self.families.1.with_label_values(&[&*self.route, why.as_str()]);
        }
    }

    /// A request would have got this.
    pub fn would(&self, outcome: Outcome, is_duplicate: bool) {
        let labels = [&*self.route, outcome.as_str()];
        self.would[outcome.index()].get_or_init(|| self.families.0.with_label_values(&labels)).inc();
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
    pub fn dropped(&self, why: Dropped) {
        let labels = [&*self.route, why.as_str()];
        self.dropped[why as usize].get_or_init(|| self.families.1.with_label_values(&labels)).inc();
        self.counts().dropped[why as usize] += 1;
    }

    pub(super) fn report(&self) -> ObservedReport {
        let counts = self.counts();
        let would = Outcome::ALL.map(Outcome::as_str).into_iter().zip(counts.would);
        let dropped = Dropped::ALL.map(Dropped::as_str).into_iter().zip(counts.dropped);
        ObservedReport {
            route: self.route.to_string(),
            since: self.since,
            requests: counts.would.iter().chain(&counts.dropped).sum(),
            duplicates: counts.duplicates,
            keys_run_again: counts.run_again,
            keys_answered_differently: counts.differed,
            would: would.filter(|(_, count)| *count > 0).collect(),
            dropped: dropped.filter(|(_, count)| *count > 0).collect(),
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
