//! A PostgreSQL server of a test's own.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use rustix::process::Signal;
use tempfile::TempDir;

use super::database::Database;
use super::process::{self, PATIENCE, Server, unprivileged};
use super::session::Session;

/// A server with small buffers, that does not wait for the disk unless `fsync` is set to `on`. What is committed
/// outlives the death of its processes nevertheless.
const SETTINGS: &str = "
unix_socket_directories = ''
shared_buffers = 32MB
dynamic_shared_memory_type = mmap
fsync = off
log_line_prefix = '%m [%p] %d '
log_min_messages = warning
";

/// Anybody on this machine may come in as anybody.
const ACCESS: &str = "host all all 127.0.0.0/8 trust\nhost replication all 127.0.0.0/8 trust\n";

/// A running server. Ended when dropped.
pub struct Postgres {
    address: SocketAddr,
    binary: PathBuf,
    directory: TempDir,
    server: Mutex<Option<Server>>,
}

impl Postgres {
    /// Starts a server; nothing (and a failure where `CI` is set) where PostgreSQL is not installed.
    #[track_caller]
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// As [`Postgres::start`], with these settings.
    #[track_caller]
    pub fn with(settings: &[(&str, &str)]) -> Option<Self> {
        Self::begin(settings, false)
    }

    /// A primary, and its hot standby, on which everything is applied before a commit on the primary returns. The standby
    /// itself waits for nobody once it is promoted.
    #[track_caller]
    pub fn pair() -> Option<(Self, Self)> {
        let waits = [("synchronous_standby_names", "second"), ("synchronous_commit", "remote_apply")];
        let primary = Self::begin(&waits, false)?;
        let (host, port) = (primary.address.ip(), primary.address.port());
        let primary_conninfo = format!("host={host} port={port} user=postgres application_name=second");
        // Both are copies of one server that never ran, so the log begins at the same place.
        let standby = Self::begin(&[("primary_conninfo", &primary_conninfo)], true)?;
        Some((primary, standby))
    }

    /// Makes a primary of a standby, and returns when it takes writes.
    #[track_caller]
    pub fn promote(&self) {
        assert_eq!(self.session().value("SELECT pg_promote(true, 30)"), "t", "it is promoted");
    }

    #[track_caller]
    fn begin(settings: &[(&str, &str)], is_standby: bool) -> Option<Self> {
        let Some(binary) = binary() else {
            process::skipped("PostgreSQL");
            return None;
        };
        let directory = process::directory("oncegate-postgres-");
        let data = directory.path().join("data");
        copy(&template(&binary), &data);
        let address = process::free_address();
        let (host, port) = (address.ip(), address.port());
        let mut text = format!("listen_addresses = '{host}'\nport = {port}\n{SETTINGS}");
        for (name, value) in settings {
            text += &format!("{name} = '{value}'\n");
        }
        for (name, text) in [("postgresql.conf", text.as_str()), ("pg_hba.conf", ACCESS)] {
            std::fs::write(data.join(name), text).expect("a writable directory");
        }
        if is_standby {
            let signal = data.join("standby.signal");
            std::fs::write(&signal, "").expect("a writable directory");
            process::give(&signal);
        }
        let postgres = Self { address, binary, directory, server: Mutex::new(None) };
        postgres.start_again();
        Some(postgres)
    }

