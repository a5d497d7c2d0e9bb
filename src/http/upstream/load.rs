//! What a connection carries that many requests share.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::stream::Wire;
use crate::http::body;

/// The room on a connection.
///
/// An upstream may answer before it has read all of a request, and never read the rest: then its room would be taken for
/// ever, and in the end that of all connections. So no more requests come to a connection that has such a one, and it is
/// given up when there are no others there.
pub(super) struct Load {
    taken: Mutex<Taken>,
    wire: Arc<Wire>,
    /// Told when there is room for another request.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// Those whose rest the upstream does not take.
    stuck: usize,
    is_given_up: bool,
}

impl Load {
    pub(super) fn of(wire: Arc<Wire>, freed: Arc<Notify>) -> Self {
        Self { taken: Mutex::default(), wire, freed }
    }

    /// Takes room for a request, where no more than `most` have any.
    pub(super) fn take(self: &Arc<Self>, most: usize) -> Option<Room> {
        let mut taken = self.taken();
        if !taken.is_open() || taken.all >= most {
            return None;
        }
        taken.all += 1;
        drop(taken);
        Some(Room {
            load: Arc::clone(self),
            is_stuck: AtomicBool::new(false),
            ending: OnceLock::new(),
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
        self.stuck == 0 && !self.is_given_up
    }
}

/// Room for one request. It is taken until the answer has ended, and the request too: an upstream may answer before all of
/// it has come.
pub(super) struct Room {
    load: Arc<Load>,
    is_stuck: AtomicBool,
    /// Gone with it.
    ending: OnceLock<oneshot::Sender<Infallible>>,
    /// How the request's body broke off: the exchange only says that it did.
    broken: Mutex<Option<body::Error>>,
}

impl Room {
    /// The answer has ended. The upstream may still take the rest of the request, for as long as `patience`.
    pub(super) fn outlives_answer(self: &Arc<Self>, patience: Duration) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (ending, ended) = oneshot::channel();
        if self.ending.set(ending).is_err() {
            return;
        }
        let room = Arc::downgrade(self);
        runtime.spawn(async move {
            if timeout(patience, ended).await.is_err()
                && let Some(room) = room.upgrade()
            {
                room.sticks();
            }
        });
    }

    fn sticks(&self) {
        if !self.is_stuck.swap(true, Ordering::AcqRel) {
            self.load.change(|taken| taken.stuck += 1);
        }
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
        // All of them: not everybody may use what is free.
        self.load.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> (Arc<Load>, Arc<Wire>) {
        let wire = Arc::new(Wire::default());
        (Arc::new(Load::of(Arc::clone(&wire), Arc::default())), wire)
    }

    #[test]
    fn there_is_room_for_so_many() {
        let (load, _) = load();
        let rooms = [load.take(2).unwrap(), load.take(2).unwrap()];
        assert!(load.take(2).is_none() && load.is_open());
        drop(rooms);
        assert!(load.is_empty() && load.take(1).is_some());
    }

    #[test]
    fn a_connection_is_given_up_when_all_that_it_carries_sticks() {
        let (load, wire) = load();
        let [one, other, healthy] = [0; 3].map(|_| load.take(3).unwrap());
        drop(healthy);
        one.sticks();
        assert!(!load.is_open() && load.take(100).is_none() && !wire.is_given_up());
        other.sticks();
        assert!(wire.is_given_up());
        drop((one, other));
        assert!(!load.is_open() && load.is_empty(), "for good");
    }

    #[test]
    fn the_last_that_is_well_is_waited_for() {
        let (load, wire) = load();
        let (stuck, healthy) = (load.take(2).unwrap(), load.take(2).unwrap());
        stuck.sticks();
        assert!(!wire.is_given_up());
        drop(healthy);
        assert!(wire.is_given_up());
    }

    #[test]
    fn a_request_that_is_taken_after_all_was_not_stuck() {
        let (load, wire) = load();
        let (stuck, healthy) = (load.take(2).unwrap(), load.take(2).unwrap());
        stuck.sticks();
        drop(stuck);
        assert!(load.is_open() && load.take(2).is_some());
        drop(healthy);
        assert!(!wire.is_given_up());
    }
}
