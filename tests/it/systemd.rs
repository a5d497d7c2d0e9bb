//! What a service manager does: it passes sockets, restarts in place, and is told how the process does.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::gate::Plan;
use crate::support::{Client, Gate, Process, Reply, Request, Signal, Upstream, eventually, store, wait::PATIENCE};

fn socket() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

#[test]
fn inherited_sockets_are_served() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let (http, admin) = (socket(), socket());
    let (address, admin_address) = (http.local_addr().unwrap(), admin.local_addr().unwrap());
    let plan = Gate::before(&upstream).inherits("http", http).inherits("admin", admin);
    let gate = plan.server("listen = \"systemd\"").admin("listen = \"systemd:admin\"").start();
    assert_eq!((gate.address, gate.admin), (address, admin_address));
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    assert_eq!(gate.admin("GET", "/readyz", None).status, 200);
    gate.stop();
}

#[test]
fn a_socket_that_was_not_passed_is_said() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream);
    for plan in [
        plan.clone().server("listen = \"systemd\""),
        plan.clone().server("listen = \"systemd:http\"").inherits("web", socket()),
        plan.clone().admin("listen = \"systemd:http\"").inherits("web", socket()),
    ] {
        let mut process = plan.spawn();
        assert_eq!(process.wait().code(), Some(1), "{}", process.log());
        assert!(process.log().contains("no such socket was passed"), "{}", process.log());
    }
    // One that is passed and that nobody takes is worth a word.
    let gate = plan.inherits("web", socket()).start();
    assert!(gate.log().contains("a socket was passed that no `listen` names"), "{}", gate.log());
}

#[test]
fn an_inherited_admin_socket_that_all_can_reach_needs_a_token() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).inherits("admin", TcpListener::bind("0.0.0.0:0").unwrap());
    let mut process = plan.admin("listen = \"systemd:admin\"").spawn();
    assert_eq!(process.wait().code(), Some(1), "{}", process.log());
    assert!(process.log().contains("needs a token"), "{}", process.log());
}

/// Clients that send one request after the other, each with a key and a connection of its own.
struct Load {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(address: std::net::SocketAddr) -> Self {
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let client = |_| {
            let (stop, sent) = (Arc::clone(&stop), Arc::clone(&sent));
            std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let key = format!("k-{}", sent.fetch_add(1, Ordering::SeqCst));
                    let request = Request::post("/charges").key(&key).body("{}");
                    // Who connects and says nothing for a while is not waited for at the end.
                    let began = Instant::now();
                    let mut client = Client::connect(address);
                    let is_sent = client.wire.send(&request.bytes()).is_ok();
                    let took = began.elapsed();
                    let answer = client.try_response("POST").filter(|_| is_sent);
                    let answer = match answer {
                        None if took > Duration::from_millis(150) => request.send(address),
                        answer => answer.expect("an answer"),
                    };
                    answer.expect(201, "executed");
                }
            })
        };
        let clients = (0..4).map(client).collect();
        Self { stop, sent, clients }
    }

    /// Waits for as many requests again as were sent so far, and a few.
    fn go_on(&self) {
        let more = self.sent.load(Ordering::SeqCst) + 40;
        eventually("more requests", || (self.sent.load(Ordering::SeqCst) >= more).then_some(()));
    }

    /// Holds that each of them had its answer, and returns how many there were.
    fn end(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        self.clients.into_iter().for_each(|client| client.join().unwrap());
        self.sent.load(Ordering::SeqCst)
    }
}

fn served(process: &Process) {
    assert!(process.address("listening").is_some(), "{}", process.log());
}

#[test]
fn a_restart_under_load_loses_no_request_and_runs_no_key_twice() {
    let upstream = Upstream::start(|_| Reply::status("201 Created", "x").delay(Duration::from_millis(5)));
    let http = socket();
    let address = http.local_addr().unwrap();
    let plan = Gate::before(&upstream).server("listen = \"systemd\"").inherits("http", http);
    let mut before = plan.spawn();
    served(&before);
    let load = Load::start(address);
    load.go_on();
    // One after the other: meanwhile requests wait in the socket's queue.
    for _ in 0..2 {
        before.signal(rustix::process::Signal::TERM);
        assert!(before.wait().success(), "{}", before.log());
        before = plan.spawn();
        served(&before);
        load.go_on();
    }
    // Beside each other: where the store is for one process, the next one waits for it.
    for _ in 0..2 {
        let mut after = plan.spawn();
        if store::kind() == "sqlite" {
            let waits = |line: &str| line.contains("another process holds the store").then_some(());
            assert!(after.wait_for_log(waits).is_some(), "{}", after.log());
            let admin = after.address("admin listening").unwrap();
            assert_eq!(Request::get("/readyz").send(admin).status, 503);
        } else {
            served(&after);
        }
        load.go_on();
        before.signal(rustix::process::Signal::TERM);
        assert!(before.wait().success(), "{}", before.log());
        served(&after);
        load.go_on();
        std::mem::swap(&mut before, &mut after);
    }
    let sent = load.end();
    assert_eq!(upstream.runs(), sent);
    for number in 0..sent {
        let key = format!("k-{number}");
        Request::post("/charges").key(&key).body("{}").send(address).expect(201, "replayed");
    }
    assert_eq!(upstream.runs(), sent);
}

