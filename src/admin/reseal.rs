//! `POST /api/v1/records/reseal`: records are encrypted anew with the first key.

use std::time::Duration;

use http::StatusCode;
use hyper::body::Incoming;
use schemars::JsonSchema;
use serde::Serialize;

use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem, json};
use super::audit::{self, AuditEvent, Outcome};
use super::records::unavailable;
use super::resolve::receive_nothing;
use crate::idempotency::record::RecordId;

/// How long one request goes on. The records that are left then are for the next one.
const PATIENCE: Duration = Duration::from_secs(5);

/// What came of it.
#[derive(Serialize, JsonSchema)]
pub(super) struct ResealReport {
    /// How many records and accepted requests were encrypted anew.
    resealed: u64,
    /// How many records are in flight, and were left alone.
    in_flight: u64,
    /// How many are encrypted with a key that this gate does not have.
    unopened: u64,
    /// For how many the store failed.
    failed: u64,
    /// After which id the next request goes on; nothing where all were looked at.
    after: Option<String>,
}

/// Where to go on, of a query.
pub(super) fn after(query: Option<&str>) -> Result<Option<RecordId>, Problem> {
    let wrong = || Kind::BadRequest.because("the one query parameter is `after`: the `after` of an answer");
    match query {
        None | Some("") => Ok(None),
        Some(query) => query.strip_prefix("after=").and_then(RecordId::parse).map(Some).ok_or_else(wrong),
    }
}

pub(super) async fn reseal(
    state: &State,
    after: Option<RecordId>,
    body: Incoming,
    asker: &Principal,
) -> Result<Answer, Problem> {
    receive_nothing(body).await?;
    state.opened()?;
    let Some(resealer) = state.resealer.get() else {
        return Err(
            Kind::NotConfigured.because("this gate has no `store.encryption_keys`: there is no key to encrypt with")
        );
    };
    let _turn = state.change_slot()?;
    state.needs_all_databases().await?;
    let begun = state.begin(asker, AuditEvent::Reseal).await?;
    let done = resealer.reseal(after, PATIENCE).await.map_err(unavailable)?;
    if done.resealed > 0 {
        audit::log_reseal(asker, done.resealed);
    }
    let answer = ResealReport {
        resealed: done.resealed,
        in_flight: done.in_flight,
        unopened: done.unopened,
        failed: done.failed,
        after: done.next.map(|after| after.to_string()),
    };
    let outcome = match done.resealed {
        _ if done.failed > 0 => Outcome::Partial,
        0 => Outcome::Unchanged,
        _ => Outcome::Done,
    };
    let mut report = audit::members(&answer);
    report.remove("after");
    begun.end_with(outcome, report).await;
    Ok(json(StatusCode::OK, &answer))
}
