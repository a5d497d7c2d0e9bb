//! What goes wrong between a consumer and its broker, over and over.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::types::AMQPValue;

#[cfg(feature = "kafka")]
use super::consuming;
use super::{LONG, consuming_from, ended, wait_for, wait_for_connection};
#[cfg(feature = "kafka")]
use crate::support::brokers::Kafka;
use crate::support::brokers::{Broker, Nats, RabbitMq, RawMessage};
use crate::support::wait::within;
use crate::support::{Reply, Upstream, eventually};

/// It counts from the attempt, and not from the connection. A machine that takes longer to connect again than the pause
/// shows nothing: it gets a longer one.
#[test]
fn a_lost_connection_does_not_end_the_pause_of_a_message() {
    assert!([4, 12, 36].into_iter().any(is_kept_over_a_lost_connection), "this machine is too slow");
}

/// False where the pause was over before the message came again.
fn is_kept_over_a_lost_connection(seconds: u64) -> bool {
    let pause = Duration::from_secs(seconds);
    let broker = RabbitMq::shared();
    let link = broker.link();
    // When each attempt came. The pause begins when the first one has its answer, which may be before its publisher
    // hears that the broker has the message.
    let came: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let coming = Arc::clone(&came);
    let upstream = Upstream::start(move |request| {
        coming.lock().unwrap().push(Instant::now());
        match request.nth {
            1 => Reply::raw(format!("HTTP/1.1 503 No\r\nRetry-After: {seconds}\r\nContent-Length: 0\r\n\r\n")),
            _ => Reply::ok("done"),
        }
    });
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source_over(&link), "").start();
    broker.publish(&[(Some("m-1"), "{}")]);
    let start = eventually("the first attempt", || came.lock().unwrap().first().copied());
    eventually("it is released", || gate.states("m-1").is_empty().then_some(()));
    let before = link.connections();
    link.lose_at_the_gate();
    link.lose_at_the_broker();
    eventually("it comes again", || {
        let in_hand = gate.metric("oncegate_messages_in_hand", &["consumer=\"orders\""]);
        (link.connections() > before && in_hand == 1.0).then_some(())
    });
    if start.elapsed() >= pause {
        eprintln!("it took {:?}", start.elapsed());
        return false;
    }
    let second = within(LONG, "its second attempt", || came.lock().unwrap().get(1).copied());
    assert!(second - start >= pause, "{:?}", second - start);
    wait_for(&gate, "done", 1);
    assert_eq!(upstream.runs(), 2);
    true
}

/// A full queue for dead letters is no reason to leave other messages alone, or to let the broker deliver them again.
#[test]
fn a_dead_letter_that_is_not_taken_holds_up_no_other_message() {
    let broker = RabbitMq::shared();
    broker.refuse_dead_letters();
    let link = broker.link();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source_over(&link), "").start();
    wait_for_connection(&gate);
    broker.publish(&[(None, "nameless")]);
    let refused = || gate.metric("oncegate_dead_letters_refused_total", &["consumer=\"orders\""]);
    eventually("it is refused", || (refused() >= 1.0).then_some(()));
    broker.publish(&[(Some("m-1"), "{}")]);
    wait_for(&gate, "done", 1);
    eventually("it is refused again", || (refused() >= 2.0).then_some(()));
    // One for messages and one for dead letters.
    assert_eq!((ended(&gate, "dead"), link.connections()), (0.0, 2));
    broker.take_dead_letters();
    within(LONG, "it is taken", || (ended(&gate, "dead") == 1.0).then_some(()));
    assert_eq!(link.connections(), 2);
    let log = gate.log();
    assert_eq!(log.matches("does not take its dead letter").count(), 1, "{log}");
    assert!(log.contains("takes dead letters again") && !log.contains("no messages come"), "{log}");
}

