//! Responses of the gate itself: RFC 9457 problems.

mod grpc;

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_TYPE, DATE, LINK, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use serde::Serialize;

pub use self::grpc::{Pushback, end_call};
use crate::idempotency::record::{RecordId, RequestId};
use crate::idempotency::settle::CONTROL;
use crate::telemetry::outcome::Code;

/// A problem to answer with.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Which.
    pub code: Code,
    /// A description for this request. It never has a secret, a body or a whole key.
    pub detail: String,
    /// The value of `Retry-After`.
    pub retry_after: Option<Duration>,
    /// The status of the upstream's response, if its body was not stored.
    pub original_status: Option<u16>,
    /// The record of the request's key, for an operator to look at.
    pub record: Option<RecordId>,
    /// The quota that is used up: it is whole by one at [`Problem::retry_after`].
    pub rate_limit: Option<RateLimit>,
}

/// A quota (draft-ietf-httpapi-ratelimit-headers).
#[derive(Clone, Copy, Debug)]
pub struct RateLimit {
    /// How much there is in a window.
    pub quota: u64,
    /// The window.
    pub window: Duration,
}

#[derive(Serialize)]
struct Document<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<String>,
    code: &'static str,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
}

impl Problem {
    /// A problem without optional members.
    #[must_use]
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), retry_after: None, original_status: None, record: None, rate_limit: None }
    }

    /// Sets `Retry-After`.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Names the record of the request's key.
    #[must_use]
    pub fn of_record(mut self, record: RecordId) -> Self {
        self.record = Some(record);
        self
    }

    /// The response to a request. `docs` is the route's documentation of its problems.
    #[must_use]
    pub fn response(&self, docs: Option<&str>, request: RequestId) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from(self.document(docs, Some(request))));
        *response.status_mut() = self.code.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static("en"));
        set_date(headers);
        if let Some(link) = docs.and_then(|url| HeaderValue::from_str(&format!("<{url}>; rel=\"describedby\"")).ok()) {
            headers.insert(LINK, link);
        }
        if let Some(wait) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        if let Some(RateLimit { quota, window }) = self.rate_limit {
            let reset = whole_seconds(self.retry_after.unwrap_or_default());
            let policy = format!("\"new-keys\";q={quota};w={}", whole_seconds(window));
            for (name, value) in [(RATE_LIMIT_POLICY, policy), (RATE_LIMIT, format!("\"new-keys\";r=0;t={reset}"))] {
                // Digits are sound in a value.
                HeaderValue::try_from(value).into_iter().for_each(|value| drop(headers.insert(&name, value)));
            }
        }
        if self.code == Code::LoopDetected {
            // A gate earlier in the loop, perhaps this one, must release its key.
            headers.insert(CONTROL, HeaderValue::from_static("release"));
        }
        if self.code == Code::CredentialsUnverifiable {
            // RFC 6750, 3; an answer with 401 names a challenge (RFC 9110, 15.5.2).
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"invalid_token\""));
        }
        response
    }

    /// The response as HTTP/1.1 bytes, with `Connection: close`. It has no date and no `instance`, so that it can be prepared in
    /// advance.
    #[must_use]
    pub fn into_http1_bytes(self) -> Bytes {
        let (status, body) = (self.code.status(), self.document(None, None));
        let mut message = format!("HTTP/1.1 {status}\r\n");
        let length = body.len().to_string();
        let wait = self.retry_after.map(|wait| whole_seconds(wait).to_string());
        let headers =
            [(CONTENT_TYPE, MEDIA_TYPE), (CONTENT_LANGUAGE, "en"), (CONTENT_LENGTH, &*length), (CONNECTION, "close")];
        let wait = wait.as_deref().map(|wait| (RETRY_AFTER, wait));
        for (name, value) in headers.into_iter().chain(wait) {
            message.extend([name.as_str(), ": ", value, "\r\n"]);
        }
        message.push_str("\r\n");
        let mut message = message.into_bytes();
        message.extend(body);
        message.into()
    }

    fn document(&self, docs: Option<&str>, request: Option<RequestId>) -> Vec<u8> {
        let document = Document {
            r#type: kind(self.code, docs),
            title: title(self.code),
            status: self.code.status().as_u16(),
            detail: &self.detail,
            instance: request.map(|request| format!("urn:oncegate:request:{request}")),
            record: self.record.map(|record| record.to_string()),
            code: self.code.as_str(),
            retryable: self.code.retryable(),
            original_status: self.original_status,
        };
        serde_json::to_vec(&document).unwrap_or_default()
    }
}

