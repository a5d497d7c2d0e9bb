//! Waiting for another's attempt: what the machine does from when it meets one until its client has a reply.

use std::time::Duration;

use super::super::super::decide::{Decision, RunningAttempt};
use super::super::{Action, Event, Followed, RecordView, Reply};
use super::{Phase, Protocol};

/// The first pause between two looks at a record that an attempt of another process holds; each one after it is twice as
/// long, up to [`LONGEST_LOOK`].
const FIRST_LOOK: Duration = Duration::from_millis(50);
const LONGEST_LOOK: Duration = Duration::from_secs(1);

/// When a request is to come back whose record another gate asks the upstream about.
const ANOTHER_ASKS: RunningAttempt =
    RunningAttempt { elapsed: Duration::ZERO, lease_left: Some(Duration::from_secs(1)) };

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Waiting {
    place: AttemptLocation,
    /// The attempt, as it was at the age of `at`.
    attempt: RunningAttempt,
    at: Duration,
    /// When the client is answered at the latest.
    deadline: Duration,
    /// The pause before the next look at a record of another process.
    pause: Duration,
    /// Another request was seen to ask the upstream about the attempt.
    is_asked: bool,
}

/// Where the attempt is that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttemptLocation {
    /// In this process: its leader is followed.
    Here,
    /// In another process, or in none. The record is looked at again at this age.
    OtherProcess { look: Duration },
    /// It may have ended: the request finds out, following another or leading.
    Looking { leads: bool },
    /// A probe is due: the request, which leads, finds out whether another asks the upstream at the moment.
    Checking,
    /// None does. The record may say by now what the upstream said.
    LookingAgain,
}

impl Protocol {
    pub(super) fn placed(&mut self, now: Duration, waiting: Waiting, event: Event) -> Vec<Action> {
        match event {
            Event::WaitSlotAcquired => {
                let action = if waiting.place == AttemptLocation::Here { Action::FollowToEnd } else { Action::Watch };
                self.go(Phase::Waiting(waiting), [action])
            }
            Event::WaitSlotsFull => self.reply(waiting.in_flight(now)),
            _ => self.stay(Phase::AcquiringWaitSlot(waiting)),
        }
    }

    pub(super) fn waited(&mut self, now: Duration, waiting: Waiting, event: Event) -> Vec<Action> {
        let leads = matches!(
            waiting.place,
            AttemptLocation::Looking { leads: true } | AttemptLocation::Checking | AttemptLocation::LookingAgain
        );
        match event {
            Event::ClientLeft => self.stop_waiting(leads, None),
            Event::Timeout if now >= waiting.deadline => self.stop_waiting(leads, Some(waiting.in_flight(now))),
            Event::ShuttingDown => {
                // By then the attempts of this process have ended, and no other is waited for.
                let deadline = waiting.deadline.min(now + self.limits.settle_timeout);
                self.stay(Phase::Waiting(Waiting { deadline, ..waiting }))
            }
            event => match waiting.place {
                AttemptLocation::Here => self.waited_here(waiting, event),
                AttemptLocation::OtherProcess { look } => self.waited_elsewhere(now, waiting, look, event),
                AttemptLocation::Looking { .. } | AttemptLocation::LookingAgain => {
                    self.looked(now, waiting, leads, event)
                }
                AttemptLocation::Checking => self.checked(now, waiting, event),
            },
        }
    }

    fn waited_here(&mut self, waiting: Waiting, event: Event) -> Vec<Action> {
        match event {
            Event::Followed(Followed::Released { .. }) => self.reply(Reply::Released),
            Event::Failed => self.reply(Reply::Failed),
            // It ended, or the upstream was asked about it, and nothing is known. A retry may ask; this request asks nothing.
            Event::Followed(Followed::Found { decision: Decision::Probe, until }) => {
                self.reply(Reply::Decided { decision: Decision::Unknown, until })
            }
            Event::Followed(_) => self.look(Waiting { pause: FIRST_LOOK, ..waiting }),
            _ => self.stay(Phase::Waiting(waiting)),
        }
    }

