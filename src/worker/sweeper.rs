//! Removes records, dead deliveries and audit entries that have expired, and counts the records that stand.

use std::sync::Arc;

use tokio::time::Instant;

use super::{BEHIND, Settings, Worker, every};
use crate::store::Counting;
use crate::store::deliveries::{self, Sequence};

pub(super) async fn run(mut worker: Worker) {
    let [mut of_records, mut of_deliveries] = [(); 2].map(|()| Counting::at_least(worker.settings.count_every));
    let mut dead_after = None;
    let mut ticks = every(worker.settings.sweep_every);
    while worker.unless_shut_down(ticks.tick()).await {
        sweep(&mut worker).await;
        sweep_audit(&mut worker).await;
        look_after_deliveries(&mut worker, &mut of_deliveries, &mut dead_after).await;
        if *worker.shutdown.borrow() {
            return;
        }
        if let Some(counts) = of_records.unless_too_soon(async { worker.store.count().await.ok() }).await {
            worker.metrics.records_counted(counts);
        }
    }
}

/// One batch after another while they come back full, with a pause between. Each is twice as large as the one before, up
/// to a large one, and up to the largest where the sweep falls behind: the more callers write, the longer a batch waits its
/// turn, and the more it must do then. The store reports its failures.
async fn sweep(worker: &mut Worker) {
    let mut limit = worker.settings.batch;
    let behind = Instant::now() + BEHIND;
    loop {
        let began = Instant::now();
        let Ok(count) = worker.store.sweep(limit).await else { return };
        worker.metrics.records_swept(count);
        let pause = worker.settings.pause.max(2 * began.elapsed());
        if count < limit || !worker.unless_shut_down(tokio::time::sleep(pause)).await {
            return;
        }
        let Settings { large_batch, largest_batch, .. } = worker.settings;
        limit = (limit * 2).min(if Instant::now() < behind { large_batch } else { largest_batch });
    }
}

/// The same with the entries of the audit log, which are few.
async fn sweep_audit(worker: &mut Worker) {
    let store = Arc::clone(&worker.store);
    let Some(log) = store.audit() else { return };
    let limit = worker.settings.batch;
    while !*worker.shutdown.borrow() && log.sweep_entries(limit).await.is_ok_and(|count| count >= limit) {
        if !worker.unless_shut_down(tokio::time::sleep(worker.settings.pause)).await {
            return;
        }
    }
}

/// The same with deliveries that were given up. Then it counts those that are there, and looks at some of the dead ones,
/// behind `dead_after`: a request may have run to its end after all.
async fn look_after_deliveries(worker: &mut Worker, counting: &mut Counting, dead_after: &mut Option<Sequence>) {
    let store = Arc::clone(&worker.store);
    let Some(queue) = store.deliveries() else { return };
    let limit = worker.settings.batch;
    while !*worker.shutdown.borrow() && queue.sweep_deliveries(limit).await.is_ok_and(|count| count >= limit) {
        if !worker.unless_shut_down(tokio::time::sleep(worker.settings.pause)).await {
            return;
        }
    }
    let looked = async {
        let counts = queue.count_deliveries().await.ok()?;
        if counts.iter().any(|count| count.dead > 0) {
            *dead_after = deliveries::remove_completed(&*store, *dead_after, limit).await.unwrap_or(*dead_after);
        }
        Some(counts)
    };
    if let Some(counts) = counting.unless_too_soon(looked).await {
        // Where a database is away, what the others have looks like all of it.
        if store.away().is_empty() {
            worker.metrics.deliveries().counted(&counts);
        }
    }
}
