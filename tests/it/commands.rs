//! The other commands, as an operator types them.

use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::Process;
use crate::support::{Gate, Plan, Reply, Request, Upstream, eventually};
use serde_json::Value;

fn oncegate(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args).output().expect("the binary starts")
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn both(output: &Output) -> String {
    out(output) + &String::from_utf8_lossy(&output.stderr)
}

#[track_caller]
fn records(gate: &Gate, args: &[&str]) -> String {
    let admin = gate.admin.to_string();
    let output = oncegate(&[&["records", "--admin", &admin], args].concat());
    assert!(output.status.success(), "{args:?}: {}", both(&output));
    out(&output)
}

#[test]
fn an_unknown_record_is_found_and_resolved() {
    let upstream = Upstream::start(|_| Reply::default().pause(Duration::from_millis(1)).reset());
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "order-1", "{}").expect_problem(502, "upstream-broken");
    gate.post("/charges", "order-2", "{}").expect_problem(502, "upstream-broken");
    let listed = records(&gate, &["list", "--state", "unknown", "--key", "order-1", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let id = listed["records"][0]["id"].as_str().expect("an id");
    assert_eq!(listed["records"].as_array().expect("a list").len(), 1);
    assert!(records(&gate, &["list"]).contains("unknown"));
    assert!(records(&gate, &["show", id]).contains(id));
    let complete = ["resolve", id, "--complete", "--status", "201", "--header", "X-A: 1", "--body", "paid"];
    records(&gate, &[&complete[..], &["--reason", "found in the ledger"]].concat());
    let replay = gate.post("/charges", "order-1", "{}");
    replay.expect(201, "replayed");
    assert_eq!((replay.text().as_str(), replay.get("x-a").as_deref()), ("paid", Some("1")));
    records(&gate, &["purge", &id[..24], "--reason", "a test"]);
    assert_eq!(gate.states("order-1").len(), 0);
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn many_records_are_listed_and_settled_at_once() {
    let upstream = Upstream::start(|request| match request.nth {
        1..=6 => Reply::default().pause(Duration::from_millis(1)).reset(),
        nth => Reply::ok(format!("run {nth}")),
    });
    let gate = Gate::before(&upstream).start();
    for order in 1..=6 {
        gate.post("/charges", &format!("order-{order}"), "{}").expect_problem(502, "upstream-broken");
    }
    gate.post("/charges", "paid", "{}").expect(200, "executed");
    let table = records(&gate, &["list", "--limit", "3"]);
    assert!(table.lines().nth(1).expect("a record").contains("completed"), "the newest is the first: {table}");
    let next = table.lines().last().and_then(|line| line.strip_prefix("next: ")).expect("more");
    let rest = records(&gate, &["list", "--after", next, "--since", "1h", "--json"]);
    let rest: Value = serde_json::from_str(&rest).expect("JSON");
    assert_eq!((rest["records"].as_array().expect("a list").len(), &rest["next"]), (4, &Value::Null));
    assert_eq!(records(&gate, &["list", "--all"]).lines().count(), 8);

    let admin = gate.admin.to_string();
    let release = ["resolve", "--since", "1h", "--release"];
    let dry = records(&gate, &[&release[..], &["--dry-run"]].concat());
    assert!(dry.starts_with("6 records would be released; nothing was changed\n"), "{dry}");
    let unasked = oncegate(&[&["records", "--admin", &admin], &release[..], &["--reason", "not booked"]].concat());
    assert_eq!(unasked.status.code(), Some(1));
    assert!(both(&unasked).contains("6 records would be released: give --yes"), "{}", both(&unasked));
    assert_eq!(upstream.runs(), 7);
    let released = records(&gate, &[&release[..], &["--reason", "not booked", "--yes"]].concat());
    assert_eq!(released, "6 records released\n");
    gate.post("/charges", "order-1", "{}").expect(200, "executed");
    assert_eq!(records(&gate, &["purge", "--all", "--reason", "a test", "--yes"]), "2 records removed\n");
    gate.post("/charges", "paid", "{}").expect(200, "executed");
    eventually("each is logged", || (gate.log().matches("not booked").count() == 6).then_some(()));
}

#[test]
fn what_fails_says_so() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let admin = gate.admin.to_string();
    let missing = "0".repeat(64);
    for args in [
        &["show", &missing][..],
        &["purge", &missing, "--reason", "x"],
        &["resolve", &missing, "--release", "--reason", "x"],
    ] {
        let output = oncegate(&[&["records", "--admin", &admin], args].concat());
        assert_eq!(output.status.code(), Some(1), "{}", both(&output));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
    gate.post("/charges", "paid", "{}").expect(200, "executed");
    let by_key = ["resolve", "--key", "paid", "--release", "--reason", "x", "--yes"];
    let said = both(&oncegate(&[&["records", "--admin", &admin], &by_key[..]].concat()));
    assert!(said.contains("0 records released") && said.contains("the record is completed"), "{said}");
    let away = oncegate(&["records", "--admin", &Upstream::free_address().to_string(), "list"]);
    assert_eq!(away.status.code(), Some(1));
    for usage in [&["records", "list", "--state", "odd"][..], &["records", "show", "odd"], &["odd"], &[]] {
        assert_eq!(oncegate(usage).status.code(), Some(2), "{usage:?}");
    }
}

#[test]
fn a_variable_that_is_empty_is_named() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let output = command.args(["check"]).env("ONCEGATE_CONFIG", "").output().expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{}", both(&output));
    assert!(both(&output).contains("ONCEGATE_CONFIG is set, and empty"), "{}", both(&output));
}

#[test]
fn an_output_that_cannot_be_written_is_no_success() {
    for args in [&["--help"][..], &["records", "--help"], &["version"], &["config", "default"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
        let output = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).stdout(full).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", both(&output));
        assert!(both(&output).contains("cannot write the output"), "{args:?}: {}", both(&output));
    }
}

#[test]
fn a_change_that_is_made_and_cannot_be_reported_is_reported_as_made() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "paid", "{}").expect(200, "executed");
    let id = gate.records("key=paid")[0]["id"].as_str().expect("an id").to_owned();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let purge = command.args(["records", "purge", &id, "--admin", &gate.admin.to_string(), "--reason", "x"]);
    let output = purge.stdout(full).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let said = both(&output);
    assert!(said.starts_with("oncegate: the change was made: cannot write the output: No space left"), "{said}");
    assert_eq!(gate.states("paid").len(), 0);
}

