//! What a store says, by the words of its trait alone: a plain map, and one clock.

use std::collections::BTreeMap;

use super::*;
use crate::store::{IdentityChange, LiveKeys};

/// What came back from a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Inserted(Timestamp),
    Exists(Record, Timestamp),
    Yes(bool),
    Done(Timestamp),
    Fenced(Option<Record>),
    Count(usize),
    Listed(Vec<(RecordId, Option<Origin>, Record)>),
    Changes(Vec<IdentityChange>),
    Nothing,
}

/// All that a store knows.
pub(super) struct Reference {
    pub(super) now: Timestamp,
    /// Whether services share the store, and gates.
    is_shared: bool,
    kept: BTreeMap<u8, Kept>,
    origins: Vec<Origin>,
    identities: Vec<Identity>,
}

#[derive(Clone)]
struct Kept {
    record: Record,
    origin: Origin,
    unknown_ttl: Duration,
}

impl Reference {
    pub(super) fn new(now: Timestamp, is_shared: bool) -> Self {
        Self { now, is_shared, kept: BTreeMap::new(), origins: Vec::new(), identities: Vec::new() }
    }

    /// The versions that stand.
    pub(super) fn versions(&self) -> Seen {
        let mut versions = [None; IDS as usize];
        for (id, kept) in &self.kept {
            versions[usize::from(*id)] = Some(kept.record.version());
        }
        versions
    }

    /// What a call says, and what it changes; but for what [`Reference::learn`] learns.
    pub(super) fn say(&mut self, call: &Call, seen: &Seen, stale: &Seen) -> Said {
        match call.clone() {
            Call::Claim(id, by) => match self.kept.get(&id).map(|kept| kept.record.clone()) {
                None => {
                    self.put(id, by);
                    Said::Inserted(self.now)
                }
                Some(record) if is_held(&record, by.by) => Said::Inserted(record.claimed_at),
                Some(record) => Said::Exists(record, self.now),
            },
            Call::Supersede { id, by, is_stale } => {
                let Some(version) = version_of(id, is_stale, seen, stale) else { return Said::Nothing };
                match self.kept.get(&id).map(|kept| &kept.record) {
                    None => Said::Yes(false),
                    Some(record) if is_held(record, by.by) => Said::Yes(true),
                    Some(record) if record.version() != version => Said::Yes(false),
                    Some(_) => {
                        self.put(id, by);
                        Said::Yes(true)
                    }
                }
            }
            Call::Settle(id, by, end) => self.settle(id, attempt_of(id, by, seen), end),
            Call::Renew(held, lease) => {
                for (id, by) in held {
                    if let Some(kept) = self.kept.get_mut(&id)
                        && is_held(&kept.record, by)
                    {
                        kept.record.until = self.now.plus(Duration::from_millis(lease));
                    }
                }
                Said::Nothing
            }
            Call::ExpireLeases(limit) => Said::Count(self.due(true).len().min(limit)),
            Call::Sweep(limit) => Said::Count(self.due(false).len().min(limit)),
            Call::Remove(id) => Said::Yes(self.kept.remove(&id).is_some()),
            Call::List(filter, after, _) => Said::Listed(self.listed(&filter, after)),
            Call::Adopt(digests, accept_change) => {
                let (origins, rules) = rules(&digests);
                Said::Changes(self.adopt(origins, rules, accept_change))
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
                self.kept.remove(number);
                done += 1;
            }
        }
        prop_assert_eq!(done, due.len().min(limit), "not as many are done as was said");
        Ok(())
    }

    /// What a new start does: the attempts of the process that ended are lost, unless they may be another's.
    pub(super) fn reopen(&mut self) {
        if self.is_shared {
            return;
        }
        let lost: Vec<u8> = self.in_flight().map(|(id, _)| *id).collect();
        lost.into_iter().for_each(|id| self.turn_unknown(id));
    }

    /// Compares all that can be seen of a store.
    pub(super) async fn compare(&self, store: &dyn Store, told: &str) -> Result<(), TestCaseError> {
        for number in 0..IDS {
            let found = store.get(id(number)).await.expect("get works");
            let found = found.map(|listed| (listed.id, listed.origin, listed.record, listed.now));
            let kept = self.kept.get(&number);
            let expected = kept.map(|kept| (id(number), self.known(kept), kept.record.clone(), self.now));
            prop_assert_eq!(found, expected, "record {} after {}", number, told);
        }
        let all = Filter::default();
        prop_assert_eq!(pages(store, &all, None, 100).await, self.listed(&all, None), "the list after {}", told);
        let counted =
            State::ALL.map(|state| self.kept.values().filter(|kept| kept.record.state == state).count() as u64);
        prop_assert_eq!(store.count().await.expect("count works"), counted, "the counts after {}", told);
        Ok(())
    }

