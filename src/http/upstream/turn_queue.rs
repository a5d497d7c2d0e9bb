//! The queue of requests that may not be sent yet, because an upstream has as many as it gets connections, or because those
//! of one client have their share of them.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::pool::Turn;
use crate::http::fair_share::Party;
use crate::http::usage::{Account, Budget, NoRoom, Permit};

/// The requests that wait, the longest first.
pub(super) struct TurnQueue {
    /// How many of the connections are in use.
    pub(super) in_use: Arc<Budget>,
    waiting: Mutex<VecDeque<Waiter>>,
    /// Whether any wait. They seldom do, and then no lock is taken.
    length: AtomicUsize,
}

struct Waiter {
    party: Party,
    sender: oneshot::Sender<Turn>,
}

impl TurnQueue {
    pub(super) fn new(in_use: Arc<Budget>) -> Arc<Self> {
        Arc::new(Self { in_use, waiting: Mutex::default(), length: AtomicUsize::new(0) })
    }

    /// Joins the queue. Dropping the receiver leaves it.
    pub(super) fn enqueue(self: &Arc<Self>, party: Party) -> oneshot::Receiver<Turn> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiting = self.waiting();
            // Those who left do not accumulate while no turn ends.
            while waiting.front().is_some_and(|first| first.sender.is_closed()) {
                waiting.pop_front();
            }
            waiting.push_back(Waiter { party, sender });
            self.length.store(waiting.len(), Ordering::Relaxed);
        }
        // A turn may have ended before this one was in the queue.
        self.grant();
        receiver
    }

    /// Gives what is free to those who wait: to the first that does not have its share yet.
    pub(super) fn grant(self: &Arc<Self>) {
        // Whoever ends a turn sees who waits, or whoever begins to wait sees that it has ended.
        fence(Ordering::SeqCst);
        while self.length.load(Ordering::Relaxed) > 0 {
            let Some((waiter, permit)) = self.next() else { return };
            // The turn of one that has left ends at once, which comes back here: so the lock is not held.
            drop(waiter.sender.send(Turn::new(permit, Arc::clone(self))));
        }
    }

    fn next(&self) -> Option<(Waiter, Permit)> {
        let mut waiting = self.waiting();
        let (mut refused, mut place) = (HashSet::new(), 0);
        let found = loop {
            let Some(waiter) = waiting.get(place) else { break None };
            if waiter.sender.is_closed() {
                waiting.remove(place);
                continue;
            }
            let party = waiter.party;
            if !party.bounds().any(|bound| refused.contains(&bound)) {
                match Account::new(&self.in_use, Some(&|| party)).try_acquire(1) {
                    Ok(permit) => break waiting.remove(place).map(|waiter| (waiter, permit)),
                    Err(NoRoom::Full) => break None,
                    Err(NoRoom::Share(why)) => {
                        refused.insert(why);
                    }
                }
            }
            place += 1;
        };
        self.length.store(waiting.len(), Ordering::Relaxed);
        found
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Waiter>> {
        // No operation under this lock can leave the state inconsistent.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
