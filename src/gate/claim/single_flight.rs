//! What this process is doing about each key right now.
//!
//! One request at a time leads for a key: it alone asks the store and may run an attempt. The others follow it, so
//! that one process never asks the store twice at once for one key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::http::problem::Problem;
use crate::idempotency::codec::Answer;
use crate::idempotency::credential::Proof;
use crate::idempotency::fingerprint::Fingerprint;
use crate::idempotency::lease::renewal_interval;
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp};
use crate::store::LeaseRenewal;
use crate::telemetry::spans::SpanContext;

const STRIPES: usize = 32;

/// The keys that are being dealt with.
#[derive(Default)]
pub(in crate::gate) struct SingleFlight {
    stripes: [Mutex<HashMap<RecordId, OrderedSender<LeaderProgress>>>; STRIPES],
}

/// How far the leader has come.
#[derive(Clone)]
pub(in crate::gate) enum LeaderProgress {
    /// It is asking the store.
    Asking {
        /// The store has said that it has a record of the key. The request must not be forwarded without a claim.
        stands: bool,
    },
    /// It runs an attempt.
    Running(Arc<Running>),
    /// The store had this record.
    Found(Arc<FoundRecord>),
    /// The store had nothing.
    Absent,
    /// Its attempt ended in a release. The store knows nothing of it any more.
    Released(Arc<Released>),
}

/// A record that the store had.
pub(in crate::gate) struct FoundRecord {
    pub(in crate::gate) record: Record,
    /// The store's time when it had it.
    pub(in crate::gate) now: Timestamp,
    /// When the store was asked, by the clock of this process.
    pub(in crate::gate) asked: Instant,
}

/// An attempt that runs in this process, or that the upstream is asked about.
pub(in crate::gate) struct Running {
    pub(in crate::gate) attempt: AttemptToken,
    pub(in crate::gate) fingerprint: Fingerprint,
    pub(in crate::gate) proof: Option<Proof>,
    pub(in crate::gate) began: Instant,
    /// The span of its request, where that is known.
    pub(in crate::gate) span: Option<SpanContext>,
    /// Nothing where the upstream is only asked what became of the attempt.
    lease: Option<Duration>,
    renewed: Mutex<Instant>,
}

/// An attempt that ended in a release, for those who waited for it.
pub(in crate::gate) struct Released {
    pub(in crate::gate) fingerprint: Fingerprint,
    pub(in crate::gate) proof: Option<Proof>,
    /// The answer, whole, that its client got; else the problem.
    pub(super) answer: Result<Answer, Problem>,
}

/// What a request is for a key.
pub(in crate::gate) enum Role {
    /// It leads.
    Leader(Leader),
    /// It follows another.
    Follower(Follower),
}

/// The right to ask the store for a key. Dropped, it lets the next one lead.
pub(in crate::gate) struct Leader {
    single_flight: Arc<SingleFlight>,
    id: RecordId,
    /// What those who follow hear in the end.
    last: Option<LeaderProgress>,
}

/// Waits for a leader.
pub(in crate::gate) struct Follower(OrderedReceiver<LeaderProgress>);

impl SingleFlight {
    pub(in crate::gate) fn join(self: &Arc<Self>, id: RecordId) -> Role {
        use std::collections::hash_map::Entry;
        match self.stripe(id).entry(id) {
            Entry::Occupied(entry) => Role::Follower(Follower(entry.get().subscribe())),
            Entry::Vacant(entry) => {
                entry.insert(OrderedSender::new(LeaderProgress::Asking { stands: false }));
                Role::Leader(Leader { single_flight: Arc::clone(self), id, last: None })
            }
        }
    }

    /// Whether a leader of this key knows of a record, and has not said which.
    pub(in crate::gate) fn knows_record(&self, id: RecordId) -> bool {
        let stripe = self.stripe(id);
        stripe
            .get(&id)
            .is_some_and(|progress| progress.with(|is| matches!(is, LeaderProgress::Asking { stands: true })))
    }

    /// The leases that are to be renewed now.
    pub(super) fn due(&self) -> Vec<(LeaseRenewal, Arc<Running>)> {
        let mut due = Vec::new();
        for stripe in &self.stripes {
            for (id, progress) in lock(stripe).iter() {
                progress.with(|progress| {
                    if let LeaderProgress::Running(running) = progress
                        && let Some(lease) = running.lease
                        && lock(&running.renewed).elapsed() >= renewal_interval(lease)
                    {
                        let held = LeaseRenewal { id: *id, attempt: running.attempt, lease };
                        due.push((held, Arc::clone(running)));
                    }
                });
            }
        }
        // In an order that does not depend on chance: stores are asked in this one.
        due.sort_unstable_by_key(|(held, _)| held.id);
        due
    }

