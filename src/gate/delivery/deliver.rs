//! Delivers accepted requests: takes those that are due, and runs each under the claim of its key, as a client would that
//! sends it again until it has its end.
//!
//! So a delivery needs no promise of its own. Where two gates take the same one, or one dies with it, the claim protocol sees
//! to it that the request runs once.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::circuit::{Allowance, HalfOpenPermit};
use super::disposition::{Disposition, Tries};
use crate::gate::claim::id_rotation::IdHolder;
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::shared::QueuedNamespaces;
use crate::gate::{Gate, RouteState};
use crate::idempotency::codec::is_sealed;
use crate::idempotency::delivery::{Deliver, Order};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::State;
use crate::idempotency::recovery::Recovery;
use crate::route::Route;
use crate::store::deliveries::{
    self, Batch, Delivery, DeliveryChange, DeliveryHold, DeliveryState, Take, TakenDelivery,
};
use crate::store::{Counting, Error, Origin, OriginId};

/// For how long no gate takes a delivery again. It is prolonged while the attempt lasts.
const HOLD: Duration = Duration::from_secs(10);

/// How often to look for what is due, where nothing says that something is.
const POLL: Duration = Duration::from_millis(500);

/// How often to look, at most, whether a route has deliveries that accepts none any more.
const LEFT_OVER: Duration = Duration::from_secs(30);

/// How many deliveries, and bytes of them, to take at a time.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 8 << 20;

/// How long ends are gathered before a few deliveries are taken in their place, so that not each costs a call of its own.
const GATHER: Duration = Duration::from_millis(10);

/// How late deliveries of a route with a rate may be, and still be made up for: to take them needs time.
const ARREARS: Duration = Duration::from_millis(50);

/// How long a delivery waits that this version cannot read.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(60);

/// The deliveries of one route at this gate.
struct RouteDeliveries {
    /// How many are under way.
    running: Arc<AtomicU32>,
    pace: Pace,
    /// When the last were taken.
    taken: Option<Instant>,
}

/// When deliveries may begin, where the route has a rate.
struct Pace {
    /// When the next may begin.
    next: Instant,
}

impl Pace {
    /// How many may begin now.
    fn due(&mut self, gap: Duration, now: Instant) -> u32 {
        // The rate may have been lower. What nothing was there for is not made up for.
        let earliest = now.checked_sub(ARREARS).unwrap_or(now);
        self.next = self.next.min(now + gap).max(earliest);
        match now.checked_duration_since(self.next) {
            Some(late) => 1 + u32::try_from(late.as_nanos() / gap.as_nanos().max(1)).unwrap_or(u32::MAX - 1),
            None => 0,
        }
    }

    /// So many began. The next follows the time for which they were due: how long it took to take them makes no difference.
    fn began(&mut self, gap: Duration, count: u32) {
        self.next += gap.saturating_mul(count);
    }
}

/// Counts a delivery as under way, and says when that is over.
struct Running(Arc<AtomicU32>, Arc<Notify>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
        self.1.notify_one();
    }
}

/// Delivers until `stop` turns true; nothing begins any more when this returns, and what is under way goes on. `current` is the
/// gate that serves.
pub async fn deliver_accepted(
    current: impl Fn() -> Arc<Gate> + Clone + Send + 'static,
    mut stop: watch::Receiver<bool>,
) {
    let mut routes: HashMap<Arc<str>, tokio::task::AbortHandle> = HashMap::new();
    let mut tasks = JoinSet::new();
    let (mut left_over, mut looks) = (Vec::new(), Counting::at_least(LEFT_OVER));
    let mut stranded = HashSet::new();
    let shared = Arc::clone(&current().shared);
    if shared.store.deliveries().is_none() {
        return;
    }
    shared.queued.store(Arc::new(QueuedNamespaces::Any));
    loop {
        let gate = current();
        if let Some(found) = looks.unless_too_soon(gate.routes_with_deliveries()).await {
            gate.warn_of_stranded(&found, &mut stranded);
            let namespaces = found.iter().map(|origin| origin.namespace.as_ref().into()).collect();
            shared.queued.store(Arc::new(QueuedNamespaces::These(namespaces)));
            left_over = found;
        }
        gate.note_accepting();
        while tasks.try_join_next().is_some() {}
        routes.retain(|_, task| !task.is_finished());
        for route in gate.router.routes().iter().filter(|route| route.policy.mode.protects()) {
            let has_left_over = || left_over.iter().any(|origin| origin.id() == gate.states[&route.name].origin);
            if (route.policy.accepts() || has_left_over()) && !routes.contains_key(&route.name) {
                let (current, name) = (current.clone(), Arc::clone(&route.name));
                routes.insert(Arc::clone(&route.name), tasks.spawn(deliver_of(current, name)));
            }
        }
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => break,
            () = sleep(POLL) => {}
        }
    }
    // What was taken and did not begin is due again when its hold ends.
    tasks.shutdown().await;
}

