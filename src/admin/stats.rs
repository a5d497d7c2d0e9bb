//! `GET /api/v1/stats`: what this gate does now, for people and for the page.
//!
//! It reads what requests have counted anyway. A task of the admin room keeps samples of the counters, so that there are
//! rates without a second scrape.

mod oldest;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior};

use self::oldest::{Oldest, Search};
use self::window::{Bases, SAMPLE_EVERY, Window};
use super::State;
use super::access::Principal;
use super::answer::{Answer, json};
use super::deliveries;
use super::tokens::Role;
use crate::idempotency::record::{self, Timestamp};
use crate::telemetry::limits::Limit;
use crate::telemetry::metrics::{ConsumerLevels, Durations, Levels, RouteTraffic, Traffic};
use crate::telemetry::{rfc3339, wall_clock};

/// What the admin room keeps for this answer.
pub(super) struct StatsState {
    started: Instant,
    started_at: Timestamp,
    window: Window,
    oldest_unknown: Search,
    /// The same, for the metric: what it remembers is older than an answer should be.
    oldest_sampled: Search,
}

/// What this gate does now. Counts are of this process since its start, if nothing else is said.
#[derive(Serialize, JsonSchema)]
pub(super) struct Stats {
    version: &'static str,
    /// Who asks.
    you: You,
    /// Of this answer, by the clock of this process.
    at: String,
    started_at: String,
    uptime_seconds: u64,
    /// Whether requests should be sent here.
    ready: bool,
    /// Why not.
    reason: Option<&'static str>,
    last_reload: LastReload,
    /// Over how long the rates are taken.
    rate_window_seconds: f64,
    /// Of how long durations are.
    latency_window_seconds: f64,
    requests_in_flight: u64,
    /// Requests that wait for the attempt of another.
    requests_waiting: u64,
    attempts_in_flight: u64,
    /// All requests, by the words of `oncegate_requests_total`.
    outcomes: Outcomes,
    /// How long requests took, whatever their outcome.
    latency: Option<Latency>,
    /// The configured routes, then those that have counted. The name of requests without a route is `-`.
    routes: Vec<RouteStats>,
    /// The configured consumers, by their names.
    consumers: Vec<ConsumerStats>,
    /// Records of the whole store, when they were last counted, by their state. Nothing until the store is open.
    records: Option<BTreeMap<&'static str, u64>>,
    /// Accepted requests of the whole store, when they were last counted, by `queued` and `dead`. Nothing until the store is open.
    deliveries: Option<BTreeMap<&'static str, u64>>,
    /// How long ago the oldest of the queued was accepted, when they were last counted. Nothing if there is none.
    oldest_delivery_seconds: Option<f64>,
    /// The unknown record of this service that was claimed first. Nothing if there is none, or the store has not said.
    oldest_unknown: Option<OldestUnknown>,
    limits: Vec<LimitStats>,
    store: StoreStats,
    /// Questions for completed records before the store is asked, by what came of them.
    cache: BTreeMap<&'static str, u64>,
}

/// Whose token it is that was shown.
#[derive(Serialize, JsonSchema)]
struct You {
    /// The name of the token, as in the audit log; `-` where none is demanded.
    name: String,
    #[schemars(extend("enum" = [Role::Viewer.as_str(), Role::Operator.as_str()]))]
    role: &'static str,
}

/// By the words of outcomes.
type Outcomes = BTreeMap<String, Count>;

#[derive(Default, Serialize, JsonSchema)]
struct Count {
    total: u64,
    per_second: f64,
}

#[derive(Serialize, JsonSchema)]
struct RouteStats {
    route: String,
    attempts_in_flight: u64,
    outcomes: Outcomes,
    latency: Option<Latency>,
    /// How long the upstream took to answer.
    upstream_latency: Option<Latency>,
}

#[derive(Serialize, JsonSchema)]
struct ConsumerStats {
    consumer: String,
    /// Whether it is connected to its broker.
    connected: bool,
    /// Messages that it has taken and not ended.
    messages_in_hand: u64,
    /// Messages that it ended, by the words of `oncegate_messages_total`.
    messages: BTreeMap<String, u64>,
}

/// Durations of the last minute, estimated from the buckets of the histogram.
#[derive(Serialize, JsonSchema)]
struct Latency {
    count: u64,
    p50_seconds: f64,
    p95_seconds: f64,
    p99_seconds: f64,
}

#[derive(Serialize, JsonSchema)]
struct OldestUnknown {
    id: String,
    route: Option<String>,
    claimed_at: String,
    age_seconds: u64,
}

#[derive(Serialize, JsonSchema)]
struct LimitStats {
    limit: &'static str,
    /// Of limits that all clients share.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max: Option<u64>,
    /// How often it was reached.
    reached: u64,
}

