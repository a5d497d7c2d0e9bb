//! What a request would have got: its notes, compared with the shadow record of its key.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use super::collector::{Collected, lock};
use super::{AnswerProgress, ExchangeEnd, Notes, ObservedAnswer};
use crate::gate::admission::admit::{Candidate, Step};
use crate::gate::request::Head;
use crate::idempotency::codec;
use crate::idempotency::decide::Decision;
use crate::idempotency::fingerprint::{Body, Fingerprint, Subject};
use crate::idempotency::grpc;
use crate::idempotency::key::{Found, Key};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp};
use crate::idempotency::settle::{BodyOutcomes, Control, Ending, Verdict, settle};
use crate::idempotency::shadow::{RunAgain, Shadow, ShadowOutcome, Span};
use crate::store::{Claim, Error, Expiry, NewRecord, Settlement};
use crate::telemetry::observed::{Dropped, Example};
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::wall_clock;

/// How long a shadow record may stay unfinished.
const LEASE: Duration = Duration::from_secs(60);

/// How often a shadow record is read again that another request has changed meanwhile.
const TRIES: u32 = 8;

/// What the request would have got, or why that is not known.
type Evaluated<T> = Result<Result<T, Outcome>, Dropped>;

impl From<Error> for Dropped {
    fn from(_: Error) -> Self {
        // The store counts its errors.
        Self::Store
    }
}

/// A request with its key.
struct Keyed {
    id: RecordId,
    head: codec::Head,
}

/// How a request went.
struct Exchange {
    span: Span,
    /// What the policy makes of its end.
    verdict: Verdict,
    /// The word for that, where it is the first of its key.
    outcome: Outcome,
    status: Option<StatusCode>,
    answer: Option<[u8; 8]>,
    /// The upstream did what it was asked for, as far as its answer says.
    ran: bool,
    /// It may not run, by the time that it says.
    is_expired: bool,
}

impl Notes {
    /// Finds out what the request would have got, and counts it.
    pub(super) async fn evaluate(mut self: Box<Self>, ended: Timestamp) -> Result<(), Dropped> {
        let (body, arrived) = lock(&self.body).take();
        let began = arrived.unwrap_or(self.began);
        let evaluated = match self.admit(body).await? {
            Ok(keyed) => match self.exchange(Span { began, ended: ended.max(began) }) {
                Ok(exchange) => return self.compare(&keyed, &exchange).await,
                Err(outcome) => outcome,
            },
            Err(outcome) => outcome,
        };
        self.state.metrics.observed().would(evaluated, false);
        Ok(())
    }

    /// The key of the request, or what becomes of it before its key is looked up.
    async fn admit(&mut self, body: Collected) -> Evaluated<Keyed> {
        let if_protected = self.gate.if_protected.as_ref();
        if if_protected.is_some_and(|routes| routes.ambiguity(&self.head).is_some()) {
            return Ok(Err(Outcome::Problem(Code::BadRequest)));
        }
        let mut step = self.candidate().protected_step(&self.route);
        if let Step::Verify { .. } = step {
            if let Err(problem) = self.gate.verify(&mut self.head).await {
                return Ok(Err(Outcome::Problem(problem.code)));
            }
            step = self.candidate().protected_step(&self.route);
        }
        if let Step::Protect(_) | Step::NeedBody = step {
            match (&body, &self.end) {
                (Collected::Whole(_) | Collected::Digest(_), _) => {}
                (Collected::TooLarge, _) => return Ok(Err(Outcome::Problem(Code::RequestTooLarge))),
                (Collected::Nothing, ExchangeEnd::Problem(code)) => return Ok(Err(Outcome::Problem(*code))),
                // Its client left, or its upstream answered early: what would have come of the rest is unknown.
                (Collected::Nothing, _) => return Err(Dropped::Body),
            }
        }
        if let Step::NeedBody = step {
            let Collected::Whole(whole) = &body else { return Err(Dropped::Body) };
            step = self.candidate().with_body(&self.route, whole);
        }
        let found = match step {
            Step::Protect(found) => found,
            Step::Refuse(refusal) => return Ok(Err(Outcome::Problem(refusal.problem.code))),
            Step::Forward(_) if self.gate.if_protected.as_ref().is_some_and(|routes| routes.has_key(&self.head)) => {
                return Ok(Err(Outcome::Ignored));
            }
            Step::Forward(_) => return Ok(Err(Outcome::Passed)),
            Step::NeedBody | Step::Verify { .. } => return Err(Dropped::Body),
        };
        let (key, fingerprint) = self.identify(found, &body)?;
        let identifier = &self.gate.identifiers.first;
        let scope = &self.route.policy.scope;
        let (id, proof) = identifier.identify(&self.route.namespace, scope, self.head.caller(), &key);
        let keyed = identifier.keyed_digest(id, &fingerprint.digest);
        let head = codec::Head::new(fingerprint, self.head.method.clone(), self.head.uri.path(), &key);
        let head = head.with_keyed_digest(keyed).with_proof(proof);
        Ok(Ok(Keyed { id: identifier.shadow(id), head }))
    }

