//! SQLite with ten million records: new keys must come as fast as on an empty file, and go on while a million expired
//! records are swept.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate::store::Store;
use oncegate::store::sqlite::{Lock, Settings, Sqlite};
use oncegate::telemetry::metrics::Metrics;
use oncegate::worker;
use rusqlite::Connection;
use tokio::sync::watch;

use crate::callers::{Sizes, new_keys, report, rows};

/// How long each rate is measured.
const MEASURED: Duration = Duration::from_secs(20);

/// The longest that a sweep of a million records may take.
const PATIENCE: Duration = Duration::from_secs(600);

const SIZES: Sizes = Sizes { head: 80, answer: 60, ttl: Duration::from_secs(3600) };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes and gigabytes: tests/run --long runs it"]
async fn a_large_table_is_as_fast_as_an_empty_one_and_swept_while_claims_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, expired) = (rows(), rows() / 10);

    let store = open(&dir.path().join("empty.db"));
    let empty = new_keys(&store, &SIZES, MEASURED, || false).await;
    report("new keys on an empty file", &empty);
    store.close().await;

    let path = dir.path().join("large.db");
    open(&path).close().await;
    let began = Instant::now();
    fill(&path, rows - expired, 9_000_000_000_000);
    let size = std::fs::metadata(&path).unwrap().len() / (1 << 20);
    println!("long: filled {} records, {size} MiB, in {:.0?}", rows - expired, began.elapsed());

    let began = Instant::now();
    let store = open(&path);
    println!("long: opened in {:.1?}", began.elapsed());
    let large = new_keys(&store, &SIZES, MEASURED, || false).await;
    report("new keys on the large file", &large);
    store.close().await;
    drop(store);

    fill(&path, expired, 1);
    let store = open(&path);
    let [_, standing, _] = store.count().await.unwrap();
    let (shut_down, watching) = watch::channel(false);
    let began = Instant::now();
    let workers = worker::spawn(store.clone(), None, Metrics::new(), worker::Settings::default(), watching);
    let is_swept = Arc::new(AtomicBool::new(false));
    let looking = tokio::spawn({
        let (path, is_swept) = (path.clone(), is_swept.clone());
        async move {
            while has_expired(&path) && began.elapsed() < PATIENCE {
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            is_swept.store(true, Ordering::Relaxed);
            began.elapsed()
        }
    });
    let meanwhile = new_keys(&store, &SIZES, MEASURED, move || !is_swept.load(Ordering::Relaxed)).await;
    let took = looking.await.unwrap();
    shut_down.send(true).unwrap();
    workers.await.unwrap();
    report("new keys while the sweeper works", &meanwhile);
    println!("long: swept {expired} records in {took:.0?}, {:.0}/s", expired as f64 / took.as_secs_f64());

    let [_, left, _] = store.count().await.unwrap();
    assert!(took < PATIENCE, "the sweep does not end");
    assert!(left > standing - expired, "claims went on");
    store.close().await;
    // Generous, on a machine that others use too: a table that is scanned would be slower a thousand times.
    assert!(large.per_second > empty.per_second / 10.0, "new keys are slower by far on a large table");
    assert!(meanwhile.per_second > large.per_second / 10.0, "the sweeper keeps claims from their turn");
    assert!(meanwhile.slow < Duration::from_secs(1), "a claim waits long for the sweeper");
}

fn open(path: &Path) -> Arc<dyn Store> {
    // A store gives its lock back when its threads have ended.
    let lock = loop {
        match Lock::try_acquire(&Settings::new(path)).unwrap() {
            Some(lock) => break lock,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    Arc::new(Sqlite::open(lock).unwrap())
}

/// Adds completed records that expire at `until`, and whose ids stand anywhere. Indexes are made afterwards: ten million
/// insertions at random places would take hours on a slow disk.
fn fill(path: &Path, count: u64, until: u64) {
    let conn = Connection::open(path).unwrap();
    let indexes: Vec<(String, String)> = {
        let sql =
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'record' AND sql IS NOT NULL";
        let mut statement = conn.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    };
    assert!(!indexes.is_empty());
    let dropped = indexes.iter().map(|(name, _)| format!("DROP INDEX {name};")).collect::<String>();
    let made = indexes.iter().map(|(_, sql)| format!("{sql};")).collect::<String>();
    conn.execute_batch(&format!(
        "PRAGMA synchronous = OFF; PRAGMA cache_size = -262144;
         BEGIN; {dropped}
         WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < {count})
         INSERT INTO record (id, attempt, state, claimed_at, until, unknown_ttl, origin, head, answer)
         SELECT randomblob(32), randomblob(16), 1, 1, {until}, 1, 1, zeroblob(80), zeroblob(60) FROM n;
         {made} COMMIT; PRAGMA wal_checkpoint(TRUNCATE);"
    ))
    .unwrap();
}

/// Whether a record of [`fill`] that has expired is still there.
fn has_expired(path: &Path) -> bool {
    let conn = Connection::open_with_flags(path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    conn.busy_timeout(Duration::from_secs(10)).unwrap();
    let sql = "SELECT EXISTS (SELECT 1 FROM record WHERE state <> 0 AND until <= 1)";
    conn.query_row(sql, [], |row| row.get(0)).unwrap()
}
