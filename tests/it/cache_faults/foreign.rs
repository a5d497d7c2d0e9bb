//! What others have written to a cache that gates of several stores share.

use super::{cache, results};
use crate::servers::{Database, Redis, Reply as Said, database};
use crate::support::gate::SECRET;
use crate::support::store::migrate;
use crate::support::{Gate, Reply, Response, Upstream, eventually};

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
    fn expect_own_replay(&mut self, key: &str, first: &Response) {
        self.gate = self.gate.plan.clone().start();
        let replay = self.gate.post("/charges", key, "{}");
        replay.expect(200, "replayed");
        first.expect_repeated_by(&replay);
        assert_eq!(self.upstream.runs_of(key), 1);
    }
}

/// The first answer to a key, and the names that it has in the cache.
///
/// A gate leaves a cache out that it is not connected to yet, or that is late on a busy machine. One that has nothing in
/// memory asks the store, and puts there what that has.
#[track_caller]
fn cached(gate: &mut Gate, redis: &Redis, key: &str) -> (Response, Vec<Vec<u8>>) {
    let before = redis.names();
    let first = gate.post("/charges", key, "{}");
    first.expect(200, "executed");
    let mut looks = 0;
    let names = eventually("it is in the cache", || {
        looks += 1;
        if looks % 50 == 0 {
            *gate = gate.plan.clone().start();
            gate.post("/charges", key, "{}").expect(200, "replayed");
        }
        let new: Vec<_> = redis.names().into_iter().filter(|name| !before.contains(name)).collect();
        (!new.is_empty()).then_some(new)
    });
    (first, names)
}

/// A store that is no copy of another.
#[track_caller]
fn store() -> Option<Database> {
    let database = database()?;
    migrate(&database.url);
    Some(database)
}

#[test]
fn what_another_store_has_is_nothing_here_whatever_the_secret() {
    for secret in [SECRET, OTHER_SECRET] {
        let (Some(here), Some(there), Some(redis)) = (store(), store(), cache()) else { return };
        let mut one = Site::start("one", &here, &redis, SECRET);
        let (first, ones) = cached(&mut one.gate, &redis, "k-1");
        let mut two = Site::start("two", &there, &redis, secret);
        let (second, twos) = cached(&mut two.gate, &redis, "k-1");
        one.expect_own_replay("k-1", &first);
        two.expect_own_replay("k-1", &second);

        // Under the name that the other looks under.
        eventually("it looks at what the other has", || {
            for (from, to) in ones.iter().flat_map(|from| twos.iter().map(move |to| (from, to))) {
                assert_eq!(redis.ask(&[&b"COPY"[..], from, to, b"REPLACE"]), Said::Number(1));
            }
            two.expect_own_replay("k-1", &second);
            // On a busy machine the cache may be late.
            (results(std::slice::from_ref(&two.gate), "invalid") > 0).then_some(())
        });
    }
}

/// One that was started with another secret looks for other records: it has none of what was before.
#[test]
fn a_value_that_was_made_with_another_secret_is_none() {
    let (Some(database), Some(redis)) = (store(), cache()) else { return };
    let mut one = Site::start("one", &database, &redis, SECRET);
    let (first, ones) = cached(&mut one.gate, &redis, "k-1");
    let other = Gate::before(&one.upstream).store_url(&database.url).cache(&redis.url(), OTHER_SECRET);
    let accepting = "--accept-identity-change";
    let mut other = other.arg(accepting).start();
    let (second, theirs) = cached(&mut other, &redis, "k-1");
    assert_eq!(second.text(), "one 2");
    let plan = one.gate.plan.clone().arg(accepting);
    eventually("it looks at what the other has", || {
        assert_eq!(redis.ask(&[&b"COPY"[..], &theirs[0], &ones[0], b"REPLACE"]), Said::Number(1));
        one.gate = plan.start();
        first.expect_repeated_by(&one.gate.post("/charges", "k-1", "{}"));
        (results(std::slice::from_ref(&one.gate), "invalid") > 0).then_some(())
    });
    assert_eq!(one.upstream.runs(), 2);
}
