//! A cache in front of the store that loses, hangs, invents and repeats itself: it costs time, and never an answer.

mod foreign;
mod purges;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::servers::{Database, Dump, Postgres, Redis};
use crate::storm::Storm;
use crate::support::gate::SECRET;
use crate::support::store::{migrated, migrated_on};
use crate::support::{Gate, Plan, Reply, Upstream, eventually};

/// For how long the cache fails under load.
const TIME: Duration = Duration::from_secs(7);

/// For how long at most, on a busy machine, where the cache is late most of the time.
const LONGEST: Duration = Duration::from_secs(60);

/// How many gates share it.
const GATES: usize = 3;

/// A cache as one is set up: it keeps nothing on a disk.
#[track_caller]
fn cache() -> Option<Redis> {
    Redis::with(&[("maxmemory", "64mb"), ("maxmemory-policy", "allkeys-lru")])
}

/// How often the gates had this result of asking the cache.
fn results(gates: &[Gate], result: &str) -> u64 {
    let label = format!("result=\"{result}\"");
    gates.iter().map(|gate| gate.metric("oncegate_cache_requests_total", &[&label])).sum::<f64>() as u64
}

/// Many clients who ask and ask again, of gates that share a database and a cache, which is spoiled again and again until
/// each of these came of asking it.
#[track_caller]
fn spoiled_under_load(redis: &Redis, max_age: &str, sought: &[&str], mut spoil: impl FnMut(&mut fastrand::Rng)) {
    let Some(database) = migrated() else { return };
    let storm = Storm::before(&database.url).asking_again().with_lease(30);
    // What is in memory is not asked of the cache: little is.
    let lines = format!("cache_max_age = \"{max_age}\"\ncache_max_entries = 100");
    let plan = |plan: Plan| plan.store_url(&database.url).cache(&redis.url(), SECRET).store(&lines);
    let mut gates = storm.start(GATES, plan);
    let mut random = random();
    let has_all = |gates: &[Gate]| sought.iter().all(|result| results(gates, result) > 0);
    let start = Instant::now();
    while start.elapsed() < TIME || !has_all(&gates) && start.elapsed() < LONGEST {
        storm.rage(TIME, || spoil(&mut random));
    }
    let seen = storm.judge();
    let results: Vec<String> =
        ["memory", "hit", "in-flight", "miss", "stale", "invalid", "not-asked", "away", "late", "failed"]
            .map(|result| format!("{result} {}", results(&gates, result)))
            .into();
    eprintln!("{}", results.join(", "));
    seen.expect_hardly_anybody_sent_away();
    seen.expect_right();
    for gate in &mut gates {
        assert!(gate.is_running());
        eventually("it is ready", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
    }
    assert!(has_all(&gates), "{sought:?} did not all come up");
}

/// Numbers that are others each time, and can be had again.
fn random() -> fastrand::Rng {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}

fn sleep(random: &mut fastrand::Rng, millis: std::ops::Range<u64>) {
    std::thread::sleep(Duration::from_millis(random.u64(millis)));
}

#[test]
fn the_password_of_a_cache_comes_from_a_file() {
    let Some(database) = migrated() else { return };
    let Some(redis) = Redis::with(&[("requirepass", "s3cret")]) else { return };
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).store_url(&database.url).cache(&format!("redis://{}", redis.address()), SECRET);
    let file = plan.path("cache-password");
    std::fs::write(&file, "s3cret\n").unwrap();
    let plan = plan.store(&format!("cache_password_file = {file:?}"));
    let gates = [plan.start(), plan.start()];
    let mut nth = 0;
    // It is there a moment after the answer.
    eventually("one has from the cache what the other put there", || {
        nth += 1;
        let key = format!("k-{nth}");
        gates[0].post("/charges", &key, "{}").expect(200, "executed");
        gates[1].post("/charges", &key, "{}").expect(200, "replayed");
        (results(&gates[1..], "hit") > 0).then_some(())
    });
    assert_eq!(upstream.runs(), nth);
}

#[test]
fn a_cache_that_is_emptied_under_load() {
    let Some(redis) = cache() else { return };
    spoiled_under_load(&redis, "10m", &["hit", "miss"], |random| {
        sleep(random, 10..300);
        redis.ask(&["FLUSHALL"]);
    });
}

