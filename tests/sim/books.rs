//! Writes down what every operation does to the records.

mod deliveries;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use oncegate::idempotency::record::{AttemptToken, Record, RecordId, Version};
use oncegate::store::memory::Memory;
use oncegate::store::unreliable::Operation;
use oncegate::store::{
    Chunk, Claim, Cursor, Deliveries, Error, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet, NamespaceRules,
    NewRecord, Origin, Page, RecordEntry, Settled, Settlement, Store,
};

use self::deliveries::Queue;
use crate::history::{EPOCH, Event, History, Standing, Token, Told};
use crate::ledger::{Call, Line, Said};
use crate::life::Life;
use crate::mutant::Shelf;
use crate::setup::{label_of, label_of_lock, variant_of};

/// What the records were when they were last looked at.
pub struct Books {
    memory: Arc<Memory>,
    history: History,
    known: Mutex<BTreeMap<RecordId, Record>>,
    queue: Queue,
}

/// Who asked for an operation.
pub struct Asked<'a> {
    pub life: &'a Life,
    pub op: Operation,
    /// By record, the attempt that it was asked for.
    pub attempts: &'a [(RecordId, AttemptToken)],
}

impl Books {
    pub fn new(memory: Arc<Memory>, history: History) -> Self {
        Self { memory, history, known: Mutex::default(), queue: Queue::default() }
    }

    /// In milliseconds since the run began.
    pub fn now(&self) -> u64 {
        self.history.now()
    }

    /// Writes down what has changed since the last look, which `asked` has done.
    pub async fn observe(&self, asked: &Asked<'_>) {
        // Nothing here ever waits: the store is in memory.
        let page = self.memory.scan(Filter::default(), None, usize::MAX - 1).await.expect("memory does not fail");
        let mut now = BTreeMap::new();
        for RecordEntry { id, .. } in page.records {
            let listed = self.memory.get(id).await.expect("memory does not fail");
            now.extend(listed.map(|listed| (id, listed.record)));
        }
        let before = std::mem::replace(&mut *self.known.lock().unwrap(), now.clone());
        let mut ids: Vec<RecordId> = before.keys().chain(now.keys()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids.into_iter().filter(|id| before.get(id) != now.get(id)) {
            let (before, after) = (before.get(&id).map(standing), now.get(&id).map(standing));
            let (life, op) = (asked.life.number, asked.op);
            if let Some(about) = label_of_lock(id) {
                self.history.add(Event::Locked { life, op, about, before, after });
                continue;
            }
            let by = asked.attempts.iter().find(|(own, _)| *own == id).map(|(_, attempt)| Token::of(*attempt));
            self.history.add(Event::Changed {
                life,
                op,
                by,
                label: label_of(id).expect("every record has a label"),
                before,
                after,
            });
        }
    }
}

pub fn standing(record: &Record) -> Standing {
    Standing {
        token: Token::of(record.attempt),
        state: record.state,
        claimed: record.claimed_at.0 - EPOCH,
        until: record.until.0.saturating_sub(EPOCH),
        variant: variant_of(&record.head),
        answer: record.answer.clone(),
    }
}

/// The store as one gate's calls arrive at it.
pub struct Recorded {
    pub shelf: Arc<Shelf>,
    pub life: Arc<Life>,
    /// Whether it keeps requests that are delivered later.
    pub keeps_deliveries: bool,
}

impl Recorded {
    /// Notes a call that was carried out just now.
    fn note(&self, call: Call, said: Said) {
        self.shelf.ledger.add(Line { at: self.shelf.books.now(), gate: self.life.slot, call, said });
    }

    /// Completes the record of an attempt as its upstream does, in the transaction of the attempt's effect.
    /// `kept` tells of it.
    pub async fn complete_beside(&self, id: RecordId, attempt: AttemptToken, end: Settlement, kept: Event) {
        let settled = self.shelf.memory.settle(id, attempt, end.clone()).await.expect("memory does not fail");
        self.note(Call::Settle(id, attempt, end), Said::from(&settled));
        if let Settled::Done { .. } = settled {
            self.life.history.add(kept);
        }
        let asked = Asked { life: &self.life, op: Operation::Settle, attempts: &[(id, attempt)] };
        self.shelf.books.observe(&asked).await;
    }

