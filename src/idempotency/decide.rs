//! What a request gets, given the record of its key: SPEC's table as a function.

use std::time::Duration;

use http::StatusCode;

use super::codec::Answer;
use super::fingerprint::Fingerprint;
use super::policy::Policy;
use super::record::{Record, Timestamp};

/// What a protected request gets whose key has a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The record stands in the way no more (expired, or unknown and retried by policy): supersede it and run.
    Supersede,
    /// The key belongs to another request.
    Reused,
    /// Another attempt runs.
    InFlight {
        /// How long it has been running.
        elapsed: Duration,
    },
    /// The record has the answer.
    Replay(Answer),
    /// The record has an answer whose body was not kept.
    NotStored(StatusCode),
    /// Nobody knows how the attempt ended.
    Unknown,
    /// The record is in a format that this version cannot read.
    Unreadable,
}

/// Decides what a request gets. `same` compares the request with a record's fingerprint.
#[must_use]
pub fn decide(now: Timestamp, policy: &Policy, record: &Record, same: impl FnOnce(&Fingerprint) -> bool) -> Decision {
    todo!()
}
