//! `request_time`: a request that is too old does not run, and its retries get what there is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::support::faults::Fault;
use crate::support::{Gate, Plan, Reply, Request, Response, Signal, Upstream, eventually, store};

const RULE: &str = "request_time = { from = \"header:X-Request-Timestamp\", max_age = \"1h\", skew = \"5m\" }";

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).defaults(RULE)
}

/// So many seconds from now, or before now, in seconds since 1970.
fn at(seconds: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs();
    now.checked_add_signed(seconds).expect("a time").to_string()
}

fn charge(key: &str, time: impl AsRef<[u8]>) -> Request {
    Request::post("/charges").key(key).header("X-Request-Timestamp", time).body("{\"amount\":1}")
}

#[track_caller]
fn expect_expired(response: &Response, why: &str) {
    response.expect_problem(400, "request-expired");
    let detail = response.json()["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains(why) && detail.ends_with("nothing was sent"), "{detail}");
}

/// Its client need not wait for a key of the quota.
#[test]
fn what_is_too_old_is_refused_for_that_where_the_quota_is_used_up() {
    let upstream = numbered();
    let quota = "quota = { new_keys = 1, per = \"1h\", by = \"route\" }";
    for mode in ["protect", "accept"] {
        if mode == "accept" && store::kind() == "redis" {
            continue;
        }
        let gate = Gate::before(&upstream).defaults(&format!("{RULE}\n{quota}\nmode = \"{mode}\"")).start();
        expect_expired(&charge("old", at(-2 * 60 * 60)).send(&gate), "the request is 2h old");
        assert!(charge("first", at(0)).send(&gate).status < 300, "it has used up no key");
        expect_expired(&charge("old", at(-2 * 60 * 60)).send(&gate), "the request is 2h old");
        expect_expired(&charge("old", "now").send(&gate), "is not one time");
        charge("second", at(0)).send(&gate).expect_problem(429, "quota-exceeded");
    }
}

#[test]
fn what_is_too_old_or_says_no_time_does_not_run() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    let hour = 60 * 60;
    for (time, why) in [
        (at(-hour), "the request is 1h "),
        (at(-25 * hour), "the request is 1day 1h old"),
        (at(-2 * hour) + "000", "the request is 2h old"),
        ("0".to_owned(), "more than a year old, and may run until it is 1h"),
        ("2020-01-01T00:00:00Z".to_owned(), "old, and may run until it is 1h"),
        ("Wed, 01 Jan 2020 00:00:00 GMT".to_owned(), "old, and may run until it is 1h"),
        (at(6 * 60), "clocks may differ by 5m"),
        ("2999-01-01T00:00:00+01:00".to_owned(), "clocks may differ by 5m"),
        ("now".to_owned(), "is not one time"),
        (String::new(), "is not one time"),
        ("99999999999999999999999999".to_owned(), "is not one time"),
        (at(0) + ".5", "is not one time"),
    ] {
        expect_expired(&charge("k", &time).send(&gate), why);
    }
    expect_expired(&charge("k", at(0)).header("X-Request-Timestamp", at(0)).send(&gate), "is not one time");
    expect_expired(&charge("k", b"\xff").send(&gate), "is not one time");
    expect_expired(&Request::post("/charges").key("k").body("{}").send(&gate), "has no `x-request-timestamp`");
    assert_eq!((upstream.runs(), gate.records("").len()), (0, 0));
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"request-expired\""]), 15.0);
    // The key is as good as new.
    charge("k", at(0)).send(&gate).expect(200, "executed");
}

