//! What operators, probes and service managers ask of a running gate: health, reloads and orderly ends.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Gate, Plan, Reply, Request, Signal, Upstream, eventually};

pub fn oncegate(args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("an exit status"), text(stdout), text(stderr))
}

fn config_of(plan: &Plan) -> String {
    plan.path("oncegate.toml").to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_filter_that_makes_no_sense_is_a_wrong_command_line() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let admin = gate.admin.to_string();
    for args in [
        &["records", "list", "--scope", "foo"][..],
        &["records", "list", "--after", "nonsense"],
        &["records", "purge", "--scope", "foo", "--dry-run"],
        &["audit", "--action", "foo"],
    ] {
        let (status, out, error) = oncegate(&[args, &["--admin", &admin]].concat());
        assert_eq!((status, &*out), (2, ""), "{args:?}: {error}");
        assert!(error.starts_with("oncegate: bad-request: "), "{args:?}: {error}");
    }
}

/// A gate ends its part of a long change after fifteen seconds.
#[test]
fn a_change_of_many_parts_says_how_far_it_is() {
    let admin = Upstream::start(|request| {
        Reply::ok(match request.body.bytes.windows(7).any(|bytes| bytes == b"\"after\"") {
            _ if request.start_line().starts_with("GET /livez ") => r#"{"status": "live"}"#,
            false => r#"{"matched": 7, "done": 5, "failed": 0, "ids": [], "next": "5"}"#,
            true => r#"{"matched": 2, "done": 1, "failed": 0, "ids": []}"#,
        })
    });
    let url = admin.url();
    let (status, out, error) =
        oncegate(&["records", "purge", "--route", "pay", "--reason", "x", "--yes", "--admin", &url]);
    let left = "6 records removed\n3 records left alone: changed by others meanwhile, or held by an open transaction\n";
    assert_eq!((status, &*out, &*error), (0, left, "oncegate: 5 records removed so far; going on\n"));
}

/// A gate must not wait for whatever reads its log.
#[test]
fn a_log_reader_that_stops_costs_lines_which_are_counted() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let (address, admin) = (Upstream::free_address(), Upstream::free_address());
    let plan =
        Gate::before(&upstream).server(&format!("listen = \"{address}\"")).admin(&format!("listen = \"{admin}\""));
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["serve", "--config"]).arg(plan.config()).env("ONCEGATE_LOG__LEVEL", "oncegate=debug");
    let mut gate = Killed(command.stderr(Stdio::piped()).spawn().expect("it starts"));
    eventually("it serves", || TcpStream::connect(address).ok().map(drop));
    let lost = || {
        let metrics = Request::get("/metrics").header("Host", "127.0.0.1").send(admin).text();
        let value = metrics.lines().find_map(|line| line.strip_prefix("oncegate_log_lost_total ")?.parse().ok());
        value.unwrap_or(0.0)
    };
    let mut sent = 0;
    eventually("lines are lost", || {
        for _ in 0..100 {
            sent += 1;
            Request::post("/charges").key(&format!("k-{sent}")).body("{}").send(address).expect(200, "executed");
        }
        (lost() > 0.0).then_some(())
    });
    // It goes on, and the next line that is written says so.
    let log = BufReader::new(gate.0.stderr.take().expect("a pipe"));
    let (says, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = log.lines().map_while(Result::ok);
        let _ = says.send(lines.find(|line| line.contains("lines of the log were lost")));
    });
    let said = eventually("it says so", || {
        Request::post("/charges").key("last").body("{}").send(address);
        said.try_recv().ok()
    });
    let said: Value = serde_json::from_str(&said.expect("a line")).expect("JSON");
    assert!(said["lines"].as_u64() >= Some(1), "{said}");
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn health_is_one_line_and_an_exit_status() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    // The system gives this address to no other test after the gate has ended.
    let listen = format!("listen = \"{}\"", Upstream::free_address());
    let gate = Gate::before(&upstream).admin(&listen).start();
    let admin = gate.admin.to_string();
    assert_eq!(oncegate(&["health", "--admin", &admin]), (0, "ready\n".to_owned(), String::new()));
    gate.stop();
    let (status, out, error) = oncegate(&["health", "--admin", &admin]);
    assert!(status == 1 && out.is_empty() && error.contains("nothing listens"), "{status} {out} {error}");
    let (status, _, error) = oncegate(&["reload", "--admin", &admin]);
    assert!(status == 1 && error.contains("not reloaded: nothing listens"), "{status} {error}");
}

