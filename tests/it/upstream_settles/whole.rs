//! The real gate, PostgreSQL and the example upstream, whose requests die, wait and come late.

use std::net::SocketAddr;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use serde_json::json;

use super::example::{Example, pay};
use super::migrated;
use crate::support::wait::PATIENCE;
use crate::support::{Client, Gate, Plan, Reply, Request, Response, Upstream, eventually};

/// A short lease, of which a busy machine loses none.
const LEASE: Duration = Duration::from_secs(5);

#[track_caller]
fn example() -> Option<Example> {
    Example::start(migrated()?)
}

/// A gate before the example, on its database, with leases that end soon.
fn before(example: &Example, defaults: &str) -> Plan {
    let plan = Gate::before_url(&example.url).store_url(&example.database.url);
    plan.defaults(&format!("lease = \"{}s\"\n{defaults}", LEASE.as_secs()))
}

/// Sends a request that may take longer than others, to a gate that may die meanwhile.
fn in_background(request: Request, to: SocketAddr) -> JoinHandle<Option<Response>> {
    spawn(move || {
        let mut client = Client::connect(to);
        client.wire.stream.set_read_timeout(Some(2 * PATIENCE)).expect("not zero");
        client.send(request.bytes()).try_response("POST").filter(|response| response.body.complete)
    })
}

/// Holds that this is the first answer to a payment, as it was recorded.
#[track_caller]
fn expect_receipt(response: &Response, word: &str, charge: u64) {
    response.expect(201, word);
    assert_eq!(response.get("location"), Some(format!("/v1/charges/{charge}")));
    assert_eq!(response.text(), format!("{{\"id\": \"ch_{charge}\", \"amount\": 100}}\n"));
}

#[test]
fn an_upstream_that_dies_between_its_commit_and_its_answer() {
    let Some(example) = example() else { return };
    let gate = before(&example, "").start();
    let (request, _) = example.faulty("k-1", "dies-committed");
    let first = request.send(&gate);
    expect_receipt(&first, "executed", 1);
    eventually("what it was completed by is logged", || {
        gate.log().contains("was completed in the store").then_some(())
    });
    assert!(!gate.log().contains("the outcome of an attempt is unknown"), "{}", gate.log());
    // There is no upstream any more, and the next gate knows it too.
    let gate = gate.kill9().start();
    let retry = pay("k-1").send(&gate);
    expect_receipt(&retry, "replayed", 1);
    first.expect_repeated_by(&retry);
    assert_eq!(example.charges(), 1);
}

#[test]
fn a_gate_that_dies_before_the_answer() {
    let Some(example) = example() else { return };
    let gate = before(&example, "").start();
    let (request, held) = example.faulty("k-1", "waits-completed");
    let first = in_background(request, gate.address);
    held.wait();
    let gate = gate.kill9().start();
    assert!(first.join().unwrap().is_none());
    pay("k-1").send(&gate).expect_problem(409, "in-flight");
    held.let_go();
    assert_eq!(held.done(), 201);
    expect_receipt(&pay("k-1").send(&gate), "replayed", 1);
    assert_eq!(example.charges(), 1);
}

#[test]
fn the_first_client_gets_what_was_recorded() {
    let Some(example) = example() else { return };
    let gate = before(&example, "").start();
    let (request, _) = example.faulty("k-1", "says-otherwise");
    let first = request.send(&gate);
    expect_receipt(&first, "executed", 1);
    assert_eq!(first.get("x-otherwise"), None);
    let retry = pay("k-1").send(&gate);
    retry.expect(201, "replayed");
    first.expect_repeated_by(&retry);
    assert_eq!(example.charges(), 1);
}

#[test]
fn a_rollback_leaves_the_record_to_the_gate() {
    let Some(example) = example() else { return };
    let gate = before(&example, "").start();
    // It answers 503, which releases.
    let (request, _) = example.faulty("k-1", "rolls-back");
    request.send(&gate).expect(503, "released");
    assert_eq!(example.charges(), 0);
    pay("k-1").send(&gate).expect(201, "executed");
    pay("k-1").send(&gate).expect(201, "replayed");
    // It dies, and nobody can tell from here what it did.
    let (request, _) = example.faulty("k-2", "dies-charged");
    request.send(&gate).expect_problem(502, "upstream-broken");
    pay("k-2").send(&gate).expect_problem(409, "outcome-unknown");
    assert_eq!(example.charges(), 1);
}

