//! Disk space that is reserved for running attempts.
//!
//! When the disk is full, claims are refused, but the attempts that were claimed before want to be settled. A file
//! beside the database holds a little room and is removed at that moment: enough to copy the log into the database,
//! after which the log's own room serves again.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use super::lock::{RESERVE, open_private, with_suffix};

/// How many bytes are held.
pub(super) const SIZE: u64 = 1 << 20;

/// The room that is held, or not.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    state: ReserveState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReserveState {
    Held,
    Spent,
    /// There was no room at the start, or the file system cannot hold room.
    Absent,
}

impl Reserve {
    /// Holds room beside the database at `path`.
    pub(super) fn hold(path: &Path) -> Self {
        let path = with_suffix(path, RESERVE);
        let state = if allocate(&path) { ReserveState::Held } else { ReserveState::Absent };
        Self { path, state }
    }

    /// Gives up the room that the last run held, if it did. Claims wait until it is back.
    pub(super) fn take_over_spent(path: &Path) -> Option<Self> {
        let path = with_suffix(path, RESERVE);
        fs::remove_file(&path).ok().map(|()| Self { path, state: ReserveState::Spent })
    }

    /// Gives up the room. True where that is news: what failed for want of room may be tried once more.
    pub(super) fn spend(&mut self) -> bool {
        if self.state != ReserveState::Held {
            return false;
        }
        self.state = ReserveState::Spent;
        fs::remove_file(&self.path).is_ok()
    }

    /// Whether claims may be tried: the room is held, could be held again, or never was.
    pub(super) fn is_back(&mut self) -> bool {
        if self.state == ReserveState::Spent && allocate(&self.path) {
            self.state = ReserveState::Held;
        }
        self.state != ReserveState::Spent
    }
}

/// Makes a file of [`SIZE`] bytes that the disk has room for.
fn allocate(path: &Path) -> bool {
    let allocated = open_private(OpenOptions::new().write(true).create(true), path)
        .is_ok_and(|file| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, SIZE).is_ok());
    if !allocated {
        // A partial file would only take room away.
        let _ = fs::remove_file(path);
    }
    allocated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_held_spent_and_held_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let file = dir.path().join("a.db.reserve");
        let mut reserve = Reserve::hold(&path);
        if reserve.state == ReserveState::Absent {
            return; // This file system cannot.
        }
        assert_eq!(fs::metadata(&file).unwrap().len(), SIZE);
        assert!(reserve.is_back());
        assert!(reserve.spend());
        assert!(!file.exists() && !reserve.spend());
        assert!(reserve.is_back());
        assert_eq!(fs::metadata(&file).unwrap().len(), SIZE);
        assert!(Reserve::take_over_spent(&path).is_some_and(|reserve| reserve.state == ReserveState::Spent));
        assert!(Reserve::take_over_spent(&path).is_none());
    }
}
