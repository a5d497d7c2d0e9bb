//! The metrics registry: the metrics and their names.
//!
//! A handle is looked up when a route or a store is set up, or for the first event that needs it. After that, what runs for
//! each request only adds to atomics. A rare event, such as a failure of the store or a client that leaves, looks its
//! labels up each time. Counters are there at 0 before the first event that the configuration allows.
//! Histograms appear with their first observation, so that a route without traffic does not export twenty empty ones.

mod attempt_guard;
mod families;
mod reading;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use http::StatusCode;
use prometheus::{Histogram, IntCounter, IntGauge, TextEncoder};
use tokio::time::Instant;

use super::admin_refusal::AdminRefusal;
use super::limits::{Limit, LimitMetrics};
use super::log_throttle::LogThrottle;
use super::losses::Losses;
use super::observed::{Observed, ObservedReport};
use super::outcome::{Outcome, StatusClass};
use super::records_by_key::RecordsByKey;
use super::wall_clock;
use crate::idempotency::record::State;
use crate::idempotency::recovery::Finding;
use crate::store::ErrorKind;
use crate::store::cached::CacheResult;
use crate::store::metered::{OperationsInFlight, StoreOp};
pub use attempt_guard::AttemptGuard;
pub(super) use families::Families;
pub use reading::{ConsumerLevels, Durations, Levels, RouteTraffic, Traffic};

/// All metrics of one process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    pub(super) families: Arc<Families>,
}

/// The metrics of one route, looked up once.
pub struct RouteMetrics {
    name: Box<str>,
    pub(super) families: Arc<Families>,
    outcomes: [OnceLock<OutcomeMetrics>; Outcome::ALL.len()],
    responses: [OnceLock<IntCounter>; StatusClass::ALL.len()],
    upstream: OnceLock<Histogram>,
    in_flight: IntGauge,
    control_invalid: IntCounter,
    observed: OnceLock<Arc<Observed>>,
}

/// Measures a request from its head to the end of its answer, which is when this is dropped.
#[must_use = "it ends when it is dropped"]
pub struct RequestTimer {
    duration: Histogram,
    began: Instant,
}

struct OutcomeMetrics {
    requests: IntCounter,
    duration: Histogram,
}

impl Metrics {
    /// A registry of its own, with everything at zero.
    #[must_use]
    pub fn new() -> Self {
        Self { families: Arc::new(Families::new()) }
    }

    /// The metrics of a route; `-` for requests that match none. Asking twice gives the same series.
    #[must_use]
    pub fn route(&self, name: &str) -> Arc<RouteMetrics> {
        Arc::new(RouteMetrics {
            name: name.into(),
            families: self.families.clone(),
            outcomes: std::array::from_fn(|_| OnceLock::new()),
            responses: std::array::from_fn(|_| OnceLock::new()),
            upstream: OnceLock::new(),
            in_flight: self.families.attempts_in_flight.with_label_values(&[name]),
            control_invalid: self.families.control_invalid.with_label_values(&[name]),
            observed: OnceLock::new(),
        })
    }

    /// Counts the calls of a store of this kind: which ended, how long it took, and why it failed if it did.
    pub fn store(&self, store: &'static str) -> impl Fn(StoreOp, Duration, Option<ErrorKind>) + Send + Sync + 'static {
        let families = self.families.clone();
        for op in StoreOp::OF_REQUESTS {
            for kind in ErrorKind::ALL {
                // At 0 before the first, so that an alert sees that too.
                families.store_errors.with_label_values(&[store, op.as_str(), kind.as_str()]);
            }
        }
        let durations: [OnceLock<Histogram>; StoreOp::COUNT] = std::array::from_fn(|_| OnceLock::new());
        move |op, took, error| {
            durations[op as usize]
                .get_or_init(|| families.store_duration.with_label_values(&[store, op.as_str()]))
                .observe(took.as_secs_f64());
            if let Some(kind) = error {
                families.store_errors.with_label_values(&[store, op.as_str(), kind.as_str()]).inc();
            }
        }
    }

    /// Shows how many callers wait for each operation of a store of this kind.
    pub fn watch_store(&self, store: &'static str, in_flight: Arc<OperationsInFlight>) {
        self.families.stores.lock().unwrap_or_else(PoisonError::into_inner).push((store, in_flight));
    }

    /// Counts what comes of questions to the caches.
    pub fn cache(&self) -> impl Fn(CacheResult) + Send + Sync + 'static {
        let result = |answered: CacheResult| self.families.cache_requests.with_label_values(&[answered.as_str()]);
        let results = CacheResult::ALL.map(result);
        move |answered| results[answered as usize].inc()
    }

