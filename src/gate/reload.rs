//! One gate takes the place of another, and nothing that goes on is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedRwLockWriteGuard;
use tokio::time::timeout;

use super::shared::IdentityDigest;
use super::{Gate, Settings};
use crate::http::upstream::{self, Upstream};
use crate::route::Router;
use crate::telemetry::metrics::Metrics;

/// A change of gates that is under way. Where the rules of identities change with it, nothing is claimed meanwhile.
/// Dropped, it changes nothing.
pub struct Reload {
    /// The rules that end with it, and those that go on or are new.
    changing: Option<Changing>,
}

struct Changing {
    retired: OwnedRwLockWriteGuard<Vec<IdentityDigest>>,
    retiring: Vec<IdentityDigest>,
    current: Vec<IdentityDigest>,
}

/// Claims are under way that the store does not answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the store does not answer the claims that are under way")]
pub struct Stuck;

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
        let Settings { service, id_secret, tokens, .. } = self.settings.clone();
        let settings = Settings { service, id_secret, tokens, ..settings };
        Self::beside(Arc::clone(&self.shared), settings, router, upstreams, metrics, |name| {
            self.states.get(name).map(|state| Arc::clone(&state.estimator)).unwrap_or_default()
        })
    }

    /// The upstream that is set up like this, with its connections; a new one where there is none.
    #[must_use]
    pub fn upstream(&self, settings: upstream::Settings) -> Upstream {
        let same = self.upstreams.iter().find(|upstream| *upstream.settings() == settings);
        same.cloned().unwrap_or_else(|| Upstream::new(settings, Arc::clone(&self.shared.usage)))
    }

    /// Begins to put `next` in the place of this gate: before [`crate::store::Store::adopt`] with its identities.
    ///
    /// Where rules change by which identities are made, it waits until the store has answered the claims under way, for
    /// `patience` at most, and lets nobody claim until it is done. What is live then under the old rules, the store tells;
    /// and nothing can come to it unseen.
    pub async fn begin_reload(&self, next: &Self, patience: Duration) -> Result<Reload, Stuck> {
        let rules =
            |gate: &Self| gate.identities().1.into_iter().map(|rule| rule.digest).collect::<Vec<IdentityDigest>>();
        let current = rules(next);
        let retiring: Vec<_> = rules(self).into_iter().filter(|rules| !current.contains(rules)).collect();
        let comes_back = self.shared.retired.read().await.iter().any(|rules| current.contains(rules));
        if retiring.is_empty() && !comes_back {
            return Ok(Reload { changing: None });
        }
        let retired = timeout(patience, Arc::clone(&self.shared.retired).write_owned()).await.map_err(|_| Stuck)?;
        Ok(Reload { changing: Some(Changing { retired, retiring, current }) })
    }
}

impl Reload {
    /// The next gate answers now: a request that came to a former one and has not claimed yet can do so only where the
    /// rules are the same.
    pub fn done(self) {
        if let Some(Changing { mut retired, retiring, current }) = self.changing {
            retired.extend(retiring);
            retired.retain(|rules| !current.contains(rules));
        }
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

    #[tokio::test(start_paused = true)]
    async fn rules_that_change_are_retired_and_may_come_back() {
        let first = gate_of(vec![route("all", Mode::Protect, "host")]);
        let same = next(&first, "host");
        first.begin_reload(&same, PATIENCE).await.unwrap().done();
        assert_eq!(retired(&same).await, 0);
        let other = next(&same, "client-ip");
        // Given up, it changes nothing.
        drop(same.begin_reload(&other, PATIENCE).await.unwrap());
        assert_eq!(retired(&same).await, 0);
        same.begin_reload(&other, PATIENCE).await.unwrap().done();
        let rules = |gate: &Gate| gate.states["all"].rules;
        assert!(first.shared.retired.read().await.contains(&rules(&first)), "of all gates before it");
        let again = next(&other, "host");
        other.begin_reload(&again, PATIENCE).await.unwrap().done();
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
            first.begin_reload(&second, PATIENCE).await.unwrap().done();
            assert_eq!(retired(&second).await, changes, "{scope}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_under_way_is_waited_for_only_where_rules_change() {
        let gate = gate_of(vec![route("all", Mode::Protect, "host")]);
        let claim = Arc::clone(&gate.shared.retired).read_owned().await;
        gate.begin_reload(&next(&gate, "host"), PATIENCE).await.unwrap();
        let other = next(&gate, "client-ip");
        assert!(gate.begin_reload(&other, PATIENCE).await.is_err());
        let reload = gate.begin_reload(&other, PATIENCE);
        let (reload, ()) = tokio::join!(reload, async {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(claim);
        });
        // And nobody claims until it is done.
        let reload = reload.unwrap();
        assert!(timeout(PATIENCE, gate.shared.retired.read()).await.is_err());
        reload.done();
        assert_eq!(retired(&gate).await, 1);
    }
}
