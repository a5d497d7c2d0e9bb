//! What a request gets, given the record of its key. `decide.golden.md` shows it as a table.

use std::borrow::Cow;
use std::time::Duration;

use http::StatusCode;

use super::codec::{Answer, Head};
use super::credential::Proof;
use super::policy::Policy;
use super::record::{Record, State, Timestamp};
use super::recovery::{Recovery, next_attempt_within};

/// What a protected request gets whose key has a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The record stands in the way no more (expired, or unknown and retried by policy): supersede it and run.
    Supersede,
    /// The key belongs to another request.
    Reused,
    /// The key belongs to the same request, of a caller with another proof of its identity.
    CallerDiffers,
    /// Another attempt runs.
    InFlight(RunningAttempt),
    /// The record has the answer.
    Replay(Answer),
    /// The record has an answer whose body was not kept.
    NotStored(StatusCode),
    /// How the attempt ended is unknown.
    Unknown,
    /// How the attempt ended is unknown, and the upstream may be asked.
    Probe,
    /// The record is in a format that this version cannot read.
    Unreadable,
}

/// Another attempt, as a request meets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunningAttempt {
    /// How long it has been running.
    pub elapsed: Duration,
    /// The time until its lease ends, if nothing renews it. `None` for an attempt of this process, which renews it.
    pub lease_left: Option<Duration>,
}

impl RunningAttempt {
    /// An attempt of this process.
    #[must_use]
    pub fn here(elapsed: Duration) -> Self {
        Self { elapsed, lease_left: None }
    }

    /// The attempt after some time, in which its lease was not renewed.
    #[must_use]
    pub fn after(self, time: Duration) -> Self {
        let Self { elapsed, lease_left } = self;
        Self { elapsed: elapsed + time, lease_left: lease_left.map(|left| left.saturating_sub(time)) }
    }
}

/// Decides what a request gets. `head` is the record's, decoded, where it can be read; `is_same` says whether the request's
/// fingerprint is the one in it; `proof` is the proof of the request's caller.
///
/// The first that holds decides:
/// 1. A completed or unknown record past its time does not count, whatever it holds.
/// 2. A record whose head cannot be read is never run again.
/// 3. The request must be the same, and of the same caller: see [`difference`].
/// 4. A record in flight whose lease is past counts as unknown; it never expires by itself.
/// 5. A record that turned unknown a moment ago, and whose gate is about to send the request again, counts as in flight.
/// 6. The record's state.
///
/// A time is past from its own millisecond on: `until <= now`.
#[must_use]
pub fn decide(
    now: Timestamp,
    policy: &Policy,
    record: &Record,
    head: Option<&Head>,
    proof: Option<&Proof>,
    is_same: bool,
) -> Decision {
    let past = record.until <= now;
    if past && record.state != State::InFlight {
        return Decision::Supersede;
    }
    let Some(head) = head else { return Decision::Unreadable };
    if let Some(differs) = difference(is_same, head.proof.as_ref(), proof) {
        return differs;
    }
    let in_flight =
        |left| Decision::InFlight(RunningAttempt { elapsed: now.since(record.claimed_at), lease_left: Some(left) });
    if record.state == State::Unknown
        && let Some(left) = next_attempt_within(record, &head.details(), policy.unknown_ttl, now)
    {
        return in_flight(left);
    }
    match record.state {
        State::InFlight if !past => in_flight(record.until.since(now)),
        State::InFlight | State::Unknown => match &policy.recovery {
            Recovery::Hold | Recovery::Resend(_) => Decision::Unknown,
            Recovery::Retry => Decision::Supersede,
            Recovery::Probe(probe) if probe.is_due(record, &head.details(), policy.unknown_ttl, now) => Decision::Probe,
            Recovery::Probe(_) => Decision::Unknown,
        },
        State::Completed => match answer(policy, record) {
            Some(answer) if answer.content.is_some() => Decision::Replay(answer),
            Some(tombstone) => Decision::NotStored(tombstone.status),
            None => Decision::Unreadable,
        },
    }
}

/// The answer of a completed record as its caller may have it again; `None` if it cannot be read.
#[must_use]
pub fn answer(policy: &Policy, record: &Record) -> Option<Answer> {
    let answer = Answer::decode(record.answer.as_ref()?).ok()?;
    // A record may be older than the policy, or come from an upstream that completed it itself.
    Some(policy.response_headers.kept(Cow::Owned(answer)).into_owned())
}

/// What a request gets that shares its key with another one and differs from it; nothing where it is a retry of it.
/// `same` says whether the fingerprints are equal; `first` and `own` are the proofs of the two callers, and two requests
/// without a proof do not differ in it.
#[must_use]
pub fn difference(same: bool, first: Option<&Proof>, own: Option<&Proof>) -> Option<Decision> {
    if !same {
        return Some(Decision::Reused);
    }
    (first != own).then_some(Decision::CallerDiffers)
}

/// [`decide`], with the head decoded from the record.
#[cfg(test)]
pub(crate) fn decide_read(
    now: Timestamp,
    policy: &Policy,
    record: &Record,
    proof: Option<&Proof>,
    is_same: bool,
) -> Decision {
    decide(now, policy, record, Head::decode(&record.head).ok().as_ref(), proof, is_same)
}
