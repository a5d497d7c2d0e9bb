//! Completed records in memory and in a cache that gates share, in front of a store.
//!
//! A completed record does not change until it is removed, or superseded past its ttl. So a retry need not ask the
//! store for what it or another gate has just read. Where other processes write to the store too, one of them may
//! remove a record: the store and the cache publish that as soon as they can, and cached records are trusted for a
//! limited time.
//!
//! Nothing that is found here gives the right to execute: a request that finds nothing asks the store. A value in the
//! shared cache is authenticated with a secret that only its gates have, and dated by the store's clock: a stale,
//! changed or foreign value is a miss. Beside completed records it holds hints that a key is in flight. A hint is
//! trusted briefly, and only by a request like the one that made it: a different one asks the store, since the
//! attempt may just have ended. A retry of a claim that may have happened is never answered from the cache: the
//! record may be its own.

mod authenticator;
mod floor;
mod invalidation;
mod local_tier;
mod remote;
mod shared_tier;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::authenticator::CacheAuthenticator;
use self::floor::Floors;
use self::invalidation::InvalidationListener;
use self::local_tier::{CacheEntry, LocalTier};
pub use self::remote::{CacheOperation, RemoteCache, RemoteError};
use self::remote::{Lookup, RemoteClient};
use self::shared_tier::{OwnAttempt, SharedTier};
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Settled, Settlement, SharedQuotas,
    Store,
};
use crate::idempotency::codec;
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};

/// How long a hint that a key is in flight is trusted.
const HINT_TTL: Duration = Duration::from_secs(1);

/// How long the store's time is extrapolated without a reply: the clocks of two machines drift apart.
const MAX_TIME_AGE: Duration = Duration::from_secs(600);

/// How many running attempts of this process are tracked. Answers of others are cached once they are read.
const MAX_RUNNING: usize = 65_536;

/// Limits of the cache in this process's memory.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The most records.
    pub most_entries: usize,
    /// The most bytes of records, about.
    pub most_bytes: u64,
    /// How long cached records are trusted if other processes write to the store; `None` if they do not.
    pub max_age: Option<Duration>,
}

/// A cache that gates share.
pub struct SharedSettings {
    /// The shared cache.
    pub remote: Arc<dyn RemoteCache>,
    /// Under which its values are authenticated: what the gates have in common, of which a writer to the cache must
    /// not know all.
    pub secrets: [Arc<[u8]>; 2],
    /// Other secrets in the place of the first, under which gates may have authenticated values.
    pub other_secrets: Vec<Arc<[u8]>>,
    /// The store's time, and when the request for it was sent.
    pub time: (Timestamp, Instant),
}

/// The result of looking up a completed record: the label `result` of `oncegate_cache_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheResult {
    /// This process had it in memory.
    Memory,
    /// The shared cache had it.
    Hit,
    /// The shared cache had a hint that it is in flight.
    InFlight,
    /// Not cached.
    Miss,
    /// The value in the shared cache was too old, or may have been removed meanwhile.
    Stale,
    /// The value in the shared cache was not written by a gate of this store for this record.
    Invalid,
    /// The shared cache was not asked, because its hit rate is low.
    NotAsked,
    /// The shared cache was not asked, because it does not answer.
    Away,
    /// The shared cache did not answer in time.
    Late,
    /// The shared cache failed.
    Failed,
}

/// A store whose completed records are remembered.
pub struct Cached {
    inner: Arc<dyn Store>,
    local: Arc<LocalTier>,
    shared: Option<Arc<SharedTier>>,
    report: Box<dyn Fn(CacheResult) + Send + Sync>,
    quotas: Option<Arc<dyn SharedQuotas>>,
    /// The tasks that receive removals; they end with the store.
    _listeners: JoinSet<()>,
}

impl CacheResult {
    /// All there are.
    pub const ALL: [Self; 10] = [
        Self::Memory,
        Self::Hit,
        Self::InFlight,
        Self::Miss,
        Self::Stale,
        Self::Invalid,
        Self::NotAsked,
        Self::Away,
        Self::Late,
        Self::Failed,
    ];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Hit => "hit",
            Self::InFlight => "in-flight",
            Self::Miss => "miss",
            Self::Stale => "stale",
            Self::Invalid => "invalid",
            Self::NotAsked => "not-asked",
            Self::Away => "away",
            Self::Late => "late",
            Self::Failed => "failed",
        }
    }
}

