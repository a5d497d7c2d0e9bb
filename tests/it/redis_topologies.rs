//! Records in Redis: one server, encrypted, watched by Sentinels, a cluster. It is killed, hangs and fails over; what it
//! acknowledged and kept is replayed, and what it cannot acknowledge does not run.

use std::time::{Duration, Instant};

use crate::migrate::waits;
use crate::servers::{Cluster, Redis, Sentinels};
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream, eventually};

/// How long one answer may take where Redis is away: what a client waits for a claim by default, and some more.
const PROMPT: Duration = Duration::from_secs(7);

/// An upstream that numbers its runs, and holds those of `running` keys until the signal of their number is given.
struct Site {
    upstream: Upstream,
    signals: [Signal; 2],
    gate: Gate,
}

impl Site {
    /// A gate on the store at this URL, that has answered some keys as it should.
    #[track_caller]
    fn on(url: &str) -> Self {
        let signals = [Signal::new(), Signal::new()];
        let held = signals.clone();
        let upstream = Upstream::start(move |request| {
            let reply = Reply::raw(format!(
                "HTTP/1.1 201 Made\r\nX-Run: {0}\r\nSet-Cookie: a={0}\r\nSet-Cookie: b\r\nContent-Length: 5\r\n\r\n\0\u{7f}\r\n{0}",
                request.nth % 10
            ));
            match request.key().and_then(|key| key.strip_prefix("running-")?.parse::<usize>().ok()) {
                Some(nth) => reply.hold_until(&held[nth]),
                None => reply,
            }
        });
        let gate = Gate::before(&upstream).store_url(url).store("settle_timeout = \"3s\"").start();
        let site = Self { upstream, signals, gate };
        site.expect_duplicates_answered();
        site
    }

    fn post(&self, key: &str) -> Response {
        self.gate.post("/charges", key, "{}")
    }

    /// Sends a request that stays with the upstream until its signal.
    fn start_running(&self, nth: usize) -> std::thread::JoinHandle<Response> {
        let address = self.gate.address;
        let key = format!("running-{nth}");
        let request = Request::post("/charges").key(&key).body("{}");
        let running = std::thread::spawn(move || request.send(address));
        eventually("it runs", || (self.upstream.runs_of(&key) == 1).then_some(()));
        running
    }

    #[track_caller]
    fn expect_duplicates_answered(&self) {
        for nth in 0..20 {
            let key = format!("k-{nth}");
            let first = self.post(&key);
            first.expect(201, "executed");
            let replay = self.post(&key);
            replay.expect(201, "replayed");
            first.expect_repeated_by(&replay);
        }
        self.gate.post("/charges", "k-0", "{\"other\":1}").expect_problem(422, "key-reused");
        let running = self.start_running(0);
        self.post("running-0").expect_problem(409, "in-flight");
        self.signals[0].open();
        let first = running.join().expect("an answer");
        first.expect(201, "executed");
        first.expect_repeated_by(&self.post("running-0"));
        assert_eq!(self.gate.states("running-0"), ["completed"]);
    }

    /// Holds that what was answered before still is, by a gate that has nothing in memory, and that nothing ran twice.
    #[track_caller]
    fn expect_kept(self) -> Self {
        let Self { upstream, signals, gate } = self;
        let site = Self { upstream, signals, gate: gate.stop().start() };
        for nth in 0..20 {
            let key = format!("k-{nth}");
            site.post(&key).expect(201, "replayed");
            assert_eq!(site.upstream.runs_of(&key), 1, "{key}");
        }
        site
    }

    /// While `away` lasts nothing runs and everybody is told so soon; an attempt that was under way is recorded when it is
    /// over.
    #[track_caller]
    fn expect_refusals_while(&self, away: impl FnOnce(), back: impl FnOnce()) {
        let running = self.start_running(1);
        away();
        let before = self.upstream.runs();
        let unready = || (self.gate.admin("GET", "/readyz", None).status == 503).then_some(());
        for nth in 0..5 {
            let asked = Instant::now();
            self.post(&format!("away-{nth}")).expect_problem(503, "store-unavailable");
            assert!(asked.elapsed() < PROMPT, "{:?}", asked.elapsed());
        }
        eventually("unready", unready);
        self.signals[1].open();
        running.join().expect("an answer").expect(201, "unrecorded");
        assert_eq!(self.upstream.runs(), before, "forwarded without a claim");
        back();
        eventually("ready", || (self.gate.admin("GET", "/readyz", None).status == 200).then_some(()));
        eventually("what was answered is recorded", || (self.post("running-1").word() == "replayed").then_some(()));
        assert_eq!(self.upstream.runs_of("running-1"), 1);
        eventually("new keys run", || (self.post("away-0").status == 201).then_some(()));
        assert_eq!(self.upstream.runs_of("away-0"), 1);
        self.post("away-0").expect(201, "replayed");
    }
}

