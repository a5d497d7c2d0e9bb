//! `[[consumers]]`: each message of a broker runs once. The same holds of every broker.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::support::brokers::{Broker, Nats};
use crate::support::store::migrated;
use crate::support::wait::within;
use crate::support::{Gate, Plan, Reply, Request, Signal, Upstream, eventually};

mod alone;
mod broken;
mod jetstream;

/// How long a part of a campaign may take, or what has to wait until a group has found out that a member was killed.
const LONG: Duration = Duration::from_secs(300);

/// Runs the same tests with one broker after the other.
macro_rules! with_each_broker {
    ($($test:ident)*) => {
        mod rabbitmq {
            $(#[test] fn $test() { super::$test::<crate::support::brokers::RabbitMq>(); })*
        }
        mod nats {
            $(#[test] fn $test() { super::$test::<crate::support::brokers::Nats>(); })*
        }
        #[cfg(feature = "kafka")]
        mod kafka {
            $(#[test] fn $test() { super::$test::<crate::support::brokers::Kafka>(); })*
        }
    };
}

with_each_broker! {
    a_message_runs_once_and_is_acknowledged
    what_is_given_up_is_a_dead_letter_with_its_reason
    one_at_a_time_is_in_the_order_of_the_queue
    a_shutdown_ends_what_runs_and_gives_back_the_rest
    a_broker_that_is_away_is_tried_again
    a_shutdown_while_the_broker_is_away_waits_for_nothing
    a_long_attempt_keeps_the_order
    an_attempt_that_takes_long_is_not_repeated
    gates_share_the_messages_and_take_over_from_one_that_is_killed
    nothing_runs_twice_and_nothing_is_lost_when_gates_and_the_broker_are_killed
}

fn consuming<B: Broker>(upstream: &Upstream, broker: &B, more: &str) -> Plan {
    consuming_from::<B>(upstream, &broker.source(), more)
}

fn consuming_from<B: Broker>(upstream: &Upstream, source: &str, more: &str) -> Plan {
    let id = B::ID;
    Gate::before(upstream).defaults("deliver = { attempts = 3, backoff = \"20ms\" }\n").routes(&format!(
        "[[routes]]\nname = \"orders\"\npath = \"/internal/{{*rest}}\"\n\
             [[consumers]]\nname = \"orders\"\nsource = \"{source}\"\nrequest = \"POST /internal/orders?via=queue\"\n\
             key = [\"{id}\"]\n{more}"
    ))
}

fn ended(gate: &Gate, result: &str) -> f64 {
    gate.metric("oncegate_messages_total", &["consumer=\"orders\"", &format!("result=\"{result}\"")])
}

fn wait_for(gate: &Gate, result: &str, count: usize) {
    eventually(&format!("{count} messages are {result}"), || (ended(gate, result) >= count as f64).then_some(()));
}

fn wait_for_the_end<B: Broker>(gate: &Gate, broker: &B) {
    within(LONG, "all is done", || {
        let is_idle = gate.metric("oncegate_messages_in_hand", &["consumer=\"orders\""]) == 0.0;
        (is_idle && broker.waiting() == 0).then_some(())
    });
}

fn is_connected(gate: &Gate) -> bool {
    gate.metric("oncegate_consumer_connected", &["consumer=\"orders\""]) == 1.0
}

fn wait_for_connection(gate: &Gate) {
    eventually("it has the messages", || is_connected(gate).then_some(()));
}

/// The keys that the upstream ran, in their order.
fn order(upstream: &Upstream) -> Vec<String> {
    upstream.seen().iter().filter_map(crate::support::upstream::Request::key).collect()
}

/// Ids of messages and how often the upstream ran each.
fn runs(upstream: &Upstream) -> BTreeMap<String, usize> {
    let mut runs = BTreeMap::new();
    for request in upstream.seen() {
        *runs.entry(request.key().expect("each has its key")).or_default() += 1;
    }
    runs
}

fn a_message_runs_once_and_is_acknowledged<B: Broker>() {
    let broker = B::shared();
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    // A message has neither the host nor the credentials of a client.
    let gate = consuming(&upstream, &broker, "").defaults("scope = [\"credential\"]\n").start();
    broker.publish(&[(Some("m-1"), "{\"n\":1}"), (Some("m-2"), "{\"n\":2}"), (Some("m-1"), "{\"n\":1}")]);
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
    assert_eq!((broker.waiting(), broker.take_dead().len()), (0, 0));
}

fn what_is_given_up_is_a_dead_letter_with_its_reason<B: Broker>() {
    let broker = B::shared();
    let upstream = Upstream::start(|request| match request.body.bytes.as_slice() {
        b"refused" => Reply::status("503 Service Unavailable", "later"),
        b"lost" => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nha").close(),
        _ => Reply::ok("done"),
    });
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[
        (Some("m-1"), "refused"),
        (Some("m-2"), "lost"),
        (None, "nameless"),
        (Some("m 4"), "spaced"),
        (Some("m-5"), "one"),
        (Some("m-5"), "another"),
    ]);
    wait_for(&gate, "dead", 5);
    wait_for(&gate, "done", 1);
    gate.stop();
    assert_eq!(broker.waiting(), 0);
    let mut dead: Vec<String> = broker
        .take_dead()
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
            &format!("spaced: key-invalid: {}: a key has visible ASCII characters only, and no spaces", B::ID),
        ]
    );
    let runs = runs(&upstream);
    assert_eq!((runs["m-1"], runs["m-2"], runs["m-5"]), (3, 1, 1));
}

