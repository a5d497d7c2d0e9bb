//! Looking into a file that another process may have in use, without its lock: nothing in it or beside it is changed.

use std::path::Path;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, params};

use super::OpenError;
use super::guard;
use super::listing::beginning_of_answer;
use super::listing::sql::beginning;
use super::lock::{self, DatabasePresence};
use super::{adopt, deliveries, row, schema};
use crate::idempotency::record::{RecordId, Timestamp};
use crate::store::resealing::BEGINNING;
use crate::store::{IdentityChange, NamespaceRuleSet, NamespaceRules, RecordEntry};

/// How often to look at a log that seems to be damaged: the gate that uses it may be writing it, or ending.
const MAX_READS: u32 = 5;

/// How long to wait before another look.
const READ_DELAY: Duration = Duration::from_millis(50);

/// The result of a start with given rules, without changing the file.
#[derive(Debug)]
pub struct Preview {
    /// The changes that it would refuse: see [`crate::store::Store::changes`].
    pub changes: Vec<IdentityChange>,
    /// See [`crate::store::Store::identities`].
    pub on_file: Vec<NamespaceRules>,
    conn: Connection,
    path: std::path::PathBuf,
    now: Timestamp,
}

/// Previews a start with `rules`; `None` if the file holds no store yet. Blocks on the disk.
///
/// The file may be in use, and may have been written by an earlier version of oncegate.
///
/// # Errors
/// See [`OpenError`].
pub fn preview(path: &Path, rules: &[NamespaceRuleSet]) -> Result<Option<Preview>, OpenError> {
    if lock::find_database(path)? != DatabasePresence::Database {
        return Ok(None);
    }
    check_log(path)?;
    let fail = |error| OpenError::from_sql(path.to_owned(), error);
    let conn = schema::connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(fail)?;
    // Only the gate copies the log.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(fail)?;
    match schema::check(&conn, path)? {
        0 => Ok(None),
        version => {
            // A gate that ends meanwhile notes the time in the database first, and then beside it.
            let closed = guard::last_closed(path)?;
            let at = schema::last_time(&conn).map_err(fail)?;
            closed.map_or(Ok(()), |closed| guard::is_current(path, closed, at))?;
            let now = schema::start(&conn).map_err(fail)?;
            schema::complete_former(&conn, version).map_err(fail)?;
            // A start refuses a file in which pages that it reads are damaged. Here all are read.
            schema::check_integrity(&conn).map_err(fail)?;
            let on_file = adopt::on_file(&conn).map_err(fail)?;
            let changes = adopt::changes(&conn, &on_file, rules, now).map_err(fail)?;
            Ok(Some(Preview { changes, on_file, conn, path: path.to_owned(), now }))
        }
    }
}

/// Looks as a start does whether the log has what was acknowledged. A gate that uses it changes it meanwhile, so that
/// only damage that stays is believed.
fn check_log(path: &Path) -> Result<(), OpenError> {
    for _ in 1..MAX_READS {
        if guard::check_log_of(path).is_ok() {
            return Ok(());
        }
        thread::sleep(READ_DELAY);
    }
    guard::check_log_of(path)
}

impl Preview {
    /// Shows every record, without its answer, and how that begins; and every accepted request as the record that it is to have,
    /// how the note of it begins, and that it was accepted. Blocks on the disk.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn for_each(&self, mut visit: impl FnMut(RecordEntry, Option<Bytes>, bool)) -> Result<(), OpenError> {
        let mut read = || {
            let mut all = self.conn.prepare(&format!(
                "SELECT record.id, attempt, state, claimed_at, until, head, service, namespace, route, {}
                 FROM record LEFT JOIN origin ON origin.id = record.origin",
                beginning(BEGINNING)
            ))?;
            let mut rows = all.query([])?;
            while let Some(found) = rows.next()? {
                let listed = RecordEntry {
                    id: RecordId(found.get(0)?),
                    origin: row::origin(found, 6)?,
                    record: row::record(found, 1)?,
                    now: self.now,
                };
                visit(listed, beginning_of_answer(&self.conn, found, 9)?, false);
            }
            let mut queue = self.conn.prepare(&deliveries::select("", ""))?;
            let mut rows = queue.query(params![])?;
            while let Some(found) = rows.next()? {
                let delivery = deliveries::delivery(found, self.now)?;
                let note = delivery.note.clone();
                visit(delivery.as_listed(), note, true);
            }
            Ok(())
        };
        read().map_err(|error| OpenError::from_sql(self.path.clone(), error))
    }
}
