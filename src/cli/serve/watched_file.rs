//! Notices that the configuration file has changed, for `oncegate serve --watch`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep_until};

/// How often the file is read. A change counts once two readings in a row agree: it may be written piece by piece.
const EVERY: Duration = Duration::from_secs(1);

/// The digest of a content, which may hold a secret.
type Content = [u8; 32];

/// A file, and what stood in it.
pub(in crate::cli) struct WatchedFile {
    path: PathBuf,
    /// What was read last as a configuration, taken or refused.
    settled: Option<Content>,
    /// Another content, of the last reading.
    newer: Option<Content>,
    next: Instant,
    /// How many readings in a row have failed.
    misses: u32,
}

impl WatchedFile {
    /// Watches a file from what stands in it now: before it is read as a configuration, so that no change is missed.
    pub(in crate::cli) fn new(path: PathBuf) -> Self {
        let settled = read(&path).ok();
        Self { path, settled, newer: None, next: Instant::now() + EVERY, misses: 0 }
    }

    /// Returns when the file has another content. Nothing is lost where this is dropped before.
    pub(super) async fn changed(&mut self) {
        loop {
            sleep_until(self.next).await;
            self.next = Instant::now() + EVERY;
            let path = self.path.clone();
            let reading = tokio::task::spawn_blocking(move || read(&path)).await;
            let content = match reading.map_err(io::Error::other).flatten() {
                Ok(content) => content,
                Err(error) => {
                    self.miss(&error);
                    continue;
                }
            };
            self.misses = 0;
            if self.settled.as_ref() == Some(&content) {
                self.newer = None;
            } else if self.newer.as_ref() == Some(&content) {
                (self.settled, self.newer) = (Some(content), None);
                return;
            } else {
                self.newer = Some(content);
            }
        }
    }

    /// Says once that the file is away. For one reading it may be, while another takes its place.
    fn miss(&mut self, error: &io::Error) {
        self.newer = None;
        self.misses = self.misses.saturating_add(1);
        if self.misses == 2 {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the configuration file cannot be read: the configuration in force stays");
        }
    }
}

fn read(path: &Path) -> io::Result<Content> {
    // To open a pipe waits for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    std::fs::read(path).map(|content| Sha256::digest(content).into())
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;

    /// Whether a change is noticed while the file is read so many times.
    async fn notices(file: &mut WatchedFile, readings: u32) -> bool {
        timeout(EVERY * readings, file.changed()).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_noticed_once_the_file_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("oncegate.toml");
        std::fs::write(&path, "a").unwrap();
        let mut file = WatchedFile::new(path.clone());
        // Between two readings, from here on.
        sleep(EVERY / 2).await;
        assert!(!notices(&mut file, 3).await);
        // Written piece by piece.
        for piece in ["ab", "abc"] {
            std::fs::write(&path, piece).unwrap();
            assert!(!notices(&mut file, 1).await, "{piece}");
        }
        assert!(notices(&mut file, 1).await);
        assert!(!notices(&mut file, 3).await, "once");
        // Back before it counted.
        std::fs::write(&path, "d").unwrap();
        assert!(!notices(&mut file, 1).await);
        std::fs::write(&path, "abc").unwrap();
        assert!(!notices(&mut file, 3).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_away_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("oncegate.toml");
        std::fs::write(&path, "a").unwrap();
        let mut file = WatchedFile::new(path.clone());
        // Between two readings, from here on.
        sleep(EVERY / 2).await;
        std::fs::remove_file(&path).unwrap();
        assert!(!notices(&mut file, 3).await);
        std::fs::write(&path, "a").unwrap();
        assert!(!notices(&mut file, 3).await, "it is the same");
        // A pipe that nothing writes to, for a moment.
        std::fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        assert!(!notices(&mut file, 3).await);
        // As Kubernetes replaces a mounted configuration: by a link to another directory.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(directory.path().join("next"), "b").unwrap();
        std::os::unix::fs::symlink(directory.path().join("next"), &path).unwrap();
        assert!(notices(&mut file, 3).await);
    }
}
