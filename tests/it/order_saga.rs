//! The order saga of `deploy/examples/order-saga`: whatever is killed at whatever step, each order ends shipped or cancelled,
//! and no step has run twice.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::servers::Database;
use crate::support::process::{Process, python_with_psycopg};
use crate::support::{Upstream, eventually, store};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/examples/order-saga");
const FAULTY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/order_saga/faulty.py");
const SERVICES: [&str; 3] = ["stock", "payments", "shipping"];

/// What happens in an order that is shipped, in one whose charge is refused, and in one that cannot be shipped.
const SHIPPED: &str = "charge done, reserve done, ship done";
const REFUSED: &str = "cancel done, charge refused, reserve done";
const CANCELLED: &str = "cancel done, charge done, refund done, reserve done, ship refused";

/// Everything may be killed but the database: what is killed starts again.
struct Shop {
    python: &'static str,
    database: Database,
    dir: TempDir,
    services: Vec<(&'static str, SocketAddr, Child)>,
    gates: Vec<(SocketAddr, Process)>,
    orders: usize,
}

/// What is killed at a point of a step.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Service,
    Gate,
    Order,
}

impl Shop {
    fn open() -> Option<Self> {
        let (python, database) = (python_with_psycopg()?, store::migrated()?);
        let dir = tempfile::tempdir().expect("a writable directory");
        let mut shop = Self { python, database, dir, services: Vec::new(), gates: Vec::new(), orders: 0 };
        let mut config = std::fs::read_to_string(Path::new(EXAMPLE).join("gate.toml")).expect("the example");
        let mut put = |example: &str, ours: &str| {
            assert!(config.contains(example), "{example} is not in the example");
            config = config.replace(example, ours);
        };
        put("postgres://postgres@127.0.0.1/shop", &shop.database.url);
        // The example's are for people.
        put("lease = \"2s\"", "lease = \"1s\"");
        put("after = \"2s\"", "after = \"100ms\"");
        for (nth, name) in SERVICES.into_iter().enumerate() {
            let address = Upstream::free_address();
            put(&format!("127.0.0.1:300{}", nth + 1), &address.to_string());
            let service = shop.service(name, address);
            shop.services.push((name, address, service));
        }
        std::fs::write(shop.file("gate.toml"), config).expect("a writable directory");
        for _ in 0..2 {
            let address = Upstream::free_address();
            let gate = shop.gate(address);
            shop.gates.push((address, gate));
        }
        Some(shop)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn service(&self, name: &str, address: SocketAddr) -> Child {
        let mut command = Command::new(self.python);
        command.args(["-B", FAULTY, EXAMPLE]).arg(self.file("fault")).args([name, &address.to_string()]);
        command.env("DATABASE_URL", self.database.url.replace("postgres://", "postgresql://"));
        // It reports each connection of a gate that was killed.
        let log = File::options().create(true).append(true).open(self.file("service.log"));
        command.stderr(log.expect("a writable directory"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("Python")
    }

    fn gate(&self, address: SocketAddr) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.arg("serve").arg("--config").arg(self.file("gate.toml"));
        command.args(["--listen", &address.to_string(), "--admin", "127.0.0.1:0"]).env("ONCEGATE_LOG__FORMAT", "json");
        let gate = Process::start(command, ());
        assert!(gate.address("listening").is_some(), "the gate does not listen: {}", gate.log());
        gate
    }

    /// Starts what was killed again.
    fn look_after(&mut self) {
        for nth in 0..self.services.len() {
            let (name, address, service) = &mut self.services[nth];
            if service.try_wait().expect("a child").is_some() {
                let (name, address) = (*name, *address);
                self.services[nth].2 = self.service(name, address);
            }
        }
        for nth in 0..self.gates.len() {
            if !self.gates[nth].1.is_running() {
                self.gates[nth].1 = self.gate(self.gates[nth].0);
            }
        }
    }

    /// Runs an order to its end while something is killed, and says what has happened by then.
    fn order(&mut self, to: &str, amount: u32, kill: Option<(Victim, &str, &str)>) -> String {
        self.orders += 1;
        let id = format!("order-{}", self.orders);
        let (victim, pid) = (self.file("fault"), self.file("pid"));
        if let Some((who, step, point)) = kill {
            let whose = match who {
                Victim::Service => "self".to_owned(),
                Victim::Gate | Victim::Order => pid.display().to_string(),
            };
            std::fs::write(&victim, format!("{step} {point} {whose}")).expect("a writable directory");
            if matches!(who, Victim::Gate) {
                write(&pid, self.gates[0].1.pid());
            }
        }
        let start = Instant::now();
        let mut command = Command::new(self.python);
        command.args(["-B", &format!("{EXAMPLE}/order.py"), &id, to, &amount.to_string()]).stdout(Stdio::null());
        command.args(self.gates.iter().map(|(address, _)| format!("http://{address}")));
        loop {
            let mut order = command.spawn().expect("Python");
            if matches!(kill, Some((Victim::Order, ..))) {
                write(&pid, order.id());
            }
            let ended = loop {
                self.look_after();
                if let Some(ended) = order.try_wait().expect("a child") {
                    break ended;
                }
                if start.elapsed() > Duration::from_secs(60) {
                    drop(order.kill());
                    panic!("{id} does not end: {kill:?}");
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            if ended.success() {
                break;
            }
            assert!(ended.code().is_none(), "{id}: {ended}: {kill:?}");
        }
        assert!(!victim.exists(), "{id}: nothing was killed: {kill:?}");
        drop(std::fs::remove_file(pid));
        let happened = "SELECT string_agg(step || ' ' || state, ', ' ORDER BY step) FROM public.entry";
        self.database.value(&format!("{happened} WHERE saga = '{id}'"))
    }

    /// Runs orders with a kill each: of everything, at every point of every step, over and over.
    fn kill(&mut self, kills: usize) {
        let points = ["begun", "written", "committed"];
        let victims = [Victim::Service, Victim::Gate, Victim::Order];
        let steps = ["reserve", "charge", "ship", "refund", "cancel"];
        let all = (0..).flat_map(|round: usize| {
            points.into_iter().flat_map(move |point| {
                victims
                    .into_iter()
                    .flat_map(move |victim| steps.into_iter().map(move |step| (round, victim, step, point)))
            })
        });
        // Neighbours differ in all three.
        let all: Vec<_> = all.take(kills.next_multiple_of(45)).collect();
        for nth in 0..kills {
            let (round, victim, step, point) = all[nth * 16 % all.len()];
            let (to, amount, expected) = match (step, round % 2) {
                ("reserve" | "charge" | "ship", 0) => ("Berlin", 100, SHIPPED),
                ("charge" | "cancel", 1) => ("Berlin", 2000, REFUSED),
                _ => ("nowhere", 100, CANCELLED),
            };
            let happened = self.order(to, amount, Some((victim, step, point)));
            assert_eq!(happened, expected, "{:?} was killed when {step} was {point}", victim);
        }
        eventually("no outcome is left open", || {
            self.look_after();
            (self.database.value("SELECT count(*) FROM oncegate.record WHERE state <> 1") == "0").then_some(())
        });
    }
}

fn write(path: &Path, pid: u32) {
    let new = path.with_extension("new");
    std::fs::write(&new, pid.to_string()).expect("a writable directory");
    std::fs::rename(new, path).expect("one directory");
}

impl Drop for Shop {
    fn drop(&mut self) {
        for (_, _, service) in &mut self.services {
            drop(service.kill());
            drop(service.wait());
        }
    }
}

#[test]
fn an_order_is_shipped_or_cancelled() {
    let Some(mut shop) = Shop::open() else { return };
    assert_eq!(shop.order("Berlin", 100, None), SHIPPED);
    assert_eq!(shop.order("Berlin", 2000, None), REFUSED);
    assert_eq!(shop.order("nowhere", 100, None), CANCELLED);
    // The same order once more.
    shop.orders -= 1;
    assert_eq!(shop.order("nowhere", 100, None), CANCELLED);
}

#[test]
fn whatever_is_killed_an_order_ends_and_no_step_runs_twice() {
    let Some(mut shop) = Shop::open() else { return };
    shop.kill(9);
}

#[test]
#[ignore = "takes minutes: tests/run --long"]
fn two_hundred_kills() {
    let Some(mut shop) = Shop::open() else { return };
    shop.kill(200);
}
