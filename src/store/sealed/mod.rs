//! Stores and caches that keep nothing readable: see [`keyring`].
//!
//! What does not open is passed on as it is. Nothing can decode it, so its request gets 503 and never runs again while the
//! record lives.

mod audit;
mod cache;
mod deliveries;
pub mod keyring;
mod locked;
mod resealer;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

pub use self::cache::SealedCache;
pub use self::keyring::{DecryptionError, Keyring, SealingKey};
use self::keyring::{Part, Sealing};
pub use self::locked::{Locked, Pace};
pub use self::resealer::{CountByKey, Resealed, Resealer};
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet,
    NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Settled, Settlement, SharedQuotas, Store,
};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};

/// A store that sees what it keeps only in sealed form.
pub struct Sealed {
    store: Arc<dyn Store>,
    keys: Arc<Keyring>,
    resealer: Arc<Resealer>,
    /// Called for records that do not open.
    report: Box<dyn Fn(RecordId, DecryptionError) + Send + Sync>,
}

impl Sealed {
    /// Seals what goes to `store`, for one service, and tells `report` what does not open.
    pub fn new(
        store: Arc<dyn Store>,
        keys: Arc<Keyring>,
        service: Arc<str>,
        report: impl Fn(RecordId, DecryptionError) + Send + Sync + 'static,
    ) -> Self {
        let resealer = Arc::new(Resealer::new(Arc::clone(&store), Arc::clone(&keys), service));
        Self { store, keys, resealer, report: Box::new(report) }
    }

    /// What looks after its keys.
    #[must_use]
    pub fn resealer(&self) -> Arc<Resealer> {
        Arc::clone(&self.resealer)
    }

    fn seal(&self, id: RecordId, fresh: NewRecord) -> NewRecord {
        let strictness = self.keys.strictness(fresh.origin);
        NewRecord { head: self.keys.seal_as(strictness, id, fresh.attempt, Part::Head, &fresh.head), ..fresh }
    }

    fn open(&self, id: RecordId, record: Record) -> Record {
        self.keys.open_record(id, record, |closed| (self.report)(id, closed))
    }

    /// A record that a request met. Where an upstream completed it, its answer is plain, and is sealed now. One from before
    /// the keys is left: a gate that does not have them yet may need it.
    fn open_met(&self, id: RecordId, record: Record) -> Record {
        let is_plain = |value: &Bytes| Sealing::of(value) == Sealing::Plain;
        if !is_plain(&record.head) && record.answer.as_ref().is_some_and(is_plain) {
            self.resealer.seal_soon(id);
        }
        self.open(id, record)
    }

    fn open_listed(&self, listed: RecordEntry) -> RecordEntry {
        let id = listed.id;
        self.keys.open_listed(listed, |closed| (self.report)(id, closed))
    }
}

