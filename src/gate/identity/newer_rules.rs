//! Gates of one store must find keys by the same rules. A start sees to that for what is recorded. This sees to it for what
//! a gate that goes on is about to record: where another gate has put other rules on file, this one claims nothing by its own.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::IdentityRules;
use crate::gate::Gate;
use crate::idempotency::record::Timestamp;
use crate::store::{NamespaceRuleSet, NamespaceRules};
use crate::telemetry::metrics::Metrics;

/// How often to look.
const LOOK: Duration = Duration::from_millis(500);

/// How long the store has for its answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// For how long rules count as just replaced: clocks may differ.
const YOUNG: Duration = Duration::from_secs(60);

/// How long after other rules are on file the gates know of them that have the former ones, where the store answers their looks
/// without delay.
pub const KNOWN_AFTER: Duration = Duration::from_secs(2);

/// Compares the rules of the current gate with those on file from time to time, and lets it claim nothing by rules that
/// another gate has replaced. Never returns.
pub async fn follow_rules(current: impl Fn() -> Arc<Gate>, metrics: Metrics) {
    // A gate's rules never change, and are work to make.
    let mut known: Option<(Arc<Gate>, Vec<NamespaceRuleSet>)> = None;
    loop {
        sleep(LOOK).await;
        let gate = current();
        let (gate, own) = match known.take().filter(|(known, _)| Arc::ptr_eq(known, &gate)) {
            Some(known) => known,
            None => (Arc::clone(&gate), gate.identities().1),
        };
        gate.look_at_rules(&own, &metrics).await;
        known = Some((gate, own));
    }
}

impl Gate {
    /// `own` are the rules of this gate.
    async fn look_at_rules(&self, own: &[NamespaceRuleSet], metrics: &Metrics) {
        // It goes by the last answer until there is another.
        let Ok(Ok(on_file)) = timeout(PATIENCE, self.shared.store.identities()).await else { return };
        // What a reload puts on file is this process's own.
        if self.is_newest() {
            let on_file: Vec<&NamespaceRules> = of_service(&on_file, &self.settings.service).collect();
            self.claim_nothing_by(&replaced(own, &on_file), &on_file, metrics);
        }
    }

    /// Whether requests come to this gate, and no reload is under way.
    pub(in crate::gate) fn is_newest(&self) -> bool {
        match &self.shared.newest.load()[..] {
            [] => true,
            [newest] => Arc::ptr_eq(newest, &self.router),
            _ => false,
        }
    }

    fn claim_nothing_by(&self, replaced: &[&NamespaceRuleSet], on_file: &[&NamespaceRules], metrics: &Metrics) {
        metrics.rules_replaced(replaced.len());
        let digests: Vec<_> = replaced.iter().map(|rules| rules.digest).collect();
        let before = self.shared.replaced.load_full();
        if *before == digests {
            return;
        }
        self.shared.replaced.store(Arc::new(digests));
        if replaced.is_empty() {
            tracing::info!("the rules of keys of this gate are on file again: its routes take requests again");
            return;
        }
        for rules in replaced.iter().filter(|rules| !before.contains(&rules.digest)) {
            let namespace = &rules.namespace;
            let is_gone = on_file.iter().all(|found| found.namespace != *namespace);
            let what = if is_gone { "no longer has this namespace" } else { "has other rules for this namespace" };
            tracing::error!(
                service = %rules.service,
                %namespace,
                "another gate of this store {what}: requests of this namespace get 503 here, because both gates could run the \
                 same request. Start all gates of a service with the same routes and rules of keys, or give another application \
                 its own `store.service`"
            );
        }
    }
}

/// The rules of a service that are on file now.
fn of_service<'a>(on_file: &'a [NamespaceRules], service: &str) -> impl Iterator<Item = &'a NamespaceRules> {
    on_file.iter().filter(move |found| found.digest.is_some() && *found.service == *service)
}

/// Those of a gate's own rules that others on file have replaced: gates with the one would not find what gates with the other
/// record. None where everything on file goes with the own ones, and another gate has fewer namespaces.
fn replaced<'a>(own: &'a [NamespaceRuleSet], on_file: &[&NamespaceRules]) -> Vec<&'a NamespaceRuleSet> {
    if on_file.iter().all(|found| own.iter().any(|rules| found.goes_with(rules))) {
        return Vec::new();
    }
    own.iter().filter(|rules| !on_file.iter().any(|found| found.goes_with(rules))).collect()
}

/// Whether a gate with these rules may claim: no other gate has put rules on file that replace them.
#[must_use]
pub fn are_in_force(on_file: &[NamespaceRules], rules: IdentityRules<'_>) -> bool {
    let on_file: Vec<&NamespaceRules> = of_service(on_file, rules.service()).collect();
    replaced(&rules.adoption().1, &on_file).is_empty()
}