/// Repeated, it could remove the record of a retry.
#[test]
fn a_change_whose_answer_is_lost_may_have_been_made() {
    let service = Upstream::start(|request| match request.start_line().starts_with("GET /livez ") {
        true => Reply::ok(r#"{"status":"live"}"#),
        false => Reply::default().pause(Duration::from_millis(1)).reset(),
    });
    let (address, id) = (service.address.to_string(), "0".repeat(64));
    let in_doubt = |args: &[&str]| {
        let output = oncegate(&[args, &["--admin", &*address]].concat());
        assert_eq!(output.status.code(), Some(1), "{}", both(&output));
        both(&output).contains("the change may have been made: see `oncegate audit` before you repeat it")
    };
    for command in [
        &["records", "purge", &id, "--reason", "x"][..],
        &["records", "resolve", &id, "--release", "--reason", "x"],
        &["records", "retry", &id, "--reason", "x"],
        &["records", "purge", "--all", "--yes", "--reason", "x"],
        &["deliveries", "pause", "charge"],
    ] {
        assert!(in_doubt(command), "{command:?}");
    }
    for command in [&["records", "list"][..], &["records", "purge", "--all", "--dry-run"]] {
        assert!(!in_doubt(command), "{command:?}");
    }
}

#[test]
fn a_flag_takes_the_place_of_a_variable_whatever_that_holds() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let admin = gate.admin.to_string();
    for command in [&["records", "list"][..], &["deliveries", "list"], &["audit"]] {
        for args in
            [[command, &["--admin", &*admin]].concat(), [&command[..1], &["--admin", &admin], &command[1..]].concat()]
        {
            let mut oncegate = Command::new(env!("CARGO_BIN_EXE_oncegate"));
            let output = oncegate.args(&args).env("ONCEGATE_ADMIN__LISTEN", "systemd:admin").output().expect("it runs");
            assert!(output.status.success(), "{args:?}: {}", both(&output));
        }
    }
}

/// Read all the same, it would name another store.
#[test]
fn a_variable_that_is_not_utf8_is_a_problem() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let value = std::ffi::OsStr::from_bytes(b"sqlite:/data/x\xff.db");
    let output = command.args(["check", "--upstream", "http://127.0.0.1:1"]).env("ONCEGATE_STORE__URL", value).output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(78), "{}", both(&output));
    let said = "ONCEGATE_STORE__URL: its value is not UTF-8\n";
    assert!(both(&output).contains(said), "{}", both(&output));
}

