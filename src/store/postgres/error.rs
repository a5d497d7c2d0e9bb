//! Maps errors of PostgreSQL to those of the store.

use std::error::Error as _;
use std::io;

use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{Error as SqlError, error::DbError};

use crate::store::sharded::layout::Misfit;
use crate::store::{Error, ErrorKind};

/// The database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No server can be reached, or none takes connections or writes at this moment. Trying again may help.
    #[error("the database cannot be used at this moment: {0}")]
    Unreachable(String),
    /// The server does not let this user in.
    #[error(
        "the database refuses the login: {0}; see the user and the password in its URL, password_file or PGPASSWORD"
    )]
    Refused(String),
    /// The database is not there.
    #[error("{0}; create it, or name another one in the URL")]
    NoDatabase(String),
    /// The TLS requirements of the client and the server do not match.
    #[error("the TLS requirements were not met: {0}; see sslmode in its URL")]
    Tls(String),
    /// The schema is not there.
    #[error(
        "the database has no schema `oncegate` (or this user may not see it): run `oncegate migrate` first; where gates have \
         used one, restore it instead: a new one knows no key, and every retry runs again"
    )]
    NoSchema,
    /// The schema is older than what this program needs.
    #[error(
        "the schema `oncegate` is at version {found}, and this oncegate needs {needed}: run `oncegate migrate` (gates \
         that run on the older schema go on working)"
    )]
    Older {
        /// Its version.
        found: u32,
        /// The version that this program works on.
        needed: u32,
    },
    /// The schema is newer than what this program can work on.
    #[error(
        "the schema `oncegate` is at version {found}, which gates below version {compatible_with} of the schema cannot \
         work on, and this one knows {known}: run a later oncegate"
    )]
    Newer {
        /// Its version.
        found: u32,
        /// The latest version that a program must know.
        compatible_with: u32,
        /// The latest version that this program knows.
        known: u32,
    },
    /// The user lacks a right that the store needs.
    #[error(
        "the database denies it: {0}; see \"PostgreSQL\" in the documentation for the privileges of the gate's role"
    )]
    Denied(String),
    /// The server holds another store than the one that this process uses.
    #[error(
        "{server} holds another store than {}: it has none of the records, and every key would run again; remove it \
         from [store] url, or make it a standby of the server that has them (to use it on purpose, restart the gate with \
         this server only)",
        if .first == .server { "it held before" } else { .first.as_str() }
    )]
    OtherStore {
        /// The server that is refused.
        server: String,
        /// A server that holds the store in use.
        first: String,
    },
    /// The server is on a lower timeline than one that this process has used.
    #[error(
        "{server} is on timeline {timeline}, and {promoted} was on timeline {newest}: it is an old primary or a restored \
         copy, and lacks the latest records; make it a standby of the new primary (to use it on purpose, restart the gate \
         with this server only)"
    )]
    LeftBehind {
        /// The server that is refused.
        server: String,
        /// Its timeline.
        timeline: u32,
        /// The server that was on the highest timeline.
        promoted: String,
        /// That timeline.
        newest: u32,
    },
    /// Transactions of this user see the database as it was when they began, through a pooler, where a session cannot ask
    /// for another level.
    #[error(
        "transactions of this user begin as `{0}`, and the gate's need `read committed`: ALTER ROLE ... SET \
         default_transaction_isolation = 'read committed', or the same of the database; then have the pooler connect anew \
         (RECONNECT on PgBouncer's console)"
    )]
    Isolation(String),
    /// Another session has tables of the schema locked. Trying again may help.
    #[error(
        "another session has a table of the schema oncegate locked, such as a backup, an open transaction or another \
         `oncegate migrate`; `pg_blocking_pids` of PostgreSQL finds it"
    )]
    Locked,
    /// The list of databases is not the one that the database knows.
    #[error(transparent)]
    Layout(#[from] Misfit),
    /// One of several databases cannot be used.
    #[error("{name}: {error}")]
    Of {
        /// The database.
        name: String,
        /// Why.
        error: Box<OpenError>,
    },
    /// Anything else.
    #[error("the database failed: {0}")]
    Failed(String),
}

impl OpenError {
    /// The same with the name of the database, of several.
    #[must_use]
    pub fn of_database(name: &str, error: Self) -> Self {
        Self::Of { name: name.to_owned(), error: Box::new(error) }
    }

    /// Whether another session has tables of the schema locked.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        match self {
            Self::Of { error, .. } => error.is_locked(),
            other => matches!(other, Self::Locked),
        }
    }

    /// Whether trying again may help, with nothing else changed.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Of { error, .. } => error.is_passing(),
            other => matches!(other, Self::Unreachable(_) | Self::Locked),
        }
    }

    pub(super) fn late() -> Self {
        Self::Unreachable("it did not answer in time".to_owned())
    }

    pub(super) fn of(error: &SqlError) -> Self {
        let message = message(error);
        match error.code() {
            Some(&SqlState::INVALID_PASSWORD | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION) => {
                Self::Refused(message)
            }
            Some(&SqlState::INVALID_CATALOG_NAME) => Self::NoDatabase(message),
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Self::Denied(message),
            Some(&(SqlState::INVALID_SCHEMA_NAME | SqlState::UNDEFINED_TABLE | SqlState::UNDEFINED_FUNCTION)) => {
                Self::NoSchema
            }
            Some(&SqlState::LOCK_NOT_AVAILABLE) => Self::Locked,
            None => Self::without_code(error, message),
            _ if matches!(kind(error), ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Full) => {
                Self::Unreachable(message)
            }
            _ => Self::Failed(message),
        }
    }

    /// The error for operations while no connection can be made.
    pub(super) fn into_error(self) -> Error {
        Error::determinate(ErrorKind::Unavailable, self)
    }

    /// An error of the driver itself. Its kinds differ in their messages only, which tests pin.
    fn without_code(error: &SqlError, message: String) -> Self {
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        // An alert of the server may come behind the handshake.
        let is_refused = source.and_then(io::Error::get_ref).is_some_and(|inner| inner.is::<rustls::Error>());
        match error.to_string().as_str() {
            _ if is_refused => Self::Tls(message),
            // A server that goes away in the middle of it is away; it said no, or there is nothing to agree on.
            "error performing TLS handshake" if source.is_none() => Self::Tls(message),
            // The server wants a password and there is none.
            "invalid configuration" if message.contains("password missing") => {
                Self::Refused("no password is given".to_owned())
            }
            // Or it did not prove that it knows it.
            "invalid configuration" | "authentication error" => Self::Refused(message),
            _ => Self::Unreachable(message),
        }
    }
}

