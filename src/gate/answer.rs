//! Replies: the three headers that tell a client how its key fared, what scripts of another origin may read of them, and how
//! long to wait before a retry.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ALLOW, CONNECTION,
    CONTENT_LANGUAGE, CONTENT_TYPE, LOCATION, ORIGIN, RETRY_AFTER, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::request::Head;
use crate::http::body::Body;
use crate::http::headers::without_names;
use crate::http::problem::{MEDIA_TYPE, Problem, RATE_LIMIT, RATE_LIMIT_POLICY, set_date};
use crate::idempotency::policy::Cors;
use crate::idempotency::protocol::least_for_claim;
use crate::idempotency::record::{RequestId, Timestamp};
use crate::route::{Ambiguous, Route, Router};
use crate::telemetry::http_date;
use crate::telemetry::outcome::{Code, Outcome};

/// Every origin.
const ANY: HeaderValue = HeaderValue::from_static("*");

/// When a client is to send its request again that was not sent on for want of something that comes back soon.
pub(super) const RETRY_SOON: Duration = Duration::from_secs(1);

/// The names of the headers that the gate adds. `None` adds no header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// `Idempotency-Status`
    pub status: Option<HeaderName>,
    /// `Idempotent-Replayed`
    pub replayed: Option<HeaderName>,
    /// `Idempotency-Expires`
    pub expires: Option<HeaderName>,
}

/// The answer to another method at one of the gate's own paths that are only read (RFC 9110, 15.5.6).
pub(super) fn takes_get_only() -> Response<Body> {
    // Its status says all there is to it (RFC 9457, 4.2.1): it has no code.
    let problem =
        br#"{"type":"about:blank","title":"Method Not Allowed","status":405,"detail":"this path takes GET and HEAD"}"#;
    let mut response = Response::new(Body::full(Bytes::from_static(problem)));
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    let headers = response.headers_mut();
    headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
    set_date(headers);
    response
}

impl HeaderNames {
    /// Those that are added.
    pub(super) fn all(&self) -> Vec<HeaderName> {
        [&self.status, &self.replayed, &self.expires].into_iter().flatten().cloned().collect()
    }
}

/// An answer, and the word for how it came about.
pub(super) struct Reply {
    pub(super) outcome: Outcome,
    pub(super) response: Response<Body>,
    /// The problem that it tells, where the gate makes it itself.
    problem: Option<Box<Problem>>,
    /// It says that the upstream was asked about the caller, and said neither yes nor no.
    pub(super) is_of_question: bool,
}

impl Reply {
    pub(super) fn new(outcome: Outcome, response: Response<Body>) -> Self {
        Self { outcome, response, problem: None, is_of_question: false }
    }

    /// A problem as the reply to a request.
    pub(super) fn problem(problem: Problem, docs: Option<&str>, request: RequestId) -> Self {
        let response = problem.response(docs, request).map(Body::full);
        let outcome = Outcome::Problem(problem.code);
        Self { outcome, response, problem: Some(Box::new(problem)), is_of_question: false }
    }

    /// The same of an upstream that was asked about the caller.
    pub(super) fn of_question(mut self) -> Self {
        self.is_of_question = true;
        self
    }

    /// Whether it is a problem that the gate makes itself.
    pub(super) fn is_problem(&self) -> bool {
        self.problem.is_some()
    }

    /// As the answer to a gRPC call: a problem becomes a gRPC status.
    pub(super) fn into_call(mut self) -> Self {
        if let Some(problem) = &self.problem {
            problem.to_grpc(&mut self.response);
        }
        self
    }

    /// The connection ends with it.
    pub(super) fn last(mut self) -> Self {
        self.response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        self
    }

    /// Says how it came about: `Idempotency-Status`, and `Idempotent-Replayed` on a replay.
    pub(super) fn with_status(mut self, names: &HeaderNames) -> Self {
        let headers = self.response.headers_mut();
        if let Some(name) = &names.status {
            headers.insert(name, HeaderValue::from_static(self.outcome.as_str()));
        }
        if let (Some(name), Outcome::Replayed) = (&names.replayed, self.outcome) {
            headers.insert(name, HeaderValue::from_static("true"));
        }
        self
    }

    /// The gate says itself what headers of these names say: a trailer of the upstream must not.
    pub(super) fn without_trailers(mut self, names: &Arc<[HeaderName]>) -> Self {
        self.response.body_mut().drop_trailers(names);
        self
    }

    /// As the reply to a request whose key does nothing, be it the upstream's answer or a problem.
    pub(super) fn of_ignored_key(mut self, names: &HeaderNames) -> Self {
        if self.problem.is_none() {
            self.outcome = Outcome::Ignored;
        }
        // The upstream may be another gate, which replayed: here, the key did nothing.
        let headers = self.response.headers_mut();
        *headers = without_names(std::mem::take(headers), &names.all());
        if let Some(name) = &names.status {
            headers.insert(name, HeaderValue::from_static(Outcome::Ignored.as_str()));
        }
        self
    }

