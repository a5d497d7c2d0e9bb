//! What fails under load, judged by what happened to every key.

use std::sync::Arc;
use std::time::Duration;

use crate::servers::{Direction, PgBouncer, Postgres, Proxy};
use crate::storm::Storm;
use crate::support::Gate;
use crate::support::store::{migrated, migrated_on};

/// Numbers that are others each time, and can be had again.
fn random() -> fastrand::Rng {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}

fn sleep(random: &mut fastrand::Rng, millis: std::ops::Range<u64>) {
    std::thread::sleep(Duration::from_millis(random.u64(millis)));
}

/// For how long things fail.
const TIME: Duration = Duration::from_secs(9);

/// Crashes a server, and starts it again.
fn crash(server: &Postgres, random: &mut fastrand::Rng) {
    sleep(random, 300..1_800);
    server.stop_immediate();
    sleep(random, 0..1_000);
    server.start_again();
}

/// The server is set to acknowledge what it has not written down yet, as some are: what the gate needs does not depend on
/// it.
#[test]
fn a_server_that_crashes_under_load() {
    let Some(server) = Postgres::with(&[("synchronous_commit", "off"), ("wal_writer_delay", "2s")]) else { return };
    let database = migrated_on(&server);
    let storm = Storm::before(&database.url);
    let gates = storm.start(2, |plan| plan.store_url(&database.url));
    let mut random = random();
    storm.rage(TIME, || crash(&server, &mut random));
    storm.judge().expect_right();
    drop(gates);
}

#[test]
fn a_server_that_crashes_under_load_behind_a_pooler() {
    let Some(server) = Postgres::start() else { return };
    let Some(pooler) = PgBouncer::before(server.address()) else { return };
    let database = migrated_on(&server);
    let storm = Storm::before(&database.url);
    let gates = storm.start(2, |plan| plan.store_url(&pooler.url(&database.url)));
    let mut random = random();
    storm.rage(TIME, || crash(&server, &mut random));
    storm.judge().expect_right();
    drop(gates);
}

/// Commits whose acknowledgement never arrives, statements that never arrive, and messages that break off.
#[test]
fn a_wire_that_is_cut_under_load() {
    let Some(database) = migrated() else { return };
    let proxy = Proxy::before(database.address());
    let storm = Storm::before(&database.url);
    let gates = storm.start(2, |plan| plan.store_url(&proxy.url(&database.url)));
    proxy.cut_at_random(random().u64(..), 0.02);
    for _ in 0..5 {
        storm.rage(TIME, || std::thread::sleep(Duration::from_secs(1)));
        if proxy.cuts() >= 20 {
            break;
        }
    }
    let cuts = proxy.cuts();
    proxy.pass();
    storm.judge().expect_right();
    eprintln!("{cuts} cuts");
    assert!(cuts >= 20, "{cuts} cuts");
    drop(gates);
}

/// Statements that arrive long after whoever sent them has given them up, and answers that do.
#[test]
fn a_wire_that_stalls_under_load() {
    let Some(database) = migrated() else { return };
    let proxy = Proxy::before(database.address());
    let storm = Storm::before(&database.url);
    let gates = storm.start(2, |plan| plan.store_url(&proxy.url(&database.url)));
    let mut random = random();
    storm.rage(TIME, || {
        sleep(&mut random, 200..1_000);
        match random.u8(..3) {
            0 => proxy.stall(Direction::ToServer),
            1 => proxy.stall(Direction::ToClient),
            _ => proxy.stall_all(),
        }
        // Now and then for longer than the gate waits.
        let longest = if random.bool() { 1_500 } else { 8_000 };
        sleep(&mut random, 200..longest);
        proxy.pass();
    });
    storm.judge().expect_right();
    drop(gates);
}

/// Sessions that an operator ends, or whose statements he cancels.
#[test]
fn sessions_that_are_ended_under_load() {
    let Some(database) = migrated() else { return };
    let storm = Storm::before(&database.url);
    let gates = storm.start(2, |plan| plan.store_url(&database.url));
    let mut random = random();
    let operator = database.session();
    let mut ended = 0;
    storm.rage(TIME, || {
        let what = random.choice(["pg_terminate_backend", "pg_cancel_backend"]).expect("two of them");
        let found = operator.run(&format!(
            "SELECT {what}(pid) FROM pg_stat_activity WHERE datname = current_database() \
             AND pid <> pg_backend_pid() AND query LIKE '%oncegate.%\\_v1%' AND random() < 0.3"
        ));
        ended += found.len();
        sleep(&mut random, 1..100);
    });
    eprintln!("{ended} sessions ended or cancelled");
    storm.judge().expect_right();
    assert!(ended >= 20, "{ended} ended");
    drop(gates);
}

/// Replicas that are killed on a wire that is cut, before a pooler that is killed too, before a server that crashes.
#[test]
fn everything_at_once() {
    everything(|storm| storm);
}

/// The same where what is accepted is delivered later.
#[test]
fn everything_at_once_while_gates_deliver() {
    everything(Storm::accepting);
}

fn everything(of: impl Fn(Storm) -> Storm) {
    let Some(server) = Postgres::start() else { return };
    let database = migrated_on(&server);
    let Some(pooler) = PgBouncer::before(server.address()) else { return };
    let proxy = Proxy::before(pooler.address());
    let storm = of(Storm::before(&database.url));
    let url = proxy.url(&database.url);
    let mut gates: Vec<Option<Gate>> = storm.start(3, |plan| plan.store_url(&url)).into_iter().map(Some).collect();
    let places = Arc::clone(&storm.gates);
    let mut random = random();
    proxy.cut_at_random(random.u64(..), 0.005);
    storm.rage(TIME, || {
        sleep(&mut random, 100..900);
        match random.u8(..6) {
            0 => {
                server.stop_immediate();
                sleep(&mut random, 0..300);
                server.start_again();
            }
            1 => {
                pooler.kill9();
                sleep(&mut random, 0..300);
                pooler.start_again();
            }
            2 => proxy.cut_all(),
            _ => {
                let victim = random.usize(..gates.len());
                let plan = gates[victim].take().expect("a gate").kill9();
                places.lock().unwrap()[victim] = None;
                // Where the wire is cut at that moment it does not start.
                let gate = std::iter::repeat_with(|| plan.try_start()).flatten().next().expect("without end");
                places.lock().unwrap()[victim] = Some(gate.address);
                gates[victim] = Some(gate);
            }
        }
    });
    proxy.pass();
    storm.judge().expect_right();
}
