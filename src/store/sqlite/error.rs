//! Maps errors of SQLite to those of the store.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rusqlite::{Error as SqlError, ErrorCode, ffi};

use super::lock::{self, with_suffix};
use crate::idempotency::record::Timestamp;
use crate::store::{Error, ErrorKind};

/// The file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It, its lock or its directory cannot be read or written.
    #[error("cannot open {}: {source}{}", path.display(), hint(path, source))]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not a database.
    #[error("{} is not a SQLite database: name another file, or move this one away", path.display())]
    NotADatabase {
        /// The file.
        path: PathBuf,
    },
    /// It is a database of something else.
    #[error("{} is a SQLite database, but not oncegate's: name another file", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// It is damaged.
    #[error(
        "{} is damaged ({source}): restore it from a backup, or recover what is left with `sqlite3 FILE .recover`; \
         starting over with an empty file forgets every key",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The error of SQLite.
        source: SqlError,
    },
    /// A later version of oncegate wrote it.
    #[error(
        "{} has schema version {found}, and this oncegate knows versions up to {known}: run the version that wrote it, \
         or a later one",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The latest version that this program knows.
        known: u32,
    },
    /// Its disk has no room.
    #[error("cannot open {}: its disk is full", path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// Another program reads it and does not stop, so that its log cannot be made durable.
    #[error(
        "cannot open {}: another program, such as a backup, has it open and holds its log up: end that program",
        path.display()
    )]
    HeldUp {
        /// The file.
        path: PathBuf,
    },
    /// It has more than one name.
    #[error(
        "cannot open {}: it has a second name (a hard link), and the log beside the other name would be missed: remove \
         that name",
        path.display()
    )]
    Linked {
        /// The file.
        path: PathBuf,
    },
    /// It is missing or empty, and other files say that a store was here.
    #[error(
        "cannot open {}: it is {}, but a store was here and left {}. An empty store in its place would let every key of \
         that store run again. Put the database back; or, to begin with an empty store, run `rm -f {}`",
        path.display(),
        if *is_missing { "missing" } else { "empty" },
        listed(traces),
        removed(path, &["", lock::LOG, lock::INDEX, lock::LOCK, lock::RESERVE])
    )]
    NoDatabase {
        /// The file.
        path: PathBuf,
        /// Whether it is missing, rather than empty.
        is_missing: bool,
        /// The files that are there.
        traces: Vec<PathBuf>,
    },
    /// Its log is shorter than what was acknowledged.
    #[error(
        "cannot open {}: its log {} {}, and {acknowledged} frames of it were acknowledged when the store was last in use. \
         The keys and answers in the lost part are nowhere else, and these keys would run again. Put the log back; or, \
         to go on without them, run `rm -f {}`",
        path.display(),
        with_suffix(path, lock::LOG).display(),
        left.map_or_else(|| "is missing".to_owned(), |left| format!("has {left} valid frames")),
        removed(path, &[lock::LOCK])
    )]
    LogLost {
        /// The file.
        path: PathBuf,
        /// How many frames the log has; none where it is missing.
        left: Option<u32>,
        /// How many it had.
        acknowledged: u32,
    },
    /// It and the log beside it are not those that were last in use together.
    #[error(
        "cannot open {}: it and its log {} were not last in use together: one of them was replaced, and the log would put \
         back older records. Put the right file back; or, to go on with this database alone, run `rm -f {}`",
        path.display(),
        with_suffix(path, lock::LOG).display(),
        removed(path, &[lock::LOG, lock::INDEX, lock::LOCK])
    )]
    StrayLog {
        /// The file.
        path: PathBuf,
    },
    /// It is an older copy: the lock file knows of a later end.
    #[error(
        "cannot open {}: it is an older copy of the store that was last closed here: its last entry is of {}, and that \
         store was closed at {}. The keys claimed in between are not in it, and would run again. Put the later file back; \
         or, to go on with this one, run `rm -f {}`",
        path.display(),
        rfc3339(*at),
        rfc3339(*closed),
        removed(path, &[lock::LOCK])
    )]
    Older {
        /// The file.
        path: PathBuf,
        /// The last time that it has.
        at: Timestamp,
        /// When the store was closed.
        closed: Timestamp,
    },
    /// SQLite cannot keep a write-ahead log for it.
    #[error(
        "cannot open {}: no write-ahead log can be kept beside it (its journal mode stays `{mode}`): put it on a \
         local file system",
        path.display()
    )]
    NoLog {
        /// The file.
        path: PathBuf,
        /// The journal mode that SQLite keeps to.
        mode: String,
    },
    /// Anything else.
    #[error("cannot open {}: {source}", path.display())]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// The error of SQLite.
        source: SqlError,
    },
}

