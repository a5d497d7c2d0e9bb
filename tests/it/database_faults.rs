//! A database that crashes, hangs, is full of others or loses its word: before the attempt nothing runs, after it nothing
//! is lost, and the gate recovers by itself.

mod failovers;
mod rights;
mod storms;

use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::migrate::waits;
use crate::servers::{Postgres, Session};
use crate::support::store::{migrated, migrated_on};
use crate::support::{Awake, Gate, Reply, Request, Response, Signal, Upstream, eventually};

/// How long one answer may take where the database is away: what a client waits for a claim by default, and some more.
const PROMPT: Duration = Duration::from_secs(10);

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// Sends requests with fresh keys from many clients at once for a while, and gives their answers with how long they took.
fn flood(gate: &Gate, name: &str, time: Duration) -> Vec<(Response, Duration)> {
    let (start, awake) = (Instant::now(), &Awake::start());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..30)
            .map(|client| {
                scope.spawn(move || {
                    let mut answers = Vec::new();
                    while start.elapsed() < time {
                        let key = format!("{name}-{client}-{}", answers.len());
                        let asked = awake.elapsed();
                        answers.push((gate.post("/charges", &key, "{}"), awake.elapsed() - asked));
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    answers
                })
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().expect("answers")).collect()
    })
}

/// Holds that all were refused in time, and that nothing of them came to the upstream.
#[track_caller]
fn expect_refused(answers: &[(Response, Duration)], upstream: &Upstream, before: usize) {
    let slowest = answers.iter().map(|(_, took)| *took).max().unwrap_or_default();
    eprintln!("{} refused, the slowest in {slowest:?}", answers.len());
    assert!(answers.len() >= 30, "{} answers", answers.len());
    for (answer, _) in answers {
        answer.expect_problem(503, "store-unavailable");
    }
    assert!(slowest < PROMPT, "{slowest:?}");
    assert_eq!(upstream.runs(), before, "forwarded without a durable claim");
}

