//! Changing the rules of keys without losing keys: what a start refuses, what it says to do, and that doing so works.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Output};

use crate::servers::Session;
use crate::support::store::kind;
use crate::support::{Gate, Plan, Reply, Request, Response, Upstream};

const CHARGE: &str = "[[routes]]\nname = \"create-charge\"\nmethods = [\"POST\"]\npath = \"/charges\"\n";
const REFUND: &str = "[[routes]]\nname = \"refund\"\nmethods = [\"POST\"]\npath = \"/refunds\"\n";

/// The default of versions that kept no descriptions of rules.
const FORMER_SCOPE: &str = "scope = [\"host\", \"header:Authorization\", \"header:X-Api-Key\"]";

/// `oncegate check --store` on the store of a plan.
fn check(plan: &Plan) -> Output {
    check_store(plan, &plan.url_of_store())
}

fn check_store(plan: &Plan, url: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["check", "--store", url, "--config"]).arg(plan.config()).env_remove("PGPASSWORD");
    command.output().expect("the binary starts")
}

#[track_caller]
pub(crate) fn checked(plan: &Plan, status: i32) -> String {
    let output = check(plan);
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert_eq!(output.status.code(), Some(status), "{text}");
    text
}

/// What a start says that is refused.
#[track_caller]
fn refusal(plan: &Plan) -> String {
    let mut process = plan.clone().env("ONCEGATE_LOG__FORMAT", "text").spawn();
    let status = process.wait();
    assert_eq!(status.code(), Some(1), "{}", process.log());
    process.log()
}

fn send(gate: &Gate, path: &str, key: &str) -> Response {
    let request = Request::post(path).header("Host", "shop.example").header("Authorization", "Bearer a");
    request.header("X-Api-Key", "b").key(key).body("{}").send(gate)
}

/// The first line of a text that begins like this, white space aside.
#[track_caller]
fn line<'a>(text: &'a str, begin: &str) -> &'a str {
    let found = text.lines().map(str::trim).find(|line| line.starts_with(begin));
    found.unwrap_or_else(|| panic!("no line begins with {begin}: {text}"))
}

/// Makes the store one that a version wrote which kept no descriptions of rules.
fn forget_descriptions(plan: &Plan) {
    let url = plan.url_of_store();
    match kind().as_str() {
        "sqlite" => {
            let conn = rusqlite::Connection::open(plan.path("gate.db")).unwrap();
            let later =
                "DROP TABLE rules_period; DROP TABLE audit; DROP TABLE delivery; DROP TABLE paused; DROP TABLE piece";
            conn.execute_batch(&format!("{later}; PRAGMA user_version = 1")).unwrap();
        }
        "redis" => {
            let mut server = TcpStream::connect(url.strip_prefix("redis://").unwrap().trim_end_matches('/')).unwrap();
            server.write_all(b"DEL oncegate{identities}:periods\r\n").unwrap();
            let mut said = [0; 4];
            server.read_exact(&mut said).unwrap();
            assert_eq!(&said, b":1\r\n");
        }
        _ => drop(Session::open(&url).run("DELETE FROM oncegate.rules_period")),
    }
}

#[test]
fn the_first_routes_find_the_keys_of_the_gate_that_had_none() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).routes("");
    let gate = plan.start();
    send(&gate, "/charges", "k-1").expect(200, "executed");
    send(&gate, "/charges", "k-2").expect(200, "executed");
    let routes = plan.clone().routes(&[CHARGE, REFUND].concat());
    // While the gate serves.
    let said = checked(&routes, 78);
    assert_eq!(checked(&plan, 0).matches(": ok, a start").count(), 1);
    send(&gate, "/refunds", "k-3").expect(200, "executed");
    gate.stop();
    let log = refusal(&routes);
    for text in [&said, &log] {
        line(text, "the namespace `default` is gone: this configuration has `create-charge`, `refund` instead");
        line(text, "3. Forget the keys: start once with --accept-identity-change.");
    }
    assert!(said.contains("would forget 2 live keys") && said.contains("2 live keys: 2 of route `default`"), "{said}");
    assert!(log.contains("would forget 3 live keys") && log.contains("3 live keys: 3 of route `default`"), "{log}");
    let advice = line(&log, "namespace = ");
    let named = [CHARGE, REFUND].map(|route| format!("{route}{advice}\n")).concat();
    let named = plan.clone().routes(&named);
    checked(&named, 0);
    let gate = named.start();
    send(&gate, "/charges", "k-1").expect(200, "replayed");
    send(&gate, "/refunds", "k-3").expect(200, "replayed");
    send(&gate, "/charges", "k-4").expect(200, "executed");
    assert_eq!(gate.records("").iter().filter(|record| record.get("orphaned").is_some()).count(), 0);
    assert_eq!(upstream.runs(), 4);
}

