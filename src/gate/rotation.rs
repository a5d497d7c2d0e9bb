//! Finds what was made with another id secret, while one secret takes the place of another.
//!
//! With several secrets a key has several ids. A request looks under the other ids first, and takes the one under which a
//! record or a delivery stands. That alone would not be safe: two requests may look before either has claimed, and then claim
//! under different ids. So whoever has claimed looks under the other ids once more (see [`second_look`](super::second_look)),
//! and runs only if nothing stands there. Of two claims, the later one's second look comes after the earlier one, and finds it.
//! The same holds for requests that are accepted.
//!
//! A gate that dies between its claim and its second look leaves a record under which nothing was sent. Where records stand
//! under several ids for that reason, a completed one counts before all others. Of several deliveries, the one with the lowest
//! id is delivered.

use tokio::time::timeout;

use super::protected::ProtectedRequest;
use crate::idempotency::credential::Proof;
use crate::idempotency::record::{RecordId, State};
use crate::store::{Error, Listed, Store};

/// What stands under an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// A record in this state, and perhaps a delivery.
    Record(State),
    /// A delivery alone.
    Delivery,
}

impl Standing {
    /// What stands under `id`; `accepts` says whether deliveries may.
    pub(super) async fn of(store: &dyn Store, id: RecordId, accepts: bool) -> Result<Option<Self>, Error> {
        // The delivery first: its record is there before it is gone.
        let is_queued = match store.deliveries().filter(|_| accepts) {
            Some(queue) => queue.delivery(id).await?.is_some(),
            None => false,
        };
        let listed = store.get(id).await?.filter(Listed::is_live);
        Ok(match listed {
            Some(listed) => Some(Self::Record(listed.record.state)),
            None => is_queued.then_some(Self::Delivery),
        })
    }
}

impl ProtectedRequest {
    /// Takes the id under which its record or delivery stands, if it is another than that of new ones. Where the store does not
    /// say, the second look does.
    pub(super) async fn find_record(&mut self) {
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
                let finding = find(store, &identities, self.policy().accepts());
                let found = timeout(self.gate.settings.settle_timeout, finding).await;
                found.ok().and_then(Result::ok).flatten().map(|(place, _)| place)
            }
        };
        if let Some(place) = place.filter(|place| *place != self.made_by) {
            (self.id, self.proof) = identities[place];
            (self.identifier, self.made_by) = (self.gate.identifiers.others[place - 1].clone(), place);
        }
    }

    /// Whether a delivery has nothing left to do: its key has its end under another id, or another delivery comes first.
    pub(super) async fn is_delivered_elsewhere(&self) -> Result<bool, Error> {
        if self.gate.identifiers.others.is_empty() {
            return Ok(false);
        }
        let found = find(&*self.gate.shared.store, &self.identities(), true).await?;
        // What is in flight may yet be released.
        Ok(found
            .is_some_and(|(place, standing)| place != self.made_by && standing != Standing::Record(State::InFlight)))
    }

    /// The ids of its key, each with the proof of its caller.
    fn identities(&self) -> Vec<(RecordId, Option<Proof>)> {
        let (namespace, scope, caller) = (&self.route.namespace, &self.policy().scope, self.head.caller());
        let identifiers = self.gate.identifiers.all();
        identifiers.map(|identifier| identifier.identify(namespace, scope, caller, &self.key)).collect()
    }

    /// The ids under which its record may stand besides its own. Most gates have one secret: then there are none.
    pub(super) fn other_ids(&self) -> Vec<RecordId> {
        if self.gate.identifiers.others.is_empty() {
            return Vec::new();
        }
        self.identities().into_iter().map(|(id, _)| id).filter(|id| *id != self.id).collect()
    }
}

/// What counts of what stands under these ids, and the place of its id.
async fn find(
    store: &dyn Store,
    identities: &[(RecordId, Option<Proof>)],
    accepts: bool,
) -> Result<Option<(usize, Standing)>, Error> {
    let mut found = Vec::new();
    // The first last: most often nothing stands under the others.
    for place in (1..identities.len()).chain([0]) {
        if place == 0 && found.is_empty() {
            return Ok(None);
        }
        found.extend(Standing::of(store, identities[place].0, accepts).await?.map(|standing| (place, standing)));
    }
    // All gates take the same one, in whatever order they have the secrets.
    Ok(found
        .into_iter()
        .min_by_key(|(place, standing)| (*standing != Standing::Record(State::Completed), identities[*place].0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::Attempt;
    use crate::store::memory::Memory;
    use crate::store::{End, Expiry, Fresh, OriginId};
    use std::time::Duration;

    const TTL: Duration = Duration::from_secs(60);

    fn fresh(number: u8) -> Fresh {
        let (attempt, origin) = (Attempt([number; 16]), OriginId(0));
        Fresh { attempt, origin, lease: TTL, ttl: TTL, unknown_ttl: TTL, head: bytes::Bytes::new() }
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
                    let end = End::Complete { answer: bytes::Bytes::from_static(b"x"), expiry: Expiry::FromNow(TTL) };
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
}
