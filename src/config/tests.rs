//! What loading gives, whole.

use std::path::{Path, PathBuf};
use std::time::Duration;

use toml_edit::DocumentMut;

use super::*;
use crate::idempotency::policy::InFlight;

mod variables;

const APP: &str = "http://127.0.0.1:3000";

/// Loads a text as a file, with variables and flags.
pub(super) struct Case {
    directory: tempfile::TempDir,
    sources: Sources,
}

impl Case {
    pub(super) fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("gate.toml");
        std::fs::write(&file, text).unwrap();
        Self { directory, sources: Sources { file: Some(file), ..Sources::default() } }
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        self.sources.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    fn flags(mut self, flags: Flags) -> Self {
        self.sources.flags = flags;
        self
    }

    #[track_caller]
    pub(super) fn load(self) -> Resolved {
        load(self.sources).unwrap_or_else(|problems| panic!("{problems}"))
    }

    /// The problems, with the name of the file as `gate.toml`.
    #[track_caller]
    pub(super) fn problems(self) -> String {
        let problems = load(self.sources).map(|_| ()).unwrap_err().to_string();
        problems.replace(&format!("{}/", self.directory.path().display()), "")
    }
}

fn upstream(url: &str) -> Flags {
    Flags { upstream: Some(url.to_owned()), ..Flags::default() }
}

/// The store, as it is printed.
fn store_url(resolved: &Resolved) -> String {
    resolved.effective["store"]["url"].as_str().unwrap().to_owned()
}

#[test]
fn an_upstream_alone_is_a_working_gate() {
    let resolved = load(Sources { flags: upstream(APP), ..Sources::default() }).unwrap();
    assert_eq!(resolved.server.listen[0].to_string(), "127.0.0.1:8080");
    assert_eq!(resolved.server.drain_timeout, Duration::from_secs(60));
    assert_eq!(resolved.admin.listen.to_string(), "127.0.0.1:9090");
    assert_eq!(store_url(&resolved), "sqlite:oncegate.db");
    assert_eq!(resolved.gate.default_upstream, Some(0));
    assert_eq!(resolved.upstreams[0].authority(), "127.0.0.1:3000");
    let find = |method| resolved.router.find(&method, Some("any.example"), "/any/path").map(|route| &*route.name);
    assert_eq!(find(::http::Method::POST), Some("default"));
    assert_eq!(find(::http::Method::PATCH), Some("default"));
    assert_eq!(find(::http::Method::GET), None);
    assert_eq!(resolved.advice.len(), 1, "a refreshed opaque token is another caller");
    assert!(resolved.advice[0].message.starts_with("keys belong to credentials: "), "{}", resolved.advice[0]);
}

#[test]
fn flags_beat_the_environment_which_beats_the_file() {
    let text = "[server]\nlisten = \"127.0.0.1:1\"\n[store]\nurl = \"sqlite:file.db\"\nservice = \"file\"\n\
                [upstreams]\nApp = { url = \"http://file:1\", timeout = \"7s\" }\n[admin]\nlisten = \"127.0.0.1:11\"\n";
    let file = || Case::new(text);
    let environment = || {
        file()
            .variable("ONCEGATE_SERVER__LISTEN", "127.0.0.1:2")
            .variable("ONCEGATE_STORE__URL", "memory:")
            .variable("ONCEGATE_UPSTREAMS__APP", "http://environment:2")
            .variable("ONCEGATE_ADMIN__LISTEN", "127.0.0.1:12")
    };
    let flags = environment().flags(Flags {
        upstream: Some("http://flag:3".to_owned()),
        listen: Some("127.0.0.1:3".to_owned()),
        admin: Some("127.0.0.1:13".to_owned()),
        store: vec!["sqlite:flag.db".to_owned()],
    });
    for (case, number, host, store) in [
        (file(), 1, "file:1", "sqlite:file.db"),
        (environment(), 2, "environment:2", "memory:"),
        (flags, 3, "flag:3", "sqlite:flag.db"),
    ] {
        let resolved = case.load();
        assert_eq!(resolved.server.listen[0].to_string(), format!("127.0.0.1:{number}"));
        assert_eq!(resolved.admin.listen.to_string(), format!("127.0.0.1:{}", 10 + number));
        assert_eq!(store_url(&resolved), store);
        assert_eq!(&*resolved.gate.service, "file", "what is not overridden stays");
        let [only] = &*resolved.upstreams else { panic!("one upstream") };
        assert_eq!((&*only.name, &*only.authority(), only.timeout), ("App", host, Duration::from_secs(7)));
        assert_eq!(resolved.server.drain_timeout, only.timeout);
    }
}

