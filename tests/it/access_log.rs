//! The access log: each request has one line, whatever becomes of it, and no line is lost or torn.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::support::http2::Http2;
use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually, store};

/// A gate that logs requests to a file of its plan.
fn plan(upstream: &Upstream) -> Plan {
    let plan = Gate::before(upstream);
    let path = plan.path("access.log");
    plan.top(&format!("[access_log]\npath = {path:?}\n"))
}

/// The whole lines of the log: the gate may be in the middle of writing the last one.
fn lines_of(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let text = text.rfind('\n').map_or("", |end| &text[..end]);
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(line).collect()
}

/// The last line, once there are so many.
#[track_caller]
fn last_of(gate: &Gate, count: usize) -> Value {
    let path = gate.plan.path("access.log");
    let lines = eventually("a line", || Some(lines_of(&path)).filter(|lines| lines.len() >= count));
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines[count - 1].clone()
}

fn text<'a>(line: &'a Value, name: &str) -> &'a str {
    line[name].as_str().unwrap_or_else(|| panic!("no {name}: {line:#}"))
}

#[test]
fn each_outcome_has_its_line() {
    let upstream = Upstream::start(|request| match request.start_line() {
        line if line.contains("/broken") => Reply::nothing().close(),
        line if line.contains("/released") => Reply::status("500 No", "no"),
        _ => Reply::ok("answer"),
    });
    let gate = plan(&upstream).defaults("key = { max_length = 64 }").start();
    let request = |path: &str, key: &str| {
        Request::post(path)
            .key(key)
            .header("User-Agent", "a \"quoted\" agent")
            .header("Referer", "/from?token=hush")
            .body("{}")
    };
    let mut count = 0;
    let mut line = |outcome: &str, status: u16| {
        count += 1;
        let line = last_of(&gate, count);
        assert_eq!((text(&line, "outcome"), &line["status"]), (outcome, &status.into()), "{line:#}");
        line
    };

    let executed = request("/charges?api_key=hush", "order-number-1").send(&gate);
    executed.expect(200, "executed");
    let first = line("executed", 200);
    let id = gate.records("key=order-number-1")[0]["id"].as_str().unwrap().to_owned();
    for (name, value) in [
        ("client", "127.0.0.1"),
        ("method", "POST"),
        ("path", "/charges"),
        ("host", "gate.test"),
        ("protocol", "HTTP/1.1"),
        ("route", "all"),
        ("upstream", "app"),
        ("record", &id),
        ("user_agent", "a \"quoted\" agent"),
        ("referer", "/from"),
    ] {
        if name == "host" {
            assert!(!text(&first, name).is_empty());
        } else {
            assert_eq!(text(&first, name), value, "{first:#}");
        }
    }
    assert_eq!((&first["bytes"], &first["attempts"]), (&6.into(), &1.into()));
    assert!(first["upstream_micros"].as_u64() <= first["micros"].as_u64() && first["store_micros"].as_u64() > Some(0));
    assert!(text(&first, "key").contains('…') && text(&first, "attempt") >= text(&first, "time"), "{first:#}");

    request("/charges?api_key=hush", "order-number-1").send(&gate).expect(200, "replayed");
    let replayed = line("replayed", 200);
    assert_eq!(
        (text(&replayed, "record"), &replayed["attempt"], &replayed["upstream"]),
        (&*id, &Value::Null, &Value::Null)
    );
    assert_ne!(replayed["request"], first["request"]);
    request("/charges", "order-number-1").body("[]").send(&gate).expect_problem(422, "key-reused");
    line("key-reused", 422);
    request("/released", "order-number-2").send(&gate).expect(500, "released");
    line("released", 500);
    request("/broken", "order-number-3").send(&gate).expect_problem(502, "upstream-broken");
    line("upstream-broken", 502);
    request("/broken", "order-number-3").send(&gate).expect_problem(409, "outcome-unknown");
    line("outcome-unknown", 409);
    request("/charges", &"k".repeat(65)).send(&gate).expect_problem(400, "key-invalid");
    let invalid = line("key-invalid", 400);
    assert!(invalid["key"].is_null() && invalid["record"].is_null());
    assert_eq!(Request::get("/passed").send(&gate).status, 200);
    let passed = line("passed", 200);
    assert_eq!((text(&passed, "route"), text(&passed, "upstream"), &passed["bytes"]), ("-", "app", &6.into()));
    assert_eq!(Request::new("HEAD", "/passed").send(&gate).status, 200);
    assert_eq!(line("passed", 200)["bytes"], 0);
    assert_eq!(Request::get("/passed").key("k").send(&gate).status, 200);
    line("ignored", 200);
    // Refused before it is a request.
    assert_eq!(Client::connect(gate.address).send("GET /a?b HTTP/1.1\r\nbad header: x\r\n\r\n").response().status, 400);
    let refused = line("bad-request", 400);
    assert_eq!(
        (text(&refused, "method"), text(&refused, "path"), text(&refused, "protocol")),
        ("GET", "/a", "HTTP/1.1")
    );
    assert_eq!(Client::connect(gate.address).send("nonsense\r\n\r\n").response().status, 400);
    assert!(line("bad-request", 400)["path"].is_null());
    let sum = gate.metric("oncegate_requests_total", &[]);
    assert_eq!((sum, gate.metric("oncegate_access_log_lost_total", &[])), (12.0, 0.0));
    let written = std::fs::read_to_string(gate.plan.path("access.log")).unwrap();
    for secret in ["hush", "order-number", "token"] {
        assert!(!written.contains(secret), "{secret}");
    }
}

