//! A reference store, written from the trait's documentation alone: a plain map and one clock.

use std::collections::BTreeMap;

use super::*;
use crate::store::{IdentityChange, LiveKeys};

/// The reply to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Inserted(Timestamp),
    Exists(Record, Timestamp),
    Yes(bool),
    Done(Timestamp),
    Fenced(Option<Record>),
    Count(usize),
    RecordEntry(Vec<(RecordId, Option<Origin>, Record)>),
    Changes(Vec<IdentityChange>),
    Nothing,
}

/// The state of the reference store.
pub(super) struct Reference {
    pub(super) now: Timestamp,
    /// Whether services share the store, and gates.
    is_shared: bool,
    records: BTreeMap<u8, StoredRecord>,
    origins: Vec<Origin>,
    identities: Vec<NamespaceRuleSet>,
}

#[derive(Clone)]
struct StoredRecord {
    record: Record,
    origin: Origin,
    unknown_ttl: Duration,
}

impl Reference {
    pub(super) fn new(now: Timestamp, is_shared: bool) -> Self {
        Self { now, is_shared, records: BTreeMap::new(), origins: Vec::new(), identities: Vec::new() }
    }

    /// The versions that stand.
    pub(super) fn versions(&self) -> Versions {
        let mut versions = [None; IDS as usize];
        for (id, stored) in &self.records {
            versions[usize::from(*id)] = Some(stored.record.version());
        }
        versions
    }

    /// Applies a call and returns its reply, except for the part that [`Reference::learn`] learns.
    pub(super) fn apply(&mut self, call: &Call, seen: &Versions, stale: &Versions) -> Reply {
        match call.clone() {
            Call::Claim(id, by) => match self.records.get(&id).map(|stored| stored.record.clone()) {
                None => {
                    self.put(id, by);
                    Reply::Inserted(self.now)
                }
                Some(record) if is_held(&record, by.by) => Reply::Inserted(record.claimed_at),
                Some(record) => Reply::Exists(record, self.now),
            },
            Call::Supersede { id, by, is_stale } => {
                let Some(version) = version_of(id, is_stale, seen, stale) else { return Reply::Nothing };
                match self.records.get(&id).map(|stored| &stored.record) {
                    None => Reply::Yes(false),
                    Some(record) if is_held(record, by.by) => Reply::Yes(true),
                    Some(record) if record.version() != version => Reply::Yes(false),
                    Some(_) => {
                        self.put(id, by);
                        Reply::Yes(true)
                    }
                }
            }
            Call::Settle(id, by, end) => self.settle(id, attempt_of(id, by, seen), end),
            Call::Renew(held, lease) => {
                for (id, by) in held {
                    if let Some(stored) = self.records.get_mut(&id)
                        && is_held(&stored.record, by)
                    {
                        stored.record.until = self.now.plus(Duration::from_millis(lease));
                    }
                }
                Reply::Nothing
            }
            Call::ExpireLeases(limit) => Reply::Count(self.due(true).len().min(limit)),
            Call::Sweep(limit) => Reply::Count(self.due(false).len().min(limit)),
            Call::Remove(id, by) => {
                let attempt = attempt_of(id, by, seen);
                let is_its = self.records.get(&id).is_some_and(|stored| stored.record.attempt == attempt);
                Reply::Yes(is_its && self.records.remove(&id).is_some())
            }
            Call::List(filter, _) => {
                let mut listed = self.listed(&filter, None);
                listed.sort_by_key(|(id, _, record)| std::cmp::Reverse((record.claimed_at, *id)));
                Reply::RecordEntry(listed)
            }
            Call::Scan(filter, after, _) => Reply::RecordEntry(self.listed(&filter, after)),
            Call::Adopt(digests, accept_change) => {
                let (origins, rules) = rules(&digests);
                Reply::Changes(self.adopt(origins, rules, accept_change))
            }
        }
    }

