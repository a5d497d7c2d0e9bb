//! What a request would have got: its notes, compared with the shadow record of its key.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use sha2::{Digest as _, Sha256};
use tokio::time::sleep;

use super::collector::{Collected, lock};
use super::{COMPARED, Notes, Seen, SeenAnswer};
use crate::gate::admit::{Candidate, Step};
use crate::gate::request::Head;
use crate::idempotency::codec;
use crate::idempotency::decide::Decision;
use crate::idempotency::fingerprint::{self, Fingerprint, Subject};
use crate::idempotency::key::{Found, Key};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp};
use crate::idempotency::settle::{Control, Ending, Verdict, settle};
use crate::idempotency::shadow::{Course, RunAgain, Shadow, Span};
use crate::store::{Claim, End, Error, Expiry, Fresh, Listed, Settled};
use crate::telemetry::observed::Example;
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::wall_clock;

/// A request body up to this size, in bytes, is read for its key and its fingerprint where it is; a larger one elsewhere.
const SMALL: usize = 64 << 10;

/// How long a shadow record may stay unfinished.
const LEASE: Duration = Duration::from_secs(60);

/// How often a shadow record is looked at again that another gate is about to change.
const TRIES: u32 = 8;

/// The first pause before that; each is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(10);

/// What becomes of a look at a request: what it would have got, or nobody knows.
pub(super) struct Unknowable;

impl From<Error> for Unknowable {
    fn from(_: Error) -> Self {
        // The store counts its errors.
        Self
    }
}

/// A request as it is compared.
struct Sighting {
    span: Span,
    /// What the policy makes of its end.
    verdict: Verdict,
    /// The word for that, where it is the first of its key.
    would: Outcome,
    status: Option<StatusCode>,
    answer: Option<[u8; 8]>,
    /// It may not run, by the time that it says.
    is_expired: bool,
}

/// A request with its key.
struct Keyed {
    id: RecordId,
    head: codec::Head,
}

impl Notes {
    /// Finds out what the request would have got, and counts it.
    pub(super) async fn look(self: Box<Self>, ended: Timestamp) -> Result<(), Unknowable> {
        let mut this = *self;
        let tally = Arc::clone(this.state.metrics.observed());
        let (body, collected) = {
            let mut body = lock(&this.body);
            (body.take(), body.state)
        };
        let keyed = match this.admit(body, collected).await? {
            Ok(keyed) => keyed,
            Err(would) => {
                tally.would(would, false);
                return Ok(());
            }
        };
        let sighting = match this.sighting(ended) {
            Ok(sighting) => sighting,
            Err(would) => {
                tally.would(would, false);
                return Ok(());
            }
        };
        this.compare(&keyed, &sighting).await
    }

    /// The key of the request, or the word for what becomes of it before its key is looked up.
    async fn admit(&mut self, body: Bytes, collected: Collected) -> Result<Result<Keyed, Outcome>, Unknowable> {
        let mut step = self.candidate().protected_step(&self.route);
        if let Step::Verify { .. } = step {
            if let Err(problem) = self.gate.verify(&mut self.head).await {
                return Ok(Err(Outcome::Problem(problem.code)));
            }
            step = self.candidate().protected_step(&self.route);
        }
        let (route, policy) = (&self.route, &self.route.policy);
        if let Step::Protect(_) | Step::NeedBody = step {
            match collected {
                Collected::Whole => {}
                Collected::TooLarge => return Ok(Err(Outcome::Problem(Code::RequestTooLarge))),
                // Its client left, or its upstream answered early: nobody knows what would have come of the rest.
                Collected::Part | Collected::NoRoom => return Err(Unknowable),
            }
        }
        if let Step::NeedBody = step {
            step = self.candidate().with_body(route, &body);
        }
        let found = match step {
            Step::Protect(found) => found,
            Step::Refuse(refusal) => return Ok(Err(Outcome::Problem(refusal.problem.code))),
            Step::Forward(_) => return Ok(Err(Outcome::Passed)),
            Step::NeedBody | Step::Verify { .. } => return Err(Unknowable),
        };
        let (key, fingerprint) = self.identify(found, body).await?;
        let identifier = &self.gate.identifier;
        let (id, proof) = identifier.identify(&route.namespace, &policy.scope, self.head.caller(), &key);
        let head =
            codec::Head::new(fingerprint, self.head.method.clone(), self.head.uri.path(), &key).with_proof(proof);
        Ok(Ok(Keyed { id: identifier.shadow(id), head }))
    }