/// Whether adopting these rules replaces others by which gates that run may still claim: those that make new ids, or those of
/// another id secret, by which a gate makes its ids that swaps the two later; or whether another gate has just replaced some,
/// by the clock of this process.
#[must_use]
pub fn replaces(on_file: &[NamespaceRules], rules: IdentityRules<'_>, now: Timestamp) -> bool {
    let (_, adopting) = rules.adoption();
    let finds_all = |found: &NamespaceRules, rule: &NamespaceRuleSet| {
        found.in_force().into_iter().all(|digest| rule.finds(Some(digest)))
    };
    let goes = |found: &NamespaceRules| adopting.iter().any(|rule| found.goes_with(rule) && finds_all(found, rule));
    let is_young = |found: &NamespaceRules| {
        let [.., _, last] = &found.periods[..] else { return false };
        last.since.plus(YOUNG) > now
    };
    of_service(on_file, rules.service()).any(|found| !goes(found) || is_young(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::{gate_of, route};
    use crate::gate::{Secret, Settings};
    use crate::idempotency::policy::Mode;
    use crate::store::Store;
    use crate::store::memory::Memory;
    use crate::telemetry::wall_clock;

    fn gate(scope: &str) -> Arc<Gate> {
        gate_of(vec![route("charges", Mode::Protect, scope)])
    }

    /// Puts the rules of another gate on file.
    async fn adopt(gate: &Gate, other: &Gate) {
        let (origins, rules) = other.identities();
        assert!(gate.shared.store.adopt(origins, rules, true).await.unwrap().is_empty());
    }

    async fn refuses(gate: &Gate) -> bool {
        let metrics = Metrics::new();
        gate.look_at_rules(&gate.identities().1, &metrics).await;
        let refuses = gate.shared.replaced.load().contains(&gate.states["charges"].rules);
        let shown = format!("oncegate_replaced_rules {}", gate.shared.replaced.load().len());
        assert!(metrics.encode().lines().any(|line| line == shown), "{shown}");
        refuses
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_claimed_while_the_rules_of_another_gate_are_on_file() {
        let (one, other) = (gate("host"), gate("client-ip"));
        adopt(&one, &one).await;
        assert!(!refuses(&one).await);
        adopt(&one, &other).await;
        assert!(refuses(&one).await && refuses(&one).await, "for as long as they are");
        adopt(&one, &one).await;
        assert!(!refuses(&one).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_with_fewer_namespaces_replaces_nothing_and_one_with_another_instead_does() {
        let [charges, mut refunds] = ["charges", "refunds"].map(|name| route(name, Mode::Protect, "host"));
        refunds.namespace = "refunds".into();
        let one = gate_of(vec![charges, refunds]);
        adopt(&one, &gate("host")).await;
        assert!(!refuses(&one).await);
        let mut renamed = route("charges", Mode::Protect, "host");
        renamed.namespace = "renamed".into();
        adopt(&one, &gate_of(vec![renamed])).await;
        assert!(refuses(&one).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_that_another_has_taken_the_place_of_is_not_asked() {
        let (one, other) = (gate("host"), gate("client-ip"));
        adopt(&one, &other).await;
        one.shared.newest.store(Arc::new(vec![Arc::clone(&one.router), Arc::clone(&other.router)]));
        assert!(!refuses(&one).await, "a reload is under way");
    }

    /// While secrets rotate, all gates go with each other: but one that drops a secret would run beside those that make ids by it.
    #[tokio::test]
    async fn a_gate_that_drops_a_secret_replaces_the_rules_of_those_that_make_ids_with_it() {
        let gate = gate("host");
        let settings = |secrets: &[u8]| {
            let mut secrets = secrets.iter().map(|secret| Some(Secret(Arc::new([*secret; 32]))));
            let (id_secret, other_id_secrets) = (secrets.next().flatten(), secrets.collect());
            Settings { id_secret, other_id_secrets, ..gate.settings.clone() }
        };
        let replaces = async |former: &[u8], next: &[u8]| {
            let (store, later) = (Memory::new(), wall_clock().plus(Duration::from_secs(3600)));
            let (former, next) = (settings(former), settings(next));
            let [former, next] = [&former, &next].map(|settings| IdentityRules::of(settings, &gate.router));
            let (origins, rules) = former.adoption();
            store.adopt(origins, rules, false).await.unwrap();
            replaces(&store.identities().await.unwrap(), next, later)
        };
        assert!(!replaces(&[1], &[1]).await, "the same");
        assert!(!replaces(&[1], &[1, 2]).await && !replaces(&[1, 2], &[2, 1]).await, "both find all");
        assert!(replaces(&[2, 1], &[2]).await && replaces(&[1, 2], &[1]).await, "others may make ids with either");
    }
}
