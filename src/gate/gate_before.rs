//! Another gate before this one, which forwards its requests here: what is an attempt there is a request with a key here.

use http::{HeaderMap, HeaderValue};

use super::answer::Reply;
use crate::http::headers::{ATTEMPT, CONTROL, OwnHeaders};
use crate::http::problem::Problem;
use crate::idempotency::record::{Record, State};
use crate::telemetry::outcome::{Code, Outcome};

/// The token of the attempt that a request is at the gate before this one; nothing where no gate sent it.
fn attempt<'a>(headers: &'a HeaderMap, own: &OwnHeaders) -> Option<&'a HeaderValue> {
    headers.get(ATTEMPT).or_else(|| headers.get(own.other_attempt()?))
}

/// Whether a gate before this one sent a request with these headers.
pub(super) fn has_sent(headers: &HeaderMap, own: &OwnHeaders) -> bool {
    attempt(headers, own).is_some()
}

/// Why a request with these headers cannot run that meets this record: the gate before has claimed it, in the same store, for this
/// very request.
pub(super) fn claim_of_gate_before(headers: &HeaderMap, own: &OwnHeaders, record: &Record) -> Option<Problem> {
    let token = attempt(headers, own).filter(|_| record.state == State::InFlight)?;
    (token.as_bytes() == record.attempt.expose().as_bytes()).then(|| {
        let detail = "the gate before this one has claimed the key in the same store, and waits for this answer; nothing was sent";
        Problem::new(Code::LoopDetected, detail)
    })
}

/// The reply as the gate before this one gets it, which would keep a 4xx: a problem after which the request may be sent again, or whose
/// end this gate knows later, is no answer to keep. This gate has the record that a retry needs, if it needs one.
pub(super) fn to_gate_before(mut reply: Reply) -> Reply {
    if let (true, Outcome::Problem(code)) = (reply.is_problem(), reply.outcome)
        && (code.retryable() || code == Code::OutcomeUnknown)
    {
        reply.response.headers_mut().insert(CONTROL, HeaderValue::from_static("release"));
    }
    reply
}