    fn candidate(&self) -> Candidate<'_> {
        Candidate::asked_about(&self.head, self.asks_upgrade, &|_| true)
    }

    fn identify(&self, found: Found, body: &Collected) -> Result<(Key, Fingerprint), Dropped> {
        let recipe = self.route.policy.fingerprint.clone();
        let Head { method, uri, headers, .. } = &self.head;
        let body = match body {
            Collected::Whole(whole) => Body::Whole(whole),
            Collected::Digest(digest) if !recipe.needs_whole_body(headers) => Body::Digest(*digest),
            Collected::Digest(_) | Collected::TooLarge | Collected::Nothing => return Err(Dropped::Body),
        };
        let digest = recipe.digest(Subject { method, uri, headers, body });
        Ok((found.into_key(&digest), Fingerprint { recipe, digest }))
    }

    /// How the request went, or the word for what is no attempt at all.
    fn exchange(&self, span: Span) -> Result<Exchange, Outcome> {
        let (policy, is_call) = (&self.route.policy, self.head.is_call());
        let without_answer = |ending, code| {
            (settle(policy, ending, &Control::default(), None), Outcome::Problem(code), None, None, false)
        };
        // The attempt would have gone on.
        let goes_on = || (Verdict::Complete { ttl: policy.ttl, keep_body: true }, Outcome::Executed, None, None, true);
        let (verdict, outcome, status, answer, ran) = match &self.end {
            ExchangeEnd::Unanswered => goes_on(),
            ExchangeEnd::Problem(code @ (Code::UpstreamUnreachable | Code::Overloaded)) => {
                without_answer(Ending::Unreachable, *code)
            }
            ExchangeEnd::Problem(code @ Code::UpstreamTimeout) => without_answer(Ending::Timeout, *code),
            ExchangeEnd::Problem(code @ Code::UpstreamBroken) => without_answer(Ending::Broken, *code),
            ExchangeEnd::Problem(code) => return Err(Outcome::Problem(*code)),
            ExchangeEnd::Answer(answer) if answer.progress == AnswerProgress::Broken => {
                without_answer(Ending::Broken, Code::UpstreamBroken)
            }
            // A call says how it ended in its trailers.
            ExchangeEnd::Answer(answer) if is_call && answer.progress == AnswerProgress::Streaming => goes_on(),
            ExchangeEnd::Answer(answer) => {
                let ending = answer.ending(is_call);
                let (verdict, outcome) = answer.verdict(policy, ending, is_call);
                let succeeded = match ending {
                    Ending::Answered(status) => (200..400).contains(&status),
                    Ending::Called(status) => status == grpc::Status::Ok,
                    Ending::Unreachable | Ending::Timeout | Ending::Broken => false,
                };
                let ran = succeeded && matches!(verdict, Verdict::Complete { .. });
                (verdict, outcome, Some(answer.status), answer.digest(), ran)
            }
        };
        let is_expired =
            policy.request_time.as_ref().is_some_and(|time| time.judge(&self.head.headers, span.began).is_err());
        Ok(Exchange { span, verdict, outcome, status, answer, ran, is_expired })
    }

    /// Compares the request with the shadow record of its key, and counts what comes of it.
    async fn compare(&self, keyed: &Keyed, exchange: &Exchange) -> Result<(), Dropped> {
        let tally = self.state.metrics.observed();
        for _ in 0..TRIES {
            let Some(standing) = self.claim_or_read(keyed, exchange).await? else {
                tally.would(exchange.first(), false);
                return Ok(());
            };
            let read = Shadow::decode(&standing.head);
            let decision = match &read {
                Ok((shadow, head)) => self.decide(keyed, exchange, shadow, head),
                // Whatever it says, it is over.
                Err(codec::Unreadable) if standing.until <= wall_clock() => Decision::Supersede,
                Err(codec::Unreadable) => return Err(Dropped::Store),
            };
            let is_settled = match (&decision, &read) {
                (Decision::Supersede, _) => self.supersede(keyed, exchange, &standing).await?,
                (decision, Ok((shadow, head))) if is_retry(decision) => {
                    self.note_retry(keyed, exchange, &standing, *shadow, head, decision).await?
                }
                _ => true,
            };
            if is_settled {
                match decision {
                    Decision::Supersede => tally.would(exchange.first(), false),
                    decision => tally.would(outcome(&decision), is_retry(&decision)),
                }
                return Ok(());
            }
        }
        Err(Dropped::Store)
    }

    /// The shadow record of the key. Where it has none, the request is the first, and claims the place if it leaves a record.
    async fn claim_or_read(&self, keyed: &Keyed, exchange: &Exchange) -> Result<Option<Record>, Dropped> {
        let store = &self.gate.shared.shadows;
        if !exchange.leaves_record() {
            return Ok(store.get(keyed.id).await?.map(|listed| listed.record));
        }
        let shadow = exchange.shadow(&self.route.policy);
        let fresh = self.fresh(shadow.encode(&keyed.head));
        let attempt = fresh.attempt;
        match store.claim(keyed.id, fresh).await? {
            Claim::Inserted(_) => {
                self.finish(keyed.id, attempt, &shadow).await?;
                Ok(None)
            }
            Claim::Exists { record, .. } => Ok(Some(record)),
        }
    }

    fn decide(&self, keyed: &Keyed, exchange: &Exchange, shadow: &Shadow, head: &codec::Head) -> Decision {
        // Where the policy has changed since, the body is not here any more to be compared by the former one.
        let is_same = head.fingerprint.recipe != keyed.head.fingerprint.recipe
            || head.is_keyed != keyed.head.is_keyed
            || head.fingerprint.digest == keyed.head.fingerprint.digest;
        shadow.decide(&self.route.policy, head, exchange.span, keyed.head.proof.as_ref(), is_same)
    }

    /// Takes the place of a shadow record that would not stand any more. Returns whether it still was the one.
    async fn supersede(&self, keyed: &Keyed, exchange: &Exchange, standing: &Record) -> Result<bool, Dropped> {
        if !exchange.leaves_record() {
            return Ok(true);
        }
        self.replace(keyed.id, standing, &exchange.shadow(&self.route.policy), &keyed.head).await
    }

    /// Notes a retry in the shadow record: that its key ran once more, and that it came first after all, where it did. Returns
    /// whether the record still was the one.
    async fn note_retry(
        &self,
        keyed: &Keyed,
        exchange: &Exchange,
        standing: &Record,
        shadow: Shadow,
        head: &codec::Head,
        decision: &Decision,
    ) -> Result<bool, Dropped> {
        let (mut next, again) = if exchange.ran { shadow.run_again(exchange.answer) } else { (shadow, None) };
        if exchange.leaves_record() && shadow.span.came_during(exchange.span) {
            next = exchange.shadow(&self.route.policy).with_runs_of(&next);
        }
        if next != shadow && !self.replace(keyed.id, standing, &next, head).await? {
            return Ok(false);
        }
        if let Some(RunAgain { differs }) = again {
            let (one, other) = (shadow.span.began, exchange.span.began);
            self.state.metrics.observed().ran_again(Example {
                key: Some(head.key.clone()),
                method: head.method.to_string(),
                path: head.path.clone(),
                first_at: one.min(other),
                again_at: one.max(other),
                outcome: outcome(decision).as_str(),
                answer_differs: differs,
            });
        }
        Ok(true)
    }

    async fn replace(&self, id: RecordId, seen: &Record, next: &Shadow, head: &codec::Head) -> Result<bool, Dropped> {
        let fresh = self.fresh(next.encode(head));
        let attempt = fresh.attempt;
        if !self.gate.shared.shadows.supersede(id, seen.version(), fresh).await? {
            return Ok(false);
        }
        self.finish(id, attempt, next).await?;
        Ok(true)
    }

    fn fresh(&self, head: Bytes) -> NewRecord {
        // No upstream ever has the token of a shadow, so it need not be a secret.
        let mut attempt = [0; 16];
        attempt[..8].copy_from_slice(&self.head.id.0.get().to_be_bytes());
        attempt[8..].copy_from_slice(&fastrand::u64(..).to_be_bytes());
        let ttl = self.route.policy.ttl;
        let (attempt, origin) = (AttemptToken(attempt), self.state.shadow_origin);
        NewRecord { attempt, origin, lease: LEASE, ttl, unknown_ttl: ttl, head }
    }

    /// Completes a shadow record, all of which stands in its head: only completed records expire without a word.
    async fn finish(&self, id: RecordId, attempt: AttemptToken, shadow: &Shadow) -> Result<(), Dropped> {
        let expiry = Expiry::FromNow(shadow.until.since(wall_clock()).max(Duration::from_secs(1)));
        let end = Settlement::Complete { answer: Bytes::from_static(&[0]), expiry };
        // Where another has replaced it already, that one goes on.
        self.gate.shared.shadows.settle(id, attempt, end).await?;
        Ok(())
    }
}

