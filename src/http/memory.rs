//! Returns unused memory to the system.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeMetrics};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often a thread checks whether to release memory.
const INTERVAL: Duration = Duration::from_secs(10);

/// How many samples a thread compares. The last memory of a load peak is freed when idle upstream connections close,
/// 30 s after the peak.
const SAMPLES: usize = 6;

/// A thread releases memory when its load is this many times below the highest of the samples.
const DROP_FACTOR: u64 = 4;

/// More than any address space has.
const IMPOSSIBLE: usize = isize::MAX as usize / 2;

/// Releases memory that this thread, and threads that have ended, do not use.
///
/// An allocator caches freed memory and trims the cache only while it allocates, so an idle thread keeps its cache.
/// mimalloc releases all it can before it reports an allocation failure. A request for an impossible amount triggers
/// this.
fn release_unused() {
    let mut none = Vec::<u8>::new();
    let _ = black_box(black_box(&mut none).try_reserve_exact(IMPOSSIBLE));
}

/// Releases the memory of the current thread whenever its load has dropped. Under a steady load a thread reuses the
/// memory that it frees.
pub async fn release_when_idle() {
    let metrics = Handle::current().metrics();
    let mut turns = interval_at(Instant::now() + INTERVAL, INTERVAL);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut history, mut busy) = (LoadHistory::default(), busy_time(&metrics));
    loop {
        turns.tick().await;
        let now = busy_time(&metrics);
        let was_busy = now.saturating_sub(std::mem::replace(&mut busy, now));
        let load = LoadSample {
            tasks: metrics.num_alive_tasks() as u64,
            busy: u64::try_from(was_busy.as_micros()).unwrap_or(u64::MAX),
        };
        if history.has_fallen(load) {
            release_unused();
        }
    }
}

/// The total busy time of a runtime's workers.
fn busy_time(metrics: &RuntimeMetrics) -> Duration {
    (0..metrics.num_workers()).map(|worker| metrics.worker_total_busy_duration(worker)).sum()
}

/// The load of a thread in one interval.
#[derive(Clone, Copy, Debug)]
struct LoadSample {
    /// Connections, requests and attempts, at its end.
    tasks: u64,
    /// Busy time in microseconds.
    busy: u64,
}

/// The latest samples.
#[derive(Default)]
struct LoadHistory(VecDeque<LoadSample>);

impl LoadHistory {
    /// Adds a sample. Returns whether it is far below the earlier ones.
    fn has_fallen(&mut self, now: LoadSample) -> bool {
        let is_far_below =
            |of: fn(&LoadSample) -> u64| self.0.iter().map(of).max().unwrap_or(0) >= of(&now) * DROP_FACTOR;
        let has_fallen = !self.0.is_empty() && (is_far_below(|load| load.tasks) || is_far_below(|load| load.busy));
        if self.0.len() == SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(now);
        has_fallen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_reservation_fails() {
        assert!(Vec::<u8>::new().try_reserve_exact(black_box(IMPOSSIBLE)).is_err());
        release_unused();
    }

    /// In which turns memory is given back, under these loads.
    fn releases(loads: &[(u64, u64)]) -> Vec<usize> {
        let mut history = LoadHistory::default();
        let mut releases = Vec::new();
        for (turn, &(tasks, busy)) in loads.iter().enumerate() {
            if history.has_fallen(LoadSample { tasks, busy }) {
                releases.push(turn);
            }
        }
        releases
    }

    #[test]
    fn memory_is_given_back_when_the_load_has_fallen_and_not_under_it() {
        let idle = (3, 1_000);
        assert_eq!(releases(&[idle, (3, 900), (4, 2_000), idle]), [] as [usize; 0]);
        let steady = [(200, 9_000_000), (130, 8_000_000), (180, 9_900_000)].repeat(10);
        assert_eq!(releases(&steady), [] as [usize; 0]);
        // Often enough for what is freed in the minute after that.
        let over = [&steady[..3], &[idle; 20]].concat();
        assert_eq!(releases(&over), (3..3 + SAMPLES).collect::<Vec<_>>());
        // A crowd that leaves while others stay, and others that pause while they stay connected.
        assert_eq!(releases(&[(5_000, 9_000_000), (100, 9_000_000)]), [1]);
        assert_eq!(releases(&[(200, 9_000_000), (200, 1_000)]), [1]);
    }
}