impl OpenError {
    pub(super) fn from_sql(path: PathBuf, source: SqlError) -> Self {
        match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => Self::NotADatabase { path },
            Some(ErrorCode::DatabaseCorrupt) => Self::Corrupt { path, source },
            _ if kind(&source) == ErrorKind::Full => Self::Full { path },
            _ => Self::Sqlite { path, source },
        }
    }
}

/// The directory of a store, if it does not exist. One that this process may not look into does not count as missing.
pub(super) fn missing_directory(path: &Path) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.parent().filter(|directory| matches!(directory.try_exists(), Ok(false))).map(Path::to_owned)
}

/// What to do about a file that cannot be opened, as a line of its own; nothing where that is not known.
fn hint(path: &Path, source: &io::Error) -> String {
    let hint = match (missing_directory(path), source.kind()) {
        (Some(directory), _) => {
            let quoted = directory.display().to_string().replace('\'', r"'\''");
            format!("its directory does not exist: install -d -m 0700 '{quoted}'")
        }
        (None, io::ErrorKind::ReadOnlyFilesystem) => {
            "the file system is mounted read-only: name a file on another one in [store] url".to_owned()
        }
        (None, io::ErrorKind::PermissionDenied) => {
            let user = rustix::process::geteuid().as_raw();
            format!("this process runs as the user {user}: give the file and its directory to that user with chown")
        }
        (None, io::ErrorKind::IsADirectory) => {
            format!("it is a directory: name a file in it, such as sqlite:{}", path.join("oncegate.db").display())
        }
        (None, _) => return String::new(),
    };
    format!("\n    hint: {hint}")
}

fn rfc3339(time: Timestamp) -> String {
    /// The last millisecond of the year 9999, the last that can be written.
    const LAST: u64 = 253_402_300_799_999;
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(time.0.min(LAST))).to_string()
}

/// Paths in a sentence.
fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The arguments of a command that removes files beside a database, quoted for a shell.
fn removed(path: &Path, suffixes: &[&str]) -> String {
    let quoted = |suffix: &&str| {
        let path = with_suffix(path, suffix).display().to_string();
        format!("'{}'", path.replace('\'', r"'\''"))
    };
    suffixes.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// Why one request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// It alone, before it wrote anything.
    Request(Error),
    /// The statement, and with it perhaps the transaction.
    Sqlite(SqlError),
}

impl From<SqlError> for Failure {
    fn from(error: SqlError) -> Self {
        match error {
            SqlError::SqliteFailure(..) => Self::Sqlite(error),
            // A value that cannot be read. Requests read before they write.
            other => Self::Request(Error::determinate(kind(&other), other)),
        }
    }
}

/// The kind of an error.
pub(super) fn kind(error: &SqlError) -> ErrorKind {
    use ErrorKind::{Corrupt, Full, Other, Timeout, Unavailable};
    let SqlError::SqliteFailure(failure, _) = error else {
        return match error {
            SqlError::FromSqlConversionFailure(..)
            | SqlError::IntegralValueOutOfRange(..)
            | SqlError::InvalidColumnType(..)
            | SqlError::Utf8Error(..) => Corrupt,
            _ => Other,
        };
    };
    match (failure.code, failure.extended_code) {
        // The index of the log could not grow.
        (ErrorCode::DiskFull, _) | (_, ffi::SQLITE_IOERR_SHMSIZE) => Full,
        (ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase, _) => Corrupt,
        (ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::OperationInterrupted, _) => Timeout,
        (ErrorCode::SystemIoFailure | ErrorCode::CannotOpen | ErrorCode::ReadOnly, _) => Unavailable,
        _ => Other,
    }
}

