//! Checks a probe against an attempt that has just succeeded. If the probe does not find that one, its 404 about another
//! attempt proves nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::StatusCode;
use tokio::time::{Instant, sleep};

use crate::gate::RouteState;
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::inquiry::Question;
use crate::http::upstream::{self, Upstream};
use crate::idempotency::record::RecordId;
use crate::idempotency::recovery::{Finding, Probe, Recovery};
use crate::route::Route;
use crate::telemetry::metrics::RouteMetrics;

/// How long an attempt has succeeded at least before the probe has to find it, however short `after` is: upstreams may
/// answer by a copy of their books that is behind by some seconds.
const LEAST_AGE: Duration = Duration::from_secs(10);

/// The longest `after` with which a probe is checked: a request's credentials are kept for as long.
const LONGEST_AGE: Duration = Duration::from_secs(3600);

/// How long the answer to a check stands.
const STANDS: Duration = Duration::from_secs(3600);

/// How long to wait after a check without a finding.
const PAUSE: Duration = Duration::from_secs(600);

/// A check is under way.
const UNDER_WAY: u64 = u64::MAX;

/// Who asks the upstream. Each sends headers of its own, and an upstream may hide from one what it shows to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// A retry, with its own.
    Retry,
    /// The gate by itself, as `every` says, with `recovery.headers`.
    Worker,
}

/// Whether the probe of a route finds attempts that succeeded.
pub(in crate::gate) struct ProbeCheck {
    probe: Probe,
    upstream: upstream::Settings,
    checks: Checks,
}

/// When it is checked, and what came of it.
struct Checks {
    began: Instant,
    /// When the next check may begin, in seconds after `began`.
    due: AtomicU64,
    /// It did not find an attempt that succeeded. A probe that finds one attempt and misses another is as dangerous as one
    /// that finds none: nothing but another configuration of the two lifts this, or another process.
    is_contradicted: AtomicBool,
    /// The same, when the gate asked with the headers of its own.
    is_worker_contradicted: AtomicBool,
}

impl Default for Checks {
    fn default() -> Self {
        let (is_contradicted, is_worker_contradicted) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { began: Instant::now(), due: AtomicU64::new(0), is_contradicted, is_worker_contradicted }
    }
}

impl ProbeCheck {
    /// The check of a route's probe, if the route has one. The `known` check goes on, if its probe and its upstream are the same.
    pub(in crate::gate) fn of(
        route: &Route,
        upstreams: &[Upstream],
        known: Option<&Arc<RouteState>>,
    ) -> Option<Arc<Self>> {
        let Recovery::Probe(probe) = &route.policy.recovery else { return None };
        let upstream = upstreams.get(route.upstream)?.settings();
        let same = known.and_then(|known| known.probe_check.as_ref());
        let same = same.filter(|check| check.probe == *probe && check.upstream == *upstream);
        Some(same.cloned().unwrap_or_else(|| {
            Arc::new(Self { probe: probe.clone(), upstream: upstream.clone(), checks: Checks::default() })
        }))
    }

    /// Shows what it knows.
    pub(in crate::gate) fn show(&self, metrics: &RouteMetrics) {
        metrics.probe_contradicted(self.checks.is_contradicted_for(Asker::Worker));
    }

    /// What an answer of the upstream to this asker counts as.
    pub(super) fn finding(&self, status: StatusCode, asker: Asker) -> Finding {
        self.checks.finding(status, asker)
    }
}

impl Checks {
    /// That an upstream knows nothing of an attempt counts for nothing once it knew nothing of one that succeeded.
    fn finding(&self, status: StatusCode, asker: Asker) -> Finding {
        match Finding::of(status) {
            Finding::Absent if self.is_contradicted_for(asker) => Finding::Unclear,
            finding => finding,
        }
    }

    /// A path that misses what its own client made is wrong for the worker as well; the worker's headers may be wrong alone.
    fn is_contradicted_for(&self, asker: Asker) -> bool {
        self.is_contradicted.load(Relaxed) || asker == Asker::Worker && self.is_worker_contradicted.load(Relaxed)
    }

    /// Whether a check is due. The caller is the only one who is to make it, and ends it.
    fn take_turn(&self) -> bool {
        let due = self.due.load(Relaxed);
        due <= self.began.elapsed().as_secs() && self.due.compare_exchange(due, UNDER_WAY, Relaxed, Relaxed).is_ok()
    }

    /// Leaves a check to another request.
    fn pass_turn_on(&self) {
        self.due.store(self.began.elapsed().as_secs(), Relaxed);
    }

    /// Ends a check, in which each of these asked.
    fn checked(&self, findings: &[(Asker, Finding)]) {
        for (asker, _) in findings.iter().filter(|(_, finding)| *finding == Finding::Absent) {
            let contradicted = match asker {
                Asker::Retry => &self.is_contradicted,
                Asker::Worker => &self.is_worker_contradicted,
            };
            contradicted.store(true, Relaxed);
        }
        let is_clear = !findings.is_empty() && findings.iter().all(|(_, finding)| *finding != Finding::Unclear);
        let pause = if is_clear { STANDS } else { PAUSE };
        self.due.store((self.began.elapsed() + pause).as_secs(), Relaxed);
    }
}

