//! The gauge of attempts in flight.

use std::sync::Arc;

use super::RouteMetrics;

/// Counts an attempt as in flight until it is dropped.
pub struct AttemptGuard(Arc<RouteMetrics>);

impl AttemptGuard {
    pub(super) fn new(route: &Arc<RouteMetrics>) -> Self {
        route.in_flight.inc();
        Self(Arc::clone(route))
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.0.in_flight.dec();
    }
}
