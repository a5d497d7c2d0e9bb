//! Carries out the actions of the claim protocol: calls the store, follows the leader, runs the attempt, answers the client.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, watch};
use tokio::time::{Instant, sleep, sleep_until};

use self::doubts::Doubts;
use crate::gate::answer::Client;
use crate::gate::claim::attempt;
use crate::gate::claim::attempt::Attempted;
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::claim::quota::QuotaPermit;
use crate::gate::claim::single_flight::{Follower, FoundRecord, Leader, LeaderProgress, Released, Role, Running};
use crate::gate::inquiry::probe::{ProbeLock, Probed};
use crate::gate::rules_in_force::RulesStatus;
use crate::gate::shared::Shared;
use crate::http::problem::Problem;
use crate::http::usage::{Account, Permit};
use crate::idempotency::protocol::{Action, Event, Followed, Protocol, Reply, SettleResult};
use crate::idempotency::record::{AttemptToken, RecordId, State, Version};
use crate::store::{Claim, Error, NewRecord, RecordEntry, Settled, Settlement};
use crate::telemetry::notes::Notes;

mod doubts;
mod following;
mod permitting;
mod records;
mod replies;

/// The result of an operation.
enum Finished {
    Followed(Follower, Option<LeaderProgress>),
    FollowedToEnd(Option<LeaderProgress>),
    Permitted(RulesGuard),
    Counted(Result<QuotaPermit, Duration>, RulesGuard),
    Claimed(Result<Claim, Error>),
    Superseded(Result<bool, Error>),
    /// The claim stands, and the request may not run: see [`SecondLook`](crate::gate::claim::second_look::SecondLook).
    OtherId(Problem),
    Looked(Result<Option<RecordEntry>, Error>),
    Locked(Result<Option<ProbeLock>, Error>),
    Checked(Result<bool, Error>),
    Probed(Box<Probed>),
    Attempted(Box<Attempted>),
    Settled(Result<Settled, Error>),
    Changed,
    Paused(Event),
}

/// While it is held, no reload changes whether the rules of the request's identity are in force.
type RulesGuard = OwnedRwLockReadGuard<RulesStatus>;

/// An action needs what no action before it has left: a bug. Nothing more can be done for the request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missing(&'static str);

/// Carries out the actions of one request's claim protocol.
pub(super) struct ActionExecutor {
    shared: Arc<Shared>,
    id: RecordId,
    began: Instant,
    /// Until it is answered, or its attempt is settled. A claim that is given up goes on without it.
    request: Option<Arc<ProtectedRequest>>,
    client: Option<Client>,
    /// The operation under way. Its end is an event.
    operation: Pin<Box<dyn Future<Output = Finished> + Send>>,
    leader: Option<Leader>,
    follower: Option<Follower>,
    permission: Option<RulesGuard>,
    /// The key that it took from a quota, until it is spent on an attempt.
    quota_permit: Option<QuotaPermit>,
    /// The record that it claims.
    fresh: Option<NewRecord>,
    /// Its place among those that wait.
    place: Option<Permit>,
    /// What the store had, or that it had nothing.
    found: Option<FoundRecord>,
    /// When the store was asked last.
    asked: Instant,
    /// What the leader's attempt left.
    released: Option<Arc<Released>>,
    problem: Option<Problem>,
    /// The right to ask the upstream about the record.
    lock: Option<ProbeLock>,
    /// What the upstream said of it.
    probed: Option<Box<Probed>>,
    attempted: Option<Box<Attempted>>,
    settled: Option<Settled>,
    /// The error of the last claim that failed.
    error: Option<Error>,
    doubts: Option<Doubts>,
    is_told_of_shutdown: bool,
    /// A shutdown waits for it.
    _going: Arc<watch::Receiver<()>>,
}

