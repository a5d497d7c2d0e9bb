//! Looking into a file that another process may have in use, without its lock: nothing in it or beside it is changed.

use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use super::OpenError;
use super::lock::{self, Found};
use super::{adopt, schema};
use crate::idempotency::record::Timestamp;
use crate::store::{Identity, IdentityChange, NamespaceRules};

/// What a start with some rules would find in a file.
#[derive(Debug)]
pub struct Preview {
    /// What it would refuse: see [`crate::store::Store::changes`].
    pub changes: Vec<IdentityChange>,
    /// See [`crate::store::Store::identities`].
    pub on_file: Vec<NamespaceRules>,
}

/// What a start with `rules` would find; nothing where there is no store in the file yet. Blocks on the disk.
///
/// The file may be in use, and may have been written by an earlier version of oncegate.
///
/// # Errors
/// See [`OpenError`].
pub fn preview(path: &Path, rules: &[Identity]) -> Result<Option<Preview>, OpenError> {
    if lock::look_for_database(path)? != Found::Database {
        return Ok(None);
    }
    let fail = |error| OpenError::from_sql(path.to_owned(), error);
    let conn = schema::connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(fail)?;
    // What the log holds is the gate's to copy.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(fail)?;
    match schema::check(&conn, path)? {
        0 => Ok(None),
        version => {
            let has_periods = version >= schema::WITH_PERIODS;
            compare(&conn, has_periods, schema::start(&conn).map_err(fail)?, rules).map(Some).map_err(fail)
        }
    }
}

fn compare(conn: &Connection, has_periods: bool, now: Timestamp, rules: &[Identity]) -> rusqlite::Result<Preview> {
    let on_file = if has_periods { adopt::on_file(conn)? } else { adopt::on_former_file(conn)? };
    Ok(Preview { changes: adopt::changes(conn, &on_file, rules, now)?, on_file })
}