    fn waited_elsewhere(&mut self, now: Duration, waiting: Waiting, look: Duration, event: Event) -> Vec<Action> {
        let is_due = event == Event::Changed || event == Event::Timeout && now >= look;
        if !is_due {
            return self.stay(Phase::Waiting(waiting));
        }
        self.look(Waiting { pause: (waiting.pause * 2).min(LONGEST_LOOK), ..waiting })
    }

    /// What became of the attempt that the request waits for?
    fn looked(&mut self, now: Duration, waiting: Waiting, leads: bool, event: Event) -> Vec<Action> {
        let share = leads.then_some(Action::ShareFound);
        let (decision, until) = match event {
            Event::Leads => {
                let waiting = Waiting { place: AttemptLocation::Looking { leads: true }, ..waiting };
                return self.call(Phase::Waiting(waiting), Action::Look);
            }
            Event::Follows => return self.go(Phase::Waiting(waiting), [Action::Follow]),
            Event::Followed(Followed::Running { difference: None, attempt }) => {
                let waiting = Waiting { place: AttemptLocation::Here, attempt, at: now, ..waiting };
                return self.go(Phase::Waiting(waiting), [Action::FollowToEnd]);
            }
            Event::Followed(Followed::Released { is_same: true }) => return self.reply(Reply::Released),
            // The store is away, and may be back in time; or the leader says nothing about this request.
            Event::StoreFailed { .. } | Event::Followed(Followed::Released { is_same: false } | Followed::AskStore) => {
                return self.wait_elsewhere(now, waiting, leads.then_some(Action::Leave));
            }
            Event::Failed => return self.stop_waiting(leads, Some(Reply::Failed)),
            Event::Looked(None) | Event::Followed(Followed::Absent) => (Decision::Supersede, None),
            Event::Looked(Some(RecordView { decision, until, .. }))
            | Event::Followed(Followed::Found { decision, until }) => (decision, until),
            Event::Followed(Followed::Running { difference: Some(decision), .. }) => (decision, None),
            _ => return self.stay(Phase::Waiting(waiting)),
        };
        match decision {
            Decision::InFlight(attempt) => {
                self.wait_elsewhere(now, Waiting { attempt, at: now, is_asked: false, ..waiting }, share)
            }
            // A request that waits asks the upstream nothing. Another may, or have found out nothing.
            Decision::Probe => match waiting.place {
                AttemptLocation::Looking { leads: true } => {
                    let waiting = Waiting { place: AttemptLocation::Checking, ..waiting };
                    self.call(Phase::Waiting(waiting), Action::CheckProbe)
                }
                AttemptLocation::LookingAgain if waiting.is_asked => {
                    let reply = Reply::Decided { decision: Decision::Unknown, until };
                    self.go(Phase::Done, [Action::ShareFound, Action::Reply(reply)])
                }
                // A retry asks.
                AttemptLocation::LookingAgain => {
                    self.go(Phase::Done, [Action::Leave, Action::Reply(Reply::NothingLeft)])
                }
                // So says a leader who has seen another ask, or has asked itself.
                _ => self.wait_for_probe(now, Waiting { is_asked: true, ..waiting }, share),
            },
            // A new attempt would be due, and a request that waits starts none.
            Decision::Supersede => self.go(Phase::Done, share.into_iter().chain([Action::Reply(Reply::NothingLeft)])),
            decision => {
                let reply = Action::Reply(Reply::Decided { decision, until });
                self.go(Phase::Done, share.into_iter().chain([reply]))
            }
        }
    }

