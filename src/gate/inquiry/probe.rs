//! Asks the upstream what became of an attempt, as `recovery = { probe = ... }` says.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use http::Method;

use self::check::Asker;
pub(in crate::gate) use self::check::ProbeCheck;
use super::{Inquired, Question};
use crate::gate::RouteState;
use crate::gate::answer::Reply;
use crate::gate::claim::protected::ProtectedRequest;
use crate::http::problem::Problem;
use crate::http::upstream::Upstream;
use crate::idempotency::codec::{Answer, Content, Details, Head};
use crate::idempotency::grpc::Status;
use crate::idempotency::policy::Policy;
use crate::idempotency::record::{AttemptToken, RecordId, RequestId, State};
use crate::idempotency::recovery::{Finding, ProbePath, Recovery};
use crate::idempotency::settle::Ending;
use crate::store::{Claim, Error, Expiry, NewRecord, OriginId, Settled, Settlement, Store};
use crate::telemetry::outcome::Outcome;

mod check;

/// How much longer than the upstream's timeout the right to ask it lasts, if its gate ends without giving it back.
const LOCK_MARGIN: Duration = Duration::from_secs(5);

/// How long a lock that was not given back stays in the store as a record.
const LOCK_REST: Duration = Duration::from_secs(1);

/// The right to ask the upstream about a record, which one request of any gate has at a time. It is a claim of its own.
///
/// It is a courtesy to the upstream: no promise rests on it. Dropped, it is given back.
pub(in crate::gate) struct ProbeLock {
    store: Arc<dyn Store>,
    id: RecordId,
    attempt: AttemptToken,
    /// Another request is known to have it.
    is_anothers: bool,
}

impl ProbeLock {
    /// Takes the right; nothing where another has it.
    pub(in crate::gate) async fn take(
        store: Arc<dyn Store>,
        id: RecordId,
        fresh: NewRecord,
    ) -> Result<Option<Self>, Error> {
        let mut lock = Self { store: Arc::clone(&store), id, attempt: fresh.attempt, is_anothers: false };
        lock.is_anothers = match store.claim(id, fresh.clone()).await? {
            Claim::Inserted(_) => false,
            Claim::Exists { record, now } if record.state == State::InFlight && record.until > now => true,
            // The gate that had it is gone.
            Claim::Exists { record, .. } => !store.supersede(id, record.version(), fresh).await?,
        };
        Ok((!lock.is_anothers).then_some(lock))
    }

    /// Whether a request has the right.
    pub(in crate::gate) async fn is_taken(store: &dyn Store, id: RecordId) -> Result<bool, Error> {
        let stands = store.get(id).await?;
        Ok(stands.is_some_and(|lock| lock.record.state == State::InFlight && lock.record.until > lock.now))
    }
}

impl Drop for ProbeLock {
    fn drop(&mut self) {
        if self.is_anothers {
            return;
        }
        let (store, id, attempt) = (Arc::clone(&self.store), self.id, self.attempt);
        tokio::spawn(async move {
            // Where this fails, the lock ends by itself.
            let _ = store.settle(id, attempt, Settlement::Release).await;
        });
    }
}

/// What the upstream said of an attempt.
pub(in crate::gate) struct Probed {
    pub(in crate::gate) finding: Finding,
    /// Its answer, if it gave one.
    pub(in crate::gate) inquired: Option<Inquired>,
}

impl ProtectedRequest {
    /// The id of the right to ask about its record.
    pub(in crate::gate) fn probe_lock_id(&self) -> RecordId {
        self.identifier.probe_lock(self.id)
    }

    /// The claim that is the right to ask about its record. Its token is its own: an upstream names records by theirs.
    pub(in crate::gate) fn probe_lock(&self) -> Result<(RecordId, NewRecord), Problem> {
        let fresh = match &self.policy().recovery {
            Recovery::Probe(probe) => {
                lock_of(self.upstream(), &probe.path, self.new_attempt()?, self.state.origin, self.record_head())
            }
            Recovery::Hold | Recovery::Retry | Recovery::Resend(_) => self.fresh()?,
        };
        Ok((self.probe_lock_id(), fresh))
    }

    /// The reply with what the upstream said, once the record has it.
    pub(in crate::gate) fn recovered(&self, answer: Answer, settled: Option<&Settled>) -> Reply {
        let reply = self.reply_with(Outcome::Recovered, Ok(answer), None);
        match settled {
            Some(Settled::Done { until }) => reply.with_expiry(&self.gate.settings.headers, *until),
            Some(Settled::NotCurrent { .. }) | None => reply,
        }
    }

