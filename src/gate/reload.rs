//! One gate replaces another, and no request under way is lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedRwLockWriteGuard;
use tokio::time::timeout;

use super::answer::RETRY_SOON;
use super::claim::protected::ProtectedRequest;
use super::rules_in_force::{RulesDigest, RulesLock, RulesStatus};
use super::shared::Shared;
use super::{Gate, Settings};
use crate::http::problem::Problem;
use crate::http::upstream::{self, Upstream};
use crate::route::Router;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::outcome::Code;

/// A change of gates that is under way. Dropped before [`Reload::adopt`], it changes nothing. If it is dropped after that,
/// the store may or may not have adopted the next gate: from then on, requests claim only keys that both gates find.
pub struct Reload {
    shared: Arc<Shared>,
    /// The routes from before, and those of the next gate.
    former: Arc<Vec<Arc<Router>>>,
    next: Arc<Router>,
    /// The rules that end with it, and those that go on or are new.
    retiring: Vec<RulesLock>,
    next_rules: Vec<RulesLock>,
    /// Of the rules that end or come back, each with what becomes of it: nothing is claimed by them meanwhile.
    changing: Vec<(OwnedRwLockWriteGuard<RulesStatus>, RulesStatus)>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The store knows nothing of it.
    Looking,
    /// The store may have adopted the next gate.
    Adopting,
    Done,
}

/// Claims are under way that the store does not answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the store does not answer the claims that are under way")]
pub struct ReloadTimeout;

impl Gate {
    /// The gate that is to take the place of this one: with other settings, and with everything that goes on. It knows the
    /// attempts that run, those who wait for them, and how long attempts of a route take. Service, secret and tokens stay.
    #[must_use]
    pub fn successor(
        &self,
        settings: Settings,
        router: Router,
        upstreams: Vec<Upstream>,
        metrics: &Metrics,
    ) -> Arc<Self> {
        let Settings { service, id_secret, other_id_secrets, tokens, .. } = self.settings.clone();
        let settings = Settings { service, id_secret, other_id_secrets, tokens, ..settings };
        Self::beside(Arc::clone(&self.shared), settings, router, upstreams, metrics, Some(self))
    }

    /// The upstream that is set up like this, with its connections; a new one where there is none.
    #[must_use]
    pub fn upstream(&self, settings: upstream::Settings) -> Upstream {
        let same = self.upstreams.iter().find(|upstream| *upstream.settings() == settings);
        same.cloned().unwrap_or_else(|| Upstream::new(settings, Arc::clone(&self.shared.usage)))
    }

    /// Begins to replace this gate by `next`. From here on, requests claim only keys that the routes of both gates find. All
    /// earlier claims are in the store, where the caller can look for them.
    ///
    /// Where `next` finds keys by other rules or routes, waits until the store has answered the claims of these that are under
    /// way, for `patience` at most.
    pub async fn begin_reload(&self, next: &Self, patience: Duration) -> Result<Reload, ReloadTimeout> {
        let (before, after) = (self.identities().1, next.identities().1);
        let changed: BTreeSet<RulesDigest> =
            before.iter().filter(|rules| !after.contains(rules)).map(|rules| rules.digest).collect();
        let next_rules: BTreeSet<RulesDigest> = after.into_iter().map(|rules| rules.digest).collect();
        let before = before.into_iter().map(|rules| rules.digest);
        let retiring: BTreeSet<RulesDigest> = before.filter(|rules| !next_rules.contains(rules)).collect();
        let shared = Arc::clone(&self.shared);
        let locks = |rules: BTreeSet<RulesDigest>| rules.into_iter().map(|rules| shared.rules.lock_of(rules)).collect();
        let (changed, retiring, next_rules): (Vec<RulesLock>, _, _) =
            (locks(changed), locks(retiring), locks(next_rules));
        let next = Arc::clone(&next.router);
        let former = shared.newest.swap(Arc::new(vec![Arc::clone(&self.router), Arc::clone(&next)]));
        let reload = Reload { shared, former, next, retiring, next_rules, changing: Vec::new(), stage: Stage::Looking };
        within(patience, async {
            for lock in changed {
                drop(lock.write_owned().await);
            }
        })
        .await?;
        Ok(reload)
    }
}

