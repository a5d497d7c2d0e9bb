//! Problems as responses to gRPC calls: Trailers-Only.

use std::time::Duration;

use http::header::{CONTENT_LANGUAGE, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};

use super::Problem;
use crate::idempotency::grpc::{self, MESSAGE, PUSHBACK, STATUS, Status};
use crate::telemetry::outcome::Code;

impl Problem {
    /// Turns the response into one to a gRPC call: status 200 without a body, and the call's status in the headers, which
    /// gRPC calls *Trailers-Only*. Headers that gRPC does not define stay.
    pub fn to_grpc<B: Default>(&self, response: &mut Response<B>) {
        let message = format!("{}: {}", self.code.as_str(), self.detail);
        let pushback = match self.code.retryable() {
            true => self.retry_after.map(Pushback::After),
            false => Some(Pushback::Stop),
        };
        end_call(response, self.call_status(), &message, pushback);
    }

    /// With which status it ends a gRPC call.
    #[must_use]
    pub fn call_status(&self) -> Status {
        status(self.code)
    }
}

/// When a client that retries by itself is to do so.
pub enum Pushback {
    /// After this time.
    After(Duration),
    /// Not at all.
    Stop,
}

/// Makes a response the end of a call, without a message and without a body (trailers-only). Its other headers stay.
pub fn end_call<B: Default>(response: &mut Response<B>, status: Status, message: &str, pushback: Option<Pushback>) {
    *response.status_mut() = StatusCode::OK;
    *response.body_mut() = B::default();
    let headers = response.headers_mut();
    headers.remove(CONTENT_LANGUAGE);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(STATUS, HeaderValue::from(u16::from(status.number())));
    headers.insert(MESSAGE, grpc::message(message));
    let millis = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1);
    let pushback = pushback.map(|pushback| match pushback {
        Pushback::After(wait) => HeaderValue::from(millis(wait)),
        Pushback::Stop => HeaderValue::from_static("-1"),
    });
    if let Some(pushback) = pushback {
        headers.insert(PUSHBACK, pushback);
    }
}

/// The gRPC status of a problem.
///
/// Retryable problems are `UNAVAILABLE`, which clients retry automatically, or `RESOURCE_EXHAUSTED` if this client
/// exceeds its quota. A problem after which the request may have had an effect must not look like a refusal: an
/// unknown outcome is `UNKNOWN`, and a response that was not stored is `ALREADY_EXISTS`.
fn status(code: Code) -> Status {
    match code {
        Code::KeyMissing
        | Code::KeyInvalid
        | Code::ScopeMissing
        | Code::RequestExpired
        | Code::BadRequest
        | Code::ExpectationFailed => Status::InvalidArgument,
        // gRPC clients map 404 to this status.
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
        Code::CredentialsUnverifiable => Status::Unauthenticated,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::REQUEST;
    use super::*;
    use crate::telemetry::outcome::Outcome;

    /// Every problem: its HTTP status, its status of gRPC, and whether a client retries by itself.
    const TABLE: &str = "\
key-missing 400 INVALID_ARGUMENT -1
key-invalid 400 INVALID_ARGUMENT -1
scope-missing 400 INVALID_ARGUMENT -1
request-expired 400 INVALID_ARGUMENT -1
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
credentials-unverifiable 401 UNAUTHENTICATED -1
";

    #[test]
    fn every_problem_has_its_status() {
        let mut table = String::new();
        for outcome in Outcome::ALL {
            let Outcome::Problem(code) = outcome else { continue };
            let problem = Problem::new(code, "x").retry_after(Duration::from_millis(1500));
            let mut response = Response::new(Vec::<u8>::new());
            problem.to_grpc(&mut response);
            let wait = &response.headers()[&PUSHBACK];
            let (http, call) = (code.status().as_u16(), status(code).name());
            table.push_str(&format!("{} {http} {call} {}\n", code.as_str(), wait.to_str().unwrap()));
        }
        assert_eq!(table, TABLE);
    }

    #[test]
    fn a_call_gets_a_trailers_only_response() {
        let problem = Problem::new(Code::InFlight, "100 % là").retry_after(Duration::from_millis(1500));
        let mut response = problem.response(Some("https://docs.example/retries"), REQUEST);
        problem.to_grpc(&mut response);
        assert_eq!(response.status(), 200);
        let names = ["content-type", "grpc-status", "grpc-message", "grpc-retry-pushback-ms", "retry-after", "link"];
        let values = names.map(|name| response.headers()[name].to_str().unwrap().to_owned());
        let link = "<https://docs.example/retries>; rel=\"describedby\"";
        assert_eq!(values, ["application/grpc", "14", "in-flight: 100 %25 l%C3%A0", "1500", "2", link]);
        assert!(!response.headers().contains_key("content-language"));
        assert!(response.body().is_empty());
        let mut response = Response::new(Vec::<u8>::new());
        Problem::new(Code::Overloaded, "x").to_grpc(&mut response);
        assert!(!response.headers().contains_key(&PUSHBACK));
    }
}
