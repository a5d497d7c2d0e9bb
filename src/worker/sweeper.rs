//! Removes records, dead deliveries and audit entries that have expired, and counts the records that stand.

use std::sync::Arc;

use tokio::time::Instant;

use super::{BEHIND, Settings, Worker, every};
use crate::idempotency::record::Record;
use crate::store::Counting;
use crate::store::deliveries::{self, Delivery, DeliveryFilter, Sequence};

pub(super) async fn run(mut worker: Worker) {
    let [mut of_records, mut of_deliveries, looking] =
        [(); 3].map(|()| Counting::at_least(worker.settings.count_every));
    let mut dead = DeadDeliveries { are_any: false, after: None, looking };
    let mut ticks = every(worker.settings.sweep_every);
    while worker.unless_shut_down(ticks.tick()).await {
        sweep(&mut worker).await;
        sweep_audit(&mut worker).await;
        look_after_deliveries(&mut worker, &mut of_deliveries, &mut dead).await;
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

/// The same with deliveries that were given up. Then it looks at some of those that are left, and counts what is there.
async fn look_after_deliveries(worker: &mut Worker, counting: &mut Counting, dead: &mut DeadDeliveries) {
    let store = Arc::clone(&worker.store);
    let Some(queue) = store.deliveries() else { return };
    let limit = worker.settings.batch;
    while !*worker.shutdown.borrow() && queue.sweep_deliveries(limit).await.is_ok_and(|count| count >= limit) {
        if !worker.unless_shut_down(tokio::time::sleep(worker.settings.pause)).await {
            return;
        }
    }
    dead.look(worker).await;
    if let Some(counts) = counting.unless_too_soon(async { queue.count_deliveries().await.ok() }).await {
        dead.are_any = counts.iter().any(|count| count.dead > 0);
        // Where a database is away, what the others have looks like all of it.
        if store.away().is_empty() {
            worker.metrics.deliveries().counted(&counts);
        }
    }
}

/// Deliveries that were given up, whose requests may have run to their end after all.
struct DeadDeliveries {
    are_any: bool,
    /// Behind which one the next look goes on.
    after: Option<Sequence>,
    looking: Counting,
}

impl DeadDeliveries {
    async fn look(&mut self, worker: &Worker) {
        if !self.are_any {
            return;
        }
        let place = (self.after, worker.settings.batch);
        let looked = async {
            match &worker.resealer {
                Some(resealer) => resealer.remove_completed(place).await.ok(),
                None => {
                    let open = |delivery: &Delivery, record: Record| Some((delivery.head.clone(), record.head));
                    deliveries::remove_completed(&*worker.store, DeliveryFilter::default(), place, open).await.ok()
                }
            }
        };
        if let Some(next) = self.looking.unless_too_soon(looked).await {
            self.after = next;
        }
    }
}
