//! Turns in-flight records whose lease is past into unknown ones.

use super::{Worker, every};

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    while worker.unless_shut_down(ticks.tick()).await {
        reap(&worker).await;
    }
}

/// One batch after another while they come back full. The store reports its failures.
async fn reap(worker: &Worker) {
    let limit = worker.settings.batch;
    while let Ok(count) = worker.store.expire_leases(limit).await {
        if count > 0 {
            worker.metrics.leases_expired(count);
            tracing::warn!(count, "attempts were lost: their leases are past, and their outcomes are unknown");
        }
        if count < limit || *worker.shutdown.borrow() {
            return;
        }
    }
}