#[test]
fn a_problem_names_the_variable_or_flag_that_it_came_from() {
    let flags = Flags { listen: Some("nowhere".to_owned()), upstream: Some("ftp://x".to_owned()), ..Flags::default() };
    let problems = Case::new("[store]\nservice = 1\n")
        .variable("ONCEGATE_DEFAULTS__TTL", "5")
        .variable("ONCEGATE_SERVER_LISTEN", "127.0.0.1:1")
        .variable("ONCEGATE_STORE__COLOUR", "blue")
        .flags(flags)
        .problems();
    let expected = "\
gate.toml:2: store.service: expected text, found a number
    hint: put it in double quotes
ONCEGATE_DEFAULTS__TTL: defaults.ttl: a duration needs a unit
    hint: write \"5s\" for seconds, \"5ms\" for milliseconds, or m, h, d
ONCEGATE_SERVER_LISTEN: server_listen: unknown key in the top level
    hint: did you mean ONCEGATE_SERVER__LISTEN, with two underscores between levels?
ONCEGATE_STORE__COLOUR: store.colour: unknown key in [store]
    hint: the keys here are url, password_file, connections, service, id_secret_file, other_id_secret_files, encryption_keys, max_ttl, cache, cache_password_file, \
cache_max_age, cache_max_bytes, cache_max_entries, settle_timeout
--listen: server.listen: `nowhere` is not an address
    hint: write an address and a port, such as \"127.0.0.1:8080\" or \"[::1]:8080\"
--upstream: upstreams.default.url: the URL starts with `http://`, `https://` or `unix:`
    hint: write \"http://HOST:PORT\", \"https://HOST:PORT\" or \"unix:PATH\"
6 problems";
    assert_eq!(problems, expected);
}

#[test]
fn an_upstream_flag_needs_to_know_which_one_it_means() {
    let text = "default_upstream = \"a\"\n[upstreams]\na = \"http://a\"\nb = \"http://b\"\n";
    let problems = Case::new(text).flags(upstream(APP)).problems();
    assert!(problems.starts_with("--upstream: upstreams: several upstreams are configured (a, b)"), "{problems}");
    assert!(problems.ends_with("1 problem"), "{problems}");
}

#[test]
fn a_log_in_a_directory_that_is_missing_is_advised_against() {
    let advice = |path: &str| {
        let text = format!("[upstreams]\napp = \"http://app\"\n[access_log]\npath = \"{path}\"\n");
        Case::new(&text).load().advice.into_iter().any(|advice| advice.key == "access_log.path")
    };
    assert!(advice("/nonexistent/access.log"));
    assert!(!advice("/tmp/access.log") && !advice("access.log") && !advice("-"));
}

#[test]
fn what_asks_a_running_gate_needs_its_own_table_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gate.toml");
    let load = |admin: &str| {
        std::fs::write(&file, format!("[routs]\n[store]\nurl = 1\n[admin]\n{admin}\n")).unwrap();
        load_admin(Sources { file: Some(file.clone()), ..Sources::default() }).map(|admin| admin.listen.to_string())
    };
    assert_eq!(load("listen = \"127.0.0.1:9099\"").unwrap(), "127.0.0.1:9099");
    std::fs::write(&file, "[admn]\nlisten = \"127.0.0.1:9099\"\n").unwrap();
    let misspelt = load_admin(Sources { file: Some(file.clone()), ..Sources::default() }).unwrap_err().to_string();
    assert!(misspelt.contains("admn: unknown key"), "{misspelt}");
    let problems = load("listen = \"127.0.0.1:9099\"\ncolour = 1").unwrap_err().to_string();
    assert!(problems.contains("admin.colour: unknown key") && problems.ends_with("1 problem"), "{problems}");
}

