//! What a configuration makes the identities of its records by.

pub mod coverage;
pub(super) mod newer_rules;

use std::collections::HashSet;
use std::sync::Arc;

use super::rules_in_force::RulesDigest;
use super::{Gate, Settings};
use crate::idempotency::description::{CoverageDescription, NamespaceDescription, RouteDescription, RulesDescription};
use crate::idempotency::fingerprint::Recipe;
use crate::idempotency::identity::{CallerRules, RecordIdHasher};
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Mode, Policy, Seal};
use crate::idempotency::record::RecordId;
use crate::idempotency::scope::ScopePart;
use crate::route::{Route, Router};
use crate::store::{IdentityChange, NamespaceRuleSet, Origin, OriginId};

/// The scope of a route that named none, in versions of oncegate that kept no descriptions of rules.
const FORMER_DEFAULT_SCOPE: [&str; 3] = ["host", "header:authorization", "header:x-api-key"];

impl Gate {
    /// The origins of this gate's records, and the rules of their identities: for [`crate::store::Store::adopt`] before it serves.
    #[must_use]
    pub fn identities(&self) -> (Vec<Origin>, Vec<NamespaceRuleSet>) {
        self.identity_rules().adoption()
    }

    /// The origins of records that must be encrypted.
    #[must_use]
    pub fn sealed_origins(&self) -> HashSet<OriginId> {
        self.identity_rules().sealed_origins()
    }

    /// What the identities of its records are made by.
    #[must_use]
    pub fn identity_rules(&self) -> IdentityRules<'_> {
        IdentityRules::of(&self.settings, &self.router)
    }
}

/// The rules of a configuration's identities.
#[derive(Clone, Copy)]
pub struct IdentityRules<'a> {
    settings: &'a Settings,
    router: &'a Router,
}

impl<'a> IdentityRules<'a> {
    /// Those of a configuration.
    #[must_use]
    pub fn of(settings: &'a Settings, router: &'a Router) -> Self {
        Self { settings, router }
    }

