//! The state machine of the claim protocol.

use std::time::Duration;

use self::probing::Probing;
use self::resending::Resending;
use self::waiting::{AttemptLocation, Waiting};
use super::super::decide::Decision;
use super::super::lease::max_age_at_start;
use super::super::record::Version;
use super::{Action, Event, Followed, ProtocolLimits, RecordView, Reply, SettleResult, least_for_claim};

mod probing;
mod resending;
mod waiting;

/// The first pause before a store call is repeated; each one after it is twice as long, up to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LONGEST_RETRY: Duration = Duration::from_secs(1);

/// Where a protected request stands. See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Protocol {
    limits: ProtocolLimits,
    phase: Phase,
    /// How often the store call that is under way has failed.
    failures: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    New,
    /// Finds out whether it leads.
    Joining,
    /// Another leads, who is to say what the store has before the request is so old.
    Following {
        deadline: Duration,
    },
    /// It leads, and needs the permission to claim.
    Permitting(Claiming),
    /// It leads, may not run, and reads what the store has.
    Reading(Claiming),
    /// The store is asked for the claim; after a failure again at the age of `retry`.
    Asking {
        claiming: Claiming,
        in_doubt: bool,
        retry: Option<Duration>,
    },
    /// A claim under which nothing was sent is released. Where `again`, the key is then claimed anew.
    Withdrawing {
        again: Option<Claiming>,
        retry: Option<Duration>,
    },
    /// It finds out what became of the attempt of an unknown record.
    Probing(Probing),
    /// The attempt with this number runs.
    Running {
        sent: u32,
    },
    /// How it ended is unknown, and the request is to be sent again.
    Resending(Resending),
    /// The store is asked to end the attempt. The client is answered at the age of `deadline` at the latest.
    Settling {
        deadline: Option<Duration>,
        retry: Option<Duration>,
    },
    /// An attempt is in flight, and this request asks whether it may wait.
    AcquiringWaitSlot(Waiting),
    /// It waits.
    Waiting(Waiting),
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Claiming {
    /// When the request began to ask: its lease began no earlier.
    since: Duration,
    /// When its client is answered at the latest.
    deadline: Duration,
    /// The record that it replaces.
    seen: Option<Version>,
    /// Whether the client was answered in the meantime.
    is_given_up: bool,
}

impl Protocol {
    /// A request that has not begun.
    #[must_use]
    pub fn new(limits: ProtocolLimits) -> Self {
        Self { limits, phase: Phase::New, failures: 0 }
    }

    /// The times that bound the request.
    #[cfg(test)]
    pub(super) fn limits(&self) -> ProtocolLimits {
        self.limits
    }

