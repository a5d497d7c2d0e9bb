//! Requests that are delivered later, which do not outlive the process either: no configuration promises them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Memory, Tables};
use crate::idempotency::record::{AttemptToken, RecordId, Timestamp};
use crate::store::deliveries::{
    Acceptance, Batch, Deliveries, Delivery, DeliveryChange, DeliveryCount, DeliveryFilter, DeliveryHold, DeliveryPage,
    DeliveryState, Lane, LaneTurn, NewDelivery, Pick, Sequence, Take, TakenDelivery,
};
use crate::store::resealing::DeliveryValues;
use crate::store::{Error, OriginId, lifecycle};

/// The deliveries, and the routes that are paused.
#[derive(Default)]
pub(super) struct Queue {
    kept: BTreeMap<RecordId, Kept>,
    paused: BTreeSet<i64>,
    last: u64,
    /// How each origin goes on.
    turns: BTreeMap<i64, LaneTurn>,
}

/// What may be taken of all that is due.
struct Chosen {
    picks: Vec<Pick<TakenDelivery>>,
    /// Not all that is due can be taken.
    is_crowded: bool,
    /// There are more than these.
    is_more: bool,
    /// The last lane that had its turn, where they have turns.
    last_lane: Option<Lane>,
}

struct Kept {
    /// Without its origin, which may become known later.
    delivery: Delivery,
    origin: OriginId,
    request: Bytes,
    body: Bytes,
}

#[async_trait]
impl Deliveries for Memory {
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error> {
        self.with(|tables, now| {
            let entry = tables.entries.get(&id).map(|entry| &entry.record);
            if let Some(record) = entry.filter(|record| lifecycle::is_live(record.state, record.until, now)) {
                return Acceptance::Recorded { record: record.clone(), now };
            }
            match tables.queue.kept.get(&id) {
                Some(kept) if kept.delivery.token == new.token => Acceptance::Accepted,
                Some(kept) => Acceptance::Queued(tables.shown(kept, now)),
                None => {
                    tables.queue.keep(id, new, now);
                    Acceptance::Accepted
                }
            }
        })
    }

    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error> {
        self.with(|tables, now| tables.queue.kept.get(&id).map(|kept| tables.shown(kept, now)))
    }

    async fn take_due(&self, take: Take) -> Result<Batch, Error> {
        self.with(|tables, now| tables.take_due(&take, now))
    }

    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error> {
        self.with(|tables, now| tables.queue.change(taken, change, now))
    }

    async fn requeue(&self, id: RecordId) -> Result<bool, Error> {
        self.with(|tables, now| match tables.queue.kept.get_mut(&id) {
            Some(Kept { delivery, .. }) if delivery.is_dead() => {
                delivery.queued_at = now;
                delivery.state = DeliveryState::Queued { due: now };
                (delivery.attempts, delivery.note) = (0, None);
                true
            }
            Some(_) | None => false,
        })
    }

    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error> {
        self.with(|tables, now| {
            let deliveries = tables.queue.kept.values().map(|kept| tables.shown(kept, now));
            let mut found: Vec<Delivery> = deliveries
                .filter(|delivery| after.is_none_or(|after| delivery.sequence > after) && filter.passes(delivery))
                .collect();
            found.sort_by_key(|delivery| delivery.sequence);
            // One extra delivery shows whether there are more.
            found.truncate(limit.saturating_add(1));
            DeliveryPage::of(found, limit)
        })
    }

    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error> {
        self.with(|tables, now| {
            let mut counts: BTreeMap<i64, DeliveryCount> = BTreeMap::new();
            for Kept { delivery, origin, .. } in tables.queue.kept.values() {
                let count = counts.entry(origin.0).or_insert_with(|| {
                    let origin = tables.origins.get(&origin.0).cloned();
                    DeliveryCount { origin, queued: 0, oldest: None, dead: 0 }
                });
                if delivery.is_dead() {
                    count.dead += 1;
                } else {
                    count.queued += 1;
                    count.oldest = count.oldest.max(Some(now.since(delivery.accepted_at)));
                }
            }
            counts.into_values().collect()
        })
    }

    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error> {
        self.with(|tables, _| match is_paused {
            true => tables.queue.paused.insert(origin.0),
            false => tables.queue.paused.remove(&origin.0),
        })
    }

    async fn paused(&self) -> Result<Vec<OriginId>, Error> {
        self.with(|tables, _| tables.queue.paused.iter().copied().map(OriginId).collect())
    }

    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error> {
        self.with(|tables, now| {
            let is_past = |kept: &&Kept| match kept.delivery.state {
                DeliveryState::Dead { until } => lifecycle::is_past(until, now),
                DeliveryState::Queued { .. } => false,
            };
            let past = tables.queue.kept.values().filter(is_past).take(limit);
            let past: Vec<RecordId> = past.map(|kept| kept.delivery.id).collect();
            past.iter().for_each(|id| drop(tables.queue.kept.remove(id)));
            past.len()
        })
    }
}

