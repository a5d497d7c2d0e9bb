//! The metrics registry: the metrics and their names.
//!
//! Handles are looked up once, when a route or a store is set up. What runs per request only adds to atomics: no
//! label is looked up, nothing is allocated. Series that belong to an outcome or a store operation appear with the
//! first one of their kind, so that a route without traffic does not export twenty empty histograms.

mod attempt_guard;
mod reading;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use super::admin_refusal::AdminRefusal;
use super::consumers::ConsumerFamilies;
use super::deliveries::DeliveryGauges;
use super::limits::{Level, Limit, LimitMetrics};
use super::log_throttle::LogThrottle;
use super::losses::Losses;
use super::observed::{Observed, ObservedReport};
use super::outcome::Outcome;
use super::records_by_key::RecordsByKey;
use super::register::{add, by_reason, counter, gauge, histograms};
use super::wall_clock;
use crate::idempotency::record::{RecordId, State};
use crate::store::ErrorKind;
use crate::store::cached::CacheResult;
use crate::store::metered::StoreOp;
use crate::store::sealed::Closed;
pub use attempt_guard::AttemptGuard;
pub use reading::{ConsumerLevels, Durations, Levels, RouteTraffic, Traffic};

/// Upper bounds of request and upstream durations, in seconds.
const REQUEST_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Upper bounds of store durations, in seconds.
const STORE_BUCKETS: &[f64] =
    &[0.000_05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

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

pub(super) struct Families {
    registry: Registry,
    requests: IntCounterVec,
    request_duration: HistogramVec,
    upstream_duration: HistogramVec,
    store_duration: HistogramVec,
    store_errors: IntCounterVec,
    attempts_in_flight: IntGaugeVec,
    observed: IntCounterVec,
    observed_dropped: IntCounterVec,
    observed_routes: Mutex<BTreeMap<Box<str>, Arc<Observed>>>,
    control_invalid: IntCounterVec,
    cache_requests: IntCounterVec,
    limit_exceeded: IntCounterVec,
    unsealed: [IntCounter; Closed::ALL.len()],
    records_by_key: RecordsByKey,
    pub(super) deliveries: DeliveryGauges,
    pub(super) consumers: ConsumerFamilies,
    losses: Losses,
    admin_refused: [IntCounter; AdminRefusal::ALL.len()],
    levels: [Level; Limit::ALL.len()],
    connections: IntGauge,
    requests_in_flight: IntGauge,
    requests_waiting: IntGauge,
    buffered_bytes: IntGaugeVec,
    records: [IntGauge; State::ALL.len()],
    leases_expired: IntCounter,
    records_swept: IntCounter,
    reload_successful: IntGauge,
    /// When the configuration was read, in milliseconds of this process's clock.
    reloaded_at: AtomicU64,
    ready: IntGauge,
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
            upstream: OnceLock::new(),
            in_flight: self.families.attempts_in_flight.with_label_values(&[name]),
            control_invalid: self.families.control_invalid.with_label_values(&[name]),
            observed: OnceLock::new(),
        })
    }

    /// Counts the calls of a store of this kind: which ended, how long it took, and why it failed if it did.
    pub fn store(&self, store: &'static str) -> impl Fn(StoreOp, Duration, Option<ErrorKind>) + Send + Sync + 'static {
        let families = self.families.clone();
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

    /// Counts what comes of questions to the caches.
    pub fn cache(&self) -> impl Fn(CacheResult) + Send + Sync + 'static {
        let result = |answered: CacheResult| self.families.cache_requests.with_label_values(&[answered.as_str()]);
        let results = CacheResult::ALL.map(result);
        move |answered| results[answered as usize].inc()
    }

    /// Counts and logs parts of records that could not be decrypted.
    pub fn unsealed(&self) -> impl Fn(RecordId, Closed) + Send + Sync + 'static {
        let families = self.families.clone();
        let warned = Closed::ALL.map(|_| LogThrottle::default());
        move |record, closed| {
            families.unsealed[closed as usize].inc();
            let Some(others) = warned[closed as usize].due() else { return };
            match closed {
                Closed::NoKey => tracing::error!(
                    %record, others, "a record is encrypted with a key that store.encryption_keys does not have: its requests get 503"
                ),
                Closed::Plain => tracing::error!(
                    %record, others, "a record is not encrypted, and seal = \"required\" demands that it is: its requests get 503"
                ),
                Closed::Altered => tracing::error!(
                    %record, others, "a record was altered or moved in the store, and does not decrypt: its requests get 503"
                ),
            }
        }
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

    /// Whether the gate takes requests.
    pub fn ready(&self, ready: bool) {
        self.families.ready.set(ready.into());
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
        self.families.show_levels();
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
    /// Counts a request whose head came at `began` and whose answer begins now.
    pub fn answered(&self, outcome: Outcome, began: Instant) -> RequestTimer {
        let metrics = self.outcomes[outcome.index()].get_or_init(|| {
            let labels = [&*self.name, outcome.as_str()];
            OutcomeMetrics {
                requests: self.families.requests.with_label_values(&labels),
                duration: self.families.request_duration.with_label_values(&labels),
            }
        });
        metrics.requests.inc();
        RequestTimer { duration: metrics.duration.clone(), began }
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

impl Families {
    fn new() -> Self {
        let registry = Registry::new();
        let records = add(
            &registry,
            IntGaugeVec::new(
                Opts::new("oncegate_records", "Records in the store, when they were last counted."),
                &["state"],
            ),
        );
        let build = add(
            &registry,
            IntGaugeVec::new(
                Opts::new("oncegate_build_info", "Always 1; its labels say which build runs."),
                &["version"],
            ),
        );
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let reload_successful = gauge(
            &registry,
            "oncegate_config_last_reload_successful",
            "1 if the configuration was read without a problem the last time, else 0.",
        );
        reload_successful.set(1);
        Self {
            requests: add(
                &registry,
                IntCounterVec::new(
                    Opts::new("oncegate_requests_total", "Requests answered, by route and how they ended."),
                    &["route", "outcome"],
                ),
            ),
            request_duration: histograms(
                &registry,
                "oncegate_request_duration_seconds",
                "Time from a request's head to the end of its answer, or to the client's leaving.",
                &["route", "outcome"],
                REQUEST_BUCKETS,
            ),
            upstream_duration: histograms(
                &registry,
                "oncegate_upstream_duration_seconds",
                "Time that the upstream took to answer.",
                &["route"],
                REQUEST_BUCKETS,
            ),
            store_duration: histograms(
                &registry,
                "oncegate_store_duration_seconds",
                "Time that a store operation took, waiting included.",
                &["store", "op"],
                STORE_BUCKETS,
            ),
            store_errors: add(
                &registry,
                IntCounterVec::new(
                    Opts::new("oncegate_store_errors_total", "Store operations that failed."),
                    &["store", "op", "kind"],
                ),
            ),
            attempts_in_flight: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new("oncegate_attempts_in_flight", "Attempts that run on this replica now."),
                    &["route"],
                ),
            ),
            observed: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_observed_total",
                        "Requests of routes that only observe, by what they would have got.",
                    ),
                    &["route", "would"],
                ),
            ),
            observed_dropped: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_observed_dropped_total",
                        "Requests of routes that only observe that could not be evaluated, by why.",
                    ),
                    &["route", "reason"],
                ),
            ),
            observed_routes: Mutex::default(),
            control_invalid: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_control_invalid_total",
                        "Idempotency-Control directives of upstreams that were invalid and ignored.",
                    ),
                    &["route"],
                ),
            ),
            cache_requests: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_cache_requests_total",
                        "Questions for completed records before the store is asked, by what came of them.",
                    ),
                    &["result"],
                ),
            ),
            limit_exceeded: add(
                &registry,
                IntCounterVec::new(
                    Opts::new("oncegate_limit_exceeded_total", "How often a limit of the configuration was reached."),
                    &["limit"],
                ),
            ),
            records_by_key: RecordsByKey::new(&registry),
            deliveries: DeliveryGauges::new(&registry),
            consumers: ConsumerFamilies::new(&registry),
            losses: Losses::new(&registry),
            unsealed: by_reason(
                &registry,
                "oncegate_unsealed_total",
                "Parts of records that could not be decrypted, by reason.",
                Closed::ALL.map(Closed::as_str),
            ),
            admin_refused: by_reason(
                &registry,
                "oncegate_admin_refused_total",
                "Requests that the admin listener refused, by reason.",
                AdminRefusal::ALL.map(AdminRefusal::as_str),
            ),
            levels: Limit::ALL.map(|_| Level::default()),
            connections: gauge(&registry, "oncegate_connections", "Connections of clients."),
            requests_in_flight: gauge(
                &registry,
                "oncegate_requests_in_flight",
                "Requests that are being dealt with, until the end of their answers.",
            ),
            requests_waiting: gauge(
                &registry,
                "oncegate_requests_waiting",
                "Requests that wait for the attempt of another.",
            ),
            buffered_bytes: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new("oncegate_buffered_bytes", "Bytes of bodies that are held, by where."),
                    &["where"],
                ),
            ),
            records: State::ALL.map(|state| records.with_label_values(&[state.as_str()])),
            leases_expired: counter(
                &registry,
                "oncegate_leases_expired_total",
                "In-flight records that this replica turned unknown because their lease was past.",
            ),
            records_swept: counter(
                &registry,
                "oncegate_records_swept_total",
                "Expired records that this replica removed.",
            ),
            reload_successful,
            reloaded_at: AtomicU64::new(wall_clock().0),
            ready: gauge(&registry, "oncegate_ready", "1 if the gate takes requests, else 0."),
            registry,
        }
    }

    /// Copies how much is taken of the limits: it changes with each request, and is seldom asked for.
    fn show_levels(&self) {
        for (limit, level) in Limit::ALL.into_iter().zip(&self.levels) {
            let gauge = match limit {
                Limit::MaxConnections => &self.connections,
                Limit::MaxRequests => &self.requests_in_flight,
                Limit::MaxWaiting => &self.requests_waiting,
                Limit::MaxBufferedMemory => &self.buffered_bytes.with_label_values(&["memory"]),
                Limit::MaxBufferedDisk => &self.buffered_bytes.with_label_values(&["disk"]),
                _ => continue,
            };
            gauge.set(i64::try_from(level.load(Ordering::Relaxed)).unwrap_or(i64::MAX));
        }
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
        let timer = route.answered(Outcome::Executed, Instant::now());
        tokio::time::advance(Duration::from_millis(3)).await;
        drop(timer);
        drop(route.answered(Outcome::Problem(Code::InFlight), Instant::now()));
        drop(route.answered(Outcome::Problem(Code::InFlight), Instant::now()));
        route.upstream_took(Duration::from_secs(2));
        route.control_invalid(2);
        metrics.store("memory")(StoreOp::Claim, Duration::from_micros(70), Some(ErrorKind::Full));
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
    fn a_route_without_traffic_exports_no_histograms() {
        let metrics = Metrics::new();
        let _route = metrics.route("quiet");
        let text = metrics.encode();
        assert!(!text.contains("_bucket"), "{text}");
        assert!(!text.contains("oncegate_requests_total{"), "{text}");
    }
}
