//! A store that is wrong in one known way, around one that is right.
//!
//! Mistakes that a store could really make. What is played must show each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use oncegate::idempotency::record::{AttemptToken, Record, RecordId, State, Version};
use oncegate::store::{
    Chunk, Claim, Cursor, Error, Expiry, Filter, IdentityChange, LeaseRenewal, NamespaceRuleSet, NamespaceRules,
    NewRecord, Origin, Page, RecordEntry, Settled, Settlement, Store,
};

use super::Clock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A claim says that it inserted where a record stands.
    InsertsOverExisting,
    /// A claim that is asked again finds itself in the way.
    ForgetsOwnClaim,
    /// A claim says what it found the last time.
    RemembersClaims,
    /// Of claims that are made at once one only is written.
    LosesOneOfABatch,
    /// The answers to claims that are made at once are given to the wrong ones.
    CrossesAnswers,
    /// A takeover does not look whether the record is still what was seen.
    TakesOverUnseen,
    /// A takeover compares the attempt only.
    TakesOverByAttempt,
    /// Settling ends whatever attempt stands.
    SettlesAnyAttempt,
    /// Settling ends what is in flight, and nothing that has turned unknown.
    SettlesInFlightOnly,
    /// A held record is forgotten.
    ReleasesOnHold,
    /// A released record stays, as unknown.
    HoldsOnRelease,
    /// A completed record lives for its ttl from when it completed.
    CountsFromTheEnd,
    /// The last byte of each answer is lost.
    CutsAnswers,
    /// A renewal is acknowledged, and not done.
    LosesRenewals,
    /// Of several leases one only is renewed.
    RenewsTheFirst,
    /// A renewal is said to be done of what is another's.
    SaysThatAllAreRenewed,
    /// Renewing extends whatever attempt stands.
    RenewsAnyAttempt,
    /// Leases end a millisecond early.
    EndsLeasesEarly,
    /// Leases end a millisecond late.
    EndsLeasesLate,
    /// Records are swept a millisecond early.
    SweepsEarly,
    /// Records are swept a millisecond late.
    SweepsLate,
    /// A look shows the last thing that was seen of a record.
    RemembersLooks,
    /// A chunk ends too early.
    LosesTheLastOfAChunk,
    /// The unknown records are not counted.
    CountsNoUnknown,
    /// What is in flight is not removed.
    RemovesWhatHasEnded,
    RemovesAnothers,
    /// Rules are adopted whatever records live.
    AdoptsAnything,
}

/// A store that makes a mistake.
pub struct Mistaken {
    mistake: Mistake,
    inner: Arc<dyn Store>,
    clock: Arc<Clock>,
    /// How many claims are being made.
    claims: AtomicUsize,
    /// What it remembers and should not.
    seen: Mutex<BTreeMap<RecordId, Record>>,
    last_claim: Mutex<Option<Claim>>,
}

impl Mistaken {
    pub fn around(inner: Arc<dyn Store>, mistake: Mistake, clock: Arc<Clock>) -> Self {
        let (claims, seen, last_claim) = (AtomicUsize::new(0), Mutex::default(), Mutex::default());
        Self { mistake, inner, clock, claims, seen, last_claim }
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    /// What it saw of a record for the first time.
    fn first_seen(&self, id: RecordId, record: Record) -> Record {
        self.seen.lock().unwrap().entry(id).or_insert(record).clone()
    }

    async fn version_of(&self, id: RecordId) -> Result<Option<Version>, Error> {
        Ok(self.inner.get(id).await?.map(|listed| listed.record.version()))
    }

    /// The attempt that stands, or else this one.
    async fn standing(&self, id: RecordId, attempt: AttemptToken) -> Result<AttemptToken, Error> {
        Ok(self.version_of(id).await?.map_or(attempt, |version| version.attempt))
    }

    /// Does something as if it were so much later.
    async fn later<T>(&self, millis: i64, work: impl Future<Output = T>) -> T {
        self.clock.shift(millis);
        let done = work.await;
        self.clock.shift(-millis);
        done
    }

    async fn wrongly_claimed(
        &self,
        id: RecordId,
        attempt: AttemptToken,
        claim: Claim,
        is_alone: bool,
    ) -> Result<Claim, Error> {
        Ok(match (self.mistake, claim) {
            (Mistake::InsertsOverExisting, Claim::Exists { now, .. }) => Claim::Inserted(now),
            (Mistake::RemembersClaims, Claim::Exists { record, now }) => {
                Claim::Exists { record: self.first_seen(id, record), now }
            }
            (Mistake::CutsAnswers, Claim::Exists { mut record, now }) => {
                record.answer = record.answer.map(|answer| answer.slice(..answer.len().saturating_sub(1)));
                Claim::Exists { record, now }
            }
            (Mistake::LosesOneOfABatch, Claim::Inserted(at)) if !is_alone => {
                self.inner.remove(id, attempt).await?;
                Claim::Inserted(at)
            }
            (Mistake::CrossesAnswers, claim) => {
                let last = self.last_claim.lock().unwrap().replace(claim.clone());
                last.filter(|_| !is_alone).unwrap_or(claim)
            }
            (_, claim) => claim,
        })
    }
}

#[async_trait]
impl Store for Mistaken {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        let attempt = fresh.attempt;
        let is_alone = self.claims.fetch_add(1, Ordering::Relaxed) == 0;
        let claim = self.inner.claim(id, fresh).await;
        self.claims.fetch_sub(1, Ordering::Relaxed);
        let claim = claim?;
        if self.is(Mistake::ForgetsOwnClaim)
            && let Claim::Inserted(at) = claim
            && let Some(RecordEntry { record, now, .. }) = self.inner.get(id).await?
            && record.attempt == attempt
            && at < now
        {
            return Ok(Claim::Exists { record, now });
        }
        self.wrongly_claimed(id, attempt, claim, is_alone).await
    }

