//! A protected request: its body, its key and fingerprint, its records' tokens, and what decisions about it mean as replies.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderName, HeaderValue, Response};
use tokio::sync::{SemaphorePermit, watch};
use tokio::time::Instant;

use super::delivery_context::DeliveryContext;
use crate::gate::answer::{Deadlines, RETRY_SOON, Reply};
use crate::gate::gate_before::claim_of_gate_before;
use crate::gate::pass;
use crate::gate::pass::{ForwardOptions, spool_problem};
use crate::gate::request;
use crate::gate::request::Head;
use crate::gate::{Gate, RouteState};
use crate::http::body::Body;
use crate::http::fair_share::Party;
use crate::http::forwarding::trace;
use crate::http::headers::without_aliases;
use crate::http::problem::Problem;
use crate::http::request_body::Buffered;
use crate::http::upstream::{self, Upstream};
use crate::http::usage::{Account, Permit, Usage};
use crate::http::{answer, prefer};
use crate::idempotency::codec::{self, Answer, Details};
use crate::idempotency::credential::Proof;
use crate::idempotency::decide::{Decision, RunningAttempt, decide, difference};
use crate::idempotency::fingerprint::{self, Fingerprint, Recipe, Subject};
use crate::idempotency::identity::RecordIdHasher;
use crate::idempotency::key::{Found, Key};
use crate::idempotency::policy::{InFlight, Policy, ResponseMode, StoreFailure};
use crate::idempotency::protocol::ProtocolLimits;
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp};
use crate::idempotency::recovery::{Recovery, Resend};
use crate::route::Route;
use crate::store::NewRecord;
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::wall_clock;

/// A protected request with its whole body.
pub(in crate::gate) struct ProtectedRequest {
    pub(in crate::gate) gate: Arc<Gate>,
    pub(in crate::gate) route: Arc<Route>,
    pub(in crate::gate) state: Arc<RouteState>,
    pub(in crate::gate) head: Head,
    pub(in crate::gate) body: Buffered,
    /// The id of its record.
    pub(in crate::gate) id: RecordId,
    /// What made it.
    pub(in crate::gate) identifier: RecordIdHasher,
    /// The place of that among the gate's identifiers.
    pub(in crate::gate) made_by: usize,
    pub(in crate::gate) key: Key,
    pub(in crate::gate) fingerprint: Fingerprint,
    /// What was kept of it, where it was accepted before.
    pub(in crate::gate) delivery: Option<DeliveryContext>,
    /// It comes again by itself until it has its end.
    pub(in crate::gate) is_unattended: bool,
    /// The proof of its caller, where its scope asks for one.
    pub(in crate::gate) proof: Option<Proof>,
    /// When the request was whole.
    pub(in crate::gate) began: Instant,
    /// Where a client waits for it.
    pub(in crate::gate) deadlines: Option<Deadlines>,
    /// A shutdown waits for it.
    pub(in crate::gate) going: Arc<watch::Receiver<()>>,
    /// It is one of the requests in flight, also after its client has left.
    pub(in crate::gate) _permit: Arc<Permit>,
}

impl ProtectedRequest {
    /// A request whose record has the id that the first of the gate's identifiers makes.
    pub(in crate::gate) fn new(
        (gate, route, state): (&Arc<Gate>, &Arc<Route>, &Arc<RouteState>),
        (head, body): (Head, Buffered),
        (key, fingerprint): (Key, Fingerprint),
        permit: Arc<Permit>,
    ) -> Self {
        let identifier = gate.identifiers.first.clone();
        let (id, proof) = identifier.identify(&route.namespace, &route.policy.scope, head.caller(), &key);
        let body = body.with_trailers(|trailers| without_aliases(trailers, &state.kept, &gate.settings.own_headers));
        Self {
            gate: Arc::clone(gate),
            route: Arc::clone(route),
            state: Arc::clone(state),
            head,
            body,
            id,
            identifier,
            made_by: 0,
            key,
            fingerprint,
            delivery: None,
            is_unattended: false,
            proof,
            began: Instant::now(),
            deadlines: None,
            going: Arc::new(gate.shared.drain.requests.subscribe()),
            _permit: permit,
        }
    }

