//! Records that move to another number of databases while gates serve: nothing runs twice, whoever dies meanwhile.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::{named, numbered, over, pages, refs, refusal, servers};
use crate::migrate::{command, done, refused};
use crate::servers::Postgres;
use crate::storm::Storm;
use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

/// `--from URL... --to URL...`.
fn lists<'a>(from: &[&'a str], to: &[&'a str]) -> Vec<&'a str> {
    let mut args = named("--from", from);
    args.extend(named("--to", to));
    args
}

fn begin(args: &[&str]) -> Child {
    let mut command = command(args);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
}

/// Holds that each server has the records of its place, of so many, and nothing else.
#[track_caller]
fn expect_in_place(servers: &[&Postgres]) {
    for (place, server) in servers.iter().enumerate() {
        let session = server.session();
        let own =
            "EXISTS (SELECT FROM oncegate.owned o WHERE r.id >= o.first AND (o.beyond IS NULL OR r.id < o.beyond))";
        assert_eq!(session.value(&format!("SELECT count(*) FROM oncegate.record r WHERE NOT {own}")), "0", "{place}");
        assert_ne!(session.value("SELECT count(*) FROM oncegate.record"), "0", "{place}");
        assert_eq!(session.value("SELECT count(*) FROM oncegate.owned"), "1", "{place}");
        for table in ["outgoing_record", "outgoing_delivery"] {
            assert_eq!(session.value(&format!("SELECT count(*) FROM oncegate.{table}")), "0", "{place}");
        }
    }
}

#[test]
fn nothing_runs_twice_whoever_is_killed() {
    let Some((servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let (two, three) = (&urls[..2], &urls[..]);
    done(&named("--store", two));
    let storm = Storm::over(three);
    let mut gates: Vec<Option<Gate>> = storm.start(3, |plan| over(plan, two)).into_iter().map(Some).collect();
    let places = std::sync::Arc::clone(&storm.gates);
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let before_url = storm.upstream.url();
    let restart = |gates: &mut Vec<Option<Gate>>, victim: usize| {
        gates[victim].take().expect("a gate").kill9();
        places.lock().unwrap()[victim] = None;
        let policy = "lease = \"1s\"\nin_flight = { wait = \"700ms\" }";
        let gate = over(Gate::before_url(&before_url).defaults(policy), three).start();
        places.lock().unwrap()[victim] = Some(gate.address);
        gates[victim] = Some(gate);
    };
    let args = lists(two, three);
    let (mut step, mut movers, mut is_over) = (0, 0, false);
    storm.rage(Duration::from_secs(20), || {
        std::thread::sleep(Duration::from_millis(random.u64(100..500)));
        match step {
            0 => {}
            1 => assert!(done(&[&args[..], &["--prepare"]].concat()).contains("restart the gates with the next list")),
            // One gate stays with the former list for as long as it can.
            2 | 3 => restart(&mut gates, step - 2),
            _ if is_over => {}
            _ => {
                let mut mover = begin(&args);
                movers += 1;
                let patience = Duration::from_millis(random.u64(30..700) * (1 + movers / 8));
                let began = Instant::now();
                while began.elapsed() < patience {
                    if let Some(status) = mover.try_wait().expect("a process") {
                        assert!(status.success(), "{status}");
                        is_over = true;
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                mover.kill().expect("a process");
                mover.wait().expect("a process");
                if random.bool() {
                    restart(&mut gates, random.usize(..2));
                }
            }
        }
        step += 1;
    });
    eprintln!("{movers} movers, over: {is_over}");
    done(&args);
    restart(&mut gates, 2);
    assert!(movers >= 3, "{movers} movers");
    expect_in_place(&servers.iter().collect::<Vec<_>>());
    let seen = storm.judge();
    seen.expect_right();
    // A gate of the former list does not start any more.
    let upstream = numbered();
    let log = refusal(&over(Gate::before(&upstream), two));
    assert!(log.contains("says that it is number 1 of 3 databases"), "{log}");
    assert!(done(&args).contains("nothing to move"));
}

#[test]
fn a_store_by_itself_becomes_one_of_two_and_attempts_end_where_they_are() {
    let Some((servers, urls)) = servers(2) else { return };
    let urls = refs(&urls);
    let (one, two) = (&urls[..1], &urls[..]);
    done(&named("--store", one));
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key() {
        Some(key) if key.starts_with("held") => Reply::ok(key).hold_until(&held),
        _ => Reply::ok(format!("run {}", request.nth)),
    });
    let former = over(Gate::before(&upstream), one).start();
    let first: Vec<_> = (0..40).map(|key| former.post("/charges", &format!("k-{key}"), "{}")).collect();
    let address = former.address;
    let running: Vec<_> = (0..8)
        .map(|key| {
            let request = Request::post("/charges").key(&format!("held-{key}")).body("{}");
            std::thread::spawn(move || request.send(address))
        })
        .collect();
    upstream.wait_for_runs(48);
    let args = lists(one, two);
    done(&[&args[..], &["--prepare"]].concat());
    let next = over(Gate::before(&upstream), two).start();
    let mut mover = begin(&args);
    // What has no attempt moves; the gate that knows both finds it in its new place, the former one no more.
    eventually("records come", || (super::count(&servers[1]) > 10).then_some(()));
    assert!(mover.try_wait().expect("a process").is_none(), "attempts are waited for");
    for (key, first) in first.iter().enumerate() {
        eventually("it is served", || {
            let again = next.post("/charges", &format!("k-{key}"), "{}");
            (again.status != 503).then(|| first.expect_repeated_by(&again))
        });
    }
    signal.open();
    for (key, running) in running.into_iter().enumerate() {
        let answer = running.join().expect("an answer");
        answer.expect(200, "executed");
        eventually("it is served", || {
            let again = next.post("/charges", &format!("held-{key}"), "{}");
            (again.status != 503).then(|| answer.expect_repeated_by(&again))
        });
    }
    assert!(mover.wait().expect("a process").success());
    expect_in_place(&servers.iter().collect::<Vec<_>>());
    assert_eq!(upstream.runs(), 48);
    // A gate that knows the first database alone refuses what is not there, and runs nothing.
    let answers: Vec<u16> = (0..40).map(|key| former.post("/charges", &format!("k-{key}"), "{}").status).collect();
    assert!(answers.contains(&200) && answers.contains(&503), "{answers:?}");
    assert_eq!(upstream.runs(), 48);
    assert_eq!(pages(&next), 48);
}

#[test]
fn a_database_is_given_up() {
    let Some((servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let (two, three) = (&urls[..2], &urls[..]);
    done(&named("--store", three));
    let upstream = numbered();
    // It knows all of them, so it serves on.
    let former = over(Gate::before(&upstream), three).start();
    for key in 0..60 {
        former.post("/charges", &format!("k-{key}"), "{}").expect(200, "executed");
    }
    let records = former.records("limit=3");
    for record in &records {
        let id = record["id"].as_str().expect("an id");
        assert!((200..300).contains(&former.admin("DELETE", &format!("/api/v1/records/{id}"), None).status));
    }
    let audited = former.admin("GET", "/api/v1/audit", None).json()["entries"].as_array().map(Vec::len);
    assert_eq!(audited, Some(3));
    done(&lists(three, two));
    expect_in_place(&servers[..2].iter().collect::<Vec<_>>());
    assert_eq!(super::count(&servers[2]), 0);
    let next = over(Gate::before(&upstream), two).start();
    for gate in [&former, &next] {
        let mut again = 0;
        for key in 0..60 {
            let answer = eventually("it is served", || {
                let answer = gate.post("/charges", &format!("k-{key}"), "{}");
                (answer.status == 200).then_some(answer)
            });
            again += usize::from(answer.word() == "executed");
        }
        assert!(again <= 3, "{again} ran again, and three were purged");
    }
    assert_eq!(upstream.runs(), 63);
    assert_eq!(next.admin("GET", "/api/v1/audit", None).json()["entries"].as_array().map(Vec::len), audited);
    let log = refusal(&over(Gate::before(&upstream), three));
    assert!(log.contains("says that it is"), "{log}");
}

/// It has no request with a key, so that no database refuses it anything.
#[test]
fn a_gate_that_heard_of_no_move_lists_no_part_of_the_records() {
    let Some((_servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let (two, three) = (&urls[..2], &urls[..]);
    done(&named("--store", two));
    let upstream = numbered();
    let former = over(Gate::before(&upstream), two).start();
    for key in 0..40 {
        former.post("/charges", &format!("k-{key}"), "{}").expect(200, "executed");
    }
    assert_eq!(pages(&former), 40);
    done(&lists(two, three));
    assert_eq!(former.admin("GET", "/api/v1/records", None).status, 503);
    let next = over(Gate::before(&upstream), three).start();
    assert_eq!(pages(&next), 40);
    // It hears of the way back no more than of the way there.
    done(&lists(three, two));
    assert_eq!(pages(&next), 40);
    // What lacks a database looks by itself.
    eventually("it looks again", || (former.admin("GET", "/api/v1/records", None).status == 200).then_some(()));
    assert_eq!(pages(&former), 40);
}

#[test]
fn lists_that_are_not_what_the_databases_say_move_nothing() {
    let Some((_servers, urls)) = servers(3) else { return };
    let urls = refs(&urls);
    let [a, b, c] = urls[..] else { unreachable!() };
    done(&named("--store", &[a, b]));
    for args in [lists(&[a], &[a, b, c]), lists(&[b, a], &[a, b, c]), lists(&[a, b, c], &[a, b])] {
        let said = refused(&args, 1);
        assert!(said.contains("hint"), "{said}");
    }
    done(&[&lists(&[a, b], &[a, b, c])[..], &["--prepare"]].concat());
    let said = refused(&lists(&[a, b], &[a, c]), 1);
    assert!(said.contains("a move that was begun goes on with the same two lists"), "{said}");
}
