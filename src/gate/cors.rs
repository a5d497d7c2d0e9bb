//! Answers for scripts in browsers, which may read of another origin only what it shares (the Fetch standard, 3.3).

use std::sync::Arc;

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ORIGIN, RETRY_AFTER,
    VARY,
};
use http::{HeaderName, HeaderValue};

use super::answer::{HeaderNames, Reply};
use super::request::Head;
use crate::idempotency::policy::Cors;
use crate::route::{Ambiguous, Route};
use crate::telemetry::outcome::Outcome;

/// A request on a route that shares its answers.
pub(super) struct CrossOrigin {
    route: Arc<Route>,
    /// The origin whose script asks.
    origin: Option<HeaderValue>,
}

impl CrossOrigin {
    /// Nothing where the route does not share.
    pub(super) fn of(route: &Arc<Route>, head: &Head) -> Option<Self> {
        if route.policy.cors.origins.is_empty() {
            return None;
        }
        Some(Self { route: Arc::clone(route), origin: head.headers.get(ORIGIN).cloned() })
    }

    /// The same where the path can be read in two ways: as it stands it is of one route, or else it could be of the other.
    pub(super) fn of_either(ambiguous: &Ambiguous, head: &Head) -> Option<Self> {
        ambiguous.route.as_ref().or(ambiguous.other.as_ref()).and_then(|route| Self::of(route, head))
    }

    /// The reply as its script gets it: a problem of the gate is shared with it, and of an answer that the upstream shares
    /// it may also read what the gate `exposed`.
    pub(super) fn share(&self, mut reply: Reply, exposed: &HeaderValue) -> Reply {
        let cors = &self.route.policy.cors;
        let allowed = self.origin.as_ref().and_then(|origin| allowed(cors, origin));
        if reply.is_problem() {
            let headers = reply.response.headers_mut();
            if !is_any(cors) {
                // Another origin gets another answer.
                headers.append(VARY, HeaderValue::from_name(ORIGIN));
            }
            let Some(allowed) = allowed else { return reply };
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
            if cors.credentials {
                headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            }
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, exposed.clone());
            return reply;
        }
        let has_ours = reply.outcome != Outcome::Passed;
        let headers = reply.response.headers_mut();
        if has_ours && allowed.is_some() && headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
            // A list may stand in several lines; what the upstream exposes stays as it is.
            headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, exposed.clone());
        }
        reply
    }
}

/// What scripts may read besides what they may anyway: the gate's headers, and when to come back.
pub(super) fn exposed(names: &HeaderNames) -> HeaderValue {
    let names: Vec<HeaderName> = names.all().into_iter().chain([RETRY_AFTER]).collect();
    let names: Vec<&str> = names.iter().map(HeaderName::as_str).collect();
    // Names of headers are sound values of others.
    HeaderValue::try_from(names.join(", ")).unwrap_or(HeaderValue::from_static(""))
}

fn is_any(cors: &Cors) -> bool {
    cors.origins.iter().any(|origin| origin == "*")
}

/// The origin as it is allowed, if it is.
fn allowed(cors: &Cors, origin: &HeaderValue) -> Option<HeaderValue> {
    if is_any(cors) {
        return Some(HeaderValue::from_static("*"));
    }
    cors.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
}
