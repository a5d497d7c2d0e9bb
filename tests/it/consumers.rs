//! `[[consumers]]`: each message of a queue of RabbitMQ runs once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::support::{Gate, Plan, RabbitMq, Reply, Request, Signal, Upstream, eventually};

const QUEUE: &str = "orders";
const DEAD: &str = "orders.dead-letter";

fn broker() -> RabbitMq {
    let broker = RabbitMq::start();
    broker.declare(QUEUE);
    broker
}

fn consuming(upstream: &Upstream, broker: &RabbitMq, more: &str) -> Plan {
    let source = broker.source(QUEUE);
    Gate::before(upstream)
        .defaults("deliver = { attempts = 3, backoff = \"20ms\" }\n")
        .routes(&format!(
            "[[routes]]\nname = \"orders\"\npath = \"/internal/{{*rest}}\"\n\
             [[consumers]]\nname = \"orders\"\nsource = \"{source}\"\nrequest = \"POST /internal/orders?via=queue\"\n{more}"
        ))
}

fn ended(gate: &Gate, result: &str) -> f64 {
    gate.metric("oncegate_messages_total", &["consumer=\"orders\"", &format!("result=\"{result}\"")])
}

fn wait_for(gate: &Gate, result: &str, count: usize) {
    eventually(&format!("{count} messages are {result}"), || (ended(gate, result) >= count as f64).then_some(()));
}

/// Ids of messages and how often the upstream ran each.
fn runs(upstream: &Upstream) -> BTreeMap<String, usize> {
    let mut runs = BTreeMap::new();
    for request in upstream.seen() {
        *runs.entry(request.key().expect("each has its key")).or_default() += 1;
    }
    runs
}

#[test]
fn a_message_runs_once_and_is_acknowledged() {
    let broker = broker();
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    // A message has neither the host nor the credentials of a client.
    let gate = consuming(&upstream, &broker, "").defaults("scope = [\"credential\"]\n").start();
    broker.publish(QUEUE, &[(Some("m-1"), "{\"n\":1}"), (Some("m-2"), "{\"n\":2}"), (Some("m-1"), "{\"n\":1}")]);
    wait_for(&gate, "done", 3);
    assert_eq!(upstream.runs(), 2, "the copy is a replay");
    let seen = upstream.seen().into_iter().find(|request| request.key().as_deref() == Some("m-1")).expect("it ran");
    assert!(seen.start_line().starts_with("POST /internal/orders?via=queue "), "{}", seen.start_line());
    assert_eq!(seen.body.bytes, b"{\"n\":1}");
    let header = |name: &str| seen.head.get(name);
    assert_eq!(header("content-type").as_deref(), Some("application/json"));
    assert_eq!(header("content-length").as_deref(), Some("7"));
    assert_eq!(header("x-source").as_deref(), Some("shop"));
    assert!(header("idempotency-attempt").is_some() && header("host").is_some());
    // A client's request with its key is a retry of it.
    let request = Request::post("/internal/orders?via=queue").key("m-2").header("content-type", "application/json");
    request.body("{\"n\":2}").send(&gate).expect(200, "replayed");
    gate.stop();
    assert_eq!((broker.waiting(QUEUE), broker.waiting(DEAD)), (0, 0));
}

#[test]
fn what_is_given_up_is_a_dead_letter_with_its_reason() {
    let broker = broker();
    let upstream = Upstream::start(|request| match request.body.bytes.as_slice() {
        b"refused" => Reply::status("503 Service Unavailable", "later"),
        b"lost" => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nha").close(),
        _ => Reply::ok("done"),
    });
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(
        QUEUE,
        &[
            (Some("m-1"), "refused"),
            (Some("m-2"), "lost"),
            (None, "nameless"),
            (Some("m 4"), "spaced"),
            (Some("m-5"), "one"),
            (Some("m-5"), "another"),
        ],
    );
    wait_for(&gate, "dead", 5);
    wait_for(&gate, "done", 1);
    gate.stop();
    assert_eq!(broker.waiting(QUEUE), 0);
    let mut dead: Vec<String> = broker
        .take(DEAD)
        .into_iter()
        .map(|letter| format!("{}: {}", letter.body, letter.reason.expect("a reason")))
        .collect();
    dead.sort();
    let one_or_other = dead.remove(0);
    assert!(["another: key-reused", "one: key-reused"].contains(&&*one_or_other), "{one_or_other}");
    assert_eq!(
        dead,
        [
            "lost: outcome-unknown",
            "nameless: key-missing: the message has no key",
            "refused: released: 503, after 3 attempts",
            "spaced: key-invalid: property:message-id: a key has visible ASCII characters only, and no spaces",
        ]
    );
    let runs = runs(&upstream);
    assert_eq!((runs["m-1"], runs["m-2"], runs["m-5"]), (3, 1, 1));
}