/// Whether a write may have failed for want of room. SQLite calls a full disk by its name, but not a quota that is
/// exhausted: to it that is a failed write like any other.
pub(super) fn wants_room(error: &SqlError) -> bool {
    let extended_code = error.sqlite_error().map(|failure| failure.extended_code);
    kind(error) == ErrorKind::Full || extended_code == Some(ffi::SQLITE_IOERR_WRITE)
}

/// Whether the disk refused to make something durable. The kernel may then have dropped the pages, and a second try
/// would succeed without them.
pub(super) fn is_failed_sync(error: &SqlError) -> bool {
    matches!(
        error.sqlite_error().map(|failure| failure.extended_code),
        Some(ffi::SQLITE_IOERR_FSYNC | ffi::SQLITE_IOERR_DIR_FSYNC)
    )
}

/// Whether a COMMIT that failed so provably left nothing behind.
///
/// The log's commit frame is written last and makes the transaction valid, so where a write found no room it is not
/// there. After other failures it may be in the file: a crash before the next commit overwrites it would bring it back.
pub(super) fn commit_left_nothing(error: &SqlError) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DiskFull | ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(extended_code: i32) -> SqlError {
        SqlError::SqliteFailure(ffi::Error::new(extended_code), None)
    }

    #[test]
    fn a_file_that_cannot_be_opened_has_a_next_step() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        for (kind, step) in [
            (io::ErrorKind::ReadOnlyFilesystem, "hint: the file system is mounted read-only"),
            (io::ErrorKind::PermissionDenied, "with chown"),
            (io::ErrorKind::IsADirectory, "/oncegate.db"),
        ] {
            let error = OpenError::Io { path: path.clone(), source: kind.into() }.to_string();
            assert!(error.contains("\n    hint: ") && error.contains(step), "{error}");
        }
        let error = OpenError::Io { path: path.clone(), source: io::ErrorKind::Interrupted.into() }.to_string();
        assert!(!error.contains("hint"), "{error}");
        let missing = path.join("missing").join("a.db");
        let error = OpenError::Io { path: missing, source: io::ErrorKind::NotFound.into() }.to_string();
        assert!(error.contains("install -d -m 0700 '"), "{error}");
    }

    #[test]
    fn codes_have_their_meaning() {
        assert_eq!(kind(&failure(ffi::SQLITE_FULL)), ErrorKind::Full);
        assert_eq!(kind(&failure(ffi::SQLITE_IOERR_SHMSIZE)), ErrorKind::Full);
        assert_eq!(kind(&failure(ffi::SQLITE_IOERR_WRITE)), ErrorKind::Unavailable);
        assert_eq!(kind(&failure(ffi::SQLITE_CORRUPT_INDEX)), ErrorKind::Corrupt);
        assert_eq!(kind(&failure(ffi::SQLITE_BUSY)), ErrorKind::Timeout);
        assert_eq!(kind(&failure(ffi::SQLITE_NOMEM)), ErrorKind::Other);
        assert!(wants_room(&failure(ffi::SQLITE_FULL)));
        assert!(wants_room(&failure(ffi::SQLITE_IOERR_WRITE)));
        assert!(!wants_room(&failure(ffi::SQLITE_IOERR_READ)));
        assert!(is_failed_sync(&failure(ffi::SQLITE_IOERR_FSYNC)));
        assert!(is_failed_sync(&failure(ffi::SQLITE_IOERR_DIR_FSYNC)));
        assert!(!is_failed_sync(&failure(ffi::SQLITE_IOERR_WRITE)));
        assert!(commit_left_nothing(&failure(ffi::SQLITE_FULL)));
        assert!(!commit_left_nothing(&failure(ffi::SQLITE_IOERR_SHMSIZE)));
        assert!(!commit_left_nothing(&failure(ffi::SQLITE_IOERR_WRITE)));
    }
}