fn one_at_a_time_is_in_the_order_of_the_queue<B: Broker>() {
    let broker = B::shared();
    // The first is released twice: what comes after it waits.
    let upstream = Upstream::start(|request| match request.nth {
        1 | 2 => Reply::status("503 Service Unavailable", "later"),
        _ => Reply::ok("done"),
    });
    let ids: Vec<String> = (0..12).map(|nth| format!("m-{nth:02}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    broker.keep_order();
    broker.publish(&messages);
    let gate = consuming(&upstream, &broker, "concurrency = 1\n").start();
    wait_for(&gate, "done", ids.len());
    let mut order = order(&upstream);
    order.dedup();
    assert_eq!(order, ids);
}

fn a_shutdown_ends_what_runs_and_gives_back_the_rest<B: Broker>() {
    let broker = B::shared();
    let held = Signal::new();
    let hold = held.clone();
    let upstream = Upstream::start(move |request| match request.body.bytes.as_slice() {
        b"slow" => Reply::ok("done").hold_until(&hold),
        _ => Reply::status("503 Service Unavailable", "later"),
    });
    let plan = consuming(&upstream, &broker, "").defaults("deliver = { backoff = \"1h\", max_backoff = \"1h\" }\n");
    let mut gate = plan.start();
    broker.publish(&[(Some("slow"), "slow"), (Some("later"), "later")]);
    upstream.wait_for_runs(2);
    gate.sigterm();
    std::thread::sleep(Duration::from_millis(300));
    assert!(gate.is_running(), "an attempt is under way");
    held.open();
    assert!(gate.wait().success());
    let left: Vec<_> = broker.take_waiting().into_iter().map(|message| message.body).collect();
    assert_eq!(left, ["later"]);
    assert!(broker.take_dead().is_empty());
}

fn a_broker_that_is_away_is_tried_again<B: Broker>() {
    let mut broker = B::start();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[(Some("m-1"), "{}")]);
    wait_for(&gate, "done", 1);
    assert!(is_connected(&gate));
    broker.kill9();
    eventually("the gate notices", || (!is_connected(&gate)).then_some(()));
    // What else the gate does goes on.
    gate.post("/internal/orders?via=queue", "k-1", "{}").expect(200, "executed");
    broker.run();
    broker.publish(&[(Some("m-1"), "{}"), (Some("m-2"), "{}")]);
    wait_for(&gate, "done", 3);
    // The first may come once more, where its acknowledgement was lost.
    upstream.wait_for_runs(3);
    assert_eq!(upstream.runs(), 3);
    // It says so once the connection lasts.
    eventually("the gate says that it is over", || gate.log().contains("messages come again").then_some(()));
    let log = gate.log();
    // A broker that takes long to come back may give another reason meanwhile.
    assert_eq!(log.matches("\"no messages come").count(), 1, "one line for one outage:\n{log}");
    assert!(!log.contains(B::PASSWORD), "no password:\n{log}");
}

fn a_shutdown_while_the_broker_is_away_waits_for_nothing<B: Broker>() {
    let mut broker = B::start();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[(Some("m-1"), "{}")]);
    wait_for(&gate, "done", 1);
    broker.kill9();
    eventually("the gate notices", || gate.log().contains("no messages come").then_some(()));
    let start = Instant::now();
    gate.stop();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    broker.run();
    assert_eq!(upstream.runs(), 1);
}

