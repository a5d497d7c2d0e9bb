//! Who waits for the end of an attempt, or keeps records in mind, and is told where a store tells.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, broadcast};

use super::removals::{Removal, Removals};
use crate::idempotency::record::RecordId;

/// Those who wait in this process.
#[derive(Default)]
pub(super) struct Waiters {
    /// Whether somebody listens for them.
    is_live: AtomicBool,
    waiting: Mutex<HashMap<RecordId, Waiting>>,
    removals: Removals,
}

/// How many wait for a record, and how they are told.
#[derive(Default)]
struct Waiting {
    callers: usize,
    told: Arc<Notify>,
}

/// One who waits.
pub(super) struct Waiter {
    waiters: Arc<Waiters>,
    id: RecordId,
    told: Arc<Notify>,
}

impl Waiters {
    /// Somebody waits for a record; nothing where nobody would tell.
    pub(super) fn join(self: &Arc<Self>, id: RecordId) -> Option<Waiter> {
        if !self.is_live.load(Ordering::SeqCst) {
            return None;
        }
        let mut waiting = self.lock();
        let here = waiting.entry(id).or_default();
        here.callers += 1;
        let told = Arc::clone(&here.told);
        drop(waiting);
        Some(Waiter { waiters: Arc::clone(self), id, told })
    }

    /// What is removed from now on.
    pub(super) fn removals(&self) -> broadcast::Receiver<Removal> {
        self.removals.subscribe()
    }

    /// Somebody tells from now on. What was removed before that, nobody has heard of.
    pub(super) fn begin(&self) {
        self.is_live.store(true, Ordering::SeqCst);
        self.removals.tell(Removal::Begin);
    }

    /// A record was removed.
    pub(super) fn removed(&self, id: RecordId) {
        self.removals.tell(Removal::Of(id));
        self.tell(id);
    }

    /// An attempt has ended.
    pub(super) fn tell(&self, id: RecordId) {
        if let Some(waiting) = self.lock().get(&id) {
            waiting.told.notify_waiters();
        }
    }

    /// Nobody tells any more what happens: all are to look for themselves.
    pub(super) fn tell_all(&self) {
        self.is_live.store(false, Ordering::SeqCst);
        self.removals.tell(Removal::End);
        self.lock().values().for_each(|waiting| waiting.told.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RecordId, Waiting>> {
        // Nothing that is done under it can leave the map half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Does `first`, and returns when the record's attempt has ended since this was called.
    pub(super) async fn told_after(&self, first: impl Future<Output = bool>) {
        let told = self.told.notified();
        tokio::pin!(told);
        // From here on it is woken, also by what comes before it waits.
        told.as_mut().enable();
        if first.await {
            told.await;
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
        if let Some(here) = waiting.get_mut(&self.id) {
            here.callers -= 1;
            if here.callers == 0 {
                waiting.remove(&self.id);
            }
        }
    }
}
