//! What the claim protocol asks for, done: the store asked, the leader followed, the attempt run, the client answered.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, sleep_until};

use super::Gate;
use super::answer::Reply;
use super::attempt::{self, Attempted};
use super::protected::{Client, ProtectedRequest};
use super::shared::IdentityDigest;
use super::single_flight::{Follower, Leader, Progress, Released, Role, Running};
use crate::http::budget::Taken;
use crate::http::problem::Problem;
use crate::idempotency::decide::Decision;
use crate::idempotency::protocol::{Action, Event, Followed, Protocol, Reply as Outcome, Settlement, Standing};
use crate::idempotency::record::{Record, RecordId, State, Timestamp, Version};
use crate::store::{Claim, End, Error, Fresh, Listed, Settled};

/// What an operation came to.
enum Done {
    Followed(Follower, Option<Progress>),
    FollowedToEnd(Option<Progress>),
    Permitted(Permission),
    Claimed(Result<Claim, Error>),
    Superseded(Result<bool, Error>),
    Looked(Result<Option<Listed>, Error>),
    Attempted(Box<Attempted>),
    Settled(Result<Settled, Error>),
    Changed,
}

/// The configuration does not change while it is held; it lists the identity rules that are no longer in force.
type Permission = OwnedRwLockReadGuard<Vec<IdentityDigest>>;

/// Carries out the actions of one request's claim protocol.
pub(super) struct Driver {
    gate: Arc<Gate>,
    id: RecordId,
    began: Instant,
    /// Until it is answered, or its attempt is settled. A claim that is given up goes on without it.
    request: Option<Arc<ProtectedRequest>>,
    client: Option<Client>,
    /// What is under way, whose end is an event.
    operation: Pin<Box<dyn Future<Output = Done> + Send>>,
    leader: Option<Leader>,
    follower: Option<Follower>,
    permission: Option<Permission>,
    /// The record that it claims.
    fresh: Option<Fresh>,
    /// Its place among those that wait.
    place: Option<Taken>,
    /// What the store had, or that it had nothing.
    found: Option<(Record, Timestamp)>,
    /// What the leader's attempt left.
    released: Option<Arc<Released>>,
    problem: Option<Problem>,
    attempted: Option<Box<Attempted>>,
    settled: Option<Settled>,
    /// A claim failed like this.
    error: Option<Error>,
    is_told_of_shutdown: bool,
    /// A shutdown waits for it.
    _going: Arc<watch::Receiver<()>>,
}

