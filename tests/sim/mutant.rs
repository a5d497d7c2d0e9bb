//! The store, true or wrong in one known way.
//!
//! Each mutant is a mistake that a store, or a gate that asks it, could really make. The simulation must notice each.

mod deliveries;

use std::sync::Arc;
use std::time::Duration;

use oncegate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};
use oncegate::store::memory::Memory;
use oncegate::store::unreliable::Operation;
use oncegate::store::{
    Claim, Error, Expiry, Filter, LeaseRenewal, NewRecord, OriginId, RecordEntry, Settled, Settlement, Store,
};

use crate::believer::Seen;
use crate::books::{Asked, Books};
use crate::ledger::Ledger;
use crate::life::Life;
use crate::setup::{ACCEPT, label_of, label_of_lock};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A takeover does not look whether the record is still what was seen.
    TakeoverUnfenced,
    /// A claim takes a record that is in flight under a live lease.
    ClaimTakesLive,
    /// In-flight records expire at the end of their lease: a claim finds nothing.
    InFlightExpires,
    /// The sweeper removes in-flight records past their lease.
    SweeperTakesInFlight,
    /// The sweeper removes completed records before their time.
    SweeperIsEarly,
    /// The reaper gives the records that it turns unknown another attempt.
    ReaperChangesAttempt,
    /// The reaper works by what it read earlier, and turns completed records unknown.
    ReaperUnfenced,
    /// A hold releases the key.
    HoldReleases,
    /// Settling ends whatever attempt stands.
    SettleUnfenced,
    /// Settling is acknowledged before it is done, and lost if the gate dies meanwhile.
    SettleBeforeDurable,
    /// A claim is acknowledged before it is done.
    ClaimBeforeDurable,
    /// Renewing extends whatever attempt stands.
    RenewUnfenced,
    /// A completed record lives for its ttl from when it completed.
    TtlFromNow,
    /// A claim is told an old time with what stands, as by a clock of the gate's own.
    OldClock,
    /// A record does not tell tenants apart.
    ScopeIgnored,
    /// A record does not tell requests apart.
    FingerprintIgnored,
    /// An answer loses something in the store.
    AnswerSpoilt,
    /// Leases never end.
    LeaseNeverEnds,
    /// A request is sent to the upstream a second time, over another connection.
    SendsTwice,
    /// The upstream is asked about an attempt that may be under way there yet, and is believed.
    ProbesEarly,
    /// The right to ask the upstream is given to whoever wants it.
    LockOfAll,
    /// A request is sent again though its record has been completed.
    ResendsCompleted,
    /// What the shared cache has for one key is believed for another.
    CacheOfAnyKey,
    /// A hint that a key is in flight is believed for ever.
    HintNeverEnds,
    /// A key that the shared cache does not know is taken to be claimed.
    CacheGrants,
    /// A completed record in the shared cache is believed past its ttl.
    CacheOutlivesTtl,
    /// A completed record in the shared cache is believed for its ttl, whoever removes it.
    CacheOutlivesPurge,
    /// A request is said to be accepted before it is kept, and lost if the gate dies meanwhile.
    AcceptBeforeDurable,
    /// A request is accepted in the place of one that waits.
    AcceptReplaces,
    /// A request is accepted though its key has a completed record.
    AcceptIgnoresRecord,
    /// What is taken is due again at once.
    TakeHoldsNothing,
    /// What is taken is gone, as if it were done then.
    TakeRemoves,
    /// A delivery does not wait for those of its scope that were accepted before it.
    OrderIgnored,
    /// Deliveries of a paused route are taken.
    PauseIgnored,
    /// A delivery whose attempt was released is removed.
    ReleaseFinishes,
    /// A delivery that is given up is removed.
    ParkRemoves,
    /// A delivery that could not run now is given up.
    WaitGivesUp,
    /// A delivery that is to be tried again is not due for an hour.
    PostponedForEver,
    /// An accepted request runs without a claim.
    DeliveryUnclaimed,
    /// The sweeper removes the record of an accepted request that still waits for its end.
    SweeperTakesRecordOfDelivery,
}

impl Mutant {
    /// Whether only accepted requests show it.
    pub fn is_of_deliveries(self) -> bool {
        matches!(
            self,
            Self::AcceptBeforeDurable
                | Self::AcceptReplaces
                | Self::AcceptIgnoresRecord
                | Self::TakeHoldsNothing
                | Self::TakeRemoves
                | Self::OrderIgnored
                | Self::PauseIgnored
                | Self::ReleaseFinishes
                | Self::ParkRemoves
                | Self::WaitGivesUp
                | Self::PostponedForEver
                | Self::DeliveryUnclaimed
                | Self::SweeperTakesRecordOfDelivery
        )
    }
}