impl Tables {
    pub(super) fn delivery_values(&self, id: RecordId, now: Timestamp) -> Option<(Delivery, DeliveryValues)> {
        let kept = self.queue.kept.get(&id)?;
        let (head, note) = (kept.delivery.head.clone(), kept.delivery.note.clone());
        let values = DeliveryValues { head, request: kept.request.clone(), body: kept.body.clone(), note };
        Some((self.shown(kept, now), values))
    }

    fn shown(&self, kept: &Kept, now: Timestamp) -> Delivery {
        Delivery { origin: self.origins.get(&kept.origin.0).cloned(), now, ..kept.delivery.clone() }
    }

    fn take_due(&mut self, take: &Take, now: Timestamp) -> Batch {
        if self.queue.paused.contains(&take.origin.0) {
            return Batch::default();
        }
        let Some(due) = self.queue.next_due(take.origin) else { return Batch::default() };
        if due > now {
            return Batch { next_due_in: Some(due.since(now)), ..Batch::default() };
        }
        let Chosen { picks, is_crowded, is_more, last_lane } = self.queue.choose(take, now);
        let turn = self.queue.turns.get(&take.origin.0).copied().unwrap_or_default();
        let mut bytes = 0;
        let fits = |pick: &&Pick<TakenDelivery>| {
            let fits = bytes < take.max_bytes;
            bytes += pick.what.request.len() + pick.what.body.len();
            fits
        };
        let count = picks.iter().take_while(fits).count();
        if is_crowded {
            self.queue.turns.insert(take.origin.0, turn.after(&picks, count, last_lane));
        }
        let mut batch = Batch { is_more: is_more || count < picks.len(), ..Batch::default() };
        let until = now.plus(take.hold);
        for Pick { what: mut taken, .. } in picks.into_iter().take(count) {
            if let Some(kept) = self.queue.kept.get_mut(&taken.delivery.id) {
                kept.delivery.state = DeliveryState::Queued { due: until };
                taken.delivery.state = kept.delivery.state;
                taken.delivery.origin = self.origins.get(&kept.origin.0).cloned();
            }
            batch.taken.push(taken);
        }
        batch
    }
}

impl Queue {
    /// Whether there is a delivery of an id.
    pub(super) fn has(&self, id: RecordId) -> bool {
        self.kept.contains_key(&id)
    }

    /// Where each delivery comes from.
    pub(super) fn all(&self) -> impl Iterator<Item = (OriginId, &Delivery)> {
        self.kept.values().map(|kept| (kept.origin, &kept.delivery))
    }

    pub(super) fn reseal(
        &mut self,
        id: RecordId,
        token: AttemptToken,
        seen: Option<&Bytes>,
        values: DeliveryValues,
    ) -> bool {
        let Some(kept) = self.kept.get_mut(&id) else { return false };
        if kept.delivery.token != token || kept.delivery.note.as_ref() != seen {
            return false;
        }
        let DeliveryValues { head, request, body, note } = values;
        (kept.delivery.head, kept.delivery.note, kept.request, kept.body) = (head, note, request, body);
        true
    }

    fn keep(&mut self, id: RecordId, new: NewDelivery, now: Timestamp) {
        let NewDelivery { token, origin, lane, head, request, body } = new;
        self.last += 1;
        let delivery = Delivery {
            id,
            token,
            sequence: Sequence(self.last),
            origin: None,
            lane,
            accepted_at: now,
            queued_at: now,
            state: DeliveryState::Queued { due: now },
            attempts: 0,
            head,
            note: None,
            now,
        };
        self.kept.insert(id, Kept { delivery, origin, request, body });
    }

    /// When the next delivery of an origin is due, or since when it has been.
    fn next_due(&self, origin: OriginId) -> Option<Timestamp> {
        let dues = self.kept.values().filter(|kept| kept.origin == origin).filter_map(|kept| kept.delivery.due());
        dues.min()
    }

