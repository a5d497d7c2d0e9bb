//! Which store the gates of this run keep their records in: `ONCEGATE_TEST_STORE` is `sqlite` (also where it is not set),
//! `postgres`, or `pgbouncer` for PostgreSQL through a pooler.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;

use crate::servers::{Database, Postgres, prepared_database};

/// The word for the store of this run.
pub fn kind() -> String {
    std::env::var("ONCEGATE_TEST_STORE").unwrap_or_else(|_| "sqlite".into())
}

/// A database with the schema for one plan, and the URL that a gate reaches it by; nothing where the store of this run
/// is a file.
#[track_caller]
pub fn of_this_run() -> Option<(Database, String)> {
    match kind().as_str() {
        "sqlite" => None,
        "postgres" => {
            let database = migrated().expect("PostgreSQL, as ONCEGATE_TEST_STORE says");
            let url = database.url.clone();
            Some((database, url))
        }
        "pgbouncer" => {
            let database = migrated().expect("PostgreSQL, as ONCEGATE_TEST_STORE says");
            let url = database.pooled_url().expect("PgBouncer, as ONCEGATE_TEST_STORE says");
            Some((database, url))
        }
        other => panic!("ONCEGATE_TEST_STORE is {other:?}: what store is that?"),
    }
}

/// A database with the schema; nothing (and a failure where `CI` is set) where PostgreSQL is not installed.
#[track_caller]
pub fn migrated() -> Option<Database> {
    // A server may outlive a change of the schema.
    let mut digest = DefaultHasher::new();
    let mut files: Vec<_> = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("migrations/postgres")
        .read_dir()
        .expect("migrations")
        .map(|entry| entry.expect("migrations").path())
        .collect();
    files.sort();
    files.iter().for_each(|file| std::fs::read(file).expect("a migration").hash(&mut digest));
    prepared_database(&format!("migrated_{:016x}", digest.finish()), migrate)
}

/// A database with the schema on a server of the test's own.
#[track_caller]
pub fn migrated_on(server: &Postgres) -> Database {
    let database = server.database();
    migrate(&database.url);
    database
}

/// `oncegate migrate`.
#[track_caller]
pub fn migrate(url: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let done = command.args(["migrate", "--store", url]).output().expect("the binary starts");
    assert!(done.status.success(), "oncegate migrate: {}", String::from_utf8_lossy(&done.stderr));
}
