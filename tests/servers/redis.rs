//! A Redis of a test's own.

mod cluster;
mod resp;
mod sentinels;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

pub use self::cluster::Cluster;
pub use self::resp::{Connection, Reply};
pub use self::sentinels::Sentinels;
use super::certificates;
use super::process::{self, PATIENCE, Server, give, unprivileged};

/// The settings of every server. It keeps nothing unless told to.
const SETTINGS: &str = "daemonize no\nsave \"\"\n";

/// The settings of a server that encrypts. Files are those in its directory.
const ENCRYPTING: &str = "tls-cert-file server.pem\ntls-key-file server.key\ntls-ca-cert-file ca.pem\n";

/// A running server. Ended when dropped.
pub struct Redis {
    /// Where it is for others.
    address: SocketAddr,
    /// Where it is for the test itself: never encrypted.
    plain: SocketAddr,
    password: Option<String>,
    binary: PathBuf,
    is_sentinel: bool,
    directory: TempDir,
    server: Mutex<Option<Server>>,
}

/// What a server held, without how long it would have kept it.
pub struct Dump(Vec<(Vec<u8>, Vec<u8>)>);

impl Redis {
    /// Starts a server that appends what is written to a file; nothing (and a failure where `CI` is set) where Redis is
    /// not installed.
    #[track_caller]
    pub fn start() -> Option<Self> {
        Self::with(&[("appendonly", "yes")])
    }

    /// Starts a server with settings of its own. `requirepass` among them is the password that [`Redis::url`] has.
    #[track_caller]
    pub fn with(settings: &[(&str, &str)]) -> Option<Self> {
        let server = Self::planned(settings, false)?;
        server.configure(&format!("port {}\n", server.address.port()));
        server.begin();
        Some(server)
    }

    /// As [`Redis::with`], encrypted. Whoever comes has to show a certificate, unless `tls-auth-clients` is set to `no`.
    /// See [`Redis::file`] for the certificates. Skipped as well where OpenSSL is not installed.
    #[track_caller]
    pub fn encrypting(settings: &[(&str, &str)]) -> Option<Self> {
        if !certificates::can_be_made() {
            return None;
        }
        let mut server = Self::planned(settings, false)?;
        let directory = server.directory.path();
        certificates::authority(directory, "ca");
        certificates::authority(directory, "other");
        certificates::signed(directory, "server", "ca", &format!("subjectAltName=IP:{}", server.address.ip()));
        certificates::signed(directory, "client", "ca", "extendedKeyUsage=clientAuth");
        certificates::signed(directory, "stranger", "other", "extendedKeyUsage=clientAuth");
        for name in ["server.pem", "server.key", "ca.pem"] {
            give(&directory.join(name));
        }
        server.plain = process::free_address();
        let (ip, port, tls) = (server.plain.ip(), server.plain.port(), server.address.port());
        server.configure(&format!("bind {} {ip}\nport {port}\ntls-port {tls}\n{ENCRYPTING}", server.address.ip()));
        server.begin();
        Some(server)
    }

    /// A Sentinel with these settings.
    #[track_caller]
    fn sentinel(settings: &[(&str, &str)]) -> Option<Self> {
        let server = Self::planned(settings, true)?;
        let (ip, port) = (server.address.ip(), server.address.port());
        server.configure(&format!("port {port}\nsentinel announce-ip {ip}\n"));
        server.begin();
        // One that stands still for two seconds would do nothing for half a minute.
        server.ask(&["SENTINEL", "DEBUG", "tilt-trigger", "20000"]);
        Some(server)
    }

    /// A server that does not run yet, with a file of settings.
    #[track_caller]
    fn planned(settings: &[(&str, &str)], is_sentinel: bool) -> Option<Self> {
        let Some(binary) = process::find("redis-server", &[]) else {
            process::skipped("redis-server");
            return None;
        };
        let directory = process::directory("oncegate-redis-");
        let address = process::free_address();
        let mut text = format!("bind {}\ndir {}\n{SETTINGS}", address.ip(), directory.path().display());
        for (name, value) in settings {
            let value = if value.is_empty() { "\"\"" } else { value };
            writeln!(text, "{name} {value}").expect("a string");
        }
        let password = settings.iter().find(|(name, _)| *name == "requirepass").map(|(_, value)| (*value).to_owned());
        let file = directory.path().join("redis.conf");
        std::fs::write(&file, text).expect("a writable directory");
        give(&file);
        let server = Mutex::new(None);
        Some(Self { address, plain: address, password, binary, is_sentinel, directory, server })
    }

