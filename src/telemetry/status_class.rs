//! The class of a status: the label `class` of `oncegate_responses_total`.

use http::StatusCode;

/// The first digit of a status.
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
