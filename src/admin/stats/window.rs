//! What was counted in the last minute, for rates and durations of now.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::telemetry::metrics::Traffic;

/// Between two samples.
pub(super) const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Over how long rates are taken.
const RATES: Duration = Duration::from_secs(10);

/// Of how long durations are shown.
const DURATIONS: Duration = Duration::from_secs(60);

/// Samples of the counters, the oldest first.
#[derive(Default)]
pub(super) struct Window(Mutex<VecDeque<Sample>>);

/// The counters at a time.
#[derive(Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) traffic: Arc<Traffic>,
}

/// What rates and durations are counted from.
pub(super) struct Bases {
    pub(super) of_rates: Sample,
    pub(super) of_durations: Sample,
}

impl Window {
    pub(super) fn keep(&self, traffic: Traffic) {
        let now = Instant::now();
        let mut samples = self.samples();
        samples.push_back(Sample { at: now, traffic: Arc::new(traffic) });
        // The first one that is old enough is what a minute is counted from.
        while samples.get(1).is_some_and(|second| now - second.at >= DURATIONS) {
            samples.pop_front();
        }
    }

    /// The newest samples that are old enough, or the oldest ones there are; `None` before the first.
    pub(super) fn bases(&self) -> Option<Bases> {
        let now = Instant::now();
        let samples = self.samples();
        let before = |age| samples.iter().rev().find(|sample| now - sample.at >= age).or(samples.front()).cloned();
        Some(Bases { of_rates: before(RATES)?, of_durations: before(DURATIONS)? })
    }

    fn samples(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        // Nothing that is done under it can leave it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rates_are_of_ten_seconds_and_durations_of_a_minute() {
        let window = Window::default();
        assert!(window.bases().is_none());
        for (samples, rates, durations) in [(1, 0, 0), (3, 6, 6), (3, 10, 12), (1, 10, 14), (100, 10, 60)] {
            for _ in 0..samples {
                tokio::time::advance(SAMPLE_EVERY).await;
                window.keep(Traffic::default());
            }
            let Bases { of_rates, of_durations } = window.bases().unwrap();
            let ages = [of_rates, of_durations].map(|sample| sample.at.elapsed().as_secs());
            assert_eq!(ages, [rates, durations], "{samples}");
        }
        assert_eq!(window.samples().len(), 31);
    }
}