#[test]
fn the_admin_listener_is_found_by_the_configuration() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let address = Upstream::free_address();
    let plan = Gate::before(&upstream);
    let token = plan.path("token");
    std::fs::write(&token, "s3cret").expect("written");
    let gate = plan.admin(&format!("listen = \"{address}\"\ntoken_file = {token:?}")).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let config = config_of(&gate.plan);
    assert_eq!(oncegate(&["health", "-c", &config]).0, 0);
    let (status, out, error) = oncegate(&["records", "list", "--config", &config]);
    assert!(status == 0 && out.contains("completed"), "{out} {error}");
    // A gate that goes on is healthy, whatever has become of its files.
    std::fs::remove_file(&token).expect("removed");
    assert_eq!(oncegate(&["health", "-c", &config]).0, 0);
    std::fs::write(&config, "[admin\n").expect("written");
    assert_eq!(oncegate(&["health", "-c", &config, "--admin", &address.to_string()]).0, 0);
    let (status, _, error) = oncegate(&["reload", "-c", &config]);
    assert!(status == 78 && error.contains("oncegate.toml:1") && error.contains("was not asked"), "{status} {error}");
    // Where the listener is named, the gate says what it thinks of the file, and needs a token for that.
    let (status, _, error) = oncegate(&["reload", "-c", &config, "--admin", &address.to_string()]);
    assert!(status == 1 && error.contains("oncegate.toml:1") && error.contains("without a token"), "{status} {error}");
    assert!(error.contains("--token-file"), "{error}");
}

#[test]
fn a_gate_without_a_token_is_asked_to_reload_a_file_that_is_broken() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let config = config_of(&gate.plan);
    std::fs::write(&config, "[admin\n").expect("written");
    let (status, _, error) = oncegate(&["reload", "-c", &config, "--admin", &gate.admin.to_string()]);
    assert!(status == 78 && error.contains("the gate goes on with the former configuration"), "{status} {error}");
    assert!(!error.contains("was not asked"), "{error}");
}

#[test]
fn reload_waits_for_what_comes_of_it() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let admin = gate.admin.to_string();
    let path = gate.plan.path("oncegate.toml");
    let good = std::fs::read_to_string(&path).expect("a configuration");
    let reload = || oncegate(&["reload", "--admin", &admin]);
    assert_eq!(reload(), (0, "reloaded; routes: 1\n".to_owned(), String::new()));
    std::fs::write(&path, good.replace("[log]", "[log]\nlevle = \"info\"")).expect("written");
    let (status, out, error) = reload();
    assert!(status == 78 && out.is_empty(), "{status} {out} {error}");
    let line = good.lines().position(|line| line.trim() == "[log]").expect("a table") + 2;
    let place = format!("oncegate.toml:{line}: log.levle: ");
    assert!(error.contains(&place) && error.contains("did you mean `level`?"), "{error}");
    assert!(error.ends_with("1 problem: not reloaded, the gate goes on with the former configuration\n"), "{error}");
    std::fs::write(&path, good.replace("[store]", "[store]\nservice = \"another\"")).expect("written");
    let (status, _, error) = reload();
    let line = good.lines().position(|line| line.trim() == "[store]").expect("a table") + 2;
    let place = format!("oncegate.toml:{line}: store.service: cannot change");
    assert!(status == 78 && error.contains(&place) && error.contains("hint: restart"), "{status} {error}");
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
}

#[test]
fn a_reload_with_a_token_that_the_gate_does_not_know_says_what_to_do() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let token = plan.path("token");
    std::fs::write(&token, "s3cret").expect("written");
    let gate = plan.admin(&format!("token_file = {token:?}")).start();
    let (admin, config) = (gate.admin.to_string(), config_of(&gate.plan));
    let reload = || oncegate(&["reload", "--config", &config, "--admin", &admin]);
    assert_eq!(reload().0, 0);
    std::fs::write(&token, "another").expect("written");
    let (status, _, error) = reload();
    assert!(status == 1 && error.contains("kill -HUP") && !error.contains("another"), "{status} {error}");
    gate.sighup();
    eventually("the token is taken up", || (reload().0 == 0).then_some(()));
}

