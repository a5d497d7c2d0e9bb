//! The HTTP/1.1 connections to an upstream: the idle ones on each thread, the limit on all of them together, and the queue of
//! the requests that wait at that limit.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use super::connection::{Http1Connection, Owner, Purpose};
use super::http2_pool::Http2Pool;
use super::turn_queue::TurnQueue;
use super::{Inner, NotSent, UNPROTECTED_IDLE, Upstream};
use crate::http::fair_share::PartyOf;
use crate::http::shards;
use crate::http::usage::{Account, Permit};
use crate::telemetry::limits::Limit;

/// Idle connections kept for each upstream, in equal parts on the threads that serve.
const MAX_IDLE: usize = 1024;

/// How often to look for expired connections.
const INTERVAL: Duration = Duration::from_secs(10);

/// A connection that carries nothing.
pub(super) struct IdleConnection {
    connection: Http1Connection,
    since: Instant,
}

impl Upstream {
    /// An idle connection of this shard that may carry the request.
    pub(super) fn take_idle(&self, shard: usize, purpose: Purpose) -> Option<Http1Connection> {
        let mut idle = self.idle(shard);
        // The last connection has been idle for the shortest time: if that is too long, all are.
        let mut left = idle.len();
        while let Some(place) = left.checked_sub(1) {
            let entry = &idle[place];
            if entry.since.elapsed() >= purpose.reuse.longest_idle() {
                return None;
            }
            if purpose.may_use(entry.connection.owner) {
                let IdleConnection { connection, .. } = idle.remove(place);
                if connection.is_idle() {
                    return Some(connection);
                }
            }
            left = place;
        }
        None
    }

