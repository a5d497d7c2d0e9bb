//! A protected request, from its body on. It goes on in a task of its own, whatever becomes of the client.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::answer::Reply;
use super::claiming::{Asked, ask, give_up};
use super::flights::{Follow, Lead, Role, Running};
use super::identify::{body_problem, digest, find_key, spool_problem};
use super::pass::Manner;
use super::request::{self, Head};
use super::wait::{Awaited, Met};
use super::{Gate, Lane, attempt, pass, settling};
use crate::http::budget::Taken;
use crate::http::buffer::Buffered;
use crate::http::inbound::Inbound;
use crate::http::problem::Problem;
use crate::http::upstream::{self, Upstream};
use crate::http::usage::Usage;
use crate::idempotency::codec;
use crate::idempotency::credential::Proof;
use crate::idempotency::decide::{Decision, decide, difference};
use crate::idempotency::fingerprint::{Fingerprint, Recipe};
use crate::idempotency::key::{Found, Key};
use crate::idempotency::policy::{Policy, StoreFailure};
use crate::idempotency::record::{Attempt, Record, RecordId, Timestamp};
use crate::route::Route;
use crate::store::{End, Fresh};
use crate::telemetry::outcome::{Code, Outcome};

/// A protected request with its body.
pub(super) struct Errand {
    pub(super) gate: Arc<Gate>,
    pub(super) route: Arc<Route>,
    pub(super) lane: Arc<Lane>,
    pub(super) head: Head,
    pub(super) body: Buffered,
    /// The record that it is about.
    pub(super) id: RecordId,
    key: Key,
    pub(super) fingerprint: Fingerprint,
    /// The proof of its caller, where its scope asks for one.
    pub(super) proof: Option<Proof>,
    /// When the request was whole.
    pub(super) began: Instant,
    /// Tells the gate that it goes on.
    going: watch::Receiver<()>,
    /// It is one of the requests that are being dealt with, though its client may be gone.
    _taken: Arc<Taken>,
}

/// Where a reply goes. A client that went away does not need one.
pub(super) struct Client(oneshot::Sender<Reply>);

impl Client {
    pub(super) fn reply(self, reply: Reply) {
        // A reply that nobody waits for is dropped; the record has it.
        let _ = self.0.send(reply);
    }

    /// Returns when nobody waits for a reply any more.
    pub(super) async fn gone(&mut self) {
        self.0.closed().await;
    }
}

/// What a request does after it met another.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once, and replies are the common case")]
enum Next {
    /// It asks for itself.
    Ask,
    Reply(Reply),
    /// It waits, in its place among those who do.
    Wait(Awaited, Taken),
}

