//! The file: its pragmas, its schema, and recovery after a crash.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, OptionalExtension, Params, Statement, TransactionBehavior, ffi, params};

use super::error::{self, OpenError};
use super::guard::{self, Guard};
use super::lock::{Lock, sync_directory};
use super::row;
use crate::idempotency::record::{RecordId, Timestamp};
use crate::store::ErrorKind;
use crate::store::clock::{self, Clock};

/// How long a statement waits for another program that has the file open, for example a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the start waits in all until that program lets the log be copied.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long it waits between two tries, besides [`BUSY_TIMEOUT`].
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// In the file's header: "once".
const APPLICATION_ID: i64 = 0x6f6e_6365;

/// Each brings the schema from the version that is its place to the next one.
const MIGRATIONS: [&str; 5] = [
    include_str!("../../../migrations/sqlite/0001_records.sql"),
    include_str!("../../../migrations/sqlite/0002_rules.sql"),
    include_str!("../../../migrations/sqlite/0003_audit.sql"),
    include_str!("../../../migrations/sqlite/0004_deliveries.sql"),
    include_str!("../../../migrations/sqlite/0005_pieces.sql"),
];

/// The tables that previews read and earlier versions did not have: the version that brought each, and an empty one in its
/// place.
const YOUNGER: [(usize, &str); 3] = [
    (2, "CREATE TEMP TABLE rules_period (service, namespace, since, digest, description)"),
    (
        4,
        "CREATE TEMP TABLE delivery (id, token, sequence, origin, lane, accepted_at, queued_at, due, dead_until, attempts, head, \
         note)",
    ),
    (5, "CREATE TEMP TABLE piece (seq, attempt, place, turn, answer)"),
];

/// A file that is ready for the writer.
pub(super) struct Opened {
    pub(super) conn: Connection,
    pub(super) clock: Clock,
    /// How many records stand in each state.
    pub(super) counts: [u64; 3],
    /// How many in-flight records of a dead process were turned unknown.
    pub(super) turned_unknown: Vec<RecordId>,
    /// Last: it must outlive the connection.
    pub(super) guard: Guard,
}

/// Opens, migrates and recovers the file.
pub(super) fn open(lock: &Arc<Lock>) -> Result<Opened, OpenError> {
    let path = lock.path();
    let fail = |error| OpenError::from_sql(path.to_owned(), error);
    guard::check_log_at_start(lock)?;
    let mut conn = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(fail)?;
    if check(&conn, path)? > 0 {
        guard::check_time(lock, last_time(&conn).map_err(fail)?)?;
    }
    migrate(&mut conn, path)?;
    if let Some(pages) = lock.settings.max_pages {
        conn.pragma_update(None, "max_page_count", pages).map_err(fail)?;
    }
    let clock = match &lock.settings.clock {
        Some(clock) => clock.clone(),
        None => clock::steady(start(&conn).map_err(fail)?),
    };
    // The content of the log may have come back from the page cache of a process that ended on a failed sync. Copied
    // into the database and synced there, it is durable before anything is decided by it; and its room serves again.
    make_durable(&conn, path, START_TIMEOUT)?;
    // If this fails for want of room, the next start requires more of the log than needed.
    let _ = guard::forget_log(lock);
    let turned_unknown = recover(&mut conn, clock()).map_err(fail)?;
    sync_directory(path).map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
    let counts = count(&conn).map_err(fail)?;
    let guard = Guard::begin(lock)?;
    Ok(Opened { conn, clock, counts, turned_unknown, guard })
}

/// A second connection, which reads committed data.
pub(super) fn open_reader(lock: &Lock) -> Result<Connection, OpenError> {
    connect(lock.path(), OpenFlags::SQLITE_OPEN_READ_ONLY)
        .map_err(|error| OpenError::from_sql(lock.path().to_owned(), error))
}

pub(super) fn connect(path: &Path, mode: OpenFlags) -> rusqlite::Result<Connection> {
    let conn = Connection::open_with_flags(path, mode | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.set_prepared_statement_cache_capacity(64);
    conn.pragma_update(None, "trusted_schema", false)?;
    conn.pragma_update(None, "temp_store", "memory")?;
    Ok(conn)
}

/// Turns the write-ahead log on. If it cannot, SQLite returns the mode that it uses instead.
pub(super) fn keep_log(conn: &Connection, path: &Path) -> Result<(), OpenError> {
    let mode = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0));
    match mode.map_err(|error| OpenError::from_sql(path.to_owned(), error))? {
        wal if wal.eq_ignore_ascii_case("wal") => Ok(()),
        mode => Err(OpenError::NoLog { path: path.to_owned(), mode }),
    }
}

