//! Opening the store, or waiting for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{MissedTickBehavior, interval};

use super::Signals;
use super::durability::Durability;
use crate::admin::{Phase, Readiness};
use crate::cli::databases::{self, Spread};
use crate::config::{self, Resolved, Store as StoreSettings};
use crate::idempotency::record::RecordId;
use crate::store::metered::Metered;
use crate::store::postgres::{self, OpenError, Postgres};
use crate::store::{Store, memory::Memory, redis, sqlite};
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::metrics::Metrics;

/// How often to look whether the process that holds the store has gone.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// How often to look whether a full disk has room again.
const FULL_POLL: Duration = Duration::from_secs(2);

/// How often to look whether a database can be reached again.
const REACH_POLL: Duration = Duration::from_secs(1);

/// How often to say that the store or an address is waited for.
pub(super) const REMINDER: Duration = Duration::from_secs(10);

/// A store that is ready.
pub(super) struct Opened {
    /// It, metered.
    pub(super) store: Arc<dyn Store>,
    /// Whether other processes may write to it at the same time.
    pub(super) is_shared: bool,
    /// What a cache in front of it is bound to, where it can have one.
    pub(super) bound_to: Option<postgres::Opened>,
    /// Records that turned unknown when it was opened: their process has died.
    pub(super) lost: Vec<RecordId>,
    /// What it survives and what it does not.
    pub(super) durability: Durability,
}

/// Opens the store that is configured; nothing if the process was stopped while it waited.
pub(super) async fn open(
    config: &Resolved,
    readiness: &Readiness,
    metrics: &Metrics,
    signals: &mut Signals,
) -> anyhow::Result<Option<Opened>> {
    let (settings, source) = (&config.store, config.store_places.url());
    let named = || source.clone();
    let mut opened = match settings {
        StoreSettings::Memory => {
            let (store, durability) = (Arc::new(Memory::new()), Durability::memory());
            Some(Opened { store, is_shared: false, bound_to: None, lost: Vec::new(), durability })
        }
        StoreSettings::Sqlite { path } => open_sqlite(path, &source, readiness, signals).await?,
        StoreSettings::Postgres(settings) => open_postgres(settings, readiness, signals).await.with_context(named)?,
        StoreSettings::Databases(settings) => {
            open_databases(settings, readiness, metrics, signals).await.with_context(named)?
        }
        StoreSettings::Redis(settings) => open_redis(settings, readiness, signals).await.with_context(named)?,
    };
    // Each of several databases has its own meter.
    if let (Some(opened), Some(name)) = (&mut opened, only_database(settings)) {
        opened.store = Arc::new(metered(Arc::clone(&opened.store), metrics).named(name.into()));
    }
    if let Some(Durability { place, warnings, .. }) = opened.as_ref().map(|opened| &opened.durability) {
        for warning in warnings {
            tracing::warn!(store = place, "{warning}");
        }
    }
    Ok(opened)
}

/// How the log names the database of a store that has only one. No password is in it.
fn only_database(settings: &StoreSettings) -> Option<String> {
    match settings {
        StoreSettings::Memory => Some("memory".to_owned()),
        StoreSettings::Sqlite { path } => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Some(format!("sqlite:{}", path.display()))
        }
        StoreSettings::Postgres(settings) => Some(settings.servers()),
        StoreSettings::Databases(_) => None,
        StoreSettings::Redis(settings) => Some(settings.servers()),
    }
}

fn metered(store: Arc<dyn Store>, metrics: &Metrics) -> Metered {
    let (kind, calls) = (store.kind(), metrics.store(store.kind()));
    let metered = Metered::new(store, calls);
    metrics.watch_store(kind, metered.in_flight());
    metered
}

async fn open_sqlite(
    path: &Path,
    source: &str,
    readiness: &Readiness,
    signals: &mut Signals,
) -> anyhow::Result<Option<Opened>> {
    let path = std::path::absolute(path).with_context(|| format!("{source}: {}", path.display()))?;
    let mut poll = interval(FULL_POLL);
    let store = loop {
        tokio::select! {
            _ = poll.tick() => {}
            () = signals.stop() => return Ok(None),
        }
        let Some(lock) = lock(&path, readiness, signals).await? else { return Ok(None) };
        match tokio::task::spawn_blocking(move || sqlite::Sqlite::open(lock)).await? {
            Ok(store) => break store,
            Err(error @ sqlite::OpenError::Full { .. }) => {
                tracing::error!(%error, "the store cannot be opened for want of room; trying again");
            }
            Err(error) => return Err(error.into()),
        }
    };
    let lost = store.turned_unknown().to_vec();
    let durability = Durability::sqlite(&path, sqlite::filesystem_warning(&path));
    Ok(Some(Opened { store: Arc::new(store), is_shared: false, bound_to: None, lost, durability }))
}

