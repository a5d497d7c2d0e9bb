//! What a gate says at its start.

use serde_json::Value;

use crate::support::{Gate, Plan, Reply, Upstream, eventually};

/// The lines that say what the gate does, as JSON.
fn summaries(gate: &Gate) -> Vec<Value> {
    let log = gate.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["message"] == "serving").collect()
}

#[test]
fn where_logs_are_json_one_line_says_what_the_gate_does() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let said = summaries(&gate);
    let [line] = &said[..] else { panic!("{}", gate.log()) };
    let field = |name: &str| line[name].as_str().unwrap_or_else(|| panic!("{name}: {line}")).to_owned();
    assert_eq!(field("version"), env!("CARGO_PKG_VERSION"));
    assert_eq!(field("listen"), format!("http://{}", gate.address));
    assert_eq!(field("admin"), format!("http://{}, without a token", gate.admin));
    assert!(field("upstreams").contains(&upstream.url()), "{line}");
    for name in ["store", "survives", "at_rest", "risks"] {
        assert!(!field(name).is_empty(), "{name}: {line}");
    }
    let [protected] = line["protected"].as_array().expect("an array").as_slice() else { panic!("{line}") };
    assert_eq!((&protected["route"], &protected["path"]), (&"all".into(), &"/{*rest}".into()), "{line}");
    assert_eq!(protected["methods"], serde_json::json!(["POST", "PATCH"]), "{line}");
    let server_errors = protected["5xx"].as_str().expect("a text");
    assert!(server_errors.starts_with("frees the key: a retry runs again; 502, 504 hold it"), "{line}");
    assert!(field("unprotected").starts_with("everything else: to app;"), "{line}");
}

#[test]
fn a_start_names_routes_that_keep_records_longer_than_max_ttl() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).defaults("ttl = \"2h\"\nunknown_ttl = \"3h\"");
    let start = |max_ttl: &str| plan.clone().store(&format!("max_ttl = \"{max_ttl}\"")).start();
    let said = |gate: &Gate, span: &str, most: &str| {
        gate.log().contains(&format!("the route `all` keeps records for {span}, and store.max_ttl is {most}"))
    };
    let gate = start("90m");
    assert!(said(&gate, "2h", "90m") && said(&gate, "3h", "90m"), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let gate = start("150m");
    assert!(said(&gate, "3h", "150m") && !said(&gate, "2h", "150m"), "{}", gate.log());
    gate.stop();
    let gate = start("3h");
    assert!(!gate.log().contains("store.max_ttl is"), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

#[test]
fn a_reload_says_it_again_where_it_changed() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let reloaded = |plan: &Plan, times: usize| {
        plan.config();
        gate.sighup();
        eventually("the reload", || (gate.log().matches("\"configuration reloaded\"").count() == times).then_some(()));
    };
    reloaded(&gate.plan, 1);
    reloaded(&gate.plan.clone().defaults("outcomes = { \"5xx\" = \"hold\" }"), 2);
    // What it says of the change stands behind the word for the reload.
    let said = eventually("the change", || Some(summaries(&gate)).filter(|said| said.len() > 1));
    assert_eq!(said.len(), 2, "{said:?}");
    assert_eq!(said[1]["protected"][0]["5xx"], "holds the key: the outcome is unknown", "{said:?}");
}