/// The writer's other pragmas. Sync FULL: a commit has reached the disk when it returns.
///
/// No auto_vacuum: pages that the sweeper frees are used again, and the file keeps the size of its fullest day.
/// Checkpoints are the writer's own, since the automatic ones swallow errors.
fn tune(conn: &Connection) -> rusqlite::Result<()> {
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(()))?;
    // A log that one large batch blew up is cut back to this many bytes when it starts over.
    conn.query_row("PRAGMA journal_size_limit = 67108864", [], |_| Ok(()))?;
    // 16 MiB, in KiB as SQLite has it. No more: commits that split pages walk all of the cache (measured: four times as
    // much takes a quarter off what a store of a million records does), and what is not in it is in the kernel's.
    conn.pragma_update(None, "cache_size", -16_384)
}

fn migrate(conn: &mut Connection, path: &Path) -> Result<(), OpenError> {
    let fail = |error| OpenError::from_sql(path.to_owned(), error);
    // Before anything is changed, even the journal mode: the file may belong to another program.
    check(conn, path)?;
    keep_log(conn, path)?;
    tune(conn).map_err(fail)?;
    let transaction = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(fail)?;
    let version = check(&transaction, path)?;
    for migration in &MIGRATIONS[version..] {
        transaction.execute_batch(migration).map_err(fail)?;
    }
    if version < MIGRATIONS.len() {
        transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(fail)?;
        transaction.pragma_update(None, "user_version", MIGRATIONS.len() as i64).map_err(fail)?;
    }
    transaction.commit().map_err(fail)?;
    if version == 0 {
        // A relative path names another file in another directory.
        tracing::info!(path = %path.display(), "made a new store, since there was none at this path: it knows no earlier request");
    }
    Ok(())
}

/// Lets a connection to a file of an earlier version be read as one of this version. The file does not change.
pub(super) fn complete_former(conn: &Connection, version: usize) -> rusqlite::Result<()> {
    let mut missing = YOUNGER.iter().filter(|(since, _)| version < *since);
    missing.try_for_each(|(_, table)| conn.execute_batch(table))
}

/// The file's schema version, if it is oncegate's and known; 0 where nothing is in it yet.
pub(super) fn check(conn: &Connection, path: &Path) -> Result<usize, OpenError> {
    let fail = |error| OpenError::from_sql(path.to_owned(), error);
    let number = |sql| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(fail);
    let version = number("PRAGMA user_version")?;
    let application = number("PRAGMA application_id")?;
    let is_empty = number("SELECT count(*) FROM sqlite_schema")? == 0;
    if !(application == APPLICATION_ID || is_empty && application == 0 && version == 0) {
        return Err(OpenError::Foreign { path: path.to_owned() });
    }
    match usize::try_from(version) {
        Ok(version) if version <= MIGRATIONS.len() => Ok(version),
        _ => Err(OpenError::Newer {
            path: path.to_owned(),
            found: u32::try_from(version).unwrap_or(u32::MAX),
            known: MIGRATIONS.len() as u32,
        }),
    }
}

/// The start of the clock: the wall clock, but never before the last time in the file.
pub(super) fn start(conn: &Connection) -> rusqlite::Result<Timestamp> {
    let seen = last_time(conn)?;
    let wall = clock::wall();
    let ahead = seen.since(wall);
    if ahead > Duration::from_secs(60) {
        tracing::warn!(
            ahead_seconds = ahead.as_secs(),
            "the system clock is behind the time of the last run: records expire by the later one"
        );
    }
    Ok(seen.max(wall))
}

/// The last time that the file has seen, by its own clock.
pub(super) fn last_time(conn: &Connection) -> rusqlite::Result<Timestamp> {
    let stamp = conn.query_row("SELECT at FROM clock", [], |row| row.get::<_, i64>(0)).optional()?;
    let last_claim = conn
        .query_row("SELECT claimed_at FROM record ORDER BY seq DESC LIMIT 1", [], |row| row.get::<_, i64>(0))
        .optional()?;
    Ok(Timestamp(stamp.max(last_claim).map_or(0, |at| u64::try_from(at).unwrap_or(0))))
}

/// Turns the in-flight records that a dead process left into unknown ones: the outcome of their attempts is not
/// known.
///
/// A few at a time: on a full disk the log has little room, and gets it back by a checkpoint.
fn recover(conn: &mut Connection, now: Timestamp) -> rusqlite::Result<Vec<RecordId>> {
    const AT_ONCE: usize = 64;
    let (mut turned, mut ids) = (0, Vec::new());
    let mut is_retry = false;
    loop {
        match turn_some_unknown(conn, now, AT_ONCE) {
            Ok((0, _)) => return Ok(ids),
            Ok((more, more_ids)) => {
                turned += more;
                ids.extend(more_ids);
                is_retry = false;
                if turned % (64 * AT_ONCE as u64) == 0 {
                    checkpoint(conn)?;
                }
            }
            Err(error) if !is_retry && error::kind(&error) == ErrorKind::Full => {
                is_retry = true;
                checkpoint(conn)?;
            }
            Err(error) => return Err(error),
        }
    }
}

