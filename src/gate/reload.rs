//! One gate replaces another, and no request under way is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedRwLockWriteGuard;
use tokio::time::timeout;

use super::answer::RETRY_SOON;
use super::claim::protected::ProtectedRequest;
use super::shared::{RulesDigest, Shared};
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
    retiring: Vec<RulesDigest>,
    next_rules: Vec<RulesDigest>,
    /// Held where the rules of identities change: nothing is claimed meanwhile.
    retired: Option<OwnedRwLockWriteGuard<Vec<RulesDigest>>>,
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
    /// If `next` finds keys by other rules or routes, waits until the store has answered the claims under way, for
    /// `patience` at most.
    pub async fn begin_reload(&self, next: &Self, patience: Duration) -> Result<Reload, ReloadTimeout> {
        let (before, after) = (self.identities().1, next.identities().1);
        let changes = !before.iter().all(|rules| after.contains(rules));
        let next_rules: Vec<RulesDigest> = after.into_iter().map(|rules| rules.digest).collect();
        let before = before.into_iter().map(|rules| rules.digest);
        let retiring = before.filter(|rules| !next_rules.contains(rules)).collect();
        let shared = Arc::clone(&self.shared);
        let next = Arc::clone(&next.router);
        let former = shared.newest.swap(Arc::new(vec![Arc::clone(&self.router), Arc::clone(&next)]));
        let reload = Reload { shared, former, next, retiring, next_rules, retired: None, stage: Stage::Looking };
        if changes {
            drop(reload.stop_claims(patience).await?);
        }
        Ok(reload)
    }
}

impl Reload {
    /// Lets nothing be claimed until this has ended, where the rules of identities change: right before
    /// [`crate::store::Store::adopt`] with those of the next gate. The store then knows every key that is live under the
    /// former rules.
    pub async fn adopt(&mut self, patience: Duration) -> Result<(), ReloadTimeout> {
        let comes_back = self.shared.retired.read().await.iter().any(|rules| self.next_rules.contains(rules));
        if !self.retiring.is_empty() || comes_back {
            self.retired = Some(self.stop_claims(patience).await?);
        }
        self.stage = Stage::Adopting;
        Ok(())
    }

    /// The store has not adopted the next gate: everything is as before.
    pub fn cancel(mut self) {
        self.stage = Stage::Looking;
    }

    async fn stop_claims(&self, patience: Duration) -> Result<OwnedRwLockWriteGuard<Vec<RulesDigest>>, ReloadTimeout> {
        timeout(patience, Arc::clone(&self.shared.retired).write_owned()).await.map_err(|_| ReloadTimeout)
    }

    /// The next gate answers now: a request that came to a former one and has not claimed yet can do so only where a retry
    /// finds the record.
    pub fn done(mut self) {
        self.stage = Stage::Done;
        self.shared.newest.store(Arc::new(vec![Arc::clone(&self.next)]));
        if let Some(mut retired) = self.retired.take() {
            retired.append(&mut self.retiring);
            retired.retain(|rules| !self.next_rules.contains(rules));
        }
    }
}

impl Drop for Reload {
    fn drop(&mut self) {
        match self.stage {
            Stage::Looking => self.shared.newest.store(Arc::clone(&self.former)),
            Stage::Adopting => {
                if let Some(retired) = &mut self.retired {
                    retired.append(&mut self.retiring);
                }
            }
            Stage::Done => {}
        }
    }
}

