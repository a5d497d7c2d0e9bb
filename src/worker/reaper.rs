//! Turns in-flight records whose lease is past into unknown ones.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Worker, every};
use crate::idempotency::codec::Head;
use crate::idempotency::record::RecordId;
use crate::store::{Origin, Store};

/// How many lost attempts of one batch have a line of their own in the log.
const NAMED: usize = 10;

/// How long looking up their routes may take.
const LOOK_UP: Duration = Duration::from_secs(2);

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    while worker.unless_shut_down(ticks.tick()).await {
        reap(&worker).await;
    }
}

/// One batch after another while they come back full. The store reports its failures.
async fn reap(worker: &Worker) {
    let limit = worker.settings.batch;
    while let Ok(lost) = worker.store.expire_leases(limit).await {
        if !lost.is_empty() {
            worker.metrics.leases_expired(lost.len());
            report_lost(&*worker.store, &lost).await;
        }
        if lost.len() < limit || *worker.shutdown.borrow() {
            return;
        }
    }
}

/// Logs which attempts were lost. An operator has to find out what became of them.
pub async fn report_lost(store: &dyn Store, lost: &[RecordId]) {
    let deadline = Instant::now() + LOOK_UP;
    for id in &lost[..lost.len().min(NAMED)] {
        let found = timeout_at(deadline, store.get(*id)).await.ok().and_then(Result::ok).flatten();
        let (origin, head) = found.map(|found| (found.origin, Head::decode(&found.record.head).ok())).unzip();
        let origin = origin.flatten();
        if origin.as_ref().is_some_and(Origin::is_shadow) {
            // No attempt was lost: it was only observed.
            continue;
        }
        let route = origin.map_or_else(|| "-".into(), |origin| origin.route);
        let request = head.flatten().and_then(|head| head.details().request).map(tracing::field::display);
        tracing::warn!(
            request,
            record = %id,
            route = &*route,
            "an attempt was lost: its gate ended, or did not renew the lease; its outcome is unknown"
        );
    }
    if lost.len() > NAMED {
        let (count, others) = (lost.len(), lost.len() - NAMED);
        tracing::warn!(count, others, "more attempts were lost: `oncegate records list --state unknown` lists them");
    }
}
