//! Notifications to the service manager (sd_notify(3)), where one listens.
//!
//! The protocol is a datagram of lines, so nothing more than a socket is needed for it.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::admin::{Phase, Readiness};
use crate::http::shards::Shards;

/// How long the service manager may take to take a word in.
const SEND: Duration = Duration::from_secs(1);

/// How often it is looked whether there is something to say.
const LOOK: Duration = Duration::from_secs(1);

/// How much more time a start or an end asks for, while it goes on.
const EXTENSION: Duration = Duration::from_secs(15);

/// After how many looks it asks again.
const LOOKS: u32 = 5;

/// Tells the service manager how the process does; does nothing where there is none. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(in crate::cli) struct Notices(Option<Arc<UnixDatagram>>);

impl Notices {
    /// For the service manager that started this process.
    pub(super) fn of_process() -> Self {
        let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else {
            return Self::default();
        };
        match connected(&path) {
            Ok(socket) => Self(Some(Arc::new(socket))),
            Err(error) => {
                tracing::warn!(%error, "NOTIFY_SOCKET: cannot notify the service manager");
                Self::default()
            }
        }
    }

    /// It serves.
    pub(super) fn ready(&self) {
        self.tell("READY=1\nSTATUS=serving");
    }

    /// It reads its configuration again.
    pub(super) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// That is over.
    pub(super) fn reloaded(&self, is_good: bool) {
        let status = if is_good { "serving" } else { "serving; the last reload was refused, see the log" };
        self.tell(&format!("READY=1\nSTATUS={status}"));
    }

    /// It finishes what runs, and ends.
    pub(super) fn stopping(&self, running: usize) {
        self.tell(&format!("STOPPING=1\nSTATUS=draining; attempts: {running}"));
    }

    fn tell(&self, lines: &str) {
        if let Some(socket) = &self.0
            && let Err(error) = socket.send(lines.as_bytes())
        {
            tracing::debug!(%error, "a notification to the service manager failed");
        }
    }

    /// Says for as long as the process lives what it waits for, and asks for the time that this takes; and where the
    /// manager watches it, that it lives.
    pub(super) fn go_on(&self, readiness: Readiness, shards: &Arc<Shards>) {
        if self.0.is_none() {
            return;
        }
        tokio::spawn(self.clone().accompany(readiness));
        if let Some(limit) = watchdog() {
            tokio::spawn(self.clone().keep_alive(Arc::clone(shards), limit));
        }
    }

    async fn accompany(self, readiness: Readiness) {
        let mut tick = interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut last, mut looks) = (Phase::Ready, 0);
        loop {
            tick.tick().await;
            let phase = readiness.phase();
            let is_new = std::mem::replace(&mut last, phase) != phase;
            looks = if is_new { 0 } else { looks + 1 };
            if phase == Phase::Ready || looks % LOOKS != 0 {
                continue;
            }
            let status = if phase == Phase::Draining { String::new() } else { format!("\nSTATUS={}", phase.as_str()) };
            self.tell(&format!("EXTEND_TIMEOUT_USEC={}{status}", EXTENSION.as_micros()));
        }
    }

    /// Says that the process lives, twice as often as it must, and only while every thread that serves does something:
    /// this task runs on the main one.
    async fn keep_alive(self, shards: Arc<Shards>, limit: Duration) {
        let mut tick = interval(limit / 2);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            match timeout(limit / 4, shards.answer()).await {
                Ok(()) => self.tell("WATCHDOG=1"),
                Err(_) => {
                    tracing::error!("a serving thread does not respond: the watchdog is not notified")
                }
            }
        }
    }
}

fn connected(path: &OsStr) -> std::io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    match path.as_bytes() {
        // In no file system.
        [b'@', name @ ..] => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        _ => socket.connect(path)?,
    }
    socket.set_write_timeout(Some(SEND))?;
    Ok(socket)
}

/// How long the manager goes without a word before it takes the process for dead, where it watches this one.
fn watchdog() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_other = number("WATCHDOG_PID").is_some_and(|pid| pid != u64::from(std::process::id()));
    let micros = number("WATCHDOG_USEC").filter(|micros| !is_other && *micros > 0)?;
    Some(Duration::from_micros(micros))
}