    fn stripe(&self, id: RecordId) -> MutexGuard<'_, HashMap<RecordId, OrderedSender<LeaderProgress>>> {
        // Any byte of a digest is as good as another; the first eight are those of the key alone.
        lock(&self.stripes[usize::from(id.0[31]) % STRIPES])
    }
}

impl Running {
    /// `asked` is when the store was asked for the claim: its lease began no earlier.
    pub(in crate::gate) fn new(
        attempt: AttemptToken,
        (fingerprint, proof): (Fingerprint, Option<Proof>),
        span: SpanContext,
        (lease, asked): (Duration, Instant),
    ) -> Self {
        let (lease, renewed) = (Some(lease), Mutex::new(asked));
        Self { attempt, fingerprint, proof, began: asked, span: Some(span), lease, renewed }
    }

    /// An attempt of which the upstream is asked what became of it. It has no lease.
    pub(in crate::gate) fn probing(attempt: AttemptToken, fingerprint: Fingerprint, proof: Option<Proof>) -> Self {
        let now = Instant::now();
        Self { attempt, fingerprint, proof, began: now, span: None, lease: None, renewed: Mutex::new(now) }
    }

    /// Its lease was renewed by a call that began at `at`.
    pub(super) fn renewed(&self, at: Instant) {
        *lock(&self.renewed) = at;
    }
}

impl Leader {
    /// Notes whether the store is known to have a record that the request may not take the place of.
    pub(in crate::gate) fn set_knows_record(&self, stands: bool) {
        if let Some(sender) = self.single_flight.stripe(self.id).get(&self.id) {
            sender.send(LeaderProgress::Asking { stands });
        }
    }

    /// Tells those who follow that an attempt runs.
    pub(in crate::gate) fn running(&self, running: Running) {
        if let Some(sender) = self.single_flight.stripe(self.id).get(&self.id) {
            sender.send(LeaderProgress::Running(Arc::new(running)));
        }
    }

    /// Hands those who follow what the store had.
    pub(in crate::gate) fn found(mut self, found: FoundRecord) {
        self.last = Some(LeaderProgress::Found(Arc::new(found)));
    }

    /// Tells those who follow that the store had nothing.
    pub(in crate::gate) fn absent(mut self) {
        self.last = Some(LeaderProgress::Absent);
    }

    /// Hands those who follow the answer of a release.
    pub(in crate::gate) fn released(mut self, released: Released) {
        self.last = Some(LeaderProgress::Released(Arc::new(released)));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // No request joins after the final progress.
        let sender = self.single_flight.stripe(self.id).remove(&self.id);
        if let (Some(sender), Some(last)) = (sender, self.last.take()) {
            sender.send(last);
        }
    }
}

impl Follower {
    /// How the leader's question to the store ended; nothing if it led to nothing, and another may lead.
    pub(in crate::gate) async fn until_store_answered(&mut self) -> Option<LeaderProgress> {
        self.0.wait_for(|progress| !matches!(progress, LeaderProgress::Asking { .. })).await
    }

    /// How the leader's attempt ended; nothing if the store has to tell, or another may lead.
    pub(in crate::gate) async fn ended(&mut self) -> Option<LeaderProgress> {
        self.0
            .wait_for(|progress| !matches!(progress, LeaderProgress::Asking { .. } | LeaderProgress::Running(_)))
            .await
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under these locks can leave them half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Changes a value that others wait to see change. Those who wait are woken in the order in which they came. Dropped, it ends
/// every wait.
///
/// With its receivers it is what the gate needs of `tokio::sync::watch`, which wakes in an order of chance: then two requests
/// that wait for the same thing would take turns differently each time, and no simulation could be played again.
struct OrderedSender<T>(Arc<OrderedChannel<T>>);

/// Sees the value change.
struct OrderedReceiver<T>(Arc<OrderedChannel<T>>);

struct OrderedChannel<T> {
    state: Mutex<ChannelState<T>>,
    changed: Notify,
}

struct ChannelState<T> {
    value: T,
    is_gone: bool,
}

impl<T> OrderedSender<T> {
    fn new(value: T) -> Self {
        let state = Mutex::new(ChannelState { value, is_gone: false });
        Self(Arc::new(OrderedChannel { state, changed: Notify::new() }))
    }

    fn subscribe(&self) -> OrderedReceiver<T> {
        OrderedReceiver(Arc::clone(&self.0))
    }

    /// Puts another value in the place of this one, and wakes those who wait.
    fn send(&self, value: T) {
        lock(&self.0.state).value = value;
        self.0.changed.notify_waiters();
    }

    /// Looks at the value.
    fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.0.state).value)
    }
}

