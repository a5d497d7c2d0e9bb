//! The answers of the admin listener.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::endpoints::Endpoint;
use super::records::do_not_answer;
use crate::store::Error;

pub(super) type Answer = Response<Full<Bytes>>;

/// What a browser must not do with an answer of this listener: take it for another type than it says, show it in a frame of
/// another page, load anything for it, or hand it to a page of another site.
const FOR_BROWSERS: [(HeaderName, HeaderValue); 4] = [
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
];

/// Tells browsers what they must not do with an answer, whatever it is.
pub(super) fn for_browsers(mut answer: Answer) -> Answer {
    for (name, value) in FOR_BROWSERS {
        // The page has a policy of its own.
        answer.headers_mut().entry(name).or_insert(value);
    }
    answer
}

/// What went wrong, as RFC 9457 says it.
#[derive(Debug)]
pub(super) struct Problem {
    kind: Kind,
    pub(super) detail: String,
    /// What else it says.
    members: Map<String, Value>,
    /// What the store said, for the log.
    pub(super) failure: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    /// With what is allowed.
    MethodNotAllowed(&'static Endpoint),
    RequestTimeout,
    /// The record is not unknown, so that there is nothing to resolve.
    NotUnknown,
    /// The record cannot be read by this gate, so its retries would not get an answer.
    Unreadable,
    /// A transaction of its upstream holds the record.
    Held,
    /// The accepted request is not dead, so that there is nothing to retry.
    AlreadyQueued,
    /// The configuration has nothing that it could be done with.
    NotConfigured,
    /// The record is unknown, and has to be resolved first.
    OutcomeUnknown,
    /// Another record stands there than the request is about.
    RecordChanged,
    RequestTooLarge,
    UnsupportedMediaType,
    /// Too many wrong tokens came from its address, for so many seconds.
    Throttled(u64),
    Internal,
    /// As many requests of this sort as there may be are being answered.
    Overloaded,
    StoreUnavailable,
    /// The process cannot do this while it starts or stops.
    NotReady,
}

impl Kind {
    /// Its code, and its title.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::BadRequest => ("bad-request", "The request is not valid"),
            Self::Unauthorized => ("unauthorized", "A token is required"),
            Self::Forbidden => ("forbidden", "The request is refused"),
            Self::NotFound => ("not-found", "There is nothing here"),
            Self::MethodNotAllowed(_) => ("method-not-allowed", "The method is not allowed here"),
            Self::RequestTimeout => ("request-timeout", "The request took too long to arrive"),
            Self::NotUnknown => ("not-unknown", "The record is not unknown"),
            Self::Unreadable => ("unreadable", "The record cannot be read here"),
            Self::Held => ("held", "A transaction holds the record"),
            Self::AlreadyQueued => ("already-queued", "The request is queued already"),
            Self::NotConfigured => ("not-configured", "This gate is not configured for it"),
            Self::OutcomeUnknown => ("outcome-unknown", "The outcome of the request is unknown"),
            Self::RecordChanged => ("record-changed", "The record has changed"),
            Self::RequestTooLarge => ("request-too-large", "The request is too large"),
            Self::UnsupportedMediaType => ("unsupported-media-type", "The content type is not supported"),
            Self::Throttled(_) => ("throttled", "Too many wrong tokens came from this address"),
            Self::Internal => ("internal-error", "The request could not be answered"),
            Self::Overloaded => ("overloaded", "There are too many requests of this sort"),
            Self::StoreUnavailable => ("store-unavailable", "The store cannot be reached"),
            Self::NotReady => ("not-ready", "The gate is not ready for this"),
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::NotUnknown
            | Self::Unreadable
            | Self::Held
            | Self::AlreadyQueued
            | Self::NotConfigured
            | Self::OutcomeUnknown => StatusCode::CONFLICT,
            Self::RecordChanged => StatusCode::PRECONDITION_FAILED,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Throttled(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Overloaded | Self::StoreUnavailable | Self::NotReady => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Whether the same request may be sent again as it is.
    fn retryable(self) -> bool {
        matches!(
            self,
            Self::Held
                | Self::StoreUnavailable
                | Self::RequestTimeout
                | Self::Overloaded
                | Self::NotReady
                | Self::Throttled(_)
        )
    }

    pub(super) fn because(self, detail: impl Into<String>) -> Problem {
        Problem { kind: self, detail: detail.into(), members: Map::new(), failure: None }
    }
}

impl Problem {
    /// With more members, which no problem has by itself.
    pub(super) fn with(mut self, members: Map<String, Value>) -> Self {
        self.members = members;
        self
    }

    /// Because the store failed so.
    pub(super) fn caused_by(mut self, failure: Error) -> Self {
        self.failure = Some(failure);
        self
    }

    /// The same in the words of a request that only reads, while these databases of several are away.
    pub(super) fn of_reading(mut self, away: &[Arc<str>]) -> Self {
        let what = if away.is_empty() { "the store is away".to_owned() } else { do_not_answer(away) };
        self.detail = format!("cannot be read: {what}; see the log of `oncegate serve`");
        self
    }

    /// Whether the record is not what the request expects; the store is well.
    pub(super) fn is_about_the_record(&self) -> bool {
        matches!(self.kind, Kind::NotUnknown | Kind::Unreadable | Kind::Held | Kind::NotFound | Kind::AlreadyQueued)
    }
}

/// A problem (RFC 9457).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Problem")]
pub(super) struct ProblemBody {
    /// A URN that names the problem.
    r#type: String,
    /// The problem in a few words.
    title: &'static str,
    /// The status of the answer.
    status: u16,
    /// What is wrong this time.
    detail: String,
    /// The problem in one word.
    code: &'static str,
    /// Whether the same request may be sent again as it is.
    retryable: bool,
    #[serde(flatten)]
    members: Map<String, Value>,
}

impl From<Problem> for Answer {
    fn from(problem: Problem) -> Self {
        let Problem { kind, detail, members, .. } = problem;
        let (code, title) = kind.names();
        let body = ProblemBody {
            r#type: format!("urn:oncegate:problem:{code}"),
            title,
            status: kind.status().as_u16(),
            detail,
            code,
            retryable: kind.retryable(),
            members,
        };
        let mut answer = json(kind.status(), &body);
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
        match kind {
            Kind::MethodNotAllowed(endpoint) => {
                // Methods are tokens.
                headers.extend(HeaderValue::from_str(&endpoint.allow()).ok().map(|allow| (ALLOW, allow)));
            }
            Kind::Unauthorized => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"oncegate admin\""));
            }
            Kind::Throttled(seconds) => {
                headers.insert(RETRY_AFTER, seconds.into());
            }
            Kind::Overloaded => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        answer
    }
}

pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Answer {
    let body = serde_json::to_vec(value).expect("plain structs of strings and numbers always serialize");
    with_body(status, "application/json", body)
}

pub(super) fn text(content_type: &'static str, body: String) -> Answer {
    with_body(StatusCode::OK, content_type, body)
}

pub(super) fn empty(status: StatusCode) -> Answer {
    let mut answer = Answer::new(Full::default());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

pub(super) fn with_body(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = empty(status);
    *answer.body_mut() = Full::new(body.into());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