#[test]
fn a_list_without_records_names_a_route_that_does_not_exist() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let admin = gate.admin.to_string();
    for command in [
        &["deliveries", "list", "nosuch"][..],
        &["records", "list", "--route", "nosuch"],
        &["records", "purge", "--route", "nosuch", "--reason", "x", "--yes"],
        &["records", "retry", "--route", "nosuch", "--dry-run"],
    ] {
        let output = oncegate(&[command, &["--admin", &admin]].concat());
        assert_eq!(output.status.code(), Some(0), "{command:?}: {}", both(&output));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said, "oncegate: the gate has no route `nosuch`\n", "{command:?}");
    }
}

/// As where `--admin` names the gate's listener for clients: the upstream answers.
#[test]
fn another_service_in_the_place_of_the_admin_listener_gets_no_token_and_does_nothing() {
    let service = Upstream::start(|_| Reply::status("204 No Content", ""));
    let (address, id) = (service.address.to_string(), "0".repeat(64));
    let token = tempfile::NamedTempFile::new().expect("a writable directory");
    std::fs::write(token.path(), "0123456789abcdef0123456789abcdef").expect("writable");
    for command in [
        &["records", "list"][..],
        &["records", "purge", &id, "--reason", "x"],
        &["records", "resolve", &id, "--release", "--reason", "x"],
        &["deliveries", "pause", "charge"],
        &["reload"],
    ] {
        for with in
            [&["--admin", &*address][..], &["--admin", &address, "--token-file", &token.path().to_string_lossy()]]
        {
            let output = oncegate(&[command, with].concat());
            assert_eq!(output.status.code(), Some(1), "{command:?}: {}", both(&output));
            assert!(both(&output).contains("is not oncegate's admin listener"), "{command:?}: {}", both(&output));
            assert!(output.stdout.is_empty(), "{command:?}: {}", both(&output));
        }
    }
    let seen = service.seen();
    assert!(
        seen.iter().all(|request| request.start_line().starts_with("GET ") && !request.head.has("authorization")),
        "a token, or a change"
    );
}

#[test]
fn the_default_configuration_is_one() {
    let default = oncegate(&["config", "default"]);
    assert!(default.status.success());
    let dir = tempfile::tempdir().expect("a writable directory");
    let file = dir.path().join("oncegate.toml");
    std::fs::write(&file, out(&default) + "\n[upstreams.app]\nurl = \"http://127.0.0.1:3000\"\n").expect("writable");
    let file = file.to_string_lossy().into_owned();
    let checked = oncegate(&["check", "--config", &file]);
    assert!(checked.status.success(), "{}", both(&checked));
    let printed = oncegate(&["config", "print", "--config", &file]);
    assert!(printed.status.success(), "{}", both(&printed));
    // What is printed is a configuration, and prints as itself.
    let again = dir.path().join("again.toml");
    std::fs::write(&again, &printed.stdout).expect("writable");
    let again = oncegate(&["config", "print", "--config", &again.to_string_lossy()]);
    assert_eq!(out(&again), out(&printed), "{}", both(&again));
}

#[test]
fn secrets_are_not_printed() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    for (name, secret) in [("token", "open-sesame-open-sesame-open-sesame"), ("id", "0123456789abcdef0123456789abcdef")]
    {
        std::fs::write(plan.path(name), secret).expect("a writable directory");
    }
    let plan = plan.clone().admin(&format!("token_file = \"{}\"", plan.path("token").display()));
    let plan = plan.clone().store(&format!("id_secret_file = \"{}\"", plan.path("id").display()));
    let file = plan.config();
    for command in [&["config", "print"][..], &["check"]] {
        let output = oncegate(&[command, &["--config", &file.to_string_lossy()]].concat());
        assert!(output.status.success(), "{}", both(&output));
        assert!(!both(&output).contains("open-sesame") && !both(&output).contains("0123456789abcdef"));
    }
    // And both work.
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

#[test]
fn flags_beat_the_environment_which_beats_the_file() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let address = Upstream::free_address();
    let plan = Gate::before(&upstream).server("listen = \"192.0.2.1:1\"");
    // The file's address is nobody's here.
    assert!(plan.try_start().is_none());
    let by_environment = plan.clone().env("ONCEGATE_SERVER__LISTEN", address.to_string());
    assert_eq!(by_environment.start().address, address);
    let by_flag = plan.clone().env("ONCEGATE_SERVER__LISTEN", "192.0.2.1:1").arg("--listen").arg("127.0.0.1:0");
    assert_eq!(by_flag.start().address.ip().to_string(), "127.0.0.1");
}

