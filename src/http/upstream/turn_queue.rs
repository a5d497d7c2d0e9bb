//! The queue of requests that may not be sent yet, because an upstream has as many as it gets connections, or because those
//! of one client have their share of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::pool::Turn;
use crate::http::fair_share::{NoRoom, Party};
use crate::http::usage::{Account, Budget, Permit};

/// The requests that wait, the longest first.
pub(super) struct TurnQueue {
    /// How many of the connections are in use.
    pub(super) in_use: Arc<Budget>,
    waiting: Mutex<VecDeque<Waiter>>,
    /// How many wait. Mostly none do, and then no lock is taken.
    pub(super) length: AtomicUsize,
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
        fence(Ordering::SeqCst);
        self.grant();
        receiver
    }

    /// Gives what is free to those who wait: to the first that does not have its share yet.
    pub(super) fn grant(self: &Arc<Self>) {
        while self.length.load(Ordering::Relaxed) > 0 {
            let Some((waiter, permit)) = self.next() else { return };
            // The turn of one that has left ends at once, which comes back here: so the lock is not held.
            drop(waiter.sender.send(Turn::new(permit, Arc::clone(self))));
        }
    }

    fn next(&self) -> Option<(Waiter, Permit)> {
        let mut waiting = self.waiting();
        // Thousands may wait of one client, and few clients: each is asked about once.
        let (mut refused, mut place) = (Vec::new(), 0);
        let found = loop {
            let Some(waiter) = waiting.get(place) else { break None };
            let party = waiter.party;
            if !party.bounds().any(|bound| refused.contains(&bound)) {
                if waiter.sender.is_closed() {
                    waiting.remove(place);
                    continue;
                }
                match Account::new(&self.in_use, Some(&|| party)).try_acquire(1) {
                    Ok(permit) => break waiting.remove(place).map(|waiter| (waiter, permit)),
                    Err(NoRoom::Full) => break None,
                    Err(NoRoom::Share(why)) => refused.push(why),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::limits::Limits;
    use crate::http::usage::Usage;
    use crate::telemetry::metrics::Metrics;

    fn queue(max: u64) -> Arc<TurnQueue> {
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        TurnQueue::new(usage.of_upstream(max))
    }

    fn party(last: u8) -> Party {
        Party::at([192, 0, 2, last].into())
    }

    fn take(queue: &Arc<TurnQueue>, party: Party) -> Option<Turn> {
        let permit = Account::new(&queue.in_use, Some(&|| party)).try_acquire(1).ok()?;
        Some(Turn::new(permit, Arc::clone(queue)))
    }

    fn take_all(queue: &Arc<TurnQueue>, party: Party) -> Vec<Turn> {
        std::iter::from_fn(|| take(queue, party)).collect()
    }

    #[test]
    fn a_turn_goes_to_the_longest_waiting_request() {
        let queue = queue(1);
        let turn = take(&queue, party(1)).unwrap();
        assert!(take(&queue, party(2)).is_none());
        let (gone, mut first, mut second) = (queue.enqueue(party(1)), queue.enqueue(party(1)), queue.enqueue(party(2)));
        drop(gone);
        drop(turn);
        assert!(second.try_recv().is_err());
        let turn = first.try_recv().unwrap();
        // It is granted, and leaves before it has taken the turn.
        drop(turn);
        drop(second);
        assert_eq!((queue.in_use.used(), queue.waiting().len()), (0, 0));
    }

    #[test]
    fn a_turn_that_ended_before_queueing_is_taken_at_once() {
        let queue = queue(1);
        let turn = take(&queue, party(1)).unwrap();
        drop(turn);
        assert!(queue.enqueue(party(1)).try_recv().is_ok());
        assert_eq!(queue.in_use.used(), 0);
    }

    #[test]
    fn a_client_with_its_share_waits_for_its_own_turns_and_delays_nobody() {
        let queue = queue(64);
        let mut loud = take_all(&queue, party(1));
        assert_eq!(loud.len(), 56);
        let mut waiting: Vec<_> = (0..1000).map(|_| queue.enqueue(party(1))).collect();
        assert!(waiting.iter_mut().all(|waiter| waiter.try_recv().is_err()));
        // Turns of others come and go, and those that wait get none of them.
        for _ in 0..100 {
            assert!(take(&queue, party(2)).is_some());
        }
        assert_eq!((queue.in_use.used(), queue.waiting().len()), (56, 1000));
        // The last ones count for it, so that there is a turn for each that ends.
        loud.truncate(50);
        let granted: Vec<_> = waiting.iter_mut().map_while(|waiter| waiter.try_recv().ok()).collect();
        assert_eq!((granted.len(), queue.waiting().len()), (6, 994));
    }

    #[test]
    fn one_without_its_share_is_served_before_those_that_wait_longer_and_have_theirs() {
        let queue = queue(64);
        let (loud, mut others) = (take_all(&queue, party(1)), take_all(&queue, party(2)));
        let mut rest: Vec<_> = (3..).map_while(|last| take(&queue, party(last))).collect();
        assert_eq!(queue.in_use.used(), 64);
        let (mut loud_waits, mut quiet_waits) = (queue.enqueue(party(1)), queue.enqueue(party(200)));
        rest.pop();
        others.pop();
        assert!(loud_waits.try_recv().is_err());
        assert!(quiet_waits.try_recv().is_ok());
        drop((loud, others, rest));
    }

    #[test]
    fn those_who_leave_do_not_accumulate() {
        let queue = queue(1);
        let _turn = take(&queue, party(1)).unwrap();
        for _ in 0..100 {
            drop(queue.enqueue(party(1)));
        }
        assert!(queue.waiting().len() <= 1);
    }
}