    fn put(&mut self, id: u8, by: Novel) {
        let Fresh { attempt, lease, unknown_ttl, head, .. } = by.fresh();
        let (claimed_at, until) = (self.now, self.now.plus(lease));
        let record = Record { attempt, state: State::InFlight, claimed_at, until, head, answer: None };
        self.kept.insert(id, Kept { record, origin: origin_of(by.by), unknown_ttl });
    }

    fn settle(&mut self, id: u8, attempt: Attempt, end: End) -> Said {
        let Some(kept) = self.kept.get_mut(&id) else {
            return if matches!(end, End::Release) { Said::Done(self.now) } else { Said::Fenced(None) };
        };
        let record = &mut kept.record;
        let repeats = match &end {
            End::Complete { answer, .. } => record.state == State::Completed && record.answer.as_ref() == Some(answer),
            End::Hold => record.state == State::Unknown,
            End::Release => false,
        };
        if record.attempt != attempt || (record.state == State::Completed && !repeats) {
            return Said::Fenced(Some(record.clone()));
        }
        if repeats {
            return Said::Done(record.until);
        }
        match end {
            End::Complete { answer, expiry } => {
                record.until = match expiry {
                    Expiry::FromClaim(ttl) if record.claimed_at.plus(ttl) > self.now => record.claimed_at.plus(ttl),
                    Expiry::FromClaim(ttl) | Expiry::FromNow(ttl) => self.now.plus(ttl),
                };
                record.state = State::Completed;
                record.answer = Some(answer);
                Said::Done(record.until)
            }
            End::Hold => {
                record.until = self.now.plus(kept.unknown_ttl);
                record.state = State::Unknown;
                Said::Done(record.until)
            }
            End::Release => {
                self.kept.remove(&id);
                Said::Done(self.now)
            }
        }
    }

    fn turn_unknown(&mut self, id: u8) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.record.state = State::Unknown;
            kept.record.until = self.now.plus(kept.unknown_ttl);
        }
    }

    fn in_flight(&self) -> impl Iterator<Item = (&u8, &Kept)> {
        self.kept.iter().filter(|(_, kept)| kept.record.state == State::InFlight)
    }

    /// The records whose lease, or else whose life, is past.
    fn due(&self, is_lease: bool) -> Vec<u8> {
        let due = self.kept.iter().filter(|(_, Kept { record, .. })| {
            (record.state == State::InFlight) == is_lease && self.now >= record.until
        });
        due.map(|(id, _)| *id).collect()
    }

    /// Where a record comes from, if the store was told of it.
    fn known(&self, kept: &Kept) -> Option<Origin> {
        self.origins.contains(&kept.origin).then(|| kept.origin.clone())
    }

    fn listed(&self, filter: &Filter, after: Option<u8>) -> Vec<(RecordId, Option<Origin>, Record)> {
        let passes = |number: u8, origin: Option<&Origin>, record: &Record| {
            after.is_none_or(|after| number > after)
                && filter.state.is_none_or(|state| record.state == state)
                && filter.older_than.is_none_or(|age| self.now.since(record.claimed_at) >= age)
                && filter.prefix.is_none_or(|prefix| id(number).0[..8] == prefix)
                && filter.service.as_ref().is_none_or(|service| origin.is_some_and(|known| known.service == *service))
                && filter.route.as_ref().is_none_or(|route| origin.is_some_and(|known| *known.route == **route))
        };
        let all = self.kept.iter().map(|(number, kept)| (*number, self.known(kept), &kept.record));
        all.filter(|(number, origin, record)| passes(*number, origin.as_ref(), record))
            .map(|(number, origin, record)| (id(number), origin, Record { answer: None, ..record.clone() }))
            .collect()
    }

    fn adopt(&mut self, origins: Vec<Origin>, rules: Vec<Identity>, accept_change: bool) -> Vec<IdentityChange> {
        let live = |identity: &Identity| {
            let mut live: BTreeMap<String, LiveKeys> = BTreeMap::new();
            for kept in self.kept.values() {
                let Some(Origin { service, namespace, route }) = self.known(kept) else { continue };
                let is_in_flight = kept.record.state == State::InFlight;
                if (service, namespace) != (identity.service.clone(), identity.namespace.clone())
                    || !is_in_flight && kept.record.until <= self.now
                {
                    continue;
                }
                let none = LiveKeys { route: route.clone(), keys: 0, in_flight: 0, until: None };
                let live = live.entry(route.to_string()).or_insert(none);
                live.keys += 1;
                match is_in_flight {
                    true => live.in_flight += 1,
                    false => live.until = live.until.max(Some(kept.record.until)),
                }
            }
            live.into_values().collect::<Vec<_>>()
        };
        let services = origins.iter().map(|origin| &origin.service).chain(rules.iter().map(|rule| &rule.service));
        let services: Vec<_> = services.collect();
        let is_ours = |identity: &Identity| !self.is_shared || services.contains(&&identity.service);
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
