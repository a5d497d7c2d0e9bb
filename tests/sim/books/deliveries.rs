//! Writes down what becomes of accepted requests.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;
use oncegate::idempotency::codec::AcceptedRequest;
use oncegate::idempotency::record::{AttemptToken, RecordId};
use oncegate::store::deliveries::{
    Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold, DeliveryPage,
    DeliveryState, NewDelivery, Sequence, Take,
};
use oncegate::store::unreliable::Operation;
use oncegate::store::{Error, OriginId};

use super::{Books, Recorded};
use crate::history::{EPOCH, Event, LifeNumber, Request, Token, Waiting};
use crate::setup::{label_of, variant_of};

/// What waited when it was last looked at.
#[derive(Default)]
pub struct Queue {
    known: Mutex<BTreeMap<RecordId, Waiting>>,
    /// Whose request each delivery is.
    requests: Mutex<BTreeMap<Token, Request>>,
}

impl Books {
    /// Writes down what has changed since the last look, which `op` of a gate has done.
    pub async fn observe_queue(&self, life: LifeNumber, op: Operation) {
        let page = self.memory.deliveries(DeliveryFilter::default(), None, usize::MAX - 1).await;
        let found = page.expect("memory does not fail").deliveries;
        let now: BTreeMap<RecordId, Waiting> = found.iter().map(|found| (found.id, self.waiting(found))).collect();
        let before = std::mem::replace(&mut *self.queue.known.lock().unwrap(), now.clone());
        let mut ids: Vec<RecordId> = before.keys().chain(now.keys()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids.into_iter().filter(|id| before.get(id) != now.get(id)) {
            let label = label_of(id).expect("every delivery has a label");
            let (before, after) = (before.get(&id).cloned(), now.get(&id).cloned());
            self.history.add(Event::Queued { life, op, label, before, after });
        }
    }

    fn waiting(&self, found: &Delivery) -> Waiting {
        let token = Token::of(found.token);
        let (is_dead, until) = match found.state {
            DeliveryState::Queued { due } => (false, due),
            DeliveryState::Dead { until } => (true, until),
        };
        Waiting {
            token,
            request: *self.queue.requests.lock().unwrap().get(&token).expect("it was accepted"),
            sequence: found.sequence.0,
            variant: variant_of(&found.head),
            since: found.queued_at.0 - EPOCH,
            is_dead,
            until: until.0.saturating_sub(EPOCH),
            attempts: found.attempts,
        }
    }

    fn learn(&self, new: &NewDelivery) {
        let request = AcceptedRequest::decode(&new.request).expect("a gate keeps what it can read");
        let number = request.headers["x-request"].to_str().unwrap().parse().unwrap();
        self.queue.requests.lock().unwrap().insert(Token::of(new.token), Request(number));
    }
}

impl Recorded {
    async fn queued(&self, op: Operation) {
        self.shelf.books.observe_queue(self.life.number, op).await;
    }
}

#[async_trait]
impl Deliveries for Recorded {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.shelf.books.learn(&new);
        let accepted = self.shelf.accept(&self.life, id, new).await?;
        self.queued(Operation::Accept).await;
        Ok(accepted)
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.shelf.memory.delivery(id).await
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        let batch = self.shelf.take_due(take).await?;
        if !batch.taken.is_empty() {
            self.queued(Operation::TakeDue).await;
        }
        Ok(batch)
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        let changed = self.shelf.change(taken, change).await?;
        self.queued(Operation::ChangeDelivery).await;
        Ok(changed)
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        let requeued = self.shelf.memory.requeue(id).await?;
        self.queued(Operation::Requeue).await;
        Ok(requeued)
    }

    async fn discard(&self, id: RecordId, token: AttemptToken) -> Result<bool, Error> {
        let discarded = self.shelf.memory.discard(id, token).await?;
        self.queued(Operation::Discard).await;
        Ok(discarded)
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.shelf.memory.deliveries(filter, after, limit).await
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.shelf.memory.count_deliveries().await
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        let changed = self.shelf.memory.pause(origin, is_paused).await?;
        self.life.history.add(Event::Paused { life: self.life.number, is_paused });
        Ok(changed)
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.shelf.memory.paused().await
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        let swept = self.shelf.memory.sweep_deliveries(limit).await?;
        if swept > 0 {
            self.queued(Operation::SweepDeliveries).await;
        }
        Ok(swept)
    }
}
