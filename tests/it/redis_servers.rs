//! The Redis servers that tests run on: alone, encrypted, as a cluster, watched by Sentinels. They start, stop and fail as
//! told.

use std::process::Command;
use std::time::Duration;

use crate::servers::{Cluster, Redis, Reply, Sentinels};
use crate::support::eventually;

fn ok() -> Reply {
    Reply::Status("OK".into())
}

fn bytes(value: &str) -> Reply {
    Reply::Bytes(value.into())
}

#[test]
fn a_server_keeps_what_it_appended_through_every_end() {
    let Some(redis) = Redis::start() else { return };
    for (nth, end) in [rustix::process::Signal::KILL, rustix::process::Signal::TERM].into_iter().enumerate() {
        assert_eq!(redis.ask(&["INCR", "n"]).number(), i64::try_from(nth).unwrap() + 1);
        redis.end(end);
        assert!(redis.try_session().is_err() && !redis.is_running());
        redis.begin();
    }
    assert_eq!(redis.ask(&["GET", "n"]), bytes("2"));
    redis.hang();
    let (send, asked) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| send.send(redis.ask(&["GET", "n"])));
        assert!(asked.recv_timeout(Duration::from_millis(300)).is_err(), "it hangs");
        redis.go_on();
        assert_eq!(asked.recv().unwrap(), bytes("2"));
    });
    // One that keeps nothing, and one that hangs is ended too.
    let Some(redis) = Redis::with(&[]) else { return };
    assert_eq!(redis.ask(&["SET", "a", "1"]), ok());
    redis.hang();
    redis.kill9();
    redis.begin();
    assert_eq!(redis.ask(&["GET", "a"]), Reply::Nothing);
}

#[test]
fn a_server_asks_for_its_password() {
    let Some(redis) = Redis::with(&[("requirepass", "s3cret")]) else { return };
    assert_eq!(redis.url(), format!("redis://:s3cret@{}", redis.address()));
    assert!(redis.run("PING").unwrap().starts_with("-NOAUTH"));
    assert_eq!(redis.ask(&["PING"]), Reply::Status("PONG".into()));
    let wrong = crate::servers::Connection::open(redis.address(), Some("wr0ng"));
    assert!(wrong.is_err_and(|error| error.to_string().contains("WRONGPASS")));
}

#[test]
fn a_dump_is_what_a_server_held_then() {
    let Some(redis) = Redis::with(&[]) else { return };
    redis.ask(&["SET", "kept", "old", "PX", "60000"]);
    redis.ask(&[&b"SET"[..], b"\xff\r\n", b"\0\r\n$5"]);
    redis.ask(&["RPUSH", "list", "1", "2"]);
    let dump = redis.dump();
    assert_eq!(dump.len(), 3);
    redis.ask(&["SET", "kept", "new"]);
    redis.ask(&["SET", "later", "1"]);
    redis.restore(&dump);
    let mut names = redis.names();
    names.sort();
    assert_eq!(names, [&b"kept"[..], b"list", b"\xff\r\n"]);
    assert_eq!((redis.ask(&["GET", "kept"]), redis.ask(&["PTTL", "kept"]).number()), (bytes("old"), -1));
    assert_eq!(redis.ask(&[&b"GET"[..], b"\xff\r\n"]), Reply::Bytes(b"\0\r\n$5".to_vec()));
    assert_eq!(redis.ask(&["LRANGE", "list", "0", "-1"]), Reply::List(vec![bytes("1"), bytes("2")]));
    assert_eq!(redis.calls()["restore"], 3);
    assert!(matches!(redis.ask(&["GET", "list"]), Reply::Error(error) if error.starts_with("WRONGTYPE")));
}

