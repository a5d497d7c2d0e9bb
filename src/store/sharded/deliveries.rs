//! Accepted requests: each is in the database of its record.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all};
use tokio::time::timeout;

use super::member::Member;
use super::{Sharded, not_all};
use crate::idempotency::record::RecordId;
use crate::store::deliveries::{
    self, Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold,
    DeliveryPage, NewDelivery, Sequence, Take,
};
use crate::store::{Error, Origin, OriginId, Store};

/// How long a database may take to say what is due. What it says later is due again when its hold ends.
const TURN: Duration = Duration::from_secs(1);

fn taking(member: &Member, take: Take) -> BoxFuture<'static, Result<Batch, Error>> {
    let store = member.store().map(Arc::clone);
    Box::pin(async move { deliveries::of(&*store?)?.take_due(take).await })
}

#[async_trait]
impl Deliveries for Sharded {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let new = new.clone();
            Box::pin(async move { deliveries::of(&*store)?.accept(id, new).await })
        };
        self.ask(id, true, call, |_| true).await
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.delivery(id).await })
        };
        self.ask(id, false, call, Option::is_some).await
    }

    /// From one database after another, and each is the first in its turn.
    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        let mut members = self.all();
        let turn = self.taking_turn.fetch_add(1, Ordering::Relaxed) % members.len().max(1);
        members.rotate_left(turn);
        let (mut merged, mut works, mut failed) = (Batch::default(), false, None);
        let (mut limit, mut max_bytes) = (take.limit, take.max_bytes);
        for (_, member) in members {
            if limit == 0 || max_bytes == 0 {
                merged.is_more = true;
                break;
            }
            let taking = taking(&member, Take { limit, max_bytes, ..take });
            let taken = timeout(TURN, self.each(vec![(member, taking)], |busy| busy.taking(take.origin), TURN)).await;
            let batch = match taken {
                Ok(Ok(batches)) => batches.into_iter().next().unwrap_or_default(),
                Ok(Err(error)) => {
                    failed = Some(error);
                    continue;
                }
                Err(_) => continue,
            };
            works = true;
            limit = limit.saturating_sub(batch.taken.len());
            let bytes = batch.taken.iter().map(|taken| taken.request.len() + taken.body.len()).sum();
            max_bytes = max_bytes.saturating_sub(bytes);
            merged.taken.extend(batch.taken);
            merged.is_more |= batch.is_more;
            merged.next_due_in = match (merged.next_due_in, batch.next_due_in) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        failed.filter(|_| !works).map_or(Ok(merged), Err)
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let change = change.clone();
            Box::pin(async move { deliveries::of(&*store)?.change(taken, change).await })
        };
        self.ask(taken.id, false, call, |changed| *changed).await
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.requeue(id).await })
        };
        self.ask(id, false, call, |requeued| *requeued).await
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let filter = filter.clone();
            Box::pin(async move { deliveries::of(&*store)?.deliveries(filter, after, limit).await })
        };
        let pages = self.of_all(call).await?;
        // Behind the end of a page, its database may have more.
        let bound = pages.iter().filter_map(|page| page.next).min();
        let mut found: Vec<Delivery> = pages.into_iter().flat_map(|page| page.deliveries).collect();
        found.retain(|delivery| bound.is_none_or(|bound| delivery.sequence <= bound));
        found.sort_by_key(|delivery| delivery.sequence);
        let page = DeliveryPage::of(found, limit);
        Ok(DeliveryPage { next: page.next.or(bound), ..page })
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.count_deliveries().await })
        };
        let mut counts: HashMap<Option<OriginId>, DeliveryCount> = HashMap::new();
        for count in self.of_reached(&self.routes.load(), call).await?.into_iter().flatten() {
            match counts.get_mut(&count.origin.as_ref().map(Origin::id)) {
                Some(known) => {
                    known.queued += count.queued;
                    known.oldest = known.oldest.max(count.oldest);
                    known.dead += count.dead;
                }
                None => drop(counts.insert(count.origin.as_ref().map(Origin::id), count)),
            }
        }
        Ok(counts.into_values().collect())
    }

    /// In every database, as the databases themselves say which those are: a gate notices late that records move. Where one fails
    /// and another does not, it is half done, and is to be said again.
    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        let routes = self.look().await?;
        if routes.is_partial() {
            return Err(not_all());
        }
        let pauses = routes.all().into_iter().map(|index| async move {
            let member = &self.members[index];
            let pause = async { deliveries::of(&**member.store()?)?.pause(origin, is_paused).await };
            pause.await.map_err(|error| super::named(&member.name, error))
        });
        let (mut changed, mut done, mut failed) = (false, false, None);
        for paused in join_all(pauses).await {
            match paused {
                Ok(is_change) => (changed, done) = (changed || is_change, true),
                // It may have happened in one.
                Err(error @ Error::Indeterminate(_)) => failed = Some(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            None => Ok(changed),
            Some(Error::Determinate(cause)) if done => Err(Error::Indeterminate(cause)),
            Some(error) => Err(error),
        }
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.paused().await })
        };
        let mut paused: Vec<OriginId> =
            self.of_reached(&self.routes.load(), call).await?.into_iter().flatten().collect();
        paused.sort_by_key(|origin| origin.0);
        paused.dedup();
        Ok(paused)
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        let sweep = move |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.sweep_deliveries(limit).await })
        };
        Ok(self
            .sweep_each(|busy| Arc::clone(&busy.sweeping_deliveries), sweep)
            .await?
            .into_iter()
            .sum::<usize>()
            .min(limit))
    }
}
