//! Turns in-flight records whose lease is past into unknown ones.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::{Worker, every};
use crate::idempotency::codec::Head;
use crate::idempotency::record::{RecordId, State};
use crate::store::{ErrorKind, Expiry, Origin, RecordEntry, Settlement, Store};
use crate::telemetry::metrics::Metrics;

/// How many lost attempts of one batch have a line of their own in the log.
const NAMED: usize = 10;

/// How many records are looked up at once: some stores have three connections for it.
const AT_ONCE: usize = 16;

/// How long looking them up may take.
const LOOK_UP: Duration = Duration::from_secs(2);

/// Most records of which it is found out later what they are.
const MOST_UNSORTED: usize = 4096;

/// What a record is whose lease was past.
enum Expired {
    /// Of an attempt whose outcome is unknown now.
    Attempt,
    /// Of an observed request: it is completed. A gate that observes went away, or its store did, before it had done so. No attempt
    /// was lost, and no operator could resolve it.
    Shadow,
    /// The store is away again.
    Unsorted,
}

pub(super) async fn run(mut worker: Worker) {
    let mut ticks = every(worker.settings.reap_every);
    let (mut lost, mut unsorted) = (Vec::new(), Vec::new());
    while worker.unless_shut_down(ticks.tick()).await {
        // A round later: after an outage of the store, a gate that lives says how its attempts ended.
        report_lost(&*worker.store, &lost).await;
        lost = reap(&worker, &mut unsorted).await;
    }
    lost.extend(count_rest(&*worker.store, &worker.metrics, unsorted).await);
    report_lost(&*worker.store, &lost).await;
}

/// One batch after another while they come back full. The store reports its failures. Returns the records of attempts.
async fn reap(worker: &Worker, unsorted: &mut Vec<RecordId>) -> Vec<RecordId> {
    let limit = worker.settings.batch;
    while let Ok(expired) = worker.store.expire_leases(limit).await {
        let is_full = expired.len() >= limit;
        unsorted.extend(expired);
        if !is_full || *worker.shutdown.borrow() {
            break;
        }
    }
    let lost = sort(&*worker.store, unsorted).await;
    worker.metrics.leases_expired(lost.len());
    lost
}

/// Counts and reports the attempts that were lost with a former process.
pub async fn lost_at_start(store: &dyn Store, metrics: &Metrics, expired: Vec<RecordId>) {
    report_lost(store, &count_rest(store, metrics, expired).await).await;
}

/// Counts the attempts among these. What the store does not say of, and nothing will ask again, counts as one.
async fn count_rest(store: &dyn Store, metrics: &Metrics, mut expired: Vec<RecordId>) -> Vec<RecordId> {
    let mut lost = sort(store, &mut expired).await;
    lost.append(&mut expired);
    metrics.leases_expired(lost.len());
    lost
}

/// Takes the records of attempts out of these, and those of shadows, which it completes. What stays is to be sorted later.
async fn sort(store: &dyn Store, expired: &mut Vec<RecordId>) -> Vec<RecordId> {
    let deadline = Instant::now() + LOOK_UP;
    let (mut attempts, mut unsorted) = (Vec::new(), Vec::new());
    for some in expired.chunks(AT_ONCE) {
        let sorted = join_all(some.iter().map(|id| timeout_at(deadline, sort_one(store, *id)))).await;
        for (id, sorted) in some.iter().zip(sorted) {
            match sorted.unwrap_or(Expired::Unsorted) {
                Expired::Attempt => attempts.push(*id),
                Expired::Shadow => {}
                Expired::Unsorted if unsorted.len() < MOST_UNSORTED => unsorted.push(*id),
                Expired::Unsorted => attempts.push(*id),
            }
        }
    }
    *expired = unsorted;
    attempts
}

async fn sort_one(store: &dyn Store, id: RecordId) -> Expired {
    let found = match store.get(id).await {
        Ok(Some(found)) => found,
        Ok(None) => return Expired::Attempt,
        Err(error) if error.cause().kind == ErrorKind::Corrupt => return Expired::Attempt,
        Err(_) => return Expired::Unsorted,
    };
    if !found.origin.as_ref().is_some_and(Origin::is_shadow) {
        return Expired::Attempt;
    }
    if found.record.state == State::Unknown {
        let expiry = Expiry::FromNow(found.record.until.since(found.now));
        // All of a shadow stands in its head.
        let end = Settlement::Complete { answer: Bytes::from_static(&[0]), expiry };
        if store.settle(id, found.record.attempt, end).await.is_err() {
            return Expired::Unsorted;
        }
    }
    Expired::Shadow
}

/// Logs which attempts were lost, of those whose outcome is still unknown. An operator has to find out what became of them.
async fn report_lost(store: &dyn Store, lost: &[RecordId]) {
    let deadline = Instant::now() + LOOK_UP;
    for id in &lost[..lost.len().min(NAMED)] {
        let found = timeout_at(deadline, store.get(*id)).await.ok().and_then(Result::ok);
        if found.as_ref().is_some_and(|found| is_over(found.as_ref())) {
            continue;
        }
        let found = found.flatten();
        let (origin, head) = found.map(|found| (found.origin, Head::decode(&found.record.head).ok())).unzip();
        let route = origin.flatten().map_or_else(|| "-".into(), |origin| origin.route);
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
}

/// Whether the attempt has its end after all.
fn is_over(record: Option<&RecordEntry>) -> bool {
    record.is_none_or(|found| found.record.state == State::Completed)
}
