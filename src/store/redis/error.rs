//! What Redis's errors mean.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;

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
    /// One of both sides does not trust the other's certificate, or they agree on no encryption.
    #[error("no connection that is as safe as asked for: {0}; see cacert, cert and key in [store] url")]
    Tls(String),
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
            _ if [Some("NOAUTH"), Some("WRONGPASS")].contains(&code(error)) => Self::Refused(told),
            _ if is_distrust(error) => Self::Tls(told),
            _ if kind(error) == ErrorKind::Other => Self::Failed(told),
            _ => Self::Unreachable(told),
        }
    }
}

/// Whether it is about certificates and encryption. That may come behind the handshake: the server sees ours last.
fn is_distrust(error: &RedisError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<Arc<dyn StdError + Send + Sync>>());
    let failure = source.and_then(|source| source.downcast_ref::<io::Error>()).and_then(io::Error::get_ref);
    failure.is_some_and(|failure| failure.is::<rustls::Error>())
}

/// What sort of failure an error is.
fn kind(error: &RedisError) -> ErrorKind {
    if error.is_timeout() {
        return ErrorKind::Timeout;
    }
    match (code(error), error.kind()) {
        (Some("OOM" | "MISCONF"), _) => ErrorKind::Full,
        // Somebody else's, under a name of ours.
        (Some("WRONGTYPE"), _) => ErrorKind::Corrupt,
        (
            Some(
                "LOADING" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "TRYAGAIN" | "MOVED" | "ASK" | "NOREPLICAS"
                | "BUSY" | "UNKILLABLE" | "NOAUTH" | "WRONGPASS",
            ),
            _,
        )
        | (None, RedisKind::Io | RedisKind::ClusterConnectionNotFound) => ErrorKind::Unavailable,
        _ => ErrorKind::Other,
    }
}

/// What an error says. Servers quote commands in theirs, but never the values that these carry.
pub(super) fn told(error: &RedisError) -> String {
    match (code(error), error.detail()) {
        (Some(code), _) => format!("it says {code}"),
        (None, Some(detail)) => detail.to_owned(),
        (None, None) => error.to_string(),
    }
}

/// The word that a server's error begins with. Before 7.0 one that a script met stands within another.
pub(super) fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    if code != "ERR" && !code.starts_with('@') {
        return Some(code);
    }
    let words = error.detail().unwrap_or_default().split_whitespace();
    words.filter_map(|word| word.strip_prefix('-')).find(|word| REFUSALS.contains(word)).or(Some(code))
}

/// Whether what was asked did nothing and never will: the server said so before it began, or a script at its first write.
/// One that fails in the middle leaves what it did.
fn did_nothing(error: &RedisError) -> bool {
    match code(error) {
        Some(code) => REFUSALS.contains(&code),
        None => {
            let before = [RedisKind::Client, RedisKind::ClusterConnectionNotFound, RedisKind::AuthenticationFailed];
            before.contains(&error.kind()) || error.is_connection_refusal()
        }
    }
}

/// What servers say instead of doing anything.
const REFUSALS: [&str; 20] = [
    "OOM",
    "MISCONF",
    "READONLY",
    "NOREPLICAS",
    "WRONGTYPE",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MOVED",
    "ASK",
    "CROSSSLOT",
    "BUSY",
    "UNKILLABLE",
    "NOSCRIPT",
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "EXECABORT",
    "NOPROTO",
];

/// The error of what may write.
pub(super) fn of_write(error: &RedisError) -> Error {
    let (kind, told) = (kind(error), told(error));
    if did_nothing(error) { Error::determinate(kind, told) } else { Error::indeterminate(kind, told) }
}

/// The error of a question: it changes nothing, however it ends.
pub(super) fn of_question(error: &RedisError) -> Error {
    Error::determinate(kind(error), told(error))
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    /// What a server says.
    fn said(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = value else { panic!("it is an error") };
        error.into()
    }

    #[test]
    fn what_servers_refuse_did_nothing() {
        let refusals = [
            ("OOM command not allowed when used memory > 'maxmemory'.", ErrorKind::Full),
            ("MISCONF Redis is configured to save RDB snapshots", ErrorKind::Full),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", ErrorKind::Corrupt),
            ("READONLY You can't write against a read only replica.", ErrorKind::Unavailable),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", ErrorKind::Unavailable),
            ("BUSY Redis is busy running a script.", ErrorKind::Unavailable),
            ("CLUSTERDOWN The cluster is down", ErrorKind::Unavailable),
            ("MOVED 3999 127.0.0.1:6381", ErrorKind::Unavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", ErrorKind::Unavailable),
            ("CROSSSLOT Keys in request don't hash to the same slot", ErrorKind::Other),
            ("NOAUTH Authentication required.", ErrorKind::Unavailable),
            // As servers before 7.0 say it of what a script met.
            ("@user_script: 12: -READONLY You can't write against a read only replica.", ErrorKind::Unavailable),
            ("ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM no", ErrorKind::Full),
        ];
        for (line, kind) in refusals {
            let error = of_write(&said(line));
            assert!(matches!(&error, Error::Determinate(cause) if cause.kind == kind), "{line}: {error:?}");
        }
    }

    #[test]
    fn what_may_have_happened_is_not_called_undone() {
        let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let lost = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        for error in [said("ERR Error running script: attempt to index a nil value"), late.into(), lost.into()] {
            assert!(matches!(of_write(&error), Error::Indeterminate(_)), "{error}");
            assert!(matches!(of_question(&error), Error::Determinate(_)));
        }
    }
}
