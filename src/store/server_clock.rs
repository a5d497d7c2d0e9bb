//! The time by the clock of a server, as an upper bound.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The last reading of a server's clock. By it the gate says until when a claim is good. A server process or a network that hung
/// may deliver a claim after the gate has given it up and released its key. No gate knows the attempt of such a record, so the
/// record would refuse all retries.
///
/// The bound is as good as the two clocks. One that is set back lets a late claim pass. One that is set forward, or a gate whose
/// machine slept, has a claim refused once: the gate reads the clock again, and claims again.
#[derive(Default)]
pub(super) struct ServerClock(Mutex<Option<Reading>>);

#[derive(Clone, Copy)]
struct Reading {
    /// When the server was asked, by this process's clock.
    asked: Instant,
    /// Its answer, in milliseconds since 1970.
    time: i64,
}

impl ServerClock {
    /// Takes what the server said when it was asked then, unless it was asked later since.
    pub(super) fn read(&self, asked: Instant, time: i64) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.asked <= asked) {
            *last = Some(Reading { asked, time });
        }
    }

    /// The server's time once that span is over, or later; the end of time where its clock was not read yet.
    pub(super) fn after(&self, span: Duration) -> i64 {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.map_or(i64::MAX, |Reading { asked, time }| {
            time.saturating_add(i64::try_from((asked.elapsed() + span).as_millis()).unwrap_or(i64::MAX))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_bound_is_the_last_reading_and_what_has_passed_since() {
        let clock = ServerClock::default();
        assert_eq!(clock.after(Duration::from_secs(5)), i64::MAX, "nothing is known");
        clock.read(Instant::now(), 1000);
        assert_eq!(clock.after(Duration::from_secs(5)), 6000);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!(clock.after(Duration::from_secs(5)), 6250);
        // What took a second to be answered was perhaps read at its beginning.
        let asked = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        clock.read(asked, 1300);
        assert_eq!(clock.after(Duration::ZERO), 2300);
        clock.read(asked - Duration::from_millis(1), 9000);
        assert_eq!(clock.after(Duration::ZERO), 2300, "an answer that was overtaken");
        clock.read(Instant::now(), 1200);
        assert_eq!(clock.after(Duration::ZERO), 1200, "it was set back");
        clock.read(Instant::now(), i64::MAX - 1);
        assert_eq!(clock.after(Duration::from_secs(5)), i64::MAX);
    }
}