/// Holds the body, finds the key in it if need be, and sends the errand on its way.
pub(super) async fn begin(
    gate: &Arc<Gate>,
    route: &Arc<Route>,
    lane: &Arc<Lane>,
    (head, incoming): (Head, Inbound),
    found: Found,
    taken: &Arc<Taken>,
) -> Reply {
    let policy = &route.policy;
    let upstream = &gate.upstreams[route.upstream];
    let docs = policy.docs.as_deref();
    // Where the key is yet to be found in the body, nobody knows whether the request carries one.
    let keyed = found != Found::NeedsBody;
    let refuse = |problem: Problem| {
        let reply = Reply::problem(problem, docs);
        if keyed { gate.keyed(reply) } else { reply }
    };
    if head.upgrade.is_some() {
        if !keyed && !policy.key.required {
            // In a box, as is what follows for requests without a key: those with one have no need of its size.
            let manner = Manner::of(gate, lane, route, &head);
            return Box::pin(pass::forward(gate, upstream, head, incoming, manner)).await;
        }
        return refuse(request::upgrade_with_key());
    }
    if keyed && let Err(problem) = request::check_scope(&policy.scope, &head) {
        return refuse(problem);
    }
    let (memory, usage) = (head.memory(&gate.work.usage), &gate.work.usage);
    let body = match Buffered::read(incoming, policy.max_request_body, memory, usage).await {
        Ok(body) => body,
        Err(error) => return refuse(body_problem(gate, error)),
    };
    let (key, fingerprint) = match find_key(gate, policy, &head, &body, found).await {
        Ok(Some(found)) => found,
        Ok(None) if policy.key.required => return Reply::problem(request::key_missing(&policy.key), docs),
        Ok(None) => {
            let manner = Manner::of(gate, lane, route, &head);
            return Box::pin(pass::forward_buffered(upstream, &head, &body, manner, Outcome::Passed)).await;
        }
        Err(problem) => return gate.keyed(Reply::problem(problem, docs)),
    };
    if !keyed && let Err(problem) = request::check_scope(&policy.scope, &head) {
        return gate.keyed(Reply::problem(problem, docs));
    }
    let (id, proof) = gate.identifier.identify(&route.namespace, &policy.scope, head.caller(), &key);
    let errand = Errand {
        gate: Arc::clone(gate),
        route: Arc::clone(route),
        lane: Arc::clone(lane),
        head,
        body,
        id,
        key,
        fingerprint,
        proof,
        began: Instant::now(),
        going: gate.work.errands.subscribe(),
        _taken: Arc::clone(taken),
    };
    if let Some(reply) = errand.recalled().await {
        return reply;
    }
    let (client, reply) = oneshot::channel();
    // In a box: a future of this size would be copied several times on its way into the task.
    tokio::spawn(Box::pin(errand.run(Client(client))));
    let failed = |_| {
        // The errand is gone without a word: only a bug does that, and nobody knows how far it came.
        gate.keyed(Reply::problem(Problem::new(Code::OutcomeUnknown, "the gate failed at this request"), docs))
    };
    let upstream::Settings { client_timeout, timeout: whole, .. } = upstream.settings();
    if client_timeout >= whole {
        // The attempt's own end comes first.
        return reply.await.unwrap_or_else(failed);
    }
    match timeout(*client_timeout, reply).await {
        Ok(reply) => reply.unwrap_or_else(failed),
        Err(_) => {
            let detail = "the request runs on; send it again with the same key for its answer";
            let wait = lane.estimator.remaining(*client_timeout, *whole);
            gate.keyed(Reply::problem(Problem::new(Code::StillRunning, detail).retry_after(wait), docs))
        }
    }
}

impl Errand {
    /// The reply where the record is known without asking anybody.
    async fn recalled(&self) -> Option<Reply> {
        let (record, now) = self.gate.work.store.recall(self.id)?;
        match self.decide(&record, now).await {
            Ok(decision) => self.reply(decision, Some(record.until)),
            Err(problem) => Some(self.problem(problem)),
        }
    }

    async fn run(self, client: Client) {
        loop {
            match self.gate.work.flights.join(self.id) {
                Role::Lead(lead) => return self.lead(lead, client).await,
                Role::Follow(follow) => match self.follow(follow).await {
                    Next::Ask => {}
                    Next::Reply(reply) => return client.reply(reply),
                    Next::Wait(awaited, place) => return self.wait(awaited, place, client).await,
                },
            }
        }
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.route.policy
    }

    pub(super) fn upstream(&self) -> &Upstream {
        &self.gate.upstreams[self.route.upstream]
    }

    pub(super) fn key_shortened(&self) -> String {
        self.key.shortened()
    }

    /// A problem as the reply to this request.
    pub(super) fn problem(&self, problem: Problem) -> Reply {
        self.gate.keyed(Reply::problem(problem, self.policy().docs.as_deref()))
    }

    /// What the request gets from another's question or attempt.
    async fn follow(&self, mut follow: Follow) -> Next {
        let Ok(stage) = timeout(self.gate.settings.settle_timeout, follow.joined()).await else {
            if self.gate.work.retired.try_read().is_err() {
                return Next::Reply(self.problem(rules_changed()));
            }
            return Next::Reply(self.without_store().await);
        };
        match self.meet(follow, stage).await {
            Ok(met) => self.next(met),
            Err(problem) => Next::Reply(self.problem(problem)),
        }
    }

    /// What the request does now: with an attempt in flight, it waits where it may.
    fn next(&self, met: Met) -> Next {
        let waits = || !self.patience().is_zero();
        let (elapsed, awaited) = match met {
            Met::Running(follow, running) => (running.began.elapsed(), Awaited::Here(follow, running)),
            Met::Decided(Decision::InFlight { elapsed }, _) => (elapsed, Awaited::elsewhere(elapsed)),
            Met::Decided(decision, until) => return self.reply(decision, until).map_or(Next::Ask, Next::Reply),
            Met::Released(released) if waits() => return Next::Reply(self.released(&released)),
            Met::Released(_) | Met::Nothing => return Next::Ask,
        };
        match waits().then(|| self.gate.work.usage.waiting.take(1)).flatten() {
            Some(place) => Next::Wait(awaited, place),
            None => self.reply(Decision::InFlight { elapsed }, None).map_or(Next::Ask, Next::Reply),
        }
    }