/// The records of a run.
pub struct Shelf {
    pub memory: Arc<Memory>,
    pub books: Arc<Books>,
    pub ledger: Ledger,
    /// What a cache that is believed wrongly has.
    pub seen: Seen,
    pub mutant: Option<Mutant>,
}

/// How long what was acknowledged too early takes.
const LATE: Duration = Duration::from_millis(40);

impl Shelf {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    pub async fn claim(&self, life: &Arc<Life>, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        if self.is(Mutant::DeliveryUnclaimed) && label_of(id).is_some_and(|label| label.route == ACCEPT) {
            return Ok(Claim::Inserted(self.now().await?));
        }
        let standing = self.memory.get(id).await?;
        if let Some(RecordEntry { record, now, .. }) = &standing
            && record.state == State::InFlight
            && record.attempt != fresh.attempt
            && (self.is(Mutant::LockOfAll) && label_of_lock(id).is_some()
                || self.is(Mutant::ClaimTakesLive)
                || self.is(Mutant::InFlightExpires) && record.until <= *now)
        {
            return self.replace(id, fresh).await;
        }
        if standing.is_none() && self.is(Mutant::ClaimBeforeDurable) {
            let (memory, attempt, now) = (Arc::clone(&self.memory), fresh.attempt, self.now().await?);
            self.later(life, Operation::Claim, id, attempt, async move { drop(memory.claim(id, fresh).await) });
            return Ok(Claim::Inserted(now));
        }
        if standing.is_none()
            && self.is(Mutant::ScopeIgnored)
            && let Some(other) = self.all().await?.into_iter().find(|other| other.id.0[..8] == id.0[..8])
            && let Some(RecordEntry { record, now, .. }) = self.memory.get(other.id).await?
            // What has expired would be taken over, again and again, and is not there.
            && record.state == State::Completed
            && now < record.until
        {
            return Ok(Claim::Exists { record, now });
        }
        let head = fresh.head.clone();
        let mut claim = self.memory.claim(id, fresh).await?;
        if let Claim::Exists { record, now } = &mut claim {
            match self.mutant {
                Some(Mutant::FingerprintIgnored) => record.head = head,
                Some(Mutant::AnswerSpoilt) => record.answer = record.answer.take().map(spoilt),
                Some(Mutant::OldClock) if record.state == State::Completed => *now = record.claimed_at,
                Some(Mutant::LeaseNeverEnds) if record.state == State::InFlight => *now = record.claimed_at,
                _ => {}
            }
        }
        Ok(claim)
    }