impl Cached {
    /// In front of `inner`, with a cache that is shared where there is one; `report` receives the result of each
    /// lookup. Where [`Settings::max_age`] is not set, no other process may write to `inner`, whose time then runs as
    /// the monotonic clock does. Its tasks run on the runtime that this is called on.
    #[must_use]
    pub fn new(
        inner: Arc<dyn Store>,
        settings: &Settings,
        shared: Option<SharedSettings>,
        report: impl Fn(CacheResult) + Send + Sync + 'static,
    ) -> Self {
        let local = Arc::new(LocalTier::new(settings));
        let store_removals = inner.removals().filter(|_| settings.max_age.is_some());
        let cache_removals = shared.as_ref().map(|shared| shared.remote.removals());
        let mut listeners = JoinSet::new();
        let quotas = shared.as_ref().and_then(|shared| shared.remote.quotas()).or_else(|| inner.quotas());
        let tier = |shared: SharedSettings| SharedTier {
            client: RemoteClient::new(shared.remote),
            other_authenticators: shared
                .other_secrets
                .iter()
                .map(|other| CacheAuthenticator::new(&[other, &shared.secrets[1]]))
                .collect(),
            authenticator: CacheAuthenticator::new(&shared.secrets),
            max_age: settings.max_age.unwrap_or(Duration::MAX),
            time: Mutex::new(shared.time),
            running: Mutex::default(),
            uncertain: Mutex::default(),
            floors: Mutex::new(Floors::new(settings.max_age.unwrap_or(Duration::MAX), shared.time.0)),
        };
        let shared = shared.map(tier).map(Arc::new);
        let listener = InvalidationListener::new(&local, shared.as_ref());
        store_removals.into_iter().for_each(|removals| drop(listeners.spawn(listener.clone().of_store(removals))));
        cache_removals.into_iter().for_each(|removals| drop(listeners.spawn(listener.clone().of_cache(removals))));
        Self { inner, local, shared, report: Box::new(report), quotas, _listeners: listeners }
    }

    /// Looks up a record in the shared cache for a request like `fresh`.
    async fn ask(&self, id: RecordId, fresh: &NewRecord, removals: u64) -> Option<Claim> {
        let Some(tier) = &self.shared else {
            (self.report)(CacheResult::Miss);
            return None;
        };
        let (answered, claim) = match tier.client.get(id).await {
            Lookup::Value(value) => tier.evaluate(id, &value, fresh),
            Lookup::Nothing => (CacheResult::Miss, None),
            Lookup::NotAsked => (CacheResult::NotAsked, None),
            Lookup::Away => (CacheResult::Away, None),
            Lookup::Late => (CacheResult::Late, None),
            Lookup::Failed => (CacheResult::Failed, None),
        };
        // This record may have been removed meanwhile, or been cached by a gate that could not decrypt it.
        let claim = claim.filter(|(entry, _)| self.local.counted() == removals && !is_sealed(&entry.record));
        let is_left = claim.is_none() && matches!(answered, CacheResult::Hit | CacheResult::InFlight);
        (self.report)(if is_left { CacheResult::Stale } else { answered });
        let (entry, now) = claim?;
        let record = entry.record.clone();
        if answered == CacheResult::Hit {
            self.local.keep(id, entry, removals);
        }
        Some(Claim::Exists { record, now })
    }

    fn is_uncertain(&self, attempt: AttemptToken) -> bool {
        self.shared.as_ref().is_some_and(|tier| tier.uncertain().contains(&attempt))
    }

    /// Notes whether the outcome of a claim is known, or uncertain after an error.
    fn note(&self, attempt: AttemptToken, is_certain: bool, error: Option<&Error>) {
        let Some(tier) = &self.shared else { return };
        if is_certain {
            tier.uncertain().remove(&attempt);
        } else if let Some(Error::Indeterminate(_)) = error {
            tier.uncertain().insert(attempt);
        }
    }

    /// Caches a record from the store, here and for the other gates. One that could not be decrypted is not kept: another
    /// gate may have its key, and this one after a reload.
    fn keep(&self, id: RecordId, record: &Record, now: Timestamp, asked: Instant, removals: u64) {
        if is_sealed(record) {
            return;
        }
        self.local.keep(id, CacheEntry { record: record.clone(), read_at: now, asked }, removals);
        self.put(id, record, now, now, removals);
    }

    /// Caches a record for the other gates, as of `read_at`. Returns whether it was queued.
    fn put(&self, id: RecordId, record: &Record, read_at: Timestamp, now: Timestamp, removals: u64) -> bool {
        let Some(tier) = &self.shared else { return false };
        let Some((value, life)) = tier.value(id, record, read_at, now) else { return false };
        self.local.unless_removed(removals, || tier.client.put(id, value, life))
    }