    fn candidate(&self) -> Candidate<'_> {
        Candidate::asked_about(&self.head, self.asks_upgrade, &|_| true)
    }

    async fn identify(&self, found: Found, body: Bytes) -> Result<(Key, Fingerprint), Unknowable> {
        let recipe = self.route.policy.fingerprint.clone();
        let Head { method, uri, headers, .. } = &self.head;
        let digest = if body.len() <= SMALL {
            recipe.digest(Subject { method, uri, headers, body: fingerprint::Body::Whole(&body) })
        } else {
            // Large JSON takes its time, which is not to be the other requests'.
            let (recipe, method, uri, headers) = (recipe.clone(), method.clone(), uri.clone(), headers.clone());
            let digesting = tokio::task::spawn_blocking(move || {
                let body = fingerprint::Body::Whole(&body);
                recipe.digest(Subject { method: &method, uri: &uri, headers: &headers, body })
            });
            digesting.await.map_err(|_| Unknowable)?
        };
        Ok((found.into_key(&digest), Fingerprint { recipe, digest }))
    }

    /// How the request went, or the word for what is no attempt at all.
    fn sighting(&mut self, ended: Timestamp) -> Result<Sighting, Outcome> {
        let policy = &self.route.policy;
        let (mut status, mut answer) = (None, None);
        let (verdict, would) = match &mut self.end {
            // The attempt would have gone on.
            Seen::Nothing => (Verdict::Complete { ttl: policy.ttl, keep_body: true }, Outcome::Executed),
            Seen::Problem(code) => {
                let ending = match code {
                    Code::UpstreamUnreachable | Code::Overloaded => Ending::Unreachable,
                    Code::UpstreamTimeout => Ending::Timeout,
                    Code::UpstreamBroken => Ending::Broken,
                    code => return Err(Outcome::Problem(*code)),
                };
                (settle(policy, ending, &Control::default(), None), Outcome::Problem(*code))
            }
            Seen::Answer(seen) if seen.is_broken => {
                let verdict = settle(policy, Ending::Broken, &Control::default(), None);
                (verdict, Outcome::Problem(Code::UpstreamBroken))
            }
            Seen::Answer(seen) => {
                (status, answer) = (Some(seen.status), Some(seen.digest()));
                seen.verdict(policy, self.head.is_call())
            }
        };
        let is_expired =
            policy.request_time.as_ref().is_some_and(|time| time.judge(&self.head.headers, self.began).is_err());
        let span = Span { began: self.began, ended };
        Ok(Sighting { span, verdict, would, status, answer, is_expired })
    }

    /// Compares the request with the shadow record of its key, and counts what comes of it.
    async fn compare(&self, keyed: &Keyed, sighting: &Sighting) -> Result<(), Unknowable> {
        let tally = self.state.metrics.observed();
        let mut pause = PAUSE;
        for _ in 0..TRIES {
            let standing = match self.meet(keyed, sighting).await? {
                Met::First => {
                    tally.would(sighting.first(), false);
                    return Ok(());
                }
                Met::Record(record) => record,
            };
            let known = match standing.state {
                State::Completed => standing.answer.as_ref().and_then(|answer| Shadow::decode(answer).ok()),
                // Another has written half of it, or died over that.
                State::InFlight | State::Unknown => None,
            };
            if let (Some(shadow), Ok(head)) = (known, codec::Head::decode(&standing.head)) {
                let decision = self.decide(keyed, sighting, &shadow, &head);
                let is_settled = match &decision {
                    Decision::Supersede => self.supersede(keyed, sighting, &standing).await?,
                    Decision::Reused | Decision::CallerDiffers | Decision::Unreadable => true,
                    _ => self.count_run(keyed, sighting, &standing, shadow, &head, word(&decision)).await?,
                };
                if is_settled {
                    match decision {
                        Decision::Supersede => tally.would(sighting.first(), false),
                        decision => tally.would(word(&decision), is_retry(&decision)),
                    }
                    return Ok(());
                }
            } else if standing.state == State::Unknown && self.supersede(keyed, sighting, &standing).await? {
                tally.would(sighting.first(), false);
                return Ok(());
            }
            sleep(pause).await;
            pause *= 2;
        }
        Err(Unknowable)
    }

    /// Takes the place of the key's shadow record, where it has none and the request ran; else returns the record.
    async fn meet(&self, keyed: &Keyed, sighting: &Sighting) -> Result<Met, Unknowable> {
        let store = &self.gate.shared.store;
        if !sighting.leaves_record() {
            return Ok(match store.get(keyed.id).await? {
                Some(Listed { record, .. }) => Met::Record(Box::new(record)),
                None => Met::First,
            });
        }
        let fresh = self.fresh(keyed.head.encode())?;
        let attempt = fresh.attempt;
        match store.claim(keyed.id, fresh).await? {
            Claim::Inserted(_) => {
                self.settle(keyed.id, attempt, &sighting.shadow(&self.route.policy)).await?;
                Ok(Met::First)
            }
            Claim::Exists { record, .. } => Ok(Met::Record(Box::new(record))),
        }
    }

    fn decide(&self, keyed: &Keyed, sighting: &Sighting, shadow: &Shadow, head: &codec::Head) -> Decision {
        let is_same = if head.fingerprint.recipe == keyed.head.fingerprint.recipe {
            head.fingerprint.digest == keyed.head.fingerprint.digest
        } else {
            // The policy changed since: its body is not here any more to be compared by the former one.
            true
        };
        shadow.decide(&self.route.policy, head, sighting.span, keyed.head.proof.as_ref(), is_same)
    }

    /// Takes the place of a shadow record that would not stand any more. Returns whether it still was the one.
    async fn supersede(&self, keyed: &Keyed, sighting: &Sighting, standing: &Record) -> Result<bool, Unknowable> {
        if !sighting.leaves_record() {
            return Ok(true);
        }
        self.replace(keyed.id, standing, keyed.head.encode(), &sighting.shadow(&self.route.policy)).await
    }

    /// Notes in a shadow record that its key ran once more, if it did and if that is not noted yet. Returns whether it still
    /// was the one.
    async fn count_run(
        &self,
        keyed: &Keyed,
        sighting: &Sighting,
        standing: &Record,
        shadow: Shadow,
        head: &codec::Head,
        would: Outcome,
    ) -> Result<bool, Unknowable> {
        if shadow.runs >= 2 || !sighting.ran() {
            return Ok(true);
        }
        let (next, again) = shadow.run_again(sighting.answer);
        if !self.replace(keyed.id, standing, standing.head.clone(), &next).await? {
            return Ok(false);
        }
        if let Some(RunAgain { differs }) = again {
            let (one, other) = (shadow.span.began, sighting.span.began);
            self.state.metrics.observed().ran_again(Example {
                key: head.key.clone(),
                method: head.method.to_string(),
                path: head.path.clone(),
                first_at: one.min(other),
                again_at: one.max(other),
                would: would.as_str(),
                answer_differs: differs,
            });
        }
        Ok(true)
    }

    async fn replace(&self, id: RecordId, seen: &Record, head: Bytes, next: &Shadow) -> Result<bool, Unknowable> {
        let fresh = self.fresh(head)?;
        let attempt = fresh.attempt;
        if !self.gate.shared.store.supersede(id, seen.version(), fresh).await? {
            return Ok(false);
        }
        self.settle(id, attempt, next).await?;
        Ok(true)
    }

    fn fresh(&self, head: Bytes) -> Result<Fresh, Unknowable> {
        Ok(Fresh {
            attempt: self.gate.settings.tokens.next().map_err(|_| Unknowable)?,
            origin: self.state.shadow_origin,
            lease: LEASE,
            ttl: self.route.policy.ttl,
            // What is half written is of no use to anybody.
            unknown_ttl: LEASE,
            head,
        })
    }

    async fn settle(&self, id: RecordId, attempt: Attempt, shadow: &Shadow) -> Result<(), Unknowable> {
        let expiry = Expiry::FromNow(shadow.until.since(wall_clock()).max(Duration::from_secs(1)));
        match self.gate.shared.store.settle(id, attempt, End::Complete { answer: shadow.encode(), expiry }).await? {
            Settled::Done { .. } => Ok(()),
            Settled::Superseded { .. } => Err(Unknowable),
        }
    }
}