    /// Whether a request with its key may wait for its delivery, as far as is known: before the store has answered, it is not waited
    /// for.
    pub(in crate::gate) fn may_have_delivery(&self) -> bool {
        self.policy().accepts() || self.gate.shared.queued.load().has(&self.route.namespace)
    }

    pub(in crate::gate) fn policy(&self) -> &Policy {
        &self.route.policy
    }

    pub(in crate::gate) fn upstream(&self) -> &Upstream {
        &self.gate.upstreams[self.route.upstream]
    }

    /// How long its attempt may take.
    pub(in crate::gate) fn timeout(&self) -> Duration {
        let longest = self.upstream().settings().timeout;
        self.delivery.as_ref().map_or(longest, |delivery| delivery.timeout.min(longest))
    }

    /// Who it counts for where a limit is scarce.
    pub(in crate::gate) fn party(&self) -> Party {
        self.head.party(Some(&self.policy().scope))
    }

    pub(super) fn key_shortened(&self) -> String {
        self.key.shortened()
    }

    /// Notes whose record it is about, where something tells of that.
    pub(in crate::gate) fn note_record(&self) {
        if let Some(notes) = &self.head.notes {
            let (key, record) = (self.key_shortened(), self.id);
            notes.note(|noted| (noted.key, noted.record) = (Some(key), Some(record)));
        }
    }

    /// The times that bound it.
    pub(in crate::gate) fn limits(&self) -> ProtocolLimits {
        let settle_timeout = self.gate.settings.settle_timeout;
        let Resend { attempts, backoff } = match &self.policy().recovery {
            Recovery::Resend(resend) => *resend,
            Recovery::Hold | Recovery::Retry | Recovery::Probe(_) => Resend { attempts: 1, backoff: Duration::ZERO },
        };
        // What looks at the store have taken before is gone, where a client waits.
        let waited = if self.deadlines.is_some() { Duration::ZERO } else { self.began.elapsed() };
        let (claim_by, lease, patience) = (waited + settle_timeout, self.policy().lease, self.patience());
        ProtocolLimits { claim_by, settle_timeout, lease, patience, attempts, backoff }
    }

    /// How long the request may wait for another's attempt; zero where it is to be answered at once.
    fn patience(&self) -> Duration {
        let InFlight::Wait(longest) = self.policy().in_flight else { return Duration::ZERO };
        let upstream::Settings { client_timeout, timeout, .. } = self.upstream().settings();
        // A client's timeout that is shorter than the attempt's ends this by itself, with `still-running`.
        let limit = longest.min(*client_timeout.max(timeout));
        prefer::wait(&self.head.headers).map_or(limit, |preferred| preferred.min(limit))
    }

    /// Why it may not run now, where it may not: it is too old, or does not say how old it is. One that was accepted came in
    /// time, and may wait for its delivery as long as that takes.
    pub(in crate::gate) fn bar(&self) -> Option<Problem> {
        let time = self.policy().request_time.as_ref().filter(|_| self.delivery.is_none())?;
        time.judge(&self.head.headers, wall_clock()).err().map(|untimely| request::untimely(time, untimely))
    }

    /// A record for a new attempt.
    pub(in crate::gate) fn fresh(&self) -> Result<NewRecord, Problem> {
        Ok(NewRecord {
            attempt: self.new_attempt()?,
            origin: self.state.origin,
            lease: self.policy().lease,
            ttl: self.policy().ttl,
            unknown_ttl: self.delivery.as_ref().map_or(self.policy().unknown_ttl, |delivery| delivery.unknown_ttl),
            head: self.delivery.as_ref().map_or_else(|| self.record_head().encode(), |delivery| delivery.head.clone()),
        })
    }

    pub(in crate::gate) fn new_attempt(&self) -> Result<AttemptToken, Problem> {
        self.gate.settings.tokens.next().map_err(|_| {
            Problem::new(Code::Overloaded, "the system's random number generator failed").retry_after(RETRY_SOON)
        })
    }

    /// What its record keeps of the request.
    pub(in crate::gate) fn record_head(&self) -> codec::Head {
        codec::Head::new(self.fingerprint.clone(), self.head.method.clone(), self.head.uri.path(), &self.key)
            .with_keyed_digest(self.identifier.keyed_digest(self.id, &self.fingerprint.digest))
            .with_proof(self.proof)
            .with_details(&self.details())
    }

