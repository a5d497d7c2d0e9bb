//! A store that counts and times every call, and logs its outages.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::metrics::{Metrics, StoreOpMetrics};
use super::outage::{OperationHealth, Role, StoreHealth};
use crate::idempotency::record::{Attempt, Record, RecordId, Timestamp, Version};
use crate::store::{
    Claim, End, Error, Filter, Fresh, Identity, IdentityChange, LeaseRenewal, Listed, NamespaceRules, Origin, Page,
    Removal, Settled, Store,
};

/// Counts and times every call of the store inside it, and logs when it stops working and when it works again. Calls that
/// are cancelled are not counted.
pub struct Metered {
    store: Arc<dyn Store>,
    health: StoreHealth,
    claim: Operation,
    supersede: Operation,
    settle: Operation,
    renew: Operation,
    expire_leases: Operation,
    sweep: Operation,
    get: Operation,
    list: Operation,
    remove: Operation,
    count: Operation,
    changes: Operation,
    adopt: Operation,
    identities: Operation,
    ping: Operation,
}

/// What is kept of one operation.
struct Operation {
    metrics: StoreOpMetrics,
    health: OperationHealth,
}

impl Metered {
    /// Counts the calls of `store` in `metrics`, under the word for its kind.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, metrics: &Metrics) -> Self {
        let op = |name, role| Operation {
            metrics: metrics.store_op(store.kind(), name),
            health: OperationHealth::new(name, role),
        };
        Self {
            claim: op("claim", Role::Claims),
            supersede: op("supersede", Role::Claims),
            settle: op("settle", Role::Background),
            renew: op("renew", Role::Background),
            expire_leases: op("expire_leases", Role::Heartbeat),
            sweep: op("sweep", Role::Background),
            get: op("get", Role::Foreground),
            list: op("list", Role::Foreground),
            remove: op("remove", Role::Foreground),
            count: op("count", Role::Background),
            changes: op("changes", Role::Foreground),
            adopt: op("adopt", Role::Foreground),
            identities: op("identities", Role::Foreground),
            ping: op("ping", Role::Foreground),
            health: StoreHealth::default(),
            store,
        }
    }

    async fn timed<T>(&self, operation: &Operation, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let began = Instant::now();
        let result = call.await;
        operation.metrics.took(began.elapsed());
        match &result {
            Ok(_) => self.health.worked(&operation.health),
            Err(error) => {
                operation.metrics.failed(error.cause().kind);
                self.health.failed(&operation.health, error);
            }
        }
        result
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
        self.timed(&self.claim, self.store.claim(id, fresh)).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: Fresh) -> Result<bool, Error> {
        self.timed(&self.supersede, self.store.supersede(id, seen, fresh)).await
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, end: End) -> Result<Settled, Error> {
        self.timed(&self.settle, self.store.settle(id, attempt, end)).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.timed(&self.renew, self.store.renew(held)).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<usize, Error> {
        self.timed(&self.expire_leases, self.store.expire_leases(limit)).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.timed(&self.sweep, self.store.sweep(limit)).await
    }

    async fn changed(&self, id: RecordId) {
        // How long a caller waits says nothing about the store.
        self.store.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.store.removals()
    }

    async fn get(&self, id: RecordId) -> Result<Option<Listed>, Error> {
        self.timed(&self.get, self.store.get(id)).await
    }

    async fn list(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
        self.timed(&self.list, self.store.list(filter, after, limit)).await
    }

    async fn remove(&self, id: RecordId) -> Result<bool, Error> {
        self.timed(&self.remove, self.store.remove(id)).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.timed(&self.count, self.store.count()).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<Identity>) -> Result<Vec<IdentityChange>, Error> {
        self.timed(&self.changes, self.store.changes(origins, rules)).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<Identity>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.timed(&self.adopt, self.store.adopt(origins, rules, accept_change)).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.timed(&self.identities, self.store.identities()).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.timed(&self.ping, self.store.ping()).await
    }

    async fn close(&self) {
        self.store.close().await;
    }
}
