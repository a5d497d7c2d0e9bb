//! What a connection carries that many requests share.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Context;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::stream::Wire;
use crate::http::body;

/// How long giving up the rest of a request may take where nothing stands in its way.
const AT_ONCE: Duration = Duration::from_millis(100);

/// The room on a connection.
///
/// An upstream may answer before it has read all of a request, and read the rest late or never, while what it has not read
/// keeps others' requests from it. So no more requests come to a connection that has such a one; and it is given up when
/// they have been waited for long enough, and it carries nothing else.
pub(super) struct Load {
    taken: Mutex<Taken>,
    wire: Arc<Wire>,
    /// Told when there is room for another request.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// Those whose answer has ended, and they have not.
    late: usize,
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
            ending: OnceLock::new(),
            is_overdue: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            body: AtomicWaker::new(),
            broken: Mutex::default(),
        })
    }

    pub(super) fn is_open(&self) -> bool {
        self.taken().is_open()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.taken().all == 0
    }

    fn change(&self, change: impl FnOnce(&mut Taken)) {
        let mut taken = self.taken();
        change(&mut taken);
        taken.is_given_up |= taken.stuck > 0 && taken.stuck == taken.all;
        let is_given_up = taken.is_given_up;
        drop(taken);
        if is_given_up {
            self.wire.give_up();
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    fn is_open(&self) -> bool {
        self.late == 0 && !self.is_given_up
    }
}

/// Room for one request. It is taken until the answer has ended, and all of the request was written.
pub(super) struct Room {
    load: Arc<Load>,
    /// Where its answer has ended first; gone with it.
    ending: OnceLock<oneshot::Sender<Infallible>>,
    is_overdue: AtomicBool,
    is_stuck: AtomicBool,
    /// Who waits for more of the request's body.
    body: AtomicWaker,
    /// How the request's body broke off: the exchange only says that it did.
    broken: Mutex<Option<body::Error>>,
}

impl Room {
    /// The answer has ended. What is left of the request is waited for, for as long as `patience`.
    pub(super) fn outlives_answer(self: &Arc<Self>, patience: Duration) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (ending, mut ended) = oneshot::channel();
        if self.ending.set(ending).is_err() {
            return;
        }
        self.load.change(|taken| taken.late += 1);
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

    /// Whoever waits for more of the request gives up, and with that its room.
    fn wait_no_longer(&self) {
        self.is_overdue.store(true, Ordering::Release);
        self.body.wake();
    }

    /// Nobody waited: it is the upstream that does not take it.
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
        let (is_late, is_stuck) = (self.ending.get().is_some(), *self.is_stuck.get_mut());
        self.load.change(|taken| {
            taken.all -= 1;
            taken.late -= usize::from(is_late);
            taken.stuck -= usize::from(is_stuck);
        });
        // All of them: not everybody may use what is free.
        self.load.freed.notify_waiters();
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
        assert!(load.take(2).is_none() && load.is_open());
        drop(rooms);
        assert!(load.is_empty() && load.take(1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_comes_to_where_a_request_outlives_its_answer() {
        let (load, wire) = load();
        let [late, healthy] = take(&load);
        late.outlives_answer(PATIENCE);
        assert!(!load.is_open() && load.take(100).is_none());
        drop(late);
        assert!(load.is_open() && load.take(2).is_some());
        drop(healthy);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!wire.is_given_up());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_given_up_when_all_that_it_carries_is_stuck() {
        let (load, wire) = load();
        let [one, other, healthy] = take(&load);
        one.outlives_answer(PATIENCE);
        tokio::time::sleep(PATIENCE / 2).await;
        other.outlives_answer(PATIENCE);
        drop(healthy);
        tokio::time::sleep(PATIENCE).await;
        assert!(!wire.is_given_up(), "the other one has some time left");
        tokio::time::sleep(PATIENCE).await;
        assert!(wire.is_given_up());
        drop((one, other));
        assert!(!load.is_open() && load.is_empty(), "for good");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_that_is_well_is_waited_for() {
        let (load, wire) = load();
        let [late, healthy] = take(&load);
        late.outlives_answer(PATIENCE);
        tokio::time::sleep(PATIENCE * 2).await;
        assert!(!wire.is_given_up());
        drop(healthy);
        assert!(wire.is_given_up());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_more_of_a_request_hears_that_it_is_not_wanted() {
        let (load, wire) = load();
        let [late, _healthy] = take(&load);
        late.outlives_answer(PATIENCE);
        std::future::poll_fn(|cx| if late.is_overdue(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
        drop(late);
        assert!(load.is_open() && !wire.is_given_up());
    }
}
