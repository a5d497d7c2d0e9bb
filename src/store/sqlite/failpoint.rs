//! Injected disk errors, for tests: a failing sync cannot be provoked from outside SQLite without unsafe code.

use rusqlite::{Error as SqlError, ffi};

use super::error::Failure;
use super::session::Session;
use super::writer::Request;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failpoint {
    Commit,
    Checkpoint,
}

/// The failures to inject next.
#[derive(Default)]
pub(super) struct Failpoints {
    next: Vec<(Failpoint, i32)>,
    /// Set after the commit of the injecting request, which succeeds.
    is_armed: bool,
}

/// Injects a number of failures with an extended result code.
pub(super) struct InjectFailures(pub(super) Failpoint, pub(super) i32, pub(super) usize);

impl Request for InjectFailures {
    type Reply = ();

    fn run(&self, session: &mut Session) -> Result<(), Failure> {
        session.failpoints = Failpoints { next: vec![(self.0, self.1); self.2], is_armed: false };
        Ok(())
    }
}

impl Failpoints {
    pub(super) fn hit(&mut self, spot: Failpoint) -> rusqlite::Result<()> {
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
