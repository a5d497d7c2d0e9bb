//! The store of the search: one record, and who may ask the upstream about it.

use http::StatusCode;

use super::super::super::*;
use super::books::Books;
use super::{Ended, Operation, STRIDE, World};
use crate::idempotency::record::{AttemptToken, State};

/// The record of the key.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Record {
    /// The request that claimed it.
    pub(super) attempt: usize,
    pub(super) state: State,
    /// Its lease has run out.
    pub(super) is_past: bool,
    pub(super) by_upstream: bool,
    /// It turned unknown a moment ago, and another attempt is about to follow.
    pub(super) is_sent_again: bool,
}

impl Record {
    pub(super) fn version(&self) -> Version {
        let attempt = AttemptToken([u8::try_from(self.attempt).unwrap(); 16]);
        Version { attempt, state: self.state, until: Timestamp(u64::from(self.is_past)) }
    }
}

impl World {
    /// A request notes what the store has said.
    pub(super) fn hears_of_store(&mut self, index: usize, event: &Event) {
        let its = self.record.as_ref().map(|record| record.attempt);
        let request = self.request(index);
        match event {
            Event::Exists(_) | Event::Looked(_) => {
                (request.found, request.probed) = (Some(*event != Event::Looked(None)), its);
            }
            // What it claims next is another attempt's: the withdrawal may happen once more.
            Event::Settled(_) if request.asked == Some(Operation::Withdraw) => request.token += STRIDE,
            _ => {}
        }
    }

    /// A store call happens. Returns what the store says.
    pub(super) fn happens(&mut self, token: usize, operation: Operation, ended: Option<Ended>) -> Event {
        let view = self.record.as_ref().map(|record| RecordView {
            decision: match record.state {
                _ if record.is_sent_again || record.state == State::InFlight && !record.is_past => {
                    Decision::InFlight(RunningAttempt { elapsed: Duration::ZERO, lease_left: Some(Duration::ZERO) })
                }
                State::Completed => Decision::NotStored(StatusCode::OK),
                State::InFlight | State::Unknown if self.rules.retries => Decision::Supersede,
                State::InFlight | State::Unknown if self.books.is_quiet => Decision::Probe,
                State::InFlight | State::Unknown => Decision::Unknown,
            },
            until: None,
            version: record.version(),
            is_own: record.attempt == token && record.state == State::Unknown,
        });
        let fresh =
            Record { attempt: token, state: State::InFlight, is_past: false, by_upstream: false, is_sent_again: false };
        match (operation, &mut self.record, view) {
            (Operation::Look, _, view) => Event::Looked(view),
            (Operation::Claim, record @ None, _) => {
                *record = Some(fresh);
                Event::Claimed
            }
            (Operation::Claim | Operation::Supersede(_), Some(record), _)
                if record.attempt == token && record.state == State::InFlight =>
            {
                Event::Claimed
            }
            (Operation::Claim, Some(_), Some(view)) => Event::Exists(view),
            (Operation::Supersede(seen), Some(record), _) if record.version() == seen => {
                assert!(record.is_past || record.state == State::Unknown, "it is not alive");
                let has_effect = self.books.has_effect || !self.books.pending.is_empty();
                assert!(self.rules.retries || self.rules.probes && !has_effect, "it took effect, or may yet");
                *record = fresh;
                (self.runs, self.books) = (0, Books::default());
                Event::Claimed
            }
            (Operation::Supersede(_), ..) => Event::NotSuperseded,
            (Operation::Settle | Operation::Hold | Operation::Withdraw, stands, _) => {
                let ended = if operation == Operation::Withdraw { Ended::Releases } else { ended.expect("it ended") };
                let is_its = stands.as_ref().is_some_and(|record| record.attempt == token);
                let state = stands.as_ref().map(|record| (record.state, record.by_upstream));
                Event::Settled(match (ended, state) {
                    (Ended::Releases, None) => SettleResult::Done,
                    (Ended::Completes, Some((State::Completed, false))) if is_its => SettleResult::Done,
                    (_, Some((State::Completed, _))) if is_its => SettleResult::CompletedOtherwise,
                    (Ended::Releases, Some(_)) if is_its => {
                        let request = self.requests[token % STRIDE].as_ref();
                        let runs = request.is_some_and(|request| request.is_running && request.token == token);
                        assert!(
                            operation != Operation::Withdraw || !runs,
                            "a withdrawal takes the record of what runs"
                        );
                        (self.record, self.runs, self.books) = (None, 0, Books::default());
                        SettleResult::Done
                    }
                    (_, Some(_)) if is_its => {
                        let state = if ended == Ended::Completes { State::Completed } else { State::Unknown };
                        let is_sent_again = operation == Operation::Hold;
                        *stands = Some(Record { state, is_sent_again, ..fresh });
                        SettleResult::Done
                    }
                    _ => SettleResult::Lost,
                })
            }
            (Operation::Reclaim, Some(record), _) if record.attempt == token && record.state == State::InFlight => {
                Event::Claimed
            }
            (Operation::Reclaim, Some(record), _)
                if record.attempt + STRIDE == token && record.state == State::Unknown =>
            {
                *record = fresh;
                self.runs = 0;
                Event::Claimed
            }
            (Operation::Reclaim, ..) => Event::NotSuperseded,
            (Operation::LockProbe, ..) => match *self.lock.get_or_insert(token % STRIDE) {
                holder if holder == token % STRIDE => {
                    self.has_asked = true;
                    Event::ProbeLocked
                }
                _ => Event::ProbeTaken,
            },
            (Operation::CheckProbe, ..) if self.lock.is_some() => Event::ProbeTaken,
            (Operation::CheckProbe, ..) => Event::ProbeFree,
            (Operation::Recover, stands, _) => {
                let its = self.requests[token % STRIDE].as_ref().and_then(|request| request.probed);
                Event::Settled(match stands {
                    Some(record) if Some(record.attempt) != its => SettleResult::Lost,
                    Some(Record { state: State::Completed, .. }) => SettleResult::CompletedOtherwise,
                    Some(record) => {
                        (record.state, record.by_upstream) = (State::Completed, true);
                        SettleResult::Done
                    }
                    None => SettleResult::Lost,
                })
            }
            (
                Operation::Claim | Operation::Run | Operation::Probe | Operation::Pause | Operation::Follow { .. },
                ..,
            ) => {
                unreachable!("no store call")
            }
        }
    }
}
