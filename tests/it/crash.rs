//! A gate that is killed: the upstream ran at most once, and an answer that was given is given again.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Gate, Plan, Reply, Request, Response, Signal, Upstream};

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// Holds what must be true of a key whose first request met a gate that may have died, once a new one runs.
#[track_caller]
fn at_most_once(context: &str, upstream: &Upstream, gate: &Gate, key: &str, first: Option<&Response>) {
    let before = upstream.runs_of(key);
    let retry = gate.post("/charges", key, "{}");
    let show = || {
        format!("{context}: {before} runs before\n{}\n{}", first.map_or("died".into(), Response::show), retry.show())
    };
    assert!(upstream.runs_of(key) <= 1, "{}", show());
    match retry.word().as_str() {
        "replayed" => {
            assert_eq!(before, 1, "{}", show());
            if let Some(first) = first {
                first.expect_repeated_by(&retry);
            }
        }
        "executed" => assert!(before == 0 && first.is_none(), "{}", show()),
        "outcome-unknown" => assert!(first.is_none(), "an answer that was given is lost: {}", show()),
        _ => panic!("{}", show()),
    }
}

#[test]
fn a_kill_while_the_upstream_runs() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").try_send(address));
    upstream.wait_for_runs(1);
    let gate = gate.kill9().start();
    assert!(first.join().unwrap().is_none());
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    signal.open();
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    assert_eq!(gate.states("k-1"), ["unknown"]);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_kill_after_the_answer() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).start();
    let first = gate.post("/charges", "k-1", "{}");
    let gate = gate.kill9().start();
    let second = gate.post("/charges", "k-1", "{}");
    second.expect(200, "replayed");
    first.expect_repeated_by(&second);
    assert_eq!(first.get("idempotency-expires"), second.get("idempotency-expires"));
    assert_eq!(upstream.runs(), 1);
}

/// Ends the process at each call that it makes on the store's files, from the very first on: before, in the middle of
/// and after it, and as if the power had gone, which takes with it whatever was not synced.
#[test]
fn a_kill_at_every_call_of_the_store() {
    // Each mode is a thread: most of the time is starting processes.
    std::thread::scope(|scope| {
        for when in ["before", "torn", "after", "lost"] {
            scope.spawn(move || {
                let mut nth = 1;
                while killed_at(nth, when) {
                    nth += 1;
                }
                assert!(nth > 60, "only {nth} calls: the faults are not where the store is");
                eprintln!("killed {when} each of {} calls", nth - 1);
            });
        }
    });
}

/// Runs two requests against a gate that ends at its nth call, and holds what must be true after a new start.
/// False where the gate outlived them.
fn killed_at(nth: usize, when: &str) -> bool {
    let context = format!("killed {when} call {nth}");
    let upstream = Upstream::start(|request| match request.key().as_deref() {
        Some("released") => Reply::status("500 Oops", "x"),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let plan = Gate::before(&upstream);
    let mut answers = Vec::new();
    if let Some(gate) = plan.clone().killed_at(nth, when).try_start() {
        for key in ["k-1", "released", "k-2"] {
            answers.push((key, Request::post("/charges").key(key).body("{}").try_send(gate.address)));
        }
        gate.kill9();
    }
    // A process that has ended may look alive for a moment longer: its answers tell.
    let lived = |(_, answer): &(_, Option<Response>)| answer.as_ref().is_some_and(|answer| answer.status != 503);
    let outlived = answers.len() == 3 && answers.iter().all(lived);
    let gate = plan.start();
    for (key, first) in &answers {
        if let Some(first) = first {
            // A dying gate may still say that its store is gone, but nothing that is not true.
            if first.word() == "store-unavailable" {
                assert_eq!(upstream.runs_of(key), 0, "{context}: said that nothing was sent");
                continue;
            }
        }
        if *key == "released" {
            let retry = gate.post("/charges", key, "{}");
            assert!(["released", "outcome-unknown"].contains(&retry.word().as_str()), "{context}: {}", retry.show());
        } else {
            at_most_once(&context, &upstream, &gate, key, first.as_ref());
        }
    }
    gate.post("/charges", "fresh", "{}").expect(200, "executed");
    !outlived
}

/// The start after a crash reads the log of the one before and turns its attempts unknown: it may be killed as well, at
/// every call.
#[test]
fn a_kill_at_every_call_of_a_recovery() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key().as_deref() {
        Some("running") => Reply::ok("x").hold_until(&held),
        _ => Reply::ok("done"),
    });
    let gate = Gate::before(&upstream).start();
    let done = gate.post("/charges", "done", "{}");
    done.expect(200, "executed");
    let address = gate.address;
    let running = std::thread::spawn(move || Request::post("/charges").key("running").body("{}").try_send(address));
    upstream.wait_for_runs(2);
    let plan = gate.kill9();
    assert!(running.join().unwrap().is_none());
    let crashed = store_files(&plan);
    for when in ["before", "torn", "after", "lost"] {
        for nth in 1.. {
            assert!(nth < 1_000, "the recovery has no end");
            for (path, content) in &crashed {
                std::fs::write(path, content).unwrap();
            }
            let survivor = plan.clone().killed_at(nth, when).try_start();
            let request = Request::post("/charges").key("done").body("{}");
            let answer = survivor.and_then(|gate| request.try_send(gate.address));
            let survived = match answer.as_ref().map(|answer| answer.status) {
                Some(200) => true,
                // A dying gate may still say that its store is gone.
                Some(503) | None => false,
                Some(_) => panic!("killed {when} call {nth}: {}", answer.expect("an answer").show()),
            };
            let gate = plan.start();
            done.expect_repeated_by(&gate.post("/charges", "done", "{}"));
            gate.post("/charges", "running", "{}").expect_problem(409, "outcome-unknown");
            if survived {
                assert!(nth > 1, "the start makes no call of the store");
                eprintln!("killed {when} each of {} calls", nth - 1);
                break;
            }
        }
    }
    signal.open();
    assert_eq!(upstream.runs(), 2);
}

