//! SIGHUP: the configuration is read again, and nothing that goes on is lost.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::gate::Plan;
use crate::support::{Client, Gate, Reply, Request, Response, Signal, Upstream, eventually};

const LAST: &str = "oncegate_config_last_reload_successful";

/// Lines of the log that say how a reload ended.
const ENDED: [&str; 2] =
    ["configuration reloaded", "the configuration is not reloaded: the gate goes on with the former one"];

/// Writes the plan's file over the gate's own, reloads it, and says whether that worked.
#[track_caller]
pub fn reload(gate: &Gate, plan: &Plan) -> bool {
    plan.config();
    reload_as_it_is(gate)
}

#[track_caller]
fn reload_as_it_is(gate: &Gate) -> bool {
    let is_good = signalled(gate);
    assert_eq!(gate.metric(LAST, &[]), if is_good { 1.0 } else { 0.0 }, "{}", gate.log());
    is_good
}

#[track_caller]
fn signalled(gate: &Gate) -> bool {
    let ended = || messages(gate).into_iter().filter(|message| ENDED.contains(&&**message)).collect::<Vec<_>>();
    let before = ended().len();
    gate.sighup();
    eventually("the end of the reload", || ended().get(before).cloned()) == ENDED[0]
}

/// The log's lines that say this.
fn lines_of(gate: &Gate, message: &str) -> Vec<Value> {
    let log = gate.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["message"] == message).collect()
}

/// What the log says, without the rest of its lines.
fn messages(gate: &Gate) -> Vec<String> {
    let log = gate.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| Some(line["message"].as_str()?.to_owned())).collect()
}

/// What a start says of a configuration that is accepted, a reload says too.
#[test]
fn a_reload_gives_advice() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    assert!(reload(&gate, &plan.defaults("outcomes = { timeout = \"release\" }\n")));
    let advised = || messages(&gate).iter().any(|message| message.contains("advice: ")).then_some(());
    eventually("the advice", advised);
}

#[test]
fn routes_policies_and_upstreams_are_replaced() {
    let (one, other) = (Upstream::start(|_| Reply::ok("one")), Upstream::start(|_| Reply::ok("other")));
    let plan = Gate::before(&one);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let mut kept = Client::connect(gate.address);
    kept.send(Request::post("/charges").key("k-2").body("{}").bytes());
    kept.response().expect(200, "executed");

    let routes = format!(
        "[upstreams.other]\nurl = {:?}\n[[routes]]\nname = \"all\"\nmethods = [\"POST\", \"PATCH\"]\npath = \"/{{*rest}}\"\n\
                  key = {{ required = true }}\nmax_request_body = \"4B\"\nupstream = \"other\"\n\
                  [[routes]]\nname = \"new\"\nmethods = [\"PUT\"]\npath = \"/new\"\nupstream = \"other\"\n",
        other.url()
    );
    let changed = plan.clone().routes(&routes).top("default_upstream = \"other\"");
    assert!(reload(&gate, &changed), "{}", gate.log());
    // What was recorded is known, and what is new goes elsewhere: on a connection that was there before, too.
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    kept.send(Request::post("/charges").key("k-3").body("{}").bytes());
    assert_eq!(kept.response().expect(200, "executed").text(), "other");
    Request::new("PUT", "/new").key("k-4").body("{}").send(&gate).expect(200, "executed");
    Request::post("/charges").body("{}").send(&gate).expect_bare_problem(400, "key-missing");
    gate.post("/charges", "k-5", "12345").expect_problem(413, "request-too-large");
    assert_eq!(Request::get("/").send(&gate).text(), "other");
    assert_eq!((one.runs(), other.runs()), (2, 3));
    // The admin listener tells of the new ones.
    let told = gate.admin("GET", "/api/v1/routes", None).json();
    let names: Vec<_> = told["routes"].as_array().unwrap().iter().map(|route| route["name"].clone()).collect();
    assert_eq!(names, ["all", "new"]);
    assert!(gate.metric("oncegate_requests_total", &["route=\"new\""]) >= 1.0);
    // A route goes once its records have gone.
    assert!(!reload(&gate, &plan));
    assert!(gate.log().contains("1 live key: 1 of route `new`"), "{}", gate.log());
    let id = gate.records("key=k-4")[0]["id"].as_str().unwrap().to_owned();
    assert!(gate.admin("DELETE", &format!("/api/v1/records/{id}"), None).status < 300);
    assert!(reload(&gate, &plan), "{}", gate.log());
    gate.post("/charges", "k-3", "{}").expect(200, "replayed");
    assert_eq!(Request::get("/").send(&gate).text(), "one");
}

