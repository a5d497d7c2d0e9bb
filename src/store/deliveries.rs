//! Requests that were accepted and are to be delivered later: see [`Deliveries`].

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Error, ErrorKind, IdPrefix, Origin, OriginId, RecordEntry, Store};
use crate::idempotency::codec::is_same_request;
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp};

/// A durable queue beside the records of a store. All times are the store's own.
///
/// It knows nothing of attempts: who takes a delivery runs it under the claim of a record, as any client's request, and
/// removes it when that record has its end. So a delivery that is taken twice runs once.
///
/// A delivery stands in the lane of its caller's scope.
#[async_trait]
pub trait Deliveries: Send + Sync {
    /// Keeps a request, unless its id has a record or a delivery already. Durable when it returns.
    ///
    /// A record counts even where it is written while this is under way: of the delivery that made it, something is left
    /// when this begins, or the record is there when it ends. Safe to repeat with the same token: the answer is then
    /// [`Acceptance::Accepted`] as well, or what came of the first call.
    async fn accept(&self, id: RecordId, new: NewDelivery) -> Result<Acceptance, Error>;

    /// The delivery of an id.
    async fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Error>;

    /// Takes due deliveries of one route, unless it is paused: none of them is due again before the hold ends. Durable when
    /// it returns. Those that somebody else takes at the moment are left out. Where not all that is due can be taken, each lane
    /// has its turn.
    async fn take_due(&self, take: Take) -> Result<Batch, Error>;

    /// Changes a delivery. Durable when it returns. False, and nothing changes, where it is no longer the one that was
    /// taken; for all but [`DeliveryChange::Finish`] also where its hold has ended and somebody else took it.
    async fn change(&self, taken: DeliveryHold, change: DeliveryChange) -> Result<bool, Error>;

    /// Makes a dead delivery due now, with no attempts behind it. False if there is none that is dead.
    async fn requeue(&self, id: RecordId) -> Result<bool, Error>;

    /// Removes the delivery of this token, whatever its state. Returns whether there was one.
    async fn discard(&self, id: RecordId, token: AttemptToken) -> Result<bool, Error> {
        self.change(DeliveryHold { id, token, until: Timestamp(0) }, DeliveryChange::Finish).await
    }

    /// Deliveries that pass `filter`, in the order of acceptance: at most `limit` (at least 1) after `after`.
    async fn deliveries(
        &self,
        filter: DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Error>;

    /// How many deliveries there are of each origin.
    async fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Error>;

    /// Holds back the deliveries of a route, or lets them go again: for every gate of the store, until said otherwise.
    /// Returns whether that is a change.
    async fn pause(&self, origin: OriginId, is_paused: bool) -> Result<bool, Error>;

    /// The routes that are paused, in no order.
    async fn paused(&self) -> Result<Vec<OriginId>, Error>;

    /// Removes up to `limit` dead deliveries that have expired. Returns how many.
    async fn sweep_deliveries(&self, limit: usize) -> Result<usize, Error>;
}

/// The place of a delivery in the order of acceptance, which no other has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sequence(pub u64);

/// A hash of the scope of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane(pub i64);

/// A request that is to be kept.
#[derive(Clone, Debug)]
pub struct NewDelivery {
    /// Names this delivery: a request that is accepted again later has another.
    pub token: AttemptToken,
    /// The route that it came in by.
    pub origin: OriginId,
    /// Its lane.
    pub lane: Lane,
    /// What its record would keep of the request.
    pub head: Bytes,
    /// All else that is sent to the upstream but the body, encoded.
    pub request: Bytes,
    /// The body.
    pub body: Bytes,
}

/// What became of a request that was to be kept.
#[derive(Clone, Debug)]
pub enum Acceptance {
    /// It is kept.
    Accepted,
    /// There is a delivery of this id.
    Queued(Delivery),
    /// There is a record of this id, and perhaps a delivery.
    Recorded {
        /// The record.
        record: Record,
        /// The store's time.
        now: Timestamp,
    },
}

/// A delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The id of its record.
    pub id: RecordId,
    /// See [`NewDelivery::token`].
    pub token: AttemptToken,
    /// Its place in the order of acceptance.
    pub sequence: Sequence,
    /// The route that it came in by; `None` if the store no longer knows it.
    pub origin: Option<Origin>,
    /// Its lane.
    pub lane: Lane,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// Since when it is tried: when it was accepted, or queued again.
    pub queued_at: Timestamp,
    /// Where it stands.
    pub state: DeliveryState,
    /// How many attempts ended in a release.
    pub attempts: u32,
    /// See [`NewDelivery::head`].
    pub head: Bytes,
    /// What the last change left to say of it.
    pub note: Option<Bytes>,
    /// The store's time when it was read.
    pub now: Timestamp,
}

