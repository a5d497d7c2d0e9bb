//! What the writer's last writes say about its disk.

use std::time::{Duration, Instant};

use crate::store::{Error, ErrorKind};

/// While the disk is full, what is left of it belongs to the attempts that run: a new claim is tried so often.
const PAUSE: Duration = Duration::from_millis(250);

/// A disk that is nearly full is full and is not by turns: it has room again when it had room for so long.
const LASTING: Duration = Duration::from_secs(10);

/// What is wrong with the disk, if anything is.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// When it was last found full.
    full: Option<Instant>,
    /// How the last write failed, if it did, otherwise than by a full disk.
    failed: Option<ErrorKind>,
    log: Log,
}

/// What the log says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Log {
    #[default]
    HasRoom,
    IsFull,
    /// It says that the disk is full; there has been room since then.
    IsFullUntil(Instant),
}

/// What to tell whoever reads the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    IsFull,
    HasRoom,
}

impl Health {
    /// A write found no room.
    pub(super) fn found_full(&mut self, now: Instant) -> Option<News> {
        self.full = Some(now);
        let before = std::mem::replace(&mut self.log, Log::IsFull);
        (before == Log::HasRoom).then_some(News::IsFull)
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

    /// What has lasted long enough to be told.
    pub(super) fn news(&mut self, now: Instant) -> Option<News> {
        match self.log {
            Log::IsFullUntil(then) if now.saturating_duration_since(then) >= LASTING => {
                self.log = Log::HasRoom;
                Some(News::HasRoom)
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
            let is_due = now.saturating_duration_since(found) >= PAUSE;
            if !is_due || !is_room_back() {
                if is_due {
                    self.full = Some(now);
                }
                return Err(Error::determinate(ErrorKind::Full, "the disk is full, or its quota exhausted"));
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
        assert!(health.may_try(start + PAUSE, || false).is_err());
        assert!(health.may_try(start + PAUSE * 3 / 2, || true).is_err(), "too soon after the last try");
        assert!(health.may_try(start + PAUSE * 2, || true).is_ok());
        assert!(health.may_try(start + PAUSE * 2, || true).is_ok(), "whoever else is in the transaction");
        health.found_full(start + PAUSE * 2);
        assert!(health.may_try(start + PAUSE * 2, || true).is_err());
        health.wrote(false, start);
        assert!(health.is_full(), "the attempts that run have room of their own");
        health.wrote(true, start);
        assert!(health.is_good());
    }

    #[test]
    fn what_fails_otherwise_is_good_when_something_is_written() {
        let mut health = Health::default();
        health.found_failing(ErrorKind::Unavailable);
        assert!(!health.is_good() && !health.is_full());
        assert!(health.may_try(Instant::now(), || false).is_ok());
        health.wrote(false, Instant::now());
        assert!(health.is_good());
    }

    #[test]
    fn a_disk_that_is_nearly_full_is_told_once() {
        let mut health = Health::default();
        let start = Instant::now();
        assert_eq!(health.found_full(start), Some(News::IsFull));
        let mut now = start;
        for _ in 0..20 {
            now += LASTING / 2;
            health.wrote(true, now);
            assert_eq!(health.news(now + LASTING / 3), None);
            assert_eq!(health.found_full(now + LASTING / 3), None);
        }
        assert_eq!(health.news(now + LASTING * 2), None, "it is full");
        health.wrote(true, now);
        health.wrote(true, now + LASTING / 2);
        assert_eq!(health.news(now + LASTING), Some(News::HasRoom));
        assert_eq!(health.news(now + LASTING), None);
        assert_eq!(health.found_full(now + LASTING), Some(News::IsFull));
    }
}
