//! Removals of records, published to caches.

use tokio::sync::broadcast::{Receiver, Sender};

use crate::idempotency::record::RecordId;

/// How many events a slow receiver may lag behind before it misses some.
const CAPACITY: usize = 1024;

/// An event of the feed of removals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This record was removed.
    Of(RecordId),
    /// Removals are published from now on. Earlier ones may have been missed.
    Subscribed,
    /// Removals are no longer published.
    Lost,
}

/// Publishes removals.
pub(super) struct Removals(Sender<Removal>);

impl Default for Removals {
    fn default() -> Self {
        Self(Sender::new(CAPACITY))
    }
}

impl Removals {
    /// A receiver of the removals from now on.
    pub(super) fn subscribe(&self) -> Receiver<Removal> {
        self.0.subscribe()
    }

    pub(super) fn publish(&self, removal: Removal) {
        // There may be no receiver.
        let _ = self.0.send(removal);
    }
}
