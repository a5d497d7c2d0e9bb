//! Which live records need a key that is not configured.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::keyring::Keyring;
use super::resealer::Resealer;
use crate::idempotency::record::RecordId;
use crate::store::deliveries::DeliveryFilter;
use crate::store::resealing::{Beginnings, Values};
use crate::store::{Error, Filter, RecordEntry};

/// Live records of one service that are encrypted with a key that is not configured.
#[derive(Debug, Default)]
pub struct Locked {
    ids: HashSet<RecordId>,
    /// Whether there was not the time to look at all.
    pub is_partial: bool,
}

/// How a store is looked through.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long at most.
    pub patience: Duration,
    /// Whether with pauses, so that others have the most of the store.
    pub pauses: bool,
}

impl Locked {
    /// How many were found.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ids.len()
    }

    /// Looks at a record of any service as it is stored. `ending` is its answer, or the beginning of that: another key may have
    /// come before the attempt ended.
    pub fn look_at(&mut self, listed: &RecordEntry, ending: Option<&Bytes>, service: &str, keys: &Keyring) {
        if is_own(listed, service) && lacks_key(keys, &listed.record.head, ending) {
            self.ids.insert(listed.id);
        }
    }
}

/// Whether one of the values is sealed with a key that is missing.
fn lacks_key(keys: &Keyring, head: &Bytes, ending: Option<&Bytes>) -> bool {
    [Some(head), ending].into_iter().flatten().any(|value| keys.lacks_key_of(value))
}

/// Whether it is a live record of the service.
fn is_own(listed: &RecordEntry, service: &str) -> bool {
    listed.origin.as_ref().is_some_and(|origin| *origin.service == *service) && listed.is_live()
}

/// The time that is left for looking.
struct LookBudget {
    began: Instant,
    deadline: Instant,
    pauses: bool,
}

impl LookBudget {
    fn begin(deadline: Instant, pace: Pace) -> Self {
        Self { began: Instant::now(), deadline, pauses: pace.pauses }
    }

    /// Waits until it is time for the next look. False if none fits in.
    async fn next(&mut self) -> bool {
        if self.pauses {
            tokio::time::sleep(2 * self.began.elapsed()).await;
        }
        self.began = Instant::now();
        self.began < self.deadline
    }
}

impl Resealer {
    /// Looks at the records as they are stored, then at the accepted requests.
    ///
    /// # Errors
    /// The store fails.
    pub async fn look_for_locked(&self, pace: Pace) -> Result<Locked, Error> {
        let (began, mut locked) = (Instant::now(), Locked::default());
        let deadline = began + pace.patience;
        locked.is_partial = !self.look_at_records(&mut locked, began + pace.patience / 2, deadline, pace).await?;
        if Instant::now() < deadline {
            locked.is_partial |= !self.look_at_deliveries(&mut locked, deadline, pace).await?;
        }
        Ok(locked)
    }

    /// False if there was not the time to look at all.
    async fn look_at_records(
        &self,
        locked: &mut Locked,
        first_deadline: Instant,
        deadline: Instant,
        pace: Pace,
    ) -> Result<bool, Error> {
        let (store, keys, chunk) = (self.store(), self.keys(), self.chunk());
        let Some(resealing) = store.resealing() else { return Ok(true) };
        // Whose they are, and whether they are live, is asked of those alone whose key is missing: as a rule there are none.
        let (mut found, mut after, mut is_whole) = (HashSet::new(), None, true);
        let mut budget = LookBudget::begin(first_deadline, pace);
        loop {
            let Beginnings { records, next } = resealing.beginnings(after, chunk).await?;
            let lacking = |values: &Values| lacks_key(keys, &values.head, values.answer.as_ref());
            found.extend(records.iter().filter(|record| lacking(&record.values)).map(|record| record.id));
            after = next;
            if after.is_none() {
                break;
            }
            if !budget.next().await {
                is_whole = false;
                break;
            }
        }
        let (mut after, mut budget) = (None, LookBudget::begin(deadline, pace));
        while !found.is_empty() {
            let filter = Filter { service: Some(Arc::clone(self.service())), ..Filter::default() };
            let page = store.scan(filter, after, chunk).await?;
            let own = |listed: &&RecordEntry| found.contains(&listed.id) && is_own(listed, self.service());
            locked.ids.extend(page.records.iter().filter(own).map(|listed| listed.id));
            after = page.next;
            if after.is_none() {
                break;
            }
            if !budget.next().await {
                return Ok(false);
            }
        }
        Ok(is_whole)
    }

    /// The same of accepted requests.
    async fn look_at_deliveries(&self, locked: &mut Locked, deadline: Instant, pace: Pace) -> Result<bool, Error> {
        let (mut after, mut budget) = (None, LookBudget::begin(deadline, pace));
        while let Some(queue) = self.store().deliveries() {
            let filter = DeliveryFilter { service: Some(Arc::clone(self.service())), ..DeliveryFilter::default() };
            let page = queue.deliveries(filter, after, self.chunk()).await?;
            for delivery in page.deliveries {
                let note = delivery.note.clone();
                locked.look_at(&delivery.as_listed(page.now), note.as_ref(), self.service(), self.keys());
            }
            after = page.next;
            if after.is_none() {
                break;
            }
            if !budget.next().await {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
