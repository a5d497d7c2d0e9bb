//! `oncegate explain`: what it says is what a gate does.

use std::process::{Command, Output};

use crate::support::https::{Certificates, Https};
use crate::support::{Gate, Reply, Request, Upstream};

fn explain(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("explain").args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.output().expect("the binary starts")
}

#[track_caller]
fn explained(args: &[&str]) -> String {
    let output = explain(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What stands behind a label at the start of a line.
fn labelled<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.split("  ").next() == Some(label))?;
    Some(line[label.len()..].trim())
}

/// A request that is sent and explained.
struct Case {
    method: &'static str,
    target: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: Option<&'static str>,
}

fn post(target: &'static str, headers: &'static [(&'static str, &'static str)], body: &'static str) -> Case {
    Case { method: "POST", target, headers, body: Some(body) }
}

impl Case {
    fn request(&self) -> Request {
        let headers = self.headers.iter();
        let request =
            headers.fold(Request::new(self.method, self.target), |request, (name, value)| request.header(name, value));
        match self.body {
            Some(body) => request.body(body),
            None => request,
        }
    }

    fn explain(&self, config: &str) -> String {
        let headers = self.headers.iter().filter(|(name, _)| *name != "Host" || !self.target.contains("://"));
        let mut lines: Vec<String> = headers.map(|(name, value)| format!("{name}: {value}")).collect();
        if !self.headers.iter().any(|(name, _)| *name == "Host") {
            lines.push("Host: gate.test".to_owned());
        }
        if self.body.is_some() && !self.headers.iter().any(|(name, _)| *name == "Content-Type") {
            lines.push("Content-Type:".to_owned());
        }
        let mut args = vec!["--config", config, "--client-ip", "127.0.0.1", "-X", self.method, self.target];
        lines.iter().for_each(|line| args.extend(["-H", line]));
        args.extend(self.body.iter().flat_map(|body| ["-d", body]));
        explained(&args)
    }
}

const ROUTES: &str = r#"
[[routes]]
name = "charges"
methods = ["POST", "PUT"]
path = "/charges"
key = { required = true }
scope = ["host", "header:X-Tenant?", "client-ip", "const:x", "cookie:s?", "basic:user?"]
docs = "https://docs.example/charges"

[[routes]]
name = "events"
path = "/events"
namespace = "shared"
key.from = ["cloudevent", "json:/id", "query:id", "fingerprint"]
scope = ["const:all"]
fingerprint = { of = ["path", "body", "header:X-Version"], exclude = ["/sent_at"] }
max_request_body = "64B"

[[routes]]
name = "named"
host = "named.test"
path = "/charges"
methods = ["POST"]

[[routes]]
name = "tenants"
path = "/tenants"
scope = ["host", "header:X-Tenant", "cookie:s"]
key.from = ["header:Idempotency-Key", "json:/id"]

[[routes]]
name = "search"
path = "/search"
mode = "pass"

[[routes]]
name = "rest"
path = "/rest/{*rest}"
"#;

