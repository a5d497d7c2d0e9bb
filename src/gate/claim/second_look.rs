//! A request that has claimed its key looks at the store a second time before it runs: another may have come first.

use std::time::Duration;

use super::delivery_context::DeliveryContext;
use super::id_rotation::IdHolder;
use super::protected::ProtectedRequest;
use crate::gate::answer::RETRY_SOON;
use crate::http::problem::Problem;
use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};
use crate::store::{Claim, Error, Store, deliveries};
use crate::telemetry::outcome::Code;

/// How long a delivery that was taken needs no second look. No other gate takes it in that time: see
/// [`deliver`](crate::gate::delivery::deliver).
const FRESH: Duration = Duration::from_secs(1);

/// What could forbid a request to run whose claim stands.
pub(in crate::gate) struct SecondLook {
    /// Its id is of a former secret: nothing new is made under it.
    is_former: bool,
    /// Under which other ids the record of its key may stand.
    others: Vec<RecordId>,
    /// Deliveries may stand there as well.
    may_be_queued: bool,
    /// The id under which to look for an accepted request with its key; none if this request is itself a delivery.
    queued: Option<RecordId>,
    delivery: Option<TakenDelivery>,
}

/// The delivery that a claim is for.
#[derive(Clone, Copy)]
struct TakenDelivery {
    id: RecordId,
    token: AttemptToken,
    /// When it was taken.
    at: Timestamp,
}

impl ProtectedRequest {
    /// What to look at once its claim stands.
    pub(in crate::gate) fn second_look(&self) -> SecondLook {
        // The store has answered the claim, so it can be asked even before the first look at its deliveries.
        let may_be_queued = self.policy().accepts() || self.gate.shared.queued.load().may_have(&self.route.namespace);
        let taken =
            |delivery: &DeliveryContext| TakenDelivery { id: self.id, token: delivery.token, at: delivery.taken_at };
        SecondLook {
            is_former: self.made_by > 0 && self.delivery.is_none(),
            others: self.other_ids(),
            may_be_queued,
            queued: (self.delivery.is_none() && may_be_queued).then_some(self.id),
            delivery: self.delivery.as_ref().map(taken),
        }
    }
}

impl SecondLook {
    /// Finds nothing to look at.
    pub(in crate::gate) fn nothing() -> Self {
        Self { is_former: false, others: Vec::new(), may_be_queued: false, queued: None, delivery: None }
    }

    /// Why a request whose claim stands may not run. Where the store does not say, it may not.
    pub(in crate::gate) async fn bars_claim(
        &self,
        store: &dyn Store,
        claimed: &Result<Claim, Error>,
    ) -> Option<Problem> {
        let Ok(Claim::Inserted(claimed_at)) = *claimed else { return None };
        let is_fresh = |taken: &TakenDelivery| claimed_at >= taken.at && claimed_at.since(taken.at) < FRESH;
        let delivery = self.delivery.filter(|taken| !is_fresh(taken));
        if self.is_former { Some(other_id_first()) } else { self.bars(store, delivery).await }
    }

    /// The same for a claim that took the place of a record.
    pub(in crate::gate) async fn bars_supersede(
        &self,
        store: &dyn Store,
        superseded: &Result<bool, Error>,
    ) -> Option<Problem> {
        if matches!(superseded, Ok(true)) { self.bars(store, self.delivery).await } else { None }
    }

    async fn bars(&self, store: &dyn Store, delivery: Option<TakenDelivery>) -> Option<Problem> {
        let look = async {
            Ok::<_, Error>(
                self.stands_under_other_id(store).await?
                    || self.is_queued(store).await?
                    || match delivery {
                        Some(taken) => taken.is_gone(store).await?,
                        None => false,
                    },
            )
        };
        match look.await {
            Ok(is_first) => is_first.then(other_id_first),
            Err(error) => {
                tracing::debug!(%error, "the store does not say whether a claim may run");
                Some(not_said())
            }
        }
    }

    /// Whether an accepted request with its key waits for its delivery. It may be another one, and comes first.
    async fn is_queued(&self, store: &dyn Store) -> Result<bool, Error> {
        match self.queued {
            Some(id) => deliveries::is_queued(store, id).await,
            None => Ok(false),
        }
    }

