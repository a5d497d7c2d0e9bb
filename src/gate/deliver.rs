//! Delivers accepted requests: takes those that are due, and runs each under the claim of its key, as a client would that
//! sends it again until it has its end.
//!
//! So a delivery needs no promise of its own. Where two gates take the same one, or one dies with it, the claim protocol sees
//! to it that the request runs once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::header::RETRY_AFTER;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::answer::Reply;
use super::driver::drive;
use super::protected::{Client, ProtectedRequest};
use super::{Gate, RouteState};
use crate::idempotency::delivery::{Deliver, Fate, Order};
use crate::idempotency::record::{RecordId, State};
use crate::idempotency::recovery::Recovery;
use crate::route::Route;
use crate::store::deliveries::{self, Batch, Change, DeliveryState, Held, Lane, Take, Taken};
use crate::store::{Error, Listed};
use crate::telemetry::outcome::{Code, Outcome};

/// For how long nobody else takes a delivery that was taken. An attempt may last longer: whoever takes it meanwhile finds its
/// claim.
const HOLD: Duration = Duration::from_secs(10);

/// How often to look for what is due, where nothing says that something is.
const POLL: Duration = Duration::from_millis(500);

/// How often to look whether a route has deliveries that accepts none any more.
const LEFT_OVER: Duration = Duration::from_secs(30);

/// How many deliveries, and bytes of them, to take at a time.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 8 << 20;

/// How long a delivery waits that this version cannot read.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(60);

/// So many attempts in a row that reach nobody open the circuit of a route's upstream: for this long, and then twice as long
/// each time, up to a limit. A single delivery at a time tries whether the upstream is back.
const OPENS_AFTER: u32 = 5;
const OPEN: Duration = Duration::from_secs(1);
const LONGEST_OPEN: Duration = Duration::from_secs(30);

/// The deliveries of one route at this gate.
struct Lines {
    /// How many are under way.
    running: Arc<AtomicU32>,
    circuit: Arc<Mutex<Circuit>>,
    /// After which lane to go on.
    after: Option<Lane>,
    /// When the next may begin, where the route has a rate.
    next: Instant,
}

/// Whether an upstream can be reached.
#[derive(Default)]
struct Circuit {
    failures: u32,
    open_until: Option<Instant>,
}

impl Circuit {
    /// How many deliveries may begin, of those that are free.
    fn allows(&self, free: u32, running: u32, now: Instant) -> u32 {
        match self.open_until {
            None => free,
            Some(until) if now < until || running > 0 => 0,
            Some(_) => free.min(1),
        }
    }

