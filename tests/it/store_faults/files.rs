//! Files of a SQLite store that are removed, cut or overwritten, under a running gate and between two runs.
//!
//! No key whose answer was acknowledged may run again, whatever happens to the files and whenever the gate dies.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Awake, Gate, Plan, Reply, Request, Response, Upstream};

/// How long a gate may take to notice: a second, and what a busy machine adds.
const NOTICED_WITHIN: Duration = Duration::from_secs(5);

/// What the start after the damage does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It has everything that was acknowledged.
    Starts,
    /// It names this file and refuses.
    Refuses(&'static str),
}

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

fn rename(path: &Path) {
    fs::rename(path, path.with_extension("away")).unwrap();
}

fn put_back(path: &Path) {
    fs::rename(path.with_extension("away"), path).unwrap();
}

/// Puts an empty file in its place.
fn replace(path: &Path) {
    let other = path.with_extension("other");
    File::create(&other).unwrap();
    fs::rename(other, path).unwrap();
}

/// Puts a copy in its place.
fn copy(path: &Path) {
    let other = path.with_extension("other");
    fs::copy(path, &other).unwrap();
    fs::rename(other, path).unwrap();
}

fn empty(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
}

fn halve(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

/// Overwrites the whole file where it stands.
fn overwrite(path: &Path, byte: impl Fn(usize) -> u8) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let length = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let content: Vec<u8> = (0..length).map(byte).collect();
    file.write_all_at(&content, 0).unwrap();
}

fn zeros(path: &Path) {
    overwrite(path, |_| 0);
}

fn junk(path: &Path) {
    overwrite(path, |at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 | 1);
}

/// Overwrites what the index says of the log, and leaves its header alone.
fn junk_behind_the_header(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&[0xa5; 32_768 - 136], 136).unwrap();
}

/// Answered requests before the damage.
fn answered(gate: &Gate) -> Vec<(String, Response)> {
    let answer = |nth| {
        let key = format!("before-{nth}");
        let response = gate.post("/charges", &key, "{}");
        response.expect(200, "executed");
        (key, response)
    };
    (0..8).map(answer).collect()
}

