//! Reaper, sweeper and key counter: upkeep of records that no request meets.
//!
//! Correctness waits for none of them: a request that meets a record whose lease is past, or that has expired, is
//! decided by the record's times. The workers keep the store small, and report unknown outcomes to operators.

mod key_counter;
mod reaper;
mod sweeper;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Interval, MissedTickBehavior};

use crate::store::Store;
use crate::store::sealed::Resealer;
use crate::telemetry::metrics::Metrics;

pub use reaper::lost_at_start;

/// How long a worker that panicked waits before it starts again.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// A sweep that lasts longer than this falls behind.
const BEHIND: Duration = Duration::from_secs(10);

/// When the workers run, and how much they do at once.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Between two looks for leases that are past.
    pub reap_every: Duration,
    /// Between two looks for expired records. Frequent looks spread the work: what is removed at once takes from callers.
    pub sweep_every: Duration,
    /// The shortest pause between two counts of the records.
    pub count_every: Duration,
    /// Most records in one store operation, and in the first of a sweep.
    pub batch: usize,
    /// Most records in one operation of a sweep that has much to do. Callers wait for it, or run beside it.
    pub large_batch: usize,
    /// Most records in one operation of a sweep that falls behind: it has lasted longer than ten seconds.
    pub largest_batch: usize,
    /// The shortest time between two batches of a sweep. It is twice what the last batch took, so that requests have most
    /// of the store.
    pub pause: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            reap_every: Duration::from_secs(1),
            sweep_every: Duration::from_secs(1),
            // Each tenth look counts.
            count_every: Duration::from_secs(9),
            batch: 256,
            large_batch: 512,
            largest_batch: 4096,
            pause: Duration::from_millis(2),
        }
    }
}

impl Settings {
    /// For a store where an operation of a sweep does not wait for its turn behind callers: they run beside it, and
    /// smaller ones leave more to them. Other processes look as well.
    #[must_use]
    pub fn beside_callers() -> Self {
        Self { largest_batch: 512, sweep_every: Duration::from_secs(10), ..Self::default() }
    }
}

/// Starts reaper and sweeper, and a key counter where there is a `resealer`. The task ends when `shutdown` turns true or its
/// sender is dropped; it finishes the store operation that it is in.
#[must_use]
pub fn spawn(
    store: Arc<dyn Store>,
    resealer: Option<Arc<Resealer>>,
    metrics: Metrics,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
) -> JoinHandle<()> {
    let worker = Worker { store, resealer, metrics, settings, shutdown };
    tokio::spawn(async move {
        tokio::join!(
            supervise(worker.clone(), "reaper", reaper::run),
            supervise(worker.clone(), "sweeper", sweeper::run),
            supervise(worker.clone(), "key counter", key_counter::run)
        );
    })
}

/// The state that the workers share.
#[derive(Clone)]
struct Worker {
    store: Arc<dyn Store>,
    resealer: Option<Arc<Resealer>>,
    metrics: Metrics,
    settings: Settings,
    shutdown: watch::Receiver<bool>,
}

impl Worker {
    /// Waits for `wait`; false if the worker is to end instead.
    async fn unless_shut_down(&mut self, wait: impl Future) -> bool {
        tokio::select! {
            biased;
            _ = self.shutdown.wait_for(|down| *down) => false,
            _ = wait => true,
        }
    }
}

/// Runs a worker, and again if it panics: without a reaper, records whose attempt is lost would never be seen.
async fn supervise<F>(mut worker: Worker, name: &'static str, run: fn(Worker) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        // The set ends the worker if this task is aborted.
        let mut task = JoinSet::new();
        task.spawn(run(worker.clone()));
        match task.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(worker = name, "a worker panicked; it starts again")
            }
            _ => return,
        }
        if !worker.unless_shut_down(tokio::time::sleep(RESTART_DELAY)).await {
            return;
        }
    }
}

/// Ticks at once and then every `period`, counted from the end of the work if that took longer.
fn every(period: Duration) -> Interval {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

#[cfg(test)]
mod tests;