/// Where a delivery stands. Whether an attempt is under way, its record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeliveryState {
    /// It is delivered as soon as it is due.
    Queued {
        /// When that is.
        due: Timestamp,
    },
    /// It was given up, and stays as it is until an operator queues it again or discards it, or it expires.
    Dead {
        /// When it expires.
        until: Timestamp,
    },
}

/// What to take.
#[derive(Clone, Copy, Debug)]
pub struct Take {
    /// Of which route.
    pub origin: OriginId,
    /// How many at most, at least 1.
    pub limit: usize,
    /// How many bytes of requests and bodies at most; a single delivery may have more.
    pub max_bytes: usize,
    /// How long no other gate takes them.
    pub hold: Duration,
    /// Whether a delivery waits until those of its lane that were accepted before it are gone or dead.
    pub is_ordered: bool,
}

/// Whose turn it is among the due deliveries of a route, where not all of them can be taken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaneTurn {
    /// The lane that had the last one.
    pub(super) lane: Option<Lane>,
    /// Whether a lane goes before the oldest.
    pub(super) is_lanes: bool,
}

/// A delivery that may be taken.
pub(super) struct Pick<T> {
    pub(super) what: T,
    /// The lane whose turn it is; nothing where it goes by age.
    pub(super) lane: Option<Lane>,
}

/// Some deliveries that were taken.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The deliveries.
    pub taken: Vec<TakenDelivery>,
    /// There may be more that are due.
    pub is_more: bool,
    /// When the next of those that were seen is due, if nothing is due now and that is known.
    pub next_due_in: Option<Duration>,
}

/// A delivery that was taken.
#[derive(Clone, Debug)]
pub struct TakenDelivery {
    /// It, as it is now: it is due when the hold ends.
    pub delivery: Delivery,
    /// See [`NewDelivery::request`].
    pub request: Bytes,
    /// See [`NewDelivery::body`].
    pub body: Bytes,
}

/// Which delivery was taken, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryHold {
    /// Its id.
    pub id: RecordId,
    /// Its token.
    pub token: AttemptToken,
    /// When the hold ends.
    pub until: Timestamp,
}

/// What to do with a delivery that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeliveryChange {
    /// Its record has its end: it is removed.
    Finish,
    /// It is due again after a time.
    Postpone {
        /// How long, from now.
        delay: Duration,
        /// An attempt failed, and counts.
        is_attempt: bool,
        /// What there is to say of it; `None` leaves what stands.
        note: Option<Bytes>,
    },
    /// It is given up.
    Park {
        /// How long it is kept, from now.
        ttl: Duration,
        /// An attempt failed, and counts.
        is_attempt: bool,
        /// Why.
        note: Bytes,
    },
}

/// Which deliveries to list. Everything that is set must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryFilter {
    /// Of this service.
    pub service: Option<Arc<str>>,
    /// Of this route.
    pub route: Option<Arc<str>>,
    /// Dead ones, or those that are not.
    pub is_dead: Option<bool>,
    /// With an id that starts with these digits.
    pub prefix: Option<IdPrefix>,
}

/// Some deliveries of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryPage {
    /// They, in the order of acceptance.
    pub deliveries: Vec<Delivery>,
    /// After which place the next page goes on; `None` if none is left.
    pub next: Option<Sequence>,
}

/// The deliveries of an origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryCount {
    /// The origin; `None` if the store no longer knows it.
    pub origin: Option<Origin>,
    /// How many are queued.
    pub queued: u64,
    /// How long ago the oldest of them was accepted.
    pub oldest: Option<Duration>,
    /// How many are dead.
    pub dead: u64,
}

