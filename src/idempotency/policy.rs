//! What a route does with the requests it protects.

use std::borrow::Cow;
use std::time::Duration;

use http::HeaderName;
use http::uri::PathAndQuery;

use super::codec::Answer;
use super::delivery::{Async, Deliver};
use super::fingerprint::Recipe;
use super::key::KeyRule;
use super::quota::Quota;
use super::recovery::Recovery;
use super::request_time::RequestTime;
use super::scope::{Scope, ScopePart};
use super::settle::{BodyOutcomes, Outcomes};

/// The policy of one route.
#[derive(Clone, Debug)]
pub struct Policy {
    /// How long a completed record answers retries, counted from its claim.
    pub ttl: Duration,
    /// How long an unknown record is kept, counted from when it became unknown.
    pub unknown_ttl: Duration,
    /// Where the idempotency key comes from.
    pub key: KeyRule,
    /// Who a key belongs to.
    pub scope: Scope,
    /// How two requests are distinguished.
    pub fingerprint: Recipe,
    /// What an attempt's ending does to its record.
    pub outcomes: Outcomes,
    /// What an answer's own JSON says of how its attempt ended; it comes before `outcomes`.
    pub outcomes_body: BodyOutcomes,
    /// What happens to a duplicate of a request that is in flight.
    pub in_flight: InFlight,
    /// What happens to a retry of an unknown record.
    pub recovery: Recovery,
    /// How old a request may be that runs, by the time that it says.
    pub request_time: Option<RequestTime>,
    /// What happens to a request when the store cannot be reached.
    pub store_failure: StoreFailure,
    /// Whether its records must be encrypted in the store.
    pub seal: Seal,
    /// The claim's time limit; renewed while the attempt runs.
    pub lease: Duration,
    /// Whether the route protects at all.
    pub mode: Mode,
    /// Whether a client may have a request accepted and delivered later.
    pub r#async: Async,
    /// How what was accepted is delivered.
    pub deliver: Deliver,
    /// When the client gets an answer.
    pub body: ResponseMode,
    /// Largest request body, in bytes.
    pub max_request_body: u64,
    /// Largest answer body that is kept, in bytes.
    pub max_response_body: u64,
    /// How many new keys each caller may claim.
    pub quota: Option<Quota>,
    /// Which headers of an answer only its first client gets.
    pub response_headers: ResponseHeaders,
    /// What the upstream is asked for before a replay; nothing where it is not asked.
    pub reauthorize: Option<PathAndQuery>,
    /// Whose scripts may read what the gate answers.
    pub cors: Cors,
    /// Page that explains the route's problems; their `type`.
    pub docs: Option<String>,
}

impl Policy {
    /// Whether a route verifies the tokens of its requests: its scope has a claim.
    #[must_use]
    pub fn verifies_tokens(&self) -> bool {
        self.mode != Mode::Pass && self.scope.has_jwt_claims()
    }

    /// Whether it accepts requests, all of them or those whose clients prefer that.
    #[must_use]
    pub fn accepts(&self) -> bool {
        match self.mode {
            Mode::Accept => true,
            Mode::Protect => self.r#async == Async::Allow,
            Mode::Observe | Mode::Pass => false,
        }
    }
}

impl Default for Policy {
    /// What a route does that says nothing else.
    fn default() -> Self {
        const HOUR: Duration = Duration::from_secs(60 * 60);
        const MIB: u64 = 1024 * 1024;
        Self {
            ttl: 24 * HOUR,
            unknown_ttl: 30 * 24 * HOUR,
            key: KeyRule::default(),
            scope: vec![ScopePart::Host, ScopePart::Credential].into(),
            fingerprint: Recipe::default(),
            outcomes: Outcomes::default(),
            outcomes_body: BodyOutcomes::default(),
            in_flight: InFlight::Reject,
            recovery: Recovery::Hold,
            request_time: None,
            store_failure: StoreFailure::Reject,
            seal: Seal::Optional,
            lease: Duration::from_secs(30),
            mode: Mode::Protect,
            r#async: Async::Refuse,
            deliver: Deliver::default(),
            body: ResponseMode::Buffer,
            max_request_body: 16 * MIB,
            max_response_body: 16 * MIB,
            quota: None,
            response_headers: ResponseHeaders::default(),
            reauthorize: None,
            cors: Cors::default(),
            docs: None,
        }
    }
}

