//! Sending a request again whose outcome is unknown, to an upstream that honours the key itself: a new claim in the place of
//! the one whose attempt was lost, and a new attempt.

use super::super::super::lease::max_age_at_start;
use super::super::super::recovery::Resend;
#[cfg(doc)]
use super::super::super::recovery::next_attempt_within;
use std::time::Duration;

use super::super::{Action, Event, Reply, SettleResult};
use super::{Phase, Protocol};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Resending {
    /// How many attempts there were.
    sent: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    /// It pauses; the claim of the last attempt still stands.
    Pausing,
    /// The store is asked to end the last attempt as unknown, with the next one to follow at once: other requests take it for
    /// one in flight until then (see [`next_attempt_within`]), and if none follows it is what there is to say. At
    /// the age of `deadline` the client is answered, and the request is not sent again.
    Holding { deadline: Duration },
    /// The store is asked for a new claim in its place, since this age. At the age of `deadline` the client is answered, and the
    /// request is not sent again; nothing once it is.
    Reclaiming { since: Duration, deadline: Option<Duration> },
}

impl Resending {
    /// The age at which the machine acts by itself.
    pub(super) fn timeout(&self) -> Option<Duration> {
        match self.stage {
            Stage::Holding { deadline } => Some(deadline),
            Stage::Reclaiming { deadline, .. } => deadline,
            Stage::Pausing => None,
        }
    }
}

impl Protocol {
    /// The attempt with this number has ended, and how it ended is unknown.
    pub(super) fn lost(&mut self, now: Duration, sent: u32) -> Vec<Action> {
        if sent >= self.limits.attempts {
            return self.settle(now);
        }
        let pause = self.limits.backoff.saturating_mul(2u32.saturating_pow(sent - 1)).min(Resend::LONGEST_PAUSE);
        self.go(Phase::Resending(Resending { sent, stage: Stage::Pausing }), [Action::Pause(pause)])
    }

    pub(super) fn resent(&mut self, now: Duration, resending: Resending, event: Event) -> Vec<Action> {
        let Resending { sent, stage } = resending;
        let in_stage = |stage| Phase::Resending(Resending { sent, stage });
        match (stage, event) {
            (Stage::Pausing, Event::Resumed) => {
                let deadline = now + self.limits.settle_timeout;
                self.call(in_stage(Stage::Holding { deadline }), Action::Hold)
            }
            (Stage::Pausing, Event::ShuttingDown) => self.settle(now),
            (Stage::Holding { .. }, Event::Settled(SettleResult::Done)) => {
                let deadline = Some(now + self.limits.settle_timeout);
                self.call(in_stage(Stage::Reclaiming { since: now, deadline }), Action::Reclaim)
            }
            (Stage::Holding { .. }, Event::Settled(settlement)) => self.conclude(settlement),
            (Stage::Holding { deadline }, Event::StoreFailed { .. }) => {
                let retry = self.retry_at(now);
                self.go(Phase::Settling { deadline: Some(deadline), retry }, [])
            }
            (Stage::Holding { deadline }, Event::Timeout) if now >= deadline => {
                let reply = Action::Reply(Reply::Attempted(None));
                self.go(Phase::Settling { deadline: None, retry: None }, [reply])
            }
            (Stage::Reclaiming { since, deadline: Some(deadline) }, Event::Timeout) if now >= deadline => {
                let reply = Action::Reply(Reply::Attempted(Some(SettleResult::Done)));
                self.go(in_stage(Stage::Reclaiming { since, deadline: None }), [reply])
            }
            // What it came to is of no use any more: it ends as its predecessor did.
            (
                Stage::Reclaiming { deadline: None, .. },
                Event::Claimed | Event::Barred | Event::StoreFailed { in_doubt: true },
            ) => self.call(Phase::Settling { deadline: None, retry: None }, Action::Settle),
            (
                Stage::Reclaiming { deadline: None, .. },
                Event::NotSuperseded | Event::Failed | Event::StoreFailed { .. },
            ) => self.go(Phase::Done, [Action::Leave]),
            // As for a first claim: too little of the lease is left.
            (Stage::Reclaiming { since, .. }, Event::Claimed) if now - since > max_age_at_start(self.limits.lease) => {
                self.settle(now)
            }
            (Stage::Reclaiming { since, .. }, Event::Claimed) => {
                self.go(Phase::Running { sent: sent + 1 }, [Action::ShareRunning { since }, Action::Run])
            }
            // It stands and may not run any more, or may stand: then it ends as its predecessor did.
            (Stage::Reclaiming { .. }, Event::Barred | Event::StoreFailed { in_doubt: true }) => self.settle(now),
            // The record says by now what became of the last attempt, or still that it is unknown.
            (Stage::Reclaiming { .. }, Event::NotSuperseded | Event::Failed | Event::StoreFailed { .. }) => {
                self.conclude(SettleResult::Done)
            }
            _ => self.stay(Phase::Resending(resending)),
        }
    }

    fn conclude(&mut self, settlement: SettleResult) -> Vec<Action> {
        self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::Attempted(Some(settlement)))])
    }
}