    fn ended(&mut self, is_reached: bool, now: Instant) {
        if is_reached {
            *self = Self::default();
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if let Some(more) = self.failures.checked_sub(OPENS_AFTER) {
            let open = OPEN.saturating_mul(1_u32.checked_shl(more).unwrap_or(u32::MAX)).min(LONGEST_OPEN);
            self.open_until = Some(now + open);
        }
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
    let (mut left_over, mut looked) = (Vec::new(), None::<Instant>);
    loop {
        let gate = current();
        if gate.shared.store.deliveries().is_none() {
            return;
        }
        if looked.is_none_or(|looked| looked.elapsed() >= LEFT_OVER) {
            looked = Some(Instant::now());
            left_over = gate.routes_with_deliveries().await;
        }
        while tasks.try_join_next().is_some() {}
        routes.retain(|_, task| !task.is_finished());
        for route in gate.router.routes().iter().filter(|route| route.policy.mode.protects()) {
            if (route.policy.accepts() || left_over.contains(&route.name)) && !routes.contains_key(&route.name) {
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
    let mut lines = Lines { running: Arc::default(), circuit: Arc::default(), after: None, next: Instant::now() };
    loop {
        let gate = current();
        let Some(route) = gate.router.routes().iter().find(|route| route.name == name) else { return };
        if !route.policy.mode.protects() {
            return;
        }
        let state = &gate.states[&name];
        let pause = lines.deliver(&gate, route, state).await;
        if !pause.is_zero() {
            tokio::select! {
                () = state.arrivals.notified() => {}
                () = sleep(pause) => {}
            }
        }
    }
}

impl Lines {
    /// Begins what is due and may begin; returns how long to wait, unless something happens.
    async fn deliver(&mut self, gate: &Arc<Gate>, route: &Arc<Route>, state: &Arc<RouteState>) -> Duration {
        let policy = &route.policy.deliver;
        let limit = self.limit(policy);
        if limit == 0 {
            // The end of one that is under way is told.
            let wait = self.next.saturating_duration_since(Instant::now());
            return if wait.is_zero() { POLL } else { wait.min(POLL) };
        }
        let take = Take {
            origin: state.origin,
            limit: limit as usize,
            max_bytes: BATCH_BYTES,
            hold: HOLD,
            is_ordered: policy.order == Order::Scope,
            after: self.after,
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
        let Batch { taken, is_more, after, next_due_in } = batch;
        self.after = after;
        let count = taken.len() as u32;
        if let Some(rate) = policy.rate {
            self.next = self.next.max(Instant::now()) + rate.gap().saturating_mul(count);
        }
        for taken in taken {
            self.running.fetch_add(1, Ordering::AcqRel);
            let running = Running(Arc::clone(&self.running), Arc::clone(&state.arrivals));
            let delivering = Arc::clone(gate).deliver(
                Arc::clone(route),
                Arc::clone(state),
                taken,
                Arc::clone(&self.circuit),
                running,
            );
            tokio::spawn(Box::pin(delivering));
        }
        if is_more && count > 0 {
            Duration::ZERO
        } else {
            next_due_in.unwrap_or(POLL).clamp(Duration::from_millis(1), POLL)
        }
    }

    /// How many may begin now.
    fn limit(&self, policy: &Deliver) -> u32 {
        let now = Instant::now();
        let running = self.running.load(Ordering::Acquire);
        let free = policy.concurrency.saturating_sub(running).min(BATCH as u32);
        let free = self.circuit.lock().unwrap_or_else(PoisonError::into_inner).allows(free, running, now);
        match policy.rate {
            // One at a time, so that they are spread evenly.
            Some(_) if self.next > now => 0,
            Some(_) => free.min(1),
            None => free,
        }
    }
}

impl Gate {
    /// The routes of this service that have deliveries, whether they accept any more or not.
    async fn routes_with_deliveries(&self) -> Vec<Arc<str>> {
        let counting = async { deliveries::of(&*self.shared.store)?.count_deliveries().await };
        let counts = match timeout(HOLD, counting).await {
            Ok(Ok(counts)) => counts,
            _ => return Vec::new(),
        };
        let own = counts.into_iter().filter(|count| count.queued > 0).filter_map(|count| count.origin);
        own.filter(|origin| origin.service == self.settings.service).map(|origin| origin.route).collect()
    }

    async fn deliver(
        self: Arc<Self>,
        route: Arc<Route>,
        state: Arc<RouteState>,
        taken: Taken,
        circuit: Arc<Mutex<Circuit>>,
        running: Running,
    ) {
        // A shutdown waits for it.
        let going = self.shared.requests.subscribe();
        let (id, held) = (taken.delivery.id, taken.held());
        let began = Instant::now();
        let (change, is_reached) = match ProtectedRequest::of_delivery(&self, &route, &state, &taken).await {
            Ok(request) => {
                let (client, reply) = oneshot::channel();
                tokio::spawn(Box::pin(drive(request, Client(client))));
                match reply.await {
                    Ok(reply) => {
                        let is_reached = reply.outcome != Outcome::Problem(Code::UpstreamUnreachable);
                        (self.change_after(&route, &taken, reply, began.elapsed()).await, Some(is_reached))
                    }
                    // A bug: how far it came, its record says.
                    Err(_) => (Ok(Change::Postpone { delay: HOLD, is_attempt: false, note: None }), None),
                }
            }
            Err(pause) => (Ok(Change::Postpone { delay: pause, is_attempt: false, note: None }), None),
        };
        if let Some(is_reached) = is_reached {
            circuit.lock().unwrap_or_else(PoisonError::into_inner).ended(is_reached, Instant::now());
        }
        let changed = match change {
            Ok(change) => {
                if let Change::Park { note, .. } = &change {
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

    /// What to do with a delivery whose request got this reply.
    async fn change_after(&self, route: &Route, taken: &Taken, reply: Reply, took: Duration) -> Result<Change, Error> {
        let wait = |delay| Ok(Change::Postpone { delay, is_attempt: false, note: None });
        let asked = retry_after(reply.response.headers());
        let word = reply.outcome.as_str();
        match reply.outcome {
            Outcome::Executed | Outcome::Replayed | Outcome::Recovered => return Ok(Change::Finish),
            Outcome::Problem(Code::ResponseNotStored) => return Ok(Change::Finish),
            Outcome::Released => {
                let note = format!("{word}: {}", reply.response.status().as_u16());
                return Ok(again(route, taken, took, asked, note));
            }
            Outcome::Problem(Code::KeyReused | Code::CallerDiffers) => {
                return Ok(park(route, false, word.to_owned()));
            }
            Outcome::Problem(Code::InFlight | Code::Overloaded | Code::StoreUnavailable) => {
                return wait(asked.unwrap_or(POLL));
            }
            _ => {}
        }
        // What the record says counts: an attempt that failed may have been released or held.
        let found = self.shared.store.get(taken.delivery.id).await?.filter(Listed::is_live);
        let Some(Listed { record, .. }) = found else { return Ok(again(route, taken, took, asked, word.to_owned())) };
        match (record.state, &route.policy.recovery) {
            (State::Completed, _) => Ok(Change::Finish),
            (State::InFlight, _) => wait(HOLD),
            (State::Unknown, Recovery::Retry | Recovery::Probe(_)) => {
                Ok(again(route, taken, took, asked, word.to_owned()))
            }
            // An operator finds out, or the upstream says so itself. Where it turns out that the request did not run, the
            // operator has it delivered again: its client does not come back.
            (State::Unknown, Recovery::Hold | Recovery::Resend(_)) => {
                Ok(park(route, false, Code::OutcomeUnknown.as_str().to_owned()))
            }
        }
    }

    async fn change_delivery(&self, mut held: Held, change: Change) -> Result<(), Error> {
        let queue = deliveries::of(&*self.shared.store)?;
        for _ in 0..3 {
            if queue.change(held, change.clone()).await? {
                break;
            }
            // The attempt lasted longer than the hold, and another gate took it: its hold is as good.
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

/// It is delivered again, or given up.
fn again(route: &Route, taken: &Taken, took: Duration, asked: Option<Duration>, note: String) -> Change {
    let attempts = taken.delivery.attempts.saturating_add(1);
    let age = taken.now.since(taken.delivery.queued_at).saturating_add(took);
    match route.policy.deliver.fate(attempts, age, asked, random()) {
        Fate::Again(delay) => Change::Postpone { delay, is_attempt: true, note: Some(note.into()) },
        Fate::Exhausted => park(route, true, format!("{note}, after {attempts} attempts")),
        Fate::TooOld => park(route, true, format!("{note}, and it was accepted too long ago")),
    }
}

fn park(route: &Route, is_attempt: bool, note: String) -> Change {
    Change::Park { ttl: route.policy.unknown_ttl, is_attempt, note: Bytes::from(note) }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness, the longest pause.
    getrandom::fill(&mut bytes).map_or(u64::MAX, |()| u64::from_ne_bytes(bytes))
}

/// How long an upstream wants to be left alone (RFC 9110, 10.2.3): seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(std::time::SystemTime::now()).unwrap_or_default())
}

/// The pause of a delivery that cannot be read.
pub(super) fn unreadable(gate: &Gate, record: RecordId, route: &str) -> Duration {
    if let Some(others) = gate.shared.unreadable.due() {
        tracing::error!(%record, route, others, "an accepted request is in a format that this version cannot read");
    }
    UNREADABLE_PAUSE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_circuit_opens_and_one_at_a_time_tries_it() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        for _ in 1..OPENS_AFTER {
            circuit.ended(false, now);
            assert_eq!(circuit.allows(8, 3, now), 8);
        }
        circuit.ended(false, now);
        assert_eq!(circuit.allows(8, 0, now), 0);
        assert_eq!(circuit.allows(8, 0, now + OPEN), 1);
        assert_eq!(circuit.allows(7, 1, now + OPEN), 0, "one tries it already");
        circuit.ended(false, now + OPEN);
        assert_eq!(circuit.allows(8, 0, now + 2 * OPEN), 0);
        assert_eq!(circuit.allows(8, 0, now + 3 * OPEN), 1);
        circuit.ended(true, now);
        assert_eq!(circuit.allows(8, 5, now), 8);
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
