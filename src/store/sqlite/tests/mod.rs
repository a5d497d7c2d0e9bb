mod crash;
mod disk;
mod files;
mod pieces;
mod turns;
mod upgrade;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use proptest::test_runner::Config;
use rusqlite::Connection;

use super::*;
use crate::idempotency::record::State;
use crate::store::contract::{self, Harness, model};
use crate::store::{Expiry, OriginId, clock};

fn acquire(settings: &Settings) -> Lock {
    // A store that was dropped gives its lock back when its threads have ended. A process that another test has just
    // spawned shares it for a moment.
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(lock) = Lock::try_acquire(settings).unwrap() {
            return lock;
        }
        assert!(Instant::now() < deadline, "the lock stays taken");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn open(path: &Path) -> Sqlite {
    Sqlite::open(acquire(&Settings::new(path))).unwrap()
}

fn id(number: u16) -> RecordId {
    let mut bytes = [7; 32];
    bytes[..2].copy_from_slice(&number.to_be_bytes());
    RecordId(bytes)
}

fn attempt(number: u16) -> AttemptToken {
    let mut bytes = [9; 16];
    bytes[..2].copy_from_slice(&number.to_be_bytes());
    AttemptToken(bytes)
}

fn fresh(number: u16) -> NewRecord {
    let hour = Duration::from_secs(3600);
    let head = Bytes::from_static(b"head");
    NewRecord { attempt: attempt(number), origin: OriginId(1), lease: hour, ttl: hour, unknown_ttl: hour, head }
}

fn complete(answer: Bytes) -> Settlement {
    Settlement::Complete { answer, expiry: Expiry::FromNow(Duration::from_secs(3600)) }
}

async fn state_of(store: &Sqlite, number: u16) -> Option<State> {
    store.get(id(number)).await.unwrap().map(|listed| listed.record.state)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    contract::run(async || {
        let dir = tempfile::tempdir().unwrap();
        let (clock, step) = model::stopped_clock();
        let settings = Settings { clock: Some(clock), ..Settings::new(dir.path().join("a.db")) };
        Harness::stepped(Sqlite::open(acquire(&settings)).unwrap(), step).keeping(dir)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract_by_its_own_clock() {
    contract::run(async || {
        let dir = tempfile::tempdir().unwrap();
        Harness::waiting(open(&dir.path().join("a.db"))).keeping(dir)
    })
    .await;
}

#[test]
fn it_behaves_like_a_plain_map() {
    // A quarter of what the store in memory plays: here each step waits for the disk.
    model::check(Config::default().cases / 4, async || {
        let dir = tempfile::tempdir().unwrap();
        let (clock, step) = model::stopped_clock();
        let settings = Settings { clock: Some(clock), ..Settings::new(dir.path().join("a.db")) };
        let store = Sqlite::open(acquire(&settings)).unwrap();
        let reopen: model::Reopen = Box::new(move || {
            let opened: Arc<dyn Store> = Arc::new(Sqlite::open(acquire(&settings)).unwrap());
            Box::pin(std::future::ready(opened))
        });
        model::Subject { harness: Harness::stepped(store, step).keeping(dir), reopen: Some(reopen) }
    });
}

#[tokio::test]
async fn acknowledged_writes_survive_a_reopen() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    store.claim(id(1), fresh(1)).await.unwrap();
    store.claim(id(2), fresh(2)).await.unwrap();
    store.settle(id(2), attempt(2), complete(Bytes::from_static(b"x"))).await.unwrap();
    store.close().await;
    drop(store);
    assert!(!dir.path().join("a.db-wal").exists(), "a clean end leaves one file");

    let store = open(&path);
    assert_eq!(store.turned_unknown().len(), 1);
    assert_eq!(store.count().await.unwrap(), [0, 1, 1]);
    let unknown = store.get(id(1)).await.unwrap().unwrap();
    assert_eq!((unknown.record.state, unknown.record.attempt), (State::Unknown, attempt(1)));
    assert!(unknown.record.until > unknown.now.plus(Duration::from_secs(3500)));
    // Another living process may know the attempt.
    let settled = store.settle(id(1), attempt(1), complete(Bytes::from_static(b"late"))).await.unwrap();
    assert!(matches!(settled, Settled::Done { .. }));
    drop(store);

    let store = open(&path);
    assert_eq!(store.turned_unknown(), []);
    assert_eq!(store.count().await.unwrap(), [0, 2, 0]);
}

#[tokio::test]
async fn a_second_process_does_not_get_in() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings::new(dir.path().join("a.db"));
    let store = Sqlite::open(acquire(&settings)).unwrap();
    assert!(Lock::try_acquire(&settings).unwrap().is_none());
    store.close().await;
    // Closed is enough, dropped is not needed.
    acquire(&settings);
}

#[test]
fn files_that_are_not_ours_are_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |path: &Path| Sqlite::open(acquire(&Settings::new(path))).unwrap_err().to_string();

    let text = dir.path().join("notes.txt");
    fs::write(&text, "not a database at all, but long enough to be looked at as one".repeat(20)).unwrap();
    assert!(refusal(&text).contains("notes.txt is not a SQLite database"));

    let foreign = dir.path().join("foreign.db");
    Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE cat (name TEXT)").unwrap();
    let before = fs::read(&foreign).unwrap();
    assert!(refusal(&foreign).contains("not oncegate's"));
    assert_eq!(fs::read(&foreign).unwrap(), before);

    let newer = dir.path().join("newer.db");
    drop(open(&newer));
    drop(acquire(&Settings::new(&newer)));
    Connection::open(&newer).unwrap().pragma_update(None, "user_version", 7).unwrap();
    let message = refusal(&newer);
    assert!(message.contains("schema version 7") && message.contains("up to 5"), "{message}");

    let damaged = dir.path().join("damaged.db");
    drop(open(&damaged));
    drop(acquire(&Settings::new(&damaged)));
    let mut bytes = fs::read(&damaged).unwrap();
    bytes[4096..].fill(0xa5);
    bytes[100..4096].fill(0x5a);
    fs::write(&damaged, bytes).unwrap();
    let message = refusal(&damaged);
    assert!(message.contains("damaged") && message.contains("backup"), "{message}");
}

#[test]
fn a_start_waits_for_its_log_to_be_copied_and_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    drop(open(&path));
    drop(acquire(&Settings::new(&path)));
    let writer = Connection::open(&path).unwrap();
    let reader = Connection::open(&path).unwrap();
    writer.busy_timeout(Duration::ZERO).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM record").unwrap();
    writer.execute("INSERT INTO clock VALUES (1, 1) ON CONFLICT DO UPDATE SET at = 1", []).unwrap();
    let error = schema::make_durable(&writer, &path, Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("another program"), "{error}");
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(reader);
    });
    schema::make_durable(&writer, &path, Duration::from_secs(60)).unwrap();
    ends.join().unwrap();
}