    async fn done(&self, op: Operation, attempts: &[(RecordId, AttemptToken)], told: Told) {
        self.shelf.books.observe(&Asked { life: &self.life, op, attempts }).await;
        let one = attempts.first().filter(|_| attempts.len() == 1);
        self.life.history.add(Event::Told {
            life: self.life.number,
            op,
            label: one.and_then(|(id, _)| label_of(*id)),
            token: one.map(|(_, attempt)| Token::of(*attempt)),
            told,
        });
    }
}

#[async_trait]
impl Store for Recorded {
    fn kind(&self) -> &'static str {
        "memory"
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        let (attempt, call) = (fresh.attempt, Call::Claim(id, fresh.clone()));
        let claim = self.shelf.claim(&self.life, id, fresh).await?;
        self.note(call, Said::from(&claim));
        let told = match &claim {
            Claim::Inserted(_) => Told::Inserted,
            Claim::Exists { record, .. } => Told::Exists(record.state),
        };
        self.done(Operation::Claim, &[(id, attempt)], told).await;
        Ok(claim)
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        let (attempt, call) = (fresh.attempt, Call::Supersede(id, seen, fresh.clone()));
        let superseded = self.shelf.supersede(id, seen, fresh).await?;
        self.note(call, Said::Superseded(superseded));
        self.done(Operation::Supersede, &[(id, attempt)], Told::Superseded(superseded)).await;
        Ok(superseded)
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let call = Call::Settle(id, attempt, end.clone());
        let settled = self.shelf.settle(&self.life, id, attempt, end).await?;
        self.note(call, Said::from(&settled));
        let told = if matches!(settled, Settled::Done { .. }) { Told::Settled } else { Told::NotSettled };
        self.done(Operation::Settle, &[(id, attempt)], told).await;
        Ok(settled)
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        let attempts: Vec<_> = held.iter().map(|held| (held.id, held.attempt)).collect();
        let call = Call::Renew(held.clone());
        let renewed = self.shelf.renew(held).await?;
        self.note(call, Said::renewed(renewed.clone()));
        self.done(Operation::Renew, &attempts, Told::Renewed(attempts.len())).await;
        Ok(renewed)
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        let ids = self.shelf.expire_leases(limit).await?;
        let count = ids.len();
        self.note(Call::ExpireLeases(limit), Said::Count(count));
        // What is looked for in vain, many times a second, is not worth telling.
        if count > 0 || self.shelf.mutant.is_some() {
            self.done(Operation::ExpireLeases, &[], Told::Count(count)).await;
        }
        Ok(ids)
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        let count = self.shelf.sweep(limit).await?;
        self.note(Call::Sweep(limit), Said::Count(count));
        if count > 0 || self.shelf.mutant.is_some() {
            self.done(Operation::Sweep, &[], Told::Count(count)).await;
        }
        Ok(count)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.keeps_deliveries.then_some(self as &dyn Deliveries)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        let listed = self.shelf.memory.get(id).await?;
        self.note(Call::Get(id), Said::from(&listed));
        Ok(listed)
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.shelf.memory.list(filter, after, limit).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        let call = Call::Scan(filter.clone(), after, limit);
        let chunk = self.shelf.memory.scan(filter, after, limit).await?;
        self.note(call, Said::from(&chunk));
        Ok(chunk)
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let removed = self.shelf.memory.remove(id, attempt).await?;
        self.note(Call::Remove(id, attempt), Said::Removed(removed));
        self.done(Operation::Remove, &[], Told::Removed(removed)).await;
        Ok(removed)
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        let counts = self.shelf.memory.count().await?;
        self.note(Call::Count, Said::Counts(counts));
        Ok(counts)
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.shelf.memory.changes(origins, rules).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        let call = Call::Adopt(origins.clone(), rules.clone(), accept_change);
        let changes = self.shelf.memory.adopt(origins, rules, accept_change).await?;
        self.note(call, Said::Changes(changes.clone()));
        Ok(changes)
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.shelf.memory.identities().await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.shelf.memory.ping().await
    }

    async fn close(&self) {
        self.shelf.memory.close().await;
    }
}