    /// Says until when the completed record answers: `Idempotency-Expires`.
    pub(super) fn with_expiry(mut self, names: &HeaderNames, until: Timestamp) -> Self {
        if let Some(name) = &names.expires
            && let Ok(value) = HeaderValue::try_from(http_date(until))
        {
            self.response.headers_mut().insert(name, value);
        }
        self
    }
}

/// A request on a route that shares its answers with scripts in browsers, which may read of another origin only what it shares
/// (the Fetch standard, 3.3).
pub(super) struct CrossOrigin {
    route: Arc<Route>,
    /// The origin whose script asks.
    origin: Option<HeaderValue>,
}

impl CrossOrigin {
    /// Nothing where the route does not share.
    pub(super) fn of(route: &Arc<Route>, headers: &HeaderMap) -> Option<Self> {
        if route.policy.cors.origins.is_empty() {
            return None;
        }
        Some(Self { route: Arc::clone(route), origin: headers.get(ORIGIN).cloned() })
    }

    /// The same of a request for the status of an accepted one, where nothing says which route accepted it: of several that name the
    /// origin, one that shares with credentials.
    pub(super) fn of_any(router: &Router, headers: &HeaderMap) -> Option<Self> {
        // A route may have accepted requests before its mode changed.
        let protecting = router.routes().iter().filter(|route| route.policy.mode.protects());
        let allowed = protecting.filter_map(|route| Self::of(route, headers)).filter(Self::is_allowed);
        allowed.max_by_key(|asked| asked.route.policy.cors.credentials)
    }

    /// The same where the path can be read in two ways: as it stands it is of one route, or else it could be of the other.
    pub(super) fn of_either(ambiguous: &Ambiguous, head: &Head) -> Option<Self> {
        ambiguous.route.as_ref().or(ambiguous.other.as_ref()).and_then(|route| Self::of(route, &head.headers))
    }

    /// The route.
    pub(super) fn route(&self) -> &Arc<Route> {
        &self.route
    }

    /// Whether the route shares with the origin.
    pub(super) fn is_allowed(&self) -> bool {
        self.allowed().is_some()
    }

    fn allowed(&self) -> Option<HeaderValue> {
        allowed(&self.route.policy.cors, self.origin.as_ref()?)
    }

    /// Shares an answer with the origin, if the route does.
    pub(super) fn allow(&self, headers: &mut HeaderMap) {
        let cors = &self.route.policy.cors;
        if is_any(cors) {
            // Whoever asks: a cache may keep the answer for others.
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        } else {
            // Another origin gets another answer.
            headers.append(VARY, HeaderValue::from_name(ORIGIN));
            let Some(allowed) = self.allowed() else { return };
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        }
        if cors.credentials {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        } else {
            // What the upstream would allow an origin that it does not allow.
            headers.remove(ACCESS_CONTROL_ALLOW_CREDENTIALS);
        }
    }

    /// The reply as its script gets it: what the gate says itself is shared with it, and of an answer that the upstream shares
    /// it may also read what the gate `exposed`.
    pub(super) fn share(&self, mut reply: Reply, exposed: &HeaderValue) -> Reply {
        let cors = &self.route.policy.cors;
        let (is_problem, outcome) = (reply.is_problem(), reply.outcome);
        if outcome == Outcome::Observed {
            return reply;
        }
        let has_ours = outcome != Outcome::Passed;
        let is_accepted = outcome == Outcome::Accepted;
        let headers = reply.response.headers_mut();
        let shared_with = headers.get(ACCESS_CONTROL_ALLOW_ORIGIN);
        // The first answer may have been shared with another of the origins.
        let is_anothers = outcome == Outcome::Replayed
            && self.is_allowed()
            && shared_with.is_some_and(|origin| origin != ANY && Some(origin) != self.origin.as_ref());
        if is_problem || is_accepted || (cors.preflight && (shared_with.is_none() || is_anothers)) {
            self.allow(headers);
            if self.is_allowed() {
                headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, exposed.clone());
                // Where the status of an accepted request is, and how much of a quota is left.
                let more = [(LOCATION, is_accepted), (RATE_LIMIT, is_problem), (RATE_LIMIT_POLICY, is_problem)];
                for (name, is_ours) in more {
                    if is_ours && headers.contains_key(&name) {
                        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_name(name));
                    }
                }
            }
            return reply;
        }
        if has_ours && self.is_allowed() && headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
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
        return Some(ANY);
    }
    cors.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
}

/// How many recent attempts count.
const WINDOW: usize = 256;

/// With fewer attempts than this, the longest of them says little about the next.
const FEW: usize = 20;

/// What to expect of an upstream that has not answered yet.
const FIRST_GUESS: Duration = Duration::from_secs(5);

/// Of two times that differ by less, the end of a question counts before that of its client's patience.
const ABOUT_EQUAL: Duration = Duration::from_millis(100);

/// The durations of a route's recent attempts: how long a client that met an attempt in flight should wait.
#[derive(Default)]
pub(super) struct Estimator {
    recent: Mutex<Recent>,
}

