//! What the policy page says, before it has a form.

use std::time::Duration;

use serde::Serialize;

use crate::gate::describe::possible_outcomes::problems;
use crate::http::problem;
use crate::http::upstream::Upstream;
use crate::idempotency::delivery::Async;
use crate::idempotency::grpc;
use crate::idempotency::policy::{InFlight, Mode, Policy};
use crate::idempotency::quota::{Quota, QuotaBy};
use crate::idempotency::recovery::Recovery;
use crate::idempotency::scope::{ScopePart, ScopeWord};
use crate::idempotency::settle::{Ending, OutcomeAction, Outcomes};
use crate::route::{Route, Router};
use crate::telemetry::outcome::Code;

/// The whole page. `docs/reference/policy-page.schema.json` is its schema.
#[derive(Serialize)]
pub(super) struct Document {
    /// The protected routes, the most specific first: of those that match a request, the first counts.
    pub(super) routes: Vec<RoutePolicy>,
}

/// What a client may expect of one route.
#[derive(Serialize)]
pub(super) struct RoutePolicy {
    pub(super) methods: Vec<String>,
    /// `*` is any.
    pub(super) host: String,
    pub(super) path: String,
    pub(super) key: Key,
    /// Who a key belongs to: callers that differ in any part never get each other's answers.
    pub(super) scope: Vec<String>,
    pub(super) ttl_seconds: f64,
    pub(super) unknown_ttl_seconds: f64,
    /// How long a duplicate waits for the first request at most; 0 where it gets `in-flight` at once.
    pub(super) wait_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) quota: Option<NewKeys>,
    pub(super) max_request_body_bytes: u64,
    pub(super) max_response_body_bytes: u64,
    /// Which requests are answered with 202 and delivered later, where some are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) accepts: Option<Accepts>,
    pub(super) outcomes: Vec<OutcomeRule>,
    /// Answers in JSON that end otherwise, by a value in them: the first that matches counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) outcomes_by_body: Vec<BodyRule>,
    /// Headers of an answer that only the client gets whose request ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) not_replayed: Vec<String>,
    pub(super) problems: Vec<PossibleProblem>,
}

/// Which requests are delivered later.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Accepts {
    /// Every one.
    Always,
    /// Those whose client prefers it (RFC 7240, section 4.1).
    RespondAsync,
}

/// How many new keys a caller may claim.
#[derive(Serialize)]
pub(super) struct NewKeys {
    pub(super) new_keys: u32,
    pub(super) per_seconds: f64,
    pub(super) by: &'static str,
}

/// Where a client puts its key.
#[derive(Serialize)]
pub(super) struct Key {
    pub(super) from: Vec<String>,
    pub(super) required: bool,
    pub(super) max_length: usize,
}

/// What some endings of a request do to its key.
#[derive(Serialize)]
pub(super) struct OutcomeRule {
    /// Statuses, classes, gRPC statuses, and what happens to the connection. The most specific entry of all rules counts.
    pub(super) of: Vec<String>,
    pub(super) then: &'static str,
    pub(super) meaning: &'static str,
}

/// What a value in an answer does to the key.
#[derive(Serialize)]
pub(super) struct BodyRule {
    pub(super) pointer: String,
    pub(super) then: &'static str,
}

/// A problem that the gate may answer with.
#[derive(Serialize)]
pub(super) struct PossibleProblem {
    pub(super) code: &'static str,
    pub(super) status: u16,
    pub(super) retryable: bool,
    pub(super) title: &'static str,
    pub(super) r#type: String,
}

impl Document {
    /// What clients may expect of these routes. `upstreams` are in the order that routes refer to.
    pub(super) fn of(router: &Router, upstreams: &[Upstream]) -> Self {
        let protected = router.ranked().filter(|route| route.policy.mode.protects());
        Self { routes: protected.map(|route| RoutePolicy::of(route, upstreams.get(route.upstream))).collect() }
    }
}

