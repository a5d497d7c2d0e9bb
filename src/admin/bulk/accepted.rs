//! A purge by filter removes the accepted requests that it finds, too: they hold what their clients sent. A retry queues those
//! again that are dead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures_util::{FutureExt, StreamExt, stream};

use super::{
    AT_A_TIME, Bulk, BulkChange, BulkCursor, BulkReport, CHUNK, MAX_FAILURES, PATIENCE, Selection, begins, pinned,
    stood,
};
use crate::admin::answer::Problem;
use crate::admin::audit::AuditEvent;
use crate::admin::deliveries;
use crate::admin::records::unavailable;
use crate::admin::scope::sift;
use crate::store::RecordEntry;
use crate::store::deliveries::{Deliveries, Delivery, DeliveryFilter, Sequence};

/// What came of an accepted request.
enum Changed {
    /// It was changed, or not if it is another one by now; in a dry run, it would be.
    Found { is_done: bool },
    /// It has a record: the scan of the records counts it.
    HasRecord,
    /// Its outcome is unknown: it is not retried.
    Unknown,
}

impl Bulk<'_> {
    /// Goes through the accepted requests: of a purge, those that have no record, which were not found with the records; of a
    /// retry, the dead ones.
    pub(super) async fn go_through_accepted(
        &self,
        Selection { filter, tags, on_file, prefixes }: &Selection,
        mut after: Option<Sequence>,
        started: Instant,
        report: &mut BulkReport,
    ) -> Result<(), Problem> {
        let store = self.state.opened()?;
        let Some(queue) = store.deliveries().filter(|_| filter.state.is_none()) else { return Ok(()) };
        let of = DeliveryFilter {
            service: filter.service.clone(),
            route: filter.route.as_deref().map(Arc::from),
            is_dead: matches!(self.change, BulkChange::Retry).then_some(true),
            prefix: filter.prefix,
        };
        loop {
            let page = queue.deliveries(of.clone(), after, CHUNK).await;
            let page = page.map_err(|error| report.broken_off().caused_by(error))?;
            if let Some(first) = page.deliveries.first() {
                report.as_of.get_or_insert(first.now);
            }
            let listed = |each: Delivery| (each.clone(), each.as_listed());
            let mut found: Vec<(Delivery, RecordEntry)> = page.deliveries.into_iter().map(listed).collect();
            let pinned = pinned(filter, report.as_of);
            found.retain(|(_, each)| {
                pinned.passes(each.id, &each.record, each.origin.as_ref(), each.now)
                    && report.as_of.is_none_or(|as_of| stood(each, filter, as_of))
                    && begins(each.id, prefixes)
            });
            if let Some(tags) = tags {
                report.of_unknown_scope += sift(&mut found, tags, on_file, |(_, each)| each);
            }
            self.change_accepted(queue, found, report).await?;
            after = page.next;
            if after.is_none() || started.elapsed() >= PATIENCE {
                report.next = after.map(|after| BulkCursor::Accepted(after).to_string());
                return Ok(());
            }
        }
    }

    async fn change_accepted(
        &self,
        queue: &dyn Deliveries,
        found: Vec<(Delivery, RecordEntry)>,
        report: &mut BulkReport,
    ) -> Result<(), Problem> {
        let change = |(delivery, found): (Delivery, RecordEntry)| {
            async move { (self.change_one(queue, &delivery, &found).await, found) }.boxed()
        };
        let failed = AtomicU64::new(report.failed);
        // Each of them may take until the store gives up.
        let mut changes = stream::iter(found)
            .take_while(|_| std::future::ready(failed.load(Ordering::Relaxed) < MAX_FAILURES))
            .map(change)
            .buffer_unordered(AT_A_TIME);
        while let Some((changed, found)) = changes.next().await {
            self.log_failure(found.id, &changed);
            match changed {
                Ok(Changed::Found { is_done }) => {
                    // That they have no record is said where others of the filter have one.
                    report.accepted += u64::from(matches!(self.change, BulkChange::Purge));
                    report.found(&found);
                    report.done += u64::from(is_done);
                }
                Ok(Changed::Unknown) => report.of_unknown_outcome += 1,
                Ok(Changed::HasRecord) => {}
                Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
            }
        }
        drop(changes);
        report.failed = failed.into_inner();
        if report.failed >= MAX_FAILURES { Err(report.broken_off()) } else { Ok(()) }
    }

    async fn change_one(
        &self,
        queue: &dyn Deliveries,
        delivery: &Delivery,
        found: &RecordEntry,
    ) -> Result<Changed, Problem> {
        let is_retry = matches!(self.change, BulkChange::Retry);
        if is_retry && deliveries::is_held(self.state, delivery).await? {
            return Ok(Changed::Unknown);
        }
        if !is_retry
            && self.state.opened()?.get(found.id).await.map_err(unavailable)?.is_some_and(|record| record.is_live())
        {
            return Ok(Changed::HasRecord);
        }
        if self.is_dry_run {
            return Ok(Changed::Found { is_done: false });
        }
        let changed =
            if is_retry { queue.requeue(found.id).await } else { queue.discard(delivery.id, delivery.token).await };
        let is_done = changed.map_err(unavailable)?;
        let reason = &*self.reason;
        let deed = match is_retry {
            true => AuditEvent::Retry { found: delivery, reason },
            false => AuditEvent::Discard { found: delivery, reason: Some(reason) },
        };
        if is_done {
            deed.log(self.asker);
        }
        Ok(Changed::Found { is_done })
    }
}
