//! Quotas that all gates of a store count together.

use std::time::Duration;

use async_trait::async_trait;

use crate::idempotency::quota::{QuotaId, Rate};

/// Counts quotas for several gates. It may forget, and it may not answer: a gate counts by itself too.
#[async_trait]
pub trait SharedQuotas: Send + Sync + 'static {
    /// Takes a key from a quota: whether there was one left, or else how long to wait. Nothing where it does not answer in
    /// time.
    async fn take(&self, id: QuotaId, rate: Rate) -> Option<Result<(), Duration>>;

    /// Gives a key back, sooner or later.
    fn give_back(&self, id: QuotaId, rate: Rate);
}
