//! One word for how a request ended: log field, metric label and `Idempotency-Status` value.

use http::StatusCode;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The upstream ran and its answer is recorded.
    Executed,
    /// A recorded answer was given again.
    Replayed,
    /// The upstream ran, and its key is free again.
    Released,
    /// The answer is the upstream's; it was not durable when it was given.
    Unrecorded,
    /// The store was away and the route fails open.
    Unprotected,
    /// The request was not protected.
    Passed,
    /// The same, and it carried a key: no route protects it.
    Ignored,
    /// It was forwarded as it came, and what its route would have done is found out afterwards.
    Observed,
    /// The upstream said what became of an unknown outcome, and the record has its answer now.
    Recovered,
    /// The upstream did not let the caller have the recorded answer again, and its own answer to that went to the client.
    Refused,
    /// It is kept, and delivered later.
    Accepted,
    /// The gate answered with this problem, or the upstream's answer leaves this problem behind.
    Problem(Code),
}

/// The codes of the problems that the gate answers with (RFC 9457 `code` member).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// The route requires a key.
    KeyMissing,
    /// The key is not well-formed.
    KeyInvalid,
    /// The request lacks a part of the route's scope.
    ScopeMissing,
    /// The request was made too long ago to run, or does not say when.
    RequestExpired,
    /// The request is malformed.
    BadRequest,
    /// No route and no default upstream.
    NoRoute,
    /// Another attempt runs for this key.
    InFlight,
    /// How the attempt ended is unknown.
    OutcomeUnknown,
    /// The recorded answer has no body kept.
    ResponseNotStored,
    /// The body is larger than the route allows.
    RequestTooLarge,
    /// The key belongs to another request.
    KeyReused,
    /// The key belongs to a caller with another proof of its identity.
    CallerDiffers,
    /// The upstream could not be reached; nothing was sent.
    UpstreamUnreachable,
    /// The upstream broke off.
    UpstreamBroken,
    /// The upstream did not answer in time.
    UpstreamTimeout,
    /// What has begun for the request goes on, longer than its client waits.
    StillRunning,
    /// The store fails, or has a record that this gate cannot read or believe; nothing was sent.
    StoreUnavailable,
    /// A limit of the gate is reached, or it lacks for now what it needs; nothing was sent.
    Overloaded,
    /// The request did not arrive in time; nothing was sent.
    RequestTimeout,
    /// The request's head is larger than is allowed.
    HeadersTooLarge,
    /// The request has an `Expect` that is not supported.
    ExpectationFailed,
    /// A quota of new keys is used up, or one address has as many connections as it may; nothing was sent.
    QuotaExceeded,
    /// The request came by here before; nothing was sent.
    LoopDetected,
    /// The request carries a token that cannot be verified; nothing was sent.
    CredentialsUnverifiable,
}

/// The class of a status: the label `class` of `oncegate_responses_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusClass {
    /// An upgrade.
    Informational,
    Successful,
    Redirection,
    ClientError,
    ServerError,
    /// From 600 on, which an upstream can send and no standard defines.
    Other,
}

impl Outcome {
    /// Every outcome, in the order of [`Outcome::index`].
    pub const ALL: [Self; 35] = {
        use Code::*;
        [
            Self::Executed,
            Self::Replayed,
            Self::Released,
            Self::Unrecorded,
            Self::Unprotected,
            Self::Passed,
            Self::Ignored,
            Self::Observed,
            Self::Recovered,
            Self::Refused,
            Self::Accepted,
            Self::Problem(KeyMissing),
            Self::Problem(KeyInvalid),
            Self::Problem(ScopeMissing),
            Self::Problem(RequestExpired),
            Self::Problem(BadRequest),
            Self::Problem(NoRoute),
            Self::Problem(InFlight),
            Self::Problem(OutcomeUnknown),
            Self::Problem(ResponseNotStored),
            Self::Problem(RequestTooLarge),
            Self::Problem(KeyReused),
            Self::Problem(CallerDiffers),
            Self::Problem(UpstreamUnreachable),
            Self::Problem(UpstreamBroken),
            Self::Problem(UpstreamTimeout),
            Self::Problem(StillRunning),
            Self::Problem(StoreUnavailable),
            Self::Problem(Overloaded),
            Self::Problem(RequestTimeout),
            Self::Problem(HeadersTooLarge),
            Self::Problem(ExpectationFailed),
            Self::Problem(QuotaExceeded),
            Self::Problem(LoopDetected),
            Self::Problem(CredentialsUnverifiable),
        ]
    };

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::Released => "released",
            Self::Unrecorded => "unrecorded",
            Self::Unprotected => "unprotected",
            Self::Passed => "passed",
            Self::Ignored => "ignored",
            Self::Observed => "observed",
            Self::Recovered => "recovered",
            Self::Refused => "refused",
            Self::Accepted => "accepted",
            Self::Problem(code) => code.as_str(),
        }
    }

    /// Its place in [`Outcome::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Executed => 0,
            Self::Replayed => 1,
            Self::Released => 2,
            Self::Unrecorded => 3,
            Self::Unprotected => 4,
            Self::Passed => 5,
            Self::Ignored => 6,
            Self::Observed => 7,
            Self::Recovered => 8,
            Self::Refused => 9,
            Self::Accepted => 10,
            Self::Problem(code) => 11 + code as usize,
        }
    }
}

