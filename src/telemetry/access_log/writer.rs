//! The thread that writes the access log.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::output::Output;
use super::{PATIENCE, Shared, lock};
use crate::telemetry::log_throttle::LogThrottle;

/// How long lines gather before they are written together.
const PAUSE: Duration = Duration::from_millis(20);

/// How long to wait after a write failed.
const RETRY: Duration = Duration::from_secs(1);

/// A buffer that grew larger than this, in bytes, is not kept.
const KEPT: usize = 1 << 20;

/// An order to the thread. The sender hears when it is carried out.
pub(super) enum Command {
    Switch(Output, oneshot::Sender<()>),
    End(Option<oneshot::Sender<()>>),
}

/// Wakes the thread.
#[derive(Default)]
pub(super) struct Signal {
    is_due: AtomicBool,
    thread: OnceLock<Thread>,
    commands: Mutex<Vec<Command>>,
}

impl Signal {
    pub(super) fn set_thread(&self, thread: Thread) {
        let _ = self.thread.set(thread);
        self.is_due.store(false, Ordering::Release);
        self.wake();
    }

    /// There is something to write.
    pub(super) fn wake(&self) {
        if !self.is_due.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    pub(super) fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.wake();
    }

    fn take_commands(&self) -> Vec<Command> {
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until it is woken, or for `limit`.
    fn wait(&self, limit: Option<Duration>) {
        let end = limit.map(|limit| Instant::now() + limit);
        while !self.is_due.swap(false, Ordering::AcqRel) {
            match end.map(|end| end.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return,
                Some(left) => thread::park_timeout(left),
                None => thread::park(),
            }
        }
    }
}

/// Writes what the buffers have.
pub(super) struct Writer {
    shared: Arc<Shared>,
    output: Output,
    /// Lines that were taken from the buffers, of which so many bytes are written.
    taken: Vec<u8>,
    written: usize,
    failures: LogThrottle,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, output: Output) -> Self {
        Self { shared, output, taken: Vec::new(), written: 0, failures: LogThrottle::each_minute() }
    }

    pub(super) fn run(mut self) {
        let mut is_writable = true;
        loop {
            self.shared.signal.wait((!is_writable).then_some(RETRY));
            let mut end = None;
            for command in self.shared.signal.take_commands() {
                match command {
                    Command::Switch(output, done) => {
                        self.write_all();
                        self.switch(output);
                        let _ = done.send(());
                    }
                    Command::End(done) => end = Some(done),
                }
            }
            is_writable = self.write_all();
            if let Some(done) = end {
                self.end(is_writable);
                let _ = done.map(|done| done.send(()));
                return;
            }
            if is_writable {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Writes what there is. Returns false where that is not possible now.
    fn write_all(&mut self) -> bool {
        if !self.write_taken() {
            return false;
        }
        let shared = Arc::clone(&self.shared);
        shared.buffers.iter().all(|buffer| {
            std::mem::swap(&mut self.taken, &mut lock(buffer).lines);
            self.write_taken()
        })
    }

    /// Writes the lines that were taken. Returns false where that is not possible now; what is left is kept.
    fn write_taken(&mut self) -> bool {
        while self.written < self.taken.len() {
            match self.output.write(&self.taken[self.written..]) {
                Ok(0) => return self.failed(&io::ErrorKind::WriteZero.into()),
                Ok(some) => self.written += some,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Whoever made the pipe wants no one to wait for it.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(PAUSE),
                Err(error) => return self.failed(&error),
            }
        }
        self.taken.clear();
        self.written = 0;
        if self.taken.capacity() > KEPT {
            self.taken = Vec::new();
        }
        true
    }

    fn failed(&mut self, error: &io::Error) -> bool {
        if let Some(others) = self.failures.due() {
            let (path, lost) = (&self.output.settings.target, self.shared.lost.get());
            tracing::error!(%path, %error, lost, others, "the access log cannot be written: lines are kept as far as there is room");
        }
        // What is there ends with a whole line.
        let begin = self.begin_of_line();
        if begin < self.written && self.output.remove(&self.taken[begin..self.written]) {
            self.written = begin;
        }
        false
    }

    /// Where the line begins of which a part is written.
    fn begin_of_line(&self) -> usize {
        memchr::memrchr(b'\n', &self.taken[..self.written]).map_or(0, |end| end + 1)
    }

    /// What the former file has not taken goes to the new one, in whole lines.
    fn switch(&mut self, output: Output) {
        self.written = self.begin_of_line();
        for buffer in &self.shared.buffers {
            let mut buffer = lock(buffer);
            self.taken.append(&mut buffer.lines);
            buffer.format = output.settings.format;
        }
        self.output = output;
    }

    /// Nothing is appended any more.
    fn end(mut self, mut is_writable: bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_writable && Instant::now() < deadline {
            thread::sleep(PAUSE);
            is_writable = self.write_all();
        }
        let lines = |bytes: &[u8]| memchr::memchr_iter(b'\n', bytes).count();
        let buffered: usize = self.shared.buffers.iter().map(|buffer| lines(&lock(buffer).lines)).sum();
        let left = buffered + lines(&self.taken[self.written..]);
        if left > 0 {
            self.shared.lost.inc_by(left as u64);
            tracing::error!(lines = left, "lines of the access log are lost: they could not be written before the end");
        }
    }
}
