//! Maps errors of Redis to those of the store.

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
    /// It does not let this user in, or denies a right that the store needs.
    #[error("Redis refuses: {0}; see the user and the password in its URL or password_file")]
    Refused(String),
    /// One of both sides does not trust the other's certificate, or they agree on no encryption.
    #[error("the TLS requirements were not met: {0}; see cacert, cert and key in its URL")]
    Tls(String),
    /// It is older than the oldest supported version.
    #[error("Redis {0} is too old: it is to be 6.2 or later")]
    Old(String),
    /// It is not the kind of server that the settings say.
    #[error("this is the wrong kind of Redis: {0}; see [store] url")]
    Unfit(String),
    /// This server holds another store than the one that this process uses.
    #[error(
        "{0} holds another store than this gate has used so far: it has none of the records, and every key would run again; \
         let the URL lead to the server that has them (to use it on purpose, restart the gates)"
    )]
    OtherStore(String),
    /// Anything else.
    #[error("Redis failed: {0}")]
    Failed(String),
}

impl OpenError {
    pub(super) fn of(error: &RedisError) -> Self {
        let message = message(error);
        match error.kind() {
            RedisKind::AuthenticationFailed | RedisKind::Server(ServerErrorKind::NoPerm) => Self::Refused(message),
            _ if [Some("NOAUTH"), Some("WRONGPASS")].contains(&code(error)) => Self::Refused(message),
            _ if is_distrust(error) => Self::Tls(message),
            _ if kind(error) == ErrorKind::Other => Self::Failed(message),
            _ => Self::Unreachable(message),
        }
    }
}

/// Whether it is about certificates and encryption. That may come behind the handshake: the server sees ours last.
fn is_distrust(error: &RedisError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<Arc<dyn StdError + Send + Sync>>());
    let failure = source.and_then(|source| source.downcast_ref::<io::Error>()).and_then(io::Error::get_ref);
    failure.is_some_and(|failure| failure.is::<rustls::Error>())
}

/// The kind of an error.
fn kind(error: &RedisError) -> ErrorKind {
    if error.is_timeout() {
        return ErrorKind::Timeout;
    }
    match (code(error), error.kind()) {
        (Some("OOM" | "MISCONF"), _) => ErrorKind::Full,
        // Written by another program under one of our keys.
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

/// The message of an error. Servers quote commands in theirs, but never their values.
pub(super) fn message(error: &RedisError) -> String {
    match (code(error), error.detail()) {
        (Some(code), _) => match meaning(code) {
            Some(meaning) => format!("it says {code}: {meaning}"),
            None => format!("it says {code}"),
        },
        (None, Some(detail)) => detail.to_owned(),
        (None, None) => error.to_string(),
    }
}

/// What the code of a server's error tells an operator.
fn meaning(code: &str) -> Option<&'static str> {
    Some(match code {
        "OOM" => "its memory is full (maxmemory)",
        "MISCONF" => "it cannot save to its disk, and takes no writes meanwhile",
        "READONLY" => "it is a replica",
        "MASTERDOWN" => "it is a replica that has lost its primary",
        "NOREPLICAS" => "it has fewer replicas than min-replicas-to-write asks for",
        "CLUSTERDOWN" => "no node of its cluster serves some of the slots",
        "LOADING" => "it is still loading its data",
        "BUSY" | "UNKILLABLE" => "a script keeps it busy",
        "NOAUTH" => "it asks for a password, and the gate has none for it",
        "WRONGPASS" => "the user or the password is wrong, or the user is off",
        "NOPERM" => "its ACL does not allow this to the user of the gate",
        "WRONGTYPE" => "another program has written to a key of oncegate",
        _ => return None,
    })
}

/// The code of a server's error. Before 7.0, an error within a script is wrapped in another.
pub(super) fn code(error: &RedisError) -> Option<&str> {
    let code = error.code()?;
    if code != "ERR" && !code.starts_with('@') {
        return Some(code);
    }
    let words = error.detail().unwrap_or_default().split_whitespace();
    words.filter_map(|word| word.strip_prefix('-')).find(|word| REFUSALS.contains(word)).or(Some(code))
}

/// Whether the command had no effect and never will: the server said so before it began, or a script at its first
/// write. A script that fails in the middle leaves the writes that it made.
fn had_no_effect(error: &RedisError) -> bool {
    match code(error) {
        Some(code) => REFUSALS.contains(&code),
        None => {
            let before = [RedisKind::Client, RedisKind::ClusterConnectionNotFound, RedisKind::AuthenticationFailed];
            before.contains(&error.kind()) || error.is_connection_refusal()
        }
    }
}

/// Error codes of commands that had no effect.
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
    let (kind, message) = (kind(error), message(error));
    if had_no_effect(error) { Error::determinate(kind, message) } else { Error::indeterminate(kind, message) }
}

/// The error of a read: it changes nothing, however it ends.
pub(super) fn of_read(error: &RedisError) -> Error {
    Error::determinate(kind(error), message(error))
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    /// What a server says.
    fn response(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = value else { panic!("it is an error") };
        error.into()
    }

    #[test]
    fn refusals_of_the_server_had_no_effect() {
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
            let error = of_write(&response(line));
            assert!(matches!(&error, Error::Determinate(cause) if cause.kind == kind), "{line}: {error:?}");
        }
        let said = message(&response("NOPERM this user has no permissions to run the 'evalsha' command"));
        assert_eq!(said, "it says NOPERM: its ACL does not allow this to the user of the gate");
        assert_eq!(message(&response("MOVED 3999 127.0.0.1:6381")), "it says MOVED");
    }

    #[test]
    fn uncertain_writes_are_indeterminate() {
        let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let lost = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        for error in [response("ERR Error running script: attempt to index a nil value"), timed_out.into(), lost.into()]
        {
            assert!(matches!(of_write(&error), Error::Indeterminate(_)), "{error}");
            assert!(matches!(of_read(&error), Error::Determinate(_)));
        }
    }
}
