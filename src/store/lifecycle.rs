//! The effect of a conditional write on the current record, for every store that decides in Rust.

use std::time::Duration;

use super::{Expiry, Settlement};
use crate::idempotency::record::{AttemptToken, State, Timestamp, Version};

/// The fields of a record that the rules depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct CurrentRecord {
    pub(super) attempt: AttemptToken,
    pub(super) state: State,
    pub(super) claimed_at: Timestamp,
    pub(super) until: Timestamp,
    pub(super) unknown_ttl: Duration,
}

impl CurrentRecord {
    pub(super) fn version(&self) -> Version {
        Version { attempt: self.attempt, state: self.state, until: self.until }
    }
}

/// The transition of a record that a settlement causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    /// The record completes, and expires at `until`.
    Complete { until: Timestamp },
    /// The record turns unknown, and expires at `until`.
    TurnUnknown { until: Timestamp },
    /// The record is removed.
    Remove,
    /// None: the settlement was applied before.
    Repeated { until: Timestamp },
    /// None: the settlement was applied before if the answer on file is the same; otherwise the record is no longer
    /// the attempt's.
    RepeatedIfSame { until: Timestamp },
    /// None: the record no longer belongs to the attempt.
    NotCurrent,
}

/// The transition of the current record when `attempt` ends by `end`.
pub(super) fn settle(
    current: Option<CurrentRecord>,
    attempt: AttemptToken,
    end: &Settlement,
    now: Timestamp,
) -> Transition {
    let Some(current) = current else {
        return match end {
            Settlement::Release => Transition::Repeated { until: now },
            Settlement::Complete { .. } | Settlement::Hold { .. } => Transition::NotCurrent,
        };
    };
    if current.attempt != attempt {
        return Transition::NotCurrent;
    }
    match (current.state, end) {
        (State::InFlight | State::Unknown, Settlement::Complete { expiry, .. }) => {
            Transition::Complete { until: expires(*expiry, current.claimed_at, now) }
        }
        (State::InFlight | State::Unknown, Settlement::Release) => Transition::Remove,
        (State::InFlight, Settlement::Hold { .. }) => Transition::TurnUnknown { until: now.plus(current.unknown_ttl) },
        (State::Unknown, Settlement::Hold { .. }) => Transition::Repeated { until: current.until },
        (State::Completed, Settlement::Complete { .. }) => Transition::RepeatedIfSame { until: current.until },
        (State::Completed, Settlement::Release | Settlement::Hold { .. }) => Transition::NotCurrent,
    }
}

/// Whether a lease or an expiry at `until` is past: at `until` itself it is.
pub(super) fn is_past(until: Timestamp, now: Timestamp) -> bool {
    until <= now
}

/// Whether a record counts as live where identities change: in flight, or not yet expired.
pub(super) fn is_live(state: State, until: Timestamp, now: Timestamp) -> bool {
    state == State::InFlight || !is_past(until, now)
}

/// The place of a state in [`State::ALL`], which stores also write for it: it must never change.
pub(super) fn state_index(state: State) -> usize {
    match state {
        State::InFlight => 0,
        State::Completed => 1,
        State::Unknown => 2,
    }
}

fn expires(expiry: Expiry, claimed_at: Timestamp, now: Timestamp) -> Timestamp {
    match expiry {
        Expiry::FromClaim(ttl) => {
            let until = claimed_at.plus(ttl);
            // Dead on arrival, a retry would run again: an answer that came this late counts from now.
            if is_past(until, now) { now.plus(ttl) } else { until }
        }
        Expiry::FromNow(ttl) => now.plus(ttl),
    }
}