impl Reload {
    /// Lets nothing be claimed by rules that end or come back, until this has ended: right before
    /// [`crate::store::Store::adopt`] with those of the next gate. The store then knows every key that is live under the
    /// former rules.
    pub async fn adopt(&mut self, patience: Duration) -> Result<(), ReloadTimeout> {
        self.changing = within(patience, async {
            let mut changing = Vec::new();
            for lock in &self.retiring {
                changing.push((Arc::clone(lock).write_owned().await, RulesStatus::Retired));
            }
            for lock in &self.next_rules {
                if *lock.read().await == RulesStatus::Retired {
                    changing.push((Arc::clone(lock).write_owned().await, RulesStatus::InForce));
                }
            }
            changing
        })
        .await?;
        self.stage = Stage::Adopting;
        Ok(())
    }

    /// The store has not adopted the next gate: everything is as before.
    pub fn cancel(mut self) {
        self.stage = Stage::Looking;
    }

    /// The next gate answers now: a request that came to a former one and has not claimed yet can do so only where a retry
    /// finds the record.
    pub fn done(mut self) {
        self.stage = Stage::Done;
        self.shared.newest.store(Arc::new(vec![Arc::clone(&self.next)]));
        for (status, becomes) in &mut self.changing {
            **status = *becomes;
        }
    }
}

impl Drop for Reload {
    fn drop(&mut self) {
        match self.stage {
            Stage::Looking => self.shared.newest.store(Arc::clone(&self.former)),
            Stage::Adopting => {
                for (status, _) in self.changing.iter_mut().filter(|(_, becomes)| *becomes == RulesStatus::Retired) {
                    **status = RulesStatus::Retired;
                }
            }
            Stage::Done => {}
        }
    }
}

async fn within<T>(patience: Duration, waiting: impl Future<Output = T>) -> Result<T, ReloadTimeout> {
    timeout(patience, waiting).await.map_err(|_| ReloadTimeout)
}

/// What a reload, or another gate, means for a request that has not claimed its key yet.
impl ProtectedRequest {
    /// Whether a retry would find what this request claims or has kept: by its rules, whose `status` a reload changes, at every
    /// gate of the store, and by the routes to which retries come.
    pub(super) fn may_claim(&self, status: RulesStatus) -> bool {
        status == RulesStatus::InForce && !self.is_replaced() && self.is_found_after_reload()
    }

    /// Whether a retry finds the record that this request would claim, by the routes to which retries come.
    fn is_found_after_reload(&self) -> bool {
        let finds = |router: &Arc<Router>| {
            if Arc::ptr_eq(router, &self.gate.router) {
                return true;
            }
            match router.choose(&self.head.method, self.head.authority(), self.head.uri.path()) {
                Ok(Some(route)) => route.policy.mode.protects() && route.namespace == self.route.namespace,
                Ok(None) => false,
                // A retry is refused.
                Err(_) => true,
            }
        };
        self.gate.shared.newest.load().iter().all(finds)
    }

    /// Whether another gate has replaced the rules by which the request's key is found.
    pub(super) fn is_replaced(&self) -> bool {
        self.gate.shared.replaced.load().contains(&self.state.rules)
    }

    /// Why the request claims nothing where the rules or the routes changed by which its key is found: a retry would not find
    /// the record.
    pub(super) fn retired(&self) -> Problem {
        if self.is_replaced() {
            let detail = "another gate of this store finds the keys of this route by other rules, so that a retry there \
                          would run the request again; nothing was sent";
            return Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_SOON);
        }
        let detail = "the configuration changed while the request came in; nothing was sent";
        Problem::new(Code::Overloaded, detail).retry_after(RETRY_SOON)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::OwnedRwLockReadGuard;