    pub async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        let standing = self.memory.get(id).await?;
        let is_own = standing.as_ref().is_some_and(|standing| standing.record.attempt == fresh.attempt);
        let is_completed = standing.is_some_and(|standing| standing.record.is_completed_by(seen.attempt));
        if self.is(Mutant::ResendsCompleted) && is_completed && seen.state == State::Unknown {
            return self.replace(id, fresh).await.map(|_| true);
        }
        if self.is(Mutant::TakeoverUnfenced) && !is_own {
            return self.replace(id, fresh).await.map(|_| true);
        }
        self.memory.supersede(id, seen, fresh).await
    }

    pub async fn settle(
        &self,
        life: &Arc<Life>,
        id: RecordId,
        attempt: AttemptToken,
        end: Settlement,
    ) -> Result<Settled, Error> {
        let standing = self.memory.get(id).await?;
        let attempt = match &standing {
            Some(standing) if self.is(Mutant::SettleUnfenced) => standing.record.attempt,
            _ => attempt,
        };
        if let (Some(standing), Settlement::Hold { .. }) = (&standing, &end)
            && self.is(Mutant::ResendsCompleted)
            && standing.record.is_completed_by(attempt)
        {
            return Ok(Settled::Done { until: standing.record.until });
        }
        let end = match end {
            Settlement::Hold { .. } if self.is(Mutant::HoldReleases) => Settlement::Release,
            Settlement::Complete { answer, expiry: Expiry::FromClaim(ttl) } if self.is(Mutant::TtlFromNow) => {
                Settlement::Complete { answer, expiry: Expiry::FromNow(ttl) }
            }
            end => end,
        };
        if let Some(standing) = standing
            && self.is(Mutant::SettleBeforeDurable)
            && standing.record.attempt == attempt
            && standing.record.state == State::InFlight
        {
            let memory = Arc::clone(&self.memory);
            self.later(life, Operation::Settle, id, attempt, async move {
                drop(memory.settle(id, attempt, end).await);
            });
            return Ok(Settled::Done { until: standing.record.until });
        }
        self.memory.settle(id, attempt, end).await
    }

    pub async fn renew(&self, mut held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        if self.is(Mutant::RenewUnfenced) {
            for held in &mut held {
                if let Some(standing) = self.memory.get(held.id).await? {
                    held.attempt = standing.record.attempt;
                }
            }
        }
        self.memory.renew(held).await
    }

    pub async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        match self.mutant {
            Some(Mutant::LeaseNeverEnds) => return Ok(Vec::new()),
            Some(Mutant::ReaperChangesAttempt) => {
                let past: Vec<_> = self.all().await?.into_iter().filter(is_lost).collect();
                for RecordEntry { id, record, .. } in &past {
                    let mut other = record.attempt;
                    other.0[8] ^= 0x80;
                    self.replace(*id, fresh_of(record, other)).await?;
                    self.memory
                        .settle(*id, other, Settlement::Hold { cause: bytes::Bytes::from_static(b"cause") })
                        .await?;
                }
                return Ok(past.into_iter().map(|listed| listed.id).collect());
            }
            Some(Mutant::ReaperUnfenced) => {
                let was_past = |listed: &RecordEntry| {
                    listed.record.state == State::Completed
                        && listed.record.claimed_at.plus(Duration::from_secs(1)) <= listed.now
                };
                let past: Vec<_> = self.all().await?.into_iter().filter(was_past).collect();
                for RecordEntry { id, record, .. } in &past {
                    self.replace(*id, fresh_of(record, record.attempt)).await?;
                    self.memory
                        .settle(*id, record.attempt, Settlement::Hold { cause: bytes::Bytes::from_static(b"cause") })
                        .await?;
                }
            }
            _ => {}
        }
        self.memory.expire_leases(limit).await
    }

    pub async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        let mut taken = 0;
        for listed in self.all().await? {
            let completed = listed.record.state == State::Completed;
            let has_ended = listed.record.state != State::InFlight && listed.record.until <= listed.now;
            if self.is(Mutant::SweeperTakesInFlight) && is_lost(&listed)
                || self.is(Mutant::SweeperIsEarly) && completed
                || self.is(Mutant::SweeperTakesRecordOfDelivery) && has_ended
            {
                self.memory.remove(listed.id, listed.record.attempt).await?;
                taken += 1;
            }
        }
        Ok(taken + self.memory.sweep(limit).await?)
    }

    /// Puts a fresh record in the place of what stands, whatever that is.
    async fn replace(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        if let Some(standing) = self.memory.get(id).await? {
            self.memory.remove(id, standing.record.attempt).await?;
        }
        self.memory.claim(id, fresh).await
    }

    async fn all(&self) -> Result<Vec<RecordEntry>, Error> {
        if self.mutant.is_none() {
            return Ok(Vec::new());
        }
        Ok(self.memory.scan(Filter::default(), None, usize::MAX - 1).await?.records)
    }

    async fn now(&self) -> Result<Timestamp, Error> {
        Ok(Timestamp(crate::history::EPOCH + self.books.now()))
    }

    /// Does something that was acknowledged already, unless the gate dies before.
    fn later(
        &self,
        life: &Arc<Life>,
        op: Operation,
        id: RecordId,
        attempt: AttemptToken,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let (life, books) = (Arc::clone(life), Arc::clone(&self.books));
        tokio::spawn(async move {
            tokio::time::sleep(LATE).await;
            if !life.is_dead() {
                work.await;
                books.observe(&Asked { life: &life, op, attempts: &[(id, attempt)] }).await;
            }
        });
    }
}

fn is_lost(listed: &RecordEntry) -> bool {
    listed.record.state == State::InFlight && listed.record.until <= listed.now
}

fn fresh_of(record: &Record, attempt: AttemptToken) -> NewRecord {
    NewRecord {
        attempt,
        origin: OriginId(0),
        lease: Duration::from_millis(1),
        ttl: Duration::from_secs(3600),
        unknown_ttl: Duration::from_secs(3600),
        head: record.head.clone(),
    }
}

fn spoilt(answer: bytes::Bytes) -> bytes::Bytes {
    let mut bytes = answer.to_vec();
    if let Some(last) = bytes.last_mut() {
        *last ^= 1;
    }
    bytes.into()
}
