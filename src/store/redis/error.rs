//! What Redis's errors mean.

use redis::{ErrorKind as RedisKind, RedisError, ServerErrorKind};

use crate::store::{Error, ErrorKind};

/// The store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No server can be reached, or it takes no writes at this moment. Trying again may help.
    #[error("Redis cannot be reached: {0}")]
    Unreachable(String),
    /// It does not let this user in, or denies what is needed.
    #[error("Redis refuses: {0}; see the user and the password in [store] url or password_file")]
    Refused(String),
    /// It is older than what is needed.
    #[error("Redis {0} is too old: it is to be 6.2 or later")]
    Old(String),
    /// It is not the kind of server that the settings say.
    #[error("this is the wrong kind of Redis: {0}; see [store] url")]
    Unfit(String),
    /// Anything else.
    #[error("Redis failed: {0}")]
    Failed(String),
}

impl OpenError {
    pub(super) fn of(error: &RedisError) -> Self {
        let told = told(error);
        match error.kind() {
            RedisKind::AuthenticationFailed | RedisKind::Server(ServerErrorKind::NoPerm) => Self::Refused(told),
            _ if kind(error) == ErrorKind::Other => Self::Failed(told),
            _ => Self::Unreachable(told),
        }
    }
}

/// What sort of failure an error is.
fn kind(error: &RedisError) -> ErrorKind {
    if error.is_timeout() {
        return ErrorKind::Timeout;
    }
    match error.kind() {
        RedisKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ReadOnly
            | ServerErrorKind::TryAgain
            | ServerErrorKind::Moved
            | ServerErrorKind::Ask,
        )
        | RedisKind::Io
        | RedisKind::ClusterConnectionNotFound
        | RedisKind::MasterNameNotFoundBySentinel
        | RedisKind::NoValidReplicasFoundBySentinel => ErrorKind::Unavailable,
        _ => match error.code() {
            Some("OOM" | "MISCONF") => ErrorKind::Full,
            Some("NOREPLICAS" | "BUSY" | "UNKILLABLE") => ErrorKind::Unavailable,
            _ => ErrorKind::Other,
        },
    }
}

/// What an error says. Servers quote commands in theirs, but never the values that these carry.
pub(super) fn told(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), _) => format!("it says {code}"),
        (None, Some(detail)) => detail.to_owned(),
        (None, None) => error.to_string(),
    }
}

/// Whether what was asked did nothing and never will: the server said so before it began. A script that fails in the
/// middle leaves what it did.
fn did_nothing(error: &RedisError) -> bool {
    match error.kind() {
        RedisKind::Server(ServerErrorKind::ResponseError) => false,
        RedisKind::Server(_) => true,
        RedisKind::Extension => {
            error.code().is_some_and(|code| ["OOM", "MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE"].contains(&code))
        }
        RedisKind::Client | RedisKind::ClusterConnectionNotFound | RedisKind::AuthenticationFailed => true,
        _ => error.is_connection_refusal(),
    }
}

/// The error of what may write.
pub(super) fn of_write(error: &RedisError) -> Error {
    let (kind, told) = (kind(error), told(error));
    if did_nothing(error) { Error::determinate(kind, told) } else { Error::indeterminate(kind, told) }
}

/// The error of a question: it changes nothing, however it ends.
pub(super) fn of_question(error: &RedisError) -> Error {
    Error::determinate(kind(error), told(error))
}
