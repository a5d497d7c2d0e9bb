//! Many clients with one key at once.

use std::collections::HashSet;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::support::wait::PATIENCE;
use crate::support::{Gate, Reply, Response, Signal, Upstream};

#[test]
fn fifty_clients_with_one_key_run_the_upstream_once() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| Reply::ok(format!("run {}", request.nth)).hold_until(&held));
    let gate = Gate::before(&upstream).start();
    let barrier = Barrier::new(50);
    let responses: Vec<Response> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..50)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    gate.post("/charges", "one-key", "{\"amount\":1}")
                })
            })
            .collect();
        // The attempt ends only when everybody else has their answer.
        while clients.iter().filter(|client| client.is_finished()).count() < 49 {
            std::thread::sleep(Duration::from_millis(5));
        }
        signal.open();
        clients.into_iter().map(|client| client.join().expect("an answer")).collect()
    });
    let (executed, conflicts): (Vec<_>, Vec<_>) = responses.iter().partition(|response| response.status == 200);
    assert_eq!((executed.len(), conflicts.len()), (1, 49));
    executed[0].expect(200, "executed");
    for conflict in conflicts {
        conflict.expect_problem(409, "in-flight");
    }
    let replay = gate.post("/charges", "one-key", "{\"amount\":1}");
    executed[0].expect_repeated_by(&replay);
    assert_eq!(upstream.runs(), 1);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"in-flight\"", "route=\"all\""]), 49.0);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"executed\"", "route=\"all\""]), 1.0);
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"replayed\"", "route=\"all\""]), 1.0);
}

#[test]
fn fifty_clients_with_fifty_keys_all_run() {
    let upstream = Upstream::start(|request| Reply::ok(request.key().unwrap_or_default()));
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        for client in 0..50 {
            let gate = &gate;
            scope.spawn(move || {
                let key = format!("key-{client}");
                let first = gate.post("/charges", &key, "{}");
                first.expect(200, "executed");
                assert_eq!(first.text(), key, "another caller's answer");
                first.expect_repeated_by(&gate.post("/charges", &key, "{}"));
            });
        }
    });
    assert_eq!(upstream.runs(), 50);
}

/// In 95 of 100 cases, a duplicate that waits as long as `Retry-After` says gets the answer.
#[test]
fn waiting_as_long_as_it_says_gives_the_replay() {
    // Attempts take between 0.4 and 1.6 seconds.
    let upstream = Upstream::start(|request| {
        let spread = u64::try_from(request.nth * 137 % 1_200).expect("small");
        Reply::ok("done").delay(Duration::from_millis(400 + spread))
    });
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        for warm in 0..20 {
            let gate = &gate;
            scope.spawn(move || gate.post("/charges", &format!("warm-{warm}"), "{}"));
        }
    });
    // Keys whose attempt took longer than that, on a busy machine, say nothing.
    let (mut served, mut cases) = (0, 0);
    for round in 0..5 {
        for (key_was_in_time, was_served) in duplicates(&gate, round) {
            cases += usize::from(key_was_in_time);
            served += usize::from(key_was_in_time && was_served);
        }
        assert_eq!(upstream.runs(), 20 * (round + 2));
        if cases >= 50 {
            break;
        }
    }
    assert!(cases >= 50, "{cases} duplicates");
    assert!(served * 100 >= cases * 95, "{served} of {cases}");
}

