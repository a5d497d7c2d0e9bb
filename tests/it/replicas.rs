//! Three replicas on one database, killed and started again under load: one run for each claim, one answer for each key.

use std::sync::Arc;
use std::time::Duration;

use crate::servers::Database;
use crate::storm::Storm;
use crate::support::Gate;
use crate::support::store::migrated;

/// For how long replicas are killed.
const TIME: Duration = Duration::from_secs(12);

#[test]
fn replicas_that_are_killed_under_load() {
    let Some(database) = migrated() else { return };
    killed_under_load(&database, &database.url);
}

#[test]
fn replicas_that_are_killed_under_load_behind_a_pooler() {
    let Some(database) = migrated() else { return };
    let Some(url) = database.pooled_url() else { return };
    killed_under_load(&database, &url);
}

fn killed_under_load(database: &Database, url: &str) {
    let storm = Storm::before(&database.url);
    let mut gates: Vec<Option<Gate>> = storm.start(3, |plan| plan.store_url(url)).into_iter().map(Some).collect();
    let places = Arc::clone(&storm.gates);
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kills = 0;
    storm.rage(TIME, || {
        std::thread::sleep(Duration::from_millis(random.u64(20..400)));
        let victim = random.usize(..gates.len());
        // It dies while clients are told of it, and before.
        let plan = gates[victim].take().expect("a gate").kill9();
        places.lock().unwrap()[victim] = None;
        kills += 1;
        std::thread::sleep(Duration::from_millis(random.u64(0..300)));
        let gate = plan.start();
        places.lock().unwrap()[victim] = Some(gate.address);
        gates[victim] = Some(gate);
    });
    let seen = storm.judge();
    eprintln!("{kills} kills");
    seen.expect_right();
    assert!(kills >= 3, "{kills} kills");
}
