//! A store that reports how long each call took and whether it failed, and logs its outages.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

use super::audit::{self, EntryFilter, EntryPage, NewEntry, Position};
use super::deliveries::{
    self, Acceptance, Batch, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold, DeliveryPage,
    NewDelivery, Sequence, Take,
};
use super::outage::{OperationHealth, Role, StoreHealth};
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, OriginId, Page, RecordEntry, Removal, Resealing, Settled,
    Settlement, SharedQuotas, Store,
};
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp, Version};

/// After this time without an answer, the heartbeat fails.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// A call of a store: the label `op` of the metrics of stores. Some calls share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named after methods of `Store`, `AuditLog` and `Deliveries`")]
pub enum StoreOp {
    Claim,
    Supersede,
    Settle,
    Renew,
    ExpireLeases,
    Sweep,
    Get,
    List,
    Remove,
    Count,
    Changes,
    Adopt,
    Identities,
    Ping,
    Append,
    Amend,
    Entries,
    SweepEntries,
    Accept,
    TakeDue,
    ChangeDelivery,
    Deliveries,
    SweepDeliveries,
}

/// How many callers wait for each operation.
#[derive(Debug, Default)]
pub struct OperationsInFlight([AtomicUsize; StoreOp::COUNT]);

/// One of them, until it is dropped.
struct InFlight<'a>(&'a AtomicUsize);

/// Reports every call of the store inside it. Calls that are cancelled are not reported.
pub struct Metered {
    store: Arc<dyn Store>,
    report: Box<dyn Fn(StoreOp, Duration, Option<ErrorKind>) + Send + Sync>,
    in_flight: Arc<OperationsInFlight>,
    health: StoreHealth,
    operations: [OperationHealth; StoreOp::COUNT],
}

impl StoreOp {
    /// How many there are.
    pub const COUNT: usize = Self::SweepDeliveries as usize + 1;

    /// Those that requests wait for.
    pub const OF_REQUESTS: [Self; 5] = [Self::Claim, Self::Supersede, Self::Settle, Self::Renew, Self::Accept];

    /// The word for each, and what it tells of an outage, in their order.
    const TABLE: [(Self, &'static str, Role); Self::COUNT] = [
        (Self::Claim, "claim", Role::Claims),
        (Self::Supersede, "supersede", Role::Claims),
        (Self::Settle, "settle", Role::Background),
        (Self::Renew, "renew", Role::Background),
        (Self::ExpireLeases, "expire_leases", Role::Heartbeat),
        (Self::Sweep, "sweep", Role::Background),
        (Self::Get, "get", Role::Foreground),
        (Self::List, "list", Role::Foreground),
        (Self::Remove, "remove", Role::Foreground),
        (Self::Count, "count", Role::Background),
        (Self::Changes, "changes", Role::Foreground),
        (Self::Adopt, "adopt", Role::Foreground),
        (Self::Identities, "identities", Role::Foreground),
        (Self::Ping, "ping", Role::Foreground),
        (Self::Append, "append", Role::Foreground),
        (Self::Amend, "amend", Role::Foreground),
        (Self::Entries, "entries", Role::Foreground),
        (Self::SweepEntries, "sweep_entries", Role::Background),
        (Self::Accept, "accept", Role::Claims),
        (Self::TakeDue, "take_due", Role::Background),
        (Self::ChangeDelivery, "change_delivery", Role::Background),
        (Self::Deliveries, "deliveries", Role::Foreground),
        (Self::SweepDeliveries, "sweep_deliveries", Role::Background),
    ];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        Self::TABLE[self as usize].1
    }
}

const _: () = {
    let mut place = 0;
    while place < StoreOp::COUNT {
        assert!(StoreOp::TABLE[place].0 as usize == place, "the table is in the order of the operations");
        place += 1;
    }
};

impl Metered {
    /// Tells `report` which call of `store` ended, how long it took, and why it failed if it did.
    pub fn new(
        store: Arc<dyn Store>,
        report: impl Fn(StoreOp, Duration, Option<ErrorKind>) + Send + Sync + 'static,
    ) -> Self {
        let operations = StoreOp::TABLE.map(|(_, word, role)| OperationHealth::new(word, role));
        let in_flight = Arc::default();
        Self { store, report: Box::new(report), in_flight, health: StoreHealth::default(), operations }
    }

    /// How many callers wait for each operation now.
    #[must_use]
    pub fn in_flight(&self) -> Arc<OperationsInFlight> {
        Arc::clone(&self.in_flight)
    }

    /// Names the database in the log.
    #[must_use]
    pub fn named(mut self, database: Arc<str>) -> Self {
        self.health.database = Some(database);
        self
    }

    /// Says that it is one of several databases of a store.
    #[must_use]
    pub fn with_others(mut self) -> Self {
        self.health.has_others = true;
        self
    }

    async fn timed<T>(&self, op: StoreOp, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let in_flight = InFlight::new(&self.in_flight.0[op as usize]);
        let began = Instant::now();
        let result = call.await;
        let took = began.elapsed();
        drop(in_flight);
        let operation = &self.operations[op as usize];
        match &result {
            Ok(_) => self.health.worked(operation),
            Err(error) => self.health.failed(operation, error),
        }
        (self.report)(op, took, result.as_ref().err().map(|error| error.cause().kind));
        result
    }
}

