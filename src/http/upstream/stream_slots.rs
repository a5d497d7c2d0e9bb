//! The stream slots of an HTTP/2 connection.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::task::AtomicWaker;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::io::SocketState;
use crate::http::body;

/// How long aborting the rest of a request takes at most, unless the upstream blocks it.
const ABORT_GRACE: Duration = Duration::from_millis(500);

/// The stream slots of a connection.
///
/// An upstream may answer before it has read all of a request, and read the rest late or never. The unread rest blocks
/// other requests by flow control. So a connection with such a rest gets no further requests, and is aborted when it
/// has waited for long enough and carries nothing else.
pub(super) struct StreamSlots {
    counts: Mutex<SlotCounts>,
    socket: Arc<SocketState>,
    /// Notified when a slot is free.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct SlotCounts {
    all: usize,
    /// Requests whose response has ended while a part of the body is unsent.
    waiting: usize,
    /// Waiting requests that the upstream does not read.
    stalled: usize,
    is_aborted: bool,
}

impl StreamSlots {
    pub(super) fn of(socket: Arc<SocketState>, freed: Arc<Notify>) -> Self {
        Self { counts: Mutex::default(), socket, freed }
    }

    /// Acquires a slot if fewer than `most` are in use.
    pub(super) fn acquire(self: &Arc<Self>, most: usize) -> Option<StreamPermit> {
        let mut counts = self.counts();
        if !counts.is_open() || counts.all >= most {
            return None;
        }
        counts.all += 1;
        drop(counts);
        Some(StreamPermit {
            slots: Arc::clone(self),
            unsent: Mutex::default(),
            is_overdue: AtomicBool::new(false),
            is_stalled: AtomicBool::new(false),
            body: AtomicWaker::new(),
            body_error: Mutex::default(),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.counts().all == 0
    }

    fn change(&self, change: impl FnOnce(&mut SlotCounts)) {
        let mut counts = self.counts();
        let (before, was_open) = (counts.all, counts.is_open());
        change(&mut counts);
        counts.is_aborted |= counts.stalled > 0 && counts.stalled == counts.all;
        let is_aborted = counts.is_aborted;
        let is_freed = counts.all < before || (counts.is_open() && !was_open);
        drop(counts);
        if is_aborted {
            self.socket.abort();
        }
        if is_freed {
            // All of them: not every waiter may use the free slot.
            self.freed.notify_waiters();
        }
    }

    fn counts(&self) -> MutexGuard<'_, SlotCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotCounts {
    fn is_open(&self) -> bool {
        self.waiting == 0 && !self.is_aborted
    }
}

/// The slot of one request. It is in use until the response has ended and all of the request was written.
pub(super) struct StreamPermit {
    slots: Arc<StreamSlots>,
    unsent: Mutex<UnsentBody>,
    is_overdue: AtomicBool,
    is_stalled: AtomicBool,
    /// The task that waits for more of the request's body.
    body: AtomicWaker,
    /// The error of the request's body, which hyper does not report.
    body_error: Mutex<Option<body::Error>>,
}

/// The unsent rest of a request.
#[derive(Default)]
struct UnsentBody {
    /// Chunks of its body that are not written yet.
    chunks: usize,
    /// Present once the response has ended; dropped with the request.
    ending: Option<oneshot::Sender<Infallible>>,
}

impl StreamPermit {
    /// The response has ended. The rest of the request may take as long as `patience`.
    pub(super) fn outlive_response(self: &Arc<Self>, patience: Duration) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (ending, mut ended) = oneshot::channel();
        self.change(|unsent| unsent.ending = Some(ending));
        let permit = Arc::downgrade(self);
        runtime.spawn(async move {
            if timeout(patience, &mut ended).await.is_ok() {
                return;
            }
            permit.upgrade().inspect(|permit| permit.expire());
            if timeout(ABORT_GRACE, ended).await.is_err() {
                permit.upgrade().inspect(|permit| permit.mark_stalled());
            }
        });
    }

    /// Wraps a chunk of the request's body.
    pub(super) fn chunk(self: &Arc<Self>, bytes: Bytes) -> BodyChunk {
        self.change(|unsent| unsent.chunks += 1);
        BodyChunk { bytes, permit: Arc::clone(self) }
    }

    fn change(&self, change: impl FnOnce(&mut UnsentBody)) {
        let mut unsent = self.unsent();
        let before = unsent.is_pending();
        change(&mut unsent);
        match (before, unsent.is_pending()) {
            (false, true) => self.slots.change(|counts| counts.waiting += 1),
            (true, false) => self.slots.change(|counts| counts.waiting -= 1),
            _ => {}
        }
    }

    fn unsent(&self) -> MutexGuard<'_, UnsentBody> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the wait for more of the request's body, which frees the slot.
    fn expire(&self) {
        self.is_overdue.store(true, Ordering::Release);
        self.body.wake();
    }

    /// Marks the request as stalled: the upstream does not read it, or data queued before it.
    fn mark_stalled(&self) {
        self.is_stalled.store(true, Ordering::Release);
        self.slots.change(|counts| counts.stalled += 1);
    }

    /// Whether the time for the rest of the request is over; otherwise `cx` is woken when it is.
    pub(super) fn is_overdue(&self, cx: &Context<'_>) -> bool {
        self.body.register(cx.waker());
        self.is_overdue.load(Ordering::Acquire)
    }

    pub(super) fn body_error(&self) -> MutexGuard<'_, Option<body::Error>> {
        self.body_error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let is_stalled = *self.is_stalled.get_mut();
        self.slots.change(|counts| {
            counts.all -= 1;
            counts.stalled -= usize::from(is_stalled);
        });
    }
}