/// What happens to a duplicate of a request that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlight {
    /// It is answered at once: `in-flight`.
    Reject,
    /// It waits for the attempt to end, for this long at most. It never starts one itself.
    Wait(Duration),
}

/// What happens to a request when the store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreFailure {
    /// Answer 503: nothing is forwarded without a durable claim.
    Reject,
    /// Forward it unprotected, and say so.
    Forward,
}

/// Whether records must be encrypted in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// Records that are not encrypted are read too.
    Optional,
    /// A record that is not encrypted is refused: a writer to the store cannot plant an answer of its own.
    Required,
}

/// When the client gets an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseMode {
    /// When all of it is durable.
    Buffer,
    /// While the upstream gives it, but for its last bytes, which it gets when all of it is durable.
    Stream,
}

/// Which headers of an answer only the client gets whose request ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseHeaders {
    /// Names of headers that no record keeps and no retry gets.
    pub exclude: Vec<HeaderName>,
}

impl ResponseHeaders {
    /// What a record keeps of an answer, and what a retry gets of it.
    #[must_use]
    pub fn kept<'a>(&self, answer: Cow<'a, Answer>) -> Cow<'a, Answer> {
        if self.exclude.is_empty() {
            return answer;
        }
        let mut answer = answer.into_owned();
        let is_kept = |(name, _): &(HeaderName, _)| !self.exclude.contains(name);
        answer.headers.retain(is_kept);
        if let Some(content) = &mut answer.content {
            content.trailers.retain(is_kept);
        }
        Cow::Owned(answer)
    }
}

/// Whose scripts may read what the gate answers, in browsers (the Fetch standard, 3.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// Origins as browsers write them, or `*` for any; where there is none, the gate says nothing about it.
    pub origins: Vec<String>,
    /// Whether they may with the user's cookies and credentials.
    pub credentials: bool,
    /// Whether the gate adds to preflights and answers what an upstream that knows nothing of other origins leaves out.
    pub preflight: bool,
}

/// Whether a route protects at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Claim, forward, record, replay.
    Protect,
    /// Accept, and claim, forward and record later.
    Accept,
    /// Forward, and find out what [`Mode::Protect`] would have done.
    Observe,
    /// Forward, and do nothing else.
    Pass,
}

impl Mode {
    /// Whether a request runs under the claim of its key.
    #[must_use]
    pub fn protects(self) -> bool {
        match self {
            Self::Protect | Self::Accept => true,
            Self::Observe | Self::Pass => false,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Protect => "protect",
            Self::Accept => "accept",
            Self::Observe => "observe",
            Self::Pass => "pass",
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderValue, StatusCode};

    use super::super::codec::Content;
    use super::*;

    #[test]
    fn excluded_headers_and_trailers_are_not_kept() {
        let lines = |names: &[&'static str]| -> Vec<_> {
            let line = |name: &&'static str| (HeaderName::from_static(name), HeaderValue::from_static("x"));
            names.iter().map(line).collect()
        };
        let answer = |headers: &[&'static str], trailers: &[&'static str]| Answer {
            status: StatusCode::OK,
            reason: None,
            headers: lines(headers),
            content: Some(Content { body: Bytes::from_static(b"body"), trailers: lines(trailers) }),
        };
        let whole = answer(&["set-cookie", "etag", "set-cookie", "date"], &["x-sum", "date"]);
        let exclude = ["set-cookie", "date"].map(HeaderName::from_static).to_vec();
        let kept = |rule: ResponseHeaders| rule.kept(Cow::Borrowed(&whole)).into_owned();
        assert_eq!(kept(ResponseHeaders { exclude }), answer(&["etag"], &["x-sum"]));
        assert_eq!(kept(ResponseHeaders::default()), whole);
    }
}