#[test]
fn a_broken_file_changes_nothing_and_each_problem_is_said() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    for broken in ["ttl = \"0s\"\nlease = \"1ms\"\nodd = 1", "ttl = ["] {
        assert!(!reload(&gate, &plan.clone().defaults(broken)));
        gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    }
    let log = gate.log();
    for word in ["defaults.ttl", "defaults.lease", "defaults.odd", "oncegate.toml:", "\"hint\":"] {
        assert!(log.contains(word), "{word} is missing: {log}");
    }
    std::fs::remove_file(plan.path("oncegate.toml")).unwrap();
    assert!(!reload_as_it_is(&gate));
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    assert!(reload(&gate, &plan));
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

#[test]
fn rules_of_identities_change_only_where_no_record_lives() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let changed = plan.clone().defaults("scope = [\"header:X-Tenant?\"]");
    let gate = plan.start();
    // Nothing lives yet: there, and back.
    assert!(reload(&gate, &changed), "{}", gate.log());
    assert!(reload(&gate, &plan), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert!(!reload(&gate, &changed));
    let log = gate.log();
    assert!(log.contains("--accept-identity-change") && log.contains("1 live key: 1 of route `all`"), "{log}");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    // What does not make identities may change at any time.
    assert!(reload(&gate, &plan.clone().defaults("ttl = \"7d\"\nlease = \"10s\"")), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn routes_that_no_longer_take_requests_with_live_keys_are_refused() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let route = |path: &str| {
        let route = format!("[[routes]]\nname = \"all\"\nmethods = [\"POST\", \"PATCH\"]\npath = {path:?}\n");
        plan.clone().routes(&route)
    };
    assert!(!reload(&gate, &route("/refunds")));
    let refused = lines_of(&gate, ENDED[1]);
    let [line] = &refused[..] else { panic!("{}", gate.log()) };
    let said = line["error"].as_str().expect("a text");
    assert_eq!(line["keys"], 1, "{line}");
    assert!(said.contains("no route takes POST /charges") && said.contains("Then reload again."), "{said}");
    assert!(said.contains("restart the process, once with --accept-identity-change"), "{said}");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert!(reload(&gate, &route("/charges")), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn in_logs_for_people_a_refusal_is_a_block() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let mut process = plan.clone().env("ONCEGATE_LOG__FORMAT", "text").spawn();
    let said = |part: &str| process.wait_for_log(|line| line.contains(part).then_some(())).is_some();
    assert!(said(": listening "), "{}", process.log());
    plan.clone().defaults("scope = [\"header:X-Tenant?\"]").config();
    process.signal(rustix::process::Signal::HUP);
    assert!(said("a retry with a forgotten key"), "{}", process.log());
    let log = process.log();
    process.signal(rustix::process::Signal::TERM);
    process.wait();
    let block = log.lines().skip_while(|line| !line.contains(ENDED[1])).skip(1).collect::<Vec<_>>();
    assert!(block[0].starts_with("this configuration would forget 1 live key"), "{log}");
    assert!(block.contains(&"What you can do, best first:"), "{log}");
}

#[test]
fn a_request_that_came_under_rules_that_are_gone_is_not_run() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let mut client = Client::connect(gate.address);
    let request = Request::post("/charges").key("k-1").header("Expect", "100-continue").body("{}").bytes();
    let (head, body) = request.split_at(request.len() - 2);
    client.send(head);
    // By then it belongs to the gate that it came to.
    assert_eq!(client.head().start, b"HTTP/1.1 100 Continue");
    assert!(reload(&gate, &plan.clone().defaults("scope = [\"header:X-Tenant?\"]")), "{}", gate.log());
    client.send(body);
    client.response().expect_problem(503, "overloaded");
    assert_eq!(upstream.runs(), 0);
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
}

/// A request whose body comes after a reload with these routes, in the place of one that protects everything.
#[track_caller]
fn sent_across_a_reload(routes: &str) -> (Response, Gate, Upstream) {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let all = "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n";
    let gate = plan.clone().routes(all).start();
    let mut client = Client::connect(gate.address);
    let request = Request::post("/charges").key("k-1").header("Expect", "100-continue").body("{}").bytes();
    let (head, body) = request.split_at(request.len() - 2);
    client.send(head);
    assert_eq!(client.head().start, b"HTTP/1.1 100 Continue");
    assert!(reload(&gate, &plan.routes(routes)), "{}", gate.log());
    client.send(body);
    (client.response(), gate, upstream)
}

#[test]
fn a_key_that_a_retry_would_not_find_is_not_claimed() {
    for routes in [
        // No route takes it, one passes it on, one has its keys elsewhere.
        "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/refunds\"\n",
        "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n\n\
         [[routes]]\nname = \"open\"\nmethods = [\"POST\"]\npath = \"/charges\"\nmode = \"pass\"\n",
        "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n\n\
         [[routes]]\nname = \"charges\"\nmethods = [\"POST\"]\npath = \"/charges\"\n",
    ] {
        let (response, _gate, upstream) = sent_across_a_reload(routes);
        response.expect_problem(503, "overloaded");
        assert_eq!(upstream.runs(), 0, "{routes}");
    }
}

#[test]
fn a_key_that_a_retry_finds_under_another_route_is_claimed() {
    let routes = "[[routes]]\nname = \"charges\"\nnamespace = \"all\"\nmethods = [\"POST\"]\npath = \"/charges\"\n";
    let (response, gate, upstream) = sent_across_a_reload(routes);
    response.expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// Retries would run again. Stores that services share did not look at a service of which no route protects.
#[test]
fn a_reload_that_ends_all_protection_is_refused_while_keys_live() {
    for mode in ["pass", "observe"] {
        let upstream = Upstream::start(|_| Reply::ok("x"));
        let plan = Gate::before(&upstream);
        let gate = plan.start();
        gate.post("/charges", "k-1", "{}").expect(200, "executed");
        let other = plan.clone().defaults(&format!("mode = \"{mode}\""));
        assert!(!reload(&gate, &other), "{mode}: {}", gate.log());
        assert!(gate.log().contains("live key"), "{mode}: {}", gate.log());
        gate.post("/charges", "k-1", "{}").expect(200, "replayed");
        assert_eq!(upstream.runs(), 1);
    }
}

#[test]
fn where_records_are_and_whose_they_are_does_not_change() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    for (other, key) in
        [(plan.clone().store("service = \"other\""), "store.service"), (plan.clone().store_url("memory:"), "store.url")]
    {
        // What else is new would answer other requests from these records.
        assert!(!reload(&gate, &other.defaults("key = { required = true }")));
        let refused = |line: &str| line.contains(key) && line.contains("cannot change while the gate serves");
        assert!(gate.log().lines().any(refused), "{}", gate.log());
        assert_eq!(Request::post("/x").body("{}").send(&gate).status, 200);
    }
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
}

/// It would hold its messages without a word.
#[test]
fn a_consumer_keeps_a_route() {
    const CONSUMER: &str = "[[consumers]]\nname = \"orders\"\nsource = \"amqp://127.0.0.1:1/%2f?queue=orders\"\n\
                            request = \"POST /orders\"\n";
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let before = Gate::before(&upstream);
    let of = |path: &str, mode: &str, more: &str| {
        let routes = format!("[[routes]]\nname = \"orders\"\npath = \"{path}\"\nmode = \"{mode}\"\n{more}");
        before.clone().routes(&routes)
    };
    let plan = of("/orders", "protect", CONSUMER);
    let gate = plan.start();
    for other in [of("/others", "protect", ""), of("/orders", "pass", "")] {
        assert!(!reload(&gate, &other));
    }
    let refused = "no route protects the messages of the consumer `orders` any more";
    assert_eq!(gate.log().matches(refused).count(), 2, "{}", gate.log());
    assert!(reload(&gate, &plan), "{}", gate.log());
}

#[test]
fn what_only_a_start_sets_is_named_and_the_rest_applied() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let moved = plan.clone().server("listen = \"127.0.0.2:0\"").store("cache_max_entries = 7");
    assert!(reload(&gate, &moved.defaults("key = { required = true }")), "{}", gate.log());
    assert!(gate.log().contains("\"server.listen, store.cache_max_entries\""), "{}", gate.log());
    Request::post("/x").body("{}").send(&gate).expect_bare_problem(400, "key-missing");
}

