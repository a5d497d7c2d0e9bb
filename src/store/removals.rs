//! Removals, told to whoever keeps records in mind.

use tokio::sync::broadcast::{Receiver, Sender};

use crate::idempotency::record::RecordId;

/// How many may wait to be heard of. Who is slower hears that there were some.
const WAITING: usize = 1024;

/// What is heard of removals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// This record was removed.
    Of(RecordId),
    /// Removals are told from now on. Of those before this, nobody may have heard.
    Begin,
    /// Removals are not told from now on.
    End,
}

/// Tells of removals.
pub(super) struct Removals(Sender<Removal>);

impl Default for Removals {
    fn default() -> Self {
        Self(Sender::new(WAITING))
    }
}

impl Removals {
    /// What is removed from now on.
    pub(super) fn subscribe(&self) -> Receiver<Removal> {
        self.0.subscribe()
    }

    pub(super) fn tell(&self, removal: Removal) {
        // Nobody may keep any in mind.
        let _ = self.0.send(removal);
    }
}
