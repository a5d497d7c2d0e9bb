//! What a connection carries that many requests share.

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

use super::stream::Wire;
use crate::http::body;

/// How long giving up the rest of a request may take where nothing stands in its way.
const AT_ONCE: Duration = Duration::from_millis(500);

/// The room on a connection.
///
/// An upstream may answer before it has read all of a request, and read the rest late or never, while what it has not read
/// keeps others' requests from it. So no more requests come to a connection where such a rest waits; and it is given up when
/// that has been waited for long enough, and it carries nothing else.
pub(super) struct Load {
    taken: Mutex<Taken>,
    wire: Arc<Wire>,
    /// Told when there is room for another request.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// Those whose answer has ended, and a part of them waits.
    waiting: usize,
    /// Those of them that the upstream does not take.
    stuck: usize,
    is_given_up: bool,
}

impl Load {
    pub(super) fn of(wire: Arc<Wire>, freed: Arc<Notify>) -> Self {
        Self { taken: Mutex::default(), wire, freed }
    }

    /// Takes room for a request, where fewer than `most` have any.
    pub(super) fn take(self: &Arc<Self>, most: usize) -> Option<Room> {
        let mut taken = self.taken();
        if !taken.is_open() || taken.all >= most {
            return None;
        }
        taken.all += 1;
        drop(taken);
        Some(Room {
            load: Arc::clone(self),
            rest: Mutex::default(),
            is_overdue: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            body: AtomicWaker::new(),
            broken: Mutex::default(),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.taken().all == 0
    }

    fn change(&self, change: impl FnOnce(&mut Taken)) {
        let mut taken = self.taken();
        let (before, was_open) = (taken.all, taken.is_open());
        change(&mut taken);
        taken.is_given_up |= taken.stuck > 0 && taken.stuck == taken.all;
        let is_given_up = taken.is_given_up;
        let is_freed = taken.all < before || (taken.is_open() && !was_open);
        drop(taken);
        if is_given_up {
            self.wire.give_up();
        }
        if is_freed {
            // All of them: not everybody may use what is free.
            self.freed.notify_waiters();
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    fn is_open(&self) -> bool {
        self.waiting == 0 && !self.is_given_up
    }
}

/// Room for one request. It is taken until the answer has ended, and all of the request was written.
pub(super) struct Room {
    load: Arc<Load>,
    rest: Mutex<Rest>,
    is_overdue: AtomicBool,
    is_stuck: AtomicBool,
    /// Who waits for more of the request's body.
    body: AtomicWaker,
    /// How the request's body broke off: the exchange only says that it did.
    broken: Mutex<Option<body::Error>>,
}

/// What is left of a request.
#[derive(Default)]
struct Rest {
    /// Pieces of its body that are yet to be written.
    pieces: usize,
    /// Where its answer has ended first; gone with it.
    ending: Option<oneshot::Sender<Infallible>>,
}

impl Room {
    /// The answer has ended. What is left of the request is waited for, for as long as `patience`.
    pub(super) fn outlives_answer(self: &Arc<Self>, patience: Duration) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (ending, mut ended) = oneshot::channel();
        self.change(|rest| rest.ending = Some(ending));
        let room = Arc::downgrade(self);
        runtime.spawn(async move {
            if timeout(patience, &mut ended).await.is_ok() {
                return;
            }
            room.upgrade().inspect(|room| room.wait_no_longer());
            if timeout(AT_ONCE, ended).await.is_err() {
                room.upgrade().inspect(|room| room.stick());
            }
        });
    }

    /// A piece of the request's body.
    pub(super) fn piece(self: &Arc<Self>, bytes: Bytes) -> Piece {
        self.change(|rest| rest.pieces += 1);
        Piece { bytes, room: Arc::clone(self) }
    }

    fn change(&self, change: impl FnOnce(&mut Rest)) {
        let mut rest = self.rest();
        let before = rest.waits();
        change(&mut rest);
        match (before, rest.waits()) {
            (false, true) => self.load.change(|taken| taken.waiting += 1),
            (true, false) => self.load.change(|taken| taken.waiting -= 1),
            _ => {}
        }
    }

    fn rest(&self) -> MutexGuard<'_, Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever waits for more of the request gives up, and with that its room.
    fn wait_no_longer(&self) {
        self.is_overdue.store(true, Ordering::Release);
        self.body.wake();
    }

    /// It would have ended by now, but for the upstream: that does not take it, or what was to go before it.
    fn stick(&self) {
        self.is_stuck.store(true, Ordering::Release);
        self.load.change(|taken| taken.stuck += 1);
    }

    /// Whether the rest of the request is not wanted any more; otherwise `cx` is woken when that comes about.
    pub(super) fn is_overdue(&self, cx: &Context<'_>) -> bool {
        self.body.register(cx.waker());
        self.is_overdue.load(Ordering::Acquire)
    }

    pub(super) fn broken(&self) -> MutexGuard<'_, Option<body::Error>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let is_stuck = *self.is_stuck.get_mut();
        self.load.change(|taken| {
            taken.all -= 1;
            taken.stuck -= usize::from(is_stuck);
        });
    }
}

impl Rest {
    fn waits(&self) -> bool {
        self.ending.is_some() && self.pieces > 0
    }
}

/// A piece of a request's body. h2 takes it in whole, and has it until the upstream has taken it.
pub(super) struct Piece {
    bytes: Bytes,
    room: Arc<Room>,
}

impl Buf for Piece {
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

impl Drop for Piece {
    fn drop(&mut self) {
        self.room.change(|rest| rest.pieces -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn load() -> (Arc<Load>, Arc<Wire>) {
        let wire = Arc::new(Wire::default());
        (Arc::new(Load::of(Arc::clone(&wire), Arc::default())), wire)
    }

    fn take<const COUNT: usize>(load: &Arc<Load>) -> [Arc<Room>; COUNT] {
        [(); COUNT].map(|()| Arc::new(load.take(COUNT).unwrap()))
    }

    #[test]
    fn there_is_room_for_so_many() {
        let (load, _) = load();
        let rooms = take::<2>(&load);
        assert!(load.take(2).is_none() && load.take(3).is_some());
        drop(rooms);
        assert!(load.is_empty() && load.take(1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_comes_to_where_the_rest_of_a_request_waits() {
        let (load, wire) = load();
        let [late, _healthy, _other] = take(&load);
        let (one, other) = (late.piece(Bytes::new()), late.piece(Bytes::new()));
        assert!(load.take(100).is_some(), "its answer is yet to end");
        late.outlives_answer(PATIENCE);
        assert!(load.take(100).is_none());
        drop(one);
        assert!(load.take(100).is_none());
        drop(other);
        assert!(load.take(100).is_some(), "it is the client who has the rest");
        let more = late.piece(Bytes::new());
        assert!(load.take(100).is_none());
        drop((late, more));
        assert!(load.take(100).is_some());
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!wire.is_given_up());
    }

    /// What is left of a request whose answer has ended: the upstream does not take it.
    fn stuck(room: Arc<Room>) -> Piece {
        let piece = room.piece(Bytes::new());
        room.outlives_answer(PATIENCE);
        piece
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_given_up_when_all_that_it_carries_is_stuck() {
        let (load, wire) = load();
        let [one, other, healthy] = take(&load);
        let one = stuck(one);
        tokio::time::sleep(PATIENCE / 2).await;
        let other = stuck(other);
        drop(healthy);
        tokio::time::sleep(PATIENCE).await;
        assert!(!wire.is_given_up(), "the other one has some time left");
        tokio::time::sleep(PATIENCE).await;
        assert!(wire.is_given_up());
        drop((one, other));
        assert!(load.take(1).is_none() && load.is_empty(), "for good");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_that_is_well_is_waited_for() {
        let (load, wire) = load();
        let [late, healthy] = take(&load);
        let _piece = stuck(late);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!wire.is_given_up());
        drop(healthy);
        assert!(wire.is_given_up());
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_behind_a_stuck_request_is_stuck_too() {
        let (load, wire) = load();
        let [one, behind] = take(&load);
        let _piece = stuck(one);
        // h2 has yet to ask for its body.
        behind.outlives_answer(PATIENCE);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(wire.is_given_up());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_more_of_a_request_hears_that_it_is_not_wanted() {
        let (load, wire) = load();
        let [late] = take(&load);
        late.outlives_answer(PATIENCE);
        assert!(load.take(2).is_some(), "nothing of it waits for the upstream");
        std::future::poll_fn(|cx| if late.is_overdue(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
        drop(late);
        tokio::time::sleep(PATIENCE).await;
        assert!(!wire.is_given_up() && load.take(1).is_some());
    }
}
