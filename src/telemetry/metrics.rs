//! The metrics registry.

use std::sync::Arc;
use std::time::Duration;

use super::outcome::Outcome;

/// All metrics of one process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {}

/// The metrics of one route, looked up once.
pub struct RouteMetrics {}

impl Metrics {
    /// The metrics of a route; `-` for requests that match none.
    #[must_use]
    pub fn route(&self, name: &str) -> Arc<RouteMetrics> {
        let _ = name;
        Arc::new(RouteMetrics {})
    }
}

impl RouteMetrics {
    /// Counts a request that was answered after `took`.
    pub fn answered(&self, outcome: Outcome, took: Duration) {
        let _ = (outcome, took);
    }

    /// Records how long the upstream took to answer.
    pub fn upstream_took(&self, took: Duration) {
        let _ = took;
    }

    /// An attempt began; the guard's drop ends it.
    #[must_use]
    pub fn attempt_began(self: &Arc<Self>) -> AttemptGuard {
        AttemptGuard {}
    }

    /// The upstream sent `Idempotency-Control` directives that were invalid and ignored.
    pub fn control_invalid(&self, count: usize) {
        let _ = count;
    }
}

/// Counts an attempt as in flight until it is dropped.
pub struct AttemptGuard {}
