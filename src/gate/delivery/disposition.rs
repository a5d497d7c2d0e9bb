//! What becomes of a request that no client waits for: one that was accepted, or a message of a broker.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::header::RETRY_AFTER;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::gate::Gate;
use crate::gate::answer::{Client, Reply};
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::driver::drive;
use crate::idempotency::codec::Head;
use crate::idempotency::delivery::{Deliver, NextTry};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::{Record, RecordId, State, Timestamp};
use crate::idempotency::recovery::Recovery;
use crate::store::{Error, RecordEntry};
use crate::telemetry::outcome::{Code, Outcome};

/// How long a request waits that could not be run now, where nothing says how long.
const DEFAULT_WAIT: Duration = Duration::from_millis(500);

/// How long a request waits if an attempt runs, or if the gate is still recording its end.
const RUNNING: Duration = Duration::from_secs(10);

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Its record has its end.
    Done,
    /// It did not run now. It is tried again after a time, and no attempt counts.
    Wait(Duration),
    /// An attempt failed, and another may follow. It is tried again after a time.
    Again {
        /// How long.
        pause: Duration,
        /// How the attempt ended.
        note: String,
    },
    /// It is given up.
    GiveUp {
        /// An attempt failed, and another could have followed.
        is_attempt: bool,
        /// Why.
        note: String,
    },
}

impl Disposition {
    /// It is given up: whether it ran is unknown.
    pub(super) fn outcome_unknown() -> Self {
        Self::GiveUp { is_attempt: false, note: Code::OutcomeUnknown.as_str().to_owned() }
    }
}

/// What was tried before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tries {
    /// How many attempts failed, with others to follow.
    pub attempts: u32,
    /// Since when it is tried.
    pub age: Duration,
}

impl Gate {
    /// Runs a request under the claim of its key, as if a client waited for it. An error is one of the store, which does not
    /// say what became of the request.
    pub(super) async fn try_unattended(&self, request: ProtectedRequest, tries: Tries) -> Result<Disposition, Error> {
        let (id, is_accepted, began) = (request.id, request.delivery.is_some(), Instant::now());
        let (route, state) = (Arc::clone(&request.route), Arc::clone(&request.state));
        let (client, reply) = oneshot::channel();
        tokio::spawn(Box::pin(drive(request, Client(client))));
        match reply.await {
            Ok(reply) => {
                if let Some(is_reached) = is_reached(&reply).filter(|_| !self.was_prevented(&reply)) {
                    state.circuit.ended(is_reached);
                }
                let tries = Tries { age: tries.age.saturating_add(began.elapsed()), ..tries };
                self.disposition((id, is_accepted), reply, tries, &route.policy).await
            }
            // A bug: how far it came, its record says.
            Err(_) => Ok(Disposition::Wait(RUNNING)),
        }
    }

    /// Whether a shutdown may have kept a request from its upstream. Nothing was sent.
    fn was_prevented(&self, reply: &Reply) -> bool {
        reply.outcome == Outcome::Problem(Code::UpstreamUnreachable) && self.shared.drain.is_over()
    }

