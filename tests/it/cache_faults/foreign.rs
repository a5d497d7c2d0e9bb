//! What others have written to a cache that gates of several stores share.

use super::{cache, results};
use crate::servers::{Database, Redis, Reply as Said};
use crate::support::gate::SECRET;
use crate::support::store::migrated;
use crate::support::{Gate, Reply, Upstream, eventually};

const OTHER_SECRET: &str = "another secret that is as long as the first";

/// A gate on a store of its own, before an upstream of its own.
struct Site {
    upstream: Upstream,
    gate: Gate,
}

impl Site {
    #[track_caller]
    fn start(name: &'static str, database: &Database, redis: &Redis, secret: &str) -> Self {
        let upstream = Upstream::start(move |request| Reply::ok(format!("{name} {}", request.nth)));
        let gate = Gate::before(&upstream).store_url(&database.url).cache(&redis.url(), secret).start();
        Self { upstream, gate }
    }

    /// Holds that it replays its own first answer, asked by a gate that has nothing in memory.
    #[track_caller]
    fn expect_own_replay(self, key: &str, first: &crate::support::Response) -> Self {
        let gate = self.gate.stop().start();
        let replay = gate.post("/charges", key, "{}");
        replay.expect(200, "replayed");
        first.expect_repeated_by(&replay);
        assert_eq!(self.upstream.runs_of(key), 1);
        Self { upstream: self.upstream, gate }
    }
}

#[test]
fn a_value_of_another_store_with_the_same_secret_is_none() {
    let (Some(here), Some(there), Some(redis)) = (migrated(), migrated(), cache()) else { return };
    let one = Site::start("one", &here, &redis, SECRET);
    let first = one.gate.post("/charges", "k-1", "{}");
    first.expect(200, "executed");
    eventually("it is in the cache", || (!redis.names().is_empty()).then_some(()));
    let two = Site::start("two", &there, &redis, SECRET);
    let second = two.gate.post("/charges", "k-1", "{}");
    second.expect(200, "executed");
    // Whoever wrote last.
    let one = one.expect_own_replay("k-1", &first);
    let two = two.expect_own_replay("k-1", &second);
    assert_ne!(first.text(), second.text());
    drop((one, two));
}

#[test]
fn a_value_that_was_made_with_another_secret_is_none() {
    let (Some(here), Some(there), Some(redis)) = (migrated(), migrated(), cache()) else { return };
    let one = Site::start("one", &here, &redis, SECRET);
    one.gate.post("/charges", "k-1", "{}").expect(200, "executed");
    eventually("it is in the cache", || (!redis.names().is_empty()).then_some(()));
    let ones = redis.names();
    let two = Site::start("two", &there, &redis, OTHER_SECRET);
    let second = two.gate.post("/charges", "k-1", "{}");
    second.expect(200, "executed");
    eventually("it is in the cache too", || (redis.names().len() > ones.len()).then_some(()));
    // Under the name that the other looks under.
    let names = redis.names();
    let theirs: Vec<_> = names.iter().filter(|name| !ones.contains(name)).collect();
    for (from, to) in ones.iter().flat_map(|from| theirs.iter().map(move |to| (from, to))) {
        assert_eq!(redis.ask(&[&b"COPY"[..], from, to, b"REPLACE"]), Said::Number(1));
    }
    let two = two.expect_own_replay("k-1", &second);
    assert_eq!(results(&[two.gate], "invalid"), 1);
}