/// How much there is to use, and how much of it is left (draft-ietf-httpapi-ratelimit-headers-10, sections 3 and 4).
pub const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// See [`RATE_LIMIT_POLICY`].
pub const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The media type of problems (RFC 9457).
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Says when an answer of the gate itself was made (RFC 9110, 6.6.1).
pub fn set_date(headers: &mut HeaderMap) {
    if let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(SystemTime::now())) {
        headers.insert(DATE, date);
    }
}

/// Whole seconds, at least 1.
pub fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// The `type` of a problem. `docs` is the route's documentation of its problems.
#[must_use]
pub fn kind(code: Code, docs: Option<&str>) -> String {
    docs.map_or_else(|| format!("urn:oncegate:problem:{}", code.as_str()), str::to_owned)
}

/// What a problem is, in one sentence that is always the same.
#[must_use]
pub fn title(code: Code) -> &'static str {
    match code {
        Code::KeyMissing => "An idempotency key is required",
        Code::KeyInvalid => "The idempotency key is not well-formed",
        Code::RequestExpired => "The request is too old to run, or does not say when it was made",
        Code::ScopeMissing => "The request does not say whom its idempotency key belongs to",
        Code::BadRequest => "The request is malformed",
        Code::NoRoute => "Nothing is served here",
        Code::InFlight => "A request with this idempotency key is in flight",
        Code::OutcomeUnknown => "The outcome of an earlier attempt is unknown",
        Code::ResponseNotStored => "The request ran, and its response was not kept",
        Code::RequestTooLarge => "The request is too large",
        Code::KeyReused => "The idempotency key was used for another request",
        Code::CallerDiffers => "The idempotency key was used with other credentials",
        Code::UpstreamUnreachable => "The upstream cannot be reached",
        Code::UpstreamBroken => "The upstream broke off",
        Code::UpstreamTimeout => "The upstream did not answer in time",
        Code::StillRunning => "The request is still running",
        Code::StoreUnavailable => "The idempotency store is unavailable",
        Code::Overloaded => "The gate is overloaded",
        Code::RequestTimeout => "The request did not arrive in time",
        Code::HeadersTooLarge => "The request's header fields are too large",
        Code::ExpectationFailed => "The expectation cannot be met",
        Code::QuotaExceeded => "A quota is used up",
        Code::LoopDetected => "The request goes round in circles",
        Code::CredentialsUnverifiable => "The token cannot be verified",
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    /// Whose problem it is.
    pub(super) const REQUEST: RequestId = RequestId(NonZeroU64::new(0xab).unwrap());

    #[test]
    fn seconds_are_whole_and_at_least_one() {
        assert_eq!(whole_seconds(Duration::ZERO), 1);
        assert_eq!(whole_seconds(Duration::from_millis(1001)), 2);
        assert_eq!(whole_seconds(Duration::from_secs(3)), 3);
    }

    #[test]
    fn a_problem_has_its_members_and_headers() {
        let problem = Problem::new(Code::InFlight, "wait").retry_after(Duration::from_millis(1500));
        let response = problem.response(Some("https://docs.example/retries"), REQUEST);
        assert_eq!(response.status(), 409);
        assert_eq!(response.headers()["retry-after"], "2");
        assert_eq!(response.headers()["link"], "<https://docs.example/retries>; rel=\"describedby\"");
        let body = response.into_body();
        let json: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(json["type"], "https://docs.example/retries");
        assert_eq!(json["instance"], "urn:oncegate:request:00000000000000ab");
        assert_eq!(json["code"], "in-flight");
        assert_eq!(json["retryable"], true);
        assert_eq!(json["status"].to_string(), "409");
    }
}