#[test]
fn what_a_platform_sets_for_services_is_no_setting() {
    let services = [
        ("ONCEGATE_SERVICE_HOST", "10.0.0.1"),
        ("ONCEGATE_SERVICE_PORT", "8080"),
        ("ONCEGATE_SERVICE_PORT_HTTP", "8080"),
        ("ONCEGATE_PORT", "tcp://10.0.0.1:8080"),
        ("ONCEGATE_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("ONCEGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("ONCEGATE_ADMIN_PORT_9090_TCP", "tcp://10.0.0.3:9090"),
        ("ONCEGATE_NAME", "/shop/oncegate"),
    ];
    let case = || {
        let case = Case::new("[upstreams]\napp = \"http://app\"\n[defaults]\nscope = [\"host\"]\n");
        services.iter().fold(case, |case, (name, value)| case.variable(name, value))
    };
    assert!(case().load().advice.is_empty());
    let problems = case()
        .variable("ONCEGATE_LISTEN", "127.0.0.1:1")
        .variable("ONCEGATE_SERVER_LISTEN", "127.0.0.1:1")
        .variable("ONCEGATE_UPSTREAMS_APP", "http://app")
        .variable("ONCEGATE_STROE__URL", "memory:")
        .variable("ONCEGATE_STORE", "memory:")
        .variable("ONCEGATE_UPSTREAM", "http://app")
        .problems();
    let expected = "\
ONCEGATE_LISTEN: listen: unknown key in the top level
    hint: did you mean ONCEGATE_SERVER__LISTEN or ONCEGATE_ADMIN__LISTEN?
ONCEGATE_SERVER_LISTEN: server_listen: unknown key in the top level
    hint: did you mean ONCEGATE_SERVER__LISTEN, with two underscores between levels?
ONCEGATE_STORE: store: expected a table, found text
    hint: each of its keys has a variable of its own, such as ONCEGATE_STORE__URL
ONCEGATE_STROE__URL: stroe: unknown key in the top level
    hint: did you mean `store`?
ONCEGATE_UPSTREAM: upstream: unknown key in the top level
    hint: did you mean ONCEGATE_UPSTREAMS__APP?
ONCEGATE_UPSTREAMS_APP: upstreams_app: unknown key in the top level
    hint: did you mean ONCEGATE_UPSTREAMS__APP, with two underscores between levels?
6 problems";
    assert_eq!(problems, expected);
}

#[test]
fn a_file_that_cannot_be_read_is_told() {
    let sources = Sources { file: Some("no/such/file.toml".into()), ..Sources::default() };
    let problems = load(sources).unwrap_err().to_string();
    assert!(problems.starts_with("no/such/file.toml: cannot be read: "), "{problems}");
    let case = Case::new("");
    std::fs::write(case.sources.file.as_ref().unwrap(), b"\n\nname = \"\xff\"\n").unwrap();
    assert!(case.problems().starts_with("gate.toml:3: not UTF-8"));
}

#[test]
fn parts_of_a_policy_count_one_by_one() {
    let resolved = Case::new(
        "[upstreams]\napp = \"http://app\"\n[defaults]\nkey = { max_length = 64 }\noutcomes = { 429 = \"store\" }\n\
         fingerprint = { exclude = [\"/a\"] }\n[[routes]]\nname = \"r\"\npath = \"/r\"\nkey.required = true\n\
         outcomes = { 5xx = \"hold\" }\nfingerprint.body = \"json\"\n",
    )
    .load();
    let policy = &resolved.router.routes()[0].policy;
    assert!(policy.key.required);
    assert_eq!(policy.key.max_length, 64);
    assert_eq!((policy.outcomes.status.len(), policy.outcomes.class.len()), (1, 1));
    assert_eq!(policy.fingerprint.exclude.len(), 1);
    assert_eq!(policy.fingerprint.form, crate::idempotency::fingerprint::BodyForm::Json);
}

#[test]
fn a_ttl_that_a_slow_attempt_outlives_is_advised_against() {
    let routes = |ttl: &str, mode: &str| {
        let text = format!(
            "[upstreams]\nfast = {{ url = \"http://fast\", timeout = \"5s\" }}\nslow = \"http://slow\"\n\
             [defaults]\nscope = [\"host\"]\nttl = \"{ttl}\"\nmode = \"{mode}\"\n\
             [[routes]]\nname = \"a\"\npath = \"/a\"\nupstream = \"fast\"\n\
             [[routes]]\nname = \"b\"\npath = \"/b\"\nupstream = \"slow\"\n"
        );
        let advice = Case::new(&text).load().advice;
        advice.into_iter().map(|advice| format!("{}: {}", advice.key, advice.message)).collect::<Vec<_>>()
    };
    let advice = |index: usize, route: &str, ttl: &str, timeout: &str| {
        format!(
            "routes[{index}].ttl: route `{route}` forgets an answer {ttl} after its claim, and an attempt may take \
             {timeout}: a retry of a slow one may run again"
        )
    };
    assert!(routes("61s", "protect").is_empty());
    assert_eq!(routes("60s", "protect"), [advice(1, "b", "60s", "60s")]);
    assert_eq!(routes("2s", "protect"), [advice(0, "a", "2s", "5s"), advice(1, "b", "2s", "60s")]);
    assert!(routes("2s", "pass").is_empty());
    let only = "[upstreams]\napp = \"http://app\"\n[defaults]\nscope = [\"host\"]\nttl = \"30s\"\n";
    let advice = Case::new(only).load().advice;
    assert_eq!(advice.iter().map(|advice| &*advice.key).collect::<Vec<_>>(), ["defaults.ttl"]);
}

#[test]
fn what_opaque_tokens_cost_is_said_once_where_credentials_count() {
    let advice = |defaults: &str, first: &str, second: &str| {
        let text = format!(
            "[upstreams]\napp = \"http://app\"\n[defaults]\n{defaults}\n\
             [[routes]]\nname = \"a\"\npath = \"/a\"\n{first}\n\
             [[routes]]\nname = \"b\"\npath = \"/b\"\n{second}\n"
        );
        let advice = Case::new(&text).load().advice;
        let keys = advice.into_iter().filter(|advice| advice.message.starts_with("keys belong to credentials: "));
        keys.map(|advice| advice.key).collect::<Vec<_>>()
    };
    assert_eq!(advice("", "", ""), ["routes[0].scope"]);
    assert_eq!(advice("scope = [\"host\"]", "", "scope = [\"credential\"]"), ["routes[1].scope"]);
    assert_eq!(advice("scope = [\"header:X-User\"]", "", ""), [""; 0]);
    assert_eq!(advice("mode = \"pass\"", "", "mode = \"protect\""), ["routes[1].scope"]);
}

#[test]
fn whether_a_part_must_be_there_is_no_rule_of_identities() {
    let text = "[upstreams]\napp = \"http://app\"\n\
                [[routes]]\nname = \"a\"\npath = \"/a\"\nnamespace = \"n\"\nscope = [\"header:X-T\"]\n\
                [[routes]]\nname = \"b\"\npath = \"/b\"\nnamespace = \"n\"\nscope = [\"header:x-t?\"]\n";
    let resolved = Case::new(text).load();
    let scope = |index: usize| resolved.effective["routes"][index]["scope"].to_string().trim().to_owned();
    assert_eq!([scope(0), scope(1)], ["[\"header:x-t\"]", "[\"header:x-t?\"]"]);
}

#[test]
fn secrets_are_read_and_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let (token, secret) = (directory.path().join("token"), directory.path().join("secret"));
    std::fs::write(&token, "t0ken\n").unwrap();
    std::fs::write(&secret, format!("{}\n", "k".repeat(32))).unwrap();
    let text = format!(
        "[upstreams]\napp = \"http://app\"\n[admin]\nlisten = \"0.0.0.0:9090\"\ntoken_file = {token:?}\n\
         [store]\nid_secret_file = {secret:?}\n"
    );
    let resolved = Case::new(&text).load();
    assert_eq!(resolved.admin.tokens[0].secret.0, "t0ken");
    assert_eq!(resolved.gate.id_secret.as_ref().unwrap().0.len(), 32);
    for shown in [resolved.effective.to_string(), format!("{resolved:?}")] {
        assert!(!shown.contains("t0ken") && !shown.contains("kkkk"), "{shown}");
    }
    for (content, message) in [("", " is empty"), ("two words", " holds more than one word")] {
        std::fs::write(&token, content).unwrap();
        let problems = Case::new(&text).problems();
        assert!(problems.contains(message), "{problems}");
    }
}

