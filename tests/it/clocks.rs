//! Replicas whose clocks are far off: everything lives and expires by the database's.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use crate::support::store::migrated;
use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

/// A little more than the usual ttl.
pub const OFF: i64 = 25 * 3600;

/// A gate whose clock is right, one that is ahead, and one that is behind.
fn three(upstream: &Upstream, url: &str, policy: &str) -> [Gate; 3] {
    [0, OFF, -OFF].map(|seconds| Gate::before(upstream).store_url(url).defaults(policy).clock_off_by(seconds).start())
}

/// Holds that the gates' clocks are as far off as they should be: they stand in their logs.
fn expect_off(gates: &[Gate; 3]) {
    let clock = |gate: &Gate| {
        let line = gate.log().lines().next().expect("a line").to_owned();
        let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        let time = humantime::parse_rfc3339(line["timestamp"].as_str().expect("a timestamp")).expect("a time");
        i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs()).expect("soon")
    };
    let [right, ahead, behind] = gates.each_ref().map(clock);
    assert!((ahead - right - OFF).abs() < 60 && (right - behind - OFF).abs() < 60, "{right} {ahead} {behind}");
}

/// The other two of three.
fn others(gates: &[Gate; 3], of: usize) -> impl Iterator<Item = &Gate> {
    gates.iter().enumerate().filter(move |(nth, _)| *nth != of).map(|(_, gate)| gate)
}

#[test]
fn nothing_expires_early() {
    let Some(database) = migrated() else { return };
    let upstream = Upstream::start(|request| match request.key().as_deref() {
        Some(key) if key.starts_with("broken") => Reply::nothing().close(),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let gates = three(&upstream, &database.url, "");
    expect_off(&gates);
    let mut firsts = Vec::new();
    for (nth, gate) in gates.iter().enumerate() {
        let first = gate.post("/charges", &format!("key-{nth}"), "{}");
        first.expect(200, "executed");
        let expires = first.get("idempotency-expires").expect("a time");
        let expires = httpdate::parse_http_date(&expires).expect("a time");
        let left = expires.duration_since(SystemTime::now()).expect("not past").as_secs();
        assert!((24 * 3600 - 60..=24 * 3600).contains(&left), "{left} s left, says gate {nth}");
        firsts.push(first);
        gate.post("/charges", &format!("broken-{nth}"), "{}").expect_problem(502, "upstream-broken");
    }
    // Long enough for the sweepers of all of them to have looked.
    let look = || {
        for (nth, first) in firsts.iter().enumerate() {
            for gate in &gates {
                let replay = gate.post("/charges", &format!("key-{nth}"), "{}");
                replay.expect(200, "replayed");
                first.expect_repeated_by(&replay);
                assert_eq!(first.get("idempotency-expires"), replay.get("idempotency-expires"));
                gate.post("/charges", &format!("broken-{nth}"), "{}").expect_problem(409, "outcome-unknown");
            }
        }
    };
    look();
    std::thread::sleep(Duration::from_secs(11));
    look();
    assert_eq!(database.value("SELECT count(*) FROM oncegate.record"), "6");
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn nothing_expires_late() {
    let Some(database) = migrated() else { return };
    let seen = Mutex::new(HashSet::new());
    let upstream = Upstream::start(move |request| match request.key() {
        Some(key) if key.starts_with("broken") && seen.lock().unwrap().insert(key.clone()) => Reply::nothing().close(),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let gates = three(&upstream, &database.url, "ttl = \"3s\"\nunknown_ttl = \"3s\"");
    for (nth, gate) in gates.iter().enumerate() {
        let start = Instant::now();
        gate.post("/charges", &format!("key-{nth}"), "{}").expect(200, "executed");
        gate.post("/charges", &format!("broken-{nth}"), "{}").expect_problem(502, "upstream-broken");
        for (key, before) in [("key", "replayed"), ("broken", "outcome-unknown")] {
            let other = others(&gates, nth).nth(nth % 2).expect("two of them");
            let again = eventually("a new run", || {
                let again = other.post("/charges", &format!("{key}-{nth}"), "{}");
                (again.word() != before).then_some(again)
            });
            again.expect(200, "executed");
            let took = start.elapsed();
            assert!((3_000..20_000).contains(&took.as_millis()), "{key} {nth}: {took:?}");
        }
    }
}

#[test]
fn leases_are_kept_and_lost_in_time() {
    let Some(database) = migrated() else { return };
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("done").hold_until(&held));
    let gates = three(&upstream, &database.url, "lease = \"5s\"");
    let running: Vec<_> = (0..6)
        .map(|nth| {
            let (request, address) = (Request::post("/charges").key(&format!("key-{nth}")), gates[nth % 3].address);
            std::thread::spawn(move || request.body("{}").try_send(address))
        })
        .collect();
    upstream.wait_for_runs(6);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(11) {
        for nth in 0..6 {
            for gate in &gates {
                gate.post("/charges", &format!("key-{nth}"), "{}").expect_problem(409, "in-flight");
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // The two whose clocks are off die, and the one whose clock is right sees when their leases are past.
    let [right, ahead, behind] = gates;
    let killed = Instant::now();
    let (ahead, behind) = (ahead.kill9(), behind.kill9());
    for nth in [1, 2, 4, 5] {
        eventually("the lease is past", || {
            (right.post("/charges", &format!("key-{nth}"), "{}").word() == "outcome-unknown").then_some(())
        });
    }
    let took = killed.elapsed();
    assert!((500..20_000).contains(&took.as_millis()), "{took:?}");
    // And they see how it ends with the right one.
    let gates = [ahead.start(), behind.start()];
    for gate in &gates {
        gate.post("/charges", "key-0", "{}").expect_problem(409, "in-flight");
        gate.post("/charges", "key-1", "{}").expect_problem(409, "outcome-unknown");
    }
    signal.open();
    for (nth, running) in running.into_iter().enumerate() {
        let answer = running.join().expect("no panic");
        assert_eq!(answer.map(|answer| answer.word()), (nth % 3 == 0).then(|| "executed".to_owned()), "{nth}");
    }
    for gate in &gates {
        gate.post("/charges", "key-3", "{}").expect(200, "replayed");
    }
    assert_eq!(upstream.runs(), 6);
}
