//! How many connections to an upstream there may be, on all threads together, and who is next where there are as many.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connection::Connection;
use super::owner::Purpose;

/// The connections that there may be.
pub(super) struct Slots {
    most: u64,
    state: Mutex<State>,
    /// How many stand in the queue, whether they are still there or not: as a rule nobody, and then no lock is taken.
    queued: AtomicUsize,
}

/// The right to one connection. Dropped, it goes to who has waited longest.
pub(super) struct Slot(Option<Arc<Slots>>);

/// What one who waits gets.
pub(super) enum Grant {
    /// The right to open a connection.
    Slot(Slot),
    /// A connection that is idle.
    Connection(Box<Connection>),
}

#[derive(Default)]
struct State {
    open: u64,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    purpose: Purpose,
    sender: oneshot::Sender<Grant>,
}

impl Slots {
    pub(super) fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, state: Mutex::default(), queued: AtomicUsize::new(0) })
    }

    /// A slot that is free. While somebody waits, none is.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        let mut state = self.state();
        if state.open >= self.most {
            return None;
        }
        state.open += 1;
        Some(Slot(Some(Arc::clone(self))))
    }

    /// Waits behind those who wait. Dropped, the receiver leaves its place.
    pub(super) fn queue(self: &Arc<Self>, purpose: Purpose) -> oneshot::Receiver<Grant> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        // Those who gave up do not pile up where nothing becomes free.
        state.forget_gone();
        if state.open < self.most && state.waiting.is_empty() {
            // One has become free since it was looked for, when nobody waited yet.
            state.open += 1;
            drop(state);
            // The receiver is at hand.
            let _ = sender.send(Grant::Slot(Slot(Some(Arc::clone(self)))));
            return receiver;
        }
        state.waiting.push_back(Waiting { purpose, sender });
        receiver
    }

    /// Hands a connection that has been idle since then to who is next; it comes back where nobody waits. Where the next
    /// cannot use it, it closes, and its slot is the next one's.
    pub(super) fn offer(&self, connection: Connection, since: Instant) -> Option<Connection> {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return Some(connection);
        }
        let mut connection = Box::new(connection);
        loop {
            // The lock is not held while a connection is dropped: its slot would ask for it.
            let waiting = {
                let mut state = self.state();
                match state.waiting.front() {
                    None => return Some(*connection),
                    Some(Waiting { purpose, .. })
                        if since.elapsed() < purpose.reuse.longest_idle() && purpose.may_use(connection.owner) =>
                    {
                        state.waiting.pop_front()?
                    }
                    Some(_) => break,
                }
            };
            match waiting.sender.send(Grant::Connection(connection)) {
                Err(Grant::Connection(back)) => connection = back,
                Ok(()) | Err(Grant::Slot(_)) => return None,
            }
        }
        drop(connection);
        None
    }

    /// Whether anybody waits.
    pub(super) fn is_awaited(&self) -> bool {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return false;
        }
        let mut state = self.state();
        state.forget_gone();
        !state.waiting.is_empty()
    }

    fn state(&self) -> Locked<'_> {
        // Nothing that is done under this lock can leave it half done.
        Locked { state: self.state.lock().unwrap_or_else(PoisonError::into_inner), queued: &self.queued }
    }
}

/// The state, and how many are queued when it is given back.
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    queued: &'a AtomicUsize,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.queued.store(self.state.waiting.len(), Ordering::SeqCst);
    }
}

impl State {
    /// Takes those who gave up off the front.
    fn forget_gone(&mut self) {
        while self.waiting.front().is_some_and(|next| next.sender.is_closed()) {
            self.waiting.pop_front();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(slots) = self.0.take() else { return };
        let mut state = slots.state();
        let mut slot = Self(Some(Arc::clone(&slots)));
        while let Some(next) = state.waiting.pop_front() {
            match next.sender.send(Grant::Slot(slot)) {
                Err(Grant::Slot(back)) => slot = back,
                Ok(()) | Err(Grant::Connection(_)) => return,
            }
        }
        slot.0 = None;
        state.open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Reuse;
    use super::super::owner::Owner;
    use super::*;

    const NEW: Purpose = Purpose { reuse: Reuse::Never, owner: Owner::AnyCaller };

    fn open(slots: &Slots) -> u64 {
        slots.state().open
    }

    #[tokio::test]
    async fn a_slot_goes_to_who_has_waited_longest_and_is_still_there() {
        let slots = Slots::new(1);
        let slot = slots.take().unwrap();
        assert!(slots.take().is_none());
        let (gone, first, second) = (slots.queue(NEW), slots.queue(NEW), slots.queue(NEW));
        drop(gone);
        drop(slot);
        let Ok(Grant::Slot(slot)) = first.await else { panic!("nothing granted") };
        assert!(slots.is_awaited());
        drop(slot);
        // It was granted, and leaves before it has taken it.
        drop(second);
        assert_eq!(open(&slots), 0);
        assert!(!slots.is_awaited() && slots.take().is_some());
    }

    #[tokio::test]
    async fn what_became_free_before_anybody_waited_is_not_waited_for() {
        let slots = Slots::new(1);
        // All were taken when it was looked for.
        let slot = slots.take().unwrap();
        assert!(slots.take().is_none());
        drop(slot);
        let Ok(Grant::Slot(slot)) = slots.queue(NEW).await else { panic!("nothing granted") };
        assert_eq!((open(&slots), slots.is_awaited()), (1, false));
        drop(slot);
        assert_eq!(open(&slots), 0);
    }

    #[tokio::test]
    async fn those_who_gave_up_leave_nothing_behind() {
        let slots = Slots::new(1);
        let _slot = slots.take().unwrap();
        for _ in 0..100 {
            drop(slots.queue(NEW));
        }
        assert!(slots.state().waiting.len() <= 1);
    }
}
