//! Which store the gates of this run keep their records in: `ONCEGATE_TEST_STORE` is `sqlite` (also where it is not set),
//! `postgres`, `pgbouncer` for PostgreSQL through a pooler, `redis`, or `cached` for PostgreSQL with a Redis as the cache
//! in front of it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;

use crate::servers::{Database, Postgres, Redis, prepared_database};

/// The word for the store of this run.
pub fn kind() -> String {
    std::env::var("ONCEGATE_TEST_STORE").unwrap_or_else(|_| "sqlite".into())
}

/// A store of one plan's own.
pub struct Own {
    /// The URL that a gate reaches it by.
    pub url: String,
    /// The URL of the cache in front of it.
    pub cache: Option<String>,
    _database: Option<Database>,
    _redis: Option<Redis>,
}

/// The store of one plan; nothing where that of this run is a file.
#[track_caller]
pub fn of_this_run() -> Option<Own> {
    let database = || migrated().expect("PostgreSQL, as ONCEGATE_TEST_STORE says");
    // It starts in about ten milliseconds; channels are not a database's own, so a server that is shared would not do.
    let redis = |settings| Redis::with(settings).expect("Redis, as ONCEGATE_TEST_STORE says");
    let own = match kind().as_str() {
        "sqlite" => return None,
        "postgres" => Own::of(database()),
        "pgbouncer" => {
            let database = database();
            let url = database.pooled_url().expect("PgBouncer, as ONCEGATE_TEST_STORE says");
            Own { url, ..Own::of(database) }
        }
        "redis" => {
            let redis = redis(&[("appendonly", "yes")]);
            Own { url: redis.url(), cache: None, _database: None, _redis: Some(redis) }
        }
        "cached" => {
            let redis = redis(&[]);
            Own { cache: Some(redis.url()), _redis: Some(redis), ..Own::of(database()) }
        }
        other => panic!("ONCEGATE_TEST_STORE is {other:?}: what store is that?"),
    };
    Some(own)
}

impl Own {
    fn of(database: Database) -> Self {
        Self { url: database.url.clone(), cache: None, _database: Some(database), _redis: None }
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
