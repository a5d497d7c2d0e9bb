//! How long a client waits where a store or an upstream says nothing.

use super::*;
use crate::idempotency::delivery::Async;
use crate::idempotency::policy::Mode;

const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
const SECOND: Duration = Duration::from_secs(1);
const LATER: &str = "Prefer: respond-async\r\n";

/// The times of an upstream.
fn times(timeout: Duration, client_timeout: Duration) -> upstream::Settings {
    upstream::Settings { timeout, client_timeout, ..upstream_settings() }
}

/// A gate of this policy and these times, whose id secret takes the place of another where that is so.
fn gate_of(pair: &Pair, policy: &Policy, replaces: bool, times: upstream::Settings) -> Arc<Gate> {
    let secrets = if replaces { vec![Some(Secret(Arc::from(*b"another secret")))] } else { Vec::new() };
    gate_to(policy, secrets, times, (&pair.store, &pair.backend))
}

/// The reply to the request, after how long.
async fn timed(request: JoinHandle<String>) -> (String, Duration) {
    let began = Instant::now();
    (request.await.unwrap(), began.elapsed())
}

#[track_caller]
fn took(elapsed: Duration, expected: Duration) {
    assert!(elapsed >= expected && elapsed < expected + Duration::from_millis(100), "{elapsed:?}, not {expected:?}");
}

/// Ways in which requests are looked for before they claim their keys.
fn ways() -> impl Iterator<Item = (Policy, bool, &'static str)> {
    let plain = Policy::default();
    let allows = || Policy { r#async: Async::Allow, ..Policy::default() };
    let accepts = Policy { mode: Mode::Accept, ..Policy::default() };
    let all = [(plain, ""), (allows(), ""), (allows(), LATER), (accepts, "")];
    all.into_iter().flat_map(|(policy, prefers)| [false, true].map(|replaces| (policy.clone(), replaces, prefers)))
}

/// Holds what a client gets, and when, that waits for a store that hangs, whatever way its request takes.
async fn expect_of_a_store_that_hangs(client_timeout: Duration, (status, word): (&str, &str), after: Duration) {
    for (policy, replaces, prefers) in ways() {
        let pair = pair(Policy::default());
        let gate = gate_of(&pair, &policy, replaces, times(SECOND * 60, client_timeout));
        pair.store.script([Fault::Hang; 20]);
        let (response, elapsed) = timed(post_with(format!("Cookie: session=ann\r\n{prefers}"), &gate)).await;
        check(&response, status, word, None);
        took(elapsed, after);
        assert_eq!(pair.runs(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_waited_for_once() {
    expect_of_a_store_that_hangs(SECOND * 60, ("503", "store-unavailable"), SETTLE_TIMEOUT).await;
}

/// The first one has been answered, and still waits for its claim. The next one does not wait for longer.
#[tokio::test(start_paused = true)]
async fn who_follows_a_claim_that_hangs_waits_once() {
    for replaces in [false, true] {
        let pair = pair(Policy::default());
        let minute = Duration::from_secs(60);
        let gate = gate_of(&pair, &Policy::default(), replaces, times(minute, minute));
        pair.store.script([Fault::Hang; 20]);
        for _ in 0..2 {
            let (response, elapsed) = timed(post(&gate)).await;
            check(&response, "503", "store-unavailable", None);
            took(elapsed, SETTLE_TIMEOUT);
        }
    }
}

/// As where the database hangs that has the other id of the key. The record's own database has the answer.
#[tokio::test(start_paused = true)]
async fn a_look_that_hangs_leaves_time_for_the_claim() {
    let pair = pair(Policy::default());
    pair.answer(OK);
    check(&post(&pair.first).await.unwrap(), "200", "executed", None);
    let minute = Duration::from_secs(60);
    for store_failure in [StoreFailure::Reject, StoreFailure::Forward] {
        let gate = gate_of(&pair, &Policy { store_failure, ..Policy::default() }, true, times(minute, minute));
        pair.store.script_for(Operation::Get, [Fault::Hang]);
        pair.store.script_for(Operation::Claim, [Fault::DelayAnswer(SETTLE_TIMEOUT / 10)]);
        let (response, elapsed) = timed(post(&gate)).await;
        check(&response, "200", "replayed", None);
        took(elapsed, SETTLE_TIMEOUT * 9 / 10);
    }
    assert_eq!(pair.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_for_a_store_no_longer_than_client_timeout() {
    expect_of_a_store_that_hangs(SECOND, ("504", "still-running"), SECOND).await;
}

/// The upstream does not say whether the caller may have the answer. Where both times are equal, its own end comes first.
#[tokio::test(start_paused = true)]
async fn a_client_waits_for_a_question_no_longer_than_client_timeout() {
    for (client_timeout, status, word) in
        [(SECOND, "504", "still-running"), (SECOND * 5, "502", "upstream-unreachable")]
    {
        for mode in [Mode::Protect, Mode::Accept] {
            let pair = pair(Policy::default());
            pair.answer(OK);
            check(&post(&pair.first).await.unwrap(), "200", "executed", None);
            let policy = Policy { mode, reauthorize: Some("/who".parse().unwrap()), ..Policy::default() };
            let gate = gate_of(&pair, &policy, false, times(SECOND * 5, client_timeout));
            let (response, elapsed) = timed(post(&gate)).await;
            check(&response, status, word, None);
            took(elapsed, client_timeout);
        }
    }
}

/// It waits for an attempt first, and for the question then.
#[tokio::test(start_paused = true)]
async fn a_client_waits_no_longer_than_client_timeout_in_all() {
    let policy = Policy { reauthorize: Some("/who".parse().unwrap()), ..Policy::default() };
    let pair = pair(policy.clone());
    let other = gate_of(&pair, &policy, false, times(SECOND * 10, SECOND * 10));
    pair.renew();
    let first = post(&pair.first);
    sleep(SECOND).await;
    let waiter = tokio::spawn(timed(post(&other)));
    sleep(SECOND * 7).await;
    pair.answer(OK);
    check(&first.await.unwrap(), "200", "executed", None);
    let (response, elapsed) = waiter.await.unwrap();
    check(&response, "504", "still-running", None);
    took(elapsed, SECOND * 10);
}