impl ActionExecutor {
    pub(super) fn new(request: ProtectedRequest, client: Client) -> Self {
        Self {
            shared: Arc::clone(&request.gate.shared),
            id: request.id,
            began: request.began,
            _going: Arc::clone(&request.going),
            request: Some(Arc::new(request)),
            client: Some(client),
            operation: Box::pin(pending()),
            leader: None,
            follower: None,
            permission: None,
            quota_permit: None,
            fresh: None,
            place: None,
            found: None,
            asked: Instant::now(),
            released: None,
            problem: None,
            lock: None,
            probed: None,
            attempted: None,
            settled: None,
            error: None,
            doubts: None,
            is_told_of_shutdown: false,
        }
    }

    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Begins an action. Returns the event that follows at once, if one does.
    pub(super) fn begin(&mut self, action: Action) -> Result<Option<Event>, Missing> {
        let shared = &self.shared;
        match action {
            Action::Join => {
                return Ok(Some(match shared.single_flight.join(self.id) {
                    Role::Leader(leader) => {
                        self.leader = Some(leader);
                        Event::Leads
                    }
                    Role::Follower(follower) => {
                        self.follower = Some(follower);
                        Event::Follows
                    }
                }));
            }
            Action::Follow => {
                let mut follower = needed(self.follower.take(), FOLLOWER)?;
                self.begin_operation(async move {
                    let progress = follower.until_store_answered().await;
                    Finished::Followed(follower, progress)
                });
            }
            Action::FollowToEnd => {
                let mut follower = needed(self.follower.take(), FOLLOWER)?;
                self.begin_operation(async move { Finished::FollowedToEnd(follower.ended().await) });
            }
            Action::AskPermission => return self.ask_permission(),
            Action::Claim => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                let fresh = needed(self.fresh.clone(), FRESH)?;
                let second_look = self.second_look();
                self.ask_store(async move {
                    let claimed = store.claim(id, fresh).await;
                    let barred = second_look.bars_claim(&*store, &claimed).await;
                    barred.map_or(Finished::Claimed(claimed), Finished::OtherId)
                });
            }
            Action::Supersede(seen) => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                let fresh = needed(self.fresh.clone(), FRESH)?;
                let second_look = self.second_look();
                self.ask_store(async move {
                    let superseded = store.supersede(id, seen, fresh).await;
                    let barred = second_look.bars_supersede(&*store, &superseded).await;
                    barred.map_or(Finished::Superseded(superseded), Finished::OtherId)
                });
            }
            Action::Look => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                self.ask_store(async move { Finished::Looked(store.get(id).await) });
            }
            Action::Run => {
                let (request, attempt) = (Arc::clone(needed(self.request.as_ref(), REQUEST)?), self.attempt()?);
                // An attempt before it has left the client to this one.
                let is_again = self.attempted.is_some();
                let waits =
                    self.client.take().or_else(|| self.attempted.take().and_then(|before| before.into_client()));
                let client = needed(waits, CLIENT)?;
                self.quota_permit.take().into_iter().for_each(QuotaPermit::spend);
                self.begin_operation(async move {
                    Finished::Attempted(Box::new(attempt::run(request, attempt, client, is_again).await))
                });
            }
            Action::Settle | Action::Hold => {
                let attempted = needed(self.attempted.as_ref(), ATTEMPTED)?;
                let end = if action == Action::Hold { attempted.sent_again() } else { attempted.end.clone() };
                self.settled = None;
                self.settle(end)?;
            }
            Action::Pause(pause) => {
                let shared = Arc::clone(shared);
                self.begin_operation(async move {
                    let paused = shared.drain.unless_over(sleep(pause)).await;
                    Finished::Paused(paused.map_or(Event::ShuttingDown, |()| Event::Resumed))
                });
            }
            Action::Reclaim => {
                let request = needed(self.request.as_ref(), REQUEST)?;
                let Some(Settled::Done { until }) = self.settled else { return Err(Missing(HELD)) };
                let seen = Version { attempt: self.attempt()?, state: State::Unknown, until };
                let fresh = match request.fresh() {
                    Ok(fresh) => fresh,
                    Err(problem) => return Ok(Some(self.failed(problem))),
                };
                self.fresh = Some(fresh.clone());
                let (store, id) = (Arc::clone(&shared.store), self.id);
                // The record that it replaces has stood since this request claimed: none stands elsewhere.
                self.ask_store(async move { Finished::Superseded(store.supersede(id, seen, fresh).await) });
            }
            Action::Withdraw => {
                self.permission = None;
                self.settle(Settlement::Release)?;
            }
            Action::LockProbe => {
                let (id, fresh) = match needed(self.request.as_ref(), REQUEST)?.probe_lock() {
                    Ok(lock) => lock,
                    Err(problem) => return Ok(Some(self.failed(problem))),
                };
                let store = Arc::clone(&shared.store);
                self.begin_operation(async move { Finished::Locked(ProbeLock::take(store, id, fresh).await) });
            }
            Action::CheckProbe => {
                let (store, id) = (Arc::clone(&shared.store), needed(self.request.as_ref(), REQUEST)?.probe_lock_id());
                self.begin_operation(async move { Finished::Checked(ProbeLock::is_taken(&*store, id).await) });
            }
            Action::ShareProbing => {
                let request = needed(self.request.as_ref(), REQUEST)?;
                let probing = Running::probing(self.unknown()?, request.fingerprint.clone(), request.proof);
                needed(self.leader.as_ref(), LEADER)?.running(probing);
            }
            Action::Probe => {
                let request = Arc::clone(needed(self.request.as_ref(), REQUEST)?);
                self.begin_operation(async move { Finished::Probed(Box::new(request.probe().await)) });
            }
            Action::Recover => {
                let policy = needed(self.request.as_ref(), REQUEST)?.policy();
                let end = needed(self.probed.as_ref(), PROBED)?.end(policy);
                let (store, id, attempt) = (Arc::clone(&shared.store), self.id, self.unknown()?);
                let end = needed(end, PROBED)?;
                self.ask_store(async move { Finished::Settled(store.settle(id, attempt, end).await) });
            }
            Action::AcquireWaitSlot => {
                let request = needed(self.request.as_ref(), REQUEST)?;
                self.place = Account::new(&shared.usage.waiting, Some(&|| request.party())).acquire(1);
                return Ok(Some(if self.place.is_some() { Event::WaitSlotAcquired } else { Event::WaitSlotsFull }));
            }
            Action::Watch => {
                let (store, id) = (Arc::clone(&shared.store), self.id);
                self.begin_operation(async move {
                    store.changed(id).await;
                    Finished::Changed
                });
            }
            Action::ShareRunning { since } => self.share_running(since)?,
            Action::ShareFound => {
                // A record stands: nothing new is claimed.
                (self.permission, self.quota_permit) = (None, None);
                let leader = needed(self.leader.take(), LEADER)?;
                match self.found.take() {
                    Some(found) => leader.found(found),
                    None => leader.absent(),
                }
            }
            Action::ShareEnd => {
                let leader = needed(self.leader.take(), LEADER)?;
                match self.attempted.as_mut().and_then(|attempted| attempted.released.take()) {
                    Some(released) => leader.released(released),
                    None => drop(leader),
                }
            }
            Action::Leave => (self.permission, self.quota_permit, self.leader) = (None, None, None),
            Action::Reply(outcome) => self.reply(outcome)?,
        }
        Ok(None)
    }

    pub(super) fn end(self) {
        self.doubts.into_iter().for_each(|doubts| doubts.clear_up(&self.shared.store, self.id));
    }

    /// Logs that the request cannot go on. Its client gets `outcome-unknown`, and so does a retry once the lease of the claim
    /// has passed.
    pub(super) fn give_up(self, Missing(what): &Missing) {
        tracing::error!(record = %self.id, what, "a request cannot go on: this is a bug in oncegate");
    }

    fn attempt(&self) -> Result<AttemptToken, Missing> {
        needed(self.fresh.as_ref(), FRESH).map(|fresh| fresh.attempt)
    }

    /// The next event.
    pub(super) async fn next(&mut self, protocol: &Protocol) -> Event {
        let deadline = protocol.timeout().and_then(|age| self.began.checked_add(age));
        let waits = protocol.is_waiting();
        let finished = {
            let client = self.client.as_mut().filter(|_| waits);
            let left = async { if let Some(client) = client { client.gone().await } else { pending().await } };
            let due = async { if let Some(at) = deadline { sleep_until(at).await } else { pending().await } };
            let drain = Some(&self.shared.drain).filter(|_| waits && !self.is_told_of_shutdown);
            let shutdown = async { if let Some(drain) = drain { drain.over().await } else { pending().await } };
            tokio::select! {
                biased;
                () = left => return Event::ClientLeft,
                finished = self.operation.as_mut() => finished,
                () = shutdown => {
                    self.is_told_of_shutdown = true;
                    return Event::ShuttingDown;
                }
                () = due => return Event::Timeout,
            }
        };
        self.operation = Box::pin(pending());
        self.event_of(finished, protocol.failures()).await
    }

    /// What the end of an operation means. Store calls have failed so many times before.
    async fn event_of(&mut self, finished: Finished, failures: u32) -> Event {
        match finished {
            Finished::Permitted(permission) => self.permitted(permission),
            Finished::Counted(Ok(permit), permission) => {
                self.quota_permit = Some(permit);
                self.permitted(permission)
            }
            Finished::Counted(Err(wait), _) => self.quota_exceeded(wait),
            Finished::Changed => Event::Changed,
            Finished::Paused(event) => event,
            Finished::Followed(follower, progress) => match self.met(follower, progress).await {
                Ok(followed) => Event::Followed(followed),
                Err(problem) => self.failed(problem),
            },
            Finished::FollowedToEnd(progress) => self.followed_to_end(progress).await,
            Finished::OtherId(problem) => {
                self.problem = Some(problem);
                Event::OtherId
            }
            Finished::Claimed(Ok(claim)) => {
                self.answered("claim", failures);
                match claim {
                    Claim::Inserted(_) => self.unless_barred(Event::Claimed),
                    Claim::Exists { record, now } => {
                        // It is certain that nothing is claimed: a reload need not wait for the comparison.
                        self.permission = None;
                        self.view(record, now).await.map_or_else(|problem| self.failed(problem), Event::Exists)
                    }
                }
            }
            Finished::Superseded(Ok(is_superseded)) => {
                self.answered("supersede", failures);
                // No reaper sees the lease of an attempt that another takes the place of.
                let was_in_flight = |found: &FoundRecord| found.record.state == State::InFlight;
                if is_superseded && self.attempted.is_none() && self.found.as_ref().is_some_and(was_in_flight) {
                    self.request.iter().for_each(|request| request.state.metrics.lease_expired());
                }
                if is_superseded { self.unless_barred(Event::Claimed) } else { Event::NotSuperseded }
            }
            Finished::Claimed(Err(error)) => self.claim_failed(error, "claim", failures),
            Finished::Superseded(Err(error)) => self.claim_failed(error, "supersede", failures),
            Finished::Looked(Ok(None)) => {
                self.found = None;
                Event::Looked(None)
            }
            Finished::Looked(Ok(Some(RecordEntry { record, now, .. }))) => match self.view(record, now).await {
                Ok(view) => Event::Looked(Some(view)),
                Err(problem) => self.failed(problem),
            },
            Finished::Looked(Err(error)) => {
                tracing::debug!(%error, record = %self.id, "the store failed a request that waits");
                Event::StoreFailed { in_doubt: false }
            }
            Finished::Locked(locked) => self.locked(locked),
            Finished::Checked(taken) => self.checked(taken),
            Finished::Probed(probed) => {
                let finding = probed.finding;
                self.probed = Some(probed);
                Event::Probed(finding)
            }
            Finished::Attempted(attempted) => {
                let is_lost = attempted.may_be_sent_again();
                self.attempted = Some(attempted);
                if is_lost { Event::AttemptLost } else { Event::AttemptEnded }
            }
            Finished::Settled(Ok(settled)) => {
                self.answered("settle", failures);
                let settled = self.held_before(settled);
                let settlement = match &settled {
                    Settled::Done { .. } => SettleResult::Done,
                    Settled::NotCurrent { record } => self.superseded(record.as_ref()),
                };
                match &mut self.attempted {
                    Some(attempted) => {
                        attempted.record = None;
                        // A record stands that says how the attempt ended: a claim that comes late writes nothing.
                        if settlement == SettleResult::Done && !matches!(attempted.end, Settlement::Release) {
                            self.doubts = None;
                        }
                    }
                    // The next claim is another attempt's: a withdrawal of this one that comes late must not meet it.
                    None => self.fresh = None,
                }
                self.settled = Some(settled);
                Event::Settled(settlement)
            }
            Finished::Settled(Err(error)) => {
                self.failed_again(&error, "settle", failures);
                Event::StoreFailed { in_doubt: true }
            }
        }
    }

    /// Begins an operation of the store. The notes of the request count how long the store takes for it.
    fn ask_store(&mut self, operation: impl Future<Output = Finished> + Send + 'static) {
        self.asked = Instant::now();
        let notes = self.request.as_ref().and_then(|request| request.head.notes.as_ref());
        match notes.map(Notes::asks_store) {
            Some(timing) => self.begin_operation(async move {
                let finished = operation.await;
                drop(timing);
                finished
            }),
            None => self.begin_operation(operation),
        }
    }

    fn begin_operation(&mut self, operation: impl Future<Output = Finished> + Send + 'static) {
        self.operation = Box::pin(operation);
    }

    fn share_running(&mut self, since: Duration) -> Result<(), Missing> {
        // What it met before it ran is not needed any more.
        (self.permission, self.found, self.released, self.lock) = (None, None, None, None);
        let request = needed(self.request.as_ref(), REQUEST)?;
        let (attempt, lease) = (self.attempt()?, request.policy().lease);
        let asked = self.began + since;
        let sent = (request.fingerprint.clone(), request.proof);
        let running = Running::new(attempt, sent, request.head.span(), (lease, asked));
        needed(self.leader.as_ref(), LEADER)?.running(running);
        Ok(())
    }

    fn settle(&mut self, end: Settlement) -> Result<(), Missing> {
        let (store, id, attempt) = (Arc::clone(&self.shared.store), self.id, self.attempt()?);
        self.ask_store(async move { Finished::Settled(store.settle(id, attempt, end).await) });
        Ok(())
    }

    fn failed(&mut self, problem: Problem) -> Event {
        self.problem = Some(problem);
        Event::Failed
    }

    /// Answers the client.
    fn reply(&mut self, outcome: Reply) -> Result<(), Missing> {
        if let Reply::Attempted(_) = outcome {
            let (request, attempted) = (self.request.as_ref(), self.attempted.as_mut());
            attempt::conclude(needed(request, REQUEST)?, needed(attempted, ATTEMPTED)?, self.settled.as_ref());
            return Ok(());
        }
        self.reply_without_attempt(outcome)
    }

    /// The store has answered a claim or a settlement.
    fn answered(&mut self, what: &'static str, failures: u32) {
        if failures > 0 {
            tracing::debug!(record = %self.id, what, "the store has answered after all");
        }
    }
}

fn needed<T>(piece: Option<T>, name: &'static str) -> Result<T, Missing> {
    piece.ok_or(Missing(name))
}

const REQUEST: &str = "a request that is not answered";
const CLIENT: &str = "a client that is not answered";
const FRESH: &str = "a record to claim";
const LEADER: &str = "the leadership of the key";
const FOLLOWER: &str = "a leader to follow";
const HELD: &str = "the version of the record that was held";
const FOUND: &str = "a record that was found";
const PROBED: &str = "the upstream's answer to a probe";
const ATTEMPTED: &str = "an attempt that has ended";