#[test]
fn a_server_that_encrypts_wants_to_see_a_certificate() {
    let Some(redis) = Redis::encrypting(&[("requirepass", "s3cret")]) else { return };
    assert!(redis.url().starts_with(&format!("rediss://:s3cret@{}?cacert=/", redis.address())), "{}", redis.url());
    assert_eq!(redis.ask(&["SET", "a", "1"]), ok());
    assert!(crate::servers::Connection::open(redis.address(), Some("s3cret")).is_err(), "it speaks TLS only");
    let sees = |root: &str, certificate: Option<&str>| {
        let mut command = Command::new("openssl");
        let address = redis.address().to_string();
        command.args(["s_client", "-connect", &address, "-verify_return_error", "-CAfile", &redis.file(root)]);
        if let Some(name) = certificate {
            let (certificate, key) = (redis.file(&format!("{name}.pem")), redis.file(&format!("{name}.key")));
            command.args(["-cert", &certificate, "-key", &key]);
        }
        let input = redis.directory().join("asked");
        std::fs::write(&input, "AUTH s3cret\r\nGET a\r\nQUIT\r\n").unwrap();
        let output = command.arg("-ign_eof").stdin(std::fs::File::open(input).unwrap()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).contains("$1\r\n1\r\n")
    };
    assert!(sees("ca.pem", Some("client")));
    assert!(!sees("ca.pem", None));
    assert!(!sees("ca.pem", Some("stranger")));
    assert!(!sees("other.pem", Some("client")));
}

#[test]
fn a_cluster_serves_all_slots_until_a_node_is_killed() {
    let Some(cluster) = Cluster::start() else { return };
    assert_eq!(cluster.nodes().count(), 3);
    assert!(cluster.url().starts_with("redis://127.") && cluster.url().ends_with("?cluster=true"));
    for key in ["a", "b", "c", "d"] {
        let shard = cluster.shard_of(key.as_bytes());
        for other in 0..3 {
            let said = cluster.shard(other)[0].ask(&["SET", key, "1"]);
            let moved = matches!(&said, Reply::Error(error) if error.starts_with("MOVED"));
            assert!(if other == shard { said == ok() } else { moved }, "{other} is asked for {key}: {said:?}");
        }
    }
    cluster.shard(1)[0].kill9();
    let first = &cluster.shard(0)[0];
    eventually("the others notice", || {
        first.ask(&["CLUSTER", "INFO"]).text().contains("cluster_state:fail").then_some(())
    });
    cluster.shard(1)[0].begin();
    cluster.wait_until_ok();
    let key = ["a", "b", "c", "d"].into_iter().find(|key| cluster.shard_of(key.as_bytes()) == 1).expect("b or d");
    assert_eq!(cluster.primary(1).unwrap().ask(&["GET", key]), bytes("1"));
}

#[test]
fn a_replica_takes_the_place_of_a_killed_node() {
    let Some(cluster) = Cluster::with(1, &[("requirepass", "s3cret")]) else { return };
    assert_eq!(cluster.nodes().count(), 6);
    // A replica that has not heard of a new epoch of its primary is never elected in its place.
    for shard in 0..3 {
        let said = cluster.primary(shard).expect("a primary").ask(&["CLUSTER", "INFO"]).text();
        assert!(said.contains(&format!("cluster_my_epoch:{}\r\n", shard + 1)), "shard {shard}: {said}");
    }
    let key = b"a";
    let shard = cluster.shard_of(key);
    let primary = cluster.primary(shard).expect("a primary");
    let mut session = primary.session();
    assert_eq!(session.ask(&[&b"SET"[..], key, b"1"]).unwrap(), ok());
    assert_eq!(session.ask(&["WAIT", "1", "5000"]).unwrap(), Reply::Number(1));
    cluster.fail_over(shard);
    let other = cluster.primary(shard).expect("another primary");
    assert_ne!(other.address(), primary.address());
    assert_eq!(other.ask(&[&b"GET"[..], key]), bytes("1"));
    primary.begin();
    cluster.wait_until_ok();
    assert_eq!(primary.info("replication", "role").as_deref(), Some("slave"));
}

#[test]
fn sentinels_put_the_replica_in_the_place_of_a_killed_primary() {
    for settings in [&[("appendonly", "yes")][..], &[("requirepass", "s3cret")]] {
        let Some(all) = Sentinels::with(settings, true) else { return };
        let is_guarded = settings[0].0 == "requirepass";
        assert!(all.url().ends_with(if is_guarded {
            "?sentinel=records&sentinel_auth=true"
        } else {
            "?sentinel=records"
        }));
        assert_eq!(all.primary().ask(&["SET", "a", "1"]), ok());
        all.wait_until_copied();
        let killed = all.kill_primary();
        all.wait_for_failover(killed);
        assert_ne!(all.primary().address(), killed.address());
        assert_eq!(all.primary().ask(&["GET", "a"]), bytes("1"));
        assert_eq!(all.primary().ask(&["SET", "a", "2"]), ok());
    }
}