#[test]
fn secrets_and_log_level_are_replaced() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let file = plan.path("token");
    let plan = plan.admin(&format!("token_file = {file:?}"));
    std::fs::write(&file, "first").unwrap();
    let gate = plan.start();
    let with = |token: &str| {
        let request = Request::get("/api/v1/records").header("Host", "127.0.0.1");
        request.header("Authorization", format!("Bearer {token}")).send(gate.admin).status
    };
    assert_eq!((with("first"), with("second")), (200, 401));
    std::fs::write(&file, "second").unwrap();
    assert!(!gate.log().contains("\"DEBUG\""), "{}", gate.log());
    let text = std::fs::read_to_string(plan.config()).unwrap();
    std::fs::write(plan.path("oncegate.toml"), text.replace("[log]", "[log]\nlevel = \"debug\"")).unwrap();
    assert!(signalled(&gate), "{}", gate.log());
    assert_eq!((with("first"), with("second")), (401, 200));
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    eventually("lines for those who look for defects", || gate.log().contains("\"DEBUG\"").then_some(()));
}

#[test]
fn a_retry_after_it_meets_the_attempt_from_before() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::status("500 No", "released").hold_until(&held));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let address = gate.address;
    let send = move || std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    let first = send();
    upstream.wait_for_runs(1);
    assert!(reload(&gate, &plan.clone().defaults("in_flight = { wait = \"20s\" }")), "{}", gate.log());
    let waiter = send();
    gate.wait_for_waiting(1);
    Request::post("/charges")
        .key("k-1")
        .body("{}")
        .header("Prefer", "wait=1")
        .send(address)
        .expect_problem(409, "in-flight");
    gate.post("/charges", "k-1", "[]").expect_problem(422, "key-reused");
    signal.open();
    // Only in one process do those who wait get the answer of a release.
    for response in [first.join().unwrap(), waiter.join().unwrap()] {
        assert_eq!(response.expect(500, "released").text(), "released");
    }
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn leases_from_before_are_renewed_and_a_drain_waits_for_their_attempts() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let plan = Gate::before(&upstream).defaults("lease = \"6s\"");
    let gate = plan.start();
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    upstream.wait_for_runs(1);
    let lease = || gate.records("key=k-1")[0]["lease_until"].as_str().unwrap().to_owned();
    // Longer leases are looked at less often, and that one is short all the same.
    assert!(reload(&gate, &plan.clone().defaults("lease = \"60s\"")), "{}", gate.log());
    let start = Instant::now();
    let mut last = lease();
    for _ in 0..5 {
        last = eventually("another renewal", || Some(lease()).filter(|now| *now > last));
    }
    assert!(start.elapsed() > Duration::from_secs(6));
    assert_eq!(gate.states("k-1"), ["in-flight"]);
    gate.sigterm();
    eventually("unready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    signal.open();
    first.join().unwrap().expect(200, "executed");
    gate.stop().clone().start().post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn connections_to_an_upstream_that_stays_the_same_are_kept() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let mut client = Client::connect(gate.address);
    for number in 0..4 {
        client.send(Request::get("/").bytes());
        assert_eq!(client.response().status, 200);
        let plan = if number < 2 { plan.clone() } else { plan.clone().upstream("timeout = \"30s\"") };
        assert!(reload(&gate, &plan.defaults(&format!("ttl = \"{}h\"", number + 1))), "{}", gate.log());
    }
    assert_eq!(upstream.connections(), 2);
}

