//! Memory that nothing uses any more goes back to the system.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeMetrics};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often a thread looks whether it has memory to give back.
const EVERY: Duration = Duration::from_secs(10);

/// How many of these turns a thread looks back at. The last memory of a crowd is freed when the idle connections to upstreams
/// close, 30 s after the crowd has gone.
const REMEMBERED: usize = 6;

/// A thread gives memory back when its load is this many times below the highest that it remembers.
const FALL: u64 = 4;

/// More than any address space has, and than a machine could promise.
const IMPOSSIBLE: usize = isize::MAX as usize / 2;

/// Gives back what this thread, and those that have ended, do not use.
///
/// An allocator keeps what is freed for what is allocated next, and looks at what it keeps as it allocates: where nothing
/// is left to do it never looks again. Before mimalloc says that there is no memory, it gives back all that it can, and so
/// it is asked for more than there can be.
fn give_back() {
    let mut none = Vec::<u8>::new();
    let _ = black_box(black_box(&mut none).try_reserve_exact(IMPOSSIBLE));
}

/// Does so for the thread that this runs on, whenever its load has fallen. A thread under a steady load reuses what it frees,
/// and would only have to ask the system for it again.
pub async fn keep_giving_back() {
    let metrics = Handle::current().metrics();
    let mut turns = interval_at(Instant::now() + EVERY, EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut history, mut busy) = (History::default(), busy_time(&metrics));
    loop {
        turns.tick().await;
        let now = busy_time(&metrics);
        let was_busy = now.saturating_sub(std::mem::replace(&mut busy, now));
        let load = Load {
            tasks: metrics.num_alive_tasks() as u64,
            busy: u64::try_from(was_busy.as_micros()).unwrap_or(u64::MAX),
        };
        if history.has_fallen(load) {
            give_back();
        }
    }
}

/// How long the workers of a runtime have worked so far.
fn busy_time(metrics: &RuntimeMetrics) -> Duration {
    (0..metrics.num_workers()).map(|worker| metrics.worker_total_busy_duration(worker)).sum()
}

/// What a thread had to do in a turn.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Connections, requests and attempts, at its end.
    tasks: u64,
    /// How long it worked, in microseconds.
    busy: u64,
}

/// The load of the last turns.
#[derive(Default)]
struct History(VecDeque<Load>);

impl History {
    /// Takes in the load of another turn; whether it is far below that of those before.
    fn has_fallen(&mut self, now: Load) -> bool {
        let is_far_below = |of: fn(&Load) -> u64| self.0.iter().map(of).max().unwrap_or(0) >= of(&now) * FALL;
        let has_fallen = !self.0.is_empty() && (is_far_below(|load| load.tasks) || is_far_below(|load| load.busy));
        if self.0.len() == REMEMBERED {
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
    fn nobody_has_so_much() {
        assert!(Vec::<u8>::new().try_reserve_exact(black_box(IMPOSSIBLE)).is_err());
        give_back();
    }

    /// In which turns memory is given back, under these loads.
    fn given_back(loads: &[(u64, u64)]) -> Vec<usize> {
        let mut history = History::default();
        let mut given_back = Vec::new();
        for (turn, &(tasks, busy)) in loads.iter().enumerate() {
            if history.has_fallen(Load { tasks, busy }) {
                given_back.push(turn);
            }
        }
        given_back
    }

    #[test]
    fn memory_is_given_back_when_the_load_has_fallen_and_not_under_it() {
        let idle = (3, 1_000);
        assert_eq!(given_back(&[idle, (3, 900), (4, 2_000), idle]), [] as [usize; 0]);
        let steady = [(200, 9_000_000), (130, 8_000_000), (180, 9_900_000)].repeat(10);
        assert_eq!(given_back(&steady), [] as [usize; 0]);
        // Often enough for what is freed in the minute after that.
        let over = [&steady[..3], &[idle; 20]].concat();
        assert_eq!(given_back(&over), (3..3 + REMEMBERED).collect::<Vec<_>>());
        // A crowd that leaves while others stay, and others that pause while they stay connected.
        assert_eq!(given_back(&[(5_000, 9_000_000), (100, 9_000_000)]), [1]);
        assert_eq!(given_back(&[(200, 9_000_000), (200, 1_000)]), [1]);
    }
}
