//! Making metrics of a registry.

use prometheus::core::Collector;
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

pub(super) fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    add(registry, IntCounter::new(name, help))
}

pub(super) fn by_reason<const N: usize>(
    registry: &Registry,
    name: &str,
    help: &str,
    reasons: [&str; N],
) -> [IntCounter; N] {
    let counters = add(registry, IntCounterVec::new(Opts::new(name, help), &["reason"]));
    reasons.map(|reason| counters.with_label_values(&[reason]))
}

pub(super) fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    add(registry, IntGauge::new(name, help))
}

pub(super) fn gauges(registry: &Registry, name: &str, help: &str, label: &str) -> IntGaugeVec {
    add(registry, IntGaugeVec::new(Opts::new(name, help), &[label]))
}

pub(super) fn histograms(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
    buckets: &[f64],
) -> HistogramVec {
    add(registry, HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
}

pub(super) fn add<C: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<C>) -> C {
    let collector = made.expect("the name, labels and buckets are constants that a test makes");
    registry.register(Box::new(collector.clone())).expect("each name is registered once");
    collector
}