/// Holds that it works again without having been started anew, also for the keys that were refused.
#[track_caller]
fn expect_recovery(gate: &mut Gate, refused: &str, upstream: &Upstream) {
    eventually("the database is back", || (gate.post("/charges", refused, "{}").status == 200).then_some(()));
    assert_eq!(upstream.runs_of(refused), 1);
    gate.post("/charges", refused, "{}").expect(200, "replayed");
    eventually("it is ready", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
    assert!(gate.is_running());
}

/// Holds that the log tells of one outage: one error when it began, one line when it was over, and beside them only which
/// answers went unrecorded.
#[track_caller]
fn expect_one_outage(gate: &Gate) {
    let over = "the store works again";
    let lines = eventually("the log says that it is over", || {
        let log = gate.log();
        let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        lines.iter().any(|line| line["message"] == over).then_some(lines)
    });
    let began = lines.iter().position(|line| line["level"] == "ERROR").expect("an error");
    let told = &lines[began..];
    let error = &told[0];
    assert!(error["message"].as_str().is_some_and(|text| text.contains("503 store-unavailable")), "{error}");
    assert!(error["error"].is_string() && error["operation"].is_string(), "{error}");
    let end = told.iter().find(|line| line["message"] == over).expect("an end");
    assert!(end["seconds"].as_f64().is_some_and(|seconds| seconds >= 2.0), "{end}");
    assert!(end["claims_failed"].as_u64().is_some_and(|claims| claims >= 30), "{end}");
    for line in &told[1..] {
        let is_unrecorded = line["message"] == "an answer went to its client unrecorded";
        assert!(line == end || is_unrecorded || line["message"] == "listening", "{line}");
        assert!(!is_unrecorded || (line["record"].is_string() && line["route"].is_string()), "{line}");
    }
}

#[test]
fn a_server_that_has_no_connection_left() {
    let Some(server) = Postgres::with(&[("max_connections", "20")]) else { return };
    let database = migrated_on(&server);
    let upstream = numbered();
    let mut gate = Gate::before(&upstream).store_url(&database.url).start();
    let first = gate.post("/charges", "first", "{}");
    first.expect(200, "executed");
    // Others take each place that the gate loses.
    let admin = Session::open(&server.url("postgres"));
    let mut others = Vec::new();
    eventually("all places are taken", || {
        let sql = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'", database.name);
        admin.run(&sql);
        while let Ok(other) = Session::try_open(&server.url("postgres")) {
            others.push(other);
        }
        // A place may also be one of the gate's that is not yet open, and tells no database.
        let sql =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND backend_type = 'client backend'";
        (admin.value(sql) == "20").then_some(())
    });
    let memory = gate.peak_memory();
    let answers = flood(&gate, "full", Duration::from_secs(3));
    expect_refused(&answers, &upstream, 1);
    eventually("it is not ready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    let grown = gate.peak_memory() - memory;
    assert!(grown < 64 << 20, "{grown} bytes more");
    drop(others);
    expect_recovery(&mut gate, "full-0-0", &upstream);
    expect_one_outage(&gate);
    first.expect_repeated_by(&gate.post("/charges", "first", "{}"));
}

/// Locks that make every statement on the records wait: claims, and what the pool is for.
#[test]
fn a_table_that_somebody_has_locked() {
    let Some(database) = migrated() else { return };
    let upstream = numbered();
    let mut gate = Gate::before(&upstream).store_url(&database.url).start();
    gate.post("/charges", "first", "{}").expect(200, "executed");
    let locker = database.session();
    locker.run("BEGIN; LOCK TABLE oncegate.record IN ACCESS EXCLUSIVE MODE");
    let memory = gate.peak_memory();
    let answers = std::thread::scope(|scope| {
        // More of these than the pool has connections.
        let lists: Vec<_> = (0..12).map(|_| scope.spawn(|| gate.admin("GET", "/api/v1/records", None))).collect();
        let answers = flood(&gate, "locked", Duration::from_secs(3));
        for list in lists {
            assert_eq!(list.join().expect("an answer").status, 503);
        }
        answers
    });
    expect_refused(&answers, &upstream, 1);
    let grown = gate.peak_memory() - memory;
    assert!(grown < 64 << 20, "{grown} bytes more");
    locker.run("COMMIT");
    expect_recovery(&mut gate, "locked-0-0", &upstream);
}

/// A client that can connect expects an answer.
#[test]
fn a_start_that_another_session_holds_up_takes_no_connection() {
    let Some(database) = migrated() else { return };
    let upstream = numbered();
    // One that the client waits for, and one for which PostgreSQL itself ends the waiting.
    for table in ["origin", "identity"] {
        let address = Upstream::free_address();
        let locker = database.session();
        locker.run(&format!("BEGIN; LOCK TABLE oncegate.{table} IN ACCESS EXCLUSIVE MODE"));
        let listen = format!("listen = \"{address}\"");
        let process = Gate::before(&upstream).store_url(&database.url).server(&listen).spawn();
        waits(&process);
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let line = eventually("it says that it waits", || {
            process.log().lines().find(|line| line.contains("this configuration")).map(str::to_owned)
        });
        assert!(line.contains("\"store\":\"PostgreSQL "), "{line}");
        locker.run("COMMIT");
        assert_eq!(process.address("listening"), Some(address));
        Request::post("/charges").key(table).body("{}").send(address).expect(200, "executed");
    }
}

#[test]
fn a_server_that_hangs() {
    let Some(server) = Postgres::start() else { return };
    let database = migrated_on(&server);
    let (upstream, signal) = holding();
    let mut gate = Gate::before(&upstream).store_url(&database.url).store("settle_timeout = \"1s\"").start();
    let address = gate.address;
    let running = std::thread::spawn(move || Request::post("/charges").key("running").body("{}").send(address));
    upstream.wait_for_runs(1);
    server.hang();
    let answers = flood(&gate, "hung", Duration::from_secs(7));
    expect_refused(&answers, &upstream, 1);
    // Once it is known to hang, nobody waits for it any more.
    let late: Vec<Duration> = answers.iter().rev().take(10).map(|(_, took)| *took).collect();
    eprintln!("at last {late:?}");
    let quick = answers.iter().filter(|(_, took)| *took < Duration::from_millis(100)).count();
    assert!(quick >= 30, "{quick} of {} were refused at once", answers.len());
    eventually("it is not ready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    signal.open();
    running.join().expect("an answer").expect(200, "unrecorded");
    server.go_on();
    expect_recovery(&mut gate, "hung-0-0", &upstream);
    eventually("what was answered is recorded", || {
        (gate.post("/charges", "running", "{}").word() == "replayed").then_some(())
    });
    assert_eq!(upstream.runs_of("running"), 1);
    expect_one_outage(&gate);
}

/// An upstream that answers when the signal is given.
fn holding() -> (Upstream, Signal) {
    let signal = Signal::new();
    let held = signal.clone();
    let reply = move |request: &crate::support::upstream::Request| {
        let reply = Reply::ok(format!("run {}", request.nth));
        if request.key().as_deref() == Some("running") { reply.hold_until(&held) } else { reply }
    };
    (Upstream::start(reply), signal)
}

/// As an upstream may that settles in its own long transaction.
#[test]
fn a_record_that_somebody_holds_makes_nobody_else_wait() {
    let Some(database) = migrated() else { return };
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key().as_deref() {
        Some("held") => Reply::ok("held").hold_until(&held),
        // Longer than several leases.
        Some(key) if key.starts_with("long") => Reply::ok(key).delay(Duration::from_secs(12)),
        _ => Reply::ok("quick"),
    });
    let plan = Gate::before(&upstream).store_url(&database.url).defaults("lease = \"5s\"");
    let (gate, other) =
        (plan.start(), Gate::before(&upstream).store_url(&database.url).defaults("lease = \"5s\"").start());
    let send = |key: &str| {
        let (request, address) = (Request::post("/charges").key(key).body("{}"), gate.address);
        std::thread::spawn(move || request.send(address))
    };
    let first = send("held");
    upstream.wait_for_runs(1);
    let holder = database.session();
    holder.run("BEGIN; SELECT FROM oncegate.record FOR UPDATE");
    let long: Vec<_> = (0..5).map(|nth| send(&format!("long-{nth}"))).collect();
    // The held attempt ends, and waits for its record; others must not wait for it.
    std::thread::sleep(Duration::from_secs(4));
    signal.open();
    let answers = flood(&gate, "quick", Duration::from_secs(3));
    let slowest = answers.iter().map(|(_, took)| *took).max().expect("answers");
    eprintln!("{} answers, the slowest in {slowest:?}", answers.len());
    assert!(answers.iter().all(|(answer, _)| answer.word() == "executed"));
    assert!(slowest < Duration::from_secs(4), "{slowest:?}");
    for long in long {
        long.join().expect("an answer").expect(200, "executed");
    }
    // Its lease is past, and its transaction at work: it is not unknown.
    let duplicate = other.post("/charges", "held", "{}");
    duplicate.expect_problem(409, "in-flight");
    assert_eq!(database.value("SELECT count(*) FROM oncegate.record WHERE state = 2"), "0");
    holder.run("COMMIT");
    let first = first.join().expect("an answer");
    assert!(["executed", "unrecorded"].contains(&first.word().as_str()), "{}", first.show());
    eventually("the held one is recorded", || {
        (other.post("/charges", "held", "{}").word() == "replayed").then_some(())
    });
    assert_eq!(upstream.runs_of("held"), 1);
}

/// Whoever waits for such a record asks the database to be told of its end, again and again.
#[test]
fn those_who_wait_for_a_record_that_somebody_holds_cost_nobody_a_lease() {
    let Some(database) = migrated() else { return };
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key().as_deref() {
        Some("held") => Reply::ok("held").hold_until(&held),
        Some(key) => Reply::ok(key).delay(Duration::from_secs(13)),
        None => Reply::ok(""),
    });
    let policy = "lease = \"5s\"\nin_flight = { wait = \"25s\" }";
    let plan = || Gate::before(&upstream).store_url(&database.url).defaults(policy);
    let (first, second) = (plan().start(), plan().start());
    let send = |gate: &Gate, key: &str| {
        let (request, address) = (Request::post("/charges").key(key).body("{}"), gate.address);
        std::thread::spawn(move || request.send(address))
    };
    let mut all = vec![send(&first, "held")];
    upstream.wait_for_runs(1);
    let holder = database.session();
    holder.run("BEGIN; SELECT FROM oncegate.record FOR UPDATE");
    let long: Vec<_> = (0..5).map(|nth| send(&second, &format!("long-{nth}"))).collect();
    all.extend((0..100).map(|_| send(&second, "held")));
    for (nth, long) in long.into_iter().enumerate() {
        long.join().expect("an answer").expect(200, "executed");
        assert_eq!(first.states(&format!("long-{nth}")), ["completed"]);
    }
    assert_eq!(
        second.metric("oncegate_leases_expired_total", &[]) + first.metric("oncegate_leases_expired_total", &[]),
        0.0
    );
    holder.run("COMMIT");
    signal.open();
    let answers: Vec<Response> = all.into_iter().map(|one| one.join().expect("an answer")).collect();
    answers[0].expect(200, "executed");
    for answer in &answers[1..] {
        // Its own lease was past for as long as nobody could extend it.
        assert!(["replayed", "outcome-unknown"].contains(&answer.word().as_str()), "{}", answer.show());
    }
    second.post("/charges", "held", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs_of("held"), 1);
}
