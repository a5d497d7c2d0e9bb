//! The claim protocol: what one protected request does about its key, from the key to the reply, without any I/O.
//!
//! [`Protocol`] is a state machine. Its driver reports what happened as an [`Event`] and carries out the [`Action`]s that
//! [`Protocol::handle`] returns, in their order. Some actions end with an event, and the documentation of that event names them: the driver
//! reports that event before the machine returns the next action of this kind. The machine reads no clock: `now` is the age of
//! the request, and [`Protocol::timeout`] says at what age the driver reports [`Event::Timeout`].
//!
//! The machine holds these rules, whatever the order of events; `protocol/properties.rs` and `protocol/exhaustive.rs` look
//! for an order that breaks one:
//! - An attempt runs once, and only under a claim that the store has acknowledged. A request is sent again only under another
//!   claim, in the place of an attempt that the store has as unknown.
//! - A claim that does not lead to an attempt is withdrawn, also where its client has long been answered.
//! - A claim or a settlement whose outcome is in doubt is repeated, with the same attempt, until the store is certain.
//! - A reply says `executed` only after the record is durable; else it says `unrecorded`.
//! - Only the attempt that a record names completes it. What a probe says of a record is discarded once another attempt has
//!   superseded it.
//! - A request that waits for an attempt never claims, and neither does one that is barred.
//! - Where records are made with several id secrets, whoever finds one of its key under another id runs nothing.
//!
//! `protocol.golden.md` shows every transition.

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod golden;
mod machine;
#[cfg(test)]
mod mutants;
#[cfg(test)]
mod properties;

use std::time::Duration;

use super::decide::{Decision, RunningAttempt};
use super::record::{Timestamp, Version};
use super::recovery::Finding;

pub use self::machine::Protocol;

/// The times that bound a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProtocolLimits {
    /// At what age its client is answered where the store has not answered its first claim: other looks at the store have taken their
    /// time before.
    pub claim_by: Duration,
    /// How long the client waits for the store otherwise, as for the settlement of its attempt.
    pub settle_timeout: Duration,
    /// How long a claim stands without being renewed.
    pub lease: Duration,
    /// How long the request may wait for another's attempt; zero where it is to be answered at once.
    pub patience: Duration,
    /// How many attempts there may be, where the outcomes of those before are unknown; at least 1.
    pub attempts: u32,
    /// The pause before the second of them; each one after it is twice as long.
    pub backoff: Duration,
}

/// How much of `settle_timeout` a first claim has at least, however long it took to look for what stands.
#[must_use]
pub fn least_for_claim(settle_timeout: Duration) -> Duration {
    settle_timeout / 5
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The request is whole, and has a key. The first event.
    Begin,
    /// After [`Action::Join`]: this request is the leader of its key in this process.
    Leads,
    /// After [`Action::Join`]: another request is the leader.
    Follows,
    /// After [`Action::Follow`] and [`Action::FollowToEnd`]: how far the leader has come.
    Followed(Followed),
    /// After [`Action::AskPermission`]: records may be claimed under this request's configuration.
    Permitted,
    /// After [`Action::AskPermission`]: the rules by which the request's identity was made are no longer in force.
    Retired,
    /// The request may not run; it still gets the answer of a record, if there is one. It follows [`Action::AskPermission`]. It may also
    /// follow a claim, in place of [`Event::Claimed`]: then the store has acknowledged the claim.
    Barred,
    /// After [`Action::Claim`], [`Action::Supersede`] or [`Action::Reclaim`]: the store has acknowledged the claim.
    Claimed,
    /// In place of [`Event::Claimed`]: the claim stands, and so may a record of the same key, whose id was made with another
    /// secret.
    OtherId,
    /// After [`Action::Supersede`] or [`Action::Reclaim`]: the record had changed, and the claim was not written.
    NotSuperseded,
    /// After [`Action::Claim`]: a record stands, and nothing was written.
    Exists(RecordView),
    /// After [`Action::Look`]: the record of the key, or none.
    Looked(Option<RecordView>),
    /// After an action on the store: it failed.
    StoreFailed {
        /// Whether the operation may have happened, or may happen yet.
        in_doubt: bool,
    },
    /// Instead of what an action ends with: the gate cannot go on with the request. Its body cannot be read back to be
    /// compared, or the system has no randomness for a token.
    Failed,
    /// After [`Action::LockProbe`]: this request alone may ask the upstream about the record.
    ProbeLocked,
    /// After [`Action::LockProbe`]: another request, of any gate, asks it.
    ProbeTaken,
    /// After [`Action::CheckProbe`]: none has it.
    ProbeFree,
    /// After [`Action::Probe`]: what the upstream says of the attempt.
    Probed(Finding),
    /// After [`Action::Run`]: the attempt has ended.
    AttemptEnded,
    /// After [`Action::Run`]: the attempt has ended, how is unknown, and the client has no answer: the request may be sent again.
    AttemptLost,
    /// After [`Action::Pause`]: it is over. Where the process shuts down first, [`Event::ShuttingDown`] comes in its place.
    Resumed,
    /// After [`Action::Settle`], [`Action::Hold`], [`Action::Withdraw`] and [`Action::Recover`]: the store has answered.
    Settled(SettleResult),
    /// After [`Action::AcquireWaitSlot`]: the request is among those that may wait.
    WaitSlotAcquired,
    /// After [`Action::AcquireWaitSlot`]: too many wait already.
    WaitSlotsFull,
    /// After [`Action::Watch`]: the attempt may have ended.
    Changed,
    /// The request has reached the age that [`Protocol::timeout`] gave.
    Timeout,
    /// The client no longer waits for a reply.
    ClientLeft,
    /// The process waits no longer for attempts. It ends an [`Action::Pause`], too.
    ShuttingDown,
}