/// Neither an acknowledgement that a broker waits for, nor its patience with a group, ends an attempt.
fn an_attempt_that_takes_long_is_not_repeated<B: Broker>() {
    let broker = B::shared();
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(3500)));
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[(Some("m-1"), "slow"), (Some("m-2"), "slow")]);
    wait_for(&gate, "done", 2);
    wait_for_the_end(&gate, &broker);
    assert_eq!((upstream.runs(), ended(&gate, "done")), (2, 2.0), "no copy came");
}

/// As before, where nothing else is taken meanwhile.
fn a_long_attempt_keeps_the_order<B: Broker>() {
    let broker = B::shared();
    broker.keep_order();
    let upstream = Upstream::start(|request| match request.body.bytes.as_slice() {
        b"slow" => Reply::ok("done").delay(Duration::from_millis(3500)),
        _ => Reply::ok("done"),
    });
    let gate = consuming(&upstream, &broker, "concurrency = 1\n").start();
    broker.publish(&[(Some("m-1"), "quick"), (Some("m-2"), "slow"), (Some("m-3"), "quick"), (Some("m-4"), "slow")]);
    wait_for(&gate, "done", 4);
    let gate = gate.stop().start();
    broker.publish(&[(Some("m-5"), "quick")]);
    wait_for(&gate, "done", 1);
    gate.stop();
    assert_eq!(broker.waiting(), 0);
    assert_eq!(order(&upstream), ["m-1", "m-2", "m-3", "m-4", "m-5"]);
}

fn gates_share_the_messages_and_take_over_from_one_that_is_killed<B: Broker>() {
    const MESSAGES: usize = 800;
    let Some(database) = migrated() else { return };
    let broker = B::start_for_many();
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(20)));
    let ids: Vec<String> = (0..MESSAGES).map(|nth| format!("m-{nth:04}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    let start = || {
        let plan = consuming(&upstream, &broker, "concurrency = 4\n").defaults("lease = \"1s\"\n");
        plan.store_url(&database.url).start()
    };
    let (first, second) = (start(), start());
    let (first_half, second_half) = messages.split_at(MESSAGES / 2);
    broker.publish(first_half);
    eventually("both have some", || (ended(&first, "done") > 5.0 && ended(&second, "done") > 5.0).then_some(()));
    first.kill9();
    broker.publish(second_half);
    wait_for_the_end(&second, &broker);
    second.stop();
    expect_each_once(&broker, &upstream, &ids);
}

/// No message ran twice, and each ran or is a dead letter. Returns how many are, all because their outcome is unknown.
fn expect_each_once<B: Broker>(broker: &B, upstream: &Upstream, ids: &[String]) -> usize {
    assert_eq!(broker.waiting(), 0);
    let runs = runs(upstream);
    let twice: Vec<_> = runs.iter().filter(|(_, count)| **count > 1).collect();
    assert!(twice.is_empty(), "these ran twice: {twice:?}");
    let dead = broker.take_dead();
    assert!(dead.iter().all(|letter| letter.reason.as_deref() == Some("outcome-unknown")), "{dead:?}");
    let dead: BTreeSet<String> = dead.into_iter().filter_map(|letter| letter.id).collect();
    let lost: Vec<_> = ids.iter().filter(|id| !runs.contains_key(*id) && !dead.contains(*id)).collect();
    assert!(lost.is_empty(), "these are lost: {lost:?}");
    dead.len()
}

