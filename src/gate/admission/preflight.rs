//! Preflights: the question of a browser whether a script of another origin may send a request (the Fetch standard, 3.3.2).
//!
//! The upstream answers it. But one that knows nothing of keys does not allow their header, and one that knows nothing of
//! other origins has no answer: for routes with `cors.preflight` the gate adds what is missing.

use std::sync::Arc;

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};

use crate::gate::answer::{CrossOrigin, Reply};
use crate::gate::request::Head;
use crate::http::body::Body;
use crate::idempotency::key::KeySource;
use crate::idempotency::policy::Mode;
use crate::route::{Route, Router};
use crate::telemetry::outcome::{Code, Outcome};

/// How long a browser may keep the gate's own answer, in seconds: two hours, the most that Chromium keeps any.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// A preflight for a request of a route with `cors.preflight`, from an origin that the route names.
pub(in crate::gate) struct Preflight {
    pub(in crate::gate) route: Arc<Route>,
    asked: CrossOrigin,
    method: HeaderValue,
    /// The headers that the script wants to send, in lines.
    headers: Vec<HeaderValue>,
}

/// The route of the request that a preflight announces, and its method. Nothing for any other request.
pub(in crate::gate) fn announced<'a>(router: &'a Router, head: &'a Head) -> Option<(&'a Arc<Route>, &'a HeaderValue)> {
    if head.method != Method::OPTIONS || !head.headers.contains_key(ORIGIN) {
        return None;
    }
    let method = head.headers.get(ACCESS_CONTROL_REQUEST_METHOD)?;
    let announced = Method::from_bytes(method.as_bytes()).ok()?;
    Some((router.find(&announced, head.authority(), head.uri.path())?, method))
}

impl Preflight {
    /// Nothing for any other request.
    pub(in crate::gate) fn of(router: &Router, head: &Head) -> Option<Self> {
        let (route, method) = announced(router, head)?;
        let asked = CrossOrigin::of(route, &head.headers).filter(|asked| asked.is_allowed())?;
        (route.policy.cors.preflight && route.policy.mode != Mode::Observe).then(|| Self {
            route: Arc::clone(route),
            asked,
            method: method.clone(),
            headers: head.headers.get_all(ACCESS_CONTROL_REQUEST_HEADERS).iter().cloned().collect(),
        })
    }

    /// A preflight for the status of an accepted request, from an origin that a route names.
    pub(in crate::gate) fn of_status(router: &Router, method: &Method, headers: &HeaderMap) -> Option<Self> {
        if *method != Method::OPTIONS {
            return None;
        }
        let announced = headers.get(ACCESS_CONTROL_REQUEST_METHOD)?;
        let asked = CrossOrigin::of_any(router, headers)?;
        ["GET", "HEAD"].contains(&announced.to_str().ok()?).then(|| Self {
            route: Arc::clone(asked.route()),
            asked,
            method: announced.clone(),
            headers: headers.get_all(ACCESS_CONTROL_REQUEST_HEADERS).iter().cloned().collect(),
        })
    }

    /// The upstream's answer with what it lacks.
    pub(in crate::gate) fn complete(&self, mut reply: Reply) -> Reply {
        if reply.is_problem() {
            return match reply.outcome {
                // Accepting a request needs no upstream, and the script of any other gets a problem that it can read.
                Outcome::Problem(Code::UpstreamUnreachable | Code::UpstreamTimeout | Code::UpstreamBroken) => {
                    let mut answer = self.answer();
                    // The upstream may answer soon.
                    answer.headers_mut().remove(ACCESS_CONTROL_MAX_AGE);
                    Reply::new(Outcome::Passed, answer)
                }
                _ => reply,
            };
        }
        let status = reply.response.status();
        let knows_origins = reply.response.headers().contains_key(ACCESS_CONTROL_ALLOW_ORIGIN);
        // An upstream that authenticates every request refuses preflights: browsers send them without credentials.
        let knows_none = status.is_client_error() || status == StatusCode::NOT_IMPLEMENTED;
        match status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => reply.response = self.answer(),
            _ if knows_none && !knows_origins => reply.response = self.answer(),
            _ if status.is_success() && !knows_origins => self.allow(reply.response.headers_mut()),
            _ if status.is_success() => self.allow_key(reply.response.headers_mut()),
            _ => {}
        }
        reply
    }

    /// The answer in the place of the upstream.
    pub(in crate::gate) fn answer(&self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        self.allow(response.headers_mut());
        response
    }

    /// Allows what was asked for.
    fn allow(&self, headers: &mut HeaderMap) {
        self.asked.allow(headers);
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, self.method.clone());
        headers.remove(ACCESS_CONTROL_ALLOW_HEADERS);
        for line in &self.headers {
            headers.append(ACCESS_CONTROL_ALLOW_HEADERS, line.clone());
        }
        headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    }

    /// Allows the headers of the key too, where they were asked for.
    fn allow_key(&self, headers: &mut HeaderMap) {
        let listed = |lines: &[HeaderValue], name: &str| {
            lines
                .iter()
                .filter_map(|line| line.to_str().ok())
                .any(|line| line.split(',').any(|one| one.trim().eq_ignore_ascii_case(name)))
        };
        let allowed: Vec<HeaderValue> = headers.get_all(ACCESS_CONTROL_ALLOW_HEADERS).iter().cloned().collect();
        for name in self.key_headers() {
            if listed(&self.headers, name.as_str()) && !listed(&allowed, name.as_str()) {
                headers.append(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_name(name.clone()));
            }
        }
    }

    fn key_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.route.policy.key.from.iter().flat_map(KeySource::headers)
    }
}
