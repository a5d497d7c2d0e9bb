//! Removals, told to whoever keeps records in mind.

use tokio::sync::broadcast::{Receiver, Sender};

use crate::idempotency::record::RecordId;

/// How many may wait to be heard of. Who is slower hears that there were some.
const WAITING: usize = 1024;

/// Tells of removals.
pub(super) struct Removals(Sender<RecordId>);

impl Default for Removals {
    fn default() -> Self {
        Self(Sender::new(WAITING))
    }
}

impl Removals {
    /// The ids of records that are removed from now on.
    pub(super) fn subscribe(&self) -> Receiver<RecordId> {
        self.0.subscribe()
    }

    /// A record was removed.
    pub(super) fn tell(&self, id: RecordId) {
        // Nobody may keep any in mind.
        let _ = self.0.send(id);
    }
}
