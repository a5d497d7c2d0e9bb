//! `concurrency = 1` with several gates, or several connections, at a queue of RabbitMQ: one has the messages, and the others stand
//! by. NATS and Kafka see to that themselves.

use std::time::Duration;

use super::{
    consuming, consuming_from, ended, expect_each_once, is_connected, order, runs, wait_for, wait_for_connection,
    wait_for_the_end,
};
use crate::servers::Database;
use crate::support::brokers::{Broker, RabbitMq};
use crate::support::store::migrated;
use crate::support::upstream::Request;
use crate::support::{Gate, Reply, Signal, Upstream, eventually};

const ALONE: &str = "concurrency = 1\n";

/// As long as a gate that stands by takes to ask twice, at least.
const A_WHILE: Duration = Duration::from_secs(3);

fn wait_until_it_stands_by(gate: &Gate) {
    eventually("it stands by", || gate.log().contains("this one stands by").then_some(()));
    assert!(!is_connected(gate));
}

/// Holds the answer to messages that are `slow`.
fn holding(held: &Signal) -> Upstream {
    let held = held.clone();
    Upstream::start(move |request: &Request| match request.body.bytes.as_slice() {
        b"slow" => Reply::ok("done").hold_until(&held),
        _ => Reply::ok("done"),
    })
}

fn ids() -> Vec<String> {
    (0..60).map(|nth| format!("m-{nth:02}")).collect()
}

fn messages(ids: &[String]) -> Vec<(Option<&str>, &str)> {
    ids.iter().map(|id| (Some(&**id), "{}")).collect()
}

/// A gate of several.
fn start(upstream: &Upstream, broker: &RabbitMq, database: &Database) -> Gate {
    consuming(upstream, broker, ALONE).defaults("lease = \"1s\"\n").store_url(&database.url).start()
}

fn gates_run_one_after_the_other(has_single_active_consumer: bool) {
    let Some(database) = migrated() else { return };
    let broker = RabbitMq::of_type("classic", has_single_active_consumer);
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(20)));
    let (ids, start) = (ids(), || start(&upstream, &broker, &database));
    let messages = messages(&ids);
    let first = start();
    wait_for_connection(&first);
    let second = start();
    wait_until_it_stands_by(&second);
    let (some, more) = messages.split_at(40);
    broker.publish(some);
    upstream.wait_for_runs(5);
    let first = first.kill9();
    broker.publish(more);
    wait_for_connection(&second);
    eventually("the last ran", || runs(&upstream).contains_key(&ids[ids.len() - 1]).then_some(()));
    wait_for_the_end(&second, &broker);
    let log = second.log();
    assert_eq!(log.matches("stands by").count(), 1, "{log}");
    assert!(!log.contains("no messages come"), "nothing is wrong:\n{log}");
    // One that was killed is one more.
    let first = first.start();
    wait_until_it_stands_by(&first);
    second.stop();
    wait_for_connection(&first);
    let order = order(&upstream);
    assert!(order.is_sorted(), "{order:?}");
    expect_each_once(&broker, &upstream, &ids);
}

#[test]
fn gates_run_one_after_the_other_what_a_classic_queue_has() {
    gates_run_one_after_the_other(false);
}

/// It takes no exclusive consumer.
#[test]
fn gates_run_one_after_the_other_what_a_classic_queue_has_for_a_single_active_consumer() {
    gates_run_one_after_the_other(true);
}

/// It takes any number of exclusive consumers, and none of them waits for another.
#[test]
fn a_quorum_queue_without_a_single_active_consumer_keeps_no_order_and_the_log_says_so() {
    let broker = RabbitMq::of_type("quorum", false);
    let held = Signal::new();
    let upstream = holding(&held);
    let first = consuming(&upstream, &broker, ALONE).start();
    wait_for_connection(&first);
    let second = consuming(&upstream, &broker, ALONE).start();
    wait_for_connection(&second);
    assert!(second.log().contains("declare it with x-single-active-consumer"), "{}", second.log());
    assert!(!first.log().contains("x-single-active-consumer"), "{}", first.log());
    broker.publish(&[(Some("m-1"), "slow"), (Some("m-2"), "quick")]);
    upstream.wait_for_runs(2);
    held.open();
    eventually("both are done", || (broker.waiting() == 0).then_some(()));
    first.stop();
    second.stop();
}