async fn lock(path: &Path, readiness: &Readiness, signals: &mut Signals) -> anyhow::Result<Option<sqlite::Lock>> {
    let mut poll = interval(LOCK_POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let reminder = LogThrottle::every(REMINDER);
    let settings = sqlite::Settings::new(path);
    loop {
        tokio::select! {
            _ = poll.tick() => {}
            () = signals.stop() => return Ok(None),
        }
        if let Some(lock) = sqlite::Lock::try_acquire(&settings)? {
            return Ok(Some(lock));
        }
        readiness.set(Phase::WaitingForStoreLock);
        if reminder.due().is_some() {
            let (path, pid) = (path.display(), sqlite::Lock::holder(&settings));
            tracing::warn!(%path, pid, "another process holds the store; waiting for it to end");
        }
    }
}

async fn open_postgres(
    settings: &config::Postgres,
    readiness: &Readiness,
    signals: &mut Signals,
) -> anyhow::Result<Option<Opened>> {
    let servers = settings.servers();
    let open = async || Postgres::open(&settings.settings).await;
    let Some(store) = reach("the database", &servers, open, OpenError::is_passing, readiness, signals).await? else {
        return Ok(None);
    };
    let durability = Durability::postgres(&servers, settings.settings.connections, store.description());
    let bound_to = Some(store.opened());
    Ok(Some(Opened { store: Arc::new(store), is_shared: true, bound_to, lost: Vec::new(), durability }))
}

async fn open_databases(
    settings: &[config::Postgres],
    readiness: &Readiness,
    metrics: &Metrics,
    signals: &mut Signals,
) -> anyhow::Result<Option<Opened>> {
    let servers: Vec<String> = settings.iter().map(config::Postgres::servers).collect();
    let open = async || {
        let (calls, up) = (metrics.clone(), metrics.clone());
        let wrap = move |store: Postgres, name| {
            Arc::new(metered(Arc::new(store), &calls).named(name).with_others()) as Arc<dyn Store>
        };
        let observe = move |name: &str, is_up| up.database_up(name, is_up);
        databases::open(settings.to_vec(), Box::new(wrap), Box::new(observe)).await
    };
    let opened =
        reach("the databases", &servers.join(" and "), open, OpenError::is_passing, readiness, signals).await?;
    let Some(Spread { store, opened, databases }) = opened else { return Ok(None) };
    let connections = settings.first().map_or(0, |database| database.settings.connections);
    let durability = Durability::databases(&databases, connections);
    Ok(Some(Opened { store: Arc::new(store), is_shared: true, bound_to: Some(opened), lost: Vec::new(), durability }))
}

async fn open_redis(
    settings: &config::Redis,
    readiness: &Readiness,
    signals: &mut Signals,
) -> anyhow::Result<Option<Opened>> {
    let servers = settings.servers();
    let settings = redis::Settings { servers: settings.servers.clone() };
    let open = async || redis::Redis::open(&settings).await;
    let is_away = |error: &redis::OpenError| matches!(error, redis::OpenError::Unreachable(_));
    let Some(store) = reach("Redis", &servers, open, is_away, readiness, signals).await? else { return Ok(None) };
    let durability = Durability::redis(&servers, store.description());
    Ok(Some(Opened { store: Arc::new(store), is_shared: true, bound_to: None, lost: Vec::new(), durability }))
}

/// Opens a store on other machines as soon as it can be reached; nothing if the process was stopped while it waited.
async fn reach<S, E: std::error::Error + Send + Sync + 'static>(
    what: &str,
    servers: &str,
    open: impl AsyncFn() -> Result<S, E>,
    is_away: impl Fn(&E) -> bool,
    readiness: &Readiness,
    signals: &mut Signals,
) -> anyhow::Result<Option<S>> {
    let mut poll = interval(REACH_POLL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let reminder = LogThrottle::every(REMINDER);
    loop {
        let opening = async {
            poll.tick().await;
            open().await
        };
        let opened = tokio::select! {
            opened = opening => opened,
            () = signals.stop() => return Ok(None),
        };
        match opened {
            Ok(store) => return Ok(Some(store)),
            Err(error) if is_away(&error) => {
                readiness.set(Phase::WaitingForStore);
                if reminder.due().is_some() {
                    tracing::warn!(%servers, %error, "waiting for {what}; trying again every second");
                }
            }
            Err(error) => return Err(error).with_context(|| servers.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_names_the_only_database_without_a_password() {
        let of = |url: &str| {
            let text = format!("[upstreams]\na = \"http://127.0.0.1\"\n[store]\nurl = {url}\n");
            only_database(&config::load_text("gate.toml".into(), &text).unwrap().store)
        };
        assert_eq!(of("\"memory:\"").as_deref(), Some("memory"));
        assert_eq!(of("\"sqlite:/data/a.db\"").as_deref(), Some("sqlite:/data/a.db"));
        let postgres = of("\"postgres://gate:s3cret@db.internal/shop?sslmode=disable\"").unwrap();
        assert_eq!(postgres, "db.internal:5432/shop");
        assert_eq!(of("\"redis://gate:s3cret@cache.internal\"").as_deref(), Some("cache.internal:6379"));
        let several = "[\"postgres://gate@a/shop?sslmode=disable\", \"postgres://gate@b/shop?sslmode=disable\"]";
        assert_eq!(of(several), None, "each has a meter of its own");
    }
}