    /// What the record tells operators of the request.
    pub(in crate::gate) fn details(&self) -> Details {
        let policy = self.policy();
        Details {
            request: Some(self.head.id),
            trace: trace(&self.head.headers),
            upstream: Some(self.upstream().settings().name.to_string()),
            caller: Some(self.identifier.caller(&policy.scope, self.head.caller())),
            scope: Some(self.identifier.scope_tags(&policy.scope, self.head.caller())),
            unknown_ttl: Some(policy.unknown_ttl),
            rules: self.state.rules_tags.get(self.made_by).copied(),
            key: policy.recovery.keeps_keys().then(|| self.key.clone()),
            is_accepted: false,
            is_call: self.head.is_call(),
        }
    }

    /// The reply where the store has the record at hand, without asking anyone.
    pub(in crate::gate) async fn recalled(&self) -> Option<Reply> {
        let (record, now) = self.gate.shared.store.recall(self.id)?;
        match self.decide(&record, now).await {
            Ok(Decision::Supersede) => None,
            Ok(decision) => Some(self.permitted_reply(decision, record.until).await),
            Err(problem) => Some(self.problem(problem)),
        }
    }

    /// What a record means for this request.
    pub(in crate::gate) async fn decide(&self, record: &Record, now: Timestamp) -> Result<Decision, Problem> {
        let own = &self.gate.settings.own_headers;
        if let Some(problem) = claim_of_gate_before(&self.head.headers, own, record) {
            self.gate.shared.note_same_store(&self.route.name);
            return Err(problem);
        }
        let head = codec::Head::decode(&record.head);
        let is_same = match &head {
            Ok(head) => {
                self.head.comes_after(head);
                self.is_of(head).await?
            }
            Err(codec::Unreadable) => false,
        };
        let decision =
            decide(now, self.policy(), &self.met(record, now), head.as_ref().ok(), self.proof.as_ref(), is_same);
        let ran_elsewhere = |head: &codec::Head| !head.details().went_to(&self.upstream().settings().name);
        Ok(match decision {
            Decision::Probe if head.is_ok_and(|head| ran_elsewhere(&head)) => {
                let (record, route) = (self.id, &*self.route.name);
                tracing::warn!(%record, route, "the attempt went to another upstream than the route's: the probe is not asked");
                Decision::Unknown
            }
            decision => decision,
        })
    }

    /// What this request gets where it differs from another with its key; nothing where it is a retry of it.
    pub(in crate::gate) async fn difference(
        &self,
        fingerprint: &Fingerprint,
        proof: Option<&Proof>,
    ) -> Result<Option<Decision>, Problem> {
        Ok(difference(self.is_for(fingerprint).await?, proof, self.proof.as_ref()))
    }

    /// Whether the head of its record is of this request.
    pub(in crate::gate) async fn is_of(&self, head: &codec::Head) -> Result<bool, Problem> {
        if !head.is_keyed {
            return self.is_for(&head.fingerprint).await;
        }
        let digest = self.digest(&head.fingerprint.recipe).await.map_err(|error| spool_problem(&self.gate, &error))?;
        Ok(self.identifier.keyed_digest(self.id, &digest) == Some(head.fingerprint.digest))
    }

    /// Whether a fingerprint is of this request.
    async fn is_for(&self, fingerprint: &Fingerprint) -> Result<bool, Problem> {
        let digest = self.digest(&fingerprint.recipe).await.map_err(|error| spool_problem(&self.gate, &error))?;
        Ok(digest == fingerprint.digest)
    }

    async fn digest(&self, recipe: &Recipe) -> io::Result<[u8; 32]> {
        if *recipe == self.fingerprint.recipe {
            return Ok(self.fingerprint.digest);
        }
        digest(&self.gate, recipe, &self.head, &self.body).await
    }

    /// A problem as the reply to this request.
    pub(in crate::gate) fn problem(&self, problem: Problem) -> Reply {
        let docs = self.policy().docs.as_deref();
        self.gate.keyed(Reply::problem(problem.of_record(self.id), docs, self.head.id))
    }