    async fn disposition(
        &self,
        (id, is_accepted): (RecordId, bool),
        reply: Reply,
        tries: Tries,
        policy: &Policy,
    ) -> Result<Disposition, Error> {
        let asked = retry_after(reply.response.headers());
        let word = reply.outcome.as_str();
        let again = |note| Ok(again(&policy.deliver, tries, asked, note));
        // For a while, a gate may still go by a record that an operator has purged: by a cache, or by an attempt of its own that
        // runs on. That does not end a request which was accepted since.
        if is_accepted && is_of_a_record(reply.outcome) {
            let found = self.shared.store.get(id).await?;
            if found.is_none_or(|listed| listed.record.state == State::InFlight) {
                return Ok(Disposition::Wait(DEFAULT_WAIT));
            }
        }
        if self.was_prevented(&reply) {
            return Ok(Disposition::Wait(DEFAULT_WAIT));
        }
        match reply.outcome {
            Outcome::Executed | Outcome::Replayed | Outcome::Recovered => return Ok(Disposition::Done),
            Outcome::Problem(Code::ResponseNotStored) => return Ok(Disposition::Done),
            Outcome::Released => return again(format!("{word}: {}", reply.response.status().as_u16())),
            Outcome::Problem(Code::KeyReused | Code::CallerDiffers | Code::RequestExpired) => {
                return Ok(Disposition::GiveUp { is_attempt: false, note: word.to_owned() });
            }
            Outcome::Problem(Code::InFlight | Code::Overloaded | Code::StoreUnavailable | Code::QuotaExceeded) => {
                return Ok(Disposition::Wait(asked.unwrap_or(DEFAULT_WAIT)));
            }
            _ => {}
        }
        // What the record says counts: an attempt that failed may have been released or held.
        // An expired record still tells how this attempt ended; an older record would have been superseded.
        let found = self.shared.store.get(id).await?;
        let Some(RecordEntry { record, now, .. }) = found else { return again(word.to_owned()) };
        // Before an upstream may be asked about an unknown outcome, there is no attempt.
        if reply.is_problem()
            && let (Outcome::Problem(Code::OutcomeUnknown), Recovery::Probe(probe)) = (reply.outcome, &policy.recovery)
            && state_at(&record, now) == State::Unknown
            && let Ok(head) = Head::decode(&record.head)
            && let Some(wait) = probe.due_in(&record, &head.details(), policy.unknown_ttl, now)
            && !wait.is_zero()
        {
            return Ok(Disposition::Wait(wait));
        }
        match (state_at(&record, now), &policy.recovery) {
            (State::Completed, _) => Ok(Disposition::Done),
            (State::InFlight, _) => Ok(Disposition::Wait(RUNNING)),
            // The gate has the answer, and goes on recording it. The record is unknown until then where its lease is past.
            (State::Unknown, _) if reply.outcome == Outcome::Unrecorded => Ok(Disposition::Wait(RUNNING)),
            (State::Unknown, Recovery::Retry | Recovery::Probe(_)) => again(word.to_owned()),
            // An operator finds out, or the upstream says so itself. Where it turns out that the request did not run, the
            // operator has it tried again: its client does not come back.
            (State::Unknown, Recovery::Hold | Recovery::Resend(_)) => Ok(Disposition::outcome_unknown()),
        }
    }
}

/// Whether a request is answered by what its key has a record of already.
fn is_of_a_record(outcome: Outcome) -> bool {
    let problem = |code| matches!(code, Code::ResponseNotStored | Code::KeyReused | Code::CallerDiffers);
    match outcome {
        Outcome::Replayed => true,
        Outcome::Problem(code) => problem(code),
        _ => false,
    }
}

/// Whether the upstream was reached; nothing where it was not asked, or may not have been.
fn is_reached(reply: &Reply) -> Option<bool> {
    match reply.outcome {
        // It may have answered, and says nothing of attempts.
        _ if reply.is_of_question => None,
        // An answer that is held.
        Outcome::Problem(Code::OutcomeUnknown) if !reply.is_problem() => Some(true),
        Outcome::Executed | Outcome::Released | Outcome::Unrecorded => Some(true),
        Outcome::Problem(Code::UpstreamBroken | Code::UpstreamTimeout) => Some(true),
        Outcome::Problem(Code::UpstreamUnreachable) => Some(false),
        _ => None,
    }
}

/// The state of a record by its times: no reaper need have seen that its lease is past. A gate whose attempt has ended while the
/// store was away has some time left to say so.
fn state_at(record: &Record, now: Timestamp) -> State {
    let is_lost = record.state == State::InFlight && record.until.plus(RUNNING) <= now;
    if is_lost { State::Unknown } else { record.state }
}

/// It is tried again, or given up.
fn again(deliver: &Deliver, tries: Tries, asked: Option<Duration>, note: String) -> Disposition {
    let attempts = tries.attempts.saturating_add(1);
    let given_up = |note| Disposition::GiveUp { is_attempt: true, note };
    match deliver.next_try(attempts, tries.age, asked, fastrand::u64(..)) {
        NextTry::Again(pause) => Disposition::Again { pause, note },
        NextTry::Exhausted if attempts == 1 => given_up(format!("{note}, after 1 attempt")),
        NextTry::Exhausted => given_up(format!("{note}, after {attempts} attempts")),
        NextTry::TooOld => given_up(format!("{note}, and deliver.give_up_after is over")),
    }
}

