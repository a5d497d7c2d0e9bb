//! Records in memory, for tests and trials: they do not outlive the process.

mod audit;
mod deliveries;

use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

use self::audit::Entries;
use self::deliveries::Queue;
use super::adoption::{self, NamespacePeriod};
use super::clock::{self, Clock};
use super::deliveries::{Deliveries, Delivery};
use super::lifecycle::{self, CurrentRecord, Transition};
use super::listing::Newest;
use super::removals::{Removal, Removals};
use super::resealing::{Beginning, Beginnings, DeliveryValues, Values};
use super::{
    AuditLog, Chunk, Claim, Cursor, Error, Filter, IdentityChange, LeaseRenewal, LiveKeys, NamespaceRuleSet,
    NamespaceRules, NewRecord, Origin, OriginId, Page, RecordEntry, Resealing, Settled, Settlement, Store,
};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp, Version};

/// A store in memory.
pub struct Memory {
    clock: Clock,
    /// `None` once it is closed.
    tables: Mutex<Option<Tables>>,
    removals: Removals,
}

/// The data of the store.
#[derive(Default)]
struct Tables {
    /// Boxed: a claim moves its neighbours in the tree.
    entries: BTreeMap<RecordId, Box<Entry>>,
    schedule: Schedule,
    origins: HashMap<i64, Origin>,
    identities: Vec<NamespaceRuleSet>,
    periods: Vec<NamespacePeriod>,
    audit: Entries,
    queue: Queue,
}

/// When something is due for each record, and how many records there are in each state.
#[derive(Default)]
struct Schedule {
    /// The in-flight records by the end of their lease.
    leases: BTreeSet<(Timestamp, RecordId)>,
    /// The other records by their expiry.
    expiries: BTreeSet<(Timestamp, RecordId)>,
    counts: [u64; 3],
}

#[derive(Clone)]
struct Entry {
    record: Record,
    origin: OriginId,
    unknown_ttl: Duration,
}