impl<T> Drop for OrderedSender<T> {
    fn drop(&mut self) {
        lock(&self.0.state).is_gone = true;
        self.0.changed.notify_waiters();
    }
}

impl<T: Clone> OrderedReceiver<T> {
    /// Waits until `is_it` holds of the value, and returns that; nothing if the sender is gone before. The last value counts,
    /// even if its sender is gone.
    async fn wait_for(&mut self, mut is_it: impl FnMut(&T) -> bool) -> Option<T> {
        loop {
            // From its creation on it is woken, also by what changes before it waits.
            let changed = self.0.changed.notified();
            {
                let state = lock(&self.0.state);
                if is_it(&state.value) {
                    return Some(state.value.clone());
                }
                if state.is_gone {
                    return None;
                }
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::idempotency::fingerprint::Recipe;
    use crate::idempotency::record::State;
    use crate::telemetry::outcome::Code;

    const ID: RecordId = RecordId([7; 32]);

    fn lead(single_flight: &Arc<SingleFlight>) -> Leader {
        match single_flight.join(ID) {
            Role::Leader(lead) => lead,
            Role::Follower(_) => panic!("the key has a leader already"),
        }
    }

    fn follow(single_flight: &Arc<SingleFlight>) -> Follower {
        match single_flight.join(ID) {
            Role::Follower(follow) => follow,
            Role::Leader(_) => panic!("the key has no leader"),
        }
    }

    #[tokio::test]
    async fn followers_get_what_the_leader_found() {
        let single_flight = Arc::new(SingleFlight::default());
        let (lead, mut follower) = (lead(&single_flight), follow(&single_flight));
        let record = Record {
            attempt: AttemptToken([1; 16]),
            state: State::Unknown,
            claimed_at: Timestamp(1),
            until: Timestamp(2),
            head: Bytes::new(),
            answer: None,
        };
        lead.found(FoundRecord { record: record.clone(), now: Timestamp(3), asked: Instant::now() });
        let Some(LeaderProgress::Found(found)) = follower.until_store_answered().await else { panic!("nothing found") };
        assert_eq!((&found.record, found.now), (&record, Timestamp(3)));
    }

    #[tokio::test]
    async fn followers_get_the_answer_of_a_release_and_nobody_after_them() {
        let single_flight = Arc::new(SingleFlight::default());
        let (first, mut follower) = (lead(&single_flight), follow(&single_flight));
        let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [3; 32] };
        let attempt = AttemptToken([1; 16]);
        let (span, second) = (SpanContext { trace: 1, span: 2 }, Duration::from_secs(1));
        first.running(Running::new(attempt, (fingerprint.clone(), None), span, (second, Instant::now())));
        assert!(matches!(follower.until_store_answered().await, Some(LeaderProgress::Running(_))));
        let answer = Err(Problem::new(Code::UpstreamUnreachable, "away"));
        first.released(Released { fingerprint, proof: None, answer });
        let next = lead(&single_flight);
        let Some(LeaderProgress::Released(released)) = follower.ended().await else { panic!("nothing released") };
        assert_eq!(released.answer.as_ref().unwrap_err().detail, "away");
        let mut late = follow(&single_flight);
        drop(next);
        assert!(late.ended().await.is_none());
    }

    #[tokio::test]
    async fn a_leader_that_vanishes_lets_another_lead() {
        let single_flight = Arc::new(SingleFlight::default());
        let (first, mut follower) = (lead(&single_flight), follow(&single_flight));
        drop(first);
        assert!(follower.until_store_answered().await.is_none());
        drop(lead(&single_flight));
    }

    #[tokio::test]
    async fn the_first_to_wait_is_the_first_to_wake() {
        let sender = OrderedSender::new(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let waiters: Vec<_> = (0..20)
            .map(|number| {
                let (mut receiver, order) = (sender.subscribe(), Arc::clone(&order));
                tokio::spawn(async move {
                    receiver.wait_for(|value| *value == 2).await.unwrap();
                    order.lock().unwrap().push(number);
                })
            })
            .collect();
        for value in 1..=2 {
            tokio::task::yield_now().await;
            assert_eq!(sender.with(|value| *value), value - 1);
            sender.send(value);
        }
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_last_value_counts_though_its_sender_is_gone() {
        let sender = OrderedSender::new(1);
        let (mut one, mut other) = (sender.subscribe(), sender.subscribe());
        let waits = tokio::spawn(async move { one.wait_for(|value| *value == 3).await });
        tokio::task::yield_now().await;
        sender.send(2);
        assert_eq!((sender.with(|value| *value), lock(&other.0.state).value), (2, 2));
        drop(sender);
        assert_eq!(other.wait_for(|value| *value == 2).await, Some(2));
        assert_eq!(waits.await.unwrap(), None);
    }
}
