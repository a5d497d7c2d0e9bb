//! Finds records and deliveries that were made with another id secret, while one secret takes the place of another.
//!
//! With several secrets a key has several ids. A request looks under the other ids first, and takes the one under which a
//! record or a delivery stands. That alone would not be safe: two requests may look before either has claimed, and then claim
//! under different ids. So whoever has claimed looks under the other ids once more (see [`second_look`](super::second_look)),
//! and runs only if nothing stands there. Of two claims, the later one's second look comes after the earlier one, and finds it.
//! The same holds for requests that are accepted.
//!
//! A gate that dies between its claim and its second look leaves a record under which nothing was sent. Where records stand
//! under several ids for that reason, a completed one counts before all others. Several deliveries may stand as well: a record
//! of one counts before those that have none, and of those the one with the lowest id is delivered.

use tokio::time::{Instant, timeout_at};

use super::protected::ProtectedRequest;
use crate::idempotency::credential::Proof;
use crate::idempotency::key::Key;
use crate::idempotency::protocol::least_for_claim;
use crate::idempotency::record::{RecordId, State};
use crate::store::{Error, Store};

/// What stands under an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gate) enum IdHolder {
    /// A record in this state, and perhaps a delivery.
    Record(State),
    /// A delivery alone.
    Delivery,
}

impl IdHolder {
    /// What stands under `id`; `accepts` says whether deliveries may.
    pub(super) async fn of(store: &dyn Store, id: RecordId, accepts: bool) -> Result<Option<Self>, Error> {
        // The delivery first: its record is there before the delivery is gone.
        let is_queued = match store.deliveries().filter(|_| accepts) {
            Some(queue) => queue.delivery(id).await?.is_some(),
            None => false,
        };
        // A record that says what became of a delivery counts for as long as the delivery stands.
        let listed = store.get(id).await?.filter(|listed| is_queued || listed.is_live());
        Ok(match listed {
            Some(listed) => Some(Self::Record(listed.record.state)),
            None => is_queued.then_some(Self::Delivery),
        })
    }
}

impl ProtectedRequest {
    /// Takes the id under which its record or delivery stands, if it is another than that of new ones. Where the store does not
    /// say, the second look does.
    pub(in crate::gate) async fn find_record(&mut self) {
        if self.gate.identifiers.others.is_empty() {
            return;
        }
        let identities = self.identities();
        let store = &*self.gate.shared.store;
        let in_memory = identities.iter().position(|(id, _)| store.recall(*id).is_some());
        let place = match in_memory {
            Some(place) => Some(place),
            // One time for all: while the store is away, the claim says so.
            None => {
                let finding = find(store, &identities, self.may_have_delivery());
                let found = timeout_at(self.look_deadline(), finding).await;
                found.ok().and_then(Result::ok).flatten().map(|(place, _)| place)
            }
        };
        if let Some(place) = place.filter(|place| *place != self.made_by) {
            (self.id, self.proof) = identities[place];
            (self.identifier, self.made_by) = (self.gate.identifiers.others[place - 1].clone(), place);
        }
    }

    /// Until when a look at what stands may take.
    pub(in crate::gate) fn look_deadline(&self) -> Instant {
        self.deadlines.as_ref().map_or_else(|| Instant::now() + self.gate.settings.settle_timeout, |end| end.look)
    }

    /// Until when the store may take to accept the request, or to say what stands.
    pub(in crate::gate) fn store_deadline(&self) -> Instant {
        let settle_timeout = self.gate.settings.settle_timeout;
        let now = Instant::now();
        self.deadlines.as_ref().map_or(now + settle_timeout, |end| end.store.max(now + least_for_claim(settle_timeout)))
    }

    /// What stands under another id of its key and counts before a delivery, which is not to run then.
    pub(in crate::gate) async fn comes_before(&self) -> Result<Option<IdHolder>, Error> {
        if self.other_ids().is_empty() {
            return Ok(None);
        }
        let found = find(&*self.gate.shared.store, &self.identities(), true).await?;
        Ok(found.filter(|(place, _)| *place != self.made_by).map(|(_, standing)| standing))
    }

    /// The ids of its key, each with the proof of its caller.
    fn identities(&self) -> Vec<(RecordId, Option<Proof>)> {
        let (namespace, scope, caller) = (&self.route.namespace, &self.policy().scope, self.head.caller());
        let identifiers = self.gate.identifiers.all();
        identifiers.map(|identifier| identifier.identify(namespace, scope, caller, &self.key)).collect()
    }

    /// A digest of its record's namespace and scope, and of its caller's proof: what a record with a fixed key would have.
    pub(in crate::gate) fn scope_digest(&self) -> [u8; 32] {
        let key = Key::from_fingerprint(&[0; 32]);
        let (namespace, scope) = (&self.route.namespace, &self.policy().scope);
        let (id, proof) = self.gate.identifiers.first.identify(namespace, scope, self.head.caller(), &key);
        // The proof is bound to the id.
        proof.map_or(id.0, |proof| proof.0)
    }

