//! Which completed records this process knows to be durable.

use quick_cache::sync::Cache;

use crate::idempotency::record::Attempt;

/// How many attempts are remembered. One that is not costs its next reader one more commit.
const REMEMBERED: usize = 1 << 18;

/// Attempts whose completion this process has seen durable: it settled them itself, or flushed the log after it read them.
///
/// A commit whose wait for a synchronous standby was cancelled is visible on the primary and may be nowhere else. A record
/// that is merely visible may therefore be gone after a failover.
pub(super) struct Durable(Cache<Attempt, ()>);

impl Default for Durable {
    fn default() -> Self {
        Self(Cache::new(REMEMBERED))
    }
}

impl Durable {
    pub(super) fn remember(&self, attempt: Attempt) {
        self.0.insert(attempt, ());
    }

    pub(super) fn knows(&self, attempt: Attempt) -> bool {
        self.0.get(&attempt).is_some()
    }
}
