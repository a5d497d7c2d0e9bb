//! What a test logs.

use std::io;
use std::sync::{Arc, Mutex};

use tracing::subscriber::DefaultGuard;

/// The lines of the log so far.
#[derive(Clone, Default)]
pub(crate) struct LoggedLines(Arc<Mutex<Vec<u8>>>);

/// From now on, what this thread logs.
pub(crate) fn logged() -> (LoggedLines, DefaultGuard) {
    let lines = LoggedLines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    (lines, tracing::subscriber::set_default(subscriber))
}

impl LoggedLines {
    /// All of them.
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Those since this was last asked.
    pub(crate) fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl io::Write for LoggedLines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
