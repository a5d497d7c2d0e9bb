//! The clocks of stores.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::idempotency::record::Timestamp;

/// The clock of a store. Tests and simulations use one that they step.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// The current wall clock time.
#[must_use]
pub fn wall() -> Timestamp {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(0).plus(since_epoch)
}

/// A clock that starts at `start` and then runs by the monotonic clock, so that a step of the wall clock neither ends
/// leases nor brings expired records back.
#[must_use]
pub fn steady(start: Timestamp) -> Clock {
    let anchor = Instant::now();
    Arc::new(move || start.plus(anchor.elapsed()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_steady_clock_starts_at_the_given_time_and_never_runs_back() {
        let clock = steady(Timestamp(1_000));
        let first = clock();
        assert!(first >= Timestamp(1_000) && first < Timestamp(61_000));
        std::thread::sleep(Duration::from_millis(5));
        assert!(clock() > first);
    }

    #[test]
    fn the_wall_clock_is_in_milliseconds() {
        // 2020 to 2100.
        assert!((1_577_836_800_000..4_102_444_800_000).contains(&wall().0));
    }
}
