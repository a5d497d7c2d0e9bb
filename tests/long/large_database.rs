//! PostgreSQL with ten million records: new keys must come as fast as on an empty table, and go on while a million
//! expired records are swept; and what tables and indexes grow to where records come, are renewed, complete and expire.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate::store::postgres::{self, Settings, migrate};
use oncegate::store::{LeaseRenewal, Store};
use oncegate::telemetry::metrics::Metrics;
use oncegate::worker;
use tokio::sync::watch;

use crate::callers::{Rate, Sizes, claim, new_keys, report, rows};
use crate::servers::{Database, Postgres};

/// As a server is that keeps what it acknowledges, sized as the README says. Ids stand anywhere: with a large table nearly
/// each new one finds a page of the index that is in no buffer, unless there are buffers for all of it; and one that was
/// not changed since the last checkpoint, and is written into the write-ahead log as a whole, unless checkpoints are rare.
const SERVER: &[(&str, &str)] = &[
    ("fsync", "on"),
    ("shared_buffers", "2GB"),
    ("max_connections", "100"),
    ("max_wal_size", "16GB"),
    ("checkpoint_timeout", "30min"),
];

/// What the gate writes for a small JSON answer.
const SIZES: Sizes = Sizes { head: 100, answer: 330, ttl: Duration::from_secs(3600) };

/// How often the large table and the empty one take turns, and for how long each time.
const TURNS: usize = 8;
const TURN: Duration = Duration::from_secs(10);

