//! Retries that wait while another asks the upstream, at the same gate or at another.

use crate::probe::{NOW, count, forgetful, lost};
use crate::support::store::migrated;
use crate::support::{Gate, Plan, Reply, Signal, Upstream, eventually};

/// An upstream whose first answer to a question waits for the signal.
fn upstream(signal: &Signal, answer: impl Fn() -> Reply + Send + Sync + 'static) -> Upstream {
    let held = signal.clone();
    forgetful(move |_| answer().hold_until(&held))
}

fn before(upstream: &Upstream, wait: &str) -> Plan {
    Gate::before(upstream).defaults(&format!("{NOW}in_flight = {{ wait = \"{wait}\" }}\n"))
}

/// The words of the request that asks at the one gate, and of two that wait at the other meanwhile.
fn ask_and_wait(asking: &Gate, waiting: &Gate, upstream: &Upstream, signal: &Signal) -> (String, [String; 2]) {
    lost(asking, "k-1");
    let post = |gate: &Gate| gate.post("/charges", "k-1", "{}").word();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| post(asking));
        eventually("the upstream is asked", || (count(upstream, "GET") == 1).then_some(()));
        let others = [(); 2].map(|()| scope.spawn(|| post(waiting)));
        waiting.wait_for_waiting(2);
        signal.open();
        (first.join().expect("an answer"), others.map(|other| other.join().expect("an answer")))
    })
}

#[test]
fn a_retry_gets_what_another_finds_out() {
    let signal = Signal::new();
    let upstream = upstream(&signal, || Reply::ok("x"));
    let gate = before(&upstream, "10s").start();
    let (first, others) = ask_and_wait(&gate, &gate, &upstream, &signal);
    assert_eq!((first.as_str(), others), ("recovered", ["replayed"; 2].map(str::to_owned)));
    assert_eq!(count(&upstream, "GET"), 1);
}

#[test]
fn a_retry_gets_what_another_gate_finds_out() {
    let Some(database) = migrated() else { return };
    let signal = Signal::new();
    let upstream = upstream(&signal, || Reply::ok("x"));
    let gates = [(); 2].map(|()| before(&upstream, "10s").store_url(&database.url).start());
    let (first, others) = ask_and_wait(&gates[0], &gates[1], &upstream, &signal);
    assert_eq!((first.as_str(), others), ("recovered", ["replayed"; 2].map(str::to_owned)));
    assert_eq!(count(&upstream, "GET"), 1);
}

/// What the upstream says tells nothing: it is not worth waiting for longer.
#[test]
fn a_retry_waits_no_longer_than_the_one_that_asks() {
    let signal = Signal::new();
    let upstream = upstream(&signal, || Reply::status("500 Internal Server Error", "books are closed"));
    let gate = before(&upstream, "60s").start();
    let (first, others) = ask_and_wait(&gate, &gate, &upstream, &signal);
    assert_eq!((first.as_str(), others), ("outcome-unknown", ["outcome-unknown"; 2].map(str::to_owned)));
    assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, 1));
}

#[test]
fn a_retry_waits_no_longer_than_the_one_that_asks_at_another_gate() {
    let Some(database) = migrated() else { return };
    let signal = Signal::new();
    let upstream = upstream(&signal, || Reply::status("500 Internal Server Error", "books are closed"));
    let gates = [(); 2].map(|()| before(&upstream, "60s").store_url(&database.url).start());
    let (first, others) = ask_and_wait(&gates[0], &gates[1], &upstream, &signal);
    assert_eq!((first.as_str(), others), ("outcome-unknown", ["outcome-unknown"; 2].map(str::to_owned)));
    assert_eq!((count(&upstream, "POST"), count(&upstream, "GET")), (1, 1));
}

/// The gate itself asks, and finds out nothing.
#[test]
fn a_retry_waits_no_longer_than_the_worker_that_asks() {
    let signal = Signal::new();
    let upstream = upstream(&signal, || Reply::status("500 Internal Server Error", "books are closed"));
    let every = "recovery = { probe = \"/by-key/{key}\", after = \"0s\", every = \"1s\", headers = {} }\n";
    let gate = Gate::before(&upstream).defaults(&format!("{every}in_flight = {{ wait = \"60s\" }}\n")).start();
    lost(&gate, "k-1");
    eventually("the worker asks", || (count(&upstream, "GET") == 1).then_some(()));
    let word = std::thread::scope(|scope| {
        let retry = scope.spawn(|| gate.post("/charges", "k-1", "{}").word());
        gate.wait_for_waiting(1);
        signal.open();
        retry.join().expect("an answer")
    });
    assert_eq!(word, "outcome-unknown");
    assert_eq!(count(&upstream, "POST"), 1);
}