#[test]
fn one_server_with_a_password() {
    let settings = [("requirepass", "s3cret"), ("appendonly", "yes"), ("appendfsync", "always")];
    let Some(redis) = Redis::with(&settings) else { return };
    let site = Site::on(&redis.url());
    site.expect_refusals_while(|| redis.kill9(), || redis.begin());
    let site = site.expect_kept();
    assert!(!site.gate.log().contains("s3cret"));
}

#[test]
fn one_server_that_hangs() {
    let Some(redis) = Redis::start() else { return };
    let site = Site::on(&redis.url());
    site.expect_refusals_while(|| redis.hang(), || redis.go_on());
    drop(site.expect_kept());
}

#[test]
fn one_server_that_wants_to_see_a_certificate() {
    // A server that syncs every second may hold a write back while a sync is slow, and lose it when it is killed.
    let settings = [("appendonly", "yes"), ("appendfsync", "always"), ("requirepass", "s3cret")];
    let Some(redis) = Redis::encrypting(&settings) else { return };
    let site = Site::on(&redis.url());
    site.expect_refusals_while(|| redis.kill9(), || redis.begin());
    drop(site.expect_kept());
}

#[test]
fn a_cluster() {
    let Some(cluster) = Cluster::with(0, &[("appendonly", "yes"), ("requirepass", "s3cret")]) else { return };
    let site = Site::on(&cluster.url());
    for node in cluster.nodes() {
        assert!(!node.names().is_empty(), "all nodes have records");
    }
    let kill = || cluster.nodes().for_each(Redis::kill9);
    let begin = || {
        cluster.nodes().for_each(Redis::begin);
        cluster.wait_until_ok();
    };
    site.expect_refusals_while(kill, begin);
    drop(site.expect_kept());
}

/// The keys of the others are still answered.
#[test]
fn a_cluster_without_one_of_its_nodes() {
    let settings = [("appendonly", "yes"), ("cluster-require-full-coverage", "no")];
    let Some(cluster) = Cluster::with(0, &settings) else { return };
    let site = Site::on(&cluster.url());
    cluster.shard(1)[0].kill9();
    let answers: Vec<Response> = (0..60).map(|nth| site.post(&format!("new-{nth}"))).collect();
    let executed = answers.iter().filter(|answer| answer.word() == "executed").count();
    for answer in answers.iter().filter(|answer| answer.word() != "executed") {
        answer.expect_problem(503, "store-unavailable");
    }
    assert!((15..60).contains(&executed), "{executed} of 60");
    cluster.shard(1)[0].begin();
    cluster.wait_until_ok();
    for (nth, answer) in answers.iter().enumerate() {
        let word = if answer.word() == "executed" { "replayed" } else { "executed" };
        let key = format!("new-{nth}");
        eventually(word, || (site.post(&key).word() == word).then_some(()));
        assert_eq!(site.upstream.runs_of(&key), 1);
    }
    drop(site.expect_kept());
}

#[test]
fn a_cluster_whose_replica_takes_over() {
    let Some(cluster) = Cluster::with(1, &[("appendonly", "yes")]) else { return };
    let site = Site::on(&cluster.url());
    wait_until_copied(&cluster);
    cluster.fail_over(1);
    for nth in 0..30 {
        let key = format!("after-{nth}");
        eventually("it runs", || (site.post(&key).status == 201).then_some(()));
        site.post(&key).expect(201, "replayed");
        assert_eq!(site.upstream.runs_of(&key), 1);
    }
    drop(site.expect_kept());
}

/// Waits until the replicas have what was acknowledged by now.
#[track_caller]
fn wait_until_copied(cluster: &Cluster) {
    for shard in 0..3 {
        let [primary, replica] = cluster.shard(shard) else { panic!("a primary and a replica") };
        let offset = |server: &Redis, field: &str| server.info("replication", field)?.parse::<u64>().ok();
        let written = offset(primary, "master_repl_offset").expect("an offset");
        eventually("a replica that has everything", || {
            offset(replica, "slave_repl_offset").filter(|copied| *copied >= written).map(drop)
        });
    }
}

