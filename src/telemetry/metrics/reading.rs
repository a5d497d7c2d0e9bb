//! What the metrics say now, for the admin API.
//!
//! Reading locks nothing that a request waits for: a series is an atomic, and the lock of a family is taken by a request
//! only when it adds the first series of its kind.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::proto::{Metric, MetricFamily};

use super::{Families, Metrics};
use crate::idempotency::record::{State, Timestamp};
use crate::store::cached::CacheResult;
use crate::telemetry::limits::Limit;

/// What was counted since the process started. The difference of two of them is what happened between.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// By the name of the route; `-` for requests that match none.
    pub routes: BTreeMap<String, RouteTraffic>,
    /// Failed operations of the store, by its kind, the operation and the error.
    pub store_errors: BTreeMap<[String; 3], u64>,
}

/// What was counted of one route.
#[derive(Clone, Debug, Default)]
pub struct RouteTraffic {
    /// Requests answered, by the words of outcomes.
    pub outcomes: BTreeMap<String, u64>,
    /// How long requests took, whatever their outcome.
    pub requests: Durations,
    /// How long the upstream took.
    pub upstream: Durations,
}

/// Durations by how long they were.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// An upper bound in seconds, and how many durations were no longer.
    pub buckets: Vec<(f64, u64)>,
    /// How many there were.
    pub count: u64,
}

/// What stands of one consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumerLevels {
    /// Whether it is connected to its broker.
    pub connected: bool,
    /// How many messages it has taken and not ended.
    pub in_hand: u64,
    /// How many messages it ended since the start, by how.
    pub messages: BTreeMap<String, u64>,
}

/// What stands at the moment.
#[derive(Clone, Debug)]
pub struct Levels {
    /// Consumers, by their names.
    pub consumers: BTreeMap<String, ConsumerLevels>,
    /// Attempts in flight, by the name of the route.
    pub attempts: BTreeMap<String, u64>,
    /// Records of the store, when they were last counted, in the order of [`State::ALL`].
    pub records: [u64; State::ALL.len()],
    /// Questions to the caches since the start, by what came of them.
    pub cache: BTreeMap<&'static str, u64>,
    /// How often each limit was reached since the start, in the order of [`Limit::ALL`].
    pub reached: [u64; Limit::ALL.len()],
    /// Accepted requests of the store that are queued, and that were given up, when they were last counted.
    pub deliveries: [u64; 2],
    /// How long ago the oldest of the queued was accepted.
    pub oldest_delivery: Option<Duration>,
    /// When the configuration was last read.
    pub reloaded_at: Timestamp,
    /// Whether it had no problem then.
    pub reload_successful: bool,
}

impl Metrics {
    /// What was counted so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        let Families { requests, request_duration, upstream_duration, store_errors, .. } = &*self.families;
        // What is only expected was not counted.
        each(requests.collect(), |metric| {
            if count(metric) == 0 {
                return;
            }
            let route = traffic.routes.entry(label(metric, "route")).or_default();
            *route.outcomes.entry(label(metric, "outcome")).or_default() += count(metric);
        });
        each(request_duration.collect(), |metric| {
            traffic.routes.entry(label(metric, "route")).or_default().requests.add(metric);
        });
        each(upstream_duration.collect(), |metric| {
            traffic.routes.entry(label(metric, "route")).or_default().upstream.add(metric);
        });
        each(store_errors.collect(), |metric| {
            if count(metric) == 0 {
                return;
            }
            let labels = ["store", "op", "kind"].map(|name| label(metric, name));
            traffic.store_errors.insert(labels, count(metric));
        });
        traffic
    }

    /// What stands now.
    #[must_use]
    pub fn levels(&self) -> Levels {
        let Families { attempts_in_flight, records, cache_requests, limit_exceeded, .. } = &*self.families;
        let mut consumers = BTreeMap::<String, ConsumerLevels>::new();
        let of_consumers = &self.families.consumers;
        each(of_consumers.messages.collect(), |metric| {
            let messages = &mut consumers.entry(label(metric, "consumer")).or_default().messages;
            messages.insert(label(metric, "result"), count(metric));
        });
        each(of_consumers.in_hand.collect(), |metric| {
            let in_hand = whole(metric.get_gauge().get_value());
            consumers.entry(label(metric, "consumer")).or_default().in_hand = in_hand;
        });
        each(of_consumers.connected.collect(), |metric| {
            let connected = whole(metric.get_gauge().get_value()) == 1;
            consumers.entry(label(metric, "consumer")).or_default().connected = connected;
        });
        let mut attempts = BTreeMap::new();
        each(attempts_in_flight.collect(), |metric| {
            attempts.insert(label(metric, "route"), whole(metric.get_gauge().get_value()));
        });
        // Label values are looked up: that makes no series that the encoder does not show anyway.
        let result =
            |result: CacheResult| (result.as_str(), cache_requests.with_label_values(&[result.as_str()]).get());
        Levels {
            consumers,
            attempts,
            records: std::array::from_fn(|index| u64::try_from(records[index].get()).unwrap_or(0)),
            cache: CacheResult::ALL.map(result).into(),
            reached: Limit::ALL.map(|limit| limit_exceeded.with_label_values(&[limit.as_str()]).get()),
            deliveries: self.families.deliveries.levels(),
            oldest_delivery: self.families.deliveries.oldest(),
            reloaded_at: Timestamp(self.families.reloaded_at.load(Ordering::Relaxed)),
            reload_successful: self.families.reload_successful.get() == 1,
        }
    }
}