    /// Where its files are.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of a database, as the superuser.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@{}/{database}", self.address)
    }

    /// A database of its own for a test, empty.
    #[track_caller]
    pub fn database(&self) -> Database {
        Database::on(&self.url("postgres"))
    }

    /// A session in the database that every server has.
    #[track_caller]
    pub fn session(&self) -> Session {
        Session::open(&self.url("postgres"))
    }

    /// The process id of its first process.
    pub fn pid(&self) -> u32 {
        self.server.lock().unwrap().as_ref().expect("a running server").pid()
    }

    /// Ends it as a crash would (`-m immediate`): nothing is finished, nothing is written down.
    pub fn stop_immediate(&self) {
        self.end(Signal::QUIT);
    }

    /// Ends it after the transactions under way were rolled back and all was written down (`-m fast`).
    pub fn stop_fast(&self) {
        self.end(Signal::INT);
    }

    /// Kills its first process; the others notice, and end.
    pub fn kill9(&self) {
        self.end(Signal::KILL);
    }

    fn end(&self, signal: Signal) {
        // A process that is stopped takes no other signal.
        self.go_on();
        if let Some(mut server) = self.server.lock().unwrap().take() {
            server.end(signal);
        }
    }

    /// Starts it again after it was ended, at the same address, and waits until it lets sessions in.
    #[track_caller]
    pub fn start_again(&self) {
        let start = Instant::now();
        let mut command = unprivileged(&self.binary);
        command.arg("-D").arg(self.directory.path().join("data"));
        loop {
            let mut server = self.server.lock().unwrap();
            if !server.as_mut().is_some_and(Server::is_running) {
                // The first try after a kill may find that the processes of the one before have not ended yet.
                *server = Some(Server::start(command_again(&command), self.directory.path(), &self.log_file()));
            }
            drop(server);
            if Session::try_open(&self.url("postgres")).is_ok() {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "PostgreSQL does not start:\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(30));
        }
    }

    /// Stops all of its processes where they are: it hangs, and keeps its connections.
    pub fn hang(&self) {
        self.signal_all(Signal::STOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal_all(Signal::CONT);
    }

    fn signal_all(&self, signal: Signal) {
        let Some(first) = self.server.lock().unwrap().as_ref().map(Server::pid) else { return };
        process::send(first, signal);
        for child in children(first) {
            process::send(child, signal);
        }
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.directory.path().join("log")
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop_immediate();
        // What a killed one could not clean up itself: the name of its shared memory is in the file it left.
        let left = std::fs::read_to_string(self.directory.path().join("data/postmaster.pid")).unwrap_or_default();
        if let Some(id) = left.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            drop(Command::new("ipcrm").args(["-m", id]).output());
        }
        if std::thread::panicking() {
            eprintln!("--- PostgreSQL's log ---\n{}\n---", self.log());
        }
    }
}

/// The processes whose parent is this one.
fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The same command once more.
fn command_again(command: &Command) -> Command {
    let mut again = unprivileged(Path::new(command.get_program()));
    again.args(command.get_args());
    again
}

/// The server's program, of the latest version there is.
fn binary() -> Option<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter_map(|path| Some((path.file_name()?.to_str()?.parse().ok()?, path.join("bin"))))
        .collect();
    versions.sort();
    let directories: Vec<_> = versions.into_iter().rev().map(|(_, path)| path).collect();
    // One on the path may be a link to where the others are.
    let binary = process::find("postgres", &directories)?.canonicalize().ok()?;
    binary.with_file_name("initdb").is_file().then_some(binary)
}

/// The directory of a server that never ran, made once for all processes of tests.
fn template(binary: &Path) -> PathBuf {
    let version = Command::new(binary).arg("--version").output().expect("a program that was found").stdout;
    let version: String = String::from_utf8_lossy(&version).chars().filter(char::is_ascii_digit).collect();
    let user = process::user();
    let template = std::env::temp_dir().join(format!("oncegate-postgres-template-{version}-{user}"));
    let lock = File::create(template.with_extension("lock")).expect("a writable directory");
    lock.lock().expect("a file that can be locked");
    if !template.exists() {
        let new = process::directory("oncegate-postgres-new-");
        let mut initdb = unprivileged(&binary.with_file_name("initdb"));
        initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--pgdata"]);
        let done = initdb.arg(new.path()).current_dir(new.path()).output().expect("a program that was found");
        assert!(done.status.success(), "initdb: {}", String::from_utf8_lossy(&done.stderr));
        std::fs::rename(new.keep(), &template).expect("one directory");
    }
    let owner = std::os::unix::fs::MetadataExt::uid(&template.metadata().expect("it is there"));
    assert_eq!(owner, user, "{} is somebody else's", template.display());
    template
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").args(["-a", "--reflink=auto"]).arg(from).arg(to).output().expect("cp");
    assert!(done.status.success(), "cp: {}", String::from_utf8_lossy(&done.stderr));
}