impl LaneTurn {
    /// How many of so many go by age.
    pub(super) fn share_of_age(self, count: usize) -> usize {
        if self.is_lanes { count / 2 } else { count.div_ceil(2) }
    }

    /// One by age and one by lane in turn, and then what is left of either.
    pub(super) fn alternate<T>(self, by_age: Vec<T>, by_lane: Vec<(Lane, T)>) -> Vec<Pick<T>> {
        let mut by_age = by_age.into_iter().map(|what| Pick { what, lane: None });
        let mut by_lane = by_lane.into_iter().map(|(lane, what)| Pick { what, lane: Some(lane) });
        let mut is_lanes = !self.is_lanes;
        let next = || {
            is_lanes = !is_lanes;
            if is_lanes { by_lane.next().or_else(|| by_age.next()) } else { by_age.next().or_else(|| by_lane.next()) }
        };
        std::iter::from_fn(next).collect()
    }

    /// Whose turn it is after the first `taken` of these. `last_lane` was looked at last; a lane whose delivery is left keeps its
    /// turn.
    pub(super) fn after<T>(self, picks: &[Pick<T>], taken: usize, last_lane: Option<Lane>) -> Self {
        let taken_lane = picks.iter().take(taken).rev().find_map(|pick| pick.lane);
        let lane = if taken < picks.len() { taken_lane } else { last_lane };
        let last = taken.checked_sub(1).and_then(|last| picks.get(last));
        Self { lane: lane.or(self.lane), is_lanes: last.map_or(self.is_lanes, |last| last.lane.is_none()) }
    }
}

impl DeliveryFilter {
    /// The ids that a delivery that passes may have.
    pub(super) fn ids(&self) -> RangeInclusive<RecordId> {
        self.prefix.unwrap_or(IdPrefix::NONE).ids()
    }
}

impl NewDelivery {
    /// How many bytes are written of it.
    pub(super) fn size(&self) -> usize {
        self.head.len() + self.request.len() + self.body.len()
    }
}

impl TakenDelivery {
    /// What names it in its changes.
    #[must_use]
    pub fn held(&self) -> DeliveryHold {
        let until = match self.delivery.state {
            DeliveryState::Queued { due: until } | DeliveryState::Dead { until } => until,
        };
        DeliveryHold { id: self.delivery.id, token: self.delivery.token, until }
    }
}

/// The longest guess at when an overdue delivery is attempted.
const LONGEST_GUESS: Duration = Duration::from_secs(60);

impl Delivery {
    /// Whether it was given up.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, DeliveryState::Dead { .. })
    }

    /// How long it waited still when it was read; no time where it was due or given up.
    #[must_use]
    pub fn due_in(&self) -> Duration {
        match self.state {
            DeliveryState::Queued { due } => due.since(self.now),
            DeliveryState::Dead { .. } => Duration::ZERO,
        }
    }

    /// How long its next attempt is likely to be away, from when it was read: until it is due. One that is overdue waits for a worker, or
    /// for its route to go on: a guess is half the time that it has waited, and a minute at most. No time where it was given up.
    #[must_use]
    pub fn expected_in(&self) -> Duration {
        match self.state {
            DeliveryState::Queued { due } if due < self.now => (self.now.since(due) / 2).min(LONGEST_GUESS),
            _ => self.due_in(),
        }
    }

    /// The record that stands for it where none has been claimed yet: in flight, or unknown until a dead one expires.
    #[must_use]
    pub fn as_listed(self) -> RecordEntry {
        let (state, until) = match self.state {
            DeliveryState::Queued { due } => (State::InFlight, due),
            DeliveryState::Dead { until } => (State::Unknown, until),
        };
        let (attempt, claimed_at, head) = (self.token, self.accepted_at, self.head);
        RecordEntry {
            id: self.id,
            origin: self.origin,
            record: Record { attempt, state, claimed_at, until, head, answer: None },
            now: self.now,
        }
    }
}

impl DeliveryPage {
    /// Of up to `limit` deliveries, and one more if there is one.
    pub(super) fn of(mut deliveries: Vec<Delivery>, limit: usize) -> Self {
        let is_more = deliveries.len() > limit;
        deliveries.truncate(limit);
        let next = deliveries.last().filter(|_| is_more).map(|last| last.sequence);
        Self { deliveries, next }
    }
}

