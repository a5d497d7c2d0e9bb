//! The contract of [`Store`], as one suite that every store passes. For tests.
//!
//! Each check gets a fresh store. Durations that must pass are short and durations that must not are long, so that
//! the suite also runs against a store whose clock cannot be stepped.

mod adoption;
mod audit;
mod claims;
mod crowd;
mod deliveries;
mod listing;
#[cfg(test)]
pub(crate) mod model;
mod resealing;
mod settling;
mod upkeep;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::deliveries::Deliveries;
use super::{Claim, Expiry, NewRecord, Origin, OriginId, RecordEntry, Settled, Settlement, Store};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};

/// A store under test, and how to let its time pass.
pub struct Harness {
    /// The store.
    pub store: Arc<dyn Store>,
    advance: Box<dyn Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync>,
    kept_alive: Vec<Box<dyn Any + Send>>,
    is_shared: bool,
    is_above_seal: bool,
    keeps_no_deliveries: bool,
}

impl Harness {
    /// A store whose clock is stepped by `step`.
    pub fn stepped(store: impl Store, step: impl Fn(Duration) + Send + Sync + 'static) -> Self {
        let advance = move |duration| -> BoxFuture<'static, ()> {
            step(duration);
            Box::pin(std::future::ready(()))
        };
        Self::stepped_slowly(store, advance)
    }

    /// A store whose clock runs by itself.
    pub fn waiting(store: impl Store) -> Self {
        let advance = |duration| -> BoxFuture<'static, ()> { Box::pin(tokio::time::sleep(duration)) };
        Self::stepped_slowly(store, advance)
    }

    /// It is a store that services share.
    #[must_use]
    pub fn shared(mut self) -> Self {
        self.is_shared = true;
        self
    }

    /// It lies above what seals.
    #[must_use]
    pub fn above_seal(mut self) -> Self {
        self.is_above_seal = true;
        self
    }

    /// It keeps no accepted requests.
    #[must_use]
    pub fn without_deliveries(mut self) -> Self {
        self.keeps_no_deliveries = true;
        self
    }

    /// A store whose clock is stepped by `advance`, which may take a while.
    pub fn stepped_slowly(
        store: impl Store,
        advance: impl Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            store: Arc::new(store),
            advance: Box::new(advance),
            kept_alive: Vec::new(),
            is_shared: false,
            is_above_seal: false,
            keeps_no_deliveries: false,
        }
    }

    /// Keeps something, such as a directory, for as long as the store is under test.
    #[must_use]
    pub fn keeping(mut self, thing: impl Any + Send) -> Self {
        self.kept_alive.push(Box::new(thing));
        self
    }

    /// Its accepted requests. None only where the harness says so: no check passes because a store forgot to give them.
    fn queue(&self) -> Option<&dyn Deliveries> {
        let queue = self.store.deliveries();
        assert_eq!(
            queue.is_none(),
            self.keeps_no_deliveries,
            "a store keeps accepted requests, or says that it does not"
        );
        queue
    }

    async fn advance(&self, duration: Duration) {
        (self.advance)(duration).await;
    }
}

impl fmt::Debug for Harness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness").field("store", &self.store.kind()).finish_non_exhaustive()
    }
}