    /// The reply with an answer of the upstream, or else with a problem.
    pub(in crate::gate) fn reply_with(
        &self,
        outcome: Outcome,
        answer: Result<Answer, Problem>,
        body: Option<Body>,
    ) -> Reply {
        match answer {
            Ok(answer) => {
                let mut response: Response<Body> = answer::response(&answer, &self.head.method, self.head.version);
                match body {
                    Some(body) => *response.body_mut() = body,
                    // As it came to one who got it in pieces.
                    None if self.policy().body == ResponseMode::Stream && !has_length(&answer) => {
                        response = response.map(Body::without_length);
                    }
                    None => {}
                }
                self.gate.keyed(Reply::new(outcome, response))
            }
            Err(problem) => self.problem(problem),
        }
    }

    /// The reply that a decision means, by a record that stands until then.
    pub(in crate::gate) fn reply(&self, decision: Decision, until: Option<Timestamp>) -> Reply {
        let names = &self.gate.settings.headers;
        let kept = |reply: Reply| match until {
            Some(until) => reply.with_expiry(names, until),
            None => reply,
        };
        let problem = |code, detail: &str| self.problem(Problem::new(code, detail));
        match decision {
            Decision::Replay(mut answer) => {
                if let Some(content) = &mut answer.content {
                    let party = || self.party();
                    let memory = Account::new(self.head.memory(&self.gate.shared.usage), Some(&party));
                    match Usage::count_body(memory, std::mem::take(&mut content.body)) {
                        Some(body) => content.body = body,
                        None => return self.problem(no_room()),
                    }
                }
                kept(self.reply_with(Outcome::Replayed, Ok(answer), None))
            }
            Decision::NotStored(status) => {
                let detail = "the request ran, and its response was not kept; do not send it again under another key";
                let mut problem = Problem::new(Code::ResponseNotStored, detail);
                problem.original_status = Some(status.as_u16());
                kept(self.problem(problem))
            }
            Decision::InFlight(RunningAttempt { elapsed, lease_left }) => {
                let longest = self.upstream().settings().timeout;
                // The gate of the attempt may be dead: then the lease ends, and a retry learns that the outcome is unknown.
                let limit = lease_left.map_or(longest, |left| left.min(longest));
                let wait = self.state.estimator.remaining(elapsed, limit);
                let detail = "an earlier request with this key is still running; send this one again later";
                self.problem(Problem::new(Code::InFlight, detail).retry_after(wait))
            }
            // The key is free: only a request that does not claim gets this.
            Decision::Supersede => self.nothing_left(),
            Decision::Reused => {
                problem(Code::KeyReused, "this key was used for a different request; use a new key for a new request")
            }
            Decision::CallerDiffers => problem(
                Code::CallerDiffers,
                "this key was used with another password, token or session; if yours was renewed, find out what became \
                 of the first request before you send it under a new key",
            ),
            // A request that does not ask the upstream gets what the record says.
            Decision::Unknown | Decision::Probe => problem(
                Code::OutcomeUnknown,
                "an earlier attempt may or may not have taken effect; find out before you act again",
            ),
            Decision::Unreadable => {
                if let Some(others) = self.gate.shared.unreadable.due() {
                    let (record, route) = (self.id, &*self.state.name);
                    tracing::error!(%record, route, others, "a record cannot be read: {UNREADABLE}");
                }
                let detail = format!("the record of this key cannot be read: {UNREADABLE}");
                self.problem(Problem::new(Code::StoreUnavailable, detail).retry_after(Duration::from_secs(60)))
            }
        }
    }

    /// The reply where the next request with this key runs.
    pub(in crate::gate) fn nothing_left(&self) -> Reply {
        let detail = "the earlier request with this key has ended and left no answer; send this one again";
        self.problem(Problem::new(Code::InFlight, detail).retry_after(RETRY_SOON))
    }