    /// How often limits were reached, and how much is taken of them.
    #[must_use]
    pub fn limits(&self) -> Arc<LimitMetrics> {
        let families = &self.families;
        let exceeded = |limit: Limit| families.limit_exceeded.with_label_values(&[limit.as_str()]);
        Arc::new(LimitMetrics {
            exceeded: Limit::ALL.map(exceeded),
            warned: Limit::ALL.map(|_| LogThrottle::default()),
            levels: families.levels.clone(),
        })
    }

    /// How many records need each key that they are encrypted with.
    #[must_use]
    pub fn records_by_key(&self) -> &RecordsByKey {
        &self.families.records_by_key
    }

    /// What telemetry itself had to drop.
    #[must_use]
    pub fn losses(&self) -> &Losses {
        &self.families.losses
    }

    /// How many records stand in each state, in the order of [`State::ALL`].
    pub fn records_counted(&self, counts: [u64; State::ALL.len()]) {
        for (gauge, count) in self.families.records.iter().zip(counts) {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// How long ago the oldest unknown record was claimed; nothing if there is none.
    pub fn oldest_unknown(&self, age: Option<Duration>) {
        self.families.oldest_unknown.set(age.unwrap_or_default().as_secs_f64());
    }

    /// In-flight records whose lease was past turned unknown.
    pub fn leases_expired(&self, count: usize) {
        self.families.leases_expired.inc_by(count as u64);
    }

    /// Expired records were removed.
    pub fn records_swept(&self, count: usize) {
        self.families.records_swept.inc_by(count as u64);
    }

    /// The admin listener refused a request.
    pub fn admin_refused(&self, reason: AdminRefusal) {
        self.families.admin_refused[reason as usize].inc();
    }

    /// The configuration was read again, with or without success.
    pub fn config_reloaded(&self, successful: bool) {
        self.families.reload_successful.set(successful.into());
        self.families.reloaded_at.store(wall_clock().0, Ordering::Relaxed);
    }

    /// The rules of keys of this many namespaces are replaced by those of another gate.
    pub fn rules_replaced(&self, namespaces: usize) {
        self.families.replaced_rules.set(i64::try_from(namespaces).unwrap_or(i64::MAX));
    }

    /// Whether one of the databases of the store answers.
    pub fn database_up(&self, database: &str, is_up: bool) {
        self.families.database_up.with_label_values(&[database]).set(is_up.into());
    }

    /// Whether the gate takes requests.
    pub fn ready(&self, ready: bool) {
        self.families.ready.set(ready.into());
    }

    /// No route has a probe, until one says how its own stands.
    pub fn no_probes(&self) {
        self.families.probe_contradicted.reset();
    }

    /// These routes observe, and no others: what is known of the others is forgotten.
    pub fn observing<'a>(&self, routes: impl Iterator<Item = &'a str>) {
        let routes: BTreeSet<&str> = routes.collect();
        let mut observed = self.families.observed_routes.lock().unwrap_or_else(PoisonError::into_inner);
        observed.retain(|route, _| routes.contains(&**route));
        drop(observed);
        for route in routes {
            // A report shows it before its first request.
            self.route(route).observed();
        }
    }

    /// What requests of routes that only observe would have got, by route.
    #[must_use]
    pub fn observed(&self) -> Vec<ObservedReport> {
        let routes = self.families.observed_routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.values().map(|route| route.report()).collect()
    }

    /// Everything in the Prometheus text format, version 0.0.4.
    #[must_use]
    pub fn encode(&self) -> String {
        self.families.refresh();
        let mut text = String::new();
        if let Err(error) = TextEncoder::new().encode_utf8(&self.families.registry.gather(), &mut text) {
            tracing::error!(%error, "the metrics could not be written in full");
        }
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl RouteMetrics {
    /// Shows counters of these outcomes, and of the usual classes of statuses, at 0 before there are any.
    pub fn expect(&self, outcomes: impl IntoIterator<Item = Outcome>) {
        for outcome in outcomes {
            self.families.requests.with_label_values(&[&*self.name, outcome.as_str()]);
        }
        for class in StatusClass::USUAL {
            self.responses(class);
        }
        self.families.clients_gone.with_label_values(&[&*self.name]);
    }

    /// Counts a request whose head came at `began` and whose answer begins now, with this status.
    pub fn answered(&self, outcome: Outcome, status: StatusCode, began: Instant) -> RequestTimer {
        let metrics = self.outcomes[outcome.index()].get_or_init(|| {
            let labels = [&*self.name, outcome.as_str()];
            OutcomeMetrics {
                requests: self.families.requests.with_label_values(&labels),
                duration: self.families.request_duration.with_label_values(&labels),
            }
        });
        metrics.requests.inc();
        self.responses(StatusClass::of(status)).inc();
        RequestTimer { duration: metrics.duration.clone(), began }
    }

    /// Counts an attempt that another took the place of, since its lease was past.
    pub fn lease_expired(&self) {
        self.families.leases_expired.inc();
    }

    /// Counts a request whose client left before its answer.
    pub fn client_gone(&self) {
        self.families.clients_gone.with_label_values(&[&*self.name]).inc();
    }

    fn responses(&self, class: StatusClass) -> &IntCounter {
        let series = || self.families.responses.with_label_values(&[&*self.name, class.as_str()]);
        self.responses[class as usize].get_or_init(series)
    }

    /// Records how long the upstream took to answer.
    pub fn upstream_took(&self, took: Duration) {
        self.upstream
            .get_or_init(|| self.families.upstream_duration.with_label_values(&[&self.name]))
            .observe(took.as_secs_f64());
    }

    /// An attempt began; the guard's drop ends it.
    #[must_use]
    pub fn attempt_began(self: &Arc<Self>) -> AttemptGuard {
        AttemptGuard::new(self)
    }

    /// What its requests would have got, where it only observes.
    pub fn observed(&self) -> &Arc<Observed> {
        self.observed.get_or_init(|| {
            let families = &self.families;
            let mut routes = families.observed_routes.lock().unwrap_or_else(PoisonError::into_inner);
            let fresh = || Observed::new(&self.name, families.observed.clone(), families.observed_dropped.clone());
            Arc::clone(routes.entry(self.name.clone()).or_insert_with(fresh))
        })
    }

    /// How often its probe said so of a request that has succeeded.
    pub fn probe_checks(&self, finding: Finding) -> IntCounter {
        self.families.probe_checks.with_label_values(&[&*self.name, finding.as_str()])
    }

    /// Whether its probe did not find a request that had succeeded.
    pub fn probe_contradicted(&self, is_contradicted: bool) {
        self.families.probe_contradicted.with_label_values(&[&*self.name]).set(is_contradicted.into());
    }

    /// The upstream sent `Idempotency-Control` directives that were invalid and ignored.
    pub fn control_invalid(&self, count: usize) {
        self.control_invalid.inc_by(count as u64);
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.duration.observe(self.began.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::Code;

    #[tokio::test(start_paused = true)]
    async fn what_happened_shows_under_the_contracts_names() {
        let metrics = Metrics::new();
        let route = metrics.route("create-charge");
        let timer = route.answered(Outcome::Executed, StatusCode::CREATED, Instant::now());
        tokio::time::advance(Duration::from_millis(3)).await;
        drop(timer);
        drop(route.answered(Outcome::Problem(Code::InFlight), StatusCode::CONFLICT, Instant::now()));
        drop(route.answered(Outcome::Problem(Code::InFlight), StatusCode::CONFLICT, Instant::now()));
        route.upstream_took(Duration::from_secs(2));
        route.control_invalid(2);
        metrics.store("memory")(StoreOp::Claim, Duration::from_micros(70), Some(ErrorKind::Full));
        metrics.oldest_unknown(Some(Duration::from_millis(1500)));
        metrics.records_counted([1, 2, 3]);
        metrics.leases_expired(4);
        metrics.records_swept(5);
        metrics.ready(true);
        metrics.config_reloaded(false);
        metrics.admin_refused(AdminRefusal::WebPage);
        metrics.limits().exceeded(Limit::MaxHeaders);
        let text = metrics.encode();
        for line in [
            "oncegate_requests_total{outcome=\"executed\",route=\"create-charge\"} 1",
            "oncegate_requests_total{outcome=\"in-flight\",route=\"create-charge\"} 2",
            "oncegate_request_duration_seconds_bucket{outcome=\"executed\",route=\"create-charge\",le=\"0.0025\"} 0",
            "oncegate_request_duration_seconds_bucket{outcome=\"executed\",route=\"create-charge\",le=\"0.005\"} 1",
            "oncegate_upstream_duration_seconds_sum{route=\"create-charge\"} 2",
            "oncegate_control_invalid_total{route=\"create-charge\"} 2",
            "oncegate_store_duration_seconds_count{op=\"claim\",store=\"memory\"} 1",
            "oncegate_responses_total{class=\"2xx\",route=\"create-charge\"} 1",
            "oncegate_responses_total{class=\"4xx\",route=\"create-charge\"} 2",
            "oncegate_oldest_unknown_seconds 1.5",
            "oncegate_store_errors_total{kind=\"full\",op=\"claim\",store=\"memory\"} 1",
            "oncegate_attempts_in_flight{route=\"create-charge\"} 0",
            "oncegate_records{state=\"in-flight\"} 1",
            "oncegate_records{state=\"completed\"} 2",
            "oncegate_records{state=\"unknown\"} 3",
            "oncegate_leases_expired_total 4",
            "oncegate_records_swept_total 5",
            "oncegate_limit_exceeded_total{limit=\"max_headers\"} 1",
            "oncegate_limit_exceeded_total{limit=\"body_timeout\"} 0",
            "oncegate_admin_refused_total{reason=\"web-page\"} 1",
            "oncegate_ready 1",
            "oncegate_config_last_reload_successful 0",
            concat!("oncegate_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn an_attempt_is_in_flight_until_its_guard_goes() {
        let metrics = Metrics::new();
        let guard = metrics.route("a").attempt_began();
        // Another handle of the same route, as after a reload, counts on.
        let second = metrics.route("a").attempt_began();
        assert!(metrics.encode().contains("oncegate_attempts_in_flight{route=\"a\"} 2"));
        drop((guard, second));
        assert!(metrics.encode().contains("oncegate_attempts_in_flight{route=\"a\"} 0"));
    }

    #[test]
    fn what_is_expected_of_a_route_is_at_zero_before_the_first() {
        let metrics = Metrics::new();
        let route = metrics.route("a");
        route.expect([Outcome::Executed, Outcome::Problem(Code::StoreUnavailable)]);
        drop(route.answered(Outcome::Executed, StatusCode::OK, Instant::now()));
        let text = metrics.encode();
        for line in [
            "oncegate_requests_total{outcome=\"executed\",route=\"a\"} 1",
            "oncegate_requests_total{outcome=\"store-unavailable\",route=\"a\"} 0",
            "oncegate_responses_total{class=\"2xx\",route=\"a\"} 1",
            "oncegate_responses_total{class=\"5xx\",route=\"a\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("_bucket{outcome=\"store-unavailable\""), "{text}");
    }

    #[test]
    fn a_route_without_traffic_exports_no_histograms() {
        let metrics = Metrics::new();
        let _route = metrics.route("quiet");
        let text = metrics.encode();
        assert!(!text.contains("_bucket"), "{text}");
        assert!(!text.contains("oncegate_requests_total{"), "{text}");
    }
}
