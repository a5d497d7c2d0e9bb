//! Keeps the leases of running attempts alive.

use std::collections::HashSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::Gate;
use crate::http::server::stopped;

/// The longest time between two looks for leases to renew.
const SLOWEST: Duration = Duration::from_secs(5);

/// How long the store may take to renew them.
const ANSWER: Duration = Duration::from_secs(5);

/// When leases are looked at again that were skipped: an upstream's transaction held their records, and when it lets go
/// they are past, for the first who looks.
const SOON: Duration = Duration::from_millis(200);

pub(super) async fn run(gate: &Gate, mut stop: watch::Receiver<bool>) {
    let shortest = gate.router.routes().iter().map(|route| route.policy.lease).min();
    // A lease is renewed once a third of it is past; looking twice as often leaves time for two failures.
    let mut tick = interval((shortest.unwrap_or(SLOWEST) / 6).min(SLOWEST).max(Duration::from_millis(50)));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut failing, mut is_left) = (false, false);
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stop) => return,
            _ = tick.tick() => {}
            () = sleep(SOON), if is_left => {}
        }
        is_left = false;
        let (held, running): (Vec<_>, Vec<_>) = gate.flights.due().into_iter().unzip();
        if held.is_empty() {
            continue;
        }
        let asked = Instant::now();
        let ids: Vec<_> = held.iter().map(|held| held.id).collect();
        let failure = match timeout(ANSWER, gate.store.renew(held)).await {
            Ok(Ok(renewed)) => {
                let renewed: HashSet<_> = renewed.into_iter().collect();
                let each = ids.iter().zip(&running).filter(|(id, _)| renewed.contains(id));
                each.for_each(|(_, running)| running.renewed(asked));
                is_left = ids.iter().any(|id| !renewed.contains(id));
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("the store did not answer in time".to_owned()),
        };
        match failure {
            None => failing = false,
            Some(error) if !failing => {
                failing = true;
                tracing::warn!(error, leases = running.len(), "renewing leases failed; trying again");
            }
            Some(_) => {}
        }
    }
}
