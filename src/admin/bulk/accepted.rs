//! A purge by filter removes the accepted requests that it finds, too: they hold what their clients sent.

use std::sync::Arc;
use std::time::Instant;

use futures_util::{FutureExt, StreamExt, stream};

use super::{AT_A_TIME, Bulk, CHUNK, MAX_FAILURES, PATIENCE, Place, Report, Selection, begins, stood};
use crate::admin::answer::Problem;
use crate::admin::audit::Deed;
use crate::admin::deliveries;
use crate::admin::records::unavailable;
use crate::admin::scope::{Belongs, belongs};
use crate::store::deliveries::{Deliveries, DeliveryFilter, Sequence};
use crate::store::{Error, Listed};

impl Bulk<'_> {
    /// Goes through the accepted requests that have no record, which were not found with the records.
    pub(super) async fn go_through_accepted(
        &self,
        Selection { filter, tags, prefixes }: &Selection,
        mut after: Option<Sequence>,
        started: Instant,
        report: &mut Report,
    ) -> Result<(), Problem> {
        let store = self.state.opened()?;
        let Some(queue) = store.deliveries().filter(|_| filter.state.is_none()) else { return Ok(()) };
        let of = DeliveryFilter {
            service: filter.service.clone(),
            route: filter.route.as_deref().map(Arc::from),
            is_dead: None,
            prefix: filter.prefix,
        };
        loop {
            let page = queue.deliveries(of.clone(), after, CHUNK).await.map_err(|error| {
                unavailable(error);
                report.broken_off()
            })?;
            report.as_of.get_or_insert(page.now);
            let mut found: Vec<Listed> = page.deliveries.into_iter().map(|each| each.as_listed(page.now)).collect();
            found.retain(|each| {
                filter.passes(each.id, &each.record, each.origin.as_ref(), each.now)
                    && report.as_of.is_none_or(|as_of| stood(each, as_of))
                    && begins(each.id, prefixes)
            });
            if let Some(tags) = tags {
                let whose = |each: &Listed| belongs(&each.record, tags);
                report.of_unknown_scope += found.iter().filter(|each| whose(each) == Belongs::Unknown).count() as u64;
                found.retain(|each| whose(each) == Belongs::Yes);
            }
            self.remove_accepted(queue, found, report).await?;
            after = page.next;
            if after.is_none() || started.elapsed() >= PATIENCE {
                report.next = after.map(|after| Place::Accepted(after).to_string());
                return Ok(());
            }
        }
    }

    async fn remove_accepted(
        &self,
        queue: &dyn Deliveries,
        found: Vec<Listed>,
        report: &mut Report,
    ) -> Result<(), Problem> {
        let mut removals =
            stream::iter(found).map(|found| self.remove_one(queue, found).boxed()).buffer_unordered(AT_A_TIME);
        while let Some(removed) = removals.next().await {
            match removed {
                Ok(Some((found, is_done))) => {
                    report.accepted += 1;
                    report.found(&found);
                    report.done += u64::from(is_done);
                }
                Ok(None) => {}
                Err(error) => {
                    unavailable(error);
                    report.failed += 1;
                }
            }
        }
        if report.failed >= MAX_FAILURES { Err(report.broken_off()) } else { Ok(()) }
    }

    /// Removes an accepted request, and returns it and whether it was still there. `None` if it has a record: the scan of the
    /// records counts it.
    async fn remove_one(&self, queue: &dyn Deliveries, found: Listed) -> Result<Option<(Listed, bool)>, Error> {
        let Ok(store) = self.state.opened() else { return Ok(None) };
        if store.get(found.id).await?.is_some_and(|record| record.is_live()) {
            return Ok(None);
        }
        if self.change.is_none() {
            return Ok(Some((found, false)));
        }
        let is_done = queue.discard(found.id).await?;
        if is_done {
            let route = deliveries::route_of(found.origin.as_ref());
            Deed::Discard { id: found.id, route, reason: Some(&self.reason) }.log(self.asker);
        }
        Ok(Some((found, is_done)))
    }
}
