//! Lines that go to a file or a pipe, and keep nobody waiting where its reader has stopped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::fmt::MakeWriter;

use super::Format;
use crate::telemetry::{rfc3339, wall_clock};

/// How long a line may wait for its reader. After one that waited in vain, none waits until the reader has gone on.
const PATIENCE: Duration = Duration::from_secs(1);

/// A pipe that can be written to takes so many bytes without waiting (PIPE_BUF).
const AT_ONCE: usize = 4096;

/// Writes lines to a descriptor. Where that takes nothing for a second, as a pipe whose reader has stopped, lines are lost until
/// it does again, and then a line says how many. A file takes everything, or fails.
pub(super) struct LineWriter<F> {
    to: F,
    format: Format,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Lines that were lost since the last one that was written.
    lost: u64,
    /// The last line that was written is not whole.
    is_torn: bool,
}

impl<F: AsFd> LineWriter<F> {
    pub(super) fn new(to: F, format: Format) -> Self {
        Self { to, format, state: Mutex::default() }
    }

    fn line(&self, line: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = if state.lost > 0 { Duration::ZERO } else { PATIENCE };
        if !self.takes(patience)? {
            state.lost += 1;
            return Ok(());
        }
        let mut notice = Vec::new();
        if std::mem::take(&mut state.is_torn) {
            notice.push(b'\n');
        }
        let lost = std::mem::take(&mut state.lost);
        if lost > 0 {
            notice.extend(self.notice(lost).into_bytes());
        }
        for bytes in [&notice[..], line] {
            let mut left = bytes;
            while !left.is_empty() {
                if left.len() < bytes.len() && !self.takes(PATIENCE)? {
                    (state.lost, state.is_torn) = (lost + 1, true);
                    return Ok(());
                }
                match rustix::io::write(&self.to, &left[..left.len().min(AT_ONCE)]) {
                    Ok(count) => left = &left[count..],
                    Err(rustix::io::Errno::INTR) => {}
                    // Whoever made the pipe wants no one to wait for it.
                    Err(rustix::io::Errno::AGAIN) => {
                        (state.lost, state.is_torn) = (lost + 1, left.len() < bytes.len());
                        return Ok(());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// Whether something can be written now, or within this time.
    fn takes(&self, patience: Duration) -> io::Result<bool> {
        let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
        let to: BorrowedFd<'_> = self.to.as_fd();
        loop {
            match poll(&mut [PollFd::new(&to, PollFlags::OUT)], Some(&timeout)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn notice(&self, lines: u64) -> String {
        let at = rfc3339(wall_clock());
        let message = "lines of the log were lost: standard error took none, because its reader had stopped";
        match self.format {
            Format::Text => format!("{at} {:>5} oncegate::log: {message} lines={lines}\n", "WARN"),
            Format::Json => {
                let line = serde_json::json!({ "timestamp": at, "level": "WARN", "target": "oncegate::log", "message": message, "lines": lines });
                format!("{line}\n")
            }
        }
    }
}

impl<'a, F: AsFd + 'a> MakeWriter<'a> for LineWriter<F> {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl<F: AsFd> io::Write for &LineWriter<F> {
    /// Takes a whole line, or loses it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_reader_that_has_stopped_keeps_nobody_waiting_and_learns_what_it_missed() {
        let (mut reader, to) = io::pipe().unwrap();
        let writer = LineWriter::new(to, Format::Json);
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let began = Instant::now();
        for _ in 0..1000 {
            (&writer).write_all(&line).unwrap();
        }
        // One line has waited.
        assert!(began.elapsed() < 5 * PATIENCE, "{:?}", began.elapsed());
        let mut read = vec![0; 8 * AT_ONCE];
        reader.read_exact(&mut read).unwrap();
        (&writer).write_all(b"again\n").unwrap();
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let text = String::from_utf8(read).unwrap() + &rest;
        let lines: Vec<&str> = text.lines().collect();
        let (last, notice) = (lines[lines.len() - 1], lines[lines.len() - 2]);
        let notice: serde_json::Value = serde_json::from_str(notice).unwrap();
        let kept = lines.iter().filter(|line| line.len() == 999).count() as u64;
        assert_eq!((last, &notice["lines"]), ("again", &(1000 - kept).into()));
        assert!(kept > 10 && kept < 1000, "{kept}");
    }

    #[test]
    fn a_line_that_is_longer_than_a_pipe_takes_at_once_is_written_whole() {
        let (mut reader, to) = io::pipe().unwrap();
        let writer = LineWriter::new(to, Format::Text);
        let line = [&[b'x'; 20_000][..], b"\n"].concat();
        (&writer).write_all(&line).unwrap();
        drop(writer);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, line);
    }
}
