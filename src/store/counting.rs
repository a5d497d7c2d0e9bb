//! How often what stands in a store is counted.

use std::time::Duration;

use tokio::time::Instant;

/// The pause after a count, in times of what it took: a count reads all there is, so a large store is counted more rarely.
pub const PAUSE_FOR_EACH: u32 = 50;

/// When the next count of one kind may begin.
pub struct Counting {
    least: Duration,
    next: Instant,
}

impl Counting {
    /// Counts at once, and then with at least this pause between two counts.
    #[must_use]
    pub fn at_least(least: Duration) -> Self {
        Self { least, next: Instant::now() }
    }

    /// What a count found; nothing where it is too soon for one, or where it failed. One that failed puts the next one off for the
    /// least pause only.
    pub async fn unless_too_soon<T>(&mut self, count: impl Future<Output = Option<T>>) -> Option<T> {
        let began = Instant::now();
        if began < self.next {
            return None;
        }
        let counted = count.await;
        let of_a_large_store = if counted.is_some() { PAUSE_FOR_EACH * began.elapsed() } else { Duration::ZERO };
        self.next = Instant::now() + self.least.max(of_a_large_store);
        counted
    }
}
