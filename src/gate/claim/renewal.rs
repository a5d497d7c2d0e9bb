//! Keeps the leases of running attempts alive.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout};

use crate::gate::shared::Shared;
use crate::http::server::stopped;
use crate::idempotency::lease::check_interval;

/// The longest time between two looks for leases to renew.
const SLOWEST: Duration = Duration::from_secs(5);

/// How long the store may take to renew them.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// When leases are looked at again that were skipped, as an upstream's transaction held their records: by the time it ends
/// they may have passed, and whoever looks first would see them so.
const SKIPPED_AGAIN_AFTER: Duration = Duration::from_millis(200);

pub(in crate::gate) async fn run(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut shortest = shared.shortest_lease.subscribe();
    let mut tick = looks(*shortest.borrow_and_update());
    let (mut is_late, mut is_left) = (false, false);
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stop) => return,
            Ok(()) = shortest.changed() => {
                tick = looks(*shortest.borrow_and_update());
                continue;
            }
            _ = tick.tick() => {}
            () = sleep(SKIPPED_AGAIN_AFTER), if is_left => {}
        }
        is_left = false;
        let (held, running): (Vec<_>, Vec<_>) = shared.single_flight.due().into_iter().unzip();
        if held.is_empty() {
            continue;
        }
        let asked = Instant::now();
        let ids: Vec<_> = held.iter().map(|held| held.id).collect();
        match timeout(STORE_TIMEOUT, shared.store.renew(held)).await {
            Ok(Ok(renewed)) => {
                let renewed: HashSet<_> = renewed.into_iter().collect();
                let each = ids.iter().zip(&running).filter(|(id, _)| renewed.contains(id));
                each.for_each(|(_, running)| running.renewed(asked));
                is_left = ids.iter().any(|id| !renewed.contains(id));
                is_late = false;
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, leases = running.len(), "renewing leases failed; trying again");
                is_late = false;
            }
            // The store does not know that it was given up, and reports nothing.
            Err(_) if !is_late => {
                is_late = true;
                tracing::warn!(leases = running.len(), "the store did not renew leases in time; trying again");
            }
            Err(_) => {}
        }
    }
}

/// When to look for leases to renew.
fn looks(shortest: Duration) -> Interval {
    let mut tick = interval(check_interval(shortest).min(SLOWEST).max(Duration::from_millis(50)));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}