#[test]
fn a_request_without_a_key_is_none_of_its_business() {
    let Some(example) = example() else { return };
    let gate = before(&example, "").start();
    let unprotected = Request::post("/v1/charges").body("{\"amount\": 100}");
    for charge in 1..=2 {
        let response = unprotected.send(&gate);
        assert_eq!((response.status, response.word().as_str()), (201, ""), "{}", response.show());
        assert_eq!(example.charges(), charge);
    }
    // Nor is one that is wrong, whose answer the gate records.
    let wrong = Request::post("/v1/charges").key("k-1").body("{}");
    wrong.send(&gate).expect(400, "executed");
    wrong.send(&gate).expect(400, "replayed");
    assert_eq!(example.charges(), 2);
}

/// An attempt whose gate has died, and whose key was claimed again before it gets to its work, or to its end: by an
/// operator's leave, or by the policy.
#[test]
fn an_attempt_that_was_superseded_rolls_back() {
    std::thread::scope(|scope| {
        for by in ["operator", "policy"] {
            for faults in ["waits-before", "unchecked waits-charged"] {
                scope.spawn(move || superseded(by, faults));
            }
        }
    });
}

fn superseded(by: &str, faults: &str) {
    let Some(example) = example() else { return };
    let other = before(&example, if by == "policy" { "recovery = \"retry\"" } else { "" }).start();
    let gate = before(&example, "").start();
    let (request, held) = example.faulty("k-1", faults);
    let first = in_background(request, gate.address);
    held.wait();
    drop(gate.kill9());
    assert!(first.join().unwrap().is_none());
    other.wait_for_state("k-1", "unknown");
    if by == "operator" {
        let id = other.records("key=k-1")[0]["id"].as_str().expect("an id").to_owned();
        let release = serde_json::json!({"action": "release", "reason": "it never came to the bank"});
        let resolved = other.admin("POST", &format!("/api/v1/records/{id}/resolve"), Some(&release));
        assert_eq!(resolved.status, 204, "{}", resolved.show());
    }
    let second = pay("k-1").send(&other);
    second.expect(201, "executed");
    held.let_go();
    assert_eq!(held.done(), 409, "{by}, {faults}");
    assert_eq!(example.charges(), 1, "{by}, {faults}");
    let retry = pay("k-1").send(&other);
    retry.expect(201, "replayed");
    second.expect_repeated_by(&retry);
}

/// Nobody takes the key from an attempt that holds its record, and what it says counts, though its gate be long gone.
#[test]
fn an_attempt_that_holds_its_record_is_not_superseded() {
    let Some(example) = example() else { return };
    let other = before(&example, "recovery = \"retry\"").start();
    let gate = before(&example, "").start();
    let (request, held) = example.faulty("k-1", "waits-charged");
    let first = in_background(request, gate.address);
    held.wait();
    drop(gate.kill9());
    assert!(first.join().unwrap().is_none());
    let began = Instant::now();
    while began.elapsed() < 2 * LEASE {
        pay("k-1").send(&other).expect_problem(409, "in-flight");
        sleep(Duration::from_millis(100));
    }
    held.let_go();
    assert_eq!(held.done(), 201);
    expect_receipt(&pay("k-1").send(&other), "replayed", 1);
    assert_eq!(example.charges(), 1);
}

/// The upstream's timeout is over while its transaction is open: nobody knows how it ends, until it has.
#[test]
fn a_transaction_that_outlasts_its_attempt_counts() {
    let Some(example) = example() else { return };
    let plan = before(&example, "").upstream("timeout = \"3s\"").store("settle_timeout = \"3s\"");
    let gate = plan.start();
    for (key, faults, charge) in [("k-1", "waits-charged", 1), ("k-2", "waits-completed", 2)] {
        let (request, held) = example.faulty(key, faults);
        request.send(&gate).expect_problem(504, "upstream-timeout");
        pay(key).send(&gate).expect_problem(409, "in-flight");
        // Others are not held up by an ending that cannot be written down.
        pay(&format!("{key}-other")).send(&gate).expect(201, "executed");
        held.let_go();
        assert_eq!(held.done(), 201);
        let retry = eventually("it is completed", || {
            let retry = pay(key).send(&gate);
            (retry.status != 409).then_some(retry)
        });
        retry.expect(201, "replayed");
        assert_eq!(example.charges(), 2 * charge);
    }
}

