//! The oldest value of the shared cache that this process still believes, record by record.
//!
//! A sealed value stays authentic for as long as it is young enough. An attacker who can write to the cache can put
//! one back that a purge removed, and it would be replayed in the place of what ran since. So a process remembers for
//! `cache_max_age` which records it purged or settled, or learned to be purged, and trusts no older value of these.
//! Its memory is bounded: what it drops too early becomes a floor for all records, which costs lookups in the store
//! and no more.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};

/// How many records one generation holds, of which there are two.
const GENERATION: usize = 1 << 17;

/// Up to when values of a record are not believed, unless they are of this attempt.
#[derive(Clone, Copy)]
struct Floor {
    at: Timestamp,
    attempt: Option<AttemptToken>,
}

impl Floor {
    fn refuses(&self, attempt: AttemptToken, read_at: Timestamp) -> bool {
        read_at <= self.at && self.attempt != Some(attempt)
    }
}

/// Floors by record, in two generations: a record's floor lasts for `max_age` at least, or is raised for all.
pub(super) struct Floors {
    max_age: Duration,
    young: HashMap<u64, Floor>,
    old: HashMap<u64, Floor>,
    /// When the young generation began, by this process's clock and by the store's.
    began: (Instant, Timestamp),
    /// For records that neither generation has.
    for_all: Timestamp,
}

impl Floors {
    /// `now` is the store's time.
    pub(super) fn new(max_age: Duration, now: Timestamp) -> Self {
        let began = (Instant::now(), now);
        Self { max_age, young: HashMap::new(), old: HashMap::new(), began, for_all: Timestamp(0) }
    }

    /// Believes nothing of this record that was read up to `at`, except of `attempt`. `now` is the store's time.
    pub(super) fn raise(&mut self, id: RecordId, at: Timestamp, attempt: Option<AttemptToken>, now: Timestamp) {
        if self.young.len() >= GENERATION || self.began.0.elapsed() >= self.max_age {
            self.turn(now);
        }
        let floor = self.young.entry(short(id)).or_insert(Floor { at, attempt });
        // A purge that was noted before the end of its record's attempt stays in force.
        if floor.at <= at {
            *floor = Floor { at, attempt };
        }
    }

    /// Whether a value of a record is older than what this process knows of it.
    pub(super) fn refuses(&self, id: RecordId, attempt: AttemptToken, read_at: Timestamp) -> bool {
        let floor = self.young.get(&short(id)).or_else(|| self.old.get(&short(id)));
        floor.map_or(read_at < self.for_all, |floor| floor.refuses(attempt, read_at))
    }

    fn turn(&mut self, now: Timestamp) {
        let (began, at) = self.began;
        if !self.old.is_empty() && began.elapsed() < self.max_age {
            // All of the old generation was remembered before the young one began.
            self.for_all = self.for_all.max(at);
        }
        self.old = std::mem::take(&mut self.young);
        self.began = (Instant::now(), now);
    }
}

/// Two records that share these bytes share a floor, which refuses more values than needed.
fn short(id: RecordId) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&id.0[24..]);
    u64::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX_AGE: Duration = Duration::from_secs(600);
    const BEGAN: Timestamp = Timestamp(1_000_000);

    fn id(number: u64) -> RecordId {
        let mut id = [0; 32];
        id[24..].copy_from_slice(&number.to_be_bytes());
        RecordId(id)
    }

    fn attempt(number: u8) -> AttemptToken {
        AttemptToken([number; 16])
    }

    #[tokio::test(start_paused = true)]
    async fn an_older_attempt_is_refused_and_a_newer_one_is_not() {
        let mut floors = Floors::new(MAX_AGE, BEGAN);
        floors.raise(id(1), Timestamp(50), None, BEGAN);
        floors.raise(id(2), Timestamp(50), Some(attempt(2)), BEGAN);
        for (record, by, read_at, is_refused) in [
            (1, 1, 49, true),
            (1, 1, 50, true),
            (1, 2, 51, false),
            (2, 1, 49, true),
            (2, 1, 50, true),
            (2, 2, 50, false),
            (2, 3, 51, false),
            (3, 1, 1, false),
        ] {
            let refused = floors.refuses(id(record), attempt(by), Timestamp(read_at));
            assert_eq!(refused, is_refused, "record {record}, attempt {by}, read at {read_at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_floor_is_never_lowered() {
        let mut floors = Floors::new(MAX_AGE, BEGAN);
        floors.raise(id(1), Timestamp(50), None, BEGAN);
        floors.raise(id(1), Timestamp(40), Some(attempt(1)), BEGAN);
        assert!(floors.refuses(id(1), attempt(1), Timestamp(40)));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_dropped_floors_still_refuse() {
        let mut floors = Floors::new(MAX_AGE, BEGAN);
        let many = 3 * GENERATION as u64;
        for number in 0..many {
            let now = Timestamp(BEGAN.0 + number);
            floors.raise(id(number), now, None, now);
        }
        assert!(floors.young.len() + floors.old.len() <= 2 * GENERATION);
        for number in 0..many {
            assert!(floors.refuses(id(number), attempt(1), Timestamp(BEGAN.0 + number - 1)), "{number}");
        }
        assert!(!floors.refuses(id(many), attempt(1), Timestamp(BEGAN.0 + many)));
    }

    proptest! {
        /// Whatever came before: what was raised less than `max_age` ago is refused up to its floor.
        #[test]
        fn a_floor_lasts_for_the_life_of_a_value(steps in proptest::collection::vec((0..4_u64, 0..400_u64), 1..40)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let began = Instant::now();
                let now = || BEGAN.plus(began.elapsed());
                let mut floors = Floors::new(MAX_AGE, BEGAN);
                let mut raised: HashMap<u64, Instant> = HashMap::new();
                for (record, seconds) in steps {
                    tokio::time::advance(Duration::from_secs(seconds)).await;
                    floors.raise(id(record), now(), None, now());
                    raised.insert(record, Instant::now());
                    for (record, at) in &raised {
                        let read_at = BEGAN.plus(*at - began);
                        let refused = floors.refuses(id(*record), attempt(1), read_at);
                        assert!(refused || at.elapsed() >= MAX_AGE, "record {record} after {:?}", at.elapsed());
                    }
                }
            });
        }
    }
}