/// RabbitMQ itself has one of them wait.
#[test]
fn gates_run_one_after_the_other_what_a_quorum_queue_has_for_a_single_active_consumer() {
    let Some(database) = migrated() else { return };
    let broker = RabbitMq::of_type("quorum", true);
    let upstream = Upstream::start(|_| Reply::ok("done").delay(Duration::from_millis(20)));
    let (ids, start) = (ids(), || start(&upstream, &broker, &database));
    let messages = messages(&ids);
    // The one that came first has the messages.
    let first = start();
    wait_for_connection(&first);
    let second = start();
    wait_for_connection(&second);
    broker.publish(&messages);
    upstream.wait_for_runs(5);
    wait_for(&first, "done", 1);
    assert_eq!(ended(&second, "done"), 0.0, "both have messages");
    first.kill9();
    eventually("the last ran", || runs(&upstream).contains_key(&ids[ids.len() - 1]).then_some(()));
    wait_for_the_end(&second, &broker);
    assert!(!second.log().contains("x-single-active-consumer"), "{}", second.log());
    second.stop();
    let order = order(&upstream);
    assert!(order.is_sorted(), "{order:?}");
    expect_each_once(&broker, &upstream, &ids);
}

/// The one that stands by does not begin with the next message while the last one of the other is under way.
#[test]
fn a_shutdown_gives_the_queue_to_another_when_its_last_message_has_ended() {
    let broker = RabbitMq::shared();
    let held = Signal::new();
    let upstream = holding(&held);
    let mut first = consuming(&upstream, &broker, ALONE).start();
    wait_for_connection(&first);
    let second = consuming(&upstream, &broker, ALONE).start();
    wait_until_it_stands_by(&second);
    broker.publish(&[(Some("m-1"), "slow"), (Some("m-2"), "quick")]);
    upstream.wait_for_runs(1);
    first.sigterm();
    std::thread::sleep(A_WHILE);
    assert_eq!(order(&upstream), ["m-1"]);
    held.open();
    assert!(first.wait().success());
    wait_for(&second, "done", 1);
    second.stop();
    assert_eq!(order(&upstream), ["m-1", "m-2"]);
    assert_eq!((broker.waiting(), broker.take_dead().len()), (0, 0));
}

/// RabbitMQ still has the first message at the lost connection when the gate comes over another.
#[test]
fn a_lost_connection_that_the_broker_still_has_keeps_the_order() {
    let broker = RabbitMq::shared();
    let link = broker.link();
    let held = Signal::new();
    let upstream = holding(&held);
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source_over(&link), ALONE).start();
    broker.publish(&[(Some("m-1"), "slow"), (Some("m-2"), "quick")]);
    upstream.wait_for_runs(1);
    link.lose_at_the_gate();
    wait_until_it_stands_by(&gate);
    std::thread::sleep(A_WHILE);
    assert_eq!(order(&upstream), ["m-1"]);
    link.lose_at_the_broker();
    eventually("it has the first message again", || {
        (gate.metric("oncegate_messages_in_hand", &["consumer=\"orders\""]) == 1.0).then_some(())
    });
    held.open();
    wait_for(&gate, "done", 2);
    gate.stop();
    assert_eq!(order(&upstream), ["m-1", "m-2"]);
}

/// As a gate of an older version is.
#[test]
fn a_consumer_that_is_not_exclusive_has_the_queue_until_it_is_gone() {
    let broker = RabbitMq::shared();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let other = broker.consume();
    let gate = consuming(&upstream, &broker, ALONE).start();
    wait_until_it_stands_by(&gate);
    drop(other);
    wait_for_connection(&gate);
    broker.publish(&[(Some("m-1"), "{}")]);
    wait_for(&gate, "done", 1);
    let log = gate.log();
    assert!(log.contains("consuming messages") && !log.contains("no messages come"), "{log}");
}
