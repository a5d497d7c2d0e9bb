//! `oncegate migrate`, and what `serve` says of a database that it cannot work on.

use std::process::{Command, Output};

use crate::servers::{Database, PgBouncer, Postgres, Proxy, Session, at, database};
use crate::support::Process;
use crate::support::{Gate, Plan, Reply, Request, Upstream, eventually};

const SCHEMAS: &str = "SELECT count(*) FROM pg_namespace WHERE nspname = 'oncegate'";

const APPLIED: &str = "SELECT string_agg(version::text, ',' ORDER BY version) FROM oncegate.migration";

/// `oncegate migrate` as it is typed, without what the environment of the tests says of databases.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("migrate").args(args).env_remove("PGPASSWORD").env_remove("ONCEGATE_CONFIG");
    command
}

fn migrate(args: &[&str]) -> Output {
    command(args).output().expect("the binary starts")
}

/// What it wrote to standard output, where it went well.
#[track_caller]
pub fn done(args: &[&str]) -> String {
    let output = migrate(args);
    let (out, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && said.is_empty(), "{args:?}: {}\n{out}{said}", output.status);
    out
}

/// What it complained of, where it ended with this status.
#[track_caller]
pub fn refused(args: &[&str], status: i32) -> String {
    let output = migrate(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    said
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A gate on a database, with the store's URL on the command line.
fn gate(upstream: &Upstream, url: &str) -> Plan {
    Gate::before(upstream).arg("--store").arg(url)
}

/// What a gate that does not start has logged.
#[track_caller]
fn refusal(plan: &Plan) -> String {
    let mut process = plan.spawn();
    let status = process.wait();
    assert_eq!(status.code(), Some(1), "{}", process.log());
    process.log()
}

#[test]
fn a_dry_run_shows_what_would_run_and_changes_nothing() {
    let Some(database) = database() else { return };
    let script = done(&["--store", &database.url, "--dry-run"]);
    assert!(script.starts_with("BEGIN;\n") && script.ends_with("COMMIT;\n"), "{script}");
    assert_eq!(database.value(SCHEMAS), "0");
    // Given to the database, it does what `migrate` does.
    database.run(&script);
    assert_eq!(done(&["--store", &database.url]), "schema oncegate: nothing to do\n");
    assert_eq!(done(&["--store", &database.url, "--dry-run"]), "-- schema oncegate: nothing to do\n");
    let by_script = shape(&database);
    database.run("DROP SCHEMA oncegate CASCADE");
    done(&["--store", &database.url]);
    assert_eq!(shape(&database), by_script);
}

/// Every table, column, index, function and migration of the schema.
fn shape(database: &Database) -> Vec<Vec<Option<String>>> {
    database.run(
        "SELECT table_name, column_name, data_type, column_default FROM information_schema.columns
         WHERE table_schema = 'oncegate' ORDER BY 1, 2;
         SELECT indexdef FROM pg_indexes WHERE schemaname = 'oncegate' ORDER BY 1;
         SELECT proname, pg_get_functiondef(oid), proacl::text FROM pg_proc
         WHERE pronamespace = 'oncegate'::regnamespace ORDER BY 1, 2;
         SELECT version, compatible_with FROM oncegate.migration ORDER BY 1;",
    )
}

#[test]
fn the_second_time_there_is_nothing_to_do() {
    let Some(database) = database() else { return };
    let first = done(&["--store", &database.url]);
    let (last, applied) = (database.value("SELECT max(version) FROM oncegate.migration"), database.value(APPLIED));
    assert!(first.starts_with("schema oncegate: applied 1 records"), "{first}");
    assert!(first.ends_with(&format!("; now at version {last}\n")), "{first}");
    let before = database.value("SELECT min(applied_at) FROM oncegate.migration");
    assert_eq!(done(&["--store", &database.url]), "schema oncegate: nothing to do\n");
    assert_eq!(database.value(APPLIED), applied);
    assert_eq!(database.value("SELECT min(applied_at) FROM oncegate.migration"), before);
}

#[test]
fn of_several_at_once_one_does_it() {
    let Some(database) = database() else { return };
    let spawn = |_| {
        let mut command = command(&["--store", &database.url]);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().expect("the binary starts")
    };
    let children: Vec<_> = (0..4).map(spawn).collect();
    let outputs: Vec<Output> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    for output in &outputs {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let did = outputs.iter().filter(|output| text(&output.stdout).contains(": applied 1 records")).count();
    let quiet = outputs.iter().filter(|output| text(&output.stdout).contains(": nothing to do")).count();
    assert_eq!((did, quiet), (1, 3));
}

#[test]
fn other_stores_need_none() {
    assert_eq!(done(&["--store", "memory:"]), "store memory: nothing to migrate\n");
    let said = done(&["--store", "sqlite:no/such.db", "--dry-run"]);
    assert!(said.starts_with("store sqlite, no/such.db: nothing to migrate"), "{said}");
    assert_eq!(migrate(&["--no-such-flag"]).status.code(), Some(2));
    let said = refused(&["--store", "postgres://u:s3cret@h/d?sslmode=full"], 78);
    assert!(said.contains("--store: store.url: `sslmode` is ") && !said.contains("s3cret"), "{said}");
}

/// What cannot work says what, where and what to do, and nothing of the password.
#[test]
fn who_cannot_do_it_is_told_what_is_missing() {
    let Some(database) = database() else { return };
    let role = format!("role_{}", database.name);
    database.run(&format!("CREATE ROLE {role} LOGIN"));
    let _dropped = Dropped { admin: database.session(), role: role.clone() };
    let url = database.url.replace("postgres@", &format!("{role}:s3cret@"));
    let place = database.url.split_once('@').unwrap().1.to_owned();
    let said = refused(&["--store", &url], 1);
    for word in [&place, "permission denied for database", "GRANT CREATE ON DATABASE", "--dry-run"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let (server, _) = url.rsplit_once('/').unwrap();
    let said = refused(&["--store", &format!("{server}/no_such_database")], 1);
    assert!(said.contains("database \"no_such_database\" does not exist") && said.contains("create it"), "{said}");
    let away = Upstream::free_address();
    let said = refused(&["--store", &at(&url, away), "--dry-run"], 1);
    assert!(said.contains(&format!("{away}/")) && said.contains("cannot be used at this moment"), "{said}");
    assert!(said.contains("hint: see that the server runs"), "{said}");
    let said = refused(&["--store", &format!("{url}?sslmode=require")], 1);
    assert!(said.contains("server does not support TLS") && said.contains("sslmode"), "{said}");
    for args in [&["--store", &url][..], &["--store", &url, "--dry-run"]] {
        let output = migrate(args);
        assert!(!(text(&output.stdout) + &text(&output.stderr)).contains("s3cret"));
    }
    // What it lacked is what it was told.
    database.run(&format!("GRANT CREATE ON DATABASE {} TO {role}", database.name));
    done(&["--store", &url]);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = gate(&upstream, &url).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert!(!gate.log().contains("s3cret"), "{}", gate.log());
    gate.stop();
}

/// A gate may run as another role than the one that migrates.
#[test]
fn a_gate_needs_what_the_documentation_grants() {
    let Some(database) = database() else { return };
    done(&["--store", &database.url]);
    let role = format!("role_{}", database.name);
    database.run(&format!("CREATE ROLE {role} LOGIN"));
    let _dropped = Dropped { admin: database.session(), role: role.clone() };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = gate(&upstream, &database.url.replace("postgres@", &format!("{role}@")));
    let said = refusal(&plan);
    assert!(said.contains("permission denied") && said.contains("documentation"), "{said}");
    let page = std::fs::read_to_string("docs/operate/postgresql.md").unwrap();
    let grants: Vec<&str> = page.lines().filter(|line| line.ends_with("SCHEMA oncegate TO gate;")).collect();
    assert_eq!(grants.len(), 2, "{grants:?}");
    database.run(&grants.join("\n").replace("TO gate;", &format!("TO {role};")));
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(gate.states("k-1"), ["completed"]);
    gate.stop();
}

/// Takes a role and all that it owns away.
struct Dropped {
    admin: Session,
    role: String,
}

impl Drop for Dropped {
    fn drop(&mut self) {
        drop(self.admin.try_run(&format!("DROP OWNED BY {0} CASCADE; DROP ROLE {0}", self.role)));
    }
}

#[test]
fn serve_says_what_to_do_about_the_schema() {
    let Some(database) = database() else { return };
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = gate(&upstream, &database.url);
    let place = database.url.split_once('@').unwrap().1;
    let said = refusal(&plan);
    assert!(
        said.contains("no schema `oncegate`") && said.contains("oncegate migrate") && said.contains(place),
        "{said}"
    );
    assert_eq!(database.value(SCHEMAS), "0", "it migrates only when it is told to");
    done(&["--store", &database.url]);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    gate.stop();
    let kept = database.run("DELETE FROM oncegate.migration RETURNING version, compatible_with");
    let said = refusal(&plan);
    assert!(said.contains("at version 0") && said.contains("oncegate migrate"), "{said}");
    for row in kept {
        let [version, compatible_with] = &row[..] else { panic!("{row:?}") };
        let (version, compatible_with) = (version.as_deref().unwrap(), compatible_with.as_deref().unwrap());
        database.run(&format!(
            "INSERT INTO oncegate.migration (version, compatible_with) VALUES ({version}, {compatible_with})"
        ));
    }
    // One step more, which older gates can live with; and one that they cannot.
    database.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (98, 1)");
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    gate.stop();
    database.run("INSERT INTO oncegate.migration (version, compatible_with) VALUES (99, 99)");
    let said = refusal(&plan);
    assert!(said.contains("at version 99") && said.contains("run a later oncegate"), "{said}");
    for args in [&["--store", &database.url][..], &["--store", &database.url, "--dry-run"]] {
        let said = refused(args, 1);
        assert!(said.contains("run a later oncegate"), "{said}");
    }
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn serve_waits_for_a_database_that_is_away() {
    let Some(postgres) = Postgres::start() else { return };
    let database = postgres.database();
    done(&["--store", &database.url]);
    postgres.stop_fast();
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = gate(&upstream, &database.url);
    let process = plan.spawn();
    let admin = waits(&process);
    assert!(!process.log().contains("\"listening\""), "{}", process.log());
    postgres.start_again();
    let address = process.address("listening").expect("it goes on by itself");
    eventually("ready", || (Request::get("/readyz").send(admin).status == 200).then_some(()));
    let send = || Request::post("/charges").key("k-1").body("{}").send(address);
    send().expect(200, "executed");
    send().expect(200, "replayed");
    let opened = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        (line["message"] == "serving").then_some(line)
    };
    let line = process.wait_for_log(opened).expect("it says what it found");
    let store = line["store"].as_str().expect("a store");
    assert!(store.contains(&format!("database {}, reached directly", database.name)), "{line}");
    let version = store.strip_prefix("PostgreSQL ").and_then(|rest| rest.split(' ').next()).expect("a version");
    assert!(version.starts_with(|char: char| char.is_ascii_digit()), "{line}");
    assert!(line["risks"].as_str().is_some_and(|risks| risks.contains("fsync is off")), "{line}");
    assert!(process.log().contains("fsync is off"), "the tests' server does not sync, which is not durable");
    drop(process);

    // Told to stop, it does not wait.
    postgres.stop_fast();
    let mut process = plan.spawn();
    waits(&process);
    process.signal(rustix::process::Signal::TERM);
    let status = process.wait();
    assert!(status.success(), "{status}\n{}", process.log());
    let reminders = process.log().matches("waiting for the database").count();
    assert_eq!(reminders, 1, "once now, and again when ten seconds have passed");
}

/// The version before the rules of keys were described.
#[test]
fn a_schema_of_the_former_version_keeps_its_records() {
    let Some(database) = database() else { return };
    let script = done(&["--store", &database.url, "--dry-run"]);
    let heading = script.lines().find(|line| line.ends_with(" rules")).expect("a heading for each step");
    let version: u32 = heading.trim_start_matches("-- ").trim_end_matches(" rules").parse().expect("a number");
    done(&["--store", &database.url]);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = gate(&upstream, &database.url);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    database.run(&format!(
        "DROP TABLE oncegate.rules_period, oncegate.audit, oncegate.delivery, oncegate.paused, oncegate.layout, oncegate.owned,
            oncegate.handover, oncegate.outgoing_record, oncegate.outgoing_delivery;
         DROP FUNCTION oncegate.expire_leases_v2, oncegate.reseal_v1, oncegate.append_entry_v1, oncegate.amend_entry_v1,
            oncegate.sweep_entries_v1, oncegate.accept_v1, oncegate.take_due_v1, oncegate.take_due_v2, oncegate.take_due_v3,
            oncegate.change_delivery_v1, oncegate.change_delivery_v2, oncegate.requeue_delivery_v1, oncegate.discard_delivery_v1, oncegate.pause_v1, oncegate.sweep_deliveries_v1,
            oncegate.finish_deliveries_v1, oncegate.reseal_delivery_v1,
            oncegate.fence_lock_v1, oncegate.refuse_foreign_v1, oncegate.fence_v1, oncegate.fence_row_v1, oncegate.place_v1,
            oncegate.place_entry_v1, oncegate.place_delivery_v1, oncegate.join_v1, oncegate.give_up_v1, oncegate.set_aside_v1,
            oncegate.take_over_v1, oncegate.take_back_v1, oncegate.owns_v1;
         DELETE FROM oncegate.migration WHERE version >= {version}"
    ));
    let said = refusal(&plan);
    assert!(said.contains(&format!("at version {}", version - 1)) && said.contains("oncegate migrate"), "{said}");
    let said = done(&["--store", &database.url]);
    assert!(said.starts_with(&format!("schema oncegate: applied {version} rules")), "{said}");
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(gate.records("")[0].get("orphaned"), None);
    gate.stop();
    assert_eq!(database.value("SELECT count(*) FROM oncegate.rules_period WHERE since = 0"), "1");
    assert_eq!(upstream.runs(), 1);
}

/// Where a gate's admin listener is that says that it waits for its store.
#[track_caller]
pub fn waits(process: &Process) -> std::net::SocketAddr {
    let admin = process.address("admin listening").expect("it says where it is");
    eventually("waiting", || {
        let response = Request::get("/readyz").send(admin);
        (response.status == 503 && response.text().contains("waiting-for-store")).then_some(())
    });
    assert_eq!(Request::get("/livez").send(admin).status, 200);
    admin
}

/// A server that takes connections and says nothing is no reason to hang.
#[test]
fn a_database_that_hangs_is_away_too() {
    let Some(database) = database() else { return };
    done(&["--store", &database.url]);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let address = Session::open(&database.url).value("SELECT host(inet_server_addr()) || ':' || inet_server_port()");
    let proxy = Proxy::before(address.parse().unwrap());
    proxy.stall_all();
    let url = proxy.url(&database.url);
    let migrating = std::thread::spawn({
        let url = url.clone();
        move || refused(&["--store", &url], 1)
    });
    let mut process = gate(&upstream, &url).spawn();
    waits(&process);
    process.signal(rustix::process::Signal::TERM);
    assert!(process.wait().success(), "{}", process.log());
    let said = migrating.join().unwrap();
    assert!(said.contains("did not answer in time"), "{said}");
}

/// What another gate has removed is not replayed from memory, not even for a moment.
#[test]
fn nothing_is_remembered_of_a_shared_store_where_nothing_may_be_old() {
    let Some(database) = database() else { return };
    done(&["--store", &database.url]);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let start = || gate(&upstream, &database.url).store("cache_max_age = \"0s\"").start();
    let (one, other) = (start(), start());
    // The host is part of whom a key belongs to, and each gate has another address.
    let send = |gate: &Gate| Request::post("/charges").header("Host", "shop.example").key("k-1").body("{}").send(gate);
    send(&one).expect(200, "executed");
    for gate in [&one, &other, &one] {
        send(gate).expect(200, "replayed");
    }
    let [record] = &other.records("key=k-1")[..] else { panic!("one record") };
    let id = record["id"].as_str().expect("an id");
    assert!(other.admin("DELETE", &format!("/api/v1/records/{id}"), None).status < 300);
    send(&one).expect(200, "executed");
    assert_eq!(upstream.runs(), 2);
    one.stop();
    other.stop();
}

#[test]
fn a_pooler_is_no_obstacle() {
    let Some(database) = database() else { return };
    let Some(url) = database.pooled_url() else { return };
    assert!(done(&["--store", &url]).contains(": applied 1 records"));
    assert!(done(&["--store", &url]).contains(": nothing to do"));
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = gate(&upstream, &url).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert!(gate.log().contains("reached through a pooler"), "{}", gate.log());
    gate.stop();
}

/// Each statement has a session of its own there, and the gate needs transactions.
#[test]
fn a_pooler_of_statements_is_refused_with_a_word() {
    let Some(database) = database() else { return };
    let Some(pooler) = PgBouncer::with(database.address(), &[("pool_mode", "statement")]) else { return };
    assert!(done(&["--store", &database.url]).contains(": applied 1 records"));
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let mut refused = gate(&upstream, &pooler.url(&database.url)).spawn();
    let status = refused.wait();
    assert!(!status.success() && refused.log().contains("set pool_mode = transaction"), "{}", refused.log());
}

#[test]
fn the_first_host_that_takes_writes_is_taken() {
    let Some(database) = database() else { return };
    let (_, place) = database.url.split_once('@').unwrap();
    let (away, several) = (Upstream::free_address(), |first: &str| format!("postgres://postgres@{first},{place}"));
    assert!(done(&["--store", &several(&away.to_string())]).contains(": applied 1 records"));
    // A standby says the same of itself.
    database.run(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", database.name));
    let said = refused(&["--store", &several(&away.to_string())], 1);
    assert!(said.contains("database does not allow writes"), "{said}");
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let process = gate(&upstream, &several(&away.to_string())).spawn();
    waits(&process);
    let server = Session::open(&database.url);
    server.run("SET default_transaction_read_only = off");
    server.run(&format!("ALTER DATABASE {} RESET default_transaction_read_only", database.name));
    let address = process.address("listening").expect("it goes on by itself");
    Request::post("/charges").key("k-1").body("{}").send(address).expect(200, "executed");
}
