//! Records that are encrypted at rest: `store.encryption_keys`.

mod checks;

use std::any::Any;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::reload::reload;
use crate::servers::{Postgres, Redis, Session, database};
use crate::support::store::kind;
use crate::support::{Gate, Plan, Reply, Request, Response, Upstream, eventually};

/// The plan with these keys, the first of which encrypts.
fn with_keys(plan: &Plan, keys: &[u8]) -> Plan {
    let mut entries = String::new();
    for key in keys {
        let file = plan.path(&format!("key-{key}"));
        std::fs::write(&file, STANDARD.encode([*key; 32])).unwrap();
        write!(entries, "{{ id = \"key-{key}\", file = {file:?} }}, ").unwrap();
    }
    plan.clone().store(&format!("encryption_keys = [{entries}]"))
}

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// How many parts of records were not decrypted for this reason.
fn decryption_failures(gate: &Gate, reason: &str) -> f64 {
    gate.metric("oncegate_decryption_failures_total", &[&format!("reason=\"{reason}\"")])
}

/// Holds that a request with this key is refused, now and again, and that nothing runs.
#[track_caller]
fn is_refused(gate: &Gate, upstream: &Upstream, key: &str) {
    let runs = upstream.runs();
    for _ in 0..2 {
        gate.post("/charges", key, "{}").expect_problem(503, "store-unavailable");
    }
    assert_eq!(upstream.runs(), runs);
}

#[test]
fn what_is_encrypted_is_replayed_before_and_after_a_kill() {
    let upstream = numbered();
    let plan = with_keys(&Gate::before(&upstream), &[1]);
    let gate = plan.start();
    let first = gate.post("/charges", "k-1", "{}");
    first.expect(200, "executed");
    let replayed = |gate: &Gate| {
        let again = gate.post("/charges", "k-1", "{}");
        again.expect(200, "replayed");
        first.expect_repeated_by(&again);
        gate.post("/charges", "k-1", "other").expect_problem(422, "key-reused");
    };
    replayed(&gate);
    let gate = gate.kill9().start();
    replayed(&gate);
    assert_eq!(upstream.runs(), 1);
    // Operators see what they see without encryption.
    let [record] = &gate.records("key=k-1")[..] else { panic!("one record") };
    assert_eq!((&record["path"], &record["state"]), (&"/charges".into(), &"completed".into()), "{record}");
    let no_key = decryption_failures(&gate, "no-key");
    assert_eq!((no_key, decryption_failures(&gate, "altered")), (0.0, 0.0));
}

#[test]
fn without_the_key_nothing_runs_and_with_it_the_answer_comes_back() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = with_keys(&plan, &[1]).start();
    let first = gate.post("/charges", "k-1", "{}");
    first.expect(200, "executed");
    gate.stop();

    // A gate that has no key at all
    let gate = plan.start();
    is_refused(&gate, &upstream, "k-1");
    gate.stop();

    // A gate that has another one
    let gate = with_keys(&plan, &[2]).start();
    is_refused(&gate, &upstream, "k-1");
    assert!(decryption_failures(&gate, "no-key") >= 2.0, "{}", gate.log());
    assert!(gate.log().contains("a key that store.encryption_keys does not have"), "{}", gate.log());
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    // An operator sees that there is a record.
    let listed = gate.records("state=completed");
    assert_eq!(listed.len(), 2, "{listed:?}");
    assert!(listed.iter().any(|record| record["key"].is_null()), "{listed:?}");

    // A reload brings it.
    assert!(reload(&gate, &with_keys(&plan, &[2, 1])), "{}", gate.log());
    let again = gate.post("/charges", "k-1", "{}");
    again.expect(200, "replayed");
    first.expect_repeated_by(&again);
    gate.stop();

    // So does a start.
    let gate = with_keys(&plan, &[1, 2]).start();
    for key in ["k-1", "k-2"] {
        gate.post("/charges", key, "{}").expect(200, "replayed");
    }
    assert_eq!((upstream.runs(), decryption_failures(&gate, "no-key")), (2, 0.0));
}

