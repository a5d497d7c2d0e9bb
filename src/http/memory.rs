//! Memory that nothing uses any more goes back to the system.

use std::hint::black_box;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often a thread gives back what it does not use.
const EVERY: Duration = Duration::from_secs(10);

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

/// Does so now and then, for the thread that this runs on.
pub async fn keep_giving_back() {
    let mut turns = interval_at(Instant::now() + EVERY, EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turns.tick().await;
        give_back();
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
}
