//! A Redis of a test's own.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::process::{self, PATIENCE, Server, give, unprivileged};

/// A running server. Ended when dropped.
pub struct Redis {
    address: SocketAddr,
    binary: PathBuf,
    settings: Vec<(String, String)>,
    directory: TempDir,
    server: Mutex<Option<Server>>,
}

impl Redis {
    /// Starts a server that appends what is written to a file; nothing (and a failure where `CI` is set) where Redis is
    /// not installed.
    #[track_caller]
    pub fn start() -> Option<Self> {
        Self::with(&[("appendonly", "yes")])
    }

    /// Starts a server with settings of its own.
    #[track_caller]
    pub fn with(settings: &[(&str, &str)]) -> Option<Self> {
        let Some(binary) = process::find("redis-server", &[]) else {
            process::skipped("redis-server");
            return None;
        };
        let directory = process::directory("oncegate-redis-");
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let redis = Self { address: process::free_address(), binary, settings, directory, server: Mutex::new(None) };
        redis.begin();
        Some(redis)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Starts it again, on what it kept.
    pub fn begin(&self) {
        let mut command = unprivileged(&self.binary);
        command.arg("--bind").arg(self.address.ip().to_string()).arg("--port").arg(self.address.port().to_string());
        command.arg("--dir").arg(self.directory.path()).args(["--save", "", "--daemonize", "no"]);
        for (name, value) in &self.settings {
            command.arg(format!("--{name}")).arg(value);
        }
        let server = Server::start(command, self.directory.path(), &self.directory.path().join("log"));
        *self.server.lock().unwrap() = Some(server);
        let start = Instant::now();
        while !self.answers() {
            assert!(start.elapsed() < PATIENCE, "Redis does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it with a signal.
    pub fn end(&self, signal: Signal) {
        if let Some(mut server) = self.server.lock().unwrap().take() {
            server.end(signal);
        }
    }

    /// Sends it a signal: `STOP` hangs it, `CONT` lets it go on.
    pub fn signal(&self, signal: Signal) {
        if let Some(server) = &*self.server.lock().unwrap() {
            process::send(server.pid(), signal);
        }
    }

    /// What it says to an inline command, raw.
    pub fn run(&self, command: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        stream.write_all(format!("{command}\r\n").as_bytes()).ok()?;
        let mut said = vec![0; 64 << 10];
        let length = stream.read(&mut said).ok()?;
        said.truncate(length);
        Some(String::from_utf8_lossy(&said).into_owned())
    }

    fn answers(&self) -> bool {
        self.run("PING").is_some_and(|said| said.starts_with("+PONG"))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}