#[test]
fn a_new_key_encrypts_and_the_old_one_still_decrypts() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = with_keys(&plan, &[1]).start();
    gate.post("/charges", "old", "{}").expect(200, "executed");
    // First it decrypts alone, so that other gates may write with it.
    assert!(reload(&gate, &with_keys(&plan, &[1, 2])), "{}", gate.log());
    gate.post("/charges", "between", "{}").expect(200, "executed");
    assert!(reload(&gate, &with_keys(&plan, &[2, 1])), "{}", gate.log());
    gate.post("/charges", "new", "{}").expect(200, "executed");
    for key in ["old", "between", "new"] {
        gate.post("/charges", key, "{}").expect(200, "replayed");
    }

    // Without the old one, by a reload as by a start: what was read with it is not remembered either.
    let alone = with_keys(&plan, &[2]);
    assert!(reload(&gate, &alone), "{}", gate.log());
    // A cache writes a moment later, with the key that is the first then.
    let is_certain = kind() != "cached";
    let mut gate = gate;
    for restarts in [true, false] {
        gate.post("/charges", "new", "{}").expect(200, "replayed");
        if is_certain {
            is_refused(&gate, &upstream, "old");
            is_refused(&gate, &upstream, "between");
        }
        if restarts {
            gate.stop();
            gate = alone.start();
        }
    }
    gate.stop();
    let gate = with_keys(&plan, &[1]).start();
    gate.post("/charges", "old", "{}").expect(200, "replayed");
    gate.post("/charges", "between", "{}").expect(200, "replayed");
    if is_certain {
        is_refused(&gate, &upstream, "new");
    }
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn a_reload_does_not_begin_or_end_encryption() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let needs_restart = |gate: &Gate| gate.log().contains("\"keys\":\"store.encryption_keys\"");
    let gate = plan.start();
    assert!(reload(&gate, &with_keys(&plan, &[1])), "{}", gate.log());
    assert!(needs_restart(&gate), "{}", gate.log());
    gate.post("/charges", "plain", "{}").expect(200, "executed");
    gate.stop();

    let gate = with_keys(&plan, &[1]).start();
    // What was written before is read on.
    gate.post("/charges", "plain", "{}").expect(200, "replayed");
    assert!(reload(&gate, &plan), "{}", gate.log());
    assert!(needs_restart(&gate), "{}", gate.log());
    gate.post("/charges", "sealed", "{}").expect(200, "executed");
    gate.stop();
    let gate = plan.start();
    gate.post("/charges", "plain", "{}").expect(200, "replayed");
    is_refused(&gate, &upstream, "sealed");
}

/// The texts that a request and its answer bring, and whether a store that does not encrypt keeps them.
const TEXTS: [(&str, bool); 7] = [
    ("key-of-the-request-31415926", true),
    ("/path-of-the-request", true),
    ("header-of-the-request", false),
    ("token-of-the-request", false),
    ("body-of-the-request", false),
    ("header-of-the-answer", true),
    ("body-of-the-answer", true),
];

/// A plan, and where its store and its cache keep what they keep.
struct Kept {
    plan: Plan,
    /// Where, and whether it is a cache.
    places: Vec<(PathBuf, bool)>,
    /// Has the servers write down what they hold in memory.
    flush: Box<dyn Fn()>,
    _servers: Box<dyn Any>,
}

/// A SQLite file; PostgreSQL with a Redis as its cache; Redis. On servers of their own, whose whole directories are searched.
fn every_store(plan: &Plan) -> Vec<Kept> {
    let save = |redis: &Redis| {
        let mut connection = TcpStream::connect(redis.address()).expect("the server is up");
        connection.write_all(b"SAVE\r\n").expect("it takes commands");
        let mut said = [0; 5];
        connection.read_exact(&mut said).expect("it answers");
        assert_eq!(&said, b"+OK\r\n");
    };
    let mut stores = vec![Kept {
        plan: plan.clone(),
        places: vec![(plan.path(""), false)],
        flush: Box::new(|| ()),
        _servers: Box::new(()),
    }];
    if let (Some(postgres), Some(redis)) = (Postgres::start(), Redis::start()) {
        let (postgres, redis) = (Arc::new(postgres), Arc::new(redis));
        let database = crate::support::store::migrated_on(&postgres);
        let places = vec![(postgres.directory().to_owned(), false), (redis.directory().to_owned(), true)];
        let servers = (Arc::clone(&postgres), Arc::clone(&redis));
        stores.push(Kept {
            plan: plan.clone().store_url(&database.url).cache(&redis.url(), "a secret of more than thirty-two bytes"),
            places,
            flush: Box::new(move || {
                postgres.session().run("CHECKPOINT");
                save(&redis);
            }),
            _servers: Box::new((database, servers)),
        });
    }
    if let Some(redis) = Redis::start() {
        let redis = Arc::new(redis);
        let server = Arc::clone(&redis);
        stores.push(Kept {
            plan: plan.clone().store_url(&redis.url()),
            places: vec![(redis.directory().to_owned(), false)],
            flush: Box::new(move || save(&redis)),
            _servers: Box::new(server),
        });
    }
    stores
}

