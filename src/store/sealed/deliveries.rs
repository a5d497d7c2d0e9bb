//! Accepted requests, which are sealed as records are: a copy of the store shows nothing of what is still to be sent.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use super::keyring::{DecryptionError, Part, Sealing, Strictness};
use super::{Resealer, Sealed};
use crate::idempotency::codec::SEALED;
use crate::idempotency::record::{Record, RecordId};
use crate::store::deliveries::{
    self, Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold,
    DeliveryPage, NewDelivery, Sequence, Take, TakenDelivery,
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
            Acceptance::Queued(delivery) => Acceptance::Queued(self.open_shown(delivery)),
            Acceptance::Recorded { record, now } => Acceptance::Recorded { record: self.open_met(id, record), now },
        })
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        let found = deliveries::of(&*self.store)?.delivery(id).await?;
        Ok(found.map(|delivery| self.open_shown(delivery)))
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        let batch = deliveries::of(&*self.store)?.take_due(take).await?;
        let taken = batch.taken.into_iter().map(|TakenDelivery { delivery, request, body }| {
            // All parts were sealed at once. Where the store says that the request comes from does not count: who could write
            // there could say anything.
            let is_sealed = [&delivery.head, &request, &body].iter().any(|part| Sealing::of(part) != Sealing::Plain);
            let is_strict = is_sealed || self.keys.strictness(take.origin) == Strictness::Strict;
            let request = self.open_part(&delivery, Part::Request, request, is_strict);
            let body = self.open_part(&delivery, Part::Body, body, is_strict);
            let (request, body) = match (request, body) {
                (Ok(request), Ok(body)) => (request, body),
                (Err(DecryptionError::NoKey), _) | (_, Err(DecryptionError::NoKey)) => {
                    (Bytes::from_static(&SEALED), Bytes::new())
                }
                _ => Default::default(),
            };
            TakenDelivery { delivery: self.open_delivery(delivery, is_strict), request, body }
        });
        Ok(Batch { taken: taken.collect(), ..batch })
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        let seal = |note: Bytes| self.keys.seal(taken.id, taken.token, Part::Note, &note);
        let sealed = match change {
            DeliveryChange::Finish => DeliveryChange::Finish,
            DeliveryChange::Postpone { delay, is_attempt, note } => {
                DeliveryChange::Postpone { delay, is_attempt, note: note.map(seal) }
            }
            DeliveryChange::Park { ttl, is_attempt, note } => {
                DeliveryChange::Park { ttl, is_attempt, note: seal(note) }
            }
        };
        deliveries::of(&*self.store)?.change(taken, sealed).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        deliveries::of(&*self.store)?.requeue(id).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        let page = deliveries::of(&*self.store)?.deliveries(filter, after, limit).await?;
        let opened = page.deliveries.into_iter().map(|delivery| self.open_shown(delivery));
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

impl Resealer {
    /// Removes dead deliveries of its service whose requests have run to their end since, as [`deliveries::remove_completed`] does.
    /// What does not open is left, and not reported: no request waits for it.
    ///
    /// # Errors
    /// Where the store does not say.
    pub async fn remove_completed(&self, place: (Option<Sequence>, usize)) -> Result<Option<Sequence>, Error> {
        let open = |delivery: &Delivery, record: Record| {
            let open = |attempt, head| self.keys().open(delivery.id, attempt, Part::Head, head).ok();
            Some((open(delivery.token, &delivery.head)?, open(record.attempt, &record.head)?))
        };
        let dead = DeliveryFilter { service: Some(Arc::clone(self.service())), ..DeliveryFilter::default() };
        deliveries::remove_completed(self.store(), dead, place, open).await
    }
}

impl Sealed {
    /// What does not open cannot be read, and its request is not sent: it stays encrypted where its key is missing, and is empty
    /// where it was altered.
    fn open_delivery(&self, delivery: Delivery, is_strict: bool) -> Delivery {
        let open = |part, value: &Bytes| match self.open_part(&delivery, part, value.clone(), is_strict) {
            Ok(plain) => plain,
            Err(DecryptionError::NoKey) => value.clone(),
            Err(DecryptionError::Altered | DecryptionError::Plain) => Bytes::new(),
        };
        let (head, note) =
            (open(Part::Head, &delivery.head), delivery.note.as_ref().map(|note| open(Part::Note, note)));
        Delivery { head, note, ..delivery }
    }

