//! The access log of a process: it begins with the gate, and a reload opens it anew.

use std::sync::Arc;

use anyhow::Context as _;

use super::Serving;
use crate::gate::Gate;
use crate::telemetry::access_log::{AccessLog, Output, Settings};
use crate::telemetry::metrics::Metrics;

/// Begins to log the requests of this gate, and of those that will take its place.
pub(super) fn start(gate: &Gate, output: Output, metrics: &Metrics) -> anyhow::Result<(Settings, Arc<AccessLog>)> {
    let settings = output.settings().clone();
    let lost = metrics.losses().access_log.clone();
    let log = AccessLog::start(output, lost).context("cannot start the thread of the access log")?;
    gate.log_access_to(Some(Arc::clone(&log)));
    Ok((settings, log))
}

impl Serving {
    /// From now on requests are logged here, or nowhere.
    pub(super) async fn log_access_to(&mut self, output: Option<Output>) -> anyhow::Result<()> {
        match (output, &mut self.access_log) {
            (Some(output), Some((settings, log))) => {
                settings.clone_from(output.settings());
                log.switch(output).await;
            }
            (Some(output), None) => {
                self.access_log = Some(start(&self.current.load().handler, output, &self.metrics)?);
            }
            (None, _) => {
                self.current.load().handler.log_access_to(None);
                // Requests that are under way have their lines written.
                self.access_log = None;
            }
        }
        Ok(())
    }

    /// Opens the file anew although the configuration is not: whoever has rotated it is waiting for that.
    pub(super) async fn reopen_access_log(&self) {
        let Some((settings, log)) = &self.access_log else { return };
        if let Err(error) = log.reopen(settings.clone()).await {
            tracing::error!(%error, "the access log is not opened anew: lines go on to the former file");
        }
    }
}
