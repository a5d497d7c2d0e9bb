//! How many calls of the store are in progress, how long they take, and how often they fail.

use std::sync::OnceLock;

use prometheus::{Histogram, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::metrics::Metrics;
use super::register::{add, histograms};
use crate::store::ErrorKind;
use crate::store::metered::{CallEvent, StoreOp};

/// Upper bounds of durations, in seconds.
const BUCKETS: &[f64] =
    &[0.000_05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The operations that requests wait for. Their errors are at 0 before the first, so that an alert sees that too.
const OF_REQUESTS: [StoreOp; 4] = [StoreOp::Claim, StoreOp::Supersede, StoreOp::Settle, StoreOp::Renew];

/// The metrics of calls.
#[derive(Clone)]
pub(super) struct StoreCallFamilies {
    duration: HistogramVec,
    pub(super) errors: IntCounterVec,
    in_flight: IntGaugeVec,
}

/// The metrics of one operation.
struct OperationMetrics {
    duration: Histogram,
    in_flight: IntGauge,
}

impl Metrics {
    /// Counts the calls of a store of this kind.
    pub fn store(&self, store: &'static str) -> impl Fn(StoreOp, CallEvent) + Send + Sync + 'static {
        let families = self.families.store_calls.clone();
        for op in OF_REQUESTS {
            for kind in ErrorKind::ALL {
                families.errors.with_label_values(&[store, op.as_str(), kind.as_str()]);
            }
        }
        let operations: [OnceLock<OperationMetrics>; StoreOp::COUNT] = std::array::from_fn(|_| OnceLock::new());
        move |op, event| {
            let labels = [store, op.as_str()];
            let metrics = operations[op as usize].get_or_init(|| OperationMetrics {
                duration: families.duration.with_label_values(&labels),
                in_flight: families.in_flight.with_label_values(&labels),
            });
            match event {
                CallEvent::Began => metrics.in_flight.inc(),
                CallEvent::Cancelled => metrics.in_flight.dec(),
                CallEvent::Ended(took, error) => {
                    metrics.in_flight.dec();
                    metrics.duration.observe(took.as_secs_f64());
                    if let Some(kind) = error {
                        families.errors.with_label_values(&[store, op.as_str(), kind.as_str()]).inc();
                    }
                }
            }
        }
    }
}

impl StoreCallFamilies {
    pub(super) fn new(registry: &Registry) -> Self {
        let (errors, calls) = ("oncegate_store_errors_total", "oncegate_store_operations_in_flight");
        Self {
            duration: histograms(
                registry,
                "oncegate_store_duration_seconds",
                "Time that a store operation took, waiting included.",
                &["store", "op"],
                BUCKETS,
            ),
            errors: add(
                registry,
                IntCounterVec::new(Opts::new(errors, "Store operations that failed."), &["store", "op", "kind"]),
            ),
            in_flight: add(
                registry,
                IntGaugeVec::new(
                    Opts::new(calls, "Store operations whose callers wait, queued or in progress."),
                    &["store", "op"],
                ),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_call_is_in_flight_until_it_ends_or_is_cancelled() {
        let metrics = Metrics::new();
        let report = metrics.store("sqlite");
        let shows = |line: &str| {
            let text = metrics.encode();
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        };
        shows("oncegate_store_errors_total{kind=\"timeout\",op=\"claim\",store=\"sqlite\"} 0");
        let op = StoreOp::Claim;
        for event in [CallEvent::Began, CallEvent::Began, CallEvent::Began, CallEvent::Cancelled] {
            report(op, event);
        }
        report(op, CallEvent::Ended(Duration::ZERO, Some(ErrorKind::Timeout)));
        shows("oncegate_store_operations_in_flight{op=\"claim\",store=\"sqlite\"} 1");
        shows("oncegate_store_errors_total{kind=\"timeout\",op=\"claim\",store=\"sqlite\"} 1");
        shows("oncegate_store_duration_seconds_count{op=\"claim\",store=\"sqlite\"} 1");
    }
}
