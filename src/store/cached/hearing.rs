//! Hears what was removed, and forgets it.
//!
//! The store tells of all removals, and the cache of those that gates could tell it of. Either may be away for a while; what
//! was removed meanwhile it does not tell.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::Beside;
use super::shelf::Shelf;
use crate::idempotency::record::RecordId;
use crate::store::Removal;

/// What has to forget.
#[derive(Clone)]
pub(super) struct Hears {
    shelf: Arc<Shelf>,
    shared: Option<Arc<Beside>>,
    /// Whether the store tells at the moment.
    store_tells: Arc<AtomicBool>,
}

impl Hears {
    pub(super) fn new(shelf: &Arc<Shelf>, shared: Option<&Arc<Beside>>) -> Self {
        Self { shelf: Arc::clone(shelf), shared: shared.cloned(), store_tells: Arc::default() }
    }

    /// Forgets what the store says was removed; and all that there is when it begins to say so.
    pub(super) async fn of_store(self, mut removals: Receiver<Removal>) {
        loop {
            match removals.recv().await {
                Ok(Removal::Of(id)) => self.forget(id),
                Ok(Removal::Begin) => {
                    self.store_tells.store(true, Ordering::SeqCst);
                    self.shelf.forget_all();
                }
                Ok(Removal::End) => self.store_tells.store(false, Ordering::SeqCst),
                // Which ones they were nobody knows.
                Err(RecvError::Lagged(_)) => self.shelf.forget_all(),
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// The same for the cache: but where the store told all the while, that it begins means nothing.
    pub(super) async fn of_cache(self, mut removals: Receiver<Removal>) {
        loop {
            match removals.recv().await {
                Ok(Removal::Of(id)) => self.forget(id),
                Ok(Removal::Begin) if self.store_tells.load(Ordering::SeqCst) => {}
                Ok(Removal::End) => {}
                Ok(Removal::Begin) | Err(RecvError::Lagged(_)) => self.shelf.forget_all(),
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn forget(&self, id: RecordId) {
        self.shelf.forget(id);
        // This process may be about to put it there.
        if let Some(beside) = &self.shared {
            beside.believe_later(id);
            beside.way.drop(id);
        }
    }
}