impl RoutePolicy {
    fn of(route: &Route, upstream: Option<&Upstream>) -> Self {
        let policy = &route.policy;
        let wait = match policy.in_flight {
            InFlight::Wait(wait) if policy.mode != Mode::Accept => wait,
            // Where every request is accepted, none waits.
            InFlight::Reject | InFlight::Wait(_) => Duration::ZERO,
        };
        // The client of an attempt that outlasts this gets 504, and comes back.
        let may_outlast =
            upstream.map(Upstream::settings).is_none_or(|settings| settings.client_timeout < settings.timeout)
                || matches!(policy.recovery, Recovery::Resend(_))
                || policy.reauthorize.is_some();
        let codes = problems(policy).filter(|code| *code != Code::StillRunning || may_outlast);
        Self {
            methods: route.methods.iter().map(ToString::to_string).collect(),
            host: route.host.clone().unwrap_or_else(|| "*".to_owned()),
            path: route.path.to_string(),
            key: Key {
                from: policy.key.from.iter().map(ToString::to_string).collect(),
                required: policy.key.required,
                max_length: policy.key.max_length,
            },
            scope: policy.scope.words().map(|word| shown(&word)).collect(),
            ttl_seconds: policy.ttl.as_secs_f64(),
            unknown_ttl_seconds: policy.unknown_ttl.as_secs_f64(),
            wait_seconds: wait.as_secs_f64(),
            quota: policy.quota.map(NewKeys::of),
            max_request_body_bytes: policy.max_request_body,
            max_response_body_bytes: policy.max_response_body,
            accepts: match (policy.mode, policy.r#async) {
                (Mode::Accept, _) => Some(Accepts::Always),
                (_, Async::Allow) => Some(Accepts::RespondAsync),
                (_, Async::Refuse) => None,
            },
            outcomes: rules(policy),
            outcomes_by_body: body_rules(policy),
            not_replayed: policy.response_headers.exclude.iter().map(ToString::to_string).collect(),
            problems: codes.map(|code| PossibleProblem::of(code, policy.docs.as_deref())).collect(),
        }
    }
}

impl NewKeys {
    fn of(quota: Quota) -> Self {
        let by = match quota.by {
            QuotaBy::Scope => "scope",
            QuotaBy::ClientIp => "client-ip",
            QuotaBy::Route => "route",
        };
        Self { new_keys: quota.new_keys, per_seconds: quota.per.as_secs_f64(), by }
    }
}

impl PossibleProblem {
    fn of(code: Code, docs: Option<&str>) -> Self {
        Self {
            code: code.as_str(),
            status: code.status().as_u16(),
            retryable: code.retryable(),
            title: problem::title(code),
            r#type: problem::kind(code, docs),
        }
    }
}

/// A part of a scope, without the text of a `const:`.
fn shown(word: &ScopeWord) -> String {
    match word.part {
        ScopePart::Const(_) => "const".to_owned(),
        _ => word.to_string(),
    }
}

/// What a value in an answer does to the key, rule by rule.
fn body_rules(policy: &Policy) -> Vec<BodyRule> {
    let rules = policy.outcomes_body.0.iter();
    rules.map(|rule| BodyRule { pointer: rule.pointer.to_string(), then: rule.then.as_str() }).collect()
}

/// What becomes of a key by how its request ends, every entry spelled out.
fn rules(policy: &Policy) -> Vec<OutcomeRule> {
    let endings = endings(&policy.outcomes);
    let rule = |action: OutcomeAction| OutcomeRule {
        of: endings.iter().filter(|(_, then)| *then == action).map(|(entry, _)| entry.clone()).collect(),
        then: action.as_str(),
        meaning: match action {
            OutcomeAction::Store => {
                "The answer is kept. A retry gets it again and does not run, until the ttl has passed."
            }
            OutcomeAction::Release if policy.mode == Mode::Accept => {
                "The request is delivered again later, until it ends otherwise or is given up."
            }
            OutcomeAction::Release => "The key is forgotten. A retry runs again.",
            OutcomeAction::Hold if policy.mode == Mode::Accept => match policy.recovery {
                Recovery::Hold => "The outcome is unknown. The request is given up until an operator decides.",
                Recovery::Retry => {
                    "The outcome is unknown. The request is delivered again later, and may overlap the first attempt."
                }
                Recovery::Probe(_) => {
                    "The outcome is unknown. The service is asked what became of it, and the request is delivered again where it \
                     knows nothing of it."
                }
                Recovery::Resend(_) => {
                    "The outcome is unknown. The request is sent again. Where the outcome stays unknown, it is given up until an \
                     operator decides."
                }
            },
            OutcomeAction::Hold => match policy.recovery {
                Recovery::Hold => "The outcome is unknown. A retry does not run, and gets the problem outcome-unknown.",
                Recovery::Retry => "The outcome is unknown. A retry runs again, and may overlap the first attempt.",
                Recovery::Probe(_) => {
                    "The outcome is unknown. The service is asked what became of it: a retry gets the answer that the service \
                     has, runs again where it knows nothing of the request, and otherwise gets the problem outcome-unknown."
                }
                Recovery::Resend(_) => {
                    "The outcome is unknown. The request is sent again while its client waits. Where the outcome stays unknown, \
                     a retry does not run, and gets the problem outcome-unknown."
                }
            },
        },
    };
    [OutcomeAction::Store, OutcomeAction::Release, OutcomeAction::Hold]
        .map(rule)
        .into_iter()
        .filter(|rule| !rule.of.is_empty())
        .collect()
}

