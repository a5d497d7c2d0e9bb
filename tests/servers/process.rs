//! Programs that are run as servers, by a user who is not root, and ended whatever becomes of the test.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The longest that a server may take to start or to end, on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Ends a server that outlived its test, where the test was killed: it waits for the end of its input.
const WATCH: &str = r#"
read -r _
kill -s QUIT "$1" || exit
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; kill -0 "$1" || break; done
kill -s KILL "$1"
rm -rf "$2"
"#;

/// A running server.
pub struct Server {
    child: Child,
    watch: Child,
    /// What the watch reads: it closes where this process ends in whatever way.
    _alive: ChildStdin,
}

impl Server {
    /// Starts a command in a directory that is removed with it; it says what it has to say in `log`.
    pub fn start(mut command: Command, directory: &Path, log: &Path) -> Self {
        let log = File::options().create(true).append(true).open(log).expect("a writable directory");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a file")).stderr(log);
        // A group of its own: what a terminal or a test runner sends to the test's group is not for the server.
        command.current_dir(directory).process_group(0);
        let child = command.spawn().expect("a program that was found");
        let mut watch = Command::new("sh");
        watch.args(["-c", WATCH, "watch"]).arg(child.id().to_string()).arg(directory).process_group(0);
        let watch = watch.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut watch = watch.expect("a shell");
        let alive = watch.stdin.take().expect("piped");
        Self { child, watch, _alive: alive }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Sends a signal, and waits for the end.
    pub fn end(&mut self, signal: Signal) {
        drop(self.watch.kill());
        drop(self.watch.wait());
        if !self.is_running() {
            return;
        }
        send(self.pid(), signal);
        let start = Instant::now();
        while self.is_running() {
            if start.elapsed() > PATIENCE {
                eprintln!("a server did not end within {PATIENCE:?} of {signal:?}");
                drop(self.child.kill());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Signal::QUIT);
    }
}

/// Sends a signal to a process, if there is one.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        kill_process(pid, signal).unwrap_or_default();
    }
}

/// A command that runs as an unprivileged user where we are root: PostgreSQL and PgBouncer refuse to run as root.
pub fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((uid, gid)) = other_user() {
        command.uid(uid).gid(gid);
    }
    command
}

/// A temporary directory that belongs to that user.
pub fn directory(name: &str) -> TempDir {
    let directory = tempfile::Builder::new().prefix(name).tempdir().expect("a writable directory");
    give(directory.path());
    directory
}

/// Gives a file to that user.
pub fn give(path: &Path) {
    if let Some((uid, gid)) = other_user() {
        std::os::unix::fs::chown(path, Some(uid), Some(gid)).expect("root may");
    }
}

/// Whom servers run as.
pub fn user() -> u32 {
    other_user().map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid)
}

/// The user and group of `postgres`, or of `nobody`, where we are root.
fn other_user() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = std::fs::read_to_string("/etc/passwd").expect("a list of users");
    let find = |name: &str| {
        let fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == name)?;
        Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
    };
    Some(find("postgres").or_else(|| find("nobody")).expect("a user who is not root"))
}

/// Where a program is: on the path, or in one of these directories.
pub fn find(program: &str, others: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain(others.iter().cloned());
    places.find_map(|place| Some(place.join(program)).filter(|file| file.is_file()))
}

/// Says that a test is skipped for want of a program. Fails instead where `CI` is set.
#[track_caller]
pub fn skipped(program: &str) {
    assert!(std::env::var_os("CI").is_none(), "there is no {program} here");
    eprintln!("skipped: there is no {program} here");
}

/// A free port of a loopback address of its own, so that no other socket is given it while its server is down.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id().wrapping_mul(2_654_435_761).to_be_bytes();
    let nth = NEXT.fetch_add(1, Ordering::SeqCst);
    let last = u8::try_from(1 + nth % 250).expect("below 251");
    // Not the addresses that scripted upstreams take.
    let address = Ipv4Addr::new(127, 1 + process[2] % 250, process[3], last);
    // Nor a port that the system gives to whoever asks for any: it may do so before the server has it.
    let first = std::process::id().wrapping_add(nth * 97) % 12_000;
    let mut ports = (first..12_000).chain(0..first).filter_map(|place| u16::try_from(20_000 + place).ok());
    let free = ports.find(|port| TcpListener::bind((address, *port)).is_ok()).expect("a free port");
    (address, free).into()
}
