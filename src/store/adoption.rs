//! The rules of identities that a store keeps, and the effect of adopting others: written once, for every store.
//!
//! Two things are on file. The *identities* are the digests that the last start adopted, one for each namespace. The
//! *periods* are the rules that held before, each with the time from which on it did and its description. Periods are
//! never removed: they tell which rules a record was claimed by, also after its namespace has gone and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{IdentityChange, LiveKeys, NamespaceRuleSet, Origin};
use crate::idempotency::description::NamespaceDescription;
use crate::idempotency::identity::RulesTag;
use crate::idempotency::record::{Record, State, Timestamp};

/// The rules of one namespace, as a store has them on file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceRules {
    /// Its service.
    pub service: Arc<str>,
    /// The namespace.
    pub namespace: Arc<str>,
    /// The digest that the last start adopted; `None` if that start did not have this namespace.
    pub digest: Option<[u8; 32]>,
    /// The rules that held, in the order of time. An earlier version of oncegate kept none.
    pub periods: Vec<RulesPeriod>,
}

/// Rules that held from some time on, until the next ones did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesPeriod {
    /// From when on, by the store's clock; 0 is for ever.
    pub since: Timestamp,
    /// Their digest.
    pub digest: [u8; 32],
    /// See [`NamespaceRuleSet::description`].
    pub description: Option<Arc<str>>,
}

/// A period of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamespacePeriod {
    pub(super) service: Arc<str>,
    pub(super) namespace: Arc<str>,
    pub(super) period: RulesPeriod,
}

impl NamespaceRules {
    /// The description of the rules that are on file now.
    #[must_use]
    pub fn description(&self) -> Option<&Arc<str>> {
        self.periods.iter().rev().find(|period| Some(period.digest) == self.digest)?.description.as_ref()
    }

    /// The digests of the rules by which requests look for records: those that make new ids, and those with another id
    /// secret.
    #[must_use]
    pub fn in_force(&self) -> Vec<[u8; 32]> {
        let described = self.description().and_then(|text| NamespaceDescription::parse(text));
        let others = described.into_iter().flat_map(|described| described.other_digests());
        self.digest.into_iter().chain(others).collect()
    }

    /// The rules by which a record was made: as its head says, or else those that held when it was claimed.
    #[must_use]
    pub fn made_by(&self, claimed_at: Timestamp, head: Option<RulesTag>) -> Option<RulesTag> {
        let then = || self.periods.iter().rev().find(|period| period.since <= claimed_at);
        head.or_else(|| then().map(|period| RulesTag::of(&period.digest)))
    }

    /// Whether a record is out of reach of all requests, because the rules have changed since.
    fn is_orphaned(&self, claimed_at: Timestamp, head: Option<RulesTag>) -> bool {
        match self.made_by(claimed_at, head) {
            _ if self.digest.is_none() => true,
            Some(tag) => !self.in_force().iter().any(|digest| RulesTag::of(digest) == tag),
            None => false,
        }
    }

    /// Whether gates with these rules and gates with the rules on file find each other's records.
    #[must_use]
    pub fn goes_with(&self, rule: &NamespaceRuleSet) -> bool {
        self.is_for(rule) && rule.finds(self.digest) && self.in_force().contains(&rule.digest)
    }

    /// Whether they are of the same namespace of the same service.
    #[must_use]
    pub fn is_for(&self, rule: &NamespaceRuleSet) -> bool {
        self.service == rule.service && self.namespace == rule.namespace
    }
}

impl NamespaceRuleSet {
    /// Those on file; nothing where the last start did not have this namespace.
    #[must_use]
    pub fn on_file(found: &NamespaceRules) -> Option<Self> {
        Some(Self {
            service: Arc::clone(&found.service),
            namespace: Arc::clone(&found.namespace),
            digest: found.digest?,
            others: Vec::new(),
            description: found.description().cloned(),
        })
    }

    /// Whether records that rules of this digest made are found.
    #[must_use]
    pub fn finds(&self, digest: Option<[u8; 32]>) -> bool {
        digest.is_some_and(|digest| self.digest == digest || self.others.contains(&digest))
    }
}

impl LiveKeys {
    /// None of a route yet.
    #[must_use]
    pub fn of(route: &Arc<str>) -> Self {
        Self { route: Arc::clone(route), keys: 0, in_flight: 0, until: None }
    }

    /// Counts one more.
    pub fn add(&mut self, record: &Record) {
        self.keys += 1;
        match record.state {
            State::InFlight => self.in_flight += 1,
            State::Completed | State::Unknown => self.until = self.until.max(Some(record.until)),
        }
    }
}