/// Sends new keys until the gate has ended, and returns those that it answered as executed.
fn sent_until_it_ends(gate: &mut Gate) -> Vec<(String, Response)> {
    let start = Awake::start();
    let mut answers = Vec::new();
    for nth in 0.. {
        let key = format!("during-{nth}");
        if let Some(response) = Request::post("/charges").key(&key).body("{}").try_send(gate.address) {
            if response.status == 200 {
                answers.push((key, response));
            } else {
                response.expect_problem(503, "store-unavailable");
            }
        }
        if !gate.is_running() {
            return answers;
        }
        assert!(start.elapsed() < NOTICED_WITHIN, "it goes on:\n{}", gate.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    unreachable!("the loop has no end")
}

/// Starts the gate again and holds that nothing which was answered runs again.
#[track_caller]
fn judge(plan: &Plan, upstream: &Upstream, answers: &[(String, Response)], then: Then) {
    match then {
        Then::Starts => {
            let gate = plan.start();
            for (key, first) in answers {
                first.expect_repeated_by(&gate.post("/charges", key, "{}"));
            }
        }
        Then::Refuses(name) => refused(plan, name),
    }
    for (key, _) in answers {
        assert_eq!(upstream.runs_of(key), 1, "{key}");
    }
}

/// Holds that a start is refused with the path of this file and a command for going on without it; returns that.
#[track_caller]
fn refused(plan: &Plan, name: &str) {
    command_of_refusal(plan, name);
}

#[track_caller]
fn command_of_refusal(plan: &Plan, name: &str) -> String {
    let mut process = plan.spawn();
    let status = process.wait();
    let log = process.log();
    assert_eq!(status.code(), Some(1), "{log}");
    let path = fs::canonicalize(plan.path("")).unwrap().join(name).display().to_string();
    assert!(log.contains(&path), "{path} is not named: {log}");
    let line = log.lines().find(|line| line.contains("rm -f ")).unwrap_or_else(|| panic!("no command: {log}"));
    let text = serde_json::from_str(line).map_or_else(|_| line.to_owned(), |line: Value| line.to_string());
    let command = text.split_once("rm -f ").unwrap().1.split(['`', '\\']).next().unwrap();
    format!("rm -f {command}")
}

/// Damages a file of a running gate. It ends within [`NOTICED_WITHIN`], and acknowledges nothing that the next start has not.
#[track_caller]
fn noticed(name: &str, harm: impl Fn(&Path), then: Then) {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let mut gate = plan.start();
    let mut answers = answered(&gate);
    harm(&plan.path(name));
    answers.extend(sent_until_it_ends(&mut gate));
    judge(&plan, &upstream, &answers, then);
}

/// Damages a file of a gate and kills it before it can notice.
#[track_caller]
fn killed(name: &str, harm: impl Fn(&Path), then: Then) {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let answers = answered(&gate);
    harm(&plan.path(name));
    gate.kill9();
    judge(&plan, &upstream, &answers, then);
}

#[test]
fn a_log_that_is_removed_is_saved_and_the_gate_ends() {
    noticed("gate.db-wal", remove, Then::Starts);
    noticed("gate.db-wal", rename, Then::Starts);
    noticed("gate.db-wal", replace, Then::Starts);
}

#[test]
fn a_log_that_is_cut_or_overwritten_ends_the_gate() {
    noticed("gate.db-wal", empty, Then::Refuses("gate.db-wal"));
    noticed("gate.db-wal", halve, Then::Refuses("gate.db-wal"));
    noticed("gate.db-wal", zeros, Then::Refuses("gate.db-wal"));
    noticed("gate.db-wal", junk, Then::Refuses("gate.db-wal"));
}

#[test]
fn an_index_that_is_damaged_ends_the_gate_and_costs_nothing() {
    noticed("gate.db-shm", remove, Then::Starts);
    noticed("gate.db-shm", rename, Then::Starts);
    noticed("gate.db-shm", empty, Then::Starts);
    noticed("gate.db-shm", halve, Then::Starts);
    noticed("gate.db-shm", junk_behind_the_header, Then::Starts);
}

/// Where it is overwritten between two transactions, SQLite makes it anew from the log; in the middle of one, the gate
/// ends. Either way nothing is lost.
#[test]
fn an_index_that_is_overwritten_under_load_costs_nothing() {
    for harm in [zeros, junk] {
        let upstream = numbered();
        let plan = Gate::before(&upstream);
        let gate = plan.start();
        let mut answers = answered(&gate);
        let address = gate.address;
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|client| {
                    scope.spawn(move || {
                        let send = |nth| {
                            let key = format!("during-{client}-{nth}");
                            let answer = Request::post("/charges").key(&key).body("{}").try_send(address)?;
                            (answer.status == 200).then_some((key, answer))
                        };
                        (0..60).filter_map(send).collect::<Vec<_>>()
                    })
                })
                .collect();
            for _ in 0..10 {
                harm(&plan.path("gate.db-shm"));
                std::thread::sleep(Duration::from_millis(10));
            }
            answers.extend(clients.into_iter().flat_map(|client| client.join().unwrap()));
        });
        gate.kill9();
        judge(&plan, &upstream, &answers, Then::Starts);
    }
}

#[test]
fn a_database_that_is_damaged_ends_the_gate() {
    noticed("gate.db", rename, Then::Refuses("gate.db"));
    noticed("gate.db", replace, Then::Refuses("gate.db"));
    noticed("gate.db", empty, Then::Refuses("gate.db"));
    // The log may not fit another database, though it is a store's.
    noticed("gate.db", copy, Then::Refuses("gate.db-wal"));
}

