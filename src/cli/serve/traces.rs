//! The export of spans: it begins with the gate, and a reload that changes it begins another.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Serving;
use crate::gate::Gate;
use crate::http::collector::{Settings, export};
use crate::http::usage::Usage;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::spans::Tracer;

/// How long the last spans may take at the end.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// An export that is under way.
pub(super) struct Exporting {
    settings: Settings,
    task: JoinHandle<()>,
}

/// Begins to export the spans of this gate, and of those that will take its place.
pub(super) fn start(gate: &Gate, settings: Settings, usage: &Arc<Usage>, metrics: &Metrics) -> Exporting {
    let dropped = metrics.losses().spans.clone();
    let (tracer, spans) = Tracer::new(settings.sample, dropped.clone());
    gate.trace_to(Some(tracer));
    let task = tokio::spawn(export(settings.clone(), Arc::clone(usage), spans, dropped));
    Exporting { settings, task }
}

impl Serving {
    /// From now on spans are exported like this, or not at all. Those before go where they were to go.
    pub(super) fn trace_to(&mut self, settings: Option<Settings>) {
        if self.exporting.as_ref().map(|exporting| &exporting.settings) == settings.as_ref() {
            return;
        }
        let current = self.current.load();
        self.exporting = settings.map(|settings| start(&current.handler, settings, &current.usage, &self.metrics));
        if self.exporting.is_none() {
            current.handler.trace_to(None);
        }
    }

    /// Exports the last spans.
    pub(super) async fn end_traces(&mut self) {
        let Some(exporting) = self.exporting.take() else { return };
        self.current.load().handler.trace_to(None);
        if timeout(LAST_SPANS, exporting.task).await.is_err() {
            tracing::warn!("spans are lost: the collector did not take the last of them in time");
        }
    }
}