#[test]
fn what_is_young_enough_runs_and_is_replayed_at_any_age() {
    let upstream = numbered();
    let gate = plan(&upstream).start();
    let now = httpdate::fmt_http_date(SystemTime::now());
    let times = [at(0), at(0) + "000", at(-59 * 60), at(4 * 60), now];
    for (place, time) in times.iter().enumerate() {
        charge(&format!("k-{place}"), time).send(&gate).expect(200, "executed");
    }
    assert_eq!(upstream.runs(), 5);
    let gate = gate.kill9().start();
    for place in 0..5 {
        let key = format!("k-{place}");
        for retry in [charge(&key, at(-2 * 60 * 60)), charge(&key, "now"), charge(&key, at(60 * 60))] {
            retry.send(&gate).expect(200, "replayed");
        }
        let other = Request::post("/charges").key(&key).body("{\"amount\":2}").send(&gate);
        other.expect_problem(422, "key-reused");
    }
    assert_eq!(upstream.runs(), 5);
    // What carries no key has no record to outlive.
    assert_eq!(Request::post("/charges").body("{}").send(&gate).status, 200);
}

/// Where a retry of an unknown outcome would run, a late one does not; and its client learns that it is not the first.
#[test]
fn a_late_retry_of_an_unknown_outcome_says_that_it_may_have_taken_effect() {
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let gate = Gate::before(&upstream).defaults(&format!("{RULE}\nrecovery = \"retry\"")).start();
    charge("k", at(0)).send(&gate).expect_problem(502, "upstream-broken");
    let late = charge("k", at(-2 * 60 * 60)).send(&gate);
    late.expect_problem(400, "request-expired");
    let detail = late.json()["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.ends_with("may have taken effect: do not send it with a new key"), "{detail}");
    assert_eq!((upstream.runs(), gate.states("k")), (1, vec!["unknown".to_owned()]));
    expect_expired(&charge("other", at(-2 * 60 * 60)).send(&gate), "2h old");
}

#[test]
fn a_late_retry_meets_the_attempt_and_not_the_upstream() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("500 Oops", "x").hold_until(&held));
    let gate = plan(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| charge("k", at(0)).send(&gate));
        upstream.wait_for_runs(1);
        charge("k", at(-2 * 60 * 60)).send(&gate).expect_problem(409, "in-flight");
        signal.open();
        first.join().expect("an answer").expect(500, "released");
    });
    // The key is free: the late retry would run.
    expect_expired(&charge("k", at(-2 * 60 * 60)).send(&gate), "old");
    assert_eq!(upstream.runs(), 1);
    charge("k", at(0)).send(&gate).expect(500, "released");
    assert_eq!(upstream.runs(), 2);
}

/// Once its record is gone, a request is too old to run.
#[test]
fn a_request_does_not_outlive_its_record() {
    let upstream = numbered();
    let rule =
        "ttl = \"8s\"\nrequest_time = { from = \"header:X-Request-Timestamp\", max_age = \"7s\", skew = \"1s\" }";
    let gate = Gate::before(&upstream).defaults(rule).start();
    let request = charge("k", at(0));
    request.send(&gate).expect(200, "executed");
    let last = eventually("the end of the record", || {
        std::thread::sleep(Duration::from_millis(20));
        let response = request.send(&gate);
        (response.word() != "replayed").then_some(response)
    });
    expect_expired(&last, "old");
    assert_eq!(upstream.runs(), 1);
}

/// A store that is away does not open another way to the upstream.
#[test]
fn without_a_store_it_does_not_run_either() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults(&format!("{RULE}\nstore_failure = \"forward\"")).with_faults().start();
    gate.fault(Fault::Full);
    eventually("a store that fails", || (charge("k-1", at(0)).send(&gate).word() == "unprotected").then_some(()));
    let runs = upstream.runs();
    let late = charge("k-2", at(-2 * 60 * 60)).send(&gate);
    assert!(["request-expired", "store-unavailable"].contains(&late.word().as_str()), "{}", late.show());
    assert_eq!(upstream.runs(), runs);
    gate.heal();
    eventually("a store that works", || {
        (charge("k-2", at(-2 * 60 * 60)).send(&gate).word() == "request-expired").then_some(())
    });
    assert_eq!(upstream.runs(), runs);
}