#[test]
fn http_2_and_a_client_that_leaves_have_lines_too() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.start_line() {
        line if line.contains("/slow") => Reply::ok("late").hold_until(&held),
        _ => Reply::ok("answer"),
    });
    let gate = plan(&upstream).start();
    let mut client = Http2::connect(gate.address);
    client.post("/charges", "k-1", "{}").expect(200, "executed");
    let line = last_of(&gate, 1);
    assert_eq!((text(&line, "protocol"), text(&line, "outcome"), &line["bytes"]), ("HTTP/2.0", "executed", &6.into()));
    let mut left = Client::connect(gate.address);
    left.send(Request::post("/slow").key("k-2").body("{}").bytes());
    upstream.wait_for_runs(2);
    drop(left);
    let line = last_of(&gate, 2);
    assert!(line["status"].is_null() && line["outcome"].is_null(), "{line:#}");
    assert_eq!((text(&line, "path"), text(&line, "upstream")), ("/slow", "app"));
    assert_eq!(text(&line, "route"), "all", "{line:#}");
    signal.open();
}

#[test]
fn a_scope_that_is_a_header_is_not_written() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = plan(&upstream).defaults("scope = [\"header:User-Agent\"]").start();
    Request::post("/a").key("k").header("User-Agent", "tenant-1").body("{}").send(&gate).expect(200, "executed");
    let line = last_of(&gate, 1);
    assert!(line["user_agent"].is_null() && !line.to_string().contains("tenant-1"), "{line:#}");
}

#[test]
fn the_combined_format_is_that_of_apache() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let plan = Gate::before(&upstream);
    let path = plan.path("access.log");
    let gate = plan.top(&format!("[access_log]\npath = {path:?}\nformat = \"combined\"\n")).start();
    let forged = "x\" 200 1 \"-\" \"y";
    Request::post("/a?b=c").key("k").header("User-Agent", forged).body("{}").send(&gate).expect(200, "executed");
    let line = eventually("a line", || std::fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n')));
    let (begin, rest) = line.split_once(" - - [").unwrap();
    assert_eq!(begin, "127.0.0.1");
    let rest = rest.split_once("] ").unwrap().1;
    assert_eq!(rest, "\"POST /a HTTP/1.1\" 200 6 \"-\" \"x\\\" 200 1 \\\"-\\\" \\\"y\"\n");
}

/// `logrotate`: the file is renamed, and the process is told.
#[test]
fn a_rotation_under_load_loses_and_tears_nothing() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = plan(&upstream).start();
    let (path, stop) = (gate.plan.path("access.log"), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let (stop, address) = (Arc::clone(&stop), gate.address);
            thread::spawn(move || {
                let mut sent = 0;
                let mut connection = Client::connect(address);
                while !stop.load(Ordering::Relaxed) {
                    let request = Request::post("/a").key(&format!("k-{client}-{sent}")).body("{}");
                    assert_eq!(connection.send(request.bytes()).response().status, 200);
                    sent += 1;
                }
                sent
            })
        })
        .collect();
    let mut files = Vec::new();
    for number in 0..10 {
        let rotated = gate.plan.path(&format!("access.log.{number}"));
        std::fs::rename(&path, &rotated).unwrap();
        files.push(rotated);
        gate.sighup();
        eventually("the file is made anew", || path.exists().then_some(()));
        thread::sleep(Duration::from_millis(50));
    }
    stop.store(true, Ordering::Relaxed);
    let sent: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
    let plan = gate.stop();
    files.push(plan.path("access.log"));
    let lines: Vec<Value> = files.iter().flat_map(|file| lines_of(file)).collect();
    let requests: BTreeSet<&str> = lines.iter().map(|line| text(line, "request")).collect();
    assert_eq!((lines.len(), requests.len()), (sent, sent));
    assert!(files.iter().filter(|file| !lines_of(file).is_empty()).count() > 3, "the load went on meanwhile");
}