    /// What is only looked at, and is not sent. It opens by the route that the store names.
    fn open_shown(&self, delivery: Delivery) -> Delivery {
        let origin = delivery.origin.as_ref().map(crate::store::Origin::id);
        let is_strict = origin.is_some_and(|origin| self.keys.strictness(origin) == Strictness::Strict);
        self.open_delivery(delivery, is_strict)
    }

    /// Where `is_strict`, what is plain was written by somebody else.
    fn open_part(
        &self,
        delivery: &Delivery,
        part: Part,
        value: Bytes,
        is_strict: bool,
    ) -> Result<Bytes, DecryptionError> {
        let opened = if Sealing::of(&value) == Sealing::Plain && is_strict {
            Err(DecryptionError::Altered)
        } else {
            self.keys.open(delivery.id, delivery.token, part, &value)
        };
        opened.inspect_err(|closed| (self.report)(delivery.id, *closed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::idempotency::codec::is_sealed;
    use crate::idempotency::record::AttemptToken;
    use crate::store::deliveries::Lane;
    use crate::store::memory::Memory;
    use crate::store::sealed::keyring::{Keyring, SealingKey};
    use crate::store::{Expiry, NewRecord, Origin, Settlement, Store};

    /// A body may be empty by right: what remains of one that was altered must not pass for that.
    #[tokio::test]
    async fn a_request_is_not_sent_without_the_body_that_it_was_accepted_with() {
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let keys = Arc::new(Keyring::new(vec![SealingKey::new("a".into(), &[1; 32])]));
        let sealed = Sealed::new(Arc::clone(&memory), Arc::clone(&keys), "s".into(), |_, _| {});
        let (origin, head) = (OriginId(1), Bytes::from_static(b"head"));
        let body = Bytes::from_static(b"amount=100");
        let whole = keys.seal(RecordId([1; 32]), AttemptToken([1; 16]), Part::Body, &body);
        let altered = [&whole[..whole.len() - 1], &[whole[whole.len() - 1] ^ 1]].concat();
        let moved = keys.seal(RecordId([9; 32]), AttemptToken([1; 16]), Part::Body, &body);
        for (body, comes) in [(whole, 10), (altered.into(), 0), (moved, 0), (body, 0), (Bytes::new(), 0)] {
            let (id, token) = (RecordId([1; 32]), AttemptToken([1; 16]));
            let (head, request) = [Part::Head, Part::Request].map(|part| keys.seal(id, token, part, &head)).into();
            let new = NewDelivery { token, origin, lane: Lane(0), head, request, body };
            deliveries::of(&*memory).unwrap().accept(id, new).await.unwrap();
            let take = Take { origin, limit: 1, max_bytes: 100, hold: Duration::ZERO, is_ordered: false };
            let taken = sealed.take_due(take).await.unwrap().taken.remove(0);
            assert_eq!((taken.request.len(), taken.body.len()), if comes > 0 { (4, comes) } else { (0, 0) });
            assert!(sealed.discard(id, token).await.unwrap());
        }
    }

    /// A gate that has another key tells by what it gets that one is missing.
    #[tokio::test]
    async fn what_its_key_is_missing_for_stays_encrypted_and_is_not_sent() {
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let sealed_with = |key| {
            let keys = Keyring::new(vec![SealingKey::new("a".into(), &[key; 32])]);
            Sealed::new(Arc::clone(&memory), Arc::new(keys), "s".into(), |_, _| {})
        };
        let (id, token, plain) = (RecordId([1; 32]), AttemptToken([1; 16]), Bytes::from_static(b"plain"));
        let (origin, head, request) = (OriginId(1), plain.clone(), plain.clone());
        let new = NewDelivery { token, origin, lane: Lane(0), head, request, body: plain };
        sealed_with(1).accept(id, new).await.unwrap();
        let take = Take { origin, limit: 1, max_bytes: 100, hold: Duration::ZERO, is_ordered: false };
        let taken = sealed_with(2).take_due(take).await.unwrap().taken.remove(0);
        assert!(is_sealed(&taken.delivery.head) && is_sealed(&taken.request) && taken.body.is_empty());
        let shown = sealed_with(2).delivery(id).await.unwrap().unwrap();
        assert!(is_sealed(&shown.head));
    }

    /// A gate that looks again and again would report one whose key is lost each time.
    #[tokio::test]
    async fn what_is_dead_is_compared_with_its_record_and_nothing_is_reported() {
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let sealed_with = |key| {
            let keys = Keyring::new(vec![SealingKey::new("a".into(), &[key; 32])]);
            Sealed::new(Arc::clone(&memory), Arc::new(keys), "s".into(), |id, _| panic!("{id} is reported"))
        };
        let (own, other) = (sealed_with(1), sealed_with(2));
        let charge = Origin { service: "s".into(), namespace: "charge".into(), route: "charge".into() };
        memory.adopt(vec![charge.clone()], Vec::new(), false).await.unwrap();
        let (id, token, plain) = (RecordId([1; 32]), AttemptToken([1; 16]), Bytes::from_static(b"plain"));
        let (origin, head, request, minute) = (charge.id(), plain.clone(), plain.clone(), Duration::from_secs(60));
        own.accept(id, NewDelivery { token, origin, lane: Lane(0), head, request, body: plain.clone() }).await.unwrap();
        let attempt = AttemptToken([2; 16]);
        let new = NewRecord { attempt, origin, lease: minute, ttl: minute, unknown_ttl: minute, head: plain };
        own.claim(id, new).await.unwrap();
        let end = Settlement::Complete { answer: Bytes::new(), expiry: Expiry::FromNow(minute) };
        own.settle(id, attempt, end).await.unwrap();
        let take = Take { origin, limit: 1, max_bytes: 100, hold: minute, is_ordered: false };
        let held = own.take_due(take).await.unwrap().taken.remove(0).held();
        let park =
            DeliveryChange::Park { ttl: minute, is_attempt: false, note: Bytes::from_static(b"outcome-unknown") };
        assert!(own.change(held, park).await.unwrap());
        for (sealed, is_left) in [(other, true), (own, false)] {
            assert_eq!(sealed.resealer().remove_completed((None, 10)).await.unwrap(), None);
            assert_eq!(deliveries::of(&*memory).unwrap().delivery(id).await.unwrap().is_some(), is_left);
        }
    }

    /// Somebody who writes to the store can write a request there, and whose it is.
    #[tokio::test]
    async fn a_planted_request_is_not_sent_whatever_the_store_says_of_its_route() {
        let memory: Arc<dyn Store> = Arc::new(Memory::new());
        let keys = Arc::new(Keyring::new(vec![SealingKey::new("a".into(), &[1; 32])]));
        let sealed = Sealed::new(Arc::clone(&memory), Arc::clone(&keys), "s".into(), |_, _| {});
        let take = |origin| Take { origin, limit: 1, max_bytes: 100, hold: Duration::ZERO, is_ordered: false };
        // The store knows the name of neither route.
        let (strict, lenient) = (OriginId(1), OriginId(2));
        keys.be_strict([strict].into());
        for (number, origin, comes) in [(1, strict, false), (2, lenient, true)] {
            let (id, token, plain) = (RecordId([number; 32]), AttemptToken([number; 16]), Bytes::from_static(b"plain"));
            let (head, request, body) = (plain.clone(), plain.clone(), plain);
            let new = NewDelivery { token, origin, lane: Lane(0), head, request, body };
            deliveries::of(&*memory).unwrap().accept(id, new).await.unwrap();
            let taken = sealed.take_due(take(origin)).await.unwrap().taken.remove(0);
            let parts = [&taken.delivery.head, &taken.request, &taken.body];
            assert!(parts.iter().all(|part| part.is_empty() != comes), "{origin:?}: {parts:?}");
        }
    }
}
