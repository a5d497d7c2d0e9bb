//! Files that are removed, cut, overwritten or put in place of others.

use fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::disk::with_failpoints;
use super::*;

fn sibling(path: &Path, suffix: &str) -> PathBuf {
    lock::with_suffix(path, suffix)
}

/// What a process that is killed now leaves, in a directory of its own.
fn image(path: &Path) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("a.db");
    for suffix in ["", "-wal", "-shm", ".lock", ".reserve"] {
        if sibling(path, suffix).exists() {
            fs::copy(sibling(path, suffix), sibling(&copy, suffix)).unwrap();
        }
    }
    (dir, copy)
}

fn refusal(path: &Path) -> OpenError {
    match Lock::try_acquire(&Settings::new(path)) {
        Ok(lock) => Sqlite::open(lock.unwrap()).unwrap_err(),
        Err(error) => error,
    }
}

async fn claim(store: &Sqlite, number: u16) {
    assert!(matches!(store.claim(id(number), fresh(number)).await.unwrap(), Claim::Inserted(_)), "{number}");
}

/// Whatever SQLite does with its files on its own account is no damage.
#[test]
fn normal_operation_is_not_damage() {
    let dir = tempfile::tempdir().unwrap();
    let lock = Arc::new(acquire(&Settings::new(dir.path().join("a.db"))));
    let schema::Opened { mut conn, mut guard, .. } = schema::open(&lock).unwrap();
    let other = Connection::open(lock.path()).unwrap();
    for conn in [&conn, &other] {
        conn.pragma_update(None, "synchronous", "OFF").unwrap();
        // Transactions that do not fit spill their pages into the log before they are committed.
        conn.pragma_update(None, "cache_size", 20).unwrap();
    }
    conn.execute_batch("CREATE TABLE filler (id INTEGER PRIMARY KEY, bytes BLOB)").unwrap();
    let fill = "INSERT OR REPLACE INTO filler
        WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
        SELECT (i * 7919 + ?2) % 3000, randomblob(3000) FROM n";
    let mut longest = 0;
    for round in 0..60_i64 {
        let transaction = conn.transaction().unwrap();
        transaction.execute(fill, [1 + round * 37 % 700, round]).unwrap();
        guard.check().unwrap();
        if round % 5 == 2 {
            transaction.rollback().unwrap();
            guard.check().unwrap();
        } else {
            transaction.commit().unwrap();
            guard.committed().unwrap();
        }
        match round % 20 {
            7 => drop(other.execute(fill, [300, round]).unwrap()),
            12 => conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap(),
            17 => other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap(),
            _ => {}
        }
        guard.check().unwrap();
        longest = longest.max(fs::metadata(lock.log_path()).unwrap().len());
    }
    // More than one table of the index.
    assert!(longest > 4096 * 4120, "{longest}");
}

/// How a file is harmed.
type Harm = fn(&Path);

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

fn empty(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
}

/// Cuts the end of the last frame off, and puts zeros there, as a write behind the new end does.
fn hole(log: &Path) {
    let notes = fs::File::open(log.with_extension("db.lock")).unwrap();
    let frames = mark::Marks::read(&notes).unwrap().last().unwrap().frames;
    let file = OpenOptions::new().write(true).open(log).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(32 + u64::from(frames) * 4120 - 100).unwrap();
    file.set_len(length).unwrap();
}

fn start_overwritten(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[0xa5; 20], 10).unwrap();
}

fn table_overwritten(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[0xa5; 16], 140).unwrap();
}

fn slots_overwritten(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[0; 16_384], 16_384).unwrap();
}

/// Both copies of the index's header are whole, and older.
fn index_of_before(path: &Path) {
    let before = fs::read(path.with_extension("before")).unwrap();
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(&before, 0).unwrap();
}