    /// Asks the upstream once.
    pub(in crate::gate) async fn probe(&self) -> Probed {
        let Recovery::Probe(probe) = &self.policy().recovery else { return Probed::NOTHING };
        let Some(target) = probe.path.target(&self.key, &self.id) else { return Probed::NOTHING };
        let asked = Question::of(self, target).ask().await;
        let tells_absence = probe.path.tells_absence(&self.key);
        Probed::new(Some(self.head.id), self.id, self.head.is_call(), tells_absence, &self.state, asked)
    }
}

/// The claim of a lock. Its head is that of the record, but says what is asked, and keeps no key.
pub(super) fn lock_of(
    upstream: &Upstream,
    path: &ProbePath,
    attempt: AttemptToken,
    origin: OriginId,
    mut head: Head,
) -> NewRecord {
    let details = Details { key: None, is_accepted: false, ..head.details() };
    (head.method, head.path) = (Method::GET, path.to_string());
    let head = head.with_details(&details).encode();
    let lease = upstream.settings().timeout + LOCK_MARGIN;
    NewRecord { attempt, origin, lease, ttl: LOCK_REST, unknown_ttl: LOCK_REST, head }
}

/// Whether an answer is one to a gRPC call, of status OK.
fn is_call_that_succeeded(answer: &Answer) -> bool {
    let trailers = answer.content.as_ref().map(|content| &content.trailers[..]).unwrap_or_default();
    Ending::of_call(answer.status.as_u16(), &answer.headers[..], trailers) == Ending::Called(Status::Ok)
}

impl Probed {
    /// Nothing was asked.
    const NOTHING: Self = Self { finding: Finding::Unclear, inquired: None };

    /// What the upstream said of an unknown outcome of this route, which is logged. `request` is the retry on whose behalf it
    /// was asked; without one, the worker asked.
    pub(super) fn new(
        request: Option<RequestId>,
        record: RecordId,
        is_call: bool,
        tells_absence: bool,
        state: &RouteState,
        asked: Result<Inquired, Problem>,
    ) -> Self {
        let (request, route) = (request.map(|request| request.to_string()), &*state.name);
        match asked {
            Ok(inquired) => {
                let status = inquired.answer.status;
                let said = match Finding::of(status) {
                    // The client of a call could not read another answer, and a call that failed tells nothing of this one.
                    Finding::Done if is_call && !is_call_that_succeeded(&inquired.answer) => Finding::Unclear,
                    Finding::Absent if !tells_absence => Finding::Unclear,
                    finding => finding,
                };
                let asker = if request.is_some() { Asker::Retry } else { Asker::Worker };
                let finding = match (said, &state.probe_check) {
                    (Finding::Absent, Some(check)) => check.finding(status, asker),
                    (finding, _) => finding,
                };
                let (status, word) = (status.as_u16(), said.as_str());
                tracing::info!(request, %record, route, status, finding = word, "asked the upstream about an unknown outcome");
                Self { finding, inquired: Some(inquired) }
            }
            Err(problem) => {
                let cause = problem.code.as_str();
                tracing::warn!(request, %record, route, cause, "asked the upstream about an unknown outcome, and got no answer");
                Self::NOTHING
            }
        }
    }

    /// The upstream gave no answer that counts as one.
    pub(super) fn is_silent(&self) -> bool {
        self.inquired.is_none()
    }

    /// How the record ends by what the upstream said. It lives from now on: a retry may come as late after this as after a claim.
    /// `Idempotency-Control: release` does not count: the upstream has what the request did.
    pub(in crate::gate) fn end(&self, policy: &Policy) -> Option<Settlement> {
        let Inquired { answer, control } = self.inquired.as_ref()?;
        let answer = policy.response_headers.kept(Cow::Borrowed(answer));
        let is_kept = |content: &Content| !control.no_store && content.body.len() as u64 <= policy.max_response_body;
        let kept = match answer.content.as_ref().is_some_and(is_kept) {
            true => answer.encode(),
            false => Answer { content: None, ..answer.into_owned() }.encode(),
        };
        Some(Settlement::Complete { answer: kept, expiry: Expiry::FromNow(control.ttl.unwrap_or(policy.ttl)) })
    }
}
