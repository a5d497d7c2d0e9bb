//! Wakes the waiters for ends of attempts, and publishes removals, for stores that receive notifications.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, broadcast};

use super::removals::{Removal, Removals};
use crate::idempotency::record::RecordId;

/// The waiters of this process.
#[derive(Default)]
pub(super) struct Waiters {
    /// Whether notifications arrive.
    is_connected: AtomicBool,
    waiting: Mutex<HashMap<RecordId, WaitedRecord>>,
    removals: Removals,
}

/// The waiters for one record.
#[derive(Default)]
struct WaitedRecord {
    callers: usize,
    notified: Arc<Notify>,
}

/// A registration for the end of an attempt.
pub(super) struct Waiter {
    waiters: Arc<Waiters>,
    id: RecordId,
    notified: Arc<Notify>,
}

impl Waiters {
    /// Registers a waiter for a record; `None` if no notifications arrive.
    pub(super) fn join(self: &Arc<Self>, id: RecordId) -> Option<Waiter> {
        if !self.is_connected.load(Ordering::SeqCst) {
            return None;
        }
        let mut waiting = self.lock();
        let entry = waiting.entry(id).or_default();
        entry.callers += 1;
        let notified = Arc::clone(&entry.notified);
        drop(waiting);
        Some(Waiter { waiters: Arc::clone(self), id, notified })
    }

    /// A receiver of the removals from now on.
    pub(super) fn removals(&self) -> broadcast::Receiver<Removal> {
        self.removals.subscribe()
    }

    /// Notifications arrive from now on. Earlier removals may have been missed.
    pub(super) fn connected(&self) {
        self.is_connected.store(true, Ordering::SeqCst);
        self.removals.publish(Removal::Subscribed);
    }

    /// A record was removed.
    pub(super) fn removed(&self, id: RecordId) {
        self.removals.publish(Removal::Of(id));
        self.notify(id);
    }

    /// An attempt has ended.
    pub(super) fn notify(&self, id: RecordId) {
        if let Some(waiting) = self.lock().get(&id) {
            waiting.notified.notify_waiters();
        }
    }

    /// Notifications no longer arrive: wakes all waiters, which then poll on their own.
    pub(super) fn disconnected(&self) {
        self.is_connected.store(false, Ordering::SeqCst);
        self.removals.publish(Removal::Lost);
        self.lock().values().for_each(|waiting| waiting.notified.notify_waiters());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RecordId, WaitedRecord>> {
        // No operation under the lock can leave the map half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// Runs `first`, and returns once the record's attempt has ended after this call. Returns at once if `first` is
    /// false.
    pub(super) async fn notified_after(&self, first: impl Future<Output = bool>) {
        let notified = self.notified.notified();
        tokio::pin!(notified);
        // From here on it is woken, also by a notification before it is awaited.
        notified.as_mut().enable();
        if first.await {
            notified.await;
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
        if let Some(entry) = waiting.get_mut(&self.id) {
            entry.callers -= 1;
            if entry.callers == 0 {
                waiting.remove(&self.id);
            }
        }
    }
}
