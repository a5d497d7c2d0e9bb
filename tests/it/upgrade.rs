//! The former version and this one on one store, side by side and one after the other, killed under load: one run for each
//! key, one answer for each key. `tests/upgrade` builds the former version, says where it is and runs these.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::servers::{Database, database};
use crate::storm::Storm;
use crate::support::wait::PATIENCE;
use crate::support::{Gate, Plan, Reply, Request, Response, Upstream};

/// For how long gates are killed in each part of an upgrade.
const TIME: Duration = Duration::from_secs(8);

/// How many clients try keys on SQLite, where each gate is the only one.
const CLIENTS: usize = 12;

/// How often the gate of a SQLite file is killed while one version runs.
const KILLS: usize = 5;

/// The binary of the former version.
fn former() -> PathBuf {
    std::env::var_os("FORMER_ONCEGATE").expect("FORMER_ONCEGATE is not set: run tests/upgrade, which sets it").into()
}

fn new() -> PathBuf {
    env!("CARGO_BIN_EXE_oncegate").into()
}

fn migrate(binary: &Path, database: &Database, args: &[&str]) -> Output {
    let mut command = Command::new(binary);
    command.args(["migrate", "--store", &database.url]).args(args).output().expect("the binary starts")
}

/// What it printed, where it went well.
#[track_caller]
fn migrated(binary: &Path, database: &Database, args: &[&str]) -> String {
    let output = migrate(binary, database, args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "tests/upgrade builds the former version for it"]
fn an_upgrade_on_postgresql_under_load() {
    let Some(database) = database() else { return };
    migrated(&former(), &database, &[]);
    replaced_under_load(&database, &former(), &new());
}

/// The newer schema stays.
#[test]
#[ignore = "tests/upgrade builds the former version for it"]
fn the_way_back_on_postgresql_under_load() {
    let Some(database) = database() else { return };
    migrated(&new(), &database, &[]);
    replaced_under_load(&database, &new(), &former());
}

/// Three gates of one version, then gates of both as chance has it, then of the other alone, are killed under load. The
/// schema is brought up to date meanwhile.
fn replaced_under_load(database: &Database, first: &Path, then: &Path) {
    let storm = Storm::before(&database.url);
    let start = |plan: Plan| plan.store_url(&database.url).binary(first);
    let mut gates: Vec<Option<Gate>> = storm.start(3, start).into_iter().map(Some).collect();
    let places = Arc::clone(&storm.gates);
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut kills = 0;
    for part in ["one version", "both", "the other version"] {
        let before = kills;
        storm.rage(TIME, || {
            std::thread::sleep(Duration::from_millis(random.u64(20..400)));
            let victim = kills % gates.len();
            let killed = gates[victim].take().expect("a gate").kill9();
            places.lock().unwrap()[victim] = None;
            kills += 1;
            let binary = match part {
                "one version" => first,
                "both" if random.bool() => first,
                _ => then,
            };
            let gate = killed.binary(binary).start();
            places.lock().unwrap()[victim] = Some(gate.address);
            gates[victim] = Some(gate);
        });
        assert!(kills - before >= 3, "{} kills of {part}", kills - before);
        if part == "one version" {
            // Gates of the older schema go on, and are killed again right after.
            migrated(&new(), database, &[]);
        }
    }
    let seen = storm.judge();
    eprintln!("{kills} kills");
    seen.expect_few_sent_away();
    seen.expect_right();
}

/// Before `oncegate migrate` a new gate says what to do, and the former one goes on.
#[test]
#[ignore = "tests/upgrade builds the former version for it"]
fn a_new_gate_waits_for_nobody_on_the_former_schema() {
    let Some(database) = database() else { return };
    migrated(&former(), &database, &[]);
    let has_new_schema = !migrated(&new(), &database, &["--dry-run"]).contains("nothing to do");
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).store_url(&database.url);
    let old = plan.clone().binary(&former()).start();
    let first = old.post("/charges", "k-1", "{}");
    first.expect(200, "executed");
    if has_new_schema {
        let mut refused = plan.spawn();
        assert_eq!(refused.wait().code(), Some(1), "{}", refused.log());
        assert!(refused.log().contains("oncegate migrate"), "{}", refused.log());
        let replay = old.post("/charges", "k-1", "{}");
        first.expect_repeated_by(&replay);
        migrated(&new(), &database, &[]);
    }
    let gate = plan.start();
    let replay = gate.post("/charges", "k-1", "{}");
    replay.expect(200, "replayed");
    first.expect_repeated_by(&replay);
    // And the other way round: what one version wrote, the other repeats.
    let second = gate.post("/charges", "k-2", "{}");
    second.expect(200, "executed");
    let replay = old.post("/charges", "k-2", "{}");
    replay.expect(200, "replayed");
    second.expect_repeated_by(&replay);
    assert_eq!(upstream.runs(), 2);
}