impl Durations {
    fn add(&mut self, metric: &Metric) {
        let histogram = metric.get_histogram();
        let bucket = histogram.get_bucket().iter().map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
        self.add_all(&Self { buckets: bucket.collect(), count: histogram.get_sample_count() });
    }

    /// Adds others, of the same bounds.
    pub fn add_all(&mut self, others: &Self) {
        if self.buckets.is_empty() {
            self.buckets.clone_from(&others.buckets);
        } else {
            self.buckets.iter_mut().zip(&others.buckets).for_each(|((_, sum), (_, more))| *sum += more);
        }
        self.count += others.count;
    }

    /// Those that came after an earlier reading of the same durations.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.buckets.iter_mut().zip(&earlier.buckets).for_each(|((_, sum), (_, before))| {
            *sum = sum.saturating_sub(*before);
        });
        since.count = since.count.saturating_sub(earlier.count);
        since
    }

    /// What this part of them, from 0 to 1, did not exceed, in seconds, as Prometheus estimates it: within its bucket,
    /// durations are taken to be spread evenly. `None` if there are none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts of a minute are far below 2^52")]
    pub fn quantile(&self, part: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let rank = part * self.count as f64;
        let (mut lower, mut below) = (0.0, 0);
        for &(upper, sum) in &self.buckets {
            if sum > below && sum as f64 >= rank {
                return Some(lower + (upper - lower) * ((rank - below as f64) / (sum - below) as f64).clamp(0.0, 1.0));
            }
            (lower, below) = (upper, sum);
        }
        // Longer than the largest bound: nothing more is known.
        Some(lower)
    }
}

fn each(families: Vec<MetricFamily>, mut take: impl FnMut(&Metric)) {
    families.iter().flat_map(MetricFamily::get_metric).for_each(&mut take);
}

fn label(metric: &Metric, name: &str) -> String {
    let label = metric.get_label().iter().find(|label| label.name() == name);
    label.map(|label| label.value().to_owned()).unwrap_or_default()
}

fn count(metric: &Metric) -> u64 {
    whole(metric.get_counter().get_value())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it was a count before the library made a float of it"
)]
fn whole(value: f64) -> u64 {
    value.max(0.0) as u64
}

#[cfg(test)]
mod tests {

    use http::StatusCode;
    use tokio::time::Instant;

    use super::*;
    use crate::telemetry::outcome::Outcome;

    #[tokio::test(start_paused = true)]
    async fn what_was_counted_is_read_by_route_and_outcome() {
        let metrics = Metrics::new();
        let route = metrics.route("a");
        let answer = |outcome, after: u64| {
            let began = Instant::now() - Duration::from_millis(after);
            drop(route.answered(outcome, StatusCode::OK, began));
        };
        tokio::time::advance(Duration::from_secs(9)).await;
        answer(Outcome::Executed, 3);
        let before = metrics.traffic();
        answer(Outcome::Executed, 4);
        answer(Outcome::Replayed, 40);
        route.upstream_took(Duration::from_secs(100));
        let _attempt = route.attempt_began();
        let now = metrics.traffic();
        assert_eq!(now.routes["a"].outcomes, [("executed".to_owned(), 2), ("replayed".to_owned(), 1)].into());
        let since = now.routes["a"].requests.since(&before.routes["a"].requests);
        assert_eq!(since.count, 2);
        // One is from 2.5 to 5 ms long, the other from 25 to 50.
        assert_eq!(since.quantile(0.5), Some(0.005));
        assert!((since.quantile(0.75).unwrap() - 0.0375).abs() < 1e-9);
        assert_eq!(now.routes["a"].upstream.quantile(0.5), Some(60.0), "the largest bound");
        assert_eq!(before.routes["a"].upstream.quantile(0.5), None);
        assert_eq!(metrics.levels().attempts["a"], 1);
        assert!(metrics.levels().reload_successful);
    }
}
