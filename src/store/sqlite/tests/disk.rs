//! A disk that is full or fails, and how much is written to it.

use std::sync::Mutex;

use rusqlite::ffi;

use super::*;
use crate::store::deliveries::{Acceptance, Lane, NewDelivery};
use crate::store::sqlite::failpoint::{Failpoint, InjectFailures};

#[tokio::test]
async fn a_full_disk_refuses_claims_and_gets_over_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let settings = Settings { max_pages: Some(60), ..Settings::new(&path) };
    let store = Arc::new(Sqlite::open(acquire(&settings)).unwrap());
    let head = Bytes::from(vec![1; 3000]);
    let large = |number| NewRecord { head: head.clone(), ..fresh(number) };
    let mut kept = 0;
    let error = loop {
        match store.claim(id(kept), large(kept)).await {
            Ok(Claim::Inserted(_)) => kept += 1,
            Ok(other) => panic!("{other:?}"),
            Err(error) => break error,
        }
    };
    assert!(kept > 5);
    assert!(matches!(&error, Error::Determinate(cause) if cause.kind == ErrorKind::Full), "{error}");
    assert!(state_of(&store, kept).await.is_none());
    assert_eq!(store.count().await.unwrap(), [u64::from(kept), 0, 0]);

    // In one batch: what needs room fails, what needs none does not.
    let together = (0..20_u16).map(|number| {
        let (store, head) = (store.clone(), head.clone());
        tokio::spawn(async move {
            match number {
                0 => store
                    .settle(id(0), attempt(0), Settlement::Hold { cause: Bytes::from_static(b"cause") })
                    .await
                    .map(drop),
                1 => store.claim(id(1), fresh(999)).await.map(|claim| assert!(matches!(claim, Claim::Exists { .. }))),
                _ => store.claim(id(500 + number), NewRecord { head, ..fresh(500 + number) }).await.map(drop),
            }
        })
    });
    for (number, outcome) in futures_util::future::join_all(together).await.into_iter().enumerate() {
        match (number, outcome.unwrap()) {
            (0 | 1, outcome) => outcome.unwrap(),
            (_, Err(Error::Determinate(cause))) => assert_eq!(cause.kind, ErrorKind::Full),
            (_, other) => panic!("{other:?}"),
        }
    }
    assert_eq!(store.count().await.unwrap(), [u64::from(kept) - 1, 0, 1]);

    // Room comes back, without a restart.
    for number in 1..10.min(kept) {
        store.settle(id(number), attempt(number), Settlement::Release).await.unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.claim(id(900), large(900)).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(store);
    let store = open(&path);
    assert_eq!(state_of(&store, 0).await, Some(State::Unknown));
    assert_eq!(state_of(&store, 900).await, Some(State::Unknown));
}

/// A store with injected failures of commits and checkpoints, and the reports to its fatal handler.
pub(super) fn with_failpoints(path: &Path) -> (Sqlite, Arc<Mutex<Vec<String>>>) {
    let reported = Arc::new(Mutex::new(Vec::new()));
    let listener = reported.clone();
    let fatal: Fatal = Arc::new(move |reason: &str| listener.lock().unwrap().push(reason.to_owned()));
    let store = Sqlite::open(acquire(&Settings { fatal, ..Settings::new(path) })).unwrap();
    (store, reported)
}

#[tokio::test]
async fn a_failed_sync_is_fatal() {
    for at in [Failpoint::Commit, Failpoint::Checkpoint] {
        let dir = tempfile::tempdir().unwrap();
        let (store, reported) = with_failpoints(&dir.path().join("a.db"));
        let end = complete(Bytes::from(vec![1; 1_000_000]));
        for number in 1..=3 {
            store.claim(id(number), fresh(number)).await.unwrap();
        }
        for number in 2..=3 {
            store.settle(id(number), attempt(number), end.clone()).await.unwrap();
        }
        store.ask(InjectFailures(at, ffi::SQLITE_IOERR_FSYNC, 1)).await.unwrap();
        // With the others, enough for a checkpoint.
        let settled = store.settle(id(1), attempt(1), end).await;
        match at {
            Failpoint::Commit => assert!(matches!(settled, Err(Error::Indeterminate(_))), "{settled:?}"),
            Failpoint::Checkpoint => assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}"),
        }
        store.close().await;
        let reported = reported.lock().unwrap();
        assert_eq!(reported.len(), 1, "{reported:?}");
        assert!(reported[0].contains("durable"), "{reported:?}");
    }
}

