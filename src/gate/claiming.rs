//! Asking the store for a claim.

use std::future::Future;
use std::sync::Arc;

use super::flights::Lead;
use super::settling;
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};
use crate::store::{Claim, End, Error, Fresh, Store};

/// What asking the store came to.
pub(super) enum Asked {
    /// The claim is this request's.
    Ours,
    /// This stands.
    Theirs { record: Record, now: Timestamp },
    /// Something else stands by now.
    Again,
}

/// Asks the store for a claim: for a new record, or in the place of the one that was `seen`.
pub(super) async fn ask(
    store: Arc<dyn Store>,
    id: RecordId,
    seen: Option<Version>,
    fresh: Fresh,
) -> Result<Asked, Error> {
    if let Some(seen) = seen {
        let superseded = settling::supersede(&*store, id, seen, &fresh).await?;
        // Otherwise somebody else was first: look again.
        return Ok(if superseded { Asked::Ours } else { Asked::Again });
    }
    match settling::claim(&*store, id, &fresh).await? {
        Claim::Inserted(_) => Ok(Asked::Ours),
        Claim::Exists { record, .. } if record.attempt == fresh.attempt && record.state == State::Unknown => {
            // This very claim, written by a question that seemed to fail, whose lease is past by now. Nothing was sent
            // under it.
            settling::settle(&*store, id, fresh.attempt, End::Release).await;
            Ok(Asked::Again)
        }
        Claim::Exists { record, now } => Ok(Asked::Theirs { record, now }),
    }
}

/// Sees a claim through that nobody waits for any more: it may be written yet, and nobody stands behind it.
pub(super) async fn give_up(
    store: &dyn Store,
    lead: Lead,
    attempt: Attempt,
    asking: impl Future<Output = Result<Asked, Error>>,
) {
    if let Ok(Asked::Ours) = asking.await {
        settling::settle(store, lead.id(), attempt, End::Release).await;
    }
}
