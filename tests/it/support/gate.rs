//! The real binary, `oncegate serve`, as a process of its own.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{Request, Response};
use super::faults::{Fault, clock_shim, names_shim, shim};
use super::process::Process;
use super::store;
use super::upstream::Upstream;
use super::wait::eventually;

/// A route for whatever the test sends with POST or PATCH.
const ALL: &str = "[[routes]]\nname = \"all\"\nmethods = [\"POST\", \"PATCH\"]\npath = \"/{*rest}\"\n";

/// What ids are made with where nothing else is said: no secret.
pub const SECRET: &str = "a secret for tests that everybody may know";

/// How a gate is to be started. Starting does not use it up: the next start is on the same store.
#[derive(Clone)]
pub struct Plan {
    place: Arc<Place>,
    binary: PathBuf,
    url: String,
    server: String,
    admin: String,
    store_url: String,
    cache: String,
    store: String,
    upstream: String,
    defaults: String,
    routes: String,
    top: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    /// Sockets that are passed to each process, with their names.
    sockets: Vec<(String, Arc<TcpListener>)>,
    faults: bool,
    /// How many files each process may have open.
    files: Option<u64>,
}

/// What the processes of a plan need.
struct Place {
    dir: TempDir,
    _store: Option<store::Own>,
}

/// Holds that there is a metric with this name and these labels. The page has every one: `cli::catalogues` sees to that.
#[track_caller]
fn expect_metric(name: &str, labels: &[&str]) {
    const PAGE: &str = include_str!("../../../docs/observe/metrics.md");
    let facts = |name: &str| Some(PAGE.split_once(&format!("\n### `{name}`\n\n"))?.1.lines().next()?.to_owned());
    let of_histogram = || {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end))?;
        facts(base).filter(|facts| facts.starts_with("*histogram"))
    };
    let facts = facts(name).or_else(of_histogram).unwrap_or_else(|| panic!("there is no metric {name}"));
    for (label, _) in labels.iter().filter_map(|label| label.split_once('=')) {
        assert!(facts.contains(&format!("`{label}`")), "{name} has no label {label}: {facts}");
    }
}

/// A running gate. Killed when dropped.
pub struct Gate {
    pub plan: Plan,
    pub address: SocketAddr,
    pub admin: SocketAddr,
    process: Process,
}

impl Gate {
    /// A plan for a gate before this upstream, with one route for every POST and PATCH.
    pub fn before(upstream: &Upstream) -> Plan {
        Self::before_url(&upstream.url())
    }

    pub fn before_url(url: &str) -> Plan {
        let dir = tempfile::Builder::new().prefix("oncegate-it-").tempdir().expect("a writable directory");
        let store = store::of_this_run();
        let file = || format!("sqlite:{}", dir.path().join("gate.db").display());
        let store_url = store.as_ref().map_or_else(file, |store| store.url.clone());
        let cache = store.as_ref().and_then(|store| store.cache.clone());
        let plan = Plan {
            store_url,
            place: Arc::new(Place { dir, _store: store }),
            binary: env!("CARGO_BIN_EXE_oncegate").into(),
            cache: String::new(),
            url: url.into(),
            server: String::new(),
            admin: String::new(),
            store: String::new(),
            upstream: String::new(),
            defaults: String::new(),
            routes: ALL.into(),
            top: String::new(),
            args: Vec::new(),
            env: Vec::new(),
            sockets: Vec::new(),
            faults: false,
            files: None,
        };
        match cache {
            Some(url) => plan.cache(&url, SECRET),
            None => plan,
        }
    }

    /// SIGKILL, and what is needed to start again on the same store.
    pub fn kill9(mut self) -> Plan {
        self.process.kill9();
        self.plan.clone()
    }

    /// SIGTERM; returns at once.
    pub fn sigterm(&self) {
        self.process.signal(rustix::process::Signal::TERM);
    }

    /// SIGHUP; returns at once.
    pub fn sighup(&self) {
        self.process.signal(rustix::process::Signal::HUP);
    }

    /// SIGTERM, waits for the end and holds that it was orderly.
    #[track_caller]
    pub fn stop(mut self) -> Plan {
        self.sigterm();
        let status = self.process.wait();
        assert!(status.success(), "ended with {status}\n{}", self.log());
        self.plan.clone()
    }

