//! Asks upstreams about unknown outcomes whose clients do not come back, as `recovery = { probe = ..., every = ... }` says.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::Question;
use super::probe::{ProbeLock, Probed, lock_of};
use crate::gate::{Gate, RouteState};
use crate::idempotency::codec::Head;
use crate::idempotency::record::{RecordId, State};
use crate::idempotency::recovery::{Finding, Probe, Recovery};
use crate::route::Route;
use crate::store::{Error, Filter, RecordEntry, SETTLE_TIMEOUT, Settled, Settlement, deliveries};

/// How often to look whether a route is due.
const TICK: Duration = Duration::from_millis(500);

/// How many records to read at a time.
const CHUNK: usize = 100;

/// The rounds of a route.
struct Rounds {
    /// When the last one began.
    began: Instant,
    /// Where the next one begins: behind this record.
    from: Option<RecordId>,
    is_running: bool,
}

/// The end of a round, before its last record.
enum Stopped {
    /// The upstream gave no answer about this record. The next round begins behind it.
    Silent(RecordId),
    /// The store failed.
    Store(Error),
}

/// Asks for as long as it is polled. `current` is the gate that serves. A round of one route holds up no other.
pub async fn ask_about_unknown(current: impl Fn() -> Arc<Gate> + Clone + Send + Sync + 'static) {
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut of_routes, mut tasks): (HashMap<Arc<str>, Rounds>, _) = (HashMap::new(), JoinSet::new());
    loop {
        tick.tick().await;
        while let Some(ended) = tasks.try_join_next() {
            // No task is aborted, and a panic is caught.
            let Ok((name, next)) = ended else { continue };
            if let Some(rounds) = of_routes.get_mut(&name) {
                (rounds.from, rounds.is_running) = (next, false);
            }
        }
        let gate = current();
        let routes = gate.router.routes();
        of_routes.retain(|name, rounds| rounds.is_running || routes.iter().any(|route| route.name == *name));
        for route in routes.iter().filter(|route| route.policy.mode.protects()) {
            let Recovery::Probe(probe) = &route.policy.recovery else { continue };
            let Some(every) = probe.every else { continue };
            let now = Instant::now();
            let rounds = of_routes.entry(Arc::clone(&route.name));
            let rounds = rounds.or_insert_with(|| Rounds { began: now, from: None, is_running: false });
            if rounds.is_running || rounds.began.elapsed() < every {
                continue;
            }
            (rounds.began, rounds.is_running) = (now, true);
            let (gate, route, probe, from) = (Arc::clone(&gate), Arc::clone(route), probe.clone(), rounds.from);
            let current = current.clone();
            tasks.spawn(async move {
                let serves = || Arc::ptr_eq(&gate, &current());
                let round = AssertUnwindSafe(gate.ask_about_all(&route, &probe, from, serves)).catch_unwind();
                let next = round.await.unwrap_or_else(|_| {
                    let route = &*route.name;
                    tracing::error!(route, "asking about unknown outcomes failed; the next round begins anew");
                    None
                });
                (Arc::clone(&route.name), next)
            });
        }
    }
}

impl Gate {
    /// Asks the upstream of a route about each of its unknown outcomes, in the order of their ids from behind one on, for as long
    /// as this gate `serves`. Returns where the next round begins.
    async fn ask_about_all(
        &self,
        route: &Arc<Route>,
        probe: &Probe,
        from: Option<RecordId>,
        serves: impl Fn() -> bool,
    ) -> Option<RecordId> {
        let filter = Filter {
            service: Some(Arc::clone(&self.settings.service)),
            route: Some(route.name.to_string()),
            state: Some(State::Unknown),
            ..Filter::default()
        };
        let (mut after, mut last) = (from, from);
        let round = async {
            loop {
                let chunk = self.shared.store.scan(filter.clone(), after, CHUNK).await.map_err(Stopped::Store)?;
                for found in chunk.records {
                    // Another configuration may ask elsewhere, and go by other answers.
                    if !serves() {
                        return Ok(last);
                    }
                    last = Some(found.id);
                    self.ask_about(route, probe, found).await?;
                }
                match chunk.next {
                    Some(next) => after = Some(next),
                    None => return Ok(None),
                }
            }
        };
        match round.await {
            Ok(next) => next,
            Err(Stopped::Silent(record)) => Some(record),
            Err(Stopped::Store(error)) => {
                let route = &*route.name;
                tracing::debug!(%error, route, "the store failed while unknown outcomes were looked for");
                None
            }
        }
    }

    async fn ask_about(&self, route: &Arc<Route>, probe: &Probe, found: RecordEntry) -> Result<(), Stopped> {
        let RecordEntry { id, record, now, .. } = &found;
        let (id, now) = (*id, *now);
        let Ok(head) = Head::decode(&record.head) else { return Ok(()) };
        let details = head.details();
        if !probe.is_due(record, &details, route.policy.unknown_ttl, now) || record.until <= now {
            return Ok(());
        }
        let (state, upstream) = (&self.states[&route.name], &self.upstreams[route.upstream]);
        if !details.went_to(&upstream.settings().name) {
            return Ok(());
        }
        // A record from before `every` was set has none.
        let Some(key) = &details.key else { return Ok(()) };
        let Some(target) = probe.path.target(key, &id) else { return Ok(()) };
        let tells_absence = probe.path.tells_absence(key);
        let Ok(attempt) = self.settings.tokens.next() else { return Ok(()) };
        let (store, lock_id) = (&self.shared.store, self.identifiers.first.probe_lock(id));
        let lock = lock_of(upstream, &probe.path, attempt, state.origin, head);
        let lock = ProbeLock::take(Arc::clone(store), lock_id, lock).await;
        let Some(_lock) = lock.map_err(Stopped::Store)? else { return Ok(()) };
        let asked = Question::of_worker(self, upstream, target, probe).ask().await;
        let probed = Probed::new(None, id, details.is_call, tells_absence, state, asked);
        let end = match probed.finding {
            Finding::Done => probed.end(&route.policy),
            // Nothing is here to run: a retry does.
            Finding::Absent => Some(Settlement::Release),
            Finding::Unclear => None,
        };
        if let Some(end) = end {
            // The transaction of its upstream says how it ends, and others need not wait for that.
            if store.is_held(id).await.map_err(Stopped::Store)? {
                return Ok(());
            }
            // A transaction that begins now holds this round up for no longer than that.
            let Ok(settled) = timeout(SETTLE_TIMEOUT, store.settle(id, record.attempt, end)).await else {
                tracing::debug!(record = %id, "the outcome that was found out could not be written down in time");
                return Ok(());
            };
            let settled = settled.map_err(Stopped::Store)?;
            reconciled(state, id, probed.finding, &settled);
            // What ran is not delivered any more. What did not is tried again when an operator says so.
            if probed.finding == Finding::Done && matches!(settled, Settled::Done { .. }) {
                deliveries::remove_of(&**store, &found).await.map_err(Stopped::Store)?;
            }
        }
        if probed.is_silent() { Err(Stopped::Silent(id)) } else { Ok(()) }
    }
}

fn reconciled(state: &RouteState, record: RecordId, finding: Finding, settled: &Settled) {
    let route = &*state.name;
    match settled {
        Settled::Done { .. } => {
            tracing::info!(%record, route, finding = finding.as_str(), "an unknown outcome was found out, without its client");
        }
        Settled::NotCurrent { .. } => {
            tracing::debug!(%record, route, "an unknown outcome was settled otherwise while the upstream was asked");
        }
    }
}
