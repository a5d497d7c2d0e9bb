//! Another gate before this one: it forwards its attempts here, and this gate sees each as a request with a key.

use http::{HeaderMap, HeaderValue};

use crate::http::headers::{ATTEMPT, OwnHeaders};
use crate::http::problem::Problem;
use crate::idempotency::record::{Record, State};
use crate::telemetry::outcome::Code;

/// The token of the attempt that a request is at the gate before this one; nothing where no gate sent it.
fn attempt<'a>(headers: &'a HeaderMap, own: &OwnHeaders) -> Option<&'a HeaderValue> {
    headers.get(ATTEMPT).or_else(|| headers.get(own.other_attempt()?))
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
