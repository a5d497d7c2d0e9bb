//! What the store says where it does not just acknowledge.

use super::{ActionExecutor, FOUND, Missing, needed};
use crate::gate::claim::second_look::SecondLook;
use crate::gate::claim::single_flight::FoundRecord;
use crate::gate::inquiry::probe::ProbeLock;
use crate::http::problem::Problem;
use crate::idempotency::decide::Decision;
use crate::idempotency::protocol::{Event, RecordView, SettleResult};
use crate::idempotency::record::{AttemptToken, Record, State, Timestamp, Version};
use crate::store::{Error, ErrorKind, Settled};
use crate::telemetry::outcome::Code;

/// What `request-expired` adds where the route would let a retry of an unknown outcome run, and this retry is too late for it.
const EARLIER_MAY_HAVE_RUN: &str =
    ", but an earlier request with this key may have taken effect: do not send it with a new key";

impl ActionExecutor {
    /// A record that stands, as it concerns this request.
    pub(super) async fn view(&mut self, record: Record, now: Timestamp) -> Result<RecordView, Problem> {
        // To compare the request may take as long as a follower waits.
        self.leader.iter().for_each(|leader| leader.set_knows_record(true));
        let decision = match &self.request {
            Some(request) => request.decide(&record, now).await?,
            // Its client has been answered: nothing depends on it.
            None => Decision::Unknown,
        };
        if decision == Decision::Supersede {
            self.leader.iter().for_each(|leader| leader.set_knows_record(false));
            // A request that may not run is not the whole story of its key.
            if record.state != State::Completed && (record.state == State::InFlight || record.until > now) {
                let late = self.problem.iter_mut().filter(|problem| problem.code == Code::RequestExpired);
                late.for_each(|problem| problem.detail.push_str(EARLIER_MAY_HAVE_RUN));
            }
        }
        let version @ Version { attempt, state, until } = record.version();
        let is_own = state == State::Unknown && self.fresh.as_ref().is_some_and(|fresh| fresh.attempt == attempt);
        self.found = Some(FoundRecord { record, now, asked: self.asked });
        Ok(RecordView { decision, until: Some(until), version, is_own })
    }

    /// A claim for the next attempt that was in doubt was not written: the record still says that the last one is unknown.
    pub(super) fn held_before(&self, settled: Settled) -> Settled {
        let held = |record: &Record| {
            let is_its = self.attempted.as_ref().is_some_and(|attempted| attempted.is_of(record.attempt));
            is_its && record.state == State::Unknown
        };
        match settled {
            Settled::NotCurrent { record: Some(record) } if held(&record) => Settled::Done { until: record.until },
            settled => settled,
        }
    }

    /// What became of the right to ask the upstream.
    pub(super) fn locked(&mut self, locked: Result<Option<ProbeLock>, Error>) -> Event {
        match locked {
            Ok(Some(lock)) => {
                self.lock = Some(lock);
                Event::ProbeLocked
            }
            Ok(None) => Event::ProbeTaken,
            Err(error) => self.probe_failed(&error),
        }
    }

    /// Whether a request has that right.
    pub(super) fn checked(&self, is_taken: Result<bool, Error>) -> Event {
        match is_taken {
            Ok(true) => Event::ProbeTaken,
            Ok(false) => Event::ProbeFree,
            Err(error) => self.probe_failed(&error),
        }
    }

    fn probe_failed(&self, error: &Error) -> Event {
        tracing::debug!(%error, record = %self.id, "the store did not say who has the right to ask the upstream");
        Event::StoreFailed { in_doubt: false }
    }

    /// What became of a settlement that did not find the record as its attempt left it.
    pub(super) fn superseded(&self, record: Option<&Record>) -> SettleResult {
        let attempt = match self.attempted {
            None if self.probed.is_some() => self.unknown(),
            _ => self.attempt(),
        };
        let is_its = |record: &Record| attempt.as_ref().is_ok_and(|attempt| record.is_completed_by(*attempt));
        if record.is_some_and(is_its) { SettleResult::CompletedOtherwise } else { SettleResult::Lost }
    }

    /// The attempt of the unknown record that was found.
    pub(super) fn unknown(&self) -> Result<AttemptToken, Missing> {
        needed(self.found.as_ref(), FOUND).map(|found| found.record.attempt)
    }

    /// What to look at once its claim stands. A request whose client was answered runs nothing.
    pub(super) fn second_look(&self) -> SecondLook {
        self.request.as_ref().map_or_else(SecondLook::nothing, |request| request.second_look())
    }

    /// A claim failed. Where it is certain not to stand, that is logged with the reply.
    pub(super) fn claim_failed(&mut self, error: Error, what: &'static str, failures: u32) -> Event {
        // What cannot be read is there, and another try reads nothing else.
        let in_doubt = matches!(error, Error::Indeterminate(_)) && error.cause().kind != ErrorKind::Corrupt;
        // A later attempt of a resend takes the place of the unknown record of the one before, and must not be released.
        if let (true, None, Some(fresh)) = (in_doubt, &self.attempted, &self.fresh) {
            self.doubts.get_or_insert_default().add(fresh.attempt);
        }
        if in_doubt || failures > 0 {
            self.failed_again(&error, what, failures);
        }
        if shows_record(&error) {
            self.leader.iter().for_each(|leader| leader.set_knows_record(true));
        }
        // That the store has a record counts, whatever fails later.
        if !self.error.as_ref().is_some_and(shows_record) {
            self.error = Some(error);
        }
        Event::StoreFailed { in_doubt }
    }

    pub(super) fn failed_again(&self, error: &Error, what: &'static str, failures: u32) {
        tracing::debug!(%error, record = %self.id, what, failures, "the store failed; asking again until it answers");
    }
}

/// Whether a failed claim shows that the store has something of the key: on its way to another database, in one that this gate
/// does not know, or something that cannot be read.
pub(super) fn shows_record(error: &Error) -> bool {
    matches!(error.cause().kind, ErrorKind::Moved | ErrorKind::Corrupt)
}