/// RabbitMQ keeps no place for a consumer of a stream. What came while no gate ran would never run.
#[test]
fn a_stream_is_refused_and_a_message_from_one_is_not() {
    let broker = RabbitMq::of_type("stream", false);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    for concurrency in ["", "concurrency = 1\n"] {
        let gate = consuming_from::<RabbitMq>(&upstream, &broker.source(), concurrency).start();
        wait_for_connection(&gate);
        broker.publish(&[(Some("m-1"), "{}")]);
        eventually("the log says so", || gate.log().contains("is a stream, of which RabbitMQ").then_some(()));
        gate.stop();
    }
    assert_eq!(upstream.runs(), 0);
    for queue_type in ["classic", "quorum"] {
        let broker = RabbitMq::of_type(queue_type, false);
        broker.publish_with("x-stream-offset", AMQPValue::LongLongInt(7), "m-1");
        broker.publish(&[(Some("m-2"), "{}")]);
        for (concurrency, done) in [("", 2), ("concurrency = 1\n", 1)] {
            let gate = consuming_from::<RabbitMq>(&upstream, &broker.source(), concurrency).start();
            wait_for(&gate, "done", done);
            assert!(!gate.log().contains("is a stream"), "{}", gate.log());
            gate.stop();
            broker.publish_with("x-stream-offset", AMQPValue::LongLongInt(8), "m-3");
        }
    }
    assert_eq!(upstream.runs(), 6);
}

/// RabbitMQ takes any bytes for the short strings of a message. The library ends the connection at some of them; each new one would
/// count as another delivery of all that came with it, and this queue drops a message that came back three times.
#[test]
fn a_message_of_rabbitmq_that_is_no_text_holds_up_no_other() {
    let broker = RabbitMq::start_quorum(3);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let plain =
        RawMessage { routing_key: b"order", content_type: b"text/plain", message_id: None, headers: &[], body: "" };
    let odd = [
        RawMessage { message_id: Some(b"\xff\xfe"), body: "odd id", ..plain },
        RawMessage { message_id: Some(b"m-1"), routing_key: b"\xff", body: "odd key", ..plain },
        RawMessage { message_id: Some(b"m-2"), content_type: b"\x80", body: "odd type", ..plain },
        RawMessage {
            message_id: Some(b"m-3"),
            headers: &[(&b"\xc3"[..], &b"x"[..]), (b"x-a", b"\xff")],
            body: "odd name",
            ..plain
        },
    ];
    let ids: Vec<_> = (0..20).map(|number| format!("n-{number}")).collect();
    for message in &odd {
        broker.publish(&[(Some(&ids[0]), "{}")]);
        broker.publish_raw(message);
    }
    broker.publish(&ids.iter().map(|id| (Some(id.as_str()), "{}")).collect::<Vec<_>>());
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source(), "").start();
    wait_for(&gate, "dead", 1);
    wait_for(&gate, "done", 4 + ids.len() + 3);
    assert_eq!((upstream.runs(), broker.waiting()), (ids.len() + 3, 0));
    assert!(!gate.log().contains("no messages come"), "{}", gate.log());
    gate.stop();
    let dead = broker.take_dead();
    let reason = dead[0].reason.as_deref().unwrap_or_default();
    assert_eq!((dead.len(), &*dead[0].body), (1, "odd id"));
    assert!(reason.starts_with("key-invalid"), "{reason}");
}

/// A content header has one frame. With the headers that the gate adds it would have no room there, now or later. RabbitMQ takes eight
/// bytes more than the frame may have, and hands them on; it also adds headers of its own.
#[test]
fn headers_of_rabbitmq_that_fill_a_frame_hold_up_no_message() {
    let broker = RabbitMq::shared();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source(), "concurrency = 1\n").start();
    let large = vec![b'z'; 131_030];
    for (size, message_id, body) in [(130_900, None, "nameless"), (131_026, Some(&b"m-0"[..]), "too large")] {
        let headers = &[(&b"x-large"[..], &large[..size])];
        broker.publish_raw(&RawMessage {
            routing_key: b"order",
            content_type: b"text/plain",
            message_id,
            headers,
            body,
        });
    }
    broker.publish(&[(Some("m-1"), "{}")]);
    wait_for(&gate, "dead", 2);
    wait_for(&gate, "done", 1);
    assert!(!gate.log().contains("no messages come"), "{}", gate.log());
    gate.stop();
    let dead = broker.take_dead();
    let of = |body: &str| dead.iter().find(|letter| letter.body == body).and_then(|letter| letter.reason.clone());
    assert!(of("nameless").is_some_and(|reason| reason.starts_with("key-missing")), "{:?}", of("nameless"));
    let reason = "headers-invalid: its headers cannot be read: they have no room in a frame";
    assert_eq!((dead.len(), of("too large").as_deref()), (2, Some(reason)));
}

