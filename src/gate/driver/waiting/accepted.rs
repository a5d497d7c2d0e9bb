//! Requests that are delivered later, beside those whose clients wait.

use std::collections::HashSet;

use super::*;
use crate::gate::deliver_accepted;
use crate::gate::shared::QueuedNamespaces;
use crate::idempotency::delivery::{Async, Deliver};
use crate::idempotency::policy::Mode;

const LATER: &str = "Prefer: respond-async\r\n";

/// A pair whose store knows its routes.
async fn pair(policy: Policy) -> Pair {
    let pair = super::pair(policy);
    let (origins, rules) = pair.first.identities();
    pair.store.adopt(origins, rules, false).await.unwrap();
    pair
}

fn allows() -> Policy {
    Policy { r#async: Async::Allow, ..Policy::default() }
}

fn location(response: &str) -> String {
    check(response, "202", "accepted", None);
    response.lines().find_map(|line| line.strip_prefix("location: ")).expect("a 202 has a location").to_owned()
}

/// What this caller gets at the status.
async fn status(location: &str, session: &str, gate: &Arc<Gate>) -> String {
    send(
        format!("GET {location}?answer HTTP/1.1\r\nHost: a\r\nCookie: session={session}\r\nConnection: close\r\n\r\n"),
        gate,
    )
    .await
    .unwrap()
}

/// Delivers from now on, for so long.
async fn deliver(gate: &Arc<Gate>, time: Duration) {
    let (stop, stopped) = watch::channel(false);
    let gate = Arc::clone(gate);
    let delivering = tokio::spawn(deliver_accepted(move || Arc::clone(&gate), stopped));
    sleep(time).await;
    stop.send_replace(true);
    delivering.await.unwrap();
}

/// A request that was to be delivered within a time does not run long after it, whatever kept it.
#[tokio::test(start_paused = true)]
async fn a_request_is_given_up_where_its_time_is_over_before_it_is_tried() {
    for (waits, runs) in [(12, 1), (20, 0)] {
        let deliver = Deliver { give_up_after: Duration::from_secs(5), ..Deliver::default() };
        let pair = pair(Policy { mode: Mode::Accept, deliver, ..Policy::default() }).await;
        pair.answer(OK);
        let location = location(&post(&pair.first).await.unwrap());
        sleep(Duration::from_secs(waits)).await;
        self::deliver(&pair.first, Duration::from_secs(2)).await;
        assert_eq!(pair.runs(), runs, "after {waits} s");
        let status = status(&location, "ann", &pair.first).await;
        let says = if runs == 1 { "done" } else { r#""reason":"deliver.give_up_after is over","state":"dead""# };
        assert!(status.contains(says), "{status}");
    }
}

/// A gate that knows of no deliveries ran a request with its key. That one's answer is for its own caller.
#[tokio::test(start_paused = true)]
async fn the_status_of_a_request_says_nothing_of_another_with_its_key() {
    let pair = pair(allows()).await;
    pair.answer(OK);
    let of_eve = location(&post_with(format!("Cookie: session=eve\r\n{LATER}"), &pair.first).await.unwrap());
    let other = gate(&Policy::default(), &pair.store, &pair.backend);
    check(&post(&other).await.unwrap(), "200", "executed", None);
    assert!(status(&of_eve, "eve", &pair.first).await.contains(r#""state":"queued""#));
    // Whose request it was not gets what a retry of it would.
    let of_ann = status(&of_eve, "ann", &pair.first).await;
    assert!(of_ann.starts_with("HTTP/1.1 422 ") && of_ann.contains("caller-differs"), "{of_ann}");
    deliver(&pair.first, Duration::from_secs(2)).await;
    let status = status(&of_eve, "eve", &pair.first).await;
    assert!(status.contains(r#""reason":"caller-differs","state":"dead""#), "{status}");
    assert_eq!(pair.runs(), 1);
}

/// Its route accepts nothing any more, or the request comes another way.
#[tokio::test(start_paused = true)]
async fn no_request_runs_beside_one_with_its_key_that_was_accepted() {
    let pair = pair(allows()).await;
    pair.answer(OK);
    location(&post_with(format!("Cookie: session=ann\r\n{LATER}"), &pair.first).await.unwrap());
    let other = gate(&Policy::default(), &pair.store, &pair.backend);
    other.shared.queued.store(Arc::new(QueuedNamespaces::Any));
    // Until the first look, a request claims its key, and finds the other then.
    check(&post(&other).await.unwrap(), "409", "in-flight", Some("1"));
    other.shared.queued.store(Arc::new(QueuedNamespaces::These(HashSet::from(["all".into()]))));
    location(&post(&other).await.unwrap());
    check(&post_as("eve", &other).await.unwrap(), "422", "caller-differs", None);
    assert_eq!(pair.runs(), 0);
    deliver(&pair.first, Duration::from_secs(2)).await;
    check(&post(&other).await.unwrap(), "200", "replayed", None);
}

/// A route of the same namespace accepts it, by another gate, and its store was asked since.
#[tokio::test(start_paused = true)]
async fn a_gate_that_delivers_knows_which_namespaces_have_queues() {
    let pair = pair(allows()).await;
    pair.answer("HTTP/1.1 503 Later\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n");
    location(&post_with(format!("Cookie: session=ann\r\n{LATER}"), &pair.first).await.unwrap());
    let other = gate(&Policy::default(), &pair.store, &pair.backend);
    deliver(&other, Duration::from_secs(2)).await;
    assert_eq!(pair.runs(), 1);
    location(&post(&other).await.unwrap());
    assert_eq!(pair.runs(), 1);
    // With nothing queued, nothing is looked for.
    pair.answer(OK);
    sleep(Duration::from_secs(60)).await;
    deliver(&other, Duration::from_secs(2)).await;
    assert!(other.shared.queued.load().has("all"), "by the look at the beginning");
    deliver(&other, Duration::from_secs(2)).await;
    assert!(!other.shared.queued.load().has("all"));
}

/// No delivery asks about the attempt of a client that waited, or makes another.
#[tokio::test(start_paused = true)]
async fn what_a_client_left_unknown_is_tried_again_at_once() {
    for mode in [Mode::Protect, Mode::Accept] {
        let policy = Policy { recovery: Recovery::Retry, ..allows() };
        let pair = pair(policy.clone()).await;
        pair.answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n");
        check(&post(&pair.first).await.unwrap(), "502", "upstream-broken", None);
        pair.answer(OK);
        let gate = gate(&Policy { mode, ..policy }, &pair.store, &pair.backend);
        check(&post_with(format!("Cookie: session=ann\r\n{LATER}"), &gate).await.unwrap(), "200", "executed", None);
        assert_eq!(pair.runs(), 2);
    }
}