#[test]
fn a_file_that_gets_no_log_is_refused() {
    let error = schema::keep_log(&Connection::open_in_memory().unwrap(), Path::new("a.db")).unwrap_err();
    assert!(error.to_string().contains("`memory`"), "{error}");
}

#[tokio::test]
async fn time_does_not_run_back_over_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let ahead = clock::wall().plus(Duration::from_secs(86_400));
    let settings = Settings { clock: Some(Arc::new(move || ahead)), ..Settings::new(&path) };
    let store = Sqlite::open(acquire(&settings)).unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    store.remove(id(1), attempt(1)).await.unwrap();
    drop(store);
    let store = open(&path);
    match store.claim(id(2), fresh(2)).await.unwrap() {
        Claim::Inserted(at) => assert!(at >= ahead),
        other => panic!("{other:?}"),
    }
}

/// Every statement of the hot path, and those of the workers, by their index.
#[test]
fn no_statement_scans_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let opened = schema::open(&Arc::new(acquire(&Settings::new(dir.path().join("a.db"))))).unwrap();
    let plan = |statement: &str| {
        let mut explain = opened.conn.prepare(&format!("EXPLAIN QUERY PLAN {statement}")).unwrap();
        // A parameter that is not bound is NULL.
        let mut rows = explain.raw_query();
        let mut lines = Vec::new();
        while let Some(row) = rows.next().unwrap() {
            lines.push(row.get::<_, String>(3).unwrap());
        }
        lines.join("; ")
    };
    use super::pieces::sql as sql_of_pieces;
    use listing::sql::Scan;
    use requests::sql;
    let expire = schema::turn_unknown_sql(sql::LEASE_IS_PAST);
    let walks = [Scan::All, Scan::Unknown].map(|walk| [walk.end_of_chunk(), walk.chunk()]).concat();
    let by_id = [sql::CURRENT, sql::RECORD, sql::RENEW, reader::GET].map(str::to_owned);
    for (statement, index) in [
        (by_id.to_vec(), "USING INDEX record_id (id=?)"),
        (
            [sql::SUPERSEDE, sql::COMPLETE, sql::HOLD, sql::REMOVE].map(str::to_owned).to_vec(),
            "USING INTEGER PRIMARY KEY",
        ),
        (vec![expire], "USING COVERING INDEX record_lease (until<?)"),
        (vec![sql::SWEEP.to_owned()], "USING INDEX record_expiry (until<?)"),
        (walks[..2].to_vec(), "INDEX record_id (id>? AND id<?)"),
        (walks[2..].to_vec(), "INDEX record_unknown (id>? AND id<?)"),
        (
            [sql_of_pieces::ALL, sql_of_pieces::LENGTH, sql_of_pieces::REMOVE, sql_of_pieces::REMOVE_TURN]
                .map(str::to_owned)
                .to_vec(),
            "USING INDEX piece_attempt (attempt=?)",
        ),
        (vec![listing::sql::beginnings()], "USING COVERING INDEX piece_attempt (attempt=? AND place=?)"),
        (vec![listing::sql::LAST_ROW.to_owned()], "USING INTEGER PRIMARY KEY (rowid<?)"),
        (vec![listing::sql::last_rows()], "USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
    ]
    .into_iter()
    .flat_map(|(statements, index)| statements.into_iter().map(move |statement| (statement, index)))
    {
        let plan = plan(&statement);
        assert!(plan.contains(index), "{statement}: {plan}");
        // The origins are few, and read once.
        let plan = plan.replace("SCAN o;", "");
        assert!(!plan.contains("SCAN") && !plan.contains("TEMP B-TREE"), "{statement}: {plan}");
    }
    assert_eq!((plan(sql::CLAIM), plan(sql_of_pieces::PUT)), (String::new(), String::new()));
    assert!(plan(&Scan::InFlight.chunk()).contains("USING INDEX record_lease"));
    for count in schema::COUNTS {
        assert!(plan(count).starts_with("SCAN record USING COVERING INDEX"), "{}", plan(count));
    }
}