/// The files of a store that no process has open.
fn store_files(plan: &Plan) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let files = ["gate.db", "gate.db-wal", "gate.db-shm", "gate.db.lock"].map(|name| plan.path(name));
    files.into_iter().filter_map(|path| std::fs::read(&path).ok().map(|content| (path, content))).collect()
}

/// Kills at random moments under load, many times, on one store.
#[test]
fn kills_at_random_moments() {
    const TIME: Duration = Duration::from_secs(15);
    const LEAST: usize = 10;
    let upstream = Upstream::start(|request| {
        let wait = u64::try_from(request.nth % 7).expect("small");
        Reply::ok(format!("run {}", request.nth)).delay(Duration::from_millis(wait))
    });
    let plan = Gate::before(&upstream);
    let running = Mutex::new(None);
    let done = AtomicBool::new(false);
    let kills = AtomicUsize::new(0);
    let mut random = Random::new();
    eprintln!("seed {}", random.0);
    let answers: Vec<(String, Vec<Response>)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6)
            .map(|client| {
                scope.spawn({
                    let (running, done) = (&running, &done);
                    move || {
                        let mut answers = Vec::new();
                        let mut nth = 0;
                        while !done.load(Ordering::SeqCst) {
                            nth += 1;
                            let key = format!("key-{client}-{nth}");
                            answers.push((key.clone(), send_three_times(running, &key)));
                            std::thread::sleep(Duration::from_millis(2));
                        }
                        answers
                    }
                })
            })
            .collect();
        let start = Instant::now();
        while start.elapsed() < TIME || kills.load(Ordering::SeqCst) < LEAST && start.elapsed() < 4 * TIME {
            let gate = plan.start();
            *running.lock().unwrap() = Some(gate.address);
            std::thread::sleep(Duration::from_micros(random.below(120_000)));
            gate.kill9();
            *running.lock().unwrap() = None;
            kills.fetch_add(1, Ordering::SeqCst);
        }
        done.store(true, Ordering::SeqCst);
        clients.into_iter().flat_map(|client| client.join().expect("no panic")).collect()
    });
    // Before the judge asks for those that did not run as well.
    let ran: HashSet<String> = upstream.seen().iter().filter_map(|request| request.key()).collect();
    judge(&upstream, &plan, &answers);
    let kills = kills.into_inner();
    let unknown = answers.iter().filter(|(_, answers)| answers.iter().any(|answer| answer.word() == "outcome-unknown"));
    eprintln!("{kills} kills, {} keys, {} of them unknown", answers.len(), unknown.count());
    assert!(kills >= LEAST && answers.len() >= 50, "{kills} kills, {} keys", answers.len());
    // What is held of answers and of their loss is held of many.
    let answered = answers.iter().filter(|(_, answers)| answers.iter().any(|answer| answer.status == 200)).count();
    let lost =
        answers.iter().filter(|(key, answers)| answers.iter().all(|answer| answer.status != 200) && ran.contains(key));
    let lost = lost.count();
    eprintln!("{answered} keys were answered, {lost} ran and their answer was lost");
    assert!(answered >= 20 && lost > 0, "{answered} keys were answered, {lost} ran and their answer was lost");
}

/// Sends a request up to three times, to whatever gate runs, and keeps the whole answers.
fn send_three_times(running: &Mutex<Option<std::net::SocketAddr>>, key: &str) -> Vec<Response> {
    let mut answers = Vec::new();
    for _ in 0..3 {
        let address = *running.lock().unwrap();
        match address.and_then(|address| Request::post("/charges").key(key).body("{}").try_send(address)) {
            Some(answer) => answers.push(answer),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    answers
}

fn judge(upstream: &Upstream, plan: &Plan, answers: &[(String, Vec<Response>)]) {
    let mut runs: HashMap<String, usize> = HashMap::new();
    for request in upstream.seen() {
        *runs.entry(request.key().expect("a key")).or_default() += 1;
    }
    let twice: Vec<_> = runs.iter().filter(|(_, runs)| **runs > 1).collect();
    assert!(twice.is_empty(), "ran more than once: {twice:?}");
    let gate = plan.start();
    std::thread::scope(|scope| {
        for some in answers.chunks(answers.len().div_ceil(4).max(1)) {
            let (gate, runs) = (&gate, &runs);
            scope.spawn(move || {
                for (key, answers) in some {
                    judge_one(gate, key, runs.get(key).copied().unwrap_or(0), answers);
                }
            });
        }
    });
}

fn judge_one(gate: &Gate, key: &str, before: usize, answers: &[Response]) {
    let given: Vec<&Response> = answers.iter().filter(|answer| answer.status == 200).collect();
    let last = gate.post("/charges", key, "{}");
    let show = || {
        let all: Vec<String> = answers.iter().map(Response::show).collect();
        format!("{key}, {before} runs before\n{}\nthen\n{}", all.join("\n"), last.show())
    };
    match last.word().as_str() {
        "replayed" => {
            assert_eq!(before, 1, "{}", show());
            for first in given {
                first.expect_repeated_by(&last);
            }
        }
        "executed" => assert!(before == 0 && given.is_empty(), "{}", show()),
        "outcome-unknown" => assert!(given.is_empty(), "an answer that was given is lost: {}", show()),
        _ => panic!("{}", show()),
    }
}

/// xorshift64: a different run each time, and its seed in the output of a failure.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        Self(u64::from(now.subsec_nanos()) << 20 | u64::from(std::process::id()) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