/// RabbitMQ reads nothing from a connection that publishes while memory is short. A message that came back three times is dropped by
/// this queue, whether it ran or not.
#[test]
fn an_alarm_of_the_broker_holds_up_dead_letters_alone() {
    let broker = RabbitMq::start_quorum(3);
    let link = broker.link();
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let ids: Vec<_> = (0..40).map(|number| format!("m-{number}")).collect();
    broker.publish(&[(None, "nameless"), (None, "nameless too")]);
    broker.publish(&ids.iter().map(|id| (Some(id.as_str()), "{}")).collect::<Vec<_>>());
    broker.set_alarm(true);
    let gate = consuming_from::<RabbitMq>(&upstream, &broker.source_over(&link), "").start();
    let refused = || gate.metric("oncegate_dead_letters_refused_total", &["consumer=\"orders\""]);
    // Longer than a broker may be silent.
    within(LONG, "each is refused for a while", || (refused() >= 6.0).then_some(()));
    assert_eq!((ended(&gate, "done"), ended(&gate, "dead"), link.connections()), (40.0, 0.0, 2));
    let log = gate.log();
    assert_eq!(log.matches("does not take its dead letter").count(), 1, "{log}");
    assert!(log.contains("an alarm for memory or disk"), "{log}");
    broker.set_alarm(false);
    within(LONG, "they are taken", || (ended(&gate, "dead") == 2.0).then_some(()));
    assert_eq!((upstream.runs(), link.connections(), broker.waiting()), (40, 2, 0));
    gate.stop();
    let mut dead: Vec<_> = broker.take_dead().into_iter().map(|message| message.body).collect();
    dead.sort();
    assert_eq!(dead, ["nameless", "nameless too"]);
}

/// The client stores a dead letter when the broker can: it is not buried again meanwhile.
#[cfg(feature = "kafka")]
#[test]
fn a_dead_letter_of_kafka_that_is_stored_late_is_one() {
    let broker = Kafka::start();
    broker.publish(&[(None, "nameless"), (Some("m-1"), "{}")]);
    broker.refuse(19);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let start = Instant::now();
    let gate = consuming(&upstream, &broker, "").start();
    within(LONG, "the dead letter is stored", || (ended(&gate, "dead") == 1.0).then_some(()));
    assert!(start.elapsed() > Duration::from_secs(11), "it was late: {:?}", start.elapsed());
    wait_for(&gate, "done", 1);
    assert!(!gate.log().contains("no messages come"), "{}", gate.log());
    gate.stop();
    assert_eq!((broker.waiting(), broker.take_dead().len()), (0, 1));
}

/// The client library takes it for a sign of life.
#[test]
fn a_message_of_nats_with_the_status_100_is_a_dead_letter() {
    let broker = Nats::start();
    broker.keep_order();
    broker.publish_raw(" 100 Idle Heartbeat", "odd");
    broker.publish(&[(Some("m-1"), "behind it")]);
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = consuming_from::<Nats>(&upstream, &broker.source(), "concurrency = 1\n").start();
    within(LONG, "it is a dead letter", || (ended(&gate, "dead") == 1.0).then_some(()));
    wait_for(&gate, "done", 1);
    gate.stop();
    let reasons: Vec<_> = broker.take_dead().into_iter().filter_map(|letter| letter.reason).collect();
    assert_eq!(
        reasons,
        ["headers-invalid: its headers cannot be read: they have a status, as only answers of the server do"]
    );
    assert_eq!(broker.waiting(), 0);
}