#[tokio::test]
async fn one_bad_record_spoils_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = Arc::new(open(&path));
    store.claim(id(1), fresh(1)).await.unwrap();
    Connection::open(&path).unwrap().execute("UPDATE record SET state = 9", []).unwrap();
    let together = (1..20_u16).map(|number| {
        let store = store.clone();
        tokio::spawn(async move { store.claim(id(number), fresh(number)).await })
    });
    for (number, claim) in (1..).zip(futures_util::future::join_all(together).await) {
        match (number, claim.unwrap()) {
            (1, Err(Error::Determinate(cause))) => assert_eq!(cause.kind, ErrorKind::Corrupt),
            (1, other) => panic!("{other:?}"),
            (_, claim) => assert!(matches!(claim.unwrap(), Claim::Inserted(_))),
        }
    }
    assert!(store.remove(id(1), attempt(1)).await.unwrap(), "a removal need not read it");
    assert!(matches!(store.claim(id(1), fresh(1)).await.unwrap(), Claim::Inserted(_)));
}

/// Ten thousand records, half of them unknown, four claimed at a time.
/// A row that something else has written holds up no other.
#[tokio::test]
async fn a_damaged_delivery_is_passed_over() {
    use crate::store::deliveries::{Deliveries as _, Lane, NewDelivery, Take};

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gate.db");
    let store = open(&path);
    for number in 1..=3 {
        let (head, request, body) = (Bytes::new(), Bytes::new(), Bytes::new());
        let new = NewDelivery { token: attempt(number), origin: OriginId(1), lane: Lane(0), head, request, body };
        store.accept(id(number), new).await.unwrap();
    }
    let damaged = "UPDATE delivery SET token = x'01' WHERE sequence = (SELECT min(sequence) FROM delivery)";
    assert_eq!(Connection::open(&path).unwrap().execute(damaged, []).unwrap(), 1);
    let hold = Duration::from_secs(60);
    let take = || Take { origin: OriginId(1), limit: 10, max_bytes: 1 << 20, hold, is_ordered: false };
    let taken = store.take_due(take()).await.unwrap().taken;
    assert_eq!(taken.iter().map(|taken| taken.delivery.id).collect::<Vec<_>>(), [id(2), id(3)]);
    // It is held as the others are, and not read again and again.
    assert!(store.take_due(take()).await.unwrap().taken.is_empty());
}

