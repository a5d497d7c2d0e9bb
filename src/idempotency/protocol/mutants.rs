//! The machine with faults that the exhaustive search must find.

use std::time::Duration;

use super::exhaustive::Operation;
use super::*;

/// The machine as it is, or with a fault that a search must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mutant {
    None,
    /// Takes a claim in doubt for an acknowledged one.
    BelievesDoubt,
    /// Takes a claim in doubt for one that failed.
    ForgetsDoubt,
    /// Leaves a claim that it does not use.
    DoesNotWithdraw,
    /// Takes over a record whose attempt runs.
    TakesOverTheLiving,
    /// Replies before the settlement is durable.
    RepliesEarly,
    /// Gives up a settlement that fails.
    SettlesOnce,
    /// Claims after it has waited.
    ClaimsAfterWaiting,
    /// Ends without the last reply.
    DropsReply,
    /// Runs what may not run.
    RunsTheBarred,
    /// Runs beside a record of its key that stands under another id.
    RunsBesideAnother,
    /// Asks the upstream while an attempt may still take effect there, and believes that it knows nothing of it.
    ProbesTooEarly,
    /// Runs again where the upstream does not say what became of the attempt.
    BelievesUnclear,
    /// Asks the upstream while another request asks it.
    ProbesBesideAnother,
    /// Sends a request again though the store does not have its last attempt as unknown.
    ResendsTheSettled,
}

impl Mutant {
    pub(super) const ALL: [Self; 14] = [
        Self::BelievesDoubt,
        Self::ForgetsDoubt,
        Self::DoesNotWithdraw,
        Self::TakesOverTheLiving,
        Self::RepliesEarly,
        Self::SettlesOnce,
        Self::ClaimsAfterWaiting,
        Self::DropsReply,
        Self::RunsTheBarred,
        Self::RunsBesideAnother,
        Self::ProbesTooEarly,
        Self::BelievesUnclear,
        Self::ProbesBesideAnother,
        Self::ResendsTheSettled,
    ];

    /// What [`Protocol::handle`] would return, but for the fault. `asked` is the store call that ends with the event.
    pub(super) fn handle(
        self,
        protocol: &mut Protocol,
        now: Duration,
        event: Event,
        asked: Option<Operation>,
    ) -> Vec<Action> {
        let claims = matches!(asked, Some(Operation::Claim | Operation::Supersede(_)));
        let event = match (self, event) {
            (Self::BelievesDoubt, Event::StoreFailed { in_doubt: true }) if claims => Event::Claimed,
            (Self::ForgetsDoubt, Event::StoreFailed { in_doubt: true }) if claims => {
                Event::StoreFailed { in_doubt: false }
            }
            (Self::SettlesOnce, Event::StoreFailed { .. }) if asked == Some(Operation::Settle) => {
                Event::Settled(SettleResult::Done)
            }
            (Self::TakesOverTheLiving, Event::Exists(view)) => {
                Event::Exists(RecordView { decision: Decision::Supersede, ..view })
            }
            (Self::ProbesTooEarly, Event::Exists(view)) if view.decision == Decision::Unknown && !view.is_own => {
                Event::Exists(RecordView { decision: Decision::Probe, ..view })
            }
            (Self::BelievesUnclear, Event::Probed(Finding::Unclear)) => Event::Probed(Finding::Absent),
            (Self::ResendsTheSettled, Event::NotSuperseded) if asked == Some(Operation::Reclaim) => Event::Claimed,
            (Self::ProbesBesideAnother, Event::ProbeTaken) => Event::ProbeLocked,
            (Self::RunsBesideAnother, Event::OtherId) => Event::Claimed,
            (Self::RunsTheBarred, Event::Barred) => Event::Permitted,
            (_, event) => event,
        };
        let mut actions = protocol.handle(now, event);
        match (self, actions.last()) {
            (Self::DropsReply, Some(Action::Reply(_))) if protocol.is_done() => {
                actions.pop();
                actions
            }
            (Self::DoesNotWithdraw, Some(Action::Withdraw)) => protocol.handle(now, Event::Settled(SettleResult::Done)),
            (Self::RepliesEarly, Some(Action::Settle)) => protocol.handle(now, Event::Settled(SettleResult::Done)),
            (Self::ClaimsAfterWaiting, Some(Action::Reply(Reply::NothingLeft))) => {
                *protocol = Protocol::new(protocol.limits());
                protocol.handle(now, Event::Begin)
            }
            _ => actions,
        }
    }
}
