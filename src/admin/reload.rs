//! `POST /api/v1/reload`: the process reads its configuration again, and the answer says what came of it.

use http::StatusCode;
use hyper::body::Incoming;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem, json};
use super::audit::{self, AuditEvent, Outcome};
use super::resolve::receive_nothing;

/// Asks the process to read its configuration again, and takes the report.
pub type ReloadRequest = oneshot::Sender<ReloadReport>;

/// What came of a reload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "status", rename_all = "kebab-case")]
pub enum ReloadReport {
    /// The new configuration is in force.
    Reloaded {
        /// How many routes it has.
        routes: usize,
        /// The keys that changed too, and that only a start sets.
        needs_restart: Vec<String>,
        /// What to know of it.
        #[serde(default)]
        warnings: Vec<String>,
    },
    /// Nothing changed.
    Refused {
        /// Why.
        detail: String,
        /// The problems of the configuration, if that is why.
        problems: Vec<ReloadProblem>,
    },
}

/// A problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReloadProblem {
    /// Where: a file and a line, a variable or a flag.
    pub place: String,
    /// The dotted key; empty where the whole file is meant.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Has the configuration read again.
pub(super) async fn reload(state: &State, body: Incoming, asker: &Principal) -> Result<Answer, Problem> {
    receive_nothing(body).await?;
    let (reply, report) = oneshot::channel();
    let reloads = state.reloads.get().ok_or_else(|| Kind::NotReady.because("the gate is starting"))?;
    let stopping = || Kind::NotReady.because("the gate is stopping");
    let begun = state.begin(asker, AuditEvent::Reload).await?;
    reloads.send(reply).await.map_err(|_| stopping())?;
    let report = report.await.map_err(|_| stopping())?;
    let (status, word, outcome) = match &report {
        ReloadReport::Reloaded { .. } => (StatusCode::OK, "reloaded", Outcome::Done),
        ReloadReport::Refused { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "refused", Outcome::Unchanged),
    };
    audit::log_reload(asker, word);
    begun.end(outcome).await;
    Ok(json(status, &report))
}
