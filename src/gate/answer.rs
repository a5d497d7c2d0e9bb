//! Replies, and the three headers that tell a client how its key fared.

use std::time::{Duration, UNIX_EPOCH};

use http::header::CONNECTION;
use http::{HeaderName, HeaderValue, Response};

use crate::http::body::Body;
use crate::http::problem::Problem;
use crate::idempotency::record::Timestamp;
use crate::telemetry::outcome::Outcome;

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
}

impl Reply {
    pub(super) fn new(outcome: Outcome, response: Response<Body>) -> Self {
        Self { outcome, response, problem: None }
    }

    pub(super) fn problem(problem: Problem, docs: Option<&str>) -> Self {
        let response = problem.response(docs).map(Body::full);
        Self { outcome: Outcome::Problem(problem.code), response, problem: Some(Box::new(problem)) }
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

    /// As the reply to a request whose key does nothing, be it the upstream's answer or a problem.
    pub(super) fn of_ignored_key(mut self, names: &HeaderNames) -> Self {
        if self.problem.is_none() {
            self.outcome = Outcome::Ignored;
        }
        if let Some(name) = &names.status {
            self.response.headers_mut().insert(name, HeaderValue::from_static(Outcome::Ignored.as_str()));
        }
        self
    }

    /// Says until when the completed record answers: `Idempotency-Expires`.
    pub(super) fn with_expiry(mut self, names: &HeaderNames, until: Timestamp) -> Self {
        if let Some(name) = &names.expires
            && let Some(value) = http_date(until)
        {
            self.response.headers_mut().insert(name, value);
        }
        self
    }
}

/// An HTTP-date (RFC 9110, 5.6.7); it has four digits for the year.
fn http_date(at: Timestamp) -> Option<HeaderValue> {
    const YEAR_9999: u64 = 253_402_300_799_000;
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(at.0.min(YEAR_9999)))?;
    HeaderValue::from_str(&httpdate::fmt_http_date(time)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_far_away_do_not_panic() {
        assert_eq!(http_date(Timestamp(0)).unwrap(), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(Timestamp(u64::MAX)).unwrap(), "Fri, 31 Dec 9999 23:59:59 GMT");
    }
}