    /// Adds lines to the settings. The server may rewrite them, as Sentinels do: they are those that it starts again with.
    fn configure(&self, lines: &str) {
        let file = self.directory.path().join("redis.conf");
        let text = std::fs::read_to_string(&file).expect("settings");
        std::fs::write(file, text + lines).expect("a writable directory");
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the server, with its password, and with the certificates of one that encrypts.
    pub fn url(&self) -> String {
        let place = format!("{}{}", self.user_info(), self.address);
        if self.address == self.plain {
            return format!("redis://{place}");
        }
        let [roots, certificate, key] = ["ca.pem", "client.pem", "client.key"].map(|name| self.file(name));
        format!("rediss://{place}?cacert={roots}&cert={certificate}&key={key}")
    }

    /// What stands in a URL before the host.
    fn user_info(&self) -> String {
        self.password.as_ref().map_or(String::new(), |password| format!(":{password}@"))
    }

    /// A file of an encrypting server: `ca.pem` vouches for it, `client.pem` and `client.key` are what it wants to see;
    /// `other.pem` vouches for nobody here but for `stranger.pem` and `stranger.key`.
    pub fn file(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Where its files are.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts it again, on what it kept.
    #[track_caller]
    pub fn begin(&self) {
        let mut command = unprivileged(&self.binary);
        command.arg(self.directory.path().join("redis.conf"));
        if self.is_sentinel {
            command.arg("--sentinel");
        }
        let mut server = Server::start(command, self.directory.path(), &self.directory.path().join("log"));
        let start = Instant::now();
        while !self.answers() {
            let waits = server.is_running() && start.elapsed() < PATIENCE;
            assert!(waits, "Redis does not start:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        *self.server.lock().unwrap() = Some(server);
    }

    /// Ends it with a signal.
    pub fn end(&self, signal: Signal) {
        // A process that is stopped takes no other signal.
        self.signal(Signal::CONT);
        if let Some(mut server) = self.server.lock().unwrap().take() {
            server.end(signal);
        }
    }

    pub fn kill9(&self) {
        self.end(Signal::KILL);
    }

    /// Stops its process where it is: it hangs, and keeps its connections.
    pub fn hang(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    pub fn signal(&self, signal: Signal) {
        if let Some(server) = &*self.server.lock().unwrap() {
            process::send(server.pid(), signal);
        }
    }

    pub fn is_running(&self) -> bool {
        self.server.lock().unwrap().as_mut().is_some_and(Server::is_running)
    }

    /// A session with it, logged in.
    #[track_caller]
    pub fn session(&self) -> Connection {
        self.try_session().unwrap_or_else(|error| panic!("no session with Redis at {}: {error}", self.plain))
    }

    pub fn try_session(&self) -> std::io::Result<Connection> {
        Connection::open(self.plain, self.password.as_deref())
    }

    /// What it says to a command.
    #[track_caller]
    pub fn ask<A: AsRef<[u8]>>(&self, command: &[A]) -> Reply {
        self.session().ask(command).unwrap_or_else(|error| panic!("Redis at {}: {error}", self.plain))
    }

    /// What it says to an inline command, raw.
    pub fn run(&self, command: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.plain).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        stream.write_all(format!("{command}\r\n").as_bytes()).ok()?;
        let mut said = vec![0; 64 << 10];
        let length = stream.read(&mut said).ok()?;
        said.truncate(length);
        Some(String::from_utf8_lossy(&said).into_owned())
    }

    /// A field of what it says of itself (`INFO`).
    #[track_caller]
    pub fn info(&self, section: &str, field: &str) -> Option<String> {
        let text = self.ask(&["INFO", section]).text();
        text.lines().find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.to_owned()))
    }

    /// How many calls of each command it has seen since its start or `CONFIG RESETSTAT`; of scripts only the calls.
    #[track_caller]
    pub fn calls(&self) -> BTreeMap<String, u64> {
        let text = self.ask(&["INFO", "commandstats"]).text();
        let calls = text.lines().filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
        });
        calls.collect()
    }

    /// The names of all that it holds.
    #[track_caller]
    pub fn names(&self) -> Vec<Vec<u8>> {
        self.ask(&["KEYS", "*"]).list().into_iter().map(Reply::bytes).collect()
    }

    /// What it holds now.
    #[track_caller]
    pub fn dump(&self) -> Dump {
        let names = self.names();
        let commands: Vec<_> = names.iter().map(|name| vec![&b"DUMP"[..], name]).collect();
        let values = self.session().ask_all(&commands).expect("it answers");
        // What is gone in the meantime is not part of it.
        let held = names.into_iter().zip(values).filter(|(_, value)| *value != Reply::Nothing);
        Dump(held.map(|(name, value)| (name, value.bytes())).collect())
    }

    /// Holds what it held then and nothing else, and keeps it for ever: whoever reads it has to know its age.
    #[track_caller]
    pub fn restore(&self, dump: &Dump) {
        let mut commands = vec![vec![&b"FLUSHALL"[..]]];
        commands.extend(dump.0.iter().map(|(name, value)| vec![&b"RESTORE"[..], name, b"0", value, b"REPLACE"]));
        for said in self.session().ask_all(&commands).expect("it answers") {
            said.status().expect("it is restored");
        }
    }

    /// Whether it runs and takes writes.
    fn is_primary(&self) -> bool {
        self.role().is_some_and(|role| role.contains("role:master"))
    }

    /// Whether it runs and copies a server that it is connected with.
    fn is_linked(&self) -> bool {
        self.role().is_some_and(|role| role.contains("master_link_status:up"))
    }

    fn role(&self) -> Option<String> {
        Some(self.try_session().ok()?.ask(&["INFO", "replication"]).ok()?.text())
    }

    fn answers(&self) -> bool {
        self.try_session().and_then(|mut session| session.ask(&["PING"])).is_ok_and(|said| said.status().is_ok())
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

/// Waits for what others do.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Dump {
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // Before its directory is removed.
        self.end(Signal::KILL);
        if std::thread::panicking() {
            eprintln!("--- log of Redis at {} ---\n{}\n---", self.address, self.log());
        }
    }
}