    /// Asks the store, and does what follows.
    async fn lead(self, lead: Lead, client: Client) {
        let fresh = match self.fresh() {
            Ok(fresh) => fresh,
            Err(problem) => return client.reply(self.problem(problem)),
        };
        let asked = Instant::now();
        let deadline = asked + self.gate.settings.settle_timeout;
        let mut seen = None;
        loop {
            let Ok(retired) = timeout_at(deadline, Arc::clone(&self.gate.work.retired).read_owned()).await else {
                // The rules are being changed: the store is well, and asked by others.
                return client.reply(self.problem(rules_changed()));
            };
            if retired.contains(&self.lane.rules) {
                return client.reply(self.problem(rules_changed()));
            }
            // It owns what it needs: where it takes too long, it goes on without the rest of the errand.
            let asking = ask(Arc::clone(&self.gate.work.store), lead.id(), seen, fresh.clone());
            let mut asking = Box::pin(async move {
                let asked = asking.await;
                drop(retired);
                asked
            });
            let asking = match timeout_at(deadline, asking.as_mut()).await {
                Ok(answered) => answered,
                Err(_) => {
                    if let Some(others) = self.gate.work.unclaimed.due() {
                        tracing::warn!(record = %lead.id(), others, "the store did not answer a claim in time");
                    }
                    // At once, and not when the client has its answer.
                    let (store, going) = (Arc::clone(&self.gate.work.store), self.going.clone());
                    tokio::spawn(async move {
                        give_up(&*store, lead, fresh.attempt, asking).await;
                        drop(going);
                    });
                    return client.reply(self.without_store().await);
                }
            };
            match asking {
                Err(error) => {
                    if let Some(others) = self.gate.work.unclaimed.due() {
                        tracing::warn!(%error, record = %lead.id(), others, "a claim failed");
                    }
                    drop(lead);
                    return client.reply(self.without_store().await);
                }
                Ok(Asked::Ours) => return self.start(lead, fresh.attempt, asked, client).await,
                Ok(Asked::Again) => seen = None,
                Ok(Asked::Theirs { record, now }) => {
                    let decision = match self.decide(&record, now).await {
                        Ok(Decision::Supersede) => {
                            seen = Some(record.version());
                            continue;
                        }
                        Ok(decision) => decision,
                        Err(problem) => return client.reply(self.problem(problem)),
                    };
                    let next = self.next(Met::Decided(decision, Some(record.until)));
                    // Before the client hears of it: it may be back at once.
                    lead.found(record, now);
                    return match next {
                        Next::Ask => {}
                        Next::Reply(reply) => client.reply(reply),
                        Next::Wait(awaited, place) => self.wait(awaited, place, client).await,
                    };
                }
            }
        }
    }

    /// The claim is this request's.
    async fn start(self, lead: Lead, attempt: Attempt, asked: Instant, client: Client) {
        let lease = self.policy().lease;
        if asked.elapsed() > lease * 2 / 3 {
            // So much of the lease is gone that it may be past before it is renewed, which is due after a third of it and
            // looked at every sixth; and the key could be taken by another.
            tracing::warn!(record = %lead.id(), "the store took too long for a claim, which is given up");
            client.reply(self.problem(store_away()));
            settling::settle(&*self.gate.work.store, lead.id(), attempt, End::Release).await;
            return;
        }
        lead.running(Running::new(attempt, self.fingerprint.clone(), self.proof, lease, asked));
        attempt::run(&self, lead, attempt, client).await;
    }

    fn fresh(&self) -> Result<Fresh, Problem> {
        let attempt = self.gate.settings.tokens.next().map_err(|_| {
            Problem::new(Code::Overloaded, "no randomness to be had").retry_after(Duration::from_secs(1))
        })?;
        let path = self.head.uri.path();
        let head = codec::Head::new(self.fingerprint.clone(), self.head.method.clone(), path, &self.key)
            .with_proof(self.proof);
        Ok(Fresh {
            attempt,
            origin: self.lane.origin,
            lease: self.policy().lease,
            ttl: self.policy().ttl,
            unknown_ttl: self.policy().unknown_ttl,
            head: head.encode(),
        })
    }

