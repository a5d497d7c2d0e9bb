//! A problem as the answer to a gRPC call: trailers alone.

use std::time::Duration;

use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};

use super::{Body, Problem};
use crate::idempotency::grpc::{self, MESSAGE, PUSHBACK, STATUS, Status};
use crate::telemetry::outcome::Code;

impl Problem {
    /// Turns its answer into the one to a gRPC call: HTTP's 200, and the call's status in the place of trailers, which
    /// gRPC calls *trailers-only*. Headers that say more stay.
    pub fn tell_call(&self, response: &mut Response<Body>) {
        *response.status_mut() = StatusCode::OK;
        *response.body_mut() = Body::empty();
        let headers = response.headers_mut();
        headers.remove(CONTENT_LANGUAGE);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(STATUS, HeaderValue::from(u16::from(status(self.code).number())));
        headers.insert(MESSAGE, grpc::message(&format!("{}: {}", self.code.as_str(), self.detail)));
        if let Some(pushback) = pushback(self) {
            headers.insert(PUSHBACK, pushback);
        }
    }
}

/// How long a client that retries by itself waits; that it does not, where the problem will not go away.
fn pushback(problem: &Problem) -> Option<HeaderValue> {
    if !problem.code.retryable() {
        return Some(HeaderValue::from_static("-1"));
    }
    let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1);
    problem.retry_after.map(|wait| HeaderValue::from(millis(wait)))
}

/// The status of gRPC that says the same.
///
/// What may be sent again as it is, is `UNAVAILABLE`, which is what clients retry by themselves, or `RESOURCE_EXHAUSTED`
/// where that client takes too much. Of the others none may read like a refusal where something may have happened: an
/// outcome that nobody knows is `UNKNOWN`, and an answer that was not kept `ALREADY_EXISTS`.
fn status(code: Code) -> Status {
    match code {
        Code::KeyMissing | Code::KeyInvalid | Code::ScopeMissing | Code::BadRequest | Code::ExpectationFailed => {
            Status::InvalidArgument
        }
        // As clients make of a 404.
        Code::NoRoute => Status::Unimplemented,
        Code::ResponseNotStored => Status::AlreadyExists,
        Code::OutcomeUnknown | Code::UpstreamBroken => Status::Unknown,
        Code::UpstreamTimeout => Status::DeadlineExceeded,
        Code::KeyReused | Code::CallerDiffers => Status::FailedPrecondition,
        Code::RequestTooLarge | Code::HeadersTooLarge | Code::QuotaExceeded => Status::ResourceExhausted,
        Code::InFlight
        | Code::UpstreamUnreachable
        | Code::StillRunning
        | Code::StoreUnavailable
        | Code::Overloaded
        | Code::RequestTimeout => Status::Unavailable,
        Code::LoopDetected => Status::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::Outcome;

    /// Every problem: its HTTP status, its status of gRPC, and whether a client retries by itself.
    const TABLE: &str = "\
key-missing 400 INVALID_ARGUMENT -1
key-invalid 400 INVALID_ARGUMENT -1
scope-missing 400 INVALID_ARGUMENT -1
bad-request 400 INVALID_ARGUMENT -1
no-route 404 UNIMPLEMENTED -1
in-flight 409 UNAVAILABLE 1500
outcome-unknown 409 UNKNOWN -1
response-not-stored 409 ALREADY_EXISTS -1
request-too-large 413 RESOURCE_EXHAUSTED -1
key-reused 422 FAILED_PRECONDITION -1
caller-differs 422 FAILED_PRECONDITION -1
upstream-unreachable 502 UNAVAILABLE 1500
upstream-broken 502 UNKNOWN -1
upstream-timeout 504 DEADLINE_EXCEEDED -1
still-running 504 UNAVAILABLE 1500
store-unavailable 503 UNAVAILABLE 1500
overloaded 503 UNAVAILABLE 1500
request-timeout 408 UNAVAILABLE 1500
headers-too-large 431 RESOURCE_EXHAUSTED -1
expectation-failed 417 INVALID_ARGUMENT -1
quota-exceeded 429 RESOURCE_EXHAUSTED 1500
loop-detected 508 INTERNAL -1
";

    #[test]
    fn every_problem_has_its_status() {
        let mut table = String::new();
        for outcome in Outcome::ALL {
            let Outcome::Problem(code) = outcome else { continue };
            let problem = Problem::new(code, "x").retry_after(Duration::from_millis(1500));
            let wait = pushback(&problem).unwrap();
            let (http, call) = (code.status().as_u16(), status(code).name());
            table.push_str(&format!("{} {http} {call} {}\n", code.as_str(), wait.to_str().unwrap()));
        }
        assert_eq!(table, TABLE);
    }

    #[test]
    fn a_call_is_told_in_trailers_alone() {
        let problem = Problem::new(Code::InFlight, "100 % là").retry_after(Duration::from_millis(1500));
        let mut response = problem.response(Some("https://docs.example/retries"));
        problem.tell_call(&mut response);
        assert_eq!(response.status(), 200);
        let told = ["content-type", "grpc-status", "grpc-message", "grpc-retry-pushback-ms", "retry-after", "link"];
        let values = told.map(|name| response.headers()[name].to_str().unwrap().to_owned());
        let link = "<https://docs.example/retries>; rel=\"describedby\"";
        assert_eq!(values, ["application/grpc", "14", "in-flight: 100 %25 l%C3%A0", "1500", "2", link]);
        assert!(!response.headers().contains_key("content-language"));
        assert!(http_body::Body::is_end_stream(response.body()));
        let unwaited = Problem::new(Code::Overloaded, "x");
        assert_eq!(pushback(&unwaited), None);
    }
}
