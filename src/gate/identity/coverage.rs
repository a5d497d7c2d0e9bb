//! Which requests find the records of a namespace, and which live keys other routes would no longer find.
//!
//! A store keeps the routes of each namespace beside the rules of its ids. Where a configuration has the same rules but
//! other routes, the live records tell what would be forgotten: each keeps the method and the path of its request, though
//! not the host. So a record counts as lost if there is a host with which the former routes find it and the present routes do
//! not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http::Method;

use super::{IdentityRules, describe_coverage};
use crate::idempotency::codec::{Head, is_sealed};
use crate::idempotency::description::{CoverageDescription, NamespaceDescription, RouteDescription};
use crate::idempotency::identity::RulesTag;
use crate::idempotency::policy::{Mode, Policy};
use crate::idempotency::record::{State, Timestamp};
use crate::route::{Pattern, Route, Router};
use crate::store::{NamespaceRules, Origin, RecordEntry, is_orphaned};

/// How many requests are named of those that are alike.
const EXAMPLES: usize = 3;

/// How many methods are named of them.
const METHODS: usize = 16;

/// A comparison of the routes on file with those of a configuration. Its size depends on the routes alone.
pub struct Coverage<'a> {
    service: Arc<str>,
    present: &'a Router,
    on_file: &'a [NamespaceRules],
    /// The namespaces that keep their rules and have other routes now.
    changed: BTreeMap<Arc<str>, Former>,
    lost: BTreeMap<(Arc<str>, LossReason), LostKeys>,
}

/// Live keys of a namespace that its routes would no longer find, of requests that meet the same end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostKeys {
    /// The namespace.
    pub namespace: Arc<str>,
    /// Why a retry does not find them.
    pub reason: LossReason,
    /// How many they are.
    pub keys: u64,
    /// How many of them are in flight.
    pub in_flight: u64,
    /// When the last of the others expires.
    pub until: Option<Timestamp>,
    /// Some of their requests: method and path.
    pub examples: Vec<String>,
    /// Their methods.
    pub methods: BTreeSet<String>,
    /// The former routes that found them, where these are known.
    pub former: BTreeSet<RouteDescription>,
}

impl LostKeys {
    /// Whether they are of accepted requests, whose records are found and which nothing delivers.
    #[must_use]
    pub fn are_undelivered(&self) -> bool {
        matches!(self.reason, LossReason::Undelivered(_))
    }
}

/// Why a request no longer finds its record: what becomes of it under the new configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LossReason {
    /// No route takes it.
    NoRoute,
    /// This route takes it, whose mode does not protect it.
    Unprotected(Arc<str>, Mode),
    /// This route takes it, and looks for its key in another namespace.
    Other(Arc<str>),
    /// This route accepted its request, and no route of that name and namespace is left to deliver it.
    Undelivered(Arc<str>),
    /// Its id was made with a secret that the configuration no longer has.
    OtherSecret,
    /// The record is encrypted with a key that the configuration does not have, so its request is not known.
    Sealed,
    /// The record is in a format that this version cannot read, so its request is not known.
    Unreadable,
}

/// What found the records of a namespace.
struct Former {
    /// Nothing where an earlier version of oncegate adopted the rules, which did not keep the routes.
    routes: Option<FormerRoutes>,
    /// The hosts that make a difference. Nothing is any other host.
    hosts: Vec<Option<String>>,
    /// The rules with id secrets that the configuration no longer has.
    dropped: Vec<RulesTag>,
}

struct FormerRoutes {
    /// Those of the namespace protect, and the exceptions do not.
    router: Router,
    described: Vec<RouteDescription>,
}

