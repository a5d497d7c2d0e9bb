//! Errors of the disk, for tests: SQLite cannot be made to fail a sync from outside without unsafe code.

use rusqlite::{Error as SqlError, ffi};

use super::error::Failure;
use super::session::Session;
use super::writer::Request;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spot {
    Commit,
    Checkpoint,
}

/// The next failures, if any are due.
#[derive(Default)]
pub(super) struct Sabotage {
    next: Vec<(Spot, i32)>,
    /// The commit of the request that asks for it goes well.
    is_armed: bool,
}

/// Asks for so many failures with an extended result code.
pub(super) struct SabotageRequest(pub(super) Spot, pub(super) i32, pub(super) usize);

impl Request for SabotageRequest {
    type Reply = ();

    fn run(&self, session: &mut Session) -> Result<(), Failure> {
        session.sabotage = Sabotage { next: vec![(self.0, self.1); self.2], is_armed: false };
        Ok(())
    }
}

impl Sabotage {
    pub(super) fn strike(&mut self, spot: Spot) -> rusqlite::Result<()> {
        let was_armed = std::mem::replace(&mut self.is_armed, true);
        match self.next.last() {
            Some((at, code)) if *at == spot && was_armed => {
                let failure = SqlError::SqliteFailure(ffi::Error::new(*code), None);
                self.next.pop();
                Err(failure)
            }
            _ => Ok(()),
        }
    }
}