    /// The age at which the machine is to have [`Event::Timeout`], unless another event comes first.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        match &self.phase {
            Phase::Following { deadline } => Some(*deadline),
            Phase::Permitting(claiming) | Phase::Reading(claiming) => Self::claim_deadline(claiming),
            Phase::Asking { claiming, retry, .. } => earlier(Self::claim_deadline(claiming), *retry),
            Phase::Withdrawing { again, retry } => earlier(again.as_ref().and_then(Self::claim_deadline), *retry),
            Phase::Settling { deadline, retry } => earlier(*deadline, *retry),
            Phase::Waiting(waiting) => Some(waiting.timeout()),
            Phase::Probing(probing) => probing.timeout(),
            Phase::Resending(resending) => resending.timeout(),
            Phase::New | Phase::Joining | Phase::Running { .. } | Phase::AcquiringWaitSlot(_) | Phase::Done => None,
        }
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    /// Whether it waits for another's attempt: its driver reports [`Event::ClientLeft`] and [`Event::ShuttingDown`].
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting(_))
    }

    /// How often the store call that is under way has failed.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Takes an event, and returns what follows from it. An event that the machine does not wait for changes nothing.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let phase = std::mem::replace(&mut self.phase, Phase::Done);
        match phase {
            Phase::New if event == Event::Begin => self.join(),
            Phase::Joining => self.joined(now, event),
            Phase::Following { deadline } => self.followed(now, deadline, event),
            Phase::Permitting(claiming) => self.permitted(claiming, event),
            Phase::Reading(claiming) => self.read(now, claiming, event),
            Phase::Asking { claiming, in_doubt, retry } => self.asked(now, (claiming, in_doubt, retry), event),
            Phase::Withdrawing { again, retry } => self.withdrawn(now, again, retry, event),
            Phase::Probing(probing) => self.probed(now, probing, event),
            Phase::Running { .. } if event == Event::AttemptEnded => self.settle(now),
            Phase::Running { sent } if event == Event::AttemptLost => self.lost(now, sent),
            Phase::Resending(resending) => self.resent(now, resending, event),
            Phase::Settling { deadline, retry } => self.settled(now, deadline, retry, event),
            Phase::AcquiringWaitSlot(waiting) => self.placed(now, waiting, event),
            Phase::Waiting(waiting) => self.waited(now, waiting, event),
            phase @ (Phase::New | Phase::Running { .. } | Phase::Done) => self.stay(phase),
        }
    }

    /// Finds out who leads.
    fn join(&mut self) -> Vec<Action> {
        self.go(Phase::Joining, [Action::Join])
    }

    fn joined(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Leads => {
                let claiming =
                    Claiming { since: now, deadline: self.first_deadline(now), seen: None, is_given_up: false };
                self.go(Phase::Permitting(claiming), [Action::AskPermission])
            }
            Event::Follows => self.go(Phase::Following { deadline: self.first_deadline(now) }, [Action::Follow]),
            _ => self.stay(Phase::Joining),
        }
    }

    fn followed(&mut self, now: Duration, deadline: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Followed(Followed::Running { difference: None, attempt }) => {
                self.in_flight(now, AttemptLocation::Here, attempt, None)
            }
            Event::Followed(Followed::Found { decision: Decision::InFlight(attempt), .. }) => {
                self.in_flight(now, AttemptLocation::elsewhere(now), attempt, None)
            }
            Event::Followed(Followed::Released { is_same: true }) if self.may_wait() => self.reply(Reply::Released),
            // A retry that does not wait runs; and one that differs finds the key free.
            Event::Followed(Followed::Released { .. } | Followed::Absent | Followed::AskStore)
            | Event::Followed(Followed::Found { decision: Decision::Supersede, .. }) => self.join(),
            Event::Followed(Followed::Found { decision: Decision::Probe, .. }) => self.being_asked(now, None),
            Event::Followed(Followed::Found { decision, until }) => self.reply(Reply::Decided { decision, until }),
            Event::Followed(Followed::Running { difference: Some(decision), .. }) => {
                self.reply(Reply::Decided { decision, until: None })
            }
            Event::Failed => self.reply(Reply::Failed),
            Event::Timeout if now >= deadline => self.reply(Reply::LeaderUnanswered),
            _ => self.stay(Phase::Following { deadline }),
        }
    }

    fn permitted(&mut self, claiming: Claiming, event: Event) -> Vec<Action> {
        match event {
            Event::Permitted => {
                let action = claiming.action();
                self.call(Phase::Asking { claiming, in_doubt: false, retry: None }, action)
            }
            Event::Barred => self.call(Phase::Reading(claiming), Action::Look),
            Event::Retired | Event::Timeout => self.end(claiming, Reply::Retired),
            Event::Failed => self.end(claiming, Reply::Failed),
            _ => self.stay(Phase::Permitting(claiming)),
        }
    }

    /// What there is for a request that may not run.
    fn read(&mut self, now: Duration, claiming: Claiming, event: Event) -> Vec<Action> {
        let (decision, until) = match event {
            // An earlier claim of this request, under which nothing was sent.
            Event::Looked(Some(RecordView { is_own: true, .. })) => {
                return self.withdraw(None, [Action::Reply(Reply::Barred)]);
            }
            // Only where the upstream knows nothing of the attempt would the request run.
            Event::Looked(Some(RecordView { decision: Decision::Probe, version, until, .. })) => {
                return self.probe(now, (version, until), false);
            }
            Event::Looked(None) => (Decision::Supersede, None),
            Event::Looked(Some(RecordView { decision, until, .. })) => (decision, until),
            Event::Failed => return self.end(claiming, Reply::Failed),
            Event::StoreFailed { .. } | Event::Timeout => return self.end(claiming, Reply::LookFailed),
            _ => return self.stay(Phase::Reading(claiming)),
        };
        let reply = match decision {
            Decision::InFlight(attempt) => {
                return self.in_flight(now, AttemptLocation::elsewhere(now), attempt, Some(Action::ShareFound));
            }
            Decision::Supersede => Reply::Barred,
            decision => Reply::Decided { decision, until },
        };
        self.go(Phase::Done, [Action::ShareFound, Action::Reply(reply)])
    }

    fn asked(
        &mut self,
        now: Duration,
        (claiming, in_doubt, retry): (Claiming, bool, Option<Duration>),
        event: Event,
    ) -> Vec<Action> {
        match event {
            // The claim that stands, or may stand, is withdrawn: the request does not run any more. A record that was not
            // replaced may be this very claim, turned unknown; another attempt's record is not released by it.
            Event::Claimed | Event::OtherId | Event::Barred | Event::NotSuperseded if claiming.is_given_up => {
                self.withdraw(None, [])
            }
            Event::Claimed if now - claiming.since > max_age_at_start(self.limits.lease) => {
                self.withdraw(None, [Action::Reply(Reply::ClaimTooLate)])
            }
            Event::Claimed => {
                self.go(Phase::Running { sent: 1 }, [Action::ShareRunning { since: claiming.since }, Action::Run])
            }
            Event::OtherId => self.withdraw(None, [Action::Reply(Reply::OtherId)]),
            Event::Barred => self.withdraw(None, [Action::Reply(Reply::Barred)]),
            Event::NotSuperseded => self.ask_again(Claiming { seen: None, ..claiming }),
            Event::Exists(RecordView { is_own: true, .. }) => self.withdraw(Some(claiming), []),
            Event::Exists(_) if claiming.is_given_up => self.go(Phase::Done, [Action::Leave]),
            Event::Exists(RecordView { decision: Decision::Supersede, version, .. }) => {
                self.ask_again(Claiming { seen: Some(version), ..claiming })
            }
            Event::Exists(RecordView { decision: Decision::Probe, version, until, .. }) => {
                self.probe(now, (version, until), true)
            }
            Event::Exists(RecordView { decision: Decision::InFlight(attempt), .. }) => {
                let place = AttemptLocation::elsewhere(now);
                self.in_flight(now, place, attempt, Some(Action::ShareFound))
            }
            Event::Exists(RecordView { decision, until, .. }) => {
                self.go(Phase::Done, [Action::ShareFound, Action::Reply(Reply::Decided { decision, until })])
            }
            Event::Failed => self.end(claiming, Reply::Failed),
            Event::StoreFailed { in_doubt: false } if !in_doubt => self.end(claiming, Reply::ClaimFailed),
            Event::StoreFailed { .. } => {
                let retry = self.retry_at(now);
                self.go(Phase::Asking { claiming, in_doubt: true, retry }, [])
            }
            Event::Timeout if retry.is_some_and(|at| now >= at) => {
                self.go(Phase::Asking { claiming, in_doubt, retry: None }, [claiming.action()])
            }
            Event::Timeout if self.is_past(&claiming, now) => {
                let claiming = Claiming { is_given_up: true, ..claiming };
                self.go(Phase::Asking { claiming, in_doubt, retry }, [Action::Reply(Reply::ClaimUnanswered)])
            }
            _ => self.stay(Phase::Asking { claiming, in_doubt, retry }),
        }
    }

    fn withdrawn(
        &mut self,
        now: Duration,
        again: Option<Claiming>,
        retry: Option<Duration>,
        event: Event,
    ) -> Vec<Action> {
        match (event, again) {
            (Event::Settled(_), Some(claiming)) if !claiming.is_given_up => {
                self.ask_again(Claiming { seen: None, ..claiming })
            }
            (Event::Settled(_), _) => self.go(Phase::Done, [Action::Leave]),
            (Event::StoreFailed { .. }, again) => {
                let retry = self.retry_at(now);
                self.go(Phase::Withdrawing { again, retry }, [])
            }
            (Event::Timeout, again) if retry.is_some_and(|at| now >= at) => {
                self.go(Phase::Withdrawing { again, retry: None }, [Action::Withdraw])
            }
            (Event::Timeout, Some(claiming)) if self.is_past(&claiming, now) => {
                let again = Some(Claiming { is_given_up: true, ..claiming });
                self.go(Phase::Withdrawing { again, retry }, [Action::Reply(Reply::ClaimUnanswered)])
            }
            (_, again) => self.stay(Phase::Withdrawing { again, retry }),
        }
    }

    fn settle(&mut self, now: Duration) -> Vec<Action> {
        let deadline = Some(now + self.limits.settle_timeout);
        self.call(Phase::Settling { deadline, retry: None }, Action::Settle)
    }

    fn settled(
        &mut self,
        now: Duration,
        deadline: Option<Duration>,
        retry: Option<Duration>,
        event: Event,
    ) -> Vec<Action> {
        let is_unanswered = deadline.is_some();
        match event {
            Event::Settled(settlement) => {
                // Before the client hears of it: it may be back at once.
                let share = if settlement == SettleResult::Done { Action::ShareEnd } else { Action::Leave };
                let reply = is_unanswered.then_some(Action::Reply(Reply::Attempted(Some(settlement))));
                self.go(Phase::Done, [share].into_iter().chain(reply))
            }
            Event::StoreFailed { .. } => {
                let retry = self.retry_at(now);
                self.go(Phase::Settling { deadline, retry }, [])
            }
            Event::Timeout if retry.is_some_and(|at| now >= at) => {
                self.go(Phase::Settling { deadline, retry: None }, [Action::Settle])
            }
            Event::Timeout if deadline.is_some_and(|at| now >= at) => {
                self.go(Phase::Settling { deadline: None, retry }, [Action::Reply(Reply::Attempted(None))])
            }
            _ => self.stay(Phase::Settling { deadline, retry }),
        }
    }

    /// Asks the store once more, if the configuration still permits it.
    fn ask_again(&mut self, claiming: Claiming) -> Vec<Action> {
        self.go(Phase::Permitting(claiming), [Action::AskPermission])
    }

    /// The claim is certain not to stand.
    fn end(&mut self, claiming: Claiming, reply: Reply) -> Vec<Action> {
        let reply = (!claiming.is_given_up).then_some(Action::Reply(reply));
        self.go(Phase::Done, [Action::Leave].into_iter().chain(reply))
    }

    fn withdraw(&mut self, again: Option<Claiming>, first: impl IntoIterator<Item = Action>) -> Vec<Action> {
        self.failures = 0;
        let actions = first.into_iter().chain([Action::Withdraw]);
        self.go(Phase::Withdrawing { again, retry: None }, actions)
    }

    fn reply(&mut self, reply: Reply) -> Vec<Action> {
        self.go(Phase::Done, [Action::Reply(reply)])
    }

    /// Begins a store call, which has not failed yet.
    fn call(&mut self, phase: Phase, action: Action) -> Vec<Action> {
        self.failures = 0;
        self.go(phase, [action])
    }

    fn go(&mut self, phase: Phase, actions: impl IntoIterator<Item = Action>) -> Vec<Action> {
        self.phase = phase;
        actions.into_iter().collect()
    }

    fn stay(&mut self, phase: Phase) -> Vec<Action> {
        self.go(phase, [])
    }

    fn may_wait(&self) -> bool {
        !self.limits.patience.is_zero()
    }

    fn retry_at(&mut self, now: Duration) -> Option<Duration> {
        let pause = FIRST_RETRY * 2u32.saturating_pow(self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        Some(now + pause.min(LONGEST_RETRY))
    }

    /// Until when the store may take for a claim that is the first thing that the protocol asks it for.
    fn first_deadline(&self, now: Duration) -> Duration {
        self.limits.claim_by.max(now + least_for_claim(self.limits.settle_timeout))
    }

    /// A claim that the protocol asks for after it has asked something else.
    fn later_claim(&self, now: Duration, seen: Option<Version>) -> Claiming {
        Claiming { since: now, deadline: now + self.limits.settle_timeout, seen, is_given_up: false }
    }

    /// When the client of a claim is answered at the latest; nothing once it is.
    fn claim_deadline(claiming: &Claiming) -> Option<Duration> {
        (!claiming.is_given_up).then_some(claiming.deadline)
    }

    fn is_past(&self, claiming: &Claiming, now: Duration) -> bool {
        Self::claim_deadline(claiming).is_some_and(|deadline| now >= deadline)
    }
}

impl Claiming {
    fn action(&self) -> Action {
        self.seen.map_or(Action::Claim, Action::Supersede)
    }
}

fn earlier(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    [one, other].into_iter().flatten().min()
}