/// How long an upstream wants to be left alone (RFC 9110, 10.2.3): seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More than fits is very long as well.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(std::time::SystemTime::now()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Response;

    use super::*;
    use crate::gate::tests::gate_of;
    use crate::http::body::Body;
    use crate::http::problem::Problem;
    use crate::idempotency::fingerprint::{Fingerprint, Recipe};
    use crate::idempotency::key::Key;
    use crate::idempotency::record::{AttemptToken, RequestId};
    use crate::idempotency::recovery::{Probe, ProbePath};
    use crate::store::{NewRecord, OriginId, Settlement};

    /// The store was away when the attempt ended. It came back, and the lease of the record was past.
    #[tokio::test]
    async fn what_the_gate_records_yet_is_not_given_up_as_unknown() {
        let (gate, id, attempt) = (gate_of(Vec::new()), RecordId([1; 32]), AttemptToken([1; 16]));
        let (minute, head) = (Duration::from_secs(60), Bytes::new());
        let fresh = NewRecord { attempt, origin: OriginId(1), lease: minute, ttl: minute, unknown_ttl: minute, head };
        gate.shared.store.claim(id, fresh).await.unwrap();
        gate.shared.store.settle(id, attempt, Settlement::Hold { cause: Bytes::new() }).await.unwrap();
        let tries = Tries { attempts: 0, age: Duration::ZERO };
        for is_accepted in [true, false] {
            let reply = Reply::new(Outcome::Unrecorded, Response::new(Body::empty()));
            let disposition = gate.disposition((id, is_accepted), reply, tries, &Policy::default()).await.unwrap();
            assert_eq!(disposition, Disposition::Wait(RUNNING));
        }
    }

    #[test]
    fn a_retry_after_that_no_number_holds_is_very_long() {
        let of = |value: &'static str| {
            retry_after(&HeaderMap::from_iter([(RETRY_AFTER, http::HeaderValue::from_static(value))]))
        };
        assert_eq!(of("99999999999999999999999999"), Some(Duration::from_secs(u64::MAX)));
        assert_eq!((of("3"), of("+5"), of("-1"), of("")), (Some(Duration::from_secs(3)), None, None, None));
    }

    #[tokio::test]
    async fn a_record_that_is_purged_ends_nothing_that_was_accepted_since() {
        let (gate, id) = (gate_of(Vec::new()), RecordId([1; 32]));
        let disposition = async |is_accepted, outcome| {
            let (reply, policy) = (Reply::new(outcome, Response::new(Body::empty())), Policy::default());
            let tries = Tries { attempts: 0, age: Duration::ZERO };
            gate.disposition((id, is_accepted), reply, tries, &policy).await.unwrap()
        };
        let reused = Outcome::Problem(Code::KeyReused);
        for outcome in [Outcome::Replayed, Outcome::Problem(Code::ResponseNotStored), reused] {
            assert_eq!(disposition(true, outcome).await, Disposition::Wait(DEFAULT_WAIT));
        }
        assert_eq!(disposition(false, Outcome::Replayed).await, Disposition::Done);
        let [lease, ttl, unknown_ttl] = [Duration::from_millis(500); 3];
        let fresh = NewRecord {
            attempt: AttemptToken([1; 16]),
            origin: OriginId(1),
            lease,
            ttl,
            unknown_ttl,
            head: Bytes::new(),
        };
        gate.shared.store.claim(id, fresh.clone()).await.unwrap();
        assert_eq!(disposition(true, reused).await, Disposition::Wait(DEFAULT_WAIT), "another attempt runs");
        let end = Settlement::Hold { cause: Bytes::new() };
        gate.shared.store.settle(id, fresh.attempt, end).await.unwrap();
        assert_eq!(disposition(true, Outcome::Replayed).await, Disposition::Done);
        assert!(matches!(disposition(true, reused).await, Disposition::GiveUp { is_attempt: false, .. }));
    }

    /// A proxy before a dead upstream answers 502 again and again, and the upstream says that it knows nothing of the request.
    #[tokio::test]
    async fn an_answer_that_is_held_counts_as_an_attempt_and_a_wait_does_not() {
        let (gate, id) = (gate_of(Vec::new()), RecordId([1; 32]));
        let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
        let key = Key::parse("k", 255).unwrap();
        let head = Head::new(fingerprint, http::Method::POST, "/", &key).encode();
        let (attempt, lease) = (AttemptToken([1; 16]), Duration::from_secs(60));
        let fresh = NewRecord { attempt, origin: OriginId(1), lease, ttl: lease, unknown_ttl: lease, head };
        gate.shared.store.claim(id, fresh).await.unwrap();
        gate.shared.store.settle(id, attempt, Settlement::Hold { cause: Bytes::new() }).await.unwrap();
        let path = ProbePath::parse("/by/{key}").unwrap();
        let probe = Probe { path, after: Some(Duration::from_secs(20)), every: None, headers: Vec::new() };
        let policy = Policy { recovery: Recovery::Probe(probe), unknown_ttl: lease, ..Policy::default() };
        let disposition = async |reply| {
            let tries = Tries { attempts: 0, age: Duration::ZERO };
            gate.disposition((id, true), reply, tries, &policy).await.unwrap()
        };
        let outcome = Outcome::Problem(Code::OutcomeUnknown);
        let held = || Reply::new(outcome, Response::new(Body::empty()));
        assert_eq!(is_reached(&held()), Some(true));
        assert!(matches!(disposition(held()).await, Disposition::Again { .. }));
        let unreachable = Problem::new(Code::UpstreamUnreachable, "it was asked");
        let unreachable = Reply::problem(unreachable, None, RequestId(std::num::NonZeroU64::MIN));
        assert_eq!(is_reached(&unreachable), Some(false));
        assert_eq!(is_reached(&unreachable.of_question()), None);
        let too_early = || {
            Reply::problem(
                Problem::new(Code::OutcomeUnknown, "it may have run"),
                None,
                RequestId(std::num::NonZeroU64::MIN),
            )
        };
        assert_eq!(is_reached(&too_early()), None);
        assert!(matches!(disposition(too_early()).await, Disposition::Wait(_)));
    }

    #[tokio::test]
    async fn what_a_shutdown_keeps_from_the_upstream_is_no_attempt() {
        let (gate, id) = (gate_of(Vec::new()), RecordId([1; 32]));
        let disposition = async || {
            let problem = Problem::new(Code::UpstreamUnreachable, "nothing was sent");
            let reply = Reply::problem(problem, None, RequestId(std::num::NonZeroU64::MIN));
            let tries = Tries { attempts: 1000, age: Duration::ZERO };
            gate.disposition((id, true), reply, tries, &Policy::default()).await.unwrap()
        };
        assert!(matches!(disposition().await, Disposition::GiveUp { is_attempt: true, .. }));
        gate.shared.drain.end();
        assert_eq!(disposition().await, Disposition::Wait(DEFAULT_WAIT));
    }

    #[test]
    fn what_is_given_up_says_why() {
        let note = |most, age, tries| {
            let deliver = Deliver { attempts: most, give_up_after: Duration::from_secs(60), ..Deliver::default() };
            let tries = Tries { attempts: tries, age: Duration::from_secs(age) };
            match again(&deliver, tries, None, "released: 503".to_owned()) {
                Disposition::GiveUp { note, .. } => note,
                other => format!("{other:?}"),
            }
        };
        assert_eq!(note(1, 0, 0), "released: 503, after 1 attempt");
        assert_eq!(note(20, 0, 19), "released: 503, after 20 attempts");
        // It may be a message, which was not accepted.
        assert_eq!(note(20, 60, 3), "released: 503, and deliver.give_up_after is over");
    }

    #[test]
    fn an_attempt_past_its_lease_is_unknown() {
        let of = |state| Record {
            attempt: AttemptToken([1; 16]),
            state,
            claimed_at: Timestamp(0),
            until: Timestamp(10),
            head: Bytes::new(),
            answer: None,
        };
        let lost = Timestamp(10).plus(RUNNING);
        assert_eq!(state_at(&of(State::InFlight), Timestamp(lost.0 - 1)), State::InFlight);
        assert_eq!(state_at(&of(State::InFlight), lost), State::Unknown);
        assert_eq!(state_at(&of(State::Completed), lost), State::Completed);
    }

    #[test]
    fn a_retry_after_is_seconds_or_a_date() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(read("120"), Some(Duration::from_secs(120)));
        assert_eq!(read("soon"), None);
        assert_eq!(read("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        let later = httpdate::fmt_http_date(std::time::SystemTime::now() + Duration::from_secs(60));
        assert!(read(&later).is_some_and(|wait| wait > Duration::from_secs(50)));
    }
}