/// How many requests are in flight.
const MANY: usize = 500;

/// Sends them, three of four with a key; they are in flight, and held by the upstream.
fn many(gate: &Gate, upstream: &Upstream) -> Vec<JoinHandle<Response>> {
    let address = gate.address;
    let send = move |number| {
        move || match number % 4 {
            0 => Request::get(&format!("/{number}")).send(address),
            _ => Request::post(&format!("/{number}")).key(&format!("k-{number}")).body("{}").send(address),
        }
    };
    let sent = (0..MANY).map(|number| std::thread::spawn(send(number))).collect();
    upstream.wait_for_runs(MANY);
    sent
}

/// Holds that none is lost, and that none of those with a key ran twice.
fn none_is_lost(sent: Vec<JoinHandle<Response>>) {
    for (number, response) in sent.into_iter().enumerate() {
        let response = response.join().unwrap();
        response.expect(201, if number % 4 == 0 { "" } else { "executed" });
        assert_eq!(response.text(), "late");
    }
}

fn all_are_replayed(gate: &Gate, upstream: &Upstream) {
    for number in (0..MANY).filter(|number| number % 4 != 0) {
        gate.post(&format!("/{number}"), &format!("k-{number}"), "{}").expect(201, "replayed");
    }
    assert_eq!(upstream.runs(), MANY);
}