#[test]
fn one_at_a_time_is_in_the_order_of_the_queue() {
    let broker = broker();
    // The second is released twice: what comes after it waits.
    let upstream = Upstream::start(|request| match request.nth {
        1 | 2 => Reply::status("503 Service Unavailable", "later"),
        _ => Reply::ok("done"),
    });
    let ids: Vec<String> = (0..12).map(|nth| format!("m-{nth:02}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    broker.publish(QUEUE, &messages);
    let gate = consuming(&upstream, &broker, "concurrency = 1\n").start();
    wait_for(&gate, "done", ids.len());
    let mut order: Vec<String> = upstream.seen().iter().filter_map(crate::support::upstream::Request::key).collect();
    order.dedup();
    assert_eq!(order, ids);
}

#[test]
fn a_shutdown_ends_what_runs_and_gives_back_the_rest() {
    let broker = broker();
    let held = Signal::new();
    let hold = held.clone();
    let upstream = Upstream::start(move |request| match request.body.bytes.as_slice() {
        b"slow" => Reply::ok("done").hold_until(&hold),
        _ => Reply::status("503 Service Unavailable", "later"),
    });
    let plan = consuming(&upstream, &broker, "").defaults("deliver = { backoff = \"1h\", max_backoff = \"1h\" }\n");
    let mut gate = plan.start();
    broker.publish(QUEUE, &[(Some("slow"), "slow"), (Some("later"), "later")]);
    upstream.wait_for_runs(2);
    gate.sigterm();
    std::thread::sleep(Duration::from_millis(300));
    assert!(gate.is_running(), "an attempt is under way");
    held.open();
    assert!(gate.wait().success());
    let left: Vec<_> = broker.take(QUEUE).into_iter().map(|message| message.body).collect();
    assert_eq!(left, ["later"]);
    assert_eq!(broker.waiting(DEAD), 0);
}

#[test]
fn a_broker_that_is_away_is_tried_again() {
    let mut broker = broker();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(QUEUE, &[(Some("m-1"), "{}")]);
    wait_for(&gate, "done", 1);
    assert_eq!(gate.metric("oncegate_consumer_connected", &["consumer=\"orders\""]), 1.0);
    broker.kill9();
    eventually("the gate notices", || {
        (gate.metric("oncegate_consumer_connected", &["consumer=\"orders\""]) == 0.0).then_some(())
    });
    // What else the gate does goes on.
    gate.post("/internal/orders?via=queue", "k-1", "{}").expect(200, "executed");
    broker.run();
    broker.publish(QUEUE, &[(Some("m-1"), "{}"), (Some("m-2"), "{}")]);
    wait_for(&gate, "done", 3);
    assert_eq!(upstream.runs(), 3);
    let log = gate.log();
    assert_eq!(log.matches("no messages come").count(), 1, "one line for one outage:\n{log}");
    assert_eq!(log.matches("messages come again").count(), 1, "{log}");
    assert!(!log.contains("guest"), "no password:\n{log}");
}

/// Gates and the broker are killed while messages run. The upstream counts: none runs twice, and each is done, or is a dead
/// letter because its outcome is unknown.
#[test]
fn nothing_runs_twice_and_nothing_is_lost_when_gates_and_the_broker_are_killed() {
    const MESSAGES: usize = 600;
    let mut broker = broker();
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(4)));
    let ids: Vec<String> = (0..MESSAGES).map(|nth| format!("m-{nth:04}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    broker.publish(QUEUE, &messages);
    let mut plan = consuming(&upstream, &broker, "");
    for round in 0..4 {
        let gate = plan.start();
        let before = upstream.runs();
        eventually("it goes on", || (upstream.runs() > before + 40).then_some(()));
        if round == 1 {
            broker.kill9();
            broker.run();
            eventually("it goes on with the broker", || (upstream.runs() > before + 80).then_some(()));
        }
        plan = gate.kill9();
    }
    let gate = plan.start();
    eventually("all is done", || {
        let is_idle = gate.metric("oncegate_messages_in_hand", &["consumer=\"orders\""]) == 0.0;
        (is_idle && broker.waiting(QUEUE) == 0).then_some(())
    });
    gate.stop();
    assert_eq!(broker.waiting(QUEUE), 0);
    let runs = runs(&upstream);
    let twice: Vec<_> = runs.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "these ran twice: {twice:?}");
    let dead = broker.take(DEAD);
    assert!(dead.iter().all(|letter| letter.reason.as_deref() == Some("outcome-unknown")), "{dead:?}");
    let dead: BTreeSet<String> = dead.into_iter().filter_map(|letter| letter.id).collect();
    let lost: Vec<_> = ids.iter().filter(|id| !runs.contains_key(*id) && !dead.contains(*id)).collect();
    assert!(lost.is_empty(), "these are lost: {lost:?}");
    println!("{MESSAGES} messages: {} ran once, {} are reported as unknown", runs.len(), dead.len());
}
