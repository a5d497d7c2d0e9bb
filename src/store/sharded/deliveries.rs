//! Accepted requests: each is in the database of its record.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all};

use super::Sharded;
use crate::idempotency::record::{RecordId, Timestamp};
use crate::store::deliveries::{
    self, Acceptance, Batch, Change, Deliveries, Delivery, DeliveryCount, DeliveryFilter, DeliveryPage, Held, Lane,
    NewDelivery, Sequence, Take,
};
use crate::store::{Error, Origin, OriginId, Store};

/// How much longer than the first database the others may take. What they have taken by then is due again when its hold
/// ends.
const GRACE: Duration = Duration::from_millis(250);

/// When to look into the databases that had no turn.
const NEXT_TURN: Duration = Duration::from_millis(100);

/// Where the deliveries of each route go on.
#[derive(Default)]
pub(super) struct Lanes {
    turn: AtomicUsize,
    after: Arc<Mutex<HashMap<(OriginId, usize), Lane>>>,
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

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        let members = self.all();
        let (count, turn) = (members.len().max(1), self.lanes.turn.fetch_add(1, Ordering::Relaxed));
        let mut calls = Vec::new();
        for (place, (index, member)) in members.into_iter().enumerate() {
            // The limit is shared out, and each has its turn where it is too small for all.
            let turn = (place + turn) % count;
            let limit = take.limit / count + usize::from(turn < take.limit % count);
            if limit == 0 {
                continue;
            }
            let after = Arc::clone(&self.lanes.after);
            let key = (take.origin, index);
            let lane = after.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
            let take = Take { limit, max_bytes: (take.max_bytes / count).max(1), after: lane, ..take };
            let store = member.store().map(Arc::clone);
            let call: BoxFuture<'static, _> = Box::pin(async move {
                let store = store?;
                let batch = deliveries::of(&*store)?.take_due(take).await?;
                if let Some(lane) = batch.after {
                    after.lock().unwrap_or_else(PoisonError::into_inner).insert(key, lane);
                }
                Ok(batch)
            });
            calls.push((member, call));
        }
        let is_all = calls.len() == count;
        let batches = self.each(calls, |busy| &busy.taking, GRACE).await?;
        let mut merged = Batch::default();
        for batch in batches {
            merged.taken.extend(batch.taken);
            merged.is_more |= batch.is_more;
            merged.next_due_in = match (merged.next_due_in, batch.next_due_in) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        if !is_all {
            merged.next_due_in = Some(merged.next_due_in.unwrap_or(NEXT_TURN).min(NEXT_TURN));
        }
        Ok(merged)
    }

    async fn change(&self, taken: Held, change: Change) -> Result<bool, Error> {
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

    async fn discard(&self, id: RecordId) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.discard(id).await })
        };
        self.ask(id, false, call, |discarded| *discarded).await
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
        let now = pages.iter().map(|page| page.now).max().unwrap_or(Timestamp(0));
        // Behind the end of a page, its database may have more.
        let bound = pages.iter().filter_map(|page| page.next).min();
        let mut found: Vec<Delivery> = pages.into_iter().flat_map(|page| page.deliveries).collect();
        found.retain(|delivery| bound.is_none_or(|bound| delivery.sequence <= bound));
        found.sort_by_key(|delivery| delivery.sequence);
        let page = DeliveryPage::of(found, now, limit);
        Ok(DeliveryPage { next: page.next.or(bound), ..page })
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.count_deliveries().await })
        };
        let mut counts: HashMap<Option<OriginId>, DeliveryCount> = HashMap::new();
        for count in self.of_reached(call).await?.into_iter().flatten() {
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

    /// In every database: it fails where one does not answer, and is to be said again then.
    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        let pauses = self.all().into_iter().map(|(_, member)| async move {
            let pause = async { deliveries::of(&**member.store()?)?.pause(origin, is_paused).await };
            pause.await.map_err(|error| super::named(&member.name, error))
        });
        let paused: Vec<bool> = join_all(pauses).await.into_iter().collect::<Result<_, _>>()?;
        Ok(paused.contains(&true))
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.paused().await })
        };
        let mut paused: Vec<OriginId> = self.of_reached(call).await?.into_iter().flatten().collect();
        paused.sort_by_key(|origin| origin.0);
        paused.dedup();
        Ok(paused)
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        let sweep = move |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { deliveries::of(&*store)?.sweep_deliveries(limit).await })
        };
        Ok(self.sweep_each(|busy| &busy.sweeping_deliveries, sweep).await?.into_iter().sum::<usize>().min(limit))
    }
}
