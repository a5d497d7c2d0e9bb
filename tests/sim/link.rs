//! The way from one gate to the store: it takes time, it can stall, and it ends with the gate.

mod deliveries;

use std::future::{Future, pending};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::idempotency::record::{AttemptToken, RecordId, Version};
use oncegate::store::unreliable::Side;
use oncegate::store::{
    CLAIM_EXPIRY, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Settled, Settlement, Store,
};
use tokio::time::{Instant, sleep};

use crate::dice::Dice;
use crate::life::Life;

/// How much longer a call takes whose connection broke, at most.
const LATEST: Duration = Duration::from_secs(2);

/// A store as one gate reaches it.
pub struct Link {
    inner: Arc<dyn Store>,
    life: Arc<Life>,
    pace: Mutex<(Dice, Pace)>,
}

/// How long calls are on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// No time at all.
    Instant,
    /// Milliseconds.
    Quick,
    /// Sometimes longer than a gate waits.
    Slow,
}

impl Link {
    pub fn new(inner: Arc<dyn Store>, life: Arc<Life>, dice: Dice, pace: Pace) -> Self {
        Self { inner, life, pace: Mutex::new((dice, pace)) }
    }

    /// Carries a call to the store and its answer back. Once it is on its way it arrives, whatever becomes of the one
    /// who asked; or perhaps, and late, where the connection breaks.
    async fn carry<T, F>(&self, call: impl FnOnce(Arc<dyn Store>) -> F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        if self.life.is_dead() {
            return pending().await;
        }
        let (there, back, arrives) = self.journey();
        let breaks = self.life.store_breaks();
        let (work, life) = (call(Arc::clone(&self.inner)), Arc::clone(&self.life));
        let carried = tokio::spawn(async move {
            let death = life.burn_at_call();
            if death == Some(Side::Before) {
                life.die_of_fuse();
            }
            travel(&life, there).await;
            if life.store_breaks() != breaks {
                sleep((back * 40).min(LATEST)).await;
            }
            if (life.is_dead() || life.store_breaks() != breaks) && !arrives {
                return pending().await;
            }
            let done = work.await;
            if death == Some(Side::After) {
                life.die_of_fuse();
            }
            travel(&life, back).await;
            if life.is_dead() { pending().await } else { done }
        });
        tokio::select! {
            biased;
            done = carried => done.expect("a store does not panic"),
            () = self.life.store_broke(breaks) => {
                Err(Error::indeterminate(ErrorKind::Unavailable, "its connection broke"))
            }
        }
    }

    fn journey(&self) -> (Duration, Duration, bool) {
        let (dice, pace) = &mut *self.pace.lock().unwrap();
        let mut leg = || match pace {
            Pace::Instant => Duration::ZERO,
            Pace::Quick => dice.millis(0..4),
            Pace::Slow if dice.percent(15) => dice.millis(0..1_500),
            Pace::Slow => dice.millis(0..60),
        };
        (leg(), leg(), dice.percent(50))
    }
}

async fn travel(life: &Life, time: Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
    life.store_passes().await;
}

#[async_trait]
impl Store for Link {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        let sent = Instant::now();
        let claim = move |store: Arc<dyn Store>| async move {
            if sent.elapsed() > CLAIM_EXPIRY {
                return Err(Error::indeterminate(ErrorKind::Timeout, "the claim comes too late"));
            }
            store.claim(id, fresh).await
        };
        self.carry(claim).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.carry(|store| async move { store.supersede(id, seen, fresh).await }).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.carry(|store| async move { store.settle(id, attempt, end).await }).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.carry(|store| async move { store.renew(held).await }).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.carry(move |store| async move { store.expire_leases(limit).await }).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.carry(move |store| async move { store.sweep(limit).await }).await
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.inner.deliveries().map(|_| self as &dyn Deliveries)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.carry(move |store| async move { store.get(id).await }).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.carry(move |store| async move { store.list(filter, after, limit).await }).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.carry(move |store| async move { store.scan(filter, after, limit).await }).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        // A gate that is alone on its store, and remembers for as long as records live, never finds what was removed by an
        // earlier life of its own after it began: the store of such a gate is in its process.
        let life = Arc::clone(&self.life);
        let remove = move |store: Arc<dyn Store>| async move {
            if life.is_dead() { pending().await } else { store.remove(id, attempt).await }
        };
        self.carry(remove).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.carry(|store| async move { store.count().await }).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.carry(move |store| async move { store.changes(origins, rules).await }).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.carry(move |store| async move { store.adopt(origins, rules, accept_change).await }).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.carry(|store| async move { store.identities().await }).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.carry(|store| async move { store.ping().await }).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
