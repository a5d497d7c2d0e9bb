//! A PgBouncer of a test's own, in transaction mode.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::at;
use super::process::{self, PATIENCE, Server, give, unprivileged};

/// Few connections for many clients, so that each statement of a client may find itself on another one. What a client
/// asks for at the start beyond the usual (`options`) is refused, as by default.
const SETTINGS: &str = "
unix_socket_dir =
auth_type = trust
pool_mode = transaction
default_pool_size = 3
max_client_conn = 2000
server_login_retry = 1
log_connections = 0
log_disconnections = 0
";

/// A running pooler. Ended when dropped.
pub struct PgBouncer {
    address: SocketAddr,
    binary: PathBuf,
    directory: TempDir,
    server: Mutex<Option<Server>>,
}

impl PgBouncer {
    /// Starts a pooler before a server; nothing (and a failure where `CI` is set) where PgBouncer is not installed.
    #[track_caller]
    pub fn before(server: SocketAddr) -> Option<Self> {
        Self::with(server, &[])
    }

    /// As [`PgBouncer::before`], with these settings.
    #[track_caller]
    pub fn with(server: SocketAddr, settings: &[(&str, &str)]) -> Option<Self> {
        let Some(binary) = process::find("pgbouncer", &["/usr/sbin".into(), "/usr/local/sbin".into()]) else {
            process::skipped("PgBouncer");
            return None;
        };
        let directory = process::directory("oncegate-pgbouncer-");
        let address = process::free_address();
        let mut text = format!(
            "[databases]\n* = host={} port={}\n[pgbouncer]\nlisten_addr = {}\nlisten_port = {}\nauth_file = {}\n",
            server.ip(),
            server.port(),
            address.ip(),
            address.port(),
            directory.path().join("users").display()
        );
        text += SETTINGS;
        for (name, value) in settings {
            text += &format!("{name} = {value}\n");
        }
        for (name, text) in [("pgbouncer.ini", text.as_str()), ("users", "\"postgres\" \"\"\n")] {
            let path = directory.path().join(name);
            std::fs::write(&path, text).expect("a writable directory");
            give(&path);
        }
        let pooler = Self { address, binary, directory, server: Mutex::new(None) };
        pooler.start_again();
        Some(pooler)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the same database through this pooler.
    pub fn url(&self, direct: &str) -> String {
        at(direct, self.address)
    }

    pub fn pid(&self) -> u32 {
        self.server.lock().unwrap().as_ref().expect("a running pooler").pid()
    }

    pub fn kill9(&self) {
        if let Some(mut server) = self.server.lock().unwrap().take() {
            server.end(Signal::KILL);
        }
    }

    /// Starts it again after it was killed, at the same address.
    #[track_caller]
    pub fn start_again(&self) {
        let mut command = unprivileged(&self.binary);
        command.arg(self.directory.path().join("pgbouncer.ini"));
        let mut server = Server::start(command, self.directory.path(), &self.log_file());
        let start = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            let waits = server.is_running() && start.elapsed() < PATIENCE;
            assert!(waits, "PgBouncer does not start:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        *self.server.lock().unwrap() = Some(server);
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        Path::join(self.directory.path(), "log")
    }
}