/// Where logs are JSON, so is the reason why a gate does not start.
#[test]
fn a_start_that_fails_is_logged_as_json() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let lines = |plan: Plan, status: i32| -> Vec<Value> {
        let mut process = plan.env("ONCEGATE_LOG__FORMAT", "json").spawn();
        assert_eq!(process.wait().code(), Some(status), "{}", process.log());
        let parsed = |line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}"));
        process.log().lines().map(parsed).collect()
    };
    let wrong = lines(Gate::before(&upstream).server("listne = \"x\"").defaults("ttl = \"0s\""), 78);
    assert_eq!(wrong.len(), 2, "{wrong:?}");
    for line in &wrong {
        let known = ["place", "key", "problem", "hint"].iter().all(|name| line[name].is_string());
        assert!(line["level"] == "ERROR" && known, "{line}");
    }
    let no_toml = lines(Gate::before(&upstream).server("listen = \n"), 78);
    assert_eq!(no_toml.len(), 1, "{no_toml:?}");
    assert!(no_toml[0]["level"] == "ERROR" && no_toml[0]["problem"].is_string(), "{no_toml:?}");
    let taken = lines(Gate::before(&upstream).server(&format!("listen = \"{}\"", upstream.address)), 1);
    let last = taken.last().expect("a line");
    assert!(last["level"] == "ERROR" && last["error"].is_string(), "{last}");
}

#[test]
fn a_file_that_is_no_toml_ends_every_command_that_reads_it_with_78() {
    let dir = tempfile::tempdir().expect("a writable directory");
    let file = dir.path().join("broken.toml");
    std::fs::write(&file, "listen = \n").expect("a writable directory");
    let commands = [&["records", "list"][..], &["deliveries", "list"], &["audit"], &["observed"], &["check"]];
    for (command, file) in commands.iter().flat_map(|command| {
        [(command, &file), (command, &dir.path().join("none.toml"))].map(|(command, file)| (*command, file.clone()))
    }) {
        let mut oncegate = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output = oncegate.args(command).arg("--config").arg(&file).output().expect("oncegate runs");
        assert_eq!(output.status.code(), Some(78), "{command:?} {}", file.display());
    }
}

/// `oncegate serve --upstream URL` alone is a working gate.
#[test]
fn serving_without_a_configuration() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let dir = std::sync::Arc::new(tempfile::tempdir().expect("a writable directory"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["serve", "--upstream", &upstream.url(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    command.env("ONCEGATE_LOG__FORMAT", "json").current_dir(dir.path());
    let process = Process::start(command, std::sync::Arc::clone(&dir));
    let address = process.address("listening").expect("it listens");
    for method in ["POST", "PATCH"] {
        let request = Request::new(method, "/any/thing").key(method).body("{}");
        let first = request.send(address);
        first.expect(200, "executed");
        first.expect_repeated_by(&request.send(address));
    }
    let root = Request::post("/").key("root").body("{}");
    root.send(address).expect(200, "executed");
    root.send(address).expect(200, "replayed");
    for method in ["PUT", "DELETE"] {
        let request = Request::new(method, "/x").key("k");
        assert_eq!(request.send(address).word(), "ignored", "{method} is not protected by default");
    }
    assert_eq!(Request::post("/x").send(address).word(), "");
    let path = dir.path().join("oncegate.db");
    assert!(path.exists());
    assert!(process.log().contains(&path.display().to_string()), "its absolute path is not said: {}", process.log());
}

#[test]
fn the_records_of_one_tenant_are_removed() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Gate::before(&upstream).defaults("scope = [\"header:X-Tenant\", \"credential\"]").start();
    let send = |tenant: &str, key: &str| {
        Request::post("/charges").header("X-Tenant", tenant).header("X-Api-Key", "k").key(key).body("{}").send(&gate)
    };
    for (tenant, key) in [("acme", "k-1"), ("acme", "k-2"), ("globex", "k-1")] {
        send(tenant, key).expect(200, "executed");
    }
    let scope = ["--scope", "header:X-Tenant=acme"];
    let dry = records(&gate, &[&["purge", "--dry-run"], &scope[..]].concat());
    assert!(dry.starts_with("2 records would be removed"), "{dry}");
    let done = records(&gate, &[&["purge", "--yes", "--reason", "a test"], &scope[..]].concat());
    assert_eq!(done, "2 records removed\n");
    send("acme", "k-1").expect(200, "executed");
    send("globex", "k-1").expect(200, "replayed");
    let listed = records(&gate, &["list", "--scope", "credential=X-Api-Key: k", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    assert_eq!(listed["records"].as_array().expect("a list").len(), 2);
    assert!(!gate.log().contains("acme"), "an erasure does not say whose it was: {}", gate.log());
}
