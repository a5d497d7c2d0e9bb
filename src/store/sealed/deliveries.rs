//! Accepted requests, which are sealed as records are: a copy of the store shows nothing of what is still to be sent.

use async_trait::async_trait;
use bytes::Bytes;

use super::Sealed;
use super::keyring::{Closed, Part, Sealing, Strictness};
use crate::idempotency::record::RecordId;
use crate::store::deliveries::{
    self, Acceptance, Batch, Change, Deliveries, Delivery, DeliveryCount, DeliveryFilter, DeliveryPage, Held,
    NewDelivery, Sequence, Take, Taken,
};
use crate::store::{Error, OriginId};

#[async_trait]
impl Deliveries for Sealed {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        let seal = |part, plain: &Bytes| self.keys.seal(id, new.token, part, plain);
        let strictness = self.keys.strictness(new.origin);
        let sealed = NewDelivery {
            head: self.keys.seal_as(strictness, id, new.token, Part::Head, &new.head),
            request: seal(Part::Request, &new.request),
            body: seal(Part::Body, &new.body),
            ..new
        };
        Ok(match deliveries::of(&*self.store)?.accept(id, sealed).await? {
            Acceptance::Accepted => Acceptance::Accepted,
            Acceptance::Queued(delivery) => Acceptance::Queued(self.open_delivery(delivery)),
            Acceptance::Recorded { record, now } => Acceptance::Recorded { record: self.open_met(id, record), now },
        })
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        let found = deliveries::of(&*self.store)?.delivery(id).await?;
        Ok(found.map(|delivery| self.open_delivery(delivery)))
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        let batch = deliveries::of(&*self.store)?.take_due(take).await?;
        let taken = batch.taken.into_iter().map(|Taken { delivery, now, request, body }| Taken {
            request: self.open_part(&delivery, Part::Request, request),
            body: self.open_part(&delivery, Part::Body, body),
            delivery: self.open_delivery(delivery),
            now,
        });
        Ok(Batch { taken: taken.collect(), ..batch })
    }

    async fn change(&self, taken: Held, change: Change) -> Result<bool, Error> {
        let seal = |note: Bytes| self.keys.seal(taken.id, taken.token, Part::Note, &note);
        let sealed = match change {
            Change::Finish => Change::Finish,
            Change::Postpone { delay, is_attempt, note } => {
                Change::Postpone { delay, is_attempt, note: note.map(seal) }
            }
            Change::Park { ttl, is_attempt, note } => Change::Park { ttl, is_attempt, note: seal(note) },
        };
        deliveries::of(&*self.store)?.change(taken, sealed).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        deliveries::of(&*self.store)?.requeue(id).await
    }

    async fn discard(&self, id: RecordId) -> Result<bool, Error> {
        deliveries::of(&*self.store)?.discard(id).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        let page = deliveries::of(&*self.store)?.deliveries(filter, after, limit).await?;
        let opened = page.deliveries.into_iter().map(|delivery| self.open_delivery(delivery));
        Ok(DeliveryPage { deliveries: opened.collect(), ..page })
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        deliveries::of(&*self.store)?.count_deliveries().await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        deliveries::of(&*self.store)?.pause(origin, is_paused).await
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        deliveries::of(&*self.store)?.paused().await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        deliveries::of(&*self.store)?.sweep_deliveries(limit).await
    }
}

impl Sealed {
    fn open_delivery(&self, delivery: Delivery) -> Delivery {
        let head = self.open_part(&delivery, Part::Head, delivery.head.clone());
        let note = delivery.note.clone().map(|note| self.open_part(&delivery, Part::Note, note));
        Delivery { head, note, ..delivery }
    }

    /// What does not open is empty, and cannot be read: its request is not sent. Where a route demands encryption, what is
    /// plain was written by somebody else.
    fn open_part(&self, delivery: &Delivery, part: Part, value: Bytes) -> Bytes {
        let is_strict = || {
            let origin = delivery.origin.as_ref().map(crate::store::Origin::id);
            origin.is_some_and(|origin| self.keys.strictness(origin) == Strictness::Strict)
        };
        let opened = if Sealing::of(&value) == Sealing::Plain && is_strict() {
            Err(Closed::Altered)
        } else {
            self.keys.open(delivery.id, delivery.token, part, &value)
        };
        opened.unwrap_or_else(|closed| {
            (self.report)(delivery.id, closed);
            Bytes::new()
        })
    }
}
