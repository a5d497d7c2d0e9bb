//! As many clients as the system allows open files: the others have theirs all the same.

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::support::{Client, Gate, Reply, Request, Upstream, eventually};

/// How many files the gate may have open.
const FILES: u64 = 256;

fn files(gate: &Gate) -> u64 {
    std::fs::read_dir(format!("/proc/{}/fd", gate.pid())).unwrap().count() as u64
}

/// Readiness asks the store, which a busy machine may keep waiting for longer than a probe does.
fn becomes_ready(gate: &Gate) {
    eventually("readiness", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
}

#[test]
fn idle_clients_leave_files_to_health_the_store_and_upstreams() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).files(FILES).start();
    eventually("a word on it", || gate.log().contains("max_connections is lowered").then_some(()));
    let mut client = Client::connect(gate.address);
    client.send(Request::get("/").bytes());
    assert_eq!(client.response().status, 200);
    let crowd: Vec<Client> = (0..2 * FILES).map(|_| Client::connect(gate.address)).collect();
    eventually("a crowd that has all the places there are", || {
        (gate.metric("oncegate_limit_exceeded_total", &["limit=\"max_connections\""]) > 0.0).then_some(())
    });
    let connected = gate.metric("oncegate_connections", &[]);
    assert!((32.0..200.0).contains(&connected), "{connected} clients are connected");
    assert_eq!(gate.admin("GET", "/livez", None).status, 200);
    becomes_ready(&gate);
    client.send(Request::post("/x").key("k").body("{}").bytes());
    client.response().expect(200, "executed");
    drop(crowd);
    eventually("places", || (Request::get("/").try_send(gate.address)?.status == 200).then_some(()));
}

#[test]
fn health_is_answered_when_no_file_is_left() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let (pid, few) = (Pid::from_raw(i32::try_from(gate.pid()).unwrap()), files(&gate) + 4);
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(few), maximum: Some(few) }).unwrap();
    let crowd: Vec<Client> = (0..40).map(|_| Client::connect(gate.address)).collect();
    eventually("a gate that is short of files", || gate.log().contains("accepting a connection failed").then_some(()));
    for _ in 0..20 {
        assert_eq!(gate.admin("GET", "/livez", None).status, 200);
    }
    becomes_ready(&gate);
    drop(crowd);
}