#[test]
fn what_is_printed_gives_the_same_settings() {
    for file in ["config/examples/sidecar.toml", "config/examples/gateway.toml"] {
        let sources = Sources { file: Some(file.into()), ..Sources::default() };
        let printed = load(sources).unwrap().effective.to_string();
        assert_eq!(Case::new(&printed).load().effective.to_string(), printed, "{file}");
    }
}

/// The files that it names are made for the test.
#[test]
fn the_example_of_an_edge_is_accepted_and_printed() {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/servers/own.pem");
    let mut text = std::fs::read_to_string("config/examples/edge.toml").unwrap();
    for name in ["cert.pem", "key.pem", "ca.pem", "gate.pem", "gate-key.pem"] {
        let there = format!("\"/etc/oncegate/{name}\"");
        assert!(text.contains(&there), "{name}");
        text = text.replace(&there, &format!("{own:?}"));
    }
    let resolved = Case::new(&text).load();
    assert!(resolved.server.accept.tls.is_some());
    let names: Vec<_> = resolved.router.routes().iter().map(|route| &*route.name).collect();
    assert_eq!(names, ["checkout", "charge", "payments", "create-report", "read-reports"]);
    let printed = resolved.effective.to_string();
    assert_eq!(Case::new(&printed).load().effective.to_string(), printed);
}

