//! The same for accepted requests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate::idempotency::record::{RecordId, State};
use oncegate::store::deliveries::{Acceptance, Batch, Deliveries, DeliveryChange, DeliveryHold, NewDelivery, Take};
use oncegate::store::unreliable::Operation;
use oncegate::store::{Error, Expiry, Settlement, Store};

use super::{LATE, Mutant, Shelf, fresh_of};
use crate::life::Life;

impl Shelf {
    pub async fn accept(&self, life: &Arc<Life>, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        match self.mutant {
            Some(Mutant::AcceptBeforeDurable)
                if self.memory.get(id).await?.is_none() && self.memory.delivery(id).await?.is_none() =>
            {
                let (memory, books, life) = (Arc::clone(&self.memory), Arc::clone(&self.books), Arc::clone(life));
                tokio::spawn(async move {
                    tokio::time::sleep(LATE).await;
                    if !life.is_dead() {
                        drop(memory.accept(id, new).await);
                        books.observe_queue(life.number, Operation::Accept).await;
                    }
                });
                Ok(Acceptance::Accepted)
            }
            Some(Mutant::AcceptReplaces) if self.memory.get(id).await?.is_none() => {
                if let Some(replaced) = self.memory.delivery(id).await? {
                    self.memory.discard(id, replaced.token).await?;
                }
                self.memory.accept(id, new).await
            }
            Some(Mutant::AcceptIgnoresRecord) => self.accept_beside(id, new).await,
            _ => self.memory.accept(id, new).await,
        }
    }

    /// Accepts beside a record that has its end, and leaves that as it was but for when it was claimed.
    async fn accept_beside(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        let standing = self.memory.get(id).await?.filter(|standing| standing.record.state == State::Completed);
        let Some(standing) = standing.filter(|standing| standing.now < standing.record.until) else {
            return self.memory.accept(id, new).await;
        };
        self.memory.remove(id, standing.record.attempt).await?;
        let accepted = self.memory.accept(id, new).await?;
        self.memory.claim(id, fresh_of(&standing.record, standing.record.attempt)).await?;
        let expiry = Expiry::FromNow(standing.record.until.since(standing.now));
        let end = Settlement::Complete { answer: standing.record.answer.unwrap_or_default(), expiry };
        self.memory.settle(id, standing.record.attempt, end).await?;
        Ok(accepted)
    }

    pub async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        match self.mutant {
            Some(Mutant::TakeHoldsNothing) => self.memory.take_due(Take { hold: Duration::ZERO, ..take }).await,
            Some(Mutant::OrderIgnored) => self.memory.take_due(Take { is_ordered: false, ..take }).await,
            Some(Mutant::PauseIgnored) if self.memory.pause(take.origin, false).await? => {
                let batch = self.memory.take_due(take).await;
                self.memory.pause(take.origin, true).await?;
                batch
            }
            Some(Mutant::TakeRemoves) => {
                let batch = self.memory.take_due(take).await?;
                for taken in &batch.taken {
                    self.memory.discard(taken.delivery.id, taken.delivery.token).await?;
                }
                Ok(batch)
            }
            _ => self.memory.take_due(take).await,
        }
    }

    pub async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        let change = match (self.mutant, change) {
            (Some(Mutant::ReleaseFinishes), DeliveryChange::Postpone { is_attempt: true, .. }) => {
                DeliveryChange::Finish
            }
            (Some(Mutant::ParkRemoves), DeliveryChange::Park { .. }) => DeliveryChange::Finish,
            (Some(Mutant::WaitGivesUp), DeliveryChange::Postpone { is_attempt: false, .. }) => {
                DeliveryChange::Park { ttl: Duration::from_secs(3600), is_attempt: false, note: Bytes::new() }
            }
            (Some(Mutant::PostponedForEver), DeliveryChange::Postpone { is_attempt, note, .. }) => {
                DeliveryChange::Postpone { delay: Duration::from_secs(3600), is_attempt, note }
            }
            (_, change) => change,
        };
        self.memory.change(taken, change).await
    }
}