#[test]
fn a_reload_that_opens_the_admin_listener_says_so() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let token = plan.path("token");
    std::fs::write(&token, "0123456789abcdef0123456789abcdef").expect("written");
    let gate = plan.admin(&format!("token_file = {token:?}")).start();
    let (admin, config) = (gate.admin.to_string(), config_of(&gate.plan));
    let reload = || oncegate(&["reload", "--admin", &admin, "--token-file", &token.to_string_lossy()]);
    assert_eq!(reload(), (0, "reloaded; routes: 1\n".to_owned(), String::new()));
    let guarded = std::fs::read_to_string(&config).expect("a configuration");
    let open: String = guarded
        .lines()
        .filter(|line| !line.starts_with("token_file"))
        .fold(String::new(), |all, line| all + line + "\n");
    std::fs::write(&config, open).expect("written");
    let (status, _, error) = reload();
    assert_eq!(status, 0, "{error}");
    assert!(error.starts_with("oncegate: warning: the admin listener no longer asks for a token"), "{error}");
    assert_eq!(reload().2, "", "it is said once");
}

/// What a balancer needs: it hears that the gate is not ready while that still takes requests.
#[test]
fn a_gate_that_stops_takes_requests_until_balancers_have_noticed() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let mut gate = Gate::before(&upstream).server("shutdown_delay = \"6s\"").start();
    let asked = Instant::now();
    gate.sigterm();
    eventually("it is not ready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert!(gate.wait().success());
    assert!(asked.elapsed() >= Duration::from_secs(6), "{:?}", asked.elapsed());
    // A second signal is an order to go on.
    let mut gate = gate.plan.clone().server("shutdown_delay = \"1h\"").start();
    gate.sigterm();
    eventually("it is not ready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    gate.sigterm();
    assert!(gate.wait().success());
}

#[test]
fn a_gate_without_its_store_is_ready_where_the_store_is_optional() {
    let Some(server) = crate::servers::Postgres::start() else { return };
    let database = crate::support::store::migrated_on(&server);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).store_url(&database.url).start();
    let admin = gate.admin.to_string();
    let ready = |target: &str| gate.admin("GET", target, None).status;
    assert_eq!((ready("/readyz"), ready("/readyz?store=optional")), (200, 200));
    server.hang();
    eventually("it is not ready", || (ready("/readyz") == 503).then_some(()));
    assert_eq!(ready("/readyz?store=optional"), 200);
    let (status, out, _) = oncegate(&["health", "--admin", &admin]);
    assert_eq!((status, &*out), (1, "not-ready: store-unavailable\n"));
    let (status, out, _) = oncegate(&["health", "--admin", &admin, "--store-optional"]);
    assert_eq!((status, &*out), (0, "ready: store-unavailable\n"));
    assert_eq!(Request::get("/anything").send(&gate).status, 200);
    server.go_on();
    eventually("it is ready", || (ready("/readyz") == 200).then_some(()));
}

#[test]
fn a_lost_attempt_is_logged_with_its_record_and_route() {
    let Some(database) = crate::support::store::migrated() else { return };
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let plan = || Gate::before(&upstream).store_url(&database.url).defaults("lease = \"1s\"");
    let (dying, other) = (plan().start(), plan().start());
    let address = dying.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").try_send(address).is_none());
    upstream.wait_for_runs(1);
    dying.kill9();
    assert!(first.join().expect("it ends"));
    other.wait_for_state("k-1", "unknown");
    let id = other.records("key=k-1")[0]["id"].as_str().expect("an id").to_owned();
    let line = eventually("the loss is logged", || {
        let log = other.log();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["record"] == id.as_str())
    });
    assert!(line["level"] == "WARN" && line["route"] == "all", "{line}");
    signal.open();
}

#[test]
fn what_hands_type_first_works() {
    let version = format!("oncegate {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(oncegate(&["version"]), (0, version.clone(), String::new()));
    assert_eq!(oncegate(&["--version"]), (0, version, String::new()));
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let config = plan.config();
    let file = config.to_str().expect("UTF-8");
    for args in
        [&["check", file][..], &["check", "-c", file], &["check", "--config", file], &["check", file, "-c", "/none"]]
    {
        let (status, out, error) = oncegate(args);
        assert!(status == 0 && out.contains("ok (1 route, 1 upstream)"), "{args:?}: {out} {error}");
    }
}

#[test]
fn a_directory_that_is_missing_comes_with_the_command_that_makes_it() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let directory = plan.path("not").join("there");
    let plan = plan.store_url(&format!("sqlite:{}", directory.join("gate.db").display()));
    let mut process = plan.env("ONCEGATE_LOG__FORMAT", "text").spawn();
    assert_eq!(process.wait().code(), Some(1));
    let hint = format!("hint: its directory does not exist: install -d -m 0700 '{}'", directory.display());
    let log = process.log();
    assert!(log.contains(&hint) && log.matches("No such file or directory").count() == 1, "{log}");
}
