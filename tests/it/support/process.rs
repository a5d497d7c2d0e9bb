//! A process, its log and its end.

use std::any::Any;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::Value;

use super::wait::{PATIENCE, eventually};

/// A started process and what it logs.
pub struct Process {
    child: Child,
    /// What it needs; lives as long as it does.
    _kept: Box<dyn Any + Send + Sync>,
    log: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Process {
    /// Starts a command and keeps reading what it writes to standard error.
    pub fn start(mut command: Command, kept: impl Send + Sync + 'static) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self::start_as_it_is(command, kept)
    }

    /// As [`Process::start`], with the standard input and output that the command says.
    pub fn start_as_it_is(mut command: Command, kept: impl Send + Sync + 'static) -> Self {
        command.stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let log = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let stderr = child.stderr.take().expect("piped");
        let lines = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                lines.0.lock().unwrap().push(String::from_utf8_lossy(&line).into_owned());
                lines.1.notify_all();
            }
            lines.0.lock().unwrap().push(END.into());
            lines.1.notify_all();
        });
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
        let start = std::time::Instant::now();
        let mut from = 0;
        let mut lines = self.log.0.lock().unwrap();
        loop {
            for line in &lines[from..] {
                let found = read(line);
                if found.is_some() || line == END {
                    return found;
                }
            }
            from = lines.len();
            if start.elapsed() > PATIENCE {
                return None;
            }
            lines = self.log.1.wait_timeout(lines, Duration::from_secs(1)).unwrap().0;
        }
    }

    pub fn log(&self) -> String {
        self.log.0.lock().unwrap().join("\n")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
        rustix::process::kill_process(pid, signal).expect("a child");
    }

    pub fn kill9(&mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let status = eventually("the end of the process", || self.child.try_wait().expect("a child"));
        // What it wrote last is still on its way.
        self.wait_for_log(|line| (line == END).then_some(()));
        status
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

/// Stands in the log where the process closed it.
const END: &str = "(end)";

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