#[tokio::test]
async fn writes_to_damaged_files_are_not_acknowledged() {
    let table: [(&str, Harm, bool); 8] = [
        ("-wal", remove, true),
        ("-wal", empty, false),
        ("-wal", hole, false),
        ("-wal", start_overwritten, false),
        ("-shm", remove, true),
        ("-shm", table_overwritten, true),
        ("-shm", slots_overwritten, true),
        ("-shm", index_of_before, true),
    ];
    for (nth, (suffix, harm, is_whole)) in table.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let (store, reported) = with_failpoints(&path);
        claim(&store, 1).await;
        let file = sibling(&path, suffix);
        fs::copy(&file, file.with_extension("before")).unwrap();
        claim(&store, 2).await;
        harm(&file);
        let claimed = store.claim(id(3), fresh(3)).await;
        assert!(matches!(claimed, Err(Error::Indeterminate(_))), "{nth}: {claimed:?}");
        store.close().await;
        let reported = reported.lock().unwrap().join("; ");
        assert!(reported.contains(&file.display().to_string()), "{nth}: {reported}");
        assert_eq!(reported.contains("nothing is lost"), suffix == "-wal" && is_whole, "{nth}: {reported}");
        let (_dir, path) = image(&path);
        if is_whole {
            let store = open(&path);
            for number in [1, 2] {
                assert_eq!(state_of(&store, number).await, Some(State::Unknown), "{nth}");
            }
            assert_eq!(state_of(&store, 3).await, None, "{nth}: it was not acknowledged");
        } else {
            let refused = refusal(&path);
            assert!(matches!(refused, OpenError::LogLost { .. }), "{nth}: {refused}");
        }
    }
}

/// SQLite sees by itself that the header is no header, and makes the index anew from the log.
#[tokio::test]
async fn an_index_without_a_header_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    for number in 0..20 {
        claim(&store, number).await;
        let index = sibling(&path, "-shm");
        let length = usize::try_from(index.metadata().unwrap().len()).unwrap();
        let file = OpenOptions::new().write(true).open(index).unwrap();
        file.write_all_at(&vec![number as u8; if number % 2 == 0 { length } else { 96 }], 0).unwrap();
    }
    let (_dir, copy) = image(&path);
    assert_eq!(open(&copy).count().await.unwrap(), [0, 0, 20]);
}

#[tokio::test]
async fn a_log_without_its_index_is_still_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (store, reported) = with_failpoints(&path);
    claim(&store, 1).await;
    remove(&sibling(&path, "-shm"));
    remove(&sibling(&path, "-wal"));
    store.claim(id(2), fresh(2)).await.unwrap_err();
    store.close().await;
    assert!(reported.lock().unwrap()[0].contains("nothing is lost"), "{reported:?}");
    assert_eq!(state_of(&open(&path), 1).await, Some(State::Unknown));
}

#[test]
fn a_damaged_index_is_found_before_the_start_as_well() {
    for index in ["record_lease", "record_expiry", "record_unknown"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        drop(open(&path));
        drop(acquire(&Settings::new(&path)));
        assert!(preview(&path, &[]).unwrap().is_some());
        let root = "SELECT rootpage FROM sqlite_schema WHERE name = ?1";
        let page: u32 = Connection::open(&path).unwrap().query_row(root, [index], |row| row.get(0)).unwrap();
        let page = page as usize;
        let mut bytes = fs::read(&path).unwrap();
        bytes[(page - 1) * 4096..page * 4096].fill(0xa5);
        fs::write(&path, bytes).unwrap();
        for refused in [preview(&path, &[]).unwrap_err().to_string(), refusal(&path).to_string()] {
            assert!(refused.contains("damaged"), "{index}: {refused}");
        }
    }
}

/// One bit of an id in the index: the record is not found, and its key would run again. A start does not read all of it.
#[tokio::test]
async fn an_index_that_lacks_a_record_is_found_by_a_check() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    claim(&store, 1).await;
    store.close().await;
    drop(store);
    drop(acquire(&Settings::new(&path)));
    let bytes = fs::read(&path).unwrap();
    let id = id(1).0;
    let places = bytes.windows(id.len()).enumerate().filter(|(_, window)| *window == id).map(|(at, _)| at);
    let places: Vec<usize> = places.collect();
    assert_eq!(places.len(), 2, "in the table and in the index");
    for at in places {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1;
        fs::write(&path, flipped).unwrap();
        let refused = preview(&path, &[]).unwrap_err().to_string();
        assert!(refused.contains("damaged") && refused.contains("record_id"), "{refused}");
    }
    fs::write(&path, bytes).unwrap();
    assert!(preview(&path, &[]).unwrap().is_some());
}

