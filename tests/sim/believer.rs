//! A cache that gates share and believe wrongly, in front of all else that a gate asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use oncegate::idempotency::codec::is_same_request;
use oncegate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};
use oncegate::store::{
    Chunk, Claim, Cursor, Deliveries, Error, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet, NamespaceRules,
    NewRecord, Origin, Page, RecordEntry, Removal, Settled, Settlement, Store,
};
use tokio::sync::broadcast;

use crate::history::EPOCH;
use crate::mutant::{Mutant, Shelf};

/// What gates last saw of each record, and when.
pub type Seen = Mutex<BTreeMap<RecordId, (Record, Timestamp)>>;

/// A store that believes what gates have seen.
pub struct Believer {
    inner: Arc<dyn Store>,
    shelf: Arc<Shelf>,
}

impl Believer {
    /// Around the store of a gate, where the run is one with such a mistake.
    pub fn before(inner: Arc<dyn Store>, shelf: &Arc<Shelf>) -> Arc<dyn Store> {
        match shelf.mutant {
            Some(
                Mutant::CacheOfAnyKey
                | Mutant::HintNeverEnds
                | Mutant::CacheGrants
                | Mutant::CacheOutlivesTtl
                | Mutant::CacheOutlivesPurge,
            ) => Arc::new(Self { inner, shelf: Arc::clone(shelf) }),
            _ => inner,
        }
    }

    /// What it says without asking the store.
    fn believes(&self, id: RecordId, fresh: &NewRecord) -> Option<Claim> {
        let seen = self.shelf.seen.lock().unwrap();
        let own = seen.get(&id);
        let now = Timestamp(EPOCH + self.shelf.books.now());
        match self.shelf.mutant? {
            Mutant::CacheGrants => own.is_none().then_some(Claim::Inserted(now)),
            Mutant::CacheOfAnyKey => {
                let may_replay =
                    |record: &Record| record.state == State::Completed && is_same_request(&record.head, &fresh.head);
                let stands = |record: &Record| may_replay(record) && now < record.until;
                let (_, (record, _)) = seen.iter().find(|(other, (record, _))| **other != id && stands(record))?;
                Some(Claim::Exists { record: record.clone(), now })
            }
            Mutant::HintNeverEnds => {
                let (record, at) = own.filter(|(record, _)| record.state == State::InFlight)?;
                is_same_request(&record.head, &fresh.head).then(|| Claim::Exists { record: record.clone(), now: *at })
            }
            Mutant::CacheOutlivesTtl => {
                let (record, at) = own.filter(|(record, _)| record.state == State::Completed)?;
                Some(Claim::Exists { record: record.clone(), now: *at })
            }
            Mutant::CacheOutlivesPurge => {
                let stands = |record: &Record| record.state == State::Completed && now < record.until;
                let (record, _) = own.filter(|(record, _)| stands(record))?;
                Some(Claim::Exists { record: record.clone(), now })
            }
            _ => None,
        }
    }
}

#[async_trait]
impl Store for Believer {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        self.inner.recall(id)
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        if let Some(believed) = self.believes(id, &fresh) {
            return Ok(believed);
        }
        let claim = self.inner.claim(id, fresh).await?;
        if let Claim::Exists { record, now } = &claim
            && *now < record.until
        {
            self.shelf.seen.lock().unwrap().insert(id, (record.clone(), *now));
        }
        Ok(claim)
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.inner.supersede(id, seen, fresh).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.inner.settle(id, attempt, end).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.inner.renew(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.inner.expire_leases(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.inner.sweep(limit).await
    }

    async fn changed(&self, id: RecordId) {
        self.inner.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.inner.removals()
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.inner.deliveries()
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.inner.get(id).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.inner.list(filter, after, limit).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.inner.scan(filter, after, limit).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.inner.remove(id, attempt).await
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

    async fn close(&self) {
        self.inner.close().await;
    }
}