/// Which of the texts the files of a directory hold.
fn found(directory: &Path) -> Vec<&'static str> {
    let holds = |text: &str| {
        let mut search = Command::new("grep");
        // The gate's own configuration and log are not the store.
        search.args(["-rlaF", "--exclude=*.toml", "--exclude=*.log", "-e", text]).arg(directory);
        let output = search.env("LC_ALL", "C").output().expect("grep");
        let errors = String::from_utf8_lossy(&output.stderr);
        // A server that runs may remove a file between the look at its directory and that into it.
        assert!(
            directory.is_dir() && errors.lines().all(|line| line.ends_with(": No such file or directory")),
            "{errors}"
        );
        !output.stdout.is_empty()
    };
    TEXTS.iter().map(|(text, _)| *text).filter(|text| holds(text)).collect()
}

#[test]
fn no_file_of_the_store_holds_what_requests_and_answers_say() {
    let kept: Vec<&str> = TEXTS.iter().filter(|(_, is_kept)| *is_kept).map(|(text, _)| *text).collect();
    for is_encrypted in [false, true] {
        let upstream = Upstream::start(|request| match request.start_line().contains("/unknown") {
            true => Reply::nothing().close(),
            false => Reply::raw(
                "HTTP/1.1 200 OK\r\nX-Answer: header-of-the-answer\r\nContent-Length: 18\r\n\r\nbody-of-the-answer",
            ),
        });
        // With this, records keep whole keys.
        let recovery = "recovery = { probe = \"/by-key/{key}\", every = \"1h\", headers = { X-Books = \"1\" } }";
        for Kept { plan, places, flush, _servers } in every_store(&Gate::before(&upstream).defaults(recovery)) {
            let plan = if is_encrypted { with_keys(&plan, &[1]) } else { plan };
            let gate = plan.start();
            let send = |path: &str, key: &str| -> Response {
                let request = Request::post(path).key(key).header("Authorization", "Bearer token-of-the-request");
                request.header("X-Request", "header-of-the-request").body("body-of-the-request").send(&gate)
            };
            send("/path-of-the-request", TEXTS[0].0).expect(200, "executed");
            send("/path-of-the-request/unknown", "key-of-the-request-31415926-2")
                .expect_problem(502, "upstream-broken");
            let check = |when: &str| {
                flush();
                for (directory, is_cache) in &places {
                    if *is_cache && !is_encrypted {
                        // It has an answer a moment after the client.
                        eventually("the cache has the answer", || {
                            flush();
                            found(directory).contains(&"body-of-the-answer").then_some(())
                        });
                        continue;
                    }
                    let found = found(directory);
                    let place = directory.display();
                    let expected = if is_encrypted { &[][..] } else { &kept };
                    assert_eq!(found, expected, "{when}, {place}");
                }
            };
            check("while it runs");
            let seen = gate.log() + &gate.admin("GET", "/metrics", None).text();
            let secrets = TEXTS.iter().map(|(text, _)| *text).filter(|text| *text != "/path-of-the-request");
            let shown: Vec<&str> = secrets.filter(|text| seen.contains(text)).collect();
            assert_eq!(shown, [""; 0], "in the log or the metrics");
            gate.stop();
            check("after its end");
        }
    }
}

