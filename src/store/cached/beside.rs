//! The shared cache: what it is told, and what of it is believed.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::floor::Floors;
use super::remote::Way;
use super::seal::Seal;
use super::shelf::{Known, LARGEST, size};
use super::{Answered, CLOCK, HINT, RUNNING};
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp};
use crate::store::Fresh;

/// The shared cache, and what is needed to write to it and to believe it.
pub(super) struct Beside {
    pub(super) way: Way,
    pub(super) seal: Seal,
    pub(super) max_age: Duration,
    /// The store's time as it was last told, and when that was asked for.
    pub(super) time: Mutex<(Timestamp, Instant)>,
    /// What this process has claimed.
    pub(super) running: Mutex<HashMap<RecordId, Claimed>>,
    /// Attempts that may have claimed: the store was asked, and its answer is not known. Whoever asked asks again until it
    /// is, and nobody but the store can tell; so there are no more of these than claims under way.
    pub(super) uncertain: Mutex<HashSet<Attempt>>,
    /// Up to when values are older than what this process knows.
    pub(super) floors: Mutex<Floors>,
}

pub(super) struct Claimed {
    pub(super) attempt: Attempt,
    pub(super) at: Timestamp,
    pub(super) asked: Instant,
    pub(super) head: Bytes,
}

impl Beside {
    /// What a value means for a request like `fresh`, if it can be believed, and the store's time.
    pub(super) fn believe(&self, id: RecordId, value: &Bytes, fresh: &Fresh) -> (Answered, Option<(Known, Timestamp)>) {
        let Ok((record, read_at)) = self.seal.open(id, value) else { return (Answered::Invalid, None) };
        let stale = (Answered::Stale, None);
        let Some(now) = self.now() else { return stale };
        if self.floors().refuses(id, record.attempt, read_at) {
            return stale;
        }
        let age = now.since(read_at);
        let (answered, believed) = match record.state {
            State::Completed => (Answered::Hit, self.max_age),
            // By a different request the store is asked; and nobody is to hear of an attempt of its own.
            State::InFlight if record.head == fresh.head && record.attempt != fresh.attempt => {
                (Answered::InFlight, HINT.min(self.max_age))
            }
            State::InFlight | State::Unknown => return (Answered::Miss, None),
        };
        let Some(asked) = Instant::now().checked_sub(age).filter(|_| age < believed && now < record.until) else {
            return stale;
        };
        (answered, Some((Known { record, read_at, asked }, now)))
    }

    /// The value of a record as of `read_at`, and for how long it is one, where it is.
    pub(super) fn value(
        &self,
        id: RecordId,
        record: &Record,
        read_at: Timestamp,
        now: Timestamp,
    ) -> Option<(Bytes, Duration)> {
        let believed = match record.state {
            State::Completed => self.max_age,
            State::InFlight => HINT.min(self.max_age),
            State::Unknown => return None,
        };
        let life = record.until.since(now).min(believed.saturating_sub(now.since(read_at)));
        (!life.is_zero() && size(record) <= LARGEST).then(|| (self.seal.close(id, record, read_at), life))
    }

    /// The store's time at this moment, or a little later; nothing where it was not told for long.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let (told, asked) = *self.time();
        let passed = asked.elapsed();
        (passed < CLOCK).then(|| told.plus(passed))
    }

    /// The store told its time to whoever asked then.
    pub(super) fn told(&self, now: Timestamp, asked: Instant) {
        let mut time = self.time();
        if asked > time.1 {
            *time = (now, asked);
        }
    }

    /// This process knows of an attempt that claimed at this time: what was read before is of an older one.
    pub(super) fn believe_only(&self, id: RecordId, attempt: Attempt, at: Timestamp) {
        let now = self.latest();
        self.floors().raise(id, at, Some(attempt), now);
    }

    /// The record was removed: what was read up to now is not believed.
    pub(super) fn believe_later(&self, id: RecordId) {
        let now = self.latest();
        self.floors().raise(id, now, None, now);
    }

    /// The store's time at this moment or later, also where it was not told for long: clocks drift apart by far less than
    /// one part in 64.
    pub(super) fn latest(&self) -> Timestamp {
        let (told, asked) = *self.time();
        let passed = asked.elapsed();
        let drift = if passed < CLOCK { Duration::ZERO } else { passed / 64 };
        told.plus(passed + drift)
    }

    pub(super) fn claimed(&self, id: RecordId, fresh: Fresh, at: Timestamp, asked: Instant) {
        let mut running = self.running();
        if running.len() < RUNNING {
            running.insert(id, Claimed { attempt: fresh.attempt, at, asked, head: fresh.head });
        }
    }

    pub(super) fn take(&self, id: RecordId, attempt: Attempt) -> Option<Claimed> {
        let mut running = self.running();
        let is_its = running.get(&id).is_some_and(|claimed| claimed.attempt == attempt);
        if is_its { running.remove(&id) } else { None }
    }

    pub(super) fn time(&self) -> MutexGuard<'_, (Timestamp, Instant)> {
        // Both parts are written at once.
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn floors(&self) -> MutexGuard<'_, Floors> {
        // Nothing that is done under it can leave it half changed in a way that believes more.
        self.floors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn uncertain(&self) -> MutexGuard<'_, HashSet<Attempt>> {
        // An attempt is in it or not.
        self.uncertain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self) -> MutexGuard<'_, HashMap<RecordId, Claimed>> {
        // Nothing that is done under it can leave the map half changed.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
