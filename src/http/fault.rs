//! Faults in client input.

use std::error::Error as StdError;
use std::io;

use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Code;

/// Why a request is refused. Its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not unambiguously one request.
    #[error("{0}")]
    Malformed(&'static str),
    /// It has an expectation that is not supported (RFC 9110, 10.1.1).
    #[error("the only expectation understood here is 100-continue (RFC 9110, 10.1.1)")]
    Expectation,
    /// The head is larger than `max_header_size`.
    #[error("the request's head, or its trailers, are larger than is allowed here")]
    HeadTooLarge,
    /// It has more lines than `max_headers`.
    #[error("the request has more header lines than are allowed here")]
    TooManyHeaders,
    /// The head did not arrive within `header_timeout`.
    #[error("the request's head did not arrive in time")]
    HeadTooSlow,
    /// The body paused for `body_timeout`.
    #[error("timed out reading the request's body")]
    BodyPaused,
    /// The body came slower than `min_body_rate`.
    #[error("the request's body arrived more slowly than is allowed here")]
    BodyTooSlow,
}

impl Fault {
    /// A header has a control character in its value.
    pub const CONTROL_CHARACTER: Self =
        Self::Malformed("a header has a control character in its value (RFC 9110, 5.5)");

    /// That an expectation is not understood. HTTP/1.0 has none: there they are ignored (RFC 9110, 10.1.1).
    ///
    /// # Errors
    /// [`Fault::Expectation`]
    pub fn of_expectation(value: &[u8], is_http_1_0: bool) -> Result<(), Self> {
        let is_understood = is_http_1_0 || value.eq_ignore_ascii_case(b"100-continue");
        is_understood.then_some(()).ok_or(Self::Expectation)
    }

    /// The code of the response.
    #[must_use]
    pub fn code(self) -> Code {
        match self {
            Self::Malformed(_) => Code::BadRequest,
            Self::Expectation => Code::ExpectationFailed,
            Self::HeadTooLarge | Self::TooManyHeaders => Code::HeadersTooLarge,
            Self::HeadTooSlow | Self::BodyPaused | Self::BodyTooSlow => Code::RequestTimeout,
        }
    }

    /// The limit that was reached.
    pub(in crate::http) fn limit(self) -> Option<Limit> {
        match self {
            Self::Malformed(_) | Self::Expectation => None,
            Self::HeadTooLarge => Some(Limit::MaxHeaderSize),
            Self::TooManyHeaders => Some(Limit::MaxHeaders),
            Self::HeadTooSlow => Some(Limit::HeaderTimeout),
            Self::BodyPaused => Some(Limit::BodyTimeout),
            Self::BodyTooSlow => Some(Limit::MinBodyRate),
        }
    }
}

/// The error that the reader of a body gets.
impl From<Fault> for io::Error {
    fn from(fault: Fault) -> Self {
        Self::new(io::ErrorKind::InvalidData, fault)
    }
}

/// The fault among the causes of an error, if any.
#[must_use]
pub fn fault_of(error: &(dyn StdError + 'static)) -> Option<Fault> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(fault) = error.downcast_ref::<Fault>() {
            return Some(*fault);
        }
        // `io::Error::source` skips the wrapped error and returns the source of that.
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(fault) = inner.and_then(|inner| inner.downcast_ref::<Fault>()) {
            return Some(*fault);
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("broken")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_fault_is_found_beneath_other_errors() {
        let error = Outer(Fault::BodyTooSlow.into());
        assert_eq!(fault_of(&error), Some(Fault::BodyTooSlow));
        assert_eq!(fault_of(&Outer(io::ErrorKind::BrokenPipe.into())), None);
    }
}
