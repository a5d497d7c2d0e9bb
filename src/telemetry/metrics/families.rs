//! The metrics of a process, with their names, labels and buckets.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::{Gauge, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::idempotency::record::State;
use crate::store::metered::OperationsInFlight;
use crate::store::sealed::DecryptionError;
use crate::telemetry::admin_refusal::AdminRefusal;
use crate::telemetry::consumers::ConsumerFamilies;
use crate::telemetry::deliveries::DeliveryGauges;
use crate::telemetry::limits::{Level, Limit};
use crate::telemetry::losses::Losses;
use crate::telemetry::observed::Observed;
use crate::telemetry::process::Process;
use crate::telemetry::records_by_key::RecordsByKey;
use crate::telemetry::register::{add, by_reason, counter, gauge, histograms};
use crate::telemetry::runtimes::Runtimes;
use crate::telemetry::wall_clock;

/// Upper bounds of request and upstream durations, in seconds.
const REQUEST_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Upper bounds of store durations, in seconds.
const STORE_BUCKETS: &[f64] =
    &[0.000_05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The metrics and their names.
pub(in crate::telemetry) struct Families {
    pub(in crate::telemetry) registry: Registry,
    pub(in crate::telemetry) requests: IntCounterVec,
    pub(in crate::telemetry) clients_gone: IntCounterVec,
    pub(in crate::telemetry) request_duration: HistogramVec,
    pub(in crate::telemetry) upstream_duration: HistogramVec,
    pub(in crate::telemetry) responses: IntCounterVec,
    pub(in crate::telemetry) store_duration: HistogramVec,
    pub(in crate::telemetry) store_errors: IntCounterVec,
    pub(in crate::telemetry) store_in_flight: IntGaugeVec,
    pub(in crate::telemetry) database_up: IntGaugeVec,
    pub(in crate::telemetry) stores: Mutex<Vec<(&'static str, Arc<OperationsInFlight>)>>,
    pub(in crate::telemetry) attempts_in_flight: IntGaugeVec,
    pub(in crate::telemetry) observed: IntCounterVec,
    pub(in crate::telemetry) observed_dropped: IntCounterVec,
    pub(in crate::telemetry) observed_routes: Mutex<BTreeMap<Box<str>, Arc<Observed>>>,
    pub(in crate::telemetry) control_invalid: IntCounterVec,
    pub(in crate::telemetry) probe_checks: IntCounterVec,
    pub(in crate::telemetry) probe_contradicted: IntGaugeVec,
    pub(in crate::telemetry) cache_requests: IntCounterVec,
    pub(in crate::telemetry) limit_exceeded: IntCounterVec,
    pub(in crate::telemetry) decryption_failures: [IntCounter; DecryptionError::ALL.len()],
    pub(in crate::telemetry) records_by_key: RecordsByKey,
    pub(in crate::telemetry) deliveries: DeliveryGauges,
    pub(in crate::telemetry) consumers: ConsumerFamilies,
    pub(in crate::telemetry) losses: Losses,
    pub(in crate::telemetry) admin_refused: [IntCounter; AdminRefusal::ALL.len()],
    pub(in crate::telemetry) levels: [Level; Limit::ALL.len()],
    pub(in crate::telemetry) connections: IntGauge,
    pub(in crate::telemetry) requests_in_flight: IntGauge,
    pub(in crate::telemetry) requests_waiting: IntGauge,
    pub(in crate::telemetry) buffered_bytes: IntGaugeVec,
    pub(in crate::telemetry) records: [IntGauge; State::ALL.len()],
    pub(in crate::telemetry) oldest_unknown: Gauge,
    pub(in crate::telemetry) leases_expired: IntCounter,
    pub(in crate::telemetry) records_swept: IntCounter,
    pub(in crate::telemetry) reload_successful: IntGauge,
    pub(in crate::telemetry) replaced_rules: IntGauge,
    /// When the configuration was read, in milliseconds of this process's clock.
    pub(in crate::telemetry) reloaded_at: AtomicU64,
    pub(in crate::telemetry) ready: IntGauge,
    pub(in crate::telemetry) process: Process,
    pub(in crate::telemetry) runtimes: Runtimes,
}

impl Families {
    pub(super) fn new() -> Self {
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
            clients_gone: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_clients_gone_total",
                        "Requests whose client left before its answer began, by route. No other metric of requests counts them.",
                    ),
                    &["route"],
                ),
            ),
            request_duration: histograms(
                &registry,
                "oncegate_request_duration_seconds",
                "Time from a request's head to the end of its answer, or to the client's leaving.",
                &["route", "outcome"],
                REQUEST_BUCKETS,
            ),
            responses: add(
                &registry,
                IntCounterVec::new(
                    Opts::new("oncegate_responses_total", "Requests answered, by route and class of the status."),
                    &["route", "class"],
                ),
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
            store_in_flight: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "oncegate_store_operations_in_flight",
                        "Store operations whose callers wait, queued or in progress.",
                    ),
                    &["store", "op"],
                ),
            ),
            database_up: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "oncegate_store_database_up",
                        "1 if a database of a store that is spread over several answers, else 0.",
                    ),
                    &["database"],
                ),
            ),
            stores: Mutex::default(),
            attempts_in_flight: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new("oncegate_attempts_in_flight", "Attempts that run on this gate now."),
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
            probe_checks: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_probe_checks_total",
                        "Checks of a route's probe against a request that is known to have succeeded, by finding.",
                    ),
                    &["route", "finding"],
                ),
            ),
            probe_contradicted: add(
                &registry,
                IntGaugeVec::new(
                    Opts::new(
                        "oncegate_probe_contradicted",
                        "1 if a route's probe did not find a request that had succeeded, else 0.",
                    ),
                    &["route"],
                ),
            ),
            cache_requests: add(
                &registry,
                IntCounterVec::new(
                    Opts::new(
                        "oncegate_cache_requests_total",
                        "Lookups of completed records in the caches, by result.",
                    ),
                    &["result"],
                ),
            ),
            limit_exceeded: add(
                &registry,
                IntCounterVec::new(
                    Opts::new("oncegate_limit_exceeded_total", "How often a limit was reached."),
                    &["limit"],
                ),
            ),
            records_by_key: RecordsByKey::new(&registry),
            deliveries: DeliveryGauges::new(&registry),
            consumers: ConsumerFamilies::new(&registry),
            losses: Losses::new(&registry),
            decryption_failures: by_reason(
                &registry,
                "oncegate_decryption_failures_total",
                "Parts of records that could not be decrypted, by reason.",
                DecryptionError::ALL.map(DecryptionError::as_str),
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
            oldest_unknown: add(
                &registry,
                Gauge::new(
                    "oncegate_oldest_unknown_seconds",
                    "How long ago the oldest unknown record of this service was claimed; 0 where there is none.",
                ),
            ),
            leases_expired: counter(
                &registry,
                "oncegate_leases_expired_total",
                "In-flight records whose lease was past, which this gate turned unknown or began another attempt of.",
            ),
            records_swept: counter(
                &registry,
                "oncegate_records_swept_total",
                "Expired records that this gate removed.",
            ),
            reload_successful,
            replaced_rules: gauge(
                &registry,
                "oncegate_replaced_rules",
                "Namespaces whose requests get 503, since another gate of the store finds their keys by other rules.",
            ),
            reloaded_at: AtomicU64::new(wall_clock().0),
            ready: gauge(&registry, "oncegate_ready", "1 if the gate takes requests, else 0."),
            process: Process::new(&registry),
            runtimes: Runtimes::new(&registry),
            registry,
        }
    }

    /// Reads what is not counted here: it changes with each request, and is seldom asked for.
    pub(super) fn refresh(&self) {
        self.process.refresh();
        self.runtimes.refresh();
        let whole = |count| i64::try_from(count).unwrap_or(i64::MAX);
        // Each database of a store that is spread over several counts its own.
        self.store_in_flight.reset();
        for (store, in_flight) in &*self.stores.lock().unwrap_or_else(PoisonError::into_inner) {
            for (op, count) in in_flight.iter() {
                self.store_in_flight.with_label_values(&[store, op.as_str()]).add(whole(count));
            }
        }
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
