//! Finding out what became of an attempt: what the machine does from when it may ask the upstream until it knows.

use std::time::Duration;

use super::super::super::decide::Decision;
use super::super::super::record::{Timestamp, Version};
use super::super::super::recovery::Finding;
use super::super::{Action, Event, Reply, SettleResult};
use super::{Phase, Protocol, earlier};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Probing {
    /// The record, as it was when the request found it.
    pub(super) version: Version,
    /// Until when it stands.
    pub(super) until: Option<Timestamp>,
    /// Whether the request runs where the upstream knows nothing of the attempt.
    may_run: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    /// It asks for the right to probe, until this age.
    Locking { deadline: Duration },
    /// It asks the upstream.
    Asking,
    /// The upstream has answered, and the record is completed with that. The client is answered at the age of `deadline` at
    /// the latest.
    Recovering { deadline: Duration, retry: Option<Duration> },
}

impl Probing {
    /// When the machine is to act by itself.
    pub(super) fn timeout(&self) -> Option<Duration> {
        match self.stage {
            Stage::Locking { deadline } => Some(deadline),
            Stage::Asking => None,
            Stage::Recovering { deadline, retry } => earlier(Some(deadline), retry),
        }
    }
}

impl Protocol {
    /// The upstream may be asked about the record of this version.
    pub(super) fn probe(
        &mut self,
        now: Duration,
        (version, until): (Version, Option<Timestamp>),
        may_run: bool,
    ) -> Vec<Action> {
        let stage = Stage::Locking { deadline: now + self.limits.settle_timeout };
        self.call(Phase::Probing(Probing { version, until, may_run, stage }), Action::LockProbe)
    }

    pub(super) fn probed(&mut self, now: Duration, probing: Probing, event: Event) -> Vec<Action> {
        match (probing.stage, event) {
            (_, Event::Failed) => self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::Failed)]),
            (Stage::Locking { .. }, Event::ProbeLocked) => {
                let probing = Probing { stage: Stage::Asking, ..probing };
                self.go(Phase::Probing(probing), [Action::ShareProbing, Action::Probe])
            }
            (Stage::Locking { .. }, Event::ProbeTaken) => self.being_asked(now, Some(Action::ShareFound)),
            (Stage::Locking { .. }, Event::StoreFailed { .. } | Event::Timeout) => self.store_is_silent(),
            (Stage::Asking, Event::Probed(Finding::Done)) => {
                let deadline = now + self.limits.settle_timeout;
                self.failures = 0;
                self.recover(probing, deadline)
            }
            (Stage::Asking, Event::Probed(Finding::Absent)) if !probing.may_run => {
                self.go(Phase::Done, [Action::ShareFound, Action::Reply(Reply::Barred)])
            }
            (Stage::Asking, Event::Probed(Finding::Absent)) => {
                self.ask_again(self.later_claim(now, Some(probing.version)))
            }
            (Stage::Asking, Event::Probed(Finding::Unclear)) => {
                let reply = Reply::Decided { decision: Decision::Unknown, until: probing.until };
                self.go(Phase::Done, [Action::ShareFound, Action::Reply(reply)])
            }
            (Stage::Recovering { .. }, Event::Settled(settlement)) => match settlement {
                SettleResult::Done => self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::Recovered)]),
                // The attempt has completed it after all, and has the better answer.
                SettleResult::CompletedOtherwise => self.ask_again(self.later_claim(now, None)),
                SettleResult::Lost => self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::NothingLeft)]),
            },
            (Stage::Recovering { deadline, .. }, Event::StoreFailed { .. }) => {
                let retry = self.retry_at(now);
                self.go(Phase::Probing(Probing { stage: Stage::Recovering { deadline, retry }, ..probing }), [])
            }
            (Stage::Recovering { deadline, retry: Some(at) }, Event::Timeout) if now >= at && now < deadline => {
                self.recover(probing, deadline)
            }
            (Stage::Recovering { deadline, .. }, Event::Timeout) if now >= deadline => self.store_is_silent(),
            _ => self.stay(Phase::Probing(probing)),
        }
    }

    fn recover(&mut self, probing: Probing, deadline: Duration) -> Vec<Action> {
        let stage = Stage::Recovering { deadline, retry: None };
        self.go(Phase::Probing(Probing { stage, ..probing }), [Action::Recover])
    }

    /// The record stays unknown, and a retry asks again.
    fn store_is_silent(&mut self) -> Vec<Action> {
        self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::LookFailed)])
    }
}