fn turn_some_unknown(conn: &mut Connection, now: Timestamp, limit: usize) -> rusqlite::Result<(u64, Vec<RecordId>)> {
    let transaction = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let some = "seq IN (SELECT seq FROM record INDEXED BY record_lease WHERE state = 0 LIMIT ?2)";
    let values = params![row::time(now), limit as i64];
    let turned = turn_unknown(&mut *transaction.prepare_cached(&turn_unknown_sql(some))?, values)?;
    transaction.execute(STAMP, params![row::time(now)])?;
    transaction.commit()?;
    Ok(turned)
}

/// Copies all of the log into the database, and waits for others that hold this up.
pub(super) fn make_durable(conn: &Connection, path: &Path, patience: Duration) -> Result<(), OpenError> {
    let deadline = Instant::now() + patience;
    loop {
        match checkpoint(conn) {
            Ok(Checkpoint::Complete) => return Ok(()),
            Ok(Checkpoint::HeldUp) if Instant::now() >= deadline => {
                return Err(OpenError::HeldUp { path: path.to_owned() });
            }
            Ok(Checkpoint::HeldUp) => thread::sleep(RETRY_DELAY),
            Err(error) => return Err(OpenError::from_sql(path.to_owned(), error)),
        }
    }
}

enum Checkpoint {
    Complete,
    /// By another program that reads an older state, or copies the log itself.
    HeldUp,
}

fn checkpoint(conn: &Connection) -> rusqlite::Result<Checkpoint> {
    let (is_busy, pages, copied) = conn.query_row("PRAGMA wal_checkpoint(FULL)", [], |row| {
        Ok((row.get::<_, bool>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?))
    })?;
    Ok(if is_busy || pages != copied { Checkpoint::HeldUp } else { Checkpoint::Complete })
}

/// Notes the time.
pub(super) const STAMP: &str =
    "INSERT INTO clock (only, at) VALUES (1, ?1) ON CONFLICT (only) DO UPDATE SET at = max(at, excluded.at)";

/// Turns records unknown by the statement of [`turn_unknown_sql`]: how many, and the ids of those whose id can be read.
pub(super) fn turn_unknown(
    statement: &mut Statement<'_>,
    values: impl Params,
) -> rusqlite::Result<(u64, Vec<RecordId>)> {
    let (mut turned, mut ids) = (0, Vec::new());
    let mut rows = statement.query(values)?;
    while let Some(row) = rows.next()? {
        turned += 1;
        ids.extend(row.get(0).map(RecordId));
    }
    Ok((turned, ids))
}

/// Turns the records that `condition` selects into unknown ones that expire their unknown ttl after `?1`, now, and gives
/// their ids.
/// The sum saturates, where SQLite's own would become a floating-point number.
pub(super) fn turn_unknown_sql(condition: &str) -> String {
    format!(
        "UPDATE record SET state = 2,
            until = CASE WHEN unknown_ttl > 9223372036854775807 - ?1 THEN 9223372036854775807 ELSE ?1 + unknown_ttl END
         WHERE {condition}
         RETURNING id"
    )
}

/// How many in-flight, ended and unknown records there are, by the narrow indexes: the table itself may be large.
pub(super) const COUNTS: [&str; 3] = [
    "SELECT count(*) FROM record INDEXED BY record_lease WHERE state = 0",
    "SELECT count(*) FROM record INDEXED BY record_expiry WHERE state <> 0",
    "SELECT count(*) FROM record INDEXED BY record_unknown WHERE state = 2",
];

/// Holds that all pages can be read, and that each record stands in all indexes: a key that is missing in one would run again.
pub(super) fn check_integrity(conn: &Connection) -> rusqlite::Result<()> {
    let found: String = conn.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if found == "ok" {
        return Ok(());
    }
    Err(rusqlite::Error::SqliteFailure(
        ffi::Error::new(ffi::SQLITE_CORRUPT),
        Some(format!("the first of what it found: {found}")),
    ))
}

/// These counts, which read all of the indexes that a start reads.
pub(super) fn count(conn: &Connection) -> rusqlite::Result<[u64; 3]> {
    let number = |sql| conn.query_row(sql, [], |row| row.get::<_, i64>(0)).map(|count| count as u64);
    let [in_flight, ended, unknown] = COUNTS;
    let unknown = number(unknown)?;
    Ok([number(in_flight)?, number(ended)?.saturating_sub(unknown), unknown])
}