/// It rewrites the database, and the process could not tell it from damage.
#[tokio::test]
async fn a_vacuum_of_a_store_in_use_ends_the_process_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (store, reported) = with_failpoints(&path);
    let other = Connection::open(&path).unwrap();
    other.execute_batch("CREATE TABLE filler AS SELECT randomblob(1000000); DROP TABLE filler").unwrap();
    other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    claim(&store, 1).await;
    other.execute_batch("VACUUM").unwrap();
    other.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).unwrap();
    drop(other);
    store.claim(id(2), fresh(2)).await.unwrap_err();
    store.close().await;
    assert!(reported.lock().unwrap()[0].contains("end oncegate before you run VACUUM"), "{reported:?}");
    assert_eq!(state_of(&open(&path), 1).await, Some(State::Unknown), "nothing is lost");
}

#[tokio::test]
async fn a_database_that_is_cut_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (store, reported) = with_failpoints(&path);
    claim(&store, 1).await;
    empty(&path);
    store.claim(id(2), fresh(2)).await.unwrap_err();
    store.close().await;
    assert!(reported.lock().unwrap()[0].contains("a.db became smaller while it was in use"), "{reported:?}");
    let refused = refusal(&image(&path).1);
    assert!(matches!(refused, OpenError::NoDatabase { is_missing: false, .. }), "{refused}");
}

/// Each is what a killed process leaves, or not.
#[tokio::test]
async fn a_start_finds_what_was_acknowledged_or_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    claim(&store, 1).await;
    store.close().await;
    drop(store);
    let store = open(&path);
    let begun = image(&path);
    claim(&store, 1001).await;
    let earlier = image(&path);
    claim(&store, 1002).await;
    let now = || image(&path);

    let (_dir, whole) = now();
    assert_eq!(state_of(&open(&whole), 1002).await, Some(State::Unknown));

    let (_dir, bare) = now();
    remove(&sibling(&bare, "-wal"));
    let refused = refusal(&bare);
    assert!(matches!(refused, OpenError::LogLost { left: None, .. }), "{refused}");
    assert!(refused.to_string().contains("-wal is missing"), "{refused}");
    // Refusing changed nothing. Without the lock file, it is as the refusal says.
    refusal(&bare);
    remove(&sibling(&bare, ".lock"));
    assert_eq!(state_of(&open(&bare), 1002).await, None);

    // SQLite's shell copies the log into the database, and removes it.
    let (_dir, copied) = now();
    Connection::open(&copied).unwrap().query_row("SELECT count(*) FROM record", [], |_| Ok(())).unwrap();
    assert!(!sibling(&copied, "-wal").exists());
    assert_eq!(state_of(&open(&copied), 1002).await, Some(State::Unknown));

    // The same log, as it was before.
    for (_, before) in [&begun, &earlier] {
        let (_dir, old) = now();
        fs::copy(sibling(before, "-wal"), sibling(&old, "-wal")).unwrap();
        let refused = refusal(&old);
        assert!(matches!(refused, OpenError::LogLost { left: Some(_), .. }), "{refused}");
    }

    // Another log.
    let other_dir = tempfile::tempdir().unwrap();
    let other = other_dir.path().join("a.db");
    let _other_store = open(&other);
    let (_dir, mixed) = now();
    fs::copy(sibling(&other, "-wal"), sibling(&mixed, "-wal")).unwrap();
    let refused = refusal(&mixed);
    assert!(matches!(refused, OpenError::StrayLog { .. }), "{refused}");
}

/// A log starts over with a new header, and a process may be killed before it writes the first frame.
#[tokio::test]
async fn a_log_that_has_only_started_over_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    claim(&store, 1).await;
    let (_dir, killed) = image(&path);
    let log = sibling(&killed, "-wal");
    let whole = fs::read(&log).unwrap();
    let with_generation = |ahead: i32| {
        let word = |at: usize| u32::from_be_bytes([whole[at], whole[at + 1], whole[at + 2], whole[at + 3]]);
        let mut header = whole[..32].to_vec();
        header[16..20].copy_from_slice(&word(16).wrapping_add_signed(ahead).to_be_bytes());
        let [first, second] = wal::checksum(&header[..24], [0, 0], word(0) & 1 == 1);
        header[24..28].copy_from_slice(&first.to_be_bytes());
        header[28..32].copy_from_slice(&second.to_be_bytes());
        fs::write(&log, header).unwrap();
        guard::check_log_of(&killed)
    };
    with_generation(1).unwrap();
    for ahead in [0, -1] {
        let refused = with_generation(ahead).unwrap_err();
        assert!(matches!(refused, OpenError::LogLost { left: Some(0), .. }), "{refused}");
    }
}