    /// The idle connections of a shard, in the order of their age.
    pub(super) fn idle(&self, shard: usize) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.0.idle[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a connection for other requests, or hands it to one that waits.
    pub(super) fn put_idle(&self, connection: Http1Connection, since: Instant) {
        if connection.owner == Owner::OneRequest {
            return;
        }
        let Some(connection) = self.0.pool_limit.hand_over(connection, since) else { return };
        self.ensure_sweeper();
        {
            let mut idle = self.idle(shards::index());
            if idle.first().is_some_and(|oldest| oldest.since.elapsed() >= UNPROTECTED_IDLE) {
                idle.retain(|entry| entry.since.elapsed() < UNPROTECTED_IDLE);
            }
            if idle.len() >= MAX_IDLE.div_ceil(shards::count()) {
                // The oldest one may belong to a caller that never returns.
                idle.remove(0);
            }
            // In the order of their age, the youngest last.
            let place = idle.partition_point(|entry| entry.since <= since);
            idle.insert(place, IdleConnection { connection, since });
        }
        // A request may have queued after the connection was offered and before it was idle.
        if self.0.pool_limit.has_waiters() {
            let last = self.idle(shards::index()).pop();
            if let Some(IdleConnection { connection, since }) = last {
                self.0.pool_limit.hand_over(connection, since);
            }
        }
    }

    /// The right to use one of the connections, which a party may not have all of. HTTP/2 has no use for one: its streams are
    /// as many as the upstream allows.
    pub(super) async fn take_turn(&self, party: PartyOf<'_>) -> Result<Option<Turn>, NotSent> {
        let Inner { settings, turns, http2_pool, .. } = &*self.0;
        if http2_pool.as_ref().is_some_and(Http2Pool::is_http2_likely) {
            return Ok(None);
        }
        let why = match Account::new(&turns.in_use, Some(party)).try_acquire(1) {
            Ok(permit) => return Ok(Some(Turn::new(permit, Arc::clone(turns)))),
            Err(why) => why,
        };
        // Boxed, because most requests do not wait.
        let waiting = Box::pin(timeout(settings.connect_timeout, turns.enqueue(party())));
        match waiting.await {
            Ok(Ok(turn)) => Ok(Some(turn)),
            Ok(Err(_)) | Err(_) => {
                turns.in_use.refused(why);
                Err(NotSent::NoneFree(settings.connect_timeout))
            }
        }
    }

    /// Whether it counts who uses its connections.
    pub(crate) fn is_scarce(&self) -> bool {
        self.0.turns.in_use.is_scarce()
    }

    /// Waits until one of the connections is free, or may be opened.
    pub(super) async fn wait_for_permit(&self, purpose: Purpose) -> Result<Checkout, NotSent> {
        let Inner { settings, usage, pool_limit, .. } = &*self.0;
        let all = (0..self.0.idle.len()).map(|place| (shards::index() + place) % self.0.idle.len());
        if let Some(connection) = all.clone().find_map(|shard| self.take_idle(shard, purpose)) {
            return Ok(Checkout::Connection(Box::new(connection)));
        }
        let granted = pool_limit.enqueue(purpose);
        // An idle connection that this request cannot use is closed to make room. This happens after queueing, so that
        // its permit goes to the first in the queue.
        let unusable = all.into_iter().find_map(|shard| {
            let mut idle = self.idle(shard);
            (!idle.is_empty()).then(|| idle.remove(0))
        });
        drop(unusable);
        match timeout(settings.connect_timeout, granted).await {
            Ok(Ok(grant)) => Ok(grant),
            Ok(Err(_)) | Err(_) => {
                usage.exceeded(Limit::UpstreamMaxConnections);
                Err(NotSent::NoneFree(settings.connect_timeout))
            }
        }
    }

    /// Starts the sweeper of this thread if it is not running.
    pub(super) fn ensure_sweeper(&self) {
        let shard = shards::index();
        let is_running = &self.0.sweepers.0[shard];
        if !is_running.load(Ordering::Relaxed) {
            is_running.store(true, Ordering::Relaxed);
            tokio::spawn(sweep(Arc::downgrade(&self.0), shard));
        }
    }
}

/// The limit on connections, and its queue.
pub(super) struct PoolLimit {
    max: u64,
    state: Mutex<State>,
    /// The length of the queue, cancelled waiters included. It is usually 0, and then no lock is taken.
    queued: AtomicUsize,
}

/// The right to one connection. Dropping it passes it to the request that has waited longest.
pub(super) struct PoolPermit(Option<Arc<PoolLimit>>);

/// The right of one request to one of the connections, from before it is sent to the end of its answer. Dropping it gives it to
/// a request that waits.
pub(super) struct Turn {
    permit: Option<Permit>,
    queue: Arc<TurnQueue>,
}

impl Turn {
    pub(super) fn new(permit: Permit, queue: Arc<TurnQueue>) -> Self {
        Self { permit: Some(permit), queue }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.permit = None;
        // Whoever ends a turn sees who waits, or whoever begins to wait sees that it has ended.
        fence(Ordering::SeqCst);
        if self.queue.length.load(Ordering::Relaxed) > 0 {
            self.queue.grant();
        }
    }
}

/// The result of waiting.
pub(super) enum Checkout {
    /// The right to open a connection.
    Permit(PoolPermit),
    /// A connection that is idle.
    Connection(Box<Http1Connection>),
}

#[derive(Default)]
struct State {
    open: u64,
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    purpose: Purpose,
    sender: oneshot::Sender<Checkout>,
}

impl PoolLimit {
    pub(super) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { max, state: Mutex::default(), queued: AtomicUsize::new(0) })
    }

    /// Acquires a free permit. None is free while a request waits.
    pub(super) fn try_acquire(self: &Arc<Self>) -> Option<PoolPermit> {
        let mut state = self.state();
        if state.open >= self.max {
            return None;
        }
        state.open += 1;
        Some(PoolPermit(Some(Arc::clone(self))))
    }

    /// Joins the queue. Dropping the receiver leaves it.
    fn enqueue(self: &Arc<Self>, purpose: Purpose) -> oneshot::Receiver<Checkout> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        // Cancelled waiters do not accumulate while no permit is released.
        state.forget_gone();
        if state.open < self.max && state.waiting.is_empty() {
            // A permit was released between `try_acquire` and this call.
            state.open += 1;
            drop(state);
            // The receiver exists, so this cannot fail.
            let _ = sender.send(Checkout::Permit(PoolPermit(Some(Arc::clone(self)))));
            return receiver;
        }
        state.waiting.push_back(Waiter { purpose, sender });
        receiver
    }

    /// Hands an idle connection to the first waiter; returns it if the queue is empty. If the waiter cannot use it, it
    /// is closed, and the waiter gets its permit.
    fn hand_over(&self, connection: Http1Connection, since: Instant) -> Option<Http1Connection> {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return Some(connection);
        }
        let mut connection = Box::new(connection);
        loop {
            // The lock must not be held while a connection is dropped: dropping its permit takes the lock.
            let waiting = {
                let mut state = self.state();
                match state.waiting.front() {
                    None => return Some(*connection),
                    Some(Waiter { purpose, .. })
                        if since.elapsed() < purpose.reuse.longest_idle() && purpose.may_use(connection.owner) =>
                    {
                        state.waiting.pop_front()?
                    }
                    Some(_) => break,
                }
            };
            match waiting.sender.send(Checkout::Connection(connection)) {
                Err(Checkout::Connection(back)) => connection = back,
                Ok(()) | Err(Checkout::Permit(_)) => return None,
            }
        }
        drop(connection);
        None
    }

    /// Whether a request waits.
    fn has_waiters(&self) -> bool {
        if self.queued.load(Ordering::SeqCst) == 0 {
            return false;
        }
        let mut state = self.state();
        state.forget_gone();
        !state.waiting.is_empty()
    }

    fn state(&self) -> StateGuard<'_> {
        // No operation under this lock can leave the state inconsistent.
        StateGuard { state: self.state.lock().unwrap_or_else(PoisonError::into_inner), queued: &self.queued }
    }
}