impl ProtectedRequest {
    /// The upstream has carried this request out, and its record says so. If a check of the route's probe is due, asks the
    /// probe for it later, with the headers of this request; and where the gate also asks by itself, with
    /// `recovery.headers` too.
    pub(in crate::gate) fn check_probe(&self) {
        let Some(check) = &self.state.probe_check else { return };
        let Some(after) = check.probe.after.filter(|after| *after <= LONGEST_AGE) else { return };
        if !check.checks.take_turn() {
            return;
        }
        let path = &check.probe.path;
        // What an upstream may not find of this key says nothing of others.
        let Some(target) = path.target(&self.key, &self.id).filter(|_| path.tells_absence(&self.key)) else {
            return check.checks.pass_turn_on();
        };
        let headers = Question::of(self, target.clone()).headers;
        let gate = Arc::downgrade(&self.gate);
        let (check, record, state, index) = (Arc::clone(check), self.id, Arc::clone(&self.state), self.route.upstream);
        tokio::spawn(async move {
            sleep(after.max(LEAST_AGE)).await;
            // A gate that has been replaced asks nothing more: the next one may have another probe.
            let Some(gate) = gate.upgrade().filter(|gate| gate.is_newest()) else {
                return check.checks.checked(&[]);
            };
            let upstream = &gate.upstreams[index];
            let of_worker =
                check.probe.every.map(|_| Question::of_worker(&gate, upstream, target.clone(), &check.probe));
            let of_retry = Question::of_gate(&gate, upstream, target, headers);
            let mut findings = Vec::with_capacity(2);
            for (asker, question) in [(Asker::Retry, Some(of_retry)), (Asker::Worker, of_worker)] {
                let Some(question) = question else { continue };
                let status = question.ask().await.ok().map(|inquired| inquired.answer.status);
                findings.push((asker, status, status.map_or(Finding::Unclear, Finding::of)));
            }
            check.checks.checked(&findings.iter().map(|(asker, _, finding)| (*asker, *finding)).collect::<Vec<_>>());
            for (asker, status, finding) in findings {
                check.report(&state, record, asker, status, finding);
            }
        });
    }
}

impl ProbeCheck {
    /// Logs and counts what a check found.
    fn report(&self, state: &RouteState, record: RecordId, asker: Asker, status: Option<StatusCode>, finding: Finding) {
        let (status, route, probe) = (status.map(|status| status.as_u16()), &*state.name, &self.probe.path);
        if finding == Finding::Absent {
            state.metrics.probe_contradicted(true);
        }
        let said = match (finding, asker) {
            (Finding::Done, Asker::Retry) => "the probe finds a request that succeeded",
            (Finding::Done, Asker::Worker) => "the probe finds a request that succeeded, with recovery.headers",
            (Finding::Absent, Asker::Retry) => {
                "the probe does not find a request that has succeeded: from now on its 404 and 410 let nothing run again, and retries of unknown outcomes get 409 outcome-unknown; correct the path of recovery.probe, or set a longer `after` if the upstream shows its work later, and reload"
            }
            (Finding::Absent, Asker::Worker) => {
                "with recovery.headers, the probe does not find a request that has succeeded: from now on a 404 or 410 to the gate's own questions releases no record; give recovery.headers the Host and credentials that see every client's requests, and reload"
            }
            (Finding::Unclear, Asker::Retry) => {
                "the probe did not find out about a request that has succeeded: it may not find out about unknown outcomes either; see that its path answers 2xx with a client's credentials"
            }
            (Finding::Unclear, Asker::Worker) => {
                "with recovery.headers, the probe did not find out about a request that has succeeded: it may not find out about unknown outcomes either; see that its path answers 2xx to these headers"
            }
        };
        match finding {
            Finding::Done => tracing::info!(%record, route, status, %probe, "{said}"),
            Finding::Absent => tracing::error!(%record, route, status, %probe, "{said}"),
            Finding::Unclear => tracing::warn!(%record, route, status, %probe, "{said}"),
        }
        // Last: who sees the count finds the line.
        state.metrics.probe_checks(finding).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_check_at_a_time_and_again_after_an_hour_or_sooner_where_it_told_nothing() {
        let check = Checks::default();
        assert!(check.take_turn());
        tokio::time::advance(2 * STANDS).await;
        assert!(!check.take_turn());
        check.checked(&[(Asker::Retry, Finding::Done), (Asker::Worker, Finding::Done)]);
        assert!(!check.take_turn());
        tokio::time::advance(STANDS).await;
        assert!(check.take_turn());
        check.checked(&[(Asker::Retry, Finding::Done), (Asker::Worker, Finding::Unclear)]);
        tokio::time::advance(PAUSE - Duration::from_secs(1)).await;
        assert!(!check.take_turn());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(check.take_turn());
    }

    #[tokio::test]
    async fn what_it_does_not_find_counts_until_it_misses_what_is_there() {
        let check = Checks::default();
        let said = [200, 404, 410, 500].map(|status| StatusCode::from_u16(status).unwrap());
        let findings = || said.map(|status| check.finding(status, Asker::Retry));
        let of_worker = || said.map(|status| check.finding(status, Asker::Worker));
        let all = [Finding::Done, Finding::Absent, Finding::Absent, Finding::Unclear];
        assert_eq!(findings(), all);
        check.checked(&[(Asker::Retry, Finding::Done), (Asker::Worker, Finding::Done)]);
        check.checked(&[(Asker::Retry, Finding::Unclear)]);
        assert_eq!((findings(), of_worker()), (all, all));
        let held = [Finding::Done, Finding::Unclear, Finding::Unclear, Finding::Unclear];
        // With its own headers, the gate may see less than a client.
        check.checked(&[(Asker::Retry, Finding::Done), (Asker::Worker, Finding::Absent)]);
        assert_eq!((findings(), of_worker()), (all, held));
        check.checked(&[(Asker::Retry, Finding::Absent)]);
        assert_eq!((findings(), of_worker()), (held, held));
        // Another attempt that it finds proves nothing of those that it misses.
        check.checked(&[(Asker::Retry, Finding::Done), (Asker::Worker, Finding::Done)]);
        assert_eq!((findings(), of_worker()), (held, held));
    }
}
