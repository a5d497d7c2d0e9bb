//! What a monitoring system reads at `/metrics`.

use std::collections::BTreeSet;

use crate::support::{Gate, Reply, Request, Upstream, eventually};

/// Every series, without its value.
fn series(gate: &Gate) -> BTreeSet<String> {
    let text = gate.admin("GET", "/metrics", None).text();
    text.lines()
        .filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()))
        .filter(|line| !line.starts_with('#'))
        .collect()
}

#[test]
fn counters_are_at_zero_before_their_first_event() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let route =
        "[[routes]]\nname = \"charges\"\nmethods = [\"POST\"]\npath = \"/charges\"\nstore_failure = \"forward\"\n";
    let observed = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\nmode = \"observe\"\n";
    let gate = Gate::before(&upstream).routes(&format!("{route}{observed}")).start();
    let before = series(&gate);
    for (outcome, route) in [
        ("executed", "charges"),
        ("in-flight", "charges"),
        ("outcome-unknown", "charges"),
        ("store-unavailable", "charges"),
        ("unprotected", "charges"),
        ("unrecorded", "charges"),
        ("observed", "orders"),
        ("ignored", "-"),
    ] {
        let name = format!("oncegate_requests_total{{outcome=\"{outcome}\",route=\"{route}\"}}");
        assert!(before.contains(&name), "{name} is not in {before:#?}");
    }
    for name in [
        "oncegate_responses_total{class=\"5xx\",route=\"charges\"}",
        "oncegate_oldest_unknown_seconds",
        "process_cpu_seconds_total",
        "process_open_fds",
        "tokio_alive_tasks{runtime=\"main\"}",
        "tokio_worker_busy_seconds_total{runtime=\"shard-0\"}",
    ] {
        assert!(before.contains(name), "{name} is not in {before:#?}");
    }
    let errors =
        before.iter().filter(|name| name.starts_with("oncegate_store_errors_total{") && name.contains("\"claim\""));
    assert_eq!(errors.count(), 7, "{before:#?}");
    assert!(!before.iter().any(|name| name.contains("outcome=\"executed\",route=\"orders\"")), "{before:#?}");
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let label = ["route=\"charges\"", "class=\"2xx\""];
    assert_eq!(gate.metric("oncegate_responses_total", &label), 1.0);
    assert_eq!(gate.metric("oncegate_requests_total", &[]), 1.0);
}

#[test]
fn no_request_adds_a_series_of_its_own() {
    let upstream = Upstream::start(|request| {
        if request.start_line().contains("/lost ") { Reply::status("504 Gateway Timeout", "x") } else { Reply::ok("x") }
    });
    let gate = Gate::before(&upstream).start();
    let spray = |round: usize| {
        for nth in 0..20 {
            let name = format!("{round}-{nth}");
            let post = |key: &str| {
                let request =
                    Request::post(&format!("/charges/{name}?q={name}")).key(key).body(format!("{{\"n\":\"{name}\"}}"));
                request.header("Host", format!("{name}.example")).header("X-Tenant", &name).header("X-Api-Key", &name)
            };
            post(&name).send(&gate).expect(200, "executed");
            post(&name).send(&gate).expect(200, "replayed");
            Request::post(&format!("/charges/{name}/lost")).key(&format!("lost-{name}")).body("{}").send(&gate);
            Request::post(&format!("/charges/{name}/lost")).key(&format!("lost-{name}")).body("{}").send(&gate);
            Request::post("/charges").key("not, a key").body("{}").send(&gate).expect(400, "key-invalid");
            Request::new(&format!("M{round}X{nth}"), &format!("/{name}")).send(&gate);
            Request::new(&format!("M{round}X{nth}"), &format!("/{name}")).key(&name).send(&gate);
        }
    };
    spray(0);
    // What the workers and the admin listener do appears by and by.
    eventually("the workers have counted", || (gate.metric("oncegate_records", &["unknown"]) >= 20.0).then_some(()));
    eventually("the oldest has an age", || (gate.metric("oncegate_oldest_unknown_seconds", &[]) > 0.0).then_some(()));
    let before = series(&gate);
    spray(1);
    let after = series(&gate);
    let new: Vec<_> = after.difference(&before).collect();
    assert!(new.is_empty(), "{new:#?}");
    for word in ["1-7", "M1X7", "example"] {
        assert!(!after.iter().any(|name| name.contains(word)), "{word} shows in the metrics");
    }
}