/// Delivers what a route accepted, until there is no such route.
async fn deliver_of(current: impl Fn() -> Arc<Gate>, name: Arc<str>) {
    let pace = Pace { next: Instant::now() };
    let mut deliveries = RouteDeliveries { running: Arc::default(), pace, taken: None };
    loop {
        let gate = current();
        let Some(route) = gate.router.routes().iter().find(|route| route.name == name) else { return };
        if !route.policy.mode.protects() {
            return;
        }
        let state = &gate.states[&name];
        let pause = deliveries.deliver(&gate, route, state).await;
        if !pause.is_zero() {
            tokio::select! {
                biased;
                () = state.arrivals.notified() => {}
                () = sleep(pause) => {}
            }
        }
    }
}

impl RouteDeliveries {
    /// Begins what is due and may begin; returns how long to wait, unless something happens.
    async fn deliver(&mut self, gate: &Arc<Gate>, route: &Arc<Route>, state: &Arc<RouteState>) -> Duration {
        let policy = &route.policy.deliver;
        // A route without a due delivery must not keep the trial from others: it is given back, and taken again below.
        let Allowance { count: limit, trial } = self.allow(policy, state);
        let is_trial = trial.is_some();
        drop(trial);
        if limit == 0 {
            // The end of one that is under way on this route wakes this up sooner.
            let wait = self.pace.next.saturating_duration_since(Instant::now());
            return if wait.is_zero() { POLL } else { wait.min(POLL) };
        }
        let gathering = self.gathering(policy, limit);
        if !gathering.is_zero() {
            return gathering;
        }
        let take = Take {
            origin: state.origin,
            limit: limit as usize,
            max_bytes: BATCH_BYTES,
            hold: HOLD,
            is_ordered: policy.order == Order::Scope,
        };
        let taking = async { deliveries::of(&*gate.shared.store)?.take_due(take).await };
        let batch = match timeout(HOLD / 2, taking).await {
            Ok(Ok(batch)) => batch,
            Ok(Err(error)) => {
                tracing::debug!(%error, route = &*state.name, "the store failed while deliveries were taken");
                return 2 * POLL;
            }
            Err(_) => return 2 * POLL,
        };
        let Batch { taken, is_more, next_due_in } = batch;
        let count = taken.len() as u32;
        self.taken = Some(Instant::now()).filter(|_| count > 0);
        if let Some(rate) = policy.rate {
            self.pace.began(rate.gap(), count);
        }
        for taken in taken {
            let trial = is_trial.then(|| state.circuit.allow(1).trial).flatten();
            self.running.fetch_add(1, Ordering::AcqRel);
            let running = Running(Arc::clone(&self.running), Arc::clone(&state.arrivals));
            let delivering = Arc::clone(gate).deliver(Arc::clone(route), Arc::clone(state), taken, running, trial);
            tokio::spawn(Box::pin(delivering));
        }
        if is_more && count > 0 {
            Duration::ZERO
        } else {
            next_due_in.unwrap_or(POLL).clamp(Duration::from_millis(1), POLL)
        }
    }

    /// How long to wait for more room, where there is little and some has just been filled.
    fn gathering(&self, policy: &Deliver, limit: u32) -> Duration {
        let is_little = limit < policy.concurrency.min(BATCH as u32).div_ceil(4);
        let since = self.taken.filter(|_| is_little && policy.rate.is_none());
        since.map_or(Duration::ZERO, |since| GATHER.saturating_sub(since.elapsed()))
    }

    /// How many may begin now.
    fn allow(&mut self, policy: &Deliver, state: &RouteState) -> Allowance {
        let running = self.running.load(Ordering::Acquire);
        let free = policy.concurrency.saturating_sub(running).min(BATCH as u32);
        state.circuit.allow(match policy.rate {
            Some(rate) => free.min(self.pace.due(rate.gap(), Instant::now())),
            None => free,
        })
    }
}

impl Gate {
    /// The routes of this service that have deliveries, whether they accept any more or not; nothing where the store fails.
    async fn routes_with_deliveries(&self) -> Option<Vec<Origin>> {
        let counting = async { deliveries::of(&*self.shared.store)?.count_deliveries().await };
        let counts = match timeout(HOLD, counting).await {
            Ok(Ok(counts)) => counts,
            _ => return None,
        };
        let own = counts.into_iter().filter(|count| count.queued > 0).filter_map(|count| count.origin);
        Some(own.filter(|origin| origin.service == self.settings.service).collect())
    }