#[test]
fn a_refused_reload_opens_the_file_anew_all_the_same() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = plan(&upstream).start();
    gate.post("/a", "k-1", "{}").expect(200, "executed");
    last_of(&gate, 1);
    let (path, config) = (gate.plan.path("access.log"), gate.plan.path("oncegate.toml"));
    std::fs::rename(&path, gate.plan.path("access.log.1")).unwrap();
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("[log]", "[log]\nlevle = \"info\"")).unwrap();
    gate.sighup();
    // The file is there a moment before the lines go to it.
    let mut sent = 1;
    eventually("a line in the new file", || {
        sent += 1;
        gate.post("/a", &format!("k-{sent}"), "{}").expect(200, "executed");
        (!lines_of(&path).is_empty()).then_some(())
    });
    let plan = gate.stop();
    let lines = [plan.path("access.log.1"), plan.path("access.log")].map(|file| lines_of(&file).len());
    assert_eq!(lines.iter().sum::<usize>(), sent, "{lines:?}");
}

#[test]
fn a_reload_changes_the_file_and_one_that_cannot_be_opened_is_refused() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = plan(&upstream).start();
    let (config, other) = (gate.plan.path("oncegate.toml"), gate.plan.path("other.log"));
    let text = std::fs::read_to_string(&config).unwrap();
    let reload_with = |to: &Path| {
        let path = gate.plan.path("access.log");
        std::fs::write(&config, text.replace(&format!("{path:?}"), &format!("{to:?}"))).unwrap();
        gate.admin("POST", "/api/v1/reload", Some(&serde_json::json!({})))
    };
    let refused = reload_with(Path::new("/nowhere/access.log"));
    assert_ne!(refused.status, 200, "{}", refused.show());
    assert!(refused.text().contains("access_log.path: cannot open /nowhere/access.log"), "{}", refused.show());
    gate.post("/a", "k-1", "{}").expect(200, "executed");
    last_of(&gate, 1);
    assert_eq!(reload_with(&other).status, 200);
    gate.post("/a", "k-2", "{}").expect(200, "executed");
    eventually("a line", || (lines_of(&other).len() == 1).then_some(()));
    last_of(&gate, 1);
    // And away with it.
    let without = text.split("[access_log]").next().unwrap().to_owned() + &text[text.find("[server]").unwrap()..];
    std::fs::write(&config, without).unwrap();
    assert_eq!(gate.admin("POST", "/api/v1/reload", Some(&serde_json::json!({}))).status, 200);
    gate.post("/a", "k-3", "{}").expect(200, "executed");
    let _plan = gate.stop();
    assert_eq!(lines_of(&other).len(), 1);
}

#[test]
fn a_full_disk_refuses_no_request() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = Gate::before(&upstream).top("[access_log]\npath = \"/dev/full\"\n").start();
    for number in 0..20 {
        gate.post("/a", &format!("k-{number}"), "{}").expect(200, "executed");
    }
    let says = "the access log cannot be written";
    eventually("it is said", || gate.log().contains(says).then_some(()));
    gate.sigterm();
    let mut gate = gate;
    assert!(gate.wait().success());
    let log = gate.log();
    assert_eq!(log.matches(says).count(), 1, "{log}");
    assert!(log.contains("\"lines\":20") && log.contains("lines of the access log are lost"), "{log}");
}

#[test]
fn a_file_that_cannot_be_opened_is_an_error_of_the_configuration() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let mut process = Gate::before(&upstream).top("[access_log]\npath = \"/nowhere/access.log\"\n").spawn();
    let status = process.wait();
    assert_eq!(status.code(), Some(78), "{}", process.log());
    assert!(process.log().contains("access_log.path: cannot open /nowhere/access.log"), "{}", process.log());
}

/// `ulimit -f`, or `LimitFSIZE=` of systemd: the signal that comes with it would end the process. Standard error is a file here, as
/// with `2> gate.log`.
#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let gate = plan(&upstream).start();
    let pid = Pid::from_raw(gate.pid().try_into().expect("a process id"));
    let limit = Rlimit { current: Some(2048), maximum: Some(2048) };
    prlimit(pid, Resource::Fsize, limit).expect("a process of this test");
    for _ in 0..30 {
        assert_eq!(Request::get("/free").send(&gate).status, 200);
    }
    let path = gate.plan.path("access.log");
    eventually("the limit", || (std::fs::metadata(&path).is_ok_and(|file| file.len() > 1500)).then_some(()));
    // It logs a line.
    gate.sighup();
    assert_eq!(Request::get("/free").send(&gate).status, 200);
    // A file has no room for a record either.
    let status = if store::kind() == "sqlite" { 503 } else { 200 };
    assert_eq!(Request::post("/free").key("k").body("{}").send(&gate).status, status);
}