#[test]
fn an_answer_that_was_altered_is_not_given() {
    let upstream = numbered();
    let plan = with_keys(&Gate::before(&upstream), &[1]);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let flip = || {
        let store = rusqlite::Connection::open(plan.path("gate.db")).unwrap();
        let mut answer: Vec<u8> = store.query_row("SELECT answer FROM record", [], |row| row.get(0)).unwrap();
        *answer.last_mut().unwrap() ^= 1;
        assert_eq!(store.execute("UPDATE record SET answer = ?1", [answer]).unwrap(), 1);
    };
    flip();
    let gate = plan.start();
    is_refused(&gate, &upstream, "k-1");
    assert!(decryption_failures(&gate, "altered") >= 1.0, "{}", gate.log());
    assert!(gate.log().contains("altered or moved"), "{}", gate.log());
    gate.stop();
    flip();
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// How many records the gate says that need a key, after its next count.
#[track_caller]
fn counted(gate: &Gate, expected: &[(&str, f64)]) {
    let of = |key: &str| gate.metric("oncegate_records_by_key", &[&format!("key=\"{key}\"")]);
    let began = Instant::now();
    while expected.iter().any(|(key, count)| (of(key) - count).abs() > f64::EPSILON) {
        let found: Vec<_> = expected.iter().map(|(key, _)| (*key, of(key))).collect();
        assert!(began.elapsed() < Duration::from_secs(40), "{found:?} and not {expected:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What `oncegate records reseal` prints.
#[track_caller]
fn resealed(gate: &Gate) -> String {
    let (is_done, said) = try_reseal(gate);
    assert!(is_done, "{said}");
    said
}

fn try_reseal(gate: &Gate) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["records", "--admin", &format!("http://{}", gate.admin), "reseal"]);
    let output = command.output().expect("the binary starts");
    (output.status.success(), String::from_utf8(output.stdout).expect("text"))
}

#[test]
fn an_old_key_may_go_once_its_records_are_encrypted_anew() {
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "plain", "{}").expect(200, "executed");
    assert_eq!(gate.admin("POST", "/api/v1/records/reseal", Some(&json!({}))).status, 409);
    gate.stop();
    let gate = with_keys(&plan, &[1]).start();
    let first = gate.post("/charges", "old", "{}");
    first.expect(200, "executed");
    assert!(reload(&gate, &with_keys(&plan, &[2, 1])), "{}", gate.log());
    gate.post("/charges", "new", "{}").expect(200, "executed");
    counted(&gate, &[("key-1", 1.0), ("key-2", 1.0), ("(plain)", 1.0), ("(missing)", 0.0)]);
    assert_eq!(resealed(&gate), "2 records encrypted with the first key\n");
    counted(&gate, &[("key-1", 0.0), ("key-2", 3.0), ("(plain)", 0.0), ("(missing)", 0.0)]);
    assert_eq!(resealed(&gate), "0 records encrypted with the first key\n");
    gate.stop();
    let gate = with_keys(&plan, &[2]).start();
    for key in ["plain", "old", "new"] {
        gate.post("/charges", key, "{}").expect(200, "replayed");
    }
    first.expect_repeated_by(&gate.post("/charges", "old", "{}"));
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn a_route_that_demands_encryption_believes_no_plain_record() {
    let upstream = numbered();
    let route = |seal: &str| format!("[[routes]]\nname = \"charges\"\npath = \"/charges\"\nseal = \"{seal}\"\n");
    let plan = Gate::before(&upstream);
    let (optional, required) = (plan.clone().routes(&route("optional")), plan.clone().routes(&route("required")));
    let gate = optional.start();
    let planted = gate.post("/charges", "planted", "{}");
    planted.expect(200, "executed");
    gate.stop();

    let gate = with_keys(&required, &[1]).start();
    is_refused(&gate, &upstream, "planted");
    assert!(decryption_failures(&gate, "plain") >= 2.0, "{}", gate.log());
    assert!(gate.log().contains("seal = \\\"required\\\""), "{}", gate.log());
    gate.post("/charges", "own", "{}").expect(200, "executed");
    gate.post("/charges", "own", "{}").expect(200, "replayed");
    let (is_done, said) = try_reseal(&gate);
    assert!(!is_done && said.starts_with("0 records encrypted") && said.contains("\n1 not "), "{said}");
    is_refused(&gate, &upstream, "planted");

    // Where nothing demands it, what is plain is read, and can be encrypted.
    assert!(reload(&gate, &with_keys(&optional, &[1])), "{}", gate.log());
    counted(&gate, &[("key-1", 1.0), ("(plain)", 1.0)]);
    planted.expect_repeated_by(&gate.post("/charges", "planted", "{}"));
    assert_eq!(resealed(&gate), "1 record encrypted with the first key\n");
    assert!(reload(&gate, &with_keys(&required, &[1])), "{}", gate.log());
    let gate = gate.kill9();
    let gate = gate.start();
    for key in ["planted", "own"] {
        gate.post("/charges", key, "{}").expect(200, "replayed");
    }
    assert_eq!(upstream.runs(), 2);
}

/// An upstream that completes its attempts in its own transaction.
#[test]
fn what_an_upstream_completes_is_encrypted_by_the_gate_that_reads_it() {
    let Some(database) = database() else { return };
    let url = database.url.clone();
    let upstream = Upstream::start(move |request| {
        let attempt = request.head.get("idempotency-attempt").expect("an attempt").to_owned();
        let body = format!("convert_to('secret-answer-{}', 'UTF8')", request.nth);
        Session::open(&url).run(&format!("SELECT oncegate.complete('{attempt}', 201, '[]'::jsonb, {body})"));
        Reply::ok("what the gate does not record")
    });
    let plan = with_keys(&Gate::before(&upstream).store_url(&database.url), &[1]);
    crate::migrate::done(&["--store", &database.url]);
    let gate = plan.start();
    let first = gate.post("/charges", "k-1", "{}");
    first.expect(201, "executed");
    let is_plain = || {
        database.value(
            "SELECT count(*) FROM oncegate.record WHERE position('secret-answer' in encode(answer, 'escape')) > 0",
        ) == "1"
    };
    let began = Instant::now();
    while is_plain() {
        assert!(began.elapsed() < Duration::from_secs(20), "it stays plain");
        std::thread::sleep(Duration::from_millis(50));
    }
    let gate = gate.kill9().start();
    let again = gate.post("/charges", "k-1", "{}");
    again.expect(201, "replayed");
    first.expect_repeated_by(&again);
    assert_eq!((again.text(), upstream.runs()), ("secret-answer-1".to_owned(), 1));
}
