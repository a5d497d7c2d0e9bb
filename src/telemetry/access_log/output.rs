//! What the access log is written to.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use super::Settings;

/// A pipe takes so many bytes at once or none, so that nothing else that is written to it comes between (PIPE_BUF).
const ATOMIC: usize = 4096;

/// Others than the group of the gate have no business with who its clients are.
const MODE: u32 = 0o640;

/// `[access_log] path`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `-`: standard output.
    Stdout,
    /// A file, to which is appended. It is made where there is none.
    File(PathBuf),
}

/// A target that is open.
pub struct Output {
    pub(super) settings: Settings,
    file: File,
    /// Whether a part of a line can be removed from it.
    is_regular: bool,
}

/// A target cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("access_log.path: cannot open {target}: {source}")]
pub struct OpenError {
    target: Target,
    source: io::Error,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Output {
    /// Opens a target. Blocks.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let opened = match &settings.target {
            Target::Stdout => io::stdout().as_fd().try_clone_to_owned().map(File::from),
            // With the right to read, opening a named pipe does not wait for a reader.
            Target::File(path) => OpenOptions::new().read(true).append(true).create(true).mode(MODE).open(path),
        };
        match opened.and_then(|file| Ok((file.metadata()?.is_file(), file))) {
            Ok((is_regular, file)) => Ok(Self { settings, file, is_regular }),
            Err(source) => Err(OpenError { target: settings.target, source }),
        }
    }

    /// Opens a target while other tasks go on.
    ///
    /// # Errors
    /// It cannot be opened.
    pub async fn open_in_background(settings: Settings) -> Result<Self, OpenError> {
        let target = settings.target.clone();
        let opened = tokio::task::spawn_blocking(move || Self::open(settings)).await;
        opened.unwrap_or_else(|error| Err(OpenError { target, source: io::Error::other(error) }))
    }

    /// What it was opened by.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Writes some of these lines; returns how many bytes.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let at_once = if self.is_regular || lines.len() <= ATOMIC {
            lines.len()
        } else {
            // Whole lines, or one that is longer.
            let whole = memchr::memrchr(b'\n', &lines[..ATOMIC]).or_else(|| memchr::memchr(b'\n', lines));
            whole.map_or(lines.len(), |end| end + 1)
        };
        self.file.write(&lines[..at_once])
    }

    /// Removes this part of a line from the end, where it was written and no more was. Returns whether it is gone.
    pub(super) fn remove(&mut self, part: &[u8]) -> bool {
        self.is_regular && self.try_remove(part).unwrap_or(false)
    }

    fn try_remove(&mut self, part: &[u8]) -> io::Result<bool> {
        let length = self.file.metadata()?.len();
        let Some(before) = length.checked_sub(part.len() as u64) else { return Ok(false) };
        let mut found = vec![0; part.len()];
        self.file.seek(SeekFrom::Start(before))?;
        self.file.read_exact(&mut found)?;
        // Another process may have appended a line of its own.
        if found != part {
            return Ok(false);
        }
        self.file.set_len(before)?;
        Ok(true)
    }
}
