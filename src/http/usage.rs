//! What is taken of the limits.

use std::sync::Arc;

use crate::telemetry::limits::{Limit, LimitMetrics};
use crate::telemetry::metrics::Metrics;

/// What is taken of the limits at the moment: one for a process, whatever is loaded again meanwhile.
pub struct Usage {
    metrics: LimitMetrics,
}

impl Usage {
    /// Nothing is taken yet.
    #[must_use]
    pub fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self { metrics: metrics.limits() })
    }

    /// Counts that a limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.metrics.exceeded(limit);
    }
}