#[test]
fn a_cache_that_is_killed_under_load() {
    let Some(redis) = cache() else { return };
    spoiled_under_load(&redis, "10m", &["miss", "away"], |random| {
        sleep(random, 100..2_500);
        redis.kill9();
        sleep(random, 0..500);
        redis.begin();
    });
}

#[test]
fn a_cache_that_hangs_under_load() {
    let Some(redis) = cache() else { return };
    spoiled_under_load(&redis, "10m", &["hit", "late", "away"], |random| {
        sleep(random, 100..900);
        redis.hang();
        let longest = if random.bool() { 50 } else { 1_500 };
        sleep(random, 0..longest);
        redis.go_on();
    });
}

#[test]
fn a_cache_that_is_filled_with_junk_under_load() {
    let Some(redis) = cache() else { return };
    spoiled_under_load(&redis, "10m", &["hit", "invalid"], |random| {
        sleep(random, 20..200);
        fill_with_junk(&redis, random);
    });
}

/// Changes every value: to other bytes, to fewer or more of them, or to what is no bytes at all.
fn fill_with_junk(redis: &Redis, random: &mut fastrand::Rng) {
    let mut session = redis.session();
    for name in redis.names() {
        let Ok(crate::servers::Reply::Bytes(mut value)) = session.ask(&[&b"GET"[..], &name]) else { continue };
        match random.u8(..5) {
            0 => value = (0..random.usize(..200)).map(|_| random.u8(..)).collect(),
            1 => value.truncate(random.usize(..value.len().max(1))),
            2 => value.extend((0..random.usize(1..20)).map(|_| random.u8(..))),
            3 if !value.is_empty() => {
                let place = random.usize(..value.len());
                value[place] ^= random.u8(1..);
            }
            _ => {
                session.ask_all(&[vec![&b"DEL"[..], &name], vec![b"HSET", &name, b"field", &value]]).expect("answers");
                continue;
            }
        }
        session.ask(&[&b"SET"[..], &name, &value]).expect("an answer");
    }
}

#[test]
fn a_cache_whose_values_are_swapped_under_load() {
    let Some(redis) = cache() else { return };
    spoiled_under_load(&redis, "10m", &["hit", "invalid"], |random| {
        sleep(random, 20..200);
        let mut names = redis.names();
        random.shuffle(&mut names);
        let moves = names.windows(2).map(|pair| vec![&b"COPY"[..], &pair[0], &pair[1], b"REPLACE"]);
        redis.session().ask_all(&moves.collect::<Vec<_>>()).expect("answers");
    });
}

/// What is in a dump was true once: hints that a key is in flight, and answers that are older than they may be.
#[test]
fn a_cache_that_is_restored_from_older_dumps_under_load() {
    let Some(redis) = cache() else { return };
    let mut dumps: Vec<Dump> = Vec::new();
    spoiled_under_load(&redis, "1s", &["hit", "stale"], |random| {
        sleep(random, 10..300);
        dumps.push(redis.dump());
        sleep(random, 10..300);
        redis.restore(random.choice(&dumps).expect("one at least"));
    });
    assert!(dumps.iter().any(|dump| dump.len() > 10));
}

/// Replicas are killed as well, and those that begin anew have nothing in memory.
#[test]
fn a_cache_and_its_gates_that_fail_together() {
    let (Some(database), Some(redis)) = (migrated(), cache()) else { return };
    let storm = Storm::before(&database.url).asking_again();
    let plan = |plan: Plan| plan.store_url(&database.url).cache(&redis.url(), SECRET).store("cache_max_age = \"2s\"");
    let mut gates: Vec<Option<Gate>> = storm.start(GATES, plan).into_iter().map(Some).collect();
    let places = Arc::clone(&storm.gates);
    let mut random = random();
    let mut dump = redis.dump();
    storm.rage(TIME, || {
        sleep(&mut random, 20..300);
        match random.u8(..8) {
            0 => drop(redis.ask(&["FLUSHALL"])),
            1 => {
                redis.kill9();
                redis.begin();
            }
            2 => {
                redis.hang();
                sleep(&mut random, 0..300);
                redis.go_on();
            }
            3 => fill_with_junk(&redis, &mut random),
            4 => dump = redis.dump(),
            5 => redis.restore(&dump),
            _ => {
                let victim = random.usize(..gates.len());
                let plan = gates[victim].take().expect("a gate").kill9();
                places.lock().unwrap()[victim] = None;
                let gate = plan.start();
                places.lock().unwrap()[victim] = Some(gate.address);
                gates[victim] = Some(gate);
            }
        }
    });
    storm.judge().expect_right();
}

