//! Turns in-flight records whose lease is past into unknown ones.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::{Worker, every};
use crate::idempotency::codec::Head;
use crate::idempotency::record::{RecordId, State};
use crate::store::{Error, ErrorKind, Expiry, Origin, RecordEntry, Settlement, Store};
use crate::telemetry::metrics::Metrics;

/// How many lost attempts of one batch have a line of their own in the log.
const NAMED: usize = 10;

/// How many records are looked up at once.
const AT_ONCE: usize = 256;

/// How long looking up their routes may take.
const LOOK_UP: Duration = Duration::from_secs(2);

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    let mut lost = Vec::new();
    while worker.unless_shut_down(ticks.tick()).await {
        // A round later: after an outage of the store, a gate that lives says how its attempts ended.
        let unseen = report_lost(&*worker.store, &lost).await;
        lost = reap(&worker).await;
        lost.extend(unseen);
    }
    let unseen = report_lost(&*worker.store, &lost).await;
    if !unseen.is_empty() {
        tracing::warn!(
            count = unseen.len(),
            "attempts may have been lost, and the store does not say so: `oncegate records list --state unknown` lists those that were"
        );
    }
}

/// One batch after another while they come back full. The store reports its failures. Returns the records.
async fn reap(worker: &Worker) -> Vec<RecordId> {
    let limit = worker.settings.batch;
    let mut all = Vec::new();
    while let Ok(lost) = worker.store.expire_leases(limit).await {
        let is_full = lost.len() >= limit;
        all.extend(count_lost(&*worker.store, &worker.metrics, lost).await);
        if !is_full || *worker.shutdown.borrow() {
            break;
        }
    }
    all
}

/// Counts the attempts that were lost, of records whose lease was past. Among these are shadows, of which no attempt was lost and
/// which no operator can resolve: it completes them. Returns the others.
pub async fn count_lost(store: &dyn Store, metrics: &Metrics, past: Vec<RecordId>) -> Vec<RecordId> {
    let deadline = Instant::now() + LOOK_UP;
    let mut lost = Vec::new();
    for some in past.chunks(AT_ONCE) {
        let settled = join_all(some.iter().map(|id| timeout_at(deadline, complete_shadow(store, *id)))).await;
        let others = some.iter().zip(settled).filter(|(_, settled)| !matches!(settled, Ok(Ok(true))));
        lost.extend(others.map(|(id, _)| *id));
    }
    if !lost.is_empty() {
        metrics.leases_expired(lost.len());
    }
    lost
}

/// Completes the record if it is a shadow: a gate that observes went away, or its store did, before it had done so. Returns whether
/// it is one.
async fn complete_shadow(store: &dyn Store, id: RecordId) -> Result<bool, Error> {
    let Some(found) = store.get(id).await? else { return Ok(false) };
    if !found.origin.as_ref().is_some_and(Origin::is_shadow) {
        return Ok(false);
    }
    if found.record.state == State::Unknown {
        let expiry = Expiry::FromNow(found.record.until.since(found.now));
        // All of a shadow stands in its head.
        let end = Settlement::Complete { answer: Bytes::from_static(&[0]), expiry };
        store.settle(id, found.record.attempt, end).await?;
    }
    Ok(true)
}

/// Logs which attempts were lost, of those whose outcome is still unknown. An operator has to find out what became of them. Returns
/// those of which the store does not say it, because it is away again.
pub async fn report_lost(store: &dyn Store, lost: &[RecordId]) -> Vec<RecordId> {
    let deadline = Instant::now() + LOOK_UP;
    let mut unseen = Vec::new();
    for id in &lost[..lost.len().min(NAMED)] {
        let found = match timeout_at(deadline, store.get(*id)).await {
            Ok(Ok(found)) if is_over(found.as_ref()) => continue,
            Ok(Ok(found)) => found,
            Ok(Err(error)) if error.cause().kind == ErrorKind::Corrupt => None,
            Ok(Err(_)) | Err(_) => {
                unseen.push(*id);
                continue;
            }
        };
        let (origin, head) = found.map(|found| (found.origin, Head::decode(&found.record.head).ok())).unzip();
        let origin = origin.flatten();
        if origin.as_ref().is_some_and(Origin::is_shadow) {
            continue;
        }
        let route = origin.map_or_else(|| "-".into(), |origin| origin.route);
        let request = head.flatten().and_then(|head| head.details().request).map(tracing::field::display);
        tracing::warn!(
            request,
            record = %id,
            route = &*route,
            "an attempt was lost: its gate ended, or did not renew the lease; its outcome is unknown"
        );
    }
    if lost.len() > NAMED {
        let (count, others) = (lost.len(), lost.len() - NAMED);
        tracing::warn!(
            count,
            others,
            "more attempts may have been lost: `oncegate records list --state unknown` lists those that were"
        );
    }
    unseen
}

/// Whether the attempt has its end after all.
fn is_over(record: Option<&RecordEntry>) -> bool {
    record.is_none_or(|found| found.record.state == State::Completed)
}