    /// Notes the namespaces that accept requests. Should they accept none any more, their deliveries count until the next look.
    fn note_accepting(&self) {
        let accepting = self.router.routes().iter().filter(|route| route.policy.accepts());
        let accepting: HashSet<Arc<str>> = accepting.map(|route| Arc::clone(&route.namespace)).collect();
        if let QueuedNamespaces::These(these) = &**self.shared.queued.load()
            && !accepting.is_subset(these)
        {
            self.shared.queued.store(Arc::new(QueuedNamespaces::These(these | &accepting)));
        }
    }

    /// Logs which routes have deliveries that this gate does not deliver: once for each, until it does.
    fn warn_of_stranded(&self, with_deliveries: &[Origin], known: &mut HashSet<OriginId>) {
        let delivers = |origin: OriginId| {
            let mut delivering = self.router.routes().iter().filter(|route| route.policy.mode.protects());
            delivering.any(|route| self.states[&route.name].origin == origin)
        };
        known.retain(|known| with_deliveries.iter().any(|origin| origin.id() == *known) && !delivers(*known));
        for origin in with_deliveries.iter().filter(|origin| !delivers(origin.id())) {
            if known.insert(origin.id()) {
                tracing::warn!(
                    route = &*origin.route,
                    namespace = &*origin.namespace,
                    "accepted requests of a route wait: this gate has no route of that name and namespace that protects or accepts \
                     requests; give one this name and namespace until they are delivered, or purge them"
                );
            }
        }
    }

