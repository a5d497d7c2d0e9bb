//! The metrics of the tokio runtimes: one for each thread that serves, and one that does the rest.

use std::sync::{Mutex, PoisonError};

use prometheus::{Counter, CounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use tokio::runtime::{Handle, RuntimeMetrics};

use super::metrics::Metrics;
use super::register::add;

/// The metrics of all runtimes.
pub(super) struct Runtimes {
    workers: IntGaugeVec,
    alive_tasks: IntGaugeVec,
    global_queue_depth: IntGaugeVec,
    busy: CounterVec,
    watched: Mutex<Vec<Watched>>,
}

struct Watched {
    runtime: RuntimeMetrics,
    workers: IntGauge,
    alive_tasks: IntGauge,
    global_queue_depth: IntGauge,
    busy: Counter,
}

impl Metrics {
    /// Shows the metrics of a runtime under this name, which no other has.
    pub fn watch_runtime(&self, name: &str, runtime: &Handle) {
        self.families.runtimes.watch(name, runtime.metrics());
    }
}

impl Runtimes {
    pub(super) fn new(registry: &Registry) -> Self {
        let gauges = |name, help| add(registry, IntGaugeVec::new(Opts::new(name, help), &["runtime"]));
        let busy = "Time that the threads of a tokio runtime were busy.";
        Self {
            workers: gauges("tokio_workers", "Threads of a tokio runtime."),
            alive_tasks: gauges("tokio_alive_tasks", "Tasks of a tokio runtime that have not ended."),
            global_queue_depth: gauges(
                "tokio_global_queue_depth",
                "Tasks that wait in the queue of a tokio runtime that all its threads share.",
            ),
            busy: add(registry, CounterVec::new(Opts::new("tokio_worker_busy_seconds_total", busy), &["runtime"])),
            watched: Mutex::default(),
        }
    }

    fn watch(&self, name: &str, runtime: RuntimeMetrics) {
        let watched = Watched {
            runtime,
            workers: self.workers.with_label_values(&[name]),
            alive_tasks: self.alive_tasks.with_label_values(&[name]),
            global_queue_depth: self.global_queue_depth.with_label_values(&[name]),
            busy: self.busy.with_label_values(&[name]),
        };
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
    }

    /// Reads them anew.
    pub(super) fn refresh(&self) {
        let whole = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        // Held until all are read: a second scrape must not count the same time again.
        for watched in &*self.watched.lock().unwrap_or_else(PoisonError::into_inner) {
            let Watched { runtime, workers, alive_tasks, global_queue_depth, busy } = watched;
            let count = runtime.num_workers();
            workers.set(whole(count));
            alive_tasks.set(whole(runtime.num_alive_tasks()));
            global_queue_depth.set(whole(runtime.global_queue_depth()));
            let was_busy = (0..count).map(|worker| runtime.worker_total_busy_duration(worker).as_secs_f64());
            busy.inc_by((was_busy.sum::<f64>() - busy.get()).max(0.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_runtime_shows_its_tasks_and_how_long_it_was_busy() {
        let metrics = Metrics::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        metrics.watch_runtime("shard-7", runtime.handle());
        let value = |name: &str| {
            let text = metrics.encode();
            let start = format!("{name}{{runtime=\"shard-7\"}} ");
            let found = text.lines().find_map(|line| line.strip_prefix(&start)?.parse::<f64>().ok());
            found.unwrap_or_else(|| panic!("{start} is not in\n{text}"))
        };
        assert_eq!((value("tokio_workers"), value("tokio_alive_tasks")), (1.0, 0.0));
        let _task = runtime.spawn(std::future::pending::<()>());
        assert_eq!((value("tokio_alive_tasks"), value("tokio_global_queue_depth")), (1.0, 1.0));
        runtime.block_on(async {
            tokio::task::yield_now().await;
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(5) {}
            // What a thread did is added up when it waits.
            tokio::time::sleep(Duration::from_millis(1)).await;
        });
        assert_eq!(value("tokio_global_queue_depth"), 0.0);
        let busy = value("tokio_worker_busy_seconds_total");
        assert!(busy >= 0.005, "{busy}");
        assert!(value("tokio_worker_busy_seconds_total") < busy + 0.005, "a scrape counts nothing twice");
    }
}