/// Whether a record of this origin that was claimed at this time is out of reach of all requests: its namespace is
/// not among the rules on file, or has other rules now. `head` is what its head says of the rules that made it.
#[must_use]
pub fn is_orphaned(on_file: &[NamespaceRules], origin: &Origin, claimed_at: Timestamp, head: Option<RulesTag>) -> bool {
    let rules = on_file.iter().find(|rules| rules.service == origin.service && rules.namespace == origin.namespace);
    rules.is_none_or(|rules| rules.is_orphaned(claimed_at, head))
}

/// Combines the rules on file, in the order of service and namespace.
pub(super) fn on_file(
    identities: impl IntoIterator<Item = (Arc<str>, Arc<str>, [u8; 32])>,
    periods: impl IntoIterator<Item = NamespacePeriod>,
) -> Vec<NamespaceRules> {
    let mut all: BTreeMap<(Arc<str>, Arc<str>), NamespaceRules> = BTreeMap::new();
    let mut entry = |service: Arc<str>, namespace: Arc<str>, change: &mut dyn FnMut(&mut NamespaceRules)| {
        let rules = all.entry((Arc::clone(&service), Arc::clone(&namespace)));
        change(rules.or_insert(NamespaceRules { service, namespace, digest: None, periods: Vec::new() }));
    };
    for (service, namespace, digest) in identities {
        entry(service, namespace, &mut |rules| rules.digest = Some(digest));
    }
    for NamespacePeriod { service, namespace, period } in periods {
        entry(service, namespace, &mut |rules| rules.periods.push(period.clone()));
    }
    all.into_values()
        .map(|mut rules| {
            rules.periods.sort_by_key(|period| period.since);
            rules
        })
        .collect()
}

/// The services that a call is about, where services share a store. Shadow records have no rules, and the records of their
/// service do: a gate that only observes forgets these.
pub(super) fn services<'a>(origins: &'a [Origin], rules: &'a [NamespaceRuleSet]) -> BTreeSet<&'a str> {
    let services = origins.iter().map(Origin::gate_service);
    services.chain(rules.iter().map(|rule| &*rule.service)).collect()
}

/// The rules on file that are not among `rules`.
pub(super) fn stale(on_file: &[NamespaceRules], rules: &[NamespaceRuleSet]) -> Vec<NamespaceRules> {
    let is_known =
        |found: &NamespaceRules| rules.iter().any(|rule| found.is_for(rule) && found.digest == Some(rule.digest));
    on_file.iter().filter(|found| found.digest.is_some() && !is_known(found)).cloned().collect()
}

/// Those of them whose records `rules` would not find.
pub(super) fn forgotten(on_file: &[NamespaceRules], rules: &[NamespaceRuleSet]) -> Vec<NamespaceRules> {
    let mut stale = stale(on_file, rules);
    stale.retain(|found| !rules.iter().any(|rule| found.is_for(rule) && rule.finds(found.digest)));
    stale
}

/// The records that giving up `stale` would forget, if it has live ones.
pub(super) fn change(stale: &NamespaceRules, mut live: Vec<LiveKeys>) -> Option<IdentityChange> {
    live.retain(|live| live.keys > 0);
    live.sort_by(|one, other| one.route.cmp(&other.route));
    let digest = stale.digest.filter(|_| !live.is_empty())?;
    Some(IdentityChange {
        service: Arc::clone(&stale.service),
        namespace: Arc::clone(&stale.namespace),
        digest,
        description: stale.description().cloned(),
        live,
    })
}