impl Exchange {
    /// Whether a record would stand after it.
    fn leaves_record(&self) -> bool {
        !self.is_expired && !matches!(self.verdict, Verdict::Release)
    }

    /// What the first of a key would have got.
    fn first(&self) -> Outcome {
        if self.is_expired { Outcome::Problem(Code::RequestExpired) } else { self.outcome }
    }

    /// The shadow of the first of a key.
    fn shadow(&self, policy: &Policy) -> Shadow {
        let Self { span, verdict, status, answer, ran, .. } = *self;
        let (outcome, until) = match verdict {
            Verdict::Complete { ttl, keep_body } => {
                let until = span.began.plus(ttl);
                // As for a record: one that is dead on arrival would let a retry run.
                let until = if until <= span.ended { span.ended.plus(ttl) } else { until };
                (if keep_body { ShadowOutcome::Kept } else { ShadowOutcome::Tombstone }, until)
            }
            Verdict::Hold | Verdict::Release => (ShadowOutcome::Unknown, span.ended.plus(policy.unknown_ttl)),
        };
        Shadow { span, outcome, status, until, runs: u8::from(ran), answer: answer.filter(|_| ran) }
    }
}

impl ObservedAnswer {
    fn ending(&self, is_call: bool) -> Ending {
        let status = self.status.as_u16();
        match is_call {
            true => Ending::of_call(status, &self.headers, &self.trailers),
            false => Ending::Answered(status),
        }
    }

