//! What was done to the files of a store that is in use.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

/// The damage to the store's files.
#[derive(Debug)]
pub(super) enum Damage {
    /// A file other than the log was removed or replaced.
    Gone(PathBuf),
    /// The log was removed or replaced. As far as this process can see, it was intact.
    LogGone(PathBuf),
    /// The content of a file was changed.
    Changed(PathBuf),
    /// The database has shrunk.
    Shrunk(PathBuf),
    /// A file cannot be read, or may not be looked at.
    Unreadable(PathBuf, io::Error),
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone(path) | Self::LogGone(path) => {
                write!(f, "{} was removed or replaced while it was in use", path.display())
            }
            Self::Changed(path) => write!(f, "{} was cut or overwritten while it was in use", path.display()),
            Self::Shrunk(path) => write!(
                f,
                "{} became smaller while it was in use: another program cut it, or ran VACUUM on it; end oncegate before \
                 you run VACUUM",
                path.display()
            ),
            Self::Unreadable(path, error) => write!(f, "{} cannot be read: {error}", path.display()),
        }
    }
}

impl Damage {
    /// Of a file that is not where it was; or what kept this process from looking, such as the rights of its directory.
    pub(super) fn of_missing(path: &Path) -> Self {
        match fs::metadata(path) {
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Self::Unreadable(path.to_owned(), error)
            }
            _ => Self::Gone(path.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Root may look everywhere, but for a link that leads to itself.
    #[test]
    fn a_file_that_cannot_be_looked_at_is_not_said_to_be_gone() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("loop");
        std::os::unix::fs::symlink(&link, &link).unwrap();
        let unseen = Damage::of_missing(&link.join("gate.db")).to_string();
        assert!(unseen.contains("gate.db cannot be read: "), "{unseen}");
        let gone = Damage::of_missing(&directory.path().join("gate.db")).to_string();
        assert!(gone.contains("gate.db was removed or replaced"), "{gone}");
    }
}