/// The record is another database's: see `fence_v1`.
const FOREIGN: &str = "OG002";

/// In the driver's words.
const LATE: &str = "timeout waiting for server";

/// The message of an error, without values.
pub(super) fn message(error: &SqlError) -> String {
    if let Some(error) = error.as_db_error() {
        return server_message(error);
    }
    // The driver's error for a timeout of this program.
    if error.to_string() == LATE {
        return "it did not answer in time".to_owned();
    }
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn server_message(error: &DbError) -> String {
    let message = format!("{} (SQLSTATE {})", error.message(), error.code().code());
    // A primary has no other reason for it.
    if *error.code() == SqlState::T_R_SERIALIZATION_FAILURE {
        return format!(
            "{message}: the transaction was not `read committed`; look at default_transaction_isolation of the role, of the \
             database and of the server, and have a pooler connect anew"
        );
    }
    if pools_statements(error) {
        return format!(
            "{message}: a pooler gives each statement a session of its own, and the gate needs one for a transaction; set \
             pool_mode = transaction in PgBouncer"
        );
    }
    message
}

/// Whether a pooler refuses a transaction, as PgBouncer does with `pool_mode = statement`.
fn pools_statements(error: &DbError) -> bool {
    *error.code() == SqlState::PROTOCOL_VIOLATION && error.message().contains("statement pooling")
}

/// The kind of an error.
pub(super) fn kind(error: &SqlError) -> ErrorKind {
    let Some(code) = error.code() else { return ErrorKind::Unavailable };
    if code.code() == FOREIGN {
        return ErrorKind::Moved;
    }
    match *code {
        SqlState::DISK_FULL | SqlState::OUT_OF_MEMORY => ErrorKind::Full,
        SqlState::LOCK_NOT_AVAILABLE => ErrorKind::Locked,
        SqlState::QUERY_CANCELED | SqlState::T_R_DEADLOCK_DETECTED | SqlState::T_R_SERIALIZATION_FAILURE => {
            ErrorKind::Timeout
        }
        SqlState::DATA_CORRUPTED | SqlState::INDEX_CORRUPTED => ErrorKind::Corrupt,
        // That stays so.
        SqlState::PROTOCOL_VIOLATION if error.as_db_error().is_some_and(pools_statements) => ErrorKind::Other,
        // A standby, or a primary that has become one.
        SqlState::READ_ONLY_SQL_TRANSACTION => ErrorKind::Unavailable,
        // Connections, resources, an operator's intervention: 08, 53, 57. A database that takes no connections: 55000.
        _ if ["08", "53", "57"].contains(&&code.code()[..2]) || code.code() == "55000" => ErrorKind::Unavailable,
        _ => ErrorKind::Other,
    }
}

/// Whether a statement with this error had no effect and never will.
///
/// An error of level ERROR comes with the end of its transaction: it is taken back before the error is sent. What
/// ends the session (FATAL, PANIC) may come after the commit: where a wait for a standby is broken off by a shutdown,
/// the transaction stands. A lost connection leaves the outcome unknown.
pub(super) fn had_no_effect(error: &SqlError) -> bool {
    error.as_db_error().is_some_and(|error| error.parsed_severity() == Some(Severity::Error))
}

/// Whether an immediate retry may succeed.
pub(super) fn is_transient(error: &SqlError) -> bool {
    let passing = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE];
    error.code().is_some_and(|code| passing.contains(code))
}

/// Whether a statement timed out waiting for a lock.
pub(super) fn is_lock_timeout(error: &SqlError) -> bool {
    error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

/// Whether the connection must be closed.
pub(super) fn must_close(error: &SqlError) -> bool {
    !had_no_effect(error) || error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
}

/// Whether the server says that it takes no writes, which another host may do.
pub(super) fn refuses_writes(error: &SqlError) -> bool {
    let refusals = [SqlState::DISK_FULL, SqlState::READ_ONLY_SQL_TRANSACTION];
    error.code().is_some_and(|code| refusals.contains(code))
}

/// The error of a statement that was sent.
pub(super) fn of_write(error: &SqlError) -> Error {
    let (kind, message) = (kind(error), message(error));
    if had_no_effect(error) { Error::determinate(kind, message) } else { Error::indeterminate(kind, message) }
}

/// The error of a read: it changes nothing, however it ends.
pub(super) fn of_read(error: &SqlError) -> Error {
    Error::determinate(kind(error), message(error))
}
