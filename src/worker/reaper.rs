//! Turns in-flight records whose lease is past into unknown ones.

use super::{Health, Worker, every};

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    let mut health = Health::of("expire_leases");
    while worker.unless_shut_down(ticks.tick()).await {
        reap(&worker, &mut health).await;
    }
}

/// One batch after another while they come back full.
async fn reap(worker: &Worker, health: &mut Health) {
    let limit = worker.settings.batch;
    while let Some(count) = health.note(worker.store.expire_leases(limit).await) {
        if count > 0 {
            worker.metrics.leases_expired(count);
            tracing::warn!(count, "attempts were lost: their leases are past, and their outcomes are unknown");
        }
        if count < limit || *worker.shutdown.borrow() {
            return;
        }
    }
}