fn cases() -> Vec<Case> {
    const KEY: (&str, &str) = ("Idempotency-Key", "k-1");
    const JSON: (&str, &str) = ("Content-Type", "application/json");
    vec![
        post("/charges", &[KEY], ""),
        post("/charges?a=b", &[("Idempotency-Key", "\"k-2\""), ("X-Tenant", "a"), ("X-Tenant", "b")], "x"),
        post("/charges", &[KEY, ("Cookie", "a=b; s=1"), ("Authorization", "Basic YW5uOm9uZQ==")], "x"),
        post("/charges", &[("Host", "GATE.test.:80"), ("Idempotency-Key", "k-3")], "x"),
        post("/charges", &[("Host", "named.test"), ("Idempotency-Key", "k-4")], "x"),
        Case { method: "PUT", target: "/charges", headers: &[("Idempotency-Key", "k-5")], body: None },
        post("/charges", &[], "x"),
        post("/charges", &[("Content-Type", "application/grpc")], "x"),
        post("/charges", &[("Idempotency-Key", "a,b")], "x"),
        post("/charges", &[KEY, KEY], "x"),
        post("/charges", &[KEY, ("Connection", "upgrade"), ("Upgrade", "websocket")], ""),
        Case { method: "GET", target: "/charges", headers: &[KEY], body: None },
        post("/events", &[JSON], "{\"id\": 7, \"sent_at\": 1}"),
        post("/events?id=q", &[JSON], "{\"ID\": 7}"),
        post("/events", &[JSON, ("X-Version", "1")], "{\"b\": 1, \"a\": 2}"),
        post("/events", &[JSON], "{\"id\": [], \"a\": 2}"),
        post("/events", &[("ce-id", "1"), ("ce-source", "/shop")], "x"),
        post("/events", &[("ce-id", "1")], "x"),
        post("/events", &[], "0123456789012345678901234567890123456789012345678901234567890123456789"),
        post("/search", &[KEY], "x"),
        post("/rest/a", &[], "x"),
        post("/rest/", &[("Idempotency-Key", "k-6")], "x"),
        post("/rest/", &[("Idempotency-Key", "k-8"), ("Authorization", "Basic YW5uOm9uZQ==")], "x"),
        post("/rest/", &[("Idempotency-Key", "k-8"), ("Authorization", "Bearer e30.eyJzdWIiOiJhbm4ifQ.x")], "x"),
        post("/rest/", &[("Idempotency-Key", "k-8"), ("Cookie", "s=1")], "x"),
        post("/tenants", &[KEY, ("X-Tenant", "a")], "x"),
        post("/tenants", &[KEY, ("X-Tenant", "a"), ("Cookie", "s=")], "x"),
        post("/tenants", &[JSON, ("Cookie", "s=1")], "{\"id\": \"k\"}"),
        post("/tenants", &[JSON], "{\"a\": 1}"),
        post("/tenants", &[JSON, ("Connection", "upgrade"), ("Upgrade", "websocket")], "{\"id\": \"k\"}"),
        post("/none", &[KEY], "x"),
        post("/none", &[], "x"),
        post("/charges", &[("Host", "a"), ("Host", "b"), KEY], "x"),
        post("/charges", &[("Host", "a b"), KEY], "x"),
        post("/x/..//charges", &[KEY], "x"),
        post("/Charges", &[KEY], "x"),
        post("/charges", &[KEY, ("Expect", "200-maybe")], "x"),
        post("/rest/%2e%2e/charges", &[KEY], "x"),
        post("/rest/a//b%2Fc", &[("Idempotency-Key", "k-7")], "x"),
        post("/search//..", &[KEY], "x"),
    ]
}

#[test]
fn what_is_explained_is_what_the_gate_does() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).routes(ROUTES);
    std::fs::write(plan.path("id"), "0123456789abcdef0123456789abcdef").expect("a writable directory");
    let plan = plan.clone().store(&format!("service = \"s\"\nid_secret_file = \"{}\"", plan.path("id").display()));
    let gate = plan.start();
    let config = plan.config().to_string_lossy().into_owned();
    let ids = || -> Vec<String> {
        let records = gate.records("limit=1000");
        records.iter().map(|record| record["id"].as_str().expect("an id").to_owned()).collect()
    };
    let (mut protected, mut refused, mut passed) = (0, 0, 0);
    for case in cases() {
        let before = ids();
        let answer = case.request().send(&gate);
        let text = case.explain(&config);
        let show = format!("{} {:?}\n{text}\n{}", case.target, case.headers, answer.show());
        let new: Vec<String> = ids().into_iter().filter(|id| !before.contains(id)).collect();
        let verdict = labelled(&text, "protected").expect("a verdict");
        if let Some(status) = answer.get("grpc-status") {
            let said = labelled(&text, "answer").and_then(|said| said.strip_prefix("gRPC status INVALID_ARGUMENT "));
            assert_eq!((&*status, said), ("3", answer.get("grpc-message").as_deref()), "{show}");
            assert!(verdict.starts_with("no") && new.is_empty(), "{show}");
            refused += 1;
        } else if answer.status >= 400 {
            let problem = answer.json();
            let said = format!(
                "{} {}: {}",
                answer.status,
                problem["code"].as_str().expect("a code"),
                problem["detail"].as_str().expect("a detail")
            );
            assert_eq!(labelled(&text, "answer"), Some(&*said), "{show}");
            assert!(verdict.starts_with("no") && new.is_empty(), "{show}");
            refused += 1;
        } else if answer.word() == "executed" {
            let [id] = &new[..] else { panic!("one new record: {new:?}\n{show}") };
            assert_eq!(labelled(&text, "record"), Some(&**id), "{show}");
            assert!(verdict.starts_with("yes"), "{show}");
            let route = gate.records("limit=1000").into_iter().find(|record| record["id"] == **id).expect("it");
            let named = labelled(&text, "route").and_then(|route| route.split(':').next());
            assert_eq!(route["route"].as_str(), named, "{show}");
            protected += 1;
        } else {
            let word = if text.contains("its key is ignored") { "ignored" } else { "" };
            assert_eq!((&*answer.word(), new.len(), labelled(&text, "record")), (word, 0, None), "{show}");
            assert!(verdict.starts_with("no"), "{show}");
            passed += 1;
        }
    }
    assert_eq!((protected, refused, passed), (16, 17, 7));
}