/// What a request met.
enum Met {
    /// No shadow record: it is the first of its key.
    First,
    Record(Box<Record>),
}

impl Sighting {
    /// Whether the upstream ran it, as far as the policy can tell.
    fn ran(&self) -> bool {
        matches!(self.verdict, Verdict::Complete { .. })
    }

    /// Whether a record would stand after it.
    fn leaves_record(&self) -> bool {
        !self.is_expired && !matches!(self.verdict, Verdict::Release)
    }

    /// The word for what the first of a key would have got.
    fn first(&self) -> Outcome {
        if self.is_expired { Outcome::Problem(Code::RequestExpired) } else { self.would }
    }

    /// The shadow of the first of a key.
    fn shadow(&self, policy: &Policy) -> Shadow {
        let Self { span, verdict, status, answer, .. } = *self;
        let (course, until) = match verdict {
            Verdict::Complete { ttl, keep_body: true } => (Course::Kept, span.began.plus(ttl)),
            Verdict::Complete { ttl, keep_body: false } => (Course::Tombstone, span.began.plus(ttl)),
            Verdict::Hold | Verdict::Release => (Course::Unknown, span.ended.plus(policy.unknown_ttl)),
        };
        Shadow { span, course, status, until, runs: u8::from(self.ran()), answer: answer.filter(|_| self.ran()) }
    }
}