/// Gates and the broker are killed while messages run.
fn nothing_runs_twice_and_nothing_is_lost_when_gates_and_the_broker_are_killed<B: Broker>() {
    const MESSAGES: usize = 5000;
    let mut broker = B::start();
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(4)));
    let ids: Vec<String> = (0..MESSAGES).map(|nth| format!("m-{nth:04}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    broker.publish(&messages);
    let mut plan = consuming(&upstream, &broker, "");
    let goes_on = || {
        // Together they leave some for the end.
        let (before, more) = (upstream.runs(), fastrand::usize(20..MESSAGES / (2 * B::KILLS + 2)));
        within(LONG, &format!("{more} requests more"), || (upstream.runs() >= before + more).then_some(()));
    };
    for round in 0..B::KILLS {
        let gate = plan.start();
        if round == 1 {
            goes_on();
            broker.kill9();
            broker.run();
        }
        goes_on();
        plan = gate.kill9();
    }
    let gate = plan.start();
    wait_for_the_end(&gate, &broker);
    gate.stop();
    expect_each_once(&broker, &upstream, &ids);
}

/// The same at length: two gates on one database take 100,000 messages, and one of them or the broker is killed again and again.
fn a_hundred_thousand_messages<B: Broker>() {
    const MESSAGES: usize = 100_000;
    let database = migrated().expect("PostgreSQL is installed");
    let mut broker = B::start_for_many();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let ids: Vec<String> = (0..MESSAGES).map(|nth| format!("m-{nth:05}")).collect();
    let messages: Vec<(Option<&str>, &str)> = ids.iter().map(|id| (Some(&**id), "{}")).collect();
    broker.publish(&messages);
    let start = || {
        let plan = consuming(&upstream, &broker, "concurrency = 16\n").defaults("lease = \"2s\"\n");
        plan.store_url(&database.url).start()
    };
    let mut gates = vec![start(), start()];
    let mut kills = BTreeMap::new();
    loop {
        let until = upstream.runs() + fastrand::usize(MESSAGES / 100..MESSAGES / 25);
        if until > MESSAGES * 9 / 10 {
            break;
        }
        within(LONG, &format!("{until} messages ran"), || (upstream.runs() >= until).then_some(()));
        if fastrand::usize(0..4) == 0 {
            broker.kill9();
            broker.run();
            *kills.entry("broker").or_insert(0) += 1;
        } else {
            let killed = gates.swap_remove(fastrand::usize(0..gates.len())).kill9();
            gates.push(killed.start());
            *kills.entry("gate").or_insert(0) += 1;
        }
    }
    let is_idle = |gate: &Gate| gate.metric("oncegate_messages_in_hand", &["consumer=\"orders\""]) == 0.0;
    within(LONG, "all is done", || (gates.iter().all(is_idle) && broker.waiting() == 0).then_some(()));
    gates.into_iter().for_each(|gate| drop(gate.stop()));
    let unknown = expect_each_once(&broker, &upstream, &ids);
    eprintln!("{MESSAGES} messages, killed {kills:?}: none ran twice, none is lost, {unknown} are unknown");
}

/// By `tests/run --long`.
mod campaign {
    #[test]
    #[ignore = "takes long: `tests/run --long` runs it"]
    fn rabbitmq() {
        super::a_hundred_thousand_messages::<crate::support::brokers::RabbitMq>();
    }

    #[test]
    #[ignore = "takes long: `tests/run --long` runs it"]
    fn nats() {
        super::a_hundred_thousand_messages::<crate::support::brokers::Nats>();
    }
}

#[test]
fn a_consumer_of_nats_that_would_lose_messages_is_not_used() {
    let broker = Nats::start();
    broker.configure(3, 1000);
    broker.publish(&[(Some("m-1"), "{}")]);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    eventually("the gate says why", || gate.log().contains("must have max_deliver = -1").then_some(()));
    assert_eq!(upstream.runs(), 0);
    broker.configure(-1, 1000);
    wait_for(&gate, "done", 1);
    // Dead letters would be messages again.
    let gate = consuming(&upstream, &broker, "dead_letter = \"orders.failed\"\n").start();
    eventually("the gate says why", || gate.log().contains("belongs to the stream ORDERS itself").then_some(()));
}

/// NATS checks no headers, and the client library ends a connection over which headers come that it cannot read.
#[test]
fn a_message_of_nats_with_unreadable_headers_is_a_dead_letter() {
    let broker = Nats::start();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[(Some("m-1"), "before")]);
    let wrong = [
        ("\r\nX-Name: caf\u{e9}", "they are not UTF-8"),
        ("\r\nnot a name: x", "a name has a character that names cannot have"),
        ("\r\nno colon", "a line has no colon"),
        ("\r\nX: a\rb", "a value has a carriage return"),
        ("\r\nX: a\r\n\r\n b", "a line has no colon"),
        (" 503", "they have a status, as only answers of the server do"),
        (" 404 No Messages", "they have a status, as only answers of the server do"),
    ];
    for (headers, _) in wrong {
        broker.publish_raw(headers, "odd");
    }
    broker.publish(&[(Some("m-2"), "after")]);
    wait_for(&gate, "dead", wrong.len());
    wait_for(&gate, "done", 2);
    gate.stop();
    assert_eq!(broker.waiting(), 0);
    let mut dead: Vec<_> = broker.take_dead().into_iter().map(|letter| letter.reason.expect("a reason")).collect();
    let mut reasons = wrong.map(|(_, problem)| format!("headers-invalid: its headers cannot be read: {problem}"));
    dead.sort();
    reasons.sort();
    assert_eq!(dead, reasons);
    assert_eq!(runs(&upstream), BTreeMap::from([("m-1".to_owned(), 1), ("m-2".to_owned(), 1)]));
}