    /// What may be taken of all that is due: the oldest, and where that is not all, one of each lane in turn for a half.
    fn choose(&self, take: &Take, now: Timestamp) -> Chosen {
        let queued = || self.kept.values().filter(|kept| kept.origin == take.origin && !kept.delivery.is_dead());
        let mut first: BTreeMap<Lane, Sequence> = BTreeMap::new();
        // Where lanes are in order, another than the first may be held or pause: one that was dead came back before it.
        let mut busy: BTreeSet<Lane> = BTreeSet::new();
        for Kept { delivery, .. } in queued() {
            let first = first.entry(delivery.lane).or_insert(delivery.sequence);
            *first = delivery.sequence.min(*first);
            if delivery.due().is_some_and(|due| due > now) {
                busy.insert(delivery.lane);
            }
        }
        let may_go = |Delivery { lane, sequence, .. }: &Delivery| {
            !take.is_ordered || first.get(lane) == Some(sequence) && !busy.contains(lane)
        };
        let mut due: Vec<&Kept> = queued()
            .filter(|Kept { delivery, .. }| delivery.due().is_some_and(|due| due <= now))
            .filter(|Kept { delivery, .. }| may_go(delivery))
            .collect();
        due.sort_by_key(|kept| (kept.delivery.due(), kept.delivery.sequence));
        let limit = take.limit.max(1);
        let is_more = due.len() > limit;
        let bytes: usize = due.iter().map(|kept| kept.request.len() + kept.body.len()).sum();
        let is_crowded = is_more || bytes > take.max_bytes;
        let turn = self.turns.get(&take.origin.0).copied().unwrap_or_default();
        let mut by_lane: Vec<(Lane, &Kept)> = Vec::new();
        if is_crowded {
            let share = turn.share_of_age(limit.min(due.len()));
            let mut of_lane: BTreeMap<Lane, &Kept> = BTreeMap::new();
            for kept in due[share..].iter().rev() {
                of_lane.insert(kept.delivery.lane, kept);
            }
            let (before, behind): (Vec<_>, Vec<_>) =
                of_lane.into_iter().partition(|(lane, _)| Some(*lane) <= turn.lane);
            by_lane.extend(behind.into_iter().chain(before).take(limit - share));
            due.retain(|kept| !by_lane.iter().any(|(_, of_lane)| of_lane.delivery.id == kept.delivery.id));
        }
        // Where there are few lanes, more of the oldest.
        due.truncate(limit - by_lane.len());
        let taken = |kept: &Kept| TakenDelivery {
            delivery: Delivery { now, ..kept.delivery.clone() },
            request: kept.request.clone(),
            body: kept.body.clone(),
        };
        let last_lane = by_lane.last().map(|(lane, _)| *lane);
        let picks = turn.alternate(due, by_lane).into_iter();
        let picks = picks.map(|Pick { what, lane }| Pick { what: taken(what), lane }).collect();
        Chosen { picks, is_crowded, is_more, last_lane }
    }

    fn change(
        &mut self,
        DeliveryHold { id, token, until }: DeliveryHold,
        change: DeliveryChange,
        now: Timestamp,
    ) -> bool {
        let Some(Kept { delivery, .. }) = self.kept.get_mut(&id).filter(|kept| kept.delivery.token == token) else {
            return false;
        };
        let is_held = delivery.state == DeliveryState::Queued { due: until };
        let mut turn = |span: Duration, state: fn(Timestamp) -> DeliveryState, is_attempt, note| {
            if is_held {
                delivery.state = state(now.plus(span));
                delivery.attempts += u32::from(is_attempt);
                delivery.note = Option::or(note, delivery.note.take());
            }
            is_held
        };
        match change {
            DeliveryChange::Finish => self.kept.remove(&id).is_some(),
            DeliveryChange::Postpone { delay, is_attempt, note } => {
                turn(delay, |due| DeliveryState::Queued { due }, is_attempt, note)
            }
            DeliveryChange::Park { ttl, is_attempt, note } => {
                turn(ttl, |until| DeliveryState::Dead { until }, is_attempt, Some(note))
            }
        }
    }
}

impl Delivery {
    /// When it is due, unless it is dead.
    fn due(&self) -> Option<Timestamp> {
        match self.state {
            DeliveryState::Queued { due } => Some(due),
            DeliveryState::Dead { .. } => None,
        }
    }
}

impl DeliveryFilter {
    fn passes(&self, delivery: &Delivery) -> bool {
        let is_of = |wanted: &Option<_>, part: fn(&crate::store::Origin) -> &std::sync::Arc<str>| {
            wanted.as_ref().is_none_or(|wanted| delivery.origin.as_ref().is_some_and(|origin| part(origin) == wanted))
        };
        is_of(&self.service, |origin| &origin.service)
            && is_of(&self.route, |origin| &origin.route)
            && self.is_dead.is_none_or(|is_dead| is_dead == delivery.is_dead())
            && self.ids().contains(&delivery.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::State;
    use crate::store::contract::{fresh, model};
    use crate::store::{Expiry, NewRecord, Settlement, Store};

    /// A delivery whose end was lost finds what became of its attempt, however late.
    #[tokio::test]
    async fn a_record_is_not_swept_while_its_delivery_stands() {
        let (clock, step) = model::stopped_clock();
        let memory = Memory::with_clock(clock);
        let (one, other) = (RecordId([1; 32]), RecordId([2; 32]));
        let (token, origin, nothing) = (AttemptToken([9; 16]), OriginId(1), Bytes::new);
        let new = NewDelivery { token, origin, lane: Lane(0), head: nothing(), request: nothing(), body: nothing() };
        memory.accept(one, new).await.unwrap();
        for (number, id) in [(1, one), (2, other)] {
            let fresh: NewRecord = fresh(number);
            let attempt = fresh.attempt;
            memory.claim(id, fresh).await.unwrap();
            let expiry = Expiry::FromNow(Duration::from_secs(1));
            memory.settle(id, attempt, Settlement::Complete { answer: nothing(), expiry }).await.unwrap();
        }
        step(Duration::from_secs(2));
        // What stands is not counted either.
        assert_eq!(memory.sweep(1).await.unwrap(), 1);
        assert_eq!(memory.sweep(1).await.unwrap(), 0);
        assert_eq!(memory.get(one).await.unwrap().map(|found| found.record.state), Some(State::Completed));
        memory.discard(one, token).await.unwrap();
        assert_eq!(memory.sweep(1).await.unwrap(), 1);
    }
}