#[tokio::test]
async fn a_damaged_log_is_noticed_by_a_look() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    claim(&store, 1).await;
    let (_dir, killed) = image(&path);
    assert!(preview(&killed, &[]).unwrap().is_some());
    hole(&sibling(&killed, "-wal"));
    let refused = preview(&killed, &[]).unwrap_err();
    assert!(matches!(refused, OpenError::LogLost { .. } | OpenError::StrayLog { .. }), "{refused}");
    remove(&sibling(&killed, "-wal"));
    let refused = preview(&killed, &[]).unwrap_err();
    assert!(matches!(refused, OpenError::LogLost { left: None, .. }), "{refused}");
    assert_eq!(refused.to_string(), refusal(&killed).to_string(), "as a start does");
}

#[tokio::test]
async fn an_older_copy_of_a_closed_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let ticks = Arc::new(std::sync::atomic::AtomicU64::new(1_000));
    let settings = || {
        let ticks = Arc::clone(&ticks);
        let clock: Clock =
            Arc::new(move || crate::idempotency::record::Timestamp(ticks.fetch_add(1, Ordering::Relaxed)));
        Settings { clock: Some(clock), ..Settings::new(&path) }
    };
    let run = async |number: u16| {
        let store = Sqlite::open(acquire(&settings())).unwrap();
        claim(&store, number).await;
        store.close().await;
    };
    run(1).await;
    let backup = dir.path().join("backup.db");
    fs::copy(&path, &backup).unwrap();
    run(2).await;
    let latest = fs::read(&path).unwrap();
    fs::copy(&backup, &path).unwrap();
    for refused in [refusal(&path), preview(&path, &[]).unwrap_err()] {
        assert!(matches!(refused, OpenError::Older { .. }), "{refused}");
        assert!(refused.to_string().contains("a.db.lock'"), "{refused}");
    }
    fs::write(&path, latest).unwrap();
    run(3).await;
    // As the refusal says.
    fs::copy(&backup, &path).unwrap();
    remove(&sibling(&path, ".lock"));
    run(4).await;
}

#[test]
fn a_lost_database_is_distinguished_from_a_new_one() {
    for (traces, was_there) in [
        (&[][..], false),
        (&[("", 0)], false),
        (&[(".lock", 0)], false),
        (&[("", 0), (".lock", 0)], false),
        (&[(".lock", 10)], true),
        (&[("", 0), (".lock", 10)], true),
        (&[(".lock", 0), (".reserve", 10)], true),
        (&[("-wal", 0)], true),
        (&[("-shm", 10)], true),
        (&[("", 0), ("-wal", 10)], true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(dir.path()).unwrap().join("o'clock.db");
        for (suffix, length) in traces {
            fs::write(sibling(&path, suffix), vec![1; *length]).unwrap();
        }
        if was_there {
            let refused = refusal(&path).to_string();
            let found = traces.iter().filter(|(suffix, _)| !suffix.is_empty() && (*suffix, 0) != (".lock", 0));
            for (suffix, _) in found {
                let trace = sibling(&path, suffix).display().to_string();
                assert!(traces == [(".lock", 0), (".reserve", 10)] || refused.contains(&trace), "{refused}");
            }
            assert!(refused.contains("'\\''clock.db' "), "{refused}");
            assert!(path.exists() == traces.contains(&("", 0)), "refusing changes nothing");
        } else {
            open(&path);
        }
    }
}

#[tokio::test]
async fn an_orderly_end_needs_no_log() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    for number in 0..3 {
        let store = open(&path);
        claim(&store, number).await;
        store.close().await;
        drop(store);
        assert!(!sibling(&path, "-wal").exists());
        // What an operator does between two runs is the operator's business.
        Connection::open(&path).unwrap().execute_batch("VACUUM").unwrap();
    }
    assert_eq!(open(&path).count().await.unwrap(), [0, 0, 3]);
}

#[test]
fn a_guard_notes_that_the_store_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let lock = Arc::new(acquire(&Settings::new(dir.path().join("a.db"))));
    let _opened = schema::open(&lock).unwrap();
    let note = fs::read_to_string(sibling(lock.path(), ".lock")).unwrap();
    assert!(note.contains("open "), "{note}");
}