impl UnsentBody {
    fn is_pending(&self) -> bool {
        self.ending.is_some() && self.chunks > 0
    }
}

/// A chunk of a request's body. h2 keeps it until the upstream has read it.
pub(super) struct BodyChunk {
    bytes: Bytes,
    permit: Arc<StreamPermit>,
}

impl Buf for BodyChunk {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Drop for BodyChunk {
    fn drop(&mut self) {
        self.permit.change(|unsent| unsent.chunks -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn slots() -> (Arc<StreamSlots>, Arc<SocketState>) {
        let socket = Arc::new(SocketState::default());
        (Arc::new(StreamSlots::of(Arc::clone(&socket), Arc::default())), socket)
    }

    fn acquire<const COUNT: usize>(slots: &Arc<StreamSlots>) -> [Arc<StreamPermit>; COUNT] {
        [(); COUNT].map(|()| Arc::new(slots.acquire(COUNT).unwrap()))
    }

    #[test]
    fn slots_are_limited() {
        let (slots, _) = slots();
        let rooms = acquire::<2>(&slots);
        assert!(slots.acquire(2).is_none() && slots.acquire(3).is_some());
        drop(rooms);
        assert!(slots.is_empty() && slots.acquire(1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_an_unsent_rest_gets_no_requests() {
        let (slots, socket) = slots();
        let [late, _healthy, _other] = acquire(&slots);
        let (one, other) = (late.chunk(Bytes::new()), late.chunk(Bytes::new()));
        assert!(slots.acquire(100).is_some(), "its answer is yet to end");
        late.outlive_response(PATIENCE);
        assert!(slots.acquire(100).is_none());
        drop(one);
        assert!(slots.acquire(100).is_none());
        drop(other);
        assert!(slots.acquire(100).is_some(), "it is the client who has the rest");
        let more = late.chunk(Bytes::new());
        assert!(slots.acquire(100).is_none());
        drop((late, more));
        assert!(slots.acquire(100).is_some());
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!socket.is_aborted());
    }

    /// The unsent chunk of a request whose response has ended: the upstream does not read it.
    fn stalled(permit: Arc<StreamPermit>) -> BodyChunk {
        let chunk = permit.chunk(Bytes::new());
        permit.outlive_response(PATIENCE);
        chunk
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_aborted_when_all_its_requests_are_stalled() {
        let (slots, socket) = slots();
        let [one, other, healthy] = acquire(&slots);
        let one = stalled(one);
        tokio::time::sleep(PATIENCE / 2).await;
        let other = stalled(other);
        drop(healthy);
        tokio::time::sleep(PATIENCE).await;
        assert!(!socket.is_aborted(), "the other one has some time left");
        tokio::time::sleep(PATIENCE).await;
        assert!(socket.is_aborted());
        drop((one, other));
        assert!(slots.acquire(1).is_none() && slots.is_empty(), "for good");
    }

    #[tokio::test(start_paused = true)]
    async fn a_healthy_request_keeps_the_connection_open() {
        let (slots, socket) = slots();
        let [late, healthy] = acquire(&slots);
        let _piece = stalled(late);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!socket.is_aborted());
        drop(healthy);
        assert!(socket.is_aborted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_queued_behind_a_stalled_one_is_stalled() {
        let (slots, socket) = slots();
        let [one, behind] = acquire(&slots);
        let _piece = stalled(one);
        // h2 has yet to ask for its body.
        behind.outlive_response(PATIENCE);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(socket.is_aborted());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_more_of_a_body_ends_after_the_timeout() {
        let (slots, socket) = slots();
        let [late] = acquire(&slots);
        late.outlive_response(PATIENCE);
        assert!(slots.acquire(2).is_some(), "nothing of it waits for the upstream");
        std::future::poll_fn(|cx| if late.is_overdue(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
        drop(late);
        tokio::time::sleep(PATIENCE).await;
        assert!(!socket.is_aborted() && slots.acquire(1).is_some());
    }
}
