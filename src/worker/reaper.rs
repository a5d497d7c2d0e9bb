//! Turns in-flight records whose lease is past into unknown ones.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Worker, every};
use crate::idempotency::codec::Head;
use crate::idempotency::record::{RecordId, State};
use crate::store::{Origin, RecordEntry, Store};

/// How many lost attempts of one batch have a line of their own in the log.
const NAMED: usize = 10;

/// How long looking up their routes may take.
const LOOK_UP: Duration = Duration::from_secs(2);

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    let mut lost = Vec::new();
    while worker.unless_shut_down(ticks.tick()).await {
        // A round later: after an outage of the store, a gate that lives says how its attempts ended.
        report_lost(&*worker.store, &lost).await;
        lost = reap(&worker).await;
    }
    report_lost(&*worker.store, &lost).await;
}

/// One batch after another while they come back full. The store reports its failures. Returns the records.
async fn reap(worker: &Worker) -> Vec<RecordId> {
    let limit = worker.settings.batch;
    let mut all = Vec::new();
    while let Ok(lost) = worker.store.expire_leases(limit).await {
        let is_full = lost.len() >= limit;
        if !lost.is_empty() {
            worker.metrics.leases_expired(lost.len());
        }
        all.extend(lost);
        if !is_full || *worker.shutdown.borrow() {
            break;
        }
    }
    all
}

/// Logs which attempts were lost, of those whose outcome is still unknown. An operator has to find out what became of them.
pub async fn report_lost(store: &dyn Store, lost: &[RecordId]) {
    let deadline = Instant::now() + LOOK_UP;
    for id in &lost[..lost.len().min(NAMED)] {
        let found = timeout_at(deadline, store.get(*id)).await.ok().and_then(Result::ok);
        if found.as_ref().is_some_and(|found| is_over(found.as_ref())) {
            continue;
        }
        let found = found.flatten();
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
        tracing::warn!(
            count,
            others,
            "more attempts may have been lost: `oncegate records list --state unknown` lists those that were"
        );
    }
}

/// Whether the attempt has its end after all.
fn is_over(record: Option<&RecordEntry>) -> bool {
    record.is_none_or(|found| found.record.state == State::Completed)
}