impl Memory {
    /// An empty store on the wall clock, read once, and the monotonic clock from then on.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(clock::steady(clock::wall()))
    }

    /// Publishes an event of the removal feed, as a shared store does.
    #[cfg(test)]
    pub(super) fn publish(&self, removal: Removal) {
        self.removals.publish(removal);
    }

    /// An empty store on the given clock.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, tables: Mutex::new(Some(Tables::default())), removals: Removals::default() }
    }

    /// Runs one operation at one instant.
    fn with<T>(&self, operation: impl FnOnce(&mut Tables, Timestamp) -> T) -> Result<T, Error> {
        let mut tables = self.lock();
        // The time is read under the lock: operations that follow one another never see it run back.
        let now = (self.clock)();
        match tables.as_mut() {
            Some(tables) => Ok(operation(tables, now)),
            None => Err(Error::closed()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Tables>> {
        // Operations leave the tables consistent at every point where they could panic.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for Memory {
    fn kind(&self) -> &'static str {
        "memory"
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        self.with(|tables, now| match tables.entries.entry(id) {
            btree_map::Entry::Vacant(place) => {
                let Entry { record, .. } = &**place.insert(Box::new(fresh.into_entry(now)));
                tables.schedule.insert(id, record.state, record.until);
                Claim::Inserted(now)
            }
            btree_map::Entry::Occupied(entry) => match entry.get() {
                entry if entry.is_held_by(fresh.attempt) => Claim::Inserted(entry.record.claimed_at),
                entry => Claim::Exists { record: entry.record.clone(), now },
            },
        })
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.with(|tables, now| match tables.entries.get(&id) {
            Some(entry) if entry.is_held_by(fresh.attempt) => true,
            Some(entry) if entry.record.version() == seen => {
                tables.put(id, Box::new(fresh.into_entry(now)));
                true
            }
            Some(_) | None => false,
        })
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.with(|tables, now| tables.settle(id, attempt, end, now))
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.with(|tables, now| {
            let mut renewed = Vec::new();
            for held in held {
                tables.change(held.id, |entry| {
                    if entry.is_held_by(held.attempt) {
                        entry.record.until = now.plus(held.lease);
                        renewed.push(held.id);
                    }
                });
            }
            renewed
        })
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.with(|tables, now| {
            let past: Vec<RecordId> = due(&tables.schedule.leases, now).take(limit).collect();
            for id in &past {
                tables.change(*id, |entry| {
                    entry.record.state = State::Unknown;
                    entry.record.until = now.plus(entry.unknown_ttl);
                });
            }
            past
        })
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.with(|tables, now| {
            // A delivery whose end was lost is to find its record.
            let past = due(&tables.schedule.expiries, now).filter(|id| !tables.queue.has(*id));
            let past: Vec<RecordId> = past.take(limit).collect();
            for id in &past {
                tables.take(*id);
            }
            past.len()
        })
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        Some(self)
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        Some(self)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        Some(self)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.with(|tables, now| {
            let entry = tables.entries.get(&id)?;
            Some(RecordEntry {
                id,
                origin: tables.origins.get(&entry.origin.0).cloned(),
                record: entry.record.clone(),
                now,
            })
        })
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.with(|tables, now| {
            let mut newest = Newest::new(after, limit);
            for (id, entry) in tables.entries.range(filter.ids()) {
                let claimed_at = entry.record.claimed_at;
                if newest.wants(claimed_at, *id)
                    && let Some(listed) = tables.listed(&filter, *id, entry, now)
                {
                    newest.keep(claimed_at, 0, listed);
                }
            }
            newest.into_page()
        })
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.with(|tables, now| {
            let start = after.map_or(Bound::Unbounded, Bound::Excluded);
            let entries = tables.entries.range((start, Bound::Unbounded));
            let found = entries.filter_map(|(id, entry)| tables.listed(&filter, *id, entry, now));
            // One extra record shows whether there are more.
            Chunk::of(found.take(limit.saturating_add(1)).collect(), limit)
        })
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let removed = self.with(|tables, _| {
            let is_its = tables.entries.get(&id).is_some_and(|entry| entry.record.attempt == attempt);
            is_its && tables.take(id).is_some()
        })?;
        if removed {
            self.removals.publish(Removal::Of(id));
        }
        Ok(removed)
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        Some(self.removals.subscribe())
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.with(|tables, _| tables.schedule.counts)
    }

    async fn changes(&self, _: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.with(|tables, now| tables.changes(&tables.on_file(), &rules, now))
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.with(|tables, now| {
            let on_file = tables.on_file();
            let changes = if accept_change { Vec::new() } else { tables.changes(&on_file, &rules, now) };
            if changes.is_empty() {
                tables.origins.extend(origins.into_iter().map(|origin| (origin.id().0, origin)));
                adoption::new_periods(&on_file, &rules, now).into_iter().for_each(|new| tables.begin(new));
                tables.identities = rules;
            }
            changes
        })
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.with(|tables, _| tables.on_file())
    }

    async fn ping(&self) -> Result<(), Error> {
        self.with(|_, _| ())
    }

    async fn close(&self) {
        *self.lock() = None;
    }
}

impl Tables {
    /// Inserts an entry, replacing the current one.
    fn put(&mut self, id: RecordId, entry: Box<Entry>) {
        let (state, until) = (entry.record.state, entry.record.until);
        if let Some(former) = self.entries.insert(id, entry) {
            self.schedule.remove(id, former.record.state, former.record.until);
        }
        self.schedule.insert(id, state, until);
    }

    fn take(&mut self, id: RecordId) -> Option<Box<Entry>> {
        let entry = self.entries.remove(&id)?;
        self.schedule.remove(id, entry.record.state, entry.record.until);
        Some(entry)
    }

    /// Changes an entry where it stands: taking it out and putting it back would search and shift the records twice more.
    fn change(&mut self, id: RecordId, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(&id) {
            self.schedule.remove(id, entry.record.state, entry.record.until);
            change(entry);
            self.schedule.insert(id, entry.record.state, entry.record.until);
        }
    }

    fn settle(&mut self, id: RecordId, attempt: AttemptToken, end: Settlement, now: Timestamp) -> Settled {
        let entry = self.entries.get(&id);
        let transition = lifecycle::settle(entry.map(|entry| entry.current()), attempt, &end, now);
        let answer = end.answer().cloned();
        match transition {
            Transition::Complete { until } => {
                self.end(id, State::Completed, until, answer);
                Settled::Done { until }
            }
            Transition::TurnUnknown { until } => {
                self.end(id, State::Unknown, until, answer);
                Settled::Done { until }
            }
            Transition::Remove => {
                self.take(id);
                Settled::Done { until: now }
            }
            Transition::Repeated { until } => Settled::Done { until },
            Transition::RepeatedIfSame { until } if entry.is_some_and(|entry| entry.record.answer == answer) => {
                Settled::Done { until }
            }
            Transition::RepeatedIfSame { .. } | Transition::NotCurrent => {
                Settled::NotCurrent { record: entry.map(|entry| entry.record.clone()) }
            }
        }
    }

    fn end(&mut self, id: RecordId, state: State, until: Timestamp, answer: Option<Bytes>) {
        self.change(id, |Entry { record, .. }| {
            (record.state, record.until, record.answer) = (state, until, answer);
        });
    }

    /// A record without its answer, if it passes.
    fn listed(&self, filter: &Filter, id: RecordId, entry: &Entry, now: Timestamp) -> Option<RecordEntry> {
        let origin = self.origins.get(&entry.origin.0);
        filter.passes(id, &entry.record, origin, now).then(|| RecordEntry {
            id,
            origin: origin.cloned(),
            record: Record { answer: None, ..entry.record.clone() },
            now,
        })
    }

    /// The current and the former rules on file.
    fn on_file(&self) -> Vec<NamespaceRules> {
        let identities = self.identities.iter().cloned();
        adoption::on_file(identities.map(|rule| (rule.service, rule.namespace, rule.digest)), self.periods.clone())
    }

    fn changes(&self, on_file: &[NamespaceRules], rules: &[NamespaceRuleSet], now: Timestamp) -> Vec<IdentityChange> {
        let stale = adoption::forgotten(on_file, rules);
        stale.iter().filter_map(|stale| adoption::change(stale, self.live(stale, now))).collect()
    }

    fn live(&self, rules: &NamespaceRules, now: Timestamp) -> Vec<LiveKeys> {
        let is_live = |record: &Record| lifecycle::is_live(record.state, record.until, now);
        let mut live: BTreeMap<Arc<str>, LiveKeys> = BTreeMap::new();
        let mut add = |origin: OriginId, record: &Record| {
            let of = |origin: &&Origin| origin.service == rules.service && origin.namespace == rules.namespace;
            if let Some(Origin { route, .. }) = self.origins.get(&origin.0).filter(of)
                && is_live(record)
            {
                live.entry(Arc::clone(route)).or_insert_with(|| LiveKeys::of(route)).add(record);
            }
        };
        self.entries.values().for_each(|entry| add(entry.origin, &entry.record));
        for (origin, delivery) in self.queue.all() {
            if !self.entries.get(&delivery.id).is_some_and(|entry| is_live(&entry.record)) {
                add(origin, &delivery.clone().as_listed().record);
            }
        }
        live.into_values().collect()
    }

    fn begin(&mut self, new: NamespacePeriod) {
        let is_other = |known: &NamespacePeriod| {
            (&known.service, &known.namespace, known.period.since) != (&new.service, &new.namespace, new.period.since)
        };
        self.periods.retain(is_other);
        self.periods.push(new);
    }
}

impl Schedule {
    fn insert(&mut self, id: RecordId, state: State, until: Timestamp) {
        self.counts[lifecycle::state_index(state)] += 1;
        self.of(state).insert((until, id));
    }

    fn remove(&mut self, id: RecordId, state: State, until: Timestamp) {
        self.counts[lifecycle::state_index(state)] -= 1;
        self.of(state).remove(&(until, id));
    }

    fn of(&mut self, state: State) -> &mut BTreeSet<(Timestamp, RecordId)> {
        match state {
            State::InFlight => &mut self.leases,
            State::Completed | State::Unknown => &mut self.expiries,
        }
    }
}

impl Entry {
    fn is_held_by(&self, attempt: AttemptToken) -> bool {
        self.record.state == State::InFlight && self.record.attempt == attempt
    }

    fn current(&self) -> CurrentRecord {
        CurrentRecord {
            attempt: self.record.attempt,
            state: self.record.state,
            claimed_at: self.record.claimed_at,
            until: self.record.until,
            unknown_ttl: self.unknown_ttl,
        }
    }
}

impl NewRecord {
    fn into_entry(self, now: Timestamp) -> Entry {
        let record = Record {
            attempt: self.attempt,
            state: State::InFlight,
            claimed_at: now,
            until: now.plus(self.lease),
            head: self.head,
            answer: None,
        };
        Entry { record, origin: self.origin, unknown_ttl: self.unknown_ttl }
    }
}

fn due(set: &BTreeSet<(Timestamp, RecordId)>, now: Timestamp) -> impl Iterator<Item = RecordId> {
    set.iter().take_while(move |(until, _)| lifecycle::is_past(*until, now)).map(|(_, id)| *id)
}

#[async_trait]
impl Resealing for Memory {
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
        self.with(|tables, _| {
            let from = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
            let beginning = |id: RecordId, entry: &Entry| {
                let Record { state, head, answer, .. } = entry.record.clone();
                Beginning { id, state, values: Values { head, answer }.beginning() }
            };
            Beginnings::of(
                tables.entries.range(from).take(limit).map(|(id, entry)| beginning(*id, entry)).collect(),
                limit,
            )
        })
    }

    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error> {
        self.with(|tables, _| match tables.entries.get_mut(&id).map(AsMut::as_mut) {
            Some(Entry { record, .. }) if record.state != State::InFlight && record.version() == seen => {
                Values { head: record.head, answer: record.answer } = values;
                true
            }
            Some(_) | None => false,
        })
    }

    async fn delivery_values(&self, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
        self.with(|tables, now| tables.delivery_values(id, now))
    }

    async fn reseal_delivery(
        &self,
        id: RecordId,
        token: AttemptToken,
        seen: Option<Bytes>,
        values: DeliveryValues,
    ) -> Result<bool, Error> {
        self.with(|tables, _| tables.queue.reseal(id, token, seen.as_ref(), values))
    }
}

#[cfg(test)]
mod tests {
    use proptest::test_runner::Config as ProptestConfig;

    use super::*;
    use crate::store::contract::{self, Harness, model};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_keeps_the_contract() {
        contract::run(async || {
            let (clock, step) = model::stopped_clock();
            Harness::stepped(Memory::with_clock(clock), step)
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_keeps_the_contract_by_its_own_clock() {
        contract::run(async || Harness::waiting(Memory::new())).await;
    }

    #[test]
    fn it_behaves_like_a_plain_map() {
        model::check(ProptestConfig::default().cases, async || {
            let (clock, step) = model::stopped_clock();
            model::Subject { harness: Harness::stepped(Memory::with_clock(clock), step), reopen: None }
        });
    }
}