/// Two requests have one fingerprint where the gate takes one for a retry of the other.
#[test]
fn a_preflight_is_known_by_what_it_announces() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let routes = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n\
                  cors = { origins = [\"https://shop.example\"], preflight = true }\n";
    let gate = Gate::before(&upstream).routes(routes).start();
    let config = gate.plan.config().to_string_lossy().into_owned();
    let asked = |origin: &str| {
        let origin = format!("Origin: {origin}");
        let method = "Access-Control-Request-Method: POST";
        explained(&["--config", &config, "-X", "OPTIONS", "-H", &origin, "-H", method, "http://gate.example/orders"])
    };
    let allowed = asked("https://shop.example");
    assert_eq!(labelled(&allowed, "preflight").map(|text| text.contains("route orders")), Some(true), "{allowed}");
    assert!(allowed.contains("the upstream of the request it announces"), "{allowed}");
    assert_eq!(labelled(&asked("https://evil.example"), "preflight"), None);
}

#[test]
fn fingerprints_can_be_compared() {
    let config = "config/examples/gateway.toml";
    let of = |body: &str| {
        let text = explained(&[
            "--config",
            config,
            "-H",
            "Idempotency-Key: k",
            "-H",
            "X-Tenant: acme",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
            "http://a.example/v1/charges/1/capture",
        ]);
        labelled(&text, "fingerprint").expect("a fingerprint").to_owned()
    };
    assert_eq!(of("{\"a\":1,\"b\":2,\"sent_at\":3}"), of("{ \"b\": 2, \"a\": 1 }"));
    assert_ne!(of("{\"a\":1}"), of("{\"a\":2}"));
    assert_eq!(of("{\"a\":1}").len(), 64);
}

#[test]
fn secrets_of_the_request_are_told_apart_and_not_shown() {
    let scope = |token: &str| {
        let header = format!("Authorization: Bearer {token}");
        let text = explained(&[
            "--upstream",
            "http://127.0.0.1:1",
            "-H",
            "Idempotency-Key: k",
            "-H",
            &header,
            "-d",
            "x",
            "http://a.example/",
        ]);
        assert!(!text.contains("s3cret"), "{text}");
        let line = text.lines().find(|line| line.contains("credential: ")).expect("the part").trim();
        assert!(line.contains("identity "), "{line}");
        line.to_owned()
    };
    assert_eq!(scope("s3cret-1"), scope("s3cret-1"));
    assert_ne!(scope("s3cret-1"), scope("s3cret-2"));
}

#[test]
fn what_is_not_known_is_said() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).routes(ROUTES);
    let config = plan.config().to_string_lossy().into_owned();
    let text = explained(&["--config", &config, "-H", "Idempotency-Key: k", "-d", "{}", "/charges"]);
    assert!(labelled(&text, "record").is_some_and(|record| record.starts_with("not known")), "{text}");
    assert!(text.contains("host: not known") && text.contains("client-ip: not known"), "{text}");
    assert!(text.contains("nearly named (POST named.test /charges): a client that names this host gets it"), "{text}");
    assert!(text.contains("application/x-www-form-urlencoded: no Content-Type was given"), "{text}");
    assert!(text.contains("the body is JSON, and its Content-Type does not say so"), "{text}");
    for (args, said) in [
        (&["-X", "DELETE", "http://a/charges"][..], "nearly charges (POST|PUT /charges): its method is not DELETE"),
        (&["-X", "POST", "http://a/search/"], "nearly search (POST|PATCH /search): the slash at the end counts"),
        (&["-X", "POST", "http://a/charges/"], "read as \"/charges\", charges (POST|PUT /charges, mode protect)"),
        (&["-X", "POST", "http://a/rest/..%2Fcharges"], "as it stands, rest (POST|PATCH /rest/{*rest}, mode protect)"),
        (&["-X", "POST", "http://named.test/charges"], "also charges (/charges)"),
        (&["-X", "POST", "http://a/search"], "the route's mode is \"pass\""),
        (&["-X", "POST", "http://a/rest/x"], "set key = { required = true }"),
        (&["-X", "POST", "http://a/events"], "max_request_body = \"64B\"   # default: \"16MiB\""),
    ] {
        let text = explained(&[&["--config", &config], args].concat());
        assert!(text.contains(said), "{said}\n{text}");
    }
}