    /// The service whose records they are.
    #[must_use]
    pub fn service(&self) -> &'a Arc<str> {
        &self.settings.service
    }

    /// All routes.
    #[must_use]
    pub fn router(&self) -> &'a Router {
        self.router
    }

    /// Index of the upstream for what matches no route.
    #[must_use]
    pub fn default_upstream(&self) -> Option<usize> {
        self.settings.default_upstream
    }

    /// The origins of records that must be encrypted. Routes of one namespace find the same records, so that one of them is
    /// enough.
    #[must_use]
    pub fn sealed_origins(&self) -> HashSet<OriginId> {
        let routes = self.router.routes();
        let demand = |namespace: &str| {
            routes.iter().any(|route| route.policy.seal == Seal::Required && *route.namespace == *namespace)
        };
        routes
            .iter()
            .filter(|route| demand(&route.namespace))
            .map(|route| origin(&self.settings.service, &route.namespace, &route.name).id())
            .collect()
    }

    /// The routes that make records, each with its rules.
    pub fn routes(&self) -> impl Iterator<Item = (&'a Arc<Route>, RulesDescription)> {
        let (trusted, id_secret) = (self.settings.forwarding.rule(), self.settings.id_secret.is_some());
        let token_header = self.settings.token_header();
        // A route that does not protect makes no records, whatever rules it would make them by.
        let protecting = self.router.routes().iter().filter(|route| route.policy.mode.protects());
        protecting.map(move |route| {
            let Policy { scope, key, fingerprint, .. } = &route.policy;
            let callers = CallerRules { trusted: &trusted, token_header };
            (route, RulesDescription::of(scope, key, fingerprint, callers, id_secret))
        })
    }

    /// The origins of the records, and the rules of their identities: for [`crate::store::Store::adopt`].
    #[must_use]
    pub fn adoption(&self) -> (Vec<Origin>, Vec<NamespaceRuleSet>) {
        let service = self.service();
        let origin_of = |route: &Arc<Route>| {
            let origin = origin(service, &route.namespace, &route.name);
            if route.policy.mode == Mode::Observe { origin.shadow() } else { origin }
        };
        let origins = self.router.routes().iter().map(origin_of).collect();
        let (identifiers, trusted) = (self.settings.identifiers(), self.settings.forwarding.rule());
        let callers = CallerRules { trusted: &trusted, token_header: self.settings.token_header() };
        let mut identities: Vec<NamespaceRuleSet> = Vec::new();
        for (route, rules) in self.routes() {
            // Routes that share a namespace share its rules; the configuration sees to that.
            if !identities.iter().any(|known| known.namespace == route.namespace) {
                let coverage = Some(describe_coverage(self.router, &route.namespace));
                let digests = identifiers.others.iter().map(|identifier| digest(identifier, route, callers));
                let digests: Vec<RulesDigest> = digests.collect();
                let others = digests.iter().map(|digest| RecordId(*digest).to_string()).collect();
                identities.push(NamespaceRuleSet {
                    service: Arc::clone(service),
                    namespace: Arc::clone(&route.namespace),
                    digest: digest(&identifiers.first, route, callers),
                    others: digests,
                    description: Some(NamespaceDescription { rules, coverage, others }.to_text().into()),
                });
            }
        }
        (origins, identities)
    }

    /// The rules that a change gives up: as they are described, or else those among the usual ones that have their digest.
    #[must_use]
    pub fn former(&self, change: &IdentityChange) -> Former {
        match change.description.as_deref().and_then(NamespaceDescription::parse) {
            Some(described) => Former::Described(described.rules),
            None => self.recognised(change).map_or(Former::Unknown, Former::Recognised),
        }
    }

    /// Tries what an earlier version made identities by if its configuration was like this one: with the default scope of
    /// that time or what is in this configuration, in any combination.
    fn recognised(&self, change: &IdentityChange) -> Option<RulesDescription> {
        let policy = Policy::default();
        let former: Option<Vec<_>> = FORMER_DEFAULT_SCOPE.iter().map(|word| ScopePart::parse(word).ok()).collect();
        let policies: Vec<&Policy> = self.router.routes().iter().map(|route| &route.policy).collect();
        let policies = || policies.iter().copied().chain([&policy]);
        let scopes: Vec<&[ScopePart]> =
            distinct(former.iter().map(Vec::as_slice).chain(policies().map(|policy| &policy.scope[..])));
        let (rules, recipes) =
            (distinct(policies().map(|policy| &policy.key)), distinct(policies().map(|policy| &policy.fingerprint)));
        // A recipe counts only where the key may be a fingerprint.
        let recipes_of = |rule: &KeyRule| match rule.from.contains(&KeySource::Fingerprint) {
            true => &recipes[..],
            false => &recipes[..1],
        };
        let keys: Vec<(&KeyRule, &Recipe)> =
            rules.iter().flat_map(|rule| recipes_of(rule).iter().map(|recipe| (*rule, *recipe))).collect();
        let trusted = [self.settings.forwarding.rule(), String::new()];
        let own = Settings { service: Arc::clone(&change.service), ..self.settings.clone() };
        let without = Settings { id_secret: None, ..own.clone() };
        for settings in [own, without] {
            let identifier = settings.identifiers().first;
            for (scope, (key, recipe), trusted) in combined(&scopes, &keys, &trusted) {
                if identifier.rules_digest(&change.namespace, scope, key, recipe, trusted) == change.digest {
                    let has_secret = settings.id_secret.is_some();
                    return Some(RulesDescription::of(scope, key, recipe, trusted, has_secret));
                }
            }
        }
        None
    }
}

/// The former rules, as far as they are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Former {
    /// The store has their description.
    Described(RulesDescription),
    /// An earlier version adopted them, which kept none; their digest is that of these.
    Recognised(RulesDescription),
    /// An earlier version adopted them, and their digest is of none that could be thought of.
    Unknown,
}