    /// Waits for the process to end by itself.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.process.wait()
    }

    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    #[track_caller]
    pub fn post(&self, path: &str, key: &str, body: &str) -> Response {
        Request::post(path).key(key).body(body).send(self)
    }

    /// A request to the admin listener.
    #[track_caller]
    pub fn admin(&self, method: &str, path: &str, body: Option<&Value>) -> Response {
        let request = Request::new(method, path).header("Host", "127.0.0.1");
        let request = match body {
            Some(body) => request.header("Content-Type", "application/json").body(body.to_string()),
            None => request,
        };
        request.send(self.admin)
    }

    /// The records that pass a filter, as `GET /api/v1/records` lists them.
    #[track_caller]
    pub fn records(&self, query: &str) -> Vec<Value> {
        let response = self.admin("GET", &format!("/api/v1/records?{query}"), None);
        assert_eq!(response.status, 200, "{}", response.show());
        response.json()["records"].as_array().expect("a list").clone()
    }

    /// The states of the records of a key.
    #[track_caller]
    pub fn states(&self, key: &str) -> Vec<String> {
        let records = self.records(&format!("key={key}"));
        records.iter().map(|record| record["state"].as_str().expect("a state").to_owned()).collect()
    }

    /// Returns when so many requests wait for others.
    #[track_caller]
    pub fn wait_for_waiting(&self, count: usize) {
        let count = count as f64;
        eventually("they wait", || (self.metric("oncegate_requests_waiting", &[]) == count).then_some(()));
    }

    /// Waits until the record of a key has this state.
    #[track_caller]
    pub fn wait_for_state(&self, key: &str, state: &str) {
        eventually(&format!("a record that is {state}"), || (self.states(key) == [state]).then_some(()));
    }

    /// The sum of the samples of a metric whose labels contain all of these `name="value"`. One without samples is at zero,
    /// so names that no metric has are refused.
    #[track_caller]
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        expect_metric(name, labels);
        let text = self.admin("GET", "/metrics", None).text();
        let samples = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (of, rest) = series.split_once('{').unwrap_or((series, ""));
            (of == name && labels.iter().all(|label| rest.contains(label))).then(|| value.parse::<f64>().ok())?
        });
        samples.sum()
    }

    /// From now on the store's disk has this fault. The plan must have said `.with_faults()`.
    pub fn fault(&self, fault: Fault) {
        let control = self.plan.path("fault");
        let new = self.plan.path("fault.new");
        std::fs::write(&new, fault.word()).expect("a writable directory");
        std::fs::rename(new, control).expect("one directory");
    }

    /// The disk is well again.
    pub fn heal(&self) {
        std::fs::remove_file(self.plan.path("fault")).expect("a fault");
    }

    /// How many writes, and how many of them since the last sync, the store has made.
    pub fn unsynced(&self) -> (usize, usize) {
        let trace = std::fs::read_to_string(self.plan.path("trace")).unwrap_or_default();
        let writes = trace.matches('w').count();
        let since = trace.rsplit('s').next().unwrap_or_default().matches('w').count();
        (writes, since)
    }

    /// The most memory the process ever had resident, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a running process");
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM");
        let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
        kib * 1024
    }
}

impl From<&Gate> for SocketAddr {
    fn from(gate: &Gate) -> Self {
        gate.address
    }
}

impl Plan {
    /// Adds lines to `[server]`.
    pub fn server(mut self, lines: &str) -> Self {
        self.server = lines.into();
        self
    }

    /// Adds lines to `[admin]`.
    pub fn admin(mut self, lines: &str) -> Self {
        self.admin = lines.into();
        self
    }

    /// Adds lines to `[store]`. The secret of gates that share a cache gives way to others.
    pub fn store(mut self, lines: &str) -> Self {
        self.store = lines.into();
        if lines.contains("id_secret_file") {
            let kept = self.cache.lines().filter(|line| !line.starts_with("id_secret_file"));
            self.cache = kept.map(|line| format!("{line}\n")).collect();
        }
        self
    }

    /// Replaces the store; it has no cache in front of it.
    pub fn store_url(mut self, url: &str) -> Self {
        self.store_url = url.into();
        self.cache.clear();
        self
    }

    /// Puts a cache in front of the store. What is in there is known by the secret, which gates that share it share too.
    pub fn cache(mut self, url: &str, secret: &str) -> Self {
        let file = self.path("secret");
        std::fs::write(&file, secret).expect("a writable directory");
        self.cache = format!("cache = \"{url}\"\nid_secret_file = {file:?}\n");
        self
    }

    /// Adds fields to the upstream: `timeout = "1s"`.
    pub fn upstream(mut self, fields: &str) -> Self {
        self.upstream = fields.into();
        self
    }

    /// Sets `[defaults]`, which also holds for the one route there is.
    pub fn defaults(mut self, lines: &str) -> Self {
        self.defaults = lines.into();
        self
    }

    /// Replaces the routes.
    pub fn routes(mut self, tables: &str) -> Self {
        self.routes = tables.into();
        self
    }

    /// Adds keys before the first table, or whole tables.
    pub fn top(mut self, lines: &str) -> Self {
        self.top = lines.into();
        self
    }

    /// Starts another binary than the one that is tested: the one of another version.
    pub fn binary(mut self, path: &Path) -> Self {
        self.binary = path.into();
        self
    }

    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Passes a listening socket, as systemd does: to each process of this plan, and they share it. Two at most.
    pub fn inherits(mut self, name: &str, socket: TcpListener) -> Self {
        self.sockets.push((name.into(), Arc::new(socket)));
        self
    }