impl SeenAnswer {
    fn verdict(&mut self, policy: &Policy, is_call: bool) -> (Verdict, Outcome) {
        let status = self.status.as_u16();
        let ending = match is_call {
            true => Ending::of_call(status, &self.headers, &self.trailers),
            false => Ending::Answered(status),
        };
        let is_whole = self.body.state == Collected::Whole;
        let by_body = match is_whole && !is_call && !self.headers.is_empty() {
            true => policy.outcomes_body.judge(&self.headers, &self.body.joined()),
            false => None,
        };
        match settle(policy, ending, &self.control, by_body) {
            Verdict::Complete { ttl, keep_body } => {
                let keep_body = keep_body && self.body.length <= policy.max_response_body;
                (Verdict::Complete { ttl, keep_body }, Outcome::Executed)
            }
            Verdict::Release => (Verdict::Release, Outcome::Released),
            Verdict::Hold => (Verdict::Hold, Outcome::Problem(Code::OutcomeUnknown)),
        }
    }

    /// Of its status, its length and the beginning of its body.
    fn digest(&self) -> [u8; 8] {
        let mut whole = Sha256::new();
        whole.update(self.status.as_u16().to_be_bytes());
        whole.update(self.body.length.to_be_bytes());
        let mut left = COMPARED;
        for frame in &self.body.frames {
            let part = &frame[..frame.len().min(left)];
            whole.update(part);
            left -= part.len();
        }
        let mut digest = [0; 8];
        digest.copy_from_slice(&whole.finalize()[..8]);
        digest
    }
}

/// The word for what a decision means.
fn word(decision: &Decision) -> Outcome {
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
