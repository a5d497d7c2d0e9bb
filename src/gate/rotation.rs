//! Finds records that were made with another id secret, while one secret takes the place of another.
//!
//! With several secrets a key has several ids, and its record stands under one of them at most. A request looks under the
//! other ids first, and takes the one under which a record stands. That alone would not be safe: two requests may look before
//! either has claimed, and then claim under different ids. So whoever has claimed looks under the other ids once more, and
//! runs only if nothing stands there. Of two claims, the later one's second look comes after the earlier one, and finds it.

use std::sync::Arc;

use tokio::time::timeout;

use super::protected::ProtectedRequest;
use crate::idempotency::record::RecordId;
use crate::store::{Error, Listed, Store};

/// The ids under which the record of a request may stand besides its own. Most gates have one secret: then there are none.
pub(super) struct Elsewhere(Vec<RecordId>);

impl ProtectedRequest {
    /// Takes the id under which its record stands, if it is another than that of new records. Where the store does not say,
    /// the claim's second look does.
    pub(super) async fn find_record(&mut self) {
        let gate = Arc::clone(&self.gate);
        let patience = gate.settings.settle_timeout;
        for (nth, identifier) in gate.identifiers.others.iter().enumerate() {
            let (namespace, scope) = (&self.route.namespace, &self.route.policy.scope);
            let (id, proof) = identifier.identify(namespace, scope, self.head.caller(), &self.key);
            if let Ok(Ok(true)) = timeout(patience, stands(&*gate.shared.store, id)).await {
                (self.id, self.proof) = (id, proof);
                (self.identifier, self.made_by) = (identifier.clone(), nth + 1);
                return;
            }
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

    /// Whether a record stands there, asked once a claim stands. Where the store does not say, the claim is in doubt, and is
    /// made again.
    pub(super) async fn has_record(&self, store: &dyn Store) -> Result<bool, Error> {
        for id in &self.0 {
            let found = stands(store, *id).await;
            if found.map_err(|error| Error::indeterminate(error.cause().kind, error))? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

async fn stands(store: &dyn Store, id: RecordId) -> Result<bool, Error> {
    Ok(store.get(id).await?.as_ref().is_some_and(Listed::is_live))
}