/// The periods to write where `rules` are adopted at `now`, in order; each takes the place of one that began at the same
/// time. None where nothing changes.
pub(super) fn new_periods(
    on_file: &[NamespaceRules],
    rules: &[NamespaceRuleSet],
    now: Timestamp,
) -> Vec<NamespacePeriod> {
    let mut new = Vec::new();
    let mut write = |service: &Arc<str>, namespace: &Arc<str>, period: RulesPeriod| {
        let (service, namespace) = (Arc::clone(service), Arc::clone(namespace));
        new.push(NamespacePeriod { service, namespace, period });
    };
    let begin = |last: Option<&RulesPeriod>| if last.is_some() { now } else { Timestamp(0) };
    // Rules adopted by an earlier version of oncegate, which writes no periods.
    let unwritten = |found: &NamespaceRules| {
        let digest = found.digest.filter(|digest| found.periods.last().is_none_or(|last| last.digest != *digest))?;
        Some(RulesPeriod { since: begin(found.periods.last()), digest, description: None })
    };
    for found in on_file {
        let is_kept = |rule: &NamespaceRuleSet| found.is_for(rule) && found.digest == Some(rule.digest);
        if !rules.iter().any(is_kept)
            && let Some(period) = unwritten(found)
        {
            write(&found.service, &found.namespace, period);
        }
    }
    for rule in rules {
        let found = on_file.iter().find(|found| found.is_for(rule));
        let unwritten = found.and_then(unwritten);
        let last = unwritten.as_ref().or_else(|| found?.periods.last());
        let since = match last {
            Some(last) if last.digest == rule.digest && last.description == rule.description => continue,
            Some(last) if last.digest == rule.digest => last.since,
            last => begin(last),
        };
        let period = RulesPeriod { since, digest: rule.digest, description: rule.description.clone() };
        write(&rule.service, &rule.namespace, period);
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(digest: u8) -> NamespaceRuleSet {
        let description = Some(format!("rules {digest}").into());
        let (service, namespace) = ("shop".into(), "charges".into());
        NamespaceRuleSet { service, namespace, digest: [digest; 32], others: Vec::new(), description }
    }

    fn origin() -> Origin {
        Origin { service: "shop".into(), namespace: "charges".into(), route: "r".into() }
    }

    /// A store that adopts whatever it is given, one time after another.
    #[derive(Default)]
    struct File {
        digest: Option<u8>,
        periods: Vec<NamespacePeriod>,
    }

    impl File {
        fn on_file(&self) -> Vec<NamespaceRules> {
            let rule = rule(0);
            let identity = self.digest.map(|digest| (rule.service, rule.namespace, [digest; 32]));
            on_file(identity, self.periods.clone())
        }

        /// `None`: the namespace is removed.
        fn adopt(&mut self, digest: Option<u8>, now: u64) {
            let rules: Vec<NamespaceRuleSet> = digest.map(rule).into_iter().collect();
            for new in new_periods(&self.on_file(), &rules, Timestamp(now)) {
                self.periods.retain(|known| known.period.since != new.period.since);
                self.periods.push(new);
            }
            self.digest = digest;
        }

        /// Of records that were claimed at these times.
        fn orphans<const N: usize>(&self, claimed_at: [u64; N]) -> [bool; N] {
            claimed_at.map(|at| is_orphaned(&self.on_file(), &origin(), Timestamp(at), None))
        }
    }

    #[test]
    fn a_record_is_orphaned_while_other_rules_hold_than_those_of_its_claim() {
        let mut file = File::default();
        assert_eq!(file.orphans([5]), [true], "nothing asks for it");
        file.adopt(Some(1), 10);
        assert_eq!(file.orphans([5, 10, 15]), [false; 3]);
        file.adopt(Some(2), 20);
        assert_eq!(file.orphans([5, 19, 20, 25]), [true, true, false, false]);
        file.adopt(Some(1), 30);
        assert_eq!(file.orphans([5, 19, 20, 29, 30]), [false, false, true, true, false]);
        file.adopt(None, 40);
        assert_eq!(file.orphans([5, 25, 35]), [true; 3]);
        file.adopt(Some(1), 50);
        assert_eq!(file.orphans([5, 25, 35, 55]), [false, true, false, false]);
    }

    #[test]
    fn what_an_earlier_version_adopted_held_from_the_beginning() {
        let mut file = File { digest: Some(1), ..File::default() };
        assert_eq!(file.orphans([5]), [false]);
        assert_eq!(file.on_file()[0].description(), None);
        file.adopt(Some(1), 10);
        assert_eq!((file.orphans([5, 15]), file.periods.len()), ([false; 2], 1));
        assert_eq!(file.on_file()[0].description().map(|text| &**text), Some("rules 1"));
        for next in [Some(2), None] {
            let mut file = File { digest: Some(1), ..File::default() };
            file.adopt(next, 10);
            assert_eq!(file.orphans([5, 15]), [true, next.is_none()]);
            file.adopt(Some(1), 20);
            assert_eq!(file.orphans([5, 15]), [false, next.is_some()]);
        }
        // It runs beside, and changes what this version wrote.
        let mut file = File::default();
        file.adopt(Some(1), 10);
        file.digest = Some(2);
        file.adopt(Some(2), 20);
        assert_eq!(file.orphans([5, 25]), [true, false]);
    }

    #[test]
    fn nothing_is_written_where_nothing_changes() {
        let mut file = File::default();
        file.adopt(Some(1), 10);
        assert_eq!(new_periods(&file.on_file(), &[rule(1)], Timestamp(20)), []);
        assert_eq!(stale(&file.on_file(), &[rule(1)]), []);
        assert_eq!(stale(&file.on_file(), &[rule(2)]), file.on_file());
        // Another description of the same rules takes its place.
        let other = NamespaceRuleSet { description: Some("in other words".into()), ..rule(1) };
        assert_eq!(stale(&file.on_file(), std::slice::from_ref(&other)), []);
        let new = new_periods(&file.on_file(), &[other], Timestamp(20));
        assert_eq!((new.len(), new[0].period.since), (1, Timestamp(0)));
    }
}
