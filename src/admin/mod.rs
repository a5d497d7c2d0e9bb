//! Health, metrics and the records API, on a listener of their own.
//!
//! It knows the store and nothing of the gate: what an operator resolves here, a request meets as a record. No
//! attempt token and no credential leaves it. Answers and whole keys leave it for an operator only.

mod access;
mod answer;
mod api;
mod audit;
mod bulk;
mod clients;
mod deliveries;
mod endpoints;
mod forms;
mod openapi;
mod page;
mod precondition;
mod query;
mod readiness;
mod records;
mod reload;
mod reseal;
mod resolve;
mod scope;
mod server;
mod stats;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod throttle;
mod tokens;
mod view;
mod wanted;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::{Semaphore, mpsc};

use crate::http::accept::{ServerTls, TlsFiles};
use crate::http::socket::Listen;
use crate::http::usage::Usage;
use crate::idempotency::identity::RecordIdHashers;
use crate::store::Store;
use crate::store::sealed::Resealer;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::observed::ObservedReport;

pub use audit::{AuditWriter, Begun, Outcome};
pub use readiness::{Phase, Readiness};
pub use reload::{ReloadProblem, ReloadReport, ReloadRequest};
pub use resolve::MAX_BODY;
pub use server::serve;
pub use tokens::{Role, Secret, Token, UNGUESSABLE};
pub use wanted::{parse_age, parse_since, parse_time};

use self::throttle::Throttle;
use self::tokens::Tokens;

/// How long an answer that an operator gives is kept where its record's route is not configured any more.
const DEFAULT_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// How many lists of records are made at a time: each reads up to a thousand records, and whole answers with them.
const MAX_LISTINGS: usize = 2;

/// `[admin]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens.
    pub listen: Listen,
    /// The bearer tokens that it takes, each with another secret. Without any, it demands none.
    pub tokens: Vec<Token>,
    /// Its certificate, and whose certificates clients need.
    pub tls: Option<ServerTls>,
    /// How long the entries of the audit log are kept.
    pub audit_ttl: Duration,
}

impl Settings {
    /// The token with which most can be done, for commands that ask this listener.
    #[must_use]
    pub fn strongest_token(&self) -> Option<&Token> {
        self.tokens.iter().rev().max_by_key(|token| token.role)
    }
}

/// What the API tells of a route, and what it needs of it.
#[derive(Clone, Debug, serde::Serialize, schemars::JsonSchema)]
#[schemars(rename = "Route")]
pub struct RouteInfo {
    /// Its name, as in the records that it claimed.
    pub name: String,
    /// What its records are kept under.
    pub namespace: String,
    /// Methods it matches.
    pub methods: Vec<String>,
    /// Host it matches; `*` is any.
    pub host: String,
    /// Path it matches, as configured.
    pub path: String,
    /// The name of its upstream.
    pub upstream: String,
    /// `protect`, `observe`, `pass` or `accept`.
    pub mode: &'static str,
    /// The parts of its scope, as configured.
    pub scope: Vec<String>,
    /// Whether it accepts requests, and delivers them later.
    pub accepts: bool,
    /// How long a completed record answers retries; shown in seconds. Also of answers that operators give.
    #[serde(rename = "ttl_seconds", serialize_with = "seconds")]
    #[schemars(with = "u64")]
    pub ttl: Duration,
}

/// `GET /api/v1/routes`
#[derive(serde::Serialize, schemars::JsonSchema)]
struct RouteList<'a> {
    routes: &'a [RouteInfo],
}

/// `GET /api/v1/observed`
#[derive(serde::Serialize, schemars::JsonSchema)]
struct Observations {
    routes: Vec<ObservedReport>,
}

/// What the admin listener serves from.
///
/// It can serve before the store is open, so that a process that waits for its store is alive and says why it is not
/// ready: until [`State::set_store`], the records API answers 503.
pub struct State {
    metrics: Metrics,
    readiness: Readiness,
    configured: ArcSwap<Configured>,
    tls: ArcSwapOption<ServerTls>,
    identifiers: RecordIdHashers,
    service: Arc<str>,
    store: OnceLock<Arc<dyn Store>>,
    resealer: OnceLock<Arc<Resealer>>,
    reloads: OnceLock<mpsc::Sender<ReloadRequest>>,
    ping: readiness::Ping,
    listings: Semaphore,
    /// One change of many records at a time.
    changes: Semaphore,
    throttle: Throttle,
    usage: OnceLock<Arc<Usage>>,
    stats: stats::StatsState,
}