    /// Whether something stands under another id of its key that comes before it.
    pub(in crate::gate) async fn stands_under_other_id(&self, store: &dyn Store) -> Result<bool, Error> {
        for id in &self.others {
            let comes_first = match IdHolder::of(store, *id, self.may_be_queued).await? {
                Some(IdHolder::Record(_)) => true,
                // Of two deliveries, one must go on.
                Some(IdHolder::Delivery) => self.delivery.is_none_or(|own| *id < own.id),
                None => false,
            };
            if comes_first {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl TakenDelivery {
    /// Whether it ended since it was taken: another gate may have delivered it when its hold was over, and its record may have
    /// expired since. Or it was given up, or an operator discarded it.
    async fn is_gone(&self, store: &dyn Store) -> Result<bool, Error> {
        let found = deliveries::of(store)?.delivery(self.id).await?;
        Ok(found.is_none_or(|delivery| delivery.token != self.token || delivery.is_dead()))
    }
}

/// A request with the same key may have come first: under an id that was made with another secret, or to be delivered later; or
/// another gate has delivered this one.
pub(in crate::gate) fn other_id_first() -> Problem {
    let detail = "another request with this key may have come first; nothing was sent; send this one again";
    Problem::new(Code::InFlight, detail).retry_after(RETRY_SOON)
}

/// Another database than that of the claim may have the other ids of its key, and be away.
fn not_said() -> Problem {
    let detail = "the store does not say whether another request with this key came first; nothing was sent";
    Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_SOON)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::store::deliveries::{Deliveries, DeliveryChange, Lane, NewDelivery, Take};
    use crate::store::memory::Memory;
    use crate::store::unreliable::Unreliable;
    use crate::store::{NewRecord, OriginId};

    const OWN: RecordId = RecordId([2; 32]);

    fn look(others: &[RecordId], token: u8) -> SecondLook {
        let delivery = TakenDelivery { id: OWN, token: AttemptToken([token; 16]), at: Timestamp(5_000) };
        SecondLook {
            is_former: false,
            others: others.to_vec(),
            may_be_queued: true,
            queued: None,
            delivery: Some(delivery),
        }
    }

    fn fresh() -> NewRecord {
        let (minute, head) = (Duration::from_secs(60), Bytes::new());
        let (lease, ttl, unknown_ttl) = (minute, minute, minute);
        NewRecord { attempt: AttemptToken([3; 16]), origin: OriginId(0), lease, ttl, unknown_ttl, head }
    }

    async fn accept(store: &Memory, id: RecordId, token: u8) {
        let (head, request, body) = (Bytes::new(), Bytes::new(), Bytes::new());
        let new =
            NewDelivery { token: AttemptToken([token; 16]), origin: OriginId(0), lane: Lane(0), head, request, body };
        store.accept(id, new).await.unwrap();
    }

    impl SecondLook {
        async fn forbids_claim(&self, store: &dyn Store, at: Timestamp) -> bool {
            self.bars_claim(store, &Ok(Claim::Inserted(at))).await.is_some()
        }
    }

    #[tokio::test]
    async fn a_look_that_fails_is_no_other_request() {
        let store = Unreliable::new(Arc::new(Memory::new()));
        let looked = SecondLook { delivery: None, may_be_queued: false, ..look(&[RecordId([1; 32])], 1) };
        let claimed = Ok(Claim::Inserted(Timestamp(60_000)));
        assert!(looked.bars_claim(&store, &claimed).await.is_none());
        store.set_away(true);
        assert_eq!(looked.bars_claim(&store, &claimed).await.map(|problem| problem.code), Some(Code::StoreUnavailable));
        let superseded = looked.bars_supersede(&store, &Ok(true)).await;
        assert_eq!(superseded.map(|problem| problem.code), Some(Code::StoreUnavailable));
        assert!(looked.bars_supersede(&store, &Ok(false)).await.is_none());
        store.set_away(false);
        store.claim(RecordId([1; 32]), fresh()).await.unwrap();
        assert_eq!(looked.bars_claim(&store, &claimed).await.map(|problem| problem.code), Some(Code::InFlight));
    }

    /// A gate that was stopped for a while may find that another has delivered what it took.
    #[tokio::test]
    async fn a_delivery_that_was_taken_a_while_ago_is_looked_at_again() {
        let store = Memory::new();
        assert!(!look(&[], 1).forbids_claim(&store, Timestamp(5_999)).await, "nobody else can have taken it");
        for late in [6_000, 4_999] {
            assert!(look(&[], 1).forbids_claim(&store, Timestamp(late)).await, "it is gone");
        }
        assert!(look(&[], 1).bars_supersede(&store, &Ok(true)).await.is_some());
        accept(&store, OWN, 1).await;
        assert!(!look(&[], 1).forbids_claim(&store, Timestamp(60_000)).await);
        assert!(look(&[], 3).forbids_claim(&store, Timestamp(60_000)).await, "the request was accepted anew");
    }

    /// It was accepted when this one had looked for it and had not claimed the key.
    #[tokio::test]
    async fn a_claim_beside_an_accepted_request_does_not_run() {
        let store = Memory::new();
        let looked = SecondLook { queued: Some(OWN), delivery: None, ..look(&[], 1) };
        assert!(!looked.forbids_claim(&store, Timestamp(60_000)).await);
        accept(&store, OWN, 1).await;
        assert!(looked.forbids_claim(&store, Timestamp(60_000)).await);
        assert!(looked.bars_supersede(&store, &Ok(true)).await.is_some());
        // One that was given up bars nothing.
        let take = Take { origin: OriginId(0), limit: 1, max_bytes: 1, hold: FRESH, is_ordered: false };
        let held = store.take_due(take).await.unwrap().taken[0].held();
        let park = DeliveryChange::Park { ttl: Duration::from_secs(3600), is_attempt: false, note: Bytes::new() };
        assert!(store.change(held, park).await.unwrap());
        assert!(!looked.forbids_claim(&store, Timestamp(60_000)).await);
    }

    #[tokio::test]
    async fn a_record_under_another_id_comes_first_and_of_deliveries_the_lowest_id() {
        let store = Memory::new();
        let (lower, higher) = (RecordId([1; 32]), RecordId([3; 32]));
        accept(&store, higher, 3).await;
        assert!(!look(&[higher], 1).stands_under_other_id(&store).await.unwrap());
        assert!(SecondLook { delivery: None, ..look(&[higher], 1) }.stands_under_other_id(&store).await.unwrap());
        accept(&store, lower, 1).await;
        assert!(look(&[higher, lower], 1).stands_under_other_id(&store).await.unwrap());
        store.claim(higher, fresh()).await.unwrap();
        assert!(look(&[higher], 1).stands_under_other_id(&store).await.unwrap());
    }
}