/// Five requests for each of twenty keys, the duplicates at any moment of the attempt. Of each duplicate that waited:
/// whether the attempt took no longer than attempts take, and whether it had the answer then.
fn duplicates(gate: &Gate, round: usize) -> Vec<(bool, bool)> {
    let answers: Vec<(usize, Option<bool>, Duration)> = std::thread::scope(|scope| {
        let cases: Vec<_> = (0..100)
            .map(|case| {
                scope.spawn(move || {
                    let key = format!("key-{round}-{}", case % 20);
                    std::thread::sleep(Duration::from_millis(case as u64 * 5 % 400));
                    let began = Instant::now();
                    let first = gate.post("/charges", &key, "{}");
                    if first.status == 200 {
                        return (case % 20, None, began.elapsed());
                    }
                    first.expect_problem(409, "in-flight");
                    let wait = Duration::from_secs(first.retry_after());
                    assert!(wait < PATIENCE / 3, "a wait of {wait:?} for attempts below two seconds");
                    std::thread::sleep(wait);
                    (case % 20, Some(gate.post("/charges", &key, "{}").word() == "replayed"), wait)
                })
            })
            .collect();
        cases.into_iter().map(|case| case.join().expect("an answer")).collect()
    });
    let is_slow = |key: usize| {
        answers.iter().any(|(of, served, took)| *of == key && served.is_none() && *took > Duration::from_millis(1_800))
    };
    answers.iter().filter_map(|(key, served, _)| served.map(|served| (!is_slow(*key), served))).collect()
}

#[test]
fn one_key_in_many_forms_is_one_key() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "abc", "{}"));
        upstream.wait_for_runs(1);
        gate.post("/charges", "\"abc\"", "{}").expect_problem(409, "in-flight");
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    gate.post("/charges", "\"abc\"", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// Twenty clients at once on a record that stands in the way no more: one of them runs.
#[track_caller]
fn one_of_twenty_runs_again(gate: &Gate, upstream: &Upstream, signal: &Signal) {
    let before = upstream.runs();
    let barrier = Barrier::new(20);
    let words: Vec<String> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    gate.post("/charges", "k-1", "{}").word()
                })
            })
            .collect();
        while clients.iter().filter(|client| client.is_finished()).count() < 19 {
            std::thread::sleep(Duration::from_millis(5));
        }
        signal.open();
        clients.into_iter().map(|client| client.join().expect("an answer")).collect()
    });
    assert_eq!(words.iter().filter(|word| *word == "executed").count(), 1, "{words:?}");
    assert_eq!(words.iter().filter(|word| *word == "in-flight").count(), 19, "{words:?}");
    assert_eq!(upstream.runs(), before + 1);
}

#[test]
fn an_expired_record_is_claimed_by_one() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::ok("first"),
        _ => Reply::ok("second").hold_until(&held),
    });
    let gate = Gate::before(&upstream).defaults("ttl = \"2s\"").start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    std::thread::sleep(Duration::from_millis(2_050));
    one_of_twenty_runs_again(&gate, &upstream, &signal);
}

#[test]
fn an_unknown_record_that_may_be_retried_is_claimed_by_one() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.nth {
        1 => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::ok("second").hold_until(&held),
    });
    let gate = Gate::before(&upstream).defaults("recovery = \"retry\"").start();
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-broken");
    one_of_twenty_runs_again(&gate, &upstream, &signal);
}

/// A key that is released again and again runs again and again, but never twice at a time.
#[test]
fn attempts_of_one_key_never_overlap() {
    let running: Arc<Mutex<HashSet<String>>> = Arc::default();
    let overlaps: Arc<Mutex<Vec<String>>> = Arc::default();
    let (run, overlap) = (Arc::clone(&running), Arc::clone(&overlaps));
    let upstream = Upstream::start(move |request| {
        let key = request.key().expect("a key");
        if !run.lock().unwrap().insert(key.clone()) {
            overlap.lock().unwrap().push(key.clone());
        }
        std::thread::sleep(Duration::from_millis(1));
        run.lock().unwrap().remove(&key);
        Reply::status("500 Oops", "x")
    });
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        for client in 0..12 {
            let gate = &gate;
            scope.spawn(move || {
                for _ in 0..40 {
                    let response = gate.post("/charges", &format!("key-{}", client % 3), "{}");
                    assert!(["released", "in-flight"].contains(&response.word().as_str()), "{}", response.show());
                }
            });
        }
    });
    assert!(overlaps.lock().unwrap().is_empty(), "two attempts at once: {:?}", overlaps.lock().unwrap());
    assert!(upstream.runs() > 3);
}