#[test]
fn a_successor_waits_for_the_admin_address_of_one_that_drains() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let admin = format!("listen = \"{}\"", Upstream::free_address());
    let mut before = Gate::before(&upstream).admin(&admin).start();
    let address = before.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    upstream.wait_for_runs(1);
    before.sigterm();
    eventually("unready", || (before.admin("GET", "/readyz", None).status == 503).then_some(()));
    let after = before.plan.spawn();
    let waits = |line: &str| line.contains("an oncegate that drains has the admin address").then_some(());
    assert!(after.wait_for_log(waits).is_some(), "{}", after.log());
    signal.open();
    first.join().unwrap().expect(200, "executed");
    assert!(before.wait().success());
    let address = after.address("listening").expect("it takes over");
    Request::post("/charges").key("k-1").body("{}").send(address).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_admin_address_that_something_else_has_is_not_waited_for() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    // One that never answers, and a gate that does not drain.
    let silent = socket();
    let gate = Gate::before(&upstream).start();
    for address in [silent.local_addr().unwrap(), gate.admin] {
        let began = Instant::now();
        let mut process = Gate::before(&upstream).admin(&format!("listen = \"{address}\"")).spawn();
        assert_eq!(process.wait().code(), Some(1), "{}", process.log());
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
        assert!(process.log().contains(&format!("cannot listen on {address}")), "{}", process.log());
    }
}

/// Who hears what the process says of itself.
struct ServiceManager(UnixDatagram);

impl ServiceManager {
    /// The next message that has a line that begins like this.
    #[track_caller]
    fn hears(&self, line: &str) -> String {
        eventually(line, || {
            let mut message = vec![0; 4096];
            let length = self.0.recv(&mut message).unwrap();
            message.truncate(length);
            Some(String::from_utf8(message).unwrap()).filter(|message| message.lines().any(|one| one.starts_with(line)))
        })
    }

    fn at(plan: Plan, socket: UnixDatagram, name: &str) -> (Self, Plan) {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        (Self(socket), plan.env("NOTIFY_SOCKET", name).env("WATCHDOG_USEC", "400000"))
    }
}

#[test]
fn the_service_manager_is_told() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("late").hold_until(&held));
    let plan = Gate::before(&upstream);
    let path = plan.path("notify");
    let (manager, plan) = ServiceManager::at(plan, UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap());
    let mut gate = plan.start();
    assert_eq!(manager.hears("READY=1"), "READY=1\nSTATUS=serving");
    assert_eq!(manager.hears("WATCHDOG"), "WATCHDOG=1");
    assert_eq!(manager.hears("WATCHDOG"), "WATCHDOG=1");
    gate.sighup();
    let reloading = manager.hears("RELOADING=1");
    let micros: u64 = reloading.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC=")).unwrap().parse().unwrap();
    assert!(micros > 0);
    assert_eq!(manager.hears("READY=1"), "READY=1\nSTATUS=serving");
    std::fs::write(plan.path("oncegate.toml"), "odd = 1").unwrap();
    gate.sighup();
    manager.hears("RELOADING=1");
    assert!(manager.hears("READY=1").contains("refused"));
    let address = gate.address;
    let first = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    upstream.wait_for_runs(1);
    gate.sigterm();
    assert_eq!(manager.hears("STOPPING=1"), "STOPPING=1\nSTATUS=draining; attempts: 1");
    manager.hears("EXTEND_TIMEOUT_USEC=");
    assert_eq!(manager.hears("WATCHDOG"), "WATCHDOG=1");
    signal.open();
    first.join().unwrap().expect(200, "executed");
    assert!(gate.wait().success());
}

#[test]
fn a_process_that_waits_for_its_store_says_so_and_asks_for_time() {
    if store::kind() != "sqlite" {
        return;
    }
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    // A name in no file system.
    let name = format!("oncegate-test-{}", std::process::id());
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let (manager, plan) = ServiceManager::at(gate.plan.clone(), socket, &format!("@{name}"));
    let after = plan.spawn();
    let asked = manager.hears("STATUS=waiting-for-store-lock");
    assert!(asked.contains("EXTEND_TIMEOUT_USEC="), "{asked}");
    // What it is told meanwhile is done once it serves.
    std::fs::write(plan.path("oncegate.toml"), "odd = 1").unwrap();
    after.signal(rustix::process::Signal::HUP);
    gate.kill9();
    assert_eq!(manager.hears("READY=1"), "READY=1\nSTATUS=serving");
    served(&after);
    manager.hears("RELOADING=1");
    assert!(manager.hears("READY=1").contains("refused"));
}