#[derive(Serialize, JsonSchema)]
struct StoreStats {
    /// Nothing until it is open.
    kind: Option<&'static str>,
    /// Which of its databases do not answer, where others do.
    away: Vec<String>,
    /// Operations that failed.
    errors: Vec<StoreError>,
}

#[derive(Serialize, JsonSchema)]
struct StoreError {
    store: String,
    op: String,
    kind: String,
    total: u64,
    per_second: f64,
}

/// When the configuration was read: at the start, or since.
#[derive(Serialize, JsonSchema)]
struct LastReload {
    at: String,
    successful: bool,
}

impl Default for StatsState {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            started_at: wall_clock(),
            window: Window::default(),
            oldest_unknown: Search::default(),
            oldest_sampled: Search::default(),
        }
    }
}

/// Keeps samples of the counters, and shows the age of the oldest unknown record.
pub(super) async fn keep_sampling(state: Arc<State>) {
    let mut ticks = tokio::time::interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        state.stats.window.keep(state.metrics.traffic());
        // No store is searched that has none.
        let unknown = state.metrics.levels().records[record::State::Unknown as usize];
        let oldest = match state.store.get() {
            Some(store) if unknown > 0 => state.stats.oldest_sampled.oldest(store, &state.service).await,
            _ => None,
        };
        state.metrics.oldest_unknown(oldest.map(|oldest| oldest.age));
    }
}

pub(super) async fn answer(state: &State, asker: &Principal) -> Answer {
    let reason = state.why_not_ready().await;
    let oldest = match state.store.get() {
        Some(store) => state.stats.oldest_unknown.oldest(store, &state.service).await,
        None => None,
    };
    json(StatusCode::OK, &Stats::new(state, asker, reason, oldest))
}

impl Stats {
    fn new(state: &State, asker: &Principal, reason: Option<&'static str>, oldest: Option<Oldest>) -> Self {
        let (traffic, levels) = (state.metrics.traffic(), state.metrics.levels());
        let since = Since::new(state, &traffic);
        // Before that, no zero has been counted.
        let is_open = state.store.get().is_some();
        let limits = limits(state, &levels);
        let used = |limit: Limit| limits.iter().find(|level| level.limit == limit.as_str())?.used;
        let routes = routes(state, &traffic, &levels);
        let none = RouteTraffic::default();
        let route = |name: &String| since.route(name.clone(), traffic.routes.get(name).unwrap_or(&none), &levels);
        let (mut all, mut all_before) = (Durations::default(), Durations::default());
        for (name, route) in &traffic.routes {
            all.add_all(&route.requests);
            all_before.add_all(&since.bases.of_durations.traffic.routes.get(name).unwrap_or(&none).requests);
        }
        Self {
            version: env!("CARGO_PKG_VERSION"),
            you: You { name: asker.name().to_owned(), role: asker.role.as_str() },
            at: rfc3339(wall_clock()),
            started_at: rfc3339(state.stats.started_at),
            uptime_seconds: state.stats.started.elapsed().as_secs(),
            ready: reason.is_none(),
            reason,
            last_reload: LastReload { at: rfc3339(levels.reloaded_at), successful: levels.reload_successful },
            rate_window_seconds: rounded(since.bases.of_rates.at.elapsed()),
            latency_window_seconds: rounded(since.bases.of_durations.at.elapsed()),
            requests_in_flight: used(Limit::MaxRequests).unwrap_or(0),
            requests_waiting: used(Limit::MaxWaiting).unwrap_or(0),
            attempts_in_flight: levels.attempts.values().sum(),
            outcomes: since.all_outcomes(&traffic),
            latency: Latency::of(&all.since(&all_before)),
            routes: routes.iter().map(route).collect(),
            consumers: levels.consumers.into_iter().map(ConsumerStats::of).collect(),
            records: is_open
                .then(|| record::State::ALL.map(record::State::as_str).into_iter().zip(levels.records).collect()),
            deliveries: is_open.then(|| deliveries::STATES.into_iter().zip(levels.deliveries).collect()),
            oldest_delivery_seconds: levels.oldest_delivery.map(rounded),
            oldest_unknown: oldest.map(OldestUnknown::of),
            store: StoreStats {
                kind: state.store.get().map(|store| store.kind()),
                away: state.away().iter().map(ToString::to_string).collect(),
                errors: since.store_errors(&traffic),
            },
            cache: levels.cache,
            limits,
        }
    }
}

/// The names of routes that are shown, in their order.
fn routes(state: &State, traffic: &Traffic, levels: &Levels) -> Vec<String> {
    let configured = state.configured.load();
    let mut names: Vec<String> = configured.routes.iter().map(|route| route.name.clone()).collect();
    let counted: BTreeSet<&String> = traffic.routes.keys().chain(levels.attempts.keys()).collect();
    let others = counted.into_iter().filter(|name| configured.routes.iter().all(|route| route.name != **name));
    names.extend(others.filter(|name| traffic.routes.contains_key(*name) || levels.attempts[*name] > 0).cloned());
    names
}

