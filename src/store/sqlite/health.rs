//! The health of the disk, from the writer's last writes.

use std::time::{Duration, Instant};

use crate::store::{Error, ErrorKind};

/// While the disk is full, the remaining room belongs to running attempts: a new claim is tried at this interval.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// A disk that is nearly full is full and is not by turns: it has room again when it had room for so long.
const RECOVERY_TIME: Duration = Duration::from_secs(10);

/// The state of the disk.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// When it was last found full.
    full: Option<Instant>,
    /// How the last write failed, if it did, otherwise than by a full disk.
    failed: Option<ErrorKind>,
    log: Log,
}

/// The state that was logged last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Log {
    #[default]
    HasRoom,
    IsFull,
    /// It says that the disk is full; there has been room since then.
    IsFullUntil(Instant),
}

/// A change of health, to be logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HealthChange {
    IsFull,
    HasRoom,
}

impl Health {
    /// A write found no room.
    pub(super) fn found_full(&mut self, now: Instant) -> Option<HealthChange> {
        self.full = Some(now);
        let before = std::mem::replace(&mut self.log, Log::IsFull);
        (before == Log::HasRoom).then_some(HealthChange::IsFull)
    }

    /// A write failed otherwise.
    pub(super) fn found_failing(&mut self, kind: ErrorKind) {
        self.failed = Some(kind);
    }

    /// Something was written; `takes_claims` where that shows that claims have room.
    pub(super) fn wrote(&mut self, takes_claims: bool, now: Instant) {
        self.failed = None;
        if takes_claims && self.full.take().is_some() {
            self.log = Log::IsFullUntil(now);
        }
    }

    /// A change that has lasted long enough to be logged.
    pub(super) fn news(&mut self, now: Instant) -> Option<HealthChange> {
        match self.log {
            Log::IsFullUntil(then) if now.saturating_duration_since(then) >= RECOVERY_TIME => {
                self.log = Log::HasRoom;
                Some(HealthChange::HasRoom)
            }
            _ => None,
        }
    }

    /// Whether the last writes went well.
    pub(super) fn is_good(&self) -> bool {
        self.full.is_none() && self.failed.is_none()
    }

    pub(super) fn is_full(&self) -> bool {
        self.full.is_some()
    }

    /// Whether something may be tried that needs room; where the disk was found full, only now and then, and where
    /// `is_room_back`.
    pub(super) fn may_try(&mut self, now: Instant, is_room_back: impl FnOnce() -> bool) -> Result<(), Error> {
        if let Some(found) = self.full {
            let is_due = now.saturating_duration_since(found) >= RETRY_INTERVAL;
            if !is_due || !is_room_back() {
                if is_due {
                    self.full = Some(now);
                }
                return Err(Error::determinate(ErrorKind::Full, "the disk is full, or its quota is exhausted"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_tried_now_and_then() {
        let mut health = Health::default();
        let start = Instant::now();
        assert!(health.is_good() && health.may_try(start, || false).is_ok());
        health.found_full(start);
        assert!(!health.is_good() && health.is_full());
        assert!(health.may_try(start, || true).is_err());
        assert!(health.may_try(start + RETRY_INTERVAL, || false).is_err());
        assert!(health.may_try(start + RETRY_INTERVAL * 3 / 2, || true).is_err(), "too soon after the last try");
        assert!(health.may_try(start + RETRY_INTERVAL * 2, || true).is_ok());
        assert!(health.may_try(start + RETRY_INTERVAL * 2, || true).is_ok(), "also for the others of the transaction");
        health.found_full(start + RETRY_INTERVAL * 2);
        assert!(health.may_try(start + RETRY_INTERVAL * 2, || true).is_err());
        health.wrote(false, start);
        assert!(health.is_full(), "the attempts that run have room of their own");
        health.wrote(true, start);
        assert!(health.is_good());
    }

    #[test]
    fn other_failures_end_with_the_next_successful_write() {
        let mut health = Health::default();
        health.found_failing(ErrorKind::Unavailable);
        assert!(!health.is_good() && !health.is_full());
        assert!(health.may_try(Instant::now(), || false).is_ok());
        health.wrote(false, Instant::now());
        assert!(health.is_good());
    }

    #[test]
    fn a_nearly_full_disk_is_reported_once() {
        let mut health = Health::default();
        let start = Instant::now();
        assert_eq!(health.found_full(start), Some(HealthChange::IsFull));
        let mut now = start;
        for _ in 0..20 {
            now += RECOVERY_TIME / 2;
            health.wrote(true, now);
            assert_eq!(health.news(now + RECOVERY_TIME / 3), None);
            assert_eq!(health.found_full(now + RECOVERY_TIME / 3), None);
        }
        assert_eq!(health.news(now + RECOVERY_TIME * 2), None, "it is full");
        health.wrote(true, now);
        health.wrote(true, now + RECOVERY_TIME / 2);
        assert_eq!(health.news(now + RECOVERY_TIME), Some(HealthChange::HasRoom));
        assert_eq!(health.news(now + RECOVERY_TIME), None);
        assert_eq!(health.found_full(now + RECOVERY_TIME), Some(HealthChange::IsFull));
    }
}
