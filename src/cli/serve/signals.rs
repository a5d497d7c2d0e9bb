//! The signals that the process minds.

use std::future::pending;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use super::watched_file::WatchedFile;

/// Signals to stop that come this soon after one are the same instruction.
const ONE_INSTRUCTION: Duration = Duration::from_millis(50);

/// The signals that the process minds.
pub(in crate::cli) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// Whether SIGHUP came while a reload was not possible.
    is_reload_due: bool,
    /// Whose change asks for a reload, too.
    watched: Option<WatchedFile>,
}

/// The instruction of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    /// To end: SIGTERM or SIGINT.
    Stop,
    /// To read its configuration again: SIGHUP, or a change of the file that is watched.
    Reload,
}

impl Signals {
    pub(in crate::cli) fn install(watched: Option<WatchedFile>) -> std::io::Result<Self> {
        // Its default would end the process where a file comes to the limit on sizes (setrlimit(2), RLIMIT_FSIZE). With a handler,
        // which stays, the write fails as on a full disk.
        drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            is_reload_due: false,
            watched,
        })
    }

    /// Waits for the next instruction.
    pub(super) async fn next(&mut self) -> Instruction {
        if std::mem::take(&mut self.is_reload_due) {
            return Instruction::Reload;
        }
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Instruction::Stop,
            _ = self.interrupt.recv() => Instruction::Stop,
            _ = self.hangup.recv() => Instruction::Reload,
            () = change(&mut self.watched) => {
                tracing::info!("the configuration file has changed");
                Instruction::Reload
            }
        }
    }

    /// Waits for the instruction to stop. A reload that is due meanwhile is left for later.
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

    /// Waits for one more instruction to stop. What signals a process and then its group, as `timeout` does, gives one
    /// instruction by two signals.
    pub(super) async fn stop_again(&mut self) {
        another(async || self.stop().await).await;
    }
}

async fn change(watched: &mut Option<WatchedFile>) {
    match watched {
        Some(file) => file.changed().await,
        None => pending().await,
    }
}

/// Waits for a signal that is not part of the instruction which came just before.
async fn another(mut signal: impl AsyncFnMut()) {
    let before = Instant::now();
    loop {
        signal().await;
        if before.elapsed() >= ONE_INSTRUCTION {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn signals_at_the_same_time_are_one_instruction() {
        let (began, mut count) = (Instant::now(), 0);
        another(async || {
            count += 1;
            tokio::time::sleep(ONE_INSTRUCTION.mul_f64(0.4)).await;
        })
        .await;
        assert_eq!((count, began.elapsed()), (3, ONE_INSTRUCTION.mul_f64(1.2)));
    }
}