impl<'a> Coverage<'a> {
    /// Compares the routes on file with those of a configuration.
    #[must_use]
    pub fn of(rules: IdentityRules<'a>, on_file: &'a [NamespaceRules]) -> Self {
        let (service, present) = (Arc::clone(rules.service()), rules.router());
        let mut changed = BTreeMap::new();
        for adopting in rules.adoption().1 {
            // Where the rules change, every key of the namespace is lost, and the store counts them.
            let is_kept = |found: &&NamespaceRules| {
                found.service == service && found.namespace == adopting.namespace && adopting.finds(found.digest)
            };
            let Some(found) = on_file.iter().find(is_kept) else { continue };
            let described = found.description().and_then(|text| NamespaceDescription::parse(text));
            let former = described.and_then(|described| described.coverage);
            let dropped = found.in_force().into_iter().filter(|digest| !adopting.finds(Some(*digest)));
            let dropped: Vec<RulesTag> = dropped.map(|digest| RulesTag::of(&digest)).collect();
            if !dropped.is_empty() || former.as_ref() != Some(&describe_coverage(present, &adopting.namespace)) {
                changed.insert(adopting.namespace, Former::of(former.as_ref(), present, dropped));
            }
        }
        Self { service, present, on_file, changed, lost: BTreeMap::new() }
    }

    /// Whether the records must be looked at.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Looks at a record, or at an accepted request as [`crate::store::deliveries::Delivery::as_listed`] shows it.
    pub fn look_at(&mut self, listed: &RecordEntry, is_accepted: bool) {
        let Some(origin) = listed.origin.as_ref().filter(|origin| origin.service == self.service) else { return };
        let Some((namespace, former)) = self.changed.get_key_value(&origin.namespace).filter(|_| listed.is_live())
        else {
            return;
        };
        let (claimed_at, head) = (listed.record.claimed_at, Head::decode(&listed.record.head));
        let tag = head.as_ref().ok().and_then(|head| head.details().rules);
        // No request finds it, whatever the routes are.
        if is_orphaned(self.on_file, origin, claimed_at, tag) {
            return;
        }
        let rules = self.on_file.iter().find(|rules| rules.service == origin.service && rules.namespace == *namespace);
        let made_by = rules.and_then(|rules| rules.made_by(claimed_at, tag));
        let is_dropped = made_by.is_some_and(|tag| former.dropped.contains(&tag));
        let (example, method, (reason, found_by)) = match head {
            Ok(head) if is_dropped => {
                (Some(format!("{} {}", head.method, head.path)), None, (LossReason::OtherSecret, None))
            }
            Ok(head) => {
                let is_queued = is_accepted && listed.record.state == State::InFlight;
                let undelivered = (is_queued && !self.delivers(origin))
                    .then(|| (LossReason::Undelivered(Arc::clone(&origin.route)), None));
                let Some(lost) = self.end_of(namespace, former, &head).or(undelivered) else { return };
                (Some(format!("{} {}", head.method, head.path)), Some(head.method.to_string()), lost)
            }
            Err(_) if is_sealed(&listed.record.head) => (None, None, (LossReason::Sealed, None)),
            Err(_) => (None, None, (LossReason::Unreadable, None)),
        };
        let lost = self.lost.entry((Arc::clone(namespace), reason.clone())).or_insert_with(|| LostKeys {
            namespace: Arc::clone(namespace),
            reason,
            keys: 0,
            in_flight: 0,
            until: None,
            examples: Vec::new(),
            methods: BTreeSet::new(),
            former: BTreeSet::new(),
        });
        lost.keys += 1;
        match listed.record.state {
            State::InFlight => lost.in_flight += 1,
            State::Completed | State::Unknown => lost.until = lost.until.max(Some(listed.record.until)),
        }
        if let Some(example) =
            example.filter(|example| lost.examples.len() < EXAMPLES && !lost.examples.contains(example))
        {
            lost.examples.push(example);
        }
        lost.methods.extend(method.filter(|_| lost.methods.len() < METHODS));
        lost.former.extend(found_by);
    }

    /// What would be forgotten of the records that were looked at.
    #[must_use]
    pub fn finish(self) -> Vec<LostKeys> {
        self.lost.into_values().collect()
    }

    /// Whether a route delivers what a former one of this name has accepted.
    fn delivers(&self, origin: &Origin) -> bool {
        let is_same = |route: &Arc<Route>| route.name == origin.route && route.namespace == origin.namespace;
        self.present.routes().iter().any(|route| is_same(route) && route.policy.mode.protects())
    }

