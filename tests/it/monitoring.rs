//! `deploy/prometheus` and `deploy/grafana`, with the programs that they are for.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::faults::Fault;
use crate::support::{Gate, Prometheus, Reply, Request, Signal, Upstream, eventually};

const RULES: &str = "deploy/prometheus/oncegate.rules.yaml";
const RULE_TESTS: &str = "deploy/prometheus/oncegate.rules.test.yaml";
const DASHBOARD: &str = "deploy/grafana/oncegate.json";

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The name of each alert, and the rest of its rule.
fn alerts(rules: &str) -> Vec<(&str, &str)> {
    rules.split("- alert: ").skip(1).filter_map(|rule| rule.split_once('\n')).collect()
}

#[test]
fn each_alert_fires_and_is_quiet_where_its_tests_say_so() {
    let (rules, tests) = (file(RULES), file(RULE_TESTS));
    for (name, _) in alerts(&rules) {
        for ending in ["fires", "is quiet"] {
            let case = tests.split("- name: ").find_map(|case| case.strip_prefix(&format!("{name} {ending}\n")));
            let case = case.unwrap_or_else(|| panic!("{RULE_TESTS}: no case `{name} {ending}`"));
            assert!(case.contains(&format!("alertname: {name}")), "{case}");
            assert_eq!(case.contains("exp_alerts: []"), ending == "is quiet", "{case}");
        }
    }
    let mut promtool = Command::new("promtool");
    promtool.args(["test", "rules", RULE_TESTS]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let Ok(tested) = promtool.output() else { return crate::servers::skipped("promtool") };
    let said = format!("{}{}", String::from_utf8_lossy(&tested.stdout), String::from_utf8_lossy(&tested.stderr));
    assert!(tested.status.success(), "{said}");
}

#[test]
fn each_alert_links_to_a_section_that_exists() {
    let rules = file(RULES);
    for (name, rule) in alerts(&rules) {
        let link = rule.lines().find_map(|line| line.trim().strip_prefix("runbook_url: "));
        let link = link.unwrap_or_else(|| panic!("{name} has no runbook_url"));
        let (page, section) = link.split_once('#').unwrap_or_else(|| panic!("{name}: {link} names no section"));
        assert!(page.starts_with("docs/"), "{name}: {link}");
        let page = file(page);
        let found = page.lines().filter_map(|line| line.strip_prefix("## ")).any(|title| slug(title) == section);
        assert!(found, "{name}: there is no section {link}");
    }
}

/// The anchor of a heading.
fn slug(title: &str) -> String {
    let title = title.to_lowercase().replace(' ', "-");
    title.chars().filter(|character| character.is_alphanumeric() || *character == '-').collect()
}

/// The queries of the dashboard, its variables among them, as Grafana sends them.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&file(DASHBOARD)).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let shown = targets.map(|target| target["expr"].as_str().expect("a query").to_owned());
    let variables = dashboard["templating"]["list"].as_array().expect("variables").iter();
    let listed = variables.filter_map(|variable| {
        let arguments = variable["query"]["query"].as_str()?.strip_prefix("label_values(")?.strip_suffix(')')?;
        let (series, label) = arguments.rsplit_once(", ")?;
        Some(format!("group by ({label}) ({series})"))
    });
    let mut queries: Vec<String> = shown.chain(listed).collect();
    for query in &mut queries {
        for (variable, value) in
            [("$job", "oncegate"), ("$instance", ".*"), ("$route", ".*"), ("$__rate_interval", "5s")]
        {
            *query = query.replace(variable, value);
        }
        assert!(!query.contains('$'), "{query}");
    }
    queries
}

