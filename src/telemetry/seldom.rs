//! What many requests meet alike is logged once in a while.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The shortest time between two of its lines in the log.
const APART: Duration = Duration::from_secs(1);

/// Events that were passed over longer ago than this are another story.
const PAST: Duration = Duration::from_secs(60);

/// Lets one of many like events into the log each second, and counts those between.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    last: Option<Instant>,
    passed_over: u64,
}

impl Seldom {
    /// Whether this event is to be logged: how many like it were not, in the last minute, since the last that was.
    pub fn due(&self) -> Option<u64> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = seen.last.map(|last| last.elapsed());
        if since.is_some_and(|since| since < APART) {
            seen.passed_over += 1;
            return None;
        }
        seen.last = Some(Instant::now());
        let passed_over = std::mem::take(&mut seen.passed_over);
        Some(if since.is_some_and(|since| since < PAST) { passed_over } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_in_a_second_is_due_and_tells_of_the_others() {
        let seldom = Seldom::default();
        assert_eq!(seldom.due(), Some(0));
        assert_eq!((seldom.due(), seldom.due()), (None, None));
        tokio::time::advance(APART).await;
        assert_eq!(seldom.due(), Some(2));
        assert_eq!(seldom.due(), None);
        tokio::time::advance(PAST).await;
        assert_eq!(seldom.due(), Some(0));
    }
}