    async fn supersede(&self, id: RecordId, mut seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        let standing = self.version_of(id).await?;
        match (self.mistake, standing) {
            (Mistake::TakesOverUnseen, Some(standing)) => seen = standing,
            (Mistake::TakesOverByAttempt, Some(standing)) if standing.attempt == seen.attempt => seen = standing,
            _ => {}
        }
        self.inner.supersede(id, seen, fresh).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        let standing = self.inner.get(id).await?.map(|listed| listed.record);
        match (self.mistake, end) {
            (Mistake::SettlesAnyAttempt, end) => {
                self.inner.settle(id, standing.map_or(attempt, |record| record.attempt), end).await
            }
            (Mistake::SettlesInFlightOnly, _)
                if standing.as_ref().is_some_and(|record| record.state != State::InFlight) =>
            {
                Ok(Settled::NotCurrent { record: standing })
            }
            (Mistake::ReleasesOnHold, Settlement::Hold { .. }) => {
                self.inner.settle(id, attempt, Settlement::Release).await
            }
            (Mistake::HoldsOnRelease, Settlement::Release) => {
                self.inner.settle(id, attempt, Settlement::Hold { cause: bytes::Bytes::from_static(b"cause") }).await
            }
            (Mistake::CountsFromTheEnd, Settlement::Complete { answer, expiry: Expiry::FromClaim(ttl) }) => {
                self.inner.settle(id, attempt, Settlement::Complete { answer, expiry: Expiry::FromNow(ttl) }).await
            }
            (_, end) => self.inner.settle(id, attempt, end).await,
        }
    }

    async fn renew(&self, mut held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        let asked: Vec<RecordId> = held.iter().map(|held| held.id).collect();
        // What it should renew, and what it will say.
        let mut own = Vec::new();
        for LeaseRenewal { id, attempt, .. } in &held {
            let standing = self.version_of(*id).await?;
            own.extend(standing.filter(|it| it.state == State::InFlight && it.attempt == *attempt).map(|_| *id));
        }
        match self.mistake {
            Mistake::LosesRenewals => held.clear(),
            Mistake::RenewsTheFirst => held.truncate(1),
            Mistake::RenewsAnyAttempt => {
                for held in &mut held {
                    held.attempt = self.standing(held.id, held.attempt).await?;
                }
            }
            _ => {}
        }
        self.inner.renew(held).await?;
        Ok(if self.is(Mistake::SaysThatAllAreRenewed) { asked } else { own })
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        let work = self.inner.expire_leases(limit);
        match self.mistake {
            Mistake::EndsLeasesEarly => self.later(1, work).await,
            Mistake::EndsLeasesLate => self.later(-1, work).await,
            _ => work.await,
        }
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        let work = self.inner.sweep(limit);
        match self.mistake {
            Mistake::SweepsEarly => self.later(1, work).await,
            Mistake::SweepsLate => self.later(-1, work).await,
            _ => work.await,
        }
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        let mut listed = self.inner.get(id).await?;
        if let Some(listed) = listed.as_mut().filter(|_| self.is(Mistake::RemembersLooks)) {
            listed.record = self.first_seen(id, listed.record.clone());
        }
        Ok(listed)
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.inner.list(filter, after, limit).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        let mut chunk = self.inner.scan(filter, after, limit).await?;
        if self.is(Mistake::LosesTheLastOfAChunk) && chunk.next.is_some() {
            chunk.records.pop();
        }
        Ok(chunk)
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let standing = self.version_of(id).await?;
        if self.is(Mistake::RemovesWhatHasEnded) && standing.is_some_and(|it| it.state == State::InFlight) {
            return Ok(false);
        }
        let attempt = if self.is(Mistake::RemovesAnothers) { self.standing(id, attempt).await? } else { attempt };
        self.inner.remove(id, attempt).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        let [in_flight, completed, unknown] = self.inner.count().await?;
        Ok([in_flight, completed, if self.is(Mistake::CountsNoUnknown) { 0 } else { unknown }])
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
        self.inner.adopt(origins, rules, accept_change || self.is(Mistake::AdoptsAnything)).await
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