    /// Does another request ask the upstream at the moment?
    fn checked(&mut self, now: Duration, waiting: Waiting, event: Event) -> Vec<Action> {
        match event {
            Event::ProbeFree => {
                self.call(Phase::Waiting(Waiting { place: AttemptLocation::LookingAgain, ..waiting }), Action::Look)
            }
            Event::ProbeTaken => {
                self.wait_for_probe(now, Waiting { is_asked: true, ..waiting }, Some(Action::ShareFound))
            }
            Event::StoreFailed { .. } => self.wait_elsewhere(now, waiting, Some(Action::Leave)),
            Event::Failed => self.stop_waiting(true, Some(Reply::Failed)),
            _ => self.stay(Phase::Waiting(waiting)),
        }
    }

    /// The record does not change while another asks: it is looked at again.
    fn wait_for_probe(&mut self, now: Duration, waiting: Waiting, first: Option<Action>) -> Vec<Action> {
        let place = AttemptLocation::OtherProcess { look: now + waiting.pause };
        self.go(Phase::Waiting(Waiting { place, ..waiting }), first)
    }

    /// An attempt is in flight: the request waits where it may. `share` comes first.
    pub(super) fn in_flight(
        &mut self,
        now: Duration,
        place: AttemptLocation,
        attempt: RunningAttempt,
        share: Option<Action>,
    ) -> Vec<Action> {
        self.begin_to_wait(now, place, attempt, false, share)
    }

    /// The same, where another request asks the upstream about the attempt.
    pub(super) fn being_asked(&mut self, now: Duration, share: Option<Action>) -> Vec<Action> {
        self.begin_to_wait(now, AttemptLocation::elsewhere(now), ANOTHER_ASKS, true, share)
    }

    fn begin_to_wait(
        &mut self,
        now: Duration,
        place: AttemptLocation,
        attempt: RunningAttempt,
        is_asked: bool,
        share: Option<Action>,
    ) -> Vec<Action> {
        let deadline = self.limits.patience;
        let waiting = Waiting { place, attempt, at: now, deadline, pause: FIRST_LOOK, is_asked };
        if self.may_wait() {
            return self.go(Phase::AcquiringWaitSlot(waiting), share.into_iter().chain([Action::AcquireWaitSlot]));
        }
        self.go(Phase::Done, share.into_iter().chain([Action::Reply(waiting.in_flight(now))]))
    }

    fn look(&mut self, waiting: Waiting) -> Vec<Action> {
        self.go(Phase::Waiting(Waiting { place: AttemptLocation::Looking { leads: false }, ..waiting }), [Action::Join])
    }

    fn wait_elsewhere(&mut self, now: Duration, waiting: Waiting, first: Option<Action>) -> Vec<Action> {
        let place = AttemptLocation::OtherProcess { look: now + waiting.pause };
        self.go(Phase::Waiting(Waiting { place, ..waiting }), first.into_iter().chain([Action::Watch]))
    }

    fn stop_waiting(&mut self, leads: bool, reply: Option<Reply>) -> Vec<Action> {
        self.go(Phase::Done, leads.then_some(Action::Leave).into_iter().chain(reply.map(Action::Reply)))
    }
}

impl AttemptLocation {
    /// Where the attempt of a record is that was just read.
    pub(super) fn elsewhere(now: Duration) -> Self {
        Self::OtherProcess { look: now + FIRST_LOOK }
    }
}

impl Waiting {
    /// The age at which the request acts by itself.
    pub(super) fn timeout(&self) -> Duration {
        match self.place {
            AttemptLocation::OtherProcess { look } => look.min(self.deadline),
            AttemptLocation::Here
            | AttemptLocation::Looking { .. }
            | AttemptLocation::Checking
            | AttemptLocation::LookingAgain => self.deadline,
        }
    }

    /// The reply that does not wait.
    fn in_flight(&self, now: Duration) -> Reply {
        let attempt = self.attempt.after(now.saturating_sub(self.at));
        Reply::Decided { decision: Decision::InFlight(attempt), until: None }
    }
}
