//! Lines that go to a file or a pipe, and keep nobody waiting where its reader has stopped.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::fmt::MakeWriter;

use super::Format;
use crate::telemetry::{rfc3339, wall_clock};

/// How long a line may wait for its reader. After one that waited in vain, none waits until the reader has gone on.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a line may wait in the minute after that: a reader that is slow, and does not stop, would have each wait in turn.
const LITTLE_PATIENCE: Duration = Duration::from_millis(10);
const MINUTE: Duration = Duration::from_secs(60);

/// A pipe that can be written to takes so many bytes without waiting (PIPE_BUF).
const AT_ONCE: usize = 4096;

/// Every line that was lost: a process has one log.
pub(super) static LOST: LazyLock<IntCounter> = LazyLock::new(|| {
    let help = "Lines of the log that standard error did not take: its reader had stopped, or its disk was full.";
    IntCounter::new("oncegate_log_lost_total", help).expect("a valid name")
});

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
    /// When a line was lost last.
    last_lost: Option<Instant>,
    /// The last line that was written is not whole.
    is_torn: bool,
}

impl State {
    fn patience(&self) -> Duration {
        match self.last_lost {
            _ if self.lost > 0 => Duration::ZERO,
            Some(at) if at.elapsed() < MINUTE => LITTLE_PATIENCE,
            Some(_) | None => PATIENCE,
        }
    }

    fn lose(&mut self, lines: u64) {
        self.lost += lines;
        self.last_lost = Some(Instant::now());
    }
}

impl<F: AsFd> LineWriter<F> {
    pub(super) fn new(to: F, format: Format) -> Self {
        Self { to, format, state: Mutex::default() }
    }

    fn line(&self, line: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = state.patience();
        if !self.takes(patience)? {
            LOST.inc();
            state.lose(1);
            return Ok(());
        }
        let mut notice = Vec::new();
        let was_torn = std::mem::take(&mut state.is_torn);
        if was_torn {
            notice.push(b'\n');
        }
        let lost = std::mem::take(&mut state.lost);
        if lost > 0 {
            notice.extend(self.notice(lost).into_bytes());
        }
        let before = notice.len();
        let text = if notice.is_empty() { Cow::Borrowed(line) } else { Cow::Owned([notice.as_slice(), line].concat()) };
        let mut written = 0;
        while written < text.len() {
            let left = &text[written..];
            // The first part was waited for.
            let is_taken = written == 0 || self.takes(patience.max(LITTLE_PATIENCE))?;
            match is_taken.then(|| rustix::io::write(&self.to, &left[..left.len().min(AT_ONCE)])) {
                Some(Ok(count)) => written += count,
                Some(Err(rustix::io::Errno::INTR)) => {}
                // Its reader has stopped, or the pipe does not block.
                None | Some(Err(rustix::io::Errno::AGAIN)) => {
                    LOST.inc();
                    state.is_torn = was_torn || written > 0;
                    state.lose(if written < before { lost + 1 } else { 1 });
                    return Ok(());
                }
                Some(Err(error)) => {
                    LOST.inc();
                    state.is_torn = was_torn || written > 0;
                    return Err(error.into());
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

    /// Its lines wait once for a second, and not each in turn.
    #[test]
    fn a_reader_that_is_slow_costs_little_time() {
        let (mut reader, to) = io::pipe().unwrap();
        let writer = LineWriter::new(to, Format::Text);
        let line = [&[b'x'; 999][..], b"\n"].concat();
        (0..200).for_each(|_| (&writer).write_all(&line).unwrap());
        let began = Instant::now();
        for _ in 0..20 {
            reader.read_exact(&mut [0; 2 * AT_ONCE]).unwrap();
            (0..50).for_each(|_| (&writer).write_all(&line).unwrap());
        }
        assert!(began.elapsed() < 20 * PATIENCE / 2, "{:?}", began.elapsed());
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