fn fill(path: &Path) {
    Connection::open(path)
        .unwrap()
        .execute_batch(
            "WITH RECURSIVE n (i) AS (VALUES (0) UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
             INSERT INTO record (id, attempt, state, claimed_at, until, unknown_ttl, origin, head)
             SELECT unhex(printf('%064x', i)), zeroblob(16), 1 + (i % 2), 1 + i / 4, 9e15, 1, 1, x'00' FROM n",
        )
        .unwrap();
}

fn reader(lock: Lock, queue: mpsc::Receiver<ReadRequest>) -> Reader {
    let conn = schema::open_reader(&lock).unwrap();
    Reader::new(conn, clock::steady(clock::wall()), queue, Arc::default(), Arc::new(lock))
}

#[tokio::test]
async fn listings_and_scans_cross_their_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    fill(&path);
    let by = |state| Filter { state, ..Filter::default() };
    for (state, count) in
        [(None, 10_000), (Some(State::Completed), 5_000), (Some(State::Unknown), 5_000), (Some(State::InFlight), 0)]
    {
        assert_eq!(store.scan(by(state), None, 20_000).await.unwrap().records.len(), count);
        let page = store.list(by(state), None, 20_000).await.unwrap();
        let places: Vec<_> = page.records.iter().map(|listed| (listed.record.claimed_at, listed.id)).collect();
        assert!(places.is_sorted_by(|earlier, later| earlier > later) && page.next.is_none());
        assert_eq!(places.len(), count);
    }
    for state in [None, Some(State::Unknown)] {
        let page = store.list(by(state), None, 4_897).await.unwrap();
        let rest = store.list(by(state), page.next, 10_000).await.unwrap();
        let all = store.list(by(state), None, 10_000).await.unwrap();
        let ids = |page: &Page| page.records.iter().map(|listed| listed.id).collect::<Vec<_>>();
        assert_eq!([ids(&page), ids(&rest)].concat(), ids(&all));
    }
    let unknown = by(Some(State::Unknown));
    let chunk = store.scan(unknown.clone(), None, 4_900).await.unwrap();
    let rest = store.scan(unknown, chunk.next, 4_900).await.unwrap();
    assert_eq!((chunk.records.len(), rest.records.len(), rest.next), (4_900, 100, None));
}

