//! NATS: rights that a user lacks, and limits of a consumer.

use std::time::Duration;

use super::{consuming, consuming_from, ended, is_connected, wait_for, wait_for_connection};
use crate::support::brokers::{Broker, Nats};
use crate::support::{Reply, Upstream, eventually};

/// As the book lists them: docs/recipes/consumers.md.
const ALL: [&str; 8] = [
    "$JS.API.STREAM.INFO.ORDERS",
    "$JS.API.CONSUMER.INFO.ORDERS.gate",
    "$JS.API.STREAM.NAMES",
    "$JS.API.CONSUMER.MSG.NEXT.ORDERS.gate",
    "$JS.ACK.ORDERS.gate.>",
    "ORDERS.dead-letter",
    "$JS.API.STREAM.CREATE.ORDERS-dead-letter",
    "$JS.API.STREAM.MSG.GET.ORDERS",
];

#[test]
fn the_rights_that_the_book_lists_are_enough() {
    let (broker, source) = Nats::start_limited(&ALL);
    broker.publish_raw("\r\nno colon", "odd");
    broker.publish(&[(Some("m-1"), "{}"), (None, "nameless")]);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming_from::<Nats>(&upstream, &source, "").start();
    wait_for(&gate, "done", 1);
    wait_for(&gate, "dead", 2);
    assert!(!gate.log().contains("Permissions Violation"), "{}", gate.log());
    gate.stop();
    assert_eq!(broker.waiting(), 0);
}

#[test]
fn a_right_that_is_missing_is_an_outage_with_the_words_of_the_server() {
    let mut missing = ALL.to_vec();
    // The last one has a warning of its own.
    missing.pop();
    for subject in missing {
        let others: Vec<&str> = ALL.into_iter().filter(|other| *other != subject).collect();
        let (broker, source) = Nats::start_limited(&others);
        // One message to acknowledge, and one for the dead letters.
        broker.publish(&[(Some("m-1"), "{}"), (None, "nameless")]);
        let upstream = Upstream::start(|_| Reply::ok("done"));
        let gate = consuming_from::<Nats>(&upstream, &source, "").start();
        let shown = if subject.starts_with("$JS.ACK.") { "$JS.ACK.>" } else { subject };
        let words = format!("Permissions Violation for Publish to \\\"{shown}\\\"");
        eventually(&words, || gate.log().contains(&words).then_some(()));
        std::thread::sleep(Duration::from_secs(1));
        assert!(!is_connected(&gate), "{subject}");
        assert!(gate.log().contains("no messages come"), "{subject}: {}", gate.log());
        // An acknowledgement has no reply: that it was sent proves nothing.
        assert!(!gate.log().contains("messages come again"), "{subject}: {}", gate.log());
        // Again and again, but ever more rarely.
        assert!(ended(&gate, "done") < 8.0, "{subject}");
    }
}

#[test]
fn a_consumer_of_nats_that_limits_requests_for_messages_is_used() {
    let broker = Nats::start();
    broker.limit_requests();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming(&upstream, &broker, "").start();
    wait_for_connection(&gate);
    // A request for messages ends by itself in between.
    std::thread::sleep(Duration::from_millis(1500));
    let ids: Vec<String> = (0..9).map(|nth| format!("m-{nth}")).collect();
    broker.publish(&ids.iter().map(|id| (Some(&**id), "{}")).collect::<Vec<_>>());
    wait_for(&gate, "done", ids.len());
    assert!(!gate.log().contains("no messages come"), "{}", gate.log());
}