impl Driver {
    pub(super) fn new(request: ProtectedRequest, client: Client) -> Self {
        Self {
            gate: Arc::clone(&request.gate),
            id: request.id,
            began: request.began,
            _going: Arc::clone(&request.going),
            request: Some(Arc::new(request)),
            client: Some(client),
            operation: Box::pin(pending()),
            leader: None,
            follower: None,
            permission: None,
            fresh: None,
            place: None,
            found: None,
            released: None,
            problem: None,
            attempted: None,
            settled: None,
            error: None,
            is_told_of_shutdown: false,
        }
    }

    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Begins an action. Returns the event that follows at once, if one does.
    pub(super) fn begin(&mut self, action: Action) -> Option<Event> {
        let shared = &self.gate.shared;
        match action {
            Action::Join => match shared.single_flight.join(self.id) {
                Role::Leader(leader) => {
                    self.leader = Some(leader);
                    return Some(Event::Leads);
                }
                Role::Follower(follower) => {
                    self.follower = Some(follower);
                    return Some(Event::Follows);
                }
            },
            Action::Follow => {
                let mut follower = self.follower.take()?;
                self.operate(async move {
                    let progress = follower.joined().await;
                    Done::Followed(follower, progress)
                });
            }
            Action::FollowToEnd => {
                let mut follower = self.follower.take()?;
                self.operate(async move { Done::FollowedToEnd(follower.ended().await) });
            }
            Action::Permit => return self.permit(),
            Action::Claim => {
                let (store, id, fresh) = (Arc::clone(&shared.store), self.id, self.fresh.clone()?);
                self.operate(async move { Done::Claimed(store.claim(id, fresh).await) });
            }
            Action::Supersede(seen) => {
                let (store, id, fresh) = (Arc::clone(&shared.store), self.id, self.fresh.clone()?);
                self.operate(async move { Done::Superseded(store.supersede(id, seen, fresh).await) });
            }
            Action::Look => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                self.operate(async move { Done::Looked(store.get(id).await) });
            }
            Action::Run => {
                let (request, attempt) = (Arc::clone(self.request.as_ref()?), self.fresh.as_ref()?.attempt);
                let client = self.client.take()?;
                self.operate(async move { Done::Attempted(Box::new(attempt::run(request, attempt, client).await)) });
            }
            Action::Settle => {
                let end = self.attempted.as_ref()?.end.clone();
                self.settle(end)?;
            }
            Action::Withdraw => {
                self.permission = None;
                self.settle(End::Release)?;
            }
            Action::TakePlace => {
                self.place = shared.usage.waiting.take(1);
                return Some(if self.place.is_some() { Event::PlaceTaken } else { Event::NoPlace });
            }
            Action::Watch => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                self.operate(async move {
                    store.changed(id).await;
                    Done::Changed
                });
            }
            Action::ShareRunning { since } => self.share_running(since)?,
            Action::ShareFound => {
                self.permission = None;
                let leader = self.leader.take()?;
                match self.found.take() {
                    Some((record, now)) => leader.found(record, now),
                    None => leader.absent(),
                }
            }
            Action::ShareEnd => {
                let leader = self.leader.take()?;
                match self.attempted.as_mut().and_then(|attempted| attempted.released.take()) {
                    Some(released) => leader.released(released),
                    None => drop(leader),
                }
            }
            Action::Leave => (self.permission, self.leader) = (None, None),
            Action::Reply(outcome) => self.reply(outcome)?,
        }
        None
    }

    /// The next event.
    pub(super) async fn next(&mut self, protocol: &Protocol) -> Event {
        let deadline = protocol.timeout().and_then(|age| self.began.checked_add(age));
        let waits = protocol.is_waiting();
        let done = {
            let client = self.client.as_mut().filter(|_| waits);
            let left = async { if let Some(client) = client { client.gone().await } else { pending().await } };
            let due = async { if let Some(at) = deadline { sleep_until(at).await } else { pending().await } };
            let is_told = self.is_told_of_shutdown;
            let abandon = (waits && !is_told).then(|| self.gate.shared.abandon.subscribe());
            let shutdown = async {
                match abandon {
                    Some(mut abandon) => drop(abandon.wait_for(|abandon| *abandon).await),
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = left => return Event::ClientLeft,
                done = self.operation.as_mut() => done,
                () = shutdown => {
                    self.is_told_of_shutdown = true;
                    return Event::ShuttingDown;
                }
                () = due => return Event::Timeout,
            }
        };
        self.operation = Box::pin(pending());
        self.observe(done, protocol.failures()).await
    }

    /// What the end of an operation means. Store calls have failed so many times before.
    async fn observe(&mut self, done: Done, failures: u32) -> Event {
        match done {
            Done::Permitted(permission) => self.permitted(permission),
            Done::Changed => Event::Changed,
            Done::Followed(follower, progress) => match self.met(follower, progress).await {
                Ok(followed) => Event::Followed(followed),
                Err(problem) => self.failed(problem),
            },
            Done::FollowedToEnd(Some(Progress::Released(released))) => {
                self.released = Some(released);
                Event::Followed(Followed::Released { is_same: true })
            }
            Done::FollowedToEnd(_) => Event::Followed(Followed::Gone),
            Done::Claimed(Ok(claim)) => {
                self.answered("claim", failures);
                match claim {
                    Claim::Inserted(_) => Event::Claimed,
                    Claim::Exists { record, now } => {
                        // It is certain that nothing is claimed: a reload need not wait for the comparison.
                        self.permission = None;
                        self.stands(record, now).await.map_or_else(|problem| self.failed(problem), Event::Exists)
                    }
                }
            }
            Done::Superseded(Ok(is_superseded)) => {
                self.answered("supersede", failures);
                if is_superseded { Event::Claimed } else { Event::NotSuperseded }
            }
            Done::Claimed(Err(error)) => self.claim_failed(error, "claim", failures),
            Done::Superseded(Err(error)) => self.claim_failed(error, "supersede", failures),
            Done::Looked(Ok(None)) => Event::Looked(None),
            Done::Looked(Ok(Some(Listed { record, now, .. }))) => match self.stands(record, now).await {
                Ok(standing) => Event::Looked(Some(standing)),
                Err(problem) => self.failed(problem),
            },
            Done::Looked(Err(error)) => {
                tracing::debug!(%error, record = ?self.id, "the store failed a request that waits");
                Event::StoreFailed { in_doubt: false }
            }
            Done::Attempted(attempted) => {
                self.attempted = Some(attempted);
                Event::AttemptEnded
            }
            Done::Settled(Ok(settled)) => {
                self.answered("settle", failures);
                if let Some(attempted) = &mut self.attempted {
                    attempted.record = None;
                }
                let settlement = self.settlement(&settled);
                self.settled = Some(settled);
                Event::Settled(settlement)
            }
            Done::Settled(Err(error)) => {
                self.failed_again(&error, "settle", failures);
                Event::StoreFailed { in_doubt: true }
            }
        }
    }

    fn operate(&mut self, operation: impl Future<Output = Done> + Send + 'static) {
        self.operation = Box::pin(operation);
    }

    /// Makes the record to claim, and holds the configuration.
    fn permit(&mut self) -> Option<Event> {
        if self.fresh.is_none() {
            match self.request.as_ref()?.fresh() {
                Ok(fresh) => self.fresh = Some(fresh),
                Err(problem) => return Some(self.failed(problem)),
            }
        }
        self.permission = None;
        let retired = Arc::clone(&self.gate.shared.retired);
        match Arc::clone(&retired).try_read_owned() {
            Ok(permission) => Some(self.permitted(permission)),
            Err(_) => {
                self.operate(async move { Done::Permitted(retired.read_owned().await) });
                None
            }
        }
    }

    fn permitted(&mut self, permission: Permission) -> Event {
        let rules = self.request.as_ref().map(|request| request.state.rules);
        if rules.is_none_or(|rules| permission.contains(&rules)) {
            return Event::Retired;
        }
        self.permission = Some(permission);
        Event::Permitted
    }

    fn share_running(&mut self, since: Duration) -> Option<()> {
        // What it met before it ran is not needed any more.
        (self.permission, self.found, self.released) = (None, None, None);
        let request = self.request.as_ref()?;
        let (attempt, lease) = (self.fresh.as_ref()?.attempt, request.policy().lease);
        let asked = self.began + since;
        let running = Running::new(attempt, request.fingerprint.clone(), request.proof, lease, asked);
        self.leader.as_ref()?.running(running);
        Some(())
    }

    fn settle(&mut self, end: End) -> Option<()> {
        let (store, id, attempt) = (Arc::clone(&self.gate.shared.store), self.id, self.fresh.as_ref()?.attempt);
        self.operate(async move { Done::Settled(store.settle(id, attempt, end).await) });
        Some(())
    }

    fn failed(&mut self, problem: Problem) -> Event {
        self.problem = Some(problem);
        Event::Failed
    }

    /// What following another request came to.
    async fn met(&mut self, follower: Follower, progress: Option<Progress>) -> Result<Followed, Problem> {
        let Some(request) = &self.request else { return Ok(Followed::Gone) };
        Ok(match progress {
            Some(Progress::Running(running)) => {
                let difference = request.difference(&running.fingerprint, running.proof.as_ref()).await?;
                self.follower = Some(follower);
                Followed::Running { difference, elapsed: running.began.elapsed() }
            }
            Some(Progress::Released(released)) => {
                let difference = request.difference(&released.fingerprint, released.proof.as_ref()).await?;
                self.released = Some(released);
                Followed::Released { is_same: difference.is_none() }
            }
            Some(Progress::Found(found)) => {
                let (record, now) = &*found;
                Followed::Found { decision: request.decide(record, *now).await?, until: Some(record.until) }
            }
            Some(Progress::Absent) => Followed::Absent,
            Some(Progress::Asking) | None => Followed::Gone,
        })
    }

    /// A record that stands, as it concerns this request.
    async fn stands(&mut self, record: Record, now: Timestamp) -> Result<Standing, Problem> {
        let decision = match &self.request {
            Some(request) => request.decide(&record, now).await?,
            // Its client has been answered: nothing depends on it.
            None => Decision::Unknown,
        };
        let version @ Version { attempt, state, until } = record.version();
        let is_own = state == State::Unknown && self.fresh.as_ref().is_some_and(|fresh| fresh.attempt == attempt);
        self.found = Some((record, now));
        Ok(Standing { decision, until: Some(until), version, is_own })
    }

    fn settlement(&self, settled: &Settled) -> Settlement {
        match settled {
            Settled::Done { .. } => Settlement::Done,
            Settled::Superseded { record } => {
                let attempt = self.fresh.as_ref().map(|fresh| fresh.attempt);
                let is_completed =
                    |record: &Record| record.state == State::Completed && Some(record.attempt) == attempt;
                if record.as_ref().is_some_and(is_completed) {
                    Settlement::CompletedOtherwise
                } else {
                    Settlement::Lost
                }
            }
        }
    }

    /// Answers the client.
    fn reply(&mut self, outcome: Outcome) -> Option<()> {
        if let Outcome::Attempted(_) = outcome {
            attempt::conclude(self.request.as_ref()?, self.attempted.as_mut()?, self.settled.as_ref());
            return Some(());
        }
        let (request, client) = (self.request.take()?, self.client.take()?);
        self.place = None;
        let shared = &self.gate.shared;
        let reply = match outcome {
            Outcome::Decided { decision, until } => request.reply(decision, until),
            Outcome::Released => attempt::released(&request, self.released.as_deref()?),
            Outcome::NothingLeft => request.nothing_left(),
            Outcome::Retired => request.retired(),
            Outcome::Failed => request.problem(self.problem.take()?),
            Outcome::ClaimTooLate => {
                tracing::warn!(record = %self.id, "the store took too long for a claim, which is given up");
                request.store_away()
            }
            Outcome::LeaderUnanswered if shared.retired.try_read().is_err() => request.retired(),
            Outcome::LeaderUnanswered => return without_store(request, client),
            Outcome::ClaimFailed => {
                if let (Some(error), Some(others)) = (self.error.take(), shared.unclaimed.due()) {
                    tracing::warn!(%error, record = %self.id, others, "a claim failed");
                }
                return without_store(request, client);
            }
            Outcome::ClaimUnanswered => {
                if let Some(others) = shared.unclaimed.due() {
                    tracing::warn!(record = %self.id, others, "the store did not answer a claim in time");
                }
                return without_store(request, client);
            }
            Outcome::Attempted(_) => return None,
        };
        client.reply(reply);
        Some(())
    }

    /// A claim failed. Where it is certain not to stand, that is logged with the reply.
    fn claim_failed(&mut self, error: Error, what: &'static str, failures: u32) -> Event {
        let in_doubt = matches!(error, Error::Indeterminate(_));
        if in_doubt || failures > 0 {
            self.failed_again(&error, what, failures);
        }
        self.error = Some(error);
        Event::StoreFailed { in_doubt }
    }

    fn failed_again(&self, error: &Error, what: &'static str, failures: u32) {
        if failures == 0 {
            tracing::warn!(%error, record = %self.id, what, "the store failed; asking again until it answers");
        } else {
            tracing::debug!(%error, record = %self.id, what, "the store still fails");
        }
    }

    /// The store has answered a claim or a settlement.
    fn answered(&mut self, what: &'static str, failures: u32) {
        if failures > 0 {
            tracing::info!(record = %self.id, what, "the store has answered after all");
        }
    }
}

/// Answers a client whose claim failed, which may take as long as the upstream does. What the claim comes to is seen to
/// meanwhile.
fn without_store(request: Arc<ProtectedRequest>, client: Client) -> Option<()> {
    if request.needs_store() {
        client.reply(request.store_away());
    } else {
        tokio::spawn(Box::pin(async move {
            let reply: Reply = request.without_store().await;
            client.reply(reply);
        }));
    }
    Some(())
}