/// A duplicate that waits at another gate gets the answer when the transaction commits.
#[test]
fn who_waits_elsewhere_gets_the_answer() {
    let Some(example) = example() else { return };
    let plan = before(&example, "in_flight = { wait = \"20s\" }");
    let (gate, other) = (plan.start(), before(&example, "in_flight = { wait = \"20s\" }").start());
    let (request, held) = example.faulty("k-1", "waits-charged");
    let first = in_background(request, gate.address);
    held.wait();
    let waiting = in_background(pay("k-1"), other.address);
    sleep(LEASE * 3 / 2);
    assert!(!waiting.is_finished());
    held.let_go();
    let first = first.join().unwrap().expect("an answer");
    expect_receipt(&first, "executed", 1);
    let second = waiting.join().unwrap().expect("an answer");
    second.expect(201, "replayed");
    first.expect_repeated_by(&second);
}

/// Unknown attempts whose upstream is at work after all: a policy that would run their requests again does not, and those
/// who ask for it hold up nobody else.
#[test]
fn an_unknown_attempt_that_is_at_work_is_left_alone() {
    let Some(database) = migrated() else { return };
    let upstream = Upstream::start(|request| match request.key().is_some_and(|key| key.starts_with("held")) {
        true => Reply::default().reset(),
        false => Reply::status("201 Created", "done"),
    });
    let Some(other) = migrated() else { return };
    let start = |url: &str| Gate::before(&upstream).store_url(url).defaults("recovery = \"retry\"").start();
    let gates = [start(&database.url), start(&database.url)];
    let others = [start(&other.url), start(&other.url)];

    let at_work = database.session();
    at_work.run("BEGIN");
    let keys = [0, 1, 2, 3].map(|number| format!("held-{number}"));
    for key in &keys {
        pay(key).send(&gates[0]).expect_problem(502, "upstream-broken");
        let attempt = upstream.last().head.get("idempotency-attempt").expect("a token");
        at_work.run(&format!("SELECT oncegate.assert_current('{attempt}')"));
    }
    let measured = measured(&gates, &others, Duration::from_secs(2), || {
        for key in &keys {
            for gate in &gates {
                pay(key).send(gate).expect_problem(409, "in-flight");
            }
        }
        sleep(Duration::from_millis(50));
    });
    measured.expect_alike();
    assert_eq!(upstream.runs_of(&keys[0]), 1);
    // Operators are not held up either, and what was refused does not happen later.
    let id = |key: &str| gates[0].records(&format!("key={key}"))[0]["id"].as_str().expect("an id").to_owned();
    let purged = gates[0].admin("DELETE", &format!("/api/v1/records/{}", id(&keys[1])), None);
    assert!(purged.status == 409 && purged.text().contains("pg_terminate_backend()"), "{}", purged.text());
    let resolve = json!({ "filter": { "key": keys[2] }, "action": "release", "reason": "tried" });
    let resolved = gates[1].admin("POST", "/api/v1/records/resolve", Some(&resolve)).json();
    assert_eq!([resolved["done"].clone(), resolved["failed"].clone()], [json!(0), json!(0)], "{resolved}");
    let purge = json!({ "filter": { "key": keys[3] }, "reason": "tried" });
    let purged = gates[0].admin("POST", "/api/v1/records/purge", Some(&purge)).json();
    assert_eq!([purged["done"].clone(), purged["failed"].clone()], [json!(0), json!(0)], "{purged}");
    // It has ended, and still nobody knows how.
    at_work.run("ROLLBACK");
    pay(&keys[0]).send(&gates[1]).expect_problem(502, "upstream-broken");
    assert_eq!(upstream.runs_of(&keys[0]), 2);
    for key in &keys[1..] {
        assert_eq!(gates[0].states(key), ["unknown"]);
    }
    let purged = gates[0].admin("DELETE", &format!("/api/v1/records/{}", id(&keys[1])), None);
    assert_eq!(purged.status, 204, "{}", purged.text());
}

