//! One process per file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{OpenError, Settings};

/// The right to open a file, held against every other process until the store that was opened with it has ended.
#[derive(Debug)]
pub struct Lock {
    pub(super) settings: Settings,
    path: PathBuf,
    /// The database and its lock file, each with the name that it must keep. They stay open as long as SQLite has the
    /// database: closing any descriptor of it drops the locks that SQLite has on it.
    held: [(PathBuf, File); 2],
}

impl Lock {
    /// Creates the file if there is none and locks it; `None` while another process holds it.
    ///
    /// The locks are the operating system's, on `<path>.lock` and on the file itself: they go when the process does,
    /// however it ends. The path is resolved first, so that two names of one file exclude each other. The lock file
    /// stays where it is, since removing it would let two processes lock two files of that name.
    ///
    /// # Errors
    /// When the files cannot be created or locked, or the file has a second name: its log stands beside one name only.
    pub fn try_acquire(settings: &Settings) -> Result<Option<Self>, OpenError> {
        let fail = |source| OpenError::Io { path: settings.path.clone(), source };
        let path = resolve(&settings.path).map_err(fail)?;
        let lock_path = with_suffix(&path, ".lock");
        let lock_file = open_private(OpenOptions::new().write(true).create(true), &lock_path).map_err(fail)?;
        if !lock(&lock_file).map_err(fail)? {
            return Ok(None);
        }
        let database = open_private(OpenOptions::new().read(true).write(true), &path).map_err(fail)?;
        if !lock(&database).map_err(fail)? {
            return Ok(None);
        }
        if database.metadata().map_err(fail)?.nlink() > 1 {
            return Err(OpenError::Linked { path });
        }
        let held = [(path.clone(), database), (lock_path, lock_file)];
        Ok(Some(Self { settings: settings.clone(), path, held }))
    }

    /// The first of the files that are not any more where they were: removed, renamed or replaced. Another process could
    /// take a new file of that name for the store.
    pub(super) fn missing(&self) -> Option<&Path> {
        let is_in_place = |path: &Path, file: &File| {
            let (there, here) = (fs::metadata(path).ok()?, file.metadata().ok()?);
            Some((there.dev(), there.ino()) == (here.dev(), here.ino()))
        };
        self.held.iter().find(|(path, file)| is_in_place(path, file) != Some(true)).map(|(path, _)| path.as_path())
    }

    /// Where the file is: absolute and without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Locks a file; false while another process holds it.
fn lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
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
    fn a_file_of_two_names_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        drop(Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap());
        fs::hard_link(&path, dir.path().join("b.db")).unwrap();
        let error = Lock::try_acquire(&Settings::new(&path)).unwrap_err();
        assert!(matches!(error, OpenError::Linked { .. }), "{error}");
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed() {
        for suffix in ["", ".lock"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.db");
            let lock = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
            assert_eq!(lock.missing(), None);
            let name = with_suffix(lock.path(), suffix);
            fs::remove_file(&name).unwrap();
            assert_eq!(lock.missing(), Some(name.as_path()));
            fs::write(&name, "").unwrap();
            assert_eq!(lock.missing(), Some(name.as_path()));
        }
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
