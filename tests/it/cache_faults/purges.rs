//! What one gate was told to purge, the others replay no longer than `cache_max_age`, and usually not at all.

use std::time::{Duration, Instant};

use super::{LONGEST, cache};
use crate::servers::Redis;
use crate::support::gate::SECRET;
use crate::support::store::migrated;
use crate::support::{Gate, Reply, Upstream};

/// How long a replay may lag a purge here, unless a test says otherwise.
const MAX_AGE: Duration = Duration::from_secs(1);

/// How often a purge is tried.
const PURGES: usize = 8;

/// For how long after a purge each of three gates went on to replay what was purged, in the order of length: by when the
/// last of those requests began. Between an answer and its purge stands `trouble`.
#[track_caller]
fn lags(url: &str, redis: &Redis, max_age: Duration, purges: usize, trouble: impl Fn()) -> Vec<Duration> {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let lines = format!("cache_max_age = \"{}s\"", max_age.as_secs());
    let plan = || Gate::before(&upstream).store_url(url).cache(&redis.url(), SECRET).store(&lines);
    let gates = [(); 3].map(|()| plan().start());
    let mut lags = Vec::new();
    for nth in 0..purges {
        let key = format!("k-{nth}");
        let first = gates[0].post("/charges", &key, "{}");
        first.expect(200, "executed");
        // Each has it from the cache or the store, and then in memory.
        for gate in gates.iter().chain(&gates) {
            assert_eq!(gate.post("/charges", &key, "{}").text(), first.text());
        }
        let records = gates[0].records(&format!("key={key}"));
        let id = records[0]["id"].as_str().expect("an id");
        trouble();
        let purged = gates[0].admin("DELETE", &format!("/api/v1/records/{id}"), None);
        assert!((200..300).contains(&purged.status), "{}", purged.show());
        let at = Instant::now();
        let answers = std::thread::scope(|scope| {
            let asking =
                gates.each_ref().map(|gate| scope.spawn(|| until_purged(gate, &key, &first.text(), max_age, at)));
            asking.map(|one| one.join().expect("an answer"))
        });
        redis.go_on();
        assert!(answers.iter().all(|(_, text)| *text == answers[0].1), "{answers:?}");
        assert_eq!(upstream.runs_of(&key), 2);
        lags.extend(answers.map(|(lag, _)| lag));
    }
    lags.sort();
    eprintln!("{lags:?}");
    lags
}

/// When the last request began that was answered by what was purged, and the answer after it. It is asked for longer than
/// it may be: what was forgotten does not come back.
fn until_purged(gate: &Gate, key: &str, purged: &str, max_age: Duration, since: Instant) -> (Duration, String) {
    let (mut lag, mut last) = (Duration::ZERO, String::new());
    while since.elapsed() < max_age + max_age / 4 || last.is_empty() && since.elapsed() < LONGEST {
        let began = since.elapsed();
        let answer = gate.post("/charges", key, "{}");
        if answer.text() == purged {
            lag = began;
        } else if answer.status == 200 {
            last = answer.text();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    (lag, last)
}

#[track_caller]
fn expect_soon(lags: &[Duration]) {
    let usual = lags[lags.len() / 2];
    // Where no gate hears of a purge, it is about as long as it may be.
    assert!(usual < MAX_AGE / 2, "usually {usual:?}");
    expect_in_time(lags, MAX_AGE);
}

#[track_caller]
fn expect_in_time(lags: &[Duration], max_age: Duration) {
    let longest = lags.last().expect("some");
    assert!(*longest <= max_age, "{longest:?}");
}

#[test]
fn a_purge_is_soon_known_to_all() {
    let Some(database) = migrated() else { return };
    let Some(redis) = cache() else { return };
    expect_soon(&lags(&database.url, &redis, MAX_AGE, PURGES, || {}));
}

/// The database tells of it.
#[test]
fn a_purge_is_known_to_all_while_the_cache_hangs() {
    let Some(database) = migrated() else { return };
    let Some(redis) = cache() else { return };
    expect_in_time(&lags(&database.url, &redis, MAX_AGE, 4, || redis.hang()), MAX_AGE);
}

/// The cache tells of it: through a pooler nobody hears the database.
#[test]
fn a_purge_is_known_to_all_through_a_pooler() {
    let Some(database) = migrated() else { return };
    let Some(url) = database.pooled_url() else { return };
    let Some(redis) = cache() else { return };
    expect_soon(&lags(&url, &redis, MAX_AGE, PURGES, || {}));
}

/// Nobody tells of it.
#[test]
fn a_purge_is_known_in_time_where_nobody_hears_of_it() {
    let Some(database) = migrated() else { return };
    let Some(url) = database.pooled_url() else { return };
    let Some(redis) = cache() else { return };
    // What a gate has in memory ages from when it got it. That is some requests before the purge, which themselves
    // take long on a busy machine: half of this age has to be left by then.
    let max_age = 3 * MAX_AGE;
    let lags = lags(&url, &redis, max_age, 4, || redis.hang());
    expect_in_time(&lags, max_age);
    // That they were late at all says that the others are not quick by chance.
    assert!(*lags.last().expect("some") > max_age / 2, "{lags:?}");
}
