//! What requests of a route can end with: the policy page lists its problems, and metrics have it before the first.

use crate::gate::Gate;
use crate::idempotency::key::KeySource;
use crate::idempotency::policy::{Mode, Policy, StoreFailure};
use crate::idempotency::recovery::{Finding, Recovery};
use crate::idempotency::scope::ScopePart;
use crate::telemetry::metrics::{Metrics, RouteMetrics};
use crate::telemetry::outcome::{Code, Outcome};

impl Gate {
    /// It takes requests from now on, and not before: its metrics are there before anything happens. What is said of probes and of
    /// observed routes that it does not have goes.
    pub fn show_metrics(&self, metrics: &Metrics) {
        let routes = self.router.routes();
        let observing = routes.iter().filter(|route| route.policy.mode == Mode::Observe);
        metrics.observing(observing.map(|route| &*route.name));
        metrics.no_probes();
        for route in routes {
            let state = &self.states[&route.name];
            show(&route.policy, &state.metrics);
            if let Some(check) = &state.probe_check {
                check.show(&state.metrics);
            }
        }
        self.unrouted.metrics.expect(of_unrouted());
    }
}

/// Shows the metrics of a route with this policy before there is anything to count.
fn show(policy: &Policy, metrics: &RouteMetrics) {
    metrics.expect(of_route(policy));
    if matches!(policy.recovery, Recovery::Probe(_)) {
        Finding::ALL.into_iter().for_each(|finding| drop(metrics.probe_checks(finding)));
    }
    if policy.mode == Mode::Observe {
        metrics.observed().expect(of_route(&Policy { mode: Mode::Protect, ..policy.clone() }));
    }
}

/// How requests of a route with this policy can end.
fn of_route(policy: &Policy) -> impl Iterator<Item = Outcome> {
    Outcome::ALL.into_iter().filter(|outcome| is_possible(policy, *outcome))
}

/// How requests that match no route can end.
fn of_unrouted() -> impl Iterator<Item = Outcome> {
    Outcome::ALL.into_iter().filter(|outcome| match outcome {
        Outcome::Passed | Outcome::Ignored | Outcome::Problem(Code::NoRoute) => true,
        Outcome::Problem(code) => is_of_any_request(*code),
        _ => false,
    })
}

/// The problems that a route with this policy can answer with, if it protects.
pub(super) fn problems(policy: &Policy) -> impl Iterator<Item = Code> {
    let code = |outcome| match outcome {
        Outcome::Problem(code) => Some(code),
        _ => None,
    };
    Outcome::ALL.into_iter().filter_map(code).filter(|code| can_answer(policy, *code))
}

fn is_possible(policy: &Policy, outcome: Outcome) -> bool {
    let protects = policy.mode.protects();
    match outcome {
        Outcome::Executed | Outcome::Replayed | Outcome::Released | Outcome::Unrecorded => protects,
        Outcome::Unprotected => protects && policy.store_failure == StoreFailure::Forward,
        Outcome::Recovered => protects && matches!(policy.recovery, Recovery::Probe(_)),
        Outcome::Refused => protects && policy.reauthorize.is_some(),
        Outcome::Accepted => policy.accepts(),
        Outcome::Observed => policy.mode == Mode::Observe,
        // A request without a key, where none is required.
        Outcome::Passed => policy.mode == Mode::Pass || protects && !policy.key.required,
        Outcome::Ignored => false,
        Outcome::Problem(code) => {
            if protects {
                can_answer(policy, code)
            } else {
                is_of_any_request(code)
            }
        }
    }
}

/// Whether a request that is not protected can be answered with this problem.
fn is_of_any_request(code: Code) -> bool {
    matches!(
        code,
        Code::BadRequest
            | Code::UpstreamUnreachable
            | Code::UpstreamBroken
            | Code::UpstreamTimeout
            | Code::Overloaded
            | Code::RequestTimeout
            | Code::HeadersTooLarge
            | Code::ExpectationFailed
            | Code::LoopDetected
    )
}

/// Whether a route with this policy may answer a request for it with this problem.
fn can_answer(policy: &Policy, code: Code) -> bool {
    let is_key_of_client = |source: &KeySource| *source != KeySource::Fingerprint;
    match code {
        Code::KeyMissing => policy.key.required,
        // A key that is the request's own fingerprint is sound, and belongs to no other request.
        Code::KeyInvalid | Code::KeyReused => policy.key.from.iter().any(is_key_of_client),
        Code::ScopeMissing => policy.scope.words().any(|word| !word.is_optional && !word.part.is_always_there()),
        Code::RequestExpired => policy.request_time.is_some(),
        Code::CredentialsUnverifiable => policy.scope.has_jwt_claims(),
        Code::CallerDiffers => policy.scope.contains(&ScopePart::Credential),
        // What has a route does not lack one.
        Code::NoRoute => false,
        Code::BadRequest
        | Code::InFlight
        | Code::OutcomeUnknown
        | Code::ResponseNotStored
        | Code::RequestTooLarge
        | Code::UpstreamUnreachable
        | Code::UpstreamBroken
        | Code::UpstreamTimeout
        | Code::StillRunning
        | Code::StoreUnavailable
        | Code::Overloaded
        | Code::RequestTimeout
        | Code::HeadersTooLarge
        | Code::ExpectationFailed
        | Code::QuotaExceeded
        | Code::LoopDetected => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::scope::ScopeWord;

    #[test]
    fn a_problem_is_listed_where_the_policy_can_lead_to_it() {
        let has = |policy: &Policy, code: &str| problems(policy).any(|problem| problem.as_str() == code);
        let plain = Policy::default();
        assert!(!has(&plain, "key-missing") && !has(&plain, "scope-missing") && has(&plain, "caller-differs"));
        let mut policy = Policy::default();
        policy.key.required = true;
        policy.scope = vec![ScopePart::parse("header:X-Tenant").unwrap()].into();
        assert!(has(&policy, "key-missing") && has(&policy, "scope-missing") && !has(&policy, "caller-differs"));
        policy.scope = [ScopeWord::parse("header:X-Tenant?").unwrap()].into_iter().collect();
        assert!(!has(&policy, "scope-missing"));
        policy.key.from = vec![KeySource::Fingerprint];
        assert!(!has(&policy, "key-invalid") && !has(&policy, "key-reused"));
    }

    #[test]
    fn an_outcome_is_expected_where_the_policy_can_lead_to_it() {
        let words = |policy: &Policy| of_route(policy).map(Outcome::as_str).collect::<Vec<_>>();
        let plain = words(&Policy::default());
        for word in ["executed", "replayed", "released", "unrecorded", "passed", "in-flight", "store-unavailable"] {
            assert!(plain.contains(&word), "{word}: {plain:?}");
        }
        for word in ["unprotected", "recovered", "refused", "accepted", "observed", "ignored", "no-route"] {
            assert!(!plain.contains(&word), "{word}: {plain:?}");
        }
        let open = Policy { store_failure: StoreFailure::Forward, mode: Mode::Accept, ..Policy::default() };
        assert!(words(&open).contains(&"unprotected") && words(&open).contains(&"accepted"));
        let observed = words(&Policy { mode: Mode::Observe, ..Policy::default() });
        assert!(observed.contains(&"observed") && observed.contains(&"upstream-broken"), "{observed:?}");
        assert!(!observed.contains(&"executed") && !observed.contains(&"in-flight"), "{observed:?}");
        let unrouted: Vec<_> = of_unrouted().map(Outcome::as_str).collect();
        assert!(unrouted.contains(&"ignored") && unrouted.contains(&"no-route"), "{unrouted:?}");
    }
}
