//! A store that counts and times every call.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::metrics::{Metrics, StoreOpMetrics};
use crate::idempotency::record::{Attempt, Record, RecordId, Timestamp, Version};
use crate::store::{
    Claim, End, Error, Filter, Fresh, Identity, IdentityChange, LeaseRenewal, Listed, NamespaceRules, Origin, Page,
    Removal, Settled, Store,
};

/// Counts and times every call of the store inside it. Calls that are cancelled are not counted.
pub struct Metered {
    store: Arc<dyn Store>,
    claim: StoreOpMetrics,
    supersede: StoreOpMetrics,
    settle: StoreOpMetrics,
    renew: StoreOpMetrics,
    expire_leases: StoreOpMetrics,
    sweep: StoreOpMetrics,
    get: StoreOpMetrics,
    list: StoreOpMetrics,
    remove: StoreOpMetrics,
    count: StoreOpMetrics,
    changes: StoreOpMetrics,
    adopt: StoreOpMetrics,
    identities: StoreOpMetrics,
    ping: StoreOpMetrics,
}

impl Metered {
    /// Counts the calls of `store` in `metrics`, under the word for its kind.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, metrics: &Metrics) -> Self {
        let op = |op| metrics.store_op(store.kind(), op);
        Self {
            claim: op("claim"),
            supersede: op("supersede"),
            settle: op("settle"),
            renew: op("renew"),
            expire_leases: op("expire_leases"),
            sweep: op("sweep"),
            get: op("get"),
            list: op("list"),
            remove: op("remove"),
            count: op("count"),
            changes: op("changes"),
            adopt: op("adopt"),
            identities: op("identities"),
            ping: op("ping"),
            store,
        }
    }
}

#[async_trait]
impl Store for Metered {
    fn kind(&self) -> &'static str {
        self.store.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        self.store.recall(id)
    }

    async fn claim(&self, id: RecordId, fresh: Fresh) -> Result<Claim, Error> {
        timed(&self.claim, self.store.claim(id, fresh)).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        timed(&self.supersede, self.store.supersede(id, seen, fresh)).await
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        timed(&self.settle, self.store.settle(id, attempt, end)).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        timed(&self.renew, self.store.renew(held)).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        timed(&self.expire_leases, self.store.expire_leases(limit)).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        timed(&self.sweep, self.store.sweep(limit)).await
    }

    async fn changed(&self, id: RecordId) {
        // How long a caller waits says nothing about the store.
        self.store.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.store.removals()
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        timed(&self.get, self.store.get(id)).await
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        timed(&self.list, self.store.list(filter, after, limit)).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        timed(&self.remove, self.store.remove(id)).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        timed(&self.count, self.store.count()).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<Identity>) -> Result<Vec<IdentityChange>, Error> {
        timed(&self.changes, self.store.changes(origins, rules)).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        timed(&self.adopt, self.store.adopt(origins, rules, accept_change)).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        timed(&self.identities, self.store.identities()).await
    }

    async fn ping(&self) -> Result<(), Error> {
        timed(&self.ping, self.store.ping()).await
    }

    async fn close(&self) {
        self.store.close().await;
    }
}

async fn timed<T>(op: &StoreOpMetrics, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let began = Instant::now();
    let result = call.await;
    op.took(began.elapsed());
    if let Err(error) = &result {
        op.failed(error.cause().kind);
    }
    result
}