#[async_trait]
impl Store for Sealed {
    fn kind(&self) -> &'static str {
        self.store.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        self.store.recall(id).map(|(record, now)| (self.open(id, record), now))
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        Ok(match self.store.claim(id, self.seal(id, fresh)).await? {
            Claim::Exists { record, now } => Claim::Exists { record: self.open_met(id, record), now },
            inserted @ Claim::Inserted(_) => inserted,
        })
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.store.supersede(id, seen, self.seal(id, fresh)).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let seal = |plain: &Bytes| self.keys.seal(id, attempt, Part::Ending, plain);
        let (sealed, written) = match end {
            Settlement::Complete { answer, expiry } => {
                (Settlement::Complete { answer: seal(&answer), expiry }, Some((State::Completed, answer)))
            }
            Settlement::Hold { cause } => (Settlement::Hold { cause: seal(&cause) }, Some((State::Unknown, cause))),
            Settlement::Release => (Settlement::Release, None),
        };
        let record = match self.store.settle(id, attempt, sealed).await? {
            Settled::NotCurrent { record } => record.map(|record| self.open_met(id, record)),
            done @ Settled::Done { .. } => return Ok(done),
        };
        // The same ending, which was written with another key before a reload: the store sees other bytes.
        let is_written = |record: &Record| {
            record.attempt == attempt
                && written
                    .as_ref()
                    .is_some_and(|(state, end)| record.state == *state && record.answer.as_ref() == Some(end))
        };
        Ok(match record {
            Some(record) if is_written(&record) => Settled::Done { until: record.until },
            record => Settled::NotCurrent { record },
        })
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.store.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.store.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.store.sweep(limit).await
    }

    async fn changed(&self, id: RecordId) {
        self.store.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.store.removals()
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        self.store.quotas()
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        self.store.audit().map(|_| self as &dyn AuditLog)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.store.deliveries().map(|_| self as &dyn Deliveries)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        Ok(self.store.get(id).await?.map(|listed| self.open_listed(listed)))
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        self.store.is_held(id).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let page = self.store.list(filter, after, limit).await?;
        Ok(Page { records: page.records.into_iter().map(|listed| self.open_listed(listed)).collect(), ..page })
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        let chunk = self.store.scan(filter, after, limit).await?;
        Ok(Chunk { records: chunk.records.into_iter().map(|listed| self.open_listed(listed)).collect(), ..chunk })
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.store.remove(id, attempt).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.store.count().await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.store.changes(origins, rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.store.adopt(origins, rules, accept_change).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.store.identities().await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.store.ping().await
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::store::contract::{self, Harness, model};
    use crate::store::memory::Memory;
    use crate::store::{Expiry, OriginId};

    fn keys(bytes: &[u8]) -> Arc<Keyring> {
        Arc::new(Keyring::new(bytes.iter().map(|byte| SealingKey::new("a".into(), &[*byte; 32])).collect()))
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_keeps_the_contract() {
        contract::run(async || {
            let (clock, step) = model::stopped_clock();
            let store = Sealed::new(Arc::new(Memory::with_clock(clock)), keys(&[1]), "s".into(), |id, closed| {
                panic!("{id} does not open: {closed:?}")
            });
            Harness::stepped(store, step).above_seal()
        })
        .await;
    }

    #[tokio::test]
    async fn a_settlement_that_is_repeated_with_another_key_is_recognised() {
        let ring = keys(&[1]);
        let store = Sealed::new(Arc::new(Memory::new()), Arc::clone(&ring), "s".into(), |_, _| {});
        let minute = Duration::from_secs(60);
        let ends = [
            Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromNow(minute) },
            Settlement::Hold { cause: Bytes::from_static(b"cause") },
        ];
        for (place, end) in ends.into_iter().enumerate() {
            let (id, attempt) = (RecordId([place as u8; 32]), AttemptToken([8; 16]));
            let (ttl, origin, head) = (minute, OriginId(1), Bytes::from_static(b"head"));
            store.claim(id, NewRecord { attempt, origin, lease: minute, ttl, unknown_ttl: ttl, head }).await.unwrap();
            let Settled::Done { until } = store.settle(id, attempt, end.clone()).await.unwrap() else {
                panic!("settled")
            };
            ring.replace(vec![SealingKey::new("b".into(), &[2; 32]), SealingKey::new("a".into(), &[1; 32])]);
            let again = store.settle(id, attempt, end).await.unwrap();
            assert!(matches!(again, Settled::Done { until: again } if again == until));
            let other = Settlement::Complete { answer: Bytes::from_static(b"other"), expiry: Expiry::FromNow(minute) };
            let is_late = place == 0;
            let other = store.settle(id, attempt, other).await.unwrap();
            assert_eq!(matches!(other, Settled::NotCurrent { .. }), is_late, "an unknown record may still complete");
            ring.replace(vec![SealingKey::new("a".into(), &[1; 32])]);
        }
    }

    #[tokio::test]
    async fn the_store_sees_nothing_and_another_key_opens_nothing() {
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let closed = Arc::new(Mutex::new(Vec::new()));
        let of = |bytes: &[u8]| {
            let closed = Arc::clone(&closed);
            Sealed::new(Arc::clone(&memory), keys(bytes), "s".into(), move |_, why| closed.lock().unwrap().push(why))
        };
        let (id, attempt, minute) = (RecordId([7; 32]), AttemptToken([8; 16]), Duration::from_secs(60));
        let (head, answer) = (Bytes::from_static(b"a secret head"), Bytes::from_static(b"a secret answer"));
        let (ttl, origin) = (minute, OriginId(1));
        let fresh = NewRecord { attempt, origin, lease: minute, ttl, unknown_ttl: ttl, head: head.clone() };
        of(&[1]).claim(id, fresh).await.unwrap();
        let end = Settlement::Complete { answer: answer.clone(), expiry: Expiry::FromNow(minute) };
        of(&[1]).settle(id, attempt, end.clone()).await.unwrap();
        // Another gate repeats it.
        assert!(matches!(of(&[1]).settle(id, attempt, end).await.unwrap(), Settled::Done { .. }));
        let kept = memory.get(id).await.unwrap().unwrap().record;
        let is_readable = |bytes: &Bytes| bytes.windows(6).any(|part| part == b"secret");
        assert!(!is_readable(&kept.head) && !is_readable(kept.answer.as_ref().unwrap()));
        let opened = of(&[2, 1]).get(id).await.unwrap().unwrap().record;
        assert_eq!((opened.head, opened.answer), (head, Some(answer)));
        assert!(closed.lock().unwrap().is_empty());
        let unopened = of(&[2]).get(id).await.unwrap().unwrap().record;
        assert_eq!((unopened.head, unopened.answer), (kept.head, kept.answer));
        assert_eq!(*closed.lock().unwrap(), [DecryptionError::NoKey; 2]);
    }
}