/// What a reload, or another gate, means for a request that has not claimed its key yet.
impl ProtectedRequest {
    /// Whether a retry would find what this request claims or has kept: by the rules that are in force, those that a reload has `retired`
    /// left out, at every gate of the store, and by the routes to which retries come.
    pub(super) fn may_claim(&self, retired: &[RulesDigest]) -> bool {
        !retired.contains(&self.state.rules) && !self.is_replaced() && self.is_found_after_reload()
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
    use super::*;
    use crate::gate::tests::{gate_of, route};
    use crate::idempotency::policy::Mode;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn next(gate: &Gate, scope: &str) -> Arc<Gate> {
        let router = Router::new(vec![route("all", Mode::Protect, scope)]).unwrap();
        gate.successor(gate.settings.clone(), router, Vec::new(), &Metrics::new())
    }

    async fn retired(gate: &Gate) -> usize {
        gate.shared.retired.read().await.len()
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
        assert_eq!(retired(&same).await, 0);
        let other = next(&same, "client-ip");
        // Refused before the store is asked, or by the store, it changes nothing.
        drop(same.begin_reload(&other, PATIENCE).await.unwrap());
        let mut refused = same.begin_reload(&other, PATIENCE).await.unwrap();
        refused.adopt(PATIENCE).await.unwrap();
        refused.cancel();
        assert_eq!(retired(&same).await, 0);
        assert!(has_routes(&same, &[&same]));
        replace(&same, &other).await;
        let rules = |gate: &Gate| gate.states["all"].rules;
        assert!(first.shared.retired.read().await.contains(&rules(&first)), "of all gates before it");
        let again = next(&other, "host");
        replace(&other, &again).await;
        assert_eq!(*first.shared.retired.read().await, [rules(&other)]);
    }

    #[tokio::test(start_paused = true)]
    async fn whose_word_counts_for_an_address_is_a_rule_where_the_address_is_part_of_the_scope() {
        for (scope, changes) in [("client-ip", 1), ("host", 0)] {
            let first = gate_of(vec![route("all", Mode::Protect, scope)]);
            let mut settings = first.settings.clone();
            settings.forwarding.trusted = vec!["10.0.0.0/8".parse().unwrap()];
            let router = Router::new(vec![route("all", Mode::Protect, scope)]).unwrap();
            let second = first.successor(settings, router, Vec::new(), &Metrics::new());
            replace(&first, &second).await;
            assert_eq!(retired(&second).await, changes, "{scope}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_under_way_is_waited_for_only_where_keys_are_found_otherwise() {
        let gate = gate_of(vec![route("all", Mode::Protect, "host")]);
        let claim = Arc::clone(&gate.shared.retired).read_owned().await;
        let mut same = gate.begin_reload(&next(&gate, "host"), PATIENCE).await.unwrap();
        same.adopt(PATIENCE).await.unwrap();
        same.cancel();
        let other = next(&gate, "client-ip");
        assert!(gate.begin_reload(&other, PATIENCE).await.is_err());
        assert!(has_routes(&gate, &[]), "given up, it changes nothing");
        let reload = gate.begin_reload(&other, PATIENCE);
        let (reload, ()) = tokio::join!(reload, async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(claim);
        });
        let mut reload = reload.unwrap();
        // Keys are looked for, and claims go on; and none until it is done.
        drop(timeout(PATIENCE, gate.shared.retired.read()).await.unwrap());
        reload.adopt(PATIENCE).await.unwrap();
        assert!(timeout(PATIENCE, gate.shared.retired.read()).await.is_err());
        reload.done();
        assert_eq!(retired(&gate).await, 1);
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
        assert_eq!(*first.shared.retired.read().await, [first.states["all"].rules]);
        assert!(has_routes(&first, &[&first, &other]));
    }

    /// A route that goes, or takes other requests, has the same rules.
    #[tokio::test(start_paused = true)]
    async fn a_claim_under_way_is_waited_for_where_a_route_goes() {
        let gate = gate_of(vec![route("all", Mode::Protect, "host"), route("other", Mode::Protect, "host")]);
        let claim = Arc::clone(&gate.shared.retired).read_owned().await;
        assert!(gate.begin_reload(&next(&gate, "host"), PATIENCE).await.is_err());
        drop(claim);
        assert!(gate.begin_reload(&next(&gate, "host"), PATIENCE).await.is_ok());
    }
}
