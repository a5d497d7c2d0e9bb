//! Finds records that were made with another id secret, while one secret takes the place of another.
//!
//! With several secrets a key has several ids. A request looks under the other ids first, and takes the one under which a
//! record stands. That alone would not be safe: two requests may look before either has claimed, and then claim under different
//! ids. So whoever has claimed looks under the other ids once more, and runs only if nothing stands there. Of two claims, the
//! later one's second look comes after the earlier one, and finds it.
//!
//! A gate that dies between its claim and its second look leaves a record under which nothing was sent. Where records stand
//! under several ids for that, a completed one counts before all others.

use std::sync::Arc;

use tokio::time::timeout;

use super::protected::ProtectedRequest;
use crate::idempotency::credential::Proof;
use crate::idempotency::record::{RecordId, State};
use crate::store::{Error, Listed, Store};

/// The ids under which the record of a request may stand besides its own. Most gates have one secret: then there are none.
pub(super) struct Elsewhere(Vec<RecordId>);

impl ProtectedRequest {
    /// Takes the id under which its record stands, if it is another than that of new records. Where the store does not say,
    /// the claim's second look does.
    pub(super) async fn find_record(&mut self) {
        let gate = Arc::clone(&self.gate);
        if gate.identifiers.others.is_empty() {
            return;
        }
        let (namespace, scope) = (&self.route.namespace, &self.route.policy.scope);
        let identities: Vec<_> = (gate.identifiers.all())
            .map(|identifier| identifier.identify(namespace, scope, self.head.caller(), &self.key))
            .collect();
        let store = &*gate.shared.store;
        let in_memory = identities.iter().position(|(id, _)| store.recall(*id).is_some());
        let place = match in_memory {
            Some(place) => Some(place),
            // One time for all: while the store is away, the claim says so.
            None => timeout(gate.settings.settle_timeout, find(store, &identities)).await.ok().and_then(Result::ok),
        };
        if let Some(place) = place.filter(|place| *place != self.made_by) {
            (self.id, self.proof) = identities[place];
            (self.identifier, self.made_by) = (gate.identifiers.others[place - 1].clone(), place);
        }
    }

    /// Where else its record could stand.
    pub(super) fn elsewhere(&self) -> Elsewhere {
        let identifiers = &self.gate.identifiers;
        if identifiers.others.is_empty() {
            return Elsewhere::nowhere();
        }
        let (namespace, scope) = (&self.route.namespace, &self.policy().scope);
        let ids = identifiers.all().map(|other| other.id(namespace, scope, self.head.caller(), &self.key));
        Elsewhere(ids.filter(|id| *id != self.id).collect())
    }
}

impl Elsewhere {
    pub(super) fn nowhere() -> Self {
        Self(Vec::new())
    }

    /// Whether a record stands there, asked once a claim stands. One of which the store does not say may stand.
    pub(super) async fn may_have_record(&self, store: &dyn Store) -> bool {
        for id in &self.0 {
            match store.get(*id).await {
                Ok(found) if !found.as_ref().is_some_and(Listed::is_live) => {}
                Ok(_) => return true,
                Err(error) => {
                    tracing::debug!(%error, record = %id, "the store does not say whether the key is claimed elsewhere");
                    return true;
                }
            }
        }
        false
    }
}

/// The place of the id under which the record stands; the first where none does.
async fn find(store: &dyn Store, identities: &[(RecordId, Option<Proof>)]) -> Result<usize, Error> {
    let mut found: Vec<(usize, Listed)> = Vec::new();
    for (place, (id, _)) in identities.iter().enumerate().skip(1) {
        found.extend(store.get(*id).await?.filter(Listed::is_live).map(|listed| (place, listed)));
    }
    if found.is_empty() {
        return Ok(0);
    }
    found.extend(store.get(identities[0].0).await?.filter(Listed::is_live).map(|listed| (0, listed)));
    // All gates take the same one, in whatever order they have the secrets.
    found.sort_by_key(|(_, listed)| (listed.record.state != State::Completed, listed.id));
    Ok(found.first().map_or(0, |(place, _)| *place))
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
            assert_eq!(find(&store, &ids).await.unwrap(), 0, "there is none");
            for (place, (id, _)) in ids.iter().enumerate() {
                let fresh = fresh(place as u8);
                store.claim(*id, fresh.clone()).await.unwrap();
                if completed == Some(place) {
                    let end = End::Complete { answer: bytes::Bytes::from_static(b"x"), expiry: Expiry::FromNow(TTL) };
                    store.settle(*id, fresh.attempt, end).await.unwrap();
                }
            }
            let expected = ids[completed.unwrap_or(0)].0;
            assert_eq!(ids[find(&store, &ids).await.unwrap()].0, expected);
            assert_eq!(swapped[find(&store, &swapped).await.unwrap()].0, expected);
            let elsewhere = Elsewhere(vec![ids[1].0]);
            assert!(elsewhere.may_have_record(&store).await);
        }
    }
}
