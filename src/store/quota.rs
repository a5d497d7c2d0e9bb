//! Quotas that all gates of a store count together.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::idempotency::quota::{QuotaId, Rate};

/// Counts quotas for several gates. It may forget, and it may not answer: a gate counts by itself too.
pub trait SharedQuotas: Send + Sync + 'static {
    /// Takes a key from a quota. What is returned says whether there was one left, or else how long to wait; it ends where that
    /// is not known. A key whose answer nobody receives is given back. Nothing where too much is under way.
    fn take(&self, id: QuotaId, rate: Rate) -> Option<oneshot::Receiver<Result<(), Duration>>>;

    /// Gives a key back, sooner or later.
    fn give_back(&self, id: QuotaId, rate: Rate);
}
