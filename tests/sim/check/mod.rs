//! What must hold of every history: a pure function over what happened.

mod answers;
mod calm;
mod deliveries;
mod endings;
mod facts;
mod questions;
mod records;
mod runs;
#[cfg(test)]
mod tests;

use std::fmt;

use self::facts::Facts;
use crate::history::{Entry, Label};
use crate::setup::Setup;

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// One claim is sent and run at most once, and so is one request, unless the upstream honours keys and how the last
    /// attempt ended is unknown.
    OneRunPerClaim,
    /// Nothing leaves for the upstream before its claim is durable, nor without one unless the route fails open.
    ClaimBeforeRun,
    /// An answer that says that nothing was sent is true for ever.
    NothingSent,
    /// A record is taken over only past its expiry, or where the policy retries unknown ones, sends them again, or the
    /// upstream has said in time that it knows nothing of them.
    TakeoverByRule,
    /// What the upstream knew nothing of when it was asked in time never runs there.
    AbsentNeverRuns,
    /// One gate at a time asks the upstream about a record.
    OneQuestionAtATime,
    /// A record in flight ends by its own attempt, or turns unknown at the end of its lease and keeps its attempt.
    InFlightStays,
    /// An unknown record stays until its attempt ends it, it expires, or the policy retries it.
    UnknownStays,
    /// A completed record never changes, and goes only past its expiry.
    CompletedStays,
    /// Only its own attempt settles or renews a record.
    FencedByAttempt,
    /// A record is released only where the policy says so of how the attempt ended, or nothing was sent.
    ReleaseByRule,
    /// A record completes or is held as the policy says of how the attempt ended, with the answer that ended it.
    SettledAsEnded,
    /// Leases and expiries are what the policy says.
    TimesByRule,
    /// An answer is that of a run of this very request, key and tenant.
    AnswerIsOwn,
    /// A replay is the first answer, byte for byte.
    ReplayIdentical,
    /// A replay is of a record that was complete and had not expired.
    ReplayInTime,
    /// A key that stands for one request refuses another.
    MismatchRefused,
    /// An answer that says what became of its record comes after that is durable.
    DurableBeforeAnswer,
    /// What an answer says fits what stood.
    AnswerFitsRecord,
    /// Every request of a gate that lives is answered.
    NothingHangs,
    /// A gate that lives settles every attempt that it has claimed.
    EveryAttemptSettles,
    /// Once faults stop, every key soon answers for good at every gate.
    EveryKeyAnswers,
    /// A request is accepted only where its key has no record that lives and nothing that waits.
    AcceptedOnce,
    /// What was accepted stays until its record has its end, it expires after it was given up, or an operator discards it.
    DeliveryStays,
    /// A delivery is taken only when it is due, and is not due again before its hold ends.
    TakenIsHeld,
    /// Nothing is taken of a route that is paused.
    PauseHolds,
    /// A request is given up after so many attempts, after so long a time, or where its outcome is unknown.
    GivenUpByRule,
    /// An accepted request leaves for the upstream only after it was accepted durably.
    AcceptedBeforeRun,
    /// What is delivered in order leaves only when what was accepted before it in its scope is over, or was given up.
    InOrder,
    /// The record of an accepted request is not swept while that waits.
    RecordOutlivesDelivery,
    /// The status of a request is what it was when somebody asked; one that waits is known.
    StatusFits,
    /// Once faults stop, every accepted request comes to an end.
    EveryDeliveryEnds,
}

/// Where it does not hold.
#[derive(Clone, Debug)]
pub struct Violation {
    pub invariant: Invariant,
    /// The place in the history where it shows.
    pub index: usize,
    /// The key that it is about.
    pub label: Option<Label>,
    pub why: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { invariant, index, label, why } = self;
        write!(f, "{invariant:?} does not hold at entry {index}")?;
        if let Some(label) = label {
            write!(f, " ({label})")?;
        }
        write!(f, ": {why}")
    }
}

/// Everything that does not hold, in the order in which it shows.
pub fn check(setup: &Setup, history: &[Entry]) -> Vec<Violation> {
    let facts = Facts::of(setup, history);
    let mut found = Vec::new();
    runs::check(&facts, &mut found);
    records::check(&facts, &mut found);
    questions::check(&facts, &mut found);
    answers::check(&facts, &mut found);
    calm::check(&facts, &mut found);
    deliveries::check(&facts, &mut found);
    found.sort_by_key(|violation| (violation.index, violation.invariant));
    found
}