/// The longest that a sweep of a million records may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// How many records are in flight for long while others come and go.
const HELD: usize = 2000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes and gigabytes: tests/run --long runs it"]
async fn a_large_table_is_as_fast_as_an_empty_one_and_swept_while_claims_go_on() {
    let Some(server) = Postgres::with(SERVER) else { return };
    let (empty, large) = (prepared(&server).await, prepared(&server).await);
    let (rows, expired) = (rows(), rows() / 10);
    let began = Instant::now();
    fill(&large, rows, "4000000000000");
    println!("long: filled {rows} records in {:.0?}: {}", began.elapsed(), Size::of(&large));

    let (of_empty, of_large) = (open(&empty).await, open(&large).await);
    let mut ratios = Vec::new();
    for turn in 0..TURNS {
        // Who comes first in one turn comes last in the next.
        let mut rates = [0.0; 2];
        for which in [turn % 2, 1 - turn % 2] {
            let (store, name) = [(&of_empty, "an empty"), (&of_large, "the large")][which];
            let wal = written(&empty);
            let rate = new_keys(store, &SIZES, TURN, || false).await;
            let each = (written(&empty) - wal) / (rate.per_second * TURN.as_secs_f64());
            report(&format!("new keys on {name} table, {each:.0} bytes of write-ahead log each"), &rate);
            rates[which] = rate.per_second;
        }
        ratios.push(rates[1] / rates[0]);
    }
    ratios.sort_by(f64::total_cmp);
    let ratio = (ratios[TURNS / 2 - 1] + ratios[TURNS / 2]) / 2.0;
    println!("long: on the large table {ratio:.2} of the empty one's new keys: {ratios:.2?}");

    fill(&large, expired, "1");
    println!("long: {expired} more that have expired: {}", Size::of(&large));
    let before = new_keys(&of_large, &SIZES, 3 * TURN, || false).await;
    report("new keys before the sweep", &before);
    let (meanwhile, took) = swept(&of_large, &large).await;
    report("new keys while the sweeper works", &meanwhile);
    println!(
        "long: swept {expired} records in {took:.0?}, {:.0}/s: {}",
        expired as f64 / took.as_secs_f64(),
        Size::of(&large)
    );
    large.run("VACUUM oncegate.record");
    println!("long: vacuumed: {}", Size::of(&large));
    of_empty.close().await;
    of_large.close().await;

    assert!(took < PATIENCE, "the sweep does not end");
    // Generous, on a machine that others use too: a table that is scanned would be slower a thousand times.
    assert!(ratio > 0.5, "new keys are slower by far on a large table");
    assert!(meanwhile.slow < 10 * before.slow.max(Duration::from_millis(10)), "claims wait for the sweeper");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: tests/run --long runs it"]
async fn tables_and_indexes_stay_small_where_records_come_and_go() {
    // Looked at often, so that minutes show what hours would.
    let settings = [SERVER, &[("autovacuum_naptime", "10s")]].concat();
    let Some(server) = Postgres::with(&settings) else { return };
    let cared_for = churned(&server, true).await;
    let left_alone = churned(&server, false).await;
    assert!(cared_for < left_alone, "autovacuum gives nothing back: {cared_for} and {left_alone} bytes");
}

/// Lets records come, be renewed, complete and expire for a while; how large heap and indexes are in the end.
async fn churned(server: &Postgres, has_autovacuum: bool) -> u64 {
    let with = if has_autovacuum { "with" } else { "without" };
    let database = prepared(server).await;
    database.run(&format!("ALTER TABLE oncegate.record SET (autovacuum_enabled = {has_autovacuum})"));
    let store = open(&database).await;
    let sizes = Sizes { ttl: Duration::from_secs(15), ..SIZES };
    let (shut_down, watching) = watch::channel(false);
    let settings = worker::Settings { sweep_every: Duration::from_secs(1), ..worker::Settings::beside_callers() };
    let workers = worker::spawn(store.clone(), None, Metrics::new(), settings, watching);
    let mut held = Vec::new();
    for _ in 0..HELD {
        let (id, attempt) = claim(&*store, &sizes).await;
        held.push(LeaseRenewal { id, attempt, lease: Duration::from_secs(30) });
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let renewing = tokio::spawn({
        let (store, held, is_over) = (store.clone(), held.clone(), is_over.clone());
        async move {
            let mut renewals = 0;
            while !is_over.load(Ordering::Relaxed) {
                store.renew(held.clone()).await.unwrap();
                renewals += held.len();
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            renewals
        }
    });
    let before = Size::of(&database);
    for minute in 1..=3 {
        let rate = new_keys(&store, &sizes, Duration::from_secs(60), || false).await;
        report(&format!("{with} autovacuum, minute {minute}, new keys that live for 15 s"), &rate);
        println!("long: {with} autovacuum, minute {minute}: {}", Size::of(&database));
    }
    is_over.store(true, Ordering::Relaxed);
    let renewals = renewing.await.unwrap();
    shut_down.send(true).unwrap();
    workers.await.unwrap();
    store.close().await;
    let after = Size::of(&database);
    // Statistics come late, and a settled record is never one: its state is what indexes are for.
    let hot = after.hot - before.hot;
    println!(
        "long: {with} autovacuum, {renewals} renewals, of which {:.3} touched no index",
        hot as f64 / renewals as f64
    );
    after.heap + after.indexes
}

/// How large the table is, and what of it is dead.
struct Size {
    heap: u64,
    indexes: u64,
    /// The indexes one by one.
    each: String,
    live: u64,
    dead: u64,
    hot: u64,
}

impl Size {
    fn of(database: &Database) -> Self {
        // A session sends what it counted when it has been idle for a second.
        std::thread::sleep(Duration::from_millis(1500));
        let rows = database.run(
            "SELECT pg_relation_size(relid), pg_indexes_size(relid), n_live_tup, n_dead_tup, n_tup_hot_upd,
                (SELECT string_agg(indexrelname || ' ' || pg_relation_size(indexrelid) / 1048576, ', ' ORDER BY 1)
                    FROM pg_stat_user_indexes i WHERE i.relid = t.relid)
             FROM pg_stat_user_tables t WHERE relid = 'oncegate.record'::regclass",
        );
        let text = |column: usize| rows[0][column].clone().unwrap();
        let number = |column: usize| text(column).parse().unwrap();
        Self { heap: number(0), indexes: number(1), live: number(2), dead: number(3), hot: number(4), each: text(5) }
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { heap, indexes, each, live, dead, .. } = self;
        write!(f, "heap {} MiB, indexes {} MiB ({each}), about {live} live and {dead} dead", heap >> 20, indexes >> 20)
    }
}

async fn prepared(server: &Postgres) -> Database {
    let database = server.database();
    migrate(&settings(&database)).await.unwrap();
    database
}

fn settings(database: &Database) -> Settings {
    Settings { servers: database.url.parse().unwrap(), tls: None, connections: Settings::USUAL_CONNECTIONS }
}

async fn open(database: &Database) -> Arc<dyn Store> {
    Arc::new(postgres::Postgres::open(&settings(database)).await.unwrap())
}

/// Bytes of write-ahead log so far.
fn written(database: &Database) -> f64 {
    database.value("SELECT pg_current_wal_insert_lsn() - '0/0'").parse().unwrap()
}

/// Adds completed records that expire at `until`, with ids that stand anywhere. To an empty table the indexes come
/// afterwards, which takes minutes less. The pages of the one by id are as full then as they are where ids come one by
/// one: fuller, each of them would split first.
fn fill(database: &Database, count: u64, until: &str) {
    let session = database.session();
    let indexes = session.run(
        "SELECT format('DROP INDEX %s', indexrelid::regclass), pg_get_indexdef(indexrelid)
         FROM pg_index WHERE indrelid = 'oncegate.record'::regclass AND NOT indisprimary",
    );
    assert!(!indexes.is_empty());
    let column = |n: usize| indexes.iter().map(|row| row[n].clone().unwrap() + ";").collect::<String>();
    let is_first = session.run("SELECT FROM oncegate.record LIMIT 1").is_empty();
    let (head, answer) = (SIZES.head, SIZES.answer);
    let insert = format!(
        "INSERT INTO oncegate.record
            (id, attempt, state, claimed_at, lease_until, expires_at, ttl, unknown_ttl, origin, head, answer)
         SELECT sha256(int8send(i) || int8send({until})), substr(sha256(int8send(-i)), 1, 16), 1, 1, 1, {until}, 1, 1, 1,
            decode(repeat('5a', {head}), 'hex'), decode(repeat('5a', {answer}), 'hex')
         FROM generate_series(1, {count}) i"
    );
    session.run("SET synchronous_commit = off; SET maintenance_work_mem = '512MB'");
    if is_first {
        session.run(&format!(
            "BEGIN; {} ALTER TABLE oncegate.record DROP CONSTRAINT record_pkey; {insert};
             ALTER TABLE oncegate.record ADD CONSTRAINT record_pkey PRIMARY KEY (id) WITH (fillfactor = 69);
             ALTER INDEX oncegate.record_pkey RESET (fillfactor); {} COMMIT",
            column(0),
            column(1)
        ));
    } else {
        session.run(&insert);
    }
    session.run("VACUUM (ANALYZE) oncegate.record");
    session.run("CHECKPOINT");
}

/// New keys while the workers sweep all that [`fill`] let expire; and how long that took.
async fn swept(store: &Arc<dyn Store>, database: &Database) -> (Rate, Duration) {
    let (shut_down, watching) = watch::channel(false);
    let began = Instant::now();
    let workers = worker::spawn(store.clone(), None, Metrics::new(), worker::Settings::beside_callers(), watching);
    let is_swept = Arc::new(AtomicBool::new(false));
    let looking = std::thread::spawn({
        let (session, is_swept) = (database.session(), is_swept.clone());
        move || {
            let left = "SELECT EXISTS (SELECT FROM oncegate.record WHERE state <> 0 AND expires_at <= 1)";
            while session.value(left) == "t" && began.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(250));
            }
            is_swept.store(true, Ordering::Relaxed);
            began.elapsed()
        }
    });
    let rate = new_keys(store, &SIZES, TURN, move || !is_swept.load(Ordering::Relaxed)).await;
    let took = looking.join().unwrap();
    shut_down.send(true).unwrap();
    workers.await.unwrap();
    (rate, took)
}
