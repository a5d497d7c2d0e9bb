//! What many requests meet alike is logged once in a while.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The shortest time between two of its lines in the log, where nothing else is said.
const APART: Duration = Duration::from_secs(1);

/// Events that were passed over more than this many periods ago are another story.
const PAST: u32 = 60;

/// Lets one of many like events into the log in each period, and counts those between. The default period is a second.
#[derive(Debug)]
pub struct LogThrottle {
    apart: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    last: Option<Instant>,
    passed_over: u64,
}

impl Default for LogThrottle {
    fn default() -> Self {
        Self::every(APART)
    }
}

impl LogThrottle {
    /// With periods of this length.
    #[must_use]
    pub fn every(apart: Duration) -> Self {
        Self { apart, seen: Mutex::default() }
    }

    /// With periods of a minute.
    #[must_use]
    pub fn each_minute() -> Self {
        Self::every(Duration::from_secs(60))
    }

    /// Whether this event is to be logged: how many like it were not, in the last 60 periods, since the last that was.
    pub fn due(&self) -> Option<u64> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let since = seen.last.map(|last| last.elapsed());
        if since.is_some_and(|since| since < self.apart) {
            seen.passed_over += 1;
            return None;
        }
        seen.last = Some(Instant::now());
        let passed_over = std::mem::take(&mut seen.passed_over);
        Some(if since.is_some_and(|since| since < self.apart * PAST) { passed_over } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_in_a_second_is_due_and_tells_of_the_others() {
        let throttle = LogThrottle::default();
        assert_eq!(throttle.due(), Some(0));
        assert_eq!((throttle.due(), throttle.due()), (None, None));
        tokio::time::advance(APART).await;
        assert_eq!(throttle.due(), Some(2));
        assert_eq!(throttle.due(), None);
        tokio::time::advance(APART * PAST).await;
        assert_eq!(throttle.due(), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_longer_period_lets_fewer_through() {
        let minute = Duration::from_secs(60);
        let throttle = LogThrottle::every(minute);
        assert_eq!((throttle.due(), throttle.due()), (Some(0), None));
        tokio::time::advance(minute - Duration::from_millis(1)).await;
        assert_eq!(throttle.due(), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(throttle.due(), Some(2));
    }
}
