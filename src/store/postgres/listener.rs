//! Who waits for the end of an attempt, or keeps records in mind, is told by the database where it can be listened to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, broadcast, mpsc};
use tokio::time::sleep;

use super::connect::{Connector, Session};
use crate::idempotency::record::RecordId;
use crate::store::removals::Removals;

/// Between two tries to listen again.
const PAUSE: Duration = Duration::from_secs(1);

/// What comes before the id in the notification of a removal.
const REMOVED: &str = "removed ";

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

    /// The ids of records that are removed from now on.
    pub(super) fn removals(&self) -> broadcast::Receiver<RecordId> {
        self.removals.subscribe()
    }

    fn hear(&self, payload: &str) {
        let removed = payload.strip_prefix(REMOVED);
        let Some(id) = RecordId::parse(removed.unwrap_or(payload)) else { return };
        if removed.is_some() {
            self.removals.tell(id);
        }
        self.tell(id);
    }

    fn tell(&self, id: RecordId) {
        if let Some(waiting) = self.lock().get(&id) {
            waiting.told.notify_waiters();
        }
    }

    /// Nobody tells any more what happens: all are to look for themselves.
    fn tell_all(&self) {
        self.is_live.store(false, Ordering::SeqCst);
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

/// Listens, and begins again where the connection is lost. Ends where it cannot be listened to.
pub(super) async fn run(connector: Connector, waiters: Arc<Waiters>) {
    loop {
        let (tell, mut told) = mpsc::unbounded_channel();
        match listen(&connector, tell).await {
            Ok(Some(session)) => {
                waiters.is_live.store(true, Ordering::SeqCst);
                loop {
                    let payload = tokio::select! {
                        payload = told.recv() => payload,
                        () = session.ended() => None,
                    };
                    let Some(payload) = payload else { break };
                    waiters.hear(&payload);
                }
                drop(session);
                waiters.tell_all();
            }
            Ok(None) => return,
            Err(error) => tracing::debug!(%error, "nobody listens for the ends of attempts; waiters ask instead"),
        }
        sleep(PAUSE).await;
    }
}

/// A connection that listens; nothing where what comes in would go to somebody else.
async fn listen(
    connector: &Connector,
    tell: mpsc::UnboundedSender<String>,
) -> Result<Option<Session>, super::OpenError> {
    let session = connector.connect_to_listen(tell).await?;
    if !session.description.is_direct {
        return Ok(None);
    }
    session.client().batch_execute("LISTEN oncegate").await.map_err(|error| super::OpenError::of(&error))?;
    Ok(Some(session))
}
