//! The access log: one line for each request, written when its answer is over.
//!
//! No request waits for a disk. The thread that ends an answer appends the line to a buffer that hardly any other thread
//! uses, and one thread writes all buffers out. Where it cannot keep up, or the disk is full, a buffer takes no more than
//! [`MAX_BUFFERED`]; what comes then is dropped and counted, and that is logged once a minute. What is buffered is written
//! when the disk takes it again. Lines are written whole, in order of the buffer that they were in.

mod format;
mod output;
mod writer;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use prometheus::IntCounter;
use tokio::sync::oneshot;
use tokio::time::timeout;

pub use self::format::{FORMATS, Format};
pub use self::output::{OpenError, Output, Target};
use self::writer::{Command, Signal, Writer};
use super::log_throttle::LogThrottle;
use super::report::Facts;

/// The bytes of lines that one buffer holds while they cannot be written. There are two buffers for each core.
pub const MAX_BUFFERED: usize = 8 << 20;

/// How long a change of the file, or the end of the process, waits for what is buffered to be written.
const PATIENCE: Duration = Duration::from_secs(2);

/// `[access_log]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where lines are written.
    pub target: Target,
    /// How they are written.
    pub format: Format,
}

/// An access log that is written. Its thread ends when it is dropped, once it has written what there is.
pub struct AccessLog {
    shared: Arc<Shared>,
}

/// What the threads that append share with the one that writes.
struct Shared {
    buffers: Box<[Mutex<Buffer>]>,
    signal: Signal,
    lost: IntCounter,
    warned: LogThrottle,
}

/// Lines that are not written yet.
struct Buffer {
    lines: Vec<u8>,
    format: Format,
}

thread_local! {
    /// The buffer of this thread.
    static SLOT: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

impl AccessLog {
    /// Begins to write. Counts the lines that it drops in `lost`.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(output: Output, lost: IntCounter) -> io::Result<Arc<Self>> {
        let buffer = || Mutex::new(Buffer { lines: Vec::new(), format: output.settings.format });
        let count = 2 * thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            buffers: (0..count).map(|_| buffer()).collect(),
            signal: Signal::default(),
            lost,
            warned: LogThrottle::each_minute(),
        });
        let writer = Writer::new(Arc::clone(&shared), output);
        let thread = thread::Builder::new().name("access-log".into()).spawn(move || writer.run())?;
        shared.signal.set_thread(thread.thread().clone());
        Ok(Arc::new(Self { shared }))
    }

    /// From now on lines go to this file; those before have gone to the former one, unless that takes them no more: then
    /// they go to the new one too. It may be the same file, opened anew.
    pub async fn switch(&self, output: Output) {
        self.ask(|done| Command::Switch(output, done)).await;
    }

    /// Opens the file again where it is written to, as after a rotation.
    ///
    /// # Errors
    /// It cannot be opened: the former one is written on.
    pub async fn reopen(&self, settings: Settings) -> Result<(), OpenError> {
        let output = Output::open_in_background(settings).await?;
        self.switch(output).await;
        Ok(())
    }

    /// Writes all lines so far and ends, or gives up after a while and says how many lines are lost.
    pub async fn end(&self) {
        self.ask(|done| Command::End(Some(done))).await;
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) {
        let (done, is_done) = oneshot::channel();
        self.shared.signal.command(command(done));
        if timeout(2 * PATIENCE, is_done).await.is_err() {
            tracing::error!("the access log cannot be written in time: its disk or its reader hangs");
        }
    }

    /// Writes a request's line.
    pub(super) fn write(&self, facts: &Facts) {
        self.append(|lines, style| format::write(lines, style, facts));
    }

    fn append(&self, line: impl FnOnce(&mut Vec<u8>, Format)) {
        let shared = &*self.shared;
        let slot = SLOT.with(|slot| *slot) % shared.buffers.len();
        let mut buffer = lock(&shared.buffers[slot]);
        let was_empty = buffer.lines.is_empty();
        if buffer.lines.len() >= MAX_BUFFERED {
            drop(buffer);
            shared.lost(1);
            return;
        }
        let Buffer { lines, format } = &mut *buffer;
        line(lines, *format);
        drop(buffer);
        if was_empty {
            shared.signal.wake();
        }
    }
}

impl Shared {
    fn lost(&self, count: u64) {
        self.lost.inc_by(count);
        if let Some(others) = self.warned.due() {
            let total = self.lost.get();
            tracing::error!(total, others, "lines of the access log are lost: they cannot be written fast enough");
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.shared.signal.command(Command::End(None));
    }
}

fn lock(buffer: &Mutex<Buffer>) -> MutexGuard<'_, Buffer> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