    use super::*;
    use crate::gate::tests::{gate_of, route};
    use crate::idempotency::policy::Mode;
    use crate::route::Route;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn next(gate: &Gate, scope: &str) -> Arc<Gate> {
        let router = Router::new(vec![route("all", Mode::Protect, scope)]).unwrap();
        gate.successor(gate.settings.clone(), router, Vec::new(), &Metrics::new())
    }

    /// Whether a reload has retired the rules of this gate's routes.
    async fn is_retired(gate: &Gate) -> bool {
        *gate.states["all"].rules_status.read().await == RulesStatus::Retired
    }

    /// What a request has that waits for its claim.
    async fn claim(gate: &Gate, route: &str) -> OwnedRwLockReadGuard<RulesStatus> {
        Arc::clone(&gate.states[route].rules_status).read_owned().await
    }

    /// Whether retries come to the routes of these gates.
    fn has_routes(gate: &Gate, gates: &[&Gate]) -> bool {
        let newest = gate.shared.newest.load();
        newest.len() == gates.len() && newest.iter().zip(gates).all(|(router, gate)| Arc::ptr_eq(router, &gate.router))
    }

    async fn replace(gate: &Gate, next: &Gate) {
        let mut reload = gate.begin_reload(next, PATIENCE).await.unwrap();
        reload.adopt(PATIENCE).await.unwrap();
        reload.done();
    }

    #[tokio::test(start_paused = true)]
    async fn rules_that_change_are_retired_and_may_come_back() {
        let first = gate_of(vec![route("all", Mode::Protect, "host")]);
        let same = next(&first, "host");
        replace(&first, &same).await;
        assert!(!is_retired(&first).await);
        let other = next(&same, "client-ip");
        // Refused before the store is asked, or by the store, it changes nothing.
        drop(same.begin_reload(&other, PATIENCE).await.unwrap());
        let mut refused = same.begin_reload(&other, PATIENCE).await.unwrap();
        refused.adopt(PATIENCE).await.unwrap();
        refused.cancel();
        assert!(!is_retired(&same).await);
        assert!(has_routes(&same, &[&same]));
        replace(&same, &other).await;
        assert!(is_retired(&first).await, "of all gates before it");
        assert!(!is_retired(&other).await);
        let again = next(&other, "host");
        replace(&other, &again).await;
        assert!(is_retired(&other).await);
        assert!(!is_retired(&again).await);
        assert!(!is_retired(&first).await, "they are the same rules");
    }

