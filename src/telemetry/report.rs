//! What is reported of each request when its answer is over: a line in the access log, and a span of its trace.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{HOST, REFERER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, Version};
use tokio::time::Instant;

use super::access_log::AccessLog;
use super::notes::{Noted, Notes};
use super::outcome::Outcome;
use super::spans::Started;
use crate::idempotency::record::{RequestId, Timestamp};

/// What is seen of a request when it comes. A part that could not be read is missing.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub(crate) method: Option<Method>,
    /// Its path and query, of which the query is not reported.
    pub(crate) target: Option<Uri>,
    pub(super) host: Option<HeaderValue>,
    pub(super) version: Option<Version>,
    pub(super) user_agent: Option<HeaderValue>,
    pub(super) referer: Option<HeaderValue>,
}

/// What is known of a request when its answer is over.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// When its head came, since 1970.
    pub(super) since: Duration,
    pub(super) took: Duration,
    pub(super) request: RequestId,
    pub(super) peer: IpAddr,
    /// Whether its connection is encrypted.
    pub(super) is_secure: bool,
    pub(super) seen: Seen,
    pub(super) noted: Noted,
    /// Nothing where the client left before it had an answer.
    pub(super) status: Option<StatusCode>,
    pub(super) bytes: u64,
    pub(super) route: Option<Arc<str>>,
    pub(super) outcome: Option<Outcome>,
}

/// A request that is under way. Dropped, it is reported: its answer is over, or its client has left.
pub struct Report(Box<Open>);

struct Open {
    log: Option<Arc<AccessLog>>,
    span: Option<Started>,
    notes: Arc<Notes>,
    began: Instant,
    facts: Facts,
}

impl Seen {
    /// What a head shows.
    pub fn of<B>(request: &Request<B>) -> Self {
        Self::of_head(request.method(), request.uri(), request.version(), request.headers())
    }

    /// What the parts of a head show.
    #[must_use]
    pub fn of_head(method: &Method, target: &Uri, version: Version, headers: &HeaderMap) -> Self {
        let authority = || HeaderValue::from_str(target.authority()?.as_str()).ok();
        Self {
            method: Some(method.clone()),
            target: Some(target.clone()),
            host: headers.get(HOST).cloned().or_else(authority),
            version: Some(version),
            user_agent: headers.get(USER_AGENT).cloned(),
            referer: headers.get(REFERER).cloned(),
        }
    }

    /// What a request line shows that may be malformed (RFC 9112, 3).
    #[must_use]
    pub fn of_line(line: &[u8]) -> Self {
        let mut words = line.split(|byte| *byte == b' ');
        let method = words.next().and_then(|word| Method::from_bytes(word).ok());
        let target = words.next().and_then(|word| Uri::try_from(word).ok());
        let version = match words.next() {
            Some(b"HTTP/1.1") => Some(Version::HTTP_11),
            Some(b"HTTP/1.0") => Some(Version::HTTP_10),
            _ => None,
        };
        // A word that is no method may be anything.
        Self { target: target.filter(|_| method.is_some()), method, version, ..Self::default() }
    }
}

impl Facts {
    /// When the request's head came.
    pub(super) fn time(&self) -> Timestamp {
        Timestamp(u64::try_from(self.since.as_millis()).unwrap_or(u64::MAX))
    }

    /// The address of the client.
    pub(super) fn client(&self) -> IpAddr {
        self.noted.client.unwrap_or(self.peer)
    }
}

impl Report {
    /// A request of the client at this address, to be reported there, and the notes on it.
    #[must_use]
    pub fn new(
        log: Option<Arc<AccessLog>>,
        span: Option<Started>,
        request: RequestId,
        (peer, is_secure): (IpAddr, bool),
        seen: Seen,
    ) -> (Arc<Notes>, Self) {
        let notes = Arc::new(Notes::new(span.as_ref().map(Started::context)));
        let facts = Facts {
            since: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            took: Duration::ZERO,
            request,
            peer,
            is_secure,
            seen,
            noted: Noted::default(),
            status: None,
            bytes: 0,
            route: None,
            outcome: None,
        };
        let open = Open { log, span, notes: Arc::clone(&notes), began: Instant::now(), facts };
        (notes, Self(Box::new(open)))
    }

    /// Its answer begins. `private` are the headers that keys and scopes of its route are made of.
    #[must_use]
    pub fn answered(mut self, status: StatusCode, route: Option<(&Arc<str>, Outcome)>, private: &[HeaderName]) -> Self {
        let facts = &mut self.0.facts;
        facts.status = Some(status);
        if let Some((route, outcome)) = route {
            (facts.route, facts.outcome) = (Some(Arc::clone(route)), Some(outcome));
        }
        if private.contains(&USER_AGENT) {
            facts.seen.user_agent = None;
        }
        if private.contains(&REFERER) {
            facts.seen.referer = None;
        }
        self
    }

    /// So many bytes of the answer's body are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.0.facts.bytes += bytes as u64;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let facts = &mut self.facts;
        facts.took = self.began.elapsed();
        facts.noted = self.notes.get();
        if facts.status.is_none() {
            // Its client left, and has no answer. What its route keeps private is not looked up.
            facts.route = facts.noted.route.take();
            (facts.seen.user_agent, facts.seen.referer) = (None, None);
        }
        if let Some(log) = &self.log {
            log.write(facts);
        }
        if let Some(span) = self.span.take() {
            span.end(facts);
        }
    }
}
