//! What gRPC says over HTTP of how a call ended.
//!
//! The source is gRPC's "gRPC over HTTP2" (`PROTOCOL-HTTP2.md`) and "Status codes and their use in gRPC"
//! (`statuscodes.md`).

use http::{HeaderName, HeaderValue};

use super::settle::OutcomeAction;

/// How a call ended.
pub const STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// Why it ended so, percent-encoded.
pub const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// More about why, in binary.
pub const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
/// What says how a call ended, and why.
pub const ENDING: [HeaderName; 3] = [STATUS, MESSAGE, DETAILS];
/// How many milliseconds a client that retries by itself waits first; a negative number: it does not retry.
pub const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
/// How long the client waits at most.
pub const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// A status of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// 0
    Ok,
    /// 1
    Cancelled,
    /// 2
    Unknown,
    /// 3
    InvalidArgument,
    /// 4
    DeadlineExceeded,
    /// 5
    NotFound,
    /// 6
    AlreadyExists,
    /// 7
    PermissionDenied,
    /// 8
    ResourceExhausted,
    /// 9
    FailedPrecondition,
    /// 10
    Aborted,
    /// 11
    OutOfRange,
    /// 12
    Unimplemented,
    /// 13
    Internal,
    /// 14
    Unavailable,
    /// 15
    DataLoss,
    /// 16
    Unauthenticated,
}

impl Status {
    /// Every status, in the order of their numbers.
    pub const ALL: [Self; 17] = {
        use Status::*;
        [
            Ok,
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
            Unauthenticated,
        ]
    };

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Its name, such as `UNAVAILABLE`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Cancelled => "CANCELLED",
            Self::Unknown => "UNKNOWN",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Aborted => "ABORTED",
            Self::OutOfRange => "OUT_OF_RANGE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
            Self::DataLoss => "DATA_LOSS",
            Self::Unauthenticated => "UNAUTHENTICATED",
        }
    }

    /// Reads what stands behind `grpc:` in the configuration: the number or the name of a status.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == text || status.number().to_string() == text)
    }

    /// What a call that ended so does to its record, where no entry of `outcomes` says otherwise.
    ///
    /// As the HTTP status does that it stands for (`google.rpc.Code` names one for each): what was refused before it had
    /// an effect is released, and what is an answer is stored. But statuses that libraries and proxies give of themselves
    /// hold, because the gate cannot tell those from a server's own (`statuscodes.md`): a call that was cut off in the middle
    /// (`UNAVAILABLE` too), and an answer that was too large to be sent when its effect was there (`RESOURCE_EXHAUSTED`).
    pub(super) fn default_action(self) -> OutcomeAction {
        match self {
            Self::Ok
            | Self::InvalidArgument
            | Self::NotFound
            | Self::AlreadyExists
            | Self::PermissionDenied
            | Self::FailedPrecondition
            | Self::Aborted
            | Self::OutOfRange => OutcomeAction::Store,
            // 501 and 401.
            Self::Unimplemented | Self::Unauthenticated => OutcomeAction::Release,
            // 504, 499, 429, 503, and the others of 500.
            Self::DeadlineExceeded
            | Self::Cancelled
            | Self::ResourceExhausted
            | Self::Unavailable
            | Self::Unknown
            | Self::Internal
            | Self::DataLoss => OutcomeAction::Hold,
        }
    }
}

/// Whether a body is whole messages: each has a byte that says whether it is compressed, and its length in four bytes.
#[must_use]
pub fn are_messages(mut body: &[u8]) -> bool {
    while let Some((&[flag, a, b, c, d], rest)) = body.split_first_chunk() {
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        match rest.get(length..) {
            Some(next) if flag <= 1 => body = next,
            _ => return false,
        }
    }
    body.is_empty()
}

/// How a call ended, by one value of `grpc-status`. An unknown number counts as `UNKNOWN`; a value that is not a number is
/// no status.
#[must_use]
pub fn status(value: &HeaderValue) -> Option<Status> {
    let digits = value.as_bytes();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number: usize = std::str::from_utf8(digits).ok()?.parse().unwrap_or(usize::MAX);
    Some(Status::ALL.get(number).copied().unwrap_or(Status::Unknown))
}

/// A message as `grpc-message` carries it: percent-encoded but for visible ASCII and spaces.
#[must_use]
pub fn message(text: &str) -> HeaderValue {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => out.extend(["%".to_owned(), format!("{byte:02X}")]),
        }
    }
    // All of it is visible ASCII or a space.
    HeaderValue::try_from(out).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_stands_at_its_number() {
        for (number, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(status.number()), number);
            assert_eq!(Status::parse(status.name()), Some(status));
            assert_eq!(Status::parse(&number.to_string()), Some(status));
        }
        for text in ["17", "-1", "014", "unavailable", "", " 1"] {
            assert_eq!(Status::parse(text), None, "{text}");
        }
    }

    #[test]
    fn statuses_are_read() {
        for (text, expected) in [
            ("0", Some(Status::Ok)),
            ("14", Some(Status::Unavailable)),
            ("014", Some(Status::Unavailable)),
            ("17", Some(Status::Unknown)),
            ("99999999999999999999999", Some(Status::Unknown)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("OK", None),
        ] {
            assert_eq!(status(&HeaderValue::from_static(text)), expected, "{text}");
        }
    }

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(message("50% of é\n~"), "50%25 of %C3%A9%0A~");
        assert_eq!(message(""), "");
    }
}