/// The address of a connection is that of a proxy, where it is trusted.
#[test]
fn a_trusted_proxy_speaks_for_its_client() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let trusting = "trusted_proxies = [\"10.0.0.0/8\"]";
    let plan = Gate::before(&upstream).server(trusting).defaults("scope = [\"client-ip\"]");
    let config = plan.config().to_string_lossy().into_owned();
    for (peer, client) in [("10.1.1.1", "203.0.113.9"), ("192.0.2.1", "192.0.2.1")] {
        let headers = ["-H", "Idempotency-Key: k", "-H", "X-Forwarded-For: 6.6.6.6, 203.0.113.9"];
        let args = [&["--config", &config, "--client-ip", peer][..], &headers, &["-d", "{}", "http://a/x"]].concat();
        let text = explained(&args);
        assert!(text.contains(&format!("client-ip: {client}")), "{text}");
    }
}

#[test]
fn a_clients_certificate_says_whom_its_request_counts_for() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("ann", "subjectAltName=DNS:ann");
    certificates.sign("eve", "");
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let scope = "scope = [\"host\", \"client-cert:subject\", \"client-cert:san?\"]";
    let gate = Gate::before(&upstream).server(&certificates.server_of_clients()).defaults(scope).start();
    let config = gate.plan.config().to_string_lossy().into_owned();
    let request = |more: &[&str]| {
        explained(
            &[&["--config", &config, "-H", "Idempotency-Key: k", "-d", "10", "https://gate.test:443/pay"], more]
                .concat(),
        )
    };
    for (name, san) in [("ann", "present, "), ("eve", "absent")] {
        let mut client = Https::connect(gate.address, &certificates.client(&[], Some(name)));
        let pay = "POST /pay HTTP/1.1\r\nHost: gate.test\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n10";
        client.exchange(pay, "made").unwrap();
        let text = request(&["--client-cert", certificates.path(&format!("{name}.pem")).to_str().unwrap()]);
        assert!(text.contains("client-cert:subject: present, "), "{text}");
        assert!(text.contains(&format!("client-cert:san?: {san}")), "{text}");
        let record = labelled(&text, "record").unwrap();
        assert!(gate.records("key=k").iter().any(|known| known["id"] == record), "{text}");
    }
    assert!(
        request(&[]).contains("client-cert:san?: not known: give the client's certificate with --client-cert FILE")
    );
    let output =
        explain(&["--config", &config, "--client-cert", certificates.path("ann.key").to_str().unwrap(), "/pay"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds no certificate in PEM"));
}

#[test]
fn how_it_ends() {
    let upstream = ["--upstream", "http://127.0.0.1:1"];
    for (args, status) in [
        (&["/x"][..], 0),
        (&["-H", "Idempotency-Key: ,", "-d", "", "http://a/"], 0),
        (&[], 2),
        (&["x"], 2),
        (&["-X", "PO ST", "/x"], 2),
        (&["-H", "no colon", "/x"], 2),
        (&["-H", "Host: a", "http://a/x"], 0),
        (&["curl", "-sSi", "-u", "ann:s3cret", "--json", "{}", "http://a/x"], 0),
        (&["-u", "s3cret", "/x"], 2),
        (&["--no-such-flag", "/x"], 2),
        (&["-d", "@no/such/file", "/x"], 1),
    ] {
        let output = explain(&[&upstream[..], args].concat());
        assert_eq!(output.status.code(), Some(status), "{args:?} {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.stdout.is_empty(), status != 0, "{args:?}");
        let said = [output.stdout, output.stderr].concat();
        assert!(!String::from_utf8_lossy(&said).contains("s3cret"), "{args:?}");
    }
    assert_eq!(explain(&["/x"]).status.code(), Some(78), "no upstream");
}

#[test]
fn a_key_that_does_nothing_is_pointed_out() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let routes = "[[routes]]\nname = \"hooks\"\nmethods = [\"POST\"]\npath = \"/hooks\"\nkey.from = [\"query:id\"]\n\
                  [[routes]]\nname = \"passed\"\nmethods = [\"POST\"]\npath = \"/passed\"\nmode = \"pass\"\n";
    let plan = Gate::before(&upstream).routes(routes);
    let config = plan.config().to_string_lossy().into_owned();
    let said = |target: &str, key: &str| explained(&["--config", &config, "-X", "POST", target, "-H", key]);
    for (target, key, is_ignored) in [
        ("/hooks", "Idempotency-Key: k", true),
        ("/elsewhere", "Idempotency-Key: k", true),
        ("/elsewhere?id=k", "X-A: b", true),
        ("/hooks?id=k", "Idempotency-Key: k", false),
        ("/passed", "Idempotency-Key: k", false),
        ("/hooks", "X-A: b", false),
    ] {
        let text = said(target, key);
        assert_eq!(text.contains("its key is ignored"), is_ignored, "{target} {key}\n{text}");
    }
    let text = said("/hooks", "Idempotency-Key: k");
    assert!(text.contains("no key that the route reads"), "{text}");
    // As `oncegate check` has it, with the line.
    let place = format!("{config}:");
    let advice = text.lines().find_map(|line| line.split_once(&*place)).expect("the advice on the scope").1;
    let (line, advice) = advice.split_once(": routes[0].scope: keys belong to credentials").expect(advice);
    assert!(line.parse::<usize>().is_ok() && !advice.is_empty(), "{text}");
}

#[test]
fn completions_and_pages_are_printed() {
    let oncegate = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).output().expect("the binary starts");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (status, script) = oncegate(&["completions", shell]);
        assert_eq!(status, Some(0));
        assert!(script.contains("oncegate") && script.contains("explain"), "{shell}");
        if shell == "bash" {
            let read = Command::new("bash").args(["-n", "-c", &script]).status().expect("bash");
            assert!(read.success(), "bash cannot read it");
        }
    }
    let (_, first) = oncegate(&["man"]);
    assert!(first.contains(".TH oncegate 1") && first.contains("oncegate\\-explain(1)"), "{first}");
    assert_eq!(oncegate(&["completions", "man"]).1, first);
    let (_, page) = oncegate(&["man", "records", "resolve"]);
    assert!(page.contains(".TH oncegate-records-resolve 1") && page.contains("\\-\\-release"), "{page}");
    let (status, entry) = oncegate(&["docs", "urn:oncegate:problem:outcome-unknown"]);
    assert!(status == Some(0) && entry.contains("docs/runbooks/unknown-records.md"), "{entry}");
    let (status, list) = oncegate(&["docs"]);
    assert!(status == Some(0) && list.contains("key-reused") && list.contains("422"), "{list}");
    assert_eq!(oncegate(&["docs", "odd"]).0, Some(1));
    assert_eq!(oncegate(&["man", "records", "odd"]).0, Some(2));
    assert_eq!(oncegate(&["completions", "odd"]).0, Some(2));
}