    /// The ids under which its record may stand besides its own. Most gates have one secret: then there are none.
    pub(super) fn other_ids(&self) -> Vec<RecordId> {
        if self.gate.identifiers.others.is_empty() {
            return Vec::new();
        }
        let ids: Vec<RecordId> = self.identities().into_iter().map(|(id, _)| id).collect();
        // A delivery may be older than the rules of keys that are in force: its ids are others.
        if ids.contains(&self.id) { ids.into_iter().filter(|id| *id != self.id).collect() } else { Vec::new() }
    }
}

/// Of what stands under these ids, what counts, and its place.
async fn find(
    store: &dyn Store,
    identities: &[(RecordId, Option<Proof>)],
    accepts: bool,
) -> Result<Option<(usize, IdHolder)>, Error> {
    let mut found = Vec::new();
    // The first last: most often nothing stands under the others.
    for place in (1..identities.len()).chain([0]) {
        if place == 0 && found.is_empty() {
            return Ok(None);
        }
        found.extend(IdHolder::of(store, identities[place].0, accepts).await?.map(|standing| (place, standing)));
    }
    // All gates take the same one, in whatever order they have the secrets.
    Ok(found.into_iter().min_by_key(|(place, standing)| {
        let rank = match standing {
            IdHolder::Record(State::Completed) => 0,
            IdHolder::Record(_) => 1,
            IdHolder::Delivery => 2,
        };
        (rank, identities[*place].0)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::AttemptToken;
    use crate::store::deliveries::{Lane, NewDelivery};
    use crate::store::memory::Memory;
    use crate::store::{Expiry, NewRecord, OriginId, Settlement};
    use std::time::Duration;

    const TTL: Duration = Duration::from_secs(60);

    fn fresh(number: u8) -> NewRecord {
        let (attempt, origin) = (AttemptToken([number; 16]), OriginId(0));
        NewRecord { attempt, origin, lease: TTL, ttl: TTL, unknown_ttl: TTL, head: bytes::Bytes::new() }
    }

    /// A gate that died before its second look left the one that is not completed.
    #[tokio::test]
    async fn all_gates_take_the_same_record_and_a_completed_one_first() {
        let ids = [1, 2].map(|number| (RecordId([number; 32]), None));
        let swapped = [ids[1], ids[0]];
        for completed in [None, Some(0), Some(1)] {
            let store = Memory::default();
            assert_eq!(find(&store, &ids, true).await.unwrap(), None);
            for (place, (id, _)) in ids.iter().enumerate() {
                let fresh = fresh(place as u8);
                store.claim(*id, fresh.clone()).await.unwrap();
                if completed == Some(place) {
                    let end =
                        Settlement::Complete { answer: bytes::Bytes::from_static(b"x"), expiry: Expiry::FromNow(TTL) };
                    store.settle(*id, fresh.attempt, end).await.unwrap();
                }
            }
            let expected = ids[completed.unwrap_or(0)].0;
            for ids in [ids, swapped] {
                let (place, _) = find(&store, &ids, true).await.unwrap().unwrap();
                assert_eq!(ids[place].0, expected);
            }
        }
    }

    /// Whether or not its record has expired: a delivery of the same key must not run beside it.
    #[tokio::test]
    async fn a_record_counts_before_a_delivery_and_for_as_long_as_its_own_stands() {
        let ids = [1, 2].map(|number| (RecordId([number; 32]), None));
        let store = Memory::default();
        let queue = store.deliveries().unwrap();
        for (id, _) in &ids {
            let (token, origin, bytes) =
                (AttemptToken(id.0[..16].try_into().unwrap()), OriginId(0), bytes::Bytes::new());
            let (head, request, body) = (bytes.clone(), bytes.clone(), bytes);
            let new = NewDelivery { token, origin, lane: Lane(0), head, request, body };
            queue.accept(*id, new).await.unwrap();
        }
        assert_eq!(find(&store, &ids, true).await.unwrap(), Some((0, IdHolder::Delivery)));
        assert_eq!(find(&store, &ids, false).await.unwrap(), None);
        let second = NewRecord { unknown_ttl: Duration::ZERO, ..fresh(2) };
        store.claim(ids[1].0, second.clone()).await.unwrap();
        store.settle(ids[1].0, second.attempt, Settlement::Hold { cause: bytes::Bytes::new() }).await.unwrap();
        assert_eq!(find(&store, &ids, true).await.unwrap(), Some((1, IdHolder::Record(State::Unknown))));
        let token = AttemptToken(ids[1].0.0[..16].try_into().unwrap());
        queue.discard(ids[1].0, token).await.unwrap();
        assert_eq!(find(&store, &ids, true).await.unwrap(), None);
    }
}
