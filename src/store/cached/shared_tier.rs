//! The shared cache: which values are written to it, and which of its values are trusted.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::authenticator::CacheAuthenticator;
use super::floor::Floors;
use super::local_tier::{CacheEntry, LARGEST, size};
use super::remote::RemoteClient;
use super::{CacheResult, HINT_TTL, MAX_RUNNING, MAX_TIME_AGE};
use crate::idempotency::codec;
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp};
use crate::store::NewRecord;

/// The shared cache, with the state for writing to it and for validating its values.
pub(super) struct SharedTier {
    pub(super) client: RemoteClient,
    pub(super) authenticator: CacheAuthenticator,
    /// Those of gates that have another secret, while one takes the place of another.
    pub(super) other_authenticators: Vec<CacheAuthenticator>,
    pub(super) max_age: Duration,
    /// The store's time from its latest reply, and when that request was sent.
    pub(super) time: Mutex<(Timestamp, Instant)>,
    /// The running attempts of this process.
    pub(super) running: Mutex<HashMap<RecordId, OwnAttempt>>,
    /// Attempts that may have claimed: the store was asked, and its answer is not known. The caller retries until it
    /// is, and only the store knows; so there are at most as many of these as claims in flight.
    pub(super) uncertain: Mutex<HashSet<AttemptToken>>,
    /// Up to when values are older than what this process knows.
    pub(super) floors: Mutex<Floors>,
}

pub(super) struct OwnAttempt {
    pub(super) attempt: AttemptToken,
    pub(super) at: Timestamp,
    pub(super) asked: Instant,
    pub(super) head: Bytes,
}

impl SharedTier {
    /// The result of a value for a request like `fresh`, and the record and the store's time if the value is trusted.
    pub(super) fn evaluate(
        &self,
        id: RecordId,
        value: &Bytes,
        fresh: &NewRecord,
    ) -> (CacheResult, Option<(CacheEntry, Timestamp)>) {
        let authenticators = std::iter::once(&self.authenticator).chain(&self.other_authenticators);
        let opened = authenticators.map(|authenticator| authenticator.open(id, value)).find_map(Result::ok);
        let Some((record, read_at)) = opened else { return (CacheResult::Invalid, None) };
        let stale = (CacheResult::Stale, None);
        let Some(now) = self.now() else { return stale };
        if self.floors().refuses(id, record.attempt, read_at) {
            return stale;
        }
        let age = now.since(read_at);
        let (answered, lifetime) = match record.state {
            State::Completed => (CacheResult::Hit, self.max_age),
            // A different request asks the store; and an attempt must not find its own hint.
            State::InFlight if codec::is_same_request(&record.head, &fresh.head) && record.attempt != fresh.attempt => {
                (CacheResult::InFlight, HINT_TTL.min(self.max_age))
            }
            State::InFlight | State::Unknown => return (CacheResult::Miss, None),
        };
        let Some(asked) = Instant::now().checked_sub(age).filter(|_| age < lifetime && now < record.until) else {
            return stale;
        };
        (answered, Some((CacheEntry { record, read_at, asked }, now)))
    }

    /// The value of a record as of `read_at`, and for how long it is one, where it is.
    pub(super) fn value(
        &self,
        id: RecordId,
        record: &Record,
        read_at: Timestamp,
        now: Timestamp,
    ) -> Option<(Bytes, Duration)> {
        let lifetime = match record.state {
            State::Completed => self.max_age,
            State::InFlight => HINT_TTL.min(self.max_age),
            State::Unknown => return None,
        };
        let life = record.until.since(now).min(lifetime.saturating_sub(now.since(read_at)));
        (!life.is_zero() && size(record) <= LARGEST).then(|| (self.authenticator.close(id, record, read_at), life))
    }

    /// The store's time at this moment, or a little later; `None` if the latest reply is too old.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let (time, asked) = *self.time();
        let passed = asked.elapsed();
        (passed < MAX_TIME_AGE).then(|| time.plus(passed))
    }

    /// Notes the store's time from a reply to a request sent at `asked`.
    pub(super) fn observe_time(&self, now: Timestamp, asked: Instant) {
        let mut time = self.time();
        if asked > time.1 {
            *time = (now, asked);
        }
    }

    /// Refuses values read before this attempt claimed the record: they are of an older attempt.
    pub(super) fn refuse_older_than_attempt(&self, id: RecordId, attempt: AttemptToken, at: Timestamp) {
        let now = self.latest();
        self.floors().raise(id, at, Some(attempt), now);
    }

    /// Refuses values read up to now: the record was removed.
    pub(super) fn refuse_older_than_now(&self, id: RecordId) {
        let now = self.latest();
        self.floors().raise(id, now, None, now);
    }

    /// The store's time at this moment or later, also if the latest reply is old: clocks drift apart by far less than
    /// one part in 64.
    pub(super) fn latest(&self) -> Timestamp {
        let (time, asked) = *self.time();
        let passed = asked.elapsed();
        let drift = if passed < MAX_TIME_AGE { Duration::ZERO } else { passed / 64 };
        time.plus(passed + drift)
    }

    pub(super) fn claimed(&self, id: RecordId, fresh: NewRecord, at: Timestamp, asked: Instant) {
        let mut running = self.running();
        if running.len() < MAX_RUNNING {
            running.insert(id, OwnAttempt { attempt: fresh.attempt, at, asked, head: fresh.head });
        }
    }

    pub(super) fn take(&self, id: RecordId, attempt: AttemptToken) -> Option<OwnAttempt> {
        let mut running = self.running();
        let is_its = running.get(&id).is_some_and(|claimed| claimed.attempt == attempt);
        if is_its { running.remove(&id) } else { None }
    }

    pub(super) fn time(&self) -> MutexGuard<'_, (Timestamp, Instant)> {
        // Both parts are written at once.
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn floors(&self) -> MutexGuard<'_, Floors> {
        // No operation under the lock can leave it half changed in a way that believes more.
        self.floors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn uncertain(&self) -> MutexGuard<'_, HashSet<AttemptToken>> {
        // An attempt is in it or not.
        self.uncertain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self) -> MutexGuard<'_, HashMap<RecordId, OwnAttempt>> {
        // No operation under the lock can leave the map half changed.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
