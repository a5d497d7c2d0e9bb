//! How much of the limits is in use, for operators.

use std::sync::atomic::Ordering;

use super::Usage;
use crate::telemetry::limits::Limit;

/// How much of a limit is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitLevel {
    /// Which limit.
    pub limit: Limit,
    /// The amount in use.
    pub used: u64,
    /// The amount that may be in use.
    pub max: u64,
}

impl Usage {
    /// The levels of the limits that all clients share.
    #[must_use]
    pub fn levels(&self) -> [LimitLevel; 6] {
        let budgets = [&self.connections, &self.requests, &self.waiting, &self.observing, &self.memory, &self.disk];
        budgets.map(|budget| LimitLevel {
            limit: budget.limit,
            used: budget.used(),
            max: budget.max.load(Ordering::Relaxed),
        })
    }
}