    async fn deliver(
        self: Arc<Self>,
        route: Arc<Route>,
        state: Arc<RouteState>,
        taken: TakenDelivery,
        running: Running,
        trial: Option<HalfOpenPermit>,
    ) {
        // A shutdown waits for it.
        let going = self.shared.drain.requests.subscribe();
        let (id, held) = (taken.delivery.id, taken.held());
        let disposition = match ProtectedRequest::of_delivery(&self, &route, &state, &taken).await {
            Ok(request) => match request.comes_before().await {
                // An attempt in flight may yet be released. The claim finds out.
                Ok(None | Some(IdHolder::Record(State::InFlight))) => tokio::select! {
                    biased;
                    disposition = self.try_in_time(request, &taken, &route.policy) => disposition,
                    never = self.prolong(held) => match never {},
                },
                Ok(Some(IdHolder::Record(State::Unknown))) => Ok(Disposition::outcome_unknown()),
                Ok(Some(IdHolder::Record(State::Completed) | IdHolder::Delivery)) => Ok(Disposition::Done),
                Err(error) => Err(error),
            },
            Err(pause) => Ok(Disposition::Wait(pause)),
        };
        drop(trial);
        let changed = match disposition {
            Ok(disposition) => {
                let change = change_of(disposition, &route);
                if let DeliveryChange::Park { note, .. } = &change {
                    let reason = String::from_utf8_lossy(note);
                    let route = &*state.name;
                    tracing::warn!(record = %id, route, %reason, "an accepted request is not delivered any more");
                }
                self.change_delivery(held, change).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = changed {
            // It is due again when its hold ends, and its record says what became of it.
            tracing::debug!(%error, record = %id, "the store failed at the end of a delivery");
        }
        drop(running);
        drop(going);
    }

    /// Tries a delivery, unless its time is over: it may have waited for its upstream, or for an operator. A record may tell how an
    /// attempt ended that was made in time, so the claim looks at it. It makes no other attempt.
    async fn try_in_time(
        self: &Arc<Self>,
        request: ProtectedRequest,
        taken: &TakenDelivery,
        policy: &Policy,
    ) -> Result<Disposition, Error> {
        let Delivery { id, attempts, accepted_at, queued_at, now, .. } = taken.delivery;
        let age = now.since(queued_at);
        if policy.deliver.is_too_late(age) {
            let found = self.shared.store.get(id).await?.map(|found| found.record);
            match found.filter(|record| record.state == State::InFlight || record.until > accepted_at) {
                None => {
                    let note = "deliver.give_up_after is over".to_owned();
                    return Ok(Disposition::GiveUp { is_attempt: false, note });
                }
                Some(record) if record.state == State::Unknown && matches!(policy.recovery, Recovery::Retry) => {
                    return Ok(Disposition::outcome_unknown());
                }
                Some(_) => {}
            }
        }
        self.try_unattended(request, Tries { attempts, age }).await
    }

    /// Prolongs a hold again and again. Where that fails, another gate may take the delivery: it finds the claim of the attempt.
    async fn prolong(&self, mut held: DeliveryHold) -> Infallible {
        loop {
            sleep(HOLD / 2).await;
            let change = DeliveryChange::Postpone { delay: HOLD, is_attempt: false, note: None };
            let prolonged = async {
                let queue = deliveries::of(&*self.shared.store)?;
                queue.change(held, change).await?;
                queue.delivery(held.id).await
            };
            match prolonged.await {
                Ok(Some(Delivery { token, state: DeliveryState::Queued { due }, .. }))
                    if token == held.token && due <= held.until.plus(2 * HOLD) =>
                {
                    held.until = due;
                }
                // The hold had ended, and another gate has pauses of its own; or it is over.
                Ok(_) => pending().await,
                Err(error) => tracing::debug!(%error, record = %held.id, "the store failed to prolong a hold"),
            }
        }
    }

    async fn change_delivery(&self, mut held: DeliveryHold, change: DeliveryChange) -> Result<(), Error> {
        let queue = deliveries::of(&*self.shared.store)?;
        for _ in 0..3 {
            if queue.change(held, change.clone()).await? {
                break;
            }
            // The hold was prolonged; or it ended, and another gate has one that is as good.
            match queue.delivery(held.id).await? {
                Some(delivery) if delivery.token == held.token => match delivery.state {
                    DeliveryState::Queued { due } => held.until = due,
                    DeliveryState::Dead { .. } => break,
                },
                _ => break,
            }
        }
        Ok(())
    }
}

fn change_of(disposition: Disposition, route: &Route) -> DeliveryChange {
    match disposition {
        Disposition::Done => DeliveryChange::Finish,
        Disposition::Wait(delay) => DeliveryChange::Postpone { delay, is_attempt: false, note: None },
        Disposition::Again { pause, note } => {
            DeliveryChange::Postpone { delay: pause, is_attempt: true, note: Some(note.into()) }
        }
        Disposition::GiveUp { is_attempt, note } => {
            DeliveryChange::Park { ttl: route.policy.unknown_ttl, is_attempt, note: Bytes::from(note) }
        }
    }
}

/// The pause of a delivery that cannot be read.
pub(super) fn unreadable(gate: &Gate, taken: &TakenDelivery, route: &str) -> Duration {
    if let Some(others) = gate.shared.unreadable.due() {
        let record = taken.delivery.id;
        match is_sealed(&taken.delivery.head) || is_sealed(&taken.request) {
            true => tracing::error!(
                %record, route, others,
                "an accepted request is encrypted with a key that store.encryption_keys does not have: it waits until a gate that has the key delivers it"
            ),
            false => tracing::error!(
                %record, route, others, "an accepted request is in a format that this version cannot read"
            ),
        }
    }
    UNREADABLE_PAUSE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::{gate_on, route};
    use crate::idempotency::codec::SEALED;
    use crate::idempotency::delivery::DeliveryRate;
    use crate::idempotency::policy::Mode;
    use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};
    use crate::store::deliveries::{Lane, NewDelivery};
    use crate::store::memory::Memory;
    use crate::telemetry::logged::logged;

    fn route_with(rate: &str) -> Arc<Route> {
        let mut route = route("orders", Mode::Accept, "host");
        route.policy.deliver.rate = Some(rate.parse::<DeliveryRate>().unwrap());
        Arc::new(route)
    }

    #[tokio::test(start_paused = true)]
    async fn a_hold_lasts_as_long_as_the_attempt() {
        let began = Instant::now();
        let store = Memory::with_clock(Arc::new(move || Timestamp(1_000_000).plus(began.elapsed())));
        let gate = gate_on(store, Vec::new());
        let queue = gate.shared.store.deliveries().unwrap();
        let (id, token, origin) = (RecordId([1; 32]), AttemptToken([1; 16]), OriginId(1));
        let (head, request, body) = (Bytes::new(), Bytes::new(), Bytes::new());
        queue.accept(id, NewDelivery { token, origin, lane: Lane(0), head, request, body }).await.unwrap();
        let take = || queue.take_due(Take { origin, limit: 1, max_bytes: 1, hold: HOLD, is_ordered: false });
        let taken = take().await.unwrap().taken.remove(0);
        let attempt = async {
            for _ in 0..60 {
                sleep(Duration::from_secs(1)).await;
                assert!(take().await.unwrap().taken.is_empty(), "{:?}", began.elapsed());
            }
        };
        tokio::select! {
            biased;
            () = attempt => {}
            never = gate.prolong(taken.held()) => match never {},
        }
        // The gate of the attempt dies.
        sleep(HOLD).await;
        assert_eq!(take().await.unwrap().taken.len(), 1);
    }

    /// An operator who lacks a key would look for another version.
    #[tokio::test(start_paused = true)]
    async fn the_log_says_that_a_key_is_missing_for_a_request() {
        let cases = [(&SEALED[..], "store.encryption_keys does not have"), (&[9, 9][..], "in a format")];
        for (head, said) in cases {
            let gate = gate_on(Memory::new(), Vec::new());
            let queue = gate.shared.store.deliveries().unwrap();
            let (id, token, origin) = (RecordId([1; 32]), AttemptToken([1; 16]), OriginId(1));
            let (head, request, body) = (Bytes::copy_from_slice(head), Bytes::new(), Bytes::new());
            queue.accept(id, NewDelivery { token, origin, lane: Lane(0), head, request, body }).await.unwrap();
            let take = Take { origin, limit: 1, max_bytes: 1, hold: HOLD, is_ordered: false };
            let taken = queue.take_due(take).await.unwrap().taken.remove(0);
            let (lines, _logging) = logged();
            assert_eq!(unreadable(&gate, &taken, "orders"), UNREADABLE_PAUSE);
            assert!(lines.text().contains(said), "{}", lines.text());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_that_is_raised_does_not_wait_out_the_old_one() {
        let gate = gate_on(Memory::new(), vec![Route::clone(&route_with("1/h"))]);
        let state = &gate.states["orders"];
        let pace = Pace { next: Instant::now() + Duration::from_secs(3600) };
        let mut deliveries = RouteDeliveries { running: Arc::default(), pace, taken: None };
        deliveries.deliver(&gate, &route_with("1/h"), state).await;
        assert!(deliveries.pace.next > Instant::now() + Duration::from_secs(3000));
        deliveries.deliver(&gate, &route_with("100/s"), state).await;
        assert!(deliveries.pace.next <= Instant::now() + Duration::from_millis(10));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_begins_together() {
        let route = route_with("100/s");
        let gate = gate_on(Memory::new(), vec![Route::clone(&route)]);
        let pace = Pace { next: Instant::now() - Duration::from_millis(35) };
        let mut deliveries = RouteDeliveries { running: Arc::default(), pace, taken: None };
        assert_eq!(deliveries.allow(&route.policy.deliver, &gate.states["orders"]).count, 4);
    }

    /// How many begin in a time where each take needs some, and when each take begins.
    fn paced(rate: &str, take: Duration, time: Duration) -> Vec<(Instant, u32)> {
        let (gap, start) = (rate.parse::<DeliveryRate>().unwrap().gap(), Instant::now());
        let (mut pace, mut now, mut begun) = (Pace { next: start }, start, Vec::new());
        while now < start + time {
            let due = pace.due(gap, now);
            if due > 0 {
                begun.push((now, due));
                now += take;
                pace.began(gap, due);
            }
            now = now.max(pace.next);
        }
        begun
    }

    #[test]
    fn a_rate_is_what_it_says_however_long_it_takes_to_take_deliveries() {
        let (millis, seconds) = (Duration::from_millis, Duration::from_secs);
        let count = |begun: &[(Instant, u32)]| begun.iter().map(|(_, count)| count).sum::<u32>();
        for (rate, take, time, expected) in [
            ("100/s", millis(7), seconds(10), 1000),
            ("1000/s", millis(7), seconds(10), 10_000),
            ("1000/s", millis(40), seconds(10), 10_000),
            ("20/m", millis(7), seconds(60), 20),
            ("1/s", millis(900), seconds(10), 10),
        ] {
            let begun = paced(rate, take, time);
            assert!(count(&begun).abs_diff(expected) <= expected / 100, "{rate}: {}", count(&begun));
        }
        // Where taking needs less time than the gap, each begins by itself.
        let begun = paced("100/s", millis(7), seconds(1));
        assert!(begun.iter().all(|(_, count)| *count == 1));
        assert!(begun.windows(2).all(|pair| pair[1].0 - pair[0].0 == millis(10)));
    }

    #[test]
    fn what_nothing_was_there_for_is_not_made_up_for() {
        let (start, gap) = (Instant::now(), Duration::from_millis(10));
        let mut pace = Pace { next: start };
        let hour = Duration::from_secs(3600);
        assert_eq!(pace.due(gap, start + hour), 6, "50 ms of it, and the one that is due");
        pace.began(gap, 6);
        assert_eq!(pace.due(gap, start + hour), 0);
        let mut slow = Pace { next: start };
        assert_eq!(slow.due(Duration::from_secs(1), start + hour), 1);
    }
}