fn holding(signal: &Signal) -> Upstream {
    let held = signal.clone();
    Upstream::start(move |_| Reply::status("201 Created", "late").hold_until(&held))
}

#[test]
fn no_request_of_many_is_lost_in_a_reload() {
    let signal = Signal::new();
    let upstream = holding(&signal);
    let plan = Gate::before(&upstream);
    let gate = plan.start();
    let sent = many(&gate, &upstream);
    assert!(!reload(&gate, &plan.clone().defaults("ttl = \"0s\"")));
    let good = plan.clone().defaults("lease = \"5s\"\nmax_request_body = \"1KiB\"").upstream("timeout = \"50s\"");
    assert!(reload(&gate, &good), "{}", gate.log());
    assert_eq!(gate.metric("oncegate_attempts_in_flight", &[]), (MANY - MANY / 4) as f64);
    signal.open();
    none_is_lost(sent);
    all_are_replayed(&gate, &upstream);
}

#[test]
fn no_request_of_many_is_lost_at_the_end() {
    let signal = Signal::new();
    let upstream = holding(&signal);
    let mut gate = Gate::before(&upstream).start();
    let sent = many(&gate, &upstream);
    gate.sigterm();
    eventually("unready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    signal.open();
    none_is_lost(sent);
    let status = gate.wait();
    assert!(status.success(), "{status}");
    all_are_replayed(&gate.plan.clone().start(), &upstream);
}

/// With `--watch`, a file that changes is a reload. One with a problem changes nothing, and is not tried again as it is.
#[test]
fn a_file_that_is_watched_is_read_again() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).arg("--watch");
    let gate = plan.start();
    let reloads = || messages(&gate).into_iter().filter(|message| ENDED.contains(&&**message)).collect::<Vec<_>>();
    plan.clone().defaults("max_request_body = \"1B\"").config();
    eventually("a reload", || (reloads() == [ENDED[0]]).then_some(()));
    gate.post("/charges", "k-1", "{}").expect_problem(413, "request-too-large");
    plan.clone().defaults("max_request_body = 1.5").config();
    eventually("a refusal", || (reloads().len() == 2).then_some(()));
    assert_eq!(gate.metric(LAST, &[]), 0.0);
    plan.config();
    eventually("another reload", || (reloads().len() == 3).then_some(()));
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
}