#[tokio::test]
async fn a_commit_that_failed_otherwise_may_have_happened() {
    let dir = tempfile::tempdir().unwrap();
    let (store, reported) = with_failpoints(&dir.path().join("a.db"));
    store.ask(InjectFailures(Failpoint::Commit, ffi::SQLITE_IOERR_READ, 1)).await.unwrap();
    let claim = store.claim(id(1), fresh(1)).await;
    assert!(matches!(&claim, Err(Error::Indeterminate(_))), "{claim:?}");
    // Asking again settles it.
    assert!(matches!(store.claim(id(1), fresh(1)).await.unwrap(), Claim::Inserted(_)));
    store.ask(InjectFailures(Failpoint::Commit, ffi::SQLITE_FULL, 1)).await.unwrap();
    let claim = store.claim(id(2), fresh(2)).await;
    assert!(matches!(&claim, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{claim:?}");
    assert_eq!(store.count().await.unwrap(), [1, 0, 0]);
    assert!(reported.lock().unwrap().is_empty());
}

#[tokio::test]
async fn it_is_not_ready_while_writes_fail_and_gets_over_it_without_claims() {
    for code in [ffi::SQLITE_FULL, ffi::SQLITE_IOERR_WRITE, ffi::SQLITE_IOERR_READ] {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = with_failpoints(&dir.path().join("a.db"));
        store.ping().await.unwrap();
        // The claim may be tried a second time, by the room that is held.
        store.ask(InjectFailures(Failpoint::Commit, code, 5)).await.unwrap();
        assert!(store.claim(id(1), fresh(1)).await.is_err());
        let error = store.ping().await.unwrap_err();
        assert!(matches!(error.cause().kind, ErrorKind::Full | ErrorKind::Unavailable), "{error}");
        let deadline = Instant::now() + Duration::from_secs(10);
        while store.ping().await.is_err() {
            assert!(Instant::now() < deadline, "{code}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(matches!(store.claim(id(1), fresh(1)).await.unwrap(), Claim::Inserted(_)));
    }
}

/// What panics in the writer.
struct PanicRequest;

impl Request for PanicRequest {
    type Reply = ();

    fn run(&self, _: &mut Session) -> Result<(), crate::store::sqlite::error::Failure> {
        panic!("injected panic")
    }
}

#[tokio::test]
async fn a_panic_of_either_thread_is_fatal() {
    for thread in ["reader", "writer"] {
        let dir = tempfile::tempdir().unwrap();
        let (store, reported) = with_failpoints(&dir.path().join("a.db"));
        match thread {
            "reader" => store.reader.send(ReadRequest::Panic).await.unwrap_or_else(|_| panic!("it reads")),
            _ => drop(store.ask(PanicRequest).await.unwrap_err()),
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while reported.lock().unwrap().is_empty() {
            assert!(Instant::now() < deadline, "{thread}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(*reported.lock().unwrap(), [format!("the store's {thread} panicked")]);
    }
}

/// SQLite tells it as a failed write.
#[tokio::test]
async fn an_exhausted_quota_is_a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (store, reported) = with_failpoints(&dir.path().join("a.db"));
    let reserve = dir.path().join("a.db.reserve");
    store.claim(id(1), fresh(1)).await.unwrap();
    let had_reserve = reserve.exists();
    store.ask(InjectFailures(Failpoint::Commit, ffi::SQLITE_IOERR_WRITE, 1)).await.unwrap();
    let claim = store.claim(id(2), fresh(2)).await;
    assert!(matches!(&claim, Err(Error::Indeterminate(_))), "{claim:?}");
    assert!(!reserve.exists(), "the room is there for the attempts that run");
    store.settle(id(1), attempt(1), Settlement::Hold { cause: Bytes::from_static(b"cause") }).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.claim(id(2), fresh(2)).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(reserve.exists(), had_reserve);
    assert_eq!(store.count().await.unwrap(), [1, 0, 1]);
    assert!(reported.lock().unwrap().is_empty());
}

/// The room that is left is for the attempts that run.
#[tokio::test]
async fn a_full_disk_refuses_what_is_to_be_delivered_later() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = with_failpoints(&dir.path().join("a.db"));
    let accept = |number| {
        let (token, lane, nothing) = (attempt(number), Lane(0), Bytes::new);
        let new =
            NewDelivery { token, origin: OriginId(1), lane, head: nothing(), request: nothing(), body: nothing() };
        store.accept(id(number), new)
    };
    assert!(matches!(accept(1).await.unwrap(), Acceptance::Accepted));
    store.ask(InjectFailures(Failpoint::Commit, ffi::SQLITE_IOERR_WRITE, 1)).await.unwrap();
    assert!(matches!(store.claim(id(2), fresh(2)).await, Err(Error::Indeterminate(_))));
    let refused = accept(3).await;
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Full), "{refused:?}");
    assert!(matches!(accept(1).await.unwrap(), Acceptance::Accepted), "it is kept already");
    // That one is kept shows that claims have room as well.
    let deadline = Instant::now() + Duration::from_secs(10);
    while accept(3).await.is_err() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(matches!(store.claim(id(4), fresh(4)).await.unwrap(), Claim::Inserted(_)));
}

#[tokio::test]
async fn a_batch_that_only_reads_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    store.claim(id(1), fresh(1)).await.unwrap();
    let log = || fs::metadata(dir.path().join("a.db-wal")).unwrap();
    let before = (log().len(), log().modified().unwrap());
    tokio::time::sleep(Duration::from_millis(1100)).await;
    for _ in 0..10 {
        assert!(matches!(store.claim(id(1), fresh(2)).await.unwrap(), Claim::Exists { .. }));
        assert!(matches!(store.claim(id(1), fresh(1)).await.unwrap(), Claim::Inserted(_)));
        store.ping().await.unwrap();
        store.sweep(10).await.unwrap();
        store.expire_leases(10).await.unwrap();
    }
    assert_eq!((log().len(), log().modified().unwrap()), before);
}

#[tokio::test]
async fn the_log_stays_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir.path().join("a.db"));
    for number in 0..120_u16 {
        store.claim(id(number % 7), fresh(number)).await.unwrap();
        store.settle(id(number % 7), attempt(number), complete(Bytes::from(vec![3; 1_000_000]))).await.unwrap();
        store.remove(id(number % 7), attempt(number)).await.unwrap();
    }
    // Four times what a checkpoint waits for would be far too much; 120 MB went through.
    assert!(fs::metadata(dir.path().join("a.db-wal")).unwrap().len() < 32 << 20);
    assert!(fs::metadata(dir.path().join("a.db")).unwrap().len() < 16 << 20, "freed pages are used again");
}