/// What was given up is not given up again while an earlier message holds the acknowledgements up.
#[test]
fn a_message_of_nats_that_cannot_be_read_is_one_dead_letter() {
    let broker = Nats::start();
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.body.bytes.as_slice() {
        b"slow" => Reply::ok("done").hold_until(&held),
        _ => Reply::ok("done"),
    });
    let gate = consuming(&upstream, &broker, "").start();
    broker.publish(&[(Some("m-1"), "slow")]);
    upstream.wait_for_runs(1);
    for number in 1..=3 {
        broker.publish_raw("\r\nno colon", "odd");
        wait_for(&gate, "dead", number);
        assert_eq!(ended(&gate, "dead"), number as f64);
    }
    signal.open();
    wait_for(&gate, "done", 1);
    gate.stop();
    assert_eq!((broker.waiting(), broker.take_dead().len()), (0, 3));
}

/// The headers of a dead letter come on top.
#[test]
fn a_message_of_nats_that_has_no_room_for_a_header_is_a_dead_letter() {
    const MOST: usize = 1 << 20;
    let broker = Nats::start();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    let room = |bytes: usize| "x".repeat(MOST - bytes);
    broker.publish_raw(&format!("\r\nX-Long: {}", "y".repeat(2000)), &room(2100));
    broker.publish_bare(&room(0));
    broker.publish(&[(Some("m-1"), "after")]);
    wait_for(&gate, "dead", 2);
    wait_for(&gate, "done", 1);
    gate.stop();
    assert_eq!(broker.waiting(), 0);
    let mut dead: Vec<_> = broker.take_dead().into_iter().map(|letter| (letter.body.len(), letter.reason)).collect();
    dead.sort();
    let reason = "key-missing: the message has no key".to_owned();
    assert_eq!(dead, [(MOST - 2100, Some(reason)), (MOST, None)]);
}

#[test]
fn an_encrypted_nats_is_trusted_by_its_certificate() {
    let broker = Nats::start_encrypted();
    broker.publish(&[(Some("m-1"), "{}")]);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let plan = consuming(&upstream, &broker, "");
    let gate = plan.start();
    eventually("the gate says why", || gate.log().contains("no messages come").then_some(()));
    assert_eq!(upstream.runs(), 0);
    let gate = gate.stop().env("SSL_CERT_FILE", broker.authority().display().to_string()).start();
    wait_for(&gate, "done", 1);
    assert!(!gate.log().contains(Nats::PASSWORD));
}
