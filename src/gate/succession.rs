//! One gate takes the place of another, and nothing that goes on is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedRwLockWriteGuard;
use tokio::time::timeout;

use super::work::Rules;
use super::{Gate, Settings};
use crate::http::upstream::{self, Upstream};
use crate::route::Router;
use crate::telemetry::metrics::Metrics;

/// A change of gates that is under way. Where the rules of identities change with it, nothing is claimed meanwhile.
/// Dropped, it changes nothing.
pub struct HandOver {
    /// The rules that end with it, and those that go on or are new.
    changing: Option<Changing>,
}

struct Changing {
    retired: OwnedRwLockWriteGuard<Vec<Rules>>,
    retiring: Vec<Rules>,
    current: Vec<Rules>,
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
        Self::beside(Arc::clone(&self.work), settings, router, upstreams, metrics, |name| {
            self.lanes.get(name).map(|lane| Arc::clone(&lane.estimator)).unwrap_or_default()
        })
    }

    /// The upstream that is set up like this, with its connections; a new one where there is none.
    #[must_use]
    pub fn upstream(&self, settings: upstream::Settings) -> Upstream {
        let same = self.upstreams.iter().find(|upstream| *upstream.settings() == settings);
        same.cloned().unwrap_or_else(|| Upstream::new(settings))
    }

    /// Begins to put `next` in the place of this gate: before [`crate::store::Store::adopt`] with its identities.
    ///
    /// Where rules change by which identities are made, it waits until the store has answered the claims under way, for
    /// `patience` at most, and lets nobody claim until it is done. What is live then under the old rules, the store tells;
    /// and nothing can come to it unseen.
    pub async fn hand_over(&self, next: &Self, patience: Duration) -> Result<HandOver, Stuck> {
        let rules = |gate: &Self| gate.identities().1.into_iter().map(|rule| rule.digest).collect::<Vec<Rules>>();
        let current = rules(next);
        let retiring: Vec<_> = rules(self).into_iter().filter(|rules| !current.contains(rules)).collect();
        let comes_back = self.work.retired.read().await.iter().any(|rules| current.contains(rules));
        if retiring.is_empty() && !comes_back {
            return Ok(HandOver { changing: None });
        }
        let retired = timeout(patience, Arc::clone(&self.work.retired).write_owned()).await.map_err(|_| Stuck)?;
        Ok(HandOver { changing: Some(Changing { retired, retiring, current }) })
    }
}

impl HandOver {
    /// The next gate answers now: a request that came to a former one and has not claimed yet can do so only where the
    /// rules are the same.
    pub fn done(self) {
        if let Some(Changing { mut retired, retiring, current }) = self.changing {
            retired.extend(retiring);
            retired.retain(|rules| !current.contains(rules));
        }
    }
}