#[test]
fn a_start_says_that_it_made_a_store() {
    let upstream = numbered();
    let says_so = |gate: &Gate| gate.log().contains("made a new store");
    let gate = Gate::before(&upstream).start();
    assert!(says_so(&gate), "{}", gate.log());
    let gate = gate.stop().start();
    assert!(!says_so(&gate), "{}", gate.log());
}

#[test]
fn a_database_that_is_put_back_is_used() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let mut gate = plan.start();
    let mut answers = answered(&gate);
    rename(&plan.path("gate.db"));
    answers.extend(sent_until_it_ends(&mut gate));
    refused(&plan, "gate.db");
    put_back(&plan.path("gate.db"));
    judge(&plan, &upstream, &answers, Then::Starts);
}

#[test]
fn a_log_that_is_lost_with_the_gate_refuses_the_start() {
    killed("gate.db-wal", remove, Then::Refuses("gate.db-wal"));
    killed("gate.db-wal", replace, Then::Refuses("gate.db-wal"));
    killed("gate.db-wal", empty, Then::Refuses("gate.db-wal"));
    killed("gate.db-wal", halve, Then::Refuses("gate.db-wal"));
    killed("gate.db-wal", junk, Then::Refuses("gate.db-wal"));
}

#[test]
fn an_index_that_is_lost_with_the_gate_costs_nothing() {
    killed("gate.db-shm", remove, Then::Starts);
    killed("gate.db-shm", empty, Then::Starts);
    killed("gate.db-shm", junk, Then::Starts);
}

#[test]
fn a_log_that_is_put_back_is_used() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let answers = answered(&gate);
    rename(&plan.path("gate.db-wal"));
    gate.kill9();
    refused(&plan, "gate.db-wal");
    put_back(&plan.path("gate.db-wal"));
    judge(&plan, &upstream, &answers, Then::Starts);
}

/// The way on that the refusal names: with what the database has.
#[test]
fn a_store_goes_on_without_its_log_where_it_is_told_to() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "copied", "{}").expect(200, "executed");
    let gate = gate.stop().start();
    gate.post("/charges", "lost", "{}").expect(200, "executed");
    remove(&plan.path("gate.db-wal"));
    gate.kill9();
    let command = command_of_refusal(&plan, "gate.db-wal");
    assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
    let gate = plan.start();
    gate.post("/charges", "copied", "{}").expect(200, "replayed");
    gate.post("/charges", "lost", "{}").expect(200, "executed");
}

/// The file is renamed, cut or removed while no gate runs.
#[test]
fn a_lost_database_is_not_begun_anew() {
    for harm in [rename, remove, empty] {
        for is_orderly in [true, false] {
            let upstream = numbered();
            let plan = Gate::before(&upstream);
            let gate = plan.start();
            let answers = answered(&gate);
            if is_orderly {
                gate.stop()
            } else {
                gate.kill9()
            };
            let database = plan.path("gate.db");
            let kept = fs::read(&database).unwrap();
            harm(&database);
            refused(&plan, "gate.db.lock");
            // Refusing changed nothing: the second refusal is the same, and the file can be put back.
            assert!(!database.exists() || database.metadata().unwrap().len() == 0);
            let command = command_of_refusal(&plan, "gate.db.reserve");
            fs::write(&database, kept).unwrap();
            judge(&plan, &upstream, &answers, Then::Starts);

            harm(&database);
            assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
            let gate = plan.start();
            gate.post("/charges", "before-0", "{}").expect(200, "executed");
        }
    }
}

/// A route that forwards while its store is away: this one is not, and has a record of the key.
#[test]
fn a_record_that_cannot_be_read_lets_nothing_run() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).defaults("store_failure = \"forward\"");
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let store = rusqlite::Connection::open(plan.path("gate.db")).unwrap();
    assert_eq!(store.execute("UPDATE record SET state = 9", []).unwrap(), 1);
    drop(store);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect_problem(503, "store-unavailable");
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    assert_eq!(upstream.runs_of("k-1"), 1);
}