#[test]
fn what_takes_long_goes_on_where_it_came_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    drop(open(&path));
    let lock = acquire(&Settings::new(&path));
    fill(&path);
    let (_queue, reads) = mpsc::channel(1);
    let mut reader = reader(lock, reads);
    reader.patience = Duration::ZERO;
    let filter = Filter { older_than: Some(Duration::ZERO), state: Some(State::Completed), ..Filter::default() };
    let mut search = ScanRequest { filter: filter.clone(), after: None, limit: 20_000 };
    let (mut found, mut parts) = (Vec::new(), 0);
    loop {
        let chunk = reader.scan(&search, &|| false).unwrap_or_else(|failure| panic!("{failure:?}"));
        parts += 1;
        assert!(chunk.records.len() < 4_096);
        found.extend(chunk.records.into_iter().map(|listed| listed.id));
        search.after = chunk.next;
        if chunk.next.is_none() {
            break;
        }
    }
    assert_eq!((parts, found.len()), (3, 5_000));
    assert!(found.is_sorted());
    // A filter that none pass as well.
    search.filter.route = Some("nowhere".to_owned());
    let chunk = reader.scan(&search, &|| false).unwrap_or_else(|failure| panic!("{failure:?}"));
    assert!(chunk.records.is_empty() && chunk.next.is_some());

    for (route, count) in [(None, 5_000), (Some("nowhere".to_owned()), 0)] {
        let filter = Filter { route, ..filter.clone() };
        let mut search = ListRequest { filter, after: None, limit: 20_000 };
        let (mut found, mut pages) = (Vec::new(), 0);
        loop {
            let page = reader.list(&search, &|| false).unwrap_or_else(|failure| panic!("{failure:?}"));
            pages += 1;
            assert!(pages < 20, "the pages do not go on");
            found.extend(page.records.into_iter().map(|listed| (listed.record.claimed_at, listed.id)));
            search.after = page.next;
            if page.next.is_none() {
                break;
            }
        }
        assert_eq!(found.len(), count);
        assert!(found.is_sorted_by(|earlier, later| earlier > later));
        assert!(pages > 2);
    }
}

/// As an older version left it, where a record that was claimed anew kept its row.
#[tokio::test]
async fn pages_give_a_record_once_whose_row_is_not_in_the_order_of_claims() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = open(&path);
    fill(&path);
    let moved = "UPDATE record SET claimed_at = 10000 WHERE seq IN (2, 4998, 5000, 5001)";
    assert_eq!(Connection::open(&path).unwrap().execute(moved, []).unwrap(), 4);
    for limit in [1, 2, 3, 7, 1000, 10_000] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = store.list(Filter::default(), after, limit).await.unwrap();
            found.extend(page.records.into_iter().map(|listed| listed.id));
            after = page.next;
            if after.is_none() || limit < 3 && found.len() > 5_010 {
                break;
            }
        }
        let all = found.len();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), all);
        assert!(limit < 3 || all == 10_000);
    }
}

#[tokio::test]
async fn few_listings_are_queued_and_abandoned_ones_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    drop(open(&path));
    let (queue, reads) = mpsc::channel(100);
    let mut reader = reader(acquire(&Settings::new(&path)), reads);
    let ask = || {
        let (reply, page) = oneshot::channel();
        let search = ListRequest { filter: Filter::default(), after: None, limit: 1 };
        queue.try_send(ReadRequest::List { search, reply }).unwrap_or_else(|_| panic!("there is room"));
        page
    };
    let abandoned = (0..reader::MAX_QUEUED).map(|_| ask()).collect::<Vec<_>>();
    reader.let_through();
    drop(abandoned);
    let waiting = (0..reader::MAX_QUEUED + 2).map(|_| ask()).collect::<Vec<_>>();
    reader.let_through();
    drop(queue);
    std::thread::spawn(move || reader.run()).join().unwrap();
    let mut refused = 0;
    for page in waiting {
        refused += usize::from(page.await.unwrap().is_err());
    }
    assert_eq!(refused, 2);
}

#[tokio::test]
async fn operations_beyond_the_queue_limit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { queue: 2, ..Settings::new(dir.path().join("a.db")) };
    let store = Sqlite::open(acquire(&settings)).unwrap();
    let claims = (0..500).map(|number| store.claim(id(number), fresh(number)));
    let mut refused = 0;
    for claim in futures_util::future::join_all(claims).await {
        match claim {
            Ok(_) => {}
            Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable => refused += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(refused > 0);
    assert_eq!(store.count().await.unwrap(), [500 - refused, 0, 0]);
}
