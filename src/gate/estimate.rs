//! How long a client that met an attempt in flight should wait: from the route's recent attempts.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How many recent attempts count.
const WINDOW: usize = 256;

/// With fewer attempts than this, the longest of them says little about the next.
const FEW: usize = 20;

/// What to expect of an upstream that has not answered yet.
const FIRST_GUESS: Duration = Duration::from_secs(5);

/// The durations of a route's recent attempts.
#[derive(Default)]
pub(super) struct Estimator {
    recent: Mutex<Recent>,
}

#[derive(Default)]
struct Recent {
    /// In milliseconds, rounded up.
    durations: Vec<u32>,
    next: usize,
}

impl Estimator {
    /// An attempt took this long.
    pub(super) fn took(&self, duration: Duration) {
        let millis = u32::try_from(duration.as_millis() + 1).unwrap_or(u32::MAX);
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.durations.len() < WINDOW {
            recent.durations.push(millis);
        } else {
            let next = recent.next;
            recent.durations[next] = millis;
            recent.next = (next + 1) % WINDOW;
        }
    }

    /// How much longer an attempt takes, in 95 of 100 cases, that has run for `elapsed`; at most `limit`.
    pub(super) fn remaining(&self, elapsed: Duration, limit: Duration) -> Duration {
        let past = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
        let (seen, mut longer) = {
            let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            let longer: Vec<u32> = recent.durations.iter().copied().filter(|took| *took > past).collect();
            (recent.durations.len(), longer)
        };
        longer.sort_unstable();
        let total = match longer.len() {
            // It has outlasted all that were seen: the longer it took, the longer it takes.
            0 => (elapsed * 2).max(FIRST_GUESS),
            few if seen < FEW => millis(longer[few - 1]) * 2,
            many => millis(longer[(many * 97).div_ceil(100) - 1]),
        };
        total.saturating_sub(elapsed).min(limit)
    }
}

fn millis(millis: u32) -> Duration {
    Duration::from_millis(u64::from(millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn nothing_seen_is_a_guess() {
        assert_eq!(Estimator::default().remaining(Duration::ZERO, LIMIT), FIRST_GUESS);
    }

    #[test]
    fn waiting_suffices_in_95_of_100_cases() {
        // Durations spread evenly over 0 to 10 s.
        let estimator = Estimator::default();
        let durations: Vec<u64> = (0..1000).map(|i| (i * 7919) % 10_000).collect();
        for duration in &durations[..500] {
            estimator.took(Duration::from_millis(*duration));
        }
        for elapsed in [0, 2_000, 8_000] {
            let wait = estimator.remaining(Duration::from_millis(elapsed), LIMIT).as_millis() as u64;
            let running: Vec<_> = durations[500..].iter().filter(|took| **took > elapsed).collect();
            let done = running.iter().filter(|took| ***took <= elapsed + wait).count();
            assert!(done * 100 >= running.len() * 95, "{done} of {} after {elapsed} ms", running.len());
        }
    }

    #[test]
    fn a_short_history_is_doubted() {
        let estimator = Estimator::default();
        estimator.took(Duration::from_millis(999));
        assert_eq!(estimator.remaining(Duration::from_millis(500), LIMIT), Duration::from_millis(1500));
    }

    #[test]
    fn the_limit_holds() {
        assert_eq!(Estimator::default().remaining(Duration::from_secs(100), LIMIT), LIMIT);
    }
}
