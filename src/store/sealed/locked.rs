//! Which live records cannot be read with the keys that are configured.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::keyring::Keyring;
use super::resealer::Resealer;
use crate::idempotency::record::RecordId;
use crate::store::deliveries::DeliveryFilter;
use crate::store::resealing::{Beginnings, Values};
use crate::store::{Error, Filter, RecordEntry};

/// Live records of one service that these keys do not open.
#[derive(Debug, Default)]
pub struct Locked {
    /// Those that are encrypted with a key that is not configured.
    lacking: HashSet<RecordId>,
    /// Those that are plain, or whose answer is, where the configuration demands encryption.
    plain: HashSet<RecordId>,
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
        self.lacking.len() + self.plain.len()
    }

    /// How many are encrypted with a key that is not configured.
    #[must_use]
    pub fn lacking(&self) -> usize {
        self.lacking.len()
    }

    /// How many are plain, and a route has `seal = "required"`.
    #[must_use]
    pub fn plain(&self) -> usize {
        self.plain.len()
    }

    /// Looks at a record of any service as it is stored. `ending` is its answer, or the beginning of that: another key may have
    /// come before the attempt ended.
    pub fn look_at(&mut self, listed: &RecordEntry, ending: Option<&Bytes>, service: &str, keys: &Keyring) {
        if let Some(why) = Lock::of(keys, &listed.record.head, ending).filter(|_| is_own(listed, service)) {
            self.add(listed.id, why);
        }
    }

    fn add(&mut self, id: RecordId, why: Lock) {
        match why {
            Lock::Lacking => self.lacking.insert(id),
            Lock::Plain => self.plain.insert(id),
        };
    }
}

/// Why a record is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    /// One of its values is sealed with a key that is missing.
    Lacking,
    /// One of them is plain, and must be sealed.
    Plain,
}

impl Lock {
    fn of(keys: &Keyring, head: &Bytes, ending: Option<&Bytes>) -> Option<Self> {
        if [Some(head), ending].into_iter().flatten().any(|value| keys.lacks_key_of(value)) {
            return Some(Self::Lacking);
        }
        keys.is_planted(head, ending).then_some(Self::Plain)
    }
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
        // Whose they are, and whether they are live, is asked of those alone that are not read: as a rule there are none,
        // unless `seal` is new.
        let (mut found, mut after, mut is_whole) = (HashMap::new(), None, true);
        let mut budget = LookBudget::begin(first_deadline, pace);
        loop {
            let Beginnings { records, next } = resealing.beginnings(after, chunk).await?;
            let lock = |values: &Values| Lock::of(keys, &values.head, values.answer.as_ref());
            found.extend(records.iter().filter_map(|record| Some((record.id, lock(&record.values)?))));
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
            for listed in page.records.iter().filter(|listed| is_own(listed, self.service())) {
                if let Some(why) = found.get(&listed.id) {
                    locked.add(listed.id, *why);
                }
            }
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
                locked.look_at(&delivery.as_listed(), note.as_ref(), self.service(), self.keys());
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