/// A lock on the state that updates `queued` when it is released.
struct StateGuard<'a> {
    state: MutexGuard<'a, State>,
    queued: &'a AtomicUsize,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.queued.store(self.state.waiting.len(), Ordering::SeqCst);
    }
}

impl State {
    /// Removes cancelled waiters from the front.
    fn forget_gone(&mut self) {
        while self.waiting.front().is_some_and(|next| next.sender.is_closed()) {
            self.waiting.pop_front();
        }
    }
}

impl Drop for PoolPermit {
    fn drop(&mut self) {
        let Some(limit) = self.0.take() else { return };
        let mut state = limit.state();
        let mut permit = Self(Some(Arc::clone(&limit)));
        while let Some(next) = state.waiting.pop_front() {
            match next.sender.send(Checkout::Permit(permit)) {
                Err(Checkout::Permit(back)) => permit = back,
                Ok(()) | Err(Checkout::Connection(_)) => return,
            }
        }
        permit.0 = None;
        state.open -= 1;
    }
}

/// Whether a sweeper task runs, for each shard.
pub(super) struct Sweepers(Box<[AtomicBool]>);

impl Sweepers {
    pub(super) fn new() -> Self {
        Self((0..shards::count()).map(|_| AtomicBool::new(false)).collect())
    }
}

/// Closes connections that were idle for too long: they take memory, file descriptors and permits. Runs until the thread has no
/// connections that could be idle.
async fn sweep(upstream: Weak<Inner>, shard: usize) {
    loop {
        sleep(INTERVAL).await;
        let Some(upstream) = upstream.upgrade().map(Upstream) else { return };
        let has_no_http2 = upstream.0.http2_pool.as_ref().is_none_or(|http2_pool| http2_pool.sweep(shard));
        let mut idle = upstream.idle(shard);
        let old = idle.partition_point(|entry| entry.since.elapsed() >= UNPROTECTED_IDLE);
        let old: Vec<IdleConnection> = idle.drain(..old).collect();
        if idle.is_empty() && has_no_http2 {
            upstream.0.sweepers.0[shard].store(false, Ordering::Relaxed);
            return;
        }
        drop(idle);
        drop(old);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Reuse;
    use super::*;

    const NEW: Purpose = Purpose { reuse: Reuse::Never, owner: Owner::AnyCaller };

    fn open(limit: &PoolLimit) -> u64 {
        limit.state().open
    }

    #[tokio::test]
    async fn a_permit_goes_to_the_longest_waiting_request() {
        let limit = PoolLimit::new(1);
        let permit = limit.try_acquire().unwrap();
        assert!(limit.try_acquire().is_none());
        let (gone, first, second) = (limit.enqueue(NEW), limit.enqueue(NEW), limit.enqueue(NEW));
        drop(gone);
        drop(permit);
        let Ok(Checkout::Permit(permit)) = first.await else { panic!("nothing granted") };
        assert!(limit.has_waiters());
        drop(permit);
        // It was granted, and leaves before it has taken it.
        drop(second);
        assert_eq!(open(&limit), 0);
        assert!(!limit.has_waiters() && limit.try_acquire().is_some());
    }

    #[tokio::test]
    async fn a_permit_released_before_queueing_is_acquired_at_once() {
        let limit = PoolLimit::new(1);
        // All were taken when it was looked for.
        let permit = limit.try_acquire().unwrap();
        assert!(limit.try_acquire().is_none());
        drop(permit);
        let Ok(Checkout::Permit(permit)) = limit.enqueue(NEW).await else { panic!("nothing granted") };
        assert_eq!((open(&limit), limit.has_waiters()), (1, false));
        drop(permit);
        assert_eq!(open(&limit), 0);
    }

    #[tokio::test]
    async fn cancelled_waiters_do_not_accumulate() {
        let limit = PoolLimit::new(1);
        let _slot = limit.try_acquire().unwrap();
        for _ in 0..100 {
            drop(limit.enqueue(NEW));
        }
        assert!(limit.state().waiting.len() <= 1);
    }
}