    /// An attempt of this process has ended, and the store has its end.
    fn ended(&self, id: RecordId, attempt: AttemptToken, end: &Settlement, until: Timestamp, removals: u64) {
        let Some(tier) = &self.shared else { return };
        let claimed = tier.take(id, attempt);
        if matches!(end, Settlement::Complete { .. }) {
            match &claimed {
                Some(claimed) => tier.refuse_older_than_attempt(id, attempt, claimed.at),
                // Its own values may be refused as well, and are read again.
                None => tier.refuse_older_than_now(id),
            }
        }
        let is_put = match (end, claimed) {
            (Settlement::Complete { answer, .. }, Some(OwnAttempt { at, asked, head, .. })) => {
                let answer = Some(answer.clone());
                let record = Record { attempt, state: State::Completed, claimed_at: at, until, head, answer };
                // The store did not tell its time: it was as late as the claim at least.
                self.put(id, &record, at, at.plus(asked.elapsed()), removals)
            }
            _ => false,
        };
        if !is_put {
            // The next reader caches the completed record; until then, the hint that it is in flight must go.
            tier.client.delete(id);
        }
    }

    /// Forgets what this process remembers, and what it is reading. The shared cache keeps what it has.
    pub fn forget_all(&self) {
        self.local.forget_all();
    }
}

fn is_sealed(record: &Record) -> bool {
    codec::is_sealed(&record.head) || record.answer.as_deref().is_some_and(codec::is_sealed)
}

#[async_trait]
impl Store for Cached {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        let found = self.local.find(id);
        if found.is_some() {
            (self.report)(CacheResult::Memory);
        }
        found
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        let removals = self.local.counted();
        let is_first = !self.is_uncertain(fresh.attempt);
        if is_first && let Some(found) = self.ask(id, &fresh, removals).await {
            return Ok(found);
        }
        let asked = Instant::now();
        let claimed = self.inner.claim(id, fresh.clone()).await;
        self.note(fresh.attempt, claimed.is_ok(), claimed.as_ref().err());
        let claimed = claimed?;
        match &claimed {
            Claim::Exists { record, now } => {
                if let Some(tier) = &self.shared {
                    tier.observe_time(*now, asked);
                }
                self.keep(id, record, *now, asked, removals);
            }
            Claim::Inserted(at) => {
                if let Some(tier) = &self.shared {
                    // A retried claim was made before.
                    if is_first {
                        tier.observe_time(*at, asked);
                    }
                    tier.claimed(id, fresh, *at, asked);
                }
            }
        }
        Ok(claimed)
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        let attempt = fresh.attempt;
        let superseded = self.inner.supersede(id, seen, fresh).await;
        // Another current record may be of this attempt as well.
        self.note(attempt, matches!(superseded, Ok(true)), superseded.as_ref().err());
        if !matches!(superseded, Ok(false)) {
            self.local.forget(id);
            if let Some(tier) = &self.shared {
                tier.client.delete(id);
            }
        }
        superseded
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let removals = self.local.counted();
        let settled = self.inner.settle(id, attempt, end.clone()).await?;
        self.note(attempt, true, None);
        match &settled {
            Settled::Done { until } => self.ended(id, attempt, &end, *until, removals),
            Settled::NotCurrent { .. } => {
                if let Some(tier) = &self.shared {
                    drop(tier.take(id, attempt));
                }
            }
        }
        Ok(settled)
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.inner.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.inner.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        // Only what has expired, which is not recalled any more.
        self.inner.sweep(limit).await
    }

    async fn changed(&self, id: RecordId) {
        self.inner.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.inner.removals()
    }

    fn beneath(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::clone(&self.inner))
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        self.quotas.clone()
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        self.inner.audit()
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.inner.deliveries()
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.inner.get(id).await
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        self.inner.is_held(id).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.inner.list(filter, after, limit).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.inner.scan(filter, after, limit).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let (inner, local, shared) = (Arc::clone(&self.inner), Arc::clone(&self.local), self.shared.clone());
        local.forget(id);
        // Runs to its end even if its caller goes: the removal would happen all the same.
        let removing = tokio::spawn(async move {
            let removed = inner.remove(id, attempt).await;
            local.forget(id);
            if let Some(tier) = shared {
                tier.refuse_older_than_now(id);
                tier.client.invalidate(id);
            }
            removed
        });
        removing.await.unwrap_or_else(|error| Err(Error::indeterminate(ErrorKind::Other, error)))
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.inner.count().await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.inner.changes(origins, rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.inner.adopt(origins, rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.inner.identities().await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.inner.ping().await
    }

    fn away(&self) -> Vec<Arc<str>> {
        self.inner.away()
    }

    async fn silent(&self) -> Vec<Arc<str>> {
        self.inner.silent().await
    }

    async fn close(&self) {
        if let Some(tier) = &self.shared {
            tier.client.flush_invalidations().await;
        }
        self.inner.close().await;
    }
}