#[test]
fn each_query_of_the_dashboard_has_data() {
    let held = Signal::new();
    let hold = held.clone();
    let upstream = Upstream::start(move |request| match request.start_line().split(' ').nth(1) {
        Some("/charges/held") => Reply::ok("late").hold_until(&hold),
        Some("/charges/busy") => Reply::status("503 Service Unavailable", "busy"),
        Some("/charges/lost") => Reply::status("504 Gateway Timeout", "lost"),
        _ => Reply::ok("x"),
    });
    let nowhere = Upstream::free_address();
    let route = |name: &str, path: &str, mode: &str| {
        format!("[[routes]]\nname = \"{name}\"\nmethods = [\"POST\"]\npath = \"{path}\"\nmode = \"{mode}\"\n")
    };
    let consumer = format!(
        "[[consumers]]\nname = \"orders\"\nsource = \"amqp://guest:guest@{nowhere}/%2F?queue=orders\"\nrequest = \"POST /charges\"\n"
    );
    let routes = [route("charges", "/charges/{*rest}", "protect"), route("jobs", "/jobs", "accept"), consumer].concat();
    let gate = Gate::before(&upstream).defaults("scope = [\"credential\"]\n").routes(&routes).with_faults().start();
    let Some(prometheus) = Prometheus::start(gate.admin) else { return };
    // A rise shows only after a sample from before it.
    let in_flight = "oncegate_requests_total{outcome=\"in-flight\",route=\"charges\"}";
    eventually("a sample before the first event", || {
        prometheus.query(in_flight).iter().any(|(_, value)| *value == 0.0).then_some(())
    });
    let (first, mut round) = (gate.address, 0);
    let first = std::thread::spawn(move || Request::post("/charges/held").key("held").body("{}").send(first));
    upstream.wait_for_runs(1);
    let queries: BTreeSet<String> = queries().into_iter().collect();
    let mut traffic = || {
        round += 1;
        let post = |path: &str, key: &str, body: &str| gate.post(path, &format!("{key}-{round}"), body);
        post("/charges", "new", "{}").expect(200, "executed");
        post("/charges", "new", "{}").expect(200, "replayed");
        post("/charges", "new", "[]").expect_problem(422, "key-reused");
        post("/charges/busy", "busy", "{}").expect(503, "released");
        post("/charges/lost", "lost", "{}").expect(504, "outcome-unknown");
        post("/jobs", "job", "{}").expect(202, "accepted");
        gate.post("/charges/held", "held", "{}").expect_problem(409, "in-flight");
        gate.fault(Fault::Full);
        post("/charges", "full", "{}").expect_problem(503, "store-unavailable");
        gate.heal();
        eventually("the store is back", || (post("/charges", "full", "{}").status == 200).then_some(()));
    };
    let has_data = |query: &String| prometheus.query(query).iter().any(|(_, value)| value.is_finite());
    let mut silent: Vec<&String> = queries.iter().collect();
    eventually("each query has data", || {
        traffic();
        silent.retain(|query| !has_data(query));
        if !silent.is_empty() {
            eprintln!("no data yet: {silent:#?}");
        }
        silent.is_empty().then_some(())
    });
    for counted in [
        "oncegate_requests_total{outcome=\"in-flight\"}",
        "oncegate_requests_total{outcome=\"replayed\"}",
        "oncegate_requests_total{outcome=\"released\"}",
        "oncegate_requests_total{outcome=\"outcome-unknown\"}",
        "oncegate_store_errors_total{kind=\"full\"}",
        "oncegate_requests_total{outcome=\"accepted\"}",
        "oncegate_responses_total{class=\"5xx\"}",
        "process_resident_memory_bytes",
        "tokio_worker_busy_seconds_total",
    ] {
        eventually(counted, || (!prometheus.query(&format!("{counted} > 0")).is_empty()).then_some(()));
    }
    // Series that exist before their first event show it.
    let rise = format!("increase({in_flight}[1m]) > 0");
    eventually("the first event shows", || (prometheus.query(&rise).len() == 1).then_some(()));
    held.open();
    first.join().expect("an answer").expect(200, "executed");
}
