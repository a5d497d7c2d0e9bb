//! A process, its log and its end.

use std::any::Any;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::wait::{PATIENCE, eventually};

/// A started process and what it logs.
pub struct Process {
    child: Child,
    /// What it needs; lives as long as it does.
    _kept: Box<dyn Any + Send + Sync>,
    /// What it writes to standard error. A file, so that who sees the effect of something sees the line written before it.
    log: NamedTempFile,
}

impl Process {
    /// Starts a command and keeps what it writes to standard error.
    pub fn start(mut command: Command, kept: impl Send + Sync + 'static) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self::start_as_it_is(command, kept)
    }

    /// As [`Process::start`], with the standard input and output that the command says.
    pub fn start_as_it_is(mut command: Command, kept: impl Send + Sync + 'static) -> Self {
        let log = NamedTempFile::new().expect("a file");
        command.stderr(log.as_file().try_clone().expect("a file"));
        let child = command.spawn().expect("the binary starts");
        Self { child, _kept: Box::new(kept), log }
    }

    /// The address in the log line with this message, or nothing where the process ends without one.
    pub fn address(&self, message: &str) -> Option<SocketAddr> {
        self.wait_for_log(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            (line["message"] == message).then(|| line["address"].as_str()?.parse().ok())?
        })
    }

    /// The first log line that gives something, or nothing where the process ends, or says nothing of it for long.
    pub fn wait_for_log<T>(&self, mut read: impl FnMut(&str) -> Option<T>) -> Option<T> {
        let start = Instant::now();
        let mut from = 0;
        loop {
            let has_ended = self.has_ended();
            let new = self.log_from(from);
            let lines = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let complete = if has_ended { new.len() } else { lines };
            if let Some(found) = String::from_utf8_lossy(&new[..complete]).lines().find_map(&mut read) {
                return Some(found);
            }
            if has_ended || start.elapsed() > PATIENCE {
                return None;
            }
            from += complete as u64;
            std::thread::sleep(PAUSE);
        }
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.log_from(0)).into_owned()
    }

    fn log_from(&self, from: u64) -> Vec<u8> {
        let size = self.log.as_file().metadata().expect("a file").len();
        let mut bytes = vec![0; usize::try_from(size.saturating_sub(from)).expect("a log in memory")];
        self.log.as_file().read_exact_at(&mut bytes, from).expect("it only grows");
        bytes
    }

    /// Whether it has ended; it can still be waited for.
    fn has_ended(&self) -> bool {
        let asked = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // One that was waited for is known no more.
        waitid(WaitId::Pid(self.process_id()), asked).map_or(true, |status| status.is_some())
    }

    fn process_id(&self) -> Pid {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.process_id(), signal).expect("a child");
    }

    pub fn kill9(&mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the end of the process", || self.child.try_wait().expect("a child"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = self.log();
            let last = log.lines().count().saturating_sub(LINES);
            let shown: Vec<&str> = log.lines().skip(last).collect();
            eprintln!("--- the gate's log, after {last} lines ---\n{}\n---", shown.join("\n"));
        }
    }
}

/// How many lines of its log are shown where a test fails.
const LINES: usize = 100;

/// How long until the log is read again.
const PAUSE: Duration = Duration::from_millis(5);

/// A Python that has psycopg: another one may come first on the path than the system's, which its packages are for. Nothing
/// (and a failure where `CI` is set) where there is none.
#[track_caller]
pub fn python_with_psycopg() -> Option<&'static str> {
    let has_psycopg = |python: &&str| {
        let import = ["-c", "import psycopg, psycopg_pool"];
        let asked = Command::new(python).args(import).stdin(Stdio::null()).stderr(Stdio::null()).status();
        asked.is_ok_and(|status| status.success())
    };
    let found = ["python3", "/usr/bin/python3"].into_iter().find(has_psycopg);
    if found.is_none() {
        crate::servers::skipped("psycopg 3 for Python, with its pool (python3-psycopg, python3-psycopg-pool)");
    }
    found
}
