//! What a conditional write does to the record that stands: written once, for every store that decides in Rust.

use std::time::Duration;

use super::{End, Expiry};
use crate::idempotency::record::{Attempt, State, Timestamp};

/// What the rules look at in a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub(super) attempt: Attempt,
    pub(super) state: State,
    pub(super) claimed_at: Timestamp,
    pub(super) until: Timestamp,
    pub(super) unknown_ttl: Duration,
}

/// What settling does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The record completes, and expires at `until`.
    Complete { until: Timestamp },
    /// The record turns unknown, and expires at `until`.
    TurnUnknown { until: Timestamp },
    /// The record goes.
    Remove,
    /// Nothing: it was done before.
    Repeated { until: Timestamp },
    /// Nothing: it was done before if the answer on file is the same, else the record is no longer the attempt's.
    RepeatedIfSame { until: Timestamp },
    /// Nothing: the record is no longer the attempt's to end.
    Superseded,
}

/// What `attempt` ending by `end` does to what stands.
pub(super) fn settle(standing: Option<Standing>, attempt: Attempt, end: &End, now: Timestamp) -> Change {
    let Some(standing) = standing else {
        return match end {
            End::Release => Change::Repeated { until: now },
            End::Complete { .. } | End::Hold => Change::Superseded,
        };
    };
    if standing.attempt != attempt {
        return Change::Superseded;
    }
    match (standing.state, end) {
        (State::InFlight | State::Unknown, End::Complete { expiry, .. }) => {
            Change::Complete { until: expires(*expiry, standing.claimed_at, now) }
        }
        (State::InFlight | State::Unknown, End::Release) => Change::Remove,
        (State::InFlight, End::Hold) => Change::TurnUnknown { until: now.plus(standing.unknown_ttl) },
        (State::Unknown, End::Hold) => Change::Repeated { until: standing.until },
        (State::Completed, End::Complete { .. }) => Change::RepeatedIfSame { until: standing.until },
        (State::Completed, End::Release | End::Hold) => Change::Superseded,
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

/// The place of a state in [`State::ALL`].
pub(super) fn place(state: State) -> usize {
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
