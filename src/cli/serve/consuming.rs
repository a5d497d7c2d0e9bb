//! Consumers, which run until they are stopped.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

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
            let current = Arc::clone(current);
            let again = move |settings, stop| {
                let current = Arc::clone(&current);
                consumers::consume(settings, move || Arc::clone(&current.load().handler), metrics.clone(), stop)
            };
            shards.run(keep(Arc::new(settings), again, stop.subscribe()))
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

/// Consumes until it is stopped, even after a panic.
async fn keep<F>(
    settings: Arc<Settings>,
    consume: impl Fn(Arc<Settings>, watch::Receiver<bool>) -> F,
    stop: watch::Receiver<bool>,
) where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        let mut consuming = JoinSet::new();
        consuming.spawn(consume(Arc::clone(&settings), stop.clone()));
        match consuming.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(consumer = &*settings.name, "a consumer failed; starting it again");
                sleep(Duration::from_secs(1)).await;
            }
            _ => return,
        }
    }
}