/// Where a store keeps deliveries.
///
/// # Errors
/// Where it keeps none.
pub fn of(store: &dyn Store) -> Result<&dyn Deliveries, Error> {
    store.deliveries().ok_or_else(|| Error::determinate(ErrorKind::Other, "this store keeps no deliveries"))
}

/// Logs that a delivery cannot be read. Others are taken all the same, but for those behind it of its scope where the order
/// counts: an operator purges it.
pub(super) fn passed_over(id: Option<RecordId>, error: &dyn std::fmt::Display) {
    let record = id.map(tracing::field::display);
    tracing::error!(record, %error, "an accepted request cannot be read, and is passed over: its row in the store is damaged; with order = \"scope\", those behind it wait until it is purged");
}

/// Whether a request waits for its delivery under an id.
///
/// # Errors
/// Where the store does not say.
pub async fn is_queued(store: &dyn Store, id: RecordId) -> Result<bool, Error> {
    Ok(of(store)?.delivery(id).await?.is_some_and(|delivery| !delivery.is_dead()))
}

/// Removes the delivery whose attempt claimed a record. A delivery that was accepted after the claim belongs to a later request
/// with the same key, and stays.
///
/// # Errors
/// Where the store does not say.
pub async fn remove_of(store: &dyn Store, RecordEntry { id, record, .. }: &RecordEntry) -> Result<(), Error> {
    let Some(queue) = store.deliveries() else { return Ok(()) };
    let delivery = queue.delivery(*id).await?.filter(|delivery| delivery.accepted_at <= record.claimed_at);
    if let Some(Delivery { id, token, .. }) = delivery {
        queue.discard(id, token).await?;
    }
    Ok(())
}

/// Removes dead deliveries whose requests have run to their end since: the upstream said so in a transaction of its own, or an
/// answer came late. It looks at up to `limit` of those that pass `dead`, behind `after`. Returns behind which one the next look
/// goes on.
///
/// `open` gives the head of a delivery and that of the record with its id; nothing where they cannot be read.
///
/// # Errors
/// Where the store does not say.
pub async fn remove_completed(
    store: &dyn Store,
    dead: DeliveryFilter,
    (after, limit): (Option<Sequence>, usize),
    open: impl Fn(&Delivery, Record) -> Option<(Bytes, Bytes)> + Send,
) -> Result<Option<Sequence>, Error> {
    let queue = of(store)?;
    let page = queue.deliveries(DeliveryFilter { is_dead: Some(true), ..dead }, after, limit).await?;
    for delivery in page.deliveries {
        // A record that has expired still says how the request ended, and stands as long as the delivery.
        let record = match store.get(delivery.id).await {
            Ok(Some(RecordEntry { record, .. })) => record,
            Ok(None) => continue,
            Err(error) if error.cause().kind == ErrorKind::Corrupt => continue,
            Err(error) => return Err(error),
        };
        if record.state != State::Completed || record.claimed_at < delivery.accepted_at {
            continue;
        }
        // A later request may have the same key.
        if open(&delivery, record).is_some_and(|(own, found)| is_same_request(&own, &found)) {
            queue.discard(delivery.id, delivery.token).await?;
        }
    }
    Ok(page.next)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its client is not to ask each second while a route is paused.
    #[test]
    fn an_overdue_delivery_is_expected_later_the_longer_it_has_waited() {
        let at = |state, now| Delivery {
            id: RecordId([1; 32]),
            token: AttemptToken([2; 16]),
            sequence: Sequence(3),
            origin: None,
            lane: Lane(4),
            accepted_at: Timestamp(0),
            queued_at: Timestamp(0),
            state,
            attempts: 0,
            head: Bytes::new(),
            note: None,
            now: Timestamp(now),
        };
        let queued = |now| at(DeliveryState::Queued { due: Timestamp(10_000) }, now).expected_in().as_millis();
        let expected = [7_000, 10_000, 10_900, 16_000, 40_000, 9_000_000].map(queued);
        assert_eq!(expected, [3_000, 0, 450, 3_000, 15_000, 60_000]);
        assert_eq!(at(DeliveryState::Dead { until: Timestamp(10_000) }, 40_000).expected_in(), Duration::ZERO);
    }
}
