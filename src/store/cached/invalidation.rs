//! Invalidates cached records that were removed.
//!
//! The store publishes all removals, and the shared cache those that gates could publish to it. Either may be down
//! for a while, and does not publish removals from that time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::SharedTier;
use super::local_tier::LocalTier;
use crate::idempotency::record::RecordId;
use crate::store::Removal;

/// Applies removals to both tiers.
#[derive(Clone)]
pub(super) struct InvalidationListener {
    local: Arc<LocalTier>,
    shared: Option<Arc<SharedTier>>,
    /// Whether the store publishes removals at the moment.
    store_publishes: Arc<AtomicBool>,
}

impl InvalidationListener {
    pub(super) fn new(local: &Arc<LocalTier>, shared: Option<&Arc<SharedTier>>) -> Self {
        Self { local: Arc::clone(local), shared: shared.cloned(), store_publishes: Arc::default() }
    }

    /// Invalidates the records that the store says were removed, and the whole cache whenever its feed starts.
    pub(super) async fn of_store(self, mut removals: Receiver<Removal>) {
        loop {
            match removals.recv().await {
                Ok(Removal::Of(id)) => self.forget(id),
                Ok(Removal::Subscribed) => {
                    self.store_publishes.store(true, Ordering::SeqCst);
                    self.local.forget_all();
                }
                Ok(Removal::Lost) => self.store_publishes.store(false, Ordering::SeqCst),
                // The missed removals are unknown.
                Err(RecvError::Lagged(_)) => self.local.forget_all(),
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// The same for the shared cache, but a start of its feed is ignored while the store publishes removals.
    pub(super) async fn of_cache(self, mut removals: Receiver<Removal>) {
        loop {
            match removals.recv().await {
                Ok(Removal::Of(id)) => self.forget(id),
                Ok(Removal::Subscribed) if self.store_publishes.load(Ordering::SeqCst) => {}
                Ok(Removal::Lost) => {}
                Ok(Removal::Subscribed) | Err(RecvError::Lagged(_)) => self.local.forget_all(),
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn forget(&self, id: RecordId) {
        self.local.forget(id);
        // This process may be about to put it there.
        if let Some(tier) = &self.shared {
            tier.refuse_older_than_now(id);
            tier.client.delete(id);
        }
    }
}