    #[tokio::test(start_paused = true)]
    async fn whose_word_counts_for_an_address_is_a_rule_where_the_address_is_part_of_the_scope() {
        for (scope, changes) in [("client-ip", true), ("host", false)] {
            let first = gate_of(vec![route("all", Mode::Protect, scope)]);
            let mut settings = first.settings.clone();
            settings.forwarding.trusted = vec!["10.0.0.0/8".parse().unwrap()];
            let router = Router::new(vec![route("all", Mode::Protect, scope)]).unwrap();
            let second = first.successor(settings, router, Vec::new(), &Metrics::new());
            replace(&first, &second).await;
            assert_eq!(is_retired(&first).await, changes, "{scope}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_under_way_is_waited_for_only_where_keys_are_found_otherwise() {
        let gate = gate_of(vec![route("all", Mode::Protect, "host")]);
        let under_way = claim(&gate, "all").await;
        let mut same = gate.begin_reload(&next(&gate, "host"), PATIENCE).await.unwrap();
        same.adopt(PATIENCE).await.unwrap();
        same.cancel();
        let other = next(&gate, "client-ip");
        assert!(gate.begin_reload(&other, PATIENCE).await.is_err());
        assert!(has_routes(&gate, &[]), "given up, it changes nothing");
        let reload = gate.begin_reload(&other, PATIENCE);
        let (reload, ()) = tokio::join!(reload, async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(under_way);
        });
        let mut reload = reload.unwrap();
        // Keys are looked for, and claims go on; and none until it is done.
        drop(timeout(PATIENCE, claim(&gate, "all")).await.unwrap());
        reload.adopt(PATIENCE).await.unwrap();
        assert!(timeout(PATIENCE, claim(&gate, "all")).await.is_err());
        reload.done();
        assert!(is_retired(&gate).await);
    }

    /// The process ends while the store is asked.
    #[tokio::test(start_paused = true)]
    async fn where_the_store_may_have_adopted_the_next_gate_nothing_is_claimed_that_either_would_not_find() {
        let first = gate_of(vec![route("all", Mode::Protect, "host")]);
        let other = next(&first, "client-ip");
        let mut reload = first.begin_reload(&other, PATIENCE).await.unwrap();
        assert!(has_routes(&first, &[&first, &other]), "retries come to the former until the next answers");
        reload.adopt(PATIENCE).await.unwrap();
        drop(reload);
        assert!(is_retired(&first).await);
        assert!(!is_retired(&other).await);
        assert!(has_routes(&first, &[&first, &other]));
    }

    /// A route that goes, or takes other requests, has the same rules.
    #[tokio::test(start_paused = true)]
    async fn a_claim_under_way_is_waited_for_where_a_route_goes() {
        let gate = gate_of(vec![route("all", Mode::Protect, "host"), route("other", Mode::Protect, "host")]);
        let under_way = claim(&gate, "other").await;
        assert!(gate.begin_reload(&next(&gate, "host"), PATIENCE).await.is_err());
        drop(under_way);
        assert!(gate.begin_reload(&next(&gate, "host"), PATIENCE).await.is_ok());
    }

    /// However long the store takes for the reload, or for a claim by rules that change, the routes that keep theirs are served.
    #[tokio::test(start_paused = true)]
    async fn a_route_that_keeps_its_rules_is_served_while_those_of_another_change() {
        let other = || Route { namespace: "elsewhere".into(), ..route("other", Mode::Protect, "host") };
        let gate = gate_of(vec![route("all", Mode::Protect, "client-ip"), other()]);
        let router = Router::new(vec![route("all", Mode::Protect, "host"), other()]).unwrap();
        let next = gate.successor(gate.settings.clone(), router, Vec::new(), &Metrics::new());
        let under_way = claim(&gate, "other").await;
        let mut reload = gate.begin_reload(&next, PATIENCE).await.unwrap();
        reload.adopt(PATIENCE).await.unwrap();
        drop(under_way);
        assert!(timeout(PATIENCE, claim(&gate, "all")).await.is_err());
        assert!(timeout(PATIENCE, claim(&gate, "other")).await.is_ok());
    }

    /// A reload that gives up has stopped nothing.
    #[tokio::test(start_paused = true)]
    async fn where_one_of_two_rules_cannot_be_stopped_the_other_goes_on() {
        let other = |scope| Route { namespace: "elsewhere".into(), ..route("other", Mode::Protect, scope) };
        let gate = gate_of(vec![route("all", Mode::Protect, "client-ip"), other("client-ip")]);
        let router = Router::new(vec![route("all", Mode::Protect, "host"), other("host")]).unwrap();
        let next = gate.successor(gate.settings.clone(), router, Vec::new(), &Metrics::new());
        for hung in ["all", "other"] {
            let mut reload = gate.begin_reload(&next, PATIENCE).await.unwrap();
            let under_way = claim(&gate, hung).await;
            assert!(reload.adopt(PATIENCE).await.is_err());
            for route in ["all", "other"] {
                assert!(timeout(PATIENCE, claim(&gate, route)).await.is_ok(), "{hung} {route}");
            }
            drop((under_way, reload));
            assert!(has_routes(&gate, &[]));
        }
    }

    /// An old request can still hold the rules that two reloads have retired.
    #[tokio::test(start_paused = true)]
    async fn what_waits_for_a_claim_when_its_rules_end_finds_them_retired_after_a_second_reload() {
        let first = gate_of(vec![route("all", Mode::Protect, "host")]);
        let second = next(&first, "client-ip");
        replace(&first, &second).await;
        let third = next(&second, "const:x");
        replace(&second, &third).await;
        let rules = first.states["all"].rules;
        drop(second);
        assert!(is_retired(&first).await);
        assert_eq!(*third.shared.rules.lock_of(rules).read().await, RulesStatus::Retired);
    }
}
