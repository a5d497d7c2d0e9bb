//! Faults of the operations on accepted requests.

use async_trait::async_trait;

use super::{Operation, Unreliable};
use crate::idempotency::record::{AttemptToken, RecordId};
use crate::store::deliveries::{
    self, Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold,
    DeliveryPage, NewDelivery, Sequence, Take,
};
use crate::store::{Error, OriginId};

#[async_trait]
impl Deliveries for Unreliable {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.call(Operation::Accept, deliveries::of(&*self.inner)?.accept(id, new)).await
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.call(Operation::Delivery, deliveries::of(&*self.inner)?.delivery(id)).await
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        self.call(Operation::TakeDue, deliveries::of(&*self.inner)?.take_due(take)).await
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        self.call(Operation::ChangeDelivery, deliveries::of(&*self.inner)?.change(taken, change)).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.call(Operation::Requeue, deliveries::of(&*self.inner)?.requeue(id)).await
    }

    async fn discard(&self, id: RecordId, token: AttemptToken) -> Result<bool, Error> {
        self.call(Operation::Discard, deliveries::of(&*self.inner)?.discard(id, token)).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.call(Operation::Deliveries, deliveries::of(&*self.inner)?.deliveries(filter, after, limit)).await
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.call(Operation::CountDeliveries, deliveries::of(&*self.inner)?.count_deliveries()).await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        self.call(Operation::Pause, deliveries::of(&*self.inner)?.pause(origin, is_paused)).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.call(Operation::Paused, deliveries::of(&*self.inner)?.paused()).await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        self.call(Operation::SweepDeliveries, deliveries::of(&*self.inner)?.sweep_deliveries(limit)).await
    }
}
