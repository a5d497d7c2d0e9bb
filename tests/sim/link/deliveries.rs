//! The same way for accepted requests.

use async_trait::async_trait;
use oncegate::idempotency::record::{AttemptToken, RecordId};
use oncegate::store::deliveries::{
    self, Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold,
    DeliveryPage, NewDelivery, Sequence, Take,
};
use oncegate::store::{Error, OriginId};

use super::Link;

#[async_trait]
impl Deliveries for Link {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.accept(id, new).await }).await
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.delivery(id).await }).await
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.take_due(take).await }).await
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.change(taken, change).await }).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.requeue(id).await }).await
    }

    async fn discard(&self, id: RecordId, token: AttemptToken) -> Result<bool, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.discard(id, token).await }).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.deliveries(filter, after, limit).await }).await
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.carry(|store| async move { deliveries::of(&*store)?.count_deliveries().await }).await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.pause(origin, is_paused).await }).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.carry(|store| async move { deliveries::of(&*store)?.paused().await }).await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        self.carry(move |store| async move { deliveries::of(&*store)?.sweep_deliveries(limit).await }).await
    }
}
