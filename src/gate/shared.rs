//! State that outlives a configuration: a gate shares it with its successors.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::Semaphore;

use super::claim::quota::Quotas;
use super::claim::single_flight::SingleFlight;
use super::delivery::circuit::Circuits;
use super::drain::Drain;
use super::inquiry::reauthorize::Questions;
use super::rules_in_force::{RulesDigest, RulesInForce};
use crate::http::headers::Via;
use crate::http::usage::Usage;
use crate::route::Router;
use crate::store::Store;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::spans::Tracer;

/// How many large bodies may be read back into memory at a time, to be compared as JSON.
const LARGE_BODIES: usize = 2;

/// The namespaces in which accepted requests may wait for their delivery, besides those of routes that accept requests.
#[derive(Default)]
pub(super) enum QueuedNamespaces {
    /// None: nothing is delivered.
    #[default]
    None,
    /// The store was not asked yet.
    Any,
    /// By the last look at the store.
    These(HashSet<Arc<str>>),
}

impl QueuedNamespaces {
    /// Whether this is one of them, by the last look.
    pub(super) fn has(&self, namespace: &str) -> bool {
        matches!(self, Self::These(these) if these.contains(namespace))
    }

    /// Whether this may be one of them.
    pub(super) fn may_have(&self, namespace: &str) -> bool {
        matches!(self, Self::Any) || self.has(namespace)
    }
}

/// The attempts of this process, and what all of its gates need for them.
pub(super) struct Shared {
    pub(super) store: Arc<dyn Store>,
    pub(super) usage: Arc<Usage>,
    pub(super) single_flight: Arc<SingleFlight>,
    pub(super) drain: Drain,
    /// Where shadow records are kept: beneath the cache, whose room is for replays.
    pub(super) shadows: Arc<dyn Store>,
    /// Each evaluation of an observed request holds a receiver until it has ended.
    pub(super) evaluations: tokio::sync::watch::Sender<()>,
    /// What upstreams said a moment ago of who may have a recorded answer.
    pub(super) questions: Questions,
    /// How many large bodies may be read back into memory at a time.
    pub(super) large_bodies: Semaphore,
    /// Which upstreams can be reached, for what can wait.
    pub(super) circuits: Circuits,
    /// Where accepted requests may wait for their delivery.
    pub(super) queued: ArcSwap<QueuedNamespaces>,
    /// Claims that the store was too slow for: while it hangs, as many as there are requests.
    pub(super) late_claims: LogThrottle,
    /// Claims of records that cannot be read: as many as there are retries.
    pub(super) unreadable: LogThrottle,
    /// Temporary files that failed: while a disk is full, as many as there are large requests.
    pub(super) unspooled: LogThrottle,
    /// For requests that another gate has claimed in the same store.
    same_store: LogThrottle,
    /// Which of the rules that this process has made identities by are in force.
    pub(super) rules: RulesInForce,
    /// The rules of the present gate that another gate of the store has replaced: nothing is claimed by them for now.
    pub(super) replaced: ArcSwap<Vec<RulesDigest>>,
    /// The routes to which retries come: those of the newest gate, and during a reload those of its successor too. Nothing
    /// is claimed that one of them would not find. Empty before the first reload.
    pub(super) newest: ArcSwap<Vec<Arc<Router>>>,
    /// The name of this process on the way of a request.
    pub(super) via: Via,
    /// How much callers have left of their quotas.
    pub(super) quotas: Arc<Quotas>,
    /// Where each request gets a line, if anywhere.
    pub(super) access_log: ArcSwapOption<AccessLog>,
    /// What takes spans, if anything does.
    pub(super) tracer: ArcSwapOption<Tracer>,
    /// The shortest lease that any of the gates ever gave.
    pub(super) shortest_lease: tokio::sync::watch::Sender<Duration>,
}

impl Shared {
    /// Logs that another gate has claimed what a request would claim, in the same store.
    pub(super) fn note_same_store(&self, route: &str) {
        if let Some(others) = self.same_store.due() {
            tracing::error!(
                route,
                others,
                "a gate before this one has claimed the key of a request in this gate's own store, so the request cannot run: \
                 give one of the two gates its own `store.service`, or a store of its own"
            );
        }
    }

    pub(super) fn new(store: Arc<dyn Store>, usage: Arc<Usage>) -> Self {
        Self {
            quotas: Arc::new(Quotas::new(store.quotas())),
            shadows: store.beneath().unwrap_or_else(|| Arc::clone(&store)),
            evaluations: tokio::sync::watch::Sender::new(()),
            store,
            usage,
            single_flight: Arc::default(),
            drain: Drain::default(),
            questions: Questions::default(),
            circuits: Circuits::default(),
            queued: ArcSwap::default(),
            large_bodies: Semaphore::new(LARGE_BODIES),
            late_claims: LogThrottle::each_minute(),
            unreadable: LogThrottle::each_minute(),
            unspooled: LogThrottle::default(),
            same_store: LogThrottle::each_minute(),
            rules: RulesInForce::default(),
            replaced: ArcSwap::default(),
            newest: ArcSwap::default(),
            via: Via::new(),
            access_log: ArcSwapOption::empty(),
            tracer: ArcSwapOption::empty(),
            shortest_lease: tokio::sync::watch::Sender::new(Duration::MAX),
        }
    }

    /// From now on attempts have the leases of these routes, besides those that there are.
    pub(super) fn expect_leases_of(&self, router: &Router) {
        let Some(shortest) = router.routes().iter().map(|route| route.policy.lease).min() else { return };
        self.shortest_lease.send_if_modified(|known| {
            let is_shorter = shortest < *known;
            *known = shortest.min(*known);
            is_shorter
        });
    }
}
