//! What telemetry itself had to drop, so that requests need not wait for it.

use prometheus::{IntCounter, Registry};

use super::logs;
use super::register::{add, counter};

/// Counts what was dropped.
#[derive(Clone)]
pub struct Losses {
    /// Lines of the access log.
    pub access_log: IntCounter,
    /// Spans.
    pub spans: IntCounter,
}

impl Losses {
    pub(super) fn new(registry: &Registry) -> Self {
        add(registry, Ok(logs::lost_lines()));
        Self {
            access_log: counter(
                registry,
                "oncegate_access_log_lost_total",
                "Lines of the access log that were dropped, since they could not be written fast enough.",
            ),
            spans: counter(
                registry,
                "oncegate_spans_dropped_total",
                "Spans that were dropped, since the collector did not take them fast enough.",
            ),
        }
    }
}