    /// Allows each process so many open files.
    pub fn files(mut self, most: u64) -> Self {
        self.files = Some(most);
        self
    }

    /// Puts the store's disk under the test's control.
    pub fn with_faults(mut self) -> Self {
        self.faults = true;
        self
    }

    /// Sets the process's clock this many seconds off.
    pub fn clock_off_by(self, seconds: i64) -> Self {
        let shim = clock_shim().display().to_string();
        self.env("LD_PRELOAD", shim).env("CLOCK_OFFSET", seconds.to_string())
    }

    /// Gives the process a name, `several.test`, that has all of these addresses.
    pub fn knows(self, addresses: &[IpAddr]) -> Self {
        let list: String = addresses.iter().map(|address| format!("{address},")).collect();
        self.env("LD_PRELOAD", names_shim().display().to_string()).env("NAMES_SEVERAL", list)
    }

    /// Ends the process at the `nth` call that it makes on the store's files: `before`, `torn`, `after` or `lost`.
    pub fn killed_at(self, nth: usize, when: &str) -> Self {
        self.with_faults().env("FAULT_KILL_AT", nth.to_string()).env("FAULT_KILL", when)
    }

    /// The same store with a disk that works.
    pub fn without_faults(mut self) -> Self {
        self.faults = false;
        self.env.retain(|(name, _)| !name.starts_with("FAULT_"));
        self
    }

    /// The URL of the store.
    pub fn url_of_store(&self) -> String {
        self.store_url.clone()
    }

    /// A file in the plan's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.dir.path().join(name)
    }

    /// The configuration file, written.
    pub fn config(&self) -> PathBuf {
        let Self { url, server, admin, store_url, cache, store, upstream, defaults, routes, top, .. } = self;
        let comma = if upstream.is_empty() { "" } else { ", " };
        // Scripted upstreams are threads among many on a busy machine.
        let patience = if upstream.contains("connect_timeout") { "" } else { ", connect_timeout = \"10s\"" };
        let listen = |lines: &str| if lines.contains("listen") { "" } else { "listen = \"127.0.0.1:0\"" };
        let text = format!(
            "{top}\n[server]\n{}\n{server}\n[admin]\n{}\n{admin}\n[store]\nurl = \"{store_url}\"\n{cache}{store}\n\
             [log]\nformat = \"json\"\n[upstreams]\napp = {{ url = \"{url}\"{patience}{comma}{upstream} }}\n\
             [defaults]\n{defaults}\n{routes}",
            listen(server),
            listen(admin)
        );
        let path = self.path("oncegate.toml");
        std::fs::write(&path, text).expect("a writable directory");
        path
    }

    /// Starts `oncegate serve` and waits until it listens.
    #[track_caller]
    pub fn start(&self) -> Gate {
        let process = self.spawn();
        let address = process.address("listening");
        let admin = process.address("admin listening");
        match (address, admin) {
            (Some(address), Some(admin)) => Gate { plan: self.clone(), address, admin, process },
            _ => panic!("the gate does not listen:\n{}", process.log()),
        }
    }

    /// As [`Plan::start`], or nothing where the process ends before it listens.
    pub fn try_start(&self) -> Option<Gate> {
        let process = self.spawn();
        let address = process.address("listening")?;
        let admin = process.address("admin listening")?;
        Some(Gate { plan: self.clone(), address, admin, process })
    }

    /// Starts `oncegate serve` and does not wait for it.
    pub fn spawn(&self) -> Process {
        let mut command = self.command();
        command.arg("serve").arg("--config").arg(self.config()).args(&self.args).current_dir(self.place.dir.path());
        if self.faults {
            command.env("LD_PRELOAD", shim()).env("FAULT_MATCH", self.path("gate.db"));
            command.env("FAULT_CONTROL", self.path("fault")).env("FAULT_TRACE", self.path("trace"));
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        if self.sockets.is_empty() {
            command.stdin(Stdio::null()).stdout(Stdio::null());
        }
        Process::start_as_it_is(command, Arc::clone(&self.place))
    }

    /// The binary, with the sockets that it inherits.
    fn command(&self) -> Command {
        let binary = &self.binary;
        if let Some(most) = self.files {
            let mut command = Command::new("sh");
            command.args(["-c", "ulimit -n \"$1\" && shift && exec \"$@\"", "sh", &most.to_string()]).arg(binary);
            return command;
        }
        let [(_, first), rest @ ..] = &*self.sockets else { return Command::new(binary) };
        // LISTEN_PID is the process id of who becomes the gate.
        let mut command = Command::new("sh");
        command.args(["-c", "exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_PID=$$ exec \"$@\"", "sh"]).arg(binary);
        let passed = |socket: &TcpListener| Stdio::from(OwnedFd::from(socket.try_clone().expect("a socket")));
        command.stdin(passed(first)).stdout(rest.first().map_or_else(Stdio::null, |(_, second)| passed(second)));
        let names: Vec<_> = self.sockets.iter().map(|(name, _)| &**name).collect();
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command
    }
}