/// Every entry that says what becomes of a key: classes, the statuses that differ from their class, the gRPC statuses that
/// are not stored, and endings without an answer.
fn endings(outcomes: &Outcomes) -> Vec<(String, OutcomeAction)> {
    let of_status = |status| outcomes.action(Ending::Answered(status));
    let mut endings = Vec::new();
    for class in 2..=5_u16 {
        let statuses: Vec<(u16, OutcomeAction)> =
            (class * 100..class * 100 + 100).map(|status| (status, of_status(status))).collect();
        let count = |action: OutcomeAction| statuses.iter().filter(|(_, own)| *own == action).count();
        let usual = [OutcomeAction::Store, OutcomeAction::Release, OutcomeAction::Hold]
            .into_iter()
            .max_by_key(|action| count(*action));
        let Some(usual) = usual else { continue };
        endings.push((format!("{class}xx"), usual));
        let others = statuses.into_iter().filter(|(_, own)| *own != usual);
        endings.extend(others.map(|(status, own)| (status.to_string(), own)));
    }
    let calls = grpc::Status::ALL.into_iter().map(|status| (status, outcomes.action(Ending::Called(status))));
    let calls = calls.filter(|(_, action)| *action != OutcomeAction::Store);
    endings.extend(calls.map(|(status, action)| (format!("grpc:{}", status.name()), action)));
    let transport = [("unreachable", Ending::Unreachable), ("timeout", Ending::Timeout), ("broken", Ending::Broken)];
    endings.extend(transport.map(|(entry, ending)| (entry.to_owned(), outcomes.action(ending))));
    endings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_what_settles_a_request() {
        let mut outcomes = Outcomes::default();
        outcomes.insert("429", "store").unwrap();
        outcomes.insert("5xx", "hold").unwrap();
        let endings = endings(&outcomes);
        let of = |entry: &str| endings.iter().find(|(name, _)| name == entry).map(|(_, action)| *action);
        assert_eq!((of("4xx"), of("429"), of("401")), (Some(OutcomeAction::Store), None, Some(OutcomeAction::Release)));
        assert_eq!((of("5xx"), of("502"), of("timeout")), (Some(OutcomeAction::Hold), None, Some(OutcomeAction::Hold)));
    }

    #[test]
    fn what_a_retry_gets_follows_from_the_recovery_and_the_mode() {
        let meaning = |then: &str, policy: &Policy| {
            rules(policy).into_iter().find(|rule| rule.then == then).map(|rule| rule.meaning).unwrap_or_default()
        };
        let retries = Policy { recovery: Recovery::Retry, ..Policy::default() };
        assert!(meaning("hold", &Policy::default()).contains("does not run"));
        assert!(meaning("hold", &retries).contains("A retry runs again"));
        let accepts = Policy { mode: Mode::Accept, ..Policy::default() };
        assert!(meaning("release", &Policy::default()).contains("A retry runs again"));
        assert!(meaning("release", &accepts).contains("is delivered again"));
        let retries = Policy { recovery: Recovery::Retry, ..accepts };
        assert!(meaning("hold", &retries).contains("is delivered again"));
    }
}