    /// Which of the records that are due a limit left out is the store's to choose. How many, it has said.
    pub(super) async fn learn(&mut self, call: &Call, store: &dyn Store) -> Result<(), TestCaseError> {
        let (is_lease, limit) = match call {
            Call::ExpireLeases(limit) => (true, *limit),
            Call::Sweep(limit) => (false, *limit),
            _ => return Ok(()),
        };
        let due = self.due(is_lease);
        let mut done = 0;
        for number in &due {
            let stands = store.get(id(*number)).await.expect("get works").map(|listed| listed.record.state);
            if is_lease && stands == Some(State::Unknown) {
                self.turn_unknown(*number);
                done += 1;
            } else if !is_lease && stands.is_none() {
                self.records.remove(number);
                done += 1;
            }
        }
        prop_assert_eq!(done, due.len().min(limit), "not as many are done as was said");
        Ok(())
    }

    /// Applies a restart: the attempts of the process that ended are lost, unless they may be another's.
    pub(super) fn reopen(&mut self) {
        if self.is_shared {
            return;
        }
        let lost: Vec<u8> = self.in_flight().map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.turn_unknown(id));
    }

    /// Compares all that can be seen of a store.
    pub(super) async fn compare(&self, store: &dyn Store, context: &str) -> Result<(), TestCaseError> {
        for number in 0..IDS {
            let found = store.get(id(number)).await.expect("get works");
            let found = found.map(|listed| (listed.id, listed.origin, listed.record, listed.now));
            let records = self.records.get(&number);
            let expected = records.map(|stored| (id(number), self.known(stored), stored.record.clone(), self.now));
            prop_assert_eq!(found, expected, "record {} after {}", number, context);
        }
        let all = Filter::default();
        prop_assert_eq!(chunks(store, &all, None, 100).await, self.listed(&all, None), "the list after {}", context);
        let counted =
            State::ALL.map(|state| self.records.values().filter(|stored| stored.record.state == state).count() as u64);
        prop_assert_eq!(store.count().await.expect("count works"), counted, "the counts after {}", context);
        Ok(())
    }

    fn put(&mut self, id: u8, by: ClaimSpec) {
        let NewRecord { attempt, lease, unknown_ttl, head, .. } = by.fresh();
        let (claimed_at, until) = (self.now, self.now.plus(lease));
        let record = Record { attempt, state: State::InFlight, claimed_at, until, head, answer: None };
        self.records.insert(id, StoredRecord { record, origin: origin_of(by.by), unknown_ttl });
    }

    fn settle(&mut self, id: u8, attempt: AttemptToken, end: Settlement) -> Reply {
        let Some(stored) = self.records.get_mut(&id) else {
            return if matches!(end, Settlement::Release) { Reply::Done(self.now) } else { Reply::Fenced(None) };
        };
        let record = &mut stored.record;
        let repeats = match &end {
            Settlement::Complete { answer, .. } => {
                record.state == State::Completed && record.answer.as_ref() == Some(answer)
            }
            Settlement::Hold { .. } => record.state == State::Unknown,
            Settlement::Release => false,
        };
        if record.attempt != attempt || (record.state == State::Completed && !repeats) {
            return Reply::Fenced(Some(record.clone()));
        }
        if repeats {
            return Reply::Done(record.until);
        }
        match end {
            Settlement::Complete { answer, expiry } => {
                record.until = match expiry {
                    Expiry::FromClaim(ttl) if record.claimed_at.plus(ttl) > self.now => record.claimed_at.plus(ttl),
                    Expiry::FromClaim(ttl) | Expiry::FromNow(ttl) => self.now.plus(ttl),
                };
                record.state = State::Completed;
                record.answer = Some(answer);
                Reply::Done(record.until)
            }
            Settlement::Hold { cause } => {
                record.answer = Some(cause);
                record.until = self.now.plus(stored.unknown_ttl);
                record.state = State::Unknown;
                Reply::Done(record.until)
            }
            Settlement::Release => {
                self.records.remove(&id);
                Reply::Done(self.now)
            }
        }
    }

    fn turn_unknown(&mut self, id: u8) {
        if let Some(stored) = self.records.get_mut(&id) {
            stored.record.state = State::Unknown;
            stored.record.until = self.now.plus(stored.unknown_ttl);
        }
    }

    fn in_flight(&self) -> impl Iterator<Item = (&u8, &StoredRecord)> {
        self.records.iter().filter(|(_, stored)| stored.record.state == State::InFlight)
    }

    /// The records whose lease, or else whose life, is past.
    fn due(&self, is_lease: bool) -> Vec<u8> {
        let due = self.records.iter().filter(|(_, StoredRecord { record, .. })| {
            (record.state == State::InFlight) == is_lease && self.now >= record.until
        });
        due.map(|(id, _)| *id).collect()
    }

    /// The origin of a record, if the store knows it.
    fn known(&self, stored: &StoredRecord) -> Option<Origin> {
        self.origins.contains(&stored.origin).then(|| stored.origin.clone())
    }

    fn listed(&self, filter: &Filter, after: Option<u8>) -> Vec<(RecordId, Option<Origin>, Record)> {
        let passes = |number: u8, origin: Option<&Origin>, record: &Record| {
            after.is_none_or(|after| number > after)
                && filter.state.is_none_or(|state| record.state == state)
                && filter.older_than.is_none_or(|age| self.now.since(record.claimed_at) >= age)
                && filter.prefix.is_none_or(|prefix| {
                    let digits = format!("{prefix:?}");
                    id(number).to_string().starts_with(digits.trim_end_matches('…'))
                })
                && filter.since.is_none_or(|since| match since {
                    Since::Ago(age) => self.now.since(record.claimed_at) <= age,
                    Since::At(time) => record.claimed_at >= time,
                })
                && filter.service.as_ref().is_none_or(|service| origin.is_some_and(|known| known.service == *service))
                && filter.route.as_ref().is_none_or(|route| origin.is_some_and(|known| *known.route == **route))
        };
        let all = self.records.iter().map(|(number, stored)| (*number, self.known(stored), &stored.record));
        all.filter(|(number, origin, record)| passes(*number, origin.as_ref(), record))
            .map(|(number, origin, record)| (id(number), origin, Record { answer: None, ..record.clone() }))
            .collect()
    }

    fn adopt(
        &mut self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Vec<IdentityChange> {
        let live = |identity: &NamespaceRuleSet| {
            let mut live: BTreeMap<String, LiveKeys> = BTreeMap::new();
            for stored in self.records.values() {
                let Some(Origin { service, namespace, route }) = self.known(stored) else { continue };
                let is_in_flight = stored.record.state == State::InFlight;
                if (service, namespace) != (identity.service.clone(), identity.namespace.clone())
                    || !is_in_flight && stored.record.until <= self.now
                {
                    continue;
                }
                let none = LiveKeys { route: route.clone(), keys: 0, in_flight: 0, until: None };
                let live = live.entry(route.to_string()).or_insert(none);
                live.keys += 1;
                match is_in_flight {
                    true => live.in_flight += 1,
                    false => live.until = live.until.max(Some(stored.record.until)),
                }
            }
            live.into_values().collect::<Vec<_>>()
        };
        let services = origins.iter().map(|origin| &origin.service).chain(rules.iter().map(|rule| &rule.service));
        let services: Vec<_> = services.collect();
        let is_ours = |identity: &NamespaceRuleSet| !self.is_shared || services.contains(&&identity.service);
        let gone = self.identities.iter().filter(|identity| is_ours(identity) && !rules.contains(identity));
        let mut changes: Vec<_> = gone
            .map(|identity| IdentityChange {
                service: identity.service.clone(),
                namespace: identity.namespace.clone(),
                digest: identity.digest,
                description: identity.description.clone(),
                live: live(identity),
            })
            .filter(|change| change.keys() > 0)
            .collect();
        changes.sort_by_key(|change| (change.service.clone(), change.namespace.clone()));
        if !changes.is_empty() && !accept_change {
            return changes;
        }
        let theirs: Vec<_> = self.identities.iter().filter(|identity| !is_ours(identity)).cloned().collect();
        self.origins.extend(origins);
        self.identities = [rules, theirs].concat();
        Vec::new()
    }
}

/// Whether a record is in flight under this attempt.
fn is_held(record: &Record, by: u8) -> bool {
    record.state == State::InFlight && record.attempt == attempt(by)
}