impl Code {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KeyMissing => "key-missing",
            Self::KeyInvalid => "key-invalid",
            Self::ScopeMissing => "scope-missing",
            Self::RequestExpired => "request-expired",
            Self::BadRequest => "bad-request",
            Self::NoRoute => "no-route",
            Self::InFlight => "in-flight",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::ResponseNotStored => "response-not-stored",
            Self::RequestTooLarge => "request-too-large",
            Self::KeyReused => "key-reused",
            Self::CallerDiffers => "caller-differs",
            Self::UpstreamUnreachable => "upstream-unreachable",
            Self::UpstreamBroken => "upstream-broken",
            Self::UpstreamTimeout => "upstream-timeout",
            Self::StillRunning => "still-running",
            Self::StoreUnavailable => "store-unavailable",
            Self::Overloaded => "overloaded",
            Self::RequestTimeout => "request-timeout",
            Self::HeadersTooLarge => "headers-too-large",
            Self::ExpectationFailed => "expectation-failed",
            Self::QuotaExceeded => "quota-exceeded",
            Self::LoopDetected => "loop-detected",
            Self::CredentialsUnverifiable => "credentials-unverifiable",
        }
    }

    /// The status that it is answered with.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::KeyMissing | Self::KeyInvalid | Self::ScopeMissing | Self::RequestExpired | Self::BadRequest => {
                StatusCode::BAD_REQUEST
            }
            Self::NoRoute => StatusCode::NOT_FOUND,
            Self::InFlight | Self::OutcomeUnknown | Self::ResponseNotStored => StatusCode::CONFLICT,
            Self::RequestTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::KeyReused | Self::CallerDiffers => StatusCode::UNPROCESSABLE_ENTITY,
            Self::UpstreamUnreachable | Self::UpstreamBroken => StatusCode::BAD_GATEWAY,
            Self::UpstreamTimeout | Self::StillRunning => StatusCode::GATEWAY_TIMEOUT,
            Self::QuotaExceeded => StatusCode::TOO_MANY_REQUESTS,
            Self::StoreUnavailable | Self::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::ExpectationFailed => StatusCode::EXPECTATION_FAILED,
            Self::LoopDetected => StatusCode::LOOP_DETECTED,
            Self::CredentialsUnverifiable => StatusCode::UNAUTHORIZED,
        }
    }

    /// Whether the same request may be sent again as it is.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(
            self,
            Self::InFlight
                | Self::UpstreamUnreachable
                | Self::StillRunning
                | Self::StoreUnavailable
                | Self::Overloaded
                | Self::RequestTimeout
                | Self::QuotaExceeded
        )
    }
}

impl StatusClass {
    pub(super) const ALL: [Self; 6] =
        [Self::Informational, Self::Successful, Self::Redirection, Self::ClientError, Self::ServerError, Self::Other];

    /// Those that any route can answer with.
    pub(super) const USUAL: [Self; 4] = [Self::Successful, Self::Redirection, Self::ClientError, Self::ServerError];

    pub(super) fn of(status: StatusCode) -> Self {
        match status.as_u16() / 100 {
            1 => Self::Informational,
            2 => Self::Successful,
            3 => Self::Redirection,
            4 => Self::ClientError,
            5 => Self::ServerError,
            _ => Self::Other,
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Informational => "1xx",
            Self::Successful => "2xx",
            Self::Redirection => "3xx",
            Self::ClientError => "4xx",
            Self::ServerError => "5xx",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_stands_at_its_index() {
        for (index, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome.index(), index, "{}", outcome.as_str());
        }
    }
}