/// A record, as it concerns this request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordView {
    /// What the request gets by it.
    pub decision: Decision,
    /// Until when it stands.
    pub until: Option<Timestamp>,
    /// Its version, for [`Action::Supersede`].
    pub version: Version,
    /// Whether it is this request's own claim, which turned unknown before the store acknowledged it.
    pub is_own: bool,
}

/// How far the leader of a key has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Followed {
    /// It runs an attempt.
    Running {
        /// What this request gets where it is not a retry of the leader's.
        difference: Option<Decision>,
        /// The attempt.
        attempt: RunningAttempt,
    },
    /// It found a record.
    Found {
        /// What this request gets by it.
        decision: Decision,
        /// Until when the record stands.
        until: Option<Timestamp>,
    },
    /// It found no record.
    Absent,
    /// Its attempt ended in a release, and its answer can be shared.
    Released {
        /// Whether this request is a retry of it.
        is_same: bool,
    },
    /// It has left, and nothing that it shared answers this request: the record says what there is.
    AskStore,
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SettleResult {
    /// It is durable.
    Done,
    /// The record was completed otherwise, as by the upstream's own transaction; that is the answer.
    CompletedOtherwise,
    /// The record is no longer the attempt's: it was purged, or superseded.
    Lost,
}

/// What the driver does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Become the leader of the key in this process, or find out who is.
    Join,
    /// Wait until the leader knows what the store has.
    Follow,
    /// Wait until the leader's attempt has ended.
    FollowToEnd,
    /// Find out whether the request may run, and hold the configuration's permission to claim until the claim is certain.
    AskPermission,
    /// Ask the store for a new record.
    Claim,
    /// Ask the store to replace a record.
    Supersede(Version),
    /// Read the record, and write nothing.
    Look,
    /// Tell followers that the attempt runs. Its lease began no earlier than at the age of `since`.
    ShareRunning {
        /// The age at which the claim was first asked for.
        since: Duration,
    },
    /// Tell followers what the store had, and stop leading.
    ShareFound,
    /// Give followers the attempt's answer, where it was released whole, and stop leading.
    ShareEnd,
    /// Stop leading.
    Leave,
    /// Forward the request to the upstream, once under each claim.
    Run,
    /// Ask the store to end the attempt as it ended.
    Settle,
    /// Ask the store to end the attempt as unknown, and to note that another is about to follow.
    Hold,
    /// Wait so long before the request is sent again.
    Pause(Duration),
    /// Ask the store for a new claim, with another attempt, in the place of the record that was just ended as unknown.
    Reclaim,
    /// Ask the store to release a claim under which nothing was sent.
    Withdraw,
    /// Ask the store for the right to ask the upstream about the record, which one request has at a time.
    LockProbe,
    /// Ask the store whether a request has that right.
    CheckProbe,
    /// Tell followers that the upstream is being asked.
    ShareProbing,
    /// Ask the upstream what became of the attempt.
    Probe,
    /// Ask the store to complete the record, as the record's own attempt, with what the upstream said.
    Recover,
    /// Take a place among those that wait.
    AcquireWaitSlot,
    /// Wait for a sign that the attempt in another process has ended.
    Watch,
    /// Answer the client.
    Reply(Reply),
}

/// What the client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// What a record means for the request.
    Decided {
        /// The decision.
        decision: Decision,
        /// Until when the record stands.
        until: Option<Timestamp>,
    },
    /// The released answer of the leader's attempt.
    Released,
    /// The attempt has ended and left no answer.
    NothingLeft,
    /// The configuration changed while the request came in.
    Retired,
    /// The request would run, and may not.
    Barred,
    /// Another request with the key came first, under an id that was made with another secret.
    OtherId,
    /// The store did not say what it has for a request that may not run.
    LookFailed,
    /// The store refused the claim.
    ClaimFailed,
    /// The store did not answer the claim in time.
    ClaimUnanswered,
    /// The store acknowledged the claim when most of its lease had passed.
    ClaimTooLate,
    /// The leader did not learn in time what the store has.
    LeaderUnanswered,
    /// The gate could not go on with the request.
    Failed,
    /// What the upstream said of the attempt, with which the record is completed.
    Recovered,
    /// The attempt's outcome, and what the store says; nothing where it has not answered in time.
    Attempted(Option<SettleResult>),
}