#[test]
fn the_annotated_default_is_what_is_built_in() {
    let built_in = load(Sources { flags: upstream(APP), ..Sources::default() }).unwrap();
    let annotated = Case::new(DEFAULT).flags(upstream(APP)).load();
    assert_eq!(annotated.effective.to_string(), built_in.effective.to_string());
}

#[test]
fn the_examples_in_the_annotated_default_are_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let mut text = with_examples();
    // What only a database has needs one.
    text = text.replace("url = \"sqlite:oncegate.db\"", "url = \"postgres://oncegate@db.internal/oncegate\"");
    let secrets = [
        "oncegate-admin-token",
        "oncegate-ops-token",
        "oncegate-id-secret-1",
        "oncegate-id-secret",
        "oncegate-key-1",
        "oncegate-database-password",
        "oncegate-cache-password",
        "oncegate-rabbitmq-password",
    ];
    for name in secrets {
        let file: PathBuf = directory.path().join(name);
        std::fs::write(&file, format!("{name:x<32}")).unwrap();
        let inside = Path::new("/run/secrets").join(name);
        assert!(text.contains(inside.to_str().unwrap()));
        text = text.replace(inside.to_str().unwrap(), file.to_str().unwrap());
    }
    let own = directory.path().join("own.pem");
    std::fs::write(&own, include_str!("../../tests/servers/own.pem")).unwrap();
    // What only an encrypted upstream has needs one.
    text = text.replace("url = \"http://127.0.0.1:3000\"", "url = \"https://127.0.0.1:3000\"");
    for name in ["ca", "crl", "cert", "key"].map(|name| format!("/etc/oncegate/{name}.pem")) {
        assert!(text.contains(&name));
        text = text.replace(&name, own.to_str().unwrap());
    }
    // The example of a route is for another path.
    text = text.replace("POST /internal/orders", "POST /v1/charges/1/capture");
    // Keys of tokens come from one place.
    let is_other_source =
        |line: &&str| ["secret", "pem", "jwks"].iter().any(|key| line.starts_with(&format!("jwt.{key}_file")));
    text = text.lines().filter(|line| !is_other_source(line)).collect::<Vec<_>>().join("\n");
    let resolved = Case::new(&text).load();
    assert!(resolved.server.accept.tls.is_some() && resolved.gate.jwt.is_some());
    assert_eq!(resolved.router.routes().len(), 1);
    let policy = &resolved.router.routes()[0].policy;
    assert_eq!(policy.ttl, Duration::from_secs(7 * 24 * 60 * 60));
    assert_eq!(policy.in_flight, InFlight::Wait(Duration::from_secs(10)));
}