/// One file has one gate at a time. It is killed, and followed by one of the same version or of the next; a gate that goes on is
/// followed by one that waits for its end.
#[test]
#[ignore = "tests/upgrade builds the former version for it"]
fn an_upgrade_of_a_sqlite_file_under_load_and_the_way_back() {
    let clients = Clients::start();
    let file = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", file.path().join("gate.db").display());
    let plan = Gate::before(&clients.upstream).store_url(&url).defaults("lease = \"1s\"");
    let (old, new) = (plan.clone().binary(&former()), plan);

    clients.load(|place| {
        let gate = killed_again_and_again(&old, place);
        // The new one waits for the file, unready, until the old one has drained.
        let next = new.spawn();
        next.address("admin listening").expect("it waits");
        assert!(!next.log().contains("\"listening\""), "it serves a file that is another's");
        *place.lock().unwrap() = None;
        gate.stop();
        let address = next.address("listening").expect("it takes the file over");
        *place.lock().unwrap() = Some(address);
        std::thread::sleep(Duration::from_millis(500));
        *place.lock().unwrap() = None;
        drop(next);
        let gate = killed_again_and_again(&new, place);
        *place.lock().unwrap() = None;
        gate.kill9();
    });

    // The former version refuses the file, or works with it.
    let mut process = old.spawn();
    if let Some(address) = process.address("listening") {
        clients.expect_right(address);
        drop(process);
        clients.load(|place| drop(killed_again_and_again(&old, place)));
    } else {
        assert_eq!(process.wait().code(), Some(1), "{}", process.log());
        assert!(process.log().contains("run the version that wrote it"), "{}", process.log());
    }
    let gate = new.start();
    clients.expect_right(gate.address);
}

/// Starts gates of a plan, one after the other: all but the last are killed.
fn killed_again_and_again(plan: &Plan, place: &Place) -> Gate {
    for _ in 0..KILLS {
        let gate = plan.start();
        *place.lock().unwrap() = Some(gate.address);
        std::thread::sleep(Duration::from_millis(fastrand::u64(100..600)));
        *place.lock().unwrap() = None;
        gate.kill9();
    }
    let gate = plan.start();
    *place.lock().unwrap() = Some(gate.address);
    gate
}

/// Where the gate is at the moment, if there is one.
type Place = Mutex<Option<std::net::SocketAddr>>;

/// Clients that try each key until they have an answer that is final, and remember it.
struct Clients {
    upstream: Upstream,
    next: AtomicUsize,
    /// Of each key, its answers that were to last, and nothing where it has none yet.
    answers: Mutex<BTreeMap<String, Option<Response>>>,
}

impl Clients {
    fn start() -> Self {
        let upstream = Upstream::start(|request| {
            Reply::ok(format!("run {}", request.nth)).delay(Duration::from_millis(fastrand::u64(1..40)))
        });
        Self { upstream, next: AtomicUsize::new(0), answers: Mutex::default() }
    }

    /// Lets the clients try new keys while `disturb` is done.
    fn load(&self, disturb: impl FnOnce(&Place)) {
        let (place, is_over) = (Place::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    while !is_over.load(Ordering::SeqCst) {
                        self.try_until_final(&place, &is_over);
                    }
                });
            }
            let _end = Ending(&is_over);
            disturb(&place);
        });
    }

    fn try_until_final(&self, place: &Place, is_over: &AtomicBool) {
        let key = format!("k-{}", self.next.fetch_add(1, Ordering::SeqCst));
        self.answers.lock().unwrap().insert(key.clone(), None);
        while !is_over.load(Ordering::SeqCst) {
            let address = *place.lock().unwrap();
            let answer = address.and_then(|address| request(&key).try_send(address));
            match answer.as_ref().map(Response::word).as_deref() {
                Some("executed" | "replayed") => {
                    self.answers.lock().unwrap().insert(key, answer);
                    return;
                }
                Some("outcome-unknown") => return,
                // It ends, or its attempt runs.
                Some("in-flight" | "store-unavailable" | "overloaded") | None => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Some(word) => panic!("{key}: an answer that no gate gives here: {word}"),
            }
        }
    }

    /// Asks once more for every key: none has run twice, none has another answer than before, and most have one.
    #[track_caller]
    fn expect_right(&self, gate: std::net::SocketAddr) {
        let answers = self.answers.lock().unwrap();
        let (mut unknown, mut kept) = (0, 0);
        for (key, first) in &*answers {
            let last = last_answer(key, gate);
            let runs = self.upstream.runs_of(key);
            let show = || {
                format!(
                    "{key}, {runs} runs:\n{}\n{}",
                    first.as_ref().map_or("none".into(), Response::show),
                    last.show()
                )
            };
            assert!(runs <= 1, "{}", show());
            match (last.word().as_str(), first) {
                ("replayed", Some(first)) => {
                    assert_eq!((first.status, &first.body.bytes), (last.status, &last.body.bytes), "{}", show());
                    kept += 1;
                }
                // Those whose client had no answer.
                ("replayed" | "executed", None) => {}
                ("outcome-unknown", None) => unknown += 1,
                _ => panic!("{}", show()),
            }
        }
        eprintln!("{} keys, {kept} replayed as before, {unknown} unknown", answers.len());
        assert!(kept >= 100 && kept > unknown, "there is little to judge: {kept} of {} keys", answers.len());
    }
}

fn request(key: &str) -> Request {
    Request::post("/charges").key(key).body("{}")
}

/// The answer for a key, once no attempt of a gate that was killed may still run.
#[track_caller]
fn last_answer(key: &str, gate: std::net::SocketAddr) -> Response {
    let start = Instant::now();
    loop {
        let answer = request(key).send(gate);
        if answer.word() != "in-flight" {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "{}", answer.show());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Ends the clients when dropped.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