/// Runs every check against stores that `make` makes.
///
/// # Panics
/// Where a check fails.
pub async fn run<M, F>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = Harness>,
{
    macro_rules! checks {
        ($($room:ident :: $check:ident)*) => {
            $( $room::$check(make().await).await; )*
        };
    }
    checks! {
        claims::a_free_id_is_claimed
        claims::a_claim_that_stands_is_shown
        claims::the_same_attempt_claims_again
        claims::an_attempt_that_lost_its_claim_does_not_get_it_back_by_asking
        claims::an_expired_record_still_stands
        claims::supersede_replaces_what_was_seen
        claims::supersede_needs_the_version_that_was_seen
        claims::supersede_repeats_for_the_same_attempt
        claims::supersede_claims_nothing_where_nothing_stands
        settling::an_attempt_completes
        settling::an_expiry_counts_from_the_claim_or_from_now
        settling::an_answer_is_never_dead_on_arrival
        settling::an_attempt_releases
        settling::an_attempt_holds
        settling::an_attempt_completes_late
        settling::the_same_ending_repeats
        settling::another_attempt_ends_nothing
        settling::a_completed_record_never_regresses
        settling::nothing_stands
        settling::a_superseded_attempt_ends_nothing
        settling::large_answers_come_back
        settling::empty_answers_are_answers
        upkeep::leases_are_renewed_for_their_attempts_only
        upkeep::leases_that_are_past_turn_unknown
        upkeep::leases_expire_up_to_a_limit
        upkeep::sweep_removes_what_has_expired
        upkeep::sweep_never_removes_what_is_in_flight_or_lives
        upkeep::sweep_keeps_to_its_limit
        upkeep::records_are_removed_whatever_their_state
        upkeep::the_longest_durations_saturate
        listing::a_record_is_found_by_its_id
        listing::records_are_listed_newest_first
        listing::records_of_one_time_are_listed_in_the_order_of_their_ids
        listing::records_are_scanned_in_the_order_of_their_ids
        listing::filters_hold_together
        listing::records_are_found_by_the_start_of_their_id
        listing::records_are_found_by_their_age
        listing::records_are_counted_by_state
        resealing::values_are_replaced_where_the_version_is_the_same
        resealing::no_other_record_is_replaced
        resealing::beginnings_come_in_the_order_of_ids
        resealing::values_of_deliveries_are_replaced_where_the_note_is_the_same
        audit::entries_are_kept_as_they_are
        audit::entries_come_in_pages
        audit::entries_are_filtered
        audit::details_are_amended
        audit::entries_expire
        audit::no_place_is_given_twice
        deliveries::a_request_is_kept_once
        deliveries::many_are_kept_and_removed_at_once
        deliveries::a_record_comes_first
        deliveries::what_is_taken_is_held
        deliveries::a_lane_is_taken_in_order
        deliveries::each_lane_has_its_turn
        deliveries::each_lane_has_its_turn_where_few_are_taken
        deliveries::one_lane_fills_a_batch
        deliveries::what_is_queued_again_has_its_turn_beside_a_long_lane
        deliveries::a_batch_has_its_limits
        deliveries::a_route_is_paused
        deliveries::what_is_dead_waits_for_an_operator
        deliveries::what_is_dead_ends_with_its_record
        deliveries::what_comes_back_before_one_that_is_under_way_waits_for_it
        deliveries::deliveries_are_listed_and_counted
        deliveries::a_record_stays_while_its_delivery_stands
        adoption::the_first_rules_are_taken
        adoption::other_rules_are_refused_while_records_live
        adoption::other_rules_are_taken_where_nothing_lives
        adoption::other_rules_are_taken_where_that_is_accepted
        adoption::other_rules_are_refused_while_accepted_requests_wait
        adoption::rules_that_are_gone_are_refused_while_records_live
        adoption::rules_that_are_gone_are_forgotten_where_nothing_lives
        adoption::rules_that_are_gone_are_forgotten_where_that_is_accepted
        adoption::another_service_is_left_alone_where_services_share_the_store
        adoption::a_change_says_what_lives_of_which_route_and_until_when
        adoption::descriptions_are_kept_with_the_rules
        adoption::rules_that_are_found_as_well_take_each_others_place
        adoption::records_are_orphaned_while_other_rules_are_on_file
        crowd::one_of_many_claims_of_one_id_wins
        crowd::one_of_many_supersedes_wins
        crowd::every_caller_is_answered
        crowd::a_store_that_closes_finishes_what_it_accepted
    }
}

/// Long enough for every check.
const LONG: Duration = Duration::from_secs(3600);

/// Short enough to wait for.
const SHORT: Duration = Duration::from_millis(30);

/// Waits until [`SHORT`] is past.
async fn short_passes(harness: &Harness) {
    harness.advance(SHORT * 2).await;
}

/// Ids in the order of their numbers, spread over their first bytes.
fn id(number: u8) -> RecordId {
    let mut bytes = [0x5a; 32];
    bytes[0] = number;
    RecordId(bytes)
}

fn attempt(number: u8) -> AttemptToken {
    AttemptToken([number; 16])
}

fn origin(route: &str) -> Origin {
    Origin { service: "shop".into(), namespace: "charges".into(), route: route.into() }
}

pub(super) fn fresh(number: u8) -> NewRecord {
    NewRecord {
        attempt: attempt(number),
        origin: OriginId(i64::from(number)),
        lease: LONG,
        ttl: LONG,
        unknown_ttl: LONG * 2,
        head: Bytes::from(vec![number; 3]),
    }
}

fn hold() -> Settlement {
    Settlement::Hold { cause: Bytes::from_static(b"cause") }
}

fn answer(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn complete(text: &'static str) -> Settlement {
    Settlement::Complete { answer: answer(text), expiry: Expiry::FromNow(LONG) }
}

/// Claims a free id.
async fn claim(harness: &Harness, id: RecordId, fresh: NewRecord) -> Timestamp {
    match harness.store.claim(id, fresh).await {
        Ok(Claim::Inserted(at)) => at,
        other => panic!("a free id was not claimed: {other:?}"),
    }
}

/// The record that a claim finds.
async fn current(harness: &Harness, id: RecordId) -> Record {
    match harness.store.claim(id, fresh(0xee)).await {
        Ok(Claim::Exists { record, .. }) => record,
        other => panic!("no record stands: {other:?}"),
    }
}

async fn get(harness: &Harness, id: RecordId) -> Option<RecordEntry> {
    harness.store.get(id).await.expect("get works")
}

/// Ends an attempt that may end.
async fn settle(harness: &Harness, id: RecordId, attempt: AttemptToken, end: Settlement) -> Timestamp {
    match harness.store.settle(id, attempt, end).await {
        Ok(Settled::Done { until }) => until,
        other => panic!("the attempt did not end: {other:?}"),
    }
}

/// Ends an attempt that may not end, and gives what stands instead.
async fn settle_in_vain(harness: &Harness, id: RecordId, attempt: AttemptToken, end: Settlement) -> Option<Record> {
    match harness.store.settle(id, attempt, end).await {
        Ok(Settled::NotCurrent { record }) => record,
        other => panic!("the attempt ended: {other:?}"),
    }
}

/// A record in this state, by attempt `number`, that lives long.
async fn put(harness: &Harness, id: RecordId, number: u8, state: State) -> Record {
    claim(harness, id, fresh(number)).await;
    match state {
        State::InFlight => {}
        State::Completed => drop(settle(harness, id, attempt(number), complete("done")).await),
        State::Unknown => drop(settle(harness, id, attempt(number), hold()).await),
    }
    current(harness, id).await
}
