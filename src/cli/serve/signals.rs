//! The signals that the process minds.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that the process minds.
pub(in crate::cli) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Whether it was told to reload when nobody could.
    is_reload_due: bool,
}

/// What the process was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// To end: SIGTERM or SIGINT.
    Stop,
    /// To read its configuration again: SIGHUP.
    Reload,
}

impl Signals {
    pub(in crate::cli) fn install() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            is_reload_due: false,
        })
    }

    /// Waits until the process is told something.
    pub(super) async fn next(&mut self) -> Told {
        if std::mem::take(&mut self.is_reload_due) {
            return Told::Reload;
        }
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Told::Stop,
            _ = self.interrupt.recv() => Told::Stop,
            _ = self.hangup.recv() => Told::Reload,
        }
    }

    /// Waits until the process is told to stop. What else it is told meanwhile is for later.
    pub(in crate::cli) async fn stop(&mut self) {
        loop {
            tokio::select! {
                biased;
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => self.is_reload_due = true,
            }
        }
    }
}