/// The requests that find the records of a namespace.
pub(super) fn describe_coverage(router: &Router, namespace: &str) -> CoverageDescription {
    let is_own = |route: &&Arc<Route>| *route.namespace == *namespace && route.policy.mode.protects();
    let own: Vec<&Arc<Route>> = router.routes().iter().filter(is_own).collect();
    let others = router.routes().iter().filter(|route| !is_own(route));
    let except = others.filter(|other| own.iter().any(|own| other.takes_from(own)));
    let mut described = CoverageDescription {
        routes: own.iter().map(|route| describe_route(route)).collect(),
        except: except.map(describe_route).collect(),
    };
    // Their order never matters.
    described.routes.sort();
    described.except.sort();
    described
}

fn describe_route(route: &Arc<Route>) -> RouteDescription {
    let mut methods: Vec<String> = route.methods.iter().map(ToString::to_string).collect();
    methods.sort();
    let (name, host, path) = (route.name.to_string(), route.host.clone(), route.path.to_string());
    RouteDescription { name, methods, host, path }
}

pub(super) fn origin(service: &Arc<str>, namespace: &Arc<str>, route: &Arc<str>) -> Origin {
    Origin { service: Arc::clone(service), namespace: Arc::clone(namespace), route: Arc::clone(route) }
}

/// The digest of the rules of a route.
pub(super) fn digest(identifier: &RecordIdHasher, route: &Route, callers: CallerRules<'_>) -> RulesDigest {
    let policy = &route.policy;
    identifier.rules_digest(&route.namespace, &policy.scope, &policy.key, &policy.fingerprint, callers)
}

/// Each once, in the order in which they come.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut known, one| {
        if !known.contains(&one) {
            known.push(one);
        }
        known
    })
}

fn combined<'a, A: Copy, B: Copy>(
    ones: &'a [A],
    others: &'a [B],
    thirds: &'a [String],
) -> impl Iterator<Item = (A, B, &'a str)> {
    ones.iter().flat_map(move |one| {
        others.iter().flat_map(move |other| thirds.iter().map(move |third| (*one, *other, third.as_str())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::{gate_of, route};

    fn change(namespace: &str, digest: [u8; 32], description: Option<&str>) -> IdentityChange {
        IdentityChange {
            service: "default".into(),
            namespace: namespace.into(),
            digest,
            description: description.map(Arc::from),
            live: Vec::new(),
        }
    }

    /// The digest of the rules that versions without descriptions had by default.
    fn former_default(namespace: &str, secret: Option<&[u8]>) -> [u8; 32] {
        let Policy { key, fingerprint, .. } = Policy::default();
        let scope = FORMER_DEFAULT_SCOPE.map(|word| ScopePart::parse(word).unwrap());
        let identifier = RecordIdHasher::new("default".into(), secret.map(Arc::from));
        identifier.rules_digest(namespace, &scope, &key, &fingerprint, "")
    }

    #[test]
    fn rules_of_earlier_versions_are_recognised_by_their_digest() {
        let gate = gate_of(vec![route("charges", Mode::Protect, "client-ip")]);
        let rules = gate.identity_rules();
        let scope = |former| match former {
            Former::Recognised(found) => found.scope,
            other => panic!("{other:?}"),
        };
        let found = rules.former(&change("default", former_default("default", None), None));
        assert_eq!(scope(found), FORMER_DEFAULT_SCOPE);
        // Its own, under another name.
        let Policy { key, fingerprint, .. } = Policy::default();
        let identifier = RecordIdHasher::new("default".into(), None);
        let renamed = identifier.rules_digest("payments", &[ScopePart::ClientIp], &key, &fingerprint, "");
        assert_eq!(scope(rules.former(&change("payments", renamed, None))), ["client-ip"]);
        assert_eq!(rules.former(&change("default", [7; 32], None)), Former::Unknown);
        let secret = former_default("default", Some(b"not this one's"));
        assert_eq!(rules.former(&change("default", secret, None)), Former::Unknown);
    }

    #[test]
    fn a_description_is_believed() {
        let gate = gate_of(vec![route("charges", Mode::Protect, "client-ip")]);
        let (_, identities) = gate.identity_rules().adoption();
        let text = identities[0].description.as_deref();
        let Former::Described(found) = gate.identity_rules().former(&change("charges", [7; 32], text)) else {
            panic!("it is described");
        };
        assert_eq!(found.scope, ["client-ip"]);
    }
}