    pub(super) async fn decide(&self, record: &Record, now: Timestamp) -> Result<Decision, Problem> {
        let same = match codec::Head::decode(&record.head) {
            Ok(head) => self.is_for(&head.fingerprint).await?,
            // `decide` sees that for itself.
            Err(codec::Unreadable) => false,
        };
        Ok(decide(now, self.policy(), record, self.proof.as_ref(), |_| same))
    }

    /// What this request gets where it differs from the one that led, of which this is known; nothing where it is a retry
    /// of it.
    pub(super) async fn difference(
        &self,
        fingerprint: &Fingerprint,
        proof: Option<&Proof>,
    ) -> Result<Option<Decision>, Problem> {
        Ok(difference(self.is_for(fingerprint).await?, proof, self.proof.as_ref()))
    }

    /// Whether this is the request that a fingerprint was taken of.
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

    /// The reply that a decision means; nothing where it means to ask again.
    pub(super) fn reply(&self, decision: Decision, until: Option<Timestamp>) -> Option<Reply> {
        let names = &self.gate.settings.headers;
        let kept = |reply: Reply| match until {
            Some(until) => reply.with_expiry(names, until),
            None => reply,
        };
        let problem = |code, detail: &str| self.problem(Problem::new(code, detail));
        Some(match decision {
            Decision::Supersede => return None,
            Decision::Replay(mut answer) => {
                if let Some(content) = &mut answer.content {
                    let memory = self.head.memory(&self.gate.work.usage);
                    match Usage::hold(memory, std::mem::take(&mut content.body)) {
                        Some(body) => content.body = body,
                        None => return Some(self.problem(no_room())),
                    }
                }
                kept(attempt::reply(self, Outcome::Replayed, Ok(answer), None))
            }
            Decision::NotStored(status) => {
                let detail = "the request ran, and its response was not kept; do not send it again under another key";
                let mut problem = Problem::new(Code::ResponseNotStored, detail);
                problem.original_status = Some(status.as_u16());
                kept(self.problem(problem))
            }
            Decision::InFlight { elapsed } => {
                let wait = self.lane.estimator.remaining(elapsed, self.upstream().settings().timeout);
                let detail = "an earlier request with this key is still running; send this one again later";
                self.problem(Problem::new(Code::InFlight, detail).retry_after(wait))
            }
            Decision::Reused => {
                problem(Code::KeyReused, "this key was used for a different request; use a new key for a new request")
            }
            Decision::CallerDiffers => problem(
                Code::CallerDiffers,
                "this key was used with another password, token or session; if yours was renewed, find out what became \
                 of the first request before you send it under a new key",
            ),
            Decision::Unknown => problem(
                Code::OutcomeUnknown,
                "an earlier attempt may or may not have taken effect; find out before you act again",
            ),
            Decision::Unreadable => {
                tracing::error!(route = &*self.lane.name, "a record is in a format that this version cannot read");
                self.problem(
                    Problem::new(Code::StoreUnavailable, "the record of this key cannot be read by this version")
                        .retry_after(Duration::from_secs(60)),
                )
            }
        })
    }

    /// What the request gets while the store is away.
    async fn without_store(&self) -> Reply {
        if self.policy().store_failure == StoreFailure::Reject {
            return self.problem(store_away());
        }
        tracing::warn!(route = &*self.lane.name, "forwarding without protection: the store is away");
        let docs = self.policy().docs.as_deref();
        let manner = Manner { kept: &self.lane.kept, dropped: &self.gate.added, docs, ignored: None };
        let (upstream, outcome) = (self.upstream(), Outcome::Unprotected);
        self.gate.keyed(pass::forward_buffered(upstream, &self.head, &self.body, manner, outcome).await)
    }
}

/// The rules of identities changed while the request came in: under the old ones its key would not be known again.
fn rules_changed() -> Problem {
    Problem::new(Code::Overloaded, "the configuration changed while the request came in; nothing was sent")
        .retry_after(Duration::from_secs(1))
}

/// A replay that is held as long as its client takes to read it finds no room.
fn no_room() -> Problem {
    Problem::new(Code::Overloaded, "there is no room for the recorded answer now; nothing was sent")
        .retry_after(Duration::from_secs(1))
}

fn store_away() -> Problem {
    Problem::new(Code::StoreUnavailable, "the key could not be claimed; nothing was sent")
        .retry_after(Duration::from_secs(1))
}