#[test]
fn a_cold_replica_answers_out_of_the_cache_alone() {
    const KEYS: usize = 200;
    let Some(postgres) = Postgres::with(&[("log_statement", "all")]) else { return };
    let Some(redis) = cache() else { return };
    let database = migrated_on(&postgres);
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = || Gate::before(&upstream).store_url(&database.url).cache(&redis.url(), SECRET);
    let ask = |gate: &Gate, nth: usize| gate.post("/charges", &format!("k-{nth}"), "{}");
    let first = plan().start();
    // A gate that has just started may not be connected to the cache yet, and leaves it out until it is.
    let mut warming = 0;
    eventually("the cache has something", || {
        warming += 1;
        ask(&first, KEYS + warming).expect(200, "executed");
        (!redis.names().is_empty()).then_some(())
    });
    let answers: Vec<_> = (0..KEYS).map(|nth| ask(&first, nth)).collect();
    for answer in &answers {
        answer.expect(200, "executed");
    }
    let replays_all = |gate: &Gate| {
        for (nth, answer) in answers.iter().enumerate() {
            let replay = ask(gate, nth);
            replay.expect(200, "replayed");
            answer.expect_repeated_by(&replay);
        }
    };
    // One that finds it late leaves it out. One that has nothing in memory puts there what the store has.
    let mut looks = 0;
    eventually("the cache has them", || {
        looks += 1;
        if looks % 50 == 0 {
            replays_all(&plan().start());
        }
        (redis.names().len() >= KEYS * 9 / 10).then_some(())
    });

    // On a busy machine the cache is late now and then; what it has answered, it has answered alone.
    let began = Instant::now();
    let mut tries = 0;
    loop {
        tries += 1;
        let hits = cold_hits(&plan().start(), (&postgres, &database), tries, KEYS, replays_all);
        if hits * 2 >= KEYS {
            break;
        }
        assert!(began.elapsed() < LONGEST, "{hits} of {KEYS} are from the cache");
    }
    assert_eq!(upstream.runs(), KEYS + warming);
}

/// How many of so many answers a replica had from the cache, which has just started; holds that it asked the database for
/// the others alone.
#[track_caller]
fn cold_hits(
    cold: &Gate,
    (postgres, database): (&Postgres, &Database),
    nth: usize,
    count: usize,
    replays_all: impl Fn(&Gate),
) -> usize {
    // Each statement stands in the log before it is carried out.
    let mark = |name: String| {
        database.run(&format!("SELECT '{name}'"));
        eventually("a mark in the log", || postgres.log().find(&format!("SELECT '{name}'")))
    };
    let from = mark(format!("from here {nth}"));
    replays_all(cold);
    let to = mark(format!("to here {nth}"));
    let log = postgres.log();
    // What the workers do in the background, and connections that open, are no part of an answer.
    let others = [
        "expire_leases_v2",
        "sweep_v1",
        "sweep_entries_v1",
        "sweep_deliveries_v1",
        "oncegate.delivery",
        "renew_v1",
        "count_v1",
        "oncegate.session",
        "store_v1",
        "oncegate.identity",
        "oncegate.rules_period",
        "oncegate.layout",
        // A start counts the records of each encryption key.
        "oncegate.record r WHERE r.id > $1 ORDER BY r.id",
    ];
    let is_workers = |line: &str| others.iter().any(|name| line.contains(name));
    let statements = log[from..to].lines().filter(|line| line.contains("oncegate.") && !is_workers(line));
    // What this process has not seen durable is flushed once it is read.
    let (flushes, statements): (Vec<&str>, Vec<&str>) = statements.partition(|line| line.contains("flush_v1"));
    let hits = usize::try_from(results(std::slice::from_ref(cold), "hit")).expect("as many as there are keys");
    eprintln!("{hits} from the cache, {} statements", statements.len());
    assert_eq!(statements.len(), count - hits, "{statements:?}");
    assert!(flushes.len() <= count - hits, "{flushes:?}");
    hits
}
