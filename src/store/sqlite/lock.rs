//! One process per file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{OpenError, Settings};

/// The right to open a file, held against every other process until the store that was opened with it has ended.
#[derive(Debug)]
pub struct Lock {
    pub(super) settings: Settings,
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Creates the file if there is none and locks it; `None` while another process holds it.
    ///
    /// The lock is the operating system's, on the file `<path>.lock`: it goes when the process does, however it ends.
    /// The path is resolved first, so that two names of one file exclude each other. The lock file stays where it is,
    /// since removing it would let two processes lock two files of that name.
    ///
    /// # Errors
    /// When the files cannot be created or locked.
    pub fn try_acquire(settings: &Settings) -> Result<Option<Self>, OpenError> {
        let fail = |source| OpenError::Io { path: settings.path.clone(), source };
        let path = resolve(&settings.path).map_err(fail)?;
        let file = open_private(OpenOptions::new().write(true).create(true), &with_suffix(&path, ".lock"));
        let file = file.map_err(fail)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { settings: settings.clone(), path, _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(fail(source)),
        }
    }

    /// Where the file is: absolute and without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The kind of file system at `path` (or where it would be created) if what is written there does not outlive a
/// restart of the machine or the container: `tmpfs` or `overlayfs`.
#[must_use]
pub fn filesystem_warning(path: &Path) -> Option<&'static str> {
    // From linux/magic.h.
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    const OVERLAYFS: u64 = 0x794c_7630;
    let absolute = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    // Its type differs between platforms, its value does not.
    match rustix::fs::statfs(existing).ok()?.f_type as u64 {
        TMPFS | RAMFS => Some("tmpfs"),
        OVERLAYFS => Some("overlayfs"),
        _ => None,
    }
}

/// The resolved path of a file that is created where it is missing, readable by its owner only: it holds answers.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    // Not opened where it exists: closing any descriptor of a database drops the locks that SQLite has on it.
    match open_private(OpenOptions::new().write(true).create_new(true), path) {
        Ok(created) => {
            created.sync_all()?;
            let path = fs::canonicalize(path)?;
            sync_directory(&path)?;
            Ok(path)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs::canonicalize(path),
        Err(error) => Err(error),
    }
}

pub(super) fn open_private(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.mode(0o600).open(path)
}

/// Makes the names in a file's directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_holds_a_file_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let link = dir.path().join("link.db");
        let first = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Lock::try_acquire(&Settings::new(&path)).unwrap().is_none());
        assert!(Lock::try_acquire(&Settings::new(&link)).unwrap().is_none());
        drop(first);
        // A process that another test has just spawned shares the lock for a moment.
        let second = std::iter::repeat_with(|| Lock::try_acquire(&Settings::new(&link)).unwrap())
            .find_map(std::convert::identity)
            .unwrap();
        assert_eq!(second.path(), fs::canonicalize(&path).unwrap());
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing").join("a.db");
        let error = Lock::try_acquire(&Settings::new(&path)).unwrap_err();
        assert!(error.to_string().contains("missing/a.db"), "{error}");
    }

    #[test]
    fn new_files_are_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let _lock = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn file_systems_that_forget_are_told() {
        if Path::new("/dev/shm").exists() {
            assert_eq!(filesystem_warning(Path::new("/dev/shm/not/yet/there.db")), Some("tmpfs"));
        }
        assert_eq!(filesystem_warning(Path::new("/proc/self")), None);
    }
}
