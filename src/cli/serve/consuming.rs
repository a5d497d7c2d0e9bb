//! Consumers, which run until they are stopped.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::supervision::supervise;
use crate::consumers::{self, Settings};
use crate::gate::Gate;
use crate::http::server::Current;
use crate::http::shards::Shards;
use crate::telemetry::metrics::Metrics;

/// The consumers of a process.
pub(super) struct Consuming(Vec<JoinHandle<()>>);

impl Consuming {
    /// Starts them.
    pub(super) fn start(
        settings: Vec<Settings>,
        shards: &Shards,
        current: &Current<Gate>,
        metrics: &Metrics,
        stop: &watch::Sender<bool>,
    ) -> Self {
        let start = |settings: Settings| {
            let metrics = metrics.consumer(&settings.name);
            let settings = Arc::new(settings);
            let (current, stop, name) = (Arc::clone(current), stop.subscribe(), Arc::clone(&settings.name));
            let consume = move || {
                let current = Arc::clone(&current);
                let gate = move || Arc::clone(&current.load().handler);
                consumers::consume(Arc::clone(&settings), gate, metrics.clone(), stop.clone())
            };
            let failed = move || tracing::error!(consumer = &*name, "a consumer failed; starting it again");
            shards.run(supervise(consume, failed))
        };
        Self(settings.into_iter().filter_map(start).collect())
    }

    /// Returns when what they had taken has ended: what ran is acknowledged, and the rest is given back.
    pub(super) async fn ended(&mut self) {
        for consumer in &mut self.0 {
            // A panic is reported where it is.
            let _ = consumer.await;
        }
    }
}