    fn verdict(&self, policy: &Policy, ending: Ending, is_call: bool) -> (Verdict, Outcome) {
        let whole = self.judged.as_ref().filter(|_| self.progress == AnswerProgress::Whole).map(|(body, _)| &body[..]);
        let judge = |rules: &BodyOutcomes| rules.judge(&self.headers, whole, policy.outcomes.action(ending));
        match settle(policy, ending, &self.control, Some(&policy.outcomes_body).filter(|_| !is_call).and_then(judge)) {
            Verdict::Complete { ttl, keep_body } => {
                let keep_body = keep_body && self.length <= policy.max_response_body;
                (Verdict::Complete { ttl, keep_body }, Outcome::Executed)
            }
            Verdict::Release => (Verdict::Release, Outcome::Released),
            Verdict::Hold => (Verdict::Hold, Outcome::Problem(Code::OutcomeUnknown)),
        }
    }
}

/// The word for what a decision means.
fn outcome(decision: &Decision) -> Outcome {
    match decision {
        Decision::Supersede => Outcome::Executed,
        Decision::Replay(_) => Outcome::Replayed,
        Decision::NotStored(_) => Outcome::Problem(Code::ResponseNotStored),
        Decision::InFlight(_) => Outcome::Problem(Code::InFlight),
        Decision::Reused => Outcome::Problem(Code::KeyReused),
        Decision::CallerDiffers => Outcome::Problem(Code::CallerDiffers),
        Decision::Unknown | Decision::Probe => Outcome::Problem(Code::OutcomeUnknown),
        Decision::Unreadable => Outcome::Problem(Code::StoreUnavailable),
    }
}

/// Whether it is what a retry gets.
fn is_retry(decision: &Decision) -> bool {
    match decision {
        Decision::Replay(_) | Decision::NotStored(_) | Decision::InFlight(_) | Decision::Unknown | Decision::Probe => {
            true
        }
        Decision::Supersede | Decision::Reused | Decision::CallerDiffers | Decision::Unreadable => false,
    }
}
