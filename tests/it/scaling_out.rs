//! One store over several PostgreSQL servers: each has its own keys, and answers for them alone.

mod moving;

use std::time::Duration;

use serde_json::{Value, json};

use crate::migrate::{done, refused};
use crate::servers::Postgres;
use crate::support::{Awake, Gate, Plan, Reply, Upstream, eventually};

/// Servers, and the URL of a database on each: not of one list yet.
pub fn servers(count: usize) -> Option<(Vec<Postgres>, Vec<String>)> {
    let servers: Option<Vec<Postgres>> = (0..count).map(|_| Postgres::start()).collect();
    let servers = servers?;
    let urls = servers.iter().map(|server| server.url("postgres")).collect();
    Some((servers, urls))
}

/// `flag URL` for each of some databases.
pub fn named<'a>(flag: &'a str, urls: &[&'a str]) -> Vec<&'a str> {
    urls.iter().flat_map(|url| [flag, url]).collect()
}

fn refs(urls: &[String]) -> Vec<&str> {
    urls.iter().map(String::as_str).collect()
}

/// A gate whose store is in these databases.
pub fn over(plan: Plan, urls: &[&str]) -> Plan {
    named("--store", urls).iter().fold(plan, |plan, arg| plan.arg(arg))
}

fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

fn count(server: &Postgres) -> usize {
    server.session().value("SELECT count(*) FROM oncegate.record").parse().expect("a number")
}

#[track_caller]
fn refusal(plan: &Plan) -> String {
    let mut process = plan.spawn();
    assert_eq!(process.wait().code(), Some(1), "{}", process.log());
    process.log()
}

#[test]
fn a_server_that_is_killed_costs_its_own_keys() {
    let Some((servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let said = done(&named("--store", &urls));
    assert!(said.ends_with("3 databases are one store now\n"), "{said}");
    assert!(done(&named("--store", &urls)).ends_with("3 databases are one store\n"));
    let upstream = numbered();
    let plan = over(Gate::before(&upstream), &urls);
    let gate = plan.start();
    for key in 0..60 {
        gate.post("/charges", &format!("before-{key}"), "{}").expect(200, "executed");
    }
    let counts: Vec<usize> = servers.iter().map(count).collect();
    assert!(counts.iter().sum::<usize>() == 60 && counts.iter().all(|count| *count >= 5), "{counts:?}");
    assert_eq!(gate.admin("GET", "/readyz", None).json(), serde_json::json!({ "status": "ready" }));
    let listed = gate.records("limit=100");
    assert_eq!(listed.len(), 60);
    let times: Vec<&Value> = listed.iter().map(|record| &record["claimed_at"]).collect();
    assert!(times.is_sorted_by(|one, next| one.as_str() >= next.as_str()), "{times:?}");
    assert_eq!(pages(&gate), 60);

    servers[1].kill9();
    eventually("it is known to be away", || {
        // On a busy machine no database may answer within the time that readiness has.
        let ready = gate.admin("GET", "/readyz", None);
        let away = ready.json()["away"].as_array().cloned().unwrap_or_default();
        let expected = format!("{}/postgres", servers[1].address());
        let stats = gate.admin("GET", "/api/v1/stats", None).json();
        (ready.status == 200 && away == [Value::from(&*expected)] && stats["store"]["away"] == ready.json()["away"])
            .then_some(())
    });
    assert_eq!(gate.metric("oncegate_store_database_up", &[&servers[1].address().to_string()]), 0.0);
    assert_eq!(gate.metric("oncegate_store_database_up", &[&servers[0].address().to_string()]), 1.0);
    expect_away(&gate, &upstream, "during", counts[1]);
    // A gate that starts now serves the others as well.
    let late = over(Gate::before(&upstream), &urls).start();
    expect_away(&late, &upstream, "late", counts[1]);
    // What looks at all records does not leave out a third of them without a word.
    assert_eq!(gate.admin("GET", "/api/v1/records", None).status, 503);

    servers[1].start_again();
    for gate in [&gate, &late] {
        eventually("it is back", || {
            let all: Vec<u16> =
                (0..60).map(|key| gate.post("/charges", &format!("before-{key}"), "{}").status).collect();
            all.iter().all(|status| *status == 200).then_some(())
        });
        eventually("that is known", || (gate.admin("GET", "/readyz", None).json()["away"].is_null()).then_some(()));
    }
    for key in 0..60 {
        assert_eq!(upstream.runs_of(&format!("before-{key}")), 1);
    }
}

/// Lists everything in small pages.
fn pages(gate: &Gate) -> usize {
    let (mut seen, mut cursor) = (std::collections::HashSet::new(), String::new());
    loop {
        let page = gate.admin("GET", &format!("/api/v1/records?limit=7{cursor}"), None).json();
        for record in page["records"].as_array().expect("records") {
            assert!(seen.insert(record["id"].to_string()), "twice: {record}");
        }
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return seen.len(),
        }
    }
}

/// Holds that the keys of one server are refused, in time, and all others served, old and new.
#[track_caller]
fn expect_away(gate: &Gate, upstream: &Upstream, name: &str, of_it: usize) {
    let (mut refused, mut slowest, awake) = (0, Duration::ZERO, Awake::start());
    for key in 0..60 {
        let asked = awake.elapsed();
        let answer = gate.post("/charges", &format!("before-{key}"), "{}");
        slowest = slowest.max(awake.elapsed() - asked);
        match answer.status {
            503 => refused += usize::from(answer.expect_problem(503, "store-unavailable").status == 503),
            _ => drop(answer.expect(200, "replayed")),
        }
    }
    assert!(refused <= of_it, "{refused} refused of {of_it}");
    let mut new = 0;
    for key in 0..60 {
        let key = format!("{name}-{key}");
        let asked = awake.elapsed();
        let answer = gate.post("/charges", &key, "{}");
        slowest = slowest.max(awake.elapsed() - asked);
        new += usize::from(answer.status == 200);
        assert_eq!(upstream.runs_of(&key), usize::from(answer.status == 200), "{}", answer.show());
    }
    assert!((25..60).contains(&new), "{new} of 60 new keys were served");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
}

/// One that hangs is worse than one that is gone: it takes connections and statements, and answers none.
#[test]
fn a_server_that_hangs_holds_up_no_other() {
    let Some((servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    done(&named("--store", &urls));
    let upstream = Upstream::start(|request| {
        Reply::ok("x").delay(Duration::from_millis(if request.key().is_some_and(|key| key.starts_with("long")) {
            4000
        } else {
            0
        }))
    });
    let gate = over(Gate::before(&upstream).defaults("lease = \"1s\""), &urls).start();
    let address = gate.address;
    // Their leases are renewed four times while the server hangs.
    let long: Vec<_> = (0..12)
        .map(|key| {
            let request = crate::support::Request::post("/charges").key(&format!("long-{key}")).body("{}");
            std::thread::spawn(move || request.send(address))
        })
        .collect();
    upstream.wait_for_runs(12);
    servers[2].hang();
    let mut slow = 0;
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..60)
            .map(|key| {
                let gate = &gate;
                scope.spawn(move || {
                    let asked = Awake::start();
                    let answer = gate.post("/charges", &format!("new-{key}"), "{}");
                    (answer.status, asked.elapsed())
                })
            })
            .collect();
        for asked in asked {
            let (status, took) = asked.join().expect("an answer");
            slow += usize::from(status == 503);
            assert!(status == 503 || took < Duration::from_secs(3), "{status} after {took:?}");
        }
    });
    assert!((5..40).contains(&slow), "{slow} of 60 are refused");
    let answers: Vec<_> = long.into_iter().map(|long| long.join().expect("an answer")).collect();
    let executed = answers.iter().filter(|answer| answer.word() == "executed").count();
    assert!(executed >= 4, "{executed} of 12 kept their leases");
    // What would change many records is refused at once, and says for which server.
    for (is_dry_run, reason) in [(true, ""), (false, "a test")] {
        let (asked, body) = (Awake::start(), json!({"all": true, "dry_run": is_dry_run, "reason": reason}));
        let refused = gate.admin("POST", "/api/v1/records/purge", Some(&body));
        let said = refused.json()["detail"].to_string();
        assert!(
            refused.status == 503 && said.contains("does not answer") && said.contains("nothing was changed"),
            "{said}"
        );
        assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    }
    servers[2].go_on();
    eventually("it goes on", || (gate.admin("GET", "/readyz", None).json()["away"].is_null()).then_some(()));
    let purged =
        gate.admin("POST", "/api/v1/records/purge", Some(&json!({"filter": {"state": "completed"}, "dry_run": true})));
    assert_eq!(purged.status, 200);
    // Those of the others are recorded, and none ran twice.
    for key in 0..12 {
        assert_eq!(upstream.runs_of(&format!("long-{key}")), 1);
    }
}

#[test]
fn a_gate_with_another_list_is_refused() {
    let Some((_servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let [a, b, c] = urls[..] else { unreachable!() };
    done(&named("--store", &[a, b]));
    let upstream = numbered();
    let gate = |urls: &[&str]| over(Gate::before(&upstream), urls);
    let name = |url: &str| url.split_once('@').expect("a user").1.to_owned();
    let twice = a.strip_suffix("/postgres").expect("its name");
    for (list, said) in [
        (
            vec![b, a],
            format!("{} says that it is number 2 of 2 databases, and [store] url names it as number 1 of 2", name(b)),
        ),
        (vec![a], "says that it is number 1 of 2 databases, and [store] url names it as number 1 of 1".to_owned()),
        (vec![a, b, c], format!("{}: the database has no schema", name(c))),
        (vec![a, twice], "are the same database".to_owned()),
    ] {
        let log = refusal(&gate(&list));
        assert!(log.contains(&said), "{said}: {log}");
        assert!(!log.contains("postgres@"), "{log}");
    }
    assert!(refused(&named("--store", &[b, a]), 1).contains("every gate needs the same databases in the same order"));
    // A store by itself, with records: they would be forgotten.
    done(&["--store", c]);
    let alone = Gate::before(&upstream).arg("--store").arg(c).start();
    alone.post("/charges", "k", "{}").expect(200, "executed");
    alone.stop();
    let log = refusal(&gate(&[c, a]));
    assert!(
        log.contains("says that it is a store by itself") && log.contains("oncegate migrate --from OLD --to NEW"),
        "{log}"
    );
    gate(&[a, b]).start().post("/charges", "k", "{}").expect(200, "executed");
}

#[test]
fn a_list_can_stand_in_the_environment() {
    let Some((servers, urls)) = servers(2) else { return };
    let urls = refs(&urls);
    done(&named("--store", &urls));
    let upstream = numbered();
    let list = format!("[\"{}\", \"{}\"]", urls[0], urls[1]);
    let gate = Gate::before(&upstream).env("ONCEGATE_STORE__URL", list).start();
    for key in 0..20 {
        gate.post("/charges", &format!("k-{key}"), "{}").expect(200, "executed");
    }
    assert!(servers.iter().all(|server| count(server) > 0));
}