#[test]
fn the_query_of_a_url_of_keys_is_not_printed() {
    let text = "[auth.jwt]\njwks_url = \"https://id/keys?code=hidden\"\n[defaults]\nscope = [\"jwt:sub\"]\n";
    let resolved = Case::new(text).flags(upstream(APP)).load();
    let printed = resolved.effective.to_string();
    assert!(printed.contains("\"https://id/keys?***\"") && !printed.contains("hidden"), "{printed}");
}

#[test]
fn a_wait_is_taken_from_defaults_routes_and_variables() {
    let text = "[defaults]\nin_flight = { wait = \"1m30s\" }\n\
                [[routes]]\nname = \"a\"\npath = \"/a\"\n\
                [[routes]]\nname = \"b\"\npath = \"/b\"\nin_flight = \"reject\"\n\
                [[routes]]\nname = \"c\"\npath = \"/c\"\nin_flight = { wait = \"24h\" }\n";
    let seconds = |resolved: &Resolved| -> Vec<InFlight> {
        resolved.router.routes().iter().map(|route| route.policy.in_flight).collect()
    };
    let wait = |seconds| InFlight::Wait(Duration::from_secs(seconds));
    let resolved = Case::new(text).flags(upstream(APP)).load();
    assert_eq!(seconds(&resolved), [wait(90), InFlight::Reject, wait(86_400)]);
    let printed = resolved.effective.to_string();
    assert!(printed.contains("in_flight = { wait = \"90s\" }"), "{printed}");
    assert_eq!(Case::new(&printed).load().effective.to_string(), printed);
    let variable = || Case::new("").flags(upstream(APP));
    let resolved = variable().variable("ONCEGATE_DEFAULTS__IN_FLIGHT__WAIT", "5s").load();
    assert_eq!(seconds(&resolved), [wait(5)]);
    let resolved = variable().variable("ONCEGATE_DEFAULTS__IN_FLIGHT", "{ wait = \"5s\" }").load();
    assert_eq!(seconds(&resolved), [wait(5)]);
}

/// The outcomes that stand there as defaults are the defaults.
#[test]
fn the_outcomes_in_the_annotated_default_are_the_defaults() {
    use crate::idempotency::grpc::Status;
    use crate::idempotency::settle::{Ending, Outcomes};
    let document: DocumentMut = with_examples().parse().unwrap();
    let mut outcomes = Outcomes::default();
    for (entry, action) in document["defaults"]["outcomes"].as_table().unwrap() {
        outcomes.insert(entry, action.as_str().unwrap()).unwrap();
    }
    let transport = [Ending::Unreachable, Ending::Timeout, Ending::Broken];
    let calls = Status::ALL.map(Ending::Called);
    for ending in (200..600).map(Ending::Answered).chain(calls).chain(transport) {
        assert_eq!(outcomes.action(ending), Outcomes::default().action(ending), "{ending:?}");
    }
}

/// The annotated default file as it is checked in, for readers and packages.
pub(super) const DEFAULT: &str = include_str!("../../config/oncegate.default.toml");

/// The same with its examples: a `#` without a space comments out a setting, one with a space starts prose.
pub(super) fn with_examples() -> String {
    let setting = |line: &'static str| line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with(' '));
    DEFAULT.lines().map(|line| setting(line).unwrap_or(line)).collect::<Vec<_>>().join("\n")
}