/// What another configuration changes.
struct Configured {
    tokens: Tokens,
    routes: Vec<RouteInfo>,
    audit_ttl: Duration,
}

impl Configured {
    fn new(settings: &Settings, routes: Vec<RouteInfo>) -> Self {
        Self { tokens: Tokens::of(&settings.tokens), routes, audit_ttl: settings.audit_ttl }
    }
}

impl State {
    /// For one service: `identifiers` must be the gate's, so that keys are found; only records of `service` are shown.
    #[must_use]
    pub fn new(
        settings: &Settings,
        metrics: Metrics,
        readiness: Readiness,
        identifiers: RecordIdHashers,
        service: Arc<str>,
        routes: Vec<RouteInfo>,
    ) -> Self {
        Self {
            metrics,
            readiness,
            tls: ArcSwapOption::from_pointee(settings.tls.as_ref().map(without_http2)),
            configured: ArcSwap::from_pointee(Configured::new(settings, routes)),
            identifiers,
            service,
            store: OnceLock::new(),
            resealer: OnceLock::new(),
            reloads: OnceLock::new(),
            ping: readiness::Ping::default(),
            listings: Semaphore::new(MAX_LISTINGS),
            changes: Semaphore::new(1),
            throttle: Throttle::default(),
            usage: OnceLock::new(),
            stats: stats::StatsState::default(),
        }
    }

    /// The store is open. Only the first call counts.
    pub fn set_store(&self, store: Arc<dyn Store>) {
        if self.store.set(store).is_err() {
            tracing::debug!("the admin listener has its store already");
        }
    }

    /// The store has keys, and this looks after them. Only the first call counts.
    pub fn set_resealer(&self, resealer: Arc<Resealer>) {
        if self.resealer.set(resealer).is_err() {
            tracing::debug!("the admin listener has its keys already");
        }
    }

    /// The process takes requests to read its configuration again. Only the first call counts.
    pub fn set_reloads(&self, reloads: mpsc::Sender<ReloadRequest>) {
        if self.reloads.set(reloads).is_err() {
            tracing::debug!("the admin listener passes on reloads already");
        }
    }

    /// The process counts against these limits. Only the first call counts.
    pub fn set_usage(&self, usage: Arc<Usage>) {
        if self.usage.set(usage).is_err() {
            tracing::debug!("the admin listener knows the limits already");
        }
    }

    /// The configuration was read again: from now on these are the tokens, the routes and, for new connections, the
    /// certificates.
    pub fn reload(&self, settings: &Settings, routes: Vec<RouteInfo>) {
        self.configured.store(Arc::new(Configured::new(settings, routes)));
        self.tls.store(settings.tls.as_ref().map(without_http2).map(Arc::new));
    }

    /// Whether it asks for a token.
    #[must_use]
    pub fn asks_for_token(&self) -> bool {
        self.configured.load().tokens.are_demanded()
    }

    /// The files of its certificates, where it encrypts.
    pub fn tls_files(&self) -> Option<TlsFiles> {
        self.tls.load().as_ref().map(|tls| tls.files.clone())
    }

    /// The files of its certificates have changed. Where a configuration that names others came first, nothing happens.
    pub fn renew_certificates(&self, renewed: &ServerTls) {
        let renewed = Arc::new(without_http2(renewed));
        self.tls.rcu(|current| match current {
            Some(named) if named.files == renewed.files => Some(Arc::clone(&renewed)),
            other => other.clone(),
        });
    }

    /// What writes its audit entries.
    #[must_use]
    pub fn audit_writer(&self) -> AuditWriter {
        AuditWriter { service: Arc::clone(&self.service), ttl: self.configured.load().audit_ttl }
    }

    /// How long an answer that an operator gives for a record of this route is kept, from then.
    fn ttl(&self, route: Option<&str>) -> Duration {
        let configured = self.configured.load();
        let known = configured.routes.iter().find(|known| Some(&*known.name) == route);
        known.map_or(DEFAULT_TTL, |known| known.ttl)
    }
}

/// The same for a listener that speaks HTTP/1.1 only.
fn without_http2(tls: &ServerTls) -> ServerTls {
    let mut config = rustls::ServerConfig::clone(&tls.config);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    ServerTls { files: tls.files.clone(), config: Arc::new(config) }
}

fn seconds<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(duration.as_secs())
}