#[test]
fn a_replica_that_sentinels_put_in_the_place_of_the_primary() {
    for (settings, are_guarded) in [
        (&[("appendonly", "yes")][..], false),
        (&[("appendonly", "yes"), ("requirepass", "s3cret")], false),
        (&[("appendonly", "yes"), ("requirepass", "s3cret")], true),
    ] {
        let Some(all) = Sentinels::with(settings, are_guarded) else { return };
        let site = Site::on(&all.url());
        all.wait_until_copied();
        let killed = all.kill_primary();
        // It waits for a while, in which the other may have been put there.
        let between = site.post("between");
        assert!(["executed", "store-unavailable"].contains(&&*between.word()), "{}", between.show());
        all.wait_for_failover(killed);
        eventually("new keys run", || (site.post("between").status == 201).then_some(()));
        site.post("between").expect(201, "replayed");
        eventually("ready", || (site.gate.admin("GET", "/readyz", None).status == 200).then_some(()));
        assert_eq!(site.upstream.runs_of("between"), 1);
        drop(site.expect_kept());
    }
}

#[test]
fn a_gate_waits_for_redis_at_the_start() {
    let Some(redis) = Redis::start() else { return };
    redis.kill9();
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).store_url(&redis.url());
    let process = plan.spawn();
    let admin = waits(&process);
    assert!(!process.log().contains("\"listening\""), "{}", process.log());
    redis.begin();
    let address = process.address("listening").expect("it goes on by itself");
    eventually("ready", || (Request::get("/readyz").send(admin).status == 200).then_some(()));
    let send = || Request::post("/charges").key("k-1").body("{}").send(address);
    send().expect(200, "executed");
    send().expect(200, "replayed");
    drop(process);
    // Told to stop, it does not wait; nor where Redis hangs.
    for away in [Redis::kill9, Redis::hang] {
        away(&redis);
        let mut process = plan.spawn();
        waits(&process);
        process.signal(rustix::process::Signal::TERM);
        let status = process.wait();
        assert!(status.success(), "{status}\n{}", process.log());
        redis.end(rustix::process::Signal::KILL);
        redis.begin();
    }
}

/// A login that cannot work is no reason to wait.
#[test]
fn serve_ends_where_redis_does_not_let_it_in() {
    let Some(redis) = Redis::encrypting(&[("requirepass", "s3cret")]) else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let url = redis.url();
    for (url, told) in [
        (url.replace("s3cret", "wr0ng"), "Password authentication failed"),
        (url.replace(":s3cret@", ""), "NOAUTH"),
        (url.replace("ca.pem", "other.pem"), "UnknownIssuer"),
        (url.replace("client.", "stranger."), "UnknownCA"),
    ] {
        let mut process = Gate::before(&upstream).store_url(&url).spawn();
        let status = process.wait();
        let log = process.log();
        assert_eq!(status.code(), Some(1), "{told}: {log}");
        assert!(log.contains(told) && !log.contains("wr0ng") && !log.contains("s3cret"), "{told}: {log}");
    }
}

/// What may be lost is said at the start, and no more.
#[test]
fn a_gate_says_at_the_start_what_redis_may_lose() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let said = |redis: &Redis| {
        let gate = Gate::before(&upstream).store_url(&redis.url()).start();
        gate.post("/charges", "k-1", "{}").expect(200, "executed");
        let log = gate.log();
        // Not of the machine, which may allow few open files.
        let is_of_store = |line: &&str| line.contains("\"WARN\"") && line.contains("oncegate::cli::serve::opening");
        log.lines().filter(is_of_store).map(str::to_owned).collect::<Vec<_>>().join("\n")
    };
    for (settings, told) in [
        (&[][..], "appendonly"),
        (&[("appendonly", "yes"), ("appendfsync", "everysec")], "appendfsync"),
        (&[("appendonly", "yes"), ("maxmemory", "64mb"), ("maxmemory-policy", "allkeys-lru")], "maxmemory-policy"),
    ] {
        let Some(redis) = Redis::with(settings) else { return };
        let said = said(&redis);
        assert!(said.contains(told), "{told}: {said}");
    }
    let Some(redis) = Redis::with(&[("appendonly", "yes"), ("appendfsync", "always")]) else { return };
    let said = said(&redis);
    assert!(said.lines().count() == 1 && said.contains("no replica"), "{said}");
}