fn limits(state: &State, levels: &Levels) -> Vec<LimitStats> {
    let used = state.usage.get().map(|usage| usage.levels());
    let level = |limit: Limit| used.iter().flatten().find(|level| level.limit == limit);
    let stats = |(limit, reached): (Limit, u64)| LimitStats {
        limit: limit.as_str(),
        used: level(limit).map(|level| level.used),
        max: level(limit).map(|level| level.max),
        reached,
    };
    Limit::ALL.into_iter().zip(levels.reached).map(stats).collect()
}

/// What was counted before, to compare with.
struct Since {
    bases: Bases,
    rate_window: f64,
}

impl Since {
    fn new(state: &State, traffic: &Traffic) -> Self {
        let bases = state.stats.window.bases().unwrap_or_else(|| {
            state.stats.window.keep(traffic.clone());
            state.stats.window.bases().expect("one was kept just now")
        });
        let rate_window = bases.of_rates.at.elapsed().as_secs_f64();
        Self { bases, rate_window }
    }

    fn count(&self, total: u64, before: Option<&u64>) -> Count {
        let more = total.saturating_sub(before.copied().unwrap_or(0));
        Count { total, per_second: self.per_second(more) }
    }

    /// Nothing is said of less than a second: one request would be a thousand a second there.
    #[expect(clippy::cast_precision_loss, reason = "counts of ten seconds are far below 2^52")]
    fn per_second(&self, count: u64) -> f64 {
        if self.rate_window < 1.0 { 0.0 } else { (count as f64 / self.rate_window * 1000.0).round() / 1000.0 }
    }

    fn route(&self, route: String, traffic: &RouteTraffic, levels: &Levels) -> RouteStats {
        let (rates, durations) = (&self.bases.of_rates.traffic, &self.bases.of_durations.traffic);
        let before = rates.routes.get(&route).map(|before| &before.outcomes);
        let outcome = |(word, total): (&String, &u64)| {
            (word.clone(), self.count(*total, before.and_then(|before| before.get(word))))
        };
        let none = RouteTraffic::default();
        let earlier = durations.routes.get(&route).unwrap_or(&none);
        RouteStats {
            attempts_in_flight: levels.attempts.get(&route).copied().unwrap_or(0),
            outcomes: traffic.outcomes.iter().map(outcome).collect(),
            latency: Latency::of(&traffic.requests.since(&earlier.requests)),
            upstream_latency: Latency::of(&traffic.upstream.since(&earlier.upstream)),
            route,
        }
    }

    fn all_outcomes(&self, traffic: &Traffic) -> Outcomes {
        let (now, before) = (sums(traffic), sums(&self.bases.of_rates.traffic));
        now.into_iter().map(|(word, total)| (word.to_owned(), self.count(total, before.get(word)))).collect()
    }

    fn store_errors(&self, traffic: &Traffic) -> Vec<StoreError> {
        let before = &self.bases.of_rates.traffic.store_errors;
        let error = |(labels, total): (&[String; 3], &u64)| {
            let [store, op, kind] = labels.clone();
            let Count { total, per_second } = self.count(*total, before.get(labels));
            StoreError { store, op, kind, total, per_second }
        };
        traffic.store_errors.iter().map(error).collect()
    }
}

fn sums(traffic: &Traffic) -> BTreeMap<&str, u64> {
    let mut sums = BTreeMap::new();
    for (word, count) in traffic.routes.values().flat_map(|route| &route.outcomes) {
        *sums.entry(word.as_str()).or_default() += count;
    }
    sums
}

impl ConsumerStats {
    fn of((consumer, levels): (String, ConsumerLevels)) -> Self {
        let ConsumerLevels { connected, in_hand, messages } = levels;
        Self { consumer, connected, messages_in_hand: in_hand, messages }
    }
}

impl Latency {
    fn of(durations: &Durations) -> Option<Self> {
        let quantile = |part| durations.quantile(part).map(|seconds| (seconds * 1e6).round() / 1e6);
        Some(Self {
            count: durations.count,
            p50_seconds: quantile(0.5)?,
            p95_seconds: quantile(0.95)?,
            p99_seconds: quantile(0.99)?,
        })
    }
}

impl OldestUnknown {
    fn of(Oldest { id, route, claimed_at, age }: Oldest) -> Self {
        Self {
            id: id.to_string(),
            route: route.map(|route| route.as_ref().to_owned()),
            claimed_at: rfc3339(claimed_at),
            age_seconds: age.as_secs(),
        }
    }
}

/// To a tenth of a second.
fn rounded(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10.0).round() / 10.0
}