    /// The reply where the key could not be claimed, or too late to be used.
    pub(in crate::gate) fn store_away(&self) -> Reply {
        let detail = "the key could not be claimed; nothing was sent";
        self.problem(Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_SOON))
    }

    /// Whether the request is refused while the store is away.
    pub(in crate::gate) fn needs_store(&self) -> bool {
        self.is_unattended || self.policy().store_failure == StoreFailure::Reject
    }

    /// What it needs on its way besides itself.
    pub(super) fn forward_options(&self) -> ForwardOptions<'_> {
        let key = |name: &HeaderName| {
            let mut key = HeaderValue::from_str(self.key.as_str()).ok()?;
            key.set_sensitive(true);
            Some((name.clone(), key))
        };
        ForwardOptions {
            kept: &self.state.kept,
            key: self.gate.settings.own_headers.key.as_ref().and_then(key),
            dropped: &self.gate.added,
            scope: Some(&self.policy().scope),
            docs: self.policy().docs.as_deref(),
            ignored: None,
            observed: None,
            request: self.head.id,
            drain: &self.gate.shared.drain,
        }
    }

    /// Forwards the request without protection, since the store is away.
    pub(in crate::gate) async fn forward_unprotected(&self) -> Reply {
        let (route, key) = (&*self.state.name, self.key_shortened());
        tracing::warn!(request = %self.head.id, record = %self.id, route, key, "forwarding without protection: the store is away");
        let options = self.forward_options();
        let (upstream, outcome) = (self.upstream(), Outcome::Unprotected);
        self.gate.keyed(pass::forward_buffered(upstream, &self.head, &self.body, options, outcome).await)
    }
}

/// Whether an answer announces its length.
pub(super) fn has_length(answer: &Answer) -> bool {
    answer.headers.iter().any(|(name, _)| *name == CONTENT_LENGTH)
}

/// Why a record cannot be read.
const UNREADABLE: &str = "a later version of oncegate wrote it, it is encrypted with a key that this gate lacks, it is damaged, or it is \
                          not encrypted and a route has `seal = \"required\"`";

/// The digest of a larger body is not made between other requests.
const LARGE: usize = 1 << 20;

/// A replay that is held as long as its client takes to read it finds no room.
pub(in crate::gate) fn no_room() -> Problem {
    Problem::new(Code::Overloaded, "there is no room for the recorded answer now; nothing was sent")
        .retry_after(RETRY_SOON)
}

/// The key that was found, and the fingerprint.
pub(in crate::gate) async fn identify(
    gate: &Gate,
    policy: &Policy,
    head: &Head,
    body: &Buffered,
    found: Found,
) -> Result<(Key, Fingerprint), Problem> {
    let recipe = policy.fingerprint.clone();
    let digest = digest(gate, &recipe, head, body).await.map_err(|error| spool_problem(gate, &error))?;
    Ok((found.into_key(&digest), Fingerprint { recipe, digest }))
}

/// The whole body, to look for a key in it, and the right to have it in memory.
pub(in crate::gate) async fn read_back<'a>(
    gate: &'a Gate,
    body: &Buffered,
) -> Result<(Bytes, Option<SemaphorePermit<'a>>), Problem> {
    let permit = large_body(gate, body).await;
    let whole = body.whole().await.map_err(|error| spool_problem(gate, &error))?;
    Ok((whole, permit))
}

/// The digest of a request by a recipe.
pub(in crate::gate) async fn digest(
    gate: &Gate,
    recipe: &Recipe,
    head: &Head,
    body: &Buffered,
) -> io::Result<[u8; 32]> {
    let Head { method, uri, headers, .. } = head;
    if let Some(bytes) = body.in_memory().filter(|bytes| bytes.len() <= LARGE) {
        return Ok(recipe.digest(Subject { method, uri, headers, body: fingerprint::Body::Whole(bytes) }));
    }
    if let Some(sha256) = body.spooled_digest()
        && !recipe.needs_whole_body(headers)
    {
        return Ok(recipe.digest(Subject { method, uri, headers, body: fingerprint::Body::Digest(sha256) }));
    }
    let _permit = large_body(gate, body).await;
    let whole = body.whole().await?;
    let (recipe, method, uri, headers) = (recipe.clone(), method.clone(), uri.clone(), headers.clone());
    // Large JSON takes its time, which is not to be the other requests'. What is delivered is in memory, however large.
    let digesting = tokio::task::spawn_blocking(move || {
        recipe.digest(Subject { method: &method, uri: &uri, headers: &headers, body: fingerprint::Body::Whole(&whole) })
    });
    digesting.await.map_err(io::Error::other)
}

/// Waits for the right to read a spooled body back into memory.
async fn large_body<'a>(gate: &'a Gate, body: &Buffered) -> Option<SemaphorePermit<'a>> {
    match body.in_memory() {
        Some(_) => None,
        // It is never closed.
        None => gate.shared.large_bodies.acquire().await.ok(),
    }
}