#[test]
fn the_default_scope_of_an_earlier_version_can_be_kept() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).defaults(FORMER_SCOPE);
    let gate = plan.start();
    send(&gate, "/charges", "k-1").expect(200, "executed");
    gate.stop();
    forget_descriptions(&plan);
    let upgraded = plan.clone().defaults("scope = [\"host\"]");
    let said = checked(&upgraded, 78);
    let log = refusal(&upgraded);
    for text in [&said, &log] {
        let was = "scope: was [\"host\", \"header:authorization\", \"header:x-api-key\"], is now [\"host\"]";
        assert!(text.contains(was), "{text}");
        let advice = line(text, "scope = ");
        assert_eq!(advice, "scope = [\"host\", \"header:Authorization?\", \"header:X-Api-Key?\"]");
    }
    // The requests have all parts, so that it does not matter here whether they must.
    let gate = plan.clone().defaults(line(&log, "scope = ")).start();
    send(&gate, "/charges", "k-1").expect(200, "replayed");
    gate.stop();
    // From then on the rules are described.
    let log = refusal(&upgraded);
    assert_eq!(line(&log, "scope = "), "scope = [\"host\", \"header:Authorization\", \"header:X-Api-Key\"]");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn keys_that_are_forgotten_are_counted_and_their_records_marked() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).defaults("scope = [\"host\"]");
    let gate = plan.start();
    send(&gate, "/charges", "k-1").expect(200, "executed");
    send(&gate, "/charges", "k-2").expect(200, "executed");
    gate.stop();
    let changed = plan.clone().defaults("scope = [\"header:Authorization\"]");
    let gate = changed.clone().arg("--accept-identity-change").start();
    let log = gate.log();
    let told: Vec<serde_json::Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of_route = told.iter().find(|line| line["route"] == "all" && line["keys"] == 2).expect("a count");
    assert_eq!((&of_route["level"], &of_route["namespace"]), (&"WARN".into(), &"all".into()), "{log}");
    send(&gate, "/charges", "k-1").expect(200, "executed");
    let marks = |key: &str| -> Vec<bool> {
        let records = gate.records(&format!("key={key}"));
        let mut marks: Vec<bool> = records.iter().map(|record| record["orphaned"] == true).collect();
        marks.sort_unstable();
        marks
    };
    assert_eq!((marks("k-1"), marks("k-2")), (vec![false, true], vec![true]));
    let mut list = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let listed = list.args(["records", "list", "--admin", &gate.admin.to_string()]).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert_eq!(listed.matches("completed (orphaned)").count(), 2, "{listed}");
    gate.stop();
    // The former rules find their keys again.
    let gate = plan.arg("--accept-identity-change").start();
    send(&gate, "/charges", "k-2").expect(200, "replayed");
    assert_eq!(gate.records("").iter().filter(|record| record["orphaned"] == true).count(), 1);
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn requests_that_no_route_takes_any_more_keep_their_keys() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).routes("");
    let gate = plan.start();
    send(&gate, "/charges", "k-1").expect(200, "executed");
    send(&gate, "/refunds", "k-2").expect(200, "executed");
    send(&gate, "/refunds", "k-3").expect(200, "executed");
    let named = [CHARGE, "namespace = \"default\"\n"].concat();
    let charges = plan.clone().routes(&named);
    let said = checked(&charges, 78);
    gate.stop();
    let log = refusal(&charges);
    for text in [&said, &log] {
        line(text, "2 live keys: no route takes POST /refunds");
        line(text, "3. Forget the keys: start once with --accept-identity-change.");
    }
    // A route with another namespace takes them away as well.
    let log_of_other = refusal(&plan.clone().routes(&[&*named, REFUND].concat()));
    line(&log_of_other, "2 live keys: the route `refund` (");
    // The block that is printed stands for itself.
    let block = log.lines().skip_while(|line| line.trim() != "[[routes]]");
    let block: String =
        block.take_while(|line| line.starts_with("         ")).map(|line| format!("{line}\n")).collect();
    let whole = plan.clone().routes(&format!("{named}{block}"));
    checked(&whole, 0);
    let gate = whole.start();
    send(&gate, "/charges", "k-1").expect(200, "replayed");
    send(&gate, "/refunds", "k-2").expect(200, "replayed");
    gate.stop();
    let gate = charges.clone().arg("--accept-identity-change").start();
    let log = gate.log();
    let mut told = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let forgotten = told.find(|line| line["namespace"] == "default" && line["keys"] == 2).expect("a count");
    assert_eq!((&forgotten["level"], &forgotten["examples"]), (&"WARN".into(), &"POST /refunds".into()), "{log}");
    gate.stop();
    // What was forgotten stands in no one's way.
    checked(&charges, 0);
    charges.start().stop();
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn a_start_that_cannot_listen_changes_no_rules() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).defaults("scope = [\"host\"]");
    let gate = plan.start();
    send(&gate, "/charges", "k-1").expect(200, "executed");
    gate.stop();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("listen = \"{}\"", taken.local_addr().unwrap());
    let changed = plan.clone().defaults("scope = [\"header:Authorization\"]").server(&listen);
    let log = refusal(&changed.arg("--accept-identity-change"));
    assert!(log.contains("cannot listen on") && !log.contains("forgotten"), "{log}");
    send(&plan.start(), "/charges", "k-1").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn check_says_what_it_cannot_ask() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).store_url("memory:");
    let asked = |url: &str| {
        let output = check_store(&plan, url);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.code(), text)
    };
    let missing = plan.path("missing.db");
    let (status, text) = asked(&format!("sqlite:{}", missing.display()));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("there is no store yet") && !missing.exists(), "{text}");
    let elsewhere = plan.path("not").join("there.db");
    let (status, text) = asked(&format!("sqlite:{}", elsewhere.display()));
    assert!(status == Some(1) && text.contains("its directory does not exist"), "{text}");
    let (status, text) = asked("memory:");
    assert!(status == Some(0) && text.contains("nothing to ask"), "{text}");
    let diary = plan.path("diary.txt");
    std::fs::write(&diary, "This is somebody's diary.\n".repeat(100)).unwrap();
    let (status, text) = asked(&format!("sqlite:{}", diary.display()));
    assert!(status == Some(1) && text.contains("diary.txt is not a SQLite database"), "{text}");
    let away = Upstream::free_address();
    let (status, text) = asked(&format!("redis://{away}"));
    assert!(status == Some(1) && text.contains(&away.to_string()), "{text}");
    let (status, text) = asked("nonsense:");
    assert!(status == Some(78) && text.contains("--store"), "{text}");
}