impl OperationsInFlight {
    /// Each operation, and how many callers wait for it now.
    pub fn iter(&self) -> impl Iterator<Item = (StoreOp, usize)> {
        let operations = StoreOp::TABLE.into_iter().map(|(op, ..)| op);
        operations.zip(self.0.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}

impl<'a> InFlight<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        self.timed(StoreOp::Claim, self.store.claim(id, fresh)).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.timed(StoreOp::Supersede, self.store.supersede(id, seen, fresh)).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.timed(StoreOp::Settle, self.store.settle(id, attempt, end)).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.timed(StoreOp::Renew, self.store.renew(held)).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        // The heartbeat of the store: while it hangs, it fails again and again.
        let heartbeat = &self.operations[StoreOp::ExpireLeases as usize];
        self.health.heartbeat_begins(heartbeat);
        let expiring = async {
            let mut expiring = self.store.expire_leases(limit);
            loop {
                match tokio::time::timeout(HANGS_AFTER, &mut expiring).await {
                    Ok(expired) => return expired,
                    Err(_) => {
                        let hangs = Error::indeterminate(ErrorKind::Timeout, "the store does not answer");
                        self.health.failed(heartbeat, &hangs);
                    }
                }
            }
        };
        self.timed(StoreOp::ExpireLeases, expiring).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.timed(StoreOp::Sweep, self.store.sweep(limit)).await
    }

    async fn changed(&self, id: RecordId) {
        // How long a caller waits says nothing about the store.
        self.store.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.store.removals()
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        self.store.quotas()
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        self.store.resealing()
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        self.store.audit().map(|_| self as &dyn AuditLog)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.store.deliveries().map(|_| self as &dyn Deliveries)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.timed(StoreOp::Get, self.store.get(id)).await
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        self.store.is_held(id).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.timed(StoreOp::List, self.store.list(filter, after, limit)).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.timed(StoreOp::List, self.store.scan(filter, after, limit)).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.timed(StoreOp::Remove, self.store.remove(id, attempt)).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.timed(StoreOp::Count, self.store.count()).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.timed(StoreOp::Changes, self.store.changes(origins, rules)).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.timed(StoreOp::Adopt, self.store.adopt(origins, rules, accept_change)).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.timed(StoreOp::Identities, self.store.identities()).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.timed(StoreOp::Ping, self.store.ping()).await
    }

    async fn owns(&self, id: RecordId) -> Result<bool, Error> {
        self.store.owns(id).await
    }

    fn away(&self) -> Vec<Arc<str>> {
        self.store.away()
    }

    async fn silent(&self) -> Vec<Arc<str>> {
        self.store.silent().await
    }

    async fn close(&self) {
        self.store.close().await;
    }
}

#[async_trait]
impl AuditLog for Metered {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        self.timed(StoreOp::Append, audit::of(&*self.store)?.append(entry)).await
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        self.timed(StoreOp::Amend, audit::of(&*self.store)?.amend(position, detail)).await
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        self.timed(StoreOp::Entries, audit::of(&*self.store)?.entries(filter, before, limit)).await
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        self.timed(StoreOp::SweepEntries, audit::of(&*self.store)?.sweep_entries(limit)).await
    }
}

#[async_trait]
impl Deliveries for Metered {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.timed(StoreOp::Accept, deliveries::of(&*self.store)?.accept(id, new)).await
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.timed(StoreOp::Deliveries, deliveries::of(&*self.store)?.delivery(id)).await
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        self.timed(StoreOp::TakeDue, deliveries::of(&*self.store)?.take_due(take)).await
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        self.timed(StoreOp::ChangeDelivery, deliveries::of(&*self.store)?.change(taken, change)).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.timed(StoreOp::ChangeDelivery, deliveries::of(&*self.store)?.requeue(id)).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.timed(StoreOp::Deliveries, deliveries::of(&*self.store)?.deliveries(filter, after, limit)).await
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.timed(StoreOp::Deliveries, deliveries::of(&*self.store)?.count_deliveries()).await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        self.timed(StoreOp::ChangeDelivery, deliveries::of(&*self.store)?.pause(origin, is_paused)).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.timed(StoreOp::Deliveries, deliveries::of(&*self.store)?.paused()).await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        self.timed(StoreOp::SweepDeliveries, deliveries::of(&*self.store)?.sweep_deliveries(limit)).await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;

    use super::*;
    use crate::store::memory::Memory;
    use crate::store::unreliable::{Fault, Unreliable};

    #[tokio::test(start_paused = true)]
    async fn an_operation_is_in_flight_until_it_ends_or_is_given_up() {
        let store = Arc::new(Unreliable::new(Arc::new(Memory::new())));
        let metered = Metered::new(store.clone(), |_, _, _| {});
        let in_flight = metered.in_flight();
        let waiting = |op| in_flight.iter().find(|(found, _)| *found == op).unwrap().1;
        store.script([Fault::Hang, Fault::Delay(Duration::from_secs(1)), Fault::Refuse]);
        {
            let mut hanging = pin!(metered.ping());
            assert!(poll!(hanging.as_mut()).is_pending());
            let mut slow = pin!(metered.ping());
            assert!(poll!(slow.as_mut()).is_pending());
            assert_eq!((waiting(StoreOp::Ping), waiting(StoreOp::Claim)), (2, 0));
            slow.await.unwrap();
            assert_eq!(waiting(StoreOp::Ping), 1);
        }
        assert_eq!(waiting(StoreOp::Ping), 0, "its caller has gone");
        metered.ping().await.unwrap_err();
        assert_eq!(waiting(StoreOp::Ping), 0);
    }
}