/// One upstream holds its transaction for several leases: its key stays in flight, and nobody else is the worse for it.
#[test]
fn a_long_transaction_is_nobody_elses_business() {
    const TIME: Duration = Duration::from_secs(12);
    let (Some(example), Some(other)) = (example(), example()) else { return };
    let start = |example: &Example| [before(example, "").start(), before(example, "").start()];
    let (gates, others) = (start(&example), start(&other));
    let addresses = gates.each_ref().map(|gate| gate.address);

    let (request, held) = example.faulty("held", "waits-charged");
    let first = in_background(request, addresses[0]);
    // These are at work just as long, and hold nothing: only their leases, renewed in the same statements, keep them.
    let slow = [0, 1].map(|gate| {
        let (request, slow) = example.faulty(&format!("slow-{gate}"), "waits-before");
        (in_background(request, addresses[gate]), slow)
    });
    held.wait();
    slow.iter().for_each(|(_, slow)| slow.wait());
    let measured = measured(&gates, &others, TIME, || {
        for gate in &gates {
            pay("held").send(gate).expect_problem(409, "in-flight");
        }
        sleep(Duration::from_millis(100));
    });

    for (request, slow) in slow {
        slow.let_go();
        request.join().unwrap().expect("an answer").expect(201, "executed");
    }
    held.let_go();
    let first = first.join().unwrap().expect("an answer");
    first.expect(201, "executed");
    for gate in &gates {
        let retry = pay("held").send(gate);
        retry.expect(201, "replayed");
        first.expect_repeated_by(&retry);
        assert_eq!(gate.metric("oncegate_leases_expired_total", &[]), 0.0);
    }
    let count = measured.latencies.len() + 3;
    assert_eq!(example.charges(), count as u64);
    measured.expect_alike();
}

/// Latencies, sorted.
struct Measured {
    latencies: Vec<Duration>,
    /// Meanwhile, at gates that have another database: what slows the machine slows both.
    elsewhere: Vec<Duration>,
}

/// Measures both for this long, and goes on with `trouble` meanwhile.
fn measured(gates: &[Gate; 2], others: &[Gate; 2], time: Duration, trouble: impl Fn()) -> Measured {
    let measuring = [gates, others].map(|gates| {
        let addresses = gates.each_ref().map(|gate| gate.address);
        spawn(move || latencies(addresses, time))
    });
    while !measuring.iter().all(JoinHandle::is_finished) {
        trouble();
    }
    let [latencies, elsewhere] = measuring.map(|measuring| measuring.join().unwrap());
    Measured { latencies, elsewhere }
}

impl Measured {
    /// What has to wait for a lock gives up after two tenths of a second: of that, no client is to see anything.
    #[track_caller]
    fn expect_alike(&self) {
        let Self { latencies, elsewhere } = self;
        let shown = format!("{}; elsewhere {}", shown(latencies), shown(elsewhere));
        eprintln!("{shown}");
        assert!(at(latencies, 0.9) < at(elsewhere, 0.9) + Duration::from_millis(150), "{shown}");
    }
}

/// How long new keys take, through both gates, one after another on each of four connections; sorted.
fn latencies(gates: [SocketAddr; 2], time: Duration) -> Vec<Duration> {
    let clients = (0..4).map(|client| {
        spawn(move || {
            let mut connection = Client::connect(gates[client % 2]);
            let (began, mut took) = (Instant::now(), Vec::new());
            while began.elapsed() < time {
                let sent = Instant::now();
                connection.send(pay(&format!("new-{client}-{}", took.len())).bytes());
                connection.response().expect(201, "executed");
                took.push(sent.elapsed());
            }
            took
        })
    });
    let clients: Vec<_> = clients.collect();
    let mut took: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    took.sort();
    took
}

/// The latency that this part of all stay below.
fn at(sorted: &[Duration], part: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

fn shown(sorted: &[Duration]) -> String {
    format!(
        "{} in {:.1?} at the median, {:.1?} at 90 %, {:.1?} at most",
        sorted.len(),
        at(sorted, 0.5),
        at(sorted, 0.9),
        at(sorted, 1.0)
    )
}
