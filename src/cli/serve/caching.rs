//! What answers retries before the store is asked.

use std::sync::Arc;

use anyhow::Context as _;

use super::opening::Opened;
use crate::config::Resolved;
use crate::gate::Secret;
use crate::store::cached::{Cached, RemoteCache, Settings, SharedSettings};
use crate::store::sealed::{Keyring, Resealer, Sealed, SealedCache};
use crate::store::{Store, redis};
use crate::telemetry::metrics::Metrics;

/// What the gate and its workers use.
pub(super) struct Remembering {
    /// The store behind its memory.
    pub(super) store: Arc<dyn Store>,
    /// The same, for what only it can do.
    pub(super) cached: Arc<Cached>,
    /// Looks after the keys of the store, where there are any.
    pub(super) resealer: Option<Arc<Resealer>>,
    /// The same, or one without keys: it finds the records that need a key.
    pub(super) finder: Arc<Resealer>,
}

/// Puts the memory of this process before a store, and the cache that gates share where there is one. Store and cache get
/// nothing that `keys` did not seal, where there are any; the memory is not sealed.
pub(super) fn before(
    opened: Opened,
    config: &Resolved,
    keys: Option<Arc<Keyring>>,
    metrics: &Metrics,
) -> anyhow::Result<Remembering> {
    let settings = Settings {
        most_entries: config.cache_max_entries,
        most_bytes: config.cache_max_bytes,
        max_age: opened.is_shared.then_some(config.cache_max_age),
    };
    let shared = match (&config.cache, opened.bound_to) {
        (Some(cache), Some(store)) => {
            let servers = cache.servers();
            let remote = redis::RedisCache::connect_lazily(&cache.servers, store.id);
            let remote = remote.with_context(|| format!("[store] cache: {servers}"))?;
            let content = |secret: Option<&Secret>| secret.map_or_else(|| [].into(), |secret| Arc::clone(&secret.0));
            let secrets = [content(config.gate.id_secret.as_ref()), store.secret.into()];
            let others = config.gate.other_id_secrets.iter().map(|secret| content(secret.as_ref()));
            let remote: Arc<dyn RemoteCache> = match &keys {
                Some(keys) => Arc::new(SealedCache::new(Arc::new(remote), Arc::clone(keys))),
                None => Arc::new(remote),
            };
            Some(SharedSettings { remote, secrets, other_secrets: others.collect(), time: (store.time, store.asked) })
        }
        _ => None,
    };
    let (store, service) = (opened.store, Arc::clone(&config.gate.service));
    let (store, resealer, finder): (Arc<dyn Store>, _, _) = match keys {
        Some(keys) => {
            let sealed = Sealed::new(store, keys, service, metrics.decryption_failed());
            let resealer = sealed.resealer();
            (Arc::new(sealed), Some(Arc::clone(&resealer)), resealer)
        }
        None => {
            let finder = Resealer::new(Arc::clone(&store), Arc::new(Keyring::new(Vec::new())), service);
            (store, None, Arc::new(finder))
        }
    };
    let cached = Arc::new(Cached::new(store, &settings, shared, metrics.cache()));
    Ok(Remembering { store: Arc::clone(&cached) as Arc<dyn Store>, cached, resealer, finder })
}