    /// What would become of a request whose key would be lost, and the former route that found it.
    fn end_of(&self, namespace: &str, former: &Former, head: &Head) -> Option<(LossReason, Option<RouteDescription>)> {
        let Head { method, path, .. } = head;
        let reason = |host: &Option<String>| self.reason(namespace, method, host.as_deref(), head);
        let Some(FormerRoutes { router, described }) = &former.routes else {
            // It is not known with which of the hosts the request came.
            let mut ends: Vec<Option<LossReason>> = former.hosts.iter().map(reason).collect();
            return ends.swap_remove(0).filter(|_| ends.iter().all(Option::is_some)).map(|reason| (reason, None));
        };
        former.hosts.iter().find_map(|host| {
            let found_by = router.find(method, host.as_deref(), path);
            let found_by = found_by.filter(|route| route.policy.mode.protects());
            // Of a path that was cut it is not known whether a former route found it: it counts as if one did.
            if found_by.is_none() && !head.is_path_cut() {
                return None;
            }
            let found_by = found_by.and_then(|found| described.iter().find(|route| *route.name == *found.name));
            reason(host).map(|reason| (reason, found_by.cloned()))
        })
    }

    /// What becomes of a request that the routes of the namespace do not take; nothing where one takes it, or where the
    /// request is refused.
    fn reason(&self, namespace: &str, method: &Method, host: Option<&str>, head: &Head) -> Option<LossReason> {
        match self.present.choose(method, host, &head.path) {
            // What follows a path that was cut may make it another.
            Err(_) if head.is_path_cut() => Some(LossReason::NoRoute),
            Err(_) => None,
            Ok(None) => Some(LossReason::NoRoute),
            Ok(Some(route)) if !route.policy.mode.protects() => {
                Some(LossReason::Unprotected(Arc::clone(&route.name), route.policy.mode))
            }
            // What follows a path that was cut may belong to another route, except under one that takes whatever follows.
            Ok(Some(route)) if *route.namespace == *namespace && (!head.is_path_cut() || route.path.is_open()) => None,
            Ok(Some(route)) if *route.namespace == *namespace => Some(LossReason::NoRoute),
            Ok(Some(route)) => Some(LossReason::Other(Arc::clone(&route.name))),
        }
    }
}

impl Former {
    fn of(described: Option<&CoverageDescription>, present: &Router, dropped: Vec<RulesTag>) -> Self {
        let routes = described.and_then(FormerRoutes::of);
        let own = routes.iter().flat_map(|former| &former.described).map(|route| route.host.clone());
        let mut hosts: BTreeSet<Option<String>> = own.collect();
        if hosts.is_empty() || hosts.contains(&None) {
            hosts.insert(None);
            hosts.extend(present.routes().iter().map(|route| route.host.clone()));
            hosts.extend(described.iter().flat_map(|former| &former.except).map(|route| route.host.clone()));
        }
        Self { routes, hosts: hosts.into_iter().collect(), dropped }
    }
}

impl FormerRoutes {
    /// Nothing where a later version wrote what this one cannot read.
    fn of(described: &CoverageDescription) -> Option<Self> {
        let own = described.routes.iter().map(|route| read_route(route, Mode::Protect));
        let others = described.except.iter().map(|route| read_route(route, Mode::Pass));
        let router = Router::new(own.chain(others).collect::<Option<_>>()?).ok()?;
        Some(Self { router, described: described.routes.clone() })
    }
}

fn read_route(described: &RouteDescription, mode: Mode) -> Option<Route> {
    let name: Arc<str> = described.name.as_str().into();
    let methods: Option<_> =
        described.methods.iter().map(|method| Method::from_bytes(method.as_bytes()).ok()).collect();
    Some(Route {
        namespace: Arc::clone(&name),
        name,
        methods: methods?,
        host: described.host.clone(),
        path: Pattern::parse(&described.path).ok()?,
        upstream: 0,
        policy: Policy { mode, ..Policy::default() },
    })
}

#[cfg(test)]
mod tests;