#[derive(Default)]
struct Recent {
    /// In milliseconds, rounded up.
    durations: Vec<u32>,
    next: usize,
}

/// Until when what a client waits for may take.
pub(super) struct Deadlines {
    /// A look at what stands before the request claims its key or is accepted.
    pub(super) look: Instant,
    /// All that the store is asked before an attempt begins.
    pub(super) store: Instant,
    /// All of it, for `client_timeout`.
    pub(super) client: Instant,
}

impl Deadlines {
    /// Those of a request that began then. A look that takes too long leaves some of the time for the claim: the record may stand in
    /// another database, which answers.
    pub(super) fn of(began: Instant, settle_timeout: Duration, client_timeout: Duration) -> Self {
        let store = began + settle_timeout;
        Self { look: store - least_for_claim(settle_timeout), store, client: began + client_timeout }
    }

    /// How long a question to the upstream may take that takes `longest` by itself; nothing where its own end comes first.
    pub(super) fn of_question(&self, longest: Duration) -> Option<Duration> {
        let left = self.client.saturating_duration_since(Instant::now());
        (left + ABOUT_EQUAL < longest).then_some(left)
    }
}

impl Estimator {
    /// The problem for a client whose `client_timeout` is over while its request goes on.
    pub(super) fn still_running(&self, client_timeout: Duration, longest: Duration) -> Problem {
        let detail =
            "the answer is not there yet, and what has begun goes on; send the request again with the same key";
        Problem::new(Code::StillRunning, detail).retry_after(self.remaining(client_timeout, longest))
    }

    /// An attempt took this long.
    pub(super) fn took(&self, duration: Duration) {
        let millis = u32::try_from(duration.as_millis() + 1).unwrap_or(u32::MAX);
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.durations.len() < WINDOW {
            recent.durations.push(millis);
        } else {
            let next = recent.next;
            recent.durations[next] = millis;
            recent.next = (next + 1) % WINDOW;
        }
    }

    /// How much longer an attempt takes, in 95 of 100 cases, that has run for `elapsed`; at most `limit`.
    pub(super) fn remaining(&self, elapsed: Duration, limit: Duration) -> Duration {
        let past = u32::try_from(elapsed.as_millis()).unwrap_or(u32::MAX);
        let (seen, mut longer) = {
            let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            let longer: Vec<u32> = recent.durations.iter().copied().filter(|took| *took > past).collect();
            (recent.durations.len(), longer)
        };
        longer.sort_unstable();
        let total = match longer.len() {
            // It has outlasted all that were seen: the longer it took, the longer it takes.
            0 => (elapsed * 2).max(FIRST_GUESS),
            few if seen < FEW => millis(longer[few - 1]) * 2,
            // 97 of the 100 that are known: those to come differ a little, and 95 of 100 of them are to end in time.
            many => millis(longer[(many * 97).div_ceil(100) - 1]),
        };
        total.saturating_sub(elapsed).min(limit)
    }
}

fn millis(millis: u32) -> Duration {
    Duration::from_millis(u64::from(millis))
}

/// The client of a protected request, which waits for its reply or has left.
pub(super) struct Client(pub(super) oneshot::Sender<Reply>);

impl Client {
    pub(super) fn reply(self, reply: Reply) {
        // The reply of a client that has left is dropped; the record has it.
        let _ = self.0.send(reply);
    }

    /// Whether the client has left, or was answered by its timeout.
    pub(super) fn is_gone(&self) -> bool {
        self.0.is_closed()
    }

    /// Returns when the client has left.
    pub(super) async fn gone(&mut self) {
        self.0.closed().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn nothing_seen_is_a_guess() {
        assert_eq!(Estimator::default().remaining(Duration::ZERO, LIMIT), FIRST_GUESS);
    }

    #[test]
    fn waiting_suffices_in_95_of_100_cases() {
        // Durations spread evenly over 0 to 10 s.
        let estimator = Estimator::default();
        let durations: Vec<u64> = (0..1000).map(|i| (i * 7919) % 10_000).collect();
        for duration in &durations[..500] {
            estimator.took(Duration::from_millis(*duration));
        }
        for elapsed in [0, 2_000, 8_000] {
            let wait = estimator.remaining(Duration::from_millis(elapsed), LIMIT).as_millis() as u64;
            let running: Vec<_> = durations[500..].iter().filter(|took| **took > elapsed).collect();
            let done = running.iter().filter(|took| ***took <= elapsed + wait).count();
            assert!(done * 100 >= running.len() * 95, "{done} of {} after {elapsed} ms", running.len());
        }
    }

    #[test]
    fn a_short_history_is_doubted() {
        let estimator = Estimator::default();
        estimator.took(Duration::from_millis(999));
        assert_eq!(estimator.remaining(Duration::from_millis(500), LIMIT), Duration::from_millis(1500));
    }

    #[test]
    fn the_limit_holds() {
        assert_eq!(Estimator::default().remaining(Duration::from_secs(100), LIMIT), LIMIT);
    }
}
